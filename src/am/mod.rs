//! The access method `polign_ivf`, one file per group of callbacks.

pub mod build;
pub mod cost;
mod handler;
mod heap_order;
pub mod insert;
pub mod last_scan;
mod lookahead;
pub mod opclass;
pub mod options;
pub mod root_cache;
mod row;
mod scan;
pub mod search_params;
pub mod vacuum;
mod validate;
