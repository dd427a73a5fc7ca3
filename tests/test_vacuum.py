"""VACUUM: dead rows never come back, space is used again, every stored row is reported."""

import threading
import time

import numpy as np
import psycopg
import pytest

from dev.datasets import load, vector_text
from tests.harness.search import assert_equals_exact, search
from tests.harness.vectors import random_vectors
from tests.test_insert import create


def heap_pages(connection) -> int:
    return connection.execute("SELECT pg_relation_size('t') / 8192").fetchone()[0]


def index_pages(connection) -> int:
    return connection.execute("SELECT pg_relation_size('i') / 8192").fetchone()[0]


def build(connection, vectors: np.ndarray) -> None:
    connection.execute(f"CREATE TABLE t (id int PRIMARY KEY, embedding vector({vectors.shape[1]}))")
    load(connection, "t", vectors)
    connection.execute("CREATE INDEX i ON t USING polign_ivf (embedding vector_l2_ops)")
    connection.execute("SET polign.target_recall = 1")


@pytest.mark.parametrize("built", [True, False], ids=["segments", "delta"])
def test_a_reused_tid_does_not_answer_for_the_old_row(connection, built):
    vectors = random_vectors(1500, 16)
    if built:
        build(connection, vectors)
    else:
        create(connection, 16)
        load(connection, "t", vectors)
    connection.execute("DELETE FROM t WHERE id % 3 = 0")
    connection.execute("VACUUM t")
    before = heap_pages(connection)
    new = random_vectors(500, 16, 2) + np.float32(20)
    load(connection, "t", new, 10_000)
    assert heap_pages(connection) == before, "the new rows have the TIDs of the old ones"
    queries = np.concatenate([vectors[:5], new[:5]])
    assert_equals_exact(connection, "t", "i", "l2", queries, 2000)
    connection.execute("DELETE FROM t WHERE id >= 10000")
    connection.execute("VACUUM t")
    assert_equals_exact(connection, "t", "i", "l2", queries, 2000)


@pytest.mark.parametrize("built", [True, False], ids=["segments", "delta"])
def test_another_session_sees_what_vacuum_removed(connection, database, built):
    """A copy of the delta or the tombstones that a backend keeps must not outlive VACUUM."""
    vectors = random_vectors(600, 8)
    if built:
        build(connection, vectors)
    else:
        create(connection, 8)
        load(connection, "t", vectors)
    with database.connect() as other:
        other.execute("SET polign.target_recall = 1")
        for round_number in range(4):
            assert_equals_exact(other, "t", "i", "l2", vectors[:2], 1000)
            connection.execute(f"DELETE FROM t WHERE id % 5 = {round_number}")
            connection.execute("VACUUM t")
            load(connection, "t", vectors[:100] + np.float32(round_number), 1000 * (round_number + 1))
            assert_equals_exact(other, "t", "i", "l2", vectors[:2], 1000)


def test_the_delta_gives_its_pages_back(connection):
    create(connection, 64)
    vectors = random_vectors(1000, 64)
    sizes = []
    for turn in range(8):
        load(connection, "t", vectors, 1000 * turn)
        connection.execute(f"DELETE FROM t WHERE id < {1000 * turn}")
        connection.execute("VACUUM t")
        sizes.append(index_pages(connection))
    # A freed page is used again after the next VACUUM, when every snapshot is newer than it.
    assert max(sizes[4:]) <= sizes[3] + 5, f"the index grows: {sizes}"
    assert_equals_exact(connection, "t", "i", "l2", vectors[:3], 1100)


def test_dead_rows_of_an_index_are_counted(connection):
    vectors = random_vectors(1200, 8)
    build(connection, vectors[:1000])
    load(connection, "t", vectors[1000:], 1000)
    connection.execute("DELETE FROM t WHERE id % 4 = 0")
    connection.execute("VACUUM t")
    assert connection.execute("SELECT reltuples FROM pg_class WHERE relname = 'i'").fetchone()[0] == 900
    # Nothing is dead: only cleanup runs.
    connection.execute("INSERT INTO t VALUES (5000, '[1,2,3,4,5,6,7,8]')")
    connection.execute("VACUUM (INDEX_CLEANUP on) t")
    assert connection.execute("SELECT reltuples FROM pg_class WHERE relname = 'i'").fetchone()[0] == 901


