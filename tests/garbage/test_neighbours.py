"""Databases of one server that were copied from each other, and those copies that nobody has used yet."""

import psycopg
import pytest

from tests.harness.garbage import ROWS, assert_whole, collect, let_transactions_pass, retire

SILENT = "nobody has used yet"


@pytest.fixture(params=["wal_log", "file_copy"])
def copy(cluster, database, request):
    """A database that was copied from the one with the index, and not used."""
    name = f"{database.name}_copy"
    cluster.execute(f"CREATE DATABASE {name} TEMPLATE {database.name} STRATEGY {request.param}")
    return name


def assert_kept(connection, store, keys):
    """However often and however young."""
    let_transactions_pass(connection)
    for _ in range(2):
        rows = [row for row in collect(connection) if row.object in keys]
        assert {row.object for row in rows} == keys and all(SILENT in row.kept for row in rows)
    assert keys <= set(store.keys())


def test_what_its_origin_replaced_stays(cluster, database, store, copy):
    keys = set(store.keys())
    with database.connect() as connection:
        retire(connection)
        assert_kept(connection, store, keys)
    with cluster.connect(copy) as connection:
        assert_whole(connection)


def test_what_its_origin_dropped_stays(cluster, database, store, copy):
    keys = set(store.keys())
    with database.connect() as connection:
        connection.execute("DROP INDEX i")
        assert_kept(connection, store, keys)
    with cluster.connect(copy) as connection:
        assert_whole(connection)


@pytest.mark.parametrize("moved", ["origin", "copy"])
def test_an_index_that_was_moved_to_a_tablespace_is_seen(cluster, database, store, copy, moved):
    keys = set(store.keys())
    with cluster.connect("postgres") as connection:
        connection.execute("SET allow_in_place_tablespaces = on")
        connection.execute("CREATE TABLESPACE elsewhere LOCATION ''")
    name = database.name if moved == "origin" else copy
    with cluster.connect(name) as connection:
        connection.execute("ALTER INDEX i SET TABLESPACE elsewhere")
    with database.connect() as connection:
        retire(connection)
        assert_kept(connection, store, keys)
    with cluster.connect(copy) as connection:
        assert_whole(connection)


def test_a_copy_with_a_smaller_oid_is_seen(cluster, database, store):
    keys = set(store.keys())
    cluster.execute(f"CREATE DATABASE a TEMPLATE {database.name} STRATEGY wal_log OID = 16385")
    with database.connect() as connection:
        retire(connection)
        assert_kept(connection, store, keys)
    with cluster.connect("a") as connection:
        assert_whole(connection)


def test_a_copy_cannot_adopt_what_another_copy_inherited(cluster, database, store, copy):
    other = f"{database.name}_other"
    cluster.execute(f"CREATE DATABASE {other} TEMPLATE {database.name}")
    keys = set(store.keys())
    in_use = pytest.raises(psycopg.errors.ObjectInUse)
    with cluster.connect(other) as used, database.connect() as origin:
        used.execute("VACUUM t")
        origin.execute("DROP INDEX i")
        collect(origin)
        with in_use as raised:
            used.execute("SELECT polign.adopt('i')")
        assert copy in str(raised.value) and "Scan the index there" in raised.value.diag.message_hint
        retire(used)
        assert not any(row.deleted for row in collect(used) if row.object in keys)
    with cluster.connect(copy) as connection:
        assert_whole(connection)
    with cluster.connect(other) as used:
        with in_use:
            used.execute("SELECT polign.adopt('i')")
        cluster.execute(f"DROP DATABASE {copy} WITH (FORCE)")
        let_transactions_pass(used)
        collect(used)
        assert used.execute("SELECT polign.adopt('i')").fetchone()[0] >= 1
        let_transactions_pass(used)
        collect(used)
        assert not keys & set(store.keys())
        assert_whole(used, ROWS - ROWS // 3)
