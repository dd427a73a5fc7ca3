//! Blocks of inner products: many rows against many columns, near the peak of one core.
//!
//! The columns (centroids, as a rule) are packed once into panels of [`PANEL`] columns, interleaved
//! by component, so that one vector load gives a component of many columns and a row contributes
//! by broadcasts. A register tile is 8 rows x 48 columns with AVX-512, 4 x 24 with AVX2.
//!
//! Each product is one chain of additions in component order, whatever tile it falls into. So a
//! result does not depend on the other rows of the call, nor on how callers cut their work; and
//! AVX-512 and AVX2 agree to the bit. Unlike the other kernels this one fuses products with
//! additions (up to twice the speed), so the scalar twin differs in rounding where the target has no
//! fused multiply-add. That is sound because only builds use it, and their results are stored.
//! [`Level::force`] does not reach it, so that no result changes in mid-build.

use super::Level;
use super::level::per_level;

/// Columns in a packed panel: a multiple of every register tile's width.
const PANEL: usize = 48;
/// Components that are worked through at a time, so that a panel's share stays in the L2 cache.
const DEPTH: usize = 512;
/// Rows that are worked through at a time, so that they stay in the L2 cache over all panels.
const ROWS: usize = 64;
/// Panels whose products are held at a time while looking for the nearest column.
const GROUP: usize = 6;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lane([f32; 16]);

/// Columns packed for [`dot_packed`] and [`nearest`]; reuse it when the columns stay the same.
pub struct PackedCols {
    dim: usize,
    cols: usize,
    panels: Vec<Lane>,
}

impl PackedCols {
    /// Packs row-major `cols` (a whole number of vectors of `dim` components), each component
    /// multiplied by `factor`.
    ///
    /// # Panics
    /// If `dim` is zero or does not divide `cols.len()`.
    pub fn new(cols: &[f32], dim: usize, factor: f32) -> Self {
        let n = vectors(cols, dim);
        let per_panel = PANEL / 16 * dim;
        let mut panels = vec![Lane([0.0; 16]); n.div_ceil(PANEL) * per_panel];
        for (p, block) in cols.chunks(PANEL * dim).enumerate() {
            let panel = &mut panels[p * per_panel..][..per_panel];
            for (c, col) in block.chunks_exact(dim).enumerate() {
                for (k, &x) in col.iter().enumerate() {
                    panel[k * (PANEL / 16) + c / 16].0[c % 16] = x * factor;
                }
            }
        }
        Self { dim, cols: n, panels }
    }

    /// The number of columns.
    pub fn len(&self) -> usize {
        self.cols
    }

    /// True if there is no column.
    pub fn is_empty(&self) -> bool {
        self.cols == 0
    }

    /// Components of a column.
    pub fn dim(&self) -> usize {
        self.dim
    }

    fn panel(&self, p: usize) -> &[Lane] {
        let per_panel = PANEL / 16 * self.dim;
        &self.panels[p * per_panel..][..per_panel]
    }
}

/// All inner products of `rows` with `cols` (both row-major, `dim` components each):
/// `out[r * ncols + c] = <row r, column c>`.
///
/// # Panics
/// If `dim` is zero, if it does not divide both lengths, or if `out` is not rows x columns long.
pub fn dot_block(rows: &[f32], cols: &[f32], dim: usize, out: &mut [f32]) {
    dot_packed(rows, &PackedCols::new(cols, dim, 1.0), out);
}

/// [`dot_block`] with columns that are packed already.
///
/// # Panics
/// As [`dot_block`].
pub fn dot_packed(rows: &[f32], cols: &PackedCols, out: &mut [f32]) {
    dot_packed_at(Level::best(), rows, cols, out);
}

