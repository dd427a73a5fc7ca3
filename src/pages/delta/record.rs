//! Reading the refinement record of a delta row.

use polign_engine::{ObjectId, quantize::plane2};
use polign_pages::{PageError, PageKind, PageRef, codes::VectorRef, vectors::Vectors};

use super::{super::relation::Index, rows::DeltaRows};
use crate::error::Result;

/// Copies the record of a row into `out`; false if its page was recycled.
pub fn of_row(index: Index, rows: &DeltaRows, handle: u32, out: &mut Vec<u8>) -> Result<bool> {
    let len = plane2::record_bytes(rows.padded_dim());
    read_record(index, rows.index_id(), (rows.vector(handle), rows.id(handle)), len, out)
}

/// Copies the record of `len` bytes that belongs to a row, named by where it lies and by the row's id,
/// into `out`; false if its page was recycled.
pub(super) fn read_record(
    index: Index,
    index_id: ObjectId,
    (vector, id): (VectorRef, u64),
    len: usize,
    out: &mut Vec<u8>,
) -> Result<bool> {
    out.clear();
    out.reserve(len);
    let mut link = vector.page;
    let mut part = 0;
    loop {
        let next = index.pin(link.block).share(|bytes| {
            let page = PageRef::follow(bytes, index_id, link.stamp, PageKind::Vectors)?;
            let vectors = Vectors::parse(page)?;
            let missing = PageError::Content("a vector page does not hold a row's record");
            if vectors.group().record_len as usize != len || vectors.part() != part {
                return Err(missing);
            }
            let record = vectors.record(vector.slot).ok_or(missing)?;
            out.extend_from_slice(record);
            Ok(page.next())
        });
        let next = match next {
            Ok(next) => next,
            Err(PageError::Gone) => return Ok(false),
            Err(error) => return Err(index.damaged(link.block, error)),
        };
        if out.len() >= len {
            break;
        }
        link = next.ok_or_else(|| {
            let error = PageError::Content("a record lacks its second page");
            index.damaged(link.block, error)
        })?;
        part += 1;
    }
    if out.len() != len || out[len - 8..] != id.to_le_bytes() {
        let error = PageError::Content("a record belongs to another row");
        return Err(index.damaged(vector.page.block, error));
    }
    Ok(true)
}
