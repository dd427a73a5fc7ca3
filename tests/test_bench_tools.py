"""The parts of the benchmarks that decide what a figure means."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from bench import percentiles
from bench.data import BLOCK, bench_data, nearest
from bench.load import REFINED, Ramp
from bench.pgbench import Outcome, read_logs
from bench.quality import words
from tests.harness import exact


def test_rows_of_the_synthetic_set_do_not_depend_on_how_many_there_are():
    few, many = (bench_data(50, "gaussian", rows, 16) for rows in (BLOCK + 100, 3 * BLOCK))
    assert (many.base[: few.rows] == few.base).all()
    assert (many.queries == few.queries).all()
    assert len(np.unique(many.base[:, 0])) == many.rows


def test_exact_neighbours_of_a_data_set_are_those_of_pgvectors_distance():
    data = bench_data(20, "glove10k", 2000)
    for query, found in zip(data.queries, data.truth, strict=True):
        distances = exact.distances("cosine", data.base, query)
        assert np.allclose(distances[found], np.sort(distances)[:100], atol=1e-6)
    assert (nearest(data.base, data.base[:5])[:, 0] == np.arange(5)).all()


def test_percentiles_are_latencies_that_were_measured():
    found = percentiles.summary(range(1, 101))
    assert (found["p50"], found["p95"], found["p99"], found["max"]) == (51, 96, 100, 100)
    assert percentiles.summary([]) == {"count": 0}


def log(tmp_path: Path, text: str) -> list[Path]:
    file = tmp_path / "log"
    file.write_text(text)
    return [file]


def test_latencies_of_pgbench_contain_the_lag(tmp_path: Path):
    outcome = read_logs(log(tmp_path, "0 1 2500 0 1 0 1500\n1 1 failed 0 1 5 0\n"), 7.5)
    assert (outcome.latencies.tolist(), outcome.lags.tolist(), outcome.failed) == ([2.5], [1.5], 1)
    assert read_logs(log(tmp_path, "0 1 2500 0 1 0\n"), 1).lags.tolist() == []
    with pytest.raises(RuntimeError, match="lag"):
        read_logs(log(tmp_path, "0 1 1000 0 1 0 1500\n"), 1)


class RampOf(Ramp):
    """On a server that answers so many searches a second, each in a millisecond."""

    def __init__(self, capacity: float, **options):
        self.capacity = capacity
        defaults = {"seconds": 10, "p99": 20, "recall": 0.95, "first_rate": 25, "rates": None}
        super().__init__(None, "", 0.96, Namespace(**defaults | options))

    def step(self, rate: float) -> bool:
        answered = np.ones(int(min(rate, self.capacity) * self.options.seconds))
        self.steps.append(self.judged(rate, self.options.seconds, Outcome(rate, answered, answered * 0)))
        return self.steps[-1]["passed"]


@pytest.mark.parametrize("capacity", [24, 1000, 5000])
def test_the_knee_is_the_rate_up_to_which_a_server_keeps_up(capacity: float):
    # A shortfall below four standard deviations of the arrivals, and the time to connect, is not seen.
    unseen = 1 + 4 / np.sqrt(capacity * 10) + 0.01
    assert capacity / REFINED <= RampOf(capacity).knee() <= capacity * unseen * REFINED


def test_without_the_recall_no_rate_passes():
    assert RampOf(1000, recall=0.97).knee() == 0
    assert RampOf(1000, rates=[10, 500, 2000]).knee() == 500


def test_an_answer_is_found_as_whole_words():
    assert words("Mars.") in words("a year on (Mars) is long")
    assert words("art") not in words("a start")
