use super::assign::Assigner;
use super::centroids::{Centroids, means_and_spreads, spreads};
use super::lloyd::{Cells, Members, drop_empty, lloyd};
use super::norm_space::{NormSpace, placed};
use super::rng::Rng;
use super::{Interrupt, Interrupted, parallel};
use crate::Metric;
use rayon::ThreadPool;

/// Cells up to which training starts with one flat k-means.
const FLAT_CELLS: usize = 512;
/// Rows a cell with which training starts.
const START_ROWS: usize = 64;
/// Iterations over the whole sample that follow. Measured on 100,000 passages with 1,000 cells: codes
/// for recall 0.95 after two levels and 1, 2, 3, 5 rounds: 6.7k, 6.5k, 6.4k, 6.3k; a flat k-means of
/// 10 iterations: 6.1k in twice the time.
const ROUNDS: u32 = 3;

/// What to train.
#[derive(Debug, Clone, Copy)]
pub struct Params {
    pub metric: Metric,
    /// Components of a row (of model space: the padded dimension).
    pub dim: usize,
    /// Cells wanted. Fewer come out when fewer rows of the sample differ.
    pub lists: usize,
    pub seed: u64,
    /// The most iterations of each k-means; it ends earlier when little changes.
    pub iterations: u32,
}

impl Params {
    /// Parameters with the default number of iterations (10).
    pub fn new(metric: Metric, dim: usize, lists: usize, seed: u64) -> Self {
        Self { metric, dim, lists, seed, iterations: 10 }
    }
}

