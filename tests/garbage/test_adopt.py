"""Adoption: an operator says that no other copy of an index lives, and its inheritance may be collected."""

import psycopg
import pytest

from dev.datasets import load
from tests.harness.garbage import (
    DIM,
    ROWS,
    assert_whole,
    collect,
    let_transactions_pass,
    retire,
)
from tests.harness.vectors import random_vectors
from tests.test_crash_matrix import back

LEFT = ROWS - ROWS // 3


@pytest.fixture
def promoted(cluster, database):
    """A promoted standby, which has gone on under a new writer id."""
    standby = cluster.standby()
    standby.wait_for_replay(cluster)
    standby.execute("SELECT pg_promote()")
    with standby.connect(database.name) as there:
        there.execute("VACUUM t")
    yield standby
    standby.destroy()


@pytest.fixture
def copy(cluster, database):
    """A database that was copied from the one with the index, and has gone on under a new writer id."""
    name = f"{database.name}_copy"
    cluster.execute(f"CREATE DATABASE {name} TEMPLATE {database.name}")
    with cluster.connect(name) as there:
        there.execute("VACUUM t")
    return name


def adopt(connection) -> int:
    return connection.execute("SELECT polign.adopt('i')").fetchone()[0]


def insert(connection, first: int, count: int = 50):
    load(connection, "t", random_vectors(count, DIM, first), first)
    connection.execute("SELECT polign.flush('i')")


def assert_clean(connection, store):
    """Only what the index refers to is in the store, and all of that."""
    let_transactions_pass(connection)
    collect(connection)
    assert all(row.kept is None for row in collect(connection))
    assert_whole(connection, connection.execute("SELECT count(*) FROM t").fetchone()[0])
    assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []
    objects = connection.execute("SELECT objects FROM polign.index_info('i')").fetchone()[0]
    assert len(store.keys()) == objects


@pytest.mark.smoke
def test_a_promoted_server_takes_over_what_the_one_before_left(cluster, database, store, promoted):
    with database.connect() as connection:
        insert(connection, 1000)  # after the promotion: the standby knows nothing of this object
        connection.execute("DROP INDEX i")
    cluster.stop()
    with promoted.connect(database.name) as there:
        inherited = set(store.keys())
        insert(there, 2000)
        retire(there)
        collect(there)
        assert inherited <= set(store.keys())
        assert adopt(there) == 1
        assert_clean(there, store)
        assert adopt(there) == 1
        assert len(store.owners()) == 2


def test_an_origin_takes_over_what_its_copy_left(cluster, database, store, copy):
    with cluster.connect(copy) as there:
        insert(there, 1000)
    with database.connect() as connection:
        retire(connection)
        with pytest.raises(psycopg.errors.ObjectInUse, match=copy):
            adopt(connection)
        cluster.execute(f"DROP DATABASE {copy}")
        assert adopt(connection) == 1
        assert_clean(connection, store)


def test_a_copy_takes_over_from_an_origin_that_dropped_its_index(cluster, database, store, copy):
    """Both databases stay. That the index is gone in one of them is known as soon as gc there has seen it."""
    with cluster.connect(copy) as there, database.connect() as connection:
        insert(there, 1000)
        insert(connection, 2000)  # an object that the copy does not know
        retire(there)
        connection.execute("DROP INDEX i")
        with pytest.raises(psycopg.errors.ObjectInUse, match=database.name):
            adopt(there)
        collect(connection, dry_run=True)
        with pytest.raises(psycopg.errors.ObjectInUse, match=database.name):
            adopt(there)
        assert not any(row.deleted for row in collect(connection))
        assert adopt(there) == 1
        assert_clean(there, store)
        assert collect(connection) == []


def test_a_copy_whose_objects_are_collected_is_no_obstacle(cluster, database, store, copy):
    with database.connect() as connection:
        retire(connection)
        with cluster.connect(copy) as there:
            there.execute("DROP INDEX i")
            collect(there)
        assert any("a copy" in (row.kept or "") for row in collect(connection))
        assert adopt(connection) == 1
        assert_clean(connection, store)


