//! The section of models: what they have in common, then each in its serialised form.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32},
};

use super::section::{RootError, SectionKey, SectionKind, entry};
use crate::{Metric, quantize::Model, segment::part::FORMAT_VERSION};

/// More models than an index ever has at once.
pub const MAX_MODELS: usize = 256;

const MAGIC: u32 = u32::from_le_bytes(*b"PLGR");
const SECTION: SectionKey = SectionKey::only(SectionKind::Models);

/// `FORMAT_VERSION` stands here for the whole root: every root has this section.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: U32,
    version: U16,
    metric: U16,
    dim: U32,
    models: U32,
}

/// Serialises the models of an index. The first one is what new rows are coded by.
pub fn encode(models: &[Model]) -> Vec<u8> {
    let header = Header {
        magic: MAGIC.into(),
        version: FORMAT_VERSION.into(),
        metric: models.first().map_or(0, |model| u16::from(model.metric.code())).into(),
        dim: models.first().map_or(0, |model| model.dim as u32).into(),
        models: (models.len() as u32).into(),
    };
    let mut bytes = header.as_bytes().to_vec();
    for model in models {
        let model = model.to_bytes();
        bytes.extend_from_slice(&(model.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&model);
    }
    bytes
}

/// Reads [`encode`]: at least one model, all of one metric and dimension, with different ids.
pub fn decode(bytes: &[u8]) -> Result<Vec<Model>, RootError> {
    let too_short = || RootError::Length {
        section: SECTION,
        expected: size_of::<Header>() as u64,
        found: bytes.len() as u64,
    };
    let (header, mut rest) = Header::ref_from_prefix(bytes).map_err(|_| too_short())?;
    if header.magic != MAGIC {
        return Err(entry(SECTION, 0, "not the magic number of a root"));
    }
    let version = header.version.get();
    if version != FORMAT_VERSION {
        return Err(RootError::Version { found: version, known: FORMAT_VERSION });
    }
    let metric = u8::try_from(header.metric.get()).ok().and_then(Metric::from_code);
    let metric = metric.ok_or_else(|| entry(SECTION, 0, "unknown metric"))?;
    let count = header.models.get() as usize;
    if !(1..=MAX_MODELS).contains(&count) {
        return Err(entry(SECTION, 0, "number of models is not 1 to 256"));
    }
    let mut models: Vec<Model> = Vec::with_capacity(count);
    for position in 0..count {
        let damaged = |what| entry(SECTION, position, what);
        let (len, after) = U32::ref_from_prefix(rest).map_err(|_| damaged("no length"))?;
        let (model, after) = after
            .split_at_checked(len.get() as usize)
            .ok_or_else(|| damaged("longer than its section"))?;
        rest = after;
        let model = Model::from_bytes(model)
            .map_err(|cause| RootError::Model { entry: position as u64, cause })?;
        if model.metric != metric || model.dim != header.dim.get() as usize {
            return Err(damaged("metric or dimension differs from the index's"));
        }
        if models.iter().any(|other| other.id == model.id) {
            return Err(damaged("id of another model"));
        }
        models.push(model);
    }
    if rest.is_empty() {
        Ok(models)
    } else {
        Err(entry(SECTION, count, "bytes after the last model"))
    }
}
