"""polign.verify: silent about a healthy index, and it names what is wrong with another one."""

import psycopg
import pytest

from dev.datasets import load
from tests.harness.vectors import random_vectors
from tests.test_flush import DIM, flush, table


def problems(connection, deep: bool = True, index: str = "i") -> list[tuple]:
    return connection.execute("SELECT * FROM polign.verify(%s, %s)", [index, deep]).fetchall()


@pytest.mark.parametrize("deep", [False, True])
def test_a_healthy_index_has_no_problem(connection, deep):
    table(connection, 1200, 300)
    assert problems(connection, deep) == []
    connection.execute("DELETE FROM t WHERE id % 3 = 0")
    connection.execute("UPDATE t SET embedding = embedding WHERE id % 7 = 1")
    assert problems(connection, deep) == []
    connection.execute("VACUUM t")
    assert problems(connection, deep) == []
    flush(connection)
    load(connection, "t", random_vectors(100, DIM, 4), 10_000)
    assert problems(connection, deep) == []
    connection.execute("SELECT polign.compact('i')")
    assert problems(connection, deep) == []


def test_rows_that_are_not_indexed_are_not_missed(connection):
    connection.execute("CREATE TABLE t (id int, kind int, embedding vector(4))")
    insert = "INSERT INTO t SELECT n, n % 3, ARRAY[n, 1, n % 5, 2]::vector FROM generate_series(1, {}) n"
    connection.execute(insert.format(900))
    connection.execute("INSERT INTO t VALUES (0, 1, NULL), (0, 1, '[0,0,0,0]')")
    connection.execute("CREATE INDEX i ON t USING polign_ivf (embedding vector_cosine_ops) WHERE kind = 1")
    connection.execute(insert.format(90))
    assert problems(connection) == []


def test_an_object_that_is_missing_or_damaged_is_named(connection, cluster, s3_server, bucket, store_prefix):
    table(connection, 1200, 0)
    keys = [key for key in s3_server.client().list(bucket, store_prefix) if key.endswith(".seg")]
    assert len(keys) == 1
    body = s3_server.client().get(bucket, keys[0])
    flipped = bytearray(body)
    flipped[len(body) // 2] ^= 1
    s3_server.client().put(bucket, keys[0], bytes(flipped))
    assert problems(connection, deep=False) == []
    found = problems(connection)
    assert [row[0] for row in found] == ["object", "row"]
    assert found[0][1] == keys[0].removeprefix(f"{store_prefix}/") and "not compared" in found[1][2]
    s3_server.client().put(bucket, keys[0], body[:-100])
    assert "bytes, the root says" in problems(connection, deep=False)[0][2]
    s3_server.client().delete(bucket, keys[0])
    assert problems(connection, deep=False)[0][2] == "it is not in the store"
    s3_server.client().put(bucket, keys[0], body)
    assert problems(connection) == []


def test_a_row_that_the_index_lacks_is_named(connection):
    """As after an update of the table that the index did not see."""
    table(connection, 800, 100)
    connection.execute("UPDATE pg_index SET indisready = false WHERE indexrelid = 'i'::regclass")
    connection.execute("INSERT INTO t SELECT n, embedding FROM t, generate_series(5000, 5002) n WHERE id = 7")
    connection.execute("UPDATE pg_index SET indisready = true WHERE indexrelid = 'i'::regclass")
    found = problems(connection)
    assert len(found) == 3 and all(row[0] == "row" and row[2] == "it is not in the index" for row in found)


def test_a_damaged_page_is_named(cluster, database):
    with database.connect() as connection:
        table(connection, 800, 200)
        path = connection.execute("SELECT pg_relation_filepath('i')").fetchone()[0]
        connection.execute("CHECKPOINT")
    cluster.stop()
    file = cluster.postgres.data / path
    size = file.stat().st_size
    with file.open("r+b") as pages:
        pages.seek(size - 8192 + 30)
        pages.write(b"\xff" * 20)
    cluster.start()
    with database.connect() as connection:
        connection.execute("SET ignore_checksum_failure = on")
        found = problems(connection)
        assert any(row[0] == "page" for row in found), found


def test_only_the_owner_may_verify(connection, user):
    table(connection, 100, 10)
    connection.execute("GRANT SELECT ON t TO PUBLIC")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        problems(user)


def test_what_the_store_does_not_tell_is_an_error(connection, cluster, proxy):
    table(connection, 500, 0)
    cluster.configure(polign__fetch_timeout="1s")
    with proxy.refusing(), pytest.raises(psycopg.errors.IoError):
        problems(connection)
