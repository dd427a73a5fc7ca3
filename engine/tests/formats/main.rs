//! The segment and root formats: golden files, round trips, and mutating fuzzers for every reader.

mod cell_stats;
mod fixture;
mod fuzz;
mod golden;
mod root_checks;
mod root_edit;
mod segments;
mod sources;
