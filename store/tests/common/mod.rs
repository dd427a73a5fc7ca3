//! A store process of a test's own, and objects to put into it.
#![allow(dead_code)]

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use polign_engine::{
    ObjectId,
    cache::{CacheMap, Counter},
    gets::GAP,
    protocol::{
        Client, ClientError, ClientOptions, FetchPlan, ObjectParts, PartOutcome, PartRange,
        PollWaiter, Priority, Put, Reply, Request,
    },
    segment::{PartKey, PartKind, PartRef, SegmentName, part},
};

pub const MIB: u64 = 1 << 20;
const PROGRAM: &str = env!("CARGO_BIN_EXE_polign-store");

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

pub struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    pub cache: PathBuf,
    config: String,
}

impl Process {
    /// Starts the program on a cache directory. `more`: further fields of the configuration.
    pub fn start(cache: &Path, bytes: u64, more: &str) -> Self {
        Self::start_with(cache, bytes, more, &mut Command::new(PROGRAM))
    }

    /// The same, with these variables and no others of AWS in its environment.
    pub fn start_in(cache: &Path, bytes: u64, more: &str, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(PROGRAM);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("AWS_") {
                command.env_remove(name);
            }
        }
        command.envs(environment.iter().copied());
        Self::start_with(cache, bytes, more, &mut command)
    }

    fn start_with(cache: &Path, bytes: u64, more: &str, command: &mut Command) -> Self {
        let config = Self::config(cache, bytes, more);
        let mut child = command
            .arg("--config-stdin")
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{config}").unwrap();
        Self { child, stdin: Some(stdin), cache: cache.to_path_buf(), config }
    }

    fn config(cache: &Path, bytes: u64, more: &str) -> String {
        let cache = cache.display();
        format!(r#"{{"cache_dir":"{cache}","cache_size_bytes":{bytes}{more}}}"#)
    }

    pub fn reconfigure(&mut self, bytes: u64, more: &str) {
        let line = Self::config(&self.cache, bytes, more);
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Closes its input.
    pub fn end_input(&mut self) {
        self.stdin = None;
    }

    pub fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + patience;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    /// What it wrote to stderr, after its end.
    pub fn log(&mut self) -> String {
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }

    pub fn client(&self) -> Client {
        client(&self.cache)
    }

    pub fn map(&self) -> CacheMap {
        let until = soon();
        loop {
            match CacheMap::open(&self.cache) {
                Ok(map) if !map.is_retired() => return map,
                _ if Instant::now() > until => panic!("the cache cannot be mapped"),
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    pub fn counter(&self, counter: Counter) -> u64 {
        self.map().counters().get(counter)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn client(cache: &Path) -> Client {
    Client::new(cache, options(Path::new(".")))
}

/// The options of a client whose data directory this is. The program is started in ".".
pub fn options(data_directory: &Path) -> ClientOptions {
    ClientOptions { build: "test".into(), data_directory: data_directory.into() }
}

/// An object of parts of about 30 KiB.
pub struct Object {
    pub name: SegmentName,
    pub bytes: Vec<u8>,
    pub parts: Vec<PartRef>,
}

impl Object {
    pub fn new(parts: u32) -> Self {
        let id = || ObjectId::random().unwrap();
        let name = SegmentName { writer: id(), index: id(), object: id() };
        let (mut bytes, mut refs) = (Vec::new(), Vec::new());
        for ordinal in 0..parts {
            let key = PartKey::new(name.object, PartKind::Plane1, ordinal);
            let start = bytes.len();
            part::frame(key, &payload(ordinal), &mut bytes);
            let len = (bytes.len() - start) as u32;
            refs.push(PartRef { key, offset: start as u64, len });
        }
        Self { name, bytes, parts: refs }
    }

    pub fn plan(&self, url: &str) -> FetchPlan {
        let range = |part: &PartRef| PartRange {
            index: part.key.index,
            len: part.len,
            offset: part.offset,
        };
        let parts = self.parts.iter().map(range).collect();
        FetchPlan {
            store: url.into(),
            objects: vec![ObjectParts { key: self.name.key(), object: self.name.object, parts }],
            priority: Priority::Query,
            want_bytes: false,
            fresh: false,
            gap: GAP,
        }
    }

    /// Writes the object where backends write segments, and asks for its upload.
    pub fn put(&self, process: &Process, url: &str, ingest: bool) -> Request {
        let file = format!("{}.seg", self.name.object);
        let directory = process.cache.join("upload");
        let until = soon();
        while !directory.is_dir() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        fs::write(directory.join(&file), &self.bytes).unwrap();
        let (key, object, priority) = (self.name.key(), self.name.object, Priority::Build);
        Request::Put(Put { store: url.into(), key, object, file, ingest, priority })
    }

    pub fn in_cache(&self, map: &CacheMap) -> usize {
        let there = |part: &&PartRef| map.find(part.key.object, part.key.index).is_some();
        self.parts.iter().filter(there).count()
    }
}

pub fn payload(ordinal: u32) -> Vec<u8> {
    (0..30_000).map(|at| (at as u32 / 8).wrapping_mul(ordinal + 1) as u8).collect()
}

pub fn call(client: &mut Client, request: Request) -> Result<Reply, ClientError> {
    client.call(request, &mut PollWaiter, soon())
}

/// Fetches and returns the outcomes and the number of GETs.
pub fn fetch(client: &mut Client, plan: FetchPlan) -> (Vec<PartOutcome>, u32) {
    let id = client.begin(Request::Fetch(plan)).unwrap();
    let (until, mut outcomes) = (soon(), Vec::new());
    loop {
        while let Some(reply) = client.take(id) {
            match reply {
                Reply::Part { outcome, .. } => outcomes.push(outcome),
                Reply::FetchDone(summary) => return (outcomes, summary.gets),
                reply => panic!("{reply:?}"),
            }
        }
        client.wait(&mut PollWaiter, until).unwrap();
        client.pump().unwrap();
    }
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = soon();
    while !condition() {
        assert!(Instant::now() < until, "it never happened: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}
