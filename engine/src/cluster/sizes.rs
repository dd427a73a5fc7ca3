use crate::Metric;

/// Rows in a cell up to a million rows.
pub const CELL_ROWS: u64 = 400;

/// Rows a cell to train on. Measured on 100,000 passages with 250 cells: codes for recall 0.95 with
/// 64, 96, 256 and 400 rows a cell: 10.1k, 10.0k, 9.6k, 9.5k.
const SAMPLE_PER_CELL: u64 = 256;

/// The number of cells for an index of `rows` rows: cells of 400 rows, above a million rows of
/// 400 x (rows / 1M)^(1/4). At least 1.
pub fn default_lists(rows: u64) -> u32 {
    let growth = (rows as f64 / 1e6).powf(0.25).max(1.0);
    let lists = rows as f64 / (CELL_ROWS as f64 * growth);
    (lists.round() as u64).clamp(1, u32::MAX as u64) as u32
}

/// Rows that a trained cell needs in the sample to be worth training.
const LEAST_PER_CELL: usize = 40;
/// Bytes of a trained cell's rows (f32, of model space) at the most, as far as there are cells enough.
const CELL_BYTES: usize = 64 << 20;

/// How many cells to train where `lists` are wanted and `sampled` of `rows` rows were drawn: fewer if the
/// sample is too small for so many. Their rows are then split into as many cells as are wanted
/// ([`super::split`]) once all of them are at hand.
pub fn trained_lists(lists: u32, sampled: usize, rows: u64, dim: usize) -> u32 {
    if sampled as u64 >= rows {
        return lists;
    }
    let for_memory = (rows as usize).saturating_mul(dim * size_of::<f32>()) / CELL_BYTES;
    let worth = (sampled / LEAST_PER_CELL).max(for_memory).max(1);
    lists.min(u32::try_from(worth).unwrap_or(u32::MAX))
}

/// How many of `rows` rows to draw for training `lists` cells of `dim` components (of model space),
/// so that [`super::kmeans`] takes at most about `budget` bytes, its sample included. At least 1
/// (unless there is no row), whatever the budget.
pub fn sample_rows(metric: Metric, rows: u64, lists: u32, dim: usize, budget: usize) -> usize {
    // A small table's rows are all taken: they cost nothing and help small cells.
    let wanted = (lists as u64 * SAMPLE_PER_CELL).max(10_000).min(rows);
    let row = dim * size_of::<f32>();
    // The sample, labels, and the part of it that is copied to start (for inner product all, too).
    let copies = if metric == Metric::InnerProduct { 2 } else { 1 };
    let each = copies * row + row / 2 + 64;
    // Centroids: current, packed, results; then what one more pass over them takes.
    let centroid = 4 * row;
    // No more are trained than the sample is enough for.
    let lists = (lists as usize).min(budget / (centroid + LEAST_PER_CELL * each));
    let fixed = centroid * lists;
    let fit = budget.saturating_sub(fixed) / each;
    (wanted as usize).min(fit.max(1))
}
