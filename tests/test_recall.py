"""Recall estimated, measured and calibrated: `polign.recall_curve`, `polign.recall`, `polign.calibrate`."""

import time

import numpy as np
import psycopg
import pytest

from dev.datasets import load, vector_text
from tests.harness.cluster import assert_index_used
from tests.harness.search import Searchable
from tests.harness.tables import DIMS, INDEX, create_table, questions, vector
from tests.test_insert import random_vectors

QUERIES = "SELECT embedding FROM q ORDER BY id"


def rows(connection, sql: str, parameters=None) -> list[dict]:
    cursor = connection.execute(sql, parameters)
    return [dict(zip([c.name for c in cursor.description], row, strict=True)) for row in cursor.fetchall()]


def measure(connection, arguments: str = "", index: str = "t_polign", searchable: Searchable | None = None):
    """What polign.recall says, after a look at the plan of such a search."""
    searchable = searchable or Searchable(index=index)
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        if isinstance(searchable.index, str):
            assert_index_used(connection, searchable.index, searchable.sql(10), {"q": vector(0)})
    (measured,) = rows(connection, f"SELECT * FROM polign.recall('{index}'{arguments})")
    if measured["recall"] is not None:
        assert 0 <= measured["low"] <= measured["recall"] <= measured["high"] <= 1
    return measured


def add_table(connection, name: str, vectors: np.ndarray, type_name: str = "vector") -> None:
    dims = vectors.shape[1]
    connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, embedding vector({dims}))")
    load(connection, name, vectors)
    connection.execute(f"ALTER TABLE {name} ALTER embedding TYPE {type_name}({dims})")


def add_queries(connection, vectors: np.ndarray, type_name: str = "vector") -> None:
    add_table(connection, "q", vectors, type_name)


@pytest.fixture
def table(connection):
    create_table(connection)
    connection.execute(INDEX)
    return connection


# Measured.


def test_recall_of_queries_is_what_they_find(table):
    asked = questions(60)
    add_queries(table, asked)
    for nprobe in (0, 1, 3):
        table.execute(f"SET polign.nprobe = {nprobe}")
        measured = measure(table, f", '{QUERIES}'")
        assert (measured["queries"], measured["k"]) == (60, 10)
        assert measured["recall"] == pytest.approx(Searchable().mean_recall(table, asked))
        assert measured["target_recall"] == (None if nprobe else 0.95)
        if nprobe:
            assert measured["cells_probed"] == nprobe
        else:
            assert measured["recall"] > 0.9 and measured["low"] > 0.85
    measured = measure(table, f", query => '{QUERIES} LIMIT 7', k => 3")
    assert (measured["queries"], measured["k"]) == (7, 3)


def test_recall_of_rows_follows_the_settings_of_the_session(table):
    at_default = measure(table)
    assert at_default["queries"] == 200 and at_default["recall"] >= 0.93
    assert measure(table) == at_default, "the same rows each time"
    table.execute("SET polign.target_recall = 1")
    exact = measure(table, ", queries => 50, k => 20")
    assert (exact["queries"], exact["k"], exact["recall"], exact["target_recall"]) == (50, 20, 1, 1)
    assert exact["low"] < 1, "50 queries do not prove that all are perfect"
    table.execute("SET polign.nprobe = 1")
    poor = measure(table)
    assert poor["recall"] < at_default["recall"] - 0.1 and poor["high"] < 0.95
    assert poor["cells_probed"] == 1


def test_a_row_is_not_its_own_neighbour(table):
    """Each row's own cell has it; of its nearest neighbour that is not always true."""
    table.execute("SET polign.nprobe = 1")
    assert 0.3 < measure(table, ", k => 1")["recall"] < 0.95


