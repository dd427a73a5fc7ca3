//! `polign.gc(older_than, dry_run, store)`: deletes what nothing refers to; and what lets it delete more.

use std::ffi::CStr;

use pgrx::{IntoDatum, PgMemoryContexts, PgSqlErrorCode, pg_sys, prelude::*};
use polign_engine::StoreUrl;

use super::target::OpenIndex;
use crate::{
    error::{Error, OrRaise, Result},
    gc::{self, Garbage, Options},
    pages::MaintenanceLock,
};

const DAY_MS: i64 = 86_400_000;

/// A row for each object that nothing refers to. Rows go to a tuple store, so that there may be millions.
#[pg_extern(sql = false)]
fn gc(
    older_than: Option<pgrx::datum::Interval>,
    dry_run: Option<bool>,
    store: Option<&str>,
    fcinfo: pg_sys::FunctionCallInfo,
) {
    let older_than = older_than.ok_or_else(|| is_null("older_than")).or_raise();
    let dry_run = dry_run.ok_or_else(|| is_null("dry_run")).or_raise();
    // SAFETY: called by the executor, which passes its result info; these raise.
    unsafe {
        pg_sys::PreventCommandDuringRecovery(c"polign.gc()".as_ptr());
        if !dry_run {
            pg_sys::PreventCommandIfReadOnly(c"polign.gc()".as_ptr());
        }
        pg_sys::InitMaterializedSRF(fcinfo, 0);
    }
    let store = checked_store(store).or_raise();
    let options = options(older_than, dry_run, store).or_raise();
    // SAFETY: InitMaterializedSRF has seen that this is what the caller passed.
    let info = unsafe { (*fcinfo).resultinfo.cast::<pg_sys::ReturnSetInfo>() };
    let mut row = PgMemoryContexts::new("polign.gc row");
    let mut report = |garbage: &Garbage<'_>| {
        // SAFETY: nothing of the row before is used any more, and nothing of this one afterwards.
        unsafe {
            row.reset();
            row.switch_to(|_| put_row(info, garbage, dry_run));
        }
    };
    gc::run(options, &mut report).or_raise();
}

/// Adds a row to the tuple store.
fn put_row(info: *mut pg_sys::ReturnSetInfo, garbage: &Garbage<'_>, dry_run: bool) {
    let columns: [Option<pg_sys::Datum>; 6] = [
        garbage.object.into_datum(),
        (garbage.bytes as i64).into_datum(),
        garbage.reason.into_datum(),
        garbage.index.into_datum(),
        (garbage.kept.is_none() && !dry_run).into_datum(),
        garbage.kept.and_then(IntoDatum::into_datum),
    ];
    let mut nulls = columns.map(|column| column.is_none());
    let mut values = columns.map(|column| column.unwrap_or(pg_sys::Datum::from(0)));
    // SAFETY: InitMaterializedSRF has made the tuple store and its descriptor, which has as many columns
    // as there are values; the store copies them.
    unsafe {
        let (store, descriptor) = ((*info).setResult, (*info).setDesc);
        pg_sys::tuplestore_putvalues(store, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
    }
}

/// Takes over what an index inherited: the operator says that no copy of it and no origin lives. Returns
/// the number of writer ids.
#[pg_extern(sql = false, name = "adopt")]
fn adopt_index(index: pg_sys::Oid) -> i64 {
    refuse_unless_writable(c"polign.adopt()");
    let adopt = || -> Result<usize> {
        OpenIndex::check_owner(index)?;
        let open = OpenIndex::for_maintenance(index)?;
        let _lock = MaintenanceLock::acquire(index);
        gc::adopt(open.pages())
    };
    adopt().or_raise() as i64
}

/// The same for what indexes left that are not there any more.
#[pg_extern(sql = false)]
fn adopt_dropped(former: Option<i64>, store: Option<&str>) -> i64 {
    refuse_unless_writable(c"polign.adopt_dropped()");
    let store = checked_store(store).or_raise();
    // As pg_control_system() gives it.
    gc::adopt_dropped(former.map(i64::cast_unsigned), store).or_raise() as i64
}

/// A store that the user named. Whoever may do that reads and deletes with the server's keys and rights.
fn checked_store(store: Option<&str>) -> Result<Option<String>> {
    let Some(store) = store else { return Ok(None) };
    // SAFETY: looks at the session's role.
    if !unsafe { pg_sys::superuser() } {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            "must be superuser to name a store",
        )
        .hint("Without a name, the stores of the database's indexes are looked at."));
    }
    match StoreUrl::parse(store) {
        Ok(_) => Ok(Some(store.to_owned())),
        Err(error) => Err(Error::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("\"{store}\" is not the URL of a store"),
        )
        .detail(error.to_string())),
    }
}

fn is_null(argument: &str) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
        format!("\"{argument}\" must not be null"),
    )
}

fn refuse_unless_writable(function: &CStr) {
    // SAFETY: these only raise.
    unsafe {
        pg_sys::PreventCommandDuringRecovery(function.as_ptr());
        pg_sys::PreventCommandIfReadOnly(function.as_ptr());
    }
}

fn options(
    older_than: pgrx::datum::Interval,
    dry_run: bool,
    store: Option<String>,
) -> Result<Options> {
    let days = i64::from(older_than.months()) * 30 + i64::from(older_than.days());
    let older_than_ms =
        days.saturating_mul(DAY_MS).saturating_add(older_than.micros().div_euclid(1000));
    if older_than_ms < 0 {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "\"older_than\" must not be negative",
        ));
    }
    let older_than = older_than.to_string();
    Ok(Options { older_than_ms, older_than, dry_run, store })
}
