"""Metrics of steps: those of a save, and those that were added afterwards, by an evaluator for example.

Each added metric is a small file of the run:

    _run/metric-00000040-<digest of the name>.json      {"save_id": …, "name": "accuracy", "value": 0.9}

The id of the save prevents that a value counts for a step that was saved again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import reprlib
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any, Literal

import msgspec

from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.records import StepRecord
from jaxckpt._model.values import is_utf8
from jaxckpt._run_folder.steps import RUN, TRASH, decode_note, is_published, is_step, step_name
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError, StorageError

_PREFIX = "metric-"


def recorded_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics by name, None for NaN. Raises InputError."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"metrics must be a mapping of names to numbers, found {reprlib.repr(metrics)}")
    return {_require_name(name): _number(name, value) for name, value in metrics.items()}


def _require_name(name: object) -> str:
    if not isinstance(name, str) or not is_utf8(name):
        raise InputError(f"the names in metrics must be str (UTF-8), found {ascii(name)[:80]}")
    return str.__str__(name)


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, str | bytes) or getattr(getattr(value, "dtype", None), "kind", "") in ("S", "U"):
        # float() also accepts these
        raise InputError(f"metric {name!r} must be a number, found {reprlib.repr(value)}")
    jax = sys.modules.get("jax")  # whose arrays the program's guard may forbid to read
    try:
        with contextlib.nullcontext() if jax is None else jax.transfer_guard("allow"):
            number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: an array of other processes
        raise InputError(f"metric {name!r} must be a number, found {reprlib.repr(value)}: {error}") from error
    return None if math.isnan(number) else number


# Added metrics --------------------------------------------------------------------------------------------


class _AddedMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    save_id: str
    name: str
    value: float | None
    """None for NaN. JSON has null for infinity too."""

    infinite: Literal[-1, 0, 1] = 0
    """The sign of an infinite value; 0 for any other."""


AddedMetrics = Mapping[tuple[int, str], Mapping[str, float | None]]
"""Values by name, by the step and the id of the save."""


def add_metrics(run: Store, step: int, save_id: str, metrics: Mapping[str, float | None], *, sync: bool) -> None:
    """Add metrics to a step. A metric that was added before is replaced. Raises NotACheckpointError, StorageError."""
    notes = run.create_child(RUN)
    for name, value in metrics.items():
        sign = 0 if value is None or math.isfinite(value) else 1 if value > 0 else -1
        content = msgspec.json.encode(_AddedMetric(save_id, name, value, sign))
        notes.replace(_file_name(step, name), content, sync=sync)
    if sync:
        run.sync_data(RUN, ())
    # A deletion unpublishes the step, then deletes its metrics. So either it finds these, or this check fails.
    if not is_published(run, step):
        for name in metrics:
            notes.remove(_file_name(step, name))
        raise NotACheckpointError(f"{run.url} has no step {step}: it was deleted")


def _file_name(step: int, name: str) -> str:
    return f"{_PREFIX}{step_name(step)}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def read_added_metrics(run: Store, steps: Container[int]) -> AddedMetrics:
    """The metrics that were added to these steps of a run. Raises DataError, StorageError."""
    notes = run.child(RUN)
    step_by_name = {name: step for name in notes.names() if (step := _step_of(name)) is not None and step in steps}
    added: dict[tuple[int, str], dict[str, float | None]] = {}
    for (name, step), content in zip(step_by_name.items(), notes.read_all(step_by_name), strict=True):
        if content is None:  # removed in the meantime
            continue
        metric = decode_note(run, name, content, _AddedMetric, ", a metric that was added to a step,")
        value = metric.infinite * math.inf if metric.infinite else metric.value
        added.setdefault((step, metric.save_id), {})[metric.name] = value
    return added


def metrics_of(run: Store, step: int, save_id: str, record: StepRecord | None) -> dict[str, float | None]:
    """The metrics of a step: those that were saved, and those that were added. Raises DataError, StorageError."""
    saved = {} if record is None else record.metrics
    return {**saved, **read_added_metrics(run, (step,)).get((step, save_id), {})}


def clear_step(run: Store, step: int) -> None:
    """Delete the remains of a step that was unpublished, and the metrics that were added to it. Raises StorageError."""
    child, notes = run.child(step_name(step)), run.child(RUN)
    child.clear()
    if child.read(MANIFEST) is not None:  # it has been published in the meantime
        return
    run.unmark(step_name(step))
    for name in notes.names():
        if _step_of(name, incomplete=True) == step:
            notes.remove(name)


def remove_metrics_of_deleted_steps(run: Store, names: Iterable[str]) -> None:
    """Delete the metrics, among these names of files, whose step was deleted by a killed run or from the trash.

    Does nothing without permission to write.
    """
    step_by_name = {name: step for name in names if (step := _step_of(name, incomplete=True)) is not None}
    if not step_by_name:
        return
    folders = [*run.names(), *(name.partition("-")[0] for name in run.child(TRASH).names())]
    steps = {int(name) for name in folders if is_step(name)}
    for name, step in step_by_name.items():
        if step not in steps:
            with contextlib.suppress(StorageError):
                run.child(RUN).remove(name)


def _step_of(name: str, *, incomplete: bool = False) -> int | None:
    """The step of the file of a metric; None for another file, and for one that is incomplete unless `incomplete`."""
    if not name.startswith(_PREFIX) or not (incomplete or name.endswith(".json")):
        return None
    step = name.removeprefix(_PREFIX).partition("-")[0]
    return int(step) if is_step(step) else None
