"""Steps of a run: saving, retention of steps and subtrees, and the state after a crash."""

from __future__ import annotations

import datetime
import math
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from known_rules import know_rules
from processes import PASSED, RunProcesses

import jaxckpt
from jaxckpt._restore import restore as _restore
from jaxckpt._store.bucket import Bucket
from jaxckpt._store.files import FileWriter
from jaxckpt._store.folder import Folder
from jaxckpt._store.store import Store
from jaxckpt.errors import StorageError

FAST = jaxckpt.Options(sync=False)
NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)


def state(step: int) -> Any:
    return {"params": {"w": np.full((4, 4), step)}, "opt_state": [{"m": np.full((4, 4), -step)}, step], "step": step}


def filled(path: Path, steps: range, **arguments: Any) -> jaxckpt.Checkpointer:
    """A directory in which steps were saved, one after another."""
    checkpoints = jaxckpt.Checkpointer(path, options=FAST, background=False, **arguments)
    for step in steps:
        checkpoints.save(step, state(step), metrics={"loss": abs(step - 13.2)})
    return checkpoints


def apply_rules(path: Path, **rules: Any) -> jaxckpt.Checkpointer:
    """A Checkpointer that has deleted what its rules do not keep. Raises the error of the deletion, even a crash."""
    know_rules(path, **{name: rule for name, rule in rules.items() if name.startswith("keep_")})
    checkpoints = jaxckpt.Checkpointer(path, options=FAST, **rules)
    checkpoints.restore(checkpoints.steps()[-1])
    deletion = checkpoints._deletion._last_pass
    assert deletion is not None
    deletion.result(60)
    return checkpoints


def names_in(directory: Path) -> list[str]:
    """The entries of a run's directory, except the folder of notes on the run itself."""
    return sorted({*os.listdir(directory)} - {"_run"})


# What is kept ----------------------------------------------------------------------------------------------


def test_steps_are_kept_by_last_interval_and_best(tmp_path: Path) -> None:
    with filled(tmp_path, range(41), every=2, keep_last=2, keep_every=20, keep_best=("loss", "min")) as checkpoints:
        assert checkpoints.steps() == [0, 14, 20, 38, 40]
        assert checkpoints.latest_step() == 40
        assert checkpoints.best_step() == 14
        assert checkpoints.metrics(14) == {"loss": pytest.approx(0.8)}
    assert names_in(tmp_path) == ["00000000", "00000014", "00000020", "00000038", "00000040"]
    assert jaxckpt.load_numpy(checkpoints.path(14))["step"] == 14


def test_without_rules_all_steps_are_kept_and_with_keep_last_seconds_recent_ones(tmp_path: Path) -> None:
    assert filled(tmp_path / "a", range(5)).steps() == [0, 1, 2, 3, 4]
    assert filled(tmp_path / "b", range(5), keep_last_seconds=3600).steps() == [0, 1, 2, 3, 4]
    assert filled(tmp_path / "c", range(5), keep_last_seconds=1e-9).steps() == [4]


@pytest.mark.one_device
def test_dtype_and_tied_work_as_in_save_and_restore(tmp_path: Path) -> None:
    shared = jnp.full(4, 0.5)
    with jaxckpt.Checkpointer(tmp_path) as steps:
        steps.save(1, {"a": shared, "b": shared, "n": 3}, dtype=jnp.bfloat16)
        steps.wait()
        assert jaxckpt.open(steps.path(1))["a"].dtype == jnp.bfloat16
        restored = steps.restore(1, dtype={"a": jnp.float32})
        assert (restored["a"].dtype, restored["b"].dtype) == (jnp.float32, jnp.bfloat16)
        restored = steps.restore(1, tied=True)
        assert restored["a"] is restored["b"]


@pytest.mark.one_device
def test_restore_or_init_takes_dtype_and_tied(tmp_path: Path) -> None:
    shared = jnp.full(4, 1 / 3)

    def init() -> Any:
        return {"a": jnp.zeros(4, jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16), "new": jnp.zeros(2)}

    with jaxckpt.Checkpointer(tmp_path) as steps:
        steps.save(1, {"a": shared, "b": shared})
        with pytest.raises(jaxckpt.MismatchError, match="a lossy cast"):
            steps.restore_or_init(init, strict=False)
        step, tree = steps.restore_or_init(init, strict=False, dtype=jnp.bfloat16, tied=True)
        assert step == 1
        assert tree["a"] is tree["b"]
        assert (tree["a"].dtype, tree["new"].dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(tree["a"], shared.astype(jnp.bfloat16))
        _, tree = steps.restore_or_init(init, strict=False, dtype={"a": jnp.float32, "b": jnp.bfloat16})
        assert (tree["a"].dtype, tree["b"].dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(tree["a"], shared)


def test_steps_are_stored_in_the_layout_of_a_mesh(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tree = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("a")))}
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as steps:
        for step in (1, 2):
            steps.save(step, tree, mesh=mesh, specs=P(None, "b"))
        steps.save(3, tree)
        steps.wait()
        assert [jaxckpt.open(steps.path(step))["w"].spec for step in (1, 2, 3)] == [P(None, "b")] * 2 + [P("a")]
        for step in (1, 2, 3):
            np.testing.assert_array_equal(steps.restore(step)["w"], tree["w"])
        with pytest.raises(jaxckpt.errors.InputError, match="needs mesh="):
            steps.save(4, tree, specs=P("a"))
        with pytest.raises(jaxckpt.errors.SpecError, match="'w'"):
            steps.save(4, tree, mesh=mesh, specs=P("c"))
        assert steps.steps() == [1, 2, 3]


def test_processes_exchange_leaves_that_a_step_stores_in_another_layout(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = """
import jax, jaxckpt, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
mesh, backwards = Mesh(devices, ("a",)), Mesh(devices[::-1], ("a",))
whole = np.arange(64.0, dtype="float32").reshape(8, 8)
w = jax.make_array_from_callback((8, 8), NamedSharding(mesh, P("a")), lambda index: whole[index])
with jaxckpt.Checkpointer(args, keep_last=2) as steps:
    for step in range(4):
        steps.save(step, {"w": w + step}, mesh=backwards, specs=P(None, "a"))
    steps.wait()
    restored = steps.restore(target={"w": w})["w"]
for shard in restored.addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index] + 3)
print(jaxckpt.open(steps.path(3))["w"].spec)
"""
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout.splitlines()[-1] for one in done] == ["P(None, 'a')"] * 2, "\n".join(map(str, done))


def test_a_failed_save_deletes_no_older_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = filled(tmp_path, range(2), keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "publish", lambda *_, **__: (_ for _ in ()).throw(jaxckpt.errors.StorageError(5, "no")))
        with pytest.raises(jaxckpt.errors.StorageError):
            checkpoints.save(2, state(2))
    assert checkpoints.steps() == [1]
    assert checkpoints.restore()["step"] == 1
    assert checkpoints.save(2, state(2))
    assert checkpoints.steps() == [2]


