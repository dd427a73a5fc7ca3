//! pgvector's values, read where they lie.

use std::{borrow::Cow, marker::PhantomData, ptr::NonNull, slice};

use half::f16;
use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::{Metric, kernel};

use crate::{
    am::opclass::Element,
    error::{Error, Result},
};

/// The largest dimension of a pgvector column.
pub const MAX_DIM: usize = 16_000;

/// The start of a `vector` or `halfvec`: varlena header, dimension, a word that is not used; the
/// elements follow.
#[repr(C)]
struct Header {
    vl_len: i32,
    dim: i16,
    unused: i16,
}

/// A `vector` or `halfvec`, without TOAST. Frees the copy if there had to be one.
pub struct VectorDatum<'a> {
    value: NonNull<Header>,
    element: Element,
    /// The detoasted value is not the one that was passed in.
    is_copy: bool,
    datum: PhantomData<&'a Header>,
}

impl<'a> VectorDatum<'a> {
    /// # Safety
    /// `datum` is not NULL and is a value of the type that `element` says; it lives for `'a`.
    pub unsafe fn new(datum: pg_sys::Datum, element: Element) -> Result<Self> {
        // SAFETY: a varlena by the caller's word; detoasting gives one with a four-byte header, aligned.
        let (value, is_copy) = unsafe {
            let original = datum.cast_mut_ptr::<pg_sys::varlena>();
            let detoasted = pg_sys::pg_detoast_datum(original);
            (detoasted.cast::<Header>(), detoasted != original)
        };
        let value = NonNull::new(value).ok_or_else(malformed)?;
        let vector = Self { value, element, is_copy, datum: PhantomData };
        // SAFETY: as above.
        let len = unsafe { pgrx::varsize_any(value.as_ptr().cast()) };
        let width = match element {
            Element::Vector => size_of::<f32>(),
            Element::Halfvec => size_of::<f16>(),
        };
        let fits = vector.dim() * width + size_of::<Header>() <= len;
        if fits && (1..=MAX_DIM).contains(&vector.dim()) { Ok(vector) } else { Err(malformed()) }
    }

    /// The value without TOAST.
    pub fn datum(&self) -> pg_sys::Datum {
        pg_sys::Datum::from(self.value.as_ptr())
    }

    /// The number of dimensions.
    pub fn dim(&self) -> usize {
        // SAFETY: a detoasted value starts with the header.
        usize::try_from(unsafe { self.value.as_ref() }.dim).unwrap_or(0)
    }

    /// The elements: borrowed from a `vector`, widened from a `halfvec`.
    pub fn to_f32(&self) -> Cow<'_, [f32]> {
        match self.element {
            Element::Vector => Cow::Borrowed(self.elements::<f32>()),
            Element::Halfvec => {
                let mut wide = vec![0.0; self.dim()];
                kernel::f16_to_f32(self.elements::<f16>(), &mut wide);
                Cow::Owned(wide)
            }
        }
    }

    /// Copies the elements into `out`, whose length is the dimension.
    pub fn copy_to(&self, out: &mut [f32]) {
        match self.element {
            Element::Vector => out.copy_from_slice(self.elements::<f32>()),
            Element::Halfvec => kernel::f16_to_f32(self.elements::<f16>(), out),
        }
    }

    fn elements<T>(&self) -> &[T] {
        // SAFETY: `new` checked that the value holds as many elements of the type that `element` says;
        // after the eight bytes of the header they are aligned.
        unsafe { slice::from_raw_parts(self.value.as_ptr().add(1).cast::<T>(), self.dim()) }
    }
}

impl Drop for VectorDatum<'_> {
    fn drop(&mut self) {
        // While an error unwinds, the memory context that holds the copy may already be gone.
        if self.is_copy && !std::thread::panicking() {
            // SAFETY: allocated by the detoasting, and nobody else has it.
            unsafe { pg_sys::pfree(self.value.as_ptr().cast()) }
        }
    }
}

fn malformed() -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, "a vector value is malformed")
}

/// The error for a vector of another dimension than the index has; the text is pgvector's own.
pub fn different_dimensions(expected: usize, found: usize) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_DATA_EXCEPTION,
        format!("different vector dimensions {expected} and {found}"),
    )
}

/// Whether the index holds this row: a zero vector has no direction, so under cosine it is left out, as
/// pgvector does. A NaN or an infinity, which pgvector does not let into a column, is an error.
pub fn is_indexable(vector: &[f32], metric: Metric) -> Result<bool> {
    if !vector.iter().all(|x| x.is_finite()) {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_DATA_EXCEPTION,
            "NaN and infinity are not allowed in an indexed vector",
        ));
    }
    Ok(metric != Metric::Cosine || vector.iter().any(|&x| x != 0.0))
}

/// The dimension that the indexed column or expression declares.
///
/// # Safety
/// `index` is an open index of this access method.
pub unsafe fn declared_dim(index: pg_sys::Relation) -> Result<usize> {
    let mut typmod = -1;
    // SAFETY: reads the system catalogs; an index of this access method has one column.
    unsafe {
        let (mut ty, mut collation) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
        pg_sys::get_atttypetypmodcoll((*index).rd_id, 1, &mut ty, &mut typmod, &mut collation);
    }
    match usize::try_from(typmod) {
        Ok(dim) if (1..=MAX_DIM).contains(&dim) => Ok(dim),
        Ok(dim) if dim > MAX_DIM => Err(Error::new(
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            format!("column cannot have more than {MAX_DIM} dimensions for a polign_ivf index"),
        )),
        _ => Err(Error::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "column does not have dimensions",
        )
        .hint("Declare them in the column's type, as in vector(384), or index an expression such as ((embedding::vector(384))).")),
    }
}
