"""Checkpoints that earlier releases wrote stay readable, bit for bit; what is saved today has the same schema."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxckpt
from jaxckpt._model.file_names import COPY
from jaxckpt.errors import MismatchError

VERSION = "0.1"
DIGEST = "1114e1e7b85d81d19772c1cefab3dc987a5c6bc1977129c6a76e013ecda19835"
"""golden.digest of the folder. It changes only if a golden checkpoint was changed, which must never happen."""

ALL = [*golden.CHECKPOINTS]
PLAIN = [name for name in ALL if name not in ("objects", "memory")]
"""Those whose restored tree is the saved tree, on any JAX."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the golden checkpoints, because readers of a run write leases into it."""
    copy = tmp_path_factory.mktemp("golden") / VERSION
    shutil.copytree(golden.FOLDER / VERSION, copy)
    return copy


# Comparison -----------------------------------------------------------------------------------------------


def require_same(found: Any, expected: Any, path: str = "", *, layouts: bool = True) -> None:
    """Both trees have the same containers, keys, types and bits; with `layouts`, also the same shardings."""
    if isinstance(expected, Mapping):
        assert type(found) is type(expected), path
        order = sorted if type(expected) is dict else list  # JAX sorts the keys of a dict
        keys = order(expected)
        assert [(type(key), key) for key in order(found)] == [(type(key), key) for key in keys], path
        for key in keys:
            require_same(found[key], expected[key], f"{path}/{key}", layouts=layouts)
    elif isinstance(expected, (list, tuple)):
        assert getattr(found, "_fields", type(found)) == getattr(expected, "_fields", type(expected)), path
        assert type(found).__name__ == type(expected).__name__, path
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_same(one, other, f"{path}/{number}", layouts=layouts)
    else:
        assert facts(found) == facts(expected), path
        if layouts and isinstance(expected, jax.Array):
            assert found.sharding == expected.sharding, path
            assert is_weak(found) == is_weak(expected), path


