//! Mutating fuzzers, one for each reader, for a bounded time: bytes are flipped, cut, spliced and
//! overwritten with likely lengths, then mostly given fitting checksums, so that the checks behind the
//! checksum are reached. Whatever comes, a reader must not panic, and what it accepts must hold together.
//!
//! `POLIGN_FUZZ_SECONDS` (1) and `POLIGN_FUZZ_SEED` (1) lengthen and vary a run.

use std::{
    env,
    time::{Duration, Instant},
};

use polign_engine::{
    ObjectId,
    kernel::RacyBytes,
    quantize::{Model, plane1},
    root::{
        Curves, Image, Root, SectionKey, SectionKind,
        image::{self, Check},
    },
    segment::{
        Packing, PartKey, PartKind, RowPlane, SegmentReader, SegmentSpec, SlotRef,
        geometry::BLOCK_ROWS,
        part::{self, HEADER_LEN},
    },
};

use super::fixture::{self, Rng, id, segment, spec};

/// Calls `round` with fresh random numbers until the time is up, and says which call failed.
fn fuzz(mut round: impl FnMut(&mut Rng)) {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("POLIGN_FUZZ_SEED").unwrap_or(1);
    let end = Instant::now() + Duration::from_secs(number("POLIGN_FUZZ_SECONDS").unwrap_or(1));
    struct Report(u64, u64);
    impl Drop for Report {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("failed in round {} of POLIGN_FUZZ_SEED={}", self.1, self.0);
            }
        }
    }
    let mut report = Report(seed, 0);
    while report.1 == 0 || Instant::now() < end {
        let mut rng = Rng(seed << 32 ^ report.1);
        round(&mut rng);
        report.1 += 1;
    }
}

/// A number that a length or position might be confused with.
fn likely(rng: &mut Rng, near: u64) -> u64 {
    match rng.below(8) {
        0 => 0,
        1 => u64::MAX,
        2 => near.wrapping_add(1),
        3 => near.wrapping_sub(1),
        4 => near.wrapping_add(64),
        5 => 1 << rng.below(64),
        6 => (1u64 << rng.below(64)).wrapping_sub(1),
        _ => rng.below(1000) as u64,
    }
}

/// Changes bytes in place, without changing their number.
fn scribble(rng: &mut Rng, bytes: &mut [u8]) {
    if bytes.is_empty() {
        return;
    }
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(bytes.len());
        match rng.below(5) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.next() as u8,
            2 => {
                // A field of 2, 4 or 8 bytes, mostly aligned like one.
                let len = [2, 4, 4, 8][rng.below(4)].min(bytes.len());
                let at = (at & !(len.next_power_of_two() - 1)).min(bytes.len() - len);
                let mut old = [0; 8];
                old[..len].copy_from_slice(&bytes[at..at + len]);
                let new = likely(rng, u64::from_le_bytes(old)).to_le_bytes();
                bytes[at..at + len].copy_from_slice(&new[..len]);
            }
            3 => {
                let (from, len) = (rng.below(bytes.len()), 1 << rng.below(7));
                let len = len.min(bytes.len() - at.max(from));
                bytes.copy_within(from..from + len, at);
            }
            _ => {
                let len = rng.below(bytes.len() - at).min(64);
                bytes[at..at + len].fill(rng.next() as u8 & 0x80);
            }
        }
    }
}

/// Changes bytes and perhaps their number; `other` is what a splice may continue with.
fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    match rng.below(8) {
        0 => bytes.truncate(rng.below(bytes.len() + 1)),
        1 => bytes.resize(bytes.len() + rng.below(200), 0),
        2 => {
            bytes.truncate(rng.below(bytes.len() + 1));
            bytes.extend_from_slice(&other[rng.below(other.len() + 1)..]);
        }
        3 if !bytes.is_empty() => {
            let from = rng.below(bytes.len());
            bytes.drain(from..(from + 1 + rng.below(64)).min(bytes.len()));
        }
        _ => scribble(rng, bytes),
    }
}

