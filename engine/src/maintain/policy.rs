//! How much a compaction does at a time.

use crate::quantize::{Model, plane1, plane2};

/// Objects that a round drops at the most.
pub const MAX_DROPPED: usize = 100;

/// What a compaction rewrites, and into what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Rows of a cell, about: one above 2.2 times as many is split, as in a build; one that lost rows and has fewer
    /// than a quarter is merged away. It should be what the index was built with: recall curves count cells, so
    /// splitting all of them makes recall fall until they are made anew.
    pub target_rows: usize,
    /// Bytes of a segment, about.
    pub segment_bytes: usize,
    /// A segment is rewritten when the rows that came for its cells and those that died are at least this
    /// part of its rows. 0: whenever there are any.
    pub changed_share: f64,
    /// Segments rewritten in a round, at the most: not those of the delta.
    pub max_segments: usize,
    /// Runs of delta segments (see [`super::delta_runs`]) that may stay.
    pub max_delta_runs: usize,
    /// After a split, whether rows of neighbouring cells go over to a new cell that is nearer, and the other way
    /// round (decision 0014 has what it brings).
    pub reassign: bool,
}

impl Policy {
    /// What is done by the way: segments of which a tenth changed. `target_rows`: rows of a cell.
    pub fn automatic(target_rows: usize) -> Self {
        Self {
            target_rows: target_rows.max(1),
            segment_bytes: 32 << 20,
            changed_share: 0.1,
            max_segments: 32,
            max_delta_runs: 4,
            reassign: true,
        }
    }

    /// What is done on request: every segment with a change, in as many rounds as it takes.
    pub fn explicit(target_rows: usize) -> Self {
        Self { changed_share: 0.0, ..Self::automatic(target_rows) }
    }

    /// Rows of a segment, about.
    pub fn segment_rows(&self, model: &Model) -> usize {
        let width = model.padded_dim();
        let row = plane2::record_bytes(width) + plane1::row_bytes(width, model.bits) + 8;
        (self.segment_bytes / row).max(1)
    }

    /// Rows above which a cell is split, by [`crate::cluster::split`].
    pub(super) fn oversize(&self) -> usize {
        (self.target_rows as f64 * 2.2) as usize
    }
}