def test_the_newest_good_step_stays_when_a_newer_one_is_damaged(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, range(4))
    (tmp_path / "00000003" / "manifest.json").write_text("{}")
    know_rules(tmp_path, keep_last=1)
    checkpoints = jaxckpt.Checkpointer(tmp_path, keep_last=1, options=FAST)
    with pytest.raises(jaxckpt.CorruptError) as message:
        checkpoints.restore()
    assert "other steps" in message.value.__notes__[0]
    assert checkpoints.steps() == [0, 1, 2, 3]
    assert checkpoints.restore(2)["step"] == 2
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    with pytest.raises(jaxckpt.errors.InputError, match="the only one"):
        checkpoints.delete(2)


# When the rules apply --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [{"keep_last": 1}, {"keep_last_of": {"opt_state": 1}, "keep_last": 1}], ids=str)
def test_rules_apply_only_after_the_first_save_or_restore(tmp_path: Path, rules: Any) -> None:
    filled(tmp_path, range(5)).close()
    know_rules(tmp_path, **rules)
    checkpoints = jaxckpt.Checkpointer(tmp_path, options=FAST, **rules)
    assert checkpoints.steps() == [*range(5)]
    assert checkpoints.metrics(3)
    checkpoints.wait()
    checkpoints.close()
    assert jaxckpt.Run(tmp_path).steps() == [*range(5)]
    assert all("opt_state" in jaxckpt.load_numpy(tmp_path / f"{step:08d}") for step in range(5))
    with jaxckpt.Checkpointer(tmp_path, options=FAST, **rules) as checkpoints:
        assert checkpoints.restore(1)["step"] == 1
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4]  # training continues from step 1
        checkpoints.save(5, {"step": 5, "opt_state": {"m": np.zeros(3)}}, metrics={"loss": 0.0})
        checkpoints.wait()
        assert checkpoints.steps() == [5]


@pytest.mark.parametrize("call", ["restore", "restore_or_init", "save"])
def test_each_of_these_calls_applies_the_rules(tmp_path: Path, call: str) -> None:
    filled(tmp_path, range(5)).close()
    know_rules(tmp_path, keep_last=1)
    with jaxckpt.Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpoints:
        match call:
            case "restore":
                assert checkpoints.restore()["step"] == 4
            case "restore_or_init":
                assert checkpoints.restore_or_init(lambda: state(0))[0] == 4
            case _:
                checkpoints.save(5, state(5))
    assert checkpoints.steps() == [5 if call == "save" else 4]


