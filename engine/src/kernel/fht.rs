//! The fast Walsh-Hadamard transform, without normalisation: the result is longer by sqrt(len).
//!
//! The first four stages stay within 16 elements and are done in registers; the others are loops over
//! whole registers, two stages at a time. All copies do the same additions.

/// Elements that the first four stages combine.
const BASE: usize = 16;

/// Transforms `x` in place, 16 elements at a time by `base`. The length must be a power of two, at least
/// 16.
#[inline(always)]
pub(super) fn fht(x: &mut [f32], base: impl Fn(&mut [f32; BASE])) {
    debug_assert!(x.len().is_power_of_two() && x.len() >= BASE);
    for chunk in x.as_chunks_mut::<BASE>().0 {
        base(chunk);
    }
    let mut half = BASE;
    while half * 4 <= x.len() {
        for four in x.chunks_exact_mut(half * 4) {
            two_stages(four);
        }
        half *= 4;
    }
    if half < x.len() {
        let (low, high) = x.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            (*low, *high) = (*low + *high, *low - *high);
        }
    }
}

/// Two stages over four quarters.
#[inline(always)]
fn two_stages(x: &mut [f32]) {
    let quarter = x.len() / 4;
    let (low, high) = x.split_at_mut(2 * quarter);
    let (a, b) = low.split_at_mut(quarter);
    let (c, d) = high.split_at_mut(quarter);
    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
        let (first, second) = (*a + *b, *a - *b);
        let (third, fourth) = (*c + *d, *c - *d);
        (*a, *c) = (first + third, first - third);
        (*b, *d) = (second + fourth, second - fourth);
    }
}

/// The first four stages, in any instruction set.
#[inline(always)]
pub(super) fn base_scalar(x: &mut [f32; BASE]) {
    let mut half = 1;
    while half < BASE {
        for pair in x.chunks_exact_mut(half * 2) {
            let (low, high) = pair.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                (*low, *high) = (*low + *high, *low - *high);
            }
        }
        half *= 2;
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use super::BASE;

    /// A stage adds to each element its partner, or, where the element is the second of the pair,
    /// subtracts it from its partner.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn base_avx512(x: &mut [f32; BASE]) {
        let stage =
            |x, partner, second| _mm512_mask_sub_ps(_mm512_add_ps(partner, x), second, partner, x);
        // SAFETY: 16 elements of 4 bytes.
        let x0 = unsafe { _mm512_loadu_ps(x.as_ptr()) };
        let x1 = stage(x0, _mm512_permute_ps::<0b10_11_00_01>(x0), 0xaaaa);
        let x2 = stage(x1, _mm512_permute_ps::<0b01_00_11_10>(x1), 0xcccc);
        let x3 = stage(x2, _mm512_shuffle_f32x4::<0b10_11_00_01>(x2, x2), 0xf0f0);
        let x4 = stage(x3, _mm512_shuffle_f32x4::<0b01_00_11_10>(x3, x3), 0xff00);
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(x.as_mut_ptr(), x4) };
    }

    /// As [`base_avx512`], in two halves; subtracting is adding the negated element.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn base_avx2(x: &mut [f32; BASE]) {
        let stage = |x, partner, second| _mm256_add_ps(partner, _mm256_xor_ps(x, second));
        let three_stages = |x0| {
            let second = _mm256_setr_ps(0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -0.0);
            let x1 = stage(x0, _mm256_permute_ps::<0b10_11_00_01>(x0), second);
            let second = _mm256_setr_ps(0.0, 0.0, -0.0, -0.0, 0.0, 0.0, -0.0, -0.0);
            let x2 = stage(x1, _mm256_permute_ps::<0b01_00_11_10>(x1), second);
            let second = _mm256_setr_ps(0.0, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0, -0.0);
            stage(x2, _mm256_permute2f128_ps::<0x01>(x2, x2), second)
        };
        let at = x.as_mut_ptr();
        // SAFETY: twice 8 elements of 4 bytes.
        unsafe {
            let low = three_stages(_mm256_loadu_ps(at));
            let high = three_stages(_mm256_loadu_ps(at.add(8)));
            _mm256_storeu_ps(at, _mm256_add_ps(low, high));
            _mm256_storeu_ps(at.add(8), _mm256_sub_ps(low, high));
        }
    }
}
