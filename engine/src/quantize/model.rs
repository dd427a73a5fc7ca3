//! Models: what takes a row or a query to model space.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    byteorder::little_endian::{F32, U16, U32, U64},
};

use super::{MAX_DIM, Query};
use crate::{
    Metric,
    kernel::{self, Rotation},
};

/// Half of the distance between 1 and the next f32: the largest relative error of one operation.
pub(super) const UNIT_ROUNDOFF: f64 = f32::EPSILON as f64 / 2.0;

/// Longer rows and queries are shortened to this, so that nothing here overflows.
const LONGEST: f64 = 1e17;
/// Rows further from the mean than this have no deterministic bound. The mean is shorter than half of
/// it, so every shortened row is among them.
pub(super) const LONGEST_BOUNDED: f64 = 1e16;
const LONGEST_MEAN: f64 = 1e15;
/// Under cosine, pgvector's f32 squares of shorter vectors may lose their precision to underflow.
const SHORTEST_BOUNDED: f64 = 1e-12;
/// Under cosine, rows outside of the bounded range are projected with this length instead of 1.
const UNBOUNDED_UNIT: f64 = 1.0 + 1.0 / 128.0;

/// Why a vector cannot be projected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// Another number of dimensions than the model's.
    #[error("expected {expected} dimensions, not {found}")]
    Dimension {
        /// The model's.
        expected: usize,
        /// The vector's.
        found: usize,
    },
    /// Not-a-number or infinity in the vector.
    #[error("a vector element is not finite")]
    NotFinite,
    /// A zero vector has no direction, so no cosine distance.
    #[error("a zero vector has no cosine distance")]
    ZeroNorm,
}

/// Why a model cannot be made or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// Dimensions outside of 1 to 16,000.
    #[error("a model has 1 to {MAX_DIM} dimensions, not {0}")]
    Dimension(usize),
    /// The mean has another number of dimensions than the model.
    #[error("the mean has {found} dimensions, the model {expected}")]
    MeanDimension {
        /// The model's.
        expected: usize,
        /// The mean's.
        found: usize,
    },
    /// Not-a-number, infinity or an excessive length in the mean.
    #[error("the mean of the model is out of range")]
    Mean,
    /// Plane-1 codes of so many bits are not known.
    #[error("codes have 1 or 2 bits, not {0}")]
    Bits(u8),
    /// The metric's number is not known.
    #[error("unknown metric {0}")]
    Metric(u8),
    /// The format version is not known.
    #[error("the model has format version {found}, this program reads version {known}; upgrade it")]
    Version {
        /// The version in the bytes.
        found: u16,
        /// The version that is read here.
        known: u16,
    },
    /// Too few or too many bytes.
    #[error("the model is {found} bytes long, not {expected}")]
    Length {
        /// The length that the header asks for.
        expected: usize,
        /// The length that there is.
        found: usize,
    },
}

/// Rotation and mean: what the codes of segments and delta pages are relative to.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Names the model within its index.
    pub id: u32,
    /// The metric of the index.
    pub metric: Metric,
    /// Dimensions of the vectors.
    pub dim: usize,
    /// Bits a dimension of the plane-1 codes.
    pub bits: usize,
    /// Seed of the rotation.
    pub seed: u64,
    /// Global mean, of the unit vectors under cosine.
    pub mean: Vec<f32>,
    rotation: Rotation,
    mean_norm: f64,
    /// R m.
    rotated_mean: Vec<f32>,
}

const VERSION: u16 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    version: U16,
    metric: u8,
    bits: u8,
    id: U32,
    dim: U32,
    reserved: U32,
    seed: U64,
}

impl Model {
    /// Bits a dimension of plane 1: 1 from 1,024 dimensions on, else 2 (decision 0013).
    pub const fn default_bits(dim: usize) -> usize {
        if dim >= 1_024 { 1 } else { 2 }
    }

