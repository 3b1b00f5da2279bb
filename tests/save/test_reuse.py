"""Unchanged data of an earlier save is linked; data that may have changed is written."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model import chunks as _chunks
from jaxckpt._model.pieces import aligned_empty
from jaxckpt._model.stacks import SMALL_CHUNK_BYTES
from jaxckpt._save import staging as _staging
from jaxckpt._store import codec as _codec
from jaxckpt._store import files as _files
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store_path import store_at

COMPARE = jaxckpt.Options(reuse="content")


def objects(checkpoint: Path) -> dict[str, os.stat_result]:
    """The objects of a checkpoint, by their paths below the data folder."""
    found = (path for path in checkpoint.glob("data-*/*/c/**/*") if path.is_file())
    return {"/".join(path.parts[len(checkpoint.parts) + 1 :]): path.stat() for path in found}


def shared(a: Path, b: Path) -> set[str]:
    """The objects that two checkpoints share."""
    first, second = objects(a), objects(b)
    return {name for name in first.keys() & second.keys() if os.path.samestat(first[name], second[name])}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[jaxckpt.Checkpointer]:
    with jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(sync=False)) as checkpoints:
        yield checkpoints


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices simulate devices with their own memory, where identity proves that an array is unchanged."""
    monkeypatch.setattr(_staging, "is_in_host_memory", lambda value: False)


@pytest.fixture(params=["host memory", "accelerators"])
def either_memory(request: pytest.FixtureRequest) -> None:
    if request.param == "accelerators":
        request.getfixturevalue("accelerators")


def saved(run: jaxckpt.Checkpointer, step: int, tree: Any, **how: Any) -> jaxckpt.SaveInfo:
    assert run.save(step, tree, **how)
    assert run.pending is not None
    return run.pending.wait()


def frozen(rows: int = 3) -> dict[str, jax.Array]:
    """Arrays with one object each, and small ones that are packed into one object."""
    large = {f"large{n}": jnp.full((1100, 1024), n, jnp.float32) for n in range(rows)}
    return {**large, **{f"small{n}": jnp.full((7,), n, jnp.float32) for n in range(20)}}


def require_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, expected))


@pytest.mark.one_device
@pytest.mark.usefixtures("either_memory")
def test_a_frozen_base_is_linked(run: jaxckpt.Checkpointer, tmp_path: Path) -> None:
    base = frozen()
    trees = [{"base": base, "lora": jnp.full((4, 8), step), "step": step} for step in range(4)]
    infos = [saved(run, step, tree) for step, tree in enumerate(trees)]
    assert [info.reused_bytes for info in infos[1:]] == [infos[0].stored_bytes - 4 * 8 * 4 - 4 - 20] * 3
    assert infos[0].reused_bytes == 0
    assert len(shared(tmp_path / "run/00000000", tmp_path / "run/00000003")) == 4
    for step, tree in enumerate(trees):
        require_equal(jaxckpt.load_numpy(f"{tmp_path}/run@{step}"), tree)
    assert jaxckpt.verify(tmp_path / "run").ok


@pytest.mark.one_device
def test_deleting_a_step_keeps_steps_that_share_its_objects(tmp_path: Path) -> None:
    base = frozen(1)
    with jaxckpt.Checkpointer(tmp_path / "run", keep_last=1) as run:
        for step in range(4):
            saved(run, step, {"base": base, "step": np.arange(step + 1)})
            run.wait()
            assert run.steps() == [step]
    assert all(status.st_nlink == 1 for status in objects(tmp_path / "run/00000003").values())
    require_equal(jaxckpt.load_numpy(tmp_path / "run")["base"], base)
    assert jaxckpt.verify(tmp_path / "run").ok


@pytest.mark.one_device
@pytest.mark.parametrize("reuse", ["identity", "auto"])
def test_data_that_may_have_changed_is_written(tmp_path: Path, reuse: Any) -> None:
    run = jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(reuse=reuse))
    host = np.zeros(5)
    saved(run, 0, {"host": host, "x": jnp.zeros(3), "y": (y := jnp.zeros((3, 3)))})
    host[:] = 1
    info = saved(run, 1, {"host": host, "x": jnp.ones(3), "y": y + 0})
    linked = shared(tmp_path / "run/00000000", tmp_path / "run/00000001")
    assert [info.reused_bytes > 0, *linked] == ([False] if reuse == "identity" else [True, "0002-float32-3x3/c/0/0/0"])
    require_equal(run.restore(1)["host"], np.ones(5))
    del y
    gc.collect()
    # New arrays, perhaps at the addresses of deleted ones.
    assert saved(run, 2, {"host": host, "x": jnp.full(3, 7.0), "y": jnp.full((3, 3), 7.0)}).reused_bytes == 0
    require_equal(run.restore(2)["x"], np.full(3, 7.0))
    run.close()


