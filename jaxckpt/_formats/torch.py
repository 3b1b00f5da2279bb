"""Reads files of torch.save without torch: a zip archive with each tensor's storage as an uncompressed member.

data.pkl: the object, with its tensors as (storage, offset, shape, strides) ─▶ data/<storage>: bytes ─▶ FileData

The archive may be a part of a larger file, as in torch.distributed.checkpoint. Before version 1.6, torch wrote several
pickles in a row (a number, a version, the machine, the object, the storages' keys), and then the storages.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from jaxckpt._formats.index_files import STEMS, complete_series, merged, preferred, require_length
from jaxckpt._formats.pickle_machine import Global, OpaqueObject
from jaxckpt._formats.pickles import as_tree, require_sizes, unpickle, unpickle_at, unreadable
from jaxckpt._formats.shards import FileData
from jaxckpt._formats.zips import Archive, Member, first_name, opened_archive
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array
from jaxckpt._model.tree import Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, Unreadable
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import is_folder, list_names, read_head
from jaxckpt.errors import DataError, NotACheckpointError, UnsupportedError

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


_OTHER_SIZES = {"untyped": 1, "complexhalf": 4, "quint8": 1, "qint8": 1, "qint32": 4}
"""Bytes of an element of storages that have no dtype in `DTYPES`."""

_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of torch before 1.6, after its protocol: the number 0x1950a86a20f9469cfc6c."""


def dtype_of(value: Any) -> str | None:
    """The name in `DTYPES` of a torch dtype in a pickle; None for unsupported dtypes and for other values."""
    if not isinstance(value, Global) or not value.name.startswith("torch."):
        return None
    name = value.name.removeprefix("torch.")
    name = _DTYPES.get(name, name)
    return name if name in DTYPES else None


def recognizes(path: str, names: Collection[str]) -> bool:
    """Whether torch.save wrote a file: an archive with its pickle, or a number at the start."""
    if names:
        others = [name for name in names if not name.endswith(".msgpack.index.json")]  # of the same model for Flax
        return not any(name.endswith((".safetensors", ".index.json")) for name in others) and bool(_model_files(names))
    return re.fullmatch(r"[^/]+/data(\.pkl|/\d+)", first_name(path)) is not None or is_legacy(path)


def _model_files(names: Collection[str]) -> Sequence[str]:
    """The files of transformers or diffusers in a folder, without an index of them."""
    if single := preferred(names, ".bin"):
        return [single]
    return complete_series([name for name in names if name.endswith(".bin") and "-of-" in name]) or []


def is_legacy(path: str) -> bool:
    return read_head(path, 2 + len(_LEGACY))[2:] == _LEGACY


def open_torch(path: str) -> ForeignCheckpoint:
    """A file that torch.save wrote, as a checkpoint. Raises DataError, StorageError."""
    if not is_folder(path):
        return compose(path, _read_file(path), "torch")
    files = [os.path.join(path, name) for name in _model_files(list_names(path))]
    return compose(path, merged({file: read_tensors(file) for file in files}), "torch")


def read_tensors(path: str) -> dict[Any, Any]:
    """The tensors in a file of torch.save, by name. Raises DataError, StorageError."""
    tensors = _read_file(path)
    if not isinstance(tensors, dict):
        raise DataError(f"{path} holds a {type(tensors).__name__}, expected a dict of tensors")
    return cast("dict[Any, Any]", tensors)


def _read_file(path: str) -> Any:
    return read_legacy(path) if is_legacy(path) else read_saved(path, is_whole_checkpoint=True)


def read_saved(path: str, start: int = 0, size: int | None = None, *, is_whole_checkpoint: bool = False) -> Tree:
    """The object that torch.save wrote to a part of a file, with tensors as ForeignArrays.

    Values that are not data become leaves that cannot be read. Raises DataError, StorageError.
    """
    with opened_archive(path, start, size) as archive:
        where = f"{path} at byte {start}"
        return as_tree(_read_archive(archive), where, is_whole_checkpoint=is_whole_checkpoint)


