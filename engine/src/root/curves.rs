//! Recall curves: how many of the true neighbours a search misses, by the number of cells it probes.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{F32, U32},
};

use super::section::{RootError, SectionKey, SectionKind, entry};

/// Part of the allowed miss rate that the calibrated one may take. Real questions lie further from the rows
/// than the sampled rows do from each other, pruning loses a little, and a sample is a sample. Where .95
/// was asked for, six builds that differed in their seed and in the 1,024 rows sampled gave real questions
/// .953 to .970; at 0.7, .946 to .965; with 512 rows, .949 to .970 (decision 0013). Curves fitted to questions
/// need less of it, but not none (decision 0015).
pub const MARGIN: f64 = 0.6;

const SECTION: SectionKey = SectionKey::only(SectionKind::Curves);

/// The miss rate at a number of probed cells.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurvePoint {
    /// Cells probed.
    pub nprobe: u32,
    /// Fraction of the true neighbours that lie in other cells, 0 to 1.
    pub miss_rate: f32,
}

/// The miss rate for one number of neighbours.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Neighbours per query.
    pub k: u32,
    /// Sampled queries.
    pub samples: u32,
    /// By ascending `nprobe`, with miss rates that never rise.
    pub points: Vec<CurvePoint>,
}

impl Curve {
    /// The curve of a sample. `ranks`: for each true neighbour of each query, the rank (from 0) of its
    /// cell among the cells as that query orders them.
    pub fn from_ranks(k: u32, samples: u32, ranks: impl IntoIterator<Item = u32>) -> Self {
        let mut ranks: Vec<u32> = ranks.into_iter().collect();
        ranks.sort_unstable();
        let mut points: Vec<CurvePoint> = Vec::new();
        let mut nprobe = 0;
        while let Some(&last) = ranks.last() {
            // Each number up to 32, then steps of a sixteenth; the last point has no misses.
            nprobe = (nprobe + (nprobe / 16).max(1)).min(last.saturating_add(1));
            let found = ranks.partition_point(|&rank| rank < nprobe);
            let miss_rate = ((ranks.len() - found) as f64 / ranks.len() as f64) as f32;
            points.push(CurvePoint { nprobe, miss_rate });
            if nprobe > last || nprobe == u32::MAX {
                break;
            }
        }
        Self { k, samples, points }
    }

    /// The miss rate of the largest calibrated number of cells that is no larger.
    fn miss_rate(&self, nprobe: u32) -> f64 {
        let above = self.points.partition_point(|point| point.nprobe <= nprobe);
        self.points[..above].last().map_or(1.0, |point| f64::from(point.miss_rate))
    }

    /// The least calibrated number of cells with at most this miss rate.
    fn nprobe(&self, miss_rate: f64) -> Option<u32> {
        let at = self.points.partition_point(|point| f64::from(point.miss_rate) > miss_rate);
        self.points.get(at).map(|point| point.nprobe)
    }
}

/// What searched for its neighbours when curves were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FittedTo {
    /// Rows of the index.
    #[default]
    Rows,
    /// Queries that somebody gave. Nobody has them any more, so these curves cannot be made anew when the
    /// index grows: the numbers of cells in them grow in proportion to its cells instead.
    Queries {
        /// Cells that the index had, at least 1.
        cells: u32,
    },
}

/// What a number of probed cells gives, by the curves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Neighbours per query.
    pub k: u32,
    /// Cells probed.
    pub nprobe: u32,
    /// Fraction of the true neighbours of the calibrating queries that lie in these cells.
    pub recall: f64,
    /// The highest target that this number of cells serves, 0 to 1: see [`Curves::nprobe`].
    pub target_recall: f64,
    /// Calibrating queries.
    pub samples: u32,
}

/// The curves of an index, by ascending `k`; none if nothing was calibrated.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Curves {
    curves: Vec<Curve>,
    fitted_to: FittedTo,
}

impl Curves {
    /// Sorts the curves by `k`, and drops those without points.
    pub fn new(mut curves: Vec<Curve>) -> Self {
        curves.retain(|curve| !curve.points.is_empty());
        curves.sort_by_key(|curve| curve.k);
        Self { curves, fitted_to: FittedTo::Rows }
    }

    /// The same curves, as those of queries that somebody gave to an index of so many cells.
    pub fn of_queries(self, cells: u32) -> Self {
        Self { fitted_to: FittedTo::Queries { cells: cells.max(1) }, ..self }
    }

