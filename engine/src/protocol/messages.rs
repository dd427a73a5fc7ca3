use serde::{Deserialize, Serialize};

use crate::ObjectId;

/// The first word of both hello frames.
pub const PROTOCOL_MAGIC: u32 = u32::from_le_bytes(*b"PLGN");
/// Raised when a message changes its meaning or encoding.
pub const PROTOCOL_VERSION: u32 = 3;

/// The client's first frame. Its encoding is the same in every protocol version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub magic: u32,
    pub version: u32,
    pub pid: u32,
    /// Names the build of the client's library, for the log.
    pub build: String,
}

/// The server's first frame. Its encoding is the same in every protocol version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAck {
    pub magic: u32,
    pub version: u32,
    pub pid: u32,
    pub build: String,
    /// The id in the header of the mapped cache directory, [`ObjectId::NIL`] if nothing is cached.
    pub cache: ObjectId,
}

/// What a request is for; a larger one is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Priority {
    Gc,
    Build,
    Prefetch,
    Query,
}

/// A part of an object: its index in the object and its byte range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PartRange {
    pub index: u32,
    pub len: u32,
    pub offset: u64,
}

/// Parts of one object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectParts {
    /// The object's key below the store's URL.
    pub key: String,
    pub object: ObjectId,
    pub parts: Vec<PartRange>,
}

/// Which parts to bring, in order of importance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchPlan {
    /// The store's URL.
    pub store: String,
    pub objects: Vec<ObjectParts>,
    pub priority: Priority,
    /// Answer with the bytes instead of publishing in the cache and saying so.
    pub want_bytes: bool,
    /// Distrust the cached copy: drop it and read the object again.
    pub fresh: bool,
    /// Ranges of one object that lie at most so many bytes apart are read by one GET.
    pub gap: u32,
}

/// A local file to be uploaded, and then deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Put {
    pub store: String,
    pub key: String,
    pub object: ObjectId,
    /// Name of the file in the cache directory's `upload/`.
    pub file: String,
    /// Leave the parts of the object in the cache.
    pub ingest: bool,
    pub priority: Priority,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Answered by one [`Reply::Part`] for each part, as they complete, then [`Reply::FetchDone`].
    Fetch(FetchPlan),
    /// Brings parts into the cache and answers [`Reply::FetchDone`] only. The first failure ends it.
    Prewarm(FetchPlan),
    /// Raises the priority of a request in flight. Not answered.
    Raise {
        target: u64,
        priority: Priority,
    },
    /// The client no longer waits for this request. Not answered.
    Cancel {
        target: u64,
    },
    Put(Put),
    /// Stores a small object. With `if_absent`, an object that is there already with the same bytes
    /// is a success, and one with other bytes a [`FailureKind::Exists`].
    PutBytes {
        store: String,
        key: String,
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
        if_absent: bool,
        priority: Priority,
    },
    /// Reads a small object whole, past the cache.
    GetBytes {
        store: String,
        key: String,
        priority: Priority,
    },
    /// Deletes objects; one that is not there counts as deleted.
    Delete {
        store: String,
        keys: Vec<String>,
    },
    /// Lists keys under a prefix in order, at most `limit` of them after `after`.
    List {
        store: String,
        prefix: String,
        after: Option<String>,
        limit: u32,
    },
    /// Lists uploads under a prefix that were begun and not finished, in the store's order, at most `limit` of them
    /// after `after`.
    ListUploads {
        store: String,
        prefix: String,
        after: Option<UploadName>,
        limit: u32,
    },
    /// Ends uploads, and deletes what has come of them; one that is not there counts as ended.
    AbortUploads {
        store: String,
        uploads: Vec<UploadName>,
    },
    /// Drops every part from the cache. What is on its way for earlier requests is handed to them and
    /// not kept.
    ClearCache,
    /// Reads parts from the store, past the cache and without a trace in it, compares their checksums and
    /// answers [`Reply::FetchDone`] only. The first failure ends it.
    Check(FetchPlan),
}

/// A request and the id that its answers will carry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    pub id: u64,
    pub request: Request,
}

/// An answer and the id of its request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub id: u64,
    pub reply: Reply,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// One part of a fetch; more replies follow.
    Part {
        object: ObjectId,
        index: u32,
        outcome: PartOutcome,
    },
    /// The fetch is complete.
    FetchDone(FetchSummary),
    Done,
    Bytes(#[serde(with = "serde_bytes")] Vec<u8>),
    Listed {
        objects: Vec<ListedObject>,
        /// Whether more keys follow the last one.
        more: bool,
        /// The store's clock in milliseconds since 1970, if it told.
        store_now_ms: Option<i64>,
    },
    Uploads {
        uploads: Vec<ListedUpload>,
        /// Whether more follow the last one.
        more: bool,
    },
    Failed(Failure),
}

impl Reply {
    /// Whether no further reply of the same request follows.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Part { .. })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartOutcome {
    /// The part is in the cache directory.
    Published,
    /// The part's bytes: asked for, or the cache cannot hold it.
    Bytes(#[serde(with = "serde_bytes")] Vec<u8>),
    Failed(Failure),
}

/// The requests to the object store that a fetch caused; those that it shared with an earlier
/// fetch are not counted again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchSummary {
    pub gets: u32,
    pub bytes: u64,
    pub micros: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedObject {
    pub key: String,
    pub len: u64,
    /// By the store's clock, milliseconds since 1970.
    pub modified_ms: i64,
}

/// Names an upload that is not finished: there may be several of one key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UploadName {
    pub key: String,
    /// The store's own name for it.
    pub id: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedUpload {
    pub name: UploadName,
    /// Bytes that have come so far.
    pub len: u64,
    /// When it was begun, by the store's clock, milliseconds since 1970.
    pub begun_ms: i64,
}

/// Why a request failed, so that a caller can choose its error code without reading the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FailureKind {
    /// Network errors, server errors and time-outs that outlasted the retries.
    Unreachable,
    /// Credentials are missing, wrong or expired.
    Credentials,
    /// The credentials are good and do not permit this.
    Denied,
    /// The request's signature is off because a clock is.
    ClockSkew,
    NotFound,
    /// The object's bytes are not what was written.
    Damaged,
    /// The object is there already with other content.
    Exists,
    /// A URL, key or setting that cannot work.
    Invalid,
    /// The local disk: an upload file that cannot be read, say.
    Local,
    Internal,
    /// The store process serves another cluster.
    InUse,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub kind: FailureKind,
    /// The store's own error code, such as `SlowDown`; empty if it gave none.
    pub code: String,
    /// One line without the object and store, which have their own fields.
    pub message: String,
    /// Further lines: the cause, attempts made. Never a secret.
    pub detail: String,
    /// The object's key, empty if the failure is not about one.
    pub object: String,
    /// The store's effective URL.
    pub url: String,
}
