"""Restoring: manifest → plan → store.read into final buffers → jax.Array."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxckpt import _manifest as manifests
from jaxckpt import _zarr as zarr
from jaxckpt._bucket import Bucket, Held
from jaxckpt._coord import Group
from jaxckpt._errors import DataError, ManifestError, NotACheckpointError, PeersDisagreeError, listing
from jaxckpt._grid import Box, extent, intersection, volume, whole, within
from jaxckpt._layout import PlannedSharding, Specs, addressable_boxes, memory_kind
from jaxckpt._manifest import LeafRecord, Manifest
from jaxckpt._options import Options
from jaxckpt._place import store_at
from jaxckpt._plan import Read, ReadStep, Region, Run, Stack, Want, indexed_objects_of, plan_read, read_bytes
from jaxckpt._progress import Report, reporting
from jaxckpt._store import Array, Pending, Store, aligned_empty, storage_errors
from jaxckpt._target import Goal, Rename, Request, numpy_goal, resolve, selected_leaves
from jaxckpt._tree import ABSENT, DTYPES, Select, Tree, decode_value, show, unflatten

WHOLE_BYTES = 1 << 20
"""Leaves below this are read whole and cut by JAX, which costs 30 µs each on 8 devices where placing piece by piece
costs 300 µs; larger ones are read piece by piece into buffers that JAX takes over."""


def restore(
    path: str | os.PathLike[str],
    target: Tree = None,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    options: Options | None = None,
) -> Tree:
    """Read a checkpoint back onto devices; every process of the job calls it, with the same arguments.

    Each process reads the chunks that its own devices need, none of them twice.

    Args:
        path: Where `save` wrote.
        target: What is wanted: a pytree, or a prefix of one, of jax.ShapeDtypeStruct (with or without sharding), of
            jax.sharding.Sharding, or of arrays whose shape, dtype and sharding are wanted (their values are not
            looked at). NumPy arrays and Python scalars in it ask for such. Without it, the tree as it was saved.
        mesh: Where leaves go for which `target` gives no sharding: saved specs are carried over by axis name; axes
            that this mesh lacks are dropped. Leaves saved without a spec are replicated.
        specs: With `mesh`: a PartitionSpec, a pytree prefix of them, or a function of (path, leaf), instead of the
            saved ones.
        select: Restore only these leaves: a glob over saved paths ("params/**"; a container's path selects all below
            it), a compiled regular expression, several of them, or a function of the path. Other leaves keep the
            target's value; without a target, dicts come back without them and sequences with None in their place.
        rename: Saved path → wanted path: a mapping of leaf or container paths, or a function. Without a target, a
            renamed tree comes back as nested dicts.
        strict: Missing leaves and leaves of the checkpoint that the target lacks are errors. With False, a missing
            leaf keeps the target's value (an abstract one is an error still), and extra leaves are left out. Another
            shape is always an error; another dtype follows `options.cast`.
        options: See `Options`.

    Returns:
        A pytree: the target's structure, or the saved one. jax.Arrays where arrays were saved from devices, otherwise
        what was saved: NumPy arrays and scalars, int, str, and so on.

    Raises:
        NotACheckpointError: No manifest at `path`, or it was deleted or replaced while it was being read.
        MismatchError: Missing, extra, misshaped or lossily cast leaves; one error lists them all.
        SpecError: A spec does not fit its leaf or the mesh.
        LayoutError: Neither target nor mesh, and the saved devices are not here.
        CorruptError: What is stored is not what was saved; the message names the leaf.
        PeerError: Another process failed, or sees another checkpoint.

    Example:
        >>> import jax, jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/restore", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> jaxckpt.restore("/tmp/jaxckpt-doc/restore", mesh=jax.make_mesh((1,), ("data",)))["w"].shape
        (8, 4)
    """
    options = options or Options()
    group = Group.current(options.timeout_seconds)  # first of all: a call that raises counts like any other
    with group.meeting("opening the checkpoint") as meeting:
        store = store_at(path, options)
        manifest, content = manifests.load(store, options.manifest_sha256)
        digests = meeting.gather(hashlib.sha256(content).hexdigest())
        if len(set(digests)) > 1:
            raise PeersDisagreeError(
                f"the processes see different checkpoints at {store.url}: it was replaced meanwhile, or is not shared"
            )
        meeting.share("")
    with group.meeting("restoring") as meeting:
        goals, build = resolve(manifest, Request(target, mesh, specs, select, rename, strict), options)
        result = build(fetch(store, manifest, goals, options))
        meeting.barrier()
    return result


def load_numpy(path: str | os.PathLike[str], *, select: Select | None = None, options: Options | None = None) -> Tree:
    """Read a checkpoint into host memory, for inference or a look: no mesh, no devices, no JAX backend is started.

    Args:
        path: Where `save` wrote.
        select: Only these leaves, as for `restore`.
        options: See `Options`.

    Returns:
        The saved tree with NumPy arrays for arrays (dtypes of ml_dtypes for bfloat16, float8 and int4). A typed PRNG
        key comes back as its raw uint32 data.

    Raises:
        NotACheckpointError, CorruptError: As `restore`.

    Example:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/numpy", {"w": np.arange(3)}, overwrite=True)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/numpy")
        {'w': array([0, 1, 2])}
    """
    options = options or Options()
    store = store_at(path, options)
    manifest, _ = manifests.load(store, options.manifest_sha256)
    goals = {number: numpy_goal(manifest, number) for number in selected_leaves(manifest, select)}
    values = fetch(store, manifest, goals, options)
    return unflatten(manifest.tree, [values.get(number, ABSENT) for number in range(len(manifest.leaves))])


# Reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a leaf's boxes go: for each box that is read, the devices that get it; none for the host."""

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]

    whole: bool
    """Whether the one box is handed to JAX with the sharding, and JAX cuts it."""

    kept: bool
    """Whether the buffers that are read become the arrays."""


