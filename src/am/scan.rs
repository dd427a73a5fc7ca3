//! An index scan: a search of the engine behind `ORDER BY column <operator> value`.
//!
//! The state hangs on the memory context of the scan, because `amendscan` is not called on an ERROR.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    rc::Rc,
    time::Instant,
};

use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};
use polign_engine::{
    quantize::RowError,
    search::{Environment, Hit, SearchParams, Stream},
    segment::SourceError,
};

use super::{
    cost,
    heap_order::{HeapDistances, HeapOrder},
    insert::id_item_pointer,
    last_scan::{self, LastScan, ScanId, Times},
    lookahead::Lookahead,
    opclass::OpClass,
    root_cache, search_params,
};
use crate::{
    error::{Error, OrRaise, Result},
    maintain::due,
    pages::{Index, delta::view::DeltaView, meta::Meta, snapshot, tombstones::TombstoneView},
    session::{self, IndexSource},
    vector::{self, VectorDatum},
};

/// What a scan searches for.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// Rows by their distance from a vector.
    Vector,
    /// The query is NULL: every distance is NULL, and the rows come in any order, as with pgvector.
    Null,
    /// The query has no direction under cosine: every distance is NaN, and the rows come in any order.
    NoDirection,
}

/// A scan between `amrescan` and its end.
struct Running {
    id: ScanId,
    meta: Rc<Meta>,
    delta: DeltaView,
    dead: TombstoneView,
    source: IndexSource,
    target: Target,
    /// Rows that the plan wants, as far as is known.
    limit: usize,
    ahead: Lookahead,
    /// What ended the taking of rows ahead: raised when their turn comes.
    failed: Option<SourceError>,
    /// Rows taken from the search, to be read in the heap.
    taken: u64,
    started: Instant,
    times: Times,
}

/// The state of a scan descriptor.
struct ScanState {
    index: Index,
    opclass: OpClass,
    /// That of the scan descriptor.
    context: pg_sys::MemoryContext,
    running: Option<Running>,
    /// Kept over rescans for its buffers.
    stream: Option<Stream>,
    order: HeapOrder,
    /// Kept over rescans.
    distances: Option<HeapDistances>,
}

impl ScanState {
    /// Ends the search that is running, in good order: after an error the requests of it are given up
    /// with the state.
    fn end(&mut self) {
        if let Some(running) = self.running.take() {
            last_scan::end(running.id, running.source.into_unfinished());
        }
    }
}

/// What frees the state when the scan's memory context goes.
#[repr(C)]
struct Owner {
    callback: pg_sys::MemoryContextCallback,
    state: Cell<*mut ScanState>,
}

#[pg_guard]
pub unsafe extern "C-unwind" fn ambeginscan(
    index: pg_sys::Relation,
    keys: c_int,
    order_bys: c_int,
) -> pg_sys::IndexScanDesc {
    // SAFETY: Postgres passes an open index of this access method; what is allocated here lives in the
    // scan's memory context, and its callback runs once.
    unsafe {
        let opclass = OpClass::of(index).or_raise();
        let scan = pg_sys::RelationGetIndexScan(index, keys, order_bys);
        let count = usize::try_from(order_bys).unwrap_or(0);
        (*scan).xs_orderbyvals = pg_sys::palloc0(count * size_of::<pg_sys::Datum>()).cast();
        (*scan).xs_orderbynulls = pg_sys::palloc0(count * size_of::<bool>()).cast();
        let owner = pg_sys::palloc0(size_of::<Owner>()).cast::<Owner>();
        (*owner).callback.func = Some(free_state);
        (*owner).callback.arg = owner.cast();
        pg_sys::MemoryContextRegisterResetCallback(
            pg_sys::CurrentMemoryContext,
            &raw mut (*owner).callback,
        );
        let state = ScanState {
            index: Index::new(index),
            opclass,
            context: pg_sys::CurrentMemoryContext,
            running: None,
            stream: None,
            order: HeapOrder::default(),
            distances: None,
        };
        (*owner).state.set(Box::into_raw(Box::new(state)));
        (*scan).opaque = owner.cast();
        scan
    }
}

