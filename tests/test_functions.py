"""The functions and views of schema polign, and who may call them."""

import psycopg
import pytest

ROWS = 4000
QUERY = "SELECT id FROM items ORDER BY v <-> (SELECT v FROM items WHERE id = 7) LIMIT 10"


@pytest.fixture
def table(connection, store_prefix):
    connection.execute(
        f"""
        CREATE TABLE items (id int PRIMARY KEY, v vector(32));
        INSERT INTO items
        SELECT i, (SELECT array_agg(sin(i * x))::vector FROM generate_series(1, 32) x)
        FROM generate_series(1, {ROWS}) i;
        CREATE INDEX items_v ON items USING polign_ivf (v) WITH (target_recall = 0.9);
        ANALYZE items;
        """
    )
    return connection


def one(connection, sql):
    """The only row, by column."""
    cursor = connection.execute(sql)
    (row,) = cursor.fetchall()
    return dict(zip([column.name for column in cursor.description], row, strict=True))


@pytest.mark.smoke
def test_version(connection):
    ((version, extension),) = connection.execute(
        "SELECT polign.version(), extversion FROM pg_extension WHERE extname = 'polign'"
    )
    assert version == extension


@pytest.mark.smoke
def test_index_info_counts(table, store_prefix, bucket):
    info = one(table, "SELECT * FROM polign.index_info('items_v')")
    assert (info["rows"], info["delta_rows"], info["tombstones"]) == (ROWS, 0, 0)
    assert 8 <= info["lists"] <= 20  # 400 rows a cell; large ones are split
    assert info["cell_rows_min"] <= info["cell_rows_avg"] <= info["cell_rows_max"]
    assert info["cell_rows_avg"] == pytest.approx(ROWS / info["lists"])
    assert (info["dimensions"], info["metric"], info["target_recall"]) == (32, "l2", 0.9)
    assert info["store"] == f"s3://{bucket}/{store_prefix}"
    assert info["objects"] == 1
    assert 32 * ROWS < info["store_bytes"] < 100 * ROWS

    table.execute(
        "INSERT INTO items SELECT i, array_fill(0.5, ARRAY[32])::vector FROM generate_series(4001, 4005) i"
    )
    table.execute("DELETE FROM items WHERE id <= 100")
    table.execute("VACUUM items")
    info = one(table, "SELECT * FROM polign.index_info('items_v')")
    assert (info["rows"], info["delta_rows"], info["tombstones"]) == (ROWS - 95, 5, 100)


def test_index_info_of_an_empty_index(connection):
    connection.execute("CREATE TABLE empty (v halfvec(3))")
    connection.execute("CREATE INDEX empty_v ON empty USING polign_ivf (v halfvec_cosine_ops)")
    info = one(connection, "SELECT * FROM polign.index_info('empty_v')")
    assert (info["rows"], info["lists"], info["objects"], info["store_bytes"]) == (0, 0, 0, 0)
    assert (info["metric"], info["store"]) == ("cosine", None)


@pytest.mark.parametrize("function", ["index_info", "prewarm"])
def test_other_relations_are_refused(table, function):
    for relation in ("items", "items_pkey", "pg_class"):
        with pytest.raises(psycopg.errors.WrongObjectType, match="not a polign_ivf index"):
            table.execute(f"SELECT polign.{function}('{relation}')")


def test_a_partitioned_index_is_refused_with_a_hint(connection):
    connection.execute("CREATE TABLE parted (k int, v vector(3)) PARTITION BY LIST (k)")
    connection.execute("CREATE INDEX parted_v ON parted USING polign_ivf (v)")
    with pytest.raises(psycopg.errors.WrongObjectType, match="partitioned index"):
        connection.execute("SELECT polign.index_info('parted_v')")


