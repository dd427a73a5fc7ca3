//! An index with what the extension would keep beside it: rows, the delta, tombstones.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use polign_engine::{
    Metric, ObjectId,
    build::in_memory::{InMemoryIndex, InMemoryOptions},
    kernel::RacyBytes,
    maintain::{
        CompactedSegment, Compaction, CompactionStats, DeltaBatch, DeltaSegment, FirstCells,
        FlushError, Origin, Outcome, Plan, Policy, Recalibration, SegmentSink, SegmentWrite,
        first_cells, plan, write_delta_segment,
    },
    quantize::{Model, plane2},
    root::{Curves, Root, RootBuilder, RootEdit, SectionKey},
    search::{
        Depth, Environment, Hit, NoDelta, Order, SearchParams, SearchStats, Stream, Tombstones,
    },
    segment::{MemorySource, SegmentName, SegmentReader, SourceError, WriteError, WrittenSegment},
};

pub const METRICS: [Metric; 3] = [Metric::L2, Metric::InnerProduct, Metric::Cosine];

/// A Gaussian mixture, the same for a seed.
pub struct Mixture {
    state: u64,
    dim: usize,
    centres: Vec<f32>,
}

impl Mixture {
    pub fn new(seed: u64, dim: usize, clusters: usize) -> Self {
        let mut mixture = Self { state: seed, dim, centres: Vec::new() };
        mixture.centres = (0..clusters * dim).map(|_| mixture.normal() * 2.0).collect();
        mixture
    }

    pub fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.state >> 40) as f32 / (1u64 << 24) as f32
    }

    fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.uniform()).sum::<f32>() - 3.0
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.uniform() * end as f32) as usize % end.max(1)
    }

    pub fn row(&mut self) -> Vec<f32> {
        let clusters = self.centres.len() / self.dim;
        let cluster = self.below(clusters);
        (0..self.dim).map(|d| self.centres[cluster * self.dim + d] + self.normal()).collect()
    }
}

pub fn distance(metric: Metric, a: &[f32], b: &[f32]) -> f64 {
    let sum = |f: fn(f64, f64) -> f64| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f(f64::from(a), f64::from(b))).sum()
    };
    match metric {
        Metric::L2 => sum(|a, b| (a - b) * (a - b)).sqrt(),
        Metric::InnerProduct => -sum(|a, b| a * b),
        Metric::Cosine => 1.0 - sum(|a, b| a * b) / (sum(|a, _| a * a) * sum(|_, b| b * b)).sqrt(),
    }
}

/// A row of the delta.
pub struct Waiting {
    pub id: u64,
    pub cell: u32,
    pub record: Vec<u8>,
}

pub struct World {
    pub metric: Metric,
    pub model: Model,
    pub root: Arc<Root>,
    pub source: MemorySource,
    /// Live rows.
    pub rows: BTreeMap<u64, Vec<f32>>,
    /// Live rows of segments: where they are.
    pub places: HashMap<u64, (ObjectId, u32)>,
    pub delta: Vec<Waiting>,
    pub dead: Dead,
    pub next_cell: u32,
    pub next_id: u64,
    index: ObjectId,
}

/// Tombstones by object.
#[derive(Default, Clone)]
pub struct Dead(pub HashMap<ObjectId, HashSet<u32>>);

/// Tombstones of a root's segments.
pub struct DeadOf<'a>(pub &'a Root, pub &'a Dead);

impl Tombstones for DeadOf<'_> {
    fn for_each_dead(&self, segment: u32, first: u32, rows: u32, visit: &mut dyn FnMut(u32)) {
        if let Some(dead) = self.1.0.get(&self.0.segments()[segment as usize].object) {
            (first..first + rows).filter(|ordinal| dead.contains(ordinal)).for_each(visit);
        }
    }
}

