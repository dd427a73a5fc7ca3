//! Segments of many shapes: what goes in comes out, and every byte of an object is in exactly one part.

use polign_engine::{
    ObjectId,
    segment::{
        CellSpec, LayoutError, Packing, PartError, Piece, RowPlane, SegmentError, SegmentLayout,
        SegmentReader, SegmentSpec, SegmentWriter, Shape, SlotRef, WriteError,
        geometry::BLOCK_ROWS,
        key::PartKind,
        part::{self, HEADER_LEN, MAX_PART_LEN},
    },
};
use zerocopy::FromBytes;

use super::fixture::{Rng, Segment, id, segment, spec};

/// Compares every column of a segment with what it was made from.
pub fn check_columns(expected: &Segment, reader: &SegmentReader<'_>) {
    let geometry = reader.geometry();
    let shape = geometry.shape();
    assert_eq!(reader.ids().unwrap(), expected.ids);
    let record = shape.record_bytes();
    for (ordinal, bytes) in (0..).zip(expected.records.chunks(record)) {
        assert_eq!(reader.record(ordinal).unwrap(), Some(bytes));
        let (part, at) = geometry.id_of(ordinal).unwrap();
        let id = &reader.payload(&part).unwrap()[at..at + 8];
        assert_eq!(id, expected.ids[ordinal as usize].to_le_bytes());
    }
    let rows = expected.ids.len() as u32;
    assert_eq!(reader.record(rows).unwrap(), None);
    assert_eq!(geometry.id_of(rows), None);
    assert_eq!(reader.row(rows).unwrap(), None);
    if !expected.rows.is_empty() {
        for (ordinal, bytes) in (0..).zip(expected.rows.chunks(geometry.row_bytes())) {
            assert_eq!(reader.row(ordinal).unwrap(), Some(bytes));
        }
    }
    let mut first_ordinal = 0;
    for (number, cell) in reader.cells().iter().enumerate() {
        assert_eq!(cell.first_ordinal, first_ordinal);
        check_cell(expected, reader, number);
        first_ordinal += cell.rows.get();
    }
}

/// Puts plane 1 of a cell together again from its parts.
fn check_cell(expected: &Segment, reader: &SegmentReader<'_>, number: usize) {
    let cell = &reader.cells()[number];
    let block_bytes = reader.geometry().shape().block_bytes();
    let (mut slots, mut blocks, mut refs) = (0, Vec::new(), Vec::new());
    for (plane1, payload) in reader.plane1(cell).unwrap() {
        assert_eq!(plane1.before, slots);
        assert!(plane1.skip < BLOCK_ROWS && plane1.slots > 0);
        assert!(plane1.skip + plane1.slots <= plane1.blocks * BLOCK_ROWS);
        slots += plane1.slots;
        let end = plane1.blocks_at + plane1.blocks as usize * block_bytes;
        blocks.extend_from_slice(&payload[plane1.blocks_at..end]);
        if let Some(at) = plane1.refs_at {
            let bytes = &payload[at..at + plane1.slots as usize * size_of::<SlotRef>()];
            refs.extend_from_slice(<[SlotRef]>::ref_from_bytes(bytes).unwrap());
        }
    }
    assert_eq!(slots, cell.slots.get());
    assert_eq!(refs, expected.refs[number]);
    let expected = match expected.spec.packing {
        Packing::PerCell => &expected.blocks[number][..],
        Packing::Dense if slots == 0 => &[],
        Packing::Dense => {
            let first = (cell.first_ordinal.get() / BLOCK_ROWS) as usize;
            let end = (cell.first_ordinal.get() + slots).div_ceil(BLOCK_ROWS) as usize;
            &expected.blocks[0][first * block_bytes..end * block_bytes]
        }
    };
    assert!(blocks == expected, "blocks of cell {number}");
}

fn check(expected: &Segment) {
    let object = expected.spec.name.object;
    let reader = SegmentReader::open(object, &expected.bytes).unwrap();
    let mut end = 0;
    let mut keys = Vec::new();
    for part in reader.parts() {
        assert_eq!(part.offset, end);
        assert!(part.len as usize <= MAX_PART_LEN);
        let payload = reader.payload(&part).unwrap();
        assert_eq!(payload.len(), reader.geometry().payload_len(&part));
        end = part.end();
        keys.push(part.key);
    }
    assert_eq!(end, expected.bytes.len() as u64);
    let parts = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), parts);
    assert_eq!(reader.entry(), &expected.written.entry);
    assert_eq!(reader.cells(), expected.written.cells);
    assert_eq!(reader.model_bytes(), expected.spec.model_bytes);
    check_columns(expected, &reader);
}

