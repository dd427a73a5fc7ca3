//! Indexes that change after their build: flushes, deletions and compactions, compared with exact search.

mod compact;
mod first;
mod flush;
mod histories;
mod recalibrate;
mod trouble;
mod world;
