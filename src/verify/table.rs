//! The rows of the table: each that the index has to have is in it.

use pgrx::{PgSqlErrorCode, pg_sys};
use roaring::RoaringTreemap;

use super::{Problems, Subject, tid};
use crate::{
    am::{build::heap::Build, opclass::OpClass},
    error::{Error, Result},
    pages::{Index, meta},
    vector,
};

/// The table as one snapshot sees it, taken before the index is read.
pub(super) struct Table {
    build: Build,
    snapshot: pg_sys::Snapshot,
    metric: polign_engine::Metric,
}

impl Table {
    /// # Safety
    /// `heap` is the index's open table.
    pub unsafe fn new(index: Index, heap: pg_sys::Relation) -> Result<Self> {
        let relation = index.relation();
        // SAFETY: open relations; an index has its pg_index row at hand. The snapshot is registered until
        // this is dropped, or until the transaction ends with an error.
        unsafe {
            let form = (*relation).rd_index;
            if !(*form).indisvalid {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    format!("index \"{}\" is not valid", index.name()),
                )
                .detail("CREATE INDEX CONCURRENTLY or REINDEX CONCURRENTLY did not finish it.")
                .hint("Drop it, or REINDEX it."));
            }
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
            let xmin = (*(*relation).rd_indextuple).t_data;
            if (*form).indcheckxmin
                && !pg_sys::TransactionIdPrecedes(raw_xmin(xmin), (*snapshot).xmin)
            {
                pg_sys::UnregisterSnapshot(snapshot);
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
                    format!(
                        "index \"{}\" is too new to be verified in this transaction",
                        index.name()
                    ),
                )
                .hint(
                    "Try again when the transactions that were running as it was built are over.",
                ));
            }
            let info = pg_sys::BuildIndexInfo(relation);
            (*info).ii_Concurrent = true;
            (*info).ii_Unique = false;
            let opclass = OpClass::of(relation)?;
            let dim = meta::read(index)?.dim as usize;
            let build = Build { heap, index: relation, info, element: opclass.element, dim };
            Ok(Self { build, snapshot, metric: opclass.metric })
        }
    }

    /// Compares with the rows that the index has.
    pub fn check(&self, rows: &RoaringTreemap, problems: &mut Problems) {
        let flags = pg_sys::ScanOptions::SO_TYPE_SEQSCAN
            | pg_sys::ScanOptions::SO_ALLOW_PAGEMODE
            | pg_sys::ScanOptions::SO_ALLOW_STRAT
            | pg_sys::ScanOptions::SO_ALLOW_SYNC;
        // SAFETY: the table is open and the snapshot registered; the scan of the build ends this one. It
        // is what the inline function table_beginscan_strat does, guarded.
        let scan = unsafe {
            let begin = (*(*self.build.heap).rd_tableam).scan_begin;
            let Some(begin) = begin else { return };
            let (heap, snapshot) = (self.build.heap, self.snapshot);
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                begin(heap, snapshot, 0, std::ptr::null_mut(), std::ptr::null_mut(), flags)
            })
        };
        self.build.scan_with(scan, &mut |row| {
            let indexable = vector::is_indexable(row.vector, self.metric).unwrap_or(false);
            if row.alive && indexable && !rows.contains(row.id) {
                problems.add(Subject::Row, tid(row.id), "it is not in the index");
            }
        });
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: registered by `new`.
            unsafe { pg_sys::UnregisterSnapshot(self.snapshot) }
        }
    }
}

/// # Safety
/// `tuple` is a tuple of a catalog.
unsafe fn raw_xmin(tuple: pg_sys::HeapTupleHeader) -> pg_sys::TransactionId {
    const FROZEN: u16 = (pg_sys::HEAP_XMIN_COMMITTED | pg_sys::HEAP_XMIN_INVALID) as u16;
    // SAFETY: by contract.
    unsafe {
        match (*tuple).t_infomask & FROZEN == FROZEN {
            true => pg_sys::FrozenTransactionId,
            false => (*tuple).t_choice.t_heap.t_xmin,
        }
    }
}
