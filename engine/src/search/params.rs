//! What a caller asks of a search.

/// How a row that sorts before one already returned is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Held back: it comes after all others, so the order is exact until the index is exhausted.
    Strict,
    /// Returned at once.
    Relaxed,
    /// Like `Strict`, and no further cells are opened once the first ones are used up.
    Off,
}

/// How many cells are open, as a step function of the rows pulled so far.
///
/// The executor never says how many rows it wants, so the stream goes deeper as it is asked for more.
/// The steps lie a little above 10, 100 and 1,000 rows, since the executor pulls a few rows past its
/// limit to put them in exact order; the pull past the limit must not open new cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    /// Cells for ranks around 10, 100 and 1,000.
    cells: [u32; 3],
    /// Whether deeper ranks open cells in proportion; otherwise only an exhausted stream opens more.
    grows: bool,
}

/// Pulls up to which each entry of [`Depth`] holds.
const STEPS: [u64; 3] = [32, 128, 1_100];

impl Depth {
    /// Cells calibrated for k = 10, 100 and 1,000; deeper ranks open cells in proportion.
    pub fn calibrated(cells: [u32; 3]) -> Self {
        let mut cells = cells.map(|c| c.max(1));
        cells[1] = cells[1].max(cells[0]);
        cells[2] = cells[2].max(cells[1]);
        Self { cells, grows: true }
    }

    /// The same number of cells at every rank.
    pub fn fixed(nprobe: u32) -> Self {
        Self { cells: [nprobe.max(1); 3], grows: false }
    }

    /// Cells that should be open when the `pulls`-th row is asked for (1 = the first).
    pub fn cells_at(&self, pulls: u64) -> usize {
        match STEPS.iter().position(|&step| pulls <= step) {
            Some(rank) => self.cells[rank] as usize,
            None if self.grows => {
                (u64::from(self.cells[2]) * pulls / 1_000).try_into().unwrap_or(usize::MAX)
            }
            None => self.cells[2] as usize,
        }
    }
}

impl Depth {
    /// How many rows may be pulled after the first `pulls` before more cells are wanted than for these.
    pub fn rows_left(&self, pulls: u64) -> u64 {
        match STEPS.iter().find(|&&step| pulls < step) {
            _ if !self.grows => u64::MAX,
            Some(step) => step - pulls,
            None => 1,
        }
    }
}

/// The settings of one search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SearchParams {
    pub depth: Depth,
    pub order: Order,
    /// Refine every row of the index: the answer equals exact search.
    pub exact: bool,
    /// Standard deviations between a row's estimate and the bound used for pruning.
    pub epsilon: f32,
    /// No further cell is opened once this many codes were scanned; 0 = no limit.
    pub max_scan_tuples: u64,
    /// Rows the caller probably wants: sizes batches, never changes which rows come.
    pub limit_hint: usize,
    /// Bytes of scanned rows that the search may keep at a time. Changes how much work it is, never which
    /// rows come.
    pub memory: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_follows_the_rank() {
        let depth = Depth::calibrated([8, 20, 60]);
        assert_eq!(depth.cells_at(1), 8);
        assert_eq!(depth.cells_at(32), 8);
        assert_eq!(depth.cells_at(33), 20);
        assert_eq!(depth.cells_at(129), 60);
        assert_eq!(depth.cells_at(1_100), 60);
        assert_eq!(depth.cells_at(2_000), 120);
    }

    #[test]
    fn depth_never_shrinks() {
        let depth = Depth::calibrated([30, 20, 0]);
        let mut last = 0;
        for pulls in 1..5_000 {
            assert!(depth.cells_at(pulls) >= last, "at {pulls}");
            last = depth.cells_at(pulls);
        }
    }

    #[test]
    fn the_rows_left_at_a_depth_need_no_further_cells() {
        let depth = Depth::calibrated([8, 20, 60]);
        assert_eq!(depth.rows_left(0), 32);
        for pulls in 0..3_000 {
            let last = pulls + depth.rows_left(pulls);
            assert!(last > pulls);
            assert_eq!(depth.cells_at(last), depth.cells_at(pulls + 1), "at {pulls}");
        }
        assert_eq!(Depth::fixed(7).rows_left(5), u64::MAX);
    }

    #[test]
    fn fixed_depth_stays() {
        assert_eq!(Depth::fixed(7).cells_at(1), 7);
        assert_eq!(Depth::fixed(7).cells_at(1_000_000), 7);
    }
}
