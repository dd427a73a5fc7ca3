//! What an index is worth after its rows changed: recall, codes scanned and bytes written, next to a fresh build.
//! `cargo run --release -p polign-engine --example churn -- base.f16.npy queries.f16.npy gt100.npy cosine
//! [churn|grow|empty|drift|delta] [reassign: true|false] [rows of a flush] [bytes of a segment]`.

mod data;

use std::{
    collections::{HashMap, HashSet},
    error::Error,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use data::{Data, params};
use polign_engine::{
    ObjectId,
    build::in_memory::{InMemoryIndex, InMemoryOptions},
    maintain::{
        Compaction, CompactionStats, DeltaBatch, Policy, Recalibration, SegmentSink, SegmentWrite,
        delta_runs, first_cells, is_calibration_due, plan, write_delta_segment,
    },
    quantize::{Model, plane2},
    root::{Root, RootBuilder, RootEdit, SectionKey},
    search::{Environment, NoDelta, Ranking, Stream, Tombstones},
    segment::{MemorySource, SegmentName, SegmentReader, WriteError, WrittenSegment},
};

type Failure = Box<dyn Error>;

/// Dead rows by object.
#[derive(Default)]
struct Dead(HashMap<ObjectId, HashSet<u32>>);

struct DeadOf<'a>(&'a Root, &'a Dead);

impl Tombstones for DeadOf<'_> {
    fn for_each_dead(&self, segment: u32, first: u32, rows: u32, visit: &mut dyn FnMut(u32)) {
        if let Some(dead) = self.1.0.get(&self.0.segments()[segment as usize].object) {
            (first..first + rows).filter(|ordinal| dead.contains(ordinal)).for_each(visit);
        }
    }
}

#[derive(Default)]
struct Sink(Vec<(ObjectId, Vec<u8>)>);

impl SegmentSink for Sink {
    type Error = WriteError;

    fn segment(&mut self, write: SegmentWrite<'_>) -> Result<WrittenSegment, WriteError> {
        let object = ObjectId::random().map_err(io::Error::other)?;
        let mut bytes = Vec::new();
        let written = write(SegmentName { object, ..SegmentName::default() }, &mut bytes)?;
        self.0.push((object, bytes));
        Ok(written)
    }
}

struct Index {
    model: Model,
    root: Arc<Root>,
    source: MemorySource,
    dead: Dead,
    next_cell: u32,
    pool: rayon::ThreadPool,
    policy: Policy,
    flushed: u64,
    total: CompactionStats,
    rounds: u32,
    spent: Duration,
    /// Rows when recall was calibrated.
    calibrated: u64,
    calibrations: u32,
    calibrating: Duration,
}

impl Index {
    fn new(model: Model, root: Arc<Root>, source: MemorySource, policy: Policy) -> Self {
        Self {
            model,
            calibrated: root.rows(),
            calibrations: 0,
            calibrating: Duration::ZERO,
            next_cell: root.cells().last().map_or(0, |cell| cell.id.get() + 1),
            root,
            source,
            dead: Dead::default(),
            pool: rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("threads"),
            policy,
            flushed: 0,
            total: CompactionStats::default(),
            rounds: 0,
            spent: Duration::ZERO,
        }
    }

    fn publish(&mut self, sections: Vec<(SectionKey, Vec<u8>)>) -> Result<(), Failure> {
        let sections = sections.into_iter().map(|(key, bytes)| (key.code(), bytes));
        self.root = Arc::new(Root::from_sections(sections)?);
        Ok(())
    }

    /// Codes rows as an insert does.
    fn code(&self, data: &Data, ids: &[u64]) -> Result<(Vec<u32>, Vec<u8>), Failure> {
        let (mut cells, mut records) = (Vec::new(), Vec::new());
        let mut ranking = Ranking::default();
        let mut x = vec![0.0; self.model.padded_dim()];
        for &id in ids {
            let row = &data.rows[id as usize * data.dim..][..data.dim];
            self.model.project_row(row, &mut x)?;
            plane2::encode(&self.model, &x, id, &mut records);
            let query = self.model.query(row)?;
            ranking.reset(&self.root, &query);
            let near = ranking.nearest(&self.root, &query, 16);
            let nearest = near.iter().min_by(|a, b| a.term.base.total_cmp(&b.term.base));
            let slot = nearest.ok_or("no cell")?.slot;
            cells.push(self.root.cells()[slot as usize].id.get());
        }
        Ok((cells, records))
    }

