//! The search itself: a resumable stream of rows ordered by a lower bound of their distance.
//!
//! Rows are scanned (plane 1), the best few enter a heap by their statistical lower bound, the smallest
//! is refined (plane 2) and goes back with its deterministic bound; a refined row that comes out on top
//! is returned. The RaBitQ bound (Gao & Long, SIGMOD 2024) thus chooses what to refine and is never
//! reported, because it holds only with high probability.

use std::{
    collections::{BinaryHeap, HashSet},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    candidate::{Candidate, State},
    columns::{Columns, Place},
    environment::Environment,
    exact::ExactScan,
    frontier::Frontier,
    params::{Order, SearchParams},
    ranking::Ranking,
    rows::DeltaRecord,
    scan::Scanner,
    survivors,
};
use crate::{
    kernel::RacyBytes,
    quantize::{Query, plane2, score_to_distance},
    root::Root,
    segment::{PartKey, SourceError},
};

/// Rows that enter the heap at a time at the least.
const TIER_ROWS: usize = 128;
/// And at the most.
const MAX_TIER_ROWS: usize = 4_096;
/// Bytes that a scanned row takes in the columns, of a delta or a kept row about twice as many.
const ROW_BYTES: usize = 8;
/// Scanned rows that are kept however little memory there is.
const LEAST_ROWS: u64 = 4_096;
/// Chunks remembered as asked for. Asking twice for the same costs little.
const MOST_REQUESTED: usize = 1 << 16;

/// A row returned by a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hit {
    /// The row's id as stored: a heap TID (block << 16 | offset).
    pub id: u64,
    /// A lower bound of the row's distance in the operator's unit. It never lies above the distance
    /// that pgvector computes from the row.
    pub bound: f64,
}

/// What one search did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SearchStats {
    pub cells_probed: u64,
    /// Rows of plane 1 scored, delta rows included.
    pub codes_scanned: u64,
    /// Rows whose plane-2 record was read.
    pub rows_refined: u64,
    pub rows_returned: u64,
    /// Parts that were not at hand when they were first looked for.
    pub parts_missing: u64,
    /// Requests to the source, each for all that was missing then.
    pub waves: u64,
    /// Times that the open cells were scanned again for rows that had been dropped to save memory.
    pub rescans: u64,
    /// Scanned rows and candidates kept at a time, at the most.
    pub most_kept: u64,
}

/// A search under way.
pub struct Stream {
    root: Arc<Root>,
    /// The query in the space of each model.
    queries: Vec<Query>,
    params: SearchParams,
    ranking: Ranking,
    /// Cells opened so far, in the order of the ranking.
    opened: usize,
    /// Of these, the first cells whose rows are used up.
    used_up: usize,
    /// Rows of the cells opened so far.
    opened_rows: u64,
    columns: Columns,
    frontier: Frontier,
    /// Scanned rows whose bound lies above it were dropped to save memory. When all others are used up,
    /// the open cells are scanned again.
    ceiling: f32,
    heap: BinaryHeap<Candidate>,
    exact: Option<ExactScan>,
    /// Chunks asked for already: they may still be on their way.
    requested: HashSet<PartKey>,
    /// Rows refined already, where a row may lie in two cells.
    refined: HashSet<(u32, u32)>,
    /// Rows that sort before one already returned, best last once the index is exhausted.
    held: Vec<Candidate>,
    exhausted: bool,
    last_bound: f64,
    pulls: u64,
    stats: SearchStats,
    scanning: Duration,
    selection: Vec<f32>,
    record: Vec<u8>,
}

