"""Rows that come and go after the build are found, or not found, at once."""

import numpy as np
import psycopg
import pytest

from dev.datasets import create_table, load, passages, vector_text
from tests.harness.search import assert_equals_exact, mean_recall, search

BUILT = 8000
INDEX = "CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)"


@pytest.fixture
def connection(database):
    """A table of 8,000 passages with an index; the other 2,000 are for inserting."""
    with database.connect() as connection:
        create_table(connection, "t", passages().base[:BUILT])
        connection.execute(INDEX)
        connection.execute("SET enable_seqscan = off")
        yield connection


def insert(connection, row):
    connection.execute(
        "INSERT INTO t VALUES (%s, %s::vector)", (row, vector_text(passages().base[row]))
    )


def found_first(connection, vector, k=1):
    return search(connection, "t", "cosine", vector, k).ids


def assert_exact_at_full_recall(connection, queries=None):
    with connection.transaction():
        connection.execute("SET LOCAL polign.target_recall = 1.0")
        queries = passages().queries[:15] if queries is None else queries
        assert_equals_exact(connection, "t", "t_polign", "cosine", queries, 20)


@pytest.mark.smoke
def test_an_insert_is_found_at_once(connection, database):
    row = BUILT + 5
    vector = passages().base[row]
    with database.connect() as other:
        other.execute("SET enable_seqscan = off")
        with connection.transaction():
            insert(connection, row)
            assert found_first(connection, vector) == [row]
            assert found_first(other, vector) != [row]
        assert found_first(other, vector) == [row]


def test_copy_into_a_built_index(connection):
    load(connection, "t", passages().base[BUILT:], first_id=BUILT)
    data = passages()
    assert mean_recall(connection, "t", "t_polign", "cosine", data.base, data.queries[:100]) >= 0.95
    assert_exact_at_full_recall(connection)


def test_update_moves_a_row(connection):
    new = passages().base[BUILT + 3]
    old = passages().base[17]
    connection.execute("UPDATE t SET embedding = %s::vector WHERE id = 17", (vector_text(new),))
    assert found_first(connection, new) == [17]
    assert found_first(connection, old) != [17]
    assert_exact_at_full_recall(connection, passages().base[[17, BUILT + 3]])


def test_updates_of_the_same_row_leave_one(connection):
    for i in range(20):
        vector = vector_text(passages().base[BUILT + i])
        connection.execute("UPDATE t SET embedding = %s::vector WHERE id = 17", (vector,))
    found = search(connection, "t", "cosine", passages().base[BUILT + 19], 50)
    assert found.ids[0] == 17
    assert found.ids.count(17) == 1


def test_null_to_vector_and_back(connection):
    vector = passages().base[3]
    connection.execute("UPDATE t SET embedding = NULL WHERE id = 3")
    assert found_first(connection, vector) != [3]
    connection.execute("UPDATE t SET embedding = %s::vector WHERE id = 3", (vector_text(vector),))
    assert found_first(connection, vector) == [3]


def test_wrong_dimension_is_refused_on_insert(connection):
    connection.execute("ALTER TABLE t ADD COLUMN note text")
    with pytest.raises(psycopg.errors.DataException, match="dimensions"):
        connection.execute("INSERT INTO t VALUES (99999, '[1,2,3]')")


@pytest.mark.parametrize("vacuum", ["", "VACUUM t", "VACUUM (PARALLEL 2) t"])
def test_deleted_rows_are_not_found(connection, vacuum):
    connection.execute("DELETE FROM t WHERE id % 2 = 0")
    if vacuum:
        connection.execute(vacuum)
    connection.execute("SET polign.target_recall = 1.0")
    found = search(connection, "t", "cosine", passages().queries[0], 4000)
    assert sorted(found.ids) == list(range(1, BUILT, 2))
    assert_exact_at_full_recall(connection)


@pytest.mark.smoke
def test_a_reused_tid_never_answers_for_the_old_row(connection):
    """Deleted rows' places in the heap are taken by other rows, far away from them."""
    before = dict(connection.execute("SELECT ctid::text, id FROM t WHERE id < 2000").fetchall())
    connection.execute("DELETE FROM t WHERE id < 2000")
    connection.execute("VACUUM t")
    load(connection, "t", passages().base[BUILT:], first_id=BUILT)
    after = dict(connection.execute("SELECT ctid::text, id FROM t").fetchall())
    reused = [before[ctid] for ctid in before if ctid in after]
    assert len(reused) > 1000, "the test needs reused places"
    for row in reused[:50]:
        found = search(connection, "t", "cosine", passages().base[row], 10)
        assert row not in found.ids
    assert_exact_at_full_recall(connection, passages().base[reused[:15]])
    connection.execute("VACUUM t")
    assert_exact_at_full_recall(connection)


def test_vacuum_frees_inserted_rows_that_died(connection):
    for _ in range(3):
        load(connection, "t", passages().base[BUILT:], first_id=BUILT)
        connection.execute(f"DELETE FROM t WHERE id >= {BUILT}")
        connection.execute("VACUUM t")
    assert connection.execute("SELECT delta_rows FROM polign.index_info('t_polign')").fetchone() == (0,)
    assert_exact_at_full_recall(connection)


@pytest.mark.smoke
def test_an_index_created_empty_is_filled(database):
    data = passages()
    with database.connect() as connection:
        create_table(connection, "t", data.base[:0])
        connection.execute(INDEX)
        load(connection, "t", data.base)
        connection.execute("ANALYZE t; SET enable_seqscan = off")
        assert mean_recall(connection, "t", "t_polign", "cosine", data.base, data.queries[:50]) >= 0.95
        assert_exact_at_full_recall(connection)


def test_concurrent_inserts_deletes_and_searches(connection, database):
    """Searches under writes: no error, no duplicate, distances in order, own rows found."""
    import threading

    errors: list[Exception] = []
    stop = threading.Event()

    def guard(work):
        def run():
            try:
                with database.connect() as own:
                    own.execute("SET enable_seqscan = off")
                    while not stop.is_set():
                        work(own)
            except Exception as error:  # reported by the test, whatever it is
                errors.append(error)
                stop.set()

        return threading.Thread(target=run)

    rows = iter(range(BUILT, 10_000))

    def write(own):
        row = next(rows, None)
        if row is None:
            stop.set()
            return
        insert(own, row)
        own.execute("SET polign.target_recall = 1.0")
        assert found_first(own, passages().base[row]) == [row]
        if row % 3 == 0:
            own.execute("DELETE FROM t WHERE id = %s", (row,))

    def read(own):
        query = passages().queries[np.random.default_rng().integers(200)]
        found = search(own, "t", "cosine", query, 20)
        assert len(set(found.ids)) == 20

    def vacuum(own):
        own.execute("VACUUM t")
        stop.wait(0.3)

    threads = [guard(work) for work in (write, read, read, vacuum)]
    for thread in threads:
        thread.start()
    stop.wait(8)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert_exact_at_full_recall(connection)
