//! The program as backends see it: over its socket and through the mapped cache.

mod common;

use std::{
    cell::RefCell,
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream,
    },
    path::Path,
    rc::Rc,
    thread,
    time::{Duration, Instant},
};

use common::*;
use polign_engine::{
    cache::{CacheLink, CachedSource, Counter},
    protocol::{
        Client, ClientError, FailureKind, FrameBuffer, Hello, HelloAck, Home, PROTOCOL_MAGIC,
        PROTOCOL_VERSION, PartOutcome, PollWaiter, Priority, Reply, Request, encode,
    },
    segment::{PartRef, PartSource, Want},
};
use polign_store::object_store::file_names;

struct Place {
    dir: tempfile::TempDir,
    url: String,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file:{}", dir.path().join("store").display());
    Place { dir, url }
}

impl Place {
    fn cache(&self) -> std::path::PathBuf {
        self.dir.path().join("cache")
    }

    fn start(&self, bytes: u64) -> Process {
        Process::start(&self.cache(), bytes, "")
    }
}

fn published(outcomes: &[PartOutcome]) -> usize {
    outcomes.iter().filter(|outcome| **outcome == PartOutcome::Published).count()
}

fn failure_kind(error: ClientError) -> FailureKind {
    match error {
        ClientError::Failed(failure) => failure.kind,
        error => panic!("{error}"),
    }
}

#[test]
fn an_uploaded_segment_is_left_warm_and_comes_back_cold() {
    let place = place();
    let process = place.start(64 * MIB);
    let mut client = process.client();
    let object = Object::new(100);
    assert_eq!(call(&mut client, object.put(&process, &place.url, true)).unwrap(), Reply::Done);
    assert_eq!(fs::read_dir(place.cache().join("upload")).unwrap().count(), 0);
    let path = file_names::path_of(&object.name.key());
    let stored = fs::read(place.dir.path().join("store").join(path)).unwrap();
    assert!(stored == object.bytes);

    let map = process.map();
    assert_eq!(object.in_cache(&map), 100);
    assert_eq!(fetch(&mut client, object.plan(&place.url)).1, 0);
    call(&mut client, Request::ClearCache).unwrap();
    assert_eq!(object.in_cache(&map), 0);
    let (outcomes, gets) = fetch(&mut client, object.plan(&place.url));
    assert_eq!((published(&outcomes), gets), (100, 1));
    assert_eq!(object.in_cache(&map), 100);
    assert_eq!(map.counters().get(Counter::Gets), 1);
}

#[test]
fn directory_and_socket_are_private() {
    let place = place();
    let process = place.start(8 * MIB);
    call(&mut process.client(), Request::ClearCache).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&place.cache()), 0o700);
    assert_eq!(mode(&place.cache().join("upload")), 0o700);
    for name in ["sock", "directory", "lock"] {
        assert_eq!(mode(&place.cache().join(name)), 0o600, "{name}");
    }
}

#[test]
fn small_objects_are_written_read_listed_and_deleted() {
    let place = place();
    let process = place.start(8 * MIB);
    let mut client = process.client();
    let (store, priority) = (place.url.clone(), Priority::Build);
    let put = |key: &str, bytes: &str, if_absent| Request::PutBytes {
        store: store.clone(),
        key: key.into(),
        bytes: bytes.into(),
        if_absent,
        priority,
    };
    let get = |key: &str| Request::GetBytes { store: store.clone(), key: key.into(), priority };
    assert_eq!(call(&mut client, put("owner/a", "one", true)).unwrap(), Reply::Done);
    assert_eq!(call(&mut client, put("owner/a", "one", true)).unwrap(), Reply::Done);
    let other = call(&mut client, put("owner/a", "two", true)).unwrap_err();
    assert_eq!(failure_kind(other), FailureKind::Exists);
    assert_eq!(call(&mut client, get("owner/a")).unwrap(), Reply::Bytes(b"one".into()));
    call(&mut client, put("owner/a", "two", false)).unwrap();
    call(&mut client, put("owner/b", "b", false)).unwrap();
    assert_eq!(call(&mut client, get("owner/a")).unwrap(), Reply::Bytes(b"two".into()));
    let list =
        |limit| Request::List { store: store.clone(), prefix: "owner/".into(), after: None, limit };
    let Reply::Listed { objects, more, .. } = call(&mut client, list(1)).unwrap() else { panic!() };
    assert_eq!((objects.len(), objects[0].key.as_str(), more), (1, "owner/a", true));
    let keys = vec!["owner/a".into(), "owner/b".into(), "owner/never".into()];
    call(&mut client, Request::Delete { store: store.clone(), keys }).unwrap();
    let missing = call(&mut client, get("owner/a")).unwrap_err();
    assert_eq!(failure_kind(missing), FailureKind::NotFound);
    let Reply::Listed { objects, .. } = call(&mut client, list(9)).unwrap() else { panic!() };
    assert!(objects.is_empty());
}

