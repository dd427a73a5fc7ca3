"""How many searches a second are answered in time: an open loop with a rising rate.

Searches arrive at random moments at a given mean rate, whether or not earlier ones are answered, and each
latency counts from the moment at which the search was due. The read knee is the highest rate at which the p99
of these latencies is within its target, at a setting whose recall is within its own.
"""

from __future__ import annotations

import argparse
import math
import sys

from bench import percentiles
from bench.data import BenchSet, add_data_options, chosen_data
from bench.engines import ENGINES, QUESTIONS_OF_EXACT, Engine, measured_recall
from bench.pgbench import Outcome, each_question_once, pgbench, random_question
from bench.results import Run, add_output_option
from bench.server import DATABASE, BenchServer, bench_server

FIRST_RATE = 25.0
GROWTH = 1.5
"""From one rate to the next; around the knee halved until steps are of REFINED."""
REFINED = 1.08
LEAST_RATE, MOST_RATE = 1.0, 100_000.0
CONNECTING = 0.1
"""Seconds: pgbench's time runs while its sessions connect; it was 0.04 to 0.06 of 8 sessions."""
FEWEST = 300
"""Searches below which a step has no p99 worth the name: three of them are slower."""


def chosen_setting(
    server: BenchServer, engine: Engine, data: BenchSet, target: float, k: int, given: str | None
) -> tuple[str, float]:
    """The setting to measure and its recall: the one given, polign's default, or of the others the first of
    the sweep that reaches the target."""
    truth = data.truth[:QUESTIONS_OF_EXACT] if engine.few_questions else data.truth
    if given:
        settings = [given]
    elif engine.name == "polign":
        settings = [engine.setting(engine.default)]
    elif engine.few_questions:
        settings = [engine.setting(0)]  # clients beside each other have no use for parallel workers
    else:
        settings = engine.settings(data.rows)
    with server.connect() as connection:
        for setting in settings:
            connection.execute(f"SET {setting}")
            engine.assert_used(connection, k)
            recall = measured_recall(connection, setting, truth, k)
            print(f"  {setting:<36} recall@{k} {recall:.4f}", flush=True)
            if recall >= target:
                break
    return setting, recall


class Ramp:
    """Steps of one rate each; `passed` says whether a rate is within the targets."""

    def __init__(self, server: BenchServer, setting: str, recall: float, options):
        self.server, self.setting, self.recall, self.options = server, setting, recall, options
        self.steps: list[dict] = []

    def step(self, rate: float) -> bool:
        # Long enough for a p99.
        seconds = max(self.options.seconds, FEWEST / rate)
        outcome = pgbench(
            self.server, random_question(self.options.queries, self.options.k), "-T", f"{math.ceil(seconds)}",
            "--rate", f"{rate:.3f}", setting=self.setting, clients=self.options.clients,
        )
        self.steps.append(self.judged(rate, math.ceil(seconds), outcome))
        return self.steps[-1]["passed"]

    def judged(self, rate: float, seconds: int, outcome: Outcome) -> dict:
        latency, lag = percentiles.summary(outcome.latencies), percentiles.summary(outcome.lags)
        expected = rate * seconds
        # What was due and had not begun at the end is in no log: without this, a server that stands still
        # would look good. Arrivals are Poisson's, whose standard deviation is the root of their number.
        kept_up = len(outcome.latencies) >= expected - 4 * math.sqrt(expected) - rate * CONNECTING
        in_time = latency.get("p99", math.inf) <= self.options.p99
        passed = kept_up and in_time and not outcome.failed and self.recall >= self.options.recall
        print(f"  {rate:9.1f}/s {len(outcome.latencies):>8} answered   "
              f"{percentiles.line(latency) if latency['count'] else 'none':<40}"
              f"lag p99 {lag.get('p99', 0):8.2f} ms   "
              f"{'ok' if passed else 'too slow' if not in_time else 'fell behind' if not kept_up else 'no'}",
              flush=True)
        return {
            "rate": rate, "seconds": seconds, "expected": expected, "latency_ms": latency, "lag_ms": lag,
            "kept_up": kept_up, "failed": outcome.failed, "passed": passed,
        }

    def passes(self, rate: float) -> bool:
        """A step that fails is made once more: one pause of the machine shall not end a ramp."""
        return self.step(rate) or self.step(rate)

    def bracket(self, rate: float) -> tuple[float, float]:
        """A rate that passes and one that does not, a factor of GROWTH apart."""
        if self.passes(rate):
            while rate * GROWTH < MOST_RATE and self.passes(rate * GROWTH):
                rate *= GROWTH
            return rate, rate * GROWTH
        while rate / GROWTH >= LEAST_RATE:
            rate /= GROWTH
            if self.passes(rate):
                return rate, rate * GROWTH
        return 0.0, rate

    def knee(self) -> float:
        """The highest rate that passed; 0 if none did."""
        if self.options.rates:
            good = 0.0
            for rate in sorted(self.options.rates):
                if not self.passes(rate):
                    break
                good = rate
            return good
        good, bad = self.bracket(self.options.first_rate)
        while good and bad / good > REFINED:
            middle = math.sqrt(good * bad)
            if self.passes(middle):
                good = middle
            else:
                bad = middle
        return good


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-load", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="polign")
    parser.add_argument("--setting", help="such as hnsw.ef_search=100; default: polign's default, or the "
                                          "first of the engine's sweep that reaches the recall")
    parser.add_argument("--clients", type=int, default=8, help="sessions that share the searches")
    parser.add_argument("--seconds", type=int, default=15, help="of each step, or longer for enough searches")
    parser.add_argument("--p99", type=float, default=20.0, help="target in milliseconds")
    parser.add_argument("--recall", type=float, default=0.95, help="target of recall@k")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="*", help="searches a second, instead of a ramp")
    parser.add_argument("--first-rate", type=float, default=FIRST_RATE, help="of the ramp")
    parser.add_argument("--fail-on-knee", type=float, metavar="RATE",
                        help="exit status 1 when the knee is below this rate")
    add_data_options(parser)
    add_output_option(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    data = chosen_data(options)
    options.queries = len(data.queries)
    run = Run("load", options, data)
    engine = ENGINES[options.engine]
    with bench_server(max_connections=options.clients + 20) as server:
        server.load(data)
        if create := engine.create_index(data.rows):
            server.cluster.execute(create, DATABASE)
        engine.prefer(server.cluster)
        print(f"\n{engine.name}, p99 <= {options.p99:g} ms and recall@{options.k} >= {options.recall:g}, "
              f"{options.clients} clients")
        setting, recall = chosen_setting(server, engine, data, options.recall, options.k, options.setting)
        if not engine.few_questions:
            each_question_once(server, setting, options.queries, options.k)  # fills the caches
        ramp = Ramp(server, setting, recall, options)
        knee = ramp.knee() if recall >= options.recall else 0.0
    if recall < options.recall:
        print(f"recall@{options.k} {recall:.4f} is below the target: no rate counts")
    print(f"\nread knee: {knee:.1f} searches/s")
    run.write({
        "engine": engine.name, "setting": setting, f"recall@{options.k}": recall, "knee": knee,
        "steps": ramp.steps,
    })
    if options.fail_on_knee is not None and knee < options.fail_on_knee:
        print(f"the knee is below {options.fail_on_knee:g}/s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
