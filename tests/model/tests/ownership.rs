//! No copy of an index ever loses an object that it needs, whoever collects garbage.

use polign_page_model::explore::{Explored, Label, Model, exhaustive, walks};
use polign_page_model::ownership::{Copies, Fork, OwnershipConfig, OwnershipModel, Unsound};

type Start = fn(&OwnershipModel) -> Copies;

fn explore(start: Start, config: OwnershipConfig) -> Explored {
    let model = OwnershipModel { config };
    let explored = exhaustive(&model, start(&model), 2_000_000);
    println!("{} states, depth {}: {:?}", explored.states, explored.depth, model.config);
    explored
}

fn holds(config: OwnershipConfig) {
    holds_from(OwnershipModel::initial, config);
}

fn holds_from(start: Start, config: OwnershipConfig) {
    if let Some(violation) = explore(start, config).violation {
        panic!("{violation}");
    }
}

/// A schedule that passes with the rule (it is among those of the tests below) fails without it.
fn needed(unsound: Unsound, rule: &str, config: OwnershipConfig) {
    needed_from(OwnershipModel::initial, unsound, rule, config);
}

fn needed_from(start: Start, unsound: Unsound, rule: &str, config: OwnershipConfig) {
    let explored = explore(start, OwnershipConfig { unsound: Some(unsound), ..config });
    let violation = explored.violation.unwrap_or_else(|| panic!("{unsound:?}: nothing found"));
    println!("{unsound:?}: {violation}");
    assert!(violation.rule.contains(rule), "{unsound:?} broke something else: {violation}");
}

fn one_server() -> OwnershipConfig {
    OwnershipConfig { writes: 1, gcs: 1, ages: 2, ..OwnershipConfig::default() }
}

fn one_copy(fork: Fork) -> OwnershipConfig {
    OwnershipConfig { forks: 1, fork: Some(fork), ..one_server() }
}

/// An index is built by one server, and no other one knows it.
fn one_build() -> OwnershipConfig {
    OwnershipConfig { builds: 1, ages: 2, ..OwnershipConfig::default() }
}

/// The origin or the copy goes for good, and the operator says so to the other one.
fn one_adoption(fork: Fork) -> OwnershipConfig {
    OwnershipConfig { deaths: 1, adoptions: 1, ..one_copy(fork) }
}

#[test]
fn a_server_alone_keeps_its_id_and_forgets_nothing() {
    holds(OwnershipConfig { writes: 2, gcs: 2, ages: 3, crashes: 2, ..one_server() });
    holds(OwnershipConfig { writes: 1, drops: 1, crashes: 2, ..one_build() });
}

/// Finds the state in which garbage is gone: a collection that deletes nothing would pass all the rest.
struct Until(OwnershipModel, fn(&Copies) -> bool);

impl Model for Until {
    type State = Copies;
    fn steps(&self, state: &Copies, out: &mut Vec<(Label, Result<Copies, String>)>) {
        self.0.steps(state, out);
    }
    fn check(&self, state: &Copies) -> Result<(), String> {
        if self.1(state) { Err("collected".into()) } else { Ok(()) }
    }
}

fn is_reached(config: OwnershipConfig, end: fn(&Copies) -> bool) {
    is_reached_from(OwnershipModel::initial, config, end);
}

fn is_reached_from(start: Start, config: OwnershipConfig, end: fn(&Copies) -> bool) {
    let model = Until(OwnershipModel { config }, end);
    let explored = exhaustive(&model, start(&model.0), 1_000_000);
    assert_eq!(explored.violation.expect("nothing is ever deleted").rule, "collected");
}

#[test]
fn garbage_is_collected() {
    is_reached(one_server(), Copies::collected);
    is_reached(OwnershipConfig { gcs: 0, drops: 1, ..one_server() }, Copies::collected);
}

/// By a server that never had the index.
#[test]
fn what_was_built_elsewhere_is_collected() {
    let config = OwnershipConfig { deaths: 1, ..one_build() };
    is_reached_from(OwnershipModel::parted, config, Copies::build_collected);
}

#[test]
fn what_is_adopted_is_collected() {
    is_reached(one_adoption(Fork::Other), Copies::collected_by_heir);
    is_reached(one_adoption(Fork::Other), Copies::heir_collected);
    let config = OwnershipConfig { gcs: 0, drops: 1, ..one_adoption(Fork::Other) };
    is_reached(config.clone(), Copies::collected_by_heir);
    is_reached(config, Copies::heir_collected);
}

#[test]
fn a_twin() {
    holds(one_copy(Fork::Twin));
    holds(OwnershipConfig { gcs: 0, drops: 1, ..one_copy(Fork::Twin) });
}

#[test]
fn a_promoted_standby_or_a_template() {
    holds(OwnershipConfig { writes: 2, ..one_copy(Fork::Other) });
    holds(OwnershipConfig { gcs: 0, drops: 1, ..one_copy(Fork::Other) });
    holds(OwnershipConfig { crashes: 1, ..one_copy(Fork::Other) });
}

#[test]
fn a_restored_backup() {
    holds(OwnershipConfig { backups: 1, ..one_copy(Fork::Other) });
    holds(OwnershipConfig { backups: 1, gcs: 0, drops: 1, ..one_copy(Fork::Other) });
}

