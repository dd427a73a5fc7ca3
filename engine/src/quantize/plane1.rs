//! Plane 1: RaBitQ codes of the residual to the cell's centroid, scanned 32 rows at a time.
//!
//! A row's residual o = x - c is coded by u in 0..2^B for each dimension; its direction is that of
//! xbar = u - (2^B - 1) / 2. With S = <xbar, y>, K = |o|^2 / <xbar, o> and f = <xbar, o> / (|xbar| |o|)
//! the score is estimated as a + base + k S, where base is the cell's ([`CellTerm`]):
//!
//! | | a | k | e |
//! | --- | --- | --- | --- |
//! | L2, cosine | \|o\|^2 + 2 K <xbar, c> | -2 K | 2 \|o\| sqrt((1 - f^2) / f^2 / (P - 1)) |
//! | inner product | 0 | -K | \|o\| sqrt((1 - f^2) / f^2 / (P - 1)) |
//!
//! The error is about normal with deviation e * radius (radius from [`CellTerm`]); `lower` is the
//! estimate minus epsilon times that: a statistical bound, for choosing what to refine only.

use super::{CellTerm, Model, Query};
pub use crate::kernel::BLOCK_ROWS;
use crate::{
    Metric,
    kernel::{self, RacyBytes, ResidualSums},
};

/// What the form of plane-1 codes depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Dimensions of model space.
    pub padded_dim: usize,
    /// Bits a dimension, 1 or 2.
    pub bits: usize,
    /// The metric of the index.
    pub metric: Metric,
}

impl Shape {
    /// The shape of a model's centroids: 1 bit, relative to the origin.
    pub fn of_centroids(model: &Model) -> Self {
        Self { bits: 1, ..Self::from(model) }
    }
}

impl From<&Model> for Shape {
    fn from(model: &Model) -> Self {
        Self { padded_dim: model.padded_dim(), bits: model.bits, metric: model.metric }
    }
}

/// Bytes of a block of 32 rows.
#[inline]
pub const fn block_bytes(padded_dim: usize, bits: usize) -> usize {
    bits * padded_dim * 4 + 3 * 4 * BLOCK_ROWS
}

/// Bytes of [`Plane1RowRef::to_bytes`].
#[inline]
pub const fn row_bytes(padded_dim: usize, bits: usize) -> usize {
    bits * padded_dim / 8 + 12
}

/// A single row's code, as the delta keeps it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plane1Row {
    /// See the module's table.
    pub a: f32,
    /// See the module's table.
    pub k: f32,
    /// See the module's table.
    pub e: f32,
    /// `bits` planes of P / 8 bytes; dimension i at bit i mod 8 of byte i / 8.
    pub packed: Vec<u8>,
}

/// A borrowed [`Plane1Row`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plane1RowRef<'a> {
    /// See the module's table.
    pub a: f32,
    /// See the module's table.
    pub k: f32,
    /// See the module's table.
    pub e: f32,
    /// See [`Plane1Row::packed`].
    pub packed: &'a [u8],
}

impl<'a> From<&'a Plane1Row> for Plane1RowRef<'a> {
    fn from(row: &'a Plane1Row) -> Self {
        Self { a: row.a, k: row.k, e: row.e, packed: &row.packed }
    }
}

impl<'a> Plane1RowRef<'a> {
    /// Reads [`Plane1RowRef::write_to`]; nothing if the length is not [`row_bytes`].
    pub fn from_bytes(bytes: &'a [u8], padded_dim: usize, bits: usize) -> Option<Self> {
        if bytes.len() != row_bytes(padded_dim, bits) {
            return None;
        }
        let view = RacyBytes::new(bytes);
        let [a, k, e] = [view.read_f32_le(0)?, view.read_f32_le(4)?, view.read_f32_le(8)?];
        Some(Self { a, k, e, packed: &bytes[12..] })
    }

    /// Appends the row's on-disk form: a, k, e as f32, then the packed code.
    pub fn write_to(self, out: &mut Vec<u8>) {
        for factor in [self.a, self.k, self.e] {
            out.extend_from_slice(&factor.to_le_bytes());
        }
        out.extend_from_slice(self.packed);
    }
}

