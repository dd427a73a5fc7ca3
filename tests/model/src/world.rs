//! The state of everything, the log, crashes, and what must hold in every state.

use crate::db::*;
use crate::explore::{Label, Model, Shared};
use crate::insert::Inserter;
use crate::publish::{Compaction, Flush};
use crate::scan::Scan;
use crate::vacuum::Vacuum;

/// A rule left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// A flush publishes with the dead flags that it copied.
    FlushKeepsOldDeadMarks,
    /// A compaction publishes with the tombstones that it read at its start.
    CompactionKeepsOldTombstones,
    /// A flush leaves out rows that its snapshot does not see.
    FlushJudgesVisibility,
    /// A flush does not seal: inserts go on into the pages that it has copied.
    NoSeal,
    /// An insert does not check that its vector lies with the code page that it adds the entry to.
    VectorOfOtherPage,
    /// An insert publishes the entry before it has written the vector.
    EntryBeforeVector,
    /// Publishing does not check that its sources are still there.
    SourcesUnchecked,
    /// Publishing does not take the layout lock.
    NoLayoutLock,
    /// Meta is changed before the root page exists.
    MetaBeforePage,
    /// Meta is changed before the object exists.
    MetaBeforeUpload,
    /// Delta pages are freed before meta is changed.
    FreeBeforePublish,
    /// Sweeping frees vector pages that no entry refers to.
    FreeUnreferencedVectors,
    /// VACUUM passes over a segment whose ids it cannot read.
    VacuumSkipsSegment,
    /// A page is reused with the same stamp.
    SameStamp,
    /// Readers look at a page's kind only, not at its stamp.
    NoStampCheck,
    /// Freed pages are reused at once.
    NoHorizon,
    /// Neither of the two.
    NoStampCheckNoHorizon,
    /// A scan does not read meta again.
    NoSecondMeta,
    /// A scan reads the tombstones after its second read of meta.
    TombstonesAfterMeta,
    /// A scan uses what an earlier one kept whatever VACUUM did since.
    CacheIgnoresMarks,
    /// A scan does not read the last of the kept code pages again.
    CacheKeepsLastPage,
    /// VACUUM tells readers before it marks rows, not afterwards.
    MarksToldBefore,
    /// VACUUM tells readers only if it marked rows itself, not if an earlier one did and failed.
    MarksToldIfNew,
    /// VACUUM tells readers only if it saw rows marked dead, by itself or by an earlier one.
    MarksToldIfSeen,
    /// A scan ends at the page that meta's hint names.
    HintEndsChain,
    /// A scan drops rows of cells that are no longer there.
    UnknownCellDropped,
    /// A scan scores a row of a split cell in each of the new ones.
    EverySuccessor,
    /// Collection of objects does not wait for scans.
    GcIgnoresScans,
    /// Collection of objects does not wait for the standby's replay.
    GcIgnoresStandby,
    /// Collection of objects does not wait until the flip is flushed.
    GcIgnoresFlush,
}

