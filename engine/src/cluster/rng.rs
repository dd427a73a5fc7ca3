/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): small, seedable, the same on every platform.
pub(crate) struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// An independent generator for part `part` of the work, so that parts may run in any order.
    pub fn fork(seed: u64, part: u64) -> Self {
        let mut mix = Self(seed ^ part.wrapping_mul(0xd1b5_4a32_d192_ed03));
        Self(mix.next())
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`; `n` > 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next() as u128 * n as u128) >> 64) as usize
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// `count` different numbers of `0..n` in random order (all of them if `count` >= `n`).
    pub fn sample(&mut self, n: usize, count: usize) -> Vec<usize> {
        let count = count.min(n);
        let mut all: Vec<usize> = (0..n).collect();
        for i in 0..count {
            let j = i + self.below(n - i);
            all.swap(i, j);
        }
        all.truncate(count);
        all
    }
}
