"""Where the development tooling keeps things, and as whom it runs services.

Postgres refuses to run as root. As root, everything that the service user must reach therefore lies
under /var/tmp, and services run as `postgres`; otherwise all of it is `.dev` in the checkout.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
SERVICE_USER = "postgres"
PG_VERSIONS = ("16", "18", "17-cassert", "18-cassert")
"""Major versions; with -cassert, compiled with assertions."""


class DevError(Exception):
    """A problem that the user can act on; printed without a traceback."""


def is_root() -> bool:
    return os.geteuid() == 0


def dev_dir() -> Path:
    """The directory for everything downloaded, built or run; created if it does not exist."""
    override = os.environ.get("POLIGN_DEV_DIR")
    if override:
        directory = Path(override).resolve()
    elif is_root():
        name = hashlib.sha256(str(CHECKOUT).encode()).hexdigest()[:8]
        directory = Path("/var/tmp") / f"polign-{name}"
    else:
        directory = CHECKOUT / ".dev"
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid():
        raise DevError(f"{directory} belongs to another user; set POLIGN_DEV_DIR to a directory of your own")
    return directory


def pg_version() -> str:
    """The Postgres asked for by PG, one of PG_VERSIONS; 18 is the default."""
    version = os.environ.get("PG") or "18"
    if version not in PG_VERSIONS:
        raise DevError(f"PG={version}: known are {', '.join(PG_VERSIONS)}")
    return version


def service_user() -> pwd.struct_passwd | None:
    """Whom services run as when we are root; None when they run as ourselves."""
    if not is_root():
        return None
    try:
        return pwd.getpwnam(SERVICE_USER)
    except KeyError:
        subprocess.run(
            ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent",
             "--shell", "/bin/sh", SERVICE_USER],
            check=True,
        )
        return pwd.getpwnam(SERVICE_USER)


def service_directory(path: Path) -> Path:
    """Creates a directory that only the service user can enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    give_to_service_user(path)
    return path


def give_to_service_user(path: Path) -> None:
    user = service_user()
    if user:
        os.chown(path, user.pw_uid, user.pw_gid)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only the service user (and root) can read: it is never readable in between."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    give_to_service_user(path)
