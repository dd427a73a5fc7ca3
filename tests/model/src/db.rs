//! The pages of an index relation, the heap beside it, and the log that changes both.

use crate::explore::Shared;

pub type Tid = u8;
/// Stands for one row version and its vector: never used twice.
pub type Row = u8;
pub type Xid = u8;
pub type Object = u8;
pub type Cell = u8;

/// The most pages that one generic WAL record may change.
pub const PAGES_PER_RECORD: usize = 4;

/// A pointer to a page: which block, and which use of that block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Link {
    pub block: u8,
    pub stamp: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct VectorRef {
    pub page: Link,
    pub slot: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Entry {
    pub tid: Tid,
    pub row: Row,
    pub cell: Cell,
    pub dead: bool,
    pub vector: VectorRef,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Root {
    pub segments: Vec<Object>,
    pub cells: Vec<Cell>,
    /// A cell that is gone, and the one that answers for its delta rows.
    pub successors: Vec<(Cell, Cell)>,
}

impl Root {
    /// The live cell at which a delta row is scored; `None` if the root never heard of its cell.
    pub fn resolve(&self, mut cell: Cell) -> Option<Cell> {
        while !self.cells.contains(&cell) {
            cell = self.successors.iter().find(|s| s.0 == cell)?.1;
        }
        Some(cell)
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Codes {
    /// Delta generation: a flush seals one and starts the next.
    pub generation: u8,
    pub next: Option<Link>,
    pub entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Vectors {
    /// The code page whose entries refer to these vectors.
    pub owner: Link,
    pub rows: Vec<Row>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Tombstones {
    pub object: Object,
    pub dead: u16,
    pub next: Option<Link>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Body {
    Root(Root),
    Tombstones(Tombstones),
    Codes(Codes),
    Vectors(Vectors),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Page {
    pub stamp: u8,
    /// May be taken for another use; keeps its content until then, for readers on their way.
    pub freed: bool,
    pub body: Body,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Meta {
    /// Changed by every publication.
    pub epoch: u8,
    pub root: Link,
    pub tombstones: Option<Link>,
    pub head: Link,
    /// A hint: where the last code page was.
    pub tail: Link,
    /// Changed by VACUUM once rows are marked dead, before the heap reuses their TIDs: tells readers
    /// that what they kept of delta and tombstones is old.
    pub marks: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Slot {
    Unused,
    Tuple { row: Row, inserted: Xid, deleted: Option<Xid> },
    Dead,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Write {
    Meta(Shared<Meta>),
    Page(u8, Shared<Page>),
    Heap(Tid, Slot),
    Commit(Xid),
    /// Standby snapshots that do not see all these deletions must be gone before replay.
    Conflict(u16),
}

/// One WAL record: replayed whole.
pub type Record = Shared<Vec<Write>>;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Db {
    pub meta: Shared<Meta>,
    pub pages: Vec<Shared<Page>>,
    pub heap: Vec<Slot>,
    pub committed: u16,
}

impl Db {
    /// An empty index over a heap of `tids` slots.
    pub fn new(tids: u8) -> Db {
        let link = |block| Link { block, stamp: 1 };
        let root = Root { cells: vec![1], ..Root::default() };
        let codes = Codes { generation: 1, next: None, entries: Vec::new() };
        let page = |body| Shared::new(Page { stamp: 1, freed: false, body });
        Db {
            meta: Shared::new(Meta {
                epoch: 1,
                root: link(0),
                tombstones: None,
                head: link(1),
                tail: link(1),
                marks: 0,
            }),
            pages: vec![page(Body::Root(root)), page(Body::Codes(codes))],
            heap: vec![Slot::Unused; tids.into()],
            committed: 0,
        }
    }

    pub fn apply(&mut self, record: &Record) {
        for write in record.iter() {
            match write {
                Write::Meta(meta) => self.meta = meta.clone(),
                Write::Page(block, page) => {
                    let block = usize::from(*block);
                    if block == self.pages.len() {
                        self.pages.push(page.clone());
                    } else {
                        self.pages[block] = page.clone();
                    }
                }
                Write::Heap(tid, slot) => self.heap[usize::from(*tid)] = *slot,
                Write::Commit(xid) => self.committed |= 1 << xid,
                Write::Conflict(_) => {}
            }
        }
    }

    /// The page behind a link, if it is still in the use that the link means; it may have been freed.
    pub fn stamped(&self, link: Link) -> Option<&Body> {
        let page = self.pages.get(usize::from(link.block))?;
        (page.stamp == link.stamp).then_some(&page.body)
    }

    /// The page behind a link, if it is in use.
    pub fn page(&self, link: Link) -> Option<&Body> {
        self.stamped(link).filter(|_| !self.pages[usize::from(link.block)].freed)
    }

    pub fn codes(&self, link: Link) -> Option<&Codes> {
        if let Body::Codes(codes) = self.page(link)? { Some(codes) } else { None }
    }

    pub fn vectors(&self, link: Link) -> Option<&Vectors> {
        if let Body::Vectors(vectors) = self.page(link)? { Some(vectors) } else { None }
    }

    pub fn tombstones(&self, link: Link) -> Option<&Tombstones> {
        if let Body::Tombstones(page) = self.page(link)? { Some(page) } else { None }
    }

    pub fn root(&self, link: Link) -> Option<&Root> {
        if let Body::Root(root) = self.page(link)? { Some(root) } else { None }
    }

    /// The current root.
    pub fn live_root(&self) -> Option<&Root> {
        self.root(self.meta.root)
    }

    /// Code pages from `from` on, in order; an error names the link that leads nowhere.
    pub fn code_chain(&self, from: Link) -> Result<Vec<(Link, &Codes)>, String> {
        let (mut chain, mut at) = (Vec::new(), Some(from));
        while let Some(link) = at {
            let page = self.codes(link).ok_or(format!("code page {link:?} is not there"))?;
            chain.push((link, page));
            at = page.next;
        }
        Ok(chain)
    }

    pub fn tombstone_chain(&self) -> Result<Vec<(Link, &Tombstones)>, String> {
        let (mut chain, mut at) = (Vec::new(), self.meta.tombstones);
        while let Some(link) = at {
            let page = self.tombstones(link).ok_or(format!("tombstones {link:?} are not there"))?;
            chain.push((link, page));
            at = page.next;
        }
        Ok(chain)
    }

    /// Dead ordinals of a segment.
    pub fn dead_of(&self, object: Object) -> u16 {
        let chain = self.tombstone_chain().unwrap_or_default();
        chain.iter().filter(|(_, page)| page.object == object).fold(0, |all, (_, p)| all | p.dead)
    }

    pub fn committed(&self, xid: Xid) -> bool {
        self.committed & (1 << xid) != 0
    }

    /// The row at `tid` that a snapshot (a set of committed transactions) sees.
    pub fn visible(&self, tid: Tid, snapshot: u16) -> Option<Row> {
        match self.heap[usize::from(tid)] {
            Slot::Tuple { row, inserted, deleted } => {
                let sees = |xid: Xid| snapshot & (1 << xid) != 0;
                (sees(inserted) && !deleted.is_some_and(sees)).then_some(row)
            }
            _ => None,
        }
    }

    /// Links of every page in use: those that meta leads to, and the vector pages of its code pages.
    pub fn reachable(&self) -> Result<Vec<Link>, String> {
        let mut links = vec![self.meta.root];
        self.live_root().ok_or("the root is not there")?;
        links.extend(self.tombstone_chain()?.iter().map(|(link, _)| *link));
        links.extend(self.code_chain(self.meta.head)?.iter().map(|(link, _)| *link));
        for (block, page) in self.pages.iter().enumerate() {
            match &page.body {
                Body::Vectors(vectors) if !page.freed && links.contains(&vectors.owner) => {
                    links.push(Link { block: block as u8, stamp: page.stamp });
                }
                _ => {}
            }
        }
        Ok(links)
    }
}