/// A schedule: how often each thing may happen.
#[derive(Clone, Debug, Default)]
pub struct Config {
    pub tids: u8,
    /// Rows in the delta at the start.
    pub delta_rows: u8,
    /// Rows in a segment at the start.
    pub segment_rows: u8,
    pub inserters: u8,
    pub inserts: u8,
    pub deletes: u8,
    pub aborts: u8,
    pub vacuums: u8,
    /// How often a VACUUM may fail midway.
    pub vacuum_errors: u8,
    pub flushers: u8,
    pub flushes: u8,
    pub compactions: u8,
    pub scans: u8,
    pub standby: bool,
    pub standby_scans: u8,
    pub crashes: u8,
    pub gc: bool,
    /// VACUUM unlinks pages whose rows are all dead.
    pub unlink: bool,
    /// Scans keep delta and tombstones for the next one.
    pub cache: bool,
    /// Readers start again at a freed page instead of reading on.
    pub avoid_freed: bool,
    /// Inserts and publications take few steps, of several records each: for a standby, which goes
    /// record by record in any case.
    pub coarse: bool,
    /// A compaction does not keep what became of a split cell.
    pub forget_successors: bool,
    /// Entries on a code page, vectors on a vector page.
    pub page_rows: usize,
    pub broken: Option<Broken>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Budget {
    pub inserts: u8,
    pub deletes: u8,
    pub aborts: u8,
    pub vacuums: u8,
    pub vacuum_errors: u8,
    pub flushes: u8,
    pub compactions: u8,
    pub scans: u8,
    pub standby_scans: u8,
    pub crashes: u8,
}

/// Rows of a segment, in order; `None` once it is deleted.
pub type Segment = Option<Shared<Vec<(Tid, Row)>>>;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct World {
    pub db: Db,
    pub standby: Option<Db>,
    /// What a crash goes back to, if one may still come.
    pub durable: Option<Db>,
    /// Records that the standby or the disk has not got yet.
    pub wal: Vec<Record>,
    pub flushed: usize,
    pub replayed: usize,
    pub objects: Vec<Segment>,
    /// The epoch that dropped an object, seen by no invariant: gc's knowledge.
    pub dropped: Vec<Option<u8>>,
    pub next_xid: Xid,
    pub next_row: Row,
    pub budget: Budget,
    pub inserters: Vec<Inserter>,
    pub flushers: Vec<Flush>,
    pub compaction: Compaction,
    pub vacuum: Vacuum,
    pub scan: Scan,
    pub standby_scan: Scan,
    /// Free pages that a running primary scan or insert may still point at.
    pub guarded: u64,
    pub layout_shared: bool,
    pub layout_exclusive: bool,
}

pub struct PageModel {
    pub config: Config,
}

pub type Steps = Vec<(Label, Result<World, String>)>;

impl PageModel {
    pub fn new(config: Config) -> PageModel {
        PageModel { config }
    }

    pub fn is(&self, broken: Broken) -> bool {
        self.config.broken == Some(broken)
    }

    pub fn checks_stamps(&self) -> bool {
        !self.is(Broken::NoStampCheck) && !self.is(Broken::NoStampCheckNoHorizon)
    }

    pub fn waits_for_horizon(&self) -> bool {
        !self.is(Broken::NoHorizon) && !self.is(Broken::NoStampCheckNoHorizon)
    }

    fn keeps_wal(&self, world: &World) -> bool {
        self.config.standby || world.durable.is_some()
    }

    /// The state before the first step.
    pub fn initial(&self) -> World {
        let config = &self.config;
        let mut db = Db::new(config.tids);
        let (mut next, mut objects, mut dropped) = (0, Vec::new(), Vec::new());
        let mut row = |db: &mut Db| {
            db.heap[usize::from(next)] = Slot::Tuple { row: next, inserted: 0, deleted: None };
            next += 1;
            (next - 1, next - 1)
        };
        if config.segment_rows > 0 {
            let rows: Vec<_> = (0..config.segment_rows).map(|_| row(&mut db)).collect();
            objects.push(Some(Shared::new(rows)));
            dropped.push(None);
            let root = Root { segments: vec![0], cells: vec![1], successors: Vec::new() };
            db.pages[0] = Shared::new(Page { stamp: 1, freed: false, body: Body::Root(root) });
        }
        if config.delta_rows > 0 {
            let mut codes = Codes { generation: 1, next: None, entries: Vec::new() };
            let mut vectors = Vectors { owner: db.meta.head, rows: Vec::new() };
            for slot in 0..config.delta_rows {
                let (tid, row) = row(&mut db);
                vectors.rows.push(row);
                let vector = VectorRef { page: Link { block: 2, stamp: 1 }, slot };
                codes.entries.push(Entry { tid, row, cell: 1, dead: false, vector });
            }
            let page = |body| Shared::new(Page { stamp: 1, freed: false, body });
            db.pages[1] = page(Body::Codes(codes));
            db.pages.push(page(Body::Vectors(vectors)));
        }
        db.committed = 1;
        World {
            standby: config.standby.then(|| db.clone()),
            durable: (config.crashes > 0).then(|| db.clone()),
            db,
            wal: Vec::new(),
            flushed: 0,
            replayed: 0,
            objects,
            dropped,
            next_xid: 1,
            next_row: next,
            budget: Budget {
                inserts: config.inserts,
                deletes: config.deletes,
                aborts: config.aborts,
                vacuums: config.vacuums,
                vacuum_errors: config.vacuum_errors,
                flushes: config.flushes,
                compactions: config.compactions,
                scans: config.scans,
                standby_scans: config.standby_scans,
                crashes: config.crashes,
            },
            inserters: vec![Inserter::Idle; config.inserters.into()],
            flushers: vec![Flush::Idle; config.flushers.into()],
            compaction: Compaction::Idle,
            vacuum: Vacuum::Idle,
            scan: Scan::default(),
            standby_scan: Scan::default(),
            guarded: 0,
            layout_shared: false,
            layout_exclusive: false,
        }
    }

