//! One supervisor at a time.
//!
//! An open-file-description lock: unlike a `flock` it can be asked about without being taken, so that a
//! backend that looks whether a supervisor runs cannot keep a starting one out.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

use crate::places;

/// Held for as long as it lives.
#[derive(Debug)]
pub struct InstanceLock {
    _file: File,
}

impl InstanceLock {
    /// Takes the lock. `None` if another process holds it.
    pub fn take() -> io::Result<Option<Self>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(places::supervisor_lock())?;
        let mut lock = whole_file();
        // SAFETY: an open descriptor and a valid struct flock.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) } == 0 {
            return Ok(Some(Self { _file: file }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => Ok(None),
            _ => Err(error),
        }
    }

    /// Whether some process holds the lock.
    pub fn is_held() -> bool {
        let Ok(file) = OpenOptions::new().read(true).write(true).open(places::supervisor_lock())
        else {
            return false;
        };
        let mut lock = whole_file();
        // SAFETY: an open descriptor and a valid struct flock.
        let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        asked == 0 && lock.l_type != libc::F_UNLCK as libc::c_short
    }
}

fn whole_file() -> libc::flock {
    // SAFETY: all zeros is a valid struct flock: from offset 0 to the end of the file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}
