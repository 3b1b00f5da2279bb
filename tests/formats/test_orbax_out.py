"""Checkpoints converted to Orbax's format, restored by Orbax."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1
from orbax_states import mesh, on
from processes import PROGRAMS

import jaxckpt
from jaxckpt._convert.convert import convert
from jaxckpt._model.dtypes import DTYPES
from jaxckpt.errors import CheckpointExistsError, TreeError

pytestmark = pytest.mark.filterwarnings("ignore::Warning:orbax", "ignore::Warning:etils")


def state() -> dict[str, Any]:
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 16, (24, 8), np.uint16)
    return {
        "bf16": on(bits.view(ml_dtypes.bfloat16), P("data", "model")),
        "f8": on(bits.view(np.uint8).view(ml_dtypes.float8_e4m3fn), P(("model", "data"))),
        "flag": True,
        "keys": on(jax.random.split(jax.random.key(7, impl="rbg"), 8), P("data")),
        "layers": [{"w": on(random.standard_normal((12, 8), np.float32), P("data"))}, {"b": jnp.arange(3)}],
        "np": random.standard_normal((5, 3)),
        "rate": 0.1,
        "replicated": on(np.arange(6, dtype=np.float32).reshape(2, 3), P()),
        "scalar": jnp.float32(3),
        "step": -(1 << 63),
    }


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(b, jax.Array | np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
        else:
            assert type(a) is type(b)
        assert a == b if isinstance(b, str) else np.asarray(a).tobytes() == np.asarray(b).tobytes()


def standard(path: Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def pytree(path: Path, target: Any) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        if target is None:
            return checkpointer.restore(path)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))


def managed(path: Path, target: Any) -> Any:
    folder = path.parent / "run"
    (folder / "7").mkdir(parents=True, exist_ok=True)
    if not (folder / "7/default").exists():
        path.rename(folder / "7/default")
    with ocp.CheckpointManager(folder) as manager:
        assert manager.latest_step() == 7
        return manager.restore(7, args=ocp.args.StandardRestore(target))


READERS: dict[str, Callable[[Path, Any], Any]] = {
    "standard": standard,
    "pytree": pytree,
    "manager": managed,
}
if hasattr(v1, "load"):  # Orbax 0.12
    READERS["v1"] = lambda path, target: v1.load(path, target)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_orbax_restores_the_checkpoint(tmp_path: Path, reader: str) -> None:
    jaxckpt.save(tmp_path / "ours", state())
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    assert_same(READERS[reader](tmp_path / "theirs", None), state())


@pytest.mark.parametrize("reader", READERS)
def test_onto_another_mesh_as_a_training_state(tmp_path: Path, reader: str) -> None:
    params = {"w": on(np.random.default_rng(0).standard_normal((12, 8), np.float32), P("data", "model"))}
    tree = {"params": params, "opt": optax.adam(1e-3).init(params), "pair": (jnp.ones(2), {"x": jnp.zeros(4)})}
    jaxckpt.save(tmp_path / "ours", tree)
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    over = mesh(4, 2)

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = P("model", "data") if leaf.shape == (12, 8) else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(over, spec))

    restored = READERS[reader](tmp_path / "theirs", jax.tree.map(abstract, tree))
    assert_same(restored, tree)
    assert restored["params"]["w"].sharding == NamedSharding(over, P("model", "data"))


def test_to_orbax_and_back(tmp_path: Path) -> None:
    tree = state() | {
        "a/b": {"c.d": "text/with~1things\n", "e": "x" * 5000},
        "complex": 1 + 2j,
        "empty": {"dict": {}, "list": [], "none": None, "tuple": ()},
        "zero": np.zeros((0, 3), np.int16),
        "third": np.float32(1) / 3,
    }
    jaxckpt.save(tmp_path / "ours", tree, metadata={"by": "me"})
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    assert jaxckpt.open(tmp_path / "theirs").metadata == {"custom_metadata": {"by": "me"}}
    back = jaxckpt.restore(tmp_path / "theirs")
    tree["complex"], tree["third"] = (
        np.array(tree["complex"]),
        np.array(tree["third"]),
    )  # Orbax has no Python or NumPy scalars there
    assert_same(back, tree)
    assert back["bf16"].sharding == tree["bf16"].sharding
    assert_same(pytree(tmp_path / "theirs", None), tree)


def test_every_dtype(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        random = np.random.default_rng(0).integers(0, 256, 64 * dtype.itemsize, np.uint8)
        if dtype.itemsize == 1 and name not in ("int8", "uint8") and not name.startswith("float8"):
            random %= 2
        array = random.view(dtype)
        jaxckpt.save(tmp_path / "ours", {"x": array}, overwrite=True)
        if name in ("float8_e4m3", "uint2", "uint4"):
            with pytest.raises(TreeError, match=f"'x' has dtype {name}"):
                convert(tmp_path / "ours", tmp_path / "theirs", format="orbax", overwrite=True)
            continue
        convert(tmp_path / "ours", tmp_path / "theirs", format="orbax", overwrite=True)
        if name != "float8_e8m0fnu" or hasattr(tensorstore, name):  # tensorstore 0.1.84 lacks it
            assert_same(pytree(tmp_path / "theirs", None), {"x": array})


@pytest.mark.parametrize("shape", [(1000, 7), (3, 51, 64), (4097,), (1, 8192)])
def test_large_arrays_are_split_into_chunks(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape)
    split = P(*(None if side % 2 else "data" for side in shape))
    tree = {"host": array, "device": on(array.astype(np.float32), split)}
    jaxckpt.save(tmp_path / "ours", tree)
    options = jaxckpt.Options(object_bytes=4096, chunk_bytes=1024)
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax", options=options)
    chunks = [file for file in tmp_path.glob("theirs/*/c/**/*") if file.is_file()]
    assert len(chunks) > 8
    assert max(file.stat().st_size for file in chunks) <= 16 * 4096 + 4
    assert_same(pytree(tmp_path / "theirs", None), tree)


def test_orbax_finds_a_flipped_bit_in_what_we_wrote(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", {"w": np.ones(1000)})
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    chunk = tmp_path / "theirs/w/c/0"
    content = bytearray(chunk.read_bytes())
    content[100] ^= 4
    chunk.write_bytes(content)
    with pytest.raises(ValueError, match="Digest mismatch"):
        pytree(tmp_path / "theirs", None)


def test_names_that_orbax_would_confuse_are_listed(tmp_path: Path) -> None:
    tree = {
        "a.b": 1,
        "a": {"b": 2, "c": b"bytes"},
        "x": np.ones(2),
        "x/c/0": np.ones(3),
        "_METADATA": np.ones(1),
        "manifest.json": np.ones(1),
        "..": np.ones(1),
        "big": 1 << 70,
        "~": "text",
        "long" * 100: 1,
    }
    jaxckpt.save(tmp_path / "ours", tree)
    with pytest.raises(TreeError) as error:
        convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    for message in (
        "9 of these leaves",
        "'a/b', 'a.b' would all be named 'a.b'",
        "'a/c' is a bytes",
        "'x~1c~10' would be in the folder of 'x'",
        "'_METADATA' has a name",
        "'manifest.json' has a name",
        "'..' has a name",
        "'big' is an int beyond 64 bits",
        "'~0' is a str with a '~' in its name",
        "more than 255 bytes",
    ):
        assert message in str(error.value)
    assert not (tmp_path / "theirs").exists()
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax", select=["renamed", "x"], rename={"a/b": "renamed"})
    assert_same(pytree(tmp_path / "theirs", None), {"renamed": 2, "x": np.ones(2)})
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "ours", tmp_path / "theirs", format="orbax", select="x")
    jaxckpt.save(tmp_path / "none", {"a": {}})
    with pytest.raises(TreeError, match="without leaves"):
        convert(tmp_path / "none", tmp_path / "none2", format="orbax")


def test_the_files_are_those_that_orbax_writes(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", state())
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)) as checkpointer:
        checkpointer.save(tmp_path / "own", args=ocp.args.PyTreeSave(state()))
        found, wanted = (checkpointer.metadata(tmp_path / name).item_metadata for name in ("theirs", "own"))
    assert jax.tree.structure(found.tree) == jax.tree.structure(wanted.tree)
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "array_metadatas/process_0"):
        mine, own = (json.loads((tmp_path / folder / name).read_text()) for folder in ("theirs", "own"))
        assert mine.keys() == own.keys()
    mine, own = (json.loads((tmp_path / folder / "_METADATA").read_text()) for folder in ("theirs", "own"))
    assert mine["tree_metadata"].keys() == own["tree_metadata"].keys()


def test_memory_is_bounded(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """Two arrays of 512 MiB in total, in chunks of 64 MiB."""
    array = np.lib.stride_tricks.as_strided(np.arange(4096, dtype=np.float32), (16384, 4096), (0, 4))
    jaxckpt.save(tmp_path / "small", {"a": np.ones(3)})
    jaxckpt.save(tmp_path / "ours", {"a": np.ascontiguousarray(array), "b": np.ascontiguousarray(array)})
    args = [str(tmp_path / name) for name in ("small", "ours", "t")]
    printed = run_python(PROGRAMS / "memory_of_a_conversion.py", args=[*args, "orbax", "{}"], devices=1)
    assert int(printed) < 200 << 20
