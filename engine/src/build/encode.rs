//! From the plane-2 records of a cell to its centroid, plane-1 blocks and ids.

use rayon::prelude::*;

use super::decode::decode_rows;
use crate::{
    cluster::{self, Interrupt, Interrupted},
    kernel::RacyBytes,
    quantize::{Model, cell_rank, plane1, plane2},
};

/// Cells above this many times the target size are split.
const SPLIT_ABOVE: f64 = 2.2;
/// Rows of larger cells, which somebody asked for, are not put in order.
const MOST_ORDERED: usize = 1 << 13;

/// A cell ready to be written to a segment.
#[derive(Debug, Clone, Default)]
pub struct EncodedCell {
    /// The cell's mean as an 8-bit record; the id in it is 0 until the cell gets its number.
    pub centroid: Vec<u8>,
    /// Plane-1 blocks, relative to the mean as decoded from that record.
    pub blocks: Vec<u8>,
    /// Row ids, in the order of the blocks.
    pub ids: Vec<u64>,
    /// Plane-2 records, in the order of the blocks.
    pub records: Vec<u8>,
}

/// Encodes the cells of a group, splitting those above 2.2 times `target_rows`. Each input holds the
/// plane-2 records of one trained cell; empty ones vanish. The order of the output follows the input.
/// Looks at `interrupt` before each cell.
pub fn encode_cells(
    model: &Model,
    cells: Vec<Vec<u8>>,
    target_rows: usize,
    seed: u64,
    interrupt: Interrupt<'_>,
) -> Result<Vec<EncodedCell>, Interrupted> {
    let nested: Vec<Vec<(EncodedCell, Vec<u32>)>> = cells
        .into_par_iter()
        .map(|records| match interrupt() {
            true => Err(Interrupted),
            false => Ok(encode_or_split(model, records, target_rows, seed)),
        })
        .collect::<Result<_, _>>()?;
    Ok(nested.into_iter().flatten().map(|(cell, _)| cell).collect())
}

/// Encodes the rows of one cell, or splits it if it is oversized. With each cell comes the place that each
/// of its rows had among `records`.
pub(crate) fn encode_or_split(
    model: &Model,
    records: Vec<u8>,
    target_rows: usize,
    seed: u64,
) -> Vec<(EncodedCell, Vec<u32>)> {
    let bytes = plane2::record_bytes(model.padded_dim());
    let rows = records.len() / bytes;
    if rows == 0 {
        return Vec::new();
    }
    let decoded = decode_rows(model, &records);
    if (rows as f64) <= target_rows as f64 * SPLIT_ABOVE {
        return vec![encode_rows(model, records, decoded, None)];
    }
    let width = model.padded_dim();
    let parts = cluster::split(&decoded, width, target_rows, seed);
    let mut members: Vec<Vec<u32>> = Vec::new();
    for (row, part) in (0..).zip(parts) {
        let part = part as usize;
        members.resize(members.len().max(part + 1), Vec::new());
        members[part].push(row);
    }
    let encode = |rows: Vec<u32>| {
        let part_records = in_order(&rows, &records, bytes);
        let part_rows = in_order(&rows, &decoded, width);
        let (cell, order) = encode_rows(model, part_records, part_rows, None);
        (cell, in_order(&order, &rows, 1))
    };
    members.into_iter().filter(|rows| !rows.is_empty()).map(encode).collect()
}

/// Lays the rows of a cell out so that neighbours lie together: the few that a query refines are then
/// in few chunks of plane 2. Gives the order.
fn order_rows(records: &mut Vec<u8>, decoded: &mut Vec<f32>, width: usize) -> Vec<u32> {
    let bytes = plane2::record_bytes(width);
    let rows = decoded.len() / width;
    if rows > MOST_ORDERED {
        return (0..rows as u32).collect();
    }
    let order = cluster::order_cells(decoded, width);
    *records = in_order(&order, records, bytes);
    *decoded = in_order(&order, decoded, width);
    order
}

