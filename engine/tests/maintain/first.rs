//! The first flush of an index that was created empty.

use polign_engine::{
    Metric,
    build::in_memory::InMemoryOptions,
    cluster::Interrupted,
    maintain::{FlushError, first_cells},
    quantize::plane2,
    segment::SegmentReader,
};

use super::world::{METRICS, Mixture, World};

fn filled(metric: Metric, mixture: &mut Mixture, rows: usize) -> World {
    let mut world = World::empty(metric, 24);
    for _ in 0..rows {
        world.insert(mixture.row());
    }
    assert!(world.delta.iter().all(|waiting| waiting.cell == 0));
    world
}

#[test]
fn rows_get_cells_of_their_own_and_are_found_in_them() {
    for metric in METRICS {
        let mut mixture = Mixture::new(3, 24, 9);
        let mut world = filled(metric, &mut mixture, 4_000);
        let rows: Vec<Vec<f32>> = world.rows.values().cloned().collect();
        let records: Vec<Vec<u8>> = world.delta.iter().map(|w| w.record.clone()).collect();
        let first = world.first_flush(40, 1_500);
        assert!(world.root.segments().len() >= 3);
        assert!((25..=60).contains(&first.cells.len()), "{}", first.cells.len());
        assert_eq!(world.root.slot_of(0), None, "the cell around the origin is gone");
        assert_eq!(world.root.cells()[0].id, 1);
        world.check(&mixture.row());

        // Every row once, with its record as it was.
        let mut positions = first.positions.concat();
        let written = world.root.segments().iter().flat_map(|entry| {
            let bytes = world.object(entry.object);
            let reader = SegmentReader::open(entry.object, &bytes).unwrap();
            assert!(!reader.entry().is_delta());
            (0..entry.rows.get())
                .map(|ordinal| reader.record(ordinal).unwrap().unwrap().to_vec())
                .collect::<Vec<_>>()
        });
        for (position, record) in positions.iter().zip(written) {
            assert_eq!(record, records[*position as usize]);
        }
        positions.sort_unstable();
        assert!(positions.into_iter().eq(0..4_000));

        // As good as a build.
        let queries: Vec<Vec<f32>> = (0..40).map(|_| mixture.row()).collect();
        let options = InMemoryOptions { lists: Some(40), ..Default::default() };
        let mut built = World::new(metric, rows, options);
        let (flushed, built) = (world.recall(&queries), built.recall(&queries));
        assert!(flushed > 0.93 && flushed > built - 0.02, "{metric:?}: {flushed}, {built}");
    }
}

#[test]
fn rows_of_the_cell_around_the_origin_can_be_flushed_later() {
    let mut mixture = Mixture::new(3, 24, 9);
    let mut world = filled(Metric::Cosine, &mut mixture, 900);
    let later = world.delta.split_off(700);
    world.first_flush(2, 10_000);
    assert_eq!(world.root.segments().len(), 1);
    world.delta = later;
    world.flush();
    world.check(&mixture.row());
}

#[test]
fn a_few_rows_are_a_segment_too() {
    for metric in METRICS {
        for (rows, lists) in [(1, 1), (2, 5), (300, 1)] {
            let mut mixture = Mixture::new(9, 24, 3);
            let mut world = filled(metric, &mut mixture, rows);
            world.first_flush(lists, 1_000);
            world.check(&mixture.row());
            let queries = [mixture.row(), mixture.row()];
            let found = rows.min(10) as f64 / 10.0;
            if rows < 10 {
                assert!(world.root.curves().curves().len() <= 3);
            } else {
                assert!(world.recall(&queries) >= found - 0.05);
            }
        }
    }
}

#[test]
fn equal_rows_are_one_cell() {
    let mut mixture = Mixture::new(9, 24, 3);
    let mut world = World::empty(Metric::L2, 24);
    let row = mixture.row();
    for _ in 0..2_000 {
        world.insert(row.clone());
    }
    let first = world.first_flush(5, 10_000);
    assert_eq!(first.cells.len(), 1);
    world.check(&row);
}

#[test]
fn what_cannot_be_flushed_is_an_error() {
    let world = filled(Metric::L2, &mut Mixture::new(9, 24, 3), 200);
    let records: Vec<u8> = world.delta.iter().flat_map(|w| &w.record).copied().collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let first = |records: &[u8], stop: bool| {
        first_cells(&world.model, records, 3, 1, &pool, &|| stop).unwrap_err()
    };
    assert!(matches!(first(&[], false), FlushError::NoRows));
    let cut = plane2::record_bytes(world.model.padded_dim()) + 1;
    assert!(matches!(first(&records[..cut], false), FlushError::Records { rows: 1, .. }));
    assert!(matches!(first(&records, true), FlushError::Interrupted(Interrupted)));
}
