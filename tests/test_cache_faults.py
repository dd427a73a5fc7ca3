"""The cache is damaged, wiped, full or unreadable: queries answer all the same."""

import os
import re
import shutil
import subprocess
import threading
import time

import pytest

from dev.datasets import create_table, passages
from dev.paths import give_to_service_user, is_root
from tests.harness.search import search

INDEX = "CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)"


@pytest.fixture
def own(own_cluster):
    """A server of its own with a built, warm index: (cluster, database, expected answers)."""
    cluster = own_cluster()
    return cluster, *build(cluster)


def build(cluster):
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base)
        connection.execute(INDEX)
    return database, answers(database)


def answers(database, count=40):
    with database.connect() as connection:
        return [search(connection, "t", "cosine", query) for query in passages().queries[:count]]


def slabs(cluster):
    found = [p for p in cluster.cache_directory.rglob("*") if p.is_file() and p.stat().st_size >= 1 << 20]
    assert found, f"no slab files in {list(cluster.cache_directory.rglob('*'))}"
    return found


def flip_bytes(path, every=4096):
    """Damages what is there; holes stay holes."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(100, size, every):
            file.seek(at)
            byte = file.read(1)
            if byte and byte != b"\0":
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))


def assert_noticed_and_mended(database, proxy, expected):
    with proxy.record() as requests:
        assert answers(database) == expected
    assert requests.of("get"), "nobody noticed"
    with proxy.record() as requests:
        assert answers(database) == expected
    assert requests.kinds == {}, "what was fetched again is cached"


def test_flipped_bytes_while_down(own, proxy):
    cluster, database, expected = own
    cluster.stop()
    for slab in slabs(cluster):
        flip_bytes(slab)
    cluster.start()
    assert_noticed_and_mended(database, proxy, expected)


def test_flipped_bytes_while_running(own, proxy):
    """The first look of a session at a part is one at its checksum."""
    cluster, database, expected = own
    for slab in slabs(cluster):
        flip_bytes(slab)
    assert_noticed_and_mended(database, proxy, expected)


def test_every_file_damaged_while_down(own):
    cluster, database, expected = own
    cluster.stop()
    for path in cluster.cache_directory.rglob("*"):
        if path.is_file():
            flip_bytes(path, every=64)
    cluster.start()
    assert answers(database) == expected


@pytest.mark.parametrize("what", ["truncated", "deleted"])
def test_files_truncated_or_deleted_while_down(own, what):
    cluster, database, expected = own
    cluster.stop()
    for path in cluster.cache_directory.rglob("*"):
        if path.is_file():
            if what == "truncated":
                os.truncate(path, path.stat().st_size // 3)
            else:
                path.unlink()
    cluster.start()
    assert answers(database) == expected


def under_load(database, expected, disturb, seconds=4.0):
    """Searches in three sessions while `disturb()` is called; every answer must be right."""
    errors: list[Exception] = []
    stop = threading.Event()

    def work():
        try:
            with database.connect() as connection:
                while not stop.is_set():
                    for query, right in zip(passages().queries, expected, strict=False):
                        assert search(connection, "t", "cosine", query) == right
        except Exception as error:  # reported by the test, whatever it is
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not errors:
        disturb()
        time.sleep(0.3)
    stop.set()
    for thread in threads:
        thread.join(120)
    assert not errors, errors


def assert_no_crash(cluster):
    log = cluster.postgres.log.read_text()
    assert not re.search(r"(server process|background worker .*) \(PID \d+\) was terminated by signal", log)
    assert "all server processes terminated" not in log


def test_slabs_truncated_under_scans(own):
    """Reading past the end of a truncated mapping raises SIGBUS; it must not kill a backend."""
    cluster, database, expected = own

    def disturb():
        for slab in slabs(cluster):
            os.truncate(slab, 1 << 20)

    def truncate_once_more():
        for path in cluster.cache_directory.rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 20:
                os.truncate(path, 4096)

    disturb()
    under_load(database, expected, truncate_once_more)
    assert_no_crash(cluster)


def test_cache_directory_wiped_under_load(own):
    cluster, database, expected = own

    def wipe():
        for path in list(cluster.cache_directory.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    under_load(database, expected, wipe)
    assert_no_crash(cluster)
    assert answers(database) == expected


def test_store_process_killed_under_load(own):
    """kill -9 of polign-store costs a retry: no session sees an error."""
    cluster, database, expected = own
    killed = set()

    def kill():
        for pid in cluster.store_pids():
            os.kill(pid, 9)
            killed.add(pid)
        with database.connect() as connection:
            connection.execute("SELECT polign.cache_clear()")

    under_load(database, expected, kill)
    assert len(killed) >= 2, "it was to be restarted and killed again"
    assert_no_crash(cluster)


def test_store_process_killed_during_a_fetch(own, proxy):
    cluster, database, expected = own
    cluster.stop()
    cluster.wipe_cache()
    cluster.start()
    result = []
    with database.connect() as connection, proxy.fault("stall", method="GET", times=4):
        query = passages().queries[0]
        thread = threading.Thread(target=lambda: result.append(search(connection, "t", "cosine", query)))
        thread.start()
        time.sleep(1)
        (pid,) = cluster.store_pids()
        os.kill(pid, 9)
        thread.join(30)
    assert result == expected[:1]


if is_root():  # only root may mount a small file system

    def test_full_disk(own, run_directory):
        """The cache moves to a file system of 3 MB, and may use 64 MB."""
        cluster, database, expected = own
        directory = run_directory / "small"
        directory.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(directory)], check=True
        )
        try:
            give_to_service_user(directory)
            cluster.configure(polign__cache_dir=str(directory), polign__cache_size="64MB")
            assert answers(database) == expected
            under_load(database, expected, lambda: None, seconds=2)
            assert_no_crash(cluster)
            assert any(directory.iterdir()), "the cache is elsewhere"
        finally:
            cluster.stop()
            subprocess.run(["umount", str(directory)], check=True)
