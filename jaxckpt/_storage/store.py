"""Storage as all backends share it: a checkpoint's folder, and its arrays through tensorstore.

`folder` keeps the small control files of a checkpoint on a file system, `bucket` those on an object store; both are
Stores. Arrays go through tensorstore's zarr3 driver on either.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import tensorstore as ts

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box
from jaxckpt._format.names import MANIFEST, WRITER, may_name
from jaxckpt._format.pieces import Array, Pieces
from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import CheckpointExistsError, DataError, InputError, StorageError
from jaxckpt._runtime.options import Options

MANIFEST_LIMIT_BYTES = 1 << 30

Pending = Any
"""What is under way: `.result()` waits and raises, `.done()` asks."""

# One parent context, so that memory:// paths name the same memory in every call.
ROOT_CONTEXT = ts.Context({"cache_pool": {"total_bytes_limit": 0}})


@dataclass(frozen=True, slots=True)
class Store(abc.ABC):
    """The folder of one checkpoint."""

    url: str
    """The path as the user gave it, without a trailing slash."""

    # Small files -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def read(self, key: str) -> bytes | None:
        """The whole of a small file; None where it does not exist."""

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        """Several small files."""
        return [self.read(key) for key in keys]

    @abc.abstractmethod
    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        """Write a small file into a folder that is there; that folder itself is synced with all else."""

    @abc.abstractmethod
    def remove(self, key: str) -> None:
        """Delete a small file; nothing happens where it is not there."""

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Delete a folder directly below, with all it holds."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Names directly in the folder; empty where it does not exist."""

    @abc.abstractmethod
    def child(self, name: str) -> Self:
        """The store of a folder directly below."""

    @abc.abstractmethod
    def made(self, name: str) -> Self:
        """The store of a folder directly below, which is created if it does not exist."""

    @abc.abstractmethod
    def cut(self, ending: str) -> Self:
        """The store at the path without this ending, such as "/00000040": the folder above."""

    @abc.abstractmethod
    def folders(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, bool]:
        """For each folder directly below whose name is wanted, whether it holds a checkpoint."""

    @abc.abstractmethod
    def mark(self, name: str) -> None:
        """Note that a folder directly below may hold a checkpoint, where listing all keys would be the way to know."""

    @abc.abstractmethod
    def unmark(self, name: str) -> None:
        """Take that back."""

    @property
    @abc.abstractmethod
    def sees_writers(self) -> bool:
        """Whether it can be told which writers are alive."""

    @abc.abstractmethod
    def give_up(self, data: str) -> None:
        """Delete the data of a save that has failed, unless it may yet be published. Process 0."""

    def is_file(self) -> bool:
        """Whether a plain file stands where the folder would be."""
        return False

    # A save's own folder ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def begin(self, save_id: str, previous: bytes | None) -> Writer:
        """Make `data-<save id>` with a note of who writes it, to replace the manifest `previous`. Process 0."""

    @abc.abstractmethod
    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        """Put `manifest`, of the data folder `data`, in the place of `previous`, atomically. Process 0."""

    @abc.abstractmethod
    def unpublish(self, *, sync: bool) -> None:
        """Take the manifest away: from here on there is no checkpoint. Process 0."""

    @abc.abstractmethod
    def sweep(self, current: str | None) -> bool:
        """Delete `data-*` folders of saves that can no longer publish; `current` is the one in use. Process 0.

        Returns whether some are left that perhaps can.
        """

    @abc.abstractmethod
    def clear(self) -> None:
        """Delete what is left where there is no checkpoint. Process 0."""

    @abc.abstractmethod
    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Delete the folders of stacks that a published manifest names no more. Process 0."""

    @abc.abstractmethod
    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        """Make durable the folders above objects that this process wrote."""

    @abc.abstractmethod
    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Make durable each zarr.json, the data folder, and every folder above it. Process 0."""

    def overtaken(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"another save published a checkpoint at {self.url} while this one was writing; this one was given up"
        )

    # Arrays -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def array_writer(self, data: str, stack: Stack, options: Options) -> ArrayWriter:
        """For the objects of a stack."""

    @abc.abstractmethod
    def array_reader(self, data: str, stack: Stack, expected: Mapping[str, tuple[int, str]]) -> ArrayReader:
        """Of a stack whose objects have these lengths and digests, by place in the grid.

        Nothing is read: its metadata is built from the manifest.
        """

    def create_array(self, data: str, stack: Stack) -> None:
        """Write the `zarr.json` of a stack. Process 0."""
        self.put(f"{data}/{stack.name}/zarr.json", zarr.metadata(stack))

    # Objects as bytes -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def misfits(self, expected: Mapping[str, int]) -> dict[str, str]:
        """What is wrong with objects of which the lengths are given, as far as can be told without reading them."""

    @abc.abstractmethod
    def ranges(self, key: str) -> contextlib.AbstractContextManager[zarr.ReadRange]:
        """Reads ranges of an object. Raises DataError where it ends before."""


class ArrayWriter(Protocol):
    """Writes objects of a stack."""

    def write(self, index: tuple[int, ...], pieces: Pieces) -> Pending:
        """Start writing the object at a place in the grid; the pieces must stay unchanged until the result is there:
        (length, digest) of what was written."""
        ...


class ArrayReader(Protocol):
    """Reads boxes of a stack."""

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        """Start reading boxes, each into an array of its shape; what lies together is read together."""
        ...


