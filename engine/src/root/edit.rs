//! The next version of a root: what a flush or a compaction changes of it.

use super::{
    builder::RootBuilder,
    curves::Curves,
    reader::Root,
    record::{Cell, CellRange, Reference},
    section::{RootError, SectionKey, SectionKind, entry},
};
use crate::{
    kernel::RacyBytes,
    quantize::{Model, cell_rank, plane2},
    segment::{Piece, WrittenSegment},
};

/// A root under change.
///
/// Slots and segment positions are those of the root that it began with, and those that its own methods
/// returned; what is dropped keeps its number until [`RootEdit::build`], which numbers everything anew.
#[derive(Debug)]
pub struct RootEdit {
    builder: RootBuilder,
    /// By segment.
    dropped: Vec<bool>,
    /// By slot.
    removed: Vec<bool>,
    /// Cells that came with the root: those behind them have no group yet.
    cells_before: usize,
}

impl RootEdit {
    /// Begins with everything that the root has.
    pub fn new(root: &Root) -> Self {
        let models = 0..root.models.len();
        let records = |model: usize| root.centroid_records[model].to_vec();
        let builder = RootBuilder {
            models: root.models.clone(),
            cells: root.cells().to_vec(),
            records: models.clone().map(records).collect(),
            blocks: Some(models.map(|model| root.centroid_blocks[model].to_vec()).collect()),
            pieces: root.pieces().to_vec(),
            delta_pieces: root.delta_pieces().to_vec(),
            segments: root.segments().to_vec(),
            references: root.references().to_vec(),
            group_records: root.group_records.to_vec(),
            group_cells: root.all_group_cells().to_vec(),
            curves: root.curves.clone(),
        };
        Self {
            dropped: vec![false; builder.segments.len()],
            removed: vec![false; builder.cells.len()],
            cells_before: builder.cells.len(),
            builder,
        }
    }

    /// Adds a cell and returns its slot. Its id must lie above all others: ids are never reused.
    /// `centroids`: its plane-2 record in the space of each model (of one without centroids: ignored).
    ///
    /// # Panics
    /// If there is not one centroid for each model, or one has another length than the model's.
    pub fn cell(&mut self, id: u32, centroids: &[&[u8]]) -> u32 {
        // A model without segments may be without centroids.
        let had_cells = !self.builder.cells.is_empty();
        let bare: Vec<bool> =
            self.builder.records.iter().map(|records| had_cells && records.is_empty()).collect();
        let slot = self.builder.cell(id, centroids);
        for (records, bare) in self.builder.records.iter_mut().zip(bare) {
            if bare {
                records.clear();
            }
        }
        self.removed.push(false);
        slot
    }

    /// Says that a cell was split or merged away, and the id of the cell that took its rows over. It stays,
    /// without rows, for the delta entries that name it.
    ///
    /// # Panics
    /// If there is no such slot; so do [`RootEdit::remove_cell`] and [`RootEdit::set_spread`].
    pub fn retire(&mut self, slot: u32, successor: u32) {
        let cell = &mut self.builder.cells[slot as usize];
        cell.flags = (cell.flags.get() | Cell::RETIRED).into();
        cell.successor = successor.into();
        self.builder.blocks = None;
    }

    /// Drops a cell that has no rows. Retired cells whose successor it was go over to its own successor.
    /// Delta entries that still name it are from then on of an unknown cell.
    pub fn remove_cell(&mut self, slot: u32) {
        self.removed[slot as usize] = true;
        self.builder.blocks = None;
    }

    /// Notes how far the rows of a cell spread now. The centroid, which codes are relative to, stays.
    pub fn set_spread(&mut self, slot: u32, spread: f32) {
        let builder = &mut self.builder;
        for (model, records) in builder.models.iter().zip(&mut builder.records) {
            let bytes = plane2::record_bytes(model.padded_dim());
            let at = slot as usize * bytes;
            if let Some(record) = records.get_mut(at..at + bytes) {
                cell_rank::set_spread(record, model.padded_dim(), spread);
            }
        }
        builder.blocks = None;
    }

    /// Adds a written segment and returns its position. `slots`: the slot of each of its cells, in order.
    pub fn segment(&mut self, written: &WrittenSegment, slots: &[u32]) -> u32 {
        self.dropped.push(false);
        self.builder.segment(written, slots)
    }

