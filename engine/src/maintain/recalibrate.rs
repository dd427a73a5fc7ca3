//! Recall curves for an index that is no longer what it was when they were made.
//!
//! As in a build, some rows serve as queries, all others pass by, and where the nearest lie in the order of the
//! cells gives the curves. The rows are known by their plane-2 records; that is what is read. Queries that a user
//! gives may take the place of the rows that serve as such.

use std::{collections::HashMap, sync::Arc};

use rayon::ThreadPool;

use super::{
    fetch::{Wanted, read_records, record_bytes},
    job::{Origin, living},
    train::spread,
};
use crate::{
    build::{
        Calibrator,
        decode::{decode_into, decode_rows},
    },
    cluster::{Interrupt, Interrupted},
    quantize::{Model, Query, RowError},
    root::{Curves, FittedTo, Root},
    search::Tombstones,
    segment::{PartSource, Piece, SourceError},
};

/// Rows that calibrate recall, as in a build.
pub(super) const CALIBRATION_ROWS: usize = 1_024;
/// Rows read at a time: 3 MB of records at 384 dimensions.
const BATCH: u32 = 8_192;
/// Rows from which on an index is calibrated anew less often.
const LARGE: u64 = 100_000;

/// Whether the recall curves of an index of so many live `rows` should be made anew: it has at least a quarter more
/// than when they were made, or a fifth fewer; above 100,000 rows, half more, or a third fewer.
///
/// Curves count cells, of which a search must open more as the index grows. 100,000 passages that were twice as many
/// as when they were calibrated still had a recall of .957 where .95 was asked for; but with few cells one more
/// matters: 4,700 rows of a mixture in 67 cells, 1.35 times as many, had .90.
pub fn is_calibration_due(rows: u64, rows_then: u64) -> bool {
    let (now, then) = (u128::from(rows), u128::from(rows_then));
    let (more, less) = if rows_then < LARGE { (5, 4) } else { (3, 2) };
    less * now >= more * then || more * now <= less * then
}

/// Rows that were read.
#[derive(Debug)]
pub struct CalibrationRows {
    origins: Vec<Origin>,
    records: Vec<u8>,
}

/// Makes recall curves for a root, of published segments or of such that will be: reads all rows once, by the
/// steps of [`super::Compaction`].
///
/// ```text
/// while let Some(rows) = calibration.read(source, dead)? {
///     calibration.observe(rows, pool, interrupt)?;
/// }
/// edit.curves(calibration.finish(pool));
/// ```
///
/// Rows of another model than the first are left out.
pub struct Recalibration {
    root: Arc<Root>,
    /// First of the rows to be read next, by segment and ordinal.
    next: Option<(u32, u32)>,
    calibrator: Option<Calibrator>,
    fitted_to: FittedTo,
}

impl Recalibration {
    /// Begins with the rows of this root.
    pub fn new(root: Arc<Root>) -> Self {
        Self { root, next: None, calibrator: None, fitted_to: FittedTo::Rows }
    }

    /// Begins with queries of a user, one after the other, each of the dimension of the rows.
    pub fn of_queries(root: Arc<Root>, queries: &[f32]) -> Result<Self, RowError> {
        let model = &root.models()[0];
        let queries = queries.chunks_exact(root.dim().max(1)).map(|query| model.query(query));
        let queries = queries.collect::<Result<Vec<_>, _>>()?;
        let calibrator = Calibrator::of_queries(model.metric, model.padded_dim(), queries);
        let fitted_to = FittedTo::Queries { cells: root.cell_count() as u32 };
        Ok(Self { next: Some((0, 0)), calibrator: Some(calibrator), fitted_to, root })
    }

    /// Reads the next rows; nothing if all were read. The first ones are those that serve as queries.
    pub fn read(
        &mut self,
        source: &mut dyn PartSource,
        dead: &dyn Tombstones,
    ) -> Result<Option<CalibrationRows>, SourceError> {
        let Some((segment, first)) = self.next else {
            let sample = self.sample(dead);
            let rows = self.read_rows(source, sample)?;
            self.next = Some((0, 0));
            return Ok(Some(rows));
        };
        let segments = self.root.segments().len() as u32;
        let skipped = |&segment: &u32| self.root.model_of(segment) != 0;
        let all = |segment: u32| self.root.geometry(segment).rows();
        let (mut segment, mut first) = (segment, first);
        while segment < segments && (skipped(&segment) || first >= all(segment)) {
            (segment, first) = (segment + 1, 0);
        }
        if segment >= segments {
            return Ok(None);
        }
        let count = BATCH.min(all(segment) - first);
        let rows = self.read_rows(source, living(segment, first, count, dead))?;
        self.next = Some((segment, first + count));
        Ok(Some(rows))
    }

