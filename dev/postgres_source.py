"""Builds a Postgres with assertions from Debian's source packages: `PG=17-cassert`, `PG=18-cassert`.

The wheels have no assertions. With them Postgres itself says when an extension forgets a lock or a buffer,
writes outside its memory context or breaks another rule that costs too much to check in production.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dev.paths import DevError, dev_dir
from dev.tools import PG_WHEELS, PgInstall, apt_install, ensure_postgres, say, stamped

# The Debian release whose source package is taken.
SUITES = {"17": "trixie", "18": "forky"}
MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Optimised a little: without it tests take several times as long. Symbols are for the backtraces of
# assertions that fail.
CFLAGS = "-O1 -g"
CONFIGURE = ["--enable-cassert", "--without-icu", "--without-readline", "--without-zlib", f"CFLAGS={CFLAGS}"]
BUILD_PROGRAMS = {"bison": "bison", "flex": "flex", "make": "make", "cc": "gcc", "dpkg-source": "dpkg-dev"}
JOBS = "2"


def ensure_postgres_with_assertions(major: str) -> PgInstall:
    """Postgres and pgvector, compiled at the first call, which takes some minutes."""
    directory = dev_dir() / f"pg{major}-cassert"
    content = " ".join([SUITES[major], *CONFIGURE])
    stamped(directory, content, lambda: make(major, directory))
    return PgInstall(directory / "bin" / "pg_config")


def make(major: str, directory: Path) -> None:
    missing = [package for program, package in BUILD_PROGRAMS.items() if not shutil.which(program)]
    if missing:
        apt_install(missing, "needed to compile Postgres")
    work = dev_dir() / f"pg{major}-cassert-source"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    log = dev_dir() / f"pg{major}-cassert.log"
    say(f"compiling Postgres {major} with assertions; its output goes to {log}")
    # The service user must be able to read what is installed.
    old_umask = os.umask(0o022)
    try:
        with open(log, "wb") as output:
            packages = [f"postgresql-{major}"] + ([] if major in PG_WHEELS else ["pgvector"])
            postgres, *pgvector = fetch(packages, SUITES[major], work, output)
            run(["./configure", f"--prefix={directory}", *CONFIGURE], postgres, output)
            run(["make", "-s", "-j", JOBS, "install"], postgres, output)
            installed = PgInstall(directory / "bin" / "pg_config")
            if pgvector:
                # Not tuned to this machine's processor, as pgvector otherwise is.
                options = [f"PG_CONFIG={installed.pg_config}", "OPTFLAGS="]
                run(["make", "-s", "-j", JOBS, *options, "install"], pgvector[0], output)
            else:
                copy_pgvector(ensure_postgres(major), installed)
    finally:
        os.umask(old_umask)
    shutil.rmtree(work)


def copy_pgvector(wheel: PgInstall, target: PgInstall) -> None:
    """A library for a major version fits each build of it."""
    shutil.copy(wheel.ask("pkglibdir") / "vector.so", target.ask("pkglibdir"))
    for file in (wheel.ask("sharedir") / "extension").glob("vector*"):
        shutil.copy(file, target.ask("sharedir") / "extension")


def fetch(packages: list[str], suite: str, work: Path, output) -> list[Path]:
    """Debian's sources with its patches, through a configuration of apt that is not the system's."""
    for below in ("lists/partial", "cache"):
        (work / below).mkdir(parents=True)
    (work / "sources.list").write_text(f"deb-src [signed-by={KEYRING}] {MIRROR} {suite} main\n")
    configuration = work / "apt.conf"
    configuration.write_text(
        f'Dir::Etc::sourcelist "{work}/sources.list";\nDir::Etc::sourceparts "-";\n'
        f'Dir::State::lists "{work}/lists";\nDir::Cache "{work}/cache";\n'
        'APT::Sandbox::User "root";\n'
    )
    environment = {"APT_CONFIG": str(configuration)}
    run(["apt-get", "update"], work, output, **environment)
    found = []
    for package in packages:
        into = work / package
        into.mkdir()
        run(["apt-get", "source", package], into, output, **environment)
        found += [directory for directory in into.iterdir() if directory.is_dir()]
    return found


def run(command: list[str], directory: Path, output, **environment: str) -> None:
    # What our Makefile exports means something else to that of Postgres.
    inherited = {k: v for k, v in os.environ.items() if k not in ("PROFILE", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        env={**inherited, **environment},
    )
    if done.returncode:
        raise DevError(f"{' '.join(command)} failed; see {output.name}")