/// Runs when the scan's memory context is reset or deleted. Raises nothing.
unsafe extern "C-unwind" fn free_state(owner: *mut c_void) {
    // SAFETY: registered with this owner, which is freed only after its callbacks ran.
    let state = unsafe { (*owner.cast::<Owner>()).state.replace(std::ptr::null_mut()) };
    if !state.is_null() {
        // SAFETY: it came from Box::into_raw, and the pointer was just taken away from everyone else.
        drop(unsafe { Box::from_raw(state) });
    }
}

/// # Safety
/// `scan` comes from [`ambeginscan`] and has not ended.
unsafe fn state<'a>(scan: pg_sys::IndexScanDesc) -> &'a mut ScanState {
    // SAFETY: see above; callbacks of one scan never nest.
    unsafe { &mut *(*(*scan).opaque.cast::<Owner>()).state.get() }
}

#[pg_guard]
pub unsafe extern "C-unwind" fn amrescan(
    scan: pg_sys::IndexScanDesc,
    keys: pg_sys::ScanKey,
    n_keys: c_int,
    order_bys: pg_sys::ScanKey,
    n_order_bys: c_int,
) {
    // SAFETY: the key arrays of the descriptor have room for as many keys as ambeginscan was told.
    unsafe {
        let state = state(scan);
        state.end();
        if n_keys > 0 && !keys.is_null() {
            std::ptr::copy(keys, (*scan).keyData, n_keys as usize);
        }
        if n_order_bys > 0 && !order_bys.is_null() {
            std::ptr::copy(order_bys, (*scan).orderByData, n_order_bys as usize);
        }
    }
}

#[pg_guard]
pub unsafe extern "C-unwind" fn amgettuple(
    scan: pg_sys::IndexScanDesc,
    direction: pg_sys::ScanDirection::Type,
) -> bool {
    // SAFETY: Postgres passes a descriptor that is being scanned.
    unsafe {
        if direction != pg_sys::ScanDirection::ForwardScanDirection {
            Error::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                "a polign_ivf index cannot be scanned backward",
            )
            .raise();
        }
        let state = state(scan);
        if state.running.is_none() {
            start(scan, state).or_raise();
        }
        let row = next(scan, state).or_raise();
        if let Some((id, distance)) = row {
            (*scan).xs_heaptid = id_item_pointer(id);
            (*scan).xs_recheck = false;
            (*scan).xs_recheckorderby = false;
            *(*scan).xs_orderbyvals = pg_sys::Datum::from(distance.unwrap_or(0.0).to_bits());
            *(*scan).xs_orderbynulls = distance.is_none();
        }
        row.is_some()
    }
}

#[pg_guard]
pub unsafe extern "C-unwind" fn amendscan(scan: pg_sys::IndexScanDesc) {
    // SAFETY: the descriptor comes from ambeginscan.
    unsafe {
        if !(*scan).opaque.is_null() {
            let state = state(scan);
            state.end();
            if let Some(distances) = state.distances.take() {
                distances.end();
            }
            free_state((*scan).opaque);
        }
    }
}

