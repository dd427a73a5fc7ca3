//! Rows of the delta become segments.

use polign_engine::{
    build::in_memory::InMemoryOptions,
    cluster::Interrupted,
    maintain::{DeltaBatch, FlushError, write_delta_segment},
    quantize::plane2,
    root::{Root, RootBuilder, RootEdit},
    segment::{Packing, SegmentReader, WriteError},
};

use super::world::{METRICS, Mixture, World};

fn world(metric: polign_engine::Metric, mixture: &mut Mixture, rows: usize) -> World {
    let rows = (0..rows).map(|_| mixture.row()).collect();
    World::new(metric, rows, InMemoryOptions { lists: Some(20), ..Default::default() })
}

#[test]
fn flushed_rows_are_found_like_all_others() {
    for metric in METRICS {
        let mut mixture = Mixture::new(5, 24, 9);
        let mut world = world(metric, &mut mixture, 1_500);
        for round in 1..=3 {
            for _ in 0..150 * round {
                world.insert(mixture.row());
            }
            world.flush();
            for id in (0..100).map(|nth| nth * 7 + round) {
                world.delete(id as u64);
            }
            world.check(&mixture.row());
        }
        assert_eq!(world.root.segments().iter().filter(|entry| entry.is_delta()).count(), 3);
    }
}

#[test]
fn recall_stays_when_rows_are_flushed() {
    for metric in METRICS {
        let mut mixture = Mixture::new(11, 24, 9);
        let mut world = world(metric, &mut mixture, 3_000);
        let queries: Vec<Vec<f32>> = (0..30).map(|_| mixture.row()).collect();
        let before = world.recall(&queries);
        for _ in 0..2 {
            for _ in 0..500 {
                world.insert(mixture.row());
            }
            world.flush();
        }
        let after = world.recall(&queries);
        assert!(after > before - 0.03, "{metric:?}: {before}, then {after}");
    }
}

#[test]
fn a_segment_has_its_rows_by_slot_with_their_records_as_they_were() {
    let mut mixture = Mixture::new(5, 24, 9);
    let mut world = world(METRICS[0], &mut mixture, 1_500);
    for _ in 0..200 {
        world.insert(mixture.row());
    }
    let mut bytes = Vec::new();
    let segment = world.flushed(&mut bytes).unwrap();
    assert!(segment.slots.is_sorted());
    let reader = SegmentReader::open(segment.written.entry.object, &bytes).unwrap();
    reader.verify_all().unwrap();
    assert!(reader.entry().is_delta() && reader.geometry().packing() == Packing::Dense);
    assert_eq!(reader.model_bytes(), world.model.to_bytes());
    let mut positions = segment.positions.clone();
    for (ordinal, &position) in (0..).zip(&positions) {
        let expected = &world.delta[position as usize].record[..];
        assert_eq!(reader.record(ordinal).unwrap(), Some(expected));
    }
    for (cell, &slot) in reader.cells().iter().zip(&segment.slots) {
        assert_eq!(cell.cell_id, world.root.cells()[slot as usize].id);
        let rows =
            &segment.positions[cell.first_ordinal.get() as usize..][..cell.rows.get() as usize];
        assert!(rows.iter().all(|&row| cell.cell_id == world.delta[row as usize].cell));
        assert!(rows.is_sorted(), "in the order of insertion");
    }
    positions.sort_unstable();
    assert!(positions.into_iter().eq(0..200));
}

#[test]
fn rows_of_retired_and_unknown_cells_go_to_live_ones() {
    for metric in METRICS {
        let mut mixture = Mixture::new(6, 24, 9);
        let mut world = world(metric, &mut mixture, 1_500);
        for _ in 0..300 {
            world.insert(mixture.row());
        }
        let nearest: Vec<u32> = world.delta.iter().map(|waiting| waiting.cell).collect();
        // A cell without rows that was retired long ago, and one that is not there.
        let mut edit = RootEdit::new(&world.root);
        let next = world.next_cell;
        let centroid = world.root.centroid_record(0).to_vec();
        let slot = edit.cell(next, &[&centroid]);
        edit.retire(slot, 0);
        world.publish(edit.build().unwrap());
        for (nth, waiting) in world.delta.iter_mut().enumerate() {
            waiting.cell = if nth % 2 == 0 { next } else { u32::MAX };
        }
        let segment = world.flushed(&mut Vec::new()).unwrap();
        let mut same = 0;
        for (slot, cell) in segment.slots.iter().zip(&segment.written.cells) {
            assert!(!world.root.cells()[*slot as usize].is_retired());
            let rows =
                &segment.positions[cell.first_ordinal.get() as usize..][..cell.rows.get() as usize];
            same += rows.iter().filter(|&&row| cell.cell_id == nearest[row as usize]).count();
        }
        // For inner product a build assigns by direction and norm, the test's insert does not.
        let enough = if metric == polign_engine::Metric::InnerProduct { 100 } else { 295 };
        assert!(same >= enough, "{metric:?}: {same}");
        world.flush();
        world.check(&mixture.row());
    }
}

#[test]
fn damaged_records_are_carried_along() {
    let mut mixture = Mixture::new(7, 24, 9);
    let mut world = world(METRICS[0], &mut mixture, 500);
    for _ in 0..40 {
        world.insert(mixture.row());
    }
    let width = world.model.padded_dim();
    for (waiting, scale) in world.delta.iter_mut().zip([f32::NAN, f32::INFINITY, f32::MAX]) {
        waiting.record[width..width + 4].copy_from_slice(&scale.to_le_bytes());
        waiting.cell = u32::MAX;
    }
    let mut bytes = Vec::new();
    let segment = world.flushed(&mut bytes).unwrap();
    assert_eq!(segment.written.entry.rows, 40);
    let empty = write_delta_segment(
        &world.root,
        world.name(),
        DeltaBatch { cells: &[], records: &[] },
        Vec::new(),
        &|| false,
    );
    assert_eq!(empty.unwrap().written.entry.rows, 0);
}

#[test]
fn what_cannot_be_flushed_is_an_error() {
    let mut mixture = Mixture::new(8, 24, 9);
    let mut world = world(METRICS[0], &mut mixture, 500);
    for _ in 0..10 {
        world.insert(mixture.row());
    }
    let records: Vec<u8> = world.delta.iter().flat_map(|w| &w.record).copied().collect();
    let cells = vec![u32::MAX; 10];
    let flush = |root: &Root, records: &[u8], stop: bool, out: &mut dyn std::io::Write| {
        let batch = DeltaBatch { cells: &cells, records };
        write_delta_segment(root, world.name(), batch, out, &|| stop).unwrap_err()
    };
    let root = &world.root;
    let short = flush(root, &records[1..], false, &mut Vec::new());
    let bytes = 10 * plane2::record_bytes(world.model.padded_dim());
    let expected = format!("{} bytes of records for 10 rows, expected {bytes}", bytes - 1);
    assert_eq!(short.to_string(), expected);
    let stopped = flush(root, &records, true, &mut Vec::new());
    assert!(matches!(stopped, FlushError::Interrupted(Interrupted)));
    let full = flush(root, &records, false, &mut &mut [0; 100][..]);
    assert!(matches!(full, FlushError::Write(WriteError::Io(_))));
    let sections = RootBuilder::new(vec![world.model.clone()]).build().unwrap();
    let sections = sections.into_iter().map(|(key, bytes)| (key.code(), bytes));
    let bare = Root::from_sections(sections).unwrap();
    assert!(matches!(flush(&bare, &records, false, &mut Vec::new()), FlushError::NoCell));
}
