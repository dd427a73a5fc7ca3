//! Times of the kernels on one core: `cargo bench -p polign-engine --bench kernels [-- FILTER]`.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use polign_engine::{
    Metric,
    kernel::{self, Level, RacyBytes, Rotation, padded_dim},
    quantize::{Model, plane1, plane2},
};

/// Values in -1 to 1.
fn floats(len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn model(dim: usize) -> Model {
    Model::new(1, Metric::L2, dim, 7, vec![0.0; dim]).expect("a valid model")
}

/// The block scan, on blocks in the cache (256 KiB) and in memory (256 MiB); a row is an element.
fn scan(c: &mut Criterion) {
    let mut group = c.benchmark_group("scan");
    for dim in [100, 384, 1536] {
        let model = model(dim);
        let query = model.query(&floats(dim)).expect("a valid query");
        let block = plane1::block_bytes(model.padded_dim(), model.bits);
        let mut one = Vec::new();
        let rows = floats(model.padded_dim() * 32);
        plane1::encode_blocks(&model, &rows, &vec![0.0; model.padded_dim()], &mut one);
        for (place, bytes) in [("cache", 256 << 10), ("memory", 256 << 20)] {
            let blocks = one.repeat(bytes / block);
            group.throughput(Throughput::Elements((bytes / block * 32) as u64));
            for level in Level::available() {
                if place == "memory" && level == Level::Scalar {
                    continue;
                }
                Level::force(Some(level));
                // Cells of a few hundred rows, as in a search.
                let (mut estimates, mut lowers) = (Vec::new(), Vec::new());
                group.bench_function(format!("{dim}/{place}/{level:?}"), |b| {
                    b.iter(|| {
                        for cell in blocks.chunks(13 * block) {
                            estimates.clear();
                            lowers.clear();
                            let term = query.zero_cell_term();
                            let cell = RacyBytes::new(black_box(cell));
                            let bits = model.bits;
                            plane1::scan(
                                cell,
                                bits,
                                &query,
                                term,
                                1.9,
                                &mut estimates,
                                &mut lowers,
                            );
                        }
                        black_box((&estimates, &lowers));
                    })
                });
            }
            Level::force(None);
        }
    }
}

/// Everything that is done once a row or once a query.
fn single(c: &mut Criterion) {
    let mut group = c.benchmark_group("single");
    for dim in [100, 384, 1536] {
        let model = model(dim);
        let p = padded_dim(dim);
        let v = floats(dim);
        let mut x = vec![0.0; p];
        let query = model.query(&floats(dim)).expect("a valid query");
        let mut record = Vec::new();
        model.project_row(&v, &mut x).expect("a valid row");
        plane2::encode(&model, &x, 1, &mut record);
        let other = floats(p);
        for level in Level::available() {
            Level::force(Some(level));
            let name = |what: &str| format!("{what}/{dim}/{level:?}");
            let codes = RacyBytes::new(&record[..p]);
            group.bench_function(name("l2_squared"), |b| {
                b.iter(|| kernel::l2_squared(black_box(&x), black_box(&other)))
            });
            group.bench_function(name("dot_i8_f32"), |b| {
                b.iter(|| kernel::dot_i8_f32(black_box(codes), black_box(&other)))
            });
            group.bench_function(name("refine"), |b| {
                b.iter(|| query.refine(black_box(RacyBytes::new(&record))))
            });
            let rotation = Rotation::new(dim, 5);
            let mut rotated = x.clone();
            group.bench_function(name("rotate"), |b| {
                b.iter(|| rotation.rotate(black_box(&mut rotated)))
            });
            let halves: Vec<half::f16> = v.iter().map(|v| half::f16::from_f32(*v)).collect();
            let mut wide = v.clone();
            group.bench_function(name("f16_to_f32"), |b| {
                b.iter(|| kernel::f16_to_f32(black_box(&halves), black_box(&mut wide)))
            });
            let mut projected = x.clone();
            group.bench_function(name("project_row"), |b| {
                b.iter(|| model.project_row(black_box(&v), black_box(&mut projected)))
            });
            group.bench_function(name("query"), |b| b.iter(|| model.query(black_box(&v))));
            let mut out = Vec::new();
            group.bench_function(name("plane2_encode"), |b| {
                b.iter(|| {
                    out.clear();
                    plane2::encode(&model, black_box(&x), 1, &mut out)
                })
            });
            let rows = x.repeat(32);
            group.bench_function(name("plane1_encode_32"), |b| {
                b.iter(|| {
                    out.clear();
                    plane1::encode_blocks(&model, black_box(&rows), &other, &mut out)
                })
            });
        }
        Level::force(None);
    }
}

fn quick() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
        .sample_size(10)
}

criterion_group! { name = kernels; config = quick(); targets = scan, single }
criterion_main!(kernels);
