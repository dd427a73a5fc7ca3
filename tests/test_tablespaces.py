"""Indexes in tablespaces of their own."""

import pytest

from tests.harness.tables import INDEX, assert_right, churn, create_table


@pytest.fixture
def tablespaces(cluster):
    """Two tablespaces, dropped after the database (which is made after them)."""
    names = ("polign_space1", "polign_space2")
    with cluster.connect() as connection:
        connection.execute("SET allow_in_place_tablespaces = on")
        for name in names:
            connection.execute(f"CREATE TABLESPACE {name} LOCATION ''")
    yield names
    for name in names:
        cluster.execute(f"DROP TABLESPACE {name}")


def tablespace_of(connection, name: str) -> str:
    return connection.execute(
        "SELECT coalesce(spcname, 'pg_default') FROM pg_class c LEFT JOIN pg_tablespace s "
        f"ON s.oid = reltablespace WHERE c.oid = '{name}'::regclass"
    ).fetchone()[0]


def test_created_in_a_tablespace_and_moved_to_another(tablespaces, database):
    one, two = tablespaces
    moves = [
        (f"ALTER INDEX t_polign SET TABLESPACE {two}", two),
        ("ALTER INDEX t_polign SET TABLESPACE pg_default", "pg_default"),
        (f"REINDEX (TABLESPACE {one}) INDEX t_polign", one),
        (f"ALTER INDEX ALL IN TABLESPACE {one} SET TABLESPACE {two}", two),
        (f"REINDEX (TABLESPACE {one}) INDEX CONCURRENTLY t_polign", one),
    ]
    with database.connect() as connection, database.connect() as other:
        create_table(connection)
        connection.execute(f"{INDEX} TABLESPACE {one}")
        assert tablespace_of(connection, "t_polign") == one
        for move, where in moves:
            churn(connection)
            connection.execute("VACUUM t")
            assert_right(other)
            connection.execute(move)
            assert tablespace_of(connection, "t_polign") == where
            for session in (other, connection):
                assert_right(session)
        connection.execute(f"ALTER TABLE t SET TABLESPACE {two}")
        for session in (other, connection):
            assert_right(session)


@pytest.mark.parametrize("kind", ["TABLE", "UNLOGGED TABLE"])
def test_a_crash_after_a_move(tablespaces, cluster, database, kind):
    one, two = tablespaces
    with database.connect() as connection:
        create_table(connection, prefix=f"CREATE {kind} t")
        connection.execute(f"{INDEX} TABLESPACE {one}")
        churn(connection)
        connection.execute("CHECKPOINT")
        connection.execute(f"ALTER INDEX t_polign SET TABLESPACE {two}")
        churn(connection)
        cluster.crash()
    cluster.start()
    with database.connect() as connection:
        ((rows,),) = connection.execute("SELECT count(*) FROM t")
        assert (rows > 0) == (kind == "TABLE")
        assert_right(connection)
        churn(connection)
        assert_right(connection)
