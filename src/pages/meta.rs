//! The meta page.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::ObjectId;
pub use polign_pages::meta::{Binding, Meta};
use polign_pages::{
    Freshness, PAGE_LEN, PageError, PageKind, PageMut, PageRef,
    meta::{META_BLOCK, META_STAMP},
};

use super::{
    record::{At, Record},
    relation::{Index, PageImage, Storage},
};
use crate::error::{Error, Result};

/// What the last meta page was that this backend decoded, so that it is decoded only when it changed.
struct Cached {
    version: (u64, u32),
    index_id: ObjectId,
    meta: Rc<Meta>,
}

/// More indexes than this in one backend: forget them all rather than grow.
const MAX_CACHED: usize = 256;

thread_local! {
    static CACHE: RefCell<HashMap<Storage, Cached>> = RefCell::new(HashMap::new());
}

/// The meta page as it is now. Costs a pin and a lock when it has not changed.
pub fn read(index: Index) -> Result<Rc<Meta>> {
    let storage = index.storage();
    let known = CACHE.with_borrow(|cache| {
        cache.get(&storage).map(|known| (known.version, known.index_id, known.meta.clone()))
    });
    let known = known.filter(|(version, index_id, _)| {
        index.pin(META_BLOCK).share(|bytes| {
            PageRef::parse(bytes)
                .is_ok_and(|page| page.version() == *version && page.index_id() == *index_id)
        })
    });
    if let Some((_, _, meta)) = known {
        return Ok(meta);
    }
    let mut image = PageImage::new();
    index.copy_block(META_BLOCK, &mut image);
    let page = check(index, image.bytes())?;
    let meta = Meta::decode(page).map_err(|error| index.damaged(META_BLOCK, error))?;
    let (version, index_id) = (page.version(), page.index_id());
    let meta = Rc::new(meta);
    CACHE.with_borrow_mut(|cache| {
        if cache.len() >= MAX_CACHED {
            cache.clear();
        }
        cache.insert(storage, Cached { version, index_id, meta: meta.clone() });
    });
    Ok(meta)
}

/// The writer id in the image of a meta page; `None` if it is none that this version can read.
pub fn writer_of(bytes: &[u8]) -> Option<ObjectId> {
    let page = PageRef::parse(bytes).ok().filter(|page| page.kind() == PageKind::Meta)?;
    Some(Meta::decode(page).ok()?.writer.id)
}

/// Whether there is a meta page yet. A build that was killed may have left an empty block instead, and
/// CREATE INDEX CONCURRENTLY leaves such an index in the catalog.
pub fn is_written(index: Index) -> bool {
    index.blocks() > 0
        && index
            .pin(META_BLOCK)
            .share(|bytes| !matches!(PageRef::freshness(bytes), Ok(Freshness::New)))
}

/// The LSN of the meta page's last change.
pub(super) fn lsn(index: Index) -> Result<u64> {
    let lsn =
        index.pin(META_BLOCK).share(|bytes| PageRef::parse(bytes).map(|page| page.version().0));
    lsn.map_err(|error| index.damaged(META_BLOCK, error))
}

fn check(index: Index, bytes: &[u8]) -> Result<PageRef<'_>> {
    let page = PageRef::parse(bytes).and_then(|page| match page.kind() {
        PageKind::Meta if page.stamp() == META_STAMP && !page.is_freed() => Ok(page),
        PageKind::Meta => Err(PageError::Content("the meta page was freed")),
        found => Err(PageError::Kind { found, expected: PageKind::Meta }),
    });
    page.map_err(|error| index.damaged(META_BLOCK, error))
}

/// The locked meta page within a record that may change other pages too.
pub(super) struct Open {
    /// As it is now; write it back with [`Open::write`].
    pub meta: Meta,
    at: At,
}

impl Open {
    /// Locks the meta page. It comes first in the lock order.
    pub fn lock(index: Index, record: &mut Record) -> Result<Self> {
        let locked = index.lock(META_BLOCK);
        let page = check(index, locked.bytes())?;
        let meta = Meta::decode(page)
            .and_then(|meta| meta.check_writable().map(|()| meta))
            .map_err(|error| index.damaged(META_BLOCK, error))?;
        Ok(Self { meta, at: record.change(locked) })
    }

    /// Puts the changed meta page into the record.
    pub fn write(&self, index: Index, record: &mut Record) -> Result<()> {
        record
            .page(self.at)
            .and_then(|mut page| self.meta.encode(&mut page))
            .map_err(|error| index.damaged(META_BLOCK, error))
    }
}

