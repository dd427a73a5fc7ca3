//! How far apart the ranges that one GET reads may lie, so that a cold query stays within a number of
//! GETs and reads no more for it than it has to.

use super::GAP;
use crate::{ObjectId, segment::PartRef};

/// GETs of a query, all its requests together.
const GETS: usize = 24;
/// GETs of its first request, for plane 1: half, so that the chunks of plane 2 that it will ask for then
/// have as many. With 8 to 16 as many of 300 real questions stay within 24 GETs and 2.2 MB.
const FIRST_GETS: usize = 12;
/// Smaller gaps are always read along: two chunks of plane 2. It saves 0.3 GETs a query for 5 kB.
const SMALL_GAP: u32 = 16 << 10;
/// The largest gap that the first request reads along, and the largest of a later one. Gaps between
/// cells are small, those between chunks may be large: of the questions 92 % stay within 24 GETs with
/// 128 KiB, 97 % with 256 KiB, 99 % with 512 KiB, which few need (26 cells, decision 0013).
const LARGEST_GAPS: [u32; 2] = [GAP, 512 << 10];

/// The GETs of one query.
#[derive(Debug, Clone, Default)]
pub struct GetBudget {
    used: usize,
}

impl GetBudget {
    /// The gap up to which ranges of one object are to be read together in the query's next request,
    /// which asks for these parts. The GETs that this makes are counted as used.
    ///
    /// It is the smallest gap with which the query stays within its number of GETs. Where none is large
    /// enough (a search that goes deep, or through the whole index), it is the usual one.
    pub fn gap_for<'a>(&mut self, parts: impl IntoIterator<Item = &'a PartRef>) -> u32 {
        let (objects, gaps) = gaps(parts);
        let (gets, largest) = match self.used {
            0 => (FIRST_GETS, LARGEST_GAPS[0]),
            used => (GETS.saturating_sub(used), LARGEST_GAPS[1]),
        };
        let apart = objects + gaps.len();
        let gap = match apart.saturating_sub(gets).checked_sub(1) {
            None => SMALL_GAP,
            Some(last) => {
                let enough = gaps.get(last).map(|&gap| gap.max(SMALL_GAP));
                enough.filter(|&gap| gap <= largest).unwrap_or(GAP)
            }
        };
        self.used += apart - gaps.partition_point(|&between| between <= gap);
        gap
    }
}

