//! The format is frozen: one page of each kind, byte for byte, and every reader against damaged pages.

use polign_engine::{Metric, ObjectId};
use proptest::prelude::*;

use crate::{
    Link, PAGE_LEN, PageKind, PageRef,
    codes::{self, Codes, Entry, VectorRef},
    image::tests::page,
    meta::{Element, Meta},
    objects::{self, ObjectForm, ObjectRecord},
    tombstones::{self, Tombstones},
    vectors::{self, Group, Vectors},
};

fn meta_page() -> Vec<u8> {
    let mut meta = Meta::empty(Metric::Cosine, Element::Halfvec, 100, 112, 2);
    meta.index_id = ObjectId([7; 16]);
    meta.store_url = "s3://bucket/prefix".into();
    meta.delta.head = Some(Link { block: 1, stamp: 2 });
    meta.target_recall = 0.95;
    page(PageKind::Meta, |page| meta.encode(page).unwrap())
}

fn code_page() -> Vec<u8> {
    page(PageKind::Codes, |page| {
        codes::init(page, 3, 2, 40).unwrap();
        for n in 0..4u16 {
            let vector = VectorRef { page: Link { block: 9, stamp: 1 }, slot: n };
            let code = &[n as u8; 40];
            let id = 0x0102_0304_0506 + u64::from(n);
            let entry = Entry { id, cell: 5, epoch: 6, dead: false, vector, code };
            codes::append(page, &entry).unwrap();
        }
        codes::mark_dead(page, &[2]).unwrap();
        page.set_next(Some(Link { block: 0x0102_0304, stamp: 4 }));
    })
}

fn vector_page() -> Vec<u8> {
    page(PageKind::Vectors, |page| {
        let owner = Link { block: 8, stamp: 1 };
        vectors::init(page, Group { generation: 3, owner, record_len: 128 }).unwrap();
        vectors::append(page, &[0x5a; 128]).unwrap();
        vectors::append(page, &[0xa5; 128]).unwrap();
    })
}

fn tombstone_page() -> Vec<u8> {
    page(PageKind::Tombstones, |page| {
        tombstones::init(page, ObjectId([3; 16]), 0).unwrap();
        tombstones::set(page, &[0, 9, 700]).unwrap();
    })
}

fn object_page() -> Vec<u8> {
    let [object, writer, index] = [1, 2, 3].map(|byte| ObjectId([byte; 16]));
    let form = ObjectForm::Segment;
    let record = ObjectRecord { object, writer, index, xid: 4, lsn: 5, time: 6, form };
    page(PageKind::Retired, |page| objects::write(page, &[record; 2]).unwrap())
}

fn pages() -> [Vec<u8>; 5] {
    [meta_page(), code_page(), vector_page(), tombstone_page(), object_page()]
}

/// Reads everything that a page promises.
fn read(bytes: &[u8]) {
    let Ok(page) = PageRef::parse(bytes) else { return };
    let _ = Meta::decode(page);
    if let Ok(codes) = Codes::parse(page) {
        codes.entries().for_each(drop);
        codes.vector_pages();
        assert_eq!(codes.entry(codes.len()), None);
    }
    if let Ok(vectors) = Vectors::parse(page) {
        for slot in 0..vectors.len() {
            let _ = vectors.record(slot);
        }
        vectors.has_room();
    }
    if let Ok(tombstones) = Tombstones::parse(page) {
        tombstones.words().for_each(drop);
    }
    let _ = objects::records(page);
}

#[test]
fn the_formats_do_not_move() {
    let found = pages().map(|bytes| crc32c::crc32c(&bytes[crate::HEADER_LEN..]));
    assert_eq!(found, [1167623495, 1795125265, 965176095, 1378899354, 2725337782]);
}

proptest! {
    #[test]
    fn no_reader_panics_on_a_damaged_page(
        which in 0usize..5,
        kind in 1u8..=8,
        edits in prop::collection::vec((0..PAGE_LEN, any::<u8>()), 0..8),
        front in prop::collection::vec((0..64usize, any::<u8>()), 0..8),
    ) {
        let mut bytes = pages()[which].clone();
        bytes[PAGE_LEN - 8] = kind;
        for (at, value) in edits {
            bytes[at] = value;
        }
        for (at, value) in front {
            bytes[crate::HEADER_LEN + at] = value;
        }
        read(&bytes);
    }
}
