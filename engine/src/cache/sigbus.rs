//! Survives the truncation of a mapped file and media errors under it.
//!
//! Touching a mapped page that the file no longer has raises SIGBUS, which would kill the process (a
//! backend takes the whole Postgres cluster with it). Within registered ranges the handler maps a page
//! of zeros over the fault, counts it, and lets the access be repeated; whoever reads there compares
//! the count afterwards and drops what was read. Every other SIGBUS goes on to the handler that was
//! there before.

use std::{
    cell::UnsafeCell,
    ffi::{c_int, c_void},
    io, mem,
    ptr::null_mut,
    sync::{
        OnceLock,
        atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering},
    },
};

/// Ranges that may be registered at a time: two a cache map.
const SLOTS: usize = 256;

/// How the pages of a range may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Access {
    Read = libc::PROT_READ,
    ReadWrite = libc::PROT_READ | libc::PROT_WRITE,
}

struct Slot {
    /// 0: free, 1: being filled, otherwise the first address of a range in use.
    start: AtomicUsize,
    end: AtomicUsize,
    protection: AtomicI32,
    faults: AtomicU64,
}

impl Slot {
    const FREE: usize = 0;
    const CLAIMED: usize = 1;

    const fn new() -> Self {
        Self {
            start: AtomicUsize::new(Self::FREE),
            end: AtomicUsize::new(0),
            protection: AtomicI32::new(0),
            faults: AtomicU64::new(0),
        }
    }
}

static RANGES: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];

struct Previous(UnsafeCell<mem::MaybeUninit<libc::sigaction>>);

// SAFETY: written once, before our handler is installed, and only read by the handler.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(UnsafeCell::new(mem::MaybeUninit::zeroed()));
static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();

/// A registered range. Release it before the range is unmapped.
#[derive(Debug)]
pub(super) struct Guard {
    slot: usize,
}

impl Guard {
    /// Registers `len` bytes from `start`, all of them mapped. Installs the handler on first use.
    pub fn register(start: usize, len: usize, access: Access) -> io::Result<Self> {
        install()?;
        for (number, slot) in RANGES.iter().enumerate() {
            let claim = slot.start.compare_exchange(
                Slot::FREE,
                Slot::CLAIMED,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            if claim.is_ok() {
                slot.end.store(start + len, Ordering::Relaxed);
                slot.protection.store(access as i32, Ordering::Relaxed);
                slot.faults.store(0, Ordering::Relaxed);
                slot.start.store(start, Ordering::Release);
                return Ok(Self { slot: number });
            }
        }
        Err(io::Error::other("too many mapped caches in one process"))
    }

    /// Faults mended in the range since it was registered.
    pub fn faults(&self) -> u64 {
        RANGES[self.slot].faults.load(Ordering::Relaxed)
    }

    pub fn release(&self) {
        RANGES[self.slot].start.store(Slot::FREE, Ordering::Release);
    }
}

fn install() -> io::Result<()> {
    let outcome = INSTALLED.get_or_init(|| {
        // SAFETY: a zeroed sigaction is a valid one; the old action is saved where only the handler
        // reads it, before the handler can run.
        unsafe {
            if libc::sigaction(libc::SIGBUS, null_mut(), (*PREVIOUS.0.get()).as_mut_ptr()) != 0 {
                return Err(errno());
            }
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            if libc::sigaction(libc::SIGBUS, &action, null_mut()) != 0 {
                return Err(errno());
            }
        }
        Ok(())
    });
    outcome.map_err(io::Error::from_raw_os_error)
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

/// Runs in signal context: touches atomics and system calls only.
extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo; `si_addr` is set for the codes looked at; errno is
    // kept for the interrupted code.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        let is_fault =
            matches!((*info).si_code, libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR);
        let mended = is_fault && mend((*info).si_addr() as usize);
        *errno = saved;
        if !mended {
            chain(signal, info, context);
        }
    }
}

fn mend(address: usize) -> bool {
    for slot in &RANGES {
        let start = slot.start.load(Ordering::Acquire);
        if start <= Slot::CLAIMED || address < start || address >= slot.end.load(Ordering::Relaxed)
        {
            continue;
        }
        // SAFETY: a plain system call. Replaces one page within a range whose owner registered it for
        // this; the range is released before it is unmapped.
        let mapped = unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            libc::mmap(
                (address & !(page - 1)) as *mut c_void,
                page,
                slot.protection.load(Ordering::Relaxed),
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return false;
        }
        slot.faults.fetch_add(1, Ordering::Relaxed);
        return true;
    }
    false
}

/// # Safety
/// Called from the handler with the kernel's arguments.
unsafe fn chain(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: saved before the handler was installed and not written since. A handler of the previous
    // owner is called as the kernel would call it. By default, the default action is restored and the
    // faulting instruction, repeated on return, raises the signal again.
    unsafe {
        let previous = (*PREVIOUS.0.get()).assume_init_ref();
        match previous.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => {
                let mut default: libc::sigaction = mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, null_mut());
                if (*info).si_code <= 0 {
                    // Sent by a process: no instruction will repeat it.
                    libc::raise(signal);
                }
            }
            handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                    mem::transmute(handler);
                handler(signal, info, context);
            }
            handler => {
                let handler: extern "C" fn(c_int) = mem::transmute(handler);
                handler(signal);
            }
        }
    }
}
