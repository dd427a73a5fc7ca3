//! A checked root and what a search asks of it.

use bytes::Bytes;
use zerocopy::{FromBytes, Immutable, Unaligned};

use super::{
    check,
    curves::Curves,
    models,
    record::{Cell, CellRange, Reference},
    section::{RootError, SectionKey, SectionKind},
};
use crate::{
    Metric, ObjectId,
    quantize::{Model, Query, RowError},
    segment::{Piece, SegmentEntry, SegmentGeometry, SegmentName, SlotRef},
};

/// A root. Its sections are kept as they came (shared, mapped or owned bytes) and were checked once, so
/// that every position which one table holds is a valid position in another.
#[derive(Debug, Clone)]
pub struct Root {
    pub(super) models: Vec<Model>,
    pub(super) centroid_blocks: Vec<Bytes>,
    pub(super) centroid_records: Vec<Bytes>,
    pub(super) cells: Bytes,
    pub(super) pieces: Bytes,
    pub(super) segments: Bytes,
    pub(super) delta_pieces: Bytes,
    pub(super) references: Bytes,
    pub(super) group_blocks: Bytes,
    pub(super) group_records: Bytes,
    pub(super) group_cells: Bytes,
    pub(super) curves: Curves,
    pub(super) geometry: Vec<SegmentGeometry>,
    /// Position of each segment's model.
    pub(super) segment_models: Vec<u32>,
    pub(super) may_repeat: bool,
}

/// A table of records. The length was checked when the root was opened.
fn table<T: FromBytes + Immutable + Unaligned>(bytes: &Bytes) -> &[T] {
    <[T]>::ref_from_bytes(bytes).unwrap_or_default()
}

impl Root {
    /// Checks the sections, given by their numbers ([`SectionKey::code`]). Only the models are required.
    pub fn from_sections<B: Into<Bytes>>(
        sections: impl IntoIterator<Item = (u32, B)>,
    ) -> Result<Self, RootError> {
        let mut by_key: Vec<(SectionKey, Bytes)> = Vec::new();
        for (code, bytes) in sections {
            let key = SectionKey::from_code(code).ok_or(RootError::UnknownSection(code))?;
            if by_key.iter().any(|(other, _)| *other == key) {
                return Err(RootError::DuplicateSection(key));
            }
            by_key.push((key, bytes.into()));
        }
        let mut take = |key: SectionKey| {
            let at = by_key.iter().position(|(other, _)| *other == key);
            at.map(|at| by_key.swap_remove(at).1)
        };
        let models = SectionKey::only(SectionKind::Models);
        let models = take(models).ok_or(RootError::MissingSection(models))?;
        let models = models::decode(&models)?;
        let mut of_models = |kind| -> Vec<Bytes> {
            let numbers = 0..models.len() as u16;
            numbers.map(|number| take(SectionKey { kind, number }).unwrap_or_default()).collect()
        };
        let centroid_blocks = of_models(SectionKind::CentroidBlocks);
        let centroid_records = of_models(SectionKind::CentroidRecords);
        let mut only = |kind| take(SectionKey::only(kind)).unwrap_or_default();
        let curves = match only(SectionKind::Curves) {
            empty if empty.is_empty() => Curves::default(),
            bytes => Curves::from_bytes(&bytes)?,
        };
        let mut root = Self {
            models,
            centroid_blocks,
            centroid_records,
            cells: only(SectionKind::Cells),
            pieces: only(SectionKind::Pieces),
            segments: only(SectionKind::Segments),
            delta_pieces: only(SectionKind::DeltaPieces),
            references: only(SectionKind::References),
            group_blocks: only(SectionKind::GroupBlocks),
            group_records: only(SectionKind::GroupRecords),
            group_cells: only(SectionKind::GroupCells),
            curves,
            geometry: Vec::new(),
            segment_models: Vec::new(),
            may_repeat: false,
        };
        if let Some((key, _)) = by_key.first() {
            // Of a model that there is not.
            return Err(RootError::UnknownSection(key.code()));
        }
        check::check(&mut root)?;
        Ok(root)
    }

