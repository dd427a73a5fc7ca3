//! The bound of a plane-2 record is never above what pgvector's operator gives, in whatever order it adds
//! up its f32 sums.

mod common;

use common::{METRICS, Random, exact_score, pgvector_distances};
use half::f16;
use polign_engine::{
    Metric,
    kernel::{RacyBytes, Rotation},
    quantize::{Model, Refined, RowError, plane2, score_to_distance},
};
use proptest::prelude::*;

fn refine(model: &Model, v: &[f32], q: &[f32]) -> Result<Refined, RowError> {
    let mut x = vec![0.0; model.padded_dim()];
    model.project_row(v, &mut x)?;
    let mut record = Vec::new();
    plane2::encode(model, &x, 77, &mut record);
    assert_eq!(record.len(), plane2::record_bytes(model.padded_dim()));
    let refined = model.query(q)?.refine(RacyBytes::new(&record));
    assert_eq!(refined.id, 77);
    Ok(refined)
}

/// Checks the bound of one pair; rows and queries without a direction have none under cosine.
fn check(model: &Model, v: &[f32], q: &[f32], context: &dyn std::fmt::Debug) -> Option<Refined> {
    let refined = match refine(model, v, q) {
        Err(RowError::ZeroNorm) if model.metric == Metric::Cosine => return None,
        refined => refined.unwrap_or_else(|error| panic!("{context:?}: {error}")),
    };
    let lower = score_to_distance(model.metric, refined.lower);
    assert!(!lower.is_nan() && !refined.estimate.is_nan(), "{context:?}: {refined:?}");
    for distance in pgvector_distances(model.metric, v, q) {
        assert!(
            distance.is_nan() || lower <= distance,
            "{:?} {} dimensions, {context:?}: bound {lower:e}, pgvector {distance:e}",
            model.metric,
            model.dim,
        );
    }
    Some(refined)
}

/// The query of a row for which the bound is hardest to keep: it lies so that the coding error counts in
/// full.
fn hardest_query(model: &Model, v: &[f32], reach: f32) -> Vec<f32> {
    let mut x = vec![0.0; model.padded_dim()];
    if model.project_row(v, &mut x).is_err() {
        return v.to_vec();
    }
    let (mut record, mut decoded) = (Vec::new(), x.clone());
    plane2::encode(model, &x, 0, &mut record);
    plane2::decode(RacyBytes::new(&record), &mut decoded);
    let mut error: Vec<f32> = x.iter().zip(&decoded).map(|(x, d)| x - d).collect();
    Rotation::new(model.dim, model.seed).rotate_back(&mut error);
    match model.metric {
        Metric::InnerProduct => error[..model.dim].to_vec(),
        Metric::L2 => v.iter().zip(&error).map(|(v, e)| v + reach * e).collect(),
        Metric::Cosine => {
            let norm = v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt() as f32;
            v.iter().zip(&error).map(|(v, e)| v / norm + reach * e).collect()
        }
    }
}

/// Kinds of rows: what makes sums, differences or codes lose the most.
const KINDS: usize = 9;

fn row(kind: usize, random: &mut Random, dim: usize) -> Vec<f32> {
    let tiny = f32::from_bits(1 + (random.next() % 1000) as u32);
    let normals = random.normals(dim);
    let each = |f: &mut dyn FnMut(usize, f32) -> f32| -> Vec<f32> {
        normals.iter().enumerate().map(|(i, &x)| f(i, x)).collect()
    };
    match kind {
        0 => normals.clone(),
        // All alike: every rounding goes the same way.
        1 => vec![normals[0].abs() / 3.0 + 0.1; dim],
        // Far from the origin, near to each other.
        2 => each(&mut |_, x| 1000.0 + x * 1e-3),
        3 => each(&mut |i, x| if i == dim / 2 { 100.0 } else { x * 1e-6 }),
        // Magnitudes over the whole range of halves.
        4 => each(&mut |i, x| f16::from_f32(x * 2f32.powi(i as i32 % 40 - 24)).to_f32()),
        5 => each(&mut |_, x| if x > 1.0 { x } else { 0.0 }),
        6 => each(&mut |_, x| if x > 0.0 { tiny } else { -tiny }),
        7 => vec![0.0; dim],
        _ => each(&mut |i, x| x / (1.0 + i as f32)),
    }
}

