//! What a backend holds of the store process: one connection and the mapped cache, made when first
//! needed and kept until the backend ends.

mod identity;
pub mod ownership;
mod upload;
mod waiter;

use std::{
    cell::{Cell, RefCell},
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use pgrx::{PgSqlErrorCode, pg_sys};
pub use polign_engine::cache::SourceStats;
use polign_engine::{
    cache::{CacheLink, CachedSource, UPLOAD_DIRECTORY},
    protocol::{ClientOptions, FailureKind, ListedObject, Priority, Reply, Request, RequestId},
};
use polign_pages::meta::Meta;

pub use self::{
    identity::{Target, explain, store_for_writing, store_of},
    ownership::{Claim, claim},
    upload::Uploads,
    waiter::PgWaiter,
};
use crate::{
    error::{Error, Result},
    guc, places,
};

/// Where a scan gets parts of segments from.
pub type IndexSource = CachedSource<PgWaiter>;

/// Time within which a store process has to answer requests that it bounds itself, such as an upload
/// with its retries. Waiting is interruptible all the same.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

thread_local! {
    static LINK: RefCell<Option<Rc<RefCell<CacheLink>>>> = const { RefCell::new(None) };
}

/// The backend's link to the store process of the configured cache directory.
pub fn link() -> Rc<RefCell<CacheLink>> {
    let directory = places::cache_dir();
    LINK.with_borrow_mut(|link| {
        if let Some(link) = link
            && link.try_borrow().is_ok_and(|link| link.directory() == directory)
        {
            return Rc::clone(link);
        }
        if link.is_none() {
            // The one descriptor that a backend keeps open; mapped files need none.
            // SAFETY: only counts.
            unsafe { pg_sys::ReserveExternalFD() };
        }
        let options = ClientOptions {
            build: env!("CARGO_PKG_VERSION").to_owned(),
            data_directory: places::data_dir().to_owned(),
        };
        let new = Rc::new(RefCell::new(CacheLink::new(directory, options)));
        *link = Some(Rc::clone(&new));
        new
    })
}

/// The source of an index's segments: the store that its meta page records, whatever the setting says.
pub fn index_source(meta: &Meta) -> Result<IndexSource> {
    Ok(CachedSource::new(link(), meta.store_url.as_str(), fetch_timeout(), PgWaiter::default()))
}

/// Where maintenance gets them from, which leaves the cache to searches.
pub fn maintenance_source(meta: &Meta) -> Result<IndexSource> {
    Ok(index_source(meta)?.beside_searches())
}

/// Tells the user, once a session, that the cache had to be mended. The answer is right all the same.
pub fn warn_of_damage(stats: &SourceStats) {
    thread_local! {
        static TOLD: Cell<bool> = const { Cell::new(false) };
    }
    if stats.damaged > 0 && !TOLD.replace(true) {
        Error::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            format!(
                "a file of the segment cache in \"{}\" was damaged",
                places::cache_dir().display()
            ),
        )
        .detail("What was damaged has been fetched from the store again.")
        .warn();
    }
}

/// How long to wait for something of the store: what the store process allows itself, and a little for
/// its answer.
pub fn fetch_timeout() -> Duration {
    Duration::from_millis(guc::FETCH_TIMEOUT_MS.get() as u64) + Duration::from_secs(1)
}

/// Sends a request to the store process and waits for its answer. `verb` is what is to be done with an
/// object, for the message: "read", "write" or "delete".
pub fn call(verb: &str, request: Request) -> Result<Reply> {
    succeed(verb, exchange(request)?)
}

/// Queues a request and does not wait.
pub fn begin(request: Request) -> Result<RequestId> {
    Ok(link().borrow_mut().client().begin(request)?)
}

/// Waits for the last reply to a request to write something.
pub fn wait(id: RequestId) -> Result<Reply> {
    succeed("write", last_reply(id)?)
}

fn succeed(verb: &str, reply: Reply) -> Result<Reply> {
    match reply {
        Reply::Failed(failure) => Err(Error::from_failure(verb, failure)),
        reply => Ok(reply),
    }
}

/// The answer to a request, which may be that it failed.
fn exchange(request: Request) -> Result<Reply> {
    let pending = Pending(begin(request)?);
    last_reply(pending.0)
}

/// Gives a request up when an error unwinds; an answered one is not known any more.
struct Pending(RequestId);