#[test]
fn part_verification_holds() {
    let key = PartKey::new(id(9), PartKind::Plane2, 3);
    fuzz(|rng| {
        let (len, other_len) = (rng.below(300), rng.below(300));
        let payload = rng.bytes(len);
        let (mut intact, mut other) = (Vec::new(), Vec::new());
        part::frame(key, &payload, &mut intact);
        part::frame(PartKey::new(id(8), PartKind::Ids, 0), &rng.bytes(other_len), &mut other);
        let mut bytes = intact.clone();
        mutate(rng, &mut bytes, &other);
        let changed = bytes != intact;
        let resealed = rng.below(2) == 0;
        if resealed {
            part::reseal(&mut bytes);
        }
        let cheap = bytes
            .first_chunk()
            .map(|header| part::payload_range_unchecked_crc(key, header, bytes.len()));
        match part::verify(key, &bytes) {
            Ok(range) => {
                assert!(resealed || !changed);
                assert_eq!(cheap, Some(Ok(range.clone())));
                assert_eq!(part::framed_len(range.len()), bytes.len());
                assert!(bytes[range.end..].iter().all(|&byte| byte == 0));
            }
            Err(_) => assert!(changed || bytes != intact),
        }
    });
}

fn any_segment(rng: &mut Rng) -> fixture::Segment {
    let cells = rng.below(5);
    let rows: Vec<u32> = (0..cells).map(|_| rng.below(70) as u32).collect();
    let mut spec = spec(1, 1 + rng.below(40) as u32, 1 + rng.below(2) as u32, &rows);
    spec.packing = [Packing::PerCell, Packing::PerCell, Packing::Dense][rng.below(3)];
    spec.row_plane = [RowPlane::None, RowPlane::F16, RowPlane::F32][rng.below(3)];
    let model_len = rng.below(100);
    spec.model_bytes = rng.bytes(model_len);
    spec.references = (0..rng.below(3) as u8).map(id).collect();
    if spec.packing == Packing::PerCell {
        for cell in &mut spec.cells {
            cell.refs = cell.slots > 0 && rng.below(3) == 0;
        }
    }
    segment(rng.next(), SegmentSpec { ..spec })
}

/// Uses everything that an accepted segment offers.
fn use_segment(object: ObjectId, bytes: &[u8]) {
    let Ok(reader) = SegmentReader::open(object, bytes) else { return };
    let geometry = reader.geometry();
    let mut end = 0;
    for part in reader.parts() {
        assert_eq!(part.offset, end);
        assert_eq!(reader.part_bytes(&part).len(), part.len as usize);
        end = part.end();
        if let Ok(payload) = reader.payload(&part) {
            assert_eq!(payload.len(), geometry.payload_len(&part));
        }
    }
    assert_eq!(end, bytes.len() as u64);
    let rows = geometry.rows();
    if let Ok(ids) = reader.ids() {
        assert_eq!(ids.len(), rows as usize);
    }
    for ordinal in [0, rows / 2, rows.saturating_sub(1)] {
        let present = ordinal < rows;
        if let Ok(record) = reader.record(ordinal) {
            assert_eq!(record.map(<[u8]>::len), present.then(|| geometry.shape().record_bytes()));
        }
        if let Ok(row) = reader.row(ordinal) {
            let expected = (present && geometry.row_bytes() > 0).then(|| geometry.row_bytes());
            assert_eq!(row.map(<[u8]>::len), expected);
        }
    }
    assert_eq!(geometry.chunk_of(rows), None);
    let mut own_rows = 0u64;
    for cell in reader.cells() {
        own_rows += u64::from(cell.rows.get());
        geometry.check_piece(&cell.piece(0, 0)).unwrap();
        let Ok(parts) = reader.plane1(cell) else { continue };
        let mut slots = 0;
        for (plane1, payload) in parts {
            let end = plane1.blocks_at + plane1.blocks as usize * geometry.shape().block_bytes();
            assert!(end <= payload.len());
            assert!(plane1.skip + plane1.slots <= plane1.blocks * BLOCK_ROWS);
            if let Some(at) = plane1.refs_at {
                assert!(at + plane1.slots as usize * size_of::<SlotRef>() <= payload.len());
            }
            assert_eq!(plane1.before, slots);
            slots += plane1.slots;
        }
        assert_eq!(slots, cell.slots.get());
    }
    assert_eq!(own_rows, u64::from(rows));
}

