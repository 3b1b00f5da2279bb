"""The order and tiling of arrays in device memory. A restore makes arrays in the default one of their devices."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format


def order_problem(requested: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str | None:
    """The problem if a leaf of a target requests a non-default order in device memory."""
    if not isinstance(requested, (Format, jax.ShapeDtypeStruct)):
        return None
    # The layout of a ShapeDtypeStruct has no public name.
    layout = getattr(requested, "layout" if isinstance(requested, Format) else "_dll", None)
    if getattr(layout, "major_to_minor", None) is None:  # Layout.AUTO
        return None
    order, tiling = _order_and_tiling(layout)
    default = _default_layout(type(layout), requested.sharding, dtype, shape)
    usual_order, usual_tiling = (tuple(range(len(shape))), ()) if default is None else _order_and_tiling(default)
    if order == usual_order and (not tiling or tiling == usual_tiling):  # as in JAX, no tiling means the default one
        return None
    return (
        f"asks for {layout} in the target; restore makes arrays in the default layout: give only the sharding, and"
        " pass the restored array to jax.device_put with the Format"
    )


def _order_and_tiling(layout: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    tiling = getattr(layout, "tiling", None) or getattr(layout, "_tiling", None)
    return tuple(layout.major_to_minor), tuple(map(tuple, tiling or ()))


def _default_layout(kind: Any, sharding: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """The layout of new arrays, of type `kind`; None if JAX does not say, or if the sharding does not fit."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        device: Any = next(iter(sharding.device_set))
        return kind.from_pjrt_layout(device.client.get_default_layout(dtype, sharding.shard_shape(shape), device))
    return None
