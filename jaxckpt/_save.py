"""Saving: tree → leaves → plan → device-to-host copies → store.write → barrier → manifest."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxckpt import _manifest as manifests
from jaxckpt._coord import Group
from jaxckpt._errors import (
    CheckpointExistsError,
    InputError,
    LayoutError,
    PathNotSharedError,
    PeersDisagreeError,
    SpecError,
    StorageError,
    TreeError,
    listing,
)
from jaxckpt._grid import Box, Layout, Spec, contains, extent, intersection, layout_of, spec_of, volume, whole, within
from jaxckpt._layout import (
    LayoutTable,
    Specs,
    addressable_boxes,
    by_axis_name,
    covers,
    fit_spec,
    mesh_axes,
    partition_spec,
    placement,
    resolve_specs,
)
from jaxckpt._manifest import LeafRecord, Manifest, StackRecord
from jaxckpt._options import Options
from jaxckpt._plan import ArrayLeaf, Object, SavePlan, plan_save
from jaxckpt._progress import Report, reporting
from jaxckpt._store import MANIFEST, WRITER, Array, Pending, Store, Writer, aligned_empty, storage_errors
from jaxckpt._tree import DTYPES, MAX_RANK, Leaf, Structure, Tree, encode_value, flatten, show


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What a save wrote."""

    path: str
    save_id: str
    leaves: int

    total_bytes: int
    """Bytes of array data in the checkpoint, replicas once."""

    process_bytes: tuple[int, ...]
    """Bytes of array data that each process wrote."""

    objects: int
    """Objects that hold the array data."""

    files: int
    """Files of the checkpoint: objects, one zarr.json a stack, and the manifest."""

    stored_bytes: int
    """Bytes of the objects, checksums and indexes included."""

    seconds: float
    """Seconds that the call took in this process."""

    phase_seconds: Mapping[str, float]
    """Seconds of each phase of it: "plan", "begin", "write", "publish"."""


def save(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    metadata: Any = None,
    overwrite: bool = False,
    options: Options | None = None,
) -> SaveInfo:
    """Write a pytree as a checkpoint; every process of the job calls it, with the same arguments.

    Each process writes boxes that its own devices hold, each byte of the tree once in the whole job. The checkpoint
    appears at `path` whole, when all is on disk, or not at all.

    Args:
        path: A local path, or a URL that tensorstore takes ("gs://…", "s3://…", "memory://…", "file://…").
        tree: A pytree. Leaves: jax.Array of any sharding and dtype, typed PRNG keys, NumPy arrays and scalars, int,
            float, complex, bool, str, bytes; None. Leaves on one host (all but jax.Array) are taken from process 0.
        mesh: Store each jax.Array as if it lay on this mesh. Without it each is stored in the layout it has.
        specs: With `mesh`, the PartitionSpec of each leaf: one for all, a pytree prefix of them, or a function of
            (path, leaf). Without it each leaf keeps its own, by axis name.
        metadata: Any JSON value; it comes back as `open(path).metadata`.
        overwrite: Replace the checkpoint at `path`. The old one is deleted only after the new one is published.
        options: Sizes, compression, timeouts, progress; see `Options`.

    Returns:
        What was written, how much by whom, and how long each phase took.

    Raises:
        TreeError: A leaf or key that cannot be stored.
        SpecError: A spec that does not fit its leaf or the mesh.
        CheckpointExistsError: Something is at `path`, and `overwrite` is false or it is no checkpoint.
        StorageError: No space, no permission, an I/O error.
        PeerError: Another process failed, is silent, was given another tree, or does not see `path`.

    Example:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/save", {"w": jnp.ones((8, 4)), "step": 3}, overwrite=True)
        >>> info.total_bytes
        128
    """
    options = options or Options()
    group = Group.current(options.timeout_seconds)  # first of all: a call that raises counts like any other
    first = group.index == 0
    clock = _Clock()
    claim = _Claim()
    try:
        with group.meeting("preparing to save") as meeting:
            store = Store.at(path)
            _check_metadata(metadata)
            draft = describe(tree, mesh, specs, options)
            plan = plan_save(draft.arrays, options)
            clock.lap("plan")
            digests = meeting.gather(_digest_of(draft, plan, metadata))
            if first:
                _require_one_tree(digests)
                claim = _claim(store, plan, overwrite)
            save_id = meeting.share(claim.save_id)
        data = f"data-{save_id}"
        with group.meeting("looking for the checkpoint's folder") as meeting:
            _require_shared(store, data, group.index)
            meeting.barrier()
        clock.lap("begin")
        with group.meeting("saving") as meeting:
            own_bytes = plan.process_bytes().get(group.index, 0)
            with reporting("save", own_bytes, options.progress) as report:
                written = list(_write(store, data, plan, draft, group.index, options, report))
            clock.lap("write")
            shares = [json.loads(text) for text in meeting.gather(json.dumps(written))]
            if first:
                manifest = _compose(save_id, plan, draft, metadata, shares)
                if options.sync:
                    store.sync_data(data, plan.stacks)
                store.publish(data, manifests.encode(manifest), claim.previous, sync=options.sync)
            stored_bytes = int(meeting.share(str(sum(length for share in shares for _, _, length, _ in share))))
    except BaseException:
        claim.release(keep=False)
        raise
    claim.release(keep=True)
    clock.lap("publish")
    loads = plan.process_bytes()
    return SaveInfo(
        store.url,
        save_id,
        len(draft.records),
        sum(loads.values()),
        tuple(loads.get(process, 0) for process in range(group.count)),
        len(plan.objects),
        len(plan.objects) + len(plan.stacks) + 1,
        stored_bytes,
        sum(clock.laps.values()),
        clock.laps,
    )


