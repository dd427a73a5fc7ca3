"""polign: Postgres with the extension, and its polign-store."""

from __future__ import annotations

import time

from bench.engines import ENGINES, search_sql
from bench.s3engines import Answer, S3Engine
from bench.server import DATABASE
from dev import process


class Polign(S3Engine):
    name = "polign"
    knobs = [{"polign.target_recall": t} for t in (0.5, 0.7, 0.8, 0.9, 0.92, 0.95, 0.97, 0.99)]
    connection = None
    knob: dict | None = None

    def load(self) -> dict:
        self.server.through_proxy()
        started = time.monotonic()
        self.server.load(self.data)
        accepted = time.monotonic() - started
        self.server.cluster.execute(ENGINES["polign"].create_index(self.data.rows), DATABASE)
        self._connect()
        return {"accepted_seconds": accepted}

    def start_cold(self) -> None:
        self._disconnect()
        cluster = self.server.cluster
        cluster.stop()
        cluster.wipe_cache()
        cluster.start()
        self._connect()

    def _connect(self) -> None:
        self.connection, self.knob = self.server.connect(), None
        self.connection.execute("SELECT polign.version()")  # loads the library
        ENGINES["polign"].assert_used(self.connection)

    def _disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def search(self, question: int, knob: dict) -> Answer:
        if knob != self.knob:
            for name, value in knob.items():
                self.connection.execute(f"SET {name} = {value}")
            self.knob = knob
        started = time.perf_counter()
        rows = self.connection.execute(search_sql("%s"), (question,), prepare=True).fetchall()
        return Answer([row for row, in rows], (time.perf_counter() - started) * 1e3)

    def pids(self) -> list[int]:
        postmaster = self.server.cluster.postgres.pid
        return [postmaster, *process.descendants(postmaster)]

    def stop(self) -> None:
        self._disconnect()
        self.server.cluster.stop()
