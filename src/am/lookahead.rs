//! Rows taken from a search before their turn comes, so that the heap pages they lie in are
//! read at the same time and not one after the other.

use std::collections::VecDeque;

use pgrx::pg_sys;
use polign_engine::search::Hit;

/// Rows taken ahead at the most.
const MOST: u64 = 64;
/// Rows taken ahead when the executor has discarded many.
const LATER: u64 = 16;

/// Rows taken, in order.
#[derive(Debug, Default)]
pub struct Lookahead {
    rows: VecDeque<Hit>,
    taken: u64,
}

impl Lookahead {
    /// Whether all rows that were taken have been handed on.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The next row that was taken ahead.
    pub fn pop(&mut self) -> Option<Hit> {
        self.rows.pop_front()
    }

    /// How many rows to take now: what the plan wants at first; then, while the executor puts rows in
    /// order at its limit, one; and more again when it discards rows.
    pub fn wanted(&self, limit: usize) -> u64 {
        let limit = limit.max(1) as u64;
        match self.taken {
            taken if taken < limit => (limit - taken).min(MOST),
            taken if taken < 2 * limit.max(LATER) => 1,
            _ => LATER,
        }
    }

    /// Takes rows, and has their heap pages read.
    ///
    /// # Safety
    /// `heap` is null or an open table.
    pub unsafe fn take(&mut self, rows: Vec<Hit>, heap: pg_sys::Relation) {
        self.taken += rows.len() as u64;
        // SAFETY: the table is open.
        let concurrent = |heap: pg_sys::Relation| unsafe {
            pg_sys::get_tablespace_io_concurrency((*(*heap).rd_rel).reltablespace) > 0
        };
        if rows.len() > 1 && !heap.is_null() && concurrent(heap) {
            for row in &rows {
                let block = (row.id >> 16) as pg_sys::BlockNumber;
                // SAFETY: the table is open; a page that is in shared buffers is only looked up.
                unsafe { pg_sys::PrefetchBuffer(heap, pg_sys::ForkNumber::MAIN_FORKNUM, block) };
            }
        }
        self.rows.extend(rows);
    }
}
