//! Bringing parts: from the cache, from a flight under way, or from the store.

mod check;
pub mod single_flight;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use polign_engine::{
    gets::{MERGED_BYTES, Merged, merge},
    protocol::{
        Failure, FailureKind, FetchPlan, FetchSummary, ObjectParts, PartOutcome, PartRange,
        Priority,
    },
    segment::{PartKey, part},
};

pub use self::check::check;
use self::single_flight::{Flights, Landed, Lead, Outcome, Passenger};
use crate::{
    limiter::SharedPriority,
    region_cache::{Era, RegionCache},
    remote::Remote,
    retry::Deadline,
};

/// A part whose flight failed under another request is tried again this often by those that have time.
const MOST_HANDOVERS: u32 = 3;
/// Bytes of a prewarm that are asked for at a time: two GETs as long as they become.
const PREWARM_STEP: u64 = 2 * MERGED_BYTES;
/// No object is longer.
const MOST_OBJECT_BYTES: u64 = 1 << 40;

/// Fetches parts for all requests.
pub struct Fetcher {
    cache: Arc<RegionCache>,
    flights: Arc<Flights>,
}

/// What one request asks for, as all its steps need it.
#[derive(Clone)]
pub struct Job {
    pub remote: Arc<Remote>,
    pub priority: Arc<SharedPriority>,
    pub urgency: Priority,
    pub time: Duration,
    pub want_bytes: bool,
    /// Ranges at most so many bytes apart are read by one GET.
    pub gap: u32,
    /// When the request came.
    pub era: Era,
    tally: Arc<Tally>,
}

/// The requests to the store that a job caused.
#[derive(Debug, Default)]
struct Tally {
    gets: AtomicU32,
    bytes: AtomicU64,
}

impl Job {
    pub fn new(
        plan: &FetchPlan,
        remote: Arc<Remote>,
        priority: Arc<SharedPriority>,
        time: Duration,
        era: Era,
    ) -> Self {
        let FetchPlan { priority: urgency, want_bytes, gap, .. } = *plan;
        Self { remote, priority, urgency, time, want_bytes, gap, era, tally: Arc::default() }
    }

    /// What was done so far, without the time.
    fn summary(&self) -> FetchSummary {
        FetchSummary {
            gets: self.tally.gets.load(Ordering::Relaxed),
            bytes: self.tally.bytes.load(Ordering::Relaxed),
            micros: 0,
        }
    }

    /// Whether what is fetched is to be kept: not for maintenance, which reads much and each part once.
    fn fills_cache(&self) -> bool {
        self.urgency == Priority::Query || !self.want_bytes
    }
}

/// One part and where it lies.
#[derive(Debug, Clone)]
struct Wanted {
    key: PartKey,
    object: Arc<str>,
    range: Range<u64>,
}

impl Fetcher {
    pub fn new(cache: Arc<RegionCache>) -> Self {
        Self { cache, flights: Arc::default() }
    }

    pub fn cache(&self) -> &Arc<RegionCache> {
        &self.cache
    }

    /// Brings the parts of a plan; `report` is called for each as it arrives.
    pub async fn fetch(
        &self,
        plan: &FetchPlan,
        job: &Job,
        report: &(dyn Fn(PartKey, PartOutcome) + Sync),
    ) -> FetchSummary {
        let started = Instant::now();
        let wanted = check_plan(&plan.objects, job.remote.url(), report);
        if plan.fresh {
            let keys: Vec<PartKey> = wanted.iter().map(|wanted| wanted.key).collect();
            self.with_cache(move |cache| {
                cache.look_after();
                cache.drop_parts(&keys);
            })
            .await;
        }
        self.bring(wanted, job, report).await;
        FetchSummary { micros: started.elapsed().as_micros() as u64, ..job.summary() }
    }

