"""What a process reads, for a restore, which asks for one process, and for a dry run, which asks for all."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model.grid import Box, contains, volume
from jaxckpt._restore.resolve import LeafForm
from jaxckpt._restore.wants import WHOLE_BYTES, Wants, plan_process_reads, plan_wants
from jaxckpt._sources.source import NativeCheckpoint
from jaxckpt._store.store_path import store_at

OPTIONS = jaxckpt.Options()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> NativeCheckpoint:
    """Two stacks: five leaves that are read whole, and four that are read piece by piece."""
    path = tmp_path_factory.mktemp("wants") / "c"
    tree = {f"small {number}": np.ones((16, 32), np.float32) for number in range(5)}
    tree |= {f"large {number}": np.ones((512, 256), np.float32) for number in range(4)}
    jaxckpt.save(path, tree)
    assert {leaf.nbytes < WHOLE_BYTES for leaf in tree.values()} == {True, False}
    return NativeCheckpoint.at(store_at(path, OPTIONS))


def shardings() -> dict[str, Sharding | None]:
    devices = np.array(jax.devices())
    line, square = Mesh(devices, ("a",)), Mesh(devices[::-1].reshape(2, 4), ("a", "b"))
    return {
        "none": None,
        "one device": SingleDeviceSharding(devices[3]),
        "rows": NamedSharding(line, P("a")),
        "columns": NamedSharding(square, P(None, "b")),
        "both": NamedSharding(square, P("b", "a")),
        "replicated": NamedSharding(square, P()),
        "half of the devices": NamedSharding(Mesh(devices[:4], ("a",)), P("a")),
    }


def wants_of(source: NativeCheckpoint, form: LeafForm, processes: range) -> Wants:
    return plan_wants(source, dict.fromkeys(range(len(source.manifest.leaves)), form), OPTIONS, processes, processes)


@pytest.mark.parametrize("name", shardings())
@pytest.mark.parametrize("cast", [None, "float64"])
def test_one_process_and_all_processes_give_the_same_wants(
    source: NativeCheckpoint, name: str, cast: str | None
) -> None:
    form = LeafForm("jax", None if cast is None else np.dtype(cast), shardings()[name])
    alone, together = wants_of(source, form, range(1)), wants_of(source, form, range(2))
    assert [part.rows_for(0) for part in alone.ranges] == [part.rows_for(0) for part in together.ranges]
    alone_boxes, together_boxes = ([part.leaf_boxes for part in wants.ranges] for wants in (alone, together))
    assert [boxes.are_whole for boxes in alone_boxes] == [boxes.are_whole for boxes in together_boxes]
    (reads,) = plan_process_reads(alone, OPTIONS, range(1))
    assert reads == next(plan_process_reads(together, OPTIONS, range(2)))


@pytest.mark.parametrize("name", shardings())
def test_every_box_of_a_device_is_wanted_once(source: NativeCheckpoint, name: str) -> None:
    sharding = shardings()[name]
    wants = wants_of(source, LeafForm("jax", sharding=sharding), range(1))
    assert sorted(part.rows for part in wants.ranges) == [(0, 4), (0, 5)], "equal leaves are one range"
    for part in wants.ranges:
        shape = wants.stacks[part.stack].shape
        boxes = part.rows_for(0).boxes
        needed = {box_of(index, shape) for index in sharding.devices_indices_map(shape).values()} if sharding else set()
        assert all(any(contains(box, small) for box in boxes) for small in needed)
        assert sum(map(volume, boxes)) <= np.prod(shape), "no box twice"
    assert [part.rows_for(1).boxes for part in wants.ranges] == [(), ()], "only this process was asked for"


def box_of(index: Any, shape: tuple[int, ...]) -> Box:
    return tuple(side.indices(length)[:2] for side, length in zip(index, shape, strict=True))


def test_leaves_that_differ_are_separate_ranges(source: NativeCheckpoint) -> None:
    forms = dict(zip(range(9), itertools.cycle([LeafForm("jax"), LeafForm("numpy")]), strict=False))
    wants = plan_wants(source, forms, OPTIONS, range(1), range(1))
    single_rows = [(row, row + 1) for n_leaves in (5, 4) for row in range(n_leaves)]
    assert sorted(part.rows for part in wants.ranges) == sorted(single_rows)
    (reads,) = plan_process_reads(wants, OPTIONS, range(1))
    assert reads.needed_bytes == sum(source.manifest.leaf_bytes(leaf) for leaf in source.manifest.leaves)
