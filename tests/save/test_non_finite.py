"""`Options.non_finite`: NaN and infinity are named by their leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.errors import TreeError

ERROR, WARN = jaxckpt.Options(non_finite="error", sync=False), jaxckpt.Options(non_finite="warn", sync=False)


def tree(dtype: Any, bad: float) -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("data",))
    fine = np.arange(64).reshape(16, 4) % 7
    with_bad = fine.astype(dtype)
    with_bad[13, 2] = bad
    return {
        "good": jax.device_put(fine.astype(dtype), NamedSharding(mesh, P("data"))),
        "params": {"bad": jax.device_put(with_bad, NamedSharding(mesh, P("data")))},
        "count": jnp.arange(5),
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64", "float8_e5m2"])
def test_an_error_names_the_leaf(tmp_path: Path, dtype: str, bad: float) -> None:
    saved = tree(jnp.dtype(dtype), bad)
    with pytest.raises(TreeError, match="params/bad' has 1 value that is NaN or infinite") as raised:
        jaxckpt.save(tmp_path / "c", saved, options=ERROR)
    assert raised.value.paths == ("params/bad",)
    assert not (tmp_path / "c").exists()
    jaxckpt.save(tmp_path / "c", {**saved, "params": saved["good"]}, options=ERROR)


def test_a_warning_names_each_leaf_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {f"layer {number}": np.full(4, np.nan if number % 2 else 1.0) for number in range(4)}
    jaxckpt.save_async(tmp_path / "c", saved, options=WARN).wait()
    assert len(caplog.messages) == 2
    assert all(f"'layer {number}' has 4 values" in text for number, text in zip((1, 3), caplog.messages, strict=True))
    jaxckpt.save(tmp_path / "c", saved, overwrite=True)
    assert len(caplog.messages) == 2  # nothing is checked by default


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e3m4", "float8_e4m3", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_dtypes_without_infinity(tmp_path: Path, dtype: str) -> None:
    values = np.ones(8, getattr(ml_dtypes, dtype))
    jaxckpt.save(tmp_path / "fine", {"w": values}, options=ERROR)
    values[3] = np.nan
    assert np.isnan(values[3].astype(np.float32))
    with pytest.raises(TreeError):
        jaxckpt.save(tmp_path / "c", {"w": values}, options=ERROR)


def test_a_checkpointer_raises_it_at_the_next_save(tmp_path: Path) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, options=ERROR, on_failure="retry")
    checkpoints.save(1, {"w": np.array([1.0, np.nan])})
    with pytest.raises(TreeError, match="'w' has 1 value"):
        checkpoints.save(2, {"w": np.ones(2)})
    checkpoints.save(2, {"w": np.ones(2)})
    checkpoints.close()
    assert checkpoints.steps() == [2]
