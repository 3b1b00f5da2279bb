"""Restoring: manifest → plan → store.read into final buffers → jax.Array."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxckpt._format.grid import Box, extent, volume, whole
from jaxckpt._format.layouts import PlannedSharding, Specs, addressable_boxes, memory_kind, require_mesh
from jaxckpt._format.records import LeafRecord, Manifest
from jaxckpt._format.stacks import Stack
from jaxckpt._format.tree import DTYPES, Select, Tree, decode_value, show
from jaxckpt._restore.plan import ReadStep, Want, plan_read, read_bytes
from jaxckpt._restore.reading import Buffers, assign, read, undisturbed
from jaxckpt._restore.source import Location, Source, source_at
from jaxckpt._restore.target import (
    Goal,
    Renaming,
    Request,
    numpy_goals,
    renamed_source,
    require_request,
    resolve,
    split_rename,
)
from jaxckpt._runtime.errors import DataError, InputError, ManifestError, PeersDisagreeError
from jaxckpt._runtime.options import Options, given
from jaxckpt._runtime.processes import Call, Group
from jaxckpt._runtime.progress import reporting
from jaxckpt._storage.store import Array

_log = logging.getLogger("jaxckpt")

WHOLE_BYTES = 1 << 20
"""Leaves below this are read whole and cut by JAX, which costs 30 µs each on 8 devices where placing piece by piece
costs 300 µs; larger ones are read piece by piece into buffers that JAX takes over."""


def restore(
    path: Location,
    target: Tree = None,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Renaming | None = None,
    strict: bool = True,
    options: Options | None = None,
) -> Tree:
    """Read a checkpoint back onto devices; every process of the job calls it, with the same arguments.

    Each process reads the chunks that its own devices need, none of them twice. Process 0 logs how many leaves came
    from the checkpoint (logger "jaxckpt", level INFO).

    Args:
        path: Where `save` wrote; or a checkpoint of Orbax, PyTorch DCP or safetensors, or what `rank_files` and its
            kind have made of others.
        target: What is wanted: a pytree, or a prefix of one, of jax.ShapeDtypeStruct (with or without sharding), of
            jax.sharding.Sharding, or of arrays whose shape, dtype and sharding are wanted (their values are not
            looked at; a weak type is wanted too). NumPy arrays and Python scalars in it ask for such; functions that no
            checkpoint holds stay. None in it is an empty subtree, as everywhere in JAX: nothing is restored there, and
            leaves that the checkpoint has there are extra leaves. Without it, the tree as it was saved.
        mesh: Where leaves go for which `target` gives no sharding: saved specs are carried over by axis name; axes
            that this mesh lacks are dropped. Leaves saved without a spec are replicated. Each leaf keeps its memory
            kind. A sharding on an AbstractMesh, as jax.eval_shape gives under jax.set_mesh, is meant on this mesh, or
            on that of jax.set_mesh.
        specs: With `mesh`: a PartitionSpec, a pytree prefix of them, or a function of (path, leaf), instead of the
            saved ones.
        select: Restore only these leaves: a glob over saved paths ("params/**"; "params/**/w" matches "params/w" too;
            a container's path selects all below it), a compiled regular expression, several of them, or a function of
            the path that returns a bool. Each pattern must match a leaf. Other leaves keep the target's value; without
            a target, dicts come back without them and sequences with None in their place. A leaf of the target that the
            checkpoint lacks is selected if the path that `rename` would take it from is, or if `rename` is a function,
            which cannot say.
        rename: Saved path → wanted path: a mapping of leaf or container paths ("" is the tree itself), each of which
            must exist, or a function. Without a target, a renamed tree comes back as nested dicts. A component of a
            wanted path is never empty: the empty key is written "~2". Or `Rules`, which also transpose, stack, join and
            cast: then the checkpoint has the leaves that the rules make, and `select` chooses among these.
        strict: Missing leaves and leaves of the checkpoint that the target lacks are errors. With False, a missing
            leaf keeps the target's value (an abstract one, which has none, is still an error), and extra leaves are
            left out. A target of which no leaf is in the checkpoint is always an error, and so are another shape, a
            class, and an object that JAX takes for a leaf in the place of a container; another dtype follows
            `options.cast`.
        options: See `Options`.

    Returns:
        A pytree: the target's structure, or the saved one. jax.Arrays where arrays were saved from devices, otherwise
        what was saved: NumPy arrays and scalars, int, str, and so on.

    Raises:
        NotACheckpointError: No manifest at `path`, or it was deleted or replaced while it was being read.
        MismatchError: Missing, extra, misshaped or lossily cast leaves; one error lists them all. Also leaves of 64
            bits while jax_enable_x64 is off, unless `options.cast` is "unsafe", which restores 32 bits.
        TreeError: A pattern of `select` or a path of `rename` matches nothing.
        SpecError: A spec does not fit its leaf or the mesh.
        LayoutError: Neither target nor mesh, and the saved devices are not here.
        CorruptError: What is stored is not what was saved; the message names the leaf.
        PeerError: Another process failed, or sees another checkpoint.

    Examples:
        >>> import jax, jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/restore", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> jaxckpt.restore("/tmp/jaxckpt-doc/restore", mesh=jax.make_mesh((1,), ("data",)))["w"].shape
        (8, 4)
    """
    return carry_out(path, Request(target, mesh, specs, select, *split_rename(rename), strict), options)


def carry_out(path: Location, asked: Request, options: Options | None) -> Tree:
    """Restore what is asked for. Every process."""
    with Group.current(options, Call.of("restore", path)) as group:
        options = given(options)
        with group.meeting("opening the checkpoint") as meeting:
            _check(asked)
            source, digest = source_at(path, options)
            source = renamed_source(source, asked.rules)
            resolved = resolve(source.manifest, asked, options)
            _require_no_trace(resolved.goals.values())
            digests = meeting.gather(digest)
            if len(set(digests)) > 1:
                raise PeersDisagreeError(
                    f"the processes see different checkpoints at {source.url}: it was replaced meanwhile, or is not"
                    " shared"
                )
            meeting.share("")
        with group.meeting("restoring") as meeting:
            initial = asked.initial(resolved.lacking) if asked.initial else []
            result = resolved.build(fetch(source, resolved.goals, options), initial)
            meeting.barrier()
    if group.index == 0 and _log.isEnabledFor(logging.INFO):
        counts = len(resolved.goals), len(jax.tree.leaves(result)), source.url, len(source.manifest.leaves)
        _log.info("restored %d of the tree's %d leaves from %s, which has %d", *counts)
    return result


def _check(asked: Request) -> None:
    """Raise InputError for arguments that are none, or that need devices that are not here."""
    require_mesh(asked.mesh)
    require_request(asked)


def _require_no_trace(goals: Iterable[Goal]) -> None:
    """Raise InputError if arrays would be made while JAX traces a function, where none can be."""
    on_devices = any(goal.kind in ("jax", "key") for goal in goals)
    if on_devices and isinstance(jax.device_put(np.empty(0, np.uint8)), Tracer):
        raise InputError(
            "restore was called while JAX traces a function: call it outside of jit, scan and eval_shape, and pass what"
            " it returns to the function"
        )


def load_numpy(
    path: Location,
    *,
    select: Select | None = None,
    rename: Renaming | None = None,
    options: Options | None = None,
) -> Tree:
    """Read a checkpoint into host memory, for inference or a look: no mesh, no devices, no JAX backend is started.

    Args:
        path: Where `save` wrote, or another checkpoint that `restore` takes.
        select: Only these leaves, as for `restore`, by their paths after `rename`.
        rename: As for `restore`.
        options: See `Options`.

    Returns:
        The saved tree with NumPy arrays for arrays (dtypes of ml_dtypes for bfloat16, float8 and int4). A typed PRNG
        key comes back as its raw uint32 data.

    Raises:
        NotACheckpointError, CorruptError: As `restore`.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/numpy", {"w": np.arange(3)}, overwrite=True)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/numpy")
        {'w': array([0, 1, 2])}
    """
    options = given(options)
    source = renamed_source(source_at(path, options)[0], rename)
    resolved = numpy_goals(source.manifest, select)
    return resolved.build(fetch(source, resolved.goals, options), [])


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


def fetch(source: Source, goals: Mapping[int, Goal], options: Options) -> dict[int, Any]:
    """The value of every goal by leaf number."""
    manifest = source.manifest
    stacks = manifest.arrays
    homes = _Homes(stacks, options)
    values: dict[int, Any] = {}
    by_stack: dict[int, _Rows] = {}
    weak: list[int] = []
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if goal.weak:
            weak.append(number)
        if record.stack is None or record.row is None:
            values[number] = _from_text(record, goal)
        else:
            by_stack.setdefault(record.stack, {})[record.row] = number, goal
    wants: list[Want] = []
    for stack, found in by_stack.items():
        for rows, goal in _ranges(found):
            home = homes.of(goal, stack)
            wants.append(Want(stack, rows, home.boxes, goal.cast, home.kept))
    steps = plan_read(stacks, wants, options.host_bytes)
    leaves = _Leaves(manifest, stacks, by_stack, homes, values)
    total = sum(step.n_bytes for step in steps)
    with undisturbed(source), reporting("restore", total, options.progress) as report:
        read(source, stacks, steps, options, leaves, report)
    leaves.empty_leaves()
    for number in weak:
        values[number] = _weakly_typed(values[number])
    return values


def _weakly_typed(array: Any) -> Any:
    """The same array with a weak type; its buffers are not touched. JAX has no public function for it."""
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, array._arrays, committed=array.committed, _skip_checks=True)


_Rows = dict[int, tuple[int, Goal]]
"""(leaf number, its goal) of rows of a stack."""


def _ranges(found: _Rows) -> Iterator[tuple[tuple[int, int], Goal]]:
    """Ranges of consecutive rows that have the same goal."""
    begun = end = -1
    goal: Goal | None = None
    for row in sorted(found):
        new = found[row][1]
        if row != end or new is not goal:
            if goal is not None:
                yield (begun, end), goal
            begun, goal = row, new
        end = row + 1
    if goal is not None:
        yield (begun, end), goal


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices want, with the places on those devices that want it."""
    found: dict[Box, list[Any]] = {}
    for device, box in addressable_boxes(sharding, shape):
        found.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return found


