//! The protocol holds in every interleaving of these schedules.

use polign_page_model::explore::{exhaustive, walks};
use polign_page_model::{Broken, Config, PageModel};

fn holds(config: Config) {
    let model = PageModel::new(config);
    let explored = exhaustive(&model, model.initial(), 1_500_000);
    println!("{} states, depth {}: {:?}", explored.states, explored.depth, model.config);
    if let Some(violation) = explored.violation {
        panic!("{violation}");
    }
}

fn base() -> Config {
    Config { tids: 2, page_rows: 1, ..Config::default() }
}

/// One row dies, its TID is given to a new one.
fn reuse() -> Config {
    Config { tids: 1, inserters: 1, inserts: 1, deletes: 1, vacuums: 1, ..base() }
}

#[test]
fn a_scan_beside_inserts_and_a_flush() {
    let config = Config { tids: 3, delta_rows: 1, flushers: 1, flushes: 1, ..base() };
    holds(Config { inserters: 2, inserts: 2, ..config.clone() });
    holds(Config { inserters: 1, inserts: 2, aborts: 1, scans: 1, ..config });
}

#[test]
fn a_reused_tid_beside_flushes() {
    let config = Config { delta_rows: 1, flushers: 1, flushes: 2, scans: 1, ..reuse() };
    holds(config.clone());
    holds(Config { avoid_freed: true, flushes: 1, ..config.clone() });
    holds(Config { flushers: 2, scans: 0, ..config });
}

#[test]
fn a_reused_tid_beside_compactions() {
    holds(Config { segment_rows: 1, scans: 1, compactions: 2, ..reuse() });
    holds(Config { tids: 2, segment_rows: 2, scans: 1, compactions: 1, ..reuse() });
    let config = Config { segment_rows: 1, delta_rows: 1, compactions: 2, scans: 1, ..base() };
    let config = Config { tids: 3, inserters: 1, inserts: 1, ..config };
    holds(Config { forget_successors: true, ..config });
}

#[test]
fn a_reused_tid_beside_flush_and_compaction() {
    let config = Config { tids: 2, delta_rows: 1, segment_rows: 1, compactions: 1, ..base() };
    let config = Config { flushers: 1, flushes: 1, ..config };
    holds(Config { deletes: 1, vacuums: 1, inserters: 1, inserts: 1, ..config.clone() });
    holds(Config { scans: 2, ..config });
}

#[test]
fn pages_unlinked_by_vacuum() {
    let config = Config { tids: 3, delta_rows: 1, inserters: 2, inserts: 2, ..reuse() };
    let config = Config { unlink: true, ..config };
    holds(config.clone());
    let config = Config { tids: 2, inserters: 1, deletes: 2, vacuums: 2, scans: 1, ..config };
    holds(config.clone());
    holds(Config { deletes: 1, vacuums: 1, flushers: 1, flushes: 1, scans: 0, ..config });
}

#[test]
fn scans_that_keep_delta_and_tombstones() {
    let config = Config { cache: true, scans: 2, vacuum_errors: 1, ..reuse() };
    holds(Config { vacuums: 2, segment_rows: 1, ..config.clone() });
    holds(Config { vacuums: 2, delta_rows: 1, ..config.clone() });
    let config = Config { tids: 2, delta_rows: 1, inserts: 2, vacuum_errors: 0, ..config };
    holds(Config { unlink: true, ..config });
}

#[test]
fn a_standby() {
    let config = Config { coarse: true, standby: true, standby_scans: 1, ..reuse() };
    holds(Config { delta_rows: 1, flushers: 1, flushes: 1, ..config.clone() });
    holds(Config { tids: 2, segment_rows: 2, compactions: 1, ..config.clone() });
    holds(Config { delta_rows: 1, cache: true, standby_scans: 2, ..config.clone() });
    holds(Config { tids: 2, delta_rows: 1, inserts: 2, unlink: true, ..config });
}

#[test]
fn a_crash_after_any_record() {
    let config = Config { crashes: 1, ..reuse() };
    holds(Config { delta_rows: 1, flushers: 1, flushes: 1, ..config.clone() });
    holds(Config { segment_rows: 1, compactions: 1, ..config.clone() });
    holds(Config { tids: 2, delta_rows: 1, inserts: 2, unlink: true, ..config });
}

#[test]
fn collected_objects() {
    let config = Config { tids: 2, segment_rows: 1, delta_rows: 1, gc: true, ..base() };
    let config = Config { compactions: 2, flushers: 1, flushes: 1, scans: 1, ..config };
    holds(Config { crashes: 1, compactions: 1, ..config.clone() });
    holds(Config { compactions: 1, ..config.clone() });
    let config = Config { delta_rows: 0, flushes: 0, scans: 0, ..config };
    holds(Config { standby: true, standby_scans: 1, ..config });
}

/// Readers check stamps because a standby must; then the horizon only saves them from starting again.
#[test]
fn stamps_suffice_without_the_horizon() {
    let broken = Some(Broken::NoHorizon);
    let config = Config { delta_rows: 1, flushers: 1, flushes: 1, scans: 1, broken, ..reuse() };
    holds(config);
    let config = Config { tids: 2, segment_rows: 2, scans: 1, compactions: 1, broken, ..reuse() };
    holds(config);
}

/// Pages that are still what their links mean are pages of one state: copied, appended to or flagged
/// dead, never rewritten. So a second read of meta only notices a change sooner.
#[test]
fn stamps_suffice_without_a_second_read_of_meta() {
    let broken = Some(Broken::NoSecondMeta);
    let config = Config { delta_rows: 1, flushers: 1, flushes: 1, scans: 1, broken, ..reuse() };
    holds(config);
    let config = Config { tids: 2, segment_rows: 2, scans: 1, compactions: 1, broken, ..reuse() };
    holds(config);
    let config = Config { coarse: true, standby: true, standby_scans: 1, broken, ..reuse() };
    holds(Config { delta_rows: 1, flushers: 1, flushes: 1, ..config });
}

/// Everything at once, too much to exhaust.
#[test]
fn long_random_schedules() {
    let config = Config {
        tids: 4,
        delta_rows: 2,
        segment_rows: 2,
        inserters: 2,
        inserts: 6,
        deletes: 5,
        aborts: 1,
        vacuums: 4,
        vacuum_errors: 1,
        cache: true,
        flushers: 2,
        flushes: 4,
        compactions: 3,
        scans: 5,
        standby: true,
        standby_scans: 5,
        crashes: 2,
        gc: true,
        unlink: true,
        page_rows: 2,
        ..Config::default()
    };
    let model = PageModel::new(config);
    let found = walks(&model, &model.initial(), 0x5eed, 3_000, 400);
    if let Some(violation) = found {
        panic!("{violation}");
    }
}
