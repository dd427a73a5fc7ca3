//! Garbage collection: deletes from the store what nothing refers to any more.
//!
//! Two kinds of garbage are judged in two ways. What the pages of an index name as retired or pending is
//! judged by its own pages ([`live`]). What lies under the writer id of an index that is not there any
//! more, or that never came to be, is judged by the owner objects in the store ([`gone`]). Whatever else
//! lies in the store belongs to somebody else. The rules are those of
//! docs/decisions/0010-object-ownership.md; tests/model checks them.

mod adopt;
mod catalog;
mod gone;
mod live;
mod neighbours;
mod standbys;
mod store;

use std::collections::{BTreeSet, HashMap};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::{ObjectId, protocol::ListedUpload};

use crate::{
    error::{Error, Result},
    failpoint, guc,
};

pub use adopt::adopt;
use catalog::Carried;
use neighbours::Neighbours;

/// What is to be done.
pub struct Options {
    /// What became garbage less long ago is kept.
    pub older_than_ms: i64,
    /// The same, as the user wrote it.
    pub older_than: String,
    /// Only say what would be deleted.
    pub dry_run: bool,
    /// The store to look at; `None` for those that the database uses.
    pub store: Option<String>,
}

/// An object that nothing refers to.
pub struct Garbage<'a> {
    pub object: &'a str,
    pub bytes: u64,
    pub reason: &'a str,
    /// The index that it belongs to: its name, or its id if it has none any more.
    pub index: &'a str,
    /// Why it stays; `None` if it does not.
    pub kept: Option<&'a str>,
}

/// One run.
struct Run<'a> {
    options: Options,
    report: &'a mut dyn FnMut(&Garbage<'_>),
    carried: Carried,
    /// Read when they are first asked for.
    neighbours: Option<Neighbours>,
    /// Up to where every standby has replayed the log.
    replayed: u64,
    /// The uploads that nobody finished, by writer, of the store that is looked at.
    uploads: HashMap<ObjectId, Vec<ListedUpload>>,
    /// Whether something is only kept because no transaction has begun since it became garbage.
    waits_for_transactions: bool,
}

/// Deletes what is garbage, and reports it.
pub fn run(options: Options, report: &mut dyn FnMut(&Garbage<'_>)) -> Result<()> {
    if !options.dry_run {
        check_transaction("polign.gc()")?;
    }
    let carried = Carried::read()?;
    let stores = stores(&carried, options.store.clone());
    let replayed = standbys::replayed()?;
    let uploads = HashMap::new();
    let mut run = Run {
        options,
        report,
        carried,
        neighbours: None,
        replayed,
        uploads,
        waits_for_transactions: false,
    };
    for store in stores {
        pgrx::check_for_interrupts!();
        run.uploads = store::unfinished_uploads(&store)?;
        run.live_indexes(&store)?;
        run.gone_indexes(&store)?;
    }
    if run.waits_for_transactions && !run.options.dry_run {
        // On a server where nobody writes, this is the transaction that the next run has seen begin.
        // SAFETY: in a transaction that may write.
        unsafe { pg_sys::GetTopTransactionId() };
    }
    Ok(())
}

/// Makes this server the one to judge what dropped indexes left behind; see [`gone::adopt_dropped`].
pub fn adopt_dropped(former: Option<u64>, store: Option<String>) -> Result<usize> {
    check_transaction("polign.adopt_dropped()")?;
    gone::adopt_dropped(former, stores(&Carried::read()?, store))
}

/// The one that was asked for, or those of the indexes that there are and the one that the setting names.
fn stores(carried: &Carried, store: Option<String>) -> BTreeSet<String> {
    if let Some(store) = store {
        return BTreeSet::from([store]);
    }
    let mut stores = carried.stores.clone();
    stores.extend(guc::text(&guc::STORE));
    stores
}

/// An index that this transaction has dropped, and may not drop in the end, must not be taken for gone.
fn check_transaction(function: &str) -> Result<()> {
    // SAFETY: reads the state of the transaction.
    let wrote = unsafe { pg_sys::GetTopTransactionIdIfAny() } != pg_sys::InvalidTransactionId;
    if !wrote {
        return Ok(());
    }
    Err(Error::new(
        PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
        format!("{function} cannot delete in a transaction that has written"),
    )
    .hint("Call it in a transaction of its own."))
}

impl Run<'_> {
    /// What is to be said of a writer id if another database has a copy that would go on under it. Such a
    /// copy does not come to be during the run: nobody can copy a database that a session is in.
    fn silent_copy(&mut self, writer: ObjectId) -> Result<Option<String>> {
        let neighbours = match self.neighbours.take() {
            Some(known) => known,
            None => Neighbours::read()?,
        };
        let name = self.neighbours.insert(neighbours).holding(writer);
        Ok(name.map(|name| {
            format!("database \"{name}\" has a copy that nobody has used yet: scan it there")
        }))
    }

    fn is_old_enough(&self, since_ms: i64, now_ms: i64) -> bool {
        // Stores tell the time in seconds.
        let wanted = self.options.older_than_ms.saturating_add(1000);
        self.options.older_than_ms == 0 || now_ms.saturating_sub(since_ms) >= wanted
    }

    fn too_young(&self) -> String {
        format!("garbage for less than {}", self.options.older_than)
    }

    /// Reports objects, after deleting those that are not kept.
    fn dispose(&mut self, store: &str, index: &str, objects: &[store::Judged]) -> Result<()> {
        if !self.options.dry_run {
            let deleted = objects.iter().filter(|object| object.kept.is_none());
            failpoint::pass("gc: chosen");
            store::delete(store, deleted.map(|object| object.key.clone()).collect())?;
            failpoint::pass("gc: deleted");
        }
        for object in objects {
            (self.report)(&Garbage {
                object: &object.key,
                bytes: object.bytes,
                reason: object.reason,
                index,
                kept: object.kept.as_deref(),
            });
        }
        Ok(())
    }

    /// The same for uploads of a writer that nobody finished.
    fn dispose_uploads(
        &mut self,
        store: &str,
        index: &str,
        writer: ObjectId,
        kept: Option<&str>,
        now_ms: i64,
    ) -> Result<()> {
        let uploads = self.uploads.remove(&writer).unwrap_or_default();
        let too_young = self.too_young();
        let judged: Vec<_> = uploads
            .iter()
            .map(|upload| {
                let old = self.is_old_enough(upload.begun_ms, now_ms);
                (upload, kept.or((!old).then_some(too_young.as_str())))
            })
            .collect();
        if !self.options.dry_run {
            let ended = judged.iter().filter(|(_, kept)| kept.is_none());
            store::abort(store, &ended.map(|(upload, _)| upload.name.clone()).collect::<Vec<_>>())?;
            failpoint::pass("gc: aborted");
        }
        for (upload, kept) in judged {
            let reason = "upload that nobody finished";
            let object = upload.name.key.as_str();
            (self.report)(&Garbage { object, bytes: upload.len, reason, index, kept });
        }
        Ok(())
    }
}
