//! The objects `owner/<writer id>/...` of a store, which say who may delete what was written under a
//! writer id: docs/decisions/0010-object-ownership.md.

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::{
    ObjectId,
    protocol::{ListedObject, Priority, Request},
};
use polign_pages::meta::{Binding, Writer};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    failpoint, session,
};

/// The version of the form of owner objects.
const FORMAT: u32 = 1;
const ROOT: &str = "owner/";
const HEIR: &str = "heir-";
const ADOPTED: &str = "adopted-";
const GONE: &str = "gone";

/// What an owner object says, as JSON. Numbers beyond 2^53 are texts, which every reader gets right.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Owner {
    format: u32,
    writer: String,
    nonce: String,
    index: String,
    system: String,
    pub timeline: u32,
    pub database: u32,
    pub index_oid: u32,
    /// The transaction that wrote it, 0 if that had no id. While it runs, the index may be one that nobody
    /// else sees yet.
    xid: String,
}

impl Owner {
    /// What this session says of a writer of an index.
    pub fn new(index: pg_sys::Oid, index_id: ObjectId, writer: ObjectId, binding: Binding) -> Self {
        // SAFETY: reads the state of the transaction.
        let xid = unsafe { pg_sys::GetTopFullTransactionIdIfAny() };
        Self {
            format: FORMAT,
            writer: writer.to_string(),
            nonce: ObjectId::NIL.to_string(),
            index: index_id.to_string(),
            system: binding.system.to_string(),
            timeline: binding.timeline,
            database: binding.database,
            index_oid: index.to_u32(),
            xid: xid.value.to_string(),
        }
    }

    /// `None` for what this version does not understand.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let owner: Self = serde_json::from_slice(bytes).ok()?;
        let understood = owner.format == FORMAT && owner.index_id().is_some();
        (understood && owner.xid.parse::<u64>().is_ok()).then_some(owner)
    }

    /// The index whose objects lie under the writer id.
    pub fn index_id(&self) -> Option<ObjectId> {
        self.index.parse().ok()
    }

    pub fn is_of_system(&self, system: u64) -> bool {
        self.system.parse() == Ok(system)
    }

    /// The full id of the transaction that wrote it, 0 for none.
    pub fn xid(&self) -> u64 {
        self.xid.parse().unwrap_or(0)
    }
}

/// When gc first found an index gone: the age of this object is what counts.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Gone {
    format: u32,
    /// The end of the log at that moment; that the index is gone is in the log before it.
    lsn: String,
}

/// What lies under a writer id. Times are of the store's clock, in milliseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners {
    pub nonces: Vec<ObjectId>,
    /// Copies of the index that went on under ids of their own.
    pub heirs: Vec<ObjectId>,
    /// Writer ids that the index has taken over.
    pub adopted: Vec<ObjectId>,
    /// When the last nonce was put.
    pub last_nonce_ms: i64,
    /// When gc found that the index is gone.
    pub gone_ms: Option<i64>,
}

impl Owners {
    fn add(&mut self, name: &str, modified_ms: i64) {
        let id_after = |prefix| name.strip_prefix(prefix).and_then(|id: &str| id.parse().ok());
        if let Ok(nonce) = name.parse() {
            self.nonces.push(nonce);
            self.last_nonce_ms = self.last_nonce_ms.max(modified_ms);
        } else if let Some(heir) = id_after(HEIR) {
            self.heirs.push(heir);
        } else if let Some(adopted) = id_after(ADOPTED) {
            self.adopted.push(adopted);
        } else if name == GONE {
            self.gone_ms = Some(modified_ms);
        }
    }

    /// Whether nobody writes there, and nobody but `by` needs what was written.
    pub fn is_deserted(&self, by: ObjectId) -> bool {
        self.nonces.is_empty() && self.heirs.iter().all(|heir| *heir == by)
    }

    /// Since when the index is known to be gone. A nonce that was put later says that it is not. (Within
    /// one second that cannot be told.)
    pub fn gone_since_ms(&self) -> Option<i64> {
        self.gone_ms.filter(|gone| *gone >= self.last_nonce_ms && !self.nonces.is_empty())
    }
}