    /// A model with the default bits. `mean` has `dim` elements (zeros if nothing is known of the rows);
    /// one longer than 1e15 is replaced by zeros, since nothing is gained by it.
    pub fn new(
        id: u32,
        metric: Metric,
        dim: usize,
        seed: u64,
        mut mean: Vec<f32>,
    ) -> Result<Self, ModelError> {
        if mean.iter().all(|x| x.is_finite())
            && kernel::norm_squared_f64(&mean).sqrt() > LONGEST_MEAN
        {
            mean.fill(0.0);
        }
        Self::with_bits(id, metric, dim, Self::default_bits(dim), seed, mean)
    }

    /// A model with these bits a dimension of plane 1: 1 or 2.
    pub fn with_bits(
        id: u32,
        metric: Metric,
        dim: usize,
        bits: usize,
        seed: u64,
        mean: Vec<f32>,
    ) -> Result<Self, ModelError> {
        if !(1..=MAX_DIM).contains(&dim) {
            return Err(ModelError::Dimension(dim));
        }
        if !(1..=2).contains(&bits) {
            return Err(ModelError::Bits(bits as u8));
        }
        if mean.len() != dim {
            return Err(ModelError::MeanDimension { expected: dim, found: mean.len() });
        }
        let mean_norm = kernel::norm_squared_f64(&mean).sqrt();
        if mean_norm.is_nan() || mean_norm > LONGEST_MEAN {
            return Err(ModelError::Mean);
        }
        let rotation = Rotation::new(dim, seed);
        let mut rotated_mean = mean.clone();
        rotated_mean.resize(rotation.padded_dim(), 0.0);
        rotation.rotate(&mut rotated_mean);
        Ok(Self { id, metric, dim, bits, seed, mean, rotation, mean_norm, rotated_mean })
    }

    /// Dimensions of model space, a multiple of 16.
    #[inline]
    pub fn padded_dim(&self) -> usize {
        self.rotation.padded_dim()
    }

    /// The model's rotation.
    #[inline]
    pub fn rotation(&self) -> &Rotation {
        &self.rotation
    }

    /// |m|.
    pub(super) fn mean_norm(&self) -> f64 {
        self.mean_norm
    }

    /// Takes a row of `dim` dimensions to model space. Panics if `out` has not [`Model::padded_dim`]
    /// elements.
    pub fn project_row(&self, v: &[f32], out: &mut [f32]) -> Result<(), RowError> {
        let norm = self.checked_norm(v)?;
        let factor = match self.metric {
            Metric::Cosine if bounded_range(norm) => 1.0 / norm,
            Metric::Cosine => UNBOUNDED_UNIT / norm,
            Metric::L2 | Metric::InnerProduct => (LONGEST / norm).min(1.0),
        };
        self.project(v, factor, &self.mean, out);
        Ok(())
    }

    /// Takes a row of model space back, up to rounding: for rows that are known only by their codes. Under
    /// cosine it has the length 1, whatever the row had. Panics if `x` has not the padded dimensions.
    pub fn unproject_row(&self, x: &[f32]) -> Vec<f32> {
        let mut v = x.to_vec();
        self.rotation.rotate_back(&mut v);
        v.truncate(self.dim);
        v.iter_mut().zip(&self.mean).for_each(|(v, m)| *v += m);
        v
    }

    /// Prepares a query of `dim` dimensions.
    pub fn query(&self, q: &[f32]) -> Result<Query, RowError> {
        Query::new(self, q)
    }

    /// The norm of a row or query that can be projected.
    pub(super) fn checked_norm(&self, v: &[f32]) -> Result<f64, RowError> {
        if v.len() != self.dim {
            return Err(RowError::Dimension { expected: self.dim, found: v.len() });
        }
        let norm = kernel::norm_squared_f64(v).sqrt();
        match self.metric {
            _ if !norm.is_finite() => Err(RowError::NotFinite),
            Metric::Cosine if norm == 0.0 => Err(RowError::ZeroNorm),
            _ => Ok(norm),
        }
    }

    /// R(factor v - offset).
    pub(super) fn project(&self, v: &[f32], factor: f64, offset: &[f32], out: &mut [f32]) {
        assert_eq!(out.len(), self.padded_dim(), "output of another dimension");
        let (used, padding) = out.split_at_mut(self.dim);
        kernel::scale_and_subtract(v, factor, offset, used);
        padding.fill(0.0);
        self.rotation.rotate(out);
    }