impl Stream {
    /// A search; `queries` is the query in the space of each of the root's models ([`Root::queries`]).
    /// Nothing is read before the first [`Stream::next`].
    pub fn new(root: Arc<Root>, queries: Vec<Query>, params: SearchParams) -> Self {
        let mut stream = Self {
            root,
            queries,
            params,
            ranking: Ranking::default(),
            opened: 0,
            used_up: 0,
            opened_rows: 0,
            columns: Columns::default(),
            frontier: Frontier::START,
            ceiling: f32::INFINITY,
            heap: BinaryHeap::new(),
            exact: None,
            requested: HashSet::new(),
            refined: HashSet::new(),
            held: Vec::new(),
            exhausted: false,
            last_bound: f64::NEG_INFINITY,
            pulls: 0,
            stats: SearchStats::default(),
            scanning: Duration::ZERO,
            selection: Vec::new(),
            record: Vec::new(),
        };
        stream.begin();
        stream
    }

    /// Starts over with another query, keeping the buffers.
    pub fn restart(&mut self, root: Arc<Root>, queries: Vec<Query>, params: SearchParams) {
        self.root = root;
        self.queries = queries;
        self.params = params;
        self.opened = 0;
        self.used_up = 0;
        self.opened_rows = 0;
        self.columns.clear();
        self.frontier = Frontier::START;
        self.ceiling = f32::INFINITY;
        self.heap.clear();
        self.requested.clear();
        self.refined.clear();
        self.held.clear();
        self.exhausted = false;
        self.last_bound = f64::NEG_INFINITY;
        self.pulls = 0;
        self.stats = SearchStats::default();
        self.scanning = Duration::ZERO;
        self.begin();
    }

    /// An exact search reads everything; any other begins by ranking the cells.
    fn begin(&mut self) {
        self.exact = self.params.exact.then(|| ExactScan::new(self.params.memory));
        if self.exact.is_none() {
            self.ranking.reset(&self.root, &self.queries[0]);
        }
    }

    /// What the search did so far.
    pub fn stats(&self) -> SearchStats {
        self.stats
    }

    /// Time spent on scanning cells so far, waiting for their parts included.
    pub fn scanning(&self) -> Duration {
        self.scanning
    }

    /// The root that is being searched.
    pub fn root(&self) -> &Arc<Root> {
        &self.root
    }

    /// How many rows may be pulled before the search goes deeper.
    pub fn rows_at_this_depth(&self) -> u64 {
        self.params.depth.rows_left(self.pulls)
    }

    /// The next row if it can be had without opening cells beyond those that the rank asks for.
    pub fn next_at_hand(
        &mut self,
        environment: &mut Environment<'_>,
    ) -> Result<Option<Hit>, SourceError> {
        self.pulls += 1;
        let hit = self.next_open(environment, false)?;
        if hit.is_none() {
            self.pulls -= 1;
        }
        Ok(hit)
    }

    /// The next row, or `None` when the index is exhausted. Bounds come in ascending order, except that
    /// held rows follow the last of the others.
    pub fn next(&mut self, environment: &mut Environment<'_>) -> Result<Option<Hit>, SourceError> {
        self.pulls += 1;
        match self.next_open(environment, true)? {
            None => Ok(self.next_held()),
            hit => Ok(hit),
        }
    }

    fn next_open(
        &mut self,
        environment: &mut Environment<'_>,
        more: bool,
    ) -> Result<Option<Hit>, SourceError> {
        loop {
            let Some(candidate) = self.pop(environment, more)? else { return Ok(None) };
            let State::Refined(id) = candidate.state else { continue };
            let in_order = candidate.bound >= self.last_bound;
            if in_order || self.params.order == Order::Relaxed {
                self.last_bound = self.last_bound.max(candidate.bound);
                return Ok(Some(self.hit(id, candidate.bound)));
            }
            self.held.push(candidate);
        }
    }

    fn hit(&mut self, id: u64, bound: f64) -> Hit {
        self.stats.rows_returned += 1;
        Hit { id, bound: score_to_distance(self.root.metric(), bound) }
    }

    fn next_held(&mut self) -> Option<Hit> {
        if !self.exhausted {
            self.exhausted = true;
            self.held.sort_unstable();
        }
        let candidate = self.held.pop()?;
        let State::Refined(id) = candidate.state else { return None };
        Some(self.hit(id, candidate.bound))
    }

