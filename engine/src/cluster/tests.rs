use super::kmeans::train;
use super::order::order_up_to;
use super::rng::Rng;
use super::*;
use crate::Metric;
use proptest::prelude::*;

const METRICS: [Metric; 3] = [Metric::L2, Metric::InnerProduct, Metric::Cosine];

fn never() -> bool {
    false
}

/// A mixture of `centers` Gaussians.
fn mixture(n: usize, dim: usize, centers: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    let mut gauss = || {
        let (u, v) = (1.0 - rng.unit(), rng.unit());
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    };
    let mid: Vec<f32> = (0..centers * dim).map(|_| gauss()).collect();
    (0..n)
        .flat_map(|i| (0..dim).map(move |j| (i, j)))
        .map(|(i, j)| mid[(i * 7919 % centers) * dim + j] + 0.5 * gauss())
        .collect()
}

fn trained(rows: &[f32], dim: usize, lists: usize) -> Centroids {
    kmeans(&Params::new(Metric::L2, dim, lists, 1), rows, None, &never).unwrap()
}

fn labels(assigner: &Assigner, rows: &[f32]) -> Vec<u32> {
    let mut out = vec![u32::MAX; rows.len() / assigner.dim()];
    assigner.assign(rows, &mut out, None, &never).unwrap();
    out
}

fn no_cell_is_empty(metric: Metric, c: &Centroids, rows: &[f32]) {
    assert!(c.as_slice().iter().chain(c.spreads()).all(|x| x.is_finite()));
    let mut seen = vec![false; c.len()];
    for l in labels(&Assigner::new(metric, c), rows) {
        seen[l as usize] = true;
    }
    assert!(seen.iter().all(|&s| s), "{metric:?}");
}

fn distance2(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum()
}

/// How many rows have a cell that is clearly further than the nearest.
fn misplaced(c: &Centroids, rows: &[f32], labels: &[u32]) -> usize {
    let far = |(row, &l): (&[f32], &u32)| {
        let best = (0..c.len()).map(|i| distance2(row, c.get(i))).fold(f64::INFINITY, f64::min);
        let size: f64 = row.iter().map(|x| *x as f64 * *x as f64).sum();
        distance2(row, c.get(l as usize)) > best * (1.0 + 1e-4) + 1e-5 * size
    };
    rows.chunks(c.dim()).zip(labels).filter(|&pair| far(pair)).count()
}

#[test]
fn one_row() {
    for metric in METRICS {
        let c = kmeans(&Params::new(metric, 3, 1000, 1), &[1.0, -2.0, 3.0], None, &never).unwrap();
        assert_eq!((c.as_slice(), c.spreads()), (&[1.0, -2.0, 3.0][..], &[0.0][..]));
    }
}

#[test]
fn no_row() {
    assert!(trained(&[], 3, 10).is_empty());
}

#[test]
fn all_rows_equal() {
    let rows = [0.25f32, -1.5].repeat(5000);
    for metric in METRICS {
        let c = kmeans(&Params::new(metric, 2, 12, 1), &rows, None, &never).unwrap();
        assert_eq!(c.as_slice(), [0.25, -1.5]);
        assert!(labels(&Assigner::new(metric, &c), &rows).iter().all(|&l| l == 0));
    }
}

#[test]
fn all_rows_zero() {
    for metric in METRICS {
        let c = kmeans(&Params::new(metric, 4, 5, 1), &[0.0; 400], None, &never).unwrap();
        assert_eq!((c.as_slice(), c.spreads()), (&[0.0; 4][..], &[0.0][..]));
    }
}

#[test]
fn three_rows_and_a_thousand_lists() {
    let rows = [1.0f32, 0.0, 0.0, 1.0, -1.0, -1.0];
    for metric in METRICS {
        let c = kmeans(&Params::new(metric, 2, 1000, 1), &rows, None, &never).unwrap();
        assert_eq!(c.len(), 3);
        no_cell_is_empty(metric, &c, &rows);
    }
}

#[test]
fn fewer_distinct_rows_than_lists() {
    let rows: Vec<f32> = (0..3000).flat_map(|i| [(i % 7) as f32, 1.0]).collect();
    let c = trained(&rows, 2, 100);
    assert_eq!(c.len(), 7);
    no_cell_is_empty(Metric::L2, &c, &rows);
}

