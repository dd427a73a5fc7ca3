//! Measured recall: how many of the nearest rows searches found, and how sure that is.

use std::collections::BinaryHeap;

/// The distances of the `k` rows nearest to a query, of all that were offered.
#[derive(Debug, Clone)]
pub struct Nearest {
    k: usize,
    /// The furthest on top.
    distances: BinaryHeap<Distance>,
}

#[derive(Debug, Clone, Copy)]
struct Distance(f64);

impl Ord for Distance {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Distance {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Distance {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Distance {}

impl Nearest {
    /// No rows yet, of the nearest `k`.
    pub fn new(k: usize) -> Self {
        Self { k, distances: BinaryHeap::new() }
    }

    /// Takes a row into account. One without a distance (NaN) is near to nothing.
    pub fn offer(&mut self, distance: f64) {
        if distance.is_nan() || self.k == 0 {
            return;
        }
        if self.distances.len() >= self.k {
            match self.distances.peek_mut() {
                Some(mut furthest) if distance < furthest.0 => *furthest = Distance(distance),
                _ => {}
            }
        } else {
            self.distances.push(Distance(distance));
        }
    }

    /// The share of them that a search has found, by distance: a row as near as the furthest of them is as good
    /// as that. Nothing if no row was offered.
    pub fn share_found(&self, found: &[f64]) -> Option<f64> {
        let furthest = self.distances.peek()?.0;
        let good = found.iter().filter(|&&distance| distance <= furthest).count();
        Some(good.min(self.distances.len()) as f64 / self.distances.len() as f64)
    }
}

/// The mean recall of some queries, with the 95 % confidence interval of that of all queries of their kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredRecall {
    /// The mean, 0 to 1.
    pub recall: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Standard deviations of a normal distribution that 95 % lie within.
const Z: f64 = 1.96;

impl MeasuredRecall {
    /// That of queries of which so large shares were found; nothing if there are none.
    ///
    /// It is the Wilson interval, which stays within 0 to 1 and has a width where every query found all, for
    /// as many trials as have the variance of the shares: the neighbours of one query are found or missed
    /// together, so they are fewer than all neighbours, but no fewer than the queries.
    pub fn of(shares: &[f64]) -> Option<Self> {
        if shares.is_empty() {
            return None;
        }
        let queries = shares.len() as f64;
        let recall = shares.iter().sum::<f64>() / queries;
        let squares: f64 = shares.iter().map(|share| (share - recall) * (share - recall)).sum();
        let variance = squares / (queries - 1.0).max(1.0);
        let of_one_trial = recall * (1.0 - recall);
        let trials = match variance > 0.0 {
            true => (queries * of_one_trial / variance).max(queries),
            false => queries,
        };
        let z2 = Z * Z / trials;
        let centre = (recall + z2 / 2.0) / (1.0 + z2);
        let half = Z * (of_one_trial / trials + z2 / (4.0 * trials)).sqrt() / (1.0 + z2);
        Some(Self {
            recall,
            low: (centre - half).clamp(0.0, recall),
            high: (centre + half).clamp(recall, 1.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nearest(k: usize, distances: &[f64]) -> Nearest {
        let mut nearest = Nearest::new(k);
        distances.iter().for_each(|&distance| nearest.offer(distance));
        nearest
    }

    #[test]
    fn rows_as_near_as_the_furthest_count() {
        let nearest = nearest(3, &[5.0, 2.0, f64::NAN, 1.0, 2.0, 9.0]);
        assert_eq!(nearest.share_found(&[1.0, 2.0, 2.0]), Some(1.0));
        assert_eq!(nearest.share_found(&[2.0, 2.0, 2.0, 2.0]), Some(1.0));
        assert_eq!(nearest.share_found(&[1.0, 5.0, f64::NAN]), Some(1.0 / 3.0));
        assert_eq!(nearest.share_found(&[]), Some(0.0));
    }

    #[test]
    fn fewer_rows_than_k_are_all_there_is_to_find() {
        assert_eq!(nearest(10, &[1.0, -2.0]).share_found(&[-2.0]), Some(0.5));
        assert_eq!(nearest(10, &[f64::NAN]).share_found(&[1.0]), None);
        assert_eq!(nearest(0, &[1.0]).share_found(&[1.0]), None);
    }

    #[test]
    fn the_interval_is_about_queries() {
        assert_eq!(MeasuredRecall::of(&[]), None);
        let all = MeasuredRecall::of(&[1.0; 200]).unwrap();
        assert_eq!((all.recall, all.high), (1.0, 1.0));
        assert!((0.980..0.983).contains(&all.low), "{all:?}");
        // 200 queries that find all or nothing are 200 trials.
        let clustered: Vec<f64> = (0..200).map(|i| f64::from(i % 10 != 0)).collect();
        let clustered = MeasuredRecall::of(&clustered).unwrap();
        assert!((clustered.recall - 0.9).abs() < 1e-12);
        assert!((0.849..0.853).contains(&clustered.low), "{clustered:?}");
        assert!((0.933..0.936).contains(&clustered.high), "{clustered:?}");
        // Those that each miss one of ten, or none or two, say more.
        let spread: Vec<f64> = (0..200).map(|i| [0.9, 1.0, 0.9, 0.8][i % 4]).collect();
        let spread = MeasuredRecall::of(&spread).unwrap();
        assert!(spread.high - spread.low < 0.022, "{spread:?}");
        let one = MeasuredRecall::of(&[0.5]).unwrap();
        assert!(one.low < 0.1 && one.high > 0.9, "{one:?}");
    }
}
