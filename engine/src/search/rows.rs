//! What a search needs besides segments: rows not yet in the store, and rows that are dead.

use crate::quantize::{CellTerm, Query};

/// Why the plane-2 record of a delta row could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaRecord {
    /// The record was copied out.
    Copied,
    /// Its page was recycled under the search: only the id is known.
    Recycled,
}

/// Rows that are not in a segment yet, as copied when the search began. A row is named by a handle
/// that the implementation chooses.
pub trait DeltaRows {
    /// Appends estimate, lower bound and handle of each live row of a cell; `None` means the rows
    /// whose cell is not (or no longer) in the root, which every search scores.
    fn score(
        &self,
        cell: Option<u32>,
        query: &Query,
        term: CellTerm,
        epsilon: f32,
        out: &mut DeltaScores<'_>,
    );

    /// Calls `visit` with every live row's handle.
    fn for_each(&self, visit: &mut dyn FnMut(u32));

    /// The row's id.
    fn id(&self, handle: u32) -> u64;

    /// Copies the row's plane-2 record into `out` (cleared first).
    fn record(&mut self, handle: u32, out: &mut Vec<u8>) -> DeltaRecord;
}

/// Where [`DeltaRows::score`] puts its rows: three columns of equal length.
#[derive(Debug)]
pub struct DeltaScores<'a> {
    pub est: &'a mut Vec<f32>,
    pub lower: &'a mut Vec<f32>,
    pub handles: &'a mut Vec<u32>,
}

impl DeltaScores<'_> {
    /// Adds a row.
    pub fn push(&mut self, handle: u32, est: f32, lower: f32) {
        self.handles.push(handle);
        self.est.push(est);
        self.lower.push(lower);
    }
}

/// Rows of segments that VACUUM removed.
pub trait Tombstones {
    /// Calls `visit` with every dead ordinal of a segment (by its position in the root) in
    /// `first..first + rows`.
    fn for_each_dead(&self, segment: u32, first: u32, rows: u32, visit: &mut dyn FnMut(u32));
}

/// No rows outside segments.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoDelta;

impl DeltaRows for NoDelta {
    fn score(&self, _: Option<u32>, _: &Query, _: CellTerm, _: f32, _: &mut DeltaScores<'_>) {}

    fn for_each(&self, _: &mut dyn FnMut(u32)) {}

    fn id(&self, _: u32) -> u64 {
        0
    }

    fn record(&mut self, _: u32, _: &mut Vec<u8>) -> DeltaRecord {
        DeltaRecord::Recycled
    }
}

/// No dead rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTombstones;

impl Tombstones for NoTombstones {
    fn for_each_dead(&self, _: u32, _: u32, _: u32, _: &mut dyn FnMut(u32)) {}
}
