//! Clearing the cache while requests are under way, over the socket and a store that waits as told.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use polign_engine::{
    gets::GAP,
    protocol::{
        Client, ClientOptions, FailureKind, FetchPlan, ObjectParts, PartOutcome, PartRange,
        PollWaiter, Priority, Put, Reply, Request,
    },
    segment::{PartKey, PartKind, part},
    store_url::UrlError,
};
use tokio::task::{JoinHandle, spawn_blocking};

use super::*;
use crate::object_store::{
    ErrorClass, ObjectStore, S3Settings,
    fake::{FakeStore, Fault},
};

const OBJECT: ObjectId = ObjectId([7; 16]);
const NAME: &str = "ab/object.seg";
const UPLOAD: &str = "object.seg";

struct Opened(Arc<FakeStore>);

impl OpenStore for Opened {
    fn open<'a>(
        &'a self,
        _url: &'a str,
        _s3: &'a S3Settings,
    ) -> BoxFuture<'a, Result<Arc<dyn ObjectStore>, UrlError>> {
        Box::pin(async { Ok(Arc::clone(&self.0) as _) })
    }
}

/// A service whose store holds an object of parts of about 4 KiB, and a cache with room for all.
struct Bench {
    store: Arc<FakeStore>,
    cache: Arc<RegionCache>,
    object: Vec<u8>,
    parts: Vec<(PartRange, Vec<u8>)>,
    dir: tempfile::TempDir,
    _running: AbortOnDrop,
}

fn bench(parts: u32) -> Bench {
    bench_of(parts, 4_000)
}

/// The same with parts of so many bytes.
fn bench_of(parts: u32, len: usize) -> Bench {
    let mut object = Vec::new();
    let parts = (0..parts).map(|ordinal| {
        let key = PartKey::new(OBJECT, PartKind::Plane2, ordinal);
        let offset = object.len();
        part::frame(key, &ordinal.to_le_bytes().repeat(len / 4), &mut object);
        let len = (object.len() - offset) as u32;
        let range = PartRange { index: key.index, len, offset: offset as u64 };
        (range, object[offset..].to_vec())
    });
    let parts = parts.collect();
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(FakeStore::default());
    store.insert(NAME, object.clone());
    let line = r#"{"cache_dir":"to be set","cache_size_bytes":33554432,"fetch_timeout_ms":6000}"#;
    let config = Config { cache_dir: dir.path().into(), ..Config::parse(line).unwrap() };
    let open_store = Box::new(Opened(Arc::clone(&store)));
    let sweep_uploads = Duration::from_millis(20);
    let parts_of_service = Parts { open_store, sweep_uploads, ..Parts::default() };
    let service = Service::start(config, parts_of_service).unwrap();
    let cache = Arc::clone(service.shared.cache());
    let running = AbortOnDrop(tokio::spawn(service.run()));
    Bench { store, cache, object, parts, dir, _running: running }
}

impl Bench {
    fn plan(&self, priority: Priority) -> FetchPlan {
        let parts = self.parts.iter().map(|(range, _)| *range).collect();
        FetchPlan {
            store: "fake:".into(),
            objects: vec![ObjectParts { key: NAME.into(), object: OBJECT, parts }],
            priority,
            want_bytes: false,
            fresh: false,
            gap: GAP,
        }
    }

    fn fetch(&self) -> Request {
        Request::Fetch(self.plan(Priority::Query))
    }

    fn prewarm(&self) -> Request {
        Request::Prewarm(self.plan(Priority::Prefetch))
    }

    /// Writes the object where backends write segments, and asks for its upload.
    fn put(&self) -> Request {
        std::fs::write(self.upload(), &self.object).unwrap();
        Request::Put(Put {
            store: "fake:".into(),
            key: NAME.into(),
            object: OBJECT,
            file: UPLOAD.into(),
            ingest: true,
            priority: Priority::Build,
        })
    }

    /// Sends requests on a connection of their own; their replies, each with its request's place.
    fn ask(&self, requests: Vec<Request>) -> JoinHandle<Vec<(usize, Reply)>> {
        let directory = self.dir.path().to_path_buf();
        spawn_blocking(move || replies(&directory, requests))
    }

