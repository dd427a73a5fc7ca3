//! The segment cache as its owner sees it: regions, policy, recovery, self-healing.
//!
//! Whatever happens to the files, the cache stays a cache: a part that cannot be kept is handed on
//! from memory, and a damaged file is made anew.

mod disk;
mod policy;
mod recover;
#[cfg(test)]
mod tests;
mod writer;

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
pub use disk::{Disk, SlabFiles, SlabTrouble, Space};
use polign_engine::{
    ObjectId,
    cache::{Counter, Counters, DIRECTORY_NAME, OpenError, REGION_BYTES},
    segment::PartKey,
};
pub use writer::{Active, Presence};

use crate::log::{Condition, warn};

/// A cache that could not be opened is tried again after this.
const REOPEN_PAUSE: Duration = Duration::from_secs(3);
/// Most regions given back in one check when the disk runs full.
const MOST_GIVEN_BACK: u32 = 64;

/// Makes the disk under a cache directory.
pub type MakeDisk = Box<dyn Fn(&Path) -> Box<dyn Disk> + Send>;

/// The time between two clears of the cache. What is brought for a request of an earlier era is not
/// kept, so that a cache stays empty when it was cleared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Era(u64);

/// The cache of one directory, shared by all tasks.
pub struct RegionCache {
    state: Mutex<State>,
    /// Raised with the state locked; read without, because every request asks for it.
    era: AtomicU64,
}

struct State {
    path: PathBuf,
    limit: u32,
    make_disk: MakeDisk,
    active: Option<Active>,
    /// Device and inode of the directory file when it was opened.
    identity: Option<(u64, u64)>,
    tried: Option<Instant>,
    /// Nothing that is in the directory may be taken over.
    anew: bool,
    /// Totals counted while there was no directory file.
    pending: Vec<(Counter, u64)>,
    works: Condition,
    writes: Condition,
}

impl RegionCache {
    /// Opens the cache in a directory, which exists. Never fails: without a cache, parts are handed on
    /// from memory, and opening is tried again.
    pub fn open(path: &Path, bytes: u64) -> Self {
        Self::with_disk(path, bytes, Box::new(|path| Box::new(SlabFiles::new(path))))
    }