/// The rows of `width` items each, in this order.
fn in_order<T: Copy>(order: &[u32], rows: &[T], width: usize) -> Vec<T> {
    let mut ordered = Vec::with_capacity(order.len() * width);
    for &row in order {
        ordered.extend_from_slice(&rows[row as usize * width..][..width]);
    }
    ordered
}

/// Encodes the rows of one cell, at least one, relative to their mean, or to that in a centroid record that
/// the cell has already. With it comes the place that each row had among `records`.
pub(crate) fn encode_rows(
    model: &Model,
    mut records: Vec<u8>,
    mut decoded: Vec<f32>,
    centroid: Option<Vec<u8>>,
) -> (EncodedCell, Vec<u32>) {
    let width = model.padded_dim();
    let bytes = plane2::record_bytes(width);
    let order = order_rows(&mut records, &mut decoded, width);
    let decoded = decoded.as_slice();
    let mut centroid = centroid.unwrap_or_else(|| {
        let mut own = Vec::with_capacity(bytes);
        plane2::encode(model, &mean_of(decoded, width), 0, &mut own);
        own
    });
    let mut mean = vec![0.0; width];
    plane2::decode(RacyBytes::new(&centroid), &mut mean);
    cell_rank::set_spread(&mut centroid, width, cluster::spread(decoded, &mean));
    let mut blocks = Vec::new();
    plane1::encode_blocks(model, decoded, &mean, &mut blocks);
    let ids = ids_of(&records, width);
    (EncodedCell { centroid, blocks, ids, records }, order)
}

/// The ids in plane-2 records.
pub(crate) fn ids_of(records: &[u8], width: usize) -> Vec<u64> {
    let records = records.chunks_exact(plane2::record_bytes(width));
    records.filter_map(|record| plane2::record_id(RacyBytes::new(record), width)).collect()
}

/// The mean of n x `width` values, summed in f64.
pub(crate) fn mean_of(rows: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; width];
    for row in rows.chunks_exact(width) {
        for (sum, &value) in sums.iter_mut().zip(row) {
            *sum += f64::from(value);
        }
    }
    let rows = (rows.len() / width).max(1) as f64;
    sums.into_iter().map(|sum| (sum / rows) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Metric;

    const DIM: usize = 32;

    /// The cell of these rows; the id of each is its place among them.
    fn cell(rows: &[[f32; DIM]]) -> (Model, Vec<EncodedCell>) {
        let model = Model::new(0, Metric::L2, DIM, 3, vec![0.0; DIM]).unwrap();
        let mut records = Vec::new();
        for (id, row) in rows.iter().enumerate() {
            let mut projected = vec![0.0; model.padded_dim()];
            model.project_row(row, &mut projected).unwrap();
            plane2::encode(&model, &projected, id as u64, &mut records);
        }
        let cells = encode_cells(&model, vec![records], rows.len(), 1, &|| false).unwrap();
        (model, cells)
    }

    #[test]
    fn neighbours_lie_together_in_a_cell_and_every_column_follows() {
        let group = |row: usize| row % 4;
        let rows: Vec<[f32; DIM]> = (0..200)
            .map(|row| {
                std::array::from_fn(|d| {
                    (group(row) == d) as u8 as f32 * 10.0 + (row * d % 7) as f32 * 0.01
                })
            })
            .collect();
        let (model, cells) = cell(&rows);
        let [cell] = &cells[..] else { panic!("{} cells", cells.len()) };
        let changes = cell.ids.windows(2).filter(|p| group(p[0] as usize) != group(p[1] as usize));
        assert_eq!(changes.count(), 3);
        let mut sorted = cell.ids.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..200).collect::<Vec<u64>>());
        let width = model.padded_dim();
        for (record, id) in cell.records.chunks_exact(plane2::record_bytes(width)).zip(&cell.ids) {
            assert_eq!(plane2::record_id(RacyBytes::new(record), width), Some(*id));
        }
    }

    #[test]
    fn equal_rows_and_single_rows_are_a_cell_too() {
        for rows in [1, 2, 100] {
            let (_, cells) = cell(&vec![[1.0; DIM]; rows]);
            assert_eq!(cells.iter().map(|cell| cell.ids.len()).sum::<usize>(), rows);
        }
    }
}
