//! An object store with everything around a single attempt: turns, retries, second requests, counts.

use std::{future::Future, pin::pin, sync::Arc, time::Instant};

use bytes::Bytes;
use polign_engine::{
    cache::Counter,
    protocol::{Failure, FailureKind, UploadName},
    store_url::check_key,
};
use tokio::time::{sleep, timeout};

use crate::{
    hedge::Hedge,
    limiter::{Limiter, SharedPriority},
    log::Condition,
    object_store::{
        Created, ErrorClass, Listing, ObjectStore, Source, StoreError, StoreResult, Unfinished,
    },
    region_cache::RegionCache,
    retry::{Deadline, GaveUp, Observer, retry},
};

/// Longer reads are not sent twice.
const MOST_HEDGED_BYTES: u64 = 1 << 20;

pub struct Remote {
    store: Arc<dyn ObjectStore>,
    limiter: Arc<Limiter>,
    hedge: Hedge,
    cache: Arc<RegionCache>,
    reachable: std::sync::Mutex<Condition>,
}

type Answer<T> = Result<T, Failure>;

impl Remote {
    pub fn new(store: Arc<dyn ObjectStore>, concurrency: u32, cache: Arc<RegionCache>) -> Self {
        Self {
            store,
            limiter: Limiter::new(concurrency),
            hedge: Hedge::default(),
            cache,
            reachable: std::sync::Mutex::new(Condition::new("reaching the object store")),
        }
    }

    pub fn url(&self) -> &str {
        self.store.url()
    }

    pub fn set_concurrency(&self, most: u32) {
        self.limiter.set_most(most);
    }

    /// Runs one operation to its end. `count`: what each attempt counts as.
    async fn run<T, A, F>(
        &self,
        key: &str,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
        attempt: A,
    ) -> Answer<T>
    where
        A: Fn() -> F,
        F: Future<Output = StoreResult<T>>,
    {
        if let Err(error) = check_key(key) {
            let error = StoreError::new(ErrorClass::Invalid, "", error.to_string());
            return Err(error.into_failure(self.url(), key, String::new()));
        }
        let turn = || async {
            let _permit = self.limiter.acquire(priority).await;
            let outcome = timeout(deadline.attempt_limit(), attempt()).await;
            let outcome = outcome.unwrap_or_else(|_| Err(StoreError::timed_out("a request")));
            match &outcome {
                Ok(_) => self.limiter.succeeded(),
                Err(error) if error.class == ErrorClass::Throttled => {
                    self.limiter.throttled();
                    self.cache.add(Counter::Throttles, 1);
                }
                Err(_) => {}
            }
            outcome
        };
        let outcome = retry(&*self.store, deadline, self, turn).await;
        self.note(&outcome);
        outcome.map_err(|gave_up| gave_up.into_failure(self.url(), key))
    }

    fn note<T>(&self, outcome: &Result<T, GaveUp>) {
        let mut reachable = self.reachable.lock().unwrap_or_else(|p| p.into_inner());
        match outcome {
            Ok(_) => reachable.good(),
            Err(gave_up) => match gave_up.error.class {
                ErrorClass::NotFound | ErrorClass::Damaged => {}
                _ => reachable.bad(&format!("{}: {}", self.url(), gave_up.detail())),
            },
        }
    }

    /// Reads a range of an object. `sent` is called for each request that is sent.
    pub async fn get_range(
        &self,
        key: &str,
        (offset, len): (u64, u64),
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
        sent: &(dyn Fn() + Sync),
    ) -> Answer<Bytes> {
        self.run(key, priority, deadline, || self.get_hedged(key, offset, len, sent)).await
    }

    async fn get_hedged(
        &self,
        key: &str,
        offset: u64,
        len: u64,
        sent: &(dyn Fn() + Sync),
    ) -> StoreResult<Bytes> {
        let mut first = pin!(self.get_once(key, offset, len, sent));
        let wait = self.hedge.wait().filter(|_| len <= MOST_HEDGED_BYTES);
        let Some(wait) = wait else { return first.await };
        tokio::select! {
            biased;
            outcome = &mut first => return outcome,
            () = sleep(wait) => {}
        }
        // A second request only where it takes nobody's turn.
        let Some(_permit) = self.limiter.try_acquire().filter(|_| self.hedge.allow()) else {
            return first.await;
        };
        let mut second = pin!(self.get_once(key, offset, len, sent));
        tokio::select! {
            outcome = &mut first => match outcome {
                Ok(bytes) => Ok(bytes),
                Err(_) => second.await,
            },
            outcome = &mut second => match outcome {
                Ok(bytes) => Ok(bytes),
                Err(_) => first.await,
            },
        }
    }

