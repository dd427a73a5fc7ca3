//! Cells for rows that are known by their plane-2 records, without decoding all of them at a time.

use rayon::ThreadPool;

use crate::{
    build::decode::{decode_into, decode_rows},
    cluster::{self, Assigner, Interrupt, Interrupted, Params},
    quantize::{Model, plane2},
};

/// Bytes for training, about.
const TRAINING_BYTES: usize = 96 << 20;
/// Rows decoded at a time.
const BATCH: usize = 4_096;

/// Trains about `lists` cells, in neighbour order, on a sample of the rows. Those in `left_out` (ascending) are
/// not trained on.
pub(super) fn train(
    model: &Model,
    records: &[u8],
    lists: u32,
    left_out: &[u32],
    seed: u64,
    pool: &ThreadPool,
    interrupt: Interrupt<'_>,
) -> Result<Assigner, Interrupted> {
    let (metric, width) = (model.metric, model.padded_dim());
    let bytes = plane2::record_bytes(width);
    let rows = records.len() / bytes;
    let sampled = cluster::sample_rows(metric, rows as u64, lists, width, TRAINING_BYTES);
    let mut sample = Vec::with_capacity(sampled * width);
    for row in spread(rows, sampled).filter(|row| left_out.binary_search(row).is_err()) {
        let start = sample.len();
        sample.resize(start + width, 0.0);
        decode_into(&records[row as usize * bytes..][..bytes], &mut sample[start..]);
    }
    let trained = cluster::trained_lists(lists, sampled, rows as u64, width);
    let params = Params::new(metric, width, trained as usize, seed);
    let centroids = cluster::kmeans(&params, &sample, Some(pool), interrupt)?;
    drop(sample);
    let order = cluster::order_cells(centroids.as_slice(), width);
    Ok(Assigner::new(metric, &centroids.reordered(&order)))
}

/// The rows of each cell. `observe` sees all rows on the way, decoded, with the number of the first.
pub(super) fn assign(
    model: &Model,
    records: &[u8],
    assigner: &Assigner,
    pool: &ThreadPool,
    interrupt: Interrupt<'_>,
    observe: &mut dyn FnMut(&[f32], u32),
) -> Result<Vec<Vec<u32>>, Interrupted> {
    let width = model.padded_dim();
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); assigner.len()];
    let mut cells = vec![0; BATCH];
    let batches = records.chunks(BATCH * plane2::record_bytes(width));
    for (batch, first) in batches.zip((0u32..).step_by(BATCH)) {
        let decoded = decode_rows(model, batch);
        let cells = &mut cells[..decoded.len() / width];
        assigner.assign(&decoded, cells, Some(pool), interrupt)?;
        observe(&decoded, first);
        for (row, cell) in (first..).zip(cells) {
            members[*cell as usize].push(row);
        }
    }
    Ok(members)
}

/// Up to `wanted` row numbers, evenly spread.
pub(super) fn spread(rows: usize, wanted: usize) -> impl Iterator<Item = u32> {
    let wanted = wanted.min(rows);
    (0..wanted).map(move |nth| (nth * rows / wanted) as u32)
}