#[test]
fn wrong_urls_keys_and_files_are_refused() {
    let place = place();
    let process = place.start(8 * MIB);
    let mut client = process.client();
    let priority = Priority::Query;
    let get = |store: &str, key: &str| Request::GetBytes {
        store: store.into(),
        key: key.into(),
        priority,
    };
    for (store, key) in [
        ("http://x", "a"),
        ("", "a"),
        (place.url.as_str(), "../a"),
        (place.url.as_str(), "/etc/passwd"),
    ] {
        let error = call(&mut client, get(store, key)).unwrap_err();
        assert_eq!(failure_kind(error), FailureKind::Invalid, "{store} {key}");
    }
    let object = Object::new(1);
    let Request::Put(put) = object.put(&process, &place.url, false) else { panic!() };
    for (file, kind) in [
        ("../sock", FailureKind::Invalid),
        ("", FailureKind::Invalid),
        (".hidden", FailureKind::Invalid),
        ("absent", FailureKind::Local),
    ] {
        let put = polign_engine::protocol::Put { file: file.into(), ..put.clone() };
        let error = call(&mut client, Request::Put(put)).unwrap_err();
        assert_eq!(failure_kind(error), kind, "{file}");
    }
}

#[test]
fn a_killed_process_costs_a_retry() {
    let place = place();
    let process = place.start(64 * MIB);
    let mut client = process.client();
    let object = Object::new(200);
    call(&mut client, object.put(&process, &place.url, false)).unwrap();
    let id = client.begin(Request::Fetch(object.plan(&place.url))).unwrap();
    process.kill();
    let process = place.start(64 * MIB);
    let (until, mut seen) = (soon(), std::collections::HashSet::new());
    'done: loop {
        while let Some(reply) = client.take(id) {
            match reply {
                Reply::Part { index, outcome: PartOutcome::Published, .. } => {
                    seen.insert(index);
                }
                Reply::FetchDone(_) => break 'done,
                reply => panic!("{reply:?}"),
            }
        }
        client.wait(&mut PollWaiter, until).unwrap();
        client.pump().unwrap();
    }
    assert_eq!(seen.len(), 200);
    assert_eq!(object.in_cache(&process.map()), 200);
    // An upload that had finished before its process died is a success when it is asked for again.
    let again = object.put(&process, &place.url, false);
    fs::remove_dir_all(place.cache().join("upload")).unwrap();
    assert_eq!(call(&mut client, again).unwrap(), Reply::Done);
}

#[test]
fn a_restart_is_warm_and_a_flipped_byte_is_fetched_again() {
    let place = place();
    let process = place.start(64 * MIB);
    let object = Object::new(50);
    call(&mut process.client(), object.put(&process, &place.url, true)).unwrap();
    process.kill();
    let slab = place.cache().join("slab.0");
    let mut bytes = vec![0; object.bytes.len()];
    let file = fs::OpenOptions::new().read(true).write(true).open(slab).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
    let at = 7 * object.parts[0].len as usize + 500;
    std::os::unix::fs::FileExt::write_all_at(&file, &[bytes[at] ^ 1], at as u64).unwrap();

    let process = place.start(64 * MIB);
    let mut client = process.client();
    let (outcomes, gets) = fetch(&mut client, object.plan(&place.url));
    assert_eq!((published(&outcomes), gets), (50, 1));
    assert_eq!(process.counter(Counter::GetBytes), u64::from(object.parts[7].len));
    assert_eq!(object.in_cache(&process.map()), 50);
}

