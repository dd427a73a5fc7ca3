"""The owner objects of a store: which writer ids there are, and what lies under each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from dev.s3 import S3Client


@dataclass
class Owners:
    """What lies under one writer id."""

    nonces: dict[str, dict] = field(default_factory=dict)
    """Nonces, and what their objects say."""
    heirs: dict[str, dict] = field(default_factory=dict)
    """Writer ids under which copies went on."""
    others: set[str] = field(default_factory=set)


def owners(client: S3Client, bucket: str, prefix: str) -> dict[str, Owners]:
    """By writer id."""
    found: dict[str, Owners] = {}
    for key in client.list(bucket, f"{prefix}/owner/"):
        writer, name = key.rsplit("/", 2)[1:]
        own = found.setdefault(writer, Owners())
        if len(name) == 32:
            own.nonces[name] = json.loads(client.get(bucket, key))
        elif name.startswith("heir-"):
            own.heirs[name.removeprefix("heir-")] = json.loads(client.get(bucket, key))
        else:
            own.others.add(name)
    return found
