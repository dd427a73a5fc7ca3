//! Which segments a compaction rewrites.

use std::collections::HashMap;

use super::{
    place::centroids_of,
    policy::{MAX_DROPPED, Policy},
    runs::{runs, tier},
};
use crate::{
    cluster::Assigner,
    root::{Reference, Root},
    segment::{Piece, RowPlane},
};

/// The rows of a cell that a compaction reads.
#[derive(Debug, Clone)]
pub(super) struct PlannedCell {
    pub slot: u32,
    pub pieces: Vec<Piece>,
    /// Rows of the cell lie elsewhere too, relative to its centroid: it can be neither split nor merged.
    pub pinned: bool,
}

impl PlannedCell {
    pub fn rows(&self) -> usize {
        self.pieces.iter().map(|piece| piece.slots.get() as usize).sum()
    }
}

/// A piece of work with a result of about one segment.
#[derive(Debug, Clone)]
pub(super) enum PlannedJob {
    /// Cells, in neighbour order, whose rows become rows of ordinary segments.
    Cells(Vec<PlannedCell>),
    /// Cells, by slot, whose rows stay in the delta.
    Delta(Vec<PlannedCell>),
}

/// One round of a compaction. All segments that it names are read, and dropped by its publication.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Positions of the segments that are rewritten.
    pub segments: Vec<u32>,
    /// Positions of the delta segments whose rows go into them, or into one run of delta segments.
    pub delta: Vec<u32>,
    pub(super) jobs: Vec<PlannedJob>,
}

impl Plan {
    /// Cells whose rows stay in the delta.
    pub(super) fn delta_cells(&self) -> impl Iterator<Item = &PlannedCell> {
        self.jobs.iter().flat_map(|job| match job {
            PlannedJob::Delta(cells) => &cells[..],
            PlannedJob::Cells(_) => &[],
        })
    }
}

/// Plans the next round; nothing if there is nothing to do. `dead`: for each segment of the root how many of
/// its rows are dead.
///
/// A segment is rewritten when enough of it changed; once one is, so are those that come at least half as far, so
/// that they do not need the delta to be rewritten again soon after. All delta segments are then read: the rows
/// for cells of these segments go there, the others into one run of delta segments. (Unless that would be so few
/// of them that the others would be written more than some twenty times before their turn comes: a small segment
/// changes quickly.) If no segment changed enough, and there are too many runs in the delta, the smallest of these
/// are merged.
///
/// Segments with slot references, rows of another model, or uncompressed rows stay as they are.
pub fn plan(root: &Root, dead: &[u32], policy: &Policy) -> Option<Plan> {
    let survey = Survey::new(root, dead);
    let mut changed = survey.changed(policy);
    let runs = runs(root, &|segment| survey.mergeable(segment));
    let incoming = |segment: &u32| survey.incoming[*segment as usize];
    let taken: u64 = changed.iter().map(incoming).sum();
    let waiting: u64 = runs.iter().map(|run| run.rows).sum();
    if (taken as f64) < waiting as f64 * policy.changed_share / 2.0 {
        changed.retain(|segment| incoming(segment) == 0);
    }
    let takes_rows = changed.iter().any(|segment| incoming(segment) > 0);
    let nowhere = survey.bases().next().is_none();
    let nothing_else = changed.is_empty() && policy.changed_share <= 0.0;
    let untidy = || {
        let mut segments = runs.iter().flat_map(|run| &run.segments);
        runs.len() > 1 || segments.any(|&segment| survey.dead(segment) > 0)
    };
    let delta = match takes_rows || nowhere || (nothing_else && untidy()) {
        true => runs,
        false => tier(runs, policy.max_delta_runs),
    };
    let delta = delta.into_iter().flat_map(|run| run.segments).collect();
    survey.plan(changed, delta, policy)
}

