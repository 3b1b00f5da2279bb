"""What torch.save writes: a zip archive whose tensors lie uncompressed in members of their own; torch is not imported.

data.pkl: the object, with its tensors as (storage, offset, shape, strides) ─▶ data/<storage>: bytes ─▶ FileBlock

The archive may be a part of a larger file, as those of torch.distributed.checkpoint are.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

from jaxckpt._foreign.pickles import Global, Object, as_tree, sizes, unpickle, unreadable
from jaxckpt._foreign.shards import FileBlock, Unreadable, opened
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box
from jaxckpt._format.pieces import Array
from jaxckpt._format.tree import Tree
from jaxckpt._restore.source import Block, Foreign, ForeignArray, compose
from jaxckpt._runtime.errors import DataError

MAX_DIRECTORY_BYTES = 1 << 28

MAX_REPEATED_BYTES = 1 << 26
"""Of a tensor that has elements of its storage several times, by strides of 0: a few bytes can ask for any memory."""

_CHECK_BYTES = 4 << 20

_DTYPES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "",
}


def dtype_of(value: Any) -> str | None:
    """The dtype that a pickle names, as `_tree.DTYPES` does; None where it has another or none."""
    if not isinstance(value, Global) or not value.name.startswith("torch."):
        return None
    name = value.name.removeprefix("torch.")
    name = _DTYPES.get(name, name)
    return name if name in DTYPES else None


def recognises(path: str, names: Collection[str]) -> bool:
    """Whether a file is what torch.save writes: the first member of the archive is the pickle."""
    if names or not os.path.isfile(path):
        return False
    with opened(path) as handle:
        head = os.pread(handle, 30 + 256, 0)
    if len(head) < 30 or not head.startswith(_LOCAL):
        return False
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b"/data.pkl")


def open_torch(path: str) -> Foreign:
    """A file that torch.save wrote."""
    return compose(path, read_saved(path), "torch")


def read_saved(path: str, start: int = 0, size: int | None = None) -> Tree:
    """The object in what torch.save wrote to a part of a file, its tensors as ForeignArrays.

    What is no data becomes leaves that cannot be read. Raises DataError, StorageError.
    """
    with opened(path) as handle:
        length = os.fstat(handle).st_size
        if start + (size or 0) > length:
            raise DataError(f"{path} is {length} bytes long, expected at least {start + (size or 0)}")
        archive = _Archive(path, handle, start, length - start if size is None else size)
        try:
            return archive.read()
        except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
            raise DataError(f"{path}: the archive at byte {start} is damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class SavedTensor(Block):
    """A tensor that torch.save wrote by itself to a part of a file. Where in it is looked up when it is first read: a
    checkpoint may have a million of them."""

    path: str
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]

    found: list[Block] = field(default_factory=list[Block], compare=False, repr=False)

    def read(self, box: Box, target: Array) -> None:
        self._found().read(box, target)

    def check(self) -> None:
        self._found().check()

    def _found(self) -> Block:
        if not self.found:
            tensor = read_saved(self.path, self.start, self.size)
            where = f"{self.path} at byte {self.start}"
            if not isinstance(tensor, ForeignArray):
                raise DataError(f"{where} holds a {type(tensor).__name__}, expected a tensor")
            if isinstance(tensor.block, Unreadable):
                raise DataError(f"{where}: {tensor.block.reason}")
            if (tensor.dtype, tensor.shape) != (self.dtype, self.shape):
                raise DataError(
                    f"{where} holds {tensor.dtype}{list(tensor.shape)}, expected {self.dtype}{list(self.shape)}"
                )
            self.found.append(tensor.block)
        return self.found[0]


@dataclass(frozen=True, slots=True)
class _Member:
    """A file in the archive."""

    path: str
    name: str
    offset: int
    size: int
    crc32: int

    def check(self) -> None:
        """Compare all of it with its checksum; torch writes 0 where it was told to compute none."""
        if not self.crc32:
            return
        found, at, end = 0, self.offset, self.offset + self.size
        with opened(self.path) as handle:
            while at < end:
                data = os.pread(handle, min(_CHECK_BYTES, end - at), at)
                if not data:
                    raise DataError(f"{self.path} was cut while it was read")
                found, at = zlib.crc32(data, found), at + len(data)
        if found != self.crc32:
            raise DataError(
                f"{self.path}: {self.name} at byte {self.offset} was altered:"
                f" its CRC-32 is {found:08x}, expected {self.crc32:08x}"
            )


@dataclass(frozen=True, slots=True)
class _TensorBlock(Block):
    """A tensor in its storage."""

    data: FileBlock
    member: _Member

    def read(self, box: Box, target: Array) -> None:
        self.data.read(box, target)

    def check(self) -> None:
        self.member.check()


@dataclass(frozen=True, slots=True)
class _Storage:
    member: _Member
    dtype: str
    """Empty where the tensors tell it."""


_LOCAL, _CENTRAL, _END, _END_64, _LOCATOR_64 = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"


class _Archive:
    """A zip archive in a part of a file, as far as torch writes one."""

    def __init__(self, path: str, handle: int, start: int, size: int) -> None:
        self._path = path
        self._handle = handle
        self._start = start
        self._size = size
        self._tail = b""
        self._tail = self._read(max(0, size - (1 << 12)), min(size, 1 << 12))
        self._storages: dict[str, _Storage] = {}

    def read(self) -> Tree:
        members = self._directory()
        name = next((name for name in members if name.endswith("/data.pkl") and name.count("/") == 1), None)
        if name is None:
            raise ValueError("it has no data.pkl; torch.save writes one since version 1.6")
        self._members, self._prefix = members, name.removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in members and self._content(order, 16) != b"little":
            raise ValueError("it was written by a big-endian machine")
        pickled = self._located(name, members[name])
        pickled.check()
        calls = {
            "torch.Size": sizes,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": _parameter,
            "torch._utils._rebuild_parameter_with_state": _parameter,
            "torch.nn.parameter.Parameter": _parameter,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
        }
        self._calls = calls
        value = unpickle(self._path, pickled.offset, pickled.size, calls=calls, persistent=self._storage)
        return as_tree(value, f"{self._path} at byte {self._start}")

    # The archive

    def _read(self, offset: int, size: int) -> bytes:
        """Bytes of the archive."""
        if offset < 0 or offset + size > self._size:
            raise ValueError(f"bytes {offset} to {offset + size} are beyond its {self._size}")
        first = self._size - len(self._tail)
        if offset >= first:
            return self._tail[offset - first : offset - first + size]
        data = os.pread(self._handle, size, self._start + offset)
        if len(data) < size:
            raise ValueError("the file was cut")
        return data

    def _directory(self) -> dict[str, tuple[int, int, int]]:
        """Offset of the header, size and CRC-32 of each member."""
        at = self._size - 22
        if at < 0 or not (end := self._read(at, 22)).startswith(_END):
            raise ValueError("it has no directory at its end: it was cut, or is no zip archive")
        count, size, offset = struct.unpack("<HII", end[10:20])
        if at >= 20 and (locator := self._read(at - 20, 20)).startswith(_LOCATOR_64):
            end = self._read(int.from_bytes(locator[8:16], "little"), 56)
            if not end.startswith(_END_64):
                raise ValueError("its directory is not where it should be")
            count, size, offset = struct.unpack("<QQQ", end[32:56])
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {size} bytes, at most {MAX_DIRECTORY_BYTES} are read")
        data = self._read(offset, size)
        members: dict[str, tuple[int, int, int]] = {}
        at = 0
        for _ in range(count):
            if data[at : at + 4] != _CENTRAL:
                raise ValueError("its directory is damaged")
            flags, method, _, _, crc32, stored, length, *lengths = struct.unpack("<HHHHIIIHHH", data[at + 8 : at + 34])
            header = int.from_bytes(data[at + 42 : at + 46], "little")
            name_end = at + 46 + lengths[0]
            name = data[at + 46 : name_end].decode()
            if flags & 1 or method:
                raise ValueError(f"{name[:80]!r} in it is compressed or encrypted, which torch.save does not do")
            wide = _wide(data[name_end : name_end + lengths[1]])
            length, stored, header = (
                next(wide) if value == 0xFFFFFFFF else value for value in (length, stored, header)
            )
            if name in members or stored != length:
                raise ValueError(f"{name[:80]!r} is twice in its directory, or of two sizes")
            members[name] = header, length, crc32
            at = name_end + lengths[1] + lengths[2]
        return members

    def _located(self, name: str, entry: tuple[int, int, int]) -> _Member:
        """A member with the place of its bytes."""
        header, size, crc32 = entry
        head = self._read(header, 30)
        if not head.startswith(_LOCAL):
            raise ValueError(f"{name[:80]!r} is not where its directory says")
        length, more = struct.unpack("<HH", head[26:30])
        if self._read(header + 30, length) != name.encode():
            raise ValueError(f"{name[:80]!r} has another name at byte {header}")
        offset = header + 30 + length + more
        if offset + size > self._size:
            raise ValueError(f"{name[:80]!r} of {size} bytes at byte {offset} is beyond its {self._size}")
        return _Member(self._path, name, self._start + offset, size, crc32)

    def _content(self, name: str, most: int) -> bytes:
        member = self._located(name, self._members[name])
        return self._read(member.offset - self._start, min(member.size, most))

    # What the pickle calls

    def _storage(self, identity: Any) -> _Storage | Object:
        if not isinstance(identity, tuple) or len(cast("tuple[Any, ...]", identity)) != 5:
            raise TypeError("it refers to what is no storage")
        kind, storage, key, _, _ = cast("tuple[Any, ...]", identity)
        if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str):
            raise ValueError("it refers to what is no storage")
        dtype = _STORAGES.get(storage.name.rpartition(".")[2])
        if dtype is None:  # of quantized elements, for example
            return Object(storage.name)
        if key not in self._storages:
            name = f"{self._prefix}data/{key}"
            if name not in self._members:
                raise ValueError(f"the storage {name[:80]!r} is missing")
            self._storages[key] = _Storage(self._located(name, self._members[name]), dtype)
        return self._storages[key]

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, dtype: str | None = None) -> Any:
        if isinstance(storage, Object):
            return storage
        if not isinstance(storage, _Storage):
            raise TypeError("a tensor has no storage")
        (start,), sides, steps = sizes((offset,)), sizes(shape), sizes(strides)
        if len(sides) != len(steps):
            raise ValueError(f"a tensor of shape {list(sides)} has strides {list(steps)}")
        member, dtype = storage.member, dtype or storage.dtype
        if dtype not in DTYPES:
            raise ValueError("the dtype of a tensor is missing")
        itemsize = DTYPES[dtype].itemsize
        data = FileBlock(member.path, member.offset + start * itemsize, dtype, sides, steps)
        if math.prod(sides) and data.end > member.offset + member.size:
            raise ValueError(
                f"a tensor {dtype}{list(sides)} ends {data.end - member.offset} bytes into its storage of {member.size}"
            )
        if math.prod(sides) * itemsize > max(member.size, MAX_REPEATED_BYTES):
            return unreadable(f"is {dtype}{list(sides)}, which repeats {member.size} bytes")
        return ForeignArray(dtype, sides, _TensorBlock(data, member))

    def _tensor_v2(
        self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, metadata: Any = None
    ) -> Any:
        return _plain(self._tensor(storage, offset, shape, strides), metadata)

    def _tensor_v3(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any,
        hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> Any:
        known = dtype_of(dtype)
        if known is None:
            return unreadable(f"has dtype {dtype.name[:80] if isinstance(dtype, Global) else '?'}, which JAX lacks")
        return _plain(self._tensor(storage, offset, shape, strides, known), metadata)

    def _of_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """A tensor of a subclass: what it adds to a tensor may say anything about how to read it, but a parameter's."""
        if isinstance(function, Global) and isinstance(kind, Global) and isinstance(args, tuple):
            plain = kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
            known = self._calls.get(function.name)
            if plain and known and known != self._of_type:
                return known(*cast("tuple[Any, ...]", args))
        return Object(kind.name if isinstance(kind, Global) else "torch._tensor._rebuild_from_type_v2")


def _parameter(data: Any = None, grad: Any = None, hooks: Any = None, state: Any = None) -> Any:
    if not isinstance(data, (ForeignArray, Object)):
        raise TypeError("a parameter is no tensor")
    return data


def _plain(tensor: Any, metadata: Any) -> Any:
    """A tensor whose bits are its values: torch conjugates and negates some only when they are used."""
    if isinstance(metadata, dict) and any(cast("dict[Any, Any]", metadata).values()):
        return unreadable("is a tensor with its conjugate or negative bit set; torch's resolve_conj() clears it")
    return tensor


def _wide(extra: bytes) -> Any:
    """The sizes of 64 bits in an extra field of the directory."""
    while len(extra) >= 4:
        kind, size = struct.unpack("<HH", extra[:4])
        if kind == 1:
            yield from struct.unpack(f"<{size // 8}Q", extra[4 : 4 + size // 8 * 8])
            return
        extra = extra[4 + size :]
