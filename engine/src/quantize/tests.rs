use super::*;
use crate::kernel::RacyBytes;

/// Standard normal values from a seed.
pub(super) fn normal(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    (0..len)
        .map(|_| {
            let (r, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
            (r * angle.cos()) as f32
        })
        .collect()
}

fn exact_score(metric: Metric, v: &[f32], q: &[f32]) -> f64 {
    let pairs = || v.iter().zip(q).map(|(v, q)| (f64::from(*v), f64::from(*q)));
    match metric {
        Metric::L2 => pairs().map(|(v, q)| (v - q) * (v - q)).sum(),
        Metric::InnerProduct => -pairs().map(|(v, q)| v * q).sum::<f64>(),
        Metric::Cosine => {
            let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            2.0 - 2.0 * pairs().map(|(v, q)| v * q).sum::<f64>() / norm(v) / norm(q)
        }
    }
}

const METRICS: [Metric; 3] = [Metric::L2, Metric::InnerProduct, Metric::Cosine];

#[test]
fn both_planes_estimate_the_score() {
    for metric in METRICS {
        for dim in [1, 3, 16, 100, 255, 256, 300, 384, 1000, 1536] {
            let mean = normal(1, dim).iter().map(|x| x * 0.3 / (dim as f32).sqrt()).collect();
            let model = Model::new(1, metric, dim, 7, mean).unwrap();
            let p = model.padded_dim();
            let query = normal(2, dim);
            let prepared = model.query(&query).unwrap();
            let mut centroid = vec![0.0; p];
            model.project_row(&normal(3, dim), &mut centroid).unwrap();
            centroid.iter_mut().for_each(|c| *c *= 0.5);
            let mut record = Vec::new();
            plane2::encode(&model, &centroid, 9, &mut record);
            plane2::decode(RacyBytes::new(&record), &mut centroid);
            let term = prepared.cell_term(RacyBytes::new(&record));
            let mut rows = Vec::new();
            for i in 0..45 {
                let mut x = vec![0.0; p];
                model.project_row(&normal(100 + i, dim), &mut x).unwrap();
                rows.extend(x);
            }
            let mut blocks = Vec::new();
            plane1::encode_blocks(&model, &rows, &centroid, &mut blocks);
            assert_eq!(blocks.len(), 2 * plane1::block_bytes(p, model.bits));
            let (mut est, mut low) = (vec![], vec![]);
            plane1::scan(
                RacyBytes::new(&blocks),
                model.bits,
                &prepared,
                term,
                1.9,
                &mut est,
                &mut low,
            );
            assert!(
                est.len() == 64 && est[45..].iter().chain(&low[45..]).all(|&x| x == f32::INFINITY)
            );
            let scale = match metric {
                Metric::Cosine => 1.0,
                _ => dim as f64,
            };
            for i in 0..45 {
                let exact = exact_score(metric, &normal(100 + i as u64, dim), &query);
                let single = plane1::encode_row(&model, &rows[i * p..][..p], &centroid);
                let single = plane1::estimate_row(&prepared, model.bits, term, 1.9, &single);
                assert_eq!(single, (est[i], low[i]));
                let off = (f64::from(est[i]) - exact).abs() / scale;
                assert!(off < 8.0 / (p as f64).sqrt(), "{metric:?} {dim} {off} {exact}");
                record.clear();
                plane2::encode(&model, &rows[i * p..][..p], i as u64, &mut record);
                let refined = prepared.refine(RacyBytes::new(&record));
                assert_eq!(refined.id, i as u64);
                assert!(refined.lower <= exact, "{metric:?} {dim} {refined:?} {exact}");
                assert!(
                    exact - refined.lower < 0.12 * scale,
                    "{metric:?} {dim} {refined:?} {exact}"
                );
                assert!(
                    (refined.estimate - exact).abs() < 0.05 * scale,
                    "{metric:?} {dim} {refined:?} {exact}"
                );
            }
        }
    }
}

#[test]
fn models_round_trip_and_damage_is_an_error() {
    let model = Model::new(3, Metric::Cosine, 20, 11, normal(5, 20)).unwrap();
    let bytes = model.to_bytes();
    assert_eq!(bytes.len(), model.encoded_len());
    assert_eq!(Model::from_bytes(&bytes).unwrap(), model);
    for len in 0..bytes.len() {
        assert!(matches!(Model::from_bytes(&bytes[..len]), Err(ModelError::Length { .. })));
    }
    let changed = |at: usize, to: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = to;
        Model::from_bytes(&bytes)
    };
    assert_eq!(changed(0, 2), Err(ModelError::Version { found: 2, known: 1 }));
    assert_eq!(changed(2, 0), Err(ModelError::Metric(0)));
    assert_eq!(changed(3, 3), Err(ModelError::Bits(3)));
    assert_eq!(changed(8, 0), Err(ModelError::Dimension(0)));
    assert!(matches!(changed(8, 21), Err(ModelError::Length { .. })));
    assert_eq!(changed(27, 0x7f), Err(ModelError::Mean));
}

#[test]
fn unsuitable_vectors_are_typed_errors() {
    let model = Model::new(0, Metric::Cosine, 3, 0, vec![0.0; 3]).unwrap();
    let mut out = vec![0.0; 16];
    assert_eq!(
        model.project_row(&[1.0], &mut out),
        Err(RowError::Dimension { expected: 3, found: 1 })
    );
    assert_eq!(model.project_row(&[0.0; 3], &mut out), Err(RowError::ZeroNorm));
    assert_eq!(model.project_row(&[0.0, f32::NAN, 0.0], &mut out), Err(RowError::NotFinite));
    assert_eq!(model.query(&[0.0, f32::INFINITY, 0.0]).unwrap_err(), RowError::NotFinite);
    let model = Model::new(0, Metric::L2, 3, 0, vec![0.0; 3]).unwrap();
    assert_eq!(model.project_row(&[0.0; 3], &mut out), Ok(()));
}