/// What the root says of its segments.
struct Survey<'a> {
    root: &'a Root,
    dead: &'a [u32],
    /// By segment: whether other rows refer to it or it to others.
    entangled: Vec<bool>,
    /// By slot: a segment that can be rewritten and has rows of the cell, or else of a near one.
    home: Vec<Option<u32>>,
    /// By segment: rows of delta segments whose cells live there.
    incoming: Vec<u64>,
}

impl<'a> Survey<'a> {
    fn new(root: &'a Root, dead: &'a [u32]) -> Self {
        let segments = root.segments().len();
        let mut entangled = vec![false; segments];
        for reference in root.references() {
            entangled[reference.segment.get() as usize] = true;
            if reference.target != Reference::GONE {
                entangled[reference.target.get() as usize] = true;
            }
        }
        for piece in root.pieces().iter().filter(|piece| piece.has_refs()) {
            entangled[piece.segment.get() as usize] = true;
        }
        let mut survey =
            Self { root, dead, entangled, home: Vec::new(), incoming: vec![0; segments] };
        survey.home = survey.homes();
        for piece in root.delta_pieces() {
            if survey.mergeable(piece.segment.get())
                && let Some(home) = survey.home[piece.cell.get() as usize]
            {
                survey.incoming[home as usize] += u64::from(piece.slots.get());
            }
        }
        survey
    }

    fn dead(&self, segment: u32) -> u64 {
        self.dead.get(segment as usize).copied().unwrap_or(0).into()
    }

    fn plain(&self, segment: u32) -> bool {
        self.root.model_of(segment) == 0
            && !self.entangled[segment as usize]
            && self.root.geometry(segment).row_plane() == RowPlane::None
    }

    fn is_base(&self, segment: u32) -> bool {
        !self.root.segments()[segment as usize].is_delta() && self.plain(segment)
    }

    fn mergeable(&self, segment: u32) -> bool {
        self.root.segments()[segment as usize].is_delta() && self.plain(segment)
    }

    fn bases(&self) -> impl Iterator<Item = u32> {
        (0..self.root.segments().len() as u32).filter(|&segment| self.is_base(segment))
    }

    /// Where rows of each cell are at home. A cell all of whose rows are in the delta lives where the nearest
    /// one lives that has others.
    fn homes(&self) -> Vec<Option<u32>> {
        let root = self.root;
        let own = |slot| {
            let segments = root.pieces_of(slot).iter().map(|piece| piece.segment.get());
            segments.into_iter().find(|&segment| self.is_base(segment))
        };
        let mut homes: Vec<Option<u32>> = (0..root.cell_count() as u32).map(own).collect();
        let mut stray: Vec<u32> = root.delta_pieces().iter().map(|p| p.cell.get()).collect();
        stray.sort_unstable();
        stray.dedup();
        stray.retain(|&slot| homes[slot as usize].is_none());
        let settled = (0..homes.len() as u32).filter(|&slot| homes[slot as usize].is_some());
        let settled: Vec<u32> = settled.collect();
        if stray.is_empty() || settled.is_empty() {
            return homes;
        }
        let assigner = Assigner::new(root.metric(), &centroids_of(root, &settled));
        let mut nearest = vec![0; stray.len()];
        let rows = centroids_of(root, &stray);
        // Nobody interrupts.
        let _ = assigner.assign(rows.as_slice(), &mut nearest, None, &|| false);
        for (slot, near) in stray.into_iter().zip(nearest) {
            homes[slot as usize] = homes[settled[near as usize] as usize];
        }
        homes
    }

    /// The segments to be rewritten, those that changed most first.
    fn changed(&self, policy: &Policy) -> Vec<u32> {
        let share = |segment: u32| {
            let changed = self.incoming[segment as usize] + self.dead(segment);
            changed as f64 / f64::from(self.root.geometry(segment).rows().max(1))
        };
        let mut shares: Vec<(f64, u32)> = self
            .bases()
            .map(|segment| (share(segment), segment))
            .filter(|&(share, _)| share > 0.0 && share >= policy.changed_share / 2.0)
            .collect();
        shares.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        match shares.first() {
            Some(&(most, _)) if most >= policy.changed_share => {}
            _ => shares.clear(),
        }
        shares.truncate(policy.max_segments.max(1));
        shares.into_iter().map(|(_, segment)| segment).collect()
    }

