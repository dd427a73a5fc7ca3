//! Appending, publishing and evicting.

use std::{
    io,
    time::{Duration, Instant},
};

use bytes::Bytes;
use polign_engine::{
    cache::{Counter, DirectoryWriter, Entry, REGION_BYTES, RegionClass, RegionState},
    segment::{PartKey, part},
};

use super::{disk::Disk, policy::S3Fifo};

/// The share of the disk that is left free: one byte in so many.
const DISK_RESERVE: u64 = 20;
/// No new space is asked for so long after the disk was full.
const FULL_PAUSE: Duration = Duration::from_secs(5);
/// Parts moved from an evicted region take at most this: every eviction frees at least half a region.
const MOST_MOVED: usize = REGION_BYTES as usize / 2;
/// A cache has at least so many regions: one open for each class, and some to evict.
pub const FEWEST_REGIONS: u32 = 4;

#[derive(Debug, Clone)]
pub(super) struct Region {
    pub class: RegionClass,
    pub used: u32,
    pub order: u64,
    /// Whether it may take space on the disk.
    pub backed: bool,
    /// Parts written to it; some may have been replaced or dropped since.
    pub keys: Vec<PartKey>,
}

impl Region {
    pub const FREE: Self =
        Self { class: RegionClass::Free, used: 0, order: 0, backed: false, keys: Vec::new() };
}

/// A cache that works: the mapped directory, the slabs, and the policy's state.
pub struct Active {
    pub(super) directory: DirectoryWriter,
    pub(super) disk: Box<dyn Disk>,
    pub(super) regions: Vec<Region>,
    pub(super) policy: S3Fifo,
    /// Most regions in use.
    pub(super) limit: u32,
    pub(super) in_use: u32,
    pub(super) next_order: u64,
    pub(super) parts: usize,
    /// The regions that take new parts: small, main.
    pub(super) open: [Option<u32>; 2],
    full_until: Option<Instant>,
}

/// Whether and how a part is in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Shown,
    /// From before the last start: its bytes are to be checked first.
    Unchecked,
    Absent,
}

impl Active {
    pub(super) fn new(directory: DirectoryWriter, disk: Box<dyn Disk>, limit: u32) -> Self {
        let regions = vec![Region::FREE; directory.map().geometry().regions() as usize];
        Self {
            directory,
            disk,
            regions,
            policy: S3Fifo::default(),
            limit: limit.max(FEWEST_REGIONS),
            in_use: 0,
            next_order: 1,
            parts: 0,
            open: [None; 2],
            full_until: None,
        }
    }

    pub fn presence(&self, key: &PartKey) -> Presence {
        match self.directory.find(key.object, key.index) {
            Some((_, entry)) if self.directory.is_shown(&entry) => Presence::Shown,
            Some(_) => Presence::Unchecked,
            None => Presence::Absent,
        }
    }

    /// Checks the bytes of a part from before the last start. Shows it, or drops it.
    pub fn check(&mut self, key: &PartKey) -> bool {
        let Some((slot, entry)) = self.directory.find(key.object, key.index) else { return false };
        if self.directory.is_shown(&entry) {
            return true;
        }
        if self.read_entry(key, &entry).is_some() {
            self.directory.show(slot, entry.access);
            return true;
        }
        self.directory.remove(slot);
        self.parts = self.parts.saturating_sub(1);
        false
    }

    /// The part's bytes if they are here and sound; a damaged part is dropped.
    pub fn read(&mut self, key: &PartKey) -> Option<Bytes> {
        let (_, entry) = self.directory.find(key.object, key.index)?;
        let bytes = self.read_entry(key, &entry);
        if bytes.is_none() {
            self.drop_part(key);
        }
        bytes
    }

    fn read_entry(&mut self, key: &PartKey, entry: &Entry) -> Option<Bytes> {
        let mut bytes = vec![0; entry.len as usize];
        self.disk.read_at(entry.region, entry.offset, &mut bytes).ok()?;
        part::verify(*key, &bytes).is_ok().then(|| bytes.into())
    }

    pub fn drop_part(&mut self, key: &PartKey) {
        if let Some((slot, _)) = self.directory.find(key.object, key.index) {
            self.directory.remove(slot);
            self.parts = self.parts.saturating_sub(1);
        }
    }