/// Changes the meta page, in a record of its own. `change` runs under the page's lock: it only computes,
/// and what it returns an error for is not changed.
pub fn update<T>(index: Index, change: impl FnOnce(&mut Meta) -> Result<T>) -> Result<T> {
    Ok(change_page(index, change)?.0)
}

/// The same, and the change is on disk when this returns: no crash takes it back.
pub fn update_durably<T>(index: Index, change: impl FnOnce(&mut Meta) -> Result<T>) -> Result<T> {
    let (result, lsn) = change_page(index, change)?;
    super::objects::flush_log(lsn);
    Ok(result)
}

fn change_page<T>(index: Index, change: impl FnOnce(&mut Meta) -> Result<T>) -> Result<(T, u64)> {
    let mut record = Record::start(index);
    let mut open = Open::lock(index, &mut record)?;
    let result = change(&mut open.meta)?;
    open.write(index, &mut record)?;
    Ok((result, record.finish()))
}

/// Makes scans read marks of dead rows again that they have copied. To be called at the end of every
/// pass that had dead rows to look for, before the heap may reuse their TIDs: also when it marked
/// nothing, because an earlier pass may have marked the rows and failed before it came here.
pub fn count_marks(index: Index) -> Result<()> {
    update(index, |meta| {
        meta.delta.marks += 1;
        meta.tombstone_marks += 1;
        Ok(())
    })
}

/// Writes the first page of a new index.
pub fn create(index: Index, meta: &Meta) -> Result<()> {
    if index.blocks() != 0 {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            format!("index \"{}\" already contains data", index.name()),
        ));
    }
    let mut record = Record::start(index);
    let spare = super::free::Spare::find(index);
    let locked = spare.take().filter(|locked| locked.block() == META_BLOCK);
    let locked = locked.ok_or_else(|| {
        Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "a new index is being written twice")
    })?;
    record
        .create(locked, PageKind::Meta, meta.index_id)
        .and_then(|(at, _)| meta.encode(&mut record.page(at)?))
        .map_err(|error| index.damaged(META_BLOCK, error))?;
    record.finish();
    Ok(())
}

/// Writes the init fork of an unlogged index: what it is reset to after a crash.
pub fn create_init_fork(index: Index, meta: &Meta) -> Result<()> {
    let mut image = [0; PAGE_LEN];
    PageMut::init(&mut image, PageKind::Meta, meta.index_id)
        .and_then(|(mut page, _)| meta.encode(&mut page))
        .map_err(|error| index.damaged(META_BLOCK, error))?;
    let relation = pg_sys::BufferManagerRelation { rel: index.relation(), ..Default::default() };
    let fork = pg_sys::ForkNumber::INIT_FORKNUM;
    // SAFETY: the init fork is new and nobody else sees it; the buffer is pinned and locked while the
    // page is copied in. Generic WAL records skip init forks, so the page is logged here.
    unsafe {
        let buffer = pg_sys::ExtendBufferedRel(
            relation,
            fork,
            std::ptr::null_mut(),
            pg_sys::ExtendBufferedFlags::EB_LOCK_FIRST
                | pg_sys::ExtendBufferedFlags::EB_SKIP_EXTENSION_LOCK,
        );
        let page = pg_sys::BufferGetPage(buffer).cast::<u8>();
        std::ptr::copy_nonoverlapping(image.as_ptr(), page, PAGE_LEN);
        pg_sys::MarkBufferDirty(buffer);
        pg_sys::UnlockReleaseBuffer(buffer);
        pg_sys::log_newpage_range(index.relation(), fork, 0, 1, true);
    }
    Ok(())
}

/// The index's id, drawn now if the index has none yet (it was just reset to its init fork).
pub fn ensure_id(index: Index) -> Result<ObjectId> {
    let known = read(index)?.index_id;
    if !known.is_nil() {
        return Ok(known);
    }
    let drawn = random_id()?;
    update(index, |meta| {
        if meta.index_id.is_nil() {
            meta.index_id = drawn;
        }
        Ok(meta.index_id)
    })
}

/// Draws a random id.
pub fn random_id() -> Result<ObjectId> {
    ObjectId::random().map_err(|error| {
        Error::new(PgSqlErrorCode::ERRCODE_SYSTEM_ERROR, "could not draw a random id")
            .detail(error.to_string())
    })
}

/// What a writer id that is minted now is bound to. Raises during recovery: nothing is written then.
pub fn current_binding() -> Binding {
    // SAFETY: both read shared memory; MyDatabaseId is set in a backend.
    unsafe {
        Binding {
            system: pg_sys::GetSystemIdentifier(),
            timeline: pg_sys::GetWALInsertionTimeLine(),
            database: pg_sys::MyDatabaseId.to_u32(),
        }
    }
}