#[test]
fn a_wiped_directory_is_made_again_under_load() {
    let place = place();
    let process = place.start(64 * MIB);
    let object = Object::new(20);
    let mut client = process.client();
    call(&mut client, object.put(&process, &place.url, true)).unwrap();
    let old = process.map();
    fs::remove_dir_all(place.cache()).unwrap();
    eventually("the old directory is retired", || {
        // The connection made before stays good all the time.
        assert_eq!(fetch(&mut client, object.plan(&place.url)).0.len(), 20);
        old.is_retired()
    });
    eventually("the socket is back", || place.cache().join("sock").exists());
    let (outcomes, _) = fetch(&mut process.client(), object.plan(&place.url));
    assert_eq!(published(&outcomes), 20);
    assert_eq!(object.in_cache(&process.map()), 20);
}

#[test]
fn the_cache_size_follows_the_configuration() {
    let place = place();
    let mut process = place.start(64 * MIB);
    let object = Object::new(400);
    let mut client = process.client();
    call(&mut client, object.put(&process, &place.url, true)).unwrap();
    assert_eq!(object.in_cache(&process.map()), 400);
    process.reconfigure(5 * MIB, "");
    eventually("the cache shrinks", || process.counter(Counter::LimitBytes) == 5 * MIB);
    let blocks = fs::metadata(place.cache().join("slab.0")).unwrap().blocks();
    assert!(blocks * 512 <= 5 * MIB, "{} bytes", blocks * 512);
    assert!(object.in_cache(&process.map()) < 200);
    process.reconfigure(200 * MIB, "");
    eventually("the cache grows", || process.counter(Counter::LimitBytes) == 200 * MIB);
    let (outcomes, _) = fetch(&mut client, object.plan(&place.url));
    assert_eq!(published(&outcomes), 400);
    assert_eq!(object.in_cache(&process.map()), 400);
}

