"""LanceDB: a library, so it runs in a process of its own (`lance_worker.py`) that can be started anew.

It has no cache on disk; what it keeps is in that process.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import numpy as np

from bench.data import BenchSet
from bench.s3engines import Answer, S3Engine
from bench.server import BUCKET, BenchServer
from dev.paths import CHECKOUT
from dev.s3 import REGION


class Lance(S3Engine):
    knobs = [
        {"nprobes": nprobes, "refine_factor": refine}
        for nprobes, refine in itertools.product((1, 2, 5, 10, 20, 40, 80), (None, 2, 5, 10))
    ]

    def __init__(self, server: BenchServer, data: BenchSet, index_type: str = "IVF_PQ"):
        super().__init__(server, data)
        self.index_type = index_type
        self.name = f"lancedb {index_type}"
        self.directory = server.directory / f"lancedb_{index_type}"
        self.directory.mkdir()
        np.save(self.directory / "base.npy", data.base)
        np.save(self.directory / "queries.npy", data.queries)
        self.worker: subprocess.Popen | None = None

    def load(self) -> dict:
        self._start()
        return self._call(do="load", index_type=self.index_type)

    def start_cold(self) -> None:
        self.stop()
        self._start()
        self._call(do="open")

    def _start(self) -> None:
        s3 = self.server.s3
        options = {
            "uri": f"s3://{BUCKET}/{self.directory.name}",
            "directory": str(self.directory),
            "storage_options": {
                "aws_endpoint": self.server.proxy.endpoint, "aws_region": REGION, "allow_http": "true",
                "aws_access_key_id": s3.access_key, "aws_secret_access_key": s3.secret_key,
            },
        }
        with open(self.directory / "log", "ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "bench.s3engines.lance_worker"], cwd=CHECKOUT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
            )
        self._call(**options)

    def _call(self, **message: object) -> dict:
        self.worker.stdin.write(json.dumps(message) + "\n")
        self.worker.stdin.flush()
        line = self.worker.stdout.readline()
        if not line:
            raise RuntimeError(f"lancedb's process ended: {(self.directory / 'log').read_text()[-500:]}")
        return json.loads(line)

    def search(self, question: int, knob: dict) -> Answer:
        return Answer(**self._call(do="search", question=question, **knob))

    def pids(self) -> list[int]:
        return [self.worker.pid] if self.worker else []

    def stop(self) -> None:
        if self.worker is None:
            return
        self.worker.stdin.close()  # it ends when there is nothing more to read
        try:
            self.worker.wait(30)
        except subprocess.TimeoutExpired:
            self.worker.kill()
            self.worker.wait()
        self.worker = None
