//! Which indexes there are, and what else the server knows without the store.

use std::{
    collections::{BTreeSet, HashSet},
    ffi::CStr,
    ptr::null_mut,
};

use pgrx::pg_sys;
use polign_engine::ObjectId;

use crate::{
    error::Result,
    pages::{Index, meta},
    sql_api::target::{ACCESS_METHOD, OpenIndex, TryOpen},
};

/// An index as the catalog has it now.
pub struct Entry {
    pub oid: pg_sys::Oid,
    /// A temporary one of another session, which has its pages for itself.
    pub is_elsewhere: bool,
}

/// The indexes of this access method in this database, whatever the transaction's snapshot sees.
pub fn indexes() -> Vec<Entry> {
    let mut found = Vec::new();
    // SAFETY: looks up a name.
    let method = unsafe { pg_sys::get_am_oid(ACCESS_METHOD.as_ptr(), true) };
    let mut visit = |form: &pg_sys::FormData_pg_class| {
        if form.relam == method && form.relkind as u8 == pg_sys::RELKIND_INDEX {
            let temporary = form.relpersistence as u8 == pg_sys::RELPERSISTENCE_TEMP;
            // SAFETY: compares the namespace with those of the session.
            let own = unsafe { pg_sys::isTempOrTempToastNamespace(form.relnamespace) };
            found.push(Entry { oid: form.oid, is_elsewhere: temporary && !own });
        }
    };
    // SAFETY: rows of pg_class begin with this struct.
    unsafe { each_row(pg_sys::RelationRelationId, &mut visit) };
    found
}

/// Shows `visit` the fixed part of each row of a catalog as it is now.
///
/// # Safety
/// In a transaction; `T` is what the rows of `catalog` begin with.
pub unsafe fn each_row<T>(catalog: pg_sys::Oid, visit: &mut dyn FnMut(&T)) {
    // SAFETY: by contract; what is raised in between ends the scan with the transaction.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let table = pg_sys::table_open(catalog, lock);
        pg_sys::InvalidateCatalogSnapshot();
        let scan =
            pg_sys::systable_beginscan(table, pg_sys::InvalidOid, false, null_mut(), 0, null_mut());
        loop {
            pgrx::check_for_interrupts!();
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            let data = (*tuple).t_data;
            let form = data.cast::<u8>().add(usize::from((*data).t_hoff));
            visit(&*form.cast::<T>());
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(table, lock);
    }
}

/// The writer ids under which the indexes of this database go on.
#[derive(Default)]
pub struct Carried {
    writers: HashSet<ObjectId>,
    /// Their ids, which copies of them share.
    indexes: HashSet<ObjectId>,
    /// The stores that they are in.
    pub stores: BTreeSet<String>,
    /// Temporary indexes of other sessions.
    elsewhere: HashSet<u32>,
    /// An index that somebody has locked: its writer id is not known now.
    pub locked: Option<String>,
}

impl Carried {
    /// Looks at every index.
    pub fn read() -> Result<Self> {
        let mut carried = Self::default();
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        for Entry { oid, is_elsewhere } in indexes() {
            pgrx::check_for_interrupts!();
            if is_elsewhere {
                carried.elsewhere.insert(oid.to_u32());
                continue;
            }
            match OpenIndex::if_free(oid, lock)? {
                TryOpen::Open(open) => carried.add(open.pages())?,
                TryOpen::Locked => carried.locked = Some(index_name(oid)),
                TryOpen::Gone => {}
            }
        }
        Ok(carried)
    }

    fn add(&mut self, index: Index) -> Result<()> {
        // One that is being built, or whose build was killed, is no index yet.
        if !meta::is_written(index) {
            return Ok(());
        }
        let meta = meta::read(index)?;
        if !meta.writer.id.is_nil() {
            self.writers.insert(meta.writer.id);
            self.indexes.insert(meta.index_id);
            self.stores.insert(meta.store_url.clone());
        }
        Ok(())
    }

    pub fn has(&self, writer: ObjectId) -> bool {
        self.writers.contains(&writer)
    }

    /// Whether an index of this database is a copy of that one, or its origin.
    pub fn has_index(&self, index: ObjectId) -> bool {
        self.indexes.contains(&index)
    }

    /// Whether this may be the writer of a temporary index of another session.
    pub fn is_elsewhere(&self, index_oid: u32) -> bool {
        self.elsewhere.contains(&index_oid)
    }
}

/// The name of an index as a user would write it.
pub fn index_name(oid: pg_sys::Oid) -> String {
    // SAFETY: look-ups in catalogs; the texts are NUL-terminated copies.
    unsafe {
        let name = pg_sys::get_rel_name(oid);
        if name.is_null() {
            return oid.to_u32().to_string();
        }
        let visible = pg_sys::RelationIsVisible(oid);
        let namespace = match visible {
            true => null_mut(),
            false => pg_sys::get_namespace_name(pg_sys::get_rel_namespace(oid)),
        };
        let quoted = pg_sys::quote_qualified_identifier(namespace, name);
        CStr::from_ptr(quoted).to_string_lossy().into_owned()
    }
}

/// The name of a database, if it is there.
pub fn database_name(oid: u32) -> Option<String> {
    // SAFETY: a look-up in a catalog that gives null or a NUL-terminated copy.
    unsafe {
        let name = pg_sys::get_database_name(pg_sys::Oid::from(oid));
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// Whether a transaction is running or prepared. `xid` is a full id, 0 for none.
pub fn is_running(xid: u64) -> bool {
    // SAFETY: reads shared memory.
    let next = unsafe { pg_sys::ReadNextFullTransactionId() }.value;
    // One that a crash took back is not running, and one of long ago has ended: before its number could
    // come again.
    if xid == 0 || xid >= next || next - xid > u64::from(u32::MAX / 2) {
        return false;
    }
    // SAFETY: reads shared memory; the number is not ambiguous.
    unsafe { pg_sys::TransactionIdIsInProgress(pg_sys::TransactionId::from(xid as u32)) }
}
