"""What `bench/s3.py` measures: engines that keep an index in an S3 bucket, each behind the same few calls."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from bench.data import BenchSet
from bench.server import BenchServer
from dev import process


@dataclass
class Answer:
    rows: list[int]
    milliseconds: float
    """As the client of the engine measures it, without what this benchmark adds."""


class S3Engine(ABC):
    """One engine that has all of the data; made and used by one thread."""

    name: str
    """In messages."""
    knobs: list[dict]
    """Settings of a search, to be tried."""

    def __init__(self, server: BenchServer, data: BenchSet):
        self.server, self.data = server, data

    @abstractmethod
    def load(self) -> dict:
        """Loads and indexes all rows, and returns when a search finds them by the index. `accepted_seconds`
        in the answer is when the last row was taken, other keys are settings worth telling."""

    def settle(self) -> None:  # noqa: B027 (most have nothing to wait for)
        """Waits until what `load` began in the background is over."""

    @abstractmethod
    def start_cold(self) -> None:
        """Ends what serves, removes what it keeps on this machine, and starts it again, ready for a query."""

    @abstractmethod
    def search(self, question: int, knob: dict) -> Answer:
        """The ten nearest."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The processes that do the work of a search."""

    @abstractmethod
    def stop(self) -> None:
        """Ends everything; may be called at any time, and twice."""

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(pid) for pid in self.pids())

    def wait_until_quiet(self, seconds: float = 15, most: float = 900) -> None:
        """Until so long nothing but small objects (leases, positions) was written to the store."""
        proxy, seen = self.server.proxy, [0, time.monotonic()]

        def quiet() -> bool:
            writes = sum(r.bytes_in > 4096 for r in proxy.requests)
            if writes != seen[0]:
                seen[:] = [writes, time.monotonic()]
            return time.monotonic() - seen[1] > seconds

        process.wait_until(quiet, most, f"{self.name} still writes to the store", 0.5)


def cpu_seconds(pid: int) -> float:
    """Of user and system time, with all threads and the children that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
