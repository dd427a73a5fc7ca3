"""The data sets of the benchmarks: real ones with their exact neighbours, and a synthetic one of any size."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dev.datasets import GLOVE, PASSAGES, Dataset, read_jsonl, read_npy
from dev.paths import CHECKOUT

LARGE = "passages-100k"
SMALL = {"wiki10k": PASSAGES, "glove10k": GLOVE}
SYNTHETIC = "gaussian"
NAMES = (LARGE, *SMALL, SYNTHETIC)

SEED = 7
BLOCK = 1024
"""Rows of the synthetic set with a random generator of their own: any row can be made again from its number.
"""
CLUSTERS = 1000
SPREAD = 0.6
"""Of a cluster, beside the distance 1 of its centre from the origin: neighbours are of several clusters, and
an index has something to do."""
QUERY_BLOCKS = 1 << 40
"""The number of the first block of questions: none of the rows is one."""


@dataclass(frozen=True)
class BenchSet(Dataset):
    """Vectors for the cosine distance, with the row numbers of the exact 100 nearest of each question."""

    name: str
    truth: np.ndarray
    directory: Path | None = None
    """Where its texts are."""

    @property
    def rows(self) -> int:
        return len(self.base)

    def __str__(self) -> str:
        return f"{self.name}: {self.rows:,} x {self.dims}, cosine, {len(self.queries):,} questions"

    def texts(self) -> list[dict]:
        return read_jsonl(self.directory / "texts.jsonl.gz")

    def questions(self) -> list[dict]:
        return read_jsonl(self.directory / "queries.jsonl.gz")


def bench_data(
    max_queries: int = 1000, name: str | None = None, rows: int | None = None, dims: int = 128
) -> BenchSet:
    """A set by name; without one the largest real set that is at hand. `rows` takes the first ones only;
    `dims` is of the synthetic set. POLIGN_BENCH_DATA names the folder of the sets that are not in the
    repository."""
    if name == SYNTHETIC:
        return gaussian_mixture(rows or 100_000, dims, max_queries)
    large = Path(os.environ.get("POLIGN_BENCH_DATA") or CHECKOUT.parent / "shared" / "data") / LARGE
    if name is None and not large.exists():
        print(f"{large} does not exist: using the demo's 10,000 passages", file=sys.stderr)
        name = "wiki10k"
    if name in SMALL:
        directory = SMALL[name]
        base, queries, truth = (read_npy(directory / f"{part}.npy.gz") for part in FILES)
    elif not large.exists():
        raise SystemExit(f"{large} does not exist: name its folder by POLIGN_BENCH_DATA")
    else:
        name, directory = LARGE, large
        base, queries, truth = (np.load(directory / f"{part}.npy") for part in FILES)
    base, queries = base.astype(np.float32), queries[:max_queries].astype(np.float32)
    truth = truth[:max_queries]
    if rows and rows < len(base):
        base = base[:rows]
        truth, name = nearest(base, queries), f"{name}, first {rows}"
    return BenchSet(base, queries, name, truth, directory)


FILES = ("base.f16", "queries.f16", "gt100")


def add_data_options(parser) -> None:
    """Options for what `chosen_data` reads."""
    parser.add_argument("--data", choices=NAMES, help="default: the largest real set that is at hand")
    parser.add_argument("--rows", type=int, help="only the first rows; of gaussian: how many (100,000)")
    parser.add_argument("--dims", type=int, default=128, help="of gaussian")
    parser.add_argument("--queries", type=int, default=1000, help="distinct questions")


def chosen_data(options) -> BenchSet:
    return bench_data(options.queries, options.data, options.rows, options.dims)


def gaussian_mixture(rows: int, dims: int, queries: int) -> BenchSet:
    """Clusters of the same spread around centres on the unit sphere, questions from the same mixture."""
    centres = np.random.Generator(np.random.Philox(key=SEED)).standard_normal((CLUSTERS, dims))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    base = np.concatenate(list(_blocks(centres, rows, 0)))
    asked = np.concatenate(list(_blocks(centres, queries, QUERY_BLOCKS)))
    return BenchSet(base, asked, f"{SYNTHETIC}-{rows}x{dims}", nearest(base, asked))


def _blocks(centres: np.ndarray, rows: int, first: int) -> Iterator[np.ndarray]:
    clusters, dims = centres.shape
    for number, begin in enumerate(range(0, rows, BLOCK)):
        random = np.random.Generator(np.random.Philox(key=[SEED, first + number + 1]))
        cluster = random.integers(clusters, size=BLOCK)
        noise = random.standard_normal((BLOCK, dims), dtype=np.float32)
        block = centres[cluster] + noise * np.float32(SPREAD / np.sqrt(dims))
        yield block[: rows - begin].astype(np.float32)


def nearest(base: np.ndarray, queries: np.ndarray, count: int = 100) -> np.ndarray:
    """Row numbers of the exact nearest by cosine, in float32, ties by lower row."""
    count = min(count, len(base))
    unit = base / np.maximum(np.linalg.norm(base, axis=1, keepdims=True), 1e-30)
    found = np.empty((len(queries), count), np.int32)
    for begin in range(0, len(queries), 100):
        distances = -(queries[begin : begin + 100] @ unit.T)
        for row, line in enumerate(distances, begin):
            near = np.argpartition(line, count - 1)[:count]
            near.sort()
            found[row] = near[np.argsort(line[near], kind="stable")]
    return found
