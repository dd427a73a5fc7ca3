"""One private Postgres server: initialise, configure, start, stop, kill."""

from __future__ import annotations

import os
import secrets
import signal
import time
from pathlib import Path

from dev import process
from dev.paths import DevError, service_directory, write_private
from dev.tools import PgInstall

SUPERUSER = "postgres"

BASE_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_permissions": "0700",
    "shared_preload_libraries": "polign",
    "shared_buffers": "256MB",
    "maintenance_work_mem": "256MB",
    "max_wal_size": "2GB",
    "log_min_messages": "info",
    "log_line_prefix": "%m [%p] %d ",
    "logging_collector": "off",
}


class Postgres:
    """A server whose data, socket, log and password lie under `directory`."""

    def __init__(self, install: PgInstall, directory: Path):
        self.install = install
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "log"
        self._settings_file = directory / "settings.conf"

    # What a client needs.

    @property
    def port(self) -> int:
        return int((self.directory / "port").read_text())

    @property
    def password(self) -> str:
        return (self.directory / "password").read_text().strip()

    @property
    def socket_directory(self) -> Path:
        """Only the service user and root can enter it, so connections through it need no password."""
        return self.directory / "run"

    @property
    def initialised(self) -> bool:
        return (self.directory / "port").exists()

    # Its life.

    def initialise(self, settings: dict[str, object], *initdb_options: str) -> None:
        service_directory(self.directory)
        service_directory(self.socket_directory)
        if len(str(self.socket_directory)) > 85:
            raise DevError(f"{self.socket_directory} is too long for a Unix socket: set POLIGN_DEV_DIR")
        write_private(self.directory / "password", secrets.token_urlsafe(18))
        done = process.run_as_service(
            [self.install.bin / "initdb", "--pgdata", self.data, "--username", SUPERUSER,
             "--pwfile", self.directory / "password", "--auth-local=trust",
             "--auth-host=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync",
             "--no-instructions", *initdb_options],
            capture_output=True, text=True,
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr}")
        self._take_over(settings)

    def clone_from(
        self, primary: Postgres, settings: dict[str, object], standby: bool = True
    ) -> None:
        """Makes this a copy of a running server by a base backup: a standby that streams from it, or one
        that starts as if it were the same server."""
        service_directory(self.directory)
        service_directory(self.socket_directory)
        done = process.run_as_service(
            [self.install.bin / "pg_basebackup", "--pgdata", self.data, "--host", primary.socket_directory,
             "--port", primary.port, "--username", SUPERUSER, "--checkpoint=fast", "--no-sync",
             *(["--write-recovery-conf"] if standby else [])],
            capture_output=True, text=True,
        )
        if done.returncode:
            raise RuntimeError(f"pg_basebackup failed: {done.stderr}")
        self._take_over(settings)

    def rewind_to(self, source: Postgres, settings: dict[str, object]) -> None:
        """Makes this server, which has been shut down, a standby of one that has parted from it."""
        server = f"host={source.socket_directory} port={source.port} user={SUPERUSER} dbname=postgres"
        done = process.run_as_service(
            [self.install.bin / "pg_rewind", "--target-pgdata", self.data, "--write-recovery-conf",
             "--no-sync", "--source-server", server],
            capture_output=True, text=True,
        )
        if done.returncode:
            raise RuntimeError(f"pg_rewind failed: {done.stderr}")
        self._take_over(settings)

    def _take_over(self, settings: dict[str, object]) -> None:
        """Puts a new data directory under our settings and a port of its own."""
        # Later lines win over those that came with a backup.
        with open(self.data / "postgresql.conf", "a") as file:
            file.write(f"include '{self._settings_file}'\n")
        self.write_settings(settings)
        write_private(self.directory / "port", str(process.free_ports(1)[0]))

    def write_settings(self, settings: dict[str, object]) -> None:
        merged = {**BASE_SETTINGS, **settings}
        text = "".join(f"{k} = '{str(v).replace(chr(39), chr(39) * 2)}'\n" for k, v in merged.items())
        write_private(self._settings_file, text)

    def start(self, seconds: float = 60) -> None:
        if self.running:
            return
        if not process.port_free(self.port):
            write_private(self.directory / "port", str(process.free_ports(1)[0]))
        process.spawn(
            [self.install.bin / "postgres", "-D", self.data, "-p", self.port, "-k", self.socket_directory],
            self.log, self.directory,
        )
        started = time.monotonic()

        def ready() -> bool:
            if not self.running and time.monotonic() > started + 2:
                raise RuntimeError(f"Postgres did not start:\n{self.log_tail()}")
            return self.accepts_connections()

        process.wait_until(ready, seconds, f"Postgres does not accept connections (see {self.log})", 0.1)

    def accepts_connections(self) -> bool:
        probe = process.run_as_service(
            [self.install.bin / "pg_isready", "-q", "-h", self.socket_directory, "-p", self.port]
        )
        return probe.returncode == 0

    @property
    def pid(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n")[0])
        except (FileNotFoundError, ValueError):
            return None

    @property
    def running(self) -> bool:
        return process.alive(self.pid, str(self.data))

    def stop(self, sig: int = signal.SIGINT, seconds: float = 60) -> None:
        """A fast shutdown; pass SIGQUIT for an immediate one."""
        process.end(self.pid, str(self.data), sig, seconds)

    def kill(self) -> None:
        """kill -9 of the postmaster alone, then waits until the processes below it noticed."""
        pid = self.pid
        below = process.descendants(pid)
        os.kill(pid, signal.SIGKILL)
        process.wait_until(
            lambda: not any(process.alive(p) for p in [pid, *below]), 30,
            "processes outlive their postmaster",
        )

    def reload(self) -> None:
        os.kill(self.pid, signal.SIGHUP)

    def log_tail(self, lines: int = 20) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
