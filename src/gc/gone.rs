//! What indexes left behind that are not there any more, or never came to be: dropped and rebuilt ones,
//! builds that failed, databases that were dropped. Their pages are gone, so the owner objects tell.

use pgrx::PgSqlErrorCode;
use polign_engine::ObjectId;

use super::{
    Run,
    catalog::{self, Carried},
    store,
};
use crate::{
    error::{Error, Result},
    failpoint,
    pages::{meta, objects},
    session::{
        self,
        ownership::owner::{self, Owner, Owners},
    },
};

const NO_INDEX: &str = "no index refers to it: dropped, rebuilt, or its build failed";
const NO_DATABASE: &str = "its database was dropped";
const FOUND_NOW: &str =
    "its index was found gone only now: \"older_than\" counts from the first run that may delete";
const STANDBY: &str = "a standby has not replayed yet that its index is gone";
const TWIN: &str =
    "written by a copy of an index that is here, which may go on: see polign.adopt()";
const COME_BACK: &str = "somebody has written under its writer id since its index was found gone";

/// A writer id that no index of this database goes on under.
struct Left {
    writer: ObjectId,
    owners: Owners,
    owner: Owner,
    index: ObjectId,
}

impl Run<'_> {
    /// Goes through all owner objects of a store.
    pub(super) fn gone_indexes(&mut self, store: &str) -> Result<()> {
        owner::each(store, &mut |writers, now_ms| self.judge(store, writers, now_ms))
    }

    fn judge(&mut self, store: &str, writers: Vec<(ObjectId, Owners)>, now_ms: i64) -> Result<()> {
        let mut left = Vec::new();
        for (writer, owners) in writers {
            // Noted before a crash or a restore brought the index back, or by one of two runs when the
            // other had deleted all the rest.
            let is_carried = self.carried.has(writer);
            let void = is_carried || owners.nonces.is_empty();
            if void && owners.gone_ms.is_some() && !self.options.dry_run {
                owner::delete_gone(store, writer)?;
            }
            if !is_carried {
                left.push((writer, owners));
            }
        }
        let mut left = ours(store, left, None)?;
        if left.is_empty() {
            return Ok(());
        }
        // None of them is being built any more. So an index that was built is seen now, if not before.
        self.carried = Carried::read()?;
        left.retain(|left| {
            let elsewhere = self.carried.is_elsewhere(left.owner.index_oid);
            // What an index here has inherited is for its own pages to say.
            let inherited = left.owners.heirs.iter().any(|heir| self.carried.has(*heir));
            !self.carried.has(left.writer) && !elsewhere && !inherited
        });
        left.iter().try_for_each(|left| self.collect_left(store, left, now_ms))
    }

    fn collect_left(&mut self, store: &str, left: &Left, now_ms: i64) -> Result<()> {
        let (kept, now_ms) = self.verdict(store, left, now_ms)?;
        let mut kept = kept;
        let mut places = vec![(left.writer, left.index)];
        let related = owner::read_related(store, left.writer, &left.owners)?;
        let adopted = related.into_iter().filter(|(id, _)| left.owners.adopted.contains(id));
        places.extend(adopted.filter_map(|(id, says)| Some((id, says.index_id()?))));
        let reason = match catalog::database_name(left.owner.database) {
            Some(_) => NO_INDEX,
            None => NO_DATABASE,
        };
        let name = left.index.to_string();
        for (writer, index) in &places {
            let mut kept_here = kept.clone();
            if *writer != left.writer && !owner::list(store, *writer)?.is_deserted(left.writer) {
                kept_here = Some(COME_BACK.to_owned());
            }
            session::list(store, &store::prefix(*writer, *index), &mut |objects, _| {
                if kept_here.is_none()
                    && !self.options.dry_run
                    && still_gone(store, left)?.is_none()
                {
                    kept_here = Some(COME_BACK.to_owned());
                }
                let judged: Vec<_> = objects
                    .iter()
                    .map(|object| store::Judged {
                        key: object.key.clone(),
                        bytes: object.len,
                        reason,
                        kept: kept_here.clone(),
                    })
                    .collect();
                self.dispose(store, &name, &judged)
            })?;
            self.dispose_uploads(store, &name, *writer, kept_here.as_deref(), now_ms)?;
            kept = kept.or(kept_here);
        }
        if kept.is_none()
            && !self.options.dry_run
            && let Some(owners) = still_gone(store, left)?
        {
            failpoint::pass("gc: emptied");
            for (adopted, _) in places.iter().skip(1) {
                let notes = owner::list(store, *adopted)?;
                if notes.is_deserted(left.writer) {
                    owner::delete_all(store, *adopted, &notes)?;
                }
            }
            owner::delete_all(store, left.writer, &owners)?;
        }
        Ok(())
    }

    /// Why what is left stays, if it does, and the store's time. Notes when the index was first found gone.
    fn verdict(&mut self, store: &str, left: &Left, now_ms: i64) -> Result<(Option<String>, i64)> {
        let kept = |why: &str| Ok((Some(why.to_owned()), now_ms));
        if let Some(index) = &self.carried.locked {
            return kept(&format!("index {index} is locked, and it might be its own"));
        }
        let here = meta::current_binding();
        // A copy of this server's files: it has a database of that OID for itself.
        if self.carried.has_index(left.index) && left.owner.database == here.database {
            return kept(TWIN);
        }
        if left.owner.timeline != here.timeline {
            let timeline = left.owner.timeline;
            return kept(&format!("written on timeline {timeline}, which may go on elsewhere"));
        }
        if let Some(heir) = left.owners.heirs.first() {
            // For the heir, who may want to adopt it.
            if left.owners.gone_since_ms().is_none() && !self.options.dry_run {
                owner::put_gone(store, left.writer, objects::flush_whole_log())?;
            }
            return kept(&format!("a copy of its index went on as writer {heir} and may need it"));
        }
        let (since, lsn) = match (left.owners.gone_since_ms(), self.options.dry_run) {
            (Some(since), _) => (since, owner::read_gone(store, left.writer)?),
            (None, true) => (now_ms, None),
            (None, false) => {
                let lsn = objects::flush_whole_log();
                owner::put_gone(store, left.writer, lsn)?;
                failpoint::pass("gc: noted");
                let Some(since) = owner::list(store, left.writer)?.gone_since_ms() else {
                    return kept(FOUND_NOW);
                };
                (since, Some(lsn))
            }
        };
        if !self.is_old_enough(since, now_ms.max(since)) {
            return match left.owners.gone_since_ms() {
                Some(_) => kept(&self.too_young()),
                None => kept(FOUND_NOW),
            };
        }
        if lsn.is_some_and(|lsn| lsn > self.replayed) {
            return kept(STANDBY);
        }
        for writer in left.owners.adopted.iter().chain([&left.writer]) {
            if let Some(copy) = self.silent_copy(*writer)? {
                return kept(&copy);
            }
        }
        Ok((None, now_ms))
    }
}

