"""What is noted about steps of a run: their metrics, and their names (pins)."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from jaxckpt._model.values import is_utf8
from jaxckpt._options import Options
from jaxckpt._run_folder.leases import hold
from jaxckpt._run_folder.steps import PIN, RUN, all_pins, pins, step_name
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError


def recorded_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics by name, None for NaN. Raises InputError."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"metrics must be a mapping of names to numbers, found {reprlib.repr(metrics)}")
    return {_name(name): _value(name, value) for name, value in metrics.items()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not is_utf8(name):
        raise InputError(f"the names in metrics must be str (UTF-8), found {ascii(name)[:80]}")
    return str.__str__(name)


def _value(name: str, value: Any) -> float | None:
    if isinstance(value, str | bytes) or getattr(getattr(value, "dtype", None), "kind", "") in ("S", "U"):
        # float() also accepts these
        raise InputError(f"metric {name!r} must be a number, found {reprlib.repr(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: an array of other processes
        raise InputError(f"metric {name!r} must be a number, found {reprlib.repr(value)}: {error}") from error
    return None if math.isnan(number) else number


# Pins: names for steps, which protect them from deletion --------------------------------------------------


def pin_step(run: Store, step: int, name: object, options: Options, *, move: bool) -> None:
    """Name a step. With `move`, the name may be another step's, which loses it when this step is protected.

    Raises InputError, NotACheckpointError, StorageError.
    """
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", name)) or name in ("latest", "best"):
        raise InputError(
            f"name must consist of letters, digits, '_', '-' and '.', start with a letter, and not be 'latest' or"
            f" 'best'; found {name!r}"
        )
    if not move and (other := pins(run).get(name, step)) != step:
        raise InputError(f"{name!r} is the name of step {other} of {run.url}: pass move=True, or unpin({name!r}) first")
    # Listed first, so that of two concurrent moves each leaves the other's pin: both steps stay protected.
    other_steps = [other for other, other_name in all_pins(run) if other_name == name and other != step] if move else []
    with hold(run, step):
        # Empty, so that a full disk leaves no pin after an error.
        run.create_child(RUN).put(_file_name(step, name), b"", sync=options.sync)
        for other in other_steps:
            run.child(RUN).remove(_file_name(other, name))
        if options.sync:
            run.sync_data(RUN, ())


def unpin_name(run: Store, name: str) -> None:
    """Remove the name of a step. Raises NotACheckpointError if no step has it, StorageError."""
    steps = [step for step, other_name in all_pins(run) if other_name == name]
    if not steps:
        names = ", ".join(pins(run)) or "none"
        raise NotACheckpointError(f"no step is pinned as {run.url}@{name}; pinned names: {names}")
    for step in steps:
        run.child(RUN).remove(_file_name(step, name))


def _file_name(step: int, name: str) -> str:
    return f"{PIN}{step_name(step)}-{name}"