    /// Rows evenly spread over all.
    fn sample(&self, dead: &dyn Tombstones) -> Vec<Origin> {
        let segments = 0..self.root.segments().len() as u32;
        let usable = segments.filter(|&segment| self.root.model_of(segment) == 0);
        let mut ends: Vec<(u64, u32)> = Vec::new();
        let mut rows = 0u64;
        for segment in usable {
            rows += u64::from(self.root.geometry(segment).rows());
            ends.push((rows, segment));
        }
        let Ok(rows) = usize::try_from(rows) else { return Vec::new() };
        let sampled = spread(rows, CALIBRATION_ROWS).flat_map(|row| {
            let row = u64::from(row);
            let (end, segment) = ends[ends.partition_point(|&(end, _)| end <= row)];
            let all = self.root.geometry(segment).rows();
            living(segment, all - (end - row) as u32, 1, dead)
        });
        sampled.collect()
    }

    fn read_rows(
        &self,
        source: &mut dyn PartSource,
        origins: Vec<Origin>,
    ) -> Result<CalibrationRows, SourceError> {
        let places = (0..).zip(&origins);
        let mut wanted: Vec<Wanted> = places
            .map(|(place, &Origin { segment, ordinal })| Wanted { segment, ordinal, place })
            .collect();
        let mut records = vec![0; origins.len() * record_bytes(&self.root)];
        read_records(&self.root, source, &mut wanted, &mut records)?;
        Ok(CalibrationRows { origins, records })
    }

    /// Compares rows with the queries. Pure computation, on the pool.
    pub fn observe(
        &mut self,
        rows: CalibrationRows,
        pool: &ThreadPool,
        interrupt: Interrupt<'_>,
    ) -> Result<(), Interrupted> {
        if interrupt() {
            return Err(Interrupted);
        }
        let model = &self.root.models()[0];
        match &mut self.calibrator {
            None => {
                let records = rows.records.chunks_exact(record_bytes(&self.root));
                let samples = rows.origins.iter().zip(records);
                let samples = samples
                    .filter_map(|(&origin, record)| Some((key(origin), query_of(model, record)?)))
                    .collect();
                self.calibrator = Some(Calibrator::new(model.metric, model.padded_dim(), samples));
            }
            Some(calibrator) => {
                let keys: Vec<u64> = rows.origins.iter().copied().map(key).collect();
                let decoded = decode_rows(model, &rows.records);
                pool.install(|| calibrator.observe(&decoded, &keys));
            }
        }
        Ok(())
    }

    /// The curves.
    pub fn finish(self, pool: &ThreadPool) -> Curves {
        let Some(calibrator) = self.calibrator else { return Curves::default() };
        let mut pieces: HashMap<u32, Vec<Piece>> = HashMap::new();
        let root = &self.root;
        for piece in root.pieces().iter().chain(root.delta_pieces()).filter(|p| !p.has_refs()) {
            pieces.entry(piece.segment.get()).or_default().push(*piece);
        }
        pieces.values_mut().for_each(|own| own.sort_by_key(|piece| piece.first_ordinal.get()));
        let slot_of = |key: u64| {
            let (segment, ordinal) = ((key >> 32) as u32, key as u32);
            let own = pieces.get(&segment)?;
            let piece = own[..own.partition_point(|p| p.first_ordinal.get() <= ordinal)].last()?;
            (ordinal - piece.first_ordinal.get() < piece.slots.get()).then_some(piece.cell.get())
        };
        let neighbours = calibrator.neighbours().into_iter();
        let slots = neighbours.filter_map(|key| Some((key, slot_of(key)?))).collect();
        let curves = pool.install(|| calibrator.finish(root, &slots));
        match self.fitted_to {
            FittedTo::Rows => curves,
            FittedTo::Queries { cells } => curves.of_queries(cells),
        }
    }
}

/// A number for a row.
fn key(origin: Origin) -> u64 {
    u64::from(origin.segment) << 32 | u64::from(origin.ordinal)
}

/// A row as a query; nothing if it cannot be one.
pub(super) fn query_of(model: &Model, record: &[u8]) -> Option<Query> {
    let mut x = vec![0.0; model.padded_dim()];
    decode_into(record, &mut x);
    model.query(&model.unproject_row(&x)).ok()
}
