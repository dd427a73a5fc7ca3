//! Verification of an index: its pages, its objects, and that it has every row of its table exactly once.

mod objects;
mod pages;
mod table;

use std::{fmt::Display, sync::Arc};

use pgrx::pg_sys;
use polign_engine::root::Root;
use roaring::RoaringTreemap;

use crate::{
    am::root_cache,
    error::{Error, Result},
    pages::{Index, snapshot, snapshot::Snapshot},
};

/// What a problem is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    Page,
    Root,
    Object,
    Row,
}

impl Subject {
    /// As users see it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Page => "page",
            Self::Root => "root",
            Self::Object => "object",
            Self::Row => "row",
        }
    }
}

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub subject: Subject,
    /// Which page, object or row.
    pub place: String,
    pub what: String,
}

/// Of one kind no more are listed than this; the last entry says how many others there are.
const MOST_LISTED: usize = 1000;

/// The problems found so far.
#[derive(Debug, Default)]
pub struct Problems {
    listed: Vec<Problem>,
    counts: [usize; 4],
}

impl Problems {
    fn add(&mut self, subject: Subject, place: impl Display, what: impl Display) {
        let count = &mut self.counts[subject as usize];
        *count += 1;
        if *count <= MOST_LISTED {
            let (place, what) = (place.to_string(), what.to_string());
            self.listed.push(Problem { subject, place, what });
        }
    }

    /// An error that would have failed a search.
    fn error(&mut self, subject: Subject, place: impl Display, error: &Error) {
        let what = match &error.detail {
            Some(detail) => format!("{}: {detail}", error.message),
            None => error.message.clone(),
        };
        self.add(subject, place, what);
    }

    /// Notes an error and goes on without the result.
    fn unless_fails<T>(
        &mut self,
        subject: Subject,
        place: impl Display,
        result: Result<T>,
    ) -> Option<T> {
        result.map_err(|error| self.error(subject, place, &error)).ok()
    }

    /// All of them.
    pub fn into_list(mut self) -> Vec<Problem> {
        for subject in [Subject::Page, Subject::Root, Subject::Object, Subject::Row] {
            let more = self.counts[subject as usize].saturating_sub(MOST_LISTED);
            if more > 0 {
                let what = format!("{more} more problems like these");
                self.listed.push(Problem { subject, place: String::new(), what });
            }
        }
        self.listed
    }
}

/// Verifies an index. `deep`: every part of every object is read from the store and its checksum compared;
/// without it the ids are read, and of the objects their lengths.
///
/// What cannot be read because the store does not answer is an error, not a problem of the index.
///
/// # Safety
/// `heap` is the index's open table.
pub unsafe fn verify(index: Index, heap: pg_sys::Relation, deep: bool) -> Result<Vec<Problem>> {
    let mut problems = Problems::default();
    // SAFETY: by contract. The snapshot comes first: what it sees was in the index before.
    let table = unsafe { table::Table::new(index, heap)? };
    pages::check_blocks(index, &mut problems);
    // SAFETY: no snapshot is needed: nothing is returned to a query.
    let read =
        unsafe { snapshot::read(index, std::ptr::null_mut(), |meta| root_cache::get(index, meta)) };
    let Some(state) = problems.unless_fails(Subject::Root, "", read) else {
        return Ok(problems.into_list());
    };
    let mut rows = RoaringTreemap::new();
    pages::check_lists(index, &mut problems);
    pages::check_delta(index, &state, &mut rows, &mut problems)?;
    match objects::check(&state, deep, &mut rows, &mut problems)? {
        0 => table.check(&rows, &mut problems),
        unread => {
            let what = format!("not compared: the rows of {unread} objects are not known");
            problems.add(Subject::Row, "the table", what);
        }
    }
    Ok(problems.into_list())
}

/// A consistent reading.
type State = Snapshot<Arc<Root>>;

/// A heap row as Postgres writes it.
fn tid(id: u64) -> String {
    format!("({},{})", id >> 16, id & 0xffff)
}
