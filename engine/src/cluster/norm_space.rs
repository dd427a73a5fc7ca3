use super::space::norm2;
use std::borrow::Cow;

/// What a factor e in norm counts, against the distance of two directions (at most 2).
///
/// Codes to scan for recall 0.95, on GloVe and on passages with log-normal norms of sigma 0.3: weight
/// 0.5: 3.6k, 7.6k; 1: 3.5k, 3.5k; 1.5: 3.3k, 3.1k; 2: 3.8k, 3.7k; by plain squared distance: 4.4k, 9.8k.
const WEIGHT: f64 = 1.5;

/// Further than a factor e^8 from the usual norm all norms are alike: f32 keeps its precision.
const LARGEST_LOG: f64 = 8.0;

/// The space in which inner-product rows are clustered: a row's direction and, as one more
/// component, the weighted logarithm of its norm. Its cells are narrow in norm and in direction, as
/// spherical cells inside bands of norm are, but the bands adapt to the data.
pub(super) struct NormSpace {
    dim: usize,
    usual_log: f64,
}

impl NormSpace {
    /// `squared_norms`: of the rows or cells; only their usual size matters.
    pub fn new(dim: usize, squared_norms: impl Iterator<Item = f64>) -> Self {
        let (mut sum, mut count) = (0.0, 0u64);
        for n in squared_norms.filter(|&n| n > 0.0) {
            sum += 0.5 * n.ln();
            count += 1;
        }
        Self { dim, usual_log: sum / count.max(1) as f64 }
    }

    pub fn of_rows(rows: &[f32], dim: usize) -> Self {
        Self::new(dim, rows.chunks_exact(dim).map(norm2))
    }

    /// Components in this space.
    pub fn width(&self) -> usize {
        self.dim + 1
    }

    pub fn rows(&self, rows: &[f32]) -> Vec<f32> {
        let mut out = Vec::with_capacity(rows.len() / self.dim * self.width());
        for row in rows.chunks_exact(self.dim) {
            self.push(row, norm2(row), &mut out);
        }
        out
    }

    /// A cell's place, from the mean of its rows and their root-mean-square distance to it: together
    /// they give the rows' usual norm, which the mean alone understates.
    pub fn centroids(&self, means: &[f32], spreads: &[f32]) -> Vec<f32> {
        let mut out = Vec::with_capacity(spreads.len() * self.width());
        for (mean, &spread) in means.chunks_exact(self.dim).zip(spreads) {
            self.push(mean, norm2(mean) + f64::from(spread).powi(2), &mut out);
        }
        out
    }

    fn push(&self, x: &[f32], squared_norm: f64, out: &mut Vec<f32>) {
        if squared_norm == 0.0 {
            out.resize(out.len() + self.dim, 0.0);
            out.push((-WEIGHT * LARGEST_LOG) as f32);
            return;
        }
        let inverse = 1.0 / squared_norm.sqrt();
        out.extend(x.iter().map(|&x| (f64::from(x) * inverse) as f32));
        let log = 0.5 * squared_norm.ln() - self.usual_log;
        out.push((WEIGHT * log.clamp(-LARGEST_LOG, LARGEST_LOG)) as f32);
    }
}

/// The squared distance, in the space in which inner-product rows are clustered, of a row to a cell:
/// what [`super::Assigner`] compares, for callers that have no centroids in memory.
/// `inner` is the inner product of the row and the cell's mean, `spread` the cell's.
pub fn norm_distance2(row_norm2: f64, mean_norm2: f64, spread: f64, inner: f64) -> f64 {
    let cell_norm2 = mean_norm2 + spread * spread;
    let unit = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let directions = unit(row_norm2, row_norm2) + unit(mean_norm2, cell_norm2)
        - 2.0 * unit(inner, (row_norm2 * cell_norm2).sqrt());
    let log = |norm2: f64| 0.5 * norm2.max(f64::MIN_POSITIVE).ln();
    let logs = (log(row_norm2) - log(cell_norm2)).clamp(-2.0 * LARGEST_LOG, 2.0 * LARGEST_LOG);
    directions + (WEIGHT * logs).powi(2)
}

/// `rows` as they are clustered: themselves, or in the norm space if there is one.
pub(super) fn placed<'a>(space: Option<&NormSpace>, rows: &'a [f32]) -> Cow<'a, [f32]> {
    match space {
        Some(space) => Cow::Owned(space.rows(rows)),
        None => Cow::Borrowed(rows),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_of_a_row_and_a_cell_needs_no_coordinates() {
        let rows = [3.0, -4.0, 0.5, 0.25, 100.0, 7.0];
        let (means, spreads) = ([1.0, 2.0, 40.0, 3.0], [0.5, 0.0]);
        let space = NormSpace::of_rows(&rows, 2);
        let (placed, cells) = (space.rows(&rows), space.centroids(&means, &spreads));
        for (row, at) in rows.chunks_exact(2).zip(placed.chunks_exact(3)) {
            for ((mean, spread), cell) in
                means.chunks_exact(2).zip(spreads).zip(cells.chunks_exact(3))
            {
                let expected: f32 = at.iter().zip(cell).map(|(a, b)| (a - b) * (a - b)).sum();
                let inner: f32 = row.iter().zip(mean).map(|(a, b)| a * b).sum();
                let found = norm_distance2(norm2(row), norm2(mean), spread.into(), inner.into());
                assert!((found - f64::from(expected)).abs() < 1e-4, "{found} {expected}");
            }
        }
    }
}
