//! VACUUM of the delta: dead flags, and pages of which nothing is left.

use polign_engine::ObjectId;
use polign_pages::{
    Link, PageError, PageKind, PageRef,
    codes::{self, Codes},
};

use super::super::{
    free::{free_pages, next_xid},
    meta::{self, Open},
    record::Record,
    relation::{Access, ChainGuard, Index, PageImage},
};
use crate::error::Result;

/// What a pass over the delta found and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeltaVacuum {
    /// Rows left.
    pub live: u64,
    /// Rows that this pass marked dead.
    pub removed: u64,
    /// Pages that this pass freed.
    pub pages_freed: u32,
}

/// How many rows the delta has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeltaCount {
    /// Rows that are not marked dead.
    pub live: u64,
    /// Rows marked dead whose page is not freed yet.
    pub dead: u64,
    /// Code pages.
    pub pages: u32,
}

/// Walks the code pages from the head, with a copy of each.
fn walk(
    index: Index,
    index_id: ObjectId,
    mut link: Option<Link>,
    mut visit: impl FnMut(Link, PageRef<'_>, Codes<'_>) -> Result<()>,
) -> Access<()> {
    let mut image = PageImage::new();
    let mut guard = ChainGuard::new();
    while let Some(here) = link {
        guard.step(index, here)?;
        index.copy(here, index_id, PageKind::Codes, &mut image)?;
        let damaged = |error| index.damaged(here.block, error);
        let page = image.page().map_err(damaged)?;
        visit(here, page, Codes::parse(page).map_err(damaged)?)?;
        link = page.next();
    }
    Ok(())
}

/// Reports every row that is not marked dead to `is_dead`, marks those for which it says yes, and frees
/// pages without live rows, except the last of the chain. The caller holds the layout lock in share
/// mode, and lets scans see the marks by [`meta::count_marks`]. `is_dead` and `pause` are called with no page locked and may raise.
pub fn vacuum(
    index: Index,
    is_dead: &mut dyn FnMut(u64) -> bool,
    pause: &mut dyn FnMut(),
) -> Result<DeltaVacuum> {
    let meta = meta::read(index)?;
    let index_id = meta.index_id;
    let mut result = DeltaVacuum::default();
    let mut previous = None;
    walk(index, index_id, meta.delta.head, |here, page, codes| {
        pause();
        let mut live = 0;
        let mut dead = Vec::new();
        for (slot, entry) in (0..).zip(codes.entries()) {
            match entry.dead {
                true => (),
                false if is_dead(entry.id) => dead.push(slot),
                false => live += 1,
            }
        }
        if !dead.is_empty() {
            result.removed += u64::from(mark_dead(index, index_id, here, &dead)?);
        }
        result.live += live;
        match page.next() {
            // A page that is not the last gets no more entries, so what is dead here stays dead.
            Some(next) if live == 0 => {
                result.pages_freed += free_vectors(index, index_id, &codes)?;
                unlink(index, index_id, previous, here, next)?;
                result.pages_freed += 1;
            }
            _ => previous = Some(here),
        }
        Ok(())
    })
    // Nobody else unlinks pages while the layout is locked.
    .map_err(|fault| index.settled(fault))?;
    Ok(result)
}

fn mark_dead(index: Index, index_id: ObjectId, link: Link, slots: &[u16]) -> Result<u16> {
    let damaged = |error| index.damaged(link.block, error);
    let mut record = Record::start(index);
    let locked = index.lock(link.block);
    PageRef::follow(locked.bytes(), index_id, link.stamp, PageKind::Codes).map_err(damaged)?;
    let at = record.change(locked);
    let marked =
        record.page(at).and_then(|mut page| codes::mark_dead(&mut page, slots)).map_err(damaged)?;
    record.finish();
    Ok(marked)
}

/// Frees the vector pages of a code page without live rows. They go first: if a crash comes between, the
/// code page still leads here, and the next pass finds them freed already.
fn free_vectors(index: Index, index_id: ObjectId, codes: &Codes<'_>) -> Result<u32> {
    free_pages(index, index_id, vector_links(index, index_id, codes)?)
}

/// Every page of refinement records of a code page.
pub(super) fn vector_links(
    index: Index,
    index_id: ObjectId,
    codes: &Codes<'_>,
) -> Result<Vec<Link>> {
    let mut pages = Vec::new();
    for first in codes.vector_pages() {
        let mut link = Some(first);
        let mut guard = ChainGuard::new();
        while let Some(here) = link {
            guard.step(index, here)?;
            pages.push(here);
            link = index.pin(here.block).share(|bytes| {
                PageRef::follow(bytes, index_id, here.stamp, PageKind::Vectors)
                    .ok()
                    .and_then(|page| page.next())
            });
        }
    }
    Ok(pages)
}

/// Takes a page out of the chain and frees it, in one record with the page (or meta) before it.
fn unlink(
    index: Index,
    index_id: ObjectId,
    previous: Option<Link>,
    here: Link,
    next: Link,
) -> Result<()> {
    let mut record = Record::start(index);
    let here_pin = index.pin(here.block);
    let not_linked = || {
        let error = PageError::Content("the chain of the delta does not lead here");
        index.damaged(here.block, error)
    };
    match previous {
        Some(previous) => {
            let damaged = |error| index.damaged(previous.block, error);
            let locked = index.lock(previous.block);
            let page = PageRef::follow(locked.bytes(), index_id, previous.stamp, PageKind::Codes)
                .map_err(damaged)?;
            if page.next() != Some(here) {
                return Err(not_linked());
            }
            let at = record.change(locked);
            record.page(at).map_err(damaged)?.set_next(Some(next));
        }
        None => {
            let mut open = Open::lock(index, &mut record)?;
            if open.meta.delta.head != Some(here) {
                return Err(not_linked());
            }
            open.meta.delta.head = Some(next);
            open.write(index, &mut record)?;
        }
    }
    let damaged = |error| index.damaged(here.block, error);
    let locked = here_pin.lock();
    PageRef::follow(locked.bytes(), index_id, here.stamp, PageKind::Codes).map_err(damaged)?;
    let xid = next_xid();
    let at = record.change(locked);
    record.page(at).map_err(damaged)?.free(xid);
    record.finish();
    Ok(())
}

/// Counts the rows of the delta.
pub fn count(index: Index) -> Result<DeltaCount> {
    index.retry(|| {
        let meta = meta::read(index)?;
        let mut result = DeltaCount::default();
        walk(index, meta.index_id, meta.delta.head, |_, _, codes| {
            pgrx::check_for_interrupts!();
            result.dead += u64::from(codes.dead());
            result.live += u64::from(codes.len() - codes.dead());
            result.pages += 1;
            Ok(())
        })?;
        Ok(result)
    })
}
