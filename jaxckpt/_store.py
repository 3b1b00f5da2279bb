"""Storage: the only module that imports tensorstore.

A `Store` is the folder of one checkpoint, on a file system or an object store. Arrays go through tensorstore's zarr3
driver; the few small control files of a local checkpoint go through the file system itself, where the order of
writing, fsync and rename can be stated exactly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import re
import shutil
import socket
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import google_crc32c
import numpy as np
import tensorstore as ts

from jaxckpt._errors import CheckpointExistsError, DataError, InputError, StorageError
from jaxckpt._grid import Box
from jaxckpt._plan import Stack
from jaxckpt._tree import DTYPES, stored_dtype

MANIFEST = "manifest.json"
WRITER = "writer.json"
_MANIFEST_LIMIT_BYTES = 1 << 30

Array = np.ndarray[Any, np.dtype[Any]]
Pending = Any
"""tensorstore's future: `.result()` waits and raises, `.done()` asks."""

# One parent context, so that memory:// paths name the same memory in every call.
_ROOT_CONTEXT = ts.Context({"cache_pool": {"total_bytes_limit": 0}})


@cache
def _context(*, sync: bool, mapped: bool) -> ts.Context:
    # No two processes write one object, so no lock is needed around it.
    settings: dict[str, Any] = {"file_io_sync": sync, "file_io_locking": {"mode": "none"}}
    if mapped:
        settings["file_io_mode"] = {"mode": "memmap"}
    return ts.Context(settings, parent=_ROOT_CONTEXT)


