//! Which scanned rows come next: the lower bounds of all scanned rows stay in one flat array, and only
//! the best few at a time enter the heap. A heap of all of them would cost more than scanning them.

/// Rows compared at a time; one minimum decides for all of them.
const LANES: usize = 32;

/// A cut through the lower bounds of the scanned rows: rows at or below it have been taken.
///
/// NaN never passes a comparison: it marks padding and dead rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frontier(Option<f32>);

impl Frontier {
    /// No row has been taken.
    pub const START: Self = Self(None);

    /// Whether a row with this bound has been taken.
    pub fn covers(&self, bound: f64) -> bool {
        self.0.is_some_and(|cut| bound <= f64::from(cut))
    }

    /// Whether a row with this bound has not been taken. NaN is no row.
    pub fn beyond(&self, bound: f32) -> bool {
        match self.0 {
            Some(cut) => bound > cut,
            None => !bound.is_nan(),
        }
    }

    /// Moves the cut so that at least `count` further rows are taken (fewer only when no more are
    /// left) and calls `take` with the index of each. Returns how many were taken.
    pub fn advance(
        &mut self,
        bounds: &[f32],
        count: usize,
        scratch: &mut Vec<f32>,
        take: impl FnMut(usize),
    ) -> usize {
        let Some(cut) = self.nth_beyond(bounds, count.max(1), scratch) else { return 0 };
        self.advance_to(bounds, cut, take)
    }

    /// Moves the cut to `cut` and calls `take` with the index of each row between.
    pub fn advance_to(&mut self, bounds: &[f32], cut: f32, mut take: impl FnMut(usize)) -> usize {
        let mut taken = 0;
        for_each_at_most(bounds, cut, |index, bound| {
            if self.beyond(bound) {
                take(index);
                taken += 1;
            }
            cut
        });
        self.raise(cut);
        taken
    }

    /// Moves the cut to `cut`, if it lies below: all rows between were taken.
    pub fn raise(&mut self, cut: f32) {
        if self.0.is_none_or(|old| cut > old) {
            self.0 = Some(cut);
        }
    }

    /// The `count`-th smallest bound beyond the cut, or the largest if there are fewer.
    pub fn nth_beyond(&self, bounds: &[f32], count: usize, best: &mut Vec<f32>) -> Option<f32> {
        best.clear();
        let capacity = count * 2;
        for_each_at_most(bounds, f32::INFINITY, |_, bound| {
            if self.beyond(bound) {
                best.push(bound);
            }
            if best.len() < capacity {
                return f32::INFINITY;
            }
            let (_, nth, _) = best.select_nth_unstable_by(count - 1, f32::total_cmp);
            let nth = *nth;
            best.truncate(count);
            nth
        });
        let last = best.len().min(count).checked_sub(1)?;
        let (_, nth, _) = best.select_nth_unstable_by(last, f32::total_cmp);
        Some(*nth)
    }
}

/// Calls `visit` for each bound at or below a limit; `visit` returns the limit from there on when it
/// has a lower one. NaN is never visited.
fn for_each_at_most(bounds: &[f32], mut limit: f32, mut visit: impl FnMut(usize, f32) -> f32) {
    for (chunk_number, chunk) in bounds.chunks(LANES).enumerate() {
        let any = chunk.iter().fold(false, |any, &bound| any | (bound <= limit));
        if !any {
            continue;
        }
        for (lane, &bound) in chunk.iter().enumerate() {
            if bound <= limit {
                limit = limit.min(visit(chunk_number * LANES + lane, bound));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take_all(bounds: &[f32], count: usize) -> Vec<Vec<usize>> {
        let (mut frontier, mut scratch, mut tiers) = (Frontier::START, Vec::new(), Vec::new());
        loop {
            let mut tier = Vec::new();
            if frontier.advance(bounds, count, &mut scratch, |i| tier.push(i)) == 0 {
                return tiers;
            }
            tiers.push(tier);
        }
    }

    proptest! {
        #[test]
        fn tiers_cover_every_row_once_in_order_of_bound(
            bounds in prop::collection::vec(
                prop_oneof![8 => -20i8..20, 1 => Just(127i8)], 0..400),
            count in 1usize..70,
        ) {
            let bounds: Vec<f32> =
                bounds.iter().map(|&b| if b == 127 { f32::NAN } else { f32::from(b) }).collect();
            let tiers = take_all(&bounds, count);
            let mut seen: Vec<usize> = tiers.concat();
            let in_tiers = seen.len();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), in_tiers);
            prop_assert_eq!(in_tiers, bounds.iter().filter(|b| !b.is_nan()).count());
            for pair in tiers.windows(2) {
                prop_assert!(pair[0].len() >= count);
                let top = pair[0].iter().map(|&i| bounds[i]).fold(f32::MIN, f32::max);
                let next = pair[1].iter().map(|&i| bounds[i]).fold(f32::MAX, f32::min);
                prop_assert!(top < next);
            }
        }
    }

    #[test]
    fn infinite_bounds_are_taken_and_nan_is_not() {
        let bounds = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        assert_eq!(take_all(&bounds, 1), vec![vec![2], vec![3], vec![1]]);
    }

    #[test]
    fn rows_added_below_the_cut_are_covered() {
        let mut frontier = Frontier::START;
        frontier.advance(&[1.0, 2.0, 3.0], 2, &mut Vec::new(), |_| ());
        assert!(frontier.covers(2.0) && frontier.covers(0.5) && !frontier.covers(2.5));
    }
}