/// Goes through the owner objects of all writers of a store, page by page of the listing; with each page
/// comes the store's clock.
pub fn each(
    store: &str,
    visit: &mut dyn FnMut(Vec<(ObjectId, Owners)>, i64) -> Result<()>,
) -> Result<()> {
    let mut complete: Vec<(ObjectId, Owners)> = Vec::new();
    let mut last: Option<(ObjectId, Owners)> = None;
    let mut latest = 0;
    session::list(store, ROOT, &mut |objects, now_ms| {
        for object in objects {
            let Some((writer, name)) = split(&object.key) else { continue };
            // They come in the order of their keys.
            if last.as_ref().is_none_or(|(known, _)| *known != writer) {
                complete.extend(last.replace((writer, Owners::default())));
            }
            if let Some((_, owners)) = &mut last {
                owners.add(name, object.modified_ms);
            }
        }
        latest = now_ms;
        visit(std::mem::take(&mut complete), now_ms)
    })?;
    visit(last.into_iter().collect(), latest)
}

/// The writer id and the name in the key of an owner object.
fn split(key: &str) -> Option<(ObjectId, &str)> {
    let (writer, name) = key.strip_prefix(ROOT)?.split_once('/')?;
    Some((writer.parse().ok()?, name))
}

fn prefix(writer: ObjectId) -> String {
    format!("{ROOT}{writer}/")
}

/// Lists the owner objects of a writer.
pub fn list(store: &str, writer: ObjectId) -> Result<Owners> {
    Ok(list_with_clock(store, writer)?.0)
}

/// The same, with the store's clock in milliseconds since 1970.
pub fn list_with_clock(store: &str, writer: ObjectId) -> Result<(Owners, i64)> {
    let (mut owners, mut latest) = (Owners::default(), 0);
    session::list(store, &prefix(writer), &mut |objects: &[ListedObject], now_ms| {
        latest = now_ms;
        for object in objects {
            if let Some((_, name)) = split(&object.key) {
                owners.add(name, object.modified_ms);
            }
        }
        Ok(())
    })?;
    Ok((owners, latest))
}

/// Reads owner objects: nonces of writers. `None` for one that has gone meanwhile, or that this version
/// does not understand.
pub fn read_nonces(store: &str, names: &[(ObjectId, ObjectId)]) -> Result<Vec<Option<Owner>>> {
    let keys = names.iter().map(|(writer, nonce)| format!("{}{nonce}", prefix(*writer)));
    read(store, keys.collect())
}

/// Reads what is said under a writer id of its heirs and of those that it has taken over.
pub fn read_related(
    store: &str,
    writer: ObjectId,
    owners: &Owners,
) -> Result<Vec<(ObjectId, Owner)>> {
    let prefix = prefix(writer);
    let heirs = owners.heirs.iter().map(|heir| (*heir, format!("{prefix}{HEIR}{heir}")));
    let adopted = owners.adopted.iter().map(|other| (*other, format!("{prefix}{ADOPTED}{other}")));
    let (ids, keys): (Vec<_>, Vec<_>) = heirs.chain(adopted).unzip();
    let says = read(store, keys)?;
    Ok(ids.into_iter().zip(says).filter_map(|(id, says)| Some((id, says?))).collect())
}

fn read(store: &str, keys: Vec<String>) -> Result<Vec<Option<Owner>>> {
    let bytes = session::get_all(store, keys)?;
    Ok(bytes.iter().map(|bytes| Owner::parse(bytes.as_ref()?)).collect())
}

/// The end of the log when the index of a writer was found gone.
pub fn read_gone(store: &str, writer: ObjectId) -> Result<Option<u64>> {
    let key = format!("{}{GONE}", prefix(writer));
    let bytes = session::get_all(store, vec![key])?.pop().flatten();
    let gone: Option<Gone> = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    Ok(gone.filter(|gone| gone.format == FORMAT).and_then(|gone| gone.lsn.parse().ok()))
}