def facts(leaf: Any) -> tuple[Any, ...]:
    """Everything about a leaf that a restore returns unchanged on any mesh."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", str(jax.random.key_impl(leaf)), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
        return "jax", leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        array = np.asarray(leaf)
        native = array.astype(array.dtype.newbyteorder("=")) if array.dtype.byteorder == ">" else array
        return isinstance(leaf, np.ndarray), native.dtype.name, native.shape, native.tobytes()
    if isinstance(leaf, float):
        return "float", struct.pack("<d", leaf)
    if isinstance(leaf, complex):
        return "complex", struct.pack("<dd", leaf.real, leaf.imag)
    return type(leaf), leaf


def is_weak(array: jax.Array) -> bool:
    return getattr(array, "weak_type", False)  # arrays of keys have none


def on_host(leaf: Any) -> Any:
    """What load_numpy returns for a leaf."""
    if not isinstance(leaf, jax.Array):
        return leaf
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def require_pinned_memory() -> None:
    if all(memory.kind != "pinned_host" for memory in jax.devices()[0].addressable_memories()):
        pytest.skip("CPU devices have no pinned memory in this version of JAX")


# Files ----------------------------------------------------------------------------------------------------


def test_no_golden_checkpoint_has_changed() -> None:
    assert golden.digest(golden.FOLDER / VERSION) == DIGEST


def test_contents_lists_every_golden_checkpoint() -> None:
    listed = json.loads((golden.FOLDER / VERSION / "CONTENTS.json").read_text(encoding="utf-8"))
    names = {path.name for path in (golden.FOLDER / VERSION).iterdir() if path.is_dir()}
    assert {entry["name"] for entry in listed["checkpoints"]} == names == {*golden.CHECKPOINTS, *golden.RUNS}
    for entry in listed["checkpoints"]:
        saved = golden.FOLDER / VERSION / entry["name"]
        files = golden.files(saved)
        assert entry["files"] == len(files)
        assert entry["bytes"] == sum((saved / name).stat().st_size for name in files)


def test_every_release_of_a_minor_version_is_covered() -> None:
    """A release with another minor version decides: it writes golden checkpoints, or is added here."""
    assert ".".join(jaxckpt.__version__.split(".")[:2]) in {VERSION}


@pytest.mark.child
def test_golden_checkpoints_are_not_written_again(run_python: Callable[..., str]) -> None:
    with pytest.raises(AssertionError, match=r"0\.1 exists, and golden checkpoints are never written again"):
        run_python(golden.FOLDER / "write.py")


# One checkpoint -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALL, *golden.RUNS])
def test_every_golden_checkpoint_is_intact(name: str, folder: Path) -> None:
    report = jaxckpt.verify(folder / name / ("storage" if name == "job" else ""))
    assert report.ok, report.problems


@pytest.mark.parametrize("name", PLAIN)
def test_load_numpy(name: str, folder: Path) -> None:
    expected = golden.CHECKPOINTS[name].tree()
    require_same(jaxckpt.load_numpy(folder / name), jax.tree.map(on_host, expected))


@pytest.mark.parametrize("name", PLAIN)
def test_restore_without_a_target(name: str, folder: Path) -> None:
    with golden.x64(name == "wide-dtypes"):
        require_same(jaxckpt.restore(folder / name), golden.CHECKPOINTS[name].tree())


@pytest.mark.parametrize("name", PLAIN)
def test_restore_into_a_target(name: str, folder: Path) -> None:
    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=is_weak(leaf))

    expected = golden.CHECKPOINTS[name].tree()
    with golden.x64(name == "wide-dtypes"):
        require_same(jaxckpt.restore(folder / name, jax.tree.map(abstract, expected)), expected)


@pytest.mark.parametrize("name", PLAIN)
def test_restore_onto_another_mesh(name: str, folder: Path) -> None:
    mesh = golden.smaller()
    with golden.x64(name == "wide-dtypes"):
        restored = jaxckpt.restore(folder / name, mesh=mesh)
    require_same(restored, golden.CHECKPOINTS[name].tree(), layouts=False)
    arrays = [leaf for leaf in jax.tree.leaves(restored) if isinstance(leaf, jax.Array)]
    assert all(array.sharding.mesh == mesh for array in arrays)


def test_arrays_with_64_bits_are_not_narrowed(folder: Path) -> None:
    with golden.x64(False), pytest.raises(MismatchError, match="jax_enable_x64"):
        jaxckpt.restore(folder / "wide-dtypes")


def test_memory_kinds(folder: Path) -> None:
    value = golden.small("float32", (8, 4), 8)
    require_same(jaxckpt.load_numpy(folder / "memory"), {"w": value})
    require_pinned_memory()
    require_same(jaxckpt.restore(folder / "memory"), golden.memory())


def test_tied_arrays(folder: Path) -> None:
    tied = jaxckpt.restore(folder / "leaves", tied=True)["tied"]
    assert tied["embed"] is tied["head"]
    leaves = jaxckpt.open(folder / "leaves").leaves
    assert leaves["tied/host/0"].kind == leaves["tied/host/1"].kind == "numpy"


def test_states_of_objects_are_plain_trees(folder: Path) -> None:
    require_same(jaxckpt.load_numpy(folder / "objects"), golden.states_of_objects())
    assert [*jaxckpt.open(folder / "objects").leaves] == [
        "cursor/position", "cursor/seen", "cursor/source/b", "layer/kernel", "layer/bias/0", "rate", "sampler/rate",
        "sampler/seed",
    ]  # fmt: skip


def test_objects_are_restored_into_a_target(folder: Path) -> None:
    golden.register()
    cursor, sampler = golden.Cursor(), golden.Sampler(0, golden.Rate(""))
    layer = golden.Layer(np.zeros((3, 2), np.float32), [np.zeros(2, np.float32)])
    target = {"cursor": cursor, "rate": golden.Rate(""), "sampler": sampler, "layer": layer}
    restored = jaxckpt.restore(folder / "objects", target)
    expected = golden.states_of_objects()
    assert restored["cursor"] is cursor
    assert restored["sampler"] is sampler
    require_same([cursor.position, cursor.seen], [12, expected["cursor"]["seen"]])
    assert restored["rate"] == golden.Rate("0.10")
    assert (sampler.seed, sampler.rate) == (7, golden.Rate("0.5"))
    require_same([restored["layer"].kernel, restored["layer"].bias], [*expected["layer"].values()])


def test_metadata_and_process_state(folder: Path) -> None:
    saved = jaxckpt.open(folder / "metadata")
    assert saved.metadata == golden.METADATA
    assert saved.process_states == [golden.STATES[0]]
    assert saved.format == "jaxckpt"
    assert saved.step is None


def test_a_part_of_a_leaf(folder: Path) -> None:
    for name in ("stacks", "stacks-zstd", "stacks-blosc"):
        found = jaxckpt.open(folder / name)["wide"][5:40, 7:9]
        require_same(np.asarray(found), golden.small("float32", (64, 96), 1)[5:40, 7:9])


# Runs -----------------------------------------------------------------------------------------------------


def test_the_run(folder: Path) -> None:
    run = jaxckpt.Run(folder / "run")
    assert run.steps() == golden.RUN_STEPS
    assert run.metadata() == golden.RUN_METADATA
    assert run.pins() == golden.RUN_PINS
    assert run.best_step() == 20
    assert run.best_step("accuracy", "max") == 40
    for step in golden.RUN_STEPS:
        loss = golden.RUN_LOSSES[step]
        assert run.metrics(step) == {
            "loss": None if np.isnan(loss) else loss,
            "accuracy": golden.RUN_ACCURACY.get(step),
        }
        saved = run.open(step)
        assert (saved.step, saved.dropped) == (step, golden.RUN_DROPPED[step])
        assert saved.metadata == ({"note": "step 30"} if step == 30 else None)
    for name, step in {"best": 20, "latest": 60, **golden.RUN_PINS}.items():
        assert jaxckpt.open(f"{folder / 'run'}@{name}").step == step


@pytest.mark.parametrize("step", golden.RUN_STEPS)
def test_the_steps_of_the_run(step: int, folder: Path) -> None:
    run, expected = jaxckpt.Run(folder / "run"), golden.run_tree_of(step)
    require_same(run.restore(step), expected)
    require_same(run.restore(step, mesh=golden.smaller()), expected, layouts=False)
    require_same(jaxckpt.load_numpy(run.path(step)), jax.tree.map(on_host, expected))


def test_the_run_is_followed_and_continued(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    followed = [(step.number, step.restore()["step"]) for step in jaxckpt.Run(tmp_path / "run").follow(after=20)]
    assert followed == [(30, 30), (40, 40), (60, 60)]
    with jaxckpt.Checkpointer(tmp_path / "run", keep_last=1, keep_best=("loss", "min")) as run:
        last, tree = run.restore_or_init(lambda: golden.run_tree(0))
        assert last == 60
        require_same(tree, golden.run_tree(60))
        run.save(70, tree, metrics={"loss": 1.0})
        run.wait()
        assert run.pending is None
    assert run.steps() == [30, 60, 70]
    assert jaxckpt.verify(tmp_path / "run").ok


@pytest.mark.parametrize("step", golden.JOB_STORED)
def test_the_steps_of_two_processes(step: int, folder: Path) -> None:
    run = jaxckpt.Run(folder / "job" / "storage")
    assert run.steps() == golden.JOB_STORED
    require_same(jaxckpt.load_numpy(run.path(step)), jax.tree.map(on_host, golden.job_tree(step)))
    require_same(run.restore(step, mesh=golden.square()), golden.job_tree(step), layouts=False)
    assert run.open(step).process_states == golden.job_states(step)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_the_local_step_of_two_processes(lost: int | None, folder: Path, tmp_path: Path) -> None:
    """Either folder of the two processes holds the whole step."""
    shutil.copytree(folder / "job", tmp_path / "job")
    storage, local = tmp_path / "job" / "storage", tmp_path / "job" / "local"
    for note in local.glob("*/run.json"):  # it names the folder in which the run was written
        content = json.loads(note.read_bytes()) | {"storage": jaxckpt.Run(storage).directory}
        note.write_text(json.dumps(content))
    if lost is not None:
        shutil.rmtree(local / f"process-{lost}")
    with jaxckpt.Checkpointer(storage, every=20, local=jaxckpt.LocalTier(local, every=5, copies=0)) as run:
        assert run.latest_step() == golden.JOB_LOCAL[-1]
        require_same(run.restore(mesh=golden.square()), golden.job_tree(45), layouts=False)
        assert run.process_state("position", resplit=lambda states, count: [states]) == [[45, 0], [45, 1]]


@pytest.mark.parametrize("number", range(golden.PUBLICATIONS))
def test_a_subscriber_reads_each_publication(number: int, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "weights", tmp_path / "weights")
    for newer in range(number + 1, golden.PUBLICATIONS):
        shutil.rmtree(tmp_path / "weights" / f"{newer:08d}")
    ((step, weights),) = jaxckpt.weights.subscribe(tmp_path / "weights", poll_seconds=0.01)
    assert step == golden.training_step(number)
    expected = {name: value.astype(ml_dtypes.bfloat16) for name, value in golden.weights(number).items()}
    require_same(jax.tree.map(on_host, weights), expected)
    layouts = {name: leaf.sharding for name, leaf in golden.weights_on_devices(number).items()}
    assert {name: leaf.sharding for name, leaf in weights.items()} == layouts


def test_a_subscriber_on_another_mesh(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "weights", tmp_path / "weights")
    mesh, last = golden.smaller(), golden.PUBLICATIONS - 1
    ((step, weights),) = jaxckpt.weights.subscribe(tmp_path / "weights", mesh=mesh, poll_seconds=0.01)
    assert step == golden.training_step(last)
    for name, value in golden.weights(last).items():
        require_same(np.asarray(weights[name]), value.astype(ml_dtypes.bfloat16))
        assert isinstance(weights[name].sharding, NamedSharding)
        assert weights[name].sharding.mesh == mesh


# Without jaxckpt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in ("values", "containers", "empty", "metadata")])
def test_zarr_alone_reads_the_arrays(name: str, folder: Path) -> None:
    zarr = pytest.importorskip("zarr")
    manifest = json.loads((folder / name / "manifest.json").read_bytes())
    data = folder / name / f"data-{manifest['save_id']}"
    stacks = [np.asarray(zarr.open_array(data / stack["name"], mode="r")[:]) for stack in manifest["stacks"]]
    flat, _ = jax.tree_util.tree_flatten(golden.CHECKPOINTS[name].tree())
    assert len(flat) == len(manifest["leaves"])
    for leaf, expected in zip(manifest["leaves"], map(on_host, flat), strict=True):
        found, dtype = stacks[leaf["stack"]][leaf["row"]], manifest["stacks"][leaf["stack"]]["dtype"]
        if dtype in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
            expected = np.asarray(expected).view(np.uint8) & np.uint8(3 if dtype.endswith("int2") else 15)
        elif hasattr(ml_dtypes, dtype):
            expected = np.asarray(expected).view(f"u{np.asarray(expected).dtype.itemsize}")
        require_same(np.asarray(found), np.asarray(expected), leaf["path"])


# What is saved today --------------------------------------------------------------------------------------


def schema(folder: Path) -> dict[str, Any]:
    """What readers of all files below a folder rely on, by manifest.

    Left out is what a writer may choose: ids, times and versions; the names, rows, chunks and objects of stacks;
    lengths and digests; and the phases of a save.
    """
    return {
        re.sub(r"\d{8}T\d{6}\.\d{6}Z", "<time>", path.parent.relative_to(folder).as_posix()): schema_of(path)
        for path in sorted(folder.rglob("manifest.json"))
    }


def schema_of(path: Path) -> dict[str, Any]:
    manifest = json.loads(path.read_bytes())
    data = path.parent / f"data-{manifest['save_id']}"
    meshes, layouts, stacks = manifest["meshes"], manifest["layouts"], manifest["stacks"]

    def leaf_schema(leaf: dict[str, Any]) -> dict[str, Any]:
        known = {name: value for name, value in leaf.items() if name not in ("stack", "row", "layout")}
        if "stack" in leaf:
            stack = stacks[leaf["stack"]]
            known |= {"members": sorted(leaf), "dtype": stack["dtype"], "shape": stack["shape"]}
        if "layout" in leaf:
            layout = layouts[leaf["layout"]]
            known["layout"] = layout | ({"mesh": meshes[layout["mesh"]]} if "mesh" in layout else {})
        return known

    def stack_schema(stack: dict[str, Any]) -> str:
        """The stack's members, and its zarr.json without the sides that a writer chooses."""
        zarr = json.loads((data / stack["name"] / "zarr.json").read_bytes())
        zarr["shape"] = zarr["shape"][1:]
        for holder in (zarr["chunk_grid"]["configuration"], zarr["codecs"][0]["configuration"]):
            holder["chunk_shape"] = len(holder["chunk_shape"])
        chosen = [stack["dtype"], stack["shape"], stack.get("compression")]
        return json.dumps([sorted(stack), chosen, zarr])

    names = {re.sub(r"^[^/]+(?=/)", "<stack>", re.sub(r"/c/.*", "/c/<place>", name)) for name in golden.files(data)}
    names -= {COPY}  # which 0.1 did not write, and readers ignore
    return {
        "members": sorted({*manifest} - {"processes"}),  # which the golden checkpoints lack, and readers ignore
        **{name: manifest[name] for name in ("format", "version", "metadata", "tree")},
        "step": manifest.get("step"),
        "libraries": sorted({*manifest["libraries"]} - {"jaxckpt"}),
        "leaves": [leaf_schema(leaf) for leaf in manifest["leaves"]],
        "stacks": sorted({stack_schema(stack) for stack in stacks}),
        "process_states": [json.loads((data / f"process-{n}.json").read_bytes())
                           for n in range(len(manifest.get("process_states", [])))],
        "files": sorted(names),
    }  # fmt: skip


