//! Queries: everything about a query that cells and rows need.

use super::{
    Model, RowError, least_score,
    model::{UNIT_ROUNDOFF, query_factor},
    plane2::Record,
};
use crate::{
    Metric,
    kernel::{self, RacyBytes, ScanTerms, Table},
};

/// A query prepared for scanning and refining; the same for all cells.
#[derive(Debug, Clone)]
pub struct Query {
    metric: Metric,
    dim: usize,
    /// y: R(q - m), for inner product R q.
    rotated: Vec<f32>,
    /// |y|.
    norm: f64,
    /// <m, q> for inner product, else 0.
    mean_product: f64,
    /// |m|.
    mean_norm: f64,
    /// Upper bound of the error of y.
    error: f64,
    /// Whether the query's norm allows a deterministic bound.
    bounded: bool,
    table: Table,
    /// The unit of the table.
    unit: f32,
    /// Standard deviation of the sum of a plane, from rounding the table.
    table_error: f32,
    /// Sum over the groups of their least sums, minus half of the sum of y.
    offset: f32,
}

/// What a cell adds to the scores of its rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CellTerm {
    /// |y - c|^2, or -<m, q> - <c, y> for inner product.
    pub base: f32,
    /// |y - c|, or |y| for inner product: what a row's error is multiplied by.
    pub radius: f32,
}

/// What a plane-2 record says of a row's score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refined {
    /// The likely score.
    pub estimate: f64,
    /// Never above the score that pgvector's operator has, however it orders its sums.
    pub lower: f64,
    /// The record's id.
    pub id: u64,
}

/// Rounding the table changes S; a row's error factor e is the change of the estimate for a change of S
/// by |xbar| sqrt(1 - f^2) / sqrt(P - 1), which hardly differs between rows: with 1 bit |xbar| is
/// sqrt(P) / 2 and f 0.80, with 2 bits they are 0.95 sqrt(P) and 0.94, and the planes' errors (of
/// weights 1 and 2) add up to sqrt(5). So the table's share of the error is this times `table_error`, in
/// the unit of a cell's radius.
const TABLE_ERROR_WEIGHT: [f32; 2] = [3.3, 6.9];

impl Query {
    pub(super) fn new(model: &Model, q: &[f32]) -> Result<Self, RowError> {
        let q_norm = model.checked_norm(q)?;
        let (factor, bounded) = query_factor(model.metric, q_norm);
        let mut rotated = vec![0.0; model.padded_dim()];
        let mut mean_product = 0.0;
        if model.metric == Metric::InnerProduct {
            model.project(q, factor, &vec![0.0; model.dim], &mut rotated);
            let products = q.iter().zip(&model.mean).map(|(q, m)| f64::from(*q) * f64::from(*m));
            mean_product = products.sum::<f64>() * factor;
        } else {
            model.project(q, factor, &model.mean, &mut rotated);
        }
        let norm = kernel::norm_squared_f64(&rotated).sqrt();
        let sums = kernel::quantize_sums(&rotated);
        Ok(Self {
            metric: model.metric,
            dim: model.dim,
            norm,
            mean_product,
            mean_norm: model.mean_norm(),
            error: model.scaling_error() + model.difference_error(norm * 1.001),
            bounded,
            table_error: sums.unit * (sums.table.groups() as f32 / 12.0).sqrt(),
            table: sums.table,
            unit: sums.unit,
            offset: (sums.least - kernel::sum_f64(&rotated) / 2.0) as f32,
            rotated,
        })
    }

    /// Dimensions of model space.
    #[inline]
    pub fn padded_dim(&self) -> usize {
        self.rotated.len()
    }

    /// The query in model space.
    #[inline]
    pub fn rotated(&self) -> &[f32] {
        &self.rotated
    }

    /// A bound that lies below the score of every row: for a row of which nothing is known.
    pub fn least_score(&self) -> f64 {
        least_score(self.metric)
    }

    /// The metric of the query's model.
    #[inline]
    pub fn metric(&self) -> Metric {
        self.metric
    }

    #[inline]
    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    #[inline]
    pub(super) fn scan_terms(&self, bits: usize, term: CellTerm, epsilon: f32) -> ScanTerms {
        // The planes count 2^bits - 1 times in all, and a code's mean is half of that.
        let weight = ((1 << bits) - 1) as f32;
        let radius = term.radius.hypot(self.table_error * TABLE_ERROR_WEIGHT[bits - 1]);
        ScanTerms {
            slope: self.unit,
            intercept: self.offset * weight,
            base: term.base,
            spread: epsilon * radius,
        }
    }

