//! The objects of an index in the store: each is there with its length, holds what the root says, and (deep)
//! has the right checksums; its rows are in the index once.

use std::collections::HashMap;

use polign_engine::{
    gets::GAP,
    protocol::{FetchPlan, ObjectParts, PartRange, Priority, Reply, Request},
    root::Root,
    segment::{PartRef, PartSource, SourceError, Want},
};
use roaring::RoaringTreemap;

use super::{Problems, State, Subject, tid};
use crate::{
    am::vacuum::read_ids,
    error::{Error, Result},
    session::{self, IndexSource},
};

/// Parts whose checksums are compared in one request.
const PARTS_AT_A_TIME: usize = 256;
/// Keys asked for in one request.
const KEYS_AT_A_TIME: u32 = 1000;

/// Notes the rows of all segments that are not dead. Gives how many objects could not be read.
pub(super) fn check(
    state: &State,
    deep: bool,
    rows: &mut RoaringTreemap,
    problems: &mut Problems,
) -> Result<usize> {
    let root = &state.root;
    if root.segments().is_empty() {
        return Ok(0);
    }
    let mut unread = 0;
    let there = lengths(state)?;
    let mut source = session::maintenance_source(&state.meta)?;
    for (segment, entry) in (0u32..).zip(root.segments()) {
        pgrx::check_for_interrupts!();
        let key = root.segment_name(segment).key();
        match there.get(&key) {
            None => {
                problems.add(Subject::Object, &key, "it is not in the store");
                unread += 1;
                continue;
            }
            Some(&len) if len != entry.object_len.get() => {
                let expected = entry.object_len.get();
                problems.add(
                    Subject::Object,
                    &key,
                    format!("it has {len} bytes, the root says {expected}"),
                );
                unread += 1;
                continue;
            }
            Some(_) => {}
        }
        let readable = !deep || checksums_hold(state, segment, &key, problems)?;
        if !readable || !check_rows(state, segment, deep, &mut source, rows, problems)? {
            unread += 1;
        }
    }
    Ok(unread)
}

/// The length of each object under the prefixes of the root's objects.
fn lengths(state: &State) -> Result<HashMap<String, u64>> {
    let root = &state.root;
    let names = (0..root.segments().len() as u32).map(|segment| root.segment_name(segment).key());
    let mut prefixes: Vec<String> =
        names.filter_map(|key| key.rfind('/').map(|end| key[..=end].to_owned())).collect();
    prefixes.sort_unstable();
    prefixes.dedup();
    let mut lengths = HashMap::new();
    for prefix in prefixes {
        let mut after = None;
        loop {
            let request = Request::List {
                store: state.meta.store_url.clone(),
                prefix: prefix.clone(),
                after: after.take(),
                limit: KEYS_AT_A_TIME,
            };
            let Reply::Listed { objects, more, .. } = session::call("list", request)? else {
                break;
            };
            after = objects.last().map(|object| object.key.clone());
            lengths.extend(objects.into_iter().map(|object| (object.key, object.len)));
            if !more || after.is_none() {
                break;
            }
        }
    }
    Ok(lengths)
}

