use super::lloyd::Members;
use super::{Interrupt, Interrupted, parallel};
use rayon::ThreadPool;

/// Cells: for each its centroid, the plain mean of its rows (never scaled to unit length, since
/// residuals to it are taken later), and its spread, the root-mean-square distance of its rows to
/// the centroid. All finite.
#[derive(Debug, Clone, PartialEq)]
pub struct Centroids {
    dim: usize,
    data: Vec<f32>,
    spreads: Vec<f32>,
}

impl Centroids {
    /// Cells from row-major centroids of `dim` components each and their spreads (which only matter
    /// for inner product; zeros will do otherwise).
    ///
    /// # Panics
    /// If `dim` is zero or the lengths do not fit.
    pub fn new(dim: usize, data: Vec<f32>, spreads: Vec<f32>) -> Self {
        assert!(dim > 0 && data.len() == spreads.len() * dim, "a centroid for each spread");
        Self { dim, data, spreads }
    }

    /// The number of cells.
    pub fn len(&self) -> usize {
        self.spreads.len()
    }

    /// True if there is no cell (the sample had no row).
    pub fn is_empty(&self) -> bool {
        self.spreads.is_empty()
    }

    /// Components of a centroid.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// All centroids, row-major.
    pub fn as_slice(&self) -> &[f32] {
        &self.data
    }

    /// Centroid `cell`.
    pub fn get(&self, cell: usize) -> &[f32] {
        &self.data[cell * self.dim..][..self.dim]
    }

    /// The spread of each cell.
    pub fn spreads(&self) -> &[f32] {
        &self.spreads
    }

    /// The same cells in another order (see [`super::order_cells`]): `order[place]` is the old number
    /// of the cell that is now number `place`.
    pub fn reordered(&self, order: &[u32]) -> Self {
        Self {
            dim: self.dim,
            data: order.iter().flat_map(|&c| self.get(c as usize)).copied().collect(),
            spreads: order.iter().map(|&c| self.spreads[c as usize]).collect(),
        }
    }
}

/// The spread of a cell: the root-mean-square distance of `rows` (n x dim) to `centroid` (dim).
pub fn spread(rows: &[f32], centroid: &[f32]) -> f32 {
    let distances = rows.chunks_exact(centroid.len()).map(|row| distance2(row, centroid));
    root_mean(distances.len(), distances)
}

fn root_mean(count: usize, squares: impl Iterator<Item = f64>) -> f32 {
    let mean = squares.sum::<f64>() / count.max(1) as f64;
    mean.sqrt().min(f32::MAX.into()) as f32
}

fn distance2(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0f64; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for ((s, &a), &b) in sums.iter_mut().zip(a).zip(b) {
            let d = a as f64 - b as f64;
            *s += d * d;
        }
    }
    sums.iter().sum()
}

/// The spread of each cell around its centroid.
pub(super) fn spreads(
    rows: &[f32],
    dim: usize,
    centroids: &[f32],
    labels: &[u32],
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<Vec<f32>, Interrupted> {
    let count = centroids.len() / dim;
    let members = Members::new(labels.iter().copied(), count);
    parallel::map(pool, interrupted, count, |c| {
        Ok(spread_of(rows, dim, members.of(c), &centroids[c * dim..][..dim]))
    })
}

/// The mean and the spread of each of `count` cells that have rows; zeros for a cell without any.
pub(super) fn means_and_spreads(
    rows: &[f32],
    dim: usize,
    labels: &[u32],
    count: usize,
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<(Vec<f32>, Vec<f32>), Interrupted> {
    let members = Members::new(labels.iter().copied(), count);
    let mut means = vec![0.0; count * dim];
    parallel::chunks(pool, interrupted, &mut means, dim, |at, mean| {
        mean_of(rows, members.of(at / dim), mean);
    })?;
    let spreads = spreads(rows, dim, &means, labels, pool, interrupted)?;
    Ok((means, spreads))
}

fn spread_of(rows: &[f32], dim: usize, members: &[u32], centroid: &[f32]) -> f32 {
    let row = |&i: &u32| &rows[i as usize * dim..][..dim];
    root_mean(members.len(), members.iter().map(|i| distance2(row(i), centroid)))
}

/// The mean of the rows `members`, to `mean`; they are added in order. Nothing happens without rows.
pub(super) fn mean_of(rows: &[f32], members: &[u32], mean: &mut [f32]) {
    let dim = mean.len();
    if members.is_empty() {
        return;
    }
    let mut sum = vec![0f64; dim];
    for &i in members {
        for (s, &x) in sum.iter_mut().zip(&rows[i as usize * dim..][..dim]) {
            *s += x as f64;
        }
    }
    let count = members.len() as f64;
    for (m, s) in mean.iter_mut().zip(&sum) {
        *m = (s / count) as f32;
    }
}
