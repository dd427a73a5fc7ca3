//! The cells of a root in figures.

use polign_engine::{
    kernel::RacyBytes,
    quantize::cell_rank,
    root::{CellStats, Root, RootBuilder},
};

use crate::fixture;

fn read(sections: Vec<(polign_engine::root::SectionKey, Vec<u8>)>) -> Root {
    Root::from_sections(sections.into_iter().map(|(key, bytes)| (key.code(), bytes))).unwrap()
}

#[test]
fn figures_are_those_of_the_pieces() {
    let root = read(fixture::root_sections());
    let width = root.models()[0].padded_dim();
    let (mut rows, mut spreads) = (Vec::new(), Vec::new());
    for slot in fixture::LIVE_SLOTS {
        let pieces = root.pieces().iter().chain(root.delta_pieces());
        let own = pieces.filter(|piece| piece.cell.get() == slot);
        rows.push(own.map(|piece| u64::from(piece.slots.get())).sum::<u64>());
        let record = RacyBytes::new(root.centroid_record(slot));
        spreads.push(f64::from(cell_rank::spread(record, width)));
    }
    let stats = root.cell_stats();
    let total: u64 = rows.iter().sum();
    assert!(total > 0);
    assert_eq!((stats.cells as usize, stats.rows), (rows.len(), total));
    assert_eq!(Some(stats.rows_min), rows.iter().min().copied());
    assert_eq!(Some(stats.rows_max), rows.iter().max().copied());
    assert_eq!(stats.rows_avg(), total as f64 / rows.len() as f64);
    // A row meets, in its cell, as many rows as the cell has.
    let met: u64 = rows.iter().map(|rows| rows * rows).sum();
    let skew = met as f64 / total as f64 / stats.rows_avg();
    assert!((stats.skew - skew).abs() < 1e-9 && skew >= 1.0, "{} {skew}", stats.skew);
    let squares: f64 = rows.iter().zip(&spreads).map(|(&n, s)| n as f64 * s * s).sum();
    assert!((stats.spread - (squares / total as f64).sqrt()).abs() < 1e-9);
}

#[test]
fn a_root_without_rows_has_figures() {
    let empty = read(RootBuilder::new(fixture::models()[..1].to_vec()).build().unwrap());
    assert_eq!(empty.cell_stats(), CellStats::default());
    assert_eq!(empty.cell_stats().rows_avg(), 0.0);
}