#[test]
fn a_crowd_at_one_place_leaves_cells_for_the_others() {
    // 95 % of the rows are one point: a plain sampled start would give nearly all cells to it.
    let mut rows = [0.0f32; 3].repeat(9500);
    rows.extend(mixture(500, 3, 50, 4));
    let c = trained(&rows, 3, 60);
    assert!(c.len() > 50, "{}", c.len());
    no_cell_is_empty(Metric::L2, &c, &rows);
}

#[test]
fn rows_that_are_not_finite_are_ignored() {
    let mut rows = mixture(300, 4, 5, 2);
    rows.extend([f32::NAN, 0.0, 0.0, 0.0, f32::INFINITY, 1.0, 1.0, 1.0]);
    for metric in METRICS {
        let c = kmeans(&Params::new(metric, 4, 8, 1), &rows, None, &never).unwrap();
        no_cell_is_empty(metric, &c, &rows);
    }
}

#[test]
fn huge_and_tiny_rows() {
    for scale in [1e-38f32, 1e-20, 1e18, 5e37] {
        let rows: Vec<f32> = mixture(600, 8, 6, 2).iter().map(|x| x * scale).collect();
        for metric in METRICS {
            let c = kmeans(&Params::new(metric, 8, 6, 1), &rows, None, &never).unwrap();
            assert!(c.len() >= 4, "{metric:?} {scale}: {}", c.len());
            no_cell_is_empty(metric, &c, &rows);
        }
    }
}

#[test]
fn one_thread_or_two_or_none_give_the_same() {
    let rows = mixture(8000, 24, 40, 3);
    for metric in METRICS {
        for flat_cells in [1000, 10] {
            let params = Params::new(metric, 24, 30, 9);
            let alone = train(&params, flat_cells, &rows, None, &never).unwrap();
            for threads in [1, 2, 5] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let c = train(&params, flat_cells, &rows, Some(&pool), &never).unwrap();
                assert_eq!(c, alone);
                let a = Assigner::with_flat_cells(metric, &c, flat_cells);
                let mut out = vec![0; 8000];
                a.assign(&rows, &mut out, Some(&pool), &never).unwrap();
                assert_eq!(out, labels(&a, &rows));
            }
        }
    }
}

#[test]
fn interruption_ends_training_and_assignment() {
    let rows = mixture(4000, 8, 10, 3);
    let params = Params::new(Metric::L2, 8, 20, 9);
    assert_eq!(kmeans(&params, &rows, None, &|| true), Err(Interrupted));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let later = || calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) > 20;
    assert_eq!(kmeans(&params, &rows, Some(&pool), &later), Err(Interrupted));
    let a = Assigner::new(Metric::L2, &trained(&rows, 8, 20));
    let mut out = vec![0; 4000];
    assert_eq!(a.assign(&rows, &mut out, Some(&pool), &|| true), Err(Interrupted));
}

#[test]
fn every_row_gets_its_nearest_cell() {
    let rows = mixture(3000, 19, 30, 5);
    let c = trained(&rows, 19, 40);
    no_cell_is_empty(Metric::L2, &c, &rows);
    let found = labels(&Assigner::new(Metric::L2, &c), &rows);
    assert_eq!(misplaced(&c, &rows, &found), 0);
}

#[test]
fn two_levels_place_nearly_all_rows_in_the_nearest_cell() {
    let rows = mixture(6000, 16, 100, 5);
    let params = Params::new(Metric::L2, 16, 200, 1);
    let c = train(&params, 20, &rows, None, &never).unwrap();
    assert!(c.len() > 190 && c.len() <= 200, "{}", c.len());
    let found = labels(&Assigner::with_flat_cells(Metric::L2, &c, 20), &rows);
    let wrong = misplaced(&c, &rows, &found);
    assert!(wrong < 60, "{wrong} of 6000");
}

#[test]
fn two_levels_are_nearly_as_tight_as_one() {
    let rows = mixture(6000, 16, 100, 5);
    let params = Params::new(Metric::L2, 16, 100, 1);
    let error = |flat_cells| -> f64 {
        let c = train(&params, flat_cells, &rows, None, &never).unwrap();
        let found = labels(&Assigner::new(Metric::L2, &c), &rows);
        rows.chunks(16).zip(found).map(|(row, l)| distance2(row, c.get(l as usize))).sum()
    };
    let (flat, two_level) = (error(1000), error(10));
    assert!(two_level < 1.1 * flat, "{two_level} {flat}");
}

