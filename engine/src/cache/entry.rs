use super::layout::{ENTRY_WORDS, REGION_BYTES, object_of, words_of};
use crate::ObjectId;

/// Accesses are counted up to this.
pub const MAX_ACCESS: u32 = 3;

/// Where a part is. In the directory: object (2 words), index and length, region and offset,
/// generation, accesses and boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub object: ObjectId,
    pub index: u32,
    pub len: u32,
    pub region: u32,
    pub offset: u32,
    /// The region's generation when the part was written.
    pub generation: u64,
    /// Hits since the part was published or moved, up to [`MAX_ACCESS`].
    pub access: u32,
    /// The store process's boot that checked the part's bytes.
    pub boot: u32,
}

/// Position of the word that backends change.
pub(super) const ACCESS_WORD: usize = 5;

impl Entry {
    pub(super) fn to_words(self) -> [u64; ENTRY_WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [first, second] = words_of(self.object);
        [
            first,
            second,
            pair(self.index, self.len),
            pair(self.region, self.offset),
            self.generation,
            pair(self.access, self.boot),
        ]
    }

    pub(super) fn from_words(words: [u64; ENTRY_WORDS]) -> Self {
        let [first, second, index_len, region_offset, generation, access_boot] = words;
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let (index, len) = halves(index_len);
        let (region, offset) = halves(region_offset);
        let (access, boot) = halves(access_boot);
        let object = object_of([first, second]);
        Self { object, index, len, region, offset, generation, access, boot }
    }

    /// Whether the bytes lie within a region of the cache.
    pub fn is_within(&self, regions: u32) -> bool {
        self.region < regions
            && u64::from(self.offset) + u64::from(self.len) <= u64::from(REGION_BYTES)
    }
}
