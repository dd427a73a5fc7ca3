//! An exhaustive scan, page by page, on the primary or on the standby.

use crate::db::*;
use crate::explore::Shared;
use crate::world::{Broken, Budget, PageModel, Steps, World};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum At {
    #[default]
    Idle,
    Meta,
    Root,
    Tombstones(Option<Link>),
    Delta(Option<Link>),
    SecondMeta,
    Segment(u8),
    Vector(u8),
    Emit,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Scan {
    pub at: At,
    snapshot: u16,
    /// Every row that the snapshot sees.
    expected: Vec<(Tid, Row)>,
    /// The epoch when the snapshot was taken: gc's knowledge.
    pub born: u8,
    meta: Option<Shared<Meta>>,
    root: Root,
    tombstones: Vec<(Object, u16)>,
    delta: Vec<Entry>,
    found: Vec<(Tid, Row)>,
    /// Code pages that it has read, for the next scan.
    pages: Vec<(Link, Vec<Entry>)>,
    kept: Option<Kept>,
}

/// Delta and tombstones as an earlier scan found them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Kept {
    epoch: u8,
    marks: u8,
    tombstones: Vec<(Object, u16)>,
    /// All code pages, the last one too.
    pages: Vec<(Link, Vec<Entry>)>,
}

impl Scan {
    pub fn running(&self) -> bool {
        self.at != At::Idle
    }

    /// Whether the snapshot was taken before one of these transactions committed.
    pub fn misses(&self, xids: u16) -> bool {
        self.running() && self.snapshot & xids != xids
    }
}

impl PageModel {
    pub fn scan(&self, world: &World, on_standby: bool, out: &mut Steps) {
        let scan = if on_standby { &world.standby_scan } else { &world.scan };
        let db = if on_standby { world.standby.as_ref() } else { Some(&world.db) };
        let Some(db) = db else { return };
        let budget = &world.budget;
        let left = if on_standby { budget.standby_scans } else { budget.scans };
        let starts = !scan.running();
        if starts && left == 0 {
            return;
        }
        let result =
            if starts { Ok(Self::start(scan, db)) } else { self.scan_step(scan, db, world) };
        let label = if on_standby { "standby: scan" } else { "scan" };
        let label = (label, step_number(scan.at));
        out.push((
            label,
            result.map(|changed| {
                let mut next = world.clone();
                let Budget { scans, standby_scans, .. } = &mut next.budget;
                *if on_standby { standby_scans } else { scans } -= u8::from(starts);
                *if on_standby { &mut next.standby_scan } else { &mut next.scan } = changed;
                self.move_horizon(&mut next);
                next
            }),
        ));
    }

    fn start(old: &Scan, db: &Db) -> Scan {
        let tids = 0..db.heap.len() as u8;
        let visible = |tid| db.visible(tid, db.committed).map(|row| (tid, row));
        Scan {
            at: At::Meta,
            snapshot: db.committed,
            expected: tids.filter_map(visible).collect(),
            born: db.meta.epoch,
            kept: old.kept.clone(),
            ..Scan::default()
        }
    }

    /// Forgets all but the snapshot.
    fn restart(scan: &Scan) -> Scan {
        Scan {
            at: At::Meta,
            snapshot: scan.snapshot,
            expected: scan.expected.clone(),
            born: scan.born,
            kept: scan.kept.clone(),
            ..Scan::default()
        }
    }

