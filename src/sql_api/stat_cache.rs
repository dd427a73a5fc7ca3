//! `polign.stat_cache`: what the segment cache of the cluster did since it was made.

use std::rc::Rc;

use pgrx::prelude::*;
use polign_engine::cache::{CacheMap, Counter, Counters};

use crate::session;

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn stat_cache() -> TableIterator<
    'static,
    (
        name!(hits, i64),
        name!(hit_bytes, i64),
        name!(misses, i64),
        name!(lost, i64),
        name!(faults, i64),
        name!(gets, i64),
        name!(get_bytes, i64),
        name!(fetch_ms, f64),
        name!(retries, i64),
        name!(errors, i64),
        name!(puts, i64),
        name!(put_bytes, i64),
        name!(evictions, i64),
        name!(evicted_bytes, i64),
        name!(parts, i64),
        name!(bytes, i64),
        name!(max_bytes, i64),
    ),
> {
    let link = session::link();
    let mut link = link.borrow_mut();
    // The link does not try again at once when there was no cache a moment ago; somebody asks now.
    let map = link.map().or_else(|| CacheMap::open(link.directory()).ok().map(Rc::new));
    // Without a cache, nothing has been counted: no row.
    let row = map.map(|map| {
        let counters: Counters = map.counters();
        let get = |counter| counters.get(counter) as i64;
        (
            get(Counter::Hits),
            get(Counter::HitBytes),
            get(Counter::Misses),
            get(Counter::Lost),
            get(Counter::Faults),
            get(Counter::Gets),
            get(Counter::GetBytes),
            counters.get(Counter::GetMicros) as f64 / 1000.0,
            get(Counter::Retries),
            get(Counter::Errors),
            get(Counter::Puts),
            get(Counter::PutBytes),
            get(Counter::Evictions),
            get(Counter::EvictedBytes),
            get(Counter::Parts),
            get(Counter::UsedBytes),
            get(Counter::LimitBytes),
        )
    });
    TableIterator::new(row)
}
