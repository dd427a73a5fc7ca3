//! Recall curves made anew: when an index has grown or shrunk since, or for the queries that a user gives.

use std::{rc::Rc, sync::Arc};

use pgrx::PgSqlErrorCode;
use polign_engine::{
    maintain::{Recalibration, is_calibration_due},
    root::{FittedTo, Root, RootEdit},
};
use polign_pages::meta::{Meta, Retry};

use super::flush::{internal, until_published, with_codes};
use crate::{
    am::root_cache,
    error::{Error, Result},
    failpoint,
    pages::{
        Index, Steps,
        publish::{Publication, publish},
        tombstones::{TombstoneSet, TombstoneView},
    },
    session, threads,
    vector::different_dimensions,
};

/// Vectors that somebody searches for.
#[derive(Debug, Default)]
pub struct Queries {
    pub dim: u32,
    /// One after the other.
    pub values: Vec<f32>,
}

/// What the curves are made from.
struct Basis {
    meta: Rc<Meta>,
    root: Arc<Root>,
    tombstones: Rc<TombstoneSet>,
}

impl Basis {
    fn read(index: Index) -> Result<Self> {
        let (meta, root) = root_cache::current(index)?;
        let tombstones = index.retry(|| TombstoneSet::read(index, &meta))?;
        Ok(Self { meta, root, tombstones })
    }

    fn live_rows(&self) -> u64 {
        self.meta.rows.saturating_sub(self.tombstones.dead())
    }

    fn has_rows(&self) -> bool {
        self.live_rows() > 0 && !self.meta.sections.is_empty()
    }

    fn due(&self) -> Option<Due> {
        let rows_then = self.meta.calibrated_rows;
        let is_due = self.has_rows() && is_calibration_due(self.live_rows(), rows_then);
        is_due.then(|| match self.root.curves().fitted_to() {
            FittedTo::Rows => Due::ToRows { rows_then },
            FittedTo::Queries { .. } => Due::ToQueries { rows_then },
        })
    }
}

/// That there are so many more or fewer rows than when the curves were made that they are due to be made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// By itself: any rows serve as queries.
    ToRows { rows_then: u64 },
    /// By the user, who alone has the queries. Until then the numbers of cells in the curves grow with the index.
    ToQueries { rows_then: u64 },
}

/// Whether the curves are due to be made anew, by whoever can.
pub fn due(index: Index) -> Result<Option<Due>> {
    Ok(Basis::read(index)?.due())
}

/// Whether they are, without a user.
pub fn is_due(index: Index) -> Result<bool> {
    Ok(matches!(due(index)?, Some(Due::ToRows { .. })))
}

/// Makes the curves anew if that is due, and says whether it was. The caller holds the maintenance lock.
/// What is cancelled or fails changes nothing.
pub fn calibrate_if_due(steps: &mut impl Steps, progress: &mut dyn FnMut(&str)) -> Result<bool> {
    let basis = steps.step(Basis::read)?;
    if !matches!(basis.due(), Some(Due::ToRows { .. })) {
        return Ok(false);
    }
    let calibration = Recalibration::new(Arc::clone(&basis.root));
    calibrate(basis, calibration, steps, progress)?;
    Ok(true)
}

/// Fits the curves to the queries that a user gives, or to rows again if there are none. Gives the number of
/// queries. The caller holds the maintenance lock. What is cancelled or fails changes nothing.
pub fn calibrate_to(
    queries: &Queries,
    steps: &mut impl Steps,
    progress: &mut dyn FnMut(&str),
) -> Result<u64> {
    let basis = steps.step(Basis::read)?;
    if !basis.has_rows() {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "the index has no rows that recall could be calibrated with",
        ));
    }
    let root = Arc::clone(&basis.root);
    let calibration = if queries.values.is_empty() {
        Recalibration::new(root)
    } else if queries.dim as usize == root.dim() {
        Recalibration::of_queries(root, &queries.values).map_err(|error| {
            Error::new(PgSqlErrorCode::ERRCODE_DATA_EXCEPTION, "a query cannot be searched for")
                .detail(format!("{error}."))
        })?
    } else {
        return Err(different_dimensions(root.dim(), queries.dim as usize));
    };
    calibrate(basis, calibration, steps, progress)
}

/// Makes and publishes the curves, and gives the number of queries that they are about.
fn calibrate(
    basis: Basis,
    mut calibration: Recalibration,
    steps: &mut impl Steps,
    progress: &mut dyn FnMut(&str),
) -> Result<u64> {
    let pool = threads::pool()?;
    let mut source = session::maintenance_source(&basis.meta)?;
    let dead = TombstoneView::new(&basis.tombstones, &basis.root);
    for step in 0u64.. {
        pgrx::check_for_interrupts!();
        progress(&format!("calibrating recall, step {}", step + 1));
        let rows = calibration.read(&mut source, &dead);
        let rows = rows.map_err(|error| session::explain(error, &basis.meta))?;
        let Some(rows) = rows else { break };
        let observed =
            threads::off_thread(|interrupt| calibration.observe(rows, &pool, interrupt))?;
        observed.map_err(|error| internal(&error))?;
    }
    let curves = threads::off_thread(|_| calibration.finish(&pool))?;
    let samples = curves.curves().first().map_or(0, |curve| curve.samples);
    failpoint::pass("calibrate: made");
    let mut edit = RootEdit::new(&basis.root);
    edit.curves(curves);
    let sections = edit.build().map_err(|error| internal(&error))?;
    until_published(steps, |index| {
        let change = |meta: &mut Meta| {
            meta.calibrated_rows = basis.live_rows();
            meta.retry = Retry::default();
        };
        let publication = Publication {
            basis: &basis.meta,
            sections: &with_codes(&sections),
            objects: &basis.root.segments().iter().map(|entry| entry.object).collect(),
            retired: &[],
            flushed: None,
            change: &change,
        };
        publish(index, &publication, |_| Ok(Vec::new()))
    })?;
    Ok(samples.into())
}
