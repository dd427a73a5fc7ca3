//! VACUUM: finds dead TIDs, passes over the index, gives the TIDs back to the heap.

use crate::db::*;
use crate::world::{Broken, PageModel, Steps, World};

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Vacuum {
    Idle,
    /// These TIDs are dead; the index has not been told.
    Pruned(u16),
    Pass(Pass),
    /// The index has forgotten these TIDs.
    Passed(u16),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Pass {
    tids: u16,
    at: Place,
    /// Rows that the index held when the pass began: each must be reported.
    stored: u16,
    reported: u16,
    /// Whether it has marked anything.
    marked: bool,
    /// Whether anything was marked already.
    seen: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Place {
    Codes(Option<Link>, Option<Link>),
    Segment(u8),
    /// All marks are set; readers are to be told.
    Tell,
}

impl PageModel {
    pub fn vacuum(&self, world: &World, out: &mut Steps) {
        if world.vacuum == Vacuum::Idle && world.budget.vacuums == 0 {
            return;
        }
        let mut next = world.clone();
        let (name, result) = match &world.vacuum {
            Vacuum::Idle => {
                if !self.prune(&mut next) {
                    return;
                }
                ("vacuum: prune", Ok(()))
            }
            Vacuum::Pruned(tids) => {
                if world.layout_exclusive && !self.is(Broken::NoLayoutLock) {
                    return;
                }
                next.layout_shared = true;
                if self.is(Broken::MarksToldBefore) {
                    self.tell(&mut next);
                }
                let at = Place::Codes(None, Some(world.db.meta.head));
                let stored = self.stored(world);
                next.vacuum = Vacuum::Pass(Pass {
                    tids: *tids,
                    at,
                    stored,
                    reported: 0,
                    marked: false,
                    seen: false,
                });
                ("vacuum: lock", Ok(()))
            }
            Vacuum::Pass(pass) => {
                if world.budget.vacuum_errors > 0 {
                    let mut failed = world.clone();
                    failed.budget.vacuum_errors -= 1;
                    failed.layout_shared = false;
                    failed.vacuum = Vacuum::Idle;
                    out.push((("vacuum: error", 0), Ok(failed)));
                }
                ("vacuum: pass", self.pass(&mut next, pass.clone()))
            }
            Vacuum::Passed(tids) => {
                let dead = (0..self.config.tids).filter(|tid| tids & (1 << tid) != 0);
                let writes = dead.map(|tid| Write::Heap(tid, Slot::Unused)).collect();
                self.log(&mut next, writes);
                next.vacuum = Vacuum::Idle;
                ("vacuum: reuse", Ok(()))
            }
        };
        out.push(((name, 0), result.map(|()| next)));
    }

    /// Turns tuples that nobody can see into dead TIDs.
    fn prune(&self, world: &mut World) -> bool {
        let (mut tids, mut conflict, mut writes) = (0, 0, Vec::new());
        for (tid, slot) in world.db.heap.iter().enumerate() {
            let Slot::Tuple { inserted, deleted, .. } = *slot else {
                // Left dead by a VACUUM that did not end.
                tids |= u16::from(*slot == Slot::Dead) << tid;
                continue;
            };
            let running = world.inserters.iter().any(|i| i.xid() == Some(inserted));
            let aborted = !world.db.committed(inserted) && !running;
            let gone =
                deleted.filter(|xid| world.db.committed(*xid) && !world.scan.misses(1 << *xid));
            if aborted || gone.is_some() {
                tids |= 1 << tid;
                conflict |= gone.map_or(0, |xid| 1 << xid);
                writes.push(Write::Heap(tid as u8, Slot::Dead));
            }
        }
        if tids == 0 {
            return false;
        }
        world.budget.vacuums -= 1;
        writes.push(Write::Conflict(conflict));
        self.log(world, writes);
        world.vacuum = Vacuum::Pruned(tids);
        true
    }

    /// Rows with an entry that is not dead.
    fn stored(&self, world: &World) -> u16 {
        let mut rows = 0;
        for (_, page) in world.db.code_chain(world.db.meta.head).unwrap_or_default() {
            let live = page.entries.iter().filter(|entry| !entry.dead);
            live.for_each(|entry| rows |= 1 << entry.row);
        }
        for object in world.db.live_root().map_or(Vec::new(), |root| root.segments.clone()) {
            let dead = world.db.dead_of(object);
            let segment = world.objects[usize::from(object)].iter().flat_map(|rows| rows.iter());
            let live = segment.enumerate().filter(|(at, _)| dead & (1 << at) == 0);
            live.for_each(|(_, (_, row))| rows |= 1 << row);
        }
        rows
    }

    fn pass(&self, world: &mut World, mut pass: Pass) -> Result<(), String> {
        match pass.at {
            Place::Codes(_, None) => pass.at = Place::Segment(0),
            Place::Codes(previous, Some(link)) => {
                let Some(page) = world.db.codes(link).cloned() else {
                    return Err(format!("I7: VACUUM lost its way at {link:?}"));
                };
                let following = page.next;
                let unlinked = self.flag(world, &mut pass, previous, link, page);
                pass.at = Place::Codes(if unlinked { previous } else { Some(link) }, following);
            }
            Place::Segment(n) => {
                let root = world.db.live_root().ok_or("I7: VACUUM has no root")?;
                if let Some(object) = root.segments.get(usize::from(n)).copied() {
                    if !self.is(Broken::VacuumSkipsSegment) {
                        self.mark(world, &mut pass, object)?;
                    }
                    pass.at = Place::Segment(n + 1);
                } else {
                    let missed = pass.stored & !pass.reported;
                    if missed != 0 && !self.is(Broken::VacuumSkipsSegment) {
                        return Err(format!("I7: rows {missed:b} are not reported"));
                    }
                    pass.at = Place::Tell;
                }
            }
            Place::Tell => {
                let needed = match self.config.broken {
                    Some(Broken::MarksToldIfNew) => pass.marked,
                    Some(Broken::MarksToldIfSeen) => pass.marked || pass.seen,
                    _ => true,
                };
                if needed && !self.is(Broken::MarksToldBefore) {
                    self.tell(world);
                }
                world.layout_shared = false;
                world.vacuum = Vacuum::Passed(pass.tids);
                return Ok(());
            }
        }
        world.vacuum = Vacuum::Pass(pass);
        Ok(())
    }

    /// Flags the dead entries of one code page; unlinks it if nothing else is on it.
    fn flag(
        &self,
        world: &mut World,
        pass: &mut Pass,
        previous: Option<Link>,
        link: Link,
        mut page: Codes,
    ) -> bool {
        let mut changed = false;
        pass.seen |= page.entries.iter().any(|entry| entry.dead);
        for entry in page.entries.iter_mut().filter(|entry| !entry.dead) {
            pass.reported |= 1 << entry.row;
            if pass.tids & (1 << entry.tid) == 0 {
                continue;
            }
            entry.dead = true;
            changed = true;
        }
        let all_dead = !page.entries.is_empty() && page.entries.iter().all(|entry| entry.dead);
        if changed {
            pass.marked = true;
            self.log(world, vec![PageModel::write(link, Body::Codes(page.clone()))]);
        }
        if !self.config.unlink || !all_dead || page.next.is_none() {
            return false;
        }
        let before = previous.map(|link| (link, world.db.codes(link).cloned()));
        let unlink = match (before, page.next) {
            (Some((link, Some(before))), next) => {
                PageModel::write(link, Body::Codes(Codes { next, ..before }))
            }
            (None, Some(next)) => PageModel::write_meta(Meta { head: next, ..*world.db.meta }),
            _ => return false,
        };
        let free = self.free(world, link);
        self.log(world, vec![unlink, free]);
        pass.marked = true;
        true
    }

    /// Tells readers that what they kept is old.
    fn tell(&self, world: &mut World) {
        let meta = Meta { marks: world.db.meta.marks + 1, ..*world.db.meta };
        self.log(world, vec![PageModel::write_meta(meta)]);
    }

    /// Reports a segment's ids and sets the tombstones of those that the heap gives up.
    fn mark(&self, world: &mut World, pass: &mut Pass, object: Object) -> Result<(), String> {
        let rows = world.objects[usize::from(object)].clone();
        let rows = rows.ok_or(format!("I4: VACUUM misses object {object}"))?;
        let before = world.db.dead_of(object);
        let mut dead = before;
        pass.seen |= before != 0;
        for (ordinal, (tid, row)) in rows.iter().enumerate() {
            if before & (1 << ordinal) != 0 {
                continue;
            }
            pass.reported |= 1 << row;
            if pass.tids & (1 << tid) != 0 {
                dead |= 1 << ordinal;
            }
        }
        if dead == before {
            return Ok(());
        }
        pass.marked = true;
        let chain = world.db.tombstone_chain()?;
        let page = chain.iter().find(|(_, page)| page.object == object);
        let writes = match page {
            Some((link, page)) => {
                let body = Tombstones { dead, ..(*page).clone() };
                vec![PageModel::write(*link, Body::Tombstones(body))]
            }
            None => {
                let link = self.allocate(world, &[]);
                let body = Tombstones { object, dead, next: world.db.meta.tombstones };
                let meta = Meta { tombstones: Some(link), ..*world.db.meta };
                vec![PageModel::write(link, Body::Tombstones(body)), PageModel::write_meta(meta)]
            }
        };
        self.log(world, writes);
        Ok(())
    }
}
