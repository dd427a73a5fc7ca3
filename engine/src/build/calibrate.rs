//! Calibration: sampled rows ride along in the build as queries; where their exact neighbours lie in
//! the order of cells gives, for k = 10, 100 and 1,000, the miss rate as a function of nprobe. Queries of
//! users may take the place of the rows.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap, HashSet},
};

use rayon::prelude::*;

use crate::{
    Metric,
    kernel::gemm,
    quantize::Query,
    root::{Curve, Curves, Root},
    search::Ranking,
};

/// The ranks for which a curve is stored.
const RANKS: [usize; 3] = [10, 100, 1_000];
/// Neighbours kept for each query: the deepest rank.
const NEIGHBOURS: usize = 1_000;
/// Queries compared with a batch of rows in one piece of work.
const QUERIES_AT_A_TIME: usize = 16;

/// Finds the exact neighbours of sampled rows, or of queries, while all rows pass by.
pub struct Calibrator {
    metric: Metric,
    width: usize,
    samples: Vec<Sample>,
}

struct Sample {
    /// The id of a row that serves as a query: it is not its own neighbour, nor is a copy of it.
    own: Option<u64>,
    query: Query,
    nearest: BinaryHeap<Neighbour>,
}

/// A neighbour; the heap has the furthest on top.
#[derive(Debug, Clone, Copy)]
struct Neighbour {
    score: f32,
    id: u64,
}

impl Ord for Neighbour {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(self.id.cmp(&other.id))
    }
}

impl PartialOrd for Neighbour {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Neighbour {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Neighbour {}

impl Calibrator {
    /// `samples` are rows of the table with their ids, as queries.
    pub fn new(metric: Metric, padded_dim: usize, samples: Vec<(u64, Query)>) -> Self {
        let samples = samples.into_iter().map(|(id, query)| Sample::new(Some(id), query)).collect();
        Self { metric, width: padded_dim, samples }
    }

    /// The same for queries that are no rows of the table. One that equals a row asks for that row too.
    pub fn of_queries(metric: Metric, padded_dim: usize, queries: Vec<Query>) -> Self {
        let samples = queries.into_iter().map(|query| Sample::new(None, query)).collect();
        Self { metric, width: padded_dim, samples }
    }

    /// Compares every sample with a batch of rows (n x P, model space). Runs on the current rayon pool.
    pub fn observe(&mut self, rows: &[f32], ids: &[u64]) {
        let (metric, width) = (self.metric, self.width);
        debug_assert_eq!(rows.len(), ids.len() * width);
        let norms: Vec<f32> = match metric {
            Metric::InnerProduct => vec![0.0; ids.len()],
            Metric::L2 | Metric::Cosine => {
                rows.chunks_exact(width).map(crate::kernel::norm_squared).collect()
            }
        };
        let factor = if metric == Metric::InnerProduct { -1.0 } else { -2.0 };
        let rows = gemm::PackedCols::new(rows, width, 1.0);
        self.samples.par_chunks_mut(QUERIES_AT_A_TIME).for_each(|samples| {
            let queries: Vec<f32> =
                samples.iter().flat_map(|sample| sample.query.rotated()).copied().collect();
            let mut dots = vec![0.0; samples.len() * ids.len()];
            gemm::dot_packed(&queries, &rows, &mut dots);
            for (sample, dots) in samples.iter_mut().zip(dots.chunks_exact(ids.len().max(1))) {
                for ((&dot, &norm), &id) in dots.iter().zip(&norms).zip(ids) {
                    sample.offer(norm + factor * dot, id);
                }
            }
        });
    }

    /// The ids of all neighbours: [`Calibrator::finish`] needs to know their cells.
    pub fn neighbours(&self) -> HashSet<u64> {
        self.samples.iter().flat_map(|sample| &sample.nearest).map(|near| near.id).collect()
    }

