"""Restoring: manifest → plan → store.read into final buffers → jax.Array."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxckpt import _manifest as manifests
from jaxckpt._coord import Group
from jaxckpt._errors import DataError, PeersDisagreeError, listing
from jaxckpt._grid import Box, extent, intersection, volume, whole, within
from jaxckpt._layout import Specs, addressable_boxes
from jaxckpt._manifest import LeafRecord, Manifest
from jaxckpt._options import Options
from jaxckpt._plan import ReadStep, Region, Stack, Want, indexed_objects_of, plan_read
from jaxckpt._progress import Report, reporting
from jaxckpt._store import Array, Pending, Store, aligned_empty, object_key, storage_errors
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
        NotACheckpointError: No manifest at `path`.
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
        store = Store.at(path)
        manifest, content = manifests.load(store)
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
    store = Store.at(path)
    manifest, _ = manifests.load(store)
    goals = {number: numpy_goal(manifest, number) for number in selected_leaves(manifest, select)}
    values = fetch(store, manifest, goals, options or Options())
    return unflatten(manifest.tree, [values.get(number, ABSENT) for number in range(len(manifest.leaves))])


# Reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a leaf's boxes go: for each box that is read, the devices that get it; none for the host."""

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    whole: bool
    """Whether the one box is handed to JAX with the sharding, and JAX cuts it."""


