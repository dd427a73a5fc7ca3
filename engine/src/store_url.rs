//! What a store's URL and an object's key may look like. Nothing here speaks to a store: the setting
//! `polign.store` and the store process refuse the same texts for the same reasons.

use std::{fmt, path::PathBuf};

/// Longest key of an object below its store, in bytes. S3 takes 1,024 together with the prefix.
const LONGEST_KEY: usize = 900;

/// A parsed store URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// `file:path`; a relative path starts at the working directory, which is the data directory.
    File(PathBuf),
    /// `s3://bucket/prefix`; the prefix is empty or ends in a slash.
    S3 { bucket: String, prefix: String },
}

/// What is wrong with a URL or key, and what is allowed. Does not repeat a URL: who mistook it for a
/// place for keys would find them in a log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("a store is \"s3://bucket/prefix\" or \"file:path\"")]
    Scheme,
    #[error(
        "a store's URL holds a bucket and a prefix only; keys belong into polign.credentials_file"
    )]
    Extras,
    #[error("the name of a bucket has 3 to 63 characters: letters, digits, '.', '-', '_'")]
    Bucket,
    #[error(
        "the prefix in a store's URL is at most {LONGEST_KEY} bytes of steps of letters, digits, '.', \
         '-', '_', '=', none of which is empty or begins with '.'"
    )]
    Prefix,
    #[error("the path in a store's URL is not empty and does not climb with \"..\"")]
    Path,
    #[error("the object key \"{0}\" is not a relative path of letters, digits, '.', '-', '_', '='")]
    Key(String),
}

impl StoreUrl {
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        if let Some(path) = url.strip_prefix("file:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            let climbs = path.split('/').any(|step| step == "..");
            if path.is_empty() || climbs || path.contains('\0') {
                return Err(UrlError::Path);
            }
            return Ok(Self::File(path.into()));
        }
        let rest = url.strip_prefix("s3://").ok_or(UrlError::Scheme)?;
        if rest.contains(['@', '?', '#']) {
            return Err(UrlError::Extras);
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(letter) {
            return Err(UrlError::Bucket);
        }
        let prefix = prefix.trim_matches('/');
        if !prefix.is_empty() {
            check_key(prefix).map_err(|_| UrlError::Prefix)?;
        }
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(Self::S3 { bucket: bucket.into(), prefix })
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

/// Whether a key can be an object's: relative, no empty, hidden or climbing step, plain characters.
pub fn check_key(key: &str) -> Result<(), UrlError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '=');
    let step = |step: &str| !step.is_empty() && !step.starts_with('.') && step.chars().all(plain);
    if key.len() <= LONGEST_KEY && key.split('/').all(step) {
        Ok(())
    } else {
        Err(UrlError::Key(key.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed() {
        let s3 = |bucket: &str, prefix: &str| StoreUrl::S3 {
            bucket: bucket.into(),
            prefix: prefix.into(),
        };
        assert_eq!(StoreUrl::parse("s3://bucket"), Ok(s3("bucket", "")));
        assert_eq!(StoreUrl::parse("s3://bucket/"), Ok(s3("bucket", "")));
        assert_eq!(StoreUrl::parse("s3://my.bucket/a/b/"), Ok(s3("my.bucket", "a/b/")));
        assert_eq!(StoreUrl::parse("file:polign_store"), Ok(StoreUrl::File("polign_store".into())));
        assert_eq!(StoreUrl::parse("file:///var/x"), Ok(StoreUrl::File("/var/x".into())));
        assert_eq!(StoreUrl::parse("file:a b@c"), Ok(StoreUrl::File("a b@c".into())));
    }

    #[test]
    fn wrong_urls_are_errors_that_say_what_is_wrong() {
        let long = format!("s3://bucket/{}", "a".repeat(901));
        let long_bucket = format!("s3://{}", "a".repeat(64));
        for (error, urls) in [
            (UrlError::Scheme, &["", "bucket", "http://x", "s3:/x", "S3://bucket", "files:x"][..]),
            (UrlError::Bucket, &["s3://", "s3:///x", "s3://ab", "s3://a b c", &long_bucket][..]),
            (
                UrlError::Prefix,
                &[
                    "s3://bucket/../x",
                    "s3://bucket/a b",
                    "s3://bucket/a//b",
                    "s3://bucket/.x",
                    "s3://bucket/%41",
                    "s3://bucket/\u{e9}",
                    &long,
                ][..],
            ),
            (
                UrlError::Extras,
                &["s3://key:secret@bucket", "s3://bucket/p?x=1", "s3://bucket#x"][..],
            ),
            (UrlError::Path, &["file:", "file://", "file:../x", "file:a/../../x", "file:a\0b"][..]),
        ] {
            for url in urls {
                assert_eq!(StoreUrl::parse(url), Err(error.clone()), "{url}");
                assert!(!error.to_string().contains("secret"));
            }
        }
    }

    #[test]
    fn keys_that_leave_the_store_are_errors() {
        for key in ["a", "ab/cd/ef.seg", "owner/0123", "a=b"] {
            assert!(check_key(key).is_ok(), "{key}");
        }
        let long = "a".repeat(901);
        for key in ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a\0b", "a b", &long] {
            assert!(check_key(key).is_err(), "{key}");
        }
    }
}
