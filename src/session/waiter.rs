//! How a backend waits for the store process.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

use pgrx::pg_sys;
use polign_engine::protocol::{Interest, Interrupted, Waiter};

use crate::worker::register;

/// Waits as a backend has to: on its latch as well, so that a cancel, a time limit or the death of the
/// server takes effect at once. Raises the error of an interrupt, by unwinding.
///
/// Waiting without a socket means that no store process answers: then it sees to it that one is started.
#[derive(Debug, Default)]
pub struct PgWaiter(());

impl Waiter for PgWaiter {
    fn wait(
        &mut self,
        fd: Option<BorrowedFd<'_>>,
        interest: Interest,
        timeout: Duration,
    ) -> std::result::Result<(), Interrupted> {
        pgrx::check_for_interrupts!();
        if fd.is_none()
            && let Err(error) = register::ensure()
        {
            error.raise();
        }
        let mut events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
        let mut socket = pg_sys::PGINVALID_SOCKET as pg_sys::pgsocket;
        if let Some(fd) = fd {
            socket = fd.as_raw_fd();
            if interest.read {
                events |= pg_sys::WL_SOCKET_READABLE;
            }
            if interest.write {
                events |= pg_sys::WL_SOCKET_WRITEABLE;
            }
        }
        // Rounded up: a time-out of zero would make the caller's loop spin.
        let timeout = timeout.as_micros().div_ceil(1000).clamp(1, 3_600_000) as std::ffi::c_long;
        // SAFETY: the backend's own latch; the descriptor is open for the duration of the call.
        unsafe {
            let happened = pg_sys::WaitLatchOrSocket(
                pg_sys::MyLatch,
                events as i32,
                socket,
                timeout,
                wait_event(),
            );
            if happened as u32 & pg_sys::WL_LATCH_SET != 0 {
                pg_sys::ResetLatch(pg_sys::MyLatch);
            }
        }
        pgrx::check_for_interrupts!();
        Ok(())
    }

    fn check(&mut self) -> std::result::Result<(), Interrupted> {
        pgrx::check_for_interrupts!();
        Ok(())
    }
}

/// What `pg_stat_activity` shows while a backend waits for the store.
#[cfg(feature = "pg16")]
fn wait_event() -> u32 {
    pg_sys::PG_WAIT_EXTENSION
}

/// What `pg_stat_activity` shows while a backend waits for the store.
#[cfg(not(feature = "pg16"))]
fn wait_event() -> u32 {
    use std::cell::Cell;
    thread_local! {
        static EVENT: Cell<u32> = const { Cell::new(0) };
    }
    if EVENT.get() == 0 {
        // SAFETY: a static name; the call finds the event again if another backend has made it.
        EVENT.set(unsafe { pg_sys::WaitEventExtensionNew(c"PolignStore".as_ptr()) });
    }
    EVENT.get()
}
