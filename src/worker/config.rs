//! What the supervisor tells `polign-store`: one line of JSON at the start, another after each reload.

use serde::Serialize;

use crate::{guc, places};

/// Size of a cache that is where it was not meant to be.
const FALLBACK_MB: i32 = 16;

/// The configuration of the store process. Never a secret: the process reads those itself, from the
/// credentials file or through the provider chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoreConfig {
    pub cache_dir: String,
    pub cache_size_bytes: u64,
    pub s3_endpoint: Option<String>,
    pub s3_region: Option<String>,
    pub s3_force_path_style: Option<bool>,
    pub credentials_file: Option<String>,
    pub fetch_timeout_ms: u64,
    pub fetch_concurrency: u32,
}

impl StoreConfig {
    /// The configuration that the settings of this process describe.
    pub fn from_settings() -> Self {
        let cache_dir = places::cache_dir();
        let size_mb = if cache_dir == places::fallback_cache_dir() {
            FALLBACK_MB.min(guc::CACHE_SIZE_MB.get())
        } else {
            guc::CACHE_SIZE_MB.get()
        };
        Self {
            cache_dir: cache_dir.to_string_lossy().into_owned(),
            cache_size_bytes: size_mb as u64 * (1 << 20),
            s3_endpoint: guc::text(&guc::S3_ENDPOINT),
            s3_region: guc::text(&guc::S3_REGION),
            s3_force_path_style: guc::path_style(),
            credentials_file: guc::text(&guc::CREDENTIALS_FILE),
            fetch_timeout_ms: guc::FETCH_TIMEOUT_MS.get() as u64,
            fetch_concurrency: guc::FETCH_CONCURRENCY.get() as u32,
        }
    }

    /// The line that is written to the store process.
    pub fn line(&self) -> Vec<u8> {
        // A struct of strings and numbers always has a JSON form.
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }
}