@pytest.mark.parametrize("type_name", ["vector", "halfvec"])
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_every_metric_and_type(connection, metric, type_name):
    vectors = random_vectors(2000, DIMS)
    add_table(connection, "t", vectors, type_name)
    connection.execute(f"CREATE INDEX t_polign ON t USING polign_ivf (embedding {type_name}_{metric}_ops)")
    searchable = Searchable(metric=metric, type_name=type_name)
    asked = random_vectors(40, DIMS, 5)
    add_queries(connection, asked, type_name)
    connection.execute("SET polign.nprobe = 2")
    measured = measure(connection, f", '{QUERIES}'", searchable=searchable)
    assert measured["recall"] == pytest.approx(searchable.mean_recall(connection, asked))
    assert 0.05 < measured["recall"] < 1
    connection.execute("RESET polign.nprobe")
    assert measure(connection, ", 100", searchable=searchable)["recall"] >= 0.9


def test_rows_in_the_delta_and_dead_rows(table):
    load(table, "t", random_vectors(300, DIMS), 10_000)
    table.execute("DELETE FROM t WHERE id % 4 = 0")
    table.execute("SET polign.target_recall = 1")
    assert measure(table, ", 300")["recall"] == 1
    add_queries(table, random_vectors(20, DIMS, 7))
    assert measure(table, f", '{QUERIES}'")["recall"] == 1


def test_rows_that_tie_with_the_last_count(connection):
    add_table(connection, "t", np.repeat(random_vectors(20, DIMS), 100, axis=0))
    connection.execute(INDEX)
    measured = measure(connection, ", 100")
    assert (measured["queries"], measured["recall"]) == (100, 1)


def test_a_partial_index_is_compared_with_its_rows(connection):
    create_table(connection)
    connection.execute("UPDATE t SET note = 'it''s out' WHERE id % 3 = 0")
    connection.execute(INDEX + " WHERE note IS DISTINCT FROM 'it''s out' AND id < 2000")
    where = "note IS DISTINCT FROM 'it''s out' AND id < 2000"
    measured = measure(connection, ", 1000", searchable=Searchable(where=where))
    assert measured["queries"] == 1000 and measured["recall"] >= 0.9
    connection.execute("SET polign.target_recall = 1")
    assert measure(connection, ", 100", searchable=Searchable(where=where))["recall"] == 1


@pytest.mark.parametrize(("expression", "opclass", "type_name"), [
    ("(embedding::halfvec(64))", "halfvec_cosine_ops", "halfvec"),
    ("(CASE WHEN id % 4 = 0 THEN NULL ELSE embedding END::vector(64))", "vector_cosine_ops", "vector"),
], ids=["halfvec", "null"])
def test_an_expression_index(connection, expression, opclass, type_name):
    create_table(connection)
    connection.execute(f"CREATE INDEX t_polign ON t USING polign_ivf ({expression} {opclass})")
    searchable = Searchable(column=expression.replace("%", "%%"), type_name=type_name)
    assert measure(connection, ", 100", searchable=searchable)["recall"] >= 0.9
    add_queries(connection, questions(20), type_name)
    connection.execute("SET polign.nprobe = 2")
    measured = measure(connection, f", '{QUERIES}'", searchable=searchable)
    assert measured["recall"] == pytest.approx(searchable.mean_recall(connection, questions(20)))


def test_an_index_of_a_partition_is_compared_with_its_rows(connection):
    connection.execute(
        f"CREATE TABLE p (id int, embedding vector({DIMS})) PARTITION BY RANGE (id);"
        "CREATE TABLE t PARTITION OF p FOR VALUES FROM (0) TO (700);"
        "CREATE TABLE other PARTITION OF p FOR VALUES FROM (700) TO (2000);"
        "CREATE INDEX ON p USING polign_ivf (embedding vector_l2_ops)"
    )
    load(connection, "p", random_vectors(2000, DIMS))
    index = "t_embedding_idx"
    connection.execute("SET polign.target_recall = 1")
    measured = measure(connection, ", 1000", index, Searchable(index=index, metric="l2"))
    assert (measured["queries"], measured["recall"]) == (700, 1)


