"""Objects as plain files: compatible with other Zarr readers and writers, and damage is always detected."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import resource
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import crc32c
import jax
import numpy as np
import pytest
import strategies
import tensorstore as ts
import zarr
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from processes import RunPython

import jaxckpt
from jaxckpt._model import object_index as _object_index
from jaxckpt._model import zarr as _zarr
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.file_names import SEAL
from jaxckpt._model.grid import Box, extent, intersection, whole_box
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack
from jaxckpt._restore.read_loop import StepBuffers
from jaxckpt._store import codec as _codec
from jaxckpt._store.files import FileReader, FileWriter
from jaxckpt._store.tensors import ROOT_CONTEXT


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


def bits(array: Array) -> bytes:
    """The bytes to compare, so that NaNs are equal, and dtypes that other libraries read as unsigned integers."""
    return np.ascontiguousarray(array).tobytes()


# Stacks of any kind ---------------------------------------------------------------------------------------


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Chunks and objects of any size, which may extend beyond the array."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "bool", "int4", "complex128", "float8_e4m3fn", "int64"]))
    shape, rows = draw(strategies.sides(3, 9)), draw(st.integers(1, 9))
    chunk = tuple(draw(st.integers(1, side + 2)) for side in (rows, *shape))
    return Stack("stack", dtype, shape, rows, chunk, tuple(side * draw(st.integers(1, 4)) for side in chunk))


@st.composite
def pieces(draw: st.DrawFn, array: Array, box: Box) -> Pieces:
    """A box in groups of rows. Each group is one or two arrays, which may be strided or extend beyond the box."""
    (begun, ended), *sides = box
    group_rows = draw(st.integers(1, ended - begun))

    def piece(wanted: Box) -> tuple[Box, Array]:
        held = tuple(
            (draw(st.integers(0, a)), draw(st.integers(b, n))) if draw(st.booleans()) else (a, b)
            for (a, b), n in zip(wanted, array.shape, strict=True)
        )
        found = array[cut(held)]
        return held, found.copy() if draw(st.booleans()) else found

    groups: list[list[tuple[Box, Array]]] = []
    for first in range(begun, ended, group_rows):
        parts: list[Box] = [((first, min(first + group_rows, ended)), *sides)]
        along = draw(st.integers(0, len(box) - 1))
        (a, b) = parts[0][along]
        if b - a > 1:
            middle = draw(st.integers(a + 1, b - 1))
            parts = [(*parts[0][:along], side, *parts[0][along + 1 :]) for side in ((a, middle), (middle, b))]
        groups.append([piece(part) for part in parts])
    return Pieces(box, array.dtype, group_rows, groups)


@st.composite
def filled(draw: st.DrawFn) -> tuple[Stack, Array]:
    """A stack and its data."""
    stack = draw(stacks())
    return stack, strategies.bits(DTYPES[stack.dtype], stack.array_shape, draw(st.integers(0, 1 << 30)))


# Pieces and blocks ----------------------------------------------------------------------------------------


@given(filled(), st.data())
def test_a_block_equals_numpys_slice(made: tuple[Stack, Array], data: st.DataObject) -> None:
    _, array = made
    found = data.draw(pieces(array, data.draw(strategies.boxes(array.shape))))
    box = tuple(
        (start := data.draw(st.integers(a, b - 1)), data.draw(st.integers(start + 1, b + 3))) for a, b in found.box
    )
    expected = np.zeros(extent(box), array.dtype)
    common = intersection(box, found.box)
    assert common is not None
    expected[tuple(slice(0, b - a) for a, b in common)] = array[cut(common)]
    scratch = np.full(expected.nbytes + 3, 0xA5, np.uint8)
    assert bits(found.gather(box, scratch)) == bits(expected)
    assert bits(found.array()) == bits(array[cut(found.box)])


@given(st.lists(st.binary(min_size=7, max_size=7), min_size=1, max_size=20), st.data())
def test_one_checksum_of_intact_chunks_does_not_depend_on_their_content(
    contents: list[bytes], data: st.DataObject
) -> None:
    content = b"".join(one + crc32c.crc32c(one).to_bytes(4, "little") for one in contents)
    expected = _object_index.intact_chunks_crc32c(11, len(contents))
    assert crc32c.crc32c(content) == expected
    flipped = bytearray(content)
    flipped[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert crc32c.crc32c(flipped) != expected


@given(stacks(), st.data())
def test_blocks_are_the_chunks_that_a_box_touches(stack: Stack, data: st.DataObject) -> None:
    index, box = data.draw(st.sampled_from(list(stack.objects())))
    part = tuple(
        (a + start, a + stop)
        for (a, _), (start, stop) in zip(box, data.draw(strategies.boxes(extent(box))), strict=True)
    )
    size = stack.chunk_stored_bytes
    most = data.draw(st.sampled_from([1, 3 * size, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_zarr, "CHUNK_BATCH_BYTES", most)
        found = list(_zarr.chunk_runs(stack, index, part))
        starts = np.array(data.draw(st.permutations(range(stack.chunks_per_object))), np.int64) * size
        blocks = list(_zarr.chunk_blocks(stack, index, part, starts, most))
    touched: list[int] = []
    for block in found:
        numbers = block.numbers
        assert len(numbers) == 1 or len(numbers) * stack.chunk_stored_bytes <= most
        boxes = [_zarr.chunk_box(stack, index, number) for number in numbers]
        order = np.arange(np.prod(extent(block.box))).reshape(extent(block.box))
        for place, chunk in enumerate(boxes):  # in sequence, each in C order
            assert chunk is not None
            within = tuple(
                slice(a - s, a - s + c) for (a, _), (s, _), c in zip(chunk, block.box, stack.chunk_sides, strict=True)
            )
            size = int(np.prod(stack.chunk_sides))
            assert np.array_equal(order[within].ravel(), np.arange(place * size, (place + 1) * size))
        touched += numbers
    expected = [n for n in range(stack.chunks_per_object) if intersects(_zarr.chunk_box(stack, index, n), part)]
    assert sorted(touched) == expected
    touched = []
    for block in blocks:
        assert len(block.numbers) == 1 or len(block.numbers) * stack.chunk_stored_bytes <= most
        counts = [length // side for length, side in zip(extent(block.box), stack.chunk_sides, strict=True)]
        places = np.indices(counts).transpose([0, *(1 + dim for dim in block.slowest)]).reshape(len(counts), -1)
        for number, place in zip(block.numbers, places.T.tolist(), strict=True):
            chunk = tuple(
                (start + p * c, start + (p + 1) * c)
                for p, c, (start, _) in zip(place, stack.chunk_sides, block.box, strict=True)
            )
            assert intersection(chunk, whole_box(stack.array_shape)) == _zarr.chunk_box(stack, index, number)
        touched += block.numbers
    assert sorted(touched) == expected


@given(stacks(), st.data())
def test_chunks_are_the_same_however_many_are_gathered_together(stack: Stack, data: st.DataObject) -> None:
    index, box = data.draw(st.sampled_from(list(stack.objects())))
    box = intersection(box, whole_box(stack.array_shape)) or box
    sides, dtype = extent(box), DTYPES[stack.dtype]
    content = np.arange(math.prod(sides) * dtype.itemsize, dtype=np.uint8).view(dtype).reshape(sides)
    order, split = data.draw(st.sampled_from("CF")), data.draw(st.integers(0, sides[-1]))
    content = np.asarray(content, order=order)
    cuts = [(start, stop) for start, stop in ((0, split), (split, sides[-1])) if start < stop]
    first = box[-1][0]
    arrays = [((*box[:-1], (first + start, first + stop)), content[..., start:stop]) for start, stop in cuts]
    pieces = Pieces(box, dtype, box[0][1] - box[0][0], [arrays])

    def written(batch_bytes: int) -> tuple[Any, list[bytes]]:
        out = bytearray()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_codec, "WRITE_BYTES", batch_bytes)
            record = _codec.encode(
                stack, index, pieces, lambda buffers: out.extend(b"".join(map(bytes, buffers))), content=True
            )
        ends = range(0, len(out) - stack.index_bytes + 1, stack.chunk_stored_bytes)
        return record, sorted(bytes(out[start:stop]) for start, stop in itertools.pairwise(ends))

    assert written(data.draw(st.sampled_from([2, 3, 1000])) * stack.chunk_stored_bytes) == written(1)


def intersects(chunk: Box | None, part: Box) -> bool:
    return chunk is not None and intersection(chunk, part) is not None


# Other readers and writers --------------------------------------------------------------------------------


@given(filled(), st.data())
def test_other_libraries_read_the_same_bits(made: tuple[Stack, Array], data: st.DataObject) -> None:
    stack, array = made
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "zarr.json").write_bytes(_zarr.metadata(stack))
        writer = FileWriter(folder, stack, sync=False)
        for index, box in stack.objects():
            length, digest, _ = writer.write(index, data.draw(pieces(array, box))).result()
            content = np.fromfile(Path(folder, "c", *map(str, index)), np.uint8)
            assert length == len(content)
            assert digest == _object_index.digest_of_content(content.tobytes(), stack)
        assert bits(opened(folder).read().result()) == bits(array)
        assert bits(np.asarray(zarr.open_array(folder, mode="r")[...])) == bits(array)


def opened(folder: str) -> ts.TensorStore:
    """An array that tensorstore opens through its zarr.json."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": folder}, "store_data_equal_to_fill_value": True}
    return ts.open(spec, open=True).result()


