//! From encoded cells to segments and a root.

use std::{collections::HashMap, io};

use super::EncodedCell;
use crate::{
    ObjectId,
    quantize::{Model, plane2},
    root::{Curves, Root, RootBuilder, RootError, SectionKey},
    segment::{
        CellSpec, Packing, RowPlane, SegmentName, SegmentSpec, SegmentWriter, WriteError,
        WrittenSegment,
    },
};

/// Collects the segments of a build and their cells; numbers the cells in the order in which they come.
pub struct Assembly {
    model: Model,
    index: ObjectId,
    writer: ObjectId,
    /// Centroid record of each cell.
    centroids: Vec<Vec<u8>>,
    segments: Vec<(WrittenSegment, Vec<u32>)>,
}

impl Assembly {
    /// An index without cells, whose objects are named by these ids.
    pub fn new(model: Model, index: ObjectId, writer: ObjectId) -> Self {
        Self { model, index, writer, centroids: Vec::new(), segments: Vec::new() }
    }

    /// The model of the rows.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Cells so far.
    pub fn cell_count(&self) -> usize {
        self.centroids.len()
    }

    /// Rows of all segments so far.
    pub fn rows(&self) -> u64 {
        self.segments.iter().map(|(written, _)| u64::from(written.entry.rows.get())).sum()
    }

    /// The name of a segment to be written.
    pub fn segment_name(&self, object: ObjectId) -> SegmentName {
        SegmentName { writer: self.writer, index: self.index, object }
    }

    /// Writes cells as a segment into `out` and takes them into the index. Returns the first cell's
    /// slot; the others follow.
    pub fn write_segment(
        &mut self,
        object: ObjectId,
        cells: Vec<EncodedCell>,
        out: impl io::Write,
    ) -> Result<u32, WriteError> {
        let first = self.centroids.len() as u32;
        let name = self.segment_name(object);
        let slots: Vec<u32> = (first..).take(cells.len()).collect();
        let written = write_cells(&self.model, name, &cells, &slots, out)?;
        for (slot, cell) in slots.iter().zip(cells) {
            let mut centroid = cell.centroid;
            plane2::set_record_id(&mut centroid, self.model.padded_dim(), u64::from(*slot));
            self.centroids.push(centroid);
        }
        self.segments.push((written, slots));
        Ok(first)
    }

    /// The root of what was written so far.
    pub fn root(&self, curves: Curves) -> Result<Vec<(SectionKey, Vec<u8>)>, RootError> {
        let mut builder = RootBuilder::new(vec![self.model.clone()]);
        for (id, centroid) in (0..).zip(&self.centroids) {
            builder.cell(id, &[centroid]);
        }
        for (written, slots) in &self.segments {
            builder.segment(written, slots);
        }
        builder.curves(curves);
        builder.build()
    }

    /// The root, read back. For calibration, which needs the ranking of its cells.
    pub fn read_root(&self, curves: Curves) -> Result<Root, RootError> {
        Root::from_sections(self.root(curves)?.into_iter().map(|(key, bytes)| (key.code(), bytes)))
    }
}

/// Writes cells, in this order and with these ids, as one segment of rows in cells.
pub(crate) fn write_cells(
    model: &Model,
    name: SegmentName,
    cells: &[EncodedCell],
    ids: &[u32],
    out: impl io::Write,
) -> Result<WrittenSegment, WriteError> {
    let rows = cells.iter().map(|cell| cell.ids.len() as u32);
    let spec = SegmentSpec {
        name,
        model: model.id,
        dim: model.dim as u32,
        bits: model.bits as u32,
        packing: Packing::PerCell,
        delta: false,
        row_plane: RowPlane::None,
        cells: ids.iter().zip(rows).map(|(&id, rows)| CellSpec::plain(id, rows)).collect(),
        references: Vec::new(),
        model_bytes: model.to_bytes(),
    };
    let mut writer = SegmentWriter::new(spec, out)?;
    for cell in cells {
        writer.plane1(&cell.blocks)?;
    }
    for cell in cells {
        writer.ids(&cell.ids)?;
    }
    for cell in cells {
        writer.plane2(&cell.records)?;
    }
    Ok(writer.finish()?.0)
}

/// Notes the slot of each id that calibration asks for, from cells that are about to be written with
/// `first` as the slot of the first.
pub fn note_slots(
    wanted: &std::collections::HashSet<u64>,
    cells: &[EncodedCell],
    first: u32,
    slot_of: &mut HashMap<u64, u32>,
) {
    for (slot, cell) in (first..).zip(cells) {
        for id in cell.ids.iter().filter(|id| wanted.contains(id)) {
            slot_of.insert(*id, slot);
        }
    }
}
