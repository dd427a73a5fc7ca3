//! Moving rows from the delta into segments, and keeping segments in shape.
//!
//! All of it may run in the transaction of whoever asked (VACUUM, the owner of a temporary table) or in
//! a background worker, in short transactions with none in between: see [`crate::pages::Steps`]. One process at a time
//! maintains an index: who calls [`flush::flush`], [`compact::compact`]
//! or [`calibrate::calibrate_if_due`] holds its maintenance lock.

pub mod advice;
pub mod calibrate;
pub mod compact;
pub mod due;
pub mod flush;
pub mod task;
pub mod transactions;
