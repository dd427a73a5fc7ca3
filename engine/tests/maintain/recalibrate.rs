//! Recall curves of an index that changed.

use std::sync::Arc;

use polign_engine::{
    Metric, ObjectId,
    cluster::Interrupted,
    maintain::{Policy, Recalibration, is_calibration_due},
    root::FittedTo,
    search::NoTombstones,
    segment::SourceError,
};

use super::{
    compact::{compact_all, delete_every, explicit, insert, world},
    world::{METRICS, Mixture, World},
};

#[test]
fn an_index_that_grew_from_a_few_rows_keeps_its_recall() {
    for metric in METRICS {
        let mut mixture = Mixture::new(17, 24, 9);
        let mut world = World::empty(metric, 24);
        let mut calibrated = 300;
        for _ in 0..calibrated {
            world.insert(mixture.row());
        }
        world.first_flush(1, 1_000);
        for _ in 0..10 {
            insert(&mut world, &mut mixture, 500);
            delete_every(&mut world, 50);
            compact_all(&mut world, Policy { target_rows: 60, ..explicit() });
            if is_calibration_due(world.root.rows(), calibrated) {
                world.recalibrate().unwrap();
                calibrated = world.root.rows();
            }
        }
        let queries: Vec<Vec<f32>> = (0..200).map(|_| mixture.row()).collect();
        let recall = world.recall(&queries);
        assert!(recall > 0.93, "{metric:?}: {recall}");
        // It is not because everything is searched.
        let probed = world.root.curves().nprobe(10, 0.95, 10_000);
        assert!(probed < world.root.cell_count() as u32 / 2, "{metric:?}: {probed}");
    }
}

#[test]
fn curves_of_an_index_that_did_not_change_are_those_of_its_build() {
    for metric in METRICS {
        let mut mixture = Mixture::new(3, 24, 9);
        let mut world = world(metric, &mut mixture, 4_000);
        let built = world.root.curves().clone();
        // Rows that are dead, or still in a segment of the delta, are neighbours or not like any others.
        insert(&mut world, &mut mixture, 100);
        delete_every(&mut world, 60);
        let curves = world.recalibrate().unwrap();
        assert_eq!(curves.curves().len(), 3);
        for k in [10, 100, 1_000] {
            let (built, now) = (built.nprobe(k, 0.95, 1_000), curves.nprobe(k, 0.95, 1_000));
            assert!(now.abs_diff(built) <= 2 + built / 4, "{metric:?}: {built}, now {now}");
        }
    }
}

#[test]
fn curves_fitted_to_queries_give_them_the_recall_that_is_asked_for() {
    for metric in METRICS {
        let mut mixture = Mixture::new(7, 24, 40);
        let mut world = world(metric, &mut mixture, 6_000);
        insert(&mut world, &mut mixture, 200);
        delete_every(&mut world, 60);
        // Between two clusters, where no row lies: harder than rows are.
        let between = |mixture: &mut Mixture| -> Vec<Vec<f32>> {
            let mut middle = || {
                let (a, b) = (mixture.row(), mixture.row());
                a.iter().zip(&b).map(|(a, b)| 0.5 * (a + b)).collect()
            };
            (0..300).map(|_| middle()).collect()
        };
        let (asked, others) = (between(&mut mixture), between(&mut mixture));
        let before = world.recall(&others);
        let curves = world.calibrate_to(&asked).unwrap();
        let cells = world.root.cell_count() as u32;
        assert_eq!(curves.fitted_to(), FittedTo::Queries { cells });
        assert_eq!(world.root.curves(), &curves);
        assert_eq!(curves.curves()[0].samples, 300);
        let after = world.recall(&others);
        assert!(after > before && after >= 0.94, "{metric:?}: {before}, then {after}");
        // What comes later keeps them.
        insert(&mut world, &mut mixture, 500);
        compact_all(&mut world, explicit());
        assert_eq!(world.root.curves(), &curves);
        assert_eq!(world.recalibrate().unwrap().fitted_to(), FittedTo::Rows);
    }
}

#[test]
fn a_query_that_equals_a_row_asks_for_it() {
    let mut mixture = Mixture::new(3, 24, 9);
    let mut world = World::empty(Metric::L2, 24);
    let same = mixture.row();
    for row in 0..2_000 {
        world.insert(if row % 4 == 0 { same.clone() } else { mixture.row() });
    }
    world.first_flush(20, 2_000);
    let curves = world.calibrate_to(&vec![same; 100]).unwrap();
    assert_eq!(curves.curves()[0].points.len(), 1, "the nearest lie in the first cell");
    assert_eq!(curves.curves()[0].points[0].nprobe, 1);
}

#[test]
fn calibration_is_due_when_an_index_has_grown_or_shrunk() {
    for (rows, then, due) in [
        (100, 100, false),
        (124, 100, false),
        (125, 100, true),
        (80, 100, true),
        (81, 100, false),
        (1_499_999, 1_000_000, false),
        (1_500_000, 1_000_000, true),
        (666_667, 1_000_000, false),
        (666_666, 1_000_000, true),
        (u64::MAX, u64::MAX, false),
    ] {
        assert_eq!(is_calibration_due(rows, then), due, "{rows} after {then}");
    }
    assert!(is_calibration_due(1, 0));
}

#[test]
fn an_index_without_rows_has_no_curves() {
    let mut world = World::empty(Metric::L2, 24);
    assert!(world.recalibrate().unwrap().curves().is_empty());
    let mut mixture = Mixture::new(3, 24, 9);
    let mut world = super::compact::world(Metric::L2, &mut mixture, 500);
    delete_every(&mut world, 1);
    assert!(world.recalibrate().unwrap().curves().is_empty());
}

#[test]
fn trouble_is_an_error() {
    let mut mixture = Mixture::new(3, 24, 9);
    let mut world = world(Metric::L2, &mut mixture, 2_000);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let mut calibration = Recalibration::new(Arc::clone(&world.root));
    let rows = calibration.read(&mut world.source, &NoTombstones).unwrap().unwrap();
    assert!(matches!(calibration.observe(rows, &pool, &|| true), Err(Interrupted)));
    let objects: Vec<ObjectId> = world.root.segments().iter().map(|e| e.object).collect();
    for object in objects {
        let whole = world.object(object);
        let mut bytes = whole.clone();
        let end = bytes.len() - 300;
        bytes[end / 2..end].fill(7);
        world.source.insert(object, bytes);
        world.source.evict_all();
        let error = world.recalibrate().unwrap_err();
        assert!(matches!(error, SourceError::Damaged { .. }), "{error}");
        world.source.insert(object, whole);
    }
}
