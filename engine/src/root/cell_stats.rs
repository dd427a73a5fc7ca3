//! The cells of a root in figures, for whoever has to judge the index.

use super::reader::Root;
use crate::{kernel::RacyBytes, quantize::cell_rank};

/// How rows are spread over the cells that are in use. Dead rows count: they are read like others.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CellStats {
    /// Cells in use.
    pub cells: u32,
    /// Rows of the smallest cell.
    pub rows_min: u64,
    /// Rows of the largest cell.
    pub rows_max: u64,
    /// Rows in all cells.
    pub rows: u64,
    /// The imbalance factor: how many times as many rows a search reads as it would if all cells were equal
    /// and each was opened as often as it has rows. It is `cells * sum(n^2) / sum(n)^2`, 1 at its best.
    pub skew: f64,
    /// The root-mean-square distance of rows to the centroids of their cells, in model space.
    pub spread: f64,
}

impl CellStats {
    /// Rows of a cell, on average.
    pub fn rows_avg(&self) -> f64 {
        if self.cells == 0 { 0.0 } else { self.rows as f64 / f64::from(self.cells) }
    }
}

impl Root {
    /// The cells of this root in figures.
    pub fn cell_stats(&self) -> CellStats {
        let mut stats = CellStats { rows_min: u64::MAX, ..CellStats::default() };
        let (mut squares, mut distances) = (0.0, 0.0);
        for (slot, _) in (0u32..).zip(self.cells()).filter(|(_, cell)| !cell.is_retired()) {
            let pieces = self.pieces_of(slot).iter().chain(self.delta_pieces_of(slot));
            let rows: u64 = pieces.map(|piece| u64::from(piece.slots.get())).sum();
            stats.cells += 1;
            stats.rows += rows;
            stats.rows_min = stats.rows_min.min(rows);
            stats.rows_max = stats.rows_max.max(rows);
            squares += rows as f64 * rows as f64;
            distances += rows as f64 * self.spread_of(slot).powi(2);
        }
        if stats.cells == 0 {
            return CellStats::default();
        }
        if stats.rows > 0 {
            let rows = stats.rows as f64;
            stats.skew = f64::from(stats.cells) * squares / (rows * rows);
            stats.spread = (distances / rows).sqrt();
        }
        stats
    }

    fn spread_of(&self, slot: u32) -> f64 {
        let Some(model) = self.models().first() else { return 0.0 };
        let record = RacyBytes::new(self.centroid_record(slot));
        cell_rank::spread(record, model.padded_dim()).into()
    }
}