class _Homes:
    """The home of each goal; equal ones are worked out once."""

    def __init__(self, stacks: Sequence[Stack], options: Options) -> None:
        self._stacks = stacks
        self._whole_bytes = min(WHOLE_BYTES, read_bytes(options.host_bytes) + 1)
        self._found: dict[tuple[Any, ...], _Home] = {}

    def of(self, goal: Goal, stack: int) -> _Home:
        key = (stack, goal.sharding, goal.kind in ("jax", "key"), goal.cast)
        if key not in self._found:
            self._found[key] = self._home(goal, self._stacks[stack])
        return self._found[key]

    def want(self, goal: Goal, stack: int, row: int) -> Want:
        home = self.of(goal, stack)
        return Want(stack, row, home.boxes, goal.cast, home.kept)

    def _home(self, goal: Goal, stack: Stack) -> _Home:
        if goal.sharding is None:
            return _Home((whole(stack.shape),), ((None,),), True, kept(goal))
        n_bytes = volume(whole(stack.shape)) * _wanted_dtype(stack, goal).itemsize
        if goal.sharding.is_fully_addressable and n_bytes < self._whole_bytes:  # pyright: ignore
            return _Home((whole(stack.shape),), ((),), True, kept(goal))
        found = local_boxes(goal.sharding, stack.shape)  # pyright: ignore[reportArgumentType]
        return _Home(tuple(found), tuple(map(tuple, found.values())), False, kept(goal))


def kept(goal: Goal) -> bool:
    """Whether buffers of the host become a leaf's arrays: on the host, and on CPU devices, which take them over.

    Also in host memory that an accelerator reaches, where no program of its could put parts together. Elsewhere
    buffers are on their way: they count as memory in flight, and a large leaf has none.
    """
    if goal.kind not in ("jax", "key"):
        return True
    if isinstance(goal.sharding, PlannedSharding):
        return False
    if goal.sharding is None:
        return all(device.platform == "cpu" for device in jax.device_put(np.empty(0, np.uint8)).devices())
    return next(iter(goal.sharding.device_set)).platform == "cpu" or memory_kind(goal.sharding) is not None


def fetch(store: Store, manifest: Manifest, goals: Mapping[int, Goal], options: Options) -> dict[int, Any]:
    """The value of every goal by leaf number."""
    stacks = [record.stack() for record in manifest.stacks]
    homes = _Homes(stacks, options)
    values: dict[int, Any] = {}
    by_row: dict[tuple[int, int], Goal] = {}
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if record.value is not None:
            values[number] = _from_text(record, goal)
        else:
            by_row[manifest.place(record)] = goal
    steps = plan_read(stacks, [homes.want(goal, *place) for place, goal in by_row.items()], options.host_bytes)
    leaves = _Leaves(manifest, stacks, by_row, homes, values)
    total = sum(step.n_bytes for step in steps)
    with _undisturbed(store, manifest), reporting("restore", total, options.progress) as report:
        _read(store, manifest, stacks, steps, options, leaves, report)
    leaves.empty_leaves()
    return values


