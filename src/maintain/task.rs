//! What there is to do for an index.

use super::{
    calibrate::{Queries, calibrate_if_due, calibrate_to},
    compact::{Effort, compact, compact_once},
    due,
    flush::flush,
};
use crate::{error::Result, pages::Steps, session};

/// A piece of maintenance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Task {
    /// What is due, unless somebody else is at it.
    Tend = 0,
    /// A flush, for somebody who waits.
    Flush = 1,
    /// A flush, a compaction and, if it is due, a calibration, for somebody who waits.
    Compact = 2,
    /// An ownership check, if one is due.
    Check = 3,
    /// A flush and a calibration to queries, for somebody who waits.
    Calibrate = 4,
}

impl Task {
    /// The task with this number.
    pub fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Flush,
            2 => Self::Compact,
            3 => Self::Check,
            4 => Self::Calibrate,
            _ => Self::Tend,
        }
    }

    /// Does it, and gives the number of rows that were written, or of queries that were calibrated to. The caller
    /// holds the maintenance lock.
    pub fn perform(
        self,
        queries: &Queries,
        steps: &mut impl Steps,
        progress: &mut dyn FnMut(&str),
    ) -> Result<i64> {
        let mut rows = 0;
        match self {
            Self::Check => {
                progress("looking for copies");
                session::ownership::check(steps)?;
            }
            Self::Flush => {
                progress("flushing");
                rows += flush(steps)?.rows;
            }
            Self::Compact => {
                progress("flushing");
                flush(steps)?;
                let mut tell = |what: &str| progress(&format!("compacting, {what}"));
                rows += compact(steps, Effort::All, &mut tell)?;
                calibrate_if_due(steps, progress)?;
            }
            Self::Calibrate => {
                progress("flushing");
                flush(steps)?;
                return Ok(calibrate_to(queries, steps, progress)? as i64);
            }
            Self::Tend => loop {
                // Between the rounds of a compaction too: inserts go on meanwhile.
                while steps.step(due::is_over_limit)? {
                    progress("flushing");
                    rows += flush(steps)?.rows;
                }
                let mut tell = |what: &str| progress(&format!("compacting, {what}"));
                match compact_once(steps, Effort::Due, &mut tell)? {
                    Some(stats) => rows += stats.rows,
                    None if steps.step(due::is_over_limit)? => {}
                    None if calibrate_if_due(steps, progress)? => {}
                    None => break,
                }
            },
        }
        Ok(rows as i64)
    }
}
