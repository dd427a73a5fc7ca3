//! The delta on its way to the store: sealing a generation, copying its rows, and what died meanwhile.

use polign_engine::{ObjectId, quantize::plane2};
use polign_pages::{
    Link, PageError, PageKind, PageRef,
    codes::{self, Codes},
};

use super::{
    super::{
        free::{Spare, free_pages},
        meta::{self, Meta},
        record::Record,
        relation::{Access, ChainGuard, Fault, Index, PageImage},
    },
    insert::find_tail,
    record::read_record,
    vacuum::vector_links,
};
use crate::{error::Result, failpoint};

/// No further generation is copied when there are so many bytes of records.
const BATCH_BYTES: usize = 16 << 20;

/// Sealed rows of the delta, copied: the oldest generations.
#[derive(Debug, Default)]
pub struct SealedRows {
    /// The cell of each row as of its insertion.
    pub cells: Vec<u32>,
    /// The plane-2 record of each row.
    pub records: Vec<u8>,
    sources: Vec<(Link, u16)>,
    /// The pages that hold them, of both kinds.
    pages: Vec<Link>,
    /// The first generation that was not copied.
    end: u64,
}

impl SealedRows {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.cells.len()
    }

    /// Where the delta begins when these rows are out of it: at the first page of a generation that was not
    /// copied. It is looked for now, because VACUUM has unlinked pages since; it never unlinks the last.
    /// The caller holds the layout lock exclusively.
    pub fn next_head(&self, index: Index, meta: &Meta) -> Result<Option<Link>> {
        let mut image = PageImage::new();
        let mut guard = ChainGuard::new();
        let mut link = meta.delta.head;
        while let Some(here) = link {
            pgrx::check_for_interrupts!();
            guard.step(index, here)?;
            let copied = index.copy(here, meta.index_id, PageKind::Codes, &mut image);
            copied.map_err(|fault| index.settled(fault))?;
            let damaged = |error| index.damaged(here.block, error);
            let page = image.page().map_err(damaged)?;
            if Codes::parse(page).map_err(damaged)?.generation() >= self.end {
                return Ok(Some(here));
            }
            link = page.next();
        }
        let error = PageError::Content("the delta has no generation that takes rows");
        Err(index.damaged(meta.delta.head.map_or(0, |head| head.block), error))
    }

    /// Frees the pages that held the rows, when the delta begins behind them.
    pub fn free(&self, index: Index, index_id: ObjectId) -> Result<u32> {
        free_pages(index, index_id, self.pages.iter().copied())
    }

    /// The positions of the rows that are marked dead by now, ascending. The caller holds the layout lock.
    pub fn dead(&self, index: Index, index_id: ObjectId) -> Result<Vec<u32>> {
        let mut dead = Vec::new();
        let mut image = PageImage::new();
        let mut first = 0u32;
        for page in self.sources.chunk_by(|a, b| a.0 == b.0) {
            pgrx::check_for_interrupts!();
            let link = page[0].0;
            let rows = (first..).zip(page);
            match index.copy(link, index_id, PageKind::Codes, &mut image) {
                Ok(()) => {
                    let damaged = |error| index.damaged(link.block, error);
                    let page = image.page().map_err(damaged)?;
                    let codes = Codes::parse(page).map_err(damaged)?;
                    // Only VACUUM frees pages that are still linked: those of which all rows are dead.
                    let is_dead =
                        |slot| page.is_freed() || codes.entry(slot).is_none_or(|entry| entry.dead);
                    dead.extend(rows.filter(|(_, (_, slot))| is_dead(*slot)).map(|(row, _)| row));
                }
                Err(Fault::Gone(_)) => dead.extend(rows.map(|(row, _)| row)),
                Err(Fault::Error(error)) => return Err(error),
            }
            first += page.len() as u32;
        }
        Ok(dead)
    }
}

/// Closes the newest generation, so that all rows inserted until now can be flushed. Gives the number of
/// the generation that takes rows from now on; none if the delta is empty.
pub fn seal(index: Index) -> Result<Option<u64>> {
    let mut use_hint = true;
    index.retry(|| {
        loop {
            pgrx::check_for_interrupts!();
            match try_seal(index, use_hint) {
                Ok(Some(sealed)) => return Ok(sealed),
                // Someone added a page or took the free one meanwhile.
                Ok(None) => (),
                Err(fault) => {
                    use_hint = false;
                    return Err(fault);
                }
            }
        }
    })
}

