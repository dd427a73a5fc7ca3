use super::centroids::mean_of;
use super::distinct::distinct;
use super::rng::Rng;
use super::space::{Nearest, norm2};
use super::{Interrupt, Interrupted, parallel};
use rayon::ThreadPool;

/// Rows of one task: a millisecond of work for a few hundred cells.
const TASK_ROWS: usize = 512;
/// An iteration that lowers the objective by a smaller share is the last one.
const ENOUGH: f64 = 2e-3;

/// Cells of a flat k-means: every cell has rows, every row the nearest cell.
pub(super) struct Cells {
    pub centroids: Vec<f32>,
    pub labels: Vec<u32>,
}

/// Lloyd's k-means by squared Euclidean distance: at most `k` cells, fewer if fewer rows differ.
/// `rows` are finite and at least one.
pub(super) fn lloyd(
    rows: &[f32],
    dim: usize,
    k: usize,
    iterations: u32,
    rng: &mut Rng,
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<Cells, Interrupted> {
    let n = rows.len() / dim;
    let order = rng.sample(n, n);
    let mut centroids: Vec<f32> = Vec::new();
    for i in distinct(rows, dim, &order, k.max(1)) {
        centroids.extend_from_slice(&rows[i * dim..][..dim]);
    }
    drop(order);
    let mut found = vec![Found::default(); n];
    parallel::chunks(pool, interrupted, &mut found, TASK_ROWS, |at, found| {
        for (f, row) in found.iter_mut().zip(rows[at * dim..].chunks_exact(dim)) {
            f.norm2 = norm2(row);
        }
    })?;

    let mut before = f64::INFINITY;
    for _ in 0..iterations {
        let objective = assign(rows, dim, &centroids, &mut found, pool, interrupted)?;
        refill_empty(&mut found, centroids.len() / dim, rng);
        update(rows, dim, &mut centroids, &found, pool, interrupted)?;
        if objective >= before * (1.0 - ENOUGH) {
            break;
        }
        before = objective;
    }
    assign(rows, dim, &centroids, &mut found, pool, interrupted)?;
    let mut labels: Vec<u32> = found.iter().map(|f| f.cell).collect();
    let count = centroids.len() / dim;
    let kept = drop_empty(count, &mut labels);
    if kept.len() < count {
        centroids =
            kept.iter().flat_map(|&c| &centroids[c as usize * dim..][..dim]).copied().collect();
    }
    Ok(Cells { centroids, labels })
}

/// [`lloyd`] on the calling thread, for small sets.
pub(super) fn lloyd_here(rows: &[f32], dim: usize, k: usize, iterations: u32, seed: u64) -> Cells {
    let never = || false;
    match lloyd(rows, dim, k, iterations, &mut Rng::new(seed), None, &never) {
        Ok(cells) => cells,
        Err(Interrupted) => unreachable!("nobody interrupts"),
    }
}

#[derive(Clone, Copy, Default)]
struct Found {
    cell: u32,
    norm2: f64,
    distance2: f64,
}

/// Gives each row its nearest cell; returns the sum of the squared distances.
fn assign(
    rows: &[f32],
    dim: usize,
    centroids: &[f32],
    found: &mut [Found],
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<f64, Interrupted> {
    let nearest = Nearest::new(centroids, dim);
    parallel::chunks(pool, interrupted, found, TASK_ROWS, |at, found| {
        let (mut cells, mut scores) = ([0; TASK_ROWS], [0.0; TASK_ROWS]);
        let (cells, scores) = (&mut cells[..found.len()], &mut scores[..found.len()]);
        nearest.find(&rows[at * dim..][..found.len() * dim], cells, scores);
        for ((f, &cell), &score) in found.iter_mut().zip(&*cells).zip(&*scores) {
            f.cell = cell;
            f.distance2 = nearest.distance2(score, f.norm2);
        }
    })?;
    Ok(found.iter().map(|f| f.distance2).sum())
}

/// Gives each empty cell a row of another one, drawn in proportion to its squared distance (as
/// k-means++ draws). Cells stay empty when all rows lie on their centroids.
fn refill_empty(found: &mut [Found], k: usize, rng: &mut Rng) {
    let mut counts = vec![0usize; k];
    for f in found.iter() {
        counts[f.cell as usize] += 1;
    }
    let mut empty = (0..k).filter(|&c| counts[c] == 0).peekable();
    if empty.peek().is_none() {
        return;
    }
    let mut sums = Vec::with_capacity(found.len());
    let mut total = 0.0;
    for f in found.iter() {
        total += f.distance2;
        sums.push(total);
    }
    let empty: Vec<usize> = empty.collect();
    for cell in empty {
        let draw = rng.unit() * total;
        let i = sums.partition_point(|&s| s <= draw);
        let Some(f) = found.get_mut(i) else { return };
        let donor = f.cell as usize;
        if f.distance2 > 0.0 && counts[donor] > 1 {
            counts[donor] -= 1;
            counts[cell] = 1;
            *f = Found { cell: cell as u32, distance2: 0.0, ..*f };
        }
    }
}

/// Moves each centroid to the mean of its rows. The rows of a cell are added up in row order, so the
/// sum does not depend on the threads. An empty cell's centroid stays.
fn update(
    rows: &[f32],
    dim: usize,
    centroids: &mut [f32],
    found: &[Found],
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<(), Interrupted> {
    let members = Members::new(found.iter().map(|f| f.cell), centroids.len() / dim);
    parallel::chunks(pool, interrupted, centroids, dim, |at, centroid| {
        mean_of(rows, members.of(at / dim), centroid);
    })
}

/// The rows of each cell, in row order.
pub(super) struct Members {
    starts: Vec<usize>,
    rows: Vec<u32>,
}

impl Members {
    /// `labels`: the cell of each row, below `k`.
    pub fn new(labels: impl Iterator<Item = u32> + Clone, k: usize) -> Self {
        let mut starts = vec![0usize; k + 1];
        let mut n = 0;
        for c in labels.clone() {
            starts[c as usize + 1] += 1;
            n += 1;
        }
        for c in 0..k {
            starts[c + 1] += starts[c];
        }
        let mut next = starts.clone();
        let mut rows = vec![0u32; n];
        for (i, c) in labels.enumerate() {
            rows[next[c as usize]] = i as u32;
            next[c as usize] += 1;
        }
        Self { starts, rows }
    }

    pub fn of(&self, cell: usize) -> &[u32] {
        &self.rows[self.starts[cell]..self.starts[cell + 1]]
    }
}

/// Renumbers `labels` so that cells without rows are left out; returns the old numbers of the others.
/// They keep their rows, since a cell without rows was nearest to none.
pub(super) fn drop_empty(count: usize, labels: &mut [u32]) -> Vec<u32> {
    let mut used = vec![false; count];
    for &c in labels.iter() {
        used[c as usize] = true;
    }
    let kept: Vec<u32> = (0..count as u32).filter(|&c| used[c as usize]).collect();
    let mut renumbered = vec![0u32; count];
    for (new, &old) in kept.iter().enumerate() {
        renumbered[old as usize] = new as u32;
    }
    for c in labels {
        *c = renumbered[*c as usize];
    }
    kept
}
