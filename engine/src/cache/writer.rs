use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::atomic::{Ordering, fence},
};

use rustix::fs::{FallocateFlags, fallocate};

use super::{
    directory::{DirectoryMap, OpenError},
    entry::{ACCESS_WORD, Entry},
    layout::{
        DIRECTORY_NAME, Geometry, LAYOUT_VERSION, MAGIC, Place, SLOTS_PER_BUCKET, TAG_WORDS,
        header, words_of,
    },
};
use crate::ObjectId;

/// Which queue of the eviction policy a region is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RegionClass {
    Free = 0,
    /// Parts that came in lately.
    Small = 1,
    /// Parts that proved themselves.
    Main = 2,
}

/// What is kept of a region for the next start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionState {
    pub class: RegionClass,
    pub used: u32,
    /// Larger for a region that was opened later.
    pub order: u64,
}

/// A slot of the directory's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    bucket: u32,
    number: u8,
}

/// The directory file in the hands of its one writer, the store process that holds the cache's lock.
#[derive(Debug)]
pub struct DirectoryWriter {
    map: DirectoryMap,
}

impl DirectoryWriter {
    /// Makes a new, empty directory file and puts it in the place of the one that is there. All its
    /// space is allocated, so that writing to the mapping cannot fail later.
    pub fn create(cache: &Path, geometry: Geometry) -> Result<Self, OpenError> {
        let temporary = cache.join(format!("{DIRECTORY_NAME}.new"));
        let result = Self::create_at(&temporary, cache, geometry);
        if result.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        result
    }

