use std::{
    fs::{File, OpenOptions},
    hint, io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use super::{
    counters::{COUNTER_WORDS, Counter, Counters},
    entry::{ACCESS_WORD, Entry, MAX_ACCESS},
    layout::{
        BUCKET_WORDS, DIRECTORY_NAME, ENTRY_WORDS, Geometry, LAYOUT_VERSION, MAGIC, PAGE, Place,
        SLOT_WORDS, SLOTS_PER_BUCKET, TAG_WORDS, header, object_of, words_of,
    },
    mapping::Mapping,
};
use crate::ObjectId;

/// Attempts at reading a bucket that is being changed. A store process that died while changing one
/// leaves it so until the next start, and its parts count as missing.
const BUCKET_TRIES: u32 = 200;

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the cache directory file cannot be mapped: {0}")]
    Io(#[from] io::Error),
    #[error(
        "the cache has layout version {found}, this library reads {LAYOUT_VERSION}: \
         restart polign-store"
    )]
    Version { found: u64 },
    #[error("the cache directory file is damaged")]
    Damaged,
}

/// The mapped `directory` file.
#[derive(Debug)]
pub struct DirectoryMap {
    mapping: Mapping,
    geometry: Geometry,
    id: ObjectId,
}

impl DirectoryMap {
    /// Maps the directory file of a cache.
    pub fn open(cache: &Path) -> Result<Self, OpenError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        Self::of_file(&options.open(cache.join(DIRECTORY_NAME))?)
    }

    pub(super) fn of_file(file: &File) -> Result<Self, OpenError> {
        let bytes = file.metadata()?.len();
        let len = usize::try_from(bytes).map_err(|_| OpenError::Damaged)?;
        if len < PAGE {
            return Err(OpenError::Damaged);
        }
        let mapping = Mapping::of_file(file, len)?;
        let word = |at: usize| mapping.words()[at].load(Ordering::Acquire);
        if word(header::MAGIC) != MAGIC {
            return Err(OpenError::Damaged);
        }
        if word(header::VERSION) != LAYOUT_VERSION {
            return Err(OpenError::Version { found: word(header::VERSION) });
        }
        let geometry = Geometry::checked(word(header::REGIONS), word(header::BUCKETS), bytes)
            .ok_or(OpenError::Damaged)?;
        let id = object_of([word(header::ID), word(header::ID + 1)]);
        Ok(Self { mapping, geometry, id })
    }

    /// Names this directory file; another one has another id.
    pub fn id(&self) -> ObjectId {
        self.id
    }

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Whether the file was replaced or lost its contents: nothing found through it is valid any more.
    pub fn is_retired(&self) -> bool {
        self.word(header::RETIRED).load(Ordering::Acquire) != 0
            || self.word(header::MAGIC).load(Ordering::Relaxed) != MAGIC
    }

    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        &self.mapping.words()[at]
    }

    pub(super) fn boot(&self) -> u32 {
        self.word(header::BOOT).load(Ordering::Relaxed) as u32
    }

    /// A region's present generation.
    pub fn generation(&self, region: u32) -> u64 {
        if region >= self.geometry.regions() {
            return 0;
        }
        self.word(self.geometry.region_word(region)).load(Ordering::Acquire)
    }

    /// Whether everything read from the region since this generation was looked up is what it was.
    pub fn is_unchanged(&self, region: u32, generation: u64) -> bool {
        // Orders the reads of the part's bytes before the read of the generation.
        fence(Ordering::Acquire);
        self.generation(region) == generation && !self.is_retired()
    }

    /// The entry of a part that may be read now, and the place of its access count.
    pub(super) fn find(&self, object: ObjectId, index: u32) -> Option<(Entry, AccessPlace)> {
        let place = Place::of(object, index, &self.geometry);
        let [first, second] = place.buckets;
        self.find_in(first, place.tag, object, index)
            .or_else(|| self.find_in(second, place.tag, object, index))
            .filter(|(entry, _)| {
                entry.is_within(self.geometry.regions())
                    && entry.boot == self.boot()
                    && entry.generation == self.generation(entry.region)
            })
    }

    fn find_in(
        &self,
        bucket: u32,
        tag: u16,
        object: ObjectId,
        index: u32,
    ) -> Option<(Entry, AccessPlace)> {
        let sequence = self.word(self.geometry.bucket_word(bucket));
        for _ in 0..BUCKET_TRIES {
            let before = sequence.load(Ordering::Acquire);
            if before & 1 == 0 {
                let found = self.scan_bucket(bucket, tag, object, index);
                fence(Ordering::Acquire);
                if sequence.load(Ordering::Relaxed) == before {
                    return found;
                }
            }
            hint::spin_loop();
        }
        None
    }

    fn scan_bucket(
        &self,
        bucket: u32,
        tag: u16,
        object: ObjectId,
        index: u32,
    ) -> Option<(Entry, AccessPlace)> {
        let wanted = words_of(object);
        for slot in 0..SLOTS_PER_BUCKET {
            if self.tag(bucket, slot) != tag {
                continue;
            }
            let words = self.slot_words(bucket, slot);
            if words[..2] == wanted && words[2] as u32 == index {
                let at = self.slot_word(bucket, slot) + ACCESS_WORD;
                let place = AccessPlace { word: at, seen: words[ACCESS_WORD] };
                return Some((Entry::from_words(words), place));
            }
        }
        None
    }

    pub(super) fn tag(&self, bucket: u32, slot: usize) -> u16 {
        let at = self.geometry.bucket_word(bucket) + TAG_WORDS + slot / 4;
        (self.word(at).load(Ordering::Relaxed) >> (slot % 4 * 16)) as u16
    }

    pub(super) fn slot_word(&self, bucket: u32, slot: usize) -> usize {
        self.geometry.bucket_word(bucket) + SLOT_WORDS + slot * ENTRY_WORDS
    }

    pub(super) fn slot_words(&self, bucket: u32, slot: usize) -> [u64; ENTRY_WORDS] {
        let at = self.slot_word(bucket, slot);
        std::array::from_fn(|word| self.word(at + word).load(Ordering::Relaxed))
    }

    /// Counts an access. May be lost to a concurrent change; never harms another entry.
    pub(super) fn count_access(&self, place: AccessPlace) {
        if (place.seen as u32) < MAX_ACCESS {
            let _ = self.word(place.word).compare_exchange(
                place.seen,
                place.seen + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
    }

    pub fn add(&self, counter: Counter, by: u64) {
        if by != 0 {
            self.word(header::COUNTERS + counter as usize).fetch_add(by, Ordering::Relaxed);
        }
    }

    pub fn set(&self, counter: Counter, to: u64) {
        self.word(header::COUNTERS + counter as usize).store(to, Ordering::Relaxed);
    }

    pub fn counters(&self) -> Counters {
        let value = |at| self.word(header::COUNTERS + at).load(Ordering::Relaxed);
        Counters(std::array::from_fn::<u64, COUNTER_WORDS, _>(value))
    }

    /// Faults in the mapped file that were mended with zeros.
    pub fn faults(&self) -> u64 {
        self.mapping.faults()
    }
}

/// The access count of an entry as it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AccessPlace {
    word: usize,
    seen: u64,
}

const _: () = assert!(header::COUNTERS + COUNTER_WORDS <= PAGE / 8);
const _: () = assert!(BUCKET_WORDS * 8 == 512);
