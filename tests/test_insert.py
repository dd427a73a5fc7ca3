"""Rows inserted into an index are found at once, whatever their form and however they came."""

import numpy as np
import pytest

from dev.datasets import load, vector_text
from tests.harness import exact
from tests.harness.search import assert_equals_exact, search
from tests.harness.vectors import random_vectors

OPS = {"l2": "l2_ops", "ip": "ip_ops", "cosine": "cosine_ops"}


def create(connection, dims: int, metric: str = "l2", type_name: str = "vector") -> None:
    connection.execute(f"CREATE TABLE t (id int PRIMARY KEY, embedding {type_name}({dims}))")
    connection.execute(f"CREATE INDEX i ON t USING polign_ivf (embedding {type_name}_{OPS[metric]})")
    connection.execute("SET polign.target_recall = 1")


def assert_finds_all(connection, vectors: np.ndarray, metric: str = "l2", type_name: str = "vector") -> None:
    """The index gives every row that a sequential scan gives, in the same order."""
    queries = vectors[:: max(1, len(vectors) // 3)] + np.float32(0.01)
    assert_equals_exact(connection, "t", "i", metric, queries, len(vectors) + 5, type_name)


@pytest.mark.parametrize("metric", OPS)
@pytest.mark.parametrize(("dims", "rows"), [(1, 200), (3, 700), (16, 400), (100, 400), (384, 300)])
def test_inserted_rows_are_found(connection, metric, dims, rows):
    vectors = random_vectors(rows, dims)
    create(connection, dims, metric)
    load(connection, "t", vectors)
    assert_finds_all(connection, vectors, metric)


@pytest.mark.parametrize(("type_name", "dims", "rows"), [
    ("halfvec", 300, 200),
    # A refinement record of 8,016 bytes fills a page, one of 16,016 bytes needs two.
    ("vector", 8000, 12),
    ("vector", 8112, 9),
    ("vector", 16000, 12),
    ("halfvec", 16000, 9),
])
def test_rows_of_every_length_are_found(connection, type_name, dims, rows):
    vectors = np.round(random_vectors(rows, dims), 2)
    create(connection, dims, "l2", type_name)
    for row, vector in enumerate(vectors):
        connection.execute(f"INSERT INTO t VALUES ({row}, '{vector_text(vector)}')")
    assert_finds_all(connection, vectors, "l2", type_name)


@pytest.mark.smoke
def test_rows_beside_a_built_index(connection):
    vectors = random_vectors(3000, 24)
    connection.execute("CREATE TABLE t (id int PRIMARY KEY, embedding vector(24))")
    load(connection, "t", vectors[:2000])
    connection.execute("CREATE INDEX i ON t USING polign_ivf (embedding vector_l2_ops)")
    load(connection, "t", vectors[2000:], 2000)
    connection.execute("SET polign.target_recall = 1")
    assert_equals_exact(connection, "t", "i", "l2", vectors[::600], 50)
    connection.execute("RESET polign.target_recall")
    connection.execute("SET enable_seqscan = off")
    for row in (0, 1999, 2000, 2999):
        assert search(connection, "t", "l2", vectors[row]).ids[0] == row


@pytest.mark.parametrize("metric", OPS)
def test_a_new_row_lies_in_a_cell_that_a_search_for_it_opens(connection, metric):
    """Inserted rows are coded and placed as the build places them: recall does not suffer."""
    vectors = random_vectors(8000, 32)
    vectors *= np.random.default_rng(3).lognormal(0, 0.3, (8000, 1)).astype(np.float32)
    connection.execute("CREATE TABLE t (id int PRIMARY KEY, embedding vector(32))")
    load(connection, "t", vectors[:6000])
    connection.execute(f"CREATE INDEX i ON t USING polign_ivf (embedding vector_{OPS[metric]})")
    load(connection, "t", vectors[6000:], 6000)
    connection.execute("SET enable_seqscan = off")
    queries = random_vectors(30, 32, 5)
    built, added = [], []
    for query in queries:
        found = set(search(connection, "t", metric, query, 100).ids)
        for row in exact.nearest(metric, vectors, query, 100):
            (added if row >= 6000 else built).append(row in found)
    assert np.mean(built) > 0.9
    assert np.mean(added) > np.mean(built) - 0.05


def test_null_and_zero_vectors(connection):
    create(connection, 3, "cosine")
    connection.execute("INSERT INTO t VALUES (1, NULL), (2, '[0,0,0]'), (3, '[1,0,0]')")
    connection.execute("SET enable_seqscan = off")
    assert search(connection, "t", "cosine", np.float32([1, 1, 0])).ids == [3]


def test_zero_vectors_count_under_other_metrics(connection):
    create(connection, 3, "l2")
    connection.execute("INSERT INTO t VALUES (1, NULL), (2, '[0,0,0]'), (3, '[1,0,0]')")
    connection.execute("SET enable_seqscan = off")
    assert search(connection, "t", "l2", np.float32([0.1, 0, 0])).ids == [2, 3]


def test_huge_tiny_and_equal_vectors(connection):
    create(connection, 4)
    vectors = np.float32(
        [[1e-38, 0, 0, 0], [1e30, 1e30, 0, 0], [-1e18, 3, 0, 0]] + [[5, 5, 5, 5]] * 300 + [[1e-20] * 4]
    )
    load(connection, "t", vectors)
    assert_equals_exact(connection, "t", "i", "l2", np.float32([[5, 5, 5, 5], [0, 0, 0, 0]]), 400)


def test_a_trigger_that_searches_while_it_inserts(connection):
    """A statement sees its own rows only in the next command; the delta copy must not mix them up."""
    create(connection, 2)
    connection.execute("SET enable_seqscan = off")
    connection.execute("""
        CREATE FUNCTION nearest_id() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            SELECT id INTO NEW.seen FROM t ORDER BY embedding <-> NEW.embedding LIMIT 1;
            RETURN NEW;
        END $$;
        ALTER TABLE t ADD seen int;
        CREATE TRIGGER near BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION nearest_id();
        DO $$ BEGIN FOR n IN 1..300 LOOP INSERT INTO t VALUES (n, ARRAY[n, 0]::vector); END LOOP; END $$;
    """)
    rows = connection.execute("SELECT id, seen FROM t ORDER BY id").fetchall()
    assert rows == [(n, n - 1 if n > 1 else None) for n in range(1, 301)]
