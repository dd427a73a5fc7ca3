//! `polign.verify(index, deep)`: whether an index is as it should be.

use pgrx::prelude::*;

use super::target::OpenIndex;
use crate::{
    error::{OrRaise, Result},
    verify::{self, Problem},
};

/// A row for each problem; none for a healthy index.
#[pg_extern(sql = false, name = "verify")]
fn verify_index(
    index: pg_sys::Oid,
    deep: bool,
) -> TableIterator<'static, (name!(subject, String), name!(place, String), name!(problem, String))>
{
    let problems = run(index, deep).or_raise();
    TableIterator::new(
        problems
            .into_iter()
            .map(|Problem { subject, place, what }| (subject.name().to_owned(), place, what)),
    )
}

fn run(index: pg_sys::Oid, deep: bool) -> Result<Vec<Problem>> {
    OpenIndex::check_owner(index)?;
    // The table first, as everybody does.
    let table = Table::open(index);
    let open = OpenIndex::for_reader(index)?;
    let _owner = AsOwner::of(table.0);
    // SAFETY: open, and the index's table.
    unsafe { verify::verify(open.pages().with_heap(table.0), table.0, deep) }
}

/// An open table.
struct Table(pg_sys::Relation);

const LOCK: pg_sys::LOCKMODE = pg_sys::AccessShareLock as pg_sys::LOCKMODE;

impl Table {
    fn open(index: pg_sys::Oid) -> Self {
        // SAFETY: in a transaction; a table that is gone is an ERROR.
        Self(unsafe { pg_sys::table_open(pg_sys::IndexGetRelation(index, false), LOCK) })
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: opened with this lock.
            unsafe { pg_sys::table_close(self.0, LOCK) }
        }
    }
}

/// Makes this session the owner of a table, restricted as in maintenance commands: expressions and
/// predicates of its indexes are the owner's code. An error resets it, as the end of the transaction does.
struct AsOwner {
    user: pg_sys::Oid,
    context: i32,
    nest: i32,
}

impl AsOwner {
    fn of(table: pg_sys::Relation) -> Self {
        // SAFETY: an open table; what is saved is put back when this is dropped.
        unsafe {
            let (mut user, mut context) = (pg_sys::InvalidOid, 0);
            pg_sys::GetUserIdAndSecContext(&mut user, &mut context);
            let restricted = context | pg_sys::SECURITY_RESTRICTED_OPERATION as i32;
            pg_sys::SetUserIdAndSecContext((*(*table).rd_rel).relowner, restricted);
            let nest = pg_sys::NewGUCNestLevel();
            pg_sys::set_config_option(
                c"search_path".as_ptr(),
                c"pg_catalog, pg_temp".as_ptr(),
                pg_sys::GucContext::PGC_USERSET,
                pg_sys::GucSource::PGC_S_SESSION,
                pg_sys::GucAction::GUC_ACTION_SAVE,
                true,
                0,
                false,
            );
            Self { user, context, nest }
        }
    }
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: as saved.
            unsafe {
                pg_sys::AtEOXact_GUC(false, self.nest);
                pg_sys::SetUserIdAndSecContext(self.user, self.context);
            }
        }
    }
}