    fn flush(&mut self, data: &Data, ids: &[u64]) -> Result<(), Failure> {
        let (cells, records) = self.code(data, ids)?;
        let name = SegmentName { object: ObjectId::random()?, ..SegmentName::default() };
        let mut bytes = Vec::new();
        if self.root.segments().is_empty() {
            let lists = polign_engine::cluster::default_lists(ids.len() as u64);
            let first = first_cells(&self.model, &records, lists, 1, &self.pool, &|| false)?;
            let all = 0..first.cells.len();
            let written = first.write(&self.model, name, self.next_cell, all, &mut bytes)?;
            let sections = first.root(&self.root, self.next_cell, &[written])?;
            self.next_cell += first.cells.len() as u32;
            self.publish(sections)?;
            self.calibrated = ids.len() as u64;
        } else {
            let batch = DeltaBatch { cells: &cells, records: &records };
            let flushed = write_delta_segment(&self.root, name, batch, &mut bytes, &|| false)?;
            let mut edit = RootEdit::new(&self.root);
            edit.segment(&flushed.written, &flushed.slots);
            self.publish(edit.build()?)?;
        }
        self.flushed += bytes.len() as u64;
        self.source.insert(name.object, bytes);
        Ok(())
    }

    fn compact(&mut self, policy: Policy) -> Result<bool, Failure> {
        let started = Instant::now();
        let entries = self.root.segments().iter();
        let dead: Vec<u32> = entries
            .map(|e| self.dead.0.get(&e.object).map_or(0, |dead| dead.len() as u32))
            .collect();
        let Some(plan) = plan(&self.root, &dead, &policy) else { return Ok(false) };
        let mut compaction = Compaction::new(Arc::clone(&self.root), plan, policy, self.next_cell);
        let mut sink = Sink::default();
        while let Some(job) = compaction.read(&mut self.source, &DeadOf(&self.root, &self.dead))? {
            let done = compaction.encode(job, &self.pool, &|| false)?;
            compaction.write(done, &mut sink)?;
        }
        let outcome = compaction.finish(&|_| false)?;
        for (object, bytes) in sink.0 {
            self.source.insert(object, bytes);
        }
        for name in &outcome.dropped {
            self.source.remove(name.object);
            self.dead.0.remove(&name.object);
        }
        self.next_cell = outcome.next_cell;
        self.publish(outcome.sections)?;
        let (all, this) = (&mut self.total, outcome.stats);
        all.rows += this.rows;
        all.delta_rows += this.delta_rows;
        all.bytes_read += this.bytes_read;
        all.bytes_written += this.bytes_written;
        all.split += this.split;
        all.merged += this.merged;
        all.moved += this.moved;
        all.copied += this.copied;
        all.reassigned += this.reassigned;
        self.rounds += 1;
        self.spent += started.elapsed();
        Ok(true)
    }

    fn recalibrate(&mut self) -> Result<(), Failure> {
        if !is_calibration_due(self.root.rows(), self.calibrated) {
            return Ok(());
        }
        let started = Instant::now();
        let mut calibration = Recalibration::new(Arc::clone(&self.root));
        while let Some(rows) =
            calibration.read(&mut self.source, &DeadOf(&self.root, &self.dead))?
        {
            calibration.observe(rows, &self.pool, &|| false)?;
        }
        let mut edit = RootEdit::new(&self.root);
        edit.curves(calibration.finish(&self.pool));
        self.publish(edit.build()?)?;
        self.calibrated = self.root.rows();
        self.calibrations += 1;
        self.calibrating += started.elapsed();
        Ok(())
    }

    /// Marks rows dead wherever they are.
    fn delete(&mut self, wanted: &HashSet<u64>) -> Result<(), Failure> {
        for entry in self.root.segments() {
            let bytes = self.source.object(entry.object).ok_or("no object")?.clone();
            let ids = SegmentReader::open(entry.object, &bytes)?.ids()?;
            let dead = (0..).zip(ids).filter(|(_, id)| wanted.contains(id)).map(|(at, _)| at);
            self.dead.0.entry(entry.object).or_default().extend(dead);
        }
        Ok(())
    }

