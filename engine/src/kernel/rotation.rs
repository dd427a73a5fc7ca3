//! A seeded, orthonormal pseudo-random rotation in O(n log n).
//!
//! A step flips signs in a block of a power of two and applies the Walsh-Hadamard transform to it. If the
//! block is everything, there are three steps; else four, which take the leading and the trailing block
//! in turn, and after each trailing one a Kac step mixes the two halves of the vector,
//! x, y -> (x + y, x - y) / sqrt(2). (A Kac step after a leading block would pair elements inside and
//! outside of it, and a few of them would stay outside of every block.)
//!
//! Ailon & Chazelle, "The fast Johnson-Lindenstrauss transform", 2009; Andoni et al., "Practical and
//! optimal LSH for angular distance", 2015; Kac, "Foundations of kinetic theory", 1956.

use super::{
    Level,
    fht::{base_scalar, fht},
};

/// Dimensions are padded by zeros to a multiple of this.
const PADDING: usize = 16;

/// `dim` rounded up to a multiple of 16.
#[inline]
pub const fn padded_dim(dim: usize) -> usize {
    dim.next_multiple_of(PADDING)
}

/// The rotation of a model: a function of dimension and seed only, part of the on-disk format.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    padded_dim: usize,
    /// The largest power of two not above `padded_dim`.
    block: usize,
    /// +-1/sqrt(block), `block` of them for each step.
    factors: Vec<f32>,
}

/// Half of the distance between 1 and the next f32: the largest relative error of one operation.
const UNIT_ROUNDOFF: f64 = f32::EPSILON as f64 / 2.0;

impl Rotation {
    /// The rotation of vectors with `dim` dimensions, padded to [`padded_dim`].
    pub fn new(dim: usize, seed: u64) -> Self {
        let padded_dim = padded_dim(dim.max(1));
        let block = 1 << padded_dim.ilog2();
        let steps = if block == padded_dim { 3 } else { 4 };
        let size = (1.0 / (block as f64).sqrt()) as f32;
        let mut random = SplitMix64(seed);
        let mut factors = Vec::with_capacity(steps * block);
        while factors.len() < steps * block {
            let bits = random.next();
            let count = block.min(64);
            factors.extend((0..count).map(|i| if bits >> i & 1 == 0 { size } else { -size }));
        }
        Self { padded_dim, block, factors }
    }

    /// Length of the vectors that are rotated.
    #[inline]
    pub fn padded_dim(&self) -> usize {
        self.padded_dim
    }

    /// Rotates `x` in place. Panics if its length is not [`Rotation::padded_dim`].
    pub fn rotate(&self, x: &mut [f32]) {
        self.rotate_at(Level::current(), x);
    }

    /// [`Rotation::rotate`] at a given level (or the CPU's best, if that is lower).
    pub fn rotate_at(&self, level: Level, x: &mut [f32]) {
        assert_eq!(x.len(), self.padded_dim, "the rotation has another dimension");
        #[cfg(target_arch = "x86_64")]
        match level.min(Level::best()) {
            // SAFETY: `best` found the level's features on this CPU.
            Level::Avx512 => return unsafe { x86::forward_avx512(self, x) },
            // SAFETY: as above.
            Level::Avx2 => return unsafe { x86::forward_avx2(self, x) },
            Level::Scalar => {}
        }
        let _ = level;
        forward(self, x, base_scalar);
    }

    /// The inverse of [`Rotation::rotate`].
    pub fn rotate_back(&self, x: &mut [f32]) {
        self.rotate_back_at(Level::current(), x);
    }

    /// [`Rotation::rotate_back`] at a given level (or the CPU's best, if that is lower).
    pub fn rotate_back_at(&self, level: Level, x: &mut [f32]) {
        assert_eq!(x.len(), self.padded_dim, "the rotation has another dimension");
        #[cfg(target_arch = "x86_64")]
        match level.min(Level::best()) {
            // SAFETY: `best` found the level's features on this CPU.
            Level::Avx512 => return unsafe { x86::backward_avx512(self, x) },
            // SAFETY: as above.
            Level::Avx2 => return unsafe { x86::backward_avx2(self, x) },
            Level::Scalar => {}
        }
        let _ = level;
        backward(self, x, base_scalar);
    }

