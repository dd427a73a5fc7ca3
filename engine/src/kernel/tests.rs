//! Each kernel at each level that this CPU has: against a plain f64 computation, and bit for bit against
//! the scalar twin.

use half::f16;

use super::*;
use distance::norm_squared_f64_at;

/// Every dimension to 256, and a spread up to the largest.
pub(super) fn dimensions() -> impl Iterator<Item = usize> {
    let spread = [
        257, 300, 384, 511, 768, 1000, 1023, 1024, 1025, 1028, 1029, 1536, 2000, 3072, 4096, 4100,
        8000, 15_999, 16_000,
    ];
    (1..=256).chain(spread)
}

/// A generator of test data: xorshift.
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Between -1 and 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 56) as u8).collect()
    }
}

fn assert_near(found: f32, expected: f64, size: f64, context: &dyn std::fmt::Debug) {
    let off = (f64::from(found) - expected).abs();
    assert!(off <= 1e-5 * size + 1e-30, "{context:?}: {found} instead of {expected}");
}

#[test]
fn sums_of_floats_agree_at_every_level() {
    let mut random = Random(1);
    for dim in dimensions() {
        let (a, b) = (random.floats(dim), random.floats(dim));
        let pairs = || a.iter().zip(&b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        let l2: f64 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
        let product: f64 = pairs().map(|(a, b)| a * b).sum();
        let square: f64 = pairs().map(|(a, _)| a * a).sum();
        for level in Level::available() {
            assert_near(l2_squared_at(level, &a, &b), l2, l2, &(level, dim));
            assert_near(dot_at(level, &a, &b), product, dim as f64, &(level, dim));
            assert_near(dot_at(level, &a, &a), square, square, &(level, dim));
            let exact = norm_squared_f64_at(level, &a);
            assert!((exact - square).abs() <= 1e-12 * square, "{level:?} {dim}");
            let scalar = Level::Scalar;
            assert_eq!(l2_squared_at(level, &a, &b), l2_squared_at(scalar, &a, &b));
            assert_eq!(dot_at(level, &a, &b), dot_at(scalar, &a, &b));
            assert_eq!(dot_at(level, &a, &a), norm_squared(&a));
            assert_eq!(exact, norm_squared_f64_at(scalar, &a));
        }
    }
}

#[test]
fn sums_of_codes_agree_at_every_level() {
    let mut random = Random(2);
    for dim in dimensions() {
        let (bytes, q, scale) = (random.bytes(dim), random.floats(dim), random.float());
        let codes = RacyBytes::new(&bytes);
        let pairs = || bytes.iter().zip(&q).map(|(&c, &q)| (f64::from(c as i8), f64::from(q)));
        let product: f64 = pairs().map(|(c, q)| c * q).sum();
        let squares: f64 = pairs().map(|(c, _)| c * c).sum();
        let l2: f64 = pairs().map(|(c, q)| (c * f64::from(scale) - q).powi(2)).sum();
        for level in Level::available() {
            let found = dot_i8_f32_at(level, codes, &q);
            assert_near(found.0, product, 128.0 * dim as f64, &(level, dim));
            assert_eq!(found.1, squares as f32, "{level:?} {dim}");
            assert_eq!(found, dot_i8_f32_at(Level::Scalar, codes, &q), "{level:?} {dim}");
            let found = l2_squared_i8_f32_at(level, codes, scale, &q);
            assert_near(found, l2, l2, &(level, dim));
            assert_eq!(found, l2_squared_i8_f32_at(Level::Scalar, codes, scale, &q));
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    let (bytes, q) = (vec![0x80; 16_000], vec![1.0; 16_000]);
    for level in Level::available() {
        let found = dot_i8_f32_at(level, RacyBytes::new(&bytes), &q);
        assert_eq!(found, (-128.0 * 16_000.0, 16_384.0 * 16_000.0), "{level:?}");
    }
}

#[test]
fn half_floats_convert_alike_at_every_level() {
    let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let mut random = Random(3);
    let singles: Vec<f32> = (0..100_000)
        .map(|_| f32::from_bits((random.next() >> 32) as u32))
        .chain(all.iter().flat_map(|h| {
            // Halves, the ties between them, and what lies just beside the ties.
            let h = h.to_f32_const();
            let tie = f32::from_bits(h.to_bits() | 0x1000);
            [h, tie, tie.next_up(), tie.next_down()]
        }))
        .chain([65_519.996, 65_520.0, -65_520.0, 2.98e-8, f32::from_bits(0x3300_0001)])
        .collect();
    for level in Level::available() {
        let mut wide = vec![0.0; all.len()];
        f16_to_f32_at(level, &all, &mut wide);
        for (half, wide) in all.iter().zip(&wide) {
            let same = wide.to_bits() == half.to_f32_const().to_bits();
            assert!(same || (wide.is_nan() && half.is_nan()), "{level:?} {half} {wide}");
        }
        let mut narrow = vec![f16::ZERO; singles.len()];
        f32_to_f16_at(level, &singles, &mut narrow);
        for (single, narrow) in singles.iter().zip(&narrow) {
            let same = narrow.to_bits() == f16::from_f32_const(*single).to_bits();
            assert!(same || (narrow.is_nan() && single.is_nan()), "{level:?} {single} {narrow}");
        }
    }
    for dim in dimensions() {
        let from = &all[..dim];
        for level in Level::available() {
            let (mut wide, mut narrow) = (vec![0.0; dim], vec![f16::ZERO; dim]);
            f16_to_f32_at(level, from, &mut wide);
            f32_to_f16_at(level, &wide, &mut narrow);
            assert_eq!(narrow, from, "{level:?} {dim}");
        }
    }
}

#[test]
fn the_rotation_is_orthonormal_and_the_same_at_every_level() {
    let mut random = Random(4);
    for dim in dimensions() {
        let rotation = Rotation::new(dim, dim as u64);
        let padded = rotation.padded_dim();
        assert!(padded >= dim && padded < dim + 16 && padded.is_multiple_of(16));
        let (a, b) = (random.floats(padded), random.floats(padded));
        let rotated = |level, x: &[f32]| {
            let mut x = x.to_vec();
            rotation.rotate_at(level, &mut x);
            x
        };
        let (ra, rb) = (rotated(Level::Scalar, &a), rotated(Level::Scalar, &b));
        let size = norm_squared_f64(&a);
        let product: f64 = ra.iter().zip(&rb).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let expected: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        assert!((product - expected).abs() <= 2e-6 * size, "{dim}: {product} {expected}");
        assert!((norm_squared_f64(&ra) / size - 1.0).abs() <= 2e-6, "{dim}");
        for level in Level::available() {
            assert_eq!(rotated(level, &a), ra, "{level:?} {dim}");
            let mut back = ra.clone();
            rotation.rotate_back_at(level, &mut back);
            let mut scalar_back = ra.clone();
            rotation.rotate_back_at(Level::Scalar, &mut scalar_back);
            assert_eq!(back, scalar_back, "{level:?} {dim}");
            let off: f64 = a.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            assert!(off.sqrt() <= 2.0 * rotation.relative_error() * size.sqrt(), "{level:?} {dim}");
        }
    }
}

/// The exact rotation in f64, from its definition.
fn rotate_f64(rotation: &Rotation, x: &[f32]) -> Vec<f64> {
    let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let padded = x.len();
    let block = 1usize << padded.ilog2();
    for (step, signs) in rotation.signs().chunks(block).enumerate() {
        let start = if step % 2 == 0 { 0 } else { padded - block };
        for (x, sign) in x[start..].iter_mut().zip(signs) {
            *x *= f64::from(*sign);
        }
        let part = x[start..start + block].to_vec();
        let mut level = part;
        let mut half = 1;
        while half < block {
            level = (0..block)
                .map(|i| match i & half {
                    0 => level[i] + level[i + half],
                    _ => level[i - half] - level[i],
                })
                .collect();
            half *= 2;
        }
        for (x, level) in x[start..].iter_mut().zip(level) {
            *x = level / (block as f64).sqrt();
        }
        if step % 2 == 1 && block != padded {
            for i in 0..padded / 2 {
                let (low, high) = (x[i], x[i + padded / 2]);
                x[i] = (low + high) * 0.5f64.sqrt();
                x[i + padded / 2] = (low - high) * 0.5f64.sqrt();
            }
        }
    }
    x
}

#[test]
fn the_stated_error_of_the_rotation_holds() {
    let mut random = Random(5);
    let tiny = 1e-41f32;
    for dim in dimensions().filter(|dim| dim % 16 == 0 || *dim < 20) {
        let rotation = Rotation::new(dim, 77);
        for scale in [1.0, 1e18, 1e-20, tiny] {
            let mut x = random.floats(rotation.padded_dim());
            x.iter_mut().for_each(|x| *x *= scale);
            let norm = norm_squared_f64(&x).sqrt();
            let exact = rotate_f64(&rotation, &x);
            rotation.rotate(&mut x);
            let off = x.iter().zip(&exact).map(|(x, e)| (f64::from(*x) - e).powi(2)).sum::<f64>();
            let bound = rotation.relative_error() * norm + rotation.absolute_error();
            assert!(off.sqrt() <= bound, "{dim} {scale}: {} {bound}", off.sqrt());
        }
    }
}

#[test]
fn the_rotation_spreads_single_elements() {
    for dim in [64, 100, 272, 384, 1000, 1008, 1536, 16_000] {
        let rotation = Rotation::new(dim, 3);
        let padded = rotation.padded_dim();
        for at in [0, 1, dim / 2, dim - 1] {
            let mut x = vec![0.0; padded];
            x[at] = 1.0;
            rotation.rotate(&mut x);
            let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            // A random direction has its largest element near sqrt(2 ln P / P).
            let usual = (2.0 * (padded as f32).ln() / padded as f32).sqrt();
            assert!(largest < 2.0 * usual, "{dim} {at}: {largest} {usual}");
        }
    }
}

#[test]
fn rotations_are_part_of_the_format() {
    let rotated = |dim| {
        let mut x: Vec<f32> = (0..dim).map(|i| i as f32).collect();
        Rotation::new(dim, 42).rotate(&mut x);
        [x[0], x[1], x[dim - 1]]
    };
    assert_eq!(rotated(32), [19.445438, -7.1594553, -8.838835]);
    assert_eq!(rotated(48), [11.7330675, -7.692281, -2.7384493]);
}

/// What a block says, decoded by the module's definition alone.
fn scan_by_definition(
    block: &[u8],
    bits: usize,
    entries: &[[u8; 16]],
    terms: &ScanTerms,
) -> Vec<(f32, f32)> {
    let plane = entries.len() * 16;
    (0..BLOCK_ROWS)
        .map(|row| {
            let (byte, high) = (row % 8 * 2 + row / 8 % 2, row >= 16);
            let mut sum = 0;
            for p in 0..bits {
                for (g, entries) in entries.iter().enumerate() {
                    let code = block[p * plane + g * 16 + byte];
                    let nibble = if high { code >> 4 } else { code & 15 };
                    sum += u32::from(entries[usize::from(nibble)]) << p;
                }
            }
            let factor = |f: usize| {
                let at = bits * plane + (f * BLOCK_ROWS + row) * 4;
                f32::from_le_bytes(block[at..at + 4].try_into().unwrap())
            };
            let s = terms.slope * sum as f32 + terms.intercept;
            let estimate = factor(0) + terms.base + factor(1) * s;
            let lower = estimate - terms.spread * factor(2);
            let last = |x: f32| if x.is_nan() { f32::INFINITY } else { x };
            (last(estimate), last(lower))
        })
        .collect()
}

#[test]
fn the_lookup_table_is_the_query_at_every_level() {
    let mut random = Random(7);
    let mut padded_dims: Vec<usize> = dimensions().map(padded_dim).collect();
    padded_dims.dedup();
    for padded in padded_dims {
        let y = random.floats(padded);
        let scalar = quantize_sums_at(Level::Scalar, &y);
        let mut least_sum = 0.0;
        for (entries, y) in scalar.table.entries().zip(y.chunks_exact(4)) {
            let least: f32 = y.iter().map(|y| y.min(0.0)).sum();
            least_sum += f64::from(least);
            for (i, &entry) in entries.iter().enumerate() {
                let sum: f32 = (0..4).filter(|j| i >> j & 1 == 1).map(|j| y[j]).sum();
                let off = f32::from(entry) * scalar.unit + least - sum;
                assert!(off.abs() <= 0.501 * scalar.unit, "{padded} {i}: {off}");
            }
        }
        assert!((scalar.least - least_sum).abs() < 1e-4);
        for level in Level::available() {
            let found = quantize_sums_at(level, &y);
            assert!(found.table.entries().eq(scalar.table.entries()), "{level:?} {padded}");
            assert_eq!((found.unit, found.least), (scalar.unit, scalar.least));
        }
    }
    for level in Level::available() {
        for tiny in [0.0, f32::from_bits(1), 1e-42] {
            let found = quantize_sums_at(level, &[tiny; 16]);
            assert!(found.unit == 0.0 && found.table.entries().all(|e| *e == [0; 16]));
        }
    }
}

#[test]
fn block_scans_agree_at_every_level() {
    let mut random = Random(6);
    let mut padded_dims: Vec<usize> = dimensions().map(padded_dim).collect();
    padded_dims.dedup();
    for padded in padded_dims {
        for bits in 1..=2 {
            for largest in [false, true] {
                let groups = padded / 4;
                let entries: Vec<[u8; 16]> = (0..groups)
                    .map(|_| match largest {
                        true => [255; 16],
                        false => std::array::from_fn(|_| (random.next() >> 56) as u8),
                    })
                    .collect();
                let table = Table::from_fn(groups, |g| entries[g]);
                let terms = ScanTerms {
                    slope: random.float(),
                    intercept: random.float(),
                    base: random.float(),
                    spread: random.float().abs(),
                };
                let code_bytes = bits * padded * 4;
                let block_bytes = code_bytes + 384;
                let mut blocks = random.bytes(3 * block_bytes);
                for block in blocks.chunks_exact_mut(block_bytes) {
                    for factor in block[code_bytes..].chunks_exact_mut(4) {
                        let value = match random.next() % 20 {
                            0 => f32::INFINITY,
                            1 => f32::NAN,
                            2 => f32::NEG_INFINITY,
                            3 => -f32::NAN,
                            _ => random.float(),
                        };
                        factor.copy_from_slice(&value.to_le_bytes());
                    }
                }
                let expected: Vec<(f32, f32)> = blocks
                    .chunks_exact(block_bytes)
                    .flat_map(|block| scan_by_definition(block, bits, &entries, &terms))
                    .collect();
                for level in Level::available() {
                    let mut estimates = vec![0.0; 96];
                    let mut lowers = vec![0.0; 96];
                    let view = RacyBytes::new(&blocks);
                    scan_blocks_at(level, view, bits, &table, &terms, &mut estimates, &mut lowers);
                    let found: Vec<_> = estimates.into_iter().zip(lowers).collect();
                    assert_eq!(found, expected, "{level:?} {padded} {bits} {largest}");
                }
            }
        }
    }
}
