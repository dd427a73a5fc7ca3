//! Compactions that do not come to their end change nothing, and damage is an error.

use std::sync::Arc;

use polign_engine::{
    Metric, ObjectId,
    cluster::Interrupted,
    maintain::Compaction,
    search::NoTombstones,
    segment::{PartSource, SegmentReader, SourceError, part},
};

use super::{
    compact::{delete_every, explicit, insert, world},
    world::{Mixture, World},
};

fn changed() -> (World, Mixture) {
    let mut mixture = Mixture::new(5, 24, 9);
    let mut world = world(Metric::L2, &mut mixture, 2_000);
    insert(&mut world, &mut mixture, 200);
    delete_every(&mut world, 11);
    (world, mixture)
}

#[test]
fn a_compaction_that_is_interrupted_changes_nothing() {
    let (mut world, mut mixture) = changed();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let root = Arc::clone(&world.root);
    let plan = world.plan(&explicit()).unwrap();
    let mut compaction = Compaction::new(root, plan, explicit(), world.next_cell);
    assert!(compaction.jobs() > 1);
    let job = compaction.read(&mut world.source, &NoTombstones).unwrap().unwrap();
    assert!(matches!(compaction.encode(job, &pool, &|| true), Err(Interrupted)));
    drop(compaction);
    world.check(&mixture.row());
    while world.compact(explicit()).is_some() {}
    world.check(&mixture.row());
}

#[test]
fn a_store_that_fails_is_an_error_and_nothing_is_changed() {
    let (mut world, mut mixture) = changed();
    for segment in 0..world.root.segments().len() {
        let object = world.root.segments()[segment].object;
        let error = SourceError::Missing { object: "o".into(), store: "s".into() };
        world.source.fail(object, error.clone());
        world.source.evict_all();
        let plan = world.plan(&explicit()).unwrap();
        assert_eq!(world.outcome(plan, explicit()).unwrap_err(), error);
        world.source.heal();
    }
    world.check(&mixture.row());
}

#[test]
fn parts_that_are_lost_while_they_are_read_are_read_again() {
    let (mut world, mut mixture) = changed();
    world.source.lose_validity(100);
    while world.compact(explicit()).is_some() {}
    world.check(&mixture.row());
}

#[test]
fn parts_are_asked_for_ahead() {
    let (mut world, _) = changed();
    world.source.evict_all();
    world.source.reset_stats();
    let plan = world.plan(&explicit()).unwrap();
    world.outcome(plan, explicit()).unwrap();
    let stats = world.source.stats();
    // No part was waited for that was not asked for.
    assert!(stats.waves == stats.requests && stats.parts > 2 * stats.waves, "{stats:?}");
}

/// Damages each plane-2 part of an object that a compaction reads in turn: how many there are, and of how
/// many the damage is an error. `edit` is given the part's bytes.
fn damage(world: &mut World, object: ObjectId, edit: &dyn Fn(&mut [u8])) -> (usize, usize) {
    let whole = world.object(object);
    let reader = SegmentReader::open(object, &whole).unwrap();
    world.source.evict_all();
    let plan = world.plan(&explicit()).unwrap();
    world.outcome(plan, explicit()).unwrap();
    let all = reader.geometry().plane2_parts();
    let parts: Vec<_> = all.filter(|part| world.source.contains(part)).collect();
    let mut errors = 0;
    for part in &parts {
        let mut bytes = whole.clone();
        edit(&mut bytes[part.offset as usize..part.end() as usize]);
        world.source.insert(object, bytes);
        world.source.evict_all();
        let plan = world.plan(&explicit()).unwrap();
        if let Err(error) = world.outcome(plan, explicit()) {
            let SourceError::Damaged { part: found, .. } = &error else { panic!("{error}") };
            assert_eq!(*found, part.key);
            errors += 1;
        }
    }
    world.source.insert(object, whole);
    world.source.evict_all();
    (parts.len(), errors)
}

#[test]
fn damaged_parts_are_named() {
    let (mut world, mut mixture) = changed();
    let objects: Vec<ObjectId> = world.root.segments().iter().map(|e| e.object).collect();
    for object in objects {
        for from_end in [false, true] {
            let (parts, errors) = damage(&mut world, object, &|bytes| {
                let at = if from_end { bytes.len() - 1 } else { part::HEADER_LEN };
                bytes[at] ^= 1;
            });
            assert!(parts > 0 && errors == parts);
        }
        // Intact, but of another length than the root says: an error where the last row is read.
        let (_, errors) = damage(&mut world, object, &|bytes| {
            let len = u32::from_le_bytes(bytes[12..16].try_into().unwrap());
            bytes[12..16].copy_from_slice(&(len - 1).to_le_bytes());
            bytes[part::HEADER_LEN + len as usize - 1] = 0;
            part::reseal(bytes);
        });
        assert!(errors > 0);
    }
    world.check(&mixture.row());
}

/// Whatever the codes are, as long as the parts are intact.
#[test]
fn hostile_records_do_no_harm() {
    let (mut world, mut mixture) = changed();
    let objects: Vec<ObjectId> = world.root.segments().iter().map(|e| e.object).collect();
    let width = world.model.padded_dim();
    for object in objects {
        let mut bytes = world.object(object);
        let reader = SegmentReader::open(object, &bytes).unwrap();
        let parts: Vec<_> = reader.geometry().plane2_parts().collect();
        let per_chunk = reader.geometry().shape().records_per_chunk() as usize;
        let rows = reader.geometry().rows() as usize;
        for (number, part) in parts.into_iter().enumerate() {
            let part = &mut bytes[part.offset as usize..part.end() as usize];
            let here = per_chunk.min(rows - number * per_chunk);
            for row in 0..here {
                let at = part::HEADER_LEN + row * (width + 16);
                for byte in &mut part[at..at + width + 8] {
                    *byte = (mixture.uniform() * 256.0) as u8;
                }
            }
            part::reseal(part);
        }
        world.source.insert(object, bytes);
    }
    world.source.evict_all();
    while world.compact(explicit()).is_some() {}
    assert_eq!(world.root.rows(), world.rows.len() as u64);
}
