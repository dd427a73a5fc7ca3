//! Elements of Postgres' lists of pointers.

use pgrx::pg_sys;

/// An element, if the list is as long as that.
///
/// # Safety
/// `list` is null or a list of pointers to `T`.
pub unsafe fn nth<T>(list: *const pg_sys::List, position: usize) -> Option<*mut T> {
    // SAFETY: by contract; a list has as many elements as it says.
    unsafe {
        let list = list.as_ref()?;
        let length = usize::try_from(list.length).unwrap_or(0);
        (position < length).then(|| (*list.elements.add(position)).ptr_value.cast())
    }
}