def test_an_origin_takes_over_what_its_twin_left(cluster, database, store):
    twin = cluster.twin()
    try:
        with database.connect() as connection:
            connection.execute("VACUUM t")
        with twin.connect(database.name) as there:
            insert(there, 1000)
    finally:
        twin.destroy()
    with database.connect() as connection:
        retire(connection)
        assert adopt(connection) == 1
        assert_clean(connection, store)


def test_a_chain_of_copies(cluster, database, store, copy):
    """A copy of a copy is all that is left."""
    last = f"{copy}2"
    with cluster.connect(copy) as there:
        insert(there, 1000)
    cluster.execute(f"CREATE DATABASE {last} TEMPLATE {copy}")
    with cluster.connect(last) as there:
        insert(there, 2000)
    cluster.execute(f"DROP DATABASE {copy}")
    database.drop()
    with cluster.connect(last) as there:
        retire(there)
        assert adopt(there) == 2
        assert_clean(there, store)
        there.execute("DROP INDEX i")
        assert all(row.deleted for row in collect(there))
    assert (store.keys(), store.owners()) == ({}, {})


@pytest.mark.parametrize(("request_", "skipped"), [
    ({"method": "PUT", "key": "/heir-"}, 0), ({"method": "PUT", "key": "/adopted-"}, 0),
    *(({"method": "DELETE"}, n) for n in range(3)),
    *(({"method": "GET", "query": "prefix="}, n) for n in range(5)),
])
def test_an_adoption_that_fails_can_be_repeated(
    cluster, database, store, proxy, promoted, request_, skipped
):
    for server in (cluster, promoted):
        server.configure(polign__fetch_timeout="1s")
    cluster.stop()
    with promoted.connect(database.name) as there:
        retire(there)
        passing = proxy.fault("delay", **request_, times=skipped, seconds=0)
        with passing, proxy.fault("403", **request_), pytest.raises(psycopg.errors.IoError):
            adopt(there)
        collect(there)
        assert_whole(there, LEFT)
        assert adopt(there) == 1
        assert_clean(there, store)


@pytest.mark.parametrize("place", [
    *(f"claim: {step}" for step in ("logged", "put", "deleted")),
    *(f"adopt: {step}" for step in ("gathered", "heir", "said", "cleared", "listed")),
    *(f"owner: cleared:{passed}" for passed in range(3)),
])
def test_a_process_that_is_killed_while_it_adopts(cluster, database, store, promoted, place):
    with database.connect() as connection:
        insert(connection, 1000)  # an object that the promoted server does not know
    cluster.stop()
    with promoted.connect(database.name) as there:
        retire(there)
        there.execute(f"SET polign.failpoint = '{place}'")
        with pytest.raises(psycopg.OperationalError):
            adopt(there)
    with back(promoted, database.name) as there:
        for _ in range(2):
            let_transactions_pass(there)
            collect(there)
            assert there.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []
        assert_whole(there, LEFT)
        assert adopt(there) == 1
        assert_clean(there, store)


def test_a_process_that_is_killed_while_it_takes_over_what_was_dropped(cluster, database, store, promoted):
    with promoted.connect(database.name) as there:
        there.execute("DROP INDEX i")
        cluster.stop()
        collect(there)  # what it had written itself
        there.execute("SET polign.failpoint = 'adopt: taken over'")
        with pytest.raises(psycopg.OperationalError):
            there.execute("SELECT polign.adopt_dropped()")
    with back(promoted, database.name) as there:
        collect(there)
        assert store.keys()
        assert there.execute("SELECT polign.adopt_dropped()").fetchone()[0] >= 1
        assert all(row.deleted for row in collect(there))
        assert (store.keys(), store.owners()) == ({}, {})


def test_somebody_who_comes_back_keeps_what_was_adopted(cluster, database, store, promoted):
    """A backup from before is restored, in spite of what the operator said."""
    backup = cluster.twin()
    try:
        cluster.stop()
        with promoted.connect(database.name) as there, backup.connect(database.name) as back:
            assert adopt(there) == 1
            inherited = set(store.keys())
            retire(there)
            back.execute("VACUUM t")
            rows = collect(there)
            assert {row.object for row in rows} == inherited
            assert all("inherited" in row.kept for row in rows), rows
            retire(back)
            assert not any(row.deleted for row in collect(back))
            back.execute("DROP INDEX i")
            assert not any(row.deleted for row in collect(back) if row.object in inherited)
            assert_whole(there, LEFT)
    finally:
        backup.destroy()


