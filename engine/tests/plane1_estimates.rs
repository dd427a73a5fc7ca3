//! Plane 1's estimates: unbiased, within the stated bound at the stated confidence, exact where the code
//! is, and the same from blocks and from single rows.

mod common;

use common::{METRICS, Random, exact_score};
use polign_engine::{
    Metric,
    kernel::RacyBytes,
    quantize::{CellTerm, Model, Query, plane1, plane1::Shape, plane2},
};
use proptest::prelude::*;

/// A cell of rows around a centroid, with the centroid's record.
struct Cell {
    rows: Vec<Vec<f32>>,
    projected: Vec<f32>,
    centroid: Vec<f32>,
    record: Vec<u8>,
}

fn cell(model: &Model, rows: Vec<Vec<f32>>) -> Cell {
    let p = model.padded_dim();
    let mut projected = vec![0.0; p * rows.len()];
    let mut mean = vec![0.0; p];
    for (row, x) in rows.iter().zip(projected.chunks_exact_mut(p)) {
        model.project_row(row, x).unwrap();
        mean.iter_mut().zip(x).for_each(|(mean, x)| *mean += *x / rows.len() as f32);
    }
    let mut record = Vec::new();
    plane2::encode(model, &mean, 0, &mut record);
    let mut centroid = vec![0.0; p];
    assert!(plane2::decode(RacyBytes::new(&record), &mut centroid));
    Cell { rows, projected, centroid, record }
}

fn scan(
    blocks: &[u8],
    bits: usize,
    query: &Query,
    term: CellTerm,
    epsilon: f32,
) -> Vec<(f32, f32)> {
    let (mut estimates, mut lowers) = (Vec::new(), Vec::new());
    let blocks = RacyBytes::new(blocks);
    plane1::scan(blocks, bits, query, term, epsilon, &mut estimates, &mut lowers);
    estimates.into_iter().zip(lowers).collect()
}

/// (exact - estimate) / deviation of each row, where the deviation is what epsilon multiplies.
fn normalised_errors(model: &Model, cell: &Cell, q: &[f32]) -> Vec<f64> {
    let query = model.query(q).unwrap();
    let term = query.cell_term(RacyBytes::new(&cell.record));
    let mut blocks = Vec::new();
    plane1::encode_blocks(model, &cell.projected, &cell.centroid, &mut blocks);
    let found = scan(&blocks, model.bits, &query, term, 1.0);
    let errors = cell.rows.iter().zip(found).map(|(row, (estimate, lower))| {
        let exact = exact_score(model.metric, row, q);
        (exact - f64::from(estimate)) / f64::from(estimate - lower)
    });
    errors.collect()
}

/// The share of a normal distribution below -epsilon.
fn tail(epsilon: f64) -> f64 {
    // Numerical integration is simple and exact enough.
    let step = 1e-4;
    let density = |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
    (0..80_000).map(|i| density(epsilon + (f64::from(i) + 0.5) * step) * step).sum()
}

/// Kinds of rows and queries: random, sparse, constant with noise, and a query near to the cell's centre.
fn data(kind: usize, random: &mut Random, dim: usize) -> (Vec<Vec<f32>>, Vec<f32>) {
    let centre = random.normals(dim);
    let mut near = |spread: f32| -> Vec<f32> {
        let noise = random.normals(dim);
        centre.iter().zip(noise).map(|(c, n)| c + spread * n).collect()
    };
    match kind {
        0 => ((0..40).map(|_| near(0.7)).collect(), near(0.9)),
        1 => {
            let sparse = |v: Vec<f32>| v.into_iter().map(|v| if v > 1.2 { v } else { 0.0 });
            let rows = (0..40).map(|_| sparse(near(0.7)).collect()).collect();
            (rows, sparse(near(0.7)).map(|v| v + 0.01).collect())
        }
        2 => {
            let flat = |v: Vec<f32>| v.into_iter().map(|v| 1.0 + 0.1 * v).collect::<Vec<_>>();
            ((0..40).map(|_| flat(near(0.7))).collect(), flat(near(0.7)))
        }
        _ => ((0..40).map(|_| near(0.3)).collect(), near(0.02)),
    }
}

