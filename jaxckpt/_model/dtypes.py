"""The dtypes that can be stored, how Zarr holds them, and which casts lose nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

# Dtypes of Zarr v3's core specification are stored unchanged. All others are stored as unsigned integers of the same
# width, which every Zarr reader supports and which keep every bit.
_CORE = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()

_EXTENDED = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
    " float8_e8m0fnu float4_e2m1fn int2 int4 uint2 uint4"
).split()

DTYPES: Mapping[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _CORE},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED if hasattr(ml_dtypes, name)},
}
"""Every dtype that can be stored, by name."""

NAN_LESS = {"float4_e2m1fn": "-0 or another number"}
"""Float dtypes without NaN, and what a cast makes of NaN."""


@functools.lru_cache(maxsize=1024)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """A dtype's name, cached, because NumPy needs 3 µs to build it each time."""
    return dtype.name


def stored_dtype(name: str) -> str:
    """The Zarr data type that holds dtype `name` on disk."""
    return name if name in _CORE else f"uint{8 * DTYPES[name].itemsize}"


def npy_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype itself, or, if NumPy and its files do not have it, a dtype that holds all its values."""
    if dtype.isbuiltin == 1:
        return dtype
    return np.dtype(f"{dtype.name.rstrip('0123456789')}8" if "int" in dtype.name else "float32")


MAX_RANK = 30
"""The largest rank of a leaf. tensorstore allows 32 dimensions; stack rows and an object's index take one each."""


@functools.cache
def is_lossless(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether every value of `source` is a value of `target`.

    NumPy's "safe" differs: it allows int64 to float64, and ml_dtypes' rules allow int8 to float8. Here, types of one
    and two bytes are tested value by value, and wider types are compared by range and digits.
    """
    if source == target:
        return True
    if source.itemsize <= 2 and source.kind != "c":
        return _can_round_trip(source, target)
    if target.kind == "c":
        return (
            is_lossless(source, np.dtype("f4" if target.itemsize == 8 else "f8"))
            if source.kind != "c"
            else (target.itemsize >= source.itemsize)
        )
    if source.kind == "c" or target.itemsize < source.itemsize:
        return False
    if source.kind in "iu" and target.kind in "iu":
        low, high = np.iinfo(source), np.iinfo(target)
        return high.min <= low.min and low.max <= high.max
    if source.kind in "iu" and target.kind == "f":
        return np.iinfo(source).bits - (source.kind == "i") <= np.finfo(target).nmant + 1
    return source.kind == "f" and target.kind == "f"


def _can_round_trip(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether each value of a narrow type survives a cast to `target` and back, including the signs of zeros."""
    if source.name.removeprefix("u") in ("int2", "int4"):
        info = ml_dtypes.iinfo(source)
        values = np.arange(info.min, info.max + 1).astype(source)
    elif source.kind == "b":
        values = np.array([False, True])
    else:
        values = np.arange(1 << 8 * source.itemsize, dtype=f"u{source.itemsize}").view(source)
    if source.name == "float4_e2m1fn":
        values = values[:16]
    try:
        with np.errstate(all="ignore"):
            converted = values.astype(target)
            # Compared as float64, which holds every value, so that a type without NaN or sign cannot hide a difference.
            before, after = values.astype(np.float64), converted.astype(np.complex128).real
    except (TypeError, ValueError):
        return False
    same_sign = np.isnan(before) | (np.signbit(before) == np.signbit(after))
    return bool(np.array_equal(before, after, equal_nan=True) and same_sign.all())
