"""Every way SQL pulls rows from the index: filters, joins, cursors, rescans, limits, odd queries."""

import numpy as np
import psycopg
import pytest

from dev.datasets import PASSAGES, create_table, passages, read_jsonl, vector_text
from tests.harness import exact
from tests.harness.cluster import assert_index_used, indexes_used
from tests.harness.search import search

ORDER = "ORDER BY embedding <=> %(q)s::vector"


@pytest.fixture(scope="module")
def passages_database(_shared_cluster, _proxy):
    """The passages with their texts and a cosine index; tests only read it."""
    _shared_cluster.start()
    database = _shared_cluster.database()
    with database.connect() as connection:
        create_table(connection, "p", passages().base)
        connection.execute("CREATE TABLE texts (id int PRIMARY KEY, title text, source text, words int)")
        with connection.cursor().copy("COPY texts FROM STDIN") as copy:
            for row in read_jsonl(PASSAGES / "texts.jsonl.gz"):
                copy.write_row((row["id"], row["title"], row["source"], row["n_words"]))
        connection.execute("ANALYZE texts")
        connection.execute("CREATE INDEX p_polign ON p USING polign_ivf (embedding vector_cosine_ops)")
    yield database
    database.drop()


@pytest.fixture
def connection(cluster, passages_database):
    with passages_database.connect() as connection:
        yield connection


@pytest.fixture
def query():
    return {"q": vector_text(passages().queries[3])}


def ids(connection, sql, parameters=None):
    return [row[0] for row in connection.execute(sql, parameters)]


@pytest.mark.smoke
def test_limit_at_default_settings_uses_the_index(connection, query):
    assert_index_used(connection, "p_polign", f"SELECT id FROM p {ORDER} LIMIT 10", query)


def test_no_order_by_does_not_use_the_index(connection):
    connection.execute("SET enable_seqscan = off")
    assert "p_polign" not in indexes_used(connection, "SELECT count(*) FROM p WHERE embedding IS NOT NULL")


@pytest.mark.parametrize("modulus", [2, 10, 100, 500])
def test_where_fills_the_limit(connection, modulus):
    data = passages()
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    matching = np.arange(1, len(data.base), modulus)
    shares = []
    for vector in data.queries[:100]:
        sql = f"SELECT id, embedding <=> %(q)s::vector FROM p WHERE id %% {modulus} = 1 {ORDER} LIMIT 10"
        parameters = {"q": vector_text(vector)}
        assert_index_used(connection, "p_polign", sql, parameters)
        rows = connection.execute(sql, parameters).fetchall()
        assert len(rows) == 10
        assert all(row[0] % modulus == 1 for row in rows)
        exact.assert_sorted([row[1] for row in rows])
        positions = [int(np.searchsorted(matching, row[0])) for row in rows]
        shares.append(exact.recall("cosine", data.base[matching], vector, positions, 10))
    assert np.mean(shares) >= 0.95


def test_where_that_fewer_rows_pass_than_the_limit(connection, query):
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    sql = f"SELECT id FROM p WHERE id %% 2000 = 7 {ORDER} LIMIT 10"
    assert_index_used(connection, "p_polign", sql, query)
    assert sorted(ids(connection, sql, query)) == [7, 2007, 4007, 6007, 8007]


@pytest.mark.smoke
def test_join(connection, query):
    sql = f"SELECT p.id, t.title FROM p JOIN texts t USING (id) {ORDER} LIMIT 10"
    assert_index_used(connection, "p_polign", sql, query)
    titles = dict(connection.execute("SELECT id, title FROM texts").fetchall())
    rows = connection.execute(sql, query).fetchall()
    assert [row[0] for row in rows] == ids(connection, f"SELECT id FROM p {ORDER} LIMIT 10", query)
    assert all(title == titles[row] for row, title in rows)


def test_join_that_filters(connection, query):
    sql = f"SELECT p.id FROM p JOIN texts t USING (id) WHERE t.source = 'squad' {ORDER} LIMIT 10"
    allowed = set(ids(connection, "SELECT id FROM texts WHERE source = 'squad'"))
    found = ids(connection, sql, query)
    assert len(found) == 10
    assert set(found) <= allowed