/// For each row the column with the smallest `bias[c] + factor * <row, column c>`: its number in
/// `best`, that value in `score`. Ties go to the lower column; a value that is NaN is never chosen
/// (column 0 and infinity if there is nothing else).
///
/// # Panics
/// If there is no column, if `cols.dim()` does not divide `rows.len()`, or if `bias`, `best` or
/// `score` have the wrong length.
pub fn nearest(
    rows: &[f32],
    cols: &PackedCols,
    factor: f32,
    bias: &[f32],
    best: &mut [u32],
    score: &mut [f32],
) {
    nearest_at(Level::best(), rows, cols, factor, bias, best, score);
}

fn vectors(data: &[f32], dim: usize) -> usize {
    assert!(dim > 0 && data.len().is_multiple_of(dim), "not a whole number of vectors");
    data.len() / dim
}

/// A block of rows, a panel, and where their products go.
struct Tiles {
    depth: usize,
    rows: *const f32,
    row_stride: usize,
    nrows: usize,
    panel: *const f32,
    ncols: usize,
    out: *mut f32,
    out_stride: usize,
    /// Add to what `out` holds instead of overwriting it.
    add: bool,
}

/// # Safety
/// `t.rows` points to `nrows` rows of `depth` components `row_stride` apart, `t.panel` to
/// `depth * PANEL` components, `t.out` to `nrows` rows of `ncols` products `out_stride` apart, of
/// which nobody else holds a reference.
unsafe fn tiles(level: Level, t: &Tiles) {
    match level.min(Level::best()) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise; `best` found the instructions on this CPU.
        Level::Avx512 => unsafe { avx512::tiles(t) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { avx2::tiles(t) },
        // SAFETY: the caller's promise.
        _ => unsafe { scalar::tiles(t) },
    }
}

per_level! {
    /// The smallest `bias + factor * dot` and its position, the first of equals.
    pick_best, pick_at(dots: &[f32], factor: f32, bias: &[f32]) -> (f32, u32), pick_body
}

/// Products of `rows` with panels `first..last`, to `out` with `stride` columns a row.
fn products(
    level: Level,
    rows: &[f32],
    cols: &PackedCols,
    first: usize,
    last: usize,
    out: &mut [f32],
    stride: usize,
) {
    let dim = cols.dim;
    let nrows = rows.len() / dim;
    let width = (cols.cols - first * PANEL).min((last - first) * PANEL);
    assert!(nrows == 0 || out.len() >= (nrows - 1) * stride + width);
    for k in (0..dim).step_by(DEPTH) {
        for p in first..last {
            let t = Tiles {
                depth: DEPTH.min(dim - k),
                rows: rows[k..].as_ptr(),
                row_stride: dim,
                nrows,
                panel: cols.panel(p)[k * (PANEL / 16)..].as_ptr().cast(),
                ncols: PANEL.min(cols.cols - p * PANEL),
                out: out[(p - first) * PANEL..].as_mut_ptr(),
                out_stride: stride,
                add: k > 0,
            };
            // SAFETY: `nrows` rows of `dim` components lie in
            // `rows`, of which `depth` from `k` on are read; the panel holds `dim * PANEL`
            // components from `k * PANEL` on at least `depth * PANEL`; the assertion above covers
            // the products, and `out` is borrowed mutably.
            unsafe { tiles(level, &t) };
        }
    }
}

fn dot_packed_at(level: Level, rows: &[f32], cols: &PackedCols, out: &mut [f32]) {
    let n = vectors(rows, cols.dim);
    assert_eq!(out.len(), n * cols.cols, "out is rows x columns");
    if out.is_empty() {
        return;
    }
    let panels = cols.cols.div_ceil(PANEL);
    for (block, out) in rows.chunks(ROWS * cols.dim).zip(out.chunks_mut(ROWS * cols.cols)) {
        products(level, block, cols, 0, panels, out, cols.cols);
    }
}

