//! The segment format: immutable objects of many neighbouring cells, stored by column and read by part.
//!
//! ```text
//! header | plane 1, cell by cell | ids | plane 2 | rows (optional) | footer
//! ```
//!
//! Every box is one or more [parts](part): self-verifying byte ranges, which are the unit of fetching,
//! caching and checking. [`geometry`] computes where each part lies, [`writer`] streams an object,
//! [`reader`] checks a whole one, and [`source`] is how a search gets single parts.

pub mod geometry;
pub mod key;
pub mod layout;
pub mod memory;
pub mod part;
pub mod reader;
pub mod record;
pub mod source;
pub mod writer;

pub use geometry::{LayoutError, Packing, Plane1Part, RowPlane, SegmentGeometry, Shape};
pub use key::{PartKey, PartKind, PartRef, SegmentName, shard_prefix};
pub use layout::{CellSpec, SegmentLayout, SegmentSpec};
pub use memory::MemorySource;
pub use part::PartError;
pub use reader::{SegmentError, SegmentReader};
pub use record::{Piece, SegmentCell, SegmentEntry, SlotRef};
pub use source::{PartSource, PartView, SourceError, Want};
pub use writer::{SegmentWriter, WriteError, WrittenSegment};
