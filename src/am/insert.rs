//! A row is inserted or updated.

use pgrx::{pg_guard, pg_sys};

use super::{root_cache, row::RowCoder};
use crate::{
    error::{OrRaise, Result},
    maintain::due,
    pages::{
        Index,
        delta::insert::{self, NewRow},
        meta::Meta,
    },
    vector::{self, VectorDatum},
};

#[expect(clippy::too_many_arguments, reason = "the signature is Postgres' own")]
#[pg_guard]
pub unsafe extern "C-unwind" fn aminsert(
    index: pg_sys::Relation,
    values: *mut pg_sys::Datum,
    isnull: *mut bool,
    heap_tid: pg_sys::ItemPointer,
    heap: pg_sys::Relation,
    _unique: pg_sys::IndexUniqueCheck::Type,
    _unchanged: bool,
    _info: *mut pg_sys::IndexInfo,
) -> bool {
    // SAFETY: Postgres hands over open relations, and arrays of one value for the one column.
    unsafe {
        if !*isnull {
            let index = Index::new(index).with_heap(heap);
            insert(index, *values, item_pointer_id(heap_tid)).or_raise();
        }
    }
    // The result only matters to unique indexes.
    false
}

/// # Safety
/// `value` is not NULL and of the type that the index's meta page says.
unsafe fn insert(index: Index, value: pg_sys::Datum, id: u64) -> Result<()> {
    let (meta, coder) = root_cache::coder(index)?;
    // SAFETY: by contract; the value outlives the call.
    let value = unsafe { VectorDatum::new(value, meta.element) }?;
    if value.dim() != meta.dim as usize {
        return Err(vector::different_dimensions(meta.dim as usize, value.dim()));
    }
    if insert_vector(index, &meta, &coder, &value.to_f32(), id)? == Inserted::OnNewPage {
        due::after_growth(index);
    }
    Ok(())
}

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inserted {
    /// The index does not hold such rows: zero vectors under cosine.
    No,
    Yes,
    /// The delta grew by a page.
    OnNewPage,
}

/// Adds a row, coded for the root that `meta` names.
pub fn insert_vector(
    index: Index,
    meta: &Meta,
    coder: &RowCoder,
    vector: &[f32],
    id: u64,
) -> Result<Inserted> {
    if !vector::is_indexable(vector, meta.metric)? {
        return Ok(Inserted::No);
    }
    let row = coder.code(vector, id).map_err(row_error)?;
    let row =
        NewRow { id, cell: row.cell, epoch: meta.epoch, code: &row.code, record: &row.record };
    Ok(match insert::insert(index, &row)? {
        true => Inserted::OnNewPage,
        false => Inserted::Yes,
    })
}

fn row_error(error: polign_engine::quantize::RowError) -> crate::error::Error {
    crate::error::Error::new(pgrx::PgSqlErrorCode::ERRCODE_DATA_EXCEPTION, error.to_string())
}

/// A heap TID as `block << 16 | offset`.
///
/// # Safety
/// `tid` points to a valid item pointer.
pub unsafe fn item_pointer_id(tid: pg_sys::ItemPointer) -> u64 {
    // SAFETY: by contract.
    let tid = unsafe { *tid };
    u64::from(tid.ip_blkid.bi_hi) << 32
        | u64::from(tid.ip_blkid.bi_lo) << 16
        | u64::from(tid.ip_posid)
}

/// The heap TID of an id.
pub fn id_item_pointer(id: u64) -> pg_sys::ItemPointerData {
    pg_sys::ItemPointerData {
        ip_blkid: pg_sys::BlockIdData { bi_hi: (id >> 32) as u16, bi_lo: (id >> 16) as u16 },
        ip_posid: id as u16,
    }
}
