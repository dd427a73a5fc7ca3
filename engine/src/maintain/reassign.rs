//! LIRE's reassignment: after a split, rows near it may have another nearest cell.

use rayon::prelude::*;

use super::rework::{Decoder, Work, centroids};
use crate::cluster::{Assigner, Interrupt, Interrupted};

/// Cells around a new one whose rows are checked.
const NEIGHBOURS: usize = 8;

/// Moves rows of new cells to neighbours that are nearer, and rows of neighbours to new cells that are. Rows do
/// not move between cells that were there before. Returns how many moved. Computes on the current pool.
pub(super) fn reassign(
    rows: &Decoder<'_>,
    cells: &mut [Work],
    interrupt: Interrupt<'_>,
) -> Result<u64, Interrupted> {
    let concerned = concerned(cells);
    if concerned.len() < 2 {
        return Ok(0);
    }
    let assigner = Assigner::new(
        rows.model.metric,
        &centroids(rows.model, concerned.iter().map(|&c| &cells[c])),
    );
    let moves: Vec<Vec<(u32, usize)>> = concerned
        .par_iter()
        .map(|&from| {
            let places = &cells[from].rows;
            let mut nearest = vec![0; places.len()];
            assigner.assign(&rows.rows(places), &mut nearest, None, interrupt)?;
            let to = nearest.into_iter().map(|near| concerned[near as usize]);
            let is_new = |cell: usize| cells[cell].slot.is_none();
            let moved = places.iter().copied().zip(to);
            Ok(moved.filter(|&(_, to)| to != from && (is_new(from) || is_new(to))).collect())
        })
        .collect::<Result<_, Interrupted>>()?;
    let mut count = 0;
    for (from, moves) in concerned.into_iter().zip(moves) {
        if moves.is_empty() {
            continue;
        }
        count += moves.len() as u64;
        let mut gone = moves.iter().map(|(row, _)| *row).peekable();
        // Both are in the same order.
        cells[from].rows.retain(|row| gone.next_if_eq(row).is_none());
        cells[from].blocks = None;
        for (row, to) in moves {
            cells[to].rows.push(row);
            cells[to].blocks = None;
        }
    }
    Ok(count)
}

/// The new cells, and the nearest cells around each, in ascending order.
fn concerned(cells: &[Work]) -> Vec<usize> {
    let new: Vec<usize> = (0..cells.len()).filter(|&cell| cells[cell].slot.is_none()).collect();
    let around = new.par_iter().flat_map_iter(|&own| {
        let apart = |other: usize| -> f32 {
            let pairs = cells[own].mean.iter().zip(&cells[other].mean);
            pairs.map(|(a, b)| (a - b) * (a - b)).sum()
        };
        let mut near: Vec<(f32, usize)> = (0..cells.len())
            .filter(|&other| other != own)
            .map(|other| (apart(other), other))
            .collect();
        let count = NEIGHBOURS.min(near.len());
        if count > 0 {
            near.select_nth_unstable_by(count - 1, |a, b| a.0.total_cmp(&b.0));
        }
        near.into_iter().take(count).map(|(_, other)| other).collect::<Vec<_>>()
    });
    let mut concerned: Vec<usize> = around.collect();
    concerned.extend(new);
    concerned.sort_unstable();
    concerned.dedup();
    concerned
}
