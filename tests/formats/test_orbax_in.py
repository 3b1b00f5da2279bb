"""Checkpoints that Orbax writes in these tests, read without Orbax."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint.experimental import v1
from orbax_states import Moments, mesh, on

import jaxckpt
from jaxckpt._convert.convert import convert
from jaxckpt.errors import CheckpointExistsError, CorruptError, DataError, JaxckptError, NotACheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::Warning:orbax")


def state() -> dict[str, Any]:
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 16, (24, 8), np.uint16)  # includes NaN payloads and infinities
    return {
        "a.c": 3,
        "a/b": np.arange(3),
        "bf16": on(bits.view(ml_dtypes.bfloat16), P("data", "model")),
        "bool": np.array([True, False]),
        "complex": jnp.array([1 + 2j], jnp.complex64),
        "empty": {"dict": {}, "list": [], "none": None, "tuple": ()},
        "f8": on(bits.view(np.uint8).view(ml_dtypes.float8_e4m3fn), P(("model", "data"))),
        "flag": True,
        "int4": jnp.arange(-8, 8).astype(jnp.int4),
        "keys": on(jax.random.split(jax.random.key(7, impl="rbg"), 8), P("data")),
        "layers": [
            {"w": on(random.standard_normal((12, 8)), P("data"))},
            {"w": on(np.zeros((12, 8)), P(None, "model"))},
        ],
        "moments": Moments(jnp.ones((3,)), 2.5),
        "name": "héllo/~1\n",
        "np": random.standard_normal((5, 3)),
        "rate": float("nan"),
        "replicated": on(np.arange(6, dtype=np.float32).reshape(2, 3), P()),
        "scalar": jnp.float32(3),
        "step": 1 << 62,
        "third": np.float32(1) / 3,
        "tuple": (1, np.ones(2)),
    }


def plain(tree: Any) -> Any:
    """Tuples as lists and namedtuples as dicts, as Orbax records them."""
    match tree:
        case dict():
            return {key: plain(value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return plain(tree._asdict())
        case list() | tuple() if tree:
            return [plain(value) for value in tree]
        case _:
            return tree


def named(tree: Any) -> Any:
    """Namedtuples as dicts with their class name, because each library creates its own class."""
    match tree:
        case dict():
            return {key: named(value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return {type(tree).__name__: named(tree._asdict())}
        case list() | tuple():
            return type(tree)(map(named, tree))
        case _:
            return tree


def assert_same(found: Any, wanted: Any) -> None:
    """Trees of equal types and bits; jax.Arrays may have come back as NumPy arrays."""
    found, wanted = named(found), named(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            if isinstance(a, jax.Array):
                assert a.dtype == b.dtype
                a = jax.random.key_data(a)
            b = jax.random.key_data(b)
        if isinstance(b, jax.Array | np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
        else:
            assert type(a) is type(b)
        if isinstance(b, str):
            assert a == b
        else:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_pytree(path: Path, tree: Any, **options: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def save_standard(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in state().items() if key not in keys}


save_v1: Callable[[Path, Any], None] | None = getattr(v1, "save", None)
needs_v1 = pytest.mark.skipif(save_v1 is None, reason="Orbax before 0.12 lacks v1.save")

LAYOUTS: dict[str, tuple[Callable[[Path, Any], None], Any]] = {
    f"{'ocdbt' if ocdbt else 'files'}-{'zarr3' if zarr3 else 'zarr2'}": (
        lambda path, tree, ocdbt=ocdbt, zarr3=zarr3: save_pytree(path, tree, use_ocdbt=ocdbt, use_zarr3=zarr3),
        plain(state()),
    )
    for ocdbt in (True, False)
    for zarr3 in (True, False)
} | {
    "uncompressed": (lambda path, tree: save_pytree(path, tree, use_compression=False), plain(state())),
    "rich": (
        lambda path, tree: save_pytree(
            path, tree, pytree_metadata_options=PyTreeMetadataOptions(support_rich_types=True)
        ),
        state(),
    ),
    "standard": (save_standard, plain(without("name", "third"))),
}
if save_v1 is not None:
    LAYOUTS["v1"] = save_v1, plain(without("third", "keys", "flag"))


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a checkpoint in a layout, its content)."""
    save, wanted = LAYOUTS[request.param]
    path = tmp_path_factory.mktemp("orbax") / "checkpoint"
    names = set(wanted)
    save(path, {key: value for key, value in state().items() if key in names})
    return path, wanted


