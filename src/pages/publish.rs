//! Publishing a new root: one record that flips the meta page, and what comes before and after it.

use std::collections::HashSet;

use polign_engine::ObjectId;
use polign_pages::objects::ObjectRecord;

use super::{
    blob,
    delta::flush::SealedRows,
    free::free_pages,
    lock::{LayoutLock, LayoutMode},
    meta::{self, Meta},
    objects::{self, ObjectList},
    relation::Index,
    tombstones::{self, TombstoneSet, TombstoneWriter},
};
use crate::{error::Result, failpoint};

/// What is to replace the root of `basis`.
pub struct Publication<'a> {
    /// The meta page that the new root was made from.
    pub basis: &'a Meta,
    /// The sections of the new root.
    pub sections: &'a [(u32, &'a [u8])],
    /// The objects that the new root refers to.
    pub objects: &'a HashSet<ObjectId>,
    /// Objects that only the old root refers to; at most as many as fit in one page.
    pub retired: &'a [ObjectRecord],
    /// Rows of the delta that are in the new root.
    pub flushed: Option<&'a SealedRows>,
    /// What else changes in the meta page.
    pub change: &'a dyn Fn(&mut Meta),
}

/// What came of a publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    Yes,
    /// VACUUM is at work: nothing was done, to be tried again. (Whoever waited for the lock would have an
    /// autovacuum worker cancelled.)
    Busy,
    /// The root is not any more the one that the new one was made from: nothing was done.
    Changed,
}

/// Publishes. `dead` gives the rows of new segments whose sources are marked dead by now: segment and
/// ascending ordinals. It is called under the lock that keeps VACUUM out.
///
/// Only one process at a time may be between reading `basis` and the return from here: it holds the
/// maintenance lock. So as long as the root is the same, all sources are there.
pub fn publish(
    index: Index,
    publication: &Publication<'_>,
    dead: impl FnOnce(&TombstoneSet) -> Result<Vec<(ObjectId, Vec<u32>)>>,
) -> Result<Published> {
    let Some(lock) = LayoutLock::try_acquire(index, LayoutMode::Exclusive) else {
        return Ok(Published::Busy);
    };
    let meta = meta::read(index)?;
    let basis = publication.basis;
    if meta.index_id != basis.index_id || meta.root_id != basis.root_id {
        return Ok(Published::Changed);
    }
    let head = match publication.flushed {
        Some(rows) => rows.next_head(index, &meta)?,
        None => None,
    };
    failpoint::pass("publish: locked");
    let set = index.retry(|| TombstoneSet::read(index, &meta))?;
    let mut writer = TombstoneWriter::new(index, meta.index_id, &set);
    for (segment, ordinals) in dead(&set)? {
        // Nobody looks at these until the flip: the root does not name the segment.
        writer.set(segment, &ordinals)?;
    }
    failpoint::pass("publish: marked");
    let epoch = meta.epoch + 1;
    let written = blob::write_root(index, &meta, epoch, publication.sections)?;
    failpoint::pass("publish: root written");
    let root_id = meta::random_id()?;
    let flip = |meta: &mut Meta| {
        meta.sections.clone_from(&written.sections);
        meta.root_id = root_id;
        meta.epoch = epoch;
        if publication.flushed.is_some() {
            meta.delta.head = head;
        }
        (publication.change)(meta);
    };
    objects::append_with(index, ObjectList::Retired, publication.retired, flip)?;

    failpoint::pass("publish: flipped");
    // From here on everything is repaired by the next sweep, should it not be reached.
    free_pages(index, meta.index_id, written.replaced.iter().copied())?;
    failpoint::pass("publish: root freed");
    if let Some(rows) = publication.flushed {
        rows.free(index, meta.index_id)?;
    }
    failpoint::pass("publish: delta freed");
    tombstones::retain(index, |object| publication.objects.contains(&object))?;
    failpoint::pass("publish: tombstones gone");
    // Also what an earlier publication did not come to: one list has an object, not two.
    let retired = |object| publication.retired.iter().any(|record| record.object == object);
    objects::retain(index, ObjectList::Pending, |record| {
        !publication.objects.contains(&record.object) && !retired(record.object)
    })?;
    failpoint::pass("publish: done");
    drop(lock);
    Ok(Published::Yes)
}
