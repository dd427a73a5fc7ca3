//! The SQL functions of schema `polign`, one file per function or view.

mod cache;
mod gc;
mod index_info;
mod last_scan;
mod maintain;
mod recall;
mod recall_curve;
mod stat_cache;
pub mod target;
mod verify;
mod version;