    /// Recall and codes scanned at a number of cells.
    fn measure(&mut self, data: &Data, nprobe: u32) -> Result<(f64, f64), Failure> {
        let count = (data.queries.len() / data.dim).min(1_000);
        let (mut found, mut codes) = (0, 0);
        for (question, query) in data.questions(count) {
            let queries = self.root.queries(query)?;
            let mut stream = Stream::new(Arc::clone(&self.root), queries, params(nprobe, 3.0));
            let dead = DeadOf(&self.root, &self.dead);
            let mut environment =
                Environment { source: &mut self.source, delta: &mut NoDelta, dead: &dead };
            found += data.found(question, &mut stream, &mut environment)?;
            codes += stream.stats().codes_scanned;
        }
        Ok((found as f64 / (10 * count) as f64, codes as f64 / count as f64))
    }

    /// One line: what it is made of, recall by default, and codes for recall .95 and .98.
    fn report(&mut self, what: &str, data: &Data) -> Result<(), Failure> {
        let live = self.root.cells().iter().filter(|cell| !cell.is_retired()).count() as u32;
        let default = self.root.curves().nprobe(10, 0.95, live);
        let (recall, codes) = self.measure(data, default)?;
        let (mut at, mut cells_at_95) = ([None; 2], f64::NAN);
        let mut last = (0.0, 0.0);
        for nprobe in (2..).map(|nth| 4 * nth) {
            let here = self.measure(data, nprobe)?;
            for (at, target) in at.iter_mut().zip([0.95, 0.98]) {
                if at.is_none() && here.0 >= target {
                    let part = (target - last.0) / (here.0 - last.0);
                    *at = Some(last.1 + part * (here.1 - last.1));
                    if target == 0.95 {
                        cells_at_95 = f64::from(nprobe) - 4.0 * (1.0 - part);
                    }
                }
            }
            if at[1].is_some() || nprobe > live {
                break;
            }
            last = here;
        }
        println!(
            "{what}: {live} cells, {} segments, {} delta runs | default {default}: {recall:.4}, {codes:.0} \
             codes | .95: {:.1} cells, {:.0} codes, .98: {:.0} codes",
            self.root.segments().len(),
            delta_runs(&self.root),
            cells_at_95,
            at[0].unwrap_or(f64::NAN),
            at[1].unwrap_or(f64::NAN),
        );
        Ok(())
    }

    /// What a query on an empty cache reads at the default depth.
    fn report_cold(&mut self, what: &str, data: &Data) -> Result<(), Failure> {
        let live = self.root.cells().iter().filter(|cell| !cell.is_retired()).count() as u32;
        let default = self.root.curves().nprobe(10, 0.95, live);
        let (count, mut found) = (300, 0);
        self.source.reset_stats();
        for (question, query) in data.questions(count) {
            self.source.evict_all();
            let queries = self.root.queries(query)?;
            let mut stream = Stream::new(Arc::clone(&self.root), queries, params(default, 3.0));
            let dead = DeadOf(&self.root, &self.dead);
            let mut environment =
                Environment { source: &mut self.source, delta: &mut NoDelta, dead: &dead };
            found += data.found(question, &mut stream, &mut environment)?;
        }
        let stats = self.source.stats();
        let mean = |total: u64| total as f64 / count as f64;
        println!(
            "{what}: {} delta runs, {default} cells, recall {:.4}: {:.1} parts, {:.0} kB, {:.2} waves on an empty \
             cache",
            delta_runs(&self.root),
            found as f64 / (10 * count) as f64,
            mean(stats.parts),
            mean(stats.bytes) / 1e3,
            mean(stats.waves),
        );
        Ok(())
    }

    fn report_work(&self, inserted: usize) {
        let row = self.root.object_bytes() as f64 / self.root.rows() as f64;
        let of_inserted = |bytes: u64| bytes as f64 / (inserted as f64 * row);
        let total = self.total;
        println!(
            "  calibrated {} times in {:.1?}; {} rounds in {:.1?}: flushed {:.2}, written {:.2}, read {:.2} times the bytes inserted; {} of {} \
             rows stayed in the delta; {} splits, {} merges, {} new centroids, {} rows reassigned, {} cells \
             copied",
            self.calibrations,
            self.calibrating,
            self.rounds,
            self.spent,
            of_inserted(self.flushed),
            of_inserted(total.bytes_written),
            of_inserted(total.bytes_read),
            total.delta_rows,
            total.rows,
            total.split,
            total.merged,
            total.moved,
            total.reassigned,
            total.copied,
        );
    }
}

/// Row numbers in an order that has nothing to do with that of the file.
fn shuffled(rows: usize) -> Vec<u64> {
    let mut ids: Vec<u64> = (0..rows as u64).collect();
    let mut state = 7u64;
    for at in (1..rows).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ids.swap(at, (state >> 33) as usize % (at + 1));
    }
    ids
}

