//! `polign.index_info(index)`: what an index holds and where.

use std::collections::HashSet;

use pgrx::prelude::*;
use polign_engine::root::CellStats;

use super::target::OpenIndex;
use crate::{
    am::{root_cache, search_params::target_recall},
    error::{OrRaise, Result},
    guc,
    maintain::{
        advice::{Condition, advice},
        calibrate,
        compact::{self, Effort},
    },
    pages::{delta::vacuum as delta, tombstones::TombstoneSet},
};

type Row = (
    name!(rows, i64),
    name!(delta_rows, i64),
    name!(tombstones, i64),
    name!(dead_share, f64),
    name!(lists, i32),
    name!(cell_rows_min, i64),
    name!(cell_rows_avg, f64),
    name!(cell_rows_max, i64),
    name!(cell_skew, f64),
    name!(drift, Option<f64>),
    name!(store_bytes, i64),
    name!(objects, i32),
    name!(delta_segments, i32),
    name!(dimensions, i32),
    name!(metric, String),
    name!(target_recall, f64),
    name!(format, i32),
    name!(epoch, i64),
    name!(index_id, String),
    name!(store, Option<String>),
    name!(recommendation, Option<String>),
);

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn index_info(
    index: pg_sys::Oid,
) -> TableIterator<
    'static,
    (
        name!(rows, i64),
        name!(delta_rows, i64),
        name!(tombstones, i64),
        name!(dead_share, f64),
        name!(lists, i32),
        name!(cell_rows_min, i64),
        name!(cell_rows_avg, f64),
        name!(cell_rows_max, i64),
        name!(cell_skew, f64),
        name!(drift, Option<f64>),
        name!(store_bytes, i64),
        name!(objects, i32),
        name!(delta_segments, i32),
        name!(dimensions, i32),
        name!(metric, String),
        name!(target_recall, f64),
        name!(format, i32),
        name!(epoch, i64),
        name!(index_id, String),
        name!(store, Option<String>),
        name!(recommendation, Option<String>),
    ),
> {
    TableIterator::once(describe(index).or_raise())
}

fn describe(index: pg_sys::Oid) -> Result<Row> {
    let open = OpenIndex::for_reader(index)?;
    let pages = open.pages();
    let (meta, root) = root_cache::current(pages)?;
    let delta = delta::count(pages)?;
    let dead = pages.retry(|| TombstoneSet::read(pages, &meta))?.dead();

    // An index that was created empty has one cell, which exists in memory only.
    let cells = if meta.sections.is_empty() { CellStats::default() } else { root.cell_stats() };
    let drift = (meta.built_spread > 0.0 && cells.rows > 0)
        .then(|| cells.spread / f64::from(meta.built_spread) - 1.0);
    let all = meta.rows + delta.live + delta.dead;
    let dead_share = (dead + delta.dead) as f64 / all.max(1) as f64;
    let rows = meta.rows.saturating_sub(dead) + delta.live;
    let condition = Condition {
        rows,
        delta_rows: delta.live,
        delta_limit: guc::DELTA_LIMIT.get() as u64,
        failures: meta.retry.failures,
        dead_share,
        cell_skew: cells.skew,
        drift,
        compaction_due: compact::is_due(pages, Effort::Due)?,
        calibration_due: calibrate::due(pages)?,
    };
    let delta_segments: HashSet<u32> =
        root.delta_pieces().iter().map(|piece| piece.segment.get()).collect();
    let metric = match meta.metric {
        polign_engine::Metric::L2 => "l2",
        polign_engine::Metric::InnerProduct => "ip",
        polign_engine::Metric::Cosine => "cosine",
    };
    Ok((
        rows as i64,
        delta.live as i64,
        dead as i64,
        dead_share,
        cells.cells as i32,
        cells.rows_min as i64,
        cells.rows_avg(),
        cells.rows_max as i64,
        cells.skew,
        drift,
        root.object_bytes() as i64,
        root.segments().len() as i32,
        delta_segments.len() as i32,
        meta.dim as i32,
        metric.to_owned(),
        target_recall(pages),
        meta.min_reader.into(),
        meta.epoch as i64,
        meta.index_id.to_string(),
        Some(meta.store_url.clone()).filter(|url| !url.is_empty()),
        advice(&condition),
    ))
}
