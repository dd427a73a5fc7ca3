//! The block scan for x86-64.
//!
//! A shuffle looks up 16 rows of a group in each 128-bit lane. Its bytes are summed in 16-bit words: one
//! sum takes them as they are (even bytes + 256 odd bytes), the other only the odd ones, and at the end
//! the first gives the even ones back. After 256 groups, where a word could overflow, the lanes are
//! added up and widened.

use std::arch::x86_64::*;

use super::{BLOCK_ROWS, Line, RacyBytes, ScanTerms, Table};

/// Lines (of 4 groups) after which words could overflow, if all lanes are added up.
const WIDEN_AFTER: usize = 256 / 4;

/// # Safety
/// AVX-512 F and BW; `blocks` must be whole blocks of `bits` planes for this table, the outputs 32 values
/// a block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
pub unsafe fn scan_avx512(
    blocks: RacyBytes<'_>,
    bits: usize,
    table: &Table,
    terms: &ScanTerms,
    estimates: &mut [f32],
    lowers: &mut [f32],
) {
    let slope = _mm512_set1_ps(terms.slope);
    let intercept = _mm512_set1_ps(terms.intercept);
    let base = _mm512_set1_ps(terms.base);
    let spread = _mm512_set1_ps(terms.spread);
    let last = _mm512_set1_ps(f32::INFINITY);
    let plane_bytes = table.lines.len() * 64;
    let mut at = blocks.as_ptr();
    let outputs = estimates.chunks_exact_mut(BLOCK_ROWS).zip(lowers.chunks_exact_mut(BLOCK_ROWS));
    for (estimates, lowers) in outputs {
        // SAFETY: there is one block for each 32 outputs, so all reads of a block lie within `blocks`,
        // and the writes within the two chunks of 32.
        unsafe {
            let mut sums = plane_avx512(at, &table.lines);
            at = at.add(plane_bytes);
            if bits == 2 {
                let high = plane_avx512(at, &table.lines);
                at = at.add(plane_bytes);
                for (sum, high) in sums.iter_mut().zip(high) {
                    *sum = _mm512_add_epi32(*sum, _mm512_slli_epi32::<1>(high));
                }
            }
            for (half, sum) in sums.into_iter().enumerate() {
                let factors = at.cast::<f32>().add(half * 16);
                let a = _mm512_loadu_ps(factors);
                let k = _mm512_loadu_ps(factors.add(BLOCK_ROWS));
                let e = _mm512_loadu_ps(factors.add(2 * BLOCK_ROWS));
                let s = _mm512_add_ps(_mm512_mul_ps(slope, _mm512_cvtepi32_ps(sum)), intercept);
                let estimate = _mm512_add_ps(_mm512_add_ps(a, base), _mm512_mul_ps(k, s));
                let lower = _mm512_sub_ps(estimate, _mm512_mul_ps(spread, e));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(estimate, estimate);
                let lower_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lower, lower);
                let estimate = _mm512_mask_mov_ps(estimate, nan, last);
                let lower = _mm512_mask_mov_ps(lower, lower_nan, last);
                _mm512_storeu_ps(estimates.as_mut_ptr().add(half * 16), estimate);
                _mm512_storeu_ps(lowers.as_mut_ptr().add(half * 16), lower);
            }
            at = at.add(3 * 4 * BLOCK_ROWS);
        }
    }
}

/// Sums of one plane: rows 0 to 15 and 16 to 31, as u32.
///
/// # Safety
/// AVX-512 F and BW; `at` must have 64 readable bytes for each line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
unsafe fn plane_avx512(mut at: *const u8, lines: &[Line]) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    let mut sums = [_mm512_setzero_si512(); 2];
    for lines in lines.chunks(WIDEN_AFTER) {
        let [mut low, mut low_odd, mut high, mut high_odd] = [_mm512_setzero_si512(); 4];
        for line in lines {
            // SAFETY: by the caller's promise, and a line is 64 bytes.
            let (codes, entries) = unsafe {
                let codes = _mm512_loadu_si512(at.cast());
                at = at.add(64);
                (codes, _mm512_load_si512(line.0.as_ptr().cast()))
            };
            let found = _mm512_shuffle_epi8(entries, _mm512_and_si512(codes, mask));
            low = _mm512_add_epi16(low, found);
            low_odd = _mm512_add_epi16(low_odd, _mm512_srli_epi16::<8>(found));
            let codes = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), mask);
            let found = _mm512_shuffle_epi8(entries, codes);
            high = _mm512_add_epi16(high, found);
            high_odd = _mm512_add_epi16(high_odd, _mm512_srli_epi16::<8>(found));
        }
        let low = _mm512_sub_epi16(low, _mm512_slli_epi16::<8>(low_odd));
        let high = _mm512_sub_epi16(high, _mm512_slli_epi16::<8>(high_odd));
        // Adds up the four lanes of each: first 0 + 2 and 1 + 3 of even and odd bytes, then those.
        let low = _mm512_add_epi16(
            _mm512_shuffle_i64x2::<0b01_00_01_00>(low, low_odd),
            _mm512_shuffle_i64x2::<0b11_10_11_10>(low, low_odd),
        );
        let high = _mm512_add_epi16(
            _mm512_shuffle_i64x2::<0b01_00_01_00>(high, high_odd),
            _mm512_shuffle_i64x2::<0b11_10_11_10>(high, high_odd),
        );
        let rows = _mm512_add_epi16(
            _mm512_shuffle_i64x2::<0b10_00_10_00>(low, high),
            _mm512_shuffle_i64x2::<0b11_01_11_01>(low, high),
        );
        let halves = [_mm512_castsi512_si256(rows), _mm512_extracti64x4_epi64::<1>(rows)];
        for (sum, half) in sums.iter_mut().zip(halves) {
            *sum = _mm512_add_epi32(*sum, _mm512_cvtepu16_epi32(half));
        }
    }
    sums
}

