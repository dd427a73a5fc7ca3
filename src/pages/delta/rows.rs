//! The delta as a scan sees it: a per-backend copy, brought up to date page by page.
//!
//! Pages behind the last one of the chain change only when VACUUM marks rows dead, which the counter
//! `marks` in the meta page tells, or when a flush publishes, which the epoch tells. So as long as both
//! stand still only the last page that was seen, and pages after it, need a look: a scan over an
//! unchanged delta costs one pin beyond the meta page's.
//!
//! A copy from before the marks were counted is harmless: until then the heap does not reuse the dead
//! rows' TIDs, and no snapshot sees the rows themselves.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use polign_engine::{
    ObjectId,
    kernel::RacyBytes,
    quantize::{
        CellTerm, Query,
        plane1::{self, BLOCK_ROWS, Plane1RowRef, Shape},
    },
    search::DeltaScores,
};
use polign_pages::{
    Link, PageError, PageKind, PageRef,
    codes::{Codes, VectorRef},
};

use super::super::{
    meta::Meta,
    relation::{Access, ChainGuard, Index, PageImage, Storage},
};

/// Rows of one cell: whole blocks for the SIMD scan, and what does not fill one.
#[derive(Debug, Clone, Default)]
struct CellRows {
    handles: Vec<u32>,
    blocks: Vec<u8>,
    rest: Vec<u8>,
}

impl CellRows {
    fn push(&mut self, shape: Shape, handle: u32, code: &[u8]) {
        self.handles.push(handle);
        self.rest.extend_from_slice(code);
        if self.rest.len() == BLOCK_ROWS * code.len() {
            let rows = single_rows(shape, &self.rest);
            let rows: Vec<_> = rows.collect();
            plane1::blocks_from_rows(shape, &rows, &mut self.blocks);
            self.rest.clear();
        }
    }
}

fn single_rows(shape: Shape, bytes: &[u8]) -> impl Iterator<Item = Plane1RowRef<'_>> {
    let Shape { padded_dim, bits, .. } = shape;
    bytes
        .chunks_exact(plane1::row_bytes(padded_dim, bits))
        .filter_map(move |row| Plane1RowRef::from_bytes(row, padded_dim, bits))
}

/// Live rows of pages that are not the last of the chain.
#[derive(Debug, Clone)]
struct Sealed {
    ids: Vec<u64>,
    vectors: Vec<VectorRef>,
    cells: HashMap<u32, CellRows>,
}

/// Live rows of the last page.
#[derive(Debug, Default)]
struct Tail {
    ids: Vec<u64>,
    vectors: Vec<VectorRef>,
    cells: Vec<u32>,
    codes: Vec<u8>,
}

/// The rows of the delta as of one moment. Rows are named by handles.
#[derive(Debug, Clone)]
pub struct DeltaRows {
    shape: Shape,
    index_id: ObjectId,
    sealed: Rc<Sealed>,
    tail: Rc<Tail>,
    newest: u64,
}

/// What a backend remembers of an index's delta.
struct Cached {
    index_id: ObjectId,
    epoch: u64,
    marks: u64,
    head: Option<Link>,
    /// The page that was last when it was copied, and its version then.
    last: Option<(Link, (u64, u32))>,
    rows: DeltaRows,
}

/// More indexes than this in one backend: forget them all rather than grow.
const MAX_CACHED: usize = 64;

thread_local! {
    static CACHE: RefCell<HashMap<Storage, Cached>> = RefCell::new(HashMap::new());
}

impl DeltaRows {
    fn empty(meta: &Meta) -> Self {
        let shape = Shape {
            padded_dim: meta.padded_dim as usize,
            bits: usize::from(meta.bits),
            metric: meta.metric,
        };
        let sealed = Sealed { ids: vec![], vectors: vec![], cells: HashMap::new() };
        Self {
            shape,
            index_id: meta.index_id,
            sealed: Rc::new(sealed),
            tail: Rc::default(),
            newest: 0,
        }
    }

    /// The delta that `meta`, just read, leads to. The result counts only if the meta page, read again
    /// afterwards, has the same index id and epoch.
    pub fn read(index: Index, meta: &Meta) -> Access<Self> {
        let storage = index.storage();
        let cached = CACHE.with_borrow_mut(|cache| cache.remove(&storage)).filter(|cached| {
            cached.index_id == meta.index_id
                && cached.epoch == meta.epoch
                && cached.marks == meta.delta.marks
                && cached.head == meta.delta.head
        });
        let mut cached = cached.unwrap_or_else(|| Cached {
            index_id: meta.index_id,
            epoch: meta.epoch,
            marks: meta.delta.marks,
            head: meta.delta.head,
            last: None,
            rows: Self::empty(meta),
        });
        // When this fails, what was remembered is forgotten.
        cached.advance(index)?;
        let rows = cached.rows.clone();
        CACHE.with_borrow_mut(|cache| {
            if cache.len() >= MAX_CACHED {
                cache.clear();
            }
            cache.insert(storage, cached);
        });
        Ok(rows)
    }

    /// How many live rows there are.
    pub fn len(&self) -> usize {
        self.sealed.ids.len() + self.tail.ids.len()
    }

    /// Whether there is no live row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The handles of all live rows.
    pub fn handles(&self) -> std::ops::Range<u32> {
        0..self.len() as u32
    }

    /// The cells that rows were put into when they were inserted, each at least once.
    pub fn cells(&self) -> impl Iterator<Item = u32> {
        self.sealed.cells.keys().copied().chain(self.tail.cells.iter().copied())
    }