    /// The term of the cell with this centroid record. Of a damaged record it may be not-a-number, which
    /// puts the cell's rows last.
    pub fn cell_term(&self, centroid_record: RacyBytes<'_>) -> CellTerm {
        let Some(record) = Record::new(centroid_record, self.padded_dim()) else {
            return CellTerm { base: f32::NAN, radius: 0.0 };
        };
        match self.metric {
            Metric::L2 | Metric::Cosine => {
                let base = kernel::l2_squared_i8_f32(record.codes, record.scale, &self.rotated);
                CellTerm { base, radius: base.sqrt() }
            }
            Metric::InnerProduct => {
                let (product, _) = kernel::dot_i8_f32(record.codes, &self.rotated);
                CellTerm {
                    base: (-self.mean_product - f64::from(product) * f64::from(record.scale))
                        as f32,
                    radius: self.norm as f32,
                }
            }
        }
    }

    /// The term of a cell whose centroid is the origin of model space: for blocks of centroids, and for
    /// an index without cells.
    pub fn zero_cell_term(&self) -> CellTerm {
        let base = match self.metric {
            Metric::L2 | Metric::Cosine => self.norm * self.norm,
            Metric::InnerProduct => -self.mean_product,
        };
        CellTerm { base: base as f32, radius: self.norm as f32 }
    }

    /// The score of a row from its plane-2 record. A damaged record gives some estimate, infinite rather
    /// than not-a-number, and the least bound where it has none.
    pub fn refine(&self, record: RacyBytes<'_>) -> Refined {
        let none = least_score(self.metric);
        let Some(record) = Record::new(record, self.padded_dim()) else {
            return Refined { estimate: f64::INFINITY, lower: none, id: 0 };
        };
        let (estimate, lower) = match self.metric {
            Metric::L2 | Metric::Cosine => self.refine_distance(&record),
            Metric::InnerProduct => self.refine_product(&record),
        };
        let bounded = self.bounded && record.error >= 0.0 && record.error < f32::INFINITY;
        Refined {
            estimate: if estimate.is_nan() { f64::INFINITY } else { estimate },
            lower: if bounded && lower.is_finite() { lower.max(none) } else { none },
            id: record.id,
        }
    }

    fn refine_distance(&self, record: &Record<'_>) -> (f64, f64) {
        let error = f64::from(record.error);
        let squared = kernel::l2_squared_i8_f32(record.codes, record.scale, &self.rotated);
        let squared = f64::from(squared);
        // The kernel's sum is at most this much too large; each of its differences also carries the
        // rounding of a decoded element.
        let exact = (squared - self.underflow()) / (1.0 + self.kernel_error());
        let distance = exact.max(0.0).sqrt();
        let decoding = 1.01 * UNIT_ROUNDOFF * (distance + self.norm);
        let distance = (distance - decoding - self.error - error).max(0.0);
        let exact = distance * distance;
        let lower = match self.metric {
            // pgvector adds D squares, each after two roundings, in some order.
            Metric::L2 => exact * (1.0 - self.sum_error()) - self.underflow(),
            // Three sums; the product of two of them under a square root, so it counts once.
            _ => exact - 4.0 * self.sum_error() * (1.0 + 2.0 * self.sum_error()),
        };
        let estimate = if error.is_finite() { squared + error * error } else { squared };
        (estimate, lower * (1.0 - 1e-14))
    }

    fn refine_product(&self, record: &Record<'_>) -> (f64, f64) {
        let error = f64::from(record.error);
        let scale = f64::from(record.scale);
        let (product, squares) = kernel::dot_i8_f32(record.codes, &self.rotated);
        let code_norm = f64::from(squares).sqrt() * scale.abs() * (1.0 + 1e-6);
        let estimate = -(scale * f64::from(product) + self.mean_product);
        let norm = self.norm * (1.0 + 1e-6) + self.error;
        let row_norm = code_norm + error + self.mean_norm;
        let slack = error * norm
            + code_norm * (self.kernel_error() * norm + self.error)
            + self.sum_error() * row_norm * norm
            + scale.abs() * self.underflow()
            + self.underflow()
            // The f64 operations here, whose terms may cancel.
            + 1e-14 * (code_norm + self.mean_norm) * norm;
        (estimate, estimate - slack)
    }

    /// Relative error of a sum of D products of f32, in any order and with at most three roundings
    /// before it.
    fn sum_error(&self) -> f64 {
        let units = (self.dim + 3) as f64 * UNIT_ROUNDOFF;
        units / (1.0 - units)
    }

    /// The same for the kernels here, whose order of additions is known.
    fn kernel_error(&self) -> f64 {
        (self.rotated.len() / 64 + 16) as f64 * UNIT_ROUNDOFF * 1.001
    }

    /// What D underflowing products can add to or take from a sum, even if subnormals are flushed.
    fn underflow(&self) -> f64 {
        self.rotated.len() as f64 * f64::from(f32::MIN_POSITIVE)
    }
}
