"""`make env` and `make status`: what they say of a running cluster is true, and enough to use it."""

import os
import subprocess

import pytest

from dev import __main__ as commands
from dev.cluster import DATABASE, DevCluster
from dev.paths import DevError, pg_version
from dev.s3 import S3Client


@pytest.fixture(autouse=True)
def dev_cluster(cluster, install, s3_server, monkeypatch):
    """The tests' own servers in the place of the development cluster."""
    running = DevCluster(install, pg_version())
    running.postgres, running.s3 = cluster.postgres, s3_server
    monkeypatch.setattr("dev.cluster.dev_cluster", lambda: running)
    return running


def in_a_shell(exports: str, command: str) -> str:
    """Runs a command in a shell that knows nothing but the exports."""
    done = subprocess.run(
        ["bash", "-c", f'eval "$1"; {command}', "bash", exports],
        env={"PATH": os.defpath}, capture_output=True, text=True, check=True,
    )
    return done.stdout.rstrip("\n")


def test_env_is_enough_for_psql(cluster, install, capsys):
    commands.env()
    exports = capsys.readouterr().out
    assert in_a_shell(exports, "type -P psql") == str(install.bin / "psql")
    sql = "SELECT inet_server_port(), current_user, current_setting('data_directory')"
    expected = f"{cluster.postgres.port}|postgres|{cluster.postgres.data}"
    assert in_a_shell(exports, f'psql -XAtd postgres -c "{sql}"') == expected
    assert in_a_shell(exports, 'echo "$PGDATABASE $POLIGN_PGDATA"') == f"{DATABASE} {cluster.postgres.data}"


def test_env_is_enough_for_an_s3_client(s3_server, bucket, capsys):
    s3_server.client().put(bucket, "dev-cluster/object", b"abc")
    commands.env()
    names = ["POLIGN_S3_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    values = in_a_shell(capsys.readouterr().out, f"printenv {' '.join(names)}").split("\n")
    assert S3Client(*values).list(bucket, "dev-cluster/") == {"dev-cluster/object": 3}


def test_status_names_ports_and_processes(cluster, s3_server, capsys):
    commands.status()
    postgres, s3 = capsys.readouterr().out.splitlines()
    assert f"up, 127.0.0.1:{cluster.postgres.port}, pid {cluster.postgres.pid}," in postgres
    assert str(cluster.postgres.data) in postgres
    assert f"up, {s3_server.endpoint}, pid {s3_server.pid}" in s3


def test_a_stopped_server_is_down(cluster, s3_server, capsys):
    cluster.stop()
    commands.status()
    postgres, s3 = capsys.readouterr().out.splitlines()
    assert postgres == f"Postgres {pg_version()}: down"
    assert s3.startswith("S3 server: up")
    with pytest.raises(DevError, match="make up"):
        commands.env()