def test_cursor_gives_what_one_query_gives(connection, query):
    with connection.transaction():
        connection.execute(f"DECLARE c CURSOR FOR SELECT id FROM p {ORDER}", query)
        by_cursor = [row for _ in range(10) for row in ids(connection, "FETCH 7 FROM c")]
    assert by_cursor[:10] == ids(connection, f"SELECT id FROM p {ORDER} LIMIT 10", query)
    assert len(set(by_cursor)) == 70


def test_two_cursors_at_once(connection):
    first, second = (vector_text(v) for v in passages().queries[:2])
    expected = [ids(connection, f"SELECT id FROM p {ORDER} LIMIT 60", {"q": q}) for q in (first, second)]
    with connection.transaction():
        connection.execute(f"DECLARE a CURSOR FOR SELECT id FROM p {ORDER} LIMIT 60", {"q": first})
        connection.execute(f"DECLARE b CURSOR FOR SELECT id FROM p {ORDER} LIMIT 60", {"q": second})
        found = [[], []]
        for _ in range(12):
            found[0] += ids(connection, "FETCH 5 FROM a")
            found[1] += ids(connection, "FETCH 5 FROM b")
    assert found == expected


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
def test_prepared_statement(connection, mode):
    connection.execute(f"SET plan_cache_mode = {mode}")
    connection.execute("PREPARE s (vector, int) AS SELECT id FROM p ORDER BY embedding <=> $1 LIMIT $2")
    for vector in passages().queries[:8]:
        text = vector_text(vector)
        for k in (1, 10, 40):
            assert ids(connection, f"EXECUTE s ('{text}', {k})") == ids(
                connection, f"SELECT id FROM p ORDER BY embedding <=> '{text}' LIMIT {k}"
            )


def test_lateral_rescans(connection):
    connection.execute("CREATE TEMP TABLE q (n int, embedding vector(384))")
    for n, vector in enumerate(passages().queries[:25]):
        connection.execute("INSERT INTO q VALUES (%s, %s::vector)", (n, vector_text(vector)))
    sql = (
        "SELECT q.n, r.id FROM q CROSS JOIN LATERAL "
        "(SELECT id FROM p ORDER BY p.embedding <=> q.embedding LIMIT 5) r"
    )
    assert_index_used(connection, "p_polign", sql)
    found = {}
    for n, row in connection.execute(sql):
        found.setdefault(n, []).append(row)
    expected = {
        n: search(connection, "p", "cosine", vector, 5).ids
        for n, vector in enumerate(passages().queries[:25])
    }
    assert found == expected


def test_query_vector_from_the_table(connection):
    sql = "SELECT id FROM p ORDER BY embedding <=> (SELECT embedding FROM p WHERE id = 42) LIMIT 10"
    assert_index_used(connection, "p_polign", sql)
    assert ids(connection, sql)[0] == 42


def test_offset(connection, query):
    together = ids(connection, f"SELECT id FROM p {ORDER} LIMIT 30", query)
    assert ids(connection, f"SELECT id FROM p {ORDER} OFFSET 20 LIMIT 10", query) == together[20:]


@pytest.mark.parametrize("k, questions", [(1, 200), (10, 200), (100, 100), (1000, 30)])
def test_any_limit_is_filled_at_the_target(connection, k, questions):
    data = passages()
    shares = []
    for vector in data.queries[:questions]:
        found = search(connection, "p", "cosine", vector, k)
        assert len(set(found.ids)) == k
        shares.append(exact.recall("cosine", data.base, vector, found.ids, k))
    assert np.mean(shares) >= 0.94


def test_limit_beyond_the_table_and_no_limit(connection, query):
    everything = list(range(10_000))
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    for limit in ("LIMIT 20000", ""):
        sql = f"SELECT id FROM p {ORDER} {limit}"
        assert_index_used(connection, "p_polign", sql, query)
        assert sorted(ids(connection, sql, query)) == everything


def test_no_limit_prefers_a_sort(connection, query):
    assert indexes_used(connection, f"SELECT id FROM p {ORDER}", query) == []


def test_wrong_dimension_is_an_error(connection):
    with pytest.raises(psycopg.errors.DataException, match="dimensions"):
        connection.execute("SELECT id FROM p ORDER BY embedding <=> '[1,2,3]'::vector LIMIT 10")


@pytest.mark.smoke
def test_null_query_gives_rows_with_null_distance(connection):
    sql = (
        "SELECT id, embedding <=> (SELECT embedding FROM p WHERE id = -1) AS d FROM p "
        "ORDER BY embedding <=> (SELECT embedding FROM p WHERE id = -1) LIMIT 10"
    )
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    rows = connection.execute(sql).fetchall()
    assert len({row[0] for row in rows}) == 10
    assert {row[1] for row in rows} == {None}


