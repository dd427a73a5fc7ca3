//! Places at which a test build can be made to die, as by `kill -9` or a power loss.
//!
//! The setting `polign.failpoint` names a place, or a place and how often it is passed before:
//! `publish: flipped`, `publish: flipped:2`. Release builds have neither the setting nor the places.

#[cfg(debug_assertions)]
mod armed {
    use std::{cell::Cell, ffi::CString};

    use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};

    static FAILPOINT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

    thread_local! {
        static PASSED: Cell<u32> = const { Cell::new(0) };
    }

    /// Defines the setting.
    pub fn register() {
        GucRegistry::define_string_guc(
            c"polign.failpoint",
            c"Place at which a process kills itself, in test builds.",
            c"",
            &FAILPOINT,
            GucContext::Suset,
            GucFlags::NO_SHOW_ALL,
        );
    }

    /// Dies if this place is armed.
    pub fn pass(place: &str) {
        let Some(armed) = FAILPOINT.get() else { return };
        let armed = armed.to_string_lossy();
        let Some(times) = armed.strip_prefix(place) else { return };
        let times = match times.strip_prefix(':') {
            Some(times) => times.parse().unwrap_or(0),
            None if times.is_empty() => 0,
            None => return,
        };
        let passed = PASSED.get();
        PASSED.set(passed + 1);
        if passed >= times {
            // SAFETY: what it does to this process is what is wanted.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
    }
}

#[cfg(debug_assertions)]
pub use armed::{pass, register};

/// Nothing, in a build for users.
#[cfg(not(debug_assertions))]
pub fn register() {}

/// Nothing, in a build for users.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn pass(_: &str) {}