def test_what_dropped_indexes_left_on_an_earlier_timeline(cluster, database, store, promoted):
    with promoted.connect(database.name) as there:
        there.execute("CREATE TABLE n (LIKE t); INSERT INTO n SELECT * FROM t")
        there.execute("DROP INDEX i")
        cluster.stop()
        keys = set(store.keys())
        assert not any(row.deleted for row in collect(there))
        assert there.execute("SELECT polign.adopt_dropped()").fetchone() == (1,)
        assert {row.object for row in collect(there) if row.deleted} == keys
        assert (store.keys(), store.owners()) == ({}, {})
        assert there.execute("SELECT polign.adopt_dropped()").fetchone() == (0,)


def test_what_a_dropped_index_left_whose_copy_is_gone(cluster, database, store, copy):
    with database.connect() as connection:
        connection.execute("DROP INDEX i")
        keys = set(store.keys())
        for _ in range(2):
            assert all("a copy" in row.kept for row in collect(connection))
            assert connection.execute("SELECT polign.adopt_dropped()").fetchone() == (0,), "the copy lives"
        cluster.execute(f"DROP DATABASE {copy}")
        collect(connection)
        assert set(store.keys()) == keys
        assert connection.execute("SELECT polign.adopt_dropped()").fetchone() == (1,)
        assert all(row.deleted for row in collect(connection))
        assert (store.keys(), store.owners()) == ({}, {})


def test_an_index_that_inherited_nothing(database, store):
    with database.connect() as connection:
        assert adopt(connection) == 0
        assert connection.execute("SELECT polign.adopt_dropped()").fetchone() == (0,)
        connection.execute("CREATE TABLE e (LIKE t)")
        connection.execute("CREATE INDEX ei ON e USING polign_ivf (embedding vector_l2_ops)")
        assert connection.execute("SELECT polign.adopt('ei')").fetchone() == (0,)
        retire(connection)
        assert_clean(connection, store)


def test_who_may_and_where(cluster, database):
    with database.connect() as connection:
        connection.execute("CREATE ROLE nobody LOGIN")
        for call in ("adopt('i')", "adopt_dropped()"):
            denied = pytest.raises(psycopg.errors.InsufficientPrivilege)
            with database.connect(user="nobody") as nobody, denied:
                nobody.execute(f"SELECT polign.{call}")
            with connection.transaction(), pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                connection.execute("SET TRANSACTION READ ONLY")
                connection.execute(f"SELECT polign.{call}")
        with pytest.raises(psycopg.errors.WrongObjectType):
            connection.execute("SELECT polign.adopt('t')")
        connection.execute("GRANT EXECUTE ON FUNCTION polign.adopt TO nobody")
        not_owner = pytest.raises(psycopg.errors.InsufficientPrivilege, match="owner of index")
        with database.connect(user="nobody") as nobody, not_owner:
            adopt(nobody)
        connection.execute("ALTER TABLE t OWNER TO nobody")
        with database.connect(user="nobody") as nobody:
            assert adopt(nobody) == 0


def test_what_this_transaction_drops_is_not_adopted(database, store, promoted):
    with promoted.connect(database.name) as there, there.transaction(force_rollback=True):
        there.execute("DROP INDEX i")
        with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="adopt_dropped"):
            there.execute("SELECT polign.adopt_dropped()")
    with promoted.connect(database.name) as there:
        assert_whole(there)


def heir_notes(store) -> set[str]:
    return {key for key in store.client.list(store.bucket, f"{store.prefix}/owner/") if "heir-" in key}


def test_a_note_of_a_later_version_stops_an_adoption(database, store, promoted):
    (writer,) = (writer for writer, own in store.owners().items() if own.heirs)
    store.put(f"owner/{writer}/heir-{'1' * 32}", b'{"format": 2}')
    heirs = heir_notes(store)
    unknown = pytest.raises(psycopg.errors.FeatureNotSupported, match=writer)
    with promoted.connect(database.name) as there, unknown:
        adopt(there)
    assert heir_notes(store) == heirs
