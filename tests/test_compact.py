"""Compaction: flushed rows come to those of their cells, dead ones go, and nobody notices."""

import threading
import time

import numpy as np
import psycopg
import pytest

from dev.datasets import load
from tests.harness.search import assert_equals_exact, mean_recall, search
from tests.harness.vectors import random_vectors
from tests.test_flush import DIM, flush, info, queries, table, wait_until


def compact(connection, index: str = "i") -> int:
    return connection.execute("SELECT polign.compact(%s)", [index]).fetchone()[0]


def churn(connection, first: int, rows: int, rounds: int) -> np.ndarray:
    """Replaces random rows round by round, each round vacuumed and flushed; the new vectors, whose ids begin
    with `first`."""
    new = []
    for number in range(rounds):
        connection.execute(f"DELETE FROM t WHERE (id * 7919 + {number}) % {2 * rounds} = 0")
        vectors = random_vectors(rows, DIM, 40 + number)
        load(connection, "t", vectors, first + rows * number)
        connection.execute("VACUUM t")
        flush(connection)
        new.append(vectors)
    return np.concatenate(new)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_a_compacted_index_finds_what_it_found_before(connection, by_hand, metric):
    vectors = table(connection, 3000, 0, metric)
    new = churn(connection, 3000, 400, 3)
    asked = np.concatenate([queries(vectors), queries(new)])
    assert info(connection, "objects") == 4 and info(connection, "tombstones") > 0
    assert_equals_exact(connection, "t", "i", metric, asked, 60)
    assert compact(connection) > 0
    assert info(connection, "objects") == 1
    assert (info(connection, "tombstones"), info(connection, "delta_rows")) == (0, 0)
    live = connection.execute("SELECT count(*) FROM t").fetchone()[0]
    assert info(connection, "rows") == live
    assert_equals_exact(connection, "t", "i", metric, asked, 60)
    assert compact(connection) == 0, "there is nothing left to do"


def test_compaction_flushes_first(connection, by_hand):
    vectors = table(connection, 1000, 300)
    compact(connection)
    assert (info(connection, "delta_rows"), info(connection, "objects")) == (0, 1)
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 60)


def test_cells_that_grow_are_split_and_found_by_rows_of_before(connection, database):
    """A session inserts by the root of before; its rows name cells that are no more."""
    table(connection, 2000, 0)
    crowd = (random_vectors(3000, DIM, 9) * np.float32(0.3) + np.float32(2)).astype(np.float32)
    with database.connect() as other:
        other.execute("SET polign.target_recall = 1")
        load(other, "t", crowd[:1000], 10_000)
        before = info(connection, "lists")
        compact(connection)
        assert info(connection, "lists") > before
        load(other, "t", crowd[1000:2000], 20_000)
        assert_equals_exact(other, "t", "i", "l2", crowd[::600], 60)
        compact(connection)
        load(other, "t", crowd[2000:], 30_000)
        assert_equals_exact(other, "t", "i", "l2", crowd[::600], 60)
    assert info(connection, "cell_rows_max") < 2000


def test_recall_after_half_of_the_rows_were_replaced(connection, by_hand):
    vectors = table(connection, 6000, 0)
    base = np.concatenate([vectors, churn(connection, 6000, 1000, 3)])
    compact(connection)
    connection.execute("RESET polign.target_recall")
    live = [row[0] for row in connection.execute("SELECT id FROM t")]
    assert len(live) == info(connection, "rows")
    gone = np.setdiff1d(np.arange(len(base)), live)
    base[gone] = 1e4
    asked = random_vectors(60, DIM, 78)
    assert mean_recall(connection, "t", "i", "l2", base, asked) >= 0.92


def test_rows_that_die_while_a_compaction_uploads_stay_dead(connection, cluster, proxy):
    """VACUUM sets tombstones on segments that are being replaced; the heap reuses the TIDs."""
    vectors = table(connection, 2000, 0)
    connection.execute("DELETE FROM t WHERE id % 3 = 0")
    with proxy.fault("stall", method="PUT", key=".seg") as fault:
        connection.execute("VACUUM t")  # a third is dead: a worker begins
        wait_until(lambda: fault.hit > 0)
        cluster.configure(polign__delta_limit=0)
        epoch = info(connection, "epoch")
        connection.execute("DELETE FROM t WHERE id % 3 = 1")
        connection.execute("VACUUM t")
        pages = connection.execute("SELECT pg_relation_size('t')").fetchone()
        new = random_vectors(500, DIM, 6) + np.float32(30)
        load(connection, "t", new, 50_000)
        assert connection.execute("SELECT pg_relation_size('t')").fetchone() == pages, "TIDs are reused"
        assert info(connection, "epoch") == epoch, "the compaction still waits"
    wait_until(lambda: info(connection, "epoch") > epoch)
    everything = np.concatenate([vectors[::100], new[:5]])
    assert_equals_exact(connection, "t", "i", "l2", everything, 1300)
    connection.execute("VACUUM t")
    assert_equals_exact(connection, "t", "i", "l2", everything, 1300)


