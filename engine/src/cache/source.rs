//! Parts for a search: from the mapped cache, and from the store process what the cache does not have.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{CacheLink, CacheMap, Counter, map::Located};
use crate::{
    gets::{GAP, GetBudget},
    kernel::RacyBytes,
    protocol::{
        ClientError, Failure, FailureKind, FetchPlan, FetchSummary, ObjectParts, PartOutcome,
        PartRange, Priority, Reply, Request, RequestId, Waiter,
    },
    segment::{
        PartKey, PartRef, PartSource, PartView, SegmentName, SourceError, Want,
        part::{self, HEADER_LEN},
    },
};

/// Losses in a row after which the bytes are asked for instead of the place in the cache.
const LOSSES_BEFORE_BYTES: u32 = 2;
/// Token of a view of private bytes.
const PRIVATE: u64 = u64::MAX;

/// What a source did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceStats {
    /// Parts that were in the cache when they were first looked for.
    pub hits: u64,
    pub hit_bytes: u64,
    /// Parts that were not.
    pub misses: u64,
    /// Views whose region was evicted under the reader.
    pub lost: u64,
    /// Parts that a file of the cache no longer held as they were written.
    pub damaged: u64,
    /// Requests to the object store that were made for this source.
    pub gets: u64,
    pub get_bytes: u64,
    /// Time spent waiting for the store process.
    pub waited: Duration,
}

impl SourceStats {
    fn add(&mut self, summary: FetchSummary) {
        self.gets += u64::from(summary.gets);
        self.get_bytes += summary.bytes;
    }
}

/// Requests that outlive the search which made them: for parts that were asked for ahead, or whose
/// summary is still on its way. Dropping it gives them up.
#[derive(Debug)]
pub struct Unfinished {
    link: Rc<RefCell<CacheLink>>,
    requests: Vec<RequestId>,
}

impl Unfinished {
    /// Waits for the requests, at most until `deadline`, and adds what they cost.
    pub fn finish(mut self, stats: &mut SourceStats, waiter: &mut impl Waiter, deadline: Instant) {
        while let Some(&id) = self.requests.last() {
            let mut link = self.link.borrow_mut();
            let client = link.client();
            while let Some(reply) = client.take(id) {
                if let Reply::FetchDone(summary) = reply {
                    stats.add(summary);
                }
            }
            if !client.knows(id) {
                self.requests.pop();
            } else if client.wait(waiter, deadline).and_then(|()| client.pump()).is_err() {
                return;
            }
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        give_up(&self.link, self.requests.drain(..));
    }
}

fn give_up(link: &RefCell<CacheLink>, requests: impl Iterator<Item = RequestId>) {
    // Unwinding out of a wait may hold the link; the store process then answers into the void.
    if let Ok(mut link) = link.try_borrow_mut() {
        requests.for_each(|id| link.client().forget(id));
    }
}

/// A request that was not answered in full.
#[derive(Debug)]
struct Underway {
    id: RequestId,
    keys: Vec<PartKey>,
    /// The answer holds the parts themselves.
    with_bytes: bool,
}

/// A [`PartSource`] over the cache of this machine, for one search.
pub struct CachedSource<W: Waiter> {
    link: Rc<RefCell<CacheLink>>,
    map: Option<Rc<CacheMap>>,
    waiter: W,
    store: String,
    timeout: Duration,
    priority: Priority,
    /// Requests under way.
    requests: Vec<Underway>,
    pending: HashSet<PartKey>,
    bytes: HashMap<PartKey, Bytes>,
    failed: HashMap<PartKey, Failure>,
    /// Parts whose bytes in the cache are not what was written: to be read from the store again.
    damaged: HashSet<PartKey>,
    losses: u32,
    faults: u64,
    budget: GetBudget,
    stats: SourceStats,
    counted: SourceStats,
}

impl<W: Waiter> CachedSource<W> {
    /// A source of the objects in a store, by its URL. Waiting for a part is given up after `timeout`.
    pub fn new(
        link: Rc<RefCell<CacheLink>>,
        store: impl Into<String>,
        timeout: Duration,
        waiter: W,
    ) -> Self {
        let map = link.borrow_mut().map();
        let faults = map.as_ref().map_or(0, |map| map.faults());
        Self {
            link,
            map,
            waiter,
            store: store.into(),
            timeout,
            priority: Priority::Query,
            requests: Vec::new(),
            pending: HashSet::new(),
            bytes: HashMap::new(),
            failed: HashMap::new(),
            damaged: HashSet::new(),
            losses: 0,
            faults,
            budget: GetBudget::default(),
            stats: SourceStats::default(),
            counted: SourceStats::default(),
        }
    }

