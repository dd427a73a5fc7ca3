use std::{
    fs::File,
    io,
    os::fd::AsFd,
    ptr::{self, NonNull},
    sync::atomic::AtomicU64,
};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::sigbus::{Access, Guard};

/// A range of addresses that is guarded against SIGBUS and unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    guard: Guard,
}

// SAFETY: the range belongs to this value alone, and what is in it is reached through atomics or raw
// pointers only.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives no access that is not atomic or raw.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file, shared, for reading and writing.
    pub fn of_file(file: &File, len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new range at an address that the kernel chooses.
        let base = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)? };
        Self::adopt(base.cast(), len, Access::ReadWrite)
    }

    /// Reserves addresses, which may not be read until files are mapped there.
    pub fn reserve(len: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new range at an address that the kernel chooses.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags)? };
        Self::adopt(base.cast(), len, Access::Read)
    }

    fn adopt(base: *mut u8, len: usize, access: Access) -> io::Result<Self> {
        let unmap = || {
            // SAFETY: just mapped with this length, and nobody has the address yet.
            unsafe { munmap(base.cast(), len).ok() };
        };
        let Some(start) = NonNull::new(base) else {
            unmap();
            return Err(io::ErrorKind::AddrNotAvailable.into());
        };
        match Guard::register(base as usize, len, access) {
            Ok(guard) => Ok(Self { base: start, len, guard }),
            Err(error) => {
                unmap();
                Err(error)
            }
        }
    }

    /// Maps `len` bytes of a file over the range from `at`, for reading. What was there is replaced at
    /// once: no address in the range is ever unmapped.
    pub fn place(&self, at: usize, file: impl AsFd, len: usize) -> io::Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces pages within a range of this mapping, checked above.
        unsafe { mmap(self.base.as_ptr().add(at).cast(), len, ProtFlags::READ, flags, file, 0)? };
        Ok(())
    }

    pub fn pointer(&self, at: usize) -> Option<*const u8> {
        // SAFETY: within the range.
        (at < self.len).then(|| unsafe { self.base.as_ptr().add(at) }.cast_const())
    }

    /// The range as words. Only for a mapping of a file.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: page-aligned, `len` bytes, mapped for as long as `self` lives; other processes change
        // the words, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len / 8) }
    }

    /// How many faults were mended in this range so far.
    pub fn faults(&self) -> u64 {
        self.guard.faults()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard.release();
        // SAFETY: mapped with this length by the constructor; borrows of it have ended.
        unsafe { munmap(self.base.as_ptr().cast(), self.len).ok() };
    }
}