@dataclass(frozen=True, slots=True)
class Writer:
    """A save's claim on its data folder."""

    store: Store
    data: str

    handle: int | None = None
    """The file that is locked for as long as the writer lives."""

    def release(self, *, keep: bool) -> None:
        """Drop the claim, and the data too unless it is published."""
        try:
            if keep or may_name(self.store.read(MANIFEST), self.data):
                self.store.remove(f"{self.data}/{WRITER}")
            else:
                self.store.give_up(self.data)
        finally:
            if self.handle is not None:
                os.close(self.handle)


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Through tensorstore's zarr3 driver."""

    array: ts.TensorStore

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        pending: list[Pending] = []
        with ts.Batch() as batch:
            for box, target in wanted:
                view = self.array[tuple(slice(a, b) for a, b in box)][ts.d[:].translate_to[0]]
                pending.append(ts.array(target.view(self.array.dtype.numpy_dtype)).write(view, batch=batch))
        return pending


def begin_write(array: ts.TensorStore, pieces: Pieces) -> Any:
    """Start writing an object through tensorstore's zarr3 driver."""
    view = array[tuple(slice(a, b) for a, b in pieces.box)]
    source = pieces.array().view(array.dtype.numpy_dtype)
    return view.write(source, can_reference_source_data_indefinitely=True)


def open_spec(kvstore: Any, stack: Stack, context: ts.Context) -> ts.TensorStore:
    """A stack as a tensorstore array on a key-value store."""
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": json.loads(zarr.metadata(stack)),
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    with storage_errors(f"cannot open the array {stack.name}", reading=True):
        return ts.open(spec, open=True, assume_metadata=True, context=context).result()


@dataclass(frozen=True, slots=True)
class ArrayFolder:
    """Arrays that another library wrote through tensorstore: each in a folder of its name, or all in one OCDBT
    database."""

    path: str
    """A local folder."""

    ocdbt: bool

    # What is kept is nodes of the database: else each read would start at its root again.
    context: ts.Context = field(
        default_factory=lambda: ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#ocdbt": {"total_bytes_limit": 32 << 20},
            }
        )
    )

    def _spec(self, name: str = "") -> dict[str, Any]:
        if not self.ocdbt:
            return {"driver": "file", "path": f"{self.path}/{name}/" if name else f"{self.path}/"}
        base = {"driver": "file", "path": f"{self.path}/"}
        return {"driver": "ocdbt", "base": base, "path": f"{name}/" if name else "", "cache_pool": "cache_pool#ocdbt"}

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Several small values, None for what is missing. Raises DataError, StorageError."""
        with storage_errors(f"cannot read the metadata of arrays in {self.path}", reading=True):
            folder = ts.KvStore.open(self._spec(), context=self.context).result()
            found = [(key, folder.read(key)) for key in keys]
            results = [(key, one.result()) for key, one in found]
        return [None if result.state == "missing" else bytes(result.value) for _, result in results]

    def array_reader(self, name: str, driver: str, metadata: Any, *, strict: bool) -> TensorReader:
        """Of the array of this name and Zarr metadata. Nothing is read; where not `strict`, a chunk that is missing
        reads as the fill value. Raises DataError where the metadata is malformed."""
        spec = {
            "driver": driver,
            "kvstore": self._spec(name),
            "metadata": metadata,
            "fill_missing_data_reads": not strict,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        try:
            return TensorReader(ts.open(spec, open=True, assume_metadata=True, context=self.context).result())
        except (ValueError, OverflowError) as error:
            raise DataError(f"the Zarr metadata of {name!r} is damaged: {readable(str(error))}") from error


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Uninitialised memory that starts at a multiple of 64 bytes, which JAX on CPU takes over without a copy."""
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(n_bytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + n_bytes].view(dtype).reshape(shape)


# Errors ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def storage_errors(what: str | Callable[[], str], *, reading: bool = False) -> Generator[None]:
    """Turn tensorstore's errors inside the block into ours, told as `what`; so are those of our own readers."""
    try:
        yield
    except (ValueError, NotImplementedError, DataError, StorageError) as error:
        if isinstance(error, InputError):
            raise
        raise storage_error(error, what if isinstance(what, str) else what(), reading=reading) from None


def storage_error(error: Exception, what: str, *, reading: bool = False) -> StorageError | DataError:
    """tensorstore's error as one of ours: by the system's own code where it tells one, else by its message's prefix."""
    if isinstance(error, DataError):
        return DataError(f"{what}: {error}; jaxckpt.verify lists all that is damaged")
    if isinstance(error, StorageError):
        return StorageError(error.errno, f"{what}: {error.strerror}")
    text = readable(str(error))
    status = text.partition(":")[0]
    told = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    code = int(told[1]) if told else _CODES.get(status, errno.EIO)
    if isinstance(error, NotImplementedError) or "ignored by server" in text:  # to write or to list over HTTP; ranges
        return StorageError(errno.ENOTSUP, f"{what}: {text}")
    decoding = "Error decoding" in text  # of an OCDBT database: it tells no status
    damaged = code in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) if told else decoding or status in _DAMAGED
    return DataError(f"{what}: {text}") if reading and damaged else StorageError(code, f"{what}: {text}")


_DAMAGED = ("DATA_LOSS", "NOT_FOUND", "INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION")
_CODES = {
    "RESOURCE_EXHAUSTED": errno.ENOSPC,
    "PERMISSION_DENIED": errno.EACCES,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
}


def readable(text: str) -> str:
    """An error of tensorstore for people: without the server's answer, which may quote keys and signatures, without
    query strings, and without the places in tensorstore's source."""
    code = re.search(r"\[http_response_code='(\d+)'\]", text)
    text = re.sub(r"\s*\[[a-z_-]+='.*", "", text, flags=re.DOTALL)
    text = re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
    return f"{text} (HTTP {code.group(1)})" if code else text
