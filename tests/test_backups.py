"""Base backups, restores to an earlier time, and old primaries that come back: what is copied is the index's
pages, what they name lies in the bucket."""

from pathlib import Path

import pytest

from dev.paths import service_directory, write_private
from dev.process import wait_until
from tests.harness.cluster import Cluster
from tests.harness.tables import INDEX, assert_right, churn, create_table


@pytest.fixture
def archive(run_directory) -> Path:
    return service_directory(run_directory / "archive")


@pytest.fixture
def origin(own_cluster, archive):
    return own_cluster(
        wal_log_hints="on", wal_keep_size="1GB", archive_mode="on", archive_command=f"cp %p {archive}/%f",
    )


@pytest.fixture
def database(origin):
    database = origin.database()
    with database.connect() as connection:
        create_table(connection)
        connection.execute(INDEX)
        churn(connection)
    return database


def assert_both_go_on(database, copy: Cluster) -> None:
    """Each writes, and harms neither itself nor the other."""
    with database.connect() as one, copy.connect(database.name) as other:
        for session, count in ((one, 100), (other, 200), (one, 300), (other, 300)):
            churn(session, count)
            session.execute("VACUUM t")
            for either in (one, other):
                assert_right(either)
        other.execute("REINDEX INDEX t_polign")
        one.execute("REINDEX INDEX t_polign")
        for either in (one, other):
            either.execute("SELECT polign.cache_clear()")
            assert_right(either)


def rows(connection) -> list:
    return connection.execute("SELECT id, embedding::text, note FROM t ORDER BY id").fetchall()


def test_a_base_backup_holds_the_pages_and_not_the_cache(origin, database):
    with database.connect() as connection:
        assert_right(connection)
        before = rows(connection)
        ((pages,),) = connection.execute("SELECT pg_relation_filepath('t_polign')")
    with origin.copy() as copy:
        cache = origin.cache_directory.relative_to(origin.postgres.data)
        assert list(origin.cache_directory.glob("slab.*"))
        assert not list(copy.postgres.data.rglob("slab.*"))
        assert not (copy.postgres.data / cache).exists()
        assert (copy.postgres.data / pages).stat().st_size > 8192
        copy.start()
        with copy.connect(database.name) as connection:
            assert rows(connection) == before
            assert_right(connection)
        assert_both_go_on(database, copy)


def test_a_base_backup_of_a_server_that_keeps_its_segments_itself(own_cluster):
    """Paths in the data directory have to fit into the archive of pg_basebackup."""
    origin = own_cluster(polign__store="file:polign_store")
    database = origin.database()
    with database.connect() as connection:
        create_table(connection)
        connection.execute(INDEX)
        before = rows(connection)
    with origin.copy() as copy:
        assert list((copy.postgres.data / "polign_store").rglob("*.seg"))
        copy.start()
        with copy.connect(database.name) as connection:
            assert rows(connection) == before
            assert_right(connection)


def test_a_restore_to_an_earlier_time(origin, database, archive):
    with origin.copy() as restored:
        with database.connect() as connection:
            churn(connection)
            connection.execute("VACUUM t")
            before = rows(connection)
            connection.execute("SELECT pg_create_restore_point('wanted')")
            churn(connection)
            connection.execute("REINDEX INDEX t_polign")
            connection.execute("DELETE FROM t WHERE id % 3 = 0")
            connection.execute("VACUUM t")
            ((last,),) = connection.execute("SELECT pg_walfile_name(pg_switch_wal())")
        wait_until(lambda: (archive / last).exists(), 30, f"{last} is not archived")
        restored.configure(
            archive_mode="off", restore_command=f"cp {archive}/%f %p", recovery_target_name="wanted",
            recovery_target_action="promote",
        )
        write_private(restored.postgres.data / "recovery.signal", "")
        restored.start()
        wait_until(lambda: restored.execute("SELECT NOT pg_is_in_recovery()")[0][0], 30, "no end of recovery")
        with restored.connect(database.name) as connection:
            assert rows(connection) == before
            assert_right(connection)
        assert_both_go_on(database, restored)


def test_an_old_primary_is_rewound_and_follows_the_new_one(origin, database):
    with origin.standby() as promoted:
        promoted.wait_for_replay(origin)
        promoted.execute("SELECT pg_promote()")
        assert_both_go_on(database, promoted)
        promoted.execute("CHECKPOINT")
        origin.rewind_to(promoted)
        with promoted.connect(database.name) as connection:
            churn(connection)
            connection.execute("VACUUM t")
            before = rows(connection)
        origin.wait_for_replay(promoted)
        with database.connect() as connection:
            assert connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
            assert rows(connection) == before
            assert_right(connection)
