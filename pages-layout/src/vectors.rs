//! Vector pages: refinement records of delta rows, all of one code page's.
//!
//! Records have one length. Those that fit share a page; a longer one has its pages to itself, each
//! leading to the next.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{Link, PageError, PageMut, PageRef, content_capacity, image::RawLink};

const HEADER: usize = size_of::<Header>();

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    generation: U64,
    owner: RawLink,
    record_len: U32,
    count: U16,
    part: U16,
}

/// Bytes of records that a page takes.
pub const fn page_capacity() -> usize {
    content_capacity() - HEADER
}

/// How many pages one record needs.
pub const fn pages_per_record(record_len: usize) -> usize {
    record_len.div_ceil(page_capacity())
}

/// How many records share a page: at least 1.
pub const fn records_per_page(record_len: usize) -> usize {
    let fit = page_capacity() / record_len;
    if fit == 0 { 1 } else { fit }
}

/// What the pages of a group of records have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The generation of the delta.
    pub generation: u64,
    /// The code page whose entries refer to the records.
    pub owner: Link,
    /// Bytes of a record.
    pub record_len: u32,
}

/// A checked view of a vector page.
#[derive(Clone, Copy)]
pub struct Vectors<'a> {
    header: &'a Header,
    bytes: &'a [u8],
}

impl<'a> Vectors<'a> {
    /// Checks the page's content.
    pub fn parse(page: PageRef<'a>) -> Result<Self, PageError> {
        let (header, bytes) = Header::ref_from_prefix(page.content())
            .map_err(|_| PageError::Content("a vector page has no header"))?;
        let (len, count, part) = (
            header.record_len.get() as usize,
            usize::from(header.count.get()),
            usize::from(header.part.get()),
        );
        let expected = match part * page_capacity() {
            _ if len == 0 => None,
            0 => len.checked_mul(count).map(|all| all.min(page_capacity())),
            _ if count != 1 => None,
            before => len.checked_sub(before).map(|rest| rest.min(page_capacity())),
        };
        if expected != Some(bytes.len()) || (len > page_capacity() && count > 1) {
            return Err(PageError::Content("a vector page has another length than its records"));
        }
        Ok(Self { header, bytes })
    }

    /// What the page has in common with the others of its group.
    pub fn group(&self) -> Group {
        Group {
            generation: self.header.generation.get(),
            owner: Option::from(self.header.owner).unwrap_or(Link { block: u32::MAX, stamp: 0 }),
            record_len: self.header.record_len.get(),
        }
    }

    /// How many records begin here or go on here.
    pub fn len(&self) -> u16 {
        self.header.count.get()
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Which page of a record this is: 0 for the one where it begins.
    pub fn part(&self) -> u16 {
        self.header.part.get()
    }

    /// Whether another record fits behind those that are there.
    pub fn has_room(&self) -> bool {
        self.part() == 0
            && usize::from(self.len()) < records_per_page(self.group().record_len as usize)
    }

    /// The bytes of a record that are in this page.
    pub fn record(&self, slot: u16) -> Option<&'a [u8]> {
        let len = self.header.record_len.get() as usize;
        if slot >= self.len() {
            return None;
        }
        if len > page_capacity() {
            return Some(self.bytes);
        }
        self.bytes.get(usize::from(slot) * len..(usize::from(slot) + 1) * len)
    }
}

/// Makes the page an empty vector page whose records fit.
pub fn init(page: &mut PageMut<'_>, group: Group) -> Result<(), PageError> {
    write_header(page, group, 0, 0, 0)
}

