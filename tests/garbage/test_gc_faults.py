"""Garbage collection when something goes wrong, and who may call it."""

import threading
import time

import psycopg
import pytest

from dev import process
from tests.harness.garbage import (
    assert_whole,
    collect,
    create,
    index_keys,
    leave_pending,
    let_transactions_pass,
    retire,
)
from tests.test_crash_matrix import back


@pytest.mark.parametrize("what", ["retired", "dropped"])
@pytest.mark.parametrize("action", ["403", "applied-500"])
def test_a_deletion_that_fails_is_done_by_the_next_run(cluster, connection, store, proxy, what, action):
    cluster.configure(polign__fetch_timeout="1s")
    old = set(store.keys())
    retire(connection) if what == "retired" else connection.execute("DROP INDEX i")
    with proxy.fault(action, "DELETE", ".seg"), pytest.raises(psycopg.errors.IoError) as error:
        collect(connection)
    assert "could not delete" in str(error.value)
    collect(connection)
    assert not old & set(store.keys())
    assert collect(connection) == []
    assert len(store.owners()) == (1 if what == "retired" else 0)


@pytest.mark.parametrize(("what", "place"), [
    *(("listed", place) for place in (
        *(f"claim: {step}" for step in ("logged", "put", "deleted")),
        *(f"gc: {step}" for step in ("claimed", "chosen", "deleted", "unlisted:0", "unlisted:1")),
    )),
    *(("dropped", place) for place in (
        *(f"gc: {step}" for step in ("noted", "chosen", "deleted", "emptied")),
        *(f"owner: cleared:{passed}" for passed in range(3)),
    )),
])
def test_a_process_that_is_killed_while_it_deletes(cluster, database, connection, store, proxy, what, place):
    """Beside an index with retired and pending objects, or one that was dropped, stands another."""
    create(connection, "n", "ni")
    before, others = (index_keys(connection, store, index) for index in ("i", "ni"))
    assert before and others
    if what == "listed":
        rows = retire(connection)
        leave_pending(cluster, connection, proxy)
    else:
        connection.execute("DROP INDEX i")
    connection.execute(f"SET polign.failpoint = '{place}'")
    with pytest.raises(psycopg.OperationalError):
        collect(connection)
    with back(cluster, database.name) as connection:
        assert others <= set(store.keys())
        for run in range(3):
            for index in ("i", "ni") if what == "listed" else ("ni",):
                assert connection.execute("SELECT * FROM polign.verify(%s, true)", (index,)).fetchall() == []
            let_transactions_pass(connection)
            rows_left = collect(connection)
            assert all(row.kept is None for row in rows_left) and (run == 0 or not rows_left)
        assert not before & set(store.keys())
        assert_whole(connection, table="n")
        if what == "listed":
            assert_whole(connection, rows + 50)
            assert len(store.owners()) == 2
            objects = "SELECT sum(objects) FROM unnest('{i,ni}'::regclass[]) i, polign.index_info(i)"
            assert connection.execute(objects).fetchone()[0] == len(store.keys())
        else:
            assert len(store.owners()) == 1 and set(store.keys()) == others


def test_a_store_that_does_not_tell_of_uploads_is_collected_all_the_same(connection, store, proxy):
    connection.execute("DROP INDEX i")
    notices = []
    connection.add_notice_handler(lambda notice: notices.append((notice.severity, notice.message_primary)))
    with proxy.fault("403", "GET", query="uploads") as fault:
        assert all(row.deleted for row in collect(connection))
    assert fault.hit and (store.keys(), store.owners()) == ({}, {})
    ((severity, message),) = notices
    assert severity == "WARNING" and "unfinished uploads" in message


def test_a_run_can_be_cancelled(cluster, connection, store, proxy):
    cluster.configure(polign__fetch_timeout="60s")
    connection.execute("DROP INDEX i")
    with proxy.fault("stall", "DELETE") as fault:
        cancel = threading.Thread(
            target=lambda: (process.wait_until(lambda: fault.hit, 30, "no run"), connection.cancel())
        )
        cancel.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            collect(connection)
        cancel.join()
    assert all(row.deleted for row in collect(connection))
    assert (store.keys(), store.owners()) == ({}, {})


def test_more_objects_than_a_page_of_a_listing(connection, store):
    (key,) = store.keys()
    folder = key.rsplit("/", 1)[0]
    threads = [
        threading.Thread(target=lambda n=n: [store.put(f"{folder}/{i:032x}.seg") for i in range(n, 2100, 8)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.execute("DROP INDEX i")
    assert len(collect(connection, dry_run=True)) == 2101
    assert sum(row.deleted for row in collect(connection)) == 2101
    assert (store.keys(), store.owners()) == ({}, {})


def test_a_standby_refuses(cluster, database, standby):
    with standby.connect(database.name) as there, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        collect(there, dry_run=True)


def test_a_read_only_transaction_refuses_to_delete(connection):
    with connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        assert collect(connection, dry_run=True) == []
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            collect(connection)


def test_who_may(connection, database):
    connection.execute("CREATE ROLE nobody LOGIN")
    with database.connect(user="nobody") as nobody, pytest.raises(psycopg.errors.InsufficientPrivilege):
        collect(nobody, dry_run=True)


def test_who_may_not_see_standbys_deletes_nothing_that_they_need(connection, database, store, standby):
    connection.execute("CREATE ROLE nobody LOGIN; GRANT EXECUTE ON FUNCTION polign.gc TO nobody")
    retire(connection)
    with database.connect(user="nobody") as nobody:
        rows = collect(nobody)
        assert rows and all("standby" in row.kept for row in rows)


def test_a_negative_age_is_refused(connection):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="negative"):
        collect(connection, "-1 day", dry_run=True)


def test_a_list_that_is_old_stops_the_run(connection, store, proxy):
    """It may lack what somebody else has said."""
    retire(connection)
    keys = set(store.keys())
    for action, says in [("unlisted", "does not list what was just written"), ("endless", "could not list")]:
        stopped = pytest.raises(psycopg.errors.IoError, match=says)
        with proxy.fault(action, "GET", query="owner") as fault, stopped:
            collect(connection)
        assert fault.hit
    assert set(store.keys()) == keys
    assert any(row.deleted for row in collect(connection))


def test_what_has_no_date_is_young(connection, store, proxy):
    connection.execute("DROP INDEX i")
    let_transactions_pass(connection)
    with proxy.fault("undated", "GET") as fault:
        for _ in range(2):
            rows = collect(connection, "1 second")
            assert rows and not any(row.deleted for row in rows)
            time.sleep(2.5)
    assert fault.hit
    assert all(row.deleted for row in collect(connection, "1 second"))
    assert store.keys() == {}
