"""The order and tiling of arrays in device memory. A restore makes arrays in the default one of their devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format, Layout

from jaxckpt._pipeline.progress import log as _log
from jaxckpt.errors import show_count, show_path


def order_problem(requested: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str | None:
    """The problem if a leaf of a target requests a non-default order in device memory."""
    if not isinstance(requested, (Format, jax.ShapeDtypeStruct)):
        return None
    # The layout of a ShapeDtypeStruct has no public name.
    layout = getattr(requested, "layout" if isinstance(requested, Format) else "_dll", None)
    if getattr(layout, "major_to_minor", None) is None:  # Layout.AUTO
        return None
    if _is_default(layout, requested.sharding, dtype, shape):
        return None
    return (
        f"asks for {layout} in the target; restore makes arrays in the default layout: give only the sharding, and"
        " pass the restored array to jax.device_put with the Format"
    )


def warn_of_orders(leaves: Iterable[tuple[str, Any]], consequence: str) -> None:
    """Log a warning, once, if any of these leaves is an array that has a non-default order in device memory."""
    paths = [path for path, leaf in leaves if isinstance(leaf, jax.Array) and not _has_default_order(leaf)]
    if paths and jax.process_index() == 0:
        _warn_once(
            f"non-default order in device memory (jax.experimental.layout.Format) of {show_count(len(paths), 'array')},"
            f" such as {show_path(paths[0])}: {consequence}"
        )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _has_default_order(array: Any) -> bool:
    if isinstance(array, Tracer) or array.is_deleted():
        return True
    try:
        if _is_row_major(array._pjrt_layout):  # ten times faster than `format`, for 20,000 leaves
            return True
    except (AttributeError, jax.errors.JaxRuntimeError):  # PRNG keys; backends without layouts
        return True
    return _is_default(array.format.layout, array.sharding, array.dtype, array.shape)


@functools.lru_cache(maxsize=4096)
def _is_row_major(layout: Any) -> bool:
    """Whether this is the order of most arrays: by dimension, without tiles."""
    order, tiling = _order_and_tiling(Layout.from_pjrt_layout(layout))
    return not tiling and order == tuple(range(len(order)))


@functools.lru_cache(maxsize=4096)
def _is_default(layout: Any, sharding: Any, dtype: Any, shape: tuple[int, ...]) -> bool:
    """Whether new arrays have this order and tiling. As in JAX, no tiling means the default one."""
    order, tiling = _order_and_tiling(layout)
    default = _default_layout(type(layout), sharding, dtype, shape)
    default_order, default_tiling = (tuple(range(len(shape))), ()) if default is None else _order_and_tiling(default)
    return order == default_order and tiling in ((), default_tiling)


def _order_and_tiling(layout: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    tiling = getattr(layout, "tiling", None) or getattr(layout, "_tiling", None)
    return tuple(layout.major_to_minor), tuple(map(tuple, tiling or ()))


def _default_layout(kind: Any, sharding: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """The layout of new arrays, of type `kind`; None if JAX does not say, or if the sharding does not fit."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        device: Any = next(iter(sharding.device_set))
        return kind.from_pjrt_layout(device.client.get_default_layout(dtype, sharding.shard_shape(shape), device))
    return None
