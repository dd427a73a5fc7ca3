//! The root: models, centroids, cell directory, segment table, recall curves.
//!
//! Everything that a query must know before it asks the store for parts. It is kept as *sections*,
//! opaque to those who store them: pages of the index relation, a mapped cache file, or a published
//! object ([`image`]). [`RootBuilder`] makes the sections, [`Root`] checks and reads them, [`RootEdit`]
//! makes those of the next version.

pub mod builder;
mod cell_stats;
mod check;
pub mod curves;
pub mod edit;
pub mod image;
pub mod models;
pub mod reader;
pub mod record;
pub mod section;

pub use builder::RootBuilder;
pub use cell_stats::CellStats;
pub use curves::{Curve, CurvePoint, Curves, Estimate, FittedTo};
pub use edit::RootEdit;
pub use image::Image;
pub use reader::Root;
pub use record::{Cell, CellRange, Reference};
pub use section::{RootError, SectionKey, SectionKind};
