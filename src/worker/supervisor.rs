//! The supervisor: starts `polign-store`, gives it its configuration, starts it again when it dies.
//!
//! It is attached to shared memory, so its own death restarts the cluster. Hence it does next to
//! nothing: no network, no thread, no database connection; the store process, which may be killed at
//! any time, does the work.

use std::{
    ffi::c_int,
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use pgrx::{pg_guard, pg_sys};

use super::{
    child::{StoreProcess, describe, find_program},
    config::StoreConfig,
    instance_lock::InstanceLock,
};
use crate::places;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// A store process that lived this long had no trouble starting.
const HEALTHY_AFTER: Duration = Duration::from_secs(5);
/// How long the store process may take to exit; the whole shutdown is to take less than a second.
const STOP_PATIENCE: Duration = Duration::from_millis(600);
/// How often it is looked whether the cache directory can be used.
const LOOK_AT_DIRECTORY: Duration = Duration::from_secs(5);
/// How long a supervisor waits for the one of an earlier server to go.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);

static TERMINATE: AtomicBool = AtomicBool::new(false);
static RELOAD: AtomicBool = AtomicBool::new(false);

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn polign_supervisor_main(_argument: pg_sys::Datum) {
    install_signal_handlers();
    let status = if supervise() { 0 } else { 1 };
    // SAFETY: runs the exit callbacks and ends the process.
    unsafe { pg_sys::proc_exit(status) };
}

/// Returns true if this worker is not needed: exit code 0 takes it off the postmaster's list. Otherwise
/// it is to be started again, which the postmaster does unless it is shutting down.
fn supervise() -> bool {
    let _lock = match take_lock() {
        Ok(Some(lock)) => lock,
        Ok(None) => return !terminating(),
        Err(error) => {
            pgrx::warning!("could not lock \"{}\": {error}", places::supervisor_lock().display());
            return false;
        }
    };
    let mut store = Store::new();
    while !terminating() {
        if reload_if_asked() {
            store.reload();
        }
        wait(store.tend());
    }
    store.stop();
    false
}

/// `None` if another supervisor keeps the lock, or this one was asked to end.
fn take_lock() -> io::Result<Option<InstanceLock>> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    while !terminating() {
        match InstanceLock::take()? {
            Some(lock) => return Ok(Some(lock)),
            None if Instant::now() >= deadline => return Ok(None),
            None => wait(Duration::from_millis(50)),
        }
    }
    Ok(None)
}

fn reload_if_asked() -> bool {
    let asked = RELOAD.swap(false, Ordering::Relaxed);
    if asked {
        // SAFETY: called from the main loop of a worker, as every Postgres process does.
        unsafe { pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP) };
    }
    asked
}

/// The store process and when it is to be started.
struct Store {
    config: StoreConfig,
    process: Option<StoreProcess>,
    start_at: Instant,
    backoff: Duration,
    missing_reported: bool,
}

impl Store {
    fn new() -> Self {
        Self {
            // No directory yet, so that the first look finds the one in use.
            config: StoreConfig { cache_dir: String::new(), ..StoreConfig::from_settings() },
            process: None,
            start_at: Instant::now(),
            backoff: FIRST_BACKOFF,
            missing_reported: false,
        }
    }

    /// Does what is due and says how long nothing will be.
    fn tend(&mut self) -> Duration {
        self.watch_directory();
        if let Some(process) = &mut self.process {
            match process.try_wait() {
                Ok(None) => return LOOK_AT_DIRECTORY,
                Ok(Some(status)) => {
                    pgrx::log!("polign-store (PID {}) {}", process.pid(), describe(status));
                    self.ended();
                }
                Err(error) => {
                    pgrx::log!("polign-store (PID {}) is lost: {error}", process.pid());
                    self.ended();
                }
            }
        }
        let now = Instant::now();
        if now < self.start_at {
            return self.start_at - now;
        }
        self.start();
        match self.process {
            Some(_) => LOOK_AT_DIRECTORY,
            None => self.start_at.saturating_duration_since(now),
        }
    }

