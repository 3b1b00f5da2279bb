"""The step that all processes agree to restore: the newest complete step in local folders, or in the storage.

each process: its steps ─▶ process 0: saves, newest first ─▶ each process: its files ─▶ the first complete save
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import os
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt._format.manifest import decode
from jaxckpt._format.names import MANIFEST
from jaxckpt._format.records import Manifest
from jaxckpt._restore.plan import read_bytes
from jaxckpt._restore.pooled import DamagedError, Pooled
from jaxckpt._restore.surviving import Candidate, Files, Held, candidates, missing
from jaxckpt._runtime.errors import CorruptError, DataError, ManifestError, NotACheckpointError, StorageError
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.processes import Group, Meeting
from jaxckpt._steps.directory import Directory
from jaxckpt._steps.local import Local
from jaxckpt._storage.errors import system_errors
from jaxckpt._storage.folder import Folder
from jaxckpt._storage.steps import is_step, step_name

_log = logging.getLogger("jaxckpt")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step, and its location."""

    step: int | None
    """None if no step exists."""

    source: Pooled | None = None
    """Its data in local folders; None for a step in the storage."""

    complete: bool = True
    """Whether every file has all its copies, for the current number of processes."""

    @property
    def save(self) -> tuple[int, str] | None:
        """The step and the save id of a local step."""
        return None if self.source is None or self.step is None else (self.step, self.source.manifest.save_id)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The folder of a local step that this process sees."""

    process: str
    """The id of its parent folder."""

    folder: Folder
    step: int

    content: bytes | None
    """The manifest of the step."""

    candidate: Candidate | None


class Newest:
    """Finds the step to restore. Every process creates one."""

    def __init__(self, directory: Directory, local: Local | None, options: Options) -> None:
        self._directory = directory
        self._local = local
        self._options = options
        self._unusable = set[str]()
        """Local files that this process could not read, by their paths."""

        self._known: dict[int, Manifest] = {}
        """The local steps that were agreed on."""

    # Agreeing, every process -----------------------------------------------------------------------------

    def find(self, group: Group, step: int | None, ready: Callable[[], object], *, apart: bool = True) -> Chosen:
        """Find a step, by default the newest, after `ready`, which waits for a running save. Every process calls this.

        Without `apart`, a local step counts only if each process sees all of its files. Raises DataError if the wanted
        step exists only in the local folders and is damaged there.
        """
        with group.meeting("looking for the newest step") as meeting:
            ready()
            seen = list(self._look())
            heard = meeting.gather(json.dumps([one.candidate for one in seen if one.candidate]))
            stored, offered = json.loads(meeting.share(self._offer(heard, step) if heard else ""))
            for candidate, giver in offered:
                meeting.renew()
                chosen = self._gathered(meeting, Candidate(*candidate), giver, seen, apart=apart)
                if chosen is not None:
                    return chosen
        if offered and stored is None and step is not None:
            raise DataError(
                f"step {step} is damaged or incomplete in the local folders, and {self._directory.url} does not have it"
                "; see the log for details"
            )
        if offered and group.index == 0:
            taken = "no step is left" if stored is None else f"step {stored} is taken from {self._directory.url}"
            _log.warning("no step in the local folders can be restored: %s", taken)
        return Chosen(stored if step is None else step)

    def _look(self) -> Iterator[_Seen]:
        """The steps in the local folders that this process sees."""
        for name, process in self._local.folders().values() if self._local else ():
            try:
                steps = list(filter(is_step, process.names()))
            except StorageError as error:
                _log.warning("the local folder %s is not used: %s", process.url, error)
                continue
            yield from (_seen(name, process.child(step), int(step)) for step in steps)

    def _offer(self, heard: Sequence[str], step: int | None) -> str:
        """Return, as JSON: the step in the storage (or None), and the local saves to try before it, newest first.

        Each local save comes with the process that sends its manifest to the processes that lack it (None if all have
        it). Only process 0 calls this.
        """
        found = [[Candidate(*one) for one in json.loads(text)] for text in heard]
        steps = self._directory.steps()
        stored = max(steps, default=None) if step is None else step if step in steps else None
        offered: list[tuple[Candidate, int | None]] = []
        for one in candidates(found):
            if one.step != step if step is not None else stored is not None and one.step < stored:
                continue
            # If the local folders and the storage have different saves of one step, the storage's save counts.
            if one.step in steps and self._directory.save_id(one.step) not in (None, one.save_id):
                continue
            having = [process for process, some in enumerate(found) if one in some]
            offered.append((one, having[0] if len(having) < len(found) else None))
        return json.dumps((stored, offered))

    def _gathered(
        self, meeting: Meeting, candidate: Candidate, giver: int | None, seen: Sequence[_Seen], *, apart: bool
    ) -> Chosen | None:
        """A save in the local folders of all processes; None unless it is complete."""
        process = meeting.group.index
        content = next((one.content for one in seen if one.candidate == candidate), None)
        if giver is not None:
            texts = meeting.gather(_packed(content) if content is not None and process == giver else "")
            content = _unpacked(meeting.share(texts[giver] if texts else ""))
            meeting.renew()
        url = f"{self._directory.url}/{step_name(candidate.step)} (local)"
        if content is None or hashlib.sha256(content).hexdigest() != candidate.digest:
            raise ManifestError(f"the manifest of {url} was lost or changed in transit")
        manifest = decode(content, url)
        files = Files.of(manifest)
        of_step = [one for one in seen if one.step == candidate.step]
        own = np.full(len(files.keys), -1)
        numbers = {key: number for number, key in enumerate(files.keys)}
        nothing = _bits([], len(own))
        usable: dict[str, Held] = {}
        for number, one in enumerate(of_step):
            there = self._usable(one.folder, manifest.data, files, numbers)
            own[there] = number
            usable[one.process] = usable.get(one.process, nothing) | _bits(there, len(own))
        texts = meeting.gather(json.dumps({name: _packed(bits.tobytes()) for name, bits in usable.items()}))
        held = [
            {name: np.frombuffer(_unpacked(bits), np.uint8) for name, bits in some.items()}
            for some in json.loads(meeting.share(f"[{','.join(texts)}]"))
        ]
        by_folder: dict[str, Held] = {}
        for name, bits in itertools.chain.from_iterable(map(dict.items, held)):
            by_folder[name] = by_folder.get(name, bits) & bits
        # A process is asked only for files that it can read. Another process may see more files in the same folder.
        every = np.array([np.bitwise_or.reduce([nothing, *some.values()]) for some in held])
        lacking = missing(every if apart else np.bitwise_and.reduce(every)[None], len(own))
        if lacking:
            if process == 0:
                why = "no local folder holds" if apart else "one process does not see, which rename=Rules(…) needs,"
                _log.warning(
                    "local step %d is not used: %s %d of its %d files, %s for example",
                    *(candidate.step, why, len(lacking), len(own), files.keys[lacking[0]]),
                )
            return None
        for one in of_step:
            if one.candidate != candidate and manifest.data in one.folder.names():
                _adopt(one.folder, manifest.data, content, sync=self._options.sync)
        if process == 0:
            _log.info("step %d is complete in the local folders of %d processes", candidate.step, len(by_folder))
        self._known[candidate.step] = manifest
        max_bytes = max(1, read_bytes(self._options.host_bytes) // 4)
        folders = [one.folder for one in of_step]
        source = Pooled(url, manifest, candidate.digest, files, folders, own.tolist(), every, max_bytes)
        counts = sum(
            (np.unpackbits(bits, count=len(own)).astype(int) for bits in by_folder.values()), np.zeros(len(own), int)
        )
        copies = self._local.domains.copies if self._local else 0
        whole = len(by_folder) == meeting.group.count and bool((counts > copies).all())
        return Chosen(candidate.step, source, complete=whole)

    def _usable(self, folder: Folder, data: str, files: Files, numbers: Mapping[str, int]) -> list[int]:
        """The files of a save that exist with the right length and have not failed to be read."""
        there = {
            numbers[key]: key
            for path, _, names in os.walk(os.path.join(folder.folder, data))
            for name in names
            if (key := os.path.relpath(os.path.join(path, name), folder.folder)) in numbers
            and f"{folder.url}/{key}" not in self._unusable
        }
        try:
            misfits = folder.misfits({key: files.lengths[number] for number, key in there.items()})
        except StorageError as error:
            _log.warning("the local folder %s is not used: %s", folder.url, error)
            return []
        for key, why in misfits.items():
            _log.warning("the local file %s/%s is not used: it %s", folder.url, key, why)
        return [number for number, key in there.items() if key not in misfits]

    # Without communication -------------------------------------------------------------------------------

    def avoid(self, source: Pooled, error: DamagedError) -> None:
        """Note damaged files of a local step, so that copies in other processes are used."""
        _log.warning("local files of %s are damaged, and are not used: %s", source.url, error)
        self._unusable.update(source.damaged)

    def required(self, chosen: Chosen) -> int:
        """The number of a step that was found. Raises NotACheckpointError if none was."""
        if chosen.step is None:
            raise NotACheckpointError(f"{self._directory.url} has no steps")
        return chosen.step

    def taken(self, chosen: Chosen) -> None:
        """Note that a step was restored. All other steps of an earlier Checkpointer are no longer needed."""
        if self._local is not None:
            self._local.found(chosen.save, complete=chosen.complete)

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics of the agreed local step, or of the last step that this Checkpointer saved. Raises
        NotACheckpointError."""
        if step not in self._known and self._local is not None:
            ours = (one for one in self._look() if one.candidate and one.candidate[:2] == self._local.newest)
            self._known.update({one.step: decode(one.content or b"", one.folder.url) for one in ours})
        record = self._known[step].step if step in self._known else None
        if record is None:
            more = ", and no local step of that number was restored or saved last" if self._local else ""
            raise NotACheckpointError(f"{self._directory.url} has no step {step}{more}")
        return dict(record.metrics)


