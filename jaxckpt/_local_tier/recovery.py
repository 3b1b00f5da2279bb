"""Recovery: whether the local folders of all processes together hold a whole step.

each process: its steps ─▶ process 0: saves, newest first ─▶ each process: its files ─▶ the first complete save
"""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier.peer_reads import Availability, Candidate, DamagedError, Files, missing_files
from jaxckpt._local_tier.tier import LocalSteps, pack, unpack
from jaxckpt._local_tier.union_source import UnionCheckpoint
from jaxckpt._model.file_names import MANIFEST, is_sealed
from jaxckpt._model.manifest import decode
from jaxckpt._model.records import Manifest, StepRecord
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._restore.read_plan import max_read_bytes
from jaxckpt._run_folder.steps import is_step, step_name
from jaxckpt._store.folder import Folder
from jaxckpt._store.load_manifest import read_copy
from jaxckpt.errors import CheckpointExistsError, CorruptError, ManifestError, NotACheckpointError, StorageError


@dataclass(frozen=True, slots=True)
class LocatedStep:
    """A step, and its location."""

    step: int | None
    """None if no step exists."""

    local_source: UnionCheckpoint | None = None
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
class LocalStep:
    """The folder of a local step that this process sees."""

    folder_id: str
    """The id of its parent folder."""

    folder: Folder
    step: int

    content: bytes | None
    """The manifest of the step."""

    candidate: Candidate | None


