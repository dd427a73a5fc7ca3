//! What each request does.

use std::{
    fs::OpenOptions, io, os::unix::fs::OpenOptionsExt, path::PathBuf, sync::Arc, time::Duration,
};

use futures_util::{StreamExt, TryStreamExt, stream};
use polign_engine::protocol::{
    Failure, FailureKind, FetchPlan, MAX_OBJECT_BYTES, Put, Reply, Request, UploadName,
};

use super::{Shared, connection::Outbox, ingest};
use crate::{
    fetch::{Job, check},
    limiter::SharedPriority,
    object_store::Source,
    region_cache::Era,
    remote::Remote,
    retry::Deadline,
};

const DELETES_AT_ONCE: usize = 16;
/// Keys in one answer: it has to fit a frame.
const MOST_LISTED: usize = 10_000;

/// Carries a request out and sends its answers. `era`: when it came.
pub(super) async fn carry_out(
    id: u64,
    request: Request,
    era: Era,
    priority: &Arc<SharedPriority>,
    shared: &Arc<Shared>,
    outbox: &Outbox,
) {
    let reply = match request {
        Request::Fetch(plan) => fetch(id, plan, era, priority, shared, outbox).await,
        request => answer(request, era, priority, shared).await,
    };
    outbox.send(id, reply.unwrap_or_else(Reply::Failed));
}

fn time(shared: &Shared) -> Duration {
    Duration::from_millis(shared.config().fetch_timeout_ms)
}

fn job(
    plan: &FetchPlan,
    remote: Arc<Remote>,
    era: Era,
    priority: &Arc<SharedPriority>,
    shared: &Shared,
) -> Job {
    Job::new(plan, remote, Arc::clone(priority), time(shared), era)
}

async fn fetch(
    id: u64,
    plan: FetchPlan,
    era: Era,
    priority: &Arc<SharedPriority>,
    shared: &Shared,
    outbox: &Outbox,
) -> Result<Reply, Failure> {
    let remote = shared.stores.at(&plan.store).await?;
    let job = job(&plan, remote, era, priority, shared);
    let report = |key: polign_engine::segment::PartKey, outcome| {
        outbox.send(id, Reply::Part { object: key.object, index: key.index, outcome });
    };
    Ok(Reply::FetchDone(shared.fetcher.fetch(&plan, &job, &report).await))
}

