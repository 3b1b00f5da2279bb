"""The step that all processes agree to restore: the newest complete step in local folders, or in the storage.

each process: its steps ─▶ process 0: saves, newest first ─▶ each process: its files ─▶ the first complete save
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt._job.rendezvous import Group, Meeting
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.manifest import decode
from jaxckpt._model.records import Manifest
from jaxckpt._options import Options
from jaxckpt._restore.pooled import DamagedError, PooledCheckpoint
from jaxckpt._restore.read_plan import max_read_bytes
from jaxckpt._restore.surviving import Availability, Candidate, Files, candidates, missing_files
from jaxckpt._run_folder.steps import is_step, step_name
from jaxckpt._runs.directory import Directory
from jaxckpt._runs.local import LocalTier
from jaxckpt._store.folder import Folder
from jaxckpt.errors import CorruptError, DataError, ManifestError, NotACheckpointError, StorageError

_log = logging.getLogger("jaxckpt")


@dataclass(frozen=True, slots=True)
class LocatedStep:
    """A step, and its location."""

    step: int | None
    """None if no step exists."""

    local_source: PooledCheckpoint | None = None
    """Its data in local folders; None for a step in the storage."""

    has_all_copies: bool = True
    """Whether every file has all its copies, for the current number of processes."""

    @property
    def local_save(self) -> tuple[int, str] | None:
        """The step and the save id of a local step."""
        return (
            None if self.local_source is None or self.step is None else (self.step, self.local_source.manifest.save_id)
        )


@dataclass(frozen=True, slots=True)
class _LocalStep:
    """The folder of a local step that this process sees."""

    folder_id: str
    """The id of its parent folder."""

    folder: Folder
    step: int

    content: bytes | None
    """The manifest of the step."""

    candidate: Candidate | None


class StepFinder:
    """Finds the step to restore. Every process creates one."""

    def __init__(self, directory: Directory, local: LocalTier | None, options: Options) -> None:
        self._directory = directory
        self._local = local
        self._options = options
        self._unusable_files = set[str]()
        """Local files that this process could not read, by their paths."""

        self._agreed_manifest: Manifest | None = None
        """The local step that was agreed on last."""

    # Agreeing, every process -----------------------------------------------------------------------------

    def find(
        self, group: Group, step: int | None, wait_for_save: Callable[[], object], *, allow_peers: bool = True
    ) -> LocatedStep:
        """Find a step, by default the newest, after `wait_for_save`, which waits for a running save. Every process
        calls this.

        Without local folders, a step that is given is not looked for. Without `allow_peers`, a local step counts only
        if each process sees all of its files. Raises DataError if the wanted step exists only in the local folders and
        is damaged there.
        """
        with group.meeting("looking for the newest step") as meeting:
            wait_for_save()
            self._directory.require_same_folder()
            if step is not None and self._local is None:
                meeting.barrier()
                return LocatedStep(step)
            local_steps = list(self._local_steps())
            gathered = meeting.gather(json.dumps([one.candidate for one in local_steps if one.candidate]))
            storage_step, eligible = json.loads(
                meeting.broadcast(self._encode_eligible(gathered, step) if gathered else "")
            )
            for candidate, sender in eligible:
                meeting.start_next()
                chosen = self._try_candidate(
                    meeting, Candidate(*candidate), sender, local_steps, allow_peers=allow_peers
                )
                if chosen is not None:
                    return chosen
        if eligible and storage_step is None and step is not None:
            raise DataError(
                f"step {step} is damaged or incomplete in the local folders, and {self._directory.url} does not have it"
                "; see the log for details"
            )
        if eligible and group.index == 0:
            taken = (
                "no step is left"
                if storage_step is None
                else f"step {storage_step} is restored from {self._directory.url}"
            )
            _log.warning("no step in the local folders can be restored: %s", taken)
        return LocatedStep(storage_step if step is None else step)

    def _local_steps(self) -> Iterator[_LocalStep]:
        """The steps in the local folders that this process sees."""
        for name, process in self._local.folders().values() if self._local else ():
            try:
                steps = list(filter(is_step, process.names()))
            except StorageError as error:
                _log.warning("the local folder %s is not used: %s", process.url, error)
                continue
            yield from (_read_local_step(name, process.child(step), int(step)) for step in steps)

    def _encode_eligible(self, gathered: Sequence[str], step: int | None) -> str:
        """Return, as JSON: the step in the storage (or None), and the local saves to try before it, newest first.

        Each local save comes with the process that sends its manifest to the processes that lack it (None if all have
        it). Only process 0 calls this.
        """
        found = [[Candidate(*one) for one in json.loads(text)] for text in gathered]
        steps = self._directory.steps()
        storage_step = max(steps, default=None) if step is None else step if step in steps else None
        eligible: list[tuple[Candidate, int | None]] = []
        for one in candidates(found):
            if one.step != step if step is not None else storage_step is not None and one.step < storage_step:
                continue
            # If the local folders and the storage have different saves of one step, the storage's save counts.
            if one.step in steps and self._directory.save_id(one.step) not in (None, one.save_id):
                continue
            having = [process for process, some in enumerate(found) if one in some]
            eligible.append((one, having[0] if len(having) < len(found) else None))
        return json.dumps((storage_step, eligible))

    def _try_candidate(
        self,
        meeting: Meeting,
        candidate: Candidate,
        sender: int | None,
        local_steps: Sequence[_LocalStep],
        *,
        allow_peers: bool,
    ) -> LocatedStep | None:
        """A save in the local folders of all processes; None unless it is complete."""
        process = meeting.group.index
        content = next((one.content for one in local_steps if one.candidate == candidate), None)
        if sender is not None:
            texts = meeting.gather(_packed(content) if content is not None and process == sender else "")
            content = _unpacked(meeting.broadcast(texts[sender] if texts else ""))
            meeting.start_next()
        url = f"{self._directory.url}/{step_name(candidate.step)} (local)"
        if content is None or hashlib.sha256(content).hexdigest() != candidate.digest:
            raise ManifestError(f"the manifest of {url} was lost or changed in transit")
        manifest = decode(content, url)
        files = Files.of(manifest)
        of_step = [one for one in local_steps if one.step == candidate.step]
        folder_numbers = np.full(len(files.keys), -1)
        numbers = {key: number for number, key in enumerate(files.keys)}
        nothing = _bits([], len(folder_numbers))
        usable: dict[str, Availability] = {}
        for number, one in enumerate(of_step):
            there = self._usable(one.folder, manifest.data_folder, files, numbers)
            folder_numbers[there] = number
            usable[one.folder_id] = usable.get(one.folder_id, nothing) | _bits(there, len(folder_numbers))
        texts = meeting.gather(json.dumps({name: _packed(bits.tobytes()) for name, bits in usable.items()}))
        held = [
            {name: np.frombuffer(_unpacked(bits), np.uint8) for name, bits in some.items()}
            for some in json.loads(meeting.broadcast(f"[{','.join(texts)}]"))
        ]
        by_folder: dict[str, Availability] = {}
        for name, bits in itertools.chain.from_iterable(map(dict.items, held)):
            by_folder[name] = by_folder.get(name, bits) & bits
        # A process is asked only for files that it can read. Another process may see more files in the same folder.
        readable = np.array([np.bitwise_or.reduce([nothing, *some.values()]) for some in held])
        lacking = missing_files(readable if allow_peers else np.bitwise_and.reduce(readable)[None], len(folder_numbers))
        if lacking:
            if process == 0:
                why = (
                    "no local folder holds" if allow_peers else "one process does not see, which rename=Rules(…) needs,"
                )
                _log.warning(
                    "local step %d is not used: %s %d of its %d files, %s for example",
                    *(candidate.step, why, len(lacking), len(folder_numbers), files.keys[lacking[0]]),
                )
            return None
        for one in of_step:
            if one.candidate != candidate and manifest.data_folder in one.folder.names():
                _publish_manifest(one.folder, manifest.data_folder, content, sync=self._options.sync)
        if process == 0:
            _log.info("step %d is complete in the local folders of %d processes", candidate.step, len(by_folder))
        self._agreed_manifest = manifest
        max_bytes = max(1, max_read_bytes(self._options.host_bytes) // 4)
        folders = [one.folder for one in of_step]
        source = PooledCheckpoint(
            url, manifest, candidate.digest, files, folders, folder_numbers.tolist(), readable, max_bytes
        )
        counts = sum(
            (np.unpackbits(bits, count=len(folder_numbers)).astype(int) for bits in by_folder.values()),
            np.zeros(len(folder_numbers), int),
        )
        copies = self._local.domains.copies if self._local else 0
        whole = len(by_folder) == meeting.group.count and bool((counts > copies).all())
        return LocatedStep(candidate.step, source, has_all_copies=whole)

    def _usable(self, folder: Folder, data: str, files: Files, numbers: Mapping[str, int]) -> list[int]:
        """The files of a save that exist with the right length and have not failed to be read."""
        there = {
            numbers[key]: key
            for key in folder.files_below(data)
            if key in numbers and f"{folder.url}/{key}" not in self._unusable_files
        }
        try:
            misfits = folder.check_lengths({key: files.lengths[number] for number, key in there.items()})
        except StorageError as error:
            _log.warning("the local folder %s is not used: %s", folder.url, error)
            return []
        for key, why in misfits.items():
            _log.warning("the local file %s/%s is not used: it %s", folder.url, key, why)
        return [number for number, key in there.items() if key not in misfits]

    # Without communication -------------------------------------------------------------------------------

    def mark_damaged(self, source: PooledCheckpoint, error: DamagedError) -> None:
        """Note damaged files of a local step, so that copies in other processes are used."""
        _log.warning("local files of %s are damaged, and are not used: %s", source.url, error)
        self._unusable_files.update(source.damaged)

    def require_found(self, chosen: LocatedStep) -> int:
        """The number of a step that was found. Raises NotACheckpointError if none was."""
        if chosen.step is None:
            raise NotACheckpointError(f"{self._directory.url} has no steps")
        return chosen.step

    def record_restored(self, chosen: LocatedStep) -> None:
        """Note that a step was restored. All other steps of an earlier Checkpointer are no longer needed."""
        if self._local is not None:
            self._local.record_restored(chosen.local_save, complete=chosen.has_all_copies)

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics of the agreed local step, or of the last step that this Checkpointer saved. Raises
        NotACheckpointError."""
        record = None if self._agreed_manifest is None else self._agreed_manifest.step
        if (record is None or record.number != step) and self._local is not None:
            newest = self._local.newest
            ours = (one for one in self._local_steps() if one.candidate and one.candidate[:2] == newest)
            record = next((decode(one.content or b"", one.folder.url).step for one in ours), None)
        if record is None or record.number != step:
            more = ", and no local step of that number was restored or saved last" if self._local else ""
            raise NotACheckpointError(f"{self._directory.url} has no step {step}{more}")
        return dict(record.metrics)


