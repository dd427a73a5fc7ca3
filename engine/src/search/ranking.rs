//! The order in which cells are opened: quantized codes of all centroids first, the 8-bit records of
//! the best few after that, in batches as the search goes deeper.

use crate::{
    kernel::RacyBytes,
    quantize::{
        CellTerm, Query,
        cell_rank::{self, RankTerms},
        plane1,
    },
    root::Root,
};

/// A cell in the order in which cells are opened.
#[derive(Debug, Clone, Copy)]
pub struct RankedCell {
    /// Position of the cell in the root.
    pub slot: u32,
    pub term: CellTerm,
    /// Its place in the order: what its centroid's distance and its spread promise.
    pub rank: f32,
}

/// Cells by rank, exact as far as asked for.
#[derive(Debug, Default)]
pub struct Ranking {
    ranked: Vec<RankedCell>,
    /// Cells behind `ranked`, by what is known of their rank.
    pool: Vec<(f32, u32)>,
    est: Vec<f32>,
    lower: Vec<f32>,
}

impl Ranking {
    /// Starts over for a query.
    pub fn reset(&mut self, root: &Root, query: &Query) {
        self.ranked.clear();
        self.pool.clear();
        self.est.clear();
        self.lower.clear();
        if root.cell_count() == 0 {
            return;
        }
        plane1::scan(
            RacyBytes::new(root.centroid_blocks()),
            1,
            query,
            query.zero_cell_term(),
            1.0,
            &mut self.est,
            &mut self.lower,
        );
        let live = root.cells().iter().zip(0u32..).filter(|(cell, _)| !cell.is_retired());
        self.pool.extend(live.map(|(_, slot)| (self.lower[slot as usize], slot)));
    }

    /// Cells known to the ranking.
    pub fn len(&self) -> usize {
        self.ranked.len() + self.pool.len()
    }

    /// Whether there is no cell at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `count` nearest cells (all, if there are fewer), nearest first. A longer answer begins with
    /// the shorter one.
    pub fn nearest(&mut self, root: &Root, query: &Query, count: usize) -> &[RankedCell] {
        let count = count.min(self.len());
        if count > self.ranked.len() {
            self.extend_to(root, query, count);
        }
        &self.ranked[..count]
    }

    fn extend_to(&mut self, root: &Root, query: &Query, count: usize) {
        let wanted = count - self.ranked.len();
        // Twice as many as wanted get an exact rank: one bit a dimension ranks centroids well
        // enough that a cell beyond that is not missed, which the recall calibration confirms.
        let exact = (2 * wanted + 16).min(self.pool.len());
        let by_rank = |a: &(f32, u32), b: &(f32, u32)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if exact < self.pool.len() {
            self.pool.select_nth_unstable_by(exact, by_rank);
        }
        let norm = query.zero_cell_term().radius;
        let mut scored: Vec<RankedCell> = self.pool[..exact]
            .iter()
            .map(|&(_, slot)| {
                let record = RacyBytes::new(root.centroid_record(slot));
                let term = query.cell_term(record);
                let spread = cell_rank::spread(record, query.padded_dim());
                let terms = RankTerms::new(query.metric(), spread);
                RankedCell { slot, term, rank: terms.rank(term.base, norm) }
            })
            .collect();
        scored.sort_unstable_by(|a, b| a.rank.total_cmp(&b.rank).then(a.slot.cmp(&b.slot)));
        let rest = scored.split_off(wanted.min(scored.len()));
        self.pool.drain(..exact);
        self.pool.extend(rest.into_iter().map(|cell| (cell.rank, cell.slot)));
        self.ranked.append(&mut scored);
    }
}
