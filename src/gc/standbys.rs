//! How far those have come who replay this server's log.

use pgrx::{PgSqlErrorCode, Spi};

use crate::error::{Error, Result};

/// The least position over all standbys, connected ones and those that have a slot. A base backup ends
/// later than now, logical decoding and programs that only receive the log read no index. Who may not see
/// where standbys are sees nulls, which count as the very beginning.
const REPLAYED: &str = "
    SELECT pg_catalog.min(lsn)::bigint FROM (
        SELECT CASE
            WHEN replay_lsn IS NOT NULL THEN replay_lsn - '0/0'::pg_catalog.pg_lsn
            WHEN flush_lsn IS NULL THEN 0 END
        FROM pg_catalog.pg_stat_replication sender
        WHERE state IS DISTINCT FROM 'backup' AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_replication_slots
            WHERE active_pid = sender.pid AND slot_type = 'logical')
        UNION ALL
        SELECT restart_lsn - '0/0'::pg_catalog.pg_lsn FROM pg_catalog.pg_replication_slots
        WHERE slot_type = 'physical' AND restart_lsn IS NOT NULL
    ) AS standbys (lsn)";

/// Up to where every standby has replayed the log: everywhere if there is none.
pub fn replayed() -> Result<u64> {
    // Not as something that writes: that would begin a transaction id.
    let least = Spi::connect(|client| client.select(REPLAYED, Some(1), &[])?.first().get_one());
    let least: Option<i64> = least.map_err(|error| {
        Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "could not ask where standbys are")
            .detail(error.to_string())
    })?;
    Ok(least.map_or(u64::MAX, |position| position as u64))
}