def test_every_layout_comes_back_bit_for_bit(saved: tuple[Path, Any]) -> None:
    path, wanted = saved
    assert_same(jaxckpt.load_numpy(path), wanted)
    restored = jaxckpt.restore(path)
    assert_same(restored, wanted)
    for found, saved_leaf in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert isinstance(found, jax.Array) == isinstance(saved_leaf, jax.Array)
        if isinstance(saved_leaf, jax.Array) and isinstance(saved_leaf.sharding, NamedSharding):
            assert found.sharding.is_equivalent_to(saved_leaf.sharding, found.ndim)


@pytest.mark.parametrize("shape", [(4, 2), (8, 1), (3, 2)])
def test_restored_onto_another_mesh(saved: tuple[Path, Any], shape: tuple[int, int]) -> None:
    path, wanted = saved
    specs = {"bf16": P("data"), "f8": P("model", None), "layers": P("data", "model"), "keys": P("model")}
    specs = {name: spec for name, spec in specs.items() if name in wanted}
    if shape[0] == 8:
        specs["layers"] = P(None, "data")
    restored = jaxckpt.restore(path, mesh=mesh(*shape), specs=specs)
    assert_same(restored, wanted)
    assert restored["bf16"].sharding.is_equivalent_to(NamedSharding(mesh(*shape), P("data")), 2)
    assert restored["replicated"].sharding.is_fully_replicated
    assert len(restored["replicated"].sharding.device_set) == int(np.prod(shape))


def test_boxes_verify_diff_and_plan(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path, wanted = saved
    checkpoint = jaxckpt.open(path)
    whole = np.asarray(wanted["bf16"])
    assert checkpoint["bf16"][3:17, 2:5].tobytes() == whole[3:17, 2:5].tobytes()
    assert checkpoint["layers/0/w"][11].tobytes() == np.asarray(wanted["layers"][0]["w"])[11].tobytes()
    assert jaxckpt.verify(path).ok
    jaxckpt.save(tmp_path / "ours", jaxckpt.restore(path))
    assert jaxckpt.diff(path, tmp_path / "ours").identical
    assert checkpoint.plan(mesh=mesh(4, 2)).read_bytes >= checkpoint.plan(mesh=mesh(4, 2)).needed_bytes > 0


def test_converted_to_jaxckpts_format(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path, wanted = saved
    convert(path, tmp_path / "ours")
    assert_same(jaxckpt.restore(tmp_path / "ours"), wanted)
    assert jaxckpt.diff(path, tmp_path / "ours").identical


def test_orbax_is_not_imported(tmp_path: Path, run_python: Callable[..., str]) -> None:
    save_pytree(tmp_path / "x", {"w": np.ones(3)})
    program = f"""
        import sys, jaxckpt
        print(jaxckpt.load_numpy({str(tmp_path / "x")!r}))
        assert not [name for name in sys.modules if name.split(".")[0] == "orbax"]
    """
    # A separate setting forces a new Python process: the server of forks has imported Orbax through Flax.
    assert "'w': array([1., 1., 1.])" in run_python(program, env={"PYTHONHASHSEED": "0"})


# Steps and items ------------------------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path) -> Path:
    """Steps 2, 4, 6 of a CheckpointManager: a tree and metrics."""
    best = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=6, **best)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as found:
        for step in (2, 4, 6):
            tree = {"w": np.full((4, 4), step)}
            found.save(step, args=ocp.args.StandardSave(tree), metrics={"loss": 1 / step}, custom_metadata={"n": step})
    return tmp_path / "run"


def test_metrics_that_json_cannot_represent(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    metrics = {"loss": float("nan"), "top": [1.0], "high": float("inf"), "low": -float("inf")}
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}), metrics=metrics)
    jaxckpt.convert(tmp_path / "run" / "1", tmp_path / "ours")
    assert jaxckpt.open(tmp_path / "ours").metadata == {
        "metrics": {"loss": None, "top": [1.0], "high": "Infinity", "low": "-Infinity"}
    }
    numbers = {"loss": None, "high": np.inf, "low": -np.inf}
    assert jaxckpt.Run(tmp_path / "run").metrics(1) == numbers
    jaxckpt.convert(tmp_path / "run", tmp_path / "run of ours")
    assert jaxckpt.Run(tmp_path / "run of ours").metrics(1) == numbers


