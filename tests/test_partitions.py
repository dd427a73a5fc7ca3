"""Partitioned tables and inheritance: one index a partition, merged in the right order."""

import pytest

from dev.datasets import load
from tests.harness.cluster import plan, plan_nodes
from tests.harness.search import Searchable
from tests.harness.tables import INDEX, ROWS, assert_right, churn, questions, vector, vectors

HALF = ROWS // 2
COLUMNS = "(id int, embedding vector(64), note text)"
# The names that Postgres gives the indexes of the partitions.
BOTH = Searchable(index=("t1_embedding_idx", "t2_embedding_idx"))
FIRST = Searchable(index="t1_embedding_idx", where=f"id < {HALF}")


@pytest.fixture
def table(connection):
    """Two partitions of equal size; what comes beyond ROWS goes into the second."""
    connection.execute(
        f"CREATE TABLE t {COLUMNS} PARTITION BY RANGE (id);"
        f"CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (MINVALUE) TO ({HALF});"
        f"CREATE TABLE t2 PARTITION OF t FOR VALUES FROM ({HALF}) TO (10000)"
    )
    load(connection, "t", vectors(0, ROWS))
    connection.execute("ANALYZE t")
    return connection


def node_types(connection, searchable: Searchable) -> list[str]:
    sql = searchable.sql(10).replace("%(q)s", f"'{vector(0)}'")
    return [node["Node Type"] for node in plan_nodes(plan(connection, sql))]


@pytest.mark.smoke
def test_partitions_are_merged_in_order(table):
    table.execute(INDEX)
    assert node_types(table, BOTH)[:2] == ["Limit", "Merge Append"]
    assert_right(table, BOTH)
    churn(table)
    # Rows that move from one partition to the other.
    table.execute(f"UPDATE t SET id = id - 10000 WHERE id >= {HALF} AND id % 20 = 8")
    for statement in ("SELECT 1", "VACUUM t", "REINDEX TABLE t", "REINDEX TABLE CONCURRENTLY t"):
        table.execute(statement)
        assert_right(table, BOTH)
        assert_right(table, FIRST)
        churn(table)


def test_a_partition_that_the_filter_excludes_is_not_searched(table):
    table.execute(INDEX)
    assert "Merge Append" not in node_types(table, FIRST)
    assert_right(table, FIRST)


def test_partitions_come_and_go(table, database):
    table.execute(INDEX)
    with database.connect() as other:
        assert_right(other, BOTH)
        table.execute("ALTER TABLE t DETACH PARTITION t1")
        rest = Searchable(index="t2_embedding_idx")
        alone = Searchable("t1", "t1_embedding_idx")
        for session in (other, table):
            assert_right(session, rest)
            assert_right(session, alone)
        load(table, "t1", vectors(3000, 3300), -300)
        table.execute(f"ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (MINVALUE) TO ({HALF})")
        for session in (other, table):
            assert_right(session, BOTH)
        table.execute("ALTER TABLE t DETACH PARTITION t1 CONCURRENTLY")
        assert_right(other, rest)
        # A new one gets its index when it is attached, or has it already, or is created as a partition.
        table.execute(
            f"CREATE TABLE naked {COLUMNS}; CREATE TABLE indexed {COLUMNS};"
            f"INSERT INTO naked SELECT * FROM t1 WHERE id < {HALF // 2};"
            f"INSERT INTO indexed SELECT * FROM t1 WHERE id >= {HALF // 2};"
            "CREATE INDEX mine ON indexed USING polign_ivf (embedding vector_cosine_ops);"
            f"ALTER TABLE t ATTACH PARTITION naked FOR VALUES FROM (MINVALUE) TO ({HALF // 2});"
            f"ALTER TABLE t ATTACH PARTITION indexed FOR VALUES FROM ({HALF // 2}) TO ({HALF});"
            "CREATE TABLE rest PARTITION OF t DEFAULT"
        )
        table.execute("INSERT INTO t SELECT id + 10000, embedding FROM t WHERE id % 10 = 2")
        indexes = ("t2_embedding_idx", "naked_embedding_idx", "mine", "rest_embedding_idx")
        for session in (other, table):
            assert_right(session, Searchable(index=indexes))
        table.execute("DROP TABLE rest; TRUNCATE indexed")
        for session in (other, table):
            assert_right(session, Searchable(index=indexes[:2]))


def test_an_index_of_the_parent_is_completed_partition_by_partition(table):
    table.execute(INDEX.replace("ON t", "ON ONLY t"))
    for part in ("t1", "t2"):
        ((valid,),) = table.execute(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = 't_polign'::regclass"
        )
        assert not valid
        name = f"{part}_embedding_idx"
        table.execute(f"CREATE INDEX CONCURRENTLY {name} ON {part} USING polign_ivf "
                      "(embedding vector_cosine_ops)")
        table.execute(f"ALTER INDEX t_polign ATTACH PARTITION {name}")
    assert_right(table, BOTH)
    load(table, "t", vectors(9000, 9300), 9000)
    assert_right(table, BOTH)
    table.execute("DROP INDEX t_polign")
    assert table.execute("SELECT to_regclass('t1_embedding_idx')").fetchone() == (None,)


def test_a_partition_without_an_index_is_sorted_into_the_others(table):
    table.execute(INDEX.replace("t_polign ON t ", "t1_embedding_idx ON t1 "))
    assert_right(table, Searchable(index="t1_embedding_idx"))


def test_inheritance(connection):
    connection.execute(f"CREATE TABLE t {COLUMNS}; CREATE TABLE child (extra int) INHERITS (t)")
    load(connection, "t", vectors(0, HALF))
    load(connection, "child", vectors(HALF, ROWS), HALF)
    connection.execute("ANALYZE t; ANALYZE child")
    connection.execute(INDEX)
    connection.execute("CREATE INDEX child_polign ON child USING polign_ivf (embedding vector_cosine_ops)")
    family = Searchable(index=("t_polign", "child_polign"))
    cases = [(family, ROWS), (Searchable("ONLY t"), HALF), (Searchable("child", "child_polign"), ROWS - HALF)]
    for searchable, rows in cases:
        (found,) = searchable.by_index(connection, questions(1), 2 * ROWS, target_recall=1)
        assert len(found.ids) == rows
        assert_right(connection, searchable)
    churn(connection)
    connection.execute("ALTER TABLE child NO INHERIT t")
    assert_right(connection)
    connection.execute("ALTER TABLE child INHERIT t")
    for statement in ("VACUUM t, child", "TRUNCATE t"):
        connection.execute(statement)
        for searchable, _ in cases:
            assert_right(connection, searchable)
