//! Multipart uploads.

use std::time::Duration;

use aws_sdk_s3::{
    Client,
    error::{ProvideErrorMetadata, SdkError},
    primitives::ByteStream,
    types::{CompletedMultipartUpload, CompletedPart},
};
use futures_util::{StreamExt, TryStreamExt, stream};

use super::{
    ErrorClass, S3Store, Source, StoreError, StoreResult,
    s3::{upload_config, upload_limit},
    s3_error::classify,
};

const SMALLEST_PART: u64 = 8 << 20;
const MOST_PARTS: u64 = 10_000;
const PARTS_AT_ONCE: usize = 4;
/// Attempts at one part before the whole upload counts as failed.
const PART_TRIES: u32 = 3;

/// An upload that has begun. It is aborted when dropped, or its parts would be kept, and paid for.
struct Begun {
    client: Client,
    bucket: String,
    key: String,
    id: String,
    complete: bool,
}

pub(super) async fn upload_in_parts(
    store: &S3Store,
    key: &str,
    source: &Source,
) -> StoreResult<()> {
    let mut upload = begin(store, key).await?;
    let part_bytes = source.len().div_ceil(MOST_PARTS).max(SMALLEST_PART);
    let count = source.len().div_ceil(part_bytes);
    let mut parts: Vec<CompletedPart> = stream::iter(0..count)
        .map(|number| {
            let offset = number * part_bytes;
            let len = part_bytes.min(source.len() - offset) as usize;
            upload.part(number as i32 + 1, source, offset, len)
        })
        .buffer_unordered(PARTS_AT_ONCE)
        .try_collect()
        .await?;
    parts.sort_by_key(|part| part.part_number());
    let parts = CompletedMultipartUpload::builder().set_parts(Some(parts)).build();
    let request = upload.client.complete_multipart_upload().bucket(&upload.bucket);
    let request = request.key(&upload.key).upload_id(&upload.id).multipart_upload(parts);
    request.send().await.map_err(classify)?;
    upload.complete = true;
    Ok(())
}

/// What a request of an upload answers, if it does in time.
pub(super) async fn within<T, E>(
    limit: Duration,
    request: impl Future<Output = Result<T, SdkError<E>>>,
) -> StoreResult<T>
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    match tokio::time::timeout(limit, request).await {
        Ok(answer) => answer.map_err(classify),
        Err(_) => Err(StoreError::timed_out("a request")),
    }
}

async fn begin(store: &S3Store, key: &str) -> StoreResult<Begun> {
    let (client, bucket, key) = (store.client(), store.bucket().to_owned(), store.full_key(key));
    let request = client.create_multipart_upload().bucket(&bucket).key(&key);
    let answer = request.send().await.map_err(classify)?;
    let Some(id) = answer.upload_id().map(str::to_owned) else {
        let message = "the store began an upload without naming it";
        return Err(StoreError::new(ErrorClass::Transient, "", message));
    };
    Ok(Begun { client, bucket, key, id, complete: false })
}

impl Begun {
    async fn part(
        &self,
        number: i32,
        source: &Source,
        offset: u64,
        len: usize,
    ) -> StoreResult<CompletedPart> {
        let bytes = source.read(offset, len).await?;
        let mut tries = 0;
        loop {
            tries += 1;
            let request = self.client.upload_part().bucket(&self.bucket).key(&self.key);
            let request = request.upload_id(&self.id).part_number(number);
            let request = request.body(ByteStream::from(bytes.clone()));
            let request = request.customize().config_override(upload_config());
            match within(upload_limit(source.len()), request.send()).await {
                Ok(answer) => {
                    let part = CompletedPart::builder().part_number(number);
                    return Ok(part.set_e_tag(answer.e_tag).build());
                }
                Err(error) if error.is_retryable() && tries < PART_TRIES => {
                    tokio::time::sleep(crate::retry::pause(tries)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if self.complete {
            return;
        }
        let request = self.client.abort_multipart_upload().bucket(&self.bucket);
        let request = request.key(&self.key).upload_id(&self.id);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                // What is left when this fails too is collected as a stale upload.
                let _ = request.send().await;
            });
        }
    }
}
