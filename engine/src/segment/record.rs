//! The fixed-size records of the segment and root formats: little-endian, without alignment.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use super::key::SegmentName;
use crate::ObjectId;

/// What a segment is and where its columns lie. The header part of the object holds it, and so does the
/// root's segment table, so that a query needs no request to learn it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SegmentEntry {
    /// The object.
    pub object: ObjectId,
    /// The writer that uploaded it: with `index` and `object`, its key.
    pub writer: ObjectId,
    /// The index that it was written for.
    pub index: ObjectId,
    /// Id of the model that its codes follow.
    pub model: U32,
    /// [`SegmentEntry::DENSE`], [`SegmentEntry::DELTA`].
    pub flags: U32,
    /// Dimensions of the rows as the user gave them.
    pub dim: U32,
    /// Dimensions of the model space.
    pub padded_dim: U32,
    /// Bits a dimension in plane 1.
    pub bits: U16,
    /// Uncompressed rows: 0 none, 1 `f16`, 2 `f32`.
    pub row_plane: U16,
    /// Rows whose id and plane-2 record are here.
    pub rows: U32,
    /// Entries of the footer's cell table.
    pub cells: U32,
    /// Entries of the footer's table of objects that slot references name.
    pub references: U32,
    /// Bytes of the model's serialised form in the footer; 0 if left out.
    pub model_len: U32,
    /// Zero.
    pub reserved: U32,
    /// Where the ids start: the end of plane 1.
    pub ids_offset: U64,
    /// Where plane 2 starts.
    pub plane2_offset: U64,
    /// Where the uncompressed rows start.
    pub rows_offset: U64,
    /// Where the footer starts.
    pub footer_offset: U64,
    /// Bytes of the object.
    pub object_len: U64,
}

const _: () = assert!(size_of::<SegmentEntry>() == 128);

impl SegmentEntry {
    /// Blocks are shared by neighbouring cells: small segments, whose cells have few rows each.
    pub const DENSE: u32 = 1;
    /// Rows flushed from the delta, not yet merged into cells.
    pub const DELTA: u32 = 2;

    /// The name of the object in its store.
    pub fn name(&self) -> SegmentName {
        SegmentName { writer: self.writer, index: self.index, object: self.object }
    }

    /// Whether the rows were flushed from the delta and not merged into cells yet.
    pub fn is_delta(&self) -> bool {
        self.flags.get() & Self::DELTA != 0
    }
}

/// The rows of one cell in one segment, as the root lists them.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Piece {
    /// Position of the cell in the root's cell table.
    pub cell: U32,
    /// Position of the segment in the root's segment table.
    pub segment: U32,
    /// Where the first plane-1 part of the piece starts in the object.
    pub plane1_offset: U64,
    /// Ordinal of that part.
    pub first_part: U32,
    /// Ordinal in the segment of the first row; the others follow. In a dense segment it also says
    /// in which block and slot the piece starts.
    pub first_ordinal: U32,
    /// Slots of plane 1 that hold a row.
    pub slots: U32,
    /// [`Piece::REFS`].
    pub flags: U32,
}

const _: () = assert!(size_of::<Piece>() == 32);

impl Piece {
    /// Each slot carries a [`SlotRef`] behind the blocks of its part; the row's ordinal is not implied.
    pub const REFS: u32 = 1;

    /// Whether each slot names its row by a [`SlotRef`].
    pub fn has_refs(&self) -> bool {
        self.flags.get() & Self::REFS != 0
    }
}

/// A cell in a segment's own table, in the footer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SegmentCell {
    /// The cell's id in the index, which is never reused.
    pub cell_id: U32,
    /// As in [`Piece::flags`].
    pub flags: U32,
    /// Slots of plane 1 that hold a row.
    pub slots: U32,
    /// Rows of the cell whose id and plane-2 record are in this segment; equals `slots` without
    /// references.
    pub rows: U32,
    /// As in [`Piece::first_ordinal`].
    pub first_ordinal: U32,
    /// As in [`Piece::first_part`].
    pub first_part: U32,
    /// As in [`Piece::plane1_offset`].
    pub plane1_offset: U64,
}

const _: () = assert!(size_of::<SegmentCell>() == 32);

impl SegmentCell {
    /// The root's record of this cell's rows.
    pub fn piece(&self, slot: u32, segment: u32) -> Piece {
        Piece {
            cell: slot.into(),
            segment: segment.into(),
            plane1_offset: self.plane1_offset,
            first_part: self.first_part,
            first_ordinal: self.first_ordinal,
            slots: self.slots,
            flags: self.flags,
        }
    }
}

/// Where the row of a plane-1 slot lives, if not at the slot's own position: a row that also lies in
/// another cell has one id and one plane-2 record.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SlotRef {
    /// 0 for the same segment, else 1 + the position in the segment's table of references.
    pub segment: U32,
    /// Ordinal of the row in that segment.
    pub ordinal: U32,
}

const _: () = assert!(size_of::<SlotRef>() == 8);
