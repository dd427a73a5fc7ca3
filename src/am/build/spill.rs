//! A temporary file of Postgres for records that do not fit in memory.

use std::io;

use pgrx::pg_sys;
use polign_engine::build::SpillFile;

/// A `BufFile`, created when it is first written to. Postgres deletes it at the end of the transaction,
/// whatever happens, and counts it against `temp_file_limit`.
#[derive(Default)]
pub struct TemporaryFile {
    file: Option<*mut pg_sys::BufFile>,
    len: u64,
}

/// Files behind a `BufFile` have this size; positions in it are (file, offset).
const SEGMENT: u64 = 1 << 30;

impl TemporaryFile {
    fn seek(file: *mut pg_sys::BufFile, offset: u64) -> io::Result<()> {
        let (number, within) = ((offset / SEGMENT) as i32, (offset % SEGMENT) as i64);
        // SAFETY: the file is open.
        match unsafe { pg_sys::BufFileSeek(file, number, within, libc::SEEK_SET) } {
            0 => Ok(()),
            _ => Err(io::Error::other("could not seek in a temporary file")),
        }
    }
}

impl SpillFile for TemporaryFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<u64> {
        // SAFETY: raises an error that names the cause when no file can be created or written.
        unsafe {
            let file = *self.file.get_or_insert_with(|| pg_sys::BufFileCreateTemp(false));
            Self::seek(file, self.len)?;
            pg_sys::BufFileWrite(file, bytes.as_ptr().cast(), bytes.len());
        }
        let offset = self.len;
        self.len += bytes.len() as u64;
        Ok(offset)
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let Some(file) = self.file else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        Self::seek(file, offset)?;
        // SAFETY: the file is open, the buffer as long as is said; a short read raises an error.
        unsafe { pg_sys::BufFileReadExact(file, out.as_mut_ptr().cast(), out.len()) };
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.take()
            && !std::thread::panicking()
        {
            // SAFETY: open, and not used again. While an error unwinds, the transaction's end closes it.
            unsafe { pg_sys::BufFileClose(file) }
        }
    }
}
