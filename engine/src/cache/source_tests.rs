use std::{path::Path, rc::Rc};

use super::*;
use crate::{
    ObjectId,
    cache::{DirectoryWriter, Geometry},
    protocol::{ClientOptions, PollWaiter},
};

/// A cache with one region, and the region's generation.
fn cache(dir: &Path) -> (Rc<CacheMap>, u64) {
    let writer = DirectoryWriter::create(dir, Geometry::for_regions(1)).unwrap();
    let generation = writer.evict_region(0);
    (Rc::new(CacheMap::open(dir).unwrap()), generation)
}

fn view(owner: &Rc<CacheMap>, generation: u64) -> PartView {
    static PAYLOAD: [u8; 4] = [0; 4];
    let owner: Rc<CacheMap> = Rc::clone(owner);
    PartView::shared(RacyBytes::new(&PAYLOAD), owner, token(0, generation), 0)
}

#[test]
fn a_view_of_a_cache_that_was_made_anew_is_lost_whatever_its_generations() {
    let (old_dir, new_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (old, old_generation) = cache(old_dir.path());
    let (new, new_generation) = cache(new_dir.path());
    assert_eq!(old_generation, new_generation);
    let link = CacheLink::new(new_dir.path(), ClientOptions::default());
    let link = Rc::new(RefCell::new(link));
    let mut source = CachedSource::new(link, "memory:", Duration::from_secs(1), PollWaiter);
    source.map = Some(Rc::clone(&new));
    assert!(source.still_valid(&view(&new, new_generation)));
    assert!(!source.still_valid(&view(&old, old_generation)));
    assert!(!source.still_valid(&view(&new, new_generation + 2)));
    assert_eq!(source.stats().lost, 2);
}

#[test]
fn a_failed_part_keeps_the_kind_of_its_failure() {
    let dir = tempfile::tempdir().unwrap();
    let link = CacheLink::new(dir.path(), ClientOptions::default());
    let link = Rc::new(RefCell::new(link));
    let source = CachedSource::new(link, "s3://b", Duration::from_secs(1), PollWaiter);
    let id = ObjectId([1; 16]);
    let object = &SegmentName { writer: id, index: id, object: id };
    let key = PartKey { object: id, index: 0 };
    let want = Want { object, part: PartRef { key, offset: 0, len: 1 } };
    for kind in [
        FailureKind::Unreachable,
        FailureKind::Credentials,
        FailureKind::Denied,
        FailureKind::ClockSkew,
        FailureKind::NotFound,
        FailureKind::Damaged,
        FailureKind::Exists,
        FailureKind::Invalid,
        FailureKind::Local,
        FailureKind::Internal,
        FailureKind::InUse,
    ] {
        let failure = Failure {
            kind,
            code: String::new(),
            message: "no usable credentials".into(),
            detail: String::new(),
            object: object.key(),
            url: "s3://b".into(),
        };
        let in_reply = source.failure(want, failure.clone(), Duration::ZERO);
        let in_client = ClientError::Failed(Box::new(failure));
        for error in [in_reply, source.unanswered(want, in_client, Duration::ZERO)] {
            match error {
                SourceError::Missing { .. } => assert_eq!(kind, FailureKind::NotFound),
                SourceError::Damaged { .. } => assert_eq!(kind, FailureKind::Damaged),
                SourceError::Store { kind: carried, .. } => assert_eq!(carried, kind),
                error => panic!("{kind:?}: {error}"),
            }
        }
    }
}
