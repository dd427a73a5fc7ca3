"""What goes over the wire, counted at the S3 side: cold, warm, thrashing, restarted."""

import time

import psycopg
import pytest

from dev.datasets import create_table, passages, vector_text
from tests.harness.search import search

INDEX = "CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)"
COUNTERS = "SELECT gets, get_bytes, hits, misses, evictions FROM polign.stat_cache"


@pytest.fixture
def built(database, store_prefix):
    with database.connect() as connection:
        create_table(connection, "t", passages().base)
        connection.execute(INDEX)
    return database


def cold(cluster):
    cluster.stop()
    cluster.wipe_cache()
    cluster.start()


@pytest.mark.smoke
def test_cold_query_is_two_waves_and_warm_is_none(cluster, built, proxy, store_prefix):
    cold(cluster)
    query = passages().queries[0]
    with built.connect() as connection:
        before = connection.execute(COUNTERS).fetchone()
        # A delay makes the waves visible: what is asked for together starts within it.
        with proxy.fault("delay", seconds=0.5), proxy.record() as requests:
            first = search(connection, "t", "cosine", query)
            scan = connection.execute("SELECT gets, get_bytes FROM polign.last_scan()").fetchone()
        assert set(requests.kinds) == {"get"}, "a query makes no LIST, HEAD or metadata request"
        assert all(r.range and r.key.endswith(".seg") for r in requests)
        assert len(requests) <= 24
        assert requests.waves <= 2
        assert requests.bytes_out <= 2_200_000
        # Our own counters say the same.
        assert scan == (len(requests), requests.bytes_out)
        after = connection.execute(COUNTERS).fetchone()
        assert (after[0] - before[0], after[1] - before[1]) == (len(requests), requests.bytes_out)

        with proxy.record() as requests:
            again = search(connection, "t", "cosine", query)
        assert len(requests) == 0
        assert again == first


def test_a_build_leaves_its_parts_warm(built, proxy):
    with built.connect() as connection, proxy.record() as requests:
        for query in passages().queries[:20]:
            search(connection, "t", "cosine", query)
    assert requests.kinds == {}


def test_an_idle_node_makes_no_request(cluster, built, proxy):
    cold(cluster)
    with built.connect() as connection, proxy.record() as requests:
        connection.execute("SELECT polign.version()")
        time.sleep(2)
    assert requests.kinds == {}


def test_planning_makes_no_request(cluster, built, proxy):
    cold(cluster)
    query = str(list(map(float, passages().queries[0])))
    with built.connect() as connection, proxy.record() as requests:
        connection.execute(f"EXPLAIN SELECT id FROM t ORDER BY embedding <=> '{query}' LIMIT 10")
        connection.execute("SELECT * FROM polign.index_info('t_polign')")
    assert requests.kinds == {}


def test_prewarm_and_cache_clear(cluster, built, proxy):
    cold(cluster)
    query = passages().queries[0]
    with built.connect() as connection:
        with proxy.record() as requests:
            connection.execute("SELECT polign.prewarm('t_polign')")
        assert set(requests.kinds) == {"get"}
        with proxy.record() as requests:
            search(connection, "t", "cosine", query)
        assert requests.kinds == {}
        connection.execute("SELECT polign.cache_clear()")
        with proxy.record() as requests:
            search(connection, "t", "cosine", query)
        assert set(requests.kinds) == {"get"}


def test_concurrent_cold_queries_share_their_fetches(cluster, built, proxy):
    """Single flight: eight sessions asking the same thing cost what one costs."""
    import threading

    query = passages().queries[0]
    cold(cluster)
    with built.connect() as connection, proxy.record() as alone:
        search(connection, "t", "cosine", query)
    cold(cluster)
    connections = [built.connect() for _ in range(8)]
    with proxy.fault("delay", seconds=0.3), proxy.record() as together:
        threads = [threading.Thread(target=search, args=(c, "t", "cosine", query)) for c in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for connection in connections:
        connection.close()
    assert together.bytes_out <= 1.2 * alone.bytes_out
    assert len(together) <= len(alone) + 4


def test_same_ids_cold_warm_thrashing_and_restarted(cluster, built):
    queries = passages().queries

    def answers():
        with built.connect() as connection:
            return [search(connection, "t", "cosine", query) for query in queries]

    warm = answers()
    cold(cluster)
    assert answers() == warm
    cluster.configure(polign__cache_size="4MB")
    with built.connect() as connection:
        connection.execute("SELECT polign.cache_clear()")
    assert answers() == warm
    with built.connect() as connection:
        evictions = connection.execute(COUNTERS).fetchone()[4]
    assert evictions > 0, "the cache was to thrash"
    cluster.configure(polign__cache_size=None)
    cluster.restart()
    assert answers() == warm


def test_a_restart_keeps_the_cache(cluster, built, proxy):
    with built.connect() as connection:
        first = [search(connection, "t", "cosine", q) for q in passages().queries[:20]]
    cluster.restart()
    with built.connect() as connection, proxy.record() as requests:
        assert [search(connection, "t", "cosine", q) for q in passages().queries[:20]] == first
    assert requests.kinds == {}


def test_bytes_in_the_store(built, s3_server, bucket, store_prefix):
    """Small beside the vectors: D/8 + 12 and D + 16 bytes a row, and 8 for the id."""
    objects = s3_server.client().list(bucket, store_prefix)
    total = sum(size for key, size in objects.items() if key.endswith(".seg"))
    rows, dims = passages().base.shape
    assert total <= 1.15 * rows * (dims / 8 + 12 + dims + 16 + 8)
    (relation,) = built.execute("SELECT pg_relation_size('t_polign')")[0]
    assert relation <= 0.06 * rows * dims * 4


def test_rows_at_hand_come_before_the_error_of_a_later_one(cluster, built, proxy):
    """Rows are taken from a search ahead of the executor: that must not cost the ones before."""
    query = {"q": vector_text(passages().queries[0])}
    sql = "SELECT id FROM t ORDER BY embedding <=> %(q)s::vector"
    cluster.configure(polign__fetch_timeout="1s")
    with built.connect() as connection:
        connection.execute("SET enable_seqscan = off; SET enable_sort = off; SET polign.nprobe = 1")
        connection.execute("SELECT polign.cache_clear(); SET polign.iterative_scan = off")
        at_hand = [row[0] for row in connection.execute(sql, query)]
        assert 20 < len(at_hand) < 2_000
        # In strict order rows that come late would wait for the end of the index.
        connection.execute("SET polign.iterative_scan = relaxed_order")
        found = []
        refused = pytest.raises(psycopg.errors.IoError)
        with proxy.refusing(), refused, connection.transaction(), connection.cursor("c") as cursor:
            cursor.execute(sql, query)
            while row := cursor.fetchone():
                found.append(row[0])
        (given,) = connection.execute("SELECT heap_rows FROM polign.last_scan()").fetchone()
    # The scan keeps the last few, whose place depends on rows to come, and what it took last is not told.
    assert len(found) <= given <= len(at_hand)
    assert set(found) <= set(at_hand) and len(found) > len(at_hand) / 2
