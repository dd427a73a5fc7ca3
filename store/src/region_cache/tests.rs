use std::{
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use polign_engine::{
    cache::{CacheMap, SLAB_BYTES, slab_name},
    segment::{PartKind, part},
};

use super::*;

const MIB: u64 = 1 << 20;

fn key(object: u8, ordinal: u32) -> PartKey {
    PartKey::new(ObjectId([object; 16]), PartKind::Plane2, ordinal)
}

/// A part of about 50 KiB whose bytes name it: some 20 fit in a region.
fn framed(key: PartKey) -> Bytes {
    let seed = u64::from(key.index) << 8 | u64::from(key.object.0[0]);
    let payload = seed.to_le_bytes().repeat(6250);
    let mut bytes = Vec::new();
    part::frame(key, &payload, &mut bytes);
    bytes.into()
}

fn insert(cache: &RegionCache, key: PartKey) -> bool {
    insert_of(cache, key, cache.era())
}

fn insert_of(cache: &RegionCache, key: PartKey, era: Era) -> bool {
    cache.insert(&[(key, framed(key))], era)[0]
}

fn present(cache: &RegionCache, key: PartKey) -> bool {
    cache.present(&[key])[0]
}

/// Reads as a backend does, and counts the access.
fn hit(map: &CacheMap, key: PartKey) -> bool {
    let Some(part) = map.find(key.object, key.index) else { return false };
    let head: [u8; 64] = map.copy_head(&part).unwrap();
    assert_eq!(head[8..12], key.index.to_le_bytes());
    map.count_access(&part);
    true
}

fn counter(cache: &RegionCache, counter: Counter) -> u64 {
    cache.counters().unwrap().get(counter)
}

/// Bytes that the slabs take on the disk.
fn disk_use(dir: &Path) -> u64 {
    fs::metadata(dir.join(slab_name(0))).map_or(0, |file| file.blocks() * 512)
}

/// The real files, and faults on demand.
struct FaultyDisk {
    files: SlabFiles,
    faults: Arc<Faults>,
}

#[derive(Default)]
struct Faults {
    is_full: AtomicBool,
    /// Free bytes that the disk claims to have, if not zero.
    available: AtomicU64,
}

impl Disk for FaultyDisk {
    fn write_at(&mut self, region: u32, offset: u32, bytes: &[u8]) -> io::Result<()> {
        if self.faults.is_full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.files.write_at(region, offset, bytes)
    }

    fn read_at(&mut self, region: u32, offset: u32, bytes: &mut [u8]) -> io::Result<()> {
        self.files.read_at(region, offset, bytes)
    }

    fn punch(&mut self, region: u32) -> io::Result<()> {
        self.files.punch(region)
    }

    fn space(&self) -> io::Result<Space> {
        match self.faults.available.load(Ordering::Relaxed) {
            0 => self.files.space(),
            available => Ok(Space { available, total: 1000 * MIB }),
        }
    }

    fn check(&mut self) -> Vec<SlabTrouble> {
        self.files.check()
    }

    fn has(&mut self, region: u32) -> bool {
        self.files.has(region)
    }

    fn remove_all(&mut self) -> io::Result<()> {
        self.files.remove_all()
    }
}

fn faulty(dir: &Path, bytes: u64) -> (RegionCache, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let make = {
        let faults = Arc::clone(&faults);
        Box::new(move |path: &Path| -> Box<dyn Disk> {
            Box::new(FaultyDisk { files: SlabFiles::new(path), faults: Arc::clone(&faults) })
        })
    };
    (RegionCache::with_disk(dir, bytes, make), faults)
}

#[test]
fn a_tiny_cache_thrashes_and_never_gives_wrong_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 5_000_000);
    let map = CacheMap::open(dir.path()).unwrap();
    let mut turn = 7u32;
    let mut hits = 0;
    for _ in 0..3000 {
        turn = turn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let key = key(1, (turn >> 8) % 300);
        if hit(&map, key) {
            hits += 1;
            assert_eq!(cache.read(&key).unwrap(), framed(key));
        } else {
            assert!(insert(&cache, key));
            assert!(hit(&map, key), "what was inserted last is there");
        }
    }
    assert!((100..2900).contains(&hits), "{hits} hits");
    assert_eq!(counter(&cache, Counter::LimitBytes), 4 * MIB);
    assert!(counter(&cache, Counter::UsedBytes) <= 4 * MIB);
    assert!(counter(&cache, Counter::Evictions) > 1000);
    let parts = counter(&cache, Counter::Parts);
    let found = (0..300).filter(|&ordinal| present(&cache, key(1, ordinal))).count() as u64;
    assert_eq!(parts, found);
    assert!(disk_use(dir.path()) <= 4 * MIB);
}

