//! The shared on-disk segment cache as a backend sees it: mapped slabs and the mapped directory.
//!
//! The cache directory holds slab files, each a sequence of 1 MiB **regions**, and one `directory`
//! file. `polign-store` appends parts to an open region and publishes each in the directory as
//! (region, offset, length, generation). Evicting a region raises its generation, which makes all its
//! parts invalid at once. A reader uses a part's bytes where they lie and compares the generation
//! afterwards: if it changed, the bytes may have been anything, and what was read is dropped.
//!
//! The store process is the only writer of entries and slabs. Backends write two things: the access
//! counts by which the policy knows what is in use, and their share of the counters.
#![allow(unsafe_code)]

mod counters;
mod directory;
mod entry;
mod layout;
mod link;
mod map;
mod mapping;
pub mod sigbus;
mod source;
mod trusted;
mod upload;
mod writer;

pub use counters::{Counter, Counters};
pub use directory::{DirectoryMap, OpenError};
pub use entry::{Entry, MAX_ACCESS};
pub use layout::{
    DIRECTORY_NAME, Geometry, LAYOUT_VERSION, REGION_BYTES, REGIONS_PER_SLAB, SLAB_BYTES,
    SLOTS_PER_BUCKET, UPLOAD_DIRECTORY, slab_name,
};
pub use link::CacheLink;
pub use map::{CacheMap, Located};
pub use source::{CachedSource, SourceStats, Unfinished};
pub use upload::UploadFile;
pub use writer::{DirectoryWriter, RegionClass, RegionState, Slot};
