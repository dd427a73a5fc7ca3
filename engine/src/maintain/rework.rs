//! From the living rows of cells to the cells of new segments: small ones merged, oversized ones split.
//!
//! After LIRE (Xu et al., "SPFresh: incremental in-place update for billion-scale vector search", SOSP 2023):
//! a cell is split where it grew, and rows near the split are checked for a nearer cell. Here that happens
//! among the cells of the segment that is rewritten anyway.

use rayon::{ThreadPool, prelude::*};

use super::{
    job::{Job, Origin},
    policy::Policy,
    reassign::reassign,
    train::{assign, train},
};
use crate::{
    build::{
        EncodedCell,
        decode::{decode_into, decode_rows},
        encode_rows, ids_of, mean_of,
    },
    cluster::{self, Assigner, Centroids, Interrupt, Interrupted},
    kernel::RacyBytes,
    quantize::{Model, cell_rank, plane2},
    root::Root,
};

/// A cell whose rows' mean moved further than this part of their squared spread from its centroid gets a new
/// one, and so a new id. Up to there the errors of plane 1 grow by 2.5 %.
const DRIFT: f64 = 0.05;
/// Cells of so many times the rows at which one is split are trained anew from a sample, rather than split with
/// all rows decoded.
const HUGE: usize = 32;

/// A cell being worked on.
#[derive(Debug)]
pub(super) struct Work {
    /// Its slot in the old root; nothing if it is new.
    pub slot: Option<u32>,
    /// Its centroid record, if it has one that stays.
    record: Option<Vec<u8>>,
    pub mean: Vec<f32>,
    pub spread: f32,
    /// Places of its rows.
    pub rows: Vec<u32>,
    pub pinned: bool,
    shrunk: bool,
    /// Plane 1, as long as its rows are those that it came with.
    pub blocks: Option<Vec<u8>>,
}

/// A cell of a new segment.
#[derive(Debug)]
pub(super) struct NewCell {
    /// Its slot in the old root, if it is not new.
    pub slot: Option<u32>,
    pub pinned: bool,
    /// Whether it was taken over as it was.
    pub copied: bool,
    pub cell: EncodedCell,
    pub origins: Vec<Origin>,
}

/// Where delta entries of a retired cell belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heir {
    /// A cell of the old root.
    Slot(u32),
    /// One of the new cells, by its place among the job's.
    New(usize),
}

/// What became of the cells of a job.
#[derive(Debug, Default)]
pub(super) struct Reworked {
    /// In neighbour order; none is empty.
    pub cells: Vec<NewCell>,
    pub retired: Vec<(u32, Heir)>,
    pub split: u64,
    pub merged: u64,
    pub moved: u64,
    pub reassigned: u64,
}

/// Computes on the pool.
pub(super) fn rework(
    root: &Root,
    policy: &Policy,
    job: &mut Job,
    pool: &ThreadPool,
    interrupt: Interrupt<'_>,
) -> Result<Reworked, Interrupted> {
    let model = &root.models()[0];
    let mut cells = std::mem::take(&mut job.cells);
    let works = cells.iter_mut().map(|cell| {
        let record = root.centroid_record(cell.slot).to_vec();
        let mut mean = vec![0.0; model.padded_dim()];
        decode_into(&record, &mut mean);
        Work {
            slot: Some(cell.slot),
            spread: cell_rank::spread(RacyBytes::new(&record), model.padded_dim()),
            record: Some(record),
            mean,
            rows: cell.rows.clone().collect(),
            pinned: cell.pinned,
            shrunk: cell.shrunk,
            blocks: cell.blocks.take(),
        }
    });
    let cells = works.collect();
    let mut bench = Bench { model, policy, job, pool, interrupt, cells, retired: Vec::new() };
    let merged = bench.merge_small()?;
    let (split, moved) = bench.split_large()?;
    let mut reassigned = 0;
    if policy.reassign && split > 0 {
        let rows = Decoder { model, records: &bench.job.records };
        reassigned = pool.install(|| reassign(&rows, &mut bench.cells, interrupt))?;
    }
    bench.drop_empty();
    let retired = bench.heirs();
    let cells = bench.encode()?;
    Ok(Reworked { cells, retired, split, merged, moved, reassigned })
}

