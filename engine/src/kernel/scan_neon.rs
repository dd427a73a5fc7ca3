//! The block scan for aarch64: a table lookup finds 16 rows of a group, and widening additions sum them
//! in 16-bit words, which are widened again before they could overflow.

use std::arch::aarch64::*;

use super::{BLOCK_ROWS, Line, RacyBytes, ScanTerms, Table};

/// Lines (of 4 groups) after which words could overflow.
const WIDEN_AFTER: usize = 256 / 4;

/// # Safety
/// `blocks` must be whole blocks of `bits` planes for this table, the outputs 32 values a block.
#[target_feature(enable = "neon")]
pub unsafe fn scan(
    blocks: RacyBytes<'_>,
    bits: usize,
    table: &Table,
    terms: &ScanTerms,
    estimates: &mut [f32],
    lowers: &mut [f32],
) {
    let slope = vdupq_n_f32(terms.slope);
    let intercept = vdupq_n_f32(terms.intercept);
    let base = vdupq_n_f32(terms.base);
    let spread = vdupq_n_f32(terms.spread);
    let last = vdupq_n_f32(f32::INFINITY);
    // Only not-a-number differs from itself.
    let or_last = |x| vbslq_f32(vceqq_f32(x, x), x, last);
    let plane_bytes = table.lines.len() * 64;
    let mut at = blocks.as_ptr();
    let outputs = estimates.chunks_exact_mut(BLOCK_ROWS).zip(lowers.chunks_exact_mut(BLOCK_ROWS));
    for (estimates, lowers) in outputs {
        // SAFETY: there is one block for each 32 outputs, so all reads of a block lie within `blocks`,
        // and the writes within the two chunks of 32.
        unsafe {
            let mut sums = plane(at, &table.lines);
            at = at.add(plane_bytes);
            if bits == 2 {
                let high = plane(at, &table.lines);
                at = at.add(plane_bytes);
                for (sum, high) in sums.iter_mut().zip(high) {
                    *sum = vaddq_u32(*sum, vshlq_n_u32::<1>(high));
                }
            }
            for (four, sum) in sums.into_iter().enumerate() {
                let factors = |number: usize| {
                    let bytes = at.add((number * BLOCK_ROWS + four * 4) * 4);
                    vreinterpretq_f32_u8(vld1q_u8(bytes))
                };
                let s = vaddq_f32(vmulq_f32(slope, vcvtq_f32_u32(sum)), intercept);
                let estimate = vaddq_f32(vaddq_f32(factors(0), base), vmulq_f32(factors(1), s));
                let lower = vsubq_f32(estimate, vmulq_f32(spread, factors(2)));
                vst1q_f32(estimates.as_mut_ptr().add(four * 4), or_last(estimate));
                vst1q_f32(lowers.as_mut_ptr().add(four * 4), or_last(lower));
            }
            at = at.add(3 * 4 * BLOCK_ROWS);
        }
    }
}

/// Sums of one plane, 4 rows each.
///
/// # Safety
/// `at` must have 64 readable bytes for each line.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn plane(mut at: *const u8, lines: &[Line]) -> [uint32x4_t; 8] {
    let mask = vdupq_n_u8(15);
    let mut sums = [vdupq_n_u32(0); 8];
    for lines in lines.chunks(WIDEN_AFTER) {
        // For the low and the high nibbles: bytes 0 to 7, bytes 8 to 15.
        let mut words = [[vdupq_n_u16(0); 2]; 2];
        for entries in lines.iter().flat_map(|line| &line.0) {
            // SAFETY: by the caller's promise, and a group has 16 entries.
            let (codes, entries) = unsafe {
                let codes = vld1q_u8(at);
                at = at.add(16);
                (codes, vld1q_u8(entries.as_ptr()))
            };
            for (words, codes) in
                words.iter_mut().zip([vandq_u8(codes, mask), vshrq_n_u8::<4>(codes)])
            {
                let found = vqtbl1q_u8(entries, codes);
                words[0] = vaddw_u8(words[0], vget_low_u8(found));
                words[1] = vaddw_high_u8(words[1], found);
            }
        }
        for (sums, [first, second]) in sums.chunks_exact_mut(4).zip(words) {
            // Even bytes are rows 0 to 7, odd ones rows 8 to 15.
            let halves = [vuzp1q_u16(first, second), vuzp2q_u16(first, second)];
            for (sums, half) in sums.chunks_exact_mut(2).zip(halves) {
                sums[0] = vaddw_u16(sums[0], vget_low_u16(half));
                sums[1] = vaddw_high_u16(sums[1], half);
            }
        }
    }
    sums
}