def test_a_deletion_that_fails_after_a_restore_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluation may have no permission to delete."""
    filled(tmp_path, range(3)).close()
    know_rules(tmp_path, keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(
            Folder, "unpublish", lambda *_, **__: (_ for _ in ()).throw(jaxckpt.errors.StorageError(13, "no"))
        )
        with jaxckpt.Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpoints:
            assert checkpoints.restore()["step"] == 2
    assert "old steps in" in caplog.text
    assert checkpoints.steps() == [0, 1, 2]


# Subtrees --------------------------------------------------------------------------------------------------


def test_old_steps_lose_subtrees_and_their_data(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, range(4), keep_last_of={"opt_state": 2})
    for step in range(4):
        tree = jaxckpt.load_numpy(checkpoints.path(step))
        np.testing.assert_array_equal(tree["params"]["w"], np.full((4, 4), step))
        assert ("opt_state" in tree) == (step >= 2)
        stacks = {path.parent.name for path in Path(checkpoints.path(step)).glob("data-*/*/zarr.json")}
        assert len(stacks) == (2 if step >= 2 else 1)
    with pytest.raises(jaxckpt.MismatchError) as message:
        checkpoints.restore(0, state(0))
    assert "step 0 was kept without opt_state" in message.value.__notes__[0]
    assert checkpoints.restore(0, state(0), select=["params", "step"])["opt_state"][1] == 0
    checkpoints.save(4, state(4))
    assert [step for step in range(5) if "opt_state" in jaxckpt.load_numpy(checkpoints.path(step))] == [3, 4]


def test_subtrees_that_are_not_stored_separately_are_kept(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    checkpoints = apply_rules(tmp_path, keep_last_of={"opt_state": 1, "nothing": 1})
    assert all("opt_state" in jaxckpt.load_numpy(checkpoints.path(step)) for step in range(3))


def test_subtrees_may_overlap(tmp_path: Path) -> None:
    """The leaves have equal shapes, so they share a stack unless a component separates them."""
    keep_last_of = {"opt": 3, "opt/mu": 1, "**/b": 2}
    with jaxckpt.Checkpointer(tmp_path, keep_last_of=keep_last_of, background=False, options=FAST) as checkpoints:
        for step in range(4):
            leaf = np.full((4, 4), step)
            tree = {"params": {"w": leaf, "b": leaf + 1}, "opt": {"mu": {"w": leaf, "b": leaf + 2}, "nu": leaf + 3}}
            checkpoints.save(step, tree)
    mu, nu, bias = {"opt/mu/w"}, {"opt/nu"}, {"params/b"}
    rest = {"params/w"}
    expected = {0: rest, 1: rest | nu, 2: rest | nu | bias, 3: rest | nu | bias | mu | {"opt/mu/b"}}
    assert {step: {*jaxckpt.open(tmp_path / f"{step:08d}")} for step in range(4)} == expected
    for step in range(4):
        assert jaxckpt.load_numpy(tmp_path / f"{step:08d}")["params"]["w"][0, 0] == step
    assert jaxckpt.verify(tmp_path).ok


def test_the_empty_containers_of_a_dropped_subtree_are_dropped_too(tmp_path: Path) -> None:
    tree = {"params": {"w": np.zeros(3), "empty": {}}, "opt": ({"mu": np.zeros(5)}, {}, None), "none": None}
    with jaxckpt.Checkpointer(tmp_path, keep_last_of={"opt": 1}, background=False, options=FAST) as checkpoints:
        for step in range(2):
            checkpoints.save(step, tree)
    older = jaxckpt.load_numpy(tmp_path / f"{0:08d}")
    assert older.keys() == {"params", "none"}
    assert older["params"].keys() == {"w", "empty"}
    assert jaxckpt.verify(tmp_path).ok


def test_a_subtree_that_cannot_be_dropped_does_not_keep_the_others(tmp_path: Path) -> None:
    """Not even after a subtree was dropped, and without another attempt after each save."""
    tree = {"a": np.zeros(3), "b": np.zeros(3), "c": np.zeros(5), "d": np.zeros(7)}
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        for step in range(2):
            checkpoints.save(step, tree)
    keep_last_of = {"a": 1, "c": 1, "d": 2}  # "a" shares its stack with "b"
    checkpoints = apply_rules(tmp_path, keep_last_of=keep_last_of, background=False)
    assert [{*jaxckpt.open(checkpoints.path(step))} for step in range(2)] == [{"a", "b", "d"}, {*tree}]
    checkpoints.save(2, tree)
    assert [{*jaxckpt.open(checkpoints.path(step))} for step in range(2)] == [{"a", "b"}, {"a", "b", "d"}]
    saved = [checkpoints._directory.saved_step(step) for step in range(3)]
    assert [one.undroppable for one in saved if one] == [("a",), ("a",), ()]
    checkpoints.close()


def test_subtrees_that_share_a_stack_with_each_other_are_dropped_together(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        for step in range(2):
            checkpoints.save(step, {"a": np.zeros(3), "b": np.zeros(3), "c": np.zeros(5)})
    apply_rules(tmp_path, keep_last_of={"a": 1, "b": 1}).close()
    assert {*jaxckpt.open(tmp_path / "00000000")} == {"c"}


class Crash(BaseException):
    """Simulates the end of the process."""


@pytest.mark.parametrize("survived", range(3))
def test_a_crash_between_dropping_a_subtree_and_deleting_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    steps = tmp_path / "steps"
    filled(steps, range(4), keep_last_of={"opt_state": 4})
    calls = 0

    def trim(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > survived:
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "trim", trim)
        # The start trims each of the four steps once; the next calls trim steps that lose a subtree.
        calls = -4
        with pytest.raises(Crash):
            apply_rules(steps, keep_last_of={"opt_state": 1})
    for step in range(4):
        assert jaxckpt.load_numpy(steps / f"{step:08d}")["step"] == step
    apply_rules(steps, keep_last_of={"opt_state": 1})
    for step in range(4):
        assert len(list(steps.glob(f"{step:08d}/data-*/*/zarr.json"))) == (2 if step == 3 else 1)


# Deleting --------------------------------------------------------------------------------------------------


def test_deleting_unpublishes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, range(3))

    def clear(store: Folder) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "clear", clear)
        with pytest.raises(Crash):
            apply_rules(tmp_path, keep_last=1)
    assert list(tmp_path.glob("00000000/data-*/*/c"))  # its data exists
    with pytest.raises(jaxckpt.errors.NotACheckpointError):  # but it is not a checkpoint
        jaxckpt.load_numpy(tmp_path / "00000000")
    checkpoints = jaxckpt.Checkpointer(tmp_path, options=FAST)
    assert checkpoints.steps() == [1, 2]
    assert names_in(tmp_path) == ["00000001", "00000002"]


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    for name in ("notes", "123", "-0000001", "000000001", "00000007x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data-x").mkdir()
    (tmp_path / "00000005").write_text("a file")
    checkpoints = filled(tmp_path, range(8, 10), keep_last=1)
    assert checkpoints.steps() == [9]
    assert len(names_in(tmp_path)) == 7
    assert len(list(tmp_path.glob("*/data-x"))) == 5


def test_listing_reads_only_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = filled(tmp_path, range(5))
    (tmp_path / "00000009").mkdir()  # an unpublished save
    seen: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: seen.append(str(path)) or listdir(path))
    assert checkpoints.steps() == [0, 1, 2, 3, 4]
    assert seen == [str(tmp_path), str(tmp_path / "00000009")], "whose manifest may be lost"


def test_steps_in_memory(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}-steps"
    checkpoints = jaxckpt.Checkpointer(url, keep_last=2, keep_last_of={"opt_state": 1})
    for step in range(4):
        checkpoints.save(step, state(step), process_state={"at": step})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.restore_or_init(lambda: state(0))[1]["step"] == 3
    assert checkpoints.process_state("at") == 3
    assert "opt_state" not in jaxckpt.load_numpy(f"{url}/00000002")


@pytest.mark.parametrize("store", [Folder, Bucket])
def test_a_second_checkpointer_deletes_nothing_of_a_running_save(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation opens the directory while the training saves. Object stores have no locks."""
    directory = str(tmp_path) if store is Folder else f"memory://{tmp_path.name}-two"
    written, looked = threading.Event(), threading.Event()
    publish = store.publish

    def wait(*arguments: Any, **named: Any) -> None:
        written.set()
        assert looked.wait(60)
        publish(*arguments, **named)

    with jaxckpt.Checkpointer(directory, keep_last=1) as training:
        training.save(1, state(1))
        training.wait()
        with monkeypatch.context() as patched:
            patched.setattr(store, "publish", wait)
            training.save(2, state(2))
            assert written.wait(60)
            evaluation = jaxckpt.Checkpointer(directory)
            looked.set()
            training.wait()
            assert evaluation.steps()[-1] == 2
        assert training.steps() == [2]
        assert training.restore(2)["step"] == 2


# Saving and restoring ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Folder, Bucket])
def test_an_older_step_that_another_job_publishes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Store]
) -> None:
    """Another job publishes it while this job deletes steps that it saw unpublished."""
    directory = str(tmp_path) if kind is Folder else f"memory://meanwhile-{tmp_path.name}"
    checkpoints = jaxckpt.Checkpointer(directory, background=False, options=FAST)
    folders = kind.folders
    listings = last = 0

    def then_published(store: Store, *wanted: Any) -> dict[str, bool]:
        nonlocal listings
        found = folders(store, *wanted)
        listings += 1
        if listings == last:
            assert found["00000003"] is False
            jaxckpt.save(f"{directory}/00000003", state(3), options=FAST)  # path(3) would list
        return found

    monkeypatch.setattr(kind, "folders", then_published)
    checkpoints.save(1, state(1))
    before = listings
    checkpoints.save(2, state(2))
    last = 2 * listings - before  # the same number again for the next save
    checkpoints._directory.store.mark("00000003")
    (tmp_path / "00000003").mkdir()  # like a save that has just begun
    checkpoints.save(4, state(4))
    assert listings == last
    assert checkpoints.steps() == [1, 2, 3, 4]
    assert checkpoints.restore(3)["step"] == 3


def test_it_starts_afresh_and_resumes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P("a", "b"))
    calls = 0

    def init() -> Any:
        nonlocal calls
        calls += 1
        w = jax.device_put(jnp.zeros((8, 8), jnp.bfloat16), split)
        return {"w": w, "free": jnp.zeros(3), "key": jax.random.key(1), "n": 0, "host": np.zeros(2)}

    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        last, tree = checkpoints.restore_or_init(init)
        assert last is None
        saved = {**jax.tree.map(lambda leaf: leaf + 1, {**tree, "key": 0}), "key": jax.random.key(7)}
        checkpoints.save(5, saved)
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        last, tree = checkpoints.restore_or_init(init)
    assert (last, calls) == (5, 2)
    assert (tree["w"].sharding, tree["w"].dtype, tree["free"].committed) == (split, jnp.bfloat16, False)
    assert (tree["n"], type(tree["host"])) == (1, np.ndarray)
    for name in ("w", "free", "host"):
        np.testing.assert_array_equal(tree[name], saved[name])
    assert jnp.array_equal(jax.random.key_data(tree["key"]), jax.random.key_data(saved["key"]))


