"""Exports by all processes of a job: a folder of another library's files, each written by one process.

    sharded arrays ─▶ every process: its objects, through the rules, into the files ─▶ the index
    a checkpoint   ─▶ every process: the tensors of its own files, through the rules ─▶ the index

No process reads or holds more than what it is writing. The files go into a draft, which becomes the folder by a rename.
A save takes the first way, except for tensors of which several processes hold short runs of bytes: those take the
second, from a temporary checkpoint next to the folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from jaxckpt._formats.destination import draft_folder, replacing, require_replaceable
from jaxckpt._formats.direct_writes import (
    DirectWrites,
    ExportStore,
    UnwrittenRow,
    is_coherent,
    plan_writes,
    with_single_writers,
)
from jaxckpt._formats.export import FolderPlan, report_of
from jaxckpt._job.call import Call
from jaxckpt._model.file_names import data_folder
from jaxckpt._model.select import Select
from jaxckpt._options import Options, require_bool
from jaxckpt._pipeline.progress import Report, report_nothing
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._save.request import PreparedSave, SaveRequest
from jaxckpt._save.shared_path import PublishResult, SharedPath, broadcast_start, compose_manifest
from jaxckpt._save.staging import StagedObjects
from jaxckpt._save.write import WrittenShare
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.open_source import Location, source_at
from jaxckpt._sources.source import Source
from jaxckpt._store.folder import sync_path
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store_path import local_path
from jaxckpt._store.transaction import Transaction
from jaxckpt.errors import CheckpointExistsError, InputError, TreeError

PlanFolder = Callable[[Source, Options, Report], FolderPlan]


def write_folder(
    call: Call,
    source: Source,
    location: Location,
    target: str,
    plan_folder: PlanFolder,
    options: Options,
    *,
    overwrite: bool,
) -> None:
    """Write a checkpoint into a folder, which appears when it is complete. Every process, in a lane.

    Raises CheckpointExistsError, TreeError, StorageError.
    """
    with contextlib.ExitStack() as until_published:
        draft = ""
        with call.rendezvous("preparing the export") as rendezvous:
            rendezvous.gather("")
            if call.index == 0:
                with call.watchdog.operation(f"preparing {target}"):
                    if os.path.lexists(target):
                        require_replaceable(target, location, overwrite)
                    draft = until_published.enter_context(replacing(target))
                    os.mkdir(draft)
            draft = rendezvous.broadcast(draft)
        _write_files(call, source, DirectWrites(draft), set(), target, plan_folder, options)
    with call.rendezvous("publishing the export") as rendezvous:
        rendezvous.barrier()


def _write_files(
    call: Call,
    source: Source,
    direct: DirectWrites,
    written: Set[str],
    target: str,
    plan_folder: PlanFolder,
    options: Options,
) -> None:
    """Write the files of an export, without the tensors that are already there. This process has written to those of
    the given names. Every process, in a lane."""
    with call.rendezvous("writing the files of the export") as rendezvous:
        with rendezvous.joined_by_all(), translate_os_errors(f"cannot write {target}"):
            plan = plan_folder(source, options, report_of(call))
            own = plan.of_process(call.index, call.count)
            with call.watchdog.operation(f"writing {target}"):
                for file in own:
                    file.write(os.path.join(direct.folder, file.name), skip=direct.names)
                for name in {*written, *(file.name for file in own)}:
                    sync_path(os.path.join(direct.folder, name))  # the others cannot sync what this host has cached
        rendezvous.gather("")
        if call.index == 0:
            with call.watchdog.operation(f"writing {target}"):
                plan.finish(direct.folder)
        rendezvous.broadcast("")


def open_view(
    call: Call, checkpoint: str, options: Options, rename: Renaming | None, select: Select | None = None
) -> Source:
    """The tensors that some rules make of a checkpoint. Every process, in a lane."""
    with call.rendezvous("opening the checkpoint to export") as rendezvous:
        # Process 0 deletes a temporary checkpoint only after all have opened it, so that all raise the same error.
        with rendezvous.joined_by_all(), call.watchdog.operation(f"opening {checkpoint}"):
            source = renamed_source(source_at(checkpoint, options), rename, select)
        rendezvous.barrier()
    return source


class ExportedFolder(SharedPath):
    """The destination of a save in another library's format: its objects are written directly into the files, or by way
    of a temporary checkpoint."""

    def __init__(
        self,
        plan_folder: PlanFolder,
        path: str | os.PathLike[str],
        rename: Renaming | None,
        options: Options,
        *,
        overwrite: bool,
    ) -> None:
        self._target = target = require_folder(path)
        self._plan_folder = plan_folder
        self._rename = rename
        self._overwrite = require_bool(overwrite, "overwrite")
        self._view: Source
        """The tensors of the tree that is saved, once the save has begun."""

        # `begin` sets the folder. Messages and results name the one that the user has given.
        self._store = ExportStore(target, target, options.io, options.timeout_seconds)
        super().__init__(self._store, overwrite=True)

    def check(self, request: SaveRequest) -> None:
        if request.metadata is not None or request.process_state is not None:
            raise InputError("save(format=…) takes no metadata= or process_state=: the format has no place for them")
        self._require_replaceable()

    def _require_replaceable(self) -> None:
        target = self._target
        if os.path.islink(target) and self._overwrite:
            raise CheckpointExistsError(
                f"{target} is a symbolic link to {os.readlink(target)}, and overwriting it would replace the link: give"
                " that path, or delete the link first"
            )
        if os.path.lexists(target):
            require_replaceable(target, self._store.folder, self._overwrite)

    def plan(self, arrays: Iterable[ArrayLeaf], options: Options, process: int, processes: int) -> SavePlan:
        return super().plan(with_single_writers([*arrays]), options, process, processes)

    def begin(
        self, prepared: PreparedSave, stage_first: StagedObjects | None, until_saved: contextlib.ExitStack
    ) -> tuple[str, Transaction | None]:
        call, draft = prepared.call, ""
        with call.rendezvous("preparing the export") as rendezvous:
            if stage_first is not None:
                stage_first.fill()
            rendezvous.gather("")
            if call.index == 0:
                with call.watchdog.operation(f"preparing {self._target}"):
                    draft = until_saved.enter_context(draft_folder(self._target))
            checkpoint = os.path.join(rendezvous.broadcast(draft), "checkpoint")
        self.store = self._store = replace(self._store, folder=checkpoint)
        save_id, transaction = super().begin(prepared, stage_first, until_saved)
        folder = os.path.join(checkpoint, data_folder(save_id), "files")
        with call.rendezvous("preparing the files of the export") as rendezvous:
            source, files = self._planned(prepared)  # raises if the rules do not fit
            rendezvous.gather("")
            plan = functools.partial(plan_writes, source, files, prepared.plan, folder)
            coherent = ""
            if call.index == 0:
                coherent = "yes" if call.count == 1 or is_coherent(checkpoint) else ""
                cannot = translate_os_errors(f"cannot write {self._target}")
                with call.watchdog.operation(f"preparing {folder}"), cannot:
                    plan(is_coherent=bool(coherent)).create(files)
            coherent = broadcast_start(rendezvous, prepared, coherent)
        self.store = self._store = replace(self._store, direct=plan(is_coherent=bool(coherent)))
        self._view = source
        return save_id, transaction

    def _planned(self, prepared: PreparedSave) -> tuple[ForeignCheckpoint, FolderPlan]:
        """The tensors of the tree that is saved, whose data cannot be read, and their files."""
        shares = [WrittenShare([], 0, None, {}, "")] * prepared.call.count
        manifest = compose_manifest("", prepared.plan, prepared.draft, shares)
        rows = [[UnwrittenRow(stack.name, row) for row in range(stack.rows)] for stack in prepared.plan.stacks]
        source = renamed_source(ForeignCheckpoint(self._store.url, manifest, rows), self._rename)
        try:
            return source, self._plan_folder(source, prepared.options, report_nothing)
        except TreeError as error:
            error.add_note("jaxckpt: a save has no select=; rename=Rules([], drop=[…], keep=True) leaves leaves out")
            raise

    def finish(self, prepared: PreparedSave, published: PublishResult) -> None:
        call, direct = prepared.call, self._store.direct
        assert direct is not None
        source = open_view(call, self._store.folder, prepared.options, self._rename) if direct.stored else self._view
        files = direct.files(prepared.plan)
        _write_files(call, source, direct, files, self._target, self._plan_folder, prepared.options)
        with call.rendezvous("publishing the export") as rendezvous:
            rendezvous.gather("")
            if call.index == 0:
                with call.watchdog.operation(f"publishing {self._target}"):
                    self._require_replaceable()
                    with replacing(self._target) as draft:
                        os.rename(direct.folder, draft)
            rendezvous.broadcast("")


def require_folder(path: str | os.PathLike[str]) -> str:
    """The absolute path of an exported folder. Raises InputError."""
    target = local_path(path)
    if target is None:
        raise InputError(f"an export needs a local path, found {os.fspath(path)!r}: write it to one, then copy it")
    if os.path.splitext(target)[1] == ".safetensors":
        raise InputError(f"an export is a folder, but {target!r} ends in .safetensors: give a path without this suffix")
    return target
