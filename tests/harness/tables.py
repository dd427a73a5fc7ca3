"""Small tables of real vectors with an index, and whether searches of them are right."""

from __future__ import annotations

import numpy as np
import psycopg

from dev.datasets import load, passages, vector_text
from tests.harness.search import Searchable

ROWS = 2500
DIMS = 64
"""Of the 384 of the passages: quick, and still real vectors."""
INDEX = "CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)"
TABLE = Searchable()


def vectors(first: int, last: int) -> np.ndarray:
    return passages().base[first:last, :DIMS]


def vector(row: int) -> str:
    """One of them, as SQL reads it."""
    return vector_text(vectors(row, row + 1)[0])


def questions(count: int) -> np.ndarray:
    return passages().queries[:count, :DIMS]


def create_table(connection: psycopg.Connection, rows: int = ROWS, prefix: str = "CREATE TABLE t") -> None:
    """Table t, without an index on its vectors; `note` is for updates that leave the vector alone."""
    connection.execute(f"{prefix} (id int PRIMARY KEY, embedding vector({DIMS}), note text)")
    load(connection, "t", vectors(0, rows))
    connection.execute("ANALYZE t")


def churn(connection: psycopg.Connection, count: int = 300) -> None:
    """Rows come, go and change: inserted, deleted, and updated with and without a new vector."""
    ((first,),) = connection.execute("SELECT coalesce(max(id) + 1, 0) FROM t")
    load(connection, "t", vectors(first, first + count), first)
    connection.execute(
        f"DELETE FROM t WHERE id % 10 = {first % 7};"
        f"UPDATE t SET embedding = (SELECT embedding FROM t WHERE id = {first + 8}) WHERE id % 50 = 1;"
        f"UPDATE t SET note = 'changed' WHERE id % 20 = 9"
    )


def assert_right(
    connection: psycopg.Connection, searchable: Searchable = TABLE, exactly: int = 5, about: int = 120
) -> None:
    """Full recall gives what exact search gives, the default at least 94 % of it, both by the index."""
    searchable.assert_exact(connection, questions(exactly), 25)
    searchable.assert_exact(connection, questions(1), 100_000)  # each row once
    if not about:
        return
    recall = searchable.mean_recall(connection, questions(about))
    assert recall >= 0.94, f"recall {recall:.3f} at the default settings"
