//! Steps in transactions of their own.

use std::time::{Duration, Instant};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::ObjectId;

use crate::{
    error::{Error, Result},
    pages::{Index, Steps, meta},
    sql_api::target::OpenIndex,
    threads::Naps,
};

/// How long a step waits for a lock that somebody has on the index. Whoever waits for this process may
/// have it, which Postgres' deadlock detector does not see.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// Each step in a transaction of its own, so that between them no lock and no snapshot is held.
pub struct Transactions {
    index: pg_sys::Oid,
    /// Which index it was at the first step: it may be rebuilt between two.
    index_id: Option<ObjectId>,
}

impl Transactions {
    /// Steps on this index of the database of the process, in which no transaction is in progress.
    pub fn new(index: pg_sys::Oid) -> Self {
        Self { index, index_id: None }
    }

    fn within<T>(&mut self, step: impl FnOnce(Index) -> Result<T>) -> Result<T> {
        let open = OpenIndex::for_maintenance(self.index)?;
        let index = open.pages();
        let found = meta::read(index)?.index_id;
        if *self.index_id.get_or_insert(found) != found {
            return Err(Error::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("index \"{}\" was rebuilt in the meantime", index.name()),
            ));
        }
        step(index)
    }

    /// Locks the index for the transaction that has just begun.
    fn lock(&self) -> Result<()> {
        let deadline = Instant::now() + LOCK_PATIENCE;
        let mut naps = Naps::default();
        // SAFETY: in a transaction.
        while !unsafe {
            pg_sys::ConditionalLockRelationOid(self.index, OpenIndex::MAINTENANCE_LOCK)
        } {
            if Instant::now() > deadline {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
                    format!("could not lock index {} for its maintenance", self.index.to_u32()),
                )
                .detail(format!(
                    "Another transaction has locked it for more than {} s.",
                    LOCK_PATIENCE.as_secs()
                )));
            }
            naps.sleep();
        }
        Ok(())
    }
}

impl Steps for Transactions {
    fn step<T>(&mut self, step: impl FnOnce(Index) -> Result<T>) -> Result<T> {
        // SAFETY: no transaction is in progress. When an error is raised inside, the process's own
        // handler ends the transaction.
        unsafe {
            if std::ptr::replace(&raw mut pg_sys::ConfigReloadPending, 0) != 0 {
                pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
            }
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        }
        let result = self.lock().and_then(|()| self.within(step));
        // An error that was not raised leaves nothing to be undone: pages are changed by records that
        // are complete in themselves.
        // SAFETY: as begun above.
        unsafe {
            pg_sys::PopActiveSnapshot();
            pg_sys::CommitTransactionCommand();
        }
        result
    }
}