#[test]
fn the_segment_reader_holds() {
    let mut accepted = 0;
    let mut seeds: Vec<fixture::Segment> =
        vec![fixture::base(), fixture::delta(), fixture::spilled()];
    let mut rng = Rng(7);
    seeds.extend((0..40).map(|_| any_segment(&mut rng)));
    fuzz(|rng| {
        let (seed, other) = (rng.below(seeds.len()), rng.below(seeds.len()));
        let (seed, other) = (&seeds[seed], &seeds[other]);
        let object = seed.spec.name.object;
        let parts: Vec<_> = SegmentReader::open(object, &seed.bytes).unwrap().parts().collect();
        let mut bytes = seed.bytes.clone();
        // Mostly the payload of the header or of the footer: the rest has no structure.
        let part = match rng.below(3) {
            0 => parts[0],
            1 => parts[parts.len() - 1],
            _ => parts[rng.below(parts.len())],
        };
        let payload = part.offset as usize + HEADER_LEN..part.end() as usize;
        match rng.below(4) {
            0 => mutate(rng, &mut bytes, &other.bytes),
            _ => scribble(rng, &mut bytes[payload]),
        }
        if rng.below(8) > 0 {
            for part in &parts {
                let end = bytes.len().min(part.end() as usize);
                if let Some(part) = bytes.get_mut(part.offset as usize..end) {
                    part::reseal(part);
                }
            }
        }
        accepted += u32::from(SegmentReader::open(object, &bytes).is_ok());
        use_segment(object, &bytes);
    });
    assert!(accepted > 0, "no mutant reached the code behind the checks");
}

/// Uses everything that an accepted root offers.
fn use_root(root: &Root, rng: &mut Rng) {
    let slots = root.cell_count() as u32;
    let query = root.models()[0].query(&vec![0.5; root.dim()]).unwrap();
    let (mut estimates, mut lowers) = (Vec::new(), Vec::new());
    for blocks in [root.centroid_blocks(), root.group_blocks()] {
        let term = query.zero_cell_term();
        plane1::scan(RacyBytes::new(blocks), 1, &query, term, 2.0, &mut estimates, &mut lowers);
    }
    let groups = root.group_count() as u32;
    assert!(estimates.len() >= (slots + groups) as usize);
    assert!(estimates.iter().all(|estimate| !estimate.is_nan()));
    let pieces: usize = (0..slots).map(|slot| root.pieces_of(slot).len()).sum();
    assert_eq!(pieces, root.pieces().len());
    let deltas: usize = (0..slots).map(|slot| root.delta_pieces_of(slot).count()).sum();
    assert_eq!(deltas, root.delta_pieces().len());
    for slot in 0..slots {
        let cell = root.cells()[slot as usize];
        assert_eq!(root.slot_of(cell.id.get()), Some(slot));
        if let Some(live) = root.live_slot_of(cell.id.get()) {
            assert!(!root.cells()[live as usize].is_retired());
        }
        let _ = query.refine(RacyBytes::new(root.centroid_record(slot)));
        for piece in root.pieces_of(slot).iter().chain(root.delta_pieces_of(slot)) {
            assert_eq!(piece.cell, slot);
            let segment = piece.segment.get();
            let geometry = root.geometry(segment);
            assert!(root.model_of(segment) < root.models().len());
            // A damaged piece may have very many parts.
            let mut before = 0;
            for plane1 in geometry.plane1_parts(piece).take(100) {
                assert!(plane1.part.end() <= root.segments()[segment as usize].ids_offset.get());
                assert_eq!(plane1.before, before);
                before += plane1.slots;
            }
            let last = piece.first_ordinal.get() + piece.slots.get().saturating_sub(1);
            if !piece.has_refs() && piece.slots > 0 {
                let (part, _) = geometry.chunk_of(last).unwrap();
                assert!(part.end() <= geometry.object_len());
            }
        }
    }
    for segment in 0..root.segments().len() as u32 {
        let slot = SlotRef {
            segment: (rng.below(4) as u32).into(),
            ordinal: (rng.below(100) as u32).into(),
        };
        if let Some((target, ordinal)) = root.resolve(segment, slot) {
            assert!(ordinal < root.geometry(target).rows());
        }
    }
    let covered: u64 = (0..groups)
        .flat_map(|group| root.group_cells(group))
        .map(|range| u64::from(range.count.get()))
        .sum();
    assert!(groups == 0 || covered == u64::from(slots));
    assert!(root.curves().nprobe(rng.next() as u32, 0.9, slots) <= slots);
    let _ = (root.rows(), root.object_bytes(), root.segment_of(id(1)));
}