    /// A bound on |rotate(x) - R x| / |x|, where R is the exact rotation, as long as nothing underflows.
    pub fn relative_error(&self) -> f64 {
        // An operation changes its result by at most one unit, and each step is orthogonal up to a
        // factor, so the units add up: the factors (themselves rounded), the transform's additions,
        // the Kac steps.
        let kac_steps = if self.block == self.padded_dim { 0 } else { self.steps() / 2 };
        let units = self.steps() * (2 + self.block.ilog2() as usize) + kac_steps * 3;
        units as f64 * UNIT_ROUNDOFF * 1.0001
    }

    /// A bound on what underflow adds to |rotate(x) - R x|.
    pub fn absolute_error(&self) -> f64 {
        // At most two products a step and element, each off by up to half of the least denormal, 2^-149; the
        // transform lengthens the first one's by sqrt(block).
        (self.steps() * 2 * self.padded_dim) as f64 * 2f64.powi(-149)
    }

    /// The signs of all steps, +-1.
    #[cfg(test)]
    pub(super) fn signs(&self) -> Vec<f32> {
        self.factors.iter().map(|factor| factor.signum()).collect()
    }

    fn steps(&self) -> usize {
        self.factors.len() / self.block
    }
}

#[inline(always)]
fn kac_step(x: &mut [f32]) {
    let middle = x.len() / 2;
    let (low, high) = x.split_at_mut(middle);
    for (low, high) in low.iter_mut().zip(high) {
        let (sum, difference) = (*low + *high, *low - *high);
        *low = sum * std::f32::consts::FRAC_1_SQRT_2;
        *high = difference * std::f32::consts::FRAC_1_SQRT_2;
    }
}

#[inline(always)]
fn scale_by(x: &mut [f32], factors: &[f32]) {
    for (x, factor) in x.iter_mut().zip(factors) {
        *x *= factor;
    }
}

#[inline(always)]
fn forward(rotation: &Rotation, x: &mut [f32], base: impl Fn(&mut [f32; 16])) {
    let (block, outside) = (rotation.block, rotation.padded_dim - rotation.block);
    for (step, factors) in rotation.factors.chunks_exact(block).enumerate() {
        let trailing = step % 2 == 1;
        let start = if trailing { outside } else { 0 };
        let part = &mut x[start..start + block];
        scale_by(part, factors);
        fht(part, &base);
        if trailing && outside > 0 {
            kac_step(x);
        }
    }
}

#[inline(always)]
fn backward(rotation: &Rotation, x: &mut [f32], base: impl Fn(&mut [f32; 16])) {
    let (block, outside) = (rotation.block, rotation.padded_dim - rotation.block);
    for (step, factors) in rotation.factors.chunks_exact(block).enumerate().rev() {
        let trailing = step % 2 == 1;
        if trailing && outside > 0 {
            kac_step(x);
        }
        let start = if trailing { outside } else { 0 };
        let part = &mut x[start..start + block];
        fht(part, &base);
        scale_by(part, factors);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{super::fht::x86, Rotation};

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
    pub fn forward_avx512(rotation: &Rotation, x: &mut [f32]) {
        super::forward(rotation, x, |x| x86::base_avx512(x));
    }

    #[target_feature(enable = "avx2")]
    pub fn forward_avx2(rotation: &Rotation, x: &mut [f32]) {
        super::forward(rotation, x, |x| x86::base_avx2(x));
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
    pub fn backward_avx512(rotation: &Rotation, x: &mut [f32]) {
        super::backward(rotation, x, |x| x86::base_avx512(x));
    }

    #[target_feature(enable = "avx2")]
    pub fn backward_avx2(rotation: &Rotation, x: &mut [f32]) {
        super::backward(rotation, x, |x| x86::base_avx2(x));
    }
}

/// Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
