use super::lloyd::{Members, lloyd_here};
use super::rng::Rng;

/// A cell of more than this many times the target is split.
const OVERSIZE: f64 = 2.2;

/// Splits the `rows` of one cell (n x dim) into sub-cells of about `target_rows`: returns the
/// sub-cell of each row, numbered from 0 without gaps. All zero if the cell has at most 2.2 times
/// the target.
///
/// Sub-cells are split in turn while they are oversized. Rows that are all identical stay one
/// oversized sub-cell, and splitting ends there.
///
/// # Panics
/// If `dim` is zero or does not divide `rows.len()`.
pub fn split(rows: &[f32], dim: usize, target_rows: usize, seed: u64) -> Vec<u32> {
    assert!(dim > 0 && rows.len().is_multiple_of(dim), "not a whole number of rows");
    let n = rows.len() / dim;
    let target = target_rows.max(1);
    let mut labels = vec![0u32; n];
    let mut cells = 0;
    let mut todo: Vec<(Vec<u32>, u64)> = vec![((0..n as u32).collect(), seed)];
    let mut gathered: Vec<f32> = Vec::new();
    while let Some((members, seed)) = todo.pop() {
        let parts = if members.len() as f64 > OVERSIZE * target as f64 {
            gathered.clear();
            for &i in &members {
                gathered.extend_from_slice(&rows[i as usize * dim..][..dim]);
            }
            divide(&gathered, dim, members.len().div_ceil(target), seed)
        } else {
            Vec::new()
        };
        if parts.len() < 2 {
            for &i in &members {
                labels[i as usize] = cells;
            }
            cells += 1;
            continue;
        }
        // Last in, first out: sub-cells that came from one part get neighbouring numbers.
        for (p, part) in parts.iter().enumerate().rev() {
            let part = part.iter().map(|&i| members[i as usize]).collect();
            todo.push((part, Rng::fork(seed, p as u64).next()));
        }
    }
    labels
}

/// The rows of each part, at most `k` parts; one part if all rows are identical.
fn divide(rows: &[f32], dim: usize, k: usize, seed: u64) -> Vec<Vec<u32>> {
    // More parts in one go would cost as the square of the rows.
    let k = k.clamp(2, 64);
    let cells = lloyd_here(rows, dim, k, 10, seed);
    let found = cells.centroids.len() / dim;
    let members = Members::new(cells.labels.iter().copied(), found);
    (0..found).map(|c| members.of(c).to_vec()).collect()
}