    async fn ask_one(&self, request: Request) -> Vec<Reply> {
        without_places(self.ask(vec![request]).await.unwrap())
    }

    fn upload(&self) -> std::path::PathBuf {
        self.dir.path().join("upload").join(UPLOAD)
    }

    async fn clear(&self) {
        assert_eq!(self.ask_one(Request::ClearCache).await, [Reply::Done]);
    }

    fn kept(&self) -> usize {
        let key = |(range, _): &(PartRange, _)| PartKey { object: OBJECT, index: range.index };
        let keys: Vec<PartKey> = self.parts.iter().map(key).collect();
        self.cache.present(&keys).into_iter().filter(|there| *there).count()
    }

    /// Whether the replies are those to a fetch of all parts, each with the part's bytes.
    fn are_bytes(&self, replies: &[Reply]) -> bool {
        let [parts @ .., Reply::FetchDone(_)] = replies else { return false };
        let is_here = |(range, bytes): &(PartRange, Vec<u8>)| {
            let outcome = PartOutcome::Bytes(bytes.clone());
            parts.contains(&Reply::Part { object: OBJECT, index: range.index, outcome })
        };
        parts.len() == self.parts.len() && self.parts.iter().all(is_here)
    }

    fn are_published(&self, replies: &[Reply]) -> bool {
        let [parts @ .., Reply::FetchDone(_)] = replies else { return false };
        let is_published =
            |reply| matches!(reply, &Reply::Part { outcome: PartOutcome::Published, .. });
        parts.len() == self.parts.len() && parts.iter().all(is_published)
    }

