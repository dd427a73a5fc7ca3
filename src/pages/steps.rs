//! Access to an index in steps, between which nothing of Postgres need be held.

use super::relation::Index;
use crate::error::Result;

/// Gives access to an index, step by step. What waits for the store, waits between steps.
pub trait Steps {
    /// Calls `step` with the index open, which it is no longer afterwards.
    fn step<T>(&mut self, step: impl FnOnce(Index) -> Result<T>) -> Result<T>;
}

/// All steps in the transaction that is in progress, on an index that stays open.
pub struct Here(pub Index);

impl Steps for Here {
    fn step<T>(&mut self, step: impl FnOnce(Index) -> Result<T>) -> Result<T> {
        step(self.0)
    }
}
