"""What the benchmarks have in common beside the figures: where they ran, and the files that the result goes to.

The lower half is of runs of peers.py: {"workload", "pairs": {peer: {"seconds": {operation: {contender: [a number a
round]}}, ...}}, ...}.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import jaxckpt

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
LIBRARIES = "jax jaxlib numpy tensorstore orbax-checkpoint torch safetensors".split()
OURS = "jaxckpt"

console = Console(width=None if sys.stdout.isatty() else 150)


def parser(about: str) -> argparse.ArgumentParser:
    """The arguments that all take; `about` is the script's docstring."""
    made = argparse.ArgumentParser(description=about.partition("\n")[0])
    made.add_argument("--dir", type=Path, help="folder to write below; by default a temporary one on the disk")
    made.add_argument("--json", type=Path, help="where the result goes; by default results/<script>-<date>.json")
    return made


def surroundings(folder: Path) -> dict[str, Any]:
    """Where and when it runs; `folder` is where it writes."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "filesystem": filesystem(folder),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), "jaxckpt": jaxckpt.__version__}
        | {name: found for name in LIBRARIES if (found := _version(name))},
    }


def write(benchmark: str, result: dict[str, Any], path: Path | None) -> None:
    """Write a result, with its surroundings in it, and say where it is."""
    machine, where = result["machine"], result["filesystem"]
    known = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {where}; {known}")
    out = path or RESULTS / f"{benchmark}-{result['date']}{'-tmpfs' if where == 'tmpfs' else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": benchmark, **result}, indent=1) + "\n")
    console.print(f"written to {out}", soft_wrap=True)


def filesystem(folder: Path) -> str:
    """Type of the file system that a folder is on."""
    best = ("", "unknown")
    for line in _lines("/proc/mounts"):
        _, point, kind, *_ = line.split()
        if f"{folder.resolve()}/".startswith(f"{point.rstrip('/')}/") and len(point) > len(best[0]):
            best = (point, kind)
    return best[1]


def _machine() -> dict[str, Any]:
    cpuinfo = _lines("/proc/cpuinfo")
    return {
        "cpu": next((line.partition(":")[2].strip() for line in cpuinfo if "model name" in line), platform.processor()),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": os.getloadavg()[0],
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # torch and safetensors are there for peers.py only
        return None


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


# Runs of peers.py -----------------------------------------------------------------------------------------


def summed_up(run: dict[str, Any]) -> dict[str, Any]:
    """The run, with the spread of each figure, and of its ratio to ours within a round. Ours is of all pairs."""
    samples: dict[str, dict[str, dict[str, list[float]]]] = {}
    for peer, pair in run["pairs"].items():
        for operation, seconds in pair.get("seconds", {}).items():
            of, cpu_seconds = samples.setdefault(operation, {}), pair["cpu_seconds"][operation]
            for name in (OURS, peer):
                found = of.setdefault(name, {"seconds": [], "cpu_seconds": [], "times_jaxckpt": []})
                found["seconds"] += seconds.get(name, [])
                found["cpu_seconds"] += cpu_seconds.get(name, [])
                found["times_jaxckpt"] += [
                    other / ours for other, ours in zip(seconds.get(name, []), seconds[OURS], strict=False)
                ]
    spreads = {
        operation: {
            name: {what: _spread(one) for what, one in found.items()} for name, found in of.items() if found["seconds"]
        }
        for operation, of in samples.items()
    }
    return {**run, "spreads": spreads}


def _spread(samples: list[float]) -> dict[str, float]:
    return {"min": min(samples), "median": statistics.median(samples), "max": max(samples)}


def heading(run: dict[str, Any]) -> str:
    processes = f"{run['processes']} processes" if run["processes"] > 1 else "one process"
    return f"({run['workload']}) {workload(run)}, {run['filesystem']}, {processes}"


def workload(run: dict[str, Any]) -> str:
    return next((pair["title"] for pair in run["pairs"].values() if "title" in pair), "failed")


def show(run: dict[str, Any]) -> None:
    """Milliseconds, and how many times ours: medians over rounds."""
    for peer, pair in run["pairs"].items():
        if "failed" in pair:
            console.print(f"[red]({run['workload']}) {run['filesystem']}: {peer}: {pair['failed']}")
    table = Table(title=f"{heading(run)}: ms (× jaxckpt)")
    table.add_column("")
    took_part = [OURS, *(peer for peer, pair in run["pairs"].items() if "seconds" in pair)]
    for contender in took_part:
        table.add_column(contender, justify="right")

    def cell(contender: str, found: dict[str, Any] | None) -> str:
        if not found:
            return ""
        ratio = f" ({_short(found['times_jaxckpt']['median'])})" if contender != OURS else ""
        return _short(found["seconds"]["median"] * 1e3) + ratio

    for operation, found in run["spreads"].items():
        table.add_row(operation, *(cell(contender, found.get(contender)) for contender in took_part))
        if operation == "open":
            cpu = {contender: one["cpu_seconds"]["median"] * 1e3 for contender, one in found.items()}
            table.add_row("open, CPU ms", *(_short(cpu[one]) if one in cpu else "" for one in took_part))
    for label, key, of in (
        ("one leaf, KiB read", "one_leaf_bytes_read", lambda found: found / 1024),
        ("files", "files", lambda found: found["count"]),
        ("MiB stored", "files", lambda found: found["bytes"] / (1 << 20)),
    ):
        counts = {name: of(found) for pair in run["pairs"].values() for name, found in pair.get(key, {}).items()}
        table.add_row(label, *(_short(counts[one]) if one in counts else "" for one in took_part))
    console.print(table)
    over_read = next((pair["over_read"] for pair in run["pairs"].values() if pair.get("over_read")), {})
    for layout, by_process in over_read.items():
        console.print(f"{OURS} reads onto {layout}: {', '.join(map(_short, by_process))} × what each process wants")


def _short(number: float) -> str:
    """Three figures, or all that stand before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def draw(runs: list[dict[str, Any]]) -> None:
    """A picture a run: how many times ours each contender took, operation by operation."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "jaxckpt"  # the same figures give the same file
    PICTURES.mkdir(exist_ok=True)
    for run in runs:
        operations = [name for name in run["spreads"] if not name.startswith("a step")]
        peers = [name for name, pair in run["pairs"].items() if "seconds" in pair]
        figure, axes = plt.subplots(figsize=(9, 0.8 + 0.55 * len(operations)), layout="constrained")
        for place, peer in enumerate(peers):
            found = {row: run["spreads"][name].get(peer) for row, name in enumerate(operations)}
            ratios = {row: one["times_jaxckpt"] for row, one in found.items() if one}
            middle = [one["median"] for one in ratios.values()]
            axes.errorbar(
                middle,
                [row + 0.1 * (place - (len(peers) - 1) / 2) for row in ratios],
                xerr=[
                    [m - one["min"] for m, one in zip(middle, ratios.values(), strict=True)],
                    [one["max"] - m for m, one in zip(middle, ratios.values(), strict=True)],
                ],
                fmt="os^Dv<>PX"[place],
                markersize=5,
                linewidth=1,
                label=peer,
            )
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_yticks(range(len(operations)), operations)
        axes.invert_yaxis()
        axes.grid(axis="x", which="both", linewidth=0.3)
        axes.set_xlabel("times jaxckpt; left of 1 is faster than it; medians of ratios within a round, and their range")
        axes.set_title(heading(run), fontsize="medium")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
        path = PICTURES / f"peers-{run['workload']}-{run['filesystem']}-{run['processes']}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        console.print(f"drawn in {path}")
