//! When to send a second request for the same bytes: the slowest few of many requests to an object
//! store take many times as long as the others, and a query waits for the slowest.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

const WINDOW: usize = 128;
const FEWEST_SAMPLES: usize = 20;
/// No second request earlier than this: a busy machine is no slow store.
const SHORTEST_WAIT: Duration = Duration::from_millis(250);
/// At most one second request in so many.
const SHARE: u64 = 20;

/// The latencies of late requests to one store.
#[derive(Debug, Default)]
pub struct Hedge {
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    micros: Vec<u32>,
    next: usize,
    requests: u64,
    hedged: u64,
}

impl Hedge {
    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn record(&self, took: Duration) {
        let mut window = self.window();
        let micros = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
        let next = window.next;
        match window.micros.get_mut(next) {
            Some(oldest) => *oldest = micros,
            None => window.micros.push(micros),
        }
        window.next = (next + 1) % WINDOW;
        window.requests += 1;
    }

    /// How long to wait for a request before a second one: the 95th percentile. `None` while too
    /// little is known.
    pub fn wait(&self) -> Option<Duration> {
        let mut micros = {
            let window = self.window();
            if window.micros.len() < FEWEST_SAMPLES {
                return None;
            }
            window.micros.clone()
        };
        let at = micros.len() * 95 / 100;
        let (_, percentile, _) = micros.select_nth_unstable(at);
        Some(Duration::from_micros(u64::from(*percentile)).max(SHORTEST_WAIT))
    }

    /// Whether a second request is within the budget; counts it if so.
    pub fn allow(&self) -> bool {
        let mut window = self.window();
        let allowed = (window.hedged + 1) * SHARE <= window.requests;
        window.hedged += u64::from(allowed);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_the_95th_percentile_of_late_requests() {
        let hedge = Hedge::default();
        for _ in 0..FEWEST_SAMPLES - 1 {
            hedge.record(Duration::from_millis(1));
        }
        assert_eq!(hedge.wait(), None);
        hedge.record(Duration::from_millis(1));
        assert_eq!(hedge.wait(), Some(SHORTEST_WAIT));
        for number in 0..WINDOW as u64 {
            hedge.record(Duration::from_millis(1000 + number));
        }
        let wait = hedge.wait().unwrap();
        assert!((1120..=1124).contains(&wait.as_millis()), "{wait:?}");
    }

    #[test]
    fn second_requests_stay_within_their_budget() {
        let hedge = Hedge::default();
        assert!(!hedge.allow());
        for _ in 0..100 {
            hedge.record(Duration::from_millis(1));
        }
        let allowed = (0..100).filter(|_| hedge.allow()).count();
        assert_eq!(allowed as u64, 100 / SHARE);
    }
}
