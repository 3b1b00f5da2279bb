"""Converts the metrics of a step to their recorded form."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, cast

from jaxckpt._model.values import is_utf8
from jaxckpt.errors import InputError


def recorded_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics by name, None for those that are not finite. Raises InputError."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"metrics must be a mapping of names to numbers, found {reprlib.repr(metrics)}")
    return {_name(name): _value(name, value) for name, value in metrics.items()}


def metrics_of_another_library(metrics: object) -> dict[str, float | None]:
    """Those metrics that are numbers, None for those that are not finite or exceed a float."""
    if not isinstance(metrics, Mapping):
        return {}
    return {
        name: None if value is None else _finite(value)
        for name, value in cast("Mapping[str, object]", metrics).items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _finite(value: float) -> float | None:
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int of more than 308 digits
        return None


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
    return number if math.isfinite(number) else None
