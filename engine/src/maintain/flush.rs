//! A flush: rows of the delta become one segment.

use std::io;

use super::{
    delta_segment::{self, DeltaCell},
    place::Placer,
};
use crate::{
    build::decode::decode_rows,
    cluster::{Interrupt, Interrupted},
    quantize::plane2,
    root::{Root, RootError},
    segment::{Packing, SegmentName, WriteError, WrittenSegment},
};

/// Rows of the delta, coded by the first model of the root.
#[derive(Debug, Clone, Copy)]
pub struct DeltaBatch<'a> {
    /// For each row the id of its cell when it was inserted.
    pub cells: &'a [u32],
    /// For each row its plane-2 record, which holds its id.
    pub records: &'a [u8],
}

/// A flushed segment.
#[derive(Debug)]
pub struct DeltaSegment {
    /// For [`crate::root::RootEdit::segment`], with `slots`.
    pub written: WrittenSegment,
    /// The slot of each of the segment's cells, ascending.
    pub slots: Vec<u32>,
    /// For each ordinal of the segment the position of its row in the batch.
    pub positions: Vec<u32>,
}

/// Why rows could not be flushed.
#[derive(Debug, thiserror::Error)]
pub enum FlushError {
    /// The caller asked to stop.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// The segment could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// There is not one record of the model's length for each row.
    #[error("{found} bytes of records for {rows} rows, expected {expected}")]
    Records {
        /// Rows of the batch.
        rows: usize,
        /// Bytes that they need.
        expected: usize,
        /// Bytes of the batch.
        found: usize,
    },
    /// The root has no cell to which rows could be given.
    #[error("the root has no cell")]
    NoCell,
    /// There is nothing to flush.
    #[error("there is no row to flush")]
    NoRows,
    /// The cells do not make a root.
    #[error(transparent)]
    Root(#[from] RootError),
}

/// Writes rows of the delta as one dense segment, in the order of their cells' slots.
///
/// A row stays in the cell that it was inserted into; if that was retired meanwhile, or is not known, it
/// goes to the nearest live cell. Plane-2 records are copied byte for byte; plane 1 is made from them, on
/// the calling thread (some 10 microseconds a row). Takes about 1.3 times the memory of the batch.
pub fn write_delta_segment(
    root: &Root,
    name: SegmentName,
    batch: DeltaBatch<'_>,
    out: impl io::Write,
    interrupt: Interrupt<'_>,
) -> Result<DeltaSegment, FlushError> {
    let model = &root.models()[0];
    let bytes = plane2::record_bytes(model.padded_dim());
    let (rows, expected) = (batch.cells.len(), batch.cells.len().saturating_mul(bytes));
    if batch.records.len() != expected {
        return Err(FlushError::Records { rows, expected, found: batch.records.len() });
    }
    let slot_of_row = slots_of(root, batch, interrupt)?;
    let mut positions: Vec<u32> = (0..rows as u32).collect();
    // Stable: within a cell in the order of insertion.
    positions.sort_by_key(|&row| slot_of_row[row as usize]);
    let (mut slots, mut cells) = (Vec::new(), Vec::new());
    for rows in positions.chunk_by(|&a, &b| slot_of_row[a as usize] == slot_of_row[b as usize]) {
        if interrupt() {
            return Err(Interrupted.into());
        }
        let slot = slot_of_row[rows[0] as usize];
        let record = |&row: &u32| &batch.records[row as usize * bytes..][..bytes];
        let records: Vec<u8> = rows.iter().flat_map(record).copied().collect();
        let id = root.cells()[slot as usize].id.get();
        cells.push(DeltaCell::encode(model, id, root.centroid_record(slot), records));
        slots.push(slot);
    }
    let written = delta_segment::write(model, name, Packing::Dense, &cells, out)?;
    Ok(DeltaSegment { written, slots, positions })
}

/// No slot.
const NOWHERE: u32 = u32::MAX;

/// The slot of the live cell of each row.
fn slots_of(
    root: &Root,
    batch: DeltaBatch<'_>,
    interrupt: Interrupt<'_>,
) -> Result<Vec<u32>, FlushError> {
    let live = |slot: &u32| !root.cells()[*slot as usize].is_retired();
    let own = |&cell: &u32| root.slot_of(cell).filter(live).unwrap_or(NOWHERE);
    let mut slots: Vec<u32> = batch.cells.iter().map(own).collect();
    let stray = (0..slots.len()).filter(|&row| slots[row] == NOWHERE);
    let stray: Vec<usize> = stray.collect();
    let model = &root.models()[0];
    let bytes = plane2::record_bytes(model.padded_dim());
    let mut placer = Placer::new(root);
    for rows in stray.chunks(4_096) {
        let record = |&row: &usize| &batch.records[row * bytes..][..bytes];
        let records: Vec<u8> = rows.iter().flat_map(record).copied().collect();
        let placed = placer.place(&decode_rows(model, &records), interrupt)?;
        let placed = placed.ok_or(FlushError::NoCell)?;
        for (&row, slot) in rows.iter().zip(placed) {
            slots[row] = slot;
        }
    }
    Ok(slots)
}