def test_a_jitted_init_is_not_run_to_restore(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("a"))
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P()))})

    @jax.jit
    def never() -> Any:
        return {"w": jax.lax.with_sharding_constraint(jax.pure_callback(lambda: 1 / 0, jnp.zeros(8)), split)}

    init = jax.jit(never, out_shardings={"w": split})
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        _, tree = checkpoints.restore_or_init(init)
    assert tree["w"].sharding == split
    np.testing.assert_array_equal(tree["w"], np.arange(8.0))


def grown(params: Any) -> Any:
    """A tree with parts that the saved trees of the tests below lack."""
    return {
        "params": params,
        "ema": jax.tree.map(lambda leaf: leaf + 3, params),
        "key": jax.random.key(5),
        "n": jnp.zeros((), int),
    }


@pytest.mark.parametrize("jitted", [True, False])
def test_init_computes_missing_leaves(tmp_path: Path, jitted: bool) -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.arange(8.0)}, "n": jnp.int32(4), "old": jnp.ones(3)})
    ran: list[str] = []

    def init() -> Any:
        w, seen = jnp.zeros(8), lambda: (ran.append("v"), np.zeros(8, np.float32))[1]
        tree = {**grown({"w": w}), "v": jax.pure_callback(seen, jax.ShapeDtypeStruct((8,), "float32"))}
        return tree if jitted else jax.device_put(tree, shardings)

    shardings = {"params": {"w": split}, "ema": {"w": split}, "key": whole, "n": whole, "v": split}
    made = jax.jit(init, out_shardings=shardings) if jitted else init
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(jaxckpt.MismatchError, match=r"(?s)'ema/w' is not in.*strict=False keeps the init's value"):
            checkpoints.restore_or_init(made)
        ran.clear()
        step, tree = checkpoints.restore_or_init(made, strict=False, rename={"old": "v"}, select=["params", "n"])
        assert step == 1
        assert "v" in ran
        np.testing.assert_array_equal(tree["params"]["w"], np.arange(8.0))
        np.testing.assert_array_equal(tree["ema"]["w"], np.full(8, 3.0))
        assert (tree["n"], tree["v"].tolist()) == (4, [0] * 8)
        assert jnp.array_equal(jax.random.key_data(tree["key"]), jax.random.key_data(jax.random.key(5)))
        assert jax.tree.map(lambda leaf: leaf.sharding, tree) == shardings
        assert all(leaf.committed for leaf in jax.tree.leaves(tree))
        # Only missing values are computed.
        checkpoints.save(2, {**tree, "ema": None})
        ran.clear()
        step, tree = checkpoints.restore_or_init(made, strict=False)
        assert (step, ran) == (2, [] if jitted else ["v"])
        np.testing.assert_array_equal(tree["ema"]["w"], np.full(8, 3.0))


@pytest.mark.one_device
def test_a_new_optimizer_continues_an_old_run(tmp_path: Path) -> None:
    params = {"w": jnp.arange(4.0), "b": jnp.ones(2)}
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"params": params, "opt_state": optax.sgd(0.1, momentum=0.9).init(params)})

    def init() -> Any:
        fresh = jax.tree.map(jnp.zeros_like, params)
        return {"params": fresh, "opt_state": optax.adam(0.1).init(fresh)}

    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        step, tree = checkpoints.restore_or_init(init, strict=False, select="params")
    assert step == 3
    assert jax.tree.structure(tree) == jax.tree.structure(init())
    np.testing.assert_array_equal(tree["params"]["w"], params["w"])
    assert tree["opt_state"][0].count == 0
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(jaxckpt.MismatchError, match="none of the target's"):
            checkpoints.restore_or_init(lambda: {"model": init()["params"]}, strict=False)
        with pytest.raises(jaxckpt.errors.TreeError, match="'param' matches none"):
            checkpoints.restore_or_init(init, strict=False, rename={"param": "params"})


@pytest.mark.one_device
def test_results_of_init_are_released_before_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(8)})
    made: list[Any] = []
    alive: list[bool] = []

    def init() -> Any:
        tree = {"w": jnp.zeros(8), "new": jnp.zeros(8)}
        made.extend(map(weakref.ref, (tree["w"], tree["new"])))
        return tree

    fetch = _restore.fetch

    def counted(*args: Any, **keywords: Any) -> Any:
        alive.extend(ref() is not None for ref in made)
        return fetch(*args, **keywords)

    monkeypatch.setattr(_restore, "fetch", counted)
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.restore_or_init(init, strict=False)
    assert alive == [False, True]


@pytest.mark.parametrize("step", [1.5, -1, True, {"w": 1}])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    checkpoints = filled(tmp_path, range(2), keep_best=("loss", "min"))
    with pytest.raises(jaxckpt.errors.InputError, match=r"step must be a whole number .*found .*best_step\(\)"):
        checkpoints.restore(step)
    assert checkpoints.restore(np.int64(checkpoints.best_step() or 0))["step"] == 1


def test_init_computes_missing_leaves_in_a_job(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jax, jax.numpy as jnp, numpy as np, jaxckpt
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
shardings = {"w": split, "ema": split, "mean": whole, "lr": whole}

def init():
    w = jax.random.normal(jax.random.key(0), (8,))
    return {"w": w, "ema": w + 1, "mean": w.mean(), "lr": jnp.asarray(0.5)}

made = jax.jit(init, out_shardings=shardings)
with jaxckpt.Checkpointer(args) as checkpoints:
    old = made()
    checkpoints.save(1, {"w": old["w"] * 2, "lr": old["lr"]})
for jitted in (made, lambda: made()):
    with jaxckpt.Checkpointer(args) as checkpoints:
        step, tree = checkpoints.restore_or_init(jitted, strict=False)
    assert step == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, tree) == shardings
    expected = {**old, "w": old["w"] * 2}
    for name in shardings:
        for one, other in zip(tree[name].addressable_shards, expected[name].addressable_shards):
            np.testing.assert_allclose(one.data, other.data, rtol=1e-6)
    assert tree["lr"].weak_type
