//! `CREATE INDEX` and `REINDEX`: sample, train, assign every row, write segments, publish.

pub mod heap;
mod phases;
mod rows;
mod spill;

use std::{collections::HashMap, sync::Arc};

use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};
use polign_engine::{
    ObjectId,
    build::{
        Assembly, Calibrator, CellStore, TrainError, TrainParams, Trained, encode_cells,
        note_slots, train,
    },
    cluster::{self, Interrupted},
    quantize::{Model, plane2},
    root::Curves,
};

use heap::{Build, Sample};
use phases::Phase;
use spill::TemporaryFile;

use polign_pages::meta::Writer;

use super::{
    insert::{Inserted, insert_vector},
    opclass::OpClass,
    options::Options,
    root_cache,
};
use crate::{
    error::{Error, OrRaise, Result},
    failpoint,
    pages::{
        Index, blob,
        meta::{self, Meta},
    },
    session, threads, vector,
};

/// Rows that ride along for calibration. They are kept out of training: the cells fit the rows that they
/// were trained on better than any others, and a curve made from those promises too much.
const CALIBRATION_ROWS: usize = 1_024;
/// Bytes for training beside half of `maintenance_work_mem`. The sample is there twice: as the rows came, and
/// in model space.
const TRAINING_BYTES: usize = 96 << 20;
/// Bytes of a segment, about: large enough that there are few, small enough that one in memory and one
/// on its way fit beside `maintenance_work_mem`.
const SEGMENT_BYTES: usize = 32 << 20;

#[pg_guard]
pub unsafe extern "C-unwind" fn ambuild(
    heap: pg_sys::Relation,
    index: pg_sys::Relation,
    info: *mut pg_sys::IndexInfo,
) -> *mut pg_sys::IndexBuildResult {
    // SAFETY: Postgres passes open relations; the result is freed with its memory context.
    unsafe {
        let (heap_tuples, index_tuples) = build(heap, index, info).or_raise();
        let result = pg_sys::palloc0(size_of::<pg_sys::IndexBuildResult>())
            .cast::<pg_sys::IndexBuildResult>();
        (*result).heap_tuples = heap_tuples;
        (*result).index_tuples = index_tuples;
        result
    }
}

#[pg_guard]
pub unsafe extern "C-unwind" fn ambuildempty(index: pg_sys::Relation) {
    // SAFETY: Postgres passes an open, unlogged index.
    unsafe {
        let opclass = OpClass::of(index).or_raise();
        let dim = vector::declared_dim(index).or_raise();
        let mut meta = empty_meta(opclass, dim, Options::of(index));
        // Ids are drawn at the first write: every reset would bring the same ones back.
        meta.index_id = ObjectId::NIL;
        meta::create_init_fork(Index::new(index), &meta).or_raise();
    }
}

fn empty_meta(opclass: OpClass, dim: usize, options: Options) -> Meta {
    let padded_dim = polign_engine::kernel::padded_dim(dim);
    let bits = Model::default_bits(dim) as u8;
    let (metric, element) = (opclass.metric, opclass.element);
    let mut meta = Meta::empty(metric, element, dim as u32, padded_dim as u32, bits);
    meta.target_recall = options.target_recall.unwrap_or(0.0);
    meta
}

