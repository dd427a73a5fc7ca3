"""Postgres servers for tests, and databases on them."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psycopg

from dev import process
from dev.paths import write_private
from dev.postgres import SUPERUSER, Postgres
from dev.tools import PgInstall

TEMPLATE_DATABASE = "polign_template"
TEST_SETTINGS = {
    "fsync": "off",  # a killed process loses nothing that the kernel has
    "shared_buffers": "64MB",
    "autovacuum": "off",
    "max_connections": 60,
    "max_prepared_transactions": 10,
    "maintenance_work_mem": "64MB",
    # Bounds what a fault costs in time; tests that need another value set it.
    "polign.fetch_timeout": "10s",
}


# Resources that were forgotten, locks released twice, panics, assertions of Postgres, and pages that replay
# makes otherwise (`wal_consistency_checking`).
SIGNS_OF_FAULTS = ("was not closed", " leak: ", "you don't own a lock", "panicked at", "PANIC:", "TRAP:",
                   "inconsistent page")
_copies = itertools.count(1)


class Cluster:
    """A server with polign preloaded (unless `settings` say otherwise); `with` destroys it at the end."""

    def __init__(self, install: PgInstall, directory: Path, settings: dict[str, object]):
        self.postgres = Postgres(install, directory)
        self._first_settings = {**TEST_SETTINGS, **settings}
        self._settings = dict(self._first_settings)
        self._revision = 0

    @classmethod
    def create(cls, install: PgInstall, directory: Path, settings: dict[str, object]) -> Cluster:
        cluster = cls(install, directory, settings)
        cluster.postgres.initialise(cluster._settings)
        cluster.postgres.start()
        return cluster

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error) -> None:
        self.destroy()

    def standby(self) -> Cluster:
        """A hot standby of this server, streaming from it."""
        standby = self.copy(standby=True)
        standby.start()
        return standby

    def copy(self, standby: bool = False, **settings: object) -> Cluster:
        """A base backup of this server, not started yet, with settings beside this server's."""
        name = f"{self.postgres.directory.name}-copy{next(_copies)}"
        directory = self.postgres.directory.with_name(name)
        copy = Cluster(self.postgres.install, directory, {**self._settings, **settings})
        copy.postgres.clone_from(self.postgres, copy._settings, standby)
        return copy

    def twin(self) -> Cluster:
        """A copy of this server's files that goes on as if it were this server: the same system, timeline
        and databases."""
        twin = self.copy()
        twin.start()
        return twin

    def restored(self, change: Callable[[], None]) -> Cluster:
        """This server as it was before `change`, which is made after a base backup: recovered from that to a
        restore point."""
        pg_wal = self.postgres.data / "pg_wal"
        cluster = self.copy(
            restore_command=f"cp {pg_wal}/%f %p", recovery_target_name="before",
            recovery_target_action="promote",
        )
        self.execute("SELECT pg_create_restore_point('before')")
        change()
        self.execute("SELECT pg_switch_wal()")
        write_private(cluster.postgres.data / "recovery.signal", "")
        cluster.postgres.start()
        process.wait_until(
            lambda: cluster.execute("SELECT NOT pg_is_in_recovery()") == [(True,)], 30, "no end of recovery"
        )
        return cluster

    def rewind_to(self, source: Cluster) -> None:
        """Makes this server a standby of another that has parted from it."""
        self.stop()
        self.postgres.rewind_to(source.postgres, self._settings)
        self.start()

    def wait_for_replay(self, primary: Cluster) -> None:
        """Waits until this standby shows all that the primary has written by now."""
        # Its commit flushes what no transaction has: the publications of a worker.
        primary.execute("SELECT pg_logical_emit_message(true, 'wait_for_replay', '')")
        ((position,),) = primary.execute("SELECT pg_current_wal_flush_lsn()")
        process.wait_until(
            lambda: self.execute(f"SELECT pg_last_wal_replay_lsn() >= '{position}'")[0][0],
            30, "the standby does not catch up",
        )

    # Connections. They go through the Unix socket, as superuser unless a user is given.

    def connect(self, database: str = "postgres", user: str = SUPERUSER, **options) -> psycopg.Connection:
        return psycopg.connect(
            host=str(self.postgres.socket_directory), port=self.postgres.port, dbname=database,
            user=user, autocommit=True, **options,
        )

    def execute(self, sql: str, database: str = "postgres"):
        with self.connect(database) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else None

    def run(self, program: str, *arguments: object) -> str:
        """Runs a client program of this server's installation on it; returns what it prints."""
        done = process.run_as_service(
            [self.postgres.install.bin / program, "-h", self.postgres.socket_directory,
             "-p", self.postgres.port, "-U", SUPERUSER, *arguments],
            capture_output=True, text=True,
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout

    def database(self) -> Database:
        """A fresh database with the extension."""
        self.ensure_template()
        return Database(self)

    def ensure_template(self) -> None:
        """A database with the extension, to be copied."""
        if not self.execute(f"SELECT 1 FROM pg_database WHERE datname = '{TEMPLATE_DATABASE}'"):
            self.execute(f"CREATE DATABASE {TEMPLATE_DATABASE}")
            self.execute("CREATE EXTENSION polign CASCADE", TEMPLATE_DATABASE)

    # Settings.

    def configure(self, **settings: object) -> None:
        """Changes settings (two underscores stand for the dot); None returns to the cluster's own."""
        for name, value in settings.items():
            name = name.replace("__", ".")
            if value is not None:
                self._settings[name] = value
            elif name in self._first_settings:
                self._settings[name] = self._first_settings[name]
            else:
                self._settings.pop(name, None)
        self._revision += 1
        self.postgres.write_settings({**self._settings, "harness.revision": self._revision})
        if self.postgres.running:
            self.postgres.reload()
            process.wait_until(
                lambda: self.execute("SHOW harness.revision")[0][0] == str(self._revision),
                10, "the server did not take the new settings",
            )

    def reset_settings(self) -> None:
        if self._settings != self._first_settings:
            self._settings = dict(self._first_settings)
            self.configure()

    # Life and death.

    def start(self) -> None:
        self.postgres.start()

    def stop(self, sig: int = signal.SIGINT) -> None:
        self.postgres.stop(sig)

    def restart(self) -> None:
        self.stop()
        self.start()

    def crash(self) -> None:
        """kill -9 of the postmaster; the server is down afterwards."""
        self.postgres.kill()

    def destroy(self) -> None:
        """Ends it and removes its files; fails if it logged what no server should."""
        self.stop(signal.SIGQUIT)
        log = self.postgres.log.read_text(errors="replace") if self.postgres.log.exists() else ""
        shutil.rmtree(self.postgres.directory, ignore_errors=True)
        faults = [line for line in log.splitlines() if any(sign in line for sign in SIGNS_OF_FAULTS)]
        assert not faults, faults[:5]

    # The store process and the cache.

    @property
    def cache_directory(self) -> Path:
        return self.postgres.data / "pgsql_tmp_polign" / "pgsql_tmp"

    def store_pids(self) -> list[int]:
        """The running polign-store processes of this server."""
        found = []
        for pid in process.descendants(self.postgres.pid):
            try:
                program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if program.endswith(b"polign-store"):
                found.append(pid)
        return found

    def wipe_cache(self) -> None:
        """Removes every cached byte; the server must be down."""
        assert not self.postgres.running
        shutil.rmtree(self.cache_directory, ignore_errors=True)


class Database:
    """One database; `with` drops it at the end."""

    _numbers = itertools.count(1)

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.name = f"t{next(self._numbers)}"
        cluster.execute(f"CREATE DATABASE {self.name} TEMPLATE {TEMPLATE_DATABASE}")

    def connect(self, **options) -> psycopg.Connection:
        return self.cluster.connect(self.name, **options)

    def execute(self, sql: str):
        return self.cluster.execute(sql, self.name)

    def drop(self) -> None:
        self.cluster.execute(f"DROP DATABASE {self.name} WITH (FORCE)")


def plan(connection: psycopg.Connection, sql: str, parameters=None) -> dict:
    (answer,) = connection.execute(f"EXPLAIN (FORMAT JSON) {sql}", parameters).fetchone()
    return (answer if isinstance(answer, list) else json.loads(answer))[0]["Plan"]


def plan_nodes(node: dict) -> list[dict]:
    return [node, *itertools.chain.from_iterable(plan_nodes(n) for n in node.get("Plans", []))]


def indexes_used(connection: psycopg.Connection, sql: str, parameters=None) -> list[str]:
    nodes = plan_nodes(plan(connection, sql, parameters))
    return [node["Index Name"] for node in nodes if "Index Name" in node]


def assert_index_used(connection: psycopg.Connection, index: str, sql: str, parameters=None) -> None:
    used = indexes_used(connection, sql, parameters)
    assert index in used, f"the plan of {sql!r} uses {used or 'no index'}"
