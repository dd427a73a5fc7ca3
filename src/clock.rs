//! The time of this server and that of a store, which may differ.

use pgrx::pg_sys;

/// Microseconds from 1970 to 2000, where Postgres counts from.
const POSTGRES_EPOCH_US: i64 = 946_684_800_000_000;

/// The time of this server in milliseconds since 1970, as stores tell theirs.
pub fn now_ms() -> i64 {
    // SAFETY: reads the clock.
    to_unix_ms(unsafe { pg_sys::GetCurrentTimestamp() })
}

/// A time of Postgres in milliseconds since 1970.
pub fn to_unix_ms(microseconds_since_2000: i64) -> i64 {
    microseconds_since_2000.saturating_add(POSTGRES_EPOCH_US).div_euclid(1000)
}

/// By how many milliseconds a store's clock, which has just told this time, is ahead of the server's: 0 if
/// it is behind.
pub fn ahead_ms(store_now_ms: i64) -> i64 {
    store_now_ms.saturating_sub(now_ms()).max(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_from_1970() {
        assert_eq!(to_unix_ms(0), 946_684_800_000);
        assert_eq!(to_unix_ms(-1), 946_684_799_999);
        assert_eq!(to_unix_ms(1_999), 946_684_800_001);
    }
}