print("ok")
"""
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path / "steps"))
    assert [one.stdout.strip() for one in done] == ["ok", "ok"]


@pytest.mark.one_device
def test_restore_waits_for_the_running_save(tmp_path: Path) -> None:
    slow = jaxckpt.Options(progress=lambda _: time.sleep(0.2))
    with jaxckpt.Checkpointer(tmp_path, options=slow) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"step": jnp.full(8, step)}, process_state={"step": step})
            assert checkpoints.pending is not None
            if step == 1:
                restored = checkpoints.restore()
            elif step == 2:
                restored = checkpoints.restore(2)
            else:
                assert checkpoints.process_state("step", 3) == 3
                restored = checkpoints.restore_or_init(lambda: {"step": jnp.zeros(8, int)})[1]
            assert restored["step"][0] == step


def test_an_equinox_module_is_restored_completely(tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")

    def init() -> Any:
        return eqx.nn.MLP(2, 2, 4, depth=1, activation=jax.nn.gelu, key=jax.random.key(0))

    for last in (None, 1):
        with jaxckpt.Checkpointer(tmp_path) as checkpoints:
            found, model = checkpoints.restore_or_init(eqx.filter_jit(init))  # functions are among its results
            assert (found, model.activation) == (last, jax.nn.gelu)
            assert eqx.tree_equal(model, init())
            if last is None:
                checkpoints.save(1, eqx.filter(model, eqx.is_array))


def test_saving_an_older_step_is_logged_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = filled(tmp_path, range(5))
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="step 3"):
        checkpoints.save(3, state(3))
    assert checkpoints.save(3, state(33), overwrite=True)
    assert checkpoints.restore(3)["step"] == 33
    checkpoints.delete(2)
    strict = jaxckpt.Checkpointer(tmp_path, keep_last=4, keep_every=3, background=False, options=FAST)
    for step in (5, 6):
        strict.save(step, state(step))
    assert strict.steps() == [0, 3, 4, 5, 6]
    with pytest.raises(
        jaxckpt.errors.InputError, match=r"step 2 is older than step 6.* immediately: not kept by keep_last=4, keep"
    ):
        strict.save(2, state(2))
    assert "older than" not in caplog.text
    with jaxckpt.Checkpointer(tmp_path / "best", keep_best=("loss", "min"), background=False, options=FAST) as best:
        for step, loss in ((1, 0.1), (2, 0.2)):
            best.save(step, state(step), metrics={"loss": loss})
        with pytest.raises(jaxckpt.errors.InputError, match=r"step 1 is older than step 2.* immediately: not kept by"):
            best.save(1, state(11), metrics={"loss": 0.3}, overwrite=True)
        assert best.restore(1)["step"] == 1
        best.pin(1, "first")
        assert best.save(1, state(11), metrics={"loss": 0.3}, overwrite=True)
        assert best.restore(1)["step"] == 11
    strict.delete(5)
    assert strict.save(5, state(55))  # one of the last four
    assert "step 5 is older than step 6, the newest in" in caplog.text
    assert checkpoints.save(2, state(22))  # without rules, all steps are kept
    assert checkpoints.steps() == [0, 2, 3, 4, 5, 6]
    assert checkpoints.restore()["step"] == 6
    for step in (6, 5, 4, 3):
        checkpoints.delete(step)
    assert checkpoints.save(3, state(33))
    assert checkpoints.restore()["step"] == 33


@pytest.mark.parametrize("fail_fast", [True, False])
def test_a_failed_save_stops_the_next_step_or_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_fast: bool
) -> None:
    with monkeypatch.context() as patched, jaxckpt.Checkpointer(tmp_path, every=3, fail_fast=fail_fast) as checkpoints:
        patched.setattr(
            FileWriter, "write", lambda *_: (_ for _ in ()).throw(jaxckpt.errors.StorageError(28, "no space"))
        )
        assert checkpoints.save(0, state(0))
        assert checkpoints.pending is not None
        assert checkpoints.pending._save._ended.wait(60)
        stopped = 0
        for step in (1, 2, 3):
            try:
                checkpoints.save(step, state(step))
            except jaxckpt.errors.StorageError as error:
                stopped = step
                notes = getattr(error, "__notes__", [])
                break
        assert stopped == (1 if fail_fast else 3)
        assert fail_fast or notes == [
            f"jaxckpt: this error ended the save of step 0 to {tmp_path / '00000000'}",
            "jaxckpt: step 3 is not saved because of this: call save(3, …) again",
        ]
        patched.undo()
        assert fail_fast or (checkpoints.save(3, state(3)) and checkpoints.steps() == [3])
        checkpoints._saver.last_save.pending = None  # reported above


def failing_at(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all writes fail whose path contains this text."""
    write, put = FileWriter.write, Folder.put

    def written(writer: FileWriter, *arguments: Any) -> Any:
        if part in writer.folder:
            raise jaxckpt.errors.StorageError(28, f"no space at {part}")
        return write(writer, *arguments)

    def stored(folder: Folder, *arguments: Any, **named: Any) -> Any:
        if part in folder.url:
            raise jaxckpt.errors.StorageError(28, f"no space at {part}")
        return put(folder, *arguments, **named)

    monkeypatch.setattr(FileWriter, "write", written)
    monkeypatch.setattr(Folder, "put", stored)


def two_tiers(tmp_path: Path, **arguments: Any) -> jaxckpt.Checkpointer:
    """A run that saves every 5th step in local folders, and every 10th also in the storage."""
    tier = jaxckpt.LocalTier(tmp_path / "local", every=5, copies=0)
    return jaxckpt.Checkpointer(tmp_path / "run", every=10, options=FAST, local=tier, **arguments)


def test_fail_fast_raises_the_error_of_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_tiers(tmp_path, fail_fast=True) as checkpoints:
        failing_at("run/00000010", monkeypatch)
        checkpoints.save(10, state(10))
        assert checkpoints.pending is not None
        assert checkpoints.pending._save._ended.wait(60)
        with pytest.raises(jaxckpt.errors.StorageError, match="no space at run/00000010"):
            checkpoints.save(11, state(11))
        assert not checkpoints.save(12, state(12)), "it is raised once"


@pytest.mark.parametrize(("ends_with", "expected"), [(0, StorageError), (3, SystemExit), (None, StorageError)])
def test_an_exit_from_the_block_does_not_hide_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends_with: Any, expected: Any
) -> None:
    monkeypatch.setattr(
        FileWriter, "write", lambda *_: time.sleep(0.2) or (_ for _ in ()).throw(StorageError(28, "no space"))
    )
    with pytest.raises(expected), jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:  # noqa: PT012
        checkpoints.save(1, {"x": np.arange(2)})
        sys.exit(ends_with)
    assert expected is StorageError or "closing the Checkpointer failed too: StorageError" in caplog.text


def test_an_interrupted_close_records_the_end_when_it_is_called_again(tmp_path: Path) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, options=FAST)
    gate = threading.Event()
    checkpoints.save(1, {"x": np.arange(2)}, on_done=lambda _: gate.wait(60))
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.close()
    gate.set()
    checkpoints.close()
    assert [step.number for step in jaxckpt.Run(tmp_path).follow(timeout_seconds=60)] == [1]
    assert (tmp_path / "_run" / "ended.json").exists()


