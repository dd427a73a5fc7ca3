"""Flush: inserted rows become segments in the store, and nobody notices."""

import threading
import time

import numpy as np
import psycopg
import pytest

from dev.datasets import load
from tests.harness.search import assert_equals_exact, mean_recall, search
from tests.harness.vectors import random_vectors
from tests.test_insert import create

DIM = 16


def info(connection, what: str, index: str = "i"):
    return connection.execute(f"SELECT {what} FROM polign.index_info('{index}')").fetchone()[0]


def flush(connection, index: str = "i") -> int:
    return connection.execute("SELECT polign.flush(%s)", [index]).fetchone()[0]


def table(connection, built: int, inserted: int, metric: str = "l2") -> np.ndarray:
    """A table `t` with an index `i` over the first rows, and the others inserted; all their vectors."""
    vectors = random_vectors(built + inserted, DIM)
    create(connection, DIM, metric)
    if built:
        load(connection, "t", vectors[:built])
        connection.execute("REINDEX INDEX i")
    load(connection, "t", vectors[built:], built)
    connection.execute("SET polign.target_recall = 1")
    return vectors


def queries(vectors: np.ndarray) -> np.ndarray:
    return np.concatenate([vectors[:: len(vectors) // 4][:4], random_vectors(2, DIM, 99)])


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("built", [1500, 0], ids=["built", "created empty"])
def test_flushed_rows_are_found_as_before(connection, metric, built):
    vectors = table(connection, built, 900, metric)
    objects = info(connection, "objects")
    assert flush(connection) == 900
    assert (info(connection, "delta_rows"), info(connection, "rows")) == (0, built + 900)
    assert info(connection, "objects") > objects
    assert_equals_exact(connection, "t", "i", metric, queries(vectors), 50)
    assert flush(connection) == 0
    load(connection, "t", random_vectors(300, DIM, 5), 10_000)
    assert flush(connection) == 300
    assert_equals_exact(connection, "t", "i", metric, queries(vectors), 50)


def test_sessions_that_know_the_index_see_the_flush(connection, database):
    vectors = table(connection, 800, 400)
    with database.connect() as other:
        other.execute("SET polign.target_recall = 1")
        for first in (10_000, 20_000, 30_000):
            assert_equals_exact(other, "t", "i", "l2", queries(vectors), 30)
            flush(connection)
            assert_equals_exact(other, "t", "i", "l2", queries(vectors), 30)
            load(connection, "t", random_vectors(100, DIM, 7), first)
            load(other, "t", random_vectors(100, DIM, 8), first + 500)


def test_rows_of_unfinished_and_aborted_transactions_are_moved_and_not_judged(connection, database):
    table(connection, 500, 100)
    new = random_vectors(20, DIM, 3) + np.float32(50)
    with database.connect() as open_one, database.connect() as aborted:
        open_one.execute("BEGIN")
        aborted.execute("BEGIN")
        load(open_one, "t", new[:10], 20_000)
        load(aborted, "t", new[10:], 30_000)
        aborted.execute("ROLLBACK")
        assert flush(connection) == 120
        near = search(connection, "t", "l2", new[0], 10).ids
        assert all(row < 20_000 for row in near), "neither is visible"
        open_one.execute("COMMIT")
    assert search(connection, "t", "l2", new[0], 10).ids[0] == 20_000
    assert_equals_exact(connection, "t", "i", "l2", new, 30)


def test_an_old_snapshot_sees_its_rows_after_vacuum_and_flush(connection, database):
    vectors = table(connection, 600, 300)
    with database.connect() as old:
        old.execute("SET polign.target_recall = 1")
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        before = [search(old, "t", "l2", query, 20) for query in queries(vectors)]
        connection.execute("DELETE FROM t WHERE id % 2 = 0")
        connection.execute("VACUUM t")
        flush(connection)
        connection.execute("VACUUM t")
        assert [search(old, "t", "l2", query, 20) for query in queries(vectors)] == before
        old.execute("COMMIT")
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_rows_that_die_while_they_are_uploaded_stay_dead(connection, cluster, proxy):
    """VACUUM marks them, the heap reuses their TIDs: the copy that is published must know.

    The flush runs in the background: a session that waits for one holds a snapshot, and VACUUM back.
    """
    vectors = table(connection, 500, 0)
    inserted = random_vectors(400, DIM, 2)
    with proxy.fault("stall", method="PUT", key=".seg") as fault:
        cluster.configure(polign__delta_limit=300)
        load(connection, "t", inserted, 1000)
        wait_until(lambda: fault.hit > 0)
        cluster.configure(polign__delta_limit=0)
        connection.execute("DELETE FROM t WHERE id >= 1000 AND id % 2 = 0")
        connection.execute("VACUUM t")
        pages = connection.execute("SELECT pg_relation_size('t')").fetchone()
        new = random_vectors(150, DIM, 6) + np.float32(30)
        load(connection, "t", new, 50_000)
        assert connection.execute("SELECT pg_relation_size('t')").fetchone() == pages, "TIDs are reused"
        assert info(connection, "objects") == 1, "the flush still waits"
    wait_for_workers(connection)
    assert info(connection, "delta_rows") < 400
    everything = np.concatenate([vectors[::100], inserted[::50], new[:5]])
    assert_equals_exact(connection, "t", "i", "l2", everything, 900)
    flush(connection)
    connection.execute("VACUUM t")
    assert_equals_exact(connection, "t", "i", "l2", everything, 900)


def wait_until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to it"
        time.sleep(0.02)


def wait_for_workers(connection) -> None:
    """Until nothing is flushed or compacted any more."""
    wait_until(lambda: workers(connection) == 0)


def workers(connection) -> int:
    count = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'polign maintenance'"
    return connection.execute(count).fetchone()[0]


def test_pages_behind_the_flushed_rows_may_go_while_they_are_uploaded(connection, cluster, proxy):
    """VACUUM unlinks the page that was the first of those that stay, and an insert uses it again."""
    vectors = table(connection, 500, 0)
    with proxy.fault("stall", method="PUT", key=".seg") as fault:
        cluster.configure(polign__delta_limit=300)
        load(connection, "t", random_vectors(400, DIM, 2), 1000)
        wait_until(lambda: fault.hit > 0)
        cluster.configure(polign__delta_limit=0)
        load(connection, "t", random_vectors(2000, DIM, 3), 10_000)
        connection.execute("DELETE FROM t WHERE id BETWEEN 10000 AND 11900")
        connection.execute("VACUUM t")
        for _ in range(3):
            connection.execute("SELECT pg_current_xact_id()")
            connection.execute("VACUUM t")
        load(connection, "t", random_vectors(3000, DIM, 4), 20_000)
    wait_for_workers(connection)
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 200)
    connection.execute("VACUUM t")
    assert flush(connection) > 3000
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 200)
    assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []


def test_rows_that_all_die_while_they_are_uploaded(connection, cluster, proxy):
    vectors = table(connection, 500, 0)
    with proxy.fault("stall", method="PUT", key=".seg") as fault:
        cluster.configure(polign__delta_limit=300)
        load(connection, "t", random_vectors(600, DIM, 2), 1000)
        wait_until(lambda: fault.hit > 0)
        cluster.configure(polign__delta_limit=0)
        connection.execute("DELETE FROM t WHERE id >= 1000")
        connection.execute("VACUUM t")
    wait_for_workers(connection)
    assert info(connection, "rows") == 500
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 200)
    assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []


