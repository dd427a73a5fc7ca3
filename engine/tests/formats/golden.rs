//! Files of the present format version that stay readable, and that the writers still produce byte for byte.
//! After a deliberate change of the format (a new version), write them anew with `POLIGN_WRITE_GOLDEN=1`.

use std::{fs, path::PathBuf};

use polign_engine::{
    ObjectId,
    quantize::plane1,
    root::{
        Curves, Image, RootBuilder, SectionKey,
        image::{self, Check},
    },
    segment::{Packing, RowPlane, SegmentReader},
};
use zerocopy::FromBytes;

use super::fixture::{self, LIVE_SLOTS, Segment, id};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn committed(name: &str) -> Vec<u8> {
    fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn compare(name: &str, bytes: &[u8]) {
    if std::env::var_os("POLIGN_WRITE_GOLDEN").is_some() {
        fs::write(path(name), bytes).unwrap();
    }
    let expected = committed(name);
    assert_eq!(bytes.len(), expected.len(), "{name}: length");
    if let Some(at) = bytes.iter().zip(&expected).position(|(a, b)| a != b) {
        panic!("{name}: first difference at byte {at}");
    }
}

fn segments() -> [(&'static str, Segment); 7] {
    [
        ("base.seg", fixture::base()),
        ("one-bit.seg", fixture::one_bit()),
        ("delta.seg", fixture::delta()),
        ("spilled.seg", fixture::spilled()),
        ("foreign.seg", fixture::foreign()),
        ("rows-f16.seg", fixture::rows(RowPlane::F16)),
        ("rows-f32.seg", fixture::rows(RowPlane::F32)),
    ]
}

fn empty_root() -> Vec<(SectionKey, Vec<u8>)> {
    RootBuilder::new(fixture::models()[..1].to_vec()).build().unwrap()
}

fn root_image(root: u8, sections: &[(SectionKey, Vec<u8>)]) -> Vec<u8> {
    image::encode(id(root), id(fixture::INDEX), sections)
}

fn open_root(name: &str) -> (ObjectId, polign_engine::root::Root) {
    let image = Image::open(committed(name).into(), Check::Full).unwrap();
    assert_eq!(image.index, id(fixture::INDEX));
    (image.root, image.read().unwrap())
}

#[test]
fn writers_produce_the_golden_files() {
    for (name, segment) in segments() {
        compare(name, &segment.bytes);
    }
    compare("full.root", &root_image(0xb1, &fixture::root_sections()));
    compare("empty.root", &root_image(0xb2, &empty_root()));
}

#[test]
fn readers_read_the_golden_segments() {
    for (name, expected) in segments() {
        let bytes = committed(name);
        let object = expected.spec.name.object;
        let reader = SegmentReader::open(object, &bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        reader.verify_all().unwrap();
        let entry = reader.entry();
        assert_eq!(entry.name(), expected.spec.name, "{name}");
        assert_eq!(entry.model, expected.spec.model, "{name}");
        assert_eq!(entry.is_delta(), expected.spec.delta, "{name}");
        assert_eq!(reader.geometry().row_plane(), expected.spec.row_plane, "{name}");
        assert_eq!(reader.references(), expected.spec.references, "{name}");
        assert_eq!(reader.model_bytes(), expected.spec.model_bytes, "{name}");
        let dense = expected.spec.packing == Packing::Dense;
        let cell_ids = expected.spec.cells.iter().map(|cell| cell.cell_id);
        assert!(reader.cells().iter().map(|cell| cell.cell_id.get()).eq(cell_ids), "{name}");
        super::segments::check_columns(&expected, &reader);
        assert_eq!(dense, reader.geometry().packing() == Packing::Dense, "{name}");
    }
}

#[test]
fn readers_read_the_golden_root() {
    let (root_id, root) = open_root("full.root");
    assert_eq!(root_id, id(0xb1));
    assert_eq!(root.models(), fixture::models());
    assert_eq!((root.metric(), root.dim()), (polign_engine::Metric::L2, 20));
    assert_eq!(root.curves(), &fixture::curves());

    // Cells, one of which was split away.
    assert_eq!(root.cell_count(), 6);
    assert_eq!(root.slot_of(5), Some(3));
    assert_eq!(root.slot_of(6), Some(4));
    assert_eq!(root.slot_of(3), None);
    assert_eq!(root.live_slot_of(5), Some(3));
    assert_eq!(root.live_slot_of(6), Some(5));
    assert!(root.pieces_of(4).is_empty());

    // Centroids in the spaces of two models.
    for model in 0..2 {
        for slot in 0..6 {
            let expected = fixture::centroid_of(model, slot);
            assert_eq!(root.centroid_record_in(model, slot), expected);
        }
        assert_eq!(root.centroid_blocks_in(model).len(), plane1::block_bytes(32, 1));
    }
    assert_ne!(root.centroid_blocks_in(0), root.centroid_blocks_in(1));
    assert!(root.centroid_record(6).is_empty() && root.centroid_record_in(2, 0).is_empty());

    // A second level.
    assert_eq!(root.group_count(), 2);
    let ranges = |group| -> Vec<(u32, u32)> {
        root.group_cells(group).iter().map(|r| (r.first.get(), r.count.get())).collect()
    };
    assert_eq!((ranges(0), ranges(1), ranges(2)), (vec![(0, 2), (5, 1)], vec![(2, 3)], vec![]));
    assert_eq!(root.group_record(1), fixture::group_centroid(1));
    assert_eq!(root.group_blocks().len(), plane1::block_bytes(32, 1));

    // Segments: one by another writer and model, one a flushed delta.
    let written = [fixture::base(), fixture::delta(), fixture::spilled(), fixture::foreign()];
    for (segment, expected) in (0..).zip(&written) {
        assert_eq!(root.segments()[segment as usize], expected.written.entry);
        assert_eq!(root.segment_name(segment), expected.spec.name);
        assert_eq!(root.segment_of(expected.spec.name.object), Some(segment));
        assert_eq!(root.geometry(segment).object_len(), expected.bytes.len() as u64);
    }
    assert_eq!(root.segment_name(3).writer, id(fixture::FOREIGN_WRITER));
    assert_eq!((0..4).map(|segment| root.model_of(segment)).collect::<Vec<_>>(), [0, 0, 0, 1]);
    assert_eq!(root.rows(), written.iter().map(|s| s.ids.len() as u64).sum::<u64>());
    assert_eq!(root.object_bytes(), written.iter().map(|s| s.bytes.len() as u64).sum::<u64>());

    // Pieces: exactly those of the segments.
    for (position, &slot) in LIVE_SLOTS.iter().enumerate() {
        let of = |segment: usize| {
            let cell = *written[segment].written.cells.get(position)?;
            (cell.slots != 0).then(|| cell.piece(slot, segment as u32))
        };
        let base: Vec<_> = [0, 2, 3].into_iter().filter_map(of).collect();
        assert_eq!(root.pieces_of(slot), base, "slot {slot}");
        let delta: Vec<_> = root.delta_pieces_of(slot).copied().collect();
        assert_eq!(delta, of(1).into_iter().collect::<Vec<_>>(), "slot {slot}");
    }

    // Slot references: into the segment itself, into the base segment, and to an object that is gone.
    let spilled = &written[2];
    let mut seen = [0; 3];
    for reference in spilled.refs.iter().flatten() {
        let ordinal = reference.ordinal.get();
        let expected = match reference.segment.get() {
            0 => Some((2, ordinal)),
            1 => Some((0, ordinal)),
            _ => None,
        };
        seen[reference.segment.get() as usize] += 1;
        assert_eq!(root.resolve(2, *reference), expected);
    }
    assert!(seen.iter().all(|&count| count > 0));
    let outside = |segment: u32, ordinal: u32| {
        let bytes = [segment.to_le_bytes(), ordinal.to_le_bytes()].concat();
        root.resolve(2, FromBytes::read_from_bytes(&bytes).unwrap())
    };
    assert_eq!(outside(0, 17), None);
    assert_eq!(outside(0, 16), Some((2, 16)));
    assert_eq!((outside(3, 0), outside(u32::MAX, 0)), (None, None));
}

#[test]
fn readers_read_the_golden_empty_root() {
    let (_, root) = open_root("empty.root");
    assert_eq!(root.models(), &fixture::models()[..1]);
    assert_eq!((root.cell_count(), root.rows(), root.group_count()), (0, 0, 0));
    assert!(root.segments().is_empty() && root.centroid_blocks().is_empty());
    assert!(root.pieces_of(0).is_empty() && root.delta_pieces_of(0).next().is_none());
    assert_eq!(root.curves(), &Curves::default());
}
