//! Progress of a build, as `pg_stat_progress_create_index` shows it.

use pgrx::pg_sys;

/// The phases in the order of [`BUILD_PHASES`](crate::am::handler::BUILD_PHASES).
#[derive(Debug, Clone, Copy)]
#[repr(i64)]
pub enum Phase {
    Sampling = 2,
    Training = 3,
    Assigning = 4,
    Writing = 5,
    Publishing = 6,
}

/// Enters a phase.
pub fn enter(phase: Phase) {
    // SAFETY: writes to this backend's own status entry.
    unsafe {
        pg_sys::pgstat_progress_update_param(
            pg_sys::PROGRESS_CREATEIDX_SUBPHASE as i32,
            phase as i64,
        );
    }
}

/// Says how many rows were read so far.
pub fn tuples_done(rows: u64) {
    // SAFETY: as above.
    unsafe {
        pg_sys::pgstat_progress_update_param(
            pg_sys::PROGRESS_CREATEIDX_TUPLES_DONE as i32,
            rows as i64,
        );
    }
}