    /// The refined candidate with the smallest bound of all that is open, opening cells as the rank
    /// asks for; a scanned candidate is refined on the way.
    fn pop(
        &mut self,
        environment: &mut Environment<'_>,
        more: bool,
    ) -> Result<Option<Candidate>, SourceError> {
        if let Some(exact) = &mut self.exact {
            return exact.next(&self.root, &self.queries, environment, &mut self.stats);
        }
        self.open_for_rank(environment)?;
        loop {
            let top = self.heap.peek().map(|candidate| candidate.bound);
            if !top.is_some_and(|bound| self.frontier.covers(bound))
                && (self.take_tier() || self.rescan(environment)?)
            {
                continue;
            }
            let Some(candidate) = self.heap.pop() else {
                if more && self.open_more(environment)? {
                    continue;
                }
                return Ok(None);
            };
            match candidate.state {
                State::Refined(_) => return Ok(Some(candidate)),
                State::Scanned(row) => {
                    if self.stats.rows_refined.is_multiple_of(256) {
                        environment.source.check_interrupts()?;
                    }
                    let refined = self.refine(row, environment)?;
                    self.heap.extend(refined);
                }
            }
        }
    }

    fn may_open(&self) -> bool {
        let limit = self.params.max_scan_tuples;
        self.opened < self.ranking.len()
            && (self.opened == 0
                || self.params.order != Order::Off && (limit == 0 || self.opened_rows < limit))
    }

    fn open_for_rank(&mut self, environment: &mut Environment<'_>) -> Result<(), SourceError> {
        if self.pulls == 1 && self.columns.len() == 0 {
            self.scanner().score_delta(None, environment);
        }
        let wanted = self.params.depth.cells_at(self.pulls);
        if wanted > self.opened && self.may_open() {
            self.open_to(wanted, environment)?;
        }
        Ok(())
    }

    /// Everything open was used up: opens half as many cells again.
    fn open_more(&mut self, environment: &mut Environment<'_>) -> Result<bool, SourceError> {
        if !self.may_open() {
            return Ok(false);
        }
        // Every row was taken and refined, so the cells to come start anew.
        self.columns.clear();
        self.frontier = Frontier::START;
        self.used_up = self.opened;
        self.open_to(self.opened + (self.opened / 2).max(1), environment)?;
        Ok(true)
    }

    fn open_to(
        &mut self,
        cells: usize,
        environment: &mut Environment<'_>,
    ) -> Result<(), SourceError> {
        let cells = cells.min(self.ranking.len());
        let scanned_before = self.stats.codes_scanned;
        self.stats.cells_probed += cells.saturating_sub(self.opened) as u64;
        self.scan_ranks(self.opened..cells, environment, |stream, row, bound| {
            // Rows that lie below a cut made earlier would otherwise never be taken.
            if stream.frontier.covers(bound) {
                stream.heap.push(Candidate { bound, state: State::Scanned(row) });
            }
        })?;
        self.opened_rows += self.stats.codes_scanned - scanned_before;
        self.opened = cells;
        Ok(())
    }

    /// The kept rows are used up, but others were dropped: scans the open cells again for the next best.
    /// False if none were dropped.
    fn rescan(&mut self, environment: &mut Environment<'_>) -> Result<bool, SourceError> {
        if self.ceiling == f32::INFINITY {
            return Ok(false);
        }
        // All rows up to the ceiling were taken, and all that were taken are refined by now: whatever is
        // left in the heap lies beyond them.
        debug_assert!(self.heap.iter().all(|c| matches!(c.state, State::Refined(_))));
        self.frontier.raise(self.ceiling);
        self.ceiling = f32::INFINITY;
        self.columns.clear();
        self.stats.rescans += 1;
        if self.used_up == 0 {
            self.scanner().score_delta(None, environment);
        }
        self.scan_ranks(self.used_up..self.opened, environment, |_, _, _| ())?;
        Ok(true)
    }

