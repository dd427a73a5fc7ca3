//! Geometry: where every part of a segment lies, computed from the few numbers of its entry.

use super::{
    key::{MAX_ORDINAL, PartKey, PartKind, PartRef},
    part::{HEADER_LEN, MAX_PAYLOAD, framed_len},
    record::{Piece, SegmentCell, SegmentEntry, SlotRef},
};
use crate::ObjectId;

/// Rows in a block of plane 1.
pub const BLOCK_ROWS: u32 = 32;
/// Ids in a full ids part.
pub const IDS_PER_PART: u32 = 16_384;
/// Plane-2 and row chunks hold as many records as fit into this, and at least one. A cold query reads
/// 0.1 MB less of 8 KiB chunks than of 16 KiB ones (decision 0013).
pub const CHUNK_BYTES: usize = 8 << 10;
/// The most dimensions, padded or not.
pub const MAX_DIM: u32 = 16_000;
/// The most rows in a segment: ordinals and part ordinals stay within 28 bits.
pub const MAX_ROWS: u32 = MAX_ORDINAL;
/// No object is longer than this (1 TiB), so that offset arithmetic cannot overflow.
pub const MAX_OBJECT_LEN: u64 = 1 << 40;

/// The numbers do not describe a segment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A number is outside its range.
    #[error("{what} is {value}, expected {expected}")]
    Value {
        /// Which number.
        what: &'static str,
        /// The number.
        value: u64,
        /// The allowed numbers.
        expected: &'static str,
    },
    /// Two numbers contradict each other.
    #[error("{what} is {found}, but the other fields give {expected}")]
    Mismatch {
        /// Which number.
        what: &'static str,
        /// What the other fields give.
        expected: u64,
        /// What is there.
        found: u64,
    },
}

pub(super) fn value(
    what: &'static str,
    value: impl Into<u64>,
    expected: &'static str,
) -> LayoutError {
    LayoutError::Value { what, value: value.into(), expected }
}

pub(super) fn same(what: &'static str, expected: u64, found: u64) -> Result<(), LayoutError> {
    if expected == found { Ok(()) } else { Err(LayoutError::Mismatch { what, expected, found }) }
}

/// Size of the codes: all that the scan needs to know of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    padded_dim: u32,
    bits: u32,
}

impl Shape {
    /// `padded_dim`: a multiple of 16 up to 16,000. `bits` a dimension in plane 1: 1 to 4.
    pub fn new(padded_dim: u32, bits: u32) -> Result<Self, LayoutError> {
        if padded_dim == 0 || !padded_dim.is_multiple_of(16) || padded_dim > MAX_DIM {
            return Err(value("padded dimension", padded_dim, "a multiple of 16, 16 to 16000"));
        }
        if !(1..=4).contains(&bits) {
            return Err(value("bits a dimension", bits, "1 to 4"));
        }
        Ok(Self { padded_dim, bits })
    }

    /// Dimensions of the model space.
    pub fn padded_dim(&self) -> u32 {
        self.padded_dim
    }

    /// Bits a dimension in plane 1.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Bytes of a block of 32 rows: bit planes, then three `f32` factors a row. A multiple of 64.
    pub fn block_bytes(&self) -> usize {
        (self.bits * self.padded_dim * 4 + 3 * 4 * BLOCK_ROWS) as usize
    }

    /// Bytes of a plane-2 record: codes, scale, error, id.
    pub fn record_bytes(&self) -> usize {
        self.padded_dim as usize + 16
    }

    /// Records in a full plane-2 chunk.
    pub fn records_per_chunk(&self) -> u32 {
        per_chunk(self.record_bytes())
    }

    /// Blocks in a full plane-1 part, whose slots carry references or not.
    pub fn blocks_per_part(&self, refs: bool) -> u32 {
        (MAX_PAYLOAD / self.block_stride(refs)).max(1) as u32
    }

    pub(super) fn block_stride(&self, refs: bool) -> usize {
        self.block_bytes() + if refs { size_of::<SlotRef>() * BLOCK_ROWS as usize } else { 0 }
    }
}

pub(super) fn per_chunk(record: usize) -> u32 {
    (CHUNK_BYTES / record).max(1) as u32
}

