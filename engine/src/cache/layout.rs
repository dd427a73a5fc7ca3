//! The `directory` file in 64-bit little-endian words:
//!
//! ```text
//! header (1 page: identity, geometry, counters) | 4 words a region | pad to a page | 64 words a bucket
//! ```

use crate::{ObjectId, segment::geometry::CHUNK_BYTES};

/// Raised when the meaning of any word changes; a directory of another version is made anew.
pub const LAYOUT_VERSION: u64 = 2;
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"PLGNDIR\0");

/// The unit of eviction.
pub const REGION_BYTES: u32 = 1 << 20;
pub const REGIONS_PER_SLAB: u32 = 1024;
/// The length of every slab file. It is sparse: regions not in use take no space.
pub const SLAB_BYTES: u64 = REGION_BYTES as u64 * REGIONS_PER_SLAB as u64;
/// No cache has more regions: a token has 22 bits for one (4 TiB).
pub const MAX_REGIONS: u32 = 1 << 22;

pub const DIRECTORY_NAME: &str = "directory";
/// Where backends put files to be uploaded.
pub const UPLOAD_DIRECTORY: &str = "upload";

/// The name of the `number`th slab file.
pub fn slab_name(number: u32) -> String {
    format!("slab.{number}")
}

pub(super) const PAGE: usize = 4096;
pub(super) const WORD: usize = 8;

/// Positions of the header's words.
pub(super) mod header {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const ID: usize = 2;
    /// Not zero: this file has been replaced.
    pub const RETIRED: usize = 4;
    pub const REGIONS: usize = 5;
    pub const BUCKETS: usize = 6;
    /// Counts the starts of the store process: entries that it did not check since are not shown.
    pub const BOOT: usize = 7;
    pub const COUNTERS: usize = 256;
}

/// Words a region: generation, state, order, none.
pub(super) const REGION_WORDS: usize = 4;

pub const SLOTS_PER_BUCKET: usize = 10;
/// A sequence word and three words of tags, then the slots.
pub(super) const BUCKET_WORDS: usize = 64;
pub(super) const TAG_WORDS: usize = 1;
pub(super) const SLOT_WORDS: usize = 4;
pub(super) const ENTRY_WORDS: usize = 6;

const _: () = assert!(SLOT_WORDS + SLOTS_PER_BUCKET * ENTRY_WORDS == BUCKET_WORDS);
const _: () = assert!((SLOT_WORDS - TAG_WORDS) * 4 >= SLOTS_PER_BUCKET);

/// Buckets a region, with places for 270 parts of it. The smallest parts that come in numbers are the
/// chunks, of 8 KiB; a region of nothing else holds 130 of them at 384 dimensions, so that fewer than half
/// of the places are taken. A part may be in either of two buckets; the coldest leaves where both are full,
/// which is what happens when regions fill with smaller parts.
const BUCKETS_PER_REGION: u32 = 27;

const _: () = assert!(
    BUCKETS_PER_REGION as usize * SLOTS_PER_BUCKET > 2 * REGION_BYTES as usize / CHUNK_BYTES
);

/// The sizes from which all positions follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    regions: u32,
    buckets: u32,
}

impl Geometry {
    /// The geometry of a cache of at most `regions` regions (at least one, at most 4 Mi).
    pub fn for_regions(regions: u32) -> Self {
        let regions = regions.clamp(1, MAX_REGIONS);
        Self { regions, buckets: regions * BUCKETS_PER_REGION }
    }

    pub(super) fn checked(regions: u64, buckets: u64, file_bytes: u64) -> Option<Self> {
        let regions = u32::try_from(regions).ok().filter(|n| (1..=MAX_REGIONS).contains(n))?;
        let geometry = Self::for_regions(regions);
        let matches =
            u64::from(geometry.buckets) == buckets && geometry.file_bytes() as u64 == file_bytes;
        matches.then_some(geometry)
    }

    pub fn regions(&self) -> u32 {
        self.regions
    }

    pub fn buckets(&self) -> u32 {
        self.buckets
    }

    pub fn slabs(&self) -> u32 {
        self.regions.div_ceil(REGIONS_PER_SLAB)
    }

    pub fn file_bytes(&self) -> usize {
        (self.first_bucket_word() + self.buckets as usize * BUCKET_WORDS) * WORD
    }

    fn first_bucket_word(&self) -> usize {
        (PAGE + self.regions as usize * REGION_WORDS * WORD).next_multiple_of(PAGE) / WORD
    }

    pub(super) fn region_word(&self, region: u32) -> usize {
        PAGE / WORD + region as usize * REGION_WORDS
    }

    pub(super) fn bucket_word(&self, bucket: u32) -> usize {
        self.first_bucket_word() + bucket as usize * BUCKET_WORDS
    }
}

/// Where a key may be, and its tag there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub buckets: [u32; 2],
    /// Never zero: that means an empty slot.
    pub tag: u16,
}

impl Place {
    pub fn of(object: ObjectId, index: u32, geometry: &Geometry) -> Self {
        let [low, high] = words_of(object);
        let first = mix(low ^ mix(high ^ u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let second = mix(first);
        let reduce =
            |hash: u64| (((hash & 0xffff_ffff) * u64::from(geometry.buckets)) >> 32) as u32;
        Self { buckets: [reduce(first), reduce(second)], tag: (first >> 48) as u16 | 1 }
    }
}

pub(super) fn words_of(object: ObjectId) -> [u64; 2] {
    let (low, high) = object.0.split_at(8);
    [low, high].map(|half| u64::from_le_bytes(half.try_into().unwrap_or_default()))
}

pub(super) fn object_of(words: [u64; 2]) -> ObjectId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&words[0].to_le_bytes());
    bytes[8..].copy_from_slice(&words[1].to_le_bytes());
    ObjectId(bytes)
}

/// The finalizer of SplitMix64: every input bit changes every output bit with probability 1/2.
fn mix(mut hash: u64) -> u64 {
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ hash >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometry_is_recovered_from_its_numbers() {
        for regions in [1, 5, 1024, 1025, 100_000] {
            let made = Geometry::for_regions(regions);
            let bytes = made.file_bytes() as u64;
            let read = Geometry::checked(made.regions.into(), made.buckets.into(), bytes);
            assert_eq!(read, Some(made));
            assert_eq!(
                Geometry::checked(made.regions.into(), made.buckets.into(), bytes - 1),
                None
            );
        }
        assert_eq!(Geometry::checked(u64::MAX, 1, 0), None);
        assert_eq!(Geometry::checked(1, u64::MAX, 0), None);
    }

    #[test]
    fn keys_spread_over_the_buckets() {
        let geometry = Geometry::for_regions(64);
        let mut load = vec![0u32; geometry.buckets as usize];
        let object = ObjectId([9; 16]);
        for index in 0..geometry.buckets * 4 {
            let place = Place::of(object, index, &geometry);
            let emptier = place.buckets.into_iter().min_by_key(|&b| load[b as usize]);
            load[emptier.unwrap() as usize] += 1;
        }
        let most = *load.iter().max().unwrap();
        assert!(most <= SLOTS_PER_BUCKET as u32, "{most} parts in one bucket at 40 % load");
    }

    #[test]
    fn object_words_round_trip() {
        let id = ObjectId::random().unwrap();
        assert_eq!(object_of(words_of(id)), id);
    }
}
