//! A directory as an object store.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, ErrorKind, Read, Write},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use polign_engine::{
    ObjectId,
    protocol::{ListedObject, ListedUpload, UploadName},
};

use super::{
    Created, ErrorClass, Listing, ObjectStore, Source, StoreError, StoreResult, Unfinished,
    file_names::{key_of, path_of},
};

const TEMPORARY_PREFIX: &str = ".new-";
const COPY_STEP: usize = 1 << 20;

/// A store in a local directory, which is made when something is first put there. An object appears
/// by an atomic rename after its bytes are on disk.
#[derive(Debug, Clone)]
pub struct FileStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    url: String,
}

impl FileStore {
    pub fn new(root: PathBuf) -> Self {
        let url = format!("file:{}", root.display());
        Self { inner: Arc::new(Inner { root, url }) }
    }

    /// Runs blocking file work off the reactor.
    fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> StoreResult<T> + Send + 'static,
    ) -> BoxFuture<'_, StoreResult<T>> {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move {
            tokio::task::spawn_blocking(move || work(&inner))
                .await
                .unwrap_or_else(|error| Err(StoreError::local("file access failed", error)))
        })
    }
}

impl ObjectStore for FileStore {
    fn url(&self) -> &str {
        &self.inner.url
    }

    fn get_range<'a>(
        &'a self,
        key: &'a str,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'a, StoreResult<Bytes>> {
        let key = key.to_owned();
        self.run(move |inner| {
            let file = inner.open(&key)?;
            let mut bytes = vec![0; len as usize];
            file.read_exact_at(&mut bytes, offset).map_err(|error| read_error(&error))?;
            Ok(bytes.into())
        })
    }

    fn get<'a>(&'a self, key: &'a str, limit: u64) -> BoxFuture<'a, StoreResult<Bytes>> {
        let key = key.to_owned();
        self.run(move |inner| {
            let mut bytes = Vec::new();
            let file = inner.open(&key)?;
            file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| read_error(&error))?;
            if bytes.len() as u64 > limit {
                let message = format!("the object is longer than {limit} bytes");
                return Err(StoreError::new(ErrorClass::Damaged, "", message));
            }
            Ok(bytes.into())
        })
    }

    fn len<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<Option<u64>>> {
        let key = key.to_owned();
        self.run(move |inner| match inner.open(&key) {
            Ok(file) => Ok(Some(file.metadata().map_err(|error| read_error(&error))?.len())),
            Err(error) if error.class == ErrorClass::NotFound => Ok(None),
            Err(error) => Err(error),
        })
    }

    fn put<'a>(&'a self, key: &'a str, source: Source) -> BoxFuture<'a, StoreResult<()>> {
        let key = key.to_owned();
        self.run(move |inner| {
            inner.write(&key, &source, |temporary, path| fs::rename(temporary, path))
        })
    }

    fn put_if_absent<'a>(
        &'a self,
        key: &'a str,
        bytes: Bytes,
    ) -> BoxFuture<'a, StoreResult<Created>> {
        let key = key.to_owned();
        self.run(move |inner| {
            let mut created = Created::New;
            inner.write(&key, &Source::Bytes(bytes), |temporary, path| {
                // A link never replaces what is there.
                match fs::hard_link(temporary, path) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                        created = Created::Existed;
                    }
                    outcome => outcome?,
                }
                fs::remove_file(temporary)
            })?;
            Ok(created)
        })
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, StoreResult<()>> {
        let key = key.to_owned();
        self.run(move |inner| match fs::remove_file(inner.path(&key)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(StoreError::local("the object cannot be deleted", error))
            }
            _ => Ok(()),
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        limit: usize,
    ) -> BoxFuture<'a, StoreResult<Listing>> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        self.run(move |inner| {
            let mut objects = Vec::new();
            inner.walk(&inner.root, "", &prefix, &mut |file| {
                if !file.name.starts_with('.') {
                    let (key, len, modified_ms) = (file.key(), file.len, file.modified_ms);
                    objects.push(ListedObject { key, len, modified_ms });
                }
            })?;
            objects.sort_by(|a, b| a.key.cmp(&b.key));
            if let Some(after) = after {
                objects.retain(|object| object.key > after);
            }
            let more = objects.len() > limit;
            objects.truncate(limit);
            Ok(Listing { objects, more, now_ms: Some(millis(SystemTime::now())) })
        })
    }

    /// The temporary files of writers that were killed. Their key is the one of the directory.
    fn list_uploads<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a UploadName>,
        limit: usize,
    ) -> BoxFuture<'a, StoreResult<Unfinished>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        self.run(move |inner| {
            let mut uploads = Vec::new();
            inner.walk(&inner.root, "", &prefix, &mut |file| {
                if file.name.starts_with(TEMPORARY_PREFIX) {
                    let name = UploadName { key: file.directory.into(), id: file.name.into() };
                    uploads.push(ListedUpload { name, len: file.len, begun_ms: file.modified_ms });
                }
            })?;
            uploads.retain(|upload| after.as_ref().is_none_or(|after| upload.name > *after));
            uploads.sort_by(|a, b| a.name.cmp(&b.name));
            let more = uploads.len() > limit;
            uploads.truncate(limit);
            Ok(Unfinished { uploads, more })
        })
    }

    fn abort_upload<'a>(&'a self, upload: &'a UploadName) -> BoxFuture<'a, StoreResult<()>> {
        let UploadName { key, id } = upload.clone();
        self.run(move |inner| {
            let unique = id.strip_prefix(TEMPORARY_PREFIX).map(str::parse::<ObjectId>);
            if !matches!(unique, Some(Ok(_))) {
                let message = "this is no name of an upload";
                return Err(StoreError::new(ErrorClass::Invalid, "", message));
            }
            match fs::remove_file(inner.path(&key).join(id)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    Err(StoreError::local("the upload cannot be deleted", error))
                }
                _ => Ok(()),
            }
        })
    }
}

