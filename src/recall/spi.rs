//! Statements that run as the caller, on the snapshot of the statement that called: SPI with guards.
//!
//! Whatever ends a guard's life by an error leaves the rest to Postgres, which gives back what SPI holds with
//! the transaction or the savepoint.

use std::{
    ffi::CStr,
    marker::PhantomData,
    ptr::{NonNull, null, null_mut},
    slice,
};

use pgrx::{PgSqlErrorCode, pg_sys};

use super::list;
use crate::error::{Error, Result};

/// A connection to SPI.
pub struct Session(());

impl Session {
    pub fn connect() -> Result<Self> {
        // SAFETY: ended when this is dropped, or with the transaction.
        match unsafe { pg_sys::SPI_connect() } {
            code if code == pg_sys::SPI_OK_CONNECT as i32 => Ok(Self(())),
            code => Err(unexpected("SPI_connect", code)),
        }
    }

    /// Parses a statement whose parameters have these types.
    pub fn prepare(
        &self,
        sql: &CStr,
        parameters: &[pg_sys::Oid],
        options: u32,
    ) -> Result<Plan<'_>> {
        let mut types = parameters.to_vec();
        // SAFETY: the types are copied.
        let plan = unsafe {
            pg_sys::SPI_prepare_cursor(
                sql.as_ptr(),
                types.len() as i32,
                types.as_mut_ptr(),
                options as i32,
            )
        };
        match NonNull::new(plan) {
            Some(plan) => Ok(Plan { plan, session: PhantomData }),
            // SAFETY: a global that SPI has just set.
            None => Err(unexpected("SPI_prepare", unsafe { pg_sys::SPI_result })),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: connected.
            unsafe { pg_sys::SPI_finish() };
        }
    }
}

fn unexpected(function: &str, code: i32) -> Error {
    // SAFETY: gives a NUL-terminated string for every code.
    let code = unsafe { CStr::from_ptr(pg_sys::SPI_result_code_string(code)) };
    Error::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        format!("{function} failed: {}", code.to_string_lossy()),
    )
}

/// A parsed statement. SPI frees it with the session.
pub struct Plan<'a> {
    plan: NonNull<pg_sys::_SPI_plan>,
    session: PhantomData<&'a Session>,
}

impl Plan<'_> {
    /// Whether it is one statement that returns rows.
    pub fn returns_rows(&self) -> bool {
        // SAFETY: a plan of this session.
        unsafe { pg_sys::SPI_is_cursor_plan(self.plan.as_ptr()) }
    }

    /// Begins to execute it, reading only.
    pub fn open(&self, values: &[pg_sys::Datum]) -> Cursor<'_> {
        let mut values = values.to_vec();
        // SAFETY: a plan of this session with as many parameters, none of them NULL, whose values are copied;
        // raises what is wrong.
        let portal = unsafe {
            pg_sys::SPI_cursor_open(null(), self.plan.as_ptr(), values.as_mut_ptr(), null(), true)
        };
        Cursor { portal, plan: PhantomData }
    }
}

/// A statement that is being executed.
pub struct Cursor<'a> {
    portal: pg_sys::Portal,
    plan: PhantomData<&'a ()>,
}

impl Cursor<'_> {
    /// The types of the columns.
    pub fn columns(&self) -> Vec<pg_sys::Oid> {
        // SAFETY: an open portal of a statement that returns rows has a descriptor.
        unsafe {
            let columns = (*self.portal).tupDesc;
            (1..=(*columns).natts).map(|column| pg_sys::SPI_gettypeid(columns, column)).collect()
        }
    }

    /// The index whose scan the rows come from, if all that is above it is a limit or a computation.
    pub fn scanned_index(&self) -> Option<pg_sys::Oid> {
        // SAFETY: the statements of an open portal are its plans; nodes of a plan are what their tags say.
        unsafe {
            let statement = list::nth::<pg_sys::PlannedStmt>((*self.portal).stmts, 0)?;
            let mut node = (*statement).planTree;
            loop {
                match node.as_ref()?.type_ {
                    pg_sys::NodeTag::T_Limit | pg_sys::NodeTag::T_Result => node = (*node).lefttree,
                    pg_sys::NodeTag::T_SubqueryScan => {
                        node = (*node.cast::<pg_sys::SubqueryScan>()).subplan;
                    }
                    pg_sys::NodeTag::T_IndexScan => {
                        return Some((*node.cast::<pg_sys::IndexScan>()).indexid);
                    }
                    _ => return None,
                }
            }
        }
    }

    /// The next rows, no more than `count`; an empty batch at the end.
    pub fn fetch(&mut self, count: usize) -> Batch<'_> {
        // SAFETY: an open portal; the table is this batch's alone.
        unsafe {
            pg_sys::SPI_cursor_fetch(self.portal, true, count as _);
            let table = pg_sys::SPI_tuptable;
            pg_sys::SPI_tuptable = null_mut();
            Batch { table, cursor: PhantomData }
        }
    }
}

impl Drop for Cursor<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: open.
            unsafe { pg_sys::SPI_cursor_close(self.portal) }
        }
    }
}

/// Rows in memory.
pub struct Batch<'a> {
    table: *mut pg_sys::SPITupleTable,
    cursor: PhantomData<&'a ()>,
}

impl Batch<'_> {
    fn tuples(&self) -> &[pg_sys::HeapTuple] {
        // SAFETY: null, or a table with as many rows.
        unsafe {
            match self.table.as_ref() {
                Some(table) if table.numvals > 0 => {
                    slice::from_raw_parts(table.vals, table.numvals as usize)
                }
                _ => &[],
            }
        }
    }

    /// The rows, with access to the value in a column (from 0), if it is not NULL.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = impl Fn(i32) -> Option<pg_sys::Datum>> {
        let table = self.table;
        self.tuples().iter().map(move |&tuple| {
            move |column: i32| {
                let mut null = true;
                // SAFETY: a row of the table, which has this descriptor. A column that it does not have is NULL.
                let value = unsafe {
                    pg_sys::SPI_getbinval(tuple, (*table).tupdesc, column + 1, &mut null)
                };
                (!null).then_some(value)
            }
        })
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() && !self.table.is_null() {
            // SAFETY: nobody else has it.
            unsafe { pg_sys::SPI_freetuptable(self.table) }
        }
    }
}
