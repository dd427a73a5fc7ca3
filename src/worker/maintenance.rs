//! A background worker that maintains one index and ends: started when the delta is over its limit, or
//! by who calls a function and waits.
//!
//! It is connected to the index's database as the bootstrap superuser and calls nothing that a user
//! defined: no expression of an index, no function, no trigger.

use std::{
    ffi::{CString, c_int},
    ptr::null_mut,
};

use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_guard, pg_sys, pg_sys::panic::CaughtError};

use super::{
    register::copy_name,
    report::{Outcome, Report},
};
use crate::{
    error::{Error, Result},
    maintain::{calibrate::Queries, due, task::Task, transactions::Transactions},
    pages::{MaintenanceLock, Steps, sweep},
    threads,
};

/// Starts a worker and does not wait for it.
pub fn start(index: pg_sys::Oid, task: Task) -> Result<()> {
    register(index, task, 0, null_mut())
}

/// Has a worker do something, with queries if it is about these, and waits for its end. Gives its result.
pub fn run(index: pg_sys::Oid, task: Task, queries: &Queries) -> Result<i64> {
    let report = Report::create(queries);
    let mut handle = null_mut();
    register(index, task, report.handle(), &mut handle)?;
    let worker = Running(handle);
    // SAFETY: the handle is that of a worker that notifies this process. An interrupt is raised here.
    let status = unsafe { pg_sys::WaitForBackgroundWorkerShutdown(worker.0) };
    std::mem::forget(worker);
    if status == pg_sys::BgwHandleStatus::BGWH_POSTMASTER_DIED {
        return Err(Error::new(PgSqlErrorCode::ERRCODE_ADMIN_SHUTDOWN, "the server is going down"));
    }
    report.read()
}

/// Ends the worker when its caller does not wait any longer.
struct Running(*mut pg_sys::BackgroundWorkerHandle);

impl Drop for Running {
    fn drop(&mut self) {
        // SAFETY: a valid handle; only sends a signal.
        unsafe { pg_sys::TerminateBackgroundWorker(self.0) }
    }
}

fn register(
    index: pg_sys::Oid,
    task: Task,
    report: pg_sys::dsm_handle,
    handle: *mut *mut pg_sys::BackgroundWorkerHandle,
) -> Result<()> {
    let mut worker = pg_sys::BackgroundWorker {
        bgw_flags: (pg_sys::BGWORKER_SHMEM_ACCESS | pg_sys::BGWORKER_BACKEND_DATABASE_CONNECTION)
            as i32,
        bgw_start_time: pg_sys::BgWorkerStartTime::BgWorkerStart_RecoveryFinished,
        bgw_restart_time: pg_sys::BGW_NEVER_RESTART,
        bgw_main_arg: pg_sys::Datum::from(index),
        // SAFETY: set in every backend.
        bgw_notify_pid: unsafe { pg_sys::MyProcPid },
        ..Default::default()
    };
    copy_name(&mut worker.bgw_name, c"polign maintenance");
    copy_name(&mut worker.bgw_type, c"polign maintenance");
    copy_name(&mut worker.bgw_library_name, c"$libdir/polign");
    copy_name(&mut worker.bgw_function_name, c"polign_maintenance_main");
    // SAFETY: set in every backend.
    let database = unsafe { pg_sys::MyDatabaseId }.to_u32();
    for (to, word) in worker.bgw_extra.chunks_exact_mut(4).zip([database, task as u32, report]) {
        to.iter_mut().zip(word.to_ne_bytes()).for_each(|(to, byte)| *to = byte as _);
    }
    // SAFETY: a complete description.
    match unsafe { pg_sys::RegisterDynamicBackgroundWorker(&mut worker, handle) } {
        true => Ok(()),
        false => Err(Error::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_RESOURCES,
            "could not start a worker to maintain an index: no background worker slot is free",
        )
        .hint("Increase \"max_worker_processes\".")),
    }
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn polign_maintenance_main(argument: pg_sys::Datum) {
    install_signal_handlers();
    threads::stand_back();
    // SAFETY: the description of this worker, set by `register`.
    let extra = unsafe { (*pg_sys::MyBgworkerEntry).bgw_extra };
    let word = |at: usize| {
        let bytes: [u8; 4] = std::array::from_fn(|i| extra[at * 4 + i] as u8);
        u32::from_ne_bytes(bytes)
    };
    let (database, task, report) = (word(0), Task::from_code(word(1)), word(2));
    let index = pg_sys::Oid::from(argument.value() as u32);
    let report = (report != 0).then(|| Report::attach(report)).flatten();
    // SAFETY: first thing that touches the database, in a worker that asked for a connection.
    unsafe {
        pg_sys::BackgroundWorkerInitializeConnectionByOid(
            pg_sys::Oid::from(database),
            pg_sys::InvalidOid,
            0,
        );
    }
    if task == Task::Calibrate && report.is_none() {
        // Whoever has the queries does not wait any longer.
        return;
    }
    let queries = report.as_ref().map(Report::queries).unwrap_or_default();
    let outcome = caught(|| perform(index, task, &queries));
    match (&outcome, task) {
        (Err(error), Task::Tend) => failed(index, error),
        (Err(error), Task::Check) => put_off(index, error),
        (Err(error), _) => pgrx::debug1!("{}", error.message),
        (Ok(_), _) => {}
    }
    if let Some(report) = report {
        report.write(&match outcome {
            Ok(result) => Outcome::Done(result),
            Err(error) => Outcome::Failed(error),
        });
    }
}