/// Codes the residual of a row `x` to `centroid`, both in model space. Panics on other dimensions.
pub fn encode_row(shape: impl Into<Shape>, x: &[f32], centroid: &[f32]) -> Plane1Row {
    Encoder::new(shape.into()).encode(x, centroid)
}

/// Appends the blocks of rows (n x P in model space, row by row) of one cell, the last block padded by
/// rows whose estimate is infinite. Panics on other dimensions.
pub fn encode_blocks(shape: impl Into<Shape>, rows: &[f32], centroid: &[f32], out: &mut Vec<u8>) {
    let shape = shape.into();
    assert_eq!(rows.len() % shape.padded_dim, 0, "rows of another dimension");
    let mut encoder = Encoder::new(shape);
    for block in rows.chunks(shape.padded_dim * BLOCK_ROWS) {
        let mut writer = BlockWriter::new(shape, out);
        for x in block.chunks_exact(shape.padded_dim) {
            writer.push((&encoder.encode(x, centroid)).into());
        }
    }
}

/// Appends the blocks of rows that were coded singly. Panics on other dimensions.
pub fn blocks_from_rows(shape: impl Into<Shape>, rows: &[Plane1RowRef<'_>], out: &mut Vec<u8>) {
    let shape = shape.into();
    for block in rows.chunks(BLOCK_ROWS) {
        let mut writer = BlockWriter::new(shape, out);
        for &row in block {
            writer.push(row);
        }
    }
}

/// Estimate and statistical lower bound of a single row: the numbers that the scan of a block has for it.
/// Panics if the row has other dimensions than the query.
pub fn estimate_row<'a>(
    query: &Query,
    bits: usize,
    term: CellTerm,
    epsilon: f32,
    row: impl Into<Plane1RowRef<'a>>,
) -> (f32, f32) {
    let row = row.into();
    let sum = kernel::row_sum(query.table(), bits, row.packed);
    query.scan_terms(bits, term, epsilon).score(sum, row.a, row.k, row.e)
}

/// Appends estimate and statistical lower bound of every row of the blocks, 32 a block (padding rows
/// have infinity). What does not fill a block is ignored. Whatever the bytes are, nothing appended is
/// not-a-number: it is replaced by infinity.
pub fn scan(
    blocks: RacyBytes<'_>,
    bits: usize,
    query: &Query,
    term: CellTerm,
    epsilon: f32,
    estimates: &mut Vec<f32>,
    lowers: &mut Vec<f32>,
) {
    let block_bytes = block_bytes(query.padded_dim(), bits);
    let count = blocks.len() / block_bytes;
    let Some(blocks) = blocks.get(0..count * block_bytes) else { return };
    let (start, lower_start) = (estimates.len(), lowers.len());
    estimates.resize(start + count * BLOCK_ROWS, 0.0);
    lowers.resize(lower_start + count * BLOCK_ROWS, 0.0);
    kernel::scan_blocks(
        blocks,
        bits,
        query.table(),
        &query.scan_terms(bits, term, epsilon),
        &mut estimates[start..],
        &mut lowers[lower_start..],
    );
}

/// Codes rows, keeping its buffers.
struct Encoder {
    shape: Shape,
    residual: Vec<f32>,
    /// Two bits: magnitudes in descending order.
    order: Vec<f32>,
}

impl Encoder {
    fn new(shape: Shape) -> Self {
        assert!(shape.bits == 1 || shape.bits == 2, "codes have 1 or 2 bits");
        Self { shape, residual: Vec::new(), order: Vec::new() }
    }

