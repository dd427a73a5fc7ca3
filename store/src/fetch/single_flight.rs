//! Each part is fetched once at a time, however many ask for it. Those who ask after the cache was
//! cleared do not wait for a flight from before that: its part will not be kept.

use std::{
    collections::{HashMap, hash_map},
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use polign_engine::{
    protocol::{Failure, Priority},
    segment::PartKey,
};
use tokio::sync::watch;

use crate::{limiter::SharedPriority, region_cache::Era};

/// How a flight ended. An error goes to those who wait at that moment and is not kept.
pub type Outcome = Result<Landed, Arc<Failure>>;

#[derive(Debug, Clone)]
pub struct Landed {
    /// Whether the part is in the cache.
    pub published: bool,
    /// The part's bytes, unless it turned out to be in the cache already.
    pub bytes: Option<Bytes>,
}

type Sender = watch::Sender<Option<Outcome>>;

/// Parts that are being fetched.
#[derive(Debug, Default)]
pub struct Flights {
    flying: Mutex<HashMap<(PartKey, Era), Flight>>,
}

#[derive(Debug)]
struct Flight {
    sender: Arc<Sender>,
    priority: Arc<SharedPriority>,
}

/// A place among those who wait for a part.
#[derive(Debug)]
pub struct Passenger(watch::Receiver<Option<Outcome>>);

impl Passenger {
    /// Waits for the part. `None`: whoever fetched it went away without an outcome.
    pub async fn landed(mut self) -> Option<Outcome> {
        self.0.wait_for(Option::is_some).await.ok()?.clone()
    }
}

/// The duty to fetch a part. Dropped without an outcome, it passes to whoever waits.
#[derive(Debug)]
pub struct Lead {
    flights: Arc<Flights>,
    key: PartKey,
    era: Era,
    sender: Arc<Sender>,
}

impl Flights {
    fn flying(&self) -> MutexGuard<'_, HashMap<(PartKey, Era), Flight>> {
        self.flying.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Joins the flight of a part, or begins it. `priority` becomes that of a new flight; one under way
    /// is raised to `at_least`.
    pub fn join(
        self: &Arc<Self>,
        key: PartKey,
        era: Era,
        priority: &Arc<SharedPriority>,
        at_least: Priority,
    ) -> (Passenger, Option<Lead>) {
        match self.flying().entry((key, era)) {
            hash_map::Entry::Occupied(flight) => {
                let flight = flight.get();
                flight.priority.raise(at_least);
                (Passenger(flight.sender.subscribe()), None)
            }
            hash_map::Entry::Vacant(place) => {
                let (sender, receiver) = watch::channel(None);
                let sender = Arc::new(sender);
                let priority = Arc::clone(priority);
                place.insert(Flight { sender: Arc::clone(&sender), priority });
                (Passenger(receiver), Some(Lead { flights: Arc::clone(self), key, era, sender }))
            }
        }
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.flying().len()
    }

    #[cfg(test)]
    pub fn passengers(&self) -> usize {
        self.flying().values().map(|flight| flight.sender.receiver_count()).sum()
    }
}

impl Lead {
    pub fn key(&self) -> PartKey {
        self.key
    }

    pub fn land(self, outcome: Outcome) {
        self.leave();
        self.sender.send_replace(Some(outcome));
    }

    /// Ends when nobody waits for the part any more.
    pub async fn abandoned(&self) {
        self.sender.closed().await;
    }

    /// Takes the part off the table if nobody waits for it. After that nobody can join.
    pub fn give_up_if_abandoned(&self) -> bool {
        let mut flying = self.flights.flying();
        let abandoned = self.sender.receiver_count() == 0;
        if abandoned {
            self.remove(&mut flying);
        }
        abandoned
    }

    fn leave(&self) {
        self.remove(&mut self.flights.flying());
    }

    fn remove(&self, flying: &mut HashMap<(PartKey, Era), Flight>) {
        let ours = |flight: &Flight| Arc::ptr_eq(&flight.sender, &self.sender);
        let name = (self.key, self.era);
        if flying.get(&name).is_some_and(ours) {
            flying.remove(&name);
        }
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use polign_engine::ObjectId;

    use super::*;

    fn key() -> PartKey {
        PartKey { object: ObjectId([1; 16]), index: 7 }
    }

    fn priority() -> Arc<SharedPriority> {
        Arc::new(SharedPriority::new(Priority::Query))
    }

    fn landed() -> Outcome {
        Ok(Landed { published: true, bytes: None })
    }

    #[tokio::test]
    async fn one_leads_and_all_arrive() {
        let flights = Arc::new(Flights::default());
        let (first, lead) = flights.join(key(), Era::default(), &priority(), Priority::Query);
        let (second, none) = flights.join(key(), Era::default(), &priority(), Priority::Query);
        assert!(none.is_none());
        lead.unwrap().land(landed());
        assert!(first.landed().await.unwrap().unwrap().published);
        assert!(second.landed().await.unwrap().unwrap().published);
        assert_eq!(flights.count(), 0);
    }

    #[tokio::test]
    async fn a_lead_that_dies_hands_over() {
        let flights = Arc::new(Flights::default());
        let (first, lead) = flights.join(key(), Era::default(), &priority(), Priority::Query);
        drop(lead);
        assert!(first.landed().await.is_none());
        let (_, lead) = flights.join(key(), Era::default(), &priority(), Priority::Query);
        assert!(lead.is_some());
    }

    #[tokio::test]
    async fn a_flight_is_given_up_only_when_nobody_waits() {
        let flights = Arc::new(Flights::default());
        let (first, lead) = flights.join(key(), Era::default(), &priority(), Priority::Query);
        let lead = lead.unwrap();
        assert!(!lead.give_up_if_abandoned());
        drop(first);
        lead.abandoned().await;
        let (second, none) = flights.join(key(), Era::default(), &priority(), Priority::Query);
        assert!(none.is_none());
        assert!(!lead.give_up_if_abandoned(), "somebody joined in between");
        drop(second);
        assert!(lead.give_up_if_abandoned());
        let (_third, new) = flights.join(key(), Era::default(), &priority(), Priority::Query);
        assert!(new.is_some());
        drop(lead);
        assert_eq!(flights.count(), 1, "the old lead does not remove the new flight");
    }
}
