//! What the program makes of its settings and its environment, before a server that answers nothing but
//! shows how it was asked.

mod common;

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Duration,
};

use common::*;
use polign_engine::protocol::{ClientError, FailureKind, PartOutcome, Priority, Request};

const KEYS: &str = "[default]\naws_access_key_id = a\naws_secret_access_key = SECRET\n";
const METADATA_REGION: &str = "sa-east-1";

/// A variable of the environment.
type Variable<'a> = (&'a str, &'a str);

/// A server of S3, which has no object, and of the metadata service of a machine.
struct Server {
    address: SocketAddr,
    /// The regions for which requests were signed.
    regions: Receiver<String>,
}

fn server() -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, regions) = channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let sender = sender.clone();
            thread::spawn(move || answer(stream, &sender));
        }
    });
    Server { address, regions }
}

fn answer(mut stream: TcpStream, regions: &Sender<String>) {
    let mut request = Vec::new();
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(n) => request.extend_from_slice(&bytes[..n]),
        }
        let text = String::from_utf8_lossy(&request).into_owned();
        if !text.contains("\r\n\r\n") {
            continue;
        }
        request.clear();
        let (status, more, body) = if text.contains("/latest/api/token") {
            ("200 OK", "x-aws-ec2-metadata-token-ttl-seconds: 60\r\n", "token")
        } else if text.contains("/latest/meta-data/placement/region") {
            ("200 OK", "", METADATA_REGION)
        } else {
            // Credential=<key>/<day>/<region>/s3/aws4_request
            let scope = text.split("Credential=").nth(1).unwrap_or_default();
            let _ = regions.send(scope.split('/').nth(2).unwrap_or_default().to_owned());
            ("404 Not Found", "", "<Error><Code>NoSuchKey</Code></Error>")
        };
        let len = body.len();
        let answer = format!("HTTP/1.1 {status}\r\n{more}content-length: {len}\r\n\r\n{body}");
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn keys_of_mode(directory: &Path, mode: u32) -> PathBuf {
    let file = directory.join("keys");
    fs::write(&file, KEYS).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    file
}

fn get(url: &str) -> Request {
    Request::GetBytes { store: url.into(), key: "x".into(), priority: Priority::Query }
}

fn failure_kind(error: ClientError) -> FailureKind {
    match error {
        ClientError::Failed(failure) => failure.kind,
        error => panic!("{error}"),
    }
}