/// How many objects these parts lie in, and the gaps between them, in ascending order.
fn gaps<'a>(parts: impl IntoIterator<Item = &'a PartRef>) -> (usize, Vec<u32>) {
    let mut parts: Vec<&PartRef> = parts.into_iter().collect();
    parts.sort_unstable_by_key(|part| (part.key.object, part.offset));
    let (mut objects, mut gaps) = (0, Vec::with_capacity(parts.len()));
    let mut before: Option<(ObjectId, u64)> = None;
    for part in parts {
        let object = part.key.object;
        let end = match before.filter(|(other, _)| *other == object) {
            Some((_, end)) => {
                gaps.push(u32::try_from(part.offset.saturating_sub(end)).unwrap_or(u32::MAX));
                end.max(part.end())
            }
            None => {
                objects += 1;
                part.end()
            }
        };
        before = Some((object, end));
    }
    gaps.sort_unstable();
    (objects, gaps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gets::merge,
        segment::{PartKey, PartKind},
    };

    const PART: u32 = 8 << 10;

    /// Parts of an object with these gaps between them.
    fn apart(object: u8, gaps: &[u32]) -> Vec<PartRef> {
        let mut offset = 0;
        let mut parts = vec![];
        for (ordinal, gap) in (0..).zip([0].iter().chain(gaps)) {
            offset += u64::from(*gap);
            let key = PartKey::new(ObjectId([object; 16]), PartKind::Plane2, ordinal);
            parts.push(PartRef { key, offset, len: PART });
            offset += u64::from(PART);
        }
        parts
    }

    /// The GETs that a request for these parts makes.
    fn gets(parts: &[PartRef], gap: u32) -> usize {
        let mut objects: Vec<ObjectId> = parts.iter().map(|part| part.key.object).collect();
        objects.sort_unstable();
        objects.dedup();
        let of = |object: &ObjectId| {
            let own = parts.iter().filter(|part| part.key.object == *object);
            merge(own.map(|part| ((), part.offset..part.end())).collect(), gap).len()
        };
        objects.iter().map(of).sum()
    }

    /// A query whose first request took so many GETs.
    fn after(used: usize) -> GetBudget {
        let mut budget = GetBudget::default();
        for object in 0..used {
            budget.gap_for(&apart(object as u8, &[]));
        }
        assert_eq!(budget.used, used);
        budget
    }

    #[test]
    fn only_small_gaps_are_read_along_while_there_are_gets_left() {
        let parts = apart(1, &[SMALL_GAP, SMALL_GAP + 1, 3 * SMALL_GAP]);
        assert_eq!(GetBudget::default().gap_for(&parts), SMALL_GAP);
        assert_eq!(after(10).gap_for(&parts), SMALL_GAP);
    }

    #[test]
    fn the_smallest_gaps_of_all_objects_go_first_and_no_further_than_needed() {
        let gaps: Vec<u32> = (1..=11).map(|nth| nth * 20_000).collect();
        let parts = [apart(1, &gaps[..5]), apart(2, &gaps[5..])].concat();
        for used in [12, 15, 20] {
            let mut budget = after(used);
            let gap = budget.gap_for(&parts);
            assert_eq!(gap, gaps[used - 12]);
            assert_eq!(gets(&parts, gap), GETS - used);
            assert_eq!(budget.used, GETS);
        }
    }

    #[test]
    fn the_first_request_leaves_gets_for_the_second_and_reads_no_large_gap_along() {
        let near = apart(1, &[GAP - 7; 20]);
        assert_eq!(GetBudget::default().gap_for(&near), GAP - 7);
        let gaps: Vec<u32> = (0..20).map(|nth| 30_000 + nth).collect();
        let gap = GetBudget::default().gap_for(&apart(1, &gaps));
        assert_eq!(gets(&apart(1, &gaps), gap), FIRST_GETS);
        assert_eq!(GetBudget::default().gap_for(&apart(1, &[GAP + 7; 20])), GAP);
    }

    #[test]
    fn where_no_gap_is_large_enough_it_is_the_usual_one() {
        let far = apart(1, &[LARGEST_GAPS[1] + 1; 30]);
        assert_eq!(after(5).gap_for(&far), GAP);
        let mut budget = after(5);
        for _ in 0..3 {
            budget.gap_for(&far);
        }
        assert_eq!(budget.used, 5 + 3 * 31, "every request is counted");
        assert_eq!(budget.gap_for(&apart(2, &[])), GAP);
        let objects: Vec<_> = (0..30).flat_map(|object| apart(object, &[])).collect();
        assert_eq!(after(1).gap_for(&objects), GAP);
    }

    #[test]
    fn what_is_counted_is_what_is_read() {
        let mut turn = 7u32;
        let mut draw = |below: u32| {
            turn = turn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (turn >> 8) % below
        };
        for _ in 0..200 {
            let mut budget = GetBudget::default();
            let mut total = 0;
            for _ in 0..3 {
                let mut parts = Vec::new();
                for object in 0..draw(4) as u8 {
                    let gaps: Vec<u32> = (0..draw(20)).map(|_| draw(300_000)).collect();
                    parts.extend(apart(object, &gaps));
                }
                let swaps = parts.len();
                for at in 0..swaps {
                    parts.swap(at, draw(swaps as u32) as usize);
                }
                let gap = budget.gap_for(&parts);
                total += gets(&parts, gap);
                assert_eq!(budget.used, total);
            }
        }
    }
}