def test_odd_names_and_any_search_path(connection):
    connection.execute('CREATE SCHEMA "My ""own"""; SET search_path = "My ""own""", public')
    connection.execute(
        'CREATE TABLE "T.a" (id int PRIMARY KEY, "select" vector(8), "q$1" int DEFAULT 1);'
        """INSERT INTO "T.a" SELECT i, ARRAY[sin(i), cos(i), sin(2*i), cos(3*i), sin(i*i), 1, 2, 3]::vector
           FROM generate_series(1, 700) i;"""
        'CREATE INDEX "i i" ON "T.a" USING polign_ivf ("select" vector_l2_ops) WHERE "q$1" = 1'
    )
    connection.execute("SET search_path = pg_catalog")
    ((recall, cells),) = connection.execute(
        "SELECT recall, cells_probed FROM polign.recall(%s::regclass, 50)", ('"My ""own"""."i i"',)
    )
    assert recall >= 0.9 and cells >= 1


def test_it_is_the_named_index_that_is_searched(table):
    """Though others could serve the search as well, and one even better by the planner's estimate."""
    table.execute("CREATE INDEX t_hnsw ON t USING hnsw (embedding vector_cosine_ops)")
    table.execute(f"{INDEX.replace('t_polign', 't_second')} WITH (lists = 40)")
    table.execute("SET polign.nprobe = 1")
    any_index = Searchable(index=())
    first = measure(table, index="t_polign", searchable=any_index)
    second = measure(table, index="t_second", searchable=any_index)
    scans = "SELECT indexrelname, idx_scan FROM pg_stat_user_indexes WHERE indexrelname LIKE 't\\_%'"
    table.execute("SELECT pg_stat_force_next_flush()")
    scans = dict(table.execute(scans).fetchall())
    assert scans["t_polign"] >= 200 and scans["t_second"] >= 200 and scans["t_hnsw"] == 0
    assert first["recall"] > second["recall"], "a cell of the second has fewer rows"


def test_a_table_without_rows_has_no_recall(connection):
    create_table(connection, rows=0)
    connection.execute(INDEX)
    nothing = {"queries": 0, "recall": None, "low": None, "high": None, "cells_probed": None}
    assert measure(connection).items() >= nothing.items()
    add_queries(connection, questions(3))
    assert measure(connection, f", '{QUERIES}'").items() >= nothing.items()
    assert rows(connection, "SELECT * FROM polign.recall_curve('t_polign')") == []
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="no rows"):
        connection.execute("SELECT polign.calibrate('t_polign')")


def test_queries_that_nothing_is_near_to_are_left_out(table):
    zero = vector_text(np.zeros(DIMS))
    query = f"SELECT * FROM (VALUES ('{vector(1)}'::vector), (NULL), ('{zero}')) v"
    assert measure(table, f", $${query}$$")["queries"] == 1


def test_the_snapshot_is_that_of_the_statement(table, database):
    with table.transaction(), database.connect() as other:
        table.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        table.execute("SELECT 1 FROM t LIMIT 1")
        other.execute("DELETE FROM t WHERE id >= 100")
        assert measure(table, ", 1000")["queries"] == 1000
        table.execute("DELETE FROM t WHERE id < 50")
    assert measure(table, ", 1000")["queries"] == 50


def test_many_queries_are_sampled_and_said_to_be(table):
    notices = []
    table.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    measured = measure(table, ", 'SELECT embedding FROM t', 1")
    assert measured["queries"] == 1000
    # Of a row that lies between cells, another one may be opened.
    assert measured["recall"] >= 0.98, "a query that equals a row asks for it"
    assert "2500 vectors: an even sample of 1000" in notices[0]


# What it leaves behind, and who may do it.


def test_settings_are_as_before(table):
    settings = ("enable_seqscan", "enable_sort", "enable_bitmapscan", "enable_indexscan")
    table.execute("SET enable_indexscan = off")
    before = [table.execute(f"SHOW {setting}").fetchone() for setting in settings]
    assert measured_in_function(table) >= 0.9
    for wrong in (", 'SELECT 1/0'", ", 'SELECT embedding FROM t WHERE 1/(id-2400) > 5'", ", 0"):
        with pytest.raises(psycopg.Error), table.transaction():
            table.execute(f"SELECT polign.recall('t_polign'{wrong})")
    assert [table.execute(f"SHOW {setting}").fetchone() for setting in settings] == before