    /// Makes it a source for maintenance, which reads much and each part once: searches come first, and
    /// what the cache does not have is read without a place in it.
    pub fn beside_searches(mut self) -> Self {
        self.priority = Priority::Build;
        self
    }

    fn is_beside_searches(&self) -> bool {
        self.priority < Priority::Query
    }

    /// Ends the source without giving up what it still has under way, except for parts that would come
    /// through the socket.
    pub fn into_unfinished(mut self) -> Unfinished {
        let kept = self.requests.extract_if(.., |request| !request.with_bytes);
        let requests = kept.map(|request| request.id).collect();
        Unfinished { link: Rc::clone(&self.link), requests }
    }

    /// What the source did so far.
    pub fn stats(&self) -> SourceStats {
        self.stats
    }

    /// Mends the mapping after a fault, which left zeros in place of what was mapped.
    fn mend(&mut self) {
        let Some(map) = &self.map else { return };
        let faults = map.faults();
        if faults != self.faults {
            map.mend();
            map.add(Counter::Faults, faults.saturating_sub(self.faults));
            self.faults = faults;
        }
    }

    fn find(&mut self, part: &PartRef) -> Option<PartView> {
        self.mend();
        let map = self.map.as_ref()?;
        let located = map.find(part.key.object, part.key.index)?;
        let head = map.copy_head::<HEADER_LEN>(&located)?;
        let first = map.pointer(&located)?;
        let Ok(range) = part::payload_range_unchecked_crc(part.key, &head, located.len as usize)
        else {
            self.distrust(part.key, &located);
            return None;
        };
        if !self.is_intact(part.key, &located, first) {
            self.distrust(part.key, &located);
            return None;
        }
        let map = self.map.as_ref()?;
        if self.priority == Priority::Query {
            map.count_access(&located);
        }
        // SAFETY: the part lies within one region of the address range that the map has reserved, and
        // `range` within the part; the map lives as long as the view, which owns a reference to it.
        // Other processes may write there meanwhile, which is what `RacyBytes` is for.
        let payload: RacyBytes<'static> =
            unsafe { RacyBytes::from_raw_parts(first.add(range.start), range.len()) };
        let token = token(located.region, located.generation);
        let owner: Rc<CacheMap> = Rc::clone(map);
        Some(PartView::shared(payload, owner, token, self.faults))
    }

    /// Whether this process has found the checksum of the part right, now or before.
    fn is_intact(&self, key: PartKey, located: &Located, first: *const u8) -> bool {
        let Ok(mut link) = self.link.try_borrow_mut() else { return true };
        if link.trusted.contains(located) {
            return true;
        }
        // SAFETY: the part lies within one region of the address range that the map has reserved, and
        // the map outlives this call.
        let bytes = unsafe { RacyBytes::from_raw_parts(first, located.len as usize) };
        let intact = part::verify(key, &bytes.copy_to_vec()).is_ok();
        if intact {
            link.trusted.insert(located);
        }
        intact
    }

    /// The part does not look as it should: because it was evicted meanwhile, or because of the file.
    fn distrust(&mut self, key: PartKey, located: &Located) {
        self.mend();
        let Some(map) = &self.map else { return };
        if map.is_unchanged(located.region, located.generation) {
            self.damaged.insert(key);
            self.stats.damaged += 1;
        }
    }

