"""The extension itself: created where it is wanted, updated, dropped; and the rights of roles."""

from contextlib import contextmanager

import psycopg
import pytest

from dev.build import sql_files
from tests.harness.search import Searchable
from tests.harness.tables import INDEX, TABLE, assert_right, churn, create_table, questions


@pytest.fixture
def table(connection):
    create_table(connection)
    connection.execute(INDEX)
    churn(connection)
    return connection


@contextmanager
def next_version(install, script: str):
    """Installs an update script to a version that is named like none."""
    ((version,),) = {f.stem.split("--")[1:] and (f.stem.split("--")[-1],) for f in sql_files()}
    file = install.ask("sharedir") / "extension" / f"polign--{version}--{version}.test.sql"
    file.write_text(script)
    file.chmod(0o644)
    try:
        yield f"{version}.test"
    finally:
        file.unlink()


def test_alter_extension_update(table, database, install):
    with database.connect() as other:
        assert_right(other)
        table.execute("ALTER EXTENSION polign UPDATE")  # to the version that it has
        script = "CREATE FUNCTION polign.of_the_next_version() RETURNS int LANGUAGE sql AS 'SELECT 2';"
        with next_version(install, script) as version:
            table.execute(f"ALTER EXTENSION polign UPDATE TO '{version}'")
        assert table.execute("SELECT extversion FROM pg_extension WHERE extname = 'polign'").fetchone() == (
            version,
        )
        assert other.execute("SELECT polign.of_the_next_version()").fetchone() == (2,)
        for session in (other, table):
            assert_right(session)
            churn(session)
        table.execute("REINDEX INDEX t_polign")
        assert_right(other)


def test_drop_extension_is_refused_while_there_are_indexes(table):
    for extension in ("polign", "vector"):
        with pytest.raises(psycopg.errors.DependentObjectsStillExist):
            table.execute(f"DROP EXTENSION {extension}")
    assert_right(table)
    table.execute("DROP INDEX t_polign")
    table.execute("DROP EXTENSION polign")
    table.execute("CREATE EXTENSION polign")
    table.execute(INDEX)
    assert_right(table)


def test_drop_extension_cascade_takes_the_indexes_and_leaves_the_rows(table, database):
    with database.connect() as other:
        assert_right(other)
        before = TABLE.by_sort(table, questions(1)[0], 20)
        with pytest.raises(ZeroDivisionError), table.transaction():
            table.execute("DROP EXTENSION polign CASCADE")
            raise ZeroDivisionError
        assert_right(other)
        table.execute("DROP EXTENSION polign CASCADE")
        assert table.execute("SELECT to_regclass('t_polign')").fetchone() == (None,)
        assert table.execute("SELECT count(*) FROM pg_am WHERE amname = 'polign_ivf'").fetchone() == (0,)
        churn(other)
        table.execute("VACUUM t")
        table.execute("CREATE EXTENSION polign")
        table.execute(INDEX)
        for session in (other, table):
            assert_right(session)
        table.execute("DROP EXTENSION vector CASCADE")
        assert table.execute("SELECT count(id) FROM t").fetchone()[0] > len(before.ids)
        with pytest.raises(psycopg.errors.UndefinedColumn):
            table.execute("SELECT embedding FROM t")


def test_pgvector_may_lie_in_any_schema(connection, database):
    """Types and operators are found by their numbers, whatever the search path says."""
    connection.execute("DROP EXTENSION vector CASCADE; CREATE SCHEMA types")
    connection.execute("CREATE EXTENSION vector SCHEMA types")
    connection.execute("CREATE EXTENSION polign")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        connection.execute("ALTER EXTENSION vector SET SCHEMA public")
    connection.execute("SET search_path = public, types")
    create_table(connection)
    connection.execute(INDEX)
    churn(connection)
    with database.connect() as other:
        for statement in ("INSERT INTO t SELECT -id, embedding FROM t WHERE id % 50 = 1",
                          "DELETE FROM t WHERE id % 50 = 3", "VACUUM t", "REINDEX INDEX t_polign"):
            other.execute(statement)
        other.execute("SET search_path = types, public")
        for session in (other, connection):
            assert_right(session)


# Roles.


def test_a_role_may_index_and_search_its_own_tables(database, user, connection):
    connection.execute(f"CREATE SCHEMA own AUTHORIZATION {user.info.user}")
    user.execute("SET search_path = own, public")
    create_table(user)
    user.execute(INDEX)
    churn(user)
    for statement in ("VACUUM t", "REINDEX INDEX t_polign", "ALTER INDEX t_polign SET (target_recall = 0.95)",
                      "CLUSTER t USING t_pkey"):
        user.execute(statement)
        assert_right(user)
        churn(user)
    with pytest.raises(psycopg.errors.CantChangeRuntimeParam):
        user.execute("SET polign.store = 'file:elsewhere'")
    user.execute("DROP INDEX t_polign")


def test_a_role_without_rights_sees_and_changes_nothing(table, user):
    refused = [
        "SELECT id FROM t ORDER BY embedding <=> array_fill(1, ARRAY[64])::vector LIMIT 5",
        "SELECT * FROM polign.index_info('t_polign')",
        "REINDEX INDEX t_polign",
        "DROP INDEX t_polign",
        "ALTER INDEX t_polign SET (lists = 5)",
        INDEX.replace("t_polign", "mine"),
    ]
    for statement in refused:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            user.execute(statement)
    assert_right(table)
    table.execute(f"GRANT SELECT ON t TO {user.info.user}")
    assert_right(user)


def test_row_level_security_holds_for_searches(table, user):
    name = user.info.user
    table.execute(f"GRANT SELECT ON t TO {name}; ALTER TABLE t ENABLE ROW LEVEL SECURITY;"
                  f"CREATE POLICY third ON t FOR SELECT TO {name} USING (id % 3 = 0)")
    assert_right(user)
    (found,) = TABLE.by_index(user, questions(1), 50)
    assert len(found.ids) == 50
    assert {row % 3 for row in found.ids} == {0}
    assert_right(table)
    assert_right(user, Searchable(where="note IS NULL"))
