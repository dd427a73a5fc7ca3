"""Builds the extension and the store process, and installs them into a Postgres."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from dev.paths import CHECKOUT, DevError
from dev.s3server import S3Server
from dev.tools import PgInstall, ensure_compilers, say

SUPPORTED = ("16", "17", "18")
# All crates but the extension, which only links inside Postgres.
OUTSIDE_POSTGRES = ("--workspace", "--exclude", "polign")


def profile() -> str:
    """Cargo's profile: release, unless PROFILE=dev asks for debug assertions, failpoints and quick builds.

    Commands that test ask for it themselves.
    """
    return os.environ.get("PROFILE") or "release"


def output_dir(target: Path) -> Path:
    return target / ("debug" if profile() == "dev" else profile())


def cargo_target_dir() -> Path:
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--no-deps"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )
    return Path(json.loads(metadata.stdout)["target_directory"])


def cargo(arguments: list[str], **environment: str) -> None:
    done = subprocess.run(["cargo", *arguments], cwd=CHECKOUT, env={**os.environ, **environment})
    if done.returncode:
        raise DevError(f"cargo {' '.join(arguments)} failed")


def extension_arguments(pg: PgInstall) -> tuple[list[str], dict[str, str]]:
    """Cargo's arguments and environment to compile the extension for one Postgres."""
    major = pg.major
    if major not in SUPPORTED:
        raise DevError(f"{pg.pg_config} is Postgres {major}; supported are {', '.join(SUPPORTED)}")
    arguments = ["-p", "polign", "--features", f"polign/pg{major}",
                 "--target-dir", str(extension_target_dir(pg))]
    return arguments, {"PGRX_PG_CONFIG_PATH": str(pg.pg_config)}


def extension_target_dir(pg: PgInstall) -> Path:
    """Each Postgres has one of its own: its bindings would otherwise be generated again at every change.
    """
    target = cargo_target_dir()
    name = f"pg{pg.major}{'-cassert' if pg.assertions else ''}"
    return target if name == "pg18" else target / name


def build(pg: PgInstall) -> None:
    ensure_compilers()
    arguments, environment = extension_arguments(pg)
    command = ["build", "--locked", "--profile", profile()]
    # Not in one command: the store's many crates would be compiled again, with other features, for each
    # Postgres.
    cargo([*command, "-p", "polign-store"])
    cargo([*command, *arguments], **environment)


def unit_tests(arguments: list[str], s3: S3Server) -> None:
    """The tests of the crates that know no Postgres, or of those named by `-p`, with debug assertions."""
    ensure_compilers()
    crates = () if "-p" in arguments else OUTSIDE_POSTGRES
    cargo(["test", "--locked", *crates, *arguments], **s3.client_environment())


def sql_files() -> list[Path]:
    return sorted((CHECKOUT / "sql").glob("polign--*.sql"))


def sql_digest() -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in sql_files())).hexdigest()


def install(pg: PgInstall) -> bool:
    """Copies library, SQL and program into `pg`; returns whether anything changed there."""
    built = output_dir(extension_target_dir(pg))
    extension = pg.ask("sharedir") / "extension"
    files = [
        (built / "libpolign.so", pg.ask("pkglibdir") / "polign.so", 0o755),
        (output_dir(cargo_target_dir()) / "polign-store", pg.ask("bindir") / "polign-store", 0o755),
        (CHECKOUT / "polign.control", extension / "polign.control", 0o644),
    ]
    files += [(f, extension / f.name, 0o644) for f in sql_files()]
    try:
        changed = [install_file(*file) for file in files]
    except PermissionError as error:
        raise DevError(f"cannot write {error.filename}: run `make install` as a user who may") from None
    if any(changed):
        say(f"installed polign into {pg.ask('pkglibdir')}")
    return any(changed)


def install_file(source: Path, target: Path, mode: int) -> bool:
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return False
    # A rename, not a copy over it: a running server has the old file mapped.
    temporary = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, temporary)
    temporary.chmod(mode)
    temporary.replace(target)
    return True
