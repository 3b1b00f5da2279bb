"""Copies from devices with their own memory to the host; CPU devices simulate them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from strategies import bits

import jaxckpt
from jaxckpt._devices import device_to_host, shardings
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._save import staging
from jaxckpt._save.staging import StagedAhead
from jaxckpt.errors import InputError

Save = Callable[..., Any]

OBJECT_BYTES = 4 << 10
OPTIONS = jaxckpt.Options(object_bytes=OBJECT_BYTES, chunk_bytes=1 << 10, sync=False, cast="unsafe")
LIMITED = dataclasses.replace(OPTIONS, staging_bytes=1 << 20)

SAVES: dict[str, Save] = {
    "save": lambda *given, **how: jaxckpt.save(*given, options=OPTIONS, **how),
    "save_async": lambda *given, **how: jaxckpt.save_async(*given, options=OPTIONS, **how).wait(),
    "save_async with a limit": lambda *given, **how: jaxckpt.save_async(*given, options=LIMITED, **how).wait(),
}
every_save = pytest.mark.parametrize("save", SAVES.values(), ids=list(SAVES))


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[jax.Array]:
    """The arrays that are sent to the host."""
    arrays: list[jax.Array] = []
    start = device_to_host.start_copies
    monkeypatch.setattr(staging, "is_in_host_memory", lambda value: False)
    monkeypatch.setattr(
        device_to_host, "start_copies", lambda given, memory: arrays.extend(given) or start(given, memory)
    )
    return arrays


def numbers(shape: tuple[int, ...], sharding: Any = None) -> jax.Array:
    return jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sharding)


def require_equal(path: Path, wanted: dict[str, np.ndarray[Any, Any]]) -> None:
    found = jaxckpt.load_numpy(path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.one_device
@every_save
@pytest.mark.parametrize("name", DTYPES)
def test_parts_of_a_shard_keep_their_bits(name: str, save: Save, tmp_path: Path, sent: list[jax.Array]) -> None:
    # The last object of a shard is smaller than the others.
    host = bits(DTYPES[name], (27, 2 * OBJECT_BYTES // 8 // DTYPES[name].itemsize), 0)
    with jax.enable_x64(True):
        tree = {"x": jax.device_put(host, SingleDeviceSharding(jax.devices()[3 % len(jax.devices())]))}
    save(tmp_path / "c", tree)
    assert sent
    require_equal(tmp_path / "c", {"x": host})


@pytest.mark.one_device
@pytest.mark.parametrize("wanted", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("own", ["float32", "uint16", "bfloat16"])
@every_save
def test_parts_are_cast(own: str, wanted: str, save: Save, tmp_path: Path) -> None:
    host = (np.arange(8192) % 300).reshape(32, 256).astype(DTYPES[own])
    tree = {"x": jax.device_put(host, SingleDeviceSharding(jax.devices()[1 % len(jax.devices())]))}
    save(tmp_path / "c", tree, dtype={"x": wanted})
    require_equal(tmp_path / "c", {"x": host.astype(DTYPES[wanted])})


def test_a_shard_in_several_objects_is_copied_once(tmp_path: Path, sent: list[jax.Array], monkeypatch: Any) -> None:
    monkeypatch.setattr(device_to_host, "cut_piece", lambda *given: pytest.fail("needs device memory"))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    tree = {
        "split": numbers((64, 512), NamedSharding(mesh, P("a", "b"))),
        "replicas": numbers((64, 512), NamedSharding(mesh, P("a"))),
        "one device": numbers((64, 128)),
        "in one object": numbers((8, 16)),
    }
    info = SAVES["save_async"](tmp_path / "c", tree)
    assert info.objects > 40
    shapes = [array.shape for array in sent]
    assert Counter(shapes) == {(16, 256): 8, (16, 512): 4, (64, 128): 1, (8, 16): 1}
    require_equal(tmp_path / "c", {name: np.asarray(leaf) for name, leaf in tree.items()})


@pytest.mark.one_device
@pytest.mark.parametrize("save", [SAVES["save"], SAVES["save_async with a limit"]])
def test_with_limited_host_memory_parts_are_copied(save: Save, tmp_path: Path, sent: list[jax.Array]) -> None:
    tree = {"x": numbers((64, 128))}
    save(tmp_path / "c", tree)
    assert {array.nbytes for array in sent} == {OBJECT_BYTES}
    assert len(sent) == tree["x"].nbytes // OBJECT_BYTES
    require_equal(tmp_path / "c", {"x": np.asarray(tree["x"])})


def test_objects_across_shards_are_parts_of_copied_shards(tmp_path: Path, sent: list[jax.Array]) -> None:
    mesh = jax.make_mesh((8,), ("a",))
    x = numbers((64, 512), NamedSharding(mesh, P(None, "a")))
    jaxckpt.save_async(tmp_path / "c", {"x": x}, mesh=mesh, specs=P("a"), options=OPTIONS).wait()
    assert [array.shape for array in sent] == [(64, 64)] * 8
    require_equal(tmp_path / "c", {"x": np.asarray(x)})


@pytest.mark.one_device
def test_a_copied_shard_is_freed_with_its_last_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards: list[weakref.ref[Any]] = []
    staged_bytes: list[int] = []
    alive: list[int] = []
    make, written = device_to_host.HostShard.__init__, StagedAhead.mark_written

    def counted(self: Any, array: Any) -> None:
        make(self, array)
        shards.append(weakref.ref(self))

    def noted(self: Any, one: Any) -> None:
        staged_bytes.append(one.copied_bytes)
        alive.append(sum(shard() is not None for shard in shards))
        written(self, one)

    monkeypatch.setattr(device_to_host.HostShard, "__init__", counted)
    monkeypatch.setattr(StagedAhead, "mark_written", noted)
    SAVES["save_async"](tmp_path / "c", {"x": numbers((64, 128)), "y": numbers((64, 128))})
    assert len(shards) == 2
    assert staged_bytes == [OBJECT_BYTES] * 16
    assert alive[-1] == 0
    assert alive[7] <= 1


@pytest.mark.one_device
def test_copied_shards_are_safe_from_donation(tmp_path: Path, gate: threading.Event) -> None:
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for options in (OPTIONS, LIMITED):
        tree = {"x": numbers((64, 128)), "y": numbers((16, 16))}
        wanted = {name: np.array(leaf) for name, leaf in tree.items()}
        gate.clear()
        pending = jaxckpt.save_async(tmp_path / "c", tree, overwrite=True, options=options)
        for leaf in step(tree).values():
            leaf.delete()
        gate.set()
        pending.wait()
        require_equal(tmp_path / "c", wanted)


@pytest.mark.one_device
def test_deleted_arrays_with_pageable_memory(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pageable memory, a host copy belongs to the array, and is lost with it."""
    for options in (dataclasses.replace(each, staging_memory="pageable") for each in (OPTIONS, LIMITED)):
        tree = {"x": numbers((64, 128)), "y": numbers((16, 16)), "many": numbers((2, 2))}
        wanted = {name: np.array(leaf) for name, leaf in tree.items()}
        gate.clear()
        with monkeypatch.context() as inside:
            inside.setattr(jax, "device_put", lambda *given, **how: pytest.fail("uses pinned memory"))
            pending = jaxckpt.save_async(tmp_path / "c", tree, overwrite=True, options=options)
        for leaf in tree.values():
            leaf.delete()
        gate.set()
        pending.wait()
        require_equal(tmp_path / "c", wanted)


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """An array on one device."""

    platform: str
    kinds: tuple[str, ...] = ("device", "pinned_host", "unpinned_host")

    @property
    def device_set(self) -> frozenset[Any]:
        return frozenset([self])

    def addressable_memories(self) -> list[Any]:
        return [mock.Mock(kind=kind) for kind in self.kinds]


