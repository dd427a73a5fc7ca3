//! Every rule of the root has a root that breaks it.

use polign_engine::{
    quantize::Model,
    root::{
        Image, Root, RootBuilder, RootError, SectionKey, SectionKind,
        image::{self, Check},
    },
    segment::PartError,
};

use super::fixture::{self, id};

type Sections = Vec<(SectionKey, Vec<u8>)>;

fn read(sections: &Sections) -> Result<Root, RootError> {
    Root::from_sections(sections.iter().map(|(key, bytes)| (key.code(), bytes.clone())))
}

fn section(sections: &mut Sections, kind: SectionKind) -> &mut Vec<u8> {
    &mut sections.iter_mut().find(|(key, _)| key.kind == kind).unwrap().1
}

/// Overwrites a u32 in a section.
fn poke(kind: SectionKind, at: usize, value: u32) -> String {
    let mut sections = fixture::root_sections();
    let bytes = section(&mut sections, kind);
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    read(&sections).expect_err("a damaged root was read").to_string()
}

#[test]
fn fields_out_of_place_are_named() {
    use SectionKind::*;
    let mut wrong = Vec::new();
    for (kind, at, value, words) in [
        (Models, 0, 0, "magic"),
        (Models, 4, 2 << 16 | 2, "differs from the index's"),
        (Models, 4, 9 << 16 | 2, "unknown metric"),
        (Models, 8, 21, "differs from the index's"),
        (Models, 12, 0, "1 to 256"),
        (Models, 12, 257, "1 to 256"),
        (Models, 12, 1, "after the last model"),
        (Models, 16, 1, "model 0"),
        (Models, 16, u32::MAX, "longer than its section"),
        // Cell 1: id, flags, first piece, pieces, rows, successor, reserved.
        (Cells, 32, 0, "ids do not ascend"),
        (Cells, 160, u32::MAX, "ids do not ascend"),
        (Cells, 36, 2, "unknown flags"),
        (Cells, 36, 1, "cell is retired"),
        (Cells, 40, 0, "pieces do not follow"),
        (Cells, 44, 6, "pieces of another cell"),
        (Cells, 44, u32::MAX, "more pieces than there are"),
        (Cells, 48, 1, "rows are not those"),
        (Cells, 52, 9, "not retired"),
        (Cells, 56, 1, "unknown flags"),
        // Piece 0: cell, segment.
        (Pieces, 0, 1, "pieces of another cell"),
        (Pieces, 0, 4, "cell is retired"),
        (Pieces, 0, 6, "no such cell"),
        (Pieces, 4, 1, "delta segments have their own"),
        (Pieces, 4, 4, "no such segment"),
        (Pieces, 24, 1000, "end of a piece"),
        (DeltaPieces, 8, 0, "offset of a piece"),
        (DeltaPieces, 16, 1, "first part of a piece"),
        (DeltaPieces, 24, 1000, "end of a piece"),
        (DeltaPieces, 28, 1, "no references in a dense segment"),
        (DeltaPieces, 4, 0, "delta segments have their own"),
        (DeltaPieces, 0, 5, "not sorted"),
        // Segment 0: model, flags, ..., dim, padded dim, bits.
        (Segments, 48, 1, "no such model"),
        (Segments, 52, 4, "segment flags"),
        (Segments, 56, 21, "another shape"),
        (Segments, 60, 48, "another shape"),
        (Segments, 64, 1, "another shape"),
        (Segments, 68, 3, "plane-2 offset"),
        (Segments, 76, 1, "references are not complete"),
        (References, 0, 1, "references are not complete"),
        (References, 4, 4, "no such segment"),
        (References, 8, 1, "not sorted"),
        (GroupCells, 0, 2, "not sorted"),
        (GroupCells, 4, 4, "do not divide"),
        (GroupCells, 8, 0, "out of range"),
        (GroupCells, 8, 7, "out of range"),
        (GroupCells, 8, u32::MAX, "out of range"),
        (GroupCells, 8, 1, "do not divide"),
        (Curves, 0, 3, "shorter than its curves"),
    ] {
        let text = poke(kind, at, value);
        if !text.contains(words) {
            wrong.push(format!("{kind:?} at {at} = {value}: {text}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_unknown_version_names_both_and_the_way_out() {
    let text = poke(SectionKind::Models, 4, 1 << 16 | 1);
    assert!(text.contains("version 2") && text.contains("version 1"), "{text}");
    assert!(text.contains("update"), "{text}");
}

#[test]
fn lengths_must_be_those_of_the_records() {
    for number in 0..fixture::root_sections().len() {
        for change in [1isize, -1, 1000] {
            let mut sections = fixture::root_sections();
            let (key, bytes) = &mut sections[number];
            let key = *key;
            bytes.resize(bytes.len().saturating_add_signed(change), 0);
            assert!(read(&sections).is_err(), "{key} by {change}");
        }
    }
}

#[test]
fn sections_are_known_and_single() {
    let good = fixture::root_sections();
    let codes = |sections: &Sections| -> Vec<(u32, Vec<u8>)> {
        sections.iter().map(|(key, bytes)| (key.code(), bytes.clone())).collect()
    };
    for unknown in [0, 13, 0xffff, 1 << 16 | 1, 2 << 16 | SectionKind::CentroidBlocks as u32] {
        let mut sections = codes(&good);
        sections.push((unknown, vec![]));
        let error = Root::from_sections(sections).unwrap_err();
        assert_eq!(error, RootError::UnknownSection(unknown));
    }
    let mut twice = codes(&good);
    twice.push(twice[3].clone());
    assert_eq!(Root::from_sections(twice).unwrap_err(), RootError::DuplicateSection(good[3].0));
    let none: [(u32, Vec<u8>); 0] = [];
    let models = SectionKey::only(SectionKind::Models);
    assert_eq!(Root::from_sections(none).unwrap_err(), RootError::MissingSection(models));
}

#[test]
fn the_order_of_the_sections_does_not_matter() {
    let mut sections = fixture::root_sections();
    sections.reverse();
    assert_eq!(read(&sections).unwrap().rows(), read(&fixture::root_sections()).unwrap().rows());
}

#[test]
fn a_segment_needs_centroids_of_its_model() {
    let mut sections = fixture::root_sections();
    let second = |key: &SectionKey| key.kind.is_per_model() && key.number == 1;
    sections.retain(|(key, _)| !second(key));
    assert!(read(&sections).unwrap_err().to_string().contains("no centroids"));
}

#[test]
fn the_builder_refuses_what_the_reader_refuses() {
    let mut twice = fixture::root_builder();
    twice.segment(&fixture::base().written, &fixture::LIVE_SLOTS);
    assert!(twice.build().unwrap_err().to_string().contains("same object twice"));

    let mut descending = RootBuilder::new(fixture::models());
    let centroids = [0, 1].map(|model| fixture::centroid_of(model, 0));
    descending.cell(5, &[&centroids[0], &centroids[1]]);
    descending.cell(4, &[&centroids[0], &centroids[1]]);
    assert!(descending.build().unwrap_err().to_string().contains("ascend"));

    let same: Vec<Model> = vec![fixture::models()[0].clone(); 2];
    assert!(RootBuilder::new(same).build().unwrap_err().to_string().contains("another model"));
}

#[test]
fn rings_of_successors_end() {
    let mut builder = RootBuilder::new(fixture::models()[..1].to_vec());
    let centroid = fixture::centroid_of(0, 0);
    builder.retired_cell(1, 2, &[&centroid]);
    builder.retired_cell(2, 1, &[&centroid]);
    builder.retired_cell(3, 4, &[&centroid]);
    let root = read(&builder.build().unwrap()).unwrap();
    assert_eq!([1, 2, 3, 4].map(|cell| root.live_slot_of(cell)), [None; 4]);
}

#[test]
fn retired_cells_never_win_the_first_pass() {
    use polign_engine::{kernel::RacyBytes, quantize::plane1};
    let root = read(&fixture::root_sections()).unwrap();
    let query = root.models()[0].query(&[1.0; 20]).unwrap();
    let (mut estimates, mut lowers) = (Vec::new(), Vec::new());
    let blocks = RacyBytes::new(root.centroid_blocks());
    let term = query.zero_cell_term();
    plane1::scan(blocks, 1, &query, term, 1.0, &mut estimates, &mut lowers);
    let finite: Vec<usize> = (0..32).filter(|&slot| estimates[slot].is_finite()).collect();
    assert_eq!(finite, [0, 1, 2, 3, 5]);
}

#[test]
fn images_are_checked() {
    let sections = fixture::root_sections();
    let good = image::encode(id(1), id(2), &sections);
    let open = |bytes: &[u8], check| Image::open(bytes.to_vec().into(), check);
    let image = open(&good, Check::Full).unwrap();
    assert_eq!((image.root, image.index), (id(1), id(2)));
    assert!(image.sections().eq(sections.iter().map(|(key, b)| (key.code(), b.clone().into()))));

    for len in 0..good.len() {
        assert!(open(&good[..len], Check::Table).is_err(), "{len} bytes");
    }
    let edited = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let error = |at| open(&edited(at), Check::Full).unwrap_err();
    assert!(matches!(error(0), RootError::Image(PartError::Magic { .. })));
    assert_eq!(error(4), RootError::Version { found: 3, known: 2 });
    for at in [8, 16, 32, 64, 100] {
        assert!(matches!(error(at), RootError::Image(PartError::Crc { .. })), "byte {at}");
    }
    // A damaged section: only the full check reads it.
    let last = good.len() - 64;
    assert!(matches!(error(last), RootError::Image(PartError::Crc { .. })));
    assert!(open(&edited(last), Check::Table).is_ok());
}
