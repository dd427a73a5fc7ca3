//! The frame around every part: a 64-byte header, the payload, zero padding to a multiple of 64 bytes.
//!
//! A part says which one it is, so a wrong range, a wrong object or a damaged cache slot is an error
//! and never another part's bytes. Blocks of codes fill multiples of 64 bytes, and so do most chunks of
//! records; parts are padded to such a multiple, so a shorter header would save nothing.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32},
};

use super::key::{ORDINAL_BITS, PartKey};
use crate::ObjectId;

/// The version of the segment format that this library writes and reads. Version 1 had plane-2 and row
/// chunks of 16 KiB.
pub const FORMAT_VERSION: u16 = 2;
/// Bytes before the payload.
pub const HEADER_LEN: usize = 64;
/// Parts start at, and are padded to, multiples of this.
pub const ALIGN: usize = 64;
/// The longest payload.
pub const MAX_PAYLOAD: usize = 256 << 10;
/// The longest part, header and padding included.
pub const MAX_PART_LEN: usize = HEADER_LEN + MAX_PAYLOAD;

const MAGIC: u32 = u32::from_le_bytes(*b"PLGP");
/// The checksum's place in the header: the last field before the reserved bytes.
const CRC_AT: Range<usize> = 32..36;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct PartHeader {
    magic: U32,
    version: U16,
    kind: U16,
    index: U32,
    payload_len: U32,
    object: ObjectId,
    /// CRC32C over the header with this field zero, then the payload.
    crc: U32,
    reserved: [u8; 28],
}

const _: () = assert!(size_of::<PartHeader>() == HEADER_LEN);

/// Why bytes are not the part that they were expected to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum PartError {
    /// Fewer bytes than the part has.
    #[error("part is {found} bytes long, expected {needed}")]
    TooShort {
        /// Bytes that the part has.
        needed: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The first four bytes are not a part's.
    #[error("part starts with {found:#010x}, not with the magic number of a part")]
    Magic {
        /// The first four bytes.
        found: u32,
    },
    /// Written by a library with another format.
    #[error(
        "part has format version {found}, this library reads version {known}: \
         update the polign library and polign-store, or REINDEX"
    )]
    Version {
        /// The part's version.
        found: u16,
        /// The only version known here.
        known: u16,
    },
    /// A part of another kind.
    #[error("part holds kind {found}, expected kind {expected}")]
    Kind {
        /// The kind asked for.
        expected: u32,
        /// The kind found.
        found: u32,
    },
    /// Another part of the same object.
    #[error("part has index {found:#010x}, expected {expected:#010x}")]
    Index {
        /// The index asked for.
        expected: u32,
        /// The index found.
        found: u32,
    },
    /// A part of another object.
    #[error("part belongs to object {found}, expected {expected}")]
    Object {
        /// The object asked for.
        expected: ObjectId,
        /// The object found.
        found: ObjectId,
    },
    /// The payload's length does not fit the bytes.
    #[error("part has a payload of {payload} bytes, which does not fit its {found} bytes")]
    Length {
        /// The length in the header.
        payload: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// Bytes that must be zero are not.
    #[error("part has bytes set that must be zero")]
    Padding,
    /// The checksum does not match.
    #[error("part has checksum {stored:#010x}, its bytes give {computed:#010x}")]
    Crc {
        /// The checksum in the header.
        stored: u32,
        /// The checksum of the bytes.
        computed: u32,
    },
}

/// Bytes of a part with a payload of this length.
pub const fn framed_len(payload: usize) -> usize {
    (HEADER_LEN + payload).next_multiple_of(ALIGN)
}

/// Appends the part: header, payload, padding. The payload is at most [`MAX_PAYLOAD`] bytes.
pub fn frame(key: PartKey, payload: &[u8], out: &mut Vec<u8>) {
    frame_slices(key, &[payload], out);
}

/// Like [`frame`], with the payload given in pieces.
pub fn frame_slices(key: PartKey, payload: &[&[u8]], out: &mut Vec<u8>) {
    let (header, len) = header(key, payload);
    out.reserve(len);
    let start = out.len();
    out.extend_from_slice(&header);
    for slice in payload {
        out.extend_from_slice(slice);
    }
    out.resize(start + len, 0);
}

