"""Looking at a checkpoint without restoring it: lazy leaves, and the plan of a restore as a person reads it."""

from __future__ import annotations

import collections
import functools
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from jaxckpt._format.grid import Box, Spec, show_axes, show_spec, spec_of, volume, whole
from jaxckpt._format.layouts import Placement, PlannedSharding, Specs, distinct, partition_spec, placement, show_layout
from jaxckpt._format.records import LeafRecord, Manifest, MeshRecord
from jaxckpt._format.tree import DTYPES, Select, Tree, closest, decode_value, show, unflatten
from jaxckpt._inspect.drawing import (
    Bar,
    Markup,
    bars,
    clipped,
    definitions,
    element,
    joined,
    layout_drawing,
    notebook,
    table,
    treemap,
)
from jaxckpt._restore.plan import ReadCost, Want, plan_read, read_cost
from jaxckpt._restore.reading import read_box
from jaxckpt._restore.restore import kept, on_host
from jaxckpt._restore.source import Location, Native, Source, source_at
from jaxckpt._restore.target import (
    Goal,
    Renaming,
    Request,
    numpy_goal,
    renamed_source,
    require_request,
    resolve,
    split_rename,
)
from jaxckpt._runtime.errors import counted
from jaxckpt._runtime.options import Options, given, whole_number
from jaxckpt._runtime.progress import show_bytes
from jaxckpt._storage.manifests import load_states
from jaxckpt._storage.store import Array


def open(path: Location, *, rename: Renaming | None = None, options: Options | None = None) -> Checkpoint:
    """Open a checkpoint to look into it; only its manifest is read.

    Args:
        path: Where `save` wrote, or another checkpoint that `restore` takes.
        rename: As for `restore`: the checkpoint is shown with these names, or through these rules.
        options: See `Options`.

    Returns:
        A `Checkpoint`. Any process may call this alone; no JAX backend is started.

    Raises:
        NotACheckpointError: No manifest at `path`.
        ManifestError: The manifest is damaged or of a newer format.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/open", {"w": np.arange(100)}, overwrite=True)
        >>> jaxckpt.open("/tmp/jaxckpt-doc/open")["w"][8:12]
        array([ 8,  9, 10, 11])
    """
    options = given(options)
    source = renamed_source(source_at(path, options)[0], rename)
    return Checkpoint(source, options)


_MOST_BARS = 24
"""Processes that have a bar of their own in a notebook."""


