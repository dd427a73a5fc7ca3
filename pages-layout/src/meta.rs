//! The meta page (block 0): everything else is reached from here, and one change of it publishes.

use polign_engine::{Metric, ObjectId};
use zerocopy::{
    F32, F64, FromBytes, Immutable, IntoBytes, KnownLayout, LittleEndian, Unaligned,
    little_endian::{I64, U16, U32, U64},
};

use crate::{
    Link, PageError, PageMut, PageRef,
    blob::{BlobHead, RawBlobHead},
    image::RawLink,
};

/// The block of the meta page.
pub const META_BLOCK: u32 = 0;
/// The stamp of the meta page: its block is never reused.
pub const META_STAMP: u32 = 1;
/// The index format that this version reads.
pub const READER_VERSION: u16 = 1;
/// The index format that this version writes.
pub const WRITER_VERSION: u16 = 1;
/// Most sections that a root can have.
pub const MAX_SECTIONS: usize = 32;
/// Most bytes of a store's URL.
pub const MAX_URL_LEN: usize = 2048;

const MAGIC: u32 = u32::from_le_bytes(*b"PLGN");

/// The element type of the indexed column; the discriminant is its number in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Element {
    /// pgvector's `vector`: 32-bit floats.
    Vector = 1,
    /// pgvector's `halfvec`: 16-bit floats.
    Halfvec = 2,
}

/// What a writer id is bound to. Copies of a database or a cluster share everything else, so a writer
/// id counts only where all three agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Binding {
    /// The system identifier of the cluster.
    pub system: u64,
    /// The timeline.
    pub timeline: u32,
    /// The database's OID.
    pub database: u32,
}

/// Who may write and delete objects of this index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Writer {
    /// The writer id, nil before the first write to the store.
    pub id: ObjectId,
    /// What it is bound to.
    pub binding: Binding,
    /// What the owner object in the store holds.
    pub nonce: ObjectId,
    /// What it will hold after the write that is in progress; nil if none is.
    pub next_nonce: ObjectId,
}

/// The rows that are not in the store yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Delta {
    /// The first code page.
    pub head: Option<Link>,
    /// A page near the last code page: a hint that may be out of date.
    pub tail_hint: Option<Link>,
    /// Grows after dead marks were set or pages unlinked: as long as it stands still, a page that is
    /// not the last of the chain has not changed.
    pub marks: u64,
}

/// When background maintenance may try again after it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retry {
    /// How often it has failed since it last succeeded.
    pub failures: u32,
    /// Not before this time, in microseconds since 2000-01-01 UTC.
    pub not_before: i64,
}

