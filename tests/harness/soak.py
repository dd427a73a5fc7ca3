"""How much of the many things that could be tried is tried: `make soak` says more.

How long and from which seed, if they are random; how many of them, if they can be counted.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

SECONDS = "POLIGN_SOAK_SECONDS"
SEED = "POLIGN_SEED"
T = TypeVar("T")


def seconds(usual: float) -> float:
    """How long to go on."""
    return float(os.environ.get(SECONDS) or usual)


def seeds(usual_seconds: float) -> Iterator[int]:
    """Seeds until the time is over; the one of POLIGN_SEED alone if that is set."""
    if os.environ.get(SEED):
        yield int(os.environ[SEED])
        return
    end = time.monotonic() + seconds(usual_seconds)
    for seed in itertools.count(secrets.randbelow(1_000_000_000)):
        if time.monotonic() > end:
            return
        yield seed


def some(of: Sequence[T], step: int) -> Sequence[T]:
    """Each `step`th; in a soak all."""
    return of if os.environ.get(SECONDS) else of[::step]
