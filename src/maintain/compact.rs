//! Compaction: flushed rows come to those of their cells, dead ones go, cells are split and merged.

use std::{collections::HashSet, io, rc::Rc, sync::Arc};

use polign_engine::{
    ObjectId, cluster,
    maintain::{
        Compaction, CompactionStats, Outcome, Plan, Policy, SegmentSink, SegmentWrite, plan,
    },
    root::Root,
    segment::{WriteError, WrittenSegment},
};
use polign_pages::meta::{Meta, Retry};

use super::flush::{internal, new_object, until_published, with_codes};
use crate::{
    am::{options::Options, root_cache},
    error::{Error, Result},
    failpoint,
    pages::{
        Index, Steps,
        delta::rows::DeltaRows,
        objects,
        publish::{Publication, Published, publish},
        tombstones::{TombstoneSet, TombstoneView},
    },
    session::{self, Claim, Uploads},
    threads,
};

/// How much is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Segments of which much changed.
    Due,
    /// Every segment with a change.
    All,
}

/// One round: what it works on.
struct Round {
    meta: Rc<Meta>,
    root: Arc<Root>,
    tombstones: Rc<TombstoneSet>,
    policy: Policy,
    plan: Plan,
}

/// Compacts in as many rounds as it takes. The caller holds the maintenance lock. `progress` is told what
/// is being done. Gives the number of rows written.
pub fn compact(
    steps: &mut impl Steps,
    effort: Effort,
    progress: &mut dyn FnMut(&str),
) -> Result<u64> {
    let mut rows = 0;
    while let Some(stats) = compact_once(steps, effort, progress)? {
        rows += stats.rows;
    }
    Ok(rows)
}

/// One round, which is published by itself; nothing if there is nothing to do. What is cancelled or fails
/// changes nothing.
pub fn compact_once(
    steps: &mut impl Steps,
    effort: Effort,
    progress: &mut dyn FnMut(&str),
) -> Result<Option<CompactionStats>> {
    let Some(round) = steps.step(|index| Round::next(index, effort))? else { return Ok(None) };
    let claim = session::claim(steps)?;
    let outcome = round.run(steps, &claim, progress)?;
    failpoint::pass("compact: uploaded");
    until_published(steps, |index| round.publish(index, &outcome, &claim))?;
    Ok(Some(outcome.stats))
}

/// Whether there is something to do.
pub fn is_due(index: Index, effort: Effort) -> Result<bool> {
    Ok(Round::next(index, effort)?.is_some())
}

impl Round {
    fn next(index: Index, effort: Effort) -> Result<Option<Self>> {
        let (meta, root) = root_cache::current(index)?;
        if meta.sections.is_empty() {
            return Ok(None);
        }
        let tombstones = index.retry(|| TombstoneSet::read(index, &meta))?;
        let dead: Vec<u32> = root
            .segments()
            .iter()
            .map(|entry| tombstones.segment(entry.object).map_or(0, |of| of.dead() as u32))
            .collect();
        let rows = root.rows().max(1);
        // SAFETY: the relation is open.
        let lists = unsafe { Options::of(index.relation()) }.lists;
        let lists = lists.unwrap_or_else(|| cluster::default_lists(rows));
        let target_rows = rows.div_ceil(u64::from(lists.max(1))) as usize;
        let policy = match effort {
            Effort::Due => Policy::automatic(target_rows),
            Effort::All => Policy::explicit(target_rows),
        };
        let plan = plan(&root, &dead, &policy);
        Ok(plan.map(|plan| Self { meta, root, tombstones, policy, plan }))
    }

