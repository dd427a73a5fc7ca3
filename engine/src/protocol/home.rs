use std::{io, os::unix::fs::MetadataExt, path::Path};

use serde::{Deserialize, Serialize};

/// A cluster's data directory, by what is the same under every path to it. The client's second frame,
/// from protocol version 2 on; its encoding is the same in every later version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    device: u64,
    inode: u64,
}

impl Home {
    /// The first version of the protocol whose clients say where they are at home.
    pub const SINCE: u32 = 2;

    pub fn of(data_directory: &Path) -> io::Result<Self> {
        let metadata = data_directory.metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_is_the_same_under_every_path_and_no_other() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let link = other.path().join("link");
        std::os::unix::fs::symlink(one.path(), &link).unwrap();
        let home = Home::of(one.path()).unwrap();
        assert_eq!(Home::of(&link).unwrap(), home);
        assert_eq!(
            Home::of(&one.path().join("../.").join(one.path().file_name().unwrap())).unwrap(),
            home
        );
        assert_ne!(Home::of(other.path()).unwrap(), home);
        assert!(Home::of(&other.path().join("none")).is_err());
    }
}
