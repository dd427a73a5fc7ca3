//! k-means: training cells, assigning rows to them, splitting and ordering them.
//!
//! All rows are in model space (see `quantize`): rotated, minus the global mean, and for cosine made
//! from vectors of unit length. Rows are row-major f32, `dim` components each, and finite.
//!
//! Every result depends on its inputs and the seed alone, never on the number of threads. Threads
//! are used only through the pool that the caller gives. Long functions ask `interrupted` every few
//! milliseconds and then return [`Interrupted`].

mod assign;
mod centroids;
mod distinct;
mod kmeans;
mod lloyd;
mod norm_space;
mod order;
mod parallel;
pub(crate) mod rng;
mod sizes;
mod space;
mod split;
#[cfg(test)]
mod tests;

pub use assign::Assigner;
pub use centroids::{Centroids, spread};
pub use kmeans::{Params, kmeans};
pub use norm_space::norm_distance2;
pub use order::order_cells;
pub use sizes::{CELL_ROWS, default_lists, sample_rows, trained_lists};
pub use split::split;

/// Asked now and then by long functions; true ends them with [`Interrupted`]. It is called from the
/// pool's threads, so it must not call Postgres: a load of an atomic flag, as a rule.
pub type Interrupt<'a> = &'a (dyn Fn() -> bool + Sync);

/// The caller asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;
