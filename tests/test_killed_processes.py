"""`kill -9` of any process, and a power loss, at a random moment of any write: no acknowledged row is lost,
no deleted row comes back, and the index agrees with its table.

Each round takes the next pair of victim and operation, beginning anywhere; `make soak` goes round many times.
"""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psycopg
import pytest

from dev import process
from dev.datasets import load, vector_text
from tests.harness import soak
from tests.harness.cluster import Cluster
from tests.harness.vectors import random_vectors
from tests.test_crash_matrix import DIM, back, check, perform, prepare

USUAL_SECONDS = 25
DELTA_LIMIT = 150
OPERATIONS = ("build", "insert", "flush", "compact", "vacuum")
VICTIMS = ("polign-store", "supervisor", "worker", "postmaster", "power")
TITLES = {"supervisor": "polign supervisor", "worker": "polign maintenance"}
ROUNDS = [
    (victim, operation) for operation in OPERATIONS for victim in VICTIMS
    if victim != "worker" or operation in ("insert", "flush", "compact")  # the others have none
]


@pytest.fixture(scope="module")
def mortal(install, run_directory, s3_settings):
    cluster = Cluster.create(install, run_directory / "mortal", s3_settings)
    yield cluster
    cluster.destroy()


@pytest.mark.soak
@pytest.mark.timeout(soak.seconds(USUAL_SECONDS) + 300)
def test_killed_at_a_random_moment(mortal, proxy):
    done = 0
    for seed in soak.seeds(USUAL_SECONDS):
        victim, operation = ROUNDS[seed % len(ROUNDS)]
        try:
            one_round(mortal, victim, operation, np.random.default_rng(seed))
        except Exception as error:
            raise AssertionError(f"POLIGN_SEED={seed}: {victim} killed during {operation}") from error
        done += 1
    print(f"{done} kills, last seed {seed}")


class Writer(threading.Thread):
    """Inserts and deletes rows, and knows which of that was acknowledged."""

    FIRST = 100_000_000

    def __init__(self, database, random):
        super().__init__()
        self.database, self.random = database, random
        self.over = threading.Event()
        self.inserted: set[int] = set()
        self.deleted: set[int] = set()
        self.in_doubt: set[int] = set()
        """Rows of the statement that ended without an answer."""
        self.error: psycopg.Error | None = None

    def run(self) -> None:
        row = self.FIRST
        try:
            with self.database.connect() as connection:
                while not self.over.is_set():
                    new = set(range(row, row + int(self.random.integers(1, 20))))
                    row += len(new)
                    self.in_doubt = new
                    connection.execute("INSERT INTO t VALUES " + ",".join(
                        f"({one}, '{vector_text(vector)}')"
                        for one, vector in zip(new, random_vectors(len(new), DIM, row), strict=True)
                    ))
                    self.inserted |= new
                    old = {one for one in self.inserted if self.random.random() < 0.02}
                    self.in_doubt = old
                    connection.execute("DELETE FROM t WHERE id = ANY(%s)", [list(old)])
                    self.inserted -= old
                    self.deleted |= old
                    self.in_doubt = set()
                    self.over.wait(0.005)
        except psycopg.Error as error:
            self.error = error

    def check(self, connection) -> None:
        rows = {row for (row,) in connection.execute(f"SELECT id FROM t WHERE id >= {self.FIRST}")}
        assert self.inserted - self.in_doubt <= rows, "an acknowledged row is lost"
        assert not self.deleted & rows, "a deleted row is back"
        assert rows <= self.inserted | self.in_doubt


class Operation(threading.Thread):
    """Repeats an operation until an error or the end."""

    def __init__(self, database, name: str):
        super().__init__()
        self.database, self.operation = database, name
        self.over = threading.Event()
        self.times = 0
        self.error: psycopg.Error | None = None

    def run(self) -> None:
        try:
            with self.database.connect() as connection:
                while not self.over.is_set():
                    self.once(connection)
                    self.times += 1
        except psycopg.Error as error:
            self.error = error

    def once(self, connection) -> None:
        if self.operation == "insert":
            first = 20_000 + 200 * self.times
            load(connection, "t", random_vectors(200, DIM, first), first)
        else:
            perform(connection, self.operation)


def pids_of(cluster, title: str) -> list[int]:
    """The background workers with this title."""
    found = []
    for pid in process.descendants(cluster.postgres.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if title in command:
            found.append(pid)
    return found


def kill(cluster, victim: str, random) -> None:
    if victim == "postmaster":
        cluster.crash()
    elif victim == "power":
        cluster.stop(signal.SIGQUIT)
        damage_cache(cluster.cache_directory, random)
    else:
        find = cluster.store_pids if victim == "polign-store" else lambda: pids_of(cluster, TITLES[victim])
        # A worker may be through before it is killed: then the next one is.
        while True:
            pid = process.wait_until(find, 30, f"there is no {victim}", 0.001)[0]
            try:
                os.kill(pid, signal.SIGKILL)
                return
            except ProcessLookupError:
                continue


def damage_cache(directory: Path, random) -> None:
    """What a power loss may do to files that were never synced: pages are zero, the end is missing."""
    for file in [*directory.glob("slab.*"), directory / "directory", *directory.glob("upload/*")]:
        size = file.stat().st_size if file.exists() else 0
        if not size:
            continue
        with file.open("r+b") as opened:
            for _ in range(int(random.integers(0, 20))):
                opened.seek(int(random.integers(0, size)) // 4096 * 4096)
                opened.write(bytes(4096))
            if random.random() < 0.4:
                opened.truncate(int(random.integers(0, size)))


def one_round(cluster, victim: str, operation: str, random) -> None:
    cluster.start()
    cluster.configure(polign__delta_limit=DELTA_LIMIT if operation == "insert" else 0)
    database = cluster.database()
    with database.connect() as connection:
        vectors = prepare(connection, operation)
    writer, repeated = Writer(database, random), Operation(database, operation)
    for thread in (writer, repeated):
        thread.start()
    try:
        time.sleep(float(random.uniform(0, 1.5)))
        kill(cluster, victim, random)
        if victim == "polign-store":
            time.sleep(1)
    finally:
        for thread in (writer, repeated):
            thread.over.set()
            thread.join(60)
    assert not writer.is_alive() and not repeated.is_alive()
    if victim == "polign-store":
        assert (writer.error, repeated.error) == (None, None), "only a retry is what it may cost"
    cluster.start()
    with back(cluster, database.name) as connection:
        writer.check(connection)
        asked = np.concatenate([vectors[::300], random_vectors(2, DIM, 5)])
        check(connection, asked)
        for repair in ("VACUUM t", "SELECT polign.flush('i')", "SELECT polign.compact('i')", "VACUUM t"):
            connection.execute(repair)
            check(connection, asked)
        writer.check(connection)
    database.drop()
