"""Arrays that nobody says how to split: `restore(mesh=)` replicates them, and says so with the bytes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.rules import Rule, Rules

TREE = {"a": np.zeros((8, 128), np.float32), "b": np.zeros((8, 128), np.float32), "step": np.float32(3)}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    jaxckpt.save(tmp_path / "tree", TREE)
    jaxckpt.convert(tmp_path / "tree", tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def warned(caplog: pytest.LogCaptureFixture, path: Any, *args: Any, **arguments: Any) -> list[str]:
    """The warnings of a restore onto 8 devices."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        arguments = {"mesh": jax.make_mesh((8,), ("x",))} | arguments
        jaxckpt.restore(path, *args, **arguments)
    return [
        record.getMessage() for record in caplog.records if "neither specs= nor the checkpoint" in record.getMessage()
    ]


def test_a_foreign_checkpoint_on_a_mesh_without_specs(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warned(caplog, foreign)
    assert text.startswith(
        f"{foreign}: neither specs= nor the checkpoint says how to split 2 arrays, 8.0 KiB as stored"
    )
    assert "each of the 8 devices gets a whole copy" in text
    assert warned(caplog, foreign, select="a")[0].count("1 array, 4.0 KiB")
    assert warned(caplog, foreign, rename={"a": "c"})
    assert warned(caplog, foreign, rename=Rules([Rule(source=n, target=n) for n in TREE]))
    assert warned(caplog, foreign, jax.eval_shape(lambda: {key: jnp.asarray(value) for key, value in TREE.items()}))


def test_no_warning_where_the_layout_was_asked_for(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    assert not warned(caplog, foreign, specs=P())  # the way out that the warning names
    assert not warned(caplog, foreign, specs=lambda path, leaf: P("x") if leaf.shape else P())
    assert not warned(caplog, foreign, NamedSharding(mesh, P()))
    assert not warned(caplog, foreign, {"a": P("x"), "b": P(), "step": P()})
    assert not warned(caplog, foreign, TREE)  # NumPy arrays
    assert not warned(caplog, foreign, mesh=jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]))
    assert not warned(caplog, foreign, select="step")  # a scalar, which cannot be split


def test_specs_of_some_arrays_leave_the_others(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warned(caplog, foreign, specs={"a": P("x")})
    assert "1 array, 4.0 KiB as stored" in text


def test_our_own_checkpoints_that_record_no_specs(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, mesh = foreign.parent, jax.make_mesh((8,), ("x",))
    jaxckpt.convert(foreign, folder / "converted")
    assert warned(caplog, folder / "converted")
    jaxckpt.save(folder / "one device", {"a": jnp.zeros((8, 128))})
    assert "1 array, 4.0 KiB" in warned(caplog, folder / "one device")[0]
    jaxckpt.convert(foreign, folder / "for mesh", mesh={"x": 8}, specs=P())
    assert not warned(caplog, folder / "for mesh")
    jaxckpt.save(folder / "replicated", jax.device_put({"a": jnp.zeros((8, 128))}, NamedSharding(mesh, P())))
    assert not warned(caplog, folder / "replicated")
    assert not warned(caplog, folder / "tree")  # NumPy arrays stay NumPy arrays


def test_other_ways_to_restore(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        jaxckpt.open(foreign).restore(mesh=mesh)
        assert caplog.text.count("neither specs= nor the checkpoint") == 1
        jaxckpt.open(foreign).plan(mesh=mesh)  # only shows the layout
        jaxckpt.load_numpy(foreign)
        assert caplog.text.count("neither specs= nor the checkpoint") == 1