/// # Safety
/// AVX2; otherwise as [`scan_avx512`].
#[target_feature(enable = "avx2")]
pub unsafe fn scan_avx2(
    blocks: RacyBytes<'_>,
    bits: usize,
    table: &Table,
    terms: &ScanTerms,
    estimates: &mut [f32],
    lowers: &mut [f32],
) {
    let slope = _mm256_set1_ps(terms.slope);
    let intercept = _mm256_set1_ps(terms.intercept);
    let base = _mm256_set1_ps(terms.base);
    let spread = _mm256_set1_ps(terms.spread);
    let last = _mm256_set1_ps(f32::INFINITY);
    let plane_bytes = table.lines.len() * 64;
    let mut at = blocks.as_ptr();
    let outputs = estimates.chunks_exact_mut(BLOCK_ROWS).zip(lowers.chunks_exact_mut(BLOCK_ROWS));
    for (estimates, lowers) in outputs {
        // SAFETY: there is one block for each 32 outputs, so all reads of a block lie within `blocks`,
        // and the writes within the two chunks of 32.
        unsafe {
            let mut sums = plane_avx2(at, &table.lines);
            at = at.add(plane_bytes);
            if bits == 2 {
                let high = plane_avx2(at, &table.lines);
                at = at.add(plane_bytes);
                for (sum, high) in sums.iter_mut().zip(high) {
                    *sum = _mm256_add_epi32(*sum, _mm256_slli_epi32::<1>(high));
                }
            }
            for (eight, sum) in sums.into_iter().enumerate() {
                let factors = at.cast::<f32>().add(eight * 8);
                let a = _mm256_loadu_ps(factors);
                let k = _mm256_loadu_ps(factors.add(BLOCK_ROWS));
                let e = _mm256_loadu_ps(factors.add(2 * BLOCK_ROWS));
                let s = _mm256_add_ps(_mm256_mul_ps(slope, _mm256_cvtepi32_ps(sum)), intercept);
                let estimate = _mm256_add_ps(_mm256_add_ps(a, base), _mm256_mul_ps(k, s));
                let lower = _mm256_sub_ps(estimate, _mm256_mul_ps(spread, e));
                let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(estimate, estimate);
                let lower_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(lower, lower);
                let estimate = _mm256_blendv_ps(estimate, last, nan);
                let lower = _mm256_blendv_ps(lower, last, lower_nan);
                _mm256_storeu_ps(estimates.as_mut_ptr().add(eight * 8), estimate);
                _mm256_storeu_ps(lowers.as_mut_ptr().add(eight * 8), lower);
            }
            at = at.add(3 * 4 * BLOCK_ROWS);
        }
    }
}

/// Sums of one plane, 8 rows each, as u32.
///
/// # Safety
/// AVX2; `at` must have 64 readable bytes for each line.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn plane_avx2(mut at: *const u8, lines: &[Line]) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(15);
    let mut sums = [_mm256_setzero_si256(); 4];
    for lines in lines.chunks(WIDEN_AFTER) {
        let [mut low, mut low_odd, mut high, mut high_odd] = [_mm256_setzero_si256(); 4];
        for line in lines {
            for half in 0..2 {
                // SAFETY: by the caller's promise, and a line is 64 bytes.
                let (codes, entries) = unsafe {
                    let codes = _mm256_loadu_si256(at.cast());
                    at = at.add(32);
                    (codes, _mm256_load_si256(line.0.as_ptr().cast::<__m256i>().add(half)))
                };
                let found = _mm256_shuffle_epi8(entries, _mm256_and_si256(codes, mask));
                low = _mm256_add_epi16(low, found);
                low_odd = _mm256_add_epi16(low_odd, _mm256_srli_epi16::<8>(found));
                let codes = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
                let found = _mm256_shuffle_epi8(entries, codes);
                high = _mm256_add_epi16(high, found);
                high_odd = _mm256_add_epi16(high_odd, _mm256_srli_epi16::<8>(found));
            }
        }
        let low = _mm256_sub_epi16(low, _mm256_slli_epi16::<8>(low_odd));
        let high = _mm256_sub_epi16(high, _mm256_slli_epi16::<8>(high_odd));
        for (i, (even, odd)) in [(low, low_odd), (high, high_odd)].into_iter().enumerate() {
            let rows = _mm256_add_epi16(
                _mm256_permute2x128_si256::<0x20>(even, odd),
                _mm256_permute2x128_si256::<0x31>(even, odd),
            );
            let eights = [_mm256_castsi256_si128(rows), _mm256_extracti128_si256::<1>(rows)];
            for (sum, eight) in sums[2 * i..].iter_mut().zip(eights) {
                *sum = _mm256_add_epi32(*sum, _mm256_cvtepu16_epi32(eight));
            }
        }
    }
    sums
}