def test_a_flush_waits_for_a_vacuum_however_long_it_takes(connection, cluster, database, proxy):
    vectors = table(connection, 3000, 0)
    connection.execute("DELETE FROM t WHERE id % 10 = 0")
    connection.execute("SELECT polign.cache_clear()")
    done = []
    with database.connect() as cleaner, database.connect() as flusher:
        with proxy.fault("stall", method="GET", key=".seg") as fault:
            vacuum = threading.Thread(target=lambda: cleaner.execute("VACUUM t"))
            vacuum.start()
            wait_until(lambda: fault.hit > 0)
            load(connection, "t", random_vectors(400, DIM, 2), 10_000)
            thread = threading.Thread(target=lambda: done.append(flush(flusher)))
            thread.start()
            time.sleep(7)
            assert thread.is_alive() and vacuum.is_alive()
        vacuum.join()
        thread.join()
    assert done == [400]
    assert info(connection, "delta_rows") == 0
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_a_flush_waits_for_the_flush_in_the_background(connection, cluster, database, proxy):
    table(connection, 500, 0)
    done = []
    with database.connect() as flusher, proxy.fault("stall", method="PUT", key=".seg") as fault:
        cluster.configure(polign__delta_limit=300)
        load(connection, "t", random_vectors(400, DIM, 2), 1000)
        wait_until(lambda: fault.hit > 0)
        cluster.configure(polign__delta_limit=0)
        load(connection, "t", random_vectors(100, DIM, 3), 10_000)
        thread = threading.Thread(target=lambda: done.append(flush(flusher)))
        thread.start()
        time.sleep(7)
        assert thread.is_alive()
        proxy.lift()
        thread.join()
    assert len(done) == 1 and 0 < done[0] <= 500
    assert (info(connection, "delta_rows"), info(connection, "rows")) == (0, 1000)


