//! Readers against a writer, mostly in two processes: a test starts its own binary again, with only
//! itself to run, and plays the other part there.

use std::{
    env,
    fs::OpenOptions,
    os::unix::{fs::FileExt, process::ExitStatusExt},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use super::*;
use crate::cache::{DirectoryWriter, Geometry, RegionClass, RegionState};

const ROLE: &str = "POLIGN_TEST_CACHE";

/// The directory to work on, in the process that a test started.
fn role() -> Option<PathBuf> {
    env::var_os(ROLE).map(PathBuf::from)
}

fn start_other(test: &str, dir: &Path) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("cache::map::tests::{test}"), "--nocapture"])
        .env(ROLE, dir)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Regions used one after the other, the oldest evicted first.
struct Ring {
    writer: DirectoryWriter,
    slab: File,
    region: u32,
    used: u32,
    generation: u64,
}

impl Ring {
    fn create(dir: &Path, regions: u32) -> Self {
        let slab = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(dir.join(slab_name(0)))
            .unwrap();
        slab.set_len(SLAB_BYTES).unwrap();
        let writer = DirectoryWriter::create(dir, Geometry::for_regions(regions)).unwrap();
        let generation = writer.evict_region(0);
        Self { writer, slab, region: 0, used: 0, generation }
    }

    fn add(&mut self, object: ObjectId, index: u32) {
        let bytes = content(object, index);
        let len = bytes.len() as u32;
        if self.used + len > REGION_BYTES {
            self.region = (self.region + 1) % self.writer.map().geometry().regions();
            self.generation = self.writer.evict_region(self.region);
            self.used = 0;
        }
        let at = u64::from(self.region) * u64::from(REGION_BYTES) + u64::from(self.used);
        self.slab.write_all_at(&bytes, at).unwrap();
        let (region, offset, generation) = (self.region, self.used, self.generation);
        let entry = Entry { object, index, len, region, offset, generation, access: 0, boot: 0 };
        self.writer.publish(entry);
        self.used += len;
    }
}

fn object(number: u8) -> ObjectId {
    ObjectId([number; 16])
}

/// Bytes that no other part has anywhere: each word says whose it is and where.
fn content(object: ObjectId, index: u32) -> Vec<u8> {
    let words = 1024 + u64::from(index % 7) * 512;
    let owner = u64::from(object.0[0]) << 56 | u64::from(index) << 24;
    (0..words).flat_map(|at| (owner | at).to_le_bytes()).collect()
}

/// Copies the part through raw reads, as a kernel would scan it.
fn read(map: &CacheMap, part: &Located) -> Vec<u8> {
    read_slowly(map, part, Duration::ZERO)
}

/// The same, with a pause in the middle.
fn read_slowly(map: &CacheMap, part: &Located, pause: Duration) -> Vec<u8> {
    let first = map.pointer(part).unwrap().cast::<u64>();
    let words = part.len as usize / 8;
    let mut bytes = Vec::with_capacity(part.len as usize);
    for at in 0..words {
        if at == words / 2 && !pause.is_zero() {
            std::thread::sleep(pause);
        }
        // SAFETY: the part is mapped, its length is a multiple of 8 and its offset of 64.
        let word = unsafe { first.add(at).read_volatile() };
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn find_and_check(map: &CacheMap, object: ObjectId, index: u32) -> Option<bool> {
    let part = map.find(object, index)?;
    // Now and then slowly enough for the region to be evicted meanwhile.
    let pause = Duration::from_millis(if index.is_multiple_of(8) { 3 } else { 0 });
    let bytes = read_slowly(map, &part, pause);
    let unchanged = map.is_unchanged(part.region, part.generation);
    if unchanged {
        assert!(bytes == content(object, index), "a wrong byte was accepted");
    }
    Some(unchanged)
}

#[test]
fn published_parts_are_found_until_their_region_is_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let mut ring = Ring::create(dir.path(), 3);
    for index in 0..60 {
        ring.add(object(1), index);
    }
    let map = CacheMap::open(dir.path()).unwrap();
    assert_eq!(map.id(), ring.writer.map().id());
    for index in 0..60 {
        assert_eq!(find_and_check(&map, object(1), index), Some(true), "part {index}");
    }
    assert!(map.find(object(2), 0).is_none());
    assert!(map.find(object(1), 60).is_none());

    let part = map.find(object(1), 0).unwrap();
    ring.writer.evict_region(part.region);
    assert!(!map.is_unchanged(part.region, part.generation));
    assert!(map.find(object(1), 0).is_none());
}

#[test]
fn a_retired_directory_makes_everything_invalid() {
    let dir = tempfile::tempdir().unwrap();
    let mut ring = Ring::create(dir.path(), 3);
    ring.add(object(1), 0);
    let map = CacheMap::open(dir.path()).unwrap();
    let part = map.find(object(1), 0).unwrap();
    ring.writer.retire();
    assert!(map.is_retired());
    assert!(!map.is_unchanged(part.region, part.generation));
    assert!(map.find(object(1), 0).is_none());
}

#[test]
fn entries_of_an_earlier_boot_are_hidden_until_they_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let mut ring = Ring::create(dir.path(), 3);
    ring.add(object(1), 0);
    let state = RegionState { class: RegionClass::Small, used: 8192, order: 77 };
    ring.writer.set_region_state(0, state);
    drop(ring);
    let writer = DirectoryWriter::reopen(dir.path()).unwrap();
    assert_eq!(writer.region_state(0), state);
    let map = CacheMap::open(dir.path()).unwrap();
    assert!(map.find(object(1), 0).is_none());
    let (slot, entry) = writer.find(object(1), 0).unwrap();
    assert!(!writer.is_shown(&entry));
    writer.show(slot, 2);
    assert_eq!(find_and_check(&map, object(1), 0), Some(true));
    assert_eq!(writer.find(object(1), 0).unwrap().1.access, 2);
}