    fn run(
        &self,
        steps: &mut impl Steps,
        claim: &Claim,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Outcome> {
        let pool = threads::pool()?;
        let mut source = session::maintenance_source(&self.meta)?;
        let dead = TombstoneView::new(&self.tombstones, &self.root);
        let (root, plan) = (Arc::clone(&self.root), self.plan.clone());
        let mut compaction = Compaction::new(root, plan, self.policy, self.meta.next_cell);
        let uploads = Uploads::new(claim.target.url.clone());
        let mut sink = Sink { steps, claim, uploads };
        for job in 1.. {
            pgrx::check_for_interrupts!();
            progress(&format!("segment {job} of {}", compaction.jobs()));
            let read = compaction.read(&mut source, &dead);
            let read = read.map_err(|error| session::explain(error, &self.meta))?;
            let Some(read) = read else { break };
            let encoded =
                threads::off_thread(|interrupt| compaction.encode(read, &pool, interrupt))?;
            let encoded = encoded.map_err(|error| internal(&error))?;
            failpoint::pass("compact: encoded");
            compaction.write(encoded, &mut sink)?;
            failpoint::pass("compact: written");
        }
        let Sink { steps, uploads, .. } = sink;
        uploads.finish()?;
        let named: HashSet<u32> = steps.step(|index| {
            index.retry(|| {
                let (meta, _) = root_cache::current(index)?;
                Ok(DeltaRows::read(index, &meta)?.cells().collect())
            })
        })?;
        compaction.finish(&|cell| named.contains(&cell)).map_err(|error| internal(&error))
    }

    fn publish(&self, index: Index, outcome: &Outcome, claim: &Claim) -> Result<Published> {
        let dropped: HashSet<ObjectId> = outcome.dropped.iter().map(|name| name.object).collect();
        let kept = self.root.segments().iter().filter(|entry| !dropped.contains(&entry.object));
        let mut rows: u64 = kept.clone().map(|entry| u64::from(entry.rows.get())).sum();
        rows += outcome.segments.iter().map(|segment| segment.origins.len() as u64).sum::<u64>();
        let named = kept.map(|entry| entry.object);
        let named = named.chain(outcome.segments.iter().map(|segment| segment.name.object));
        let retired: Vec<_> = outcome
            .dropped
            .iter()
            .map(|name| {
                let of = (name.writer, name.index);
                objects::retired_now(name.object, of, claim.clock_ahead_ms)
            })
            .collect();
        let change = |meta: &mut Meta| {
            meta.rows = rows;
            meta.next_cell = outcome.next_cell;
            meta.retry = Retry::default();
        };
        let publication = Publication {
            basis: &self.meta,
            sections: &with_codes(&outcome.sections),
            objects: &named.collect(),
            retired: &retired,
            flushed: None,
            change: &change,
        };
        publish(index, &publication, |tombstones| Ok(self.dead(outcome, tombstones)))
    }

    /// The rows of new segments that died since they were read.
    fn dead(&self, outcome: &Outcome, now: &TombstoneSet) -> Vec<(ObjectId, Vec<u32>)> {
        let segments = self.root.segments().iter();
        let by_segment: Vec<_> = segments.map(|entry| now.segment(entry.object)).collect();
        let of_segment = |segment: &polign_engine::maintain::CompactedSegment| {
            let dead = (0u32..).zip(&segment.origins).filter(|(_, origin)| {
                by_segment[origin.segment as usize].is_some_and(|of| of.is_dead(origin.ordinal))
            });
            (segment.name.object, dead.map(|(ordinal, _)| ordinal).collect())
        };
        outcome.segments.iter().map(of_segment).collect()
    }
}

/// Uploads finished segments.
struct Sink<'a, S: Steps> {
    steps: &'a mut S,
    claim: &'a Claim,
    uploads: Uploads,
}

impl<S: Steps> SegmentSink for Sink<'_, S> {
    type Error = Error;

    fn segment(&mut self, write: SegmentWrite<'_>) -> Result<WrittenSegment> {
        let name = self.steps.step(|index| new_object(index, self.claim))?;
        self.uploads
            .segment(&name, |out: &mut dyn io::Write| -> Result<_, WriteError> { write(name, out) })
    }
}
