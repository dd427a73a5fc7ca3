"""Several databases in one cluster, and copies of a database that go their own ways."""

import pytest

from tests.harness.tables import INDEX, ROWS, assert_right, churn, create_table


def create(connection, rows: int = ROWS) -> None:
    create_table(connection, rows)
    connection.execute(INDEX)
    churn(connection)


def test_two_databases_do_not_disturb_each_other(cluster, database):
    """They may use the same numbers for their tables and indexes."""
    second = cluster.database()
    try:
        with database.connect() as one, second.connect() as two:
            create(one)
            create(two, ROWS - 500)
            for session, other in ((one, two), (two, one), (one, two)):
                churn(session)
                session.execute("VACUUM t")
                assert_right(other)
                session.execute("REINDEX INDEX t_polign")
                assert_right(other)
                assert_right(session)
    finally:
        second.drop()
    with database.connect() as one:
        assert_right(one)


@pytest.mark.parametrize("strategy", ["wal_log", "file_copy"])
def test_a_database_and_its_copy_are_both_written(cluster, database, strategy):
    with database.connect() as connection:
        create(connection)
    copy = f"{database.name}_copy"
    cluster.execute(f"CREATE DATABASE {copy} TEMPLATE {database.name} STRATEGY {strategy}")
    try:
        with database.connect() as origin, cluster.connect(copy) as copied:
            for session, other in ((copied, origin), (origin, copied)) * 2:
                assert_right(session)
                churn(session)
                session.execute("VACUUM t")
                for either in (session, other):
                    assert_right(either)
            copied.execute("REINDEX INDEX t_polign")
            origin.execute("DROP INDEX t_polign")
            assert_right(copied)
            origin.execute(INDEX)
            for session in (origin, copied):
                assert_right(session)
        cluster.crash()
        cluster.start()
        with database.connect() as origin, cluster.connect(copy) as copied:
            for session in (origin, copied):
                assert_right(session)
    finally:
        cluster.execute(f"DROP DATABASE {copy} WITH (FORCE)")
    with database.connect() as origin:
        origin.execute("SELECT polign.cache_clear()")
        assert_right(origin)
