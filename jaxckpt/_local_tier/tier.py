"""The local tier: steps in a folder of each process's host, with copies in other failure domains.

    <local>/process-<index>/run.json                        the run that the folder belongs to
    <local>/process-<index>/00000040/manifest.json          the manifest of the whole step, equal in every process
    <local>/process-<index>/00000040/data-<save id>/…       the objects that the process holds

All folders together hold an ordinary checkpoint. Each process publishes the manifest after all have written their
objects, so any manifest proves that its save is complete. A process holds at most two steps: before it writes a step,
it deletes all except one older step.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec

from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._keywords import explain_names
from jaxckpt._local_tier.copies import Domains, plan_local_save
from jaxckpt._local_tier.flush import Flush
from jaxckpt._model import typed_json
from jaxckpt._model.file_names import MANIFEST, data_folder, is_data_folder, is_data_referenced
from jaxckpt._options import Options, require_rate, require_whole_number
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._run_folder.steps import RUN, is_step, step_name
from jaxckpt._save.describe import Draft
from jaxckpt._store.folder import Folder
from jaxckpt._store.load_manifest import parse_note
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import local_path
from jaxckpt.errors import DataError, InputError, StorageError

_NOTE = "run.json"
_NEW_NOTE = f"{_NOTE}.new"
_RUN_ID_PREFIX = "local-"
"""Prefix of the name of a note in the storage's directory of steps. The rest of the name is the run's id."""


@explain_names
@dataclass(frozen=True, slots=True)
class LocalTier:
    """A local tier of a `Checkpointer`: each step that is due is first saved into a folder on each process's host.

    Local steps survive the process. Each process writes its own objects and copies of other processes' objects, so that
    the folders of any `copies` failure domains may be lost. A process holds at most two steps;
    `Checkpointer.local_bytes` reports their size. Steps that are due by the Checkpointer's own `every` are also copied
    to its directory, in the background.

    Attributes:
        folder: A folder on this host, in memory (`/dev/shm/run`) or on a local disk. The path may differ between
            processes.
        every: Save the steps that are multiples of this number into the local folders; 10 by default.
        copies: How many other failure domains hold a copy of each object; 1 by default. Objects that no other domain
            holds by its sharding are sent to one over the devices' interconnect.
        domains: The failure domain of each process, such as its rack: one label per process. By default each host is a
            domain; if all processes are on one host, each process is.
        max_bytes_per_second: Limit on the rate at which each process copies to the directory. None:
            `Options.max_bytes_per_second`.

    Raises:
        InputError: A value is invalid, for example a folder that is a URL.

    Examples:
        >>> import jaxckpt
        >>> jaxckpt.LocalTier("/dev/shm/run", every=5).copies
        1
    """

    folder: str | os.PathLike[str]
    _: KW_ONLY
    every: int = 10
    copies: int = 1
    domains: Sequence[str | int] | None = None
    max_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if local_path(self.folder, "LocalTier.folder") is None:
            raise InputError(f"LocalTier.folder must be a folder on this host, found {os.fspath(self.folder)!r}")
        for name, minimum in (("every", 1), ("copies", 0)):
            value = require_whole_number(getattr(self, name), f"LocalTier.{name}", minimum=minimum)
            object.__setattr__(self, name, value)
        require_rate(self.max_bytes_per_second, "LocalTier.max_bytes_per_second")
        labels = self.domains
        if labels is not None and (isinstance(labels, str) or not isinstance(labels, Sequence)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"LocalTier.domains must be a sequence of labels, one per process, found {labels!r}")


@dataclass(frozen=True, slots=True)
class LocalBytes:
    """The size of one local step, in bytes of array data."""

    own_bytes: int
    """Bytes of the objects that this process owns."""

    copied_bytes: int
    """Bytes of the copies that this process holds for others."""

    sent_bytes: int
    """Bytes that this process sends to peers over the devices' interconnect, counted once per copy. The other copies
    are written from replicas."""

    @property
    def held_bytes(self) -> int:
        """Largest size of this process's local folder: two steps."""
        return 2 * (self.own_bytes + self.copied_bytes)


class _LocalAgreement(msgspec.Struct, frozen=True):
    """The answer of process 0."""

    run_id: str
    domains: list[str]


class KeptStep(msgspec.Struct, frozen=True):
    """The older step that stays in the local folders when a step is saved."""

    can_delete_others: bool
    """Whether all others can be deleted. False if no restore has examined the steps of an earlier Checkpointer."""

    has_saved: bool
    """Whether this Checkpointer has saved a local step. Then folders of processes outside this job can also be
    deleted."""

    step: int
    """The number of the step; -1 if no step stays."""

    save_id: str