def test_zero_query_gives_rows(connection):
    """The cosine distance to a zero vector is NaN; pgvector returns rows all the same."""
    sql = f"SELECT id FROM p {ORDER} LIMIT 10"
    assert len(set(ids(connection, sql, {"q": str([0] * 384)}))) == 10


def test_all_cells_probed_is_nearly_exact(connection):
    connection.execute("SET polign.nprobe = 1000000")
    data = passages()
    shares = [
        exact.recall("cosine", data.base, v, search(connection, "p", "cosine", v).ids, 10)
        for v in data.queries[:50]
    ]
    assert np.mean(shares) >= 0.99  # some rows are pruned by their codes


@pytest.mark.parametrize("mode", ["strict_order", "relaxed_order", "off"])
def test_iterative_scan_modes_give_no_duplicates(connection, mode, query):
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    connection.execute(f"SET polign.iterative_scan = {mode}")
    connection.execute("SET polign.nprobe = 1")
    sql = f"SELECT id FROM p WHERE id %% 100 = 1 {ORDER} LIMIT 10"
    found = ids(connection, sql, query)
    assert len(set(found)) == len(found)
    assert all(row % 100 == 1 for row in found)
    if mode == "off":
        # One cell holds some hundred rows, of which one in a hundred passes.
        assert len(found) < 10
    else:
        assert len(found) == 10


def test_late_rows_come_last_in_strict_order_and_at_once_in_relaxed_order(connection):
    """One cell at first, and all others as the scan goes on: many rows come after farther ones."""
    connection.execute("SET enable_seqscan = off; SET enable_sort = off; SET polign.nprobe = 1")
    sql = f"SELECT id, embedding <=> %(q)s::vector FROM p WHERE id %% 10 = 1 {ORDER}"

    def rows_and_descents(mode, parameters):
        connection.execute(f"SET polign.iterative_scan = {mode}")
        rows = connection.execute(sql, parameters).fetchall()
        assert sorted(row[0] for row in rows) == list(range(1, 10_000, 10)), "each once"
        distances = [row[1] for row in rows]
        return rows, sum(b < a for a, b in zip(distances, distances[1:], strict=False))

    for vector in passages().queries[:5]:
        parameters = {"q": vector_text(vector)}
        assert_index_used(connection, "p_polign", sql, parameters)
        strict, strict_descents = rows_and_descents("strict_order", parameters)
        relaxed, relaxed_descents = rows_and_descents("relaxed_order", parameters)
        assert strict_descents == 1, "sorted, and then the late rows, sorted"
        assert relaxed_descents > 1
        assert set(strict) == set(relaxed)


@pytest.mark.parametrize("limit", [1, 10, 30])
def test_rows_taken_ahead_are_few_and_not_counted_as_fetched(connection, limit, query):
    connection.execute("SET enable_seqscan = off")
    sql = f"SELECT id FROM p {ORDER} LIMIT {limit}"
    for _ in range(2):
        assert len(ids(connection, sql, query)) == limit
    scan = "SELECT heap_rows, waves FROM polign.last_scan()"
    heap_rows, waves = connection.execute(scan).fetchone()
    assert limit <= heap_rows <= limit + 20
    assert waves == 0
    with connection.transaction(), connection.cursor("c") as cursor:
        cursor.execute(f"SELECT id FROM p {ORDER}", query)
        assert len(cursor.fetchmany(3)) == 3
        assert connection.execute(scan).fetchone()[0] < 30


def test_max_scan_tuples_bounds_the_work(connection, query):
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    sql = f"SELECT id FROM p WHERE id + 0 = -1 {ORDER} LIMIT 10"

    def cells_and_rows() -> tuple[int, int]:
        assert ids(connection, sql, query) == []
        return connection.execute("SELECT cells_probed, heap_rows FROM polign.last_scan()").fetchone()

    connection.execute("SET polign.nprobe = 2")
    cells, rows = cells_and_rows()
    assert cells > 2 and rows == 10_000
    connection.execute("SET polign.max_scan_tuples = 10")
    cells, rows = cells_and_rows()
    assert cells == 2 and 10 < rows < 10_000  # the cells that were open are finished
