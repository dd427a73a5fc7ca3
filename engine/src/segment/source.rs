//! How a search gets parts: asked for in one request, used while they may be refilled under the reader.

use std::{any::Any, rc::Rc, time::Duration};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::key::{PartKey, PartRef, SegmentName};
use crate::{kernel::RacyBytes, protocol::FailureKind};

/// Why a part could not be had. Carries what an error message to the user must name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum SourceError {
    /// The wait was interrupted: the query was cancelled or timed out, or the server shuts down.
    #[error("interrupted while waiting for the store")]
    Interrupted,
    /// The store did not give the object within the fetch timeout, or refused to.
    #[error("could not read \"{object}\" from store \"{store}\": {cause}")]
    Store {
        /// Key of the object.
        object: String,
        /// The store's effective URL.
        store: String,
        /// What kind of failure it was.
        kind: FailureKind,
        /// The store's error code, if it gave one (`AccessDenied`, `SlowDown`, ...).
        code: Option<String>,
        /// What went wrong, without secrets.
        cause: String,
        /// How long was tried.
        after: Duration,
    },
    /// The store has no such object.
    #[error("object \"{object}\" is missing in store \"{store}\"")]
    Missing {
        /// Key of the object.
        object: String,
        /// The store's effective URL.
        store: String,
    },
    /// The object is missing, and the store is not the one that the index was built on.
    #[error(
        "object \"{object}\" is missing in store \"{store}\", which is not the store that the index \
         was built on (\"{recorded}\")"
    )]
    WrongStore {
        /// Key of the object.
        object: String,
        /// The URL in use.
        store: String,
        /// The URL recorded in the index.
        recorded: String,
    },
    /// The object was read twice and is not what was written.
    #[error("object \"{object}\" in store \"{store}\" is damaged: {part}: {cause}")]
    Damaged {
        /// Key of the object.
        object: String,
        /// The store's effective URL.
        store: String,
        /// The part.
        part: PartKey,
        /// What is wrong with it.
        cause: String,
    },
    /// There is no `polign-store` process to ask.
    #[error("polign-store cannot be reached: {cause}")]
    Unavailable {
        /// What went wrong.
        cause: String,
    },
}

/// A part that is wanted, and the object to fetch it from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want<'a> {
    /// The object.
    pub object: &'a SegmentName,
    /// The part: `part.key.object` is `object.object`.
    pub part: PartRef,
}

/// The payload of a part for as long as the view lives.
///
/// Nothing about its contents may be relied on before [`PartSource::still_valid`] said that they were
/// stable; lengths and indexes read from it are copied first and checked then.
#[derive(Debug, Clone)]
pub struct PartView {
    memory: Memory,
    token: u64,
    faults: u64,
}

#[derive(Debug, Clone)]
enum Memory {
    Private(Bytes),
    Shared { payload: RacyBytes<'static>, owner: Rc<dyn Any> },
}

impl PartView {
    /// A view of private bytes, which nobody changes. `token` is the source's own.
    pub fn private(payload: Bytes, token: u64) -> Self {
        Self { memory: Memory::Private(payload), token, faults: 0 }
    }

    /// A view of memory that another process may rewrite. `owner` keeps it mapped: the lifetime of
    /// `payload` is promised to end with it, and is never handed out. `faults`: how many faults the
    /// mapping had when the view was made.
    pub fn shared(
        payload: RacyBytes<'static>,
        owner: Rc<dyn Any>,
        token: u64,
        faults: u64,
    ) -> Self {
        Self { memory: Memory::Shared { payload, owner }, token, faults }
    }

    /// The payload.
    #[inline]
    pub fn bytes(&self) -> RacyBytes<'_> {
        match &self.memory {
            Memory::Private(payload) => RacyBytes::new(payload),
            Memory::Shared { payload, .. } => *payload,
        }
    }

    /// Whether the bytes are private, so that they are valid whatever happens to the cache.
    pub fn is_private(&self) -> bool {
        matches!(self.memory, Memory::Private(_))
    }

    /// Whether the view is of memory that `owner` keeps mapped.
    pub fn is_kept_by<T>(&self, owner: &Rc<T>) -> bool {
        match &self.memory {
            Memory::Private(_) => false,
            Memory::Shared { owner: kept, .. } => {
                std::ptr::addr_eq(Rc::as_ptr(kept), Rc::as_ptr(owner))
            }
        }
    }

    /// Faults of the mapping before the view was made: after one more, its bytes may be zeros.
    pub fn faults(&self) -> u64 {
        self.faults
    }

    /// What the source needs to tell whether the bytes were stable.
    pub fn token(&self) -> u64 {
        self.token
    }
}

/// Gives parts of segments to one search at a time.
pub trait PartSource {
    /// Asks for these parts in one request, without waiting; the first ones are the most urgent.
    /// Parts that are present already may be among them and cost next to nothing. Errors appear when
    /// a part is acquired.
    fn request(&mut self, wants: &[Want<'_>]);

    /// The store's effective URL, for messages.
    fn store(&self) -> &str;

    /// Looks whether the search was interrupted. Called every few hundred microseconds of computation:
    /// over a warm cache nothing else waits.
    fn check_interrupts(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    /// Whether the part is present now. Unlike [`PartSource::try_acquire`] this counts nothing.
    fn contains(&mut self, part: &PartRef) -> bool;

    /// The part if it is present now (then it counts as a hit).
    fn try_acquire(&mut self, part: &PartRef) -> Option<PartView>;

    /// Waits, interruptibly, until the part is present. Works without an earlier request too.
    fn acquire(&mut self, want: Want<'_>) -> Result<PartView, SourceError> {
        self.acquire_first(want, &[])
    }

    /// Like [`PartSource::acquire`], for one who asked for a run of parts of which `rest` is still to be
    /// read: if this part was lost meanwhile, what is missing of the rest is asked for with it, and will
    /// not be lost again.
    fn acquire_first(&mut self, want: Want<'_>, rest: &[Want<'_>])
    -> Result<PartView, SourceError>;

    /// Whether the bytes behind the view were stable from its acquisition until now. If not: drop what
    /// was read and acquire again. After two losses in a row the source gives private bytes.
    fn still_valid(&mut self, view: &PartView) -> bool;
}
