"""What is done to a table or an index leaves searches right, before and after."""

import threading

import psycopg
import pytest

from dev.datasets import load
from dev.process import wait_until
from tests.harness.cluster import indexes_used
from tests.harness.search import Searchable
from tests.harness.tables import (
    INDEX,
    ROWS,
    TABLE,
    assert_right,
    churn,
    create_table,
    questions,
    vector,
    vectors,
)

CONCURRENTLY = INDEX.replace("INDEX", "INDEX CONCURRENTLY")
RECREATE = "DROP INDEX t_polign; " + INDEX


def name(statement: str) -> str:
    """Of a test, by what it runs."""
    return statement.split(" t_polign")[0].split(" USING")[0]


@pytest.fixture
def table(connection):
    """Table t, indexed and then changed: rows of segments and of the delta, dead ones among both."""
    create_table(connection)
    connection.execute(INDEX)
    churn(connection)
    return connection


def is_valid(connection, index="t_polign") -> bool:
    ((valid,),) = connection.execute(
        f"SELECT indisvalid FROM pg_index WHERE indexrelid = '{index}'::regclass"
    )
    return valid


def index_id(connection) -> str:
    return connection.execute("SELECT index_id FROM polign.index_info('t_polign')").fetchone()[0]


REWRITES = [
    "REINDEX INDEX t_polign",
    "REINDEX TABLE t",
    "VACUUM FULL t",
    "CLUSTER t USING t_pkey",
    "ALTER TABLE t SET UNLOGGED",
    "ALTER TABLE t SET UNLOGGED; ALTER TABLE t SET LOGGED",
    "ALTER TABLE t ALTER note TYPE varchar(20)",
    "ALTER TABLE t ALTER embedding TYPE vector(64) USING embedding::halfvec(64)::vector(64)",
    "REINDEX INDEX CONCURRENTLY t_polign",
    "REINDEX TABLE CONCURRENTLY t",
]
IN_TRANSACTIONS = [r for r in REWRITES if "CONCURRENTLY" not in r and "VACUUM" not in r]


@pytest.mark.parametrize("statement", REWRITES, ids=name)
def test_a_rewrite_leaves_searches_right(table, database, statement):
    before = index_id(table)
    with database.connect() as other:
        assert_right(other)
        for part in statement.split(";"):
            table.execute(part)
        assert index_id(table) != before
        for session in (other, table):
            assert_right(session)
        churn(other)
        table.execute("VACUUM t")
        for session in (other, table):
            assert_right(session)


@pytest.mark.parametrize("statement", [*IN_TRANSACTIONS, "TRUNCATE t", RECREATE], ids=name)
def test_a_rewrite_that_is_rolled_back_changes_nothing(table, statement):
    before = index_id(table)
    with pytest.raises(ZeroDivisionError), table.transaction():
        table.execute(statement)
        assert_right(table, about=0)
        raise ZeroDivisionError
    assert index_id(table) == before
    churn(table)
    assert_right(table)


def test_a_table_cannot_be_clustered_by_it(table):
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="clustering"):
        table.execute("CLUSTER t USING t_polign")


def test_truncate(table, database):
    with database.connect() as other:
        assert_right(other)
        table.execute("TRUNCATE t")
        for session in (other, table):
            assert TABLE.by_index(session, questions(1))[0].ids == []
        with table.transaction():
            load(table, "t", vectors(0, ROWS))
            assert_right(table)
            table.execute("TRUNCATE t")
            load(table, "t", vectors(0, ROWS))
        for session in (other, table):
            assert_right(session)


def test_drop_index(table, database, cluster):
    ((path,),) = table.execute("SELECT pg_relation_filepath('t_polign')")
    table.execute("CHECKPOINT")
    with database.connect() as other:
        other.execute("SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off")
        other.execute(f"PREPARE s AS SELECT id FROM t ORDER BY embedding <=> '{vector(3)}' LIMIT 5")
        assert indexes_used(other, "EXECUTE s") == ["t_polign"]
        found = other.execute("EXECUTE s").fetchall()
        table.execute("DROP INDEX t_polign; CHECKPOINT")
        assert indexes_used(other, "EXECUTE s") == []
        assert other.execute("EXECUTE s").fetchall() == found
    file = cluster.postgres.data / path
    wait_until(lambda: not file.exists() or not file.stat().st_size, 10, f"{path} is not removed")
    table.execute(INDEX)
    assert_right(table)
    table.execute("DROP INDEX CONCURRENTLY t_polign")
    table.execute(INDEX)
    assert_right(table)
    table.execute("DROP TABLE t")
    assert table.execute("SELECT to_regclass('t_polign')").fetchone() == (None,)


# Concurrently.


def run(database, statement: str) -> tuple[threading.Thread, list[psycopg.Error]]:
    """Runs a statement in a session of its own; what it raises is in the list once the thread ended."""
    errors: list[psycopg.Error] = []

    def work():
        try:
            database.execute(statement)
        except psycopg.Error as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


def wait_for_phase(connection, phase: str) -> int:
    """Waits until an index build is there; returns the pid of its backend."""
    builds = f"SELECT pid FROM pg_stat_progress_create_index WHERE phase = '{phase}'"
    return wait_until(lambda: connection.execute(builds).fetchone(), 30, f"no build {phase}")[0]


