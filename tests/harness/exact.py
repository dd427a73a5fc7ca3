"""Exact search in numpy, and how results are judged against it."""

from __future__ import annotations

import numpy as np

OPERATORS = {"l2": "<->", "ip": "<#>", "cosine": "<=>"}


def distances(metric: str, base: np.ndarray, query: np.ndarray) -> np.ndarray:
    """What pgvector's operator gives for each row, in float64."""
    base, query = base.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        return np.sqrt(((base - query) ** 2).sum(axis=1))
    products = base @ query
    if metric == "ip":
        return -products
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 - products / (np.linalg.norm(base, axis=1) * np.linalg.norm(query))


def nearest(metric: str, base: np.ndarray, query: np.ndarray, k: int) -> np.ndarray:
    """Row numbers of the k nearest, nearest first, ties by lower row."""
    return np.argsort(distances(metric, base, query), kind="stable")[:k]


def recall(metric: str, base: np.ndarray, query: np.ndarray, found: list[int], k: int) -> float:
    """The share of the k nearest that was found; a row that ties with the k-th counts as it."""
    all_distances = distances(metric, base, query)
    limit = np.partition(all_distances, k - 1)[k - 1]
    slack = 1e-6 * max(1.0, abs(limit))
    good = sum(all_distances[i] <= limit + slack for i in set(found[:k]))
    return good / k


def descents(values: list[float]) -> int:
    """How often a value is below the one before."""
    return sum(b < a for a, b in zip(values, values[1:], strict=False))


def assert_sorted(values: list[float]) -> None:
    assert descents(values) == 0, f"distances decrease: {values}"
