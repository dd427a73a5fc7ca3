//! Lays out a segment that is to be written, or checks the layout of one that was read.

use super::{
    geometry::{
        BLOCK_ROWS, IDS_PER_PART, LayoutError, MAX_DIM, MAX_OBJECT_LEN, MAX_ROWS, Packing,
        RowPlane, SegmentGeometry, Shape, column_len, footer_bytes, per_chunk, plane1_start, same,
        value,
    },
    key::{MAX_ORDINAL, PartRef, SegmentName},
    part::{MAX_PAYLOAD, framed_len},
    record::{Piece, SegmentCell, SegmentEntry},
};
use crate::ObjectId;

/// A cell of a segment that is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CellSpec {
    /// The cell's id in the index.
    pub cell_id: u32,
    /// Slots of plane 1 that hold a row.
    pub slots: u32,
    /// Rows whose id and plane-2 record are in this segment: `slots`, unless there are references.
    pub rows: u32,
    /// Whether each slot carries a reference.
    pub refs: bool,
}

impl CellSpec {
    /// A cell whose rows all lie in this segment.
    pub fn plain(cell_id: u32, rows: u32) -> Self {
        Self { cell_id, slots: rows, rows, refs: false }
    }
}

/// What a segment is to hold.
#[derive(Debug, Clone)]
pub struct SegmentSpec {
    /// Where the object goes.
    pub name: SegmentName,
    /// Id of the model that the codes follow.
    pub model: u32,
    /// Dimensions of the rows as the user gave them; padded to the next multiple of 16.
    pub dim: u32,
    /// Bits a dimension in plane 1.
    pub bits: u32,
    /// How plane 1 is cut into blocks.
    pub packing: Packing,
    /// Whether the rows come from the delta, to be merged into cells later.
    pub delta: bool,
    /// Uncompressed rows beside the codes.
    pub row_plane: RowPlane,
    /// The cells in the order of their rows.
    pub cells: Vec<CellSpec>,
    /// Objects that slot references name.
    pub references: Vec<ObjectId>,
    /// The model's serialised form, so that the segment can be understood alone; may be empty.
    pub model_bytes: Vec<u8>,
}

/// A segment laid out: the entry, and every cell's place.
#[derive(Debug, Clone)]
pub struct SegmentLayout {
    entry: SegmentEntry,
    geometry: SegmentGeometry,
    cells: Vec<SegmentCell>,
}

impl SegmentLayout {
    /// Lays out a segment of plain cells with these row counts, without embedded model.
    pub fn new(object: ObjectId, dim: u32, bits: u32, rows: &[u32]) -> Result<Self, LayoutError> {
        let cells = rows.iter().zip(0..).map(|(&rows, id)| CellSpec::plain(id, rows)).collect();
        Self::from_spec(&SegmentSpec {
            name: SegmentName { object, ..Default::default() },
            model: 0,
            dim,
            bits,
            packing: Packing::PerCell,
            delta: false,
            row_plane: RowPlane::None,
            cells,
            references: Vec::new(),
            model_bytes: Vec::new(),
        })
    }

    /// Lays out a segment.
    pub fn from_spec(spec: &SegmentSpec) -> Result<Self, LayoutError> {
        let counts = (spec.cells.len(), spec.references.len(), spec.model_bytes.len());
        let [cells, references, model_len] = <[usize; 3]>::from(counts)
            .map(|count| u32::try_from(count).map_err(|_| value("table", count as u64, "u32")));
        let entry = SegmentEntry {
            object: spec.name.object,
            writer: spec.name.writer,
            index: spec.name.index,
            model: spec.model.into(),
            flags: (if spec.packing == Packing::Dense { SegmentEntry::DENSE } else { 0 }
                | if spec.delta { SegmentEntry::DELTA } else { 0 })
            .into(),
            dim: spec.dim.into(),
            padded_dim: spec.dim.min(MAX_DIM + 1).next_multiple_of(16).into(),
            bits: (spec.bits.min(u16::MAX.into()) as u16).into(),
            row_plane: match spec.row_plane {
                RowPlane::None => 0,
                RowPlane::F16 => 1,
                RowPlane::F32 => 2,
            }
            .into(),
            rows: 0.into(),
            cells: cells?.into(),
            references: references?.into(),
            model_len: model_len?.into(),
            reserved: 0.into(),
            ids_offset: 0.into(),
            plane2_offset: 0.into(),
            rows_offset: 0.into(),
            footer_offset: 0.into(),
            object_len: 0.into(),
        };
        Self::lay_out(entry, &spec.cells)
    }

