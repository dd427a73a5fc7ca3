"""The real data sets that travel with the repository, and how to load vectors fast.

Runs in the virtual environment: it needs NumPy and psycopg, which the rest of this package does not.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import psycopg

from dev.paths import CHECKOUT

PASSAGES = CHECKOUT / "demo" / "data"
GLOVE = CHECKOUT / "tests" / "data" / "glove10k-100d"


@dataclass(frozen=True)
class Dataset:
    base: np.ndarray
    """rows x dims, float32"""
    queries: np.ndarray

    @property
    def dims(self) -> int:
        return self.base.shape[1]


def read_npy(path: Path) -> np.ndarray:
    with gzip.open(path) as file:
        return np.load(file)


def read_jsonl(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@lru_cache
def passages() -> Dataset:
    """10,000 x 384, unit length: for cosine."""
    return _dataset(PASSAGES)


@lru_cache
def glove() -> Dataset:
    """10,000 x 100, lengths vary: for L2 and inner product."""
    return _dataset(GLOVE)


def _dataset(directory: Path) -> Dataset:
    base, queries = (
        read_npy(directory / f"{name}.f16.npy.gz").astype(np.float32) for name in ("base", "queries")
    )
    for vectors in (base, queries):
        vectors.setflags(write=False)  # all callers have the same
    return Dataset(base, queries)


def vector_text(vector: np.ndarray) -> str:
    """A vector in the form that SQL reads; no digit of a float32 is lost."""
    return "[" + ",".join(np.format_float_positional(x, unique=True) for x in np.float32(vector)) + "]"


def load(connection: psycopg.Connection, table: str, vectors: np.ndarray, first_id: int = 0) -> None:
    """COPY into (id int, embedding vector), in pgvector's binary form."""
    rows, dims = vectors.shape
    record = np.dtype([
        ("fields", ">i2"), ("id_length", ">i4"), ("id", ">i4"),
        ("length", ">i4"), ("dims", ">i2"), ("unused", ">i2"), ("values", ">f4", (dims,)),
    ])
    data = np.zeros(rows, record)
    data["fields"], data["id_length"], data["length"] = 2, 4, 4 + 4 * dims
    data["id"], data["dims"], data["values"] = np.arange(first_id, first_id + rows), dims, vectors
    header = b"PGCOPY\n\xff\r\n\0" + bytes(8)
    statement = f"COPY {table} (id, embedding) FROM STDIN (FORMAT binary)"
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(header + data.tobytes() + b"\xff\xff")


def create_table(connection: psycopg.Connection, table: str, vectors: np.ndarray) -> None:
    """A table (id int primary key, embedding vector(D)) with these rows, analysed."""
    dims = vectors.shape[1]
    connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, embedding vector({dims}))")
    load(connection, table, vectors)
    connection.execute(f"ANALYZE {table}")
