//! What happens to an index after its build: rows of the delta become segments.
//!
//! A *flush* ([`write_delta_segment`]) writes rows as one more segment, in the order of the cells; that of an
//! index without segments first finds cells for them ([`first_cells`]). A *compaction* ([`plan`], [`Compaction`])
//! brings flushed rows to those of their cells and drops dead ones; when an index has grown, recall is calibrated
//! anew ([`Recalibration`]). Nothing here publishes: the results are new objects and, by [`crate::root::RootEdit`], the sections of the next
//! root. Only one flush or compaction of an index runs at a time, so that root is still the one that it
//! was made from.

mod compact;
mod delta_segment;
mod fetch;
mod first;
mod flush;
mod job;
mod place;
mod plan;
mod policy;
mod reassign;
mod recalibrate;
mod rework;
mod runs;
mod train;

pub use compact::{
    CompactedSegment, Compaction, CompactionStats, EncodedJob, Outcome, SegmentSink, SegmentWrite,
};
pub use first::{FirstCells, first_cells};
pub use flush::{DeltaBatch, DeltaSegment, FlushError, write_delta_segment};
pub use job::{Job, Origin};
pub use plan::{Plan, plan};
pub use policy::Policy;
pub use recalibrate::{CalibrationRows, Recalibration, is_calibration_due};
pub use runs::delta_runs;
