//! Searches of indexes built in memory, compared with exact search.

use std::{collections::HashSet, sync::Arc};

use polign_engine::{
    Metric,
    build::in_memory::{InMemoryIndex, InMemoryOptions},
    kernel::RacyBytes,
    quantize::{
        CellTerm, Query,
        plane1::{self, Plane1Row},
        plane2,
    },
    search::{
        DeltaRecord, DeltaRows, DeltaScores, Depth, Environment, Hit, NoDelta, NoTombstones, Order,
        SearchParams, SearchStats, Stream, Tombstones,
    },
};

const METRICS: [Metric; 3] = [Metric::L2, Metric::InnerProduct, Metric::Cosine];

/// A Gaussian mixture, the same for a seed.
struct Mixture(u64);

impl Mixture {
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.uniform()).sum::<f32>() - 3.0
    }

    fn rows(&mut self, count: usize, dim: usize, clusters: usize) -> Vec<f32> {
        let centres: Vec<f32> = (0..clusters * dim).map(|_| self.normal() * 2.0).collect();
        let mut rows = Vec::with_capacity(count * dim);
        for _ in 0..count {
            let cluster = (self.uniform() * clusters as f32) as usize % clusters;
            for d in 0..dim {
                rows.push(centres[cluster * dim + d] + self.normal());
            }
        }
        rows
    }
}

fn distance(metric: Metric, a: &[f32], b: &[f32]) -> f64 {
    let sum = |f: fn(f64, f64) -> f64| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f(f64::from(a), f64::from(b))).sum()
    };
    match metric {
        Metric::L2 => sum(|a, b| (a - b) * (a - b)).sqrt(),
        Metric::InnerProduct => -sum(|a, b| a * b),
        Metric::Cosine => 1.0 - sum(|a, b| a * b) / (sum(|a, _| a * a) * sum(|_, b| b * b)).sqrt(),
    }
}

struct Fixture {
    metric: Metric,
    dim: usize,
    rows: Vec<f32>,
    queries: Vec<f32>,
    index: InMemoryIndex,
}

impl Fixture {
    fn new(metric: Metric, count: usize, dim: usize, options: InMemoryOptions) -> Self {
        let mut mixture = Mixture(7);
        let all = mixture.rows(count + 20, dim, 12);
        let (rows, queries) = all.split_at(count * dim);
        let ids: Vec<u64> = (0..count as u64).collect();
        let index = InMemoryIndex::build(metric, dim, rows, &ids, options).unwrap();
        Self { metric, dim, rows: rows.to_vec(), queries: queries.to_vec(), index }
    }

    fn row(&self, id: u64) -> &[f32] {
        &self.rows[id as usize * self.dim..][..self.dim]
    }

    /// Ids by exact distance.
    fn exact(&self, query: &[f32]) -> Vec<u64> {
        let mut all: Vec<(f64, u64)> = (0..(self.rows.len() / self.dim) as u64)
            .map(|id| (distance(self.metric, query, self.row(id)), id))
            .collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        all.into_iter().map(|(_, id)| id).collect()
    }

    fn stream(&self, query: &[f32], params: SearchParams) -> Stream {
        let queries = self.index.root.queries(query).unwrap();
        Stream::new(Arc::clone(&self.index.root), queries, params)
    }

    fn pull(
        &mut self,
        query: &[f32],
        params: SearchParams,
        rows: usize,
    ) -> (Vec<Hit>, SearchStats) {
        self.pull_with(query, params, rows, &mut NoDelta, &NoTombstones)
    }

    fn pull_with(
        &mut self,
        query: &[f32],
        params: SearchParams,
        rows: usize,
        delta: &mut dyn DeltaRows,
        dead: &dyn Tombstones,
    ) -> (Vec<Hit>, SearchStats) {
        let mut stream = self.stream(query, params);
        let mut environment = Environment { source: &mut self.index.source, delta, dead };
        let mut hits = Vec::new();
        while hits.len() < rows {
            match stream.next(&mut environment).unwrap() {
                Some(hit) => hits.push(hit),
                None => break,
            }
        }
        (hits, stream.stats())
    }
}