/// Runs something that may raise; afterwards no transaction is in progress.
fn caught<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    let run = std::panic::AssertUnwindSafe(run);
    let result = PgTryBuilder::new(move || {
        let run = run;
        (run.0)()
    })
    .catch_others(|error| Err(describe(error)))
    .catch_rust_panic(|error| Err(describe(error)))
    .execute();
    // SAFETY: the process's own transaction; an error that was raised left it open, with its locks.
    unsafe {
        pg_sys::AbortOutOfAnyTransaction();
    }
    result
}

fn describe(error: CaughtError) -> Error {
    let (CaughtError::PostgresError(report)
    | CaughtError::ErrorReport(report)
    | CaughtError::RustPanic { ereport: report, .. }) = error;
    let mut error = Error::new(report.sql_error_code(), report.message());
    error.detail = report.detail().map(str::to_owned);
    error.hint = report.hint().map(str::to_owned);
    error
}

fn perform(index: pg_sys::Oid, task: Task, queries: &Queries) -> Result<i64> {
    let mut steps = Transactions::new(index);
    let Some(_lock) = lock(index, task)? else { return Ok(0) };
    let name = steps.step(|index| {
        // Pages that earlier flushes freed; VACUUM would find them too, but may be long in coming.
        sweep::find_free(index, &mut || {
            pgrx::check_for_interrupts!();
        });
        Ok(index.name())
    })?;
    let mut progress = |what: &str| show_activity(&format!("polign: index {name}, {what}"));
    task.perform(queries, &mut steps, &mut progress)
}

/// Says in `pg_stat_activity` what the worker does.
fn show_activity(what: &str) {
    let Ok(what) = CString::new(what) else { return };
    // SAFETY: the text is copied.
    unsafe { pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, what.as_ptr()) };
}

/// The lock that makes this the only process that maintains the index.
fn lock(index: pg_sys::Oid, task: Task) -> Result<Option<MaintenanceLock>> {
    // SAFETY: no transaction is in progress; the lock outlasts this one.
    unsafe {
        pg_sys::StartTransactionCommand();
        let lock = match task {
            Task::Tend | Task::Check => MaintenanceLock::try_acquire_for_session(index),
            Task::Flush | Task::Compact | Task::Calibrate => {
                Some(MaintenanceLock::acquire_for_session(index))
            }
        };
        pg_sys::CommitTransactionCommand();
        Ok(lock)
    }
}

/// Says in the server log that rows could not be moved, once until it succeeds again, and notes when to
/// try again.
fn failed(index: pg_sys::Oid, error: &Error) {
    // Dropped, or of a transaction that has not committed, or locked by one: not the store's fault.
    let gone =
        [PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE, PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE];
    if gone.contains(&error.code) {
        return;
    }
    let noted = caught(|| {
        Transactions::new(index).step(|index| Ok((index.name(), due::note_failure(index)?)))
    });
    let Ok((name, failures)) = noted else { return };
    let cause = match &error.detail {
        Some(detail) => format!("{}: {detail}", error.message),
        None => error.message.clone(),
    };
    let kept = "They stay in the index, and it is tried again.";
    let hint = match &error.hint {
        Some(hint) => format!("{kept} {hint}"),
        None => kept.to_owned(),
    };
    match failures {
        1 => Error::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            format!("could not move rows of index \"{name}\" to its store"),
        )
        .detail(cause)
        .hint(hint)
        .warn(),
        _ => pgrx::debug1!("could not move rows of index \"{name}\" to its store: {cause}"),
    }
}

/// Notes when to try an ownership check again; VACUUM tells of trouble with it.
fn put_off(index: pg_sys::Oid, error: &Error) {
    pgrx::debug1!("{}", error.message);
    let _ = caught(|| Transactions::new(index).step(due::note_failure));
}

fn install_signal_handlers() {
    #[cfg(not(feature = "pg18"))]
    use pg_sys::pqsignal;
    #[cfg(feature = "pg18")]
    use pg_sys::pqsignal_be as pqsignal;
    // SAFETY: Postgres' own handlers, made for this.
    unsafe {
        pqsignal(libc::SIGTERM, Some(on_terminate));
        pqsignal(libc::SIGHUP, Some(on_reload));
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

unsafe extern "C-unwind" fn on_terminate(signal: c_int) {
    // SAFETY: made to be called from a signal handler.
    unsafe { pg_sys::die(signal) };
}

unsafe extern "C-unwind" fn on_reload(signal: c_int) {
    // SAFETY: made to be called from a signal handler.
    unsafe { pg_sys::SignalHandlerForConfigReload(signal) };
}
