"""Who may write under a writer id: copies of an index notice each other, a server alone never does."""

import threading
import time

import psycopg
import pytest

from dev import process
from dev.datasets import create_table, passages
from tests.harness.owners import owners
from tests.harness.search import search

ROWS = 2000
INDEX = "CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)"


@pytest.fixture
def cluster(own_cluster):
    return own_cluster(
        wal_level="replica", max_wal_senders=4, max_prepared_transactions=4, polign__fetch_timeout="4s"
    )


@pytest.fixture
def store(cluster, s3_server, bucket):
    """Gives the owner objects of the cluster's store."""
    return lambda: owners(s3_server.client(), bucket, cluster.postgres.directory.name)


@pytest.fixture
def database(cluster):
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base[:ROWS])
        connection.execute(INDEX)
    return database


@pytest.fixture
def copy(cluster):
    """Makes a copy of the server's files, which starts as if it were the server itself."""
    made = []

    def make():
        made.append(cluster.twin())
        return made[-1]

    yield make
    for twin in made:
        twin.destroy()


def vacuum(cluster, database) -> list[str]:
    """Carries out an ownership check; gives the warnings."""
    with cluster.connect(database.name) as connection:
        warnings: list[str] = []
        connection.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
        connection.execute("VACUUM t")
        return warnings


def only(found):
    ((writer, own),) = found.items()
    return writer, own


def assert_searchable(cluster, database):
    with cluster.connect(database.name) as connection:
        assert search(connection, "t", "cosine", passages().base[5]).ids[0] == 5


@pytest.mark.smoke
def test_a_server_alone_keeps_its_writer_id_and_changes_its_nonce(cluster, database, store):
    writer, own = only(store())
    (nonce,) = own.nonces
    assert vacuum(cluster, database) == []
    again, own = only(store())
    assert again == writer
    (changed,) = own.nonces
    assert changed != nonce
    cluster.restart()
    assert vacuum(cluster, database) == []
    assert only(store())[0] == writer


def test_an_owner_object_says_whose_it_is(cluster, database, store):
    vacuum(cluster, database)
    writer, own = only(store())
    ((nonce, says),) = own.nonces.items()
    with cluster.connect(database.name) as connection:
        (system, timeline, oid, index, index_id), = connection.execute(
            "SELECT (SELECT system_identifier::text FROM pg_control_system()),"
            " (SELECT timeline_id FROM pg_control_checkpoint()), d.oid, 't_polign'::regclass::oid,"
            " (SELECT index_id FROM polign.index_info('t_polign'))"
            " FROM pg_database d WHERE datname = current_database()"
        )
    assert says == {
        "format": 1, "writer": writer, "nonce": nonce, "index": index_id, "system": system,
        "timeline": timeline, "database": oid, "index_oid": index, "xid": "0",
    }


def test_a_build_names_its_transaction(cluster, database, store):
    with cluster.connect(database.name) as connection:
        connection.execute("DROP INDEX t_polign")
        before = set(store())
        for concurrently in ("", "CONCURRENTLY"):
            connection.execute(INDEX.replace("INDEX", f"INDEX {concurrently}"))
            connection.execute("DROP INDEX t_polign")
    built = {writer: own for writer, own in store().items() if writer not in before}
    assert len(built) == 2
    for own in built.values():
        ((_, says),) = own.nonces.items()
        assert int(says["xid"]) > 0


def test_checks_are_an_hour_apart(cluster, database, proxy):
    vacuum(cluster, database)
    with proxy.record() as requests:
        vacuum(cluster, database)
    assert not [r for r in requests if "owner/" in r.key or r.kind == "list"]


def test_an_index_without_objects_needs_no_check(cluster, database, store, proxy):
    with cluster.connect(database.name) as connection:
        connection.execute("CREATE TABLE e (id int PRIMARY KEY, embedding vector(384))")
        connection.execute("CREATE INDEX ON e USING polign_ivf (embedding vector_cosine_ops)")
        connection.execute("INSERT INTO e SELECT * FROM t LIMIT 100")
        with proxy.refusing():
            connection.execute("VACUUM e")