    /// The metric of the index.
    pub fn metric(&self) -> Metric {
        self.models[0].metric
    }

    /// Dimensions of the rows.
    pub fn dim(&self) -> usize {
        self.models[0].dim
    }

    /// The models; new rows are coded by the first. At least one.
    pub fn models(&self) -> &[Model] {
        &self.models
    }

    /// A query in the space of each model, as a search wants it.
    pub fn queries(&self, q: &[f32]) -> Result<Vec<Query>, RowError> {
        self.models.iter().map(|model| model.query(q)).collect()
    }

    /// Number of slots, those of retired cells included.
    pub fn cell_count(&self) -> usize {
        self.cells().len()
    }

    /// The cells, by slot and by ascending id.
    pub fn cells(&self) -> &[Cell] {
        table(&self.cells)
    }

    /// The slot of the cell with this id. Ids and slots agree until cells are dropped.
    pub fn slot_of(&self, cell_id: u32) -> Option<u32> {
        let cells = self.cells();
        if cells.get(cell_id as usize).is_some_and(|cell| cell.id == cell_id) {
            return Some(cell_id);
        }
        cells.binary_search_by_key(&cell_id, |cell| cell.id.get()).ok().map(|slot| slot as u32)
    }

    /// The slot of the cell that has the rows of this one now: its own, or the last of its successors.
    pub fn live_slot_of(&self, cell_id: u32) -> Option<u32> {
        let mut slot = self.slot_of(cell_id)?;
        // A chain that is longer than the table is a ring, which only damage can make.
        for _ in 0..self.cell_count() {
            let cell = &self.cells()[slot as usize];
            if !cell.is_retired() {
                return Some(slot);
            }
            slot = self.slot_of(cell.successor.get())?;
        }
        None
    }

    /// The centroid of a cell in the space of the first model: a plane-2 record. Empty if the slot does
    /// not exist.
    pub fn centroid_record(&self, slot: u32) -> &[u8] {
        self.centroid_record_in(0, slot)
    }

    /// The centroid of a cell in the space of a model; empty if either does not exist.
    pub fn centroid_record_in(&self, model: usize, slot: u32) -> &[u8] {
        let Some(records) = self.centroid_records.get(model) else { return &[] };
        record_at(records, self.models[model].padded_dim() + 16, slot)
    }

    /// All centroids in the space of the first model as plane-1 blocks with one bit a dimension,
    /// relative to the origin.
    pub fn centroid_blocks(&self) -> &[u8] {
        &self.centroid_blocks[0]
    }

    /// All centroids in the space of a model as plane-1 blocks.
    pub fn centroid_blocks_in(&self, model: usize) -> &[u8] {
        self.centroid_blocks.get(model).map_or(&[], |blocks| blocks)
    }

    /// Where the rows of a cell lie, except for those in delta segments.
    pub fn pieces_of(&self, slot: u32) -> &[Piece] {
        let Some(cell) = self.cells().get(slot as usize) else { return &[] };
        let first = cell.first_piece.get() as usize;
        &table(&self.pieces)[first..first + cell.pieces.get() as usize]
    }

    /// Whether a row may lie in more than one cell.
    pub fn may_repeat(&self) -> bool {
        self.may_repeat
    }

    /// Rows of plane 1 that a search scans for a cell.
    pub fn rows_of(&self, slot: u32) -> u64 {
        let pieces = self.pieces_of(slot).iter().chain(self.delta_pieces_of(slot));
        pieces.map(|piece| u64::from(piece.slots.get())).sum()
    }

    /// Pieces outside of delta segments, by slot.
    pub fn pieces(&self) -> &[Piece] {
        table(&self.pieces)
    }

    /// Pieces in delta segments, by segment and slot.
    pub fn delta_pieces(&self) -> &[Piece] {
        table(&self.delta_pieces)
    }

