//! A round of a compaction, job by job: read, compute, write.
//!
//! The three steps are separate because they belong on different threads: a part source and a sink may belong to
//! one thread, what lies between them is computation.

use std::{io, sync::Arc};

use rayon::{ThreadPool, prelude::*};

use super::{
    delta_segment::{self, DeltaCell},
    job::{Job, Origin},
    plan::Plan,
    policy::Policy,
    rework::{Heir, NewCell, Reworked, rework},
};
use crate::{
    build::{EncodedCell, write_cells},
    cluster::{Interrupt, Interrupted},
    kernel::RacyBytes,
    quantize::{Model, cell_rank, plane2},
    root::{Root, RootEdit, RootError, SectionKey},
    search::Tombstones,
    segment::{Packing, PartSource, SegmentName, SourceError, WriteError, WrittenSegment},
};

/// A delta segment whose cells have at least so many rows on average has blocks of their own for them: a search
/// then reads what it scans, rather than parts of 256 KiB with the rows of a hundred cells. The padding of the
/// last block of a cell is at most half of plane 1 then.
const ROWS_FOR_OWN_BLOCKS: usize = 16;

/// Writes one segment of this name.
pub type SegmentWrite<'a> =
    &'a mut dyn FnMut(SegmentName, &mut dyn io::Write) -> Result<WrittenSegment, WriteError>;

/// Takes finished segments.
pub trait SegmentSink {
    /// Why a segment could not be taken.
    type Error;

    /// Draws a new name, lets `write` write the object, and keeps it. Called on the thread that calls
    /// [`Compaction::write`]. Returns what `write` returned.
    fn segment(&mut self, write: SegmentWrite<'_>) -> Result<WrittenSegment, Self::Error>;
}

/// A segment that a compaction wrote.
#[derive(Debug, Clone)]
pub struct CompactedSegment {
    /// Its name.
    pub name: SegmentName,
    /// For each ordinal where the row was before: rows that died since they were read are dead here too.
    pub origins: Vec<Origin>,
}

/// What a compaction did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CompactionStats {
    /// Rows written, and of these, rows that stay in the delta.
    pub rows: u64,
    pub delta_rows: u64,
    /// Rows dropped because they are dead.
    pub dead: u64,
    /// Bytes of parts read, and of objects written.
    pub bytes_read: u64,
    pub bytes_written: u64,
    /// Cells taken over with plane 1 as it was.
    pub copied: u64,
    /// Cells split, merged into others, and given a new centroid.
    pub split: u64,
    pub merged: u64,
    pub moved: u64,
    /// Rows that changed cells because of a split near by.
    pub reassigned: u64,
}

/// The result of a round, to be published.
#[derive(Debug)]
pub struct Outcome {
    /// The sections of the new root.
    pub sections: Vec<(SectionKey, Vec<u8>)>,
    /// Objects that the new root does not name any more.
    pub dropped: Vec<SegmentName>,
    /// Objects that it names for the first time.
    pub segments: Vec<CompactedSegment>,
    /// The next cell id.
    pub next_cell: u32,
    pub stats: CompactionStats,
}

/// A round under way. Nothing is changed until its [`Outcome`] is published; to give it up, drop it (and
/// whatever the sink took).
///
/// ```text
/// while let Some(job) = compaction.read(source, dead)? {      // where the source belongs
///     let done = compaction.encode(job, pool, interrupt)?;    // anywhere
///     compaction.write(done, sink)?;                          // where the sink belongs
/// }
/// let outcome = compaction.finish(named)?;
/// ```
pub struct Compaction {
    root: Arc<Root>,
    policy: Policy,
    plan: Plan,
    /// Jobs read.
    read: usize,
    edit: RootEdit,
    next_cell: u32,
    /// How rows that stay in the delta are packed.
    packing: Packing,
    segments: Vec<CompactedSegment>,
    stats: CompactionStats,
}

/// A job ready to be written.
#[derive(Debug)]
pub struct EncodedJob(Encoded);

#[derive(Debug)]
enum Encoded {
    Cells(Reworked),
    Delta { slots: Vec<u32>, cells: Vec<DeltaCell>, origins: Vec<Origin> },
}

