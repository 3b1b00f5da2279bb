"""Reuse: objects that are unchanged since an earlier save are linked instead of written.

    the caller's thread:       own objects ─▶ their contents, by array identity ─▶ originals that still exist
    the thread that writes:    original ─▶ link; else data ─▶ digest, if requested ─▶ link; else write
    after publication:         contents, lengths and digests of the objects are kept for the next save

Each process decides this for its own objects, independently of the others.
"""

from __future__ import annotations

import errno
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxckpt._format import zarr
from jaxckpt._format.chunks import content_digest
from jaxckpt._format.pieces import Pieces
from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import JaxckptError, StorageError
from jaxckpt._runtime.options import Options
from jaxckpt._save.describe import Draft
from jaxckpt._save.plan import Object, SavePlan
from jaxckpt._save.staging import StagedObject
from jaxckpt._storage.manifests import load_manifest
from jaxckpt._storage.objects import ArrayWriter, Pending
from jaxckpt._storage.store import Store
from jaxckpt._storage.workers import ChainedWork, CompletedWork, MappedWork, submit

StoredObject = tuple[int, str, int, str, str]
"""Stack, grid index, length, digest and content digest of an object. The last is empty if it was not computed."""

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


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object that was written, or linked."""

    length: int
    digest: str
    content: str = ""
    linked: bool = False


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
    cache: ReuseCache | None
    base: BaseCheckpoint | None = None

    originals: Mapping[Object, Original] = field(default_factory=dict[Object, Original])
    """The objects that hold the same arrays as before."""

    content_keys: Mapping[tuple[int, str], tuple[_ContentKey, _Arrays]] = field(
        default_factory=dict[tuple[int, str], "tuple[_ContentKey, _Arrays]"]
    )
    """The content of each object of arrays, by stack and grid index."""

    @property
    def _compares(self) -> bool:
        """Whether objects are compared by content."""
        return self.options.reuse == "content" and self.store.can_link

    # The thread that writes -------------------------------------------------------------------------------

    def begin_object(
        self, staged: StagedObject, stack: Stack, writer: ArrayWriter, data: str
    ) -> tuple[Pending, Pieces | None]:
        """Start to link or write an object. Returns (work that results in a `WrittenObject`, data to keep until
        then)."""
        original = self.originals.get(staged.obj)
        source = None if original else staged.data()
        if source is not None and not self._compares:
            return MappedWork(writer.write(staged.obj.index, source), _await_write), source
        return ChainedWork(submit(functools.partial(self._link, staged, original, source, stack, writer, data))), source

    def _link(
        self,
        staged: StagedObject,
        original: Original | None,
        source: Pieces | None,
        stack: Stack,
        writer: ArrayWriter,
        data: str,
    ) -> Pending:
        """Link an object if possible, otherwise start to write it."""
        index = staged.obj.index
        content = original.content if original else ""
        if source is not None:
            content = content_digest(stack, index, source)
            original = self.base.by_content.get((*_stack_key(stack), content)) if self.base else None
        if original is not None and self.base is not None:
            key, sync = f"{data}/{zarr.object_key(stack, index)}", self.options.sync and not self.base.is_synced
            if self.store.link(self.base.store, original.key, key, original.length, sync=sync):
                return CompletedWork(WrittenObject(original.length, original.digest, content, linked=True))
        try:
            source = staged.data() if source is None else source
        except RuntimeError as error:  # raised by JAX for a deleted array
            assert original is not None, "other data is in memory already"
            raise StorageError(
                errno.ENOENT,
                f"{original.key} was to be reused but can no longer be linked, and the arrays that"
                " would be written instead were donated or deleted in the meantime: save again",
            ) from error
        return MappedWork(writer.write(index, source), functools.partial(_await_write, content=content))

    def keep(self, data: str, stacks: Sequence[Stack], objects: Iterable[StoredObject], linked_bytes: int) -> None:
        """After publication, keep what this process wrote for the next save."""
        last = self.cache
        if last is None:
            return
        if self.originals and not linked_bytes:
            last.has_links = False
        by_arrays, by_content = dict[_ContentKey, tuple[Original, _Arrays]](), dict[_ContentKey, Original]()
        for number, place, length, digest, content in objects:
            stack = stacks[number]
            original = Original(f"{data}/{stack.name}/c/{place}", length, digest, content)
            if found := self.content_keys.get((number, place)):
                held, arrays = found
                by_arrays[held] = original, arrays
            if content:
                by_content[*_stack_key(stack), content] = original
        last.base = BaseCheckpoint(self.store, self.options.sync, by_arrays, by_content)


def plan_reuse(store: Store, draft: Draft, plan: SavePlan, options: Options, last: ReuseCache | None) -> Reuse:
    """Find the objects that need not be written again, and note the content of each object."""
    if options.reuse is None or not store.can_link:
        return Reuse(store, options, None)
    base = last.base if last else None
    if base is None and options.reuse == "content":
        base = next(filter(None, map(_load_base, (store, last.newest() if last else None))), None)
    if last is None or not last.has_links:
        return Reuse(store, options, last, base)
    values = draft.values
    array_types = {kind for kind in {*map(type, values.values())} if issubclass(kind, jax.Array)}
    originals, holds = dict[Object, Original](), dict[tuple[int, str], tuple[_ContentKey, _Arrays]]()
    for obj in plan.objects:
        rows = [values[leaf] for leaf in plan.members[obj.stack][slice(*obj.box[0])]]
        if plan.exchanged[obj.stack] or not array_types.issuperset(map(type, rows)):
            continue
        held = (*_stack_key(plan.stacks[obj.stack]), obj.box[1:], *map(id, rows))
        known = base.by_arrays.get(held) if base else None
        if known and all(map(operator.is_, [array() for array in known[1]], rows)):
            originals[obj], arrays = known
        else:
            arrays = [*map(weakref.ref, rows)]
        holds[obj.stack, obj.index_key] = held, arrays
    if base and originals:
        try:
            odd = base.store.check_lengths({original.key: original.length for original in originals.values()})
        except JaxckptError:
            odd = None  # the store cannot be read, so nothing is reused
        originals = {obj: found for obj, found in originals.items() if odd is not None and found.key not in odd}
    return Reuse(store, options, last, base, originals, holds)


def _load_base(store: Store | None) -> BaseCheckpoint | None:
    """The checkpoint at a store, if it has content digests."""
    if store is None:
        return None
    try:
        manifest, _ = load_manifest(store)
    except JaxckptError:  # no checkpoint, or a damaged one, so everything is written
        return None
    found = dict[_ContentKey, Original]()
    for record, stack in zip(manifest.stacks, manifest.decoded_stacks, strict=True):
        for place, content in record.contents.items():
            key = f"{manifest.data_folder}/{stack.name}/c/{place}"
            found[*_stack_key(stack), content] = Original(key, *record.objects[place], content)
    return BaseCheckpoint(store, by_content=found) if found else None


def _await_write(pending: Pending, content: str = "") -> WrittenObject:
    length, digest = pending.result()
    return WrittenObject(length, digest, content)


def _stack_key(stack: Stack) -> _ContentKey:
    return stack.dtype, stack.chunk, stack.object, stack.compression