def test_a_run_reads_the_metrics_of_orbax(manager: Path) -> None:
    run = jaxckpt.Run(manager)
    assert run.metrics(4) == {"loss": 1 / 4}
    assert run.metrics("latest") == {"loss": 1 / 6}
    assert (run.best_step("loss", "min"), run.best_step("loss", "max")) == (6, 2)
    with pytest.raises(jaxckpt.errors.InputError, match=r"has a metric 'los'; .* did you mean 'loss'\?"):
        run.best_step("los", "min")
    with pytest.raises(jaxckpt.errors.InputError, match="no metrics can be added"):
        run.add_metrics(4, {"loss": 1})
    for call in (lambda: run.metrics(5), lambda: run.add_metrics(5, {"loss": 1})):
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="has no step 5; the newest steps are 2, 4, 6"):
            call()


def test_a_run_finds_the_folders_of_orbax(manager: Path) -> None:
    run = jaxckpt.Run(manager)
    jaxckpt.save(f"{manager}@4", {"w": 99})
    for step, number in ((4, 4), ("4", 4), ("latest", 6)):
        assert run.path(step) == f"{manager}/ckpt_{number:06d}"
        assert (
            jaxckpt.open(run.path(step)).metadata["metrics"]
            == run.open(step).metadata["metrics"]
            == {"loss": 1 / number}
        )
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="run has no step 5; the newest steps are 2, 4, 6"):
        run.restore(5)
    with pytest.raises(jaxckpt.errors.InputError, match="does not record which step is the best"):
        run.restore("best")


@pytest.mark.parametrize("huge", ["9" * 400, "-" + "9" * 400, "NaN"])
def test_a_metric_of_orbax_that_exceeds_a_float_does_not_count(manager: Path, huge: str) -> None:
    (file,) = (manager / "ckpt_000006").rglob("metrics/metrics")
    file.write_text(f'{{"loss": {huge}, "top": 1}}')
    run = jaxckpt.Run(manager)
    assert run.metrics(6) == {"loss": None, "top": 1.0}
    assert (run.best_step("loss", "min"), run.best_step("loss", "max")) == (4, 2)


@pytest.mark.parametrize("text", ["Infinity", "1e999"])
def test_an_infinite_metric_of_orbax_is_compared(manager: Path, text: str) -> None:
    (file,) = (manager / "ckpt_000006").rglob("metrics/metrics")
    file.write_text(f'{{"loss": {text}}}')
    run = jaxckpt.Run(manager)
    assert run.metrics(6) == {"loss": np.inf}
    assert (run.best_step("loss", "min"), run.best_step("loss", "max")) == (4, 6)


def test_the_text_infinity_is_no_number(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["number"])
    texts, state = {"text": "Infinity"}, ocp.args.StandardSave({"w": np.ones(3)})
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(1, args=state, metrics={**texts, "number": float("inf")}, custom_metadata=texts)
    numbers = {"number": np.inf}
    for path in (f"{tmp_path}/run", f"{tmp_path}/run@1", f"{tmp_path}/run/1"):
        metadata = jaxckpt.open(path).metadata
        assert metadata["metrics"] == {**texts, "number": "Infinity"}
        assert metadata["custom_metadata"] == texts
    assert jaxckpt.open(f"{tmp_path}/run@1").metrics == numbers
    assert jaxckpt.Run(tmp_path / "run").metrics(1) == numbers
    jaxckpt.convert(tmp_path / "run", tmp_path / "run of ours")
    assert jaxckpt.Run(tmp_path / "run of ours").metrics(1) == numbers


def test_metrics_of_orbax_that_are_not_a_mapping_do_not_count(manager: Path) -> None:
    (file,) = (manager / "ckpt_000006").rglob("metrics/metrics")
    file.write_text("[1]")
    assert jaxckpt.Run(manager).metrics(6) == {}
    assert jaxckpt.Run(manager).best_step("loss", "min") == 4


def test_an_item_named_metrics_may_hold_arrays(tmp_path: Path) -> None:
    items = {"state": {"w": np.ones(3)}, "metrics": {"loss": np.zeros(3)}}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in items.items()})
        checkpointer.save(tmp_path / "x", args=args)
    assert_same(jaxckpt.load_numpy(tmp_path / "x"), items)