impl Compaction {
    /// Begins the round of a plan that was made for this root. `next_cell`: an id above those of all cells
    /// that the index ever had.
    pub fn new(root: Arc<Root>, plan: Plan, policy: Policy, next_cell: u32) -> Self {
        let packing = packing(&plan);
        let edit = RootEdit::new(&root);
        Self {
            root,
            policy,
            plan,
            read: 0,
            edit,
            next_cell,
            packing,
            segments: Vec::new(),
            stats: CompactionStats::default(),
        }
    }

    /// How many jobs the round has. Each takes memory for about one segment and the rows that come into it.
    pub fn jobs(&self) -> usize {
        self.plan.jobs.len()
    }

    /// What was done so far.
    pub fn stats(&self) -> CompactionStats {
        self.stats
    }

    /// Reads the next job; nothing if all were read. `dead` names segments by their position in the root. Asks for
    /// parts ahead, some megabytes at a time.
    pub fn read(
        &mut self,
        source: &mut dyn PartSource,
        dead: &dyn Tombstones,
    ) -> Result<Option<Job>, SourceError> {
        let Some(planned) = self.plan.jobs.get(self.read) else { return Ok(None) };
        let job = Job::read(&self.root, planned, source, dead)?;
        self.read += 1;
        self.stats.dead += job.dead;
        self.stats.bytes_read += job.bytes_read;
        Ok(Some(job))
    }

    /// Makes the cells of new segments of a job. Pure computation, on the pool.
    pub fn encode(
        &mut self,
        mut job: Job,
        pool: &ThreadPool,
        interrupt: Interrupt<'_>,
    ) -> Result<EncodedJob, Interrupted> {
        let encoded = match job.stays_in_delta {
            false => Encoded::Cells(rework(&self.root, &self.policy, &mut job, pool, interrupt)?),
            true => encode_delta(&self.root, job, pool, interrupt)?,
        };
        Ok(EncodedJob(encoded))
    }

    /// Writes the segments of a job.
    pub fn write<S: SegmentSink>(&mut self, job: EncodedJob, sink: &mut S) -> Result<(), S::Error> {
        match job.0 {
            Encoded::Cells(reworked) => self.write_cells(reworked, sink),
            Encoded::Delta { slots, cells, origins } => {
                let model = &self.root.models()[0];
                if origins.is_empty() {
                    return Ok(());
                }
                let (rows, packing) = (origins.len() as u64, self.packing);
                self.stats.delta_rows += rows;
                let written = sink.segment(&mut |name, out| {
                    delta_segment::write(model, name, packing, &cells, out)
                })?;
                self.add(&written, &slots, origins);
                Ok(())
            }
        }
    }

    fn write_cells<S: SegmentSink>(
        &mut self,
        reworked: Reworked,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let root = Arc::clone(&self.root);
        let model = &root.models()[0];
        self.stats.split += reworked.split;
        self.stats.merged += reworked.merged;
        self.stats.moved += reworked.moved;
        self.stats.reassigned += reworked.reassigned;
        let mut slots = Vec::with_capacity(reworked.cells.len());
        let mut ids = Vec::with_capacity(reworked.cells.len());
        for new in &reworked.cells {
            let (slot, id) = self.number(new, model);
            slots.push(slot);
            ids.push(id);
        }
        for (slot, heir) in reworked.retired {
            let heir = match heir {
                Heir::Slot(slot) => root.cells()[slot as usize].id.get(),
                Heir::New(place) => ids[place],
            };
            self.edit.retire(slot, heir);
        }
        let mut rest = reworked.cells;
        let (mut slots, mut ids) = (&slots[..], &ids[..]);
        for count in cut(&rest, self.policy.segment_rows(model)) {
            let later = rest.split_off(count);
            let (own_slots, later_slots) = slots.split_at(count);
            let (own_ids, later_ids) = ids.split_at(count);
            let (mut cells, mut origins): (Vec<EncodedCell>, Vec<Origin>) = Default::default();
            for new in rest {
                cells.push(new.cell);
                origins.extend(new.origins);
            }
            let written =
                sink.segment(&mut |name, out| write_cells(model, name, &cells, own_ids, out))?;
            self.add(&written, own_slots, origins);
            (rest, slots, ids) = (later, later_slots, later_ids);
        }
        Ok(())
    }

