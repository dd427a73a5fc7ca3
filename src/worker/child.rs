//! The `polign-store` process as its supervisor sees it.

use std::{
    ffi::{CStr, OsStr, c_char, c_int},
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::PermissionsExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use pgrx::pg_sys;

const PROGRAM: &str = "polign-store";

/// A running store process. Its standard input carries the configuration, and closing it is the
/// request to exit, which the death of the supervisor makes too.
#[derive(Debug)]
pub struct StoreProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    pub started: Instant,
}

impl StoreProcess {
    /// Starts the program and gives it its first configuration.
    pub fn start(program: &Path, config: &[u8]) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::inherit());
        // SAFETY: what runs between fork and exec is system calls only.
        unsafe { command.pre_exec(detach_from_postgres) };
        let mut child = command.spawn()?;
        let stdin = child.stdin.take();
        let mut process = Self { child, stdin, started: Instant::now() };
        process.configure(config)?;
        Ok(process)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line of configuration. A line is far shorter than a pipe's buffer: a process that has
    /// left so many of them unread that this one does not fit is stuck, which is an error here.
    pub fn configure(&mut self, line: &[u8]) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        let Some(stdin) = &mut self.stdin else { return Err(io::ErrorKind::BrokenPipe.into()) };
        // SAFETY: an open descriptor.
        unsafe { libc::fcntl(stdin.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        stdin.write_all(line)
    }

    /// How the process ended, if it has.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Asks the process to exit, and kills it if it has not after `patience`.
    pub fn stop(mut self, patience: Duration) {
        drop(self.stdin.take());
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a process ended, in words.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}

/// Gives the child a clean slate: no signal ignored or blocked, none of the descriptors of a Postgres
/// process; and ties its life to the supervisor's, also if it no longer looks at its input. It stays in
/// the supervisor's process group, to which the postmaster sends its signals. Descriptors are marked rather than closed, because the one on which the outcome of exec is
/// reported must live until then.
fn detach_from_postgres() -> io::Result<()> {
    // SAFETY: async-signal-safe system calls with valid arguments.
    unsafe {
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        #[cfg(target_os = "linux")]
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let marked = libc::syscall(
            libc::SYS_close_range,
            3 as libc::c_uint,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
        if marked != 0 {
            // Kernels before 5.11.
            let limit = libc::sysconf(libc::_SC_OPEN_MAX).clamp(256, 65_536) as c_int;
            for fd in 3..limit {
                libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
            }
        }
    }
    Ok(())
}

/// The program beside the server's own, or beside the extension's library.
pub fn find_program() -> Result<PathBuf, String> {
    // SAFETY: both are static NUL-terminated arrays that the postmaster fills before any worker starts.
    let (server, library) = unsafe {
        (
            CStr::from_ptr((&raw const pg_sys::my_exec_path).cast::<c_char>()),
            CStr::from_ptr((&raw const pg_sys::pkglib_path).cast::<c_char>()),
        )
    };
    let bin = Path::new(OsStr::from_bytes(server.to_bytes())).parent();
    let library = Path::new(OsStr::from_bytes(library.to_bytes()));
    let tried: Vec<_> = bin.into_iter().chain([library]).map(|dir| dir.join(PROGRAM)).collect();
    let executable = |path: &&PathBuf| {
        path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    tried.iter().find(executable).cloned().ok_or_else(|| {
        tried.iter().map(|path| format!("\"{}\"", path.display())).collect::<Vec<_>>().join(" or ")
    })
}