@pytest.mark.parametrize("statement", [CONCURRENTLY, "REINDEX INDEX CONCURRENTLY t_polign"], ids=name)
def test_rows_written_during_a_concurrent_build_are_in_the_index(connection, database, proxy, statement):
    create_table(connection)
    if statement != CONCURRENTLY:
        connection.execute(INDEX)
        churn(connection)
    with proxy.fault("delay", "PUT", seconds=0.5), database.connect() as writer:
        thread, errors = run(database, statement)
        wait_for_phase(connection, "building index: writing segments")
        # Of rows that this transaction writes the new index learns at its validation only.
        with writer.transaction():
            churn(writer)
            wait_for_phase(connection, "waiting for writers before validation")
        thread.join(60)
    assert not errors
    assert is_valid(connection)
    assert_right(connection)
    connection.execute("DELETE FROM t WHERE id % 10 = 4")
    connection.execute("VACUUM t")
    assert_right(connection)


REMEDIES = [RECREATE, "REINDEX INDEX t_polign", "REINDEX INDEX CONCURRENTLY t_polign"]


def assert_invalid_and_mendable(connection, remedy: str) -> None:
    """The table can be used meanwhile, and the index afterwards."""
    assert not is_valid(connection)
    connection.execute("SET enable_seqscan = off")
    churn(connection)
    connection.execute("VACUUM t")
    assert indexes_used(connection, TABLE.sql(5).replace("%(q)s", f"'{vector(0)}'")) == []
    connection.execute(remedy)
    assert is_valid(connection)
    assert_right(connection)


@pytest.mark.parametrize("remedy", REMEDIES, ids=name)
def test_a_concurrent_build_that_the_store_fails_leaves_an_invalid_index(connection, proxy, remedy):
    create_table(connection)
    with proxy.fault("403", "PUT"), pytest.raises(psycopg.Error) as raised:
        connection.execute(CONCURRENTLY)
    assert raised.value.sqlstate == "58030"
    assert_invalid_and_mendable(connection, remedy)


@pytest.mark.parametrize("remedy", REMEDIES, ids=name)
def test_a_concurrent_build_that_is_cancelled_late_leaves_an_invalid_index(connection, database, remedy):
    create_table(connection)
    with database.connect() as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        thread, errors = run(database, CONCURRENTLY)
        pid = wait_for_phase(connection, "waiting for old snapshots")
        churn(connection)  # the index is written to already
        connection.execute(f"SELECT pg_cancel_backend({pid})")
        thread.join(60)
    assert [type(error) for error in errors] == [psycopg.errors.QueryCanceled]
    assert_invalid_and_mendable(connection, remedy)


def test_a_concurrent_reindex_that_fails_leaves_the_old_index(table, proxy):
    before = index_id(table)
    with proxy.fault("403", "PUT"), pytest.raises(psycopg.Error):
        table.execute("REINDEX INDEX CONCURRENTLY t_polign")
    assert index_id(table) == before
    assert not is_valid(table, "t_polign_ccnew")
    churn(table)
    assert_right(table)
    table.execute("DROP INDEX t_polign_ccnew")
    table.execute("REINDEX INDEX CONCURRENTLY t_polign")
    assert_right(table)


# Names and options.


def test_renamed_and_moved_to_another_schema(table, database):
    with database.connect() as other:
        assert_right(other)
        table.execute(
            "CREATE SCHEMA elsewhere;"
            "ALTER INDEX t_polign RENAME TO i; ALTER TABLE t RENAME TO u;"
            "ALTER TABLE u RENAME embedding TO v;"
            "ALTER TABLE u SET SCHEMA elsewhere"
        )
        moved = Searchable("elsewhere.u", "i", column="v")
        for session in (other, table):
            assert_right(session, moved)
        table.execute(f"UPDATE elsewhere.u SET v = '{vector(2600)}' WHERE id = 3")
        table.execute("REINDEX INDEX elsewhere.i")
        for session in (other, table):
            assert_right(session, moved)
        table.execute("ALTER SCHEMA elsewhere RENAME TO here")
        assert_right(other, Searchable("here.u", "i", column="v"))


def test_options_can_be_changed(table, database):
    def probed(session) -> int:
        TABLE.by_index(session, questions(1))
        return session.execute("SELECT cells_probed FROM polign.last_scan()").fetchone()[0]

    def info(column: str):
        return table.execute(f"SELECT {column} FROM polign.index_info('t_polign')").fetchone()[0]

    with database.connect() as other:
        usual = probed(other)
        table.execute("ALTER INDEX t_polign SET (target_recall = 1)")
        assert probed(other) == info("lists") > usual
        assert info("target_recall") == 1
        TABLE.assert_exact(other, questions(5))
        table.execute("ALTER INDEX t_polign RESET (target_recall)")
        assert probed(other) == usual
        assert info("target_recall") == 0.95
        lists = info("lists")
        table.execute("ALTER INDEX t_polign SET (lists = 30)")
        assert info("lists") == lists
        table.execute("REINDEX INDEX t_polign")
        assert info("lists") > 2 * lists
        for session in (other, table):
            assert_right(session)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="target_recall"):
        table.execute("ALTER INDEX t_polign SET (target_recall = 0.3)")
    assert_right(table)
