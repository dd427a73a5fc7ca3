//! What the planner is told.
//!
//! Planning reads no page and raises nothing: what it needs about an index beyond the row count is what
//! this backend's scans have noted, or a model of an index with default settings. So hypothetical,
//! empty and damaged indexes cost by the model.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
};

use pgrx::{pg_guard, pg_sys};
use polign_engine::cluster::default_lists;

use crate::guc;

/// What a scan knows about its index and the planner cannot ask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IndexFacts {
    pub lists: u32,
    /// Cells that a search for ten rows opens at the settings of the session.
    pub nprobe: u32,
    pub padded_dim: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Noted {
    facts: Option<IndexFacts>,
    limit: Option<u32>,
}

/// More indexes than this in one backend: forget them all rather than grow.
const MAX_NOTED: usize = 1024;
/// Longest LIMIT that is worth a larger batch.
const MAX_LIMIT_HINT: f64 = 100_000.0;

thread_local! {
    static NOTED: RefCell<HashMap<pg_sys::Oid, Noted>> = RefCell::new(HashMap::new());
    static PREFERRED: Cell<Option<pg_sys::Oid>> = const { Cell::new(None) };
}

/// While it lives, one index costs nothing and the others of this access method all there is.
pub struct Preference(());

impl Preference {
    pub fn of(index: pg_sys::Oid) -> Self {
        PREFERRED.set(Some(index));
        Self(())
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        PREFERRED.set(None);
    }
}

fn note(index: pg_sys::Oid, change: impl FnOnce(&mut Noted)) {
    NOTED.with_borrow_mut(|noted| {
        if noted.len() >= MAX_NOTED && !noted.contains_key(&index) {
            noted.clear();
        }
        change(noted.entry(index).or_default());
    });
}

fn noted(index: pg_sys::Oid) -> Noted {
    NOTED.with_borrow(|noted| noted.get(&index).copied().unwrap_or_default())
}

/// Notes what a scan found out, for the next plan.
pub fn note_facts(index: pg_sys::Oid, facts: IndexFacts) {
    note(index, |noted| noted.facts = Some(facts));
}

/// The LIMIT (and OFFSET) of the last plan that this backend made with the index, if it had one. The
/// plan that is being executed may be another: the hint may set the size of batches, never the result.
pub fn limit_hint(index: pg_sys::Oid) -> Option<u32> {
    noted(index).limit
}

/// Costs of a scan, in the planner's units.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Costs {
    /// Until the first row.
    startup: f64,
    /// Until the last row of the index.
    total: f64,
}

/// The planner's own unit costs.
#[derive(Debug, Clone, Copy)]
struct Units {
    operator: f64,
    index_tuple: f64,
    random_page: f64,
}

/// Padded dimensions that an unknown index is taken to have.
const TYPICAL_DIM: f64 = 384.0;
/// Scanning the code of a row of [`TYPICAL_DIM`] dimensions, in units of an operator.
const CODE: f64 = 0.1;
/// Refining a row, likewise.
const REFINE: f64 = 4.0;
/// Ranking a cell, likewise.
const RANK: f64 = 0.2;
/// Part of the opened cells that is expected to be missing from the cache, and what a fetch costs in
/// units of a random page. A warm cache is what the planner should bet on: where it is cold, reading
/// the whole table is hardly cheaper.
const MISSING: f64 = 0.05;
const FETCH: f64 = 4.0;

fn costs(rows: f64, lists: f64, codes: f64, dim: f64, units: Units) -> Costs {
    let wide = dim / TYPICAL_DIM;
    let cells = (codes / (rows / lists).max(1.0)).clamp(1.0, lists);
    let startup = lists * RANK * wide * units.operator
        + codes * CODE * wide * units.operator
        + cells * MISSING * FETCH * units.random_page;
    // Every row: all cells are opened, all of plane 2 is read, and rows pass through two heaps.
    let plane2_pages = rows * (dim + 16.0) / f64::from(pg_sys::BLCKSZ);
    let sorting = 4.0 * units.operator * rows * rows.max(2.0).log2();
    let total = startup
        + rows * (units.index_tuple + (CODE + REFINE) * wide * units.operator)
        + sorting
        + plane2_pages * units.random_page;
    Costs { startup, total }
}