@given(filled(), st.data())
def test_arrays_written_by_tensorstore_are_read_exactly(made: tuple[Stack, Array], data: st.DataObject) -> None:
    stack, array = made
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "zarr.json").write_bytes(_zarr.metadata(stack))
        other = opened(folder)
        other.write(array.view(other.dtype.numpy_dtype)).result()
        expected: dict[str, tuple[int, str]] = {}
        for index, _ in stack.objects():
            content = np.fromfile(Path(folder, "c", *map(str, index)), np.uint8)
            digest = _object_index.digest_of_content(content.tobytes(), stack)
            expected["/".join(map(str, index))] = len(content), digest
        reader = FileReader(folder, stack, expected, lambda path: None)
        boxes = data.draw(st.lists(strategies.boxes(array.shape), max_size=4))
        sharing = data.draw(st.lists(st.sampled_from(boxes), max_size=4)) if boxes else []
        for together in (boxes, [whole_box(array.shape)], sharing):
            wanted: list[tuple[Box, Array]] = []
            for box in together:
                around = np.zeros([side + data.draw(st.integers(0, 1)) for side in extent(box)], array.dtype)
                wanted.append((box, around[tuple(slice(0, side) for side in extent(box))]))
            for pending in reader.read(wanted):
                pending.result()
            for box, target in wanted:
                assert bits(target) == bits(array[cut(box)])


