"""A process that is killed anywhere in a write loses nothing that was acknowledged, and breaks nothing.

Test builds have named places at which a process kills itself. Postgres restarts the whole server then, as
after a power loss. `make test` tries a third of the places, `make soak` all of them.
"""

import numpy as np
import psycopg
import pytest

from dev.datasets import load
from dev.process import wait_until
from tests.harness import soak
from tests.harness.cluster import Cluster
from tests.harness.search import assert_equals_exact
from tests.harness.vectors import random_vectors
from tests.test_insert import OPS

DIM = 16
BUILT = 900

PUBLISH = [
    "locked", "marked", "root written", "flipped", "root freed", "delta freed", "tombstones gone", "done",
]
CLAIM = ["logged", "put", "deleted"]
PLACES = [
    *(("flush", place) for place in (
        "seal: before", "seal: after", *(f"claim: {step}" for step in CLAIM), "flush: claimed",
        "object: before", "object: logged", "flush: uploaded", *(f"publish: {step}" for step in PUBLISH),
    )),
    *(("first flush", place) for place in ("object: logged", "claim: put", "publish: flipped")),
    *(("compact", place) for place in (
        "compact: encoded", "compact: written", "compact: uploaded",
        *(f"publish: {step}:1" for step in PUBLISH),
    )),
    ("grown", "calibrate: made"), ("grown", "publish: flipped:2"),
    *(("vacuum", f"vacuum: {step}") for step in ("begin", "delta", "segments", "counted")),
    *(("vacuum", f"sweep: {step}") for step in ("before", "after")),
    *(("build", f"build: {step}") for step in ("encoded", "uploaded", "root written", "published")),
    *(("insert", f"insert: {step}") for step in ("before:50", "after:50", "new page:1", "page added:1")),
]


@pytest.fixture(scope="module")
def crashing(install, run_directory, s3_settings):
    cluster = Cluster.create(install, run_directory / "crashing", {**s3_settings, "polign.delta_limit": 0})
    yield cluster
    cluster.destroy()


def prepare(connection, operation: str) -> np.ndarray:
    """Rows in segments and in the delta, dead ones in both; the live vectors by id."""
    metric = OPS["l2"]
    connection.execute(f"CREATE TABLE t (id int PRIMARY KEY, embedding vector({DIM}))")
    vectors = random_vectors(BUILT + 400, DIM)
    if operation != "first flush":
        load(connection, "t", vectors[:BUILT])
    connection.execute(f"CREATE INDEX i ON t USING polign_ivf (embedding vector_{metric})")
    load(connection, "t", vectors[BUILT:], BUILT)
    if operation == "compact":
        connection.execute("SELECT polign.flush('i')")
        load(connection, "t", random_vectors(200, DIM, 3), 5000)
    if operation == "grown":
        load(connection, "t", random_vectors(1500, DIM, 3), 5000)
    connection.execute("DELETE FROM t WHERE id % 5 = 0")
    if operation != "vacuum":
        connection.execute("VACUUM t")
    connection.execute("DELETE FROM t WHERE id % 7 = 0")
    return vectors


def perform(connection, operation: str) -> None:
    if operation in ("flush", "first flush"):
        connection.execute("SELECT polign.flush('i')")
    elif operation in ("compact", "grown"):
        connection.execute("SELECT polign.compact('i')")
    elif operation == "vacuum":
        connection.execute("VACUUM t")
    elif operation == "build":
        connection.execute("REINDEX INDEX i")
    else:
        load(connection, "t", random_vectors(400, DIM, 8), 20_000)


def back(cluster, database):
    """A connection as soon as the server has recovered."""
    def connect():
        try:
            connection = cluster.connect(database)
            for _ in range(2):  # it may be the last that was let in before the restart
                connection.execute("SELECT pg_sleep(0.2)")
            return connection
        except psycopg.OperationalError:
            return None

    return wait_until(connect, 60, "the server does not come back", 0.1)


def check(connection, asked: np.ndarray) -> None:
    assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []
    connection.execute("SET polign.target_recall = 1")
    assert_equals_exact(connection, "t", "i", "l2", asked, 300)


@pytest.mark.soak
@pytest.mark.parametrize(("operation", "place"), soak.some(PLACES, 3))
def test_killed(crashing, proxy, operation, place):
    database = crashing.database()
    with database.connect() as connection:
        vectors = prepare(connection, operation)
        before = connection.execute("SELECT count(*) FROM t").fetchone()[0]
        connection.execute(f"ALTER SYSTEM SET polign.failpoint = '{place}'")
        connection.execute("SELECT pg_reload_conf()")
        connection.execute(f"SET polign.failpoint = '{place}'")
        with pytest.raises(psycopg.OperationalError):
            perform(connection, operation)
    with back(crashing, database.name) as connection:
        connection.execute("ALTER SYSTEM RESET polign.failpoint")
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("SET polign.failpoint = ''")
        assert connection.execute("SELECT count(*) FROM t").fetchone()[0] == before
        asked = np.concatenate([vectors[::300], random_vectors(2, DIM, 5)])
        check(connection, asked)
        for repair in ("VACUUM t", "SELECT polign.flush('i')", "SELECT polign.compact('i')", "VACUUM t"):
            connection.execute(repair)
            check(connection, asked)
        lists = "SELECT delta_rows, tombstones FROM polign.index_info('i')"
        assert connection.execute(lists).fetchone() == (0, 0)
    database.drop()
