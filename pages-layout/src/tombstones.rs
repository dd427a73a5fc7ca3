//! Tombstone pages: which rows of one range of a segment VACUUM found dead.
//!
//! A page says by itself what it is about. Its bitmap reaches as far as the last dead row.

use polign_engine::ObjectId;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{PageError, PageMut, PageRef, content_capacity};

const HEADER: usize = size_of::<Header>();
/// Ordinals that one page covers; each page begins at a multiple.
pub const RANGE: u32 = 64_512;
const _: () =
    assert!(HEADER + RANGE as usize / 8 <= content_capacity() && RANGE.is_multiple_of(64));

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    segment: ObjectId,
    base: U32,
    dead: U32,
    reserved: U64,
}

/// A checked view of a tombstone page.
#[derive(Clone, Copy)]
pub struct Tombstones<'a> {
    header: &'a Header,
    bitmap: &'a [U64],
}

impl<'a> Tombstones<'a> {
    /// Checks the page's content.
    pub fn parse(page: PageRef<'a>) -> Result<Self, PageError> {
        let (header, bytes) = Header::ref_from_prefix(page.content())
            .map_err(|_| PageError::Content("a tombstone page has no header"))?;
        let bitmap = <[U64]>::ref_from_bytes(bytes)
            .ok()
            .filter(|bitmap| bitmap.len() <= RANGE as usize / 64)
            .ok_or(PageError::Content("a tombstone page has a bitmap of wrong length"))?;
        if !header.base.get().is_multiple_of(RANGE) {
            return Err(PageError::Content("a tombstone page begins at a wrong row"));
        }
        let tombstones = Self { header, bitmap };
        if tombstones.words().map(u64::count_ones).sum::<u32>() != header.dead.get() {
            return Err(PageError::Content("a tombstone page counts other rows than it marks"));
        }
        Ok(tombstones)
    }

    /// The object id of the segment.
    pub fn segment(&self) -> ObjectId {
        self.header.segment
    }

    /// The ordinal of the first row of the range.
    pub fn base(&self) -> u32 {
        self.header.base.get()
    }

    /// How many rows of the range are dead.
    pub fn dead(&self) -> u32 {
        self.header.dead.get()
    }

    /// The bitmap in words of 64 rows, least significant bit first; rows behind it are alive.
    pub fn words(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.bitmap.iter().map(|word| word.get())
    }
}

/// Makes the page that of the range which begins at `base`, with no row dead.
pub fn init(page: &mut PageMut<'_>, segment: ObjectId, base: u32) -> Result<(), PageError> {
    if !base.is_multiple_of(RANGE) {
        return Err(PageError::Content("a tombstone page begins at a multiple of its range"));
    }
    let header = Header { segment, base: base.into(), dead: 0.into(), reserved: 0.into() };
    page.resize(HEADER)?.copy_from_slice(header.as_bytes());
    Ok(())
}

/// Marks rows dead, by their ordinals in the segment; gives how many were not yet.
pub fn set(page: &mut PageMut<'_>, ordinals: &[u32]) -> Result<u32, PageError> {
    let tombstones = Tombstones::parse(page.view())?;
    let base = tombstones.base();
    let mut len = page.view().content().len();
    for &ordinal in ordinals {
        let within = ordinal.checked_sub(base).filter(|&within| within < RANGE);
        let within =
            within.ok_or(PageError::Content("a dead row is not in the range of its page"))?;
        len = len.max(HEADER + (within as usize / 64 + 1) * 8);
    }
    let content = page.resize(len)?;
    let (header, bitmap) =
        Header::mut_from_prefix(content).map_err(|_| PageError::Content("no header"))?;
    let mut set = 0;
    for &ordinal in ordinals {
        let within = (ordinal - base) as usize;
        let (byte, bit) = (&mut bitmap[within / 8], 1 << (within % 8));
        if *byte & bit == 0 {
            *byte |= bit;
            set += 1;
        }
    }
    header.dead = (header.dead.get() + set).into();
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageKind, image::tests::page};

    const SEGMENT: ObjectId = ObjectId([3; 16]);

    #[test]
    fn marked_rows_are_dead_and_no_others() {
        let marked = [RANGE, RANGE + 1, RANGE + 63, RANGE + 64, 2 * RANGE - 1];
        let bytes = page(PageKind::Tombstones, |page| {
            init(page, SEGMENT, RANGE).unwrap();
            assert_eq!(set(page, &marked[..2]).unwrap(), 2);
            assert_eq!(page.view().content().len(), HEADER + 8, "no longer than needed");
            assert_eq!(set(page, &marked).unwrap(), 3);
            assert!(set(page, &[RANGE - 1]).is_err());
            assert!(set(page, &[2 * RANGE]).is_err());
            assert!(init(page, SEGMENT, 5).is_err());
        });
        let tombstones = Tombstones::parse(PageRef::parse(&bytes).unwrap()).unwrap();
        assert_eq!(
            (tombstones.segment(), tombstones.base(), tombstones.dead()),
            (SEGMENT, RANGE, 5)
        );
        let dead: Vec<u32> = tombstones
            .words()
            .enumerate()
            .flat_map(|(at, word)| {
                (0..64)
                    .filter(move |bit| word >> bit & 1 == 1)
                    .map(move |bit| RANGE + at as u32 * 64 + bit)
            })
            .collect();
        assert_eq!(dead, marked);
    }

    #[test]
    fn contradictions_are_errors() {
        let bytes = page(PageKind::Tombstones, |page| {
            init(page, SEGMENT, 0).unwrap();
            set(page, &[9]).unwrap();
        });
        for (at, value) in [(16, 1), (20, 2), (HEADER + 1, 0xff)] {
            let mut bytes = bytes.clone();
            bytes[crate::HEADER_LEN + at] = value;
            assert!(Tombstones::parse(PageRef::parse(&bytes).unwrap()).is_err(), "{at}");
        }
    }
}