#[test]
fn a_cache_full_of_the_smallest_parts_keeps_what_it_has_places_for() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 4 * MIB);
    let map = CacheMap::open(dir.path()).unwrap();
    let smallest = |ordinal| {
        let mut bytes = Vec::new();
        part::frame(key(1, ordinal), &[ordinal as u8], &mut bytes);
        (key(1, ordinal), Bytes::from(bytes))
    };
    // As many as five regions have room for, and seven times as many as the directory has places for.
    let count = 5 * 8192;
    for ordinal in 0..count {
        assert_eq!(cache.insert(&[smallest(ordinal)], cache.era()), [true]);
        assert!(map.find(key(1, ordinal).object, key(1, ordinal).index).is_some());
    }
    let found = (0..count).filter(|&ordinal| present(&cache, key(1, ordinal))).count() as u64;
    assert_eq!(counter(&cache, Counter::Parts), found);
    assert!(found > 500, "{found} parts");
    assert!(counter(&cache, Counter::UsedBytes) <= 4 * MIB);
}

#[test]
fn parts_in_use_survive_a_scan_of_ten_times_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 10 * MIB);
    let map = CacheMap::open(dir.path()).unwrap();
    let hot: Vec<PartKey> = (0..60).map(|ordinal| key(1, ordinal)).collect();
    for &key in &hot {
        insert(&cache, key);
    }
    let mut missed = 0;
    for ordinal in 0..2000 {
        insert(&cache, key(2, ordinal));
        if ordinal % 20 == 0 {
            for &key in &hot {
                if !hit(&map, key) {
                    missed += 1;
                    insert(&cache, key);
                }
            }
        }
    }
    assert!(missed < 150, "{missed} of {} reads missed", hot.len() * 100);
}

#[test]
fn the_size_changes_while_the_cache_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 12 * MIB);
    for ordinal in 0..220 {
        insert(&cache, key(1, ordinal));
    }
    let before = disk_use(dir.path());
    assert!(before > 10 * MIB && before <= 12 * MIB, "{before}");
    let map = CacheMap::open(dir.path()).unwrap();

    cache.resize(4 * MIB);
    assert!(disk_use(dir.path()) <= 4 * MIB, "{}", disk_use(dir.path()));
    assert_eq!(fs::metadata(dir.path().join(slab_name(0))).unwrap().len(), SLAB_BYTES);
    assert!(!map.is_retired());
    let kept: Vec<u32> = (0..220).filter(|&ordinal| present(&cache, key(1, ordinal))).collect();
    assert!(!kept.is_empty() && kept.len() <= 80, "{} parts", kept.len());

    // Larger than the directory file has room for: readers are told to map the new one.
    cache.resize(40 * MIB);
    assert!(map.is_retired());
    let map = CacheMap::open(dir.path()).unwrap();
    assert!(kept.iter().all(|&ordinal| hit(&map, key(1, ordinal))));
    for ordinal in 0..600 {
        insert(&cache, key(1, ordinal));
    }
    assert!((0..600).all(|ordinal| hit(&map, key(1, ordinal))));
    assert!(cache.counters().unwrap().get(Counter::Evictions) > 100, "totals are carried over");
}

#[test]
fn after_a_restart_parts_are_checked_before_they_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 8 * MIB);
    for ordinal in 0..100 {
        insert(&cache, key(1, ordinal));
    }
    drop(cache);
    // One byte of the fourth part.
    let slab = fs::OpenOptions::new().read(true).write(true).open(dir.path().join(slab_name(0)));
    let (slab, at) = (slab.unwrap(), 3 * framed(key(1, 0)).len() as u64 + 1000);
    let mut byte = [0];
    slab.read_exact_at(&mut byte, at).unwrap();
    slab.write_all_at(&[byte[0] ^ 0x10], at).unwrap();

    let cache = RegionCache::open(dir.path(), 8 * MIB);
    let map = CacheMap::open(dir.path()).unwrap();
    assert!(!hit(&map, key(1, 0)), "not checked yet");
    for ordinal in 0..100 {
        assert_eq!(present(&cache, key(1, ordinal)), ordinal != 3, "part {ordinal}");
        assert_eq!(hit(&map, key(1, ordinal)), ordinal != 3, "part {ordinal}");
    }
    // It goes on where it stopped: new parts overwrite nothing that is in use.
    for ordinal in 100..120 {
        insert(&cache, key(1, ordinal));
    }
    for ordinal in (0..120).filter(|&ordinal| ordinal != 3) {
        assert_eq!(cache.read(&key(1, ordinal)).unwrap(), framed(key(1, ordinal)));
    }
}