    fn create_at(temporary: &Path, cache: &Path, geometry: Geometry) -> Result<Self, OpenError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(temporary)?;
        let bytes = geometry.file_bytes() as u64;
        fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(io::Error::from)?;
        let id = ObjectId::random().map_err(|error| io::Error::other(error.to_string()))?;
        let [low, high] = words_of(id);
        let words = [
            MAGIC,
            LAYOUT_VERSION,
            low,
            high,
            0,
            geometry.regions().into(),
            geometry.buckets().into(),
            1,
        ];
        let header: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &header, 0)?;
        let map = DirectoryMap::of_file(&file)?;
        fs::rename(temporary, cache.join(DIRECTORY_NAME))?;
        Ok(Self { map })
    }

    /// Takes over the file of an earlier process. Its entries are hidden from readers until they are
    /// [shown](Self::show) again.
    pub fn reopen(cache: &Path) -> Result<Self, OpenError> {
        let writer = Self { map: DirectoryMap::open(cache)? };
        if writer.map.is_retired() {
            return Err(OpenError::Damaged);
        }
        let boot = writer.map.boot().wrapping_add(1).max(1);
        writer.map.word(header::BOOT).store(boot.into(), Ordering::SeqCst);
        for bucket in 0..writer.map.geometry().buckets() {
            writer.mend_bucket(bucket);
        }
        Ok(writer)
    }

    /// Empties a bucket that a process left half-changed.
    fn mend_bucket(&self, bucket: u32) {
        let sequence = self.map.word(self.map.geometry().bucket_word(bucket));
        let value = sequence.load(Ordering::Relaxed);
        if value & 1 == 1 {
            for slot in 0..SLOTS_PER_BUCKET {
                self.set_tag(bucket, slot, 0);
            }
            sequence.store(value.wrapping_add(1), Ordering::Release);
        }
    }

    pub fn map(&self) -> &DirectoryMap {
        &self.map
    }

    /// Tells readers that this file was replaced.
    pub fn retire(&self) {
        self.map.word(header::RETIRED).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Looks a part up, shown or not.
    pub fn find(&self, object: ObjectId, index: u32) -> Option<(Slot, Entry)> {
        let place = Place::of(object, index, self.map.geometry());
        place.buckets.into_iter().find_map(|bucket| {
            (0..SLOTS_PER_BUCKET).find_map(|number| {
                if self.map.tag(bucket, number) != place.tag {
                    return None;
                }
                let slot = Slot { bucket, number: number as u8 };
                let entry = self.entry(slot)?;
                (entry.object == object && entry.index == index).then_some((slot, entry))
            })
        })
    }

    /// The entry in a slot, if there is one whose bytes can still be there.
    fn entry(&self, slot: Slot) -> Option<Entry> {
        if self.map.tag(slot.bucket, slot.number.into()) == 0 {
            return None;
        }
        let entry = Entry::from_words(self.map.slot_words(slot.bucket, slot.number.into()));
        let valid = entry.is_within(self.map.geometry().regions())
            && entry.generation == self.map.generation(entry.region);
        valid.then_some(entry)
    }

    /// All entries whose bytes can still be there.
    pub fn entries(&self) -> impl Iterator<Item = (Slot, Entry)> + '_ {
        (0..self.map.geometry().buckets()).flat_map(move |bucket| {
            (0..SLOTS_PER_BUCKET as u8).filter_map(move |number| {
                let slot = Slot { bucket, number };
                Some((slot, self.entry(slot)?))
            })
        })
    }

    /// Publishes a part, in place of its own older entry if there is one. Its bytes are in the slab.
    /// If both buckets are full, the entry least in use is dropped and returned.
    pub fn publish(&self, entry: Entry) -> Option<Entry> {
        self.publish_as(entry, true)
    }

    /// Like [`DirectoryWriter::publish`]; with `shown` false, readers do not see the entry until it is
    /// [shown](Self::show).
    pub fn publish_as(&self, mut entry: Entry, shown: bool) -> Option<Entry> {
        entry.boot = if shown { self.map.boot() } else { 0 };
        let place = Place::of(entry.object, entry.index, self.map.geometry());
        let (slot, dropped) = match self.find(entry.object, entry.index) {
            Some((slot, _)) => (slot, None),
            None => self.room(place),
        };
        self.change(slot.bucket, || {
            let number = usize::from(slot.number);
            let at = self.map.slot_word(slot.bucket, number);
            for (word, value) in entry.to_words().into_iter().enumerate() {
                self.map.word(at + word).store(value, Ordering::Relaxed);
            }
            self.set_tag(slot.bucket, number, place.tag);
        });
        dropped
    }

    /// A slot for a new entry: in the emptier bucket, or the one least in use.
    fn room(&self, place: Place) -> (Slot, Option<Entry>) {
        let slots = |bucket| (0..SLOTS_PER_BUCKET as u8).map(move |number| Slot { bucket, number });
        let mut best: Option<(usize, Slot)> = None;
        for bucket in place.buckets {
            let mut empty = slots(bucket).filter(|&slot| self.entry(slot).is_none());
            if let Some(slot) = empty.next() {
                let room = 1 + empty.count();
                if best.is_none_or(|(most, _)| room > most) {
                    best = Some((room, slot));
                }
            }
        }
        if let Some((_, slot)) = best {
            return (slot, None);
        }
        let access = |slot: &Slot| self.entry(*slot).map_or(0, |entry| entry.access);
        let coldest = place.buckets.into_iter().flat_map(slots).min_by_key(access);
        let slot = coldest.unwrap_or(Slot { bucket: place.buckets[0], number: 0 });
        (slot, self.entry(slot))
    }

    /// Shows an entry to readers, after its bytes were checked, or its access count set.
    pub fn show(&self, slot: Slot, access: u32) {
        let at = self.map.slot_word(slot.bucket, slot.number.into()) + ACCESS_WORD;
        let value = u64::from(access) | u64::from(self.map.boot()) << 32;
        self.change(slot.bucket, || self.map.word(at).store(value, Ordering::Relaxed));
    }

    /// Whether readers may see the entry.
    pub fn is_shown(&self, entry: &Entry) -> bool {
        entry.boot == self.map.boot()
    }

    pub fn remove(&self, slot: Slot) {
        self.change(slot.bucket, || self.set_tag(slot.bucket, slot.number.into(), 0));
    }

    fn set_tag(&self, bucket: u32, slot: usize, tag: u16) {
        let word = self.map.word(self.map.geometry().bucket_word(bucket) + TAG_WORDS + slot / 4);
        let shift = slot % 4 * 16;
        let others = word.load(Ordering::Relaxed) & !(0xffff << shift);
        word.store(others | u64::from(tag) << shift, Ordering::Relaxed);
    }

    /// Changes a bucket under its sequence lock.
    fn change(&self, bucket: u32, change: impl FnOnce()) {
        let sequence = self.map.word(self.map.geometry().bucket_word(bucket));
        let value = sequence.load(Ordering::Relaxed);
        sequence.store(value.wrapping_add(1) | 1, Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        sequence.store((value | 1).wrapping_add(1), Ordering::Release);
    }

    /// Makes every part of a region invalid, before its bytes change. Returns the new generation.
    pub fn evict_region(&self, region: u32) -> u64 {
        let word = self.map.word(self.map.geometry().region_word(region));
        let generation = word.load(Ordering::Relaxed).wrapping_add(1).max(1);
        word.store(generation, Ordering::SeqCst);
        // Orders the new generation before the bytes that are written next.
        fence(Ordering::SeqCst);
        generation
    }

    pub fn set_region_state(&self, region: u32, state: RegionState) {
        let at = self.map.geometry().region_word(region);
        let word = u64::from(state.used) | u64::from(state.class as u8) << 32;
        self.map.word(at + 1).store(word, Ordering::Relaxed);
        self.map.word(at + 2).store(state.order, Ordering::Relaxed);
    }

    pub fn region_state(&self, region: u32) -> RegionState {
        let at = self.map.geometry().region_word(region);
        let word = self.map.word(at + 1).load(Ordering::Relaxed);
        let class = match word >> 32 {
            1 => RegionClass::Small,
            2 => RegionClass::Main,
            _ => RegionClass::Free,
        };
        RegionState {
            class,
            used: (word as u32).min(super::REGION_BYTES),
            order: self.map.word(at + 2).load(Ordering::Relaxed),
        }
    }

    /// Sets the generation of a region that is carried over from another directory file.
    pub fn carry_generation(&self, region: u32, generation: u64) {
        self.map.word(self.map.geometry().region_word(region)).store(generation, Ordering::SeqCst);
    }
}