#[test]
fn accesses_are_counted_up_to_the_maximum() {
    let dir = tempfile::tempdir().unwrap();
    let mut ring = Ring::create(dir.path(), 3);
    ring.add(object(1), 0);
    let map = CacheMap::open(dir.path()).unwrap();
    for expected in [1, 2, 3, 3, 3] {
        map.count_access(&map.find(object(1), 0).unwrap());
        assert_eq!(ring.writer.find(object(1), 0).unwrap().1.access, expected);
    }
}

#[test]
fn a_bucket_that_is_full_drops_its_coldest_entry() {
    let dir = tempfile::tempdir().unwrap();
    let ring = Ring::create(dir.path(), 1);
    let generation = ring.generation;
    let mut dropped = 0;
    let (count, len) = (800, 64);
    for index in 0..count {
        let (object, offset) = (object(1), index * len);
        let entry = Entry { object, index, len, region: 0, offset, generation, access: 0, boot: 0 };
        dropped += u32::from(ring.writer.publish(entry).is_some());
        assert!(ring.writer.find(object, index).is_some(), "the new entry is always there");
    }
    let kept = ring.writer.entries().count() as u32;
    assert_eq!(kept + dropped, count);
    assert!(dropped >= count - 270 && kept > 240, "kept {kept}");
}

#[test]
fn damaged_directory_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(CacheMap::open(dir.path()), Err(OpenError::Io(_))));
    drop(Ring::create(dir.path(), 3));
    let path = dir.path().join("directory");
    let good = std::fs::read(&path).unwrap();
    // Magic, version, region count, bucket count; then too short at every step.
    for at in [0, 8, 5 * 8, 5 * 8 + 7, 6 * 8] {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        std::fs::write(&path, bad).unwrap();
        assert!(CacheMap::open(dir.path()).is_err(), "byte {at}");
    }
    for len in [0, 100, 4096, good.len() - 8] {
        std::fs::write(&path, &good[..len]).unwrap();
        assert!(CacheMap::open(dir.path()).is_err(), "{len} bytes");
    }
    std::fs::write(&path, &good).unwrap();
    assert!(CacheMap::open(dir.path()).is_ok());
}

