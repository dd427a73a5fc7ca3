//! An even sample of a stream whose length is not known (Vitter's algorithm R).

use crate::cluster::rng::Rng;

/// The sample, the same one each time for the same stream.
pub struct Reservoir<T> {
    limit: usize,
    kept: Vec<T>,
    seen: u64,
    rng: Rng,
}

impl<T> Reservoir<T> {
    /// An empty one of at most `limit` items.
    pub fn new(limit: usize) -> Self {
        Self { limit, kept: Vec::new(), seen: 0, rng: Rng::new(limit as u64) }
    }

    /// Takes the next item of the stream into account; it is made only if it is kept.
    pub fn offer<E>(&mut self, item: impl FnOnce() -> Result<T, E>) -> Result<(), E> {
        self.seen += 1;
        if self.kept.len() < self.limit {
            self.kept.push(item()?);
        } else if let Ok(seen) = usize::try_from(self.seen)
            && let Some(place) = self.kept.get_mut(self.rng.below(seen))
        {
            *place = item()?;
        }
        Ok(())
    }

    /// Items of the stream so far.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The sample.
    pub fn into_kept(self) -> Vec<T> {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_even() {
        let mut reservoir = Reservoir::new(1_000);
        for item in 0..50_000 {
            reservoir.offer(|| Ok::<_, ()>(item)).unwrap();
        }
        assert_eq!(reservoir.seen(), 50_000);
        let kept = reservoir.into_kept();
        assert_eq!(kept.len(), 1_000);
        let early = kept.iter().filter(|&&item| item < 25_000).count();
        assert!((430..570).contains(&early), "{early}");
    }

    #[test]
    fn few_items_are_all_kept_in_order() {
        let mut reservoir = Reservoir::new(10);
        (0..7).for_each(|item| reservoir.offer(|| Ok::<_, ()>(item)).unwrap());
        assert_eq!(reservoir.offer(|| Err("no item")), Err("no item"));
        assert_eq!(reservoir.into_kept(), (0..7).collect::<Vec<_>>());
    }
}
