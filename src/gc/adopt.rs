//! Taking over what an index inherited, once an operator has said that nobody else needs it.

use std::collections::{BTreeMap, HashSet};

use pgrx::PgSqlErrorCode;
use polign_engine::ObjectId;

use super::{catalog, neighbours::Neighbours, store};
use crate::{
    am::root_cache,
    clock,
    error::{Error, Result},
    failpoint,
    pages::{
        Here, Index, meta,
        objects::{self, ObjectList},
    },
    session::{
        self,
        ownership::owner::{self, Owner, Owners},
    },
};

/// Takes over every writer id that the index has to do with: those under whose ids its objects lie, and
/// those that went on as its copies. Gives how many there were. The caller holds the maintenance lock.
pub fn adopt(index: Index) -> Result<usize> {
    let claim = session::claim(&mut Here(index))?;
    let (store, own) = (claim.target.url.as_str(), claim.writer.id);
    let (index_id, binding) = (meta::read(index)?.index_id, claim.writer.binding);
    let others = others(index, store, own)?;
    failpoint::pass("adopt: gathered");
    // First it is said whose they are from now on, on both sides; whoever comes back there finds it. Then
    // what others had put there goes.
    for (writer, other) in &others {
        owner::put_heir(store, index.oid(), index_id, *writer, (own, binding))?;
        failpoint::pass("adopt: heir");
        let says = Owner::new(index.oid(), other.index, *writer, binding);
        owner::put_adopted(store, own, *writer, &says)?;
    }
    failpoint::pass("adopt: said");
    for (writer, other) in &others {
        let mut gone = other.owners.clone();
        gone.heirs.retain(|heir| others.contains_key(heir));
        owner::delete_all(store, *writer, &gone)?;
    }
    let heirs = owner::list(store, own)?.heirs;
    let heirs = heirs.into_iter().filter(|heir| others.contains_key(heir)).collect();
    owner::delete_heirs(store, own, heirs)?;
    failpoint::pass("adopt: cleared");
    for (writer, other) in &others {
        retire_unknown(index, store, *writer, other.index)?;
        failpoint::pass("adopt: listed");
    }
    Ok(others.len())
}

/// Another writer.
struct Other {
    /// The index whose objects lie under its id.
    index: ObjectId,
    owners: Owners,
}

fn others(index: Index, store: &str, own: ObjectId) -> Result<BTreeMap<ObjectId, Other>> {
    let mut named: BTreeMap<ObjectId, ObjectId> = BTreeMap::new();
    let (_, root) = root_cache::current(index)?;
    named.extend(root.segments().iter().map(|entry| (entry.writer, entry.index)));
    for list in [ObjectList::Retired, ObjectList::Pending] {
        let records = objects::read(index, list)?;
        named.extend(records.iter().map(|record| (record.writer, record.index)));
    }
    let mut others = BTreeMap::new();
    let mut next: Vec<(ObjectId, Option<ObjectId>)> =
        named.into_iter().map(|(writer, index)| (writer, Some(index))).collect();
    next.push((own, None));
    let mut seen = HashSet::new();
    while let Some((writer, index)) = next.pop() {
        pgrx::check_for_interrupts!();
        if !seen.insert(writer) {
            continue;
        }
        let owners = owner::list(store, writer)?;
        let related = owner::read_related(store, writer, &owners)?;
        let is_read = |id: &ObjectId| related.iter().any(|(read, _)| read == id);
        // Whoever it speaks of would not be taken over, and it would be deleted.
        if let Some(id) = owners.heirs.iter().chain(&owners.adopted).find(|id| !is_read(id)) {
            return Err(not_understood(writer, *id));
        }
        for (other, says) in related {
            next.push((other, says.index_id()));
        }
        if writer == own {
            continue;
        }
        let nonces: Vec<_> = owners.nonces.iter().map(|nonce| (writer, *nonce)).collect();
        if owners.gone_since_ms().is_none() {
            owner::read_nonces(store, &nonces)?.iter().flatten().try_for_each(check_gone)?;
        }
        if let Some(index) = index {
            others.insert(writer, Other { index, owners });
        }
    }
    let neighbours = Neighbours::read()?;
    match others.keys().find_map(|writer| neighbours.holding(*writer)) {
        Some(database) => Err(in_use(database, "Scan the index there first, or drop it.")),
        None => Ok(others),
    }
}

fn not_understood(writer: ObjectId, other: ObjectId) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("cannot read what owner/{writer}/ says of writer {other}"),
    )
    .detail("It was deleted just now, or is of a later version of polign.")
    .hint("Repeat the command; update polign if that does not help.")
}

fn in_use(database: &str, hint: &str) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
        format!("database \"{database}\" has a copy of the index, or its origin"),
    )
    .hint(hint)
}

/// What this server knows better than whoever says that nobody else needs the objects, unless gc in that
/// database has found the index gone.
fn check_gone(owner: &Owner) -> Result<()> {
    let here = meta::current_binding();
    let elsewhere = owner.is_of_system(here.system) && owner.database != here.database;
    match catalog::database_name(owner.database).filter(|_| elsewhere) {
        Some(database) => {
            let hint = "Drop the index there, and call polign.gc(dry_run => false) there.";
            Err(in_use(&database, hint))
        }
        None => Ok(()),
    }
}

/// Puts objects of a writer that the index does not know on its list of retired objects: they were written
/// by a copy that is gone, or by the origin after the copy was made.
fn retire_unknown(index: Index, store: &str, writer: ObjectId, of: ObjectId) -> Result<()> {
    let (_, root) = root_cache::current(index)?;
    let mut known: HashSet<ObjectId> = root.segments().iter().map(|entry| entry.object).collect();
    for list in [ObjectList::Retired, ObjectList::Pending] {
        known.extend(objects::read(index, list)?.iter().map(|record| record.object));
    }
    session::list(store, &store::prefix(writer, of), &mut |objects, now_ms| {
        let ahead = clock::ahead_ms(now_ms);
        let unknown = objects.iter().filter_map(|object| store::object_of(&object.key));
        let records: Vec<_> = unknown
            .filter(|object| !known.contains(object))
            .map(|object| objects::retired_now(object, (writer, of), ahead))
            .collect();
        objects::append(index, ObjectList::Retired, &records).map(|_| ())
    })
}
