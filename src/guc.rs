//! The settings. None is PGC_POSTMASTER (defining one after startup is FATAL, and `CREATE EXTENSION`
//! alone must be enough), and none holds a secret: any role can read a setting's placeholder before the
//! library is loaded.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_void},
    fmt,
};

use pgrx::{
    PgSqlErrorCode, PostgresGucEnum,
    guc::{GucContext, GucFlags, GucRegistry, GucSetting},
    pg_guard, pg_sys,
};
use polign_engine::StoreUrl;

/// The largest number of cells that the option `lists` and the setting `polign.nprobe` take.
pub const MAX_LISTS: i32 = 1_000_000;
/// The smallest recall that one can ask for; 0 means "not set".
pub const TARGET_RECALL_MIN: f64 = 0.5;
/// The recall that is aimed at when neither the session nor the index names one.
pub const TARGET_RECALL_DEFAULT: f64 = 0.95;

/// What becomes of a row that turns up after a farther one has been returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum IterativeScan {
    /// It is held and comes after all others.
    #[name = c"strict_order"]
    Strict,
    /// It is returned at once.
    #[name = c"relaxed_order"]
    Relaxed,
    /// No further cells are opened.
    #[name = c"off"]
    Off,
}

/// How the bucket is addressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum PathStyle {
    /// Path style exactly when an endpoint is configured.
    #[name = c"auto"]
    Auto,
    #[name = c"on"]
    On,
    #[name = c"off"]
    Off,
    // Other spellings of a boolean; `path_style` maps them.
    #[name = c"true"]
    #[hidden = true]
    True,
    #[name = c"false"]
    #[hidden = true]
    False,
}

pub static STORE: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"file:polign_store"));
pub static S3_ENDPOINT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
pub static S3_REGION: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
pub static S3_FORCE_PATH_STYLE: GucSetting<PathStyle> =
    GucSetting::<PathStyle>::new(PathStyle::Auto);
pub static CREDENTIALS_FILE: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c""));
pub static CACHE_DIR: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"pgsql_tmp_polign/pgsql_tmp"));
pub static CACHE_SIZE_MB: GucSetting<i32> = GucSetting::<i32>::new(1024);
pub static FETCH_TIMEOUT_MS: GucSetting<i32> = GucSetting::<i32>::new(30_000);
pub static FETCH_CONCURRENCY: GucSetting<i32> = GucSetting::<i32>::new(64);
pub static DELTA_LIMIT: GucSetting<i32> = GucSetting::<i32>::new(10_000);
pub static TARGET_RECALL: GucSetting<f64> = GucSetting::<f64>::new(0.0);
pub static NPROBE: GucSetting<i32> = GucSetting::<i32>::new(0);
pub static EPSILON: GucSetting<f64> = GucSetting::<f64>::new(3.0);
pub static ITERATIVE_SCAN: GucSetting<IterativeScan> =
    GucSetting::<IterativeScan>::new(IterativeScan::Strict);
pub static MAX_SCAN_TUPLES: GucSetting<i32> = GucSetting::<i32>::new(0);

/// The value of a string setting; an empty one counts as unset.
pub fn text(setting: &GucSetting<Option<CString>>) -> Option<String> {
    setting.get().map(|s| s.to_string_lossy().into_owned()).filter(|s| !s.is_empty())
}

/// Whether path-style addressing is asked for; `None` means exactly when an endpoint is configured.
pub fn path_style() -> Option<bool> {
    match S3_FORCE_PATH_STYLE.get() {
        PathStyle::Auto => None,
        PathStyle::On | PathStyle::True => Some(true),
        PathStyle::Off | PathStyle::False => Some(false),
    }
}

/// Defines the settings. Called once per process.
pub fn register() {
    operator_settings();
    search_settings();
    // SAFETY: the string is static and NUL-terminated.
    unsafe { pg_sys::MarkGUCPrefixReserved(c"polign".as_ptr()) }
}

/// Where the bulk lives and how it is cached: the operator's, from the configuration file.
fn operator_settings() {
    string(
        c"polign.store",
        c"Object store that new indexes put their segments in.",
        c"\"s3://bucket/prefix\" or \"file:path\" (relative to the data directory). An index stays in the store in which it was built.",
        &STORE,
        Some(check_store),
    );
    string(
        c"polign.s3_endpoint",
        c"URL of the S3 service, such as \"https://minio.example:9000\".",
        c"Empty means AWS itself.",
        &S3_ENDPOINT,
        Some(check_endpoint),
    );
    string(
        c"polign.s3_region",
        c"Region of the S3 service.",
        c"Empty means the one that the AWS environment, profile or instance metadata names, else us-east-1.",
        &S3_REGION,
        None,
    );
    GucRegistry::define_enum_guc(
        c"polign.s3_force_path_style",
        c"Whether the bucket is named in the path of a URL and not in its host.",
        c"auto means exactly when polign.s3_endpoint is set.",
        &S3_FORCE_PATH_STYLE,
        GucContext::Sighup,
        GucFlags::default(),
    );
    string(
        c"polign.credentials_file",
        c"AWS credentials file that polign-store reads the keys from.",
        c"Empty means the provider chain of the AWS SDK: environment, profile, web identity, instance metadata.",
        &CREDENTIALS_FILE,
        None,
    );
    string(
        c"polign.cache_dir",
        c"Directory of the segment cache.",
        c"Relative paths are relative to the data directory. The default is skipped by base backups and by pg_rewind.",
        &CACHE_DIR,
        Some(check_not_empty),
    );
    GucRegistry::define_int_guc(
        c"polign.cache_size",
        c"Size of the segment cache on disk.",
        c"One cache serves all databases of the cluster. It can be resized while the server runs.",
        &CACHE_SIZE_MB,
        4,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_MB,
    );
    GucRegistry::define_int_guc(
        c"polign.fetch_timeout",
        c"Time after which reading from or writing to the object store is given up.",
        c"Failed requests are retried within it.",
        &FETCH_TIMEOUT_MS,
        100,
        3_600_000,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"polign.fetch_concurrency",
        c"Largest number of requests to the object store at a time.",
        c"",
        &FETCH_CONCURRENCY,
        1,
        4096,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"polign.delta_limit",
        c"Number of inserted rows that an index keeps before they are moved to its store.",
        c"0 moves them only when polign.flush is called.",
        &DELTA_LIMIT,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::default(),
    );
}

