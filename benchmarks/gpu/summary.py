"""The lines of figures.json to read first. This module imports only the standard library."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

Figures = dict[str, dict[str, Any]]


def problems(figures: Figures, name: str) -> list[str]:
    """Why a section did not run or did not end well; empty if all is well."""
    section = figures.get(name, {"not run": "the run ended before it"})
    return [f"{what}: {section[what]}" for what in ("error", "not run") if what in section]


def summary(figures: Figures, failed: list[str]) -> Iterator[str]:
    for what, names in {
        "checks that failed or did not run": failed,
        "sections with errors": [name for name, section in figures.items() if "error" in section],
        "not run": [name for name, section in figures.items() if "not run" in section],
    }.items():
        yield f"{what}: {', '.join(names) or 'none'}"
    for name in figures:
        yield from (f"  {name}: {problem[:300]}" for problem in problems(figures, name))
    if tests := figures.get("tests", {}).get("counts"):
        yield f"tests: {', '.join(f'{count} {what}' for what, count in tests.items())}"
        yield from (f"  {line}" for line in figures["tests"]["failed"])
    if steps := figures.get("two processes", {}).get("steps"):
        yield f"two processes: {'; '.join(steps)}"
    yield from _limits(figures)
    yield from _first_saves(figures)
    for where in ("large in memory", "small in memory", "large on disk"):
        yield from _in_turn(where, figures)
    yield from _settings(figures)
    yield from _rates("small leaves alone", "us_per_leaf", "µs a leaf", figures)
    yield from _rates("model files", "gib_s", "GiB/s", figures)
    yield from _rates("digest", "gb_s", "GB/s", figures)


def _of(figures: Figures, section: str, name: str, what: str) -> float | None:
    return (figures.get(section, {}).get(name) or {}).get(what)


def _best(laps: list[float]) -> float:
    return min(laps[1:] or laps)


def _rates(section: str, what: str, unit: str, figures: Figures) -> Iterator[str]:
    values = {
        name: _of(figures, section, name, what) for name, x in figures.get(section, {}).items() if type(x) is dict
    }
    if rates := [f"{name} {value}" for name, value in values.items() if value is not None]:
        yield f"{section}, {unit}: {'; '.join(rates)}"


def _limits(figures: Figures) -> Iterator[str]:
    yield from _rates("link", "gib_s", "GiB/s", figures)
    yield from _rates("floor of a save", "gib_s", "GiB/s", figures)
    overlap = figures.get("overlap", {})
    if overlap.get("copy_ms"):
        share = overlap.get("both_ms", 0) / overlap["copy_ms"]
        yield f"overlap: {share:.0%} of the copies ({overlap['copy_ms']} ms) ran during training steps"


def _first_saves(figures: Figures) -> Iterator[str]:
    if laps := figures.get("first saves", {}).get("laps"):
        first, *others = laps["save_async_returns_s"]
        n_bytes = figures["first saves"]["bytes"]
        yield f"save_async returns: the first after {first} s, then {others} s, of {n_bytes / 2**30:.2f} GiB"


def _in_turn(where: str, figures: Figures) -> Iterator[str]:
    section = figures.get(where, {})
    alone = section.get("step_alone_ms")
    for name, laps in section.items():
        if not (isinstance(laps, dict) and "save_gib_s" in laps):
            continue
        floor = "floor of a save" if where == "large in memory" else ""  # small leaves and disks have other limits
        save, restore = _of(figures, floor, "save", "gib_s"), _of(figures, floor, "restore from pinned", "gib_s")
        step = statistics.median(laps["step_median_ms"][1:] or laps["step_median_ms"])
        yield (
            f"{where}: {name}: {_speed('save', laps, save)}; {_speed('restore', laps, restore)};"
            f" save_async returns after {_best(laps['save_async_returns_s'])} s,"
            f" ends after {_best(laps['save_async_ends_s'])} s; step {step} ms, {step / alone - 1:+.0%}"
        )


def _speed(what: str, laps: dict[str, Any], floor: float | None) -> str:
    rate, seconds = laps[f"{what}_gib_s"], laps[f"{what}_s"]
    share = f", {rate / floor:.2f} of the floor" if floor else ""
    return f"{what} {_best(seconds)} s (first {seconds[0]}), {rate} GiB/s{share}"


def _settings(figures: Figures) -> Iterator[str]:
    for name, laps in figures.get("settings", {}).items():
        if isinstance(laps, dict):
            times = {what: _best(laps[what]) for what in ("save_s", "restore_s", "save_async_ends_s")}
            yield f"settings: {name}: {', '.join(f'{what} {value}' for what, value in times.items())}"