/// The header of a part with this payload, given in pieces, and the length of the whole part.
pub(super) fn header(key: PartKey, payload: &[&[u8]]) -> ([u8; HEADER_LEN], usize) {
    let len: usize = payload.iter().map(|slice| slice.len()).sum();
    assert!(len <= MAX_PAYLOAD, "a part's payload has at most {MAX_PAYLOAD} bytes, not {len}");
    let mut header = PartHeader {
        magic: MAGIC.into(),
        version: FORMAT_VERSION.into(),
        kind: ((key.index >> ORDINAL_BITS) as u16).into(),
        index: key.index.into(),
        payload_len: (len as u32).into(),
        object: key.object,
        crc: 0.into(),
        reserved: [0; 28],
    };
    let crc = crc32c::crc32c(header.as_bytes());
    let crc = payload.iter().fold(crc, |crc, slice| crc32c::crc32c_append(crc, slice));
    header.crc = crc.into();
    (zerocopy::transmute!(header), framed_len(len))
}

/// Checks everything about a part, the checksum included, and says where in `bytes` its payload is.
pub fn verify(key: PartKey, bytes: &[u8]) -> Result<Range<usize>, PartError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        return Err(too_short(bytes.len()));
    };
    let range = payload_range_unchecked_crc(key, header, bytes.len())?;
    let payload_len = range.len();
    let stored = u32::from_le_bytes(header[CRC_AT].try_into().expect("four bytes"));
    let computed = checksum(header, &rest[..payload_len]);
    if stored != computed {
        return Err(PartError::Crc { stored, computed });
    }
    if rest[payload_len..].iter().any(|&byte| byte != 0) {
        return Err(PartError::Padding);
    }
    Ok(range)
}

/// Where the payload lies in a part of `len` bytes, from a private copy of its header. For parts whose
/// checksum was verified when they entered the cache: compares the header with the key and the length.
pub fn payload_range_unchecked_crc(
    key: PartKey,
    header: &[u8; HEADER_LEN],
    len: usize,
) -> Result<Range<usize>, PartError> {
    if len < HEADER_LEN {
        return Err(too_short(len));
    }
    let header: PartHeader = zerocopy::transmute!(*header);
    if header.magic != MAGIC {
        return Err(PartError::Magic { found: header.magic.get() });
    }
    if header.version != FORMAT_VERSION {
        return Err(PartError::Version { found: header.version.get(), known: FORMAT_VERSION });
    }
    let (expected, found) = (key.index >> ORDINAL_BITS, u32::from(header.kind.get()));
    if expected != found {
        return Err(PartError::Kind { expected, found });
    }
    if header.index != key.index {
        return Err(PartError::Index { expected: key.index, found: header.index.get() });
    }
    if header.object != key.object {
        return Err(PartError::Object { expected: key.object, found: header.object });
    }
    if header.reserved != [0; 28] {
        return Err(PartError::Padding);
    }
    let payload = header.payload_len.get() as usize;
    if payload > MAX_PAYLOAD || framed_len(payload) < len {
        return Err(PartError::Length { payload: payload as u64, found: len as u64 });
    }
    if framed_len(payload) > len {
        return Err(PartError::TooShort { needed: framed_len(payload) as u64, found: len as u64 });
    }
    Ok(HEADER_LEN..HEADER_LEN + payload)
}

/// The index and the length in the object of the part that starts with this header, unverified: for
/// walking through an object's parts, each of which is then verified.
pub fn peek(header: &[u8; HEADER_LEN]) -> Result<(u32, usize), PartError> {
    let found = header.len() as u64;
    let header: PartHeader = zerocopy::transmute!(*header);
    if header.magic != MAGIC {
        return Err(PartError::Magic { found: header.magic.get() });
    }
    let payload = header.payload_len.get() as usize;
    if payload > MAX_PAYLOAD {
        return Err(PartError::Length { payload: payload as u64, found });
    }
    Ok((header.index.get(), framed_len(payload)))
}

