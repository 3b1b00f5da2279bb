"""Staging: the data of the objects that a process writes, from the leaves into host memory.

Where a leaf lies in host memory already (NumPy, JAX on CPU devices) its data is taken from there. From other devices
it is copied, asynchronously and in the order of the objects, so that later copies overlap the writing of earlier
objects. Held, it is safe from whatever the caller does to the leaves next:

- JAX on CPU: a NumPy view of a shard makes XLA copy instead of reusing the memory when the array is donated, and
  outlives `delete()`. Nothing is copied, but taking a view costs about 5 µs; so where an object packs hundreds of
  pieces they are stacked by one jitted call, which costs 1 µs each to start and copies in XLA's own threads.
- other devices: the copies are queued on the device before anything that the caller starts later. Many small leaves
  are stacked on the devices first, so that there is one transfer for 32 of them.
- NumPy: copied, since anyone may write to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._format.dtypes import DTYPES, lossless
from jaxckpt._format.grid import Box, contains, extent, intersection, volume, whole, within
from jaxckpt._format.layouts import addressable_boxes, memory_kind
from jaxckpt._format.pieces import Pieces, assign
from jaxckpt._save.describe import Draft, Value
from jaxckpt._save.exchange import box_everywhere, moving_bits
from jaxckpt._save.plan import Object, SavePlan

STACK_PIECES = 512
"""On CPU devices, an object of at least so many pieces is stacked by jitted calls: compiling one for its shape takes
some 80 ms, which views of fewer pieces never cost. Measured: 16,000 pieces of 2,000 leaves took 100 ms as views, 15 ms
stacked."""

STACK_ROWS = 128
"""Leaves of one call. Compiling it takes 75 ms for 128 of them, 0.8 s for 1,024, 13 s for 4,096; the call itself 4.5 µs
a leaf for 128, 3.4 µs for more."""

STACK_REPLICAS = 2
"""But not if JAX would stack more copies than this in the process, one for each replica."""

SEND_PIECES = 128
"""On devices with memory of their own, an object of at least so many pieces is stacked: each piece sent alone costs a
transfer. Not measured yet: benchmarks/gpu.py compares."""

SEND_ROWS = 32
"""Leaves of one call on such devices. XLA's compiler for TPUs takes 0.5 s of CPU for it, 1.5 to 3 s for 128 leaves."""

Index = tuple[slice | int, ...]

Hold = Literal["views", "copies"] | None
"""How pieces are made safe from the caller: as views of arrays where that is enough, as copies, or not at all."""

Way = Literal["leave", "view", "copy", "send", "cast"]
"""What is done with a piece: nothing, a NumPy view, a NumPy copy, a copy from its device to the host begun, or one in
another dtype made on its device."""


Group = list[tuple[Box, Any, Index | EllipsisType]]
"""(what it holds of the stack, an array, what part of that) of each piece."""


@dataclass(slots=True)
class Staged:
    """An object's data: pieces that together make it up."""

    obj: Object

    dtype: np.dtype[Any]
    """Of the stack; pieces may be of another of its width, which holds its bits."""

    group_rows: int

    groups: list[Group]
    """The pieces of every so many rows; NumPy, or a jax.Array that may still be under way."""

    copied_bytes: int
    """Host memory that the pieces take in addition to the leaves."""

    late: Callable[[], Staged] | None = None
    """Stages an object that an earlier save wrote, if it must be written after all."""

    def data(self) -> Pieces:
        """The pieces in host memory; they are freed here."""
        if self.late is not None:
            return self.late().data()
        groups, self.groups = self.groups, []
        return Pieces(
            self.obj.box,
            self.dtype,
            self.group_rows,
            [[(box, self._host(array, part).reshape(extent(box))) for box, array, part in group] for group in groups],
        )

    def _host(self, array: Any, part: Index | EllipsisType) -> Any:
        """A part of an array in host memory: of another checkpoint's array, this reads just that."""
        found = (np.asarray(array) if isinstance(array, jax.Array) else array)[part]
        return found if found.dtype == self.dtype else found.view(self.dtype)


