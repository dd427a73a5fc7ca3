//! Object pages: names of objects in the store that the index does not refer to (pending: not yet;
//! retired: not any more), so that garbage collection knows of them.

use polign_engine::ObjectId;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{I64, U16, U32, U64},
};

use crate::{PageError, PageMut, PageRef, content_capacity};

const HEADER: usize = size_of::<Header>();
const RECORD: usize = size_of::<RawRecord>();

/// Records that one page takes.
pub const RECORDS_PER_PAGE: usize = (content_capacity() - HEADER) / RECORD;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    record_len: U16,
    count: U16,
    reserved: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRecord {
    object: ObjectId,
    writer: ObjectId,
    index: ObjectId,
    xid: U64,
    lsn: U64,
    time: I64,
    form: U16,
    reserved: [u8; 6],
}

/// What an object is; the discriminant is its number in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ObjectForm {
    /// A segment.
    Segment = 1,
    /// A published root.
    Root = 2,
}

/// An object that the index does not refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectRecord {
    /// The object.
    pub object: ObjectId,
    /// The writer under whose id it lies.
    pub writer: ObjectId,
    /// The index that it was written for.
    pub index: ObjectId,
    /// The next full transaction id when the record was made: what ran then has a smaller one.
    pub xid: u64,
    /// Where the WAL was at that moment.
    pub lsn: u64,
    /// When, in microseconds since 2000-01-01 UTC, as Postgres counts.
    pub time: i64,
    /// What it is.
    pub form: ObjectForm,
}

/// Reads the records of a page.
pub fn records(page: PageRef<'_>) -> Result<Vec<ObjectRecord>, PageError> {
    let (header, bytes) = Header::ref_from_prefix(page.content())
        .map_err(|_| PageError::Content("an object page has no header"))?;
    if usize::from(header.record_len.get()) != RECORD
        || usize::from(header.count.get()) * RECORD != bytes.len()
    {
        return Err(PageError::Content("an object page has another length than its records"));
    }
    bytes
        .chunks_exact(RECORD)
        .map(|bytes| {
            let raw = RawRecord::ref_from_bytes(bytes)
                .map_err(|_| PageError::Content("an object record has a wrong length"))?;
            let form = match raw.form.get() {
                1 => ObjectForm::Segment,
                2 => ObjectForm::Root,
                _ => return Err(PageError::Content("an object record is of an unknown kind")),
            };
            Ok(ObjectRecord {
                object: raw.object,
                writer: raw.writer,
                index: raw.index,
                xid: raw.xid.get(),
                lsn: raw.lsn.get(),
                time: raw.time.get(),
                form,
            })
        })
        .collect()
}

/// Makes the page hold these records and no others: at most [`RECORDS_PER_PAGE`].
pub fn write(page: &mut PageMut<'_>, records: &[ObjectRecord]) -> Result<(), PageError> {
    let content = page.resize(HEADER + records.len() * RECORD)?;
    let header = Header {
        record_len: (RECORD as u16).into(),
        count: (records.len() as u16).into(),
        reserved: 0.into(),
    };
    let (head, body) = content.split_at_mut(HEADER);
    head.copy_from_slice(header.as_bytes());
    for (bytes, record) in body.chunks_exact_mut(RECORD).zip(records) {
        let raw = RawRecord {
            object: record.object,
            writer: record.writer,
            index: record.index,
            xid: record.xid.into(),
            lsn: record.lsn.into(),
            time: record.time.into(),
            form: (record.form as u16).into(),
            reserved: [0; 6],
        };
        bytes.copy_from_slice(raw.as_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageKind, image::tests::page};

    #[test]
    fn records_round_trip_and_the_page_has_a_limit() {
        let record = |n: u8| ObjectRecord {
            object: ObjectId([n; 16]),
            writer: ObjectId([1; 16]),
            index: ObjectId([2; 16]),
            xid: 1 << 40,
            lsn: u64::MAX,
            time: -5,
            form: if n.is_multiple_of(2) { ObjectForm::Segment } else { ObjectForm::Root },
        };
        let all: Vec<_> = (0..RECORDS_PER_PAGE as u8).map(record).collect();
        let bytes = page(PageKind::Pending, |page| {
            write(page, &all[..3]).unwrap();
            write(page, &all).unwrap();
            let mut more = all.clone();
            more.push(record(0));
            assert!(write(page, &more).is_err());
        });
        assert_eq!(records(PageRef::parse(&bytes).unwrap()).unwrap(), all);
        for (at, value) in [(0, 1), (2, 1), (HEADER + RECORD - 8, 9)] {
            let mut bytes = bytes.clone();
            bytes[crate::HEADER_LEN + at] = value;
            assert!(records(PageRef::parse(&bytes).unwrap()).is_err(), "{at}");
        }
    }
}
