//! Frames on the Unix-domain socket between backends and `polign-store`, and the client side.
//!
//! A connection starts with one [`Hello`] and one [`HelloAck`], whose encoding never changes; the
//! client's [`Home`] follows its hello. After that each side sends [`Envelope`]s and [`Answer`]s. Every frame is a little-endian `u32` length
//! followed by that many bytes of postcard. A request is named by an id that its client chose; the
//! answers of several requests may interleave.

mod advice;
mod client;
mod frame;
mod home;
mod messages;
mod socket;
mod wait;

pub use advice::Advice;
pub use client::{Client, ClientError, ClientOptions, RequestId};
pub use frame::{FrameBuffer, FrameError, MAX_FRAME, MAX_OBJECT_BYTES, encode, encode_into};
pub use home::Home;
pub use messages::{
    Answer, Envelope, Failure, FailureKind, FetchPlan, FetchSummary, Hello, HelloAck, ListedObject,
    ListedUpload, ObjectParts, PROTOCOL_MAGIC, PROTOCOL_VERSION, PartOutcome, PartRange, Priority,
    Put, Reply, Request, UploadName,
};
pub use socket::{MAX_SOCKET_PATH, SOCKET_NAME, SocketPath, peer_is_same_user};
pub use wait::{Interest, Interrupted, PollWaiter, Waiter};
