//! Rows of a search in the order of their exact distances, which are computed from the heap here.
//!
//! The executor could do that: it offers to compute the distance of a row that comes with a bound, and to
//! hold the row back until its turn. But a row that it held back has lost its ctid (`SELECT ctid` gives
//! (4294967295,0), and FOR UPDATE locks something else), and it copies each row.

use std::{cmp::Ordering, collections::BinaryHeap};

use pgrx::pg_sys;
use polign_engine::search::Hit;

use super::insert::id_item_pointer;
use crate::error::Result;

/// Rows whose distance is known and whose turn has not come.
#[derive(Default)]
pub struct HeapOrder {
    waiting: BinaryHeap<Waiting>,
    /// No row that is still to come is nearer.
    bound: f64,
    ended: bool,
}

/// A row by its distance, the nearest greatest.
struct Waiting {
    distance: f64,
    id: u64,
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_distance = other.distance.total_cmp(&self.distance);
        by_distance.then_with(|| other.id.cmp(&self.id))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Waiting {}

impl HeapOrder {
    /// The next row and its distance. `next` gives rows with lower bounds of their distances, in order of
    /// these; `distance` that of a row, or nothing if the snapshot does not see it.
    pub fn next(
        &mut self,
        mut next: impl FnMut() -> Result<Option<Hit>>,
        mut distance: impl FnMut(u64) -> Option<f64>,
    ) -> Result<Option<(u64, f64)>> {
        loop {
            if let Some(row) = self.waiting.peek()
                && (self.ended || row.distance <= self.bound)
            {
                return Ok(self.waiting.pop().map(|row| (row.id, row.distance)));
            }
            if self.ended {
                return Ok(None);
            }
            match next()? {
                None => self.ended = true,
                Some(hit) => {
                    self.bound = hit.bound;
                    if let Some(distance) = distance(hit.id) {
                        // Postgres sorts every NaN behind all numbers.
                        let distance = if distance.is_nan() { f64::NAN } else { distance };
                        let holds = distance.is_nan() || distance >= hit.bound;
                        debug_assert!(holds, "{distance} is below its bound {}", hit.bound);
                        self.waiting.push(Waiting { distance, id: hit.id });
                    }
                }
            }
        }
    }
}

/// Reads rows of a table and computes the distances of the value that is indexed.
///
/// All of it lies in the memory context of its scan, and is freed with that if the scan ends with an error.
pub struct HeapDistances {
    slot: *mut pg_sys::TupleTableSlot,
    value: IndexedValue,
    /// For one row at a time.
    context: pg_sys::MemoryContext,
}

/// Where the indexed value of a row comes from.
enum IndexedValue {
    /// A column, by its number.
    Column(usize),
    Expression {
        state: *mut pg_sys::EState,
        info: *mut pg_sys::IndexInfo,
    },
}

impl HeapDistances {
    /// # Safety
    /// `scan` is being scanned; `context` is its memory context.
    pub unsafe fn new(scan: pg_sys::IndexScanDesc, context: pg_sys::MemoryContext) -> Self {
        // SAFETY: both relations of a scan are open; an index of this access method has one column.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(context);
            let index = (*scan).indexRelation;
            let column = (*(*index).rd_index).indkey.values.as_slice(1)[0];
            let slot = pg_sys::table_slot_create((*scan).heapRelation, std::ptr::null_mut());
            let value = match usize::try_from(column) {
                Ok(column) if column > 0 => IndexedValue::Column(column),
                _ => {
                    let state = pg_sys::CreateExecutorState();
                    let row = pg_sys::MakePerTupleExprContext(state);
                    (*row).ecxt_scantuple = slot;
                    IndexedValue::Expression { state, info: pg_sys::BuildIndexInfo(index) }
                }
            };
            let context = pg_sys::AllocSetContextCreateInternal(
                context,
                c"polign row".as_ptr(),
                pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
                pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
            );
            pg_sys::MemoryContextSwitchTo(before);
            Self { slot, value, context }
        }
    }

    /// The distance of the version of a row that the scan's snapshot sees, by the operator that the scan
    /// orders by.
    ///
    /// # Safety
    /// `scan` is the one that this was made for; its order-by key is not NULL.
    pub unsafe fn distance(&mut self, scan: pg_sys::IndexScanDesc, id: u64) -> Option<f64> {
        // SAFETY: see above. The operator takes the indexed type twice, and gives a double.
        unsafe {
            if !self.fetch(scan, id) {
                return None;
            }
            pg_sys::MemoryContextReset(self.context);
            let before = pg_sys::MemoryContextSwitchTo(self.context);
            let key = &mut *(*scan).orderByData;
            let distance = self.indexed_value().map(|value| {
                pg_sys::FunctionCall2Coll(
                    &raw mut key.sk_func,
                    key.sk_collation,
                    value,
                    key.sk_argument,
                )
            });
            pg_sys::MemoryContextSwitchTo(before);
            distance.map(|distance| f64::from_bits(distance.value() as u64))
        }
    }

    /// # Safety
    /// As for [`Self::distance`].
    unsafe fn fetch(&mut self, scan: pg_sys::IndexScanDesc, id: u64) -> bool {
        let mut tid = id_item_pointer(id);
        let (mut more, mut all_dead) = (false, false);
        // SAFETY: the executor began this fetch for the scan, and reads the row that is returned by it
        // too: one call never depends on the one before. A pointer taken from a struct is not guarded by
        // itself.
        unsafe {
            let fetch = (*scan).xs_heapfetch;
            let Some(fetch_tuple) = (*(*(*fetch).rel).rd_tableam).index_fetch_tuple else {
                return false;
            };
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                fetch_tuple(
                    fetch,
                    &mut tid,
                    (*scan).xs_snapshot,
                    self.slot,
                    &mut more,
                    &mut all_dead,
                )
            })
        }
    }

    /// That of the row in the slot.
    unsafe fn indexed_value(&mut self) -> Option<pg_sys::Datum> {
        let (mut value, mut null) = (pg_sys::Datum::from(0_usize), true);
        // SAFETY: the slot holds a row of the table; an index of this access method has one column.
        unsafe {
            match self.value {
                IndexedValue::Column(column) => {
                    if usize::try_from((*self.slot).tts_nvalid).unwrap_or(0) < column {
                        pg_sys::slot_getsomeattrs_int(self.slot, column as i32);
                    }
                    value = *(*self.slot).tts_values.add(column - 1);
                    null = *(*self.slot).tts_isnull.add(column - 1);
                }
                IndexedValue::Expression { state, info } => {
                    pg_sys::MemoryContextReset(
                        (*(*state).es_per_tuple_exprcontext).ecxt_per_tuple_memory,
                    );
                    pg_sys::FormIndexDatum(info, self.slot, state, &mut value, &mut null);
                }
            }
        }
        (!null).then_some(value)
    }

    /// Gives back what must not outlive the scan when it ends well.
    ///
    /// # Safety
    /// The scan has not failed.
    pub unsafe fn end(self) {
        // SAFETY: made by `new`, and nobody else has them.
        unsafe {
            if let IndexedValue::Expression { state, .. } = self.value {
                pg_sys::FreeExecutorState(state);
            }
            pg_sys::ExecDropSingleTupleTableSlot(self.slot);
            pg_sys::MemoryContextDelete(self.context);
        }
    }
}
