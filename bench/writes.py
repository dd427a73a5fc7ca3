"""Writes beside pgvector: insert rates and WAL, an index after half of its rows were replaced, VACUUM, and
what queries notice of a flush and a compaction.

Each kind of index has the same table to itself; all of it runs in one server, one thing after the other.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import threading
import time

import numpy as np

from bench.data import bench_data
from bench.engines import search_sql
from bench.pgbench import queries_per_second
from bench.server import DATABASE, BenchServer, bench_server
from dev.postgres import SUPERUSER
from dev.process import wait_until
from tests.harness.cluster import assert_index_used

KINDS = {
    "no index": None,
    "polign_ivf": "polign_ivf (embedding vector_cosine_ops)",
    "hnsw": "hnsw (embedding vector_cosine_ops)",
    "ivfflat": "ivfflat (embedding vector_cosine_ops) WITH (lists = 224)",
}
INSERT = "INSERT INTO live SELECT nextval('live_ids'), embedding FROM items WHERE id = :id"
IDLE = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'polign maintenance'"


def settle(connection) -> None:
    """Waits until no worker maintains an index."""
    wait_until(lambda: connection.execute(IDLE).fetchone()[0] == 0, 600, "workers are still busy", 0.5)


def info(connection, index: str) -> dict:
    row = connection.execute("SELECT to_jsonb(i) FROM polign.index_info(%s) i", [index]).fetchone()[0]
    return row


def inserts(server: BenchServer, rows: int, seconds: int, clients: int) -> dict[str, tuple[float, float]]:
    """Rows a second and WAL bytes a row, into a table of half of the rows with each kind of index."""
    found = {}
    script = server.directory / "insert.sql"
    script.write_text(f"\\set id random(0, {rows - 1})\n{INSERT};\n")
    postgres = server.cluster.postgres
    for kind, index in KINDS.items():
        with server.connect() as connection:
            connection.execute("DROP TABLE IF EXISTS live; DROP SEQUENCE IF EXISTS live_ids")
            connection.execute(f"CREATE SEQUENCE live_ids START {rows}")
            connection.execute(f"CREATE TABLE live AS SELECT * FROM items WHERE id < {rows // 2}")
            if index:
                connection.execute(f"CREATE INDEX live_embedding ON live USING {index}")
            connection.execute("CHECKPOINT")
            start = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0]
            done = subprocess.run(
                [postgres.install.bin / "pgbench", "-n", "-M", "prepared", "-c", str(clients), "-T",
                 str(seconds), "-f", script, "-h", postgres.socket_directory, "-p", str(postgres.port),
                 "-U", SUPERUSER, DATABASE],
                capture_output=True, text=True, check=True,
            )
            settle(connection)
            wal, = connection.execute("SELECT pg_current_wal_insert_lsn() - %s::pg_lsn", [start]).fetchone()
            count, = connection.execute("SELECT count(*) FROM live WHERE id >= %s", [rows]).fetchone()
        rate = float(re.search(r"^tps = ([\d.]+)", done.stdout, re.M).group(1))
        found[kind] = rate, float(wal) / max(count, 1)
        print(f"  {kind:<12} {rate:8.0f} rows/s   {found[kind][1]:8.0f} WAL bytes a row", flush=True)
    server.cluster.execute("DROP TABLE live", DATABASE)
    return found


def default_recall(connection, truth: np.ndarray, rows: int) -> float:
    """Row n is also row n + rows, inserted again under that id."""
    assert_index_used(connection, "items_embedding", search_sql("0"))
    shares = []
    for number, expected in enumerate(truth):
        ids = connection.execute(search_sql("%s"), (number,), prepare=True).fetchall()
        shares.append(len({row[0] % rows for row in ids} & set(expected.tolist())) / 10)
    return float(np.mean(shares))


def churn(server: BenchServer, truth: np.ndarray, rows: int, seconds: int) -> None:
    """Half of the rows are deleted and inserted again, in ten rounds, each vacuumed."""
    with server.connect() as connection:
        connection.execute(f"CREATE INDEX items_embedding ON items USING {KINDS['polign_ivf']}")
        fresh_recall = default_recall(connection, truth, rows)
        fresh_qps = queries_per_second(server, "polign.nprobe=0", len(truth), seconds)
        fresh_bytes = info(connection, "items_embedding")["store_bytes"]
        began = time.monotonic()
        for number in range(10):
            connection.execute(
                f"WITH gone AS (DELETE FROM items WHERE id < {rows} AND hashint4(id) % 20 IN "
                f"({number}, {number - 20}) RETURNING id, embedding) "
                f"INSERT INTO items SELECT id + {rows}, embedding FROM gone"
            )
            connection.execute("VACUUM items")
        settle(connection)
        took = time.monotonic() - began
        recall = default_recall(connection, truth, rows)
        qps = queries_per_second(server, "polign.nprobe=0", len(truth), seconds)
        now = info(connection, "items_embedding")
        replaced, = connection.execute(f"SELECT count(*) FROM items WHERE id >= {rows}").fetchone()
    print(f"  {replaced:,} of {rows:,} rows replaced in {took:.0f} s, maintenance included")
    print(f"  recall@10 {recall:.4f}   (fresh {fresh_recall:.4f}; goal >= 0.94)")
    print(f"  queries/s {qps:.0f}   {qps / fresh_qps:.2f} of fresh   (goal >= 0.8)")
    share = now["store_bytes"] / fresh_bytes
    print(f"  bytes referenced {share:.2f} of fresh   (goal <= 1.3)")
    print(f"  {now['objects']} objects, {now['delta_rows']:,} delta rows, {now['tombstones']:,} tombstones")


def vacuum(server: BenchServer, rows: int) -> dict[str, float]:
    """Seconds of VACUUM with a tenth of the rows dead."""
    found = {}
    for kind in ("polign_ivf", "hnsw"):
        with server.connect() as connection:
            connection.execute("DROP TABLE IF EXISTS live")
            connection.execute("CREATE TABLE live AS SELECT * FROM items")
            connection.execute(f"CREATE INDEX live_embedding ON live USING {KINDS[kind]}")
            connection.execute("VACUUM live")
            connection.execute("DELETE FROM live WHERE hashint4(id) % 10 IN (3, -7)")
            started = time.monotonic()
            connection.execute("VACUUM (INDEX_CLEANUP on) live")
            found[kind] = time.monotonic() - started
            settle(connection)
        print(f"  {kind:<12} {found[kind]:7.2f} s", flush=True)
    server.cluster.execute("DROP TABLE live", DATABASE)
    return found


def latencies(server: BenchServer, queries: int, until) -> list[float]:
    """Milliseconds of searches, one after the other, until `until()`."""
    found = []
    with server.connect() as connection:
        number = 0
        while not until():
            number = (number + 1) % queries
            started = time.perf_counter()
            connection.execute(search_sql("%s"), (number,), prepare=True).fetchall()
            found.append((time.perf_counter() - started) * 1e3)
    return found


def over(seconds: float):
    """Tells when so many seconds from now are over."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def beside_maintenance(server: BenchServer, queries: int, rows: int) -> None:
    """p99 of searches, quiet and while everything is flushed and compacted."""
    server.cluster.configure(polign__delta_limit=0)
    with server.connect() as connection:
        connection.execute(
            f"INSERT INTO items SELECT id + 10 * {rows}, embedding FROM items WHERE hashint4(id) % 5 = 0"
        )
        latencies(server, queries, over(3))
        quiet = latencies(server, queries, over(15))
        for what in ("flush", "compact"):
            done = threading.Event()

            def work(what=what, done=done) -> None:
                with server.connect() as own:
                    own.execute(f"SELECT polign.{what}('items_embedding')")
                done.set()

            thread = threading.Thread(target=work)
            started = time.monotonic()
            thread.start()
            busy = latencies(server, queries, done.is_set)
            thread.join()
            took = time.monotonic() - started
            p99 = [float(np.percentile(all_, 99)) for all_ in (quiet, busy)]
            print(
                f"  {what:<8} {took:5.1f} s: p99 {p99[1]:6.2f} ms, quiet {p99[0]:6.2f} ms, "
                f"ratio {p99[1] / p99[0]:.2f}   (goal <= 2; {len(busy)} searches)", flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog='make bench T="writes"', description=__doc__)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=15, help="of pgbench for each figure")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=["inserts", "vacuum", "churn", "beside"])
    options = parser.parse_args()
    data = bench_data(options.queries)
    truth, rows = data.truth[:, :10], data.rows
    print(data)
    with bench_server() as server:
        server.load(data)
        if "inserts" in options.only:
            print(f"\nInserts, {options.clients} clients")
            rates = inserts(server, rows, options.seconds, options.clients)
            ours = rates["polign_ivf"][0]
            for kind, goal in (("no index", 0.8), ("hnsw", 10), ("ivfflat", 0.8)):
                print(f"  polign to {kind:<10} {ours / rates[kind][0]:6.2f}   (goal >= {goal})")
        if "vacuum" in options.only:
            print("\nVACUUM of a tenth")
            times = vacuum(server, rows)
            print(f"  polign to hnsw {times['polign_ivf'] / times['hnsw']:.3f}   (goal <= 0.1)")
        if "churn" in options.only:
            print("\nAn index after half of its rows were replaced")
            churn(server, truth, rows, options.seconds)
        if "beside" in options.only:
            if "churn" not in options.only:
                server.cluster.execute(
                    f"CREATE INDEX items_embedding ON items USING {KINDS['polign_ivf']}", DATABASE
                )
            print("\nSearches beside maintenance")
            beside_maintenance(server, len(truth), rows)


if __name__ == "__main__":
    main()
