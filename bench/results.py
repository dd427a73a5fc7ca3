"""Figures as JSON, with what one must know of the machine and the settings to believe them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from dev.build import profile
from dev.paths import CHECKOUT, dev_dir, pg_version
from dev.tools import PG_WHEELS, S3_WHEEL

QUIET = 0.15
"""Share of the processors that others may use while a run still counts as one on a quiet machine."""


def busy_share(seconds: float = 1.0) -> float:
    """Of the processors' time, the share that is used, or withheld by the host, while we only wait."""
    def ticks() -> tuple[int, int]:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all; idle and waiting for a disk

    all_before, idle_before = ticks()
    time.sleep(seconds)  # an interval to measure, not a guess
    all_after, idle_after = ticks()
    return 1 - (idle_after - idle_before) / max(all_after - all_before, 1)


def machine() -> dict:
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.+)", info, re.M)
    flags = (re.search(r"^flags\s*: (.+)", info, re.M) or [None, ""])[1].split()
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.M)
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": os.cpu_count(),
        "vector_instructions": [f for f in ("avx2", "fma", "avx512f", "avx512_vnni") if f in flags],
        "memory_gib": round(int(memory.group(1)) / 2**20, 1),
        "kernel": platform.release(),
    }


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True)
    return done.stdout.strip()


def software() -> dict:
    version = pg_version()
    return {
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "changed_files": len(git("status", "--porcelain").splitlines()),
        "build_profile": profile(),
        "postgres": PG_WHEELS.get(version, version),
        "s3_server": S3_WHEEL,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


class Run:
    """One benchmark run; made before the work, so that it knows how busy the machine is with other things."""

    def __init__(self, name: str, options, data):
        self.name = name
        self.options = {k: v for k, v in vars(options).items() if k != "output"}
        self.output: Path = options.output or dev_dir() / "results" / f"{name}.json"
        self.data = {"name": data.name, "rows": data.rows, "dims": data.dims, "questions": len(data.queries)}
        self.started = datetime.now(timezone.utc)
        self.busy = {"before": busy_share()}
        print(data)
        if profile() != "release":
            print(f"built with PROFILE={profile()}: the figures say nothing about speed")
        if self.busy["before"] > QUIET:
            print(f"others use {self.busy['before']:.0%} of the processors: the figures will be noisy")

    def write(self, results: dict) -> None:
        """Called when the servers are down."""
        self.busy["after"] = busy_share()
        report = {
            "benchmark": self.name,
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(timezone.utc) - self.started).total_seconds()),
            "quiet": max(self.busy.values()) <= QUIET,
            "busy_with_other_things": {k: round(v, 3) for k, v in self.busy.items()},
            "machine": machine(),
            "software": software(),
            "options": self.options,
            "data": self.data,
            "results": results,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(report, indent=1, default=plain) + "\n")
        print(f"\nall figures: {self.output}")


def plain(value: object) -> object:
    """NumPy's numbers and paths, for JSON."""
    return value.item() if isinstance(value, np.generic) else str(value)


def add_output_option(parser) -> None:
    parser.add_argument("--output", type=Path, help="the JSON file (default: in the development directory)")
