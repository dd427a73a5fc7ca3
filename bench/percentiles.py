"""What is said of many latencies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 95, 99)


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Percentiles as they were measured: none is interpolated, so a p99 is a latency that somebody had."""
    values = np.asarray(milliseconds, float)
    if not len(values):
        return {"count": 0}
    found = {f"p{p}": float(np.percentile(values, p, method="higher")) for p in PERCENTILES}
    return {"count": len(values), "mean": float(values.mean()), **found, "max": float(values.max())}


def line(found: dict[str, float]) -> str:
    return " ".join(f"{name} {found[name]:.2f}" for name in ("p50", "p95", "p99")) + " ms"
