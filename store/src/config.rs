//! The configuration: lines of JSON on standard input, the first at the start, later ones when a
//! setting changed.

use std::path::PathBuf;

use serde::Deserialize;

use crate::object_store::S3Settings;

fn default_cache_bytes() -> u64 {
    1 << 30
}

fn default_fetch_timeout() -> u64 {
    30_000
}

fn default_concurrency() -> u32 {
    64
}

/// One line. Unknown fields are ignored, so that a newer library can start an older program.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Config {
    /// Relative to the working directory, which is the data directory.
    pub cache_dir: PathBuf,
    #[serde(default = "default_cache_bytes")]
    pub cache_size_bytes: u64,
    #[serde(default)]
    pub s3_endpoint: Option<String>,
    #[serde(default)]
    pub s3_region: Option<String>,
    #[serde(default)]
    pub s3_force_path_style: Option<bool>,
    #[serde(default)]
    pub credentials_file: Option<PathBuf>,
    #[serde(default = "default_fetch_timeout")]
    pub fetch_timeout_ms: u64,
    #[serde(default = "default_concurrency")]
    pub fetch_concurrency: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("a line of configuration cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the configuration names no cache directory")]
    NoCacheDirectory,
}

impl Config {
    pub fn parse(line: &str) -> Result<Self, ConfigError> {
        let config: Self = serde_json::from_str(line)?;
        if config.cache_dir.as_os_str().is_empty() {
            return Err(ConfigError::NoCacheDirectory);
        }
        Ok(config)
    }

    pub fn s3(&self) -> S3Settings {
        let filled = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        S3Settings {
            endpoint: filled(&self.s3_endpoint),
            region: filled(&self.s3_region),
            path_style: self.s3_force_path_style,
            credentials_file: self
                .credentials_file
                .clone()
                .filter(|file| !file.as_os_str().is_empty()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_needs_the_directory_only() {
        let config = Config::parse(r#"{"cache_dir":"c","later":1}"#).unwrap();
        assert_eq!(config.cache_size_bytes, 1 << 30);
        assert_eq!((config.fetch_timeout_ms, config.fetch_concurrency), (30_000, 64));
        assert_eq!(config.s3(), S3Settings::default());
    }

    #[test]
    fn empty_texts_count_as_unset() {
        let line = r#"{"cache_dir":"c","s3_endpoint":"","s3_region":"r","credentials_file":""}"#;
        let s3 = Config::parse(line).unwrap().s3();
        assert_eq!((s3.endpoint, s3.region.as_deref()), (None, Some("r")));
        assert_eq!(s3.credentials_file, None);
    }

    #[test]
    fn wrong_lines_are_errors() {
        for line in ["", "{}", r#"{"cache_dir":""}"#, r#"{"cache_dir":"c","fetch_timeout_ms":-1}"#]
        {
            assert!(Config::parse(line).is_err(), "{line}");
        }
    }
}
