"""Many small leaves are transferred as blocks of rows in both directions; CPU devices simulate accelerators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from processes import RunProcesses
from strategies import bits

import jaxckpt
from jaxckpt._devices import device_to_host
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._restore import placement, wants
from jaxckpt._save import staging

LEAVES = 150
PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture(autouse=True)
def few_leaves_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of as few leaves as these trees have."""
    monkeypatch.setattr(wants, "BLOCK_PIECES", 128)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number of arrays sent to the host and to the devices, with CPU devices treated as accelerators."""
    counts = {"to_host": 0, "to_devices": 0}
    to_host, place_rows, put = device_to_host.start_copies, placement.place_rows, jax.device_put

    def counted_to_host(arrays: list[Any], memory: Any) -> list[Any]:
        counts["to_host"] += len(arrays)
        return to_host(arrays, memory)

    def counted_place_rows(*given: Any) -> Any:
        def counted_put(hosts: Any, *rest: Any) -> Any:
            counts["to_devices"] += len(hosts)
            return put(hosts, *rest)

        with monkeypatch.context() as inside:
            inside.setattr(jax, "device_put", counted_put)
            return place_rows(*given)

    monkeypatch.setattr(staging, "is_in_host_memory", lambda value: False)
    monkeypatch.setattr(device_to_host, "start_copies", counted_to_host)
    monkeypatch.setattr(wants, "has_own_memory", lambda sharding: True)
    monkeypatch.setattr(wants, "can_keep_buffers", lambda abstract: abstract.kind not in ("jax", "key"))
    monkeypatch.setattr(placement, "place_rows", counted_place_rows)
    return counts


def there_and_back(hosts: list[Any], sharding: Any, path: Path) -> None:
    tree = {f"w{number}": jax.device_put(host, sharding) for number, host in enumerate(hosts)}
    jaxckpt.save_async(path, tree).wait()
    found = jaxckpt.restore(path, tree)
    for number, host in enumerate(hosts):
        saved, leaf = tree[f"w{number}"], found[f"w{number}"]
        assert np.asarray(leaf).tobytes() == host.tobytes()
        assert (leaf.dtype, leaf.shape, leaf.committed) == (host.dtype, host.shape, saved.committed)
        assert leaf.sharding == saved.sharding


@pytest.mark.parametrize("name", "float32 bfloat16 float8_e4m3fn float4_e2m1fn int4 uint2 bool complex64 int64".split())
def test_bits_are_kept(name: str, tmp_path: Path, transfers: dict[str, int]) -> None:
    with jax.enable_x64(True):
        hosts = [bits(DTYPES[name], (8, 6), number) for number in range(LEAVES)]
        there_and_back(hosts, NamedSharding(jax.make_mesh((2, 4), ("a", "b")), P("b")), tmp_path / "c")
    if name == "uint2":  # XLA's CPU compiler aborts on programs with it
        assert transfers["to_devices"] == 0
    else:  # 150 leaves are 5 blocks of 32 rows, each with a piece on 4 devices
        assert transfers == {"to_host": 5 * 4, "to_devices": 5}


@pytest.mark.parametrize("where", ["replicated", "split in two", "one device", "uncommitted"])
@pytest.mark.parametrize("shape", [(8, 6), ()])
def test_on_any_devices(where: str, shape: tuple[int, ...], tmp_path: Path, transfers: dict[str, int]) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    sharding = {
        "replicated": NamedSharding(mesh, P()),
        "split in two": NamedSharding(mesh, P("a") if shape else P()),
        "one device": SingleDeviceSharding(jax.devices()[3]),
        "uncommitted": None,
    }[where]
    hosts = [bits(DTYPES["bfloat16"], shape, number) for number in range(LEAVES)]
    there_and_back(hosts, sharding, tmp_path / "c")
    boxes = 2 if where == "split in two" and shape else 1
    assert transfers == {"to_host": 5 * boxes, "to_devices": 5}


def test_the_callers_mesh_does_not_matter(tmp_path: Path, transfers: dict[str, int]) -> None:
    hosts = [np.float32([number, np.nan]) for number in range(LEAVES)]
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))), jax.debug_nans(True):
        for place, sharding in enumerate([SingleDeviceSharding(jax.devices()[1]), None]):
            there_and_back(hosts, sharding, tmp_path / str(place))


def test_a_mesh_without_devices_does_not_matter(tmp_path: Path, transfers: dict[str, int]) -> None:
    with jax.sharding.use_abstract_mesh(jax.make_mesh((2, 4), ("x", "y")).abstract_mesh):
        there_and_back(
            [np.float32([number]) for number in range(LEAVES)], SingleDeviceSharding(jax.devices()[1]), tmp_path / "one"
        )
        assert transfers["to_devices"] == 5
        tree = [jax.device_put(np.float32([number])) for number in range(LEAVES)]
        jaxckpt.save(tmp_path / "uncommitted", tree)
        found = jaxckpt.restore(tmp_path / "uncommitted", tree)
    assert transfers["to_devices"] == 10
    assert [float(leaf[0]) for leaf in found] == [*range(LEAVES)]


@pytest.mark.one_device
def test_disabled_jit_does_not_matter(tmp_path: Path, transfers: dict[str, int]) -> None:
    """JAX ignores the shardings of a program's results then."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("a",)), P("a"))
    with jax.disable_jit():
        there_and_back([np.float32([number]) for number in range(LEAVES)], sharding, tmp_path / "c")
    assert transfers["to_devices"] == 5


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_a_guard_against_transfers_does_not_matter(guard: str, tmp_path: Path, transfers: dict[str, int]) -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("d",)), P("d"))
    tree: dict[str, Any] = {f"w{number}": jax.device_put(np.full(8, number), sharding) for number in range(LEAVES)}
    tree |= {"large": jax.device_put(np.ones((64, 64)), sharding), "key": jax.random.key(3), "alone": jax.numpy.ones(3)}
    options = jaxckpt.Options(chunk_bytes=512, object_bytes=512)
    dtype = {"large": "bfloat16"}
    with jax.transfer_guard(guard):
        jaxckpt.save(tmp_path / "in this thread", tree, dtype=dtype, options=options)
    before = jax.config.jax_transfer_guard  # of all threads
    try:
        jax.config.update("jax_transfer_guard", guard)
        jaxckpt.save_async(tmp_path / "in all", tree, dtype=dtype, options=options).wait()
    finally:
        jax.config.update("jax_transfer_guard", before or "allow")
    assert jaxckpt.diff(tmp_path / "in this thread", tmp_path / "in all").identical