def read_legacy(path: str) -> Tree:
    """The object in a file of torch before 1.6. Raises DataError, StorageError."""
    _, at = unpickle_at(path, 0)
    _, at = unpickle_at(path, at)
    machine, at = unpickle_at(path, at)
    if not isinstance(machine, dict) or cast("dict[Any, Any]", machine).get("little_endian") is not True:
        raise DataError(f"{path} was written by a big-endian machine")
    sizes: dict[str, int] = {}
    object_at = at
    _, at = unpickle_at(path, at, persistent=partial(_note_size, sizes))
    keys, at = unpickle_at(path, at)
    storages: dict[str, Member] = {}
    for key in cast("list[Any]", keys if isinstance(keys, list) else []):
        if key not in sizes:
            raise DataError(f"{path} has a storage {str(key)[:80]!r} that no tensor uses")
        storages[key] = Member(path, key, at + 8, sizes[key], sizes[key], 0, False)
        at += 8 + sizes[key]
    if sizes.keys() - storages:
        raise DataError(f"{path} lacks the storage {min(sizes.keys() - storages)[:80]!r}")
    require_length(path, at)
    tensors = _Tensors(storages.__getitem__)
    return as_tree(unpickle_at(path, object_at, calls=tensors.calls, persistent=tensors.storage)[0], path)


def _note_size(sizes: dict[str, int], identity: Any) -> OpaqueObject:
    """Note the bytes of a storage that a pickle refers to."""
    match identity:
        case ("storage", Global(name=name), str(key), _, int(count), None):
            dtype = _storage_dtype(name)
            if dtype not in DTYPES and dtype not in _OTHER_SIZES:
                raise ValueError(f"it has a storage of type {name[:80]}, whose size is not known")
            sizes[key] = require_sizes((count,))[0] * (_OTHER_SIZES.get(dtype) or DTYPES[dtype].itemsize)
            return OpaqueObject(name)
        case _:
            raise ValueError("it refers to something that is not a storage, or to a part of one")


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
                raise UnsupportedError(f"{where}: {tensor.data.reason}")
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


def _read_archive(archive: Archive) -> Any:
    """The object in an archive. Raises ValueError, TypeError."""
    name = next((name for name in archive if name.endswith("/data.pkl") and name.count("/") == 1), None)
    if name is None:
        raise ValueError("it has no data.pkl")
    prefix = name.removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in archive:
        raise NotACheckpointError(
            f"{archive.path} is a TorchScript program: load it with torch.jit.load, and save its state_dict() with"
            " torch.save"
        )

    def member(name: str) -> Member:
        if f"{prefix}{name}" not in archive:
            raise ValueError(f"the storage {prefix + name[:80]!r} is missing")
        found = archive[f"{prefix}{name}"]
        if found.deflated:
            raise ValueError(f"{name[:80]!r} in it is compressed, which torch.save does not do")
        return found

    if f"{prefix}byteorder" in archive and archive.content(member("byteorder"), 16) != b"little":
        raise ValueError("it was written by a big-endian machine")
    pickled = member("data.pkl")
    if pickled.crc32:
        pickled.check()
    tensors = _Tensors(lambda key: member(f"data/{key}"))
    return unpickle(archive.path, pickled.offset, pickled.n_bytes, calls=tensors.calls, persistent=tensors.storage)


class _Tensors:
    """The functions that a pickle of torch may call, which build tensors on its storages."""

    def __init__(self, member_of: Callable[[str], Member]) -> None:
        self._member_of = member_of
        self._storages: dict[str, _Storage] = {}
        self.calls: Mapping[str, Callable[..., Any]] = {
            "torch.Size": require_sizes,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": _parameter,
            "torch._utils._rebuild_parameter_with_state": _parameter,
            "torch.nn.parameter.Parameter": _parameter,
            "torch._tensor._rebuild_from_type_v2": self._rebuild_from_type,
        }

    def storage(self, identity: Any) -> _Storage | OpaqueObject:
        """The storage that a pickle refers to; an `OpaqueObject` if its elements have an unsupported dtype."""
        match identity:
            case ("storage", Global(name=name), str(key), _, _, *_):
                dtype = _storage_dtype(name)
            case _:
                raise ValueError("it refers to something that is not a storage")
        if dtype != "untyped" and dtype not in DTYPES:  # of quantized elements, for example
            return OpaqueObject(name)
        if key not in self._storages:
            self._storages[key] = _Storage(self._member_of(key), dtype if dtype in DTYPES else "")
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
            rebuild = self.calls.get(function.name)
            if plain and rebuild and rebuild != self._rebuild_from_type:
                return rebuild(*cast("tuple[Any, ...]", args))
        return OpaqueObject(kind.name if isinstance(kind, Global) else "torch._tensor._rebuild_from_type_v2")


def _storage_dtype(name: str) -> str:
    """The dtype of the elements of a class of storages; another name for unsupported ones."""
    kind = name.rpartition(".")[2].removesuffix("Storage").lower()
    return _DTYPES.get(kind, kind)


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


FORMAT = Format("torch", recognizes, open_torch, index_names=tuple(f"{stem}.bin" for stem in STEMS))
