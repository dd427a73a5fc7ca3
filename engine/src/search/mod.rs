//! Search: a resumable stream of rows ordered by a lower bound of their distance.
//!
//! [`Stream`] ranks the cells, scans the codes of the nearest into flat columns, refines the rows that
//! may be among the best, and returns them one by one; as more rows are asked for it opens more cells.

mod candidate;
mod columns;
mod environment;
mod exact;
mod frontier;
mod params;
mod ranking;
mod rows;
mod scan;
mod stream;
mod survivors;

pub use environment::Environment;
pub use params::{Depth, Order, SearchParams};
pub use ranking::{RankedCell, Ranking};
pub use rows::{DeltaRecord, DeltaRows, DeltaScores, NoDelta, NoTombstones, Tombstones};
pub use stream::{Hit, SearchStats, Stream};