#[test]
fn restarts_with_another_size_keep_what_fits() {
    let dir = tempfile::tempdir().unwrap();
    for (bytes, expected) in [(8 * MIB, 100), (4 * MIB, 40), (16 * MIB, 40)] {
        let cache = RegionCache::open(dir.path(), bytes);
        if bytes == 8 * MIB {
            (0..100).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
        }
        let kept = (0..100).filter(|&ordinal| present(&cache, key(1, ordinal))).count();
        assert!(kept >= expected, "{kept} parts in {bytes} bytes");
        assert!(counter(&cache, Counter::UsedBytes) <= bytes);
    }
}

#[test]
fn a_damaged_directory_file_is_made_anew() {
    for damage in [0usize, 8, 40, 4096, 5000] {
        let dir = tempfile::tempdir().unwrap();
        drop(RegionCache::open(dir.path(), 8 * MIB));
        let path = dir.path().join(DIRECTORY_NAME);
        let mut bytes = fs::read(&path).unwrap();
        bytes[damage] ^= 0xff;
        fs::write(&path, bytes).unwrap();
        let cache = RegionCache::open(dir.path(), 8 * MIB);
        assert!(insert(&cache, key(1, 1)) && present(&cache, key(1, 1)), "byte {damage}");
    }
    for len in [0u64, 100, 8192] {
        let dir = tempfile::tempdir().unwrap();
        drop(RegionCache::open(dir.path(), 8 * MIB));
        let path = dir.path().join(DIRECTORY_NAME);
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
        let cache = RegionCache::open(dir.path(), 8 * MIB);
        assert!(insert(&cache, key(1, 1)) && present(&cache, key(1, 1)), "{len} bytes");
    }
}

#[test]
fn random_damage_to_the_directory_never_gives_wrong_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 8 * MIB);
    (0..120).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
    drop(cache);
    let path = dir.path().join(DIRECTORY_NAME);
    let good = fs::read(&path).unwrap();
    let mut turn = 99u64;
    for _ in 0..30 {
        let mut bad = good.clone();
        for _ in 0..200 {
            turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = 4096 + (turn >> 20) as usize % (bad.len() - 4096);
            bad[at] ^= (turn >> 12) as u8;
        }
        fs::write(&path, bad).unwrap();
        let cache = RegionCache::open(dir.path(), 8 * MIB);
        for ordinal in 0..120 {
            let key = key(1, ordinal);
            if present(&cache, key) {
                assert_eq!(cache.read(&key).unwrap(), framed(key));
            }
        }
        (200..260).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
    }
}

#[test]
fn a_truncated_slab_loses_its_parts_and_works_on() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 8 * MIB);
    (0..140).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
    let map = CacheMap::open(dir.path()).unwrap();
    let slab = fs::OpenOptions::new().write(true).open(dir.path().join(slab_name(0))).unwrap();
    slab.set_len(2 * MIB).unwrap();
    cache.look_after();
    assert!(!map.is_retired());
    let kept: Vec<u32> = (0..140).filter(|&ordinal| hit(&map, key(1, ordinal))).collect();
    assert!(kept.len() >= 30 && kept.len() <= 45, "{} parts in two regions", kept.len());
    (0..140).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
    let whole = (0..140).all(|ordinal| hit(&map, key(1, ordinal)));
    assert!(whole && map.faults() == 0);
}

#[test]
fn an_emptied_directory_is_filled_again() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 8 * MIB);
    insert(&cache, key(1, 1));
    let map = CacheMap::open(dir.path()).unwrap();
    for entry in fs::read_dir(dir.path()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    cache.look_after();
    assert!(map.is_retired() && !present(&cache, key(1, 1)));
    assert!(insert(&cache, key(1, 1)));
    let map = CacheMap::open(dir.path()).unwrap();
    assert!(hit(&map, key(1, 1)) && map.id() == cache.id());

    // Only a slab.
    fs::remove_file(dir.path().join(slab_name(0))).unwrap();
    cache.look_after();
    assert!(map.is_retired());
    assert!(insert(&cache, key(1, 1)) && present(&cache, key(1, 1)));
}

#[test]
fn without_a_directory_parts_are_not_kept_until_there_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("later");
    let cache = RegionCache::open(&path, 8 * MIB);
    assert!(cache.id().is_nil());
    assert!(!insert(&cache, key(1, 1)) && !present(&cache, key(1, 1)));
    cache.add(Counter::Gets, 3);
    fs::create_dir(&path).unwrap();
    std::thread::sleep(REOPEN_PAUSE);
    cache.look_after();
    assert!(insert(&cache, key(1, 1)) && present(&cache, key(1, 1)));
    assert_eq!(counter(&cache, Counter::Gets), 3);
}