@dataclass(frozen=True, slots=True)
class _Claim:
    """What process 0 holds of a path while it saves there; the other processes hold nothing."""

    save_id: str = ""
    writer: Writer | None = None
    previous: bytes | None = None
    """The manifest that this save replaces."""

    def release(self, *, keep: bool) -> None:
        """Let go: with the new data in place of the old, or without a trace."""
        if self.writer is None:
            return
        if not keep:
            self.writer.release(keep=False)
            return
        # The checkpoint is published: what cannot be tidied up now is swept by the next save.
        with contextlib.suppress(StorageError):
            self.writer.release(keep=True)
            old = None if self.previous is None else manifests.data_of(self.previous)
            if old is not None:
                self.writer.store.delete(old)


def _claim(store: Store, plan: SavePlan, overwrite: bool) -> _Claim:
    """Sweep what dead saves left, and make the data folder with every stack's zarr.json."""
    previous = _previous(store, overwrite)
    store.sweep(None if previous is None else manifests.data_of(previous))
    claim = _Claim(save_id := uuid.uuid4().hex, store.begin(save_id), previous)
    try:
        for stack in plan.stacks:
            store.create_array(f"data-{save_id}", stack)
    except BaseException:
        claim.release(keep=False)
        raise
    return claim


def _digest_of(draft: _Draft, plan: SavePlan, metadata: Any) -> str:
    """What must be the same in every process: leaf paths, shapes, dtypes, who writes what, the metadata.

    And the values of replicated integer scalars, such as an optimizer's count: where a process has missed a call,
    they tell the steps apart that would otherwise be saved as one.
    """
    counts = [
        (number, int(value.addressable_data(0)))
        for number, value in draft.values.items()
        if isinstance(value, jax.Array) and _is_replicated_count(value)
    ]
    told = ([record.path for record in draft.records], plan, json.dumps(metadata), counts)
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _is_replicated_count(value: jax.Array) -> bool:
    integer = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)
    return integer and value.committed and value.is_fully_replicated and not value.is_fully_addressable


