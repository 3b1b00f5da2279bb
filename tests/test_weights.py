"""Published weights: followers get the same bits, even if either side fails."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import servers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PROGRAMS, environment, start

import jaxckpt
from jaxckpt._runs.saving import RunStep
from jaxckpt._store.folder import Folder
from jaxckpt.errors import StorageError

FAST = jaxckpt.Options(sync=False)
SHAPES = {"w": (64, 48), "b": (48,), "deep": [(2, 3, 8), ()]}


def weights(seed: int, step: int, rate: float = 1e-3) -> Any:
    """Weights after this number of steps of a random walk; every process computes the same ones."""

    def leaf(shape: tuple[int, ...]) -> jax.Array:
        start = np.random.default_rng(seed).standard_normal(shape, np.float32)
        moved = rate * np.random.default_rng([seed, step]).standard_normal(shape, np.float32)
        return jnp.asarray(start + moved)

    return jax.tree.map(leaf, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def require_bits(found: Any, step: int, seed: int = 0) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(weights(seed, step)), strict=True):
        wanted = np.asarray(other.astype(jnp.bfloat16))
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), wanted.view(np.uint16))


def test_a_follower_has_the_bits_of_every_publication(tmp_path: Path) -> None:
    with jaxckpt.weights.Publisher(tmp_path, anchor_every=4, options=FAST) as publisher:
        follower = jaxckpt.weights.subscribe(tmp_path, timeout_seconds=60, poll_seconds=0.01)
        for step in range(0, 60, 5):
            assert publisher.publish(step, weights(0, step))
            publisher._checkpointer.wait()
            found, tree = next(follower)
            assert found == step
            require_bits(tree, step)
        kept = jaxckpt.Run(tmp_path).steps()
        assert kept == [4, 5, 6, 7, 8, 9, 10, 11], "the last two chains"
    assert list(follower) == []
    sizes = {number: stored(tmp_path / f"{number:08d}") for number in kept}
    assert sizes[8] > 2 * sizes[9]
    assert jaxckpt.verify(tmp_path).ok


def stored(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("data-*/*/c/**/*") if file.is_file())


@pytest.mark.one_device
def test_a_late_or_slow_follower_gets_the_newest(tmp_path: Path) -> None:
    with jaxckpt.weights.Publisher(tmp_path, anchor_every=4, options=FAST) as publisher:
        slow = jaxckpt.weights.subscribe(tmp_path, timeout_seconds=60, poll_seconds=0.01)
        publisher.publish(0, weights(0, 0))
        publisher._checkpointer.wait()
        assert next(slow)[0] == 0
        for step in range(1, 19):
            publisher.publish(step, weights(0, step))
        publisher._checkpointer.wait()
        for follower in (slow, jaxckpt.weights.subscribe(tmp_path, timeout_seconds=60)):
            step, tree = next(follower)
            assert step == 18
            require_bits(tree, 18)


def test_onto_another_mesh(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    other = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = {"w": NamedSharding(mesh, P("a", "b")), "b": NamedSharding(mesh, P()), "deep": NamedSharding(mesh, P())}

    def spread(step: int) -> Any:
        tree = weights(0, step)
        return {name: jax.device_put(tree[name], sharding) for name, sharding in placed.items()}

    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        follower = jaxckpt.weights.subscribe(tmp_path, mesh=other, timeout_seconds=60, poll_seconds=0.01)
        for step in range(3):
            publisher.publish(step, spread(step))
            publisher._checkpointer.wait()
            _, tree = next(follower)
            assert tree["w"].sharding == NamedSharding(other, P(None, "b"))
            require_bits(tree, step)


@pytest.mark.one_device
@pytest.mark.parametrize("rename", [None, {"deep": "body/layers"}, lambda path: path.replace("deep", "body/layers")])
@pytest.mark.parametrize("with_target", [False, True])
def test_a_part_of_the_weights_with_other_names(tmp_path: Path, rename: Any, with_target: bool) -> None:
    """An anchor and differences: a tree with a leaf of a sequence that is left out."""
    target = None
    if with_target:
        leaf = jax.ShapeDtypeStruct((2, 3, 8), jnp.bfloat16)
        target = {"deep": [leaf]} if rename is None else {"body": {"layers": {"0": leaf}}}
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        follower = jaxckpt.weights.subscribe(
            tmp_path,
            target,
            select="body/layers/0" if rename else "deep/0",
            rename=rename,
            timeout_seconds=60,
            poll_seconds=0.01,
        )
        for step in range(3):
            publisher.publish(step, weights(0, step))
            publisher._checkpointer.wait()
            found_step, tree = next(follower)
            assert found_step == step
            assert [*tree] == ["deep" if rename is None else "body"]
            (found,) = jax.tree.leaves(tree)
            expected = np.asarray(weights(0, step)["deep"][0].astype(jnp.bfloat16))
            np.testing.assert_array_equal(np.asarray(found).view(np.uint16), expected.view(np.uint16))


@pytest.mark.one_device
def test_every_bit_pattern(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    first, second = (jnp.asarray(words.view(jnp.bfloat16)) for words in (bits, bits[::-1].copy()))
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        for step, leaf in enumerate((first, second)):
            publisher.publish(step, {"x": leaf})
    ((_, tree),) = jaxckpt.weights.subscribe(tmp_path)
    np.testing.assert_array_equal(np.asarray(tree["x"]).view(np.uint16), bits[::-1])


@pytest.mark.one_device
def test_arrays_may_be_donated_and_signal_handlers_are_unchanged(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        for step in range(3):
            tree = {"x": jnp.full(3, step, jnp.bfloat16), "y": jnp.full(3, step, jnp.float32)}
            publisher.publish(step, tree)
            for leaf in jax.tree.leaves(tree):
                leaf.delete()
        assert signal.getsignal(signal.SIGTERM) is before, "only the training's Checkpointer handles signals"
    ((_, tree),) = jaxckpt.weights.subscribe(tmp_path)
    assert float(tree["x"][0]) == float(tree["y"][0]) == 2


@pytest.mark.one_device
def test_other_shapes_and_failures_begin_a_new_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        publisher.publish(0, {"w": jnp.ones(3)})
        publisher.publish(1, {"w": jnp.ones(4)})
        publisher.publish(2, {"w": jnp.full(4, 2.0)})
        publisher._checkpointer.wait()
        with monkeypatch.context() as patched:
            patched.setattr(
                Folder, "publish", lambda *_, **__: (_ for _ in ()).throw(jaxckpt.errors.StorageError(28, "full"))
            )
            publisher.publish(3, {"w": jnp.full(4, 3.0)})
            with pytest.raises(jaxckpt.errors.StorageError, match="full"):
                publisher.publish(4, {"w": jnp.full(4, 4.0)})
        publisher.publish(5, {"w": jnp.full(4, 5.0)})
        with pytest.raises(jaxckpt.errors.InputError, match="'n' is not"):
            jaxckpt.weights.Publisher(tmp_path / "other", options=FAST).publish(
                0, {"w": jnp.ones(3), "n": jnp.arange(3)}
            )
    found = [jaxckpt.open(f"{tmp_path}@{number}").metadata for number in jaxckpt.Run(tmp_path).steps()]
    assert [(note["step"], note["previous"]) for note in found] == [(1, None), (2, 1), (5, None)]
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:  # restarted
        publisher.publish(6, {"w": jnp.full(4, 6.0)})
    assert jaxckpt.open(tmp_path).metadata == {"step": 6, "previous": None}
    ((step, tree),) = jaxckpt.weights.subscribe(tmp_path)
    assert (step, float(tree["w"][0])) == (6, 6.0)


@pytest.mark.one_device
def test_a_failure_is_raised_by_the_next_step_and_begins_a_new_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jaxckpt.weights.Publisher(tmp_path / "w", options=FAST) as publisher:
        published(publisher, 0, 0)
        with monkeypatch.context() as patched:
            patched.setattr(
                Folder, "publish", lambda *_, **__: (_ for _ in ()).throw(jaxckpt.errors.StorageError(28, "full"))
            )
            publisher.publish(1, {"w": jnp.full(4, 1.0)})
            with pytest.raises(jaxckpt.errors.StorageError, match="full"):
                publisher.publish(2, {"w": jnp.full(4, 2.0)})
        published(publisher, 2, 2)
        ((step, tree),) = jaxckpt.weights.subscribe(tmp_path / "w", timeout_seconds=0.1)
        assert (step, float(tree["w"][0])) == (2, 2.0)


@pytest.mark.one_device
def test_a_path_may_be_relative_or_end_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follower = jaxckpt.weights.subscribe("w/", timeout_seconds=60)
    with jaxckpt.weights.Publisher("w", options=FAST) as publisher:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        for step in range(2):
            published(publisher, step, step)
            assert next(follower)[0] == step


def test_a_url_may_end_with_a_slash(s3: servers.Bucket) -> None:
    with jaxckpt.weights.Publisher(f"{s3.url}/w/") as publisher:
        published(publisher, 3, 1)
    ((step, _),) = jaxckpt.weights.subscribe(f"{s3.url}/w/")
    assert step == 3


@pytest.mark.one_device
def test_invalid_arguments(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        run.save(1, {"x": 1})
    with pytest.raises(jaxckpt.errors.InputError, match="holds no published weights"):
        jaxckpt.weights.Publisher(tmp_path / "run")
    with pytest.raises(jaxckpt.errors.InputError, match="holds no published weights"):
        next(jaxckpt.weights.subscribe(tmp_path / "run"))
    with jaxckpt.weights.Publisher(tmp_path / "w", options=FAST) as publisher:
        publisher.publish(0, {"w": jnp.ones(4)})
        publisher.publish(1, {"w": jnp.ones(4)})
    with pytest.raises(jaxckpt.errors.InputError, match="asks for float32 at 'w'"):
        next(jaxckpt.weights.subscribe(tmp_path / "w", {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}))
    rules = jaxckpt.rules.Rules([])
    with pytest.raises(jaxckpt.errors.InputError, match="takes no Rules"):
        jaxckpt.weights.subscribe(tmp_path / "w", rename=rules)  # pyright: ignore[reportArgumentType]
    for other in (jax.ShapeDtypeStruct((3,), jnp.bfloat16), jnp.ones(3, jnp.bfloat16), 7):
        target = {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "other": other}
        with pytest.raises(jaxckpt.errors.InputError, match="target has a leaf 'other' that select= leaves out"):
            next(jaxckpt.weights.subscribe(tmp_path / "w", target, select="w"))
    os.rename(tmp_path / "w/00000000", tmp_path / "gone")
    with pytest.raises(jaxckpt.errors.DataError, match="lacks a publication since its newest anchor, 0"):
        next(jaxckpt.weights.subscribe(tmp_path / "w"))


@pytest.mark.child
def test_a_publisher_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """The follower gets the right bits for each step, and keeps getting newer publications."""
    found: list[int] = []
    for _ in range(2):
        publisher = start([str(PROGRAMS / "publisher.py"), str(tmp_path / "w")], environment(1))
        try:
            follower = jaxckpt.weights.subscribe(tmp_path / "w", timeout_seconds=60, poll_seconds=0.01)
            until = time.monotonic() + 200  # a hang guard
            while len(found) % 6 < 5 and time.monotonic() < until:
                step, tree = next(follower)
                assert float(tree["step"]) == step % 256
                for leaf in jax.tree.leaves(tree):
                    assert (np.asarray(leaf, np.float32) == step % 256).all()
                found.append(step)
            time.sleep(random.uniform(0, 0.05))
        finally:
            publisher.kill()
            publisher.wait(60)
        found.append(-1)
        step, tree = next(jaxckpt.weights.subscribe(tmp_path / "w", timeout_seconds=5))
        assert (np.asarray(tree["w"], np.float32) == step % 256).all()
    assert len(found) == 12
    assert jaxckpt.verify(tmp_path / "w").ok


def published(publisher: jaxckpt.weights.Publisher, step: int, value: float) -> None:
    publisher.publish(step, {"w": jnp.full(4, float(value))})
    publisher._checkpointer.wait()


@pytest.mark.one_device
def test_a_follower_may_change_the_tree_that_it_gets(tmp_path: Path) -> None:
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        follower = jaxckpt.weights.subscribe(tmp_path, timeout_seconds=60, poll_seconds=0.01)
        for step in range(4):
            published(publisher, step, step)
            _, tree = next(follower)
            assert float(tree["w"][0]) == step
            tree["w"] = tree["w"] * 3
            tree["lora"] = 1


@pytest.mark.one_device
def test_a_waiting_follower_sees_that_the_directory_is_used_again(tmp_path: Path) -> None:
    found: list[float] = []

    def follow() -> None:
        for _, tree in jaxckpt.weights.subscribe(tmp_path / "w", timeout_seconds=60, poll_seconds=0.01):
            found.append(float(tree["w"][0]))

    def await_value(value: float) -> None:
        deadline = time.monotonic() + 30
        while value not in found:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    publisher = jaxckpt.weights.Publisher(tmp_path / "w", anchor_every=3, options=FAST)
    for step in range(8):
        published(publisher, step, step)
    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    await_value(7)
    (tmp_path / "w").rename(tmp_path / "old")  # as after the publisher was killed
    with jaxckpt.weights.Publisher(tmp_path / "w", anchor_every=3, options=FAST) as again:
        for step in range(3):
            published(again, step, 100 + step)
            await_value(100 + step)
    follower.join(60)
    assert not follower.is_alive()


@pytest.mark.one_device
def test_failed_anchors_leave_the_chain_of_the_last_that_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = jaxckpt.weights.Publisher(tmp_path, anchor_every=3, options=FAST)
    for step in range(8):
        published(publisher, step, step)
    assert jaxckpt.Run(tmp_path).steps() == [3, 4, 5, 6, 7]
    published(publisher, 8, 8)
    with monkeypatch.context() as patched:
        patched.setattr(RunStep, "claim", lambda *_: (_ for _ in ()).throw(StorageError(28, "no space")))
        for step in range(9, 13):
            with contextlib.suppress(StorageError):
                published(publisher, step, step)
    publisher._checkpointer._deletion._request_pass()  # as after a reader has released a step
    publisher._checkpointer._deletion.wait()
    assert jaxckpt.Run(tmp_path).steps() == [6, 7, 8]
    published(publisher, 20, 20)
    publisher.close()
    assert float(next(jaxckpt.weights.subscribe(tmp_path, timeout_seconds=5))[1]["w"][0]) == 20
    assert jaxckpt.Run(tmp_path).steps()[:3] == [6, 7, 8]


def test_a_publisher_cannot_look_for_nan_in_differences(tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="non_finite"):
        jaxckpt.weights.Publisher(tmp_path, options=jaxckpt.Options(non_finite="error"))


@pytest.mark.one_device
def test_a_reused_directory_has_other_weights_with_equal_numbers(tmp_path: Path) -> None:
    follower = jaxckpt.weights.subscribe(tmp_path / "w", timeout_seconds=60, poll_seconds=0.01)
    with jaxckpt.weights.Publisher(tmp_path / "w", options=FAST) as publisher:
        for step in range(3):
            published(publisher, step, step)
        assert next(follower)[0] == 2
    shutil.rmtree(tmp_path / "w")
    with jaxckpt.weights.Publisher(tmp_path / "w", options=FAST) as publisher:
        for step in range(5):
            published(publisher, step, 100 + step)
        step, tree = next(follower)
        assert (step, float(tree["w"][0])) == (4, 104.0)


@pytest.mark.one_device
def test_a_publication_that_is_interrupted_during_publishing_ends_its_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        published(publisher, 0, 0)
        save = publisher._checkpointer.save

        def interrupted(*args: Any, **how: Any) -> None:
            save(*args, **how)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(publisher._checkpointer, "save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(1, {"w": jnp.full(4, 1.0)})
        for step in (2, 3):
            published(publisher, step, step)
    assert [jaxckpt.open(f"{tmp_path}@{number}").metadata["previous"] for number in range(4)] == [None, 0, None, 2]
    ((step, tree),) = jaxckpt.weights.subscribe(tmp_path)
    assert (step, float(tree["w"][0])) == (3, 3.0)


@pytest.mark.one_device
def test_every_publication_must_have_floats(tmp_path: Path) -> None:
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        publisher.publish(0, {"w": jnp.ones(3)})
        with pytest.raises(jaxckpt.errors.InputError, match="'w' is not"):
            publisher.publish(1, {"w": jnp.array([1001, 2, 3])})  # 1001 becomes 1000 in bfloat16


def test_leaves_on_different_devices_and_leaves_that_move(tmp_path: Path) -> None:
    first, second = (jax.sharding.SingleDeviceSharding(jax.devices()[number]) for number in (1, 5))
    mesh = jax.make_mesh((4,), ("x",))  # with explicit axes, if JAX has them
    other = jax.sharding.Mesh(np.array(jax.devices()[4:]), ("x",))
    stages = [[first, second], [first, second], [second, first], [NamedSharding(mesh, P("x")), second]]
    stages += [[NamedSharding(other, P("x")), NamedSharding(mesh, P("x"))]] * 2
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        follower = jaxckpt.weights.subscribe(tmp_path, timeout_seconds=60, poll_seconds=0.01)
        for step, shardings in enumerate(stages):
            publisher.publish(step, [jax.device_put(jnp.full(8, step + 1.0), one) for one in shardings])
            publisher._checkpointer.wait()
            found, leaves = next(follower)
            assert [found, *(float(np.asarray(leaf)[-1]) for leaf in leaves)] == [step, step + 1, step + 1]
    previous = [jaxckpt.open(f"{tmp_path}@{number}").metadata["previous"] for number in jaxckpt.Run(tmp_path).steps()]
    assert previous == [None, None, 4], "leaves that have moved begin a new chain"


@pytest.mark.one_device
def test_weights_are_restored_only_onto_devices(tmp_path: Path) -> None:
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        publisher.publish(0, {"w": jnp.ones(3)})
    with pytest.raises(jaxckpt.errors.InputError, match=r"asks for ndarray at 'w'.*np.asarray"):
        next(jaxckpt.weights.subscribe(tmp_path, {"w": np.zeros(3, jnp.bfloat16)}))


def test_another_runs_directory_is_not_changed(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as run:
        run.save(1, {"x": 1})
    with pytest.raises(jaxckpt.errors.InputError, match="holds no published weights"):
        jaxckpt.weights.Publisher(tmp_path)
    assert [step.number for step in jaxckpt.Run(tmp_path).follow(timeout_seconds=60)] == [1], "the run is still ended"
    assert (tmp_path / "_run/ended.json").exists()


@pytest.mark.one_device
def test_a_checkpointer_that_saves_among_the_publications_is_an_error(tmp_path: Path) -> None:
    follower = jaxckpt.weights.subscribe(tmp_path, timeout_seconds=60, poll_seconds=0.01)
    with jaxckpt.weights.Publisher(tmp_path, options=FAST) as publisher:
        publisher.publish(0, {"w": jnp.ones(3)})
    assert next(follower)[0] == 0
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as run:
        run.save(1, {"w": jnp.ones(3)}, metadata={"note": 1})
    with pytest.raises(jaxckpt.errors.InputError, match="00000001 holds no published weights"):
        next(follower)