#[test]
fn inner_product_cells_are_narrow_in_norm() {
    let mut rng = Rng::new(3);
    let mut rows = mixture(4000, 8, 4, 5);
    for row in rows.chunks_mut(8) {
        let factor = (1.5 * (rng.unit() - 0.5)).exp() as f32;
        row.iter_mut().for_each(|x| *x *= factor);
    }
    let widest = |metric| -> f64 {
        let c = kmeans(&Params::new(metric, 8, 60, 1), &rows, None, &never).unwrap();
        let found = labels(&Assigner::new(metric, &c), &rows);
        let log = |row: &[f32]| 0.5 * row.iter().map(|x| f64::from(x * x)).sum::<f64>().ln();
        let mut sums = vec![(0.0, 0.0, 0.0); c.len()];
        for (row, l) in rows.chunks(8).zip(found) {
            let s = &mut sums[l as usize];
            *s = (s.0 + 1.0, s.1 + log(row), s.2 + log(row).powi(2));
        }
        sums.iter().map(|s| s.2 - s.1 * s.1 / s.0).sum::<f64>() / 4000.0
    };
    let (inner, plain) = (widest(Metric::InnerProduct), widest(Metric::L2));
    assert!(inner < 0.6 * plain, "{inner} {plain}");
}

#[test]
fn spreads_are_root_mean_square_distances() {
    assert_eq!(spread(&[3.0, 0.0, 0.0, 4.0], &[0.0, 0.0]), 12.5f32.sqrt());
    assert_eq!(spread(&[], &[0.0, 0.0]), 0.0);
    let rows = mixture(1000, 5, 7, 1);
    let c = trained(&rows, 5, 9);
    let found = labels(&Assigner::new(Metric::L2, &c), &rows);
    for cell in 0..c.len() {
        let own = rows.chunks(5).zip(&found).filter(|(_, l)| **l == cell as u32);
        let own: Vec<f32> = own.flat_map(|(row, _)| row).copied().collect();
        assert!((spread(&own, c.get(cell)) - c.spreads()[cell]).abs() < 1e-4);
    }
}

#[test]
fn reordered_cells_keep_their_spreads() {
    let c = Centroids::new(1, vec![1.0, 2.0, 3.0], vec![0.1, 0.2, 0.3]);
    assert_eq!(c.reordered(&[2, 0]), Centroids::new(1, vec![3.0, 1.0], vec![0.3, 0.1]));
}

#[test]
fn split_ends_on_identical_rows() {
    let rows = [1.0f32, 2.0].repeat(5000);
    assert!(split(&rows, 2, 400, 1).iter().all(|&s| s == 0));
}

#[test]
fn split_leaves_no_oversized_part() {
    let rows = mixture(5000, 12, 3, 8);
    let parts = split(&rows, 12, 400, 1);
    let count = parts.iter().max().unwrap() + 1;
    for p in 0..count {
        let n = parts.iter().filter(|&&x| x == p).count();
        assert!(n > 0 && n <= 880, "{n}");
    }
    assert!(count <= 40);
}

#[test]
fn order_puts_cells_of_a_line_in_line() {
    // Points of a line in mixed order: each place must hold a neighbour of the one before.
    for at_once in [1000, 30] {
        let points: Vec<f32> = (0..200).map(|i| (i * 77 % 200) as f32).collect();
        let order = order_up_to(at_once, &points, 1);
        let steps: f32 =
            order.windows(2).map(|w| (points[w[0] as usize] - points[w[1] as usize]).abs()).sum();
        assert!(steps < 600.0, "{steps} at {at_once} at once");
    }
}

#[test]
fn order_of_none_and_one() {
    assert!(order_cells(&[], 6).is_empty());
    assert_eq!(order_cells(&[1.0; 6], 6), [0]);
}

#[test]
fn default_lists_follow_the_rows() {
    assert_eq!(default_lists(0), 1);
    assert_eq!(default_lists(1), 1);
    assert_eq!(default_lists(100_000), 250);
    assert_eq!(default_lists(1_000_000), 2500);
    // 16 million rows: cells of 800.
    assert_eq!(default_lists(16_000_000), 20_000);
}