/// Bytes of a column of `count` records of `record` bytes in parts of `per_part` records.
pub(super) fn column_len(count: u64, record: usize, per_part: u32) -> u64 {
    let (full, rest) = (count / u64::from(per_part), count % u64::from(per_part));
    let tail = if rest == 0 { 0 } else { framed_len(rest as usize * record) };
    full * framed_len(per_part as usize * record) as u64 + tail as u64
}

/// How plane 1 is cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Each cell has its own blocks and parts.
    PerCell,
    /// Blocks and parts run on through the cells: for segments with few rows a cell.
    Dense,
}

impl Packing {
    pub(super) fn of(entry: &SegmentEntry) -> Self {
        match entry.flags.get() & SegmentEntry::DENSE {
            0 => Self::PerCell,
            _ => Self::Dense,
        }
    }
}

/// Uncompressed rows kept beside the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowPlane {
    /// None: the rows are in a heap.
    None,
    /// IEEE half precision, `dim` values a row.
    F16,
    /// Single precision, `dim` values a row.
    F32,
}

impl RowPlane {
    pub(super) fn from_code(code: u16) -> Result<Self, LayoutError> {
        match code {
            0 => Ok(Self::None),
            1 => Ok(Self::F16),
            2 => Ok(Self::F32),
            _ => Err(value("row plane", code, "0 to 2")),
        }
    }