    /// Publishes a part whose bytes were verified. `Ok(false)`: there is no room for it now.
    pub fn insert(&mut self, key: PartKey, bytes: &[u8]) -> io::Result<bool> {
        if self.presence(&key) == Presence::Shown {
            return Ok(true);
        }
        let class = self.policy.class_for(&key);
        let Some(region) = self.room(class, bytes.len(), true) else { return Ok(false) };
        self.append(region, key, bytes, 0).map(|()| true)
    }

    fn append(&mut self, number: u32, key: PartKey, bytes: &[u8], access: u32) -> io::Result<()> {
        let offset = self.regions[number as usize].used;
        if let Err(error) = self.disk.write_at(number, offset, bytes) {
            if is_full(&error) {
                self.full_until = Some(Instant::now() + FULL_PAUSE);
            }
            if offset == 0 {
                self.discard_region(number);
            }
            return Err(error);
        }
        let (object, index, len) = (key.object, key.index, bytes.len() as u32);
        let generation = self.directory.map().generation(number);
        let entry =
            Entry { object, index, len, region: number, offset, generation, access, boot: 0 };
        let replaced = self.directory.find(object, index).is_some();
        let dropped = self.directory.publish(entry).is_some();
        self.parts += usize::from(!replaced && !dropped);
        let region = &mut self.regions[number as usize];
        region.used = (offset + len).next_multiple_of(part::ALIGN as u32);
        region.backed = true;
        region.keys.push(key);
        self.save_state(number);
        Ok(())
    }

    fn save_state(&self, number: u32) {
        let Region { class, used, order, .. } = self.regions[number as usize];
        self.directory.set_region_state(number, RegionState { class, used, order });
    }

    /// An open region with room for `len` bytes.
    fn room(&mut self, class: RegionClass, len: usize, may_evict: bool) -> Option<u32> {
        let queue = usize::from(class == RegionClass::Main);
        if let Some(open) = self.open[queue] {
            if self.regions[open as usize].used as usize + len <= REGION_BYTES as usize {
                return Some(open);
            }
            self.open[queue] = None;
        }
        let number = loop {
            if let Some(free) = self.free_region() {
                break free;
            }
            if !may_evict || !self.evict_one() {
                return None;
            }
            // Moving parts may have opened a region of this class.
            if let Some(open) = self.open[queue]
                && self.regions[open as usize].used as usize + len <= REGION_BYTES as usize
            {
                return Some(open);
            }
        };
        // New generation first: whatever a crash left in the region is not taken for parts of it.
        self.directory.evict_region(number);
        let order = self.next_order;
        self.next_order += 1;
        let region = &mut self.regions[number as usize];
        let backed = region.backed;
        *region = Region { class, used: 0, order, backed, keys: Vec::new() };
        self.in_use += 1;
        self.policy.opened(number, class);
        self.open[queue] = Some(number);
        self.save_state(number);
        Some(number)
    }

    fn free_region(&mut self) -> Option<u32> {
        if self.in_use >= self.limit {
            return None;
        }
        self.find_free(true).or_else(|| {
            let may_take_space = self.may_take_space();
            self.find_free(false).filter(|_| may_take_space)
        })
    }

    fn find_free(&self, backed: bool) -> Option<u32> {
        let fits = |region: &Region| region.class == RegionClass::Free && region.backed == backed;
        self.regions.iter().position(fits).map(|number| number as u32)
    }

    fn may_take_space(&mut self) -> bool {
        if self.full_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.full_until = None;
        self.spare_space() >= u64::from(REGION_BYTES) as i64
    }

    /// Bytes that may be taken, or are to be given back if negative, to leave the disk its reserve.
    pub(super) fn spare_space(&self) -> i64 {
        match self.disk.space() {
            Ok(space) => space.available as i64 - (space.total / DISK_RESERVE) as i64,
            Err(_) => i64::MAX,
        }
    }

