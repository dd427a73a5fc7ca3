//! Object stores behind one trait: one attempt at an operation each. Retrying is a layer above.

mod credentials;
mod error;
#[cfg(test)]
pub mod fake;
pub mod file;
pub mod file_names;
mod region;
pub mod s3;
mod s3_clock;
mod s3_error;
mod s3_unfinished;
mod s3_upload;

use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use polign_engine::protocol::{ListedObject, ListedUpload, UploadName};

pub use error::{ErrorClass, StoreError};
pub use file::FileStore;
pub use s3::{S3Settings, S3Store};

pub type StoreResult<T> = Result<T, StoreError>;

/// One page of a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub objects: Vec<ListedObject>,
    /// Whether more keys follow the last one.
    pub more: bool,
    /// The store's clock, milliseconds since 1970.
    pub now_ms: Option<i64>,
}

/// One page of the uploads that are not finished.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unfinished {
    pub uploads: Vec<ListedUpload>,
    /// Whether more follow the last one.
    pub more: bool,
}

/// What a conditional put found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    New,
    /// The object was there already, with whatever content.
    Existed,
}

/// Where the bytes of an upload come from; read as often as attempts need.
#[derive(Debug, Clone)]
pub enum Source {
    Bytes(Bytes),
    File { file: Arc<File>, len: u64 },
}

impl Source {
    pub fn of_file(file: Arc<File>) -> io::Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self::File { file, len })
    }

    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `len` bytes from `offset`.
    pub async fn read(&self, offset: u64, len: usize) -> StoreResult<Bytes> {
        match self {
            Self::Bytes(bytes) => {
                let start = offset as usize;
                let range = start..start.saturating_add(len);
                if range.end > bytes.len() {
                    return Err(StoreError::local("an upload ends early", ""));
                }
                Ok(bytes.slice(range))
            }
            Self::File { file, .. } => {
                let file = Arc::clone(file);
                let read = tokio::task::spawn_blocking(move || {
                    let mut buffer = vec![0; len];
                    file.read_exact_at(&mut buffer, offset).map(|()| Bytes::from(buffer))
                });
                match read.await {
                    Ok(Ok(bytes)) => Ok(bytes),
                    Ok(Err(error)) => {
                        Err(StoreError::local("an upload file cannot be read", error))
                    }
                    Err(error) => Err(StoreError::local("an upload file cannot be read", error)),
                }
            }
        }
    }
}

/// An object store, one attempt an operation. Keys are checked by
/// [`check_key`](polign_engine::store_url::check_key) above this layer.
pub trait ObjectStore: Send + Sync {
    /// The URL as it is used, for messages.
    fn url(&self) -> &str;

    /// Exactly `len` bytes from `offset`; an object that is too short is [`ErrorClass::Damaged`].
    fn get_range<'a>(
        &'a self,
        key: &'a str,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'a, StoreResult<Bytes>>;

    /// A whole object of at most `limit` bytes.
    fn get<'a>(&'a self, key: &'a str, limit: u64) -> BoxFuture<'a, StoreResult<Bytes>>;

    /// The object's length, `None` if it is not there.
    fn len<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<Option<u64>>>;

    /// Stores an object. A reader sees all of it or nothing.
    fn put<'a>(&'a self, key: &'a str, source: Source) -> BoxFuture<'a, StoreResult<()>>;

    /// Stores an object unless there is one of this name.
    fn put_if_absent<'a>(
        &'a self,
        key: &'a str,
        bytes: Bytes,
    ) -> BoxFuture<'a, StoreResult<Created>>;

    /// Deletes an object; it need not be there.
    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<()>>;

    /// Objects whose key starts with `prefix`, in order of their keys, at most `limit` after `after`.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        limit: usize,
    ) -> BoxFuture<'a, StoreResult<Listing>>;

    /// Uploads whose key starts with `prefix` and that were not finished, in the store's order, at most `limit` after
    /// `after`.
    fn list_uploads<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a UploadName>,
        limit: usize,
    ) -> BoxFuture<'a, StoreResult<Unfinished>>;

    /// Ends an upload and deletes what came of it; it need not be there.
    fn abort_upload<'a>(&'a self, upload: &'a UploadName) -> BoxFuture<'a, StoreResult<()>>;

    /// Gets the credentials anew. Whether another attempt may help.
    fn refresh_credentials(&self) -> BoxFuture<'_, bool> {
        Box::pin(async { false })
    }
}