#[test]
fn random_segments_round_trip() {
    let mut rng = Rng(1);
    for seed in 0..60 {
        let cells = rng.below(6);
        let rows: Vec<u32> = (0..cells).map(|_| (rng.below(4) * rng.below(60)) as u32).collect();
        let dim = 1 + rng.below(100) as u32;
        let mut spec = spec(1, dim, 1 + rng.below(2) as u32, &rows);
        spec.packing = [Packing::PerCell, Packing::Dense][rng.below(2)];
        spec.row_plane = [RowPlane::None, RowPlane::F16, RowPlane::F32][rng.below(3)];
        let model_len = [0, 1, 1000][rng.below(3)];
        spec.model_bytes = rng.bytes(model_len);
        spec.references = (0..rng.below(3) as u8).map(id).collect();
        for cell in &mut spec.cells {
            if spec.packing == Packing::PerCell && rng.below(2) == 0 {
                let slots = cell.rows + rng.below(50) as u32;
                *cell = CellSpec { slots, refs: slots > 0, ..*cell };
            }
        }
        check(&segment(seed, spec));
    }
}

#[test]
fn columns_of_many_parts_round_trip() {
    // A block is 64,384 bytes: four to a part; records are one to a chunk.
    let wide = segment(1, spec(1, 16_000, 1, &[300, 1, 128]));
    let parts = |segment: &Segment, kind| {
        let reader = SegmentReader::open(id(1), &segment.bytes).unwrap();
        reader.parts().filter(|part| part.key.kind() == Some(kind)).count()
    };
    assert_eq!(parts(&wide, PartKind::Plane1), 3 + 1 + 1);
    assert_eq!(parts(&wide, PartKind::Plane2), 429);
    check(&wide);

    // 448 bytes a block: 585 to a part, 409 with references.
    let mut narrow = spec(1, 1, 1, &[40_000, 3, 20_000]);
    narrow.cells[2].refs = true;
    let narrow = segment(2, narrow);
    assert_eq!(parts(&narrow, PartKind::Plane1), 3 + 1 + 2);
    assert_eq!(parts(&narrow, PartKind::Ids), 4);
    check(&narrow);

    let mut dense = spec(1, 1, 1, &[18_000, 0, 900, 30_000, 7]);
    dense.packing = Packing::Dense;
    // A footer of more than one part.
    dense.model_bytes = Rng(1).bytes(600_000);
    let dense = segment(3, dense);
    assert_eq!(parts(&dense, PartKind::Plane1), 3);
    assert_eq!(parts(&dense, PartKind::Meta), 1 + 3);
    check(&dense);
}

#[test]
fn payloads_lie_on_cache_lines() {
    for (dim, bits) in [(1, 2), (100, 2), (384, 1), (1536, 1), (16_000, 1)] {
        let layout = SegmentLayout::new(id(1), dim, bits, &[400, 33, 1]).unwrap();
        assert!(layout.parts().all(|part| part.offset % 64 == 0 && part.len % 64 == 0));
        assert_eq!(layout.geometry().shape().block_bytes() % 64, 0);
    }
    assert_eq!(HEADER_LEN % 64, 0);
}

#[test]
fn the_shape_agrees_with_the_quantizer() {
    use polign_engine::quantize::{plane1, plane2};
    for padded_dim in [16, 112, 384, 16_000] {
        for bits in [1, 2] {
            let shape = Shape::new(padded_dim, bits).unwrap();
            let (padded_dim, bits) = (padded_dim as usize, bits as usize);
            assert_eq!(shape.block_bytes(), plane1::block_bytes(padded_dim, bits));
            assert_eq!(shape.record_bytes(), plane2::record_bytes(padded_dim));
        }
    }
    assert_eq!(BLOCK_ROWS as usize, plane1::BLOCK_ROWS);
}