/// Looks again, directly before deleting; gives what lies there if nothing speaks against it.
fn still_gone(store: &str, left: &Left) -> Result<Option<Owners>> {
    let owners = owner::list(store, left.writer)?;
    let unchanged = owners.nonces == left.owners.nonces && owners.heirs.is_empty();
    Ok(Some(owners).filter(|owners| unchanged && owners.gone_since_ms().is_some()))
}

/// Those that this server's databases left behind, as far as this database is the one to judge them, and
/// no running transaction may still make an index of. `former`: the system identifier of another server that
/// this one was made from, and whose databases have the same OIDs.
fn ours(store: &str, writers: Vec<(ObjectId, Owners)>, former: Option<u64>) -> Result<Vec<Left>> {
    let of_writer = |(writer, owners): &(ObjectId, Owners)| -> Vec<(ObjectId, ObjectId)> {
        owners.nonces.iter().map(|nonce| (*writer, *nonce)).collect()
    };
    let names: Vec<_> = writers.iter().flat_map(of_writer).collect();
    let mut says = owner::read_nonces(store, &names)?.into_iter();
    let here = meta::current_binding();
    let is_ours = |owner: &Owner| {
        let own =
            owner.database == here.database || catalog::database_name(owner.database).is_none();
        own && match former {
            Some(system) => owner.is_of_system(system),
            None => owner.is_of_system(here.system) && !catalog::is_running(owner.xid()),
        }
    };
    let mut left = Vec::new();
    for (writer, owners) in writers {
        // Without a nonce it was taken over, or is about to be.
        let of_writer: Vec<_> = says.by_ref().take(owners.nonces.len()).collect();
        let of_writer: Option<Vec<Owner>> = of_writer.into_iter().collect();
        let Some(owner) = of_writer.iter().flatten().find(|owner| owner.index_id().is_some())
        else {
            continue;
        };
        if of_writer.iter().flatten().all(is_ours)
            && let Some(index) = owner.index_id()
        {
            left.push(Left { writer, owners, owner: owner.clone(), index });
        }
    }
    Ok(left)
}

/// Makes this server the one to judge what indexes left behind that are gone: what was written on an
/// earlier timeline or by a `former` server, and what copies needed of which nothing is left. Gives how many
/// writer ids that were.
pub fn adopt_dropped(
    former: Option<u64>,
    stores: impl IntoIterator<Item = String>,
) -> Result<usize> {
    let binding = meta::current_binding();
    let former = former.filter(|system| *system != binding.system);
    let mut count = 0;
    for store in stores {
        owner::each(&store, &mut |writers, _| {
            for left in ours(&store, writers, former)? {
                // After its transaction was seen to have ended, so that its index is seen too.
                let carried = Carried::read()?;
                if let Some(index) = &carried.locked {
                    return Err(locked(index));
                }
                let is_there =
                    carried.has(left.writer) || carried.is_elsewhere(left.owner.index_oid);
                if !is_there && adopt_left(&store, &left)? {
                    count += 1;
                }
            }
            Ok(())
        })?;
    }
    Ok(count)
}

fn adopt_left(store: &str, left: &Left) -> Result<bool> {
    let Owners { heirs, nonces, .. } = &left.owners;
    for heir in heirs {
        if owner::list(store, *heir)? != Owners::default() {
            return Ok(false);
        }
    }
    let binding = meta::current_binding();
    let is_judged =
        left.owner.is_of_system(binding.system) && left.owner.timeline == binding.timeline;
    if heirs.is_empty() && is_judged {
        return Ok(false);
    }
    owner::take_over(store, left.writer, &left.owner, binding)?;
    failpoint::pass("adopt: taken over");
    for nonce in nonces {
        owner::delete_nonce(store, left.writer, *nonce)?;
    }
    owner::delete_heirs(store, left.writer, heirs.clone())?;
    Ok(true)
}

fn locked(index: &str) -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, format!("index {index} is locked"))
        .detail("What the store holds may be its own.")
        .hint("Repeat the command when it is not locked.")
}