    fn ask(&mut self, wants: &[Want<'_>], want_bytes: bool, fresh: bool) {
        let mut objects: Vec<ObjectParts> = Vec::new();
        let mut position: HashMap<&SegmentName, usize> = HashMap::new();
        for want in wants {
            let at = *position.entry(want.object).or_insert_with(|| {
                let object = want.part.key.object;
                objects.push(ObjectParts { key: want.object.key(), object, parts: Vec::new() });
                objects.len() - 1
            });
            let PartRef { key, offset, len } = want.part;
            objects[at].parts.push(PartRange { index: key.index, len, offset });
            self.pending.insert(key);
        }
        let (store, priority) = (self.store.clone(), self.priority);
        let want_bytes = want_bytes || self.is_beside_searches();
        let gap = match self.is_beside_searches() {
            true => GAP,
            false => self.budget.gap_for(wants.iter().map(|want| &want.part)),
        };
        let plan = FetchPlan { store, objects, priority, want_bytes, fresh, gap };
        let begun = self.link.borrow_mut().client().begin(Request::Fetch(plan));
        match begun {
            Ok(id) => {
                let keys = wants.iter().map(|want| want.part.key).collect();
                self.requests.push(Underway { id, keys, with_bytes: want_bytes });
            }
            // Acquiring the parts asks again, and meets the error if it lasts.
            Err(_) => wants.iter().for_each(|want| {
                self.pending.remove(&want.part.key);
            }),
        }
    }

    /// Asks for a part that is missing although it may have been asked for, and with it for what is
    /// missing of the rest of its run: a run that the cache could not hold comes through the socket.
    fn ask_again(&mut self, want: Want<'_>, rest: &[Want<'_>]) {
        let want_bytes = self.losses >= LOSSES_BEFORE_BYTES || self.map.is_none();
        self.losses += 1;
        if self.damaged.remove(&want.part.key) {
            return self.ask(&[want], want_bytes, true);
        }
        let mut wants = vec![want];
        for want in rest {
            if !self.pending.contains(&want.part.key) && !self.contains(&want.part) {
                wants.push(*want);
            }
        }
        self.ask(&wants, want_bytes || wants.len() > 1, false);
    }

    /// Takes the replies that are here.
    fn drain(&mut self) {
        let mut link = self.link.borrow_mut();
        let client = link.client();
        let mut at = 0;
        while let Some(Underway { id, keys, .. }) = self.requests.get(at) {
            let id = *id;
            let mut last = false;
            while let Some(reply) = client.take(id) {
                last |= reply.is_last();
                match reply {
                    Reply::Part { object, index, outcome } => {
                        let key = PartKey { object, index };
                        self.pending.remove(&key);
                        match outcome {
                            PartOutcome::Published => {}
                            PartOutcome::Bytes(bytes) => {
                                self.bytes.insert(key, bytes.into());
                            }
                            PartOutcome::Failed(failure) => {
                                self.failed.insert(key, failure);
                            }
                        }
                    }
                    Reply::FetchDone(summary) => self.stats.add(summary),
                    Reply::Failed(failure) => {
                        for &key in keys.iter().filter(|key| self.pending.remove(key)) {
                            self.failed.insert(key, failure.clone());
                        }
                    }
                    Reply::Done
                    | Reply::Bytes(_)
                    | Reply::Listed { .. }
                    | Reply::Uploads { .. } => {}
                }
            }
            if last {
                self.requests.swap_remove(at);
            } else {
                at += 1;
            }
        }
        let map = link.map();
        if self.map.as_ref().map(|map| map.id()) != map.as_ref().map(|map| map.id()) {
            self.map = map;
            self.faults = self.map.as_ref().map_or(0, |map| map.faults());
        }
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), ClientError> {
        let started = Instant::now();
        let mut link = self.link.borrow_mut();
        let waited =
            link.client().wait(&mut self.waiter, deadline).and_then(|()| link.client().pump());
        self.stats.waited += started.elapsed();
        waited
    }

    /// Adds what was done since the last time to the counters that all processes share.
    fn count(&mut self) {
        let Some(map) = &self.map else { return };
        for (counter, now, before) in [
            (Counter::Hits, self.stats.hits, self.counted.hits),
            (Counter::HitBytes, self.stats.hit_bytes, self.counted.hit_bytes),
            (Counter::Misses, self.stats.misses, self.counted.misses),
            (Counter::Lost, self.stats.lost, self.counted.lost),
        ] {
            if now > before {
                map.add(counter, now - before);
            }
        }
        self.counted = self.stats;
    }
}

impl<W: Waiter> PartSource for CachedSource<W> {
    fn store(&self) -> &str {
        &self.store
    }