#[test]
fn a_build_after_twins_parted() {
    let config = one_build();
    holds(OwnershipConfig { forks: 1, fork: Some(Fork::Twin), ..config.clone() });
    holds_from(OwnershipModel::parted, OwnershipConfig { drops: 1, crashes: 1, ..config });
}

#[test]
fn a_build_after_restores_to_the_same_timeline() {
    holds_from(OwnershipModel::restored, one_build());
}

#[test]
fn an_adoption() {
    holds(one_adoption(Fork::Other));
    for fork in [Fork::Twin, Fork::Other] {
        holds(OwnershipConfig { gcs: 0, drops: 1, ..one_adoption(fork) });
    }
    holds(OwnershipConfig { crashes: 1, writes: 0, ..one_adoption(Fork::Other) });
}

/// That an index with the same id is here keeps what a twin wrote for it, but the twin's nonce does too.
#[test]
fn nonces_suffice_without_the_id_of_the_index() {
    let config = OwnershipConfig { unsound: Some(Unsound::NoIndexId), drops: 1, ..one_build() };
    holds_from(OwnershipModel::restored, OwnershipConfig { builds: 0, ..config });
}

/// The nonce alone tells copies apart; the binding lets a copy know at once, and says whose a dropped
/// index was.
#[test]
fn nonces_suffice_without_the_binding() {
    let config = OwnershipConfig { unsound: Some(Unsound::NoBinding), ..one_copy(Fork::Other) };
    holds(OwnershipConfig { gcs: 0, drops: 1, ..config });
}

#[test]
fn long_random_histories_of_several_copies() {
    for fork in [Fork::Twin, Fork::Other, Fork::Restored] {
        let config = OwnershipConfig {
            forks: 3,
            fork: Some(fork),
            backups: 2,
            writes: 5,
            gcs: 5,
            drops: 1,
            builds: 2,
            crashes: 2,
            deaths: 2,
            adoptions: 2,
            ages: 6,
            unsound: None,
        };
        let model = OwnershipModel { config };
        if let Some(violation) = walks(&model, &model.initial(), 0x5eed, 5_000, 300) {
            panic!("{violation}");
        }
    }
}

#[test]
fn a_copy_says_under_the_old_id_that_it_goes_on() {
    let config = one_copy(Fork::Other);
    needed(Unsound::NoHeirs, "lost", config.clone());
    needed(Unsound::HeirAfterMint, "lost", OwnershipConfig { crashes: 1, ..config });
}

#[test]
fn a_twin_is_told_by_its_nonce() {
    let config = one_copy(Fork::Twin);
    needed(Unsound::NoNonce, "lost", config.clone());
    needed(Unsound::NoSecondCompare, "lost", config.clone());
    needed(Unsound::OneNonceObject, "lost", config.clone());
    let config = OwnershipConfig { gcs: 0, drops: 1, ..config };
    needed(Unsound::NoRotation, "lost", config);
}

#[test]
fn a_crash_makes_no_stranger_of_a_server() {
    let config = OwnershipConfig { crashes: 2, ..one_server() };
    needed(Unsound::NonceBeforeLog, "another writer id", config.clone());
    needed(Unsound::ForgetsNextNonce, "another writer id", config.clone());
    needed(Unsound::UnflushedPending, "forgotten", config);
}

#[test]
fn what_a_crash_leaves_of_a_build_or_a_collection_is_found() {
    let config = OwnershipConfig { drops: 1, crashes: 1, ..one_build() };
    needed(Unsound::FoundAfterUpload, "forgotten", config.clone());
    needed(Unsound::NoncesFirst, "forgotten", config);
}

/// A server whose binding is the same takes an index for gone that was built elsewhere. Only a nonce that is
/// put later tells it otherwise, and one of another index of that server does not.
#[test]
fn a_server_puts_a_nonce_for_each_of_its_indexes() {
    let config = OwnershipConfig { forks: 1, fork: Some(Fork::Twin), ..one_build() };
    needed(Unsound::SilentIndexes, "lost", config);
}

#[test]
fn what_was_published_is_not_taken_for_pending() {
    let config = OwnershipConfig { writes: 2, crashes: 1, ..one_copy(Fork::Other) };
    needed(Unsound::PendingByAge, "lost", config);
}

#[test]
fn an_adopted_id_is_left_alone_when_somebody_comes_back() {
    let config = one_copy(Fork::Other);
    holds_from(OwnershipModel::adopted, config.clone());
    needed_from(OwnershipModel::adopted, Unsound::AdoptedForEver, "lost", config);
}

#[test]
fn only_old_objects_of_its_own_are_deleted() {
    let config = one_copy(Fork::Other);
    needed(Unsound::DeletesInherited, "lost", config.clone());
    needed(Unsound::NoAge, "lost", config.clone());
    needed(Unsound::IdleCopies, "lost", config.clone());
    let restored = OwnershipConfig { backups: 1, ..config.clone() };
    needed(Unsound::AgeAfterHeirs, "lost", restored);
    let config = OwnershipConfig { gcs: 0, drops: 1, ..config };
    needed(Unsound::GoneWithoutAge, "lost", config.clone());
    needed(Unsound::GoneByLastWrite, "lost", OwnershipConfig { backups: 1, ..config });
}