    /// Writes one WAL record.
    pub fn log(&self, world: &mut World, writes: Vec<Write>) {
        let pages = writes.iter().filter(|w| matches!(w, Write::Meta(_) | Write::Page(..)));
        assert!(pages.count() <= PAGES_PER_RECORD, "a record changes too many pages");
        let record: Record = Shared::new(writes);
        world.db.apply(&record);
        if self.keeps_wal(world) {
            world.wal.push(record);
            if world.durable.is_none() {
                world.flushed = world.wal.len();
            }
        }
    }

    /// Makes the whole log durable, as a commit does.
    pub fn flush_log(&self, world: &mut World) {
        let World { durable: Some(durable), wal, flushed, .. } = world else { return };
        wal[*flushed..].iter().for_each(|record| durable.apply(record));
        *flushed = wal.len();
        self.trim(world);
    }

    fn trim(&self, world: &mut World) {
        let needed = if self.config.standby { world.replayed } else { usize::MAX };
        let keep = needed.min(world.flushed);
        world.wal.drain(..keep);
        world.flushed -= keep;
        world.replayed = world.replayed.saturating_sub(keep);
    }

    /// A page to write on: a freed one past the horizon, else a new one.
    pub fn allocate(&self, world: &World, taken: &[Link]) -> Link {
        for (block, page) in world.db.pages.iter().enumerate().rev() {
            let stamp = if self.is(Broken::SameStamp) { page.stamp } else { page.stamp + 1 };
            let link = Link { block: block as u8, stamp };
            let held = self.waits_for_horizon() && world.guarded & (1 << block) != 0;
            if page.freed && !held && !taken.contains(&link) {
                return link;
            }
        }
        let new = taken.iter().filter(|link| usize::from(link.block) >= world.db.pages.len());
        Link { block: (world.db.pages.len() + new.count()) as u8, stamp: 1 }
    }

    pub fn write(link: Link, body: Body) -> Write {
        Write::Page(link.block, Shared::new(Page { stamp: link.stamp, freed: false, body }))
    }

    pub fn write_meta(meta: Meta) -> Write {
        Write::Meta(Shared::new(meta))
    }

    /// Frees a page, which is kept from reuse while someone may still hold a link to it.
    pub fn free(&self, world: &mut World, link: Link) -> Write {
        let busy = world.scan.running() || world.inserters.iter().any(|i| *i != Inserter::Idle);
        if busy {
            world.guarded |= 1 << link.block;
        }
        let body = world.db.pages[usize::from(link.block)].body.clone();
        Write::Page(link.block, Shared::new(Page { stamp: link.stamp, freed: true, body }))
    }

    /// Called when a scan or an insert ends on the primary.
    pub fn move_horizon(&self, world: &mut World) {
        if !world.scan.running() && world.inserters.iter().all(|i| *i == Inserter::Idle) {
            world.guarded = 0;
        }
    }

