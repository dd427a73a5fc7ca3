use std::{
    os::unix::net::UnixListener,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread::{self, JoinHandle},
};

use super::*;
use crate::{
    ObjectId,
    protocol::{PollWaiter, SOCKET_NAME},
};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn get(key: &str) -> Request {
    Request::GetBytes { store: "file:s".into(), key: key.into(), priority: Priority::Query }
}

fn client(dir: &Path) -> Client {
    Client::new(dir, ClientOptions { build: "test".into(), ..ClientOptions::default() })
}

/// The server's end of one connection, past the handshake.
struct Peer {
    stream: UnixStream,
    inbound: FrameBuffer,
}

impl Peer {
    fn accept(listener: &UnixListener, version: u32) -> Self {
        let (stream, _) = listener.accept().unwrap();
        let mut peer = Self { stream, inbound: FrameBuffer::default() };
        let hello: Hello = peer.read().unwrap();
        assert_eq!(hello.magic, PROTOCOL_MAGIC);
        let home: Home = peer.read().unwrap();
        assert_eq!(home, Home::of(Path::new(".")).unwrap());
        let (build, cache) = ("peer".into(), ObjectId::NIL);
        peer.write(&HelloAck { magic: PROTOCOL_MAGIC, version, pid: 1, build, cache });
        peer
    }

    fn read<T: serde::de::DeserializeOwned>(&mut self) -> Option<T> {
        loop {
            if let Some(message) = self.inbound.next_message().unwrap() {
                return Some(message);
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes).unwrap() {
                0 => return None,
                n => self.inbound.push(&bytes[..n]),
            }
        }
    }

    fn write<T: serde::Serialize>(&mut self, message: &T) {
        self.stream.write_all(&encode(message).unwrap()).unwrap();
    }

    /// Answers each GetBytes with its own key until the client leaves.
    fn echo(&mut self) {
        while let Some(Envelope { id, request }) = self.read() {
            if let Request::GetBytes { key, .. } = request {
                self.write(&Answer { id, reply: Reply::Bytes(key.into_bytes()) });
            }
        }
    }
}

fn serve(dir: &Path, script: impl FnOnce(UnixListener) + Send + 'static) -> JoinHandle<()> {
    let listener = UnixListener::bind(dir.join(SOCKET_NAME)).unwrap();
    thread::spawn(move || script(listener))
}

#[test]
fn a_call_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path(), |l| Peer::accept(&l, PROTOCOL_VERSION).echo());
    let mut client = client(dir.path());
    for key in ["a", "bb"] {
        let reply = client.call(get(key), &mut PollWaiter, soon()).unwrap();
        assert_eq!(reply, Reply::Bytes(key.as_bytes().to_vec()));
    }
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_killed_server_costs_a_retry_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_path_buf();
    let server = serve(dir.path(), move |listener| {
        let mut first = Peer::accept(&listener, PROTOCOL_VERSION);
        let _: Envelope = first.read().unwrap();
        drop((first, listener));
        std::fs::remove_file(path.join(SOCKET_NAME)).unwrap();
        thread::sleep(Duration::from_millis(30));
        let listener = UnixListener::bind(path.join(SOCKET_NAME)).unwrap();
        Peer::accept(&listener, PROTOCOL_VERSION).echo();
    });
    let mut client = client(dir.path());
    let reply = client.call(get("again"), &mut PollWaiter, soon()).unwrap();
    assert_eq!(reply, Reply::Bytes(b"again".to_vec()));
    drop(client);
    server.join().unwrap();
}

#[test]
fn answers_sent_before_the_server_died_are_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (sent, wait) = mpsc::channel();
    let server = serve(dir.path(), move |listener| {
        let mut peer = Peer::accept(&listener, PROTOCOL_VERSION);
        let Envelope { id, .. } = peer.read().unwrap();
        peer.write(&Answer { id, reply: Reply::Done });
        drop(peer);
        sent.send(()).unwrap();
    });
    let mut client = client(dir.path());
    let id = client.begin(get("x")).unwrap();
    while wait.try_recv().is_err() {
        client.wait(&mut PollWaiter, Instant::now() + Duration::from_millis(5)).ok();
        client.pump().unwrap();
    }
    client.pump().unwrap();
    assert_eq!(client.take(id), Some(Reply::Done));
    server.join().unwrap();
}

