//! The inner loops of the encoders. All sums are in f64, in 16 lanes.

use super::{LANES, level::per_level};

/// Largest 8-bit code; the least is its negative.
const LARGEST_CODE: f32 = 127.0;

#[inline(always)]
fn total(lanes: [f64; LANES]) -> f64 {
    lanes.iter().sum()
}

#[inline(always)]
fn quantize_body(x: &[f32], per_unit: f32, codes: &mut [u8]) {
    assert_eq!(x.len(), codes.len(), "codes of another dimension");
    for (x, code) in x.iter().zip(codes) {
        // Zero times infinity is not-a-number.
        let units = (x * per_unit).clamp(-LARGEST_CODE, LARGEST_CODE);
        let units = if units.is_nan() { 0.0 } else { units.round_ties_even() };
        // SAFETY: from -127 to 127.
        *code = unsafe { units.to_int_unchecked::<i32>() } as u8;
    }
}

#[inline(always)]
fn fit_body(x: &[f32], codes: &[u8]) -> (f64, f64) {
    assert_eq!(x.len(), codes.len(), "codes of another dimension");
    let (mut product, mut squares) = ([0f64; LANES], [0f64; LANES]);
    let ((x, x_rest), (codes, codes_rest)) = (x.as_chunks::<LANES>(), codes.as_chunks::<LANES>());
    let mut add = |lane: usize, x: f32, code: u8| {
        let code = f64::from(code as i8);
        product[lane] += f64::from(x) * code;
        squares[lane] += code * code;
    };
    for (x, codes) in x.iter().zip(codes) {
        for i in 0..LANES {
            add(i, x[i], codes[i]);
        }
    }
    for (i, (&x, &code)) in x_rest.iter().zip(codes_rest).enumerate() {
        add(i, x, code);
    }
    (total(product), total(squares))
}

#[inline(always)]
fn error_body(x: &[f32], codes: &[u8], scale: f32) -> f64 {
    assert_eq!(x.len(), codes.len(), "codes of another dimension");
    let scale = f64::from(scale);
    let mut sums = [0f64; LANES];
    let ((x, x_rest), (codes, codes_rest)) = (x.as_chunks::<LANES>(), codes.as_chunks::<LANES>());
    let mut add = |lane: usize, x: f32, code: u8| {
        let difference = f64::from(x) - scale * f64::from(code as i8);
        sums[lane] += difference * difference;
    };
    for (x, codes) in x.iter().zip(codes) {
        for i in 0..LANES {
            add(i, x[i], codes[i]);
        }
    }
    for (i, (&x, &code)) in x_rest.iter().zip(codes_rest).enumerate() {
        add(i, x, code);
    }
    total(sums)
}

#[inline(always)]
fn sum_f64_body(x: &[f32]) -> f64 {
    let mut sums = [0f64; LANES];
    let (x, rest) = x.as_chunks::<LANES>();
    for x in x {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += f64::from(*x);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*x);
    }
    total(sums)
}

#[inline(always)]
fn norm_of_sum_body(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of different dimensions");
    let mut sums = [0f64; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut add = |lane: usize, a: f32, b: f32| {
        let sum = f64::from(a) + f64::from(b);
        sums[lane] += sum * sum;
    };
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            add(i, a[i], b[i]);
        }
    }
    for (i, (&a, &b)) in a_rest.iter().zip(b_rest).enumerate() {
        add(i, a, b);
    }
    total(sums).sqrt()
}

#[inline(always)]
fn largest_body(x: &[f32]) -> f32 {
    let mut largest = [0f32; LANES];
    let (x, rest) = x.as_chunks::<LANES>();
    let larger =
        |largest: &mut f32, x: f32| *largest = if x.abs() > *largest { x.abs() } else { *largest };
    for x in x {
        for i in 0..LANES {
            larger(&mut largest[i], x[i]);
        }
    }
    for (largest, x) in largest.iter_mut().zip(rest) {
        larger(largest, *x);
    }
    largest.into_iter().fold(0.0, f32::max)
}

#[inline(always)]
fn scale_and_subtract_body(v: &[f32], factor: f64, offset: &[f32], out: &mut [f32]) {
    assert!(v.len() == offset.len() && v.len() == out.len(), "vectors of different dimensions");
    for ((x, v), offset) in out.iter_mut().zip(v).zip(offset) {
        *x = (f64::from(*v) * factor) as f32 - offset;
    }
}

/// Sums over a residual o and its code.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidualSums {
    /// |o|^2.
    pub square: f64,
    /// <code, o>.
    pub own: f64,
    /// <code, c>.
    pub centre: f64,
    /// Elements coded by the larger magnitude.
    pub large: usize,
}