@pytest.mark.parametrize("memory", ["auto", "pinned", "pageable"])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_only_tpus_do_not_use_pinned_memory_by_default(platform: str, memory: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(shardings, "SingleDeviceSharding", lambda device, memory_kind: memory_kind)
    own: Any = _Sharding(platform)
    used = {"auto": None if platform == "tpu" else "pinned_host", "pinned": "pinned_host", "pageable": None}
    assert shardings.pinned_memory(own, memory) == used[memory]


def test_a_device_without_pinned_memory() -> None:
    own: Any = _Sharding("other", ("device",))
    assert shardings.pinned_memory(own, "auto") is None
    with pytest.raises(InputError, match=r'staging_memory is "pinned", but .* no memory of kind "pinned_host", only'):
        shardings.pinned_memory(own, "pinned")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_lacks_pinned_memory_publishes_nothing(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(memory: Any) -> None:
        options = dataclasses.replace(OPTIONS, staging_memory=memory)
        if in_background:
            jaxckpt.save_async(tmp_path / "c", {"x": x}, options=options).wait()
        else:
            jaxckpt.save(tmp_path / "c", {"x": x}, options=options)

    x, pinned_memory = numbers((64, 128)), shardings.pinned_memory
    monkeypatch.setattr(
        device_to_host, "pinned_memory", lambda sharding, memory: pinned_memory(_Sharding("other", ("device",)), memory)
    )
    with pytest.raises(InputError, match='pass "auto" or "pageable"'):
        save("pinned")
    assert not (tmp_path / "c" / "manifest.json").exists()
    save("pageable")
    require_equal(tmp_path / "c", {"x": np.asarray(x)})


def test_a_copy_to_pageable_memory_is_not_kept_by_the_array() -> None:
    array = jax.device_put(np.arange(64).astype(jnp.int4), jax.devices()[0])  # NumPy needs a copy, as of other devices
    (copy,) = device_to_host.start_copies([array], "pageable")
    kept = np.asarray(array)
    assert np.shares_memory(kept, np.asarray(array)), "JAX keeps the copy of an array"
    assert not np.shares_memory(kept, copy)
    assert np.array_equal(kept, copy)


@every_save
@pytest.mark.parametrize("committed", [True, False])
def test_the_callers_configuration_does_not_matter(committed: bool, save: Save, tmp_path: Path) -> None:
    host = np.full((64, 128), np.nan, np.float32)
    tree = {"x": jax.device_put(host, jax.devices()[1] if committed else None), "small": jnp.full(3, -jnp.inf)}
    with contextlib.ExitStack() as strict:
        strict.enter_context(jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))))
        strict.enter_context(jax.debug_nans(True))
        strict.enter_context(jax.debug_infs(True))
        strict.enter_context(jax.transfer_guard("disallow_explicit"))
        save(tmp_path / "c", tree)
    require_equal(tmp_path / "c", {"x": host, "small": np.full(3, -np.inf, np.float32)})


