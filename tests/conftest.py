"""Fixtures: one S3 server a run with a proxy before it, one server for most tests, databases on it."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest

from dev.paths import dev_dir, pg_version
from dev.s3 import REGION
from dev.s3server import S3Server
from dev.tools import ensure_postgres
from tests.harness.cluster import Cluster
from tests.harness.s3proxy import S3Proxy

BUCKET = "polign-test"


@pytest.fixture(scope="session")
def run_directory():
    """For everything of this run; removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="test-", dir=dev_dir()))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server(run_directory):
    server = S3Server(run_directory / "s3")
    server.start(bucket=BUCKET)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def bucket(s3_server):
    return BUCKET


@pytest.fixture(scope="session")
def _proxy(s3_server):
    proxy = S3Proxy(s3_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(_proxy):
    """The proxy with no fault in force, before and after the test."""
    _proxy.lift()
    yield _proxy
    _proxy.lift()


@pytest.fixture(scope="session")
def install():
    return ensure_postgres(pg_version())


@pytest.fixture(scope="session")
def s3_settings(s3_server, _proxy):
    """Settings of a server whose store is the bucket, seen through the proxy."""
    return {
        "polign.store": f"s3://{BUCKET}/shared",
        "polign.s3_endpoint": _proxy.endpoint,
        "polign.s3_region": REGION,
        "polign.credentials_file": s3_server.credentials_file,
    }


@pytest.fixture(scope="session")
def _shared_cluster(install, run_directory, s3_settings):
    cluster = Cluster.create(install, run_directory / "shared", s3_settings)
    yield cluster
    cluster.destroy()


@pytest.fixture
def cluster(_shared_cluster, proxy):
    """The server that most tests share, up and with its own settings before and after the test."""
    _shared_cluster.start()
    yield _shared_cluster
    _shared_cluster.reset_settings()
    _shared_cluster.start()


@pytest.fixture
def by_hand(cluster):
    """No worker does anything by itself."""
    cluster.configure(polign__delta_limit=0)


@pytest.fixture
def own_cluster(install, run_directory, s3_settings, proxy):
    """Makes servers that a test has for itself: own_cluster(**settings), underscores as in configure."""
    made: list[Cluster] = []

    def make(**settings) -> Cluster:
        directory = run_directory / f"own{next(_own_numbers)}"
        own = {**s3_settings, "polign.store": f"s3://{BUCKET}/{directory.name}"}
        own.update({k.replace("__", "."): v for k, v in settings.items()})
        made.append(Cluster.create(install, directory, own))
        return made[-1]

    yield make
    for cluster in made:
        cluster.destroy()


_own_numbers = itertools.count(1)


@pytest.fixture
def database(cluster):
    """A fresh database with the extension, dropped at the end."""
    database = cluster.database()
    yield database
    database.drop()


@pytest.fixture
def connection(database):
    with database.connect() as connection:
        yield connection


@pytest.fixture
def store_prefix(cluster):
    """A key prefix that only this test writes to."""
    prefix = f"prefix{next(_own_numbers)}"
    cluster.configure(polign__store=f"s3://{BUCKET}/{prefix}")
    return prefix


@pytest.fixture
def user(connection, database):
    """A connection of a role without privileges."""
    connection.execute(f"CREATE ROLE {database.name}_user LOGIN")
    with database.connect(user=f"{database.name}_user") as user:
        yield user
    connection.execute(f"DROP OWNED BY {database.name}_user; DROP ROLE {database.name}_user")
