//! A whole index built in memory, by the steps of a real build: for tests, benchmarks and examples.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::Arc,
};

use super::{
    Assembly, Calibrator, CellStore, MemoryFile, Pipeline, PipelineGone, RowBatch, TrainError,
    TrainParams, encode_cells, note_slots, train,
};
use crate::{
    Metric, ObjectId, cluster,
    quantize::{Model, RowError, plane2},
    root::{Curves, Root, RootError},
    segment::{MemorySource, WriteError},
};

/// Choices of a build.
#[derive(Debug, Clone, Copy)]
pub struct InMemoryOptions {
    /// Cells to train; by the number of rows if `None`.
    pub lists: Option<u32>,
    pub seed: u64,
    /// Rows that ride along for calibration.
    pub samples: usize,
    /// Bytes for training, about.
    pub training_memory: usize,
    /// Bytes of records kept before they are spilled.
    pub memory: usize,
    /// Rows of a segment at the most.
    pub segment_rows: usize,
    pub threads: usize,
}

impl Default for InMemoryOptions {
    fn default() -> Self {
        Self {
            lists: None,
            seed: 1,
            samples: 512,
            training_memory: 128 << 20,
            memory: 64 << 20,
            segment_rows: 100_000,
            threads: 2,
        }
    }
}

/// Why a build in memory failed.
#[derive(Debug, thiserror::Error)]
pub enum InMemoryError {
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Row(#[from] RowError),
    #[error(transparent)]
    Pipeline(#[from] PipelineGone),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Root(#[from] RootError),
    #[error("no random bytes: {0}")]
    Random(#[from] getrandom::Error),
    #[error("no threads: {0}")]
    Pool(#[from] rayon::ThreadPoolBuildError),
}

/// An index and the source of its parts, which starts cold.
pub struct InMemoryIndex {
    pub model: Model,
    pub root: Arc<Root>,
    pub source: MemorySource,
    /// Rows left out: zero vectors under cosine.
    pub left_out: u64,
}

impl InMemoryIndex {
    /// Builds an index of `rows` (n x dim) with their ids.
    pub fn build(
        metric: Metric,
        dim: usize,
        rows: &[f32],
        ids: &[u64],
        options: InMemoryOptions,
    ) -> Result<Self, InMemoryError> {
        let count = ids.len();
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(options.threads).build()?);
        let lists = options.lists.unwrap_or_else(|| cluster::default_lists(count as u64));
        let sample_rows =
            cluster::sample_rows(metric, count as u64, lists, dim, options.training_memory);
        // Rows for calibration are not trained on, if there are enough others.
        let held_out: HashSet<usize> = match count > 8 * options.samples {
            true => spread(count, options.samples).collect(),
            false => HashSet::new(),
        };
        let sample: Vec<f32> = spread(count, sample_rows)
            .filter(|row| !held_out.contains(row))
            .flat_map(|row| &rows[row * dim..][..dim])
            .copied()
            .collect();
        let trained_lists = cluster::trained_lists(lists, sample_rows, count as u64, dim);
        let params =
            TrainParams { metric, dim, lists: trained_lists, seed: options.seed, model_id: 0 };
        let trained = train(params, &sample, &pool, &|| false)?;
        let model = trained.model.clone();

        let samples = spread(count, options.samples)
            .filter_map(|row| Some((ids[row], model.query(&rows[row * dim..][..dim]).ok()?)))
            .collect();
        let calibrator = Calibrator::new(metric, model.padded_dim(), samples);
        let record_bytes = plane2::record_bytes(model.padded_dim());
        let cells = trained.assigner.len();
        let mut store = CellStore::new(cells, record_bytes, options.memory, MemoryFile::default());
        let mut left_out = 0;
        let mut pipeline = Pipeline::start(trained, Some(calibrator), Arc::clone(&pool))?;
        for (rows, ids) in rows.chunks(4_096 * dim).zip(ids.chunks(4_096)) {
            let mut batch = Some(RowBatch { rows: rows.to_vec(), ids: ids.to_vec() });
            while let Some(waiting) = batch.take() {
                batch = pipeline.try_submit(waiting)?;
                drain(&mut pipeline, &mut store, &mut left_out)?;
            }
        }
        while pipeline.in_flight() > 0 {
            drain(&mut pipeline, &mut store, &mut left_out)?;
            std::thread::yield_now();
        }
        let (_, calibrator) = pipeline.finish()?;

        let mut assembly = Assembly::new(model.clone(), ObjectId::random()?, ObjectId::random()?);
        let mut source = MemorySource::new();
        let wanted = calibrator.as_ref().map(Calibrator::neighbours).unwrap_or_default();
        let mut slot_of = HashMap::new();
        let target = count.div_ceil(lists.max(1) as usize);
        for group in store.groups(options.segment_rows) {
            let records = group.map(|cell| store.take(cell)).collect::<Result<Vec<_>, _>>()?;
            let cells = pool
                .install(|| encode_cells(&model, records, target, options.seed, &|| false))
                .map_err(TrainError::from)?;
            note_slots(&wanted, &cells, assembly.cell_count() as u32, &mut slot_of);
            let (object, mut bytes) = (ObjectId::random()?, Vec::new());
            assembly.write_segment(object, cells, &mut bytes)?;
            source.insert(object, bytes);
        }
        let root = assembly.read_root(Curves::default())?;
        let curves = match calibrator {
            Some(calibrator) => pool.install(|| calibrator.finish(&root, &slot_of)),
            None => Curves::default(),
        };
        let root = Arc::new(assembly.read_root(curves)?);
        Ok(Self { model, root, source, left_out })
    }

    /// Bytes of all segments.
    pub fn bytes(&self) -> u64 {
        self.root.object_bytes()
    }
}

/// Up to `wanted` row numbers, evenly spread.
fn spread(rows: usize, wanted: usize) -> impl Iterator<Item = usize> {
    let wanted = wanted.min(rows);
    (0..wanted).map(move |nth| nth * rows / wanted)
}

fn drain(
    pipeline: &mut Pipeline,
    store: &mut CellStore<MemoryFile>,
    left_out: &mut u64,
) -> Result<(), InMemoryError> {
    while let Some(batch) = pipeline.try_receive()? {
        let batch = batch?;
        store.add(&batch.cells, &batch.records)?;
        *left_out += batch.left_out;
    }
    Ok(())
}
