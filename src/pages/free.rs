//! Free pages: giving them up and taking them again.
//!
//! A freed page carries the next full transaction id of that moment and is taken again only when no
//! snapshot is older. Which pages are free is kept in Postgres' free space map, which is not logged and
//! need not be right: what a page says about itself, under its lock, decides. VACUUM repairs the map.

use pgrx::pg_sys;
use polign_engine::ObjectId;
use polign_pages::{Freshness, Link, PageRef};

use super::{
    record::Record,
    relation::{Index, Locked, Pin},
};
use crate::error::Result;

/// A pinned block that was free when it was found.
pub(super) struct Spare {
    index: Index,
    pin: Option<Pin>,
}

impl Spare {
    /// Finds a free block, or extends the relation by one.
    pub fn find(index: Index) -> Self {
        loop {
            // SAFETY: the relation is open.
            let block = unsafe { pg_sys::GetFreeIndexPage(index.relation()) };
            if block == pg_sys::InvalidBlockNumber {
                break;
            }
            // After a crash the map may name blocks that were never added to the relation.
            if block >= index.blocks() {
                continue;
            }
            let pin = index.pin(block);
            let Some(locked) = pin.try_lock() else { continue };
            if may_take(index, locked.bytes()) {
                drop(locked);
                return Self { index, pin: Some(index.pin(block)) };
            }
        }
        let relation =
            pg_sys::BufferManagerRelation { rel: index.relation(), ..Default::default() };
        // SAFETY: the relation is open; the result is a pinned buffer of a zeroed page.
        let pin = unsafe {
            Pin::from_raw(pg_sys::ExtendBufferedRel(
                relation,
                pg_sys::ForkNumber::MAIN_FORKNUM,
                std::ptr::null_mut(),
                0,
            ))
        };
        Self { index, pin: Some(pin) }
    }

    /// Locks the block, if it is still free. Never waits, so it may be called with other pages locked.
    pub fn take(mut self) -> Option<Locked> {
        let locked = self.pin.take()?.try_lock()?;
        may_take(self.index, locked.bytes()).then_some(locked)
    }
}

impl Drop for Spare {
    /// A block that was not needed goes back to the map.
    fn drop(&mut self) {
        if let Some(pin) = self.pin.take()
            && !std::thread::panicking()
        {
            // SAFETY: the relation is open.
            unsafe { pg_sys::RecordFreeIndexPage(self.index.relation(), pin.block()) }
        }
    }
}

/// Whether a page says that it may be reused now.
pub(super) fn may_take(index: Index, bytes: &[u8]) -> bool {
    match PageRef::freshness(bytes) {
        Ok(Freshness::New) => true,
        Ok(Freshness::Freed(xid)) => removable(index, xid),
        // A damaged page is left for whoever refers to it to report.
        Ok(Freshness::Used) | Err(_) => false,
    }
}

/// Whether every snapshot is newer than this full transaction id.
pub(super) fn removable(index: Index, xid: u64) -> bool {
    // SAFETY: null stands for a table that every database shares, the most cautious choice.
    unsafe {
        pg_sys::GlobalVisCheckRemovableFullXid(
            index.heap(),
            pg_sys::FullTransactionId { value: xid },
        )
    }
}

/// The next full transaction id: what a page carries that is freed now.
pub(super) fn next_xid() -> u64 {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::ReadNextFullTransactionId() }.value
}

/// Frees pages that nothing refers to any more. One that is freed or reused already is left alone.
pub fn free_pages(
    index: Index,
    index_id: ObjectId,
    pages: impl IntoIterator<Item = Link>,
) -> Result<u32> {
    let mut freed = 0;
    for link in pages {
        let mut record = Record::start(index);
        let locked = index.lock(link.block);
        match PageRef::follow_any(locked.bytes(), index_id, link.stamp) {
            Ok(page) if !page.is_freed() => (),
            _ => continue,
        }
        let xid = next_xid();
        let at = record.change(locked);
        record.page(at).map_err(|error| index.damaged(link.block, error))?.free(xid);
        record.finish();
        freed += 1;
    }
    Ok(freed)
}