@pytest.mark.one_device
def test_parts_of_a_shape_share_a_program(tmp_path: Path) -> None:
    device_to_host.cutter.cache_clear()
    SAVES["save"](tmp_path / "c", {"x": numbers((64, 128)), "y": numbers((64, 128))})
    info = device_to_host.cutter.cache_info()
    assert info.misses == 1
    assert info.hits == 15
    program = device_to_host.cutter((8, 128), np.dtype(np.float32))
    assert device_to_host.cutter.cache_info().misses == 1
    assert program._cache_size() == 1


@pytest.mark.one_device
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_device_memory_of_parts_is_bounded(
    dtype: str | None, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_bytes = OBJECT_BYTES
    monkeypatch.setattr(device_to_host, "DEVICE_BYTES", 3 * part_bytes)
    waited: list[int] = []
    block = jax.block_until_ready

    def counted(copy: Any) -> Any:
        waited.append(copy.nbytes)
        return block(copy)

    tree = {"x": numbers((64, 512))}
    with monkeypatch.context() as inside:
        inside.setattr(jax, "block_until_ready", counted)
        pending = jaxckpt.save_async(tmp_path / "c", tree, dtype=dtype, options=LIMITED)
    stored = np.asarray(tree["x"]).astype(dtype or np.float32)
    assert sum(waited) == stored.nbytes - 3 * part_bytes
    gate.set()
    pending.wait()
    require_equal(tmp_path / "c", {"x": stored})


@every_save
@pytest.mark.parametrize("spec", [P(), P("a")], ids=["replicated", "two replicas"])
def test_replicas_are_sent_from_all_devices(spec: Any, save: Save, tmp_path: Path, sent: list[jax.Array]) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    tree = {f"w{number}": numbers((64, 128), NamedSharding(mesh, spec)) for number in range(8)}
    save(tmp_path / "c", tree)
    sent_bytes = Counter[Any]()
    for array in sent:
        (device,) = array.devices()
        sent_bytes[device] += array.nbytes
    assert set(sent_bytes) == set(jax.devices())
    assert len(set(sent_bytes.values())) == 1
    require_equal(tmp_path / "c", {name: np.asarray(leaf) for name, leaf in tree.items()})
