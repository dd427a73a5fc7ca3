//! Adding a row to the delta.

use polign_engine::ObjectId;
use polign_pages::{
    Link, PageError, PageKind, PageRef,
    codes::{self, Codes, Entry, VectorRef},
    meta::META_BLOCK,
    vectors::{self, Group, Vectors},
};

use super::super::{
    free::Spare,
    meta::{self, Open},
    record::{At, Record},
    relation::{ChainGuard, Fault, Index, Pin},
};
use crate::{error::Result, failpoint};

/// A row to be inserted, coded already.
#[derive(Debug, Clone, Copy)]
pub struct NewRow<'a> {
    /// The heap TID as `block << 16 | offset`.
    pub id: u64,
    /// The nearest cell, in the root of `epoch`.
    pub cell: u32,
    /// The epoch of the root that gave the cell.
    pub epoch: u64,
    /// The plane-1 row (`Plane1RowRef::write_to`).
    pub code: &'a [u8],
    /// The plane-2 record.
    pub record: &'a [u8],
}

/// What an attempt to insert needs before the next.
enum Attempt {
    /// The row is in; a code page was added for it. With the tail that the meta page named.
    Added { page: Link, hint: Option<Link> },
    /// The row is in.
    Done,
    /// So many free blocks are needed, found before any page is locked.
    Blocks(usize),
    /// Someone else was faster: look again.
    Again,
}

/// How often a chain may change under an inserter before it is taken for damaged. Each time somebody
/// else has made progress.
const ATTEMPTS: u32 = 1000;

/// Adds a row. Every scan that begins after the return finds it. True if the delta grew by a page, as a
/// sign that it may be time to flush.
pub fn insert(index: Index, row: &NewRow<'_>) -> Result<bool> {
    let mut spares = Vec::new();
    let mut use_hint = true;
    let mut last = Link { block: 0, stamp: 0 };
    for _ in 0..ATTEMPTS {
        pgrx::check_for_interrupts!();
        match attempt(index, row, &mut spares, use_hint) {
            Ok(Attempt::Done) => return Ok(false),
            Ok(Attempt::Added { page, hint }) => {
                // A hint only: if this record is lost, later inserters walk from an older page. One that
                // another inserter has put there meanwhile may lie further on.
                return meta::update(index, |meta| {
                    if meta.delta.tail_hint == hint {
                        meta.delta.tail_hint = Some(page);
                    }
                    Ok(true)
                });
            }
            Ok(Attempt::Blocks(needed)) => {
                while spares.len() < needed {
                    spares.push(Spare::find(index));
                }
            }
            Ok(Attempt::Again) => (),
            Err(Fault::Gone(link)) => {
                use_hint = false;
                last = link;
            }
            Err(Fault::Error(error)) => return Err(error),
        }
    }
    Err(index.damaged(last.block, PageError::Gone))
}

