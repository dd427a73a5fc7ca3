//! What clustering is for, on real data: few codes to scan for a given recall, and few ranges to read.

use std::{fs::File, io::Read, path::Path};

use flate2::read::GzDecoder;
use half::f16;
use polign_engine::{
    Metric,
    cluster::{Assigner, Params, kmeans, order_cells, spread},
    kernel::gemm,
    quantize::cell_rank::RankTerms,
};

const NEIGHBOURS: usize = 10;

struct Set {
    dim: usize,
    rows: Vec<f32>,
    queries: Vec<f32>,
}

/// The f16 values and the number of columns of a gzipped `.npy` file.
fn read_f16(path: &Path) -> (Vec<f32>, usize) {
    let mut bytes = Vec::new();
    GzDecoder::new(File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    let header = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let (text, data) = bytes[10..].split_at(header);
    let text = String::from_utf8_lossy(text);
    let shape = text.split(['(', ')']).nth(1).unwrap();
    let columns = shape.split(',').nth(1).unwrap().trim().parse().unwrap();
    let (values, _) = data.as_chunks::<2>();
    (values.iter().map(|&v| f16::from_le_bytes(v).to_f32()).collect(), columns)
}

impl Set {
    fn read(folder: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder);
        let (rows, dim) = read_f16(&folder.join("base.f16.npy.gz"));
        let (queries, _) = read_f16(&folder.join("queries.f16.npy.gz"));
        Self { dim, rows, queries }
    }

    /// Rows and queries of unit length, for cosine.
    fn normalised(mut self) -> Self {
        for row in self.rows.chunks_mut(self.dim).chain(self.queries.chunks_mut(self.dim)) {
            let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x /= norm);
        }
        self
    }

    /// Rows (and, unless for inner product, queries) minus the mean of the rows.
    fn centred(mut self, metric: Metric) -> Self {
        let count = (self.rows.len() / self.dim) as f32;
        for d in 0..self.dim {
            let mean = self.rows.iter().skip(d).step_by(self.dim).sum::<f32>() / count;
            self.rows.iter_mut().skip(d).step_by(self.dim).for_each(|x| *x -= mean);
            if metric != Metric::InnerProduct {
                self.queries.iter_mut().skip(d).step_by(self.dim).for_each(|x| *x -= mean);
            }
        }
        self
    }

    /// Scores of all queries against `rows`, smaller for nearer ones: query after query.
    fn scores(&self, metric: Metric, rows: &[f32]) -> Vec<f32> {
        let count = rows.len() / self.dim;
        let mut scores = vec![0.0; self.queries.len() / self.dim * count];
        gemm::dot_block(&self.queries, rows, self.dim, &mut scores);
        let square = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>();
        let norms: Vec<f32> = rows.chunks(self.dim).map(square).collect();
        for (scores, query) in scores.chunks_mut(count).zip(self.queries.chunks(self.dim)) {
            for (score, norm) in scores.iter_mut().zip(&norms) {
                *score = match metric {
                    Metric::InnerProduct => -*score,
                    Metric::L2 | Metric::Cosine => norm - 2.0 * *score + square(query),
                };
            }
        }
        scores
    }
}

/// The positions of the smallest values first.
fn ascending(values: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    order.sort_by(|&a, &b| values[a as usize].total_cmp(&values[b as usize]));
    order
}

struct Clustered {
    centroids: Vec<f32>,
    /// The order of cells for each query.
    order: Vec<Vec<u32>>,
    labels: Vec<u32>,
}

/// Trains by one metric; ranks the cells by the score of another, with their spread or without.
fn cluster(set: &Set, trained_by: Metric, metric: Metric, spreads: bool) -> Clustered {
    let lists = 100;
    let dim = set.dim;
    let cells =
        kmeans(&Params::new(trained_by, dim, lists, 1), &set.rows, None, &|| false).unwrap();
    let mut labels = vec![0; set.rows.len() / dim];
    Assigner::new(trained_by, &cells).assign(&set.rows, &mut labels, None, &|| false).unwrap();
    let mut members = vec![Vec::new(); cells.len()];
    for (row, &label) in set.rows.chunks(dim).zip(&labels) {
        members[label as usize].extend_from_slice(row);
    }
    let terms: Vec<RankTerms> = (0..cells.len())
        .map(|c| if spreads { spread(&members[c], cells.get(c)) } else { 0.0 })
        .map(|spread| RankTerms::new(metric, spread))
        .collect();
    let scores = set.scores(metric, cells.as_slice());
    let order = scores
        .chunks(cells.len())
        .zip(set.queries.chunks(dim))
        .map(|(scores, query)| {
            let norm = query.iter().map(|x| x * x).sum::<f32>().sqrt();
            let ranks = scores.iter().zip(&terms).map(|(&s, terms)| terms.rank(s, norm));
            ascending(&ranks.collect::<Vec<f32>>())
        })
        .collect();
    Clustered { centroids: cells.as_slice().to_vec(), order, labels }
}

