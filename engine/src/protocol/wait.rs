use std::{os::fd::BorrowedFd, time::Duration};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What to wait for on the socket besides the caller's own interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    pub read: bool,
    pub write: bool,
}

/// The caller was asked to stop: a cancelled query, a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// How a blocking call waits. Postgres backends wait on their latch as well; everyone else polls.
///
/// An implementation may unwind instead of returning: the client holds no half-finished state then.
pub trait Waiter {
    /// Returns when `fd` is ready, `timeout` has passed, or for no reason at all. Without `fd` it
    /// sleeps: the client is between two attempts to connect.
    fn wait(
        &mut self,
        fd: Option<BorrowedFd<'_>>,
        interest: Interest,
        timeout: Duration,
    ) -> Result<(), Interrupted>;

    /// Looks, without waiting, whether the caller was asked to stop. Long computations call it now and
    /// then.
    fn check(&mut self) -> Result<(), Interrupted> {
        Ok(())
    }
}

impl<W: Waiter + ?Sized> Waiter for &mut W {
    fn wait(
        &mut self,
        fd: Option<BorrowedFd<'_>>,
        interest: Interest,
        timeout: Duration,
    ) -> Result<(), Interrupted> {
        (**self).wait(fd, interest, timeout)
    }

    fn check(&mut self) -> Result<(), Interrupted> {
        (**self).check()
    }
}

/// Waits with `poll(2)`: for tests, tools and threads that nothing interrupts.
#[derive(Debug, Clone, Copy, Default)]
pub struct PollWaiter;

impl Waiter for PollWaiter {
    fn wait(
        &mut self,
        fd: Option<BorrowedFd<'_>>,
        interest: Interest,
        timeout: Duration,
    ) -> Result<(), Interrupted> {
        let Some(fd) = fd else {
            std::thread::sleep(timeout);
            return Ok(());
        };
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, interest.read);
        flags.set(PollFlags::OUT, interest.write);
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // An error here (EINTR) is a wake-up for no reason; the caller looks at the socket itself.
        let _ = poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&timeout));
        Ok(())
    }
}