    /// The curves, by ascending `k`.
    pub fn curves(&self) -> &[Curve] {
        &self.curves
    }

    /// Whose neighbours they are about.
    pub fn fitted_to(&self) -> FittedTo {
        self.fitted_to
    }

    /// A calibrated number of cells, in an index that has so many `cells` now.
    ///
    /// A search needs more cells as an index grows, but a smaller part of them, so that growth in proportion
    /// gives at least the recall that was calibrated.
    fn grown(&self, nprobe: u32, cells: u32) -> f64 {
        let growth = match self.fitted_to {
            FittedTo::Rows => 1.0,
            FittedTo::Queries { cells: then } => (f64::from(cells) / f64::from(then)).max(1.0),
        };
        f64::from(nprobe) * growth
    }

    /// What each calibrated number of cells gives in an index that has so many, by `k` and number.
    pub fn estimates(&self, cells: u32) -> Vec<Estimate> {
        let mut estimates = Vec::new();
        for (position, curve) in self.curves.iter().enumerate() {
            for point in &curve.points {
                // A search for k opens as many cells as one for fewer.
                let covering = self.curves[..=position].iter();
                let worst = covering.map(|curve| curve.miss_rate(point.nprobe)).fold(0.0, f64::max);
                estimates.push(Estimate {
                    k: curve.k,
                    nprobe: (self.grown(point.nprobe, cells).ceil() as u32).min(cells),
                    recall: 1.0 - f64::from(point.miss_rate),
                    target_recall: (1.0 - worst / MARGIN).max(0.0),
                    samples: curve.samples,
                });
            }
        }
        estimates
    }

    /// How many of `cells` cells to probe for the nearest `k` rows at this recall, 0 to 1.
    ///
    /// Never falls when `k` or the target rises. A target of 1 is all cells; so is one that no
    /// calibrated number reaches. Beyond the largest calibrated `k` the number grows in proportion.
    pub fn nprobe(&self, k: u32, target_recall: f64, cells: u32) -> u32 {
        if target_recall.is_nan() || target_recall >= 1.0 {
            return cells;
        }
        let miss_rate = MARGIN * (1.0 - target_recall.max(0.0));
        let Some(last) = self.curves.last() else {
            return default_nprobe(k, miss_rate, cells);
        };
        let covering = self.curves.partition_point(|curve| curve.k < k) + 1;
        let used = self.curves.iter().take(covering);
        let nprobe = used.map(|curve| curve.nprobe(miss_rate).unwrap_or(cells)).max();
        let nprobe = self.grown(nprobe.unwrap_or(cells), cells)
            * (f64::from(k) / f64::from(last.k)).max(1.0);
        // The conversion saturates.
        (nprobe.ceil() as u32).clamp(1.min(cells), cells)
    }

