//! What a worker and the process that waits for it tell each other, in a piece of shared memory.

use std::{ptr::NonNull, slice};

use pgrx::{PgSqlErrorCode, pg_sys};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    maintain::calibrate::Queries,
};

/// Bytes for what the worker tells: a message that is longer is not told. The queries follow.
const BYTES: usize = 8192;

/// The end of a worker.
pub enum Outcome {
    Done(i64),
    Failed(Error),
}

/// As it is in the memory: a length, then JSON.
#[derive(Serialize, Deserialize)]
enum Told {
    Done(i64),
    Failed { code: i32, message: String, detail: Option<String>, hint: Option<String> },
}

/// What stands before the queries.
#[repr(C)]
struct QueriesHeader {
    dim: u32,
    /// Components of all vectors.
    values: u32,
}

/// A mapped piece of shared memory. It goes when the last process that mapped it does.
pub struct Report(NonNull<pg_sys::dsm_segment>);

impl Report {
    /// Makes one, for a worker that is about to be started and may need queries.
    pub fn create(queries: &Queries) -> Self {
        let Queries { dim, values } = queries;
        let header = QueriesHeader { dim: *dim, values: values.len() as u32 };
        let bytes = BYTES + size_of::<QueriesHeader>() + size_of_val(&values[..]);
        // SAFETY: raises if there is no memory; the first word is the length, 0 while nothing was told. All of
        // the rest is written within the bytes, each at its alignment.
        unsafe {
            let segment = pg_sys::dsm_create(bytes, 0);
            let start = pg_sys::dsm_segment_address(segment).cast::<u8>();
            start.cast::<u64>().write(0);
            let to = start.add(BYTES).cast::<QueriesHeader>();
            to.write(header);
            std::ptr::copy_nonoverlapping(values.as_ptr(), to.add(1).cast(), values.len());
            Self(NonNull::new_unchecked(segment))
        }
    }

    /// The queries that it was made with.
    pub fn queries(&self) -> Queries {
        // SAFETY: written by `create` before the worker was started, and by nobody since.
        unsafe {
            let start = pg_sys::dsm_segment_address(self.0.as_ptr()).cast::<u8>();
            let header = start.add(BYTES).cast::<QueriesHeader>();
            let values = header.add(1).cast::<f32>();
            let values = slice::from_raw_parts(values, (*header).values as usize).to_vec();
            Queries { dim: (*header).dim, values }
        }
    }

    /// Maps the one of the process that waits; none if it has stopped waiting.
    pub fn attach(handle: pg_sys::dsm_handle) -> Option<Self> {
        // SAFETY: gives null if the memory is gone.
        NonNull::new(unsafe { pg_sys::dsm_attach(handle) }).map(Self)
    }

    pub fn handle(&self) -> pg_sys::dsm_handle {
        // SAFETY: a mapped segment.
        unsafe { pg_sys::dsm_segment_handle(self.0.as_ptr()) }
    }

    /// Tells how it ended; once, by the worker.
    pub fn write(&self, outcome: &Outcome) {
        let told = match outcome {
            Outcome::Done(result) => Told::Done(*result),
            Outcome::Failed(Error { code, message, detail, hint }) => Told::Failed {
                code: *code as i32,
                message: message.clone(),
                detail: detail.clone(),
                hint: hint.clone(),
            },
        };
        let json = serde_json::to_vec(&told).unwrap_or_default();
        if json.len() > BYTES - size_of::<u64>() {
            return;
        }
        // SAFETY: mapped, of this size, and the other process reads only when this one has ended.
        unsafe {
            let at = pg_sys::dsm_segment_address(self.0.as_ptr()).cast::<u8>();
            std::ptr::copy_nonoverlapping(json.as_ptr(), at.add(size_of::<u64>()), json.len());
            at.cast::<u64>().write(json.len() as u64);
        }
    }

    /// What a worker that has ended told.
    pub fn read(&self) -> Result<i64> {
        // SAFETY: mapped, of this size, and nobody writes any more.
        let json = unsafe {
            let at = pg_sys::dsm_segment_address(self.0.as_ptr()).cast::<u8>();
            let len = at.cast::<u64>().read() as usize;
            slice::from_raw_parts(at.add(size_of::<u64>()), len.min(BYTES - size_of::<u64>()))
        };
        match serde_json::from_slice(json) {
            Ok(Told::Done(result)) => Ok(result),
            Ok(Told::Failed { code, message, detail, hint }) => {
                Err(Error { code: PgSqlErrorCode::from(code as isize), message, detail, hint })
            }
            Err(_) => Err(Error::new(
                PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
                "a worker that maintains an index ended early",
            )
            .hint("The server log says why.")),
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        // An error unmaps it with the transaction.
        if !std::thread::panicking() {
            // SAFETY: mapped by this.
            unsafe { pg_sys::dsm_detach(self.0.as_ptr()) }
        }
    }
}
