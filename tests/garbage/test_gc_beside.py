"""Garbage collection beside everything else: builds, drops, unfinished transactions, writes, copies."""

import threading
import time

import psycopg
import pytest

from dev import process
from dev.datasets import load
from dev.process import run_as_service, wait_until
from tests.harness.garbage import (
    DIM,
    ROWS,
    assert_whole,
    collect,
    create,
    let_transactions_pass,
    retire,
)
from tests.harness.search import search
from tests.harness.vectors import random_vectors


def test_a_build_that_is_running_is_safe(cluster, database, connection, store, proxy):
    cluster.configure(polign__fetch_timeout="60s")
    with database.connect() as builder, proxy.fault("stall", "PUT", ".seg") as fault:
        build = threading.Thread(target=builder.execute, args=("CREATE INDEX second ON t USING polign_ivf"
                                                               " (embedding vector_l2_ops)",))
        build.start()
        process.wait_until(lambda: fault.hit, 30, "no segment is uploaded")
        writers = set(store.owners())
        assert len(writers) == 2
        assert collect(connection) == []
        assert set(store.owners()) == writers
        proxy.lift()
        build.join(30)
    assert collect(connection) == []
    connection.execute("DROP INDEX i")
    collect(connection)
    assert_whole(connection)


def test_a_rebuild_that_is_running_is_safe(database, connection, store):
    """Its index is locked, and what is locked may be what any owner object speaks of."""
    connection.execute("CREATE INDEX second ON t USING polign_ivf (embedding vector_l2_ops)")
    connection.execute("DROP INDEX second")
    with database.connect() as builder:
        builder.execute("BEGIN; REINDEX INDEX i")
        keys = set(store.keys())
        rows = collect(connection)
        assert rows and all("locked" in row.kept for row in rows)
        assert set(store.keys()) == keys
        builder.execute("COMMIT")
    assert all(row.deleted for row in collect(connection))
    assert_whole(connection)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_an_index_of_an_unfinished_transaction_is_safe(database, connection, store, end):
    with database.connect() as builder:
        builder.execute("BEGIN; CREATE TABLE n (LIKE t INCLUDING ALL); INSERT INTO n SELECT * FROM t")
        keys = set(store.keys())
        builder.execute("REINDEX TABLE n")
        built = set(store.keys()) - keys
        assert built and collect(connection) == []
        builder.execute(end)
    assert {row.object for row in collect(connection)} == (set() if end == "COMMIT" else built)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_an_index_of_a_prepared_transaction_is_safe(cluster, database, connection, store, end):
    with database.connect() as builder:
        builder.execute("BEGIN")
        create(builder, "n", "ni")
        builder.execute("PREPARE TRANSACTION 'two'")
    assert collect(connection) == []
    cluster.crash()
    cluster.start()
    with database.connect() as connection:
        keys = set(store.keys())
        assert collect(connection) == []
        connection.execute(f"{end} PREPARED 'two'")
        deleted = [row for row in collect(connection) if row.deleted]
        assert bool(deleted) == (end == "ROLLBACK")
        if end == "COMMIT":
            assert set(store.keys()) == keys
            assert_whole(connection, table="n")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_an_index_that_somebody_is_dropping_is_safe(database, connection, store, end):
    with database.connect() as other:
        other.execute("BEGIN; DROP INDEX i")
        keys = set(store.keys())
        collect(connection)
        assert set(store.keys()) == keys
        other.execute(end)
    assert len(collect(connection)) == (len(keys) if end == "COMMIT" else 0)


def test_an_index_that_this_transaction_drops_is_safe(connection, store):
    keys = set(store.keys())
    with pytest.raises(psycopg.errors.ActiveSqlTransaction), connection.transaction():
        connection.execute("DROP INDEX i")
        collect(connection)
    assert set(store.keys()) == keys
    assert_whole(connection)


