//! Trying again within a deadline.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use crate::object_store::{ErrorClass, ObjectStore, StoreError};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// An attempt that has not ended after this is given up, so that a stalled connection leaves time for
/// another one.
const ATTEMPT_SHARE: u32 = 3;
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(200);
/// How much more time an upload gets for each MiB.
const UPLOAD_SECONDS_PER_MIB: u64 = 4;
/// How many of these seconds one attempt gets: as many as three uploads take that share 1 MiB/s. The rest
/// is for another attempt.
const SLOW_SECONDS_PER_MIB: u64 = 3;

fn per_mib(bytes: u64, seconds: u64) -> Duration {
    Duration::from_secs(bytes.div_ceil(1 << 20).saturating_mul(seconds))
}

/// How long the bytes of an upload may be under way in one attempt.
pub fn slow_upload(bytes: u64) -> Duration {
    per_mib(bytes, SLOW_SECONDS_PER_MIB)
}

/// The pause before attempt `failed + 1`: exponential, and random between half and all of it.
pub fn pause(failed: u32) -> Duration {
    let full = FIRST_PAUSE.saturating_mul(1 << failed.saturating_sub(1).min(10));
    full.min(LONGEST_PAUSE).mul_f64(0.5 + 0.5 * random_fraction())
}

fn random_fraction() -> f64 {
    // Without a random number all clients would retry in step; that is no reason to fail.
    getrandom::u32().map_or(0.5, |random| f64::from(random) / f64::from(u32::MAX))
}

/// The limits of one operation, all of its attempts together.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    started: Instant,
    ends: Instant,
    attempt: Duration,
}

impl Deadline {
    pub fn after(time: Duration) -> Self {
        let started = Instant::now();
        let attempt = (time / ATTEMPT_SHARE).max(SHORTEST_ATTEMPT);
        Self { started, ends: started + time, attempt }
    }

    pub fn left(&self) -> Duration {
        self.ends.saturating_duration_since(Instant::now())
    }

    pub fn has_passed(&self) -> bool {
        self.left().is_zero()
    }

    /// The limits for an upload: the same, and time for its bytes.
    pub fn for_upload(self, bytes: u64) -> Self {
        let ends = self.ends + per_mib(bytes, UPLOAD_SECONDS_PER_MIB);
        Self { ends, attempt: self.attempt + slow_upload(bytes), ..self }
    }

    /// How long one attempt may take.
    pub fn attempt_limit(&self) -> Duration {
        self.attempt.min(self.left())
    }
}

/// The last error of an operation, and how hard it was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GaveUp {
    pub error: StoreError,
    pub attempts: u32,
    pub after: Duration,
}

impl GaveUp {
    /// One line for the DETAIL of an error message.
    pub fn detail(&self) -> String {
        let Self { error, attempts, after } = self;
        let times =
            if *attempts == 1 { "1 attempt".into() } else { format!("{attempts} attempts") };
        format!("{error} ({times} in {:.1} s)", after.as_secs_f64())
    }

    pub fn into_failure(self, url: &str, object: &str) -> polign_engine::protocol::Failure {
        let detail = self.detail();
        self.error.into_failure(url, object, detail)
    }
}

/// What retrying tells the rest of the program.
pub trait Observer: Sync {
    fn attempt_failed(&self, error: &StoreError, will_retry: bool);
}

