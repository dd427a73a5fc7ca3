//! The cell of a row whose own cell is gone.

use crate::{
    build::decode::decode_rows,
    cluster::{Assigner, Centroids, Interrupt, Interrupted},
    kernel::RacyBytes,
    quantize::cell_rank,
    root::Root,
};

/// Finds the nearest live cells, as a build assigns rows. Made when the first row asks.
pub(super) struct Placer<'a> {
    root: &'a Root,
    live: Option<(Assigner, Vec<u32>)>,
}

impl<'a> Placer<'a> {
    pub fn new(root: &'a Root) -> Self {
        Self { root, live: None }
    }

    /// The slot of the nearest live cell of each row (n x P, of the space of the first model); nothing if
    /// no cell is live.
    pub fn place(
        &mut self,
        rows: &[f32],
        interrupt: Interrupt<'_>,
    ) -> Result<Option<Vec<u32>>, Interrupted> {
        let root = self.root;
        let width = root.models()[0].padded_dim();
        if self.live.is_none() {
            let live = (0u32..).zip(root.cells()).filter(|(_, cell)| !cell.is_retired());
            let slots: Vec<u32> = live.map(|(slot, _)| slot).collect();
            if slots.is_empty() {
                return Ok(None);
            }
            let cells = centroids_of(root, &slots);
            self.live = Some((Assigner::new(root.metric(), &cells), slots));
        }
        let Some((assigner, slots)) = &self.live else { return Ok(None) };
        let mut cells = vec![0; rows.len() / width];
        assigner.assign(rows, &mut cells, None, interrupt)?;
        Ok(Some(cells.into_iter().map(|cell| slots[cell as usize]).collect()))
    }
}

/// The cells in these slots as the space of the first model has them.
pub(super) fn centroids_of(root: &Root, slots: &[u32]) -> Centroids {
    let model = &root.models()[0];
    let (mut data, mut spreads) = (Vec::new(), Vec::new());
    for &slot in slots {
        let record = root.centroid_record(slot);
        data.extend(decode_rows(model, record));
        spreads.push(cell_rank::spread(RacyBytes::new(record), model.padded_dim()));
    }
    Centroids::new(model.padded_dim(), data, spreads)
}
