//! The pages of an index relation: reading them consistently and changing them by generic WAL records.
//!
//! The formats are in the crate `polign-pages`, the protocol in `docs/decisions/0004-page-protocol.md`.
//! The rules that every function here keeps:
//!
//! * A page is read by copying what is needed under a share lock; nothing is interpreted, called back or
//!   waited for while a content lock is held, except by the record that changes the page.
//! * A record is started before the first content lock. Locks are taken in this order: meta, tombstones,
//!   codes along the chain, vectors, pending, retired. A page that is about to be reused is only ever
//!   locked conditionally.
//! * Heavyweight locks come before content locks.

pub mod blob;
pub mod delta;
pub mod free;
mod lock;
pub mod meta;
pub mod objects;
pub mod publish;
mod record;
pub mod relation;
pub mod snapshot;
mod steps;
pub mod sweep;
pub mod tombstones;

pub use lock::{LayoutLock, LayoutMode, MaintenanceLock};
pub use relation::{Access, Index};
pub use steps::{Here, Steps};