#[test]
fn unwinding_out_of_the_waiter_leaves_the_client_usable() {
    struct Raise;
    impl Waiter for Raise {
        fn wait(
            &mut self,
            _: Option<BorrowedFd<'_>>,
            _: Interest,
            _: Duration,
        ) -> Result<(), Interrupted> {
            std::panic::resume_unwind(Box::new("cancelled"));
        }
    }
    struct Stop;
    impl Waiter for Stop {
        fn wait(
            &mut self,
            _: Option<BorrowedFd<'_>>,
            _: Interest,
            _: Duration,
        ) -> Result<(), Interrupted> {
            Err(Interrupted)
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path(), |listener| {
        let mut peer = Peer::accept(&listener, PROTOCOL_VERSION);
        // The abandoned requests are answered late, just before the one that counts.
        let mut held = Vec::new();
        while let Some(Envelope { id, request }) = peer.read() {
            match request {
                Request::GetBytes { key, .. } if key == "late" => held.push(id),
                Request::GetBytes { key, .. } => {
                    for id in held.drain(..) {
                        peer.write(&Answer { id, reply: Reply::Bytes(b"late".into()) });
                    }
                    peer.write(&Answer { id, reply: Reply::Bytes(key.into_bytes()) });
                }
                _ => {}
            }
        }
    });
    let mut client = client(dir.path());
    let unwound = catch_unwind(AssertUnwindSafe(|| client.call(get("late"), &mut Raise, soon())));
    assert!(unwound.is_err());
    let stopped = client.call(get("late"), &mut Stop, soon());
    assert!(matches!(stopped, Err(ClientError::Interrupted(_))));
    let reply = client.call(get("now"), &mut PollWaiter, soon()).unwrap();
    assert_eq!(reply, Reply::Bytes(b"now".to_vec()));
    assert_eq!(client.unanswered(), 0);
    drop(client);
    server.join().unwrap();
}

#[test]
fn without_a_server_the_deadline_names_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let deadline = Instant::now() + Duration::from_millis(30);
    let error = client(dir.path()).call(get("x"), &mut PollWaiter, deadline).unwrap_err();
    assert!(matches!(&error, ClientError::NotRunning { .. }), "{error}");
    assert!(error.to_string().contains(SOCKET_NAME), "{error}");
}

#[test]
fn a_silent_server_is_a_time_out() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path(), |listener| {
        let mut peer = Peer::accept(&listener, PROTOCOL_VERSION);
        while peer.read::<Envelope>().is_some() {}
    });
    let mut client = client(dir.path());
    let deadline = Instant::now() + Duration::from_millis(200);
    let error = client.call(get("x"), &mut PollWaiter, deadline).unwrap_err();
    assert!(matches!(error, ClientError::TimedOut), "{error}");
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_newer_server_is_refused_and_an_older_one_awaited() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path(), |listener| {
        drop(Peer::accept(&listener, PROTOCOL_VERSION - 1));
        Peer::accept(&listener, PROTOCOL_VERSION).echo();
        drop(Peer::accept(&listener, PROTOCOL_VERSION + 1));
    });
    let mut first = client(dir.path());
    assert!(first.call(get("x"), &mut PollWaiter, soon()).is_ok());
    drop(first);
    let error = client(dir.path()).call(get("x"), &mut PollWaiter, soon()).unwrap_err();
    assert!(matches!(error, ClientError::Version { .. }), "{error}");
    server.join().unwrap();
}

#[test]
fn a_directory_with_a_long_path_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("d".repeat(90)).join("e".repeat(90));
    std::fs::create_dir_all(&long).unwrap();
    let bound = SocketPath::in_directory(&long).unwrap();
    let listener = UnixListener::bind(bound.as_path()).unwrap();
    let server = thread::spawn(move || Peer::accept(&listener, PROTOCOL_VERSION).echo());
    let mut client = client(&long);
    assert!(client.call(get("x"), &mut PollWaiter, soon()).is_ok());
    drop(client);
    server.join().unwrap();
}

/// A reply may be read while a later step still sends: waiting for it must not wait for another one.
#[test]
fn a_reply_that_is_here_already_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path(), |l| Peer::accept(&l, PROTOCOL_VERSION).echo());
    let mut client = client(dir.path());
    client.call(get("first"), &mut PollWaiter, soon()).unwrap();
    client.has_news = false;
    let id = client.begin(get("second")).unwrap();
    while client.live.values().all(|live| live.inbox.is_empty()) {
        thread::sleep(Duration::from_millis(1));
        client.pump().unwrap();
    }
    let started = Instant::now();
    client.wait(&mut PollWaiter, soon()).unwrap();
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(client.take(id), Some(Reply::Bytes(b"second".into())));
    drop(client);
    server.join().unwrap();
}
