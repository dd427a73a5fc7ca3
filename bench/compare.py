"""polign beside pgvector's HNSW and IVFFlat and an exact scan: build, sizes, recall against speed.

Same table, same server, one index at a time. Each setting of a sweep is measured on the same prepared
statement: recall, one pass over all questions, and queries per second; a setting near recall 0.95 also with
more clients. All of it is a closed loop: how a server behaves under a load that does not wait for it is
`make bench-load`.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from bench import percentiles
from bench.data import BenchSet, add_data_options, chosen_data
from bench.engines import ENGINES, INDEX, QUESTIONS_OF_EXACT, Engine, measured_recall
from bench.pgbench import each_question_once, queries_per_second
from bench.processes import private_memory
from bench.results import Run, add_output_option
from bench.server import DATABASE, BenchServer, bench_server

RECALLS = (0.95, 0.99)
CLIENTS_AT = 0.95
"""The recall at which more than one client is measured."""


@dataclass
class Point:
    setting: str
    recall: float
    qps: float
    recall_at_100: float | None = None
    one_client_ms: dict[str, float] = field(default_factory=dict)
    """Over the distinct questions, each asked once by one client."""


def build(server: BenchServer, engine: Engine, create_index: str) -> dict[str, float]:
    """Seconds, sizes, and the growth of the backend's private memory at its peak (sampled)."""
    with server.connect() as connection:
        pid = connection.info.backend_pid
        done, before, peak = threading.Event(), private_memory(pid), [0]

        def sample() -> None:
            while not done.wait(0.05):
                peak[0] = max(peak[0], private_memory(pid) - before)

        connection.execute("CHECKPOINT")
        (begin,) = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        sampler = threading.Thread(target=sample)
        sampler.start()
        started = time.monotonic()
        try:
            connection.execute(create_index)
            seconds = time.monotonic() - started
        finally:
            done.set()
            sampler.join()
        relation, wal = connection.execute(
            f"SELECT pg_relation_size('{INDEX}'), "
            f"pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '{begin}')::bigint"
        ).fetchone()
    return {
        "seconds": seconds, "peak_mib": peak[0] / 1024, "relation_bytes": relation, "wal_bytes": wal,
        # Of others none: what is there is left of an index that was dropped.
        "store_bytes": server.store_bytes() if engine.name == "polign" else 0,
    }


def sweep(
    server: BenchServer, engine: Engine, data: BenchSet, seconds: int, recall_at_100: bool
) -> list[Point]:
    points = []
    truth = data.truth[:QUESTIONS_OF_EXACT] if engine.few_questions else data.truth
    with server.connect() as connection:
        for setting in engine.settings(data.rows):
            connection.execute(f"SET {setting}")
            for k in (10, 100):
                engine.assert_used(connection, k)
            recall = measured_recall(connection, setting, truth)
            at_100 = measured_recall(connection, setting, truth, 100) if recall_at_100 else None
            one_client = percentiles.summary(each_question_once(server, setting, len(truth)))
            qps = queries_per_second(server, setting, len(truth), seconds)
            points.append(Point(setting, recall, qps, at_100, one_client))
            said = f"@100 {at_100:.4f}   " if at_100 is not None else ""
            print(f"  {setting:<33} recall@10 {recall:.4f}   {said}{qps:8.0f} queries/s   "
                  f"{percentiles.line(one_client)}", flush=True)
    return points


def with_clients(
    server: BenchServer, points: list[Point], clients: list[int], questions: int, seconds: int
) -> dict:
    """Queries per second by number of clients, at the setting that just reaches CLIENTS_AT, or else at the
    most thorough one."""
    enough = [p for p in points if p.recall >= CLIENTS_AT]
    point = min(enough, key=lambda p: p.recall) if enough else max(points, key=lambda p: p.recall)
    found = {}
    for count in clients:
        found[count] = point.qps if count == 1 else queries_per_second(
            server, point.setting, questions, seconds, clients=count
        )
    print(f"  {point.setting} (recall {point.recall:.4f}) by clients: "
          + ", ".join(f"{count}: {qps:.0f}" for count, qps in found.items()) + " queries/s", flush=True)
    return {"setting": point.setting, "recall": point.recall, "qps": found}


def qps_at(points: list[Point], recall: float) -> float | None:
    """Interpolated between neighbouring points: linear in recall, logarithmic in queries per second."""
    ordered = sorted(points, key=lambda p: p.recall)
    for below, above in zip(ordered, ordered[1:], strict=False):
        if below.recall <= recall <= above.recall:
            share = (recall - below.recall) / max(above.recall - below.recall, 1e-9)
            return float(np.exp(np.log(below.qps) * (1 - share) + np.log(above.qps) * share))
    return ordered[0].qps if ordered[0].recall >= recall else None


def report(built: dict[str, dict], curves: dict[str, list[Point]]) -> None:
    ours, theirs = built["polign"], built["hnsw"]
    print("\nRatios, polign to HNSW")
    for name, ratio, goal in (
        ("build time", ours["seconds"] / theirs["seconds"], 0.2),
        ("bytes in the store", ours["store_bytes"] / theirs["relation_bytes"], 0.3),
        ("bytes in Postgres", ours["relation_bytes"] / theirs["relation_bytes"], 0.03),
        ("bytes of WAL", ours["wal_bytes"] / theirs["wal_bytes"], 0.05),
    ):
        print(f"  {name:<20} {ratio:7.4f}   (goal <= {goal})")
    for recall in RECALLS:
        mine, other = qps_at(curves["polign"], recall), qps_at(curves["hnsw"], recall)
        if mine is None or other is None:
            print(f"  queries/s at {recall}    one curve does not reach this recall")
        else:
            print(f"  queries/s at {recall}    {mine / other:7.2f}   ({mine:.0f} to {other:.0f}; goal >= 2)")


def main() -> None:
    parser = argparse.ArgumentParser(prog='make bench T="compare"', description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--seconds", type=int, default=5, help="of pgbench for each figure")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--recall-at-100", action=argparse.BooleanOptionalAction, default=True)
    add_data_options(parser)
    add_output_option(parser)
    options = parser.parse_args()
    data = chosen_data(options)
    run = Run("compare", options, data)

    results: dict[str, dict] = {}
    built: dict[str, dict] = {}
    curves: dict[str, list[Point]] = {}
    with bench_server(max_connections=max(options.clients) + 20) as server:
        server.load(data)
        for engine in (ENGINES[name] for name in options.engines):
            print(f"\n{engine.name}")
            if create_index := engine.create_index(data.rows):
                figures = built[engine.name] = build(server, engine, create_index)
                print(
                    f"  built in {figures['seconds']:.1f} s, "
                    f"peak private memory {figures['peak_mib']:.0f} MiB, "
                    f"relation {figures['relation_bytes'] / 1e6:.1f} MB, "
                    f"store {figures['store_bytes'] / 1e6:.1f} MB"
                )
            engine.prefer(server.cluster)
            points = sweep(server, engine, data, options.seconds, options.recall_at_100)
            curves[engine.name] = points
            results[engine.name] = {
                "create_index": create_index,
                "build": built.get(engine.name),
                "points": [asdict(point) for point in points],
                "clients": with_clients(server, points, options.clients, len(data.queries), options.seconds),
            }
            if create_index:
                server.cluster.execute(f"DROP INDEX {INDEX}", DATABASE)
    if {"polign", "hnsw"} <= built.keys():
        report(built, curves)
    run.write(results)


if __name__ == "__main__":
    main()