    /// Brings the parts of a plan into the cache, a step at a time. Ends at the first failure, when the
    /// cache takes no more, and when it was cleared.
    pub async fn prewarm(&self, plan: &FetchPlan, job: &Job) -> Result<FetchSummary, Failure> {
        let first_failure = std::sync::Mutex::new(None);
        let report = |_: PartKey, outcome: PartOutcome| {
            let failure = match outcome {
                PartOutcome::Published => return,
                PartOutcome::Bytes(_) => self.not_kept(job),
                PartOutcome::Failed(failure) => failure,
            };
            first_failure.lock().unwrap_or_else(|p| p.into_inner()).get_or_insert(failure);
        };
        let mut summary = FetchSummary::default();
        for object in &plan.objects {
            for parts in steps(&object.parts) {
                let (key, object) = (object.key.clone(), object.object);
                let objects = vec![ObjectParts { key, object, parts: parts.to_vec() }];
                let step = FetchPlan { objects, ..plan.clone() };
                summary = self.fetch(&step, job, &report).await;
                let failure = first_failure.lock().unwrap_or_else(|p| p.into_inner()).take();
                if let Some(failure) = failure {
                    return Err(failure);
                }
            }
        }
        Ok(summary)
    }

    fn not_kept(&self, job: &Job) -> Failure {
        let message = match self.cache.era() == job.era {
            true => "the cache takes no more parts",
            false => "the cache was cleared in the meantime",
        };
        Failure {
            kind: FailureKind::Local,
            code: String::new(),
            message: message.into(),
            detail: String::new(),
            object: String::new(),
            url: job.remote.url().into(),
        }
    }

