//! Tombstones: rows of segments that VACUUM found dead.

use std::{
    cell::RefCell,
    collections::{HashMap, hash_map::Entry},
    rc::Rc,
};

use polign_engine::{ObjectId, root::Root, search};
use polign_pages::{
    Link, PageError, PageKind, PageRef,
    tombstones::{self, RANGE, Tombstones},
};

use super::{
    free::{Spare, next_xid},
    meta::{self, Meta, Open},
    record::Record,
    relation::{Access, ChainGuard, Fault, Index, PageImage, Storage},
};
use crate::error::Result;

/// The dead rows of one segment, by ordinal.
#[derive(Debug, Clone, Default)]
pub struct SegmentTombstones {
    /// Bitmaps of [`RANGE`] rows, sorted by their first row; more than one may be about the same rows.
    ranges: Vec<(u32, Box<[u64]>)>,
    dead: u64,
}

impl SegmentTombstones {
    /// How many rows are dead.
    pub fn dead(&self) -> u64 {
        self.dead
    }

    /// Whether the row with this ordinal is dead.
    pub fn is_dead(&self, ordinal: u32) -> bool {
        let (base, within) = (ordinal - ordinal % RANGE, ordinal % RANGE);
        self.ranges_from(base).take_while(|(at, _)| *at == base).any(|(_, words)| {
            words.get(within as usize / 64).is_some_and(|word| word >> (within % 64) & 1 == 1)
        })
    }

    /// Calls `visit` with each dead ordinal in `first..first + rows`, in ascending order unless a range
    /// has two bitmaps.
    pub fn for_each_dead(&self, first: u32, rows: u32, mut visit: impl FnMut(u32)) {
        let end = first.saturating_add(rows);
        for (base, words) in self.ranges_from(first - first % RANGE) {
            if *base >= end {
                break;
            }
            let skip = first.saturating_sub(*base) as usize / 64;
            for (at, &word) in words.iter().enumerate().skip(skip) {
                let start = base + at as u32 * 64;
                if start >= end {
                    break;
                }
                let mut word = word;
                while word != 0 {
                    let ordinal = start + word.trailing_zeros();
                    if (first..end).contains(&ordinal) {
                        visit(ordinal);
                    }
                    word &= word - 1;
                }
            }
        }
    }

    fn ranges_from(&self, base: u32) -> impl Iterator<Item = &(u32, Box<[u64]>)> {
        let at = self.ranges.partition_point(|(first, _)| *first < base);
        self.ranges[at..].iter()
    }
}

/// All tombstones of an index as of one moment.
#[derive(Debug, Default)]
pub struct TombstoneSet {
    segments: HashMap<ObjectId, Rc<SegmentTombstones>>,
    pages: HashMap<(ObjectId, u32), Link>,
    newest: u64,
}

struct Cached {
    index_id: ObjectId,
    epoch: u64,
    marks: u64,
    head: Option<Link>,
    set: Rc<TombstoneSet>,
}

/// More indexes than this in one backend: forget them all rather than grow.
const MAX_CACHED: usize = 64;

thread_local! {
    static CACHE: RefCell<HashMap<Storage, Cached>> = RefCell::new(HashMap::new());
}

impl TombstoneSet {
    /// The tombstones that `meta`, just read, leads to; copied again only when they changed. The result
    /// counts only if the meta page, read again afterwards, has the same index id and epoch.
    pub fn read(index: Index, meta: &Meta) -> Access<Rc<Self>> {
        let storage = index.storage();
        let known = CACHE.with_borrow(|cache| {
            let known = cache.get(&storage)?;
            let same = known.index_id == meta.index_id
                && known.epoch == meta.epoch
                && known.marks == meta.tombstone_marks
                && known.head == meta.tombstones;
            same.then(|| known.set.clone())
        });
        if let Some(set) = known {
            return Ok(set);
        }
        let set = Rc::new(Self::load(index, meta)?);
        let cached = Cached {
            index_id: meta.index_id,
            epoch: meta.epoch,
            marks: meta.tombstone_marks,
            head: meta.tombstones,
            set: set.clone(),
        };
        CACHE.with_borrow_mut(|cache| {
            if cache.len() >= MAX_CACHED {
                cache.clear();
            }
            cache.insert(storage, cached);
        });
        Ok(set)
    }

