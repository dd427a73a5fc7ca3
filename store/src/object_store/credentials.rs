//! The keys in a credentials file.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Mutex,
};

use aws_config::profile::ProfileFileCredentialsProvider;
use aws_runtime::env_config::file::{EnvConfigFileKind, EnvConfigFiles};
use aws_sdk_s3::config::ProvideCredentials;

use crate::log::warn;

/// Asked for at every connection, so that changed keys are used.
pub(super) fn of_file(file: &Path) -> impl ProvideCredentials + use<> {
    warn_of_others(file);
    let files = EnvConfigFiles::builder().with_file(EnvConfigFileKind::Credentials, file).build();
    ProfileFileCredentialsProvider::builder().profile_files(files).build()
}

/// Says once that other users can get at the keys. They are used all the same: who can read them has
/// them already.
fn warn_of_others(file: &Path) {
    static TOLD: Mutex<Option<(PathBuf, u32)>> = Mutex::new(None);
    let Ok(metadata) = file.metadata() else { return };
    let mode = metadata.permissions().mode() & 0o7777;
    let open = (mode & 0o077 != 0).then(|| (file.to_path_buf(), mode));
    let mut told = TOLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *told != open {
        if open.is_some() {
            let file = file.display();
            warn(&format!(
                "the credentials file \"{file}\" is open to group or others (mode {mode:04o}); \
                 it should have mode 0600"
            ));
        }
        *told = open;
    }
}
