//! The slab files.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use polign_engine::cache::{REGION_BYTES, REGIONS_PER_SLAB, SLAB_BYTES, slab_name};
use rustix::fs::{FallocateFlags, fallocate, fstatvfs, statvfs};

/// Free and total space of a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    pub available: u64,
    pub total: u64,
}

/// What was found wrong with the slab files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlabTrouble {
    /// Only regions before this one still have their bytes. The file has its full length again.
    Truncated { first_lost: u32, end: u32 },
    /// The file is not in the directory any more.
    Gone,
}

/// Where regions are stored; replaced in tests to inject faults.
pub trait Disk: Send {
    fn write_at(&mut self, region: u32, offset: u32, bytes: &[u8]) -> io::Result<()>;
    fn read_at(&mut self, region: u32, offset: u32, bytes: &mut [u8]) -> io::Result<()>;
    /// Gives the region's space back to the file system.
    fn punch(&mut self, region: u32) -> io::Result<()>;
    fn space(&self) -> io::Result<Space>;
    /// Looks at the files behind the regions in use and mends what can be mended.
    fn check(&mut self) -> Vec<SlabTrouble>;
    /// Whether the region's bytes can be in its file, without making the file.
    fn has(&mut self, region: u32) -> bool;
    /// Deletes all slab files.
    fn remove_all(&mut self) -> io::Result<()>;
}

#[derive(Debug)]
pub struct SlabFiles {
    cache: PathBuf,
    files: Vec<Option<File>>,
}

impl SlabFiles {
    pub fn new(cache: &Path) -> Self {
        Self { cache: cache.to_path_buf(), files: Vec::new() }
    }

    /// The slab file that holds a region, made if it is not there, and the region's place in it.
    fn slab(&mut self, region: u32) -> io::Result<(&File, u64)> {
        let number = region / REGIONS_PER_SLAB;
        let at = number as usize;
        if self.files.len() <= at {
            self.files.resize_with(at + 1, || None);
        }
        let slot = &mut self.files[at];
        if slot.is_none() {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let file = options.open(self.cache.join(slab_name(number)))?;
            if file.metadata()?.len() < SLAB_BYTES {
                file.set_len(SLAB_BYTES)?;
            }
            *slot = Some(file);
        }
        let place = u64::from(region % REGIONS_PER_SLAB) * u64::from(REGION_BYTES);
        slot.as_ref().map(|file| (file, place)).ok_or(io::ErrorKind::NotFound.into())
    }
}

impl Disk for SlabFiles {
    fn write_at(&mut self, region: u32, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let (file, place) = self.slab(region)?;
        file.write_all_at(bytes, place + u64::from(offset))
    }

    fn read_at(&mut self, region: u32, offset: u32, bytes: &mut [u8]) -> io::Result<()> {
        let (file, place) = self.slab(region)?;
        file.read_exact_at(bytes, place + u64::from(offset))
    }

    fn punch(&mut self, region: u32) -> io::Result<()> {
        let (file, place) = self.slab(region)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(file, flags, place, u64::from(REGION_BYTES)) {
            // The file system has no holes: the space stays taken until the file goes.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            outcome => Ok(outcome?),
        }
    }

    fn space(&self) -> io::Result<Space> {
        let stat = match self.files.iter().flatten().next() {
            Some(file) => fstatvfs(file)?,
            None => statvfs(&self.cache)?,
        };
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Space { available: bytes(stat.f_bavail), total: bytes(stat.f_blocks) })
    }

    fn check(&mut self) -> Vec<SlabTrouble> {
        let mut troubles = Vec::new();
        for (number, slot) in self.files.iter_mut().enumerate() {
            let Some(file) = slot else { continue };
            let path = self.cache.join(slab_name(number as u32));
            let here = file.metadata().and_then(|here| Ok((here, std::fs::metadata(&path)?)));
            let (len, same) = match &here {
                Ok((open, named)) => {
                    (open.len(), (open.dev(), open.ino()) == (named.dev(), named.ino()))
                }
                Err(_) => (0, false),
            };
            if !same {
                troubles.push(SlabTrouble::Gone);
            } else if len < SLAB_BYTES {
                let first = number as u32 * REGIONS_PER_SLAB;
                let first_lost = first + (len / u64::from(REGION_BYTES)) as u32;
                let end = first + REGIONS_PER_SLAB;
                troubles.push(match file.set_len(SLAB_BYTES) {
                    Ok(()) => SlabTrouble::Truncated { first_lost, end },
                    Err(_) => SlabTrouble::Gone,
                });
            }
        }
        troubles
    }

    fn has(&mut self, region: u32) -> bool {
        let number = region / REGIONS_PER_SLAB;
        let end = u64::from(region % REGIONS_PER_SLAB + 1) * u64::from(REGION_BYTES);
        let metadata = match self.files.get(number as usize) {
            // Opening makes the file as long as it should be, so an open one does not count.
            Some(Some(file)) => file.metadata(),
            _ => std::fs::metadata(self.cache.join(slab_name(number))),
        };
        metadata.is_ok_and(|metadata| metadata.len() >= end)
    }

    fn remove_all(&mut self) -> io::Result<()> {
        self.files.clear();
        for entry in std::fs::read_dir(&self.cache)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| name.starts_with("slab.")) {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}
