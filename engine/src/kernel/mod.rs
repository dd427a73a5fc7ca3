//! SIMD kernels with a scalar twin for each, chosen at run time. The only module besides `cache` that
//! may hold `unsafe`.
//!
//! Every kernel (but [`gemm`], which says why) gives the same bits at every [`Level`]: sums have a
//! fixed lane structure, and products are never fused with additions. So a standby on another CPU ranks
//! rows as its primary does, and the tests compare the levels exactly.
#![allow(unsafe_code)]

mod codes;
mod distance;
mod encode;
mod fht;
pub mod gemm;
mod half_float;
mod level;
mod racy;
mod rotation;
mod scan;

pub use codes::{dot_i8_f32, dot_i8_f32_at, l2_squared_i8_f32, l2_squared_i8_f32_at};
pub use distance::{dot, dot_at, l2_squared, l2_squared_at, norm_squared, norm_squared_f64};
pub use encode::{
    ResidualSums, encode_residual, encode_residual_at, fit_i8, fit_i8_at, largest_magnitude,
    largest_magnitude_at, norm_of_sum, norm_of_sum_at, quantize_i8, quantize_i8_at,
    scale_and_subtract, scale_and_subtract_at, squared_error_i8, squared_error_i8_at, sum_f64,
    sum_f64_at,
};
pub use half_float::{f16_to_f32, f16_to_f32_at, f32_to_f16, f32_to_f16_at};
pub use level::Level;
pub use racy::RacyBytes;
pub use rotation::{Rotation, padded_dim};
pub use scan::{
    BLOCK_ROWS, QuantizedSums, ScanTerms, Table, quantize_sums, quantize_sums_at, row_sum,
    scan_blocks, scan_blocks_at,
};

/// Sums are kept in this many lanes, whatever the width of the CPU's registers.
pub(crate) const LANES: usize = 16;

#[cfg(test)]
mod tests;
