//! Against a real S3 server, which `make unit` starts: POLIGN_S3_ENDPOINT names it, and its keys are in
//! AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.

mod common;

use std::{fs, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use common::{Object, Process, call, fetch};
use polign_engine::{
    ObjectId,
    protocol::{FailureKind, PartOutcome, Priority, Request, UploadName},
};
use polign_store::{
    limiter::SharedPriority,
    object_store::{Created, ErrorClass, ObjectStore, S3Settings, S3Store, Source, StoreError},
    region_cache::RegionCache,
    remote::Remote,
    retry::Deadline,
};

struct Server {
    endpoint: String,
    keys: (String, String),
    bucket: String,
    dir: tempfile::TempDir,
}

/// The server to test against, with a new bucket.
async fn server() -> Server {
    let variable = |name: &str| match std::env::var(name) {
        Ok(value) if !value.is_empty() => value,
        _ => panic!("{name} is not set: run make unit, which starts an S3 server for these tests"),
    };
    let endpoint = variable("POLIGN_S3_ENDPOINT");
    let keys = (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"));
    let bucket = format!("t-{}", ObjectId::random().unwrap());
    let server = Server { endpoint, keys, bucket, dir: tempfile::tempdir().unwrap() };
    server.client().await.create_bucket().bucket(&server.bucket).send().await.unwrap();
    server
}

impl Server {
    /// The SDK's own client.
    async fn client(&self) -> aws_sdk_s3::Client {
        let shared = aws_config::from_env()
            .endpoint_url(&self.endpoint)
            .region(aws_config::Region::from_static("us-east-1"))
            .load()
            .await;
        let config = aws_sdk_s3::config::Builder::from(&shared).force_path_style(true).build();
        aws_sdk_s3::Client::from_conf(config)
    }

    fn write_keys(&self, secret: &str) -> std::path::PathBuf {
        let file = self.dir.path().join("keys");
        let key = &self.keys.0;
        let text =
            format!("[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n");
        fs::write(&file, text).unwrap();
        file
    }

    fn settings(&self, secret: &str) -> S3Settings {
        S3Settings {
            endpoint: Some(self.endpoint.clone()),
            credentials_file: Some(self.write_keys(secret)),
            ..S3Settings::default()
        }
    }

    async fn store(&self) -> S3Store {
        let settings = self.settings(&self.keys.1);
        S3Store::new(self.bucket.clone(), "some/prefix/".into(), settings).await
    }
}

fn class(error: StoreError) -> ErrorClass {
    error.class
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_come_back_by_range() {
    let server = server().await;
    let store = server.store().await;
    store.put("ab/x.seg", Source::Bytes("0123456789".into())).await.unwrap();
    assert_eq!(store.get_range("ab/x.seg", 3, 4).await.unwrap(), "3456");
    assert_eq!(store.get("ab/x.seg", 10).await.unwrap(), "0123456789");
    assert_eq!(store.len("ab/x.seg").await.unwrap(), Some(10));
    assert_eq!(store.len("ab/y.seg").await.unwrap(), None);
    assert_eq!(store.get_range("y", 0, 1).await.map_err(class), Err(ErrorClass::NotFound));
    assert_eq!(store.get("y", 9).await.map_err(class), Err(ErrorClass::NotFound));
    let short = store.get_range("ab/x.seg", 8, 4).await.map_err(class);
    assert_eq!(short, Err(ErrorClass::Damaged));
    let past = store.get_range("ab/x.seg", 10, 4).await.map_err(class);
    assert_eq!(past, Err(ErrorClass::Damaged));
    store.put("empty", Source::Bytes(Bytes::new())).await.unwrap();
    assert_eq!(store.get("empty", 10).await.unwrap(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn long_objects_go_up_in_parts() {
    let server = server().await;
    let store = server.store().await;
    let bytes: Vec<u8> = (0..21_000_000u32).map(|at| (at / 3) as u8 ^ (at >> 16) as u8).collect();
    let file = server.dir.path().join("long");
    fs::write(&file, &bytes).unwrap();
    let source = Source::of_file(Arc::new(fs::File::open(&file).unwrap())).unwrap();
    store.put("long", source).await.unwrap();
    assert_eq!(store.len("long").await.unwrap(), Some(bytes.len() as u64));
    for offset in [0u64, (8 << 20) - 100, (16 << 20) - 100, 20_999_000] {
        let part = store.get_range("long", offset, 1000).await.unwrap();
        assert!(part == bytes[offset as usize..][..1000], "at {offset}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conditional_put_never_replaces() {
    let server = server().await;
    let store = server.store().await;
    assert_eq!(store.put_if_absent("owner/a", "one".into()).await.unwrap(), Created::New);
    assert_eq!(store.put_if_absent("owner/a", "two".into()).await.unwrap(), Created::Existed);
    assert_eq!(store.get("owner/a", 10).await.unwrap(), "one");
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_pages_through_a_prefix() {
    let server = server().await;
    let store = server.store().await;
    for key in ["aa/1", "aa/2", "ab/3", "b"] {
        store.put(key, Source::Bytes("xy".into())).await.unwrap();
    }
    let page = store.list("a", None, 2).await.unwrap();
    let keys: Vec<&str> = page.objects.iter().map(|object| object.key.as_str()).collect();
    assert_eq!((keys, page.more), (vec!["aa/1", "aa/2"], true));
    assert!(page.objects.iter().all(|o| o.len == 2 && o.modified_ms > 1_600_000_000_000));
    let now = page.now_ms.expect("the store tells its time");
    assert!(page.objects.iter().all(|o| (o.modified_ms - now).abs() < 60_000));
    let rest = store.list("a", Some("aa/2"), 10).await.unwrap();
    assert_eq!((rest.objects.len(), rest.more), (1, false));
    store.delete("ab/3").await.unwrap();
    store.delete("ab/3").await.unwrap();
    assert!(store.list("ab", None, 10).await.unwrap().objects.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_uploads_are_listed_and_ended() {
    let server = server().await;
    let (store, client) = (server.store().await, server.client().await);
    let mut names = Vec::new();
    for key in ["aa/1", "aa/2", "b/3"] {
        let full = format!("some/prefix/{key}");
        let begun = client.create_multipart_upload().bucket(&server.bucket).key(&full);
        let id = begun.send().await.unwrap().upload_id.unwrap();
        let part = client.upload_part().bucket(&server.bucket).key(&full).upload_id(&id);
        let body = Bytes::from_static(b"12345").into();
        part.part_number(1).body(body).send().await.unwrap();
        names.push(UploadName { key: key.into(), id });
    }
    let now = store.list("", None, 1).await.unwrap().now_ms.unwrap();
    let page = store.list_uploads("aa/", None, 1000).await.unwrap();
    assert!(!page.more);
    assert!(page.uploads.iter().all(|u| u.len == 5 && (now - u.begun_ms).abs() < 60_000));
    // Stores differ in the order.
    let mut listed: Vec<_> = page.uploads.into_iter().map(|upload| upload.name).collect();
    listed.sort();
    assert_eq!(listed, names[..2]);
    for name in names.iter().chain(&names) {
        store.abort_upload(name).await.unwrap();
    }
    assert!(store.list_uploads("", None, 10).await.unwrap().uploads.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_keys_and_buckets_are_named_without_secrets() {
    let server = server().await;
    let settings = server.settings("wrong-secret");
    let store = S3Store::new(server.bucket.clone(), String::new(), settings).await;
    let error = store.get_range("x", 0, 1).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Credentials, "{error}");
    assert_eq!(error.code, "SignatureDoesNotMatch");
    let text = format!("{error:?}");
    assert!(!text.contains("wrong-secret") && !text.contains(&server.keys.1), "{text}");

    let settings = server.settings(&server.keys.1);
    let bucket = format!("none-{}", ObjectId::random().unwrap());
    let store = S3Store::new(bucket, String::new(), settings).await;
    let error = store.get_range("x", 0, 1).await.unwrap_err();
    assert!(matches!(error.class, ErrorClass::Invalid | ErrorClass::NotFound), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_keys_are_used_without_a_restart() {
    let server = server().await;
    server.store().await.put("x", Source::Bytes("x".into())).await.unwrap();
    let settings = server.settings("old");
    let store = S3Store::new(server.bucket.clone(), "some/prefix/".into(), settings).await;
    let cache = Arc::new(RegionCache::open(Path::new("/nonexistent"), 1 << 22));
    let remote = Remote::new(Arc::new(store), 4, cache);
    let priority = Arc::new(SharedPriority::new(Priority::Query));
    let deadline = || Deadline::after(Duration::from_secs(20));
    let failure = remote.get("x", 9, &priority, deadline()).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Credentials, "{failure:?}");
    server.write_keys(&server.keys.1);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(remote.get("x", 9, &priority, deadline()).await.unwrap(), "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_program_uploads_and_fetches() {
    let server = server().await;
    let keys = server.write_keys(&server.keys.1);
    let more =
        format!(r#","s3_endpoint":"{}","credentials_file":"{}""#, server.endpoint, keys.display());
    let url = format!("s3://{}/indexes", server.bucket);
    let path = server.dir.path().join("cache");
    let done = tokio::task::spawn_blocking(move || {
        let process = Process::start(&path, 64 << 20, &more);
        let mut client = process.client();
        let object = Object::new(600);
        call(&mut client, object.put(&process, &url, true)).unwrap();
        assert_eq!(object.in_cache(&process.map()), 600);
        call(&mut client, Request::ClearCache).unwrap();
        let (outcomes, gets) = fetch(&mut client, object.plan(&url));
        assert!(outcomes.iter().all(|outcome| *outcome == PartOutcome::Published));
        // 18 MB, read in pieces of 8 MiB.
        assert_eq!((outcomes.len(), gets), (600, 3));
    });
    done.await.unwrap();
}