    fn load(index: Index, meta: &Meta) -> Access<Self> {
        let mut segments: HashMap<_, SegmentTombstones> = HashMap::new();
        let mut pages = HashMap::new();
        let mut newest = 0;
        walk(index, meta, |link, page, tombstones| {
            newest = newest.max(page.version().0);
            let segment = segments.entry(tombstones.segment()).or_default();
            segment.dead += u64::from(tombstones.dead());
            segment.ranges.push((tombstones.base(), tombstones.words().collect()));
            // The page that is nearest to the head is the one that takes new marks.
            pages.entry((tombstones.segment(), tombstones.base())).or_insert(link);
            Ok(())
        })?;
        let segments = segments.into_iter().map(|(id, mut segment)| {
            segment.ranges.sort_by_key(|(base, _)| *base);
            (id, Rc::new(segment))
        });
        Ok(Self { segments: segments.collect(), pages, newest })
    }

    /// The largest LSN of the pages that were copied.
    pub(super) fn newest_lsn(&self) -> u64 {
        self.newest
    }

    /// The dead rows of a segment; none if it has no dead row.
    pub fn segment(&self, object: ObjectId) -> Option<&Rc<SegmentTombstones>> {
        self.segments.get(&object)
    }

    /// Whether the row of a segment is dead.
    pub fn is_dead(&self, object: ObjectId, ordinal: u32) -> bool {
        self.segments.get(&object).is_some_and(|segment| segment.is_dead(ordinal))
    }

    /// How many rows are dead, over all segments.
    pub fn dead(&self) -> u64 {
        self.segments.values().map(|segment| segment.dead).sum()
    }
}

fn walk(
    index: Index,
    meta: &Meta,
    mut visit: impl FnMut(Link, PageRef<'_>, Tombstones<'_>) -> Result<()>,
) -> Access<()> {
    let mut image = PageImage::new();
    let mut link = meta.tombstones;
    let mut guard = ChainGuard::new();
    while let Some(here) = link {
        pgrx::check_for_interrupts!();
        guard.step(index, here)?;
        index.copy(here, meta.index_id, PageKind::Tombstones, &mut image)?;
        let damaged = |error| index.damaged(here.block, error);
        let page = image.page().map_err(damaged)?;
        visit(here, page, Tombstones::parse(page).map_err(damaged)?)?;
        link = page.next();
    }
    Ok(())
}

/// Every tombstone page.
pub(super) fn links(index: Index, meta: &Meta) -> Access<Vec<Link>> {
    let mut pages = Vec::new();
    walk(index, meta, |link, _, _| {
        pages.push(link);
        Ok(())
    })?;
    Ok(pages)
}

/// Sets tombstones, under the layout lock in share mode. Scans see them after [`meta::count_marks`].
pub struct TombstoneWriter {
    index: Index,
    index_id: ObjectId,
    pages: HashMap<(ObjectId, u32), Link>,
}

impl TombstoneWriter {
    /// Begins with the tombstones as they are.
    pub fn new(index: Index, index_id: ObjectId, set: &TombstoneSet) -> Self {
        Self { index, index_id, pages: set.pages.clone() }
    }

    /// Marks rows of a segment dead, by their ordinals in ascending order: one record for each page that
    /// is concerned. Gives how many were not dead yet.
    pub fn set(&mut self, segment: ObjectId, ordinals: &[u32]) -> Result<u64> {
        let mut set = 0;
        for chunk in ordinals.chunk_by(|a, b| a / RANGE == b / RANGE) {
            pgrx::check_for_interrupts!();
            let base = chunk[0] - chunk[0] % RANGE;
            set += match self.pages.entry((segment, base)) {
                Entry::Occupied(page) => mark(self.index, self.index_id, *page.get(), chunk)?,
                Entry::Vacant(entry) => {
                    let (link, set) = add(self.index, segment, base, chunk)?;
                    entry.insert(link);
                    set
                }
            };
        }
        Ok(set)
    }
}