impl World {
    pub fn new(metric: Metric, rows: Vec<Vec<f32>>, options: InMemoryOptions) -> Self {
        let dim = rows[0].len();
        let ids: Vec<u64> = (0..rows.len() as u64).collect();
        let built = InMemoryIndex::build(metric, dim, &rows.concat(), &ids, options).unwrap();
        let mut world = Self {
            metric,
            model: built.model,
            next_cell: built.root.cell_count() as u32,
            next_id: ids.len() as u64,
            index: built.root.segments()[0].index,
            root: built.root,
            source: built.source,
            rows: ids.into_iter().zip(rows).collect(),
            places: HashMap::new(),
            delta: Vec::new(),
            dead: Dead::default(),
        };
        world.find_places();
        world
    }

    /// An index without segments: its root has one cell, around the origin.
    pub fn empty(metric: Metric, dim: usize) -> Self {
        let model = Model::new(0, metric, dim, 77, vec![0.0; dim]).unwrap();
        let mut centroid = Vec::new();
        plane2::encode(&model, &vec![0.0; model.padded_dim()], 0, &mut centroid);
        let mut builder = RootBuilder::new(vec![model.clone()]);
        builder.cell(0, &[&centroid]);
        let mut world = Self {
            metric,
            model,
            root: Arc::new(read(builder.build().unwrap())),
            source: MemorySource::new(),
            rows: BTreeMap::new(),
            places: HashMap::new(),
            delta: Vec::new(),
            dead: Dead::default(),
            next_cell: 1,
            next_id: 0,
            index: ObjectId::random().unwrap(),
        };
        world.find_places();
        world
    }

    /// The first flush of an index without segments.
    pub fn first_flush(&mut self, lists: u32, segment_rows: usize) -> FirstCells {
        let records: Vec<u8> =
            self.delta.iter().flat_map(|waiting| &waiting.record).copied().collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let first = first_cells(&self.model, &records, lists, 1, &pool, &|| false).unwrap();
        let mut written = Vec::new();
        for cells in first.segments(segment_rows) {
            let (name, mut bytes) = (self.name(), Vec::new());
            let segment = first.write(&self.model, name, self.next_cell, cells, &mut bytes);
            written.push(segment.unwrap());
            self.source.insert(name.object, bytes);
        }
        let sections = first.root(&self.root, self.next_cell, &written).unwrap();
        self.next_cell += first.cells.len() as u32;
        self.publish(sections);
        self.delta.clear();
        first
    }

    pub fn name(&self) -> SegmentName {
        let random = || ObjectId::random().unwrap();
        SegmentName { writer: self.index, index: self.index, object: random() }
    }

    pub fn object(&self, object: ObjectId) -> Vec<u8> {
        self.source.object(object).unwrap().to_vec()
    }

    fn find_places(&mut self) {
        self.places.clear();
        for entry in self.root.segments() {
            let bytes = self.object(entry.object);
            let reader = SegmentReader::open(entry.object, &bytes).unwrap();
            reader.verify_all().unwrap();
            for (ordinal, id) in (0..).zip(reader.ids().unwrap()) {
                let dead = self.dead.0.get(&entry.object).is_some_and(|d| d.contains(&ordinal));
                if !dead {
                    let before = self.places.insert(id, (entry.object, ordinal));
                    assert_eq!(before, None, "row {id} is in two places");
                }
                let record = reader.record(ordinal).unwrap().unwrap();
                let own = plane2::record_id(RacyBytes::new(record), self.model.padded_dim());
                assert_eq!(own, Some(id), "ids and records agree");
            }
        }
    }

    /// The plane-2 record of a row.
    pub fn record(&self, id: u64) -> Vec<u8> {
        let mut x = vec![0.0; self.model.padded_dim()];
        self.model.project_row(&self.rows[&id], &mut x).unwrap();
        let mut record = Vec::new();
        plane2::encode(&self.model, &x, id, &mut record);
        record
    }