unsafe fn build(
    heap: pg_sys::Relation,
    relation: pg_sys::Relation,
    info: *mut pg_sys::IndexInfo,
) -> Result<(f64, f64)> {
    // SAFETY: Postgres passes open relations.
    let (opclass, dim, options, index) = unsafe {
        (
            OpClass::of(relation)?,
            vector::declared_dim(relation)?,
            Options::of(relation),
            Index::new(relation).with_heap(heap),
        )
    };
    let build = Build { heap, index: relation, info, element: opclass.element, dim };
    let mut meta = empty_meta(opclass, dim, options);
    meta.index_id = meta::random_id()?;
    meta.seed = u64::from_le_bytes(meta.index_id.0[..8].try_into().unwrap_or_default());

    phases::enter(Phase::Sampling);
    // SAFETY: a global that Postgres sets between statements.
    let budget = usize::try_from(unsafe { pg_sys::maintenance_work_mem }).unwrap_or(1024) << 10;
    let estimate = rows::estimate(build);
    let lists = options.lists.unwrap_or_else(|| cluster::default_lists(estimate as u64));
    let wanted = {
        let bytes = TRAINING_BYTES + budget / 2;
        cluster::sample_rows(opclass.metric, estimate as u64, lists, dim, bytes)
    };
    let wanted = wanted.max(CALIBRATION_ROWS) + CALIBRATION_ROWS;
    let mut sample = heap::sample(build, wanted, meta.seed);
    if sample.ids.is_empty() {
        return empty(build, index, &meta);
    }
    // Before the work, so that a store that cannot be used is told at once.
    let target = session::store_for_writing(index.name().as_str())?;
    // The first estimate knows nothing of the rows if the table was never analyzed.
    let lists = options.lists.unwrap_or_else(|| cluster::default_lists(sample.estimate as u64));
    let held_out = sample.hold_out(CALIBRATION_ROWS, dim);
    phases::enter(Phase::Training);
    let pool = threads::pool()?;
    let sampled = sample.ids.len() + held_out.ids.len();
    let trained = cluster::trained_lists(lists, sampled, sample.estimate as u64, dim);
    let params =
        TrainParams { metric: opclass.metric, dim, lists: trained, seed: meta.seed, model_id: 0 };
    let trained = match train_off_thread(params, &sample, &pool)? {
        Some(trained) => trained,
        // Nothing but zero vectors under cosine.
        None => return empty(build, index, &meta),
    };
    let model = trained.model.clone();
    let calibrator = calibrator(&model, &held_out);
    drop((sample, held_out));

    phases::enter(Phase::Assigning);
    let record_bytes = plane2::record_bytes(model.padded_dim());
    let file = TemporaryFile::default();
    let mut store = CellStore::new(trained.assigner.len(), record_bytes, budget / 4 * 3, file);
    let (heap_tuples, calibrator) =
        rows::assign_all(build, trained, calibrator, Arc::clone(&pool), &mut store)?;

    phases::enter(Phase::Writing);
    meta.store_id = target.store_id;
    meta.store_url = target.url.clone();
    meta.writer = new_writer()?;
    session::ownership::found(&target, index, &meta)?;
    meta.writer_checked = session::ownership::checked_at_build();
    let assembly = Assembly::new(model, meta.index_id, meta.writer.id);
    let written = write_segments(&mut store, assembly, calibrator, &pool, target.url, lists)?;

    failpoint::pass("build: uploaded");
    phases::enter(Phase::Publishing);
    publish(index, &mut meta, written, heap_tuples)?;
    let index_tuples = meta.rows as f64;
    Ok((heap_tuples, index_tuples))
}

/// A new writer id for an index that is written for the first time.
fn new_writer() -> Result<Writer> {
    Ok(Writer {
        id: meta::random_id()?,
        binding: meta::current_binding(),
        nonce: meta::random_id()?,
        next_nonce: ObjectId::NIL,
    })
}

/// An index without cells: nothing is written to the store. Rows that only old snapshots may see, and
/// rows that cannot be indexed, may still be there.
fn empty(build: Build, index: Index, meta: &Meta) -> Result<(f64, f64)> {
    meta::create(index, meta)?;
    let (meta, coder) = root_cache::coder(index)?;
    let mut inserted = 0;
    let mut failed = None;
    let mut visit = |row: heap::HeapRow<'_>| {
        if failed.is_none() {
            match insert_vector(index, &meta, &coder, row.vector, row.id) {
                Ok(Inserted::No) => {}
                Ok(_) => inserted += 1,
                Err(error) => failed = Some(error),
            }
        }
    };
    let heap_tuples = build.scan_all(&mut visit);
    match failed {
        Some(error) => Err(error),
        None => Ok((heap_tuples, f64::from(inserted))),
    }
}

fn train_off_thread(
    params: TrainParams,
    sample: &Sample,
    pool: &rayon::ThreadPool,
) -> Result<Option<Trained>> {
    let trained = threads::off_thread(|interrupt| {
        pool.install(|| train(params, &sample.rows, pool, interrupt))
    })?;
    match trained {
        Ok(trained) => Ok(Some(trained)),
        Err(TrainError::NoRows) => Ok(None),
        Err(TrainError::Interrupted(Interrupted)) => Err(interrupted()),
        Err(TrainError::Model(error)) => Err(Error::new(
            PgSqlErrorCode::ERRCODE_DATA_EXCEPTION,
            "could not make a model of the sampled rows",
        )
        .detail(format!("{error}."))),
    }
}