/// The decoded meta page.
#[derive(Debug, Clone, PartialEq)]
pub struct Meta {
    /// The least format version that a reader of this index needs.
    pub min_reader: u16,
    /// The least format version that a writer of this index needs.
    pub min_writer: u16,
    /// Names this index; nil until the first write.
    pub index_id: ObjectId,
    /// Names the root that is published; nil when there is none.
    pub root_id: ObjectId,
    /// Names the store; nil before the first write to it.
    pub store_id: ObjectId,
    /// The store's URL as of the build; empty before the first write to it.
    pub store_url: String,
    /// OID of the foreign server that names the store, 0 for the default store.
    pub server: u32,
    /// Who may write to the store.
    pub writer: Writer,
    /// When the writer was last compared with the store, in minutes since 2000-01-01 UTC; 0 for never.
    pub writer_checked: u32,
    /// The metric of the operator class.
    pub metric: Metric,
    /// The element type of the column.
    pub element: Element,
    /// Dimensions of a vector.
    pub dim: u32,
    /// Dimensions of model space.
    pub padded_dim: u32,
    /// Bits a dimension of the scanned codes.
    pub bits: u8,
    /// Seed of the rotation that rows get before there is a root.
    pub seed: u64,
    /// Cells of the root as built; 0 for an index created empty.
    pub lists: u32,
    /// The option `target_recall` as of the build; 0 if it was not given.
    pub target_recall: f64,
    /// Grows with each publication. Compared only within one consistent reading of the pages.
    pub epoch: u64,
    /// The number of the next new cell; numbers are never reused.
    pub next_cell: u32,
    /// Rows in the segments of the root, dead ones included.
    pub rows: u64,
    /// Rows of the heap as the build counted them.
    pub built_rows: u64,
    /// Rows of the segments that were not dead when the recall curves were made.
    pub calibrated_rows: u64,
    /// The root-mean-square distance of rows to the centroids of their cells when the cells were made; 0 if
    /// it is not known.
    pub built_spread: f32,
    /// The delta.
    pub delta: Delta,
    /// The first tombstone page.
    pub tombstones: Option<Link>,
    /// Grows after tombstones were set or their pages unlinked.
    pub tombstone_marks: u64,
    /// The first page of pending objects.
    pub pending: Option<Link>,
    /// The first page of retired objects.
    pub retired: Option<Link>,
    /// Background maintenance after a failure.
    pub retry: Retry,
    /// The sections of the root.
    pub sections: Vec<BlobHead>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawMeta {
    magic: U32,
    min_reader: U16,
    min_writer: U16,
    index_id: ObjectId,
    root_id: ObjectId,
    store_id: ObjectId,
    writer_id: ObjectId,
    writer_system: U64,
    writer_timeline: U32,
    writer_database: U32,
    nonce: ObjectId,
    next_nonce: ObjectId,
    server: U32,
    dim: U32,
    padded_dim: U32,
    lists: U32,
    seed: U64,
    target_recall: F64<LittleEndian>,
    epoch: U64,
    rows: U64,
    built_rows: U64,
    next_cell: U32,
    metric: u8,
    element: u8,
    bits: u8,
    reserved0: u8,
    delta_head: RawLink,
    delta_tail_hint: RawLink,
    delta_marks: U64,
    tombstones: RawLink,
    tombstone_marks: U64,
    pending: RawLink,
    retired: RawLink,
    retry_not_before: I64,
    retry_failures: U32,
    built_spread: F32<LittleEndian>,
    calibrated_rows: U64,
    /// Reserved for links that later versions add.
    reserved1: [RawLink; 5],
    sections: [RawBlobHead; MAX_SECTIONS],
    section_count: U16,
    url_len: U16,
    writer_checked: U32,
}

const FIXED: usize = size_of::<RawMeta>();
const _: () = assert!(FIXED + MAX_URL_LEN <= crate::content_capacity());

impl Meta {
    /// The meta page of an index without rows and without a root.
    pub fn empty(metric: Metric, element: Element, dim: u32, padded_dim: u32, bits: u8) -> Self {
        Self {
            min_reader: READER_VERSION,
            min_writer: WRITER_VERSION,
            index_id: ObjectId::NIL,
            root_id: ObjectId::NIL,
            store_id: ObjectId::NIL,
            store_url: String::new(),
            server: 0,
            writer: Writer::default(),
            writer_checked: 0,
            metric,
            element,
            dim,
            padded_dim,
            bits,
            seed: 0,
            lists: 0,
            target_recall: 0.0,
            epoch: 0,
            next_cell: 1,
            rows: 0,
            built_rows: 0,
            calibrated_rows: 0,
            built_spread: 0.0,
            delta: Delta::default(),
            tombstones: None,
            tombstone_marks: 0,
            pending: None,
            retired: None,
            retry: Retry::default(),
            sections: Vec::new(),
        }
    }