@pytest.mark.one_device
def test_an_object_is_written_if_one_of_its_leaves_changed(run: jaxckpt.Checkpointer) -> None:
    tree = {f"w{n}": jnp.full((5,), n) for n in range(10)}
    saved(run, 0, tree)
    changed = tree | {"w3": jnp.full((5,), 77)}
    assert saved(run, 1, changed).reused_bytes == 0
    require_equal(run.restore(1), changed)
    # The same arrays under swapped names change the bytes of the object.
    swapped = changed | {"w3": changed["w4"], "w4": changed["w3"]}
    assert saved(run, 2, swapped).reused_bytes == 0
    require_equal(run.restore(2), swapped)


@pytest.mark.one_device
def test_old_leaves_of_a_tree_that_grew_are_linked(run: jaxckpt.Checkpointer) -> None:
    base = {f"m{n}": jnp.full((1100, 1024), n) for n in range(2)}
    saved(run, 0, {"base": base})
    info = saved(run, 1, {"base": {"a": jnp.zeros((1100, 1024)), **base}, "more": jnp.ones(3)})
    assert (
        info.reused_bytes == 2 * (info.stored_bytes // 3 // 1000 * 1000) or info.reused_bytes > 0.6 * info.stored_bytes
    )
    require_equal(run.restore(1)["base"]["m1"], base["m1"])


@pytest.mark.usefixtures("accelerators")
def test_another_dtype_or_sharding_is_another_object(tmp_path: Path) -> None:
    base = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(jax.make_mesh((4,), ("x",)), P("x")))
    with jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(reuse="identity")) as run:
        saved(run, 0, base)
        assert saved(run, 1, base).reused_bytes
        info = saved(run, 2, jax.device_put(base, NamedSharding(jax.make_mesh((2,), ("y",)), P(None, "y"))))
        assert not info.reused_bytes


@pytest.mark.one_device
@pytest.mark.usefixtures("either_memory")
def test_objects_of_a_failed_save_are_not_linked(run: jaxckpt.Checkpointer, tmp_path: Path) -> None:
    tree = {"w": jnp.arange(1000.0)}
    saved(run, 0, tree)
    (tmp_path / "run/00000001").write_text("in the way")
    with pytest.raises(jaxckpt.JaxckptError):
        saved(run, 1, tree)
    (tmp_path / "run/00000001").unlink()
    assert saved(run, 2, tree).reused_bytes
    assert shared(tmp_path / "run/00000000", tmp_path / "run/00000002")