def test_a_worker_compacts_when_much_is_dead(connection):
    vectors = table(connection, 2000, 0)
    connection.execute("DELETE FROM t WHERE id % 2 = 0")
    connection.execute("VACUUM t")
    wait_until(lambda: info(connection, "tombstones") == 0)
    assert info(connection, "rows") == 1000
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 60)


def test_many_flushes_do_not_pile_up(connection, cluster):
    table(connection, 2000, 0)
    cluster.configure(polign__delta_limit=150)
    for number in range(8):
        load(connection, "t", random_vectors(500, DIM, number), 10_000 * (number + 1))
        wait_until(lambda: info(connection, "delta_rows") < 400)
    wait_until(lambda: info(connection, "objects") <= 6)
    assert info(connection, "rows") == 6000


def test_rows_that_come_during_a_compaction_are_flushed_after_it(connection, cluster, proxy):
    """Nobody starts a worker for them: one was there."""
    vectors = table(connection, 2000, 0)
    cluster.configure(polign__delta_limit=300)
    connection.execute("DELETE FROM t WHERE id % 2 = 0")
    with proxy.fault("stall", method="PUT", key=".seg") as fault:
        connection.execute("VACUUM t")
        wait_until(lambda: fault.hit > 0)
        load(connection, "t", random_vectors(1000, DIM, 6), 10_000)
        connection.execute("VACUUM t")
    wait_until(lambda: info(connection, "delta_rows") < 300 and info(connection, "tombstones") == 0)
    assert info(connection, "rows") == 2000
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 60)


def test_an_old_snapshot_sees_its_rows_after_a_compaction(connection, database):
    vectors = table(connection, 1500, 300)
    with database.connect() as old:
        old.execute("SET polign.target_recall = 1")
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        before = [search(old, "t", "l2", query, 20) for query in queries(vectors)]
        connection.execute("DELETE FROM t WHERE id % 2 = 0")
        connection.execute("VACUUM t")
        compact(connection)
        connection.execute("VACUUM t")
        assert [search(old, "t", "l2", query, 20) for query in queries(vectors)] == before
        old.execute("COMMIT")
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)


def test_a_cursor_goes_on_over_a_compaction(connection, database):
    vectors = table(connection, 2000, 500)
    with database.connect() as other:
        other.execute("SET polign.target_recall = 1; SET enable_seqscan = off")
        other.execute("BEGIN")
        text = "[" + ",".join(map(str, vectors[5])) + "]"
        other.execute(f"DECLARE c CURSOR FOR SELECT id FROM t ORDER BY embedding <-> '{text}' LIMIT 2500")
        first = [row[0] for row in other.execute("FETCH 10 FROM c")]
        connection.execute("DELETE FROM t WHERE id % 5 = 4")
        compact(connection)
        connection.execute("VACUUM t")
        rest = [row[0] for row in other.execute("FETCH ALL FROM c")]
        other.execute("COMMIT")
    assert sorted(first + rest) == list(range(2500)), "the snapshot of the cursor, each row once"


def test_a_cancelled_compaction_changes_nothing(connection, by_hand, proxy):
    vectors = table(connection, 1500, 0)
    load(connection, "t", random_vectors(300, DIM, 3), 10_000)
    flush(connection)
    epoch = info(connection, "epoch")
    with proxy.fault("stall", method="PUT", key=".seg"):
        connection.execute("SET statement_timeout = '2s'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            compact(connection)
        connection.execute("RESET statement_timeout")
    assert info(connection, "epoch") == epoch
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 30)
    assert compact(connection) == 1800


def test_pages_of_replaced_roots_are_used_again(connection):
    table(connection, 2000, 0)
    sizes = []
    for number in range(5):
        load(connection, "t", random_vectors(500, DIM, number), 10_000 * (number + 1))
        connection.execute(f"DELETE FROM t WHERE id / 10000 = {number}")
        compact(connection)
        connection.execute("VACUUM t")
        sizes.append(connection.execute("SELECT pg_relation_size('i')").fetchone()[0])
    assert sizes[-1] <= sizes[1] * 1.3, sizes


def test_searches_inserts_vacuum_and_compactions_at_once(connection, database):
    vectors = table(connection, 2000, 0)
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

    def insert(own, step):
        first = 100_000 + 50 * step
        load(own, "t", random_vectors(50, DIM, step), first)
        own.execute("DELETE FROM t WHERE id BETWEEN %s AND %s", [first - 200, first - 170])

    def look(own, step):
        row = step * 7 % 2000
        found = search(own, "t", "l2", vectors[row], 5)
        assert found.ids[0] == row and len(set(found.ids)) == 5

    jobs = [insert, look, look, lambda own, _: own.execute("VACUUM t"), lambda own, _: compact(own)]
    threads = [threading.Thread(target=work, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    time.sleep(12)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 200)
