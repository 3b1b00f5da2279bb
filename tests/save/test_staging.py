"""Many small leaves are stacked by jitted calls, which keep all bits with every configuration of JAX."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from strategies import bits

import jaxckpt
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._save import staging as _staging

LEAVES = 64
"""On 8 devices, these have 512 pieces, the least number that is stacked (`STACK_PIECES`)."""


def stackable(array: np.ndarray[Any, Any], mesh: Mesh) -> dict[str, jax.Array]:
    return {f"w{number}": jax.device_put(array, NamedSharding(mesh, P("d"))) for number in range(LEAVES)}


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes of the objects that were stacked."""
    seen: list[str] = []
    stack = _staging._stage_stacked

    def counted(obj: Any, values: Any, *rest: Any) -> Any:
        seen.append(values[0].dtype.name)
        return stack(obj, values, *rest)

    monkeypatch.setattr(_staging, "_stage_stacked", counted)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("save", [jaxckpt.save, lambda *arguments: jaxckpt.save_async(*arguments).wait()])
def test_every_dtype_keeps_its_bits(name: str, save: Any, tmp_path: Path, stacked: list[str]) -> None:
    array = bits(DTYPES[name], (8, 32), 0)
    with jax.enable_x64(True):
        tree = stackable(array, jax.make_mesh((8,), ("d",)))
    save(tmp_path / "c", tree)  # the arrays exist, so x64 does not matter
    assert stacked == ([] if name in ("int2", "uint2") else [name])
    for found in jaxckpt.load_numpy(tmp_path / "c").values():
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("own", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("others", [AxisType.Auto, AxisType.Explicit])
def test_the_callers_mesh_does_not_matter(own: Any, others: Any, tmp_path: Path, stacked: list[str]) -> None:
    array = np.arange(64, dtype=np.float32)
    tree = stackable(array, jax.make_mesh((8,), ("d",), axis_types=(own,)))
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"), axis_types=(others,) * 2)):
        jaxckpt.save(tmp_path / "c", tree)
    assert stacked == ["float32"]
    assert (jaxckpt.load_numpy(tmp_path / "c")["w7"] == array).all()


def test_nan_checks_of_jax_do_not_affect_a_save(tmp_path: Path, stacked: list[str]) -> None:
    tree = stackable(np.array([np.nan, -np.inf] * 4, np.float32), jax.make_mesh((8,), ("d",)))
    with contextlib.ExitStack() as strict:
        strict.enter_context(jax.debug_nans(True))
        strict.enter_context(jax.debug_infs(True))
        jaxckpt.save(tmp_path / "c", tree)
    assert stacked == ["float32"]


@pytest.mark.one_device
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_numpy_arrays_may_share_a_stack_with_jax_arrays(
    on_accelerator: bool, tmp_path: Path, stacked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy arrays share a stack with leaves of the same shape and dtype that are not split."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), P())
    leaves = jax.device_put([np.full(3, number, np.float32) for number in range(_staging.STACK_PIECES)], sharding)
    if on_accelerator:
        monkeypatch.setattr(_staging, "is_in_host_memory", lambda value: False)
    tree = {f"w{number:03}": leaf for number, leaf in enumerate(leaves)}
    jaxckpt.save(tmp_path / "alike", tree)
    assert stacked == ["float32"]
    tree["x"] = np.full(3, -1, np.float32)
    jaxckpt.save(tmp_path / "mixed", tree)
    for name, found in jaxckpt.load_numpy(tmp_path / "mixed").items():
        assert found.tobytes() == np.asarray(tree[name]).tobytes()


def test_elements_that_this_process_lacks_are_never_stored() -> None:
    held = ((((0, 4),), 0), (((6, 8),), 1))
    assert len(_staging._cuts(held, ((0, 4),))) == 1
    with pytest.raises(jaxckpt.errors.LayoutError, match="6 of 8 elements"):
        _staging._cuts(held, ((0, 8),))