/// Scales from where everything underflows to where everything overflows.
const SCALES: [f32; 12] =
    [1.0, 1e-3, 1e4, 1e-10, 1e-19, 1e-23, 1e-36, 1e-41, 1e10, 1e15, 1e18, 1e37];

fn scaled(mut v: Vec<f32>, scale: f32) -> Vec<f32> {
    v.iter_mut().for_each(|v| *v = (*v * scale).clamp(-f32::MAX, f32::MAX));
    v
}

fn means(model_seed: u64, dim: usize, v: &[f32]) -> [Vec<f32>; 3] {
    let near = Random::new(model_seed).normals(dim);
    let near = v.iter().zip(near).map(|(v, n)| v * (0.9 + 0.05 * n)).collect::<Vec<_>>();
    let finite = near.iter().all(|m| m.is_finite());
    [vec![0.0; dim], if finite { near } else { vec![0.0; dim] }, v.to_vec()]
}

fn check_case(metric: Metric, dim: usize, kind: usize, scale: f32, seed: u64) {
    let mut random = Random::new(seed);
    let v = scaled(row(kind, &mut random, dim), scale);
    let other = scaled(row(kind, &mut random, dim), scale);
    let unrelated = row(0, &mut random, dim);
    for mean in means(seed, dim, &other) {
        let model = Model::new(1, metric, dim, seed, mean).unwrap();
        let context = (kind, scale, seed);
        check(&model, &v, &other, &context);
        check(&model, &v, &unrelated, &context);
        check(&model, &v, &v, &context);
        let near: Vec<f32> = v.iter().map(|v| v.next_up().clamp(-f32::MAX, f32::MAX)).collect();
        check(&model, &v, &near, &context);
        for reach in [-1.0, 0.5, 10.0] {
            let q = hardest_query(&model, &v, reach);
            if q.iter().all(|q| q.is_finite()) {
                check(&model, &v, &q, &context);
            }
        }
    }
}

#[test]
fn bounds_hold_in_every_small_dimension() {
    for dim in 1..=130 {
        for metric in METRICS {
            for kind in 0..KINDS {
                let seed = (dim * 100 + kind) as u64;
                check_case(metric, dim, kind, SCALES[(dim + kind) % SCALES.len()], seed);
            }
        }
    }
}

#[test]
fn bounds_hold_at_every_scale() {
    for (i, scale) in SCALES.into_iter().enumerate() {
        for metric in METRICS {
            for kind in 0..KINDS {
                check_case(metric, [24, 96, 384][(i + kind) % 3], kind, scale, kind as u64);
            }
        }
    }
}

