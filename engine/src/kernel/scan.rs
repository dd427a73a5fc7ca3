//! The scan of plane-1 code blocks by lookup tables (Andre et al., "Cache locality is not enough:
//! high-performance nearest neighbor search with product quantization fast scan", 2015).
//!
//! A block holds 32 rows: for each bit plane and each group of 4 dimensions 16 bytes, where byte b has in
//! its low nibble the group's bits of row b/2 + 8 (b mod 2) and in its high nibble those of the row 16
//! further; then three times 32 f32: a, k and e. The order of the rows makes the sums of even and of odd
//! bytes, which 16-bit additions keep apart, 8 consecutive rows each.

use super::{Level, RacyBytes, level::per_level};

#[cfg(target_arch = "x86_64")]
#[path = "scan_x86.rs"]
mod x86;

#[cfg(target_arch = "aarch64")]
#[path = "scan_neon.rs"]
mod neon;

/// Rows of a block.
pub const BLOCK_ROWS: usize = 32;

/// The lookup table of a query: for each group of 4 dimensions 16 sums as u8.
#[derive(Debug, Clone, Default)]
pub struct Table {
    lines: Vec<Line>,
}

/// Sums of so many groups, of two planes, are exact as f32.
const MOST_GROUPS: usize = (1 << 24) / (3 * 255) / 4 * 4;

/// A cache line of the table: 4 groups.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([[u8; 16]; 4]);

impl Table {
    /// A table for `groups` groups (a multiple of 4), entry by entry.
    pub fn from_fn(groups: usize, mut entries: impl FnMut(usize) -> [u8; 16]) -> Self {
        assert_eq!(groups % 4, 0, "padded dimensions are a multiple of 16");
        let line = |i| Line(std::array::from_fn(|j| entries(i * 4 + j)));
        Self { lines: (0..groups / 4).map(line).collect() }
    }

    /// Number of groups of 4 dimensions.
    #[inline]
    pub fn groups(&self) -> usize {
        self.lines.len() * 4
    }

    #[inline]
    pub(super) fn entries(&self) -> impl Iterator<Item = &[u8; 16]> {
        self.lines.iter().flat_map(|line| &line.0)
    }
}

/// The table of a query, and what turns its sums back to numbers.
#[derive(Debug, Clone, Default)]
pub struct QuantizedSums {
    /// For each group and each subset of its dimensions, the sum of the query's elements there, less the
    /// group's least sum, in units.
    pub table: Table,
    /// The unit.
    pub unit: f32,
    /// The groups' least sums, added up.
    pub least: f64,
}

/// 1 where the entry's subset has the dimension.
const HAS: [[f32; 16]; 4] = {
    let mut has = [[0.0; 16]; 4];
    let mut i = 0;
    while i < 64 {
        has[i / 16][i % 16] = (((i % 16) >> (i / 16)) & 1) as f32;
        i += 1;
    }
    has
};

#[inline(always)]
fn quantize_sums_body(y: &[f32]) -> QuantizedSums {
    assert_eq!(y.len() % 16, 0, "padded dimensions are a multiple of 16");
    let (groups, _) = y.as_chunks::<4>();
    assert!(y.iter().all(|y| y.abs() < 1e30), "a query out of range");
    let (mut widest, mut least_sum) = (0f32, 0f64);
    for [a, b, c, d] in groups {
        widest = widest.max((a.abs() + b.abs()) + (c.abs() + d.abs()));
        least_sum += f64::from((a.min(0.0) + b.min(0.0)) + (c.min(0.0) + d.min(0.0)));
    }
    let unit = widest / 255.0;
    // The inverse of a subnormal unit overflows; such a query is zero for all that matters here.
    let (unit, per_unit) = if (1.0 / unit).is_finite() { (unit, 1.0 / unit) } else { (0.0, 0.0) };
    let mut table = Table { lines: vec![Line([[0; 16]; 4]); groups.len() / 4] };
    let entries = table.lines.iter_mut().flat_map(|line| &mut line.0);
    for (entries, [a, b, c, d]) in entries.zip(groups) {
        let least = (a.min(0.0) + b.min(0.0)) + (c.min(0.0) + d.min(0.0));
        let units: [f32; 16] = std::array::from_fn(|i| {
            let sum = (HAS[0][i] * a + HAS[1][i] * b) + (HAS[2][i] * c + HAS[3][i] * d);
            (sum - least) * per_unit + 0.5
        });
        // SAFETY: the elements are finite, so the sum less the least one is from 0 to `widest`, up to
        // rounding, which makes it less than 256 units.
        *entries = units.map(|units| unsafe { units.to_int_unchecked::<i32>() } as u8);
    }
    QuantizedSums { table, unit, least: least_sum }
}

per_level! {
    /// The lookup table of a rotated query. Panics if its length is not a multiple of 16.
    quantize_sums, quantize_sums_at(y: &[f32]) -> QuantizedSums, quantize_sums_body
}

/// What turns a row's integer sum I into its score: S = slope I + intercept;
/// estimate = a + base + k S; lower = estimate - spread e.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScanTerms {
    pub slope: f32,
    pub intercept: f32,
    pub base: f32,
    pub spread: f32,
}

