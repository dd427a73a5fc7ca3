//! Searches of an index beside exact search.

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::recall::{MeasuredRecall, Nearest};

use super::{
    Indexed,
    forced_plan::ForcedPlan,
    queries::{self, QueryVector, ctid, each},
    spi::Session,
};
use crate::{
    am::last_scan,
    error::{Error, Result},
    vector::VectorDatum,
};

/// What came of it.
pub struct Measured {
    /// Queries that count: those for which there is something to be found.
    pub queries: usize,
    /// Nothing if there are none.
    pub recall: Option<MeasuredRecall>,
    /// Cells that a search opened, in the mean.
    pub cells_probed: Option<f64>,
}

/// With rows of the table as queries. A row is not counted as its own neighbour.
pub fn of_rows(indexed: &Indexed, count: usize, k: usize) -> Result<Measured> {
    let session = Session::connect()?;
    let queries = queries::rows(&session, indexed, count)?;
    measure(&session, indexed, &queries, k)
}

/// With the vectors that a statement of the user returns.
pub fn of_statement(indexed: &Indexed, statement: &[u8], k: usize) -> Result<Measured> {
    let session = Session::connect()?;
    let queries = queries::of_statement(&session, indexed, statement)?;
    measure(&session, indexed, &queries, k)
}

/// All statements read by the snapshot of the statement that called, so that they see the same rows.
fn measure(
    session: &Session,
    indexed: &Indexed,
    queries: &[QueryVector],
    k: usize,
) -> Result<Measured> {
    let nearest = exact(session, indexed, queries, k)?;
    // One more where a row may find itself.
    let limit = k + usize::from(queries.iter().any(|query| query.row.is_some()));
    let generic = pg_sys::CURSOR_OPT_GENERIC_PLAN;
    let plan = session.prepare(&indexed.search(limit), &[indexed.value_type], generic)?;
    let (mut shares, mut cells) = (Vec::new(), 0);
    for (query, nearest) in queries.iter().zip(&nearest) {
        pgrx::check_for_interrupts!();
        let cursor = {
            // It is planned when it is first executed, and again when something has changed. Functions that it
            // calls run after that, and plan as they like.
            let _forced = ForcedPlan::by(indexed.index);
            plan.open(&[query.datum()])
        };
        if cursor.scanned_index() != Some(indexed.index) {
            return Err(not_used(indexed));
        }
        let mut found = Vec::new();
        each(cursor, |row| {
            let (Some(place), Some(distance)) = (row(0), row(1)) else { return Ok(()) };
            // SAFETY: the columns of the search.
            let place = unsafe { ctid(place) };
            if query.row != Some(place) {
                found.push(f64::from_bits(distance.value() as u64));
            }
            Ok(())
        })?;
        found.truncate(k);
        if let Some(share) = nearest.share_found(&found) {
            shares.push(share);
            cells += last_scan::cells_probed();
        }
    }
    Ok(Measured {
        queries: shares.len(),
        recall: MeasuredRecall::of(&shares),
        cells_probed: (!shares.is_empty()).then(|| cells as f64 / shares.len() as f64),
    })
}

/// The distances of the rows nearest to each query: one pass over the table, by the function that the index's
/// operator calls, so that equal distances are equal to the last bit.
fn exact(
    session: &Session,
    indexed: &Indexed,
    queries: &[QueryVector],
    k: usize,
) -> Result<Vec<Nearest>> {
    let mut nearest = vec![Nearest::new(k); queries.len()];
    if queries.is_empty() {
        return Ok(nearest);
    }
    let mut function = pg_sys::FmgrInfo::default();
    // SAFETY: the function of an operator.
    unsafe { pg_sys::fmgr_info(indexed.distance, &mut function) };
    let plan = session.prepare(&indexed.all_rows(), &[], 0)?;
    each(plan.open(&[]), |row| {
        let (Some(place), Some(value)) = (row(0), row(1)) else { return Ok(()) };
        // SAFETY: the columns of this statement.
        let (place, value) = unsafe { (ctid(place), VectorDatum::new(value, indexed.element)?) };
        for (query, nearest) in queries.iter().zip(&mut nearest) {
            if query.row == Some(place) {
                continue;
            }
            // SAFETY: it takes two values of the indexed type, and gives a double.
            let distance = unsafe {
                let (value, query) = (value.datum(), query.datum());
                pg_sys::FunctionCall2Coll(&mut function, pg_sys::InvalidOid, value, query)
            };
            nearest.offer(f64::from_bits(distance.value() as u64));
        }
        Ok(())
    })?;
    Ok(nearest)
}

fn not_used(indexed: &Indexed) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("a search does not use index \"{}\"", indexed.name),
    )
    .detail("The planner prefers another plan, or may not use an index that is newer than the transaction.")
    .hint("See EXPLAIN of such a search; try again in a new transaction, or drop the index that is used instead.")
}
