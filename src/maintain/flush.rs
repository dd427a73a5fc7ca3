//! Flush: the rows of the delta become a segment in the store.

use std::{collections::HashSet, rc::Rc, sync::Arc, time::Duration};

use pgrx::PgSqlErrorCode;
use polign_engine::{
    ObjectId, cluster,
    maintain::{DeltaBatch, first_cells, write_delta_segment},
    root::{CellStats, Root, RootEdit, SectionKey},
    segment::SegmentName,
};
use polign_pages::meta::{Meta, Retry};

use crate::{
    am::{options::Options, root_cache},
    error::{Error, Result},
    failpoint,
    pages::{
        Index, Steps, blob,
        delta::flush::{self as delta, SealedRows},
        meta,
        objects::{self, ObjectForm, ObjectList},
        publish::{Publication, Published, publish},
    },
    session::{self, Claim, Uploads},
    threads,
};

/// Bytes of a segment's records, about, as in a build.
const SEGMENT_BYTES: usize = 32 << 20;

/// What a flush did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlushStats {
    /// Rows that went from the delta into segments.
    pub rows: u64,
    /// Segments that were written.
    pub segments: u32,
}

/// Rows to be flushed, and what they were read with.
struct Batch {
    meta: Rc<Meta>,
    root: Arc<Root>,
    rows: SealedRows,
}

/// Moves all rows that the delta has now into segments. The caller holds the maintenance lock.
///
/// Whether the transactions that inserted them commit does not matter: rows are moved, not judged. What
/// is cancelled or fails leaves the index as it was, or some generations of the delta shorter.
pub fn flush(steps: &mut impl Steps) -> Result<FlushStats> {
    let mut stats = FlushStats::default();
    let Some(end) = steps.step(delta::seal)? else { return Ok(stats) };
    let mut claimed = None;
    while let Some(batch) = steps.step(|index| take(index, end))? {
        let rows = batch.rows.len();
        if rows == 0 {
            until_published(steps, |index| publish_nothing(index, &batch))?;
            continue;
        }
        let claim = match &claimed {
            Some(claim) => claim,
            None => claimed.insert(session::claim(steps)?),
        };
        failpoint::pass("flush: claimed");
        let moved = move_rows(steps, &batch, claim)?;
        failpoint::pass("flush: uploaded");
        until_published(steps, |index| publish_rows(index, &batch, claim, &moved))?;
        stats.segments += moved.objects.len() as u32;
        stats.rows += rows as u64;
    }
    Ok(stats)
}

fn take(index: Index, end: u64) -> Result<Option<Batch>> {
    let (meta, root) = root_cache::current(index)?;
    let rows = delta::copy(index, end)?;
    Ok(rows.map(|rows| Batch { meta, root, rows }))
}

/// A new object of the index. It is logged before it is uploaded, so that it is collected should it never
/// be published.
pub(super) fn new_object(index: Index, claim: &Claim) -> Result<SegmentName> {
    let name = SegmentName {
        writer: claim.writer.id,
        index: meta::read(index)?.index_id,
        object: meta::random_id()?,
    };
    let record = objects::record_now(ObjectForm::Segment, name.object, name.writer, name.index);
    failpoint::pass("object: before");
    let lsn = objects::append(index, ObjectList::Pending, &[record])?;
    failpoint::pass("object: logged");
    objects::flush_log(lsn);
    Ok(name)
}

/// How often it is looked whether VACUUM is through.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Publishes as soon as VACUUM lets it.
pub(super) fn until_published(
    steps: &mut impl Steps,
    publish: impl Fn(Index) -> Result<Published>,
) -> Result<()> {
    loop {
        match steps.step(&publish)? {
            Published::Yes => return Ok(()),
            Published::Busy => threads::sleep(LOOK_INTERVAL),
            Published::Changed => {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                    "the index was changed by something else while its rows were being moved",
                ));
            }
        }
    }
}

/// The rows of a batch in the store, and a root that has them.
struct Moved {
    sections: Vec<(SectionKey, Vec<u8>)>,
    /// Each new object, and which row of the batch each of its ordinals is.
    objects: Vec<(ObjectId, Vec<u32>)>,
    /// The cells, where these are the first.
    first_cells: Option<CellStats>,
}

fn move_rows(steps: &mut impl Steps, batch: &Batch, claim: &Claim) -> Result<Moved> {
    match batch.meta.sections.is_empty() {
        true => first_segments(steps, batch, claim),
        false => delta_segment(steps, batch, claim),
    }
}

