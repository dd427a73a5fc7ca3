"""polign_db, a vector database of that name (no relation): `polign-server` over HTTP, with its own client.

It is loaded by a server that writes, and searched on one that was started with `-read-only`, so that the
requests of a query are not mixed with those of its write log and of its leases. It ranks by L2 only: vectors
are sent at unit length, where that is the order of the cosine. Its telemetry is off.
"""

from __future__ import annotations

import shutil
import time

import numpy as np
import polign  # the client of polign_db
import polign_db

from bench.data import BenchSet
from bench.s3engines import Answer, S3Engine
from bench.server import BUCKET, BenchServer
from dev import process
from dev.paths import service_directory
from dev.s3 import REGION

COLLECTION = "items"
BATCH = 1000
MAINTAIN = "10s"
"""Between runs of its maintenance, which makes the index of a grown collection; it comes with 30 minutes."""
CACHE_BYTES = 1 << 30
"""As polign.cache_size is by default."""


class PolignDb(S3Engine):
    name = "polign-db"
    knobs = [{"nprobe": n} for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]

    def __init__(self, server: BenchServer, data: BenchSet):
        super().__init__(server, data)
        self.directory = service_directory(server.directory / "polign_db")
        self.cache = self.directory / "cache"
        self.pid: int | None = None
        self.client: polign.Client | None = None
        self.questions = unit(data.queries).tolist()

    def load(self) -> dict:
        self._start()
        base, started = unit(self.data.base), time.monotonic()
        for first in range(0, len(base), BATCH):
            rows = enumerate(base[first : first + BATCH].tolist(), first)
            self.client.put_many(COLLECTION, [polign.Vector(id=str(n), values=v) for n, v in rows])
        # Searches see what was written: the write log is merged in.
        return {"accepted_seconds": time.monotonic() - started, "maintenance_every": MAINTAIN}

    def settle(self) -> None:
        self.wait_until_quiet()

    def start_cold(self) -> None:
        self._end()
        shutil.rmtree(self.cache, ignore_errors=True)
        self._start("-read-only")

    def _start(self, *flags: str) -> None:
        service_directory(self.cache)
        http, grpc = process.free_ports(2)
        s3 = self.server.s3
        self.pid = process.spawn(
            [polign_db.find_bin("polign-server"), "-telemetry=false",
             "-telemetry-id-file", self.directory / "telemetry-id",
             "-store", f"s3://{BUCKET}/polign_db", "-http", f"127.0.0.1:{http}", "-grpc", f"127.0.0.1:{grpc}",
             "-disk-cache-dir", self.cache, "-disk-cache-bytes", str(CACHE_BYTES), "-hot-max", "0",
             *(flags or ["-maintain", MAINTAIN])],
            self.directory / "log", self.directory, HOME=str(self.directory),
            AWS_ACCESS_KEY_ID=s3.access_key, AWS_SECRET_ACCESS_KEY=s3.secret_key, AWS_REGION=REGION,
            AWS_ENDPOINT_URL=self.server.proxy.endpoint,
        )
        self.client = polign.Client(f"http://127.0.0.1:{http}", timeout=120)
        process.wait_until(self._serves, 120, f"polign-server does not answer (see {self.directory / 'log'})")

    def _serves(self) -> bool:
        if not process.alive(self.pid, "polign-server"):
            raise RuntimeError(f"polign-server ended: {(self.directory / 'log').read_text()[-500:]}")
        try:
            self.client.describe_collection(COLLECTION)
        except polign.NotFoundError:
            pass  # nothing was loaded yet
        except polign.errors.ConnectionError:
            return False
        return True

    def _end(self) -> None:
        process.end(self.pid, "polign-server", seconds=60)
        self.pid = None

    def search(self, question: int, knob: dict) -> Answer:
        started = time.perf_counter()
        hits = self.client.search(COLLECTION, values=self.questions[question], k=10, cold=True, **knob)
        return Answer([int(hit.id) for hit in hits], (time.perf_counter() - started) * 1e3)

    def pids(self) -> list[int]:
        return [self.pid] if self.pid else []

    def stop(self) -> None:
        self._end()


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
