//! `WITH (lists = ..., target_recall = ...)`.

use std::{
    mem::offset_of,
    sync::atomic::{AtomicU32, Ordering},
};

use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};

use crate::{
    error::Error,
    guc::{MAX_LISTS, TARGET_RECALL_MIN},
};

/// The parsed options of an index, as Postgres keeps them in `rd_options`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Stored {
    vl_len: i32,
    lists: i32,
    target_recall: f64,
}

/// The options of an index.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Options {
    /// Number of cells to train; `None` means from the row count.
    pub lists: Option<u32>,
    /// Recall to calibrate for and to search at; `None` means the default.
    pub target_recall: Option<f64>,
}

static KIND: AtomicU32 = AtomicU32::new(0);

/// Registers the options with Postgres. Called once per process.
pub fn register() {
    // SAFETY: called from _PG_init; the strings are static and NUL-terminated.
    unsafe {
        let kind = pg_sys::add_reloption_kind();
        KIND.store(kind, Ordering::Relaxed);
        // They count for builds and searches that begin later, so changing them disturbs nobody.
        let lock = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;
        pg_sys::add_int_reloption(
            kind,
            c"lists".as_ptr(),
            c"Number of cells; 0 chooses it from the number of rows.".as_ptr(),
            0,
            0,
            MAX_LISTS,
            lock,
        );
        pg_sys::add_real_reloption(
            kind,
            c"target_recall".as_ptr(),
            c"Recall that a search of this index aims at; 0 means 0.95.".as_ptr(),
            0.0,
            0.0,
            1.0,
            lock,
        );
    }
}

/// Parses the options of an index; checks ranges when a statement has just given them.
#[pg_guard]
// Postgres 18 has one field more than is named here.
#[allow(clippy::needless_update)]
pub unsafe extern "C-unwind" fn amoptions(
    reloptions: pg_sys::Datum,
    validate: bool,
) -> *mut pg_sys::bytea {
    let elements = [
        pg_sys::relopt_parse_elt {
            optname: c"lists".as_ptr(),
            opttype: pg_sys::relopt_type::RELOPT_TYPE_INT,
            offset: offset_of!(Stored, lists) as i32,
            ..Default::default()
        },
        pg_sys::relopt_parse_elt {
            optname: c"target_recall".as_ptr(),
            opttype: pg_sys::relopt_type::RELOPT_TYPE_REAL,
            offset: offset_of!(Stored, target_recall) as i32,
            ..Default::default()
        },
    ];
    // SAFETY: `elements` describes `Stored`; the result is null or a palloc'd `Stored`.
    unsafe {
        let parsed = pg_sys::build_reloptions(
            reloptions,
            validate,
            KIND.load(Ordering::Relaxed),
            size_of::<Stored>(),
            elements.as_ptr(),
            elements.len() as i32,
        );
        if let Some(stored) = parsed.cast::<Stored>().as_ref()
            && validate
            && stored.target_recall != 0.0
            && stored.target_recall < TARGET_RECALL_MIN
        {
            Error::new(
                PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
                format!(
                    "value {} out of bounds for option \"target_recall\"",
                    stored.target_recall
                ),
            )
            .detail("Valid values are 0 (the default) and from \"0.5\" to \"1.0\".")
            .raise();
        }
        parsed.cast()
    }
}

impl Options {
    /// The options of an open index.
    ///
    /// # Safety
    /// `index` is an open index of this access method.
    pub unsafe fn of(index: pg_sys::Relation) -> Self {
        // SAFETY: rd_options of an index is null or what its amoptions returned.
        match unsafe { (*index).rd_options.cast::<Stored>().as_ref() } {
            None => Self::default(),
            Some(stored) => Self {
                lists: u32::try_from(stored.lists).ok().filter(|&n| n > 0),
                target_recall: Some(stored.target_recall).filter(|&r| r > 0.0),
            },
        }
    }
}
