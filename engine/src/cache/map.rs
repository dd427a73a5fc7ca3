use std::{
    cell::{Cell, RefCell},
    fs::File,
    io,
    path::{Path, PathBuf},
};

use super::{
    counters::{Counter, Counters},
    directory::{AccessPlace, DirectoryMap, OpenError},
    entry::Entry,
    layout::{REGION_BYTES, REGIONS_PER_SLAB, SLAB_BYTES, slab_name},
    mapping::Mapping,
};
use crate::ObjectId;

/// A cache mapped for reading: what one backend holds of it.
///
/// The addresses of all slabs are reserved at once, so that a part's address follows from its region;
/// a slab file is mapped there when a part of it is first wanted, and stays mapped while `self` lives.
#[derive(Debug)]
pub struct CacheMap {
    path: PathBuf,
    directory: DirectoryMap,
    slabs: Mapping,
    mapped: RefCell<Vec<bool>>,
    mended: Cell<u64>,
}

/// A part that is in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located {
    pub region: u32,
    pub offset: u32,
    pub len: u32,
    pub generation: u64,
    access: AccessPlace,
}

impl CacheMap {
    /// Maps the cache in this directory.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let directory = DirectoryMap::open(path)?;
        let slabs = directory.geometry().slabs();
        let bytes = usize::try_from(u64::from(slabs) * SLAB_BYTES)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self {
            path: path.to_path_buf(),
            directory,
            slabs: Mapping::reserve(bytes)?,
            mapped: RefCell::new(vec![false; slabs as usize]),
            mended: Cell::new(0),
        })
    }

    /// Names the directory file that is mapped.
    pub fn id(&self) -> ObjectId {
        self.directory.id()
    }

    /// Whether the cache was made anew since: open it again.
    pub fn is_retired(&self) -> bool {
        self.directory.is_retired()
    }

    /// Finds a part that may be read now.
    pub fn find(&self, object: ObjectId, index: u32) -> Option<Located> {
        let (Entry { region, offset, len, generation, .. }, access) =
            self.directory.find(object, index)?;
        if self.is_retired() || !self.map_slab(region / REGIONS_PER_SLAB) {
            return None;
        }
        Some(Located { region, offset, len, generation, access })
    }

    /// The part's first byte. Its bytes may change at any moment: read them through raw pointers and
    /// let them count only if [`CacheMap::is_unchanged`] holds afterwards.
    pub fn pointer(&self, part: &Located) -> Option<*const u8> {
        let at = u64::from(part.region) * u64::from(REGION_BYTES) + u64::from(part.offset);
        self.slabs.pointer(at as usize)
    }

    /// Copies the part's first bytes, whatever they are at this moment.
    pub fn copy_head<const N: usize>(&self, part: &Located) -> Option<[u8; N]> {
        let first = self.pointer(part).filter(|_| part.len as usize >= N)?;
        // SAFETY: the part lies within one mapped region, and N bytes within the part. The bytes may be
        // refilled meanwhile by another process, hence a volatile copy of plain bytes.
        Some(unsafe { first.cast::<[u8; N]>().read_volatile() })
    }

    /// Whether what was read of the part's region is what it was when the part was found, as far as
    /// eviction goes. A fault shows in [`CacheMap::faults`].
    pub fn is_unchanged(&self, region: u32, generation: u64) -> bool {
        self.directory.is_unchanged(region, generation)
    }

    /// [`CacheMap::is_unchanged`] for a reader that kept only the lower half of the generation.
    pub fn is_generation(&self, region: u32, lower_half: u32) -> bool {
        let generation = self.directory.generation(region);
        generation as u32 == lower_half && self.is_unchanged(region, generation)
    }

    /// Counts a use of the part, for the eviction policy.
    pub fn count_access(&self, part: &Located) {
        self.directory.count_access(part.access);
    }

    pub fn add(&self, counter: Counter, by: u64) {
        self.directory.add(counter, by);
    }

    pub fn counters(&self) -> Counters {
        self.directory.counters()
    }

    /// Faults under this map so far. A reader notes the number when it finds a part; if it grew, zeros
    /// may have been read in place of the part.
    pub fn faults(&self) -> u64 {
        self.slabs.faults() + self.directory.faults()
    }

    /// Maps the slab files again where a fault left a page of zeros.
    pub fn mend(&self) {
        let faults = self.slabs.faults();
        if self.mended.replace(faults) == faults {
            return;
        }
        let mapped = self.mapped.replace(vec![false; self.directory.geometry().slabs() as usize]);
        for (slab, _) in mapped.iter().enumerate().filter(|(_, mapped)| **mapped) {
            self.map_slab(slab as u32);
        }
    }

    fn map_slab(&self, slab: u32) -> bool {
        let mut mapped = self.mapped.borrow_mut();
        let Some(mapped) = mapped.get_mut(slab as usize) else { return false };
        if !*mapped {
            *mapped = self.place_slab(slab).is_ok();
        }
        *mapped
    }

    fn place_slab(&self, slab: u32) -> io::Result<()> {
        let file = File::open(self.path.join(slab_name(slab)))?;
        if file.metadata()?.len() != SLAB_BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let at = u64::from(slab) * SLAB_BYTES;
        self.slabs.place(at as usize, &file, SLAB_BYTES as usize)
    }
}

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
