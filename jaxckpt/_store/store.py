"""The store of one path: its small files, objects and folders, and how data there becomes a checkpoint.

There are two: `Folder` on file systems, and `Bucket` on object stores.

They choose the engine of a stack, and nothing else depends on which one it is: `files` moves uncompressed chunks on
file systems, with system calls of its own; `tensors` moves the others on file systems, and `fetching` all on object
stores, with tensorstore.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

from jaxckpt._model.grid import Box
from jaxckpt._model.object_index import ReadRange
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt.errors import StorageError


class ObjectRecord(NamedTuple):
    """What a manifest records of an object."""

    length: int
    digest: str
    content: str = ""
    """The digest of its content; empty if not computed."""


class ArrayWriter(Protocol):
    """Writes objects of a stack."""

    memory_factor: ClassVar[int]
    """Host memory that it takes while it writes an object, as a multiple of the object's bytes."""

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        """Start to write the object at a grid index; with `content`, also compute the digest of its content. Until the
        result arrives, the pieces must not change."""
        ...


class ArrayReader(abc.ABC):
    """Reads boxes of a stack."""

    __slots__ = ()

    shares_chunks: ClassVar[bool] = False
    """Whether a chunk that consecutive boxes of one call need is read only once."""

    serves_any_plan: ClassVar[bool] = False
    """Whether it reads any boxes as well as those that it was created for, so that it can be kept."""

    @abc.abstractmethod
    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        """Start to read boxes, each into an array of its shape. Neighboring boxes are read together."""
        ...

    def buffered_bytes(self, boxes: Sequence[Box]) -> int:
        """Bytes of memory, in addition to the arrays, that a read of these boxes needs until all results arrive."""
        return 0


# The store ------------------------------------------------------------------------------------------------


MAX_FILE_BYTES = 1 << 30
"""The largest file that `Store.read` reads."""