@dataclass(frozen=True, slots=True)
class Store:
    """The folder of one checkpoint."""

    url: str
    """The path as the user gave it, without a trailing slash."""

    folder: str | None
    """Absolute path where the checkpoint is on a file system, else None."""

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Store:
        """The store at a local path, or at a URL that tensorstore's kvstore takes."""
        text = os.fspath(path)
        if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"path must be a non-empty str or PathLike, found {path!r}")
        scheme, separator, rest = text.partition("://")
        if not separator:
            return cls(text.rstrip("/") or "/", os.path.abspath(os.path.expanduser(text)))
        if scheme == "file":
            return cls(text.rstrip("/"), os.path.abspath("/" + rest.lstrip("/")))
        return cls(text.rstrip("/"), None)

    # Small files -----------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        """The whole of a small file; None where it does not exist."""
        if self.folder is None:
            with self._remote("read") as kvstore:
                found = kvstore.read(key).result()
            return found.value if found.state == "value" else None
        try:
            with open(os.path.join(self.folder, key), "rb") as file:
                if os.fstat(file.fileno()).st_size > _MANIFEST_LIMIT_BYTES:
                    raise DataError(f"{self.url}/{key} is over {_MANIFEST_LIMIT_BYTES} bytes: no such file of ours is")
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._refused("read", key, error) from error

    def names(self) -> list[str]:
        """Names directly in the folder; empty where it does not exist."""
        if self.folder is None:
            with self._remote("list") as kvstore:
                return sorted({key.decode().split("/")[0] for key in kvstore.list().result()})
        try:
            return sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._refused("list", "", error) from error

    def child(self, name: str) -> Store:
        """The store of a folder directly below."""
        return Store(f"{self.url}/{name}", None if self.folder is None else os.path.join(self.folder, name))

    def published(self) -> list[str]:
        """Names of the folders directly below that hold a manifest, in one listing."""
        if self.folder is None:
            with self._remote("list") as kvstore:
                keys = [key.decode().split("/") for key in kvstore.list().result()]
            return sorted(parts[0] for parts in keys if parts[1:] == [MANIFEST])
        names = self.names()
        return [name for name in names if os.path.exists(os.path.join(self.folder, name, MANIFEST))]

    def is_file(self) -> bool:
        """Whether a plain file stands where the folder would be."""
        return self.folder is not None and os.path.isfile(self.folder)

    def sizes(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> dict[str, int | None]:
        """Length of each object of a stack by its key; None where it is missing. Local stores only."""
        found: dict[str, int | None] = {}
        for index in indices:
            key = object_key(stack, index)
            try:
                info = os.stat(os.path.join(self.folder or "", data, key), follow_symlinks=False)
                found[key] = info.st_size
            except (FileNotFoundError, NotADirectoryError):
                found[key] = None
        return found

    # A save's own folder ----------------------------------------------------------------------------------

    def begin(self, save_id: str) -> Writer:
        """Make `data-<save id>` with a note of who writes it, locked for as long as the writer lives. Process 0."""
        data = f"data-{save_id}"
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "save_id": save_id}).encode()
        if self.folder is None:
            with self._remote("write") as kvstore:
                kvstore.write(f"{data}/{WRITER}", note).result()
            return Writer(self, data, None)
        path = os.path.join(self.folder, data)
        handle = None
        tries = 0
        while True:
            tries += 1
            try:
                os.makedirs(self.folder, exist_ok=True)
                with self._locked():
                    os.mkdir(path)
                    handle = os.open(os.path.join(path, WRITER), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
                    with contextlib.suppress(OSError):  # a file system without locks: then nothing is ever swept on it
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.write(handle, note)
                return Writer(self, data, handle)
            except OSError as error:
                if handle is not None:
                    os.close(handle)
                shutil.rmtree(path, ignore_errors=True)
                # Another process's `clear` may have taken the folder, still empty, for what a killed save left.
                taken = handle is None and isinstance(error, (FileNotFoundError, FileExistsError))
                if not taken or tries == 100:
                    raise self._refused("create", data, error) from error

    @contextlib.contextmanager
    def _locked(self) -> Generator[int]:
        """The checkpoint's own folder, open and locked: beginnings, sweeps and publications take turns."""
        handle = os.open(self.folder or "", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # as above
                fcntl.flock(handle, fcntl.LOCK_EX)  # released when closed, and when this process dies
            yield handle
        finally:
            os.close(handle)

    def sweep(self, current: str | None) -> None:
        """Delete `data-*` folders of saves that died. Process 0, before a save.

        `current` is the data folder that the manifest named when this save began. A folder is left alone while its
        writer may live: while its lock is held, or where it was written on another host, whose locks may not show here.
        """
        if self.folder is None:
            return  # an object store has no locks; unreferenced data there is swept by age with its lifecycle rules
        try:
            with self._locked():
                for name in self.names():
                    path = os.path.join(self.folder, name)
                    # Named by the manifest is asked last: it may have been published since we listed it.
                    stale = name.startswith("data-") and name != current and _abandoned(path)
                    if stale and not self.names_data(name):
                        shutil.rmtree(path, ignore_errors=True)
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return  # not there, or just taken away
        except OSError as error:
            raise self._refused("sweep", "", error) from error

    def names_data(self, data: str) -> bool:
        """Whether the manifest that is published now names a data folder."""
        manifest = self.read(MANIFEST)
        return manifest is not None and f'"save_id":"{data.rpartition("data-")[2]}"'.encode() in manifest

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        """Put `manifest`, of the data folder `data`, in the place of `previous`, atomically. Process 0."""
        if self.folder is None:
            self._publish_remote(manifest, previous)
            return
        path = os.path.join(self.folder, MANIFEST)
        try:
            with self._locked() as handle:
                if self.read(MANIFEST) != previous:
                    raise self._overtaken()
                self._replace(path, data, manifest, sync=sync)
                try:
                    if sync:
                        os.fsync(handle)
                except OSError:
                    # In place, but perhaps not for ever: a save that raises must not have published.
                    with contextlib.suppress(OSError):
                        if previous is None:
                            os.unlink(path)
                        else:
                            self._replace(path, data, previous, sync=False)
                    raise
        except CheckpointExistsError:
            raise
        except OSError as error:
            raise self._refused("publish", MANIFEST, error) from error

    def _replace(self, path: str, data: str, content: bytes, *, sync: bool) -> None:
        """Write a file beside the data, then rename it into place: what a crash leaves goes with the data."""
        fresh = os.path.join(self.folder or "", data, MANIFEST)
        with open(fresh, "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.rename(fresh, path)

    def _publish_remote(self, data: bytes, previous: bytes | None) -> None:
        with self._remote("publish") as kvstore:
            found = kvstore.read(MANIFEST).result()
            if (found.value if found.state == "value" else None) != previous:
                raise self._overtaken()
            stamp = kvstore.write(MANIFEST, data, if_equal=found.stamp.generation).result()
        # An empty generation means that the condition failed, unless it was our own write whose answer was lost.
        if not stamp.generation and self.read(MANIFEST) != data:
            raise self._overtaken()

    def _overtaken(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"another save published a checkpoint at {self.url} while this one was writing; this one was given up"
        )

    def unpublish(self, *, sync: bool) -> None:
        """Take the manifest away: from here on there is no checkpoint. Process 0."""
        if self.folder is None:
            self.remove(MANIFEST)
            return
        try:
            with self._locked() as handle:
                os.unlink(os.path.join(self.folder, MANIFEST))
                if sync:  # else a power loss could bring it back, without its data
                    os.fsync(handle)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused("delete", MANIFEST, error) from error

    def clear(self) -> None:
        """Delete what is left where there is no checkpoint, but for what a live writer has. Process 0."""
        if self.folder is None:
            for name in self.names():
                self.delete(name)
            return
        self.sweep(None)
        with contextlib.suppress(OSError):  # not empty: somebody is writing in it
            os.rmdir(self.folder)

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Delete the folders of stacks that a published manifest names no more, and a dead writer's note. Process 0."""
        if self.folder is None:
            return
        if _abandoned(os.path.join(self.folder, data)):
            self.remove(f"{data}/{WRITER}")
        named = {stack.name for stack in stacks}
        for name in self.child(data).names():
            if name not in named and os.path.isdir(os.path.join(self.folder, data, name)):
                self.child(data).delete(name)

    def delete(self, name: str) -> None:
        """Delete a folder directly below, with all it holds."""
        if self.folder is None:
            with self._remote("delete") as kvstore:
                kvstore.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()
        else:
            shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def put(self, data: str, name: str, content: bytes, *, sync: bool) -> None:
        """Write a small file into a data folder. Its process alone; the folder itself is synced with all else."""
        if self.folder is None:
            with self._remote("write") as kvstore:
                kvstore.write(f"{data}/{name}", content).result()
            return
        try:
            with open(os.path.join(self.folder, data, name), "wb") as file:
                file.write(content)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._refused("write", f"{data}/{name}", error) from error

    def remove(self, key: str) -> None:
        """Delete a small file; nothing happens where it is not there."""
        if self.folder is None:
            with self._remote("delete") as kvstore:
                kvstore.write(key, None).result()
        else:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.folder, key))

    # Arrays -----------------------------------------------------------------------------------------------

    def create_array(self, data: str, stack: Stack) -> bytes:
        """Write the `zarr.json` of a stack and return it. Process 0."""
        text = zarr_json(stack)
        key = f"{data}/{stack.name}/zarr.json"
        if self.folder is None:
            with self._remote("write") as kvstore:
                kvstore.write(key, text).result()
            return text
        path = os.path.join(self.folder, key)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(text)
        except OSError as error:
            raise self._refused("write", key, error) from error
        return text

    def open_array(self, data: str, stack: Stack, *, sync: bool = False, mapped: bool = False) -> ts.TensorStore:
        """The stack as a tensorstore array. Nothing is read: its metadata is built from the plan or the manifest."""
        spec = {
            "driver": "zarr3",
            "kvstore": self._spec(f"{data}/{stack.name}/"),
            "metadata": json.loads(zarr_json(stack)),
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        context = _context(sync=sync, mapped=mapped and self.folder is not None)
        with storage_errors(f"cannot open {self.url}/{data}/{stack.name}"):
            return ts.open(spec, open=True, assume_metadata=True, context=context).result()

    def write(self, array: ts.TensorStore, box: Box, source: Array) -> Pending:
        """Start writing `source` at `box`; it must stay unchanged until the result is there."""
        view = array[tuple(slice(a, b) for a, b in box)]
        return view.write(source.view(array.dtype.numpy_dtype), can_reference_source_data_indefinitely=True)

    def read_into(self, array: ts.TensorStore, box: Box, target: Array, batch: Any) -> Pending:
        """Start reading `box` into `target`, an array of its shape."""
        view = array[tuple(slice(a, b) for a, b in box)][ts.d[:].translate_to[0]]
        return ts.array(target.view(array.dtype.numpy_dtype)).write(view, batch=batch)

    def batch(self) -> Any:
        """Reads that are submitted together, so that tensorstore can merge their requests."""
        return ts.Batch()

    def digest(self, data: str, stack: Stack, index: tuple[int, ...]) -> tuple[int, str]:
        """(length, digest) of an object just written, or about to be trusted.

        The digest is the crc32c of the checksums that end the object's chunks, in the order of its index: it tells
        one object's content from another's at the cost of reading 4 bytes a chunk.
        """
        key = f"{data}/{object_key(stack, index)}"
        if self.folder is None:
            with self._remote("read") as kvstore:
                found = kvstore.read(key).result()
            if found.state != "value":
                raise DataError(f"{self.url}/{key} is missing")
            return len(found.value), _digest(np.frombuffer(found.value, np.uint8), stack)
        try:
            with open(os.path.join(self.folder, key), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < stack.index_bytes:
                    raise DataError(f"{self.url}/{key} is {size} bytes long, shorter than its index")
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                    view = np.frombuffer(mapped, np.uint8)
                    try:
                        return size, _digest(view, stack)
                    finally:
                        del view
        except FileNotFoundError as error:
            raise DataError(f"{self.url}/{key} is missing") from error
        except OSError as error:
            raise self._refused("read", key, error) from error

    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        """fsync the folders above objects that this process wrote, but the lowest: tensorstore fsyncs that one."""
        if self.folder is None:
            return
        top = os.path.join(self.folder, data, stack.name)
        folders = {top}
        for index in indices:
            folder = os.path.dirname(os.path.dirname(os.path.join(self.folder, data, object_key(stack, index))))
            while len(folder) > len(top):
                folders.add(folder)
                folder = os.path.dirname(folder)
        for folder in sorted(folders):
            self._fsync(folder)

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """fsync each zarr.json, the data folder, and every folder above it, any of which may be new. Process 0."""
        if self.folder is None:
            return
        top = os.path.join(self.folder, data)
        for stack in stacks:
            self._fsync(os.path.join(top, stack.name, "zarr.json"))
            self._fsync(os.path.join(top, stack.name))
        self._fsync(top)
        self._fsync(self.folder)
        folder = os.path.dirname(self.folder)
        # Up to the first that we may not even open: it was there before us.
        while os.access(folder, os.R_OK):
            try:
                self._fsync(folder)
            except StorageError as error:
                if error.errno not in (
                    errno.EINVAL,
                    errno.ENOSYS,
                    errno.ENOTSUP,
                ):  # a file system that syncs no folders
                    raise
            if folder == os.path.dirname(folder):
                return
            folder = os.path.dirname(folder)

    def _fsync(self, path: str) -> None:
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, f"cannot sync {path}: {error.strerror or error}") from error

    # Inside -----------------------------------------------------------------------------------------------

    def _spec(self, below: str) -> str | dict[str, str]:
        if self.folder is None:
            return f"{self.url}/{below}"
        return {"driver": "file", "path": f"{self.folder}/{below}"}

    @contextlib.contextmanager
    def _remote(self, verb: str) -> Generator[ts.KvStore]:
        """The object store's keys below this checkpoint."""
        with storage_errors(f"cannot {verb} {self.url}"):
            yield ts.KvStore.open(self._spec(""), context=_context(sync=True, mapped=False)).result()

    def _refused(self, verb: str, key: str, error: OSError) -> StorageError:
        return StorageError(error.errno or errno.EIO, f"cannot {verb} {self.url}/{key}: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class Writer:
    """A save's claim on its data folder."""

    store: Store
    data: str
    handle: int | None

    def release(self, *, keep: bool) -> None:
        """Drop the claim, and the data too unless it is published."""
        if not keep and not self.store.names_data(self.data):
            self.store.delete(self.data)
        else:
            self.store.remove(f"{self.data}/{WRITER}")
        if self.handle is not None:
            os.close(self.handle)


def object_key(stack: Stack, index: tuple[int, ...]) -> str:
    return f"{stack.name}/c/{'/'.join(map(str, index))}"


def zarr_json(stack: Stack) -> bytes:
    """The stack's Zarr v3 metadata: a function of the stack alone, so readers need not trust the stored copy."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    data_type = stored_dtype(stack.dtype)
    plain = {"name": "bytes"} if DTYPES[stack.dtype].itemsize == 1 else little
    codecs: list[dict[str, Any]] = [plain]
    if stack.compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    codecs.append({"name": "crc32c"})
    complex_dtype = data_type.startswith("complex")
    fill: Any = [0.0, 0.0] if complex_dtype else 0.0 if data_type.startswith("float") else 0
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": stack.array_shape,
            "data_type": data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": stack.object}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if data_type == "bool" else fill,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": stack.chunk,
                        "codecs": codecs,
                        "index_codecs": [little, {"name": "crc32c"}],
                        "index_location": "end",
                    },
                }
            ],
            "attributes": {"jaxckpt": {"dtype": stack.dtype}},
        }
    ).encode()


def _digest(content: np.ndarray[Any, np.dtype[np.uint8]], stack: Stack) -> str:
    """Digest of an object's bytes; "" where its index points outside of it."""
    data_bytes = len(content) - stack.index_bytes
    index = content[data_bytes : data_bytes + 16 * stack.chunks_per_object].view("<u8").reshape(-1, 2)
    present = index[index[:, 0] != 0xFFFFFFFFFFFFFFFF]
    starts, lengths = present[:, 0], present[:, 1]
    if len(present) and (
        lengths.min() < 4
        or lengths.max() > data_bytes
        or starts.max() > data_bytes - lengths.min()
        or (starts + lengths).max() > data_bytes
    ):
        return ""
    ends = (starts + lengths).astype(np.int64)
    sums = content[ends[:, None] + np.arange(-4, 0)] if len(ends) else np.empty((0, 4), np.uint8)
    return f"{google_crc32c.value(sums.tobytes()):08x}"


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Uninitialised memory that starts at a multiple of 64 bytes, which JAX on CPU takes over without a copy."""
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(n_bytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + n_bytes].view(dtype).reshape(shape)


def storage_error(error: Exception, what: str) -> StorageError | DataError:
    """tensorstore's error as one of ours: by the system's own code where it tells one, else by its message's prefix."""
    text = str(error)
    status = text.partition(":")[0]
    told = re.search(r"\[os_error_code='(\d+)'\]", text)
    code = int(told[1]) if told else _CODES.get(status, errno.EIO)
    damaged = code in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) if told else status in _DAMAGED
    return DataError(f"{what}: {text}") if damaged else StorageError(code, f"{what}: {text}")


_DAMAGED = ("DATA_LOSS", "NOT_FOUND", "INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION")
_CODES = {
    "RESOURCE_EXHAUSTED": errno.ENOSPC,
    "PERMISSION_DENIED": errno.EACCES,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
}


def _abandoned(path: str) -> bool:
    """Whether the writer of a data folder is surely gone."""
    try:
        handle = os.open(os.path.join(path, WRITER), os.O_RDWR)  # NFS locks only what is open for writing
    except FileNotFoundError:
        return True  # once published, and replaced since; or its writer died before it could say so
    except OSError:
        return False
    try:
        note = os.read(handle, 4096)
        if note and json.loads(note).get("host") != socket.gethostname():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError):
        return False
    finally:
        os.close(handle)
    return True


@contextlib.contextmanager
def storage_errors(what: str | Callable[[], str]) -> Generator[None]:
    """Turn tensorstore's errors inside the block into ours, told as `what`."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise storage_error(error, what if isinstance(what, str) else what()) from error
