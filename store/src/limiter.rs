//! How many requests a store gets at a time: additive increase, multiplicative decrease, and the most
//! urgent request first.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicU8, Ordering},
};

use polign_engine::protocol::Priority;
use tokio::{
    sync::oneshot,
    time::{Duration, Instant},
};

/// A priority that may be raised while a request waits.
#[derive(Debug)]
pub struct SharedPriority(AtomicU8);

impl SharedPriority {
    pub fn new(priority: Priority) -> Self {
        Self(AtomicU8::new(priority as u8))
    }

    pub fn raise(&self, to: Priority) {
        self.0.fetch_max(to as u8, Ordering::Relaxed);
    }

    fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Throttled answers that come within this time of the last halving were to requests sent before it.
const HALVE_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 250 });

#[derive(Debug)]
pub struct Limiter {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// At most this many at once, a fraction while it grows.
    limit: f64,
    most: u32,
    running: u32,
    waiting: Vec<Waiting>,
    arrivals: u64,
    halved: Option<Instant>,
}

#[derive(Debug)]
struct Waiting {
    priority: Arc<SharedPriority>,
    arrival: u64,
    wake: oneshot::Sender<()>,
}

impl Limiter {
    /// Starts at `most`, which is at least 1.
    pub fn new(most: u32) -> Arc<Self> {
        let most = most.max(1);
        let (limit, waiting) = (f64::from(most), Vec::new());
        let state = State { limit, most, running: 0, waiting, arrivals: 0, halved: None };
        Arc::new(Self { state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn set_most(&self, most: u32) {
        let mut state = self.state();
        let most = most.max(1);
        if most != state.most {
            (state.most, state.limit) = (most, f64::from(most));
        }
        self.wake(state);
    }

    /// Waits for a turn.
    pub async fn acquire(self: &Arc<Self>, priority: &Arc<SharedPriority>) -> Permit {
        let mut turn = {
            let mut state = self.state();
            let (wake, called) = oneshot::channel();
            state.arrivals += 1;
            let (priority, arrival) = (Arc::clone(priority), state.arrivals);
            state.waiting.push(Waiting { priority, arrival, wake });
            self.wake(state);
            Turn { limiter: Arc::clone(self), called, taken: false }
        };
        // The sender is dropped unused only together with the limiter, which `turn` holds.
        let _ = (&mut turn.called).await;
        turn.taken = true;
        Permit { limiter: Arc::clone(self) }
    }

    /// A turn without waiting, if nobody else waits and there is room.
    pub fn try_acquire(self: &Arc<Self>) -> Option<Permit> {
        let mut state = self.state();
        let room = f64::from(state.running) + 1.0 <= state.limit.max(1.0);
        if !room || !state.waiting.is_empty() {
            return None;
        }
        state.running += 1;
        Some(Permit { limiter: Arc::clone(self) })
    }

    fn release(&self) {
        let mut state = self.state();
        state.running -= 1;
        self.wake(state);
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        while f64::from(state.running) + 1.0 <= state.limit.max(1.0) {
            let urgency = |w: &Waiting| (w.priority.get(), u64::MAX - w.arrival);
            let next = (0..state.waiting.len()).max_by_key(|&at| urgency(&state.waiting[at]));
            let Some(next) = next else { break };
            let waiting = state.waiting.swap_remove(next);
            // Fails if the request was given up meanwhile.
            if waiting.wake.send(()).is_ok() {
                state.running += 1;
            }
        }
    }

    /// A request went well.
    pub fn succeeded(&self) {
        let mut state = self.state();
        state.limit = (state.limit + 1.0 / state.limit.max(1.0)).min(f64::from(state.most));
        self.wake(state);
    }

    /// The store asked for fewer requests.
    pub fn throttled(&self) {
        let mut state = self.state();
        if state.halved.is_none_or(|halved| halved.elapsed() >= HALVE_PAUSE) {
            state.limit = (state.limit / 2.0).max(1.0);
            state.halved = Some(Instant::now());
        }
    }

    #[cfg(test)]
    fn limit(&self) -> f64 {
        self.state().limit
    }
}

/// The right to have one request under way.
#[derive(Debug)]
pub struct Permit {
    limiter: Arc<Limiter>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limiter.release();
    }
}

/// A place in the queue. If it is given up just when its turn came, the turn goes to the next.
struct Turn {
    limiter: Arc<Limiter>,
    called: oneshot::Receiver<()>,
    taken: bool,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.called.close();
        if !self.taken && self.called.try_recv().is_ok() {
            self.limiter.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(priority: Priority) -> Arc<SharedPriority> {
        Arc::new(SharedPriority::new(priority))
    }

    #[tokio::test]
    async fn the_most_urgent_request_goes_first_and_may_be_raised() {
        let limiter = Limiter::new(1);
        let held = limiter.acquire(&at(Priority::Query)).await;
        let (order, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let raised = at(Priority::Gc);
        let queue = [
            ("build", at(Priority::Build)),
            ("query 1", at(Priority::Query)),
            ("raised", Arc::clone(&raised)),
            ("query 2", at(Priority::Query)),
        ];
        for (name, priority) in queue {
            let (limiter, order) = (Arc::clone(&limiter), order.clone());
            tokio::spawn(async move {
                let _permit = limiter.acquire(&priority).await;
                order.send(name).unwrap();
            });
            tokio::task::yield_now().await;
        }
        raised.raise(Priority::Query);
        drop((held, order));
        let mut names = Vec::new();
        while let Some(name) = seen.recv().await {
            names.push(name);
        }
        assert_eq!(names, ["query 1", "raised", "query 2", "build"]);
    }

    #[tokio::test]
    async fn throttling_halves_once_a_while_and_success_grows() {
        let limiter = Limiter::new(16);
        limiter.throttled();
        limiter.throttled();
        assert_eq!(limiter.limit(), 8.0);
        tokio::time::sleep(HALVE_PAUSE).await;
        limiter.throttled();
        assert_eq!(limiter.limit(), 4.0);
        for _ in 0..4 {
            limiter.succeeded();
        }
        assert!((4.5..=5.1).contains(&limiter.limit()), "{}", limiter.limit());
        for _ in 0..1000 {
            limiter.succeeded();
        }
        assert_eq!(limiter.limit(), 16.0);
        for _ in 0..20 {
            tokio::time::sleep(HALVE_PAUSE).await;
            limiter.throttled();
        }
        assert_eq!(limiter.limit(), 1.0);
    }

    #[tokio::test]
    async fn requests_given_up_leak_no_permit() {
        let limiter = Limiter::new(2);
        let query = at(Priority::Query);
        let held = [limiter.acquire(&query).await, limiter.acquire(&query).await];
        for _ in 0..10 {
            let waiting = limiter.acquire(&query);
            assert!(tokio::time::timeout(Duration::from_millis(1), waiting).await.is_err());
        }
        // One that is given up after its turn came.
        let waiting = tokio::spawn({
            let (limiter, query) = (Arc::clone(&limiter), Arc::clone(&query));
            async move { limiter.acquire(&query).await }
        });
        tokio::task::yield_now().await;
        drop(held);
        waiting.abort();
        let _ = waiting.await;
        let _both = [limiter.acquire(&query).await, limiter.acquire(&query).await];
    }
}