    /// Inserts a row into the delta; its cell is that with the nearest centroid.
    pub fn insert(&mut self, row: Vec<f32>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.rows.insert(id, row);
        let record = self.record(id);
        let width = self.model.padded_dim();
        let decode = |record: &[u8]| {
            let mut x = vec![0.0; width];
            plane2::decode(RacyBytes::new(record), &mut x);
            x
        };
        let x = decode(&record);
        let live = (0u32..).zip(self.root.cells()).filter(|(_, cell)| !cell.is_retired());
        let scored = live.map(|(slot, cell)| {
            let centroid = decode(self.root.centroid_record(slot));
            let apart: f32 = x.iter().zip(&centroid).map(|(a, b)| (a - b) * (a - b)).sum();
            (apart, cell.id.get())
        });
        let nearest = scored.min_by(|a, b| a.0.total_cmp(&b.0));
        self.delta.push(Waiting { id, cell: nearest.unwrap().1, record });
        id
    }

    /// Deletes a row that is in a segment, or still in the delta.
    pub fn delete(&mut self, id: u64) {
        self.rows.remove(&id).unwrap();
        match self.places.remove(&id) {
            Some((object, ordinal)) => {
                self.dead.0.entry(object).or_default().insert(ordinal);
            }
            None => self.delta.retain(|waiting| waiting.id != id),
        }
    }

    /// Writes the delta as a segment, without publishing it.
    pub fn flushed(&self, bytes: &mut Vec<u8>) -> Result<DeltaSegment, FlushError> {
        let cells: Vec<u32> = self.delta.iter().map(|waiting| waiting.cell).collect();
        let records: Vec<u8> =
            self.delta.iter().flat_map(|waiting| &waiting.record).copied().collect();
        let batch = DeltaBatch { cells: &cells, records: &records };
        write_delta_segment(&self.root, self.name(), batch, bytes, &|| false)
    }

    pub fn flush(&mut self) {
        if self.delta.is_empty() {
            return;
        }
        let mut bytes = Vec::new();
        let segment = self.flushed(&mut bytes).unwrap();
        self.source.insert(segment.written.entry.object, bytes);
        let mut edit = RootEdit::new(&self.root);
        edit.segment(&segment.written, &segment.slots);
        self.publish(edit.build().unwrap());
        self.delta.clear();
    }

    /// For each segment how many of its rows are dead.
    pub fn dead_counts(&self) -> Vec<u32> {
        let entries = self.root.segments().iter();
        entries.map(|e| self.dead.0.get(&e.object).map_or(0, |dead| dead.len() as u32)).collect()
    }

    pub fn plan(&self, policy: &Policy) -> Option<Plan> {
        plan(&self.root, &self.dead_counts(), policy)
    }

    /// One round, published unless there is nothing to do.
    pub fn compact(&mut self, policy: Policy) -> Option<CompactionStats> {
        self.compact_with(policy, &mut |_| ())
    }

    /// The same; `meanwhile` happens between the last job and the publication.
    pub fn compact_with(
        &mut self,
        policy: Policy,
        meanwhile: &mut dyn FnMut(&mut Self),
    ) -> Option<CompactionStats> {
        let plan = self.plan(&policy)?;
        let dropped = plan.segments.len() + plan.delta.len();
        let outcome = self.outcome(plan, policy).unwrap();
        assert_eq!(outcome.dropped.len(), dropped);
        meanwhile(self);
        let old = Arc::clone(&self.root);
        for segment in &outcome.segments {
            let was_dead = |origin: &Origin| {
                let object = old.segments()[origin.segment as usize].object;
                self.dead.0.get(&object).is_some_and(|dead| dead.contains(&origin.ordinal))
            };
            let dead = (0..).zip(&segment.origins).filter(|(_, origin)| was_dead(origin));
            let dead: HashSet<u32> = dead.map(|(ordinal, _)| ordinal).collect();
            self.check_copied(&old, segment);
            self.dead.0.insert(segment.name.object, dead);
        }
        self.next_cell = outcome.next_cell;
        self.publish(outcome.sections);
        for name in outcome.dropped {
            self.source.remove(name.object).unwrap();
            self.dead.0.remove(&name.object);
        }
        Some(outcome.stats)
    }

