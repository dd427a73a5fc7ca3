use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::{
    Answer, Envelope, Failure, FrameBuffer, FrameError, Hello, HelloAck, Home, Interest,
    Interrupted, PROTOCOL_MAGIC, PROTOCOL_VERSION, Priority, Reply, Request, SocketPath, Waiter,
    encode, encode_into, peer_is_same_user,
};

/// Id 0 is for messages that are not answered.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

const FIRST_BACKOFF: Duration = Duration::from_millis(2);
const LONGEST_BACKOFF: Duration = Duration::from_millis(250);
const READ_STEP: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The deadline passed without a connection to a store process.
    #[error("no store process answers at \"{}\": {reason}", path.display())]
    NotRunning { path: PathBuf, reason: String },
    /// The deadline passed while the store process was at work.
    #[error("the store process did not answer within the time allowed")]
    TimedOut,
    #[error(
        "the store process {pid} speaks protocol version {theirs}, this library version {ours}: \
         reconnect to load the new library"
    )]
    Version { ours: u32, theirs: u32, pid: u32 },
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    #[error("{0}")]
    Failed(Box<Failure>),
    /// The request itself cannot be sent.
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("the store process gave an answer of the wrong kind")]
    UnexpectedReply,
}

#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Names the build of this library in the store process's log.
    pub build: String,
    /// The cluster's data directory, which has to be the store process's too.
    pub data_directory: PathBuf,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self { build: String::new(), data_directory: ".".into() }
    }
}

/// Names a request of one [`Client`]; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

/// A connection to the store process that comes back by itself.
///
/// Nothing here blocks except [`Client::wait`] and [`Client::call`]. A request is kept until its last
/// reply is here and is sent again after a reconnection: every request may be carried out twice with
/// the same result. Replies wait in an inbox per request; those to a forgotten request are dropped.
#[derive(Debug)]
pub struct Client {
    directory: PathBuf,
    options: ClientOptions,
    connection: Option<Connection>,
    live: BTreeMap<u64, Live>,
    backoff: Duration,
    next_attempt: Instant,
    last_trouble: String,
    /// Whether replies came in since the last call of [`Client::wait`].
    has_news: bool,
}

#[derive(Debug)]
struct Live {
    frame: Vec<u8>,
    inbox: VecDeque<Reply>,
    complete: bool,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    inbound: FrameBuffer,
    outbound: Vec<u8>,
    sent: usize,
    ack: Option<HelloAck>,
}

impl Client {
    /// A client of the store process whose cache directory this is. Connects when first used.
    pub fn new(directory: impl Into<PathBuf>, options: ClientOptions) -> Self {
        Self {
            directory: directory.into(),
            options,
            connection: None,
            live: BTreeMap::new(),
            backoff: FIRST_BACKOFF,
            next_attempt: Instant::now(),
            last_trouble: "not connected yet".into(),
            has_news: false,
        }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What the store process said of itself, if a connection stands.
    pub fn server(&self) -> Option<&HelloAck> {
        self.connection.as_ref()?.ack.as_ref()
    }

    /// The socket, which changes when the connection is lost.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(|connection| connection.stream.as_fd())
    }

    /// Queues a request and sends what the socket takes at once.
    pub fn begin(&mut self, request: Request) -> Result<RequestId, ClientError> {
        // Of the whole process: an id never means another request to another client.
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let frame = encode(&Envelope { id, request })?;
        if let Some(connection) = &mut self.connection {
            connection.outbound.extend_from_slice(&frame);
        }
        self.live.insert(id, Live { frame, inbox: VecDeque::new(), complete: false });
        if let Err(error) = self.pump() {
            self.live.remove(&id);
            return Err(error);
        }
        Ok(RequestId(id))
    }

    /// Whether the request was begun here and its last reply was not taken yet.
    pub fn knows(&self, id: RequestId) -> bool {
        self.live.contains_key(&id.0)
    }

    /// The next reply to this request, if it is here. `None` for a forgotten request.
    pub fn take(&mut self, id: RequestId) -> Option<Reply> {
        let live = self.live.get_mut(&id.0)?;
        let reply = live.inbox.pop_front()?;
        if reply.is_last() {
            self.live.remove(&id.0);
        }
        Some(reply)
    }

    /// Gives a request up: its replies will be dropped, and the store process is told.
    pub fn forget(&mut self, id: RequestId) {
        if self.live.remove(&id.0).is_some_and(|live| !live.complete) {
            self.send_unanswered(Request::Cancel { target: id.0 });
        }
    }

    /// Raises the priority of a request in flight.
    pub fn raise(&mut self, id: RequestId, priority: Priority) {
        if self.live.get(&id.0).is_some_and(|live| !live.complete) {
            self.send_unanswered(Request::Raise { target: id.0, priority });
        }
    }

    fn send_unanswered(&mut self, request: Request) {
        if let Some(connection) = &mut self.connection {
            // Such a message is a few bytes long, and losing it costs the server some work only.
            let _ = encode_into(&Envelope { id: 0, request }, &mut connection.outbound);
            if let Err(error) = connection.flush() {
                self.disconnect(error.to_string());
            }
        }
    }

