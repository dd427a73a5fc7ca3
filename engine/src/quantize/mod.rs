//! The RaBitQ quantizer: models (rotation, mean), plane 1 (scanned codes), plane 2 (8-bit, deterministic
//! bound).
//!
//! A row v lives in **model space** as x = R(v - m): m is the model's mean, R its rotation, padded to P
//! dimensions; under cosine v is first scaled to unit length. A **score** is smaller for nearer rows:
//! the squared distance for L2, the squared distance of the unit vectors for cosine, the negative inner
//! product for inner product; [`score_to_distance`] turns it into the value of pgvector's operator.
//!
//! Papers: Gao & Long, "RaBitQ: quantizing high-dimensional vectors with a theoretical error bound for
//! approximate nearest neighbor search", SIGMOD 2024; Gao et al., "Practical and asymptotically optimal
//! quantization of high-dimensional vectors in Euclidean space for approximate nearest neighbor search",
//! SIGMOD 2025.

pub mod cell_rank;
pub mod model;
pub mod plane1;
pub mod plane2;
mod query;

pub use model::{Model, ModelError, RowError};
pub use query::{CellTerm, Query, Refined};

use crate::Metric;

/// Most dimensions of a vector, as in pgvector's types.
pub const MAX_DIM: usize = 16_000;

/// The value that pgvector's operator gives for a score.
#[inline]
pub fn score_to_distance(metric: Metric, score: f64) -> f64 {
    match metric {
        Metric::L2 => score.max(0.0).sqrt(),
        Metric::Cosine => score / 2.0,
        Metric::InnerProduct => score,
    }
}

/// The least score there is.
#[inline]
pub(crate) fn least_score(metric: Metric) -> f64 {
    match metric {
        Metric::L2 | Metric::Cosine => 0.0,
        Metric::InnerProduct => f64::NEG_INFINITY,
    }
}

#[cfg(test)]
mod tests;