def test_an_alarm_of_the_program_ends_the_wait_and_not_the_save(tmp_path: Path) -> None:
    def alarm(*_: Any) -> None:
        raise TimeoutError("of the program")

    before = signal.signal(signal.SIGALRM, alarm)
    gate = threading.Event()
    checkpoints = jaxckpt.Checkpointer(tmp_path, options=FAST)
    try:
        checkpoints.save(1, {"x": np.arange(2)}, on_done=lambda _: gate.wait(60))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError, match="of the program"):
            checkpoints.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
        gate.set()
    checkpoints.close()
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize("end", ["wait", "close"])
def test_a_failed_save_does_not_skip_the_rest_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    checkpoints = two_tiers(tmp_path)
    failing_at("local/process-0/00000015", monkeypatch)
    checkpoints.save(10, state(10))
    checkpoints.save(15, state(15))
    with pytest.raises(jaxckpt.errors.StorageError, match="no space at local"):
        getattr(checkpoints, end)()
    assert checkpoints.pending is None, "the flush of step 10 has been waited for"
    assert checkpoints.steps() == [10]
    assert checkpoints._deletion._closed.is_set == (end == "close")
    assert not (tmp_path / "run/_run/ended.json").exists()
    checkpoints.close()


def test_a_callback_that_waits_for_its_own_save_is_an_error(tmp_path: Path) -> None:
    returned = threading.Event()
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.save(1, state(1), on_done=lambda _: returned.wait(60) and checkpoints.wait())
        pending = checkpoints.pending
        assert pending is not None
        returned.set()
        assert pending._save._ended.wait(60)
        with pytest.raises(jaxckpt.errors.InputError, match="own callbacks makes the call"):
            checkpoints.wait()
        assert checkpoints.pending is None


def test_processes_that_notice_a_failure_at_different_steps_stay_in_step(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = """
import time
import numpy as np, jaxckpt
from jaxckpt._store.bucket import Bucket
from jaxckpt._store.files import FileWriter

def attempt(call):
    try:
        call()
    except (jaxckpt.errors.StorageError, jaxckpt.errors.PeerFailedError) as error:
        print(type(error).__name__)

def fail_once(then):
    write = FileWriter.write
    def refuse(*_):
        FileWriter.write = write
        raise jaxckpt.errors.StorageError(28, "no space")
    if process_id == 0:
        FileWriter.write = refuse
    attempt(then)

from jaxckpt._save.write import OwnShare
write_share = OwnShare.write
def late(*arguments):
    try:
        return write_share(*arguments)
    finally:
        if process_id == 1:
            time.sleep(1.5)  # it gets notice of the end later
OwnShare.write = late
options = jaxckpt.Options(timeout_seconds=60)
with jaxckpt.Checkpointer(args, fail_fast=True, options=options) as checkpoints:
    fail_once(lambda: checkpoints.save(0, {"x": np.arange(3) + 0}))
    time.sleep(0.7)
    attempt(lambda: checkpoints.save(1, {"x": np.arange(3) + 1}))
    checkpoints.save(2, {"x": np.arange(3) + 2})
    checkpoints.wait()
    fail_once(lambda: checkpoints.save(3, {"x": np.arange(3) + 3}))
    if process_id == 0:
        attempt(checkpoints.wait)
    attempt(lambda: checkpoints.delete(2))
    checkpoints.save(4, {"x": np.arange(3) + 4})
    checkpoints.wait()
    print(checkpoints.steps())
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout.splitlines()[-1] for one in done] == ["[2, 4]"] * 2, "\n".join(map(str, done))


def test_the_body_s_own_error_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FileWriter, "write", lambda *_: (_ for _ in ()).throw(jaxckpt.errors.StorageError(28, "no space"))
    )

    def body() -> None:
        with jaxckpt.Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(0, state(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as message:
        body()
    assert "no space" in message.value.__notes__[0]


def test_all_processes_see_the_metrics_of_a_step_that_is_saved_again(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = """
import jaxckpt
with jaxckpt.Checkpointer(args, keep_best=[("loss", "min", 9)]) as checkpoints:
    for step, loss in ((1, 1.0), (2, 2.0), (2, 0.0)):
        checkpoints.save(step, {"x": step}, metrics={"loss": loss}, overwrite=True)
        checkpoints.wait()
        print(checkpoints.metrics(step), checkpoints.best_step())
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout.splitlines() for one in done] == [["{'loss': 1.0} 1", "{'loss': 2.0} 1", "{'loss': 0.0} 2"]] * 2


