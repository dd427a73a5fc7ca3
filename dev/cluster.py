"""The development cluster: `make up`, `down`, `status`, `env`, `psql`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time

from dev import build, process
from dev.paths import PG_VERSIONS, DevError, dev_dir, pg_version
from dev.postgres import SUPERUSER, Postgres
from dev.s3 import REGION
from dev.s3server import S3Server
from dev.tools import PgInstall, ensure_postgres, say

DATABASE = "polign"
BUCKET = "polign"


class DevCluster:
    """One Postgres of the version asked for, with the S3 server that all versions share."""

    def __init__(self, install: PgInstall, version: str):
        self.version = version
        self.s3 = S3Server(dev_dir() / "up" / "s3")
        self.postgres = Postgres(install, dev_dir() / "up" / f"pg{version}")

    @property
    def store_url(self) -> str:
        return f"s3://{BUCKET}/pg{self.version}"

    def settings(self) -> dict[str, object]:
        return {
            "polign.store": self.store_url,
            "polign.s3_endpoint": self.s3.endpoint,
            "polign.s3_region": REGION,
            "polign.credentials_file": self.s3.credentials_file,
        }

    def up(self) -> None:
        build.build(self.postgres.install)
        changed = build.install(self.postgres.install)
        started = time.monotonic()
        if changed and self.postgres.running:
            self.postgres.stop()
        self.s3.start(bucket=BUCKET)
        if not self.postgres.initialised:
            self.postgres.initialise(self.settings())
        if not self.postgres.running:
            self.postgres.write_settings(self.settings())
            self.postgres.start()
            say(f"Postgres and S3 server up in {time.monotonic() - started:.1f} s")
        self._create_database()

    def _create_database(self) -> None:
        exists = self.query("postgres", f"SELECT 1 FROM pg_database WHERE datname = '{DATABASE}'")
        if not exists:
            self.query("postgres", f"CREATE DATABASE {DATABASE}")
        # While a version is being developed its SQL changes without a new number: create it anew.
        digest_file = self.postgres.directory / "extension-sql.sha256"
        digest = build.sql_digest()
        if digest_file.exists() and digest_file.read_text() != digest:
            say("the extension's SQL changed: creating it anew, which drops its indexes")
            self.query(DATABASE, "DROP EXTENSION IF EXISTS polign CASCADE")
        self.query(DATABASE, "CREATE EXTENSION IF NOT EXISTS polign CASCADE")
        digest_file.write_text(digest)

    def query(self, database: str, sql: str) -> str:
        done = subprocess.run(
            [self.postgres.install.bin / "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql],
            env={**os.environ, **self.client_environment(), "PGDATABASE": database,
                 "PGOPTIONS": "-c client_min_messages=warning"},
            capture_output=True, text=True,
        )
        if done.returncode:
            raise DevError(done.stderr.strip())
        return done.stdout.strip()

    def down(self) -> None:
        self.postgres.stop()
        others = [p for p in (dev_dir() / "up").glob("pg*/data/postmaster.pid")
                  if process.alive(int(p.read_text().split("\n")[0]), str(p.parent))]
        if not others:
            self.s3.stop()

    def status(self) -> str:
        pg = f"Postgres {self.version}: "
        if self.postgres.running:
            pg += f"up, 127.0.0.1:{self.postgres.port}, pid {self.postgres.pid}, data {self.postgres.data}"
        else:
            pg += "down"
        s3 = f"S3 server: up, {self.s3.endpoint}, pid {self.s3.pid}" if self.s3.running else "S3 server: down"
        return f"{pg}\n{s3}"

    def require_running(self) -> None:
        if not (self.postgres.running and self.s3.running):
            raise DevError("the development cluster is down: run `make up` first")

    def client_environment(self) -> dict[str, str]:
        """What a client program needs in its environment."""
        return {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.postgres.port),
            "PGUSER": SUPERUSER,
            "PGDATABASE": DATABASE,
            "PGPASSWORD": self.postgres.password,
            "POLIGN_S3_BUCKET": BUCKET,
            "POLIGN_STORE": self.store_url,
            "POLIGN_PGDATA": str(self.postgres.data),
            **self.s3.client_environment(),
        }

    def exports(self) -> str:
        lines = [f"export {k}={shlex.quote(v)}" for k, v in self.client_environment().items()]
        lines.append(f'export PATH={shlex.quote(str(self.postgres.install.bin))}:"$PATH"')
        return "\n".join(lines)


def dev_cluster() -> DevCluster:
    version = pg_version()
    return DevCluster(ensure_postgres(version), version)


def remove() -> None:
    for version in PG_VERSIONS:
        if (dev_dir() / "up" / f"pg{version}").exists():
            DevCluster(ensure_postgres(version), version).down()
    S3Server(dev_dir() / "up" / "s3").stop()
    shutil.rmtree(dev_dir() / "up", ignore_errors=True)


def psql(arguments: list[str]) -> None:
    cluster = dev_cluster()
    cluster.require_running()
    program = str(cluster.postgres.install.bin / "psql")
    sys.stdout.flush()
    os.execve(program, [program, *arguments], {**os.environ, **cluster.client_environment()})