#[inline(always)]
fn encode_residual_body(
    residual: &[f32],
    centroid: &[f32],
    threshold: f32,
    low_plane: &mut [u8],
    high_plane: &mut [u8],
) -> ResidualSums {
    assert!(
        residual.len() == centroid.len()
            && residual.len() == low_plane.len() * 8
            && (high_plane.is_empty() || high_plane.len() == low_plane.len()),
        "vectors of different dimensions"
    );
    let (mut square, mut own, mut centre) = ([0f64; LANES], [0f64; LANES], [0f64; LANES]);
    let mut large = 0;
    let (residual, _) = residual.as_chunks::<LANES>();
    let (centroid, _) = centroid.as_chunks::<LANES>();
    for (step, (o, c)) in residual.iter().zip(centroid).enumerate() {
        let (mut negative, mut big) = (0u16, 0u16);
        for i in 0..LANES {
            let magnitude = if o[i].abs() >= threshold { 1.5f32 } else { 0.5 };
            let code = f64::from(if o[i] < 0.0 { -magnitude } else { magnitude });
            let o = f64::from(o[i]);
            square[i] += o * o;
            own[i] += o * code;
            centre[i] += f64::from(c[i]) * code;
        }
        for (i, o) in o.iter().enumerate() {
            negative |= u16::from(*o < 0.0) << i;
            big |= u16::from(o.abs() >= threshold) << i;
        }
        large += big.count_ones() as usize;
        let at = step * 2..step * 2 + 2;
        if high_plane.is_empty() {
            low_plane[at].copy_from_slice(&(!negative).to_le_bytes());
        } else {
            // Codes -3/2, -1/2, 1/2, 3/2 are 0, 1, 2, 3.
            low_plane[at.clone()].copy_from_slice(&(negative ^ big).to_le_bytes());
            high_plane[at].copy_from_slice(&(!negative).to_le_bytes());
        }
    }
    ResidualSums { square: total(square), own: total(own), centre: total(centre), large }
}

per_level! {
    /// Rounds x * per_unit to codes from -127 to 127. Panics if the lengths differ.
    quantize_i8, quantize_i8_at(x: &[f32], per_unit: f32, codes: &mut [u8]), quantize_body
}

per_level! {
    /// Inner product of `x` and i8 codes, and the sum of the codes' squares. Panics if the lengths
    /// differ.
    fit_i8, fit_i8_at(x: &[f32], codes: &[u8]) -> (f64, f64), fit_body
}

per_level! {
    /// Squared Euclidean distance of `x` and scale * codes, to 1e-12. Panics if the lengths differ.
    squared_error_i8, squared_error_i8_at(x: &[f32], codes: &[u8], scale: f32) -> f64, error_body
}

per_level! {
    /// Sum of the elements.
    sum_f64, sum_f64_at(x: &[f32]) -> f64, sum_f64_body
}

per_level! {
    /// Euclidean norm of a + b. Panics if the lengths differ.
    norm_of_sum, norm_of_sum_at(a: &[f32], b: &[f32]) -> f64, norm_of_sum_body
}

per_level! {
    /// The largest magnitude of an element.
    largest_magnitude, largest_magnitude_at(x: &[f32]) -> f32, largest_body
}

per_level! {
    /// v * factor (rounded once to f32) - offset. Panics if the lengths differ.
    scale_and_subtract, scale_and_subtract_at(v: &[f32], factor: f64, offset: &[f32], out: &mut [f32]), scale_and_subtract_body
}

