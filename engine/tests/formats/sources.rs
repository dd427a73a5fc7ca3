//! The memory source behaves and counts like the real one.

use polign_engine::segment::{
    MemorySource, PartRef, PartSource, SegmentName, SegmentReader, SourceError, Want,
};

use super::fixture::{id, segment, spec};

fn source() -> (MemorySource, SegmentName, Vec<PartRef>) {
    let segment = segment(1, spec(1, 20, 2, &[40, 3]));
    let parts = SegmentReader::open(id(1), &segment.bytes).unwrap().parts().collect();
    let mut source = MemorySource::new();
    source.insert(id(1), segment.bytes);
    (source, segment.spec.name, parts)
}

fn wants<'a>(object: &'a SegmentName, parts: &[PartRef]) -> Vec<Want<'a>> {
    parts.iter().map(|&part| Want { object, part }).collect()
}

#[test]
fn one_request_for_many_parts_is_one_wave() {
    let (mut source, name, parts) = source();
    assert!(source.try_acquire(&parts[1]).is_none());
    source.request(&wants(&name, &parts));
    for want in wants(&name, &parts) {
        let view = source.acquire(want).unwrap();
        assert!(!view.bytes().is_empty() && view.is_private());
        assert!(source.still_valid(&view));
    }
    let stats = source.stats();
    let bytes: u64 = parts.iter().map(|part| u64::from(part.len)).sum();
    assert_eq!((stats.requests, stats.waves), (1, 1));
    assert_eq!((stats.parts, stats.bytes), (parts.len() as u64, bytes));

    // All is present now.
    source.reset_stats();
    source.request(&wants(&name, &parts));
    assert!(parts.iter().all(|part| source.try_acquire(part).is_some()));
    let stats = source.stats();
    assert_eq!((stats.waves, stats.parts, stats.acquired), (0, 0, parts.len() as u64));
}

#[test]
fn acquiring_without_a_request_waits_each_time() {
    let (mut source, name, parts) = source();
    for want in wants(&name, &parts[..2]) {
        source.acquire(want).unwrap();
    }
    assert_eq!((source.stats().waves, source.stats().parts), (2, 2));
}

#[test]
fn lost_views_are_acquired_again() {
    let (mut source, name, parts) = source();
    let want = wants(&name, &parts)[1];
    source.lose_validity(2);
    let mut losses = 0;
    let bytes = loop {
        let view = source.acquire(want).unwrap();
        let bytes = view.bytes().copy_to_vec();
        if source.still_valid(&view) {
            break bytes;
        }
        losses += 1;
    };
    assert_eq!((losses, source.stats().lost, source.stats().parts), (2, 2, 3));
    assert!(!bytes.is_empty());
}

#[test]
fn failures_are_those_of_a_store_and_are_not_remembered() {
    let (mut source, name, parts) = source();
    let want = wants(&name, &parts)[1];
    source.fail(id(1), SourceError::Interrupted);
    source.request(&[want]);
    assert_eq!(source.acquire(want).unwrap_err(), SourceError::Interrupted);
    source.heal();
    source.acquire(want).unwrap();

    let bytes = source.remove(id(1)).unwrap();
    source.evict_all();
    let missing = source.acquire(want).unwrap_err();
    assert!(matches!(&missing, SourceError::Missing { object, .. } if *object == name.key()));

    let mut damaged = bytes.to_vec();
    damaged[want.part.offset as usize + 100] ^= 1;
    source.insert(id(1), damaged);
    let error = source.acquire(want).unwrap_err();
    assert!(matches!(error, SourceError::Damaged { part, .. } if part == want.part.key));
    source.insert(id(1), bytes.slice(..300));
    assert!(matches!(source.acquire(want), Err(SourceError::Damaged { .. })));
}
