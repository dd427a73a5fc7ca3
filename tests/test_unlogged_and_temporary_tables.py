"""Tables that are not in the log."""

import pytest

from dev.datasets import load
from tests.harness.tables import INDEX, ROWS, TABLE, assert_right, churn, create_table, questions, vectors


def index_id(connection) -> str:
    return connection.execute("SELECT index_id FROM polign.index_info('t_polign')").fetchone()[0]


def test_an_unlogged_table_is_kept_by_a_restart_and_empty_after_a_crash(cluster, database):
    with database.connect() as connection:
        create_table(connection, prefix="CREATE UNLOGGED TABLE t")
        connection.execute(INDEX)
        churn(connection)
        assert_right(connection)
        first_id = index_id(connection)
    cluster.restart()
    ids = []
    for turn in range(2):
        with database.connect() as connection:
            assert_right(connection)
            ids.append(index_id(connection))
            churn(connection)
            connection.execute("VACUUM t")
            assert_right(connection)
            cluster.crash()
        cluster.start()
        with database.connect() as connection:
            assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
            assert TABLE.by_index(connection, questions(1))[0].ids == []
            load(connection, "t", vectors(turn, ROWS), turn)
    assert ids[0] == first_id
    with database.connect() as connection:
        ids.append(index_id(connection))
        assert len(set(ids)) == 3, "each reset begins an index of its own"
        assert_right(connection)
        connection.execute("REINDEX INDEX t_polign")
        assert_right(connection)


def test_an_unlogged_index_created_on_no_rows(cluster, database):
    with database.connect() as connection:
        create_table(connection, 0, "CREATE UNLOGGED TABLE t")
        connection.execute(INDEX)
        load(connection, "t", vectors(0, ROWS))
        assert_right(connection)
        cluster.crash()
    cluster.start()
    with database.connect() as connection:
        load(connection, "t", vectors(0, 500))
        churn(connection)
        assert_right(connection)


@pytest.mark.parametrize("logged", [True, False], ids=["SET LOGGED", "SET UNLOGGED"])
def test_a_crash_after_the_change(cluster, database, logged):
    before, after = ("UNLOGGED TABLE", "LOGGED") if logged else ("TABLE", "UNLOGGED")
    with database.connect() as connection:
        create_table(connection, prefix=f"CREATE {before} t")
        connection.execute(INDEX)
        churn(connection)
        connection.execute(f"ALTER TABLE t SET {after}")
        churn(connection)
        cluster.crash()
    cluster.start()
    with database.connect() as connection:
        rows = connection.execute("SELECT count(*) FROM t").fetchone()[0]
        assert rows > ROWS if logged else rows == 0
        churn(connection)
        assert_right(connection)


def test_a_temporary_table(connection):
    create_table(connection, prefix="CREATE TEMP TABLE t")
    connection.execute(INDEX)
    churn(connection)
    assert_right(connection)
    connection.execute("VACUUM t")
    churn(connection)
    assert_right(connection)
    connection.execute("REINDEX INDEX t_polign")
    assert_right(connection)
    connection.execute("DROP INDEX t_polign; TRUNCATE t")
    connection.execute(INDEX)
    churn(connection)
    assert_right(connection)


def test_a_temporary_table_that_a_commit_empties(connection):
    connection.execute("CREATE TEMP TABLE t (id int, embedding vector(64), note text) ON COMMIT DELETE ROWS")
    connection.execute(INDEX)
    for turn in range(3):
        with connection.transaction():
            load(connection, "t", vectors(500 * turn, 500 * turn + 1000))
            assert_right(connection)
        assert TABLE.by_index(connection, questions(1))[0].ids == []


def test_a_temporary_table_hides_a_permanent_one(connection, database):
    create_table(connection)
    connection.execute(INDEX)
    with database.connect() as other:
        create_table(other, 1000, "CREATE TEMP TABLE t")
        other.execute(INDEX)
        churn(other)
        assert_right(other)
        assert_right(connection)
    assert_right(connection)
