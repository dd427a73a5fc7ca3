//! Coding a row for the delta.

use std::{cell::OnceCell, sync::Arc};

use polign_engine::{
    Metric,
    cluster::norm_distance2,
    kernel::{RacyBytes, norm_squared_f64},
    quantize::{
        Model, RowError, cell_rank,
        plane1::{self, Plane1RowRef},
        plane2,
    },
    root::Root,
    search::Ranking,
};

/// A coded row.
#[derive(Debug, Clone, PartialEq)]
pub struct CodedRow {
    /// The nearest cell.
    pub cell: u32,
    /// Its plane-1 row, as stored.
    pub code: Vec<u8>,
    /// Its plane-2 record.
    pub record: Vec<u8>,
}

/// Codes rows by the first model of a root, each relative to the cell that the build would have put it
/// into.
pub struct RowCoder {
    root: Arc<Root>,
    /// Squared norms of the centroids, for inner product.
    norms: OnceCell<Vec<f64>>,
}

/// Of so many cells that rank first for a row the nearest is taken: the ranking also weighs how far a
/// cell's rows spread.
const NEAR_CELLS: usize = 16;

impl RowCoder {
    pub fn new(root: Arc<Root>) -> Self {
        Self { root, norms: OnceCell::new() }
    }

    /// Codes a row. `id`: the heap TID as `block << 16 | offset`.
    pub fn code(&self, vector: &[f32], id: u64) -> Result<CodedRow, RowError> {
        let root = &self.root;
        let model = &root.models()[0];
        let mut x = vec![0.0; model.padded_dim()];
        model.project_row(vector, &mut x)?;
        let slot = match model.metric {
            Metric::L2 | Metric::Cosine => self.nearest(model, vector)?,
            Metric::InnerProduct => self.nearest_by_norm(model, vector, &x)?,
        };
        let mut centroid = vec![0.0; model.padded_dim()];
        // Without cells a row is coded relative to the origin, in a cell that the root does not know.
        let mut cell = 0;
        if let Some(slot) = slot {
            plane2::decode(RacyBytes::new(root.centroid_record(slot)), &mut centroid);
            cell = root.cells()[slot as usize].id.get();
        }
        let mut code = Vec::new();
        Plane1RowRef::from(&plane1::encode_row(model, &x, &centroid)).write_to(&mut code);
        let mut record = Vec::new();
        plane2::encode(model, &x, id, &mut record);
        Ok(CodedRow { cell, code, record })
    }

    /// The slot of the live cell whose centroid is nearest.
    fn nearest(&self, model: &Model, vector: &[f32]) -> Result<Option<u32>, RowError> {
        let query = model.query(vector)?;
        let mut ranking = Ranking::default();
        ranking.reset(&self.root, &query);
        let near = ranking.nearest(&self.root, &query, NEAR_CELLS);
        let nearest = near.iter().min_by(|a, b| a.term.base.total_cmp(&b.term.base));
        Ok(nearest.map(|cell| cell.slot))
    }

    /// The slot of the live cell that is nearest in direction and norm. All centroids are looked at: the
    /// scanned codes of centroids only rank them by inner product.
    fn nearest_by_norm(
        &self,
        model: &Model,
        vector: &[f32],
        x: &[f32],
    ) -> Result<Option<u32>, RowError> {
        let root = &self.root;
        let norms = self.norms.get_or_init(|| {
            let mut centroid = vec![0.0; model.padded_dim()];
            let slots = 0..root.cell_count() as u32;
            let norm2 = slots.map(|slot| {
                plane2::decode(RacyBytes::new(root.centroid_record(slot)), &mut centroid);
                norm_squared_f64(&centroid)
            });
            norm2.collect()
        });
        let row_norm2 = norm_squared_f64(x);
        // Squared distances in model space give the inner products with the means.
        let mut model = model.clone();
        model.metric = Metric::L2;
        let query = model.query(vector)?;
        let live = (0u32..).zip(root.cells()).filter(|(_, cell)| !cell.is_retired());
        let scored = live.map(|(slot, _)| {
            let record = RacyBytes::new(root.centroid_record(slot));
            let mean_norm2 = norms[slot as usize];
            let distance2 = f64::from(query.cell_term(record).base);
            let inner = (row_norm2 + mean_norm2 - distance2) / 2.0;
            let spread = f64::from(cell_rank::spread(record, model.padded_dim()));
            (norm_distance2(row_norm2, mean_norm2, spread, inner), slot)
        });
        Ok(scored.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, slot)| slot))
    }
}
