"""Hot standbys: the same answers as the primary's, from the same bucket, while all sorts of things happen
there. Each page that the standby replays is compared with the primary's (`wal_consistency_checking`)."""

import itertools

import psycopg
import pytest

from dev.datasets import create_table as create_passages
from dev.datasets import passages, vector_text
from tests.harness import soak
from tests.harness.cluster import Cluster
from tests.harness.load import Load
from tests.harness.tables import (
    INDEX,
    ROWS,
    TABLE,
    assert_right,
    churn,
    create_table,
    questions,
    vector,
    vectors,
)

SETTINGS = {
    "polign.store": "s3://polign-test/replicas",
    "wal_consistency_checking": "all",
    "wal_keep_size": "1GB",
    "max_standby_streaming_delay": "-1",  # replay waits for a query rather than cancel it
    "hot_standby_feedback": "on",
    "checkpoint_timeout": "30s",
}


@pytest.fixture(scope="module")
def servers(install, run_directory, s3_settings):
    directory = run_directory / "primary"
    with (
        Cluster.create(install, directory, {**s3_settings, **SETTINGS}) as primary,
        primary.standby() as standby,
    ):
        yield primary, standby


@pytest.fixture
def primary(servers, proxy):
    yield servers[0]
    servers[0].reset_settings()


@pytest.fixture
def standby(servers):
    return servers[1]


@pytest.fixture
def database(primary):
    """With table t and its index; a database of this name is on the standby too."""
    database = primary.database()
    with database.connect() as connection:
        create_table(connection)
        connection.execute(INDEX)
    yield database
    database.drop()


def assert_same_answers(primary, standby, name: str) -> None:
    standby.wait_for_replay(primary)
    with primary.connect(name) as one, standby.connect(name) as other:
        for target in (0, 1):
            found = [TABLE.by_index(session, questions(20), 20, target) for session in (one, other)]
            assert found[0] == found[1], f"at target {target}"
        assert_right(other)


@pytest.mark.smoke
def test_a_standby_answers_like_its_primary(primary, standby, database):
    # Nothing is published, and no row found dead, between the two answers.
    primary.configure(polign__delta_limit=0, autovacuum="off")
    with database.connect() as connection:
        for change in (
            "SELECT 1", "VACUUM t", "SELECT polign.flush('t_polign')", "SELECT polign.compact('t_polign')",
            "REINDEX INDEX t_polign", "VACUUM FULL t", "TRUNCATE t", "SELECT polign.flush('t_polign')",
            "REINDEX INDEX CONCURRENTLY t_polign", "CHECKPOINT",
        ):
            connection.execute(change)
            assert_same_answers(primary, standby, database.name)
            churn(connection)
    assert_same_answers(primary, standby, database.name)


@pytest.mark.parametrize("function", ["flush", "compact", "calibrate"])
def test_a_standby_refuses_maintenance(primary, standby, database, function):
    standby.wait_for_replay(primary)
    with standby.connect(database.name) as connection:
        connection.execute("SET statement_timeout = '10s'")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="during recovery"):
            connection.execute(f"SELECT polign.{function}('t_polign')")


def test_recall_is_measured_on_a_standby_as_on_its_primary(primary, standby, database):
    primary.configure(polign__delta_limit=0, autovacuum="off")
    queries = "SELECT embedding FROM t WHERE id < 200"
    with database.connect() as connection:
        churn(connection)
        connection.execute(f"SELECT polign.calibrate('t_polign', '{queries}')")
    standby.wait_for_replay(primary)
    with database.connect() as one, standby.connect(database.name) as other:
        for sql in ("SELECT * FROM polign.recall_curve('t_polign')",
                    "SELECT * FROM polign.recall('t_polign')",
                    f"SELECT * FROM polign.recall('t_polign', '{queries}')"):
            there = other.execute(sql).fetchall()
            assert one.execute(sql).fetchall() == there != []
        TABLE.by_index(other, questions(1))  # by the index, as recall() does


def test_a_standby_answers_from_the_bucket_with_a_cache_of_its_own(primary, standby, database):
    standby.wait_for_replay(primary)
    standby.stop()
    standby.wipe_cache()
    standby.start()
    assert_same_answers(primary, standby, database.name)
    with standby.connect(database.name) as connection:
        assert connection.execute("SELECT gets > 0 FROM polign.stat_cache").fetchone() == (True,)


