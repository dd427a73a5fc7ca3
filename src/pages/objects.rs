//! Pending and retired objects: what may be in the store though the root does not refer to it.

use pgrx::pg_sys;
use polign_engine::ObjectId;
pub use polign_pages::objects::{ObjectForm, ObjectRecord, RECORDS_PER_PAGE};
use polign_pages::{Link, PageError, PageKind, PageRef, objects};

use super::{
    free::{Spare, next_xid, removable},
    meta::{self, Meta, Open},
    record::Record,
    relation::{Access, ChainGuard, Index, PageImage, Pin},
};
use crate::error::Result;

/// One of the two lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectList {
    /// Objects that nothing refers to yet: logged, and the log flushed, before they are uploaded.
    Pending,
    /// Objects that nothing refers to any more.
    Retired,
}

impl ObjectList {
    fn kind(self) -> PageKind {
        match self {
            Self::Pending => PageKind::Pending,
            Self::Retired => PageKind::Retired,
        }
    }

    fn head(self, meta: &mut Meta) -> &mut Option<Link> {
        match self {
            Self::Pending => &mut meta.pending,
            Self::Retired => &mut meta.retired,
        }
    }
}

/// An object as of now, to be put on a list.
pub fn record_now(
    form: ObjectForm,
    object: ObjectId,
    writer: ObjectId,
    index: ObjectId,
) -> ObjectRecord {
    // SAFETY: these read the clock and shared memory.
    let (lsn, time) = unsafe { (pg_sys::GetXLogInsertRecPtr(), pg_sys::GetCurrentTimestamp()) };
    ObjectRecord { object, writer, index, xid: next_xid(), lsn, time, form }
}

/// A segment that nothing refers to from now on. The time is the later one of this server's clock and the
/// store's, which is ahead by so much: with a clock that is put right only afterwards it would seem to have
/// been garbage for longer than it was.
pub fn retired_now(
    object: ObjectId,
    (writer, index): (ObjectId, ObjectId),
    clock_ahead_ms: i64,
) -> ObjectRecord {
    let record = record_now(ObjectForm::Segment, object, writer, index);
    let time = record.time.saturating_add(clock_ahead_ms.saturating_mul(1000));
    ObjectRecord { time, ..record }
}

/// Makes the log durable up to a position that [`append`] gave.
pub fn flush_log(lsn: u64) {
    // SAFETY: the position is the end of a record that was written, or 0. (The current insert position
    // would not do: behind a full page of the log it lies beyond everything that can be flushed.)
    unsafe { pg_sys::XLogFlush(lsn) }
}

/// Makes all of the log durable that there is now, and gives its end.
pub fn flush_whole_log() -> u64 {
    const PAGE: u64 = pg_sys::XLOG_BLCKSZ as u64;
    // SAFETY: these read shared memory. The position lies behind a record, or, where the record ended with
    // its page, behind the header of the next one: up to there nothing can be flushed.
    unsafe {
        let position = pg_sys::GetXLogInsertRecPtr();
        let first_of_segment = position % (pg_sys::wal_segment_size as u64) < PAGE;
        let header = match first_of_segment {
            true => size_of::<pg_sys::XLogLongPageHeaderData>(),
            false => size_of::<pg_sys::XLogPageHeaderData>(),
        } as u64;
        let end = if position % PAGE == header { position - header } else { position };
        pg_sys::XLogFlush(end);
        end
    }
}

/// Adds records to a list. Gives the position in the log behind them, 0 if they are not logged.
pub fn append(index: Index, list: ObjectList, records: &[ObjectRecord]) -> Result<u64> {
    let mut lsn = 0;
    for records in records.chunks(RECORDS_PER_PAGE) {
        lsn = append_with(index, list, records, |_| ())?;
    }
    Ok(lsn)
}

/// Adds records to a list and changes the meta page, in one record. There are at most
/// [`RECORDS_PER_PAGE`]. `change` runs under the page's lock and only computes.
pub fn append_with(
    index: Index,
    list: ObjectList,
    records: &[ObjectRecord],
    change: impl Fn(&mut Meta),
) -> Result<u64> {
    loop {
        pgrx::check_for_interrupts!();
        let spare = Spare::find(index);
        let expected = *list.head(&mut Meta::clone(&*meta::read(index)?));
        let pin = expected.map(|head| index.pin(head.block));
        let mut record = Record::start(index);
        let mut open = Open::lock(index, &mut record)?;
        let index_id = open.meta.index_id;
        let head = *list.head(&mut open.meta);
        if head != expected {
            continue;
        }
        change(&mut open.meta);
        if !records.is_empty()
            && !fill_head(index, index_id, list, head.zip(pin), records, &mut record)?
        {
            let Some(locked) = spare.take() else { continue };
            let damaged = |error| index.damaged(0, error);
            let (at, link) = record.create(locked, list.kind(), index_id).map_err(damaged)?;
            let mut page = record.page(at).map_err(damaged)?;
            objects::write(&mut page, records).map_err(damaged)?;
            page.set_next(head);
            *list.head(&mut open.meta) = Some(link);
        }
        open.write(index, &mut record)?;
        return Ok(record.finish());
    }
}

