//! `polign.last_scan()`: what the last scan of this session did.

use std::time::Duration;

use pgrx::prelude::*;

use crate::am::last_scan;

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn last_scan() -> TableIterator<
    'static,
    (
        name!(cells, i64),
        name!(cells_probed, i64),
        name!(codes_scanned, i64),
        name!(rows_reranked, i64),
        name!(heap_rows, i64),
        name!(parts_missing, i64),
        name!(waves, i64),
        name!(gets, i64),
        name!(get_bytes, i64),
        name!(plan_ms, f64),
        name!(scan_ms, f64),
        name!(rerank_ms, f64),
        name!(wait_ms, f64),
        name!(total_ms, f64),
    ),
> {
    // No row if there was none.
    let row = last_scan::get().map(|scan| {
        let (search, source, times) = (scan.search, scan.source, scan.times);
        (
            scan.cells as i64,
            search.cells_probed as i64,
            search.codes_scanned as i64,
            search.rows_refined as i64,
            scan.heap_rows as i64,
            search.parts_missing as i64,
            search.waves as i64,
            source.gets as i64,
            source.get_bytes as i64,
            milliseconds(times.plan),
            milliseconds(times.scan),
            milliseconds(times.search.saturating_sub(times.scan)),
            milliseconds(source.waited),
            milliseconds(times.total),
        )
    });
    TableIterator::new(row)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
