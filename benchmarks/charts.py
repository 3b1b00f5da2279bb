"""The charts of docs/performance.md, drawn from benchmarks/results whenever the site is built (docs/hooks.py)."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "jaxckpt", "svg.fonttype": "none"})  # the same data gives the same file

import matplotlib.pyplot as plt
from tables import LABELS, newest, runs


def charts() -> dict[str, str]:
    """Each chart as SVG, by file name."""
    case = ("e", 1, "tmpfs")
    (run,) = (run for run in runs() if (run["workload"], run["processes"], run["filesystem"]) == case)
    return {"peers.svg": _peers(run), "planning.svg": _planning(newest("planning-*.json"))}


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def _peers(run: Mapping[str, Any]) -> str:
    """Time of each contender relative to jaxckpt, by operation."""
    operations = [name for name in run["spreads"] if not name.startswith("a step")]
    # Narrow, so that its text can be read on a phone.
    figure, axes = plt.subplots(figsize=(5.5, 1.6 + 0.5 * len(operations)), layout="constrained")
    for place, peer in enumerate(run["contenders"]):
        spreads = {row: run["spreads"][name].get(peer) for row, name in enumerate(operations)}
        ratios = {row: found["times_jaxckpt"] for row, found in spreads.items() if found}
        middles = [middle for _, middle, _ in ratios.values()]
        axes.errorbar(
            middles,
            [row + 0.1 * (place - (len(run["contenders"]) - 1) / 2) for row in ratios],
            xerr=[[m - low for low, m, _ in ratios.values()], [high - m for _, m, high in ratios.values()]],
            fmt="os^Dv<>PX*"[place],
            markersize=5,
            linewidth=1,
            label=LABELS.get(peer, peer),
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g} ×")
    axes.set_yticks(range(len(operations)), operations)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", linewidth=0.3)
    axes.set_xlabel("time ÷ jaxckpt's time (right of 1: jaxckpt is faster):\nmedian and range over rounds")
    axes.set_title(textwrap.fill(f"({run['workload']}) {run['title']}", 40), fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return _svg(figure)


def _planning(result: Mapping[str, Any]) -> str:
    """CPU seconds and memory along each axis of the job's size, both logarithmic, with a line of slope one."""
    rows = [("CPU seconds", "cpu_seconds", 1.0, 0.005), ("peak memory, MiB", "peak_bytes", 1 / 2**20, 0.5)]
    figure, panels = plt.subplots(2, 3, figsize=(11, 6), sharex="col", sharey="row", layout="constrained")
    for column, axis in enumerate(("leaves", "processes", "devices_per_process")):
        varied = [row for row in result["points"] if row["point"] | {axis: 0} == result["base"] | {axis: 0}]
        varied.sort(key=lambda row: row["point"][axis])
        along = [row["point"][axis] for row in varied]
        for panel, (what, key, unit, least) in zip(panels[:, column], rows, strict=True):
            for operation, marker in zip(varied[0]["measured"], "os^", strict=True):
                # A peak that did not rise is drawn at the bottom.
                values = [max(row["measured"][operation][key] * unit, 2 * least) for row in varied]
                panel.plot(along, values, marker=marker, label=operation)
            end = varied[-1]["measured"]["save"][key] * unit
            panel.plot(along, [end * count / along[-1] for count in along], color="0.6", linestyle=":", label="linear")
            panel.axhline(result["targets"][key] * unit, color="0.3", linewidth=0.8, linestyle="--", label="target")
            panel.set(xscale="log", yscale="log")
            panel.set_ylim(bottom=least)
            panel.set_xticks(along, [f"{count:,}" for count in along], minor=False)
            panel.minorticks_off()
            if not column:
                panel.set_ylabel(what)
        panels[1, column].set_xlabel(axis.replace("_", " "))
    panels[0, 0].legend(fontsize="small")
    figure.suptitle("Planning in one process: 16,000 leaves on 4,096 processes × 4 devices, each varied alone")
    return _svg(figure)