/// Writes the checksum that fits the header and payload of `part` into its header. For tools and tests
/// that edit parts; does nothing to bytes shorter than a header.
pub fn reseal(part: &mut [u8]) {
    let Some((header, rest)) = part.split_first_chunk_mut::<HEADER_LEN>() else { return };
    let len = u32::from_le_bytes(header[12..16].try_into().expect("four bytes")) as usize;
    let crc = checksum(header, &rest[..len.min(rest.len())]);
    header[CRC_AT].copy_from_slice(&crc.to_le_bytes());
}

fn checksum(header: &[u8; HEADER_LEN], payload: &[u8]) -> u32 {
    let mut zeroed = *header;
    zeroed[CRC_AT].fill(0);
    crc32c::crc32c_append(crc32c::crc32c(&zeroed), payload)
}

fn too_short(found: usize) -> PartError {
    PartError::TooShort { needed: HEADER_LEN as u64, found: found as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::key::PartKind;

    const KEY: PartKey = PartKey { object: ObjectId([7; 16]), index: 2 << ORDINAL_BITS | 5 };

    fn framed(payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        frame(KEY, payload, &mut out);
        out
    }

    fn edited(edit: impl FnOnce(&mut Vec<u8>)) -> PartError {
        let mut part = framed(b"payload");
        edit(&mut part);
        reseal(&mut part);
        verify(KEY, &part).unwrap_err()
    }

    #[test]
    fn frames_are_aligned_and_verify() {
        for len in [0, 1, 63, 64, 65, 1000, MAX_PAYLOAD] {
            let payload: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let part = framed(&payload);
            assert_eq!(part.len(), framed_len(len));
            assert_eq!(part.len() % ALIGN, 0);
            assert!(part.len() <= MAX_PART_LEN);
            assert_eq!(part[verify(KEY, &part).unwrap()], payload);
        }
    }

    #[test]
    fn frames_append_to_what_is_there() {
        let mut out = vec![1; 10];
        frame_slices(KEY, &[b"pay", b"", b"load"], &mut out);
        assert_eq!(out[..10], [1; 10]);
        assert_eq!(out[10..], framed(b"payload"));
    }

    #[test]
    fn each_fault_has_its_error() {
        assert!(matches!(edited(|p| p[0] ^= 1), PartError::Magic { .. }));
        assert_eq!(edited(|p| p[4] = 9), PartError::Version { found: 9, known: FORMAT_VERSION });
        assert_eq!(edited(|p| p[6] = 1), PartError::Kind { expected: 2, found: 1 });
        assert!(matches!(edited(|p| p[8] = 6), PartError::Index { .. }));
        assert!(matches!(edited(|p| p[16] = 0), PartError::Object { .. }));
        assert!(matches!(edited(|p| p[12..16].fill(255)), PartError::Length { .. }));
        assert!(matches!(edited(|p| p[12] = 100), PartError::TooShort { .. }));
        assert!(matches!(
            edited(|p| p.truncate(63)),
            PartError::TooShort { needed: 64, found: 63 }
        ));
        assert!(matches!(edited(|p| p.extend([0; 64])), PartError::Length { .. }));
        assert_eq!(edited(|p| p[63] = 1), PartError::Padding);
        assert_eq!(edited(|p| *p.last_mut().unwrap() = 1), PartError::Padding);
        let mut part = framed(b"payload");
        part[HEADER_LEN] ^= 1;
        assert!(matches!(verify(KEY, &part), Err(PartError::Crc { .. })));
    }

    #[test]
    fn every_single_bit_is_covered() {
        let part = framed(b"some payload");
        for bit in 0..part.len() * 8 {
            let mut flipped = part.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(verify(KEY, &flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn an_unknown_version_names_both_and_the_way_out() {
        let text = edited(|p| p[4] = 1).to_string();
        assert!(text.contains("version 1") && text.contains("version 2"), "{text}");
        assert!(text.contains("update"), "{text}");
    }

    #[test]
    fn the_cheap_check_agrees_with_the_full_one() {
        let part = framed(b"payload");
        let header = part.first_chunk().unwrap();
        let cheap = payload_range_unchecked_crc(KEY, header, part.len()).unwrap();
        assert_eq!(cheap, verify(KEY, &part).unwrap());
        let other = PartKey::new(KEY.object, PartKind::Ids, 5);
        assert!(payload_range_unchecked_crc(other, header, part.len()).is_err());
    }
}
