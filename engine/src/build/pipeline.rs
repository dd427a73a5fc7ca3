//! Rows on their way from the heap to their cells: projected, assigned and reduced to plane-2 records
//! on other threads, while the caller's thread reads the next batch.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, channel, sync_channel},
    },
    thread::JoinHandle,
};

use rayon::{ThreadPool, prelude::*};

use super::{Calibrator, Trained, is_left_out};
use crate::quantize::{RowError, plane2};

/// Batches waiting besides the one in work.
const QUEUED: usize = 2;

/// Rows as the user gave them.
#[derive(Debug, Clone, Default)]
pub struct RowBatch {
    /// n x dim.
    pub rows: Vec<f32>,
    pub ids: Vec<u64>,
}

/// Rows reduced to records, with their cells.
#[derive(Debug, Clone, Default)]
pub struct AssignedBatch {
    pub cells: Vec<u32>,
    /// Plane-2 records, one for each entry of `cells`.
    pub records: Vec<u8>,
    /// Rows left out: zero vectors under cosine.
    pub left_out: u64,
}

/// What the caller gets back.
pub type PipelineResult = Result<AssignedBatch, RowError>;

/// The pipeline's other end is gone: a bug, since it ends only after the last batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the build's worker thread ended early")]
pub struct PipelineGone;

/// A worker thread and its pool. Dropping it stops the work and joins.
pub struct Pipeline {
    input: Option<SyncSender<RowBatch>>,
    output: Receiver<PipelineResult>,
    worker: Option<JoinHandle<(Trained, Option<Calibrator>)>>,
    stop: Arc<AtomicBool>,
    in_flight: usize,
}

impl Pipeline {
    /// Starts the worker. The thread inherits the caller's signal mask: block signals first.
    pub fn start(
        trained: Trained,
        calibrator: Option<Calibrator>,
        pool: Arc<ThreadPool>,
    ) -> std::io::Result<Self> {
        let (input, batches) = sync_channel::<RowBatch>(QUEUED);
        let (results, output) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let worker = std::thread::Builder::new().name("polign-build".into()).spawn(move || {
            let mut calibrator = calibrator;
            for batch in batches {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let result =
                    pool.install(|| process(&trained, &mut calibrator, &batch, &pool, &stopped));
                if results.send(result).is_err() {
                    break;
                }
            }
            (trained, calibrator)
        })?;
        Ok(Self { input: Some(input), output, worker: Some(worker), stop, in_flight: 0 })
    }

    /// Hands over a batch unless the queue is full; then it comes back.
    pub fn try_submit(&mut self, batch: RowBatch) -> Result<Option<RowBatch>, PipelineGone> {
        let Some(input) = &self.input else { return Err(PipelineGone) };
        match input.try_send(batch) {
            Ok(()) => {
                self.in_flight += 1;
                Ok(None)
            }
            Err(TrySendError::Full(batch)) => Ok(Some(batch)),
            Err(TrySendError::Disconnected(_)) => Err(PipelineGone),
        }
    }

    /// The next finished batch, in the order of submission, if there is one now.
    pub fn try_receive(&mut self) -> Result<Option<PipelineResult>, PipelineGone> {
        match self.output.try_recv() {
            Ok(result) => {
                self.in_flight -= 1;
                Ok(Some(result))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) if self.in_flight == 0 => Ok(None),
            Err(TryRecvError::Disconnected) => Err(PipelineGone),
        }
    }

    /// Batches submitted and not received yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Ends the worker, which has nothing left to do, and returns what it worked with.
    pub fn finish(mut self) -> Result<(Trained, Option<Calibrator>), PipelineGone> {
        self.input = None;
        let worker = self.worker.take().ok_or(PipelineGone)?;
        worker.join().map_err(|_| PipelineGone)
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.input = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been reported by the closed channel already.
            let _ = worker.join();
        }
    }
}

fn process(
    trained: &Trained,
    calibrator: &mut Option<Calibrator>,
    batch: &RowBatch,
    pool: &ThreadPool,
    stop: &AtomicBool,
) -> PipelineResult {
    let model = &trained.model;
    let (dim, width) = (model.dim, model.padded_dim());
    let mut rows = vec![0.0; batch.ids.len() * width];
    let outcomes: Vec<Result<(), RowError>> = rows
        .par_chunks_exact_mut(width)
        .zip(batch.rows.par_chunks_exact(dim))
        .map(|(out, row)| model.project_row(row, out))
        .collect();
    let mut ids = Vec::with_capacity(batch.ids.len());
    for (row, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Ok(()) => {
                rows.copy_within(row * width..(row + 1) * width, ids.len() * width);
                ids.push(batch.ids[row]);
            }
            Err(error) if is_left_out(error) => {}
            Err(error) => return Err(*error),
        }
    }
    rows.truncate(ids.len() * width);
    let mut cells = vec![0; ids.len()];
    let interrupted = || stop.load(Ordering::Relaxed);
    if trained.assigner.assign(&rows, &mut cells, Some(pool), &interrupted).is_err() {
        return Ok(AssignedBatch::default());
    }
    if let Some(calibrator) = calibrator {
        calibrator.observe(&rows, &ids);
    }
    let mut records = vec![0; ids.len() * plane2::record_bytes(width)];
    records
        .par_chunks_exact_mut(plane2::record_bytes(width))
        .zip(rows.par_chunks_exact(width).zip(&ids))
        .for_each_init(Vec::new, |encoded, (out, (row, &id))| {
            encoded.clear();
            plane2::encode(model, row, id, encoded);
            out.copy_from_slice(encoded);
        });
    Ok(AssignedBatch { left_out: (batch.ids.len() - ids.len()) as u64, cells, records })
}
