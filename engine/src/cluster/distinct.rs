use std::collections::HashMap;

/// The first of `order`'s rows that differ from each other, at most `count`.
pub(super) fn distinct(rows: &[f32], dim: usize, order: &[usize], count: usize) -> Vec<usize> {
    let mut by_hash: HashMap<u64, Vec<usize>> = HashMap::new();
    let mut found = Vec::new();
    for &i in order {
        if found.len() == count {
            break;
        }
        let row = &rows[i * dim..][..dim];
        let same = by_hash.entry(hash(row)).or_default();
        if same.iter().all(|&j| rows[j * dim..][..dim] != *row) {
            same.push(i);
            found.push(i);
        }
    }
    found
}

fn hash(row: &[f32]) -> u64 {
    row.iter().fold(0, |h: u64, &x| {
        // Zero and minus zero are equal.
        let bits = (x + 0.0).to_bits() as u64;
        (h.rotate_left(5) ^ bits).wrapping_mul(0x517c_c1b7_2722_0a95)
    })
}