/// Begins the search: the query, one consistent reading of the index, the source of its parts.
unsafe fn start(scan: pg_sys::IndexScanDesc, state: &mut ScanState) -> Result<()> {
    let started = Instant::now();
    let id = last_scan::begin();
    // SAFETY: the descriptor is being scanned.
    unsafe {
        check_scan(scan)?;
        count_scan(scan);
    }
    let index = state.index;
    // SAFETY: the descriptor's snapshot is registered; it was checked to be an MVCC one.
    let view =
        unsafe { snapshot::read(index, (*scan).xs_snapshot, |meta| root_cache::get(index, meta))? };
    let meta = view.meta;
    let root = view.root;
    // SAFETY: the first order-by key is a value of the operator class's type.
    let (target, query) = unsafe { target(scan, state.opclass, root.dim())? };
    due::at_scan(index, &meta);
    let params = search_params::of_scan(index, &root);
    let queries = root.queries(&query).map_err(|error| not_a_query(error, root.dim()))?;
    note_facts(index, &root, params);
    match &mut state.stream {
        Some(stream) => stream.restart(root.clone(), queries, params),
        none => *none = Some(Stream::new(root.clone(), queries, params)),
    }
    state.order = HeapOrder::default();
    state.running = Some(Running {
        id,
        dead: TombstoneView::new(&view.tombstones, &root),
        delta: DeltaView::new(index, view.delta, root),
        source: session::index_source(&meta)?,
        meta,
        target,
        limit: params.limit_hint,
        ahead: Lookahead::default(),
        failed: None,
        taken: 0,
        started,
        times: Times { plan: started.elapsed(), ..Times::default() },
    });
    Ok(())
}

/// The next row for the executor, with its distance; that of a NULL is none.
///
/// # Safety
/// `scan` is being scanned, and `state` is its state.
unsafe fn next(
    scan: pg_sys::IndexScanDesc,
    state: &mut ScanState,
) -> Result<Option<(u64, Option<f64>)>> {
    let ScanState {
        context, running: Some(running), stream: Some(stream), order, distances, ..
    } = state
    else {
        return Ok(None);
    };
    let target = running.target;
    // SAFETY: by contract.
    let heap = unsafe { (*scan).heapRelation };
    // SAFETY: the table is open while it is scanned.
    let mut take = || unsafe { take(running, stream, heap) };
    let row = match target {
        Target::Vector => {
            // SAFETY: by contract.
            let distances =
                distances.get_or_insert_with(|| unsafe { HeapDistances::new(scan, *context) });
            // SAFETY: made for this scan, whose query is not NULL.
            let row = order.next(take, |id| unsafe { distances.distance(scan, id) })?;
            row.map(|(id, distance)| (id, Some(distance)))
        }
        // Nothing to compute: the distances are all alike.
        Target::Null => take()?.map(|hit| (hit.id, None)),
        Target::NoDirection => take()?.map(|hit| (hit.id, Some(f64::NAN))),
    };
    running.times.total = running.started.elapsed();
    let scan = LastScan {
        search: stream.stats(),
        cells: stream.root().cell_count() as u64,
        heap_rows: running.taken,
        source: running.source.stats(),
        times: running.times,
    };
    last_scan::set(running.id, scan);
    Ok(row)
}

/// The next row of the search.
///
/// # Safety
/// `heap` is null or the open table of the index.
unsafe fn take(
    running: &mut Running,
    stream: &mut Stream,
    heap: pg_sys::Relation,
) -> Result<Option<Hit>> {
    if running.ahead.is_empty() {
        let wanted = running.ahead.wanted(running.limit).min(stream.rows_at_this_depth());
        let rows = search(running, stream, wanted)?;
        // SAFETY: by contract.
        unsafe { running.ahead.take(rows, heap) };
    }
    let hit = running.ahead.pop();
    running.taken += u64::from(hit.is_some());
    Ok(hit)
}

fn is_interrupt(error: &SourceError) -> bool {
    matches!(error, SourceError::Interrupted)
}

/// Up to `wanted` further rows of the search; none only at its end.
fn search(running: &mut Running, stream: &mut Stream, wanted: u64) -> Result<Vec<Hit>> {
    let started = Instant::now();
    let mut environment =
        Environment { source: &mut running.source, delta: &mut running.delta, dead: &running.dead };
    let mut rows = Vec::new();
    while (rows.len() as u64) < wanted && running.failed.is_none() {
        pgrx::check_for_interrupts!();
        // Cells that only a row beyond those wanted needs are not opened ahead.
        let row = match rows.is_empty() {
            true => stream.next(&mut environment),
            false => stream.next_at_hand(&mut environment),
        };
        match row {
            Ok(Some(row)) => rows.push(row),
            Ok(None) => break,
            Err(error) => running.failed = Some(error),
        }
    }
    if let Some(error) = running.failed.take_if(|error| rows.is_empty() || is_interrupt(error)) {
        return Err(session::explain(error, &running.meta));
    }
    session::warn_of_damage(&running.source.stats());
    running.times.search += started.elapsed();
    running.times.scan = stream.scanning();
    Ok(rows)
}

