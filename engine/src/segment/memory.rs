//! A part source over objects in memory: for tests, and for indexes that were just built.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;

use super::{
    key::{PartKey, PartRef},
    part::{self, PartError},
    source::{PartSource, PartView, SourceError, Want},
};
use crate::ObjectId;

/// What stands for the store's URL in errors.
const STORE: &str = "memory:";

/// What a [`MemorySource`] was asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Calls of [`PartSource::request`].
    pub requests: u64,
    /// Times that a caller would have waited for the store: requests with at least one missing part,
    /// and acquisitions of parts that nobody had requested.
    pub waves: u64,
    /// Parts that had to be fetched.
    pub parts: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Acquisitions.
    pub acquired: u64,
    /// Views that were declared invalid.
    pub lost: u64,
}

/// Serves parts of objects in memory. Starts cold: a part is present after it was requested or acquired
/// once. Fetching and waiting take no time, but are counted.
#[derive(Debug, Default)]
pub struct MemorySource {
    objects: HashMap<ObjectId, Bytes>,
    present: HashSet<PartKey>,
    /// Requested and not acquired yet: present for [`PartSource::acquire`] only.
    requested: HashSet<PartKey>,
    errors: HashMap<ObjectId, SourceError>,
    losses_to_come: u64,
    stats: MemoryStats,
}

impl MemorySource {
    /// A source without objects.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an object.
    pub fn insert(&mut self, object: ObjectId, bytes: impl Into<Bytes>) {
        self.objects.insert(object, bytes.into());
    }

    /// The bytes of an object.
    pub fn object(&self, object: ObjectId) -> Option<&Bytes> {
        self.objects.get(&object)
    }

    /// Takes an object away, as if it had been deleted in the store.
    pub fn remove(&mut self, object: ObjectId) -> Option<Bytes> {
        self.objects.remove(&object)
    }

    /// Lets every fetch from this object fail; parts that are present stay so.
    pub fn fail(&mut self, object: ObjectId, error: SourceError) {
        self.errors.insert(object, error);
    }

    /// Ends all failures.
    pub fn heal(&mut self) {
        self.errors.clear();
    }

    /// Empties the cache.
    pub fn evict_all(&mut self) {
        self.present.clear();
        self.requested.clear();
    }

    /// Declares the next `times` views invalid, and evicts all parts each time.
    pub fn lose_validity(&mut self, times: u64) {
        self.losses_to_come = times;
    }

    /// The counts since the start or since [`MemorySource::reset_stats`].
    pub fn stats(&self) -> MemoryStats {
        self.stats
    }

    /// Sets the counts to zero.
    pub fn reset_stats(&mut self) {
        self.stats = MemoryStats::default();
    }

    /// Asks for what is neither present nor asked for.
    fn ask(&mut self, wants: &[Want<'_>]) {
        let mut missing = false;
        for want in wants {
            let key = want.part.key;
            if !self.present.contains(&key) && self.requested.insert(key) {
                missing = true;
                self.fetched(&want.part);
            }
        }
        self.stats.waves += u64::from(missing);
    }

    fn fetched(&mut self, part: &PartRef) {
        self.stats.parts += 1;
        self.stats.bytes += u64::from(part.len);
    }

    /// The verified payload; the errors are those of a real source.
    fn payload(&self, want: Want<'_>) -> Result<Bytes, SourceError> {
        let (object, store) = (want.object.key(), STORE.to_owned());
        let Some(bytes) = self.objects.get(&want.part.key.object) else {
            return Err(SourceError::Missing { object, store });
        };
        let part = want.part.key;
        cut(bytes, &want.part).map_err(|cause| {
            let cause = cause.to_string();
            SourceError::Damaged { object, store, part, cause }
        })
    }
}

fn cut(object: &Bytes, part: &PartRef) -> Result<Bytes, PartError> {
    let len = object.len() as u64;
    let framed = object.slice(part.offset.min(len) as usize..part.end().min(len) as usize);
    let range = part::verify(part.key, &framed)?;
    Ok(framed.slice(range))
}

impl PartSource for MemorySource {
    fn request(&mut self, wants: &[Want<'_>]) {
        self.stats.requests += 1;
        self.ask(wants);
    }

    fn store(&self) -> &str {
        STORE
    }

    fn contains(&mut self, part: &PartRef) -> bool {
        self.present.contains(&part.key)
    }

    fn try_acquire(&mut self, part: &PartRef) -> Option<PartView> {
        if !self.present.contains(&part.key) {
            return None;
        }
        // Present means that it was verified when it was fetched.
        let object = self.objects.get(&part.key.object)?;
        let framed = object.slice(usize::try_from(part.offset).ok()?..part.end() as usize);
        let header = framed.first_chunk()?;
        let payload = part::payload_range_unchecked_crc(part.key, header, framed.len()).ok()?;
        let payload = framed.slice(payload);
        self.stats.acquired += 1;
        Some(PartView::private(payload, 0))
    }

    fn acquire_first(
        &mut self,
        want: Want<'_>,
        rest: &[Want<'_>],
    ) -> Result<PartView, SourceError> {
        let key = want.part.key;
        self.stats.acquired += 1;
        if !self.present.contains(&key) {
            if !self.requested.contains(&key) {
                self.ask(&[&[want], rest].concat());
            }
            self.requested.remove(&key);
            if let Some(error) = self.errors.get(&key.object) {
                return Err(error.clone());
            }
        }
        let payload = self.payload(want)?;
        self.present.insert(key);
        Ok(PartView::private(payload, 0))
    }

    fn still_valid(&mut self, _view: &PartView) -> bool {
        if self.losses_to_come == 0 {
            return true;
        }
        self.losses_to_come -= 1;
        self.stats.lost += 1;
        self.evict_all();
        false
    }
}
