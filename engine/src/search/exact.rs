//! Exact search: every row is refined. Plane 1 is not read, since a statistical bound must not prune.
//!
//! Memory stays bounded: each pass over the index keeps the best rows beyond the last one returned, and
//! another pass begins when they are used up.

use std::collections::BinaryHeap;

use super::{
    candidate::{Candidate, State},
    environment::Environment,
    stream::{SearchStats, refine_delta},
};
use crate::{
    quantize::{Query, plane2},
    root::Root,
    segment::{SourceError, Want},
};

/// Chunks asked for at a time: 4 MiB, as much as the smallest cache holds.
const CHUNKS_AHEAD: usize = 512;

/// State of an exact search.
#[derive(Debug)]
pub(super) struct ExactScan {
    /// Rows kept in a pass.
    capacity: usize,
    /// Rows of the current pass, best last.
    ready: Vec<Candidate>,
    /// The last row returned: a pass keeps only rows that sort after it.
    last: Option<Candidate>,
    exhausted: bool,
}

impl ExactScan {
    /// Keeps as many rows as fit in `memory` bytes.
    pub fn new(memory: usize) -> Self {
        let capacity = (memory / size_of::<Candidate>()).max(1_024);
        Self { capacity, ready: Vec::new(), last: None, exhausted: false }
    }

    pub fn next(
        &mut self,
        root: &Root,
        queries: &[Query],
        environment: &mut Environment<'_>,
        stats: &mut SearchStats,
    ) -> Result<Option<Candidate>, SourceError> {
        if self.ready.is_empty() && !self.exhausted {
            self.pass(root, queries, environment, stats)?;
        }
        let next = self.ready.pop();
        self.last = next.or(self.last);
        Ok(next)
    }

    fn pass(
        &mut self,
        root: &Root,
        queries: &[Query],
        environment: &mut Environment<'_>,
        stats: &mut SearchStats,
    ) -> Result<(), SourceError> {
        let mut best = Best { capacity: self.capacity, last: self.last, heap: BinaryHeap::new() };
        let mut record = Vec::new();
        let mut handles = Vec::new();
        environment.delta.for_each(&mut |handle| handles.push(handle));
        stats.rows_refined += handles.len() as u64;
        for (nth, handle) in handles.into_iter().enumerate() {
            if nth % 256 == 0 {
                environment.source.check_interrupts()?;
            }
            best.offer(refine_delta(&queries[0], handle, &mut record, environment));
        }
        stats.cells_probed = root.cell_count() as u64;
        for segment in 0..root.segments().len() as u32 {
            refine_segment(root, queries, segment, &mut best, environment, stats)?;
        }
        self.exhausted = best.heap.len() < self.capacity;
        self.ready = best.heap.into_iter().map(|Worst(candidate)| candidate).collect();
        self.ready.sort_unstable();
        Ok(())
    }
}

fn refine_segment(
    root: &Root,
    queries: &[Query],
    segment: u32,
    best: &mut Best,
    environment: &mut Environment<'_>,
    stats: &mut SearchStats,
) -> Result<(), SourceError> {
    let query = &queries[root.model_of(segment)];
    let geometry = root.geometry(segment);
    let (all, per_chunk) = (geometry.rows(), geometry.shape().records_per_chunk());
    let chunks: Vec<_> = geometry
        .plane2_parts()
        .zip((0..all).step_by(per_chunk as usize))
        .map(|(part, first)| (part, first, per_chunk.min(all - first)))
        .collect();
    let object = &root.segment_name(segment);
    let bytes = plane2::record_bytes(query.padded_dim());
    for group in chunks.chunks(CHUNKS_AHEAD) {
        let missing: Vec<_> = group
            .iter()
            .filter(|(part, ..)| !environment.source.contains(part))
            .map(|&(part, ..)| (segment, part))
            .collect();
        if !missing.is_empty() {
            stats.parts_missing += missing.len() as u64;
            stats.waves += 1;
            environment.request(root, &missing);
        }
        let wants: Vec<_> = group.iter().map(|&(part, ..)| Want { object, part }).collect();
        for (nth, &(part, first_ordinal, rows)) in group.iter().enumerate() {
            let (want, rest) = (wants[nth], &wants[nth + 1..]);
            environment.source.check_interrupts()?;
            let mut dead = vec![false; rows as usize];
            environment.dead.for_each_dead(segment, first_ordinal, rows, &mut |ordinal| {
                dead[(ordinal - first_ordinal) as usize] = true;
            });
            let mut view = environment.source.acquire_first(want, rest)?;
            let refined = loop {
                let refined: Option<Vec<_>> = (0..rows as usize)
                    .filter(|&row| !dead[row])
                    .map(|row| {
                        let record = view.bytes().get(row * bytes..(row + 1) * bytes)?;
                        Some(query.refine(record))
                    })
                    .collect();
                if environment.source.still_valid(&view) {
                    break refined;
                }
                view = environment.source.acquire_first(want, rest)?;
            };
            let refined = refined.ok_or_else(|| {
                let (needed, found) = (rows as usize * bytes, view.bytes().len());
                environment.too_short(root, segment, part, needed, found)
            })?;
            stats.rows_refined += refined.len() as u64;
            for row in refined {
                best.offer(Candidate { bound: row.lower, state: State::Refined(row.id) });
            }
        }
    }
    Ok(())
}

/// The best rows of a pass.
struct Best {
    capacity: usize,
    last: Option<Candidate>,
    heap: BinaryHeap<Worst>,
}

impl Best {
    fn offer(&mut self, candidate: Candidate) {
        // `Candidate` is ordered for a max-heap: a better row is greater.
        if self.last.is_some_and(|last| candidate >= last) {
            return;
        }
        if self.heap.len() < self.capacity {
            self.heap.push(Worst(candidate));
        } else if let Some(mut worst) = self.heap.peek_mut()
            && candidate > worst.0
        {
            *worst = Worst(candidate);
        }
    }
}

/// A candidate in a heap that has the worst on top.
#[derive(Debug, PartialEq, Eq)]
struct Worst(Candidate);

impl Ord for Worst {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.0.cmp(&self.0)
    }
}

impl PartialOrd for Worst {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
