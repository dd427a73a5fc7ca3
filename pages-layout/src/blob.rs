//! Blobs: byte strings of any length over pages, changed copy-on-write.
//!
//! The bytes lie in data pages; map pages list them, with the CRC of each page's content, and are listed
//! by map pages of the next level until one is left, which the [`BlobHead`] in the meta page names. So
//! the head vouches for every byte, and a new version shares the pages that did not change.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{Link, PageError, PageKind, PageRef, content_capacity, image::RawLink};

const DATA_HEADER: usize = size_of::<DataHeader>();
const MAP_HEADER: usize = size_of::<MapHeader>();

/// Bytes of a blob in each data page but the last.
pub const PAYLOAD: usize = content_capacity() - DATA_HEADER;
/// Pages that a map page lists.
pub const FANOUT: usize = (content_capacity() - MAP_HEADER) / size_of::<MapEntry>();
/// Most levels of map pages: enough for any relation.
const MAX_LEVELS: u16 = 4;

/// Names one version of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobHead {
    /// What the blob is: the kind of a section of the root.
    pub section: u32,
    /// Levels of map pages; 0 for a blob without bytes.
    pub levels: u16,
    /// The map page that leads to all others.
    pub root: Option<Link>,
    /// CRC32C of that page's content.
    pub crc: u32,
    /// Bytes of the blob.
    pub len: u64,
    /// The epoch in which this version was written.
    pub epoch: u64,
}

/// [`BlobHead`] as stored in the meta page.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawBlobHead {
    section: U32,
    levels: U16,
    reserved: U16,
    root: RawLink,
    crc: U32,
    reserved2: U32,
    len: U64,
    epoch: U64,
}

impl Default for RawBlobHead {
    fn default() -> Self {
        Self {
            section: 0.into(),
            levels: 0.into(),
            reserved: 0.into(),
            root: None.into(),
            crc: 0.into(),
            reserved2: 0.into(),
            len: 0.into(),
            epoch: 0.into(),
        }
    }
}

impl From<&BlobHead> for RawBlobHead {
    fn from(head: &BlobHead) -> Self {
        Self {
            section: head.section.into(),
            levels: head.levels.into(),
            root: head.root.into(),
            crc: head.crc.into(),
            len: head.len.into(),
            epoch: head.epoch.into(),
            ..Self::default()
        }
    }
}

