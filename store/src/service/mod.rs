//! The program around the cache and the stores: the directory, the socket, its connections.

mod connection;
mod directory;
mod ingest;
mod requests;
#[cfg(test)]
mod tests;

use std::{
    path::PathBuf,
    sync::{Arc, RwLock},
    time::Duration,
};

use polign_engine::{ObjectId, protocol::Home};
use tokio::{net::UnixListener, sync::Notify};

use crate::{
    config::Config,
    fetch::Fetcher,
    log::{info, warn},
    region_cache::{MakeDisk, RegionCache, SlabFiles},
    stores::{OpenByUrl, OpenStore, Stores},
};

pub use directory::{CacheDirectory, StartError};

/// How often the files of the cache are looked after.
const LOOK_AFTER: Duration = Duration::from_secs(1);
/// How often stale upload files are looked for.
const SWEEP_UPLOADS: Duration = Duration::from_secs(3600);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Everything that connections share.
pub(crate) struct Shared {
    pub(crate) fetcher: Fetcher,
    pub(crate) stores: Stores,
    pub(crate) directory: CacheDirectory,
    pub(crate) home: DataDirectory,
    config: RwLock<Config>,
    /// Somebody asked the process to make room for a newer one.
    replaced: Notify,
}

impl Shared {
    pub(crate) fn config(&self) -> Config {
        self.config.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    pub(crate) fn cache(&self) -> &Arc<RegionCache> {
        self.fetcher.cache()
    }

    pub(crate) fn cache_id(&self) -> ObjectId {
        self.cache().id()
    }

    pub(crate) fn make_room_for_newer(&self) {
        self.replaced.notify_one();
    }
}

/// The data directory of the cluster that is served, which is where relative paths start.
pub(crate) struct DataDirectory {
    pub(crate) path: PathBuf,
    pub(crate) id: Home,
}

impl DataDirectory {
    fn of_this_process() -> Result<Self, StartError> {
        let find = || {
            let path = std::env::current_dir()?;
            Ok(Self { id: Home::of(&path)?, path })
        };
        find().map_err(StartError::DataDirectory)
    }
}

/// What can be replaced in tests.
pub struct Parts {
    pub open_store: Box<dyn OpenStore>,
    pub make_disk: MakeDisk,
    pub sweep_uploads: Duration,
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            open_store: Box::new(OpenByUrl),
            make_disk: Box::new(|path| Box::new(SlabFiles::new(path))),
            sweep_uploads: SWEEP_UPLOADS,
        }
    }
}

/// A running service. It stops when dropped or when [`Service::run`] is.
pub struct Service {
    shared: Arc<Shared>,
    listener: Option<UnixListener>,
    sweep_uploads: Duration,
}

impl Service {
    /// Takes the cache directory and listens. Call within a runtime.
    pub fn start(config: Config, parts: Parts) -> Result<Self, StartError> {
        let home = DataDirectory::of_this_process()?;
        let directory = CacheDirectory::take(&config.cache_dir)?;
        let listener = directory.listen()?;
        let path = directory.path().to_path_buf();
        let cache = RegionCache::with_disk(&path, config.cache_size_bytes, parts.make_disk);
        let cache = Arc::new(cache);
        let shared = Shared {
            stores: Stores::new(parts.open_store, Arc::clone(&cache), &config),
            fetcher: Fetcher::new(cache),
            directory,
            home,
            config: RwLock::new(config),
            replaced: Notify::new(),
        };
        let sweep_uploads = parts.sweep_uploads;
        Ok(Self { shared: Arc::new(shared), listener: Some(listener), sweep_uploads })
    }

    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared) }
    }

    /// Serves until a newer library asks for a newer process.
    pub async fn run(mut self) {
        let listener = self.listener.take();
        let keep = tokio::spawn(look_after(Arc::clone(&self.shared)));
        let sweep = tokio::spawn(sweep_uploads(Arc::clone(&self.shared), self.sweep_uploads));
        let keep = (AbortOnDrop(keep), AbortOnDrop(sweep));
        if let Some(listener) = listener {
            tokio::select! {
                () = accept(listener, Arc::clone(&self.shared)) => {}
                () = self.shared.replaced.notified() => {
                    info("a newer library is in use: exiting to be replaced");
                }
            }
        }
        drop(keep);
        self.shared.directory.stop_listening();
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Changes a running service.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// Applies a new configuration. False if it needs a new process.
    pub async fn reconfigure(&self, config: Config) -> bool {
        let old = self.shared.config();
        if config == old {
            return true;
        }
        if config.cache_dir != old.cache_dir {
            info("the cache directory changed: exiting to be started there");
            return false;
        }
        self.shared.stores.reconfigure(&config).await;
        if config.cache_size_bytes != old.cache_size_bytes {
            let (cache, bytes) = (Arc::clone(self.shared.cache()), config.cache_size_bytes);
            let _ = tokio::task::spawn_blocking(move || cache.resize(bytes)).await;
            info(&format!("the cache may have {bytes} bytes now"));
        }
        *self.shared.config.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = config;
        true
    }

    /// Where the socket is, to be removed on the way out.
    pub fn socket(&self) -> PathBuf {
        self.shared.directory.path().join(polign_engine::protocol::SOCKET_NAME)
    }
}

async fn accept(mut listener: UnixListener, shared: Arc<Shared>) {
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(connection::serve(stream, Arc::clone(&shared)));
                }
                Err(error) => {
                    warn(&format!("a connection cannot be accepted: {error}"));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            () = shared.directory.lost() => match shared.directory.listen_again() {
                Ok(new) => {
                    warn("the cache directory was emptied: made anew");
                    listener = new;
                }
                Err(error) => {
                    warn(&format!("the cache directory cannot be made anew: {error}"));
                    tokio::time::sleep(LOOK_AFTER).await;
                }
            },
        }
    }
}

async fn look_after(shared: Arc<Shared>) {
    let mut interval = tokio::time::interval(LOOK_AFTER);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let shared = Arc::clone(&shared);
        let _ = tokio::task::spawn_blocking(move || {
            shared.directory.look_after();
            if !shared.directory.is_lost() {
                shared.cache().look_after();
            }
        })
        .await;
    }
}

async fn sweep_uploads(shared: Arc<Shared>, every: Duration) {
    let mut interval = tokio::time::interval(every);
    loop {
        interval.tick().await;
        let shared = Arc::clone(&shared);
        let sweep = move || shared.directory.remove_stale_uploads();
        let _ = tokio::task::spawn_blocking(sweep).await;
    }
}
