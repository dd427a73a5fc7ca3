//! `polign.prewarm(index)` and `polign.cache_clear()`.

use pgrx::prelude::*;
use polign_engine::{
    gets::GAP,
    protocol::{FetchPlan, ObjectParts, PartRange, Priority, Reply, Request},
    root::Root,
    segment::PartRef,
};

use super::target::OpenIndex;
use crate::{
    am::root_cache,
    error::{OrRaise, Result},
    guc, session,
};

/// Brings an index into the cache: first what every search scans, then what it refines by. Returns the
/// bytes that were asked for, which are no more than the cache takes.
#[pg_extern(sql = false)]
fn prewarm(index: pg_sys::Oid) -> i64 {
    warm(index).or_raise() as i64
}

/// The part of the cache that one index may fill: the policy keeps some room for newcomers.
const SHARE: f64 = 0.9;

fn warm(index: pg_sys::Oid) -> Result<u64> {
    let open = OpenIndex::for_reader(index)?;
    let (meta, root) = root_cache::current(open.pages())?;
    let mut room = (guc::CACHE_SIZE_MB.get() as f64 * 1048576.0 * SHARE) as u64;
    let mut asked = 0;
    for column in [plane1, plane2] {
        for segment in 0..root.segments().len() as u32 {
            let mut parts = column(&root, segment);
            parts.retain(|part| {
                let fits = u64::from(part.len) <= room;
                room -= if fits { u64::from(part.len) } else { 0 };
                fits
            });
            if parts.is_empty() {
                continue;
            }
            asked += parts.iter().map(|part| u64::from(part.len)).sum::<u64>();
            let name = root.segment_name(segment);
            let range = |part: PartRef| PartRange {
                index: part.key.index,
                len: part.len,
                offset: part.offset,
            };
            let plan = FetchPlan {
                store: meta.store_url.clone(),
                objects: vec![ObjectParts {
                    key: name.key(),
                    object: name.object,
                    parts: parts.into_iter().map(range).collect(),
                }],
                priority: Priority::Prefetch,
                want_bytes: false,
                fresh: false,
                gap: GAP,
            };
            session::call("read", Request::Prewarm(plan))?;
        }
    }
    Ok(asked)
}

fn plane1(root: &Root, segment: u32) -> Vec<PartRef> {
    let geometry = root.geometry(segment);
    let dense: Vec<_> = geometry.dense_parts().collect();
    if !dense.is_empty() {
        return dense;
    }
    let pieces = root.pieces().iter().chain(root.delta_pieces());
    let own = pieces.filter(|piece| piece.segment == segment);
    own.flat_map(|piece| geometry.plane1_parts(piece)).map(|part| part.part).collect()
}

fn plane2(root: &Root, segment: u32) -> Vec<PartRef> {
    root.geometry(segment).plane2_parts().collect()
}

/// Empties the cache of the whole cluster.
#[pg_extern(sql = false)]
fn cache_clear() {
    let reply: Result<Reply> = session::call("delete", Request::ClearCache);
    reply.or_raise();
}
