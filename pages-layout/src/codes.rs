//! Code pages: the scanned codes of rows that are not in the store yet, in the order of insertion.
//!
//! Entries never move and a slot is not used again within one use of the page. A page takes entries as
//! long as it is the last of its chain; from then on only its dead flags change. The pages of refinement
//! records that the entries refer to belong to this page alone and are freed with it.

use std::mem::offset_of;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{Link, PageError, PageMut, PageRef, content_capacity, image::RawLink};

const FLAG_DEAD: u16 = 1;
const HEADER: usize = size_of::<Header>();
const ENTRY_HEADER: usize = size_of::<EntryHeader>();

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    generation: U64,
    entry_len: U32,
    count: U16,
    dead: U16,
    position: U32,
    reserved: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct EntryHeader {
    tid_block: U32,
    tid_offset: U16,
    flags: U16,
    epoch: U64,
    cell: U32,
    vector: RawLink,
    slot: U16,
    reserved: U16,
}

/// Where the refinement record of a delta row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VectorRef {
    /// The page; a record longer than a page goes on in the page after it.
    pub page: Link,
    /// Which record of the page.
    pub slot: u16,
}

/// A delta row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The heap TID as `block << 16 | offset`.
    pub id: u64,
    /// The cell that was nearest when the row was inserted.
    pub cell: u32,
    /// The root's epoch then.
    pub epoch: u64,
    /// VACUUM found the row dead.
    pub dead: bool,
    /// Its refinement record.
    pub vector: VectorRef,
    /// Its code and factors, as the quantizer writes them.
    pub code: &'a [u8],
}

/// Bytes of an entry whose code has `code_len` bytes.
pub const fn entry_len(code_len: usize) -> usize {
    ENTRY_HEADER + code_len
}

/// How many entries fit in a page.
pub const fn entries_per_page(code_len: usize) -> usize {
    (content_capacity() - HEADER) / entry_len(code_len)
}

/// A checked view of a code page.
#[derive(Clone, Copy)]
pub struct Codes<'a> {
    header: &'a Header,
    entries: &'a [u8],
}

impl<'a> Codes<'a> {
    /// Checks the page's content.
    pub fn parse(page: PageRef<'a>) -> Result<Self, PageError> {
        let (header, entries) = Header::ref_from_prefix(page.content())
            .map_err(|_| PageError::Content("a code page has no header"))?;
        let (count, len) = (usize::from(header.count.get()), header.entry_len.get() as usize);
        if len < ENTRY_HEADER || count.checked_mul(len) != Some(entries.len()) {
            return Err(PageError::Content("a code page has another length than its entries"));
        }
        if header.dead.get() > header.count.get() {
            return Err(PageError::Content("a code page counts more dead entries than entries"));
        }
        Ok(Self { header, entries })
    }

    /// The generation of the delta that the page belongs to.
    pub fn generation(&self) -> u64 {
        self.header.generation.get()
    }

    /// How many pages the delta ever had before this one, modulo 2^32.
    pub fn position(&self) -> u32 {
        self.header.position.get()
    }

    /// How many entries there are, dead ones included.
    pub fn len(&self) -> u16 {
        self.header.count.get()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many entries are dead.
    pub fn dead(&self) -> u16 {
        self.header.dead.get()
    }

    /// Bytes of each entry's code.
    pub fn code_len(&self) -> usize {
        self.header.entry_len.get() as usize - ENTRY_HEADER
    }

    /// Whether another entry fits.
    pub fn has_room(&self) -> bool {
        usize::from(self.len()) < entries_per_page(self.code_len()).min(usize::from(u16::MAX))
    }

    /// The entry in a slot.
    pub fn entry(&self, slot: u16) -> Option<Entry<'a>> {
        let len = self.header.entry_len.get() as usize;
        let bytes = self.entries.chunks_exact(len).nth(usize::from(slot))?;
        Self::decode(bytes)
    }

    /// All entries, dead ones included, in slot order.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'a>> + use<'a> {
        self.entries.chunks_exact(self.header.entry_len.get() as usize).filter_map(Self::decode)
    }

    fn decode(bytes: &'a [u8]) -> Option<Entry<'a>> {
        let (header, code) = EntryHeader::ref_from_prefix(bytes).ok()?;
        // An entry always has a vector; a link to no block leads nowhere and is recognised there.
        let page = Option::from(header.vector).unwrap_or(Link { block: u32::MAX, stamp: 0 });
        Some(Entry {
            id: u64::from(header.tid_block.get()) << 16 | u64::from(header.tid_offset.get()),
            cell: header.cell.get(),
            epoch: header.epoch.get(),
            dead: header.flags.get() & FLAG_DEAD != 0,
            vector: VectorRef { page, slot: header.slot.get() },
            code,
        })
    }

    /// The pages of refinement records that the entries refer to, each once. (A record that goes on in
    /// another page is named by its first page only.)
    pub fn vector_pages(&self) -> Vec<Link> {
        let mut pages: Vec<_> = self.entries().map(|entry| entry.vector.page).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }
}

/// Makes the page an empty code page: the `position`th of the delta, counted from 0 for the first that it ever
/// had.
pub fn init(
    page: &mut PageMut<'_>,
    generation: u64,
    position: u32,
    code_len: usize,
) -> Result<(), PageError> {
    if entries_per_page(code_len) == 0 {
        return Err(PageError::Content("a code is longer than a page"));
    }
    let header = Header {
        generation: generation.into(),
        entry_len: (entry_len(code_len) as u32).into(),
        count: 0.into(),
        dead: 0.into(),
        position: position.into(),
        reserved: 0.into(),
    };
    page.resize(HEADER)?.copy_from_slice(header.as_bytes());
    Ok(())
}

