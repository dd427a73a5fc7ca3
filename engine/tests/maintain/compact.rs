//! Flushed rows come to those of their cells, dead ones go.

use std::collections::HashSet;

use polign_engine::{
    Metric, ObjectId,
    build::in_memory::InMemoryOptions,
    maintain::{Compaction, EncodedJob, Job, Policy, delta_runs},
    segment::{Packing, SegmentReader},
};

use super::world::{METRICS, Mixture, World};

const DIM: usize = 24;

/// An index of several segments.
pub fn world(metric: Metric, mixture: &mut Mixture, rows: usize) -> World {
    let rows = (0..rows).map(|_| mixture.row()).collect();
    let options =
        InMemoryOptions { lists: Some(30), segment_rows: 700, ..InMemoryOptions::default() };
    World::new(metric, rows, options)
}

/// Segments of about 700 rows.
pub fn small(policy: Policy) -> Policy {
    Policy { segment_bytes: 700 * 76, ..policy }
}

pub fn explicit() -> Policy {
    small(Policy::explicit(100))
}

fn automatic() -> Policy {
    small(Policy::automatic(100))
}

/// Compacts until nothing is left to be done.
pub fn compact_all(world: &mut World, policy: Policy) -> usize {
    let mut rounds = 0;
    while world.compact(policy).is_some() {
        rounds += 1;
        assert!(rounds < 50, "it does not end");
    }
    rounds
}

fn deltas(world: &World) -> usize {
    world.root.segments().iter().filter(|entry| entry.is_delta()).count()
}

pub fn insert(world: &mut World, mixture: &mut Mixture, rows: usize) {
    for _ in 0..rows {
        world.insert(mixture.row());
    }
    world.flush();
}

/// Deletes every `nth` row.
pub fn delete_every(world: &mut World, nth: usize) {
    let ids: Vec<u64> = world.rows.keys().copied().step_by(nth).collect();
    ids.into_iter().for_each(|id| world.delete(id));
}

/// Cells that are not retired.
fn live_cells(world: &World) -> HashSet<u32> {
    let live = world.root.cells().iter().filter(|cell| !cell.is_retired());
    live.map(|cell| cell.id.get()).collect()
}

#[test]
fn a_compaction_merges_all_there_is_and_loses_no_row() {
    for metric in METRICS {
        let mut mixture = Mixture::new(5, DIM, 9);
        let mut world = world(metric, &mut mixture, 3_000);
        for round in 0..3 {
            insert(&mut world, &mut mixture, 300);
            delete_every(&mut world, 5 + round);
        }
        let query = mixture.row();
        world.check(&query);
        compact_all(&mut world, explicit());
        world.check(&query);
        assert_eq!(deltas(&world), 0);
        assert_eq!(world.dead_counts().iter().sum::<u32>(), 0);
        assert_eq!(world.root.rows(), world.rows.len() as u64);
        assert!(world.plan(&explicit()).is_none());
    }
}

#[test]
fn rows_that_die_during_a_compaction_are_dead_after_it() {
    let mut mixture = Mixture::new(5, DIM, 9);
    let mut world = world(Metric::Cosine, &mut mixture, 2_000);
    insert(&mut world, &mut mixture, 300);
    delete_every(&mut world, 7);
    let stats = world.compact_with(explicit(), &mut |world| delete_every(world, 3)).unwrap();
    assert!(stats.rows > world.rows.len() as u64);
    assert!(world.dead_counts().iter().sum::<u32>() > 500);
    world.check(&mixture.row());
    compact_all(&mut world, explicit());
    assert_eq!(world.root.rows(), world.rows.len() as u64);
    world.check(&mixture.row());
}