def notes(folder: Path) -> set[str]:
    """The names of the notes in a run, without ids and times."""
    masked = (re.sub(r"local-[0-9a-f]{32}", "local-<id>", name) for name in golden.files(folder))
    return {name for name in masked if "_run/" in name or name.endswith("run.json")}


@pytest.mark.parametrize("name", ALL)
def test_what_is_saved_today_has_the_same_schema(name: str, tmp_path: Path) -> None:
    if name == "memory":
        require_pinned_memory()
    golden.save(name, tmp_path / name)
    assert schema(tmp_path / name) == schema(golden.FOLDER / VERSION / name)


@pytest.mark.parametrize("name", ["run", "weights", pytest.param("job", marks=pytest.mark.child)])
def test_a_run_of_today_has_the_same_schema(name: str, tmp_path: Path) -> None:
    _, write = golden.RUNS[name]
    write(tmp_path / name)
    found, expected = schema(tmp_path / name), schema(golden.FOLDER / VERSION / name)
    if name == "weights":
        for manifest in (*found.values(), *expected.values()):
            manifest["step"]["metrics"]["chain"] = "a random number"
            for leaf in manifest["leaves"] if manifest["metadata"]["previous"] is not None else ():
                del leaf["layout"]  # of the result of a jitted function: old versions of JAX record no spec
    if name == "job":  # JAX chooses the ids of the devices of the second process
        for leaf in (leaf for manifest in (*found.values(), *expected.values()) for leaf in manifest["leaves"]):
            if "layout" in leaf:
                leaf["layout"]["mesh"]["devices"][4:] = range(4)
    assert found == expected
    later = {"_run/rules.json"}  # a note that earlier versions do not write, and no reader needs
    assert notes(tmp_path / name) - later == notes(golden.FOLDER / VERSION / name)