def fetch(store: Store, manifest: Manifest, goals: Mapping[int, Goal], options: Options) -> dict[int, Any]:
    """The value of every goal by leaf number."""
    stacks = [record.stack() for record in manifest.stacks]
    values: dict[int, Any] = {}
    by_row: dict[tuple[int, int], Goal] = {}
    wants: list[Want] = []
    homes: dict[tuple[Any, ...], _Home] = {}
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if record.value is not None:
            values[number] = _from_text(record, goal)
            continue
        stack, row = manifest.place(record)
        by_row[stack, row] = goal
        wants.append(Want(stack, row, _home(goal, stacks[stack], homes).boxes))
    steps = plan_read(stacks, wants)
    check_stored(store, manifest, stacks, steps)
    total = sum(step.n_bytes for step in steps)
    with reporting("restore", total, options.progress) as report:
        for step, buffers in _read(store, manifest, stacks, steps, options, report):
            _deliver(step, buffers, by_row, homes, stacks[step.stack], manifest, values)
    _deliver_empty(wants, by_row, homes, stacks, manifest, values)
    return values


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices want, with the places on those devices that want it."""
    found: dict[Box, list[Any]] = {}
    for device, box in addressable_boxes(sharding, shape):
        found.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return found


def _home(goal: Goal, stack: Stack, homes: dict[tuple[Any, ...], _Home]) -> _Home:
    key = (goal.sharding, goal.kind in ("jax", "key"), stack.shape, stack.itemsize)
    if key not in homes:
        on_host = goal.sharding is None
        n_bytes = volume(whole(stack.shape)) * stack.itemsize
        if on_host or (goal.sharding.is_fully_addressable and n_bytes < WHOLE_BYTES):  # pyright: ignore
            homes[key] = _Home((whole(stack.shape),), ((),), True)
        else:
            found = local_boxes(goal.sharding, stack.shape)  # pyright: ignore[reportArgumentType]
            homes[key] = _Home(tuple(found), tuple(map(tuple, found.values())), False)
    return homes[key]


def check_stored(store: Store, manifest: Manifest, stacks: Sequence[Stack], steps: Sequence[ReadStep]) -> None:
    """Before reading: every object that will be touched is there and of its length, and zarr.json is as it was.

    An object that will be read whole must also have its digest: its chunks' checksums tell that they are undamaged,
    the digest that they are the ones saved here.
    """
    if store.folder is None:
        return
    touched: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for step in steps:
        found = touched.setdefault(step.stack, {})
        for region in step.regions:
            for index, part, obj in indexed_objects_of(stacks[step.stack], region.box):
                sizes = found.setdefault(index, [0, volume(obj)])
                sizes[0] += volume(part)
    problems: list[str] = []
    for number, found in touched.items():
        stack, record = stacks[number], manifest.stacks[number]
        text = store.read(f"{manifest.data}/{stack.name}/zarr.json")
        if text is None or hashlib.sha256(text).hexdigest() != record.sha256:
            state = "is missing" if text is None else "is not the one that was saved"
            problems.append(f"{store.url}/{manifest.data}/{stack.name}/zarr.json {state}")
        lengths = store.sizes(manifest.data, stack, found)
        for index, (read, held) in found.items():
            key = object_key(stack, index)
            length, digest = record.objects["/".join(map(str, index))]
            problem = None
            if lengths[key] is None:
                problem = "is missing"
            elif lengths[key] != length:
                problem = f"is {lengths[key]} bytes long, expected {length}"
            elif read == held and store.digest(manifest.data, stack, index)[1] != digest:
                problem = "holds other data than was saved there"
            if problem:
                rows = (index[0] * stack.object[0], (index[0] + 1) * stack.object[0])
                problems.append(
                    f"{store.url}/{manifest.data}/{key} {problem}; it holds {_leaves_at(manifest, number, rows)}"
                )
    if problems:
        raise DataError(f"{len(problems)} files of the checkpoint are not as they were saved:\n{listing(problems)}")


def _leaves_at(manifest: Manifest, stack: int, rows: tuple[int, int]) -> str:
    """The leaves in a range of rows of a stack, for an error message."""
    found = [leaf.path for leaf in manifest.leaves if leaf.stack == stack and leaf.row in range(*rows)]
    return ", ".join(map(show, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def read_box(store: Store, manifest: Manifest, number: int, box: Box, options: Options) -> Array:
    """One box of one leaf, as a NumPy array of the stored dtype."""
    stack, row = manifest.place(manifest.leaves[number])
    stacks = [found.stack() for found in manifest.stacks]
    if not volume(box):
        return np.empty(extent(box), DTYPES[stacks[stack].dtype])
    # One step however large: the buffer is the result.
    steps = plan_read(stacks, [Want(stack, row, (box,))])
    check_stored(store, manifest, stacks, steps)
    ((_, buffers),) = _read(store, manifest, stacks, steps, options, lambda moved: None)
    return buffers[0][0][0]


Buffers = list[list[Array]]
"""For each run of a step, the buffer of each box: [rows of the run, *sides of the box]."""


def _read(
    store: Store,
    manifest: Manifest,
    stacks: Sequence[Stack],
    steps: Sequence[ReadStep],
    options: Options,
    report: Report,
) -> Iterator[tuple[ReadStep, Buffers]]:
    """Read the steps, some ahead of each other within `options.host_bytes`, and yield each when it is complete."""
    under_way: deque[tuple[ReadStep, Buffers, list[tuple[Region, Array | None, Pending]]]] = deque()
    in_flight = 0

    def land() -> tuple[ReadStep, Buffers]:
        nonlocal in_flight
        step, buffers, reads = under_way.popleft()
        for region, staged, pending in reads:
            with storage_errors(
                lambda rows=region.box[0]: f"cannot read leaf {_leaves_at(manifest, step.stack, rows)}"
            ):
                pending.result()
            if staged is not None:
                _scatter(region, staged, step, buffers)
        in_flight -= step.n_bytes + step.staged_bytes
        report(step.n_bytes)
        return step, buffers

    for step in steps:
        stack = stacks[step.stack]
        while under_way and in_flight + step.n_bytes + step.staged_bytes > options.host_bytes:
            yield land()
        array = store.open_array(manifest.data, stack, mapped=options.mmap)
        dtype = DTYPES[stack.dtype]
        buffers = [
            [aligned_empty((run.rows[1] - run.rows[0], *extent(box)), dtype) for box in run.boxes] for run in step.runs
        ]
        reads: list[tuple[Region, Array | None, Pending]] = []
        with store.batch() as batch:
            for region in step.regions:
                staged = None if len(region.serves) == 1 else aligned_empty(extent(region.box), dtype)
                target = _place(region, step, buffers) if staged is None else staged
                reads.append((region, staged, store.read_into(array, region.box, target, batch)))
        under_way.append((step, buffers, reads))
        in_flight += step.n_bytes + step.staged_bytes
    while under_way:
        yield land()


def _place(region: Region, step: ReadStep, buffers: Buffers) -> Array:
    """The part of the one buffer that a region serves."""
    run, box = region.serves[0]
    return buffers[run][box][within(region.box, (step.runs[run].rows, *step.runs[run].boxes[box]))]


def _scatter(region: Region, staged: Array, step: ReadStep, buffers: Buffers) -> None:
    for run, box in region.serves:
        held = (step.runs[run].rows, *step.runs[run].boxes[box])
        common = intersection(region.box, held)
        if common is not None:
            buffers[run][box][within(common, held)] = staged[within(common, region.box)]


# Handing over ---------------------------------------------------------------------------------------------


def _deliver(
    step: ReadStep,
    buffers: Buffers,
    by_row: Mapping[tuple[int, int], Goal],
    homes: dict[tuple[Any, ...], _Home],
    stack: Stack,
    manifest: Manifest,
    values: dict[int, Any],
) -> None:
    """Turn a step's buffers into leaves: rows become arrays of the host, or go to the devices in one batched call."""
    hosts: list[Array] = []
    targets: list[Any] = []
    pieces: list[tuple[Goal, int]] = []
    for run, found in zip(step.runs, buffers, strict=True):
        for offset, row in enumerate(range(*run.rows)):
            goal = by_row[step.stack, row]
            home = _home(goal, stack, homes)
            views = [_cast(buffer[offset], goal) for buffer in found]
            if goal.kind not in ("jax", "key"):
                values[goal.leaf] = _on_host(views[0], goal)
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
    if pieces:
        _to_devices(hosts, targets, pieces, homes, stack, manifest, values)