def measured_in_function(connection) -> float:
    connection.execute(
        "CREATE FUNCTION measured() RETURNS float8 LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN (SELECT recall FROM polign.recall('t_polign', 50)); END $$"
    )
    return connection.execute("SELECT measured()").fetchone()[0]


def test_it_reads_only(table):
    add_queries(table, questions(5))
    for wrong in ("INSERT INTO q VALUES (100, NULL) RETURNING embedding",
                  "WITH gone AS (DELETE FROM q RETURNING embedding) SELECT embedding FROM gone",
                  "CREATE TABLE other ()"):
        with pytest.raises((psycopg.errors.FeatureNotSupported, psycopg.errors.InvalidParameterValue)):
            table.execute("SELECT polign.recall('t_polign', %s::text)", (wrong,))
    assert table.execute("SELECT count(*) FROM q").fetchone() == (5,)
    with table.transaction():
        table.execute("SET TRANSACTION READ ONLY")
        assert measure(table, ", 20")["queries"] == 20


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ("'t_polign', 0", "InvalidParameterValue", '"queries" must be from 1 to 1000, not 0'),
    ("'t_polign', 1001", "InvalidParameterValue", "from 1 to 1000"),
    ("'t_polign', k => 0", "InvalidParameterValue", '"k" must be from 1 to 1000'),
    ("'t_polign', 'SELECT embedding FROM t', 2000", "InvalidParameterValue", '"k" must be'),
    ("'t_pkey'", "WrongObjectType", "not a polign_ivf index"),
    ("'t'", "WrongObjectType", "not a polign_ivf index"),
    ("'t_polign', 'SELECT id FROM t'", "DatatypeMismatch", "one column of type vector"),
    ("'t_polign', 'SELECT embedding, embedding FROM t'", "DatatypeMismatch", "one column of type vector"),
    ("'t_polign', 'SELECT embedding::halfvec FROM t'", "DatatypeMismatch", "one column of type vector"),
    ("'t_polign', $$SELECT '[1,2]'::vector$$", "DataException", "different vector dimensions 64 and 2"),
    ("'t_polign', 'SELECT 1; SELECT 2'", "InvalidParameterValue", "not one statement that returns rows"),
    ("'t_polign', ''", "InvalidParameterValue", "not one statement that returns rows"),
    ("'t_polign', 'SELEKT'", "SyntaxError", "SELEKT"),
    ("'t_polign', 'SELECT embedding FROM nowhere'", "UndefinedTable", "nowhere"),
])
def test_wrong_arguments_are_told(table, arguments, error, words):
    functions = ["recall"] if "k =>" in arguments or arguments[-1].isdigit() else ["recall", "calibrate"]
    for function in functions:
        with pytest.raises(getattr(psycopg.errors, error), match=words):
            table.execute(f"SELECT polign.{function}({arguments})")


def test_an_index_that_is_not_valid_is_told(table):
    table.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 't_polign'::regclass")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is not valid"):
        table.execute("SELECT polign.recall('t_polign')")


def test_it_can_be_cancelled(table):
    add_queries(table, questions(5))
    endless = "SELECT embedding FROM q, generate_series(1, 1000000000)"
    for call in (f"recall('t_polign', '{endless}')", f"calibrate('t_polign', '{endless}')",
                 f"recall('t_polign', '{endless}, pg_sleep(100)')"):
        table.execute("SET statement_timeout = '300ms'")
        started = time.monotonic()
        with pytest.raises(psycopg.errors.QueryCanceled):
            table.execute(f"SELECT polign.{call}")
        assert time.monotonic() - started < 3
        table.execute("RESET statement_timeout")
    assert measure(table, ", 20")["queries"] == 20