impl Drop for Pending {
    fn drop(&mut self) {
        forget(self.0);
    }
}

/// Keys that are asked for at a time.
const LIST_PAGE: u32 = 1000;

/// Lists the objects under a prefix, page by page, in the order of their keys; with each page comes the
/// store's clock in milliseconds since 1970.
pub fn list(
    store: &str,
    prefix: &str,
    visit: &mut dyn FnMut(&[ListedObject], i64) -> Result<()>,
) -> Result<()> {
    let mut after = None;
    loop {
        pgrx::check_for_interrupts!();
        let request = Request::List {
            store: store.to_owned(),
            prefix: prefix.to_owned(),
            after: after.take(),
            limit: LIST_PAGE,
        };
        let Reply::Listed { objects, more, store_now_ms } = call("list", request)? else {
            return Err(unexpected());
        };
        let now = store_now_ms.ok_or_else(|| {
            Error::new(PgSqlErrorCode::ERRCODE_IO_ERROR, format!("store \"{store}\" tells no time"))
        })?;
        visit(&objects, now)?;
        after = objects.into_iter().next_back().map(|object| object.key);
        if !more {
            return Ok(());
        }
        if after.is_none() {
            // To go on without what is missing could mean to take what somebody needs for garbage.
            return Err(Error::new(
                PgSqlErrorCode::ERRCODE_IO_ERROR,
                format!("could not list \"{prefix}\" in store \"{store}\""),
            )
            .detail("A page of the list is empty, and not the last one."));
        }
    }
}

/// Reads small objects, several at a time; `None` for one that is not there.
pub fn get_all(store: &str, keys: Vec<String>) -> Result<Vec<Option<Vec<u8>>>> {
    const AT_A_TIME: usize = 32;
    let mut found = Vec::with_capacity(keys.len());
    let mut keys = keys.into_iter();
    loop {
        let some: Vec<String> = keys.by_ref().take(AT_A_TIME).collect();
        if some.is_empty() {
            return Ok(found);
        }
        let pending = some.into_iter().map(|key| {
            let priority = Priority::Build;
            begin(Request::GetBytes { store: store.to_owned(), key, priority }).map(Pending)
        });
        for pending in pending.collect::<Result<Vec<_>>>()? {
            found.push(match last_reply(pending.0)? {
                Reply::Bytes(bytes) => Some(bytes),
                Reply::Failed(failure) if failure.kind == FailureKind::NotFound => None,
                Reply::Failed(failure) => return Err(Error::from_failure("read", failure)),
                _ => return Err(unexpected()),
            });
        }
    }
}

/// The error for an answer of another kind than the request has.
pub fn unexpected() -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "polign-store gave an unexpected answer")
}

fn last_reply(id: RequestId) -> Result<Reply> {
    let link = link();
    let mut link = link.borrow_mut();
    let client = link.client();
    let deadline = Instant::now() + PATIENCE;
    let mut alone_since = None;
    loop {
        client.pump()?;
        while let Some(reply) = client.take(id) {
            if reply.is_last() {
                return Ok(reply);
            }
        }
        if !client.knows(id) {
            return Err(Error::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                "the cache directory changed while the store was being written to",
            )
            .hint("Repeat the command."));
        }
        // A process that is there may take its time; that there is none is told soon.
        let deadline = if client.server().is_some() {
            alone_since = None;
            deadline
        } else {
            *alone_since.get_or_insert_with(Instant::now) + fetch_timeout()
        };
        client.wait(&mut PgWaiter::default(), deadline)?;
    }
}

/// Gives a request up.
pub fn forget(id: RequestId) {
    // While an error unwinds the link may still be in use further up; the reply is dropped then.
    if let Ok(mut link) = link().try_borrow_mut() {
        link.client().forget(id);
    }
}

/// Where files to be uploaded are put.
pub fn upload_directory() -> Result<PathBuf> {
    let directory = places::cache_dir().join(UPLOAD_DIRECTORY);
    match DirBuilder::new().recursive(true).mode(0o700).create(&directory) {
        Ok(()) => Ok(directory),
        Err(error) => Err(Error::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not create directory \"{}\"", directory.display()),
        )
        .detail(format!("{error}."))
        .hint("Segments are written to polign.cache_dir before they are uploaded.")),
    }
}
