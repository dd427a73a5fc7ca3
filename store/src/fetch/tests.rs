use std::sync::Mutex;

use polign_engine::{ObjectId, cache::Counter, gets::GAP, protocol::PartRange, segment::PartKind};

use super::*;
use crate::object_store::{
    ErrorClass,
    fake::{FakeStore, Fault},
};

const OBJECT: ObjectId = ObjectId([7; 16]);
const NAME: &str = "ab/object.seg";
const LONG: Duration = Duration::from_secs(20);

/// An object of parts of about 16 KiB, a store with it, and a cache of 8 regions.
struct Bench {
    store: Arc<FakeStore>,
    remote: Arc<Remote>,
    fetcher: Arc<Fetcher>,
    parts: Vec<(PartRange, Bytes)>,
    _dir: tempfile::TempDir,
}

fn bench() -> Bench {
    let mut object = Vec::new();
    let mut parts = Vec::new();
    for ordinal in 0..40 {
        let key = PartKey::new(OBJECT, PartKind::Plane2, ordinal);
        let start = object.len();
        let payload: Vec<u8> = (0..16_000).map(|at| (at * 31 + ordinal as usize) as u8).collect();
        part::frame(key, &payload, &mut object);
        let len = (object.len() - start) as u32;
        let range = PartRange { index: key.index, len, offset: start as u64 };
        parts.push((range, Bytes::copy_from_slice(&object[start..])));
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = Arc::new(RegionCache::open(dir.path(), 8 << 20));
    let store = Arc::new(FakeStore::default());
    store.insert(NAME, object);
    let remote = Arc::new(Remote::new(Arc::clone(&store) as _, 16, Arc::clone(&cache)));
    let fetcher = Arc::new(Fetcher::new(cache));
    Bench { store, remote, fetcher, parts, _dir: dir }
}

type Outcomes = HashMap<u32, PartOutcome>;
type Fetching = tokio::task::JoinHandle<(Outcomes, FetchSummary)>;

impl Bench {
    fn plan(&self, ordinals: &[usize]) -> FetchPlan {
        let parts = ordinals.iter().map(|&ordinal| self.parts[ordinal].0).collect();
        FetchPlan {
            store: "fake:".into(),
            objects: vec![ObjectParts { key: NAME.into(), object: OBJECT, parts }],
            priority: Priority::Query,
            want_bytes: false,
            fresh: false,
            gap: GAP,
        }
    }

    async fn run(&self, plan: FetchPlan, time: Duration) -> (Outcomes, FetchSummary) {
        let priority = Arc::new(SharedPriority::new(plan.priority));
        let remote = Arc::clone(&self.remote);
        let era = self.fetcher.cache().era();
        let job = Job::new(&plan, remote, priority, time, era);
        let outcomes = Mutex::new(Outcomes::new());
        let report = |key: PartKey, outcome| {
            let earlier = outcomes.lock().unwrap().insert(key.index, outcome);
            assert!(earlier.is_none(), "a part was reported twice");
        };
        let summary = self.fetcher.fetch(&plan, &job, &report).await;
        (outcomes.into_inner().unwrap(), summary)
    }

    async fn fetch(&self, ordinals: &[usize]) -> (Outcomes, FetchSummary) {
        self.run(self.plan(ordinals), LONG).await
    }

    /// Two fetches of the first part at a closed gate, the second of which has joined the first's request.
    async fn two_on_one_request(self: &Arc<Self>) -> (Fetching, Fetching) {
        let spawn = || {
            let bench = Arc::clone(self);
            tokio::spawn(async move { bench.fetch(&[0]).await })
        };
        let first = spawn();
        self.eventually(|| self.store.log().len() == 1).await;
        let second = spawn();
        tokio::time::sleep(Duration::from_millis(50)).await;
        (first, second)
    }

    async fn fetch_one(&self, ordinal: usize) -> PartOutcome {
        let (mut outcomes, _) = self.fetch(&[ordinal]).await;
        outcomes.remove(&self.parts[ordinal].0.index).unwrap()
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.fetcher.cache().counters().unwrap().get(counter)
    }

    async fn eventually(&self, condition: impl Fn() -> bool) {
        for _ in 0..2000 {
            if condition() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("it never happened; log: {:?}", self.store.log());
    }
}

fn kind(outcome: &PartOutcome) -> Option<FailureKind> {
    match outcome {
        PartOutcome::Failed(failure) => Some(failure.kind),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn near_parts_come_in_one_request_and_stay() {
    let bench = bench();
    let (outcomes, summary) = bench.fetch(&[0, 1, 4, 30]).await;
    assert_eq!(outcomes.len(), 4);
    assert!(outcomes.values().all(|outcome| *outcome == PartOutcome::Published));
    let len = u64::from(bench.parts[0].0.len);
    let first = format!("get {NAME} 0+{}", 5 * len);
    let second = format!("get {NAME} {}+{len}", 30 * len);
    let mut log = bench.store.log();
    log.sort();
    assert_eq!(log, [first, second]);
    assert_eq!((summary.gets, summary.bytes), (2, 6 * len));
    assert_eq!(bench.counter(Counter::Gets), 2);
    assert_eq!(bench.counter(Counter::GetBytes), 6 * len);

    let (outcomes, summary) = bench.fetch(&[0, 1, 4, 30]).await;
    assert_eq!((outcomes.len(), summary.gets), (4, 0));
    assert_eq!(bench.store.log().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_says_which_gaps_are_read_along() {
    let len = bench().parts[0].0.len;
    for (gap, gets, parts) in [(0, 3, 4), (2 * len, 2, 6), (20 * len, 1, 15)] {
        let bench = bench();
        let plan = FetchPlan { gap, ..bench.plan(&[0, 1, 4, 14]) };
        let (outcomes, summary) = bench.run(plan, LONG).await;
        assert_eq!((outcomes.len(), summary.gets), (4, gets));
        assert_eq!(summary.bytes, parts * u64::from(len), "gap {gap}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_who_want_a_part_at_once_cause_one_request() {
    let bench = Arc::new(bench());
    bench.store.close_gate();
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let bench = Arc::clone(&bench);
            tokio::spawn(async move { bench.fetch(&[3]).await })
        })
        .collect();
    bench.eventually(|| bench.store.log().len() == 1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    bench.store.open_gate();
    let mut gets = 0;
    for waiting in waiting {
        let (outcomes, summary) = waiting.await.unwrap();
        assert!(outcomes.values().all(|outcome| *outcome == PartOutcome::Published));
        gets += summary.gets;
    }
    assert_eq!((gets, bench.store.log().len()), (1, 1));
    assert_eq!(bench.fetcher.flights(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn transient_errors_are_retried_and_counted() {
    let bench = bench();
    let faults = [ErrorClass::Throttled, ErrorClass::Transient].map(Fault::Fail);
    bench.store.script(faults);
    assert_eq!(bench.fetch_one(0).await, PartOutcome::Published);
    assert_eq!(bench.store.log().len(), 3);
    assert_eq!(bench.counter(Counter::Retries), 2);
    assert_eq!(bench.counter(Counter::Throttles), 1);
    assert_eq!(bench.counter(Counter::Errors), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_retrying_cannot_mend_fails_at_once_and_is_not_remembered() {
    let bench = bench();
    for (class, expected) in [
        (ErrorClass::NotFound, FailureKind::NotFound),
        (ErrorClass::Denied, FailureKind::Denied),
        (ErrorClass::ClockSkew, FailureKind::ClockSkew),
        (ErrorClass::Damaged, FailureKind::Damaged),
        (ErrorClass::Invalid, FailureKind::Invalid),
    ] {
        let before = bench.store.log().len();
        bench.store.script([Fault::Fail(class)]);
        let outcome = bench.fetch_one(0).await;
        assert_eq!(kind(&outcome), Some(expected));
        let PartOutcome::Failed(failure) = outcome else { unreachable!() };
        assert_eq!((failure.object.as_str(), failure.url.as_str()), (NAME, "fake:"));
        assert_eq!(bench.store.log().len(), before + 1, "{class:?}");
    }
    assert_eq!(bench.fetch_one(0).await, PartOutcome::Published);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_is_missing_counts_as_an_error_and_an_object_asked_for_does_not() {
    let bench = bench();
    let priority = Arc::new(SharedPriority::new(Priority::Query));
    let deadline = Deadline::after(LONG);
    let failure = bench.remote.get("store-id", 99, &priority, deadline).await.unwrap_err();
    assert_eq!((failure.kind, failure.code.as_str()), (FailureKind::NotFound, "NoSuchKey"));
    assert_eq!((failure.object.as_str(), failure.url.as_str()), ("store-id", "fake:"));
    assert_eq!((bench.counter(Counter::Gets), bench.counter(Counter::Errors)), (1, 0));
    let mut plan = bench.plan(&[0]);
    plan.objects[0].key = "ab/missing.seg".into();
    let (outcomes, _) = bench.run(plan, LONG).await;
    assert!(outcomes.values().all(|outcome| kind(outcome) == Some(FailureKind::NotFound)));
    assert_eq!((bench.counter(Counter::Gets), bench.counter(Counter::Errors)), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_are_read_again_once() {
    let bench = bench();
    bench.store.script([Fault::Fail(ErrorClass::Credentials)]);
    assert_eq!(bench.fetch_one(0).await, PartOutcome::Published);
    assert_eq!(bench.store.refreshes(), 1);
    bench.store.script([ErrorClass::Credentials; 2].map(Fault::Fail));
    assert_eq!(kind(&bench.fetch_one(1).await), Some(FailureKind::Credentials));
    assert_eq!(bench.store.refreshes(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_request_is_given_up_for_another() {
    let bench = bench();
    bench.store.script([Fault::Hang]);
    let (outcomes, _) = bench.run(bench.plan(&[0]), Duration::from_secs(3)).await;
    assert!(outcomes.values().all(|outcome| *outcome == PartOutcome::Published));
    assert_eq!(bench.store.log().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_stays_down_is_an_error_within_the_time_allowed() {
    let bench = bench();
    bench.store.script(vec![Fault::Fail(ErrorClass::Transient); 1000]);
    let started = Instant::now();
    let (outcomes, _) = bench.run(bench.plan(&[0]), Duration::from_millis(700)).await;
    assert!(started.elapsed() < Duration::from_secs(10));
    let outcome = outcomes.into_values().next().unwrap();
    assert_eq!(kind(&outcome), Some(FailureKind::Unreachable));
    let PartOutcome::Failed(failure) = outcome else { unreachable!() };
    assert!(failure.detail.contains("attempts in"), "{}", failure.detail);
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_bytes_are_read_once_more() {
    let bench = bench();
    bench.store.script([Fault::Flip]);
    assert_eq!(bench.fetch_one(0).await, PartOutcome::Published);
    assert_eq!(bench.store.log().len(), 2);
    bench.store.script([Fault::Flip, Fault::Flip]);
    let outcome = bench.fetch_one(1).await;
    assert_eq!(kind(&outcome), Some(FailureKind::Damaged));
    let key = PartKey { object: OBJECT, index: bench.parts[1].0.index };
    assert_eq!(bench.fetcher.cache().present(&[key]), [false]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_damaged_part_does_not_harm_its_neighbours() {
    let bench = bench();
    // The flipped byte lies in the middle of three parts; it stays flipped for that part.
    bench.store.script([Fault::Flip, Fault::Flip]);
    let (outcomes, _) = bench.fetch(&[0, 1, 2]).await;
    let failed: Vec<u32> = outcomes
        .iter()
        .filter(|(_, outcome)| kind(outcome) == Some(FailureKind::Damaged))
        .map(|(index, _)| *index)
        .collect();
    assert_eq!(failed, [bench.parts[1].0.index]);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_are_handed_over_when_asked_for() {
    let bench = bench();
    for _ in 0..2 {
        let plan = FetchPlan { want_bytes: true, ..bench.plan(&[5]) };
        let (mut outcomes, _) = bench.run(plan, LONG).await;
        let (range, bytes) = &bench.parts[5];
        let outcome = outcomes.remove(&range.index);
        assert_eq!(outcome, Some(PartOutcome::Bytes(bytes.to_vec())));
    }
    assert_eq!(bench.store.log().len(), 1, "the second time they come from the cache");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_maintenance_reads_takes_no_place_in_the_cache() {
    let bench = bench();
    assert_eq!(bench.fetch_one(0).await, PartOutcome::Published);
    for gets in [1, 2] {
        let plan = FetchPlan { want_bytes: true, priority: Priority::Build, ..bench.plan(&[0, 5]) };
        let (outcomes, _) = bench.run(plan, LONG).await;
        for ordinal in [0, 5] {
            let (range, bytes) = &bench.parts[ordinal];
            assert_eq!(outcomes[&range.index], PartOutcome::Bytes(bytes.to_vec()));
        }
        assert_eq!(bench.store.log().len(), 1 + gets, "one part is in the cache, the other never");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_that_joins_the_request_of_maintenance_gets_the_bytes() {
    let bench = Arc::new(bench());
    bench.store.close_gate();
    let begin = |plan: FetchPlan| {
        let bench = Arc::clone(&bench);
        tokio::spawn(async move { bench.run(plan, LONG).await })
    };
    let maintenance =
        begin(FetchPlan { want_bytes: true, priority: Priority::Build, ..bench.plan(&[5]) });
    bench.eventually(|| bench.store.log().len() == 1).await;
    let search = begin(bench.plan(&[5]));
    bench.eventually(|| bench.fetcher.flights.passengers() == 2).await;
    bench.store.open_gate();
    for task in [maintenance, search] {
        let (outcomes, _) = task.await.unwrap();
        let (range, bytes) = &bench.parts[5];
        assert_eq!(outcomes[&range.index], PartOutcome::Bytes(bytes.to_vec()));
    }
    assert_eq!(bench.store.log().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_distrusted_part_is_read_from_the_store_again() {
    let bench = bench();
    assert_eq!(bench.fetch_one(0).await, PartOutcome::Published);
    let plan = FetchPlan { fresh: true, ..bench.plan(&[0]) };
    let (outcomes, summary) = bench.run(plan, LONG).await;
    assert_eq!((outcomes.len(), summary.gets), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_nobody_waits_for_is_given_up() {
    let bench = Arc::new(bench());
    bench.store.close_gate();
    let task = tokio::spawn({
        let bench = Arc::clone(&bench);
        async move { bench.fetch(&[0, 1]).await }
    });
    bench.eventually(|| bench.store.log().len() == 1).await;
    task.abort();
    bench.eventually(|| bench.fetcher.flights() == 0).await;
    bench.store.open_gate();
    assert_eq!(bench.fetch_one(0).await, PartOutcome::Published);
    assert_eq!(bench.store.log().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_still_waits_keeps_the_request_of_one_who_left() {
    let bench = Arc::new(bench());
    bench.store.close_gate();
    let (first, second) = bench.two_on_one_request().await;
    first.abort();
    tokio::time::sleep(Duration::from_millis(50)).await;
    bench.store.open_gate();
    let (outcomes, _) = second.await.unwrap();
    assert!(outcomes.values().all(|outcome| *outcome == PartOutcome::Published));
    assert_eq!(bench.store.log().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_with_more_time_goes_on_where_the_first_gave_up() {
    let bench = Arc::new(bench());
    bench.store.script([Fault::Hang]);
    let spawn = |time| {
        let bench = Arc::clone(&bench);
        tokio::spawn(async move { bench.run(bench.plan(&[0]), time).await })
    };
    let hasty = spawn(Duration::from_millis(150));
    bench.eventually(|| bench.store.log().len() == 1).await;
    let patient = spawn(LONG);
    let (outcomes, _) = hasty.await.unwrap();
    assert!(outcomes.values().all(|o| kind(o) == Some(FailureKind::Unreachable)));
    let (outcomes, _) = patient.await.unwrap();
    assert!(outcomes.values().all(|outcome| *outcome == PartOutcome::Published));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_joined_a_request_for_damaged_bytes_reads_them_for_itself() {
    let bench = Arc::new(bench());
    bench.store.script([Fault::Flip, Fault::Flip]);
    bench.store.close_gate();
    let (first, second) = bench.two_on_one_request().await;
    bench.store.open_gate();
    let (outcomes, _) = first.await.unwrap();
    assert!(outcomes.values().all(|o| kind(o) == Some(FailureKind::Damaged)));
    let (outcomes, _) = second.await.unwrap();
    assert!(outcomes.values().all(|outcome| *outcome == PartOutcome::Published));
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_that_cannot_be_parts_are_refused() {
    let bench = bench();
    let mut plan = bench.plan(&[0]);
    let odd = |index, len, offset| PartRange { index, len, offset };
    plan.objects[0].parts.extend([odd(1, 0, 0), odd(2, u32::MAX, 0), odd(3, 64, u64::MAX)]);
    let (outcomes, _) = bench.run(plan, LONG).await;
    for index in 1..4 {
        assert_eq!(kind(&outcomes[&index]), Some(FailureKind::Invalid));
    }
    assert_eq!(outcomes[&bench.parts[0].0.index], PartOutcome::Published);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prewarm_brings_everything_and_reports_trouble() {
    let bench = bench();
    let all: Vec<_> = (0..40).collect();
    let plan = FetchPlan { priority: Priority::Prefetch, ..bench.plan(&all) };
    let priority = Arc::new(SharedPriority::new(Priority::Prefetch));
    let remote = Arc::clone(&bench.remote);
    let job = |cache: &RegionCache| {
        let (remote, priority) = (Arc::clone(&remote), Arc::clone(&priority));
        Job::new(&plan, remote, priority, LONG, cache.era())
    };
    let cache = bench.fetcher.cache();
    let summary = bench.fetcher.prewarm(&plan, &job(cache)).await.unwrap();
    assert_eq!(summary.gets, 1);
    let (_, summary) = bench.fetch(&all).await;
    assert_eq!(summary.gets, 0);
    cache.clear();
    bench.store.script([Fault::Fail(ErrorClass::Denied)]);
    let failure = bench.fetcher.prewarm(&plan, &job(cache)).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Denied);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_reads_the_store_and_leaves_the_cache_as_it_is() {
    let bench = bench();
    let all: Vec<_> = (0..40).collect();
    let plan = FetchPlan { priority: Priority::Build, fresh: true, ..bench.plan(&all) };
    let priority = Arc::new(SharedPriority::new(Priority::Build));
    let cache = bench.fetcher.cache();
    let job =
        || Job::new(&plan, Arc::clone(&bench.remote), Arc::clone(&priority), LONG, cache.era());
    let key_of = |(range, _): &(PartRange, Bytes)| PartKey { object: OBJECT, index: range.index };
    let keys: Vec<PartKey> = bench.parts.iter().map(key_of).collect();
    assert_eq!(check(&plan, &job()).await.unwrap().gets, 1);
    assert!(cache.present(&keys).iter().all(|there| !there), "nothing is kept");
    bench.fetch(&all).await;
    let there = cache.present(&keys);
    assert!(there.iter().all(|there| *there));
    assert_eq!(check(&plan, &job()).await.unwrap().gets, 1, "what the cache has is read again");
    assert_eq!(cache.present(&keys), there);
    bench.store.script([Fault::Fail(ErrorClass::Denied)]);
    assert_eq!(check(&plan, &job()).await.unwrap_err().kind, FailureKind::Denied);
    bench.store.script([Fault::Flip, Fault::Flip]);
    assert_eq!(check(&plan, &job()).await.unwrap_err().kind, FailureKind::Damaged);
}

#[test]
fn a_prewarm_asks_for_a_number_of_bytes_at_a_time() {
    for (len, count) in [(8 << 10, 5_000), (256 << 10, 500), (32 << 20, 3)] {
        let parts: Vec<PartRange> =
            (0..count).map(|index| PartRange { index, len, offset: 0 }).collect();
        let steps: Vec<&[PartRange]> = steps(&parts).collect();
        assert_eq!(steps.concat(), parts);
        let of_step = (PREWARM_STEP as usize).div_ceil(len as usize);
        let (last, full) = steps.split_last().unwrap();
        assert!(full.iter().all(|step| step.len() == of_step) && last.len() <= of_step);
    }
}

mod writes {
    use super::*;
    use crate::object_store::Source;

    fn urgent() -> Arc<SharedPriority> {
        Arc::new(SharedPriority::new(Priority::Build))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_upload_whose_answer_was_lost_is_not_repeated() {
        let bench = bench();
        bench.store.script([Fault::FailAfter(ErrorClass::Transient)]);
        let source = Source::Bytes("content".into());
        let deadline = Deadline::after(LONG);
        bench.remote.put("ab/new", source, &urgent(), deadline).await.unwrap();
        assert_eq!((bench.store.count("put"), bench.store.count("len")), (1, 1));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_upload_that_failed_is_repeated() {
        let bench = bench();
        bench.store.script([Fault::Fail(ErrorClass::Transient)]);
        let source = Source::Bytes("content".into());
        let deadline = Deadline::after(LONG);
        bench.remote.put("ab/new", source, &urgent(), deadline).await.unwrap();
        assert_eq!(bench.store.count("put"), 2);
        assert_eq!(bench.store.object("ab/new").unwrap(), "content");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_conditional_put_knows_its_own_object_again() {
        let bench = bench();
        let deadline = Deadline::after(LONG);
        bench.store.script([Fault::FailAfter(ErrorClass::Transient)]);
        let put = |bytes: &'static str| {
            bench.remote.put_if_absent("owner/x", bytes.into(), &PRIORITY, deadline)
        };
        put("mine").await.unwrap();
        assert_eq!(bench.store.count("create"), 2);
        put("mine").await.unwrap();
        for other in ["yours", "mine and more", "m"] {
            assert_eq!(put(other).await.unwrap_err().kind, FailureKind::Exists);
        }
        assert_eq!(bench.store.object("owner/x").unwrap(), "mine");
    }

    static PRIORITY: std::sync::LazyLock<Arc<SharedPriority>> = std::sync::LazyLock::new(urgent);

    #[tokio::test(flavor = "multi_thread")]
    async fn keys_outside_the_store_are_refused_before_anything_is_sent() {
        let bench = bench();
        let deadline = Deadline::after(LONG);
        let failure = bench.remote.delete("../x", &urgent(), deadline).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::Invalid);
        assert!(bench.store.log().is_empty());
    }
}