def test_a_flush_that_is_running_is_safe(cluster, database, connection, store, proxy):
    cluster.configure(polign__fetch_timeout="60s")
    load(connection, "t", random_vectors(50, DIM, 3), ROWS)
    with database.connect() as flushing, proxy.fault("delay", "PUT", ".seg", seconds=3) as fault:
        flush = threading.Thread(target=flushing.execute, args=("SELECT polign.flush('i')",))
        flush.start()
        process.wait_until(lambda: fault.hit, 30, "no segment is uploaded")
        assert not any(row.deleted for row in collect(connection))
        flush.join(30)
    assert_whole(connection, ROWS + 50)
    assert collect(connection) == []


def test_two_runs_at_once(database, connection, store, proxy):
    rows = retire(connection)
    with database.connect() as other:
        create(other, "n", "ni")
        other.execute("DROP INDEX ni")
        with proxy.fault("delay", "DELETE", seconds=0.3):
            results = []
            run = threading.Thread(target=lambda: results.append(collect(other)))
            run.start()
            results.append(collect(connection))
            run.join(60)
    assert len(results) == 2
    collect(connection)
    assert len(store.owners()) == 1
    assert_whole(connection, rows)
    assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []


def test_everything_beside_runs(cluster, database, connection, store):
    """Nothing of an index that is there is ever missing, and at the end nothing is left over."""
    stop, errors = threading.Event(), []

    def work(step):
        def run():
            try:
                with database.connect() as own:
                    while not stop.is_set():
                        step(own)
            except Exception as error:
                errors.append(error)
                stop.set()

        return threading.Thread(target=run)

    def rebuild(own):
        own.execute("REINDEX INDEX CONCURRENTLY i")
        own.execute("CREATE INDEX other ON t USING polign_ivf (embedding vector_l2_ops)")
        own.execute("DROP INDEX other")

    def tend(own, function):
        try:
            own.execute(f"SELECT polign.{function}('i')")
        except psycopg.Error as error:  # rebuilt under it
            if error.sqlstate not in ("55000", "55P03", "42809"):
                raise

    def maintain(own):
        own.execute("UPDATE t SET embedding = embedding WHERE id % 7 = 0")
        own.execute("VACUUM t")
        tend(own, "compact")

    ids = iter(range(ROWS, 1_000_000, 20))

    def insert(own):
        first = next(ids)
        load(own, "t", random_vectors(20, DIM, first), first)
        tend(own, "flush")

    def read(own):
        own.execute("SET enable_seqscan = off")
        assert len(search(own, "t", "l2", random_vectors(1, DIM, next(queries))[0], 10).ids) == 10
        done.add("read")

    queries, done = iter(range(1_000_000)), set()

    def gc(own):
        if any(row.deleted for row in collect(own)):
            done.add("gc")

    threads = [work(step) for step in (rebuild, maintain, insert, read, read, gc, gc)]
    for thread in threads:
        thread.start()
    stop.wait(20)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert done == {"read", "gc"}
    let_transactions_pass(connection)
    collect(connection)
    collect(connection)
    assert_whole(connection, connection.execute("SELECT count(*) FROM t").fetchone()[0])
    assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []
    assert len(store.owners()) == 1
    objects = connection.execute("SELECT objects FROM polign.index_info('i')").fetchone()[0]
    assert len(store.keys()) == objects


# Copies.


