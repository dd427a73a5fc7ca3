//! The program: configuration from standard input, whose end is the end of the program.

use std::{
    io::{self, BufRead},
    process::ExitCode,
    sync::{Arc, OnceLock},
    thread,
};

use polign_store::{
    config::Config,
    log::{info, warn},
    service::{Handle, Parts, Service},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::mpsc;

const USAGE: &str = "usage: polign-store [--config-stdin | --version]
Reads its configuration from standard input, a line of JSON at the start and another after each
change, and exits at its end. Started by the polign extension.";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None | Some("--config-stdin") => {}
        Some("--version") => {
            println!("polign-store {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some(_) => {
            eprintln!("{USAGE}");
            return ExitCode::FAILURE;
        }
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            warn(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    rustix::process::umask(rustix::fs::Mode::from(0o077));
    raise_file_limit();
    let mut first = String::new();
    if io::stdin().lock().read_line(&mut first)? == 0 {
        return Ok(());
    }
    let config = Config::parse(&first)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // From here on a signal or the end of the input ends the program, whatever it is doing.
    let running: Arc<OnceLock<Handle>> = Arc::default();
    runtime.block_on(heed_signals(&running))?;
    let (lines, changes) = mpsc::unbounded_channel();
    thread::Builder::new().name("config".into()).spawn({
        let running = Arc::clone(&running);
        move || read_config(&running, &lines)
    })?;
    let directory = config.cache_dir.display().to_string();
    let service = {
        let _context = runtime.enter();
        Service::start(config, Parts::default())?
    };
    let _ = running.set(service.handle());
    info(&format!("serving \"{directory}\" (PID {})", std::process::id()));
    runtime.block_on(serve(service, changes));
    runtime.shutdown_background();
    Ok(())
}

async fn serve(service: Service, mut changes: mpsc::UnboundedReceiver<Config>) {
    let handle = service.handle();
    let reconfigure = async {
        while let Some(config) = changes.recv().await {
            if !handle.reconfigure(config).await {
                return;
            }
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = service.run() => {}
        () = reconfigure => {}
    }
}

fn read_config(running: &OnceLock<Handle>, changes: &mpsc::UnboundedSender<Config>) {
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        match Config::parse(&line) {
            Ok(config) => {
                let _ = changes.send(config);
            }
            Err(error) => warn(&error.to_string()),
        }
    }
    leave(running);
}

/// Nothing under way needs an orderly end: the cache survives a kill, uploads are repeated. But a socket
/// that is left in the data directory keeps `pg_rewind` from removing the directory that it lies in.
fn leave(running: &OnceLock<Handle>) -> ! {
    if let Some(handle) = running.get() {
        let _ = std::fs::remove_file(handle.socket());
    }
    std::process::exit(0);
}

/// Postgres signals whole process groups. Its shutdown is this program's too; that a query is cancelled or
/// the settings are read again is not for it.
async fn heed_signals(running: &Arc<OnceLock<Handle>>) -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    for kind in [SignalKind::interrupt(), SignalKind::hangup()] {
        let mut signals = signal(kind)?;
        tokio::spawn(async move { while signals.recv().await.is_some() {} });
    }
    for kind in [SignalKind::terminate(), SignalKind::quit()] {
        let mut signals = signal(kind)?;
        let running = Arc::clone(running);
        tokio::spawn(async move {
            signals.recv().await;
            leave(&running);
        });
    }
    Ok(())
}

fn raise_file_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn(&format!("the limit of open files cannot be raised: {error}"));
    }
}