class Store(Protocol):
    """Everything below one path. Keys of files and names of folders are relative to it."""

    @property
    def url(self) -> str:
        """The path as the user gave it, without a trailing slash."""
        ...

    # Small files ------------------------------------------------------------------------------------------

    def read(self, key: str, count: int | None = None) -> bytes | None:
        """The content of a small file, or its first `count` bytes, fewer only if it has no more; None if it does not
        exist."""

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        """The contents of several small files; None for those that do not exist."""
        ...

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        """Write a file into an existing folder. With `sync`, its content is durable; the folder is synced later."""

    def replace(self, key: str, content: bytes, *, sync: bool = False) -> None:
        """Write a small file such that a reader sees the old content or the new, and a hard link keeps the old.

        A killed program may leave a file whose name begins with `key`. With `sync`, as `put`."""

    def remove(self, key: str) -> None:
        """Delete a small file or a symbolic link, if it exists."""

    # Objects ----------------------------------------------------------------------------------------------

    can_link: bool
    """Whether an object of another checkpoint can be linked into this one without a copy."""

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> ArrayWriter:
        """A writer for the objects of a stack. With `sync`, an object is durable when it counts as written."""
        ...

    def array_reader(
        self, data: str, stack: Stack, stored: Mapping[str, tuple[int, str]], plan: Iterable[Sequence[Box]] = ()
    ) -> ArrayReader:
        """A reader for a stack whose objects have these lengths and digests, by grid index.

        `plan` has the boxes of each future read. Reads nothing: the array's metadata is built from the manifest.
        """
        ...

    def link(self, source: Store, old: str, new: str, length: int, *, sync: bool) -> None:
        """Link the object of `length` bytes at the key `old` of `source` to the key `new` here. With `sync`, its data
        is made durable first. Raises StorageError if that is impossible: ENOENT if there is no such object."""
        ...

    def check_lengths(self, lengths: Mapping[str, int]) -> dict[str, str]:
        """The problems of objects of these lengths that can be found without reading them completely."""
        ...

    def range_reader(self, key: str) -> contextlib.AbstractContextManager[ReadRange]:
        """A function that reads ranges of an object. It raises DataError if the object is too short."""
        ...

    # Folders ----------------------------------------------------------------------------------------------

    def absolute(self) -> Self:
        """The same folder with an absolute path, which a later change of the working directory does not affect."""
        ...

    def with_url(self, url: str) -> Self:
        """The same folder, by another path in messages."""
        ...

    def child(self, name: str) -> Self:
        """The folder of this name directly below, which need not exist."""
        ...

    def create_child(self, name: str) -> Self:
        """The folder of this name below. Creates it, and the folders above it, if they do not exist."""
        ...

    def parent_and_name(self) -> tuple[Self, str] | None:
        """The folder above, and the name of this one in it; None at the root."""

    def is_file(self) -> bool:
        """Whether the path is a plain file instead of a folder."""
        ...

    def names(self) -> list[str]:
        """Names directly in it; empty if it does not exist."""
        ...

    def link_target(self) -> str | None:
        """The path that this folder leads to if it is a symbolic link; None otherwise."""

    def is_empty_folder(self, name: str) -> bool:
        """Whether a name directly below is a folder in which there are no files, at any depth."""
        ...

    def folders(
        self, predicate: Callable[[str], bool] = lambda name: True, known: Container[str] = ()
    ) -> Mapping[str, bool | StorageError]:
        """Whether each folder directly below that `predicate` accepts holds a checkpoint, or why that is unknown.

        Those that are known to hold one are listed, but not looked at."""
        ...

    def names_below(self, predicate: Callable[[str], bool]) -> Mapping[str, list[str]]:
        """The names in each folder directly below that `predicate` accepts; none in one that may not be listed."""
        ...

    def mark(self, name: str) -> None:
        """Note that a folder directly below may hold a checkpoint, on stores where only listing all keys shows it."""

    def unmark(self, name: str) -> None:
        """Remove the note of `mark`."""

    def delete(self, name: str) -> None:
        """Delete a folder below with everything in it."""

    can_rename: bool
    """Whether a folder can be renamed."""

    def rename(self, name: str, to: str) -> None:
        """Rename a folder or a file below atomically. Does nothing if it does not exist."""

    # Publication ------------------------------------------------------------------------------------------
    #
    # At every moment the path has the old checkpoint, the new one, or none. Process 0 calls these methods; in a save
    # that is spread over folders, every process does, for its own folder. Every process calls `sync_folders`.

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """A block in which no other process claims, sweeps, publishes or deletes here, on stores with locks."""
        ...

    def begin_save(self, save_id: str, previous: bytes | None) -> tuple[int | None, bool]:
        """Create `data-<save id>` with a note of its writer, for a save that will replace the manifest `previous`.

        Returns the open note, which is locked while the writer is alive, if the store has locks; and whether the
        folder of the checkpoint did not exist before."""
        ...

    def unlock(self, handle: int) -> None:
        """Close the locked file of a writer. Errors are ignored: what the save has written was checked before."""

    def sync_folders(self, data: str, keys: Iterable[str]) -> None:
        """Make the folders above the objects of this process durable, which have these keys below the data folder."""

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Make each zarr.json, the data folder, and those folders above it durable that may be new."""

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        """Atomically replace the manifest `previous` by `manifest`, which describes the data folder `data`. Before
        that, write the second copy of `manifest`. The writer of the data calls this."""

    def republish(self, data: str, manifest: bytes, previous: bytes, *, sync: bool) -> None:
        """The same for data that is published and has no writer, to describe fewer leaves of it. A second copy that was
        removed, because the checkpoint is being deleted, is not created again."""

    def publish_copy(self, data: str, copy: bytes, damaged: bytes | None, *, sync: bool) -> None:
        """Atomically publish the second copy of a manifest in place of a manifest that was lost or `damaged`."""

    def unpublish(self, *, sync: bool) -> None:
        """Delete the manifest, after its second copy. After that, the path has no checkpoint."""

    def published_data(self) -> list[str]:
        """The data folders that have a second copy of a manifest, and no writer."""
        ...

    def discard(self, data: str) -> None:
        """Delete the data of a failed save, unless that save may still be published."""

    def sweep(self, current: str | None, *, evict: bool = False) -> bool:
        """Delete the data of saves that can no longer publish, except the folder in use, `current`. Returns whether
        data of saves that may still publish is left. `evict` as in `clear`."""
        ...

    def clear(self, *, evict: bool = True) -> None:
        """Delete the remains of saves if the path has no checkpoint. If a running save cannot be distinguished from a
        dead one, the data of both is deleted with `evict`, so that the running save fails; without `evict`, both stay.
        """

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Delete the folders of stacks that a published manifest no longer names."""


# Running writes -------------------------------------------------------------------------------------------


class RunningWrite(Protocol):
    """A running save."""

    owner: str
    """The absolute path or URL of a run's directory, or of a checkpoint."""

    def settle(self) -> None:
        """Wait until it is published or has failed. Its error stays its owner's."""
        ...


_finders: list[Callable[[], Iterable[RunningWrite]]] = []


def register_running_writes(find: Callable[[], Iterable[RunningWrite]]) -> None:
    """Register a function that returns the running writes. `_save.running_saves` does, when it is imported."""
    _finders.append(find)


def await_writes(store: Store) -> None:
    """Wait until what this process is writing to a path, to a run that contains it, or below it is published or has
    failed."""
    url = store.absolute().url
    for find in _finders:
        for write in find():
            is_inside = url == write.owner or url.startswith((f"{write.owner}/", f"{write.owner}@"))
            if is_inside or write.owner.startswith(f"{url}/"):
                write.settle()
