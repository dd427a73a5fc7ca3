//! A transaction that inserts one row: heap, vector, entry, hint, commit.

use crate::db::*;
use crate::world::{Broken, PageModel, Steps, World};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NewRow {
    pub tid: Tid,
    pub row: Row,
    pub xid: Xid,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Inserter {
    Idle,
    /// The heap has the row.
    Started(NewRow),
    /// Where meta says that the tail is, and the row's cell by the root of that moment.
    ReadMeta(NewRow, Link, Cell),
    /// The vector is stored, with the code page that is to have the entry.
    Stored(NewRow, Cell, VectorRef, Link),
    /// The entry is published; this page was added for it.
    Published(NewRow, Option<Link>),
}

impl Inserter {
    /// Whether a coarse schedule goes on.
    pub fn between(&self) -> bool {
        matches!(self, Inserter::Started(_) | Inserter::ReadMeta(..))
    }

    /// The transaction in progress, if any.
    pub fn xid(&self) -> Option<Xid> {
        match self {
            Inserter::Idle => None,
            Inserter::Started(new)
            | Inserter::ReadMeta(new, ..)
            | Inserter::Stored(new, ..)
            | Inserter::Published(new, _) => Some(new.xid),
        }
    }
}

impl PageModel {
    pub fn insert(&self, world: &World, who: usize, out: &mut Steps) {
        let label = |name| (name, who as u8);
        let state = world.inserters[who];
        if state == Inserter::Idle && world.budget.inserts == 0 {
            return;
        }
        let mut next = world.clone();
        match state {
            Inserter::Idle => {
                let free = world.db.heap.iter().position(|slot| *slot == Slot::Unused);
                let Some(tid) = free else { return };
                let new = NewRow { tid: tid as u8, row: world.next_row, xid: world.next_xid };
                next.next_row += 1;
                next.next_xid += 1;
                next.budget.inserts -= 1;
                let slot = Slot::Tuple { row: new.row, inserted: new.xid, deleted: None };
                self.log(&mut next, vec![Write::Heap(new.tid, slot)]);
                next.inserters[who] = Inserter::Started(new);
                out.push((label("insert: heap"), Ok(next)));
            }
            Inserter::Started(new) => {
                let cell = world.db.live_root().and_then(|root| root.cells.last().copied());
                next.inserters[who] =
                    Inserter::ReadMeta(new, world.db.meta.tail, cell.unwrap_or(0));
                out.push((label("insert: read meta"), Ok(next)));
            }
            Inserter::ReadMeta(new, hint, cell) => {
                self.store_vector(&mut next, who, new, hint, cell);
                out.push((label("insert: vector"), Ok(next)));
            }
            Inserter::Stored(new, cell, vector, owner) => {
                self.publish_entry(&mut next, who, new, cell, vector, owner);
                out.push((label("insert: entry"), Ok(next)));
            }
            Inserter::Published(new, Some(added)) => {
                let meta = Meta { tail: added, ..*world.db.meta };
                self.log(&mut next, vec![PageModel::write_meta(meta)]);
                next.inserters[who] = Inserter::Published(new, None);
                out.push((label("insert: hint"), Ok(next)));
            }
            Inserter::Published(new, None) => {
                if world.budget.aborts > 0 {
                    let mut aborted = world.clone();
                    aborted.budget.aborts -= 1;
                    aborted.inserters[who] = Inserter::Idle;
                    self.move_horizon(&mut aborted);
                    out.push((label("insert: abort"), Ok(aborted)));
                }
                self.log(&mut next, vec![Write::Commit(new.xid)]);
                self.flush_log(&mut next);
                next.inserters[who] = Inserter::Idle;
                self.move_horizon(&mut next);
                out.push((label("insert: commit"), Ok(next)));
            }
        }
    }

    /// The last code page, from the hint if it still is a code page of this index, else from the head.
    fn tail(world: &World, hint: Link) -> Option<(Link, &Codes)> {
        let chain = world.db.code_chain(hint);
        let chain = chain.or_else(|_| world.db.code_chain(world.db.meta.head));
        chain.ok()?.last().copied()
    }

    /// Stores the vector with the last code page, after adding one if that is full.
    fn store_vector(&self, world: &mut World, who: usize, new: NewRow, hint: Link, cell: Cell) {
        let before = world.clone();
        let Some((mut owner, page)) = Self::tail(&before, hint) else { return };
        let full = page.entries.len() >= self.config.page_rows;
        if full {
            let added = self.allocate(&before, &[]);
            let changed = Codes { next: Some(added), ..page.clone() };
            let empty = Codes { next: None, entries: Vec::new(), ..page.clone() };
            let writes = vec![
                PageModel::write(added, Body::Codes(empty)),
                PageModel::write(owner, Body::Codes(changed)),
            ];
            self.log(world, writes);
            owner = added;
        }
        let last = page.entries.last().filter(|_| !full).map(|entry| entry.vector.page);
        let room = last.and_then(|link| Some((link, world.db.vectors(link)?.clone())));
        let room = room.filter(|(_, vectors)| vectors.rows.len() < self.config.page_rows);
        let (link, mut vectors) = room
            .unwrap_or_else(|| (self.allocate(world, &[]), Vectors { owner, rows: Vec::new() }));
        let vector = VectorRef { page: link, slot: vectors.rows.len() as u8 };
        vectors.rows.push(new.row);
        if self.is(Broken::EntryBeforeVector) {
            self.publish_entry(world, who, new, cell, vector, owner);
        }
        self.log(world, vec![PageModel::write(link, Body::Vectors(vectors))]);
        if !self.is(Broken::EntryBeforeVector) {
            world.inserters[who] = Inserter::Stored(new, cell, vector, owner);
        }
    }

    /// Adds the entry, if the page that has the vector is still the last and has room.
    fn publish_entry(
        &self,
        world: &mut World,
        who: usize,
        new: NewRow,
        cell: Cell,
        vector: VectorRef,
        owner: Link,
    ) {
        let before = world.clone();
        let Some((at, last)) = Self::tail(&before, owner) else { return };
        let other = at != owner && !self.is(Broken::VectorOfOtherPage);
        if other || last.entries.len() >= self.config.page_rows {
            // Sealed or filled in between: the vector's page goes with its code page.
            world.inserters[who] = Inserter::Started(new);
            return;
        }
        let mut changed = last.clone();
        changed.entries.push(Entry { tid: new.tid, row: new.row, cell, dead: false, vector });
        self.log(world, vec![PageModel::write(at, Body::Codes(changed))]);
        let added = (at != before.db.meta.tail).then_some(at);
        world.inserters[who] = Inserter::Published(new, added);
    }
}
