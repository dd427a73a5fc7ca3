//! Reads a whole segment object that is in memory: for ingesting a fresh file, for checks, for tests.

use std::borrow::Cow;

use zerocopy::{FromBytes, Immutable, Unaligned};

use super::{
    geometry::{LayoutError, Plane1Part, SegmentGeometry, same},
    key::{PartKey, PartKind, PartRef},
    layout::{CellSpec, SegmentLayout},
    part::{self, PartError},
    record::{Piece, SegmentCell, SegmentEntry},
};
use crate::ObjectId;

/// Why bytes are not a segment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// A part is damaged, or another one.
    #[error("{key}: {cause}")]
    Part {
        /// The part that was expected.
        key: PartKey,
        /// What is wrong with it.
        cause: PartError,
    },
    /// The header or footer contradicts itself or the object.
    #[error("segment {object}: {cause}")]
    Layout {
        /// The segment.
        object: ObjectId,
        /// What is wrong with it.
        cause: LayoutError,
    },
}

/// A segment whose header and footer have been checked against each other and against the object's
/// length. The other parts are checked when they are read.
#[derive(Debug, Clone)]
pub struct SegmentReader<'a> {
    bytes: &'a [u8],
    layout: SegmentLayout,
    references: Vec<ObjectId>,
    model: Cow<'a, [u8]>,
}

impl<'a> SegmentReader<'a> {
    /// Checks header and footer of the object with this id.
    pub fn open(object: ObjectId, bytes: &'a [u8]) -> Result<Self, SegmentError> {
        let layout_error = |cause| SegmentError::Layout { object, cause };
        let key = PartKey::new(object, PartKind::Meta, 0);
        let header_len = part::framed_len(size_of::<SegmentEntry>());
        let header = bytes.get(..header_len).unwrap_or(bytes);
        let payload = verified(key, header)?;
        let entry = SegmentEntry::read_from_bytes(payload).map_err(|_| SegmentError::Part {
            key,
            cause: PartError::Length { payload: payload.len() as u64, found: header.len() as u64 },
        })?;
        if entry.object != object {
            let cause = PartError::Object { expected: object, found: entry.object };
            return Err(SegmentError::Part { key, cause });
        }
        let geometry = SegmentGeometry::new(&entry).map_err(layout_error)?;
        same("object length", entry.object_len.get(), bytes.len() as u64).map_err(layout_error)?;

        // Lengths agree with the object's, so the footer cannot be longer than the object.
        let mut footer = Cow::Borrowed(&[][..]);
        for part in geometry.footer_parts() {
            let payload = exact(&geometry, bytes, &part)?;
            if footer.is_empty() {
                footer = Cow::Borrowed(payload);
            } else {
                footer.to_mut().extend_from_slice(payload);
            }
        }
        // Each part has its exact length, so the footer splits into its tables without a rest.
        let (cells, rest) = split_table::<SegmentCell>(&footer, entry.cells.get());
        let (references, model) = split_table::<ObjectId>(rest, entry.references.get());
        let references = references.to_vec();
        let layout = check_cells(&entry, cells).map_err(layout_error)?;
        let model_at = footer.len() - model.len();
        let model = match footer {
            Cow::Borrowed(footer) => Cow::Borrowed(&footer[model_at..]),
            Cow::Owned(footer) => Cow::Owned(footer[model_at..].to_vec()),
        };
        Ok(Self { bytes, layout, references, model })
    }

    /// The segment's entry.
    pub fn entry(&self) -> &SegmentEntry {
        self.layout.entry()
    }

    /// Where the columns lie.
    pub fn geometry(&self) -> &SegmentGeometry {
        self.layout.geometry()
    }

    /// The cells, in the order of their rows.
    pub fn cells(&self) -> &[SegmentCell] {
        self.layout.cells()
    }

    /// The objects that slot references name.
    pub fn references(&self) -> &[ObjectId] {
        &self.references
    }

    /// The model's serialised form; empty if it was left out.
    pub fn model_bytes(&self) -> &[u8] {
        &self.model
    }

    /// Every part, in the order in which they lie in the object, without gaps.
    pub fn parts(&self) -> impl Iterator<Item = PartRef> {
        self.layout.parts()
    }