    /// The section's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.curves.len() as u32).to_le_bytes().to_vec();
        for curve in &self.curves {
            let header = CurveHeader {
                k: curve.k.into(),
                samples: curve.samples.into(),
                points: (curve.points.len() as u32).into(),
            };
            bytes.extend_from_slice(header.as_bytes());
            for point in &curve.points {
                let point =
                    PointRecord { nprobe: point.nprobe.into(), miss_rate: point.miss_rate.into() };
                bytes.extend_from_slice(point.as_bytes());
            }
        }
        if let FittedTo::Queries { cells } = self.fitted_to {
            bytes.extend_from_slice(&cells.to_le_bytes());
        }
        bytes
    }

    /// Reads [`Curves::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RootError> {
        let short = || entry(SECTION, 0, "shorter than its curves");
        let (count, mut rest) = U32::ref_from_prefix(bytes).map_err(|_| short())?;
        let mut curves: Vec<Curve> = Vec::new();
        for position in 0..count.get() as usize {
            let damaged = |what| entry(SECTION, position, what);
            let (header, after) = CurveHeader::ref_from_prefix(rest).map_err(|_| short())?;
            let (points, after) =
                <[PointRecord]>::ref_from_prefix_with_elems(after, header.points.get() as usize)
                    .map_err(|_| short())?;
            rest = after;
            let points: Vec<CurvePoint> = points
                .iter()
                .map(|p| CurvePoint { nprobe: p.nprobe.get(), miss_rate: p.miss_rate.get() })
                .collect();
            if !points.iter().all(|point| (0.0..=1.0).contains(&point.miss_rate)) {
                return Err(damaged("miss rate is not within 0 to 1"));
            }
            let ordered =
                |p: &[CurvePoint]| p[0].nprobe < p[1].nprobe && p[0].miss_rate >= p[1].miss_rate;
            if points.is_empty() || points[0].nprobe == 0 || !points.windows(2).all(ordered) {
                return Err(damaged("points are not in order"));
            }
            let k = header.k.get();
            if k == 0 || curves.last().is_some_and(|curve| curve.k >= k) {
                return Err(damaged("curves are not in order"));
            }
            curves.push(Curve { k, samples: header.samples.get(), points });
        }
        let fitted_to = match U32::ref_from_bytes(rest) {
            Ok(cells) if cells.get() > 0 => FittedTo::Queries { cells: cells.get() },
            Ok(_) => return Err(entry(SECTION, curves.len(), "fitted to no cells")),
            Err(_) if rest.is_empty() => FittedTo::Rows,
            Err(_) => return Err(entry(SECTION, curves.len(), "bytes after the last curve")),
        };
        Ok(Self { curves, fitted_to })
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct CurveHeader {
    k: U32,
    samples: U32,
    points: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct PointRecord {
    nprobe: U32,
    miss_rate: F32,
}

/// Without a curve: the power law that fitted real passages with cells of about 400 rows (recall .95 of
/// the nearest 10 at 20 of 250 cells, .99 at 51), generous because it is not calibrated.
fn default_nprobe(k: u32, miss_rate: f64, cells: u32) -> u32 {
    let at_95 = 1.5 * f64::from(cells).powf(0.6);
    let for_miss_rate = (MARGIN * 0.05 / miss_rate).powf(0.6);
    let for_k = (f64::from(k) / 10.0).max(1.0).powf(0.35);
    ((at_95 * for_miss_rate * for_k).ceil() as u32).clamp(1.min(cells), cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(k: u32, points: &[(u32, f32)]) -> Curve {
        let point = |&(nprobe, miss_rate)| CurvePoint { nprobe, miss_rate };
        Curve { k, samples: 500, points: points.iter().map(point).collect() }
    }

    fn curves() -> Curves {
        Curves::new(vec![
            curve(100, &[(1, 0.6), (8, 0.1), (20, 0.03), (60, 0.001)]),
            curve(10, &[(1, 0.5), (10, 0.031), (12, 0.029), (30, 0.005), (90, 0.0)]),
        ])
    }

    #[test]
    fn the_margin_is_applied_to_the_miss_rate() {
        // 0.6 * 0.05 = 0.03: ten cells miss slightly too much.
        assert_eq!(curves().nprobe(10, 0.95, 1000), 12);
        assert_eq!(curves().nprobe(10, 0.99, 1000), 30);
        assert_eq!(curves().nprobe(1, 0.99, 1000), 30);
    }

    #[test]
    fn more_neighbours_or_recall_never_probe_fewer_cells() {
        let targets: Vec<f64> = (0..=1000).map(|i| f64::from(i) / 1000.0).collect();
        for curves in [curves(), Curves::default()] {
            for pair in targets.windows(2) {
                for k in [1, 10, 11, 100, 101, 5000] {
                    let at = |k, target| curves.nprobe(k, target, 200);
                    assert!(at(k, pair[0]) <= at(k, pair[1]));
                    assert!(at(k, pair[0]) <= at(k + 1, pair[0]));
                }
            }
        }
    }

    #[test]
    fn full_or_unreached_recall_is_all_cells() {
        for target in [1.0, 1.5, f64::NAN] {
            assert_eq!(curves().nprobe(10, target, 777), 777);
            assert_eq!(Curves::default().nprobe(10, target, 777), 777);
        }
        // The curve for 100 ends above this miss rate.
        assert_eq!(curves().nprobe(100, 0.9999, 777), 777);
        assert_eq!(curves().nprobe(10, 0.95, 5), 5);
        assert_eq!(curves().nprobe(10, 0.95, 0), 0);
        assert_eq!(curves().nprobe(10, 0.0, 100), 1);
    }

    #[test]
    fn beyond_the_last_curve_the_number_is_in_proportion() {
        let at_100 = curves().nprobe(100, 0.95, 10_000);
        assert_eq!(curves().nprobe(200, 0.95, 10_000), 2 * at_100);
    }

    #[test]
    fn the_default_lies_near_what_was_measured() {
        let at = |target, cells| Curves::default().nprobe(10, target, cells);
        assert!((20..60).contains(&at(0.95, 250)), "{}", at(0.95, 250));
        assert!((51..150).contains(&at(0.99, 250)), "{}", at(0.99, 250));
        assert_eq!(at(0.95, 1), 1);
    }

    #[test]
    fn ranks_become_a_curve() {
        let curve = Curve::from_ranks(2, 2, [0, 3, 0, 99]);
        assert_eq!(curve.points[0], CurvePoint { nprobe: 1, miss_rate: 0.5 });
        assert_eq!(curve.points[2].miss_rate, 0.5);
        assert_eq!(curve.points[3], CurvePoint { nprobe: 4, miss_rate: 0.25 });
        assert_eq!(curve.points.last(), Some(&CurvePoint { nprobe: 100, miss_rate: 0.0 }));
        assert!(curve.points.len() < 60);
        let curves = Curves::new(vec![curve, Curve::from_ranks(10, 0, [])]);
        assert_eq!(curves.curves().len(), 1);
        assert_eq!(Curves::from_bytes(&curves.to_bytes()).unwrap(), curves);
    }

    #[test]
    fn disordered_curves_are_refused() {
        let bytes = |curves: &[Curve]| {
            Curves { curves: curves.to_vec(), fitted_to: FittedTo::Rows }.to_bytes()
        };
        assert_eq!(Curves::from_bytes(&bytes(curves().curves())).unwrap(), curves());
        for wrong in [
            vec![curve(10, &[])],
            vec![curve(0, &[(1, 0.5)])],
            vec![curve(10, &[(0, 0.5)])],
            vec![curve(10, &[(1, 1.5)])],
            vec![curve(10, &[(1, f32::NAN)])],
            vec![curve(10, &[(1, 0.5), (1, 0.4)])],
            vec![curve(10, &[(1, 0.4), (2, 0.5)])],
            vec![curve(10, &[(1, 0.5)]), curve(10, &[(1, 0.5)])],
        ] {
            assert!(Curves::from_bytes(&bytes(&wrong)).is_err(), "{wrong:?}");
        }
        let mut long = curves().to_bytes();
        long.push(0);
        assert!(Curves::from_bytes(&long).is_err());
        assert!(Curves::from_bytes(&long[..long.len() - 2]).is_err());
        assert!(Curves::from_bytes(&[]).is_err());
    }

    #[test]
    fn curves_of_queries_say_so_and_grow_with_the_index() {
        let rows = curves();
        let queries = rows.clone().of_queries(100);
        assert_eq!(Curves::from_bytes(&queries.to_bytes()).unwrap(), queries);
        let mut none = rows.to_bytes();
        none.extend_from_slice(&[0; 4]);
        assert!(Curves::from_bytes(&none).is_err());
        for cells in [50, 100] {
            assert_eq!(queries.nprobe(10, 0.95, cells), rows.nprobe(10, 0.95, cells));
        }
        assert_eq!(rows.nprobe(10, 0.95, 250), 12);
        assert_eq!(queries.nprobe(10, 0.95, 250), 30);
        assert_eq!(queries.estimates(250)[0].nprobe, 3);
    }

    #[test]
    fn the_least_estimate_that_serves_a_target_is_what_a_search_opens() {
        for curves in [curves(), curves().of_queries(150)] {
            let cells = 400;
            let estimates = curves.estimates(cells);
            for (k, target) in
                [(10, 0.5), (10, 0.9), (10, 0.95), (10, 0.99), (100, 0.6), (100, 0.95)]
            {
                let of_k = estimates.iter().filter(|estimate| estimate.k == k);
                let serving = of_k.filter(|estimate| estimate.target_recall >= target);
                let least = serving.map(|estimate| estimate.nprobe).min().unwrap();
                // A number that only the curve for fewer neighbours has is rounded up to one that this has.
                let opened = curves.nprobe(k, target, cells);
                assert!(opened <= least, "{k} {target}: {opened} {least}");
                assert!(k == 100 || opened == least, "{target}: {opened} {least}");
            }
            let last = estimates.iter().rfind(|estimate| estimate.k == 10).unwrap();
            assert_eq!((last.recall, last.target_recall, last.samples), (1.0, 1.0, 500));
        }
    }
}