def _require_one_tree(digests: Sequence[str]) -> None:
    others = [process for process, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise PeersDisagreeError(
            f"processes {others} were given a tree of other leaves, shapes or shardings than process 0; every process"
            " must pass the same global tree. An array that each process committed to a device of its own is not"
            " global: replicate it over the mesh, or pass it as NumPy, which process 0 then writes"
        )


def _require_shared(store: Store, data: str, process: int) -> None:
    if store.read(f"{data}/{WRITER}") is None:
        raise PathNotSharedError(
            f"process {process} does not see {store.url}/{data}, which process 0 has just made."
            " All processes must be given one shared folder or object store."
        )


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _check_metadata(metadata: Any) -> None:
    """Raise InputError unless the user's metadata comes back from JSON as it is."""
    try:
        same = bool(json.loads(json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()) == metadata)
    except (TypeError, ValueError) as error:
        raise InputError(f"metadata must be plain JSON: {error}") from error
    if not same:
        raise InputError("metadata must be plain JSON (str keys, lists for tuples): it would not come back equal")


def _previous(store: Store, overwrite: bool) -> bytes | None:
    """The manifest that this save is to replace. Raises CheckpointExistsError where it may not."""
    if store.is_file():
        raise CheckpointExistsError(f"{store.url} is a file; give a new or empty folder")
    names = store.names()
    if MANIFEST in names:
        if not overwrite:
            raise CheckpointExistsError(f"a checkpoint is at {store.url}; pass overwrite=True to replace it")
        return store.read(MANIFEST)
    foreign = [name for name in names if not name.startswith("data-")]
    if foreign:
        raise CheckpointExistsError(
            f"{store.url} holds other files ({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''});"
            " give a new or empty folder"
        )
    return None


# The tree as leaves with layouts --------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """The tree as it will be recorded, with the values of its array leaves by leaf number."""

    structure: Structure
    records: list[LeafRecord] = field(default_factory=list[LeafRecord])
    arrays: list[ArrayLeaf] = field(default_factory=list[ArrayLeaf])
    values: dict[int, jax.Array | Array] = field(default_factory=dict[int, "jax.Array | Array"])
    table: LayoutTable = field(default_factory=LayoutTable)


_HOST = ((0,),)  # the holders of a host-local leaf's one cell: process 0


def describe(tree: Tree, mesh: Mesh | None, specs: Specs, options: Options) -> _Draft:
    """Flatten a tree and find how each leaf will be stored. TreeError and SpecError list all leaves at fault."""
    if specs is not None and mesh is None:
        raise InputError("save(specs=…) needs mesh=: the mesh that the specs are of")
    leaves, structure = flatten(tree)
    draft = _Draft(structure)
    problems: list[str] = []
    for leaf in leaves:
        try:
            record, value = _record(leaf)
        except TreeError as error:
            problems.append(f"{show(leaf.path)} {error}")
            continue
        draft.records.append(record)
        if value is not None:
            draft.values[len(draft.records) - 1] = value
    if problems:
        raise TreeError(f"{len(problems)} of {len(leaves)} leaves cannot be stored:\n{listing(problems)}")
    _lay_out(leaves, draft, mesh, specs, options)
    return draft


def _record(leaf: Leaf) -> tuple[LeafRecord, jax.Array | Array | None]:
    """What is recorded of a leaf, and the array to store for it. Raises TreeError (a reason, without the path)."""
    value = leaf.value
    if isinstance(value, Tracer):
        raise TreeError("is a tracer: call save outside of jit, grad and vmap")
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise TreeError("is a deleted array: it was donated to a jitted call, or deleted")
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return LeafRecord(leaf.path, "key", impl=str(jax.random.key_impl(value))), jax.random.key_data(value)
        return LeafRecord(leaf.path, "jax"), _stored(value)
    if isinstance(value, np.generic):
        return LeafRecord(leaf.path, "numpy_scalar"), _stored(np.asarray(value))
    if isinstance(value, np.ndarray):
        if type(value) not in (np.ndarray, np.memmap):
            raise TreeError(f"is a {type(value).__name__}; make it a plain array with np.asarray")
        return LeafRecord(leaf.path, "numpy"), _stored(value)
    if type(value) not in (bool, int, float, complex, str, bytes):
        raise TreeError(
            f"is of type {type(value).__module__}.{type(value).__qualname__}; leaves may be jax.Array, NumPy arrays"
            " and scalars, bool, int, float, complex, str, bytes"
        )
    inline = encode_value(value)
    if inline is not None:
        return LeafRecord(leaf.path, inline[0], value=inline[1]), None
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return LeafRecord(leaf.path, type(value).__name__), np.frombuffer(raw, np.uint8)


def _stored(value: Any) -> Any:
    if value.dtype.name not in DTYPES:
        raise TreeError(f"has dtype {value.dtype}; storable are {', '.join(DTYPES)}")
    if value.ndim > MAX_RANK:
        raise TreeError(f"has {value.ndim} dimensions; at most {MAX_RANK} can be stored")
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


def _lay_out(leaves: Sequence[Leaf], draft: _Draft, mesh: Mesh | None, specs: Specs, options: Options) -> None:
    """Fill in the layout of each array leaf, and its record's."""
    on_devices = [
        (leaf.path, leaf.value) for leaf, record in zip(leaves, draft.records, strict=True) if _on_devices(record)
    ]
    chosen = resolve_specs(specs, on_devices)
    axes = {} if mesh is None else mesh_axes(mesh)
    problems: list[str] = []
    layouts: dict[tuple[Sharding | None, Sharding, tuple[int, ...]], tuple[Layout, bool]] = {}
    for number, value in draft.values.items():
        record = draft.records[number]
        if not isinstance(value, jax.Array):
            layout = Layout((1,) * value.ndim, _HOST)
            draft.arrays.append(ArrayLeaf(number, value.dtype.name, value.shape, layout))
            continue
        # A PRNG key's raw data, which is stored, has a dimension that the key, which is recorded, has not.
        given = leaves[number].value
        own = value.sharding if value.committed else None
        recorded, stored, committed = given.sharding, own, given.committed
        if mesh is not None:
            spec = chosen.get(record.path)
            spec = by_axis_name(_own_spec(recorded), axes) if spec is None else spec
            spec, problem = fit_spec(axes, spec, given.shape, options)
            if problem:
                problems.append(f"{show(record.path)}: {problem}")
                continue
            recorded = stored = NamedSharding(mesh, partition_spec(spec))
            committed = True
        layout, moved = Layout((1,) * value.ndim, _HOST), False
        if stored is not None:  # else each process has put its own on its own default device
            key = (own, stored, value.shape)
            if key not in layouts:
                layouts[key] = _storage_layout(*key, record.path)
            layout, moved = layouts[key]
        draft.arrays.append(ArrayLeaf(number, value.dtype.name, value.shape, layout, moved))
        draft.records[number] = msgspec.structs.replace(
            record, layout=draft.table.number(recorded, committed=committed)
        )
    if problems:
        raise SpecError(f"{len(problems)} leaves do not fit their specs:\n{listing(problems)}")


def _on_devices(record: LeafRecord) -> bool:
    return record.kind in ("jax", "key")


def _own_spec(sharding: Sharding) -> Spec:
    return spec_of(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _storage_layout(own: Sharding | None, stored: Sharding, shape: tuple[int, ...], path: str) -> tuple[Layout, bool]:
    """Cells and holders of a leaf that lies as `own` and is stored as `stored`; whether it must be exchanged first.

    `own` is None for an uncommitted leaf: every process has the whole of it.
    """
    layout = layout_of(((box, process) for _, process, box in placement(stored, shape)), shape)
    if own is None or stored == own:
        return layout, False
    held: dict[int, set[Box]] = {}
    for _, process, box in placement(own, shape):
        held.setdefault(process, set()).add(box)
    # A holder of the storage layout can write a cell only if the boxes on its own devices make it up.
    able = [
        tuple(process for process in holders if covers(held.get(process, ()), cell))
        for cell, holders in zip(_cells(layout, shape), layout.holders, strict=True)
    ]
    if all(able):
        return Layout(layout.grid, tuple(able)), False
    if not isinstance(own, NamedSharding) or set(held) != set(range(jax.process_count())):
        raise LayoutError(
            f"leaf {show(path)} lies on the devices of processes {sorted(held)} alone, and specs= would have"
            f" processes {sorted({p for holders in layout.holders for p in holders})} write it; leave it out of the"
            " storage mesh, or lay it on all processes first"
        )
    return layout, True


def _cells(layout: Layout, shape: tuple[int, ...]) -> Iterator[Box]:
    sides = tuple(n // parts for n, parts in zip(shape, layout.grid, strict=True))
    for index in np.ndindex(*layout.grid):
        yield tuple((i * side, (i + 1) * side) for i, side in zip(index, sides, strict=True))


# Writing --------------------------------------------------------------------------------------------------


def _write(
    store: Store, data: str, plan: SavePlan, draft: _Draft, process: int, options: Options, report: Report
) -> Iterator[tuple[int, str, int, str]]:
    """Write this process's objects; yields (stack, place, length, digest) of each."""
    by_stack: dict[int, list[Object]] = {}
    for obj in plan.objects:
        by_stack.setdefault(obj.stack, []).append(obj)
    flights = _Flights(options.host_bytes)
    joined: set[Exchange] = set()
    try:
        for number, objects in by_stack.items():
            stack = plan.stacks[number]
            mine = [obj for obj in objects if obj.process == process]
            array = store.open_array(data, stack, sync=options.sync)
            for obj, values in _with_values(plan, draft, number, objects, mine, joined):
                for done in flights.make_room(obj.n_bytes):
                    yield _landed(store, data, plan, done, report)
                source = gather(obj.box, values, flights.buffer)
                flights.launch(obj, store.write(array, obj.box, source), source)
            for done in flights.land_all():
                yield _landed(store, data, plan, done, report)
            if options.sync and mine:
                store.sync_folders(data, stack, [obj.index for obj in mine])
    except Exception:
        # The others would wait for ever in an exchange that this process stayed away from: it joins those to come.
        for number, objects in by_stack.items():
            for exchange in _exchanges(plan, number, objects):
                if exchange not in joined:
                    _join(plan, draft, exchange, joined)
        raise


def _landed(store: Store, data: str, plan: SavePlan, obj: Object, report: Report) -> tuple[int, str, int, str]:
    report(obj.n_bytes)
    length, digest = store.digest(data, plan.stacks[obj.stack], obj.index)
    return obj.stack, "/".join(map(str, obj.index)), length, digest


class _Flights:
    """Writes under way, at most so many bytes at once, and the buffers that they are done with.

    The first touch of fresh memory is slower than the copy into it, so a buffer is used again where one fits.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._queue: deque[tuple[Object, Pending, Array]] = deque()
        self._lent: set[int] = set()
        self._free: list[Array] = []

    def make_room(self, n_bytes: int) -> Iterator[Object]:
        """Wait until `n_bytes` more may fly; yields those that are done."""
        while self._queue and (self._bytes + n_bytes > self._most_bytes or self._queue[0][1].done()):
            yield self._land()

    def buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory to copy rows together in, until the write that is launched with it has landed."""
        fitting = [i for i, free in enumerate(self._free) if free.shape == shape and free.dtype == dtype]
        found = self._free.pop(fitting[0]) if fitting else aligned_empty(shape, dtype)
        self._lent.add(id(found))
        return found

    def launch(self, obj: Object, pending: Pending, source: Array) -> None:
        """Add a write whose data is `source`, which is kept until it has landed."""
        self._queue.append((obj, pending, source))
        self._bytes += obj.n_bytes

    def land_all(self) -> Iterator[Object]:
        while self._queue:
            yield self._land()
        self._free.clear()

    def _land(self) -> Object:
        obj, pending, source = self._queue.popleft()
        with storage_errors("cannot write the checkpoint"):
            pending.result()
        self._bytes -= obj.n_bytes
        if id(source) in self._lent:
            self._lent.remove(id(source))
            self._free.append(source)
        return obj


Value = Any
"""A leaf's jax.Array or NumPy array."""


Exchange = tuple[int, tuple[int, int]]
"""A stack and a range of its rows, whose leaves all processes bring together, in the same order everywhere."""


def _exchanges(plan: SavePlan, stack: int, objects: Sequence[Object]) -> list[Exchange]:
    return [(stack, rows) for rows in sorted({obj.box[0] for obj in objects})] if plan.moved[stack] else []


def _join(plan: SavePlan, draft: _Draft, exchange: Exchange, joined: set[Exchange]) -> list[Value]:
    """Take part in an exchange: its leaves, whole on every device."""
    joined.add(exchange)
    stack, (first, last) = exchange
    return [_replicated(draft.values[leaf]) for leaf in plan.members[stack][first:last]]


def _with_values(
    plan: SavePlan,
    draft: _Draft,
    stack: int,
    objects: Sequence[Object],
    mine: Sequence[Object],
    joined: set[Exchange],
) -> Iterator[tuple[Object, list[Value]]]:
    """This process's objects of a stack with the leaves in their rows, exchanged first where they must be."""
    for exchange in _exchanges(plan, stack, objects):
        values = _join(plan, draft, exchange, joined)
        for obj in mine:
            if obj.box[0] == exchange[1]:
                yield obj, values
    if not plan.moved[stack]:
        members = plan.members[stack]
        for obj, ahead in itertools.zip_longest(mine, mine[1:]):
            if ahead is not None:
                _prefetch(draft, members[ahead.box[0][0] : ahead.box[0][1]])
            yield obj, [draft.values[leaf] for leaf in members[obj.box[0][0] : obj.box[0][1]]]


def _prefetch(draft: _Draft, leaves: Sequence[int]) -> None:
    """Start the copies to the host of leaves that are written next; nothing where they lie there already."""
    if jax.default_backend() == "cpu":
        return
    for leaf in leaves:
        value = draft.values[leaf]
        if isinstance(value, jax.Array):
            for _, number in _held(value):
                value.addressable_data(number).copy_to_host_async()


@functools.lru_cache(maxsize=16)
def _identity(sharding: Sharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)  # pyright: ignore[reportUnknownLambdaType]


def _replicated(value: Any) -> Any:
    """A leaf on every device of its mesh whole: JAX moves data between processes only within one jitted call."""
    replicated = _identity(NamedSharding(value.sharding.mesh, PartitionSpec()))(value)
    return jax.block_until_ready(replicated)


def _held(value: Value) -> tuple[tuple[Box, int], ...]:
    """Each distinct box of a leaf in this process, with the number by which `addressable_data` knows it."""
    if isinstance(value, jax.Array):
        return _held_boxes(value.sharding, value.shape)
    return ((whole(value.shape), 0),)


@functools.lru_cache(maxsize=4096)
def _held_boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[Box, int], ...]:
    numbers: dict[Box, int] = {}
    for number, (_, box) in enumerate(addressable_boxes(sharding, shape)):
        numbers.setdefault(box, number)
    return tuple(numbers.items())


def _on_host(value: Value, number: int) -> Array:
    """A piece as NumPy: where JAX keeps it in host memory, that memory itself."""
    return np.asarray(value.addressable_data(number) if isinstance(value, jax.Array) else value)


def gather(
    box: Box, values: Sequence[Value], buffer: Callable[[tuple[int, ...], np.dtype[Any]], Array] = aligned_empty
) -> Array:
    """The data of a box of rows: where it lies, if that is one piece of one leaf; else copied together."""
    region = box[1:]
    if len(values) == 1:
        for held, number in _held(values[0]):
            if contains(held, region):
                return _on_host(values[0], number)[within(region, held)][None]
    out = buffer((len(values), *extent(region)), np.dtype(values[0].dtype))
    known: tuple[tuple[Box, int], ...] = ()
    cuts: list[tuple[tuple[slice, ...], tuple[slice, ...], int]] = []
    for row, value in enumerate(values):
        held = _held(value)
        if held is not known:  # rows of one sharding share the very same tuple
            known, cuts = held, _cuts(held, region)
        for there, here, number in cuts:
            out[(row, *there)] = _on_host(value, number)[here]
    return out


def _cuts(held: Sequence[tuple[Box, int]], region: Box) -> list[tuple[tuple[slice, ...], tuple[slice, ...], int]]:
    """(where in the region, where in the piece, the piece's number) of each piece that has part of a region."""
    parts = [(common, box, number) for box, number in held if (common := intersection(box, region)) is not None]
    filled = sum(volume(common) for common, _, _ in parts)
    assert filled == volume(region), f"{filled} of {volume(region)} elements of {region} lie in this process"
    return [(within(common, region), within(common, box), number) for common, box, number in parts]


# The manifest ---------------------------------------------------------------------------------------------


def _compose(
    save_id: str,
    plan: SavePlan,
    draft: _Draft,
    metadata: Any,
    written: Sequence[Sequence[tuple[int, str, int, str]]],
) -> Manifest:
    """The manifest, once every process has told what it wrote."""
    objects: list[dict[str, tuple[int, str]]] = [{} for _ in plan.stacks]
    for share in written:
        for stack, place, length, digest in share:
            objects[stack][place] = (length, digest)
    records = list(draft.records)
    for number, members in enumerate(plan.members):
        for row, leaf in enumerate(members):
            records[leaf] = msgspec.structs.replace(records[leaf], stack=number, row=row)
    return Manifest(
        format=manifests.FORMAT,
        version=manifests.VERSION,
        save_id=save_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        libraries=_libraries(),
        metadata=metadata,
        tree=draft.structure,
        leaves=records,
        meshes=draft.table.meshes,
        layouts=draft.table.layouts,
        stacks=[
            StackRecord.of(stack, dict(sorted(found.items())))
            for stack, found in zip(plan.stacks, objects, strict=True)
        ],
    )


@functools.cache
def _libraries() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "jaxlib", "numpy", "tensorstore")}
