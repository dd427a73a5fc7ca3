//! `polign.recall(index, ...)`: the recall that searches have, measured.

use pgrx::{PgSqlErrorCode, prelude::*};

use super::target::OpenIndex;
use crate::{
    am::search_params::session_target,
    error::{Error, OrRaise, Result},
    guc,
    recall::{self, Indexed, Measured, queries::MAX_QUERIES},
};

/// As many neighbours as the deepest recall curve is about.
const MAX_K: i32 = 1_000;

type Row = (
    name!(queries, i32),
    name!(k, i32),
    name!(recall, Option<f64>),
    name!(low, Option<f64>),
    name!(high, Option<f64>),
    name!(target_recall, Option<f64>),
    name!(cells_probed, Option<f64>),
);

/// With rows of the table as queries.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn recall_of_rows(
    index: pg_sys::Oid,
    queries: i32,
    k: i32,
) -> TableIterator<
    'static,
    (
        name!(queries, i32),
        name!(k, i32),
        name!(recall, Option<f64>),
        name!(low, Option<f64>),
        name!(high, Option<f64>),
        name!(target_recall, Option<f64>),
        name!(cells_probed, Option<f64>),
    ),
> {
    let measure = || {
        let count = within("queries", queries, MAX_QUERIES as i32)?;
        run(index, k, |indexed, k| recall::of_rows(indexed, count, k))
    };
    TableIterator::once(measure().or_raise())
}

/// With the vectors that a statement returns. The text is taken as the bytes that it is: a database need not be in
/// UTF-8.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn recall_of_statement(
    index: pg_sys::Oid,
    query: &[u8],
    k: i32,
) -> TableIterator<
    'static,
    (
        name!(queries, i32),
        name!(k, i32),
        name!(recall, Option<f64>),
        name!(low, Option<f64>),
        name!(high, Option<f64>),
        name!(target_recall, Option<f64>),
        name!(cells_probed, Option<f64>),
    ),
> {
    let row = run(index, k, |indexed, k| recall::of_statement(indexed, query, k));
    TableIterator::once(row.or_raise())
}

fn run(
    index: pg_sys::Oid,
    k: i32,
    measure: impl FnOnce(&Indexed, usize) -> Result<Measured>,
) -> Result<Row> {
    let neighbours = within("k", k, MAX_K)?;
    let open = OpenIndex::for_reader(index)?;
    let indexed = Indexed::of(open.pages())?;
    let target = (guc::NPROBE.get() == 0).then(|| session_target(open.pages()));
    // The statements lock what they read, the table first.
    drop(open);
    let Measured { queries, recall, cells_probed } = measure(&indexed, neighbours)?;
    Ok((
        queries as i32,
        k,
        recall.map(|measured| measured.recall),
        recall.map(|measured| measured.low),
        recall.map(|measured| measured.high),
        target,
        cells_probed,
    ))
}

fn within(name: &str, value: i32, most: i32) -> Result<usize> {
    match usize::try_from(value) {
        Ok(wanted) if (1..=most).contains(&value) => Ok(wanted),
        _ => Err(Error::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("\"{name}\" must be from 1 to {most}, not {value}"),
        )),
    }
}