fn nearest_at(
    level: Level,
    rows: &[f32],
    cols: &PackedCols,
    factor: f32,
    bias: &[f32],
    best: &mut [u32],
    score: &mut [f32],
) {
    let n = vectors(rows, cols.dim);
    assert!(!cols.is_empty(), "there is a column");
    assert_eq!((bias.len(), best.len(), score.len()), (cols.cols, n, n));
    best.fill(0);
    score.fill(f32::INFINITY);
    let panels = cols.cols.div_ceil(PANEL);
    let stride = GROUP.min(panels) * PANEL;
    let mut dots = vec![0f32; ROWS.min(n) * stride];
    for (b, block) in rows.chunks(ROWS * cols.dim).enumerate() {
        for first in (0..panels).step_by(GROUP) {
            let last = panels.min(first + GROUP);
            products(level, block, cols, first, last, &mut dots, stride);
            let base = first * PANEL;
            let bias = &bias[base..cols.cols.min(last * PANEL)];
            for (r, dots) in dots.chunks_exact(stride).take(block.len() / cols.dim).enumerate() {
                let (s, c) = pick_at(level, &dots[..bias.len()], factor, bias);
                let at = b * ROWS + r;
                if s < score[at] {
                    score[at] = s;
                    best[at] = c + base as u32;
                }
            }
        }
    }
}

#[inline(always)]
fn pick_body(dots: &[f32], factor: f32, bias: &[f32]) -> (f32, u32) {
    const N: usize = 16;
    let mut low = [f32::INFINITY; N];
    let mut at = [0u32; N];
    let (dots16, dots_rest) = dots.as_chunks::<N>();
    let (bias16, bias_rest) = bias.as_chunks::<N>();
    for (j, (d, b)) in dots16.iter().zip(bias16).enumerate() {
        for l in 0..N {
            let s = b[l] + factor * d[l];
            let less = s < low[l];
            low[l] = if less { s } else { low[l] };
            at[l] = if less { j as u32 } else { at[l] };
        }
    }
    let mut best = (f32::INFINITY, 0u32);
    for l in 0..N {
        let c = at[l] * N as u32 + l as u32;
        if low[l] < best.0 || (low[l] == best.0 && low[l] < f32::INFINITY && c < best.1) {
            best = (low[l], c);
        }
    }
    for (l, (d, b)) in dots_rest.iter().zip(bias_rest).enumerate() {
        let s = b + factor * d;
        if s < best.0 {
            best = (s, (dots16.len() * N + l) as u32);
        }
    }
    best
}