#[test]
fn the_region_is_the_settings_else_the_environments_else_the_default() {
    let server = server();
    let endpoint = format!("http://{}", server.address);
    let dir = tempfile::tempdir().unwrap();
    let keys = keys_of_mode(dir.path(), 0o600);
    fs::write(&keys, format!("{KEYS}{}", KEYS.replace("default", "other"))).unwrap();
    let (none, profile) = (dir.path().join("none"), dir.path().join("config"));
    fs::write(&none, "").unwrap();
    fs::write(&profile, "[default]\nregion = eu-north-1\n[profile other]\nregion = us-west-1\n")
        .unwrap();
    let profile = profile.to_str().unwrap();
    let metadata = ("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint.as_str());
    let no_metadata = ("AWS_EC2_METADATA_DISABLED", "true");
    let env = ("AWS_REGION", "ap-south-1");
    let cases: &[(&str, &[Variable<'_>], &str)] = &[
        ("eu-west-3", &[env, metadata], "eu-west-3"),
        ("", &[env, ("AWS_CONFIG_FILE", profile), metadata], "ap-south-1"),
        ("", &[("AWS_DEFAULT_REGION", "ca-west-1"), metadata], "ca-west-1"),
        ("", &[("AWS_CONFIG_FILE", profile), metadata], "eu-north-1"),
        ("", &[("AWS_CONFIG_FILE", profile), ("AWS_PROFILE", "other"), no_metadata], "us-west-1"),
        ("", &[metadata], METADATA_REGION),
        ("", &[no_metadata], "us-east-1"),
    ];
    for (at, (setting, variables, expected)) in cases.iter().enumerate() {
        for by_setting in [true, false] {
            let more = format!(
                r#","s3_region":"{setting}","credentials_file":"{}","s3_force_path_style":true{}"#,
                keys.display(),
                if by_setting { format!(r#","s3_endpoint":"{endpoint}""#) } else { String::new() }
            );
            let mut environment = vec![
                ("HOME", dir.path().to_str().unwrap()),
                ("AWS_CONFIG_FILE", none.to_str().unwrap()),
            ];
            environment.extend_from_slice(variables);
            if !by_setting {
                environment.push(("AWS_ENDPOINT_URL", &endpoint));
            }
            let cache = dir.path().join(format!("cache{at}{by_setting}"));
            let process = Process::start_in(&cache, 8 * MIB, &more, &environment);
            let error = call(&mut process.client(), get("s3://bucket")).unwrap_err();
            assert_eq!(failure_kind(error), FailureKind::NotFound);
            let region = server.regions.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_eq!(region, *expected, "{variables:?}, by setting: {by_setting}");
        }
    }
}

#[test]
fn a_credentials_file_that_others_can_read_is_told_once_and_used() {
    let server = server();
    for (mode, told) in [(0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1), (0o644, 1), (0o622, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let keys = keys_of_mode(dir.path(), mode);
        let more = format!(
            r#","s3_region":"r","s3_endpoint":"http://{}","credentials_file":"{}""#,
            server.address,
            keys.display()
        );
        let mut process = Process::start(&dir.path().join("cache"), 8 * MIB, &more);
        for url in ["s3://bucket", "s3://bucket/prefix", "s3://other"] {
            let error = call(&mut process.client(), get(url)).unwrap_err();
            assert_eq!(failure_kind(error), FailureKind::NotFound);
        }
        process.end_input();
        assert!(process.wait(Duration::from_secs(20)).is_some());
        let log = process.log();
        let lines: Vec<&str> =
            log.lines().filter(|line| line.contains("credentials file")).collect();
        assert_eq!(lines.len(), told, "{mode:o}: {log}");
        for line in lines {
            assert!(line.contains("WARNING") && line.contains(keys.to_str().unwrap()), "{line}");
            assert!(line.contains(&format!("{mode:04o}")), "{line}");
        }
        assert!(!log.contains("SECRET"));
    }
}

#[test]
fn no_usable_credentials_are_told_as_that_to_builds_and_to_queries() {
    let server = server();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let file = dir.path().join(name);
        fs::write(&file, text).unwrap();
        file
    };
    for (at, keys) in [
        dir.path().join("missing"),
        dir.path().to_path_buf(),
        file("empty", ""),
        file("other", "[other]\naws_access_key_id = a\naws_secret_access_key = SECRET\n"),
        file("half", "[default]\naws_access_key_id = a\n"),
        file("noise", "\u{1}SECRET"),
    ]
    .into_iter()
    .enumerate()
    {
        let more = format!(
            r#","s3_region":"r","s3_endpoint":"http://{}","credentials_file":"{}""#,
            server.address,
            keys.display()
        );
        let process = Process::start(&dir.path().join(format!("cache{at}")), 8 * MIB, &more);
        let mut client = process.client();
        let object = Object::new(1);
        let put = call(&mut client, object.put(&process, "s3://bucket", false)).unwrap_err();
        assert_eq!(failure_kind(put), FailureKind::Credentials, "{keys:?}");
        let (outcomes, _) = fetch(&mut client, object.plan("s3://bucket"));
        let [PartOutcome::Failed(failure)] = &outcomes[..] else { panic!("{outcomes:?}") };
        assert_eq!(failure.kind, FailureKind::Credentials, "{keys:?}: {failure:?}");
        assert!(!format!("{failure:?}").contains("SECRET"));
    }
}
