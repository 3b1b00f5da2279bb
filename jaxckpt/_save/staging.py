"""Staging: brings the data of the objects that a process writes from the leaves into host memory.

The data of a leaf that is already in host memory (NumPy, JAX on CPU devices) is used in place. From other devices it is
copied, asynchronously and in the order of the objects, so that later copies overlap the writing of earlier objects.
Held data is safe from everything that the caller does to the leaves next:

- JAX on CPU: a NumPy view of a shard outlives `delete()`, and makes XLA copy the memory instead of reusing it if the
  array is donated. Only arrays of up to `COPIED_BYTES` are copied, because their memory may belong to a NumPy array or
  a torch tensor, which XLA does not protect. Creating a view costs about 5 µs. If an object packs hundreds of pieces,
  one jitted call stacks them: it costs 1 µs per piece to start, and copies in XLA's threads.
- Other devices: the copies are queued on the device before anything that the caller starts later (`device_to_host`).
  Many small leaves are first stacked on the devices, so that one transfer moves 32 of them.
- NumPy: copied, because any code may write to the array.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._devices.device_to_host import HostCopies, HostShard, Index, ShardKey, ShardNumbers, cut_piece
from jaxckpt._devices.interconnect import CollectiveCalls, replicate_box, transfer_context, transfer_dtype
from jaxckpt._devices.shardings import addressable_boxes, memory_kind
from jaxckpt._model.dtypes import DTYPES, is_lossless
from jaxckpt._model.grid import Box, contains, extent, intersection, slices_within, volume, whole_box
from jaxckpt._model.pieces import Array, Pieces, assign
from jaxckpt._pipeline.control import Phases
from jaxckpt._pipeline.pipeline import Budget
from jaxckpt._pipeline.workers import run_shared
from jaxckpt._save.describe import Draft, Value
from jaxckpt._save.write_plan import Object, SavePlan
from jaxckpt.errors import LayoutError

STACK_PIECES = 512
"""On CPU devices, jitted calls stack an object of at least this many pieces. Compiling a call for a shape takes about
80 ms, more than views of fewer pieces. Measured: 16,000 pieces of 2,000 leaves took 100 ms as views, 15 ms stacked."""

STACK_ROWS = 128
"""Leaves per call. Compiling takes 75 ms for 128 leaves, 0.8 s for 1,024, 13 s for 4,096. The call takes 4.5 µs per
leaf for 128 leaves, 3.4 µs for more."""

COPY_BYTES = 8 << 20
"""Bytes that a thread copies at a time, if several threads copy a piece."""

STACK_REPLICAS = 2
"""Leaves are not stacked if JAX would stack more than this number of replicas in the process."""

SEND_PIECES = 128
"""On devices with their own memory, an object of at least this many pieces is stacked, because each single piece costs
a transfer. On an H100, stacking saves the caller 22 to 27 µs per leaf of 64 KiB; compiling takes 0.15 s once."""

SEND_ROWS = 32
"""Leaves per call on such devices. XLA's compiler for TPUs takes 0.5 s of CPU for this many, 1.5 to 3 s for 128. On an
H100, a leaf then takes 4.9 µs, or 3.8 µs with 128, but compiling takes 0.1 or 0.4 s."""

COPIED_BYTES = 16 << 10
"""On CPU devices, `save_async` copies arrays of up to this size, such as counters and statistics. A copy takes 5 to
15 µs more than a view. Copying everything would take 1 s per GiB (2 cores)."""

Protection = Literal["views", "copies"] | None
"""How pieces are protected from later changes by the caller: as views of arrays if these suffice, as copies, or not at
all."""

HostMode = Literal["leave", "view", "copy", "cast"]
"""How a piece is taken from an array: left where it is, as a NumPy view, as a copy that NumPy makes and may cast, or as
a cast copy on its CPU device."""

PieceMode = HostMode | Literal["send"]
"""Also: as a copy from its device to the host, which is started."""


PieceGroup = list[tuple[Box, Any, Index | EllipsisType]]
"""(box of the stack, array, part of the array) of each piece."""


@dataclass(slots=True)
class StagedObject:
    """An object's data, as pieces."""

    obj: Object

    dtype: np.dtype[Any]
    """Dtype of the stack. Pieces may have another dtype of the same width with the same bits."""

    group_rows: int

    groups: list[PieceGroup]
    """The pieces of each group of rows: NumPy arrays, or jax.Arrays and shards that may still be on their way."""

    copied_bytes: int
    """Host memory that the pieces take in addition to the leaves."""

    stage_late: Callable[[], StagedObject] | None = None
    """Stages the data later, if the object cannot be linked to its original and must be written."""

    check: Callable[[Pieces], object] | None = None
    """Raises if the data must not be saved."""

    def data(self) -> Pieces:
        """The pieces in host memory. Releases them here."""
        pieces = self._own_pieces() if self.stage_late is None else self.stage_late().data()
        if self.check is not None:
            self.check(pieces)
        return pieces

    def _own_pieces(self) -> Pieces:
        groups, self.groups = self.groups, []
        start, stop = self.obj.box[0]
        assert len(groups) == -(-(stop - start) // self.group_rows), "rows without data would be stored uninitialized"
        with jax.transfer_guard("allow"):
            pieces = [[(box, self._host(*piece).reshape(extent(box))) for box, *piece in group] for group in groups]
        return Pieces(self.obj.box, self.dtype, self.group_rows, pieces)

    def _host(self, array: Any, index: Index | EllipsisType) -> Any:
        """A part of an array in host memory. From an array of another checkpoint, reads only that part."""
        if isinstance(array, HostShard):
            array = array.numpy()
        values = (np.asarray(array) if isinstance(array, jax.Array) else array)[index]
        if self.dtype == np.bool_ and (bits := values.view(np.uint8)).max(initial=0) > 1:
            return bits != 0  # a view of other data, such as a mask of 0 and 255, which no reader accepts as it is
        return values if values.dtype == self.dtype else values.view(self.dtype)


def exchanges(plan: SavePlan, draft: Draft) -> CollectiveCalls[tuple[int, tuple[int, ...], Box], list[jax.Array]]:
    """All exchanges of a save, one for each object (stack, index, box) of the stacks that are exchanged; each returns
    the box of each row. All processes take part in each, regardless of which one writes the object."""
    exchanged = (number for number, is_exchanged in enumerate(plan.exchanged) if is_exchanged)
    objects = ((number, index, box) for number in exchanged for index, box in plan.stacks[number].objects())
    return CollectiveCalls(objects, lambda entry, _: _exchange_rows(plan, draft, entry[0], entry[2]))


def stage(
    plan: SavePlan,
    draft: Draft,
    originals: Container[Object] = (),
    calls: CollectiveCalls[Any, Any] | None = None,
    *,
    hold: bool,
    stack_bytes: int,
    whole_shards: bool = False,
) -> Generator[StagedObject]:
    """The data of each object that this process writes. Objects in `originals` come without data, which is staged only
    if they cannot be linked. If leaves are exchanged, makes the `calls` of `exchanges`.

    With `hold`, yielded data is safe from changes to the leaves. JAX stacks at most `stack_bytes` of it. With
    `whole_shards`, a shard may be copied to the host for several objects at once.
    """
    own = {(obj.stack, obj.index): obj for obj in plan.objects if plan.exchanged[obj.stack]}
    memory = draft.staging_memory
    copies = HostCopies(memory, _shards_in_objects(plan, draft, originals) if whole_shards else None)
    for obj in plan.objects:
        if not plan.exchanged[obj.stack]:
            values = [draft.values[leaf] for leaf in plan.leaves[obj.stack][slice(*obj.box[0])]]
            dtype = DTYPES[plan.stacks[obj.stack].dtype]
            if obj in originals:
                sources = list(_by_row(obj, values))  # each attempt stages them again
                late = functools.partial(_stage_pieces, obj, obj.box[1:], sources, 1, dtype, None, HostCopies(memory))
                yield StagedObject(obj, dtype, 1, [], 0, late)
            elif obj.n_bytes <= stack_bytes and _can_stack(values, dtype if draft.casts else None):
                stack_bytes -= obj.n_bytes if hold else 0
                yield _stage_stacked(obj, values, dtype, "views" if hold else None, copies)
            else:
                sources = _by_row(obj, values)
                yield _stage_pieces(obj, obj.box[1:], sources, 1, dtype, "views" if hold else None, copies)
    if calls is None:
        return
    for number, index, _ in calls:
        rows = calls.run_next()
        obj = own.get((number, index))
        if obj is not None:
            # These arrays belong only to jaxckpt but are replicated on every device, so data kept for later is copied.
            region, sources = whole_box(rows[0].shape), _by_row(obj, rows)
            dtype = DTYPES[plan.stacks[number].dtype]
            yield _stage_pieces(obj, region, sources, 1, dtype, "copies" if hold else None, copies)


def _exchange_rows(plan: SavePlan, draft: Draft, stack: int, box: Box) -> list[jax.Array]:
    """The box of a stack, each row replicated on every device. Every process, in the same order."""
    return [replicate_box(draft.values[leaf], box[1:]) for leaf in plan.leaves[stack][slice(*box[0])]]


def _shards_in_objects(plan: SavePlan, draft: Draft, originals: Container[Object]) -> dict[ShardKey, int]:
    """The shards on devices with their own memory that are cut into several objects, all of which this process writes.
    Each with its number of elements."""
    counts = Counter[ShardKey]()
    sizes: dict[ShardKey, int] = {}
    for obj in plan.objects:
        stack, (row, stop), region = plan.stacks[obj.stack], obj.box[0], obj.box[1:]
        # Objects of several rows hold complete shards, unless these are small.
        if stop > row + 1 or region == whole_box(stack.shape) or plan.exchanged[obj.stack] or obj in originals:
            continue
        value = draft.values[plan.leaves[obj.stack][row]]
        if value.dtype != DTYPES[stack.dtype] or _piece_mode(value, "views", value.dtype) != "send":
            continue
        for box, replicas in _boxes_of(value):
            common = intersection(box, region)
            if common is not None and common != box:
                key = obj.stack, row, replicas[0]
                counts[key] += volume(common)
                sizes[key] = volume(box)
    return {key: n_elements for key, n_elements in counts.items() if n_elements == sizes[key]}


LocalBoxes = tuple[tuple[Box, ShardNumbers], ...]
"""Each distinct box of an array in this process, with the shards that hold it."""

PlacedValue = tuple[Value, LocalBoxes, Box]
"""An array, its boxes in this process, and its region of the stack with rows first."""


def _by_row(obj: Object, values: Iterable[Value]) -> Iterator[PlacedValue]:
    """One array per row of an object."""
    return (
        (value, _boxes_of(value), ((row, row + 1), *obj.box[1:])) for row, value in enumerate(values, obj.box[0][0])
    )


@transfer_context(None)
def _stage_pieces(
    obj: Object,
    region: Box,
    sources: Iterable[PlacedValue],
    group_rows: int,
    dtype: np.dtype[Any],
    hold: Protection,
    copies: HostCopies,
) -> StagedObject:
    """An object from one region of each source, which provides `group_rows` rows and is cast if necessary."""

    def handling(source: PlacedValue) -> tuple[PieceMode, LocalBoxes, Box]:
        value, local_boxes, source_box = source
        return _piece_mode(value, hold, dtype), local_boxes, source_box[len(source_box) - len(region) :]

    groups: list[PieceGroup] = []
    sent: list[PieceGroup] = []
    copied = 0
    for (mode, local_boxes, rest), run in itertools.groupby(sources, handling):
        cuts = [
            (_translate_box(common, region, rest), index, replicas)
            for common, index, replicas in _cuts(local_boxes, region)
        ]
        for value, _, source_box in run:
            lead = source_box[: len(source_box) - len(region)]
            group: PieceGroup = []
            for box, index, replicas in cuts:
                if mode == "send":
                    key = (obj.stack, source_box[0][0], replicas[0]) if hold == "views" else None
                    taken = copies.take(value, replicas, index, dtype, key)
                else:
                    taken = _take_piece(value, replicas[0], index, mode, dtype)
                group.append(((*lead, *box), *taken))
            groups.append(group)
            if mode == "send":
                sent.append(group)
                copied += sum(volume(box) for box, _, _ in group) * np.dtype(dtype).itemsize
            elif mode in ("copy", "cast"):
                copied += sum(array.nbytes for _, array, _ in group)
                if mode == "cast" and hold and value.nbytes <= COPIED_BYTES:
                    jax.block_until_ready([array for _, array, _ in group])
    arrays = [array for group in sent for _, array, _ in group if isinstance(array, jax.Array)]
    # Arrays that were stacked or exchanged are in device memory only for this.
    is_temporary = group_rows > 1 or hold == "copies"
    started = iter(copies.start(arrays, temporary=is_temporary) if arrays else ())
    for group in sent:
        group[:] = [
            (box, next(started) if isinstance(array, jax.Array) else array, index) for box, array, index in group
        ]
    return StagedObject(obj, np.dtype(dtype), group_rows, groups, copied)


def _take_piece(
    value: Value, number: int, index: tuple[slice, ...], mode: HostMode, dtype: np.dtype[Any]
) -> tuple[Any, Index | EllipsisType]:
    """An array in host memory, and the part of it that is a piece of a leaf."""
    array = value.addressable_data(number) if isinstance(value, jax.Array) else value
    match mode:
        case "leave":
            return array, index
        case "view":
            return np.asarray(array), index
        case "copy":
            if isinstance(array, jax.Array) and not is_in_host_memory(array) and memory_kind(array.sharding) is None:
                # Of a temporary array, because JAX keeps the copy of an array as long as the array.
                piece = np.asarray(cut_piece(array, index, array.dtype)).view(array.dtype)
            else:
                piece = np.asarray(array)[index]
            return _copy(piece, dtype), ...
        case "cast":
            return cut_piece(array, index, dtype), ...


def _copy(piece: Array, dtype: np.dtype[Any]) -> Array:
    """A copy in this dtype. Several threads copy a large piece, because most of the time is spent on new memory."""
    copied = np.empty(piece.shape, dtype)
    n_cuts = min(len(piece), copied.nbytes // COPY_BYTES) if piece.ndim else 0
    if n_cuts < 2:
        assign(copied, piece)
        return copied
    borders = [len(piece) * cut // n_cuts for cut in range(n_cuts + 1)]
    cuts = [slice(*pair) for pair in itertools.pairwise(borders)]
    run_shared([functools.partial(assign, copied[cut], piece[cut]) for cut in cuts])
    return copied


def _translate_box(box: Box, origin: Box, target: Box) -> Box:
    """A box with its offset from `origin` moved to `target`."""
    return tuple((a - o + t, b - o + t) for (a, b), (o, _), (t, _) in zip(box, origin, target, strict=True))


def _piece_mode(value: Value, hold: Protection, dtype: np.dtype[Any]) -> PieceMode:
    """The treatment of the pieces of an array that is stored in this dtype."""
    if not isinstance(value, jax.Array):
        return "copy" if hold or value.dtype != dtype else "leave"
    if not is_in_host_memory(value):
        # Arrays that the user has placed in host memory must not be passed to XLA, and device_put would not copy them.
        return "send" if memory_kind(value.sharding) is None and not _is_numpy_cast(value, dtype) else "copy"
    if value.dtype != dtype:
        return "copy" if _is_numpy_cast(value, dtype) else "cast"
    if hold == "views":
        return "copy" if value.nbytes <= COPIED_BYTES else "view"
    return "copy" if hold == "copies" else "leave"


def _is_numpy_cast(value: Value, dtype: np.dtype[Any]) -> bool:
    """Whether NumPy makes a cast, and not XLA.

    Accelerators make all casts, except of floats to dtypes that have all their values: they may make denormal floats
    zero. On CPUs, XLA casts only to floats of fewer digits, of at most 32 bits: to and from 64 bits it makes denormal
    floats zero, it warns about complex numbers, and it aborts for int2.
    """
    if value.dtype == dtype:
        return False
    if isinstance(value, jax.Array) and not is_in_host_memory(value):
        return jnp.issubdtype(value.dtype, jnp.inexact) and is_lossless(value.dtype, dtype)
    is_narrow = all(jnp.issubdtype(either, jnp.floating) and either.itemsize <= 4 for either in (value.dtype, dtype))
    return not is_narrow or is_lossless(value.dtype, dtype)


def is_in_host_memory(value: jax.Array) -> bool:
    """Whether NumPy can access an array in place."""
    return _on_cpu(value.sharding)


def may_be_shared(value: jax.Array) -> bool:
    """Whether another library may change the memory of an array. In host memory, an array may be a NumPy array or a
    torch tensor (`device_put`, `from_dlpack`), or be exported to one; JAX does not know which ones are."""
    return is_in_host_memory(value) or memory_kind(value.sharding) is not None


@functools.lru_cache(maxsize=4096)
def _on_cpu(sharding: Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


# Pieces ---------------------------------------------------------------------------------------------------


def _boxes_of(value: Value) -> LocalBoxes:
    if isinstance(value, jax.Array):
        return _local_boxes(value.sharding, value.shape)
    return ((whole_box(value.shape), (0,)),)


@functools.lru_cache(maxsize=4096)
def _local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> LocalBoxes:
    numbers: dict[Box, list[int]] = {}
    for number, (_, box) in enumerate(addressable_boxes(sharding, shape)):
        numbers.setdefault(box, []).append(number)
    return tuple((box, tuple(replicas)) for box, replicas in numbers.items())


def _cuts(local_boxes: LocalBoxes, region: Box) -> list[tuple[Box, tuple[slice, ...], ShardNumbers]]:
    """(part of the region, its position in the shards, these shards) of each local box that overlaps a region."""
    for box, replicas in local_boxes:
        if contains(box, region):
            return [(region, slices_within(region, box), replicas)]
    overlaps = [
        (common, box, replicas) for box, replicas in local_boxes if (common := intersection(box, region)) is not None
    ]
    filled = sum(volume(common) for common, _, _ in overlaps)
    if filled != volume(region):  # the rest would be stored uninitialized
        raise LayoutError(f"{filled} of {volume(region)} elements of {region} are on devices of this process")
    return [(common, slices_within(common, box), replicas) for common, box, replicas in overlaps]


# Many small leaves in one call ----------------------------------------------------------------------------


def _can_stack(values: Sequence[Value], dtype: np.dtype[Any] | None = None) -> bool:
    """Whether jitted calls should stack these leaves, and cast them if a dtype is given. On CPU devices this is faster;
    on others it needs fewer transfers."""
    first = values[0]
    if not isinstance(first, jax.Array) or not isinstance(first.sharding, (NamedSharding, SingleDeviceSharding)):
        return False
    pieces = len(values) * len(_boxes_of(first))
    if is_in_host_memory(first):
        fitting = pieces >= STACK_PIECES and _can_stack_in_layout(first)
    else:
        # XLA's compiler for TPUs aborts the process if it has to stack arrays in host memory.
        fitting = pieces >= SEND_PIECES and memory_kind(first.sharding) is None
    return (
        fitting
        and first.dtype.name not in ("int2", "uint2")  # XLA's compiler for CPUs aborts
        and not getattr(getattr(first.sharding, "spec", None), "reduced", None)
        and all(_is_placed_like(value, first) for value in values)
        and not (dtype is not None and any(_is_numpy_cast(value, dtype) for value in values))
    )


def _is_placed_like(value: Value, other: jax.Array) -> bool:
    """Whether a leaf is on the same devices as another. A NumPy array of the same shape may be in the same stack."""
    return isinstance(value, jax.Array) and value.sharding == other.sharding and value.committed == other.committed


def _can_stack_in_layout(value: jax.Array) -> bool:
    """Whether leaves like this can be stacked in their layout: all devices belong to this process, with few
    replicas."""
    return (
        isinstance(value.sharding, NamedSharding)
        and value.committed
        and value.is_fully_addressable
        and len(value.sharding.device_set) <= len(_boxes_of(value)) * STACK_REPLICAS
    )


def _stage_stacked(
    obj: Object, values: Sequence[Any], dtype: np.dtype[Any], hold: Protection, copies: HostCopies
) -> StagedObject:
    """An object of packed rows, whose leaves are stacked on their devices."""
    first: jax.Array = values[0]
    local_boxes = _boxes_of(first)
    rows = STACK_ROWS if is_in_host_memory(first) else SEND_ROWS
    own = None if _can_stack_in_layout(first) else _own_sharding(first.sharding, first.shape)
    sharding: Any = own or first.sharding
    along = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)
    stacked_boxes = tuple(
        (((0, rows), *box), (position,) if own else replicas) for position, (box, replicas) in enumerate(local_boxes)
    )
    begun, stack_leaves = obj.box[0][0], _stack(along, dtype)
    sources: list[PlacedValue] = []
    if own:
        values = [_local_array(value, local_boxes, own) for value in values]
    with transfer_context(sharding.mesh):
        for start in range(0, len(values), rows):
            leaves = values[start : start + rows]
            # Padded with the last leaf, so that all calls share one program.
            stacked = stack_leaves([*leaves, *[leaves[-1]] * (rows - len(leaves))])
            sources.append((stacked, stacked_boxes, ((begun + start, begun + start + rows), *obj.box[1:])))
        if _piece_mode(first, hold, first.dtype) == "copy":
            jax.block_until_ready([stacked for stacked, _, _ in sources])
    staged = _stage_pieces(obj, ((0, rows), *obj.box[1:]), sources, rows, sources[0][0].dtype, None, copies)
    staged.dtype = dtype
    return staged


@functools.lru_cache(maxsize=256)
def _own_sharding(sharding: Sharding, shape: tuple[int, ...]) -> NamedSharding:
    """A sharding with each distinct box of this process once, over its own devices. Of replicas always the first, so
    that the program that stacks is compiled once."""
    devices = [device for device, _ in addressable_boxes(sharding, shape)]
    mesh = Mesh(np.array([devices[replicas[0]] for _, replicas in _local_boxes(sharding, shape)]), ("own",))
    return NamedSharding(mesh, PartitionSpec(*["own"] * bool(shape)))


def _local_array(value: jax.Array, local_boxes: LocalBoxes, own: NamedSharding) -> jax.Array:
    """The part of a leaf in this process, as a local array, because other processes do not make these calls."""
    if len(value.sharding.device_set) == 1:
        return value
    pieces = [value.addressable_data(replicas[0]) for _, replicas in local_boxes]
    if len(pieces) == 1:  # joining pieces takes 50 to 150 µs
        return pieces[0]
    shape = pieces[0].shape
    joined = (len(pieces) * shape[0], *shape[1:]) if shape else ()
    return jax.make_array_from_single_device_arrays(joined, own, pieces)


@functools.lru_cache(maxsize=256)
def _stack(sharding: Sharding, dtype: np.dtype[Any]) -> Any:
    def stack(leaves: list[jax.Array]) -> jax.Array:
        leaves = [leaf.astype(dtype) for leaf in leaves]
        bits = transfer_dtype(dtype)
        if bits != dtype:
            leaves = [lax.bitcast_convert_type(leaf, bits) for leaf in leaves]
        return jnp.stack(leaves)

    return jax.jit(stack, out_shardings=sharding)


# Holding for another attempt ------------------------------------------------------------------------------


class HeldObjects:
    """The data of a save, until the save has ended: another attempt writes it if the storage has failed."""

    def __init__(self) -> None:
        self._objects: list[StagedObject] = []
        self.is_complete = False
        """Whether another attempt can write all of it."""

    def keep(self, staged: Iterable[StagedObject]) -> Generator[StagedObject]:
        """The objects, each of which is kept here too. In a later attempt, those that are kept."""
        if not self.is_complete:
            for staged_object in staged:
                self._objects.append(replace(staged_object))
                yield staged_object
            self.is_complete = True
            return
        yield from map(replace, self._objects)

    def keep_nothing(self) -> None:
        """The caller waits, so its leaves do not change until the save has ended."""
        self.is_complete = True

    def clear(self) -> None:
        """Free the memory."""
        self._objects.clear()
        self.is_complete = False


# Staging ahead of the writing -----------------------------------------------------------------------------


class StagedObjects:
    """The objects in order. Nothing is staged until `fill` is called, which stages as many as the limits allow, or
    until iteration begins, each step of which calls it."""

    def __init__(
        self,
        staged: Iterator[StagedObject],
        phases: Phases,
        *,
        max_objects: int | None,
        max_bytes: int | None,
        check: Callable[[], object],
    ) -> None:
        """`check` is called before each, and raises to stop. None: no limit."""
        self._staged: Iterator[StagedObject] | None = staged
        self._phases = phases
        self._max_objects = max_objects
        self._budget = Budget(sys.maxsize if max_bytes is None else max_bytes)
        self._check = check
        self._ready = deque[StagedObject]()
        self._next: StagedObject | None = None
        """One that does not fit yet."""

        self.copied_bytes = 0
        """Bytes that were copied to be staged, so far."""

    def fill(self) -> None:
        """Stage objects ahead."""
        with self._phases.timed("device_to_host"):
            while self._staged is not None and len(self._ready) != self._max_objects:
                self._check()
                if self._next is None:
                    self._next = next(self._staged, None)
                if self._next is None:
                    self._staged = None
                elif self._budget.fits(self._next.copied_bytes):
                    self._budget.take(self._next.copied_bytes)
                    self.copied_bytes += self._next.copied_bytes
                    self._ready.append(self._next)
                    self._next = None
                else:
                    return

    def __iter__(self) -> Iterator[StagedObject | None]:
        """The objects; None if the next one needs the memory of those that are being written."""
        while True:
            self._check()
            self.fill()
            if self._ready:
                yield self._ready.popleft()
            elif self._staged is None:
                return
            else:
                yield None

    def mark_written(self, staged: StagedObject) -> None:
        """Note that an object was written and its copies were freed."""
        self._budget.free(staged.copied_bytes)