    /// Slot and id of a cell.
    fn number(&mut self, new: &NewCell, model: &Model) -> (u32, u32) {
        let spread = cell_rank::spread(RacyBytes::new(&new.cell.centroid), model.padded_dim());
        match new.slot {
            Some(slot) => {
                self.stats.copied += u64::from(new.copied);
                // Of a pinned cell not all rows were seen.
                if !new.copied && !new.pinned {
                    self.edit.set_spread(slot, spread);
                }
                (slot, self.root.cells()[slot as usize].id.get())
            }
            None => {
                let id = self.next_cell;
                self.next_cell += 1;
                let mut centroid = new.cell.centroid.clone();
                plane2::set_record_id(&mut centroid, model.padded_dim(), id.into());
                // Other models have no centroids, else the cell would have been pinned.
                let centroids = vec![&centroid[..]; self.root.models().len()];
                (self.edit.cell(id, &centroids), id)
            }
        }
    }

    fn add(&mut self, written: &WrittenSegment, slots: &[u32], origins: Vec<Origin>) {
        self.stats.rows += origins.len() as u64;
        self.stats.bytes_written += written.entry.object_len.get();
        self.edit.segment(written, slots);
        self.segments.push(CompactedSegment { name: written.entry.name(), origins });
    }

    /// The new root. `named`: whether a row of the delta still names this cell. Cells that were retired before
    /// this round and that none names are forgotten. (A row that comes to name one later is then of an unknown
    /// cell: every search looks at it.)
    pub fn finish(mut self, named: &dyn Fn(u32) -> bool) -> Result<Outcome, RootError> {
        let root = &self.root;
        let dropped: Vec<u32> =
            self.plan.segments.iter().chain(&self.plan.delta).copied().collect();
        dropped.iter().for_each(|&segment| self.edit.drop_segment(segment));
        for (slot, cell) in (0u32..).zip(root.cells()) {
            if cell.is_retired() && !named(cell.id.get()) {
                self.edit.remove_cell(slot);
            }
        }
        Ok(Outcome {
            sections: self.edit.build()?,
            dropped: dropped.into_iter().map(|segment| root.segment_name(segment)).collect(),
            segments: self.segments,
            next_cell: self.next_cell,
            stats: self.stats,
        })
    }
}

/// How many cells go into each segment: all into one, unless it becomes more than half too large.
fn cut(cells: &[NewCell], segment_rows: usize) -> Vec<usize> {
    let rows: usize = cells.iter().map(|cell| cell.origins.len()).sum();
    if rows == 0 {
        return Vec::new();
    }
    let segments = if 2 * rows > 3 * segment_rows { rows.div_ceil(segment_rows) } else { 1 };
    let each = rows.div_ceil(segments);
    let (mut counts, mut count, mut held) = (Vec::new(), 0, 0);
    for cell in cells {
        count += 1;
        held += cell.origins.len();
        if held >= each {
            counts.push(count);
            (count, held) = (0, 0);
        }
    }
    if count > 0 {
        counts.push(count);
    }
    counts
}

fn packing(plan: &Plan) -> Packing {
    let cells = || plan.delta_cells();
    let rows: usize = cells().map(|cell| cell.rows()).sum();
    match rows >= ROWS_FOR_OWN_BLOCKS * cells().count().max(1) {
        true => Packing::PerCell,
        false => Packing::Dense,
    }
}

fn encode_delta(
    root: &Root,
    job: Job,
    pool: &ThreadPool,
    interrupt: Interrupt<'_>,
) -> Result<Encoded, Interrupted> {
    let model = &root.models()[0];
    let bytes = plane2::record_bytes(model.padded_dim());
    let cells: Vec<_> = job.cells.into_iter().filter(|cell| !cell.rows.is_empty()).collect();
    let slots: Vec<u32> = cells.iter().map(|cell| cell.slot).collect();
    let encode = |cell: super::job::JobCell| {
        if interrupt() {
            return Err(Interrupted);
        }
        let records =
            &job.records[cell.rows.start as usize * bytes..cell.rows.end as usize * bytes];
        let id = root.cells()[cell.slot as usize].id.get();
        Ok(DeltaCell::encode(model, id, root.centroid_record(cell.slot), records.to_vec()))
    };
    let cells = pool.install(|| cells.into_par_iter().map(encode).collect::<Result<_, _>>())?;
    Ok(Encoded::Delta { slots, cells, origins: job.origins })
}
