//! What the last scan of this backend did, for `polign.last_scan()`.

use std::{
    cell::{Cell, RefCell},
    time::{Duration, Instant},
};

use polign_engine::{cache::Unfinished, search::SearchStats};

use crate::session::{self, PgWaiter, SourceStats};

/// Counters of one scan.
#[derive(Debug, Clone, Copy)]
pub struct LastScan {
    pub search: SearchStats,
    /// Cells of the index.
    pub cells: u64,
    /// Rows read in the heap.
    pub heap_rows: u64,
    pub source: SourceStats,
    pub times: Times,
}

/// Where the time of a scan went.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// Reading the index's pages and preparing the query.
    pub plan: Duration,
    /// Ranking cells, scanning codes, refining rows, waiting for the store.
    pub search: Duration,
    /// The part of `search` spent on scanning cells, waiting for their parts included.
    pub scan: Duration,
    /// From the first row asked for to the last one returned, the executor's own work included.
    pub total: Duration,
}

/// Names a scan of this backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanId(u64);

/// Longest wait for requests of a scan that has ended.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

thread_local! {
    static NEXT: Cell<u64> = const { Cell::new(0) };
    static LAST: Cell<Option<(ScanId, LastScan)>> = const { Cell::new(None) };
    static UNFINISHED: RefCell<Option<(ScanId, Unfinished)>> = const { RefCell::new(None) };
}

/// A scan begins: gives up what the one before left under way.
pub fn begin() -> ScanId {
    UNFINISHED.take();
    let id = NEXT.get();
    NEXT.set(id + 1);
    ScanId(id)
}

/// Notes the state of a scan that is running: it is the last one now.
pub fn set(id: ScanId, scan: LastScan) {
    LAST.set(Some((id, scan)));
}

/// Notes that a scan has ended, with what it leaves under way.
pub fn end(id: ScanId, unfinished: Unfinished) {
    UNFINISHED.replace(Some((id, unfinished)));
}

/// Cells that the last scan opened.
pub fn cells_probed() -> u64 {
    LAST.get().map_or(0, |(_, scan)| scan.search.cells_probed)
}

/// The last scan, if this backend made one. Waits for requests of it that are still under way, so that
/// they are counted.
pub fn get() -> Option<LastScan> {
    let (id, mut scan) = LAST.get()?;
    if let Some((_, unfinished)) = UNFINISHED.take().filter(|(of, _)| *of == id) {
        let deadline = Instant::now() + LONGEST_WAIT.min(session::fetch_timeout());
        unfinished.finish(&mut scan.source, &mut PgWaiter::default(), deadline);
        LAST.set(Some((id, scan)));
    }
    Some(scan)
}
