use std::collections::HashSet;

use super::map::Located;

/// Parts whose checksum this process has verified where they lie.
///
/// The store process checks a part when it enters the cache, and again at its first use after a start.
/// What happens to the file in between (a bad disk, a careless hand) only a reader can notice.
#[derive(Debug, Default)]
pub(super) struct Trusted {
    places: HashSet<u64>,
}

/// Beyond this, start over: checking a part again costs microseconds.
const MAX_PLACES: usize = 1 << 16;

impl Trusted {
    pub fn contains(&self, part: &Located) -> bool {
        self.places.contains(&place(part))
    }

    pub fn insert(&mut self, part: &Located) {
        if self.places.len() >= MAX_PLACES {
            self.places.clear();
        }
        self.places.insert(place(part));
    }

    pub fn clear(&mut self) {
        self.places.clear();
    }
}

/// Region (22 bits), offset in units of 64 bytes (14 bits), the generation's last 28 bits.
fn place(part: &Located) -> u64 {
    u64::from(part.region) << 42 | u64::from(part.offset >> 6) << 28 | part.generation & 0x0fff_ffff
}
