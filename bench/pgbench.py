"""Runs pgbench and reads what it says of each transaction."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.engines import search_sql
from bench.server import DATABASE, BenchServer
from dev.postgres import SUPERUSER


@dataclass
class Outcome:
    per_second: float
    latencies: np.ndarray
    """Milliseconds of each transaction. Under a rate they count from the moment at which the schedule wanted
    it to begin: pgbench's log has them so, the lag is part of them and not to be added."""
    lags: np.ndarray
    """Of these, the milliseconds that it waited for a client; without a rate, none."""
    failed: int = 0


def random_question(questions: int, k: int = 10) -> str:
    return f"\\set id random(0, {questions - 1})\n{search_sql(':id', k)};\n"


def next_question(questions: int, k: int = 10) -> str:
    """Each question in turn; wants `-D id=-1`."""
    return f"\\set id (:id + 1) % {questions}\n{search_sql(':id', k)};\n"


def pgbench(
    server: BenchServer, script: str, *options: str, setting: str | None = None, clients: int = 1
) -> Outcome:
    """Prepared statements; one thread of pgbench, so that most of the machine is the server's."""
    postgres = server.cluster.postgres
    file, prefix = server.directory / "script.sql", server.directory / "pgbench_log"
    file.write_text(script)
    done = subprocess.run(
        [postgres.install.bin / "pgbench", "-n", "-M", "prepared", "-c", str(clients), "-j", "1",
         "-l", f"--log-prefix={prefix}", "--random-seed=7", *options, "-f", file,
         "-h", postgres.socket_directory, "-p", str(postgres.port), "-U", SUPERUSER, DATABASE],
        env={**os.environ, "PGOPTIONS": f"-c {setting}" if setting else ""}, capture_output=True, text=True,
    )
    logs = sorted(server.directory.glob("pgbench_log.*"))
    try:
        if done.returncode:
            raise RuntimeError(f"pgbench failed: {done.stderr.strip()[-500:]}")
        rate = float(re.search(r"^tps = ([\d.]+)", done.stdout, re.M).group(1))
        return read_logs(logs, rate)
    finally:
        for log in logs:
            log.unlink()


def read_logs(logs: list[Path], per_second: float) -> Outcome:
    """Lines of: client, number, microseconds, script, seconds, microseconds, and under a rate the lag."""
    lines = [line.split() for log in logs for line in log.read_text().splitlines()]
    good = [line for line in lines if line[2].isdigit()]  # else "failed" or "skipped"
    lags = [int(line[6]) for line in good if len(line) > 6]
    outcome = Outcome(
        per_second, np.array([int(line[2]) for line in good]) / 1e3, np.array(lags) / 1e3,
        len(lines) - len(good),
    )
    if lags and (outcome.latencies < outcome.lags).any():
        raise RuntimeError("this pgbench does not count the lag in its latencies")
    return outcome


def queries_per_second(
    server: BenchServer, setting: str, questions: int, seconds: float, clients: int = 1, k: int = 10
) -> float:
    """In a closed loop: each client asks again as soon as it has an answer."""
    return pgbench(
        server, random_question(questions, k), "-T", f"{seconds:g}", setting=setting, clients=clients
    ).per_second


def each_question_once(server: BenchServer, setting: str, questions: int, k: int = 10) -> np.ndarray:
    """Milliseconds of one search of each question, one after the other; without the first search of the
    session, which loads the extension and prepares the statement: that question is asked again."""
    return pgbench(
        server, next_question(questions, k), "-t", str(questions + 1), "-D", "id=-1", setting=setting
    ).latencies[1:]
