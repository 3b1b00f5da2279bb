"""JAX shardings as boxes, recorded and restored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxckpt._devices.shardings import PlannedSharding, addressable_boxes, memory_kind, placement, process_layout
from jaxckpt._model import grid as _grid


def shardings() -> list[Sharding]:
    devices = np.array(jax.devices())
    permuted = devices[np.random.default_rng(0).permutation(8)]
    return [
        NamedSharding(Mesh(devices.reshape(2, 4), ("a", "b")), P("a", "b")),
        NamedSharding(Mesh(permuted.reshape(4, 2), ("a", "b")), P("b", None)),
        NamedSharding(Mesh(permuted.reshape(2, 4), ("a", "b")), P(("b", "a"))),
        NamedSharding(Mesh(devices[::-1][:3], ("a",)), P()),
        SingleDeviceSharding(jax.devices()[5]),
    ]


@pytest.mark.parametrize("sharding", shardings(), ids=str)
def test_boxes_are_numbered_as_addressable_data_numbers_them(sharding: Sharding) -> None:
    whole = np.arange(16 * 8).reshape(16, 8)
    array = jax.device_put(whole, sharding)
    for number, (device, box) in enumerate(addressable_boxes(sharding, array.shape)):
        piece = array.addressable_data(number)
        # For a replicated array, JAX returns the same piece under every number.
        assert sharding.is_fully_replicated or piece.devices() == {device}
        np.testing.assert_array_equal(piece, whole[tuple(slice(*side) for side in box)])


@pytest.mark.parametrize("sharding", shardings(), ids=str)
def test_a_placement_covers_the_array(sharding: Sharding) -> None:
    found = placement(sharding, (16, 8))
    assert {device for device, _, _ in found} == sharding.device_set
    assert {process for _, process, _ in found} == {0}
    boxes = list({box for _, _, box in found})
    assert (strategies.paint((16, 8), boxes) == 1).all()


@pytest.mark.parametrize("shape", [(16, 8), (16, 8, 3), (0, 8)])
@pytest.mark.parametrize("sharding", shardings(), ids=str)
def test_a_layout_equals_the_placement(sharding: Sharding, shape: tuple[int, ...]) -> None:
    pairs = [(box, process) for _, process, box in placement(sharding, shape)]
    assert process_layout(sharding, shape) == _grid.layout_of(pairs, shape)


@given(st.data())
def test_a_planned_layout_equals_its_boxes(data: st.DataObject) -> None:
    """Even if the devices of a process are not complete rows of the mesh."""
    axes = data.draw(st.permutations([("a", 4), ("b", 3), ("c", 2)]))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 12, 24, 0]), max_size=3).map(tuple))
    spec = data.draw(strategies.mesh_specs(dict(axes), shape))
    planned = PlannedSharding(tuple(axes), spec, data.draw(st.integers(1, 9)))
    pairs = [(box, process) for _, process, box in planned.placement(shape)]
    assert planned.layout(shape) == _grid.layout_of(pairs, shape)


def test_a_recorded_sharding_is_restored_exactly(tmp_path: object) -> None:
    import jaxckpt

    tree = {
        f"{number}": jax.device_put(jnp.arange(128.0).reshape(16, 8), sharding)
        for number, sharding in enumerate(shardings())
    }
    explicit = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    tree["explicit"] = jax.device_put(jnp.ones((4, 4)), NamedSharding(explicit, P("a", None)))
    jaxckpt.save(f"{tmp_path}/ckpt", tree)
    restored = jaxckpt.restore(f"{tmp_path}/ckpt")
    for name, leaf in tree.items():
        assert restored[name].sharding == leaf.sharding, name


@pytest.mark.parametrize("kind", [None, "pinned_host"])
def test_memory_kinds_of_other_processes_devices_are_not_queried(kind: str | None) -> None:
    """On TPUs, they cannot answer."""

    class Device:
        client = jax.devices()[0].client

        def default_memory(self) -> None:
            pytest.fail("asked")

    class Remote:
        memory_kind = kind
        addressable_devices = frozenset[Any]()
        device_set = frozenset([Device()])

    remote: Any = Remote()
    assert memory_kind(remote) == kind
