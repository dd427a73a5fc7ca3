//! The first flush of an index that was created empty: its rows get cells of their own.

use std::{collections::HashMap, io, ops::Range};

use rayon::{ThreadPool, prelude::*};

use super::{
    FlushError,
    recalibrate::{CALIBRATION_ROWS, query_of},
    train::{assign, spread, train},
};
use crate::{
    build::{Calibrator, EncodedCell, encode_or_split, write_cells},
    cluster::{Interrupt, Interrupted},
    quantize::{Model, Query, plane2},
    root::{Curves, Root, RootBuilder, RootEdit, RootError, SectionKey},
    segment::{SegmentName, WriteError, WrittenSegment},
};

/// Cells in neighbour order, for the first segments of an index.
#[derive(Debug)]
pub struct FirstCells {
    pub cells: Vec<EncodedCell>,
    /// For each cell the position of its rows in the batch, in the order in which they will be written.
    pub positions: Vec<Vec<u32>>,
    /// The recall curves.
    pub curves: Curves,
}

/// Finds about `lists` cells for rows of the delta, all of those that the index has, and calibrates recall with
/// some of them. `records`: plane-2 records of `model`. Computes on the pool.
///
/// Rows that calibrate are kept out of training where there are enough others.
pub fn first_cells(
    model: &Model,
    records: &[u8],
    lists: u32,
    seed: u64,
    pool: &ThreadPool,
    interrupt: Interrupt<'_>,
) -> Result<FirstCells, FlushError> {
    let width = model.padded_dim();
    let bytes = plane2::record_bytes(width);
    let rows = records.len() / bytes;
    if !records.len().is_multiple_of(bytes) {
        return Err(FlushError::Records { rows, expected: rows * bytes, found: records.len() });
    }
    if rows == 0 {
        return Err(FlushError::NoRows);
    }
    let lists = lists.clamp(1, rows as u32);
    let all = Rows { model, records };
    let calibrating: Vec<u32> = spread(rows, CALIBRATION_ROWS).collect();
    let mut calibrator = all.calibrator(&calibrating);
    let left_out = if rows > 8 * CALIBRATION_ROWS { &calibrating[..] } else { &[] };
    let assigner = train(model, records, lists, left_out, seed, pool, interrupt)?;
    let observe = &mut |decoded: &[f32], first: u32| {
        let positions: Vec<u64> = (u64::from(first)..).take(decoded.len() / width).collect();
        pool.install(|| calibrator.observe(decoded, &positions));
    };
    let members = assign(model, records, &assigner, pool, interrupt, observe)?;
    let target = rows.div_ceil(lists as usize);
    let encoded = pool.install(|| all.encode(members, target, seed, interrupt))?;
    let (cells, positions): (Vec<_>, Vec<_>) = encoded.into_iter().unzip();
    let root = root_of(model, &cells)?;
    let slot_of: HashMap<u64, u32> = (0..)
        .zip(&positions)
        .flat_map(|(slot, rows): (u32, &Vec<u32>)| rows.iter().map(move |&row| (row.into(), slot)))
        .collect();
    let curves = pool.install(|| calibrator.finish(&root, &slot_of));
    Ok(FirstCells { cells, positions, curves })
}

impl FirstCells {
    /// Cuts the cells into segments of at most about so many rows.
    pub fn segments(&self, rows: usize) -> Vec<Range<usize>> {
        let (mut segments, mut start, mut held) = (Vec::new(), 0, 0);
        for (number, cell) in self.cells.iter().enumerate() {
            if held > 0 && held + cell.ids.len() > rows {
                segments.push(start..number);
                (start, held) = (number, 0);
            }
            held += cell.ids.len();
        }
        segments.push(start..self.cells.len());
        segments
    }

    /// Writes cells as a segment. Cell `n` gets the id `first_id + n`.
    pub fn write(
        &self,
        model: &Model,
        name: SegmentName,
        first_id: u32,
        cells: Range<usize>,
        out: impl io::Write,
    ) -> Result<WrittenSegment, WriteError> {
        let ids: Vec<u32> = (first_id..).skip(cells.start).take(cells.len()).collect();
        write_cells(model, name, &self.cells[cells], &ids, out)
    }

    /// The sections of a root with these cells alone; the cells of `root`, which has no segment, are dropped.
    /// `segments`: those of [`FirstCells::segments`], written, in order.
    pub fn root(
        &self,
        root: &Root,
        first_id: u32,
        segments: &[WrittenSegment],
    ) -> Result<Vec<(SectionKey, Vec<u8>)>, RootError> {
        let mut edit = RootEdit::new(root);
        (0..root.cell_count() as u32).for_each(|slot| edit.remove_cell(slot));
        let models = root.models().len();
        let mut slots = Vec::with_capacity(self.cells.len());
        for (id, cell) in (first_id..).zip(&self.cells) {
            let mut centroid = cell.centroid.clone();
            plane2::set_record_id(&mut centroid, root.models()[0].padded_dim(), id.into());
            slots.push(edit.cell(id, &vec![&centroid[..]; models]));
        }
        let mut rest = &slots[..];
        for written in segments {
            let (own, later) = rest.split_at(written.cells.len().min(rest.len()));
            edit.segment(written, own);
            rest = later;
        }
        edit.curves(self.curves.clone());
        edit.build()
    }
}

/// The rows of a flush.
struct Rows<'a> {
    model: &'a Model,
    records: &'a [u8],
}

impl Rows<'_> {
    fn record(&self, row: u32) -> &[u8] {
        let bytes = plane2::record_bytes(self.model.padded_dim());
        &self.records[row as usize * bytes..][..bytes]
    }

    /// These rows as queries.
    fn calibrator(&self, rows: &[u32]) -> Calibrator {
        let query = |&row: &u32| -> Option<(u64, Query)> {
            Some((row.into(), query_of(self.model, self.record(row))?))
        };
        let samples = rows.iter().filter_map(query).collect();
        Calibrator::new(self.model.metric, self.model.padded_dim(), samples)
    }

    /// Encodes the cells with these rows, and splits the large ones.
    fn encode(
        &self,
        members: Vec<Vec<u32>>,
        target: usize,
        seed: u64,
        interrupt: Interrupt<'_>,
    ) -> Result<Vec<(EncodedCell, Vec<u32>)>, Interrupted> {
        let encode = |rows: Vec<u32>| {
            if interrupt() {
                return Err(Interrupted);
            }
            let records = rows.iter().flat_map(|&row| self.record(row)).copied().collect();
            let mut cells = encode_or_split(self.model, records, target, seed);
            for (_, positions) in &mut cells {
                positions.iter_mut().for_each(|place| *place = rows[*place as usize]);
            }
            Ok(cells)
        };
        let nested: Vec<_> = members.into_par_iter().map(encode).collect::<Result<_, _>>()?;
        Ok(nested.into_iter().flatten().collect())
    }
}

/// A root that ranks these cells, without rows.
fn root_of(model: &Model, cells: &[EncodedCell]) -> Result<Root, RootError> {
    let mut builder = RootBuilder::new(vec![model.clone()]);
    for (id, cell) in (0..).zip(cells) {
        builder.cell(id, &[&cell.centroid]);
    }
    let sections = builder.build()?;
    Root::from_sections(sections.into_iter().map(|(key, bytes)| (key.code(), bytes)))
}
