//! Reading the table: a sample of its live rows, then every tuple.

use std::ffi::c_void;

use pgrx::{pg_guard, pg_sys};

use crate::{
    am::{insert::item_pointer_id, opclass::Element},
    error::{OrRaise, Result},
    vector::{self, VectorDatum},
};

/// The relations of a build.
#[derive(Clone, Copy)]
pub struct Build {
    pub heap: pg_sys::Relation,
    pub index: pg_sys::Relation,
    pub info: *mut pg_sys::IndexInfo,
    pub element: Element,
    pub dim: usize,
}

/// A row on its way into the index.
pub struct HeapRow<'a> {
    /// Its heap TID as `block << 16 | offset`.
    pub id: u64,
    pub vector: &'a [f32],
    /// False for a tuple that only old snapshots may still see.
    pub alive: bool,
}

struct Visitor<'a> {
    build: Build,
    vector: Vec<f32>,
    visit: &'a mut dyn FnMut(HeapRow<'_>),
}

impl Build {
    /// Blocks of the table.
    pub fn blocks(&self) -> u32 {
        // SAFETY: the table is open.
        unsafe {
            pg_sys::RelationGetNumberOfBlocksInFork(self.heap, pg_sys::ForkNumber::MAIN_FORKNUM)
        }
    }

    /// Calls `visit` for every tuple that the index must hold: alive or not, but not NULL. Returns how
    /// many live rows the table has.
    pub fn scan_all(&self, visit: &mut dyn FnMut(HeapRow<'_>)) -> f64 {
        let all = (0, pg_sys::InvalidBlockNumber);
        self.scan(all, true, std::ptr::null_mut(), visit)
    }

    /// Calls `visit` for every tuple that a scan of the whole table, which this ends, gives.
    pub fn scan_with(&self, scan: pg_sys::TableScanDesc, visit: &mut dyn FnMut(HeapRow<'_>)) {
        self.scan((0, pg_sys::InvalidBlockNumber), false, scan, visit);
    }

    /// The same for some blocks.
    pub fn scan_blocks(&self, first: u32, blocks: u32, visit: &mut dyn FnMut(HeapRow<'_>)) {
        self.scan((first, blocks), false, std::ptr::null_mut(), visit);
    }

    fn scan(
        &self,
        (first, blocks): (u32, u32),
        progress: bool,
        of_table: pg_sys::TableScanDesc,
        visit: &mut dyn FnMut(HeapRow<'_>),
    ) -> f64 {
        let mut visitor = Visitor { build: *self, vector: vec![0.0; self.dim], visit };
        let state = (&raw mut visitor).cast::<c_void>();
        // SAFETY: Postgres' own relations and index info; the state outlives the call. This is what
        // the inline function table_index_build_range_scan does. A pointer taken from a struct is not
        // guarded by itself: without the boundary an ERROR (a cancelled build, say) would jump over
        // this and every other Rust frame, and leave their threads and memory behind.
        unsafe {
            let scan = (*(*self.heap).rd_tableam).index_build_range_scan;
            let Some(scan) = scan else { return 0.0 };
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                scan(
                    self.heap,
                    self.index,
                    self.info,
                    // A synchronized scan starts anywhere, which a range of blocks does not allow.
                    progress || !of_table.is_null(),
                    false,
                    progress,
                    first,
                    blocks,
                    Some(row_of_heap),
                    state,
                    of_table,
                )
            })
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn row_of_heap(
    _index: pg_sys::Relation,
    tid: pg_sys::ItemPointer,
    values: *mut pg_sys::Datum,
    nulls: *mut bool,
    alive: bool,
    state: *mut c_void,
) {
    // SAFETY: Postgres passes one column's value, and the state that `scan` was given.
    unsafe {
        let visitor = &mut *state.cast::<Visitor<'_>>();
        if *nulls {
            return;
        }
        read(visitor.build, *values, &mut visitor.vector).or_raise();
        let id = item_pointer_id(tid);
        (visitor.visit)(HeapRow { id, vector: &visitor.vector, alive });
    }
}

/// # Safety
/// `value` is a valid value of the column's type.
unsafe fn read(build: Build, value: pg_sys::Datum, out: &mut [f32]) -> Result<()> {
    // SAFETY: as promised by the caller.
    let vector = unsafe { VectorDatum::new(value, build.element)? };
    if vector.dim() != build.dim {
        return Err(vector::different_dimensions(build.dim, vector.dim()));
    }
    vector.copy_to(out);
    Ok(())
}

/// Live rows drawn from all over the table.
#[derive(Default)]
pub struct Sample {
    pub ids: Vec<u64>,
    /// n x dim.
    pub rows: Vec<f32>,
    /// Indexed rows of the whole table, from those of the blocks that were read.
    pub estimate: f64,
}

impl Sample {
    /// Takes up to `wanted` rows out, evenly spread, but no more than an eighth; from a sample of a few
    /// rows it copies them instead.
    pub fn hold_out(&mut self, wanted: usize, dim: usize) -> Self {
        let count = self.ids.len();
        let scarce = count < 8 * 8;
        let wanted = wanted.min(if scarce { count } else { count / 8 });
        let mut held = Self { estimate: self.estimate, ..Self::default() };
        let mut kept = 0;
        for at in 0..count {
            // One row in each of `wanted` equal stretches.
            let is_held = (at + 1) * wanted / count > at * wanted / count;
            if is_held {
                held.ids.push(self.ids[at]);
                held.rows.extend_from_slice(&self.rows[at * dim..(at + 1) * dim]);
            }
            if !is_held || scarce {
                self.ids[kept] = self.ids[at];
                self.rows.copy_within(at * dim..(at + 1) * dim, kept * dim);
                kept += 1;
            }
        }
        self.ids.truncate(kept);
        self.rows.truncate(kept * dim);
        held
    }
}

/// Blocks read together: neighbouring rows are often alike, so few.
const RUN: u32 = 2;

/// Draws about `wanted` live rows, from blocks in an order that depends on `seed` alone.
pub fn sample(build: Build, wanted: usize, seed: u64) -> Sample {
    let mut sample = Sample::default();
    let blocks = build.blocks();
    let runs = blocks.div_ceil(RUN);
    // A full cycle through all runs in golden-ratio steps, which spread evenly however early the cycle
    // ends; the step shares no factor with their number.
    let mut step = (f64::from(runs) * 0.618_034) as u32;
    while gcd(step, runs) > 1 {
        step += 1;
    }
    let mut run = (seed % u64::from(runs.max(1))) as u32;
    let mut read = 0;
    for _ in 0..runs {
        if sample.ids.len() >= wanted {
            break;
        }
        pgrx::check_for_interrupts!();
        let first = run * RUN;
        let count = RUN.min(blocks - first);
        read += count;
        build.scan_blocks(first, count, &mut |row| {
            if row.alive {
                sample.ids.push(row.id);
                sample.rows.extend_from_slice(row.vector);
            }
        });
        run = (u64::from(run) + u64::from(step)).rem_euclid(u64::from(runs)) as u32;
    }
    sample.estimate = sample.ids.len() as f64 * f64::from(blocks) / f64::from(read.max(1));
    sample
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
