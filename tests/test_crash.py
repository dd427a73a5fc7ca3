"""Power cuts and killed processes: acknowledged rows are there afterwards."""


import psycopg
import pytest

from dev.datasets import create_table, passages, vector_text
from tests.harness.search import assert_equals_exact, search

INDEX = "CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)"
BUILT = 8000


@pytest.fixture
def cluster(own_cluster):
    return own_cluster(fsync="on", full_page_writes="on")


def assert_complete(database, rows):
    with database.connect() as connection:
        connection.execute("SET enable_seqscan = off; SET polign.target_recall = 1.0")
        assert sorted(search(connection, "t", "cosine", passages().queries[0], 20_000).ids) == rows
        assert_equals_exact(connection, "t", "t_polign", "cosine", passages().queries[:10], 20)


def test_postmaster_killed_after_a_build(cluster):
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base)
        connection.execute(INDEX)
        cluster.crash()
    cluster.start()
    assert_complete(database, list(range(10_000)))


@pytest.mark.smoke
def test_postmaster_killed_after_inserts(cluster):
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base[:BUILT])
        connection.execute(INDEX)
        for row in range(BUILT, BUILT + 1000):
            connection.execute(
                "INSERT INTO t VALUES (%s, %s::vector)", (row, vector_text(passages().base[row]))
            )
    unfinished = database.connect()
    unfinished.execute("BEGIN")
    unfinished.execute("INSERT INTO t VALUES (99999, %s::vector)", (vector_text(passages().base[0]),))
    cluster.crash()
    cluster.start()
    assert_complete(database, list(range(BUILT + 1000)))


def test_postmaster_killed_after_delete_and_vacuum(cluster):
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base)
        connection.execute(INDEX)
        connection.execute("DELETE FROM t WHERE id % 2 = 0")
        connection.execute("VACUUM t")
        cluster.crash()
    cluster.start()
    assert_complete(database, list(range(1, 10_000, 2)))


def test_postmaster_killed_during_a_build(cluster):
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base)
        import threading

        killer = threading.Timer(0.5, cluster.crash)
        killer.start()
        with pytest.raises(psycopg.OperationalError):
            for _ in range(100):
                connection.execute(INDEX)
                connection.execute("DROP INDEX t_polign")
        killer.join()
    cluster.start()
    with database.connect() as connection:
        connection.execute("DROP INDEX IF EXISTS t_polign")
        connection.execute(INDEX)
    assert_complete(database, list(range(10_000)))


def test_without_preload(own_cluster):
    """CREATE EXTENSION alone is enough: the first backend that needs it starts the supervisor."""
    cluster = own_cluster(shared_preload_libraries="")
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base)
        connection.execute(INDEX)
        cluster.execute("SELECT 1")
        assert search(connection, "t", "cosine", passages().base[5]).ids[0] == 5
    assert len(cluster.store_pids()) == 1
    cluster.stop()
    cluster.wipe_cache()
    cluster.start()
    assert_complete(database, list(range(10_000)))


def test_file_store_needs_nothing_configured(own_cluster):
    cluster = own_cluster(polign__store="file:polign_store")
    database = cluster.database()
    with database.connect() as connection:
        create_table(connection, "t", passages().base)
        connection.execute(INDEX)
    assert list((cluster.postgres.data / "polign_store").rglob("*.seg"))
    cluster.crash()
    cluster.wipe_cache()
    cluster.start()
    assert_complete(database, list(range(10_000)))
