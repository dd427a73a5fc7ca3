//! The pages of an index: each block, the lists, and every row of the delta.

use polign_pages::{
    Freshness, PageError, PageKind, PageRef, codes::Codes, meta::Meta, tombstones::Tombstones,
    vectors::Vectors,
};
use roaring::RoaringTreemap;

use super::{Problems, State, Subject, tid};
use crate::{
    error,
    pages::{
        Index,
        delta::record,
        objects::{self, ObjectList},
    },
};

/// Looks at every block by itself.
pub(super) fn check_blocks(index: Index, problems: &mut Problems) {
    let mut image = vec![0; polign_pages::PAGE_LEN];
    for block in 0..index.blocks() {
        pgrx::check_for_interrupts!();
        index.read_block(block, &mut image);
        let checked = match PageRef::freshness(&image) {
            Ok(Freshness::Used) => PageRef::parse(&image).and_then(check_content),
            Ok(Freshness::New | Freshness::Freed(_)) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = checked {
            problems.add(Subject::Page, format!("block {block}"), error);
        }
    }
}

/// Whether the content is what a page of this kind holds. (That of blobs has checksums in the pages that
/// lead there.)
fn check_content(page: PageRef<'_>) -> Result<(), PageError> {
    match page.kind() {
        PageKind::Meta => Meta::decode(page).map(|_| ()),
        PageKind::Codes => Codes::parse(page).map(|_| ()),
        PageKind::Vectors => Vectors::parse(page).map(|_| ()),
        PageKind::Tombstones => Tombstones::parse(page).map(|_| ()),
        PageKind::Pending | PageKind::Retired => polign_pages::objects::records(page).map(|_| ()),
        PageKind::BlobData | PageKind::BlobMap => Ok(()),
    }
}

/// The lists of pending and retired objects can be read.
pub(super) fn check_lists(index: Index, problems: &mut Problems) {
    for list in [ObjectList::Pending, ObjectList::Retired] {
        problems.unless_fails(Subject::Page, "", objects::read(index, list));
    }
}

/// Every row of the delta that is not dead has its record; notes the rows.
pub(super) fn check_delta(
    index: Index,
    state: &State,
    rows: &mut RoaringTreemap,
    problems: &mut Problems,
) -> error::Result<()> {
    let mut bytes = Vec::new();
    for handle in state.delta.handles() {
        if handle % 1024 == 0 {
            pgrx::check_for_interrupts!();
        }
        let id = state.delta.id(handle);
        if !rows.insert(id) {
            problems.add(Subject::Row, tid(id), "it is in the delta twice");
        }
        match record::of_row(index, &state.delta, handle, &mut bytes) {
            // If it is not there, the row was flushed or vacuumed since the delta was read.
            Ok(true | false) => {}
            Err(error) => problems.error(Subject::Page, tid(id), &error),
        }
    }
    Ok(())
}
