"""Steps in a run's directory: names of their folders, which are published, and which step a path refers to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.manifest import decode
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.records import MAX_INTEGER
from jaxckpt._options import require_whole_number
from jaxckpt._store.storage_errors import UNLISTABLE
from jaxckpt._store.store import Store
from jaxckpt.errors import DataError, InputError, NotACheckpointError, StorageError

RUN = "_run"
"""The folder in a run's directory for notes on the run: leases, pins, whether the run has ended, and which metric
decides "best"."""

BEST = "best.json"
ENDED = "ended.json"
PIN = "pin-"

TRASH = "_trash"
"""The folder in a run's directory that `Checkpointer(trash=True)` moves steps into."""

Mode = Literal["min", "max"]


def require_step(step: object) -> int:
    """The number of a step as a plain int. Raises InputError for anything else."""
    return require_whole_number(step, "step", minimum=0, maximum=MAX_INTEGER)


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"{step:08d}"


def is_step(name: str) -> bool:
    """Whether a step's folder can have this name."""
    # A number with more digits could exceed the largest step and would then always be the newest.
    return re.fullmatch(r"\d{8}|[1-9]\d{8,18}", name, re.ASCII) is not None and int(name) <= MAX_INTEGER


def require_no_checkpoint(directory: Store) -> None:
    """Raise InputError if a directory of steps is itself a checkpoint."""
    if directory.read(MANIFEST) is not None:
        raise InputError(f"{directory.url} is a checkpoint; give the directory of a Checkpointer, which holds steps")


def is_link(step: Store) -> bool:
    """Whether a step's folder is a symbolic link. Its files may belong to another run, so they are never changed."""
    return step.link_target() is not None


def step_folders(directory: Store, *, above: int = -1) -> tuple[list[int], list[int]]:
    """The steps whose folder holds a checkpoint, and those whose folder holds none, oldest first, by one listing.

    Only steps above the number `above` are checked. Raises StorageError if one of them cannot be, because a step that
    cannot be read must not count as missing.
    """
    found = directory.folders(lambda name: is_step(name) and int(name) > above)
    steps: dict[bool, list[int]] = {True: [], False: []}
    for name in sorted(found, key=int):
        steps[_require_known(found[name])].append(int(name))
    return steps[True], steps[False]


def is_published(directory: Store, step: int) -> bool:
    """Whether a step's folder holds a checkpoint. Raises StorageError."""
    name = step_name(step)
    return _require_known(directory.folders(lambda found: found == name).get(name, False))


def _require_known(published: bool | StorageError) -> bool:
    if isinstance(published, StorageError):
        raise published
    return published


def best_of(
    metrics: Iterable[tuple[int, Mapping[str, float | None]]], metric: str, mode: Mode, count: int = 1
) -> list[int]:
    """The `count` steps with the best values of a metric, best first. Among equal values, the newest step wins."""
    sign = -1.0 if mode == "min" else 1.0
    ranked = [(sign * value, step) for step, values in metrics if (value := values.get(metric)) is not None]
    return [step for _, step in sorted(ranked, reverse=True)[:count]]


def pins(run: Store) -> dict[str, int]:
    """The pinned steps of a run, by name."""
    found = (name.removeprefix(PIN).partition("-") for name in run.child(RUN).names() if name.startswith(PIN))
    return {name: int(step) for step, _, name in found if is_step(step)}


# Paths ----------------------------------------------------------------------------------------------------


def resolve_step(store: Store) -> Store | None:
    """The step that a path refers to if it is not a checkpoint itself: the newest of a run, or the step of `run@name`.

    None if the path is neither a run's directory nor a name in one. Raises InputError, NotACheckpointError,
    StorageError.
    """
    if steps := _possible_steps(store):
        return store.child(step_name(steps[-1]))
    if (named := run_and_name(store)) is None:
        return None
    run, name = named
    steps = _possible_steps(run)
    return run.child(step_name(resolve_name(run, name, steps))) if steps else None


def _possible_steps(directory: Store) -> list[int]:
    """The steps of a directory, oldest first, including any that cannot be checked: opening one raises the error.

    Empty if the directory can be read but not listed. Raises StorageError.
    """
    try:
        found = directory.folders(is_step)
    except StorageError as error:
        if error.errno not in UNLISTABLE:
            raise
        return []
    return sorted(int(name) for name, published in found.items() if published is not False)


def run_and_name(store: Store) -> tuple[Store, str] | None:
    """The run and the name in a path such as "run@best"; None for any other path."""
    above = store.parent_and_name()
    base, separator, name = above[1].rpartition("@") if above else ("", "", "")
    if above is None or not base or not separator:
        return None
    return above[0].child(base).with_url(store.url.removesuffix(f"@{name}")), name


def steps_of(store: Store) -> list[Store] | None:
    """All steps of the run at a path, oldest first, including any that cannot be checked; None if the path is not a
    run's directory. Raises StorageError."""
    return [store.child(step_name(step)) for step in _possible_steps(store)] or None


def resolve_name(run: Store, name: str, published: Sequence[int]) -> int:
    """The step with a name, of the published steps of a run, oldest first. Raises InputError, NotACheckpointError."""
    if name.isdecimal() and name.isascii():
        if (step := int(name)) not in published:
            shown = ", ".join(map(str, published[-5:]))
            raise NotACheckpointError(f"{run.url} has no step {step}; the newest steps are {shown}")
        return step
    if name == "latest":
        return published[-1]
    if name == "best":
        return _best(run, published)
    known = pins(run)
    if (pinned := known.get(name)) is not None:
        if pinned in published:
            return pinned
        raise NotACheckpointError(f"{run.url} has no step {pinned}, which was pinned as {name!r}: it was deleted")
    raise InputError(
        f"{run.url} has no step named {name!r}: give a number, as in {run.url}@{published[-1]}, or one of"
        f" {', '.join(('latest', 'best', *known))}{closest_hint(name, ('latest', 'best', *known))}"
    )


def _best(run: Store, published: Sequence[int]) -> int:
    """The step with the best value of the metric that the run's note names.

    Raises InputError, NotACheckpointError, DataError.
    """
    note = run.read(f"{RUN}/{BEST}")
    if note is None:
        raise InputError(
            f"{run.url} does not record which step is the best: no Checkpointer with keep_best=(metric, mode) has"
            " opened it. Give a step number"
        )
    try:
        metric, mode = msgspec.json.decode(note, type=tuple[str, Mode])
    except msgspec.MsgspecError as error:
        raise DataError(f"{run.url}/{RUN}/{BEST} is damaged: {error}. Give a step number") from error
    children = [run.child(step_name(step)) for step in published]
    contents = run.read_all(f"{step_name(step)}/{MANIFEST}" for step in published)
    found = [
        (step, manifest.step.metrics)
        for step, child, content in zip(published, children, contents, strict=True)
        if content is not None and (manifest := decode(content, child.url)).step is not None
    ]
    best = best_of(found, metric, mode)
    if not best:
        raise NotACheckpointError(f"no step in {run.url} has a value of the metric {metric!r}")
    return best[0]