# Handing over ---------------------------------------------------------------------------------------------


_FEW_COLLECTIONS = 100_000
"""Objects made between two runs of Python's garbage collector while arrays are made; Python's default is 700."""


@contextlib.contextmanager
def seldom_collected() -> Generator[None]:
    """With Python's garbage collector running seldom: it would walk all objects of the process again and again while
    thousands of arrays are made, none of which is garbage. 20,000 leaves onto 8 devices take 1.3 s of CPU, not 1.7."""
    usual = gc.get_threshold()
    if not 0 < usual[0] < _FEW_COLLECTIONS:  # off, or another thread is here too
        yield
        return
    try:
        gc.set_threshold(_FEW_COLLECTIONS, *usual[1:])
        yield
    finally:
        if gc.get_threshold()[0] == _FEW_COLLECTIONS:
            gc.set_threshold(*usual)


class _Leaves:
    """Makes the values of leaves of what is read."""

    def __init__(
        self,
        manifest: Manifest,
        stacks: Sequence[Stack],
        by_stack: Mapping[int, _Rows],
        homes: _Homes,
        values: dict[int, Any],
    ) -> None:
        self._manifest = manifest
        self._stacks = stacks
        self._by_stack = by_stack
        self._homes = homes
        self._values = values
        self._parts: dict[tuple[int, int, int], list[Any]] = {}
        """By stack, row and box: an array for each device that wants it, as far as it is read."""

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Rows become arrays of the host, or go to the devices in one batched call."""
        with seldom_collected():
            return self._deliver(step, buffers)

    def _deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        hosts: list[Array] = []
        targets: list[Any] = []
        pieces: list[tuple[list[int], Goal, int]] = []
        for run, found in zip(step.runs, buffers, strict=True):
            for (begun, ended), goal in _ranges({row: self._by_stack[step.stack][row] for row in range(*run.rows)}):
                leaves = [self._by_stack[step.stack][row][0] for row in range(begun, ended)]
                home = self._homes.of(goal, step.stack)
                if run.streamed:
                    for row, leaf in enumerate(leaves, begun):
                        self._finish_streamed(leaf, goal, step.stack, row, len(run.boxes))
                    continue
                rows = [_rows(buffer[begun - run.rows[0] : ended - run.rows[0]]) for buffer in found]
                if goal.kind == "numpy":
                    self._values.update(zip(leaves, rows[0], strict=True))
                elif goal.kind not in ("jax", "key"):
                    for leaf, view in zip(leaves, rows[0], strict=True):
                        self._values[leaf] = on_host(view, goal, self._manifest.leaves[leaf].path)
                elif home.whole:
                    hosts.extend(rows[0])
                    targets.extend([goal.sharding] * len(leaves))
                    pieces.append((leaves, goal, 1))
                else:
                    wanted = [device for devices in home.devices for device in devices]
                    for views in zip(*rows, strict=True):
                        for view, devices in zip(views, home.devices, strict=True):
                            hosts.extend([view] * len(devices))
                        targets.extend(wanted)
                    pieces.append((leaves, goal, len(wanted)))
        placed = jax.device_put(hosts, targets) if hosts else []
        rest = iter(placed)
        for leaves, goal, count in pieces:
            if goal.kind == "jax" and self._homes.of(goal, step.stack).whole:
                self._values.update(zip(leaves, itertools.islice(rest, len(leaves)), strict=True))
            else:
                for leaf in leaves:
                    self._finish(leaf, goal, step.stack, list(itertools.islice(rest, count)))
        return placed

    def _finish_streamed(self, leaf: int, goal: Goal, stack: int, row: int, boxes: int) -> None:
        """A leaf whose boxes were gathered on the devices."""
        parts = [part for box in range(boxes) for part in self._parts.pop((stack, row, box))]
        dtype = _wanted_dtype(self._stacks[stack], goal)
        self._finish(leaf, goal, stack, [_as_dtype(part, dtype) for part in parts])

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        """Put a part of a large box onto its devices, into the array that gathers them there."""
        run, number = at
        box = step.runs[run].boxes[number]
        touched: dict[Any, Any] = {}
        for offset, row in enumerate(range(*part[0])):
            _, goal = self._by_stack[step.stack][row]
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
        found = [(number, *one) for number, rows in self._by_stack.items() for one in rows.values()]
        for number, leaf, goal in found:
            if leaf in self._values:
                continue
            stack = self._stacks[number]
            dtype = _wanted_dtype(stack, goal)
            home = self._homes.of(goal, number)
            if goal.kind not in ("jax", "key"):
                self._values[leaf] = on_host(np.empty(stack.shape, dtype), goal, self._manifest.leaves[leaf].path)
            elif home.whole:
                self._finish(leaf, goal, number, [jax.device_put(np.empty(stack.shape, dtype), goal.sharding)])  # pyright: ignore
            else:
                placed = zip(home.boxes, home.devices, strict=True)
                parts = [jax.device_put(np.empty(extent(box), dtype), d) for box, devices in placed for d in devices]
                self._finish(leaf, goal, number, parts)

    def _finish(self, leaf: int, goal: Goal, number: int, parts: list[Any]) -> None:
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
            record = self._manifest.leaves[leaf]
            try:
                array = jax.random.wrap_key_data(array, impl=record.impl)
            except (TypeError, ValueError) as error:
                raise ManifestError(
                    f"leaf {show(record.path)} cannot be PRNG keys of implementation {record.impl!r}: {error}"
                ) from error
        self._values[leaf] = array


def _rows(buffer: Array) -> Sequence[Array]:
    """Its rows, which are arrays even where they are scalars."""
    return list(buffer) if buffer.ndim > 1 else [buffer[row, ...] for row in range(len(buffer))]


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
    assign(cast, view)
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
