//! Sums over pairs of f32 vectors.
//!
//! Element i is added to lane i mod 16 of accumulator (i / 16) mod 4; the accumulators, then the lanes,
//! are folded pairwise. So no sum is the result of more than n/64 + 8 additions in a row.

use super::{LANES, Level, level::per_level};

const ACCUMULATORS: usize = 4;

/// Any instruction set's code for a sum of terms.
#[inline(always)]
fn sum_pairs(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    assert_eq!(a.len(), b.len(), "vectors of different dimensions");
    let mut sums = [[0f32; LANES]; ACCUMULATORS];
    let mut a_steps = a.chunks_exact(LANES * ACCUMULATORS);
    let mut b_steps = b.chunks_exact(LANES * ACCUMULATORS);
    for (a, b) in (&mut a_steps).zip(&mut b_steps) {
        for (j, sum) in sums.iter_mut().enumerate() {
            for (i, lane) in sum.iter_mut().enumerate() {
                *lane += term(a[j * LANES + i], b[j * LANES + i]);
            }
        }
    }
    let rest = a_steps.remainder().chunks(LANES).zip(b_steps.remainder().chunks(LANES));
    for (sum, (a, b)) in sums.iter_mut().zip(rest) {
        for ((lane, &a), &b) in sum.iter_mut().zip(a).zip(b) {
            *lane += term(a, b);
        }
    }
    fold(sums)
}

/// Folds the accumulators, then the lanes, pairwise.
#[inline(always)]
pub(super) fn fold(sums: [[f32; LANES]; ACCUMULATORS]) -> f32 {
    let mut lanes = [0f32; LANES];
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Squared Euclidean distance. Panics if the dimensions differ.
#[inline]
pub fn l2_squared(a: &[f32], b: &[f32]) -> f32 {
    l2_squared_at(Level::current(), a, b)
}

/// [`l2_squared`] at a given level (or the CPU's best, if that is lower).
pub fn l2_squared_at(level: Level, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "vectors of different dimensions");
    #[cfg(target_arch = "x86_64")]
    match level.min(Level::best()) {
        // SAFETY: `best` found the level's features on this CPU.
        Level::Avx512 => return unsafe { x86::l2_squared_avx512(a, b) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { x86::l2_squared_avx2(a, b) },
        Level::Scalar => {}
    }
    let _ = level;
    sum_pairs(a, b, |a, b| {
        let difference = a - b;
        difference * difference
    })
}

/// Inner product. Panics if the dimensions differ.
#[inline]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_at(Level::current(), a, b)
}

/// [`dot`] at a given level (or the CPU's best, if that is lower).
pub fn dot_at(level: Level, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "vectors of different dimensions");
    #[cfg(target_arch = "x86_64")]
    match level.min(Level::best()) {
        // SAFETY: `best` found the level's features on this CPU.
        Level::Avx512 => return unsafe { x86::dot_avx512(a, b) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { x86::dot_avx2(a, b) },
        Level::Scalar => {}
    }
    let _ = level;
    sum_pairs(a, b, |a, b| a * b)
}

/// Squared Euclidean norm.
#[inline]
pub fn norm_squared(a: &[f32]) -> f32 {
    dot(a, a)
}

#[inline(always)]
fn norm_squared_f64_body(a: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let mut steps = a.chunks_exact(LANES);
    for step in &mut steps {
        for (lane, &x) in lanes.iter_mut().zip(step) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(steps.remainder()) {
        *lane += f64::from(x) * f64::from(x);
    }
    lanes.iter().sum()
}

per_level! {
    /// Squared Euclidean norm in double precision, where no f32 vector overflows or underflows.
    norm_squared_f64, norm_squared_f64_at(a: &[f32]) -> f64, norm_squared_f64_body
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{
        super::codes::x86::{fold_avx2, fold_avx512},
        LANES,
    };

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
    pub fn l2_squared_avx512(a: &[f32], b: &[f32]) -> f32 {
        sum_avx512(a, b, |sum, a, b| {
            let difference = _mm512_sub_ps(a, b);
            _mm512_add_ps(sum, _mm512_mul_ps(difference, difference))
        })
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
    pub fn dot_avx512(a: &[f32], b: &[f32]) -> f32 {
        sum_avx512(a, b, |sum, a, b| _mm512_add_ps(sum, _mm512_mul_ps(a, b)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
    fn sum_avx512(a: &[f32], b: &[f32], add: impl Fn(__m512, __m512, __m512) -> __m512) -> f32 {
        let mut sums = [_mm512_setzero_ps(); 4];
        let ((a, a_rest), (b, b_rest)) =
            (a.as_chunks::<{ 4 * LANES }>(), b.as_chunks::<{ 4 * LANES }>());
        for (a, b) in a.iter().zip(b) {
            for (j, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a step has four times 16 elements.
                let (a, b) = unsafe {
                    let at = j * LANES;
                    (_mm512_loadu_ps(a.as_ptr().add(at)), _mm512_loadu_ps(b.as_ptr().add(at)))
                };
                *sum = add(*sum, a, b);
            }
        }
        for ((sum, a), b) in sums.iter_mut().zip(a_rest.chunks(LANES)).zip(b_rest.chunks(LANES)) {
            let mask = ((1u32 << a.len().min(b.len())) - 1) as u16;
            // SAFETY: the mask selects elements of the chunks only.
            let (a, b) = unsafe {
                (_mm512_maskz_loadu_ps(mask, a.as_ptr()), _mm512_maskz_loadu_ps(mask, b.as_ptr()))
            };
            *sum = add(*sum, a, b);
        }
        fold_avx512(sums)
    }

    #[target_feature(enable = "avx2")]
    pub fn l2_squared_avx2(a: &[f32], b: &[f32]) -> f32 {
        sum_avx2(a, b, |sum, a, b| {
            let difference = _mm256_sub_ps(a, b);
            _mm256_add_ps(sum, _mm256_mul_ps(difference, difference))
        })
    }

    #[target_feature(enable = "avx2")]
    pub fn dot_avx2(a: &[f32], b: &[f32]) -> f32 {
        sum_avx2(a, b, |sum, a, b| _mm256_add_ps(sum, _mm256_mul_ps(a, b)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn sum_avx2(a: &[f32], b: &[f32], add: impl Fn(__m256, __m256, __m256) -> __m256) -> f32 {
        let mut sums = [_mm256_setzero_ps(); 8];
        let ((a, a_rest), (b, b_rest)) =
            (a.as_chunks::<{ 4 * LANES }>(), b.as_chunks::<{ 4 * LANES }>());
        let mut step = |a: &[f32; 4 * LANES], b: &[f32; 4 * LANES]| {
            for (j, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a step has eight times 8 elements.
                let (a, b) = unsafe {
                    let at = j * 8;
                    (_mm256_loadu_ps(a.as_ptr().add(at)), _mm256_loadu_ps(b.as_ptr().add(at)))
                };
                *sum = add(*sum, a, b);
            }
        };
        for (a, b) in a.iter().zip(b) {
            step(a, b);
        }
        if !a_rest.is_empty() {
            // Zeros add nothing.
            let (mut last_a, mut last_b) = ([0f32; 4 * LANES], [0f32; 4 * LANES]);
            last_a[..a_rest.len()].copy_from_slice(a_rest);
            last_b[..b_rest.len()].copy_from_slice(b_rest);
            step(&last_a, &last_b);
        }
        fold_avx2(sums)
    }
}