class Recovery:
    """Finds whole steps in the local folders of a run. Every process creates one."""

    def __init__(self, tier: LocalSteps, options: Options) -> None:
        self._tier = tier
        self._options = options
        self._unusable_files = set[str]()
        """Files that this process could not read, by their paths."""

        self._agreed_manifest: Manifest | None = None
        """The step that was agreed on last."""

    def steps(self) -> Iterator[LocalStep]:
        """The steps in the local folders that this process sees."""
        for name, process in self._tier.folders().values():
            try:
                steps = list(filter(is_step, process.names()))
            except StorageError as error:
                _log.warning("the local folder %s is not used: %s", process.url, error)
                continue
            yield from (_read_step(name, process.child(step), int(step)) for step in steps)

    def find_whole(
        self,
        rendezvous: Rendezvous,
        url: str,
        candidate: Candidate,
        sender: int | None,
        local_steps: Sequence[LocalStep],
        *,
        allow_peers: bool,
    ) -> LocatedStep | None:
        """A save in the local folders of all processes; None unless it is complete. Every process.

        `url` is the run. `sender` is the process that sends the manifest to those that lack it, if any does. Without
        `allow_peers`, the step counts only if each process sees all of its files.
        """
        process = rendezvous.call.index
        content = next((local_step.content for local_step in local_steps if local_step.candidate == candidate), None)
        if sender is not None:
            texts = rendezvous.gather(pack(content) if content is not None and process == sender else "")
            content = unpack(rendezvous.broadcast(texts[sender] if texts else ""))
            rendezvous.start_next()
        url = f"{url}/{step_name(candidate.step)} (local)"
        if content is None or hashlib.sha256(content).hexdigest() != candidate.digest:
            raise ManifestError(f"the manifest of {url} was lost or changed in transit")
        manifest = decode(content, url)
        files = Files.of(manifest)
        of_step = [local_step for local_step in local_steps if local_step.step == candidate.step]
        folder_numbers = np.full(len(files.keys), -1)
        numbers = {key: number for number, key in enumerate(files.keys)}
        nothing = _bits([], len(folder_numbers))
        usable: dict[str, Availability] = {}
        for number, local_step in enumerate(of_step):
            file_numbers = self._usable(local_step.folder, manifest.data_folder, files, numbers)
            folder_numbers[file_numbers] = number
            usable[local_step.folder_id] = usable.get(local_step.folder_id, nothing) | _bits(
                file_numbers, len(folder_numbers)
            )
        texts = rendezvous.gather(json.dumps({name: pack(bits.tobytes()) for name, bits in usable.items()}))
        usable_by_process = [
            {name: np.frombuffer(unpack(bits), np.uint8) for name, bits in bits_by_folder.items()}
            for bits_by_folder in json.loads(rendezvous.broadcast(f"[{','.join(texts)}]"))
        ]
        by_folder: dict[str, Availability] = {}
        for name, bits in itertools.chain.from_iterable(map(dict.items, usable_by_process)):
            by_folder[name] = by_folder.get(name, bits) & bits
        # A process is asked only for files that it can read. Another process may see more files in the same folder.
        readable = np.array(
            [np.bitwise_or.reduce([nothing, *bits_by_folder.values()]) for bits_by_folder in usable_by_process]
        )
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
        for local_step in of_step:
            if local_step.candidate != candidate and manifest.data_folder in local_step.folder.names():
                _publish_manifest(local_step.folder, manifest.data_folder, content, sync=self._options.sync)
        if process == 0:
            _log.info("step %d is complete in the local folders of %d processes", candidate.step, len(by_folder))
        self._agreed_manifest = manifest
        max_bytes = max(1, max_read_bytes(self._options.host_bytes) // 4)
        folders = [local_step.folder for local_step in of_step]
        source = UnionCheckpoint(
            url, manifest, candidate.digest, files, folders, folder_numbers.tolist(), readable, max_bytes
        )
        counts = sum(
            (np.unpackbits(bits, count=len(folder_numbers)).astype(int) for bits in by_folder.values()),
            np.zeros(len(folder_numbers), int),
        )
        has_all_copies = bool((counts > self._tier.domains.copies).all())
        return LocatedStep(candidate.step, source, has_all_copies and len(by_folder) == rendezvous.call.count)

    def _usable(self, folder: Folder, data: str, files: Files, numbers: Mapping[str, int]) -> list[int]:
        """The files of a save that exist with the right length and have not failed to be read."""
        keys = {
            numbers[key]: key
            for key in folder.files_below(data)
            if key in numbers and f"{folder.url}/{key}" not in self._unusable_files
        }
        try:
            misfits = folder.check_lengths({key: files.lengths[number] for number, key in keys.items()})
        except StorageError as error:
            _log.warning("the local folder %s is not used: %s", folder.url, error)
            return []
        for key, why in misfits.items():
            _log.warning("the local file %s/%s is not used: it %s", folder.url, key, why)
        return [number for number, key in keys.items() if key not in misfits]

    def mark_damaged(self, source: UnionCheckpoint, error: DamagedError) -> None:
        """Note damaged files of a local step, so that copies in other processes are used."""
        _log.warning("local files of %s are damaged, and are not used: %s", source.url, error)
        self._unusable_files.update(source.damaged)

    def record(self, step: int) -> StepRecord | None:
        """The record of the step that was agreed on last, or of the last one that this Checkpointer saved."""
        record = None if self._agreed_manifest is None else self._agreed_manifest.step
        if record is None or record.number != step:
            newest = self._tier.newest
            ours = (
                local_step for local_step in self.steps() if local_step.candidate and local_step.candidate[:2] == newest
            )
            record = next((decode(local_step.content or b"", local_step.folder.url).step for local_step in ours), None)
        return record if record is not None and record.number == step else None


def _read_step(process: str, folder: Folder, step: int) -> LocalStep:
    """The local folder of a step. A lost manifest is restored from its second copy. A manifest that is damaged without
    a copy, or of another step, counts as missing."""
    try:
        content = folder.read(MANIFEST)
        if (content is None or not is_sealed(content)) and (data := folder.published_data()):
            copied, content, _, _ = read_copy(folder)
            _log.warning("%s had lost its %s, which is restored from its copy in %s", folder.url, MANIFEST, data[0])
            _publish_manifest(folder, copied, content, sync=False)
        if content is None:
            return LocalStep(process, folder, step, None, None)
        manifest = decode(content, folder.url)
        if manifest.step is not None and manifest.step.number == step:
            candidate = Candidate(step, manifest.save_id, hashlib.sha256(content).hexdigest())
            return LocalStep(process, folder, step, content, candidate)
        why = "it is of another step"
    except (CorruptError, StorageError, NotACheckpointError, CheckpointExistsError) as error:
        why = str(error)
    _log.warning("the manifest in %s is not used: %s", folder.url, why)
    return LocalStep(process, folder, step, None, None)


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
    is_set = np.zeros(count, bool)
    is_set[numbers] = True
    return np.packbits(is_set)