    /// The page that a reader gets for a link: freed or not, it is good as long as it is not reused.
    fn read<'a>(&self, db: &'a Db, link: Link) -> Option<&'a Body> {
        if self.config.avoid_freed {
            db.page(link)
        } else if self.checks_stamps() {
            db.stamped(link)
        } else {
            db.pages.get(usize::from(link.block)).map(|page| &page.body)
        }
    }

    fn scan_step(&self, old: &Scan, db: &Db, world: &World) -> Result<Scan, String> {
        let mut scan = old.clone();
        let late = self.is(Broken::TombstonesAfterMeta);
        match scan.at {
            At::Idle => unreachable!("an idle scan has no step"),
            At::Meta => {
                scan.meta = Some(db.meta.clone());
                scan.at = At::Root;
            }
            At::Root => {
                let meta = scan.meta.as_ref().expect("copied first");
                let Some(Body::Root(root)) = self.read(db, meta.root) else {
                    return Ok(Self::restart(old));
                };
                scan.root = root.clone();
                scan.at =
                    if late { At::Delta(Some(meta.head)) } else { At::Tombstones(meta.tombstones) };
            }
            At::Tombstones(Some(link)) => match self.read(db, link) {
                Some(Body::Tombstones(page)) => {
                    scan.tombstones.push((page.object, page.dead));
                    scan.at = At::Tombstones(page.next);
                }
                // Too late to start again: rows may have been returned.
                _ if late => scan.at = At::Tombstones(None),
                _ => return Ok(Self::restart(old)),
            },
            At::Tombstones(None) if late => scan.at = At::Segment(0),
            At::Tombstones(None) => {
                let from = self.reuse_kept(&mut scan);
                scan.at = At::Delta(from);
            }
            At::Delta(Some(link)) => match self.read(db, link) {
                Some(Body::Codes(page)) => {
                    let alive = page.entries.iter().filter(|entry| !entry.dead).copied();
                    scan.pages.push((link, alive.collect()));
                    let last = scan.meta.as_ref().expect("copied first").tail == link;
                    let ends = last && self.is(Broken::HintEndsChain);
                    scan.at = At::Delta(if ends { None } else { page.next });
                }
                _ => return Ok(Self::restart(old)),
            },
            At::Delta(None) => scan.at = At::SecondMeta,
            At::SecondMeta => {
                let meta = scan.meta.as_ref().expect("copied first");
                if meta.epoch != db.meta.epoch && !self.is(Broken::NoSecondMeta) {
                    return Ok(Self::restart(old));
                }
                scan.at = if late { At::Tombstones(meta.tombstones) } else { At::Segment(0) };
                scan.delta = scan.pages.iter().flat_map(|(_, entries)| entries.clone()).collect();
            }
            At::Segment(n) => {
                let Some(object) = scan.root.segments.get(usize::from(n)).copied() else {
                    scan.at = At::Vector(0);
                    self.score_delta(&mut scan);
                    return Ok(scan);
                };
                let segment = world.objects.get(usize::from(object)).and_then(Option::as_ref);
                let rows = segment.ok_or(format!("I4: a scan misses object {object}"))?;
                let of = scan.tombstones.iter().filter(|(of, _)| *of == object);
                let dead = of.fold(0, |all, (_, dead)| all | dead);
                let alive = rows.iter().enumerate().filter(|(at, _)| dead & (1 << at) == 0);
                scan.found.extend(alive.map(|(_, row)| *row));
                scan.at = At::Segment(n + 1);
            }
            At::Vector(n) => {
                let Some(entry) = scan.delta.get(usize::from(n)) else {
                    scan.at = At::Emit;
                    return Ok(scan);
                };
                // A page that is gone is no fault: the row gets a bound that always holds.
                let stored = match self.read(db, entry.vector.page) {
                    Some(Body::Vectors(page)) => page.rows.get(usize::from(entry.vector.slot)),
                    _ => None,
                };
                if stored.is_some_and(|row| *row != entry.row) {
                    return Err(format!("I3: row {} is scored by another's vector", entry.row));
                }
                scan.at = At::Vector(n + 1);
            }
            At::Emit => {
                Self::emit(&scan, db)?;
                scan = Scan { kept: self.keep(&scan), ..Scan::default() };
            }
        }
        Ok(scan)
    }

    fn keep(&self, scan: &Scan) -> Option<Kept> {
        let meta = scan.meta.as_ref().filter(|_| self.config.cache)?;
        Some(Kept {
            epoch: meta.epoch,
            marks: meta.marks,
            tombstones: scan.tombstones.clone(),
            pages: scan.pages.clone(),
        })
    }

    /// Takes over what an earlier scan kept, if nothing was published or marked since. Gives the code
    /// page to go on from: the last one may have got more entries.
    fn reuse_kept(&self, scan: &mut Scan) -> Option<Link> {
        let meta = scan.meta.as_ref().expect("copied first");
        let marks = |kept: &Kept| kept.marks == meta.marks || self.is(Broken::CacheIgnoresMarks);
        let good = scan.kept.as_ref().filter(|kept| kept.epoch == meta.epoch && marks(kept));
        let Some(kept) = good.cloned() else { return Some(meta.head) };
        scan.tombstones = kept.tombstones;
        scan.pages = kept.pages;
        if self.is(Broken::CacheKeepsLastPage) {
            return None;
        }
        scan.pages.pop().map(|(link, _)| link)
    }

    /// Opens every cell, and with each the delta rows that belong there.
    fn score_delta(&self, scan: &mut Scan) {
        let mut scored = Vec::new();
        for entry in &scan.delta {
            let home = scan.root.resolve(entry.cell);
            let opened = scan.root.cells.iter().filter(|cell| Some(**cell) == home).count();
            let times = match opened {
                _ if self.is(Broken::EverySuccessor) && home != Some(entry.cell) => {
                    scan.root.cells.len()
                }
                0 if self.is(Broken::UnknownCellDropped) => 0,
                0 => 1,
                times => times,
            };
            scored.extend(std::iter::repeat_n((entry.tid, entry.row), times));
        }
        scan.found.extend(scored);
    }

    /// What the executor does with the TIDs: fetches the heap rows.
    fn emit(scan: &Scan, db: &Db) -> Result<(), String> {
        for &(tid, row) in &scan.found {
            if let Some(now) = db.visible(tid, scan.snapshot).filter(|now| *now != row) {
                return Err(format!("I2: row {now} is returned for the vector of row {row}"));
            }
        }
        for expected in &scan.expected {
            let times = scan.found.iter().filter(|found| *found == expected).count();
            if times != 1 {
                return Err(format!("I1: row {} is returned {times} times", expected.1));
            }
        }
        Ok(())
    }
}

fn step_number(at: At) -> u8 {
    match at {
        At::Idle => 0,
        At::Meta => 1,
        At::Root => 2,
        At::Tombstones(_) => 3,
        At::Delta(_) => 4,
        At::SecondMeta => 5,
        At::Segment(_) => 6,
        At::Vector(_) => 7,
        At::Emit => 8,
    }
}