fn mark(index: Index, index_id: ObjectId, link: Link, ordinals: &[u32]) -> Result<u64> {
    let damaged = |error| index.damaged(link.block, error);
    let mut record = Record::start(index);
    let locked = index.lock(link.block);
    PageRef::follow(locked.bytes(), index_id, link.stamp, PageKind::Tombstones).map_err(damaged)?;
    let at = record.change(locked);
    let set = record
        .page(at)
        .and_then(|mut page| tombstones::set(&mut page, ordinals))
        .map_err(damaged)?;
    record.finish();
    Ok(u64::from(set))
}

/// Adds a page in front of the chain.
fn add(index: Index, segment: ObjectId, base: u32, ordinals: &[u32]) -> Result<(Link, u64)> {
    loop {
        pgrx::check_for_interrupts!();
        let spare = Spare::find(index);
        let mut record = Record::start(index);
        let mut open = Open::lock(index, &mut record)?;
        let Some(locked) = spare.take() else { continue };
        let damaged = |error| index.damaged(0, error);
        let (at, link) =
            record.create(locked, PageKind::Tombstones, open.meta.index_id).map_err(damaged)?;
        let mut page = record.page(at).map_err(damaged)?;
        tombstones::init(&mut page, segment, base).map_err(damaged)?;
        let set = tombstones::set(&mut page, ordinals).map_err(damaged)?;
        page.set_next(open.meta.tombstones);
        open.meta.tombstones = Some(link);
        open.write(index, &mut record)?;
        record.finish();
        return Ok((link, u64::from(set)));
    }
}

/// Unlinks and frees the tombstone pages of segments that the root does not have any more. The caller
/// holds the layout lock exclusively.
pub fn retain(index: Index, keep: impl Fn(ObjectId) -> bool) -> Result<u32> {
    let meta = meta::read(index)?;
    let mut previous: Option<Link> = None;
    let mut freed = 0;
    walk(index, &meta, |here, page, tombstones| {
        if keep(tombstones.segment()) {
            previous = Some(here);
            return Ok(());
        }
        unlink(index, meta.index_id, previous, here, page.next())?;
        freed += 1;
        Ok(())
    })
    .map_err(|fault: Fault| index.settled(fault))?;
    if freed > 0 {
        meta::count_marks(index)?;
    }
    Ok(freed)
}

fn unlink(
    index: Index,
    index_id: ObjectId,
    previous: Option<Link>,
    here: Link,
    next: Option<Link>,
) -> Result<()> {
    let damaged = |link: Link| move |error: PageError| index.damaged(link.block, error);
    let kind = PageKind::Tombstones;
    let mut record = Record::start(index);
    let here_pin = index.pin(here.block);
    match previous {
        Some(previous) => {
            let locked = index.lock(previous.block);
            PageRef::follow(locked.bytes(), index_id, previous.stamp, kind)
                .map_err(damaged(previous))?;
            let at = record.change(locked);
            record.page(at).map_err(damaged(previous))?.set_next(next);
        }
        None => {
            let mut open = Open::lock(index, &mut record)?;
            open.meta.tombstones = next;
            open.write(index, &mut record)?;
        }
    }
    let locked = here_pin.lock();
    PageRef::follow(locked.bytes(), index_id, here.stamp, kind).map_err(damaged(here))?;
    let xid = next_xid();
    let at = record.change(locked);
    record.page(at).map_err(damaged(here))?.free(xid);
    record.finish();
    Ok(())
}

/// The tombstones as a search over a root wants them: by the segments' positions in the root.
pub struct TombstoneView(Vec<Option<Rc<SegmentTombstones>>>);

impl TombstoneView {
    /// Sorts the tombstones by the segments of a root.
    pub fn new(set: &TombstoneSet, root: &Root) -> Self {
        let segments = root.segments().iter();
        Self(segments.map(|segment| set.segment(segment.object).cloned()).collect())
    }
}

impl search::Tombstones for TombstoneView {
    fn for_each_dead(&self, segment: u32, first: u32, rows: u32, visit: &mut dyn FnMut(u32)) {
        if let Some(Some(dead)) = self.0.get(segment as usize) {
            dead.for_each_dead(first, rows, visit);
        }
    }
}