    fn request(&mut self, wants: &[Want<'_>]) {
        let missing: Vec<Want<'_>> = wants
            .iter()
            .filter(|want| {
                let key = want.part.key;
                !self.pending.contains(&key) && !self.bytes.contains_key(&key)
            })
            .copied()
            .collect();
        if !missing.is_empty() {
            let no_cache = self.map.is_none();
            self.ask(&missing, no_cache, false);
        }
    }

    fn check_interrupts(&mut self) -> Result<(), SourceError> {
        self.waiter.check().map_err(|_| SourceError::Interrupted)
    }

    fn contains(&mut self, part: &PartRef) -> bool {
        self.bytes.contains_key(&part.key)
            || self
                .map
                .as_ref()
                .is_some_and(|map| map.find(part.key.object, part.key.index).is_some())
    }

    fn try_acquire(&mut self, part: &PartRef) -> Option<PartView> {
        let view = self.find(part);
        match &view {
            Some(_) => {
                self.stats.hits += 1;
                self.stats.hit_bytes += u64::from(part.len);
            }
            None => self.stats.misses += 1,
        }
        view
    }

    fn acquire_first(
        &mut self,
        want: Want<'_>,
        rest: &[Want<'_>],
    ) -> Result<PartView, SourceError> {
        let key = want.part.key;
        let started = Instant::now();
        let deadline = started + self.timeout;
        let mut distrusted = false;
        loop {
            self.drain();
            if let Some(framed) = self.bytes.remove(&key) {
                match part::verify(key, &framed) {
                    Ok(range) => return Ok(PartView::private(framed.slice(range), PRIVATE)),
                    Err(_) if !distrusted => {
                        distrusted = true;
                        self.ask(&[want], true, true);
                    }
                    Err(cause) => return Err(self.damaged(want, cause.to_string())),
                }
            }
            if self.losses < LOSSES_BEFORE_BYTES
                && let Some(view) = self.find(&want.part)
            {
                return Ok(view);
            }
            if let Some(failure) = self.failed.remove(&key) {
                return Err(self.failure(want, failure, started.elapsed()));
            }
            if !self.pending.contains(&key) {
                // Nobody asked yet, or the part came and went again before it could be read.
                self.ask_again(want, rest);
            }
            if let Err(error) = self.wait(deadline) {
                return Err(self.unanswered(want, error, started.elapsed()));
            }
        }
    }

    fn still_valid(&mut self, view: &PartView) -> bool {
        if view.token() == PRIVATE {
            self.losses = 0;
            return true;
        }
        let Some(map) = &self.map else { return false };
        let (region, generation) = ((view.token() >> 32) as u32, view.token() as u32);
        // The cache may have been made anew since: its generations say nothing about the old one.
        let unchanged = view.is_kept_by(map)
            && map.is_generation(region, generation)
            && map.faults() == view.faults();
        if unchanged {
            self.losses = 0;
        } else {
            self.mend();
            self.stats.lost += 1;
            self.losses += 1;
        }
        unchanged
    }
}

impl<W: Waiter> CachedSource<W> {
    fn damaged(&self, want: Want<'_>, cause: String) -> SourceError {
        SourceError::Damaged {
            object: want.object.key(),
            store: self.store.clone(),
            part: want.part.key,
            cause,
        }
    }

    fn failure(&self, want: Want<'_>, failure: Failure, after: Duration) -> SourceError {
        let Failure { kind, code, message, detail, url, .. } = failure;
        let (object, store) = (want.object.key(), url);
        match kind {
            FailureKind::NotFound => SourceError::Missing { object, store },
            FailureKind::Damaged => {
                SourceError::Damaged { object, store, part: want.part.key, cause: message }
            }
            _ => SourceError::Store {
                object,
                store,
                kind,
                code: Some(code).filter(|code| !code.is_empty()),
                cause: if detail.is_empty() { message } else { format!("{message}: {detail}") },
                after,
            },
        }
    }

    fn unanswered(&self, want: Want<'_>, error: ClientError, after: Duration) -> SourceError {
        match error {
            ClientError::Interrupted(_) => SourceError::Interrupted,
            ClientError::TimedOut => SourceError::Store {
                object: want.object.key(),
                store: self.store.clone(),
                kind: FailureKind::Unreachable,
                code: None,
                cause: "no answer within polign.fetch_timeout".to_owned(),
                after,
            },
            ClientError::Failed(failure) => self.failure(want, *failure, after),
            other => SourceError::Unavailable { cause: other.to_string() },
        }
    }
}

impl<W: Waiter> Drop for CachedSource<W> {
    fn drop(&mut self) {
        self.count();
        give_up(&self.link, self.requests.drain(..).map(|request| request.id));
    }
}

/// What tells later whether a region was evicted: its number, and its generation as far as it fits. Two
/// generations that agree in 32 bits lie four billion evictions apart.
fn token(region: u32, generation: u64) -> u64 {
    u64::from(region) << 32 | u64::from(generation as u32)
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