/// Adds the records to the first page of a list, if all of them fit there.
fn fill_head(
    index: Index,
    index_id: ObjectId,
    list: ObjectList,
    head: Option<(Link, Pin)>,
    records: &[ObjectRecord],
    record: &mut Record,
) -> Result<bool> {
    let Some((head, pin)) = head else { return Ok(false) };
    let damaged = |error| index.damaged(head.block, error);
    let locked = pin.lock();
    let page = PageRef::follow(locked.bytes(), index_id, head.stamp, list.kind());
    let mut there = page.and_then(objects::records).map_err(damaged)?;
    if there.len() + records.len() > RECORDS_PER_PAGE {
        return Ok(false);
    }
    there.extend_from_slice(records);
    let at = record.change(locked);
    record.page(at).and_then(|mut page| objects::write(&mut page, &there)).map_err(damaged)?;
    Ok(true)
}

fn walk(
    index: Index,
    list: ObjectList,
    mut visit: impl FnMut(Link, PageRef<'_>, Vec<ObjectRecord>) -> Result<()>,
) -> Access<()> {
    let mut meta = Meta::clone(&*meta::read(index)?);
    let mut link = *list.head(&mut meta);
    let mut image = PageImage::new();
    let mut guard = ChainGuard::new();
    while let Some(here) = link {
        pgrx::check_for_interrupts!();
        guard.step(index, here)?;
        index.copy(here, meta.index_id, list.kind(), &mut image)?;
        let damaged = |error| index.damaged(here.block, error);
        let page = image.page().map_err(damaged)?;
        visit(here, page, objects::records(page).map_err(damaged)?)?;
        link = page.next();
    }
    Ok(())
}

/// All records of a list.
pub fn read(index: Index, list: ObjectList) -> Result<Vec<ObjectRecord>> {
    Ok(read_with_lsn(index, list)?.into_iter().map(|(record, _)| record).collect())
}

/// All records of a list, each with a position in the log behind it.
pub fn read_with_lsn(index: Index, list: ObjectList) -> Result<Vec<(ObjectRecord, u64)>> {
    index.retry(|| {
        let mut all = Vec::new();
        walk(index, list, |_, page, records| {
            let (lsn, _) = page.version();
            all.extend(records.into_iter().map(|record| (record, lsn)));
            Ok(())
        })?;
        Ok(all)
    })
}

/// Whether every snapshot, and every transaction, began after the record was made.
pub fn is_past_snapshots(index: Index, record: &ObjectRecord) -> bool {
    removable(index, record.xid)
}

/// Removes the records that `keep` refuses, and gives how many there were. The caller holds the layout
/// lock exclusively.
pub fn retain(
    index: Index,
    list: ObjectList,
    keep: impl Fn(&ObjectRecord) -> bool,
) -> Result<usize> {
    let index_id = meta::read(index)?.index_id;
    let kind = list.kind();
    let mut previous: Option<Link> = None;
    let mut removed = 0;
    walk(index, list, |here, page, records| {
        let kept: Vec<_> = records.iter().copied().filter(&keep).collect();
        if kept.len() == records.len() {
            previous = Some(here);
            return Ok(());
        }
        removed += records.len() - kept.len();
        let damaged = |link: Link| move |error: PageError| index.damaged(link.block, error);
        let mut record = Record::start(index);
        let here_pin = index.pin(here.block);
        if kept.is_empty() {
            // The page goes, with the link to it.
            match previous {
                Some(previous) => {
                    let locked = index.lock(previous.block);
                    PageRef::follow(locked.bytes(), index_id, previous.stamp, kind)
                        .map_err(damaged(previous))?;
                    let at = record.change(locked);
                    record.page(at).map_err(damaged(previous))?.set_next(page.next());
                }
                None => {
                    let mut open = Open::lock(index, &mut record)?;
                    *list.head(&mut open.meta) = page.next();
                    open.write(index, &mut record)?;
                }
            }
        } else {
            previous = Some(here);
        }
        let locked = here_pin.lock();
        PageRef::follow(locked.bytes(), index_id, here.stamp, kind).map_err(damaged(here))?;
        let xid = next_xid();
        let at = record.change(locked);
        let mut page = record.page(at).map_err(damaged(here))?;
        match kept.is_empty() {
            true => page.free(xid),
            false => objects::write(&mut page, &kept).map_err(damaged(here))?,
        }
        record.finish();
        Ok(())
    })
    .map_err(|fault| index.settled(fault))?;
    Ok(removed)
}