@pytest.mark.parametrize("key", ["owner/", "store-id", ".seg"])
def test_a_worker_that_waits_for_the_store_holds_nothing(connection, cluster, database, proxy, key):
    table(connection, 500, 0)
    cluster.restart()  # the worker has to look at everything in the store
    with database.connect() as connection, proxy.fault("stall", key=key) as fault:
        cluster.configure(polign__delta_limit=300)
        load(connection, "t", random_vectors(400, DIM, 2), 1000)
        wait_until(lambda: fault.hit > 0)
        worker = "SELECT backend_xmin, pid FROM pg_stat_activity WHERE backend_type = 'polign maintenance'"
        (xmin, pid), = connection.execute(worker).fetchall()
        assert xmin is None
        locks = "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'relation'"
        assert connection.execute(locks, [pid]).fetchone()[0] == 0
        connection.execute("SET lock_timeout = '3s'")
        connection.execute("DROP INDEX i")


def test_a_parallel_vacuum_flushes_too(connection, cluster):
    create(connection, DIM)
    connection.execute("CREATE INDEX j ON t USING polign_ivf (embedding vector_cosine_ops)")
    vectors = random_vectors(3000, DIM)
    load(connection, "t", vectors)
    cluster.configure(polign__delta_limit=1000, min_parallel_index_scan_size=0)
    connection.execute("SET max_parallel_maintenance_workers = 2")
    connection.execute("DELETE FROM t WHERE id % 9 = 0")
    connection.execute("VACUUM (PARALLEL 2) t")
    assert info(connection, "delta_rows") == info(connection, "delta_rows", "j") == 0
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_flushes_use_pages_again_without_vacuum(connection):
    table(connection, 300, 0)
    sizes = []
    for number in range(6):
        load(connection, "t", random_vectors(2000, DIM, number), 10_000 * (number + 1))
        flush(connection)
        connection.execute("SELECT pg_current_xact_id()")
        sizes.append(connection.execute("SELECT pg_relation_size('i')").fetchone()[0])
    assert sizes[-1] <= sizes[2] * 1.1, sizes


def test_an_index_of_an_unfinished_transaction_starts_no_worker(connection, cluster):
    cluster.configure(polign__delta_limit=100)
    with connection.transaction():
        create(connection, DIM)
        load(connection, "t", random_vectors(1000, DIM))
        time.sleep(0.5)
        assert workers(connection) == 0
    load(connection, "t", random_vectors(300, DIM), 10_000)
    wait_until(lambda: info(connection, "delta_rows") < 100)


def test_all_rows_dead_before_the_flush(connection):
    vectors = table(connection, 300, 200)
    connection.execute("DELETE FROM t WHERE id >= 300")
    connection.execute("VACUUM t")
    assert flush(connection) == 0
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_the_delta_is_flushed_in_the_background_past_its_limit(connection, cluster, database):
    vectors = table(connection, 500, 0)
    cluster.configure(polign__delta_limit=300)
    load(connection, "t", random_vectors(900, DIM, 4), 1000)
    wait_until(lambda: info(connection, "delta_rows") < 300)
    assert info(connection, "rows") == 1400
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_vacuum_flushes_what_is_over_the_limit(connection, cluster):
    vectors = table(connection, 500, 700)
    cluster.configure(polign__delta_limit=300)
    connection.execute("VACUUM t")
    assert info(connection, "delta_rows") == 0
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_vacuum_warns_when_it_cannot_flush(connection, cluster, proxy):
    table(connection, 0, 700)
    cluster.configure(polign__delta_limit=300, polign__fetch_timeout="1s")
    warnings = []
    connection.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
    with proxy.refusing():
        connection.execute("VACUUM t")
    assert len(warnings) == 1 and "s3://" in warnings[0], warnings
    assert info(connection, "delta_rows") == 700


def test_the_first_flush_of_an_empty_index_makes_cells(connection):
    """Recall at the default target, and fewer codes scanned than there are rows."""
    create(connection, DIM)
    vectors = random_vectors(6000, DIM)
    load(connection, "t", vectors)
    assert flush(connection) == 6000
    assert info(connection, "lists") > 5
    connection.execute("RESET polign.target_recall")
    asked = random_vectors(60, DIM, 77)
    assert mean_recall(connection, "t", "i", "l2", vectors, asked) >= 0.93
    assert connection.execute("SELECT codes_scanned FROM polign.last_scan()").fetchone()[0] < 6000
    connection.execute("SET polign.target_recall = 1")
    assert_equals_exact(connection, "t", "i", "l2", asked[:5], 50)


