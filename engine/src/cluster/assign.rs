use super::centroids::Centroids;
use super::lloyd::{Cells, Members, lloyd_here};
use super::norm_space::{NormSpace, placed};
use super::space::{Nearest, norm2, scale_of};
use super::{Interrupt, Interrupted, parallel};
use crate::Metric;

/// Cells up to which all are compared.
const FLAT_CELLS: usize = 2048;
/// Rows of one task.
const TASK_ROWS: usize = 512;
/// Super-cells whose cells are looked at for a row.
const PROBES: usize = 8;

/// Finds the cell of a row: the one whose centroid is nearest (inner product: nearest in direction
/// and logarithm of the norm).
///
/// Up to 2,048 cells all centroids are compared. Above, centroids are grouped into about the square
/// root of their number of super-cells, and only those of the nearest super-cells are compared: a
/// few rows in a thousand get a cell that is only nearly the nearest.
pub struct Assigner {
    dim: usize,
    cells: usize,
    space: Option<NormSpace>,
    top: Nearest,
    /// Empty when flat.
    groups: Vec<Group>,
}

struct Group {
    nearest: Nearest,
    cells: Vec<u32>,
}

impl Assigner {
    /// An assigner to these cells (at least one), best with centroids as the index stores them
    /// (decoded), so that build and insert agree.
    ///
    /// # Panics
    /// If there is no cell.
    pub fn new(metric: Metric, cells: &Centroids) -> Self {
        Self::with_flat_cells(metric, cells, FLAT_CELLS)
    }

    /// [`Self::new`] with another limit of the flat method.
    pub(super) fn with_flat_cells(metric: Metric, cells: &Centroids, flat_cells: usize) -> Self {
        assert!(!cells.is_empty(), "there is a cell");
        let dim = cells.dim();
        if metric != Metric::InnerProduct {
            return Self::build(dim, None, dim, cells.as_slice(), flat_cells);
        }
        let (means, spreads) = (cells.as_slice(), cells.spreads());
        let squares = means
            .chunks_exact(dim)
            .zip(spreads)
            .map(|(mean, &spread)| norm2(mean) + f64::from(spread).powi(2));
        let space = NormSpace::new(dim, squares);
        let placed = space.centroids(means, spreads);
        let width = space.width();
        Self::build(dim, Some(space), width, &placed, flat_cells)
    }

    /// By squared distance to `centroids` as they are.
    pub(super) fn plain(dim: usize, centroids: &[f32]) -> Self {
        Self::build(dim, None, dim, centroids, FLAT_CELLS)
    }

    fn build(
        dim: usize,
        space: Option<NormSpace>,
        width: usize,
        centroids: &[f32],
        flat_cells: usize,
    ) -> Self {
        let cells = centroids.len() / width;
        if cells <= flat_cells {
            let top = Nearest::new(centroids, width);
            return Self { dim, cells, space, top, groups: Vec::new() };
        }
        let supers = (cells as f64).sqrt().round() as usize;
        let Cells { centroids: top, labels } =
            lloyd_here(centroids, width, supers, 6, cells as u64);
        let supers = top.len() / width;
        let members = Members::new(labels.iter().copied(), supers);
        let scale = scale_of(centroids, width);
        let groups = (0..supers)
            .map(|g| {
                let cells = members.of(g).to_vec();
                let rows: Vec<f32> = cells
                    .iter()
                    .flat_map(|&c| &centroids[c as usize * width..][..width])
                    .copied()
                    .collect();
                Group { nearest: Nearest::with_scale(&rows, width, scale), cells }
            })
            .collect();
        Self { dim, cells, space, top: Nearest::new(&top, width), groups }
    }

    /// Whether all cells are compared.
    pub(super) fn is_flat(&self) -> bool {
        self.groups.is_empty()
    }

    /// The number of cells.
    pub fn len(&self) -> usize {
        self.cells
    }

    /// False: there is always a cell.
    pub fn is_empty(&self) -> bool {
        self.cells == 0
    }

    /// Components of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Writes the cell of each of `rows` (n x dim, model space) to `cells` (n). Batches of a few
    /// thousand rows or more keep all threads of the pool busy.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn assign(
        &self,
        rows: &[f32],
        cells: &mut [u32],
        pool: Option<&rayon::ThreadPool>,
        interrupted: Interrupt,
    ) -> Result<(), Interrupted> {
        assert_eq!(rows.len(), cells.len() * self.dim, "a cell for each row");
        parallel::chunks(pool, interrupted, cells, TASK_ROWS, |at, cells| {
            let rows = &rows[at * self.dim..][..cells.len() * self.dim];
            let rows = placed(self.space.as_ref(), rows);
            if self.is_flat() {
                let mut scores = [0.0; TASK_ROWS];
                self.top.find(&rows, cells, &mut scores[..cells.len()]);
            } else {
                self.assign_two_level(&rows, cells);
            }
        })
    }

    /// For each row the nearest `PROBES` super-cells; then, super-cell by super-cell, all rows that
    /// look at it together.
    fn assign_two_level(&self, rows: &[f32], cells: &mut [u32]) {
        let (n, supers) = (cells.len(), self.top.len());
        let dim = rows.len() / n;
        let probes = PROBES.min(supers);
        let mut scores = vec![0.0; n * supers];
        self.top.scores(rows, &mut scores);
        let mut visits: Vec<(u32, u32)> = Vec::with_capacity(n * probes);
        let mut order: Vec<u32> = Vec::with_capacity(supers);
        for (r, scores) in scores.chunks_exact(supers).enumerate() {
            order.clear();
            order.extend(0..supers as u32);
            if probes < supers {
                order.select_nth_unstable_by(probes - 1, |&a, &b| {
                    scores[a as usize].total_cmp(&scores[b as usize]).then(a.cmp(&b))
                });
            }
            visits.extend(order[..probes].iter().map(|&s| (s, r as u32)));
        }
        visits.sort_unstable();

        cells.fill(0);
        let mut low = vec![f32::INFINITY; n];
        let mut batch: Vec<f32> = Vec::new();
        let mut best: Vec<u32> = Vec::new();
        let mut score: Vec<f32> = Vec::new();
        for visits in visits.chunk_by(|a, b| a.0 == b.0) {
            let group = &self.groups[visits[0].0 as usize];
            batch.clear();
            for &(_, r) in visits {
                batch.extend_from_slice(&rows[r as usize * dim..][..dim]);
            }
            best.resize(visits.len(), 0);
            score.resize(visits.len(), 0.0);
            group.nearest.find(&batch, &mut best, &mut score);
            for ((&(_, r), &b), &s) in visits.iter().zip(&best).zip(&score) {
                let (r, cell) = (r as usize, group.cells[b as usize]);
                if s < low[r] || (s == low[r] && cell < cells[r]) {
                    low[r] = s;
                    cells[r] = cell;
                }
            }
        }
    }
}
