"""What the benchmarks have in common beside the figures: where they ran, and the file that the result goes to."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

import jaxckpt

RESULTS = Path(__file__).parent / "results"

console = Console(width=None if sys.stdout.isatty() else 120)


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
        "filesystem": _filesystem(folder),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), "jaxckpt": jaxckpt.__version__}
        | {name: version(name) for name in ("jax", "jaxlib", "numpy", "tensorstore", "orbax-checkpoint")},
    }


def write(benchmark: str, result: dict[str, Any], path: Path | None) -> None:
    """Write a result, with its surroundings in it, and say where it is."""
    machine, where = result["machine"], result["filesystem"]
    known = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {where}; {known}")
    out = path or RESULTS / f"{benchmark}-{result['date']}{'-tmpfs' if where == 'tmpfs' else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": benchmark, **result}, indent=1) + "\n")
    console.print(f"written to {out}")


def _machine() -> dict[str, Any]:
    cpuinfo = _lines("/proc/cpuinfo")
    return {
        "cpu": next((line.partition(":")[2].strip() for line in cpuinfo if "model name" in line), platform.processor()),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": os.getloadavg()[0],
    }


def _filesystem(folder: Path) -> str:
    """Type of the file system that a folder is on."""
    best = ("", "unknown")
    for line in _lines("/proc/mounts"):
        _, point, kind, *_ = line.split()
        if f"{folder.resolve()}/".startswith(f"{point.rstrip('/')}/") and len(point) > len(best[0]):
            best = (point, kind)
    return best[1]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
