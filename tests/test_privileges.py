"""Who may call what, and what nobody may see."""

from pathlib import Path

import psycopg
import pytest

from dev.datasets import create_table, passages


def test_secrets_are_not_in_command_lines_or_files_of_others(cluster, connection, s3_server):
    connection.execute("SELECT polign.cache_clear()")
    for pid in cluster.store_pids():
        assert s3_server.secret_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert s3_server.secret_key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert s3_server.secret_key not in cluster.postgres.log.read_text()


def test_functions_and_privileges(connection, user):
    create_table(connection, "t", passages().base[:100])
    connection.execute("CREATE INDEX t_polign ON t USING polign_ivf (embedding vector_cosine_ops)")
    assert user.execute("SELECT polign.version()").fetchone()[0]
    for call in ("polign.cache_clear()", "polign.prewarm('t_polign')", "polign.index_info('t_polign')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            user.execute(f"SELECT {call}")
    granted = connection.execute(
        "SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace "
        "WHERE nspname = 'polign' AND has_function_privilege('public', p.oid, 'EXECUTE')"
    ).fetchall()
    assert {"cache_clear", "prewarm"}.isdisjoint(name for (name,) in granted)


def test_functions_want_a_polign_index(connection):
    create_table(connection, "t", passages().base[:100])
    for name in ("t", "t_pkey"):
        with pytest.raises(psycopg.errors.WrongObjectType):
            connection.execute(f"SELECT polign.index_info('{name}')")
