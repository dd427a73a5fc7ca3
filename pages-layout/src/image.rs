//! What all pages have in common: Postgres' page header, and a stamp in the special area.

use polign_engine::ObjectId;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

/// Bytes of a page: Postgres' default block size, the only one that is supported.
pub const PAGE_LEN: usize = 8192;
/// Bytes of Postgres' page header; the content follows.
pub const HEADER_LEN: usize = 24;
/// Bytes of the special area, at the end of the page.
pub const SPECIAL_LEN: usize = size_of::<Special>();

/// Postgres' own page layout version, in the low byte of `pd_pagesize_version`.
const PG_LAYOUT_VERSION: u16 = 4;
/// The version of the formats in this crate.
const FORMAT: u16 = 1;
/// The last two bytes of every page, as tools that look at foreign pages expect it.
const PAGE_ID: u16 = 0xFF9D;
const NO_BLOCK: u32 = u32::MAX;
const FLAG_FREED: u16 = 1;

/// Offsets in Postgres' page header.
mod header {
    pub const LSN: usize = 0;
    pub const LOWER: usize = 12;
    pub const UPPER: usize = 14;
    pub const SPECIAL: usize = 16;
    pub const PAGESIZE_VERSION: usize = 18;
}

/// Bytes of content that a page can hold.
pub const fn content_capacity() -> usize {
    PAGE_LEN - HEADER_LEN - SPECIAL_LEN
}

/// Names one use of a block. The stamp grows by one each time the block is reused, so a link to a page
/// that was recycled is recognised, also on a standby, where reuse raises no conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// The block number.
    pub block: u32,
    /// Which use of the block.
    pub stamp: u32,
}

/// A link as stored; block number `u32::MAX` means none.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawLink {
    block: U32,
    stamp: U32,
}

impl From<Option<Link>> for RawLink {
    fn from(link: Option<Link>) -> Self {
        let Link { block, stamp } = link.unwrap_or(Link { block: NO_BLOCK, stamp: 0 });
        Self { block: block.into(), stamp: stamp.into() }
    }
}

impl From<RawLink> for Option<Link> {
    fn from(raw: RawLink) -> Self {
        let link = Link { block: raw.block.get(), stamp: raw.stamp.get() };
        (link.block != NO_BLOCK).then_some(link)
    }
}

/// What a page holds; the discriminant is its number in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum PageKind {
    /// Block 0: what everything else is reached from.
    Meta = 1,
    /// A piece of a blob.
    BlobData = 2,
    /// Where the pieces of a blob are.
    BlobMap = 3,
    /// Scanned codes of delta rows.
    Codes = 4,
    /// Refinement records of delta rows.
    Vectors = 5,
    /// Dead rows of a range of one segment.
    Tombstones = 6,
    /// Objects that may be in the store though nothing refers to them yet.
    Pending = 7,
    /// Objects that nothing refers to any more.
    Retired = 8,
}

impl PageKind {
    fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            1 => Self::Meta,
            2 => Self::BlobData,
            3 => Self::BlobMap,
            4 => Self::Codes,
            5 => Self::Vectors,
            6 => Self::Tombstones,
            7 => Self::Pending,
            8 => Self::Retired,
            _ => return None,
        })
    }
}

/// Why a page image could not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// The page is not (or no longer) the use of the block that a link named. A reader starts again
    /// from the meta page; if that names the same page again, the index is damaged.
    #[error("the page was recycled")]
    Gone,
    /// The page has never been written.
    #[error("the page is empty")]
    Empty,
    /// The page header or the special area is not one that this extension writes.
    #[error("the page header is invalid")]
    Header,
    /// A page of another format version.
    #[error("the page has format version {found}, this version of polign reads version {FORMAT}")]
    Version {
        /// The version that was found.
        found: u16,
    },
    /// A page of another kind than the link promised.
    #[error("the page is of kind {found:?}, not {expected:?}")]
    Kind {
        /// The kind that was found.
        found: PageKind,
        /// The kind that was expected.
        expected: PageKind,
    },
    /// The content contradicts itself.
    #[error("{0}")]
    Content(&'static str),
    /// An index that newer software has changed in a way that this version must not touch.
    #[error(
        "the index needs at least format version {needed} to be {action}, this version of polign has {known}"
    )]
    Newer {
        /// "read" or "written".
        action: &'static str,
        /// The version that the meta page asks for.
        needed: u16,
        /// The version that this software has.
        known: u16,
    },
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Special {
    index_id: ObjectId,
    freed_at: U64,
    stamp: U32,
    changes: U32,
    next: RawLink,
    kind: U16,
    flags: U16,
    format: U16,
    page_id: U16,
}