/// One instruction set's tiles: `$mr` rows by `$nv` vectors of `$lanes` columns.
macro_rules! isa {
    ($(#[$attr:meta])* $mr:literal, $nv:literal, $lanes:literal, $v:ty,
     $zero:expr, $load:expr, $splat:expr, $fma:expr, $store:expr) => {
        use super::{PANEL, Tiles};

        /// # Safety
        /// As `super::tiles`, and the CPU has the instructions.
        $(#[$attr])*
        pub(super) unsafe fn tiles(t: &Tiles) {
            let width = $nv * $lanes;
            const { assert!(PANEL % ($nv * $lanes) == 0) };
            for c in (0..t.ncols).step_by(width) {
                let cols = width.min(t.ncols - c);
                let mut r = 0;
                while r < t.nrows {
                    let left = t.nrows - r;
                    // SAFETY: rows `r..` and columns `c..` lie within the caller's promise; a tile
                    // reads whole vectors of the panel, which is padded.
                    r += unsafe {
                        match (left, cols.div_ceil($lanes)) {
                            ($mr.., 3) => tile::<$mr, 3>(t, r, c, cols),
                            ($mr.., 2) => tile::<$mr, 2>(t, r, c, cols),
                            ($mr.., _) => tile::<$mr, 1>(t, r, c, cols),
                            (2.., 3) => tile::<2, 3>(t, r, c, cols),
                            (2.., 2) => tile::<2, 2>(t, r, c, cols),
                            (2.., _) => tile::<2, 1>(t, r, c, cols),
                            (_, 3) => tile::<1, 3>(t, r, c, cols),
                            (_, 2) => tile::<1, 2>(t, r, c, cols),
                            (_, _) => tile::<1, 1>(t, r, c, cols),
                        }
                    };
                }
            }
        }

        /// Returns the number of rows done.
        ///
        /// # Safety
        /// As `tiles`, and `MR` rows from `r` on and `cols` <= `NV` vectors of columns from
        /// `c` on exist.
        $(#[$attr])*
        #[inline]
        unsafe fn tile<const MR: usize, const NV: usize>(
            t: &Tiles,
            r: usize,
            c: usize,
            cols: usize,
        ) -> usize {
            // SAFETY: all offsets stay within what the caller promises; the panel is `PANEL` wide
            // and padded, so whole vectors may be read from it.
            unsafe {
                let rows: [*const f32; MR] =
                    std::array::from_fn(|i| t.rows.add((r + i) * t.row_stride));
                let mut panel = t.panel.add(c);
                let mut sum: [[$v; NV]; MR] = [[$zero; NV]; MR];
                let out: [*mut f32; MR] =
                    std::array::from_fn(|i| t.out.add((r + i) * t.out_stride + c));
                let whole = cols == NV * $lanes;
                let mut edge = [0f32; NR];
                if t.add {
                    for i in 0..MR {
                        let mut from = out[i].cast_const();
                        if !whole {
                            std::ptr::copy_nonoverlapping(from, edge.as_mut_ptr(), cols);
                            from = edge.as_ptr();
                        }
                        for v in 0..NV {
                            sum[i][v] = $load(from.add(v * $lanes));
                        }
                    }
                }
                for k in 0..t.depth {
                    let b: [$v; NV] = std::array::from_fn(|v| $load(panel.add(v * $lanes)));
                    panel = panel.add(PANEL);
                    for i in 0..MR {
                        let a = $splat(*rows[i].add(k));
                        for v in 0..NV {
                            sum[i][v] = $fma(a, b[v], sum[i][v]);
                        }
                    }
                }
                for i in 0..MR {
                    let to = if whole { out[i] } else { edge.as_mut_ptr() };
                    for v in 0..NV {
                        $store(to.add(v * $lanes), sum[i][v]);
                    }
                    if !whole {
                        std::ptr::copy_nonoverlapping(edge.as_ptr(), out[i], cols);
                    }
                }
            }
            MR
        }

        const NR: usize = $nv * $lanes;
    };
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;
    isa!(
        #[target_feature(enable = "avx512f")]
        8,
        3,
        16,
        __m512,
        _mm512_setzero_ps(),
        _mm512_loadu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_storeu_ps
    );
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;
    isa!(
        #[target_feature(enable = "avx2,fma")]
        4,
        3,
        8,
        __m256,
        _mm256_setzero_ps(),
        _mm256_loadu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_storeu_ps
    );
}

/// The twin for every other CPU: vectors of 4 that the compiler keeps in SSE or NEON registers.
mod scalar {
    type V = [f32; 4];

    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        // SAFETY: the caller reads 4 components that exist; `[f32; 4]` is read unaligned.
        unsafe { p.cast::<V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        // SAFETY: the caller writes 4 components that exist.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }

    #[inline(always)]
    fn fma(a: V, b: V, c: V) -> V {
        // Without hardware support `mul_add` would be a slow library call.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
        } else {
            std::array::from_fn(|i| a[i] * b[i] + c[i])
        }
    }

    isa!(4, 3, 4, V, [0f32; 4], load, |x: f32| [x; 4], fma, store);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, mut seed: u64) -> Vec<f32> {
        (0..n)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn check(n: usize, m: usize, dim: usize) {
        let rows = noise(n * dim, 1 + n as u64);
        let cols = noise(m * dim, 99 + m as u64);
        let packed = PackedCols::new(&cols, dim, 1.0);
        let bias = noise(m, 7);
        let mut seen: Vec<Vec<f32>> = Vec::new();
        for level in Level::available() {
            let mut out = vec![f32::NAN; n * m];
            dot_packed_at(level, &rows, &packed, &mut out);
            for (r, row) in rows.chunks(dim).enumerate() {
                for (c, col) in cols.chunks(dim).enumerate() {
                    let terms = || row.iter().zip(col).map(|(a, b)| *a as f64 * *b as f64);
                    let exact: f64 = terms().sum();
                    let slack = dim as f64 * 1.2e-7 * terms().map(f64::abs).sum::<f64>() + 1e-9;
                    let got = out[r * m + c] as f64;
                    assert!(
                        (got - exact).abs() <= slack,
                        "{level:?} {n}x{m}x{dim} [{r},{c}]: {got} {exact}"
                    );
                }
            }
            let (mut best, mut score) = (vec![9; n], vec![0.0; n]);
            nearest_at(level, &rows, &packed, -2.0, &bias, &mut best, &mut score);
            for r in 0..n {
                let s: Vec<f32> = (0..m).map(|c| bias[c] + -2.0 * out[r * m + c]).collect();
                let first = (0..m).fold(0, |b, c| if s[c] < s[b] { c } else { b });
                // A fused multiply-add may have decided a tie otherwise by one rounding.
                let chosen = s[best[r] as usize];
                assert!((chosen - s[first]).abs() <= 1e-6 * (1.0 + s[first].abs()));
                assert!((score[r] - s[first]).abs() <= 1e-6 * (1.0 + s[first].abs()));
            }
            seen.push(out);
        }
        if let [_, a, b] = &seen[..] {
            assert!(a == b, "AVX2 and AVX-512 agree to the bit");
        }
    }

    #[test]
    fn matches_exact_products_for_every_small_shape() {
        for n in [1, 2, 3, 4, 5, 7, 8, 9, 17] {
            for m in [1, 2, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49] {
                for dim in [1, 3, 16, 33] {
                    check(n, m, dim);
                }
            }
        }
    }

    #[test]
    fn matches_exact_products_for_large_shapes() {
        check(65, 97, 384);
        check(130, 290, 100);
        check(3, 385, 511);
        check(9, 50, 513);
        check(5, 5, 1536);
        check(2, 3, 16000);
    }

    #[test]
    fn a_product_does_not_depend_on_its_neighbours() {
        let (n, m, dim) = (29, 61, 700);
        let rows = noise(n * dim, 1);
        let cols = noise(m * dim, 2);
        let mut all = vec![0.0; n * m];
        dot_block(&rows, &cols, dim, &mut all);
        for (r, row) in rows.chunks(dim).enumerate() {
            for c in [0, 15, 16, 47, 48, 60] {
                let mut one = [0.0];
                dot_block(row, &cols[c * dim..][..dim], dim, &mut one);
                assert_eq!(one[0].to_bits(), all[r * m + c].to_bits());
            }
        }
    }

    #[test]
    fn nearest_takes_the_first_of_equals_and_never_a_nan() {
        let cols = [1.0f32; 100];
        let packed = PackedCols::new(&cols, 1, 1.0);
        let mut bias = vec![0.0; 100];
        bias[..20].fill(5.0);
        for level in Level::available() {
            let (mut best, mut score) = ([7u32; 2], [0f32; 2]);
            nearest_at(level, &[1.0, f32::NAN], &packed, 1.0, &bias, &mut best, &mut score);
            assert_eq!((best, score[0], score[1]), ([20, 0], 1.0, f32::INFINITY), "{level:?}");
        }
    }

    #[test]
    fn empty_blocks() {
        dot_block(&[], &[1.0, 2.0], 2, &mut []);
        dot_block(&[1.0, 2.0], &[], 2, &mut []);
    }
}
