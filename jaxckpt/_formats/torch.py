"""Reads files of torch.save without torch: a zip archive with each tensor's storage as an uncompressed member.

data.pkl: the object, with its tensors as (storage, offset, shape, strides) ─▶ data/<storage>: bytes ─▶ FileData

The archive may be a part of a larger file, as in torch.distributed.checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

from jaxckpt._formats.pickle_machine import Global, OpaqueObject
from jaxckpt._formats.pickles import as_tree, require_sizes, unpickle, unreadable
from jaxckpt._formats.shards import FileData, Unreadable
from jaxckpt._formats.zips import Archive, Member, first_name, opened_archive
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array
from jaxckpt._model.tree import Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt.errors import DataError

MAX_REPEATED_BYTES = 1 << 26
"""The largest tensor that repeats elements of its storage by strides of 0. Without a limit, a file of a few bytes could
make a reader allocate any amount of memory."""

_DTYPES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "cfloat": "complex64",
    "complexfloat": "complex64",
    "cdouble": "complex128",
    "complexdouble": "complex128",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
}
"""Dtypes by torch's own names, and by lowercase names of its storages without "Storage" (ComplexFloatStorage)."""


def dtype_of(value: Any) -> str | None:
    """The name in `DTYPES` of a torch dtype in a pickle; None for unsupported dtypes and for other values."""
    if not isinstance(value, Global) or not value.name.startswith("torch."):
        return None
    name = value.name.removeprefix("torch.")
    name = _DTYPES.get(name, name)
    return name if name in DTYPES else None


def recognizes(path: str, names: Collection[str]) -> bool:
    """Whether torch.save wrote a file: the first member of its archive is the pickle."""
    return not names and first_name(path).endswith("/data.pkl")


def open_torch(path: str) -> ForeignCheckpoint:
    """A file that torch.save wrote, as a checkpoint. Raises DataError, StorageError."""
    return compose(path, read_saved(path, is_whole_checkpoint=True), "torch")


def read_saved(path: str, start: int = 0, size: int | None = None, *, is_whole_checkpoint: bool = False) -> Tree:
    """The object that torch.save wrote to a part of a file, with tensors as ForeignArrays.

    Values that are not data become leaves that cannot be read. Raises DataError, StorageError.
    """
    with opened_archive(path, start, size) as archive:
        return as_tree(
            _SavedArchive(archive).read(), f"{path} at byte {start}", is_whole_checkpoint=is_whole_checkpoint
        )


@dataclass(frozen=True, slots=True)
class SavedTensor(ArrayData):
    """A tensor that torch.save wrote to its own part of a file. It is located only when it is first read, because a
    checkpoint may have a million tensors."""

    path: str
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]

    cached_data: list[ArrayData] = field(default_factory=list[ArrayData], compare=False, repr=False)

    def read(self, box: Box, target: Array) -> None:
        self._locate().read(box, target)

    def check(self) -> None:
        self._locate().check()

    def _locate(self) -> ArrayData:
        if not self.cached_data:
            tensor = read_saved(self.path, self.start, self.size)
            where = f"{self.path} at byte {self.start}"
            if not isinstance(tensor, ForeignArray):
                raise DataError(f"{where} holds a {type(tensor).__name__}, expected a tensor")
            if isinstance(tensor.data, Unreadable):
                raise DataError(f"{where}: {tensor.data.reason}")
            if (tensor.dtype, tensor.shape) != (self.dtype, self.shape):
                raise DataError(
                    f"{where} holds {tensor.dtype}{list(tensor.shape)}, expected {self.dtype}{list(self.shape)}"
                )
            self.cached_data.append(tensor.data)
        return self.cached_data[0]


@dataclass(frozen=True, slots=True)
class _TensorData(ArrayData):
    """A tensor in its storage."""

    data: FileData
    member: Member

    def read(self, box: Box, target: Array) -> None:
        self.data.read(box, target)

    def check(self) -> None:
        if self.member.crc32:  # torch writes 0 if it computes no checksum
            self.member.check()


@dataclass(frozen=True, slots=True)
class _Storage:
    member: Member
    dtype: str
    """Dtype of the elements; empty if each tensor records its own."""


