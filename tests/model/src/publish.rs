//! Flush and compaction: copy, upload, publish; and the sweep of what that leaves behind.

use crate::db::*;
use crate::explore::Shared;
use crate::world::{Broken, PageModel, Steps, World};

/// Where a row of a new segment was copied from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    Delta(Link, u8),
    Segment(Object, u8),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Copy {
    rows: Vec<(Tid, Row)>,
    sources: Vec<Source>,
    /// Of a flush: the oldest generation of the delta then, and the one that is to be its oldest.
    generations: Option<(u8, u8)>,
    /// Segments that the new one stands in for.
    replaces: Vec<Object>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    Lock,
    Root {
        tombstones: Option<Link>,
        used: Option<Link>,
    },
    Flip {
        tombstones: Option<Link>,
        root: Link,
        page: Root,
    },
    /// Only a broken publication has something left to do.
    Late {
        root: Option<(Link, Root)>,
    },
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Flush {
    Idle,
    Copy { at: Link, copy: Copy },
    Upload(Copy),
    Publish(Copy, Object, Stage),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Compaction {
    Idle,
    Upload(Copy),
    Publish(Copy, Object, Stage),
}

impl Flush {
    /// Whether a coarse schedule goes on.
    pub fn between(&self) -> bool {
        !matches!(self, Flush::Idle | Flush::Publish(_, _, Stage::Lock))
    }
}

impl Compaction {
    /// Whether a coarse schedule goes on.
    pub fn between(&self) -> bool {
        !matches!(self, Compaction::Idle | Compaction::Publish(_, _, Stage::Lock))
    }
}

/// What a step of a publication leads to.
enum Next {
    Stage(Stage),
    Done,
}

impl PageModel {
    pub fn flush(&self, world: &World, who: usize, out: &mut Steps) {
        let label = |name| (name, who as u8);
        if world.flushers[who] == Flush::Idle && world.budget.flushes == 0 {
            return;
        }
        let mut next = world.clone();
        match &world.flushers[who] {
            Flush::Idle => {
                let Some(copy) = self.seal(&mut next) else { return };
                next.budget.flushes -= 1;
                let at = world.db.meta.head;
                next.flushers[who] = Flush::Copy { at, copy };
                out.push((label("flush: seal"), Ok(next)));
            }
            Flush::Copy { at, copy } => {
                let (_, end) = copy.generations.expect("a flush has generations");
                let mut copy = copy.clone();
                next.flushers[who] = match world.db.stamped(*at) {
                    Some(Body::Codes(page)) if page.generation < end => {
                        self.copy_page(world, *at, page, &mut copy);
                        match page.next {
                            Some(following) => Flush::Copy { at: following, copy },
                            None => Flush::Upload(copy),
                        }
                    }
                    Some(Body::Codes(_)) => Flush::Upload(copy),
                    // Recycled: another flush was faster.
                    _ => Flush::Idle,
                };
                out.push((label("flush: copy"), Ok(next)));
            }
            Flush::Upload(copy) => {
                let object = self.upload(&mut next, copy);
                next.flushers[who] = Flush::Publish(copy.clone(), object, Stage::Lock);
                out.push((label("flush: upload"), Ok(next)));
            }
            Flush::Publish(copy, object, stage) => {
                let Some(after) = self.publish(&mut next, copy, *object, stage) else { return };
                next.flushers[who] = match after {
                    Next::Stage(stage) => Flush::Publish(copy.clone(), *object, stage),
                    Next::Done => Flush::Idle,
                };
                out.push((label(stage_name(stage)), Ok(next)));
            }
        }
    }

    pub fn compact(&self, world: &World, out: &mut Steps) {
        if world.compaction == Compaction::Idle && world.budget.compactions == 0 {
            return;
        }
        let mut next = world.clone();
        let name = match &world.compaction {
            Compaction::Idle => {
                let segments = world.db.live_root().map_or(Vec::new(), |r| r.segments.clone());
                if segments.is_empty() {
                    return;
                }
                next.budget.compactions -= 1;
                let mut copy = Copy { replaces: segments.clone(), ..Copy::default() };
                for object in segments {
                    let dead = world.db.dead_of(object);
                    let Some(rows) = &world.objects[usize::from(object)] else { return };
                    for (ordinal, row) in rows.iter().enumerate() {
                        if dead & (1 << ordinal) == 0 {
                            copy.rows.push(*row);
                            copy.sources.push(Source::Segment(object, ordinal as u8));
                        }
                    }
                }
                next.compaction = Compaction::Upload(copy);
                "compaction: copy"
            }
            Compaction::Upload(copy) => {
                let object = self.upload(&mut next, copy);
                next.compaction = Compaction::Publish(copy.clone(), object, Stage::Lock);
                "compaction: upload"
            }
            Compaction::Publish(copy, object, stage) => {
                let Some(after) = self.publish(&mut next, copy, *object, stage) else { return };
                next.compaction = match after {
                    Next::Stage(stage) => Compaction::Publish(copy.clone(), *object, stage),
                    Next::Done => Compaction::Idle,
                };
                stage_name(stage)
            }
        };
        out.push(((name, 9), Ok(next)));
    }

    /// Starts a new generation, unless the newest is empty; `None` if there is nothing to flush.
    fn seal(&self, world: &mut World) -> Option<Copy> {
        let chain = world.db.code_chain(world.db.meta.head).ok()?;
        let (oldest, &(at, tail)) = (chain.first()?.1.generation, chain.last()?);
        let mut newest = chain.iter().filter(|(_, page)| page.generation == tail.generation);
        if newest.all(|(_, page)| page.entries.is_empty()) {
            let generations = Some((oldest, tail.generation));
            return (oldest < tail.generation).then(|| Copy { generations, ..Copy::default() });
        }
        let generation = tail.generation + 1;
        if !self.is(Broken::NoSeal) {
            let codes = self.allocate(world, &[]);
            let sealed = Codes { next: Some(codes), ..tail.clone() };
            let first = Codes { generation, next: None, entries: Vec::new() };
            let writes = vec![
                PageModel::write(codes, Body::Codes(first)),
                PageModel::write(at, Body::Codes(sealed)),
            ];
            self.log(world, writes);
        }
        Some(Copy { generations: Some((oldest, generation)), ..Copy::default() })
    }

    fn copy_page(&self, world: &World, at: Link, page: &Codes, copy: &mut Copy) {
        for (slot, entry) in page.entries.iter().enumerate() {
            let seen = world.db.visible(entry.tid, world.db.committed) == Some(entry.row);
            if entry.dead || (self.is(Broken::FlushJudgesVisibility) && !seen) {
                continue;
            }
            copy.rows.push((entry.tid, entry.row));
            copy.sources.push(Source::Delta(at, slot as u8));
        }
    }

    fn upload(&self, world: &mut World, copy: &Copy) -> Object {
        let late = self.is(Broken::MetaBeforeUpload);
        world.objects.push((!late).then(|| Shared::new(copy.rows.clone())));
        world.dropped.push(None);
        world.objects.len() as Object - 1
    }

    fn is_dead(world: &World, source: Source) -> bool {
        match source {
            // VACUUM unlinks a page only if all its rows are dead.
            Source::Delta(page, slot) => {
                world.db.codes(page).is_none_or(|page| page.entries[usize::from(slot)].dead)
            }
            Source::Segment(object, at) => world.db.dead_of(object) & (1 << at) != 0,
        }
    }

    fn publish(
        &self,
        world: &mut World,
        copy: &Copy,
        object: Object,
        stage: &Stage,
    ) -> Option<Next> {
        match stage {
            Stage::Lock => self.lock_and_mark(world, copy, object),
            Stage::Root { tombstones, used } => {
                let taken: Vec<Link> = used.iter().copied().collect();
                let link = self.allocate(world, &taken);
                let page = self.next_root(world, copy, object)?;
                if !self.is(Broken::MetaBeforePage) {
                    self.log(world, vec![PageModel::write(link, Body::Root(page.clone()))]);
                }
                Some(Next::Stage(Stage::Flip { tombstones: *tombstones, root: link, page }))
            }
            Stage::Flip { tombstones, root, page } => {
                if self.is(Broken::FreeBeforePublish) && self.free_one_source(world, copy) {
                    return Some(Next::Stage(stage.clone()));
                }
                self.flip(world, copy, *tombstones, *root);
                let late = self.is(Broken::MetaBeforePage).then(|| (*root, page.clone()));
                if late.is_some() || self.is(Broken::MetaBeforeUpload) {
                    return Some(Next::Stage(Stage::Late { root: late }));
                }
                Some(Next::Done)
            }
            Stage::Late { root } => {
                if let Some((link, page)) = root {
                    self.log(world, vec![PageModel::write(*link, Body::Root(page.clone()))]);
                }
                world.objects[usize::from(object)] = Some(Shared::new(copy.rows.clone()));
                Some(Next::Done)
            }
        }
    }

    /// Takes the layout lock, checks the sources, and writes down which rows died since the copy.
    fn lock_and_mark(&self, world: &mut World, copy: &Copy, object: Object) -> Option<Next> {
        let lock = !self.is(Broken::NoLayoutLock);
        if world.layout_exclusive || (lock && world.layout_shared) {
            return None;
        }
        let root = world.db.live_root()?;
        let there = copy.replaces.iter().all(|object| root.segments.contains(object))
            && copy.generations.is_none_or(|(oldest, _)| {
                world.db.codes(world.db.meta.head).is_some_and(|page| page.generation == oldest)
            });
        if !there && !self.is(Broken::SourcesUnchecked) {
            return Some(Next::Done);
        }
        world.layout_exclusive = true;
        let keep = match copy.generations {
            Some(_) => self.is(Broken::FlushKeepsOldDeadMarks),
            None => self.is(Broken::CompactionKeepsOldTombstones),
        };
        let mut dead = 0;
        for (ordinal, source) in copy.sources.iter().enumerate() {
            if !keep && Self::is_dead(world, *source) {
                dead |= 1 << ordinal;
            }
        }
        let mut tombstones = world.db.meta.tombstones;
        let mut used = None;
        if dead != 0 {
            let link = self.allocate(world, &[]);
            let page = Tombstones { object, dead, next: tombstones };
            self.log(world, vec![PageModel::write(link, Body::Tombstones(page))]);
            (tombstones, used) = (Some(link), Some(link));
        }
        Some(Next::Stage(Stage::Root { tombstones, used }))
    }

    fn next_root(&self, world: &World, copy: &Copy, object: Object) -> Option<Root> {
        let mut root = world.db.live_root()?.clone();
        root.segments.retain(|segment| !copy.replaces.contains(segment));
        root.segments.push(object);
        if copy.generations.is_none() {
            // The first cell is split in two.
            let new = root.cells.iter().max()? + 1;
            let old = root.cells.remove(0);
            root.cells.extend([new, new + 1]);
            if !self.config.forget_successors && !self.is(Broken::UnknownCellDropped) {
                root.successors.push((old, new));
            }
        }
        Some(root)
    }

    fn flip(&self, world: &mut World, copy: &Copy, tombstones: Option<Link>, root: Link) {
        let mut meta = Meta::clone(&world.db.meta);
        meta.epoch += 1;
        meta.root = root;
        meta.tombstones = tombstones;
        let mut writes = Vec::new();
        if let Some((_, end)) = copy.generations {
            let chain = world.db.code_chain(meta.head).unwrap_or_default();
            let first = chain.iter().find(|(_, page)| page.generation >= end);
            meta.head = match first {
                Some((link, _)) => *link,
                None => {
                    // Not sealed: nothing is kept.
                    let codes = self.allocate(world, &[]);
                    let first = Codes { generation: end, next: None, entries: Vec::new() };
                    writes.push(PageModel::write(codes, Body::Codes(first)));
                    codes
                }
            };
        }
        for object in &copy.replaces {
            world.dropped[usize::from(*object)] = Some(meta.epoch);
        }
        writes.push(PageModel::write_meta(meta));
        self.log(world, writes);
        world.layout_exclusive = false;
    }

    fn free_one_source(&self, world: &mut World, copy: &Copy) -> bool {
        let used = copy.sources.iter().find_map(|source| match source {
            Source::Delta(link, _) => world.db.codes(*link).map(|_| *link),
            Source::Segment(..) => None,
        });
        let Some(link) = used else { return false };
        let write = self.free(world, link);
        self.log(world, vec![write]);
        true
    }

    /// Frees one page that meta does not lead to, or unlinks the tombstones of an object that is gone.
    pub fn sweep(&self, world: &World, out: &mut Steps) {
        if world.layout_exclusive || world.layout_shared {
            return;
        }
        if let Some((previous, link, page)) = Self::stale_tombstones(&world.db) {
            let mut next = world.clone();
            let free = self.free(&mut next, link);
            let unlink = match previous {
                None => PageModel::write_meta(Meta { tombstones: page.next, ..*world.db.meta }),
                Some((at, before)) => {
                    let body = Tombstones { next: page.next, ..before };
                    PageModel::write(at, Body::Tombstones(body))
                }
            };
            self.log(&mut next, vec![unlink, free]);
            out.push((("sweep: tombstones", link.block), Ok(next)));
            return;
        }
        let Ok(reachable) = world.db.reachable() else { return };
        for (block, page) in world.db.pages.iter().enumerate() {
            let link = Link { block: block as u8, stamp: page.stamp };
            let unreferenced = self.is(Broken::FreeUnreferencedVectors)
                && matches!(page.body, Body::Vectors(_))
                && !Self::referenced(&world.db, link);
            if page.freed || (reachable.contains(&link) && !unreferenced) {
                continue;
            }
            let mut next = world.clone();
            let free = self.free(&mut next, link);
            self.log(&mut next, vec![free]);
            out.push((("sweep: free", link.block), Ok(next)));
            return;
        }
    }

    fn referenced(db: &Db, vectors: Link) -> bool {
        let chain = db.code_chain(db.meta.head).unwrap_or_default();
        chain.iter().flat_map(|(_, page)| &page.entries).any(|entry| entry.vector.page == vectors)
    }

    #[allow(clippy::type_complexity)]
    fn stale_tombstones(db: &Db) -> Option<(Option<(Link, Tombstones)>, Link, Tombstones)> {
        let root = db.live_root()?;
        let chain = db.tombstone_chain().ok()?;
        let stale = chain.iter().position(|(_, page)| !root.segments.contains(&page.object))?;
        let previous = stale.checked_sub(1).map(|at| (chain[at].0, chain[at].1.clone()));
        Some((previous, chain[stale].0, chain[stale].1.clone()))
    }
}

fn stage_name(stage: &Stage) -> &'static str {
    match stage {
        Stage::Lock => "publish: lock, mark",
        Stage::Root { .. } => "publish: root",
        Stage::Flip { .. } => "publish: flip",
        Stage::Late { .. } => "publish: late",
    }
}
