//! A root as one self-describing blob: a published object, or a cache file that backends map.
//!
//! ```text
//! header | section table | sections, each at a multiple of 64 bytes
//! ```

use std::ops::Range;

use bytes::Bytes;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use super::{
    reader::Root,
    section::{RootError, SectionKey},
};
use crate::{
    ObjectId,
    segment::part::{ALIGN, FORMAT_VERSION, PartError},
};

const MAGIC: u32 = u32::from_le_bytes(*b"PLGI");
/// More sections than a root can have.
const MAX_SECTIONS: usize = 4096;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: U32,
    version: U16,
    reserved: U16,
    /// CRC32C over the header with this field zero, then the section table.
    crc: U32,
    sections: U32,
    root: ObjectId,
    index: ObjectId,
    total_len: U64,
    reserved_too: U64,
}

const _: () = assert!(size_of::<Header>() == 64);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Section {
    code: U32,
    /// CRC32C of the section's bytes.
    crc: U32,
    offset: U64,
    len: U64,
    reserved: U64,
}

/// How much of an image to read when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// The checksum of every section.
    Full,
    /// Only the header and the section table: for a file that was checked by whoever put it there.
    Table,
}

/// An image whose frame has been checked.
#[derive(Debug, Clone)]
pub struct Image {
    /// The root's id.
    pub root: ObjectId,
    /// The index's id.
    pub index: ObjectId,
    bytes: Bytes,
    sections: Vec<(u32, Range<usize>)>,
}

/// Serialises sections as an image.
pub fn encode<B: AsRef<[u8]>>(
    root: ObjectId,
    index: ObjectId,
    sections: &[(SectionKey, B)],
) -> Vec<u8> {
    let table_end = size_of::<Header>() + sections.len() * size_of::<Section>();
    let mut offset = table_end.next_multiple_of(ALIGN);
    let mut table = Vec::with_capacity(sections.len());
    for (key, bytes) in sections {
        let bytes = bytes.as_ref();
        table.push(Section {
            code: key.code().into(),
            crc: crc32c::crc32c(bytes).into(),
            offset: (offset as u64).into(),
            len: (bytes.len() as u64).into(),
            reserved: 0.into(),
        });
        offset = (offset + bytes.len()).next_multiple_of(ALIGN);
    }
    let mut header = Header {
        magic: MAGIC.into(),
        version: FORMAT_VERSION.into(),
        reserved: 0.into(),
        crc: 0.into(),
        sections: (sections.len() as u32).into(),
        root,
        index,
        total_len: (offset as u64).into(),
        reserved_too: 0.into(),
    };
    header.crc = checksum(&header, table.as_bytes()).into();
    let mut out = Vec::with_capacity(offset);
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(table.as_bytes());
    for (entry, (_, bytes)) in table.iter().zip(sections) {
        out.resize(entry.offset.get() as usize, 0);
        out.extend_from_slice(bytes.as_ref());
    }
    out.resize(offset, 0);
    out
}

fn checksum(header: &Header, table: &[u8]) -> u32 {
    let zeroed = Header { crc: 0.into(), ..*header };
    crc32c::crc32c_append(crc32c::crc32c(zeroed.as_bytes()), table)
}

/// Writes the checksums that fit its bytes into an image. For tools and tests that edit images; leaves
/// alone what lies outside of the bytes.
pub fn reseal(image: &mut [u8]) {
    let Ok((&header, rest)) = Header::ref_from_prefix(image) else { return };
    let count = (header.sections.get() as usize).min(rest.len() / size_of::<Section>());
    let Ok((table, _)) = <[Section]>::ref_from_prefix_with_elems(rest, count) else { return };
    let mut table = table.to_vec();
    for section in &mut table {
        if let Some(bytes) = section.range().and_then(|range| image.get(range)) {
            section.crc = crc32c::crc32c(bytes).into();
        }
    }
    let header = Header { crc: checksum(&header, table.as_bytes()).into(), ..header };
    let sealed = [header.as_bytes(), table.as_bytes()].concat();
    image[..sealed.len()].copy_from_slice(&sealed);
}

impl Section {
    fn range(&self) -> Option<Range<usize>> {
        let start = usize::try_from(self.offset.get()).ok()?;
        Some(start..start.checked_add(usize::try_from(self.len.get()).ok()?)?)
    }
}

impl Image {
    /// Checks the frame of an image.
    pub fn open(bytes: Bytes, check: Check) -> Result<Self, RootError> {
        let found = bytes.len() as u64;
        let (header, rest) = Header::ref_from_prefix(&bytes).map_err(|_| {
            RootError::Image(PartError::TooShort { needed: size_of::<Header>() as u64, found })
        })?;
        if header.magic != MAGIC {
            return Err(RootError::Image(PartError::Magic { found: header.magic.get() }));
        }
        let version = header.version.get();
        if version != FORMAT_VERSION {
            return Err(RootError::Version { found: version, known: FORMAT_VERSION });
        }
        let count = header.sections.get() as usize;
        let length =
            || RootError::Image(PartError::Length { payload: header.total_len.get(), found });
        if header.total_len != found || count > MAX_SECTIONS {
            return Err(length());
        }
        let (table, _) =
            <[Section]>::ref_from_prefix_with_elems(rest, count).map_err(|_| length())?;
        let (stored, computed) = (header.crc.get(), checksum(header, table.as_bytes()));
        if stored != computed {
            return Err(RootError::Image(PartError::Crc { stored, computed }));
        }
        let mut sections = Vec::with_capacity(count);
        for section in table {
            let range = section.range().filter(|range| range.end <= bytes.len());
            let range = range.ok_or_else(length)?;
            if check == Check::Full {
                let (stored, computed) = (section.crc.get(), crc32c::crc32c(&bytes[range.clone()]));
                if stored != computed {
                    return Err(RootError::Image(PartError::Crc { stored, computed }));
                }
            }
            sections.push((section.code.get(), range));
        }
        let (root, index) = (header.root, header.index);
        Ok(Self { root, index, bytes, sections })
    }

    /// The sections by their numbers, sharing the image's memory.
    pub fn sections(&self) -> impl Iterator<Item = (u32, Bytes)> {
        self.sections.iter().map(|(code, range)| (*code, self.bytes.slice(range.clone())))
    }

    /// Checks the sections and reads the root.
    pub fn read(&self) -> Result<Root, RootError> {
        Root::from_sections(self.sections())
    }
}