    /// The curves, given the finished root and the cell slot of each neighbour. Runs on the current
    /// rayon pool.
    pub fn finish(self, root: &Root, slot_of: &HashMap<u64, u32>) -> Curves {
        let ranks: Vec<Vec<u32>> = self
            .samples
            .into_par_iter()
            .map(|sample| neighbour_ranks(sample, root, slot_of))
            .collect();
        let samples = ranks.iter().filter(|ranks| !ranks.is_empty()).count() as u32;
        let curve = |k: usize| {
            let of_all = ranks.iter().flat_map(|ranks| ranks.iter().take(k)).copied();
            Curve::from_ranks(k as u32, samples, of_all)
        };
        Curves::new(RANKS.map(curve).to_vec())
    }
}

impl Sample {
    fn new(own: Option<u64>, query: Query) -> Self {
        Self { own, query, nearest: BinaryHeap::new() }
    }

    fn offer(&mut self, score: f32, id: u64) {
        if self.nearest.len() >= NEIGHBOURS {
            // NaN and the far side alike stop here.
            let furthest = self.nearest.peek().map_or(f32::INFINITY, |near| near.score);
            if score >= furthest || score.is_nan() {
                return;
            }
        }
        if self.own == Some(id) || score.is_nan() {
            return;
        }
        self.nearest.push(Neighbour { score, id });
        if self.nearest.len() > NEIGHBOURS {
            self.nearest.pop();
        }
    }
}

/// A neighbour nearer than this part of the distance of the [`TYPICAL`]th is a copy of the row rather than a
/// neighbour: copies lie in the row's own cell, and questions have none.
const COPY: f32 = 0.5;
const TYPICAL: usize = 100;

/// Drops what is nearly the row itself. For inner product nothing is known of distances.
fn drop_copies(metric: Metric, query: &[f32], nearest: &mut Vec<Neighbour>) {
    let Some(typical) = nearest.get(TYPICAL - 1).or(nearest.last()) else { return };
    if metric != Metric::InnerProduct {
        let own = crate::kernel::norm_squared(query);
        let limit = COPY * COPY * (typical.score + own);
        nearest.retain(|near| near.score + own >= limit);
    }
}

/// For each neighbour, nearest first, the rank of its cell in the order in which a search opens them.
fn neighbour_ranks(sample: Sample, root: &Root, slot_of: &HashMap<u64, u32>) -> Vec<u32> {
    let mut ranking = Ranking::default();
    ranking.reset(root, &sample.query);
    let mut rank_of = vec![u32::MAX; root.cell_count()];
    for (rank, cell) in (0..).zip(ranking.nearest(root, &sample.query, root.cell_count())) {
        rank_of[cell.slot as usize] = rank;
    }
    let mut nearest = sample.nearest.into_sorted_vec();
    if sample.own.is_some() {
        drop_copies(root.metric(), sample.query.rotated(), &mut nearest);
    }
    nearest.iter().filter_map(|near| slot_of.get(&near.id)).map(|&s| rank_of[s as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_a_row_are_no_neighbours() {
        // Scores are squared distances less the query's own square, 4.
        let neighbour = |distance: f32, id| Neighbour { score: distance * distance - 4.0, id };
        let all: Vec<Neighbour> = (0..8)
            .map(|id| neighbour(0.1, id))
            .chain((8..300).map(|id| neighbour(1.0 + id as f32 / 1000.0, id)))
            .collect();
        let query = [2.0, 0.0];
        let mut kept = all.clone();
        drop_copies(Metric::L2, &query, &mut kept);
        assert_eq!(kept[0].id, 8);
        assert_eq!(kept.len(), 292);
        let mut kept = all.clone();
        drop_copies(Metric::InnerProduct, &query, &mut kept);
        assert_eq!(kept.len(), 300);
        // A table of copies alone is left as it is.
        let mut same: Vec<Neighbour> = (0..50).map(|id| neighbour(0.0, id)).collect();
        drop_copies(Metric::Cosine, &query, &mut same);
        assert_eq!(same.len(), 50);
    }
}
