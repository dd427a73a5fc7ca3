//! The checks that make a [`Root`] safe to use without looking twice.

use bytes::Bytes;
use zerocopy::{FromBytes, Immutable, Unaligned};

use super::{
    reader::Root,
    record::{Cell, CellRange, Reference},
    section::{RootError, SectionKey, SectionKind, entry},
};
use crate::{
    quantize::{Model, plane1, plane2},
    segment::{Piece, SegmentEntry, SegmentGeometry, geometry::BLOCK_ROWS},
};

fn table<T: FromBytes + Immutable + Unaligned>(
    kind: SectionKind,
    bytes: &Bytes,
) -> Result<&[T], RootError> {
    <[T]>::ref_from_bytes(bytes).map_err(|_| RootError::Length {
        section: kind.into(),
        expected: bytes.len().next_multiple_of(size_of::<T>()) as u64,
        found: bytes.len() as u64,
    })
}

/// Checks everything and fills in what is derived from the segments' entries.
pub(super) fn check(root: &mut Root) -> Result<(), RootError> {
    let cells = table::<Cell>(SectionKind::Cells, &root.cells)?;
    let pieces = table::<Piece>(SectionKind::Pieces, &root.pieces)?;
    let delta_pieces = table::<Piece>(SectionKind::DeltaPieces, &root.delta_pieces)?;
    let segments = table::<SegmentEntry>(SectionKind::Segments, &root.segments)?;
    let references = table::<Reference>(SectionKind::References, &root.references)?;
    let ranges = table::<CellRange>(SectionKind::GroupCells, &root.group_cells)?;

    if cells.len() >= Cell::NO_CELL as usize || segments.len() >= Reference::GONE as usize {
        return Err(entry(SectionKind::Cells, cells.len(), "more cells than ids"));
    }
    for (number, model) in root.models.iter().enumerate() {
        let (blocks, records) = (&root.centroid_blocks[number], &root.centroid_records[number]);
        // Segments of a model can only be scanned with its centroids; a model without segments, as that
        // of an index that was created empty or retrained just now, may come without.
        if number > 0 && blocks.is_empty() && records.is_empty() {
            continue;
        }
        let key = |kind| SectionKey { kind, number: number as u16 };
        check_centroids(
            model,
            cells.len(),
            (key(SectionKind::CentroidBlocks), blocks),
            (key(SectionKind::CentroidRecords), records),
        )?;
    }

    let (geometry, segment_models) = check_segments(root, segments, cells.len())?;
    check_pieces(SectionKind::Pieces, pieces, segments, &geometry, cells)?;
    check_pieces(SectionKind::DeltaPieces, delta_pieces, segments, &geometry, cells)?;
    if !delta_pieces.is_sorted_by_key(|piece| (piece.segment.get(), piece.cell.get())) {
        return Err(entry(SectionKind::DeltaPieces, 0, "not sorted by segment and cell"));
    }
    check_cells(cells, pieces)?;
    check_references(references, segments)?;
    check_groups(root, ranges, cells.len())?;
    root.geometry = geometry;
    root.segment_models = segment_models;
    let refers = |piece: &Piece| piece.flags.get() & Piece::REFS != 0;
    root.may_repeat = root.pieces().iter().chain(root.delta_pieces()).any(refers);
    Ok(())
}

/// Lengths of centroid sections: `count` records, and as many blocks as they fill.
fn check_centroids(
    model: &Model,
    count: usize,
    (blocks_key, blocks): (SectionKey, &Bytes),
    (records_key, records): (SectionKey, &Bytes),
) -> Result<(), RootError> {
    let length = |section, expected: usize, found: usize| match expected == found {
        true => Ok(()),
        false => Err(RootError::Length { section, expected: expected as u64, found: found as u64 }),
    };
    let record = plane2::record_bytes(model.padded_dim());
    length(records_key, count.saturating_mul(record), records.len())?;
    let block = plane1::block_bytes(model.padded_dim(), 1);
    let block_count = count.div_ceil(BLOCK_ROWS as usize);
    length(blocks_key, block_count.saturating_mul(block), blocks.len())
}

fn check_segments(
    root: &Root,
    segments: &[SegmentEntry],
    cells: usize,
) -> Result<(Vec<SegmentGeometry>, Vec<u32>), RootError> {
    let mut geometry = Vec::with_capacity(segments.len());
    let mut models = Vec::with_capacity(segments.len());
    for (position, segment) in segments.iter().enumerate() {
        let damaged = |what| entry(SectionKind::Segments, position, what);
        let model = root.models.iter().position(|model| segment.model == model.id);
        let number = model.ok_or_else(|| damaged("no such model"))?;
        let model = &root.models[number];
        let as_model = segment.dim.get() as usize == model.dim
            && segment.padded_dim.get() as usize == model.padded_dim()
            && usize::from(segment.bits.get()) == model.bits;
        if !as_model {
            return Err(damaged("codes have another shape than the model's"));
        }
        if root.centroid_records[number].is_empty() && cells > 0 {
            return Err(damaged("no centroids in the space of its model"));
        }
        geometry.push(SegmentGeometry::new(segment).map_err(|cause| RootError::Layout {
            section: SectionKind::Segments.into(),
            entry: position as u64,
            cause,
        })?);
        models.push(number as u32);
    }
    let mut objects: Vec<_> = segments.iter().map(|segment| segment.object).collect();
    objects.sort_unstable();
    if objects.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(entry(SectionKind::Segments, 0, "the same object twice"));
    }
    Ok((geometry, models))
}

