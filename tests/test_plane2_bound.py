"""Plane 2's bound against pgvector's own operators: never above what they give, or rows would be returned
out of order."""

from __future__ import annotations

import math
import struct
import subprocess

import numpy as np
import pytest

from dev.build import cargo, cargo_target_dir, output_dir, profile
from tests.harness.exact import OPERATORS

METRIC_CODES = {"l2": 1, "ip": 2, "cosine": 3}
DIMENSIONS = [1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 100, 255, 256, 384, 513, 768, 1000, 1029, 1536, 2000]
LARGE_DIMENSIONS = [3072, 4096, 8000, 16000]
VECTOR_SCALES = [1, 1e-3, 1e4, 1e-10, 1e-19, 1e-23, 1e-38, 1e-41, 1e10, 1e15, 1e18, 1e30, 1e38]
HALFVEC_SCALES = [1, 1e-2, 1e2, 1e-4, 1e-7, 1e4]
ROWS = 8


def rows_of_kind(kind: str, random: np.random.Generator, dim: int) -> np.ndarray:
    normals = random.standard_normal((ROWS + 1, dim))
    if kind == "alike":  # every rounding goes the same way
        return np.repeat(np.abs(normals[:, :1]) / 3 + 0.1, dim, axis=1)
    if kind == "offset":  # far from the origin, near to each other
        return 1000 + normals * 0.01
    if kind == "near":  # the rows lie about the query
        return normals[:1] + 1e-3 * normals
    if kind == "sparse":
        return np.where(normals > 1, normals, 0)
    if kind == "spread":  # magnitudes over many powers of two
        return normals * 2.0 ** -(np.arange(dim) % 12)
    assert kind == "normal"
    return normals


def cases(type_name: str):
    """(metric, vectors): the first vector is the query, all as float32 values that the type can hold."""
    random = np.random.default_rng(5)
    scales = VECTOR_SCALES if type_name == "vector" else HALFVEC_SCALES
    number = 0
    for dim in DIMENSIONS + LARGE_DIMENSIONS:
        for metric in METRIC_CODES:
            kinds = ["normal", "alike", "offset", "near", "sparse", "spread"]
            for kind in kinds if dim < 3000 else kinds[number % 2 :: 2]:
                scale = scales[number % len(scales)] if number % 3 else 1
                number += 1
                vectors = rows_of_kind(kind, random, dim) * scale
                if type_name == "halfvec":
                    yield metric, np.clip(vectors, -65504, 65504).astype(np.float16).astype(np.float32)
                else:
                    yield metric, np.clip(vectors, -3.4e38, 3.4e38).astype(np.float32)


def text(vector: np.ndarray) -> str:
    return "[" + ",".join(f"{x:.9g}" for x in vector) + "]"


@pytest.fixture(scope="session")
def bound_check():
    """The example program of the engine that prints bounds."""
    cargo(["build", "--locked", "--profile", profile(), "-p", "polign-engine", "--example", "bound_check"])
    return output_dir(cargo_target_dir()) / "examples" / "bound_check"


def bounds(program, path, all_cases) -> dict[tuple[int, int], float]:
    """The bound of each case and row that has one."""
    with open(path, "wb") as file:
        for metric, vectors in all_cases:
            rows, dim = vectors.shape
            file.write(struct.pack("<III", METRIC_CODES[metric], dim, rows - 1))
            file.write(vectors.astype("<f4").tobytes())
    lines = subprocess.run([program, path], check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == sum(len(vectors) - 1 for _, vectors in all_cases)
    fields = [line.split() for line in lines]
    return {(int(f[0]), int(f[1])): float(f[2]) for f in fields if f[2] != "zero"}


@pytest.mark.parametrize("type_name", ["vector", "halfvec"])
def test_bound_is_never_above_pgvectors_distance(connection, bound_check, tmp_path, type_name):
    all_cases = list(cases(type_name))
    found = bounds(bound_check, tmp_path / "cases", all_cases)
    connection.execute(f"CREATE TEMP TABLE rows (number int, v {type_name})")
    compared, losses = 0, []
    for number, (metric, vectors) in enumerate(all_cases):
        connection.execute("TRUNCATE rows")
        with connection.cursor().copy("COPY rows FROM STDIN") as copy:
            for row, vector in enumerate(vectors[1:]):
                copy.write_row((row, text(vector)))
        distances = connection.execute(
            f"SELECT number, v {OPERATORS[metric]} %s::{type_name} FROM rows", (text(vectors[0]),)
        ).fetchall()
        assert len(distances) == len(vectors) - 1
        for row, distance in distances:
            bound = found.get((number, row))
            if bound is None or math.isnan(distance):
                continue
            context = f"{metric}, {vectors.shape[1]} dimensions, case {number}, row {row}"
            assert bound <= distance, f"{context}: bound {bound!r}, pgvector {distance!r}"
            compared += 1
            if metric != "ip" and math.isfinite(distance) and distance > 0:
                losses.append(1 - bound / distance)
    assert compared > 0.9 * sum(len(vectors) - 1 for _, vectors in all_cases)
    # Useless bounds would hold too.
    assert np.median(losses) < 0.05
    print(f"{type_name}: {compared} bounds hold; median loss {np.median(losses):.4f}")
