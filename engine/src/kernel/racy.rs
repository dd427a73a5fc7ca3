use std::{marker::PhantomData, ops::Range, ptr};

/// Bytes that another process may rewrite while they are read (a slot of the mapped cache).
///
/// There is never a `&[u8]` to such memory: values are copied out by raw reads, and what is used as a
/// length or an index is copied first and checked afterwards. A result counts only after the reader has
/// seen that the bytes did not change.
#[derive(Clone, Copy)]
pub struct RacyBytes<'a> {
    ptr: *const u8,
    len: usize,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: it only permits reads, of memory that stays mapped for 'a.
unsafe impl Send for RacyBytes<'_> {}
// SAFETY: as above.
unsafe impl Sync for RacyBytes<'_> {}

impl<'a> RacyBytes<'a> {
    /// A view of ordinary memory.
    #[inline]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { ptr: bytes.as_ptr(), len: bytes.len(), lifetime: PhantomData }
    }

    /// A view of `len` bytes from `ptr` on.
    ///
    /// # Safety
    /// The bytes must be mapped and readable for the whole of `'a`, and written during it by other
    /// processes only, if at all.
    #[inline]
    pub const unsafe fn from_raw_parts(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len, lifetime: PhantomData }
    }

    /// Number of bytes.
    #[inline]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The first byte's address; reads through it must be raw, and within [`RacyBytes::len`].
    #[inline]
    pub const fn as_ptr(self) -> *const u8 {
        self.ptr
    }

    /// A part of the bytes, if the range lies within them.
    #[inline]
    pub fn get(self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len {
            return None;
        }
        // SAFETY: the range lies within this view.
        let ptr = unsafe { self.ptr.add(range.start) };
        Some(Self { ptr, len: range.end - range.start, lifetime: PhantomData })
    }

    /// Copies the bytes at `offset` into `out`; false, and nothing copied, if there are not as many.
    #[inline]
    pub fn copy_to(self, offset: usize, out: &mut [u8]) -> bool {
        let Some(end) = offset.checked_add(out.len()) else { return false };
        if end > self.len {
            return false;
        }
        // SAFETY: the source range lies within this view and the target is exclusively borrowed.
        unsafe { ptr::copy_nonoverlapping(self.ptr.add(offset), out.as_mut_ptr(), out.len()) };
        true
    }

    /// A private copy of the bytes.
    pub fn copy_to_vec(self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        self.copy_to(0, &mut copy);
        copy
    }

    #[inline]
    fn read<const N: usize>(self, offset: usize) -> Option<[u8; N]> {
        if offset.checked_add(N)? > self.len {
            return None;
        }
        // SAFETY: the N bytes lie within this view, and a byte array needs no alignment. Volatile, so
        // that the value is read once and does not change under later checks.
        Some(unsafe { ptr::read_volatile(self.ptr.add(offset).cast::<[u8; N]>()) })
    }

    /// The u16 at `offset`, if it lies within the bytes.
    #[inline]
    pub fn read_u16_le(self, offset: usize) -> Option<u16> {
        self.read(offset).map(u16::from_le_bytes)
    }

    /// The u32 at `offset`, if it lies within the bytes.
    #[inline]
    pub fn read_u32_le(self, offset: usize) -> Option<u32> {
        self.read(offset).map(u32::from_le_bytes)
    }

    /// The u64 at `offset`, if it lies within the bytes.
    #[inline]
    pub fn read_u64_le(self, offset: usize) -> Option<u64> {
        self.read(offset).map(u64::from_le_bytes)
    }

    /// The f32 at `offset`, if it lies within the bytes.
    #[inline]
    pub fn read_f32_le(self, offset: usize) -> Option<f32> {
        self.read(offset).map(f32::from_le_bytes)
    }
}

impl<'a> From<&'a [u8]> for RacyBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::new(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for RacyBytes<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Self::new(bytes)
    }
}

impl std::fmt::Debug for RacyBytes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RacyBytes({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_checked() {
        let bytes: Vec<u8> = (0..12).collect();
        let view = RacyBytes::new(&bytes);
        assert_eq!(view.read_u32_le(8), Some(0x0b0a_0908));
        assert_eq!(view.read_u32_le(9), None);
        assert_eq!(view.read_u64_le(4), Some(0x0b0a_0908_0706_0504));
        assert_eq!(view.read_u64_le(usize::MAX), None);
        assert_eq!(view.read_u16_le(1), Some(0x0201));
        assert_eq!(view.read_f32_le(0), Some(f32::from_le_bytes([0, 1, 2, 3])));
        assert_eq!(view.get(3..5).unwrap().copy_to_vec(), [3, 4]);
        assert_eq!(view.get(12..12).unwrap().copy_to_vec(), [0; 0]);
        assert!(view.get(3..13).is_none());
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = view.get(4..3);
        assert!(reversed.is_none());
        let mut out = [0; 4];
        assert!(!view.copy_to(9, &mut out) && out == [0; 4]);
        assert!(view.copy_to(8, &mut out) && out == [8, 9, 10, 11]);
    }
}
