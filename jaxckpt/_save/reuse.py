"""Reuse: objects that are unchanged since an earlier save are linked instead of written.

    when it is planned:        own objects ─▶ arrays on accelerators, by identity ─▶ originals that still exist
    while it is written:       original ─▶ link; else data ─▶ sample ─▶ digest ─▶ link; else write
    after publication:         contents, lengths and digests of the objects are kept for the next save

Each process decides this for its own objects, independently of the others.

Identity proves equality only for arrays in the memory of accelerators. In host memory, another library may have changed
a jax.Array in place (see `may_be_shared`), so there only digests prove it.

With `reuse="auto"`, the digest of an object is computed only where it may be useful: in the first save of a
Checkpointer, and later if a sample of the object has not changed since the last save. Objects are linked only if their
complete digests are equal.
"""

from __future__ import annotations

import errno
import functools
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxckpt._model import zarr
from jaxckpt._model.chunks import content_digest, sample_digest
from jaxckpt._model.pieces import Pieces
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import MappedWork, submit
from jaxckpt._save.describe import Draft
from jaxckpt._save.staging import StagedObject, may_be_shared
from jaxckpt._save.write_plan import Object, SavePlan
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import ArrayWriter, ObjectRecord, Store
from jaxckpt.errors import JaxckptError, StorageError

_NO_LINKS = "object stores have no links"
_LOST = "their files of the last save are missing or have changed"
_NO_DIGEST = "the last save did not compute their digests; the next save can link them"
_HOST_MEMORY = 'arrays in host memory may have been changed in place, and reuse="identity" does not compare them'

_ContentKey = tuple[Any, ...]
"""What determines the bytes of an object: its stack's dtype and sides, and either its box and the identities of the
arrays in its rows, or the digest of its content."""


_Arrays = Sequence[weakref.ref[Any]]
"""The arrays in the rows of an object."""


@dataclass(frozen=True, slots=True)
class Original:
    """An object of an earlier checkpoint."""

    key: str
    """Its key, relative to that checkpoint's path."""

    length: int
    digest: str
    content: str
    """The digest of its content; empty if not recorded."""

    sample: bytes = b""
    """The digest of its sample; empty if not computed."""


