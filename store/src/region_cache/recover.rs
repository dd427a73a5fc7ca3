//! Taking over the cache of an earlier process, making a new one, and growing.

use std::path::Path;

use polign_engine::cache::{
    Counter, Counters, DirectoryWriter, Geometry, OpenError, RegionClass, RegionState,
};

use super::{
    disk::Disk,
    writer::{Active, FEWEST_REGIONS, Region},
};

/// Opens the cache in a directory: with what an earlier process left there if that can be used, empty
/// otherwise.
pub(super) fn open(cache: &Path, limit: u32, disk: Box<dyn Disk>) -> Result<Active, OpenError> {
    match DirectoryWriter::reopen(cache) {
        Ok(directory) => {
            let mut active = take_over(directory, disk, limit);
            resize(&mut active, cache, limit)?;
            Ok(active)
        }
        Err(_) => create(cache, limit, disk),
    }
}

/// Makes an empty cache in the place of whatever is there.
pub(super) fn create(
    cache: &Path,
    limit: u32,
    mut disk: Box<dyn Disk>,
) -> Result<Active, OpenError> {
    if let Ok(old) = DirectoryWriter::reopen(cache) {
        old.retire();
    }
    disk.remove_all()?;
    let geometry = Geometry::for_regions(limit.max(FEWEST_REGIONS));
    let active = Active::new(DirectoryWriter::create(cache, geometry)?, disk, limit);
    active.publish_sizes();
    Ok(active)
}

fn take_over(directory: DirectoryWriter, disk: Box<dyn Disk>, limit: u32) -> Active {
    let mut active = Active::new(directory, disk, limit);
    let mut queued = Vec::new();
    for number in 0..active.regions.len() as u32 {
        let RegionState { class, used, order } = active.directory.region_state(number);
        if class == RegionClass::Free || used == 0 {
            continue;
        }
        if !active.disk.has(number) {
            let state = RegionState { class: RegionClass::Free, used: 0, order };
            active.directory.evict_region(number);
            active.directory.set_region_state(number, state);
            continue;
        }
        active.regions[number as usize] =
            Region { class, used, order, backed: true, keys: Vec::new() };
        active.in_use += 1;
        active.next_order = active.next_order.max(order.saturating_add(1));
        queued.push((order, number, class));
    }
    queued.sort_unstable_by_key(|(order, ..)| *order);
    for (_, number, class) in queued {
        active.policy.opened(number, class);
    }
    let entries: Vec<_> = active.directory.entries().collect();
    for (slot, entry) in entries {
        let region = &mut active.regions[entry.region as usize];
        let (object, index) = (entry.object, entry.index);
        if region.class == RegionClass::Free {
            active.directory.remove(slot);
        } else {
            region.keys.push(polign_engine::segment::PartKey { object, index });
            active.parts += 1;
        }
    }
    active
}

/// Sets the most regions in use. Parts go at once if there are too many; the directory file is made
/// anew if it is too small.
pub(super) fn resize(active: &mut Active, cache: &Path, limit: u32) -> Result<(), OpenError> {
    let limit = limit.max(FEWEST_REGIONS);
    active.limit = limit;
    while active.in_use > limit && active.give_back_one() {}
    if limit < active.in_use + free_but_backed(active) {
        while limit < active.in_use + free_but_backed(active) && active.give_back_one() {}
    }
    if limit > active.directory.map().geometry().regions() {
        grow(active, cache, limit)?;
    }
    active.publish_sizes();
    Ok(())
}

fn free_but_backed(active: &Active) -> u32 {
    let idle = |region: &&Region| region.class == RegionClass::Free && region.backed;
    active.regions.iter().filter(idle).count() as u32
}

/// Copies everything into a larger directory file. The slabs stay as they are.
fn grow(active: &mut Active, cache: &Path, limit: u32) -> Result<(), OpenError> {
    let old = &active.directory;
    let new = DirectoryWriter::create(cache, Geometry::for_regions(limit))?;
    for number in 0..active.regions.len() as u32 {
        new.carry_generation(number, old.map().generation(number));
        new.set_region_state(number, old.region_state(number));
    }
    let mut lost = 0;
    for (_, entry) in old.entries() {
        let shown = old.is_shown(&entry);
        lost += usize::from(new.publish_as(entry, shown).is_some());
    }
    carry_counters(&old.map().counters(), &new);
    old.retire();
    active.directory = new;
    active.parts = active.parts.saturating_sub(lost);
    active.regions.resize(limit as usize, Region::FREE);
    Ok(())
}

/// Totals go on when a directory file is replaced.
pub(super) fn carry_counters(old: &Counters, new: &DirectoryWriter) {
    for counter in Counter::ALL {
        new.map().set(counter, old.get(counter));
    }
}
