//! Which ranges of an object are read by one GET: chosen for each request of a search, carried out by
//! `polign-store`.

mod budget;
mod merge;

pub use budget::GetBudget;
pub use merge::{GAP, MERGED_BYTES, Merged, merge};