    pub fn with_disk(path: &Path, bytes: u64, make_disk: MakeDisk) -> Self {
        let mut state = State {
            path: path.to_path_buf(),
            limit: regions_of(bytes),
            make_disk,
            active: None,
            identity: None,
            tried: None,
            anew: false,
            pending: Vec::new(),
            works: Condition::new("the cache"),
            writes: Condition::new("writing to the cache"),
        };
        state.start(false);
        Self { state: Mutex::new(state), era: AtomicU64::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in the middle of a change may have left the bookkeeping wrong; the files' own checks
        // (generation, checksum) still hold.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Names the directory file, [`ObjectId::NIL`] if there is none.
    pub fn id(&self) -> ObjectId {
        self.state().active.as_ref().map_or(ObjectId::NIL, |active| active.directory.map().id())
    }

    /// The era of a request that comes now.
    pub fn era(&self) -> Era {
        Era(self.era.load(Ordering::Acquire))
    }

    /// Which of the parts may be read where they are. Those from before the last start are checked.
    pub fn present(&self, keys: &[PartKey]) -> Vec<bool> {
        // Locked for each part alone: checking one may read it from the disk.
        keys.iter().map(|key| self.state().is_present(key)).collect()
    }

    /// Publishes parts whose bytes were verified, for a request of `era`. False for those that the cache
    /// cannot take now, and for all that come after a clear.
    pub fn insert(&self, parts: &[(PartKey, Bytes)], era: Era) -> Vec<bool> {
        let insert = |(key, bytes): &(PartKey, Bytes)| {
            // Locked for each part alone, so that a long run of parts does not hold others up.
            let mut state = self.state();
            self.era() == era && state.insert(*key, bytes)
        };
        parts.iter().map(insert).collect()
    }

    /// A part's bytes, if they are here and sound.
    pub fn read(&self, key: &PartKey) -> Option<Bytes> {
        self.state().active.as_mut()?.read(key)
    }

    pub fn drop_parts(&self, keys: &[PartKey]) {
        if let Some(active) = &mut self.state().active {
            keys.iter().for_each(|key| active.drop_part(key));
        }
    }

    /// Drops every part, and begins a new era.
    pub fn clear(&self) {
        let mut state = self.state();
        self.era.fetch_add(1, Ordering::Release);
        match &mut state.active {
            Some(active) => {
                active.clear();
                active.publish_sizes();
            }
            // What lies in the directory would be there again when it can be opened.
            None => state.start(true),
        }
    }

    /// Sets the cache's size, in whole regions.
    pub fn resize(&self, bytes: u64) {
        let mut state = self.state();
        state.limit = regions_of(bytes);
        state.apply_limit();
    }

    pub fn add(&self, counter: Counter, by: u64) {
        let mut state = self.state();
        match &state.active {
            Some(active) => active.directory.map().add(counter, by),
            None => state.pending.push((counter, by)),
        }
    }

    pub fn counters(&self) -> Option<Counters> {
        Some(self.state().active.as_ref()?.directory.map().counters())
    }

    /// Looks whether the files are still what they should be, and mends what is not. Called now and
    /// then, and when a backend distrusts what it found.
    pub fn look_after(&self) {
        let mut state = self.state();
        if state.active.is_none() {
            if state.tried.is_none_or(|tried| tried.elapsed() >= REOPEN_PAUSE) {
                state.start(false);
            }
            return;
        }
        if !state.directory_is_sound() {
            warn("the cache's directory file was replaced, damaged or deleted: starting anew");
            state.start(true);
            return;
        }
        let Some(active) = &mut state.active else { return };
        let troubles = active.disk.check();
        if troubles.contains(&SlabTrouble::Gone) {
            warn("a file of the cache was deleted: starting anew");
            state.start(true);
            return;
        }
        for trouble in troubles {
            if let SlabTrouble::Truncated { first_lost, end } = trouble {
                warn("a file of the cache was truncated: dropping what was in it");
                let end = end.min(active.regions.len() as u32);
                (first_lost..end).for_each(|region| active.discard_region(region));
            }
        }
        let mut given_back = 0;
        while active.spare_space() < 0 && given_back < MOST_GIVEN_BACK && active.give_back_one() {
            given_back += 1;
        }
        active.publish_sizes();
    }
}

impl State {
    fn is_present(&mut self, key: &PartKey) -> bool {
        let Some(active) = &mut self.active else { return false };
        match active.presence(key) {
            Presence::Shown => true,
            Presence::Unchecked => active.check(key),
            Presence::Absent => false,
        }
    }

    fn insert(&mut self, key: PartKey, bytes: &[u8]) -> bool {
        let Some(active) = &mut self.active else { return false };
        let outcome = active.insert(key, bytes);
        active.publish_sizes();
        match outcome {
            Ok(true) => {
                self.writes.good();
                return true;
            }
            Ok(false) => self.writes.bad("the disk has no space to spare"),
            Err(error) => self.writes.bad(&error),
        }
        false
    }

    /// Opens the cache; `anew`: without looking at what is there, now or whenever it succeeds.
    fn start(&mut self, anew: bool) {
        self.anew |= anew;
        let counters = self.active.as_ref().map(|active| {
            active.directory.retire();
            active.directory.map().counters()
        });
        self.active = None;
        self.tried = Some(Instant::now());
        let disk = (self.make_disk)(&self.path);
        let opened = match self.anew {
            true => recover::create(&self.path, self.limit, disk),
            false => recover::open(&self.path, self.limit, disk),
        };
        match opened.and_then(|active| Ok((directory_identity(&self.path)?, active))) {
            Ok((identity, active)) => {
                if let Some(counters) = counters {
                    recover::carry_counters(&counters, &active.directory);
                    active.publish_sizes();
                }
                for (counter, by) in self.pending.drain(..) {
                    active.directory.map().add(counter, by);
                }
                self.identity = Some(identity);
                self.active = Some(active);
                self.anew = false;
                self.works.good();
            }
            Err(error) => self.works.bad(&error),
        }
    }

    fn apply_limit(&mut self) {
        let Some(active) = &mut self.active else { return };
        match recover::resize(active, &self.path, self.limit) {
            Ok(()) => self.identity = directory_identity(&self.path).ok(),
            Err(error) => warn(&format!("the cache cannot grow: {error}")),
        }
    }

    fn directory_is_sound(&self) -> bool {
        let Some(active) = &self.active else { return false };
        let map = active.directory.map();
        map.faults() == 0
            && !map.is_retired()
            && directory_identity(&self.path).ok() == self.identity
            && fs::metadata(self.path.join(DIRECTORY_NAME))
                .is_ok_and(|file| file.len() == map.geometry().file_bytes() as u64)
    }
}

fn directory_identity(cache: &Path) -> Result<(u64, u64), OpenError> {
    let file = fs::metadata(cache.join(DIRECTORY_NAME))?;
    Ok((file.dev(), file.ino()))
}

fn regions_of(bytes: u64) -> u32 {
    u32::try_from(bytes / u64::from(REGION_BYTES)).unwrap_or(u32::MAX)
}
