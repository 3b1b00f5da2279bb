"""A checkpoint whose objects are in folders of several processes, from the view of one of these processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, extent, within
from jaxckpt._format.pieces import Array
from jaxckpt._format.records import Manifest, StackRecord
from jaxckpt._format.stacks import indexed_objects_of
from jaxckpt._restore.surviving import Files, Held, Request, requests
from jaxckpt._runtime.errors import DataError, StorageError
from jaxckpt._storage.errors import readable
from jaxckpt._storage.objects import ArrayReader, Objects, Pending
from jaxckpt._storage.workers import All, Done, Then


class DamagedError(Exception):
    """A process could not read a file of its folders, but others may have a copy. Every process raises this."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A jaxckpt checkpoint in several folders, of which this process sees some."""

    url: str
    """The name of the checkpoint in messages."""

    manifest: Manifest
    digest: str
    """SHA-256 of the stored manifest."""

    files: Files
    folders: Sequence[Objects]
    """The folders that this process sees."""

    own: Sequence[int]
    """For each file, the index of the folder from which this process reads it; -1 if no visible folder has it."""

    held: Held
    max_bytes: int
    """Approximate size of the largest request for data that other processes read."""

    arrived: dict[Request, Array] = field(default_factory=dict[Request, Array])
    """Data that other processes have sent and this process has not used yet."""

    damaged: dict[str, str] = field(default_factory=dict[str, str])
    """Problems of files that this process has read, by path."""

    def require_metadata(self, stacks: Sequence[int]) -> None:
        """Check nothing: local steps are read only by jaxckpt, which uses no zarr.json."""

    def fate(self) -> str | None:
        return None

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        return _PooledReader(self, self.manifest.stacks[stack])

    def path(self, number: int) -> str:
        """The path from which this process reads a file."""
        return f"{self.folders[self.own[number]].url}/{self.files.keys[number]}"

    def lacking(self, stack: StackRecord, boxes: Iterable[Box]) -> list[Request]:
        """The parts of these boxes that other processes must read."""
        numbers, array = self.files.numbers[stack.name], stack.stack()
        return [
            request
            for box in boxes
            for index, part, _ in indexed_objects_of(array, box)
            if self.own[number := numbers["/".join(map(str, index))]] < 0
            for request in requests(number, array, part, self.max_bytes)
        ]

    def lacking_states(self, processes: Iterable[int]) -> list[Request]:
        """The states of these processes that other processes must read."""
        numbers = (self.files.starts[-1] + process for process in processes)
        return [(number, ((0, self.files.lengths[number]),)) for number in numbers if self.own[number] < 0]

    def state(self, process: int) -> bytes:
        """The saved state of a process, from this process's folders or from the received data."""
        number = self.files.starts[-1] + process
        length, digest = self.manifest.process_states[process]
        if self.own[number] < 0:
            return self.arrived.pop((number, ((0, length),))).tobytes()
        content = self.folders[self.own[number]].read(self.files.keys[number])
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            self.damaged[self.path(number)] = "is missing" if content is None else "is not as it was saved"
            raise DataError(f"{self.path(number)} {self.damaged[self.path(number)]}")
        return content

    def serve(self, wanted: Sequence[tuple[Request, Array]]) -> list[Pending]:
        """Start to read the requests of other processes, each into an array of bytes."""
        by_stack: dict[int | None, list[tuple[Request, Array]]] = {}
        for request, target in wanted:
            by_stack.setdefault(self.files.stack(request[0]), []).append((request, target))
        begun: list[Pending] = []
        for number, some in by_stack.items():
            if number is None:
                for (file, _), target in some:
                    target[...] = np.frombuffer(self.state(file - self.files.starts[-1]), np.uint8)
                continue
            dtype = DTYPES[self.files.stacks[number].dtype]
            reader = _PooledReader(self, self.files.stacks[number])
            begun += reader.read([(box, data.view(dtype).reshape(extent(box))) for (_, box), data in some])
        return begun

    def noted(self, number: int, pending: Pending) -> None:
        """Wait for a read of a file, and note its error in `damaged`."""
        with self.noting(number):
            pending.result()

    @contextlib.contextmanager
    def noting(self, number: int) -> Generator[None]:
        """Note in `damaged` why a read of a file in the block failed, and raise the error."""
        try:
            yield
        except (DataError, StorageError, ValueError, NotImplementedError) as error:  # the last two are tensorstore's
            self.damaged[self.path(number)] = readable(str(error))
            raise


@dataclass(frozen=True, slots=True)
class _PooledReader(ArrayReader):
    """Reads boxes of a stack, from the folders that this process sees, and otherwise from the received data."""

    source: Pooled
    record: StackRecord
    readers: dict[int, ArrayReader] = field(default_factory=dict[int, ArrayReader])
    """Readers by the index of the folder."""

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        source, stack = self.source, self.record.stack()
        by_object: dict[int, list[tuple[Box, Array, int]]] = {}
        works: list[list[Pending]] = [[] for _ in wanted]
        numbers = source.files.numbers[self.record.name]
        for at, (box, target) in enumerate(wanted):
            for index, part, _ in indexed_objects_of(stack, box):
                number = numbers["/".join(map(str, index))]
                into = target[within(part, box)]
                if source.own[number] >= 0:
                    by_object.setdefault(number, []).append((part, into, at))
                    continue
                for request in requests(number, stack, part, source.max_bytes):
                    data = source.arrived.pop(request).view(target.dtype).reshape(extent(request[1]))
                    into[within(request[1], part)] = data
        for number, some in by_object.items():
            with source.noting(number):
                begun = self._reader(source.own[number]).read([(part, into) for part, into, _ in some])
            for (_, _, at), pending in zip(some, begun, strict=True):
                works[at].append(Then(pending, functools.partial(source.noted, number)))
        return [All(some) if some else Done(None) for some in works]

    def _reader(self, folder: int) -> ArrayReader:
        if folder not in self.readers:
            self.readers[folder] = self.source.folders[folder].array_reader(
                self.source.manifest.data, self.record.stack(), self.record.objects
            )
        return self.readers[folder]
