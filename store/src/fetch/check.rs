//! Reading parts to see whether the store has them as they were written.

use futures_util::future::try_join_all;
use polign_engine::{
    gets::{Merged, merge},
    protocol::{Failure, FetchPlan, FetchSummary, ObjectParts, PartOutcome},
    segment::PartKey,
};

use super::{Job, Wanted, check_plan, read, steps, verified};
use crate::retry::Deadline;

/// Reads the parts of a plan from the store, a step at a time, whatever the cache has of them: what it has is
/// left there, and what is read is not kept. Ends at the first failure.
pub async fn check(plan: &FetchPlan, job: &Job) -> Result<FetchSummary, Failure> {
    for object in &plan.objects {
        for parts in steps(&object.parts) {
            let ObjectParts { key, object, .. } = object.clone();
            check_step(&[ObjectParts { key, object, parts: parts.to_vec() }], job).await?;
        }
    }
    Ok(job.summary())
}

async fn check_step(objects: &[ObjectParts], job: &Job) -> Result<(), Failure> {
    let failure = std::sync::Mutex::new(None);
    let report = |_: PartKey, outcome: PartOutcome| {
        if let PartOutcome::Failed(found) = outcome {
            failure.lock().unwrap_or_else(|p| p.into_inner()).get_or_insert(found);
        }
    };
    let wanted = check_plan(objects, job.remote.url(), &report);
    if let Some(failure) = failure.into_inner().unwrap_or_else(|p| p.into_inner()) {
        return Err(failure);
    }
    let Some(Wanted { object, .. }) = wanted.first().cloned() else { return Ok(()) };
    let deadline = Deadline::after(job.time);
    let pieces = wanted.into_iter().map(|wanted| (wanted.key, wanted.range)).collect();
    let runs = merge(pieces, job.gap).into_iter().map(|run: Merged<PartKey>| {
        let object = &object;
        async move {
            let bytes = read(object, run.range.clone(), job, deadline).await?;
            for (key, piece) in run.pieces {
                let start = (piece.start - run.range.start) as usize;
                let part = bytes.slice(start..start + (piece.end - piece.start) as usize);
                verified(object, key, part, piece, job, deadline).await?;
            }
            Ok(())
        }
    });
    try_join_all(runs).await.map(|_: Vec<()>| ())
}
