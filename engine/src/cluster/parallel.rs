use super::{Interrupt, Interrupted};
use rayon::prelude::*;

/// Runs `work(first element, chunk)` over `out` in chunks of `size`, on the pool if there is one.
pub(super) fn chunks<T: Send>(
    pool: Option<&rayon::ThreadPool>,
    interrupted: Interrupt,
    out: &mut [T],
    size: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) -> Result<(), Interrupted> {
    let one = |(i, chunk): (usize, &mut [T])| {
        if interrupted() {
            return Err(Interrupted);
        }
        work(i * size, chunk);
        Ok(())
    };
    match pool {
        Some(pool) => {
            pool.install(|| out.par_chunks_mut(size).enumerate().with_max_len(1).try_for_each(one))
        }
        None => out.chunks_mut(size).enumerate().try_for_each(one),
    }
}

/// `work(0..count)` in order of the parts, on the pool if there is one.
pub(super) fn map<R: Send>(
    pool: Option<&rayon::ThreadPool>,
    interrupted: Interrupt,
    count: usize,
    work: impl Fn(usize) -> Result<R, Interrupted> + Sync,
) -> Result<Vec<R>, Interrupted> {
    let one = |i: usize| if interrupted() { Err(Interrupted) } else { work(i) };
    match pool {
        Some(pool) => {
            pool.install(|| (0..count).into_par_iter().with_max_len(1).map(one).collect())
        }
        None => (0..count).map(one).collect(),
    }
}