/// Puts an owner object of a writer: the one of `nonce`.
pub fn put_nonce(
    store: &str,
    index: pg_sys::Oid,
    index_id: ObjectId,
    writer: &Writer,
    nonce: ObjectId,
) -> Result<()> {
    let owner = Owner::new(index, index_id, writer.id, writer.binding);
    put(store, writer.id, &nonce.to_string(), &Owner { nonce: nonce.to_string(), ..owner })
}

/// Says under the writer id of the origin that a copy of its index goes on as `heir`.
pub fn put_heir(
    store: &str,
    index: pg_sys::Oid,
    index_id: ObjectId,
    origin: ObjectId,
    (heir, binding): (ObjectId, Binding),
) -> Result<()> {
    put(store, origin, &format!("{HEIR}{heir}"), &Owner::new(index, index_id, heir, binding))
}

/// Says that a writer's index has taken over what lies under another id.
pub fn put_adopted(store: &str, writer: ObjectId, adopted: ObjectId, says: &Owner) -> Result<()> {
    put(store, writer, &format!("{ADOPTED}{adopted}"), says)
}

/// Makes a writer id that nobody writes under any more one of this server.
pub fn take_over(store: &str, writer: ObjectId, found: &Owner, binding: Binding) -> Result<()> {
    let nonce = crate::pages::meta::random_id()?.to_string();
    let owner = Owner {
        nonce: nonce.clone(),
        system: binding.system.to_string(),
        timeline: binding.timeline,
        xid: "0".to_owned(),
        ..found.clone()
    };
    put(store, writer, &nonce, &owner)
}

/// Says that the index of a writer was found gone, with what the log says up to `lsn`.
pub fn put_gone(store: &str, writer: ObjectId, lsn: u64) -> Result<()> {
    put(store, writer, GONE, &Gone { format: FORMAT, lsn: lsn.to_string() })
}

fn put(store: &str, writer: ObjectId, name: &str, says: &impl Serialize) -> Result<()> {
    let bytes = serde_json::to_vec(says).map_err(|error| {
        Error::new(
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            "could not describe the owner of an index",
        )
        .detail(error.to_string())
    })?;
    // Whoever puts it again, because it is not known whether the first attempt came through, means it.
    let request = Request::PutBytes {
        store: store.to_owned(),
        key: format!("{}{name}", prefix(writer)),
        bytes,
        if_absent: false,
        priority: Priority::Build,
    };
    session::call("write", request).map(|_| ())
}

/// Deletes the owner object of a nonce.
pub fn delete_nonce(store: &str, writer: ObjectId, nonce: ObjectId) -> Result<()> {
    delete(store, vec![format!("{}{nonce}", prefix(writer))])
}

/// Deletes what says that copies went on.
pub fn delete_heirs(store: &str, writer: ObjectId, heirs: Vec<ObjectId>) -> Result<()> {
    let prefix = prefix(writer);
    delete(store, heirs.iter().map(|heir| format!("{prefix}{HEIR}{heir}")).collect())
}

/// Deletes the note that the index of a writer is gone.
pub fn delete_gone(store: &str, writer: ObjectId) -> Result<()> {
    delete(store, vec![format!("{}{GONE}", prefix(writer))])
}

/// Deletes all that lies under a writer id, the nonces last: without one, nobody judges what is left.
pub fn delete_all(store: &str, writer: ObjectId, owners: &Owners) -> Result<()> {
    let prefix = prefix(writer);
    let marks = |kind: &'static str, ids: &[ObjectId]| -> Vec<String> {
        ids.iter().map(|id| format!("{prefix}{kind}{id}")).collect()
    };
    let first = [marks(HEIR, &owners.heirs), marks(ADOPTED, &owners.adopted)].concat();
    for keys in [first, vec![format!("{prefix}{GONE}")], marks("", &owners.nonces)] {
        delete(store, keys)?;
        failpoint::pass("owner: cleared");
    }
    Ok(())
}

fn delete(store: &str, keys: Vec<String>) -> Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    session::call("delete", Request::Delete { store: store.to_owned(), keys }).map(|_| ())
}
