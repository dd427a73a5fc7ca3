"""Draws the curves of results, as SVG and PNG beside their JSON files.

Of compare: recall against queries a second; of s3: recall against milliseconds of a warm query; of load: rate
against latency, several files in one picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display

from matplotlib import pyplot  # noqa: E402

SIZE = (7, 4.5)


def compare(axes, report: dict) -> None:
    for engine, figures in report["results"].items():
        points = sorted(figures["points"], key=lambda p: p["recall"])
        axes.plot([p["recall"] for p in points], [p["qps"] for p in points], marker="o", label=engine)
    axes.set(xlabel="recall@10", ylabel="queries/s, one client", yscale="log")


def s3(axes, report: dict) -> None:
    for engine, figures in report["results"].items():
        if "sweep" not in figures:
            continue
        points = pareto([(p["recall"], p["ms"]) for p in figures["sweep"]])
        axes.plot(*zip(*points, strict=True), marker="o", label=engine)
    axes.set(xlabel="recall@10", ylabel="ms of a warm query, one client", yscale="log")


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both recall and time."""
    best: list[tuple[float, float]] = []
    for recall, ms in sorted(points, key=lambda p: (-p[0], p[1])):
        if not best or ms < best[-1][1]:
            best.append((recall, ms))
    return best[::-1]


def load(axes, report: dict) -> None:
    results, options = report["results"], report["options"]
    # Of a rate that was tried twice, the second.
    steps = {step["rate"]: step["latency_ms"] for step in results["steps"] if step["latency_ms"]["count"]}
    rates = sorted(steps)
    label = f"{results['engine']}, {results['setting']}"
    (line,) = axes.plot(rates, [steps[rate]["p99"] for rate in rates], marker="o",
                        label=f"{label}: p99, knee {results['knee']:.0f}/s")
    axes.plot(rates, [steps[rate]["p50"] for rate in rates], linestyle=":", color=line.get_color(),
              label=f"{label}: p50")
    axes.axhline(options["p99"], color="gray", linewidth=0.8)
    axes.set(xlabel="searches/s that arrive", ylabel="ms from when it was due", yscale="log", xscale="log")


DRAW = {"compare": compare, "s3": s3, "load": load}


def title(report: dict) -> str:
    """What the figures are of; on a second line, why they may be worth little."""
    data, software = report["data"], report["software"]
    lines = [f"{data['name']}, {data['rows']:,} x {data['dims']}, commit {software['commit']}"]
    doubts = [] if report["quiet"] else ["on a busy machine"]
    if software["build_profile"] != "release":
        doubts.append(f"built with PROFILE={software['build_profile']}")
    return "\n".join([*lines, *([", ".join(doubts)] if doubts else [])])


def main() -> None:
    parser = argparse.ArgumentParser(prog='make bench T="curves"', description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="JSON of one benchmark; several of load")
    options = parser.parse_args()
    reports = [json.loads(file.read_text()) for file in options.files]
    kinds = {report["benchmark"] for report in reports}
    if len(kinds) > 1 or len(reports) > 1 and kinds != {"load"} or not kinds <= DRAW.keys():
        parser.error(f"one file of {', '.join(DRAW)}, or several of load")
    figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
    for report in reports:
        DRAW[report["benchmark"]](axes, report)
    axes.set_title(title(reports[0]), fontsize="medium")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    for suffix in (".svg", ".png"):
        figure.savefig(options.files[0].with_suffix(suffix), dpi=150)
        print(options.files[0].with_suffix(suffix))


if __name__ == "__main__":
    main()