#[test]
fn impossible_segments_are_refused() {
    let refused = |edit: fn(&mut SegmentSpec)| -> LayoutError {
        let mut spec = spec(1, 20, 2, &[10, 20]);
        edit(&mut spec);
        SegmentLayout::from_spec(&spec).unwrap_err()
    };
    for (edit, words) in [
        ((|spec| spec.dim = 0) as fn(&mut SegmentSpec), "padded dimension"),
        (|spec| spec.dim = 16_001, "padded dimension"),
        (|spec| spec.dim = u32::MAX, "padded dimension"),
        (|spec| spec.bits = 0, "bits"),
        (|spec| spec.bits = 65_537, "bits"),
        (|spec| spec.cells[0].slots = 11, "rows of a cell"),
        (|spec| spec.cells[0] = CellSpec::plain(0, (1 << 28) - 5), "rows"),
        (|spec| spec.cells[0] = CellSpec::plain(0, u32::MAX), "rows"),
        (
            |spec| {
                spec.packing = Packing::Dense;
                spec.cells[0].refs = true;
            },
            "references",
        ),
    ] {
        let text = refused(edit).to_string();
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn the_writer_takes_data_only_in_order_and_size() {
    let blocks = vec![0; Shape::new(32, 2).unwrap().block_bytes()];
    let writer = || SegmentWriter::new(spec(1, 20, 2, &[10, 0]), Vec::new()).unwrap();
    let data = |result: Result<(), WriteError>| matches!(result, Err(WriteError::Data { .. }));

    let mut w = writer();
    assert!(data(w.plane1(&blocks[1..])));
    assert!(data(w.ids(&[1; 10])), "plane 1 is missing");

    let mut w = writer();
    assert!(data(
        w.plane1_with_refs(&blocks, &[SlotRef { segment: 0.into(), ordinal: 0.into() }; 10])
    ));
    w.plane1(&blocks).unwrap();
    w.plane1(&[]).unwrap();
    assert!(data(w.plane1(&[])), "a third cell");
    assert!(data(w.ids(&[1; 11])));

    let mut w = writer();
    w.plane1(&blocks).unwrap();
    w.plane1(&[]).unwrap();
    w.ids(&[1; 9]).unwrap();
    assert!(data(w.plane2(&[0; 480])), "an id is missing");

    let mut w = writer();
    w.plane1(&blocks).unwrap();
    w.plane1(&[]).unwrap();
    w.ids(&[1; 10]).unwrap();
    w.plane2(&[0; 480]).unwrap();
    assert!(data(w.ids(&[1])), "back to an earlier column");
    assert!(data(w.rows(&[1])), "no such plane");
    assert!(matches!(writer().finish(), Err(WriteError::Data { .. })));
}

#[test]
fn how_the_data_is_cut_does_not_matter() {
    let whole = segment(5, SegmentSpec { row_plane: RowPlane::F32, ..spec(1, 20, 2, &[500, 300]) });
    let mut writer = SegmentWriter::new(whole.spec.clone(), Vec::new()).unwrap();
    whole.blocks.iter().for_each(|blocks| writer.plane1(blocks).unwrap());
    whole.ids.chunks(7).for_each(|ids| writer.ids(ids).unwrap());
    whole.records.chunks(1001).for_each(|records| writer.plane2(records).unwrap());
    whole.rows.chunks(50_000).for_each(|rows| writer.rows(rows).unwrap());
    assert!(writer.finish().unwrap().1 == whole.bytes);
}

#[test]
fn an_output_that_fails_is_an_error() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut writer = SegmentWriter::new(spec(1, 20, 2, &[0, 0]), Full(200)).unwrap();
    writer.plane1(&[]).unwrap();
    writer.plane1(&[]).unwrap();
    assert!(matches!(writer.finish(), Err(WriteError::Io(_))));
}

#[test]
fn another_or_a_cut_object_is_an_error() {
    let segment = segment(1, spec(1, 20, 2, &[40]));
    let open = |object: ObjectId, bytes: &[u8]| SegmentReader::open(object, bytes).map(drop);
    assert!(matches!(
        open(id(2), &segment.bytes),
        Err(SegmentError::Part { cause: PartError::Object { .. }, .. })
    ));
    for len in [0, 1, 63, 64, 191, 192, segment.bytes.len() - 64, segment.bytes.len() - 1] {
        assert!(open(id(1), &segment.bytes[..len]).is_err(), "{len} bytes");
    }
    let mut longer = segment.bytes.clone();
    longer.resize(longer.len() + 64, 0);
    assert!(matches!(open(id(1), &longer), Err(SegmentError::Layout { .. })));
}

#[test]
fn a_flipped_bit_is_found_by_the_part_it_is_in() {
    let segment = segment(1, spec(1, 20, 2, &[40, 3]));
    let intact = SegmentReader::open(id(1), &segment.bytes).unwrap();
    for hit in intact.parts() {
        let mut bytes = segment.bytes.clone();
        bytes[hit.offset as usize + HEADER_LEN] ^= 4;
        match SegmentReader::open(id(1), &bytes) {
            Err(error) => {
                assert_eq!(hit.key.kind(), Some(PartKind::Meta));
                assert!(matches!(error, SegmentError::Part { key, .. } if key == hit.key));
            }
            Ok(reader) => {
                let damaged = |part: &_| reader.payload(part).is_err();
                assert!(reader.parts().filter(damaged).eq([hit]));
                assert!(reader.verify_all().is_err());
            }
        }
    }
}

#[test]
fn an_entry_that_names_another_object_is_an_error() {
    let mut bytes = segment(1, spec(1, 20, 2, &[40])).bytes;
    // The entry's own object id, not the frame's.
    bytes[HEADER_LEN] ^= 1;
    part::reseal(&mut bytes[..192]);
    assert!(matches!(
        SegmentReader::open(id(1), &bytes),
        Err(SegmentError::Part { cause: PartError::Object { .. }, .. })
    ));
}

#[test]
fn a_cell_table_that_contradicts_the_entry_is_an_error() {
    let intact = segment(1, spec(1, 20, 2, &[40, 3]));
    let footer = SegmentReader::open(id(1), &intact.bytes).unwrap().parts().last().unwrap();
    // Second cell: id, flags, slots, rows, first ordinal, first part, offset.
    for (field, words) in [
        (4, "in their place"),
        (8, "rows of a cell"),
        (12, "rows of a cell"),
        (16, "in their place"),
        (20, "in their place"),
        (24, "in their place"),
        (31, "in their place"),
    ] {
        let mut bytes = intact.bytes.clone();
        let part = &mut bytes[footer.offset as usize..];
        part[HEADER_LEN + 32 + field] ^= 2;
        part::reseal(part);
        let error = SegmentReader::open(id(1), &bytes).map(drop).unwrap_err().to_string();
        assert!(error.contains(words), "byte {field}: {error}");
    }
    // Its id is the writer's to choose.
    let mut bytes = intact.bytes.clone();
    let part = &mut bytes[footer.offset as usize..];
    part[HEADER_LEN + 32] = 9;
    part::reseal(part);
    assert_eq!(SegmentReader::open(id(1), &bytes).unwrap().cells()[1].cell_id, 9);
}

#[test]
fn pieces_outside_of_their_segment_are_refused() {
    let segment = segment(1, spec(1, 20, 2, &[100, 40]));
    let reader = SegmentReader::open(id(1), &segment.bytes).unwrap();
    let piece = reader.cells()[1].piece(0, 0);
    let check = |edit: fn(&mut Piece)| {
        let mut piece = piece;
        edit(&mut piece);
        reader.geometry().check_piece(&piece)
    };
    check(|_| {}).unwrap();
    for edit in [
        (|piece| piece.slots = 41.into()) as fn(&mut Piece),
        |piece| piece.slots = u32::MAX.into(),
        |piece| piece.first_ordinal = 101.into(),
        |piece| piece.first_ordinal = u32::MAX.into(),
        |piece| piece.flags = 2.into(),
        |piece| piece.flags = Piece::REFS.into(),
        |piece| piece.plane1_offset = 0.into(),
        |piece| piece.plane1_offset = (piece.plane1_offset.get() + 1).into(),
        |piece| piece.plane1_offset = (piece.plane1_offset.get() + 64).into(),
        |piece| piece.plane1_offset = u64::MAX.into(),
        |piece| piece.first_part = u32::MAX.into(),
    ] {
        assert!(check(edit).is_err());
    }
}