#[test]
fn the_end_of_its_input_ends_it_whatever_it_is_doing() {
    let place = place();
    // A server that accepts and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!(r#","s3_endpoint":"http://{}""#, silent.local_addr().unwrap());
    let keys = place.dir.path().join("keys");
    fs::write(&keys, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n").unwrap();
    let more = format!(r#"{endpoint},"credentials_file":"{}""#, keys.display());
    let mut process = Process::start(&place.cache(), 8 * MIB, &more);
    let object = Object::new(3);
    let mut client = process.client();
    let id = client.begin(Request::Fetch(object.plan("s3://bucket/prefix"))).unwrap();
    silent.set_nonblocking(true).unwrap();
    let mut stalled = None;
    eventually("the fetch is sent", || {
        client.pump().unwrap();
        stalled = stalled.take().or_else(|| silent.accept().ok());
        stalled.is_some()
    });
    assert!(client.take(id).is_none());
    let started = Instant::now();
    process.end_input();
    let status = process.wait(Duration::from_secs(10)).expect("it ends");
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(status.success());
    assert!(!place.cache().join("sock").exists());
}

#[test]
fn an_unreachable_store_is_an_error_that_names_it() {
    let place = place();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let keys = place.dir.path().join("keys");
    fs::write(&keys, "[default]\naws_access_key_id = a\naws_secret_access_key = SECRET\n").unwrap();
    let more = format!(
        r#","s3_endpoint":"http://{closed}","credentials_file":"{}","fetch_timeout_ms":600"#,
        keys.display()
    );
    let process = Process::start(&place.cache(), 8 * MIB, &more);
    let object = Object::new(1);
    let (outcomes, gets) = fetch(&mut process.client(), object.plan("s3://bucket/prefix"));
    let [PartOutcome::Failed(failure)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(failure.kind, FailureKind::Unreachable);
    assert!(gets > 1, "it was tried again");
    assert_eq!(failure.object, object.name.key());
    assert!(failure.url.contains("bucket/prefix") && failure.url.contains(&closed.to_string()));
    assert!(!format!("{failure:?}").contains("SECRET"));

    fs::write(&keys, "").unwrap();
    let process = Process::start(&place.dir.path().join("other"), 8 * MIB, &more);
    let (outcomes, _) = fetch(&mut process.client(), object.plan("s3://bucket/prefix"));
    let [PartOutcome::Failed(failure)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(failure.kind, FailureKind::Credentials, "{failure:?}");
}

#[test]
fn a_second_process_is_refused_and_a_newer_library_gets_its_way() {
    let place = place();
    let mut first = place.start(8 * MIB);
    call(&mut first.client(), Request::ClearCache).unwrap();
    let mut second = place.start(8 * MIB);
    let status = second.wait(Duration::from_secs(20)).expect("it ends");
    assert!(!status.success());
    assert!(second.log().contains("another polign-store"), "the reason is told");
    call(&mut first.client(), Request::ClearCache).unwrap();

    let mut stream = UnixStream::connect(place.cache().join("sock")).unwrap();
    let version = PROTOCOL_VERSION + 1;
    let hello = Hello { magic: PROTOCOL_MAGIC, version, pid: 1, build: "newer".into() };
    let home = Home::of(Path::new(".")).unwrap();
    stream.write_all(&[encode(&hello).unwrap(), encode(&home).unwrap()].concat()).unwrap();
    stream.read_to_end(&mut Vec::new()).unwrap();
    let status = first.wait(Duration::from_secs(20)).expect("it ends");
    assert!(status.success());
}

/// Whatever a client of another cluster asks for: a relative `file:` URL means another directory here.
#[test]
fn another_cluster_at_the_same_cache_directory_is_refused_and_told_whose_it_is() {
    let place = place();
    let process = place.start(8 * MIB);
    let mut ours = process.client();
    call(&mut ours, Request::ClearCache).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut theirs = Client::new(&process.cache, options(elsewhere.path()));
    let object = Object::new(1);
    let (store, key, priority) = (place.url.clone(), "x".to_owned(), Priority::Build);
    let put = object.put(&process, &place.url, true);
    for request in [
        put.clone(),
        Request::Fetch(object.plan(&place.url)),
        Request::Prewarm(object.plan(&place.url)),
        Request::GetBytes { store: store.clone(), key: key.clone(), priority },
        Request::PutBytes {
            store: store.clone(),
            key: key.clone(),
            bytes: vec![1],
            if_absent: false,
            priority,
        },
        Request::Delete { store: store.clone(), keys: vec![key] },
        Request::List { store, prefix: String::new(), after: None, limit: 1 },
        Request::ClearCache,
    ] {
        let told = format!("{request:?}");
        let ClientError::Failed(failure) = call(&mut theirs, request).unwrap_err() else {
            panic!()
        };
        assert_eq!(failure.kind, FailureKind::InUse, "{told}");
        let here = std::env::current_dir().unwrap();
        for path in [place.cache(), here] {
            assert!(failure.message.contains(path.to_str().unwrap()), "{failure:?}");
        }
    }
    assert!(!place.dir.path().join("store").exists(), "nothing was written");
    // The same directory by another path is at home.
    let link = elsewhere.path().join("link");
    std::os::unix::fs::symlink(std::env::current_dir().unwrap(), &link).unwrap();
    let mut same = Client::new(&process.cache, options(&link));
    assert_eq!(call(&mut same, put).unwrap(), Reply::Done);
}

#[test]
fn a_newer_library_of_another_cluster_does_not_end_the_process() {
    let place = place();
    let mut process = place.start(8 * MIB);
    call(&mut process.client(), Request::ClearCache).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let version = PROTOCOL_VERSION + 1;
    let hello = Hello { magic: PROTOCOL_MAGIC, version, pid: 1, build: "newer".into() };
    let home = Home::of(elsewhere.path()).unwrap();
    let mut stream = UnixStream::connect(place.cache().join("sock")).unwrap();
    stream.write_all(&[encode(&hello).unwrap(), encode(&home).unwrap()].concat()).unwrap();
    stream.read_to_end(&mut Vec::new()).unwrap();
    assert!(process.wait(Duration::from_millis(300)).is_none());
    call(&mut process.client(), Request::ClearCache).unwrap();
}

/// Sessions that loaded the library before it was replaced say so to the new program.
#[test]
fn an_older_library_learns_the_version_that_it_cannot_use() {
    let place = place();
    let process = place.start(8 * MIB);
    call(&mut process.client(), Request::ClearCache).unwrap();
    let hello = Hello { magic: PROTOCOL_MAGIC, version: 1, pid: 1, build: "older".into() };
    let mut stream = UnixStream::connect(place.cache().join("sock")).unwrap();
    stream.write_all(&encode(&hello).unwrap()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let mut buffer = FrameBuffer::default();
    buffer.push(&answer);
    let ack: HelloAck = buffer.next_message().unwrap().unwrap();
    assert_eq!(ack.version, PROTOCOL_VERSION);
    call(&mut process.client(), Request::ClearCache).unwrap();
}

#[test]
fn hostile_connections_are_closed_and_harm_nobody() {
    let place = place();
    let process = place.start(8 * MIB);
    let mut client = process.client();
    call(&mut client, Request::ClearCache).unwrap();
    let version = PROTOCOL_VERSION;
    let hello = Hello { magic: PROTOCOL_MAGIC, version, pid: 1, build: "x".into() };
    let alone = encode(&hello).unwrap();
    let hello = [alone.clone(), encode(&Home::of(Path::new(".")).unwrap()).unwrap()].concat();
    let mut hostile: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 64],
        vec![0; 64],
        alone.clone(),
        [&alone[..], &[0xff; 4]].concat(),
        [&alone[..], &alone[..]].concat(),
        [&hello[..], &[0xff; 4]].concat(),
        [&hello[..], &[3, 0, 0, 0, 0xff, 0xff, 0xff]].concat(),
        [&hello[..], &hello[..]].concat(),
        encode(&Hello { magic: 1, version, pid: 1, build: String::new() }).unwrap(),
    ];
    let mut turn = 5u64;
    for _ in 0..200 {
        let noise = (0..1 + turn % 60).map(|_| {
            turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
            (turn >> 33) as u8
        });
        let noise: Vec<u8> = noise.collect();
        let len = (noise.len() as u32).to_le_bytes();
        hostile.push([&hello[..], &len, &noise].concat());
    }
    for bytes in &hostile {
        let mut stream = UnixStream::connect(place.cache().join("sock")).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // A reset is an end as well.
        if let Err(error) = stream.read_to_end(&mut Vec::new()) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
    }
    assert_eq!(call(&mut client, Request::ClearCache).unwrap(), Reply::Done);
    assert_eq!(call(&mut process.client(), Request::ClearCache).unwrap(), Reply::Done);
}

/// A run of parts that is three times the cache.
#[test]
fn a_reader_that_loses_a_run_of_parts_asks_for_the_rest_of_it_at_once() {
    let place = place();
    let process = place.start(4 * MIB);
    let object = Object::new(400);
    call(&mut process.client(), object.put(&process, &place.url, false)).unwrap();
    let link = Rc::new(RefCell::new(CacheLink::new(place.cache(), options(Path::new(".")))));
    let timeout = Duration::from_secs(30);
    let mut source = CachedSource::new(link, place.url.as_str(), timeout, PollWaiter);
    let want = |&part: &PartRef| Want { object: &object.name, part };
    let wants: Vec<Want<'_>> = object.parts.iter().map(want).collect();
    source.request(&wants);
    for (ordinal, &want) in wants.iter().enumerate() {
        loop {
            let view = source.acquire_first(want, &wants[ordinal + 1..]).unwrap();
            let copy = view.bytes().copy_to_vec();
            if source.still_valid(&view) {
                assert!(copy == payload(ordinal as u32), "wrong bytes");
                break;
            }
        }
    }
    let gets = process.counter(Counter::Gets);
    assert!(process.counter(Counter::Evictions) > 100);
    assert!(gets < 12, "{gets} requests for two reads of the run");
}

/// Gaps of two and three parts: more ranges than a query may make GETs.
#[test]
fn a_search_reads_gaps_along_rather_than_make_too_many_requests() {
    let place = place();
    let process = place.start(64 * MIB);
    let object = Object::new(120);
    call(&mut process.client(), object.put(&process, &place.url, false)).unwrap();
    let link = Rc::new(RefCell::new(CacheLink::new(place.cache(), options(Path::new(".")))));
    let timeout = Duration::from_secs(30);
    let mut source = CachedSource::new(link, place.url.as_str(), timeout, PollWaiter);
    let gets = |process: &Process| process.counter(Counter::Gets);
    let first: Vec<usize> = (0..8).map(|nth| nth * 3).collect();
    let second: Vec<usize> = (0..12).map(|nth| 30 + nth * 3 + nth / 2).collect();
    let third: Vec<usize> = (0..12).map(|nth| 80 + nth * 3 + nth / 3).collect();
    for (ordinals, expected) in [(first, 8), (second, 12), (third, 4)] {
        let before = gets(&process);
        let want = |&at: &usize| Want { object: &object.name, part: object.parts[at] };
        let wants: Vec<Want<'_>> = ordinals.iter().map(want).collect();
        source.request(&wants);
        for want in &wants {
            source.acquire(*want).unwrap();
        }
        assert_eq!(gets(&process) - before, expected, "{ordinals:?}");
    }
}

/// Reads parts as searches do, in a cache that holds a fifth of them, with several readers.
#[test]
fn readers_of_a_thrashing_cache_get_the_right_bytes() {
    let place = place();
    let process = place.start(4 * MIB);
    let object = Object::new(700);
    call(&mut process.client(), object.put(&process, &place.url, false)).unwrap();
    let reader = |seed: u32| {
        let options = options(Path::new("."));
        let link = Rc::new(RefCell::new(CacheLink::new(place.cache(), options)));
        let timeout = Duration::from_secs(30);
        let mut source = CachedSource::new(link, place.url.as_str(), timeout, PollWaiter);
        let mut turn = seed;
        for _ in 0..60 {
            let ordinals: Vec<usize> = (0..8)
                .map(|_| {
                    turn = turn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (turn >> 8) as usize % object.parts.len()
                })
                .collect();
            let want = |&at: &usize| Want { object: &object.name, part: object.parts[at] };
            let wants: Vec<Want<'_>> = ordinals.iter().map(want).collect();
            source.request(&wants);
            for (ordinal, want) in ordinals.iter().zip(&wants) {
                loop {
                    let view = source.acquire(*want).unwrap();
                    let copy = view.bytes().copy_to_vec();
                    if source.still_valid(&view) {
                        assert!(copy == payload(*ordinal as u32), "wrong bytes");
                        break;
                    }
                }
            }
        }
        source.stats()
    };
    let stats: Vec<_> = thread::scope(|scope| {
        let readers: Vec<_> = (1..4).map(|seed| scope.spawn(move || reader(seed))).collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert!(stats.iter().map(|stats| stats.gets).sum::<u64>() > 100, "{stats:?}");
    assert!(process.counter(Counter::Evictions) > 100);
}

/// The store process dies again and again while parts are read.
#[test]
fn readers_survive_kills() {
    let place = place();
    let mut process = place.start(4 * MIB);
    let object = Object::new(300);
    call(&mut process.client(), object.put(&process, &place.url, false)).unwrap();
    let options = options(Path::new("."));
    let link = Rc::new(RefCell::new(CacheLink::new(place.cache(), options)));
    let timeout = Duration::from_secs(30);
    for round in 0..6usize {
        let link = Rc::clone(&link);
        let mut source = CachedSource::new(link, place.url.as_str(), timeout, PollWaiter);
        let want = |at: usize| Want { object: &object.name, part: object.parts[at] };
        let wants: Vec<Want<'_>> = (0..40).map(|at| want((at * 7 + round * 41) % 300)).collect();
        source.request(&wants);
        if round % 2 == 1 {
            process.kill();
            if round == 3 {
                fs::remove_dir_all(place.cache()).unwrap();
            }
            process = place.start(4 * MIB);
        }
        for (at, want) in wants.iter().enumerate() {
            let view = source.acquire(*want).unwrap();
            let copy = view.bytes().copy_to_vec();
            if source.still_valid(&view) {
                assert!(copy == payload(((at * 7 + round * 41) % 300) as u32));
            }
        }
    }
}
