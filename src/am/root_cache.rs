//! The root of an index, read once per backend and version.

use std::{cell::RefCell, collections::HashMap, rc::Rc, sync::Arc};

use pgrx::PgSqlErrorCode;
use polign_engine::{
    ObjectId,
    quantize::{Model, plane2},
    root::{Root, RootBuilder},
};

use super::row::RowCoder;
use crate::{
    error::{Error, Result},
    pages::{
        Access, Index, blob,
        meta::{self, Meta},
        relation::Storage,
    },
};

struct Cached {
    index_id: ObjectId,
    root_id: ObjectId,
    root: Arc<Root>,
    coder: Option<Rc<RowCoder>>,
}

/// More indexes than this in one backend: forget them all rather than grow.
const MAX_CACHED: usize = 64;

thread_local! {
    static CACHE: RefCell<HashMap<Storage, Cached>> = RefCell::new(HashMap::new());
}

/// The root that `meta`, just read, names. An index without one has a root all the same: one cell around
/// the origin, so that rows are coded and scanned as everywhere.
pub fn get(index: Index, meta: &Meta) -> Access<Arc<Root>> {
    let storage = index.storage();
    let known = CACHE.with_borrow(|cache| {
        let known = cache.get(&storage)?;
        let same = known.index_id == meta.index_id && known.root_id == meta.root_id;
        same.then(|| known.root.clone())
    });
    if let Some(root) = known {
        return Ok(root);
    }
    let sections = match meta.sections.is_empty() {
        true => empty_root(meta).map_err(|error| damaged(index, &error))?,
        false => blob::read_root(index, meta)?,
    };
    let root = Root::from_sections(sections).map_err(|error| damaged(index, &error))?;
    if root.metric() != meta.metric || root.dim() != meta.dim as usize {
        return Err(damaged(index, &"the root is of another metric or dimension").into());
    }
    if root.models()[0].bits != usize::from(meta.bits) {
        return Err(damaged(index, &"the root has codes of other bits than the delta").into());
    }
    let root = Arc::new(root);
    let cached =
        Cached { index_id: meta.index_id, root_id: meta.root_id, root: root.clone(), coder: None };
    CACHE.with_borrow_mut(|cache| {
        if cache.len() >= MAX_CACHED {
            cache.clear();
        }
        cache.insert(storage, cached);
    });
    Ok(root)
}

/// The root of now, with the meta page that names it.
pub fn current(index: Index) -> Result<(Rc<Meta>, Arc<Root>)> {
    index.retry(|| {
        let meta = meta::read(index)?;
        let root = get(index, &meta)?;
        Ok((meta, root))
    })
}

/// What codes new rows now, with the meta page that names its root.
pub fn coder(index: Index) -> Result<(Rc<Meta>, Rc<RowCoder>)> {
    let (meta, root) = current(index)?;
    let coder = CACHE.with_borrow_mut(|cache| {
        let new = || Rc::new(RowCoder::new(root.clone()));
        match cache.get_mut(&index.storage()) {
            Some(cached) => cached.coder.get_or_insert_with(new).clone(),
            None => new(),
        }
    });
    Ok((meta, coder))
}

/// The sections of a root with one cell, number 0, whose centroid is the origin.
fn empty_root(meta: &Meta) -> std::result::Result<Vec<(u32, Vec<u8>)>, String> {
    let dim = meta.dim as usize;
    let bits = meta.bits as usize;
    let model = Model::with_bits(0, meta.metric, dim, bits, meta.seed, vec![0.0; dim])
        .map_err(|error| error.to_string())?;
    let mut centroid = Vec::new();
    plane2::encode(&model, &vec![0.0; model.padded_dim()], 0, &mut centroid);
    let mut builder = RootBuilder::new(vec![model]);
    builder.cell(0, &[&centroid]);
    let sections = builder.build().map_err(|error| error.to_string())?;
    Ok(sections.into_iter().map(|(key, bytes)| (key.code(), bytes)).collect())
}

fn damaged(index: Index, cause: &dyn std::fmt::Display) -> Error {
    Error::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("the root of index \"{}\" is damaged", index.name()),
    )
    .detail(format!("Reading it: {cause}."))
    .hint("REINDEX the index.")
}
