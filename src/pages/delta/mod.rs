//! The delta: rows that are not in the store yet.
//!
//! A chain of code pages, each with vector pages of its own that hold the refinement records of its
//! entries. One WAL record adds a row (code entry and refinement record), so a row is there wholly or
//! not at all, and no page is ever in an inserter's hands unpublished. Only the last page of the chain
//! takes entries; behind it pages change in their dead flags only.

pub mod flush;
pub mod insert;
pub mod record;
pub mod rows;
pub mod vacuum;
pub mod view;
