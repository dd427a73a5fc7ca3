//! What an S3 error means for us.

use std::error::Error;

use aws_sdk_s3::{
    error::{ProvideErrorMetadata, SdkError},
    primitives::ByteStreamError,
};

use super::{
    StoreError,
    error::{ErrorClass, chain},
};

/// `response`: the HTTP status, if there was a response.
pub(super) fn classify<E>(error: SdkError<E>) -> StoreError
where
    E: ProvideErrorMetadata + Error + Send + Sync + 'static,
{
    let status = error.raw_response().map(|response| response.status().as_u16());
    match &error {
        SdkError::ServiceError(service) => {
            let code = service.err().code().or_else(|| code_of(status)).unwrap_or_default();
            let message = service.err().message().unwrap_or_default();
            let status = status.unwrap_or_default();
            let message = match (message, code) {
                ("", "") => format!("the store answered with HTTP status {status}"),
                ("", code) => code.to_owned(),
                (message, _) => message.to_owned(),
            };
            StoreError::new(class_of(status, code), code, message)
        }
        SdkError::TimeoutError(_) => StoreError::timed_out("a request"),
        SdkError::DispatchFailure(failure) if failure.is_io() || failure.is_timeout() => {
            transient("the store cannot be reached", &error)
        }
        SdkError::DispatchFailure(_) | SdkError::ConstructionFailure(_) => before_sending(&error),
        // A response that is no S3 response: a proxy's page, a body cut short.
        _ => match status {
            Some(404) => StoreError::new(ErrorClass::NotFound, "", "there is no such object"),
            _ => transient("the store's answer cannot be read", &error),
        },
    }
}

fn transient(what: &str, error: &(dyn Error + 'static)) -> StoreError {
    StoreError::new(ErrorClass::Transient, "", format!("{what}: {}", causes(error)))
}

/// Failures before a request was sent are of the credentials, or of the connection.
fn before_sending(error: &(dyn Error + 'static)) -> StoreError {
    let text = causes(error);
    let lower = text.to_ascii_lowercase();
    if lower.contains("credential") || lower.contains("identity") || lower.contains("profile") {
        let message = format!("no usable credentials: {text}");
        return StoreError::new(ErrorClass::Credentials, "", message);
    }
    transient("the store cannot be reached", error)
}

fn causes(error: &(dyn Error + 'static)) -> String {
    // The outermost text only says in which phase it failed.
    error.source().map_or_else(|| error.to_string(), chain)
}

pub(super) fn body_failed(error: ByteStreamError) -> StoreError {
    transient("the object's body ended early", &error)
}

/// The code of an answer to HEAD, which has no body to name it.
fn code_of(status: Option<u16>) -> Option<&'static str> {
    (status == Some(301)).then_some("PermanentRedirect")
}

fn class_of(status: u16, code: &str) -> ErrorClass {
    match code {
        "SlowDown"
        | "SlowDownRead"
        | "SlowDownWrite"
        | "Throttling"
        | "ThrottlingException"
        | "RequestLimitExceeded"
        | "TooManyRequests"
        | "ServiceUnavailable" => ErrorClass::Throttled,
        "RequestTimeTooSkewed" | "RequestExpired" => ErrorClass::ClockSkew,
        "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "ExpiredToken"
        | "InvalidToken"
        | "TokenRefreshRequired"
        | "AuthorizationHeaderMalformed"
        | "InvalidSecurity"
        | "NotSignedUp" => ErrorClass::Credentials,
        "AccessDenied" | "AllAccessDisabled" | "AccountProblem" => ErrorClass::Denied,
        "NoSuchKey" | "NotFound" => ErrorClass::NotFound,
        "NoSuchBucket" | "InvalidBucketName" | "PermanentRedirect" | "MethodNotAllowed" => {
            ErrorClass::Invalid
        }
        // The range starts after the object's end.
        "InvalidRange" => ErrorClass::Damaged,
        "RequestTimeout"
        | "InternalError"
        | "OperationAborted"
        | "ConditionalRequestConflict"
        | "IncompleteBody" => ErrorClass::Transient,
        _ => match status {
            404 => ErrorClass::NotFound,
            401 | 403 => ErrorClass::Denied,
            416 => ErrorClass::Damaged,
            429 | 503 => ErrorClass::Throttled,
            408 | 500.. => ErrorClass::Transient,
            _ => ErrorClass::Invalid,
        },
    }
}

/// Whether the store does not know conditional puts.
pub(super) fn is_unsupported(error: &StoreError) -> bool {
    matches!(error.code.as_str(), "NotImplemented" | "InvalidArgument")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_decide_and_statuses_fill_in() {
        for (status, code, class) in [
            (503, "SlowDown", ErrorClass::Throttled),
            (503, "", ErrorClass::Throttled),
            (500, "InternalError", ErrorClass::Transient),
            (502, "", ErrorClass::Transient),
            (403, "RequestTimeTooSkewed", ErrorClass::ClockSkew),
            (403, "SignatureDoesNotMatch", ErrorClass::Credentials),
            (403, "InvalidAccessKeyId", ErrorClass::Credentials),
            (400, "ExpiredToken", ErrorClass::Credentials),
            (403, "AccessDenied", ErrorClass::Denied),
            (403, "", ErrorClass::Denied),
            (404, "NoSuchKey", ErrorClass::NotFound),
            (404, "NoSuchBucket", ErrorClass::Invalid),
            (404, "", ErrorClass::NotFound),
            (416, "InvalidRange", ErrorClass::Damaged),
            (400, "AuthorizationHeaderMalformed", ErrorClass::Credentials),
            (301, "PermanentRedirect", ErrorClass::Invalid),
            (400, "IllegalLocationConstraintException", ErrorClass::Invalid),
            (400, "", ErrorClass::Invalid),
        ] {
            assert_eq!(class_of(status, code), class, "{status} {code}");
        }
    }
}