    /// Reads and checks a meta page, and that this version may read the index.
    pub fn decode(page: PageRef<'_>) -> Result<Self, PageError> {
        let (raw, tail) = RawMeta::ref_from_prefix(page.content())
            .map_err(|_| PageError::Content("the meta page is too short"))?;
        if raw.magic.get() != MAGIC {
            return Err(PageError::Content("the meta page has a wrong magic number"));
        }
        let needed = raw.min_reader.get();
        if needed > READER_VERSION {
            return Err(PageError::Newer { action: "read", needed, known: READER_VERSION });
        }
        if page.index_id() != raw.index_id {
            return Err(PageError::Content("the meta page contradicts its own index id"));
        }
        let store_url = tail
            .get(..usize::from(raw.url_len.get()))
            .filter(|url| url.len() <= MAX_URL_LEN)
            .and_then(|url| std::str::from_utf8(url).ok())
            .ok_or(PageError::Content("the meta page has a damaged store URL"))?;
        let sections = raw
            .sections
            .get(..usize::from(raw.section_count.get()))
            .ok_or(PageError::Content("the meta page has too many root sections"))?;
        let meta = Self {
            min_reader: needed,
            min_writer: raw.min_writer.get(),
            index_id: raw.index_id,
            root_id: raw.root_id,
            store_id: raw.store_id,
            store_url: store_url.to_owned(),
            server: raw.server.get(),
            writer: Writer {
                id: raw.writer_id,
                binding: Binding {
                    system: raw.writer_system.get(),
                    timeline: raw.writer_timeline.get(),
                    database: raw.writer_database.get(),
                },
                nonce: raw.nonce,
                next_nonce: raw.next_nonce,
            },
            writer_checked: raw.writer_checked.get(),
            metric: Metric::from_code(raw.metric)
                .ok_or(PageError::Content("the meta page names an unknown metric"))?,
            element: match raw.element {
                1 => Element::Vector,
                2 => Element::Halfvec,
                _ => return Err(PageError::Content("the meta page names an unknown type")),
            },
            dim: raw.dim.get(),
            padded_dim: raw.padded_dim.get(),
            bits: raw.bits,
            seed: raw.seed.get(),
            lists: raw.lists.get(),
            target_recall: raw.target_recall.get(),
            epoch: raw.epoch.get(),
            next_cell: raw.next_cell.get(),
            rows: raw.rows.get(),
            built_rows: raw.built_rows.get(),
            calibrated_rows: raw.calibrated_rows.get(),
            built_spread: raw.built_spread.get(),
            delta: Delta {
                head: raw.delta_head.into(),
                tail_hint: raw.delta_tail_hint.into(),
                marks: raw.delta_marks.get(),
            },
            tombstones: raw.tombstones.into(),
            tombstone_marks: raw.tombstone_marks.get(),
            pending: raw.pending.into(),
            retired: raw.retired.into(),
            retry: Retry {
                failures: raw.retry_failures.get(),
                not_before: raw.retry_not_before.get(),
            },
            sections: sections.iter().map(BlobHead::from).collect(),
        };
        meta.check()?;
        Ok(meta)
    }

    fn check(&self) -> Result<(), PageError> {
        let known_form = (1..=16_000).contains(&self.dim)
            && self.padded_dim == self.dim.next_multiple_of(16)
            && (1..=2).contains(&self.bits);
        if !known_form {
            return Err(PageError::Content("the meta page has dimensions that cannot be"));
        }
        if !(self.target_recall == 0.0 || (0.5..=1.0).contains(&self.target_recall)) {
            return Err(PageError::Content("the meta page has a target recall that cannot be"));
        }
        if self.sections.len() > MAX_SECTIONS || self.store_url.len() > MAX_URL_LEN {
            return Err(PageError::Content("the meta page cannot hold this"));
        }
        Ok(())
    }

    /// Whether this version may change the index.
    pub fn check_writable(&self) -> Result<(), PageError> {
        if self.min_writer > WRITER_VERSION {
            let (needed, known) = (self.min_writer, WRITER_VERSION);
            return Err(PageError::Newer { action: "written", needed, known });
        }
        Ok(())
    }

    /// Writes the meta page; fails on values that [`Meta::decode`] would refuse.
    pub fn encode(&self, page: &mut PageMut<'_>) -> Result<(), PageError> {
        self.check()?;
        let mut sections = [RawBlobHead::default(); MAX_SECTIONS];
        for (raw, head) in sections.iter_mut().zip(&self.sections) {
            *raw = head.into();
        }
        let Writer { id, binding, nonce, next_nonce } = self.writer;
        let raw = RawMeta {
            magic: MAGIC.into(),
            min_reader: self.min_reader.into(),
            min_writer: self.min_writer.into(),
            index_id: self.index_id,
            root_id: self.root_id,
            store_id: self.store_id,
            writer_id: id,
            writer_system: binding.system.into(),
            writer_timeline: binding.timeline.into(),
            writer_database: binding.database.into(),
            nonce,
            next_nonce,
            server: self.server.into(),
            dim: self.dim.into(),
            padded_dim: self.padded_dim.into(),
            lists: self.lists.into(),
            seed: self.seed.into(),
            target_recall: self.target_recall.into(),
            epoch: self.epoch.into(),
            rows: self.rows.into(),
            built_rows: self.built_rows.into(),
            next_cell: self.next_cell.into(),
            metric: self.metric.code(),
            element: self.element as u8,
            bits: self.bits,
            reserved0: 0,
            delta_head: self.delta.head.into(),
            delta_tail_hint: self.delta.tail_hint.into(),
            delta_marks: self.delta.marks.into(),
            tombstones: self.tombstones.into(),
            tombstone_marks: self.tombstone_marks.into(),
            pending: self.pending.into(),
            retired: self.retired.into(),
            retry_not_before: self.retry.not_before.into(),
            retry_failures: self.retry.failures.into(),
            built_spread: self.built_spread.into(),
            calibrated_rows: self.calibrated_rows.into(),
            reserved1: [None.into(); 5],
            sections,
            section_count: (self.sections.len() as u16).into(),
            url_len: (self.store_url.len() as u16).into(),
            writer_checked: self.writer_checked.into(),
        };
        page.set_index_id(self.index_id);
        let content = page.resize(FIXED + self.store_url.len())?;
        content[..FIXED].copy_from_slice(raw.as_bytes());
        content[FIXED..].copy_from_slice(self.store_url.as_bytes());
        Ok(())
    }

