"""The source of a restore, a plan, a comparison or a conversion: a manifest, and a reader of boxes for each stack."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from jaxckpt._model.grid import Box
from jaxckpt._model.records import Manifest
from jaxckpt._pipeline.lanes import operate
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import ArrayReader, Store
from jaxckpt.errors import DataError, NotACheckpointError, Problem, show_count, show_path


class Source(Protocol):
    """The source of a restore, a plan, a comparison or a conversion."""

    @property
    def url(self) -> str:
        """The path as the user gave it."""
        ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest. Processes that open the same checkpoint have the same digest."""
        ...

    def require_metadata(self, stacks: Sequence[int]) -> None:
        """Raise DataError unless the small files that describe these stacks are as they were saved. In a lane."""
        ...

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        """A reader of boxes of a stack, like `Store.array_reader`."""
        ...

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        """Check that what was just read of the leaves with these numbers is of the same save as the manifest. Raises
        StorageError if the checkpoint was replaced, DataError if it was deleted. In a lane."""
        ...

    def change_since_open(self) -> str | None:
        """What happened to the checkpoint after it was opened: that its URL "was deleted", "was replaced by another" or
        "was stripped of some of its leaves"; None if it is unchanged."""
        ...


@dataclass(frozen=True, slots=True)
class NativeCheckpoint:
    """A jaxckpt checkpoint."""

    store: Store
    manifest: Manifest
    digest: str

    keeps_readers: bool = False
    """Whether readers are kept for later reads, with the indexes of the objects that they have read."""

    _intact: set[int] = field(default_factory=set[int], compare=False, repr=False)
    """The stacks whose metadata was found intact since the checkpoint was opened."""

    _readers: dict[int, ArrayReader] = field(default_factory=dict[int, ArrayReader], compare=False, repr=False)
    """The readers that are kept, by stack."""

    @classmethod
    def at(cls, store: Store, digest: str | None = None) -> Self:
        """The checkpoint at a path. If the digest of its manifest is given, it must match. Raises NotACheckpointError,
        ManifestError."""
        manifest, content = load_manifest(store, digest)
        return cls(store, manifest, hashlib.sha256(content).hexdigest())

    @property
    def url(self) -> str:
        return self.store.url

    def require_metadata(self, stacks: Sequence[int]) -> None:
        """Check every zarr.json. jaxckpt does not use it, but other Zarr readers do."""
        stacks = [number for number in stacks if number not in self._intact]
        if not stacks:
            return
        records = [self.manifest.stacks[number] for number in stacks]
        keys = [f"{self.manifest.data_folder}/{record.name}/zarr.json" for record in records]
        texts = operate(f"reading the metadata of {self.url}", lambda: self.store.read_all(keys))
        problems: list[Problem] = []
        for number, record, key, text in zip(stacks, records, keys, texts, strict=True):
            if text is None or hashlib.sha256(text).hexdigest() != record.sha256:
                reason = "is missing" if text is None else "differs from the file that was saved"
                if len(problems) < 20:  # naming the leaves of thousands of stacks would take too long
                    reason += f"; it describes {show_leaves(paths_at(self.manifest, number, (0, record.rows)))}"
                problems.append(Problem(None, reason, object=f"{self.url}/{key}"))
        if problems:
            remedy = f"`jaxckpt repair {shlex.quote(self.url)}` writes what is lost again, if it can"
            raise DataError.of(f"{show_count(len(problems), 'metadata file')} changed after the save", problems, remedy)
        self._intact.update(stacks)

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        if (kept := self._readers.get(stack)) is not None:
            return kept
        manifest = self.manifest
        stored = manifest.stacks[stack].objects
        reader = self.store.array_reader(manifest.data_folder, manifest.decoded_stacks[stack], stored, plan)
        if self.keeps_readers and reader.serves_any_plan:
            self._readers[stack] = reader
        return reader

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        """Each save has a data folder of its own."""

    def change_since_open(self) -> str | None:
        try:
            now, _ = load_manifest(self.store)
        except NotACheckpointError:
            return f"{self.url} was deleted"
        if now.save_id != self.manifest.save_id:
            return f"{self.url} was replaced by another"
        stacks = {stack.name for stack in now.stacks}
        is_whole = all(stack.name in stacks for stack in self.manifest.stacks)
        return None if is_whole else f"{self.url} was stripped of some of its leaves"


def paths_at(manifest: Manifest, stack: int, rows: tuple[int, int]) -> list[str]:
    """The paths of the leaves in a range of rows of a stack."""
    return [leaf.path for leaf in manifest.leaves if leaf.stack == stack and leaf.row in range(*rows)]


def show_leaves(paths: Sequence[str]) -> str:
    """The first of these leaves, and how many others there are, for an error message."""
    named = ", ".join(show_path(path[:200]) for path in paths[:3])
    named += f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{'leaf' if len(paths) == 1 else 'leaves'} {named}"
