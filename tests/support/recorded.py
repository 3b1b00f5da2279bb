"""Values that another library saved or loaded, recorded by the make.py scripts in tests/data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DATA = Path(__file__).parents[1] / "data"


def recorded(library: str) -> dict[str, Any]:
    """The encoded content of each checkpoint in a folder of tests/data, by name."""
    return json.loads((DATA / library / "expected.json").read_text())


def decoded(node: Any) -> Any:
    """A value, decoded from the form that make.py wrote."""
    match node:
        case {"dtype": dtype, "shape": shape, "hex": text}:
            raw = bytes.fromhex(text)
            if dtype == "bfloat16":
                stored = np.float32 if len(raw) == 4 * math.prod(shape) else ml_dtypes.bfloat16
                return np.frombuffer(raw, stored).reshape(shape).astype(ml_dtypes.bfloat16)
            return np.frombuffer(raw, dtype).reshape(shape)
        case {"dict": items}:
            return {key: decoded(child) for key, child in items}
        case {"list": children}:
            return [decoded(child) for child in children]
        case {"tuple": children}:
            return tuple(decoded(child) for child in children)
        case {"bytes": text}:
            return bytes.fromhex(text)
        case dict():
            return {key: decoded(child) for key, child in node.items()}
        case _:
            return node


def require_same(found: Any, wanted: Any) -> None:
    """Require the same keys of the same types, and the same bits."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict)
        assert {(type(key), key) for key in found} == {(type(key), key) for key in wanted}
        for key, child in wanted.items():
            require_same(found[key], child)
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            require_same(a, b)
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    else:
        assert (type(found), found) == (type(wanted), wanted)


REAL = {
    f"{library}/{name}": value
    for library in ("colossalai", "everyday", "mindspore", "oneflow")
    for name, value in recorded(library).items()
}
"""All of them, by the path in tests/data."""


def wanted(name: str) -> Any:
    """The tree of one of `REAL` as jaxckpt reads it."""
    found = decoded(REAL[name])
    if name == "mindspore/dtypes.safetensors":  # there, a name with "/" becomes a nested dict
        found["a"] = {"b.c": found.pop("a/b.c")}
    if name == "mindspore/dtypes.ckpt":  # MindSpore stores numbers as arrays
        found |= {"epoch": np.array(3), "rate": np.array(0.5, np.float32), "flag": np.array(True)}
    return found