def stage(
    plan: SavePlan, draft: Draft, originals: Container[Object] = (), *, hold: bool, stack_bytes: int
) -> Generator[Staged]:
    """The data of each object that this process writes, but for `originals`. Every process, to the end or closed.

    With `hold` it is safe from what the caller does to the leaves once it is yielded; no more than `stack_bytes` of
    it are stacked by JAX.
    """
    exchanged = [number for number, moved in enumerate(plan.moved) if moved]
    # Whoever writes it, all take part in the exchange of an object.
    exchanges = ((number, index, box) for number in exchanged for index, box in plan.stacks[number].objects())
    own = {(obj.stack, obj.index): obj for obj in plan.objects if plan.moved[obj.stack]}
    cast = bool(draft.casts)
    try:
        for obj in plan.objects:
            if not plan.moved[obj.stack]:
                values = [draft.values[leaf] for leaf in plan.members[obj.stack][slice(*obj.box[0])]]
                dtype = DTYPES[plan.stacks[obj.stack].dtype]
                if obj in originals:
                    late = functools.partial(_pieces, obj, obj.box[1:], _by_row(obj, values), 1, dtype, None, cast)
                    yield Staged(obj, dtype, 1, [], 0, late)
                elif obj.n_bytes <= stack_bytes and _stackable(values, dtype if cast else None):
                    stack_bytes -= obj.n_bytes if hold else 0
                    yield _stacked(obj, values, dtype)
                else:
                    sources = _by_row(obj, values)
                    yield _pieces(obj, obj.box[1:], sources, 1, dtype, "views" if hold else None, cast)
        for number, index, box in exchanges:
            parts = _exchanged(plan, draft, number, box)
            obj = own.get((number, index))
            if obj is not None:
                # They are ours alone, but whole on every device: what is kept for later is a copy.
                region, sources = whole(parts[0].shape), _by_row(obj, parts)
                dtype = DTYPES[plan.stacks[number].dtype]
                yield _pieces(obj, region, sources, 1, dtype, "copies" if hold else None, cast)
    except (Exception, GeneratorExit):
        # The others would wait forever in an exchange that this process does not join, so it joins the remaining ones.
        for number, _, box in exchanges:
            _exchanged(plan, draft, number, box)
        raise


def _exchanged(plan: SavePlan, draft: Draft, stack: int, box: Box) -> list[jax.Array]:
    """The box of a stack, each row whole on every device. Every process, in the same order."""
    return [box_everywhere(draft.values[leaf], box[1:]) for leaf in plan.members[stack][slice(*box[0])]]


Held = tuple[tuple[Box, int], ...]
"""Each distinct box that this process has of an array, with the number by which `addressable_data` knows it."""

Source = tuple[Value, Held, Box]
"""An array, what this process has of it, and its region of the stack: rows first, also if the region has none."""


def _by_row(obj: Object, values: Iterable[Value]) -> Iterator[Source]:
    """One array for each row of an object."""
    return ((value, _held(value), ((row, row + 1), *obj.box[1:])) for row, value in enumerate(values, obj.box[0][0]))


def _pieces(
    obj: Object,
    region: Box,
    sources: Iterable[Source],
    group_rows: int,
    dtype: np.dtype[Any],
    hold: Hold,
    cast: bool = False,
) -> Staged:
    """An object from one region of each source, which is `group_rows` rows of it; with `cast`, sources may be of other
    dtypes than the object."""

    def alike(source: Source) -> tuple[Way, Held, Box]:
        value, held, place = source
        return _way(value, hold, dtype if cast else value.dtype), held, place[len(place) - len(region) :]

    groups: list[Group] = []
    sent: list[Group] = []
    copied = 0
    for (way, held, rest), run in itertools.groupby(sources, alike):
        cuts = [(_moved(common, region, rest), here, number) for common, here, number in _cuts(held, region)]
        for value, _, place in run:
            lead = place[: len(place) - len(region)]
            group: Group = [((*lead, *box), *_taken(value, number, here, way, dtype)) for box, here, number in cuts]
            groups.append(group)
            if way == "send" or (way == "cast" and not lies_in_host_memory(value)):
                sent.append(group)
            elif way in ("copy", "cast"):
                copied += sum(array.nbytes for _, array, _ in group)
    if sent:
        arrays = iter(_to_host([array for group in sent for _, array, _ in group]))
        for group in sent:
            group[:] = [(box, next(arrays), part) for box, _, part in group]
            copied += sum(array.nbytes for _, array, _ in group)
    return Staged(obj, np.dtype(dtype), group_rows, groups, copied)


def _taken(value: Value, number: int, here: Index, way: Way, dtype: np.dtype[Any]) -> tuple[Any, Index | EllipsisType]:
    """An array, and what part of it is a piece of a leaf."""
    array = value.addressable_data(number) if isinstance(value, jax.Array) else value
    match way:
        case "leave":
            return array, here
        case "view":
            return np.asarray(array), here
        case "copy":
            part = np.asarray(array)[here]
            copied = np.empty(part.shape, dtype)
            assign(copied, part)
            return copied, ...
        case "cast":
            return _cast(array, here, dtype), ...
        case "send":
            return array if _is_all(here, array.shape) else array[here], ...