@pytest.mark.one_device
def test_metrics(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, keep_best=("loss", "max")) as checkpoints:
        for step, loss in enumerate([1.0, np.float32(3.0), float("nan"), float("-inf"), jnp.float32(3.0), 2]):
            checkpoints.save(step, {"x": step}, metrics={"loss": loss})
        checkpoints.save(6, {"x": 6})
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6]
        assert (checkpoints.best_step(), checkpoints.metrics(6)) == (4, {})
        with pytest.raises(jaxckpt.errors.InputError, match="metric 'loss' must be a number"):
            checkpoints.save(7, {"x": 7}, metrics={"loss": "low"})
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="no step 5"):
            checkpoints.metrics(5)
    with pytest.raises(jaxckpt.errors.InputError, match=r"keep_best has no rule: pass .* best_step\('loss', 'min'\)"):
        jaxckpt.Checkpointer(tmp_path).best_step()
    with pytest.raises(jaxckpt.errors.InputError, match=r"'los'; did you mean 'loss'\? .* best_step\('los', 'min'\)"):
        jaxckpt.Checkpointer(tmp_path, keep_best=("loss", "max")).best_step("los")
    with pytest.raises(jaxckpt.errors.InputError, match="no rule with 'min'"):
        jaxckpt.Checkpointer(tmp_path, keep_best=("loss", "max")).best_step(mode="min")
    with pytest.raises(jaxckpt.errors.InputError, match=r"no rule for 'top'\. For any other metric"):
        jaxckpt.Checkpointer(tmp_path).best_step("top")


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"keep_last": 0},
        {"keep_last": 1.5},
        {"keep_every": -1},
        {"keep_last_of": {"x": 0}},
        {"keep_last_of": {"every": 1}, "every": 0},
        {"keep_best": ("loss", "least")},
        {"keep_best": "loss"},
        {"keep_best": "lmin"},
        {"keep_best": ("loss", "min", 0)},
        {"keep_best": ("loss", "min", 1, 1)},
        {"keep_best": [("loss", "min"), "loss"]},
        {"keep_best": [("loss", "min"), ("accuracy",)]},
        {"keep_best": [1]},
        {"keep_best": {"loss": "min"}},
        {"keep_if": "loss < 1"},
        {"save_if": 10},
        {"every_seconds": 0},
        {"every_seconds": True},
        {"every_seconds": "5"},
        {"trash": "trash"},
        {"trash": None},
        {"keep_best": (0, "min")},
        {"keep_last_seconds": 0},
        {"keep_last_seconds": datetime.timedelta(hours=1)},
        {"keep_every_seconds": -1.0},
        {"keep_every_seconds": math.nan},
        {"keep_last_of": ["opt_state"]},
        {"keep_last_of": {0: 1}},
        {"keep_last_of": {"opt_state": True}},
        {"every": True},
        {"every": "5"},
        {"preemption_seconds": "30"},
        {"preemption_seconds": True},
        {"preemption_seconds": 0},
        {"preemption_seconds": None},
        {"options": {"sync": False}},
        {"options": {}},
        {"on_preemption": "die"},
    ],
    ids=str,
)
def test_invalid_arguments(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(jaxckpt.errors.InputError):
        jaxckpt.Checkpointer(tmp_path, **wrong)


def test_what_a_number_must_be(tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="every_seconds must be a number above zero, found '10m'"):
        jaxckpt.Checkpointer(tmp_path, every_seconds="10m")  # pyright: ignore[reportArgumentType]


def test_numpy_integers_are_accepted_as_arguments(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"every": np.int64(5), "keep_last": np.int32(2), "keep_last_of": {"opt_state": np.uint8(1)}}
    with filled(tmp_path, range(21), **rules, preemption_seconds=np.float32(7)) as checkpoints:
        assert checkpoints.steps() == [15, 20]
        assert checkpoints.restore(np.int64(20))["step"] == 20  # pyright: ignore
        assert "opt_state" not in jaxckpt.load_numpy(checkpoints.path(15))


def test_steps_are_whole_numbers(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        for wrong in (-1, 1.5, 2.0, np.float32(2), None, True, np.True_, [1], (1 << 62) + 1):
            for call in (lambda step: checkpoints.save(step, {"x": 1}), checkpoints.path, checkpoints.metrics):
                with pytest.raises(jaxckpt.errors.InputError, match="step must be a whole number"):
                    call(wrong)  # pyright: ignore
        with pytest.raises(jaxckpt.errors.InputError, match="step must be a whole number"):
            checkpoints.save("3", {"x": 1})  # pyright: ignore
        for wrong in (1.5, True, 1 << 63):
            with pytest.raises(jaxckpt.errors.InputError, match="step must be a whole number"):
                checkpoints.restore(wrong)  # pyright: ignore
        assert checkpoints.steps() == []
        assert checkpoints.save(np.int64(3), {"x": 1})  # pyright: ignore
    assert checkpoints.steps() == [3]


@pytest.mark.one_device
@pytest.mark.parametrize("local", [False, True])
def test_a_step_given_as_an_array_is_deleted(tmp_path: Path, local: bool) -> None:
    with two_tiers(tmp_path) if local else filled(tmp_path / "run", range(0)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, state(step), metrics={"loss": step})
            checkpoints.wait()
        assert checkpoints.metrics(jnp.int32(20)) == {"loss": 20.0}  # pyright: ignore
        checkpoints.delete(np.array(20))  # pyright: ignore
        assert checkpoints.steps() == [10]
        assert not list(tmp_path.glob("local/*/00000020"))
        with pytest.raises(jaxckpt.errors.InputError, match="step must be a whole number"):
            checkpoints.delete("10")  # pyright: ignore


def test_a_state_or_a_manifest_that_could_not_be_read_back_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxckpt._save.save.MAX_FILE_BYTES", 4096)
    with jaxckpt.Checkpointer(tmp_path, options=FAST, background=False) as checkpoints:
        checkpoints.save(1, {"x": 1}, process_state={"at": "a" * 2000})
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"process_state would be a file of 50\d\d bytes, but at most 4096"
        ):
            checkpoints.save(2, {"x": 1}, process_state={"at": "a" * 5000})
        monkeypatch.setattr("jaxckpt._model.manifest.MAX_MANIFEST_BYTES", 4096)
        with pytest.raises(jaxckpt.errors.InputError, match="bytes long, over 4096"):
            checkpoints.save(2, {str(number): number for number in range(100)})
        assert checkpoints.steps() == [1]
        assert checkpoints.process_state("at") == "a" * 2000


def test_the_largest_steps_and_folders_with_larger_numbers(tmp_path: Path) -> None:
    largest = [99_999_999, 100_000_000, 10**12, 1 << 62]
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        jaxckpt.save(tmp_path / str((1 << 62) + 1), {"x": "not a step"})
        jaxckpt.save(tmp_path / ("9" * 40), {"x": "not a step"})
        jaxckpt.save(tmp_path / "0123456789", {"x": "not a step"})
        for step in largest:
            checkpoints.save(step, {"x": step})
        assert checkpoints.restore() == {"x": 1 << 62}
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == largest
        assert checkpoints.restore(10**12) == {"x": 10**12}


# Arguments that can never apply ------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [{"w": 1}, None, np.zeros(2)], ids=["dict", "None", "array"])
def test_init_must_be_a_function(tmp_path: Path, init: Any) -> None:
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        with pytest.raises(jaxckpt.errors.InputError, match=r"init must be a function .* found an object of type "):
            checkpoints.restore_or_init(init)
        assert checkpoints.restore_or_init(lambda: {"w": 1}) == (None, {"w": 1})


def test_a_mistyped_metric_is_refused_before_anything_is_deleted(tmp_path: Path) -> None:
    filled(tmp_path, range(4)).close()
    with jaxckpt.Checkpointer(tmp_path, keep_best=("val_loss", "min"), options=FAST) as checkpoints:
        with pytest.raises(jaxckpt.errors.InputError, match=r"metrics has no 'val_loss', .* it has 'valloss'$"):
            checkpoints.save(4, state(4), metrics={"valloss": 1.0})
        with pytest.raises(jaxckpt.errors.InputError, match=r"no step in .* has it: pass save\(…, metrics="):
            checkpoints.save(4, state(4))
        assert list(map(int, names_in(tmp_path))) == [0, 1, 2, 3], "nothing is left of it either"
        assert checkpoints.save(4, state(4), metrics={"val_loss": float("nan"), "other": 1})
        assert checkpoints.save(5, state(5)), "it is not measured at each step"
        with pytest.raises(jaxckpt.errors.InputError, match=r"metrics has no 'val_loss', by which .*; it has 'loss'$"):
            checkpoints.save(6, state(6), metrics={"loss": 1.0})
        checkpoints.save(6, state(6), metrics={"val_loss": 1.0})
        checkpoints.save(7, state(7))
        checkpoints.wait()
        assert checkpoints.steps() == [6, 7]
    with jaxckpt.Checkpointer(tmp_path, keep_best=("val_loss", "min"), options=FAST) as checkpoints:
        assert checkpoints.save(8, state(8)), "an earlier run has measured it"


def test_a_missing_component_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, keep_last_of={"opt_stat": 1}, options=FAST)
    with pytest.raises(
        jaxckpt.errors.TreeError, match=r"'opt_stat', but the tree has nothing at that path; did you mean 'opt_state"
    ):
        checkpoints.save(0, state(0))
    assert list(tmp_path.iterdir()) == []
    rare = jaxckpt.Checkpointer(tmp_path, every=1000, keep_last_of={"opt_stat": 1}, options=FAST)
    with pytest.raises(jaxckpt.errors.TreeError, match="did you mean 'opt_state"):
        rare.save(1, state(1))  # although it is not due
    assert list(tmp_path.iterdir()) == []
    for keep_last_of in (
        {"opt_state": 1},
        {"*_state": 1},
        {"opt_state/0": 1, "opt_state": 1},
        {"opt_state": 1, "**/m": 1},
    ):
        for step, opt_state in enumerate(([{"m": np.ones(3)}], [(), {}], None, [{"m": 3}])):
            if "**/m" in keep_last_of and step in (1, 2):
                continue
            if "opt_state/0" in keep_last_of and step == 2:
                continue
            with jaxckpt.Checkpointer(tmp_path / str(keep_last_of), keep_last_of=keep_last_of) as checkpoints:
                assert checkpoints.save(step, {"params": np.ones(2), "opt_state": opt_state})


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": None},
        {"loss": 10**400},
        {"loss": "low"},
        {"loss": "0.5"},
        {"loss": b"1"},
        {"loss": np.array("0.5")},
        {"loss": 1j},
        {"loss": np.ones(3)},
        {1: 1.0},
        {"\ud800": 1.0},
        [("loss", 1.0)],
        "loss",
        0.5,
    ],
    ids=ascii,
)
def test_metrics_that_are_not_numbers(tmp_path: Path, metrics: Any) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(jaxckpt.errors.InputError, match="metric"):
            checkpoints.save(1, {"x": 1}, metrics=metrics)
        assert checkpoints.save(1, {"x": 1}, metrics={np.str_("loss"): np.float64(1), "on": True, "n": 1 << 70})
        checkpoints.wait()
        assert checkpoints.metrics(1) == {"loss": 1.0, "on": 1.0, "n": float(1 << 70)}