@pytest.mark.one_device
@pytest.mark.usefixtures("either_memory")
@pytest.mark.parametrize("harm", ["deleted", "cut", "a link", "deleted during the save"])
def test_a_deleted_original_is_written_again(
    run: jaxckpt.Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    tree = {"w": jnp.arange(1000.0), "v": jnp.arange(1000)}
    saved(run, 0, tree)
    victim = next((tmp_path / "run/00000000").glob("data-*/0000*/c/0/0"))
    match harm:
        case "deleted":
            victim.unlink()
        case "cut":
            os.truncate(victim, 100)
        case "a link":
            victim.rename(tmp_path / "moved")
            victim.symlink_to(tmp_path / "moved")
        case _:
            link = _files._link
            monkeypatch.setattr(_files, "_link", lambda *paths: victim.unlink(missing_ok=True) or link(*paths))
    info = saved(run, 1, tree)
    assert 0 < info.reused_bytes < info.stored_bytes
    require_equal(run.restore(1), tree)
    assert jaxckpt.verify(tmp_path / "run/00000001").ok


@pytest.mark.one_device
@pytest.mark.usefixtures("either_memory")
def test_without_links_all_data_is_written(run: jaxckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(old: str, *_: Any, **__: Any) -> None:
        tries.extend(["object"] if "/c/" in old else [])  # otherwise a manifest
        raise PermissionError(1, "Operation not permitted")

    tries: list[str] = []
    monkeypatch.setattr(os, "link", refuse)
    tree = {"w": jnp.arange(1000.0)}
    assert [saved(run, step, tree).reused_bytes for step in range(8)] == [0] * 8
    assert len(tries) == 1, "refused once, links are not tried again"
    require_equal(run.restore(7), tree)


@pytest.mark.one_device
def test_own_files_are_linked_if_those_of_another_user_are_not(
    run: jaxckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": jnp.arange(1000.0)}
    saved(run, 0, tree)
    run.close()
    link = os.link

    def refuse_step_0(old: str, *rest: Any, **options: Any) -> None:
        if "00000000" in os.fspath(old):
            raise PermissionError(1, "Operation not permitted")
        link(old, *rest, **options)

    monkeypatch.setattr(os, "link", refuse_step_0)
    with jaxckpt.Checkpointer(run.directory) as resumed:
        assert [saved(resumed, step, tree).reused_bytes > 0 for step in (1, 2, 3)] == [False, True, True]


@pytest.mark.one_device
@pytest.mark.usefixtures("either_memory")
def test_arrays_may_be_donated_as_soon_as_the_save_returns(run: jaxckpt.Checkpointer) -> None:
    tree = {"w": jnp.arange(100_000.0), "v": jnp.zeros(3)}
    expected = jax.tree.map(np.array, tree)
    saved(run, 0, tree)
    run.save(1, tree)
    tree = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(tree)
    require_equal(run.restore(1), expected)
    info = saved(run, 2, tree)
    assert info.reused_bytes == 0
    require_equal(run.restore(2), tree)


@pytest.mark.one_device
@pytest.mark.usefixtures("accelerators")
def test_a_lost_original_of_donated_arrays_is_an_error(
    run: jaxckpt.Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": jnp.arange(1000.0)}
    saved(run, 0, tree)

    def lose(*_: Any) -> None:
        tree["w"].delete()
        raise FileNotFoundError

    monkeypatch.setattr(_files, "_link", lose)
    run.save(1, tree)
    with pytest.raises(
        jaxckpt.errors.StorageError, match=r"can no longer be linked.*donated or deleted in the meantime"
    ):
        run.wait()
    assert run.steps() == [0]


@pytest.mark.one_device
def test_reuse_none_writes_everything(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(1000.0)}
    with jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(reuse=None)) as run:
        assert [saved(run, step, tree).reused_bytes for step in range(3)] == [0] * 3
    assert not shared(tmp_path / "run/00000000", tmp_path / "run/00000001")


@pytest.mark.one_device
def test_objects_of_an_overwritten_step_are_linked(run: jaxckpt.Checkpointer, tmp_path: Path) -> None:
    tree = {"w": jnp.arange(1000.0), "v": 1}
    saved(run, 0, tree)
    before = objects(tmp_path / "run/00000000")
    assert saved(run, 0, tree | {"v": 2}, overwrite=True).reused_bytes
    after = objects(tmp_path / "run/00000000")
    assert [status.st_ino for status in before.values()] == [status.st_ino for status in after.values()]
    assert all(status.st_nlink == 1 for status in after.values())
    require_equal(run.restore(0), tree | {"v": 2})


@pytest.mark.one_device
@pytest.mark.parametrize("options", [jaxckpt.Options(compression="zstd"), jaxckpt.Options(io="tensorstore")])
def test_tensorstores_objects_are_linked_too(tmp_path: Path, options: jaxckpt.Options) -> None:
    tree = {"w": jnp.arange(100_000.0)}
    with jaxckpt.Checkpointer(tmp_path / "run", options=options) as run:
        infos = [saved(run, step, tree) for step in range(2)]
    assert infos[1].reused_bytes == infos[1].stored_bytes
    require_equal(jaxckpt.load_numpy(tmp_path / "run"), tree)


# Memory that another library shares -----------------------------------------------------------------------


def from_numpy(values: Any) -> tuple[jax.Array, Any]:
    memory = aligned_empty(values.shape, values.dtype)
    memory[...] = values
    return jax.device_put(memory), memory


def from_dlpack(values: Any) -> tuple[jax.Array, Any]:
    _, memory = from_numpy(values)
    return jnp.from_dlpack(memory), memory


def over_devices(values: Any) -> tuple[jax.Array, Any]:
    _, memory = from_numpy(values)
    return jax.device_put(memory, NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))), memory


def from_torch(values: Any) -> tuple[jax.Array, Any]:
    torch = pytest.importorskip("torch")
    memory = torch.from_numpy(from_numpy(values)[1])
    return jnp.from_dlpack(memory), memory


def to_torch(values: Any) -> tuple[jax.Array, Any]:
    """XLA allocated the memory, and torch changes it."""
    torch = pytest.importorskip("torch")
    array = jnp.array(values) + 0
    return array, torch.from_dlpack(array)


def mapped(values: Any) -> tuple[jax.Array, Any]:
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, values)
        file.flush()
        memory = np.load(file.name, mmap_mode="r+")
    return jax.device_put(memory), memory