    fn encode(&mut self, x: &[f32], centroid: &[f32]) -> Plane1Row {
        let Shape { padded_dim, bits, metric } = self.shape;
        assert!(x.len() == padded_dim && centroid.len() == padded_dim, "another dimension");
        self.residual.clear();
        self.residual.extend(x.iter().zip(centroid).map(|(x, c)| x - c));
        // Two bits: elements from here on have the larger of the two magnitudes, 3/2 instead of 1/2.
        let threshold = if bits == 2 { self.threshold() } else { f32::INFINITY };
        let mut packed = vec![0u8; padded_dim / 8 * bits];
        let (low, high) = packed.split_at_mut(padded_dim / 8);
        let sums = kernel::encode_residual(&self.residual, centroid, threshold, low, high);
        let ResidualSums { square, own, centre, large } = sums;
        // |xbar|^2: 1/4 or 9/4 an element.
        let code_square = padded_dim as f64 / 4.0 + 2.0 * large as f64;
        let norm = square.sqrt();
        if !(own > 0.0 && norm.is_finite()) {
            // A zero residual: the cell's term is exact.
            return Plane1Row { a: 0.0, k: 0.0, e: 0.0, packed };
        }
        let k = square / own;
        let cosine = (own / (code_square.sqrt() * norm)).min(1.0);
        let spread = (1.0 - cosine * cosine) / (cosine * cosine) / (padded_dim - 1) as f64;
        let e = norm * spread.sqrt();
        match metric {
            Metric::L2 | Metric::Cosine => Plane1Row {
                a: (square + 2.0 * k * centre) as f32,
                k: (-2.0 * k) as f32,
                e: (2.0 * e) as f32,
                packed,
            },
            Metric::InnerProduct => Plane1Row { a: 0.0, k: -k as f32, e: e as f32, packed },
        }
    }

    /// The least magnitude that is coded as 3/2, for the code with the greatest cosine to the residual
    /// (extended RaBitQ; with two magnitudes the best code splits the sorted elements).
    fn threshold(&mut self) -> f32 {
        self.order.clear();
        self.order.extend(self.residual.iter().map(|o| o.abs()));
        self.order.sort_unstable_by(|a, b| b.total_cmp(a));
        let mut product = self.order.iter().map(|&o| f64::from(o)).sum::<f64>() / 2.0;
        let mut square = self.order.len() as f64 / 4.0;
        let mut best = product * product / square;
        let mut threshold = f32::INFINITY;
        for (i, &o) in self.order.iter().enumerate() {
            product += f64::from(o);
            square += 2.0;
            // Equal elements have equal codes.
            let splits = self.order.get(i + 1).is_none_or(|&next| next < o);
            if splits && product * product > best * square {
                best = product * product / square;
                threshold = o;
            }
        }
        threshold
    }
}

/// Appends one block, made of padding rows first.
struct BlockWriter<'a> {
    shape: Shape,
    block: &'a mut [u8],
    rows: usize,
}

impl<'a> BlockWriter<'a> {
    fn new(shape: Shape, out: &'a mut Vec<u8>) -> Self {
        let start = out.len();
        out.resize(start + block_bytes(shape.padded_dim, shape.bits), 0);
        let mut writer = Self { shape, block: &mut out[start..], rows: 0 };
        for row in 0..BLOCK_ROWS {
            writer.set_factor(0, row, f32::INFINITY);
        }
        writer
    }

    fn set_factor(&mut self, factor: usize, row: usize, value: f32) {
        let codes = self.shape.bits * self.shape.padded_dim * 4;
        let at = codes + (factor * BLOCK_ROWS + row) * 4;
        self.block[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn push(&mut self, row: Plane1RowRef<'_>) {
        let Shape { padded_dim, bits, .. } = self.shape;
        assert_eq!(row.packed.len(), padded_dim / 8 * bits, "a row of another dimension");
        let number = self.rows;
        self.rows += 1;
        for (factor, value) in [row.a, row.k, row.e].into_iter().enumerate() {
            self.set_factor(factor, number, value);
        }
        // See `kernel::scan` for the order of rows within a group's 16 bytes.
        let (byte, shift) = (number % 8 * 2 + number / 8 % 2, number / 16 * 4);
        for (i, &pair) in row.packed.iter().enumerate() {
            self.block[i * 32 + byte] |= (pair & 15) << shift;
            self.block[i * 32 + 16 + byte] |= (pair >> 4) << shift;
        }
    }
}
