"""Transactions: what a snapshot sees, the index finds, and nothing else."""

import psycopg
import pytest

from dev.datasets import load, vector_text
from tests.harness.search import Searchable
from tests.harness.tables import INDEX, ROWS, TABLE, assert_right, churn, create_table, vector, vectors

PLACE = vectors(9000, 9001)[0]
"""A vector that no row of the table has: rows put there are found first, in the order of their notes."""


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


def put_rows(connection, searchable: Searchable = TABLE) -> list[int]:
    """The rows that were put at PLACE, by the index."""
    (found,) = searchable.by_index(connection, [PLACE], 20)
    return sorted(row for row, distance in zip(found.ids, found.distances, strict=True) if distance < 1e-6)


@pytest.mark.smoke
def test_savepoints(table, other):
    with table.transaction():
        put(table, 10_000)
        table.execute("SAVEPOINT a")
        put(table, 10_001)
        table.execute("SAVEPOINT b; DELETE FROM t WHERE id = 10000; UPDATE t SET id = -1 WHERE id = 10001")
        assert put_rows(table) == [-1]
        table.execute("ROLLBACK TO b")
        assert put_rows(table) == [10_000, 10_001]
        table.execute("ROLLBACK TO a")
        assert put_rows(table) == [10_000]
        put(table, 10_002)
        table.execute("RELEASE a")
        assert_right(table)
        assert put_rows(other) == []
    for session in (table, other):
        assert put_rows(session) == [10_000, 10_002]
        assert_right(session)


@pytest.mark.parametrize("end", ["ROLLBACK", "SELECT 1 / 0", "terminated"])
def test_an_aborted_transaction_leaves_nothing(table, database, end):
    other = database.connect()
    other.execute("BEGIN")
    put(other, 10_000)
    churn(other)
    assert put_rows(other) == [10_000]
    if end == "terminated":
        table.execute(f"SELECT pg_terminate_backend({other.info.backend_pid}, 10000)")
    elif end == "ROLLBACK":
        other.execute(end)
    else:
        with pytest.raises(psycopg.errors.DivisionByZero):
            other.execute(end)
    other.close()
    assert put_rows(table) == []
    assert_right(table)
    table.execute("VACUUM t")
    assert_right(table)
    assert delta_rows(table) == 0


def test_two_phase_commit(cluster, database):
    with database.connect() as connection:
        create_table(connection)
        connection.execute(INDEX)
        for name, row in (("kept", 10_000), ("dropped", 10_001)):
            connection.execute("BEGIN")
            put(connection, row)
            connection.execute(f"DELETE FROM t WHERE id = {row - 10_000}")
            connection.execute(f"PREPARE TRANSACTION '{name}'")
        assert put_rows(connection) == []
        connection.execute("VACUUM t")
        assert_right(connection)
        cluster.crash()
    cluster.start()
    with database.connect() as connection:
        assert put_rows(connection) == []
        connection.execute("COMMIT PREPARED 'kept'")
        connection.execute("ROLLBACK PREPARED 'dropped'")
        assert put_rows(connection) == [10_000]
        assert_right(connection)
        # An index built in a transaction that is prepared.
        connection.execute("BEGIN; DROP INDEX t_polign")
        connection.execute(INDEX)
        churn(connection)
        connection.execute("PREPARE TRANSACTION 'built'")
    cluster.restart()
    with database.connect() as connection:
        connection.execute("COMMIT PREPARED 'built'")
        assert_right(connection)


def test_serializable_searches_conflict_with_inserts(table, other):
    """Each of two transactions searches, and puts a row where the other has searched."""
    for session in (table, other):
        session.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
        assert put_rows(session) == []
    put(table, 10_000)
    put(other, 10_001)
    table.execute("COMMIT")
    with pytest.raises(psycopg.errors.SerializationFailure):
        other.execute("COMMIT")
    assert put_rows(other) == [10_000]
    assert_right(other)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_sees_the_same_rows_however_long_it_lasts(table, other, level):
    churn(table)
    with other.transaction():
        other.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        before = TABLE.by_index(other, vectors(0, 5), 100_000, target_recall=1)
        for _ in range(3):
            table.execute("DELETE FROM t WHERE id % 3 = 0")
            table.execute("VACUUM t")
            churn(table)
        assert TABLE.by_index(other, vectors(0, 5), 100_000, target_recall=1) == before
        assert_right(other)
        assert_right(table)
    table.execute("VACUUM t")
    churn(table)
    for session in (table, other):
        assert_right(session)


def test_a_statement_in_read_committed_sees_what_was_committed_before_it(table, other):
    with other.transaction():
        assert put_rows(other) == []
        put(table, 10_000)
        assert put_rows(other) == [10_000]
        table.execute("DELETE FROM t WHERE id = 10000")
        assert put_rows(other) == []


def test_a_cursor_sees_the_rows_of_its_own_snapshot(table, other):
    with other.transaction():
        other.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        other.execute("SET LOCAL polign.target_recall = 1")
        (before,) = TABLE.by_index(other, [PLACE], 100_000, target_recall=1)
        other.execute(f"DECLARE c CURSOR FOR {TABLE.sql(100_000)}", {"q": vector_text(PLACE)})
        fetched = other.execute("FETCH 100 FROM c").fetchall()
        put(table, 10_000)
        table.execute("DELETE FROM t WHERE id % 2 = 0")
        table.execute("VACUUM (TRUNCATE off) t")  # that would wait for the cursor's lock
        fetched += other.execute("FETCH ALL FROM c").fetchall()
    assert [row[0] for row in fetched] == before.ids