impl From<&RawBlobHead> for BlobHead {
    fn from(raw: &RawBlobHead) -> Self {
        Self {
            section: raw.section.get(),
            levels: raw.levels.get(),
            root: raw.root.into(),
            crc: raw.crc.get(),
            len: raw.len.get(),
            epoch: raw.epoch.get(),
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DataHeader {
    section: U32,
    ordinal: U32,
    epoch: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MapHeader {
    section: U32,
    /// Position among the map pages of this level.
    ordinal: U32,
    epoch: U64,
    level: U16,
    count: U16,
    reserved: U32,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MapEntry {
    page: RawLink,
    crc: U32,
}

/// A page of a blob, named and vouched for by a map entry or the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Child {
    page: Link,
    crc: u32,
}

/// The pages of an index, as far as blobs need them.
pub trait BlobPages {
    /// What can go wrong.
    type Error: From<PageError>;

    /// Calls `read` with the image of a page that is followed by its link and kind. Fails with
    /// [`PageError::Gone`] if the page was recycled.
    fn read<T>(
        &mut self,
        link: Link,
        kind: PageKind,
        read: impl FnOnce(PageRef<'_>) -> Result<T, PageError>,
    ) -> Result<T, Self::Error>;

    /// Tells that these pages will be read soon.
    fn prefetch(&mut self, _pages: &mut dyn Iterator<Item = Link>) {}

    /// Writes a new page that nothing refers to yet.
    fn write(&mut self, kind: PageKind, content: &[u8]) -> Result<Link, Self::Error>;
}

/// Levels of map pages that a blob of this length has.
fn levels_of(len: u64) -> u16 {
    let mut pages = len.div_ceil(PAYLOAD as u64);
    let mut levels = 0;
    while pages > 1 || (levels == 0 && pages == 1) {
        pages = pages.div_ceil(FANOUT as u64);
        levels += 1;
    }
    levels
}

fn checked(content: &[u8], crc: u32) -> Result<(), PageError> {
    if crc32c::crc32c(content) != crc {
        return Err(PageError::Content("a page of the root has a wrong checksum"));
    }
    Ok(())
}

/// The children that a map page lists, after all checks.
fn read_map(
    page: PageRef<'_>,
    crc: u32,
    section: u32,
    level: u16,
    ordinal: usize,
) -> Result<Vec<Child>, PageError> {
    checked(page.content(), crc)?;
    let (header, entries) = MapHeader::ref_from_prefix(page.content())
        .map_err(|_| PageError::Content("a map page has no header"))?;
    let entries = <[MapEntry]>::ref_from_bytes(entries)
        .map_err(|_| PageError::Content("a map page has a wrong length"))?;
    if header.section.get() != section
        || header.level.get() != level
        || header.ordinal.get() as usize != ordinal
        || usize::from(header.count.get()) != entries.len()
    {
        return Err(PageError::Content("a map page belongs elsewhere"));
    }
    entries
        .iter()
        .map(|entry| {
            let page = Option::from(entry.page);
            let page = page.ok_or(PageError::Content("a map page lists no page"))?;
            Ok(Child { page, crc: entry.crc.get() })
        })
        .collect()
}

fn payload<'a>(
    page: PageRef<'a>,
    crc: u32,
    section: u32,
    ordinal: usize,
) -> Result<&'a [u8], PageError> {
    checked(page.content(), crc)?;
    let (header, bytes) = DataHeader::ref_from_prefix(page.content())
        .map_err(|_| PageError::Content("a data page has no header"))?;
    if header.section.get() != section || header.ordinal.get() as usize != ordinal {
        return Err(PageError::Content("a data page belongs elsewhere"));
    }
    Ok(bytes)
}

/// The pages of one version of a blob: `maps[0]` lists the data pages, the last has one page.
#[derive(Debug, Default)]
struct Tree {
    data: Vec<Child>,
    maps: Vec<Vec<Child>>,
}

impl Tree {
    fn read<P: BlobPages>(head: &BlobHead, pages: &mut P) -> Result<Self, P::Error> {
        let count = head.len.div_ceil(PAYLOAD as u64);
        if head.levels != levels_of(head.len)
            || head.levels > MAX_LEVELS
            || count > u64::from(u32::MAX)
            || head.root.is_some() != (head.levels > 0)
        {
            return Err(PageError::Content("the head of a root section contradicts itself").into());
        }
        let Some(root) = head.root else { return Ok(Self::default()) };
        let mut maps = vec![vec![Child { page: root, crc: head.crc }]];
        for level in (1..=head.levels).rev() {
            let mut below = Vec::new();
            let above = &maps[maps.len() - 1];
            pages.prefetch(&mut above.iter().map(|child| child.page));
            for (ordinal, child) in above.iter().enumerate() {
                below.extend(pages.read(child.page, PageKind::BlobMap, |page| {
                    read_map(page, child.crc, head.section, level, ordinal)
                })?);
            }
            maps.push(below);
        }
        let data = maps.pop().unwrap_or_default();
        if data.len() as u64 != count {
            return Err(PageError::Content("a root section has too many or too few pages").into());
        }
        maps.reverse();
        Ok(Self { data, maps })
    }

    fn links(&self) -> impl Iterator<Item = Link> {
        self.maps.iter().flatten().chain(&self.data).map(|child| child.page)
    }
}

/// Reads a whole blob. Memory grows with the pages that were really read, never with what a damaged
/// head promises.
pub fn read<P: BlobPages>(head: &BlobHead, pages: &mut P) -> Result<Vec<u8>, P::Error> {
    let tree = Tree::read(head, pages)?;
    let mut bytes = Vec::new();
    if bytes.try_reserve_exact(tree.data.len() * PAYLOAD).is_err() {
        return Err(PageError::Content("a root section does not fit in memory").into());
    }
    for (chunk, window) in tree.data.chunks(PREFETCH).enumerate() {
        pages.prefetch(&mut window.iter().map(|child| child.page));
        for (ordinal, child) in (chunk * PREFETCH..).zip(window) {
            pages.read(child.page, PageKind::BlobData, |page| {
                bytes.extend_from_slice(payload(page, child.crc, head.section, ordinal)?);
                Ok(())
            })?;
        }
    }
    if bytes.len() as u64 != head.len {
        return Err(
            PageError::Content("a root section has another length than its head says").into()
        );
    }
    Ok(bytes)
}

const PREFETCH: usize = 64;

/// Every page of a blob.
pub fn links<P: BlobPages>(head: &BlobHead, pages: &mut P) -> Result<Vec<Link>, P::Error> {
    Ok(Tree::read(head, pages)?.links().collect())
}

/// A new version of a blob, and what it replaced.
#[derive(Debug)]
pub struct Written {
    /// The new version's head.
    pub head: BlobHead,
    /// Pages of the old version that the new one does not share: to be freed once the new head is
    /// published.
    pub replaced: Vec<Link>,
}

/// Writes a version of a blob as pages that nothing refers to yet, sharing those of the version `old`
/// that hold the same bytes.
pub fn write<P: BlobPages>(
    section: u32,
    epoch: u64,
    bytes: &[u8],
    old: Option<&BlobHead>,
    pages: &mut P,
) -> Result<Written, P::Error> {
    let old = match old {
        Some(head) if head.section == section => Tree::read(head, pages)?,
        Some(_) => return Err(PageError::Content("a section cannot replace another").into()),
        None => Tree::default(),
    };
    let mut content = Vec::with_capacity(content_capacity());
    let mut data = Vec::with_capacity(bytes.len().div_ceil(PAYLOAD));
    for (ordinal, chunk) in bytes.chunks(PAYLOAD).enumerate() {
        let same = match old.data.get(ordinal) {
            Some(child) => pages.read(child.page, PageKind::BlobData, |page| {
                Ok(payload(page, child.crc, section, ordinal)? == chunk)
            })?,
            None => false,
        };
        if same {
            data.push(old.data[ordinal]);
            continue;
        }
        let header = DataHeader {
            section: section.into(),
            ordinal: (ordinal as u32).into(),
            epoch: epoch.into(),
        };
        content.clear();
        content.extend_from_slice(header.as_bytes());
        content.extend_from_slice(chunk);
        let page = pages.write(PageKind::BlobData, &content)?;
        data.push(Child { page, crc: crc32c::crc32c(&content) });
    }
    let mut tree = Tree { data, maps: Vec::new() };
    for level in 1..=levels_of(bytes.len() as u64) {
        let (below, old_below) = match usize::from(level) {
            1 => (&tree.data, &old.data[..]),
            n => (&tree.maps[n - 2], old.maps.get(n - 2).map_or(&[][..], Vec::as_slice)),
        };
        let mut here = Vec::new();
        for (ordinal, children) in below.chunks(FANOUT).enumerate() {
            let old_page = old.maps.get(usize::from(level) - 1).and_then(|maps| maps.get(ordinal));
            if let Some(&old_page) = old_page
                && old_below.chunks(FANOUT).nth(ordinal) == Some(children)
            {
                here.push(old_page);
                continue;
            }
            let header = MapHeader {
                section: section.into(),
                ordinal: (ordinal as u32).into(),
                epoch: epoch.into(),
                level: level.into(),
                count: (children.len() as u16).into(),
                reserved: 0.into(),
            };
            content.clear();
            content.extend_from_slice(header.as_bytes());
            for child in children {
                let entry = MapEntry { page: Some(child.page).into(), crc: child.crc.into() };
                content.extend_from_slice(entry.as_bytes());
            }
            let page = pages.write(PageKind::BlobMap, &content)?;
            here.push(Child { page, crc: crc32c::crc32c(&content) });
        }
        tree.maps.push(here);
    }
    let root = tree.maps.last().and_then(|top| top.first());
    let head = BlobHead {
        section,
        levels: tree.maps.len() as u16,
        root: root.map(|child| child.page),
        crc: root.map_or(0, |child| child.crc),
        len: bytes.len() as u64,
        epoch,
    };
    let kept: std::collections::HashSet<Link> = tree.links().collect();
    let replaced = old.links().filter(|link| !kept.contains(link)).collect();
    Ok(Written { head, replaced })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE_LEN, PageMut, image::tests::INDEX};

    #[derive(Default)]
    struct Memory {
        blocks: Vec<Vec<u8>>,
    }

    impl BlobPages for Memory {
        type Error = PageError;

        fn read<T>(
            &mut self,
            link: Link,
            kind: PageKind,
            read: impl FnOnce(PageRef<'_>) -> Result<T, PageError>,
        ) -> Result<T, PageError> {
            let bytes = self.blocks.get(link.block as usize).ok_or(PageError::Gone)?;
            read(PageRef::follow(bytes, INDEX, link.stamp, kind)?)
        }

        fn write(&mut self, kind: PageKind, content: &[u8]) -> Result<Link, PageError> {
            let mut bytes = vec![0; PAGE_LEN];
            let (mut page, stamp) = PageMut::init(&mut bytes, kind, INDEX)?;
            page.resize(content.len())?.copy_from_slice(content);
            self.blocks.push(bytes);
            Ok(Link { block: self.blocks.len() as u32 - 1, stamp })
        }
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
    }

    #[test]
    fn blobs_of_every_depth_round_trip() {
        for len in [0, 1, PAYLOAD, PAYLOAD + 1, 3 * PAYLOAD, FANOUT * PAYLOAD, FANOUT * PAYLOAD + 1]
        {
            let mut pages = Memory::default();
            let bytes = bytes(len);
            let written = write(3, 1, &bytes, None, &mut pages).unwrap();
            assert!(written.replaced.is_empty());
            assert!(read(&written.head, &mut pages).unwrap() == bytes);
            let data = len.div_ceil(PAYLOAD);
            let maps = data.div_ceil(FANOUT) + usize::from(data > FANOUT);
            assert_eq!(links(&written.head, &mut pages).unwrap().len(), data + maps);
        }
    }

    #[test]
    fn a_new_version_shares_what_did_not_change() {
        let mut pages = Memory::default();
        let mut bytes = bytes(2 * FANOUT * PAYLOAD);
        let first = write(3, 1, &bytes, None, &mut pages).unwrap().head;
        let unchanged = write(3, 2, &bytes, Some(&first), &mut pages).unwrap();
        assert_eq!((unchanged.head.root, unchanged.replaced), (first.root, vec![]));

        let before = pages.blocks.len();
        bytes[5 * PAYLOAD] ^= 1;
        let second = write(3, 2, &bytes, Some(&first), &mut pages).unwrap();
        // One data page and the two map pages above it.
        assert_eq!((pages.blocks.len() - before, second.replaced.len()), (3, 3));
        assert!(read(&second.head, &mut pages).unwrap() == bytes);
        assert!(read(&first, &mut pages).unwrap() != bytes, "the old version is still readable");

        bytes.truncate(PAYLOAD);
        let third = write(3, 3, &bytes, Some(&second.head), &mut pages).unwrap();
        assert!(read(&third.head, &mut pages).unwrap() == bytes);
        let kept = links(&third.head, &mut pages).unwrap();
        assert!(third.replaced.iter().all(|link| !kept.contains(link)));
        let old = links(&second.head, &mut pages).unwrap().len();
        assert_eq!(third.replaced.len(), old - 1, "the first data page stays");
    }

    #[test]
    fn damage_anywhere_is_an_error() {
        let mut pages = Memory::default();
        let bytes = bytes(3 * PAYLOAD + 7);
        let head = write(3, 1, &bytes, None, &mut pages).unwrap().head;
        for block in 0..pages.blocks.len() {
            for at in [crate::HEADER_LEN, crate::HEADER_LEN + 5, crate::HEADER_LEN + 20] {
                pages.blocks[block][at] ^= 0x40;
                assert!(read(&head, &mut pages).is_err(), "block {block} byte {at}");
                pages.blocks[block][at] ^= 0x40;
            }
        }
        let wrong = [
            BlobHead { section: 4, ..head },
            BlobHead { levels: 2, ..head },
            BlobHead { levels: 0, root: None, ..head },
            BlobHead { crc: head.crc ^ 1, ..head },
            BlobHead { len: head.len + 1, ..head },
            BlobHead { len: head.len - PAYLOAD as u64, ..head },
            BlobHead { len: u64::MAX, ..head },
            BlobHead { root: Some(Link { block: 999, stamp: 1 }), ..head },
        ];
        for wrong in wrong {
            assert!(read(&wrong, &mut pages).is_err(), "{wrong:?}");
        }
        assert!(read(&head, &mut pages).unwrap() == bytes);
    }

    #[test]
    fn a_recycled_page_is_gone_not_damaged() {
        let mut pages = Memory::default();
        let head = write(3, 1, &bytes(2 * PAYLOAD), None, &mut pages).unwrap().head;
        PageMut::open(&mut pages.blocks[1]).unwrap().free(9);
        assert!(read(&head, &mut pages).is_ok(), "freed but not reused yet");
        PageMut::init(&mut pages.blocks[1], PageKind::Codes, INDEX).unwrap();
        assert_eq!(read(&head, &mut pages), Err(PageError::Gone));
    }
}