/// Postgres' estimate of a scan of the index.
#[pg_guard]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C-unwind" fn amcostestimate(
    root: *mut pg_sys::PlannerInfo,
    path: *mut pg_sys::IndexPath,
    _loop_count: f64,
    startup_cost: *mut pg_sys::Cost,
    total_cost: *mut pg_sys::Cost,
    selectivity: *mut pg_sys::Selectivity,
    correlation: *mut f64,
    pages: *mut f64,
) {
    // SAFETY: the planner passes valid nodes and pointers to its own variables.
    unsafe {
        let info = (*path).indexinfo;
        *selectivity = 1.0;
        *correlation = 0.0;
        *pages = f64::from((*info).pages);
        if (*path).indexorderbys.is_null() {
            // Without an order the index has nothing to say about which rows are wanted.
            *startup_cost = f64::INFINITY;
            *total_cost = f64::INFINITY;
            #[cfg(feature = "pg18")]
            {
                (*path).path.disabled_nodes = 2;
            }
            return;
        }
        let index = (*info).indexoid;
        let limit = (*root).limit_tuples;
        if !(*info).hypothetical {
            let hint = (limit > 0.0).then_some(limit.min(MAX_LIMIT_HINT) as u32);
            note(index, |noted| noted.limit = hint);
        }
        let rows = indexed_rows(info);
        let units = Units {
            operator: pg_sys::cpu_operator_cost,
            index_tuple: pg_sys::cpu_index_tuple_cost,
            random_page: pg_sys::random_page_cost,
        };
        let Costs { startup, total } = match PREFERRED.get() {
            None => estimate(rows, noted(index).facts, units),
            Some(preferred) if preferred == index => {
                // Nor do the rows that it gives.
                *selectivity = 0.0;
                Costs { startup: 0.0, total: 0.0 }
            }
            Some(_) => Costs { startup: f64::INFINITY, total: f64::INFINITY },
        };
        *startup_cost = startup;
        *total_cost = total;
    }
}

/// The rows that a scan can return. The table's estimate is the better one: the index's own is
/// extrapolated from the size of a relation that holds hardly any rows.
///
/// # Safety
/// `info` is a valid node of the planner.
unsafe fn indexed_rows(info: *const pg_sys::IndexOptInfo) -> f64 {
    // SAFETY: by the caller; an index always belongs to a relation.
    let (table, index, partial) =
        unsafe { ((*(*info).rel).tuples, (*info).tuples, !(*info).indpred.is_null()) };
    let rows = if partial { index.min(table) } else { table };
    if rows.is_finite() { rows.max(1.0) } else { 1.0 }
}

fn estimate(rows: f64, facts: Option<IndexFacts>, units: Units) -> Costs {
    let nprobe = match guc::NPROBE.get() {
        0 => facts.map(|facts| f64::from(facts.nprobe)),
        nprobe => Some(f64::from(nprobe)),
    };
    let lists = facts.map_or_else(|| default_lists(rows as u64) as f64, |f| f64::from(f.lists));
    let lists = lists.max(1.0);
    let dim = facts.map_or(TYPICAL_DIM, |facts| f64::from(facts.padded_dim));
    let codes = nprobe.map_or_else(|| expected_codes(rows), |nprobe| nprobe * rows / lists);
    costs(rows, lists, codes.min(rows), dim, units)
}

/// Codes that a search scans at the default recall: measured on 100,000 real passages, and growing as
/// the power 0.59 of the number of rows on samples of up to 300,000.
fn expected_codes(rows: f64) -> f64 {
    (10_800.0 * (rows / 100_000.0).powf(0.59)).clamp(1.0, rows.max(1.0))
}
