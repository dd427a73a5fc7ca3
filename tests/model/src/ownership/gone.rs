//! The steps of a collection of what is left of an index that a server does not have. The store alone
//! tells: any server judges whose binding the owner object names, also one that never had the index.

use super::{AGES, Copies, Nonce, Object, Owner, OwnershipModel, Steps, Unsound, Writer};

/// A collection under one writer id. A crash leaves nothing of it but what it has done.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Sweep {
    writer: Writer,
    /// The nonces that the listing showed.
    pub(super) nonces: Vec<Nonce>,
    step: Step,
    /// Whether it began in this age.
    pub(super) fresh: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Step {
    /// With what follows if no index here speaks against it.
    Judge(Box<Step>),
    Note,
    Look,
    Delete(Vec<Object>),
    LookAgain,
    RemoveMarks,
    RemoveNonces,
}

impl OwnershipModel {
    pub(super) fn collect_gone(&self, copies: &Copies, who: usize, out: &mut Steps) {
        let server = &copies.servers[who];
        if let Some(sweep) = &server.sweep {
            let mut next = copies.clone();
            let (name, step) = self.sweep(&mut next, who, sweep);
            next.servers[who].sweep = step.map(|step| Sweep { step, ..sweep.clone() });
            out.push(((name, who as u8), Ok(next)));
            return;
        }
        let config = &self.config;
        if server.dead || config.drops + config.deaths + config.builds == 0 {
            return;
        }
        for owner in &copies.owners {
            // What an index here has inherited is for its own pages to say.
            let inherited = owner.heirs.iter().any(|heir| copies.carries(who, *heir));
            if owner.binding != server.binding
                || owner.nonces.is_empty()
                || inherited
                || copies.has(who, owner, self)
            {
                continue;
            }
            let old = match config.unsound {
                Some(Unsound::GoneWithoutAge) => true,
                Some(Unsound::GoneByLastWrite) => owner.written + AGES <= copies.now,
                _ => owner.gone.is_some_and(|since| since + AGES <= copies.now),
            };
            let then = match old && owner.heirs.is_empty() {
                true => Step::Look,
                false if owner.gone.is_none() => Step::Note,
                false => continue,
            };
            let (writer, nonces) = (owner.writer, owner.nonces.clone());
            let mut next = copies.clone();
            let step = Step::Judge(Box::new(then));
            next.servers[who].sweep = Some(Sweep { writer, nonces, step, fresh: true });
            out.push((("begin: gc of an index that is gone", who as u8), Ok(next)));
        }
    }

    fn sweep(
        &self,
        copies: &mut Copies,
        who: usize,
        sweep: &Sweep,
    ) -> (&'static str, Option<Step>) {
        let which = copies.owners.iter().position(|owner| owner.writer == sweep.writer);
        let which = which.expect("listed before");
        let owner = &copies.owners[which];
        let ages = !self.is(Unsound::GoneWithoutAge) && !self.is(Unsound::GoneByLastWrite);
        let still_gone = owner.nonces == sweep.nonces
            && owner.heirs.is_empty()
            && (owner.gone.is_some() || !ages);
        match sweep.step.clone() {
            Step::Judge(then) => {
                let step = (!copies.has(who, owner, self)).then_some(*then);
                ("look for its index", step)
            }
            Step::Note => {
                copies.owners[which].gone = Some(copies.now);
                ("note that the index is gone", None)
            }
            Step::Look if self.is(Unsound::NoncesFirst) && !owner.nonces.is_empty() => {
                copies.owners[which].nonces.clear();
                ("remove its nonces", still_gone.then_some(Step::Look))
            }
            Step::Look => {
                let left = (0..).zip(&copies.objects).filter(|(_, (writer, there))| {
                    *there && (*writer == owner.writer || self.has_left(copies, owner, *writer))
                });
                let left: Vec<Object> = left.map(|(object, _)| object).collect();
                let step = if left.is_empty() { Step::LookAgain } else { Step::Delete(left) };
                let goes_on = still_gone || self.is(Unsound::NoncesFirst);
                ("choose what is left", goes_on.then_some(step))
            }
            Step::Delete(mut left) => {
                if let Some(object) = left.pop() {
                    copies.objects[usize::from(object)].1 = false;
                }
                let step = if left.is_empty() { Step::LookAgain } else { Step::Delete(left) };
                ("delete what is left", Some(step))
            }
            Step::LookAgain => {
                let all = owner.adopted.iter().all(|other| self.has_left(copies, owner, *other));
                ("look whether it is still gone", (still_gone && all).then_some(Step::RemoveMarks))
            }
            Step::RemoveMarks => {
                let owner = &mut copies.owners[which];
                owner.gone = None;
                let adopted = std::mem::take(&mut owner.adopted);
                for other in &mut copies.owners {
                    if adopted.contains(&other.writer) && other.is_deserted(sweep.writer) {
                        other.heirs.clear();
                    }
                }
                ("remove its marks", Some(Step::RemoveNonces))
            }
            Step::RemoveNonces => {
                copies.owners[which].nonces.retain(|nonce| !sweep.nonces.contains(nonce));
                ("remove its nonces", None)
            }
        }
    }

    /// Whether an index that has adopted a writer id has left it behind too.
    fn has_left(&self, copies: &Copies, owner: &Owner, other: Writer) -> bool {
        let deserted = |o: &Owner| o.writer != other || o.is_deserted(owner.writer);
        owner.adopted.contains(&other)
            && (self.is(Unsound::AdoptedForEver) || copies.owners.iter().all(deserted))
    }
}

impl Copies {
    /// Whether an index of the server goes on under this id, or has taken it over.
    fn carries(&self, server: usize, writer: Writer) -> bool {
        self.living(server).any(|index| {
            let own = self.owners.iter().find(|owner| owner.writer == index.meta.writer);
            index.meta.writer == writer || own.is_some_and(|own| own.adopted.contains(&writer))
        })
    }

    /// Whether the server has an index to which what is left may belong, also one that is being built.
    fn has(&self, server: usize, owner: &Owner, model: &OwnershipModel) -> bool {
        let mut living = self.living(server);
        self.carries(server, owner.writer)
            || !model.is(Unsound::NoIndexId) && living.any(|index| index.meta.index == owner.index)
    }
}