LIST = {"method": "GET", "query": "list-type=2"}
PUT = {"method": "PUT", "key": "owner/"}
DELETE = {"method": "DELETE", "key": "owner/"}


@pytest.mark.parametrize("request_", [LIST, PUT, DELETE])
def test_a_check_that_fails_is_a_warning_and_repaired_by_the_next(
    cluster, database, store, proxy, request_
):
    (writer, before) = only(store())
    with proxy.fault("403", **request_) as fault:
        warnings = vacuum(cluster, database)
    assert fault.hit and len(warnings) == 1, warnings
    assert "owner/" in warnings[0]
    assert vacuum(cluster, database) == []
    again, own = only(store())
    assert again == writer
    assert len(own.nonces) == 1 and not own.heirs and own.nonces.keys() != before.nonces.keys()
    assert_searchable(cluster, database)


@pytest.mark.parametrize("request_", [PUT, DELETE])
def test_a_request_that_came_through_but_failed_is_done_again(cluster, database, store, proxy, request_):
    (writer, _) = only(store())
    with proxy.fault("applied-500", **request_):
        assert len(vacuum(cluster, database)) == 1
    assert vacuum(cluster, database) == []
    again, own = only(store())
    assert again == writer and len(own.nonces) == 1


STEPS = [("stall", LIST), ("stall", PUT), ("stall", DELETE), ("applied-500", DELETE)]


def crash_in_check(cluster, database, proxy, action, request):
    """kill -9 while a request of an ownership check is on its way (or came through unnoticed)."""
    cluster.configure(polign__fetch_timeout="60s")
    with proxy.fault(action, **request) as fault:
        check = threading.Thread(
            target=lambda: pytest.raises(psycopg.OperationalError, vacuum, cluster, database)
        )
        check.start()
        process.wait_until(lambda: fault.hit, 30, "no request of an ownership check")
        cluster.crash()
        check.join(30)
    cluster.start()


@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize("second", STEPS)
def test_crashes_make_no_stranger_of_a_server(cluster, database, store, proxy, first, second):
    (writer, _) = only(store())
    for step in (first, second):
        crash_in_check(cluster, database, proxy, *step)
    assert vacuum(cluster, database) == []
    again, own = only(store())
    assert again == writer
    assert len(own.nonces) == 1 and not own.heirs
    assert_searchable(cluster, database)


def assert_went_on(store, origin):
    """A copy goes on under a new writer id, and said so under the old one. Gives the new id."""
    found = store()
    (heir,) = found[origin].heirs
    assert set(found) == {origin, heir}
    assert len(found[heir].nonces) == 1 and not found[heir].heirs
    ((_, says),) = found[heir].nonces.items()
    assert found[origin].heirs[heir]["writer"] == says["writer"] == heir
    return heir


def test_a_copy_of_the_files_goes_on_under_a_new_writer_id(cluster, database, store, copy):
    origin, _ = only(store())
    twin = copy()
    assert vacuum(cluster, database) == []
    assert vacuum(twin, database) == []
    assert_went_on(store, origin)
    for server in (cluster, twin):
        assert_searchable(server, database)
    twin.restart()
    assert vacuum(twin, database) == []
    assert_went_on(store, origin)


def test_the_copy_that_comes_first_keeps_the_writer_id(cluster, database, store, copy):
    origin, _ = only(store())
    twin = copy()
    assert vacuum(twin, database) == []
    assert only(store())[0] == origin
    assert vacuum(cluster, database) == []
    assert_went_on(store, origin)


def test_a_template_copy_goes_on_under_a_new_writer_id(cluster, database, store):
    origin, _ = only(store())
    cluster.execute(f"CREATE DATABASE copied TEMPLATE {database.name}")
    with cluster.connect("copied") as connection:
        connection.execute("VACUUM t")
    heir = assert_went_on(store, origin)
    ((_, says),) = store()[heir].nonces.items()
    assert cluster.execute(f"SELECT datname FROM pg_database WHERE oid = {says['database']}") == [("copied",)]
    assert vacuum(cluster, database) == []
    assert_went_on(store, origin)