fn attempt(
    index: Index,
    row: &NewRow<'_>,
    spares: &mut Vec<Spare>,
    use_hint: bool,
) -> std::result::Result<Attempt, Fault> {
    let meta = meta::read(index)?;
    meta.check_writable().map_err(|error| index.damaged(META_BLOCK, error))?;
    let (index_id, delta) = (meta.index_id, meta.delta);
    if index_id.is_nil() {
        meta::ensure_id(index)?;
        return Ok(Attempt::Again);
    }
    let hint = delta.tail_hint.filter(|_| use_hint);
    let mut record = Record::start(index);
    let Some(start) = hint.or(delta.head) else {
        return first(index, index_id, row, spares, record);
    };
    let (pin, link, last) = find_tail(index, index_id, start)?;
    // Pinned before the tail is locked: bringing the page in may take a read.
    let last = last.map(|last| (last, index.pin(last.block)));
    let tail = pin.lock();
    let fault = |error| index.fault(link, error);
    let page = PageRef::follow(tail.bytes(), index_id, link.stamp, PageKind::Codes);
    let page = page.map_err(fault)?;
    let codes = Codes::parse(page).map_err(fault)?;
    if page.next().is_some() || last_vectors(&codes) != last.as_ref().map(|(last, _)| *last) {
        return Ok(Attempt::Again);
    }
    if codes.code_len() != row.code.len() {
        return Err(fault(PageError::Content("codes of another length than this index has")));
    }
    let (generation, has_room) = (codes.generation(), codes.has_room());
    let next_place = next_place(&codes, row.record.len());
    let pages_per_record = vectors::pages_per_record(row.record.len());

    if !has_room {
        if spares.len() < pages_per_record + 1 {
            return Ok(Attempt::Blocks(pages_per_record + 1));
        }
        let tail = record.change(tail);
        let Some(new) = new_code_page(index, index_id, row, next_place, spares, &mut record)?
        else {
            return Ok(Attempt::Again);
        };
        record.page(tail).map_err(fault)?.set_next(Some(new));
        failpoint::pass("insert: new page");
        record.finish();
        failpoint::pass("insert: page added");
        return Ok(Attempt::Added { page: new, hint: delta.tail_hint });
    }

    // The last entry's vector page has room for this one's record, or new pages are needed.
    let tail = record.change(tail);
    let group = Group { generation, owner: link, record_len: row.record.len() as u32 };
    let shared = match last {
        Some((link, pin)) if pages_per_record == 1 => {
            let locked = pin.lock();
            let has_room = PageRef::follow(locked.bytes(), index_id, link.stamp, PageKind::Vectors)
                .and_then(Vectors::parse)
                .and_then(|vectors| match vectors.group() == group {
                    true => Ok(vectors.has_room()),
                    false => Err(PageError::Content("a vector page belongs to another group")),
                })
                // It cannot be recycled as long as its code page is the locked tail.
                .map_err(|error| index.damaged(link.block, error))?;
            has_room.then_some((locked, link))
        }
        _ => None,
    };
    let vector = match shared {
        Some((locked, link)) => {
            let at = record.change(locked);
            let slot = record.page(at).and_then(|mut page| vectors::append(&mut page, row.record));
            VectorRef { page: link, slot: slot.map_err(|error| index.fault(link, error))? }
        }
        None => {
            if spares.len() < pages_per_record {
                return Ok(Attempt::Blocks(pages_per_record));
            }
            let created = new_vector_pages(index, index_id, row, group, spares, &mut record)?;
            let Some(vector) = created else { return Ok(Attempt::Again) };
            vector
        }
    };
    append(&mut record, tail, row, vector).map_err(fault)?;
    failpoint::pass("insert: before");
    record.finish();
    failpoint::pass("insert: after");
    Ok(Attempt::Done)
}

/// Where a code page stands in the delta.
#[derive(Clone, Copy)]
struct Place {
    generation: u64,
    position: u32,
}

/// Refinement records of one generation at the most, in bytes: what a flush takes at a time, and holds in
/// memory.
const GENERATION_BYTES: usize = 32 << 20;

/// Where the page behind this one stands: a generation that is full is followed by the next.
fn next_place(codes: &Codes<'_>, record_len: usize) -> Place {
    let page_bytes = codes::entries_per_page(codes.code_len()) * record_len;
    let pages = GENERATION_BYTES.div_ceil(page_bytes.max(1)) as u32;
    let position = codes.position().wrapping_add(1);
    let is_full = position.is_multiple_of(pages);
    Place { generation: codes.generation() + u64::from(is_full), position }
}

/// The vector page of a code page's last entry.
fn last_vectors(codes: &Codes<'_>) -> Option<Link> {
    codes.len().checked_sub(1).and_then(|slot| codes.entry(slot)).map(|entry| entry.vector.page)
}

/// Finds the last code page of the chain from `start`, and the vector page of its last entry.
pub(super) fn find_tail(
    index: Index,
    index_id: ObjectId,
    start: Link,
) -> std::result::Result<(Pin, Link, Option<Link>), Fault> {
    let mut link = start;
    let mut guard = ChainGuard::new();
    loop {
        guard.step(index, link)?;
        let pin = index.pin(link.block);
        let seen = pin.share(|bytes| {
            let page = PageRef::follow(bytes, index_id, link.stamp, PageKind::Codes)?;
            match page.next() {
                None if page.is_freed() => {
                    Err(PageError::Content("the last page of the delta was freed"))
                }
                next => Ok((next, last_vectors(&Codes::parse(page)?))),
            }
        });
        match seen.map_err(|error| index.fault(link, error))? {
            (None, last) => return Ok((pin, link, last)),
            (Some(next), _) => link = next,
        }
    }
}

