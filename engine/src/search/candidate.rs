//! Entries of the candidate heap.

use std::cmp::Ordering;

/// A row on its way out of the search.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    /// Lower bound of its score: statistical until it is refined, deterministic afterwards.
    pub bound: f64,
    pub state: State,
}

/// How much is known of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Scanned: its row in the columns. Sorts first, so that equal bounds are refined before any of
    /// them is returned.
    Scanned(usize),
    /// Refined: its id.
    Refined(u64),
}

impl State {
    /// The row, if it is scanned only.
    pub fn scanned(self) -> Option<usize> {
        match self {
            Self::Scanned(row) => Some(row),
            Self::Refined(_) => None,
        }
    }
}

impl Ord for Candidate {
    /// Reversed, so that the standard max-heap pops the smallest bound.
    fn cmp(&self, other: &Self) -> Ordering {
        other.bound.total_cmp(&self.bound).then_with(|| other.state.cmp(&self.state))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

#[cfg(test)]
mod tests {
    use std::collections::BinaryHeap;

    use super::*;

    #[test]
    fn the_heap_pops_the_smallest_bound_and_scanned_before_refined() {
        let mut heap = BinaryHeap::new();
        for (bound, state) in [
            (2.0, State::Refined(1)),
            (1.0, State::Refined(2)),
            (1.0, State::Scanned(3)),
            (f64::NEG_INFINITY, State::Refined(4)),
        ] {
            heap.push(Candidate { bound, state });
        }
        let order: Vec<State> = std::iter::from_fn(|| heap.pop().map(|c| c.state)).collect();
        assert_eq!(
            order,
            [State::Refined(4), State::Scanned(3), State::Refined(2), State::Refined(1)]
        );
    }
}
