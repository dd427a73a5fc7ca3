//! Every row of the table on its way to its cell.

use std::sync::Arc;

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::{
    build::{Calibrator, CellStore, Pipeline, PipelineGone, RowBatch, Trained},
    quantize::RowError,
};

use super::{
    heap::{Build, HeapRow},
    phases,
    spill::TemporaryFile,
    spill_failed,
    threads::{self, Naps},
};
use crate::error::{Error, Result};

/// Bytes of a batch of rows, about.
const BATCH_BYTES: usize = 6 << 20;

/// Rows of the table: what its last VACUUM or ANALYZE said, scaled to its size now, else from its size.
pub fn estimate(build: Build) -> f64 {
    let (mut pages, mut tuples, mut all_visible) = (0, 0.0, 0.0);
    // SAFETY: the table is open; the results are on the stack.
    unsafe {
        pg_sys::estimate_rel_size(
            build.heap,
            std::ptr::null_mut(),
            &mut pages,
            &mut tuples,
            &mut all_visible,
        );
    }
    tuples.max(1.0)
}

/// Reads every tuple, assigns it to its cell and leaves its record in `store`. Returns how many live
/// rows the table has, and the calibrator.
pub fn assign_all(
    build: Build,
    trained: Trained,
    calibrator: Calibrator,
    pool: Arc<rayon::ThreadPool>,
    store: &mut CellStore<TemporaryFile>,
) -> Result<(f64, Calibrator)> {
    let batch_rows = (BATCH_BYTES / (4 * build.dim)).clamp(64, 4_096);
    let pipeline =
        threads::with_signals_blocked(|| Pipeline::start(trained, Some(calibrator), pool))
            .map_err(|error| threads::no_threads(&error))?;
    let mut feed =
        Feed { pipeline, store, batch: RowBatch::default(), batch_rows, read: 0, failed: None };
    let heap_tuples = build.scan_all(&mut |row| feed.row(row));
    feed.finish().map(|calibrator| (heap_tuples, calibrator))
}

struct Feed<'a> {
    pipeline: Pipeline,
    store: &'a mut CellStore<TemporaryFile>,
    batch: RowBatch,
    batch_rows: usize,
    read: u64,
    /// The first error; the rest of the scan passes by.
    failed: Option<Error>,
}

impl Feed<'_> {
    fn row(&mut self, row: HeapRow<'_>) {
        if self.failed.is_some() {
            return;
        }
        self.batch.ids.push(row.id);
        self.batch.rows.extend_from_slice(row.vector);
        self.read += 1;
        if self.batch.ids.len() >= self.batch_rows
            && let Err(error) = self.submit()
        {
            self.failed = Some(error);
        }
    }

    fn submit(&mut self) -> Result<()> {
        let mut batch = std::mem::take(&mut self.batch);
        let mut naps = Naps::default();
        while let Some(back) = self.pipeline.try_submit(batch).map_err(gone)? {
            batch = back;
            self.receive()?;
            naps.sleep();
        }
        phases::tuples_done(self.read);
        self.receive()
    }

    fn receive(&mut self) -> Result<()> {
        while let Some(batch) = self.pipeline.try_receive().map_err(gone)? {
            let batch = batch.map_err(not_indexable)?;
            self.store.add(&batch.cells, &batch.records).map_err(spill_failed)?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Calibrator> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if !self.batch.ids.is_empty() {
            self.submit()?;
        }
        let mut naps = Naps::default();
        while self.pipeline.in_flight() > 0 {
            self.receive()?;
            if self.pipeline.in_flight() > 0 {
                naps.sleep();
            }
        }
        let (_, calibrator) = self.pipeline.finish().map_err(gone)?;
        calibrator.ok_or_else(|| gone(PipelineGone))
    }
}

fn gone(error: PipelineGone) -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, error.to_string())
}

fn not_indexable(error: RowError) -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_DATA_EXCEPTION, "a row cannot be indexed")
        .detail(format!("{error}."))
}