#[test]
fn a_full_disk_keeps_what_is_there_and_is_used_again_later() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, faults) = faulty(dir.path(), 8 * MIB);
    (0..40).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
    faults.is_full.store(true, Ordering::Relaxed);
    assert!(!insert(&cache, key(1, 100)) && !present(&cache, key(1, 100)));
    assert!((0..40).any(|ordinal| present(&cache, key(1, ordinal))));
    faults.is_full.store(false, Ordering::Relaxed);
    assert!(insert(&cache, key(1, 100)) && present(&cache, key(1, 100)));
}

#[test]
fn the_disk_keeps_its_reserve() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, faults) = faulty(dir.path(), 100 * MIB);
    // 5 % of 1,000 MiB are not to be touched: there is room for one more region, then for none.
    faults.available.store(51 * MIB, Ordering::Relaxed);
    assert!(insert(&cache, key(1, 0)));
    faults.available.store(50 * MIB, Ordering::Relaxed);
    (1..200).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal)), "part {ordinal}"));
    assert!(disk_use(dir.path()) <= MIB, "{}", disk_use(dir.path()));
    faults.available.store(200 * MIB, Ordering::Relaxed);
    (0..200).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
    assert!(disk_use(dir.path()) > 5 * MIB);
    // Somebody else fills the disk: space is given back.
    faults.available.store(10 * MIB, Ordering::Relaxed);
    cache.look_after();
    assert!(disk_use(dir.path()) <= MIB, "{}", disk_use(dir.path()));
}

#[test]
fn clearing_gives_all_space_back() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 8 * MIB);
    (0..140).for_each(|ordinal| assert!(insert(&cache, key(1, ordinal))));
    cache.clear();
    assert!((0..140).all(|ordinal| !present(&cache, key(1, ordinal))));
    assert_eq!((counter(&cache, Counter::Parts), disk_use(dir.path())), (0, 0));
    assert!(insert(&cache, key(1, 1)) && present(&cache, key(1, 1)));
}

#[test]
fn what_is_brought_for_a_request_from_before_a_clear_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 8 * MIB);
    let before = cache.era();
    assert!(insert_of(&cache, key(1, 1), before) && present(&cache, key(1, 1)));
    cache.clear();
    let after = cache.era();
    assert!(!insert_of(&cache, key(1, 1), before) && !present(&cache, key(1, 1)));
    assert!(insert_of(&cache, key(1, 1), after) && present(&cache, key(1, 1)));
    assert!(!insert_of(&cache, key(1, 2), before) && !present(&cache, key(1, 2)));
}

#[test]
fn cleared_parts_come_back_neither_by_a_restart_nor_by_moves() {
    let dir = tempfile::tempdir().unwrap();
    let fill = |cache: &RegionCache| {
        let map = CacheMap::open(dir.path()).unwrap();
        for ordinal in 0..140 {
            assert!(insert(cache, key(1, ordinal)));
            // In use, so that an eviction would move it on.
            (0..3).for_each(|_| assert!(hit(&map, key(1, ordinal))));
        }
    };
    let restart = || RegionCache::open(dir.path(), 8 * MIB);
    let is_empty = |cache: &RegionCache| {
        (0..140).all(|ordinal| !present(cache, key(1, ordinal)))
            && counter(cache, Counter::Parts) == 0
    };
    fill(&restart());
    // What the last run left is not checked yet.
    let cache = restart();
    assert_eq!(counter(&cache, Counter::Parts), 140);
    cache.clear();
    assert!(is_empty(&cache));
    drop(cache);
    let cache = restart();
    assert!(is_empty(&cache));
    fill(&cache);
    cache.clear();
    (0..1000).for_each(|ordinal| assert!(insert(&cache, key(2, ordinal))));
    assert!((0..140).all(|ordinal| !present(&cache, key(1, ordinal))));
}

#[test]
fn a_clear_counts_while_the_cache_cannot_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (dir.path().join("cache"), dir.path().join("away"));
    fs::create_dir(&path).unwrap();
    assert!(insert(&RegionCache::open(&path, 8 * MIB), key(1, 1)));
    fs::rename(&path, &away).unwrap();
    let cache = RegionCache::open(&path, 8 * MIB);
    cache.clear();
    assert!(cache.id().is_nil());
    fs::rename(&away, &path).unwrap();
    std::thread::sleep(REOPEN_PAUSE);
    cache.look_after();
    assert!(!cache.id().is_nil() && !present(&cache, key(1, 1)));
    assert!(insert(&cache, key(1, 1)) && present(&cache, key(1, 1)));
}

#[test]
fn a_part_that_comes_twice_is_kept_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = RegionCache::open(dir.path(), 8 * MIB);
    for _ in 0..200 {
        assert!(insert(&cache, key(1, 1)));
    }
    assert_eq!(counter(&cache, Counter::Parts), 1);
    assert!(counter(&cache, Counter::UsedBytes) <= MIB);
}