SHARED = [from_numpy, from_dlpack, over_devices, from_torch, to_torch, mapped]


@pytest.mark.parametrize("share", SHARED)
@pytest.mark.parametrize("reuse", ["auto", "content", "identity"])
def test_an_array_that_was_changed_in_place_is_written(tmp_path: Path, share: Any, reuse: Any) -> None:
    """No jax.Array says whether its memory is shared: even memory that XLA allocated may be exported."""
    count, count_memory = share(np.zeros(32, np.float32))
    large, large_memory = share(np.zeros((1100, 1024), np.float32))  # changed outside of the sample
    options = jaxckpt.Options(reuse=reuse, sync=False)
    with jaxckpt.Checkpointer(tmp_path / "run", options=options) as run:
        for step in range(4):
            count_memory[:] += step
            large_memory[step * 77 + 7, 501] += 1
            saved(run, step, {"count": count, "large": large, "frozen": (frozen := jnp.ones(3))})
    expected = np.zeros((1100, 1024), np.float32)
    for step in range(4):
        expected[step * 77 + 7, 501] += 1
        restored = jaxckpt.load_numpy(f"{tmp_path}/run@{step}")
        require_equal(restored, {"count": np.full(32, step * (step + 1) / 2), "large": expected, "frozen": frozen})
    assert jaxckpt.verify(tmp_path / "run").ok


def test_identity_links_nothing_in_host_memory_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxckpt")
    tree = {"w": jnp.arange(1000.0)}
    with jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(reuse="identity")) as run:
        assert [saved(run, step, tree).reused_bytes for step in range(3)] == [0] * 3
    assert "again that seem unchanged since the last save: arrays in host memory may have been changed" in caplog.text


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(("reuse", "digests"), [("content", True), ("auto", False)])
def test_content_reads_every_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse: Any, digests: bool) -> None:
    tree = {"w": jnp.arange(1000.0)}
    with jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(reuse=reuse)) as run:
        saved(run, 0, tree)
        computed: list[Any] = []
        digest = _chunks.chunk_digest
        monkeypatch.setattr(_chunks, "chunk_digest", lambda *args: computed.append(args) or digest(*args))
        assert saved(run, 1, tree).reused_bytes
    assert bool(computed) == digests


# After jax.jit --------------------------------------------------------------------------------------------


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.LoRALinear(512, 512, lora_rank=4, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


@nnx.jit
def train(model: Adapted, optimizer: nnx.Optimizer[Adapted], x: jax.Array) -> None:
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda model: ((model(x) - x) ** 2).mean(), argnums=adapters)(model)
    optimizer.update(model, grads)


