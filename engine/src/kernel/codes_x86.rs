//! Sums over 8-bit codes for x86-64, 16 lanes wide in 4 accumulators.

use std::arch::x86_64::*;

use super::{LANES, RacyBytes};

/// # Safety
/// AVX-512 F and BW, and equal lengths.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
pub unsafe fn dot_avx512(codes: RacyBytes<'_>, q: &[f32]) -> (f32, f32) {
    let mut sums = [_mm512_setzero_ps(); 4];
    let mut squares = _mm512_setzero_si512();
    // SAFETY: the lengths are equal by the caller's promise.
    unsafe {
        for_each_16_avx512(codes, q, |j, codes, q| {
            let wide = _mm256_cvtepi8_epi16(codes);
            let square = _mm256_madd_epi16(wide, wide);
            squares = _mm512_add_epi32(squares, _mm512_zextsi256_si512(square));
            let codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
            sums[j] = _mm512_add_ps(sums[j], _mm512_mul_ps(codes, q));
        });
    }
    (fold_avx512(sums), _mm512_reduce_add_epi32(squares) as f32)
}

/// # Safety
/// AVX-512 F and BW, and equal lengths.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
pub unsafe fn l2_squared_avx512(codes: RacyBytes<'_>, scale: f32, q: &[f32]) -> f32 {
    let mut sums = [_mm512_setzero_ps(); 4];
    let scale = _mm512_set1_ps(scale);
    // SAFETY: the lengths are equal by the caller's promise.
    unsafe {
        for_each_16_avx512(codes, q, |j, codes, q| {
            let codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
            let difference = _mm512_sub_ps(_mm512_mul_ps(codes, scale), q);
            sums[j] = _mm512_add_ps(sums[j], _mm512_mul_ps(difference, difference));
        });
    }
    fold_avx512(sums)
}

/// Hands over 16 codes and elements at a time, with the number of their accumulator; the last ones
/// padded by zeros.
///
/// # Safety
/// AVX-512 F and BW, and equal lengths.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
unsafe fn for_each_16_avx512(
    codes: RacyBytes<'_>,
    q: &[f32],
    mut add: impl FnMut(usize, __m128i, __m512),
) {
    let (mut at, mut q_at) = (codes.as_ptr(), q.as_ptr());
    let mut rest = q.len();
    // SAFETY: `rest` elements remain at both pointers.
    unsafe {
        while rest >= 4 * LANES {
            for j in 0..4 {
                let codes = _mm_loadu_si128(at.add(j * LANES).cast());
                add(j, codes, _mm512_loadu_ps(q_at.add(j * LANES)));
            }
            at = at.add(4 * LANES);
            q_at = q_at.add(4 * LANES);
            rest -= 4 * LANES;
        }
        for j in 0..4 {
            if rest == 0 {
                break;
            }
            let count = rest.min(LANES);
            let mask = ((1u32 << count) - 1) as u16;
            let codes = _mm_maskz_loadu_epi8(mask, at.cast());
            add(j, codes, _mm512_maskz_loadu_ps(mask, q_at));
            at = at.add(count);
            q_at = q_at.add(count);
            rest -= count;
        }
    }
}

/// Folds the accumulators, then the lanes, pairwise.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
pub(in super::super) fn fold_avx512(sums: [__m512; 4]) -> f32 {
    let [a, b, c, d] = sums;
    let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    fold_lanes(_mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum)))
}

/// Folds 8 lanes pairwise.
#[inline]
#[target_feature(enable = "avx2")]
fn fold_lanes(sum: __m256) -> f32 {
    let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
    let sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)))
}

