"""Settings, options and privileges."""

import psycopg
import pytest

SIGHUP = [
    "store", "s3_endpoint", "s3_region", "s3_force_path_style", "credentials_file", "cache_dir",
    "cache_size", "fetch_timeout", "fetch_concurrency", "delta_limit",
]
USER = ["target_recall", "nprobe", "epsilon", "iterative_scan", "max_scan_tuples"]


@pytest.mark.smoke
def test_contexts(connection):
    rows = connection.execute("SELECT name, context FROM pg_settings WHERE name LIKE 'polign.%'").fetchall()
    contexts = {name.removeprefix("polign."): context for name, context in rows}
    assert contexts == dict.fromkeys(SIGHUP, "sighup") | dict.fromkeys(USER, "user")


def test_every_setting_is_described(connection):
    rows = connection.execute("SELECT name, short_desc FROM pg_settings WHERE name LIKE 'polign.%'")
    assert all(description and len(description) > 10 for _, description in rows)


def test_defaults(own_cluster):
    cluster = own_cluster()
    rows = cluster.execute("SELECT name, boot_val, unit FROM pg_settings WHERE name LIKE 'polign.%'")
    found = {name.removeprefix("polign."): (value, unit) for name, value, unit in rows}
    assert found["store"] == ("file:polign_store", None)
    assert found["fetch_timeout"] == ("30000", "ms")
    assert found["cache_dir"] == ("pgsql_tmp_polign/pgsql_tmp", None)
    assert found["cache_size"][1] == "MB"
    assert found["target_recall"] == ("0", None)
    assert found["nprobe"] == ("0", None)
    assert found["iterative_scan"] == ("strict_order", None)


@pytest.mark.parametrize("name", SIGHUP)
def test_users_cannot_change_the_operators_settings(user, name):
    with pytest.raises(psycopg.Error, match="cannot be changed now"):
        user.execute(f"SET polign.{name} = '10'")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        user.execute(f"ALTER SYSTEM SET polign.{name} = '10'")


@pytest.mark.parametrize(
    "setting",
    [
        "target_recall = 0.4", "target_recall = 1.01", "target_recall = -1", "nprobe = -1",
        "epsilon = -1", "iterative_scan = 'sometimes'", "max_scan_tuples = -5",
    ],
)
def test_search_settings_have_ranges(user, setting):
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        user.execute(f"SET polign.{setting}")


@pytest.mark.parametrize("setting", ["target_recall = 0", "target_recall = 0.5", "target_recall = 1",
                                     "nprobe = 5", "iterative_scan = relaxed_order"])
def test_search_settings_are_the_users(user, setting):
    user.execute(f"SET polign.{setting}")


@pytest.mark.parametrize(
    "name, value",
    [
        ("store", "http://example"), ("store", "s3://"), ("store", "s3:bucket"), ("store", "nonsense"),
        ("store", ""), ("s3_endpoint", "not a url"), ("cache_dir", ""), ("cache_size", "1MB"),
        ("fetch_timeout", "0"), ("fetch_concurrency", "0"), ("s3_force_path_style", "perhaps"),
    ],
)
def test_wrong_values_are_refused_by_alter_system(connection, name, value):
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        connection.execute(f"ALTER SYSTEM SET polign.{name} = '{value}'")


@pytest.mark.parametrize(
    "url, detail",
    [
        ("s3://ab", "3 to 63 characters"), ("s3://bucket/a b", "letters, digits"),
        ("s3://bucket/../x", "letters, digits"), ("s3://bucket/a//b", "letters, digits"),
        ("file:../x", "does not climb"), ("file:", "not empty"), ("http://example", "file:path"),
        ("s3://key:secret@bucket/x", "polign.credentials_file"),
    ],
)
def test_a_wrong_store_is_refused_where_it_is_set(connection, url, detail):
    with pytest.raises(psycopg.errors.InvalidParameterValue) as raised:
        connection.execute(f"ALTER SYSTEM SET polign.store = '{url}'")
    assert detail in raised.value.diag.message_detail


def test_a_wrong_store_in_the_configuration_file_changes_nothing(cluster, connection):
    connection.execute("SELECT polign.version()")
    before = connection.execute("SHOW polign.store").fetchone()
    cluster.configure(polign__store="s3://bucket/a b")
    assert connection.execute("SHOW polign.store").fetchone() == before


def test_unknown_settings_are_refused(connection):
    connection.execute("SELECT polign.version()")
    with pytest.raises(psycopg.Error, match="invalid configuration parameter name"):
        connection.execute("SET polign.s3_secret_key = 'x'")


def test_no_setting_shows_a_secret(connection, s3_server):
    rows = connection.execute("SELECT setting FROM pg_settings").fetchall()
    assert all(s3_server.secret_key not in setting for (setting,) in rows)


@pytest.mark.smoke
def test_operator_classes_resolve_beside_pgvectors(connection):
    rows = connection.execute(
        "SELECT opcname, opcdefault FROM pg_opclass JOIN pg_am a ON a.oid = opcmethod "
        "WHERE amname = 'polign_ivf'"
    ).fetchall()
    names = {f"{t}_{m}_ops" for t in ("vector", "halfvec") for m in ("l2", "ip", "cosine")}
    assert {name for name, _ in rows} == names
    assert {name for name, default in rows if default} == {"vector_l2_ops"}