def test_reading_takes_the_right_to_read_the_table(table, user):
    add_queries(table, questions(120))
    calls = ["recall_curve('t_polign')", "recall('t_polign')", f"recall('t_polign', '{QUERIES}')"]
    for call in calls:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table t"):
            user.execute(f"SELECT polign.{call}")
    table.execute(f"GRANT SELECT ON t TO {user.info.user}")
    assert measure(user)["recall"] >= 0.9
    assert user.execute("SELECT count(*) > 10 FROM polign.recall_curve('t_polign')").fetchone()[0]
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table q"):
        user.execute(f"SELECT polign.recall('t_polign', '{QUERIES}')")
    for call in ("calibrate('t_polign')", f"calibrate('t_polign', '{QUERIES}')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="must be owner of index t_polign"):
            user.execute(f"SELECT polign.{call}")


def test_row_level_security_holds(table, user):
    name = user.info.user
    table.execute(f"GRANT SELECT ON t TO {name}; ALTER TABLE t ENABLE ROW LEVEL SECURITY;"
                  f"CREATE POLICY few ON t FOR SELECT TO {name} USING (id % 100 = 7)")
    user.execute("SET polign.target_recall = 1")
    measured = measure(user, ", 1000")
    assert (measured["queries"], measured["recall"]) == (25, 1), "only rows that the user sees"
    query = f"$$SELECT '{vector(1)}'::vector$$"
    assert measure(user, f", {query}, 30")["recall"] == 1
    user.execute("SET row_security = off")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        user.execute("SELECT polign.recall('t_polign')")
    assert measure(table, ", 1000")["queries"] == 1000


# Estimated.


def test_the_curve_says_what_a_target_opens(table):
    curve = rows(table, "SELECT * FROM polign.recall_curve('t_polign')")
    lists = table.execute("SELECT lists FROM polign.index_info('t_polign')").fetchone()[0]
    assert {row["k"] for row in curve} == {10, 100, 1000}
    assert {row["cells"] for row in curve} == {lists}
    assert {row["fitted_to"] for row in curve} == {"rows"}
    for k in (10, 100, 1000):
        of_k = [row for row in curve if row["k"] == k]
        for column in ("nprobe", "recall"):
            values = [row[column] for row in of_k]
            assert values == sorted(values)
        assert of_k[-1]["recall"] == of_k[-1]["target_recall"] == 1
        assert all(100 < row["samples"] <= 1024 for row in of_k)
        assert all(row["target_recall"] is None or row["target_recall"] <= row["recall"] for row in of_k)
    for target in (0.9, 0.95, 0.99):
        table.execute(f"SET polign.target_recall = {target}")
        ((nprobe,),) = table.execute(
            "SELECT min(nprobe) FROM polign.recall_curve('t_polign') WHERE k = 10 AND target_recall >= %s",
            (target,),
        )
        assert measure(table, ", 20")["cells_probed"] == nprobe


# Calibrated to queries.


CENTRES = random_vectors(30, DIMS, 11)


def clustered(count: int, seed: int) -> np.ndarray:
    """Rows near their centres."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.6, (count, DIMS))
    return (CENTRES[rng.integers(0, len(CENTRES), count)] + noise).astype(np.float32)


def between(count: int, seed: int) -> np.ndarray:
    """Queries in the middle of three rows, where no row lies: harder than rows are."""
    return sum(clustered(count, seed + place) for place in (0, 1000, 2000)) / 3


@pytest.fixture
def calibrated(connection, by_hand):
    """A table of 3,000 rows whose index was calibrated to queries."""
    add_table(connection, "t", clustered(3000, 1))
    connection.execute(f"ANALYZE t; {INDEX} WITH (lists = 100)")
    add_queries(connection, between(400, 2))
    before = measure(connection, f", '{QUERIES}'")
    assert before["high"] < 0.95, before  # four builds: .877 to .886
    assert connection.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')").fetchone() == (400,)
    after = measure(connection, f", '{QUERIES}'")
    assert after["recall"] >= 0.95 and after["cells_probed"] > before["cells_probed"]
    return connection


def fitted_to(connection) -> tuple[str, int]:
    ((fitted, samples),) = connection.execute(
        "SELECT DISTINCT fitted_to, samples FROM polign.recall_curve('t_polign')"
    )
    return fitted, samples


def recommendation(connection) -> str | None:
    return connection.execute("SELECT recommendation FROM polign.index_info('t_polign')").fetchone()[0]


def test_calibration_to_queries_gives_them_the_recall_that_is_asked_for(calibrated):
    assert fitted_to(calibrated) == ("queries", 400)
    calibrated.execute("TRUNCATE q")
    load(calibrated, "q", between(300, 3))
    for target in (0.9, 0.95, 0.99):
        calibrated.execute(f"SET polign.target_recall = {target}")
        measured = measure(calibrated, f", '{QUERIES}'")
        assert measured["recall"] >= target - 0.005, measured


def test_a_calibration_to_queries_lasts(calibrated, cluster):
    before = fitted_to(calibrated)
    ((opened,),) = calibrated.execute(
        "SELECT min(nprobe) FROM polign.recall_curve('t_polign') WHERE k = 10 AND target_recall >= 0.95"
    )
    load(calibrated, "t", clustered(200, 8), 10_000)
    calibrated.execute("SELECT polign.flush('t_polign')")
    calibrated.execute("SELECT polign.compact('t_polign')")
    calibrated.execute("VACUUM t")
    assert fitted_to(calibrated) == before
    assert recommendation(calibrated) is None
    # Grown threefold: it is due, and not done by itself; meanwhile the numbers grow with the index.
    load(calibrated, "t", clustered(6000, 9), 20_000)
    calibrated.execute("SELECT polign.compact('t_polign')")
    assert fitted_to(calibrated) == before
    advice = recommendation(calibrated)
    assert "calibrated to queries with 3000 rows, and there are 9200 now: call polign.calibrate()" in advice
    ((grown,),) = calibrated.execute(
        "SELECT min(nprobe) FROM polign.recall_curve('t_polign') WHERE k = 10 AND target_recall >= 0.95"
    )
    assert grown > opened
    calibrated.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')")
    assert recommendation(calibrated) is None
    assert measure(calibrated, f", '{QUERIES}'")["recall"] >= 0.945
    # The ways back.
    assert calibrated.execute("SELECT polign.calibrate('t_polign')").fetchone()[0] > 500
    assert fitted_to(calibrated)[0] == "rows"
    calibrated.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')")
    calibrated.execute("REINDEX INDEX t_polign")
    assert fitted_to(calibrated)[0] == "rows"


def test_a_few_queries_are_refused(table):
    add_queries(table, questions(99))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="returns 99 vectors.* needs 100"):
        table.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')")
    assert fitted_to(table)[0] == "rows"


def test_rows_of_the_delta_are_flushed_first(connection, by_hand):
    create_table(connection, rows=0)
    connection.execute(INDEX)
    load(connection, "t", random_vectors(1500, DIMS))
    add_queries(connection, random_vectors(150, DIMS, 3))
    assert measure(connection, f", '{QUERIES}'")["recall"] > 0.99, "each search reads all of the delta"
    assert connection.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')").fetchone() == (150,)
    assert fitted_to(connection) == ("queries", 150)
    assert measure(connection, f", '{QUERIES}'")["recall"] >= 0.94


def test_a_temporary_index_is_calibrated_by_its_own_session(database):
    with database.connect() as connection:
        create_table(connection, prefix="CREATE TEMP TABLE t")
        connection.execute(INDEX)
        add_queries(connection, questions(120))
        assert connection.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')").fetchone() == (120,)
        assert fitted_to(connection) == ("queries", 120)
        assert measure(connection, f", '{QUERIES}'")["recall"] >= 0.94


def test_the_owner_calibrates_with_his_own_rights(table, user):
    """The statement is run as the caller, not as the worker that calibrates."""
    name = user.info.user
    table.execute(f"ALTER TABLE t OWNER TO {name}")
    add_queries(table, questions(120))
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table q"):
        user.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')")
    table.execute(f"GRANT SELECT ON q TO {name}")
    assert user.execute(f"SELECT polign.calibrate('t_polign', '{QUERIES}')").fetchone() == (120,)
    assert fitted_to(user) == ("queries", 120)
