//! What a search reads from.

use super::rows::{DeltaRows, Tombstones};
use crate::{
    root::Root,
    segment::{PartError, PartRef, PartSource, PartView, SourceError, Want},
};

/// What a search reads from, lent to it for each call.
pub struct Environment<'a> {
    pub source: &'a mut dyn PartSource,
    pub delta: &'a mut dyn DeltaRows,
    pub dead: &'a dyn Tombstones,
}

impl Environment<'_> {
    /// Asks for parts of segments (by their position in the root), without waiting.
    pub(super) fn request(&mut self, root: &Root, parts: &[(u32, PartRef)]) {
        let names: Vec<_> = parts.iter().map(|&(segment, _)| root.segment_name(segment)).collect();
        let wants: Vec<_> =
            names.iter().zip(parts).map(|(object, &(_, part))| Want { object, part }).collect();
        self.source.request(&wants);
    }

    pub(super) fn acquire(
        &mut self,
        root: &Root,
        segment: u32,
        part: PartRef,
    ) -> Result<PartView, SourceError> {
        self.source.acquire(Want { object: &root.segment_name(segment), part })
    }

    /// The error for a part that is intact but shorter than the root says.
    pub(super) fn too_short(
        &self,
        root: &Root,
        segment: u32,
        part: PartRef,
        needed: usize,
        found: usize,
    ) -> SourceError {
        SourceError::Damaged {
            object: root.segment_name(segment).key(),
            store: self.source.store().to_owned(),
            part: part.key,
            cause: PartError::TooShort { needed: needed as u64, found: found as u64 }.to_string(),
        }
    }
}