/// Whether a block may be taken for a new page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// Never written (all zero).
    New,
    /// Freed by the transaction before this full transaction id: may be taken once no snapshot is older.
    Freed(u64),
    /// In use.
    Used,
}

fn header_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn set_header_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_ne_bytes());
}

/// A checked view of a page image.
#[derive(Clone, Copy)]
pub struct PageRef<'a> {
    bytes: &'a [u8],
    special: &'a Special,
    kind: PageKind,
}

impl<'a> PageRef<'a> {
    /// Checks what all pages have in common.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PageError> {
        if bytes.len() != PAGE_LEN {
            return Err(PageError::Header);
        }
        let (lower, upper, special_at) = (
            usize::from(header_u16(bytes, header::LOWER)),
            usize::from(header_u16(bytes, header::UPPER)),
            usize::from(header_u16(bytes, header::SPECIAL)),
        );
        if upper == 0 {
            return Err(PageError::Empty);
        }
        let content_end = PAGE_LEN - SPECIAL_LEN;
        if special_at != content_end
            || upper != content_end
            || !(HEADER_LEN..=content_end).contains(&lower)
        {
            return Err(PageError::Header);
        }
        let special =
            Special::ref_from_bytes(&bytes[content_end..]).map_err(|_| PageError::Header)?;
        if special.page_id.get() != PAGE_ID {
            return Err(PageError::Header);
        }
        if special.format.get() != FORMAT {
            return Err(PageError::Version { found: special.format.get() });
        }
        let kind = PageKind::from_code(special.kind.get()).ok_or(PageError::Header)?;
        Ok(Self { bytes, special, kind })
    }

    /// The same, for the page that a link of this index leads to.
    pub fn follow(
        bytes: &'a [u8],
        index_id: ObjectId,
        stamp: u32,
        kind: PageKind,
    ) -> Result<Self, PageError> {
        let page = Self::follow_any(bytes, index_id, stamp)?;
        if page.kind != kind {
            return Err(PageError::Kind { found: page.kind, expected: kind });
        }
        Ok(page)
    }

    /// The same, for a page of any kind.
    pub fn follow_any(bytes: &'a [u8], index_id: ObjectId, stamp: u32) -> Result<Self, PageError> {
        let page = match Self::parse(bytes) {
            // A block that a link leads to and that was never written: on a standby that crashed the
            // page's own record may not have been replayed yet, elsewhere it is damage; the caller tells
            // them apart by starting again.
            Err(PageError::Empty) => return Err(PageError::Gone),
            other => other?,
        };
        if page.index_id() != index_id || page.stamp() != stamp {
            return Err(PageError::Gone);
        }
        Ok(page)
    }

    /// Whether this image may be taken for a new page.
    pub fn freshness(bytes: &[u8]) -> Result<Freshness, PageError> {
        match PageRef::parse(bytes) {
            Err(PageError::Empty) => Ok(Freshness::New),
            Err(error) => Err(error),
            Ok(page) if page.is_freed() => Ok(Freshness::Freed(page.special.freed_at.get())),
            Ok(_) => Ok(Freshness::Used),
        }
    }

    /// What the page holds (or held, when it is freed).
    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// The index that the page belongs to.
    pub fn index_id(&self) -> ObjectId {
        self.special.index_id
    }

    /// Which use of the block this is.
    pub fn stamp(&self) -> u32 {
        self.special.stamp.get()
    }

    /// The next page of the chain. A freed page still leads on.
    pub fn next(&self) -> Option<Link> {
        self.special.next.into()
    }

    /// Whether the page was freed. It keeps its content until it is reused.
    pub fn is_freed(&self) -> bool {
        self.special.flags.get() & FLAG_FREED != 0
    }

    /// Grows with each change of the block. Page LSNs alone do not tell: they stand still where nothing
    /// is logged (unlogged and temporary relations, relations created in the same transaction).
    pub fn version(&self) -> (u64, u32) {
        let half = |at| {
            let bytes: [u8; 4] = std::array::from_fn(|i| self.bytes[at + i]);
            u64::from(u32::from_ne_bytes(bytes))
        };
        (half(header::LSN) << 32 | half(header::LSN + 4), self.special.changes.get())
    }

    /// The bytes in use.
    pub fn content(&self) -> &'a [u8] {
        &self.bytes[HEADER_LEN..usize::from(header_u16(self.bytes, header::LOWER))]
    }
}

