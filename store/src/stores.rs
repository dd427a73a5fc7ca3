//! The object stores in use, by URL.

use std::{collections::HashMap, sync::Arc};

use futures_util::future::BoxFuture;
use polign_engine::{
    StoreUrl,
    protocol::{Failure, FailureKind},
    store_url::UrlError,
};
use tokio::sync::Mutex;

use crate::{
    config::Config,
    object_store::{FileStore, ObjectStore, S3Settings, S3Store},
    region_cache::RegionCache,
    remote::Remote,
};

/// Opens the store at a URL. Does not speak to it yet.
pub trait OpenStore: Send + Sync {
    fn open<'a>(
        &'a self,
        url: &'a str,
        s3: &'a S3Settings,
    ) -> BoxFuture<'a, Result<Arc<dyn ObjectStore>, UrlError>>;
}

/// Opens `file:` and `s3:` URLs.
#[derive(Debug, Clone, Copy)]
pub struct OpenByUrl;

impl OpenStore for OpenByUrl {
    fn open<'a>(
        &'a self,
        url: &'a str,
        s3: &'a S3Settings,
    ) -> BoxFuture<'a, Result<Arc<dyn ObjectStore>, UrlError>> {
        Box::pin(async move {
            let store: Arc<dyn ObjectStore> = match StoreUrl::parse(url)? {
                StoreUrl::File(path) => Arc::new(FileStore::new(path)),
                StoreUrl::S3 { bucket, prefix } => {
                    Arc::new(S3Store::new(bucket, prefix, s3.clone()).await)
                }
            };
            Ok(store)
        })
    }
}

pub struct Stores {
    open: Box<dyn OpenStore>,
    cache: Arc<RegionCache>,
    state: Mutex<State>,
}

struct State {
    s3: S3Settings,
    concurrency: u32,
    remotes: HashMap<String, Arc<Remote>>,
}

impl Stores {
    pub fn new(open: Box<dyn OpenStore>, cache: Arc<RegionCache>, config: &Config) -> Self {
        let (s3, concurrency) = (config.s3(), config.fetch_concurrency);
        Self { open, cache, state: Mutex::new(State { s3, concurrency, remotes: HashMap::new() }) }
    }

    /// Later requests use the new settings; those under way go on with the old ones.
    pub async fn reconfigure(&self, config: &Config) {
        let mut state = self.state.lock().await;
        if state.s3 != config.s3() {
            state.s3 = config.s3();
            state.remotes.clear();
        }
        state.concurrency = config.fetch_concurrency;
        for remote in state.remotes.values() {
            remote.set_concurrency(config.fetch_concurrency);
        }
    }

    pub async fn at(&self, url: &str) -> Result<Arc<Remote>, Failure> {
        let mut state = self.state.lock().await;
        if let Some(remote) = state.remotes.get(url) {
            return Ok(Arc::clone(remote));
        }
        let store = self.open.open(url, &state.s3).await.map_err(|error| Failure {
            kind: FailureKind::Invalid,
            code: String::new(),
            message: error.to_string(),
            detail: String::new(),
            object: String::new(),
            url: url.into(),
        })?;
        let remote = Arc::new(Remote::new(store, state.concurrency, Arc::clone(&self.cache)));
        state.remotes.insert(url.into(), Arc::clone(&remote));
        Ok(remote)
    }
}
