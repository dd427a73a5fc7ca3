//! Near ranges of one object become one GET.

use std::ops::Range;

/// Gap up to which ranges are read together as a rule: it costs less than another request.
pub const GAP: u32 = 48 << 10;
/// A merged range does not grow beyond this, so that long reads run in parallel.
pub const MERGED_BYTES: u64 = 8 << 20;

/// One GET and the pieces wanted of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged<T> {
    pub range: Range<u64>,
    pub pieces: Vec<(T, Range<u64>)>,
}

/// Merges ranges of one object that lie at most `gap` bytes apart. The most important piece (the first
/// given) stays in the first GET.
pub fn merge<T>(pieces: Vec<(T, Range<u64>)>, gap: u32) -> Vec<Merged<T>> {
    let mut ordered: Vec<(usize, (T, Range<u64>))> = pieces.into_iter().enumerate().collect();
    ordered.sort_by_key(|(_, (_, range))| range.start);
    let mut merged: Vec<(usize, Merged<T>)> = Vec::new();
    for (rank, piece) in ordered {
        let Range { start, end } = piece.1;
        if let Some((first, last)) = merged.last_mut() {
            let near = start <= last.range.end.saturating_add(gap.into());
            if near && end.max(last.range.end) - last.range.start <= MERGED_BYTES {
                *first = (*first).min(rank);
                last.range.end = last.range.end.max(end);
                last.pieces.push(piece);
                continue;
            }
        }
        merged.push((rank, Merged { range: start..end, pieces: vec![piece] }));
    }
    merged.sort_by_key(|(rank, _)| *rank);
    merged.into_iter().map(|(_, merged)| merged).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Merges ranges given by start and end.
    fn ranges(wanted: &[(u64, u64)], gap: u32) -> Vec<(u64, u64)> {
        let pieces = wanted.iter().map(|&(start, end)| ((), start..end)).collect();
        merge(pieces, gap).into_iter().map(|m: Merged<()>| (m.range.start, m.range.end)).collect()
    }

    #[test]
    fn near_ranges_are_read_together() {
        for gap in [0, 1, GAP] {
            let far = u64::from(gap) + 10;
            assert_eq!(ranges(&[], gap), []);
            assert_eq!(ranges(&[(0, 10), (10, 20)], gap), [(0, 20)]);
            assert_eq!(ranges(&[(0, 10), (far, far + 9)], gap), [(0, far + 9)]);
            let apart = [(0, 10), (far + 1, far + 9)];
            assert_eq!(ranges(&apart, gap), apart);
            assert_eq!(ranges(&[(0, 10), (0, 10)], gap), [(0, 10)]);
            assert_eq!(ranges(&[(0, 10), (2, 5), (10, 11)], gap), [(0, 11)]);
        }
    }

    #[test]
    fn the_most_important_piece_comes_first() {
        let far = 10 * u64::from(GAP);
        let wanted = [(far, far + 9), (0, 9), (far + 9, far + 12)];
        assert_eq!(ranges(&wanted, GAP), [(far, far + 12), (0, 9)]);
    }

    #[test]
    fn long_runs_are_cut_and_keep_every_piece() {
        let step = 256 << 10;
        let pieces: Vec<_> = (0..100u64).map(|i| (i, i * step..(i + 1) * step)).collect();
        let merged = merge(pieces, GAP);
        assert!(merged.iter().all(|m| m.range.end - m.range.start <= MERGED_BYTES));
        assert_eq!(merged.len(), 4);
        let mut seen: Vec<u64> =
            merged.iter().flat_map(|m| m.pieces.iter().map(|(i, _)| *i)).collect();
        seen.sort();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
        for Merged { range, pieces } in merged {
            assert!(pieces.iter().all(|(_, p)| range.start <= p.start && p.end <= range.end));
        }
    }
}