#[test]
fn recall_after_churn_is_that_of_a_build() {
    for metric in METRICS {
        let mut mixture = Mixture::new(21, DIM, 9);
        let mut world = world(metric, &mut mixture, 4_000);
        for round in 0..5 {
            delete_every(&mut world, 10 - round);
            insert(&mut world, &mut mixture, 400);
            world.compact(Policy { target_rows: 133, ..automatic() });
        }
        compact_all(&mut world, Policy { target_rows: 133, ..explicit() });
        let rows: Vec<Vec<f32>> = world.rows.values().cloned().collect();
        let options = InMemoryOptions { lists: Some(30), ..Default::default() };
        let mut built = World::new(metric, rows, options);
        let queries: Vec<Vec<f32>> = (0..50).map(|_| mixture.row()).collect();
        let cells = |world: &World| live_cells(world).len();
        let counts = (cells(&world), cells(&built));
        assert!(counts.0.abs_diff(counts.1) < 10, "{counts:?}");
        // At the depth of the one that was calibrated anew, and at its own.
        let depth = built.depth();
        let at = |world: &mut World| world.recall_at(depth, &queries);
        let (compacted, built) = (at(&mut world), at(&mut built));
        assert!(compacted > built - 0.02, "{metric:?}: {compacted}, built anew {built}");
        let recall = world.recall(&queries);
        assert!(recall > 0.95, "{metric:?}: {recall}");
    }
}

/// Plane 1 of a cell, by the cell's id.
fn plane1(world: &World, id: u32) -> Vec<u8> {
    let slot = world.root.slot_of(id).unwrap();
    let pieces = world.root.pieces_of(slot);
    assert_eq!(pieces.len(), 1);
    let object = world.root.segments()[pieces[0].segment.get() as usize].object;
    let bytes = world.object(object);
    let reader = SegmentReader::open(object, &bytes).unwrap();
    let cell = reader.cells().iter().find(|cell| cell.cell_id == id).unwrap();
    reader.plane1(cell).unwrap().concat_payloads()
}

trait Concat {
    fn concat_payloads(self) -> Vec<u8>;
}

impl<T> Concat for Vec<(T, &[u8])> {
    fn concat_payloads(self) -> Vec<u8> {
        self.into_iter().flat_map(|(_, payload)| payload).copied().collect()
    }
}

#[test]
fn cells_without_a_change_are_taken_over_as_they_are() {
    let mut mixture = Mixture::new(5, DIM, 9);
    let mut world = world(Metric::L2, &mut mixture, 3_000);
    // A few rows for one cell, and a death in another.
    let (cell, other) = (3, 7);
    let near = world.rows[&0].clone();
    for _ in 0..5 {
        world.insert(near.clone());
        world.delta.last_mut().unwrap().cell = cell;
    }
    world.flush();
    let slot = world.root.slot_of(other).unwrap();
    let piece = world.root.pieces_of(slot)[0];
    let object = world.root.segments()[piece.segment.get() as usize].object;
    let place = (object, piece.first_ordinal.get());
    let victim = world.places.iter().find(|(_, at)| **at == place).map(|(id, _)| *id);
    world.delete(victim.unwrap());

    let before: Vec<Vec<u8>> = (0..world.next_cell).map(|id| plane1(&world, id)).collect();
    let objects: HashSet<ObjectId> = world.root.segments().iter().map(|e| e.object).collect();
    let stats = world.compact(explicit()).unwrap();
    assert_eq!((stats.dead, stats.split, stats.merged, stats.moved), (1, 0, 0, 0));
    let kept = world.root.segments().iter().filter(|e| objects.contains(&e.object)).count();
    assert!(kept >= 2, "only segments with a change are written anew: {kept}");
    let mut changed = Vec::new();
    for id in live_cells(&world) {
        if plane1(&world, id) != before[id as usize] {
            changed.push(id);
        }
    }
    changed.sort_unstable();
    assert_eq!(changed, [cell, other]);
    assert!(stats.copied > 3, "{stats:?}");
    world.check(&mixture.row());
}