/// # Safety
/// AVX2, and equal lengths.
#[target_feature(enable = "avx2")]
pub unsafe fn dot_avx2(codes: RacyBytes<'_>, q: &[f32]) -> (f32, f32) {
    let mut sums = [_mm256_setzero_ps(); 8];
    let mut squares = _mm256_setzero_si256();
    // SAFETY: the lengths are equal by the caller's promise.
    unsafe {
        for_each_16_avx2(codes, q, |j, codes, q| {
            let wide = _mm256_cvtepi8_epi16(codes);
            squares = _mm256_add_epi32(squares, _mm256_madd_epi16(wide, wide));
            for (sum, (codes, q)) in sums[2 * j..].iter_mut().zip(floats(codes).into_iter().zip(q))
            {
                *sum = _mm256_add_ps(*sum, _mm256_mul_ps(codes, q));
            }
        });
    }
    let mut lanes = [0i32; 8];
    // SAFETY: eight lanes of 4 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), squares) };
    (fold_avx2(sums), lanes.iter().sum::<i32>() as f32)
}

/// # Safety
/// AVX2, and equal lengths.
#[target_feature(enable = "avx2")]
pub unsafe fn l2_squared_avx2(codes: RacyBytes<'_>, scale: f32, q: &[f32]) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 8];
    let scale = _mm256_set1_ps(scale);
    // SAFETY: the lengths are equal by the caller's promise.
    unsafe {
        for_each_16_avx2(codes, q, |j, codes, q| {
            for (sum, (codes, q)) in sums[2 * j..].iter_mut().zip(floats(codes).into_iter().zip(q))
            {
                let difference = _mm256_sub_ps(_mm256_mul_ps(codes, scale), q);
                *sum = _mm256_add_ps(*sum, _mm256_mul_ps(difference, difference));
            }
        });
    }
    fold_avx2(sums)
}

#[inline]
#[target_feature(enable = "avx2")]
fn floats(codes: __m128i) -> [__m256; 2] {
    let high = _mm_unpackhi_epi64(codes, codes);
    [codes, high].map(|eight| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)))
}

/// As [`for_each_16_avx512`], with the elements in two halves.
///
/// # Safety
/// AVX2, and equal lengths.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn for_each_16_avx2(
    codes: RacyBytes<'_>,
    q: &[f32],
    mut add: impl FnMut(usize, __m128i, [__m256; 2]),
) {
    let (mut at, mut q_at) = (codes.as_ptr(), q.as_ptr());
    let mut rest = q.len();
    // SAFETY: `rest` elements remain at both pointers; the last ones are copied to padded arrays.
    unsafe {
        while rest >= 4 * LANES {
            for j in 0..4 {
                let codes = _mm_loadu_si128(at.add(j * LANES).cast());
                let q = q_at.add(j * LANES);
                add(j, codes, [_mm256_loadu_ps(q), _mm256_loadu_ps(q.add(8))]);
            }
            at = at.add(4 * LANES);
            q_at = q_at.add(4 * LANES);
            rest -= 4 * LANES;
        }
        for j in 0..4 {
            if rest == 0 {
                break;
            }
            let count = rest.min(LANES);
            let (mut last_codes, mut last) = ([0u8; LANES], [0f32; LANES]);
            std::ptr::copy_nonoverlapping(at, last_codes.as_mut_ptr(), count);
            std::ptr::copy_nonoverlapping(q_at, last.as_mut_ptr(), count);
            let codes = _mm_loadu_si128(last_codes.as_ptr().cast());
            let last = last.as_ptr();
            add(j, codes, [_mm256_loadu_ps(last), _mm256_loadu_ps(last.add(8))]);
            at = at.add(count);
            q_at = q_at.add(count);
            rest -= count;
        }
    }
}

/// Folds the accumulators (of two registers each), then the lanes, pairwise.
#[inline]
#[target_feature(enable = "avx2")]
pub(in super::super) fn fold_avx2(sums: [__m256; 8]) -> f32 {
    let [a0, a1, b0, b1, c0, c1, d0, d1] = sums;
    let low = _mm256_add_ps(_mm256_add_ps(a0, b0), _mm256_add_ps(c0, d0));
    let high = _mm256_add_ps(_mm256_add_ps(a1, b1), _mm256_add_ps(c1, d1));
    fold_lanes(_mm256_add_ps(low, high))
}