def test_the_base_of_an_nnx_training_loop_is_linked(tmp_path: Path) -> None:
    """Every array that passes through jit is another object afterward."""
    model = Adapted(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    states: list[Any] = []

    def steps(run: jaxckpt.Checkpointer, numbers: range) -> Iterator[int]:
        for step in numbers:
            train(model, optimizer, jax.random.normal(jax.random.key(step), (8, 512)))
            info = saved(run, step, state := nnx.state({"model": model, "optimizer": optimizer}))
            states.append(jax.tree.map(np.array, state))
            yield info.stored_bytes - info.reused_bytes

    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        first, *written = steps(run, range(4))
    base = 2 * 512 * 512 * 4
    assert first > base
    assert max(written) < 0.1 * base, written
    with jaxckpt.Checkpointer(tmp_path / "run") as run:  # another job: its first save, too
        assert max(steps(run, range(4, 6))) < 0.1 * base
    for step, state in enumerate(states):
        require_equal(jax.tree.leaves(jaxckpt.load_numpy(f"{tmp_path}/run@{step}")), jax.tree.leaves(state))


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"io": "tensorstore"}])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_equal_data_in_other_arrays_is_linked(tmp_path: Path, options: Any, spec: P) -> None:
    sharding = NamedSharding(jax.make_mesh((4,), ("x",)), spec)
    base = jax.device_put({f"w{n}": np.full((64, 128), n, np.float32) for n in range(5)}, sharding)
    base |= {"half": jax.device_put(np.arange(8192, dtype=jnp.bfloat16).reshape(64, 128), sharding)}
    with jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(**options)) as run:
        for step in range(3):
            tree = {"base": jax.tree.map(lambda x: x + 0, base), "host": np.arange(9), "step": jnp.full(3, step)}
            info = saved(run, step, tree)
            require_equal(run.restore(step), tree)
    assert info.stored_bytes - info.reused_bytes < 100
    assert jaxckpt.verify(tmp_path / "run").ok


@pytest.mark.one_device
def test_data_that_differs_only_outside_of_the_sample_is_written(run: jaxckpt.Checkpointer) -> None:
    """A sample only saves work; whether objects are equal is decided by all of their bytes."""
    values = np.zeros((3, 1024, 1024), np.float32)
    saved(run, 0, jnp.asarray(values))
    for step in range(1, 6):
        values[np.unravel_index(step * 499_979, values.shape)] += 1
        assert saved(run, step, jnp.array(values)).reused_bytes == 0
        require_equal(run.restore(step), values)
    assert saved(run, 6, jnp.array(values)).reused_bytes > 0