def _moved(box: Box, origin: Box, target: Box) -> Box:
    """A box as far from `target` as it is from `origin`."""
    return tuple((a - o + t, b - o + t) for (a, b), (o, _), (t, _) in zip(box, origin, target, strict=True))


def _way(value: Value, hold: Hold, dtype: np.dtype[Any]) -> Way:
    """What is to be done with the pieces of an array that is stored in a dtype."""
    if not isinstance(value, jax.Array):
        return "copy" if hold or value.dtype != dtype else "leave"
    if value.dtype != dtype:
        if lies_in_host_memory(value):
            return "copy" if _numpy_casts(value, dtype) else "cast"
        # XLA must not be given what the user has put into the host's memory.
        return "cast" if memory_kind(value.sharding) is None else "copy"
    if lies_in_host_memory(value):
        return "view" if hold == "views" else "copy" if hold == "copies" else "leave"
    # What the user has put into the host's memory would not be copied by a device_put to there.
    return "send" if memory_kind(value.sharding) is None else "copy"


def _numpy_casts(value: Value, dtype: np.dtype[Any]) -> bool:
    """Whether NumPy makes a cast on CPU devices. XLA casts only to floats of fewer digits, of at most 32 bits: to and
    from 64 bits it makes denormal floats zero, it warns of complex numbers, and it aborts for int2."""
    if value.dtype == dtype:
        return False
    is_narrow = all(jnp.issubdtype(one, jnp.floating) and one.itemsize <= 4 for one in (value.dtype, dtype))
    return not is_narrow or lossless(value.dtype, dtype)


