"""Starting, watching and ending service processes by their pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from dev.paths import service_user

# Children of this process, kept so that they can be reaped: a zombie would look alive.
_children: list[subprocess.Popen] = []


def as_service_user() -> dict:
    """Arguments for subprocess that make a command run as the service user."""
    user = service_user()
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def service_environment(**extra: str) -> dict[str, str]:
    """An environment without the caller's Postgres and AWS settings, so that only ours count."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "AWS_", "POLIGN_"))}
    user = service_user()
    if user is not None:
        kept["HOME"] = user.pw_dir
        kept["USER"] = kept["LOGNAME"] = user.pw_name
    return {**kept, **extra}


def spawn(argv: list, log: Path, directory: Path, **environment: str) -> int:
    """Starts a service that outlives this process, its output appended to `log`; returns its pid."""
    with open(log, "ab") as output:
        child = subprocess.Popen(
            [str(a) for a in argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=service_environment(**environment),
            start_new_session=True,
            **as_service_user(),
        )
    _children.append(child)
    return child.pid


def run_as_service(argv: list, directory: Path | str = "/", **options) -> subprocess.CompletedProcess:
    """Runs a command to its end as the service user, from a directory that this user can enter."""
    return subprocess.run(
        [str(a) for a in argv],
        cwd=directory,
        env=service_environment(),
        stdin=subprocess.DEVNULL,
        **as_service_user(),
        **options,
    )


def alive(pid: int | None, marker: str = "") -> bool:
    """Whether `pid` runs and its command line contains `marker` (pids are reused)."""
    _children[:] = [child for child in _children if child.poll() is None]
    if not pid:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    # An exiting process loses its command line, and its first thread, before its sockets and files.
    return (state != "Z" or threads > 1) and (not command or marker in command)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def wait_until(condition, seconds: float, what: str, interval: float = 0.05):
    """Polls until `condition()` is true and returns its value; TimeoutError names `what`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} after {seconds:g} s")
        time.sleep(interval)


def end(pid: int | None, marker: str = "", sig: int = signal.SIGTERM, seconds: float = 30) -> None:
    """Signals one process and waits until it is gone; SIGKILL when it does not go by itself."""
    if not alive(pid, marker):
        return
    os.kill(pid, sig)
    try:
        wait_until(lambda: not alive(pid, marker), seconds, f"process {pid} still runs")
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid, marker), 10, f"process {pid} still runs")


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that nobody listens on."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
        return ports


def port_free(port: int) -> bool:
    with socket.socket() as listener:
        # As servers do, so that connections in TIME_WAIT do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
