//! Names: objects in a store, parts in an object.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::ObjectId;

/// Bits of a part index that count within its kind.
pub const ORDINAL_BITS: u32 = 28;
/// Part ordinals are below this.
pub const MAX_ORDINAL: u32 = 1 << ORDINAL_BITS;

/// What a part holds; the discriminant is its number in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum PartKind {
    /// Blocks of 32 scanned codes.
    Plane1 = 0,
    /// Row ids, 8 bytes each.
    Ids = 1,
    /// A chunk of refinement records.
    Plane2 = 2,
    /// The header (ordinal 0) and the footer (from 1 on).
    Meta = 3,
    /// A chunk of uncompressed rows, for collections without a heap.
    Rows = 4,
}

impl PartKind {
    /// The kind with this number in the format, if there is one.
    pub fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::Plane1,
            1 => Self::Ids,
            2 => Self::Plane2,
            3 => Self::Meta,
            4 => Self::Rows,
            _ => return None,
        })
    }
}

/// Names one part of one object. Object ids are random, so a key never names two contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartKey {
    /// The object that holds the part.
    pub object: ObjectId,
    /// `kind << 28 | ordinal`.
    pub index: u32,
}

impl PartKey {
    /// The key of the `ordinal`th part of a kind. `ordinal` is below [`MAX_ORDINAL`] (the layout checks).
    pub fn new(object: ObjectId, kind: PartKind, ordinal: u32) -> Self {
        debug_assert!(ordinal < MAX_ORDINAL);
        Self { object, index: (kind as u32) << ORDINAL_BITS | (ordinal & (MAX_ORDINAL - 1)) }
    }

    /// What the part holds, if the index names a known kind.
    pub fn kind(&self) -> Option<PartKind> {
        PartKind::from_code(self.index >> ORDINAL_BITS)
    }

    /// The position among the object's parts of this kind.
    pub fn ordinal(&self) -> u32 {
        self.index & (MAX_ORDINAL - 1)
    }
}

impl fmt::Display for PartKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind() {
            Some(PartKind::Plane1) => "plane-1",
            Some(PartKind::Ids) => "ids",
            Some(PartKind::Plane2) => "plane-2",
            Some(PartKind::Meta) => "meta",
            Some(PartKind::Rows) => "rows",
            None => "unknown",
        };
        write!(f, "{kind} part {} of {}", self.ordinal(), self.object)
    }
}

/// A part and the byte range of the object that holds it, header and padding included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartRef {
    /// Which part.
    pub key: PartKey,
    /// First byte in the object.
    pub offset: u64,
    /// Bytes in the object: a multiple of 64, at most [`super::part::MAX_PART_LEN`].
    pub len: u32,
}

impl PartRef {
    /// The first byte after the part.
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.len)
    }
}

/// Two hexadecimal digits that lead every key of an index: stores throttle by key prefix.
pub fn shard_prefix(index: ObjectId) -> String {
    format!("{:02x}", crc32c::crc32c(&index.0) & 0xff)
}

/// Names a segment object in its store.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct SegmentName {
    /// The writer that uploaded it: inherited objects lie under another writer's id.
    pub writer: ObjectId,
    /// The index that it was written for.
    pub index: ObjectId,
    /// The object itself.
    pub object: ObjectId,
}

impl SegmentName {
    /// The object's key below the store's URL:
    /// `<2-digit hash of the index>/<writer>/<index>/<object>.seg`.
    pub fn key(&self) -> String {
        self.to_string()
    }

    /// The key of a published root with this name: the same, ending in `.root`.
    pub fn root_key(&self) -> String {
        self.key_with("root")
    }

    fn key_with(&self, extension: &str) -> String {
        let Self { writer, index, object } = self;
        format!("{}/{writer}/{index}/{object}.{extension}", shard_prefix(*index))
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key_with("seg"))
    }
}

/// The text is not the key of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a segment's key is <2-digit hash of the index>/<writer>/<index>/<object>.seg")]
pub struct ParseSegmentNameError;

impl FromStr for SegmentName {
    type Err = ParseSegmentNameError;

    fn from_str(key: &str) -> Result<Self, Self::Err> {
        let body = key.strip_suffix(".seg").ok_or(ParseSegmentNameError)?;
        let mut fields = body.split('/');
        let mut next = || fields.next().ok_or(ParseSegmentNameError);
        let _prefix = next()?;
        let mut id = || next()?.parse::<ObjectId>().map_err(|_| ParseSegmentNameError);
        let name = Self { writer: id()?, index: id()?, object: id()? };
        // Comparing the whole text also rejects a wrong prefix, upper case and trailing fields.
        if name.key() == key { Ok(name) } else { Err(ParseSegmentNameError) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> SegmentName {
        let id = |byte| ObjectId([byte; 16]);
        SegmentName { writer: id(1), index: id(2), object: id(3) }
    }

    #[test]
    fn key_text_is_stable_and_round_trips() {
        let key = name().key();
        let expected =
            format!("ba/{}/{}/{}.seg", "01".repeat(16), "02".repeat(16), "03".repeat(16));
        assert_eq!(key, expected);
        assert_eq!(key.parse::<SegmentName>().unwrap(), name());
        assert!(name().root_key().ends_with("03.root"));
    }

    #[test]
    fn other_keys_do_not_parse() {
        let key = name().key();
        for wrong in [
            key.replace(".seg", ".root"),
            key.replacen('/', "", 1),
            format!("a{key}"),
            key.replace(&shard_prefix(name().index), "zz"),
            String::new(),
        ] {
            assert!(wrong.parse::<SegmentName>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn part_keys_carry_kind_and_ordinal() {
        for kind in [0, 1, 2, 3, 4].map(|code| PartKind::from_code(code).unwrap()) {
            let key = PartKey::new(ObjectId::NIL, kind, MAX_ORDINAL - 1);
            assert_eq!((key.kind(), key.ordinal()), (Some(kind), MAX_ORDINAL - 1));
        }
        assert_eq!(PartKey { object: ObjectId::NIL, index: u32::MAX }.kind(), None);
    }
}