    /// The round that rewrites these segments and merges these of the delta.
    fn plan(&self, mut segments: Vec<u32>, mut delta: Vec<u32>, policy: &Policy) -> Option<Plan> {
        // The small ones of the delta first: they are the ones that are many.
        delta.sort_by_key(|&segment| (self.root.geometry(segment).rows(), segment));
        delta.truncate(MAX_DROPPED - 1);
        segments.truncate(MAX_DROPPED - delta.len());
        if segments.is_empty() && delta.is_empty() {
            return None;
        }
        segments.sort_unstable();
        delta.sort_unstable();
        let mut layout = Layout::new(self, &segments, &delta, policy);
        layout.base_jobs(&segments);
        layout.delta_jobs();
        Some(Plan { segments, delta, jobs: layout.jobs })
    }
}

/// Divides the cells of a round among its jobs.
struct Layout<'a> {
    survey: &'a Survey<'a>,
    /// By slot, what there is to be read.
    cells: HashMap<u32, PlannedCell>,
    /// Rows of a job.
    job_rows: usize,
    jobs: Vec<PlannedJob>,
}

impl<'a> Layout<'a> {
    fn new(survey: &'a Survey<'a>, segments: &[u32], delta: &[u32], policy: &Policy) -> Self {
        let root = survey.root;
        let read = |segment: u32| {
            segments.binary_search(&segment).is_ok() || delta.binary_search(&segment).is_ok()
        };
        // A new centroid would be needed in the space of each model.
        let spaces = (0..root.models().len()).filter(|&m| !root.centroid_blocks_in(m).is_empty());
        let pinned = spaces.count() > 1;
        let mut cells: HashMap<u32, PlannedCell> = HashMap::new();
        for piece in root.pieces().iter().chain(root.delta_pieces()) {
            let slot = piece.cell.get();
            let cell = cells.entry(slot);
            let cell = cell.or_insert(PlannedCell { slot, pieces: Vec::new(), pinned });
            match read(piece.segment.get()) {
                true => cell.pieces.push(*piece),
                false => cell.pinned = true,
            }
        }
        cells.retain(|_, cell| !cell.pieces.is_empty());
        let job_rows = policy.segment_rows(&root.models()[0]);
        Self { survey, cells, job_rows, jobs: Vec::new() }
    }

    /// Jobs for the cells of these segments, in their order there; segments that became small are joined.
    fn base_jobs(&mut self, segments: &[u32]) {
        let survey = self.survey;
        let (mut own, mut guests): (HashMap<u32, Vec<Piece>>, HashMap<u32, Vec<u32>>) =
            Default::default();
        for piece in survey.root.pieces() {
            own.entry(piece.segment.get()).or_default().push(*piece);
        }
        for &slot in self.cells.keys() {
            let home = survey.home[slot as usize];
            if let Some(home) = home.filter(|home| segments.binary_search(home).is_ok()) {
                guests.entry(home).or_default().push(slot);
            }
        }
        let first_slot = |segment: &u32| own[segment].iter().map(|piece| piece.cell.get()).min();
        let mut order: Vec<u32> = segments.to_vec();
        order.retain(|segment| own.contains_key(segment));
        order.sort_by_key(|segment| (first_slot(segment), *segment));
        let mut job = Job::default();
        for segment in order {
            let mut pieces = own.remove(&segment).unwrap_or_default();
            pieces.sort_by_key(|piece| piece.first_ordinal.get());
            let mut slots: Vec<u32> = pieces.iter().map(|piece| piece.cell.get()).collect();
            let mut visitors = guests.remove(&segment).unwrap_or_default();
            visitors.sort_unstable();
            slots.append(&mut visitors);
            let cells: Vec<PlannedCell> =
                slots.iter().filter_map(|slot| self.cells.remove(slot)).collect();
            let rows: usize = cells.iter().map(PlannedCell::rows).sum();
            let rows = rows.saturating_sub(survey.dead(segment) as usize);
            if job.rows + rows > self.job_rows {
                self.close(&mut job);
            }
            for cell in cells {
                // One segment may have received rows for many.
                if job.rows > 2 * self.job_rows {
                    self.close(&mut job);
                }
                job.rows += cell.rows();
                job.cells.push(cell);
            }
        }
        self.close(&mut job);
        // Nothing but delta: its rows become the first segment.
        if survey.bases().next().is_none() {
            let mut slots: Vec<u32> = self.cells.keys().copied().collect();
            slots.sort_unstable();
            for slot in slots {
                if job.rows > self.job_rows {
                    self.close(&mut job);
                }
                let Some(cell) = self.cells.remove(&slot) else { continue };
                job.rows += cell.rows();
                job.cells.push(cell);
            }
            self.close(&mut job);
        }
    }

