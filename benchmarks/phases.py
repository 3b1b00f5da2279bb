"""The time of each phase of a save and of a restore.

    python benchmarks/phases.py [--workload a] [--rounds 5] [--dir /dev/shm] [--quick]

A save reports its own phases (`SaveInfo.phase_seconds`). For a restore, onto the mesh that was saved, the benchmark
times the functions of TIMED; the rest is reading. It fails if one of them is not called. Prints medians over rounds, in
milliseconds, after a warm-up round. Freed memory is kept, and memory is touched before each save; see steady.py.
"""

from __future__ import annotations

import steady

steady.begin()

import contextlib
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import report
import workloads
from rich.table import Table

import jaxckpt
from jaxckpt._restore import match, placement, restore, wants

TIMED: tuple[tuple[Any, str, str], ...] = (
    (restore, "source_at", "open"),
    (restore, "resolve", "match"),
    (restore, "plan_wants", "plan"),
    (wants, "plan_read", "plan"),
    (placement.LeafBuilder, "deliver", "place"),
    (placement.LeafBuilder, "create_unread_leaves", "place"),
    (match.Assembly, "assemble", "assemble"),
)


@contextlib.contextmanager
def timed(places: tuple[tuple[Any, str, str], ...], laps: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of functions, each given as (module, name, phase)."""
    originals = [getattr(module, name) for module, name, _ in places]
    uncalled = {name for _, name, _ in places}

    def timing(call: Any, name: str, phase: str) -> Any:
        def timed_call(*args: Any, **named: Any) -> Any:
            uncalled.discard(name)
            begun = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                laps[phase] = laps.get(phase, 0.0) + time.perf_counter() - begun

        return timed_call

    for (module, name, phase), original in zip(places, originals, strict=True):
        setattr(module, name, timing(original, name, phase))
    try:
        yield
        if uncalled:
            raise SystemExit(f"these timed functions were not called: {sorted(uncalled)}")
    finally:
        for (module, name, _), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def restore_phases(path: Path, wanted: Any) -> dict[str, float]:
    laps: dict[str, float] = {}
    begun = time.perf_counter()
    with timed(TIMED, laps):
        restored = jaxckpt.restore(path, wanted)
    returned = time.perf_counter()
    jax.block_until_ready(restored)
    laps["wait for the devices"] = time.perf_counter() - returned
    total = time.perf_counter() - begun
    return {**laps, "read, and the rest": total - sum(laps.values()), "total": total}


def measure(key: str, rounds: int, folder: Path, *, quick: bool) -> dict[str, dict[str, list[float]]]:
    workload = workloads.workload(key, quick=quick)
    tree, wanted = workload.place(), workload.wanted(workload.layouts[0])
    found: dict[str, dict[str, list[float]]] = {"save": {}, "restore": {}}
    for number in range(rounds + 1):
        shutil.rmtree(folder / "ckpt", ignore_errors=True)
        gc.collect()
        steady.touch_memory(workload.nbytes)
        info = jaxckpt.save(folder / "ckpt", tree)
        phases = {
            "save": {**info.phase_seconds, "total": info.seconds},
            "restore": restore_phases(folder / "ckpt", wanted),
        }
        if number:
            for verb, laps in phases.items():
                for phase, seconds in laps.items():
                    found[verb].setdefault(phase, []).append(seconds)
    return found


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--workload", choices=workloads.KEYS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small trees: checks only that it runs")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for key in arguments.workload or workloads.KEYS:
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="phases.") as name:
            result[key] = measure(key, arguments.rounds, Path(name), quick=arguments.quick)
            surroundings = report.surroundings(Path(name))
        for verb, phases in result[key].items():
            table = Table(title=f"({key}) {verb}, medians of {arguments.rounds} rounds")
            for column in ("phase", "ms"):
                table.add_column(column, justify="right" if column == "ms" else "left")
            for phase, seconds in phases.items():
                table.add_row(phase, f"{statistics.median(seconds) * 1e3:.1f}")
            report.console.print(table)
    medians = {
        key: {
            verb: {phase: float(f"{statistics.median(seconds):.4g}") for phase, seconds in phases.items()}
            for verb, phases in verbs.items()
        }
        for key, verbs in result.items()
    }
    report.write("phases", {"rounds": arguments.rounds, **surroundings, "median_seconds": medians}, arguments.json)


if __name__ == "__main__":
    main()
