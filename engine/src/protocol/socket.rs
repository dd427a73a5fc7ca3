use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, net::UnixStream},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};

/// The socket's name in the cache directory.
pub const SOCKET_NAME: &str = "sock";
/// Longest path that fits in a socket address together with its terminating zero.
pub const MAX_SOCKET_PATH: usize = 107;

/// A path by which the cache directory's socket can be named in a socket address, whatever the
/// length of the directory's own path. Valid while it lives.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    _directory: Option<OwnedFd>,
}

impl SocketPath {
    pub fn in_directory(directory: &Path) -> io::Result<Self> {
        let path = directory.join(SOCKET_NAME);
        if path.as_os_str().as_bytes().len() <= MAX_SOCKET_PATH {
            return Ok(Self { path, _directory: None });
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        let path = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET_NAME}", directory.as_raw_fd()));
        Ok(Self { path, _directory: Some(directory) })
    }

    pub fn as_path(&self) -> &Path {
        &self.path
    }

    /// Connects without ever blocking: a listener whose queue is full is a `WouldBlock` error.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&self.path)?)?;
        Ok(UnixStream::from(socket))
    }
}

/// Whether the process at the other end runs as this process's user.
pub fn peer_is_same_user(socket: impl AsFd) -> io::Result<bool> {
    let peer = rustix::net::sockopt::socket_peercred(socket)?;
    Ok(peer.uid == rustix::process::geteuid())
}