/// A page image that is being changed.
pub struct PageMut<'a> {
    bytes: &'a mut [u8],
}

impl<'a> PageMut<'a> {
    /// Makes a new page of a block that [`PageRef::freshness`] says may be taken. The caller has checked
    /// that no snapshot needs what a freed page held.
    pub fn init(
        bytes: &'a mut [u8],
        kind: PageKind,
        index_id: ObjectId,
    ) -> Result<(Self, u32), PageError> {
        let (stamp, changes) = match PageRef::parse(bytes) {
            Err(PageError::Empty) if bytes.len() == PAGE_LEN => (0, 0),
            Ok(page) if page.is_freed() => (page.stamp(), page.special.changes.get()),
            Ok(_) => return Err(PageError::Content("a page in use cannot be reused")),
            Err(error) => return Err(error),
        };
        let stamp = stamp.wrapping_add(1);
        // The LSN stays: the record that logs this page moves it.
        bytes[header::LSN + 8..].fill(0);
        set_header_u16(bytes, header::LOWER, HEADER_LEN as u16);
        set_header_u16(bytes, header::UPPER, (PAGE_LEN - SPECIAL_LEN) as u16);
        set_header_u16(bytes, header::SPECIAL, (PAGE_LEN - SPECIAL_LEN) as u16);
        set_header_u16(bytes, header::PAGESIZE_VERSION, PAGE_LEN as u16 | PG_LAYOUT_VERSION);
        let mut page = Self { bytes };
        *page.special() = Special {
            index_id,
            freed_at: 0.into(),
            stamp: stamp.into(),
            changes: changes.wrapping_add(1).into(),
            next: None.into(),
            kind: (kind as u16).into(),
            flags: 0.into(),
            format: FORMAT.into(),
            page_id: PAGE_ID.into(),
        };
        Ok((page, stamp))
    }

    /// Opens an existing page to change it.
    pub fn open(bytes: &'a mut [u8]) -> Result<Self, PageError> {
        PageRef::parse(bytes)?;
        let mut page = Self { bytes };
        let special = page.special();
        special.changes = special.changes.get().wrapping_add(1).into();
        Ok(page)
    }

    fn special(&mut self) -> &mut Special {
        let at = self.bytes.len() - SPECIAL_LEN;
        Special::mut_from_bytes(&mut self.bytes[at..]).expect("the area has this size")
    }