#[test]
fn little_changes_wait_and_large_ones_do_not() {
    let mut mixture = Mixture::new(9, DIM, 9);
    let mut world = world(Metric::Cosine, &mut mixture, 6_000);
    insert(&mut world, &mut mixture, 100);
    assert!(world.plan(&automatic()).is_none());
    insert(&mut world, &mut mixture, 100);
    assert!(world.plan(&automatic()).is_none());
    insert(&mut world, &mut mixture, 1_200);
    // Not all at a time: what is left is one run of the delta.
    let policy = Policy { max_segments: 3, ..automatic() };
    let plan = world.plan(&policy).unwrap();
    assert_eq!((plan.segments.len(), plan.delta.len()), (3, 3));
    world.compact(policy).unwrap();
    assert_eq!(delta_runs(&world.root), 1);
    world.check(&mixture.row());
    let rounds = compact_all(&mut world, policy);
    assert!(rounds > 1);
    assert!(world.root.delta_pieces().len() < 200);
    world.check(&mixture.row());
}

#[test]
fn many_small_flushes_become_few_runs() {
    let mut mixture = Mixture::new(9, DIM, 9);
    let mut world = world(Metric::L2, &mut mixture, 6_000);
    let policy = Policy { changed_share: 10.0, ..automatic() };
    let (mut written, mut inserted) = (0, 0);
    for round in 0..24 {
        insert(&mut world, &mut mixture, 40);
        inserted += 40;
        if round % 3 == 0 {
            delete_every(&mut world, 41);
        }
        if let Some(stats) = world.compact(policy) {
            assert_eq!(stats.rows, stats.delta_rows);
            written += stats.rows;
        }
        assert!(delta_runs(&world.root) <= 4);
    }
    assert!(written < 4 * inserted, "{written} rows written for {inserted}");
    world.check(&mixture.row());
    // Many rows of a cell get blocks of their own, and a long run several objects.
    insert(&mut world, &mut mixture, 1_500);
    let policy = Policy { max_delta_runs: 1, ..policy };
    world.compact(policy).unwrap();
    assert_eq!(delta_runs(&world.root), 1);
    assert!(deltas(&world) > 1);
    for (segment, entry) in (0..).zip(world.root.segments()) {
        if entry.is_delta() {
            assert_eq!(world.root.geometry(segment).packing(), Packing::PerCell);
        }
    }
    world.check(&mixture.row());
    compact_all(&mut world, explicit());
    world.check(&mixture.row());
}

#[test]
fn a_cell_that_grew_is_split_and_forgotten_when_nothing_names_it() {
    for metric in METRICS {
        let mut mixture = Mixture::new(31, DIM, 3);
        let mut world = world(metric, &mut mixture, 2_000);
        let before = live_cells(&world);
        // New rows from the same places, twice as many: cells of 70 rows become those of 200 and more.
        insert(&mut world, &mut mixture, 6_000);
        // Rows that are inserted meanwhile name cells that are no more when they are flushed.
        for _ in 0..300 {
            world.insert(mixture.row());
        }
        let stats = world.compact(explicit()).unwrap();
        assert!(stats.split > 5, "{metric:?}: {stats:?}");
        assert!(stats.reassigned > 0, "{metric:?}: {stats:?}");
        let after = live_cells(&world);
        let retired: Vec<u32> = before.difference(&after).copied().collect();
        assert!(retired.len() as u64 >= stats.split);
        for &id in &retired {
            let slot = world.root.live_slot_of(id).unwrap();
            let heir = world.root.cells()[slot as usize].id.get();
            assert!(after.contains(&heir));
        }
        let largest =
            (0..world.root.cell_count() as u32).map(|slot| world.root.rows_of(slot)).max();
        assert!(largest.unwrap() <= 230, "{metric:?}: {largest:?}");

        let named: HashSet<u32> = world.delta.iter().map(|waiting| waiting.cell).collect();
        assert!(retired.iter().any(|id| named.contains(id)));
        delete_every(&mut world, 9);
        world.compact(explicit()).unwrap();
        for id in &retired {
            assert_eq!(world.root.slot_of(*id).is_some(), named.contains(id), "cell {id}");
        }
        world.flush();
        world.check(&mixture.row());
        delete_every(&mut world, 9);
        world.compact(explicit()).unwrap();
        assert!(retired.iter().all(|id| world.root.slot_of(*id).is_none()));
        world.check(&mixture.row());
    }
}