    /// Where the rows of a cell lie in delta segments, of which there are few.
    pub fn delta_pieces_of(&self, slot: u32) -> impl Iterator<Item = &Piece> {
        let mut rest = self.delta_pieces();
        std::iter::from_fn(move || {
            while let Some(first) = rest.first() {
                let segment = first.segment;
                let end = rest.partition_point(|piece| piece.segment == segment);
                let (of_segment, later) = rest.split_at(end);
                let at = of_segment.partition_point(|piece| piece.cell < slot);
                if of_segment.get(at).is_some_and(|piece| piece.cell == slot) {
                    // A cell may have several pieces in a segment: go on behind this one.
                    rest = &rest[at + 1..];
                    return Some(&of_segment[at]);
                }
                rest = later;
            }
            None
        })
    }

    /// The segments.
    pub fn segments(&self) -> &[SegmentEntry] {
        table(&self.segments)
    }

    /// Name of the object of a segment. Panics if there is no such segment; so do the next two.
    pub fn segment_name(&self, segment: u32) -> SegmentName {
        self.segments()[segment as usize].name()
    }

    /// Where the columns of a segment lie.
    pub fn geometry(&self, segment: u32) -> &SegmentGeometry {
        &self.geometry[segment as usize]
    }

    /// Position of a segment's model.
    pub fn model_of(&self, segment: u32) -> usize {
        self.segment_models[segment as usize] as usize
    }

    /// Position of the segment that is this object.
    pub fn segment_of(&self, object: ObjectId) -> Option<u32> {
        let at = self.segments().iter().position(|entry| entry.object == object);
        at.map(|at| at as u32)
    }

    /// Segment and ordinal of the row that a slot of `segment` refers to. Nothing if the row is not in
    /// this root, or if the reference is damaged.
    pub fn resolve(&self, segment: u32, slot: SlotRef) -> Option<(u32, u32)> {
        let target = match slot.segment.get() {
            0 => segment,
            number => {
                let references = table::<Reference>(&self.references);
                let first = references.partition_point(|reference| reference.segment < segment);
                let reference = references.get(first.checked_add(number as usize - 1)?)?;
                (reference.segment == segment).then_some(reference.target.get())?
            }
        };
        let rows = self.geometry.get(target as usize)?.rows();
        (slot.ordinal < rows).then_some((target, slot.ordinal.get()))
    }

    /// Number of groups of cells; 0 if there is no second level.
    pub fn group_count(&self) -> usize {
        self.group_records.len() / (self.models[0].padded_dim() + 16)
    }

    /// The centroid of a group in the space of the first model: a plane-2 record. Empty if there is no
    /// such group.
    pub fn group_record(&self, group: u32) -> &[u8] {
        record_at(&self.group_records, self.models[0].padded_dim() + 16, group)
    }

    /// The centroids of all groups as plane-1 blocks with one bit a dimension, relative to the origin.
    pub fn group_blocks(&self) -> &[u8] {
        &self.group_blocks
    }

    /// The slots of a group's cells.
    pub fn group_cells(&self, group: u32) -> &[CellRange] {
        let ranges = table::<CellRange>(&self.group_cells);
        let first = ranges.partition_point(|range| range.group < group);
        let count = ranges[first..].partition_point(|range| range.group == group);
        &ranges[first..first + count]
    }

    /// The slots of all groups' cells, by group.
    pub fn all_group_cells(&self) -> &[CellRange] {
        table(&self.group_cells)
    }

    /// What the slot references of segments mean, by segment.
    pub fn references(&self) -> &[Reference] {
        table(&self.references)
    }

    /// The recall curves.
    pub fn curves(&self) -> &Curves {
        &self.curves
    }

    /// Rows in all segments, deleted ones included.
    pub fn rows(&self) -> u64 {
        self.segments().iter().map(|entry| u64::from(entry.rows.get())).sum()
    }

    /// Bytes of all segments.
    pub fn object_bytes(&self) -> u64 {
        self.segments().iter().map(|entry| entry.object_len.get()).sum()
    }
}

fn record_at(records: &Bytes, len: usize, number: u32) -> &[u8] {
    let at = (number as usize).checked_mul(len);
    let range = at.and_then(|at| Some(at..at.checked_add(len)?));
    range.and_then(|range| records.get(range)).unwrap_or_default()
}
