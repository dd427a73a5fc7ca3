"""When the planner takes the index, and that planning never fails."""

import psycopg
import pytest

from tests.harness.cluster import indexes_used

ROWS = 5000


@pytest.fixture
def table(connection):
    """5,000 rows of 16 dimensions, ten categories of unequal size, indexed."""
    connection.execute(
        f"""
        CREATE TABLE items (id int PRIMARY KEY, category int, v vector(16));
        INSERT INTO items
        SELECT i, CASE WHEN i % 500 = 0 THEN 1 ELSE 0 END,
               (SELECT array_agg(sin(i * x))::vector FROM generate_series(1, 16) x)
        FROM generate_series(1, {ROWS}) i;
        CREATE INDEX items_v ON items USING polign_ivf (v);
        ANALYZE items;
        """
    )
    return connection


QUERY = "(SELECT v FROM items WHERE id = 7)"


@pytest.mark.smoke
@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT id FROM items ORDER BY v <-> {QUERY} LIMIT 10",
        f"SELECT id FROM items ORDER BY v <-> {QUERY} OFFSET 5 LIMIT 10",
        f"SELECT id, v <-> {QUERY} AS d FROM items ORDER BY d LIMIT 10",
        f"SELECT id FROM items WHERE category = 0 ORDER BY v <-> {QUERY} LIMIT 10",
    ],
)
def test_a_limit_takes_the_index(table, sql):
    assert "items_v" in indexes_used(table, sql)


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT id FROM items ORDER BY v <-> {QUERY}",
        f"SELECT * FROM items ORDER BY v <-> {QUERY}",
        # The index cannot serve another operator, the other direction, or no order.
        f"SELECT id FROM items ORDER BY v <=> {QUERY} LIMIT 10",
        f"SELECT id FROM items ORDER BY v <-> {QUERY} DESC LIMIT 10",
        "SELECT id FROM items LIMIT 10",
        f"SELECT id FROM items WHERE v <-> {QUERY} < 0.1",
        # One row in 5,000 is found faster by its key.
        f"SELECT id FROM items WHERE id = 77 ORDER BY v <-> {QUERY} LIMIT 10",
        # All of the 10 matching rows are wanted: nearly the whole index would be pulled.
        f"SELECT id FROM items WHERE category = 1 ORDER BY v <-> {QUERY} LIMIT 10",
    ],
)
def test_other_queries_go_another_way(table, sql):
    assert "items_v" not in indexes_used(table, sql)


def test_without_an_order_the_index_is_never_used(table):
    for setting in ("enable_seqscan", "enable_bitmapscan"):
        table.execute(f"SET {setting} = off")
    table.execute("CREATE INDEX items_partial ON items USING polign_ivf (v) WHERE category = 1")
    sql = "SELECT count(*) FROM items WHERE category = 1"
    assert not {"items_v", "items_partial"} & set(indexes_used(table, sql))
    assert table.execute(sql).fetchone() == (ROWS // 500,)


def test_forced_through_the_index_all_rows_come(table):
    table.execute("SET enable_seqscan = off; SET enable_sort = off")
    sql = f"SELECT id FROM items ORDER BY v <-> {QUERY}"
    assert "items_v" in indexes_used(table, sql)
    ids = [row[0] for row in table.execute(sql)]
    assert sorted(ids) == list(range(1, ROWS + 1))


def test_an_empty_index_can_be_planned_and_scanned(connection):
    connection.execute("CREATE TABLE empty (v vector(3)); CREATE INDEX empty_v ON empty USING polign_ivf (v)")
    connection.execute("SET enable_seqscan = off")
    assert connection.execute("SELECT * FROM empty ORDER BY v <-> '[1,2,3]' LIMIT 3").fetchall() == []


def test_explain_works_and_the_scan_fails_on_a_damaged_index(own_cluster):
    cluster = own_cluster(polign__store="file:store")
    cluster.execute(
        """
        CREATE EXTENSION polign CASCADE;
        CREATE TABLE items (id int, v vector(3));
        INSERT INTO items SELECT i, array[i, i % 7, i % 11]::vector FROM generate_series(1, 3000) i;
        CREATE INDEX items_v ON items USING polign_ivf (v);
        ANALYZE items;
        """
    )
    path = cluster.execute("SELECT pg_relation_filepath('items_v')")[0][0]
    cluster.stop()
    with open(cluster.postgres.data / path, "r+b") as file:
        file.seek(64)
        file.write(b"\xff" * 4096)
    cluster.start()
    sql = "SELECT id FROM items ORDER BY v <-> '[1,2,3]' LIMIT 3"
    with cluster.connect() as connection:
        assert "items_v" in indexes_used(connection, sql)
        with pytest.raises(psycopg.Error, match="items_v|invalid page") as raised:
            connection.execute(sql)
        assert raised.value.sqlstate in ("XX001", "XX002")  # data or index corrupted
        connection.execute("REINDEX INDEX items_v")
        assert len(connection.execute(sql).fetchall()) == 3
