"""Checks that casts of few and many arrays on CPU devices match NumPy's: denormal floats, complex numbers, int2."""

from __future__ import annotations

import tempfile
import warnings

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model.dtypes import DTYPES

warnings.simplefilter("error")
jax.config.update("jax_enable_x64", True)
options = jaxckpt.Options(cast="unsafe")
sharding = NamedSharding(jax.make_mesh((1,), ("x",)), P("x"))
doubles = np.array([1e-40, -1e-42, 1e-310, 1.5, np.inf, 1e300])
for values, wanted in [
    (doubles, "float32"),
    (doubles, "bfloat16"),
    (doubles + 1e-41j, "complex64"),
    (doubles[3:] + 2j, "float32"),
    (np.array([1, 0, -2, 1], np.int8), "int2"),
    (np.array([1, 0, -2, 1], np.float32), "int2"),
]:
    dtype = DTYPES[wanted]
    is_real = dtype.kind != "c" and values.dtype.kind == "c"
    with np.errstate(all="ignore"):
        expected = (values.real if is_real else values).astype(dtype)
    for count in (1, 600):
        tree = {f"x{number}": jax.device_put(values, sharding) for number in range(count)}
        with tempfile.TemporaryDirectory() as folder:
            jaxckpt.save(f"{folder}/a", tree, dtype=lambda path, leaf, dtype=dtype: dtype, options=options)
            for leaf in jaxckpt.load_numpy(f"{folder}/a").values():
                assert leaf.dtype == dtype, (wanted, leaf.dtype)
                assert leaf.tobytes() == expected.tobytes(), (wanted, leaf, expected)

print("all checks passed")
