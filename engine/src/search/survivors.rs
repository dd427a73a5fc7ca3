//! Which scanned rows will probably be refined before the rows wanted now are returned.

use super::{
    candidate::{Candidate, State},
    columns::Columns,
};

/// Rows beyond those wanted: a few that the executor pulls to settle the order, and some because rows
/// become denser with distance, so that estimates near the cut are too low on average. Of 300 real
/// questions one to three needed a third wave with 8, 14 with 5, 72 with 2.
const SPARE: f64 = 8.0;

/// A bound that the best `wanted` rows will hardly exceed: where so many rows are expected to lie, if the
/// errors of their estimates are normal. (The k-th smallest estimate would lie too low: the smallest ones
/// are small by luck more often than not.) `epsilon`: standard deviations between estimate and bound.
pub(super) fn cut<'a>(
    candidates: impl Iterator<Item = &'a Candidate>,
    columns: &Columns,
    epsilon: f32,
    wanted: usize,
) -> f32 {
    let wanted = wanted as f64 + SPARE;
    let epsilon = f64::from(epsilon).max(0.1);
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    let mut normal: Vec<(f64, f64)> = Vec::new();
    for candidate in candidates {
        let (mean, deviation) = match candidate.state {
            State::Refined(_) => (candidate.bound, 0.0),
            State::Scanned(row) => {
                let (est, lower) = (columns.est[row], columns.lower[row]);
                (f64::from(est), f64::from(est - lower) / epsilon)
            }
        };
        if mean.is_finite() && deviation.is_finite() {
            low = low.min(mean - 3.0 * deviation);
            high = high.max(mean + 3.0 * deviation);
            normal.push((mean, deviation.max(f64::MIN_POSITIVE)));
        }
    }
    for _ in 0..24 {
        let middle = low + (high - low) / 2.0;
        // The logistic curve is the normal one's integral to within 0.01.
        let expected: f64 = normal
            .iter()
            .map(|&(mean, deviation)| 1.0 / (1.0 + (-1.702 * (middle - mean) / deviation).exp()))
            .sum();
        if expected < wanted { low = middle } else { high = middle }
    }
    high as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanned(rows: &[(f32, f32)]) -> (Columns, Vec<Candidate>) {
        let mut columns = Columns::default();
        columns.push_segment_run(0, 0, 0);
        columns.est.extend(rows.iter().map(|row| row.0));
        columns.lower.extend(rows.iter().map(|row| row.0 - row.1));
        let candidates = rows.iter().enumerate();
        let candidates = candidates
            .map(|(at, row)| Candidate {
                bound: f64::from(row.0 - row.1),
                state: State::Scanned(at),
            })
            .collect();
        (columns, candidates)
    }

    #[test]
    fn the_cut_lies_where_as_many_rows_are_expected_as_are_wanted() {
        let rows: Vec<(f32, f32)> = (0..1_000).map(|row| (row as f32, 3.0)).collect();
        let (columns, candidates) = scanned(&rows);
        let cut = cut(candidates.iter(), &columns, 3.0, 10);
        assert!((f64::from(cut) - (10.0 + SPARE)).abs() < 2.0, "{cut}");
    }

    #[test]
    fn all_rows_survive_where_fewer_are_there_than_wanted() {
        let (columns, candidates) = scanned(&[(1.0, 0.5), (4.0, 0.5)]);
        assert!(cut(candidates.iter(), &columns, 3.0, 10) >= 4.0);
        assert_eq!(cut([].iter(), &columns, 3.0, 10), f32::NEG_INFINITY);
    }
}
