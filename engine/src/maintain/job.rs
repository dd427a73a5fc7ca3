//! The rows of a job, read.

use std::ops::Range;

use super::{
    fetch::{Wanted, read_blocks, read_records, record_bytes},
    plan::{PlannedCell, PlannedJob},
};
use crate::{
    root::Root,
    search::Tombstones,
    segment::{Packing, PartSource, SourceError},
};

/// Where a row of a new segment was before: a segment of the old root, by position, and its ordinal there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    pub segment: u32,
    pub ordinal: u32,
}

/// A cell with the rows that live.
#[derive(Debug)]
pub(super) struct JobCell {
    pub slot: u32,
    pub pinned: bool,
    /// Whether rows died.
    pub shrunk: bool,
    /// The rows, by place.
    pub rows: Range<u32>,
    /// Plane 1 as it was, if no row came or died.
    pub blocks: Option<Vec<u8>>,
}

/// Rows that were read, ready to be worked on by any thread.
#[derive(Debug)]
pub struct Job {
    pub(super) stays_in_delta: bool,
    pub(super) cells: Vec<JobCell>,
    /// Plane-2 records by place.
    pub(super) records: Vec<u8>,
    /// By place.
    pub(super) origins: Vec<Origin>,
    pub(super) dead: u64,
    pub(super) bytes_read: u64,
}

impl Job {
    /// Reads the rows of a planned job that are not dead.
    pub(super) fn read(
        root: &Root,
        planned: &PlannedJob,
        source: &mut dyn PartSource,
        dead: &dyn Tombstones,
    ) -> Result<Self, SourceError> {
        let (stays_in_delta, planned) = match planned {
            PlannedJob::Cells(cells) => (false, cells),
            PlannedJob::Delta(cells) => (true, cells),
        };
        let mut job = Self {
            stays_in_delta,
            cells: Vec::with_capacity(planned.len()),
            records: Vec::new(),
            origins: Vec::new(),
            dead: 0,
            bytes_read: 0,
        };
        for cell in planned {
            job.add_living(cell, dead);
        }
        if !stays_in_delta {
            job.copy_plane1(root, planned, source)?;
        }
        let origins = (0..).zip(&job.origins);
        let wanted =
            origins.map(|(place, &Origin { segment, ordinal })| Wanted { segment, ordinal, place });
        let mut wanted: Vec<Wanted> = wanted.collect();
        job.records = vec![0; wanted.len() * record_bytes(root)];
        job.bytes_read += read_records(root, source, &mut wanted, &mut job.records)?;
        Ok(job)
    }

    fn add_living(&mut self, cell: &PlannedCell, dead: &dyn Tombstones) {
        let start = self.origins.len() as u32;
        let mut died = 0;
        for piece in &cell.pieces {
            let rows = piece.slots.get();
            let living = living(piece.segment.get(), piece.first_ordinal.get(), rows, dead);
            died += u64::from(rows) - living.len() as u64;
            self.origins.extend(living);
        }
        self.dead += died;
        self.cells.push(JobCell {
            slot: cell.slot,
            pinned: cell.pinned,
            shrunk: died > 0,
            rows: start..self.origins.len() as u32,
            blocks: None,
        });
    }

    /// Takes plane 1 of cells over whose rows all stay where they are.
    fn copy_plane1(
        &mut self,
        root: &Root,
        planned: &[PlannedCell],
        source: &mut dyn PartSource,
    ) -> Result<(), SourceError> {
        let (mut same, mut pieces) = (Vec::new(), Vec::new());
        for (number, (cell, planned)) in self.cells.iter().zip(planned).enumerate() {
            if let [piece] = planned.pieces[..]
                && !cell.shrunk
                && !root.segments()[piece.segment.get() as usize].is_delta()
                && root.geometry(piece.segment.get()).packing() == Packing::PerCell
            {
                same.push(number);
                pieces.push(piece);
            }
        }
        let (blocks, bytes) = read_blocks(root, source, &pieces)?;
        self.bytes_read += bytes;
        for (number, blocks) in same.into_iter().zip(blocks) {
            self.cells[number].blocks = Some(blocks);
        }
        Ok(())
    }
}

/// The rows of a stretch of a segment that are not dead.
pub(super) fn living(segment: u32, first: u32, count: u32, dead: &dyn Tombstones) -> Vec<Origin> {
    let mut lives = vec![true; count as usize];
    dead.for_each_dead(segment, first, count, &mut |ordinal| {
        if let Some(lives) = lives.get_mut(ordinal.wrapping_sub(first) as usize) {
            *lives = false;
        }
    });
    let rows = (first..).zip(lives).filter(|(_, lives)| *lives);
    rows.map(|(ordinal, _)| Origin { segment, ordinal }).collect()
}
