"""Reads and writes NumPy's .npz files. Stored members are read in place, and deflated members as a stream."""

from __future__ import annotations

import itertools
import math
import os
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxckpt._formats.export import arrays_of, names_of, raw, recorded_paths, tree_of_names
from jaxckpt._formats.index_files import located_together, reads_files
from jaxckpt._formats.npy_file import (
    MAGIC,
    MAX_HEADER_BYTES,
    NpyHeader,
    array_of,
    open_npy,
    read_npy_header,
    write_npy_header,
)
from jaxckpt._formats.shards import FileData, c_strides, f_strides
from jaxckpt._formats.zips import READ_BYTES, Member, first_name, opened_archive
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES, npy_dtype
from jaxckpt._model.grid import Box, extent, flat_boxes, intersection, slices_within, volume
from jaxckpt._model.pieces import Array, as_bits
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, with_files
from jaxckpt._sources.format_registry import Format
from jaxckpt._sources.source import Source
from jaxckpt._store.foreign_files import OpenFile, is_visible_file, opened, read_head, using_files
from jaxckpt.errors import DataError, InputError, show_path

MAX_TEXT_BYTES = 1 << 20
"""The largest str or bytes."""

MAX_NAME_BYTES = 32_000
"""The longest name that is written. A zip file allows 65,535 bytes, also for the path, which may be twice as long."""

SNAPSHOTS = 256
"""The most positions of a deflated member at which reading can start. Each takes about 50 KB."""

SNAPSHOT_BYTES = 16 << 20
"""The least distance between these positions, in bytes of decompressed data."""


def recognizes(path: str, names: Collection[str]) -> bool:
    """Whether a file has the suffix .npz, or is an archive that begins with an array: `convert` writes to any name."""
    return not names and is_visible_file(path) and (path.endswith(".npz") or first_name(path).endswith(".npy"))


def open_npz(path: str, void: str | None = None) -> ForeignCheckpoint:
    """The arrays in the tree of their names. Raises DataError."""
    with opened_archive(path) as archive:
        recorded = {_array_name(file): archive.comment(file) for file in archive if archive.comment(file)}
    return compose(path, tree_of_names(read_npz(path, void), recorded), "npz")