#[test]
fn cells_that_lost_most_rows_are_merged() {
    for metric in METRICS {
        let mut mixture = Mixture::new(5, DIM, 9);
        let mut world = world(metric, &mut mixture, 3_000);
        let before = live_cells(&world).len();
        let ids: Vec<u64> = world.rows.keys().copied().filter(|id| id % 10 != 0).collect();
        ids.into_iter().for_each(|id| world.delete(id));
        let segments = world.root.segments().len();
        let stats = world.compact(automatic()).unwrap();
        assert!(stats.merged > 5, "{metric:?}: {stats:?}");
        assert!(live_cells(&world).len() < before / 2);
        assert!(world.root.segments().len() < segments, "small neighbours are joined");
        world.check(&mixture.row());
    }
}

#[test]
fn an_index_whose_rows_all_died_can_be_filled_again() {
    let mut mixture = Mixture::new(5, DIM, 9);
    let mut world = world(Metric::L2, &mut mixture, 1_500);
    insert(&mut world, &mut mixture, 100);
    delete_every(&mut world, 1);
    compact_all(&mut world, explicit());
    assert!(world.root.segments().is_empty());
    assert!(!live_cells(&world).is_empty());
    world.check(&mixture.row());
    insert(&mut world, &mut mixture, 700);
    world.check(&mixture.row());
    compact_all(&mut world, automatic());
    assert_eq!(deltas(&world), 0, "without other segments the rows of the delta become one");
    world.check(&mixture.row());
    let queries: Vec<Vec<f32>> = (0..20).map(|_| mixture.row()).collect();
    assert!(world.recall(&queries) > 0.9);
}

#[test]
fn segments_that_grew_are_cut_and_an_index_grows_from_one_cell() {
    for metric in METRICS {
        let mut mixture = Mixture::new(17, DIM, 9);
        let mut world = World::empty(metric, DIM);
        for _ in 0..300 {
            world.insert(mixture.row());
        }
        world.first_flush(1, 1_000);
        insert(&mut world, &mut mixture, 4_000);
        // One cell of more rows than are ever decoded at a time.
        let policy = Policy { target_rows: 40, ..explicit() };
        let stats = world.compact(policy).unwrap();
        assert_eq!(stats.split, 1);
        assert!(live_cells(&world).len() > 60);
        let rows: Vec<u32> = world.root.segments().iter().map(|e| e.rows.get()).collect();
        assert!(rows.len() > 4 && rows.iter().all(|&rows| rows < 1_100), "{rows:?}");
        world.check(&mixture.row());
    }
}

#[test]
fn equal_rows_are_never_split() {
    let mut mixture = Mixture::new(17, DIM, 9);
    let mut world = world(Metric::L2, &mut mixture, 1_000);
    let row = mixture.row();
    for _ in 0..1_000 {
        world.insert(row.clone());
    }
    world.flush();
    for _ in 0..2 {
        compact_all(&mut world, explicit());
        world.check(&row);
        delete_every(&mut world, 50);
    }
}

#[test]
fn a_round_drops_no_more_objects_than_one_record_can_name() {
    let mut mixture = Mixture::new(13, DIM, 9);
    let mut world = world(Metric::Cosine, &mut mixture, 2_000);
    for _ in 0..120 {
        insert(&mut world, &mut mixture, 3);
    }
    let plan = world.plan(&explicit()).unwrap();
    assert!(plan.segments.len() + plan.delta.len() <= 100);
    // Cells with rows in what is left stay as they are, whatever becomes of their rows.
    let victims: Vec<u64> = world.rows.keys().copied().filter(|id| id % 12 != 0).collect();
    victims.into_iter().for_each(|id| world.delete(id));
    world.compact(explicit()).unwrap();
    world.check(&mixture.row());
    compact_all(&mut world, explicit());
    assert_eq!(deltas(&world), 0);
    world.check(&mixture.row());
}

#[test]
fn the_work_may_be_done_on_another_thread() {
    fn can_be_sent<T: Send>() {}
    can_be_sent::<Compaction>();
    can_be_sent::<Job>();
    can_be_sent::<EncodedJob>();
}
