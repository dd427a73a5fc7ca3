//! A store in memory that fails as it is told, for deterministic tests of everything above it.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use polign_engine::protocol::{ListedObject, UploadName};
use tokio::sync::Semaphore;

use super::{
    Created, ErrorClass, Listing, ObjectStore, Source, StoreError, StoreResult, Unfinished,
};

/// What happens to the next request.
#[derive(Debug, Clone)]
pub enum Fault {
    None,
    Fail(ErrorClass),
    /// The request is carried out, and its answer lost.
    FailAfter(ErrorClass),
    /// No answer ever.
    Hang,
    /// A byte of the answer is wrong.
    Flip,
}

#[derive(Debug)]
pub struct FakeStore {
    objects: Mutex<BTreeMap<String, Bytes>>,
    faults: Mutex<VecDeque<Fault>>,
    log: Mutex<Vec<String>>,
    /// Requests pass one permit each.
    gate: Semaphore,
    refreshes: Mutex<u32>,
}

const OPEN: usize = 1 << 20;

impl Default for FakeStore {
    fn default() -> Self {
        Self {
            objects: Mutex::default(),
            faults: Mutex::default(),
            log: Mutex::default(),
            gate: Semaphore::new(OPEN),
            refreshes: Mutex::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

impl FakeStore {
    pub fn insert(&self, key: &str, bytes: impl Into<Bytes>) {
        lock(&self.objects).insert(key.into(), bytes.into());
    }

    pub fn object(&self, key: &str) -> Option<Bytes> {
        lock(&self.objects).get(key).cloned()
    }

    /// The fates of the next requests, in order; those after them succeed.
    pub fn script(&self, faults: impl IntoIterator<Item = Fault>) {
        lock(&self.faults).extend(faults);
    }

    /// Requests wait until [`FakeStore::open_gate`].
    pub fn close_gate(&self) {
        self.gate.forget_permits(OPEN);
    }

    pub fn open_gate(&self) {
        self.gate.add_permits(OPEN);
    }

    /// The requests so far: a verb, the key, and the range of a read.
    pub fn log(&self) -> Vec<String> {
        lock(&self.log).clone()
    }

    pub fn count(&self, verb: &str) -> usize {
        lock(&self.log).iter().filter(|entry| entry.split(' ').next() == Some(verb)).count()
    }

    pub fn refreshes(&self) -> u32 {
        *lock(&self.refreshes)
    }

    async fn perform<T>(
        &self,
        entry: String,
        act: impl FnOnce(bool) -> StoreResult<T>,
    ) -> StoreResult<T> {
        lock(&self.log).push(entry);
        self.gate.acquire().await.unwrap().forget();
        self.gate.add_permits(1);
        let fault = lock(&self.faults).pop_front().unwrap_or(Fault::None);
        let error = |class| {
            let code = if class == ErrorClass::Throttled { "SlowDown" } else { "" };
            StoreError::new(class, code, "injected")
        };
        match fault {
            Fault::None => act(false),
            Fault::Flip => act(true),
            Fault::Fail(class) => Err(error(class)),
            Fault::FailAfter(class) => act(false).and(Err(error(class))),
            Fault::Hang => {
                tokio::time::sleep(Duration::from_secs(3600)).await;
                Err(error(ErrorClass::Transient))
            }
        }
    }

    fn find(&self, key: &str) -> StoreResult<Bytes> {
        self.object(key).ok_or_else(|| StoreError::new(ErrorClass::NotFound, "NoSuchKey", "none"))
    }
}

impl ObjectStore for FakeStore {
    fn url(&self) -> &str {
        "fake:"
    }

    fn get_range<'a>(
        &'a self,
        key: &'a str,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'a, StoreResult<Bytes>> {
        Box::pin(self.perform(format!("get {key} {offset}+{len}"), move |flip| {
            let bytes = self.find(key)?;
            let (start, end) = (offset as usize, (offset + len) as usize);
            if end > bytes.len() {
                return Err(StoreError::new(ErrorClass::Damaged, "", "short"));
            }
            let mut bytes = bytes[start..end].to_vec();
            if flip {
                bytes[len as usize / 2] ^= 1;
            }
            Ok(bytes.into())
        }))
    }

    fn get<'a>(&'a self, key: &'a str, limit: u64) -> BoxFuture<'a, StoreResult<Bytes>> {
        Box::pin(self.perform(format!("read {key}"), move |_| {
            let bytes = self.find(key)?;
            if bytes.len() as u64 > limit {
                return Err(StoreError::new(ErrorClass::Damaged, "", "long"));
            }
            Ok(bytes)
        }))
    }

    fn len<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<Option<u64>>> {
        Box::pin(self.perform(format!("len {key}"), move |_| {
            Ok(self.object(key).map(|bytes| bytes.len() as u64))
        }))
    }

    fn put<'a>(&'a self, key: &'a str, source: Source) -> BoxFuture<'a, StoreResult<()>> {
        Box::pin(async move {
            let bytes = source.read(0, source.len() as usize).await?;
            self.perform(format!("put {key}"), move |_| {
                self.insert(key, bytes);
                Ok(())
            })
            .await
        })
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a str,
        bytes: Bytes,
    ) -> BoxFuture<'a, StoreResult<Created>> {
        Box::pin(self.perform(format!("create {key}"), move |_| {
            if self.object(key).is_some() {
                return Ok(Created::Existed);
            }
            self.insert(key, bytes);
            Ok(Created::New)
        }))
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<()>> {
        Box::pin(self.perform(format!("delete {key}"), move |_| {
            lock(&self.objects).remove(key);
            Ok(())
        }))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        limit: usize,
    ) -> BoxFuture<'a, StoreResult<Listing>> {
        Box::pin(self.perform(format!("list {prefix}"), move |_| {
            let objects = lock(&self.objects);
            let matching = objects
                .iter()
                .filter(|(key, _)| key.starts_with(prefix) && after.is_none_or(|a| &***key > a));
            let all: Vec<ListedObject> = matching
                .map(|(key, bytes)| {
                    let (key, len) = (key.clone(), bytes.len() as u64);
                    ListedObject { key, len, modified_ms: 0 }
                })
                .collect();
            let more = all.len() > limit;
            let objects = all.into_iter().take(limit).collect();
            Ok(Listing { objects, more, now_ms: None })
        }))
    }

    fn list_uploads<'a>(
        &'a self,
        _prefix: &'a str,
        _after: Option<&'a UploadName>,
        _limit: usize,
    ) -> BoxFuture<'a, StoreResult<Unfinished>> {
        Box::pin(async { Ok(Unfinished::default()) })
    }

    fn abort_upload<'a>(&'a self, _upload: &'a UploadName) -> BoxFuture<'a, StoreResult<()>> {
        Box::pin(async { Ok(()) })
    }

    fn refresh_credentials(&self) -> BoxFuture<'_, bool> {
        Box::pin(async {
            *lock(&self.refreshes) += 1;
            true
        })
    }
}
