//! What an index's own pages name as garbage: retired and pending objects, and uploads of its writer.

use std::collections::{BTreeSet, HashMap, HashSet};

use pgrx::PgSqlErrorCode;
use polign_engine::ObjectId;
use polign_pages::meta::Writer;

use super::{
    Run, catalog,
    store::{self, Judged},
};
use crate::{
    am::root_cache,
    clock,
    error::{Error, Result},
    failpoint,
    pages::{
        Here, Index, LayoutLock, LayoutMode, MaintenanceLock, meta,
        objects::{self, ObjectList, ObjectRecord},
    },
    session::{
        self,
        ownership::owner::{self, Owners},
    },
    sql_api::target::{OpenIndex, TryOpen},
};

const RETIRED: &str = "retired: the index does not refer to it any more";
const PENDING: &str = "pending: what was to publish it did not finish";
const BUSY: &str = "the index is being flushed or compacted";
const INHERITED: &str = "inherited from another writer, who may need it: see polign.adopt()";
const SNAPSHOT: &str = "a snapshot from before it became garbage may still read it";
const STANDBY: &str = "a standby has not replayed yet that it became garbage";

/// An object on one of the lists.
struct Listed {
    record: ObjectRecord,
    reason: &'static str,
    /// Why it stays, whatever the store says.
    kept: Option<String>,
    /// Whether the store has it.
    found: bool,
}

impl Run<'_> {
    /// Collects the garbage of the indexes in a store.
    pub(super) fn live_indexes(&mut self, store: &str) -> Result<()> {
        for entry in catalog::indexes().into_iter().filter(|entry| !entry.is_elsewhere) {
            pgrx::check_for_interrupts!();
            // One that is locked is being rebuilt or dropped; the next run sees what has come of it.
            if let TryOpen::Open(open) = OpenIndex::if_free(entry.oid, OpenIndex::MAINTENANCE_LOCK)?
                && meta::is_written(open.pages())
            {
                self.live_index(store, open.pages())?;
            }
        }
        Ok(())
    }

    fn live_index(&mut self, store: &str, index: Index) -> Result<()> {
        let meta = meta::read(index)?;
        let has_garbage = meta.pending.is_some()
            || meta.retired.is_some()
            || self.uploads.contains_key(&meta.writer.id);
        if meta.writer.id.is_nil() || meta.store_url != store {
            return Ok(());
        }
        // Whoever has the lock may be about to publish what is pending.
        let lock = MaintenanceLock::try_acquire(index.oid());
        if !has_garbage {
            // A clone of this server does not have the indexes that were built since. It would take them
            // for gone if nobody said otherwise, and some are never written.
            if lock.is_some() && !self.options.dry_run {
                session::claim(&mut Here(index))?;
            }
            return Ok(());
        }
        let mut obstacle = lock.is_none().then(|| BUSY.to_owned());
        let writer = match self.options.dry_run || obstacle.is_some() {
            true => meta.writer,
            false => session::claim(&mut Here(index))?.writer,
        };
        failpoint::pass("gc: claimed");
        // What is old enough is so before it is asked who else is there: a copy that needs it has said so.
        let before_ms = clock::now_ms();
        let (owners, store_ms) = owner::list_with_clock(store, writer.id)?;
        let now_ms = before_ms.min(store_ms);
        if obstacle.is_none() && !self.options.dry_run {
            check_listing(store, &writer, &owners)?;
        }
        if obstacle.is_none() {
            obstacle = somebody_else(&writer, &owners);
        }
        if obstacle.is_none() {
            obstacle = self.silent_copy(writer.id)?;
        }
        let mut listed = self.listed(index, store, &writer, &owners, obstacle.as_deref())?;
        let name = catalog::index_name(index.oid());
        self.dispose_listed(store, &name, &mut listed, now_ms)?;
        self.dispose_uploads(store, &name, writer.id, obstacle.as_deref(), now_ms)?;
        if !self.options.dry_run && lock.is_some() {
            unlist(index, &listed)?;
        }
        Ok(())
    }

    /// The objects on the lists that no root refers to.
    fn listed(
        &mut self,
        index: Index,
        store: &str,
        writer: &Writer,
        owners: &Owners,
        obstacle: Option<&str>,
    ) -> Result<HashMap<ObjectId, Listed>> {
        let retired = objects::read_with_lsn(index, ObjectList::Retired)?;
        let pending = objects::read_with_lsn(index, ObjectList::Pending)?;
        if !self.options.dry_run {
            // Nothing is deleted that a crash could bring back.
            objects::flush_log(retired.iter().map(|(_, lsn)| *lsn).max().unwrap_or(0));
        }
        let (_, root) = root_cache::current(index)?;
        let named: HashSet<ObjectId> = root.segments().iter().map(|entry| entry.object).collect();
        let is_own = own_writers(store, writer, owners, retired.iter().chain(&pending))?;
        let mut copies = HashMap::new();
        for writer in is_own.iter().filter(|own| **own != writer.id) {
            if let Some(copy) = self.silent_copy(*writer)? {
                copies.insert(*writer, copy);
            }
        }
        let inherited = |record: &ObjectRecord| {
            copies
                .get(&record.writer)
                .cloned()
                .or((!is_own.contains(&record.writer)).then(|| INHERITED.to_owned()))
        };
        let obstacle = || obstacle.map(str::to_owned);
        let mut listed = HashMap::new();
        // A crash may have left a published object on the pending list: the other list counts then.
        for (record, _) in &pending {
            let kept = obstacle().or_else(|| inherited(record));
            let (reason, found) = (PENDING, false);
            listed.insert(record.object, Listed { record: *record, reason, kept, found });
        }
        for (record, lsn) in &retired {
            let kept = obstacle().or_else(|| inherited(record)).or_else(|| {
                if *lsn > self.replayed {
                    return Some(STANDBY.to_owned());
                }
                let seen = !objects::is_past_snapshots(index, record);
                self.waits_for_transactions |= seen;
                seen.then(|| SNAPSHOT.to_owned())
            });
            let (reason, found) = (RETIRED, false);
            listed.insert(record.object, Listed { record: *record, reason, kept, found });
        }
        listed.retain(|object, _| !named.contains(object));
        Ok(listed)
    }

    /// Deletes what was old enough at `now_ms` of the objects that are in the store.
    fn dispose_listed(
        &mut self,
        store: &str,
        name: &str,
        listed: &mut HashMap<ObjectId, Listed>,
        now_ms: i64,
    ) -> Result<()> {
        let places: BTreeSet<(ObjectId, ObjectId)> =
            listed.values().map(|listed| (listed.record.writer, listed.record.index)).collect();
        for (writer, index) in places {
            session::list(store, &store::prefix(writer, index), &mut |objects, _| {
                let mut judged = Vec::new();
                for object in objects {
                    let id = store::object_of(&object.key);
                    let Some(listed) = id.and_then(|id| listed.get_mut(&id)) else { continue };
                    listed.found = true;
                    // Two clocks, and it cannot have become garbage before it was there.
                    let since = clock::to_unix_ms(listed.record.time).max(object.modified_ms);
                    let old = self.is_old_enough(since, now_ms);
                    if listed.kept.is_none() && !old {
                        listed.kept = Some(self.too_young());
                    }
                    judged.push(Judged {
                        key: object.key.clone(),
                        bytes: object.len,
                        reason: listed.reason,
                        kept: listed.kept.clone(),
                    });
                }
                self.dispose(store, name, &judged)
            })?;
        }
        for listed in listed.values_mut().filter(|listed| !listed.found && listed.kept.is_none()) {
            // Never uploaded, or deleted already. It is forgotten when its upload cannot come any more.
            let since = clock::to_unix_ms(listed.record.time);
            if !self.is_old_enough(since, now_ms) {
                listed.kept = Some(self.too_young());
            }
        }
        Ok(())
    }
}