    /// Connects if that is due, sends and receives what can be without waiting. Fails only on what a
    /// retry cannot mend.
    pub fn pump(&mut self) -> Result<(), ClientError> {
        if self.connection.is_none() {
            if Instant::now() < self.next_attempt {
                return Ok(());
            }
            match self.connect() {
                Ok(connection) => self.connection = Some(connection),
                Err(error) => {
                    self.disconnect(error.to_string());
                    return Ok(());
                }
            }
        }
        match self.exchange() {
            Ok(()) => Ok(()),
            Err(Trouble::Retry(reason)) => {
                self.disconnect(reason);
                Ok(())
            }
            Err(Trouble::Version { theirs, pid }) => {
                self.disconnect(format!("it speaks protocol version {theirs}"));
                if theirs > PROTOCOL_VERSION {
                    return Err(ClientError::Version { ours: PROTOCOL_VERSION, theirs, pid });
                }
                // An older process exits when it sees our version, and a new one takes its place.
                Ok(())
            }
        }
    }

    fn connect(&self) -> io::Result<Connection> {
        let stream = SocketPath::in_directory(&self.directory)?.connect()?;
        if !peer_is_same_user(&stream)? {
            return Err(io::Error::other("the process at the socket belongs to another user"));
        }
        let hello = Hello {
            magic: PROTOCOL_MAGIC,
            version: PROTOCOL_VERSION,
            pid: std::process::id(),
            build: self.options.build.clone(),
        };
        let home = Home::of(&self.options.data_directory)?;
        let mut outbound = encode(&hello).map_err(io::Error::other)?;
        encode_into(&home, &mut outbound).map_err(io::Error::other)?;
        for live in self.live.values().filter(|live| !live.complete) {
            outbound.extend_from_slice(&live.frame);
        }
        let inbound = FrameBuffer::default();
        Ok(Connection { stream, inbound, outbound, sent: 0, ack: None })
    }

    fn disconnect(&mut self, reason: String) {
        self.connection = None;
        self.last_trouble = reason;
        self.next_attempt = Instant::now() + self.backoff;
        self.backoff = (self.backoff * 2).min(LONGEST_BACKOFF);
    }

    fn exchange(&mut self) -> Result<(), Trouble> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        connection.flush()?;
        // Answers that the server sent before it went away are read before its end is noticed.
        let end = connection.fill();
        if connection.ack.is_none() {
            match connection.inbound.next_message::<HelloAck>()? {
                Some(ack) if ack.magic != PROTOCOL_MAGIC => {
                    return Err(Trouble::Retry("it speaks another protocol".into()));
                }
                Some(ack) if ack.version != PROTOCOL_VERSION => {
                    return Err(Trouble::Version { theirs: ack.version, pid: ack.pid });
                }
                Some(ack) => {
                    connection.ack = Some(ack);
                    self.backoff = FIRST_BACKOFF;
                }
                None => return end.map_err(Trouble::from),
            }
        }
        while let Some(Answer { id, reply }) = connection.inbound.next_message::<Answer>()? {
            if let Some(live) = self.live.get_mut(&id)
                && !live.complete
            {
                live.complete = reply.is_last();
                live.inbox.push_back(reply);
                self.has_news = true;
            }
        }
        end.map_err(Trouble::from)
    }

    /// Waits once for the socket, the next attempt to connect, or the deadline, whichever is first; not
    /// at all if replies came in since the last wait, which the caller may not have taken yet. Call
    /// [`Client::pump`] afterwards.
    pub fn wait(&mut self, waiter: &mut impl Waiter, deadline: Instant) -> Result<(), ClientError> {
        if std::mem::take(&mut self.has_news) {
            return Ok(());
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(self.deadline_error());
        }
        let left = deadline - now;
        match &self.connection {
            Some(connection) => {
                let write = connection.sent < connection.outbound.len();
                let interest = Interest { read: true, write };
                waiter.wait(Some(connection.stream.as_fd()), interest, left)?;
            }
            None => {
                let pause = self.next_attempt.saturating_duration_since(now).min(left);
                waiter.wait(None, Interest { read: false, write: false }, pause)?;
            }
        }
        Ok(())
    }

    fn deadline_error(&self) -> ClientError {
        if self.server().is_some() {
            ClientError::TimedOut
        } else {
            ClientError::NotRunning {
                path: self.directory.join(super::SOCKET_NAME),
                reason: self.last_trouble.clone(),
            }
        }
    }

    /// Sends a request and waits for its last reply. Forgets the request when it is interrupted,
    /// also by unwinding out of the waiter.
    pub fn call(
        &mut self,
        request: Request,
        waiter: &mut impl Waiter,
        deadline: Instant,
    ) -> Result<Reply, ClientError> {
        let id = self.begin(request)?;
        let pending = Pending { client: self, id };
        loop {
            while let Some(reply) = pending.client.take(id) {
                match reply {
                    Reply::Part { .. } => {}
                    Reply::Failed(failure) => return Err(ClientError::Failed(Box::new(failure))),
                    reply => return Ok(reply),
                }
            }
            pending.client.wait(waiter, deadline)?;
            pending.client.pump()?;
        }
    }

    #[cfg(test)]
    fn unanswered(&self) -> usize {
        self.live.len()
    }
}

struct Pending<'a> {
    client: &'a mut Client,
    id: RequestId,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.client.forget(self.id);
    }
}

enum Trouble {
    Retry(String),
    Version { theirs: u32, pid: u32 },
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Retry(error.to_string())
    }
}

impl From<FrameError> for Trouble {
    fn from(error: FrameError) -> Self {
        Self::Retry(error.to_string())
    }
}

impl Connection {
    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.outbound.len() {
            match self.stream.write(&self.outbound[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.outbound = Vec::new();
        self.sent = 0;
        Ok(())
    }

    /// Reads all that is there.
    fn fill(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; READ_STEP];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    self.inbound.push(&buffer[..n]);
                    if n < buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