    fn close(&mut self, job: &mut Job) {
        let job = std::mem::take(job);
        if !job.cells.is_empty() {
            self.jobs.push(PlannedJob::Cells(job.cells));
        }
    }

    /// Jobs for what is left: rows that stay in the delta.
    fn delta_jobs(&mut self) {
        let mut rest: Vec<PlannedCell> = self.cells.drain().map(|(_, cell)| cell).collect();
        rest.sort_unstable_by_key(|cell| cell.slot);
        let mut job = Job::default();
        for cell in rest {
            if job.rows > 0 && job.rows + cell.rows() > self.job_rows {
                self.jobs.push(PlannedJob::Delta(std::mem::take(&mut job).cells));
            }
            job.rows += cell.rows();
            job.cells.push(cell);
        }
        if !job.cells.is_empty() {
            self.jobs.push(PlannedJob::Delta(job.cells));
        }
    }
}

#[derive(Default)]
struct Job {
    cells: Vec<PlannedCell>,
    rows: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Metric, ObjectId,
        quantize::{Model, plane2},
        root::RootBuilder,
        segment::{CellSpec, Packing, SegmentLayout, SegmentName, SegmentSpec},
    };

    const DIM: usize = 16;

    fn object(number: u8) -> ObjectId {
        ObjectId([number; 16])
    }

    /// A root of so many cells, with segments of rows by cell; those of the delta come last.
    fn root(cells: u32, base: &[&[(u32, u32)]], delta: &[&[(u32, u32)]]) -> Root {
        let model = Model::new(0, Metric::L2, DIM, 1, vec![0.0; DIM]).unwrap();
        let mut builder = RootBuilder::new(vec![model.clone()]);
        for id in 0..cells {
            let mut centroid = Vec::new();
            plane2::encode(&model, &[id as f32; DIM], id.into(), &mut centroid);
            builder.cell(id, &[&centroid]);
        }
        let all =
            base.iter().map(|rows| (rows, false)).chain(delta.iter().map(|rows| (rows, true)));
        for ((rows, delta), number) in all.zip(1..) {
            let spec = SegmentSpec {
                name: SegmentName { object: object(number), ..SegmentName::default() },
                model: 0,
                dim: DIM as u32,
                bits: 2,
                packing: if delta { Packing::Dense } else { Packing::PerCell },
                delta,
                row_plane: RowPlane::None,
                cells: rows.iter().map(|&(cell, rows)| CellSpec::plain(cell, rows)).collect(),
                references: Vec::new(),
                model_bytes: Vec::new(),
            };
            let layout = SegmentLayout::from_spec(&spec).unwrap();
            let pieces = layout.cells().iter().map(|cell| cell.piece(cell.cell_id.get(), 0));
            builder.entry(*layout.entry(), pieces);
        }
        let sections = builder.build().unwrap();
        Root::from_sections(sections.into_iter().map(|(key, bytes)| (key.code(), bytes))).unwrap()
    }

    fn planned(root: &Root, dead: &[u32], policy: Policy) -> (Vec<u32>, Vec<u32>) {
        plan(root, dead, &policy).map_or_else(Default::default, |plan| (plan.segments, plan.delta))
    }

    #[test]
    fn segments_that_changed_little_come_along_with_those_that_changed_much() {
        let base: [&[(u32, u32)]; 3] = [&[(0, 1_000)], &[(1, 1_000)], &[(2, 1_000)]];
        let policy = Policy::automatic(400);
        let calm = root(3, &base, &[&[(0, 99), (1, 60), (2, 40)]]);
        assert_eq!(planned(&calm, &[0; 4], policy), (vec![], vec![]));
        assert_eq!(planned(&calm, &[1, 0, 0, 0], policy), (vec![0, 1], vec![3]));
        assert_eq!(planned(&calm, &[0, 0, 100, 0], policy), (vec![0, 1, 2], vec![3]));
        let one = Policy { max_segments: 1, ..policy };
        assert_eq!(planned(&calm, &[0, 0, 100, 0], one), (vec![2], vec![3]));
        let explicit = Policy::explicit(400);
        assert_eq!(planned(&calm, &[0; 4], explicit), (vec![0, 1, 2], vec![3]));
    }

    #[test]
    fn deaths_alone_leave_the_delta_alone() {
        let base: [&[(u32, u32)]; 2] = [&[(0, 1_000)], &[(1, 1_000)]];
        let root = root(2, &base, &[&[(0, 10)]]);
        assert_eq!(planned(&root, &[0, 300, 0], Policy::automatic(400)), (vec![1], vec![]));
    }

    #[test]
    fn a_small_segment_does_not_make_the_delta_be_written_again_and_again() {
        let base: [&[(u32, u32)]; 2] = [&[(0, 10_000)], &[(1, 10)]];
        let root = root(2, &base, &[&[(0, 400), (1, 4)]]);
        assert_eq!(planned(&root, &[0; 3], Policy::automatic(400)), (vec![], vec![]));
        assert_eq!(planned(&root, &[0; 3], Policy::explicit(400)), (vec![0, 1], vec![2]));
    }

    #[test]
    fn rows_of_a_cell_that_has_no_others_go_to_where_the_nearest_cell_lives() {
        let base: [&[(u32, u32)]; 2] = [&[(0, 100)], &[(5, 100)]];
        let root = root(6, &base, &[&[(4, 50)]]);
        let plan = plan(&root, &[0; 3], &Policy::automatic(400)).unwrap();
        assert_eq!((plan.segments, plan.delta), (vec![1], vec![2]));
        let [PlannedJob::Cells(cells)] = &plan.jobs[..] else { panic!("{:?}", plan.jobs) };
        assert_eq!(cells.iter().map(|cell| cell.slot).collect::<Vec<_>>(), [5, 4]);
    }

    #[test]
    fn a_segment_with_rows_for_many_is_several_jobs() {
        let cells: Vec<(u32, u32)> = (0..10).map(|cell| (cell, 100)).collect();
        let rows: Vec<(u32, u32)> = (0..10).map(|cell| (cell, 1_000)).collect();
        let root = root(10, &[&cells], &[&rows]);
        let policy = Policy { segment_bytes: 1_000 * 56, ..Policy::automatic(400) };
        let plan = plan(&root, &[0; 2], &policy).unwrap();
        assert!(plan.jobs.len() >= 4, "{}", plan.jobs.len());
        let rows = |job: &PlannedJob| match job {
            PlannedJob::Cells(cells) => cells.iter().map(PlannedCell::rows).sum::<usize>(),
            PlannedJob::Delta(_) => 0,
        };
        assert_eq!(plan.jobs.iter().map(rows).sum::<usize>(), 11_000);
        assert!(plan.jobs.iter().all(|job| rows(job) < 4_000));
    }
}