fn params(depth: Depth) -> SearchParams {
    SearchParams {
        depth,
        order: Order::Strict,
        exact: false,
        epsilon: 2.7,
        max_scan_tuples: 0,
        limit_hint: 10,
        memory: 1 << 20,
    }
}

/// The ten rows that an executor returns: it pulls until ten exact distances lie at or below the bound.
fn top_ten(fixture: &mut Fixture, query: &[f32], params: SearchParams) -> Vec<u64> {
    let (hits, _) = fixture.pull(query, params, 60);
    let mut best: Vec<(f64, u64)> = Vec::new();
    for hit in hits {
        if best.len() >= 10 && best[9].0 <= hit.bound {
            break;
        }
        best.push((distance(fixture.metric, query, fixture.row(hit.id)), hit.id));
        best.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    best.truncate(10);
    best.into_iter().map(|(_, id)| id).collect()
}

#[test]
fn recall_at_the_calibrated_depth_reaches_the_target() {
    for metric in METRICS {
        for dim in [20, 300] {
            let options = InMemoryOptions { lists: Some(40), ..Default::default() };
            let mut fixture = Fixture::new(metric, 4_000, dim, options);
            let cells = fixture.index.root.cell_count() as u32;
            let curves = fixture.index.root.curves();
            let depth = Depth::calibrated([10, 100, 1_000].map(|k| curves.nprobe(k, 0.95, cells)));
            let mut found = 0;
            for query in fixture.queries.clone().chunks_exact(dim) {
                let exact: HashSet<u64> = fixture.exact(query).into_iter().take(10).collect();
                let ids = top_ten(&mut fixture, query, params(depth));
                found += ids.iter().filter(|id| exact.contains(id)).count();
            }
            let recall = found as f64 / 200.0;
            assert!(recall >= 0.93, "{metric:?} at {dim} dimensions: recall@10 {recall}");
        }
    }
}

#[test]
fn bounds_ascend_and_never_exceed_the_distance() {
    for metric in METRICS {
        let mut fixture = Fixture::new(metric, 2_000, 48, InMemoryOptions::default());
        for query in fixture.queries.clone().chunks_exact(48) {
            let (hits, _) = fixture.pull(query, params(Depth::calibrated([1, 2, 3])), 500);
            assert_eq!(hits.len(), 500);
            for pair in hits.windows(2) {
                assert!(pair[0].bound <= pair[1].bound, "{metric:?}: order");
            }
            for hit in &hits {
                let exact = distance(metric, query, fixture.row(hit.id));
                assert!(hit.bound <= exact, "{metric:?}: {} > {exact}", hit.bound);
            }
        }
    }
}

#[test]
fn an_unlimited_search_returns_every_row_exactly_once() {
    for metric in METRICS {
        for order in [Order::Strict, Order::Relaxed] {
            let options = InMemoryOptions { segment_rows: 700, ..Default::default() };
            let mut fixture = Fixture::new(metric, 3_000, 24, options);
            assert!(fixture.index.root.segments().len() > 2);
            let query = fixture.queries[..24].to_vec();
            let params = SearchParams { order, ..params(Depth::fixed(1)) };
            let (hits, _) = fixture.pull(&query, params, usize::MAX);
            let ids: HashSet<u64> = hits.iter().map(|hit| hit.id).collect();
            assert_eq!((hits.len(), ids.len()), (3_000, 3_000));
        }
    }
}

#[test]
fn little_memory_changes_the_work_and_never_the_rows() {
    let depths = [Depth::calibrated([4, 8, 20]), Depth::fixed(1)];
    for (metric, depth) in METRICS.into_iter().flat_map(|m| depths.map(|depth| (m, depth))) {
        let mut fixture = Fixture::new(metric, 30_000, 16, InMemoryOptions::default());
        let added = Mixture(11).rows(500, 16, 12);
        let dead = Dead((0..30_000).step_by(7).map(|ordinal| (0, ordinal)).collect());
        let query = fixture.queries[..16].to_vec();
        for (order, max_scan_tuples) in
            [(Order::Strict, 0), (Order::Relaxed, 0), (Order::Strict, 12_000)]
        {
            let [little, ample] = [0, 64 << 20].map(|memory| {
                let mut delta = delta_of(&fixture, &added, 30_000);
                let params = SearchParams { memory, order, max_scan_tuples, ..params(depth) };
                fixture.pull_with(&query, params, usize::MAX, &mut delta, &dead)
            });
            let case = format!("{metric:?} {depth:?} {order:?} {max_scan_tuples}");
            assert_eq!(little.0, ample.0, "{case}");
            let (little, ample) = (little.1, ample.1);
            assert!(little.rescans > 0 && ample.rescans == 0, "{case}: {little:?} {ample:?}");
            assert!(little.rescans <= 64, "{case}: {little:?}");
            // What may be kept, a batch as large again, and the heap.
            assert!(little.most_kept <= 4 * 4_096, "{case}: {little:?}");
            assert!(little.codes_scanned > ample.codes_scanned, "{case}");
            assert_eq!(little.cells_probed, ample.cells_probed, "{case}");
            assert_eq!(little.rows_refined, ample.rows_refined, "{case}");
        }
    }
}

#[test]
fn as_many_cells_come_as_are_wanted_however_few_could_be_trained() {
    let options = InMemoryOptions {
        lists: Some(200),
        training_memory: 256 << 10,
        ..InMemoryOptions::default()
    };
    let fixture = Fixture::new(Metric::L2, 20_000, 32, options);
    let root = &fixture.index.root;
    let rows: Vec<u64> = (0..root.cell_count() as u32).map(|slot| root.rows_of(slot)).collect();
    assert!((120..320).contains(&rows.len()), "{} cells", rows.len());
    assert!(rows.iter().all(|&rows| rows <= 220), "{:?}", rows.iter().max());
}

#[test]
fn order_off_opens_no_further_cells() {
    let options = InMemoryOptions { lists: Some(30), ..Default::default() };
    let mut fixture = Fixture::new(Metric::L2, 3_000, 24, options);
    let query = fixture.queries[..24].to_vec();
    let params = SearchParams { order: Order::Off, ..params(Depth::fixed(2)) };
    let (hits, stats) = fixture.pull(&query, params, usize::MAX);
    assert_eq!(stats.cells_probed, 2);
    assert_eq!(hits.len() as u64, stats.codes_scanned);
    assert!(hits.len() < 3_000);
}

#[test]
fn max_scan_tuples_bounds_the_work() {
    let options = InMemoryOptions { lists: Some(30), ..Default::default() };
    let mut fixture = Fixture::new(Metric::L2, 3_000, 24, options);
    let query = fixture.queries[..24].to_vec();
    let params = SearchParams { max_scan_tuples: 400, ..params(Depth::fixed(1)) };
    let (_, stats) = fixture.pull(&query, params, usize::MAX);
    assert!((400..1_500).contains(&stats.codes_scanned), "{}", stats.codes_scanned);
}

#[test]
fn an_exact_search_is_equal_to_comparing_every_row() {
    for metric in METRICS {
        let mut fixture = Fixture::new(metric, 2_500, 40, InMemoryOptions::default());
        // Little memory, so that several passes are needed.
        let params = SearchParams { exact: true, memory: 0, ..params(Depth::fixed(1)) };
        let query = fixture.queries[..40].to_vec();
        assert_eq!(top_ten(&mut fixture, &query, params), fixture.exact(&query)[..10]);
        let (hits, _) = fixture.pull(&query, params, usize::MAX);
        let ids: HashSet<u64> = hits.iter().map(|hit| hit.id).collect();
        assert_eq!((hits.len(), ids.len()), (2_500, 2_500));
        assert!(hits.windows(2).all(|pair| pair[0].bound <= pair[1].bound));
    }
}

#[test]
fn a_cold_search_takes_two_waves_and_a_repeated_one_none() {
    let mut fixture = Fixture::new(Metric::Cosine, 6_000, 64, InMemoryOptions::default());
    for query in fixture.queries.clone().chunks_exact(64) {
        fixture.index.source.evict_all();
        fixture.index.source.reset_stats();
        let cold = fixture.pull(query, params(Depth::calibrated([4, 8, 10])), 12);
        assert!(fixture.index.source.stats().waves <= 2, "{:?}", fixture.index.source.stats());
        fixture.index.source.reset_stats();
        let warm = fixture.pull(query, params(Depth::calibrated([4, 8, 10])), 12);
        assert_eq!(fixture.index.source.stats().waves, 0);
        assert_eq!(cold.0, warm.0);
    }
}

#[test]
fn losing_cached_parts_under_the_search_changes_nothing() {
    let mut fixture = Fixture::new(Metric::L2, 4_000, 32, InMemoryOptions::default());
    for query in fixture.queries.clone().chunks_exact(32) {
        let params = params(Depth::calibrated([3, 4, 5]));
        let (calm, _) = fixture.pull(query, params, 200);
        fixture.index.source.lose_validity(25);
        let (stormy, _) = fixture.pull(query, params, 200);
        assert_eq!(calm, stormy);
    }
}

#[test]
fn an_exact_search_that_loses_a_part_asks_for_all_that_it_lost_in_one_request() {
    let mut fixture = Fixture::new(Metric::L2, 4_000, 32, InMemoryOptions::default());
    let query = fixture.queries[..32].to_vec();
    let params = SearchParams { exact: true, ..params(Depth::fixed(1)) };
    let (calm, _) = fixture.pull(&query, params, 200);
    fixture.index.source.reset_stats();
    fixture.index.source.lose_validity(3);
    let (stormy, _) = fixture.pull(&query, params, 200);
    assert_eq!(calm, stormy);
    let stats = fixture.index.source.stats();
    assert!(stats.acquired > 20 && stats.waves <= 3, "{stats:?}");
}

/// Tombstones by segment and ordinal.
struct Dead(HashSet<(u32, u32)>);

impl Tombstones for Dead {
    fn for_each_dead(&self, segment: u32, first: u32, rows: u32, visit: &mut dyn FnMut(u32)) {
        for ordinal in first..first + rows {
            if self.0.contains(&(segment, ordinal)) {
                visit(ordinal);
            }
        }
    }
}

#[test]
fn dead_rows_do_not_come_back() {
    for exact in [false, true] {
        let mut fixture = Fixture::new(Metric::L2, 1_500, 24, InMemoryOptions::default());
        let rows = fixture.index.root.geometry(0).rows();
        let dead = Dead((0..rows).filter(|ordinal| ordinal % 3 == 0).map(|o| (0, o)).collect());
        let query = fixture.queries[..24].to_vec();
        let params = SearchParams { exact, ..params(Depth::fixed(2)) };
        let (hits, _) = fixture.pull_with(&query, params, usize::MAX, &mut NoDelta, &dead);
        let ids: HashSet<u64> = hits.iter().map(|hit| hit.id).collect();
        assert_eq!(hits.len(), 1_500 - dead.0.len());
        assert_eq!(ids.len(), hits.len());
    }
}

/// A delta in memory: rows of one cell each, or of none.
struct Delta {
    padded_dim: usize,
    bits: usize,
    rows: Vec<(Option<u32>, Plane1Row, Vec<u8>)>,
    recycled: bool,
}

impl DeltaRows for Delta {
    fn score(
        &self,
        cell: Option<u32>,
        query: &Query,
        term: CellTerm,
        epsilon: f32,
        out: &mut DeltaScores<'_>,
    ) {
        for (handle, (own, row, _)) in (0..).zip(&self.rows) {
            if *own == cell {
                let (est, lower) = plane1::estimate_row(query, self.bits, term, epsilon, row);
                out.push(handle, est, lower);
            }
        }
    }

    fn for_each(&self, visit: &mut dyn FnMut(u32)) {
        (0..self.rows.len() as u32).for_each(visit);
    }

    fn id(&self, handle: u32) -> u64 {
        let record = RacyBytes::new(&self.rows[handle as usize].2);
        plane2::record_id(record, self.padded_dim).unwrap()
    }

    fn record(&mut self, handle: u32, out: &mut Vec<u8>) -> DeltaRecord {
        if self.recycled {
            return DeltaRecord::Recycled;
        }
        out.clear();
        out.extend_from_slice(&self.rows[handle as usize].2);
        DeltaRecord::Copied
    }
}

/// Moves rows to a delta, as if they had been inserted after the build.
fn delta_of(fixture: &Fixture, rows: &[f32], first_id: u64) -> Delta {
    let (root, model) = (&fixture.index.root, &fixture.index.model);
    let width = model.padded_dim();
    let mut delta =
        Delta { padded_dim: width, bits: model.bits, rows: Vec::new(), recycled: false };
    for (id, row) in (first_id..).zip(rows.chunks_exact(fixture.dim)) {
        let mut x = vec![0.0; width];
        model.project_row(row, &mut x).unwrap();
        let cell = (id % 5 != 0).then_some(0u32);
        let mut centroid = vec![0.0; width];
        if let Some(slot) = cell {
            plane2::decode(RacyBytes::new(root.centroid_record(slot)), &mut centroid);
        }
        let mut record = Vec::new();
        plane2::encode(model, &x, id, &mut record);
        delta.rows.push((cell, plane1::encode_row(model, &x, &centroid), record));
    }
    delta
}

#[test]
fn rows_of_the_delta_are_found_among_the_others() {
    for metric in METRICS {
        for exact in [false, true] {
            let mut fixture = Fixture::new(metric, 1_200, 24, InMemoryOptions::default());
            let added = fixture.queries.clone();
            let mut delta = delta_of(&fixture, &added, 1_200);
            fixture.rows.extend_from_slice(&added);
            for recycled in [false, true] {
                delta.recycled = recycled;
                let query = added[24..48].to_vec();
                let params = SearchParams { exact, ..params(Depth::fixed(50)) };
                let (hits, _) =
                    fixture.pull_with(&query, params, usize::MAX, &mut delta, &NoTombstones);
                let ids: HashSet<u64> = hits.iter().map(|hit| hit.id).collect();
                assert_eq!((hits.len(), ids.len()), (1_220, 1_220));
                for hit in hits {
                    assert!(hit.bound <= distance(metric, &query, fixture.row(hit.id)));
                }
            }
        }
    }
}

#[test]
fn an_index_of_a_few_rows_works() {
    for (count, lists) in [(1, 1), (3, 1_000), (7, 2)] {
        for metric in METRICS {
            let options = InMemoryOptions { lists: Some(lists), ..Default::default() };
            let mut fixture = Fixture::new(metric, count, 16, options);
            let query = fixture.queries[..16].to_vec();
            let (hits, _) = fixture.pull(&query, params(Depth::fixed(1)), usize::MAX);
            assert_eq!(hits.len(), count);
        }
    }
}

#[test]
fn equal_rows_all_come_and_zero_vectors_are_left_out_under_cosine() {
    let dim = 16;
    let mut rows = vec![0.5; 3_000 * dim];
    rows[..dim].fill(0.0);
    let ids: Vec<u64> = (0..3_000).collect();
    for metric in METRICS {
        let index =
            InMemoryIndex::build(metric, dim, &rows, &ids, InMemoryOptions::default()).unwrap();
        let expected = if metric == Metric::Cosine { 2_999 } else { 3_000 };
        assert_eq!(3_000 - index.left_out, expected);
        let (query, queries) = (vec![1.0; dim], Vec::new());
        let mut fixture = Fixture { metric, dim, rows: rows.clone(), queries, index };
        let (hits, _) = fixture.pull(&query, params(Depth::fixed(1)), usize::MAX);
        assert_eq!(hits.len() as u64, expected);
    }
}