async fn answer(
    request: Request,
    era: Era,
    priority: &Arc<SharedPriority>,
    shared: &Arc<Shared>,
) -> Result<Reply, Failure> {
    let deadline = Deadline::after(time(shared));
    match request {
        Request::Prewarm(plan) => {
            let remote = shared.stores.at(&plan.store).await?;
            let job = job(&plan, remote, era, priority, shared);
            shared.fetcher.prewarm(&plan, &job).await.map(Reply::FetchDone)
        }
        Request::Check(plan) => {
            let remote = shared.stores.at(&plan.store).await?;
            let job = job(&plan, remote, era, priority, shared);
            check(&plan, &job).await.map(Reply::FetchDone)
        }
        Request::Put(put) => self::put(put, era, priority, shared).await,
        Request::PutBytes { store, key, bytes, if_absent, .. } => {
            let remote = shared.stores.at(&store).await?;
            match if_absent {
                true => remote.put_if_absent(&key, bytes.into(), priority, deadline).await?,
                false => {
                    let source = Source::Bytes(bytes.into());
                    remote.overwrite(&key, source, priority, deadline).await?;
                }
            }
            Ok(Reply::Done)
        }
        Request::GetBytes { store, key, .. } => {
            let remote = shared.stores.at(&store).await?;
            let limit = MAX_OBJECT_BYTES as u64;
            let bytes = remote.get(&key, limit, priority, deadline).await?;
            Ok(Reply::Bytes(bytes.to_vec()))
        }
        Request::Delete { store, keys } => {
            let remote = shared.stores.at(&store).await?;
            let delete = |key: String| {
                let (remote, priority) = (Arc::clone(&remote), Arc::clone(priority));
                async move { remote.delete(&key, &priority, deadline).await }
            };
            let deletes = stream::iter(keys).map(delete).buffer_unordered(DELETES_AT_ONCE);
            deletes.try_collect::<()>().await?;
            Ok(Reply::Done)
        }
        Request::List { store, prefix, after, limit } => {
            let remote = shared.stores.at(&store).await?;
            let limit = (limit as usize).clamp(1, MOST_LISTED);
            let listing = remote.list(&prefix, after.as_deref(), limit, priority, deadline).await?;
            let (objects, more, store_now_ms) = (listing.objects, listing.more, listing.now_ms);
            Ok(Reply::Listed { objects, more, store_now_ms })
        }
        Request::ListUploads { store, prefix, after, limit } => {
            let remote = shared.stores.at(&store).await?;
            let limit = (limit as usize).clamp(1, MOST_LISTED);
            let page =
                remote.list_uploads(&prefix, after.as_ref(), limit, priority, deadline).await?;
            Ok(Reply::Uploads { uploads: page.uploads, more: page.more })
        }
        Request::AbortUploads { store, uploads } => {
            let remote = shared.stores.at(&store).await?;
            let abort = |upload: UploadName| {
                let (remote, priority) = (Arc::clone(&remote), Arc::clone(priority));
                async move { remote.abort_upload(&upload, &priority, deadline).await }
            };
            let aborts = stream::iter(uploads).map(abort).buffer_unordered(DELETES_AT_ONCE);
            aborts.try_collect::<()>().await?;
            Ok(Reply::Done)
        }
        Request::ClearCache => {
            let cache = Arc::clone(shared.cache());
            let cleared = tokio::task::spawn_blocking(move || cache.clear()).await;
            cleared.map_err(|error| local("the cache cannot be cleared", &error.to_string()))?;
            Ok(Reply::Done)
        }
        // Handled by the connection, or above.
        Request::Fetch(_) | Request::Raise { .. } | Request::Cancel { .. } => Ok(Reply::Done),
    }
}

async fn put(
    put: Put,
    era: Era,
    priority: &Arc<SharedPriority>,
    shared: &Arc<Shared>,
) -> Result<Reply, Failure> {
    let remote = shared.stores.at(&put.store).await?;
    let deadline = Deadline::after(time(shared));
    let Some(path) = upload_path(&put.file, shared) else {
        let message = format!("\"{}\" is no name of an upload file", put.file);
        return Err(Failure { kind: FailureKind::Invalid, ..local(&message, "") });
    };
    let open = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path);
    let file = match open {
        Ok(file) => Arc::new(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // The same request may have come before, to a process that died before it answered.
            if remote.exists(&put.key, priority, deadline).await? {
                return Ok(Reply::Done);
            }
            return Err(cannot_read(&put, &error));
        }
        Err(error) => return Err(cannot_read(&put, &error)),
    };
    let source = Source::of_file(Arc::clone(&file)).map_err(|error| cannot_read(&put, &error))?;
    remote.put(&put.key, source, priority, deadline).await?;
    let (cache, object) = (Arc::clone(shared.cache()), put.object);
    let ingest = put.ingest;
    let finish = move || {
        if ingest {
            ingest::ingest(&file, object, &cache, era);
        }
        // One that stays is removed when it is old.
        let _ = std::fs::remove_file(path);
    };
    let finished = tokio::task::spawn_blocking(finish).await;
    finished.map_err(|error| local("the upload cannot be finished", &error.to_string()))?;
    Ok(Reply::Done)
}

/// The path of an upload file, unless the name could lead out of the directory.
fn upload_path(file: &str, shared: &Shared) -> Option<PathBuf> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_name = (1..=200).contains(&file.len()) && !file.starts_with('.');
    (is_name && file.chars().all(plain)).then(|| shared.directory.upload().join(file))
}

fn cannot_read(put: &Put, error: &io::Error) -> Failure {
    let object = put.key.clone();
    Failure { object, ..local("the file to be uploaded cannot be read", &error.to_string()) }
}

fn local(message: &str, detail: &str) -> Failure {
    Failure {
        kind: FailureKind::Local,
        code: String::new(),
        message: message.into(),
        detail: detail.into(),
        object: String::new(),
        url: String::new(),
    }
}