/// The first row of an empty delta: its code page and the meta page that leads there.
fn first(
    index: Index,
    index_id: ObjectId,
    row: &NewRow<'_>,
    spares: &mut Vec<Spare>,
    mut record: Record,
) -> std::result::Result<Attempt, Fault> {
    let needed = 1 + vectors::pages_per_record(row.record.len());
    if spares.len() < needed {
        return Ok(Attempt::Blocks(needed));
    }
    let mut open = Open::lock(index, &mut record)?;
    if open.meta.delta.head.is_some() || open.meta.index_id != index_id {
        return Ok(Attempt::Again);
    }
    const FIRST: Place = Place { generation: 1, position: 0 };
    let created = new_code_page(index, index_id, row, FIRST, spares, &mut record)?;
    let Some(link) = created else { return Ok(Attempt::Again) };
    open.meta.delta.head = Some(link);
    open.meta.delta.tail_hint = Some(link);
    open.write(index, &mut record)?;
    record.finish();
    Ok(Attempt::Done)
}

/// Puts a new code page with the row as its only entry into the record; none if a spare was taken by
/// somebody else meanwhile.
fn new_code_page(
    index: Index,
    index_id: ObjectId,
    row: &NewRow<'_>,
    place: Place,
    spares: &mut Vec<Spare>,
    record: &mut Record,
) -> std::result::Result<Option<Link>, Fault> {
    let Some(locked) = spares.pop().and_then(Spare::take) else { return Ok(None) };
    let block = locked.block();
    let fault = |error| Fault::Error(index.damaged(block, error));
    let (at, link) = record.create(locked, PageKind::Codes, index_id).map_err(fault)?;
    let mut page = record.page(at).map_err(fault)?;
    let Place { generation, position } = place;
    codes::init(&mut page, generation, position, row.code.len()).map_err(fault)?;
    let group = Group { generation, owner: link, record_len: row.record.len() as u32 };
    let vector = new_vector_pages(index, index_id, row, group, spares, record)?;
    let Some(vector) = vector else { return Ok(None) };
    append(record, at, row, vector).map_err(fault)?;
    Ok(Some(link))
}

fn append(
    record: &mut Record,
    at: At,
    row: &NewRow<'_>,
    vector: VectorRef,
) -> std::result::Result<(), PageError> {
    let NewRow { id, cell, epoch, code, .. } = *row;
    let entry = Entry { id, cell, epoch, dead: false, vector, code };
    codes::append(&mut record.page(at)?, &entry).map(|_| ())
}

/// Puts new vector pages with the row's record into the WAL record; none if a spare was taken by
/// somebody else meanwhile.
fn new_vector_pages(
    index: Index,
    index_id: ObjectId,
    row: &NewRow<'_>,
    group: Group,
    spares: &mut Vec<Spare>,
    record: &mut Record,
) -> std::result::Result<Option<VectorRef>, Fault> {
    let parts = vectors::pages_per_record(row.record.len());
    let mut next = None;
    // From the last page to the first, so that each can lead to the next.
    for part in (0..parts).rev() {
        let Some(locked) = spares.pop().and_then(Spare::take) else { return Ok(None) };
        let block = locked.block();
        let fault = |error| Fault::Error(index.damaged(block, error));
        let (at, link) = record.create(locked, PageKind::Vectors, index_id).map_err(fault)?;
        let mut page = record.page(at).map_err(fault)?;
        let filled = match parts {
            1 => vectors::init(&mut page, group)
                .and_then(|()| vectors::append(&mut page, row.record).map(|_| ())),
            _ => vectors::init_part(&mut page, group, part as u16, row.record),
        };
        filled.map_err(fault)?;
        page.set_next(next);
        next = Some(link);
    }
    Ok(next.map(|page| VectorRef { page, slot: 0 }))
}