    /// The bytes of a part, unchecked; empty if the range is not in the object.
    pub fn part_bytes(&self, part: &PartRef) -> &'a [u8] {
        slice(self.bytes, part)
    }

    /// Checks a part and gives its payload.
    pub fn payload(&self, part: &PartRef) -> Result<&'a [u8], SegmentError> {
        exact(self.geometry(), self.bytes, part)
    }

    /// Checks every part.
    pub fn verify_all(&self) -> Result<(), SegmentError> {
        self.parts().try_for_each(|part| self.payload(&part).map(drop))
    }

    /// The plane-1 parts of a cell, each with its checked payload.
    pub fn plane1(&self, cell: &SegmentCell) -> Result<Vec<(Plane1Part, &'a [u8])>, SegmentError> {
        let piece: Piece = cell.piece(0, 0);
        let parts = self.geometry().plane1_parts(&piece);
        parts.map(|plane1| Ok((plane1, self.payload(&plane1.part)?))).collect()
    }

    /// All ids, in ordinal order.
    pub fn ids(&self) -> Result<Vec<u64>, SegmentError> {
        let mut ids = Vec::with_capacity(self.geometry().rows() as usize);
        for part in self.geometry().ids_parts() {
            let (whole, _) = self.payload(&part)?.as_chunks::<8>();
            ids.extend(whole.iter().map(|id| u64::from_le_bytes(*id)));
        }
        Ok(ids)
    }

    /// The plane-2 record of a row, if there is such a row.
    pub fn record(&self, ordinal: u32) -> Result<Option<&'a [u8]>, SegmentError> {
        let record = self.geometry().shape().record_bytes();
        self.field(self.geometry().chunk_of(ordinal), record)
    }

    /// The uncompressed row, if there is such a row.
    pub fn row(&self, ordinal: u32) -> Result<Option<&'a [u8]>, SegmentError> {
        self.field(self.geometry().row_of(ordinal), self.geometry().row_bytes())
    }

    fn field(
        &self,
        place: Option<(PartRef, usize)>,
        len: usize,
    ) -> Result<Option<&'a [u8]>, SegmentError> {
        let Some((part, at)) = place else { return Ok(None) };
        Ok(self.payload(&part)?.get(at..at + len))
    }
}

fn verified(key: PartKey, bytes: &[u8]) -> Result<&[u8], SegmentError> {
    let range = part::verify(key, bytes).map_err(|cause| SegmentError::Part { key, cause })?;
    Ok(&bytes[range])
}

/// The checked payload of a part of this segment, which has the length that the geometry gives.
fn exact<'a>(
    geometry: &SegmentGeometry,
    bytes: &'a [u8],
    part: &PartRef,
) -> Result<&'a [u8], SegmentError> {
    let payload = verified(part.key, slice(bytes, part))?;
    if payload.len() != geometry.payload_len(part) {
        let cause = PartError::Length { payload: payload.len() as u64, found: part.len.into() };
        return Err(SegmentError::Part { key: part.key, cause });
    }
    Ok(payload)
}

fn split_table<T>(bytes: &[u8], count: u32) -> (&[T], &[u8])
where
    T: FromBytes + Immutable + Unaligned,
{
    <[T]>::ref_from_prefix_with_elems(bytes, count as usize).unwrap_or((&[], &[]))
}

fn slice<'a>(bytes: &'a [u8], part: &PartRef) -> &'a [u8] {
    let range = usize::try_from(part.offset)
        .ok()
        .and_then(|at| Some(at..at.checked_add(part.len as usize)?));
    range.and_then(|range| bytes.get(range)).unwrap_or_default()
}

/// Lays the cells out again: every number in the table and in the entry must come out the same.
fn check_cells(entry: &SegmentEntry, cells: &[SegmentCell]) -> Result<SegmentLayout, LayoutError> {
    let specs = cells.iter().map(|cell| CellSpec {
        cell_id: cell.cell_id.get(),
        slots: cell.slots.get(),
        rows: cell.rows.get(),
        refs: cell.flags.get() & Piece::REFS != 0,
    });
    let layout = SegmentLayout::lay_out(*entry, &specs.collect::<Vec<_>>())?;
    let agreeing = layout.cells().iter().zip(cells).take_while(|(mine, theirs)| mine == theirs);
    same("count of cells in their place", cells.len() as u64, agreeing.count() as u64)?;
    same("rows", layout.entry().rows.get().into(), entry.rows.get().into())?;
    same("ids offset", layout.entry().ids_offset.get(), entry.ids_offset.get())?;
    // The other offsets follow from these two and were checked with the entry.
    Ok(layout)
}
