"""The commands behind the Makefile: `python3 -m dev COMMAND`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dev import build, cluster
from dev.lint import lint as run_lint
from dev.paths import CHECKOUT, DevError, pg_version
from dev.s3server import throwaway_s3_server
from dev.tools import PgInstall, ensure_bench_packages, ensure_postgres, ensure_s3_server, ensure_venv

ONLY_PYTHON = ("curves",)
"""Benchmark commands that need no server."""


def up() -> None:
    cluster.dev_cluster().up()
    status()


def down() -> None:
    cluster.dev_cluster().down()
    status()


def clean() -> None:
    """Stops the development cluster and removes its data; what was downloaded stays."""
    cluster.remove()


def status() -> None:
    print(cluster.dev_cluster().status())


def env() -> None:
    running = cluster.dev_cluster()
    running.require_running()
    print(running.exports())


def psql() -> None:
    cluster.psql(sys.argv[2:])


def install() -> None:
    """Installs into the Postgres of PG_CONFIG (default: the first pg_config in PATH)."""
    pg_config = os.environ.get("PG_CONFIG", "pg_config")
    found = next((Path(d) / pg_config for d in os.get_exec_path() if (Path(d) / pg_config).exists()), None)
    if found is None:
        raise DevError(f"no {pg_config}: give the path as make install PG_CONFIG=/path/to/pg_config")
    pg = PgInstall(found)
    build.build(pg)
    if not build.install(pg):
        print(f"polign is already up to date in {pg.ask('pkglibdir')}")


def unit() -> None:
    """The Rust tests, with an S3 server of their own; further arguments go to cargo test."""
    run_unit_tests(sys.argv[2:])


def e2e() -> None:
    """The end-to-end tests; further arguments go to pytest."""
    run_pytest(sys.argv[2:])


def smoke() -> None:
    """A few end-to-end tests of everything, for a Postgres version that is not tested in full."""
    run_pytest(["-m", "smoke"])


def soak() -> None:
    """The tests that try random things, for so many seconds each (default: an hour), and whole matrices."""
    os.environ["POLIGN_SOAK_SECONDS"] = (sys.argv[2:] or ["3600"])[0]
    run_pytest(["-m", "soak", "-s"])


def test() -> None:
    run_unit_tests([])
    run_pytest([])


def run_unit_tests(arguments: list[str]) -> None:
    with throwaway_s3_server() as s3:
        build.unit_tests(arguments, s3)


def run_pytest(arguments: list[str]) -> None:
    # A release build has neither debug assertions nor failpoints. (The Makefile exports an empty PROFILE
    # where none was given.)
    os.environ["PROFILE"] = os.environ.get("PROFILE") or "dev"
    install_all()
    run_in_venv(["pytest", *arguments])


def install_all() -> None:
    pg = ensure_postgres(pg_version())
    build.build(pg)
    build.install(pg)
    ensure_s3_server()


def demo() -> None:
    cluster.dev_cluster().up()
    run_in_venv(["python", "-m", "demo"])


def lint() -> None:
    run_lint(ensure_postgres(pg_version()))


def bench() -> None:
    """A benchmark by name (default: compare); further arguments go to it."""
    name, *arguments = sys.argv[2:] or ["compare"]
    ensure_bench_packages(name)
    if name not in ONLY_PYTHON:
        install_all()
    run_in_venv(["python", "-m", f"bench.{name}", *arguments])


def run_in_venv(arguments: list[str]) -> None:
    program = ensure_venv() / arguments[0]
    done = subprocess.run([program, *arguments[1:]], cwd=CHECKOUT)
    if done.returncode:
        raise DevError(f"{arguments[0]} failed")


COMMANDS = {
    f.__name__: f
    for f in (up, down, clean, status, env, psql, install, demo, unit, e2e, smoke, soak, test, lint,
              bench)
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python3 -m dev {'|'.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        COMMANDS[sys.argv[1]]()
    except (DevError, TimeoutError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
