//! Makes the sections of a root.

use zerocopy::IntoBytes;

use super::{
    curves::Curves,
    models,
    reader::Root,
    record::{Cell, CellRange, Reference},
    section::{RootError, SectionKey, SectionKind},
};
use crate::{
    kernel::RacyBytes,
    quantize::{
        Model,
        cell_rank::{self, RankTerms},
        plane1::{self, Plane1Row, Plane1RowRef},
        plane2,
    },
    segment::{Piece, SegmentEntry, WrittenSegment},
};

/// Collects cells and segments. Cells come by ascending id; their order is that of the slots.
#[derive(Debug, Default)]
pub struct RootBuilder {
    pub(super) models: Vec<Model>,
    pub(super) cells: Vec<Cell>,
    /// Centroid records of each model.
    pub(super) records: Vec<Vec<u8>>,
    /// Centroid blocks of each model, if they were taken from a root that has the same cells.
    pub(super) blocks: Option<Vec<Vec<u8>>>,
    pub(super) pieces: Vec<Piece>,
    pub(super) delta_pieces: Vec<Piece>,
    pub(super) segments: Vec<SegmentEntry>,
    pub(super) references: Vec<Reference>,
    pub(super) group_records: Vec<u8>,
    pub(super) group_cells: Vec<CellRange>,
    pub(super) curves: Curves,
}

impl RootBuilder {
    /// An empty root. New rows are coded by the first model.
    pub fn new(models: Vec<Model>) -> Self {
        Self { records: vec![Vec::new(); models.len()], models, ..Self::default() }
    }

    /// Adds a cell and returns its slot. `centroids`: its plane-2 record in the space of each model.
    /// Panics if a record has another length than the model's; so does [`RootBuilder::retired_cell`].
    pub fn cell(&mut self, id: u32, centroids: &[&[u8]]) -> u32 {
        self.push_cell(id, 0, Cell::NO_CELL, centroids)
    }

    /// Adds a cell that was split or merged away.
    pub fn retired_cell(&mut self, id: u32, successor: u32, centroids: &[&[u8]]) -> u32 {
        self.push_cell(id, Cell::RETIRED, successor, centroids)
    }

    fn push_cell(&mut self, id: u32, flags: u32, successor: u32, centroids: &[&[u8]]) -> u32 {
        self.blocks = None;
        assert_eq!(centroids.len(), self.models.len(), "one centroid for each model");
        for ((records, centroid), model) in self.records.iter_mut().zip(centroids).zip(&self.models)
        {
            assert_eq!(centroid.len(), plane2::record_bytes(model.padded_dim()));
            records.extend_from_slice(centroid);
        }
        self.cells.push(Cell {
            id: id.into(),
            flags: flags.into(),
            first_piece: 0.into(),
            pieces: 0.into(),
            rows: 0.into(),
            successor: successor.into(),
            reserved: [0; 8],
        });
        self.cells.len() as u32 - 1
    }

    /// Adds a written segment and returns its position. `slots`: the slot of each of its cells, in order.
    pub fn segment(&mut self, written: &WrittenSegment, slots: &[u32]) -> u32 {
        let segment = self.segments.len() as u32;
        let pieces = written.pieces(slots, segment);
        self.entry(written.entry, pieces)
    }

    /// Adds a segment by its entry, and its pieces; returns its position, which the pieces get.
    pub fn entry(&mut self, entry: SegmentEntry, pieces: impl IntoIterator<Item = Piece>) -> u32 {
        let segment = self.segments.len() as u32;
        let table = if entry.is_delta() { &mut self.delta_pieces } else { &mut self.pieces };
        table.extend(pieces.into_iter().map(|piece| Piece { segment: segment.into(), ..piece }));
        self.segments.push(entry);
        segment
    }

    /// Says what the slot references of a segment mean: the positions of the segments in its table of
    /// references, in order ([`Reference::GONE`] for one that is not here).
    pub fn references(&mut self, segment: u32, targets: &[u32]) {
        self.references.extend(
            targets
                .iter()
                .map(|&target| Reference { segment: segment.into(), target: target.into() }),
        );
    }

    /// Adds a group of cells, for a second level. `centroid`: plane-2 record in the space of the first
    /// model; `ranges`: first slot and count.
    pub fn group(&mut self, centroid: &[u8], ranges: &[(u32, u32)]) {
        let record = plane2::record_bytes(self.models[0].padded_dim());
        assert_eq!(centroid.len(), record);
        let group = (self.group_records.len() / record) as u32;
        self.group_records.extend_from_slice(centroid);
        self.group_cells.extend(ranges.iter().map(|&(first, count)| CellRange {
            group: group.into(),
            first: first.into(),
            count: count.into(),
            reserved: 0.into(),
        }));
    }