def preads(read: Callable[[], object]) -> list[tuple[int, int]]:
    """(offset, bytes) of each system call that `read` makes to read."""
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(handle: int, buffers: Sequence[Any], start: int) -> int:
        count = preadv(handle, buffers, start)
        calls.append((start, count))
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", noted)
        read()
    return calls


def scanned(folder: Path, side: int = 512) -> tuple[jaxckpt.Checkpoint, Array]:
    """A leaf of [layers, in, out] in bfloat16, saved by eight devices that split its last two dimensions."""
    array = np.random.default_rng(0).integers(0, 1 << 16, (12, side, side)).astype(np.uint16).view(DTYPES["bfloat16"])
    mesh = jax.make_mesh((4, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    placed = jax.device_put(array, NamedSharding(mesh, PartitionSpec(None, "a", "b")))
    jaxckpt.save(folder, {"w": placed}, options=jaxckpt.Options(sync=False))
    return jaxckpt.open(folder), array


def test_chunks_of_two_devices_are_read_once_and_copied_by_the_reading_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a finer split by columns, each chunk serves two devices, but is not read into a separate buffer first."""
    _, array = scanned(tmp_path / "c")
    monkeypatch.setattr(StepBuffers, "scatter", lambda *_: pytest.fail("a region was staged"))
    mesh = jax.make_mesh((2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    restored: Any = None

    def restore() -> None:
        nonlocal restored
        restored = jaxckpt.restore(tmp_path / "c", mesh=mesh)["w"]

    calls = preads(restore)
    for shard in restored.addressable_shards:
        assert bits(shard.data) == bits(array[shard.index])
    assert sum(count for _, count in calls) < 1.01 * array.nbytes
    assert sum(count > 4096 for _, count in calls) <= 8, "each object is read in one call for all devices"


def test_scattered_pieces_are_read_many_chunks_at_a_time(tmp_path: Path) -> None:
    """One device gets 12 × 8 pieces of chunks of 64 KiB. One call per piece would be 96 calls."""
    opened, array = scanned(tmp_path / "c")
    loaded: Any = None

    def load() -> None:
        nonlocal loaded
        loaded = opened["w"][...]

    calls = [count for _, count in preads(load) if count > 4096]
    assert bits(loaded) == bits(array)
    assert len(calls) <= 8
    assert sum(calls) < 1.01 * array.nbytes


# System calls ---------------------------------------------------------------------------------------------

SMALL = jaxckpt.Options(chunk_bytes=256, object_bytes=2048, sync=False)


def few(buffers: Sequence[Any], most: int) -> list[memoryview]:
    """The first bytes of buffers."""
    views: list[memoryview] = []
    for buffer in map(memoryview, buffers):
        views.append(buffer[:most])
        most -= len(views[-1])
        if not most:
            break
    return views


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = itertools.cycle([1, 2, 259, 3, 300, 70, 5])
    calls: list[str] = []
    writev, preadv = os.writev, os.preadv

    def write(handle: int, buffers: Sequence[Any]) -> int:
        calls.append("write")
        return writev(handle, few(buffers, next(sizes)))

    def read(handle: int, buffers: Sequence[Any], start: int) -> int:
        calls.append("read")
        return preadv(handle, few(buffers, next(sizes)), start)

    monkeypatch.setattr(os, "writev", write)
    monkeypatch.setattr(os, "preadv", read)
    tree = {"w": np.random.default_rng(0).random((40, 50)), "small": [np.arange(4) + i for i in range(30)]}
    jaxckpt.save(tmp_path / "c", tree, options=SMALL)
    found = jaxckpt.load_numpy(tmp_path / "c")
    np.testing.assert_array_equal(found["w"], tree["w"])
    np.testing.assert_array_equal(found["small"], tree["small"])
    assert jaxckpt.verify(tmp_path / "c").ok
    assert min(calls.count("write"), calls.count("read")) > 150


def test_more_buffers_than_a_call_takes_are_written_and_read(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random(4000)
    jaxckpt.save(tmp_path / "c", {"w": array}, options=jaxckpt.Options(chunk_bytes=8))
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "c")["w"], array)


def test_a_full_disk_is_reported_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, left = os.writev, iter([100, 3])

    def fill(handle: int, buffers: Sequence[Any]) -> int:
        room = next(left, 0)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(handle, few(buffers, room))

    monkeypatch.setattr(os, "writev", fill)
    with pytest.raises(jaxckpt.errors.StorageError, match=r"cannot write .*/c/0/0: No space left") as message:
        jaxckpt.save(tmp_path / "c", {"w": np.arange(100)})
    assert message.value.errno == errno.ENOSPC
    assert not (tmp_path / "c").exists()


# Damage ---------------------------------------------------------------------------------------------------

CHUNK_BYTES = 256
CHUNKS = 8


def flip(place: int) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        content[place] ^= 1

    return change


def with_entry(offset: int, length: int) -> Callable[[bytearray], None]:
    """Replace the last entry of the index, and recompute its checksum."""

    def change(content: bytearray) -> None:
        content[-20:-4] = offset.to_bytes(8, "little") + length.to_bytes(8, "little")
        content[-4:] = crc32c.crc32c(bytes(content[-16 * CHUNKS - 4 : -4])).to_bytes(4, "little")

    return change


def forged(content: bytearray) -> None:
    """Other data, valid in all its checksums."""
    content[0] ^= 1
    content[CHUNK_BYTES : CHUNK_BYTES + 4] = crc32c.crc32c(bytes(content[:CHUNK_BYTES])).to_bytes(4, "little")


DAMAGE: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "a bit of the data": (flip(5), "damaged chunk"),
    "a bit of a checksum": (flip(CHUNK_BYTES), "damaged chunk"),
    "a bit of the index": (flip(-20), "damaged index"),
    "a bit of the index's checksum": (flip(-1), "damaged index"),
    "a missing chunk": (with_entry(2**64 - 1, 2**64 - 1), "lacks a chunk"),
    "a chunk outside of the file": (with_entry(1 << 40, CHUNK_BYTES + 4), "points outside"),
    "a chunk of another size": (with_entry(0, CHUNK_BYTES), "whose size is not"),
    "other data": (forged, "does not hold the data that was saved there"),
    "cut": (lambda content: content.pop(), "bytes long, expected"),
    "longer": (lambda content: content.append(0), "bytes long, expected"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "data_bytes", "accepted"),
    [
        ([(0, 100), (100, 100)], 200, True),
        ([(0, 100), (2**64 - 1, 2**64 - 1)], 100, True),
        ([(0, 200), (0, 200)], 200, False),  # a check of all chunks would take time quadratic in the file's size
        ([(0, 1 << 62)] * 4, 1 << 62, False),  # their sum is 0 in 64 bits
    ],
)
def test_chunks_do_not_overlap(entries: list[tuple[int, int]], data_bytes: int, accepted: bool) -> None:
    index = np.array(entries, "<u8").tobytes()
    tail = np.frombuffer(index + crc32c.crc32c(index).to_bytes(4, "little"), np.uint8)
    found = _object_index.parse_index(tail, data_bytes)
    assert isinstance(found, np.ndarray) if accepted else "twice to the same bytes" in found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    array = np.arange(CHUNKS * CHUNK_BYTES // 8)
    options = jaxckpt.Options(chunk_bytes=CHUNK_BYTES, sync=False)
    jaxckpt.save(tmp_path / "ckpt", {"a": {"w": array}, "other": np.arange(3)}, options=options)
    return tmp_path / "ckpt"


@pytest.fixture
def file(saved: Path) -> Path:
    """The one object of a/w."""
    (found,) = (path for path in saved.glob("data-*/*int64-256/c/**/*") if path.is_file())
    assert found.stat().st_size == CHUNKS * (CHUNK_BYTES + 4) + 16 * CHUNKS + 4
    return found


IO = [jaxckpt.Options(), jaxckpt.Options(io="tensorstore")]
by_either = pytest.mark.parametrize("options", IO, ids=lambda options: options.io)


def refused(path: Path, options: jaxckpt.Options) -> Iterator[str]:
    """The errors of reading the leaf."""
    for read in (
        lambda: jaxckpt.load_numpy(path, options=options),
        lambda: jaxckpt.restore(path, options=options),
        lambda: jaxckpt.open(path, options=options)["a/w"][:],
    ):
        with pytest.raises(jaxckpt.errors.DataError) as raised:
            read()
        yield str(raised.value)
    np.testing.assert_array_equal(jaxckpt.open(path, options=options)["other"][:], np.arange(3))


@by_either
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_object_is_an_error_that_names_leaf_and_file(
    name: str, options: jaxckpt.Options, saved: Path, file: Path
) -> None:
    change, reason = DAMAGE[name]
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)
    for said in refused(saved, options):
        assert "cannot read leaf 'a/w': " in said
        assert str(file) in said
        assert reason in said or options.io == "tensorstore"  # tensorstore has its own messages
    assert not jaxckpt.verify(saved).ok


@by_either
@pytest.mark.parametrize("what", ["missing", "a link", "a folder", "in a linked folder", "in a folder that is a file"])
def test_a_file_that_is_not_regular_is_an_error_that_names_leaf_and_file(
    what: str, options: jaxckpt.Options, saved: Path, file: Path, tmp_path: Path
) -> None:
    moved = file if what in ("missing", "a link", "a folder") else file.parents[1]
    moved.rename(kept := tmp_path / "kept")
    match what:
        case "a link" | "in a linked folder":
            moved.symlink_to(kept)
        case "a folder":
            moved.mkdir()
        case "in a folder that is a file":
            moved.touch()
        case _:
            pass
    for said in refused(saved, options):
        assert "cannot read leaf 'a/w': " in said
        assert str(file) in said


@by_either
def test_a_missing_zarr_json_is_an_error_that_names_its_leaves(
    options: jaxckpt.Options, saved: Path, file: Path
) -> None:
    (metadata := file.parents[2] / "zarr.json").unlink()
    for said in refused(saved, options):
        assert f"{metadata} is missing; it describes leaf 'a/w'" in said


def test_a_file_that_is_cut_while_it_is_read_is_an_error(
    saved: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def cut_after(handle: int, buffers: Sequence[Any], start: int) -> int:
        count = preadv(handle, buffers, start)
        os.truncate(file, 100)
        return count

    monkeypatch.setattr(os, "preadv", cut_after)
    with pytest.raises(jaxckpt.errors.DataError, match=r"cannot read leaf 'a/w': .*/c/0/.* was truncated while"):
        jaxckpt.load_numpy(saved, select="a/w")


@by_either
def test_a_boolean_is_true_or_false(options: jaxckpt.Options, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"mask": np.array([True, False])})
    (file,) = (path for path in tmp_path.glob("c/data-*/*bool*/c/**/*") if path.is_file())
    content = bytearray(file.read_bytes())
    content[0] = 2
    content[2:6] = (checksum := crc32c.crc32c(bytes(content[:2])).to_bytes(4, "little"))
    file.write_bytes(content)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert f"{crc32c.crc32c(checksum):08x}" not in json.dumps(manifest)
    with pytest.raises(jaxckpt.errors.DataError, match=r"cannot read leaf 'mask': ") as raised:
        jaxckpt.load_numpy(tmp_path / "c", options=options)
    assert "neither true nor false" in str(raised.value) or options.io == "tensorstore"


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_chunk_of_blosc_that_states_another_length_is_not_decoded(tmp_path: Path, place: str) -> None:
    """The decoder would allocate the size in the chunk's header, here 2 GiB. All checksums are valid."""
    folder, rows = tmp_path / "c", np.zeros((4, 4096), np.float32)
    jaxckpt.save(folder, {"w": rows}, options=jaxckpt.Options(compression="blosc", chunk_bytes=16384))
    (file,) = (path for path in folder.glob("data-*/*/c/**/*") if path.is_file())
    content, manifest = bytearray(file.read_bytes()), json.loads((folder / "manifest.json").read_bytes())
    (stack,) = manifest["stacks"]
    count = math.prod(o // c for o, c in zip(stack["object"], stack["chunk"], strict=True))
    entries = np.frombuffer(content[-16 * count - 4 : -4], "<u8").reshape(-1, 2).tolist()
    (start, size), sums = entries[-1], b""
    content[start + 4 : start + 8] = struct.pack("<I", (1 << 31) - 17)
    content[start + size - 4 : start + size] = struct.pack("<I", crc32c.crc32c(content[start : start + size - 4]))
    for begin, length in entries:
        sums += content[begin + length - 4 : begin + length]
    ((key, _),) = stack["objects"].items()
    stack["objects"][key] = [len(content), f"{crc32c.crc32c(sums):08x}"]
    file.write_bytes(content)
    del manifest["sha256"]
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    (folder / "manifest.json").write_bytes(body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}')
    path = str(folder)
    if place == "memory":
        path = f"memory://{tmp_path.name}/blosc"
        memory = ts.KvStore.open(f"{path}/", context=ROOT_CONTEXT).result()
        for found in (found for found in folder.rglob("*") if found.is_file()):
            memory.write(str(found.relative_to(folder)), found.read_bytes()).result()
    of_copy, problem = jaxckpt.verify(path).problems  # the second copy of the manifest is the old one
    assert of_copy.object is not None
    assert of_copy.object.endswith("manifest-copy.json")
    assert "has a chunk that decodes to 2147483631 bytes, expected 16384" in problem.reason
    with pytest.raises(jaxckpt.CorruptError, match=r"decodes to|does not hold the data"):
        jaxckpt.load_numpy(path)


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
def test_a_flipped_bit_of_compressed_data_is_damage(tmp_path: Path, compression: str) -> None:
    """It is not a storage error, even if blosc's decoder reports that seeking backwards is not supported."""
    tree = {"mask": np.random.default_rng(0).random((8, 24)) > 0.5}
    jaxckpt.save(tmp_path / "c", tree, options=jaxckpt.Options(compression=compression))
    (file,) = (path for path in tmp_path.glob("c/data-*/*/c/**/*") if path.is_file())
    content = file.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(jaxckpt.errors.DataError, match="cannot read leaf 'mask': "):
            jaxckpt.load_numpy(tmp_path / "c")


def test_tensorstore_moves_all_bytes_if_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine, call in ((FileWriter, "write"), (FileReader, "read")):
        monkeypatch.setattr(engine, call, lambda *_: pytest.fail("our own reader or writer was used"))
    tree = {"w": np.arange(100_000, dtype=np.float32), "mask": np.array([True, False])}
    for compression in (None, "zstd", "blosc"):
        for path in (tmp_path / str(compression), f"memory://{tmp_path.name}/{compression}"):
            options = jaxckpt.Options(io="tensorstore", compression=compression)
            jaxckpt.save(path, tree, options=options)
            for name, array in jaxckpt.restore(path, options=options).items():
                np.testing.assert_array_equal(array, tree[name])
            assert jaxckpt.verify(path, options=options).ok
    with pytest.raises(
        jaxckpt.errors.InputError, match=r"Options\.io must be one of \('auto', 'tensorstore'\), found 'own'"
    ):
        jaxckpt.Options(io="own")  # type: ignore[arg-type]


def test_a_refused_write_is_the_same_error_in_both_engines(tmp_path: Path) -> None:
    for options in IO:
        with pytest.raises(jaxckpt.errors.StorageError, match="cannot write") as raised:
            _save_without_room(tmp_path / options.io, options)
        assert raised.value.errno == errno.EFBIG, options


def _save_without_room(path: Path, options: jaxckpt.Options) -> None:
    """Save with a limit of 64 KiB per file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        jaxckpt.save(path, {"w": np.zeros(1 << 20)}, options=options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_concurrent_first_uses_start_the_workers_once(run_python: RunPython) -> None:
    program = """
import os, sys, threading, time
from jaxckpt._pipeline import workers as _workers
sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
def submit():
    together.wait()
    _workers.submit(lambda: None).result()
threads = [threading.Thread(target=submit) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
wanted = min(32, max(2, os.cpu_count()))
for _ in range(1000):  # a thread is listed once it runs
    workers = sum(thread.name.startswith("jaxckpt-files") for thread in threading.enumerate())
    if workers >= wanted:
        break
    time.sleep(0.01)
print(workers == wanted)
"""
    assert run_python(program) == "True\n"