def test_a_managers_folder_opens_its_newest_complete_step(manager: Path) -> None:
    checkpoint = jaxckpt.open(manager)
    assert checkpoint.metadata == {"step": 6, "metrics": {"loss": 1 / 6}, "custom_metadata": {"n": 6}}
    assert jaxckpt.load_numpy(manager)["w"][0, 0] == 6
    assert jaxckpt.load_numpy(manager / "ckpt_000004")["w"][0, 0] == 4
    assert jaxckpt.load_numpy(manager / "ckpt_000004" / "default")["w"][0, 0] == 4


def test_an_unfinished_step_is_never_chosen(manager: Path) -> None:
    shutil.copytree(manager / "ckpt_000006", manager / "ckpt_000008.orbax-checkpoint-tmp")
    uncommitted = manager / "ckpt_000010"  # as on an object store, which renames nothing
    shutil.copytree(manager / "ckpt_000006", uncommitted)
    (uncommitted / "commit_success.txt").unlink(missing_ok=True)  # Orbax before 0.12.5 does not write it
    record = json.loads((uncommitted / "_CHECKPOINT_METADATA").read_text())
    (uncommitted / "_CHECKPOINT_METADATA").write_text(json.dumps(record | {"commit_timestamp_nsecs": None}))
    (manager / "ckpt_000012").mkdir()
    (manager / "99").touch()
    assert jaxckpt.open(manager).metadata["step"] == 6
    for unfinished in ("ckpt_000008.orbax-checkpoint-tmp", "ckpt_000010"):
        with pytest.raises(NotACheckpointError, match="in progress or was interrupted"):
            jaxckpt.open(manager / unfinished)
    for step in (2, 4, 6):
        shutil.rmtree(manager / f"ckpt_{step:06d}")
    with pytest.raises(NotACheckpointError, match="no complete step"):
        jaxckpt.open(manager)


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "metadata").touch()
    with pytest.raises(NotACheckpointError):
        jaxckpt.open(tmp_path)


def test_items_are_below_their_names(tmp_path: Path) -> None:
    numpy_state = np.random.default_rng(3).bit_generator.state
    numpy_state = {"state": {"words": np.arange(4)}, "pos": 3} | {"name": numpy_state["bit_generator"]}
    items = ocp.args.Composite(
        params=ocp.args.StandardSave({"w": np.ones(3)}),
        config=ocp.args.JsonSave({"a": 1, "b": [1.5, None, {"c": "d"}]}),
        array=ocp.args.ArraySave(np.arange(3)),
        key=ocp.args.JaxRandomKeySave(jax.random.key(3)),
        raw_key=ocp.args.JaxRandomKeySave(jax.random.PRNGKey(4)),
        legacy=ocp.args.NumpyRandomKeySave(np.random.RandomState(5).get_state()),
        generator=ocp.args.NumpyRandomKeySave(numpy_state),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "x", args=items)
    restored = jaxckpt.restore(tmp_path / "x")
    wanted = {
        "params": {"w": np.ones(3)},
        "config": {"a": 1, "b": [1.5, None, {"c": "d"}]},
        "array": np.arange(3),
        "key": jax.random.key(3),
        "raw_key": jax.random.PRNGKey(4),
        "legacy": np.random.RandomState(5).get_state(),
        "generator": numpy_state,
    }
    assert_same(restored, wanted)


def test_an_item_of_another_kind_is_left_out_with_a_warning(tmp_path: Path) -> None:
    items = ocp.args.Composite(a=ocp.args.StandardSave({"w": np.ones(3)}), b=ocp.args.JsonSave({"x": 1}))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "x", args=items)
    (tmp_path / "x/b/metadata").write_text("proto { }")
    with pytest.raises(DataError, match="x/b, b, is damaged or has lost files"):
        jaxckpt.load_numpy(tmp_path / "x")
    record = (tmp_path / "x/_CHECKPOINT_METADATA").read_text()
    (tmp_path / "x/_CHECKPOINT_METADATA").write_text(record.replace("JsonCheckpointHandler", "ProtoCheckpointHandler"))
    with pytest.warns(UserWarning, match="x/b is left out: its only file, metadata, is not JSON"):
        assert_same(jaxckpt.load_numpy(tmp_path / "x"), {"a": {"w": np.ones(3)}})


