//! Segments on their way to the store: written to a local file, handed to `polign-store`, which uploads
//! them while the next one is built.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    ffi::c_int,
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};
use polign_engine::{
    cache::UploadFile,
    protocol::{Priority, Put, Request, RequestId},
    segment::{SegmentName, WriteError},
};

use crate::{
    error::{Error, Result},
    session,
};

/// Uploads under way at a time; each is a file in the cache directory.
const AT_A_TIME: usize = 3;

thread_local! {
    /// The files of uploads under way, for when the backend ends without unwinding.
    static UNDER_WAY: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
}

/// The file of an upload. It is removed when the upload ends, however it ends, and with the backend.
struct LocalFile(UploadFile);

impl LocalFile {
    fn new(path: PathBuf) -> Self {
        remove_at_exit();
        UNDER_WAY.with_borrow_mut(|paths| paths.push(path.clone()));
        Self(UploadFile::new(path))
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        UNDER_WAY.with_borrow_mut(|paths| paths.retain(|path| path != self.0.path()));
    }
}

/// Termination (`pg_terminate_backend`, shutdown) ends a backend where it is: no destructor runs.
fn remove_at_exit() {
    thread_local! {
        static REGISTERED: Cell<bool> = const { Cell::new(false) };
    }
    if !REGISTERED.replace(true) {
        // SAFETY: a guarded function without an argument.
        unsafe { pg_sys::on_proc_exit(Some(remove_those_under_way), pg_sys::Datum::from(0)) };
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn remove_those_under_way(_code: c_int, _argument: pg_sys::Datum) {
    UNDER_WAY.with(|paths| {
        let paths = paths.try_borrow_mut().map(|mut paths| std::mem::take(&mut *paths));
        paths.unwrap_or_default().into_iter().for_each(|path| drop(UploadFile::new(path)));
    });
}

/// The uploads of a build, a flush or a compaction.
pub struct Uploads {
    store_url: String,
    pending: VecDeque<(RequestId, LocalFile)>,
}

impl Uploads {
    /// Uploads to this store, in the order in which the segments come.
    pub fn new(store_url: String) -> Self {
        Self { store_url, pending: VecDeque::new() }
    }

    /// Has a segment written to a local file, and begins its upload. Returns what `write` does.
    pub fn segment<T>(
        &mut self,
        name: &SegmentName,
        write: impl FnOnce(&mut dyn Write) -> std::result::Result<T, WriteError>,
    ) -> Result<T> {
        while self.pending.len() >= AT_A_TIME {
            self.finish_first()?;
        }
        let file_name = format!("{}.seg", name.object);
        let local = LocalFile::new(session::upload_directory()?.join(&file_name));
        let written = write_file(local.0.path(), write)?;
        let request = Request::Put(Put {
            store: self.store_url.clone(),
            key: name.key(),
            object: name.object,
            file: file_name,
            ingest: true,
            priority: Priority::Build,
        });
        let id = session::begin(request)?;
        self.pending.push_back((id, local));
        Ok(written)
    }

    fn finish_first(&mut self) -> Result<()> {
        // It stays in the list while it is waited for: an interrupt then gives it up with the others.
        if let Some((id, _file)) = self.pending.front() {
            let waited = session::wait(*id);
            self.pending.pop_front();
            waited?;
        }
        Ok(())
    }

    /// Waits until everything is in the store.
    pub fn finish(mut self) -> Result<()> {
        while !self.pending.is_empty() {
            self.finish_first()?;
        }
        Ok(())
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        for (id, _file) in self.pending.drain(..) {
            session::forget(id);
        }
    }
}

fn write_file<T>(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> std::result::Result<T, WriteError>,
) -> Result<T> {
    let failed = |error: io::Error| {
        Error::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not write \"{}\"", path.display()),
        )
        .detail(format!("{error}."))
        .hint("Writing segments needs room for a few of them, of up to 64 MB, in polign.cache_dir.")
    };
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(failed)?);
    let written = write(&mut out).map_err(|error| match error {
        WriteError::Io(error) => failed(error),
        other => Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "could not lay out a segment")
            .detail(format!("{other}.")),
    })?;
    out.flush().map_err(failed)?;
    Ok(written)
}
