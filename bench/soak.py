"""Many clients for a long time: searches at full speed, inserts, deletes and VACUUM, a cache too small.

Errors, wrong rows, memory and file descriptors are what is looked at, not speed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
import time

import numpy as np
import psycopg

from bench.data import bench_data
from bench.processes import largest_by_kind
from bench.server import DATABASE, BenchServer, bench_server
from dev.datasets import Dataset, vector_text
from dev.postgres import SUPERUSER
from tests.harness.cluster import assert_index_used
from tests.harness.search import search, search_sql

ROWS_PER_SECOND = 50
FIRST_ROW = 10_000_000

# Each search checks itself: ten rows, no duplicate, distances in order; else it divides by zero.
CHECKED_SEARCH = """
\\set id random(0, {last})
SELECT 1 / (count(*) = 10 AND count(DISTINCT id) = 10 AND bool_and(d >= before))::int FROM (
  SELECT id, d, coalesce(lag(d) OVER (), '-infinity') AS before FROM (
    SELECT id, embedding <=> (SELECT embedding FROM queries WHERE id = :id) AS d FROM items
    ORDER BY embedding <=> (SELECT embedding FROM queries WHERE id = :id) LIMIT 10) AS found) AS checked;
"""


class Rows:
    """The rows that were added and are still there, and their vectors."""

    def __init__(self):
        self.lock = threading.Lock()
        self.vectors: dict[int, np.ndarray] = {}
        self.gone: list[tuple[int, np.ndarray]] = []

    def add(self, row: int, vector: np.ndarray) -> None:
        with self.lock:
            self.vectors[row] = vector

    def take(self, random: np.random.Generator) -> int:
        with self.lock:
            row = list(self.vectors)[int(random.integers(len(self.vectors)))]
            self.gone = [*self.gone[-99:], (row, self.vectors.pop(row))]
            return row

    def any(self, random: np.random.Generator) -> tuple[int, np.ndarray] | None:
        """Most often one that is there, now and then one that was deleted."""
        with self.lock:
            rows = self.gone if self.gone and random.random() < 0.25 else list(self.vectors.items())
            return rows[int(random.integers(len(rows)))] if rows else None


class Worker(threading.Thread):
    """Repeats a step in a session of its own until it is stopped; errors are printed at the end."""

    def __init__(self, server: BenchServer, seed: int):
        super().__init__()
        self.server = server
        self.random = np.random.default_rng(seed)
        self.stopping = threading.Event()
        self.steps = 0
        self.errors: list[str] = []

    def run(self) -> None:
        try:
            with self.server.connect() as connection:
                while not self.stopping.is_set():
                    self.step(connection)
                    self.steps += 1
        except Exception as error:
            self.errors.append(repr(error))

    def step(self, connection: psycopg.Connection) -> None:
        raise NotImplementedError


class Writer(Worker):
    """Inserts rows at a steady rate, and deletes as many once there are enough."""

    def __init__(self, server: BenchServer, base: np.ndarray, rows: Rows):
        super().__init__(server, 7)
        self.base, self.rows = base, rows
        self.deleted = 0
        self.started = time.monotonic()

    def step(self, connection: psycopg.Connection) -> None:
        row = FIRST_ROW + self.steps
        near = self.base[self.random.integers(len(self.base))]
        vector = (near + self.random.normal(0, 0.01, len(near))).astype(np.float32)
        connection.execute("INSERT INTO items VALUES (%s, %s::vector)", (row, vector_text(vector)))
        self.rows.add(row, vector)
        if self.steps >= 500:
            connection.execute("DELETE FROM items WHERE id = %s", (self.rows.take(self.random),))
            self.deleted += 1
        time.sleep(max(0.0, self.started + (self.steps + 1) / ROWS_PER_SECOND - time.monotonic()))


class Checker(Worker):
    """Looks for rows by their own vectors: the search must find one exactly if its snapshot sees it, at the
    distance that the table gives, and no row that the snapshot does not see."""

    def __init__(self, server: BenchServer, rows: Rows, seed: int):
        super().__init__(server, seed)
        self.rows = rows

    def step(self, connection: psycopg.Connection) -> None:
        picked = self.rows.any(self.random)
        if picked is None:
            time.sleep(0.1)
            return
        row, vector = picked
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SET LOCAL polign.target_recall = 1.0; SET LOCAL enable_seqscan = off")
            if self.steps == 0:
                sql, query = search_sql("items", "cosine", 10), {"q": vector_text(vector)}
                assert_index_used(connection, "items_embedding", sql, query)
            found = search(connection, "items", "cosine", vector, 10)
            seen = dict(connection.execute(
                "SELECT id, embedding <=> %s::vector FROM items WHERE id = ANY(%s)",
                (vector_text(vector), [row, *found.ids]),
            ).fetchall())
        if len(set(found.ids)) != 10:
            self.errors.append(f"row {row}: not ten different rows: {found.ids}")
        if (row in found.ids) != (row in seen):
            self.errors.append(f"row {row} is {'not ' if row in seen else ''}found")
        for near, distance in zip(found.ids, found.distances, strict=True):
            if seen.get(near) != distance:
                self.errors.append(f"row {near}: distance {distance}, the table says {seen.get(near)}")


def soak(server: BenchServer, data: Dataset, clients: int, seconds: int) -> bool:
    """Whether all went well."""
    script = server.directory / "soak.sql"
    script.write_text(CHECKED_SEARCH.format(last=len(data.queries) - 1))
    postgres = server.cluster.postgres
    searches = subprocess.Popen(
        [postgres.install.bin / "pgbench", "-n", "-M", "prepared", "-c", str(clients), "-j", "2",
         "-T", str(seconds), "-f", script, "-h", postgres.socket_directory, "-p", str(postgres.port),
         "-U", SUPERUSER, DATABASE],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    rows = Rows()
    writer = Writer(server, data.base, rows)
    checkers = [Checker(server, rows, seed) for seed in (1, 2)]
    workers = [writer, *checkers]
    for worker in workers:
        worker.start()
    vacuumed = reported = started = time.monotonic()
    used: list[dict[str, tuple[int, int]]] = []
    while searches.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        if now - vacuumed > 20:
            vacuumed = now
            server.cluster.execute("VACUUM items", DATABASE)
        if now - reported > max(10, seconds / 20):
            reported = now
            used.append(largest_by_kind(postgres.pid, DATABASE))
            print(f"  {now - started:5.0f} s: {writer.steps} rows written, {writer.deleted} deleted; "
                  + ", ".join(f"{kind} {kib / 1024:.0f} MiB {files} files"
                              for kind, (kib, files) in sorted(used[-1].items())), flush=True)
    for worker in workers:
        worker.stopping.set()
    for worker in workers:
        worker.join(120)
    output, errors = searches.communicate()
    log = postgres.log.read_text(errors="replace").splitlines()
    problems = [line for line in log if re.search(r"(ERROR|FATAL|PANIC):", line)]
    wrong = [error for worker in workers for error in worker.errors]
    grown = growth(used)
    print(output)
    print(f"{writer.steps} rows written, {writer.deleted} deleted, "
          f"{sum(checker.steps for checker in checkers)} looked for, {len(wrong)} wrong; "
          f"{len(problems)} errors in the server log; growth from the first half to the second: "
          + ", ".join(grown.values()))
    for line in [*errors.splitlines()[:5], *wrong[:5], *problems[:5]]:
        print(f"  {line}")
    return not (searches.returncode or wrong or problems)


def growth(used: list[dict[str, tuple[int, int]]]) -> dict[str, str]:
    """By kind of process, how the largest of the second half compares with that of the first."""
    half = len(used) // 2
    said = {}
    for kind in sorted({kind for sample in used for kind in sample}):
        first, second = (
            np.max([sample.get(kind, (0, 0)) for sample in part] or [(0, 0)], axis=0)
            for part in (used[:half], used[half:])
        )
        memory, files = (second - first).tolist()
        said[kind] = f"{kind} {memory / 1024:+.0f} MiB {files:+d} files"
    return said


def main() -> int:
    parser = argparse.ArgumentParser(prog='make bench T="soak"', description=__doc__)
    parser.add_argument("seconds", type=int, nargs="?", default=600)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    data = bench_data()
    with bench_server(max_connections=options.clients + 20) as server:
        server.load(data)
        with server.connect() as connection:
            connection.execute("CREATE INDEX items_id ON items (id)")
            connection.execute(
                "CREATE INDEX items_embedding ON items USING polign_ivf (embedding vector_cosine_ops)"
            )
        half = max(4, server.store_bytes() // 2_000_000)
        server.cluster.configure(polign__cache_size=f"{half}MB")
        print(f"{data.name}: {data.rows:,} rows, {options.clients} clients, {options.seconds} s, "
              f"cache {half} MB of {server.store_bytes() / 1e6:.0f} MB")
        return 0 if soak(server, data, options.clients, options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