/// Has every part of an object read from the store again, past the cache, which is left to searches.
fn checksums_hold(state: &State, segment: u32, key: &str, problems: &mut Problems) -> Result<bool> {
    let parts = parts(&state.root, segment);
    for parts in parts.chunks(PARTS_AT_A_TIME) {
        pgrx::check_for_interrupts!();
        let range = |part: &PartRef| PartRange {
            index: part.key.index,
            len: part.len,
            offset: part.offset,
        };
        let plan = FetchPlan {
            store: state.meta.store_url.clone(),
            objects: vec![ObjectParts {
                key: key.to_owned(),
                object: state.root.segments()[segment as usize].object,
                parts: parts.iter().map(range).collect(),
            }],
            priority: Priority::Build,
            want_bytes: false,
            fresh: true,
            gap: GAP,
        };
        match session::call("read", Request::Check(plan)) {
            Ok(_) => {}
            Err(error) if is_of_the_index(&error) => {
                problems.error(Subject::Object, key, &error);
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Whether the object is to blame, not the way to it.
fn is_of_the_index(error: &Error) -> bool {
    error.code == pgrx::PgSqlErrorCode::ERRCODE_DATA_CORRUPTED
}

/// Every part of a segment.
fn parts(root: &Root, segment: u32) -> Vec<PartRef> {
    let geometry = root.geometry(segment);
    let mut parts = vec![geometry.header_part()];
    let dense: Vec<_> = geometry.dense_parts().collect();
    if dense.is_empty() {
        let pieces = root.pieces().iter().chain(root.delta_pieces());
        let own = pieces.filter(|piece| piece.segment == segment);
        parts.extend(own.flat_map(|piece| geometry.plane1_parts(piece)).map(|part| part.part));
    }
    parts.extend(dense);
    parts.extend(geometry.ids_parts());
    parts.extend(geometry.plane2_parts());
    parts.extend(geometry.row_parts());
    parts.extend(geometry.footer_parts());
    parts
}

/// False if the ids cannot be read.
fn check_rows(
    state: &State,
    segment: u32,
    deep: bool,
    source: &mut IndexSource,
    rows: &mut RoaringTreemap,
    problems: &mut Problems,
) -> Result<bool> {
    let root = &state.root;
    let key = root.segment_name(segment).key();
    let object = root.segments()[segment as usize].object;
    let dead = state.tombstones.segment(object);
    let mut ids: Vec<u64> = Vec::new();
    let read =
        read_ids(root, segment, source, &|error: SourceError| Error::from(error), |first, part| {
            for (ordinal, &id) in (first..).zip(part) {
                if !dead.is_some_and(|dead| dead.is_dead(ordinal)) && !rows.insert(id) {
                    problems.add(
                        Subject::Row,
                        tid(id),
                        format!("it is in the index twice, once in {key}"),
                    );
                }
            }
            if deep {
                ids.extend_from_slice(part);
            }
            Ok(())
        });
    match read {
        Ok(()) => {}
        Err(error) if is_of_the_index(&error) => {
            problems.error(Subject::Object, &key, &error);
            return Ok(false);
        }
        Err(error) => return Err(error),
    }
    if let Some(dead) = dead {
        let beyond = root.geometry(segment).rows();
        let mut last = None;
        dead.for_each_dead(beyond, u32::MAX - beyond, |ordinal| last = Some(ordinal));
        if let Some(ordinal) = last {
            problems.add(
                Subject::Page,
                &key,
                format!(
                    "there is a tombstone for row {ordinal}, but the segment has {beyond} rows"
                ),
            );
        }
    }
    if deep {
        check_records(root, segment, &ids, source, problems)?;
    }
    Ok(true)
}

/// Plane-2 records name the rows that the ids column names.
fn check_records(
    root: &Root,
    segment: u32,
    ids: &[u64],
    source: &mut IndexSource,
    problems: &mut Problems,
) -> Result<()> {
    let geometry = root.geometry(segment);
    let name = root.segment_name(segment);
    let len = geometry.shape().record_bytes();
    let mut ordinal = 0;
    for part in geometry.plane2_parts() {
        pgrx::check_for_interrupts!();
        let found: Vec<u64> = loop {
            let view = source.acquire(Want { object: &name, part })?;
            let bytes = view.bytes();
            let records = geometry.payload_len(&part) / len;
            let id = |record: usize| bytes.read_u64_le((record + 1) * len - 8);
            let found = (0..records).map_while(id).collect();
            if source.still_valid(&view) {
                break found;
            }
        };
        for id in found {
            if ids.get(ordinal) != Some(&id) {
                problems.add(
                    Subject::Object,
                    name.key(),
                    format!("the record of row {ordinal} belongs to {}", tid(id)),
                );
                return Ok(());
            }
            ordinal += 1;
        }
    }
    Ok(())
}