    /// The page as it is now.
    pub fn view(&self) -> PageRef<'_> {
        PageRef::parse(self.bytes).expect("checked when opened")
    }

    /// Sets the next page of the chain.
    pub fn set_next(&mut self, next: Option<Link>) {
        self.special().next = next.into();
    }

    /// Gives a page to an index whose id was drawn after the page was written (the meta page alone).
    pub fn set_index_id(&mut self, index_id: ObjectId) {
        self.special().index_id = index_id;
    }

    /// Frees the page. `next_xid` is the next full transaction id: when every snapshot is newer, nobody
    /// can still want the page. Content and links stay until then, for readers on their way.
    pub fn free(&mut self, next_xid: u64) {
        let special = self.special();
        special.flags = (special.flags.get() | FLAG_FREED).into();
        special.freed_at = next_xid.into();
    }

    /// The bytes in use.
    pub fn content(&mut self) -> &mut [u8] {
        let lower = usize::from(header_u16(self.bytes, header::LOWER));
        &mut self.bytes[HEADER_LEN..lower]
    }

    /// Sets how many bytes are in use; new ones are zero. `pd_lower` says so to generic WAL records,
    /// which do not log what lies behind it.
    pub fn resize(&mut self, len: usize) -> Result<&mut [u8], PageError> {
        if len > content_capacity() {
            return Err(PageError::Content("the page is full"));
        }
        let old = usize::from(header_u16(self.bytes, header::LOWER));
        let new = HEADER_LEN + len;
        if new > old {
            self.bytes[old..new].fill(0);
        }
        set_header_u16(self.bytes, header::LOWER, new as u16);
        Ok(self.content())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub const INDEX: ObjectId = ObjectId([7; 16]);

    /// A page of a kind, as `fill` leaves it.
    pub fn page(kind: PageKind, fill: impl FnOnce(&mut PageMut<'_>)) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_LEN];
        fill(&mut PageMut::init(&mut bytes, kind, INDEX).unwrap().0);
        bytes
    }

    #[test]
    fn a_new_block_becomes_a_page_and_a_freed_page_is_reused_under_a_new_stamp() {
        let mut bytes = vec![0; PAGE_LEN];
        assert_eq!(PageRef::freshness(&bytes).unwrap(), Freshness::New);
        let (mut page, stamp) = PageMut::init(&mut bytes, PageKind::Codes, INDEX).unwrap();
        page.resize(100).unwrap().fill(9);
        page.set_next(Some(Link { block: 3, stamp: 8 }));
        let view = PageRef::follow(&bytes, INDEX, stamp, PageKind::Codes).unwrap();
        assert_eq!(
            (view.content(), view.next()),
            (&[9; 100][..], Some(Link { block: 3, stamp: 8 }))
        );
        assert_eq!(PageRef::freshness(&bytes).unwrap(), Freshness::Used);
        assert!(PageMut::init(&mut bytes, PageKind::Codes, INDEX).is_err());

        PageMut::open(&mut bytes).unwrap().free(77);
        assert_eq!(PageRef::freshness(&bytes).unwrap(), Freshness::Freed(77));
        let view = PageRef::follow(&bytes, INDEX, stamp, PageKind::Codes).unwrap();
        assert!(view.is_freed() && view.content() == [9; 100], "readers on their way find it");

        let (page, again) = PageMut::init(&mut bytes, PageKind::Codes, INDEX).unwrap();
        assert!(again == stamp + 1 && page.view().content().is_empty());
        let gone = PageRef::follow(&bytes, INDEX, stamp, PageKind::Codes);
        assert_eq!(gone.err(), Some(PageError::Gone));
    }

    #[test]
    fn every_change_shows_in_the_version_even_across_reuse() {
        let mut bytes = page(PageKind::Codes, |_| ());
        let mut seen = vec![PageRef::parse(&bytes).unwrap().version()];
        PageMut::open(&mut bytes).unwrap();
        seen.push(PageRef::parse(&bytes).unwrap().version());
        PageMut::open(&mut bytes).unwrap().free(1);
        seen.push(PageRef::parse(&bytes).unwrap().version());
        PageMut::init(&mut bytes, PageKind::Codes, INDEX).unwrap();
        seen.push(PageRef::parse(&bytes).unwrap().version());
        assert!(seen.is_sorted() && seen.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn shrinking_and_growing_shows_zeros() {
        let mut bytes = page(PageKind::Codes, |page| page.resize(50).unwrap().fill(1));
        let mut page = PageMut::open(&mut bytes).unwrap();
        page.resize(10).unwrap();
        assert_eq!(page.resize(20).unwrap(), [&[1; 10][..], &[0; 10]].concat());
        assert!(page.resize(content_capacity() + 1).is_err());
        assert!(page.resize(content_capacity()).is_ok());
    }

    #[test]
    fn foreign_and_damaged_pages_are_refused() {
        let good = page(PageKind::Codes, |_| ());
        let broken = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            PageRef::parse(&bytes).err()
        };
        assert_eq!(PageRef::parse(&good[1..]).err(), Some(PageError::Header));
        assert_eq!(broken(header::LOWER, 0), Some(PageError::Header));
        assert_eq!(broken(header::LOWER + 1, 0xff), Some(PageError::Header));
        assert_eq!(broken(header::SPECIAL, 1), Some(PageError::Header));
        assert_eq!(broken(PAGE_LEN - 1, 0), Some(PageError::Header));
        assert_eq!(broken(PAGE_LEN - 4, 9), Some(PageError::Version { found: 9 }));
        assert_eq!(broken(PAGE_LEN - 8, 99), Some(PageError::Header));
        let other = PageRef::follow(&good, ObjectId([1; 16]), 1, PageKind::Codes);
        assert_eq!(other.err(), Some(PageError::Gone));
        let kind = PageRef::follow(&good, INDEX, 1, PageKind::Vectors);
        assert!(matches!(kind.err(), Some(PageError::Kind { .. })));
    }
}
