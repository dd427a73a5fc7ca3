//! Random histories of an index: whatever happens, every live row is there once.

use polign_engine::{
    Metric,
    build::in_memory::InMemoryOptions,
    maintain::{Policy, delta_runs},
};
use proptest::prelude::*;

use super::{
    compact::{explicit, small},
    world::{METRICS, Mixture, World},
};

const DIM: usize = 16;

#[derive(Debug, Clone, Copy)]
enum Step {
    Insert(u8),
    /// The nth part of all rows, from one of them on.
    Delete(u8, u8),
    /// Rows around one row, which make its cell grow.
    Crowd(u8, u8),
    Flush,
    Compact,
    /// With other sizes of cells, segments and rounds.
    CompactAs {
        target: u8,
        segments: u8,
        share: u8,
    },
    /// Rows die before it is published.
    CompactAndDelete(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1u8..150).prop_map(Step::Insert),
        3 => (1u8..20, any::<u8>()).prop_map(|(nth, from)| Step::Delete(nth, from)),
        2 => (any::<u8>(), 50u8..).prop_map(|(row, rows)| Step::Crowd(row, rows)),
        3 => Just(Step::Flush),
        2 => Just(Step::Compact),
        2 => (1u8..100, 1u8..4, 0u8..30)
            .prop_map(|(target, segments, share)| Step::CompactAs { target, segments, share }),
        1 => (1u8..9).prop_map(Step::CompactAndDelete),
    ]
}

fn delete(world: &mut World, nth: u8, from: u8) {
    let ids: Vec<u64> = world.rows.keys().copied().collect();
    for id in ids.into_iter().skip(usize::from(from)).step_by(nth.into()) {
        world.delete(id);
    }
}

fn go(world: &mut World, mixture: &mut Mixture, step: Step) {
    match step {
        Step::Insert(rows) => {
            for _ in 0..rows {
                world.insert(mixture.row());
            }
        }
        Step::Delete(nth, from) => delete(world, nth, from),
        Step::Crowd(row, rows) => {
            let near = world.rows.values().nth(row.into()).cloned();
            let near = near.unwrap_or_else(|| mixture.row());
            for _ in 0..rows {
                let row = near.iter().map(|x| x + 0.1 * (mixture.uniform() - 0.5)).collect();
                world.insert(row);
            }
        }
        Step::Flush => world.flush(),
        Step::Compact => {
            world.compact(explicit());
        }
        Step::CompactAs { target, segments, share } => {
            let policy = Policy {
                max_segments: segments.into(),
                changed_share: f64::from(share) / 100.0,
                max_delta_runs: 2,
                reassign: share % 2 == 0,
                ..small(Policy::automatic(target.into()))
            };
            if world.compact(policy).is_none() {
                assert!(delta_runs(&world.root) <= 2);
            }
        }
        Step::CompactAndDelete(nth) => {
            world.compact_with(explicit(), &mut |world| delete(world, nth, 0));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn no_row_is_lost_or_doubled(
        metric in 0usize..3,
        seed in any::<u64>(),
        empty in any::<bool>(),
        steps in prop::collection::vec(step(), 1..16),
    ) {
        let metric: Metric = METRICS[metric];
        let mut mixture = Mixture::new(seed, DIM, 5);
        let mut world = match empty {
            true => World::empty(metric, DIM),
            false => {
                let rows = (0..1_500).map(|_| mixture.row()).collect();
                let options = InMemoryOptions {
                    lists: Some(15), segment_rows: 500, samples: 50, ..InMemoryOptions::default()
                };
                World::new(metric, rows, options)
            }
        };
        for step in steps {
            go(&mut world, &mut mixture, step);
        }
        world.flush();
        let query = mixture.row();
        world.check(&query);
        while world.compact(explicit()).is_some() {}
        world.check(&query);
        prop_assert_eq!(world.root.rows(), world.rows.len() as u64);
    }
}
