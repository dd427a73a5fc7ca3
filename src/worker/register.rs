//! How the supervisor comes to run: with the server, or when a backend first needs it.

use std::{
    cell::Cell,
    ffi::{CStr, c_char},
    ptr::null_mut,
    time::{Duration, Instant},
};

use pgrx::{PgSqlErrorCode, pg_sys};

use super::instance_lock::InstanceLock;
use crate::error::{Error, Result};

const ATTEMPT_INTERVAL: Duration = Duration::from_secs(1);
const RESTART_SECONDS: i32 = 1;

thread_local! {
    static LAST_ATTEMPT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Registers the supervisor with the postmaster, if the library is being preloaded.
pub fn at_server_start() {
    // SAFETY: read and called while the postmaster loads the library.
    unsafe {
        if pg_sys::process_shared_preload_libraries_in_progress {
            pg_sys::RegisterBackgroundWorker(&mut description());
        }
    }
}

/// Makes sure that a supervisor runs or is about to. Cheap when one runs; attempts to start one are at
/// least a second apart in each backend.
pub fn ensure() -> Result<()> {
    if InstanceLock::is_held() {
        return Ok(());
    }
    let recent = LAST_ATTEMPT.get().is_some_and(|last| last.elapsed() < ATTEMPT_INTERVAL);
    if recent {
        return Ok(());
    }
    LAST_ATTEMPT.set(Some(Instant::now()));
    // SAFETY: a complete description; without a place for the handle nothing is allocated.
    if unsafe { pg_sys::RegisterDynamicBackgroundWorker(&mut description(), null_mut()) } {
        return Ok(());
    }
    Err(Error::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_RESOURCES,
        "could not start the polign supervisor: no background worker slot is free",
    )
    .hint("Add polign to \"shared_preload_libraries\", or increase \"max_worker_processes\"."))
}

fn description() -> pg_sys::BackgroundWorker {
    let mut worker = pg_sys::BackgroundWorker {
        bgw_flags: pg_sys::BGWORKER_SHMEM_ACCESS as i32,
        // On a standby too, as soon as it answers queries.
        bgw_start_time: pg_sys::BgWorkerStartTime::BgWorkerStart_ConsistentState,
        bgw_restart_time: RESTART_SECONDS,
        ..Default::default()
    };
    copy_name(&mut worker.bgw_name, c"polign supervisor");
    copy_name(&mut worker.bgw_type, c"polign supervisor");
    copy_name(&mut worker.bgw_library_name, c"$libdir/polign");
    copy_name(&mut worker.bgw_function_name, c"polign_supervisor_main");
    worker
}

pub(super) fn copy_name(field: &mut [c_char], text: &CStr) {
    for (to, from) in field.iter_mut().zip(text.to_bytes_with_nul()) {
        *to = *from as c_char;
    }
}
