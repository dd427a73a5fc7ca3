use crate::kernel::gemm::{self, PackedCols};

/// Centroids made ready for finding the nearest one by squared Euclidean distance.
///
/// They are scaled by a power of two so that neither their norms nor their products with any finite
/// row overflow: |s c|^2 - 2 s <x, s c> orders cells as |x - c|^2 does.
pub(super) struct Nearest {
    packed: PackedCols,
    bias: Vec<f32>,
    factor: f32,
}

impl Nearest {
    /// `centroids`: at least one, finite.
    pub fn new(centroids: &[f32], dim: usize) -> Self {
        Self::with_scale(centroids, dim, scale_of(centroids, dim))
    }

    /// With a given scale, so that scores for several sets of centroids can be compared.
    pub fn with_scale(centroids: &[f32], dim: usize, scale: f32) -> Self {
        let norms: Vec<f64> = centroids.chunks_exact(dim).map(norm2).collect();
        Self {
            packed: PackedCols::new(centroids, dim, scale),
            bias: norms.iter().map(|n| (n * (scale as f64 * scale as f64)) as f32).collect(),
            factor: -2.0 * scale,
        }
    }

    pub fn len(&self) -> usize {
        self.packed.len()
    }

    /// The nearest centroid of each row; `scores` is scratch of the same length.
    pub fn find(&self, rows: &[f32], best: &mut [u32], scores: &mut [f32]) {
        gemm::nearest(rows, &self.packed, self.factor, &self.bias, best, scores);
    }

    /// The scores of all centroids for each row, to `out` (rows x centroids).
    pub fn scores(&self, rows: &[f32], out: &mut [f32]) {
        gemm::dot_packed(rows, &self.packed, out);
        for out in out.chunks_exact_mut(self.len()) {
            for (o, b) in out.iter_mut().zip(&self.bias) {
                *o = b + self.factor * *o;
            }
        }
    }

    /// A squared norm in the scale of the scores.
    pub fn scaled(&self, norm2: f64) -> f32 {
        let scale = f64::from(self.factor / -2.0);
        (norm2 * scale * scale) as f32
    }

    /// Turns a score of [`Self::find`] into a squared distance, given the row's squared norm.
    pub fn distance2(&self, score: f32, row_norm2: f64) -> f64 {
        let scale = (self.factor / -2.0) as f64;
        (score as f64 / (scale * scale) + row_norm2).max(0.0)
    }
}

/// The power of two that brings the largest centroid's norm to about 2^-10: then a product with a
/// row of 16,000 components of the largest f32 stays finite.
pub(super) fn scale_of(centroids: &[f32], dim: usize) -> f32 {
    let largest = centroids.chunks_exact(dim).map(norm2).fold(0f64, f64::max).sqrt();
    if largest == 0.0 {
        return 1.0;
    }
    2f64.powi((-10 - largest.log2().ceil() as i32).clamp(-120, 120)) as f32
}

/// The squared norm, in f64: it cannot overflow.
pub(super) fn norm2(row: &[f32]) -> f64 {
    let mut sums = [0f64; 8];
    let (blocks, rest) = row.as_chunks::<8>();
    for b in blocks {
        for (s, &x) in sums.iter_mut().zip(b) {
            *s += x as f64 * x as f64;
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|&x| x as f64 * x as f64).sum::<f64>()
}