/// Both over rows and over rotations: what RaBitQ promises of one row holds over the rotation's choice.
#[test]
fn estimates_are_unbiased_and_bounds_hold_at_their_confidence() {
    for dim in [48, 100, 200, 256, 384, 1000] {
        for metric in METRICS {
            for kind in 0..4 {
                let mut random = Random::new((dim * 10 + kind) as u64);
                let (rows, q) = data(kind, &mut random, dim);
                let mut errors = Vec::new();
                for seed in 0..12 {
                    let model = Model::new(1, metric, dim, seed, vec![0.0; dim]).unwrap();
                    errors.extend(normalised_errors(&model, &cell(&model, rows.clone()), &q));
                }
                let count = errors.len() as f64;
                let context = format!("{metric:?} {dim} kind {kind}");
                let mean = errors.iter().sum::<f64>() / count;
                let deviation = (errors.iter().map(|e| e * e).sum::<f64>() / count).sqrt();
                // The rows share the query and the centre, so their errors are not independent.
                assert!(mean.abs() < 0.25, "{context}: mean {mean}");
                assert!((0.75..1.25).contains(&deviation), "{context}: deviation {deviation}");
                for epsilon in [0.5, 1.0, 1.5, 1.9, 2.5, 3.0] {
                    let outside = errors.iter().filter(|e| **e < -epsilon).count() as f64 / count;
                    let expected = tail(epsilon);
                    let tolerance = 0.25 * expected + 4.0 * (expected / count).sqrt();
                    assert!(
                        outside <= expected + tolerance,
                        "{context}: {outside} below {epsilon}, not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn unbiased_over_many_rotations() {
    for (metric, dim) in [(Metric::L2, 64), (Metric::InnerProduct, 256), (Metric::Cosine, 300)] {
        let mut random = Random::new(5);
        let (rows, q) = data(1, &mut random, dim);
        let rows = rows[..2].to_vec();
        let mut errors = Vec::new();
        for seed in 0..600 {
            let model = Model::new(1, metric, dim, 1000 + seed, vec![0.0; dim]).unwrap();
            // The cell's centre is not the mean of the rows, which would tie their residuals.
            let mut cell = cell(&model, rows.clone());
            cell.centroid.fill(0.0);
            cell.record = vec![0; plane2::record_bytes(model.padded_dim())];
            errors.push(normalised_errors(&model, &cell, &q)[0]);
        }
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        // Four standard errors.
        assert!(mean.abs() < 4.0 / (errors.len() as f64).sqrt(), "{metric:?} {dim}: {mean}");
    }
}

/// With two bits, no other split of the elements into small and large ones has a greater cosine.
#[test]
fn two_bit_codes_are_the_best() {
    for dim in [16, 48, 100, 240] {
        let model = Model::new(1, Metric::L2, dim, 3, vec![0.0; dim]).unwrap();
        let p = model.padded_dim();
        let mut random = Random::new(dim as u64);
        for _ in 0..50 {
            let x = random.normals(p);
            let row = plane1::encode_row(&model, &x, &vec![0.0; p]);
            let mut sizes: Vec<f64> = x.iter().map(|x| f64::from(x.abs())).collect();
            sizes.sort_by(|a, b| b.total_cmp(a));
            let square: f64 = sizes.iter().map(|x| x * x).sum();
            let best = (0..=p)
                .map(|large| {
                    let product: f64 = sizes
                        .iter()
                        .enumerate()
                        .map(|(i, x)| x * if i < large { 1.5 } else { 0.5 })
                        .sum();
                    let code = p as f64 * 0.25 + large as f64 * 2.0;
                    product * product / (code * square)
                })
                .fold(0.0, f64::max);
            let e = 2.0 * (square * (1.0 - best) / best / (p - 1) as f64).sqrt();
            assert!((f64::from(row.e) / e - 1.0).abs() < 1e-4, "{dim}: {} instead of {e}", row.e);
        }
    }
}

#[test]
fn zero_residuals_and_duplicates_are_exact() {
    for metric in METRICS {
        for dim in [1, 20, 384] {
            let mut random = Random::new(dim as u64);
            let (v, q) = (random.normals(dim), random.normals(dim));
            let model = Model::new(1, metric, dim, 3, vec![0.0; dim]).unwrap();
            // A row that its cell's record represents exactly: all rows of a cell may be equal.
            let alone = cell(&model, vec![v.clone(); 33]);
            let rows = alone.centroid.repeat(33);
            let query = model.query(&q).unwrap();
            let term = query.cell_term(RacyBytes::new(&alone.record));
            let mut blocks = Vec::new();
            plane1::encode_blocks(&model, &rows, &alone.centroid, &mut blocks);
            let found = scan(&blocks, model.bits, &query, term, 1.9);
            assert!(
                found[..33]
                    .iter()
                    .all(|&(estimate, lower)| estimate == term.base && lower == term.base)
            );
            let size = if metric == Metric::Cosine { 1.0 } else { dim as f64 };
            let off = f64::from(term.base) - exact_score(metric, &v, &q);
            assert!(off.abs() < 0.1 * size, "{metric:?} {dim} {off}");
            // The rows themselves are off the decoded centre by its coding error only.
            blocks.clear();
            plane1::encode_blocks(&model, &alone.projected, &alone.centroid, &mut blocks);
            let found = scan(&blocks, model.bits, &query, term, 1.9);
            assert!(found[..33].iter().all(|&row| row == found[0]));
            let off = f64::from(found[0].0) - exact_score(metric, &v, &q);
            assert!(off.abs() < 0.05 * size, "{metric:?} {dim} {off}");
        }
    }
}

#[test]
fn extreme_rows_stay_finite() {
    for metric in METRICS {
        for dim in [1, 300, 4096] {
            for scale in [1e-45f32, 1e-38, 1e-20, 1e18, 3e38] {
                let mut random = Random::new(dim as u64);
                let extreme = |random: &mut Random| -> Vec<f32> {
                    let normals = random.normals(dim);
                    normals.iter().map(|x| (x / 4.0 * scale).clamp(-f32::MAX, f32::MAX)).collect()
                };
                let rows: Vec<_> = (0..3).map(|_| extreme(&mut random)).collect();
                let mean = extreme(&mut random);
                let q = extreme(&mut random);
                if metric == Metric::Cosine && rows.iter().any(|v| v.iter().all(|v| *v == 0.0)) {
                    continue;
                }
                let model = Model::new(1, metric, dim, 3, mean).unwrap();
                let Ok(query) = model.query(&q) else { continue };
                let cell = cell(&model, rows);
                let term = query.cell_term(RacyBytes::new(&cell.record));
                let mut blocks = Vec::new();
                plane1::encode_blocks(&model, &cell.projected, &cell.centroid, &mut blocks);
                for (estimate, lower) in &scan(&blocks, model.bits, &query, term, 1.9)[..3] {
                    let context = format!("{metric:?} {dim} {scale} {estimate} {lower}");
                    assert!(estimate.is_finite() && lower.is_finite(), "{context}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// The delta's rows have the numbers that they will have in a segment.
    #[test]
    fn blocks_and_single_rows_agree(
        dim in 1usize..400,
        count in 0usize..70,
        metric in 0usize..3,
        of_centroids: bool,
        seed: u64,
        epsilon in 0f32..4.0,
    ) {
        let mut random = Random::new(seed);
        let mean = random.normals(dim).iter().map(|m| m * 0.1).collect();
        let model = Model::new(1, METRICS[metric], dim, seed, mean).unwrap();
        let shape = if of_centroids { Shape::of_centroids(&model) } else { Shape::from(&model) };
        let (p, bits) = (model.padded_dim(), shape.bits);
        let query = model.query(&random.normals(dim)).unwrap();
        let cell = cell(&model, (0..count).map(|_| random.normals(dim)).collect());
        let term = query.cell_term(RacyBytes::new(&cell.record));
        let mut blocks = Vec::new();
        plane1::encode_blocks(shape, &cell.projected, &cell.centroid, &mut blocks);
        prop_assert_eq!(blocks.len(), count.div_ceil(32) * plane1::block_bytes(p, bits));

        let singles: Vec<_> = cell
            .projected
            .chunks_exact(p)
            .map(|x| plane1::encode_row(shape, x, &cell.centroid))
            .collect();
        let found = scan(&blocks, bits, &query, term, epsilon);
        prop_assert!(found[count..].iter().all(|&row| row == (f32::INFINITY, f32::INFINITY)));
        for (single, found) in singles.iter().zip(&found) {
            prop_assert_eq!(plane1::estimate_row(&query, bits, term, epsilon, single), *found);
            let mut bytes = Vec::new();
            plane1::Plane1RowRef::from(single).write_to(&mut bytes);
            prop_assert_eq!(bytes.len(), plane1::row_bytes(p, bits));
            let read = plane1::Plane1RowRef::from_bytes(&bytes, p, bits).unwrap();
            prop_assert_eq!(read, single.into());
            prop_assert!(plane1::Plane1RowRef::from_bytes(&bytes[1..], p, bits).is_none());
        }
        let mut packed = Vec::new();
        let singles: Vec<_> = singles.iter().map(|row| row.into()).collect();
        plane1::blocks_from_rows(shape, &singles, &mut packed);
        prop_assert!(packed == blocks);
    }

    #[test]
    fn any_bytes_scan_without_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        metric in 0usize..3,
    ) {
        let model = Model::new(1, METRICS[metric], 40, 3, vec![0.1; 40]).unwrap();
        let query = model.query(&[1.0; 40]).unwrap();
        let found = scan(&bytes, 2, &query, query.zero_cell_term(), 1.9);
        prop_assert_eq!(found.len(), bytes.len() / plane1::block_bytes(48, 2) * 32);
        prop_assert!(found.iter().all(|(estimate, lower)| !estimate.is_nan() && !lower.is_nan()));
    }
}
