"""Values that are easily lost are restored bit for bit."""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reliability import Fault

import jaxckpt

FLOATS = ("float16", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")


def patterns(name: str) -> np.ndarray:
    """Both zeros, infinities, NaN payloads, subnormals: all patterns, or for 32 bits a selection of special ones."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    bits = np.dtype(f"uint{8 * dtype.itemsize}")
    if dtype.itemsize < 4:
        return np.arange(1 << 8 * dtype.itemsize, dtype=bits).view(dtype)
    exponents = np.array([0, 1, 127, 254, 255], bits) << 23
    fractions = np.array([0, 1, 2, 0x400000, 0x400001, 0x2AAAAA, 0x7FFFFF], bits)
    found = (exponents[:, None] | fractions).ravel()
    return np.resize(np.concatenate([found, found | np.uint32(1 << 31)]), 72).view(dtype)


@pytest.mark.fault(
    12, "zeros, −0.0, NaN payloads, subnormals, 0-d and zero-size arrays", "the same bits", quick=6, full=None
)
def test_every_bit_pattern_comes_back(fault: Fault, tmp_path: Path) -> None:
    rows = Mesh(np.array(jax.devices()), ("a",))
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("b", "a"))
    cases = [(name, compression) for compression in (None, "zstd", "blosc") for name in FLOATS]
    for number, (name, compression) in enumerate(fault.rounds(cases)):
        values = patterns(name)
        tree = {
            "split": jax.device_put(values, NamedSharding(rows, P("a"))),
            "numpy": values,
            "scalars": [jax.numpy.asarray(one) for one in values[:: max(1, len(values) // 16)]],
            "zeros": np.zeros((3, 5), values.dtype),
            "empty": [np.empty((0, 3), values.dtype), jax.numpy.empty((2, 0), values.dtype)],
        }
        path = tmp_path / str(number)
        jaxckpt.save(path, tree, options=jaxckpt.Options(compression=compression))
        wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        for way, read in (
            ("restore", lambda path=path: jaxckpt.restore(path)),
            ("restore to 2×4", lambda path=path: jaxckpt.restore(path, mesh=other)),
            ("load_numpy", lambda path=path: jaxckpt.load_numpy(path)),
        ):
            found = [np.asarray(leaf) for leaf in jax.tree.leaves(read())]
            same = [
                (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
                for a, b in zip(wanted, found, strict=True)
            ]
            if all(same):
                fault.saw("bit-exact")
            else:
                fault.silent(f"{name} by {way}: leaf {same.index(False)} differs")
