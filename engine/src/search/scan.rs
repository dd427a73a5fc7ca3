//! Opening cells: their codes are scanned into the columns, the parts at hand while the missing ones
//! are on their way.

use super::{columns::Columns, environment::Environment, ranking::RankedCell, stream::SearchStats};
use crate::{
    kernel::{BLOCK_ROWS, RacyBytes},
    quantize::{CellTerm, Query, plane1},
    root::Root,
    segment::{PartView, Piece, Plane1Part, SlotRef, SourceError},
};

/// A part of plane 1 to be scanned.
struct Job {
    part: Plane1Part,
    segment: u32,
    /// Ordinal of the part's first row, unless its slots carry references.
    first_ordinal: u32,
    model: usize,
    term: CellTerm,
}

/// Scans codes into columns for one query.
pub(super) struct Scanner<'a> {
    pub root: &'a Root,
    /// The query in the space of each model.
    pub queries: &'a [Query],
    pub epsilon: f32,
    pub columns: &'a mut Columns,
    pub stats: &'a mut SearchStats,
}

impl Scanner<'_> {
    /// Scans the rows of these cells. All missing parts are asked for at once, before the first part
    /// is scanned.
    pub fn open(
        &mut self,
        cells: &[RankedCell],
        environment: &mut Environment<'_>,
    ) -> Result<(), SourceError> {
        let jobs = self.jobs(cells);
        let mut present = Vec::with_capacity(jobs.len());
        let mut missing = Vec::new();
        for job in &jobs {
            match environment.source.try_acquire(&job.part.part) {
                Some(view) => present.push((job, view)),
                None => missing.push(job),
            }
        }
        if !missing.is_empty() {
            self.stats.parts_missing += missing.len() as u64;
            self.stats.waves += 1;
            let wanted: Vec<_> = missing.iter().map(|job| (job.segment, job.part.part)).collect();
            environment.request(self.root, &wanted);
        }
        for cell in cells {
            self.score_delta(Some(*cell), environment);
        }
        for (job, view) in present {
            self.scan(job, view, environment)?;
        }
        for job in missing {
            let view = environment.acquire(self.root, job.segment, job.part.part)?;
            self.scan(job, view, environment)?;
        }
        Ok(())
    }

    /// Scores the rows of the delta that belong to a cell, or to no cell of the root.
    pub fn score_delta(&mut self, cell: Option<RankedCell>, environment: &mut Environment<'_>) {
        let query = &self.queries[0];
        let (slot, term) = match cell {
            Some(cell) => (Some(cell.slot), cell.term),
            None => (None, query.zero_cell_term()),
        };
        let rows = self.columns.push_delta_run(|out| {
            environment.delta.score(slot, query, term, self.epsilon, out);
        });
        self.stats.codes_scanned += rows as u64;
    }

    fn jobs(&self, cells: &[RankedCell]) -> Vec<Job> {
        let mut jobs = Vec::with_capacity(cells.len());
        for cell in cells {
            let pieces = self.root.pieces_of(cell.slot).iter();
            for piece in pieces.chain(self.root.delta_pieces_of(cell.slot)) {
                self.push_jobs(cell, piece, &mut jobs);
            }
        }
        jobs
    }

    fn push_jobs(&self, cell: &RankedCell, piece: &Piece, jobs: &mut Vec<Job>) {
        let segment = piece.segment.get();
        let model = self.root.model_of(segment);
        let term = match model {
            0 => cell.term,
            _ => {
                let centroid = self.root.centroid_record_in(model, cell.slot);
                self.queries[model].cell_term(RacyBytes::new(centroid))
            }
        };
        jobs.extend(self.root.geometry(segment).plane1_parts(piece).map(|part| {
            let first_ordinal = piece.first_ordinal.get() + part.before;
            Job { part, segment, first_ordinal, model, term }
        }));
    }

    fn scan(
        &mut self,
        job: &Job,
        mut view: PartView,
        environment: &mut Environment<'_>,
    ) -> Result<(), SourceError> {
        environment.source.check_interrupts()?;
        let start = self.columns.len();
        let blocks = job.part.blocks as usize;
        let query = &self.queries[job.model];
        let bits = self.root.models()[job.model].bits;
        let bytes = blocks * plane1::block_bytes(query.padded_dim(), bits);
        let first = start + job.part.skip as usize;
        let last = first + job.part.slots as usize;
        loop {
            let at = job.part.blocks_at;
            if let Some(codes) = view.bytes().get(at..at + bytes) {
                plane1::scan(
                    codes,
                    bits,
                    query,
                    job.term,
                    self.epsilon,
                    &mut self.columns.est,
                    &mut self.columns.lower,
                );
            }
            let complete = self.columns.len() == start + blocks * BLOCK_ROWS
                && self.push_run(job, &view, start);
            if environment.source.still_valid(&view) {
                if complete {
                    break;
                }
                let (needed, found) = (at + bytes, view.bytes().len());
                let part = job.part.part;
                return Err(environment.too_short(self.root, job.segment, part, needed, found));
            }
            self.columns.truncate(start);
            view = environment.acquire(self.root, job.segment, job.part.part)?;
        }
        self.stats.codes_scanned += u64::from(job.part.slots);
        // Rows of neighbouring cells in shared blocks, and padding.
        self.columns.lower[start..first].fill(f32::NAN);
        self.columns.lower[last..].fill(f32::NAN);
        self.drop_dead(job, first, last, environment);
        Ok(())
    }

    /// Notes where the rows of a part lie. False if its references end early.
    fn push_run(&mut self, job: &Job, view: &PartView, start: usize) -> bool {
        let Some(refs_at) = job.part.refs_at else {
            // Wrapping: rows before the first of this piece are dropped, whatever their ordinal.
            let first = job.first_ordinal.wrapping_sub(job.part.skip);
            self.columns.push_segment_run(start, job.segment, first);
            return true;
        };
        let slots = job.part.skip as usize + job.part.slots as usize;
        let Some(refs) = view.bytes().get(refs_at..refs_at + slots * size_of::<SlotRef>()) else {
            return false;
        };
        let root = self.root;
        let places = (0..slots).map(|slot| {
            let word = |at: usize| refs.read_u32_le(slot * size_of::<SlotRef>() + at).unwrap_or(0);
            let reference = SlotRef { segment: word(0).into(), ordinal: word(4).into() };
            root.resolve(job.segment, reference).unwrap_or(GONE)
        });
        self.columns.push_placed_run(start, places);
        true
    }

    fn drop_dead(
        &mut self,
        job: &Job,
        first: usize,
        last: usize,
        environment: &mut Environment<'_>,
    ) {
        if job.part.refs_at.is_none() {
            let lower = &mut self.columns.lower[first..last];
            let rows = job.part.slots;
            environment.dead.for_each_dead(job.segment, job.first_ordinal, rows, &mut |ordinal| {
                if let Some(row) = ordinal.checked_sub(job.first_ordinal)
                    && let Some(bound) = lower.get_mut(row as usize)
                {
                    *bound = f32::NAN;
                }
            });
            return;
        }
        for row in first..last {
            let (segment, ordinal) = self.columns.segment_place(row).unwrap_or(GONE);
            let mut dead = (segment, ordinal) == GONE;
            if !dead {
                environment.dead.for_each_dead(segment, ordinal, 1, &mut |_| dead = true);
            }
            if dead {
                self.columns.lower[row] = f32::NAN;
            }
        }
    }
}

/// Place of a row that is not in this root any more.
const GONE: (u32, u32) = (u32::MAX, u32::MAX);