    /// Evicts a region and moves on what is in use of it. False if there is none to evict.
    pub(super) fn evict_one(&mut self) -> bool {
        let Some((number, class)) = self.policy.next_victim(self.limit) else { return false };
        let moving = self.survivors(number, class);
        let kept: Vec<PartKey> = moving.iter().map(|(key, ..)| *key).collect();
        self.empty_region(number, |policy, key, parts| {
            if class == RegionClass::Small && !kept.contains(&key) {
                policy.left(key, parts);
            }
        });
        for (key, bytes, access) in moving {
            let moved = match self.room(RegionClass::Main, bytes.len(), false) {
                Some(region) => self.append(region, key, &bytes, access).is_ok(),
                None => false,
            };
            if moved {
                self.directory.map().add(Counter::MovedBytes, bytes.len() as u64);
            }
        }
        true
    }

    /// The parts of a region that are to be moved, the most used first.
    fn survivors(&mut self, number: u32, class: RegionClass) -> Vec<(PartKey, Bytes, u32)> {
        let mut used: Vec<(PartKey, Entry, u32)> = Vec::new();
        for key in &self.regions[number as usize].keys {
            let Some((_, entry)) = self.directory.find(key.object, key.index) else { continue };
            let listed = used.iter().any(|(other, ..)| other == key);
            if entry.region == number
                && !listed
                && let Some(access) = S3Fifo::survives(class, entry.access)
            {
                used.push((*key, entry, access));
            }
        }
        used.sort_by_key(|(_, entry, _)| std::cmp::Reverse(entry.access));
        let mut total = 0;
        let mut moving = Vec::new();
        for (key, entry, access) in used {
            total += entry.len as usize;
            if total > MOST_MOVED {
                break;
            }
            if let Some(bytes) = self.read_entry(&key, &entry) {
                moving.push((key, bytes, access));
            }
        }
        moving
    }

    /// Makes a region's parts invalid and the region free.
    fn empty_region(&mut self, number: u32, mut left: impl FnMut(&mut S3Fifo, PartKey, usize)) {
        let keys = std::mem::take(&mut self.regions[number as usize].keys);
        let (mut parts, mut bytes) = (0, 0);
        let mut slots = Vec::with_capacity(keys.len());
        for key in keys {
            if let Some((slot, entry)) = self.directory.find(key.object, key.index)
                && entry.region == number
            {
                slots.push((slot, key));
                parts += 1;
                bytes += u64::from(entry.len);
            }
        }
        self.directory.evict_region(number);
        for (slot, key) in slots {
            self.directory.remove(slot);
            self.parts = self.parts.saturating_sub(1);
            left(&mut self.policy, key, self.parts);
        }
        let region = &mut self.regions[number as usize];
        if region.class != RegionClass::Free {
            self.in_use -= 1;
        }
        (region.class, region.used) = (RegionClass::Free, 0);
        self.open.iter_mut().filter(|open| **open == Some(number)).for_each(|open| *open = None);
        self.save_state(number);
        self.directory.map().add(Counter::Evictions, parts);
        self.directory.map().add(Counter::EvictedBytes, bytes);
    }

    /// Gives up a region and whatever is in it.
    pub(super) fn discard_region(&mut self, number: u32) {
        self.policy.forget(number);
        self.empty_region(number, |_, _, _| {});
        self.punch(number);
    }

    fn punch(&mut self, number: u32) {
        if self.disk.punch(number).is_ok() {
            self.regions[number as usize].backed = false;
        }
    }

    /// Evicts the next region without moving anything, and gives its space back.
    pub(super) fn give_back_one(&mut self) -> bool {
        let free = |region: &Region| region.class == RegionClass::Free && region.backed;
        if let Some(number) = self.regions.iter().position(free) {
            self.punch(number as u32);
            return true;
        }
        let Some((number, _)) = self.policy.next_victim(self.limit) else { return false };
        self.discard_region(number);
        true
    }

    /// Drops every part.
    pub fn clear(&mut self) {
        for number in 0..self.regions.len() as u32 {
            let region = &self.regions[number as usize];
            if region.class != RegionClass::Free || region.backed {
                self.discard_region(number);
            }
        }
        self.policy.clear();
    }

    /// Brings the counters of present values up to date.
    pub(super) fn publish_sizes(&self) {
        let bytes = |regions: u32| u64::from(regions) * u64::from(REGION_BYTES);
        let map = self.directory.map();
        map.set(Counter::UsedBytes, bytes(self.in_use));
        map.set(Counter::LimitBytes, bytes(self.limit));
        map.set(Counter::Parts, self.parts as u64);
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