class LocalSteps:
    """The local folders of a run, from the view of one process."""

    def __init__(self, tier: LocalTier, options: Options) -> None:
        path = local_path(tier.folder, "LocalTier.folder")
        assert path is not None
        self.folder = Folder(path, path, options.io, options.timeout_seconds)
        self.every = tier.every
        self.rate = tier.max_bytes_per_second
        """Largest rate of flushing in this process, in bytes per second."""

        self._copies = tier.copies
        self._labels = None if tier.domains is None else [*map(str, tier.domains)]
        self._restored: tuple[int, str] | None = None
        self._is_examined = False
        self._must_save_next = False
        self._last_saved: tuple[int, str] | None = None
        self._is_swept = False
        self._folder_id = ""
        """The id in the note of this process's folder; the same if the folder is created again."""

        self._live_ids = set[str]()
        """The ids of all processes' folders."""

        self._begun_step = -1
        self.flush: Flush | None = None
        """The step that is being flushed, or was when the processes last agreed on it. Equal in all processes."""

    # Opening ---------------------------------------------------------------------------------------------

    def settings(self, processes: int) -> dict[str, Any]:
        """The arguments that all processes must give alike. Raises InputError."""
        labels = self._labels
        if labels is not None and len(labels) != processes:
            raise InputError(
                f"LocalTier.domains has {len(labels)} labels, expected one for each of {processes} processes"
            )
        return {
            "local": "LocalTier(…)",
            "local.copies": self._copies,
            "local.every": self.every,
            "local.domains": labels,
        }

    def agreement(self, names: Sequence[str], directory: Store) -> str:
        """The id of the run and the failure domains, encoded, from the names of the processes' hosts. Process 0.

        Raises InputError, StorageError.
        """
        hosts = [names.index(name) for name in names]
        # A job on a single host is a test, in which each process represents a host.
        default = [str(number) for number in (hosts if len(set(hosts)) > 1 else range(len(hosts)))]
        labels = self._labels or default
        Domains(tuple(labels), self._copies).require_enough()
        return msgspec.json.encode(_LocalAgreement(_run_id(directory), labels)).decode()

    def open(self, agreement: str, directory: Store, rendezvous: Rendezvous) -> None:
        """Create this process's folder, after all have agreed on its domain. Raises InputError, StorageError."""
        agreed = typed_json.decode(agreement, _LocalAgreement)
        self.run_id, self._storage_url, self._index = agreed.run_id, directory.url, rendezvous.call.index
        self.domains = Domains(tuple(agreed.domains), self._copies)
        self.own_folder = self.folder.child(f"process-{self._index}")
        self._claim()
        self._live_ids = set(json.loads(rendezvous.broadcast(json.dumps(rendezvous.gather(self._folder_id)))))

    def _claim(self) -> None:
        """Note in this process's folder that it belongs to the run, unless that is noted already.

        Raises InputError if the folder has other files or belongs to another run; DataError, StorageError.
        """
        note = _read_note(self.own_folder)
        if note is None and not {_NEW_NOTE}.issuperset(self.own_folder.names()):
            raise InputError(
                f"{self.own_folder.url} holds other files, but no {_NOTE}: give another LocalTier.folder, or remove"
                " them"
            )
        if note is not None and (note.get("run"), note.get("storage")) != (self.run_id, self._storage_url):
            where = note.get("storage")
            content = f"local steps of another run, which is stored at {where}, expected {self._storage_url}"
            if where == self._storage_url:
                content = f"local steps of an earlier run in {where}, which was deleted or replaced since"
            elif where is None:
                content = f"a damaged {_NOTE}, so it is unknown which run its steps belong to"
            raise InputError(
                f"{self.own_folder.url} holds {content}: remove that folder, or give another LocalTier.folder"
            )
        if note is None:
            note = {"run": self.run_id, "storage": self._storage_url, "folder": self._folder_id or uuid.uuid4().hex}
            self.folder.create_child(f"process-{self._index}").put(_NEW_NOTE, json.dumps(note).encode())
            self.own_folder.rename(_NEW_NOTE, _NOTE)
        self._folder_id = str(note.get("folder"))

    def folders(self) -> dict[int, tuple[str, Folder]]:
        """The folders of the run that this process sees, each with its id, by the index of the process that created
        it."""
        folders: dict[int, tuple[str, Folder]] = {}
        for name in self.folder.names():
            if re.fullmatch(r"process-(0|[1-9]\d{0,8})", name, re.ASCII):
                folder = self.folder.child(name)
                try:
                    note = _read_note(folder) or {}
                except (DataError, StorageError) as error:
                    _log.warning("%s is ignored: %s", folder.url, error)
                    continue
                if (note.get("run"), note.get("storage")) == (self.run_id, self._storage_url):
                    folders[int(name.removeprefix("process-"))] = str(note.get("folder")), folder
                else:
                    _log.warning("%s is ignored: it belongs to another run", folder.url)
        return dict(sorted(folders.items()))

    def record_restored(self, restored: tuple[int, str] | None, *, complete: bool = True) -> None:
        """Note the (step, save id) of the local step that all processes restore; None if they restore from the storage.

        All other local steps of an earlier Checkpointer may then be deleted. If the step lacks copies (not `complete`),
        the next step is saved locally even if it is not due.
        """
        self._restored, self._is_examined, self._must_save_next = restored, True, not complete

    @property
    def newest(self) -> tuple[int, str] | None:
        """(step, save id) of the local step that this Checkpointer saved last, or restored if it saved none."""
        return self._last_saved or self._restored

    def delete(self, step: int, rendezvous: Rendezvous) -> None:
        """Delete a step in all local folders of the run.

        Every process calls this: otherwise the other folders could still hold the complete step.
        """
        rendezvous.start_next()
        for _, folder in self.folders().values():
            folder.child(step_name(step)).unpublish(sync=False)
            folder.delete(step_name(step))
        if self.newest is not None and self.newest[0] == step:
            self._last_saved, self._restored, self._is_examined = None, None, False  # the next save deletes nothing
        rendezvous.barrier()

    # Saving ----------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        return self._must_save_next or step % self.every == 0

    def record_tried(self, step: int) -> None:
        """Note that the local save of a step has begun, or has failed. Every process calls this in the same call of
        `save`, because all must agree on which steps are due and whether a flush blocks them."""
        self._must_save_next, self._begun_step = False, step

    def is_flushing(self, call: Call) -> bool:
        """Whether process 0 still flushes a local step. Every process calls this."""
        if self.flush is not None:
            is_running = self.flush.is_running
            if not call.in_process_0("asking whether a local step is still being flushed", lambda: is_running):
                self.flush = None
        return self.flush is not None

    def is_blocked_by_flush(self, step: int, call: Call) -> bool:
        """Whether to skip the local save of a step, because a step older than the newest is still being flushed and
        the folder would then hold a third step. Every process calls this."""
        flush = self.flush
        if flush is None or self._begun_step == flush.step < step or not self.is_flushing(call):
            return False
        if not flush.is_warned:
            flush.is_warned = True
            _log.warning(
                "step %d is not saved in the local folders, nor are later ones until step %d has reached the storage:"
                " at most two steps are held. A larger every= of the Checkpointer or the LocalTier, or a larger"
                " LocalTier.max_bytes_per_second, avoids this",
                step,
                flush.step,
            )
        return True

    def record_saved(self, step: int, save_id: str) -> None:
        """Note that a step was saved in the local folders."""
        self._last_saved = step, save_id

    def child(self, step: int) -> Folder:
        """The folder of this process's share of a step."""
        return self.own_folder.child(step_name(step))

    def plan(self, draft: Draft, options: Options) -> LocalBytes:
        """The size of a local step of a tree in this process."""
        plan = plan_local_save(draft.arrays, options, self._index, self.domains)
        return LocalBytes(plan.process_bytes[self._index], plan.copied_bytes, plan.sent_bytes)

    def choose_kept_step(self, step: int) -> KeptStep:
        """The older step that stays when this step is saved. Process 0."""
        kept = self.newest
        if kept is not None and kept[0] > step:
            kept = None  # a run that restarts from an older step discards the newer ones
        can_delete_others, has_saved = self._is_examined or self._last_saved is not None, self._last_saved is not None
        return KeptStep(can_delete_others, has_saved, *(kept or (-1, "")))

    def delete_other_steps(self, kept: KeptStep) -> None:
        """Delete all steps except the one that stays."""
        self._claim()  # the folder may have been deleted, and its steps do not count without the note
        if kept.can_delete_others:
            _trim(self.own_folder, kept)
        if kept.has_saved and not self._is_swept:
            for process, (folder_id, folder) in self.folders().items():
                if folder_id not in self._live_ids:
                    _log.info("%s is deleted: no process of this job uses it", folder.url)
                    self.folder.delete(f"process-{process}")
            self._is_swept = True


