"""What `polign.index_info` says about the state of an index; recall calibrated anew as it grows."""

import numpy as np
import pytest

from dev.datasets import load
from tests.harness.search import assert_equals_exact, mean_recall, search
from tests.harness.vectors import random_vectors
from tests.test_compact import compact
from tests.test_flush import DIM, flush, info, queries, table, wait_until
from tests.test_insert import create


def test_a_healthy_index_needs_nothing(connection):
    table(connection, 3000, 100)
    assert info(connection, "recommendation") is None
    assert (info(connection, "delta_segments"), info(connection, "dead_share")) == (0, 0)
    assert abs(info(connection, "drift")) < 1e-3
    assert 1 <= info(connection, "cell_skew") < 2


def test_an_index_without_rows_needs_nothing(connection):
    create(connection, DIM)
    figures = "drift, recommendation, cell_skew, dead_share, delta_segments"
    row = connection.execute(f"SELECT {figures} FROM polign.index_info('i')").fetchone()
    assert row == (None, None, 0, 0, 0)


def test_flushed_segments_and_dead_rows_are_counted_until_they_are_compacted(connection, by_hand):
    table(connection, 2000, 300)
    flush(connection)
    assert (info(connection, "objects"), info(connection, "delta_segments")) == (2, 1)
    connection.execute("DELETE FROM t WHERE id % 5 < 2")
    connection.execute("VACUUM t")
    assert info(connection, "dead_share") == pytest.approx(0.4)
    assert "40 % of the rows in the index are dead" in info(connection, "recommendation")
    compact(connection)
    assert (info(connection, "delta_segments"), info(connection, "dead_share")) == (0, 0)
    assert info(connection, "recommendation") is None


def test_dead_rows_of_the_delta_count_too(connection, by_hand):
    table(connection, 900, 100)
    connection.execute("DELETE FROM t WHERE id >= 980")
    connection.execute("VACUUM t")
    assert info(connection, "dead_share") == pytest.approx(0.02)


def test_many_rows_that_nothing_flushes_are_told(connection, by_hand):
    table(connection, 0, 21_000)
    assert "set polign.delta_limit" in info(connection, "recommendation")
    flush(connection)
    assert info(connection, "recommendation") is None


def test_rows_of_another_kind_are_drift(connection, by_hand):
    table(connection, 3000, 0)
    wide = random_vectors(3000, DIM, 5) * np.float32(4)
    load(connection, "t", wide, 10_000)
    compact(connection)
    assert info(connection, "drift") > 0.5
    assert "REINDEX INDEX CONCURRENTLY" in info(connection, "recommendation")
    connection.execute("REINDEX INDEX CONCURRENTLY i")
    assert info(connection, "recommendation") is None


def test_one_crowded_cell_is_skew(connection, by_hand):
    """Equal rows cannot be split."""
    table(connection, 3000, 0)
    same = np.repeat(random_vectors(1, DIM, 6), 3000, axis=0)
    load(connection, "t", same, 10_000)
    flush(connection)
    assert info(connection, "cell_skew") > 1.5


def depth(connection, vectors: np.ndarray) -> int:
    """Cells that a search at the default target opens."""
    search(connection, "t", "l2", vectors[0])
    return connection.execute("SELECT cells_probed FROM polign.last_scan()").fetchone()[0]


def test_recall_is_calibrated_anew_when_an_index_has_grown(connection, by_hand):
    vectors = table(connection, 1500, 6000)
    connection.execute("RESET polign.target_recall")
    before = depth(connection, vectors)
    flush(connection)
    assert "calibrated with 1500 rows, and there are 7500 now" in info(connection, "recommendation")
    compact(connection)
    assert info(connection, "recommendation") is None
    assert depth(connection, vectors) > before
    asked = random_vectors(100, DIM, 77)
    assert mean_recall(connection, "t", "i", "l2", vectors, asked) >= 0.93
    assert connection.execute("SELECT codes_scanned < 7500 FROM polign.last_scan()").fetchone()[0]
    connection.execute("SET polign.target_recall = 1")
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 60)


def test_a_worker_calibrates_when_an_index_has_shrunk(connection, cluster):
    vectors = table(connection, 3000, 0)
    epoch = info(connection, "epoch")
    connection.execute("DELETE FROM t WHERE id >= 1200")
    connection.execute("VACUUM t")
    healthy = "SELECT recommendation IS NULL AND tombstones = 0 FROM polign.index_info('i')"
    wait_until(lambda: connection.execute(healthy).fetchone()[0])
    assert info(connection, "epoch") >= epoch + 2, "compacted and calibrated"
    assert_equals_exact(connection, "t", "i", "l2", queries(vectors[:1200]), 60)


def test_a_temporary_index_is_calibrated_by_its_own_session(database):
    with database.connect() as connection:
        connection.execute(f"CREATE TEMP TABLE t (id int PRIMARY KEY, embedding vector({DIM}))")
        vectors = random_vectors(4000, DIM)
        load(connection, "t", vectors[:1000])
        connection.execute("CREATE INDEX i ON t USING polign_ivf (embedding vector_l2_ops)")
        load(connection, "t", vectors[1000:], 1000)
        flush(connection)
        connection.execute("VACUUM t")
        assert info(connection, "recommendation") is None
        connection.execute("SET polign.target_recall = 1")
        assert_equals_exact(connection, "t", "i", "l2", queries(vectors), 60)