/// A file that a walk has come to.
struct Found<'a> {
    /// The key of its directory, and its name there.
    directory: &'a str,
    name: &'a str,
    len: u64,
    modified_ms: i64,
}

impl Found<'_> {
    fn key(&self) -> String {
        below(self.directory, self.name)
    }
}

fn below(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

impl Inner {
    fn path(&self, key: &str) -> PathBuf {
        self.root.join(path_of(key))
    }

    fn open(&self, key: &str) -> StoreResult<File> {
        File::open(self.path(key)).map_err(|error| read_error(&error))
    }

    /// Writes a temporary file beside the object's place and lets `publish` move it there.
    fn write(
        &self,
        key: &str,
        source: &Source,
        publish: impl FnOnce(&Path, &Path) -> io::Result<()>,
    ) -> StoreResult<()> {
        let failed = |error: io::Error| StoreError::local("the object cannot be written", error);
        let path = self.path(key);
        let parent = path.parent().unwrap_or(&self.root);
        make_directories(parent).map_err(failed)?;
        let unique =
            ObjectId::random().map_err(|error| failed(io::Error::other(error.to_string())))?;
        let temporary = parent.join(format!("{TEMPORARY_PREFIX}{unique}"));
        let outcome = write_file(&temporary, source)
            .and_then(|()| publish(&temporary, &path))
            .and_then(|()| File::open(parent)?.sync_all());
        if outcome.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        outcome.map_err(failed)
    }

    fn walk(
        &self,
        path: &Path,
        directory: &str,
        prefix: &str,
        visit: &mut dyn FnMut(Found<'_>),
    ) -> StoreResult<()> {
        let failed = |error| StoreError::local("the store cannot be listed", error);
        let entries = match fs::read_dir(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let name = &key_of(name)[..];
            let metadata = match entry.metadata() {
                // Deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                metadata => metadata.map_err(failed)?,
            };
            let key = below(directory, name);
            let on_the_way = prefix.starts_with(&format!("{key}/"));
            if metadata.is_dir() && name.starts_with('.') {
                continue;
            }
            if metadata.is_dir() && (on_the_way || format!("{key}/").starts_with(prefix)) {
                self.walk(&entry.path(), &key, prefix, visit)?;
            } else if metadata.is_file() && key.starts_with(prefix) {
                let modified_ms = metadata.modified().map_or(0, millis);
                visit(Found { directory, name, len: metadata.len(), modified_ms });
            }
        }
        Ok(())
    }
}

fn millis(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

fn read_error(error: &io::Error) -> StoreError {
    match error.kind() {
        ErrorKind::NotFound => StoreError::new(ErrorClass::NotFound, "", "there is no such object"),
        ErrorKind::UnexpectedEof => {
            StoreError::new(ErrorClass::Damaged, "", "the object is shorter than it should be")
        }
        _ => StoreError::local("the object cannot be read", error),
    }
}

fn write_file(path: &Path, source: &Source) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    match source {
        Source::Bytes(bytes) => file.write_all(bytes)?,
        Source::File { file: from, len } => {
            let mut buffer = vec![0; COPY_STEP];
            let mut offset = 0;
            while offset < *len {
                let step = (*len - offset).min(COPY_STEP as u64) as usize;
                from.read_exact_at(&mut buffer[..step], offset)?;
                file.write_all(&buffer[..step])?;
                offset += step as u64;
            }
        }
    }
    file.sync_all()
}

/// Makes a directory and its parents, each of them durable.
fn make_directories(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        make_directories(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => File::open(parent.unwrap_or(Path::new(".")))?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(dir: &tempfile::TempDir) -> FileStore {
        FileStore::new(dir.path().join("deep/store"))
    }

    #[tokio::test]
    async fn objects_come_back_by_range() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir);
        store.put("aa/x.seg", Source::Bytes("0123456789".into())).await.unwrap();
        assert_eq!(&store.get_range("aa/x.seg", 3, 4).await.unwrap()[..], b"3456");
        assert_eq!(&store.get("aa/x.seg", 10).await.unwrap()[..], b"0123456789");
        assert_eq!(store.len("aa/x.seg").await.unwrap(), Some(10));
        assert_eq!(store.len("aa/y.seg").await.unwrap(), None);
        let class = |error: StoreError| error.class;
        assert_eq!(store.get_range("y", 0, 1).await.map_err(class), Err(ErrorClass::NotFound));
        let short = store.get_range("aa/x.seg", 8, 4).await.map_err(class);
        assert_eq!(short, Err(ErrorClass::Damaged));
        assert_eq!(store.get("aa/x.seg", 9).await.map_err(class), Err(ErrorClass::Damaged));
    }

    #[tokio::test]
    async fn a_file_is_copied_and_the_temporary_one_gone() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        let bytes: Vec<u8> = (0..COPY_STEP * 2 + 17).map(|i| (i / 7) as u8).collect();
        fs::write(&from, &bytes).unwrap();
        let source = Source::of_file(Arc::new(File::open(&from).unwrap())).unwrap();
        let store = store(&dir);
        store.put("f", source).await.unwrap();
        assert_eq!(&store.get("f", u64::MAX - 1).await.unwrap()[..], &bytes);
        assert_eq!(fs::read_dir(dir.path().join("deep/store")).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_conditional_put_never_replaces() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir);
        assert_eq!(store.put_if_absent("id", "one".into()).await.unwrap(), Created::New);
        assert_eq!(store.put_if_absent("id", "two".into()).await.unwrap(), Created::Existed);
        assert_eq!(&store.get("id", 10).await.unwrap()[..], b"one");
    }

    #[tokio::test]
    async fn listing_pages_through_a_prefix_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir);
        assert_eq!(store.list("", None, 10).await.unwrap().objects, []);
        let id = "0123456789abcdef0123456789abcdef";
        let deep = format!("7f/{id}/{id}.seg");
        store.put(&deep, Source::Bytes("x".into())).await.unwrap();
        assert_eq!(store.list(&format!("7f/{id}/"), None, 9).await.unwrap().objects[0].key, deep);
        for key in ["aa/1", "aa/2", "ab/3", "b", "aa/sub/4"] {
            store.put(key, Source::Bytes("x".into())).await.unwrap();
        }
        let keys = |listing: &Listing| -> Vec<String> {
            listing.objects.iter().map(|object| object.key.clone()).collect()
        };
        let all = store.list("a", None, 10).await.unwrap();
        assert_eq!(keys(&all), ["aa/1", "aa/2", "aa/sub/4", "ab/3"]);
        assert!(!all.more);
        let page = store.list("aa/", Some("aa/1"), 1).await.unwrap();
        assert_eq!((keys(&page), page.more), (vec!["aa/2".to_owned()], true));
        store.delete("aa/2").await.unwrap();
        store.delete("aa/2").await.unwrap();
        let rest = store.list("aa/", Some("aa/1"), 1).await.unwrap();
        assert_eq!((keys(&rest), rest.more), (vec!["aa/sub/4".to_owned()], false));
    }

    #[tokio::test]
    async fn files_of_killed_writers_are_unfinished_uploads() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir);
        store.put("aa/1", Source::Bytes("x".into())).await.unwrap();
        let left = |key: &str, n: u8| {
            let id = format!("{TEMPORARY_PREFIX}{}", ObjectId([n; 16]));
            fs::write(dir.path().join("deep/store").join(key).join(&id), "12345").unwrap();
            UploadName { key: key.into(), id }
        };
        let (first, second) = (left("aa", 1), left("aa", 2));
        let names = |page: &Unfinished| -> Vec<UploadName> {
            page.uploads.iter().map(|upload| upload.name.clone()).collect()
        };
        let page = store.list_uploads("aa/", None, 1).await.unwrap();
        assert_eq!((names(&page), page.more), (vec![first.clone()], true));
        assert_eq!(page.uploads[0].len, 5);
        let page = store.list_uploads("a", Some(&first), 10).await.unwrap();
        assert_eq!((names(&page), page.more), (vec![second.clone()], false));
        assert_eq!(store.list_uploads("b", None, 10).await.unwrap(), Unfinished::default());
        for upload in [&first, &first, &second] {
            store.abort_upload(upload).await.unwrap();
        }
        assert_eq!(store.list_uploads("", None, 10).await.unwrap(), Unfinished::default());
        assert_eq!(store.list("", None, 10).await.unwrap().objects.len(), 1);
        let wrong = UploadName { key: "aa".into(), id: "1".into() };
        let class = |error: StoreError| error.class;
        assert_eq!(store.abort_upload(&wrong).await.map_err(class), Err(ErrorClass::Invalid));
    }
}