/// Rows of a job.
pub(super) struct Decoder<'a> {
    pub model: &'a Model,
    records: &'a [u8],
}

impl Decoder<'_> {
    fn records(&self, places: &[u32]) -> Vec<u8> {
        let bytes = plane2::record_bytes(self.model.padded_dim());
        let record = |&place: &u32| &self.records[place as usize * bytes..][..bytes];
        places.iter().flat_map(record).copied().collect()
    }

    /// The rows at these places, one after the other.
    pub fn rows(&self, places: &[u32]) -> Vec<f32> {
        decode_rows(self.model, &self.records(places))
    }
}

struct Bench<'a> {
    model: &'a Model,
    policy: &'a Policy,
    job: &'a Job,
    pool: &'a ThreadPool,
    interrupt: Interrupt<'a>,
    cells: Vec<Work>,
    /// Cells of the old root that are no more, with their centroids.
    retired: Vec<(u32, Vec<f32>)>,
}

/// What a cell becomes.
enum Change {
    None,
    Parts(Vec<Vec<u32>>),
    Moved(Vec<f32>),
}

impl Bench<'_> {
    fn rows(&self) -> Decoder<'_> {
        Decoder { model: self.model, records: &self.job.records }
    }

    fn look(&self) -> Result<(), Interrupted> {
        if (self.interrupt)() { Err(Interrupted) } else { Ok(()) }
    }

    fn retire(&mut self, cell: &Work) {
        self.retired.extend(cell.slot.map(|slot| (slot, cell.mean.clone())));
    }

    /// Gives the rows of cells that shrank below a quarter of the target to the nearest others, smallest cell
    /// first. One cell is left, however small.
    fn merge_small(&mut self) -> Result<u64, Interrupted> {
        let small = |cell: &Work| {
            cell.shrunk && !cell.pinned && cell.rows.len() < self.policy.target_rows.div_ceil(4)
        };
        let mut candidates: Vec<usize> =
            (0..self.cells.len()).filter(|&cell| small(&self.cells[cell])).collect();
        let mut gone = vec![false; self.cells.len()];
        let mut merged = 0;
        while candidates.len() > usize::from(candidates.len() == self.cells.len() - merged) {
            self.look()?;
            let smallest = |&at: &usize| (self.cells[candidates[at]].rows.len(), candidates[at]);
            let Some(at) = (0..candidates.len()).min_by_key(smallest) else { break };
            let cell = candidates.swap_remove(at);
            gone[cell] = true;
            merged += 1;
            let rows = std::mem::take(&mut self.cells[cell].rows);
            if !rows.is_empty() {
                let others: Vec<usize> = (0..gone.len()).filter(|&cell| !gone[cell]).collect();
                for (row, target) in self.nearest(&rows, &others)? {
                    self.cells[target].rows.push(row);
                    self.cells[target].blocks = None;
                }
            }
            candidates
                .retain(|&cell| self.cells[cell].rows.len() < self.policy.target_rows.div_ceil(4));
        }
        let cells = std::mem::take(&mut self.cells);
        for (cell, gone) in cells.into_iter().zip(gone) {
            match gone {
                true => self.retire(&cell),
                false => self.cells.push(cell),
            }
        }
        Ok(merged as u64)
    }

    /// For each row, which of these cells is nearest.
    fn nearest(&self, rows: &[u32], cells: &[usize]) -> Result<Vec<(u32, usize)>, Interrupted> {
        let assigner = Assigner::new(
            self.model.metric,
            &centroids(self.model, cells.iter().map(|&cell| &self.cells[cell])),
        );
        let mut nearest = vec![0; rows.len()];
        assigner.assign(&self.rows().rows(rows), &mut nearest, Some(self.pool), self.interrupt)?;
        Ok(rows.iter().copied().zip(nearest.into_iter().map(|near| cells[near as usize])).collect())
    }

    /// Splits oversized cells, and gives a new centroid to those whose rows moved away.
    /// Returns how many of each.
    fn split_large(&mut self) -> Result<(u64, u64), Interrupted> {
        let mut huge = Vec::new();
        for (number, cell) in self.cells.iter().enumerate() {
            if !cell.pinned && cell.rows.len() > HUGE * self.policy.oversize() {
                huge.push((number, self.divide_huge(cell)?));
            }
        }
        let is_huge = |number: usize| huge.binary_search_by_key(&number, |huge| huge.0).is_ok();
        let changes: Result<Vec<Change>, Interrupted> = self.pool.install(|| {
            let cells = self.cells.par_iter().enumerate();
            cells
                .map(|(number, cell)| {
                    self.look()?;
                    let stays = cell.pinned || cell.blocks.is_some() || cell.rows.is_empty();
                    Ok(if stays || is_huge(number) { Change::None } else { self.change(cell) })
                })
                .collect()
        });
        let mut changes = changes?;
        for (number, parts) in huge {
            changes[number] = Change::Parts(parts);
        }
        let (mut split, mut moved) = (0, 0);
        for (cell, change) in std::mem::take(&mut self.cells).into_iter().zip(changes) {
            match change {
                Change::None => self.cells.push(cell),
                Change::Moved(mean) => {
                    moved += 1;
                    self.retire(&cell);
                    self.cells.push(self.new_cell(cell.rows, mean));
                }
                Change::Parts(parts) => {
                    split += 1;
                    self.retire(&cell);
                    let parts = parts.into_par_iter();
                    let parts: Vec<Work> = self
                        .pool
                        .install(|| parts.map(|rows| self.new_cell_around(rows)).collect());
                    self.cells.extend(parts);
                }
            }
        }
        Ok((split, moved))
    }

    fn change(&self, cell: &Work) -> Change {
        let width = self.model.padded_dim();
        let decoded = self.rows().rows(&cell.rows);
        if cell.rows.len() > self.policy.oversize() {
            let parts = self.parts(&cell.rows, &decoded, self.seed(cell));
            if parts.len() > 1 {
                return Change::Parts(parts);
            }
        }
        let mean = mean_of(&decoded, width);
        let spread = f64::from(cluster::spread(&decoded, &mean));
        let apart: f64 = mean.iter().zip(&cell.mean).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        // Centroids are known to 8 bits only: rows that are nearly equal do not move.
        let rounding = mean.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
        let least = f64::from(rounding).powi(2) * width as f64;
        match apart > DRIFT * spread * spread + least {
            true => Change::Moved(mean),
            false => Change::None,
        }
    }

    fn seed(&self, cell: &Work) -> u64 {
        self.model.seed ^ u64::from(cell.slot.unwrap_or_default())
    }

    fn parts(&self, rows: &[u32], decoded: &[f32], seed: u64) -> Vec<Vec<u32>> {
        let width = self.model.padded_dim();
        let labels = cluster::split(decoded, width, self.policy.target_rows, seed);
        let mut parts: Vec<Vec<u32>> = Vec::new();
        for (&row, label) in rows.iter().zip(labels) {
            let label = label as usize;
            parts.resize(parts.len().max(label + 1), Vec::new());
            parts[label].push(row);
        }
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// Divides a cell that is too large to be decoded.
    fn divide_huge(&self, cell: &Work) -> Result<Vec<Vec<u32>>, Interrupted> {
        let records = self.rows().records(&cell.rows);
        let lists = (cell.rows.len() / self.policy.target_rows).max(2) as u32;
        let (model, seed) = (self.model, self.seed(cell));
        let (pool, interrupt) = (self.pool, self.interrupt);
        let assigner = train(model, &records, lists, &[], seed, pool, interrupt)?;
        let members = assign(model, &records, &assigner, pool, interrupt, &mut |_, _| {})?;
        drop(records);
        let mut parts = Vec::new();
        for members in members {
            let rows: Vec<u32> = members.iter().map(|&row| cell.rows[row as usize]).collect();
            self.look()?;
            match rows.len() > self.policy.oversize() {
                true => parts.append(&mut self.parts(&rows, &self.rows().rows(&rows), seed)),
                false => parts.push(rows),
            }
        }
        parts.retain(|part| !part.is_empty());
        Ok(parts)
    }

    fn new_cell_around(&self, rows: Vec<u32>) -> Work {
        let mean = mean_of(&self.rows().rows(&rows), self.model.padded_dim());
        self.new_cell(rows, mean)
    }

    fn new_cell(&self, rows: Vec<u32>, mean: Vec<f32>) -> Work {
        let spread = cluster::spread(&self.rows().rows(&rows), &mean);
        Work {
            slot: None,
            record: None,
            mean,
            spread,
            rows,
            pinned: false,
            shrunk: false,
            blocks: None,
        }
    }

    /// Cells that gave all their rows to others are no more, but for one.
    fn drop_empty(&mut self) {
        let mut left = self.cells.len();
        for cell in std::mem::take(&mut self.cells) {
            if cell.rows.is_empty() && !cell.pinned && left > 1 {
                left -= 1;
                self.retire(&cell);
            } else {
                self.cells.push(cell);
            }
        }
    }

    /// The nearest cell for each that is no more.
    fn heirs(&self) -> Vec<(u32, Heir)> {
        // As the new cells will be numbered: those without rows are not written.
        let mut written = 0;
        let heirs = self.cells.iter().map(|cell| {
            let place = written;
            written += usize::from(!cell.rows.is_empty());
            cell.slot.map_or(Heir::New(place), Heir::Slot)
        });
        let heirs: Vec<Heir> = heirs.collect();
        let heir = |mean: &[f32]| {
            let apart = self.cells.iter().map(|cell| -> f32 {
                mean.iter().zip(&cell.mean).map(|(a, b)| (a - b) * (a - b)).sum()
            });
            let nearest = apart.zip(&heirs).min_by(|a, b| a.0.total_cmp(&b.0));
            nearest.map(|(_, &heir)| heir)
        };
        self.retired.iter().filter_map(|(slot, mean)| Some((*slot, heir(mean)?))).collect()
    }

    fn encode(self) -> Result<Vec<NewCell>, Interrupted> {
        let Self { model, job, pool, interrupt, cells, .. } = self;
        let rows = Decoder { model, records: &job.records };
        let encode = |work: Work| {
            if interrupt() {
                return Err(Interrupted);
            }
            let records = rows.records(&work.rows);
            let origin = |place: u32| job.origins[place as usize];
            let copied = work.blocks.is_some();
            let (cell, origins) = match (work.blocks, work.record) {
                (Some(blocks), Some(centroid)) => {
                    let ids = ids_of(&records, model.padded_dim());
                    let origins = work.rows.into_iter().map(origin).collect();
                    (EncodedCell { centroid, blocks, ids, records }, origins)
                }
                (_, record) => {
                    let decoded = decode_rows(model, &records);
                    let (cell, order) = encode_rows(model, records, decoded, record);
                    let origins = order.iter().map(|&row| origin(work.rows[row as usize]));
                    let origins = origins.collect();
                    (cell, origins)
                }
            };
            Ok(NewCell { slot: work.slot, pinned: work.pinned, copied, cell, origins })
        };
        let cells: Vec<Work> = cells.into_iter().filter(|cell| !cell.rows.is_empty()).collect();
        pool.install(|| cells.into_par_iter().map(encode).collect())
    }
}

/// Cells as [`Assigner`] wants them.
pub(super) fn centroids<'a>(model: &Model, cells: impl Iterator<Item = &'a Work>) -> Centroids {
    let (mut data, mut spreads) = (Vec::new(), Vec::new());
    for cell in cells {
        data.extend_from_slice(&cell.mean);
        spreads.push(cell.spread);
    }
    Centroids::new(model.padded_dim(), data, spreads)
}
