use super::FailureKind;

/// What the operator can do about a failure of the store, beyond waiting for it to pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Keys are missing, wrong, expired or not enough.
    Credentials,
    /// The bucket is in another region than the one that requests are signed for.
    Region,
    /// The clock of this machine is off.
    Clock,
}

impl Advice {
    /// The advice for a kind of failure and the store's own code, which may be empty.
    pub fn on(kind: FailureKind, code: &str) -> Option<Self> {
        // Before the kind: a signature for another region counts as one with wrong keys.
        let region = [
            "AuthorizationHeaderMalformed",
            "PermanentRedirect",
            "TemporaryRedirect",
            "IllegalLocationConstraintException",
        ];
        match kind {
            _ if region.contains(&code) => Some(Self::Region),
            FailureKind::Credentials | FailureKind::Denied => Some(Self::Credentials),
            FailureKind::ClockSkew => Some(Self::Clock),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_from_the_kind_unless_the_code_names_the_region() {
        for (kind, code, advice) in [
            (FailureKind::Credentials, "", Some(Advice::Credentials)),
            (FailureKind::Credentials, "InvalidAccessKeyId", Some(Advice::Credentials)),
            (FailureKind::Denied, "AccessDenied", Some(Advice::Credentials)),
            (FailureKind::ClockSkew, "RequestTimeTooSkewed", Some(Advice::Clock)),
            (FailureKind::Credentials, "AuthorizationHeaderMalformed", Some(Advice::Region)),
            (FailureKind::Invalid, "PermanentRedirect", Some(Advice::Region)),
            (FailureKind::Invalid, "IllegalLocationConstraintException", Some(Advice::Region)),
            (FailureKind::Invalid, "NoSuchBucket", None),
            (FailureKind::Unreachable, "SlowDown", None),
            (FailureKind::Local, "", None),
        ] {
            assert_eq!(Advice::on(kind, code), advice, "{kind:?} {code}");
        }
    }
}
