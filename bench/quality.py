"""What an approximate index costs a person who asks: the labelled questions, answered by exact search and by
polign at its default settings.

Hit@k: one of the first k passages is marked as holding the answer; MRR@10: the mean of one over the rank of
the first such passage. Answer@10: the words of an answer stand, in this order, in one of ten passages; of the
questions of NQ-Open nothing else is known.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache

import numpy as np
import psycopg

from bench.data import LARGE, BenchSet, bench_data
from bench.engines import ENGINES, search_sql
from bench.results import Run, add_output_option
from bench.server import DATABASE, bench_server

ALL_QUESTIONS = 10**6
ALL_SETS = "all"
METRICS = ("hit@1", "hit@10", "mrr@10", "answer@10", "recall@10")
CEILING = {"hit@1": "gold_hit@1", "hit@10": "gold_hit@10", "mrr@10": "mrr10", "answer@10": "answer_hit10"}
"""How metrics.json names them."""


class Labels:
    """Judges the ten passages that came for each question: by its labels, and by what exact search finds."""

    def __init__(self, data: BenchSet):
        self.questions = data.questions()[: len(data.queries)]
        texts = data.texts()
        self.exact = data.truth[:, :10].tolist()
        self.passage = cache(lambda row: words(texts[row]["text"]))

    def judge(self, found: list[list[int]]) -> dict[str, dict[str, float]]:
        """By set of questions, and of all: the means of the metrics."""
        by_set: dict[str, list[dict]] = {}
        for question, rows, exact in zip(self.questions, found, self.exact, strict=True):
            judged = self.one(question, rows) | {"recall@10": len(set(rows) & set(exact)) / 10}
            for name in (question["set"], ALL_SETS):
                by_set.setdefault(name, []).append(judged)
        by_set[ALL_SETS] = by_set.pop(ALL_SETS)  # last
        return {name: {"n": len(each), **means(each)} for name, each in by_set.items()}

    def one(self, question: dict, rows: list[int]) -> dict[str, float]:
        said = [words(answer) for answer in question["answers"]]
        judged = {"answer@10": float(any(a in self.passage(row) for row in rows for a in said))}
        if question["rel"]:
            gold = set(question["rel"])
            rank = next((n for n, row in enumerate(rows, 1) if row in gold), 0)
            judged |= {"hit@1": float(rank == 1), "hit@10": float(rank > 0)}
            judged["mrr@10"] = 1 / rank if rank else 0.0
        return judged


def means(judged: list[dict[str, float]]) -> dict[str, float]:
    known = {m: [j[m] for j in judged if m in j] for m in METRICS}
    return {m: float(np.mean(values)) for m, values in known.items() if values}


def words(text: str) -> str:
    """Its words in lower case, between spaces, so that no part of a word counts."""
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def answered(connection: psycopg.Connection, questions: int) -> list[list[int]]:
    sql = search_sql("%s")
    return [
        [row for row, in connection.execute(sql, (number,), prepare=True)] for number in range(questions)
    ]


def check_exact(connection: psycopg.Connection, truth: np.ndarray) -> None:
    """That the exact neighbours of the data set are those of the scan of the table, but for ties."""
    ENGINES["exact"].assert_used(connection)
    for ids, expected in zip(answered(connection, len(truth)), truth[:, :10].tolist(), strict=True):
        assert len(set(ids) & set(expected)) >= 9, f"the scan of the table finds {ids}, expected {expected}"


def report(exact: dict, ours: dict, ceiling: dict) -> float:
    """Prints a table; returns the largest loss of a metric over all questions: of a small set one question
    is much."""
    losses = {}
    print(f"\n{'set':<18}{'n':>6}  {'metric':<10}{'ceiling':>9}{'exact':>9}{'polign':>9}{'lost':>9}")
    for name, metrics in exact.items():
        for metric in (m for m in METRICS if m in metrics):
            best = ceiling.get(name, {}).get(CEILING.get(metric))
            losses[name, metric] = metrics[metric] - ours[name][metric]
            print(f"{name:<18}{metrics['n']:>6}  {metric:<10}{'' if best is None else f'{best:.4f}':>9}"
                  f"{metrics[metric]:>9.4f}{ours[name][metric]:>9.4f}{losses[name, metric]:>9.4f}")
    return max(loss for (name, metric), loss in losses.items() if name == ALL_SETS and metric in CEILING)


def main() -> int:
    parser = argparse.ArgumentParser(prog='make bench T="quality"', description=__doc__)
    parser.add_argument("--data", choices=(LARGE, "wiki10k"))
    parser.add_argument("--queries", type=int, default=ALL_QUESTIONS, help="only the first questions")
    parser.add_argument("--allowed-loss", type=float, default=0.02,
                        help="exit status 1 when polign loses more of a metric over all questions")
    parser.add_argument("--check", type=int, default=20, help="questions for which the table is scanned too")
    add_output_option(parser)
    options = parser.parse_args()
    data = bench_data(options.queries, options.data)
    run = Run("quality", options, data)
    labels = Labels(data)
    metrics = data.directory / "metrics.json"
    ceiling = json.loads(metrics.read_text())["exact_search"] if metrics.exists() else {}
    with bench_server() as server:
        server.load(data)
        with server.connect() as connection:
            check_exact(connection, data.truth[: options.check])
        engine = ENGINES["polign"]
        server.cluster.execute(engine.create_index(data.rows), DATABASE)
        with server.connect() as connection:
            engine.assert_used(connection)
            found = answered(connection, len(data.queries))
    by_exact, by_polign = labels.judge(labels.exact), labels.judge(found)
    worst = report(by_exact, by_polign, ceiling)
    print(f"\nlargest loss over all questions, recall aside: {worst:.4f} (goal <= {options.allowed_loss:g})")
    run.write({"ceiling": ceiling, "exact": by_exact, "polign": by_polign, "largest_loss": worst})
    return 0 if worst <= options.allowed_loss else 1


if __name__ == "__main__":
    sys.exit(main())
