"""What processes use, read from /proc."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from dev import process


def private_memory(pid: int) -> int:
    """KiB of memory that no file and no other process backs."""
    found = re.search(r"^RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found.group(1)) if found else 0


def largest_by_kind(postmaster: int, database: str) -> dict[str, tuple[int, int]]:
    """(KiB of private memory, open files) of the largest backend of a database and of polign-store."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for pid in process.descendants(postmaster):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            memory, files = private_memory(pid), len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "polign-store" in command:
            kind = "polign-store"
        elif f" {database} " in command:
            kind = "backend"
        else:
            continue
        found[kind] = (max(found[kind][0], memory), max(found[kind][1], files))
    return dict(found)