def test_a_row_is_found_on_the_standby_as_soon_as_it_is_visible_there(primary, standby, database):
    standby.wait_for_replay(primary)
    place = vectors(9000, 9001)[0].copy()
    with database.connect() as connection, standby.connect(database.name) as reader:
        for row in range(10_000, 10_050):
            connection.execute("INSERT INTO t VALUES (%s, %s::vector)", (row, vector_text(place)))
            place[row % 64] += 1
            visible = False
            while not visible:
                with reader.transaction():
                    reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                    visible = reader.execute(f"SELECT 1 FROM t WHERE id = {row}").fetchone()
                    (found,) = TABLE.by_index(reader, [place], 100, target_recall=1)
                    assert (row in found.ids) == bool(visible)


@pytest.mark.soak
@pytest.mark.timeout(soak.seconds(8) + 300)
def test_a_standby_answers_right_while_everything_is_written(primary, standby, database):
    primary_log = primary.postgres.log.stat().st_size
    standby_log = standby.postgres.log.stat().st_size
    assert primary.execute("SHOW wal_consistency_checking") == [("all",)]
    database.execute("CREATE SEQUENCE copies START 1000000000")
    standby.wait_for_replay(primary)
    writing = Load(soak.seconds(8))
    next_row = itertools.count(ROWS)

    def insert(connection):
        row = next(next_row)
        connection.execute("INSERT INTO t VALUES (%s, %s::vector)", (row, vector(row % 9000)))

    def load_many(connection):
        connection.execute(
            "INSERT INTO t SELECT nextval('copies'), embedding FROM t ORDER BY random() LIMIT 100"
        )
        writing.pause(0.1)

    def delete(connection):
        connection.execute(
            "DELETE FROM t WHERE id IN (SELECT id FROM t ORDER BY random() "
            "LIMIT greatest(120, (SELECT count(*) - 4000 FROM t)))"
        )
        writing.pause(0.1)

    def update(connection):
        connection.execute("UPDATE t SET embedding = l2_normalize(embedding) WHERE id % 97 = 5")
        writing.pause(0.2)

    def vacuum(connection):
        connection.execute("VACUUM t")
        writing.pause(0.2)

    def maintain(connection, function):
        try:
            connection.execute(f"SELECT polign.{function}('t_polign')")
        except psycopg.errors.ObjectNotInPrerequisiteState as error:
            assert "was rebuilt in the meantime" in str(error)

    def flush(connection):
        writing.pause(0.3)
        maintain(connection, "flush")

    def compact(connection):
        writing.pause(1)
        maintain(connection, "compact")

    def reindex(connection):
        writing.pause(2)
        # Not CONCURRENTLY: that lets no standby finish its old snapshots first. A btree, too, then misses
        # rows that such a snapshot sees.
        connection.execute("REINDEX INDEX t_polign")

    def search(connection):
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            TABLE.assert_exact(connection, questions(2), 100_000)

    for step in (insert, load_many, delete, update, vacuum, flush, compact, reindex):
        writing.add(database.connect, step)
    for _ in range(2):
        writing.add(lambda: standby.connect(database.name), search)
    writing.run()
    assert_same_answers(primary, standby, database.name)
    for server, begin in ((primary, primary_log), (standby, standby_log)):
        log = server.postgres.log.read_text()[begin:]
        assert "inconsistent page" not in log
        assert "PANIC" not in log and "FATAL" not in log


def test_a_promoted_standby_goes_its_own_way(primary, database):
    with primary.standby() as promoted:
        promoted.execute("SELECT pg_promote()")
        with database.connect() as one, promoted.connect(database.name) as other:
            for session, rows in ((one, 100), (other, 200), (one, 300)):
                churn(session, rows)
                session.execute("VACUUM t")
                for either in (one, other):
                    assert_right(either)
            for session in (one, other):
                session.execute("REINDEX INDEX t_polign")
            for session in (one, other):
                assert_right(session)


def test_replaying_a_build_takes_a_twentieth_of_the_log_of_hnsw(connection):
    """`make bench` prints the same for more rows."""
    rows = passages().base[:2000]
    create_passages(connection, "p", rows)

    def wal_bytes(access_method: str) -> int:
        connection.execute("CHECKPOINT")
        ((begin,),) = connection.execute("SELECT pg_current_wal_insert_lsn()")
        connection.execute(f"CREATE INDEX ON p USING {access_method} (embedding vector_cosine_ops)")
        return connection.execute(
            f"SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '{begin}')::bigint"
        ).fetchone()[0]

    ours, theirs = wal_bytes("polign_ivf"), wal_bytes("hnsw")
    print(f"WAL of a build of {len(rows)} rows: {ours:,} bytes, hnsw {theirs:,} bytes: {ours / theirs:.1%}")
    assert ours <= 0.05 * theirs
