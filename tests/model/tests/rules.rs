//! Each rule is needed: without it the checker finds a schedule that goes wrong, with it the same
//! schedule passes.

use polign_page_model::explore::exhaustive;
use polign_page_model::{Broken, Config, PageModel};

fn needed(broken: Broken, invariant: &str, config: Config) {
    let model = PageModel::new(config.clone());
    let explored = exhaustive(&model, model.initial(), 1_000_000);
    if let Some(violation) = explored.violation {
        panic!("with the rule: {violation}");
    }
    println!("{broken:?}: {} states pass", explored.states);
    let model = PageModel::new(Config { broken: Some(broken), ..config });
    let explored = exhaustive(&model, model.initial(), 1_000_000);
    let Some(violation) = explored.violation else {
        panic!("{broken:?}: nothing found in {} states", explored.states);
    };
    println!("{broken:?}: {violation}");
    assert!(violation.rule.contains(invariant), "{broken:?} broke something else: {violation}");
}

fn base() -> Config {
    Config { tids: 2, page_rows: 1, ..Config::default() }
}

fn reuse() -> Config {
    Config { tids: 1, inserters: 1, inserts: 1, deletes: 1, vacuums: 1, ..base() }
}

fn insert_and_flush() -> Config {
    Config { inserters: 1, inserts: 1, flushers: 1, flushes: 1, ..base() }
}

#[test]
fn publishing_rereads_dead_marks() {
    let config = Config { delta_rows: 1, flushers: 1, flushes: 1, ..reuse() };
    needed(Broken::FlushKeepsOldDeadMarks, "I2", config);
    let config = Config { segment_rows: 1, compactions: 1, ..reuse() };
    needed(Broken::CompactionKeepsOldTombstones, "I2", config);
}

#[test]
fn a_flush_moves_every_row() {
    needed(Broken::FlushJudgesVisibility, "I1", insert_and_flush());
}

#[test]
fn a_flush_seals() {
    needed(Broken::NoSeal, "I1", Config { delta_rows: 1, ..insert_and_flush() });
}

#[test]
fn an_entry_goes_where_its_vector_is() {
    needed(Broken::VectorOfOtherPage, "I4", Config { delta_rows: 1, ..insert_and_flush() });
}

#[test]
fn the_vector_comes_before_the_entry() {
    needed(
        Broken::EntryBeforeVector,
        "I4",
        Config { inserters: 1, inserts: 1, crashes: 1, ..base() },
    );
}

#[test]
fn publishing_checks_its_sources() {
    let config = Config { delta_rows: 1, flushers: 2, flushes: 2, ..base() };
    needed(Broken::SourcesUnchecked, "I1", config);
}

#[test]
fn publishing_waits_for_vacuum() {
    let config = Config { delta_rows: 1, flushers: 1, flushes: 1, ..reuse() };
    needed(Broken::NoLayoutLock, "I2", config);
}

#[test]
fn meta_is_changed_last() {
    let config = Config { delta_rows: 1, flushers: 1, flushes: 1, ..base() };
    needed(Broken::MetaBeforePage, "I4", config.clone());
    needed(Broken::MetaBeforeUpload, "I4", config.clone());
    needed(Broken::FreeBeforePublish, "I4", config);
}

#[test]
fn a_vector_page_is_freed_with_its_code_page() {
    let config = Config { tids: 2, inserters: 1, inserts: 1, ..base() };
    needed(Broken::FreeUnreferencedVectors, "I4", config);
}

#[test]
fn vacuum_reads_every_segment() {
    needed(Broken::VacuumSkipsSegment, "I2", Config { segment_rows: 1, ..reuse() });
}

#[test]
fn a_standby_needs_stamps() {
    let config = Config { delta_rows: 1, coarse: true, ..insert_and_flush() };
    let config = Config { standby: true, standby_scans: 1, ..config };
    needed(Broken::SameStamp, "I", config.clone());
    needed(Broken::NoStampCheck, "I", config);
}

#[test]
fn without_stamps_the_primary_needs_the_horizon() {
    let config = Config { delta_rows: 1, scans: 1, ..insert_and_flush() };
    needed(Broken::NoStampCheckNoHorizon, "I", config);
}

#[test]
fn tombstones_are_read_before_the_scan_can_no_longer_start_again() {
    let config = Config { segment_rows: 1, compactions: 1, scans: 1, ..reuse() };
    let config = Config { avoid_freed: true, ..config };
    needed(Broken::TombstonesAfterMeta, "I2", config);
}

#[test]
fn kept_copies_are_checked() {
    let config = Config { cache: true, scans: 2, ..reuse() };
    let segment = Config { segment_rows: 1, ..config.clone() };
    needed(Broken::CacheIgnoresMarks, "I2", segment.clone());
    needed(Broken::MarksToldBefore, "I2", segment.clone());
    let failing = Config { vacuums: 2, vacuum_errors: 1, ..segment };
    needed(Broken::MarksToldIfNew, "I2", failing);
    // The failed pass has unlinked the page with the marks, so that the next one sees none.
    let unlinking = Config { tids: 2, delta_rows: 1, inserts: 2, unlink: true, ..config.clone() };
    let unlinking = Config { vacuums: 2, vacuum_errors: 1, coarse: true, ..unlinking };
    needed(Broken::MarksToldIfSeen, "I2", unlinking);
    let config = Config { tids: 2, delta_rows: 1, deletes: 0, ..config };
    needed(Broken::CacheKeepsLastPage, "I1", config);
}

#[test]
fn a_scan_walks_past_the_hint() {
    let config = Config { tids: 3, delta_rows: 1, inserters: 2, inserts: 2, scans: 1, ..base() };
    needed(Broken::HintEndsChain, "I1", config);
}

#[test]
fn a_row_of_a_split_cell_is_scored_once() {
    let config = Config { delta_rows: 1, segment_rows: 1, compactions: 1, scans: 1, ..base() };
    needed(Broken::UnknownCellDropped, "I1", config.clone());
    needed(Broken::EverySuccessor, "I1", config);
}

#[test]
fn collection_waits_for_every_reader() {
    let config = Config { segment_rows: 1, compactions: 1, gc: true, ..base() };
    needed(Broken::GcIgnoresScans, "I4", Config { scans: 1, ..config.clone() });
    needed(Broken::GcIgnoresStandby, "I4", Config { standby: true, ..config.clone() });
    needed(Broken::GcIgnoresFlush, "I4", Config { crashes: 1, ..config });
}
