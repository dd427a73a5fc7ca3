//! Test data and pgvector's arithmetic, shared by the quantizer's tests.
#![allow(dead_code)]

use polign_engine::Metric;

pub const METRICS: [Metric; 3] = [Metric::L2, Metric::InnerProduct, Metric::Cosine];

/// A generator of reproducible test data (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Between 0 and 1, neither included.
    pub fn uniform(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    pub fn normal(&mut self) -> f64 {
        let (r, angle) =
            ((-2.0 * self.uniform().ln()).sqrt(), std::f64::consts::TAU * self.uniform());
        r * angle.cos()
    }

    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal() as f32).collect()
    }
}

/// The score by the definition, in f64.
pub fn exact_score(metric: Metric, v: &[f32], q: &[f32]) -> f64 {
    let pairs = || v.iter().zip(q).map(|(v, q)| (f64::from(*v), f64::from(*q)));
    match metric {
        Metric::L2 => pairs().map(|(v, q)| (v - q) * (v - q)).sum(),
        Metric::InnerProduct => -pairs().map(|(v, q)| v * q).sum::<f64>(),
        Metric::Cosine => {
            let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            2.0 - 2.0 * pairs().map(|(v, q)| v * q).sum::<f64>() / norm(v) / norm(q)
        }
    }
}

/// An order in which a compiler may add up a loop over f32 (pgvector is built with
/// `-fassociative-math`, for several instruction sets).
#[derive(Debug, Clone, Copy)]
pub enum Order {
    Serial,
    Reversed,
    /// So many lanes, added up one after the other at the end, as are the last elements.
    Lanes(usize),
    /// So many lanes, added up pairwise; the last elements come first.
    FoldedLanes(usize),
    Pairwise,
}

pub const ORDERS: [Order; 9] = [
    Order::Serial,
    Order::Reversed,
    Order::Lanes(4),
    Order::Lanes(8),
    Order::Lanes(16),
    Order::FoldedLanes(4),
    Order::FoldedLanes(8),
    Order::FoldedLanes(32),
    Order::Pairwise,
];

fn pairwise(n: std::ops::Range<usize>, add: &impl Fn(f32, usize) -> f32) -> f32 {
    match n.len() {
        0 => 0.0,
        1 => add(0.0, n.start),
        len => {
            let middle = n.start + len / 2;
            pairwise(n.start..middle, add) + pairwise(middle..n.end, add)
        }
    }
}

/// Sum over 0..n in an order, where `add` adds an element's term.
pub fn sum(order: Order, n: usize, add: impl Fn(f32, usize) -> f32) -> f32 {
    match order {
        Order::Serial => (0..n).fold(0.0, add),
        Order::Reversed => (0..n).rev().fold(0.0, add),
        Order::Pairwise => pairwise(0..n, &add),
        Order::Lanes(width) => {
            let whole = n / width * width;
            let mut lanes = vec![0f32; width];
            for i in 0..whole {
                lanes[i % width] = add(lanes[i % width], i);
            }
            (whole..n).fold(lanes.into_iter().fold(0.0, |sum, lane| sum + lane), add)
        }
        Order::FoldedLanes(width) => {
            let whole = n / width * width;
            let mut lanes = vec![0f32; width];
            for i in whole..n {
                lanes[0] = add(lanes[0], i);
            }
            for i in 0..whole {
                lanes[i % width] = add(lanes[i % width], i);
            }
            let mut width = width / 2;
            while width > 0 {
                for i in 0..width {
                    lanes[i] += lanes[i + width];
                }
                width /= 2;
            }
            lanes[0]
        }
    }
}

/// Inner product as pgvector may compute it.
fn product(order: Order, fused: bool, a: &[f32], b: &[f32]) -> f32 {
    sum(order, a.len(), |sum, i| match fused {
        true => a[i].mul_add(b[i], sum),
        false => sum + a[i] * b[i],
    })
}

/// Every value that pgvector's operator may give, depending on compiler and CPU; for cosine, whose three
/// sums need not have the same order, only the least one.
pub fn pgvector_distances(metric: Metric, v: &[f32], q: &[f32]) -> Vec<f64> {
    let ways = || ORDERS.into_iter().flat_map(|order| [(order, false), (order, true)]);
    match metric {
        Metric::L2 => ways()
            .map(|(order, fused)| {
                let squared = sum(order, v.len(), |sum, i| {
                    let difference = v[i] - q[i];
                    match fused {
                        true => difference.mul_add(difference, sum),
                        false => sum + difference * difference,
                    }
                });
                f64::from(squared).sqrt()
            })
            .collect(),
        Metric::InnerProduct => {
            ways().map(|(order, fused)| f64::from(-product(order, fused, v, q))).collect()
        }
        Metric::Cosine => {
            let all = |a: &[f32], b: &[f32]| -> Vec<f64> {
                ways().map(|(order, fused)| f64::from(product(order, fused, a, b))).collect()
            };
            let norms = |x: &[f32]| {
                let all = all(x, x);
                let least = all.iter().copied().fold(f64::INFINITY, f64::min);
                [least, all.into_iter().fold(0.0, f64::max)]
            };
            let most = all(v, q).into_iter().fold(f64::NEG_INFINITY, f64::max);
            let mut least = f64::INFINITY;
            for norm_v in norms(v) {
                for norm_q in norms(q) {
                    // pgvector: similarity / sqrt(norms), clamped, 1 - that; not-a-number sorts last.
                    let similarity = most / (norm_v * norm_q).sqrt();
                    least = least.min(1.0 - similarity.clamp(-1.0, 1.0));
                }
            }
            vec![least]
        }
    }
}
