//! One connection: the handshake, frames in, answers out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use polign_engine::protocol::{
    Answer, Envelope, Failure, FailureKind, FrameBuffer, Hello, HelloAck, Home, PROTOCOL_MAGIC,
    PROTOCOL_VERSION, Priority, Reply, Request, encode, peer_is_same_user,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixStream, unix::OwnedReadHalf, unix::OwnedWriteHalf},
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::timeout,
};

use super::{Shared, requests};
use crate::limiter::SharedPriority;

const HELLO_PATIENCE: Duration = Duration::from_secs(10);
/// Requests of one connection under way at a time; further ones are read when some are answered.
const MOST_REQUESTS: usize = 1024;
const READ_STEP: usize = 64 << 10;

/// Where the answers of one connection go.
#[derive(Debug, Clone)]
pub(super) struct Outbox(mpsc::UnboundedSender<Vec<u8>>);

impl Outbox {
    pub(super) fn send(&self, id: u64, reply: Reply) {
        // Parts and objects that fit no frame are refused before; a closed connection needs no answer.
        if let Ok(frame) = encode(&Answer { id, reply }) {
            let _ = self.0.send(frame);
        }
    }
}

#[derive(Debug)]
struct Running {
    task: AbortHandle,
    priority: Arc<SharedPriority>,
}

type RunningRequests = Arc<Mutex<HashMap<u64, Running>>>;

fn lock(running: &RunningRequests) -> MutexGuard<'_, HashMap<u64, Running>> {
    running.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Incoming {
    stream: OwnedReadHalf,
    buffer: FrameBuffer,
    bytes: Vec<u8>,
}

impl Incoming {
    /// The next message; `None` at the end, or when the bytes are no messages.
    async fn next<T: serde::de::DeserializeOwned>(&mut self) -> Option<T> {
        loop {
            if let Some(message) = self.buffer.next_message().ok()? {
                return Some(message);
            }
            match self.stream.read(&mut self.bytes).await {
                Ok(0) | Err(_) => return None,
                Ok(n) => self.buffer.push(&self.bytes[..n]),
            }
        }
    }
}

/// Serves one connection to its end. Whatever it sends, only it suffers.
pub(super) async fn serve(stream: UnixStream, shared: Arc<Shared>) {
    if !peer_is_same_user(&stream).unwrap_or(false) {
        return;
    }
    let (read, write) = stream.into_split();
    let mut incoming =
        Incoming { stream: read, buffer: FrameBuffer::default(), bytes: vec![0; READ_STEP] };
    let hello = timeout(HELLO_PATIENCE, incoming.next::<Hello>()).await;
    let Ok(Some(hello)) = hello else { return };
    if hello.magic != PROTOCOL_MAGIC {
        return;
    }
    let (outbox, frames) = mpsc::unbounded_channel();
    let ack = HelloAck {
        magic: PROTOCOL_MAGIC,
        version: PROTOCOL_VERSION,
        pid: std::process::id(),
        build: env!("CARGO_PKG_VERSION").into(),
        cache: shared.cache_id(),
    };
    let Ok(ack) = encode(&ack) else { return };
    let _ = outbox.send(ack);
    let writer = tokio::spawn(write_all(write, frames));
    let is_ours = match hello.version {
        Home::SINCE.. => match timeout(HELLO_PATIENCE, incoming.next::<Home>()).await {
            Ok(Some(home)) => home == shared.home.id,
            _ => return,
        },
        _ => true,
    };
    if hello.version == PROTOCOL_VERSION {
        let outbox = Outbox(outbox);
        match is_ours {
            true => converse(incoming, &shared, outbox).await,
            false => refuse(incoming, &in_use(&shared), outbox).await,
        }
        writer.abort();
    } else {
        drop(outbox);
        // The client reads the version that it cannot use.
        let _ = timeout(HELLO_PATIENCE, writer).await;
        if hello.version > PROTOCOL_VERSION && is_ours {
            shared.make_room_for_newer();
        }
    }
}

/// Why a client of another cluster is not served: what it calls `file:store` is another directory here.
fn in_use(shared: &Shared) -> Failure {
    let (cache, home) = (shared.directory.path().display(), shared.home.path.display());
    Failure {
        kind: FailureKind::InUse,
        code: String::new(),
        message: format!(
            "the cache directory \"{cache}\" is that of the server whose data directory is \"{home}\""
        ),
        detail: String::new(),
        object: String::new(),
        url: String::new(),
    }
}

/// Answers every request with the same failure.
async fn refuse(mut incoming: Incoming, failure: &Failure, outbox: Outbox) {
    while let Some(Envelope { id, request }) = incoming.next().await {
        if !matches!(request, Request::Raise { .. } | Request::Cancel { .. }) {
            outbox.send(id, Reply::Failed(failure.clone()));
        }
    }
}

async fn write_all(mut stream: OwnedWriteHalf, mut frames: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(frame) = frames.recv().await {
        if stream.write_all(&frame).await.is_err() {
            return;
        }
    }
}

/// Ends with the connection; requests that are under way then are given up.
async fn converse(mut incoming: Incoming, shared: &Arc<Shared>, outbox: Outbox) {
    let running = RunningRequests::default();
    let mut tasks = JoinSet::new();
    while let Some(Envelope { id, request }) = incoming.next().await {
        while tasks.try_join_next().is_some() {}
        match request {
            Request::Raise { target, priority } => {
                if let Some(running) = lock(&running).get(&target) {
                    running.priority.raise(priority);
                }
            }
            Request::Cancel { target } => {
                if let Some(running) = lock(&running).remove(&target) {
                    running.task.abort();
                }
            }
            request => {
                // First of all: whatever it waits for, it came before a clear that comes now.
                let era = shared.cache().era();
                while tasks.len() >= MOST_REQUESTS && tasks.join_next().await.is_some() {}
                let priority = Arc::new(SharedPriority::new(priority_of(&request)));
                let (shared, outbox) = (Arc::clone(shared), outbox.clone());
                let (ours, theirs) = (Arc::clone(&priority), Arc::clone(&running));
                // Held until the task is in the table, so that it cannot leave before it came.
                let mut table = lock(&running);
                let task = tasks.spawn(async move {
                    requests::carry_out(id, request, era, &ours, &shared, &outbox).await;
                    lock(&theirs).remove(&id);
                });
                table.insert(id, Running { task, priority });
            }
        }
    }
}

fn priority_of(request: &Request) -> Priority {
    match request {
        Request::Fetch(plan) | Request::Prewarm(plan) | Request::Check(plan) => plan.priority,
        Request::Put(put) => put.priority,
        Request::PutBytes { priority, .. } | Request::GetBytes { priority, .. } => *priority,
        _ => Priority::Gc,
    }
}