#[test]
fn root_sections_hold() {
    let seed = fixture::root_sections();
    let mut accepted = 0;
    fuzz(|rng| {
        let mut sections: Vec<(u32, Vec<u8>)> =
            seed.iter().map(|(key, bytes)| (key.code(), bytes.clone())).collect();
        for _ in 0..1 + rng.below(2) {
            let at = rng.below(sections.len());
            match rng.below(20) {
                0 => drop(sections.remove(at)),
                1 => sections[at].0 = likely(rng, sections[at].0.into()) as u32,
                2 => {
                    let other = sections[rng.below(sections.len())].1.clone();
                    mutate(rng, &mut sections[at].1, &other);
                }
                _ => scribble(rng, &mut sections[at].1),
            }
        }
        if let Ok(root) = Root::from_sections(sections) {
            accepted += 1;
            use_root(&root, rng);
        }
    });
    assert!(accepted > 0, "no mutant reached the code behind the checks");
}

#[test]
fn root_images_hold() {
    let seed = fixture::root_sections();
    let intact = image::encode(id(1), id(2), &seed);
    let mut accepted = 0;
    fuzz(|rng| {
        let mut bytes = match rng.below(2) {
            // A damaged section under a fitting checksum.
            0 => {
                let mut sections: Vec<(SectionKey, Vec<u8>)> = seed.clone();
                let at = rng.below(sections.len());
                scribble(rng, &mut sections[at].1);
                image::encode(id(1), id(2), &sections)
            }
            // A damaged frame.
            _ => {
                let mut bytes = intact.clone();
                match rng.below(3) {
                    0 => mutate(rng, &mut bytes, &intact),
                    1 => scribble(rng, &mut bytes[..64]),
                    _ => scribble(rng, &mut bytes[..64 + 32 * seed.len()]),
                }
                bytes
            }
        };
        if rng.below(4) > 0 {
            image::reseal(&mut bytes);
        }
        for check in [Check::Full, Check::Table] {
            let Ok(image) = Image::open(bytes.clone().into(), check) else { continue };
            assert!(image.sections().all(|(_, section)| section.len() <= bytes.len()));
            if let Ok(root) = image.read() {
                accepted += 1;
                use_root(&root, rng);
            }
        }
    });
    assert!(accepted > 0, "no mutant reached the code behind the checks");
}

#[test]
fn models_hold() {
    let seeds: Vec<Vec<u8>> = [1, 20, 300]
        .map(|dim| Model::new(3, polign_engine::Metric::Cosine, dim, 5, vec![0.125; dim]))
        .map(|model| model.unwrap().to_bytes())
        .to_vec();
    let mut accepted = 0;
    fuzz(|rng| {
        let mut bytes = seeds[rng.below(seeds.len())].clone();
        match rng.below(2) {
            0 => mutate(rng, &mut bytes, &seeds[1]),
            _ => scribble(rng, &mut bytes[..24]),
        }
        let Ok(model) = Model::from_bytes(&bytes) else { return };
        accepted += 1;
        // The reserved field is not kept.
        assert_eq!(Model::from_bytes(&model.to_bytes()).unwrap(), model);
        let row = vec![1.0; model.dim];
        let mut projected = vec![0.0; model.padded_dim()];
        model.project_row(&row, &mut projected).unwrap();
        assert!(projected.iter().all(|x| x.is_finite()));
        model.query(&row).unwrap();
    });
    assert!(accepted > 0, "no mutant reached the code behind the checks");
}

#[test]
fn curves_hold() {
    let seeds = [fixture::curves(), fixture::curves().of_queries(7)].map(|seed| seed.to_bytes());
    let mut accepted = 0;
    fuzz(|rng| {
        let seed = &seeds[rng.below(2)];
        let mut bytes = seed.clone();
        mutate(rng, &mut bytes, seed);
        let Ok(curves) = Curves::from_bytes(&bytes) else { return };
        accepted += 1;
        assert_eq!(curves.to_bytes(), bytes);
        let cells = rng.below(1000) as u32;
        let (k, target) = (rng.next() as u32, rng.below(100) as f64 / 100.0);
        assert!(curves.nprobe(k, target, cells) <= curves.nprobe(k, target + 0.01, cells));
        assert!(curves.nprobe(k, target, cells) <= cells);
        assert_eq!(curves.nprobe(k, 1.0, cells), cells);
    });
    assert!(accepted > 0, "no mutant reached the code behind the checks");
    assert_eq!(SectionKey::only(SectionKind::Curves).code(), 7);
}
