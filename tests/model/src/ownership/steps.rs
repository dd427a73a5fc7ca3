//! The steps of an operation of one server.

use super::{AGES, Copies, Kind, Nonce, Object, Owner, OwnershipModel, Step, Unsound, Writer};

impl OwnershipModel {
    pub(super) fn step(&self, copies: &mut Copies, who: usize) -> &'static str {
        let now = copies.now;
        let Copies { servers, indexes, owners, objects, next_nonce, next_writer, .. } = copies;
        let index = &mut indexes[who];
        let binding = servers[index.server].binding;
        let meta = &mut index.meta;
        let owner = owners.iter_mut().find(|owner| owner.writer == meta.writer);
        match index.step.clone() {
            Step::Idle => unreachable!("an idle server has no step"),
            Step::Compare => {
                let bound = meta.binding == binding || self.is(Unsound::NoBinding);
                let known = |nonce: &Nonce| *nonce == meta.nonce || Some(*nonce) == meta.next;
                let mine = owner.is_none_or(|owner| owner.nonces.iter().all(known));
                let unsettled = meta.next.is_some() && !self.is(Unsound::ForgetsNextNonce);
                index.step = match bound && (mine || self.is(Unsound::NoNonce)) {
                    true if self.is(Unsound::NoRotation) => self.after_check(index.kind),
                    // A crash came in between: the nonce is put again.
                    true if unsettled => Step::Put,
                    true => Step::Log,
                    false => {
                        let minted = *next_writer;
                        *next_writer += 1;
                        match self.is(Unsound::HeirAfterMint) {
                            true => Step::Mint(minted),
                            false => Step::Announce(minted),
                        }
                    }
                };
                "compare nonces"
            }
            Step::Announce(minted) => {
                if let Some(owner) = owner.filter(|_| !self.is(Unsound::NoHeirs)) {
                    owner.heirs.push(minted);
                    owner.heirs.sort_unstable();
                }
                index.step = match self.is(Unsound::HeirAfterMint) {
                    true => Step::Log,
                    false => Step::Mint(minted),
                };
                "announce an heir"
            }
            Step::Mint(minted) => {
                let old = meta.writer;
                meta.writer = minted;
                meta.binding = binding;
                meta.nonce = *next_nonce;
                meta.next = None;
                *next_nonce += 1;
                index.disk = meta.clone();
                index.step = Step::Log;
                if self.is(Unsound::HeirAfterMint) {
                    // The announcement needs the old id, so it follows at once, but a crash may come.
                    meta.writer = old;
                    index.step = Step::Announce(minted);
                }
                "mint a writer id"
            }
            Step::Log => {
                if self.is(Unsound::HeirAfterMint) {
                    meta.writer = index.disk.writer;
                }
                meta.next = Some(*next_nonce);
                *next_nonce += 1;
                if !self.is(Unsound::NonceBeforeLog) {
                    index.disk = meta.clone();
                }
                index.step = Step::Put;
                "log the next nonce"
            }
            Step::Put => {
                let nonce = meta.next.expect("logged before");
                match owner {
                    Some(owner) => {
                        if self.is(Unsound::OneNonceObject) {
                            owner.nonces.clear();
                        }
                        if !owner.nonces.contains(&nonce) {
                            owner.nonces.push(nonce);
                            owner.nonces.sort_unstable();
                        }
                        (owner.binding, owner.written, owner.gone) = (binding, now, None);
                    }
                    None => owners.push(Owner::new(meta.writer, meta.index, binding, now, nonce)),
                }
                index.step = Step::Remove;
                "put the nonce"
            }
            Step::Remove => {
                if let Some(owner) = owner {
                    owner.nonces.retain(|nonce| *nonce != meta.nonce);
                }
                index.step = Step::Settle;
                "remove the nonce before"
            }
            Step::Settle => {
                meta.nonce = meta.next.take().expect("logged before");
                index.step = self.after_check(index.kind);
                "settle the nonce"
            }
            Step::Name => {
                let object = objects.len() as Object;
                objects.push((meta.writer, false));
                meta.pending.push((object, now));
                if !self.is(Unsound::UnflushedPending) {
                    index.disk = meta.clone();
                }
                index.step = Step::Upload(object);
                "log a pending object"
            }
            Step::Upload(object) => {
                objects[usize::from(object)].1 = true;
                if let Some(owner) = owner {
                    owner.written = now;
                }
                index.step = match index.kind {
                    Kind::Build if self.is(Unsound::FoundAfterUpload) => Step::Found,
                    _ => Step::Publish(object),
                };
                "upload"
            }
            Step::Publish(object) => {
                let old = std::mem::replace(&mut meta.root, vec![object]);
                meta.retired.extend(old.into_iter().map(|old| (old, now)));
                index.step = Step::Unlist(object);
                "publish"
            }
            Step::Found => {
                owners.push(Owner::new(meta.writer, meta.index, binding, now, meta.nonce));
                index.step = match meta.pending.first() {
                    Some((object, _)) => Step::Publish(*object),
                    None => Step::Name,
                };
                "found: put the nonce"
            }
            Step::Unlist(object) => {
                meta.pending.retain(|(pending, _)| *pending != object);
                if index.kind == Kind::Build {
                    // It commits.
                    index.disk = meta.clone();
                }
                index.step = Step::Idle;
                "take it off the pending list"
            }
            Step::Choose => {
                // Nothing is deleted that a crash could bring back.
                index.disk = meta.clone();
                let judged_later = self.is(Unsound::NoAge) || self.is(Unsound::AgeAfterHeirs);
                let age = if judged_later { 0 } else { AGES };
                let is_retired = |object: &Object| meta.retired.iter().any(|(o, _)| o == object);
                let forgotten = meta.pending.iter().filter(|(object, _)| {
                    let published = meta.root.contains(object) || is_retired(object);
                    !published || self.is(Unsound::PendingByAge)
                });
                let listed = meta.retired.iter().chain(forgotten);
                let chosen = listed.filter(|(object, since)| {
                    since + age <= now && objects[usize::from(*object)].1
                });
                let chosen: Vec<Object> = chosen.map(|(object, _)| *object).collect();
                index.step = Step::Heirs(chosen);
                "choose old objects"
            }
            Step::Heirs(mut chosen) => {
                let again = !self.is(Unsound::NoSecondCompare) && !self.is(Unsound::NoNonce);
                let own = owner.map(|owner| &*owner).cloned();
                let alone = own.as_ref().is_none_or(|own| {
                    let mine = |nonce: &Nonce| *nonce == meta.nonce;
                    own.heirs.is_empty() && (!again || own.nonces.iter().all(mine))
                });
                chosen.retain(|object| {
                    let writer = objects[usize::from(*object)].0;
                    let adopted = own.as_ref().is_some_and(|own| own.adopted.contains(&writer));
                    let deserted =
                        owners.iter().filter(|owner| owner.writer == writer).all(|owner| {
                            owner.is_deserted(meta.writer) || self.is(Unsound::AdoptedForEver)
                        });
                    writer == meta.writer
                        || (adopted && deserted)
                        || self.is(Unsound::DeletesInherited)
                });
                index.step = match alone && !chosen.is_empty() {
                    true if self.is(Unsound::AgeAfterHeirs) => Step::Age(chosen),
                    true => Step::Delete(chosen),
                    false => Step::Idle,
                };
                "look for heirs"
            }
            Step::Age(mut chosen) => {
                let young = |object: &Object| {
                    let mut listed = meta.retired.iter().chain(&meta.pending);
                    listed.any(|(listed, since)| listed == object && since + AGES > now)
                };
                chosen.retain(|object| !young(object));
                index.step = if chosen.is_empty() { Step::Idle } else { Step::Delete(chosen) };
                "keep what is young"
            }
            Step::Delete(mut chosen) => {
                if let Some(object) = chosen.pop() {
                    objects[usize::from(object)].1 = false;
                    meta.retired.retain(|(retired, _)| *retired != object);
                    meta.pending.retain(|(pending, _)| *pending != object);
                }
                index.step = if chosen.is_empty() { Step::Idle } else { Step::Delete(chosen) };
                "delete"
            }
            Step::TakeOver => {
                let of = |object: &Object| objects[usize::from(*object)].0;
                let mut others: Vec<Writer> = meta.root.iter().map(of).collect();
                others.extend(meta.listed().map(|object| of(&object)));
                others.extend(owner.iter().flat_map(|owner| owner.heirs.clone()));
                // And who these have left behind or taken over.
                let mut seen = 0;
                while seen < others.len() {
                    let of_it = owners.iter().find(|owner| owner.writer == others[seen]);
                    if let Some(of_it) = of_it {
                        let further = of_it.heirs.iter().chain(&of_it.adopted).copied();
                        let further: Vec<_> = further.filter(|w| !others.contains(w)).collect();
                        others.extend(further);
                    }
                    seen += 1;
                }
                others.retain(|writer| *writer != meta.writer);
                // Whoever comes back there has to know.
                for other in owners.iter_mut().filter(|owner| others.contains(&owner.writer)) {
                    other.heirs.push(meta.writer);
                    other.heirs.sort_unstable();
                    other.heirs.dedup();
                }
                let own = owners.iter_mut().find(|owner| owner.writer == meta.writer);
                let own = own.expect("put before");
                own.adopted.extend(others);
                own.adopted.sort_unstable();
                own.adopted.dedup();
                index.step = Step::ClearOthers;
                "say which ids are taken over"
            }
            Step::ClearOthers => {
                let own = owner.expect("put before");
                let adopted = own.adopted.clone();
                // Who has announced itself since has not been taken over.
                let is_new = |heir: &Writer| !adopted.contains(heir);
                own.heirs.retain(is_new);
                for other in owners.iter_mut().filter(|owner| adopted.contains(&owner.writer)) {
                    other.heirs.retain(is_new);
                    (other.nonces, other.adopted, other.gone) = Default::default();
                }
                index.step = Step::List;
                "clear the ids that are taken over"
            }
            Step::List => {
                let adopted = owner.expect("put before").adopted.clone();
                for (object, (writer, there)) in (0..).zip(objects.iter()) {
                    let known = meta.root.contains(&object) || meta.listed().any(|o| o == object);
                    if adopted.contains(writer) && *there && !known {
                        meta.retired.push((object, now));
                    }
                }
                index.step = Step::Idle;
                "list what nobody needs any more"
            }
        }
    }

    fn after_check(&self, kind: Kind) -> Step {
        match kind {
            Kind::Check => Step::Idle,
            Kind::Write => Step::Name,
            Kind::Collect => Step::Choose,
            Kind::Adopt => Step::TakeOver,
            Kind::Build => unreachable!("who builds has nothing to compare"),
        }
    }
}
