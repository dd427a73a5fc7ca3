//! The index relation and its buffers.

use std::ffi::CStr;

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::ObjectId;
use polign_pages::{Link, PAGE_LEN, PageError, PageKind, PageRef};

use crate::error::{Error, Result};

const _: () = assert!(pg_sys::BLCKSZ as usize == PAGE_LEN, "polign needs blocks of 8 kB");

/// Why an access to pages did not succeed.
#[derive(Debug)]
pub enum Fault {
    /// A page was recycled under the reader: read the meta page again and start over.
    Gone(Link),
    /// The statement has to fail.
    Error(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

pub type Access<T> = std::result::Result<T, Fault>;

/// Names a relation's storage within a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Storage {
    tablespace: pg_sys::Oid,
    database: pg_sys::Oid,
    number: pg_sys::Oid,
}

/// An open index relation of this access method.
#[derive(Debug, Clone, Copy)]
pub struct Index {
    relation: pg_sys::Relation,
    heap: pg_sys::Relation,
}

impl Index {
    /// # Safety
    /// `relation` is an index of this access method that stays open and locked as long as the result (or
    /// a copy of it) is used.
    pub unsafe fn new(relation: pg_sys::Relation) -> Self {
        Self { relation, heap: std::ptr::null_mut() }
    }

    /// The same index, where its table is known: freed pages can then be reused a little earlier.
    ///
    /// # Safety
    /// `heap` is null or the index's table, open as long as the result is used.
    pub unsafe fn with_heap(self, heap: pg_sys::Relation) -> Self {
        Self { heap, ..self }
    }

    /// The relation.
    pub fn relation(&self) -> pg_sys::Relation {
        self.relation
    }

    pub(super) fn heap(&self) -> pg_sys::Relation {
        self.heap
    }

    /// The index's OID.
    pub fn oid(&self) -> pg_sys::Oid {
        // SAFETY: the relation is open (see `new`).
        unsafe { (*self.relation).rd_id }
    }

    /// The index's name, for messages.
    pub fn name(&self) -> String {
        // SAFETY: the relation is open, its name NUL-terminated.
        unsafe { CStr::from_ptr((*(*self.relation).rd_rel).relname.data.as_ptr()) }
            .to_string_lossy()
            .into_owned()
    }

    /// Whether other processes see the index: it is not one of a temporary table.
    pub fn is_shared(&self) -> bool {
        // SAFETY: the relation is open.
        let persistence = unsafe { (*(*self.relation).rd_rel).relpersistence };
        persistence as u8 != pg_sys::RELPERSISTENCE_TEMP
    }

    /// Whether the transaction in progress made the index or its storage, so that others cannot see or lock
    /// it yet.
    pub fn is_of_this_transaction(&self) -> bool {
        // SAFETY: the relation is open.
        unsafe {
            // 0 is InvalidSubTransactionId.
            (*self.relation).rd_createSubid != 0
                || (*self.relation).rd_firstRelfilelocatorSubid != 0
        }
    }

    /// Names the storage that the relation has now.
    pub fn storage(&self) -> Storage {
        // SAFETY: the relation is open.
        let locator = unsafe { (*self.relation).rd_locator };
        Storage { tablespace: locator.spcOid, database: locator.dbOid, number: locator.relNumber }
    }

    /// The tablespace that the relation lies in.
    pub fn tablespace(&self) -> pg_sys::Oid {
        self.storage().tablespace
    }

    /// Blocks of the relation.
    pub fn blocks(&self) -> u32 {
        // SAFETY: the relation is open.
        unsafe {
            pg_sys::RelationGetNumberOfBlocksInFork(self.relation, pg_sys::ForkNumber::MAIN_FORKNUM)
        }
    }

    /// What to tell the user about a page that cannot be used.
    pub(super) fn damaged(&self, block: u32, error: PageError) -> Error {
        let name = self.name();
        match error {
            PageError::Version { .. } | PageError::Newer { .. } => Error::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                format!("index \"{name}\" has another format than this version of polign knows"),
            )
            .detail(format!("Block {block}: {error}."))
            .hint("Update the polign library, or REINDEX the index with this version."),
            _ => Error::new(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("index \"{name}\" is damaged at block {block}"),
            )
            .detail(format!("Reading the block: {error}."))
            .hint("REINDEX the index."),
        }
    }

    /// Sorts an error of a page that a link led to.
    pub(super) fn fault(&self, link: Link, error: PageError) -> Fault {
        match error {
            PageError::Gone => Fault::Gone(link),
            error => Fault::Error(self.damaged(link.block, error)),
        }
    }

    /// The error of a page that is gone where it cannot have been recycled.
    pub(super) fn settled(&self, fault: Fault) -> Error {
        match fault {
            Fault::Gone(link) => self.damaged(link.block, PageError::Gone),
            Fault::Error(error) => error,
        }
    }

    /// Repeats an access as long as pages are recycled under it. Each time somebody else has made
    /// progress, so after very many times the index is damaged.
    pub fn retry<T>(&self, mut access: impl FnMut() -> Access<T>) -> Result<T> {
        for _ in 0..1000 {
            pgrx::check_for_interrupts!();
            match access() {
                Ok(result) => return Ok(result),
                Err(Fault::Gone(_)) => (),
                Err(Fault::Error(error)) => return Err(error),
            }
        }
        access().map_err(|fault| self.settled(fault))
    }

