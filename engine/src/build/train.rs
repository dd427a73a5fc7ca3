//! Training: from sampled rows to a model and cells in neighbour order.

use rayon::ThreadPool;

use crate::{
    Metric,
    cluster::{self, Assigner, Interrupt, Interrupted, Params},
    quantize::{Model, ModelError, RowError},
};

/// What a build needs to know before the first row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainParams {
    pub metric: Metric,
    /// Components of a row as the user gives it.
    pub dim: usize,
    /// Cells wanted; fewer come out when fewer rows differ.
    pub lists: u32,
    /// Seed of the rotation and of k-means.
    pub seed: u64,
    /// Number of the model in the index.
    pub model_id: u32,
}

/// A model, and the cells to which rows are assigned; numbered so that neighbours lie together.
pub struct Trained {
    pub model: Model,
    pub assigner: Assigner,
}

/// Why training ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No row of the sample can be indexed.
    #[error("there is no row to train on")]
    NoRows,
}

/// Trains on `sample` (n x dim, as the user gave the rows). Rows that cannot be indexed, such as zero
/// vectors under cosine, are left out.
pub fn train(
    params: TrainParams,
    sample: &[f32],
    pool: &ThreadPool,
    interrupt: Interrupt<'_>,
) -> Result<Trained, TrainError> {
    let TrainParams { metric, dim, lists, seed, model_id } = params;
    let usable: Vec<&[f32]> = sample
        .chunks_exact(dim)
        .filter(|row| norm_of(row) > 0.0 || metric != Metric::Cosine)
        .collect();
    if usable.is_empty() {
        return Err(TrainError::NoRows);
    }
    let model = Model::new(model_id, metric, dim, seed, mean_of(metric, dim, &usable))?;
    let width = model.padded_dim();
    let mut rows = vec![0.0; usable.len() * width];
    let mut kept = 0;
    for row in usable {
        if model.project_row(row, &mut rows[kept * width..(kept + 1) * width]).is_ok() {
            kept += 1;
        }
    }
    rows.truncate(kept * width);
    let params = Params::new(metric, width, lists.max(1) as usize, seed);
    let centroids = cluster::kmeans(&params, &rows, Some(pool), interrupt)?;
    drop(rows);
    if centroids.is_empty() {
        return Err(TrainError::NoRows);
    }
    let order = cluster::order_cells(centroids.as_slice(), width);
    let assigner = Assigner::new(metric, &centroids.reordered(&order));
    Ok(Trained { model, assigner })
}

fn norm_of(row: &[f32]) -> f64 {
    row.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt()
}

/// The mean of the rows as the model sees them: of unit length for cosine.
fn mean_of(metric: Metric, dim: usize, rows: &[&[f32]]) -> Vec<f32> {
    let mut sums = vec![0.0f64; dim];
    for row in rows {
        let scale = if metric == Metric::Cosine { 1.0 / norm_of(row) } else { 1.0 };
        for (sum, &value) in sums.iter_mut().zip(*row) {
            *sum += f64::from(value) * scale;
        }
    }
    sums.into_iter().map(|sum| (sum / rows.len() as f64) as f32).collect()
}

/// Whether a row that the model refuses is simply not indexed (pgvector leaves out zero vectors under
/// cosine too); other refusals are the user's to see.
pub fn is_left_out(error: &RowError) -> bool {
    matches!(error, RowError::ZeroNorm)
}
