//! What garbage collection asks of a store.

use std::collections::HashMap;

use pgrx::PgSqlErrorCode;
use polign_engine::{
    ObjectId,
    protocol::{ListedUpload, Reply, Request, UploadName},
    segment::SegmentName,
};

use crate::{
    error::{Error, Result},
    session,
};

/// Uploads that are asked for at a time.
const UPLOADS_PAGE: u32 = 1000;
/// Uploads that one run looks at: the next one finds the others.
const MOST_UPLOADS: usize = 100_000;

/// An object that nothing refers to, with what becomes of it.
pub struct Judged {
    pub key: String,
    pub bytes: u64,
    pub reason: &'static str,
    /// Why it stays; `None` if it is to be deleted.
    pub kept: Option<String>,
}

/// Where the objects lie that a writer wrote for an index.
pub fn prefix(writer: ObjectId, index: ObjectId) -> String {
    let key = SegmentName { writer, index, object: ObjectId::NIL }.key();
    key.rfind('/').map_or(key.clone(), |end| key[..=end].to_owned())
}

/// The object's id in a key.
pub fn object_of(key: &str) -> Option<ObjectId> {
    let name = key.rsplit_once('/')?.1;
    name.split_once('.')?.0.parse().ok()
}

pub fn delete(store: &str, keys: Vec<String>) -> Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    session::call("delete", Request::Delete { store: store.to_owned(), keys }).map(|_| ())
}

pub fn abort(store: &str, uploads: &[UploadName]) -> Result<()> {
    for uploads in uploads.chunks(UPLOADS_PAGE as usize) {
        pgrx::check_for_interrupts!();
        let (store, uploads) = (store.to_owned(), uploads.to_vec());
        session::call("delete", Request::AbortUploads { store, uploads })?;
    }
    Ok(())
}

/// The uploads of a store that were begun and not finished, by writer; none if it does not tell. Not every
/// store can, nor is every key allowed to ask, and objects can be collected all the same.
pub fn unfinished_uploads(store: &str) -> Result<HashMap<ObjectId, Vec<ListedUpload>>> {
    match list_uploads(store) {
        Err(error) if error.code == PgSqlErrorCode::ERRCODE_IO_ERROR => {
            Error::new(
                PgSqlErrorCode::ERRCODE_WARNING,
                format!("could not look for unfinished uploads in store \"{store}\""),
            )
            .detail(error.detail.unwrap_or(error.message))
            .warn();
            Ok(HashMap::new())
        }
        result => result,
    }
}

fn list_uploads(store: &str) -> Result<HashMap<ObjectId, Vec<ListedUpload>>> {
    let mut found: HashMap<ObjectId, Vec<ListedUpload>> = HashMap::new();
    let mut count = 0;
    let mut after: Option<UploadName> = None;
    loop {
        pgrx::check_for_interrupts!();
        let request = Request::ListUploads {
            store: store.to_owned(),
            prefix: String::new(),
            after: after.take(),
            limit: UPLOADS_PAGE,
        };
        let Reply::Uploads { uploads, more } = session::call("list", request)? else {
            return Err(session::unexpected());
        };
        count += uploads.len();
        after = uploads.last().map(|upload| upload.name.clone());
        for upload in uploads {
            if let Some(writer) = writer_of(&upload.name.key) {
                found.entry(writer).or_default().push(upload);
            }
        }
        if !more || after.is_none() || count > MOST_UPLOADS {
            return Ok(found);
        }
    }
}

/// The writer's id in the key of an object or of an owner object.
fn writer_of(key: &str) -> Option<ObjectId> {
    key.split('/').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_writer_and_object() {
        let id = |byte| ObjectId([byte; 16]);
        let name = SegmentName { writer: id(1), index: id(2), object: id(3) };
        assert!(name.key().starts_with(&prefix(id(1), id(2))));
        assert!(name.root_key().starts_with(&prefix(id(1), id(2))));
        for key in [name.key(), name.root_key()] {
            assert_eq!((writer_of(&key), object_of(&key)), (Some(id(1)), Some(id(3))));
        }
        assert_eq!(writer_of(&format!("owner/{}/{}", id(1), id(4))), Some(id(1)));
        assert_eq!((writer_of("store-id"), object_of("store-id")), (None, None));
    }
}
