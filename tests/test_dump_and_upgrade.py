"""Dumps that are restored elsewhere, and upgrades to another version of Postgres."""

import pytest

from dev import build
from dev.process import run_as_service
from dev.tools import ensure_postgres
from tests.harness.cluster import Cluster
from tests.harness.garbage import Store, collect, let_transactions_pass
from tests.harness.search import Searchable
from tests.harness.tables import INDEX, TABLE, assert_right, churn, create_table, vector

SEARCHABLES = (
    TABLE,
    Searchable(index="t_l2", metric="l2", where="id < 2000"),
    Searchable("u", "u_half", column="(embedding::halfvec(64))", type_name="halfvec"),
)


def create(connection) -> None:
    create_table(connection)
    connection.execute(f"{INDEX} WITH (lists = 9, target_recall = 0.97)")
    connection.execute(
        "CREATE INDEX t_l2 ON t USING polign_ivf (embedding) WHERE id < 2000;"
        "CREATE UNLOGGED TABLE u AS SELECT * FROM t;"
        "CREATE INDEX u_half ON u USING polign_ivf ((embedding::halfvec(64)) halfvec_cosine_ops);"
        "ANALYZE u"
    )
    churn(connection)
    connection.execute("VACUUM t")
    churn(connection)


def contents(connection) -> list:
    return connection.execute(
        "SELECT id, embedding::text, note FROM t UNION ALL SELECT id, embedding::text, note FROM u "
        "ORDER BY 1, 2, 3"
    ).fetchall()


def definitions(connection) -> list:
    return connection.execute(
        "SELECT indexdef FROM pg_indexes WHERE indexdef LIKE '%polign_ivf%' ORDER BY 1"
    ).fetchall()


def assert_all_right(connection) -> None:
    for searchable in SEARCHABLES:
        assert_right(connection, searchable)


@pytest.mark.parametrize("form", ["plain", "custom", "directory"])
def test_a_dump_is_restored(cluster, database, form):
    with database.connect() as connection:
        create(connection)
        before, indexes = contents(connection), definitions(connection)
    file = cluster.postgres.directory / f"{database.name}.dump"
    copy = f"{database.name}_restored"
    cluster.run("pg_dump", "-d", database.name, "--format", form, "--file", file)
    cluster.run("createdb", copy, "--template", "template0")
    try:
        if form == "plain":
            cluster.run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", copy, "-f", file)
        else:
            jobs = ["--jobs", 2] if form == "directory" else ["--single-transaction"]
            cluster.run("pg_restore", "-d", copy, "--exit-on-error", *jobs, file)
        with cluster.connect(copy) as connection:
            assert contents(connection) == before
            assert definitions(connection) == indexes
            connection.execute("ANALYZE")
            assert_all_right(connection)
            churn(connection)
            assert_all_right(connection)
    finally:
        cluster.run("dropdb", "--force", copy)


@pytest.mark.timeout(1800)  # the extension may have to be compiled for the other version
def test_pg_upgrade_from_16_to_18(run_directory, s3_settings, s3_server, bucket, proxy):
    installs = {version: ensure_postgres(version) for version in ("16", "18")}
    for install in installs.values():
        build.build(install)
        build.install(install)
    settings = {**s3_settings, "polign.store": "s3://polign-test/upgrade"}
    old = Cluster(installs["16"], run_directory / "pg16", settings)
    new = Cluster(installs["18"], run_directory / "pg18", settings)
    with old, new:
        old.postgres.initialise(settings)
        old.start()
        database = old.database()
        with database.connect() as connection:
            create(connection)
            assert_all_right(connection)
            before, indexes = contents(connection), definitions(connection)
            ids = connection.execute("SELECT index_id FROM polign.index_info('t_polign')").fetchall()
            ((system,),) = connection.execute("SELECT system_identifier FROM pg_control_system()").fetchall()
        old.stop()
        # 16 has none unless it is told to, 18 has them unless it is told not to.
        new.postgres.initialise(settings, "--no-data-checksums")
        done = run_as_service(
            [new.postgres.install.bin / "pg_upgrade", "--old-bindir", old.postgres.install.bin,
             "--new-bindir", new.postgres.install.bin, "--old-datadir", old.postgres.data,
             "--new-datadir", new.postgres.data, "--username", "postgres", "--no-sync",
             "--socketdir", new.postgres.socket_directory],
            directory=new.postgres.directory, capture_output=True, text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        new.start()
        with new.connect(database.name) as connection:
            assert connection.execute("SHOW server_version_num").fetchone()[0] >= "180000"
            assert contents(connection) == before
            assert definitions(connection) == indexes
            # The same index: nothing was built again.
            assert connection.execute("SELECT index_id FROM polign.index_info('t_polign')").fetchall() == ids
            assert_all_right(connection)
            churn(connection)
            connection.execute(f"UPDATE t SET embedding = '{vector(9500)}' WHERE id % 100 = 77")
            connection.execute("VACUUM t")
            assert_all_right(connection)
            connection.execute("REINDEX TABLE t")
            assert_all_right(connection)
            # The old cluster's objects are nobody's to delete until it is said to be gone.
            store = Store(s3_server.client(), bucket, "upgrade")
            before = set(store.keys())
            let_transactions_pass(connection)
            for _ in range(2):
                collect(connection)
            inherited = {key for key in before & set(store.keys()) if ids[0][0] in key}
            assert inherited
            # What the new cluster wrote for the index before REINDEX is garbage already, and collected.
            assert connection.execute("SELECT polign.adopt_dropped()").fetchone() == (0,)
            assert connection.execute("SELECT polign.adopt_dropped(%s)", [system]).fetchone()[0] >= 2
            connection.execute("SELECT polign.adopt('u_half')")
            for _ in range(2):
                collect(connection)
            assert not inherited & set(store.keys())
            assert all(row.kept is None for row in collect(connection))
            assert_all_right(connection)