@contextlib.contextmanager
def _undisturbed(store: Store, manifest: Manifest) -> Generator[None]:
    """Where data is missing or another because the checkpoint is, say that instead of calling it corrupt."""
    try:
        yield
    except DataError as error:
        became = fate(store, manifest)
        if became is None:
            raise
        raise NotACheckpointError(f"the checkpoint at {store.url} was {became} while it was being read") from error


def fate(store: Store, manifest: Manifest) -> str | None:
    """What became of a checkpoint since its manifest was read; None where it is still the same."""
    try:
        now, _ = manifests.load(store)
    except NotACheckpointError:
        return "deleted"
    if now == manifest:
        return None
    return "replaced by another" if now.save_id != manifest.save_id else "relieved of some of its leaves"


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices want, with the places on those devices that want it."""
    found: dict[Box, list[Any]] = {}
    for device, box in addressable_boxes(sharding, shape):
        found.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return found


@dataclass(slots=True)
class _Touched:
    """An object that will be read from."""

    index: tuple[int, ...]
    key: str
    length: int
    digest: str
    wanted: int = 0
    held: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of it is wanted: then its digest can be checked too."""
        return self.wanted == self.held


class _Objects:
    """The objects that steps will read from."""

    def __init__(self, manifest: Manifest, stacks: Sequence[Stack], steps: Sequence[ReadStep]) -> None:
        self._manifest = manifest
        self._stacks = stacks
        self.touched: dict[int, dict[tuple[int, ...], _Touched]] = {}
        for step in steps:
            found = self.touched.setdefault(step.stack, {})
            objects = manifest.stacks[step.stack].objects
            for region in step.regions:
                for index, part, obj in indexed_objects_of(stacks[step.stack], region.box):
                    if index not in found:
                        key = zarr.object_key(stacks[step.stack], index)
                        length, digest = objects["/".join(map(str, index))]
                        found[index] = _Touched(index, key, length, digest, 0, volume(obj))
                    found[index].wanted += volume(part)

    def check(self, store: Store) -> None:
        """Before reading: every zarr.json is as it was, and where that can be told without reading them, every object
        is of its length and every one that is wanted whole has its digest.

        A chunk's checksum tells that it is undamaged; the digest, that the chunks are those saved here.
        """
        data = self._manifest.data
        problems: list[str] = []
        texts = store.read_all(f"{data}/{self._stacks[number].name}/zarr.json" for number in self.touched)
        for number, text in zip(self.touched, texts, strict=True):
            stack = self._stacks[number]
            if text is None or hashlib.sha256(text).hexdigest() != self._manifest.stacks[number].sha256:
                state = "is missing" if text is None else "is not the one that was saved"
                problems.append(f"{store.url}/{data}/{stack.name}/zarr.json {state}")
            if isinstance(store, Bucket):
                continue  # each is checked when it comes; asking beforehand would cost as many requests again
            touched = self.touched[number].values()
            misfits = store.misfits({f"{data}/{one.key}": one.length for one in touched})
            for one in touched:
                problem = misfits.get(f"{data}/{one.key}")
                if not problem and one.whole and store.digest(f"{data}/{one.key}", stack)[1] != one.digest:
                    problem = "holds other data than was saved there"
                if problem and len(problems) < 20:  # to name the leaves of each of 100,000 objects would take hours
                    problem = self.told(store, number, one, problem)
                if problem:
                    problems.append(problem)
        if problems:
            raise DataError(f"{len(problems)} files of the checkpoint are not as they were saved:\n{listing(problems)}")

    def told(self, store: Store, number: int, one: _Touched, problem: str) -> str:
        """A problem of an object, with the leaves that it holds."""
        rows = self._stacks[number].object[0]
        leaves = _leaves_at(self._manifest, number, (one.index[0] * rows, (one.index[0] + 1) * rows))
        return f"{store.url}/{self._manifest.data}/{one.key} {problem}; it holds {leaves}"


