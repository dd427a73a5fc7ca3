//! Recall and time of the engine alone, everything in memory:
//! `cargo run --release -p polign-engine --example recall -- base.f16.npy queries.f16.npy gt100.npy cosine`.
//!
//! Files are NumPy `.npy`: float16 rows, float16 queries, int32 row numbers of the 100 exact neighbours.

mod data;

use std::{error::Error, sync::Arc, time::Instant};

use data::{Data, params};
use polign_engine::{
    build::in_memory::{InMemoryIndex, InMemoryOptions},
    search::{Environment, NoDelta, NoTombstones, Stream},
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let data = Data::of_arguments(&arguments)?;
    let dim = data.dim;
    let lists = arguments.get(4).map(|text| text.parse()).transpose()?.filter(|&lists| lists > 0);
    let epsilon = arguments.get(5).map_or(Ok(3.0), |text| text.parse())?;
    let count = (data.queries.len() / dim).min(1_000);
    let ids = data.ids();

    let started = Instant::now();
    let index = InMemoryIndex::build(
        data.metric,
        dim,
        &data.rows,
        &ids,
        InMemoryOptions { lists, ..Default::default() },
    )?;
    println!(
        "{} rows x {dim}, {} cells, built in {:.2} s, {:.1} MB",
        ids.len(),
        index.root.cell_count(),
        started.elapsed().as_secs_f64(),
        index.bytes() as f64 / 1e6
    );
    let curves = index.root.curves();
    for target in [0.9, 0.95, 0.99] {
        let cells = index.root.cell_count() as u32;
        let nprobe = [10, 100, 1_000].map(|k| curves.nprobe(k, target, cells));
        println!("calibrated for {target}: nprobe {nprobe:?} at k = 10, 100, 1000");
    }
    println!("nprobe  recall@10  codes  refined  returned  us/query");
    let mut source = index.source;
    for nprobe in [4, 8, 12, 16, 20, 24, 32, 40, 51, 64, 96, 128] {
        let params = params(nprobe, epsilon);
        let (mut hits, mut codes, mut refined, mut returned) = (0, 0, 0, 0);
        let mut stream = None;
        let started = Instant::now();
        for (question, query) in data.questions(count) {
            let query = index.root.queries(query)?;
            let stream = match &mut stream {
                None => stream.insert(Stream::new(Arc::clone(&index.root), query, params)),
                Some(stream) => {
                    stream.restart(Arc::clone(&index.root), query, params);
                    stream
                }
            };
            let mut environment =
                Environment { source: &mut source, delta: &mut NoDelta, dead: &NoTombstones };
            hits += data.found(question, stream, &mut environment)?;
            let stats = stream.stats();
            codes += stats.codes_scanned;
            refined += stats.rows_refined;
            returned += stats.rows_returned;
        }
        let micros = started.elapsed().as_secs_f64() * 1e6 / count as f64;
        let per = |n: u64| n as f64 / count as f64;
        println!(
            "{nprobe:6}  {:9.4}  {:5.0}  {:7.1}  {:8.1}  {micros:8.1}",
            hits as f64 / (10 * count) as f64,
            per(codes),
            per(refined),
            per(returned)
        );
    }
    Ok(())
}
