//! A bucket, or a prefix of one, as an object store.

use std::{
    path::PathBuf,
    sync::RwLock,
    time::{Duration, Instant},
};

use aws_config::{BehaviorVersion, SdkConfig, timeout::TimeoutConfig};
use aws_sdk_s3::{
    Client,
    config::{
        RequestChecksumCalculation, ResponseChecksumValidation, StalledStreamProtectionConfig,
        retry::RetryConfig,
    },
    primitives::ByteStream,
};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use polign_engine::protocol::{ListedObject, UploadName};
use tokio::sync::Mutex;

use super::{
    Created, ErrorClass, Listing, ObjectStore, Source, StoreError, StoreResult, Unfinished,
    credentials,
    region::region,
    s3_clock::Clock,
    s3_error::{body_failed, classify, is_unsupported},
    s3_unfinished, s3_upload,
};
use crate::retry::slow_upload;

/// Objects longer than this are uploaded in parts.
pub(super) const SINGLE_PUT_BYTES: u64 = 16 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const READ_TIMEOUT: Duration = Duration::from_secs(20);
const REFRESH_PAUSE: Duration = Duration::from_secs(1);
/// S3 lists at most so many keys at a time.
const LIST_PAGE: usize = 1000;

/// How to reach S3; the same for all buckets. Nothing here is a secret.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct S3Settings {
    pub endpoint: Option<String>,
    pub region: Option<String>,
    /// Put the bucket into the path instead of the host name. Unset: if there is an endpoint.
    pub path_style: Option<bool>,
    /// An AWS credentials file. Unset: the SDK's provider chain.
    pub credentials_file: Option<PathBuf>,
}

pub struct S3Store {
    settings: S3Settings,
    bucket: String,
    prefix: String,
    url: String,
    client: RwLock<Client>,
    refreshed: Mutex<Instant>,
}

impl S3Store {
    /// Does not speak to S3 yet. `prefix` is empty or ends in a slash.
    pub async fn new(bucket: String, prefix: String, settings: S3Settings) -> Self {
        let url = match &settings.endpoint {
            Some(endpoint) => format!("s3://{bucket}/{prefix} at {endpoint}"),
            None => format!("s3://{bucket}/{prefix}"),
        };
        let client = RwLock::new(connect(&settings).await);
        let refreshed = Mutex::new(Instant::now());
        Self { settings, bucket, prefix, url, client, refreshed }
    }

    pub(super) fn client(&self) -> Client {
        self.client.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    pub(super) fn bucket(&self) -> &str {
        &self.bucket
    }

    pub(super) fn full_key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The key below the store's URL.
    pub(super) fn own_key<'a>(&self, full: &'a str) -> Option<&'a str> {
        full.strip_prefix(&self.prefix)
    }

    /// The bytes, and the length of the whole object if the answer tells it.
    async fn read(
        &self,
        key: &str,
        range: Option<(u64, u64)>,
        limit: u64,
    ) -> StoreResult<(Bytes, Option<u64>)> {
        let range = range.map(|(offset, len)| format!("bytes={offset}-{}", offset + len - 1));
        let request = self.client().get_object().bucket(&self.bucket).key(self.full_key(key));
        let answer = request.set_range(range).send().await.map_err(classify)?;
        if answer.content_length().is_some_and(|len| len as u64 > limit) {
            // A store that ignores the range sends the whole object.
            let message = format!("the store sent more than the {limit} bytes asked for");
            return Err(StoreError::new(ErrorClass::Invalid, "", message));
        }
        let announced = answer.content_length();
        let object_len = answer.content_range().and_then(object_len);
        let bytes = answer.body.collect().await.map_err(body_failed)?.into_bytes();
        if announced.is_some_and(|len| len as u64 != bytes.len() as u64) {
            let message = "the object's body ended early";
            return Err(StoreError::new(ErrorClass::Transient, "", message));
        }
        Ok((bytes, object_len))
    }

    async fn create(&self, key: &str, bytes: Bytes) -> StoreResult<Created> {
        let request = self.client().put_object().bucket(&self.bucket).key(self.full_key(key));
        let request = request.body(ByteStream::from(bytes.clone())).if_none_match("*");
        match request.send().await.map_err(classify) {
            Ok(_) => Ok(Created::New),
            Err(error) if error.code == "PreconditionFailed" => Ok(Created::Existed),
            Err(error) if is_unsupported(&error) => {
                // Not atomic, but the caller's names are random or guarded by Postgres.
                if self.len(key).await?.is_some() {
                    return Ok(Created::Existed);
                }
                self.put(key, Source::Bytes(bytes)).await.map(|()| Created::New)
            }
            Err(error) => Err(error),
        }
    }

    async fn page(&self, prefix: &str, after: Option<&str>, limit: usize) -> StoreResult<Listing> {
        let request = self.client().list_objects_v2().bucket(&self.bucket);
        let clock = Clock::default();
        let request = request
            .prefix(self.full_key(prefix))
            .set_start_after(after.map(|after| self.full_key(after)))
            .max_keys(limit.min(LIST_PAGE) as i32);
        let request = request.customize().interceptor(clock.clone());
        let answer = request.send().await.map_err(classify)?;
        let objects = answer.contents().iter().filter_map(|object| {
            let key = self.own_key(object.key()?)?.to_owned();
            // Without a date it counts as just written.
            let modified = object.last_modified().and_then(|at| at.to_millis().ok());
            let modified_ms = modified.unwrap_or(i64::MAX);
            let len = object.size().unwrap_or(0).max(0) as u64;
            Some(ListedObject { key, len, modified_ms })
        });
        let more = answer.is_truncated().unwrap_or(false);
        Ok(Listing { objects: objects.collect(), more, now_ms: clock.now_ms() })
    }
}

