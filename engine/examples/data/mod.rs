//! Real data for the examples: rows, questions and their exact neighbours from `.npy` files, and searches of
//! them as the executor makes them.

use std::{error::Error, fs};

use half::f16;
use polign_engine::{
    Metric,
    search::{Depth, Environment, Order, SearchParams, Stream},
    segment::SourceError,
};

/// A set of rows, questions, and the row numbers of each question's exact neighbours, nearest first.
pub struct Data {
    pub metric: Metric,
    pub dim: usize,
    pub rows: Vec<f32>,
    pub queries: Vec<f32>,
    truth: Vec<i32>,
    depth: usize,
}

impl Data {
    /// Reads what the first four arguments name: rows, questions and neighbours, and the metric.
    pub fn of_arguments(arguments: &[String]) -> Result<Self, Box<dyn Error>> {
        let [base, queries, truth, metric, ..] = arguments else {
            return Err("expected base.f16.npy queries.f16.npy neighbours.npy l2|ip|cosine".into());
        };
        let metric = match metric.as_str() {
            "l2" => Metric::L2,
            "ip" => Metric::InnerProduct,
            "cosine" => Metric::Cosine,
            other => return Err(format!("unknown metric {other}").into()),
        };
        let (rows, dim) = read_f16(base)?;
        let (queries, _) = read_f16(queries)?;
        let (truth, depth) = read_i32(truth)?;
        Ok(Self { metric, dim, rows, queries, truth, depth })
    }

    /// A number for each row.
    pub fn ids(&self) -> Vec<u64> {
        (0..(self.rows.len() / self.dim) as u64).collect()
    }

    /// The first `count` questions, with their numbers.
    pub fn questions(&self, count: usize) -> impl Iterator<Item = (usize, &[f32])> {
        self.queries.chunks_exact(self.dim).take(count).enumerate()
    }

    /// How many of the ten nearest rows of a question a search finds. As the executor does, it pulls until
    /// ten exact distances lie at or below the next bound.
    pub fn found(
        &self,
        question: usize,
        stream: &mut Stream,
        environment: &mut Environment<'_>,
    ) -> Result<usize, SourceError> {
        let query = &self.queries[question * self.dim..][..self.dim];
        let mut best: Vec<(f64, u64)> = Vec::new();
        while let Some(hit) = stream.next(environment)? {
            if best.len() >= 10 && best[9].0 <= hit.bound {
                break;
            }
            let row = &self.rows[hit.id as usize * self.dim..][..self.dim];
            best.push((distance(self.metric, query, row), hit.id));
            best.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        let exact = &self.truth[question * self.depth..][..10];
        Ok(best.iter().take(10).filter(|(_, id)| exact.contains(&(*id as i32))).count())
    }
}

/// A search of so many cells for ten rows.
pub fn params(nprobe: u32, epsilon: f32) -> SearchParams {
    SearchParams {
        depth: Depth::fixed(nprobe),
        order: Order::Strict,
        exact: false,
        epsilon,
        max_scan_tuples: 0,
        limit_hint: 10,
        memory: 4 << 20,
    }
}

/// Shape and data of a two-dimensional `.npy` file.
fn read_npy(path: &str, dtype: &str, width: usize) -> Result<(Vec<u8>, usize), Box<dyn Error>> {
    let bytes = fs::read(path)?;
    if !bytes.starts_with(b"\x93NUMPY\x01") {
        return Err(format!("{path} is not a version 1 .npy file").into());
    }
    let data = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8_lossy(&bytes[10..data]).into_owned();
    if !header.contains(dtype) || !header.contains("'fortran_order': False") {
        return Err(format!("{path}: expected {dtype} in C order, found {header}").into());
    }
    let shape = header.split('(').nth(1).and_then(|s| s.split(')').next()).unwrap_or_default();
    let columns: usize = shape.split(',').nth(1).unwrap_or_default().trim().parse()?;
    let body = bytes[data..].to_vec();
    if columns == 0 || !body.len().is_multiple_of(columns * width) {
        return Err(format!("{path} is truncated").into());
    }
    Ok((body, columns))
}

fn read_f16(path: &str) -> Result<(Vec<f32>, usize), Box<dyn Error>> {
    let (body, columns) = read_npy(path, "<f2", 2)?;
    let values = body.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    Ok((values, columns))
}

fn read_i32(path: &str) -> Result<(Vec<i32>, usize), Box<dyn Error>> {
    let (body, columns) = read_npy(path, "<i4", 4)?;
    let values =
        body.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    Ok((values, columns))
}

/// The operator's distance, in f64.
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