/// Only a cancelled statement stops a thread, and that has raised its own error.
fn interrupted() -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_QUERY_CANCELED, "index build interrupted")
}

/// Rows as queries.
fn calibrator(model: &Model, rows: &Sample) -> Calibrator {
    let vectors = rows.rows.chunks_exact(model.dim);
    let samples = rows
        .ids
        .iter()
        .zip(vectors)
        .filter_map(|(&id, vector)| Some((id, model.query(vector).ok()?)))
        .collect();
    Calibrator::new(model.metric, model.padded_dim(), samples)
}

/// Segments in the store, and what their root is to say.
struct Written {
    assembly: Assembly,
    curves: Curves,
    /// The root-mean-square distance of rows to the centroids of their cells.
    spread: f32,
}

fn write_segments(
    store: &mut CellStore<TemporaryFile>,
    mut assembly: Assembly,
    calibrator: Calibrator,
    pool: &rayon::ThreadPool,
    store_url: String,
    lists: u32,
) -> Result<Written> {
    let model = assembly.model().clone();
    let target_rows = store.total_rows().div_ceil(lists.max(1) as usize).max(1);
    let row_bytes = plane2::record_bytes(model.padded_dim())
        + polign_engine::quantize::plane1::row_bytes(model.padded_dim(), model.bits)
        + size_of::<u64>();
    let wanted = calibrator.neighbours();
    let mut slot_of = HashMap::new();
    let mut uploads = session::Uploads::new(store_url);
    let groups = store.groups(SEGMENT_BYTES / row_bytes);
    for group in groups {
        pgrx::check_for_interrupts!();
        let records: Vec<Vec<u8>> =
            group.map(|cell| store.take(cell)).collect::<Result<_, _>>().map_err(spill_failed)?;
        let cells = threads::off_thread(|interrupt| {
            pool.install(|| encode_cells(&model, records, target_rows, model.seed, interrupt))
        })?;
        let cells = cells.map_err(|Interrupted| interrupted())?;
        failpoint::pass("build: encoded");
        note_slots(&wanted, &cells, assembly.cell_count() as u32, &mut slot_of);
        let name = assembly.segment_name(meta::random_id()?);
        uploads.segment(&name, |out| assembly.write_segment(name.object, cells, out))?;
    }
    let root = assembly.read_root(Curves::default()).map_err(|error| root_failed(&error))?;
    let curves = threads::off_thread(|_| pool.install(|| calibrator.finish(&root, &slot_of)))?;
    uploads.finish()?;
    Ok(Written { assembly, curves, spread: root.cell_stats().spread as f32 })
}

/// Writes the root and the meta page; the meta page makes it an index.
fn publish(index: Index, meta: &mut Meta, written: Written, heap_tuples: f64) -> Result<()> {
    let Written { assembly, curves, spread } = written;
    let sections = assembly.root(curves).map_err(|error| root_failed(&error))?;
    let sections: Vec<(u32, &[u8])> =
        sections.iter().map(|(key, bytes)| (key.code(), bytes.as_slice())).collect();
    meta::create(index, meta)?;
    let epoch = meta.epoch + 1;
    let written = blob::write_root(index, meta, epoch, &sections)?;
    failpoint::pass("build: root written");
    let root_id = meta::random_id()?;
    let rows = assembly.rows();
    let cells = assembly.cell_count() as u32;
    meta::update(index, |meta| {
        meta.sections = written.sections;
        meta.root_id = root_id;
        meta.epoch = epoch;
        meta.lists = cells;
        meta.next_cell = cells;
        meta.rows = rows;
        meta.built_rows = heap_tuples as u64;
        meta.calibrated_rows = rows;
        meta.built_spread = spread;
        Ok(())
    })?;
    failpoint::pass("build: published");
    meta.rows = rows;
    Ok(())
}

fn root_failed(error: &polign_engine::root::RootError) -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "could not make the root of an index")
        .detail(format!("{error}."))
}

fn spill_failed(error: std::io::Error) -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_IO_ERROR, "could not use a temporary file of a build")
        .detail(format!("{error}."))
}