def test_inserts_go_on_while_the_store_is_down(connection, cluster, database, proxy):
    vectors = table(connection, 500, 0)
    cluster.configure(polign__delta_limit=200, polign__fetch_timeout="1s")
    warnings = []
    with database.connect() as writer:
        writer.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
        with proxy.refusing():
            end = time.monotonic() + 60
            batch = 0
            while not any("cannot be moved to its store" in text for text in warnings):
                assert time.monotonic() < end, "nobody was told"
                began = time.monotonic()
                load(writer, "t", random_vectors(150, DIM, 100 + batch), 1000 + 150 * batch)
                assert time.monotonic() - began < 5, "inserting waits for the store"
                batch += 1
                time.sleep(0.2)
            assert "the server log says why" in info(connection, "recommendation")
        told = len(warnings)
        end = time.monotonic() + 90
        while info(connection, "delta_rows") >= 200:
            assert time.monotonic() < end, "it is not tried again"
            load(writer, "t", random_vectors(60, DIM, 900 + batch), 1000 + 150 * batch)
            batch += 1
            time.sleep(0.3)
        assert told == 1, warnings
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_a_flush_holds_no_lock_while_it_uploads(connection, database, proxy):
    """DROP and REINDEX do not wait for the store."""
    table(connection, 400, 200)
    errors = []

    def flush_and_note(flusher):
        try:
            flush(flusher)
        except psycopg.Error as error:
            errors.append(error)

    with database.connect() as flusher, proxy.fault("stall", method="PUT", key=".seg", times=1) as fault:
        thread = threading.Thread(target=flush_and_note, args=[flusher])
        thread.start()
        wait_until(lambda: fault.hit > 0)
        connection.execute("SET lock_timeout = '5s'")
        connection.execute("REINDEX INDEX i")
        proxy.lift()
        thread.join()
    assert len(errors) == 1 and "was rebuilt" in str(errors[0])
    assert info(connection, "delta_rows") == 0
    connection.execute("DROP INDEX i")


def test_a_cancelled_flush_ends_its_worker_and_changes_nothing(connection, database, proxy):
    vectors = table(connection, 400, 200)
    with proxy.fault("stall", method="PUT", key=".seg"):
        connection.execute("SET statement_timeout = '2s'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            flush(connection)
        connection.execute("RESET statement_timeout")
        wait_for_workers(connection)
    assert info(connection, "delta_rows") == 200
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)
    assert flush(connection) == 200


def test_the_error_of_a_flush_is_the_stores(connection, cluster, proxy):
    table(connection, 400, 200)
    cluster.configure(polign__fetch_timeout="1s")
    with proxy.refusing(), pytest.raises(psycopg.errors.IoError) as error:
        flush(connection)
    assert "s3://" in error.value.diag.message_primary
    assert info(connection, "delta_rows") == 200


def test_only_the_owner_may_flush(connection, user):
    table(connection, 100, 10)
    connection.execute("GRANT SELECT ON t TO PUBLIC")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="must be owner of index i"):
        flush(user)
    with pytest.raises(psycopg.errors.WrongObjectType):
        flush(connection, "t")


def test_a_temporary_index_is_flushed_by_its_own_session(database):
    with database.connect() as connection:
        connection.execute(f"CREATE TEMP TABLE t (id int, embedding vector({DIM}))")
        connection.execute("CREATE INDEX i ON t USING polign_ivf (embedding vector_l2_ops)")
        connection.execute("SET polign.target_recall = 1")
        vectors = random_vectors(500, DIM)
        load(connection, "t", vectors)
        assert flush(connection) == 500
        assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_flush_in_a_transaction_that_has_the_table_locked_fails_in_time(connection):
    table(connection, 200, 100)
    with connection.transaction():
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        assert flush(connection) == 100, "only the index has to be free"


def test_pages_of_flushed_rows_are_used_again(connection):
    table(connection, 300, 0)
    sizes = []
    for round_ in range(8):
        load(connection, "t", random_vectors(1500, DIM, round_), 10_000 * (round_ + 1))
        flush(connection)
        connection.execute("VACUUM t")
        sizes.append(connection.execute("SELECT pg_relation_size('i')").fetchone()[0])
    assert sizes[-1] <= sizes[0] * 3, sizes


def test_concurrent_inserts_searches_vacuum_and_flushes(connection, database):
    vectors = table(connection, 1000, 0)
    stop = threading.Event()
    failures = []

    def work(job):
        with database.connect() as own:
            own.execute("SET polign.target_recall = 1")
            step = 0
            while not stop.is_set():
                step += 1
                try:
                    job(own, step)
                except Exception as error:  # noqa: BLE001 - every failure is one of the test
                    failures.append(error)
                    return

    def insert(start):
        def job(own, step):
            load(own, "t", random_vectors(40, DIM, start + step), start + 40 * step)
            first = start + 40 * step
            own.execute("DELETE FROM t WHERE id BETWEEN %s AND %s", [first, first + 10])
        return job

    def look(own, step):
        row = step * 7 % 1000
        found = search(own, "t", "l2", vectors[row], 5)
        assert found.ids[0] == row and len(set(found.ids)) == 5

    jobs = [insert(1_000_000), insert(2_000_000), look, look,
            lambda own, _: own.execute("VACUUM t"), lambda own, _: flush(own)]
    threads = [threading.Thread(target=work, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    time.sleep(12)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 200)