def test_a_promoted_standby_goes_on_under_a_new_writer_id(cluster, database, store):
    origin, _ = only(store())
    with cluster.standby() as standby:
        standby.execute("SELECT pg_promote()")
        assert vacuum(standby, database) == []
        heir = assert_went_on(store, origin)
        ((_, says),) = store()[heir].nonces.items()
        assert says["timeline"] == 2
        assert vacuum(cluster, database) == []
        assert_went_on(store, origin)
        assert_searchable(standby, database)


@pytest.mark.parametrize("request_", [LIST, PUT, {"method": "PUT", "key": "/heir-"}])
def test_a_copy_that_fails_on_the_way_goes_on_later(cluster, database, store, proxy, copy, request_):
    origin, _ = only(store())
    twin = copy()
    vacuum(cluster, database)
    with proxy.fault("403", **request_):
        assert len(vacuum(twin, database)) == 1
    assert vacuum(twin, database) == []
    assert_went_on(store, origin)


def test_a_copy_that_is_only_read_goes_on_under_a_new_writer_id(cluster, database, store):
    origin, _ = only(store())
    cluster.execute(f"CREATE DATABASE copied TEMPLATE {database.name}")
    with cluster.connect("copied") as connection:
        search(connection, "t", "cosine", passages().base[5])
    process.wait_until(lambda: len(store()) == 2, 20, "the copy says nothing")
    heir = assert_went_on(store, origin)
    standby = cluster.standby()
    try:
        with standby.connect(database.name) as connection:
            search(connection, "t", "cosine", passages().base[5])
            standby.execute("SELECT pg_promote()")
            search(connection, "t", "cosine", passages().base[5])
        process.wait_until(lambda: len(store()[origin].heirs) == 2, 20, "the promoted server says nothing")
        assert len(store()[heir].nonces) == 1 and not store()[heir].heirs
    finally:
        standby.destroy()


def test_a_copy_that_is_read_while_the_store_is_down_tries_again(cluster, database, store, proxy):
    origin, _ = only(store())
    cluster.configure(polign__fetch_timeout="1s")
    cluster.execute(f"CREATE DATABASE copied TEMPLATE {database.name}")
    with cluster.connect("copied") as connection:
        with proxy.fault("403", "PUT", "heir-") as fault:
            deadline = time.monotonic() + 6
            while time.monotonic() < deadline:
                search(connection, "t", "cosine", passages().base[5])
                time.sleep(0.05)
        assert 1 <= fault.hit <= 6, "attempts are further and further apart"

        def said() -> bool:
            search(connection, "t", "cosine", passages().base[5])
            return bool(store()[origin].heirs)

        process.wait_until(said, 30, "the copy says nothing", interval=0.2)
    process.wait_until(lambda: len(store()) == 2, 10, "the copy has no nonce")
    assert_went_on(store, origin)


def test_an_unlogged_index_that_was_reset_starts_anew(cluster, database, store):
    with cluster.connect(database.name) as connection:
        connection.execute("CREATE UNLOGGED TABLE u AS SELECT id, embedding FROM t")
        connection.execute("CREATE INDEX ON u USING polign_ivf (embedding vector_cosine_ops)")
        connection.execute("VACUUM u")
    before = store()
    cluster.crash()
    cluster.start()
    with cluster.connect(database.name) as connection:
        connection.execute("VACUUM u")
        connection.execute("INSERT INTO u SELECT id, embedding FROM t")
        connection.execute("VACUUM u")
    assert store() == before


def test_a_check_can_be_cancelled(cluster, database, store, proxy):
    cluster.configure(polign__fetch_timeout="60s")
    origin, _ = only(store())
    with cluster.connect(database.name) as connection, proxy.fault("stall", "PUT", "owner/") as fault:

        def cancel():
            process.wait_until(lambda: fault.hit, 30, "no check")
            connection.cancel()

        cancelling = threading.Thread(target=cancel)
        cancelling.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute("VACUUM t")
        cancelling.join()
    assert vacuum(cluster, database) == []
    writer, own = only(store())
    assert writer == origin and len(own.nonces) == 1
