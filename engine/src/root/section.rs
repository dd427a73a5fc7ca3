//! What a root is made of, and what can be wrong with it.

use std::fmt;

use crate::{
    quantize::ModelError,
    segment::{LayoutError, PartError},
};

/// What a section holds; the discriminant is its number in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum SectionKind {
    /// Metric, dimensions, and the models with their serialised forms.
    Models = 1,
    /// Plane-1 blocks of all centroids. One section a model, numbered like the models.
    CentroidBlocks = 2,
    /// Plane-2 records of all centroids. One section a model.
    CentroidRecords = 3,
    /// The cells. Their positions are the *slots* that everything else names them by.
    Cells = 4,
    /// Where the rows of each cell lie, by slot.
    Pieces = 5,
    /// The segments.
    Segments = 6,
    /// Miss rate by number of probed cells.
    Curves = 7,
    /// Pieces in segments flushed from the delta, by segment and slot: a flush appends here, and leaves
    /// [`SectionKind::Pieces`] as it is.
    DeltaPieces = 8,
    /// For each segment with slot references, the segments that it names.
    References = 9,
    /// Plane-1 blocks of the centroids of groups of cells: a second level above many cells.
    GroupBlocks = 10,
    /// Plane-2 records of the centroids of the groups.
    GroupRecords = 11,
    /// The cells of each group, as ranges of slots.
    GroupCells = 12,
}

impl SectionKind {
    /// The kind with this number in the format, if there is one.
    pub fn from_code(code: u16) -> Option<Self> {
        use SectionKind::*;
        [
            Models,
            CentroidBlocks,
            CentroidRecords,
            Cells,
            Pieces,
            Segments,
            Curves,
            DeltaPieces,
            References,
            GroupBlocks,
            GroupRecords,
            GroupCells,
        ]
        .into_iter()
        .find(|kind| *kind as u16 == code)
    }

    /// Whether there is one such section for each model.
    pub fn is_per_model(self) -> bool {
        matches!(self, Self::CentroidBlocks | Self::CentroidRecords)
    }
}

/// Names a section of a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SectionKey {
    /// What it holds.
    pub kind: SectionKind,
    /// Position of the model for sections of which each model has one, else 0.
    pub number: u16,
}

impl SectionKey {
    /// The only section of this kind, or that of the first model.
    pub const fn only(kind: SectionKind) -> Self {
        Self { kind, number: 0 }
    }

    /// The section's number where it is stored: `number << 16 | kind`.
    pub fn code(self) -> u32 {
        u32::from(self.number) << 16 | self.kind as u32
    }

    /// The key with this number, if it is one.
    pub fn from_code(code: u32) -> Option<Self> {
        let kind = SectionKind::from_code(code as u16)?;
        let number = (code >> 16) as u16;
        (number == 0 || kind.is_per_model()).then_some(Self { kind, number })
    }
}

impl From<SectionKind> for SectionKey {
    fn from(kind: SectionKind) -> Self {
        Self::only(kind)
    }
}

impl fmt::Display for SectionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)?;
        if self.number > 0 { write!(f, " {}", self.number) } else { Ok(()) }
    }
}

/// Why bytes are not a root.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RootError {
    /// Written by a library with another format.
    #[error(
        "root has format version {found}, this library reads version {known}: \
         update the polign library and polign-store, or REINDEX"
    )]
    Version {
        /// The root's version.
        found: u16,
        /// The only version known here.
        known: u16,
    },
    /// A section that this version of the format does not have.
    #[error("root has a section of unknown kind {0:#010x}")]
    UnknownSection(u32),
    /// The same section twice.
    #[error("root has section {0} twice")]
    DuplicateSection(SectionKey),
    /// A section is not there.
    #[error("root has no section {0}")]
    MissingSection(SectionKey),
    /// A section's length is not that of its records.
    #[error("section {section} of the root is {found} bytes long, expected {expected}")]
    Length {
        /// Which section.
        section: SectionKey,
        /// What the other sections give.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// A field of a section is out of range, or contradicts another one.
    #[error("section {section} of the root is damaged at entry {entry}: {what}")]
    Entry {
        /// Which section.
        section: SectionKey,
        /// Position of the entry.
        entry: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// A segment's entry, or a piece of it.
    #[error("section {section} of the root is damaged at entry {entry}: {cause}")]
    Layout {
        /// Which section.
        section: SectionKey,
        /// Position of the entry.
        entry: u64,
        /// What is wrong.
        cause: LayoutError,
    },
    /// A model's serialised form.
    #[error("model {entry} of the root is damaged: {cause}")]
    Model {
        /// Position of the model.
        entry: u64,
        /// What is wrong.
        cause: ModelError,
    },
    /// The frame of a root image.
    #[error("root image is damaged: {0}")]
    Image(PartError),
}

pub(super) fn entry(section: impl Into<SectionKey>, entry: usize, what: &'static str) -> RootError {
    RootError::Entry { section: section.into(), entry: entry as u64, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for kind in (0..=20).filter_map(SectionKind::from_code) {
            let key = SectionKey::only(kind);
            assert_eq!(key.code(), kind as u32);
            assert_eq!(SectionKey::from_code(key.code()), Some(key));
            let second = SectionKey { kind, number: 1 };
            let expected = kind.is_per_model().then_some(second);
            assert_eq!(SectionKey::from_code(second.code()), expected);
        }
        assert_eq!((0..=u16::MAX).filter_map(SectionKind::from_code).count(), 12);
    }
}
