//! Multipart uploads that somebody began and did not finish.

use aws_sdk_s3::types::MultipartUpload;
use futures_util::{StreamExt, TryStreamExt, stream};
use polign_engine::protocol::{ListedUpload, UploadName};

use super::{ErrorClass, S3Store, StoreResult, Unfinished, s3_error::classify};

/// S3 lists at most so many at a time.
const PAGE: usize = 1000;
const AT_ONCE: usize = 16;

pub(super) async fn list(
    store: &S3Store,
    prefix: &str,
    after: Option<&UploadName>,
    limit: usize,
) -> StoreResult<Unfinished> {
    let request = store.client().list_multipart_uploads().bucket(store.bucket());
    let request = request.prefix(store.full_key(prefix)).max_uploads(limit.min(PAGE) as i32);
    let request = request
        .set_key_marker(after.map(|after| store.full_key(&after.key)))
        .set_upload_id_marker(after.map(|after| after.id.clone()));
    let answer = request.send().await.map_err(classify)?;
    let named = answer.uploads().iter().filter_map(|upload| named(store, upload));
    let uploads = stream::iter(named.collect::<Vec<_>>())
        .map(|(name, begun_ms)| async move {
            let len = bytes(store, &name).await?;
            Ok::<_, super::StoreError>(ListedUpload { name, len, begun_ms })
        })
        .buffered(AT_ONCE)
        .try_collect()
        .await?;
    Ok(Unfinished { uploads, more: answer.is_truncated().unwrap_or(false) })
}

fn named(store: &S3Store, upload: &MultipartUpload) -> Option<(UploadName, i64)> {
    let key = store.own_key(upload.key()?)?.to_owned();
    let id = upload.upload_id()?.to_owned();
    // Without a date it counts as just begun.
    let begun_ms = upload.initiated().and_then(|at| at.to_millis().ok()).unwrap_or(i64::MAX);
    Some((UploadName { key, id }, begun_ms))
}

/// The bytes of the first thousand parts: no object of ours has more.
async fn bytes(store: &S3Store, upload: &UploadName) -> StoreResult<u64> {
    let request = store.client().list_parts().bucket(store.bucket());
    let request = request.key(store.full_key(&upload.key)).upload_id(&upload.id);
    match request.send().await.map_err(classify) {
        Ok(answer) => {
            Ok(answer.parts().iter().map(|part| part.size().unwrap_or(0).max(0) as u64).sum())
        }
        // It came to an end meanwhile.
        Err(error) if error.class == ErrorClass::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

pub(super) async fn abort(store: &S3Store, upload: &UploadName) -> StoreResult<()> {
    let request = store.client().abort_multipart_upload().bucket(store.bucket());
    let request = request.key(store.full_key(&upload.key)).upload_id(&upload.id);
    match request.send().await.map_err(classify) {
        Err(error) if error.class != ErrorClass::NotFound => Err(error),
        _ => Ok(()),
    }
}
