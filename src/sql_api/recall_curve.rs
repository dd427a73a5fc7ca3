//! `polign.recall_curve(index)`: what a number of cells gives, as far as is known.

use pgrx::prelude::*;
use polign_engine::root::{Estimate, FittedTo};

use super::target::OpenIndex;
use crate::{
    am::root_cache,
    error::{OrRaise, Result},
    guc::TARGET_RECALL_MIN,
};

/// A row for each number of cells that was calibrated.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn recall_curve(
    index: pg_sys::Oid,
) -> TableIterator<
    'static,
    (
        name!(k, i32),
        name!(nprobe, i32),
        name!(cells, i32),
        name!(recall, f64),
        name!(target_recall, Option<f64>),
        name!(samples, i32),
        name!(fitted_to, String),
    ),
> {
    let (estimates, cells, fitted_to) = read(index).or_raise();
    TableIterator::new(estimates.into_iter().map(move |estimate| {
        (
            estimate.k as i32,
            estimate.nprobe as i32,
            cells as i32,
            estimate.recall,
            Some(estimate.target_recall).filter(|&target| target >= TARGET_RECALL_MIN),
            estimate.samples as i32,
            fitted_to.to_owned(),
        )
    }))
}

fn read(index: pg_sys::Oid) -> Result<(Vec<Estimate>, u32, &'static str)> {
    let open = OpenIndex::for_reader(index)?;
    let (_, root) = root_cache::current(open.pages())?;
    let cells = root.cell_count() as u32;
    let fitted_to = match root.curves().fitted_to() {
        FittedTo::Rows => "rows",
        FittedTo::Queries { .. } => "queries",
    };
    Ok((root.curves().estimates(cells), cells, fitted_to))
}