    /// Cache calls may touch the disk.
    async fn with_cache<T: Send + 'static>(
        &self,
        call: impl FnOnce(&RegionCache) -> T + Send + 'static,
    ) -> T {
        let cache = Arc::clone(&self.cache);
        match tokio::task::spawn_blocking(move || call(&cache)).await {
            Ok(value) => value,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// The parts that are in the cache are reported; the others are returned.
    async fn look_in_cache(
        &self,
        wanted: Vec<Wanted>,
        want_bytes: bool,
        report: &(dyn Fn(PartKey, PartOutcome) + Sync),
    ) -> Vec<Wanted> {
        let keys: Vec<PartKey> = wanted.iter().map(|wanted| wanted.key).collect();
        let found: Vec<Option<PartOutcome>> = self
            .with_cache(move |cache| {
                if want_bytes {
                    let bytes = |key| Some(PartOutcome::Bytes(cache.read(key)?.to_vec()));
                    return keys.iter().map(bytes).collect();
                }
                let published = |there: bool| there.then_some(PartOutcome::Published);
                cache.present(&keys).into_iter().map(published).collect()
            })
            .await;
        let mut missing = Vec::new();
        for (wanted, found) in wanted.into_iter().zip(found) {
            match found {
                Some(outcome) => report(wanted.key, outcome),
                None => missing.push(wanted),
            }
        }
        missing
    }

    async fn bring(
        &self,
        wanted: Vec<Wanted>,
        job: &Job,
        report: &(dyn Fn(PartKey, PartOutcome) + Sync),
    ) {
        let deadline = Deadline::after(job.time);
        let mut missing = self.look_in_cache(wanted, job.want_bytes, report).await;
        let mut handovers = 0;
        while !missing.is_empty() {
            let waiting = self.take_off(missing, job, deadline).await;
            let mut arrivals: FuturesUnordered<_> =
                waiting
                    .into_iter()
                    .map(|(wanted, ours, passenger)| async move {
                        (wanted, ours, passenger.landed().await)
                    })
                    .collect();
            missing = Vec::new();
            while let Some((wanted, ours, outcome)) = arrivals.next().await {
                let last = handovers == MOST_HANDOVERS || deadline.has_passed();
                match settle(&wanted, ours, outcome, job, last) {
                    Some(outcome) => report(wanted.key, outcome),
                    None => missing.push(wanted),
                }
            }
            handovers += 1;
            if !missing.is_empty() {
                missing = self.look_in_cache(missing, job.want_bytes, report).await;
            }
        }
    }

    /// Joins or begins the flight of each part, and sends off what is to be fetched.
    async fn take_off(
        &self,
        missing: Vec<Wanted>,
        job: &Job,
        deadline: Deadline,
    ) -> Vec<(Wanted, bool, Passenger)> {
        let mut waiting = Vec::with_capacity(missing.len());
        let mut leads = Vec::new();
        for wanted in missing {
            let (passenger, lead) =
                self.flights.join(wanted.key, job.era, &job.priority, job.urgency);
            let ours = lead.is_some();
            if let Some(lead) = lead {
                leads.push((wanted.clone(), lead));
            }
            waiting.push((wanted, ours, passenger));
        }
        // An earlier flight may have landed since the cache was looked at.
        let keys: Vec<PartKey> = leads.iter().map(|(wanted, _)| wanted.key).collect();
        let present = match keys.is_empty() {
            true => Vec::new(),
            false => self.with_cache(move |cache| cache.present(&keys)).await,
        };
        let mut objects: HashMap<Arc<str>, Vec<(Lead, Range<u64>)>> = HashMap::new();
        let mut order = Vec::new();
        for ((wanted, lead), present) in leads.into_iter().zip(present) {
            if present {
                lead.land(Ok(Landed { published: true, bytes: None }));
                continue;
            }
            let pieces = objects.entry(Arc::clone(&wanted.object)).or_default();
            if pieces.is_empty() {
                order.push(Arc::clone(&wanted.object));
            }
            pieces.push((lead, wanted.range));
        }
        for object in order {
            for merged in merge(objects.remove(&object).unwrap_or_default(), job.gap) {
                let (job, cache) = (job.clone(), Arc::clone(&self.cache));
                tokio::spawn(fly(Arc::clone(&object), merged, job, deadline, cache));
            }
        }
        waiting
    }

    #[cfg(test)]
    fn flights(&self) -> usize {
        self.flights.count()
    }
}

/// Cuts the parts of a prewarm into runs of [`PREWARM_STEP`] bytes.
fn steps(parts: &[PartRange]) -> impl Iterator<Item = &[PartRange]> {
    let mut bytes = 0;
    parts.chunk_by(move |part, _| {
        bytes += u64::from(part.len);
        let goes_on = bytes < PREWARM_STEP;
        bytes *= u64::from(goes_on);
        goes_on
    })
}

/// What a landing means for one who waited; `None`: try again.
fn settle(
    wanted: &Wanted,
    ours: bool,
    outcome: Option<Outcome>,
    job: &Job,
    last: bool,
) -> Option<PartOutcome> {
    match outcome {
        Some(Ok(Landed { published: true, .. })) if !job.want_bytes => Some(PartOutcome::Published),
        Some(Ok(Landed { bytes: Some(bytes), .. })) => Some(PartOutcome::Bytes(bytes.to_vec())),
        // It was in the cache, and is to be read from there.
        Some(Ok(Landed { bytes: None, .. })) if !last => None,
        // Another request's time was up, or what it read was damaged: ours tries for itself.
        Some(Err(failure))
            if !ours
                && !last
                && matches!(failure.kind, FailureKind::Unreachable | FailureKind::Damaged) =>
        {
            None
        }
        Some(Err(failure)) => Some(PartOutcome::Failed((*failure).clone())),
        None if !last => None,
        _ => Some(PartOutcome::Failed(Failure {
            kind: FailureKind::Internal,
            code: String::new(),
            message: "the part was fetched and lost again".into(),
            detail: String::new(),
            object: wanted.object.to_string(),
            url: job.remote.url().into(),
        })),
    }
}

/// Reads one merged range and lands its parts, unless nobody waits for any of them any more.
async fn fly(
    object: Arc<str>,
    merged: Merged<Lead>,
    job: Job,
    deadline: Deadline,
    cache: Arc<RegionCache>,
) {
    let Merged { range, pieces } = merged;
    let bytes = {
        let leads: Vec<&Lead> = pieces.iter().map(|(lead, _)| lead).collect();
        tokio::select! {
            bytes = read(&object, range.clone(), &job, deadline) => bytes,
            () = all_abandoned(&leads) => return,
        }
    };
    let bytes = match bytes {
        Ok(bytes) => bytes,
        Err(failure) => {
            let failure = Arc::new(failure);
            pieces.into_iter().for_each(|(lead, _)| lead.land(Err(Arc::clone(&failure))));
            return;
        }
    };
    let mut sound = Vec::with_capacity(pieces.len());
    for (lead, piece) in pieces {
        let start = (piece.start - range.start) as usize;
        let slice = bytes.slice(start..start + (piece.end - piece.start) as usize);
        match verified(&object, lead.key(), slice, piece, &job, deadline).await {
            Ok(bytes) => sound.push((lead, bytes)),
            Err(failure) => lead.land(Err(Arc::new(failure))),
        }
    }
    let parts: Vec<(PartKey, Bytes)> =
        sound.iter().map(|(lead, bytes)| (lead.key(), bytes.clone())).collect();
    let published = match job.fills_cache() {
        true => tokio::task::spawn_blocking(move || cache.insert(&parts, job.era)).await.ok(),
        false => None,
    };
    // Should the insertion panic, the bytes are still good.
    let published = published.unwrap_or_else(|| vec![false; sound.len()]);
    for ((lead, bytes), published) in sound.into_iter().zip(published) {
        lead.land(Ok(Landed { published, bytes: Some(bytes) }));
    }
}

async fn read(
    object: &str,
    range: Range<u64>,
    job: &Job,
    deadline: Deadline,
) -> Result<Bytes, Failure> {
    let len = range.end - range.start;
    let sent = || {
        job.tally.gets.fetch_add(1, Ordering::Relaxed);
    };
    let bytes =
        job.remote.get_range(object, (range.start, len), &job.priority, deadline, &sent).await?;
    job.tally.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(bytes)
}

/// The part's bytes if they are sound; damaged ones are read once more.
async fn verified(
    object: &str,
    key: PartKey,
    bytes: Bytes,
    range: Range<u64>,
    job: &Job,
    deadline: Deadline,
) -> Result<Bytes, Failure> {
    if part::verify(key, &bytes).is_ok() {
        return Ok(bytes);
    }
    let bytes = read(object, range, job, deadline).await?;
    match part::verify(key, &bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(Failure {
            kind: FailureKind::Damaged,
            code: String::new(),
            message: error.to_string(),
            detail: format!("{key} was read twice"),
            object: object.into(),
            url: job.remote.url().into(),
        }),
    }
}

async fn all_abandoned(leads: &[&Lead]) {
    loop {
        join_all(leads.iter().map(|lead| lead.abandoned())).await;
        // Somebody may have joined one in the meantime; the others are not joined again here.
        if leads.iter().all(|lead| lead.give_up_if_abandoned()) {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// The parts of a plan; those that cannot be parts are reported as failures.
fn check_plan(
    objects: &[ObjectParts],
    url: &str,
    report: &(dyn Fn(PartKey, PartOutcome) + Sync),
) -> Vec<Wanted> {
    let mut wanted = Vec::new();
    for ObjectParts { key: name, object, parts } in objects {
        let name: Arc<str> = name.as_str().into();
        for place in parts {
            let key = PartKey { object: *object, index: place.index };
            let len = place.len as usize;
            let fits = (part::HEADER_LEN..=part::MAX_PART_LEN).contains(&len)
                && place.offset <= MOST_OBJECT_BYTES;
            if fits {
                let range = place.offset..place.offset + u64::from(place.len);
                wanted.push(Wanted { key, object: Arc::clone(&name), range });
            } else {
                report(
                    key,
                    PartOutcome::Failed(Failure {
                        kind: FailureKind::Invalid,
                        code: String::new(),
                        message: format!("no part has {len} bytes at offset {}", place.offset),
                        detail: String::new(),
                        object: name.to_string(),
                        url: url.into(),
                    }),
                );
            }
        }
    }
    wanted
}