    /// Takes one step, or if the schedule is coarse, all steps up to the next that matters to others.
    fn run(
        &self,
        world: &World,
        out: &mut Steps,
        between: impl Fn(&World) -> bool,
        step: impl Fn(&World, &mut Steps),
    ) {
        let first = out.len();
        step(world, out);
        while self.config.coarse && out.len() == first + 1 {
            let Ok(next) = &out[first].1 else { return };
            if !between(next) {
                return;
            }
            let next = next.clone();
            let label = out[first].0;
            out.truncate(first);
            step(&next, out);
            match out.get_mut(first) {
                Some(step) => step.0 = label,
                None => out.push((label, Ok(next))),
            }
        }
    }

    fn delete(&self, world: &World, out: &mut Steps) {
        if world.budget.deletes == 0 {
            return;
        }
        for tid in 0..self.config.tids {
            let Slot::Tuple { row, inserted, deleted: None } = world.db.heap[usize::from(tid)]
            else {
                continue;
            };
            if !world.db.committed(inserted) {
                continue;
            }
            let (mut next, xid) = (world.clone(), world.next_xid);
            next.budget.deletes -= 1;
            next.next_xid += 1;
            let slot = Slot::Tuple { row, inserted, deleted: Some(xid) };
            self.log(&mut next, vec![Write::Heap(tid, slot), Write::Commit(xid)]);
            self.flush_log(&mut next);
            out.push((("delete", tid), Ok(next)));
        }
    }

    fn replay(&self, world: &World, out: &mut Steps) {
        let Some(record) = world.wal[..world.flushed].get(world.replayed) else { return };
        let conflict = record.iter().any(|write| match write {
            Write::Conflict(xids) => world.standby_scan.misses(*xids),
            _ => false,
        });
        if conflict || world.standby.is_none() {
            return;
        }
        let mut next = world.clone();
        next.standby.as_mut().expect("checked above").apply(record);
        next.replayed += 1;
        self.trim(&mut next);
        out.push((("standby: replay", 0), Ok(next)));
    }

    fn crash(&self, world: &World, out: &mut Steps) {
        let Some(durable) = &world.durable else { return };
        for end in world.flushed..=world.wal.len() {
            let mut next = world.clone();
            next.db = durable.clone();
            world.wal[world.flushed..end].iter().for_each(|record| next.db.apply(record));
            next.wal.truncate(end);
            next.flushed = end;
            next.budget.crashes -= 1;
            next.durable = (next.budget.crashes > 0).then(|| next.db.clone());
            next.inserters.fill(Inserter::Idle);
            next.flushers.fill(Flush::Idle);
            next.compaction = Compaction::Idle;
            next.vacuum = Vacuum::Idle;
            next.scan = Scan::default();
            (next.guarded, next.layout_shared, next.layout_exclusive) = (0, false, false);
            self.trim(&mut next);
            out.push((("crash, log kept", (end - world.flushed) as u8), Ok(next)));
        }
    }

    fn flush_step(&self, world: &World, out: &mut Steps) {
        // A crash keeps any part of the tail, so only those who wait for the flush care.
        let matters = self.config.standby || self.config.gc;
        if matters && world.durable.is_some() && world.flushed < world.wal.len() {
            let mut next = world.clone();
            self.flush_log(&mut next);
            out.push((("log is flushed", 0), Ok(next)));
        }
    }