# How rows are updated and loaded.


def updates(connection) -> tuple[int, int]:
    """Updates of t so far: all, and those that gave the index nothing to do."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    return connection.execute(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 't'"
    ).fetchone()


def delta_rows(connection) -> int:
    return connection.execute("SELECT delta_rows FROM polign.index_info('t_polign')").fetchone()[0]


def test_hot_updates(connection, database):
    """They leave the index as it is; the row is found through the place of its first version."""
    connection.execute("CREATE TABLE t (id int PRIMARY KEY, embedding vector(64), note text) "
                       "WITH (fillfactor = 50)")
    load(connection, "t", vectors(0, ROWS))
    connection.execute("ANALYZE t")
    connection.execute(INDEX)
    with database.connect() as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        assert_right(old)
        for note in ("a", "b"):
            connection.execute(f"UPDATE t SET note = '{note}' WHERE id % 20 = 3")
        every, hot = updates(connection)
        assert every == hot == 2 * ROWS / 20
        assert delta_rows(connection) == 0
        for session in (old, connection):
            assert_right(session)
        old.execute("COMMIT")
    connection.execute("VACUUM t")
    assert_right(connection)
    assert_right(connection, Searchable(where="note = 'b'"))
    # Now the vector of a row in a chain changes, then the row itself goes.
    connection.execute(f"UPDATE t SET embedding = '{vector(9000)}' WHERE id % 40 = 3")
    assert updates(connection)[1] == hot
    assert delta_rows(connection) == -(-(ROWS - 3) // 40)
    assert_right(connection)
    connection.execute("UPDATE t SET note = 'c' WHERE id % 20 = 3; DELETE FROM t WHERE id % 80 = 3")
    for statement in ("SELECT 1", "VACUUM t", "REINDEX INDEX t_polign"):
        connection.execute(statement)
        assert_right(connection)


def test_an_index_built_over_broken_hot_chains(connection, database):
    """Before there was the index, updates of the vector were HOT: an older snapshot must not use it."""
    connection.execute("CREATE TABLE t (id int PRIMARY KEY, embedding vector(64), note text) "
                       "WITH (fillfactor = 50)")
    load(connection, "t", vectors(0, ROWS))
    connection.execute("ANALYZE t")
    with database.connect() as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        expected = TABLE.by_sort(old, PLACE, ROWS)
        connection.execute(f"UPDATE t SET embedding = '{vector(9000)}' WHERE id % 20 = 3")
        assert updates(connection)[1] > 0
        connection.execute(INDEX)
        ((broken,),) = connection.execute(
            "SELECT indcheckxmin FROM pg_index WHERE indexrelid = 't_polign'::regclass"
        )
        assert broken
        old.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        sql = TABLE.sql(ROWS)
        assert old.execute(sql, {"q": vector_text(PLACE)}).fetchall() == list(
            zip(expected.ids, expected.distances, strict=True)
        )
        old.execute("COMMIT")
    assert_right(connection)
    connection.execute("VACUUM t")
    assert_right(connection)


@pytest.mark.parametrize("form", ["text", "csv", "binary", "freeze"])
def test_copy(table, form):
    options = "" if form == "freeze" else f"(FORMAT {form})"
    with table.cursor().copy(f"COPY (SELECT * FROM t WHERE id < 700) TO STDOUT {options}") as copy:
        data = b"".join(copy)

    def copy_in(sql: str) -> None:
        with table.cursor().copy(sql) as copy:
            copy.write(data)

    if form == "freeze":
        table.execute("BEGIN; TRUNCATE t")
        copy_in("COPY t FROM STDIN (FREEZE)")
        table.execute("COMMIT")
    else:
        table.execute("DELETE FROM t WHERE id < 700")
        copy_in(f"COPY t FROM STDIN {options}")
    assert_right(table)
    # The last row is there already: none of them counts.
    with pytest.raises(psycopg.errors.UniqueViolation):
        copy_in(f"COPY t FROM STDIN {options}")
    assert_right(table)
    table.execute("VACUUM t")
    assert_right(table)


def test_insert_on_conflict_and_merge(table):
    rows = f"(VALUES (1, '{vector(9001)}'::vector), (10000, '{vector(9000)}'), (2, NULL)) AS r(id, embedding)"
    table.execute(
        f"INSERT INTO t SELECT * FROM {rows} ON CONFLICT (id) DO UPDATE SET embedding = EXCLUDED.embedding"
    )
    assert put_rows(table) == [10_000]
    assert_right(table)
    table.execute(
        f"MERGE INTO t USING {rows} ON t.id = r.id WHEN MATCHED AND t.id = 1 THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET embedding = r.embedding, note = 'merged' "
        "WHEN NOT MATCHED THEN INSERT VALUES (r.id, r.embedding)"
    )
    table.execute(f"INSERT INTO t VALUES (10000, '{vector(1)}') ON CONFLICT DO NOTHING")
    assert put_rows(table) == [10_000]
    assert_right(table)
