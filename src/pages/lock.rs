//! The heavyweight locks of an index: on its layout, and on what it has in the store.
//!
//! The **layout lock**: VACUUM holds it in share mode for its pass; who publishes a new layout (flush, compaction) or frees
//! pages that the meta page does not reach holds it exclusively, briefly and never across I/O.
//!
//! Postgres cancels an autovacuum worker that others have waited for longer than `deadlock_timeout`. So
//! who wants the lock exclusively and can come back later takes it with [`LayoutLock::try_acquire`].
//!
//! The **maintenance lock** is held by one operation on the store at a time, from its ownership check
//! until what it wrote is published or what it deletes is deleted: flush, compaction, gc, VACUUM's check.
//! So whoever has it knows that no pending object is still on its way. It is taken before the layout lock.
//!
//! Both are object locks on the index with sub-ids that nothing else uses. A page lock on a reserved
//! block would do as well, but the deadlock detector of Postgres 16 does not look at page locks.

use std::{cell::Cell, ffi::c_int};

use pgrx::{pg_guard, pg_sys};

use super::relation::Index;

const SUB_ID: u16 = 1;
const MAINTENANCE_SUB_ID: u16 = 2;

/// How much of the layout is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutMode {
    /// Nobody publishes meanwhile.
    Share,
    /// Nobody else publishes or vacuums meanwhile.
    Exclusive,
}

impl LayoutMode {
    fn mode(self) -> pg_sys::LOCKMODE {
        match self {
            Self::Share => pg_sys::ShareLock as pg_sys::LOCKMODE,
            Self::Exclusive => pg_sys::ExclusiveLock as pg_sys::LOCKMODE,
        }
    }
}

/// The lock, released when dropped, or at the end of the transaction when an error unwinds.
pub struct LayoutLock {
    index: pg_sys::Oid,
    mode: LayoutMode,
}

impl LayoutLock {
    /// Waits for the lock, interruptibly.
    pub fn acquire(index: Index, mode: LayoutMode) -> Self {
        let oid = index.oid();
        // SAFETY: a transaction is in progress; waiting can raise, and then nothing is held.
        unsafe {
            pg_sys::LockDatabaseObject(pg_sys::RelationRelationId, oid, SUB_ID, mode.mode());
        }
        Self { index: oid, mode }
    }

    /// Takes the lock if it is free.
    pub fn try_acquire(index: Index, mode: LayoutMode) -> Option<Self> {
        let oid = index.oid();
        // SAFETY: a transaction is in progress.
        let locked = unsafe {
            pg_sys::ConditionalLockDatabaseObject(
                pg_sys::RelationRelationId,
                oid,
                SUB_ID,
                mode.mode(),
            )
        };
        // Not `then_some`: dropping one that is not held would release it.
        locked.then(|| Self { index: oid, mode })
    }
}

impl Drop for LayoutLock {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the lock is held since `acquire`.
            unsafe {
                pg_sys::UnlockDatabaseObject(
                    pg_sys::RelationRelationId,
                    self.index,
                    SUB_ID,
                    self.mode.mode(),
                );
            }
        }
    }
}

/// The lock on what an index has in the store, released when dropped, or when an error ends the
/// transaction: Postgres then gives up locks of the session too.
pub struct MaintenanceLock {
    tag: pg_sys::LOCKTAG,
    session: bool,
}

impl MaintenanceLock {
    /// Waits for the lock, interruptibly. It does not outlast the transaction.
    pub fn acquire(index: pg_sys::Oid) -> Self {
        Self::take(index, false, false).expect("waited for")
    }

    /// Takes the lock if it is free.
    pub fn try_acquire(index: pg_sys::Oid) -> Option<Self> {
        Self::take(index, false, true)
    }

    /// Waits for the lock, and holds it over the ends of transactions.
    pub fn acquire_for_session(index: pg_sys::Oid) -> Self {
        Self::take(index, true, false).expect("waited for")
    }

    /// Takes the lock if it is free, and holds it over the ends of transactions.
    pub fn try_acquire_for_session(index: pg_sys::Oid) -> Option<Self> {
        Self::take(index, true, true)
    }

    /// Whoever has the lock may take it again.
    fn take(index: pg_sys::Oid, session: bool, only_if_free: bool) -> Option<Self> {
        if session {
            release_at_exit();
        }
        let tag = maintenance_tag(index);
        // SAFETY: a complete tag; a transaction is in progress. Waiting can raise, and then nothing is
        // held. Who had the lock before may have changed what the catalogs say of the index.
        unsafe {
            let result = pg_sys::LockAcquire(&tag, MAINTENANCE_MODE, session, only_if_free);
            if result == pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL {
                return None;
            }
            pg_sys::AcceptInvalidationMessages();
        }
        Some(Self { tag, session })
    }
}

impl Drop for MaintenanceLock {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the lock is held since it was taken. A commit has released one of the transaction.
            unsafe {
                pg_sys::LockRelease(&self.tag, MAINTENANCE_MODE, self.session);
            }
        }
    }
}

/// A process that is terminated between two transactions would leave its locks of the session behind:
/// Postgres gives them up at the end of a transaction only.
fn release_at_exit() {
    thread_local! {
        static REGISTERED: Cell<bool> = const { Cell::new(false) };
    }
    if !REGISTERED.replace(true) {
        // SAFETY: a guarded function without an argument.
        unsafe { pg_sys::before_shmem_exit(Some(release_all), pg_sys::Datum::from(0)) };
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn release_all(_code: c_int, _argument: pg_sys::Datum) {
    // SAFETY: shared memory is still there. What a transaction holds goes with the transaction.
    unsafe {
        pg_sys::AbortOutOfAnyTransaction();
        pg_sys::LockReleaseAll(pg_sys::DEFAULT_LOCKMETHOD as u16, true);
    }
}

const MAINTENANCE_MODE: pg_sys::LOCKMODE = pg_sys::ExclusiveLock as pg_sys::LOCKMODE;

/// What `LockDatabaseObject` locks for this sub-id.
fn maintenance_tag(index: pg_sys::Oid) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        // SAFETY: set in every backend.
        locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
        locktag_field2: pg_sys::RelationRelationId.to_u32(),
        locktag_field3: index.to_u32(),
        locktag_field4: MAINTENANCE_SUB_ID,
        locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
    }
}
