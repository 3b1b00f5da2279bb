"""Shared by the benchmarks: the description of the machine, the result files, and the summary of a run of peers.py.

A run is {"workload", "groups": [{"seconds": {operation: {contender: [a number per round]}}, ...}], ...}.
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
LIBRARIES = "jax jaxlib numpy tensorstore orbax-checkpoint torch safetensors".split()
OURS = "jaxckpt"

console = Console(width=None if sys.stdout.isatty() else 150)


def parser(about: str) -> argparse.ArgumentParser:
    """A parser with the arguments of all benchmarks; `about` is the script's docstring."""
    made = argparse.ArgumentParser(description=about.partition("\n")[0])
    made.add_argument("--dir", type=Path, help="parent of the folder to write to; default: the temporary folder")
    made.add_argument("--json", type=Path, help="file for the result; default: results/<script>-<date>.json")
    return made


def surroundings(folder: Path) -> dict[str, Any]:
    """The date, the machine, the versions, and the file system of the folder that a benchmark writes to."""
    return {
        "date": today(),
        "filesystem": filesystem(folder),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), "jaxckpt": jaxckpt.__version__}
        | {name: found for name in LIBRARIES if (found := _version(name))},
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def place(benchmark: str, result: dict[str, Any], path: Path | None) -> Path:
    """The file for a result. If no path is given, its name contains the date."""
    return path or RESULTS / f"{benchmark}-{result['date']}.json"


def write(benchmark: str, result: dict[str, Any], path: Path | None) -> None:
    """Write a result, which includes its surroundings, and print the path."""
    machine, where = result["machine"], result["filesystem"]
    known = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {where}; {known}")
    out = place(benchmark, result, path)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(compact({"benchmark": benchmark, **result}) + "\n")
    console.print(f"written to {out}", soft_wrap=True)


def compact(value: Any, indent: str = "") -> str:
    """JSON with each value on one line if it fits."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent + line) <= 160 or not isinstance(value, dict | list):
        return line
    inner = f"{indent} "
    if isinstance(value, dict):
        items, ends = [f"{json.dumps(key)}: {compact(item, inner)}" for key, item in value.items()], "{}"
    else:
        items, ends = [compact(item, inner) for item in value], "[]"
    return f"{ends[0]}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{ends[1]}"


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
    except PackageNotFoundError:  # torch and safetensors are installed only for peers.py
        return None


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


# Runs of peers.py -----------------------------------------------------------------------------------------


def summed_up(run: dict[str, Any]) -> dict[str, Any]:
    """A run without its samples: [minimum, median, maximum] of each figure, and of its ratio to jaxckpt's in a round.

    The samples of jaxckpt come from all groups.
    """
    samples: dict[str, dict[str, dict[str, list[float]]]] = {}
    groups = run["groups"]
    for group in groups:
        for operation, seconds in group.get("seconds", {}).items():
            for name, times in seconds.items():
                found = samples.setdefault(operation, {}).setdefault(name, {})
                # A slow contender takes part only in the first rounds, or only in the round that is not counted.
                first = group["first_round"][operation]
                own_times = first[OURS] if times == first.get(name) else seconds[OURS]
                ratios = [other / ours for other, ours in zip(times, own_times, strict=False)]
                for what, new in (
                    ("seconds", times),
                    ("cpu_seconds", group["cpu_seconds"][operation][name]),
                    ("times_jaxckpt", ratios),
                ):
                    found.setdefault(what, []).extend(new)
    names = [name for of in samples.values() for name in of if name != OURS]
    return {
        **{name: value for name, value in run.items() if name != "groups"},
        **next(({key: group[key] for key in ("title", "bytes")} for group in groups if "title" in group), {}),
        "contenders": list(dict.fromkeys(names)),
        "failed": "; ".join(group["failed"] for group in groups if group["failed"]),
        "spreads": {
            operation: {
                name: {what: spread(one) for what, one in found.items()} | {"rounds": len(found["seconds"])}
                for name, found in of.items()
            }
            for operation, of in samples.items()
        },
        **{
            key: {name: count for group in groups for name, count in group.get(key, {}).items()}
            for key in ("one_leaf_bytes_read", "files")
        },
        "over_read": next((group["over_read"] for group in groups if group.get("over_read")), {}),
    }


def spread(samples: list[float]) -> list[float]:
    """[minimum, median, maximum], to four digits."""
    return [float(f"{figure:.4g}") for figure in (min(samples), statistics.median(samples), max(samples))]


def show(run: dict[str, Any]) -> None:
    """Print medians over rounds: milliseconds, and the ratio to jaxckpt's time."""
    if run["failed"]:
        console.print(f"[red]({run['workload']}) {run['filesystem']}: {run['failed']}")
    if not run["spreads"]:
        return
    processes = f"{run['processes']} processes" if run["processes"] > 1 else "one process"
    heading = f"({run['workload']}) {run['title']}, {run['filesystem']}, {processes}"
    table = Table(title=f"{heading}: ms (× jaxckpt)")
    table.add_column("")
    took_part = [OURS, *run["contenders"]]
    for contender in took_part:
        table.add_column(contender, justify="right")

    def cell(contender: str, found: dict[str, Any] | None) -> str:
        if not found:
            return ""
        ratio = f" ({_short(found['times_jaxckpt'][1])})" if contender != OURS else ""
        return _short(found["seconds"][1] * 1e3) + ratio

    for operation, found in run["spreads"].items():
        table.add_row(operation, *(cell(contender, found.get(contender)) for contender in took_part))
        if operation == "open":
            cpu = {contender: one["cpu_seconds"][1] * 1e3 for contender, one in found.items()}
            table.add_row("open, CPU ms", *(_short(cpu[one]) if one in cpu else "" for one in took_part))
    for label, key, of in (
        ("one leaf, KiB read", "one_leaf_bytes_read", lambda found: found / 1024),
        ("files", "files", lambda found: found["count"]),
        ("MiB stored", "files", lambda found: found["bytes"] / (1 << 20)),
    ):
        counts = {name: of(found) for name, found in run[key].items()}
        table.add_row(label, *(_short(counts[one]) if one in counts else "" for one in took_part))
    console.print(table)
    for layout, by_process in run["over_read"].items():
        console.print(f"{OURS}, bytes read ÷ needed by each process, {layout}: {', '.join(map(_short, by_process))}")


def _short(number: float) -> str:
    """Three digits, or all digits before the decimal point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
