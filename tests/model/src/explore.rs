//! Explicit-state search. Breadth first, so that the trace of a violation is a shortest one.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ops::Deref;
use std::rc::Rc;

/// What a step did, for traces. Two labels of one state are distinct.
pub type Label = (&'static str, u8);

/// A state machine with interleaved steps.
pub trait Model {
    type State: Clone + Hash + Debug;
    /// The steps possible in `state`, each with the state that it leads to or the rule that it broke.
    fn steps(&self, state: &Self::State, out: &mut Vec<(Label, Result<Self::State, String>)>);
    /// Rules that hold in every state.
    fn check(&self, state: &Self::State) -> Result<(), String>;
}

/// A broken rule and how to get there.
#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: String,
    pub trace: Vec<Label>,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.rule)?;
        for (name, n) in &self.trace {
            writeln!(f, "  {name} {n}")?;
        }
        Ok(())
    }
}

/// The result of a complete search.
#[derive(Debug)]
pub struct Explored {
    pub states: usize,
    pub depth: usize,
    pub violation: Option<Violation>,
}

/// A fast 64-bit hash: one folded 128-bit multiplication a word. With n states, two distinct ones
/// fall together with probability n^2 / 2^65.
#[derive(Default)]
struct Folded(u64);

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word) ^ ((chunk.len() as u64) << 56));
        }
    }
    fn write_u8(&mut self, word: u8) {
        self.write_u64(u64::from(word) | 1 << 32);
    }
    fn write_u16(&mut self, word: u16) {
        self.write_u64(u64::from(word) | 2 << 32);
    }
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }
    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// The hash of a state.
pub fn fingerprint<S: Hash + ?Sized>(state: &S) -> u64 {
    let mut hasher = Folded::default();
    state.hash(&mut hasher);
    hasher.finish()
}

/// A shared value that is hashed once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared<T>(Rc<(u64, T)>);

impl<T: Hash> Shared<T> {
    pub fn new(value: T) -> Shared<T> {
        Shared(Rc::new((fingerprint(&value), value)))
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0.1
    }
}

impl<T> Hash for Shared<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.0);
    }
}

/// Fingerprints are hashes already.
type Seen = HashMap<u64, (u64, Label), BuildHasherDefault<Folded>>;

/// Visits every reachable state once, up to the first violation.
///
/// # Panics
/// If there are more than `limit` states: a search that was cut off proves nothing.
pub fn exhaustive<M: Model>(model: &M, initial: M::State, limit: usize) -> Explored {
    // The parent's fingerprint and the step taken there: enough to rebuild a trace.
    let mut seen = Seen::default();
    let trace = |seen: &Seen, mut at: u64, last: Option<Label>| {
        let mut labels: Vec<Label> = last.into_iter().collect();
        while let Some(&(parent, label)) = seen.get(&at) {
            if parent == at {
                break;
            }
            labels.push(label);
            at = parent;
        }
        labels.reverse();
        labels
    };
    let first = fingerprint(&initial);
    seen.insert(first, (first, ("start", 0)));
    let found = |seen: &Seen, depth, rule, trace| Explored {
        states: seen.len(),
        depth,
        violation: Some(Violation { rule, trace }),
    };
    if let Err(rule) = model.check(&initial) {
        return found(&seen, 0, rule, Vec::new());
    }
    let (mut frontier, mut depth) = (vec![initial], 0);
    let mut out = Vec::new();
    while !frontier.is_empty() {
        let mut next = Vec::new();
        for state in &frontier {
            let here = fingerprint(state);
            model.steps(state, &mut out);
            for (label, result) in out.drain(..) {
                let successor = match result {
                    Ok(successor) => successor,
                    Err(rule) => {
                        return found(&seen, depth + 1, rule, trace(&seen, here, Some(label)));
                    }
                };
                let print = fingerprint(&successor);
                if seen.contains_key(&print) {
                    continue;
                }
                assert!(seen.len() < limit, "more than {limit} states: make the schedule smaller");
                seen.insert(print, (here, label));
                if let Err(rule) = model.check(&successor) {
                    return found(&seen, depth + 1, rule, trace(&seen, print, None));
                }
                next.push(successor);
            }
        }
        frontier = next;
        depth += 1;
    }
    Explored { states: seen.len(), depth, violation: None }
}

/// Random walks through schedules too large to exhaust; a violation's trace is shrunk.
pub fn walks<M: Model>(
    model: &M,
    initial: &M::State,
    seed: u64,
    walks: usize,
    length: usize,
) -> Option<Violation> {
    let mut random = seed | 1;
    let mut out = Vec::new();
    for _ in 0..walks {
        let (mut state, mut trace) = (initial.clone(), Vec::new());
        for _ in 0..length {
            model.steps(&state, &mut out);
            if out.is_empty() {
                break;
            }
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let (label, result) = out.swap_remove((random % out.len() as u64) as usize);
            out.clear();
            trace.push(label);
            match result.and_then(|next| model.check(&next).map(|()| next)) {
                Ok(next) => state = next,
                Err(_) => return Some(shrink(model, initial, trace)),
            }
        }
    }
    None
}

/// Follows `trace`, leaving out what is not possible; the violation and the steps taken, if any.
fn replay<M: Model>(model: &M, initial: &M::State, trace: &[Label]) -> Option<Violation> {
    let (mut state, mut taken) = (initial.clone(), Vec::new());
    let mut out = Vec::new();
    for want in trace {
        model.steps(&state, &mut out);
        let step = out.drain(..).find(|(label, _)| label == want);
        let Some((label, result)) = step else { continue };
        taken.push(label);
        match result.and_then(|next| model.check(&next).map(|()| next)) {
            Ok(next) => state = next,
            Err(rule) => return Some(Violation { rule, trace: taken }),
        }
    }
    None
}

fn shrink<M: Model>(model: &M, initial: &M::State, trace: Vec<Label>) -> Violation {
    let mut best = replay(model, initial, &trace).expect("a recorded trace can be followed again");
    let mut at = 0;
    while at < best.trace.len() {
        let mut shorter = best.trace.clone();
        shorter.remove(at);
        match replay(model, initial, &shorter) {
            Some(found) => best = found,
            None => at += 1,
        }
    }
    best
}
