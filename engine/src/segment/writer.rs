//! Writes a segment object to a stream, column by column.

use std::io::{self, BufWriter, Write};

use zerocopy::IntoBytes;

use super::{
    geometry::{BLOCK_ROWS, IDS_PER_PART, LayoutError, Packing},
    key::{PartKey, PartKind},
    layout::{SegmentLayout, SegmentSpec},
    part::{self, ALIGN, HEADER_LEN, MAX_PAYLOAD},
    record::{Piece, SegmentCell, SegmentEntry, SlotRef},
};

/// Output is collected to this many bytes.
const BUFFER: usize = 64 << 10;

/// Why a segment could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The output failed.
    #[error("could not write a segment: {0}")]
    Io(#[from] io::Error),
    /// The specification does not describe a segment.
    #[error("cannot lay out a segment: {0}")]
    Layout(#[from] LayoutError),
    /// The caller's data does not have the size or order that the specification promised.
    #[error("segment writer was given {found} bytes of {column}, expected {expected}")]
    Data {
        /// Which column.
        column: &'static str,
        /// Bytes that the layout has room for.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
}

/// What the root must know of a written segment.
#[derive(Debug, Clone)]
pub struct WrittenSegment {
    /// The segment's entry.
    pub entry: SegmentEntry,
    /// The cells in the order of their rows, with ids as given in the specification.
    pub cells: Vec<SegmentCell>,
}

impl WrittenSegment {
    /// The root's piece records. `slots`: the position in the root's cell table of each cell, in order;
    /// `segment`: the position in the root's segment table. Cells without a slot in use get no piece.
    pub fn pieces(&self, slots: &[u32], segment: u32) -> Vec<Piece> {
        let cells = self.cells.iter().zip(slots).filter(|(cell, _)| cell.slots != 0);
        cells.map(|(cell, &slot)| cell.piece(slot, segment)).collect()
    }
}

/// The columns, in the order in which they must be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Plane1,
    Ids,
    Plane2,
    Rows,
}

/// Streams one object. The row counts are known from the start, so the header goes first and nothing
/// is kept but the part being filled. Give, in this order: plane 1 of every cell, all ids, all plane-2
/// records, all uncompressed rows (if the specification has any), and [`SegmentWriter::finish`].
pub struct SegmentWriter<W: Write> {
    out: BufWriter<W>,
    spec: SegmentSpec,
    layout: SegmentLayout,
    stage: Stage,
    /// Cells whose plane 1 was given.
    cells: usize,
    /// Parts written of the current column.
    parts: u32,
    /// Bytes of the part being filled.
    pending: Vec<u8>,
    /// Bytes taken of the current column.
    taken: u64,
}

impl<W: Write> SegmentWriter<W> {
    /// Lays the segment out and writes its header.
    pub fn new(spec: SegmentSpec, out: W) -> Result<Self, WriteError> {
        let layout = SegmentLayout::from_spec(&spec)?;
        let mut writer = Self {
            out: BufWriter::with_capacity(BUFFER, out),
            spec,
            layout,
            stage: Stage::Plane1,
            cells: 0,
            parts: 0,
            pending: Vec::new(),
            taken: 0,
        };
        let entry = *writer.layout.entry();
        writer.emit(PartKind::Meta, 0, &[entry.as_bytes()])?;
        Ok(writer)
    }

    /// Where everything will lie.
    pub fn layout(&self) -> &SegmentLayout {
        &self.layout
    }

    /// The blocks of the next cell (empty for a cell without rows).
    /// In a dense segment: further blocks of the whole, cut anywhere.
    pub fn plane1(&mut self, blocks: &[u8]) -> Result<(), WriteError> {
        match self.spec.packing {
            Packing::Dense => self.fill(Stage::Plane1, blocks),
            Packing::PerCell => self.cell(blocks, None),
        }
    }

    /// The blocks of the next cell, and one reference for each of its slots.
    pub fn plane1_with_refs(&mut self, blocks: &[u8], refs: &[SlotRef]) -> Result<(), WriteError> {
        self.cell(blocks, Some(refs))
    }

    /// Further ids, in ordinal order.
    pub fn ids(&mut self, ids: &[u64]) -> Result<(), WriteError> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.fill(Stage::Ids, &bytes)
    }

    /// Further plane-2 records, in ordinal order.
    pub fn plane2(&mut self, records: &[u8]) -> Result<(), WriteError> {
        self.fill(Stage::Plane2, records)
    }

    /// Further uncompressed rows, in ordinal order.
    pub fn rows(&mut self, rows: &[u8]) -> Result<(), WriteError> {
        self.fill(Stage::Rows, rows)
    }

    /// Writes the footer and flushes the output.
    pub fn finish(mut self) -> Result<(WrittenSegment, W), WriteError> {
        while self.stage < Stage::Rows {
            self.next_stage()?;
        }
        self.end_column()?;
        let model = std::mem::take(&mut self.spec.model_bytes);
        let mut footer = self.layout.cells().as_bytes().to_vec();
        footer.extend_from_slice(self.spec.references.as_bytes());
        footer.extend_from_slice(&model);
        for (chunk, ordinal) in footer.chunks(MAX_PAYLOAD).zip(1..) {
            self.emit(PartKind::Meta, ordinal, &[chunk])?;
        }
        self.out.flush()?;
        let out = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        let cells = self.layout.cells().to_vec();
        Ok((WrittenSegment { entry: *self.layout.entry(), cells }, out))
    }

    fn cell(&mut self, blocks: &[u8], refs: Option<&[SlotRef]>) -> Result<(), WriteError> {
        let shape = self.layout.geometry().shape();
        let cell = match self.layout.cells().get(self.cells) {
            Some(cell) if self.stage == Stage::Plane1 && self.spec.packing == Packing::PerCell => {
                *cell
            }
            _ => return Err(data("plane 1", 0, blocks.len())),
        };
        let has_refs = cell.flags.get() & Piece::REFS != 0;
        let slots = cell.slots.get() as usize;
        let block_count = slots.div_ceil(BLOCK_ROWS as usize);
        expect("plane 1", block_count * shape.block_bytes(), blocks.len())?;
        let refs = refs.unwrap_or_default();
        expect("references", if has_refs { slots * 8 } else { 0 }, size_of_val(refs))?;

        let per_part = shape.blocks_per_part(has_refs) as usize;
        let mut ref_parts = refs.chunks(per_part * BLOCK_ROWS as usize);
        for (part, ordinal) in
            blocks.chunks(per_part * shape.block_bytes()).zip(cell.first_part.get()..)
        {
            let refs = ref_parts.next().unwrap_or_default().as_bytes();
            // Slots that pad the last block have the zero reference.
            let padded =
                part.len() / shape.block_bytes() * BLOCK_ROWS as usize * size_of::<SlotRef>();
            let padding = vec![0; if has_refs { padded - refs.len() } else { 0 }];
            self.emit(PartKind::Plane1, ordinal, &[part, refs, &padding])?;
        }
        self.cells += 1;
        self.taken += blocks.len() as u64;
        Ok(())
    }

    /// Appends to a column whose parts all have the same size but the last.
    fn fill(&mut self, stage: Stage, mut bytes: &[u8]) -> Result<(), WriteError> {
        if self.stage > stage {
            return Err(data(stage.name(), 0, bytes.len()));
        }
        while self.stage < stage {
            self.next_stage()?;
        }
        self.taken += bytes.len() as u64;
        let total = self.column_len();
        if self.taken > total {
            return Err(data(stage.name(), total, self.taken));
        }
        let full = self.part_payload();
        while !bytes.is_empty() {
            if self.pending.is_empty()
                && let Some((part, later)) = bytes.split_at_checked(full)
            {
                self.emit_next(part)?;
                bytes = later;
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(full - self.pending.len()));
            self.pending.extend_from_slice(now);
            bytes = later;
            if self.pending.len() == full {
                self.emit_pending()?;
            }
        }
        Ok(())
    }

    fn next_stage(&mut self) -> Result<(), WriteError> {
        self.end_column()?;
        self.stage = match self.stage {
            Stage::Plane1 => Stage::Ids,
            Stage::Ids => Stage::Plane2,
            Stage::Plane2 | Stage::Rows => Stage::Rows,
        };
        self.parts = 0;
        self.taken = 0;
        Ok(())
    }

    fn end_column(&mut self) -> Result<(), WriteError> {
        let expected = self.column_len();
        if self.taken != expected {
            return Err(data(self.stage.name(), expected, self.taken));
        }
        if !self.pending.is_empty() { self.emit_pending() } else { Ok(()) }
    }

    fn emit_pending(&mut self) -> Result<(), WriteError> {
        let payload = std::mem::take(&mut self.pending);
        self.emit_next(&payload)?;
        self.pending = payload;
        self.pending.clear();
        Ok(())
    }

    /// Writes the next part of the current column.
    fn emit_next(&mut self, payload: &[u8]) -> Result<(), WriteError> {
        let kind = match self.stage {
            Stage::Plane1 => PartKind::Plane1,
            Stage::Ids => PartKind::Ids,
            Stage::Plane2 => PartKind::Plane2,
            Stage::Rows => PartKind::Rows,
        };
        self.emit(kind, self.parts, &[payload])?;
        self.parts += 1;
        Ok(())
    }

    fn emit(&mut self, kind: PartKind, ordinal: u32, payload: &[&[u8]]) -> Result<(), WriteError> {
        let key = PartKey::new(self.layout.entry().object, kind, ordinal);
        let (header, len) = part::header(key, payload);
        self.out.write_all(&header)?;
        for slice in payload {
            self.out.write_all(slice)?;
        }
        let written = HEADER_LEN + payload.iter().map(|slice| slice.len()).sum::<usize>();
        self.out.write_all(&[0; ALIGN][..len - written])?;
        Ok(())
    }

    /// Bytes of the whole current column, without frames.
    fn column_len(&self) -> u64 {
        let geometry = self.layout.geometry();
        let rows = u64::from(geometry.rows());
        let block = geometry.shape().block_bytes() as u64;
        match self.stage {
            Stage::Plane1 => match self.spec.packing {
                Packing::Dense => rows.div_ceil(BLOCK_ROWS.into()) * block,
                Packing::PerCell => {
                    let cells = self.layout.cells().iter();
                    cells.map(|cell| u64::from(cell.slots.get().div_ceil(BLOCK_ROWS)) * block).sum()
                }
            },
            Stage::Ids => rows * 8,
            Stage::Plane2 => rows * geometry.shape().record_bytes() as u64,
            Stage::Rows => rows * geometry.row_bytes() as u64,
        }
    }

    /// Bytes of a full part's payload in the current column.
    fn part_payload(&self) -> usize {
        let geometry = self.layout.geometry();
        let shape = geometry.shape();
        match self.stage {
            Stage::Plane1 => shape.blocks_per_part(false) as usize * shape.block_bytes(),
            Stage::Ids => IDS_PER_PART as usize * 8,
            Stage::Plane2 => shape.records_per_chunk() as usize * shape.record_bytes(),
            Stage::Rows => geometry.rows_per_chunk() as usize * geometry.row_bytes(),
        }
    }
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Plane1 => "plane 1",
            Self::Ids => "ids",
            Self::Plane2 => "plane 2",
            Self::Rows => "uncompressed rows",
        }
    }
}

fn data(column: &'static str, expected: impl TryInto<u64>, found: impl TryInto<u64>) -> WriteError {
    let [expected, found] =
        [expected.try_into().unwrap_or(u64::MAX), found.try_into().unwrap_or(u64::MAX)];
    WriteError::Data { column, expected, found }
}

fn expect(column: &'static str, expected: usize, found: usize) -> Result<(), WriteError> {
    if expected == found { Ok(()) } else { Err(data(column, expected, found)) }
}
