//! Conversions between half and single precision.

use half::f16;
#[cfg(target_arch = "aarch64")]
use half::slice::HalfFloatSliceExt;

use super::Level;

/// Widens half precision to single precision; exact. Panics if the lengths differ.
pub fn f16_to_f32(from: &[f16], to: &mut [f32]) {
    f16_to_f32_at(Level::current(), from, to);
}

/// [`f16_to_f32`] at a given level (or the CPU's best, if that is lower).
pub fn f16_to_f32_at(level: Level, from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "vectors of different dimensions");
    let done = vectorised(level, from, to, |level, from, to| {
        #[cfg(target_arch = "x86_64")]
        match level {
            // SAFETY: the level was checked against the CPU.
            Level::Avx512 => unsafe { x86::widen_avx512(from, to) },
            // SAFETY: as above.
            Level::Avx2 => unsafe { x86::widen_avx2(from, to) },
            Level::Scalar => {}
        }
        #[cfg(target_arch = "aarch64")]
        from.as_flattened().convert_to_f32_slice(to.as_flattened_mut());
        let _ = (level, from, to);
    });
    for (to, from) in to[done..].iter_mut().zip(&from[done..]) {
        *to = from.to_f32_const();
    }
}

/// Rounds single precision to the nearest half (ties to even; what is too large becomes infinity).
/// Panics if the lengths differ.
pub fn f32_to_f16(from: &[f32], to: &mut [f16]) {
    f32_to_f16_at(Level::current(), from, to);
}

/// [`f32_to_f16`] at a given level (or the CPU's best, if that is lower).
pub fn f32_to_f16_at(level: Level, from: &[f32], to: &mut [f16]) {
    assert_eq!(from.len(), to.len(), "vectors of different dimensions");
    let done = vectorised(level, from, to, |level, from, to| {
        #[cfg(target_arch = "x86_64")]
        match level {
            // SAFETY: the level was checked against the CPU.
            Level::Avx512 => unsafe { x86::narrow_avx512(from, to) },
            // SAFETY: as above.
            Level::Avx2 => unsafe { x86::narrow_avx2(from, to) },
            Level::Scalar => {}
        }
        #[cfg(target_arch = "aarch64")]
        to.as_flattened_mut().convert_from_f32_slice(from.as_flattened());
        let _ = (level, from, to);
    });
    for (to, from) in to[done..].iter_mut().zip(&from[done..]) {
        *to = f16::from_f32_const(*from);
    }
}

const STEP: usize = 16;

/// Converts whole steps of 16 elements, if the level has instructions for it; gives the number of
/// elements done.
#[inline(always)]
fn vectorised<A, B>(
    level: Level,
    from: &[A],
    to: &mut [B],
    convert: impl FnOnce(Level, &[[A; STEP]], &mut [[B; STEP]]),
) -> usize {
    let level = level.min(Level::best());
    if level == Level::Scalar {
        return 0;
    }
    let (from, _) = from.as_chunks();
    let (to, _) = to.as_chunks_mut();
    convert(level, from, to);
    from.len() * STEP
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::f16;

    use super::STEP;

    #[target_feature(enable = "avx512f")]
    pub fn widen_avx512(from: &[[f16; STEP]], to: &mut [[f32; STEP]]) {
        for (from, to) in from.iter().zip(to) {
            // SAFETY: 16 elements of 2 bytes are read, 16 of 4 bytes written.
            unsafe {
                let halves = _mm256_loadu_si256(from.as_ptr().cast());
                _mm512_storeu_ps(to.as_mut_ptr(), _mm512_cvtph_ps(halves));
            }
        }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub fn widen_avx2(from: &[[f16; STEP]], to: &mut [[f32; STEP]]) {
        for (from, to) in from.iter().zip(to) {
            for half in 0..2 {
                // SAFETY: in two halves, 16 elements of 2 bytes are read, 16 of 4 bytes written.
                unsafe {
                    let halves = _mm_loadu_si128(from.as_ptr().cast::<__m128i>().add(half));
                    _mm256_storeu_ps(to.as_mut_ptr().add(8 * half), _mm256_cvtph_ps(halves));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    pub fn narrow_avx512(from: &[[f32; STEP]], to: &mut [[f16; STEP]]) {
        for (from, to) in from.iter().zip(to) {
            // SAFETY: 16 elements of 4 bytes are read, 16 of 2 bytes written.
            unsafe {
                let singles = _mm512_loadu_ps(from.as_ptr());
                let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(singles);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
            }
        }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub fn narrow_avx2(from: &[[f32; STEP]], to: &mut [[f16; STEP]]) {
        for (from, to) in from.iter().zip(to) {
            for half in 0..2 {
                // SAFETY: in two halves, 16 elements of 4 bytes are read, 16 of 2 bytes written.
                unsafe {
                    let singles = _mm256_loadu_ps(from.as_ptr().add(8 * half));
                    let halves = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(singles);
                    _mm_storeu_si128(to.as_mut_ptr().cast::<__m128i>().add(half), halves);
                }
            }
        }
    }
}