#[test]
fn under_eviction_in_another_process_no_wrong_byte_is_accepted() {
    const TEST: &str = "under_eviction_in_another_process_no_wrong_byte_is_accepted";
    const PARTS: u32 = 400;
    if let Some(dir) = role() {
        let mut ring = Ring::create(&dir, 4);
        let until = Instant::now() + Duration::from_secs(60);
        let mut turn = 1u32;
        while Instant::now() < until && dir.join("go").exists() {
            turn = turn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ring.add(object(1 + (turn >> 30) as u8), (turn >> 8) % PARTS);
        }
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("go"), "").unwrap();
    let mut other = start_other(TEST, dir.path());
    let map = loop {
        match CacheMap::open(dir.path()) {
            Ok(map) => break map,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(other.try_wait().unwrap().is_none(), "the writer died");
    };
    let (mut found, mut lost) = (0u64, 0u64);
    let until = Instant::now() + Duration::from_secs(30);
    // Long enough to have seen many parts, and some of them evicted while they were read.
    while (found < 2000 || lost < 3) && Instant::now() < until {
        for number in 1..=4 {
            for index in 0..PARTS {
                match find_and_check(&map, object(number), index) {
                    Some(true) => found += 1,
                    Some(false) => lost += 1,
                    None => {}
                }
            }
        }
    }
    std::fs::remove_file(dir.path().join("go")).unwrap();
    assert!(other.wait().unwrap().success());
    assert!(found >= 1000 && lost > 0, "{found} found, {lost} lost");
}

#[test]
fn a_truncated_slab_is_read_as_zeros_and_mended() {
    if let Some(dir) = role() {
        let mut ring = Ring::create(&dir, 3);
        for index in 0..100 {
            ring.add(object(1), index);
        }
        let map = CacheMap::open(&dir).unwrap();
        assert_eq!(find_and_check(&map, object(1), 50), Some(true));
        let before = map.faults();

        ring.slab.set_len(4096).unwrap();
        let part = map.find(object(1), 50).unwrap();
        let bytes = read(&map, &part);
        assert!(map.faults() > before, "the fault was not counted");
        assert!(bytes.iter().all(|&byte| byte == 0));

        ring.slab.set_len(SLAB_BYTES).unwrap();
        map.mend();
        ring.writer.evict_region(part.region);
        ring.add(object(1), 50);
        let before = map.faults();
        assert_eq!(find_and_check(&map, object(1), 50), Some(true));
        assert_eq!(map.faults(), before);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut other = start_other("a_truncated_slab_is_read_as_zeros_and_mended", dir.path());
    assert!(other.wait().unwrap().success());
}

#[test]
fn a_truncated_directory_reads_as_retired() {
    if let Some(dir) = role() {
        let mut ring = Ring::create(&dir, 3);
        ring.add(object(1), 0);
        let map = CacheMap::open(&dir).unwrap();
        assert_eq!(find_and_check(&map, object(1), 0), Some(true));
        let file = OpenOptions::new().write(true).open(dir.join("directory")).unwrap();
        file.set_len(0).unwrap();
        assert!(map.find(object(1), 0).is_none());
        map.add(Counter::Misses, 1);
        assert!(map.is_retired() && map.faults() > 0);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut other = start_other("a_truncated_directory_reads_as_retired", dir.path());
    assert!(other.wait().unwrap().success());
}

/// Touches a page that its file no longer has, outside every guarded range.
fn fault_elsewhere(dir: &Path) {
    let file = File::create_new(dir.join("elsewhere")).unwrap();
    file.set_len(4096).unwrap();
    drop(file);
    let file = OpenOptions::new().read(true).write(true).open(dir.join("elsewhere")).unwrap();
    // SAFETY: the access below is meant to fault; the process is this test's own.
    unsafe {
        let base = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ,
            libc::MAP_SHARED,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            0,
        );
        assert!(base != libc::MAP_FAILED);
        file.set_len(0).unwrap();
        base.cast::<u8>().read_volatile();
    }
}

#[test]
fn a_fault_elsewhere_still_kills() {
    if let Some(dir) = role() {
        drop(Ring::create(&dir, 3));
        let _map = CacheMap::open(&dir).unwrap();
        fault_elsewhere(&dir);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut other = start_other("a_fault_elsewhere_still_kills", dir.path());
    assert_eq!(other.wait().unwrap().signal(), Some(libc::SIGBUS));
}

#[test]
fn a_fault_elsewhere_reaches_the_earlier_handler() {
    extern "C" fn earlier(_: libc::c_int) {
        // SAFETY: async-signal-safe.
        unsafe { libc::_exit(42) };
    }
    if let Some(dir) = role() {
        // SAFETY: installs a handler that only exits.
        unsafe { libc::signal(libc::SIGBUS, earlier as *const () as usize) };
        drop(Ring::create(&dir, 3));
        let _map = CacheMap::open(&dir).unwrap();
        fault_elsewhere(&dir);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut other = start_other("a_fault_elsewhere_reaches_the_earlier_handler", dir.path());
    assert_eq!(other.wait().unwrap().code(), Some(42));
}