def test_what_a_copy_may_need_stays(cluster, database, connection, store):
    copy = f"{database.name}_copy"
    connection.close()
    cluster.execute(f"CREATE DATABASE {copy} TEMPLATE {database.name}")
    with cluster.connect(copy) as there, database.connect() as here:
        there.execute("VACUUM t")
        old = set(store.keys())
        for connection in (here, there):
            retire(connection)
        rows = collect(here)
        assert {row.object for row in rows} == old and all("a copy" in row.kept for row in rows)
        rows = collect(there)
        assert {row.object for row in rows} == old and all("inherited" in row.kept for row in rows)
        assert old <= set(store.keys())
        here.execute("DROP INDEX i")
        assert not any(row.deleted for row in collect(here) if row.object in old)
        assert_whole(there, ROWS - ROWS // 3)


def test_a_copy_that_was_never_written_finds_out_before_it_deletes(cluster, database, connection, store):
    copy = f"{database.name}_copy"
    retired = set(store.keys())
    retire(connection)
    connection.close()
    cluster.execute(f"CREATE DATABASE {copy} TEMPLATE {database.name}")
    with cluster.connect(copy) as there, database.connect() as here:
        would = collect(there, dry_run=True)
        assert {row.object for row in would} == retired and all("copy" in row.kept for row in would)
        rows = collect(there)
        assert {row.object for row in rows} == retired and all("inherited" in row.kept for row in rows)
        rows = collect(here)
        assert all("a copy" in row.kept for row in rows)


def test_a_twin_of_the_server_is_noticed(cluster, database, connection, store):
    retired = set(store.keys())
    retire(connection)
    twin = cluster.twin()
    try:
        with twin.connect(database.name) as there:
            assert not any(row.deleted for row in collect(there, "1 day"))
            rows = collect(connection)
            assert {row.object for row in rows} == retired and not any(row.deleted for row in rows)
            rows = collect(there)
            assert {row.object for row in rows} >= retired
            assert not any(row.deleted for row in rows if row.object in retired)
            assert_whole(there, ROWS - ROWS // 3)
    finally:
        twin.destroy()


@pytest.mark.parametrize("built", ["CREATE INDEX j ON t USING polign_ivf (embedding vector_l2_ops)",
                                   "REINDEX INDEX i"])
def test_what_was_built_on_one_of_two_twins_stays_while_that_collects(
    cluster, database, connection, store, built
):
    """The other one has not seen it, and takes it for gone: whoever has it says that it is not."""
    twin = cluster.twin()
    try:
        before = set(store.keys())
        connection.execute(built)
        new = set(store.keys()) - before
        with twin.connect(database.name) as there:
            for _ in range(3):
                rows = [row for row in collect(there, "3 seconds") if row.object in new]
                assert {row.object for row in rows} == new and not any(row.deleted for row in rows)
                time.sleep(1.5)  # the store's clock counts in seconds
                collect(connection, "3 seconds")
                time.sleep(2)
            # Not any more when it is silent for as long.
            for _ in range(2):
                rows = [row for row in collect(there, "3 seconds") if row.object in new]
                time.sleep(4.5)
            assert all(row.deleted for row in rows)
    finally:
        twin.destroy()


def test_an_index_that_is_only_read_is_said_to_be_there_once_a_day(cluster, database, connection, store):
    ((path,),) = connection.execute("SELECT pg_relation_filepath('i')")
    before = store.owners()
    connection.close()
    cluster.stop()
    run_as_service([cluster.postgres.install.bin / "pg_checksums", "--disable", "-D", cluster.postgres.data],
                   check=True, capture_output=True)
    file = cluster.postgres.data / path
    page = bytearray(file.read_bytes())
    minutes = int((time.time() - 946_684_800) / 60)
    # A build counts as checked an hour before: the first VACUUM is to check.
    recent = [m.to_bytes(4, "little") for m in range(minutes - 63, minutes - 58)]
    (at,) = {page.find(value, 0, 8192) for value in recent} - {-1}
    page[at : at + 4] = (minutes - 23 * 60).to_bytes(4, "little")
    file.write_bytes(page)
    cluster.start()
    with database.connect() as connection:
        assert_whole(connection)
        time.sleep(1)
    assert store.owners() == before
    cluster.stop()
    page[at : at + 4] = (minutes - 25 * 60).to_bytes(4, "little")
    file.write_bytes(page)
    cluster.start()
    with database.connect() as connection:
        assert_whole(connection)
        wait_until(lambda: store.owners() != before, 20, "no ownership check")
        assert store.owners().keys() == before.keys()


def test_a_promoted_server_leaves_alone_what_was_written_on_the_timeline_before(
    cluster, database, connection, store, standby
):
    connection.execute("CREATE INDEX second ON t USING polign_ivf (embedding vector_l2_ops)")
    connection.execute("DROP INDEX second")
    standby.wait_for_replay(cluster)
    standby.execute("SELECT pg_promote()")
    keys = set(store.keys())
    with standby.connect(database.name) as there:
        rows = collect(there)
        assert rows and all("timeline 1" in row.kept for row in rows)
    assert set(store.keys()) == keys