@pytest.mark.one_device
def test_data_that_freezes_later_is_linked_from_the_second_save_on(
    run: jaxckpt.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jaxckpt")
    base = jnp.zeros((64, 1024))
    for step in range(3):
        base += 1
        assert saved(run, step, {"w": base}).reused_bytes == 0
    assert "unchanged" not in caplog.text
    assert saved(run, 3, {"w": base + 0}).reused_bytes == 0
    assert "wrote 256.1 KiB again that seem unchanged since the last save: the last save did not" in caplog.text
    info = saved(run, 4, {"w": base + 0})
    assert info.reused_bytes == info.stored_bytes
    require_equal(run.restore(4)["w"], base)


@pytest.mark.one_device
def test_the_cost_of_data_that_changes_is_one_sample(
    run: jaxckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[Any] = []
    digest, first = _chunks.chunk_digest, 0
    for module in (_chunks, _codec):
        monkeypatch.setattr(module, "chunk_digest", lambda *args: digests.append(args) or digest(*args))
    for step in range(4):
        info = saved(run, step, {f"w{n}": jnp.full((1100, 1024), step + n) for n in range(3)})
        assert len(digests) * SMALL_CHUNK_BYTES >= info.total_bytes
        first = first or len(digests)
    assert len(digests) == first, "only in the first save"


@pytest.mark.one_device
def test_an_ordinary_save_computes_no_digests(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(1000.0)}
    for _ in range(2):
        assert not jaxckpt.save(tmp_path / "a", tree, overwrite=True).reused_bytes
    manifest, _ = load_manifest(store_at(tmp_path / "a", jaxckpt.Options()))
    assert not manifest.stacks[0].contents


@pytest.mark.one_device
def test_a_log_line_says_why_unchanged_data_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(old: str, *_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    caplog.set_level("INFO", "jaxckpt")
    tree = {"w": jnp.zeros((64, 1024)), "v": jnp.arange(1000)}
    with jaxckpt.Checkpointer("memory://reuse/logged") as run:
        for step in range(8):
            saved(run, step, tree)
    reasons = [line for line in caplog.messages if "unchanged" in line]
    assert len(reasons) == 1, "later saves do not try again"
    assert reasons[0].startswith("memory://reuse/logged/00000001: wrote 260.0 KiB again that seem unchanged")
    assert reasons[0].endswith("object stores have no links")
    caplog.clear()
    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        saved(run, 0, tree)
        next((tmp_path / "run/00000000").glob("data-*/*x*/c/0/0/0")).unlink()
        saved(run, 1, tree)
        assert "wrote 256.1 KiB again that seem unchanged since the last save: their files" in caplog.text
        caplog.clear()
        monkeypatch.setattr(os, "link", refuse)
        saved(run, 2, jax.tree.map(lambda x: x + 0, tree))
    assert "260.0 KiB again that seem unchanged since the last save: the file system refuses links" in caplog.text


# By content -----------------------------------------------------------------------------------------------


@pytest.mark.one_device
@pytest.mark.parametrize("how", [{}, {"compression": "zstd"}, {"io": "tensorstore"}])
def test_equal_content_is_linked(tmp_path: Path, how: Any) -> None:
    options = jaxckpt.Options(reuse="content", **how)
    tree = {"w": jnp.arange(200_000.0), "host": np.arange(99), "step": np.array(0)}
    first = jaxckpt.save(tmp_path / "ckpt", tree, options=options)
    copies = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x + 0, tree)
    info = jaxckpt.save(tmp_path / "ckpt", copies | {"step": np.array(1)}, overwrite=True, options=options)
    assert first.reused_bytes == 0
    assert info.stored_bytes - info.reused_bytes < 100
    require_equal(jaxckpt.load_numpy(tmp_path / "ckpt"), tree | {"step": np.array(1)})
    assert jaxckpt.verify(tmp_path / "ckpt").ok


@pytest.mark.one_device
def test_a_new_job_compares_with_the_newest_step(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(200_000.0)}
    for step in range(2):
        with jaxckpt.Checkpointer(tmp_path / "run", options=COMPARE) as run:
            info = saved(run, step, {"w": tree["w"] + 0, "step": step})
    assert info.reused_bytes == info.stored_bytes
    manifest, _ = load_manifest(store_at(tmp_path / "run/00000001", jaxckpt.Options()))
    assert all(stack.contents.keys() == stack.objects.keys() for stack in manifest.stacks)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_the_digest_does_not_depend_on_the_layout_in_memory(tmp_path: Path, spec: P) -> None:
    """Column pieces are gathered and row pieces are written in place, but the objects have the same digest."""
    values = np.arange(4 * 64.0, dtype=np.float32).reshape(4, 64)
    mesh = jax.make_mesh((4,), ("x",))
    digests: set[str] = set()
    for name, leaf in (("a", values), ("b", jax.device_put(values, NamedSharding(mesh, spec)))):
        jaxckpt.save(tmp_path / name, leaf, options=COMPARE)
        manifest, _ = load_manifest(store_at(tmp_path / name, jaxckpt.Options()))
        digests |= {*manifest.stacks[0].contents.values()}
    assert len(digests) == 1


def test_a_digest_is_as_the_format_specifies(tmp_path: Path) -> None:
    xxhash = pytest.importorskip("xxhash")
    values = np.arange(10, dtype="<u2")
    jaxckpt.save(tmp_path / "a", values, options=COMPARE)
    manifest, _ = load_manifest(store_at(tmp_path / "a", jaxckpt.Options()))
    entry = (0).to_bytes(8, "little") + xxhash.xxh3_128(values.tobytes()).digest()
    assert manifest.stacks[0].contents == {"0/0": xxhash.xxh3_128(entry).hexdigest()}


@pytest.mark.one_device
def test_replacing_a_damaged_checkpoint_writes_everything(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(1000.0)}
    jaxckpt.save(tmp_path / "a", tree, options=COMPARE)
    manifest = tmp_path / "a/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"created"', b'"createD"'))
    info = jaxckpt.save(tmp_path / "a", tree, overwrite=True, options=COMPARE)
    assert info.reused_bytes == 0
    assert jaxckpt.verify(tmp_path / "a").ok


@pytest.mark.one_device
def test_on_an_object_store_all_data_is_written() -> None:
    tree = {"w": jnp.arange(1000.0)}
    with jaxckpt.Checkpointer("memory://reuse/run", options=COMPARE) as run:
        assert [saved(run, step, tree).reused_bytes for step in range(3)] == [0] * 3
    require_equal(jaxckpt.load_numpy("memory://reuse/run"), tree)


def test_the_option_is_checked() -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=r"Options\.reuse must be one of"):
        jaxckpt.Options(reuse="hash")  # pyright: ignore[reportArgumentType]
