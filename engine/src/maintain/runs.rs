//! Segments of the delta as runs: how many a search meets for a cell, and which to merge.

use crate::root::Root;

/// Delta segments whose cells do not overlap. A cell has rows in one of them at most, so for a search a run is
/// one segment, however many objects it is cut into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    pub segments: Vec<u32>,
    pub rows: u64,
}

/// How many runs the delta segments of a root make. A search reads a piece of each for a cell, so compaction
/// keeps them few.
pub fn delta_runs(root: &Root) -> usize {
    runs(root, &|_| true).len()
}

/// The runs of those delta segments that `wanted` names. Segments that one compaction wrote are found again:
/// they follow each other in the root, with ascending slots.
pub(super) fn runs(root: &Root, wanted: &dyn Fn(u32) -> bool) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut last_slot = None;
    let pieces = root.delta_pieces();
    for (segment, entry) in (0u32..).zip(root.segments()) {
        if !entry.is_delta() || !wanted(segment) {
            continue;
        }
        let start = pieces.partition_point(|piece| piece.segment < segment);
        let end = pieces.partition_point(|piece| piece.segment <= segment);
        let own = &pieces[start..end];
        let first = own.first().map(|piece| piece.cell.get());
        let rows = u64::from(entry.rows.get());
        match runs.last_mut() {
            Some(run) if first.is_some() && last_slot < first => {
                run.segments.push(segment);
                run.rows += rows;
            }
            _ => runs.push(Run { segments: vec![segment], rows }),
        }
        last_slot = own.last().map(|piece| piece.cell.get());
    }
    runs
}

/// Which runs to merge so that at most `max` are left: the smallest ones, and on as long as the next is no
/// more than twice as large as all before it together. With at most four runs a row is so merged 2.1, 3.0, 5.0,
/// 8.6 times in a delta of 16, 64, 256, 1,024 flushes; if all runs were merged each time, 1.7, 7.7, 32, 128 times.
pub(super) fn tier(mut runs: Vec<Run>, max: usize) -> Vec<Run> {
    if runs.len() <= max {
        return Vec::new();
    }
    runs.sort_by_key(|run| run.rows);
    // Two or more become one.
    let least = (runs.len() - max.max(1) + 1).min(runs.len());
    let mut together: u64 = runs[..least].iter().map(|run| run.rows).sum();
    let mut count = least;
    while let Some(next) = runs.get(count)
        && next.rows <= 2 * together
    {
        together += next.rows;
        count += 1;
    }
    runs.truncate(count);
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(rows: &[u64]) -> Vec<Run> {
        let run = |(segment, &rows)| Run { segments: vec![segment], rows };
        (0..).zip(rows).map(run).collect()
    }

    fn merged(rows: &[u64], max: usize) -> Vec<u64> {
        tier(sizes(rows), max).iter().map(|run| run.rows).collect()
    }

    #[test]
    fn the_smallest_are_merged_and_the_large_ones_left_alone() {
        assert_eq!(merged(&[10, 10, 10, 10], 4), []);
        assert_eq!(merged(&[10, 10, 10, 10, 10], 4), [10; 5]);
        assert_eq!(merged(&[200, 10, 80, 10, 50], 4), [10, 10]);
        assert_eq!(merged(&[300, 10, 20, 10, 30], 4), [10, 10, 20, 30]);
        assert_eq!(merged(&[5, 100], 1), [5, 100]);
        assert_eq!(merged(&[1, 2, 3], 0), [1, 2, 3]);
    }

    #[test]
    fn a_row_is_merged_few_times() {
        for (flushes, most) in [(16, 2.2), (64, 3.0), (256, 5.1), (1_024, 8.7)] {
            let (mut all, mut written) = (Vec::new(), 0u64);
            for _ in 0..flushes {
                all.push(1u64);
                let merged = tier(sizes(&all), 4);
                if !merged.is_empty() {
                    let sum = merged.iter().map(|run| run.rows).sum();
                    for run in merged {
                        let at = all.iter().position(|&rows| rows == run.rows).unwrap();
                        all.swap_remove(at);
                    }
                    all.push(sum);
                    written += sum;
                }
                assert!(all.len() <= 4);
            }
            let times = written as f64 / f64::from(flushes);
            assert!(times < most, "{flushes} flushes: {times}");
        }
    }
}