/// Appends a record to a page and gives its slot.
pub fn append(page: &mut PageMut<'_>, record: &[u8]) -> Result<u16, PageError> {
    let vectors = Vectors::parse(page.view())?;
    let (slot, len) = (vectors.len(), vectors.group().record_len as usize);
    if record.len() != len || len > page_capacity() {
        return Err(PageError::Content("a record has another length than those of its page"));
    }
    if !vectors.has_room() {
        return Err(PageError::Content("the vector page is full"));
    }
    let at = HEADER + usize::from(slot) * len;
    page.resize(at + len)?[at..].copy_from_slice(record);
    if let Ok((header, _)) = Header::mut_from_prefix(page.content()) {
        header.count = (slot + 1).into();
    }
    Ok(slot)
}

/// Makes the page the `part`th of a record that is longer than a page.
pub fn init_part(
    page: &mut PageMut<'_>,
    group: Group,
    part: u16,
    record: &[u8],
) -> Result<(), PageError> {
    let bytes = record.chunks(page_capacity()).nth(usize::from(part));
    let bytes = bytes.ok_or(PageError::Content("a record has no such part"))?;
    write_header(page, group, 1, part, bytes.len())?;
    page.content()[HEADER..].copy_from_slice(bytes);
    Ok(())
}

fn write_header(
    page: &mut PageMut<'_>,
    group: Group,
    count: u16,
    part: u16,
    len: usize,
) -> Result<(), PageError> {
    let header = Header {
        generation: group.generation.into(),
        owner: Some(group.owner).into(),
        record_len: group.record_len.into(),
        count: count.into(),
        part: part.into(),
    };
    page.resize(HEADER + len)?[..HEADER].copy_from_slice(header.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageKind, image::tests::page};

    fn group(record_len: usize) -> Group {
        let owner = Link { block: 4, stamp: 2 };
        Group { generation: 6, owner, record_len: record_len as u32 }
    }

    #[test]
    fn records_share_a_page_until_it_is_full() {
        for len in [32, 400, 1552, page_capacity()] {
            let mut count = 0u16;
            let bytes = page(PageKind::Vectors, |page| {
                init(page, group(len)).unwrap();
                assert!(append(page, &vec![1; len - 1]).is_err());
                while Vectors::parse(page.view()).unwrap().has_room() {
                    assert_eq!(append(page, &vec![count as u8; len]).unwrap(), count);
                    count += 1;
                }
                assert!(append(page, &vec![1; len]).is_err());
            });
            let vectors = Vectors::parse(PageRef::parse(&bytes).unwrap()).unwrap();
            assert_eq!(vectors.group(), group(len));
            assert_eq!(usize::from(count), records_per_page(len));
            for slot in 0..count {
                assert_eq!(vectors.record(slot), Some(&vec![slot as u8; len][..]));
            }
            assert_eq!(vectors.record(count), None);
        }
    }

    #[test]
    fn a_long_record_spans_pages() {
        let record: Vec<u8> = (0..16_016u32).map(|i| i as u8).collect();
        assert_eq!(
            pages_per_record(record.len()),
            2,
            "with code page and old tail: one WAL record"
        );
        let mut joined = vec![];
        for part in 0..2 {
            let bytes = page(PageKind::Vectors, |page| {
                init_part(page, group(record.len()), part, &record).unwrap();
                assert!(init_part(page, group(record.len()), 2, &record).is_err());
            });
            let vectors = Vectors::parse(PageRef::parse(&bytes).unwrap()).unwrap();
            assert!(vectors.part() == part && !vectors.has_room());
            joined.extend_from_slice(vectors.record(0).unwrap());
        }
        assert_eq!(joined, record);
    }

    #[test]
    fn contradictions_are_errors() {
        let bytes = page(PageKind::Vectors, |page| {
            init(page, group(32)).unwrap();
            append(page, &[1; 32]).unwrap();
        });
        for (at, value) in [(16, 0), (16, 33), (19, 255), (20, 2), (20, 0), (22, 1)] {
            let mut bytes = bytes.clone();
            bytes[crate::HEADER_LEN + at] = value;
            assert!(Vectors::parse(PageRef::parse(&bytes).unwrap()).is_err(), "{at}");
        }
    }
}