/// Without the nonce that was put just now, a list may lack the notes of others too.
fn check_listing(store: &str, writer: &Writer, owners: &Owners) -> Result<()> {
    if owners.nonces.contains(&writer.nonce) {
        return Ok(());
    }
    Err(Error::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("store \"{store}\" does not list what was just written to it"),
    )
    .detail(format!("The list of \"owner/{}/\" lacks \"{}\".", writer.id, writer.nonce))
    .hint("A cache or a proxy between the server and the store may answer with old lists."))
}

/// Who else may need what lies under the writer id.
fn somebody_else(writer: &Writer, owners: &Owners) -> Option<String> {
    if let Some(heir) = owners.heirs.first() {
        return Some(format!(
            "a copy of the index went on as writer {heir} and may need it: see polign.adopt()"
        ));
    }
    let is_known = |nonce: &ObjectId| [writer.nonce, writer.next_nonce].contains(nonce);
    if writer.binding != meta::current_binding() || !owners.nonces.iter().all(is_known) {
        return Some("the index is a copy: what it inherited may be needed elsewhere".to_owned());
    }
    None
}

/// The writer ids whose objects are this index's alone.
fn own_writers<'a>(
    store: &str,
    writer: &Writer,
    owners: &Owners,
    records: impl Iterator<Item = &'a (ObjectRecord, u64)>,
) -> Result<HashSet<ObjectId>> {
    let named: HashSet<ObjectId> = records.map(|(record, _)| record.writer).collect();
    let mut own = HashSet::from([writer.id]);
    for other in named.into_iter().filter(|other| owners.adopted.contains(other)) {
        if owner::list(store, other)?.is_deserted(writer.id) {
            own.insert(other);
        }
    }
    Ok(own)
}

/// Takes what is deleted, and what was published after all, off the lists. If VACUUM is at work, the next
/// run does.
fn unlist(index: Index, listed: &HashMap<ObjectId, Listed>) -> Result<()> {
    let Some(_lock) = LayoutLock::try_acquire(index, LayoutMode::Exclusive) else { return Ok(()) };
    let stays = |record: &ObjectRecord| {
        listed.get(&record.object).is_some_and(|listed| listed.kept.is_some())
    };
    for list in [ObjectList::Retired, ObjectList::Pending] {
        objects::retain(index, list, stays)?;
        failpoint::pass("gc: unlisted");
    }
    Ok(())
}
