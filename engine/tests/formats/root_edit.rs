//! A root that is edited: what was not touched stays as it was, byte for byte.

use polign_engine::{
    root::{Reference, Root, RootBuilder, RootEdit, RootError, SectionKey, SectionKind},
    segment::{Packing, SegmentSpec},
};

use super::fixture::{self, LIVE_SLOTS};

type Sections = Vec<(SectionKey, Vec<u8>)>;

fn read(sections: Sections) -> Root {
    Root::from_sections(sections.into_iter().map(|(key, bytes)| (key.code(), bytes))).unwrap()
}

fn full() -> Root {
    read(fixture::root_sections())
}

fn edited(edit: impl FnOnce(&mut RootEdit)) -> Root {
    let mut root = RootEdit::new(&full());
    edit(&mut root);
    read(root.build().unwrap())
}

fn centroids(slot: u32) -> [Vec<u8>; 2] {
    [0, 1].map(|model| fixture::centroid_of(model, slot))
}

/// Adds a cell with the centroid that the cell in `like` has.
fn add_cell(edit: &mut RootEdit, id: u32, like: u32) -> u32 {
    let [first, second] = centroids(like);
    edit.cell(id, &[&first, &second])
}

#[test]
fn an_edit_without_a_change_gives_the_same_bytes() {
    let empty = RootBuilder::new(fixture::models()[..1].to_vec()).build().unwrap();
    for sections in [fixture::root_sections(), empty] {
        let root = read(sections.clone());
        assert_eq!(RootEdit::new(&root).build().unwrap(), sections);
        // The same the long way: everything is made anew.
        let mut edit = RootEdit::new(&root);
        edit.curves(root.curves().clone());
        if root.cell_count() > 0 {
            let slot = add_cell(&mut edit, 100, 0);
            edit.remove_cell(slot);
        }
        assert_eq!(edit.build().unwrap(), sections);
    }
}

#[test]
fn a_new_segment_changes_only_the_sections_that_name_it() {
    let spec = fixture::spec(0xc1, fixture::DIM, 2, &[2, 3]);
    let spec = SegmentSpec { packing: Packing::Dense, delta: true, ..spec };
    let segment = fixture::segment(8, spec);
    let (root, before) = (full(), fixture::root_sections());
    let mut edit = RootEdit::new(&root);
    assert_eq!(edit.segment(&segment.written, &[0, 3]), 4);
    let after = edit.build().unwrap();
    let changed: Vec<SectionKind> =
        after.iter().filter(|section| !before.contains(section)).map(|(key, _)| key.kind).collect();
    assert_eq!(changed, [SectionKind::Segments, SectionKind::DeltaPieces]);
    let of = |sections: &Sections, kind| -> Vec<u8> {
        sections.iter().find(|(key, _)| key.kind == kind).unwrap().1.clone()
    };
    for kind in changed {
        assert!(of(&after, kind).starts_with(&of(&before, kind)), "{kind:?} is appended to");
    }
    let root = read(after);
    assert_eq!(root.delta_pieces_of(3).count(), 2);
    assert_eq!(root.delta_pieces_of(5).count(), full().delta_pieces_of(5).count());
}

#[test]
fn dropped_segments_leave_their_places_to_those_behind_them() {
    let before = full();
    let root = edited(|edit| edit.drop_segment(0));
    assert_eq!(root.segments(), &before.segments()[1..]);
    for slot in 0..6 {
        let moved = |pieces: &[polign_engine::segment::Piece]| -> Vec<_> {
            let stay = pieces.iter().filter(|piece| piece.segment != 0);
            stay.map(|piece| (piece.segment.get() - 1, piece.first_ordinal.get())).collect()
        };
        let now = root.pieces_of(slot).iter();
        let now: Vec<_> = now.map(|p| (p.segment.get(), p.first_ordinal.get())).collect();
        assert_eq!(now, moved(before.pieces_of(slot)));
    }
    // What referred to the dropped segment is gone, what referred within the own one is not.
    let references: Vec<_> =
        root.references().iter().map(|r| (r.segment.get(), r.target.get())).collect();
    assert_eq!(references, [(1, Reference::GONE), (1, Reference::GONE)]);

    let root = edited(|edit| (0..4).for_each(|segment| edit.drop_segment(segment)));
    assert!(root.segments().is_empty() && root.references().is_empty());
    assert_eq!((root.cell_count(), root.rows()), (6, 0));
}

