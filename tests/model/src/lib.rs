//! A model of the page protocol (docs/decisions/0004-page-protocol.md): pages, log, heap, readers and
//! writers at the granularity of WAL records and page reads, explored in every order.
//!
//! The model is worth something only if it finds real faults, so each rule of the protocol has a
//! [`Broken`] twin that leaves it out, and the tests assert that the checker notices.

pub mod db;
pub mod explore;
mod insert;
pub mod ownership;
mod publish;
mod scan;
mod vacuum;
pub mod world;

pub use world::{Broken, Config, PageModel, World};