    /// Scans the cells of these ranks, as many at a time as memory allows, and shows `visit` each row
    /// that stays, with its bound.
    fn scan_ranks(
        &mut self,
        ranks: Range<usize>,
        environment: &mut Environment<'_>,
        visit: impl Fn(&mut Self, usize, f64),
    ) -> Result<(), SourceError> {
        let started = Instant::now();
        let mut next = ranks.start;
        while next < ranks.end {
            let capacity = self.capacity();
            let ranked = self.ranking.nearest(&self.root, &self.queries[0], ranks.end);
            let rows = ranked[next..].iter().scan(0, |rows, cell| {
                *rows += self.root.rows_of(cell.slot);
                Some(*rows)
            });
            let batch = rows.take_while(|&rows| rows <= capacity as u64).count().max(1);
            let first_row = self.columns.len();
            let mut scanner = Scanner {
                root: &self.root,
                queries: &self.queries,
                epsilon: self.params.epsilon,
                columns: &mut self.columns,
                stats: &mut self.stats,
            };
            scanner.open(&ranked[next..next + batch], environment)?;
            for row in first_row..self.columns.len() {
                let bound = self.columns.lower[row];
                if bound > self.ceiling {
                    self.columns.lower[row] = f32::NAN;
                } else {
                    visit(self, row, f64::from(bound));
                }
            }
            let kept = self.columns.len() + self.heap.len();
            self.stats.most_kept = self.stats.most_kept.max(kept as u64);
            if self.columns.len() > capacity {
                self.drop_worst(capacity / 4);
            }
            next += batch;
        }
        self.scanning += started.elapsed();
        Ok(())
    }

    /// Scanned rows that may be kept: as many as there is memory for, but not so few that a search of the
    /// whole index would scan it more than some 64 times.
    fn capacity(&self) -> usize {
        let least = (self.opened_rows / 16).max(LEAST_ROWS);
        (self.params.memory / ROW_BYTES).max(least as usize)
    }

    /// Drops all scanned rows but the best `keep` of those not taken yet, and rows in the heap. (Rows
    /// with equal bounds are kept or dropped together.)
    fn drop_worst(&mut self, keep: usize) {
        let lower = &self.columns.lower;
        let cut = self.frontier.nth_beyond(lower, keep, &mut self.selection);
        if let Some(cut) = cut
            && lower.iter().any(|&bound| bound > cut)
        {
            self.ceiling = self.ceiling.min(cut);
        }
        let mut in_heap: Vec<usize> =
            self.heap.iter().filter_map(|candidate| candidate.state.scanned()).collect();
        in_heap.sort_unstable();
        let is_kept = |&row: &usize| {
            let bound = lower[row];
            (self.frontier.beyond(bound) && cut.is_some_and(|cut| bound <= cut))
                || in_heap.binary_search(&row).is_ok()
        };
        let rows: Vec<usize> = (0..lower.len()).filter(is_kept).collect();
        let moved = std::mem::take(&mut self.heap).into_vec().into_iter().map(|candidate| {
            let state = match candidate.state {
                State::Scanned(row) => State::Scanned(rows.partition_point(|&kept| kept < row)),
                refined @ State::Refined(_) => refined,
            };
            Candidate { state, ..candidate }
        });
        self.heap = moved.collect();
        self.columns.keep(&rows);
    }

