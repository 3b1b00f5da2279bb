"""Arrays in other libraries' files: strided reads, and the coverage of an array by shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jaxckpt._formats import shards
from jaxckpt._formats.shards import FileData, from_ranks, require_cover, tiled
from jaxckpt._model.grid import Box, extent, slices_within
from jaxckpt._sources.foreign import ForeignArray, InMemoryData, Tiled
from jaxckpt._store import foreign_files
from jaxckpt.errors import DataError, SpecError


@st.composite
def strided(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], Box, int]:
    """(array in memory, strides in elements of a permuted and stepped view, a box of the view, a limit for spans)."""
    base = np.arange(int(np.prod(shape := draw(hnp.array_shapes(max_dims=4, max_side=6)))), dtype="<i4").reshape(shape)
    order = draw(st.permutations(range(len(shape))))
    view = base.transpose(order)[tuple(slice(None, None, draw(st.integers(1, 2))) for _ in shape)]
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in view.shape)
    return view, tuple(s // 4 for s in view.strides), box, draw(st.sampled_from([1, 16, 200, 1 << 20]))


@given(strided(), st.integers(0, 9), st.booleans(), st.sampled_from([0, 8, 1 << 20]))
@settings(max_examples=300)
def test_a_box_of_a_strided_array_is_read(tmp_path_factory, case, offset: int, fortran: bool, gap: int) -> None:
    view, strides, box, span = case
    path = tmp_path_factory.getbasetemp() / "strided"
    base = view
    while base.base is not None:
        base = base.base
    path.write_bytes(b"?" * offset + base.tobytes())
    target = np.full(extent(box), -1, "<i4", order="F" if fortran else "C")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SPAN_BYTES", span)
        patch.setattr(foreign_files._LocalFile, "gap_bytes", gap)
        FileData(str(path), offset, "int32", view.shape, strides).read(box, target)
    np.testing.assert_array_equal(target, view[tuple(slice(*side) for side in box)])


@pytest.mark.parametrize(("half_kib", "ratio"), [(2048, 1), (1024, 1), (768, 1), (256, 1.9)])
def test_halves_of_small_experts(half_kib: int, ratio: float, tmp_path: Path, bytes_read: Callable[[], int]) -> None:
    """Short gaps are read, because another call takes longer."""
    experts = np.arange(8 * 2 * half_kib * 256, dtype="<i4").reshape(8, 2, half_kib, 256)
    experts.tofile(tmp_path / "x")
    gates = np.empty((8, 1, half_kib, 256), "<i4")
    FileData(str(tmp_path / "x"), 0, "int32", experts.shape).read(((0, 8), (0, 1), (0, half_kib), (0, 256)), gates)
    np.testing.assert_array_equal(gates, experts[:, :1])
    assert bytes_read() <= ratio * gates.nbytes


def test_a_truncated_or_missing_file_is_reported(tmp_path: Path) -> None:
    block = FileData(str(tmp_path / "x"), 0, "float32", (4,))
    with pytest.raises(DataError, match="x is missing"):
        block.read(((0, 4),), np.empty(4, np.float32))
    (tmp_path / "x").write_bytes(b"1234")
    with pytest.raises(DataError, match="was truncated"):
        block.read(((0, 4),), np.empty(4, np.float32))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 2), (0, 4))], r"\[2:4, 0:4\] is not in any shard"),
        ([((0, 2), (0, 4)), ((1, 4), (0, 4))], r"\[1:2, 0:4\] is in 2 shards"),
        ([((0, 4), (0, 2)), ((0, 3), (2, 4))], r"\[3:4, 2:4\] is not in any shard"),
        ([((0, 4), (0, 2)), ((0, 4), (2, 5))], r"\[0:4, 2:5\] is outside its shape \[4, 4\]"),
        ([((0, 4), (0, 2)), ((2, 4), (0, 2)), ((0, 4), (2, 4))], r"\[2:4, 0:2\] is in 2 shards"),
        ([], r"\[0:4, 0:4\] is not in any shard"),
    ],
)
def test_gaps_overlaps_and_shards_outside_the_array_are_named(boxes: list[Box], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        require_cover("layers/w", (4, 4), boxes)
    assert "'layers/w'" in str(error.value)


def test_shards_that_cover_the_array_are_combined() -> None:
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    boxes = [(rows, columns) for rows in ((0, 1), (1, 4)) for columns in ((0, 2), (2, 3), (3, 6))]
    block = tiled("w", (4, 6), [(box, InMemoryData(data[tuple(slice(*side) for side in box)])) for box in boxes])
    assert isinstance(block, Tiled)
    for box in itertools.product([(0, 4), (1, 2), (3, 4)], [(0, 6), (1, 5)]):
        target = np.empty(extent(box), np.float32)
        block.read(box, target)
        np.testing.assert_array_equal(target, data[slices_within(box, ((0, 4), (0, 6)))])


def ranks(data: np.ndarray, parts: dict[int, tuple[slice, ...]]) -> dict[int, ForeignArray]:
    return {
        rank: ForeignArray("float32", data[index].shape, InMemoryData(np.ascontiguousarray(data[index])))
        for rank, index in parts.items()
    }


DATA = np.arange(32, dtype=np.float32).reshape(8, 4)
COLUMNS = {rank: (slice(None), slice(2 * (rank % 2), 2 * (rank % 2) + 2)) for rank in range(4)}


def read(array: ForeignArray) -> np.ndarray:
    target = np.empty(array.shape, np.float32)
    array.data.read(tuple((0, n) for n in array.shape), target)
    return target


def test_ranks_fill_the_mesh_row_by_row() -> None:
    both = {rank: (slice(4 * (rank // 2), 4 * (rank // 2) + 4), COLUMNS[rank][1]) for rank in range(4)}
    axes = {"data": 2, "model": 2}
    np.testing.assert_array_equal(read(from_ranks("w", ranks(DATA, both), axes, (("data",), ("model",)))), DATA)
    np.testing.assert_array_equal(read(from_ranks("w", ranks(DATA, COLUMNS), axes, ((), ("model",)))), DATA)
    rows = {rank: (slice(2 * rank, 2 * rank + 2),) for rank in range(4)}
    np.testing.assert_array_equal(read(from_ranks("w", ranks(DATA, rows), axes, (("data", "model"),))), DATA)
    swapped = {0: rows[0], 1: rows[2], 2: rows[1], 3: rows[3]}
    np.testing.assert_array_equal(read(from_ranks("w", ranks(DATA, swapped), axes, (("model", "data"),))), DATA)


def test_one_replica_is_enough_and_all_must_be_equal() -> None:
    axes = {"data": 2, "model": 2}
    found = ranks(DATA, COLUMNS)
    del found[0]
    np.testing.assert_array_equal(read(from_ranks("w", found, axes, ((), ("model",)))), DATA)
    found = ranks(DATA, COLUMNS) | {2: ranks(DATA + 1, COLUMNS)[2]}
    with pytest.raises(DataError, match=r"'w'.*not the same in rank 0 and rank 2"):
        read(from_ranks("w", found, axes, ((), ("model",))))
    with pytest.raises(DataError, match=r"'w'.*\n.*\[0:8, 2:4\] is not in any shard"):
        from_ranks("w", {0: found[0], 2: found[2]}, axes, ((), ("model",)))


def test_ranks_that_do_not_fit_are_reported() -> None:
    axes = {"data": 2, "model": 2}
    found = ranks(DATA, COLUMNS)
    with pytest.raises(DataError, match=r"'w' is float32\[7, 2\] in rank 1"):
        from_ranks("w", found | {1: ranks(DATA[:7], COLUMNS)[1]}, axes, ((), ("model",)))
    with pytest.raises(DataError, match="rank 7 is beyond the mesh"):
        from_ranks("w", found | {7: found[1]}, axes, ((), ("model",)))
    for spec, message in ((((), (), ("model",)), "3 entries"), ((("x",),), "'x'"), ((("data",), ("data",)), "twice")):
        with pytest.raises(SpecError, match=message):
            from_ranks("w", found, axes, spec)
