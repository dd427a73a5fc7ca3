//! Sums over 8-bit codes and an f32 vector. The lane structure is that of `distance`.

use super::{LANES, Level, RacyBytes, distance::fold};

#[cfg(target_arch = "x86_64")]
#[path = "codes_x86.rs"]
pub(super) mod x86;

/// Codes of a step: one for each lane of each accumulator.
const STEP: usize = LANES * 4;

/// Inner product of i8 codes and `q`, and the sum of the codes' squares (exact up to 16,000 dimensions,
/// then rounded once to f32). Panics if the lengths differ.
#[inline]
pub fn dot_i8_f32(codes: RacyBytes<'_>, q: &[f32]) -> (f32, f32) {
    dot_i8_f32_at(Level::current(), codes, q)
}

/// [`dot_i8_f32`] at a given level (or the CPU's best, if that is lower).
pub fn dot_i8_f32_at(level: Level, codes: RacyBytes<'_>, q: &[f32]) -> (f32, f32) {
    assert_eq!(codes.len(), q.len(), "codes and query of different dimensions");
    #[cfg(target_arch = "x86_64")]
    match level.min(Level::best()) {
        // SAFETY: `best` found the level's features on this CPU; the lengths are equal.
        Level::Avx512 => return unsafe { x86::dot_avx512(codes, q) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { x86::dot_avx2(codes, q) },
        Level::Scalar => {}
    }
    let _ = level;
    let mut sums = [[0f32; LANES]; 4];
    let mut squares = [0i32; LANES];
    for_each_step(codes, q, |codes, q| {
        for (j, sum) in sums.iter_mut().enumerate() {
            for (i, lane) in sum.iter_mut().enumerate() {
                let code = i32::from(codes[j * LANES + i]);
                *lane += code as f32 * q[j * LANES + i];
                squares[i] += code * code;
            }
        }
    });
    (fold(sums), squares.iter().sum::<i32>() as f32)
}

/// Squared Euclidean distance of `scale * codes` and `q`. Panics if the lengths differ.
#[inline]
pub fn l2_squared_i8_f32(codes: RacyBytes<'_>, scale: f32, q: &[f32]) -> f32 {
    l2_squared_i8_f32_at(Level::current(), codes, scale, q)
}

/// [`l2_squared_i8_f32`] at a given level (or the CPU's best, if that is lower).
pub fn l2_squared_i8_f32_at(level: Level, codes: RacyBytes<'_>, scale: f32, q: &[f32]) -> f32 {
    assert_eq!(codes.len(), q.len(), "codes and query of different dimensions");
    #[cfg(target_arch = "x86_64")]
    match level.min(Level::best()) {
        // SAFETY: `best` found the level's features on this CPU; the lengths are equal.
        Level::Avx512 => return unsafe { x86::l2_squared_avx512(codes, scale, q) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { x86::l2_squared_avx2(codes, scale, q) },
        Level::Scalar => {}
    }
    let _ = level;
    let mut sums = [[0f32; LANES]; 4];
    for_each_step(codes, q, |codes, q| {
        for (j, sum) in sums.iter_mut().enumerate() {
            for (i, lane) in sum.iter_mut().enumerate() {
                let difference = f32::from(codes[j * LANES + i]) * scale - q[j * LANES + i];
                *lane += difference * difference;
            }
        }
    });
    fold(sums)
}

/// Copies codes out of memory that may change and hands them over a step at a time, the last ones padded
/// by zeros (which add nothing).
#[inline(always)]
fn for_each_step(codes: RacyBytes<'_>, q: &[f32], mut add: impl FnMut(&[i8; STEP], &[f32; STEP])) {
    let mut bytes = [0u8; STEP];
    let mut steps = q.chunks_exact(STEP);
    let mut offset = 0;
    for q in &mut steps {
        codes.copy_to(offset, &mut bytes);
        offset += STEP;
        let q = q.try_into().expect("a chunk has its length");
        add(&bytes.map(|b| b as i8), q);
    }
    let rest = steps.remainder();
    if !rest.is_empty() {
        let mut padded = [0f32; STEP];
        padded[..rest.len()].copy_from_slice(rest);
        bytes = [0; STEP];
        codes.copy_to(offset, &mut bytes[..rest.len()]);
        add(&bytes.map(|b| b as i8), &padded);
    }
}