    fn scanner(&mut self) -> Scanner<'_> {
        Scanner {
            root: &self.root,
            queries: &self.queries,
            epsilon: self.params.epsilon,
            columns: &mut self.columns,
            stats: &mut self.stats,
        }
    }

    /// Moves the next best scanned rows into the heap. False if there are none left.
    fn take_tier(&mut self) -> bool {
        let hint = self.params.limit_hint.min(MAX_TIER_ROWS / 4);
        let count = (4 * hint).max(self.pulls as usize / 2).clamp(TIER_ROWS, MAX_TIER_ROWS);
        let (heap, lower) = (&mut self.heap, &self.columns.lower);
        let taken = self.frontier.advance(lower, count, &mut self.selection, |row| {
            heap.push(Candidate { bound: f64::from(lower[row]), state: State::Scanned(row) });
        });
        taken > 0
    }

    /// Refines a scanned row; nothing if the row was met before in another cell.
    fn refine(
        &mut self,
        row: usize,
        environment: &mut Environment<'_>,
    ) -> Result<Option<Candidate>, SourceError> {
        let (segment, ordinal) = match self.columns.place(row) {
            Place::Segment { segment, ordinal } => (segment, ordinal),
            Place::Delta { handle } => {
                self.stats.rows_refined += 1;
                let (query, record) = (&self.queries[0], &mut self.record);
                return Ok(Some(refine_delta(query, handle, record, environment)));
            }
        };
        if self.root.may_repeat() && !self.refined.insert((segment, ordinal)) {
            return Ok(None);
        }
        let Some((part, offset)) = self.root.geometry(segment).chunk_of(ordinal) else {
            return Ok(None);
        };
        self.stats.rows_refined += 1;
        let mut view = match environment.source.try_acquire(&part) {
            Some(view) => view,
            None => {
                if !self.requested.contains(&part.key) {
                    self.request_survivors(row, environment);
                }
                environment.acquire(&self.root, segment, part)?
            }
        };
        let query = &self.queries[self.root.model_of(segment)];
        let bytes = plane2::record_bytes(query.padded_dim());
        loop {
            let record = view.bytes().get(offset..offset + bytes);
            let refined = record.map(|record| query.refine(record));
            if environment.source.still_valid(&view) {
                let refined = refined.ok_or_else(|| {
                    let (needed, found) = (offset + bytes, view.bytes().len());
                    environment.too_short(&self.root, segment, part, needed, found)
                })?;
                let (bound, state) = (refined.lower, State::Refined(refined.id));
                return Ok(Some(Candidate { bound, state }));
            }
            view = environment.acquire(&self.root, segment, part)?;
        }
    }

    /// A plane-2 chunk is missing: asks in one request for the chunks of all rows that will probably
    /// be refined before the rows wanted now are returned, `row` first.
    fn request_survivors(&mut self, row: usize, environment: &mut Environment<'_>) {
        let wanted = self.params.limit_hint.max(10);
        let cut = survivors::cut(self.heap.iter(), &self.columns, self.params.epsilon, wanted);
        let cut = cut.min(self.ceiling);
        let (heap, lower) = (&mut self.heap, &self.columns.lower);
        self.frontier.advance_to(lower, cut, |row| {
            heap.push(Candidate { bound: f64::from(lower[row]), state: State::Scanned(row) });
        });
        let mut rows: Vec<(f64, usize)> = self
            .heap
            .iter()
            .filter(|candidate| candidate.bound <= f64::from(cut))
            .filter_map(|candidate| match candidate.state {
                State::Scanned(row) => Some((candidate.bound, row)),
                State::Refined(_) => None,
            })
            .collect();
        rows.push((f64::NEG_INFINITY, row));
        rows.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        if self.requested.len() > MOST_REQUESTED {
            self.requested.clear();
        }
        let mut wanted = Vec::with_capacity(rows.len());
        for (_, row) in rows {
            let Place::Segment { segment, ordinal } = self.columns.place(row) else { continue };
            let chunk = self.root.geometry(segment).chunk_of(ordinal);
            let Some((part, _)) = chunk else { continue };
            if !environment.source.contains(&part) && self.requested.insert(part.key) {
                wanted.push((segment, part));
            }
        }
        self.stats.parts_missing += wanted.len() as u64;
        self.stats.waves += 1;
        environment.request(&self.root, &wanted);
    }
}

/// Refines a row of the delta. A row whose record is gone keeps the lowest possible bound: its distance is
/// computed from the heap.
pub(super) fn refine_delta(
    query: &Query,
    handle: u32,
    record: &mut Vec<u8>,
    environment: &mut Environment<'_>,
) -> Candidate {
    let id = environment.delta.id(handle);
    let bound = match environment.delta.record(handle, record) {
        DeltaRecord::Copied => query.refine(RacyBytes::new(record)).lower,
        DeltaRecord::Recycled => query.least_score(),
    };
    Candidate { bound, state: State::Refined(id) }
}