per_level! {
    /// Codes a residual: each element by its sign and a magnitude, 3/2 from `threshold` on, else 1/2.
    /// The planes have a bit an element; without a high plane only the sign is kept (and `threshold` is
    /// to be infinite). Panics if the lengths do not fit or are not a multiple of 16.
    encode_residual, encode_residual_at(
        residual: &[f32], centroid: &[f32], threshold: f32, low_plane: &mut [u8], high_plane: &mut [u8]
    ) -> ResidualSums, encode_residual_body
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Level,
            tests::{Random, dimensions},
        },
        *,
    };

    fn near(found: f64, expected: f64, size: f64) -> bool {
        (found - expected).abs() <= 1e-12 * size
    }

    #[test]
    fn codes_are_the_nearest_at_every_level() {
        let mut random = Random(11);
        for dim in dimensions() {
            let mut x = random.floats(dim);
            x[0] = 5.0;
            x[dim / 2] = -0.0;
            let code = |level, per_unit| {
                let mut codes = vec![1; dim];
                quantize_i8_at(level, &x, per_unit, &mut codes);
                codes
            };
            let codes = code(Level::Scalar, 100.0);
            for (x, code) in x.iter().zip(&codes) {
                let expected = (x * 100.0).round_ties_even().clamp(-127.0, 127.0);
                assert_eq!(f32::from(*code as i8), expected, "{dim} {x}");
            }
            for level in Level::available() {
                assert_eq!(code(level, 100.0), codes, "{level:?} {dim}");
                assert_eq!(code(level, f32::INFINITY), code(Level::Scalar, f32::INFINITY));
                assert_eq!(code(level, f32::INFINITY)[dim / 2], 0);
            }
        }
    }

    #[test]
    fn sums_agree_at_every_level() {
        let mut random = Random(12);
        for dim in dimensions() {
            let (x, other, codes) = (random.floats(dim), random.floats(dim), random.bytes(dim));
            let pairs = || x.iter().zip(&codes).map(|(x, c)| (f64::from(*x), f64::from(*c as i8)));
            let product: f64 = pairs().map(|(x, c)| x * c).sum();
            let squares: f64 = pairs().map(|(_, c)| c * c).sum();
            let error: f64 = pairs().map(|(x, c)| (x - f64::from(0.01f32) * c).powi(2)).sum();
            let sum: f64 = x.iter().map(|x| f64::from(*x)).sum();
            let both = x.iter().zip(&other).map(|(x, o)| (f64::from(*x) + f64::from(*o)).powi(2));
            let norm = both.sum::<f64>().sqrt();
            let largest = x.iter().map(|x| x.abs()).max_by(f32::total_cmp).unwrap();
            for level in Level::available() {
                let fit = fit_i8_at(level, &x, &codes);
                assert!(near(fit.0, product, 128.0 * dim as f64) && near(fit.1, squares, squares));
                assert_eq!(fit, fit_i8_at(Level::Scalar, &x, &codes), "{level:?} {dim}");
                let found = squared_error_i8_at(level, &x, &codes, 0.01);
                assert!(near(found, error, error), "{level:?} {dim}");
                assert_eq!(found, squared_error_i8_at(Level::Scalar, &x, &codes, 0.01));
                assert!(near(sum_f64_at(level, &x), sum, dim as f64), "{level:?} {dim}");
                assert_eq!(sum_f64_at(level, &x), sum_f64_at(Level::Scalar, &x));
                assert!(near(norm_of_sum_at(level, &x, &other), norm, norm), "{level:?} {dim}");
                assert_eq!(
                    norm_of_sum_at(level, &x, &other),
                    norm_of_sum_at(Level::Scalar, &x, &other)
                );
                assert_eq!(largest_magnitude_at(level, &x), largest, "{level:?} {dim}");
                let mut scaled = vec![0.0; dim];
                scale_and_subtract_at(level, &x, 0.3, &other, &mut scaled);
                for ((found, x), other) in scaled.iter().zip(&x).zip(&other) {
                    assert_eq!(*found, (f64::from(*x) * 0.3) as f32 - other, "{level:?} {dim}");
                }
            }
        }
    }

    #[test]
    fn residuals_are_coded_alike_at_every_level() {
        let mut random = Random(13);
        for dim in dimensions().filter(|dim| dim % 16 == 0) {
            let (mut residual, centroid) = (random.floats(dim), random.floats(dim));
            residual[0] = 0.0;
            for (threshold, planes) in [(f32::INFINITY, 1), (0.6, 2)] {
                let encode = |level| {
                    let (mut low, mut high) =
                        (vec![0; dim / 8], vec![0; if planes == 2 { dim / 8 } else { 0 }]);
                    let sums = encode_residual_at(
                        level, &residual, &centroid, threshold, &mut low, &mut high,
                    );
                    (sums, low, high)
                };
                let (sums, low, high) = encode(Level::Scalar);
                let bit = |plane: &[u8], i: usize| plane[i / 8] >> (i % 8) & 1;
                let mut expected = ResidualSums { square: 0.0, own: 0.0, centre: 0.0, large: 0 };
                for (i, &o) in residual.iter().enumerate() {
                    let code = match planes {
                        1 => f64::from(bit(&low, i)) - 0.5,
                        _ => f64::from(bit(&low, i) + 2 * bit(&high, i)) - 1.5,
                    };
                    let large = planes == 2 && o.abs() >= threshold;
                    assert_eq!(code < 0.0, o < 0.0, "{dim} {i}");
                    assert_eq!(code.abs(), if large { 1.5 } else { 0.5 }, "{dim} {i}");
                    let o = f64::from(o);
                    expected.square += o * o;
                    expected.own += o * code;
                    expected.centre += f64::from(centroid[i]) * code;
                    expected.large += usize::from(large);
                }
                assert!(near(sums.square, expected.square, dim as f64), "{dim}");
                assert!(near(sums.own, expected.own, dim as f64), "{dim}");
                assert!(near(sums.centre, expected.centre, dim as f64), "{dim}");
                assert_eq!(sums.large, expected.large, "{dim}");
                for level in Level::available() {
                    assert_eq!(encode(level), (sums, low.clone(), high.clone()), "{level:?} {dim}");
                }
            }
        }
    }
}