def pack(content: bytes) -> str:
    """Bytes as a short text for a rendezvous."""
    return base64.b64encode(zlib.compress(content)).decode()


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _run_id(directory: Store) -> str:
    """The id of a run, created once. If two were created at the same time, the first by name counts. Local folders with
    the other id are then treated as those of another run, which is safe."""
    notes = directory.child(RUN)
    if not any(name.startswith(_RUN_ID_PREFIX) for name in notes.names()):
        directory.create_child(RUN).put(f"{_RUN_ID_PREFIX}{uuid.uuid4().hex}", b"{}", sync=True)
    return min(name for name in notes.names() if name.startswith(_RUN_ID_PREFIX)).removeprefix(_RUN_ID_PREFIX)


def _read_note(own: Folder) -> dict[str, Any] | None:
    """The record of the run in a process's folder: None if there is none, empty if it is damaged."""
    content = own.read(_NOTE)
    return None if content is None else parse_note(content)


def _trim(own: Folder, kept: KeptStep) -> None:
    """Delete all saves in a process's folder except one. For each, delete the manifest first."""
    for name in filter(is_step, own.names()):
        child = own.child(name)
        stays = data_folder(kept.save_id) if int(name) == kept.step else ""
        with contextlib.suppress(DataError, StorageError):  # not a plain file, so deleted with the rest below
            if not is_data_referenced(child.read(MANIFEST), stays):
                child.unpublish(sync=False)
        if not stays:
            own.delete(name)
        for data in filter(is_data_folder, child.names()):
            if data != stays:
                child.delete(data)
