"""Copies of an index that go on beside their origin: both write, flush, compact and collect garbage, and
neither loses what it needs."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dev.datasets import load
from tests.harness.cluster import Cluster
from tests.harness.garbage import DIM, Store, assert_whole, collect, let_transactions_pass
from tests.harness.vectors import random_vectors


@dataclass
class Side:
    """One of the two."""

    cluster: Cluster
    database: str
    number: int
    rounds: int = 0

    def within(self, work: Callable) -> None:
        with self.cluster.connect(self.database) as connection:
            work(connection)

    def insert(self, connection) -> None:
        self.rounds += 1
        first = self.number * 100_000 + self.rounds * 1000
        load(connection, "t", random_vectors(50, DIM, first), first)
        connection.execute("SELECT polign.flush('i')")

    def renew(self, connection) -> None:
        """All objects that the index refers to become garbage."""
        connection.execute("DELETE FROM t WHERE id %% 4 = %s", (self.rounds % 4,))
        connection.execute("VACUUM t")
        connection.execute("SELECT polign.compact('i')")

    def collect(self, connection) -> int:
        """Deletes what may be deleted, at the default age and at none. Gives how much that was."""
        let_transactions_pass(connection)
        connection.execute("SELECT polign.gc(dry_run => false)").fetchall()
        return sum(row.deleted for _ in range(2) for row in collect(connection))

    def assert_whole(self, connection) -> None:
        assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []
        assert_whole(connection, connection.execute("SELECT count(*) FROM t").fetchone()[0])


def go_on(origin: Side, copy: Side, store: Store) -> None:
    """Both go on, `origin` first."""
    sides = (origin, copy)
    for side in sides:
        side.within(side.insert)
    for side in sides:
        # It has replaced all that both of them know; the other one has replaced nothing yet, or all.
        side.within(side.renew)
        side.within(side.collect)
        for other in sides:
            other.within(other.assert_whole)
    # What they wrote after they had parted is theirs alone: at least one goes on under a new writer id, and
    # collects there.
    deleted = 0
    for side in (*sides, *sides):
        side.within(side.insert)
        side.within(side.renew)
        with side.cluster.connect(side.database) as connection:
            deleted += side.collect(connection)
        for other in sides:
            other.within(other.assert_whole)
    assert deleted
    assert sum(bool(own.heirs) for own in store.owners().values()) >= 1


@pytest.fixture
def promoted(cluster, database):
    standby = cluster.standby()
    standby.wait_for_replay(cluster)
    standby.execute("SELECT pg_promote()")
    yield standby
    standby.destroy()


@pytest.mark.parametrize("strategy", ["wal_log", "file_copy"])
def test_a_database_that_was_copied(cluster, database, store, strategy):
    cluster.execute(f"CREATE DATABASE copied TEMPLATE {database.name} STRATEGY {strategy}")
    go_on(Side(cluster, database.name, 1), Side(cluster, "copied", 2), store)


@pytest.mark.parametrize("strategy", ["wal_log", "file_copy"])
def test_a_database_that_was_copied_and_never_used(cluster, database, store, strategy):
    """Nothing in the store tells of it, and its origin collects."""
    cluster.execute(f"CREATE DATABASE copied TEMPLATE {database.name} STRATEGY {strategy}")
    origin, copy = Side(cluster, database.name, 1), Side(cluster, "copied", 2)
    old = set(store.keys())
    origin.within(origin.insert)
    origin.within(origin.renew)
    for dry_run in (True, False):
        with database.connect() as connection:
            let_transactions_pass(connection)
            rows = collect(connection, dry_run=dry_run)
        assert old <= {row.object for row in rows} and all('"copied" has a copy' in row.kept for row in rows)
    copy.within(copy.assert_whole)
    cluster.execute("DROP DATABASE copied")
    with database.connect() as connection:
        connection.execute("SELECT polign.adopt('i')")
        let_transactions_pass(connection)
        assert old <= {row.object for row in collect(connection) if row.deleted}
    origin.within(origin.assert_whole)


@pytest.mark.parametrize("how", ["DROP DATABASE copied", "DROP INDEX i", "REINDEX INDEX i"])
def test_a_copy_that_went_before_anybody_used_it_is_no_obstacle(cluster, database, store, how):
    old = set(store.keys())
    cluster.execute(f"CREATE DATABASE copied TEMPLATE {database.name}")
    cluster.execute(how, "postgres" if "DATABASE" in how else "copied")
    origin = Side(cluster, database.name, 1)
    origin.within(origin.insert)
    origin.within(origin.renew)
    with database.connect() as connection:
        let_transactions_pass(connection)
        assert old <= {row.object for row in collect(connection) if row.deleted}
    origin.within(origin.assert_whole)


@pytest.mark.parametrize("first", ["origin", "copy"])
def test_a_base_backup_that_was_started(cluster, database, store, first):
    twin = cluster.twin()
    try:
        sides = Side(cluster, database.name, 1), Side(twin, database.name, 2)
        go_on(*(sides if first == "origin" else reversed(sides)), store)
    finally:
        twin.destroy()


def test_a_promoted_standby(cluster, database, store, promoted):
    go_on(Side(cluster, database.name, 1), Side(promoted, database.name, 2), store)


def test_a_server_that_was_recovered_to_a_point_in_time(cluster, database, store):
    """To before the index was compacted, which the origin has done since."""
    origin = Side(cluster, database.name, 1)
    origin.within(origin.insert)
    before = cluster.execute("SELECT count(*) FROM t", database.name)

    def change():
        origin.within(origin.insert)
        origin.within(origin.renew)

    restored = cluster.restored(change)
    try:
        assert restored.execute("SELECT count(*) FROM t", database.name) == before
        go_on(origin, Side(restored, database.name, 2), store)
    finally:
        restored.destroy()


def test_a_server_that_was_rewound(cluster, database, store, promoted):
    """Both have written before, and the one that was rewound is promoted again later."""
    ahead, behind = Side(promoted, database.name, 1), Side(cluster, database.name, 2)
    for side in (ahead, behind):
        side.within(side.insert)
        side.within(side.renew)
    cluster.rewind_to(promoted)
    cluster.wait_for_replay(promoted)
    behind.within(behind.assert_whole)
    ahead.within(ahead.renew)
    cluster.wait_for_replay(promoted)
    ahead.within(ahead.collect)
    behind.within(behind.assert_whole)
    cluster.execute("SELECT pg_promote()")
    go_on(ahead, behind, store)