#[test]
fn a_split_cell_is_retired_with_its_successor_and_later_forgotten() {
    // Cell 1 has no rows in any segment but the base and the spilled one.
    let spec = fixture::spec(0xc1, fixture::DIM, 2, &[2, 3]);
    let segment = fixture::segment(8, spec);
    let root = edited(|edit| {
        (0..4).for_each(|segment| edit.drop_segment(segment));
        let new = [add_cell(edit, 10, 1), add_cell(edit, 12, 2)];
        assert_eq!(new, [6, 7]);
        assert_eq!(edit.segment(&segment.written, &new), 4);
        edit.retire(1, 12);
        edit.set_spread(7, 0.25);
    });
    assert_eq!(root.cell_count(), 8);
    assert_eq!(root.live_slot_of(1), Some(7));
    assert_eq!(root.live_slot_of(6), Some(5), "retired before");
    assert_eq!(root.pieces_of(7)[0].slots, 3);
    let mut expected = centroids(2);
    for (model, expected) in expected.iter_mut().enumerate() {
        polign_engine::quantize::cell_rank::set_spread(expected, 32, 0.25);
        assert_eq!(root.centroid_record_in(model, 7), *expected);
    }
    // New cells are in some group, once each.
    assert_eq!(root.all_group_cells().iter().map(|range| range.count.get()).sum::<u32>(), 8);

    // Later cell 12 is retired too, and cells 6 and 12 are forgotten.
    let mut edit = RootEdit::new(&root);
    edit.drop_segment(0);
    edit.retire(7, 10);
    edit.remove_cell(7);
    edit.remove_cell(4);
    let root = read(edit.build().unwrap());
    assert_eq!(root.cells().iter().map(|c| c.id.get()).collect::<Vec<_>>(), [0, 1, 2, 5, 9, 10]);
    assert_eq!(root.live_slot_of(1), Some(5), "the successor's successor");
    assert_eq!((root.slot_of(12), root.slot_of(6)), (None, None));
    assert_eq!(root.centroid_record(4), fixture::centroid_of(0, 5));
    assert_eq!(root.centroid_record_in(1, 4), fixture::centroid_of(1, 5));
    assert_eq!(root.all_group_cells().iter().map(|range| range.count.get()).sum::<u32>(), 6);
}

#[test]
fn impossible_edits_are_errors() {
    let refused = |words: &str, edit: &dyn Fn(&mut RootEdit)| {
        let mut root = RootEdit::new(&full());
        edit(&mut root);
        let error: RootError = root.build().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    refused("cell was removed", &|edit| edit.remove_cell(0));
    refused("cell is retired", &|edit| edit.retire(LIVE_SLOTS[0], 9));
    refused("ids do not ascend", &|edit| {
        add_cell(edit, 9, 0);
    });
    refused("same object twice", &|edit| {
        edit.segment(&fixture::base().written, &LIVE_SLOTS);
    });
}

#[test]
fn a_model_without_centroids_stays_so() {
    let mut builder = RootBuilder::new(fixture::models()[..1].to_vec());
    builder.cell(3, &[&centroids(0)[0]]);
    let mut sections = builder.build().unwrap();
    // As after a retraining: a second model, of which there is no segment yet.
    sections[0].1 = polign_engine::root::models::encode(&fixture::models());
    let root = read(sections.clone());
    assert_eq!(RootEdit::new(&root).build().unwrap(), sections);
    let mut edit = RootEdit::new(&root);
    add_cell(&mut edit, 4, 1);
    edit.remove_cell(0);
    let root = read(edit.build().unwrap());
    assert_eq!(root.centroid_record(0), centroids(1)[0]);
    assert!(root.centroid_record_in(1, 0).is_empty());
}
