//! Taking the parts of a file that was just uploaded into the cache.

use std::{fs::File, os::unix::fs::FileExt};

use bytes::Bytes;
use polign_engine::{
    ObjectId,
    segment::{
        PartKey, PartKind,
        part::{HEADER_LEN, peek, verify},
    },
};

use crate::region_cache::{Era, RegionCache};

/// Parts published together.
const STEP: usize = 64;

/// Publishes what queries read of an object, as far as the cache takes it. Anything unexpected ends it:
/// the parts come from the store then.
pub(super) fn ingest(file: &File, object: ObjectId, cache: &RegionCache, era: Era) {
    let mut parts: Vec<(PartKey, Bytes)> = Vec::with_capacity(STEP);
    let mut offset = 0;
    loop {
        let part = read_part(file, object, offset);
        if let Some((key, bytes)) = &part {
            offset += bytes.len() as u64;
            if matches!(key.kind(), Some(PartKind::Plane1 | PartKind::Plane2)) {
                parts.push((*key, bytes.clone()));
            }
        }
        if parts.len() == STEP || part.is_none() {
            let taken = cache.insert(&parts, era);
            parts.clear();
            if part.is_none() || taken.contains(&false) {
                return;
            }
        }
    }
}

fn read_part(file: &File, object: ObjectId, offset: u64) -> Option<(PartKey, Bytes)> {
    let mut header = [0; HEADER_LEN];
    file.read_exact_at(&mut header, offset).ok()?;
    let (index, len) = peek(&header).ok()?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset).ok()?;
    let key = PartKey { object, index };
    verify(key, &bytes).ok()?;
    Some((key, bytes.into()))
}
