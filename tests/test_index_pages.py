"""What is on the index's own pages survives what Postgres does to relations."""

import struct

import numpy as np
import psycopg
import pytest

from dev.datasets import load
from tests.harness.search import assert_equals_exact, search
from tests.harness.vectors import random_vectors
from tests.test_insert import assert_finds_all, create

VECTORS = random_vectors(500, 16)


def test_rows_survive_a_crash(own_cluster):
    cluster = own_cluster()
    database = cluster.database()
    with database.connect() as connection:
        create(connection, 16)
        load(connection, "t", VECTORS)
        connection.execute("DELETE FROM t WHERE id % 5 = 0")
        connection.execute("VACUUM t")
        load(connection, "t", VECTORS[::5], 1000)
        cluster.crash()
    cluster.start()
    with database.connect() as connection:
        connection.execute("SET polign.target_recall = 1")
        assert_finds_all(connection, VECTORS)
        load(connection, "t", VECTORS, 2000)
        assert_equals_exact(connection, "t", "i", "l2", VECTORS[:2], 1100)


def test_temporary_tables(connection):
    connection.execute("CREATE TEMP TABLE t (id int PRIMARY KEY, embedding vector(16)) ON COMMIT DELETE ROWS")
    connection.execute("CREATE INDEX i ON t USING polign_ivf (embedding vector_l2_ops)")
    connection.execute("SET polign.target_recall = 1; SET enable_seqscan = off")
    for turn in range(3):
        with connection.transaction():
            load(connection, "t", VECTORS, 1000 * turn)
            assert len(search(connection, "t", "l2", VECTORS[0], 1000).ids) == len(VECTORS)
        assert search(connection, "t", "l2", VECTORS[0]).ids == []
    connection.execute("DROP TABLE t")
    connection.execute("CREATE TEMP TABLE t (id int PRIMARY KEY, embedding vector(16))")
    connection.execute("CREATE INDEX i ON t USING polign_ivf (embedding vector_l2_ops)")
    for turn in range(4):
        load(connection, "t", VECTORS + np.float32(turn), 1000 * turn)
        connection.execute(f"DELETE FROM t WHERE id < {1000 * turn}")
        connection.execute("VACUUM t")
        assert_equals_exact(connection, "t", "i", "l2", VECTORS[:2], 600)


def test_truncate(connection):
    create(connection, 16)
    connection.execute("SET enable_seqscan = off")
    load(connection, "t", VECTORS)
    connection.execute("TRUNCATE t")
    assert search(connection, "t", "l2", VECTORS[0]).ids == []
    # In the transaction that creates a table, TRUNCATE keeps its files.
    with connection.transaction():
        connection.execute("DROP TABLE t")
        create(connection, 16)
        for _ in range(3):
            load(connection, "t", VECTORS)
            assert len(search(connection, "t", "l2", VECTORS[0], 1000).ids) == len(VECTORS)
            connection.execute("TRUNCATE t")
            assert search(connection, "t", "l2", VECTORS[0]).ids == []
        load(connection, "t", VECTORS)
    assert_finds_all(connection, VECTORS)


@pytest.mark.parametrize("rewrite", ["VACUUM FULL t", "CLUSTER t USING t_pkey", "REINDEX TABLE t"])
def test_rewritten_tables(connection, rewrite):
    create(connection, 16)
    load(connection, "t", VECTORS)
    connection.execute("DELETE FROM t WHERE id % 2 = 0")
    connection.execute(rewrite)
    assert_finds_all(connection, VECTORS)
    load(connection, "t", VECTORS, 1000)
    assert_equals_exact(connection, "t", "i", "l2", VECTORS[:2], 1100)


def block_starts(cluster, connection, relation: str = "i"):
    path = connection.execute(f"SELECT pg_relation_filepath('{relation}')").fetchone()[0]
    return cluster.postgres.data / path


@pytest.mark.parametrize("damage", ["zeroes", "noise", "shift", "circle"])
def test_damaged_pages_are_errors(own_cluster, damage):
    cluster = own_cluster()
    database = cluster.database()
    with database.connect() as connection:
        create(connection, 16)
        load(connection, "t", VECTORS)
        path = block_starts(cluster, connection)
    pages = path.stat().st_size // 8192
    cluster.stop()
    sound = path.read_bytes()
    noise = np.random.default_rng(1).bytes(8192)
    for block in range(pages):
        page = sound[block * 8192:(block + 1) * 8192]
        own_link = struct.pack("<II", block, *struct.unpack_from("<I", page, 8192 - 48 + 24))
        broken = {
            "zeroes": bytes(8192),
            # The header stays: Postgres itself refuses pages without one.
            "noise": page[:24] + noise[24:],
            "shift": page[:24] + page[32:8184 - 40] + bytes(8) + page[8184 - 40:],
            # The link to the next page leads to the page itself.
            "circle": page[:8192 - 48 + 32] + own_link + page[8192 - 48 + 40:],
        }[damage]
        assert len(broken) == 8192
        path.write_bytes(sound[:block * 8192] + broken + sound[(block + 1) * 8192:])
        cluster.start()
        with database.connect() as connection:
            connection.execute("SET polign.target_recall = 1; SET enable_seqscan = off")
            # Postgres' own checksums, where there are any, would hide what the index itself notices.
            connection.execute("SET ignore_checksum_failure = on")
            try:
                found = search(connection, "t", "l2", VECTORS[0], 600).ids
                # A block that nothing reads.
                assert len(found) == len(VECTORS)
            except psycopg.Error as error:
                assert error.sqlstate == "XX001" and "REINDEX" in error.diag.message_hint, error
            insert = "BEGIN; INSERT INTO t SELECT 9000, embedding FROM t LIMIT 1; ROLLBACK"
            for statement in (insert, "ROLLBACK", "VACUUM t"):
                try:
                    connection.execute(statement)
                except psycopg.Error as error:
                    assert error.sqlstate == "XX001", error
            assert connection.execute("SELECT 1").fetchone()[0] == 1
        cluster.stop()
    path.write_bytes(sound)
    cluster.start()
    with database.connect() as connection:
        connection.execute("SET polign.target_recall = 1")
        connection.execute("REINDEX INDEX i")
        assert_equals_exact(connection, "t", "i", "l2", VECTORS[:2], 600)