class _SavedArchive:
    """An archive that torch.save wrote, and the functions that its pickle may call."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._storages: dict[str, _Storage] = {}
        self._calls = {
            "torch.Size": require_sizes,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": _parameter,
            "torch._utils._rebuild_parameter_with_state": _parameter,
            "torch.nn.parameter.Parameter": _parameter,
            "torch._tensor._rebuild_from_type_v2": self._rebuild_from_type,
        }

    def read(self) -> Any:
        archive = self._archive
        name = next((name for name in archive if name.endswith("/data.pkl") and name.count("/") == 1), None)
        if name is None:
            raise ValueError("it has no data.pkl; torch.save has written one since version 1.6")
        self._prefix = name.removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in archive and archive.content(self._member(order), 16) != b"little":
            raise ValueError("it was written by a big-endian machine")
        pickled = self._member(name)
        if pickled.crc32:
            pickled.check()
        return unpickle(archive.path, pickled.offset, pickled.n_bytes, calls=self._calls, persistent=self._storage)

    def _member(self, name: str) -> Member:
        member = self._archive[name]
        if member.deflated:
            raise ValueError(f"{name[:80]!r} in it is compressed, which torch.save does not do")
        return member

    def _storage(self, identity: Any) -> _Storage | OpaqueObject:
        """The storage that a pickle refers to; an `OpaqueObject` if its elements have an unsupported dtype."""
        match identity:
            case ("storage", Global(name=name), str(key), _, _):
                kind = name.rpartition(".")[2].removesuffix("Storage").lower()
            case _:
                raise ValueError("it refers to something that is not a storage")
        dtype = _DTYPES.get(kind, kind)
        if dtype != "untyped" and dtype not in DTYPES:  # of quantized elements, for example
            return OpaqueObject(name)
        if key not in self._storages:
            file = f"{self._prefix}data/{key}"
            if file not in self._archive:
                raise ValueError(f"the storage {file[:80]!r} is missing")
            self._storages[key] = _Storage(self._member(file), dtype if dtype in DTYPES else "")
        return self._storages[key]

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, dtype: str | None = None) -> Any:
        """A tensor from its storage. Raises ValueError, TypeError if it does not fit its storage."""
        if isinstance(storage, OpaqueObject):
            return storage
        if not isinstance(storage, _Storage):
            raise TypeError("a tensor has no storage")
        (start,), sides, steps = require_sizes((offset,)), require_sizes(shape), require_sizes(strides)
        if len(sides) != len(steps):
            raise ValueError(f"a tensor of shape {list(sides)} has strides {list(steps)}")
        member, dtype = storage.member, dtype or storage.dtype
        if dtype not in DTYPES:
            raise ValueError("the dtype of a tensor is missing")
        itemsize = DTYPES[dtype].itemsize
        data = FileData(member.path, member.offset + start * itemsize, dtype, sides, steps)
        if math.prod(sides) and data.end > member.offset + member.n_bytes:
            raise ValueError(
                f"a tensor {dtype}{list(sides)} ends {data.end - member.offset} bytes into its storage of"
                f" {member.n_bytes}"
            )
        if math.prod(sides) * itemsize > max(member.n_bytes, MAX_REPEATED_BYTES):
            return unreadable(f"is {dtype}{list(sides)}, which repeats {member.n_bytes} bytes")
        return ForeignArray(dtype, sides, _TensorData(data, member))

    def _tensor_v2(self, *args: Any) -> Any:
        storage, offset, shape, strides, _grad, _hooks, *metadata = args
        return _reject_conjugated(self._tensor(storage, offset, shape, strides), metadata)

    def _tensor_v3(self, *args: Any) -> Any:
        storage, offset, shape, strides, _grad, _hooks, dtype, *metadata = args
        supported_dtype = dtype_of(dtype)
        if supported_dtype is None:
            return unreadable(
                f"has dtype {dtype.name[:80] if isinstance(dtype, Global) else '?'}, which JAX does not support"
            )
        return _reject_conjugated(self._tensor(storage, offset, shape, strides, supported_dtype), metadata)

    def _rebuild_from_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """A tensor of a subclass. Only parameters and buffers can be read, because other subclasses may interpret their
        data differently."""
        if isinstance(function, Global) and isinstance(kind, Global) and isinstance(args, tuple):
            plain = kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
            rebuild = self._calls.get(function.name)
            if plain and rebuild and rebuild != self._rebuild_from_type:
                return rebuild(*cast("tuple[Any, ...]", args))
        return OpaqueObject(kind.name if isinstance(kind, Global) else "torch._tensor._rebuild_from_type_v2")


def _parameter(data: Any = None, grad: Any = None, hooks: Any = None, state: Any = None) -> Any:
    if not isinstance(data, (ForeignArray, OpaqueObject)):
        raise TypeError("a parameter is not a tensor")
    return data


def _reject_conjugated(tensor: Any, metadata: list[Any]) -> Any:
    """The tensor if its bits are its values, otherwise a leaf that cannot be read: torch conjugates and negates some
    tensors only when they are used."""
    if any(isinstance(flags, dict) and any(cast("dict[Any, Any]", flags).values()) for flags in metadata):
        return unreadable("is a tensor with its conjugate or negative bit set; torch's resolve_conj() clears it")
    return tensor


FORMAT = Format("torch", recognizes, open_torch)