    async fn get_once(
        &self,
        key: &str,
        offset: u64,
        len: u64,
        sent: &(dyn Fn() + Sync),
    ) -> StoreResult<Bytes> {
        let started = Instant::now();
        sent();
        self.cache.add(Counter::Gets, 1);
        let outcome = self.store.get_range(key, offset, len).await;
        let took = started.elapsed();
        self.cache.add(Counter::GetMicros, took.as_micros() as u64);
        if let Ok(bytes) = &outcome {
            self.hedge.record(took);
            self.cache.add(Counter::GetBytes, bytes.len() as u64);
        }
        outcome
    }

    /// Reads a small object whole. That there is none is an answer and counts as no error: callers ask
    /// whether there is.
    pub async fn get(
        &self,
        key: &str,
        limit: u64,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<Bytes> {
        let attempt = || async {
            self.cache.add(Counter::Gets, 1);
            match self.store.get(key, limit).await {
                Ok(bytes) => {
                    self.cache.add(Counter::GetBytes, bytes.len() as u64);
                    Ok(Ok(bytes))
                }
                Err(error) if error.class == ErrorClass::NotFound => Ok(Err(error)),
                Err(error) => Err(error),
            }
        };
        let found = self.run(key, priority, deadline, attempt).await?;
        found.map_err(|error| error.into_failure(self.url(), key, String::new()))
    }

    /// Stores an object under a name that no other content ever has.
    pub async fn put(
        &self,
        key: &str,
        source: Source,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<()> {
        let len = source.len();
        let deadline = deadline.for_upload(len);
        let tried = std::sync::atomic::AtomicBool::new(false);
        let attempt = || async {
            // An attempt that failed on the way back may have stored the object all the same.
            let again = tried.swap(true, std::sync::atomic::Ordering::Relaxed);
            if again && self.store.len(key).await? == Some(len) {
                return Ok(());
            }
            self.cache.add(Counter::Puts, 1);
            self.store.put(key, source.clone()).await?;
            self.cache.add(Counter::PutBytes, len);
            Ok(())
        };
        self.run(key, priority, deadline, attempt).await
    }

    /// Stores a small object in the place of whatever is there.
    pub async fn overwrite(
        &self,
        key: &str,
        source: Source,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<()> {
        self.run(key, priority, deadline, || async {
            self.cache.add(Counter::Puts, 1);
            self.cache.add(Counter::PutBytes, source.len());
            self.store.put(key, source.clone()).await
        })
        .await
    }

    pub async fn exists(
        &self,
        key: &str,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<bool> {
        let found = self.run(key, priority, deadline, || self.store.len(key)).await?;
        Ok(found.is_some())
    }

    /// Stores a small object unless there is one with other content.
    pub async fn put_if_absent(
        &self,
        key: &str,
        bytes: Bytes,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<()> {
        let limit = bytes.len() as u64 + 1;
        let attempt = || async {
            self.cache.add(Counter::Puts, 1);
            match self.store.put_if_absent(key, bytes.clone()).await? {
                Created::New => Ok(true),
                // Ours, if an earlier attempt failed on the way back only.
                Created::Existed => match self.store.get(key, limit).await {
                    Ok(found) => Ok(found == bytes),
                    Err(error) if error.class == ErrorClass::Damaged => Ok(false),
                    Err(error) => Err(error),
                },
            }
        };
        if self.run(key, priority, deadline, attempt).await? {
            return Ok(());
        }
        Err(Failure {
            kind: FailureKind::Exists,
            code: String::new(),
            message: "there is an object of this name with other content".into(),
            detail: String::new(),
            object: key.into(),
            url: self.url().into(),
        })
    }

    pub async fn delete(
        &self,
        key: &str,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<()> {
        self.run(key, priority, deadline, || self.store.delete(key)).await
    }

    /// Lists keys. `prefix` need not be a whole key.
    pub async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<Listing> {
        let attempt = || self.store.list(prefix, after, limit);
        self.run(whole_key(prefix), priority, deadline, attempt).await
    }

    /// Lists uploads that were not finished.
    pub async fn list_uploads(
        &self,
        prefix: &str,
        after: Option<&UploadName>,
        limit: usize,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<Unfinished> {
        let attempt = || self.store.list_uploads(prefix, after, limit);
        self.run(whole_key(prefix), priority, deadline, attempt).await
    }

    pub async fn abort_upload(
        &self,
        upload: &UploadName,
        priority: &Arc<SharedPriority>,
        deadline: Deadline,
    ) -> Answer<()> {
        self.run(&upload.key, priority, deadline, || self.store.abort_upload(upload)).await
    }
}

/// What stands for a prefix where a key is checked and named.
fn whole_key(prefix: &str) -> &str {
    match prefix.trim_end_matches('/') {
        "" => "prefix",
        whole => whole,
    }
}

impl Observer for Remote {
    fn attempt_failed(&self, _error: &StoreError, will_retry: bool) {
        let counter = if will_retry { Counter::Retries } else { Counter::Errors };
        self.cache.add(counter, 1);
    }
}
