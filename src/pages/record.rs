//! One generic WAL record: up to four pages that change together.

use pgrx::pg_sys;
use polign_engine::ObjectId;
use polign_pages::{Link, PAGE_LEN, PageError, PageKind, PageMut};

use super::relation::{Index, Locked};

/// A record under construction. Dropped unfinished, it changes nothing.
pub(super) struct Record {
    state: *mut pg_sys::GenericXLogState,
    pages: Vec<(Locked, *mut u8)>,
}

/// Names a page of a record.
#[derive(Clone, Copy)]
pub(super) struct At(usize);

impl Record {
    /// Starts a record. Comes before the content locks of its pages, because it allocates.
    pub fn start(index: Index) -> Self {
        let pages = Vec::with_capacity(pg_sys::MAX_GENERIC_XLOG_PAGES as usize);
        // SAFETY: the relation is open.
        let state = unsafe { pg_sys::GenericXLogStart(index.relation()) };
        Self { state, pages }
    }

    fn add(&mut self, page: Locked, flags: u32) -> At {
        // SAFETY: the buffer is locked exclusively; more than four pages are an ERROR. The image that is
        // returned belongs to the state, and is copied to the buffer when the record is finished.
        let image =
            unsafe { pg_sys::GenericXLogRegisterBuffer(self.state, page.buffer(), flags as i32) };
        self.pages.push((page, image.cast()));
        At(self.pages.len() - 1)
    }

    /// Adds an existing page, to be changed.
    pub fn change(&mut self, page: Locked) -> At {
        self.add(page, 0)
    }

    /// Adds a free block and makes it a page of a kind.
    pub fn create(
        &mut self,
        page: Locked,
        kind: PageKind,
        index_id: ObjectId,
    ) -> Result<(At, Link), PageError> {
        let block = page.block();
        let at = self.add(page, pg_sys::GENERIC_XLOG_FULL_IMAGE);
        let (_, stamp) = PageMut::init(self.image(at), kind, index_id)?;
        Ok((at, Link { block, stamp }))
    }

    fn image(&mut self, at: At) -> &mut [u8] {
        // SAFETY: the state lives as long as `self`, its images are of this size, apart from each other
        // and from the buffers, and borrowed through `self` only.
        unsafe { std::slice::from_raw_parts_mut(self.pages[at.0].1, PAGE_LEN) }
    }

    /// A page of the record, to be changed.
    pub fn page(&mut self, at: At) -> Result<PageMut<'_>, PageError> {
        PageMut::open(self.image(at))
    }

    /// Logs and applies the changes, and releases the pages. Gives the end of the record in the log, 0
    /// where nothing is logged.
    pub fn finish(mut self) -> u64 {
        // SAFETY: the state is open, and not used again.
        let lsn = unsafe { pg_sys::GenericXLogFinish(self.state) };
        self.state = std::ptr::null_mut();
        lsn
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if !self.state.is_null() && !std::thread::panicking() {
            // SAFETY: the state is open, and not used again.
            unsafe { pg_sys::GenericXLogAbort(self.state) }
        }
    }
}
