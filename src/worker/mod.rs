//! Background workers.

mod child;
pub mod config;
mod instance_lock;
pub mod maintenance;
pub mod register;
mod report;
mod supervisor;
