use serde::{Deserialize, Serialize};

/// The distance of an operator class; the discriminant is its number in every on-disk format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Metric {
    /// Euclidean distance, pgvector's `<->`.
    L2 = 1,
    /// Negative inner product, pgvector's `<#>`.
    InnerProduct = 2,
    /// Cosine distance, pgvector's `<=>`.
    Cosine = 3,
}

impl Metric {
    /// The metric with this number in a format, if there is one.
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::L2),
            2 => Some(Self::InnerProduct),
            3 => Some(Self::Cosine),
            _ => None,
        }
    }

    /// This metric's number in every on-disk format.
    pub fn code(self) -> u8 {
        self as u8
    }
}
