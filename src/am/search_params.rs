//! From settings, the index's options and its recall curves to the parameters of a search.

use pgrx::pg_sys;
use polign_engine::{
    root::Root,
    search::{Depth, Order, SearchParams},
};

use super::{cost, options::Options};
use crate::{
    guc::{self, IterativeScan},
    pages::Index,
};

/// Rows that a scan is taken to want when no LIMIT is known.
const DEFAULT_LIMIT: u32 = 10;
/// A LIMIT beyond this does not make batches larger.
const MAX_LIMIT: u32 = 10_000;

/// The recall that searches of an index aim at unless the session says otherwise. The option of now, not
/// that of the build: ALTER INDEX counts at once.
pub fn target_recall(index: Index) -> f64 {
    // SAFETY: an `Index` is an open index of this access method.
    let options = unsafe { Options::of(index.relation()) };
    options.target_recall.unwrap_or(guc::TARGET_RECALL_DEFAULT)
}

/// The recall that a search by this session aims at, unless it has set `polign.nprobe`.
pub fn session_target(index: Index) -> f64 {
    let session = guc::TARGET_RECALL.get();
    if session > 0.0 { session } else { target_recall(index) }
}

/// The parameters of a scan that begins now.
pub fn of_scan(index: Index, root: &Root) -> SearchParams {
    let target = session_target(index);
    let nprobe = u32::try_from(guc::NPROBE.get()).unwrap_or(0);
    let depth = if nprobe > 0 {
        Depth::fixed(nprobe)
    } else {
        let cells = root.cell_count() as u32;
        Depth::calibrated([10, 100, 1_000].map(|k| root.curves().nprobe(k, target, cells)))
    };
    // SAFETY: a global that Postgres sets between statements.
    let work_mem = usize::try_from(unsafe { pg_sys::work_mem }).unwrap_or(64);
    SearchParams {
        depth,
        order: match guc::ITERATIVE_SCAN.get() {
            IterativeScan::Strict => Order::Strict,
            IterativeScan::Relaxed => Order::Relaxed,
            IterativeScan::Off => Order::Off,
        },
        exact: target >= 1.0 && nprobe == 0,
        epsilon: guc::EPSILON.get() as f32,
        max_scan_tuples: u64::try_from(guc::MAX_SCAN_TUPLES.get()).unwrap_or(0),
        limit_hint: cost::limit_hint(index.oid()).unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT) as usize,
        memory: work_mem << 10,
    }
}