/// Runs `attempt`, which limits its own time, until it succeeds, fails for good, or the deadline has passed.
pub async fn retry<T, A, F>(
    store: &dyn ObjectStore,
    deadline: Deadline,
    observer: &dyn Observer,
    mut attempt: A,
) -> Result<T, GaveUp>
where
    A: FnMut() -> F,
    F: Future<Output = Result<T, StoreError>>,
{
    let mut attempts = 0;
    let mut refreshed = false;
    let mut earlier: Option<StoreError> = None;
    loop {
        attempts += 1;
        let is_cut_short = deadline.left() < deadline.attempt;
        let outcome = timeout(deadline.left(), attempt()).await;
        let error = match outcome {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error,
            Err(_) => StoreError::timed_out("a request"),
        };
        let mut again = error.is_retryable();
        if error.class == ErrorClass::Credentials && !refreshed {
            refreshed = true;
            again = timeout(deadline.left(), store.refresh_credentials()).await.unwrap_or(false);
        }
        let pause = pause(attempts);
        let will_retry = again && pause < deadline.left();
        observer.attempt_failed(&error, will_retry);
        if !will_retry {
            let after = deadline.started.elapsed();
            // That our own time was up during the last attempt says less than what the store answered before.
            let says_little = is_cut_short && error.is_timeout();
            let error = earlier.filter(|_| says_little).unwrap_or(error);
            return Err(GaveUp { error, attempts, after });
        }
        earlier = Some(error);
        sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object_store::s3::upload_limit;

    #[test]
    fn pauses_grow_to_a_limit_and_vary() {
        for failed in 1..40 {
            let full = FIRST_PAUSE.saturating_mul(1 << (failed - 1).min(10)).min(LONGEST_PAUSE);
            let pause = pause(failed);
            assert!(pause >= full / 2 && pause <= full, "after {failed}: {pause:?}");
        }
        let distinct: std::collections::HashSet<Duration> = (0..20).map(|_| pause(5)).collect();
        assert!(distinct.len() > 10);
    }

    #[test]
    fn a_slow_and_steady_upload_is_not_cut_off() {
        const MIB: u64 = 1 << 20;
        // Bytes of an object, and how long three such uploads take that share 1 MiB/s.
        for (bytes, takes) in [(1, 0), (MIB, 3), (8 * MIB, 24), (32 * MIB, 96), (64 * MIB, 192)] {
            let takes = Duration::from_secs(takes);
            for timeout in [Duration::from_secs(1), Duration::from_secs(30)] {
                let deadline = Deadline::after(timeout).for_upload(bytes);
                assert!(deadline.attempt_limit() >= takes, "{bytes} bytes: {deadline:?}");
                assert!(upload_limit(bytes) >= takes, "{bytes} bytes");
            }
        }
        let deadline = Deadline::after(Duration::from_secs(30)).for_upload(32 * MIB);
        assert!(deadline.left() > Duration::from_secs(30 + 127), "four seconds for each MiB");
        let rest = deadline.left() - deadline.attempt_limit();
        assert!(rest > Duration::from_secs(32), "one upload at 1 MiB/s fits after a stalled one");
    }

    #[tokio::test]
    async fn what_the_store_answered_is_told_when_the_time_is_up_during_another_attempt() {
        struct Nobody;
        impl Observer for Nobody {
            fn attempt_failed(&self, _: &StoreError, _: bool) {}
        }
        let store = crate::object_store::fake::FakeStore::default();
        let answered = || StoreError::new(ErrorClass::Transient, "InternalError", "injected");
        let asked = std::cell::Cell::new(0);
        let attempt = |answers: u32| {
            asked.set(asked.get() + 1);
            let answers = asked.get() <= answers;
            async move {
                if !answers {
                    sleep(Duration::from_secs(60)).await;
                }
                Err::<(), _>(answered())
            }
        };
        let deadline = || Deadline::after(Duration::from_millis(200));
        let gave_up = retry(&store, deadline(), &Nobody, || attempt(1)).await.unwrap_err();
        assert_eq!((gave_up.error, gave_up.attempts), (answered(), 2));
        asked.set(0);
        let gave_up = retry(&store, deadline(), &Nobody, || attempt(0)).await.unwrap_err();
        assert!(gave_up.error.is_timeout());
    }

    #[test]
    fn a_stalled_request_leaves_time_for_another() {
        let deadline = Deadline::after(Duration::from_secs(30));
        assert_eq!(deadline.attempt_limit(), Duration::from_secs(10));
        let short = Deadline::after(Duration::from_millis(300)).attempt_limit();
        assert!(short <= SHORTEST_ATTEMPT && short > SHORTEST_ATTEMPT / 2, "{short:?}");
    }
}
