//! Plane 2: 8-bit codes with a deterministic error, for rows that survive plane 1. A centroid's record
//! has the same form, with the cell's number as id and its spread as error (see `cell_rank`).
//!
//! Record: P codes i8, scale f32, error f32, id u64; x is scale * codes, up to `error` in Euclidean norm.
//! It does not depend on the row's cell.

use super::Model;
use crate::kernel::{self, RacyBytes};

/// Bytes of a record.
#[inline]
pub const fn record_bytes(padded_dim: usize) -> usize {
    padded_dim + 16
}

/// A record's parts.
pub(super) struct Record<'a> {
    pub codes: RacyBytes<'a>,
    pub scale: f32,
    pub error: f32,
    pub id: u64,
}

impl<'a> Record<'a> {
    /// The record at the start of `bytes`, if there are enough.
    #[inline]
    pub fn new(bytes: RacyBytes<'a>, padded_dim: usize) -> Option<Self> {
        Some(Self {
            codes: bytes.get(0..padded_dim)?,
            scale: bytes.read_f32_le(padded_dim)?,
            error: bytes.read_f32_le(padded_dim + 4)?,
            id: bytes.read_u64_le(padded_dim + 8)?,
        })
    }
}

const LARGEST_CODE: f32 = 127.0;

/// Appends the record of the row `x` (in model space, from [`Model::project_row`]). A row out of the
/// range in which pgvector's own f32 sums are sound gets an infinite error, so no bound but the least.
/// Panics if `x` has not the padded dimensions.
pub fn encode(model: &Model, x: &[f32], id: u64, out: &mut Vec<u8>) {
    assert_eq!(x.len(), model.padded_dim(), "a row of another dimension");
    let norm = kernel::norm_squared_f64(x).sqrt();
    let mut scale = kernel::largest_magnitude(x) / LARGEST_CODE;
    let start = out.len();
    out.resize(start + x.len(), 0);
    let codes = &mut out[start..];
    // The second time with the scale that fits the first codes best.
    for _ in 0..2 {
        kernel::quantize_i8(x, 1.0 / scale, codes);
        let (product, squares) = kernel::fit_i8(x, codes);
        let best = (product / squares) as f32;
        scale = if best.is_finite() { best } else { scale };
    }
    // The sum is exact to 1e-12.
    let error = kernel::squared_error_i8(x, codes, scale).sqrt() * (1.0 + 1e-10) + norm * 1e-14;
    let error = round_up(error + model.projection_error(x, norm));
    out.extend_from_slice(&scale.to_le_bytes());
    out.extend_from_slice(&error.to_le_bytes());
    out.extend_from_slice(&id.to_le_bytes());
}

/// The least f32 that is not below `x`.
fn round_up(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) < x { nearest.next_up() } else { nearest }
}

/// Decodes a row or a centroid: scale * codes. False, and nothing written, if the record is too short
/// for `out`.
pub fn decode(record: RacyBytes<'_>, out: &mut [f32]) -> bool {
    let Some(record) = Record::new(record, out.len()) else { return false };
    let codes = record.codes.copy_to_vec();
    for (x, code) in out.iter_mut().zip(codes) {
        *x = f32::from(code as i8) * record.scale;
    }
    true
}

/// The id in a record, if it is long enough.
pub fn record_id(record: RacyBytes<'_>, padded_dim: usize) -> Option<u64> {
    record.read_u64_le(padded_dim + 8)
}

/// Replaces the id in a record. Panics if the record has another length.
pub fn set_record_id(record: &mut [u8], padded_dim: usize, id: u64) {
    assert_eq!(record.len(), record_bytes(padded_dim), "a record of another dimension");
    record[padded_dim + 8..].copy_from_slice(&id.to_le_bytes());
}
