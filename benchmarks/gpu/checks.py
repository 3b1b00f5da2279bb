"""The checks of `make gpu`: correct results, little device memory, and no memory that grows.

Each check raises if something is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from lab import Figure, Lab, Peaks, device_stat, memory_kinds, pinned_memory, state, timed

import jaxckpt
from jaxckpt._devices import device_to_host as host_copies
from jaxckpt._model.dtypes import DTYPES


def any_bits(dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """Random bits. For floats, they include NaNs with payloads, infinities and subnormals."""
    rng = np.random.default_rng(0)
    if dtype.name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.name.strip("u") in ("int2", "int4"):
        return rng.integers(0, 2, count).astype(dtype)
    raw = rng.integers(0, 16 if "float4" in dtype.name else 256, count * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype)


def require_equal(found: Any, wanted: np.ndarray[Any, Any], what: str) -> None:
    same = found.dtype == wanted.dtype and np.asarray(found).tobytes() == wanted.tobytes()
    if not same:
        raise AssertionError(f"{what}: the bits differ")


def one_dtype(lab: Lab) -> Iterator[Figure]:
    """A dtype that the device supports, saved as one object and as several, restored, and read as a NumPy array."""
    name = lab.argument
    dtype = DTYPES[name]
    parts = jaxckpt.Options(object_bytes=1 << 10, chunk_bytes=1 << 10, sync=False)
    ways: dict[str, Callable[..., Any]] = {
        "save": jaxckpt.save,
        "save_async": lambda *given: jaxckpt.save_async(*given).wait(),
        "save in parts": functools.partial(jaxckpt.save, options=parts),
        "save_async in parts": lambda *given: jaxckpt.save_async(*given, options=parts).wait(),
    }
    host = any_bits(dtype, 4096).reshape(8, 512)
    with jax.enable_x64(True):
        try:
            leaf = jax.block_until_ready(jax.device_put(host))
            require_equal(leaf, host, f"{name}, by JAX alone")
        except Exception as error:
            if name in ("float32", "bfloat16"):
                raise
            yield "refused by the device", str(error)[:200]
            return
        for way, save in ways.items():
            path = lab.disk / way.replace(" ", "-")
            save(path, {"x": leaf})
            like = {"x": jax.ShapeDtypeStruct(host.shape, dtype, sharding=leaf.sharding)}
            require_equal(jaxckpt.restore(path, like)["x"], host, f"{name}, {way}")
            require_equal(jaxckpt.load_numpy(path)["x"], host, f"{name}, {way}, as NumPy")
    yield "ways", len(ways)


def donated(lab: Lab) -> Iterator[Figure]:
    """Arrays that are donated immediately after save_async returns."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2 + 1, tree), donate_argnums=0)
    tree = state(4, lab.sizes.streamed // 4)
    jax.block_until_ready(step(state(4, lab.sizes.streamed // 4)))  # compiled before the save
    wanted = {name: np.array(leaf) for name, leaf in tree.items()}
    pending = jaxckpt.save_async(lab.disk / "c", tree)
    for _ in range(10):
        tree = step(tree)
    jax.block_until_ready(tree)
    pending.wait()
    for name, found in jaxckpt.load_numpy(lab.disk / "c").items():
        require_equal(found, wanted[name], f"donated leaf {name}")
    yield "bytes", lab.sizes.streamed


def pinned_leaves(lab: Lab) -> Iterator[Figure]:
    """Leaves in pinned host memory are restored to it."""
    if "pinned_host" not in memory_kinds():
        yield "memory kinds", sorted(memory_kinds())
        return
    host = any_bits(np.dtype(np.float32), 1 << 20)
    tree = {"pinned": jax.device_put(host, pinned_memory()), "own": jnp.asarray(host)}
    jaxckpt.save_async(lab.disk / "c", tree).wait()
    found = jaxckpt.restore(lab.disk / "c", tree)
    for name, leaf in tree.items():
        require_equal(found[name], host, name)
        assert found[name].sharding.memory_kind == leaf.sharding.memory_kind, name
    yield "bytes", 2 * host.nbytes


def streamed(lab: Lab) -> Iterator[Figure]:
    """A leaf larger than `host_bytes`, in a dtype whose NaNs device programs may change, and in one that they keep."""
    options = jaxckpt.Options(
        host_bytes=lab.sizes.streamed // 16, object_bytes=lab.sizes.streamed // 32, chunk_bytes=64 << 10
    )
    for name in ("float32", "bfloat16"):
        host = any_bits(DTYPES[name], lab.sizes.streamed // DTYPES[name].itemsize).reshape(-1, 1024)
        tree = {"x": jax.device_put(host)}
        with Peaks() as saving:
            jaxckpt.save(lab.disk / name, tree, options=options)
        with Peaks() as restoring:
            back = jax.block_until_ready(jaxckpt.restore(lab.disk / name, tree, options=options))
        require_equal(back["x"], host, name)
        yield name, {"bytes": host.nbytes, "save": saving.mib(), "restore": restoring.mib()}


def many_small(lab: Lab) -> Iterator[Figure]:
    """Thousands of leaves, including PRNG keys, empty arrays, scalars and NumPy arrays."""
    host = any_bits(np.dtype(np.uint16), lab.sizes.small_leaves * 256).reshape(-1, 256)
    tree: dict[str, Any] = {f"leaf{n}": leaf for n, leaf in enumerate(jax.device_put(list(host.view(jnp.bfloat16))))}
    jaxckpt.save(lab.disk / "c", tree | {"key": jax.random.key(7), "empty": jnp.zeros((0, 3)), "numpy": np.arange(5)})
    back = jaxckpt.restore(lab.disk / "c")
    for number, wanted in enumerate(host):
        require_equal(back[f"leaf{number}"], wanted.view(jnp.bfloat16), f"leaf{number}")
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(jax.random.key(7))).all()
    assert back["empty"].shape == (0, 3)
    assert (back["numpy"] == np.arange(5)).all()
    yield "leaves", len(back)


def device_memory(lab: Lab) -> Iterator[Figure]:
    """The additional device memory of `save_async`: none if host memory is not limited, otherwise a constant."""
    host = np.ones((lab.sizes.streamed // 4096, 1024), np.float32)
    tree = jax.block_until_ready({f"leaf{n}": jax.device_put(host) for n in range(2)})
    yield "bytes", 2 * host.nbytes
    for name, staging_bytes, most in (
        ("unlimited", None, 0),
        ("limited", 4 * host.nbytes, host_copies.DEVICE_BYTES + jaxckpt.Options().object_bytes),
    ):
        in_use, peak = device_stat("bytes_in_use"), device_stat("peak_bytes_in_use")
        jaxckpt.save_async(lab.memory / name, tree, options=jaxckpt.Options(staging_bytes=staging_bytes)).wait()
        if not peak:
            yield name, "the device does not report its memory"
        elif (new := device_stat("peak_bytes_in_use")) > peak:
            yield name, {"peak_device_mib": new - in_use >> 20}
            assert new - in_use <= most + (16 << 20), f"{name}: {new - in_use >> 20} MiB"
        else:
            yield name, {"peak_device_mib": f"at most {peak - in_use >> 20}"}


def configured(lab: Lab) -> Iterator[Figure]:
    """The caller's mesh, NaN checks and transfer guards do not change what is saved and restored."""
    host = np.full((256, 1024), np.nan, np.float32)
    leaf = jax.device_put(host, jax.devices()[-1])
    tree = {"leaf": leaf, "uncommitted": jax.device_put(host), "small": [leaf[n] for n in range(200)]}
    wanted = jax.tree.map(np.asarray, tree)
    parts = jaxckpt.Options(object_bytes=64 << 10, chunk_bytes=64 << 10)
    limited = dataclasses.replace(parts, staging_bytes=1 << 20)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    with jax.set_mesh(mesh), jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow"):
        jaxckpt.save(lab.disk / "save", tree, options=parts)
        jaxckpt.save_async(lab.disk / "save_async", tree, options=parts).wait()
        jaxckpt.save_async(lab.disk / "limited", tree, options=limited).wait()
        restored = {name: jaxckpt.restore(lab.disk / name, tree) for name in ("save", "save_async", "limited")}
    for name, back in restored.items():
        for found, right in zip(jax.tree.leaves(back), jax.tree.leaves(wanted), strict=True):
            require_equal(found, right, name)
    yield "bytes", 2 * host.nbytes
    yield "devices", mesh.size


def replicated(lab: Lab) -> Iterator[Figure]:
    """Replicated leaves are copied to the host from all devices. With one device, this checks only their values."""
    everywhere = NamedSharding(jax.make_mesh((len(jax.devices()),), ("x",)), PartitionSpec())
    host = any_bits(np.dtype(np.uint32), lab.sizes.streamed // 64).reshape(-1, 1024)
    tree = {f"leaf{n}": jax.device_put(host + n, everywhere) for n in range(16)}
    started = host_copies.start_copies
    sent: dict[str, int] = {}

    def counted(arrays: Any, memory: Any) -> Any:
        for array in arrays:
            (device,) = array.devices()
            sent[str(device)] = sent.get(str(device), 0) + array.nbytes
        return started(arrays, memory)

    host_copies.start_copies = counted
    try:
        yield "seconds", timed(lambda: jaxckpt.save_async(lab.memory / "c", tree).wait())[0]
    finally:
        host_copies.start_copies = started
    back = jaxckpt.restore(lab.memory / "c", tree)
    for number in range(16):
        require_equal(back[f"leaf{number}"], host + number, f"leaf{number}")
    yield "bytes", 16 * host.nbytes
    yield "bytes by device", sent