@needs_v1
def test_the_folders_of_v1(tmp_path: Path) -> None:
    tree = {"w": jnp.ones((2, 2)), "n": 3}
    v1.save_checkpointables(tmp_path / "both", {"state": tree, "extra": {"x": np.arange(2)}})
    assert_same(jaxckpt.restore(tmp_path / "both"), {"state": tree, "extra": {"x": np.arange(2)}})
    with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 3):
            checkpointer.save(step, {"w": jnp.full((2, 2), step)}, metrics={"loss": 0.5})
    assert_same(jaxckpt.restore(tmp_path / "run"), {"w": jnp.full((2, 2), 3)})
    assert jaxckpt.open(tmp_path / "run").metadata == {"step": 3, "metrics": {"loss": 0.5}}


@pytest.mark.skipif(ocp.__version__ == "0.12.0", reason="Orbax 0.12.0 cannot save such a tree")
def test_a_tree_that_is_one_leaf(tmp_path: Path) -> None:
    for ocdbt in (True, False):
        path = tmp_path / f"{ocdbt}"
        save_pytree(path, np.arange(5), use_ocdbt=ocdbt)
        assert_same(jaxckpt.load_numpy(path), np.arange(5))


def test_custom_metadata_of_a_tree(tmp_path: Path) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.args.PyTreeSave({"w": np.ones(2)}, custom_metadata={"by": "me"})
        checkpointer.save(tmp_path / "x", args=args)
    assert jaxckpt.open(tmp_path / "x").metadata == {"custom_metadata": {"by": "me"}}


# Damage ---------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def files_of(path: Path, zarr3: bool) -> Path:
    save_pytree(path, {"layers": [{"w": on(np.zeros((12, 8)), P("data", "model"))}]}, use_ocdbt=False, use_zarr3=zarr3)
    return path