impl ScanTerms {
    /// Estimate and lower bound of one row; not-a-number becomes infinity, which sorts last.
    #[inline(always)]
    pub fn score(&self, sum: u32, a: f32, k: f32, e: f32) -> (f32, f32) {
        let s = self.slope * sum as f32 + self.intercept;
        let estimate = (a + self.base) + k * s;
        let lower = estimate - self.spread * e;
        let or_last = |x: f32| if x.is_nan() { f32::INFINITY } else { x };
        (or_last(estimate), or_last(lower))
    }
}

/// Bytes of one bit plane of a block.
#[inline]
const fn plane_bytes(groups: usize) -> usize {
    groups * 16
}

/// The sum that the block scan finds for a single row, whose `bits` planes follow each other, dimension i
/// at bit i mod 8 of byte i / 8. Panics if `packed` is not as long as that.
pub fn row_sum(table: &Table, bits: usize, packed: &[u8]) -> u32 {
    assert_eq!(packed.len(), table.groups() / 2 * bits, "a row of another dimension");
    let mut sum = 0;
    for (plane, packed) in packed.chunks_exact((table.groups() / 2).max(1)).enumerate() {
        let mut plane_sum = 0;
        for (line, bytes) in table.lines.iter().zip(packed.chunks_exact(2)) {
            let nibbles = [bytes[0] & 15, bytes[0] >> 4, bytes[1] & 15, bytes[1] >> 4];
            for (entries, nibble) in line.0.iter().zip(nibbles) {
                plane_sum += u32::from(entries[usize::from(nibble)]);
            }
        }
        sum += plane_sum << plane;
    }
    sum
}

/// Writes estimate and lower bound of each row of the blocks (32 a block, padding rows included).
/// Panics if the outputs have not exactly one place a row, or `blocks` is not whole blocks.
pub fn scan_blocks(
    blocks: RacyBytes<'_>,
    bits: usize,
    table: &Table,
    terms: &ScanTerms,
    estimates: &mut [f32],
    lowers: &mut [f32],
) {
    scan_blocks_at(Level::current(), blocks, bits, table, terms, estimates, lowers);
}

/// [`scan_blocks`] at a given level (or the CPU's best, if that is lower).
pub fn scan_blocks_at(
    level: Level,
    blocks: RacyBytes<'_>,
    bits: usize,
    table: &Table,
    terms: &ScanTerms,
    estimates: &mut [f32],
    lowers: &mut [f32],
) {
    let block_bytes = bits * plane_bytes(table.groups()) + 3 * 4 * BLOCK_ROWS;
    let count = blocks.len() / block_bytes;
    assert!(
        count * block_bytes == blocks.len()
            && count * BLOCK_ROWS == estimates.len()
            && count * BLOCK_ROWS == lowers.len(),
        "not whole blocks, or outputs of another length"
    );
    assert!(table.groups() <= MOST_GROUPS && (1..=2).contains(&bits), "sums would not be exact");
    #[cfg(target_arch = "x86_64")]
    match level.min(Level::best()) {
        Level::Avx512 => {
            // SAFETY: `best` found the level's features on this CPU; the lengths were checked above.
            unsafe { x86::scan_avx512(blocks, bits, table, terms, estimates, lowers) };
            return;
        }
        Level::Avx2 => {
            // SAFETY: `best` found the level's features on this CPU; the lengths were checked above.
            unsafe { x86::scan_avx2(blocks, bits, table, terms, estimates, lowers) };
            return;
        }
        Level::Scalar => {}
    }
    #[cfg(target_arch = "aarch64")]
    if level == Level::Neon {
        // SAFETY: NEON is part of the target; the lengths were checked above.
        unsafe { neon::scan(blocks, bits, table, terms, estimates, lowers) };
        return;
    }
    let _ = level;
    scan_scalar(blocks, bits, table, terms, estimates, lowers);
}

fn scan_scalar(
    blocks: RacyBytes<'_>,
    bits: usize,
    table: &Table,
    terms: &ScanTerms,
    estimates: &mut [f32],
    lowers: &mut [f32],
) {
    let mut offset = 0;
    let outputs = estimates.chunks_exact_mut(BLOCK_ROWS).zip(lowers.chunks_exact_mut(BLOCK_ROWS));
    for (estimates, lowers) in outputs {
        let mut sums = [0u32; BLOCK_ROWS];
        for plane in 0..bits {
            let mut plane_sums = [0u32; BLOCK_ROWS];
            for entries in table.entries() {
                let mut bytes = [0u8; 16];
                blocks.copy_to(offset, &mut bytes);
                offset += 16;
                for (b, byte) in bytes.into_iter().enumerate() {
                    let row = b / 2 + 8 * (b % 2);
                    plane_sums[row] += u32::from(entries[usize::from(byte & 15)]);
                    plane_sums[row + 16] += u32::from(entries[usize::from(byte >> 4)]);
                }
            }
            for (sum, plane_sum) in sums.iter_mut().zip(plane_sums) {
                *sum += plane_sum << plane;
            }
        }
        let mut factors = [[0f32; BLOCK_ROWS]; 3];
        for factor in factors.as_flattened_mut() {
            *factor = blocks.read_f32_le(offset).unwrap_or(f32::NAN);
            offset += 4;
        }
        for (row, &sum) in sums.iter().enumerate() {
            let [a, k, e] = [factors[0][row], factors[1][row], factors[2][row]];
            (estimates[row], lowers[row]) = terms.score(sum, a, k, e);
        }
    }
}