def _read_local_step(process: str, folder: Folder, step: int) -> _LocalStep:
    """The local folder of a step. A manifest that is damaged, or of another step, counts as missing."""
    try:
        content = folder.read(MANIFEST)
        if content is None:
            return _LocalStep(process, folder, step, None, None)
        manifest = decode(content, folder.url)
        if manifest.step is not None and manifest.step.number == step:
            found = Candidate(step, manifest.save_id, hashlib.sha256(content).hexdigest())
            return _LocalStep(process, folder, step, content, found)
        why = "it is of another step"
    except (CorruptError, StorageError) as error:
        why = str(error)
    _log.warning("the manifest in %s is not used: %s", folder.url, why)
    return _LocalStep(process, folder, step, None, None)


def _publish_manifest(folder: Folder, data: str, content: bytes, *, sync: bool) -> None:
    """Publish the manifest of a complete save in a folder that has its data but lacks the manifest, so that the save
    does not depend on one copy of the manifest."""
    name = f"{data}/{MANIFEST}.{uuid.uuid4().hex}"
    try:
        folder.put(name, content, sync=sync)
        folder.rename(name, MANIFEST)
    except StorageError as error:
        _log.warning("the manifest is not in all local folders: %s", error)


def _bits(numbers: Sequence[int], count: int) -> Availability:
    """One bit per file, set for some of them."""
    there = np.zeros(count, bool)
    there[numbers] = True
    return np.packbits(there)


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