    /// Upper bound of the error that projecting made in `x`, of norm `norm`; infinite if `x` has no
    /// deterministic bound.
    pub(super) fn projection_error(&self, x: &[f32], norm: f64) -> f64 {
        if norm.is_nan() || norm > LONGEST_BOUNDED {
            return f64::INFINITY;
        }
        let mut error = self.scaling_error() + self.difference_error(norm);
        if self.metric == Metric::Cosine {
            let unit = kernel::norm_of_sum(x, &self.rotated_mean);
            if !(0.999..1.001).contains(&unit) {
                error = f64::INFINITY;
            }
        }
        error
    }

    /// What scaling to unit length adds: one rounding of each element.
    pub(super) fn scaling_error(&self) -> f64 {
        match self.metric {
            Metric::Cosine => 1.01 * UNIT_ROUNDOFF + self.dim as f64 * f64::from(f32::MIN_POSITIVE),
            Metric::L2 | Metric::InnerProduct => 0.0,
        }
    }

    /// What subtracting the mean and rotating add, for a result of this norm.
    pub(super) fn difference_error(&self, norm: f64) -> f64 {
        (UNIT_ROUNDOFF + self.rotation.relative_error()) * norm * 1.001
            + self.rotation.absolute_error()
    }

    /// Length of [`Model::to_bytes`].
    pub fn encoded_len(&self) -> usize {
        size_of::<Header>() + 4 * self.dim
    }

    /// The model's on-disk form: a header of 24 bytes (version u16, metric u8, bits u8, id u32, dim u32,
    /// zero u32, seed u64), then the mean.
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = Header {
            version: VERSION.into(),
            metric: self.metric.code(),
            bits: self.bits as u8,
            id: self.id.into(),
            dim: (self.dim as u32).into(),
            reserved: 0.into(),
            seed: self.seed.into(),
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(self.mean.iter().flat_map(|m| m.to_le_bytes()));
        bytes
    }

    /// Reads [`Model::to_bytes`]; anything else is an error.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ModelError> {
        let (model, rest) = Self::read_prefix(bytes)?;
        match rest.len() {
            0 => Ok(model),
            _ => Err(ModelError::Length { expected: model.encoded_len(), found: bytes.len() }),
        }
    }

    /// Reads one model from the start of `bytes`; also gives what follows it.
    pub fn read_prefix(bytes: &[u8]) -> Result<(Self, &[u8]), ModelError> {
        let length = |expected| ModelError::Length { expected, found: bytes.len() };
        let (header, rest) =
            Header::ref_from_prefix(bytes).map_err(|_| length(size_of::<Header>()))?;
        let version = header.version.get();
        if version != VERSION {
            return Err(ModelError::Version { found: version, known: VERSION });
        }
        let metric = Metric::from_code(header.metric).ok_or(ModelError::Metric(header.metric))?;
        if !(1..=2).contains(&header.bits) {
            return Err(ModelError::Bits(header.bits));
        }
        let dim = header.dim.get() as usize;
        if !(1..=MAX_DIM).contains(&dim) {
            return Err(ModelError::Dimension(dim));
        }
        let (mean, rest) = <[F32]>::ref_from_prefix_with_elems(rest, dim)
            .map_err(|_| length(size_of::<Header>() + 4 * dim))?;
        let mean = mean.iter().map(|m| m.get()).collect();
        let (id, seed) = (header.id.get(), header.seed.get());
        Ok((Self::with_bits(id, metric, dim, header.bits.into(), seed, mean)?, rest))
    }
}

/// Whether the norm of a row or query allows a deterministic bound.
pub(super) fn bounded_range(norm: f64) -> bool {
    (SHORTEST_BOUNDED..=LONGEST).contains(&norm)
}

/// The factor that brings a query into range, and whether it has a deterministic bound.
pub(super) fn query_factor(metric: Metric, norm: f64) -> (f64, bool) {
    match metric {
        Metric::Cosine => (1.0 / norm, bounded_range(norm)),
        Metric::L2 | Metric::InnerProduct => ((LONGEST / norm).min(1.0), norm <= LONGEST_BOUNDED),
    }
}
