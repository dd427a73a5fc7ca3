//! Other databases of the cluster that have a copy of an index and have not said so yet.
//!
//! CREATE DATABASE with a template, by either strategy, copies files. So whether there is a copy can be seen
//! here, however young or idle it is; twins, backups and promoted servers lie elsewhere.

use std::{
    collections::HashMap,
    ffi::{CStr, OsStr},
    fs::{self, File},
    io::{self, ErrorKind, Read as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::ObjectId;
use polign_pages::PAGE_LEN;

use super::catalog;
use crate::{
    error::{Error, Result},
    pages::meta,
};

/// The writer ids under which indexes of other databases would go on, if they were written. One that goes on
/// under an id of its own has left a note in the store.
pub struct Neighbours {
    databases: HashMap<ObjectId, String>,
}

impl Neighbours {
    /// Reads the first page of every relation of the other databases.
    pub fn read() -> Result<Self> {
        let tablespaces = tablespaces();
        let mut databases = HashMap::new();
        for (oid, name) in others() {
            // Files are read, since the buffers of another database are not this one's to use. What was
            // copied through buffers may not have come to its files yet.
            // SAFETY: in a transaction, and only writes what a checkpoint would.
            unsafe { pg_sys::FlushDatabaseBuffers(oid) };
            for tablespace in &tablespaces {
                for writer in writers_in(&directory(oid, *tablespace))? {
                    databases.insert(writer, name.clone());
                }
            }
        }
        Ok(Self { databases })
    }

    /// The name of a database with an index that would go on as this writer.
    pub fn holding(&self, writer: ObjectId) -> Option<&str> {
        self.databases.get(&writer).map(String::as_str)
    }
}

/// Where a database has its files in a tablespace; relative to the data directory.
fn directory(database: pg_sys::Oid, tablespace: pg_sys::Oid) -> PathBuf {
    // SAFETY: makes a NUL-terminated text of the ids.
    let path = unsafe { CStr::from_ptr(pg_sys::GetDatabasePath(database, tablespace)) };
    PathBuf::from(OsStr::from_bytes(path.to_bytes()))
}

fn writers_in(directory: &Path) -> Result<Vec<ObjectId>> {
    let mut writers = Vec::new();
    let Some(entries) = unless_gone(directory, fs::read_dir(directory))? else {
        return Ok(writers);
    };
    for entry in entries {
        pgrx::check_for_interrupts!();
        let Some(entry) = unless_gone(directory, entry)? else { continue };
        // Others are further segments and forks, and temporary relations, which are nobody's.
        if !entry.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let path = entry.path();
        let mut page = [0; PAGE_LEN];
        let read = File::open(&path).and_then(|mut file| file.read_exact(&mut page));
        if unless_gone(&path, read)?.is_some() {
            writers.extend(meta::writer_of(&page).filter(|writer| !writer.is_nil()));
        }
    }
    Ok(writers)
}

/// `None` for what is not there any more, or is empty.
fn unless_gone<T>(path: &Path, result: io::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if [ErrorKind::NotFound, ErrorKind::UnexpectedEof].contains(&error.kind()) => {
            Ok(None)
        }
        Err(error) => Err(Error::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not read \"{}\"", path.display()),
        )
        .detail(format!("{error}."))),
    }
}

/// The databases but this one, with their names.
fn others() -> Vec<(pg_sys::Oid, String)> {
    let mut found = Vec::new();
    // SAFETY: set in every backend.
    let here = unsafe { pg_sys::MyDatabaseId };
    let mut visit = |form: &pg_sys::FormData_pg_database| {
        if form.oid != here {
            // SAFETY: the name is a NUL-terminated array.
            let name = unsafe { CStr::from_ptr(form.datname.data.as_ptr()) };
            found.push((form.oid, name.to_string_lossy().into_owned()));
        }
    };
    // SAFETY: rows of pg_database begin with this struct.
    unsafe { catalog::each_row(pg_sys::DatabaseRelationId, &mut visit) };
    found
}

/// The tablespaces that databases have files in.
fn tablespaces() -> Vec<pg_sys::Oid> {
    let mut found = Vec::new();
    let mut visit = |form: &pg_sys::FormData_pg_tablespace| {
        if form.oid != pg_sys::GLOBALTABLESPACE_OID {
            found.push(form.oid);
        }
    };
    // SAFETY: rows of pg_tablespace begin with this struct.
    unsafe { catalog::each_row(pg_sys::TableSpaceRelationId, &mut visit) };
    found
}