fn try_seal(index: Index, use_hint: bool) -> Access<Option<Option<u64>>> {
    let meta = meta::read(index)?;
    let Some(head) = meta.delta.head else { return Ok(Some(None)) };
    let spare = Spare::find(index);
    let mut record = Record::start(index);
    let start = meta.delta.tail_hint.filter(|_| use_hint).unwrap_or(head);
    let (pin, link, _) = find_tail(index, meta.index_id, start)?;
    let tail = pin.lock();
    let fault = |error| index.fault(link, error);
    let page = PageRef::follow(tail.bytes(), meta.index_id, link.stamp, PageKind::Codes);
    let page = page.map_err(fault)?;
    if page.next().is_some() {
        return Ok(None);
    }
    let codes = Codes::parse(page).map_err(fault)?;
    let (generation, code_len) = (codes.generation(), codes.code_len());
    let position = codes.position().wrapping_add(1);
    if codes.is_empty() {
        // An earlier flush sealed what came before, if anything did.
        return Ok(Some(Some(generation)));
    }
    let tail = record.change(tail);
    let Some(locked) = spare.take() else { return Ok(None) };
    let block = locked.block();
    let damaged = |error| Fault::Error(index.damaged(block, error));
    let (at, new) = record.create(locked, PageKind::Codes, meta.index_id).map_err(damaged)?;
    record
        .page(at)
        .and_then(|mut page| codes::init(&mut page, generation + 1, position, code_len))
        .map_err(damaged)?;
    record.page(tail).map_err(fault)?.set_next(Some(new));
    failpoint::pass("seal: before");
    record.finish();
    failpoint::pass("seal: after");
    let hint = meta.delta.tail_hint;
    meta::update(index, |meta| {
        if meta.delta.tail_hint == hint {
            meta.delta.tail_hint = Some(new);
        }
        Ok(())
    })?;
    Ok(Some(Some(generation + 1)))
}

/// Copies the rows of the oldest generations before `end` that are not marked dead, whatever became of
/// the transactions that inserted them; none if the delta begins with `end`.
pub fn copy(index: Index, end: u64) -> Result<Option<SealedRows>> {
    let rows = index.retry(|| {
        let meta = meta::read(index)?;
        let mut rows = SealedRows::default();
        let record_len = plane2::record_bytes(meta.padded_dim as usize);
        let mut image = PageImage::new();
        let mut guard = ChainGuard::new();
        let mut record = Vec::new();
        let mut generation = None;
        let mut link = meta.delta.head;
        while let Some(here) = link {
            pgrx::check_for_interrupts!();
            guard.step(index, here)?;
            index.copy(here, meta.index_id, PageKind::Codes, &mut image)?;
            let fault = |error| index.fault(here, error);
            let page = image.page().map_err(fault)?;
            let codes = Codes::parse(page).map_err(fault)?;
            if generation != Some(codes.generation()) {
                rows.end = codes.generation();
                if codes.generation() >= end || rows.records.len() >= BATCH_BYTES {
                    break;
                }
                generation = Some(codes.generation());
            }
            for (slot, entry) in (0..).zip(codes.entries()).filter(|(_, entry)| !entry.dead) {
                let at = (entry.vector, entry.id);
                if !read_record(index, meta.index_id, at, record_len, &mut record)? {
                    // VACUUM is freeing the page.
                    return Err(Fault::Gone(entry.vector.page));
                }
                rows.cells.push(entry.cell);
                rows.records.extend_from_slice(&record);
                rows.sources.push((here, slot));
            }
            rows.pages.push(here);
            rows.pages.extend(vector_links(index, meta.index_id, &codes)?);
            link = page.next();
        }
        Ok(rows)
    })?;
    Ok((!rows.pages.is_empty()).then_some(rows))
}

/// About how many rows the delta has, from its first and last page. Too high if VACUUM took pages out.
pub fn estimated_rows(index: Index, meta: &Meta) -> Result<u64> {
    let Some(head) = meta.delta.head else { return Ok(0) };
    let mut image = PageImage::new();
    let mut place = |link: Link| {
        index.copy(link, meta.index_id, PageKind::Codes, &mut image)?;
        let codes =
            image.page().and_then(Codes::parse).map_err(|error| index.fault(link, error))?;
        let per_page = codes::entries_per_page(codes.code_len()) as u64;
        Ok((codes.position(), u64::from(codes.len()), per_page))
    };
    let ends = meta.delta.tail_hint.map_or(Err(Fault::Gone(head)), &mut place);
    let ends = ends.and_then(|last| Ok((place(head)?, last)));
    match ends {
        Ok(((first, ..), (last, rows, per_page))) => {
            Ok(u64::from(last.wrapping_sub(first)) * per_page + rows)
        }
        // The hint is old, or the delta has changed just now.
        Err(Fault::Gone(_)) => Ok(0),
        Err(Fault::Error(error)) => Err(error),
    }
}
