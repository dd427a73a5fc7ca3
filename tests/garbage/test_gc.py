"""Garbage collection: what nothing refers to goes when it is old enough, and nothing else."""

import threading
import time

import psycopg
import pytest

from dev import process
from dev.datasets import load
from tests.harness.garbage import (
    DIM,
    ROWS,
    assert_whole,
    collect,
    create,
    leave_pending,
    let_transactions_pass,
    retire,
)
from tests.harness.vectors import random_vectors
from tests.test_crash_matrix import back

# What is garbage, and what is not.


@pytest.mark.smoke
def test_what_a_dropped_index_left_is_deleted(connection, store):
    keys = store.keys()
    assert keys
    assert collect(connection) == []
    connection.execute("DROP INDEX i")
    would = collect(connection, dry_run=True)
    assert {row.object: row.bytes for row in would} == keys
    assert not any(row.deleted or row.kept for row in would)
    assert store.keys() == keys
    done = collect(connection)
    assert {row.object: row.bytes for row in done} == keys
    assert all(row.deleted and row.kept is None for row in done)
    assert (store.keys(), store.owners()) == ({}, {})
    assert collect(connection) == []


def test_nothing_is_deleted_by_default(connection, store):
    connection.execute("DROP INDEX i")
    rows = connection.execute("SELECT object, deleted, kept FROM polign.gc()").fetchall()
    assert {row[0] for row in rows} == set(store.keys())
    assert not any(row[1] for row in rows) and all("found gone only now" in row[2] for row in rows)
    assert not any(own.others for own in store.owners().values()), "a dry run writes nothing"


@pytest.mark.parametrize("rebuild", [
    "REINDEX INDEX i", "REINDEX INDEX CONCURRENTLY i", "VACUUM FULL t", "CLUSTER t USING t_pkey",
    "TRUNCATE t", "ALTER INDEX i SET TABLESPACE pg_default; REINDEX TABLE t",
])
def test_what_a_rebuilt_index_left_is_deleted(connection, store, rebuild):
    old = set(store.keys())
    connection.execute(rebuild)
    new = set(store.keys()) - old
    assert {row.object for row in collect(connection) if row.deleted} == old
    assert set(store.keys()) == new
    assert_whole(connection, 0 if "TRUNCATE" in rebuild else ROWS)


@pytest.mark.parametrize("end", ["rollback", "cancel", "crash"])
def test_what_a_build_left_that_came_to_nothing_is_deleted(
    cluster, database, connection, store, proxy, end
):
    mine = set(store.keys())
    if end == "rollback":
        with pytest.raises(ZeroDivisionError), connection.transaction():
            connection.execute("REINDEX INDEX i")
            raise ZeroDivisionError
    else:
        cluster.configure(polign__fetch_timeout="60s")
        with proxy.fault("delay", "PUT", ".seg", seconds=3) as fault:
            build = threading.Thread(
                target=lambda: pytest.raises(psycopg.Error, connection.execute, "REINDEX INDEX i")
            )
            build.start()
            process.wait_until(lambda: fault.hit, 30, "no segment is uploaded")
            connection.cancel() if end == "cancel" else cluster.crash()
            build.join(30)
            proxy.settle()
        cluster.start()
    assert set(store.keys()) > mine or end != "rollback"
    with database.connect() as connection:
        rows = collect(connection)
        assert all(row.object not in mine for row in rows)
        assert set(store.keys()) == mine and len(store.owners()) == 1
        assert_whole(connection)


def test_what_compaction_dropped_is_deleted(connection, store):
    old = set(store.keys())
    rows = retire(connection)
    would = collect(connection, dry_run=True)
    assert {row.object for row in would} == old and all(row.index == "public.i" for row in would)
    done = collect(connection)
    assert {row.object for row in done if row.deleted} == old
    assert not old & set(store.keys())
    assert collect(connection) == []
    assert_whole(connection, rows)
    assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []


@pytest.mark.parametrize("kind", ["UNLOGGED", "TEMP"])
def test_what_compaction_dropped_of_an_index_without_log_is_deleted(connection, store, kind):
    mine = set(store.keys())
    connection.execute(f"CREATE {kind} TABLE u (id int, embedding vector({DIM}))")
    load(connection, "u", random_vectors(ROWS, DIM))
    connection.execute("CREATE INDEX ui ON u USING polign_ivf (embedding vector_l2_ops)")
    old = set(store.keys()) - mine
    connection.execute("DELETE FROM u WHERE id % 2 = 0")
    connection.execute("VACUUM u")
    connection.execute("SELECT polign.compact('ui')")
    let_transactions_pass(connection)
    done = collect(connection)
    assert old and {row.object for row in done if row.deleted} == old
    assert mine <= set(store.keys())
    assert_whole(connection, ROWS // 2, "u")


def test_what_a_failed_flush_left_is_deleted(cluster, connection, store, proxy):
    mine = set(store.keys())
    leave_pending(cluster, connection, proxy)
    left = set(store.keys()) - mine
    assert left
    rows = collect(connection)
    assert {row.object for row in rows if row.deleted} == left
    assert set(store.keys()) == mine
    connection.execute("SELECT polign.flush('i')")
    assert_whole(connection, ROWS + 50)
    assert collect(connection) == []


@pytest.mark.parametrize("place", ["build: uploaded", "build: root written"])
def test_an_index_whose_concurrent_build_was_killed_is_no_obstacle(
    cluster, database, connection, store, place
):
    """It stays in the catalog, with pages or without."""
    mine = set(store.keys())
    connection.execute(f"SET polign.failpoint = '{place}'")
    with pytest.raises(psycopg.OperationalError):
        connection.execute("CREATE INDEX CONCURRENTLY dead ON t USING polign_ivf (embedding vector_l2_ops)")
    with back(cluster, database.name) as connection:
        left = set(store.keys()) - mine
        assert left
        collect(connection)
        assert mine <= set(store.keys())
        assert_whole(connection)
        connection.execute("DROP INDEX dead")
        collect(connection)
        assert set(store.keys()) == mine and len(store.owners()) == 1


def test_objects_of_nobody_are_left_alone(connection, store):
    """Keys that no index of this server ever wrote, beside those of an index and far from them."""
    key = next(iter(store.keys()))
    strangers = [f"{key.rsplit('/', 1)[0]}/{'0' * 32}.seg", f"ab/{'1' * 32}/{'2' * 32}/{'3' * 32}.seg", "x/y"]
    for stranger in strangers:
        store.put(stranger)
    retire(connection)
    collect(connection)
    assert all(store.exists(stranger) for stranger in strangers)


def test_an_index_of_another_database_is_judged_there(cluster, connection, store):
    other = cluster.database()
    with other.connect() as there:
        create(there)
        theirs = set(store.keys())
        there.execute("DROP INDEX i")
        assert collect(connection) == []
        assert theirs == set(store.keys())
        assert len([row for row in collect(there) if row.deleted]) > 0
    assert_whole(connection)


def test_what_a_dropped_database_left_is_deleted(cluster, connection, store):
    mine = set(store.keys())
    other = cluster.database()
    with other.connect() as there:
        create(there)
    assert collect(connection) == []
    other.drop()
    done = collect(connection)
    assert done and all(row.deleted and "database was dropped" in row.reason for row in done)
    assert set(store.keys()) == mine
    assert_whole(connection)


def test_indexes_of_all_kinds_stay(database, connection, store):
    with database.connect() as other:
        other.execute(f"CREATE TEMP TABLE temporary (id int, embedding vector({DIM}))")
        load(other, "temporary", random_vectors(100, DIM))
        other.execute("CREATE INDEX ON temporary USING polign_ivf (embedding vector_l2_ops)")
        connection.execute(f"CREATE UNLOGGED TABLE u (id int, embedding vector({DIM}))")
        load(connection, "u", random_vectors(100, DIM))
        connection.execute("CREATE INDEX ON u USING polign_ivf (embedding vector_l2_ops)")
        connection.execute("CREATE INDEX CONCURRENTLY ON t USING polign_ivf (embedding vector_l2_ops)")
        keys = store.keys()
        assert collect(connection) == []
        assert collect(other) == []
        assert store.keys() == keys
    process.wait_until(lambda: len(collect(connection)) == 1, 10, "the temporary index leaves garbage")


def test_an_unlogged_index_that_was_reset_leaves_garbage(cluster, database, connection, store):
    connection.execute("ALTER TABLE t SET UNLOGGED")
    collect(connection)
    assert_whole(connection)
    cluster.crash()
    cluster.start()
    with database.connect() as connection:
        assert len(collect(connection)) == len(store.keys()) or not store.keys()
        assert (store.keys(), store.owners()) == ({}, {})


def test_an_empty_index_is_no_obstacle(connection, store):
    connection.execute(f"CREATE TABLE e (id int, embedding vector({DIM}))")
    connection.execute("CREATE INDEX ON e USING polign_ivf (embedding vector_l2_ops)")
    connection.execute("DROP INDEX i")
    assert all(row.deleted for row in collect(connection))
    assert store.keys() == {}


# When.


def test_what_is_garbage_for_a_short_time_stays(connection, store):
    old = set(store.keys())
    retire(connection)
    rows = collect(connection, "1 hour")
    assert {row.object for row in rows} == old
    assert all(not row.deleted and row.kept == "garbage for less than 01:00:00" for row in rows)
    assert old <= set(store.keys())


def test_the_age_does_not_count_from_a_clock_that_was_behind(connection, store, proxy):
    """When the objects are retired, the server's clock is minutes behind the store's."""
    old = set(store.keys())
    with proxy.fault("ahead", seconds=300) as ahead:
        retire(connection)
    assert ahead.hit
    time.sleep(3)
    rows = collect(connection, "1 second")
    assert {row.object for row in rows} == old and all("less than" in row.kept for row in rows)
    with proxy.fault("ahead", seconds=600):
        rows = collect(connection, "1 second")
    assert rows and not any(row.deleted for row in rows), "the store's clock alone makes nothing old"
    assert old <= set(store.keys())


def test_a_dropped_index_is_old_from_when_it_was_found_gone(connection, store):
    """However long ago it was built or written."""
    time.sleep(2)
    connection.execute("DROP INDEX i")
    keys = set(store.keys())
    rows = collect(connection, "2 seconds")
    assert {row.object for row in rows} == keys and all("found gone only now" in row.kept for row in rows)
    rows = collect(connection, "2 seconds")
    assert all(row.kept == "garbage for less than 00:00:02" for row in rows)
    time.sleep(4)
    assert all(row.deleted for row in collect(connection, "2 seconds"))
    assert (store.keys(), store.owners()) == ({}, {})


def test_a_nonce_that_comes_later_says_that_the_index_is_not_gone(connection, store):
    """A copy of the index that this server does not know of has carried out an ownership check."""
    connection.execute("DROP INDEX i")
    keys = set(store.keys())
    collect(connection, "1 second")
    time.sleep(1.5)
    ((writer, own),) = store.owners().items()
    ((nonce, _),) = own.nonces.items()
    body = store.client.get(store.bucket, f"{store.prefix}/owner/{writer}/{nonce}")
    store.put(f"owner/{writer}/{'f' * 32}", body)
    store.client.delete(store.bucket, f"{store.prefix}/owner/{writer}/{nonce}")
    rows = collect(connection, "1 second")
    assert all("found gone only now" in row.kept for row in rows)
    assert set(store.keys()) == keys


def test_an_index_that_came_back_is_not_gone(connection, store):
    """A crash or a restore has brought it back after it was noted that it is gone."""
    ((writer, _),) = store.owners().items()
    store.put(f"owner/{writer}/gone", b'{"format":1,"lsn":"0"}')
    assert collect(connection) == []
    assert not store.owners()[writer].others
    assert_whole(connection)


def test_a_snapshot_from_before_keeps_what_compaction_dropped(database, connection, store):
    with database.connect() as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        old = set(store.keys())
        load(connection, "t", random_vectors(300, DIM, 3), ROWS)
        connection.execute("SELECT polign.compact('i')")
        let_transactions_pass(connection)
        rows = collect(connection)
        assert old & {row.object for row in rows} and all("snapshot" in row.kept for row in rows)
        reader.execute("COMMIT")
    assert all(row.deleted for row in collect(connection))


def test_on_a_server_at_rest_the_second_run_deletes(connection, store):
    old = set(store.keys())
    connection.execute("SELECT polign.compact('i')")
    connection.execute("DELETE FROM t WHERE id % 2 = 0")
    connection.execute("VACUUM t")
    connection.execute("SELECT polign.compact('i')")
    collect(connection)
    collect(connection)
    assert not old & set(store.keys())


@pytest.mark.parametrize("what", ["retired", "dropped"])
def test_a_standby_that_is_behind_keeps_what_it_may_read(
    cluster, database, connection, store, standby, what
):
    standby.wait_for_replay(cluster)
    standby.execute("SELECT pg_wal_replay_pause()")
    process.wait_until(
        lambda: standby.execute("SELECT pg_get_wal_replay_pause_state()") == [("paused",)], 10, "no pause"
    )
    old = set(store.keys())
    retire(connection) if what == "retired" else connection.execute("DROP INDEX i")
    rows = collect(connection)
    assert {row.object for row in rows} == old and all("standby" in row.kept for row in rows)
    if what == "retired":
        with standby.connect(database.name) as reader:
            assert_whole(reader)
    standby.execute("SELECT pg_wal_replay_resume()")
    standby.wait_for_replay(cluster)
    process.wait_until(
        lambda: all(row.deleted for row in collect(connection)) and not old & set(store.keys()),
        20, "the standby has replayed",
    )


def test_a_slot_of_an_absent_standby_keeps_what_it_may_read(connection, store):
    connection.execute("SELECT pg_create_physical_replication_slot('absent', true)")
    retire(connection)
    rows = collect(connection)
    assert rows and all("standby" in row.kept for row in rows)
    connection.execute("SELECT pg_drop_replication_slot('absent')")
    rows = collect(connection)
    assert rows and all(row.deleted for row in rows)


# Uploads that nobody finished.


def test_uploads_that_nobody_finished_are_ended(connection, store):
    """Those of an index, and those of one that is gone; never those of others."""
    (key,) = store.keys()
    stranger = f"ab/{'1' * 32}/{'2' * 32}/{'3' * 32}.seg"
    mine = f"{key.rsplit('/', 1)[0]}/{'0' * 32}.seg"
    for name in (mine, stranger):
        store.begin_upload(name)
    assert all("less than" in row.kept for row in collect(connection, "1 hour"))
    assert sorted(store.uploads()) == sorted([mine, stranger])
    (row,) = collect(connection)
    assert (row.object, row.bytes, row.deleted, row.index) == (mine, 5, True, "public.i")
    assert store.uploads() == [stranger]
    store.begin_upload(mine)
    connection.execute("DROP INDEX i")
    assert {row.object for row in collect(connection) if row.deleted} == {key, mine}
    assert store.uploads() == [stranger]
    store.client.request(
        "DELETE", f"/{store.bucket}/{store.prefix}/{stranger}", {"uploadId": store.begin_upload(stranger)}
    )


def test_a_directory_as_store(own_cluster):
    cluster = own_cluster(polign__store="file:polign_store", polign__delta_limit=0)
    directory = cluster.postgres.data / "polign_store"
    database = cluster.database()
    with database.connect() as connection:
        create(connection)
        (segment,) = directory.rglob("*.seg")
        left = segment.parent / f".new-{'0' * 32}"
        left.write_bytes(b"12345")
        retire(connection)
        assert len(collect(connection)) == 2
        assert not left.exists() and not segment.exists()
        connection.execute("DROP INDEX i")
        assert collect(connection)
    assert [path.name for path in directory.rglob("*") if path.is_file()] == ["store-id"]


def test_a_store_that_no_index_is_in_any_more(cluster, connection, store):
    former = connection.execute("SHOW polign.store").fetchone()[0]
    connection.execute("DROP INDEX i")
    cluster.configure(polign__store=f"{former}-new")
    create(connection, "u", "ui")
    let_transactions_pass(connection)
    assert not any(row.index != "ui" for row in collect(connection))
    assert store.keys()
    rows = collect(connection, store=former)
    assert rows and all(row.deleted for row in rows) and store.keys() == {}
    assert_whole(connection, table="u")


def test_who_may_name_a_store(cluster, database, connection):
    connection.execute("CREATE ROLE collector LOGIN; GRANT EXECUTE ON FUNCTION polign.gc TO collector;"
                       "GRANT EXECUTE ON FUNCTION polign.adopt_dropped TO collector;"
                       "GRANT USAGE ON SCHEMA polign TO collector")
    with database.connect(user="collector") as collector:
        assert collect(collector, dry_run=True) == []
        for call in ("gc(store => 'file:x')", "adopt_dropped(store => 'file:x')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="superuser"):
                collector.execute(f"SELECT polign.{call}")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="not the URL of a store"):
        collect(connection, store="ftp://x")
    for argument in ("older_than", "dry_run"):
        with pytest.raises(psycopg.errors.NullValueNotAllowed, match=argument):
            connection.execute(f"SELECT polign.gc({argument} => NULL)")