/// One more segment, whose rows stay in the cells that they were inserted into.
fn delta_segment(steps: &mut impl Steps, batch: &Batch, claim: &Claim) -> Result<Moved> {
    let name = steps.step(|index| new_object(index, claim))?;
    let rows = DeltaBatch { cells: &batch.rows.cells, records: &batch.rows.records };
    let (root, mut bytes) = (&*batch.root, Vec::new());
    let segment = threads::off_thread(|interrupt| {
        write_delta_segment(root, name, rows, &mut bytes, interrupt)
    })?;
    let segment = segment.map_err(|error| internal(&error))?;
    let mut uploads = Uploads::new(claim.target.url.clone());
    uploads.segment(&name, |out| Ok(out.write_all(&bytes)?))?;
    drop(bytes);
    uploads.finish()?;
    let mut edit = RootEdit::new(&batch.root);
    edit.segment(&segment.written, &segment.slots);
    let sections = edit.build().map_err(|error| internal(&error))?;
    let objects = vec![(name.object, segment.positions)];
    Ok(Moved { sections, objects, first_cells: None })
}

/// The first segments of an index that was created empty: its rows get cells.
fn first_segments(steps: &mut impl Steps, batch: &Batch, claim: &Claim) -> Result<Moved> {
    let records = &batch.rows.records[..];
    let rows = batch.rows.len();
    let lists = steps.step(|index| {
        // SAFETY: the relation is open.
        let asked = unsafe { Options::of(index.relation()) }.lists;
        Ok(asked.unwrap_or_else(|| cluster::default_lists(rows as u64)))
    })?;
    let (model, first_id) = (&batch.root.models()[0], batch.meta.next_cell);
    let pool = threads::pool()?;
    let cells = threads::off_thread(|interrupt| {
        first_cells(model, records, lists, model.seed, &pool, interrupt)
    })?;
    let cells = cells.map_err(|error| internal(&error))?;
    let mut uploads = Uploads::new(claim.target.url.clone());
    let (mut segments, mut objects) = (Vec::new(), Vec::new());
    for range in cells.segments(SEGMENT_BYTES / (records.len() / rows)) {
        let name = steps.step(|index| new_object(index, claim))?;
        let written =
            uploads.segment(&name, |out| cells.write(model, name, first_id, range.clone(), out))?;
        segments.push(written);
        objects.push((name.object, cells.positions[range].concat()));
    }
    uploads.finish()?;
    let sections = cells.root(&batch.root, first_id, &segments);
    let sections = sections.map_err(|error| internal(&error))?;
    let root = Root::from_sections(sections.iter().map(|(key, bytes)| (key.code(), bytes.clone())));
    let stats = root.map_err(|error| internal(&error))?.cell_stats();
    Ok(Moved { sections, objects, first_cells: Some(stats) })
}

/// The sections as pages name them.
pub(super) fn with_codes(sections: &[(SectionKey, Vec<u8>)]) -> Vec<(u32, &[u8])> {
    sections.iter().map(|(key, bytes)| (key.code(), bytes.as_slice())).collect()
}

fn publish_rows(index: Index, batch: &Batch, claim: &Claim, moved: &Moved) -> Result<Published> {
    let old = batch.root.segments().iter().map(|entry| entry.object);
    let named = old.chain(moved.objects.iter().map(|(object, _)| *object)).collect();
    let rows = batch.rows.len() as u64;
    let change = |meta: &mut Meta| {
        meta.rows += rows;
        if let Some(cells) = moved.first_cells {
            meta.next_cell += cells.cells;
            meta.calibrated_rows = rows;
            meta.built_spread = cells.spread as f32;
        }
        meta.store_id = claim.target.store_id;
        meta.store_url.clone_from(&claim.target.url);
        meta.retry = Retry::default();
    };
    let publication = Publication {
        basis: &batch.meta,
        sections: &with_codes(&moved.sections),
        objects: &named,
        retired: &[],
        flushed: Some(&batch.rows),
        change: &change,
    };
    publish(index, &publication, |_| {
        let dead = batch.rows.dead(index, batch.meta.index_id)?;
        let dead: HashSet<u32> = dead.into_iter().collect();
        let of_object = |(object, positions): &(ObjectId, Vec<u32>)| {
            let rows = (0u32..).zip(positions).filter(|(_, row)| dead.contains(row));
            (*object, rows.map(|(ordinal, _)| ordinal).collect())
        };
        Ok(moved.objects.iter().map(of_object).collect())
    })
}

/// All rows of a batch are dead: the delta only gets shorter.
fn publish_nothing(index: Index, batch: &Batch) -> Result<Published> {
    let sections = index.retry(|| blob::read_root(index, &batch.meta))?;
    let named = batch.root.segments().iter().map(|entry| entry.object).collect();
    let sections: Vec<_> = sections.iter().map(|(key, bytes)| (*key, bytes.as_slice())).collect();
    let publication = Publication {
        basis: &batch.meta,
        sections: &sections,
        objects: &named,
        retired: &[],
        flushed: Some(&batch.rows),
        change: &|meta| meta.retry = Retry::default(),
    };
    publish(index, &publication, |_| Ok(Vec::new()))
}

pub(super) fn internal(error: &dyn std::fmt::Display) -> Error {
    Error::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "could not make a segment of inserted rows")
        .detail(format!("{error}."))
}