@pytest.mark.one_device
def test_prng_keys(tmp_path: Path, transfers: dict[str, int]) -> None:
    data = np.random.default_rng(0).integers(0, 1 << 32, (LEAVES, 2), np.uint32)  # to split a key takes seconds
    keys = jax.device_put([*map(jax.random.wrap_key_data, data)], jax.devices()[2 % len(jax.devices())])
    jaxckpt.save(tmp_path / "c", keys)
    for saved, found in zip(keys, jaxckpt.restore(tmp_path / "c"), strict=True):
        assert (jax.random.key_data(saved) == jax.random.key_data(found)).all()
    assert transfers["to_devices"] == 5


@pytest.mark.one_device
def test_leaves_in_pinned_host_memory_are_not_stacked(tmp_path: Path, transfers: dict[str, int]) -> None:
    """XLA's TPU compiler aborts the process on such a program."""
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    there_and_back([np.float32([number]) for number in range(LEAVES)], pinned, tmp_path / "c")
    assert transfers == {"to_host": 0, "to_devices": 0}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *((where, "bfloat16") for where in ("split", "one device", "uncommitted", "replicated")),
        *(("split", name) for name in ("float32", "float4_e2m1fn", "bool")),
    ],
)
def test_cpu_devices_take_blocks_of_thousands_of_leaves(
    where: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    sharding = {
        "split": NamedSharding(mesh, P("b", "a")),
        "one device": SingleDeviceSharding(jax.devices()[3]),
        "uncommitted": None,
        "replicated": NamedSharding(mesh, P()),
    }[where]
    found, place_rows = list[int](), placement.place_rows
    monkeypatch.setattr(placement, "place_rows", lambda *given: found.append(given[-1]) or place_rows(*given))
    hosts = [bits(DTYPES[name], (8, 6), number) for number in range(LEAVES)]
    for enough in (LEAVES + 1, LEAVES):
        monkeypatch.setattr(wants, "CPU_BLOCK_LEAVES", enough)
        there_and_back(hosts, sharding, tmp_path / f"c{enough}")
        # A replicated leaf is placed without one copy per device.
        assert found == ([] if enough > LEAVES or where == "replicated" else [wants.CPU_BLOCK_ROWS])


def test_cpu_devices_take_leaves_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "place_rows", lambda *given: pytest.fail("blocks are not faster there"))
    hosts = [np.float32([number]) for number in range(LEAVES)]
    there_and_back(hosts, NamedSharding(jax.make_mesh((8,), ("d",)), P()), tmp_path / "c")


def test_each_process_stacks_and_splits_on_its_own_devices(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = (PROGRAMS / "own_blocks.py").read_text()
    done = run_processes(program, processes=2, devices_per_process=2, timeout=200, args=[str(tmp_path / "c")])
    assert all("the same bits" in one.stdout for one in done)