    /// Moves the store process when the cache directory in use is another one than before: a changed
    /// setting, or a disk that went away or came back.
    fn watch_directory(&mut self) {
        let config = StoreConfig::from_settings();
        if config.cache_dir == self.config.cache_dir {
            return;
        }
        if Path::new(&config.cache_dir) == places::fallback_cache_dir() {
            pgrx::warning!(
                "polign cannot write to its cache directory \"{}\": doing without a cache",
                places::configured_cache_dir().display()
            );
        }
        self.stop();
        self.config = config;
        self.backoff = FIRST_BACKOFF;
        self.start_at = Instant::now();
    }

    fn start(&mut self) {
        let program = match find_program() {
            Ok(program) => program,
            Err(tried) => {
                if !self.missing_reported {
                    pgrx::warning!(
                        "could not find the program polign-store: neither {tried} is there"
                    );
                    self.missing_reported = true;
                }
                self.retry_later();
                return;
            }
        };
        self.missing_reported = false;
        match StoreProcess::start(&program, &self.config.line()) {
            Ok(process) => {
                pgrx::debug1!("started polign-store (PID {})", process.pid());
                self.process = Some(process);
            }
            Err(error) => {
                pgrx::warning!("could not start \"{}\": {error}", program.display());
                self.retry_later();
            }
        }
    }

    /// After a healthy life the process comes back at once, otherwise later and later.
    fn ended(&mut self) {
        if self.process.take().is_some_and(|process| process.started.elapsed() >= HEALTHY_AFTER) {
            self.backoff = FIRST_BACKOFF;
            self.start_at = Instant::now();
        } else {
            self.retry_later();
        }
    }

    fn retry_later(&mut self) {
        self.start_at = Instant::now() + self.backoff;
        self.backoff = (self.backoff * 2).min(LONGEST_BACKOFF);
    }

    fn reload(&mut self) {
        self.watch_directory();
        // Sent even if nothing changed, so that a reload makes the process read the credentials again.
        self.config = StoreConfig::from_settings();
        if let Some(process) = &mut self.process
            && let Err(error) = process.configure(&self.config.line())
        {
            pgrx::log!("polign-store (PID {}) takes no configuration: {error}", process.pid());
            self.stop();
        }
        // New settings may mend what kept it from running.
        self.backoff = FIRST_BACKOFF;
        self.start_at = Instant::now();
    }

    fn stop(&mut self) {
        if let Some(process) = self.process.take() {
            process.stop(STOP_PATIENCE);
        }
    }
}

fn terminating() -> bool {
    TERMINATE.load(Ordering::Relaxed)
}

/// Waits for a signal, or this long. Ends the process when the postmaster is gone.
fn wait(timeout: Duration) {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    // SAFETY: the process's own latch.
    unsafe {
        pg_sys::WaitLatch(
            pg_sys::MyLatch,
            events as c_int,
            timeout.as_millis().max(1) as _,
            pg_sys::PG_WAIT_EXTENSION,
        );
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}

fn install_signal_handlers() {
    #[cfg(not(feature = "pg18"))]
    use pg_sys::pqsignal;
    #[cfg(feature = "pg18")]
    use pg_sys::pqsignal_be as pqsignal;
    // SAFETY: the handlers touch atomics and the latch only.
    unsafe {
        pqsignal(libc::SIGTERM, Some(on_terminate));
        pqsignal(libc::SIGHUP, Some(on_reload));
        pqsignal(libc::SIGCHLD, Some(on_child));
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

unsafe extern "C-unwind" fn on_terminate(_signal: c_int) {
    TERMINATE.store(true, Ordering::Relaxed);
    // SAFETY: SetLatch may be called from a signal handler.
    unsafe { pg_sys::SetLatch(pg_sys::MyLatch) };
}

unsafe extern "C-unwind" fn on_reload(_signal: c_int) {
    RELOAD.store(true, Ordering::Relaxed);
    // SAFETY: as above.
    unsafe { pg_sys::SetLatch(pg_sys::MyLatch) };
}

unsafe extern "C-unwind" fn on_child(_signal: c_int) {
    // SAFETY: as above.
    unsafe { pg_sys::SetLatch(pg_sys::MyLatch) };
}