    pub(super) fn value_bytes(self) -> usize {
        match self {
            Self::None => 0,
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A plane-1 part as far as one piece needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane1Part {
    /// The part.
    pub part: PartRef,
    /// Where in the payload the first block to scan starts.
    pub blocks_at: usize,
    /// Blocks to scan.
    pub blocks: u32,
    /// Slots of the first block that belong to the cell before (0 unless the segment is dense).
    pub skip: u32,
    /// Slots of this piece, after the skipped ones.
    pub slots: u32,
    /// How many slots of the piece lie in earlier parts. Without references, the row in the `i`th slot
    /// of this part has the ordinal `piece.first_ordinal + before + i`.
    pub before: u32,
    /// Where in the payload the references of these slots start, if they carry any.
    pub refs_at: Option<usize>,
}

/// Where the columns of one segment lie: a checked [`SegmentEntry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentGeometry {
    object: ObjectId,
    shape: Shape,
    packing: Packing,
    row_plane: RowPlane,
    dim: u32,
    rows: u32,
    ids_offset: u64,
    plane2_offset: u64,
    rows_offset: u64,
    footer_offset: u64,
    footer_len: u64,
}

impl SegmentGeometry {
    /// Checks that the fields of an entry agree with each other.
    pub fn new(entry: &SegmentEntry) -> Result<Self, LayoutError> {
        let shape = Shape::new(entry.padded_dim.get(), entry.bits.get().into())?;
        let (dim, rows) = (entry.dim.get(), entry.rows.get());
        if dim == 0 || dim > shape.padded_dim || shape.padded_dim - dim >= 16 {
            return Err(value("dimension", dim, "at most 15 below the padded dimension"));
        }
        if rows > MAX_ROWS {
            return Err(value("rows", rows, "at most 2^28"));
        }
        if entry.flags.get() & !(SegmentEntry::DENSE | SegmentEntry::DELTA) != 0 {
            return Err(value("segment flags", entry.flags.get(), "known flags"));
        }
        if entry.reserved != 0 {
            return Err(value("reserved field", entry.reserved.get(), "0"));
        }
        if entry.object_len.get() > MAX_OBJECT_LEN {
            return Err(value("object length", entry.object_len.get(), "at most 2^40"));
        }
        let geometry = Self {
            object: entry.object,
            shape,
            packing: Packing::of(entry),
            row_plane: RowPlane::from_code(entry.row_plane.get())?,
            dim,
            rows,
            ids_offset: entry.ids_offset.get(),
            plane2_offset: entry.plane2_offset.get(),
            rows_offset: entry.rows_offset.get(),
            footer_offset: entry.footer_offset.get(),
            footer_len: footer_bytes(entry),
        };
        geometry.check(entry)?;
        Ok(geometry)
    }

    fn check(&self, entry: &SegmentEntry) -> Result<(), LayoutError> {
        let start = plane1_start();
        let end = self.ids_offset;
        if end < start || end > MAX_OBJECT_LEN || !end.is_multiple_of(64) {
            return Err(value(
                "ids offset",
                end,
                "a multiple of 64 after the header, within the object",
            ));
        }
        if self.packing == Packing::Dense {
            same("ids offset", start + self.dense_len(), end)?;
        }
        let rows = u64::from(self.rows);
        let ids = column_len(rows, 8, IDS_PER_PART);
        same("plane-2 offset", end + ids, self.plane2_offset)?;
        let shape = &self.shape;
        let plane2 = column_len(rows, shape.record_bytes(), shape.records_per_chunk());
        same("rows offset", self.plane2_offset + plane2, self.rows_offset)?;
        let plane = match self.row_bytes() {
            0 => 0,
            bytes => column_len(rows, bytes, per_chunk(bytes)),
        };
        same("footer offset", self.rows_offset + plane, self.footer_offset)?;
        let footer = column_len(self.footer_len, 1, MAX_PAYLOAD as u32);
        same("object length", self.footer_offset + footer, entry.object_len.get())
    }

    fn dense_len(&self) -> u64 {
        let blocks = self.rows.div_ceil(BLOCK_ROWS);
        let shape = &self.shape;
        column_len(blocks.into(), shape.block_bytes(), shape.blocks_per_part(false))
    }

    /// Size of the codes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Rows whose id and plane-2 record are in the segment.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// How plane 1 is cut into blocks.
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Uncompressed rows kept beside the codes.
    pub fn row_plane(&self) -> RowPlane {
        self.row_plane
    }

    /// Bytes of an uncompressed row; 0 if there are none.
    pub fn row_bytes(&self) -> usize {
        self.row_plane.value_bytes() * self.dim as usize
    }

    /// Uncompressed rows in a full part.
    pub fn rows_per_chunk(&self) -> u32 {
        per_chunk(self.row_bytes().max(1))
    }

    /// Bytes of the footer's payload.
    pub fn footer_len(&self) -> u64 {
        self.footer_len
    }

    /// Bytes of the object.
    pub fn object_len(&self) -> u64 {
        self.footer_offset + column_len(self.footer_len, 1, MAX_PAYLOAD as u32)
    }

    fn part(&self, kind: PartKind, ordinal: u32, offset: u64, payload: usize) -> PartRef {
        let key = PartKey::new(self.object, kind, ordinal);
        PartRef { key, offset, len: framed_len(payload) as u32 }
    }

    /// The `ordinal`th part of a column that starts at `start`.
    fn nth(&self, kind: PartKind, start: u64, ordinal: u32, column: Column) -> PartRef {
        let full = framed_len(column.per_part as usize * column.record) as u64;
        let before = u64::from(ordinal) * u64::from(column.per_part);
        let here = (column.count - before).min(column.per_part.into()) as usize;
        self.part(kind, ordinal, start + u64::from(ordinal) * full, here * column.record)
    }

    fn all(
        &self,
        kind: PartKind,
        start: u64,
        column: Column,
    ) -> impl Iterator<Item = PartRef> + use<> {
        let geometry = *self;
        let parts = column.count.div_ceil(column.per_part.into()) as u32;
        (0..parts).map(move |ordinal| geometry.nth(kind, start, ordinal, column))
    }

    fn ids_column(&self) -> Column {
        Column { count: self.rows.into(), record: 8, per_part: IDS_PER_PART }
    }

    fn plane2_column(&self) -> Column {
        let (record, per_part) = (self.shape.record_bytes(), self.shape.records_per_chunk());
        Column { count: self.rows.into(), record, per_part }
    }

    fn row_column(&self) -> Column {
        let record = self.row_bytes();
        let count = if record == 0 { 0 } else { self.rows.into() };
        Column { count, record, per_part: self.rows_per_chunk() }
    }

    fn footer_column(&self) -> Column {
        Column { count: self.footer_len, record: 1, per_part: MAX_PAYLOAD as u32 }
    }

    fn chunk(
        &self,
        kind: PartKind,
        start: u64,
        column: Column,
        ordinal: u32,
    ) -> Option<(PartRef, usize)> {
        if u64::from(ordinal) >= column.count {
            return None;
        }
        let part = self.nth(kind, start, ordinal / column.per_part, column);
        Some((part, (ordinal % column.per_part) as usize * column.record))
    }

    /// Bytes of the payload of one of this segment's parts; 0 if it has no such part.
    pub fn payload_len(&self, part: &PartRef) -> usize {
        let column = match part.key.kind() {
            // Blocks fill multiples of 64 bytes.
            Some(PartKind::Plane1) => return (part.len as usize).saturating_sub(HEADER_LEN),
            Some(PartKind::Meta) if part.key.ordinal() == 0 => return size_of::<SegmentEntry>(),
            Some(PartKind::Meta) => self.footer_column(),
            Some(PartKind::Ids) => self.ids_column(),
            Some(PartKind::Plane2) => self.plane2_column(),
            Some(PartKind::Rows) => self.row_column(),
            None => return 0,
        };
        let ordinal = part.key.ordinal() - u32::from(part.key.kind() == Some(PartKind::Meta));
        let before = u64::from(ordinal) * u64::from(column.per_part);
        let here = column.count.saturating_sub(before).min(column.per_part.into());
        here as usize * column.record
    }

    /// The header's part.
    pub fn header_part(&self) -> PartRef {
        self.part(PartKind::Meta, 0, 0, size_of::<SegmentEntry>())
    }

    /// The parts of the ids column, in ordinal order.
    pub fn ids_parts(&self) -> impl Iterator<Item = PartRef> + use<> {
        self.all(PartKind::Ids, self.ids_offset, self.ids_column())
    }

    /// The ids part that holds this row's id, and where in its payload.
    pub fn id_of(&self, ordinal: u32) -> Option<(PartRef, usize)> {
        self.chunk(PartKind::Ids, self.ids_offset, self.ids_column(), ordinal)
    }

    /// The parts of plane 2, in ordinal order.
    pub fn plane2_parts(&self) -> impl Iterator<Item = PartRef> + use<> {
        self.all(PartKind::Plane2, self.plane2_offset, self.plane2_column())
    }

    /// The chunk that holds this row's plane-2 record, and where in its payload.
    pub fn chunk_of(&self, ordinal: u32) -> Option<(PartRef, usize)> {
        self.chunk(PartKind::Plane2, self.plane2_offset, self.plane2_column(), ordinal)
    }

    /// The parts of the uncompressed rows, in ordinal order; none if there is no such plane.
    pub fn row_parts(&self) -> impl Iterator<Item = PartRef> + use<> {
        self.all(PartKind::Rows, self.rows_offset, self.row_column())
    }

    /// The part that holds this uncompressed row, and where in its payload.
    pub fn row_of(&self, ordinal: u32) -> Option<(PartRef, usize)> {
        self.chunk(PartKind::Rows, self.rows_offset, self.row_column(), ordinal)
    }

    /// The footer's parts.
    pub fn footer_parts(&self) -> impl Iterator<Item = PartRef> + use<> {
        let parts = self.all(PartKind::Meta, self.footer_offset, self.footer_column());
        // Ordinal 0 is the header.
        parts.map(|part| PartRef { key: PartKey { index: part.key.index + 1, ..part.key }, ..part })
    }

    /// Checks that a piece lies within the segment.
    pub fn check_piece(&self, piece: &Piece) -> Result<(), LayoutError> {
        let (slots, first) = (piece.slots.get(), piece.first_ordinal.get());
        if piece.flags.get() & !Piece::REFS != 0 {
            return Err(value("piece flags", piece.flags.get(), "known flags"));
        }
        if slots > MAX_ROWS || first > MAX_ROWS {
            return Err(value("slots of a piece", slots.max(first), "at most 2^28"));
        }
        if !piece.has_refs() && first + slots > self.rows {
            return Err(value("end of a piece", first + slots, "at most the segment's rows"));
        }
        let (offset, part) = (piece.plane1_offset.get(), piece.first_part.get());
        match self.packing {
            Packing::Dense if piece.has_refs() => {
                Err(value("piece flags", piece.flags.get(), "no references in a dense segment"))
            }
            Packing::Dense => {
                let column = self.dense_column();
                let block = if slots == 0 { 0 } else { first / BLOCK_ROWS };
                let ordinal = block / column.per_part;
                let full = framed_len(column.per_part as usize * column.record) as u64;
                same("first part of a piece", ordinal.into(), part.into())?;
                same("offset of a piece", plane1_start() + u64::from(ordinal) * full, offset)
            }
            Packing::PerCell => {
                if offset < plane1_start() || offset > self.ids_offset || !offset.is_multiple_of(64)
                {
                    return Err(value("offset of a piece", offset, "a multiple of 64 in plane 1"));
                }
                let column = self.piece_column(slots, piece.has_refs());
                let end = offset + column_len(column.count, column.record, column.per_part);
                if end > self.ids_offset {
                    return Err(value("end of a piece", end, "at most the end of plane 1"));
                }
                let parts = column.count.div_ceil(column.per_part.into()) as u32;
                if part > MAX_ORDINAL - parts {
                    return Err(value("first part of a piece", part, "part ordinals below 2^28"));
                }
                Ok(())
            }
        }
    }

    fn dense_column(&self) -> Column {
        self.piece_column(self.rows, false)
    }

    fn piece_column(&self, slots: u32, refs: bool) -> Column {
        Column {
            count: slots.div_ceil(BLOCK_ROWS).into(),
            record: self.shape.block_stride(refs),
            per_part: self.shape.blocks_per_part(refs),
        }
    }

    /// The plane-1 parts of a piece that [`SegmentGeometry::check_piece`] accepts, in slot order.
    pub fn plane1_parts(&self, piece: &Piece) -> impl Iterator<Item = Plane1Part> + use<> {
        let (geometry, piece) = (*self, *piece);
        let (slots, first) = (piece.slots.get(), piece.first_ordinal.get());
        let dense = self.packing == Packing::Dense;
        let column =
            if dense { self.dense_column() } else { self.piece_column(slots, piece.has_refs()) };
        let per_part = column.per_part * BLOCK_ROWS;
        // Slots are counted from the start of the column: the segment's plane 1, or the piece's own.
        let start = if dense { first } else { 0 };
        let parts =
            if slots == 0 { 0..0 } else { start / per_part..(start + slots).div_ceil(per_part) };
        parts.map(move |nth| {
            let from = start.max(nth * per_part);
            let to = (start + slots).min((nth + 1) * per_part);
            let first_block = (from - nth * per_part) / BLOCK_ROWS;
            let (origin, add) = if dense {
                (plane1_start(), 0)
            } else {
                (piece.plane1_offset.get(), piece.first_part.get())
            };
            let mut part = geometry.nth(PartKind::Plane1, origin, nth, column);
            part.key = PartKey::new(geometry.object, PartKind::Plane1, nth + add);
            let blocks = to.div_ceil(BLOCK_ROWS) - from / BLOCK_ROWS;
            let block_bytes = geometry.shape.block_bytes();
            Plane1Part {
                part,
                blocks_at: first_block as usize * block_bytes,
                blocks,
                skip: from % BLOCK_ROWS,
                slots: to - from,
                before: from - start,
                refs_at: piece.has_refs().then_some(blocks as usize * block_bytes),
            }
        })
    }

    /// All parts of plane 1 of a dense segment, in order; empty for another one, whose cells say
    /// where their parts are.
    pub fn dense_parts(&self) -> impl Iterator<Item = PartRef> + use<> {
        let column = match self.packing {
            Packing::Dense => self.dense_column(),
            Packing::PerCell => Column { count: 0, ..self.dense_column() },
        };
        self.all(PartKind::Plane1, plane1_start(), column)
    }
}

/// Records of a fixed size, cut into parts.
#[derive(Clone, Copy)]
struct Column {
    count: u64,
    record: usize,
    per_part: u32,
}

/// Where plane 1 starts: after the header.
pub(super) const fn plane1_start() -> u64 {
    framed_len(size_of::<SegmentEntry>()) as u64
}

/// Bytes of the footer's payload: cell table, referenced objects, model.
pub(super) fn footer_bytes(entry: &SegmentEntry) -> u64 {
    u64::from(entry.cells.get()) * size_of::<SegmentCell>() as u64
        + u64::from(entry.references.get()) * size_of::<ObjectId>() as u64
        + u64::from(entry.model_len.get())
}