    async fn eventually(&self, condition: impl Fn() -> bool) {
        for _ in 0..20_000 {
            if condition() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("it never happened; log: {:?}", self.store.log());
    }
}

fn replies(cache: &Path, requests: Vec<Request>) -> Vec<(usize, Reply)> {
    let until = Instant::now() + Duration::from_secs(30);
    let mut client = Client::new(cache, ClientOptions::default());
    let mut ids: Vec<_> = requests.into_iter().map(|r| Some(client.begin(r).unwrap())).collect();
    let mut replies = Vec::new();
    loop {
        for (place, slot) in ids.iter_mut().enumerate() {
            while let Some(reply) = slot.and_then(|id| client.take(id)) {
                if reply.is_last() {
                    *slot = None;
                }
                replies.push((place, reply));
            }
        }
        if ids.iter().all(Option::is_none) {
            return replies;
        }
        client.wait(&mut PollWaiter, until).unwrap();
        client.pump().unwrap();
    }
}

fn without_places(replies: Vec<(usize, Reply)>) -> Vec<Reply> {
    replies.into_iter().map(|(_, reply)| reply).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_from_before_a_clear_is_answered_and_not_kept() {
    let bench = bench(40);
    bench.store.close_gate();
    let fetch = bench.ask(vec![bench.fetch()]);
    bench.eventually(|| bench.store.count("get") == 1).await;
    bench.clear().await;
    bench.store.open_gate();
    let replies = without_places(fetch.await.unwrap());
    assert!(bench.are_bytes(&replies), "{replies:?}");
    assert_eq!(bench.kept(), 0);
    let replies = bench.ask_one(bench.fetch()).await;
    assert!(bench.are_published(&replies), "{replies:?}");
    assert_eq!((bench.kept(), bench.store.count("get")), (40, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_after_a_clear_does_not_share_a_request_from_before_it() {
    let bench = bench(40);
    bench.store.close_gate();
    let before = bench.ask(vec![bench.fetch()]);
    bench.eventually(|| bench.store.count("get") == 1).await;
    bench.clear().await;
    let after = bench.ask(vec![bench.fetch()]);
    bench.eventually(|| bench.store.count("get") == 2).await;
    bench.store.open_gate();
    let (before, after) = (before.await.unwrap(), after.await.unwrap());
    assert!(bench.are_bytes(&without_places(before)));
    assert!(bench.are_published(&without_places(after)));
    assert_eq!((bench.kept(), bench.store.count("get")), (40, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prewarm_from_before_a_clear_ends_and_says_why() {
    // Two steps of a prewarm, of two requests each. The second is asked for when the first is in the cache.
    let bench = bench_of(200, (128 << 10) - part::HEADER_LEN);
    bench.store.script([Fault::None, Fault::None, Fault::Hang, Fault::Hang]);
    let prewarm = bench.ask(vec![bench.prewarm()]);
    bench.eventually(|| bench.store.count("get") == 4).await;
    assert_eq!(bench.kept(), 128);
    bench.clear().await;
    let replies = without_places(prewarm.await.unwrap());
    assert_eq!(bench.kept(), 0);
    let [Reply::Failed(failure)] = &replies[..] else { panic!("{replies:?}") };
    assert_eq!(failure.kind, FailureKind::Local);
    assert!(failure.message.contains("cleared"), "{failure:?}");

    bench.store.close_gate();
    let sent = bench.store.count("get");
    let prewarm = bench.ask(vec![bench.prewarm()]);
    bench.eventually(|| bench.store.count("get") == sent + 2).await;
    bench.clear().await;
    bench.store.open_gate();
    assert!(matches!(&prewarm.await.unwrap()[..], [(0, Reply::Failed(_))]));
    assert_eq!((bench.kept(), bench.store.count("get")), (0, sent + 2), "it goes no further");

    assert!(matches!(&bench.ask_one(bench.prewarm()).await[..], [Reply::FetchDone(_)]));
    assert_eq!(bench.kept(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_from_before_a_clear_is_stored_and_not_kept() {
    let bench = bench(200);
    bench.store.close_gate();
    let put = bench.ask(vec![bench.put()]);
    bench.eventually(|| bench.store.count("put") == 1).await;
    bench.clear().await;
    bench.store.open_gate();
    assert_eq!(without_places(put.await.unwrap()), [Reply::Done]);
    assert_eq!(bench.kept(), 0);
    assert_eq!(bench.store.object(NAME).unwrap(), bench.object);
    assert!(!bench.dir.path().join("upload").join(UPLOAD).exists());
    assert_eq!(bench.ask_one(bench.put()).await, [Reply::Done]);
    assert_eq!(bench.kept(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clear_in_the_middle_of_an_ingest_ends_it() {
    let bench = bench(5000);
    let first = PartKey { object: OBJECT, index: bench.parts[0].0.index };
    let put = bench.ask(vec![bench.put()]);
    bench.eventually(|| bench.cache.present(&[first])[0]).await;
    bench.cache.clear();
    assert_eq!(without_places(put.await.unwrap()), [Reply::Done]);
    assert_eq!(bench.kept(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_one_connection_come_before_the_clear_that_follows_them() {
    for _ in 0..20 {
        let bench = bench(20);
        let requests = vec![bench.fetch(), bench.prewarm(), bench.put(), Request::ClearCache];
        let replies = bench.ask(requests).await.unwrap();
        assert!(replies.contains(&(3, Reply::Done)), "{replies:?}");
        assert_eq!(bench.kept(), 0);
    }
}

/// The backend removes it, when it knows that it will not ask again.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_upload_leaves_its_file_to_be_offered_again() {
    for class in [ErrorClass::Denied, ErrorClass::Invalid, ErrorClass::Credentials] {
        let bench = bench(20);
        // Wrong credentials are tried once more.
        let attempts = if class == ErrorClass::Credentials { 2 } else { 1 };
        bench.store.script(std::iter::repeat_n(Fault::Fail(class), attempts));
        let put = bench.put();
        let replies = bench.ask_one(put.clone()).await;
        assert!(matches!(replies[..], [Reply::Failed(_)]), "{replies:?}");
        assert!(bench.upload().exists());
        assert_eq!(bench.ask_one(put).await, [Reply::Done]);
        assert!(!bench.upload().exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_upload_files_are_removed_while_the_process_runs_and_young_ones_kept() {
    let bench = bench(1);
    let day = Duration::from_secs(24 * 3600);
    let make = |name: &str, age: Duration| {
        let path = bench.upload().with_file_name(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_modified(std::time::SystemTime::now() - age).unwrap();
        path
    };
    let young = make("young.seg", day - Duration::from_secs(600));
    let old = make("old.seg", day + Duration::from_secs(600));
    bench.eventually(|| !old.exists()).await;
    assert!(young.exists());
}
