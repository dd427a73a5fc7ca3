//! The delta as a search over a root wants it: by slots of the root instead of cell numbers.

use std::sync::Arc;

use super::{super::relation::Index, record, rows::DeltaRows};
use crate::error::OrRaise;
use polign_engine::{
    kernel::RacyBytes,
    quantize::{CellTerm, Query},
    root::Root,
    search::{self, DeltaRecord, DeltaScores},
};

/// The rows of the delta, by where a root has their cells.
///
/// A row whose cell was split or merged since is scored in one successor, still relative to its old
/// cell, which the root keeps. One whose cell the root does not know at all is *unplaced*: every search
/// looks at it, and only its refinement record bounds it.
pub struct DeltaView {
    index: Index,
    root: Arc<Root>,
    rows: DeltaRows,
    moved: Vec<Moved>,
    unplaced: Vec<u32>,
}

/// Rows of a cell that is no longer in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Moved {
    /// The slot that they are scored in.
    slot: u32,
    cell: u32,
    /// The slot that their codes are relative to.
    relative_to: u32,
}

impl DeltaView {
    /// Places the rows in a root.
    pub fn new(index: Index, rows: DeltaRows, root: Arc<Root>) -> Self {
        let (mut moved, mut unknown) = (Vec::new(), Vec::new());
        for cell in rows.cells() {
            match root.slot_of(cell) {
                Some(slot) if !root.cells()[slot as usize].is_retired() => {}
                Some(relative_to) if let Some(slot) = root.live_slot_of(cell) => {
                    moved.push(Moved { slot, cell, relative_to });
                }
                _ => unknown.push(cell),
            }
        }
        moved.sort_unstable();
        moved.dedup();
        unknown.sort_unstable();
        unknown.dedup();
        let mut unplaced = Vec::new();
        for cell in unknown {
            rows.for_each_in(cell, |handle| unplaced.push(handle));
        }
        Self { index, root, rows, moved, unplaced }
    }

    /// The rows.
    pub fn rows(&self) -> &DeltaRows {
        &self.rows
    }
}

impl search::DeltaRows for DeltaView {
    fn score(
        &self,
        slot: Option<u32>,
        query: &Query,
        term: CellTerm,
        epsilon: f32,
        out: &mut DeltaScores<'_>,
    ) {
        let Some(slot) = slot else {
            // Nothing is known of these rows until they are refined.
            self.unplaced.iter().for_each(|&row| out.push(row, f32::INFINITY, f32::NEG_INFINITY));
            return;
        };
        let Some(cell) = self.root.cells().get(slot as usize) else { return };
        self.rows.score(cell.id.get(), query, term, epsilon, out);
        for moved in self.moved.iter().filter(|moved| moved.slot == slot) {
            let centroid = self.root.centroid_record(moved.relative_to);
            let term = query.cell_term(RacyBytes::new(centroid));
            self.rows.score(moved.cell, query, term, epsilon, out);
        }
    }

    fn for_each(&self, visit: &mut dyn FnMut(u32)) {
        self.rows.handles().for_each(visit);
    }

    fn id(&self, handle: u32) -> u64 {
        self.rows.id(handle)
    }

    fn record(&mut self, handle: u32, out: &mut Vec<u8>) -> DeltaRecord {
        match record::of_row(self.index, &self.rows, handle, out).or_raise() {
            true => DeltaRecord::Copied,
            false => DeltaRecord::Recycled,
        }
    }
}