def test_last_scan_tells_of_a_cold_and_a_warm_scan(table, proxy):
    table.execute("SELECT polign.cache_clear()")
    with proxy.fault("delay", method="GET", seconds=0.05):  # or all may be there when it is looked for
        table.execute(QUERY)
    cold = one(table, "SELECT * FROM polign.last_scan()")
    assert cold["cells"] == one(table, "SELECT * FROM polign.index_info('items_v')")["lists"]
    assert 1 <= cold["cells_probed"] <= cold["cells"]
    assert cold["heap_rows"] >= 10
    assert cold["rows_reranked"] >= 10
    assert cold["codes_scanned"] > 100
    assert cold["parts_missing"] > 0 and cold["gets"] > 0 and cold["get_bytes"] > 1000
    assert cold["waves"] <= 2
    assert 0 < cold["wait_ms"] < cold["scan_ms"] + cold["rerank_ms"]
    assert cold["plan_ms"] + cold["scan_ms"] + cold["rerank_ms"] <= cold["total_ms"]
    table.execute(QUERY)
    warm = one(table, "SELECT * FROM polign.last_scan()")
    assert (warm["gets"], warm["get_bytes"], warm["parts_missing"], warm["waves"]) == (0, 0, 0, 0)
    assert warm["codes_scanned"] == cold["codes_scanned"]


def test_last_scan_is_empty_before_the_first_scan(connection):
    assert connection.execute("SELECT * FROM polign.last_scan()").fetchall() == []


@pytest.mark.smoke
def test_prewarm_and_cache_clear(table, proxy):
    table.execute("SELECT polign.cache_clear()")
    ((asked,),) = table.execute("SELECT polign.prewarm('items_v')")
    assert asked > 32 * ROWS
    with proxy.record() as requests:
        table.execute(QUERY)
        proxy.settle()
    assert len(requests) == 0
    table.execute("SELECT polign.cache_clear()")
    with proxy.record() as requests:
        table.execute(QUERY)
        proxy.settle()
    assert len(requests) > 0


def test_stat_cache_counts(table):
    table.execute("SELECT polign.cache_clear()")
    before = one(table, "SELECT * FROM polign.stat_cache")
    table.execute(QUERY)
    cold = one(table, "SELECT * FROM polign.stat_cache")
    scan = one(table, "SELECT * FROM polign.last_scan()")
    assert cold["gets"] - before["gets"] == scan["gets"] > 0
    assert cold["get_bytes"] - before["get_bytes"] == scan["get_bytes"]
    assert cold["misses"] > before["misses"]
    assert cold["bytes"] <= cold["max_bytes"]
    table.execute(QUERY)
    warm = one(table, "SELECT * FROM polign.stat_cache")
    assert warm["gets"] == cold["gets"]
    assert warm["hits"] > cold["hits"]


# Privileges.


def test_reading_about_an_index_takes_the_right_to_read_its_table(table, user):
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table items"):
        user.execute("SELECT polign.index_info('items_v')")
    table.execute(f"GRANT SELECT ON items TO {user.info.user}")
    assert one(user, "SELECT * FROM polign.index_info('items_v')")["rows"] == ROWS


@pytest.mark.parametrize(
    "call",
    [
        "SELECT polign.cache_clear()",
        "SELECT polign.prewarm('pg_class_oid_index')",
        "SELECT * FROM polign.stat_cache",
        "SELECT * FROM polign.stat_cache()",
    ],
)
def test_what_concerns_everybody_is_not_everybodys(user, call):
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        user.execute(call)


def test_prewarm_checks_the_table_even_when_granted(table, user):
    table.execute(f"GRANT EXECUTE ON FUNCTION polign.prewarm(regclass) TO {user.info.user}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table items"):
        user.execute("SELECT polign.prewarm('items_v')")


def test_monitors_may_read_the_counters(connection, user):
    connection.execute(f"GRANT pg_monitor TO {user.info.user}")
    user.execute("SELECT * FROM polign.stat_cache")


def test_anybody_may_ask_for_version_and_last_scan(user):
    user.execute("SELECT polign.version()")
    user.execute("SELECT * FROM polign.last_scan()")