#[test]
fn no_more_cells_are_trained_than_the_sample_is_enough_for() {
    // The whole table was drawn.
    assert_eq!(trained_lists(1_000, 300, 300, 384), 1_000);
    assert_eq!(trained_lists(250, 64_000, 100_000, 384), 250);
    assert_eq!(trained_lists(2_500, 40_000, 1_000_000, 384), 1_000);
    // Few rows drawn of many: a trained cell's rows must still fit in memory.
    assert!(trained_lists(14_000, 10_000, 10_000_000, 1_536) > 900);
    assert_eq!(trained_lists(10, 0, 1_000, 8), 1);
    for (rows, dim) in
        [(1_000_000u64, 384), (1_000_000, 1_536), (12_500_000, 384), (10_000_000, 1_536)]
    {
        let lists = default_lists(rows);
        let sampled = sample_rows(Metric::Cosine, rows, lists, dim, 128 << 20);
        let trained = trained_lists(lists, sampled, rows, dim);
        assert!(
            sampled as u32 / trained >= 14,
            "{sampled} rows for {trained} cells of {rows} x {dim}"
        );
    }
}

#[test]
fn samples_fit_the_budget() {
    let mib = 1 << 20;
    assert_eq!(sample_rows(Metric::L2, 100_000, 250, 384, 1024 * mib), 64_000);
    assert_eq!(sample_rows(Metric::L2, 5000, 1, 384, 1024 * mib), 5000);
    assert_eq!(sample_rows(Metric::L2, 0, 1, 384, 1024 * mib), 0);
    assert_eq!(sample_rows(Metric::L2, 100_000, 250, 384, 0), 1);
    let small = sample_rows(Metric::L2, 100_000, 250, 384, 32 * mib);
    assert!(small * 384 * 4 < 32 * mib && small > 10_000, "{small}");
    assert!(sample_rows(Metric::InnerProduct, 100_000, 250, 384, 32 * mib) < small);
}

/// Rows of one of several kinds: spread out, few different ones, or of very different sizes.
fn any_rows() -> impl Strategy<Value = (usize, Vec<f32>)> {
    (1usize..12, 1usize..150, 0u8..3, any::<u64>()).prop_map(|(dim, n, kind, seed)| {
        let mut rng = Rng::new(seed);
        let rows = match kind {
            0 => mixture(n, dim, 5, seed),
            1 => (0..n * dim).map(|_| rng.below(2) as f32 - 0.5).collect(),
            _ => (0..n * dim)
                .map(|_| ((rng.unit() - 0.5) * 10f64.powi(rng.below(60) as i32 - 30)) as f32)
                .collect(),
        };
        (dim, rows)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_rows_train_to_full_finite_cells(
        (dim, rows) in any_rows(),
        lists in 1usize..60,
        flat_cells in 3usize..40,
        metric in prop::sample::select(&METRICS[..]),
    ) {
        let params = Params::new(metric, dim, lists, 7);
        let c = train(&params, flat_cells, &rows, None, &never).unwrap();
        prop_assert!(!c.is_empty() && c.len() <= lists.min(rows.len() / dim));
        no_cell_is_empty(metric, &c, &rows);
        prop_assert_eq!(&c, &train(&params, flat_cells, &rows, None, &never).unwrap());
    }

    #[test]
    fn any_cell_splits_until_small_or_identical((dim, rows) in any_rows(), target in 1usize..30) {
        let parts = split(&rows, dim, target, 3);
        let count = parts.iter().max().map_or(0, |&p| p + 1);
        for p in 0..count {
            let own: Vec<&[f32]> =
                rows.chunks(dim).zip(&parts).filter(|(_, x)| **x == p).map(|(r, _)| r).collect();
            prop_assert!(!own.is_empty());
            let small = own.len() as f64 <= 2.2 * target as f64;
            prop_assert!(small || own.iter().all(|r| *r == own[0]), "{} rows", own.len());
        }
    }

    #[test]
    fn equal_rows_are_ordered_at_any_size(n in 0usize..400, dim in 1usize..4, at_once in 2usize..9) {
        let mut order = order_up_to(at_once, &vec![1.5; n * dim], dim);
        order.sort_unstable();
        prop_assert!(order.iter().copied().eq(0..n as u32));
    }

    #[test]
    fn any_order_is_a_permutation((dim, rows) in any_rows(), at_once in 2usize..60) {
        let mut order = order_up_to(at_once, &rows, dim);
        order.sort_unstable();
        prop_assert!(order.iter().copied().eq(0..(rows.len() / dim) as u32));
    }
}
