//! VACUUM.

use std::{collections::HashSet, ffi::c_void};

use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};
use polign_engine::{
    ObjectId,
    root::Root,
    segment::{PartSource, SourceError, Want},
};

use super::{insert::id_item_pointer, root_cache};
use crate::{
    error::{Error, OrRaise, Result},
    failpoint,
    maintain::due,
    pages::{
        Here, Index, LayoutLock, LayoutMode, MaintenanceLock,
        delta::vacuum::{self as delta, DeltaVacuum},
        meta::{self, Meta},
        sweep::sweep,
        tombstones::{TombstoneSet, TombstoneWriter},
    },
    session,
};

/// Marks the rows dead that the callback names. Every stored id is reported, also because the validation
/// of CREATE INDEX CONCURRENTLY counts on it; if that cannot be done, it raises.
#[pg_guard]
pub unsafe extern "C-unwind" fn ambulkdelete(
    info: *mut pg_sys::IndexVacuumInfo,
    stats: *mut pg_sys::IndexBulkDeleteResult,
    callback: pg_sys::IndexBulkDeleteCallback,
    state: *mut c_void,
) -> *mut pg_sys::IndexBulkDeleteResult {
    let callback = callback.expect("Postgres always passes a callback");
    // SAFETY: Postgres passes a valid info with open relations, and stats that are null or palloc'd. The
    // callback is C code that may raise; the boundary turns that into a panic.
    unsafe {
        let index = Index::new((*info).index).with_heap((*info).heaprel);
        let mut is_dead = |id| {
            let mut tid = id_item_pointer(id);
            pg_sys::ffi::pg_guard_ffi_boundary(|| callback(&mut tid, state))
        };
        let found = bulk_delete(index, &mut is_dead).or_raise();
        let stats = or_new(stats);
        (*stats).num_pages = index.blocks();
        (*stats).estimated_count = false;
        (*stats).num_index_tuples = found.live as f64;
        (*stats).tuples_removed += found.removed as f64;
        (*stats).pages_newly_deleted += found.pages_freed;
        stats
    }
}

/// Counts rows, frees what is left over, and records free pages.
#[pg_guard]
pub unsafe extern "C-unwind" fn amvacuumcleanup(
    info: *mut pg_sys::IndexVacuumInfo,
    stats: *mut pg_sys::IndexBulkDeleteResult,
) -> *mut pg_sys::IndexBulkDeleteResult {
    // SAFETY: as above.
    unsafe {
        if (*info).analyze_only {
            return stats;
        }
        let index = Index::new((*info).index).with_heap((*info).heaprel);
        let is_new = stats.is_null();
        let stats = or_new(stats);
        if is_new {
            (*stats).num_index_tuples = count_live(index).or_raise() as f64;
        }
        let swept = sweep(index, |meta| named_objects(index, meta), &mut pause).or_raise();
        if let Err(error) = check_ownership(index) {
            error.warn();
        }
        (*stats).num_pages = swept.blocks;
        (*stats).pages_deleted = swept.deleted;
        (*stats).pages_free = swept.free;
        (*stats).pages_newly_deleted += swept.leftovers;
        due::at_vacuum(index);
        stats
    }
}

/// The objects that the root refers to.
fn named_objects(index: Index, meta: &Meta) -> Result<HashSet<ObjectId>> {
    let root = index.retry(|| root_cache::get(index, meta))?;
    Ok(root.segments().iter().map(|entry| entry.object).collect())
}

/// Sees whether this is a copy of an index that somebody else has too. Who else is there waits for that
/// with its garbage, so an index that is never written needs it as well. It can wait for the next VACUUM.
fn check_ownership(index: Index) -> Result<()> {
    // Whoever has the lock has checked.
    let Some(_lock) = MaintenanceLock::try_acquire(index.oid()) else { return Ok(()) };
    session::ownership::check(&mut Here(index))
}

/// # Safety
/// `stats` is null or palloc'd.
unsafe fn or_new(stats: *mut pg_sys::IndexBulkDeleteResult) -> *mut pg_sys::IndexBulkDeleteResult {
    if !stats.is_null() {
        return stats;
    }
    // SAFETY: palloc0 returns memory of that size or raises; all fields may be zero.
    unsafe { pg_sys::palloc0(size_of::<pg_sys::IndexBulkDeleteResult>()).cast() }
}

fn pause() {
    pgrx::check_for_interrupts!();
    // SAFETY: no lock is held where this is called.
    unsafe {
        #[cfg(feature = "pg18")]
        pg_sys::vacuum_delay_point(false);
        #[cfg(not(feature = "pg18"))]
        pg_sys::vacuum_delay_point();
    }
}

