//! One consistent reading of an index: meta page, root, tombstones, delta.

use std::rc::Rc;

use pgrx::pg_sys;

use super::{
    delta::rows::DeltaRows,
    meta::{self, Meta},
    relation::{Access, Index},
    tombstones::TombstoneSet,
};
use crate::error::Result;

/// What a scan works on. All of it is copied: nothing here refers to a page, except that refinement
/// records of delta rows are read later, by links that tell when they lead nowhere.
pub struct Snapshot<R> {
    /// The meta page.
    pub meta: Rc<Meta>,
    /// What the caller made of the root.
    pub root: R,
    /// Dead rows of segments.
    pub tombstones: Rc<TombstoneSet>,
    /// Rows that are in no segment.
    pub delta: DeltaRows,
}

/// Reads an index as of one moment, which is not before the call: so whatever is committed by the
/// transaction snapshot `held` of the caller is in it. `root` gets the meta page and gives the root
/// that it names, cached by its id or read (`blob::read_root`). It may be called more than once.
///
/// # Safety
/// `held` is null or a valid snapshot.
pub unsafe fn read<R>(
    index: Index,
    held: pg_sys::Snapshot,
    mut root: impl FnMut(&Rc<Meta>) -> Access<R>,
) -> Result<Snapshot<R>> {
    let mut read_once = || {
        let meta = meta::read(index)?;
        let root = root(&meta)?;
        let tombstones = TombstoneSet::read(index, &meta)?;
        let delta = DeltaRows::read(index, &meta)?;
        let after = meta::read(index)?;
        let same = after.index_id == meta.index_id && after.epoch == meta.epoch;
        Ok(same.then_some(Snapshot { meta, root, tombstones, delta }))
    };
    loop {
        if let Some(snapshot) = index.retry(&mut read_once)? {
            let newest = snapshot.delta.newest_lsn().max(snapshot.tombstones.newest_lsn());
            // SAFETY: by contract.
            unsafe { check_old_snapshot(index, held, newest)? };
            return Ok(snapshot);
        }
    }
}

/// Raises if VACUUM may have removed rows that the snapshot sees: with `old_snapshot_threshold`, which
/// Postgres 17 dropped, it may.
///
/// # Safety
/// `held` is null or a valid snapshot.
#[cfg(feature = "pg16")]
unsafe fn check_old_snapshot(index: Index, held: pg_sys::Snapshot, newest_lsn: u64) -> Result<()> {
    // SAFETY: by contract; the relation is open.
    unsafe {
        if pg_sys::old_snapshot_threshold >= 0
            && let Some(snapshot) = held.as_ref()
            && snapshot.snapshot_type == pg_sys::SnapshotType::SNAPSHOT_MVCC
            && snapshot.lsn != 0
            // Pages that VACUUM took out of a chain are not among those that were read; it counts what
            // it does in the meta page.
            && newest_lsn.max(meta::lsn(index)?) > snapshot.lsn
        {
            pg_sys::TestForOldSnapshot_impl(held, index.relation());
        }
    }
    Ok(())
}

/// # Safety
/// None needed.
#[cfg(not(feature = "pg16"))]
unsafe fn check_old_snapshot(_: Index, _: pg_sys::Snapshot, _: u64) -> Result<()> {
    Ok(())
}