def _seen(process: str, folder: Folder, step: int) -> _Seen:
    """The local folder of a step. A manifest that is damaged, or of another step, counts as missing."""
    try:
        content = folder.read(MANIFEST)
        if content is None:
            return _Seen(process, folder, step, None, None)
        manifest = decode(content, folder.url)
        if manifest.step is not None and manifest.step.number == step:
            found = Candidate(step, manifest.save_id, hashlib.sha256(content).hexdigest())
            return _Seen(process, folder, step, content, found)
        why = "it is of another step"
    except (CorruptError, StorageError) as error:
        why = str(error)
    _log.warning("the manifest in %s is not used: %s", folder.url, why)
    return _Seen(process, folder, step, None, None)


def _adopt(folder: Folder, data: str, content: bytes, *, sync: bool) -> None:
    """Publish the manifest of a complete save in a folder that has its data but lacks the manifest, so that the save
    does not depend on one copy of the manifest."""
    name = f"{data}/{MANIFEST}.{uuid.uuid4().hex}"
    try:
        folder.put(name, content, sync=sync)
        with system_errors(f"cannot publish {folder.url}/{MANIFEST}"):
            os.rename(os.path.join(folder.folder, name), os.path.join(folder.folder, MANIFEST))
    except StorageError as error:
        _log.warning("the manifest is not in all local folders: %s", error)


def _bits(numbers: Sequence[int], count: int) -> Held:
    """One bit per file, set for some of them."""
    there = np.zeros(count, bool)
    there[numbers] = True
    return np.packbits(there)


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
