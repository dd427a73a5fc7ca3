//! The index that a function was given.

use std::ffi::CStr;

use pgrx::{PgSqlErrorCode, pg_sys};

use crate::{
    error::{Error, Result},
    pages::Index,
};

/// The name of the access method.
pub const ACCESS_METHOD: &CStr = c"polign_ivf";

/// An index of this access method, open and locked against being dropped.
pub struct OpenIndex {
    relation: pg_sys::Relation,
    lock: pg_sys::LOCKMODE,
}

/// What came of [`OpenIndex::if_free`].
pub enum TryOpen {
    Open(OpenIndex),
    /// Somebody has it locked.
    Locked,
    /// It was dropped.
    Gone,
}

impl OpenIndex {
    /// The lock of who changes its pages.
    pub const MAINTENANCE_LOCK: pg_sys::LOCKMODE = pg_sys::RowExclusiveLock as pg_sys::LOCKMODE;

    /// Opens an index for somebody who may read its table.
    pub fn for_reader(index: pg_sys::Oid) -> Result<Self> {
        // SAFETY: look-ups in the system catalogs, in a transaction.
        unsafe {
            let table = pg_sys::IndexGetRelation(index, true);
            if table == pg_sys::InvalidOid {
                return Err(not_an_index(index));
            }
            // Before the lock: who may not read the table cannot hold anybody up either.
            let privilege = pg_sys::ACL_SELECT as pg_sys::AclMode;
            let result = pg_sys::pg_class_aclcheck(table, pg_sys::GetUserId(), privilege);
            if result != pg_sys::AclResult::ACLCHECK_OK {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                    format!("permission denied for table {}", relation_name(table)),
                ));
            }
            Self::open(index, pg_sys::AccessShareLock as i32)
        }
    }

    /// Opens an index to change its pages, for somebody whose right to do so was checked.
    pub fn for_maintenance(index: pg_sys::Oid) -> Result<Self> {
        // SAFETY: in a transaction.
        unsafe { Self::open(index, Self::MAINTENANCE_LOCK) }
    }

    /// Opens an index if nobody has locked it against that.
    pub fn if_free(index: pg_sys::Oid, lock: pg_sys::LOCKMODE) -> Result<TryOpen> {
        // SAFETY: in a transaction. The lock is held when the relation is opened, and goes with it.
        unsafe {
            if !pg_sys::ConditionalLockRelationOid(index, lock) {
                return Ok(TryOpen::Locked);
            }
            let relation = pg_sys::try_relation_open(index, pg_sys::NoLock as pg_sys::LOCKMODE);
            if relation.is_null() {
                pg_sys::UnlockRelationOid(index, lock);
                return Ok(TryOpen::Gone);
            }
            let open = Self { relation, lock };
            open.check(index)?;
            Ok(TryOpen::Open(open))
        }
    }

    /// Raises unless the index exists and belongs to the user.
    pub fn check_owner(index: pg_sys::Oid) -> Result<()> {
        // SAFETY: look-ups in the system catalogs, in a transaction.
        unsafe {
            if pg_sys::IndexGetRelation(index, true) == pg_sys::InvalidOid {
                return Err(not_an_index(index));
            }
            let user = pg_sys::GetUserId();
            if !pg_sys::object_ownercheck(pg_sys::RelationRelationId, index, user) {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                    format!("must be owner of index {}", relation_name(index)),
                ));
            }
        }
        Ok(())
    }

    /// # Safety
    /// A transaction is in progress.
    unsafe fn open(index: pg_sys::Oid, lock: pg_sys::LOCKMODE) -> Result<Self> {
        // SAFETY: by contract.
        unsafe {
            let relation = pg_sys::try_relation_open(index, lock);
            if relation.is_null() {
                return Err(not_an_index(index));
            }
            let open = Self { relation, lock };
            open.check(index)?;
            Ok(open)
        }
    }

    /// # Safety
    /// The relation is open.
    unsafe fn check(&self, index: pg_sys::Oid) -> Result<()> {
        // SAFETY: an open relation has a pg_class row; the access method's name is looked up.
        unsafe {
            let class = (*self.relation).rd_rel;
            let kind = (*class).relkind as u8;
            if kind == pg_sys::RELKIND_PARTITIONED_INDEX {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
                    format!("\"{}\" is a partitioned index", relation_name(index)),
                )
                .hint("Name the index of a partition."));
            }
            let method = pg_sys::get_am_name((*class).relam);
            let ours = kind == pg_sys::RELKIND_INDEX
                && !method.is_null()
                && CStr::from_ptr(method) == ACCESS_METHOD;
            if !ours {
                return Err(not_an_index(index));
            }
            let temporary = (*class).relpersistence as u8 == pg_sys::RELPERSISTENCE_TEMP;
            if temporary && !(*self.relation).rd_islocaltemp {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    "cannot access temporary indexes of other sessions",
                ));
            }
            Ok(())
        }
    }

    /// The pages of the index, for as long as it is open.
    pub fn pages(&self) -> Index {
        // SAFETY: open and locked as long as `self`.
        unsafe { Index::new(self.relation) }
    }
}

impl Drop for OpenIndex {
    fn drop(&mut self) {
        // While an error unwinds, Postgres closes it.
        if !std::thread::panicking() {
            // SAFETY: opened with this lock.
            unsafe { pg_sys::relation_close(self.relation, self.lock) }
        }
    }
}

fn not_an_index(oid: pg_sys::Oid) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
        format!("\"{}\" is not a polign_ivf index", relation_name(oid)),
    )
}

fn relation_name(oid: pg_sys::Oid) -> String {
    // SAFETY: a catalog look-up that gives null or a NUL-terminated copy.
    unsafe {
        let name = pg_sys::get_rel_name(oid);
        if name.is_null() {
            return oid.to_u32().to_string();
        }
        CStr::from_ptr(name).to_string_lossy().into_owned()
    }
}
