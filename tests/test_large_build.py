"""A build beyond memory: rows spill to temporary files, segments are many and go up in parts."""

from dataclasses import dataclass

import numpy as np
import pytest

from dev import process
from dev.datasets import create_table, passages, vector_text
from tests.harness.cluster import Database, assert_index_used
from tests.harness.s3proxy import Fault, Recording
from tests.harness.search import assert_equals_exact, search, search_sql

COPIES = 8
ROWS = COPIES * 10_000
PREFIX = "large"


@dataclass
class Large:
    database: Database
    base: np.ndarray
    upload: Recording
    """The requests of the build."""
    lost_answer: Fault
    """Of the first multipart upload's completion, which was applied."""
    temporary_bytes: int
    """What the build wrote to temporary files."""


def variants(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Every row `count` times, each time a little different."""
    noise = np.random.default_rng(seed).standard_normal((count, *rows.shape), dtype=np.float32)
    return (rows + 0.01 * noise).reshape(-1, rows.shape[1])


def temporary_bytes(database: Database) -> int:
    sql = f"SELECT temp_bytes FROM pg_stat_database WHERE datname = '{database.name}'"
    return database.cluster.execute(sql)[0][0]


@pytest.fixture(scope="module")
def large(_shared_cluster, _proxy, bucket):
    cluster = _shared_cluster
    cluster.start()
    cluster.configure(polign__store=f"s3://{bucket}/{PREFIX}")
    database = cluster.database()
    base = variants(passages().base, COPIES, seed=1)
    with database.connect() as connection:
        create_table(connection, "t", base)
        before = temporary_bytes(database)
        connection.execute("SET maintenance_work_mem = '8MB'")
        completion = _proxy.fault("applied-500", "POST", ".seg", query="uploadId=", times=1)
        with completion as lost_answer, _proxy.record() as upload:
            connection.execute("CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)")
        connection.execute("SELECT pg_stat_force_next_flush()")
    process.wait_until(
        lambda: temporary_bytes(database) > before, 5, "no temporary file was counted"
    )
    yield Large(database, base, upload, lost_answer, temporary_bytes(database) - before)
    database.drop()
    cluster.reset_settings()


@pytest.fixture
def connection(cluster, large):
    with large.database.connect() as connection:
        yield connection


@pytest.fixture(scope="module")
def deleted(large) -> list[int]:
    """Every tenth row, deleted and vacuumed."""
    with large.database.connect() as connection:
        connection.execute("DELETE FROM t WHERE id % 10 = 0")
        connection.execute("VACUUM t")
    return list(range(0, ROWS, 10))


def index_info(connection, column):
    return connection.execute(f"SELECT {column} FROM polign.index_info('t_polign')").fetchone()[0]


def answers(database, count):
    with database.connect() as connection:
        return [search(connection, "t", "cosine", query) for query in passages().queries[:count]]


def test_records_beyond_maintenance_work_mem_go_to_temporary_files(large):
    assert large.temporary_bytes > 10 << 20


def test_segments_are_several_and_a_long_one_goes_up_in_parts(large, connection, s3_server, bucket):
    stored = {
        key: size for key, size in s3_server.client().list(bucket, PREFIX).items() if key.endswith(".seg")
    }
    assert len(stored) >= 2
    assert index_info(connection, "objects") == len(stored)
    assert index_info(connection, "store_bytes") == sum(stored.values())
    assert index_info(connection, "rows") == ROWS
    long = {key for key, size in stored.items() if size > 16 << 20}
    parts = [r for r in large.upload.of("multipart") if r.method == "PUT"]
    assert long
    assert {r.key for r in parts} == long
    for key in long:
        assert sum(r.bytes_in for r in parts if r.key == key) >= stored[key]
        assert sum(r.key == key for r in parts) == -(-stored[key] // (8 << 20))


def test_a_completion_that_was_applied_and_answered_500_is_not_repeated(large):
    """The object is seen to be there: nothing is sent again."""
    assert large.lost_answer.hit == 1
    posts = [r for r in large.upload.of("multipart") if r.method == "POST"]
    (failed,) = [r for r in posts if r.status == 500]
    same = [r for r in posts if r.key == failed.key]
    assert len(same) == 2, "one beginning, one completion"


def test_recall_at_the_default(large, connection):
    # Like the rows: what the promise is made for, and calibrated with.
    queries = variants(passages().base[:: 10_000 // 50], 1, seed=2)
    sql = search_sql("t", "cosine", 10)
    assert_index_used(connection, "t_polign", sql, {"q": vector_text(queries[0])})
    lengths = np.linalg.norm(large.base, axis=1)
    distances = 1 - queries @ large.base.T / np.linalg.norm(queries, axis=1)[:, None] / lengths
    limits = np.partition(distances, 9, axis=1)[:, 9] + 1e-6
    shares = []
    for query, all_distances, limit in zip(queries, distances, limits, strict=True):
        found = search(connection, "t", "cosine", query).ids
        assert len(set(found)) == 10
        shares.append(np.mean(all_distances[found] <= limit))
    assert np.mean(shares) >= 0.95


def test_equality_with_exact_search_at_target_recall_1(large, connection):
    connection.execute("SET polign.target_recall = 1.0")
    assert_equals_exact(connection, "t", "t_polign", "cosine", passages().queries[:3])


def test_a_prewarmed_index_needs_no_request(large, connection, proxy):
    connection.execute("SELECT polign.cache_clear()")
    connection.execute("SELECT polign.prewarm('t_polign')")
    with proxy.record() as requests:
        answers(large.database, 20)
    assert requests.kinds == {}


def test_same_answers_after_a_restart_with_an_empty_cache(large, cluster, proxy):
    before = answers(large.database, 20)
    cluster.stop()
    cluster.wipe_cache()
    cluster.start()
    with proxy.record() as requests:
        assert answers(large.database, 20) == before
    assert set(requests.kinds) == {"get"}


def test_deleted_rows_do_not_come_back(large, deleted, connection):
    assert index_info(connection, "tombstones") == len(deleted)
    assert index_info(connection, "rows") == ROWS - len(deleted)
    for row in deleted[:: len(deleted) // 50]:
        found = search(connection, "t", "cosine", large.base[row]).ids
        assert len(found) == 10
        assert not any(row % 10 == 0 for row in found)
