use std::{error::Error, fmt};

use polign_engine::protocol::{Failure, FailureKind};

/// What kind of trouble it was, and so what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// Network and server errors, stalls, bodies that end early: try again.
    Transient,
    /// The store asks for fewer requests: try again, with fewer at a time.
    Throttled,
    NotFound,
    /// The object is not what it should be: too short.
    Damaged,
    Credentials,
    Denied,
    ClockSkew,
    /// The request cannot work: a wrong bucket, a wrong setting.
    Invalid,
    /// This machine: a file that cannot be read or written.
    Local,
}

const TOOK_TOO_LONG: &str = "took too long";

/// One failed attempt. Holds no secret: codes and messages are the store's own, and it sends none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreError {
    pub class: ErrorClass,
    /// The store's error code, empty if there is none.
    pub code: String,
    pub message: String,
}

impl StoreError {
    pub fn new(class: ErrorClass, code: &str, message: impl Into<String>) -> Self {
        Self { class, code: code.into(), message: message.into() }
    }

    pub fn local(what: &str, cause: impl fmt::Display) -> Self {
        let cause = cause.to_string();
        let message = if cause.is_empty() { what.into() } else { format!("{what}: {cause}") };
        Self::new(ErrorClass::Local, "", message)
    }

    pub fn timed_out(what: &str) -> Self {
        Self::new(ErrorClass::Transient, "", format!("{what} {TOOK_TOO_LONG}"))
    }

    pub fn is_timeout(&self) -> bool {
        self.message.ends_with(TOOK_TOO_LONG)
    }

    pub fn is_retryable(&self) -> bool {
        matches!(self.class, ErrorClass::Transient | ErrorClass::Throttled)
    }

    /// The failure as it is reported to a backend.
    pub fn into_failure(self, url: &str, object: &str, detail: String) -> Failure {
        let kind = match self.class {
            ErrorClass::Transient | ErrorClass::Throttled => FailureKind::Unreachable,
            ErrorClass::NotFound => FailureKind::NotFound,
            ErrorClass::Damaged => FailureKind::Damaged,
            ErrorClass::Credentials => FailureKind::Credentials,
            ErrorClass::Denied => FailureKind::Denied,
            ErrorClass::ClockSkew => FailureKind::ClockSkew,
            ErrorClass::Invalid => FailureKind::Invalid,
            ErrorClass::Local => FailureKind::Local,
        };
        let (object, url) = (object.into(), url.into());
        Failure { kind, code: self.code, message: self.message, detail, object, url }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code.as_str() {
            "" => f.write_str(&self.message),
            code => write!(f, "{code}: {}", self.message),
        }
    }
}

impl Error for StoreError {}

/// An error and its causes in one line, without repeating what a cause already said.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
