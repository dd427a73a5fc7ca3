//! What one process keeps of the cache from search to search.

use std::{
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, Instant},
};

use super::{CacheMap, trusted::Trusted};
use crate::{
    ObjectId,
    protocol::{Client, ClientOptions},
};

/// Time between two attempts to map a cache that could not be mapped.
const MAP_RETRY: Duration = Duration::from_millis(200);

/// What one process holds of the cache: the mapping and the connection to the store process.
#[derive(Debug)]
pub struct CacheLink {
    directory: PathBuf,
    client: Client,
    map: Option<Rc<CacheMap>>,
    next_map_attempt: Instant,
    /// Parts whose checksum this process has found right.
    pub(super) trusted: Trusted,
    /// The store process seen last, and the cache that it had when the connection was made.
    server: Option<(u32, ObjectId)>,
}

impl CacheLink {
    /// A link to the cache in this directory. Nothing is opened before it is used.
    pub fn new(directory: impl Into<PathBuf>, options: ClientOptions) -> Self {
        let directory = directory.into();
        let client = Client::new(&directory, options);
        Self {
            directory,
            client,
            map: None,
            next_map_attempt: Instant::now(),
            trusted: Trusted::default(),
            server: None,
        }
    }

    /// The cache directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The connection to the store process.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// The mapped cache, if there is one that can be used now.
    pub fn map(&mut self) -> Option<Rc<CacheMap>> {
        let server = self.client.server().map(|ack| (ack.pid, ack.cache));
        if server.is_some() && server != self.server {
            self.server = server;
            // A directory that was deleted while there was no store process is not marked as retired.
            self.map.take_if(|map| server.is_some_and(|(_, cache)| cache != map.id()));
        }
        self.map.take_if(|map| map.is_retired());
        if self.map.is_none() && Instant::now() >= self.next_map_attempt {
            self.map = CacheMap::open(&self.directory).ok().map(Rc::new);
            self.trusted.clear();
            if self.map.is_none() {
                self.next_map_attempt = Instant::now() + MAP_RETRY;
            }
        }
        self.map.clone()
    }
}
