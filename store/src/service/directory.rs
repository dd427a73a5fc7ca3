//! The cache directory: made private, locked, and with a socket in it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use polign_engine::{
    cache::UPLOAD_DIRECTORY,
    protocol::{SOCKET_NAME, SocketPath},
};
use rustix::fs::{FlockOperation, flock};
use tokio::{net::UnixListener, sync::Notify};

const LOCK_NAME: &str = "lock";
/// How long a process that is on its way out is waited for.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Upload files that nobody took for so long belong to backends that are gone.
const STALE_UPLOAD: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the cache directory \"{}\" cannot be used: {cause}", path.display())]
    Directory { path: PathBuf, cause: io::Error },
    #[error("the data directory cannot be read: {0}")]
    DataDirectory(io::Error),
    #[error("another polign-store uses the cache directory \"{}\"", .0.display())]
    Locked(PathBuf),
}

/// The directory in the hands of this process.
#[derive(Debug)]
pub struct CacheDirectory {
    path: PathBuf,
    held: Mutex<Held>,
    is_lost: AtomicBool,
    lost: Notify,
}

#[derive(Debug)]
struct Held {
    _lock: File,
    socket: Option<(u64, u64)>,
}

impl CacheDirectory {
    /// Makes the directory if need be, and locks it.
    pub fn take(path: &Path) -> Result<Self, StartError> {
        let failed = |cause| StartError::Directory { path: path.to_path_buf(), cause };
        let lock = prepare(path).map_err(failed)?;
        let until = Instant::now() + LOCK_PATIENCE;
        while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            if Instant::now() > until {
                return Err(StartError::Locked(path.to_path_buf()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // Absolute, so that messages name it; the socket's address is as short as it can be.
        let path = fs::canonicalize(path).map_err(failed)?;
        let held = Mutex::new(Held { _lock: lock, socket: None });
        let directory = Self { path, held, is_lost: AtomicBool::new(false), lost: Notify::new() };
        directory.remove_stale_uploads();
        Ok(directory)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn upload(&self) -> PathBuf {
        self.path.join(UPLOAD_DIRECTORY)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Binds the socket. Call within a runtime.
    pub fn listen(&self) -> Result<UnixListener, StartError> {
        self.bind().map_err(|cause| StartError::Directory { path: self.path.clone(), cause })
    }

    fn bind(&self) -> io::Result<UnixListener> {
        let path = self.path.join(SOCKET_NAME);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(SocketPath::in_directory(&self.path)?.as_path())?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        self.held().socket = Some(identity(&path)?);
        Ok(listener)
    }

    /// Ends when the socket is not in the directory any more.
    pub async fn lost(&self) {
        while !self.is_lost() {
            self.lost.notified().await;
        }
    }

    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Looks whether the directory still has what this process put there.
    pub fn look_after(&self) {
        let here = identity(&self.path.join(SOCKET_NAME)).ok();
        if here != self.held().socket {
            self.is_lost.store(true, Ordering::Relaxed);
            self.lost.notify_one();
        }
    }

    /// Makes the directory again after it was emptied or deleted.
    pub fn listen_again(&self) -> io::Result<UnixListener> {
        let lock = prepare(&self.path)?;
        // Ours, as long as nobody put another lock there and took it.
        if identity_of(&lock)? != identity_of(&self.held()._lock)? {
            flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
            self.held()._lock = lock;
        }
        let listener = self.bind()?;
        self.is_lost.store(false, Ordering::Relaxed);
        Ok(listener)
    }

    /// Removes the upload files of backends that were killed. Younger ones stay, at the end of this
    /// process too: their backends offer them to the next one.
    pub fn remove_stale_uploads(&self) {
        let Ok(entries) = fs::read_dir(self.upload()) else { return };
        for entry in entries.flatten() {
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            let age = modified.map(|at| SystemTime::now().duration_since(at).unwrap_or_default());
            if age.is_ok_and(|age| age > STALE_UPLOAD) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    pub fn stop_listening(&self) {
        let path = self.path.join(SOCKET_NAME);
        if identity(&path).ok() == self.held().socket {
            let _ = fs::remove_file(path);
        }
    }
}

fn prepare(path: &Path) -> io::Result<File> {
    for directory in [path.to_path_buf(), path.join(UPLOAD_DIRECTORY)] {
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        fs::set_permissions(&directory, Permissions::from_mode(0o700))?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.open(path.join(LOCK_NAME))
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

fn identity_of(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}