/// How a search trades time for recall: each user's own.
fn search_settings() {
    GucRegistry::define_float_guc_with_hooks(
        c"polign.target_recall",
        c"Recall that a search aims at, from 0.5 to 1.",
        c"0 means that of the index, else 0.95. At 1 every cell is searched and the result is exact.",
        &TARGET_RECALL,
        0.0,
        1.0,
        GucContext::Userset,
        GucFlags::EXPLAIN,
        Some(check_target_recall),
        None,
        None,
    );
    GucRegistry::define_int_guc(
        c"polign.nprobe",
        c"Number of cells that a search opens first.",
        c"0 chooses it from polign.target_recall.",
        &NPROBE,
        0,
        MAX_LISTS,
        GucContext::Userset,
        GucFlags::EXPLAIN,
    );
    GucRegistry::define_float_guc(
        c"polign.epsilon",
        c"Width of the confidence interval by which codes are pruned.",
        c"Larger values refine more rows. Measured on 100,000 passages: against no pruning 1.9 costs two points of recall@10, 2.5 half a point, 3.0 a tenth.",
        &EPSILON,
        0.0,
        100.0,
        GucContext::Userset,
        GucFlags::EXPLAIN,
    );
    GucRegistry::define_enum_guc(
        c"polign.iterative_scan",
        c"What becomes of a row that is found after a farther one was returned.",
        c"strict_order returns it after all others, relaxed_order at once; off opens no cells beyond the first ones.",
        &ITERATIVE_SCAN,
        GucContext::Userset,
        GucFlags::EXPLAIN,
    );
    GucRegistry::define_int_guc(
        c"polign.max_scan_tuples",
        c"Number of rows after which a search opens no further cells.",
        c"0 means no limit.",
        &MAX_SCAN_TUPLES,
        0,
        i32::MAX,
        GucContext::Userset,
        GucFlags::EXPLAIN,
    );
}

fn string(
    name: &'static CStr,
    short: &'static CStr,
    long: &'static CStr,
    setting: &'static GucSetting<Option<CString>>,
    check: pg_sys::GucStringCheckHook,
) {
    // SAFETY: every hook passed here is guarded against panics.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            name,
            short,
            long,
            setting,
            GucContext::Sighup,
            GucFlags::SUPERUSER_ONLY,
            check,
            None,
            None,
        )
    }
}

/// Refuses a value: the detail goes into Postgres' own "invalid value for parameter" message.
fn refuse(detail: &CStr) -> bool {
    // SAFETY: guc.c reads the string when the hook has returned, before it calls another one, and never
    // frees it. Until then every caller keeps it.
    unsafe {
        pg_sys::GUC_check_errcode(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE as i32);
        pg_sys::GUC_check_errdetail_string = detail.as_ptr().cast_mut();
    }
    false
}

/// Refuses a value for a reason that is known only now.
fn refuse_with(reason: &dyn fmt::Display) -> bool {
    thread_local! {
        /// The latest detail, which has to outlive the hook.
        static DETAIL: RefCell<CString> = RefCell::default();
    }
    let mut text = format!("{reason}.");
    if let Some(first) = text.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    DETAIL.with_borrow_mut(|detail| *detail = CString::new(text).unwrap_or_default());
    DETAIL.with_borrow(|detail| refuse(detail))
}

/// # Safety
/// `value` is what Postgres passes to a string check hook.
unsafe fn new_text<'a>(value: *mut *mut c_char) -> Option<&'a str> {
    // SAFETY: a non-null value is a NUL-terminated string that outlives the hook.
    unsafe { if (*value).is_null() { Some("") } else { CStr::from_ptr(*value).to_str().ok() } }
}

#[pg_guard]
unsafe extern "C-unwind" fn check_store(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: called by Postgres as a string check hook.
    let Some(url) = (unsafe { new_text(value) }) else {
        return refuse(c"A store's URL is UTF-8.");
    };
    match StoreUrl::parse(url) {
        Ok(_) => true,
        Err(error) => refuse_with(&error),
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn check_endpoint(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    const FORM: &CStr = c"An endpoint is \"http://host:port\" or \"https://host:port\".";
    // SAFETY: called by Postgres as a string check hook.
    let Some(url) = (unsafe { new_text(value) }) else { return refuse(FORM) };
    if url.is_empty() {
        return true;
    }
    let Some(host) = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://")) else {
        return refuse(FORM);
    };
    (!host.is_empty() && !host.contains(['@', '?', '#'])) || refuse(FORM)
}

#[pg_guard]
unsafe extern "C-unwind" fn check_not_empty(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: called by Postgres as a string check hook.
    unsafe { new_text(value) }.is_some_and(|path| !path.is_empty())
        || refuse(c"The directory must be named.")
}

#[pg_guard]
unsafe extern "C-unwind" fn check_target_recall(
    value: *mut f64,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: Postgres passes a pointer to the new value.
    let value = unsafe { *value };
    value == 0.0
        || value >= TARGET_RECALL_MIN
        || refuse(c"Valid values are 0 (that of the index) and from 0.5 to 1.")
}