    /// Sets the recall curves.
    pub fn curves(&mut self, curves: Curves) {
        self.curves = curves;
    }

    /// The sections, checked as a reader checks them; empty ones are left out.
    pub fn build(mut self) -> Result<Vec<(SectionKey, Vec<u8>)>, RootError> {
        self.pieces.sort_by_key(|piece| (piece.cell.get(), piece.segment.get()));
        self.delta_pieces.sort_by_key(|piece| (piece.segment.get(), piece.cell.get()));
        self.references.sort_by_key(|reference| reference.segment.get());
        let mut next = 0;
        for (slot, cell) in self.cells.iter_mut().enumerate() {
            let own =
                self.pieces[next..].iter().take_while(|piece| piece.cell.get() == slot as u32);
            let (count, rows) = own.fold((0, 0u32), |(count, rows), piece| {
                (count + 1, rows.saturating_add(piece.slots.get()))
            });
            cell.first_piece = (next as u32).into();
            cell.pieces = (count as u32).into();
            cell.rows = rows.into();
            next += count;
        }
        let mut sections = vec![(SectionKind::Models.into(), models::encode(&self.models))];
        let retired = |slot: usize| self.cells[slot].is_retired();
        let blocks = self.blocks.unwrap_or_else(|| {
            let models = self.models.iter().zip(&self.records);
            models.map(|(model, records)| centroid_blocks(model, records, retired)).collect()
        });
        for (number, (blocks, records)) in (0..).zip(blocks.into_iter().zip(self.records)) {
            let key = |kind| SectionKey { kind, number };
            sections.push((key(SectionKind::CentroidBlocks), blocks));
            sections.push((key(SectionKind::CentroidRecords), records));
        }
        let curves = match self.curves.curves() {
            [] => Vec::new(),
            _ => self.curves.to_bytes(),
        };
        let group_blocks = centroid_blocks(&self.models[0], &self.group_records, |_| false);
        sections.extend([
            (SectionKind::Cells.into(), self.cells.as_bytes().to_vec()),
            (SectionKind::Pieces.into(), self.pieces.as_bytes().to_vec()),
            (SectionKind::Segments.into(), self.segments.as_bytes().to_vec()),
            (SectionKind::Curves.into(), curves),
            (SectionKind::DeltaPieces.into(), self.delta_pieces.as_bytes().to_vec()),
            (SectionKind::References.into(), self.references.as_bytes().to_vec()),
            (SectionKind::GroupBlocks.into(), group_blocks),
            (SectionKind::GroupRecords.into(), self.group_records),
            (SectionKind::GroupCells.into(), self.group_cells.as_bytes().to_vec()),
        ]);
        sections.retain(|(_, bytes): &(SectionKey, Vec<u8>)| !bytes.is_empty());
        Root::from_sections(sections.iter().map(|(key, bytes)| (key.code(), bytes.clone())))?;
        Ok(sections)
    }
}

/// The plane-1 blocks of centroids: of what their records decode to, relative to the origin. The rows
/// of retired cells cannot win.
fn centroid_blocks(model: &Model, records: &[u8], retired: impl Fn(usize) -> bool) -> Vec<u8> {
    let padded_dim = model.padded_dim();
    let shape = plane1::Shape::of_centroids(model);
    let origin = vec![0.0; padded_dim];
    let mut centroid = vec![0.0; padded_dim];
    let rows: Vec<Plane1Row> = records
        .chunks_exact(plane2::record_bytes(padded_dim))
        .enumerate()
        .map(|(slot, record)| {
            if retired(slot) {
                let packed = vec![0; padded_dim / 8];
                return Plane1Row { a: f32::INFINITY, k: 0.0, e: 0.0, packed };
            }
            plane2::decode(RacyBytes::new(record), &mut centroid);
            let mut row = plane1::encode_row(shape, &centroid, &origin);
            // So that the scan's lower bound, at epsilon 1, is the cell's rank.
            let spread = cell_rank::spread(RacyBytes::new(record), padded_dim);
            let terms = RankTerms::new(model.metric, spread);
            row.a += terms.add;
            row.e = terms.per_norm;
            row
        })
        .collect();
    let rows: Vec<Plane1RowRef<'_>> = rows.iter().map(Into::into).collect();
    let mut blocks = Vec::new();
    plane1::blocks_from_rows(shape, &rows, &mut blocks);
    blocks
}