/// The mean number of rows in the cells that must be opened for recall 0.95 of the 10 nearest rows.
fn codes(set: &Set, clustered: &Clustered, metric: Metric) -> f64 {
    let count = set.rows.len() / set.dim;
    let cells = clustered.order[0].len();
    let mut sizes = vec![0.0; cells];
    for &label in &clustered.labels {
        sizes[label as usize] += 1.0;
    }
    let (mut hits, mut scanned) = (vec![0; cells], vec![0.0; cells]);
    let scores = set.scores(metric, &set.rows);
    for (scores, order) in scores.chunks(count).zip(&clustered.order) {
        let nearest = ascending(scores);
        for (place, &cell) in order.iter().enumerate() {
            let own = |row: &&u32| clustered.labels[**row as usize] == cell;
            hits[place] += nearest[..NEIGHBOURS].iter().filter(own).count();
            scanned[place] += sizes[cell as usize];
        }
    }
    let queries = clustered.order.len();
    let wanted = (0.95 * (queries * NEIGHBOURS) as f64) as usize;
    let mut found = 0;
    let mut codes = 0.0;
    for (hits, scanned) in hits.iter().zip(&scanned) {
        if found < wanted {
            found += hits;
            codes += scanned / queries as f64;
        }
    }
    codes
}

#[test]
fn cosine_scans_few_codes_on_passages() {
    let set = Set::read("demo/data").normalised().centred(Metric::Cosine);
    let clustered = cluster(&set, Metric::Cosine, Metric::Cosine, true);
    let codes = codes(&set, &clustered, Metric::Cosine);
    // 1,496 of 10,000 when this was written.
    assert!(codes < 1700.0, "{codes}");
}

#[test]
fn inner_product_scans_far_fewer_codes_than_plain_cells_on_glove() {
    let set = Set::read("tests/data/glove10k-100d").centred(Metric::InnerProduct);
    let by_norm = cluster(&set, Metric::InnerProduct, Metric::InnerProduct, true);
    let plain = cluster(&set, Metric::L2, Metric::InnerProduct, false);
    let by_norm = codes(&set, &by_norm, Metric::InnerProduct);
    let plain = codes(&set, &plain, Metric::InnerProduct);
    // 2,603 and 5,173 of 10,000 when this was written.
    assert!(by_norm < 0.6 * plain, "{by_norm}, {plain}");
}

#[test]
fn cells_probed_together_lie_together() {
    let set = Set::read("demo/data").normalised().centred(Metric::Cosine);
    let clustered = cluster(&set, Metric::Cosine, Metric::Cosine, true);
    let order = order_cells(&clustered.centroids, set.dim);
    let mut place = vec![0; order.len()];
    for (at, &cell) in order.iter().enumerate() {
        place[cell as usize] = at;
    }
    // Ranges of the 10 nearest cells, when gaps of one cell are read along.
    let ranges = |place: &dyn Fn(u32) -> usize| -> f64 {
        let of_query = |order: &Vec<u32>| {
            let mut places: Vec<usize> = order[..10].iter().map(|&cell| place(cell)).collect();
            places.sort_unstable();
            1 + places.windows(2).filter(|w| w[1] - w[0] > 2).count()
        };
        let total: usize = clustered.order.iter().map(of_query).sum();
        total as f64 / clustered.order.len() as f64
    };
    let ordered = ranges(&|cell| place[cell as usize]);
    let mixed = ranges(&|cell| cell as usize * 37 % 100);
    assert!(ordered < 0.6 * mixed, "{ordered} {mixed}");
}
