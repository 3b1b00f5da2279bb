"""Exports by all processes of a job: a folder of another library's files, each written by one process.

    sharded arrays ─▶ a checkpoint ─▶ every process: the tensors of its own files, through the rules ─▶ the index

The checkpoint is a step of a run, or a temporary one next to the folder. No process reads or holds more than the slab
that it writes. The files go into a draft, which becomes the folder by a rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from jaxckpt._formats.destination import replacing, require_replaceable
from jaxckpt._formats.export import FolderPlan
from jaxckpt._job.call import Call
from jaxckpt._model.select import Select
from jaxckpt._options import Options, require_bool
from jaxckpt._pipeline.progress import Report
from jaxckpt._pipeline.watchdog import require_not_stalled
from jaxckpt._pipeline.workers import note_progress
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._save.compose_manifest import PublishResult
from jaxckpt._save.request import PreparedSave, SaveRequest
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._sources.open_source import source_at
from jaxckpt._sources.source import Source
from jaxckpt._store.files import remove_folder
from jaxckpt._store.folder import Folder, sync_path
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store_path import local_path
from jaxckpt.errors import InputError

PlanFolder = Callable[[Source, Options, Report], FolderPlan]


def write_folder(
    call: Call, source: Source, target: str, plan_folder: PlanFolder, options: Options, *, overwrite: bool
) -> None:
    """Write a checkpoint into a folder, which appears when it is complete. Every process, in a lane.

    Raises CheckpointExistsError, TreeError, StorageError.
    """

    def report(moved: int) -> None:
        require_not_stalled()
        call.cancellation.check()
        note_progress()

    with contextlib.ExitStack() as until_published:
        draft = ""
        with call.rendezvous("preparing the export") as rendezvous:
            rendezvous.gather("")
            if call.index == 0:
                with call.watchdog.operation(f"preparing {target}"):
                    if os.path.lexists(target):
                        require_replaceable(target, source.url, overwrite)
                    draft = until_published.enter_context(replacing(target))
                    os.mkdir(draft)
            draft = rendezvous.broadcast(draft)
        with call.rendezvous("writing the files of the export") as rendezvous:
            with rendezvous.joined_by_all(), translate_os_errors(f"cannot write {target}"):
                plan = plan_folder(source, options, report)
                for file in plan.of_process(call.index, call.count):
                    with call.watchdog.operation(f"writing {target}"):
                        path = os.path.join(draft, file.name)
                        file.write(path)
                        sync_path(path)  # the other processes cannot sync what this host has cached
            rendezvous.gather("")
            if call.index == 0:
                with call.watchdog.operation(f"writing {target}"):
                    plan.finish(draft)
            rendezvous.broadcast("")
    with call.rendezvous("publishing the export") as rendezvous:
        rendezvous.barrier()


@dataclass(frozen=True, slots=True)
class FolderWriter:
    """Writes the tensors that some rules make of a checkpoint."""

    target: str
    plan_folder: PlanFolder
    select: Select | None
    rename: Renaming | None
    overwrite: bool

    def write(self, call: Call, checkpoint: str, options: Options) -> None:
        """Export a checkpoint. Every process, in a lane."""
        with call.rendezvous("opening the checkpoint to export") as rendezvous:
            # Process 0 deletes a temporary checkpoint only after all have opened it, so that all raise the same error.
            with rendezvous.joined_by_all(), call.watchdog.operation(f"opening {checkpoint}"):
                source = renamed_source(source_at(checkpoint, options), self.rename, self.select)
            rendezvous.barrier()
        write_folder(call, source, self.target, self.plan_folder, options, overwrite=self.overwrite)


class ExportedFolder(SharedPath):
    """The destination of a save in another library's format: a temporary checkpoint next to it, then the folder."""

    def __init__(
        self,
        plan_folder: PlanFolder,
        path: str | os.PathLike[str],
        rename: Renaming | None,
        options: Options,
        *,
        overwrite: bool,
    ) -> None:
        target = require_folder(path)
        parent, name = os.path.split(target)
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]  # the name may be as long as the file system allows
        temporary = os.path.join(parent, f".{digest}-export")
        # Messages and results name the folder that the user has given.
        super().__init__(Folder(target, temporary, options.io, options.timeout_seconds), overwrite=True)
        self._temporary = temporary
        self._writer = FolderWriter(target, plan_folder, None, rename, require_bool(overwrite, "overwrite"))

    def check(self, request: SaveRequest) -> None:
        if request.metadata is not None or request.process_state is not None:
            raise InputError("save(format=…) takes no metadata= or process_state=: the format has no place for them")
        if os.path.lexists(self._writer.target):
            require_replaceable(self._writer.target, self._temporary, self._writer.overwrite)

    def finish(self, save: PreparedSave, published: PublishResult) -> None:
        try:
            self._writer.write(save.call, self._temporary, save.options)
        finally:
            if save.call.index == 0:
                remove_folder(self._temporary)


def require_folder(path: str | os.PathLike[str]) -> str:
    """The absolute path of an exported folder. Raises InputError."""
    target = local_path(path)
    if target is None:
        raise InputError(f"an export needs a local path, found {os.fspath(path)!r}: write it to one, then copy it")
    if os.path.splitext(target)[1] == ".safetensors":
        raise InputError(f"an export is a folder, but {target!r} ends in .safetensors: give a path without this suffix")
    return target
