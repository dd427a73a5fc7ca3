//! Errors as Postgres shows them: SQLSTATE, message, detail, hint.

use pgrx::{PgSqlErrorCode, pg_sys::panic::ErrorReport};
use polign_engine::{
    protocol::{Advice, ClientError, Failure, FailureKind},
    segment::SourceError,
};

/// An error on its way to `ereport(ERROR)`. Rust code returns it; the callback that Postgres called
/// raises it at its outermost level, so that every destructor in between runs.
#[derive(Debug)]
pub struct Error {
    pub code: PgSqlErrorCode,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// With `RUST_BACKTRACE` in the server's environment, pgrx would append a backtrace to the DETAIL of
/// every error. A developer who wants that sets `RUST_LIB_BACKTRACE`.
pub fn no_backtraces_in_messages() {
    const VARIABLE: &str = "RUST_LIB_BACKTRACE";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: called while the library is loaded, when the process has one thread.
        unsafe { std::env::set_var(VARIABLE, "0") }
    }
}

impl Error {
    pub fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), detail: None, hint: None }
    }

    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    fn report(self) -> ErrorReport {
        let mut report = ErrorReport::new(self.code, self.message, "polign");
        if let Some(detail) = self.detail {
            report = report.set_detail(detail);
        }
        if let Some(hint) = self.hint {
            report = report.set_hint(hint);
        }
        report
    }

    /// Raises the error in Postgres. Unwinds as far as the enclosing `#[pg_guard]`.
    pub fn raise(self) -> ! {
        self.report().report(pgrx::PgLogLevel::ERROR);
        unreachable!("an error at level ERROR does not return")
    }

    /// Logs the error as a WARNING and goes on.
    pub fn warn(self) {
        self.report().report(pgrx::PgLogLevel::WARNING);
    }
}

/// What a callback does with the result of its Rust half.
pub trait OrRaise<T> {
    fn or_raise(self) -> T;
}

impl<T> OrRaise<T> for Result<T> {
    fn or_raise(self) -> T {
        self.unwrap_or_else(|error| error.raise())
    }
}

const REINDEX: &str = "Rebuild the index with REINDEX.";
const CREDENTIALS: &str = "Check \"polign.credentials_file\", or what the AWS provider chain finds in \
     the environment of the server.";
const REGION: &str = "Set \"polign.s3_region\" to the region of the bucket.";
const CLOCK: &str = "Check the clock of this machine.";
const LATER: &str =
    "Try again when the store answers. How long it is waited for is \"polign.fetch_timeout\".";
const FEWER: &str =
    "The store asks for fewer requests. Try again later, or lower \"polign.fetch_concurrency\".";
const STORE_PROCESS: &str = "The server log says why polign-store does not run.";

/// What to do about a failure.
fn hint_for(kind: FailureKind, code: &str) -> Option<&'static str> {
    match Advice::on(kind, code) {
        Some(Advice::Credentials) => Some(CREDENTIALS),
        Some(Advice::Region) => Some(REGION),
        Some(Advice::Clock) => Some(CLOCK),
        None if kind != FailureKind::Unreachable => None,
        None if code.starts_with("SlowDown") => Some(FEWER),
        None => Some(LATER),
    }
}

fn io_error(
    verb: &str,
    object: &str,
    store: &str,
    code: Option<&str>,
    cause: String,
    hint: Option<&str>,
) -> Error {
    let place = match (verb, object) {
        (_, "") => format!("could not use store \"{store}\""),
        ("write", _) => format!("could not write \"{object}\" to store \"{store}\""),
        (verb, _) => format!("could not {verb} \"{object}\" from store \"{store}\""),
    };
    let detail = match code {
        Some(code) if !cause.contains(code) => format!("{code}: {cause}"),
        _ => cause,
    };
    let error = Error::new(PgSqlErrorCode::ERRCODE_IO_ERROR, place).detail(detail);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

fn missing(object: &str, store: &str) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("object \"{object}\" is missing in store \"{store}\""),
    )
    .hint(REINDEX)
}

fn damaged(object: &str, store: &str, cause: String) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("object \"{object}\" in store \"{store}\" is damaged"),
    )
    .detail(cause)
    .hint(REINDEX)
}

impl From<SourceError> for Error {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::Interrupted => {
                Self::new(PgSqlErrorCode::ERRCODE_QUERY_CANCELED, "canceling statement")
            }
            SourceError::Store { kind: FailureKind::InUse, cause, .. } => in_use(cause),
            SourceError::Store { object, store, kind, code, cause, after } => {
                let cause = format!("{cause} (after {:.1} s)", after.as_secs_f64());
                let hint = hint_for(kind, code.as_deref().unwrap_or_default());
                io_error("read", &object, &store, code.as_deref(), cause, hint)
            }
            SourceError::Missing { object, store } => missing(&object, &store),
            SourceError::WrongStore { object, store, recorded } => Self::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("store \"{store}\" is not the one that the index was built on"),
            )
            .detail(format!(
                "Object \"{object}\" is missing; the index was built on \"{recorded}\"."
            ))
            .hint("Make the original store reachable, or rebuild the index with REINDEX."),
            SourceError::Damaged { object, store, part, cause } => {
                damaged(&object, &store, format!("{part}: {cause}"))
            }
            SourceError::Unavailable { cause } => unavailable(cause),
        }
    }
}

/// Another server has the cache directory, and its store process does not serve this one.
fn in_use(cause: String) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
        "the cache directory is used by another server",
    )
    .detail(cause)
    .hint("Set \"polign.cache_dir\" to a directory that no other server uses.")
}

fn unavailable(cause: String) -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_SYSTEM_ERROR, "polign-store does not answer")
        .detail(cause)
        .hint(STORE_PROCESS)
}

impl Error {
    /// The error for a request that the store process could not carry out. `verb` is what was to be
    /// done with the object: "read", "write" or "delete".
    pub fn from_failure(verb: &str, failure: Failure) -> Self {
        let Failure { kind, code, message, detail, object, url } = failure;
        let cause = match detail.is_empty() {
            true => message,
            false if detail.contains(&message) => detail,
            false => format!("{message}: {detail}"),
        };
        let hint = hint_for(kind, &code);
        match kind {
            FailureKind::NotFound => return missing(&object, &url),
            FailureKind::InUse => return in_use(cause),
            FailureKind::Damaged => return damaged(&object, &url, cause),
            FailureKind::Invalid => {
                let error = Self::new(
                    PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
                    format!("store \"{url}\" cannot be used"),
                )
                .detail(cause);
                return match hint {
                    Some(hint) => error.hint(hint),
                    None => error,
                };
            }
            _ => {}
        }
        let code = Some(code.as_str()).filter(|code| !code.is_empty());
        io_error(verb, &object, &url, code, cause, hint)
    }
}

impl From<ClientError> for Error {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Interrupted(_) => SourceError::Interrupted.into(),
            ClientError::Failed(failure) => Self::from_failure("read", *failure),
            ClientError::Version { .. } => Self::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                "polign-store is of another version than the library of this session",
            )
            .detail(error.to_string())
            .hint("Reconnect; if that does not help, install library and program together."),
            error => unavailable(error.to_string()),
        }
    }
}
