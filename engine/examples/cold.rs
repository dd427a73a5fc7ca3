//! What queries on an empty cache would ask a store for: requests, bytes and waves by the number of cells
//! probed. `cargo run --release -p polign-engine --example cold -- base.f16.npy queries.f16.npy gt100.npy
//! cosine [epsilon] [gaps] [lists]`. A gap is `budget`, as searches choose it, or a fixed number of bytes
//! up to which ranges are read together.

mod data;

use std::{
    collections::{HashMap, HashSet},
    error::Error,
    fmt::{self, Display, Formatter},
    num::ParseIntError,
    ops::Range,
    str::FromStr,
    sync::Arc,
};

use data::{Data, params};
use polign_engine::{
    ObjectId,
    build::in_memory::{InMemoryIndex, InMemoryOptions},
    gets::{GetBudget, merge},
    search::{Environment, NoDelta, NoTombstones, Stream},
    segment::{MemorySource, PartKey, PartRef, PartSource, PartView, SourceError, Want},
};

/// A cache that starts empty, and counts what it would fetch.
struct ColdCache<'a> {
    objects: &'a mut MemorySource,
    gap: Gap,
    budget: GetBudget,
    present: HashSet<PartKey>,
    cost: Cost,
}

/// Gap up to which ranges are read together.
#[derive(Clone, Copy)]
enum Gap {
    Budget,
    Fixed(u32),
}

impl FromStr for Gap {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "budget" { Ok(Self::Budget) } else { text.parse().map(Self::Fixed) }
    }
}

impl Display for Gap {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Budget => f.pad("budget"),
            Self::Fixed(gap) => f.pad(&format!("{} KiB", gap >> 10)),
        }
    }
}

/// Requests and bytes of each wave of one query.
#[derive(Default)]
struct Cost {
    waves: Vec<(usize, u64)>,
}

impl Cost {
    /// GETs and kilobytes of the waves from `first` on.
    fn from(&self, first: usize) -> (f64, f64) {
        let later = self.waves.iter().skip(first);
        later.fold((0.0, 0.0), |sum, wave| (sum.0 + wave.0 as f64, sum.1 + wave.1 as f64 / 1e3))
    }
}

impl PartSource for ColdCache<'_> {
    fn request(&mut self, wants: &[Want<'_>]) {
        let missing: Vec<PartRef> = wants
            .iter()
            .map(|want| want.part)
            .filter(|part| self.present.insert(part.key))
            .collect();
        if missing.is_empty() {
            return;
        }
        let gap = match self.gap {
            Gap::Budget => self.budget.gap_for(&missing),
            Gap::Fixed(gap) => gap,
        };
        let mut objects: HashMap<ObjectId, Vec<((), Range<u64>)>> = HashMap::new();
        for part in missing {
            objects.entry(part.key.object).or_default().push(((), part.offset..part.end()));
        }
        let reads = objects.into_values().flat_map(|pieces| merge(pieces, gap));
        let bytes: Vec<u64> = reads.map(|read| read.range.end - read.range.start).collect();
        self.cost.waves.push((bytes.len(), bytes.iter().sum()));
    }

    fn store(&self) -> &str {
        "memory:"
    }

    fn check_interrupts(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    fn contains(&mut self, part: &PartRef) -> bool {
        self.present.contains(&part.key)
    }

    fn try_acquire(&mut self, part: &PartRef) -> Option<PartView> {
        if !self.present.contains(&part.key) {
            return None;
        }
        self.objects.try_acquire(part)
    }

    fn acquire_first(
        &mut self,
        want: Want<'_>,
        rest: &[Want<'_>],
    ) -> Result<PartView, SourceError> {
        if !self.present.contains(&want.part.key) {
            self.request(&[&[want], rest].concat());
        }
        self.objects.acquire(want)
    }

    fn still_valid(&mut self, _: &PartView) -> bool {
        true
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let data = Data::of_arguments(&arguments)?;
    let epsilons: Vec<f32> = match arguments.get(4) {
        Some(text) => text.split(',').map(str::parse).collect::<Result<_, _>>()?,
        None => vec![3.0],
    };
    let gaps: Vec<Gap> = match arguments.get(5) {
        Some(text) => text.split(',').map(str::parse).collect::<Result<_, _>>()?,
        None => vec![Gap::Budget],
    };
    let lists = arguments.get(6).map(|text| text.parse()).transpose()?;
    let count = (data.queries.len() / data.dim).min(300);
    let ids = data.ids();
    let index = InMemoryIndex::build(
        data.metric,
        data.dim,
        &data.rows,
        &ids,
        InMemoryOptions { lists, ..Default::default() },
    )?;
    let mut source = index.source;
    println!("{} rows, {} cells", ids.len(), index.root.cell_count());
    println!(
        "epsilon     gap  nprobe  recall@10  refined | plane 1: GETs  kB | plane 2: GETs  kB | all: GETs \
         (p90)  kB (p90) | in 2 waves, 24 GETs, 2.2 MB, both"
    );
    for &epsilon in &epsilons {
        for &gap in &gaps {
            for nprobe in [16, 20, 24, 28, 32, 36, 40, 48, 56, 64] {
                let params = params(nprobe, epsilon);
                let (mut hits, mut refined, mut costs) = (0, 0, Vec::new());
                for (question, query) in data.questions(count) {
                    let query = index.root.queries(query)?;
                    let mut stream = Stream::new(Arc::clone(&index.root), query, params);
                    let mut cold = ColdCache {
                        objects: &mut source,
                        gap,
                        budget: GetBudget::default(),
                        present: HashSet::new(),
                        cost: Cost::default(),
                    };
                    let mut environment =
                        Environment { source: &mut cold, delta: &mut NoDelta, dead: &NoTombstones };
                    hits += data.found(question, &mut stream, &mut environment)?;
                    refined += stream.stats().rows_refined;
                    costs.push(cold.cost);
                }
                let mean =
                    |of: &dyn Fn(&Cost) -> f64| costs.iter().map(of).sum::<f64>() / count as f64;
                let p90 = |of: &dyn Fn(&Cost) -> f64| {
                    let mut all: Vec<f64> = costs.iter().map(of).collect();
                    all.sort_by(f64::total_cmp);
                    all[count * 9 / 10]
                };
                let share = |good: &dyn Fn(&Cost) -> bool| {
                    100.0 * costs.iter().filter(|cost| good(cost)).count() as f64 / count as f64
                };
                let (gets, kilobytes) = (|c: &Cost| c.from(0).0, |c: &Cost| c.from(0).1);
                let few = |c: &Cost| gets(c) <= 24.0;
                let short = |c: &Cost| kilobytes(c) <= 2_200.0;
                println!(
                    "{epsilon:7} {gap:>7} {nprobe:7}  {:9.4}  {:7.1} | {:13.1} {:5.0} | {:13.1} {:5.0} | {:9.1} \
                     ({:3.0}) {:5.0} ({:5.0}) | {:3.0} % {:3.0} % {:3.0} % {:3.0} %",
                    hits as f64 / (10 * count) as f64,
                    refined as f64 / count as f64,
                    mean(&|c| c.from(0).0 - c.from(1).0),
                    mean(&|c| c.from(0).1 - c.from(1).1),
                    mean(&|c| c.from(1).0),
                    mean(&|c| c.from(1).1),
                    mean(&gets),
                    p90(&gets),
                    mean(&kilobytes),
                    p90(&kilobytes),
                    share(&|c| c.waves.len() <= 2),
                    share(&few),
                    share(&short),
                    share(&|c| few(c) && short(c)),
                );
            }
        }
    }
    Ok(())
}
