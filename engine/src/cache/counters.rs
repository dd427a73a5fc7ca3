/// A running total in the mapped directory, common to all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    // By backends, on a cache line of their own.
    Hits = 0,
    HitBytes = 1,
    Misses = 2,
    /// Parts that a backend had to drop because their region was evicted under it.
    Lost = 3,
    /// Faults in mapped files that were turned into refetches.
    Faults = 4,
    // By the store process.
    Gets = 8,
    GetBytes = 9,
    GetMicros = 10,
    Puts = 11,
    PutBytes = 12,
    Retries = 13,
    Errors = 14,
    /// Answers that asked for fewer requests.
    Throttles = 15,
    Evictions = 16,
    EvictedBytes = 17,
    MovedBytes = 18,
    /// Present values rather than totals.
    UsedBytes = 24,
    LimitBytes = 25,
    Parts = 26,
}

impl Counter {
    /// All of them.
    pub const ALL: [Self; 19] = [
        Self::Hits,
        Self::HitBytes,
        Self::Misses,
        Self::Lost,
        Self::Faults,
        Self::Gets,
        Self::GetBytes,
        Self::GetMicros,
        Self::Puts,
        Self::PutBytes,
        Self::Retries,
        Self::Errors,
        Self::Throttles,
        Self::Evictions,
        Self::EvictedBytes,
        Self::MovedBytes,
        Self::UsedBytes,
        Self::LimitBytes,
        Self::Parts,
    ];
}

pub(super) const COUNTER_WORDS: usize = 32;

/// The counters' values at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters(pub(super) [u64; COUNTER_WORDS]);

impl Counters {
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }
}
