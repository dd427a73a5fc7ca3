//! What `polign_ivf` can do, as Postgres asks for it.

use pgrx::{pg_guard, pg_sys};

use super::{build, cost, insert, options, scan, vacuum, validate};

/// Support function 1 of an operator class: its metric and element type.
pub const SUPPORT_OPCLASS: u16 = 1;
/// Strategy 1 of an operator class: its distance operator.
pub const STRATEGY_DISTANCE: u16 = 1;

#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_polign_ivf_handler() -> &'static pg_sys::Pg_finfo_record {
    static V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &V1
}

/// The handler function that `CREATE ACCESS METHOD` names.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn polign_ivf_handler(_info: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    let routine = pg_sys::IndexAmRoutine {
        type_: pg_sys::NodeTag::T_IndexAmRoutine,
        amstrategies: 1,
        amsupport: 1,
        amoptsprocnum: 0,
        amcanorder: false,
        amcanorderbyop: true,
        amcanbackward: false,
        amcanunique: false,
        amcanmulticol: false,
        amoptionalkey: true,
        amsearcharray: false,
        amsearchnulls: false,
        amstorage: false,
        amclusterable: false,
        ampredlocks: false,
        amcanparallel: false,
        amcaninclude: false,
        amusemaintenanceworkmem: true,
        amsummarizing: false,
        amparallelvacuumoptions: pg_sys::VACUUM_OPTION_PARALLEL_BULKDEL as u8,
        amkeytype: pg_sys::InvalidOid,

        ambuild: Some(build::ambuild),
        ambuildempty: Some(build::ambuildempty),
        aminsert: Some(insert::aminsert),
        ambulkdelete: Some(vacuum::ambulkdelete),
        amvacuumcleanup: Some(vacuum::amvacuumcleanup),
        amcostestimate: Some(cost::amcostestimate),
        amoptions: Some(options::amoptions),
        ambuildphasename: Some(ambuildphasename),
        amvalidate: Some(validate::amvalidate),
        ambeginscan: Some(scan::ambeginscan),
        amrescan: Some(scan::amrescan),
        amgettuple: Some(scan::amgettuple),
        amendscan: Some(scan::amendscan),
        // On 17 and later: no parallel build, and no callback that is not named here.
        ..Default::default()
    };
    // SAFETY: palloc returns memory of the size asked for (or raises); Postgres frees it with its context.
    unsafe {
        let result = pg_sys::palloc(size_of::<pg_sys::IndexAmRoutine>()).cast();
        std::ptr::write(result, routine);
        pg_sys::Datum::from(result)
    }
}

/// The phases of a build that `pg_stat_progress_create_index` shows, from number 2 on: number 1 is
/// Postgres' own `initializing`.
pub const BUILD_PHASES: [&std::ffi::CStr; 5] =
    [c"sampling rows", c"training cells", c"assigning rows", c"writing segments", c"publishing"];

#[pg_guard]
unsafe extern "C-unwind" fn ambuildphasename(phase: i64) -> *mut std::ffi::c_char {
    const INITIALIZE: i64 = pg_sys::PROGRESS_CREATEIDX_SUBPHASE_INITIALIZE as i64;
    let name = match usize::try_from(phase - INITIALIZE) {
        Ok(0) => c"initializing",
        Ok(n) => match BUILD_PHASES.get(n - 1) {
            Some(name) => name,
            None => return std::ptr::null_mut(),
        },
        Err(_) => return std::ptr::null_mut(),
    };
    name.as_ptr().cast_mut()
}
