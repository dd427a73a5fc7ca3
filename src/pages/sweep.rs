//! The sweep at the end of VACUUM: pages that a crash or an error left behind, and the map of free ones.

use std::collections::HashSet;

use pgrx::pg_sys;
use polign_engine::ObjectId;
use polign_pages::{
    Freshness, Link, PageKind, PageRef, codes::Codes, meta::META_BLOCK, vectors::Vectors,
};

use super::{
    blob,
    free::{free_pages, removable},
    lock::{LayoutLock, LayoutMode},
    meta::{self, Meta},
    relation::{Index, PageImage},
    tombstones,
};
use crate::{error::Result, failpoint};

/// What a sweep found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepStats {
    /// Blocks of the relation.
    pub blocks: u32,
    /// Freed pages, reusable or not yet.
    pub deleted: u32,
    /// Pages that may be reused now.
    pub free: u32,
    /// Pages that nothing led to, freed by this sweep.
    pub leftovers: u32,
}

/// Looks at every page: frees those that the meta page does not lead to (if nobody publishes or vacuums
/// right now) and tombstones of objects that are not `named` by the root, and records the reusable ones in
/// the free space map. `pause` is called between pages.
pub fn sweep(
    index: Index,
    named: impl FnOnce(&Meta) -> Result<HashSet<ObjectId>>,
    pause: &mut dyn FnMut(),
) -> Result<SweepStats> {
    let mut leftovers = Vec::new();
    let mut tombstones = 0;
    if let Some(_lock) = LayoutLock::try_acquire(index, LayoutMode::Exclusive) {
        let meta = meta::read(index)?;
        let reachable = Reachable::find(index, &meta)?;
        each_block(index, |block, page| {
            if let Ok(page) = page
                && !page.is_freed()
                && page.index_id() == meta.index_id
                && !reachable.covers(block, &page)
            {
                leftovers.push(Link { block, stamp: page.stamp() });
            }
        });
        failpoint::pass("sweep: before");
        free_pages(index, meta.index_id, leftovers.iter().copied())?;
        failpoint::pass("sweep: after");
        let named = named(&meta)?;
        tombstones = tombstones::retain(index, |object| named.contains(&object))?;
    }
    let leftovers = leftovers.len() as u32 + tombstones;
    Ok(SweepStats { leftovers, ..find_free(index, pause) })
}

/// Records the reusable pages in the free space map. `pause` is called between pages.
pub fn find_free(index: Index, pause: &mut dyn FnMut()) -> SweepStats {
    let mut stats = SweepStats::default();
    stats.blocks = each_freshness(index, pause, |block, freshness| {
        let is_free = match freshness {
            Freshness::Used => return,
            Freshness::New => true,
            Freshness::Freed(xid) => removable(index, xid),
        };
        stats.deleted += 1;
        if is_free {
            stats.free += 1;
            // SAFETY: the relation is open.
            unsafe { pg_sys::RecordFreeIndexPage(index.relation(), block) }
        }
    });
    // SAFETY: the relation is open.
    unsafe { pg_sys::IndexFreeSpaceMapVacuum(index.relation()) }
    stats
}

/// Without the pauses of a gentle VACUUM: who wants to publish waits.
fn each_block(
    index: Index,
    mut visit: impl FnMut(u32, std::result::Result<PageRef<'_>, polign_pages::PageError>),
) {
    let mut image = PageImage::new();
    for block in META_BLOCK + 1..index.blocks() {
        pgrx::check_for_interrupts!();
        index.copy_block(block, &mut image);
        visit(block, image.page());
    }
}

fn each_freshness(
    index: Index,
    pause: &mut dyn FnMut(),
    mut visit: impl FnMut(u32, Freshness),
) -> u32 {
    let blocks = index.blocks();
    for block in META_BLOCK + 1..blocks {
        pause();
        // A damaged page is not free; whoever refers to it reports it.
        let freshness = index.pin(block).share(PageRef::freshness).unwrap_or(Freshness::Used);
        visit(block, freshness);
    }
    blocks
}

/// What the meta page leads to. Pages of the delta that an inserter adds meanwhile are covered without
/// being listed: their generation is not older than the head's.
struct Reachable {
    pages: HashSet<Link>,
    /// Generation of the first code page; `None` while the delta has no page.
    generation: Option<u64>,
}

impl Reachable {
    fn find(index: Index, meta: &Meta) -> Result<Self> {
        let mut pages = HashSet::new();
        for head in &meta.sections {
            pages.extend(blob::links(index, meta, head).map_err(|fault| index.settled(fault))?);
        }
        pages.extend(tombstones::links(index, meta).map_err(|fault| index.settled(fault))?);
        let generation = match meta.delta.head {
            None => None,
            Some(head) => {
                let mut image = PageImage::new();
                index
                    .copy(head, meta.index_id, PageKind::Codes, &mut image)
                    .map_err(|fault| index.settled(fault))?;
                let codes = image.page().and_then(Codes::parse);
                Some(codes.map_err(|error| index.damaged(head.block, error))?.generation())
            }
        };
        Ok(Self { pages, generation })
    }

    fn covers(&self, block: u32, page: &PageRef<'_>) -> bool {
        let of_delta = |generation: Option<u64>| match (generation, self.generation) {
            (Some(of_page), Some(of_head)) => of_page >= of_head,
            // Damaged, or added since the meta page was read.
            _ => true,
        };
        match page.kind() {
            PageKind::Meta | PageKind::Pending | PageKind::Retired => true,
            PageKind::BlobData | PageKind::BlobMap | PageKind::Tombstones => {
                self.pages.contains(&Link { block, stamp: page.stamp() })
            }
            PageKind::Codes => of_delta(Codes::parse(*page).ok().map(|codes| codes.generation())),
            PageKind::Vectors => {
                of_delta(Vectors::parse(*page).ok().map(|vectors| vectors.group().generation))
            }
        }
    }
}