fn check_pieces(
    kind: SectionKind,
    pieces: &[Piece],
    segments: &[SegmentEntry],
    geometry: &[SegmentGeometry],
    cells: &[Cell],
) -> Result<(), RootError> {
    for (position, piece) in pieces.iter().enumerate() {
        let damaged = |what| entry(kind, position, what);
        let segment = piece.segment.get() as usize;
        let geometry = geometry.get(segment).ok_or_else(|| damaged("no such segment"))?;
        if segments[segment].is_delta() != (kind == SectionKind::DeltaPieces) {
            return Err(damaged("delta segments have their own table of pieces"));
        }
        match cells.get(piece.cell.get() as usize) {
            None => return Err(damaged("no such cell")),
            Some(cell) if cell.is_retired() => return Err(damaged("cell is retired")),
            Some(_) => {}
        }
        geometry.check_piece(piece).map_err(|cause| RootError::Layout {
            section: kind.into(),
            entry: position as u64,
            cause,
        })?;
    }
    Ok(())
}

/// Ids ascend, only retired cells have successors, and the cells' pieces follow each other.
fn check_cells(cells: &[Cell], pieces: &[Piece]) -> Result<(), RootError> {
    let mut next_piece = 0usize;
    for (slot, cell) in cells.iter().enumerate() {
        let damaged = |what| entry(SectionKind::Cells, slot, what);
        let id = cell.id.get();
        if id == Cell::NO_CELL || slot > 0 && cells[slot - 1].id.get() >= id {
            return Err(damaged("ids do not ascend"));
        }
        if cell.flags.get() & !Cell::RETIRED != 0 || cell.reserved != [0; 8] {
            return Err(damaged("unknown flags"));
        }
        let successor = cell.successor.get();
        if !cell.is_retired() && successor != Cell::NO_CELL {
            return Err(damaged("successor of a cell that is not retired"));
        }
        if cell.first_piece.get() as usize != next_piece {
            return Err(damaged("pieces do not follow those of the cell before"));
        }
        let end = next_piece + cell.pieces.get() as usize;
        let own =
            pieces.get(next_piece..end).ok_or_else(|| damaged("more pieces than there are"))?;
        if own.iter().any(|piece| piece.cell.get() as usize != slot) {
            return Err(damaged("pieces of another cell"));
        }
        let rows: u64 = own.iter().map(|piece| u64::from(piece.slots.get())).sum();
        if rows != u64::from(cell.rows.get()) {
            return Err(damaged("rows are not those of its pieces"));
        }
        next_piece = end;
    }
    if next_piece != pieces.len() {
        return Err(entry(SectionKind::Pieces, next_piece, "piece of no cell"));
    }
    Ok(())
}

fn check_references(references: &[Reference], segments: &[SegmentEntry]) -> Result<(), RootError> {
    if !references.is_sorted_by_key(|reference| reference.segment.get()) {
        return Err(entry(SectionKind::References, 0, "not sorted by segment"));
    }
    for (position, reference) in references.iter().enumerate() {
        let known = |segment: u32| (segment as usize) < segments.len();
        let target = reference.target.get();
        if !known(reference.segment.get()) || !(known(target) || target == Reference::GONE) {
            return Err(entry(SectionKind::References, position, "no such segment"));
        }
    }
    for (position, segment) in segments.iter().enumerate() {
        let first = references.partition_point(|r| (r.segment.get() as usize) < position);
        let count = references[first..].partition_point(|r| r.segment.get() as usize == position);
        if count != segment.references.get() as usize {
            return Err(entry(SectionKind::References, position, "references are not complete"));
        }
    }
    Ok(())
}

fn check_groups(root: &Root, ranges: &[CellRange], cells: usize) -> Result<(), RootError> {
    let model = &root.models[0];
    let groups = root.group_records.len() / plane2::record_bytes(model.padded_dim());
    check_centroids(
        model,
        groups,
        (SectionKind::GroupBlocks.into(), &root.group_blocks),
        (SectionKind::GroupRecords.into(), &root.group_records),
    )?;
    if !ranges.is_sorted_by_key(|range| range.group.get()) {
        return Err(entry(SectionKind::GroupCells, 0, "not sorted by group"));
    }
    let mut covered = 0u64;
    for (position, range) in ranges.iter().enumerate() {
        let end = u64::from(range.first.get()) + u64::from(range.count.get());
        if range.group.get() as usize >= groups
            || range.count == 0
            || end > cells as u64
            || range.reserved != 0
        {
            return Err(entry(SectionKind::GroupCells, position, "out of range"));
        }
        covered += u64::from(range.count.get());
    }
    let mut by_slot: Vec<_> = ranges.iter().map(|r| (r.first.get(), r.count.get())).collect();
    by_slot.sort_unstable();
    // Ends were checked, so the sum does not overflow.
    let overlap = by_slot.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0);
    if groups > 0 && (overlap || covered != cells as u64) {
        return Err(entry(SectionKind::GroupCells, 0, "groups do not divide the cells"));
    }
    Ok(())
}