    /// The head of a section of the root, if it has one.
    pub fn section(&self, section: u32) -> Option<&BlobHead> {
        self.sections.iter().find(|head| head.section == section)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageKind, image::tests::page};

    fn meta() -> Meta {
        let id = |n| ObjectId([n; 16]);
        let link = |block| Some(Link { block, stamp: block + 1 });
        let head = |section| BlobHead {
            section,
            levels: 1,
            root: link(50 + section),
            crc: section,
            len: 1000,
            epoch: 3,
        };
        Meta {
            index_id: id(7),
            root_id: id(8),
            store_id: id(9),
            store_url: "s3://bucket/prefix".into(),
            server: 1,
            writer: Writer {
                id: id(10),
                binding: Binding { system: u64::MAX, timeline: 2, database: 3 },
                nonce: id(11),
                next_nonce: id(12),
            },
            writer_checked: 17,
            seed: 4,
            lists: 5,
            target_recall: 0.95,
            epoch: 6,
            next_cell: 7,
            rows: 8,
            built_rows: 9,
            calibrated_rows: 10,
            built_spread: 0.5,
            delta: Delta { head: link(10), tail_hint: link(11), marks: 12 },
            tombstones: link(13),
            tombstone_marks: 14,
            pending: link(15),
            retired: link(16),
            retry: Retry { failures: 17, not_before: -18 },
            sections: (1..=7).map(head).collect(),
            ..Meta::empty(Metric::Cosine, Element::Halfvec, 100, 112, 2)
        }
    }

    #[test]
    fn meta_round_trips() {
        for meta in [meta(), Meta::empty(Metric::L2, Element::Vector, 16_000, 16_000, 1)] {
            let bytes = page(PageKind::Meta, |page| meta.encode(page).unwrap());
            assert_eq!(Meta::decode(PageRef::parse(&bytes).unwrap()).unwrap(), meta);
        }
    }

    #[test]
    fn what_cannot_be_is_refused_on_both_sides() {
        let wrong = [
            Meta { dim: 0, ..meta() },
            Meta { padded_dim: 100, ..meta() },
            Meta { bits: 3, ..meta() },
            Meta { target_recall: 2.0, ..meta() },
            Meta { store_url: "x".repeat(MAX_URL_LEN + 1), ..meta() },
            Meta { sections: vec![meta().sections[0]; MAX_SECTIONS + 1], ..meta() },
        ];
        for wrong in wrong {
            page(PageKind::Meta, |page| assert!(wrong.encode(page).is_err()));
        }
        let good = page(PageKind::Meta, |page| meta().encode(page).unwrap());
        for (at, value) in
            [(0, 0), (4, 2), (8, 1), (FIXED - 8, 33), (FIXED - 5, 255), (FIXED, 0xff)]
        {
            let mut bytes = good.clone();
            bytes[crate::HEADER_LEN + at] = value;
            assert!(Meta::decode(PageRef::parse(&bytes).unwrap()).is_err(), "{at}");
        }
    }

    #[test]
    fn versions_are_refused_by_name() {
        let newer = Meta { min_reader: READER_VERSION + 1, ..meta() };
        let bytes = page(PageKind::Meta, |page| newer.encode(page).unwrap());
        let error = Meta::decode(PageRef::parse(&bytes).unwrap()).unwrap_err().to_string();
        assert!(error.contains("version 2") && error.contains("has 1"), "{error}");
        assert!(Meta { min_writer: 2, ..meta() }.check_writable().is_err());
        assert!(meta().check_writable().is_ok());
    }
}
