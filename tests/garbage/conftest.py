"""Fixtures: a server, a store and an index of its own for each test, because what is garbage depends on all
that is there."""

import pytest

from tests.harness.garbage import Store, create


@pytest.fixture
def cluster(own_cluster):
    return own_cluster(
        wal_level="replica", max_wal_senders=4, max_prepared_transactions=4, polign__delta_limit=0,
        wal_keep_size="1GB",  # pg_rewind reads what was written since the servers parted
    )


@pytest.fixture
def store(cluster, s3_server, bucket):
    return Store(s3_server.client(), bucket, cluster.postgres.directory.name)


@pytest.fixture
def database(cluster):
    """With table `t` and its index `i`."""
    database = cluster.database()
    with database.connect() as connection:
        create(connection)
    return database


@pytest.fixture
def connection(database):
    with database.connect() as connection:
        yield connection


@pytest.fixture
def standby(cluster, database):
    standby = cluster.standby()
    yield standby
    standby.destroy()
