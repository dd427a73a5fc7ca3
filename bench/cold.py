"""Cold queries: requests, bytes, waves and time on an empty cache; and how fast a waiting query is cancelled.

Counted at the S3 side by a proxy, not by polign's own counters.
"""

from __future__ import annotations

import argparse
import threading
import time

import numpy as np
import psycopg

from bench.data import bench_data
from bench.server import BenchServer, bench_server
from tests.harness.search import search

WAVE_DELAY = 0.15
"""Seconds added to each request when waves are counted, so that parallel requests overlap."""


def empty_cache(server: BenchServer) -> None:
    server.cluster.stop()
    server.cluster.wipe_cache()
    server.cluster.start()


def cold_queries(server: BenchServer, queries: np.ndarray) -> None:
    print(f"\n{'':<14}{'GETs':>6}{'bytes':>12}{'waves':>7}{'ms':>9}   warm: requests, ms")
    rows = []
    for number, query in enumerate(queries):
        empty_cache(server)
        with server.connect() as connection:
            connection.execute("SELECT polign.version()")
            with server.proxy.record() as requests:
                started = time.perf_counter()
                cold = search(connection, "items", "cosine", query)
                milliseconds = (time.perf_counter() - started) * 1000
            with server.proxy.record() as again:
                started = time.perf_counter()
                assert search(connection, "items", "cosine", query) == cold
                warm = (time.perf_counter() - started) * 1000
        empty_cache(server)
        slow = server.proxy.fault("delay", seconds=WAVE_DELAY)
        with server.connect() as connection, slow, server.proxy.record() as waved:
            assert search(connection, "items", "cosine", query) == cold
        assert set(requests.kinds) <= {"get"}, requests.kinds
        rows.append((len(requests), requests.bytes_out, waved.waves, milliseconds))
        print(f"question {number:<5}{rows[-1][0]:>6}{rows[-1][1]:>12,}{rows[-1][2]:>7}{rows[-1][3]:>9.1f}"
              f"   {len(again)}, {warm:.1f}", flush=True)
    for name, value in (("mean", np.mean(rows, axis=0)), ("max", np.max(rows, axis=0))):
        print(f"{name:<14}{value[0]:>6.1f}{value[1]:>12,.0f}{value[2]:>7.1f}{value[3]:>9.1f}")
    print("goal: <= 24 GETs, <= 2,200,000 bytes, <= 2 waves; warm 0 requests")


def cancel_latency(server: BenchServer, queries: np.ndarray) -> None:
    delays = []
    for query in queries:
        with server.connect() as connection:
            connection.execute("SELECT polign.cache_clear()")
            cancelled_at: list[float] = []

            def cancel(connection=connection, cancelled_at=cancelled_at) -> None:
                cancelled_at.append(time.perf_counter())
                connection.cancel()

            with server.proxy.fault("stall", method="GET"):
                threading.Timer(0.3, cancel).start()
                try:
                    search(connection, "items", "cosine", query)
                except psycopg.errors.QueryCanceled:
                    delays.append((time.perf_counter() - cancelled_at[0]) * 1000)
    print(f"\ncancelling a query that waits for a stalled store: median {np.median(delays):.1f} ms, "
          f"max {max(delays):.1f} ms of {len(delays)} (goal < 100 ms)")


def main() -> None:
    parser = argparse.ArgumentParser(prog='make bench T="cold"', description=__doc__)
    parser.add_argument("--questions", type=int, default=10)
    options = parser.parse_args()
    data = bench_data()
    print(f"{data}; default settings")
    with bench_server() as server:
        server.load(data)
        with server.connect() as connection:
            connection.execute("CREATE INDEX ON items USING polign_ivf (embedding vector_cosine_ops)")
        server.through_proxy()
        cold_queries(server, data.queries[: options.questions])
        cancel_latency(server, data.queries[: options.questions])


if __name__ == "__main__":
    main()