    /// Computes a round without publishing it. Its objects are in the source.
    pub fn outcome(&mut self, plan: Plan, policy: Policy) -> Result<Outcome, SourceError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let mut compaction = Compaction::new(Arc::clone(&self.root), plan, policy, self.next_cell);
        let mut sink = Sink { index: self.index, objects: Vec::new() };
        let dead = DeadOf(&self.root, &self.dead);
        while let Some(job) = compaction.read(&mut self.source, &dead)? {
            let done = compaction.encode(job, &pool, &|| false).unwrap();
            compaction.write(done, &mut sink).unwrap();
        }
        for (object, bytes) in sink.objects {
            self.source.insert(object, bytes);
        }
        let named: HashSet<u32> = self.delta.iter().map(|waiting| waiting.cell).collect();
        Ok(compaction.finish(&|cell| named.contains(&cell)).unwrap())
    }

    /// Makes the recall curves anew.
    pub fn recalibrate(&mut self) -> Result<Curves, SourceError> {
        self.recalibrate_by(Recalibration::new(Arc::clone(&self.root)))
    }

    /// Fits the recall curves to queries.
    pub fn calibrate_to(&mut self, queries: &[Vec<f32>]) -> Result<Curves, SourceError> {
        let root = Arc::clone(&self.root);
        self.recalibrate_by(Recalibration::of_queries(root, &queries.concat()).unwrap())
    }

    fn recalibrate_by(&mut self, mut calibration: Recalibration) -> Result<Curves, SourceError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let dead = DeadOf(&self.root, &self.dead);
        while let Some(rows) = calibration.read(&mut self.source, &dead)? {
            calibration.observe(rows, &pool, &|| false).unwrap();
        }
        let curves = calibration.finish(&pool);
        let mut edit = RootEdit::new(&self.root);
        edit.curves(curves.clone());
        self.publish(edit.build().unwrap());
        Ok(curves)
    }

    /// Plane 2 of a new segment is that of the rows' old segments, byte for byte.
    fn check_copied(&self, old: &Root, segment: &CompactedSegment) {
        let new = self.object(segment.name.object);
        let new = SegmentReader::open(segment.name.object, &new).unwrap();
        let objects: Vec<Option<Vec<u8>>> = old
            .segments()
            .iter()
            .map(|entry| self.source.object(entry.object).map(|bytes| bytes.to_vec()))
            .collect();
        for (ordinal, origin) in (0..).zip(&segment.origins) {
            let entry = &old.segments()[origin.segment as usize];
            let bytes = objects[origin.segment as usize].as_ref().unwrap();
            let before = SegmentReader::open(entry.object, bytes).unwrap();
            assert_eq!(
                new.record(ordinal).unwrap(),
                before.record(origin.ordinal).unwrap(),
                "plane 2 is copied byte for byte"
            );
        }
    }

    pub fn publish(&mut self, sections: Vec<(SectionKey, Vec<u8>)>) {
        self.root = Arc::new(read(sections));
        self.find_places();
    }

    pub fn search(
        &mut self,
        query: &[f32],
        params: SearchParams,
        rows: usize,
    ) -> (Vec<Hit>, SearchStats) {
        let queries = self.root.queries(query).unwrap();
        let mut stream = Stream::new(Arc::clone(&self.root), queries, params);
        let dead = DeadOf(&self.root, &self.dead);
        let mut environment =
            Environment { source: &mut self.source, delta: &mut NoDelta, dead: &dead };
        let mut hits = Vec::new();
        while hits.len() < rows {
            match stream.next(&mut environment).unwrap() {
                Some(hit) => hits.push(hit),
                None => break,
            }
        }
        (hits, stream.stats())
    }

    /// Every live row comes exactly once, whichever way it is searched, with a bound below its distance.
    pub fn check(&mut self, query: &[f32]) {
        assert!(self.delta.is_empty(), "flush first");
        for exact in [false, true] {
            let params = SearchParams { exact, ..params(Depth::fixed(2)) };
            let (hits, _) = self.search(query, params, usize::MAX);
            let mut ids: Vec<u64> = hits.iter().map(|hit| hit.id).collect();
            ids.sort_unstable();
            assert!(ids.iter().eq(self.rows.keys()), "rows lost or doubled, exact: {exact}");
            for hit in hits {
                let distance = distance(self.metric, query, &self.rows[&hit.id]);
                assert!(hit.bound <= distance, "{} > {distance}", hit.bound);
            }
        }
        assert_eq!(self.places.len(), self.rows.len());
    }

    /// The ten rows that an executor returns: it pulls until ten exact distances lie at or below the bound.
    fn top_ten(&mut self, query: &[f32], params: SearchParams) -> Vec<u64> {
        let (hits, _) = self.search(query, params, 60);
        let mut best: Vec<(f64, u64)> = Vec::new();
        for hit in hits {
            if best.len() >= 10 && best[9].0 <= hit.bound {
                break;
            }
            best.push((distance(self.metric, query, &self.rows[&hit.id]), hit.id));
            best.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        best.truncate(10);
        best.into_iter().map(|(_, id)| id).collect()
    }

    /// The ten nearest rows.
    fn exact_ten(&self, query: &[f32]) -> Vec<u64> {
        let rows = self.rows.iter();
        let mut all: Vec<(f64, u64)> =
            rows.map(|(&id, row)| (distance(self.metric, query, row), id)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        all.into_iter().take(10).map(|(_, id)| id).collect()
    }

    /// Part of the ten nearest rows that searches at the default depth find.
    pub fn recall(&mut self, queries: &[Vec<f32>]) -> f64 {
        self.recall_at(self.depth(), queries)
    }

    /// The same at another depth.
    pub fn recall_at(&mut self, depth: Depth, queries: &[Vec<f32>]) -> f64 {
        let found = queries.iter().map(|query| {
            let exact = self.exact_ten(query);
            let found = self.top_ten(query, params(depth));
            exact.iter().filter(|id| found.contains(id)).count()
        });
        found.sum::<usize>() as f64 / (10 * queries.len()) as f64
    }

    /// The depth at a target of 0.95.
    pub fn depth(&self) -> Depth {
        let cells = self.root.cells().iter().filter(|cell| !cell.is_retired()).count() as u32;
        let curves = self.root.curves();
        Depth::calibrated([10, 100, 1_000].map(|k| curves.nprobe(k, 0.95, cells)))
    }
}

/// Keeps segments in memory.
struct Sink {
    index: ObjectId,
    objects: Vec<(ObjectId, Vec<u8>)>,
}

impl SegmentSink for Sink {
    type Error = WriteError;

    fn segment(&mut self, write: SegmentWrite<'_>) -> Result<WrittenSegment, WriteError> {
        let object = ObjectId::random().unwrap();
        let name = SegmentName { writer: self.index, index: self.index, object };
        let mut bytes = Vec::new();
        let written = write(name, &mut bytes)?;
        self.objects.push((object, bytes));
        Ok(written)
    }
}

fn read(sections: Vec<(SectionKey, Vec<u8>)>) -> Root {
    Root::from_sections(sections.into_iter().map(|(key, bytes)| (key.code(), bytes))).unwrap()
}

pub fn params(depth: Depth) -> SearchParams {
    SearchParams {
        depth,
        order: Order::Strict,
        exact: false,
        epsilon: 3.0,
        max_scan_tuples: 0,
        limit_hint: 10,
        memory: 1 << 20,
    }
}