@pytest.mark.parametrize("zarr3", [True, False])
def test_a_chunk_that_is_missing_cut_or_altered_is_an_error(tmp_path: Path, zarr3: bool) -> None:
    path = files_of(tmp_path / "x", zarr3)
    chunk = path / ("layers.0.w/c/1/2" if zarr3 else "layers.0.w/1.2")
    content = chunk.read_bytes()
    for damaged in (None, b"", content[:-1], content[: len(content) // 2]):
        chunk.unlink()
        if damaged is not None:
            chunk.write_bytes(damaged)
        else:
            assert jaxckpt.open(path)["layers/0/w"][:6].any() == False  # noqa: E712 - the remaining data can be read
        with pytest.raises(DataError, match="'layers/0/w'"):
            jaxckpt.load_numpy(path)
        report = jaxckpt.verify(path)
        assert not report.ok
        chunk.touch()
    chunk.write_bytes(content)
    assert jaxckpt.verify(path).ok


def test_verify_checks_all_steps_of_a_manager(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": np.arange(64.0) + step}))
    report = jaxckpt.verify(tmp_path / "run")
    assert report.ok
    assert report.leaves == 3
    content = max((tmp_path / "run/2").rglob("d/*"), key=lambda file: file.stat().st_size)
    content.write_bytes(content.read_bytes()[:10])
    (problem,) = jaxckpt.verify(tmp_path / "run").problems
    assert problem.object.startswith("2/")
    (tmp_path / "run/10").rename(tmp_path / "run/10.orbax-checkpoint-tmp")
    (tmp_path / "run/2").rename(tmp_path / "2")
    assert jaxckpt.verify(tmp_path / "run").leaves == 1


def test_an_old_checkpoint_may_lack_chunks_of_zeros(tmp_path: Path) -> None:
    path = files_of(tmp_path / "x", zarr3=False)
    rewrite(path / "_METADATA", lambda tree: tree | {"store_array_data_equal_to_fill_value": False})
    (path / "layers.0.w/1.2").unlink()
    assert_same(jaxckpt.load_numpy(path), {"layers": [{"w": np.zeros((12, 8), np.float32)}]})


@pytest.mark.parametrize("zarr3", [True, False])
def test_metadata_that_is_missing_cut_or_hostile_is_an_error(tmp_path: Path, zarr3: bool) -> None:
    whole = files_of(tmp_path / "x", zarr3)
    array = "layers.0.w/" + ("zarr.json" if zarr3 else ".zarray")
    sides: Any = (lambda of: of["chunk_grid"]["configuration"]["chunk_shape"]) if zarr3 else lambda of: of["chunks"]

    def trial(name: str, damage: Callable[[Path], Any], message: str) -> None:
        path = tmp_path / "trial"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        damage(path / name)
        with pytest.raises(JaxckptError, match=message):
            jaxckpt.load_numpy(path)

    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "array_metadatas/process_0", array):
        length = (whole / name).stat().st_size
        for end in sorted({0, 1, length // 3, length // 2, length - 1}):
            trial(name, lambda file, end=end: os.truncate(file, end), "damaged")
    trial(array, Path.unlink, "lacks the array 'layers.0.w' of the leaf 'layers/0/w'")

    def set_shape(value: Any) -> Callable[[Path], None]:
        return lambda file: rewrite(file, lambda of: of | {"shape": value})

    trial(array, set_shape([1 << 40, 1 << 40]), "too large to address")
    trial(array, set_shape([12]), "do not fit its shape")
    trial(array, set_shape([-1, 8]), "damaged")
    trial(array, set_shape("ab"), "damaged")
    trial(array, lambda file: rewrite(file, lambda of: of | {"zarr_format": 1 << 70}), "damaged")
    trial(array, lambda file: rewrite(file, lambda of: [sides(of).__setitem__(0, 0), of][1]), "do not fit its shape")
    trial(array, lambda file: rewrite(file, lambda of: [sides(of).__setitem__(0, 1 << 40), of][1]), "do not fit")
    kind = "data_type" if zarr3 else "dtype"
    for dtype in ("|O", "<f4,", ",", "f4,,", "(2", "<f99", ""):  # to numpy.dtype, some are Python code
        trial(
            array,
            lambda file, dtype=dtype: rewrite(file, lambda of: of | {kind: dtype}),
            "dtype|which NumPy and JAX do not support",
        )
    trial(
        array,
        lambda file: rewrite(file, lambda of: of | {"codecs": [{"name": "?"}], "compressor": {"id": "?"}}),
        "damaged",
    )

    def entry(keys: Any) -> Callable[[Path], None]:
        value = {"value_type": "jax.Array", "skip_deserialize": False}
        return lambda file: rewrite(
            file,
            lambda of: (
                of
                | {
                    "tree_metadata": {
                        str(n): {
                            "key_metadata": [{"key": key, "key_type": kind} for key, kind in one],
                            "value_metadata": value,
                        }
                        for n, one in enumerate(keys)
                    }
                }
            ),
        )

    trial("_METADATA", entry([[("..", 2)], [("x", 2)]]), "not folders below it")
    trial("_METADATA", entry([[("/etc", 2)]]), "not folders below it")
    trial("_METADATA", entry([[("a", 2)] * 201]), "nested deeper than 200")
    trial("_METADATA", entry([[("a", 3)]]), "damaged")
    trial("_METADATA", lambda file: file.write_text('{"tree_metadata":' + "[" * 100_000), "damaged")
    trial("_METADATA", lambda file: file.write_text("[]"), "damaged")
    trial(
        "_sharding",
        lambda file: rewrite(file, lambda of: {key: text.replace("4]", "5]") for key, text in of.items()}),
        "damaged",
    )
    trial(
        "_sharding",
        lambda file: rewrite(
            file,
            lambda of: {
                key: text.replace('["data", "model"], "d', '["model", "model"], "d') for key, text in of.items()
            },
        ),
        "does not fit",
    )


def test_a_list_must_have_all_its_indices(tmp_path: Path) -> None:
    save_pytree(tmp_path / "x", {"l": [np.ones(1), np.ones(2), np.ones(3)]})
    rewrite(
        tmp_path / "x/_METADATA",
        lambda of: of | {"tree_metadata": {k: v for k, v in of["tree_metadata"].items() if "'1'" not in k}},
    )
    with pytest.raises(DataError, match=r"container at 'l' has the indices 0, 2; expected 0 to 1"):
        jaxckpt.load_numpy(tmp_path / "x")


def database(path: Path, **options: Any) -> dict[str, Any]:
    """A checkpoint of few bytes, in a database."""
    # Arrays of up to 1 KiB would be stored in the nodes of the database.
    random = np.random.default_rng(0)
    tree = {"v": random.random(700), "w": random.random(600)}
    save_pytree(path, tree, **options)
    return tree


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_of_a_checkpoint(tmp_path: Path) -> None:
    """The manifest and the nodes of a database have checksums. The bytes of arrays have none, neither in Orbax's format
    nor in zstd's frames. If zstd does not detect the damage, the array has other values, as in Orbax itself."""
    path = tmp_path / "x"
    tree = database(path)
    message: dict[bool, int] = {True: 0, False: 0}
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        of_arrays = file.parent.name == "d" and file.stat().st_size > 3000
        for place in range(0, len(content), 1 + len(content) // 100):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            file.write_bytes(flipped)
            try:
                found = jaxckpt.load_numpy(path)
            except CorruptError:
                message[of_arrays] += 1
                continue
            finally:
                file.write_bytes(content)
            if of_arrays:
                assert {name: value.shape for name, value in found.items()} == {"v": (700,), "w": (600,)}
            elif file.name != "_METADATA":  # in _METADATA, the byte may belong to a key
                assert_same(found, tree)
    assert message[False] > 100
    assert message[True] > 0


def test_a_database_that_lacks_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    tree = database(path)
    used = 0
    for file in [path / "manifest.ocdbt", *path.glob("d/*"), *path.glob("ocdbt.process_0/d/*")]:
        content = file.read_bytes()
        for cut in (None, 0, len(content) // 2):
            file.unlink()
            if cut is not None:
                file.write_bytes(content[:cut])
            try:
                assert_same(jaxckpt.load_numpy(path), tree)  # the nodes of a single process are not read
            except DataError:
                used += 1
            file.write_bytes(content)
    assert used >= 9


def save_step(path: Path, tree: Any) -> None:
    with ocp.CheckpointManager(path) as manager:
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(tree),
            config=ocp.args.JsonSave({"a": 1}),
            key=ocp.args.JaxRandomKeySave(jax.random.key(3)),
            array=ocp.args.ArraySave(np.arange(3)),
        )
        manager.save(1, args=items, custom_metadata={"n": 1})


def save_items_of_v1(path: Path, tree: Any) -> None:
    v1.save_checkpointables(path, {"state": {"w": tree["w"]}, "extra": {"x": tree["n"]}})


HARMLESS = {"commit_success.txt", "orbax.checkpoint", "_sharding", "array_metadatas", "ocdbt.process_0"}
"""Files and folders without which a checkpoint still restores: _sharding has only the saved layout, array_metadatas is
needed only for PRNG keys, and the common database has the same index as the database of one process."""


@pytest.mark.parametrize(
    "save",
    [
        *(
            pytest.param(lambda path, tree, o=o, z=z: save_pytree(path, tree, use_ocdbt=o, use_zarr3=z), id=f"{o}-{z}")
            for o in (True, False)
            for z in (True, False)
        ),
        save_standard,
        save_step,
        pytest.param(save_v1, marks=needs_v1, id="save"),
        pytest.param(save_items_of_v1, marks=needs_v1),
    ],
)
def test_each_lost_file_is_reported(save: Callable[[Path, Any], None], tmp_path: Path) -> None:
    tree = {"w": np.random.default_rng(0).random((20, 30)), "n": 3, "sharded": on(np.arange(64.0), P("data")), "e": {}}
    if save is not save_v1:  # it cannot save them
        tree["keys"] = jax.random.split(jax.random.key(7, impl="rbg"), 2)
    path = tmp_path / "x"
    save(path, tree)
    wanted, kinds = jaxckpt.load_numpy(path), {name: leaf.kind for name, leaf in jaxckpt.open(path).leaves.items()}
    missed = 0
    for lost in sorted(path.rglob("*")):
        if save is save_step and lost == path / "1":
            continue
        lost.rename(tmp_path / "lost")
        try:
            found = jaxckpt.load_numpy(path)
        except (CorruptError, NotACheckpointError):
            missed += 1
            with contextlib.suppress(NotACheckpointError):
                assert not jaxckpt.verify(path).ok
        else:
            parts = {*lost.relative_to(path).parts}
            alone = save not in (save_step, save_v1, save_items_of_v1)  # a single tree needs only _METADATA
            assert parts & HARMLESS or (alone and parts == {"_CHECKPOINT_METADATA"}), lost
            assert_same(found, wanted)
            assert {name: leaf.kind for name, leaf in jaxckpt.open(path).leaves.items()} == kinds
            assert jaxckpt.verify(path).ok
        (tmp_path / "lost").rename(lost)
    assert missed > 4
    assert_same(jaxckpt.load_numpy(path), wanted)


def test_an_inaccessible_file_does_not_count_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error of the file system, neither an older step nor an incomplete step is opened."""
    run = tmp_path / "run"
    with ocp.CheckpointManager(run) as manager:
        for step in (1, 2):
            items = ocp.args.Composite(
                params=ocp.args.StandardSave({"w": np.full(3, step)}), config=ocp.args.JsonSave({"a": step})
            )
            manager.save(step, args=items)
    lstat = os.lstat

    def broken(path: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("2/config/metadata"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return lstat(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", broken)
        with pytest.raises(jaxckpt.errors.StorageError, match=f"2/config/metadata: {os.strerror(errno.EIO)}"):
            jaxckpt.load_numpy(run)
    assert jaxckpt.load_numpy(run)["config"] == {"a": 2}

    stat, calls = os.stat, 0

    def broken_once(path: Any, nth: int, **named: Any) -> os.stat_result:
        nonlocal calls
        calls += str(path).startswith(str(run))
        if calls == nth and str(path).startswith(str(run)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **named)

    for nth in range(1, 100):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", functools.partial(broken_once, nth=nth))
            try:
                assert jaxckpt.load_numpy(run)["config"] == {"a": 2}
            except jaxckpt.errors.StorageError:
                continue
        if calls < nth:
            break
    assert 5 < calls < nth
    (run / "2").rename(tmp_path / "2")
    (run / "2").symlink_to("2")  # a link to itself: listing it fails, even for root
    for read in (jaxckpt.load_numpy, jaxckpt.verify):
        with pytest.raises(jaxckpt.errors.StorageError, match=f"cannot list {run}/2: {os.strerror(errno.ELOOP)}"):
            read(run)
    assert jaxckpt.load_numpy(run / "1")["config"] == {"a": 1}


def test_a_step_of_an_older_orbax_needs_no_step_file(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))
    step = tmp_path / "run" / "1"
    (step / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(DataError, match="1/_CHECKPOINT_METADATA is missing"):
        jaxckpt.load_numpy(tmp_path / "run")
    rewrite(
        step / "default" / "_METADATA",
        lambda record: {name: record[name] for name in record if name != "custom_metadata"},
    )
    assert_same(jaxckpt.load_numpy(step), {"w": np.ones(3)})


def test_items_that_were_saved_separately_are_below_their_names(tmp_path: Path) -> None:
    save_standard(tmp_path / "x" / "a", {"w": np.ones(3)})
    save_standard(tmp_path / "x" / "b", {"w": np.zeros(3)})
    assert_same(jaxckpt.load_numpy(tmp_path / "x"), {"a": {"w": np.ones(3)}, "b": {"w": np.zeros(3)}})


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_separate_checkpoints_in_a_folder_are_never_replaced(format: str, tmp_path: Path) -> None:
    for name in ("best", "epoch-1"):
        save_standard(tmp_path / "x" / name, {"w": np.ones(3)})
    jaxckpt.save(tmp_path / "from", {"w": np.zeros(3)})
    with pytest.raises(CheckpointExistsError):
        jaxckpt.convert(tmp_path / "from", tmp_path / "x", format=format, overwrite=True)
    for name in ("best", "epoch-1"):
        assert_same(jaxckpt.load_numpy(tmp_path / "x" / name), {"w": np.ones(3)})


def test_a_single_json_item(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "x", args=ocp.args.JsonSave({"a": [1, None]}))
    assert jaxckpt.load_numpy(tmp_path / "x") == {"a": [1, None]}


def test_orbax_stores_all_chunks_of_zeros(tmp_path: Path) -> None:
    """Otherwise, a lost chunk could not be distinguished from a chunk of zeros."""
    path = tmp_path / "x"
    save_pytree(path, {"w": on(np.zeros((12, 8)), P("data", "model"))})
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    assert len(store.list().result()) == 9
    assert json.loads((path / "_METADATA").read_text())["store_array_data_equal_to_fill_value"]


def test_an_unknown_type_of_value_is_damage(tmp_path: Path) -> None:
    save_pytree(tmp_path / "x", {"w": np.ones(3)})
    tree = tmp_path / "x" / "_METADATA"
    tree.write_text(tree.read_text().replace("np.ndarray", "np.ndarrax"))
    with pytest.raises(DataError, match=r"value_type 'np.ndarrax'"):
        jaxckpt.load_numpy(tmp_path / "x")