_UNWRITTEN = ObjectRecord(0, "")


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object that was written, or linked."""

    record: ObjectRecord = _UNWRITTEN

    sample: bytes = b""
    """The digest of its sample; empty if not computed."""

    linked: bool = False
    unlinked: str = ""
    """Why it was written although it seems unchanged since the last save."""

    refused: bool = False
    """Whether the storage refused the link."""


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """The objects of a published checkpoint that this process may reuse."""

    store: Store

    is_synced: bool = False
    """Whether its objects are known to be on disk."""

    by_arrays: Mapping[_ContentKey, tuple[Original, _Arrays]] = field(
        default_factory=dict[_ContentKey, "tuple[Original, _Arrays]"]
    )
    """Each entry has references to the saved arrays, because a new array may get the identity of one that was freed."""

    by_content: Mapping[_ContentKey, Original] = field(default_factory=dict[_ContentKey, Original])

    stacks: Sequence[Stack] = ()
    by_index_key: Mapping[tuple[int, str], Original] = field(default_factory=dict[tuple[int, str], Original])
    """By stack and grid index. Their samples are compared with those of a save with the same stacks."""


@dataclass(slots=True)
class ReuseCache:
    """The last published save of a Checkpointer."""

    newest: Callable[[], Store | None]
    """Finds the newest step, for the first save."""

    base: BaseCheckpoint | None = None

    has_links: bool = True
    """False after the storage has refused all links of a save."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """The objects of a save that this process does not write again."""

    store: Store
    options: Options
    cache: ReuseCache | None = None
    base: BaseCheckpoint | None = None

    compares: bool = False
    """Whether objects of other arrays are compared by content."""

    originals: Mapping[Object, Original] = field(default_factory=dict[Object, Original])
    """The objects that hold the same arrays as before."""

    unlinked: Mapping[Object, str] = field(default_factory=dict[Object, str])
    """Why other objects that hold the same arrays as before cannot be linked."""

    content_keys: Mapping[Object, tuple[_ContentKey, _Arrays]] = field(
        default_factory=dict[Object, "tuple[_ContentKey, _Arrays]"]
    )
    """The content of each object of arrays."""

    by_index_key: Mapping[tuple[int, str], Original] = field(default_factory=dict[tuple[int, str], Original])
    """The objects of the last save by stack and grid index, if it had the same stacks."""

    # While the data is written ----------------------------------------------------------------------------

    def with_stored_base(self) -> Reuse:
        """For the first save: compares with the checkpoint that is overwritten, or with the newest step."""
        try:
            base = _load_base(self.store) or (_load_base(self.cache.newest()) if self.cache else None)
        except JaxckptError:  # the directory cannot be read
            base = None
        return replace(self, base=base)

    def write_or_link(
        self, staged: StagedObject, stack: Stack, writer: ArrayWriter, folder: str
    ) -> tuple[Pending[WrittenObject], Pieces | None]:
        """Start to write an object, or to link it if an equal one exists. Returns (work that results in a
        `WrittenObject`, data to keep until then)."""
        obj = staged.obj
        original, source = self.originals.get(obj), None
        if original is not None:
            written = WrittenObject(_UNWRITTEN._replace(content=original.content), original.sample)
        else:
            source, last = staged.data(), self.by_index_key.get((obj.stack, obj.index_key))
            reason = self.unlinked.get(obj, "")
            written = WrittenObject(unlinked=reason, refused=bool(reason) and not self.store.can_link)
            if self.compares:
                written = replace(written, sample=sample_digest(source))
            changed = self.options.reuse == "auto" and last is not None and last.sample != written.sample
            if last is not None and last.sample == written.sample and not last.content:
                written = replace(written, unlinked=_NO_DIGEST)
            if not self.compares or changed or not (self.base and self.base.by_content):
                work = writer.write(obj.index, source, self.compares and not changed)
                return MappedWork(work, functools.partial(_await_write, written)), source
        return submit(functools.partial(self._link, staged, written, source, stack, writer, folder)), source

    def _link(
        self,
        staged: StagedObject,
        written: WrittenObject,
        source: Pieces | None,
        stack: Stack,
        writer: ArrayWriter,
        folder: str,
    ) -> WrittenObject:
        """Link an object if possible, otherwise write it. `source` is None if it has an original."""
        index = staged.obj.index
        original = self.originals.get(staged.obj)
        if source is not None:
            written = replace(written, record=_UNWRITTEN._replace(content=content_digest(stack, index, source)))
            original = self.base.by_content.get((*_stack_key(stack), written.record.content)) if self.base else None
        if original is not None and self.base is not None:
            key, sync = f"{folder}/{zarr.object_key(stack, index)}", self.options.sync and not self.base.is_synced
            try:
                self.store.link(self.base.store, original.key, key, original.length, sync=sync)
                record = ObjectRecord(original.length, original.digest, written.record.content)
                return replace(written, record=record, linked=True)
            except StorageError as error:
                lost = error.errno in (errno.ENOENT, errno.ESTALE)
                reason = _LOST if lost else f"the file system refuses links ({os.strerror(error.errno or errno.EIO)})"
                written = replace(written, unlinked=reason, refused=not lost)
        try:
            source = staged.data() if source is None else source
        except RuntimeError as error:  # raised by JAX for a deleted array
            assert original is not None, "other data is in memory already"
            raise StorageError(
                errno.ENOENT,
                f"{original.key} was to be reused but can no longer be linked, and the arrays that"
                " would be written instead were donated or deleted in the meantime: save again",
            ) from error
        # The digest again, of the bytes that are written: another library may change the memory in the meantime.
        return _await_write(written, writer.write(index, source, bool(written.record.content)))

    def remember(self, folder: str, stacks: Sequence[Stack], objects: Iterable[tuple[Object, WrittenObject]]) -> None:
        """After publication, remember in the cache, if there is one, what this process wrote, for the next save."""
        if (last := self.cache) is None:
            return
        by_arrays, by_content = dict[_ContentKey, tuple[Original, _Arrays]](), dict[_ContentKey, Original]()
        by_index_key = dict[tuple[int, str], Original]()
        linked = refused = False
        for obj, written in objects:
            linked, refused = linked or written.linked, refused or written.refused
            stack, record = stacks[obj.stack], written.record
            key = f"{folder}/{zarr.object_key(stack, obj.index)}"
            original = Original(key, record.length, record.digest, record.content, written.sample)
            if entry := self.content_keys.get(obj):
                content_key, arrays = entry
                by_arrays[content_key] = original, arrays
            if record.content:
                by_content[*_stack_key(stack), record.content] = original
            if written.sample:
                by_index_key[obj.stack, obj.index_key] = original
        # The first save looks at files that another user may have written; whether its own can be linked is not known.
        if linked or (refused and self.base is not None):
            last.has_links = linked
        last.base = BaseCheckpoint(self.store, self.options.sync, by_arrays, by_content, stacks, by_index_key)


def plan_reuse(store: Store, draft: Draft, plan: SavePlan, options: Options, last: ReuseCache | None) -> Reuse:
    """Find the objects that need not be written again, and note the content of each object."""
    compares = store.can_link and (options.reuse == "content" or (options.reuse == "auto" and last is not None))
    if options.reuse is None or last is None:
        return Reuse(store, options, compares=compares)
    base = last.base
    if options.reuse == "content" or not last.has_links:
        return Reuse(store, options, last, base, compares=compares and options.reuse == "content")
    values = draft.values
    array_types = {kind for kind in {*map(type, values.values())} if issubclass(kind, jax.Array)}
    originals, holds = dict[Object, Original](), dict[Object, tuple[_ContentKey, _Arrays]]()
    unlinked = dict[Object, str]()
    for obj in plan.objects:
        rows = [values[leaf] for leaf in plan.leaves[obj.stack][slice(*obj.box[0])]]
        if plan.exchanged[obj.stack] or not array_types.issuperset(map(type, rows)):
            continue
        is_proof = not any(map(may_be_shared, rows))
        if not is_proof and compares:
            continue
        content_key = (*_stack_key(plan.stacks[obj.stack]), obj.box[1:], *map(id, rows))
        entry = base.by_arrays.get(content_key) if base else None
        if entry and all(map(operator.is_, [array() for array in entry[1]], rows)):
            originals[obj], arrays = entry
            if not is_proof:
                unlinked[obj] = _HOST_MEMORY
        else:
            arrays = [*map(weakref.ref, rows)]
        holds[obj] = content_key, arrays
    if not store.can_link:
        unlinked = dict.fromkeys(originals, _NO_LINKS)
    elif base and (lengths := {entry.key: entry.length for obj, entry in originals.items() if obj not in unlinked}):
        try:
            problems = base.store.check_lengths(lengths)
        except JaxckptError:
            problems = dict.fromkeys(lengths, "")  # the store cannot be read
        unlinked |= {obj: _LOST for obj, original in originals.items() if original.key in problems}
    originals = {obj: original for obj, original in originals.items() if obj not in unlinked}
    by_index_key = base.by_index_key if base and compares and base.stacks == plan.stacks else {}
    return Reuse(store, options, last, base, compares, originals, unlinked, holds, by_index_key)


def _load_base(store: Store | None) -> BaseCheckpoint | None:
    """The checkpoint at a store, if it has content digests."""
    if store is None:
        return None
    try:
        manifest, _ = load_manifest(store)
    except JaxckptError:  # no checkpoint, or a damaged one, so everything is written
        return None
    by_content = dict[_ContentKey, Original]()
    for record, stack in zip(manifest.stacks, manifest.decoded_stacks, strict=True):
        for index_key, content in record.contents.items():
            key = f"{manifest.data_folder}/{stack.name}/c/{index_key}"
            by_content[*_stack_key(stack), content] = Original(key, *record.objects[index_key], content)
    return BaseCheckpoint(store, by_content=by_content) if by_content else None


def _await_write(written: WrittenObject, pending: Pending[ObjectRecord]) -> WrittenObject:
    return replace(written, record=pending.result())


def _stack_key(stack: Stack) -> _ContentKey:
    return stack.dtype, stack.chunk_sides, stack.object_sides, stack.compression