fn build(data: &Data, ids: &[u64]) -> Result<InMemoryIndex, Failure> {
    let rows: Vec<f32> = ids
        .iter()
        .flat_map(|&id| &data.rows[id as usize * data.dim..][..data.dim])
        .copied()
        .collect();
    let options = InMemoryOptions { samples: 1_024, segment_rows: 60_000, ..Default::default() };
    Ok(InMemoryIndex::build(data.metric, data.dim, &rows, ids, options)?)
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut data = Data::of_arguments(&arguments)?;
    let scenario = arguments.get(4).map_or("churn", String::as_str);
    let reassign = arguments.get(5).map_or(Ok(true), |text| text.parse())?;
    let flush = arguments.get(6).map_or(Ok(5_000), |text| text.parse())?;
    let segment_bytes = arguments.get(7).map_or(Ok(32 << 20), |text| text.parse())?;
    let rows = data.rows.len() / data.dim;
    let policy = Policy { reassign, segment_bytes, ..Policy::automatic(400) };

    let ids = match scenario {
        "drift" => data.ids(),
        _ => shuffled(rows),
    };
    let (at_first, later) = match scenario {
        "churn" => ids.split_at(rows / 2),
        "grow" | "drift" => ids.split_at(rows / 4),
        "double" => ids.split_at(rows / 2),
        "empty" => ids.split_at(0),
        "delta" => ids.split_at(rows * 9 / 10),
        other => return Err(format!("unknown scenario {other}").into()),
    };
    let mut doomed: Vec<u64> = Vec::new();
    if scenario == "churn" {
        // As many rows that will go: others of the same kind, each a little beside a row that stays.
        for (nth, &id) in at_first.iter().enumerate() {
            let other = at_first[(nth * 7 + 1) % at_first.len()];
            let pair = [id, other].map(|id| id as usize * data.dim);
            let mix: Vec<f32> = (0..data.dim)
                .map(|d| 0.8 * data.rows[pair[0] + d] + 0.2 * data.rows[pair[1] + d])
                .collect();
            doomed.push((data.rows.len() / data.dim) as u64);
            data.rows.extend(mix);
        }
    }
    let mut index = match scenario {
        "empty" => {
            let model = Model::new(0, data.metric, data.dim, 1, vec![0.0; data.dim])?;
            let mut centroid = Vec::new();
            plane2::encode(&model, &vec![0.0; model.padded_dim()], 0, &mut centroid);
            let mut builder = RootBuilder::new(vec![model.clone()]);
            builder.cell(0, &[&centroid]);
            let sections = builder.build()?;
            let sections = sections.into_iter().map(|(key, bytes)| (key.code(), bytes));
            let root = Root::from_sections(sections)?;
            Index::new(model, Arc::new(root), MemorySource::new(), policy)
        }
        _ => {
            let built = build(&data, &[at_first, &doomed].concat())?;
            Index::new(built.model, built.root, built.source, policy)
        }
    };
    if scenario == "delta" {
        index.report_cold("nine tenths of the rows", &data)?;
        for new in later.chunks(flush) {
            index.flush(&data, new)?;
        }
        index.report_cold("the others flushed", &data)?;
        index.report("the others flushed", &data)?;
        index.compact(Policy { changed_share: 10.0, max_delta_runs: 1, ..policy })?;
        index.report_cold("merged within the delta", &data)?;
        while index.compact(Policy { changed_share: 0.0, ..policy })? {}
        index.report_cold("compacted", &data)?;
        index.report("compacted", &data)?;
        return Ok(());
    }
    let rounds = later.len().div_ceil(flush);
    for (round, new) in later.chunks(flush).enumerate() {
        let share = doomed.len() * round / rounds..doomed.len() * (round + 1) / rounds;
        index.delete(&doomed[share].iter().copied().collect())?;
        index.flush(&data, new)?;
        while index.compact(index.policy)? {}
        if scenario != "double" {
            index.recalibrate()?;
        }
    }
    index.report(&format!("{scenario}, reassign {reassign}"), &data)?;
    index.report_work(later.len());
    while index.compact(Policy { changed_share: 0.0, ..policy })? {}
    index.report("compacted to the end", &data)?;
    index.report_work(later.len());

    let built = build(&data, &(0..rows as u64).collect::<Vec<_>>())?;
    let mut fresh = Index::new(built.model, built.root, built.source, policy);
    fresh.report("built anew", &data)?;
    Ok(())
}