/// Trains at most `params.lists` cells on `sample` (n x `params.dim`, model space).
///
/// L2 and cosine: plain k-means by squared distance. (For cosine the rows are unit vectors minus a
/// mean. Spherical k-means on the unit vectors themselves gave the same recall for the codes scanned
/// on 100,000 passages, within the 3 % by which seeds differ.) Inner product: by direction and the
/// logarithm of the norm, which copies the sample.
///
/// No cell is empty: [`Assigner`] gives each some row of the sample. (Above 2,048 cells, where it is
/// approximate, that may fail for a few cells of a single row.) Rows with a component that is not
/// finite are ignored.
///
/// Up to 512 cells start from one k-means over at most 64 rows a cell, more from about
/// sqrt(`lists`) super-cells that are trained first and then each on its own; a few iterations over
/// the whole sample follow.
///
/// # Panics
/// If `params.dim` is zero or does not divide `sample.len()`.
pub fn kmeans(
    params: &Params,
    sample: &[f32],
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<Centroids, Interrupted> {
    train(params, FLAT_CELLS, sample, pool, interrupted)
}

/// [`kmeans`] with another limit of the flat method.
pub(super) fn train(
    params: &Params,
    flat_cells: usize,
    sample: &[f32],
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<Centroids, Interrupted> {
    let dim = params.dim;
    assert!(dim > 0 && sample.len().is_multiple_of(dim), "not a whole number of rows");
    let finite = |row: &&[f32]| row.iter().all(|x| x.is_finite());
    let clean: Vec<f32>;
    let sample = if sample.chunks_exact(dim).all(|r| finite(&r)) {
        sample
    } else {
        clean = sample.chunks_exact(dim).filter(finite).flatten().copied().collect();
        &clean
    };
    if sample.is_empty() {
        return Ok(Centroids::new(dim, Vec::new(), Vec::new()));
    }
    let inner = params.metric == Metric::InnerProduct;
    let space = inner.then(|| NormSpace::of_rows(sample, dim));
    let rows = placed(space.as_ref(), sample);
    let n = sample.len() / dim;
    let width = rows.len() / n;
    let lists = params.lists.clamp(1, n);

    let mut rng = Rng::new(params.seed);
    let few = lists.saturating_mul(START_ROWS);
    let part = if n > 2 * few { gather(&rows, width, &rng.sample(n, few)) } else { Vec::new() };
    let start = if part.is_empty() { &rows[..] } else { &part };
    let cells = if lists <= flat_cells {
        lloyd(start, width, lists, params.iterations, &mut rng, pool, interrupted)?
    } else {
        two_level(params, lists, start, width, &mut rng, pool, interrupted)?
    };
    let (mut labels, mut count) = (cells.labels, cells.centroids.len() / width);
    if !part.is_empty() {
        labels = vec![0; n];
        let start = Assigner::plain(width, &cells.centroids);
        start.assign(&rows, &mut labels, pool, interrupted)?;
    } else if lists <= flat_cells && !inner {
        let spreads = spreads(sample, dim, &cells.centroids, &labels, pool, interrupted)?;
        return Ok(Centroids::new(dim, cells.centroids, spreads));
    }
    drop((cells.centroids, part, rows));

    // Lloyd's iterations over all rows, with the cells as the assigner will see them.
    let mut round = 1;
    let mut cells;
    loop {
        let (means, spreads) = means_and_spreads(sample, dim, &labels, count, pool, interrupted)?;
        cells = Centroids::new(dim, means, spreads);
        Assigner::new(params.metric, &cells).assign(sample, &mut labels, pool, interrupted)?;
        let kept = drop_empty(count, &mut labels);
        count = kept.len();
        if round == ROUNDS {
            cells = cells.reordered(&kept);
            break;
        }
        round += 1;
    }
    // Without those cells a flat assigner sees the rest the same, but for inner product's usual norm.
    // An approximate one would lose some row's cell again and again.
    loop {
        let assigner = Assigner::new(params.metric, &cells);
        if !(inner && assigner.is_flat()) {
            return Ok(cells);
        }
        assigner.assign(sample, &mut labels, pool, interrupted)?;
        let kept = drop_empty(cells.len(), &mut labels);
        if kept.len() == cells.len() {
            return Ok(cells);
        }
        cells = cells.reordered(&kept);
    }
}

fn gather(rows: &[f32], width: usize, which: &[usize]) -> Vec<f32> {
    which.iter().flat_map(|&i| &rows[i * width..][..width]).copied().collect()
}

/// About sqrt(`lists`) super-cells, each trained on its own.
fn two_level(
    params: &Params,
    lists: usize,
    rows: &[f32],
    width: usize,
    rng: &mut Rng,
    pool: Option<&ThreadPool>,
    interrupted: Interrupt,
) -> Result<Cells, Interrupted> {
    let n = rows.len() / width;
    let supers = (lists as f64).sqrt().round() as usize;
    // A few hundred rows place a super-cell well enough.
    let picked = gather(rows, width, &rng.sample(n, supers * 256));
    let top = lloyd(&picked, width, supers, params.iterations, rng, pool, interrupted)?;
    drop(picked);
    let mut labels = vec![0; n];
    let top = Assigner::plain(width, &top.centroids);
    top.assign(rows, &mut labels, pool, interrupted)?;

    let members = Members::new(labels.iter().copied(), top.len());
    let sizes: Vec<usize> = (0..top.len()).map(|s| members.of(s).len()).collect();
    let shares = apportion(lists, &sizes);
    let parts = parallel::map(pool, interrupted, sizes.len(), |s| {
        let which: Vec<usize> = members.of(s).iter().map(|&i| i as usize).collect();
        if which.is_empty() {
            return Ok(Cells { centroids: Vec::new(), labels: Vec::new() });
        }
        let own = gather(rows, width, &which);
        let mut rng = Rng::fork(params.seed, 1 + s as u64);
        lloyd(&own, width, shares[s], params.iterations, &mut rng, None, interrupted)
    })?;
    let mut centroids = Vec::new();
    for (s, part) in parts.iter().enumerate() {
        let first = (centroids.len() / width) as u32;
        centroids.extend_from_slice(&part.centroids);
        for (&i, &label) in members.of(s).iter().zip(&part.labels) {
            labels[i as usize] = first + label;
        }
    }
    Ok(Cells { centroids, labels })
}

/// Splits `total` over parts in proportion to their sizes: at least 1 to each part that has rows
/// (there are at most `total` of them), the rest by largest remainders, lower index first.
fn apportion(total: usize, sizes: &[usize]) -> Vec<usize> {
    let all: u128 = sizes.iter().map(|&s| s as u128).sum();
    let rest = total - sizes.iter().filter(|&&s| s > 0).count();
    let exact = |i: usize| sizes[i] as u128 * rest as u128;
    let mut shares: Vec<usize> =
        (0..sizes.len()).map(|i| usize::from(sizes[i] > 0) + (exact(i) / all) as usize).collect();
    let mut by_remainder: Vec<usize> = (0..sizes.len()).collect();
    by_remainder.sort_by_key(|&i| (std::cmp::Reverse(exact(i) % all), i));
    let left = total - shares.iter().sum::<usize>();
    for &i in &by_remainder[..left] {
        shares[i] += 1;
    }
    shares
}
