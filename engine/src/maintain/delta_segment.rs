//! Writing a segment of the delta: few rows of many cells.

use std::io;

use crate::{
    build::{decode::decode_into, ids_of},
    quantize::{
        Model,
        plane1::{self, BLOCK_ROWS, Plane1Row, Plane1RowRef},
        plane2,
    },
    segment::{
        CellSpec, Packing, RowPlane, SegmentName, SegmentSpec, SegmentWriter, WriteError,
        WrittenSegment,
    },
};

/// The rows of a cell.
#[derive(Debug)]
pub(super) struct DeltaCell {
    pub id: u32,
    /// Plane 1, relative to the cell's centroid.
    pub codes: Vec<Plane1Row>,
    /// Plane 2.
    pub records: Vec<u8>,
}

impl DeltaCell {
    /// Codes the rows of these records relative to the cell with this centroid record.
    pub fn encode(model: &Model, id: u32, centroid: &[u8], records: Vec<u8>) -> Self {
        let width = model.padded_dim();
        let (mut x, mut mean) = (vec![0.0; width], vec![0.0; width]);
        decode_into(centroid, &mut mean);
        let code = |record| {
            decode_into(record, &mut x);
            plane1::encode_row(model, &x, &mean)
        };
        let codes = records.chunks_exact(plane2::record_bytes(width)).map(code).collect();
        Self { id, codes, records }
    }
}

/// Writes cells, in this order, as one segment of the delta.
pub(super) fn write(
    model: &Model,
    name: SegmentName,
    packing: Packing,
    cells: &[DeltaCell],
    out: impl io::Write,
) -> Result<WrittenSegment, WriteError> {
    let spec = SegmentSpec {
        name,
        model: model.id,
        dim: model.dim as u32,
        bits: model.bits as u32,
        packing,
        delta: true,
        row_plane: RowPlane::None,
        cells: cells.iter().map(|c| CellSpec::plain(c.id, c.codes.len() as u32)).collect(),
        references: Vec::new(),
        model_bytes: model.to_bytes(),
    };
    let mut writer = SegmentWriter::new(spec, out)?;
    let mut blocks = Vec::new();
    let mut write = |codes: &[Plane1RowRef<'_>]| {
        blocks.clear();
        plane1::blocks_from_rows(model, codes, &mut blocks);
        writer.plane1(&blocks)
    };
    let codes: Vec<_> = cells.iter().flat_map(|cell| &cell.codes).map(Into::into).collect();
    match packing {
        Packing::Dense => codes.chunks(64 * BLOCK_ROWS).try_for_each(write)?,
        Packing::PerCell => {
            let mut rest = &codes[..];
            for cell in cells {
                let (own, later) = rest.split_at(cell.codes.len());
                write(own)?;
                rest = later;
            }
        }
    }
    for cell in cells {
        writer.ids(&ids_of(&cell.records, model.padded_dim()))?;
    }
    for cell in cells {
        writer.plane2(&cell.records)?;
    }
    Ok(writer.finish()?.0)
}
