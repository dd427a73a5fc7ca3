//! Settings under which the planner searches by one index.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::am::cost::Preference;

/// Settings that take other plans away; they count until this is dropped, as in a function with `SET`.
pub struct ForcedPlan {
    nest: i32,
    _preference: Preference,
}

const SETTINGS: [(&CStr, &CStr); 4] = [
    (c"enable_seqscan", c"off"),
    (c"enable_sort", c"off"),
    (c"enable_bitmapscan", c"off"),
    (c"enable_indexscan", c"on"),
];

impl ForcedPlan {
    pub fn by(index: pg_sys::Oid) -> Self {
        // SAFETY: what is set is put back when this is dropped, or when the transaction or the savepoint ends with
        // an error.
        let nest = unsafe { pg_sys::NewGUCNestLevel() };
        let forced = Self { nest, _preference: Preference::of(index) };
        for (setting, value) in SETTINGS {
            // SAFETY: settings of Postgres, with values that they take.
            unsafe {
                pg_sys::set_config_option(
                    setting.as_ptr(),
                    value.as_ptr(),
                    pg_sys::GucContext::PGC_USERSET,
                    pg_sys::GucSource::PGC_S_SESSION,
                    pg_sys::GucAction::GUC_ACTION_SAVE,
                    true,
                    0,
                    false,
                );
            }
        }
        forced
    }
}

impl Drop for ForcedPlan {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the level that was begun.
            unsafe { pg_sys::AtEOXact_GUC(false, self.nest) }
        }
    }
}