def _leaves_at(manifest: Manifest, stack: int, rows: tuple[int, int]) -> str:
    """The leaves in a range of rows of a stack, for an error message."""
    found = [leaf.path[:200] for leaf in manifest.leaves if leaf.stack == stack and leaf.row in range(*rows)]
    return ", ".join(map(show, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def read_box(store: Store, manifest: Manifest, number: int, box: Box, options: Options) -> Array:
    """One box of one leaf, as a NumPy array of the stored dtype."""
    stack, row = manifest.place(manifest.leaves[number])
    stacks = [found.stack() for found in manifest.stacks]
    if not volume(box):
        return np.empty(extent(box), DTYPES[stacks[stack].dtype])
    # One step however large: the buffer is the result.
    steps = plan_read(stacks, [Want(stack, row, (box,))], options.host_bytes)
    delivery = _OneBox()
    with _undisturbed(store, manifest):
        _read(store, manifest, stacks, steps, options, delivery, lambda moved: None)
    return delivery.array


Buffers = list[list[Array]]
"""For each run of a step, the buffer of each box: [rows of the run, *sides of the box]. None of a streamed run."""


class Delivery(Protocol):
    """What becomes of what is read."""

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Take the filled buffers of a step; returns the device arrays that are made of them."""
        ...

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        """Take a part of a box that has no buffer, (run, box); returns the device arrays that it goes into."""
        ...


class _OneBox:
    """Delivers to its caller."""

    array: Array

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        self.array = buffers[0][0][0]
        return []

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        raise NotImplementedError  # what the host wants is kept


def _read(
    store: Store,
    manifest: Manifest,
    stacks: Sequence[Stack],
    steps: Sequence[ReadStep],
    options: Options,
    delivery: Delivery,
    report: Report,
) -> None:
    """Carry out the steps, with at most `options.host_bytes` in flight; each is delivered when it is complete."""
    objects = _Objects(manifest, stacks, steps)
    objects.check(store)
    window = _Window(options.host_bytes)
    with contextlib.ExitStack() as ended:
        fetched = None
        if isinstance(store, Bucket):
            fetched = _Fetched(store, manifest, stacks, steps, objects, options)
            ended.callback(fetched.close)
        for step in steps:
            stack = stacks[step.stack]
            window.take(step.held_bytes)
            filling = _Filling(step, DTYPES[stack.dtype], window, delivery)
            array = store.open_array(manifest.data, stack, options)
            for read in step.reads:
                window.take(read.held_bytes)
                leaves = functools.partial(_leaves_at, manifest, step.stack)
                reading = _Reading(read, filling, report, leaves)
                if fetched is None:
                    reading.begin(store, array)
                    window.later(reading.land)
                else:
                    fetched.begin(step.stack, read, reading, window)
        window.drain()


class _Fetched:
    """Objects of an object store that are wanted whole: each is fetched in one request, checked, and read in memory."""

    def __init__(
        self,
        store: Bucket,
        manifest: Manifest,
        stacks: Sequence[Stack],
        steps: Sequence[ReadStep],
        objects: _Objects,
        options: Options,
    ) -> None:
        self._store = store
        self._stacks = stacks
        self._objects = objects
        self._held = Held(store, manifest.data)
        self._most_bytes = read_bytes(options.host_bytes)
        self._uses = collections.Counter(
            (step.stack, one.index) for step in steps for read in step.reads for one in self._of(step.stack, read)
        )

    def _of(self, number: int, read: Read) -> list[_Touched]:
        """The objects that a read wants something of, and that are fetched whole."""
        found = self._objects.touched[number]
        indices = {
            index for region in read.regions for index, _, _ in indexed_objects_of(self._stacks[number], region.box)
        }
        return [
            found[index] for index in sorted(indices) if found[index].whole and found[index].length <= self._most_bytes
        ]

    def begin(self, number: int, read: Read, reading: _Reading, window: _Window) -> None:
        """Ask for what a read wants, once there is room for it."""
        wanted = self._of(number, read)
        window.take(sum(one.length for one in wanted))
        for one in wanted:
            self._held.fetch(one.key)
        window.later(functools.partial(self._land, number, wanted, reading, window))

    def _land(self, number: int, wanted: list[_Touched], reading: _Reading, window: _Window) -> None:
        """Wait for the objects of a read, then for the read itself."""
        stack = self._stacks[number]
        for one in wanted:
            problem = self._held.problem(one.key, stack, one.length, one.digest)
            if problem:
                raise DataError(self._objects.told(self._store, number, one, problem))
        reading.begin(self._store, self._held.open_array(stack, [one.key for one in wanted]))
        reading.land()
        for one in wanted:
            self._uses[number, one.index] -= 1
            if not self._uses[number, one.index]:
                self._held.drop(one.key)
        window.release(sum(one.length for one in wanted), None)

    def close(self) -> None:
        self._held.close()


class _Window:
    """Memory of the host in use beside the arrays, at most so many bytes of it: who takes more lets the oldest go."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._turns: deque[Callable[[], None]] = deque()
        self._free: list[Array] = []

    def take(self, n_bytes: int) -> None:
        while self._turns and self._held_bytes + n_bytes > self._most_bytes:
            self._turns.popleft()()
        self._held_bytes += n_bytes

    def release(self, n_bytes: int, block: Array | None) -> None:
        """Bytes are in use no more; nor is a block, which may be used again."""
        self._held_bytes -= n_bytes
        if block is not None and block.nbytes:
            self._free.append(block)

    def later(self, turn: Callable[[], None]) -> None:
        """Something that will release bytes, to be called in its turn."""
        self._turns.append(turn)

    def next(self, turn: Callable[[], None]) -> None:
        """As `later`, but before all others."""
        self._turns.appendleft(turn)

    def drain(self) -> None:
        while self._turns:
            self._turns.popleft()()

    def arrays(self, wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[Array, list[Array]]:
        """A block of memory, used before if there is one of about the size, and arrays cut from it."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape, dtype in wanted]
        total = sum(sizes)
        block = next((found for found in self._free if total <= found.nbytes <= 2 * total), None)
        if block is None:
            if total:
                self._free.clear()  # so that what lies idle does not add to what is in use
            block = aligned_empty((total,), np.dtype(np.uint8))
        else:
            self._free = [found for found in self._free if found is not block]
        cut = [
            block[stop - size : stop][: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for (shape, dtype), size, stop in zip(wanted, sizes, itertools.accumulate(sizes), strict=True)
        ]
        return block, cut


class _Filling:
    """The buffers of a step that is being read."""

    def __init__(self, step: ReadStep, dtype: np.dtype[Any], window: _Window, delivery: Delivery) -> None:
        self.step = step
        self.dtype = dtype
        self.window = window
        self._delivery = delivery
        self._to_come = len(step.reads)
        self._block, cut = window.arrays([wanted for run in step.runs if run.passing for wanted in self._shapes(run)])
        rest = iter(cut)
        self._buffers: Buffers = [
            [] if run.streamed else [next(rest) if run.passing else _own(*found) for found in self._shapes(run)]
            for run in step.runs
        ]

    def _shapes(self, run: Run) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        dtype = self.dtype if run.dtype is None else run.dtype
        return [(extent(run.held(box)), dtype) for box in range(len(run.boxes))]

    def place(self, region: Region) -> Array:
        """The part of the one buffer that a region serves."""
        ((run, box),) = region.serves
        return self._buffers[run][box][within(region.box, self.step.runs[run].held(box))]

    def scatter(self, region: Region, staged: Array) -> dict[Any, Any]:
        """Copy a staged region to what it serves; returns the device arrays that have it once they are ready."""
        sent: dict[Any, Any] = {}
        for at in region.serves:
            run, box = at
            held = self.step.runs[run].held(box)
            common = intersection(region.box, held)
            if common is None:
                continue
            data = staged[within(common, region.box)]
            if self.step.runs[run].streamed:
                sent.update(self._delivery.stream(self.step, at, common, data))
            else:
                target = self._buffers[run][box]
                _assign(target[within(common, held)], data)
        return sent

    def landed(self) -> None:
        """One of the step's reads is complete; with the last of them the step is delivered."""
        self._to_come -= 1
        if not self._to_come:
            arrays = self._delivery.deliver(self.step, self._buffers)
            if self.step.held_bytes:
                self.window.next(lambda: _settle(arrays, self.window, self.step.held_bytes, self._block))
            self._buffers = []


class _Reading:
    """A read that is in flight."""

    def __init__(self, read: Read, filling: _Filling, report: Report, leaves: Callable[[tuple[int, int]], str]) -> None:
        self._pending: list[Pending] = []
        self._read = read
        self._filling = filling
        self._report = report
        self._leaves = leaves
        self._block, staged = filling.window.arrays(
            [(extent(region.box), filling.dtype) for region in read.regions if region.staged]
        )
        rest = iter(staged)
        self._targets = [next(rest) if region.staged else filling.place(region) for region in read.regions]

    def begin(self, store: Store, array: Any) -> None:
        """Start reading all of it."""
        with store.batch() as batch:
            for region, target in zip(self._read.regions, self._targets, strict=True):
                self._pending.append(store.read_into(array, region.box, target, batch))

    def land(self) -> None:
        """Wait for it and pass on what is staged."""
        sent: dict[Any, Any] = {}
        for region, target, pending in zip(self._read.regions, self._targets, self._pending, strict=True):
            with storage_errors(lambda rows=region.box[0]: f"cannot read leaf {self._leaves(rows)}", reading=True):
                pending.result()
            if region.staged:
                sent.update(self._filling.scatter(region, target))
        self._report(self._read.n_bytes)
        if sent:
            self._filling.window.next(lambda: self._end(list(sent.values())))
        else:
            self._end([])

    def _end(self, arrays: list[Any]) -> None:
        _settle(arrays, self._filling.window, self._read.held_bytes, self._block)
        self._filling.landed()


def _settle(arrays: list[Any], window: _Window, n_bytes: int, block: Array) -> None:
    """Release memory once the arrays that are made of it are on their devices."""
    if arrays:
        jax.block_until_ready(arrays)
    taken_over = any(device.platform == "cpu" for array in jax.tree.leaves(arrays)[:1] for device in array.devices())
    window.release(n_bytes, None if taken_over else block)


def _own(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory that becomes the caller's; objects lie in memory of NumPy's own making."""
    return np.empty(shape, dtype) if dtype.hasobject else aligned_empty(shape, dtype)


def _assign(target: Array, source: Array) -> None:
    # What an unsafe cast loses was asked for: NumPy need not warn of it again.
    with np.errstate(all="ignore"):
        target[...] = np.real(source) if source.dtype.kind == "c" and target.dtype.kind != "c" else source


# Handing over ---------------------------------------------------------------------------------------------


class _Leaves:
    """Makes the values of leaves of what is read."""

    def __init__(
        self,
        manifest: Manifest,
        stacks: Sequence[Stack],
        by_row: Mapping[tuple[int, int], Goal],
        homes: _Homes,
        values: dict[int, Any],
    ) -> None:
        self._manifest = manifest
        self._stacks = stacks
        self._by_row = by_row
        self._homes = homes
        self._values = values
        self._parts: dict[tuple[int, int, int], list[Any]] = {}
        """By stack, row and box: an array for each device that wants it, as far as it is read."""

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Rows become arrays of the host, or go to the devices in one batched call."""
        hosts: list[Array] = []
        targets: list[Any] = []
        pieces: list[tuple[Goal, int]] = []
        for run, found in zip(step.runs, buffers, strict=True):
            for offset, row in enumerate(range(*run.rows)):
                goal = self._by_row[step.stack, row]
                home = self._homes.of(goal, step.stack)
                if run.streamed:
                    parts = [part for box in range(len(run.boxes)) for part in self._parts.pop((step.stack, row, box))]
                    dtype = _wanted_dtype(self._stacks[step.stack], goal)
                    self._finish(goal, step.stack, [_as_dtype(part, dtype) for part in parts])
                    continue
                views = [buffer[offset] for buffer in found]
                if goal.kind not in ("jax", "key"):
                    self._values[goal.leaf] = on_host(views[0], goal, self._manifest.leaves[goal.leaf].path)
                    continue
                begun = len(hosts)
                if home.whole:
                    hosts.append(views[0])
                    targets.append(goal.sharding)
                else:
                    for view, devices in zip(views, home.devices, strict=True):
                        hosts.extend([view] * len(devices))
                        targets.extend(devices)
                pieces.append((goal, len(hosts) - begun))
        placed = jax.device_put(hosts, targets) if hosts else []
        rest = iter(placed)
        for goal, count in pieces:
            self._finish(goal, step.stack, list(itertools.islice(rest, count)))
        return placed

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        """Put a part of a large box onto its devices, into the array that gathers them there."""
        run, number = at
        box = step.runs[run].boxes[number]
        touched: dict[Any, Any] = {}
        for offset, row in enumerate(range(*part[0])):
            goal = self._by_row[step.stack, row]
            devices = self._homes.of(goal, step.stack).devices[number]
            piece = _cast(data[offset], goal)
            key = (step.stack, row, number)
            if part[1:] == box:
                placed = jax.device_put([piece] * len(devices), list(devices))
            else:
                piece = piece.view(_carrier(piece.dtype))
                if key not in self._parts:
                    self._parts[key] = [jnp.zeros(extent(box), piece.dtype, device=device) for device in devices]
                starts = tuple(start - origin for (start, _), (origin, _) in zip(part[1:], box, strict=True))
                placed = jax.device_put([piece] * len(devices), list(devices))
                placed = [_update(whole, piece, starts) for whole, piece in zip(self._parts[key], placed, strict=True)]
            touched[key] = self._parts[key] = placed
        return touched

    def empty_leaves(self) -> None:
        """Leaves of no bytes: nothing was read for them."""
        for (number, _), goal in self._by_row.items():
            if goal.leaf in self._values:
                continue
            stack = self._stacks[number]
            dtype = _wanted_dtype(stack, goal)
            home = self._homes.of(goal, number)
            if goal.kind not in ("jax", "key"):
                self._values[goal.leaf] = on_host(
                    np.empty(stack.shape, dtype), goal, self._manifest.leaves[goal.leaf].path
                )
            elif home.whole:
                self._finish(goal, number, [jax.device_put(np.empty(stack.shape, dtype), goal.sharding)])  # pyright: ignore
            else:
                placed = zip(home.boxes, home.devices, strict=True)
                parts = [jax.device_put(np.empty(extent(box), dtype), d) for box, devices in placed for d in devices]
                self._finish(goal, number, parts)

    def _finish(self, goal: Goal, number: int, parts: list[Any]) -> None:
        """A leaf of the arrays of this process's devices, or of the one that is it."""
        stack = self._stacks[number]
        sharding: Any = goal.sharding
        array = parts[0] if self._homes.of(goal, number).whole else None
        if array is None:
            # The dtype tells what no part does where this process has no device of the sharding.
            array = jax.make_array_from_single_device_arrays(
                stack.shape, sharding, parts, dtype=_wanted_dtype(stack, goal)
            )
        if goal.kind == "key":
            record = self._manifest.leaves[goal.leaf]
            try:
                array = jax.random.wrap_key_data(array, impl=record.impl)
            except (TypeError, ValueError) as error:
                raise ManifestError(
                    f"leaf {show(record.path)} cannot be PRNG keys of implementation {record.impl!r}: {error}"
                ) from error
        self._values[goal.leaf] = array


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype as which parts are put together on a device: programs may alter NaNs of small floats (CPU)."""
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return DTYPES[f"uint{jnp.finfo(dtype).bits}"]
    return dtype


def _as_dtype(array: Any, dtype: np.dtype[Any]) -> Any:
    return array if array.dtype == dtype else _bitcast(array, dtype)


# Both in the place of what they are given, which no longer exists then.
_update: Any = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)
_bitcast: Any = jax.jit(jax.lax.bitcast_convert_type, static_argnums=1, donate_argnums=0)


def _wanted_dtype(stack: Stack, goal: Goal) -> np.dtype[Any]:
    return DTYPES[stack.dtype] if goal.cast is None else goal.cast


def _cast(view: Array, goal: Goal) -> Array:
    if goal.cast is None or goal.cast == view.dtype:
        return view
    cast = np.empty(view.shape, goal.cast)
    _assign(cast, view)
    return cast


def on_host(view: Array, goal: Goal, path: str) -> Any:
    """What was read of a leaf of the host, as what it was. Raises DataError."""
    match goal.kind:
        case "numpy":
            return view
        case "numpy_scalar":
            return view[()]
        case "str":
            try:
                return view.tobytes().decode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"leaf {show(path)} is a str, but what is stored is not UTF-8: {error.reason}"
                ) from error
        case "bytes":
            return view.tobytes()
        case _:
            return goal.dtype(view.item())


def _from_text(record: LeafRecord, goal: Goal) -> Any:
    """A leaf that lies in the manifest itself."""
    value = decode_value(record.kind, record.value or "")
    if goal.kind == "python":
        return value if goal.dtype is None else goal.dtype(value)
    array = _cast(np.asarray(value), goal)
    if goal.kind == "numpy":
        return array
    if goal.kind == "numpy_scalar":
        return array[()]
    if goal.kind != "jax":
        return value
    return jax.device_put(array, goal.sharding)  # pyright: ignore[reportArgumentType]