/// The length of the object in a `Content-Range`: `bytes 0-9/100`.
fn object_len(content_range: &str) -> Option<u64> {
    content_range.rsplit_once('/')?.1.trim().parse().ok()
}

impl ObjectStore for S3Store {
    fn url(&self) -> &str {
        &self.url
    }

    fn get_range<'a>(
        &'a self,
        key: &'a str,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'a, StoreResult<Bytes>> {
        Box::pin(async move {
            let (bytes, object_len) = self.read(key, Some((offset, len)), len).await?;
            if bytes.len() as u64 == len {
                return Ok(bytes);
            }
            // A store under load may answer with less, even nothing, and call it a success.
            Err(match object_len {
                Some(object_len) if object_len < offset + len => {
                    let message = "the object is shorter than it should be";
                    StoreError::new(ErrorClass::Damaged, "", message)
                }
                _ => {
                    let message = "the store sent fewer bytes than were asked for";
                    StoreError::new(ErrorClass::Transient, "", message)
                }
            })
        })
    }

    fn get<'a>(&'a self, key: &'a str, limit: u64) -> BoxFuture<'a, StoreResult<Bytes>> {
        Box::pin(async move { Ok(self.read(key, None, limit).await?.0) })
    }

    fn len<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<Option<u64>>> {
        Box::pin(async move {
            let request = self.client().head_object().bucket(&self.bucket);
            match request.key(self.full_key(key)).send().await.map_err(classify) {
                Ok(answer) => Ok(Some(answer.content_length().unwrap_or(0).max(0) as u64)),
                Err(error) if error.class == ErrorClass::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn put<'a>(&'a self, key: &'a str, source: Source) -> BoxFuture<'a, StoreResult<()>> {
        Box::pin(async move {
            if source.len() > SINGLE_PUT_BYTES {
                return s3_upload::upload_in_parts(self, key, &source).await;
            }
            let bytes = source.read(0, source.len() as usize).await?;
            let request = self.client().put_object().bucket(&self.bucket);
            let request = request.key(self.full_key(key)).body(ByteStream::from(bytes));
            let request = request.customize().config_override(upload_config());
            let limit = upload_limit(source.len());
            s3_upload::within(limit, request.send()).await?;
            Ok(())
        })
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a str,
        bytes: Bytes,
    ) -> BoxFuture<'a, StoreResult<Created>> {
        Box::pin(self.create(key, bytes))
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<()>> {
        Box::pin(async move {
            let request = self.client().delete_object().bucket(&self.bucket);
            match request.key(self.full_key(key)).send().await.map_err(classify) {
                Err(error) if error.class != ErrorClass::NotFound => Err(error),
                _ => Ok(()),
            }
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        limit: usize,
    ) -> BoxFuture<'a, StoreResult<Listing>> {
        Box::pin(self.page(prefix, after, limit))
    }

    fn list_uploads<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a UploadName>,
        limit: usize,
    ) -> BoxFuture<'a, StoreResult<Unfinished>> {
        Box::pin(s3_unfinished::list(self, prefix, after, limit))
    }

    fn abort_upload<'a>(&'a self, upload: &'a UploadName) -> BoxFuture<'a, StoreResult<()>> {
        Box::pin(s3_unfinished::abort(self, upload))
    }

    /// Reads the credentials file or asks the provider chain again: keys may have been rotated.
    fn refresh_credentials(&self) -> BoxFuture<'_, bool> {
        Box::pin(async {
            let asked = Instant::now();
            let mut refreshed = self.refreshed.lock().await;
            // Somebody else may have refreshed them while this waited for the lock.
            if *refreshed < asked {
                tokio::time::sleep(REFRESH_PAUSE.saturating_sub(refreshed.elapsed())).await;
                let client = connect(&self.settings).await;
                *self.client.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = client;
                *refreshed = Instant::now();
            }
            true
        })
    }
}

async fn connect(settings: &S3Settings) -> Client {
    let mut loader = aws_config::defaults(BehaviorVersion::latest()).region(region(settings).await);
    if let Some(file) = &settings.credentials_file {
        loader = loader.credentials_provider(credentials::of_file(file));
    }
    if let Some(endpoint) = &settings.endpoint {
        loader = loader.endpoint_url(endpoint);
    }
    client_of(&loader.load().await, settings)
}

/// How long one request of the upload of an object may take. The parts of an object go up side by side,
/// so that each may take as long as all of it.
pub(crate) fn upload_limit(object_bytes: u64) -> Duration {
    READ_TIMEOUT + slow_upload(object_bytes)
}

/// The SDK's limit runs from the first byte that is sent to the first that comes back, whatever the
/// length: uploads have [`upload_limit`] instead.
pub(super) fn upload_config() -> aws_sdk_s3::config::Builder {
    let timeouts = TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).disable_read_timeout();
    aws_sdk_s3::Config::builder().timeout_config(timeouts.build())
}

fn client_of(shared: &SdkConfig, settings: &S3Settings) -> Client {
    let timeouts =
        TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(READ_TIMEOUT);
    let config = aws_sdk_s3::config::Builder::from(shared)
        .force_path_style(settings.path_style.unwrap_or(settings.endpoint.is_some()))
        // Some stores reject the checksum headers, and every part carries its own checksum.
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
        // The layer above retries and times out, and knows the deadline.
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .timeout_config(timeouts.build())
        .build();
    Client::from_conf(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_range_tells_the_length_of_the_object() {
        assert_eq!(object_len("bytes 0-9/100"), Some(100));
        assert_eq!(object_len("bytes 0-9/*"), None);
        assert_eq!(object_len("bytes */77"), Some(77));
        assert_eq!(object_len("bytes 0-9"), None);
    }
}
