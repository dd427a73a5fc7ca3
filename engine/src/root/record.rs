//! The fixed-size records of the root: little-endian, without alignment.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U32};

/// A cell. Its position in the table is its *slot*.
///
/// Cells are sorted by id. A cell that was split or merged away stays, retired, for the delta entries
/// that still name it; its centroid cannot win.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Cell {
    /// Never reused.
    pub id: U32,
    /// [`Cell::RETIRED`].
    pub flags: U32,
    /// Position of the cell's first piece.
    pub first_piece: U32,
    /// How many pieces follow each other from there.
    pub pieces: U32,
    /// Slots in these pieces.
    pub rows: U32,
    /// Id of the cell that took rows of this one over, if it is retired; [`Cell::NO_CELL`] if none did.
    pub successor: U32,
    /// Zero.
    pub reserved: [u8; 8],
}

const _: () = assert!(size_of::<Cell>() == 32);

impl Cell {
    /// The cell was split or merged away: it has no rows.
    pub const RETIRED: u32 = 1;
    /// No cell has this id.
    pub const NO_CELL: u32 = u32::MAX;

    /// Whether the cell was split or merged away.
    pub fn is_retired(&self) -> bool {
        self.flags.get() & Self::RETIRED != 0
    }
}

/// A run of slots whose cells belong to one group. Sorted by group.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct CellRange {
    /// Position of the group.
    pub group: U32,
    /// First slot.
    pub first: U32,
    /// Number of slots, at least one.
    pub count: U32,
    /// Zero.
    pub reserved: U32,
}

/// A segment that another one's slot references name. The `i`th record of a segment is what a
/// [`SlotRef`](crate::segment::SlotRef) with `segment` = i + 1 in it means. Sorted by segment.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Reference {
    /// Position of the segment whose slots refer.
    pub segment: U32,
    /// Position of the segment referred to; [`Reference::GONE`] if it is not in this root.
    pub target: U32,
}

impl Reference {
    /// The target is not part of this root: rows that refer to it are not, either.
    pub const GONE: u32 = u32::MAX;
}
