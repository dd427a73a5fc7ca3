//! Vectors to search for: rows of the table, or what a statement of the user returns.

use std::ffi::{CStr, CString};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::reservoir::Reservoir;

use super::{
    Indexed,
    spi::{Cursor, Session},
};
use crate::{
    am::insert::item_pointer_id,
    error::{Error, Result},
    vector::{self, VectorDatum},
};

/// More queries than this are sampled. As many as a build calibrates with, about: a mean recall is known to
/// half a point then, and the searches take seconds.
pub const MAX_QUERIES: usize = 1_000;
/// Rows taken from a statement at a time: 400 kB at 384 dimensions, 16 MB at 16,000.
pub(super) const BATCH: usize = 256;

/// A vector to search for, as a value of the type of the index without TOAST.
pub struct QueryVector {
    /// Aligned as a value must be.
    words: Vec<u64>,
    /// The row that it comes from, as [`ctid`] gives it; none if it is a query of the user.
    pub row: Option<u64>,
}

impl QueryVector {
    fn new(value: &VectorDatum<'_>, row: Option<u64>) -> Self {
        // SAFETY: a value without TOAST, of this many bytes, is copied into as many words as hold it.
        unsafe {
            let from = value.datum().cast_mut_ptr::<u8>();
            let bytes = pgrx::varsize_any(from.cast());
            let mut words = vec![0u64; bytes.div_ceil(size_of::<u64>())];
            std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast(), bytes);
            Self { words, row }
        }
    }

    /// The value, as long as this lives.
    pub fn datum(&self) -> pg_sys::Datum {
        pg_sys::Datum::from(self.words.as_ptr())
    }
}

/// A number for a row by its place in the table.
///
/// # Safety
/// `value` is a ctid.
pub(super) unsafe fn ctid(value: pg_sys::Datum) -> u64 {
    // SAFETY: by contract.
    unsafe { item_pointer_id(value.cast_mut_ptr()) }
}

/// An even sample of the rows that the caller sees: the same one each time, as long as the table does not
/// change, so that two measurements are of the same queries.
pub(super) fn rows(session: &Session, indexed: &Indexed, count: usize) -> Result<Vec<QueryVector>> {
    let plan = session.prepare(&indexed.all_rows(), &[], 0)?;
    let mut sample = Reservoir::new(count);
    each(plan.open(&[]), |row| {
        let (Some(place), Some(value)) = (row(0), row(1)) else { return Ok(()) };
        // SAFETY: the columns of this statement.
        let (place, value) = unsafe { (ctid(place), VectorDatum::new(value, indexed.element)?) };
        if !vector::is_indexable(&value.to_f32(), indexed.metric)? {
            return Ok(());
        }
        sample.offer(|| Ok(QueryVector::new(&value, Some(place))))
    })?;
    Ok(sample.into_kept())
}

/// The vectors that a statement of the user returns, an even sample if there are more than [`MAX_QUERIES`]. Those
/// that no row is near to are left out: NULL, and under cosine zero.
pub(super) fn of_statement(
    session: &Session,
    indexed: &Indexed,
    statement: &[u8],
) -> Result<Vec<QueryVector>> {
    let statement = CString::new(statement).map_err(|_| not_a_statement())?;
    let plan = session.prepare(&statement, &[], 0)?;
    if !plan.returns_rows() {
        return Err(not_a_statement());
    }
    let cursor = plan.open(&[]);
    check_columns(&cursor.columns(), indexed)?;
    let mut sample = Reservoir::new(MAX_QUERIES);
    each(cursor, |row| {
        let Some(value) = row(0) else { return Ok(()) };
        // SAFETY: of the type that was checked.
        let value = unsafe { VectorDatum::new(value, indexed.element)? };
        if value.dim() != indexed.dim {
            return Err(vector::different_dimensions(indexed.dim, value.dim()).detail(format!(
                "Index \"{}\" has {} dimensions, and a vector that the query returns has {}.",
                indexed.name,
                indexed.dim,
                value.dim()
            )));
        }
        if !vector::is_indexable(&value.to_f32(), indexed.metric)? {
            return Ok(());
        }
        sample.offer(|| Ok(QueryVector::new(&value, None)))
    })?;
    if sample.seen() > MAX_QUERIES as u64 {
        let seen = sample.seen();
        pgrx::notice!("the query returns {seen} vectors: an even sample of {MAX_QUERIES} is used");
    }
    Ok(sample.into_kept())
}

/// The vectors of a statement of the user, one after the other.
pub fn values_of_statement(indexed: &Indexed, statement: &[u8]) -> Result<Vec<f32>> {
    let session = Session::connect()?;
    let mut values = Vec::new();
    for query in of_statement(&session, indexed, statement)? {
        // SAFETY: a value of the type of the index.
        let query = unsafe { VectorDatum::new(query.datum(), indexed.element)? };
        values.extend_from_slice(&query.to_f32());
    }
    Ok(values)
}

/// Calls `visit` with each row that a statement returns.
pub(super) fn each(
    mut cursor: Cursor<'_>,
    mut visit: impl FnMut(&dyn Fn(i32) -> Option<pg_sys::Datum>) -> Result<()>,
) -> Result<()> {
    loop {
        let batch = cursor.fetch(BATCH);
        let rows = batch.rows();
        if rows.len() == 0 {
            return Ok(());
        }
        for row in rows {
            pgrx::check_for_interrupts!();
            visit(&row)?;
        }
    }
}

fn check_columns(columns: &[pg_sys::Oid], indexed: &Indexed) -> Result<()> {
    // SAFETY: looks types up.
    let wanted = unsafe { pg_sys::getBaseType(indexed.value_type) };
    match columns {
        // SAFETY: likewise.
        [one] if unsafe { pg_sys::getBaseType(*one) } == wanted => Ok(()),
        _ => {
            let name = type_name(wanted);
            let found: Vec<String> = columns.iter().map(|&column| type_name(column)).collect();
            Err(Error::new(
                PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH,
                format!("the query must return one column of type {name}"),
            )
            .detail(format!("It returns ({}).", found.join(", ")))
            .hint(format!(
                "Index \"{}\" is searched by values of type {name}: select one such column, or cast it.",
                indexed.name
            )))
        }
    }
}

fn type_name(oid: pg_sys::Oid) -> String {
    // SAFETY: gives a NUL-terminated string for every number.
    unsafe { CStr::from_ptr(pg_sys::format_type_be(oid)) }.to_string_lossy().into_owned()
}

fn not_a_statement() -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
        "the query is not one statement that returns rows",
    )
    .hint("Give one SELECT that returns vectors, as in 'SELECT embedding FROM my_queries'.")
}