#[test]
fn bounds_hold_in_large_dimensions() {
    for (i, dim) in [1000, 1024, 1536, 4096, 16_000].into_iter().enumerate() {
        for metric in METRICS {
            for kind in [1, 2, (i * 2) % KINDS] {
                check_case(metric, dim, kind, 1.0, i as u64);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn bounds_hold_for_any_bits(
        metric in 0usize..3,
        pairs in prop::collection::vec((any::<u32>(), any::<u32>()), 1..80),
        seed: u64,
        with_mean: bool,
    ) {
        let finite = |bits: u32| {
            let x = f32::from_bits(bits);
            if x.is_finite() { x } else { 1.0 }
        };
        let v: Vec<f32> = pairs.iter().map(|(v, _)| finite(*v)).collect();
        let q: Vec<f32> = pairs.iter().map(|(_, q)| finite(*q)).collect();
        let mean = if with_mean { q.clone() } else { vec![0.0; v.len()] };
        let model = Model::new(1, METRICS[metric], v.len(), seed, mean).unwrap();
        check(&model, &v, &q, &"any bits");
    }

    #[test]
    fn bounds_hold_for_halves(
        metric in 0usize..3,
        pairs in prop::collection::vec((any::<u16>(), any::<u16>()), 1..80),
        seed: u64,
    ) {
        let finite = |bits: u16| {
            let x = f16::from_bits(bits).to_f32();
            if x.is_finite() { x } else { 1.0 }
        };
        let v: Vec<f32> = pairs.iter().map(|(v, _)| finite(*v)).collect();
        let q: Vec<f32> = pairs.iter().map(|(_, q)| finite(*q)).collect();
        let model = Model::new(1, METRICS[metric], v.len(), seed, vec![0.0; v.len()]).unwrap();
        check(&model, &v, &q, &"halves");
    }

    #[test]
    fn damaged_records_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..100),
        metric in 0usize..3,
    ) {
        let model = Model::new(1, METRICS[metric], 40, 3, vec![0.1; 40]).unwrap();
        let query = model.query(&[1.0; 40]).unwrap();
        let refined = query.refine(RacyBytes::new(&bytes));
        prop_assert!(!refined.estimate.is_nan() && !refined.lower.is_nan());
        query.cell_term(RacyBytes::new(&bytes));
    }
}

#[test]
fn damaged_factors_give_the_least_bound() {
    for metric in METRICS {
        let model = Model::new(1, metric, 40, 3, vec![0.0; 40]).unwrap();
        let query = model.query(&[1.0; 40]).unwrap();
        let (mut record, mut x) = (Vec::new(), vec![0.0; 48]);
        let row: Vec<f32> = (0..40).map(|i| 1.0 - 0.05 * i as f32).collect();
        model.project_row(&row, &mut x).unwrap();
        plane2::encode(&model, &x, 5, &mut record);
        let sound = query.refine(RacyBytes::new(&record));
        let least = if metric == Metric::InnerProduct { f64::NEG_INFINITY } else { 0.0 };
        assert!(sound.lower > least, "{metric:?}");
        for at in [48, 52] {
            for factor in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                if at == 52 && factor == f32::NEG_INFINITY {
                    continue;
                }
                let mut damaged = record.clone();
                damaged[at..at + 4].copy_from_slice(&factor.to_le_bytes());
                let refined = query.refine(RacyBytes::new(&damaged));
                assert_eq!(refined.lower, least, "{metric:?} {at} {factor}");
                assert!(!refined.estimate.is_nan(), "{metric:?} {at} {factor}");
            }
        }
        let short = query.refine(RacyBytes::new(&record[..63]));
        assert_eq!((short.estimate, short.lower), (f64::INFINITY, least));
    }
}

/// A bound that always holds could be useless; this one costs about 1 % of the distance.
#[test]
fn bounds_are_tight() {
    for (dim, loss) in [(32, 0.02), (384, 0.02), (1536, 0.02), (16_000, 0.025)] {
        for metric in METRICS {
            let mut random = Random::new(dim as u64);
            // The mean of rows is shorter than they are; under cosine they have length 1.
            let length = if metric == Metric::Cosine { (dim as f32).sqrt() } else { 1.0 };
            let mean = scaled(random.normals(dim), 0.3 / length);
            let model = Model::new(1, metric, dim, 1, mean).unwrap();
            for _ in 0..20 {
                let (v, q) = (random.normals(dim), random.normals(dim));
                let exact = exact_score(metric, &v, &q);
                let refined = refine(&model, &v, &q).unwrap();
                let size = if metric == Metric::Cosine { 1.0 } else { dim as f64 };
                let lost = (exact - refined.lower) / size;
                assert!((0.0..2.0 * loss).contains(&lost), "{metric:?} {dim} {lost}");
                let off = (exact - refined.estimate).abs() / size;
                assert!(off < loss, "{metric:?} {dim} {off}");
            }
        }
    }
}

/// What the code can represent is not lost: a zero residual to the mean, and equal rows.
#[test]
fn degenerate_rows_are_exact() {
    for metric in METRICS {
        let mut random = Random::new(9);
        let (v, q) = (random.normals(100), random.normals(100));
        let norm = match metric {
            Metric::Cosine => v.iter().map(|v| v * v).sum::<f32>().sqrt(),
            _ => 1.0,
        };
        let mean: Vec<f32> = v.iter().map(|v| v / norm).collect();
        let model = Model::new(1, metric, 100, 1, mean).unwrap();
        let exact = exact_score(metric, &v, &q);
        let refined = refine(&model, &v, &q).unwrap();
        let tolerance = 1e-4 * (1.0 + exact.abs());
        assert!((refined.estimate - exact).abs() < tolerance, "{metric:?} {refined:?} {exact}");
        assert!(exact - refined.lower < tolerance, "{metric:?} {refined:?} {exact}");
        assert_eq!(refine(&model, &v.clone(), &q).unwrap(), refined);
    }
}
