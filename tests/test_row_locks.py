"""Rows that a search locks, or changes, while other sessions change them."""

import threading

import pytest

from dev.datasets import vector_text
from dev.process import wait_until
from tests.harness.cluster import assert_index_used
from tests.harness.search import Searchable
from tests.harness.tables import INDEX, ROWS, assert_right, create_table, vector, vectors

PLACE = vectors(9000, 9001)[0]
"""A vector that no row of the table has."""


@pytest.fixture
def table(connection):
    create_table(connection)
    connection.execute(INDEX)
    return connection


@pytest.fixture
def other(table, database):
    with database.connect() as other:
        yield other


def put(connection, row: int) -> None:
    connection.execute("INSERT INTO t VALUES (%s, %s::vector)", (row, vector_text(PLACE)))


def wait_for_lock(connection, pid: int) -> None:
    waits = f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
    wait_until(lambda: connection.execute(waits).fetchone(), 10, "the other session does not wait")


@pytest.mark.parametrize(("change", "expected"), [
    # Row 10000 no longer passes the filter: the next one takes its place.
    ("UPDATE t SET note = 'out' WHERE id = 10000", [(10_001, None), (10_002, None)]),
    ("DELETE FROM t WHERE id = 10000", [(10_001, None), (10_002, None)]),
    # It still passes, and comes as it is now.
    ("UPDATE t SET note = 'in' WHERE id = 10000", [(10_000, "in"), (10_001, None)]),
    (f"UPDATE t SET note = 'in', embedding = '{vector(5)}' WHERE id = 10000",
     [(10_000, "in"), (10_001, None)]),
], ids=["filtered", "deleted", "changed", "moved"])
def test_select_for_update_waits_and_looks_again(table, other, change, expected):
    """At read committed a row that was locked is taken in its newest version, if that passes the filter."""
    for row in range(10_000, 10_003):
        place = PLACE.copy()
        place[0] += (row - 10_000) / 1000
        table.execute("INSERT INTO t VALUES (%s, %s::vector)", (row, vector_text(place)))
    sql = (f"SELECT id, note FROM t WHERE note IS DISTINCT FROM 'out' "
           f"ORDER BY embedding <=> '{vector_text(PLACE)}' LIMIT 2 FOR UPDATE")
    # At the default target one of three rows so near each other may be taken for a farther one.
    other.execute("SET enable_seqscan = off; SET enable_sort = off; SET polign.target_recall = 1")
    Searchable(where="note IS DISTINCT FROM 'out'").by_index(other, [PLACE])
    found = []
    with table.transaction():
        table.execute(change)
        waiting = threading.Thread(target=lambda: found.extend(other.execute(sql).fetchall()))
        waiting.start()
        wait_for_lock(table, other.info.backend_pid)
    waiting.join(10)
    assert found == expected
    assert_right(table)


@pytest.mark.parametrize("target_recall", [0, 1])
def test_rows_of_a_search_have_their_ctid(table, target_recall):
    table.execute("SET enable_seqscan = off; SET enable_sort = off")
    table.execute(f"SET polign.target_recall = {target_recall}")
    nearest = f"FROM t ORDER BY embedding <=> '{vector_text(PLACE)}' LIMIT 700"
    rows = table.execute(f"SELECT ctid, id {nearest}").fetchall()
    assert dict(rows).items() <= dict(table.execute("SELECT ctid, id FROM t").fetchall()).items()
    deleted = table.execute(f"DELETE FROM t WHERE ctid = ANY(ARRAY(SELECT ctid {nearest})) RETURNING id")
    assert sorted(deleted.fetchall()) == sorted((row,) for _, row in rows)
    assert_right(table)


def test_select_for_update_locks_its_rows_alone(table, other):
    sql = f"SELECT id FROM t ORDER BY embedding <=> '{vector_text(PLACE)}' LIMIT 10 FOR UPDATE"
    size = "SELECT pg_relation_size('t')"
    before = table.execute(size).fetchone()
    with table.transaction():
        table.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        assert_index_used(table, "t_polign", sql)
        locked = {row for (row,) in table.execute(sql)}
        free = {row for (row,) in other.execute("SELECT id FROM t FOR UPDATE SKIP LOCKED")}
    assert len(locked) == 10
    assert free == set(range(ROWS)) - locked
    assert table.execute(size).fetchone() == before


def test_select_for_update_skips_locked_rows(table, other):
    for row in (10_000, 10_001):
        put(table, row)
    sql = f"SELECT id FROM t ORDER BY embedding <=> '{vector_text(PLACE)}' LIMIT 1 FOR UPDATE SKIP LOCKED"
    taken = []
    with table.transaction(), other.transaction():
        for session in (table, other):
            session.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
            taken += session.execute(sql).fetchall()
    assert sorted(taken) == [(10_000,), (10_001,)]


def test_an_update_of_the_nearest_rows_waits_for_another(table, other):
    put(table, 10_000)
    nearest = f"SELECT id FROM t ORDER BY embedding <=> '{vector_text(PLACE)}' LIMIT 1"
    other.execute("SET enable_seqscan = off; SET enable_sort = off")
    with table.transaction():
        table.execute("UPDATE t SET note = 'first' WHERE id = 10000")
        waiting = threading.Thread(
            target=other.execute, args=(f"UPDATE t SET note = note || ', second' WHERE id = ({nearest})",)
        )
        waiting.start()
        wait_for_lock(table, other.info.backend_pid)
    waiting.join(10)
    assert table.execute("SELECT note FROM t WHERE id = 10000").fetchone() == ("first, second",)
    assert_right(table)
