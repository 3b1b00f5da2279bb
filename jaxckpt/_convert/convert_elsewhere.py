"""Conversions whose data moves in the workers of an executor: each reads from the source, and writes objects or files.

    jaxckpt:      process 0 claims the path ─▶ units: objects ─▶ their records ─▶ process 0 publishes the manifest
    safetensors:  a draft of the folder     ─▶ units: files   ─▶ the index    ─▶ the draft becomes the folder

A worker that dies leaves half of a file, and one that was thought dead may still write. So each attempt writes under a
name of its own, and renames what is complete: both attempts have the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Collection, Generator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import msgspec

from jaxckpt._formats.export import FolderFile, FolderPlan
from jaxckpt._formats.safetensors import plan_safetensors
from jaxckpt._inspect.executors import OpenedElsewhere, Remembered, spread
from jaxckpt._job.call import Call
from jaxckpt._model import zarr
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import operate, run_alone
from jaxckpt._pipeline.progress import Report, display_progress, report_nothing
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._save.request import PreparedSave
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._save.staging import PieceGroup, StagedObject, StagedObjects
from jaxckpt._save.write import OwnShare, StoredObject, WrittenShare
from jaxckpt._save.write_plan import Object
from jaxckpt._sources.source import Source
from jaxckpt._store.folder import sync_path
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store import ObjectRecord, Store
from jaxckpt.errors import InputError

_ATTEMPT = "attempt-"
"""Names of what an attempt writes begin with this, in a data folder or a draft."""


def require_plain(options: Options) -> None:
    """Raise InputError for options that need the data of a conversion in one process."""
    if options.non_finite != "ignore" or options.reuse == "content":
        raise InputError(
            'convert(executor=…) moves no data through this process, so Options(non_finite=…) and reuse="content" are'
            " not possible: leave them out, or convert without executor="
        )


# To jaxckpt's format --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ObjectToWrite:
    """An object, and what a worker needs to write it."""

    obj: Object
    stack: Stack
    leaves: tuple[int, ...]
    """The numbers of the leaves in its rows."""


class WrittenElsewhere(SharedPath):
    """A path whose objects the workers of an executor write."""

    def __init__(self, store: Store, executor: Executor, opened: OpenedElsewhere, *, overwrite: bool) -> None:
        super().__init__(store, overwrite=overwrite)
        self._executor = executor
        self._opened = opened

    def write(self, share: OwnShare, folder: str, staged: StagedObjects) -> WrittenShare:
        written, prepared = share.write(folder, share.staged_objects(with_others=_without)), share.prepared
        if not prepared.plan.objects:
            return written
        with prepared.call.phases.timed("write"):
            return msgspec.structs.replace(written, objects=[*self._write(prepared, folder)])

    def _write(self, prepared: PreparedSave, folder: str) -> Iterator[StoredObject]:
        """Let the workers write the objects of this process, and sync their folders."""
        store, plan, options = self.store.absolute(), prepared.plan, self._opened.options
        write = functools.partial(_write_object, Remembered.of(self._opened.open), store, folder, options)
        units = (
            _ObjectToWrite(obj, plan.stacks[obj.stack], tuple(plan.leaves[obj.stack][slice(*obj.box[0])]))
            for obj in plan.objects
        )
        keys = list[str]()
        total = sum(obj.n_bytes for obj in plan.objects)
        with (
            display_progress("convert", total, prepared.options.progress) as report,
            contextlib.closing(
                spread(self._executor, write, units, options.timeout_seconds, prepared.call.cancellation.check)
            ) as written,
        ):
            for unit, record in written:
                prepared.call.cancellation.check()
                report(unit.obj.n_bytes)
                keys.append(zarr.object_key(unit.stack, unit.obj.index))
                yield unit.obj.stack, unit.obj.index_key, record
        for name in store.child(folder).names():
            if name.startswith(_ATTEMPT):
                store.delete(f"{folder}/{name}")
        if options.sync:
            store.sync_folders(folder, keys)


def _without(own: Generator[StagedObject]) -> Generator[StagedObject]:
    """None of the objects of this process."""
    own.close()
    yield from ()


def _write_object(
    opened: Remembered[Source], store: Store, data: str, options: Options, unit: _ObjectToWrite
) -> ObjectRecord:
    """Read the data of an object and write it. In a worker."""
    return run_alone(functools.partial(_write, opened.get(), store, data, options, unit), options.timeout_seconds)


def _write(source: Source, store: Store, data: str, options: Options, unit: _ObjectToWrite) -> ObjectRecord:
    obj, stack = unit.obj, unit.stack
    region = obj.box[1:]
    rows = enumerate(unit.leaves, obj.box[0][0])
    index = tuple(slice(*side) for side in region)
    pieces: list[PieceGroup] = [
        [(((row, row + 1), *region), StoredArray(source, leaf, options), index)] for row, leaf in rows
    ]
    content = StagedObject(obj, DTYPES[stack.dtype], 1, pieces, 0).data()
    attempt = f"{data}/{_ATTEMPT}{uuid.uuid4().hex}" if store.can_rename else data
    if store.can_rename:
        store.create_child(f"{attempt}/{stack.name}").put("zarr.json", zarr.metadata(stack))
    writer = store.array_writer(attempt, stack, sync=options.sync)
    record = operate(f"writing to {store.url}", lambda: writer.write(obj.index, content).result())
    if store.can_rename:  # a write to a bucket is atomic
        key = zarr.object_key(stack, obj.index)
        store.rename(f"{attempt}/{key}", f"{data}/{key}")
        store.delete(attempt)
    return record


# To a folder of safetensors -------------------------------------------------------------------------------


class FilesElsewhere:
    """Plans a folder whose files the workers of an executor write."""

    def __init__(self, call: Call, executor: Executor, opened: OpenedElsewhere) -> None:
        self._call = call
        self._executor = executor
        self._opened = opened

    def plan(self, source: Source, options: Options, report: Report) -> FolderPlan:
        """As `plan_safetensors`. The first file that a process writes lets the workers write all of its files."""
        plan = plan_safetensors(source, options, report)
        own = plan.of_process(self._call.index, self._call.count)
        progress = options.progress

        def write_all(first: str) -> None:
            draft = os.path.dirname(first)
            write = functools.partial(_write_file, Remembered.of(self._opened.open), self._opened.options, draft)
            seconds, check = self._opened.options.timeout_seconds, self._call.cancellation.check
            names = [file.name for file in own]
            with (
                display_progress("convert", sum(file.n_bytes for file in own), progress) as display,
                contextlib.closing(spread(self._executor, write, names, seconds, check)) as written,
            ):
                for file, _ in zip(own, written, strict=True):
                    report(0)
                    display(file.n_bytes)
            for name in os.listdir(draft):
                if name.startswith(_ATTEMPT):
                    os.unlink(os.path.join(draft, name))

        def write_one(path: str, skip: Collection[str] = ()) -> None:
            assert not skip, "nothing else writes to the folder"
            if not os.path.exists(path):
                write_all(path)

        return replace(plan, files=[FolderFile(file.name, file.n_bytes, write_one) for file in plan.files])


def _write_file(opened: Remembered[Source], options: Options, draft: str, name: str) -> None:
    """Write one file of a folder. In a worker."""
    source = opened.get()

    def write() -> None:
        with translate_os_errors(f"cannot write {draft}"):
            (file,) = (file for file in plan_safetensors(source, options, report_nothing).files if file.name == name)
            attempt = os.path.join(draft, f"{_ATTEMPT}{uuid.uuid4().hex}")
            file.write(attempt)
            sync_path(attempt)
            os.replace(attempt, os.path.join(draft, name))

    run_alone(write, options.timeout_seconds)