def _to_devices(
    hosts: list[Array],
    targets: list[Any],
    pieces: list[tuple[Goal, int]],
    homes: dict[tuple[Any, ...], _Home],
    stack: Stack,
    manifest: Manifest,
    values: dict[int, Any],
) -> None:
    placed = iter(jax.device_put(hosts, targets))
    for goal, count in pieces:
        parts = [next(placed) for _ in range(count)]
        array = parts[0] if _home(goal, stack, homes).whole else _assembled(stack, goal, parts)
        values[goal.leaf] = _as_key(array, goal, manifest)


def _assembled(stack: Stack, goal: Goal, parts: list[Any]) -> Any:
    sharding: Any = goal.sharding
    # The dtype tells what no part does where this process has no device of the sharding.
    return jax.make_array_from_single_device_arrays(stack.shape, sharding, parts, dtype=_wanted_dtype(stack, goal))


def _wanted_dtype(stack: Stack, goal: Goal) -> np.dtype[Any]:
    return goal.dtype if isinstance(goal.dtype, np.dtype) else DTYPES[stack.dtype]


def _as_key(array: Any, goal: Goal, manifest: Manifest) -> Any:
    if goal.kind != "key":
        return array
    return jax.random.wrap_key_data(array, impl=manifest.leaves[goal.leaf].impl)


def _cast(view: Array, goal: Goal) -> Array:
    if not isinstance(goal.dtype, np.dtype) or goal.dtype == view.dtype:
        return view
    # What an unsafe cast loses was asked for: NumPy need not warn of it again.
    with np.errstate(all="ignore"):
        return (np.real(view) if view.dtype.kind == "c" and goal.dtype.kind != "c" else view).astype(goal.dtype)


def _on_host(view: Array, goal: Goal) -> Any:
    match goal.kind:
        case "numpy":
            return view
        case "numpy_scalar":
            return view[()]
        case "str":
            return view.tobytes().decode("utf-8", "surrogatepass")
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


def _deliver_empty(
    wants: Sequence[Want],
    by_row: Mapping[tuple[int, int], Goal],
    homes: dict[tuple[Any, ...], _Home],
    stacks: Sequence[Stack],
    manifest: Manifest,
    values: dict[int, Any],
) -> None:
    """Leaves of no bytes: nothing was read for them."""
    for want in wants:
        goal = by_row[want.stack, want.row]
        if goal.leaf in values:
            continue
        stack = stacks[want.stack]
        dtype = _wanted_dtype(stack, goal)
        home = _home(goal, stack, homes)
        if goal.kind not in ("jax", "key"):
            values[goal.leaf] = _on_host(np.empty(stack.shape, dtype), goal)
        elif home.whole:
            values[goal.leaf] = _as_key(
                jax.device_put(np.empty(stack.shape, dtype), goal.sharding),
                goal,
                manifest,  # pyright: ignore
            )
        else:
            devices = [device for found in home.devices for device in found]
            boxes = [box for box, found in zip(home.boxes, home.devices, strict=True) for _ in found]
            parts = [jax.device_put(np.empty(extent(box), dtype), d) for box, d in zip(boxes, devices, strict=True)]
            array = _assembled(stack, goal, parts)
            values[goal.leaf] = _as_key(array, goal, manifest)