    /// Drops a segment with its pieces. Slots of other segments that refer to its rows are from then on
    /// without a row.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn drop_segment(&mut self, segment: u32) {
        self.dropped[segment as usize] = true;
    }

    /// As [`RootBuilder::references`].
    pub fn references(&mut self, segment: u32, targets: &[u32]) {
        self.builder.references(segment, targets);
    }

    /// Replaces the recall curves.
    pub fn curves(&mut self, curves: Curves) {
        self.builder.curves(curves);
    }

    /// The sections of the new root, checked as a reader checks them. Those that did not change have the
    /// bytes that they had (of a root that [`RootBuilder`] made).
    pub fn build(mut self) -> Result<Vec<(SectionKey, Vec<u8>)>, RootError> {
        if self.dropped.contains(&true) {
            self.renumber_segments();
        }
        let cells_changed = self.removed.contains(&true) || self.removed.len() > self.cells_before;
        if cells_changed && !self.builder.group_records.is_empty() {
            self.regroup();
        }
        if self.removed.contains(&true) {
            self.renumber_slots()?;
        }
        self.builder.build()
    }

    fn renumber_segments(&mut self) {
        let builder = &mut self.builder;
        let position = positions(&self.dropped);
        let of = |segment: u32| position[segment as usize];
        let keep = |pieces: &mut Vec<Piece>| {
            pieces.retain_mut(|piece| match of(piece.segment.get()) {
                Some(segment) => {
                    piece.segment = segment.into();
                    true
                }
                None => false,
            });
        };
        keep(&mut builder.pieces);
        keep(&mut builder.delta_pieces);
        builder.references.retain_mut(|reference| {
            let target = reference.target.get();
            if target != Reference::GONE {
                reference.target = of(target).unwrap_or(Reference::GONE).into();
            }
            let segment = of(reference.segment.get());
            reference.segment = segment.unwrap_or_default().into();
            segment.is_some()
        });
        let mut dropped = self.dropped.iter();
        builder.segments.retain(|_| dropped.next() == Some(&false));
    }

    fn renumber_slots(&mut self) -> Result<(), RootError> {
        let builder = &mut self.builder;
        let slot = positions(&self.removed);
        for (kind, pieces) in [
            (SectionKind::Pieces, &mut builder.pieces),
            (SectionKind::DeltaPieces, &mut builder.delta_pieces),
        ] {
            for (position, piece) in pieces.iter_mut().enumerate() {
                let slot = slot[piece.cell.get() as usize];
                piece.cell = slot.ok_or_else(|| entry(kind, position, "cell was removed"))?.into();
            }
        }
        redirect_successors(&mut builder.cells, &self.removed);
        for (model, records) in builder.models.iter().zip(&mut builder.records) {
            if !records.is_empty() {
                let bytes = plane2::record_bytes(model.padded_dim());
                let kept = records.chunks_exact(bytes).zip(&self.removed);
                *records = kept
                    .filter(|(_, removed)| !**removed)
                    .flat_map(|kept| kept.0)
                    .copied()
                    .collect();
            }
        }
        let mut removed = self.removed.iter();
        builder.cells.retain(|_| removed.next() == Some(&false));
        Ok(())
    }

    /// Divides the cells among the groups again: new ones go to the nearest.
    fn regroup(&mut self) {
        let builder = &mut self.builder;
        let model = &builder.models[0];
        let mut group_of = vec![0; builder.cells.len()];
        for range in &builder.group_cells {
            let first = range.first.get() as usize;
            group_of[first..first + range.count.get() as usize].fill(range.group.get());
        }
        let centroids = decode_all(model, &builder.records[0]);
        let groups = decode_all(model, &builder.group_records);
        for (slot, group) in group_of.iter_mut().enumerate().skip(self.cells_before) {
            *group = nearest(&centroids[slot], &groups);
        }
        let kept = group_of.into_iter().zip(&self.removed).filter(|(_, removed)| !**removed);
        let mut ranges: Vec<(u32, u32, u32)> = Vec::new();
        for (slot, (group, _)) in (0u32..).zip(kept) {
            match ranges.last_mut() {
                Some((last, _, count)) if *last == group => *count += 1,
                _ => ranges.push((group, slot, 1)),
            }
        }
        ranges.sort_unstable();
        let range = |(group, first, count): (u32, u32, u32)| CellRange {
            group: group.into(),
            first: first.into(),
            count: count.into(),
            reserved: 0.into(),
        };
        builder.group_cells = ranges.into_iter().map(range).collect();
    }
}

/// The new position of everything that stays.
fn positions(gone: &[bool]) -> Vec<Option<u32>> {
    let mut next = 0..;
    gone.iter().map(|gone| if *gone { None } else { next.next() }).collect()
}

/// Leads chains of successors past the cells that are removed.
fn redirect_successors(cells: &mut [Cell], removed: &[bool]) {
    let at = |id: u32, cells: &[Cell]| cells.binary_search_by_key(&id, |cell| cell.id.get()).ok();
    for slot in 0..cells.len() {
        let mut successor = cells[slot].successor.get();
        // No longer than the table, whatever damage made of the chain.
        for _ in 0..cells.len() {
            match at(successor, cells) {
                Some(next) if removed[next] => successor = cells[next].successor.get(),
                _ => break,
            }
        }
        cells[slot].successor = successor.into();
    }
}

fn decode_all(model: &Model, records: &[u8]) -> Vec<Vec<f32>> {
    let decode = |record| {
        let mut x = vec![0.0; model.padded_dim()];
        plane2::decode(RacyBytes::new(record), &mut x);
        x
    };
    records.chunks_exact(plane2::record_bytes(model.padded_dim())).map(decode).collect()
}

fn nearest(x: &[f32], all: &[Vec<f32>]) -> u32 {
    let distance = |y: &[f32]| -> f32 { x.iter().zip(y).map(|(x, y)| (x - y) * (x - y)).sum() };
    let scored = (0u32..).zip(all).map(|(number, y)| (distance(y), number));
    scored.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0, |(_, number)| number)
}
