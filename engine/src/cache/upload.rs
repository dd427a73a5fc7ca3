//! Files on their way to the store.

use std::path::{Path, PathBuf};

/// A file that a backend made for the store process to upload. It is removed when this is dropped:
/// after a success the store process has removed it already, and a failed or abandoned upload is not
/// offered again. Until then it stays, whatever becomes of the store process: the next one is asked to
/// upload it again.
#[derive(Debug)]
pub struct UploadFile {
    path: PathBuf,
}

impl UploadFile {
    /// Takes charge of the file of this path, which need not be there yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for UploadFile {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the store process when it is old.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upload_file_goes_with_its_upload_however_that_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.seg");
        let make = || {
            let file = UploadFile::new(path.clone());
            std::fs::write(file.path(), "x").unwrap();
            file
        };
        let failed = make();
        assert!(path.exists());
        drop(failed);
        assert!(!path.exists());
        let uploaded = make();
        std::fs::remove_file(&path).unwrap();
        drop(uploaded);
        drop(UploadFile::new(path.clone()));
        let cancelled = std::panic::catch_unwind(|| {
            let _file = make();
            std::panic::resume_unwind(Box::new("cancelled"));
        });
        assert!(cancelled.is_err() && !path.exists());
    }
}