    /// Pins a block of the main fork.
    pub(super) fn pin(&self, block: u32) -> Pin {
        // SAFETY: the relation is open; a block that does not exist is an ERROR.
        let buffer = unsafe {
            pg_sys::ReadBufferExtended(
                self.relation,
                pg_sys::ForkNumber::MAIN_FORKNUM,
                block,
                pg_sys::ReadBufferMode::RBM_NORMAL,
                std::ptr::null_mut(),
            )
        };
        Pin { buffer, block }
    }

    /// Pins a block and locks it to change it.
    pub(super) fn lock(&self, block: u32) -> Locked {
        self.pin(block).lock()
    }

    /// Copies the page that a link leads to.
    pub(super) fn copy(
        &self,
        link: Link,
        index_id: ObjectId,
        kind: PageKind,
        image: &mut PageImage,
    ) -> Access<()> {
        self.copy_block(link.block, image);
        match PageRef::follow(image.bytes(), index_id, link.stamp, kind) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.fault(link, error)),
        }
    }

    /// Copies a block of [`PAGE_LEN`] bytes as it is, for who looks at all of them.
    pub fn read_block(&self, block: u32, out: &mut [u8]) {
        self.pin(block).share(|bytes| out.copy_from_slice(bytes));
    }

    /// Copies a block as it is.
    pub(super) fn copy_block(&self, block: u32, image: &mut PageImage) {
        self.pin(block).share(|bytes| image.0.copy_from_slice(bytes));
    }

    /// Tells the server that blocks will be read soon.
    pub(super) fn prefetch(&self, blocks: impl Iterator<Item = u32>) {
        for block in blocks {
            // SAFETY: the relation is open; the call only starts a read.
            unsafe {
                pg_sys::PrefetchBuffer(self.relation, pg_sys::ForkNumber::MAIN_FORKNUM, block);
            }
        }
    }
}

/// Counts the pages of a chain, because damage can make it a circle.
pub(super) struct ChainGuard {
    steps: u32,
    limit: u32,
}

impl ChainGuard {
    pub fn new() -> Self {
        // The relation is only asked for its size when a chain is longer than this.
        Self { steps: 0, limit: 16 }
    }

    /// To be called for each page.
    pub fn step(&mut self, index: Index, link: Link) -> Result<()> {
        self.steps += 1;
        if self.steps > self.limit {
            self.limit = index.blocks();
            if self.steps > self.limit {
                let error = PageError::Content("the chain of pages leads in a circle");
                return Err(index.damaged(link.block, error));
            }
        }
        Ok(())
    }
}

/// A private copy of a page.
pub(super) struct PageImage(Box<[u8; PAGE_LEN]>);

impl PageImage {
    pub fn new() -> Self {
        Self(Box::new([0; PAGE_LEN]))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0[..]
    }

    /// The page, which [`Index::copy`] has checked.
    pub fn page(&self) -> std::result::Result<PageRef<'_>, PageError> {
        PageRef::parse(self.bytes())
    }
}

/// A pinned buffer. While the backend unwinds from an error, it is left to the end of the transaction:
/// Postgres has already reset what releasing it would count down.
pub(super) struct Pin {
    buffer: pg_sys::Buffer,
    block: u32,
}

impl Pin {
    /// # Safety
    /// The buffer is valid and its pin is given to the result.
    pub unsafe fn from_raw(buffer: pg_sys::Buffer) -> Self {
        // SAFETY: the buffer is pinned by contract.
        let block = unsafe { pg_sys::BufferGetBlockNumber(buffer) };
        Self { buffer, block }
    }

    pub fn block(&self) -> u32 {
        self.block
    }

    /// Calls `read` with the page under a share lock. `read` only copies or compares bytes.
    pub fn share<T>(&self, read: impl FnOnce(&[u8]) -> T) -> T {
        // SAFETY: the buffer is pinned, so its page stays where it is; the share lock keeps others from
        // changing the bytes while the slice lives.
        unsafe {
            pg_sys::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_SHARE as i32);
            let page = pg_sys::BufferGetPage(self.buffer).cast::<u8>();
            let result = read(std::slice::from_raw_parts(page, PAGE_LEN));
            pg_sys::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_UNLOCK as i32);
            result
        }
    }

    /// Locks the page to change it.
    pub fn lock(self) -> Locked {
        // SAFETY: the buffer is pinned.
        unsafe { pg_sys::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_EXCLUSIVE as i32) }
        Locked(self)
    }

    /// The same, if nobody else has it locked.
    pub fn try_lock(self) -> Option<Locked> {
        // SAFETY: the buffer is pinned.
        unsafe { pg_sys::ConditionalLockBuffer(self.buffer) }.then(|| Locked(self))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the pin is ours and this is its end.
            unsafe { pg_sys::ReleaseBuffer(self.buffer) }
        }
    }
}

/// A pinned buffer, exclusively locked.
pub(super) struct Locked(Pin);

impl Locked {
    pub fn block(&self) -> u32 {
        self.0.block
    }

    pub fn buffer(&self) -> pg_sys::Buffer {
        self.0.buffer
    }

    /// The page as it is in the buffer.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: pinned and exclusively locked by us for as long as `self` is borrowed.
        unsafe { std::slice::from_raw_parts(pg_sys::BufferGetPage(self.0.buffer).cast(), PAGE_LEN) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the lock is ours; the pin is released by the field.
            unsafe { pg_sys::LockBuffer(self.0.buffer, pg_sys::BUFFER_LOCK_UNLOCK as i32) }
        }
    }
}