    fn gc(&self, world: &World, out: &mut Steps) {
        if !self.config.gc {
            return;
        }
        for (object, epoch) in world.dropped.iter().enumerate() {
            let Some(epoch) = *epoch else { continue };
            let root = world.db.live_root();
            let named = root.is_none_or(|root| root.segments.contains(&(object as u8)));
            // Whether the flip that dropped it is there, not whether the root names it: a state
            // that has neither the flip that added the object nor this one will still see both.
            let has_flip = |db: &Option<Db>| db.as_ref().is_none_or(|db| db.meta.epoch >= epoch);
            let (flushed, replayed) = (has_flip(&world.durable), has_flip(&world.standby));
            let older = |scan: &Scan| scan.running() && scan.born < epoch;
            let unused = !older(&world.scan) && !older(&world.standby_scan);
            if named
                || world.objects[object].is_none()
                || !(flushed || self.is(Broken::GcIgnoresFlush))
                || !(replayed || self.is(Broken::GcIgnoresStandby))
                || !(unused || self.is(Broken::GcIgnoresScans))
            {
                continue;
            }
            let mut next = world.clone();
            next.objects[object] = None;
            out.push((("gc", object as u8), Ok(next)));
        }
    }

    /// What a database at rest owes: every link leads somewhere, every live row has one entry,
    /// and no entry answers for another row.
    fn check_db(&self, db: &Db, objects: &[Segment]) -> Result<(), String> {
        db.reachable().map_err(|gone| format!("I4: {gone}"))?;
        let mut live = Vec::new();
        for (_, page) in db.code_chain(db.meta.head)? {
            for entry in page.entries.iter().filter(|entry| !entry.dead) {
                let vector = db.vectors(entry.vector.page);
                let stored = vector.and_then(|v| v.rows.get(usize::from(entry.vector.slot)));
                if stored.is_none_or(|row| *row != entry.row) {
                    return Err(format!("I4: the vector of row {} is gone", entry.row));
                }
                live.push((entry.tid, entry.row));
            }
        }
        for object in &db.live_root().ok_or("I4: no root")?.segments {
            let segment = objects.get(usize::from(*object)).and_then(Option::as_ref);
            let rows = segment.ok_or(format!("I4: object {object} is not there"))?;
            let dead = db.dead_of(*object);
            let rows = rows.iter().enumerate().filter(|(at, _)| dead & (1 << at) == 0);
            live.extend(rows.map(|(_, row)| *row));
        }
        for &(tid, row) in &live {
            let ok = match db.heap[usize::from(tid)] {
                Slot::Tuple { row: now, .. } => now == row,
                Slot::Dead => true,
                Slot::Unused => false,
            };
            if !ok {
                return Err(format!("I2: an entry of row {row} is left for TID {tid}"));
            }
        }
        for (tid, slot) in db.heap.iter().enumerate() {
            let Slot::Tuple { row, inserted, deleted } = *slot else { continue };
            let visible = db.committed(inserted) && !deleted.is_some_and(|xid| db.committed(xid));
            let entries = live.iter().filter(|entry| **entry == (tid as u8, row)).count();
            if entries > 1 || (visible && entries == 0) {
                return Err(format!("I1: row {row} has {entries} entries"));
            }
        }
        Ok(())
    }
}

impl Model for PageModel {
    type State = World;

    fn steps(&self, world: &World, out: &mut Steps) {
        for who in 0..world.inserters.len() {
            self.run(world, out, |w| w.inserters[who].between(), |w, out| self.insert(w, who, out));
        }
        for who in 0..world.flushers.len() {
            self.run(world, out, |w| w.flushers[who].between(), |w, out| self.flush(w, who, out));
        }
        self.run(world, out, |w| w.compaction.between(), |w, out| self.compact(w, out));
        self.sweep(world, out);
        self.vacuum(world, out);
        self.scan(world, false, out);
        self.delete(world, out);
        self.crash(world, out);
        self.flush_step(world, out);
        self.gc(world, out);
        // Nothing but gc looks at the standby, so without gc it may as well lag behind all the rest:
        // the same pairs of standby states and scans, far fewer states.
        if out.is_empty() || self.config.gc {
            self.scan(world, true, out);
            self.replay(world, out);
        }
    }

    fn check(&self, world: &World) -> Result<(), String> {
        self.check_db(&world.db, &world.objects)?;
        world.standby.iter().try_for_each(|db| {
            self.check_db(db, &world.objects).map_err(|rule| format!("standby: {rule}"))
        })
    }
}
