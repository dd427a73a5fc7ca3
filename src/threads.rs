//! Computing on other threads while this one stays interruptible.
//!
//! Threads never call Postgres, have all signals blocked, and are joined before an error is raised.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::cluster::Interrupt;

use crate::error::{Error, Result};

/// Longest sleep between two looks at a thread.
const LONGEST_NAP: Duration = Duration::from_millis(10);

/// Blocks all signals of this thread, and so of those that it starts, while it lives.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> Self {
        // SAFETY: plain signal sets on the stack.
        unsafe {
            let mut all = std::mem::zeroed();
            let mut old = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
            Self(old)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the mask that was in force before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// Whether the threads of this process give way to others.
static STANDS_BACK: AtomicBool = AtomicBool::new(false);
/// What `nice` adds then.
const NICE: i32 = 10;

/// From now on threads that this process starts have a low priority: nobody waits for them as long as for
/// a query. The process's own thread keeps its priority, because it holds locks.
pub fn stand_back() {
    STANDS_BACK.store(true, Ordering::Relaxed);
}

/// To be called first in a new thread.
fn take_priority() {
    if STANDS_BACK.load(Ordering::Relaxed) {
        // SAFETY: on Linux it is the thread that calls whose priority this is.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    }
}

/// Starts something that starts threads.
pub fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    let _blocked = SignalsBlocked::new();
    start()
}

/// A pool of as many threads as the user allows parallel maintenance workers beside the backend itself,
/// and as the machine has cores; or half of them if they give way to others. (A query that wakes up where a
/// thread of low priority runs waits until its slice is over, some milliseconds.)
pub fn pool() -> Result<Arc<rayon::ThreadPool>> {
    // SAFETY: a global that Postgres sets between statements.
    let workers = unsafe { pg_sys::max_parallel_maintenance_workers };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if STANDS_BACK.load(Ordering::Relaxed) { cores.div_ceil(2) } else { cores };
    let threads = cores.min(usize::try_from(workers).unwrap_or(0) + 1);
    let pool = with_signals_blocked(|| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("polign-build-{n}"))
            .start_handler(|_| take_priority())
            .build()
    });
    pool.map(Arc::new).map_err(|error| no_threads(&error))
}

/// The error when the operating system gives no thread.
pub fn no_threads(error: &dyn std::fmt::Display) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_RESOURCES,
        "could not start threads to build an index",
    )
    .detail(format!("{error}."))
}

/// Sets the flag when dropped, so that a thread ends before it is joined.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` on another thread and waits for it, interruptibly: when the statement is cancelled,
/// what `work` was given says so, and its return is awaited before the cancellation goes on.
pub fn off_thread<T: Send>(work: impl FnOnce(Interrupt<'_>) -> T + Send) -> Result<T> {
    let stop = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let thread = with_signals_blocked(|| {
            std::thread::Builder::new().spawn_scoped(scope, || {
                take_priority();
                work(&|| stop.load(Ordering::Relaxed))
            })
        });
        let thread = thread.map_err(|error| no_threads(&error))?;
        let mut naps = Naps::default();
        while !thread.is_finished() {
            naps.sleep();
        }
        Ok::<_, Error>(thread.join())
    })?;
    result.map_err(|_| {
        Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "a thread that builds an index failed")
    })
}

/// Sleeps, interruptibly.
pub fn sleep(time: Duration) {
    let deadline = Instant::now() + time;
    let mut naps = Naps::default();
    while Instant::now() < deadline {
        naps.sleep();
    }
}

/// Short sleeps on the latch, a little longer each time, with a look at interrupts after each.
#[derive(Default)]
pub struct Naps(u32);

impl Naps {
    /// Sleeps once. Raises the error of a cancelled statement.
    pub fn sleep(&mut self) {
        let nap = Duration::from_micros(100 << self.0.min(10)).min(LONGEST_NAP);
        self.0 += 1;
        if nap < Duration::from_millis(1) {
            std::thread::sleep(nap);
        } else {
            let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
            // SAFETY: the process's own latch.
            unsafe {
                pg_sys::WaitLatch(
                    pg_sys::MyLatch,
                    events as i32,
                    nap.as_millis() as i64,
                    pg_sys::PG_WAIT_EXTENSION,
                );
                pg_sys::ResetLatch(pg_sys::MyLatch);
            }
        }
        pgrx::check_for_interrupts!();
    }
}
