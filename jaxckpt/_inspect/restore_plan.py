"""The result of `Checkpoint.plan`: what each process would read, and which leaves would change their layout."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from jaxckpt._devices.shardings import PlannedSharding
from jaxckpt._inspect.drawing import Bar, Markup, bars, definitions, element, joined, notebook, table
from jaxckpt._model.grid import Spec, show_axes, show_spec, spec_of, volume
from jaxckpt._model.records import LeafRecord, Manifest, MeshRecord, show_layout
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import show_bytes
from jaxckpt._restore.read_plan import ReadCost
from jaxckpt._restore.resolve import AbstractLeaf, Resolved, host_leaf
from jaxckpt._restore.shared_exchange import needs_whole_job
from jaxckpt._restore.wants import placement_of, plan_reads, plan_wants, restored_dtype, split_ties
from jaxckpt._sources.source import Source
from jaxckpt.errors import show_count, show_path

_MAX_BARS = 24
"""The most processes with a separate bar in a notebook."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The reads of one process."""

    process: int
    """Index of the process."""

    cost: ReadCost
    """Bytes, requests and peak host memory of its reads."""

    device_bytes: Mapping[Any, int]
    """Bytes of arrays on each device of the process."""


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """The saved and the restored layout of a leaf."""

    path: str
    """Path of the leaf in the restored tree, after `rename`."""

    dtype: str
    """Stored dtype."""

    shape: tuple[int, ...]
    """Stored shape: for a PRNG key, of its raw data."""

    saved: LeafLayout
    """The layout at the time of the save."""

    wanted: LeafLayout
    """The layout after the restore."""


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """A layout, in words and as data."""

    spec: str
    """The PartitionSpec, such as "P('data')"; empty if there is none."""

    on: str
    """The mesh, such as "data=2×model=4"; otherwise "device 3", "default device" or "host"."""

    mesh: MeshRecord | None = field(default=None, repr=False)
    """The mesh itself, if there is one."""

    split: Spec = field(default=(), repr=False)
    """The spec itself: the mesh axes that split each leading dimension."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore would read, process by process."""

    processes: tuple[ProcessPlan, ...]
    """The reads of each process."""

    leaves: tuple[LeafPlan, ...]
    """The layouts of each leaf that is stored as an array."""

    value_dependent: tuple[str, ...] = ()
    """Paths of leaves whose cast depends on their values, which a plan does not read: `restore` raises MismatchError if
    the cast would change one of them."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that the processes need, summed over processes. A box that several devices of a process need counts
        once."""
        return sum(process.cost.needed_bytes for process in self.processes)

    @property
    def read_bytes(self) -> int:
        """Bytes of the chunks and indexes that would be read (uncompressed), summed over processes."""
        return sum(process.cost.read_bytes for process in self.processes)

    @property
    def received_bytes(self) -> int:
        """Bytes that processes would receive from other processes (`Options.read`), summed over processes."""
        return sum(process.cost.received_bytes for process in self.processes)

    @property
    def requests(self) -> int:
        """Storage reads, summed over processes, before tensorstore merges neighboring ones."""
        return sum(process.cost.requests for process in self.processes)

    @property
    def over_read(self) -> float:
        """read_bytes / needed_bytes: 1.0 means that only needed bytes are read. Also 1.0 if nothing is needed. With
        `Options(read="shared")` it can be less, because processes read for each other."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0

    @property
    def peak_host_bytes(self) -> int:
        """The most host memory that any process needs in addition to the arrays. For a mesh that this machine does not
        have, this includes data on its way to the devices, which may have their own memory."""
        return max((process.cost.peak_host_bytes for process in self.processes), default=0)

    def __repr__(self) -> str:
        count = sum(len(process.device_bytes) for process in self.processes)
        onto = f"{show_count(len(self.leaves), 'array')} onto {show_count(count, 'device')}"
        return f"<RestorePlan: {onto}, {show_bytes(self.read_bytes)} read ({self.over_read:.3f} × needed)>"

    def _repr_html_(self) -> str:
        """For notebooks: the figures, a bar for each process, and the leaves that change their layout."""
        return notebook(draw_plan(self, _MAX_BARS))

    def __str__(self) -> str:
        busiest = max(self.processes, key=lambda process: process.cost.read_bytes)
        devices = [size for process in self.processes for size in process.device_bytes.values()]
        lines = [
            plan_headline(self),
            f"  needed     {show_bytes(self.needed_bytes)}",
            f"  read       {show_bytes(self.read_bytes)} ({self.over_read:.3f} × needed),"
            f" {show_count(self.requests, 'request')}",
            *([f"  received   {show_bytes(self.received_bytes)} from other processes"] if self.received_bytes else []),
            f"  busiest    process {busiest.process}: {show_bytes(busiest.cost.read_bytes)},"
            f" {show_count(busiest.cost.requests, 'request')}",
            f"  per device {_range(devices)}",
            f"  host       {show_bytes(self.peak_host_bytes)} in addition to the arrays",
        ]
        if self.value_dependent:
            lines.append(f"  casts      only if no value changes, in {_shown_paths(self.value_dependent)}")
        moves = collections.Counter((leaf.saved.on, leaf.wanted.on) for leaf in self.leaves)
        lines.extend(
            f"  {before} → {after}: {show_count(count, 'array')}" for (before, after), count in moves.most_common()
        )
        changed = [leaf for leaf in self.leaves if leaf.saved.spec != leaf.wanted.spec]
        width = max((len(leaf.path) for leaf in changed[:20]), default=0)
        lines.extend(
            f"  {leaf.path:{width}}  {leaf.dtype}{list(leaf.shape)}"
            f"  {leaf.saved.spec or '-'} → {leaf.wanted.spec or '-'}"
            for leaf in changed[:20]
        )
        if len(changed) > 20:
            lines.append(f"  … and {len(changed) - 20} more arrays with another spec")
        return "\n".join(lines)


def plan_headline(plan: RestorePlan) -> str:
    """`29 arrays onto 8 devices of 2 processes`."""
    devices = sum(len(process.device_bytes) for process in plan.processes)
    return (
        f"{show_count(len(plan.leaves), 'array')} onto {show_count(devices, 'device')} of"
        f" {show_count(len(plan.processes), 'process')}"
    )


def _shown_paths(paths: Sequence[str]) -> str:
    """The first paths of leaves, and how many others there are."""
    rest = [f"{len(paths) - 3} more"] if len(paths) > 3 else []
    return ", ".join([*map(show_path, paths[:3]), *rest])


def _range(sizes: Sequence[int]) -> str:
    """The smallest and the largest of some sizes as text, or one size if both read the same."""
    ends = (show_bytes(min(sizes, default=0)), show_bytes(max(sizes, default=0)))
    return " to ".join(dict.fromkeys(ends))


def draw_plan(plan: RestorePlan, max_bars: int) -> Markup:
    """The plan as HTML without styles: its figures, a bar for each process, and the leaves that change their layout."""
    sizes = [size for process in plan.processes for size in process.device_bytes.values()]
    figures = {
        "needed": show_bytes(plan.needed_bytes),
        "read": show_bytes(plan.read_bytes),
        "read / needed": f"{plan.over_read:.3f}",
        **({"received from other processes": show_bytes(plan.received_bytes)} if plan.received_bytes else {}),
        "requests": f"{plan.requests:,}",
        "per device": _range(sizes),
        "additional host memory": show_bytes(plan.peak_host_bytes),
        **({"cast only if no value changes": _shown_paths(plan.value_dependent)} if plan.value_dependent else {}),
    }
    busiest = sorted(plan.processes, key=lambda process: -process.cost.read_bytes)[:max_bars]
    widest = max(1, *(max(process.cost.read_bytes, process.cost.needed_bytes) for process in busiest))
    lines = [_bar(process, widest) for process in sorted(busiest, key=lambda process: process.process)]
    rest = len(plan.processes) - len(busiest)
    moves = collections.Counter((_describe_layout(leaf.saved), _describe_layout(leaf.wanted)) for leaf in plan.leaves)
    rows = [[before, after, f"{count:,}"] for (before, after), count in moves.most_common(12)]
    if len(moves) > 12:
        rows.append([f"… {len(moves) - 12} more", "", f"{sum(count for _, count in moves.most_common()[12:]):,}"])
    return joined(
        [
            definitions(figures),
            bars("Bytes read by each process", lines, ["needed", "over-read"]),
            *([element("p", f"… and {rest:,} processes that read less")] if rest else []),
            table(["saved as", "restored as", "arrays"], rows, text_columns=2),
        ]
    )


def _bar(plan: ProcessPlan, widest: int) -> Bar:
    """What one process reads; `widest` is in bytes."""
    needed, read = plan.cost.needed_bytes, plan.cost.read_bytes
    over_read = max(0, read - needed)
    sections = (
        (0, min(needed, read) / widest, f"needed: {show_bytes(needed)}"),
        (1, over_read / widest, f"over-read: {show_bytes(over_read)}"),
    )
    return Bar(f"process {plan.process}", f"{show_bytes(read)}, {show_count(plan.cost.requests, 'request')}", sections)


def _describe_layout(where: LeafLayout) -> str:
    return " on ".join(filter(None, [where.spec, where.on]))


def plan_restore(source: Source, resolved: Resolved, options: Options) -> RestorePlan:
    """Compute what every process reads of the requested leaves."""
    manifest = source.manifest
    stored = {
        number: abstract for number, abstract in resolved.leaves.items() if manifest.leaves[number].stack is not None
    }
    # Every process first reads the leaves whose cast depends on their values.
    compared = dict.fromkeys(resolved.unproven, host_leaf("numpy"))
    shardings = [abstract.sharding for abstract in {id(abstract): abstract for abstract in stored.values()}.values()]
    has_real_sharding = any(isinstance(sharding, Sharding) for sharding in shardings)
    processes = range(max((_n_processes(sharding) for sharding in shardings if sharding is not None), default=1))
    job_size = len(processes) if has_real_sharding and needs_whole_job() else None
    costs = [ReadCost() for _ in processes]
    for abstract_leaves in [*split_ties(manifest, stored), *split_ties(manifest, compared)]:
        wants = plan_wants(source, abstract_leaves, options, processes, processes)
        for reads in plan_reads(wants, options, processes, job_size):
            costs[reads.process] += reads.cost(wants.stacks, options.host_bytes)
    device_bytes = _device_bytes(manifest, stored)
    plans = [ProcessPlan(process, costs[process], device_bytes.get(process, {})) for process in processes]
    value_dependent = tuple(problem.leaf or "" for problem in resolved.unproven.values())
    return RestorePlan(tuple(plans), tuple(_leaf_plans(manifest, resolved, stored)), value_dependent)


def _n_processes(sharding: Sharding | PlannedSharding) -> int:
    """The number of processes of the job that restores leaves with this sharding, even if some have no part of any."""
    if isinstance(sharding, PlannedSharding):
        return math.ceil(math.prod(size for _, size in sharding.axes) / sharding.devices_per_process)
    return jax.process_count()


def _leaf_plans(
    manifest: Manifest, resolved: Resolved, abstract_leaves: Mapping[int, AbstractLeaf]
) -> Iterator[LeafPlan]:
    for number, abstract in sorted(abstract_leaves.items()):
        record = manifest.leaves[number]
        stack = manifest.decoded_stacks[manifest.stack_and_row(record)[0]]
        restored = _restored_layout(abstract.sharding, abstract.on_devices)
        yield LeafPlan(resolved.paths[number], stack.dtype, stack.shape, saved_layout(manifest, record), restored)


def _device_bytes(manifest: Manifest, abstract_leaves: Mapping[int, AbstractLeaf]) -> dict[int, dict[Any, int]]:
    """By process, the bytes of arrays on each of its devices."""
    n_leaves = collections.Counter(
        (manifest.leaves[number].stack, abstract) for number, abstract in abstract_leaves.items()
    )
    n_bytes: dict[int, dict[Any, int]] = {}
    for (stack_number, abstract), count in n_leaves.items():
        if stack_number is None or abstract.sharding is None:
            continue
        stack = manifest.decoded_stacks[stack_number]
        itemsize = restored_dtype(stack, abstract).itemsize
        for device, process, box in placement_of(abstract.sharding, stack.shape):
            on_devices = n_bytes.setdefault(process, {})
            on_devices[device] = on_devices.get(device, 0) + count * volume(box) * itemsize
    return n_bytes


def saved_layout(manifest: Manifest, record: LeafRecord) -> LeafLayout:
    """The saved layout of a leaf."""
    if record.layout is None:
        return LeafLayout("", "host")
    mesh, spec, layout = manifest.leaf_layout(record)
    if mesh is None:
        return LeafLayout("", show_layout(mesh, spec, layout))
    return LeafLayout(show_spec(spec), show_axes(mesh.axes), mesh, spec)


@functools.lru_cache(maxsize=256)
def _restored_layout(sharding: Sharding | PlannedSharding | None, on_devices: bool) -> LeafLayout:
    """The layout of a restored leaf with this sharding."""
    if sharding is None:
        return LeafLayout("", "default device" if on_devices else "host")
    if isinstance(sharding, PlannedSharding):
        mesh, spec = MeshRecord.of_axes(sharding.axes), sharding.spec
        return LeafLayout(show_spec(spec), show_axes(mesh.axes), mesh, spec)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh, spec = _real_mesh(sharding.mesh), spec_of(sharding.spec)
        return LeafLayout(show_spec(spec), show_axes(mesh.axes), mesh, spec)
    if len(sharding.device_set) == 1:
        return LeafLayout("", f"device {next(iter(sharding.device_set)).id}")
    return LeafLayout("", str(sharding))


# Cached, because thousands of leaves share a mesh of thousands of devices.
@functools.lru_cache(maxsize=16)
def _real_mesh(mesh: Mesh) -> MeshRecord:
    return MeshRecord(dict(mesh.shape), [device.id for device in mesh.devices.flat], ["Auto"] * len(mesh.shape))