unsafe fn check_scan(scan: pg_sys::IndexScanDesc) -> Result<()> {
    // SAFETY: the descriptor is being scanned.
    let (order_bys, snapshot) = unsafe { ((*scan).numberOfOrderBys, (*scan).xs_snapshot) };
    if order_bys != 1 {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "a polign_ivf index cannot be scanned without ORDER BY",
        ));
    }
    // SAFETY: the snapshot is null or registered.
    let mvcc = unsafe { snapshot.as_ref() }.is_some_and(|snapshot| {
        snapshot.snapshot_type == pg_sys::SnapshotType::SNAPSHOT_MVCC
            || snapshot.snapshot_type == pg_sys::SnapshotType::SNAPSHOT_HISTORIC_MVCC
    });
    if !mvcc {
        return Err(Error::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "a polign_ivf index can only be scanned with an MVCC snapshot",
        ));
    }
    Ok(())
}

/// What the scan is for, and the vector to search by.
///
/// # Safety
/// The descriptor's first order-by key is a value of the operator class's element type.
unsafe fn target(
    scan: pg_sys::IndexScanDesc,
    opclass: OpClass,
    dim: usize,
) -> Result<(Target, Vec<f32>)> {
    // SAFETY: see above.
    let key = unsafe { &*(*scan).orderByData };
    if key.sk_flags & pg_sys::SK_ISNULL as c_int != 0 {
        return Ok((Target::Null, any_direction(dim)));
    }
    // SAFETY: see above; the value lives as long as the key.
    let query = unsafe { VectorDatum::new(key.sk_argument, opclass.element)? };
    if query.dim() != dim {
        return Err(vector::different_dimensions(dim, query.dim()));
    }
    let query = query.to_f32().into_owned();
    Ok(match vector::is_indexable(&query, opclass.metric)? {
        true => (Target::Vector, query),
        false => (Target::NoDirection, any_direction(dim)),
    })
}

/// A query for a scan whose distances are not compared.
fn any_direction(dim: usize) -> Vec<f32> {
    let mut any = vec![0.0; dim];
    any[0] = 1.0;
    any
}

fn not_a_query(error: RowError, dim: usize) -> Error {
    match error {
        RowError::Dimension { found, .. } => vector::different_dimensions(dim, found),
        other => Error::new(PgSqlErrorCode::ERRCODE_DATA_EXCEPTION, other.to_string()),
    }
}

/// Counts the scan in the index's statistics, and in EXPLAIN on 18.
unsafe fn count_scan(scan: pg_sys::IndexScanDesc) {
    // SAFETY: the descriptor's index is open; pgstat_assoc_relation sets pgstat_info up.
    unsafe {
        let index = (*scan).indexRelation;
        if (*index).pgstat_info.is_null() && (*index).pgstat_enabled {
            pg_sys::pgstat_assoc_relation(index);
        }
        if let Some(info) = (*index).pgstat_info.as_mut() {
            info.counts.numscans += 1;
        }
        #[cfg(feature = "pg18")]
        if let Some(instrument) = (*scan).instrument.as_mut() {
            instrument.nsearches += 1;
        }
    }
}

fn note_facts(index: Index, root: &polign_engine::root::Root, params: SearchParams) {
    let facts = cost::IndexFacts {
        lists: root.cell_count() as u32,
        nprobe: params.depth.cells_at(1) as u32,
        padded_dim: root.models()[0].padded_dim() as u32,
    };
    cost::note_facts(index.oid(), facts);
}
