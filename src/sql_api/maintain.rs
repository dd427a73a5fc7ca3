//! `polign.flush(index)`, `polign.compact(index)` and `polign.calibrate(index, query)`: maintenance now.

use std::ffi::CStr;

use pgrx::{PgSqlErrorCode, prelude::*};

use super::target::OpenIndex;
use crate::{
    error::{Error, OrRaise, Result},
    maintain::{calibrate::Queries, task::Task},
    pages::{Here, MaintenanceLock},
    recall::{Indexed, queries},
    worker::maintenance,
};

/// Moves the rows that an index keeps for itself into a segment in its store, and waits for it. Returns
/// how many there were.
#[pg_extern(sql = false, name = "flush")]
fn flush_index(index: pg_sys::Oid) -> i64 {
    run(index, Task::Flush, c"polign.flush()", no_queries).or_raise()
}

/// Moves inserted rows to the store, merges the segments of earlier flushes into the others, drops dead
/// rows, and splits and merges cells. Returns how many rows were written.
#[pg_extern(sql = false, name = "compact")]
fn compact_index(index: pg_sys::Oid) -> i64 {
    run(index, Task::Compact, c"polign.compact()", no_queries).or_raise()
}

/// Fits the recall curves of an index to rows of the table, as a build does. Returns how many rows served as queries.
#[pg_extern(sql = false)]
fn calibrate_to_rows(index: pg_sys::Oid) -> i64 {
    run(index, Task::Calibrate, c"polign.calibrate()", no_queries).or_raise()
}

/// Fits them to the vectors that a statement returns, whose text is taken as the bytes that it is. Returns how many
/// were used.
#[pg_extern(sql = false)]
fn calibrate_to_queries(index: pg_sys::Oid, query: &[u8]) -> i64 {
    let queries = || calibrating_queries(index, query);
    run(index, Task::Calibrate, c"polign.calibrate()", queries).or_raise()
}

/// Fewer queries than this say little: of 100, each of ten neighbours, the recall of all others is known to two
/// points.
const LEAST_QUERIES: usize = 100;

fn calibrating_queries(index: pg_sys::Oid, statement: &[u8]) -> Result<Queries> {
    // Not open while the statement runs, which may take long.
    let indexed = Indexed::of(OpenIndex::for_maintenance(index)?.pages())?;
    let values = queries::values_of_statement(&indexed, statement)?;
    let found = values.len() / indexed.dim.max(1);
    if found < LEAST_QUERIES {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("the query returns {found} vectors, and a calibration needs {LEAST_QUERIES}"),
        )
        .detail("NULL is not counted, nor is under cosine distance a vector that is zero.")
        .hint(format!(
            "Give more queries, up to {}; polign.calibrate() without a query calibrates with rows.",
            queries::MAX_QUERIES
        )));
    }
    Ok(Queries { dim: indexed.dim as u32, values })
}

fn no_queries() -> Result<Queries> {
    Ok(Queries::default())
}

fn run(
    index: pg_sys::Oid,
    task: Task,
    name: &CStr,
    queries: impl FnOnce() -> Result<Queries>,
) -> Result<i64> {
    // SAFETY: only raises.
    unsafe { pg_sys::PreventCommandDuringRecovery(name.as_ptr()) };
    OpenIndex::check_owner(index)?;
    let queries = queries()?;
    let open = OpenIndex::for_maintenance(index)?;
    if open.pages().is_shared() {
        // Not in this transaction: its snapshot would hold back VACUUM for as long as the upload takes.
        drop(open);
        return maintenance::run(index, task, &queries);
    }
    let _lock = MaintenanceLock::acquire(index);
    task.perform(&queries, &mut Here(open.pages()), &mut |_| ())
}