@explain_keywords
@reads_files
def npz_file(path: str | os.PathLike[str], *, dtype: str) -> ForeignCheckpoint:
    """Open an .npz or .npy file with arrays of a dtype that NumPy's format does not record, such as float8_e4m3fn.

    NumPy stores such arrays as bytes without a meaning (dtype V1). If the file is opened by its path, these leaves
    cannot be read, except that arrays of dtype V2 are bfloat16, as for `jax.numpy.load`.

    Args:
        path: The file, or its URL.
        dtype: The dtype of these arrays, such as "float8_e4m3fn" or "int4". Other arrays keep their dtype.

    Returns:
        A checkpoint, which `restore` and the other functions accept in place of a path.

    Raises:
        InputError: `dtype` is not the name of a dtype.
        DataError: The file is damaged.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    (place,), opened_files = located_together({"path": path})
    with using_files(opened_files):
        is_npy = read_head(place, len(MAGIC)) == MAGIC
        return with_files(open_npy(place, itertools.repeat(dtype)) if is_npy else open_npz(place, dtype), opened_files)


def read_npz(path: str, void: str | None = None) -> dict[str, ForeignArray | str | bytes]:
    """The arrays of an .npz file, by name. Only headers are read. `void` is the dtype of arrays without one, if given.

    Arrays of other things than numbers cannot be read. Raises DataError if the file is damaged.
    """
    arrays: dict[str, ForeignArray | str | bytes] = {}
    with opened_archive(path) as archive:
        for file in archive:
            name = _array_name(file)
            if name in arrays:
                raise DataError(f"{path} has two members {name!r}")
            arrays[name] = _array(path, name, archive.handle, archive[file], void)
    return arrays


def _array_name(file: str) -> str:
    return file.removesuffix(".npy")


class _Snapshot(NamedTuple):
    """The decompression state of a member."""

    output_position: int
    """Bytes of output so far."""

    input_position: int
    """Bytes of input so far."""

    crc: int
    inflater: Any


def _head(handle: OpenFile, member: Member, count: int) -> bytes:
    """The first `count` bytes of a member, decompressed."""
    count = min(count, member.n_bytes)
    if not member.deflated:
        return handle.read(count, member.offset)
    try:  # twice the bytes suffice, because deflate never makes data twice as large
        return zlib.decompressobj(-15).decompress(handle.read(min(2 * count, member.n_stored), member.offset), count)
    except zlib.error as error:
        raise DataError(f"{member.path} is damaged: {error}") from error


def _array(path: str, name: str, handle: OpenFile, member: Member, void: str | None) -> ForeignArray | str | bytes:
    where = f"{path}: {show_path(name)}"
    record = read_npy_header(where, _head(handle, member, MAX_HEADER_BYTES + 12))
    if not record.dtype.hasobject and record.n_bytes != member.n_bytes - record.start:
        raise DataError(
            f"{where} has {member.n_bytes - record.start} bytes, expected {record.n_bytes} of"
            f" {record.dtype}{list(record.shape)}"
        )
    if record.dtype.kind in "SU" and not record.shape and record.n_bytes <= MAX_TEXT_BYTES:
        return _text(where, _head(handle, member, member.n_bytes), member, record)
    start, shape, fortran = record.start, record.shape, record.fortran
    if member.deflated:
        return array_of(record, lambda dtype: Deflated(member, start, dtype, shape, fortran), void)
    strides = f_strides(shape) if fortran else None
    offset = member.offset + start
    return array_of(record, lambda dtype: Uncompressed(path, offset, dtype, shape, strides, member=member), void)


def _text(where: str, raw: bytes, member: Member, record: NpyHeader) -> str | bytes:
    member.require_crc32(zlib.crc32(raw))
    try:
        return np.ndarray((), record.dtype, raw[record.start :] or b"\0").item()
    except ValueError as error:  # raised for a number that is not a Unicode character
        raise DataError(f"{where} is not text: {error}") from error


@dataclass(frozen=True, slots=True)
class Uncompressed(FileData):
    """An array in an uncompressed member."""

    member: Member = field(kw_only=True)

    def read(self, box: Box, target: Array) -> None:
        FileData.read(self, box, target)
        if target.shape != self.shape:
            return
        stored = as_bits(target) if self.strides is None else as_bits(target).T
        if not stored.flags.c_contiguous:
            self.member.check()
            return
        with opened(self.path) as handle:
            head = handle.read(self.offset - self.member.offset, self.member.offset)
        self.member.require_crc32(zlib.crc32(stored.reshape(-1).view(np.uint8).data, zlib.crc32(head)))

    def check(self) -> None:
        self.member.check()


@dataclass(frozen=True, slots=True)
class Deflated(ArrayData):
    """An array in a deflated member."""

    member: Member
    start: int
    """Offset of its first element in the member."""

    dtype: str
    shape: tuple[int, ...]
    fortran: bool

    snapshots: dict[int, _Snapshot] = field(default_factory=dict[int, _Snapshot], compare=False, repr=False)
    """Positions at which reading can start, by the number of a stretch of the member: at most one in each stretch."""

    def read(self, box: Box, target: Array) -> None:
        if not target.size:
            return
        target, shape = as_bits(target), self.shape
        if self.fortran:
            box, target, shape = box[::-1], target.T, shape[::-1]
        strides = c_strides(shape)
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(box, strides, strict=True))
        unread, at = b"", 0
        with opened(self.member.path) as handle:
            for position, data in self._inflated(handle, self.start + first * target.itemsize):
                at = at if unread else position
                unread += data
                # Data before the array, and the rest of an element if the data starts inside it.
                skip = self.start - at if at < self.start else (self.start - at) % target.itemsize
                unread, at = unread[skip:], min(at + skip, at + len(unread))
                if not unread:
                    continue
                count = len(unread) // target.itemsize
                element = (at - self.start) // target.itemsize
                _copy(shape, element, np.frombuffer(unread, target.dtype, count), box, target)
                unread, at = unread[count * target.itemsize :], at + count * target.itemsize
                if last < element + count < math.prod(shape):
                    return  # early, so the checksum at the end of the member is not compared

    def _inflated(self, handle: OpenFile, start: int) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of the member, from at or before `start` on. Raises DataError."""
        member = self.member
        usable = [snapshot for snapshot in list(self.snapshots.values()) if snapshot.output_position <= start]
        now = max(usable, default=_Snapshot(0, 0, 0, zlib.decompressobj(-15)))
        position, source, crc, inflater = now.output_position, now.input_position, now.crc, now.inflater.copy()
        stretch = max(SNAPSHOT_BYTES, member.n_bytes // SNAPSHOTS)
        while position < member.n_bytes:
            packed = inflater.unconsumed_tail
            if not packed:
                packed = handle.read(min(READ_BYTES, member.n_stored - source), member.offset + source)
                source += len(packed)
            try:
                data = inflater.decompress(packed, min(READ_BYTES, member.n_bytes - position))
            except zlib.error as error:
                raise DataError(f"{member.path} is damaged: {error}") from error
            if not data and (inflater.eof or not packed):
                raise DataError(f"{member.path} was truncated or is damaged: {member.name} ends at byte {position}")
            crc = zlib.crc32(data, crc)
            if position + len(data) == member.n_bytes:
                member.require_crc32(crc)
            yield position, data
            position += len(data)
            if position // stretch and position // stretch not in self.snapshots:
                self.snapshots[position // stretch] = _Snapshot(position, source, crc, inflater.copy())


def _copy(shape: tuple[int, ...], element: int, values: Array, box: Box, target: Array) -> None:
    """Copy the elements of a box that are among `values`, the elements of the array from number `element` on."""
    for run in flat_boxes(shape, element, element + len(values)):
        common = intersection(run, box)
        if common is not None:
            target[slices_within(common, box)] = values[: volume(run)].reshape(extent(run))[slices_within(common, run)]
        values = values[volume(run) :]


# Writing --------------------------------------------------------------------------------------------------


def write_npz(source: Source, path: str, options: Options, report: Report) -> None:
    """Write an uncompressed .npz in which each leaf is a member, with its path as a comment if that does not follow
    from the name. numpy.load opens it without pickle. Dtypes that NumPy lacks become a larger dtype, without loss, such
    as bfloat16 float32. Raises TreeError for leaves that the format cannot hold."""
    arrays = arrays_of(source, options, report, _problem)
    paths = recorded_paths(names_of(source))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")
            info.comment = paths.get(name, "").encode()
            with archive.open(info, "w", force_zip64=True) as member:
                dtype = npy_dtype(data.dtype)
                write_npy_header(member, dtype, data.shape)
                for slab in data.slabs() if isinstance(data, StoredArray) else [data]:
                    member.write(raw(slab.astype(dtype, copy=False)).data)


def _problem(name: str, dtype: np.dtype[Any]) -> str | None:
    return "has a name that zip files do not allow" if "\0" in name or len(name.encode()) > MAX_NAME_BYTES else None


FORMAT = Format("npz", recognizes, open_npz, write=write_npz, suffixes=(".npz",))