fn bulk_delete(index: Index, is_dead: &mut dyn FnMut(u64) -> bool) -> Result<DeltaVacuum> {
    // Nobody may publish until all marks are set: what is marked in a source after the copy of it would
    // be lost otherwise.
    let _lock = LayoutLock::acquire(index, LayoutMode::Share);
    let (meta, root) = root_cache::current(index)?;
    failpoint::pass("vacuum: begin");
    let mut found = delta::vacuum(index, is_dead, &mut pause)?;
    failpoint::pass("vacuum: delta");
    if !root.segments().is_empty() {
        let mut source = session::index_source(&meta)?;
        let (live, removed) = vacuum_segments(index, &meta, &root, &mut source, is_dead)?;
        found.live += live;
        found.removed += removed;
    }
    failpoint::pass("vacuum: segments");
    meta::count_marks(index)?;
    failpoint::pass("vacuum: counted");
    Ok(found)
}

/// Sets tombstones for dead rows of segments; gives how many rows are left and how many were removed.
fn vacuum_segments(
    index: Index,
    meta: &Meta,
    root: &Root,
    source: &mut dyn PartSource,
    is_dead: &mut dyn FnMut(u64) -> bool,
) -> Result<(u64, u64)> {
    let set = index.retry(|| TombstoneSet::read(index, meta))?;
    let mut writer = TombstoneWriter::new(index, meta.index_id, &set);
    let (mut live, mut removed) = (0, 0);
    let mut dead = Vec::new();
    let unreadable = |error| session::explain(error, meta).hint(WITHOUT_INDEXES);
    for_each_ids_part(root, source, unreadable, |segment, first, ids| {
        let known = set.segment(segment);
        dead.clear();
        for (ordinal, &id) in (first..).zip(ids) {
            if ordinal % 1024 == 0 {
                pause();
            }
            // One that is marked is not there any more; its TID may belong to another row by now.
            if known.is_some_and(|known| known.is_dead(ordinal)) {
                continue;
            }
            match is_dead(id) {
                true => dead.push(ordinal),
                false => live += 1,
            }
        }
        removed += writer.set(segment, &dead)?;
        Ok(())
    })?;
    Ok((live, removed))
}

/// Parts that are asked for ahead of the one that is read.
const AHEAD: usize = 16;

/// Calls `visit` with the ids of every segment of the root, part by part: segment, first ordinal, ids.
pub fn for_each_ids_part(
    root: &Root,
    source: &mut dyn PartSource,
    unreadable: impl Fn(SourceError) -> Error,
    mut visit: impl FnMut(ObjectId, u32, &[u64]) -> Result<()>,
) -> Result<()> {
    for (segment, entry) in (0..).zip(root.segments()) {
        read_ids(root, segment, source, &unreadable, |first, ids| visit(entry.object, first, ids))?;
    }
    Ok(())
}

/// Calls `visit` with the ids of one segment, part by part: first ordinal, ids.
pub fn read_ids(
    root: &Root,
    segment: u32,
    source: &mut dyn PartSource,
    unreadable: &dyn Fn(SourceError) -> Error,
    mut visit: impl FnMut(u32, &[u64]) -> Result<()>,
) -> Result<()> {
    let mut ids = Vec::new();
    let name = root.segment_name(segment);
    let parts: Vec<_> = root.geometry(segment).ids_parts().collect();
    let mut first = 0u32;
    for (at, &part) in parts.iter().enumerate() {
        pause();
        if at % AHEAD == 0 {
            let ahead = &parts[at..parts.len().min(at + AHEAD)];
            let wants: Vec<_> = ahead.iter().map(|&part| Want { object: &name, part }).collect();
            source.request(&wants);
        }
        loop {
            let view = source.acquire(Want { object: &name, part }).map_err(unreadable)?;
            ids.clear();
            let bytes = view.bytes();
            let words = (0..bytes.len() / 8).map_while(|at| bytes.read_u64_le(at * 8));
            ids.extend(words);
            if source.still_valid(&view) {
                break;
            }
        }
        let expected = root.geometry(segment).payload_len(&part) / 8;
        ids.truncate(expected);
        if ids.len() != expected {
            let message = format!("object \"{}\" holds fewer ids than the index says", name.key());
            return Err(Error::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, message)
                .hint("REINDEX the index."));
        }
        visit(first, &ids)?;
        first += expected as u32;
    }
    Ok(())
}

const WITHOUT_INDEXES: &str = "VACUUM cannot skip rows of the index. To vacuum the table without its \
                               indexes, use VACUUM (INDEX_CLEANUP off).";

/// Rows of the index that are not marked dead.
pub fn count_live(index: Index) -> Result<u64> {
    index.retry(|| {
        let meta = meta::read(index)?;
        let dead = TombstoneSet::read(index, &meta)?.dead();
        Ok(meta.rows.saturating_sub(dead) + delta::count(index)?.live)
    })
}