    /// The heap TID of a row as `block << 16 | offset`.
    pub fn id(&self, handle: u32) -> u64 {
        let handle = handle as usize;
        match handle.checked_sub(self.sealed.ids.len()) {
            None => self.sealed.ids[handle],
            Some(slot) => self.tail.ids[slot],
        }
    }

    /// Where the refinement record of a row is.
    pub(super) fn vector(&self, handle: u32) -> VectorRef {
        let handle = handle as usize;
        match handle.checked_sub(self.sealed.vectors.len()) {
            None => self.sealed.vectors[handle],
            Some(slot) => self.tail.vectors[slot],
        }
    }

    /// The largest LSN of the pages that were copied.
    pub(in crate::pages) fn newest_lsn(&self) -> u64 {
        self.newest
    }

    pub(super) fn index_id(&self) -> ObjectId {
        self.index_id
    }

    pub(super) fn padded_dim(&self) -> usize {
        self.shape.padded_dim
    }

    /// Calls `visit` with the handles of the rows that were put into a cell.
    pub fn for_each_in(&self, cell: u32, mut visit: impl FnMut(u32)) {
        if let Some(rows) = self.sealed.cells.get(&cell) {
            rows.handles.iter().copied().for_each(&mut visit);
        }
        let first = self.sealed.ids.len() as u32;
        for (handle, &of) in (first..).zip(&self.tail.cells) {
            if of == cell {
                visit(handle);
            }
        }
    }

    /// Appends estimate, statistical bound and handle of the rows of a cell, relative to that cell.
    pub fn score(
        &self,
        cell: u32,
        query: &Query,
        term: CellTerm,
        epsilon: f32,
        out: &mut DeltaScores<'_>,
    ) {
        let bits = self.shape.bits;
        if let Some(rows) = self.sealed.cells.get(&cell) {
            let blocks = RacyBytes::new(&rows.blocks);
            plane1::scan(blocks, bits, query, term, epsilon, out.est, out.lower);
            let in_blocks =
                rows.blocks.len() / plane1::block_bytes(self.shape.padded_dim, bits) * BLOCK_ROWS;
            out.handles.extend_from_slice(&rows.handles[..in_blocks]);
            let rest = single_rows(self.shape, &rows.rest);
            for (&handle, row) in rows.handles[in_blocks..].iter().zip(rest) {
                let (est, lower) = plane1::estimate_row(query, bits, term, epsilon, row);
                out.push(handle, est, lower);
            }
        }
        let first = self.sealed.ids.len() as u32;
        let rows = single_rows(self.shape, &self.tail.codes);
        for ((handle, &of), row) in (first..).zip(&self.tail.cells).zip(rows) {
            if of == cell {
                let (est, lower) = plane1::estimate_row(query, bits, term, epsilon, row);
                out.push(handle, est, lower);
            }
        }
    }
}

impl Cached {
    /// Goes on from the page that was last to the one that is last now.
    fn advance(&mut self, index: Index) -> Access<()> {
        let mut link = match self.last {
            Some((last, _)) => last,
            None => match self.head {
                Some(head) => head,
                None => return Ok(()),
            },
        };
        let mut image = None;
        let mut guard = ChainGuard::new();
        loop {
            pgrx::check_for_interrupts!();
            guard.step(index, link)?;
            if let Some((last, version)) = self.last
                && last == link
                && unchanged(index, self.index_id, link, version)
            {
                return Ok(());
            }
            let image = image.get_or_insert_with(PageImage::new);
            index.copy(link, self.index_id, PageKind::Codes, image)?;
            let page = image.page().map_err(|error| index.fault(link, error))?;
            let codes = self.check(page).map_err(|error| index.fault(link, error))?;
            self.rows.newest = self.rows.newest.max(page.version().0);
            match page.next() {
                Some(next) => {
                    self.rows.seal(&codes);
                    self.last = None;
                    link = next;
                }
                None => {
                    self.rows.set_tail(&codes);
                    self.last = Some((link, page.version()));
                    return Ok(());
                }
            }
        }
    }

    fn check<'a>(&self, page: PageRef<'a>) -> Result<Codes<'a>, PageError> {
        let codes = Codes::parse(page)?;
        let Shape { padded_dim, bits, .. } = self.rows.shape;
        if codes.code_len() != plane1::row_bytes(padded_dim, bits) {
            return Err(PageError::Content("codes of another length than this index has"));
        }
        Ok(codes)
    }
}

/// Whether a page is as it was when it was copied.
fn unchanged(index: Index, index_id: ObjectId, link: Link, version: (u64, u32)) -> bool {
    index.pin(link.block).share(|bytes| {
        PageRef::follow(bytes, index_id, link.stamp, PageKind::Codes)
            .is_ok_and(|page| page.version() == version)
    })
}

impl DeltaRows {
    fn seal(&mut self, codes: &Codes<'_>) {
        self.tail = Rc::default();
        // Copies only if a scan of this backend still uses it.
        let sealed = Rc::make_mut(&mut self.sealed);
        for entry in codes.entries().filter(|entry| !entry.dead) {
            let handle = sealed.ids.len() as u32;
            sealed.ids.push(entry.id);
            sealed.vectors.push(entry.vector);
            sealed.cells.entry(entry.cell).or_default().push(self.shape, handle, entry.code);
        }
    }

    fn set_tail(&mut self, codes: &Codes<'_>) {
        let mut tail = Tail::default();
        for entry in codes.entries().filter(|entry| !entry.dead) {
            tail.ids.push(entry.id);
            tail.vectors.push(entry.vector);
            tail.cells.push(entry.cell);
            tail.codes.extend_from_slice(entry.code);
        }
        self.tail = Rc::new(tail);
    }
}