def test_parallel_vacuum(connection):
    vectors = random_vectors(2000, 8)
    build(connection, vectors)
    connection.execute("CREATE INDEX j ON t USING polign_ivf (embedding vector_ip_ops)")
    connection.execute("SET min_parallel_index_scan_size = 0")
    connection.execute("DELETE FROM t WHERE id % 2 = 0")
    connection.execute("VACUUM (PARALLEL 2) t")
    load(connection, "t", vectors[::2] + np.float32(1), 5000)
    assert_equals_exact(connection, "t", "i", "l2", vectors[:3], 2100)
    connection.execute("DROP INDEX i")
    assert_equals_exact(connection, "t", "j", "ip", vectors[:3], 2100)


def test_vacuum_needs_the_store_and_says_what_to_do_without(connection, cluster, proxy):
    vectors = random_vectors(500, 8)
    build(connection, vectors)
    connection.execute("SELECT polign.cache_clear()")
    cluster.configure(polign__fetch_timeout="1s")
    connection.execute("DELETE FROM t WHERE id < 100")
    with proxy.refusing():
        with pytest.raises(psycopg.Error) as raised:
            connection.execute("VACUUM t")
        assert raised.value.sqlstate == "58030"
        assert "INDEX_CLEANUP off" in raised.value.diag.message_hint
        connection.execute("VACUUM (INDEX_CLEANUP off) t")
    cluster.reset_settings()
    connection.execute("VACUUM t")
    load(connection, "t", vectors[:100] + np.float32(3), 1000)
    assert_equals_exact(connection, "t", "i", "l2", vectors[:3], 600)


def test_concurrent_build_and_reindex(connection, database):
    vectors = random_vectors(800, 8)
    connection.execute("CREATE TABLE t (id int PRIMARY KEY, embedding vector(8))")
    load(connection, "t", vectors[:400])
    stop = threading.Event()

    def write():
        with database.connect() as other:
            for row in range(400, 800):
                if stop.is_set():
                    return
                other.execute(f"INSERT INTO t VALUES ({row}, '{vector_text(vectors[row])}')")
                other.execute(f"UPDATE t SET embedding = embedding WHERE id = {row - 100}")
                time.sleep(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        connection.execute("CREATE INDEX CONCURRENTLY i ON t USING polign_ivf (embedding vector_l2_ops)")
        connection.execute("REINDEX INDEX CONCURRENTLY i")
    finally:
        writer.join(timeout=60)
        stop.set()
    valid = connection.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'i'::regclass")
    assert valid.fetchone()[0]
    connection.execute("SET polign.target_recall = 1")
    assert_equals_exact(connection, "t", "i", "l2", vectors[::200], 900)


def test_writers_vacuum_and_searches_at_once(connection, database):
    """No search misses a committed row, sees one twice, or sees one that its snapshot does not."""
    seconds = 8
    vectors = random_vectors(600, 8)
    build(connection, vectors)
    end = time.monotonic() + seconds
    faults: list[str] = []

    def session(work):
        def run():
            try:
                with database.connect() as own:
                    own.execute("SET polign.target_recall = 1")
                    generator = np.random.default_rng(threading.get_ident())
                    while time.monotonic() < end and not faults:
                        work(own, generator)
            except Exception as error:  # handed to the test
                faults.append(repr(error))
        return threading.Thread(target=run)

    def insert(own, generator):
        own.execute(
            "INSERT INTO t SELECT (random() * 1e9)::int, ARRAY(SELECT random() + n * 0 FROM "
            "generate_series(1, 8))::vector FROM generate_series(1, 20) n ON CONFLICT DO NOTHING"
        )
        time.sleep(0.01)

    def delete(own, generator):
        own.execute("DELETE FROM t WHERE id IN (SELECT id FROM t ORDER BY ctid LIMIT 30 OFFSET 500)")

    def vacuum(own, generator):
        own.execute("VACUUM t")
        time.sleep(0.05)

    def look(own, generator):
        query = generator.normal(size=8)
        with own.transaction():
            own.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            own.execute("SET LOCAL enable_indexscan = off; SET LOCAL enable_seqscan = on")
            expected = search(own, "t", "l2", query, 5000)
            own.execute("SET LOCAL enable_indexscan = on; SET LOCAL enable_seqscan = off")
            found = search(own, "t", "l2", query, 5000)
        if sorted(found.ids) != sorted(expected.ids) or found.distances != expected.distances:
            missing = set(expected.ids) - set(found.ids)
            faults.append(f"{len(found.ids)} rows instead of {len(expected.ids)}, {missing} missing")

    threads = [session(work) for work in (insert, insert, delete, vacuum, look, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]