/// Appends an entry (its dead flag is not looked at) and gives its slot.
pub fn append(page: &mut PageMut<'_>, entry: &Entry<'_>) -> Result<u16, PageError> {
    let codes = Codes::parse(page.view())?;
    if entry.code.len() != codes.code_len() {
        return Err(PageError::Content("a code has another length than those of its page"));
    }
    if !codes.has_room() {
        return Err(PageError::Content("the code page is full"));
    }
    let slot = codes.len();
    let header = EntryHeader {
        tid_block: ((entry.id >> 16) as u32).into(),
        tid_offset: (entry.id as u16).into(),
        flags: 0.into(),
        epoch: entry.epoch.into(),
        cell: entry.cell.into(),
        vector: Some(entry.vector.page).into(),
        slot: entry.vector.slot.into(),
        reserved: 0.into(),
    };
    let at = HEADER + usize::from(slot) * entry_len(entry.code.len());
    let content = page.resize(at + entry_len(entry.code.len()))?;
    content[at..at + ENTRY_HEADER].copy_from_slice(header.as_bytes());
    content[at + ENTRY_HEADER..].copy_from_slice(entry.code);
    with_header(page, |header| header.count = (slot + 1).into());
    Ok(slot)
}

/// Marks entries dead; gives how many were not yet.
pub fn mark_dead(page: &mut PageMut<'_>, slots: &[u16]) -> Result<u16, PageError> {
    let codes = Codes::parse(page.view())?;
    let (count, len) = (codes.len(), entry_len(codes.code_len()));
    let mut marked = 0;
    let content = page.content();
    for &slot in slots {
        if slot >= count {
            return Err(PageError::Content("a dead entry is not in its page"));
        }
        let at = HEADER + usize::from(slot) * len + offset_of!(EntryHeader, flags);
        let flags = u16::from_le_bytes([content[at], content[at + 1]]);
        if flags & FLAG_DEAD == 0 {
            content[at..at + 2].copy_from_slice(&(flags | FLAG_DEAD).to_le_bytes());
            marked += 1;
        }
    }
    with_header(page, |header| header.dead = header.dead.get().saturating_add(marked).into());
    Ok(marked)
}

fn with_header(page: &mut PageMut<'_>, change: impl FnOnce(&mut Header)) {
    if let Ok((header, _)) = Header::mut_from_prefix(page.content()) {
        change(header);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageKind, image::tests::page};

    fn entry(n: u64, code: &[u8]) -> Entry<'_> {
        let vector =
            VectorRef { page: Link { block: (n / 3) as u32, stamp: 5 }, slot: n as u16 % 3 };
        Entry { id: (n << 16) | (n + 1), cell: n as u32, epoch: n + 9, dead: false, vector, code }
    }

    #[test]
    fn entries_come_back_until_the_page_is_full() {
        let code = [0xab; 61];
        let mut appended = 0;
        let bytes = page(PageKind::Codes, |page| {
            init(page, 4, 7, code.len()).unwrap();
            while Codes::parse(page.view()).unwrap().has_room() {
                assert_eq!(append(page, &entry(appended, &code)).unwrap(), appended as u16);
                appended += 1;
            }
            assert!(append(page, &entry(0, &code)).is_err());
            assert!(append(page, &entry(0, &code[1..])).is_err());
        });
        assert_eq!(appended as usize, entries_per_page(code.len()));
        let codes = Codes::parse(PageRef::parse(&bytes).unwrap()).unwrap();
        assert_eq!((codes.generation(), codes.position(), codes.dead()), (4, 7, 0));
        for (n, found) in (0..).zip(codes.entries()) {
            assert_eq!(found, entry(n, &code));
            assert_eq!(codes.entry(n as u16), Some(found));
        }
        assert_eq!(codes.entry(appended as u16), None);
        assert_eq!(codes.vector_pages().len(), (appended as usize).div_ceil(3));
    }

    #[test]
    fn dead_marks_count_once() {
        let bytes = page(PageKind::Codes, |page| {
            init(page, 1, 0, 4).unwrap();
            for n in 0..5 {
                append(page, &entry(n, &[1; 4])).unwrap();
            }
            assert_eq!(mark_dead(page, &[1, 3]).unwrap(), 2);
            assert_eq!(mark_dead(page, &[3, 4]).unwrap(), 1);
            assert!(mark_dead(page, &[5]).is_err());
        });
        let codes = Codes::parse(PageRef::parse(&bytes).unwrap()).unwrap();
        let dead: Vec<_> = codes.entries().map(|entry| entry.dead).collect();
        assert_eq!((dead.as_slice(), codes.dead()), (&[false, true, false, true, true][..], 3));
    }

    #[test]
    fn the_longest_code_fits() {
        // 16,000 dimensions at one bit, and the most that has two.
        assert!(entries_per_page(16_000 / 8 + 12) >= 3);
        assert!(entries_per_page(2 * 256 / 8 + 12) >= 60);
    }

    #[test]
    fn contradictions_are_errors() {
        let bytes = page(PageKind::Codes, |page| {
            init(page, 1, 0, 4).unwrap();
            append(page, &entry(1, &[1; 4])).unwrap();
        });
        for (at, value) in [(8, 0), (8, 200), (12, 2), (13, 255), (14, 2)] {
            let mut bytes = bytes.clone();
            bytes[crate::HEADER_LEN + at] = value;
            assert!(Codes::parse(PageRef::parse(&bytes).unwrap()).is_err(), "{at}");
        }
        let empty = page(PageKind::Codes, |_| ());
        assert!(Codes::parse(PageRef::parse(&empty).unwrap()).is_err());
    }
}
