//! Which store is which: a store holds an object with a random id, and each index records that id and
//! the URL. So a changed setting, a restored bucket or another directory never passes for the store
//! that an index was built on.

use std::{cell::RefCell, collections::HashMap};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::{
    ObjectId,
    protocol::{FailureKind, Priority, Reply, Request},
    segment::SourceError,
};
use polign_pages::meta::Meta;

use super::{exchange, unexpected};
use crate::{
    error::{Error, Result},
    guc,
};

/// Key of the object that holds the store's id, as 32 hexadecimal digits and a newline.
const STORE_ID_KEY: &str = "store-id";
/// More stores than this in one backend: ask again rather than grow.
const MAX_KNOWN: usize = 64;

/// A store that something is about to be written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub store_id: ObjectId,
    pub url: String,
}

thread_local! {
    /// The stores that this backend has looked at, by URL.
    static KNOWN: RefCell<HashMap<String, ObjectId>> = RefCell::new(HashMap::new());
}

/// The store that the setting names, with its id, which is drawn if the store has none yet. `index` is
/// what will be written there, for a message.
pub fn store_for_writing(index: &str) -> Result<Target> {
    let url = guc::text(&guc::STORE).ok_or_else(|| {
        Error::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "polign.store names no store",
        )
        .hint("Set it to \"s3://bucket/prefix\" or \"file:path\".")
    })?;
    tell_if_local(index, &url);
    if let Some(store_id) = known(&url) {
        return Ok(Target { store_id, url });
    }
    let store_id = match read_id(&url)? {
        Some(id) => id,
        None => {
            draw_id(&url)?;
            // Another process may have drawn one at the same time: what is there now counts.
            read_id(&url)?.ok_or_else(|| no_id(&url))?
        }
    };
    remember(&url, store_id);
    Ok(Target { store_id, url })
}

/// The store of an index that exists: the one that its meta page records, whatever the setting says. An
/// index that has nothing in a store yet goes to the one that the setting names.
pub fn store_of(index: &str, meta: &Meta) -> Result<Target> {
    if meta.store_id.is_nil() {
        return store_for_writing(index);
    }
    let (store_id, url) = (meta.store_id, meta.store_url.clone());
    if known(&url) != Some(store_id) {
        let found = read_id(&url)?;
        if found != Some(store_id) {
            return Err(other_store(index, meta, found));
        }
        remember(&url, store_id);
    }
    Ok(Target { store_id, url })
}

fn known(url: &str) -> Option<ObjectId> {
    KNOWN.with_borrow(|known| known.get(url).copied())
}

fn remember(url: &str, store_id: ObjectId) {
    KNOWN.with_borrow_mut(|known| {
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(url.to_owned(), store_id);
    });
}

fn other_store(index: &str, meta: &Meta, found: Option<ObjectId>) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!(
            "store \"{}\" is not the one that index \"{}\" was built on",
            meta.store_url, index
        ),
    )
    .detail(format!("The index needs store id {}; {}.", meta.store_id, says_id(found)))
    .hint("Make the original store reachable, or rebuild the index with REINDEX.")
}

fn says_id(found: Option<ObjectId>) -> String {
    match found {
        Some(id) => format!("its id is {id}"),
        None => "it has no id".to_owned(),
    }
}

/// The id of the store at this URL; `None` if it has none.
fn read_id(url: &str) -> Result<Option<ObjectId>> {
    let request = Request::GetBytes {
        store: url.to_owned(),
        key: STORE_ID_KEY.to_owned(),
        priority: Priority::Query,
    };
    let bytes = match exchange(request)? {
        Reply::Bytes(bytes) => bytes,
        Reply::Failed(failure) if failure.kind == FailureKind::NotFound => return Ok(None),
        Reply::Failed(failure) => return Err(Error::from_failure("read", failure)),
        _ => return Err(unexpected()),
    };
    let text = std::str::from_utf8(&bytes).unwrap_or_default().trim_end();
    text.parse().map(Some).map_err(|_| {
        Error::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("object \"{STORE_ID_KEY}\" in store \"{url}\" does not hold a store id"),
        )
    })
}

fn draw_id(url: &str) -> Result<()> {
    let id = ObjectId::random().map_err(|error| {
        Error::new(PgSqlErrorCode::ERRCODE_SYSTEM_ERROR, "could not draw a random id")
            .detail(error.to_string())
    })?;
    let request = Request::PutBytes {
        store: url.to_owned(),
        key: STORE_ID_KEY.to_owned(),
        bytes: format!("{id}\n").into_bytes(),
        if_absent: true,
        priority: Priority::Build,
    };
    match exchange(request)? {
        // Somebody else's id is as good.
        Reply::Failed(failure) if failure.kind == FailureKind::Exists => Ok(()),
        Reply::Failed(failure) => Err(Error::from_failure("write", failure)),
        _ => Ok(()),
    }
}

fn no_id(url: &str) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not read back what was written to store \"{url}\""),
    )
}

/// A store on the machine's own disk is not where backups and standbys look.
fn tell_if_local(index: &str, url: &str) {
    // SAFETY: a global that Postgres sets at the start.
    let replicates = unsafe { pg_sys::wal_level } >= pg_sys::WalLevel::WAL_LEVEL_REPLICA as i32;
    if url.starts_with("file:") && replicates {
        pgrx::notice!(
            "index \"{index}\" keeps its segments in \"{url}\", which base backups may and standbys do not have"
        );
    }
}

/// The error for a part that could not be had. A missing object has three reasons that look alike from
/// afar: it is gone, the store is another one, or this is a standby without the primary's directory.
pub fn explain(error: SourceError, meta: &Meta) -> Error {
    let SourceError::Missing { object, store } = error else { return error.into() };
    match read_id(&meta.store_url) {
        Ok(Some(id)) if id == meta.store_id => SourceError::Missing { object, store }.into(),
        Ok(found) => {
            // SAFETY: reads shared memory.
            let standby = unsafe { pg_sys::RecoveryInProgress() };
            if standby && meta.store_url.starts_with("file:") {
                return Error::new(
                    PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                    format!("object \"{object}\" is not in store \"{store}\" of this standby"),
                )
                .detail("The index was built with a store in a directory of the primary.")
                .hint("Copy the directory from the primary, or build the index with an S3 store.");
            }
            let error = SourceError::WrongStore { object, store, recorded: meta.store_url.clone() };
            let error = Error::from(error);
            let detail = error.detail.clone().unwrap_or_default();
            let found = says_id(found);
            error.detail(format!("{detail} The index needs store id {}; {found}.", meta.store_id))
        }
        Err(_) => SourceError::Missing { object, store }.into(),
    }
}
