//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023) over regions.
//!
//! Parts enter through the small queue, a tenth of the cache. When a region of it is evicted, parts
//! that were hit more than once go on to the main queue; the others leave, and their names are kept
//! for a while: a part that comes back soon enters the main queue at once. A part of an evicted main
//! region is written again, with one hit less, if it was hit at all.

use std::collections::{HashSet, VecDeque};

use polign_engine::{cache::RegionClass, segment::PartKey};

/// The small queue's share of the cache: one region in so many.
const SMALL_SHARE: u32 = 10;
const FEWEST_GHOSTS: usize = 1024;

#[derive(Debug, Default)]
pub struct S3Fifo {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghosts: VecDeque<PartKey>,
    is_ghost: HashSet<PartKey>,
}

impl S3Fifo {
    /// A region was opened for parts of this class.
    pub fn opened(&mut self, region: u32, class: RegionClass) {
        match class {
            RegionClass::Small => self.small.push_back(region),
            RegionClass::Main => self.main.push_back(region),
            RegionClass::Free => {}
        }
    }

    /// The region to evict next, which is taken off its queue.
    pub fn next_victim(&mut self, limit: u32) -> Option<(u32, RegionClass)> {
        let target = (limit / SMALL_SHARE).max(1) as usize;
        let small_first = self.small.len() > target || self.main.is_empty();
        let (queue, class) = match small_first {
            true => (&mut self.small, RegionClass::Small),
            false => (&mut self.main, RegionClass::Main),
        };
        queue.pop_front().map(|region| (region, class))
    }

    /// Takes a region off its queue because its bytes are lost.
    pub fn forget(&mut self, region: u32) {
        self.small.retain(|&queued| queued != region);
        self.main.retain(|&queued| queued != region);
    }

    /// The hits that a part moves on with from an evicted region, `None` if it leaves.
    pub fn survives(class: RegionClass, access: u32) -> Option<u32> {
        match class {
            RegionClass::Small => (access > 1).then_some(0),
            RegionClass::Main => access.checked_sub(1),
            RegionClass::Free => None,
        }
    }

    /// Where a new part goes.
    pub fn class_for(&mut self, key: &PartKey) -> RegionClass {
        if self.is_ghost.remove(key) { RegionClass::Main } else { RegionClass::Small }
    }

    /// A part left from the small queue. `parts`: how many parts the cache holds.
    pub fn left(&mut self, key: PartKey, parts: usize) {
        if self.is_ghost.insert(key) {
            self.ghosts.push_back(key);
        }
        while self.ghosts.len() > parts.max(FEWEST_GHOSTS) {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.is_ghost.remove(&oldest);
            }
        }
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use polign_engine::{ObjectId, segment::PartKind};

    use super::*;

    fn key(ordinal: u32) -> PartKey {
        PartKey::new(ObjectId([1; 16]), PartKind::Plane2, ordinal)
    }

    #[test]
    fn the_small_queue_is_kept_to_its_share() {
        let mut policy = S3Fifo::default();
        for region in 0..6 {
            policy.opened(region, RegionClass::Small);
        }
        for region in 6..40 {
            policy.opened(region, RegionClass::Main);
        }
        for region in 0..2 {
            assert_eq!(policy.next_victim(40), Some((region, RegionClass::Small)));
        }
        assert_eq!(policy.next_victim(40), Some((6, RegionClass::Main)));
    }

    #[test]
    fn one_hit_wonders_leave_and_come_back_to_the_main_queue() {
        assert_eq!(S3Fifo::survives(RegionClass::Small, 1), None);
        assert_eq!(S3Fifo::survives(RegionClass::Small, 2), Some(0));
        assert_eq!(S3Fifo::survives(RegionClass::Main, 0), None);
        assert_eq!(S3Fifo::survives(RegionClass::Main, 3), Some(2));
        let mut policy = S3Fifo::default();
        assert_eq!(policy.class_for(&key(1)), RegionClass::Small);
        policy.left(key(1), 0);
        assert_eq!(policy.class_for(&key(1)), RegionClass::Main);
        assert_eq!(policy.class_for(&key(1)), RegionClass::Small);
    }

    #[test]
    fn names_of_parts_that_left_are_forgotten_in_time() {
        let mut policy = S3Fifo::default();
        for ordinal in 0..2 * FEWEST_GHOSTS as u32 {
            policy.left(key(ordinal), 10);
        }
        assert_eq!(policy.class_for(&key(0)), RegionClass::Small);
        assert_eq!(policy.class_for(&key(2 * FEWEST_GHOSTS as u32 - 1)), RegionClass::Main);
    }
}