class LazyLeaf:
    """A leaf of a checkpoint. Indexing it as a NumPy array reads the chunks that are touched, and no others."""

    __slots__ = ("_manifest", "_number", "_options", "_record", "_source")

    def __init__(self, source: Source, number: int, options: Options) -> None:
        self._source = source
        self._manifest: Manifest = source.manifest
        self._number = number
        self._options = options
        self._record: LeafRecord = source.manifest.leaves[number]

    @property
    def path(self) -> str:
        """Its path in the tree, for example "params/layers/3/kernel"."""
        return self._record.path

    @property
    def kind(self) -> str:
        """What it was: "jax", "numpy", "numpy_scalar", "key", "str", "bytes", "int", "float", "bool", "complex"."""
        return self._record.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; () for a Python value; of the raw data for a PRNG key."""
        return () if self._record.stack is None else self._manifest.leaf_shape(self._record)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its NumPy dtype (of ml_dtypes for bfloat16, float8 and int4)."""
        if self._record.stack is None:
            return np.asarray(self.value).dtype
        return DTYPES[self._manifest.stacks[self._record.stack].dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of its data; 0 for a value that lies in the manifest."""
        return 0 if self._record.stack is None else math.prod(self.shape) * self.dtype.itemsize

    @property
    def spec(self) -> Any:
        """The jax.sharding.PartitionSpec it was saved with; an empty one where it had none."""
        return partition_spec(self._manifest.leaf_layout(self._record)[1])

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis sizes of the mesh it was saved on; empty where it was on none."""
        mesh, _, _ = self._manifest.leaf_layout(self._record)
        return types.MappingProxyType(mesh.axes if mesh else {})

    @property
    def layout(self) -> str:
        """Mesh and spec it was saved with, in words."""
        if self._record.layout is None:
            return "host"
        return show_layout(*self._manifest.leaf_layout(self._record))

    @property
    def value(self) -> Any:
        """The whole leaf, without devices: a NumPy array or scalar, or the Python value."""
        if self._record.value is not None:
            return decode_value(self._record.kind, self._record.value)
        if self._record.kind in ("str", "bytes"):
            return on_host(self[...], numpy_goal(self.kind), self.path)
        return self[...]

    def __getitem__(self, index: Any) -> Any:
        """NumPy indexing: integers, slices, Ellipsis and None read their own chunks; index arrays read their hull."""
        if self._record.stack is None:
            return np.asarray(self.value)[index]
        box, rest = _hull(index, self.shape)
        return read_box(self._source, self._number, box, self._options)[rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = np.asarray(self.value if self._record.stack is None else self[...])
        return array if dtype is None else array.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d leaf")
        return self.shape[0]

    def __repr__(self) -> str:
        what = repr(self.value) if self._record.stack is None else f"{self.dtype}{list(self.shape)}"
        return f"<leaf {self.path!r}: {what}, {self.layout}>"

    def _repr_html_(self) -> str:
        """For notebooks: what it is, and its boxes on the mesh that it was saved on."""
        what = repr(self.value) if self._record.stack is None else f"{self.dtype}{list(self.shape)}"
        facts = {"leaf": self.path, "is": clipped(what, 200), "saved as": self.layout, "bytes": show_bytes(self.nbytes)}
        if self._record.stack is None:
            return notebook(definitions(facts))
        where = saved_where(self._manifest, self._record)
        drawn = [] if where.mesh is None else [layout_drawing(where.mesh, where.split, len(self.shape), where.on)]
        return notebook(definitions(facts), *drawn)


def _hull(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The box that an index touches, and the index that remains to be applied to it. Raises IndexError."""
    parts = [_index_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    used = sum(map(_dims, parts))
    if sum(part is Ellipsis for part in parts) > 1:
        raise IndexError("an index can have only one Ellipsis ('...')")
    if used > len(shape):
        raise IndexError(f"too many indices: {used} for an array of shape {shape}")
    box: list[tuple[int, int]] = []
    rest: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            box.extend((0, length) for length in shape[len(box) : len(box) + len(shape) - used])
            rest.append(Ellipsis)  # also for no dimension: index arrays on its two sides are not adjacent
        elif part is None:
            rest.append(None)
        elif isinstance(part, np.ndarray) and part.dtype == bool:  # a mask of as many dimensions as it has
            for _ in range(part.ndim):
                box.append((0, shape[len(box)]))
            rest.append(part)
        else:
            bounds, remaining = _axis_hull(part, shape[len(box)])
            box.append(bounds)
            rest.append(remaining)
    box.extend((0, length) for length in shape[len(box) :])
    return tuple(box), tuple(rest)


def _index_part(part: Any) -> Any:
    """Part of an index as None, Ellipsis, a slice, an int, or an array of ints or bools. Raises IndexError."""
    if part is None or part is Ellipsis or isinstance(part, slice):
        return part
    array = np.asarray(part)
    if array.size == 0 and not hasattr(part, "dtype"):
        array = array.astype(np.intp)
    if array.dtype.kind not in "iub":
        raise IndexError(f"only integers, slices, Ellipsis, None and integer or boolean arrays index, found {part!r}")
    return int(array) if array.ndim == 0 and array.dtype != bool and not isinstance(part, np.ndarray) else array


def _dims(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1


def _axis_hull(part: Any, length: int) -> tuple[tuple[int, int], Any]:
    """(start, stop) of what an index of one dimension touches, and the index within that."""
    if isinstance(part, slice):
        numbers = range(*part.indices(length))
        if not numbers:
            return (0, 0), slice(0, 0)
        low, high = min(numbers[0], numbers[-1]), max(numbers[0], numbers[-1])
        return (low, high + 1), slice(None, None, numbers.step)
    array = np.asarray(part).astype(np.intp)
    if array.size and (array.min() < -length or array.max() >= length):
        raise IndexError(f"index {part} is out of bounds for a dimension of length {length}")
    numbers = np.where(array < 0, array + length, array)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, -1)
    return (low, high + 1), int(numbers - low) if isinstance(part, int) else numbers - low


class Checkpoint:
    """An opened checkpoint: a mapping of leaf paths to lazy leaves."""

    def __init__(self, source: Source, options: Options) -> None:
        self._source = source
        self._manifest: Manifest = source.manifest
        self._options = options
        self._numbers = source.manifest.numbers

    @property
    def path(self) -> str:
        """Where it is."""
        return self._source.url

    @property
    def format(self) -> str:
        """ "jaxckpt", or what other format it is in."""
        return self._manifest.format

    @property
    def save_id(self) -> str:
        """Unique id of the save that made it; empty in other formats, as are date and libraries."""
        return self._manifest.save_id

    @property
    def created(self) -> str:
        """When it was saved, UTC, ISO 8601."""
        return self._manifest.created

    @property
    def metadata(self) -> Any:
        """The JSON value that was given to `save`."""
        return self._manifest.metadata

    @property
    def step(self) -> int | None:
        """The training step that a Checkpointer saved in it; None where none did."""
        return None if self._manifest.step is None else self._manifest.step.number

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics given to `Checkpointer.save`; None for those that were not finite."""
        return types.MappingProxyType({} if self._manifest.step is None else self._manifest.step.metrics)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Subtrees that a Checkpointer's `components=` has dropped since it was saved."""
        return () if self._manifest.step is None else tuple(self._manifest.step.dropped)

    @property
    def process_states(self) -> list[dict[str, Any]]:
        """What each process gave to `save` as its own state, in order of the processes; empty where none did.

        Read and checked when asked for. Raises DataError.
        """
        if not isinstance(self._source, Native):
            return []
        return load_states(self._source.store, self._manifest)

    @property
    def libraries(self) -> Mapping[str, str]:
        """Versions of the libraries that saved it."""
        return types.MappingProxyType(self._manifest.libraries)

    @property
    def nbytes(self) -> int:
        """Bytes of array data, replicas once."""
        return sum(
            math.prod(record.shape) * record.rows * DTYPES[record.dtype].itemsize for record in self._manifest.stacks
        )

    @property
    def leaves(self) -> dict[str, LazyLeaf]:
        """Every leaf by path, in the tree's order."""
        return {path: self._leaf(number) for path, number in self._numbers.items()}

    def tree(self) -> Tree:
        """The saved tree with lazy leaves."""
        return unflatten(self._manifest.tree, [self._leaf(number) for number in range(len(self._manifest.leaves))])

    def __getitem__(self, path: str) -> LazyLeaf:
        if path not in self._numbers:
            below = [found for found in self._numbers if found.startswith(f"{path}/")]
            hint = f"; leaves below it: {', '.join(below[:3])}" if below else closest(path, self._numbers)
            raise KeyError(f"no leaf {show(path)} in {self.path}{hint}")
        return self._leaf(self._numbers[path])

    def __contains__(self, path: object) -> bool:
        return path in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        made = f"saved {self.created}" if self.created else self.format
        return f"<Checkpoint {self.path!r}: {counted(len(self), 'leaf')}, {show_bytes(self.nbytes)}, {made}>"

    def _repr_html_(self) -> str:
        """For notebooks: what it is, and the bytes of each subtree."""
        facts = {"checkpoint": self.path, "format": self.format, "leaves": f"{len(self):,}"}
        facts |= {"bytes": show_bytes(self.nbytes)} | ({"saved": self.created} if self.created else {})
        sizes = {leaf.path: self._manifest.leaf_bytes(leaf) for leaf in self._manifest.leaves}
        return notebook(definitions(facts), treemap(sizes))

    def _leaf(self, number: int) -> LazyLeaf:
        return LazyLeaf(self._source, number, self._options)

    def plan(
        self,
        target: Tree = None,
        *,
        mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: bool = True,
        devices_per_process: int = 8,
        options: Options | None = None,
    ) -> RestorePlan:
        """What `restore` with these arguments would read, for every process, without reading it.

        Args:
            target: As for `restore`.
            mesh: As for `restore`, or a mesh that this machine does not have: a jax.sharding.AbstractMesh, or axis
                sizes such as {"data": 64, "model": 8}.
            specs: As for `restore`.
            select: As for `restore`.
            rename: As for `restore`.
            strict: As for `restore`.
            devices_per_process: For a mesh that is not here, how many of its devices, in row-major order, each
                process would have.
            options: See `Options`.

        Returns:
            A `RestorePlan`; `print` shows it as a table.

        Raises:
            MismatchError, SpecError, LayoutError: As `restore` would.
        """
        devices_per_process = whole_number(devices_per_process, "devices_per_process", least=1)
        options = self._options if options is None else given(options)
        asked = Request(
            target,
            mesh,
            specs,
            select,
            *split_rename(rename),
            strict,
            None if isinstance(mesh, Mesh) else devices_per_process,
        )
        require_request(asked)
        manifest = self._manifest if asked.rules is None else asked.rules.over(self._source).manifest
        return _restore_plan(manifest, resolve(manifest, asked, options).goals, options)


# Plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What one process would read."""

    process: int
    cost: ReadCost

    device_bytes: Mapping[Any, int]
    """Bytes of arrays on each of its devices."""


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """One leaf before and after."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    saved: Where
    wanted: Where


@dataclass(frozen=True, slots=True)
class Where:
    """A layout in words."""

    spec: str
    """The PartitionSpec, such as "P('data')"; empty where there is none."""

    on: str
    """The mesh, such as "data=2×model=4"; else "device 3", "default device", "host"."""

    mesh: MeshRecord | None = field(default=None, repr=False)
    """The mesh itself, where there is one."""

    split: Spec = field(default=(), repr=False)
    """The spec itself: the mesh axes that split each leading dimension."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore would read, process by process."""

    processes: tuple[ProcessPlan, ...]
    leaves: tuple[LeafPlan, ...]

    @property
    def needed_bytes(self) -> int:
        """Bytes wanted, summed over processes; each box once in a process."""
        return sum(part.cost.needed_bytes for part in self.processes)

    @property
    def read_bytes(self) -> int:
        """Bytes of the chunks and indexes that would be read for them (uncompressed), summed over processes."""
        return sum(part.cost.read_bytes for part in self.processes)

    @property
    def requests(self) -> int:
        """Reads of storage, summed over processes, before tensorstore merges neighbours."""
        return sum(part.cost.requests for part in self.processes)

    @property
    def over_read(self) -> float:
        """read_bytes / needed_bytes; 1.0 where nothing is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0

    @property
    def peak_host_bytes(self) -> int:
        """The most that any process holds in host memory beside the arrays. For a mesh that is not here, whose devices
        may have memory of their own, what is on its way to them counts too."""
        return max((part.cost.peak_host_bytes for part in self.processes), default=0)

    def _repr_html_(self) -> str:
        """For notebooks: the figures, a bar for each process, and which leaves move."""
        return notebook(draw_plan(self, _MOST_BARS))

    def __str__(self) -> str:
        busiest = max(self.processes, key=lambda part: part.cost.read_bytes)
        devices = [size for part in self.processes for size in part.device_bytes.values()]
        lines = [
            f"{counted(len(self.leaves), 'leaf')} onto {counted(len(devices), 'device')} of"
            f" {counted(len(self.processes), 'process')}",
            f"  needed     {show_bytes(self.needed_bytes)}",
            f"  read       {show_bytes(self.read_bytes)} ({self.over_read:.3f} × needed),"
            f" {counted(self.requests, 'request')}",
            f"  busiest    process {busiest.process}: {show_bytes(busiest.cost.read_bytes)},"
            f" {counted(busiest.cost.requests, 'request')}",
            f"  per device {show_bytes(min(devices, default=0))} to {show_bytes(max(devices, default=0))}",
            f"  host       {show_bytes(self.peak_host_bytes)} at most beside the arrays",
        ]
        moves = collections.Counter((leaf.saved.on, leaf.wanted.on) for leaf in self.leaves)
        lines.extend(f"  {before} → {after}: leaves: {count}" for (before, after), count in moves.most_common())
        changed = [leaf for leaf in self.leaves if leaf.saved.spec != leaf.wanted.spec]
        width = max((len(leaf.path) for leaf in changed[:20]), default=0)
        lines.extend(
            f"  {leaf.path:{width}}  {leaf.dtype}{list(leaf.shape)}"
            f"  {leaf.saved.spec or '-'} → {leaf.wanted.spec or '-'}"
            for leaf in changed[:20]
        )
        if len(changed) > 20:
            lines.append(f"  … and {len(changed) - 20} more leaves with another spec")
        return "\n".join(lines)


def draw_plan(plan: RestorePlan, most_bars: int) -> Markup:
    """What a restore would read as HTML without styles: its figures, a bar for each process, which leaves move."""
    sizes = [size for part in plan.processes for size in part.device_bytes.values()]
    figures = {
        "needed": show_bytes(plan.needed_bytes),
        "read": show_bytes(plan.read_bytes),
        "read / needed": f"{plan.over_read:.3f}",
        "requests": f"{plan.requests:,}",
        "per device": f"{show_bytes(min(sizes, default=0))} to {show_bytes(max(sizes, default=0))}",
        "host memory beside the arrays": show_bytes(plan.peak_host_bytes),
    }
    busiest = sorted(plan.processes, key=lambda part: -part.cost.read_bytes)[:most_bars]
    widest = max(1, *(max(part.cost.read_bytes, part.cost.needed_bytes) for part in busiest))
    lines = [
        Bar(
            f"process {part.process}",
            f"{show_bytes(part.cost.read_bytes)}, {counted(part.cost.requests, 'request')}",
            (
                (
                    0,
                    min(part.cost.needed_bytes, part.cost.read_bytes) / widest,
                    f"needed: {show_bytes(part.cost.needed_bytes)}",
                ),
                (
                    1,
                    max(0, part.cost.read_bytes - part.cost.needed_bytes) / widest,
                    f"read besides: {show_bytes(part.cost.read_bytes - part.cost.needed_bytes)}",
                ),
            ),
        )
        for part in sorted(busiest, key=lambda part: part.process)
    ]
    rest = len(plan.processes) - len(busiest)
    moves = collections.Counter((_in_words(leaf.saved), _in_words(leaf.wanted)) for leaf in plan.leaves)
    rows = [[before, after, f"{count:,}"] for (before, after), count in moves.most_common(12)]
    if len(moves) > 12:
        rows.append([f"… {len(moves) - 12} more", "", f"{sum(count for _, count in moves.most_common()[12:]):,}"])
    return joined(
        [
            definitions(figures),
            bars("Bytes read by each process", lines, ["needed", "read besides"]),
            *([element("p", f"… and {rest:,} processes that read less")] if rest else []),
            table(["saved as", "restored as", "leaves"], rows, words=2),
        ]
    )


def _in_words(where: Where) -> str:
    return " on ".join(filter(None, [where.spec, where.on]))


def _restore_plan(manifest: Manifest, goals: Mapping[int, Goal], options: Options) -> RestorePlan:
    stacks = manifest.arrays
    placements: dict[tuple[Any, tuple[int, ...]], Placement] = {}
    wants: dict[int, list[Want]] = {}
    device_bytes: dict[int, dict[Any, int]] = {}
    boxes_of: dict[int, dict[int, tuple[Box, ...]]] = {}
    everywhere: list[Want] = []
    leaves: list[LeafPlan] = []
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if record.stack is None or record.row is None:
            continue
        stack, rows = stacks[record.stack], (record.row, record.row + 1)
        leaves.append(_leaf_plan(manifest, record, goal))
        if goal.sharding is None:
            everywhere.append(Want(record.stack, rows, (whole(stack.shape),), goal.cast, kept(goal)))
            continue
        key = (goal.sharding, stack.shape)
        if key not in placements:
            placements[key] = _placement(goal.sharding, stack.shape)
        found = placements[key]
        if id(found) not in boxes_of:
            held: dict[int, list[Box]] = {}
            for _, process, box in found:
                held.setdefault(process, []).append(box)
            boxes_of[id(found)] = {process: distinct(boxes) for process, boxes in held.items()}
        for process, boxes in boxes_of[id(found)].items():
            wants.setdefault(process, []).append(Want(record.stack, rows, boxes, goal.cast, kept(goal)))
        for device, process, box in found:
            sizes = device_bytes.setdefault(process, {})
            sizes[device] = sizes.get(device, 0) + volume(box) * stack.itemsize
    plans: list[ProcessPlan] = []
    for process in sorted(wants) or [0]:
        steps = plan_read(stacks, [*wants.get(process, ()), *everywhere], options.host_bytes)
        cost = read_cost(stacks, steps, options.host_bytes)
        plans.append(ProcessPlan(process, cost, device_bytes.get(process, {})))
    return RestorePlan(tuple(plans), tuple(leaves))


def _placement(sharding: Sharding | PlannedSharding, shape: tuple[int, ...]) -> Placement:
    return sharding.placement(shape) if isinstance(sharding, PlannedSharding) else placement(sharding, shape)


def _leaf_plan(manifest: Manifest, record: LeafRecord, goal: Goal) -> LeafPlan:
    stack = manifest.stacks[manifest.place(record)[0]]
    return LeafPlan(record.path, stack.dtype, tuple(stack.shape), saved_where(manifest, record), _where(goal))


def saved_where(manifest: Manifest, record: LeafRecord) -> Where:
    """The layout a leaf was saved in."""
    if record.layout is None:
        return Where("", "host")
    mesh, spec, layout = manifest.leaf_layout(record)
    if mesh is None:
        return Where("", show_layout(mesh, spec, layout))
    return Where(show_spec(spec), show_axes(mesh.axes), mesh, spec)


def _where(goal: Goal) -> Where:
    sharding = goal.sharding
    if sharding is None:
        return Where("", "default device" if goal.kind in ("jax", "key") else "host")
    if isinstance(sharding, PlannedSharding):
        mesh, spec = _planned_mesh(sharding.axes), sharding.spec
        return Where(show_spec(spec), show_axes(mesh.axes), mesh, spec)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh, spec = _real_mesh(sharding.mesh), spec_of(sharding.spec)
        return Where(show_spec(spec), show_axes(mesh.axes), mesh, spec)
    if len(sharding.device_set) == 1:
        return Where("", f"device {next(iter(sharding.device_set)).id}")
    return Where("", str(sharding))


# Thousands of leaves share a mesh of thousands of devices.
@functools.lru_cache(maxsize=16)
def _planned_mesh(axes: tuple[tuple[str, int], ...]) -> MeshRecord:
    n_devices = math.prod(size for _, size in axes)
    return MeshRecord(dict(axes), list(range(n_devices)), ["Auto"] * len(axes))


@functools.lru_cache(maxsize=16)
def _real_mesh(mesh: Mesh) -> MeshRecord:
    return MeshRecord(dict(mesh.shape), [device.id for device in mesh.devices.flat], ["Auto"] * len(mesh.shape))
