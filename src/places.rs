//! Directories that backends, the supervisor and the store process have to agree on.

use std::{
    ffi::{CStr, CString, OsStr},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use pgrx::pg_sys;

use crate::guc;

/// Postgres' own place for files that need not last: base backups skip what is in it.
const TEMPORARY: &str = "pg_stat_tmp";

/// The data directory.
pub fn data_dir() -> &'static Path {
    // SAFETY: set before any library is loaded, and never changed.
    let data_dir = unsafe { CStr::from_ptr(pg_sys::DataDir) };
    Path::new(OsStr::from_bytes(data_dir.to_bytes()))
}

/// The file by whose lock there is one supervisor.
pub fn supervisor_lock() -> PathBuf {
    data_dir().join(TEMPORARY).join("polign_supervisor.lock")
}

/// The cache directory as it is set, as an absolute path.
pub fn configured_cache_dir() -> PathBuf {
    let setting = guc::CACHE_DIR.get().unwrap_or_default();
    data_dir().join(OsStr::from_bytes(setting.as_bytes()))
}

/// The cache directory that is in use: the configured one, or one in the data directory as long as that
/// cannot be written. Every process looks for itself; all run as the same user.
pub fn cache_dir() -> PathBuf {
    let configured = configured_cache_dir();
    if can_be_used(&configured) { configured } else { fallback_cache_dir() }
}

/// Holds little more than the socket: queries are answered, slowly.
pub fn fallback_cache_dir() -> PathBuf {
    data_dir().join(TEMPORARY).join("polign_cache")
}

/// Whether the directory, or the one above it that exists, can be written.
fn can_be_used(directory: &Path) -> bool {
    for directory in directory.ancestors() {
        let Ok(path) = CString::new(directory.as_os_str().as_bytes()) else { return false };
        // SAFETY: a NUL-terminated path.
        if unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } == 0 {
            return directory.is_dir();
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::NotFound {
            return false;
        }
    }
    false
}
