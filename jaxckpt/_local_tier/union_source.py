"""A checkpoint whose objects are in folders of several processes, from the view of one of these processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier.peer_reads import Availability, FileRequest, Files, arriving, split_request
from jaxckpt._model import zarr
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, extent, slices_within
from jaxckpt._model.pieces import Array
from jaxckpt._model.records import Manifest, StackRecord
from jaxckpt._model.stacks import indexed_objects_of
from jaxckpt._options import Options
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import JoinedWork, MappedWork
from jaxckpt._restore.read_loop import PlannedRead
from jaxckpt._store.storage_errors import clean_error_text
from jaxckpt._store.store import ArrayReader, Store
from jaxckpt.errors import DataError, StorageError


@dataclass(frozen=True, slots=True)
class UnionCheckpoint:
    """A jaxckpt checkpoint in several folders, of which this process sees some."""

    url: str
    """The name of the checkpoint in messages."""

    manifest: Manifest
    digest: str
    """SHA-256 of the stored manifest."""

    files: Files
    folders: Sequence[Store]
    """The folders that this process sees."""

    folder_of_file: Sequence[int]
    """For each file, the index of the folder from which this process reads it; -1 if no visible folder has it."""

    availability: Availability
    max_bytes: int
    """Approximate size of the largest request for data that other processes read."""

    received: dict[FileRequest, Array] = field(default_factory=dict[FileRequest, Array])
    """Data that other processes have sent and this process has not used yet."""

    damaged: dict[str, str] = field(default_factory=dict[str, str])
    """Problems of files that this process has read, by path."""

    def options_to_read(self, options: Options) -> Options:
        """The options for reading it: half of the memory is for data that the processes send to each other."""
        return replace(options, host_bytes=max(1, options.host_bytes // 2), read="each")

    def require_metadata(self, stacks: Sequence[int]) -> None:
        """Check nothing: local steps are read only by jaxckpt, which uses no zarr.json."""

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        """Each save has a data folder of its own."""

    def change_since_open(self) -> str | None:
        return None

    def arrivals(
        self, reads: Iterable[PlannedRead], options: Options, rendezvous: Rendezvous, *, through_rules: bool
    ) -> AbstractContextManager[Iterator[None]]:
        """Each process reads its own folders, and sends the others what they lack: nothing if the checkpoint is read
        through rules, because such a checkpoint was chosen only if each process can read all of it."""
        stacks = self.manifest.stacks
        needed = [self.missing_requests(stacks[step.stack], read.boxes) for step, read in reads if not through_rules]
        return arriving(self, needed, options, rendezvous)

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        return _UnionReader(self, self.manifest.stacks[stack])

    def state_arrivals(
        self, processes: Iterable[int], options: Options, rendezvous: Rendezvous
    ) -> AbstractContextManager[Iterator[None]]:
        """The arrival of the states of these processes."""
        return arriving(self, [self.missing_state_requests(processes)], options, rendezvous)

    def path(self, number: int) -> str:
        """The path from which this process reads a file."""
        return f"{self.folders[self.folder_of_file[number]].url}/{self.files.keys[number]}"

    def missing_requests(self, stack: StackRecord, boxes: Iterable[Box]) -> list[FileRequest]:
        """The parts of these boxes that other processes must read."""
        numbers, array = self.files.numbers[stack.name], stack.stack()
        return [
            request
            for box in boxes
            for index, common, _ in indexed_objects_of(array, box)
            if self.folder_of_file[number := numbers[zarr.index_key(index)]] < 0
            for request in split_request(number, array, common, self.max_bytes)
        ]

    def missing_state_requests(self, processes: Iterable[int]) -> list[FileRequest]:
        """The states of these processes that other processes must read."""
        numbers = (self.files.starts[-1] + process for process in processes)
        return [(number, ((0, self.files.lengths[number]),)) for number in numbers if self.folder_of_file[number] < 0]

    def read_state(self, process: int) -> bytes:
        """The saved state of a process, from this process's folders or from the received data."""
        number = self.files.starts[-1] + process
        length, digest = self.manifest.process_states[process]
        if self.folder_of_file[number] < 0:
            return self.received.pop((number, ((0, length),))).tobytes()
        content = self.folders[self.folder_of_file[number]].read(self.files.keys[number])
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            self.damaged[self.path(number)] = "is missing" if content is None else "is not as it was saved"
            raise DataError(f"{self.path(number)} {self.damaged[self.path(number)]}")
        return content

    def serve(self, targets: Sequence[tuple[FileRequest, Array]]) -> list[Pending[None]]:
        """Start to read the requests of other processes, each into an array of bytes."""
        by_stack: dict[int | None, list[tuple[FileRequest, Array]]] = {}
        for request, target in targets:
            by_stack.setdefault(self.files.stack(request[0]), []).append((request, target))
        begun: list[Pending[None]] = []
        for number, stack_targets in by_stack.items():
            if number is None:
                for (file, _), target in stack_targets:
                    target[...] = np.frombuffer(self.read_state(file - self.files.starts[-1]), np.uint8)
                continue
            dtype = DTYPES[self.files.stacks[number].dtype]
            reader = _UnionReader(self, self.files.stacks[number])
            begun += reader.read([(box, data.view(dtype).reshape(extent(box))) for (_, box), data in stack_targets])
        return begun

    def wait_and_record(self, number: int, pending: Pending[None]) -> None:
        """Wait for a read of a file, and note its error in `damaged`."""
        with self.recording_damage(number):
            pending.result()

    @contextlib.contextmanager
    def recording_damage(self, number: int) -> Generator[None]:
        """Note in `damaged` why a read of a file in the block failed, and raise the error."""
        try:
            yield
        except (DataError, StorageError, ValueError, NotImplementedError) as error:  # the last two are tensorstore's
            self.damaged[self.path(number)] = clean_error_text(str(error))
            raise


@dataclass(frozen=True, slots=True)
class _UnionReader(ArrayReader):
    """Reads boxes of a stack, from the folders that this process sees, and otherwise from the received data."""

    source: UnionCheckpoint
    record: StackRecord
    readers: dict[int, ArrayReader] = field(default_factory=dict[int, ArrayReader])
    """Readers by the index of the folder."""

    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        source, stack = self.source, self.record.stack()
        by_object: dict[int, list[tuple[Box, Array, int]]] = {}
        pending_by_box: list[list[Pending[None]]] = [[] for _ in targets]
        numbers = source.files.numbers[self.record.name]
        for at, (box, target) in enumerate(targets):
            for index, common, _ in indexed_objects_of(stack, box):
                number = numbers[zarr.index_key(index)]
                into = target[slices_within(common, box)]
                if source.folder_of_file[number] >= 0:
                    by_object.setdefault(number, []).append((common, into, at))
                    continue
                for request in split_request(number, stack, common, source.max_bytes):
                    data = source.received.pop(request).view(target.dtype).reshape(extent(request[1]))
                    into[slices_within(request[1], common)] = data
        for number, object_targets in by_object.items():
            with source.recording_damage(number):
                begun = self._reader(source.folder_of_file[number]).read(
                    [(common, into) for common, into, _ in object_targets]
                )
            for (_, _, at), pending in zip(object_targets, begun, strict=True):
                pending_by_box[at].append(MappedWork(pending, functools.partial(source.wait_and_record, number)))
        return [JoinedWork(pending) for pending in pending_by_box]

    def _reader(self, folder: int) -> ArrayReader:
        if folder not in self.readers:
            self.readers[folder] = self.source.folders[folder].array_reader(
                self.source.manifest.data_folder, self.record.stack(), self.record.objects
            )
        return self.readers[folder]
