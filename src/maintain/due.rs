//! Whether an index is due for maintenance, and having it done in the background.

use std::{
    cell::RefCell,
    collections::HashMap,
    time::{Duration, Instant},
};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_pages::meta::Meta;

use super::{
    calibrate,
    compact::{self, Effort},
    flush::flush,
    task::Task,
};
use crate::{
    error::{Error, Result},
    guc,
    pages::{Here, Index, MaintenanceLock, delta, meta},
    session::ownership,
    worker::maintenance,
};

/// A backend starts workers for an index at most this often.
const START_INTERVAL: Duration = Duration::from_secs(1);
/// Waits after failures double from the first to the last of these.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(300);
/// More indexes than this in one backend: forget what was done for them.
const MAX_KNOWN: usize = 256;

/// What a backend did for an index.
#[derive(Clone, Copy, Default)]
struct Done {
    started: Option<Instant>,
    warned: bool,
}

thread_local! {
    static DONE: RefCell<HashMap<pg_sys::Oid, Done>> = RefCell::new(HashMap::new());
}

/// To be called when the delta grew by a page: starts a worker if the delta is over its limit. Never
/// waits, and never fails the insert.
pub fn after_growth(index: Index) {
    if !index.is_shared() || index.is_of_this_transaction() {
        return;
    }
    // What is wrong with the index is for those to say who need what could not be read.
    let Ok(verdict) = look(index) else { return };
    let oid = index.oid();
    let mut done = done_for(oid);
    match verdict {
        Verdict::Nothing => return,
        Verdict::Failing(_) if done.warned => return,
        Verdict::Failing(failures) => {
            done.warned = true;
            tell_that_it_fails(index, failures);
        }
        Verdict::Due if done.started.is_some_and(|at| at.elapsed() < START_INTERVAL) => return,
        Verdict::Due => {
            done.started = Some(Instant::now());
            start(index, Task::Tend);
        }
    }
    remember(oid, done);
}

fn done_for(index: pg_sys::Oid) -> Done {
    DONE.with_borrow(|known| known.get(&index).copied()).unwrap_or_default()
}

fn remember(index: pg_sys::Oid, done: Done) {
    DONE.with_borrow_mut(|known| {
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(index, done);
    });
}

/// To be called when a scan begins: starts a worker for an ownership check if one is due, so that others come
/// to know that what is only read here is needed.
pub fn at_scan(index: Index, meta: &Meta) {
    // SAFETY: reads the state of the server. A standby is no copy until it is promoted.
    let recovering = unsafe { pg_sys::RecoveryInProgress() };
    let is_due = !recovering && index.is_shared() && ownership::is_check_due_at_scan(meta);
    if !is_due || is_put_off(meta) {
        return;
    }
    let oid = index.oid();
    let mut done = done_for(oid);
    if done.started.is_some_and(|at| at.elapsed() < START_INTERVAL) {
        return;
    }
    done.started = Some(Instant::now());
    start(index, Task::Check);
    remember(oid, done);
}

enum Verdict {
    Nothing,
    Due,
    /// Over the limit, and so many attempts have failed.
    Failing(u32),
}

fn look(index: Index) -> Result<Verdict> {
    if !is_over_limit(index)? {
        return Ok(Verdict::Nothing);
    }
    let meta = meta::read(index)?;
    Ok(match is_put_off(&meta) {
        true => Verdict::Failing(meta.retry.failures),
        false => Verdict::Due,
    })
}

/// Whether the last attempt failed so recently that it is too early for another.
fn is_put_off(meta: &Meta) -> bool {
    // SAFETY: reads the clock.
    let now = unsafe { pg_sys::GetCurrentTimestamp() };
    let last = now + LAST_RETRY.as_micros() as i64;
    // A time further off than any wait comes from a clock that was put right since.
    meta.retry.failures > 0 && (now..=last).contains(&meta.retry.not_before)
}

/// What VACUUM does when it is through: a flush, if the delta is over its limit, and the start of a worker
/// if a compaction or a calibration is due. What fails is a warning, because the rows are safe where they are.
pub fn at_vacuum(index: Index) {
    if let Err(error) = tend_at_vacuum(index) {
        error.warn();
    }
}

fn tend_at_vacuum(index: Index) -> Result<()> {
    if is_over_limit(index)? && !is_put_off(&*meta::read(index)?) {
        let Some(_lock) = MaintenanceLock::try_acquire(index.oid()) else { return Ok(()) };
        if let Err(error) = flush(&mut Here(index)) {
            note_failure(index)?;
            return Err(error);
        }
    }
    if guc::DELTA_LIMIT.get() == 0 {
        return Ok(());
    }
    if !compact::is_due(index, Effort::Due)? && !calibrate::is_due(index)? {
        return Ok(());
    }
    match index.is_shared() {
        true => start(index, Task::Tend),
        false => {
            let _lock = MaintenanceLock::acquire(index.oid());
            compact::compact(&mut Here(index), Effort::Due, &mut |_| ())?;
            calibrate::calibrate_if_due(&mut Here(index), &mut |_| ())?;
        }
    }
    Ok(())
}

/// Whether the delta has more rows than it is to have.
pub fn is_over_limit(index: Index) -> Result<bool> {
    let limit = guc::DELTA_LIMIT.get() as u64;
    Ok(limit > 0 && delta::flush::estimated_rows(index, &*meta::read(index)?)? >= limit)
}

fn start(index: Index, task: Task) {
    // Somebody is at it: no need to start a process that would find out the same.
    if MaintenanceLock::try_acquire(index.oid()).is_some()
        && let Err(error) = maintenance::start(index.oid(), task)
    {
        pgrx::debug1!("{}", error.message);
    }
}

fn tell_that_it_fails(index: Index, failures: u32) {
    Error::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("rows of index \"{}\" cannot be moved to its store", index.name()),
    )
    .detail(format!(
        "{failures} attempts have failed; the reason is in the server log. Rows are kept in the index, \
         which grows."
    ))
    .warn();
}

/// Notes in the meta page that maintenance failed, and when to try again. Gives the number of failures.
pub fn note_failure(index: Index) -> Result<u32> {
    // SAFETY: reads the clock.
    let now = unsafe { pg_sys::GetCurrentTimestamp() };
    meta::update(index, |meta: &mut Meta| {
        let failures = meta.retry.failures.saturating_add(1);
        let wait = FIRST_RETRY * (1 << (failures - 1).min(16));
        meta.retry.failures = failures;
        meta.retry.not_before = now + wait.min(LAST_RETRY).as_micros() as i64;
        Ok(failures)
    })
}