@functools.lru_cache(maxsize=256)
def _caster(sides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    def cut(array: Any, starts: Any) -> Any:
        return lax.dynamic_slice(array, starts, sides).astype(dtype)

    return jax.jit(cut)


@functools.lru_cache(maxsize=4096)
def _mesh_of(device: Any) -> Mesh:
    return Mesh(np.array([device]), ("own",))


def _cast(array: Any, here: tuple[Any, ...], dtype: np.dtype[Any]) -> Any:
    """A part of an array on one device in another dtype, made there: one program for all parts of a shape."""
    sides = tuple(cut.stop - cut.start for cut in here)
    with moving_bits(_mesh_of(next(iter(array.sharding.device_set)))):
        return _caster(sides, dtype)(array, [np.int64(cut.start) for cut in here])


def _is_all(here: Index, shape: tuple[int, ...]) -> bool:
    return all(cut == slice(0, n) for cut, n in zip(here, shape, strict=True))


def _to_host(arrays: list[Any]) -> list[Any]:
    """Start copies to the host of pieces on other devices, in pinned memory where JAX has it and reuses it itself."""
    targets = [_host_side(array.sharding) for array in arrays]
    if all(target is not None for target in targets):
        return jax.device_put(arrays, targets)
    for array in arrays:
        array.copy_to_host_async()
    return arrays


@functools.lru_cache(maxsize=4096)
def _host_side(sharding: Sharding) -> Sharding | None:
    (device,) = sharding.device_set
    kinds = {memory.kind for memory in device.addressable_memories()}
    return SingleDeviceSharding(device, memory_kind="pinned_host") if "pinned_host" in kinds else None


def lies_in_host_memory(value: jax.Array) -> bool:
    """Whether NumPy can look at an array where it is."""
    return _on_cpu(value.sharding)


@functools.lru_cache(maxsize=4096)
def _on_cpu(sharding: Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


# Pieces ---------------------------------------------------------------------------------------------------


def _held(value: Value) -> Held:
    if isinstance(value, jax.Array):
        return _held_boxes(value.sharding, value.shape)
    return ((whole(value.shape), 0),)


@functools.lru_cache(maxsize=4096)
def _held_boxes(sharding: Sharding, shape: tuple[int, ...]) -> Held:
    numbers: dict[Box, int] = {}
    for number, (_, box) in enumerate(addressable_boxes(sharding, shape)):
        numbers.setdefault(box, number)
    return tuple(numbers.items())


def _cuts(held: Sequence[tuple[Box, int]], region: Box) -> list[tuple[Box, tuple[slice, ...], int]]:
    """(what it has of the region, where in the piece, the piece's number) of each piece that has part of a region."""
    for box, number in held:
        if contains(box, region):
            return [(region, within(region, box), number)]
    parts = [(common, box, number) for box, number in held if (common := intersection(box, region)) is not None]
    filled = sum(volume(common) for common, _, _ in parts)
    assert filled == volume(region), f"{filled} of {volume(region)} elements of {region} lie in this process"
    return [(common, within(common, box), number) for common, box, number in parts]


# Many small leaves in one call ----------------------------------------------------------------------------


def _stackable(values: Sequence[Value], dtype: np.dtype[Any] | None = None) -> bool:
    """Whether jitted calls should stack these leaves, and cast them to a dtype, if one is given: CPU devices are done
    sooner so, others with fewer transfers."""
    first = values[0]
    if not isinstance(first, jax.Array) or not isinstance(first.sharding, (NamedSharding, SingleDeviceSharding)):
        return False
    pieces = len(values) * len(_held(first))
    if lies_in_host_memory(first):
        fitting = pieces >= STACK_PIECES and _stacks_whole(first)
        fitting = fitting and not (dtype is not None and any(_numpy_casts(value, dtype) for value in values))
    else:
        # XLA's compiler for TPUs aborts the process if it is to stack what lies in the host's memory.
        fitting = pieces >= SEND_PIECES and memory_kind(first.sharding) is None
    return (
        fitting
        and first.dtype.name not in ("int2", "uint2")  # XLA's compiler for CPUs aborts
        and not getattr(getattr(first.sharding, "spec", None), "reduced", None)
        and all(value.sharding == first.sharding and value.committed == first.committed for value in values)
    )


def _stacks_whole(value: jax.Array) -> bool:
    """Whether leaves like this are stacked as they are: all their devices are this process's, few are replicas."""
    return (
        isinstance(value.sharding, NamedSharding)
        and value.committed
        and value.is_fully_addressable
        and len(value.sharding.device_set) <= len(_held(value)) * STACK_REPLICAS
    )


def _stacked(obj: Object, values: Sequence[Any], dtype: np.dtype[Any]) -> Staged:
    """An object of packed rows, its leaves stacked on the devices where they lie."""
    first: jax.Array = values[0]
    held = _held(first)
    rows = STACK_ROWS if lies_in_host_memory(first) else SEND_ROWS
    own = None if _stacks_whole(first) else _own_sharding(first.sharding, first.shape)
    sharding: Any = own or first.sharding
    along = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)
    numbers = range(len(held)) if own else [number for _, number in held]
    stacked_held = tuple((((0, rows), *box), number) for (box, _), number in zip(held, numbers, strict=True))
    begun = obj.box[0][0]
    sources: list[Source] = []
    for start in range(0, len(values), rows):
        leaves = values[start : start + rows]
        if own:
            leaves = [_own_part(value, held, own) for value in leaves]
        with moving_bits(sharding.mesh):
            # Filled up with the last one, so that there is one program.
            stacked = _stack(along, dtype)([*leaves, *[leaves[-1]] * (rows - len(leaves))])
        sources.append((stacked, stacked_held, ((begun + start, begun + start + rows), *obj.box[1:])))
    staged = _pieces(obj, ((0, rows), *obj.box[1:]), sources, rows, sources[0][0].dtype, None)
    staged.dtype = dtype
    return staged


@functools.lru_cache(maxsize=256)
def _own_sharding(sharding: Sharding, shape: tuple[int, ...]) -> NamedSharding:
    """A layout of the boxes that this process has, each once: on its own devices, one after the other."""
    devices = [device for device, _ in addressable_boxes(sharding, shape)]
    mesh = Mesh(np.array([devices[number] for _, number in _held_boxes(sharding, shape)]), ("own",))
    return NamedSharding(mesh, PartitionSpec(*["own"] * bool(shape)))


def _own_part(value: jax.Array, held: Held, own: NamedSharding) -> jax.Array:
    """What this process has of a leaf, as an array of its own: other processes make no such calls."""
    parts = [value.addressable_data(number) for _, number in held]
    shape = parts[0].shape
    joined = (len(parts) * shape[0], *shape[1:]) if shape else ()
    return jax.make_array_from_single_device_arrays(joined, own, parts)


@functools.lru_cache(maxsize=256)
def _stack(sharding: Sharding, dtype: np.dtype[Any]) -> Any:
    def stack(leaves: list[jax.Array]) -> jax.Array:
        leaves = [leaf.astype(dtype) for leaf in leaves]
        # As integers: XLA computes with small floats in wider ones, which is slow and changes the payload of NaNs.
        if jnp.issubdtype(leaves[0].dtype, jnp.floating) and leaves[0].dtype.itemsize < 4:
            bits = jnp.finfo(leaves[0].dtype).bits
            leaves = [lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{bits}")) for leaf in leaves]
        return jnp.stack(leaves)

    return jax.jit(stack, out_shardings=sharding)