    /// Lays out cells in a segment whose entry has everything but the row count and the offsets.
    pub(super) fn lay_out(
        mut entry: SegmentEntry,
        cells: &[CellSpec],
    ) -> Result<Self, LayoutError> {
        let cells = place_cells(&mut entry, cells)?;
        let geometry = SegmentGeometry::new(&entry)?;
        cells.iter().try_for_each(|cell| geometry.check_piece(&cell.piece(0, 0)))?;
        Ok(Self { entry, geometry, cells })
    }

    /// The segment's entry, for the header and for the root.
    pub fn entry(&self) -> &SegmentEntry {
        &self.entry
    }

    /// Where the columns lie.
    pub fn geometry(&self) -> &SegmentGeometry {
        &self.geometry
    }

    /// The cells, in the order of their rows.
    pub fn cells(&self) -> &[SegmentCell] {
        &self.cells
    }

    /// Every part of the object, in the order in which they lie in it, without gaps.
    pub fn parts(&self) -> impl Iterator<Item = PartRef> {
        let geometry = &self.geometry;
        let per_cell = match geometry.packing() {
            Packing::Dense => &[],
            Packing::PerCell => &self.cells[..],
        };
        std::iter::once(geometry.header_part())
            .chain(geometry.dense_parts())
            .chain(per_cell.iter().flat_map(|cell| {
                geometry.plane1_parts(&cell.piece(0, 0)).map(|plane1| plane1.part)
            }))
            .chain(geometry.ids_parts())
            .chain(geometry.plane2_parts())
            .chain(geometry.row_parts())
            .chain(geometry.footer_parts())
    }
}

/// Gives each cell its place and fills in the entry's offsets. `entry` has everything else.
fn place_cells(
    entry: &mut SegmentEntry,
    specs: &[CellSpec],
) -> Result<Vec<SegmentCell>, LayoutError> {
    let packing = Packing::of(entry);
    let shape = Shape::new(entry.padded_dim.get(), entry.bits.get().into())?;
    let (mut ordinal, mut part, mut offset) = (0u32, 0u32, plane1_start());
    let mut cells = Vec::with_capacity(specs.len());
    for spec in specs {
        if !spec.refs {
            same("rows of a cell", spec.slots.into(), spec.rows.into())?;
        }
        if spec.slots > MAX_ROWS || spec.rows > MAX_ROWS - ordinal {
            return Err(value("rows", spec.slots.max(spec.rows), "at most 2^28 in a segment"));
        }
        let (stride, per_part) = (shape.block_stride(spec.refs), shape.blocks_per_part(spec.refs));
        if packing == Packing::Dense {
            part = if spec.slots == 0 { 0 } else { ordinal / BLOCK_ROWS / per_part };
            offset =
                plane1_start() + u64::from(part) * framed_len(per_part as usize * stride) as u64;
        }
        cells.push(SegmentCell {
            cell_id: spec.cell_id.into(),
            flags: if spec.refs { Piece::REFS } else { 0 }.into(),
            slots: spec.slots.into(),
            rows: spec.rows.into(),
            first_ordinal: ordinal.into(),
            first_part: part.into(),
            plane1_offset: offset.into(),
        });
        ordinal += spec.rows;
        if packing == Packing::PerCell {
            let blocks = spec.slots.div_ceil(BLOCK_ROWS);
            offset += column_len(blocks.into(), stride, per_part);
            part += blocks.div_ceil(per_part);
            if part > MAX_ORDINAL || offset > MAX_OBJECT_LEN {
                return Err(value("plane-1 length", offset, "at most 2^40 bytes in 2^28 parts"));
            }
        }
    }
    let rows = u64::from(ordinal);
    if packing == Packing::Dense {
        let blocks = rows.div_ceil(BLOCK_ROWS.into());
        offset =
            plane1_start() + column_len(blocks, shape.block_bytes(), shape.blocks_per_part(false));
    }
    let row_bytes =
        RowPlane::from_code(entry.row_plane.get())?.value_bytes() * entry.dim.get() as usize;
    entry.rows = ordinal.into();
    entry.ids_offset = offset.into();
    let mut end = offset + column_len(rows, 8, IDS_PER_PART);
    entry.plane2_offset = end.into();
    end += column_len(rows, shape.record_bytes(), shape.records_per_chunk());
    entry.rows_offset = end.into();
    if row_bytes > 0 {
        end += column_len(rows, row_bytes, per_chunk(row_bytes));
    }
    entry.footer_offset = end.into();
    entry.object_len = (end + column_len(footer_bytes(entry), 1, MAX_PAYLOAD as u32)).into();
    Ok(cells)
}