# Each process's own state -----------------------------------------------------------------------------------


def test_process_states_of_three_are_restored_in_two_and_in_one(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jaxckpt
from jax.experimental import multihost_utils
import jax
with jaxckpt.Checkpointer(args) as checkpoints:
    if jax.process_count() == 3:
        checkpoints.save(1, {"x": 1}, process_state={"at": [process_id, None, "é"], "raw": bytes([process_id, 255])})
        checkpoints.wait()
        print("all checks passed")
    else:
        def resplit(states, count):
            return [states[n::count] for n in range(count)]
        print(checkpoints.process_state("at", resplit=resplit), checkpoints.process_state("raw", 1, resplit=resplit))
        try:
            checkpoints.process_state("at")
        except jaxckpt.JaxckptError as error:
            print(type(error).__name__)
"""
    where = str(tmp_path / "s")
    run_processes(program, processes=3, devices_per_process=1, args=where, timeout=60, word=PASSED)
    found = [[n, None, "é"] for n in range(3)], [bytes([n, 255]) for n in range(3)]
    for count in (2, 1):
        done = run_processes(program, processes=count, devices_per_process=1, args=where, timeout=60)
        for n, one in enumerate(done):
            assert one.stdout.splitlines() == [f"{found[0][n::count]} {found[1][n::count]}", "InputError"]
    states = jaxckpt.open(tmp_path / "s" / "00000001").process_states
    assert states == [{"at": at, "raw": raw} for at, raw in zip(*found, strict=True)]
    (victim,) = (tmp_path / "s").glob("*/data-*/process-1.json")
    victim.write_bytes(victim.read_bytes().replace(b"null", b"1234"))
    with pytest.raises(jaxckpt.errors.DataError, match=r"process-1\.json, differs from what was saved"):
        jaxckpt.open(tmp_path / "s" / "00000001").process_states  # noqa: B018


def test_missing_process_states(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="no step"):
            checkpoints.process_state("at")
        checkpoints.save(1, {"x": 1}, process_state={"at": 1})
        checkpoints.wait()
        with pytest.raises(jaxckpt.errors.InputError, match=r"no process_state 'on'; it has \['at'\]"):
            checkpoints.process_state("on")


def test_changing_the_working_directory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with jaxckpt.Checkpointer("run", keep_last=2, options=FAST) as checkpoints:
        for step in range(4):
            checkpoints.save(step, {"x": step})
            monkeypatch.chdir(tmp_path / "b")
        jaxckpt.save("run/00000003", {"x": 999})  # in another directory
        assert checkpoints.restore() == {"x": 3}
    assert names_in(tmp_path / "a/run") == ["00000002", "00000003"]


def test_a_checkpoint_is_not_the_directory_of_a_run(tmp_path: Path) -> None:
    """A restore of its path would return the checkpoint and not the newest step."""
    jaxckpt.save(tmp_path / "run", {"w": 1})
    before = sorted(os.listdir(tmp_path / "run"))
    with pytest.raises(jaxckpt.errors.InputError, match="run is a checkpoint; give the directory of a Checkpointer"):
        jaxckpt.Checkpointer(tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == before


# Notes on errors -------------------------------------------------------------------------------------------


def test_notes_on_an_error_cost_nothing_if_none_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = filled(tmp_path, range(3))
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "folders", lambda *_: pytest.fail("it lists the steps"))
        with pytest.raises(jaxckpt.errors.TreeError, match="nowhere"):
            checkpoints.restore(1, select="nowhere")
    checkpoints.close()


def test_notes_on_an_error_do_not_replace_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = filled(tmp_path, range(3))
    (Path(checkpoints.path(1)) / "manifest.json").write_text("{")

    def refuse(*_: object, **__: object) -> None:
        raise jaxckpt.errors.StorageError(5, "the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "folders", refuse)
        with pytest.raises(jaxckpt.errors.ManifestError):
            checkpoints.restore(1)
    checkpoints.close()


def test_a_step_that_another_object_is_saving_is_deleted_too(tmp_path: Path) -> None:
    first = jaxckpt.Checkpointer(tmp_path, options=FAST)
    second = jaxckpt.Checkpointer(tmp_path, options=FAST)
    first.save(1, state(1))
    first.save(2, {"w": np.zeros(1 << 22)})
    second.delete(2)
    first.close()
    assert second.steps() == [1]


@pytest.mark.parametrize("strict", [True, False])
def test_a_selection_that_leaves_out_what_an_earlier_start_has_saved_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    def init() -> dict[str, Any]:
        return {"params": {"w": jnp.zeros(2)}, "opt_state": {"mu": jnp.zeros(2), "count": jnp.zeros((), int)}}

    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.restore_or_init(init, select="params", strict=strict)
        checkpoints.save(1, jax.tree.map(lambda leaf: leaf + 1, init()))
    assert "left out" not in caplog.text
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        _, state = checkpoints.restore_or_init(init, select="params", strict=strict)
    assert (int(state["params"]["w"][0]), int(state["opt_state"]["count"])) == (1, 0)
    (record,) = [record for record in caplog.records if "left out" in record.message]
    assert record.levelname == "WARNING"
    assert "in the checkpoint, but left out by select=, and as in the init: 2 below 'opt_state'" in record.message
    caplog.clear()
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.restore_or_init(init)
        checkpoints.restore(target=init(), select="params")
    assert "left out" not in caplog.text
