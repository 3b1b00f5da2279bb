"""The result of `Checkpoint.plan`: what each process would read, and which leaves would change their layout."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from jaxckpt._devices.shardings import PlannedSharding, placement
from jaxckpt._inspect.drawing import Bar, Markup, bars, definitions, element, joined, notebook, table
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Spec, show_axes, show_spec, spec_of, volume, whole_box
from jaxckpt._model.leaves import show_layout
from jaxckpt._model.records import LeafRecord, Manifest, MeshRecord
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import show_bytes
from jaxckpt._restore.destinations import can_keep_buffers
from jaxckpt._restore.fetch import goal_layout, split_tied_goals
from jaxckpt._restore.read_plan import ReadCost, WantedRows, plan_read, read_cost
from jaxckpt._restore.resolve import Goal, Resolved, host_goal
from jaxckpt._restore.shared_exchange import needs_whole_job
from jaxckpt._restore.shared_reads import Members, Partition, Round, members_of, plan_rounds, share, shared_cost
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
    """Path of the leaf."""

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
        """Bytes that the processes need, summed over processes. A box that several devices of a process need is counted
        once."""
        return sum(part.cost.needed_bytes for part in self.processes)

    @property
    def read_bytes(self) -> int:
        """Bytes of the chunks and indexes that would be read (uncompressed), summed over processes."""
        return sum(part.cost.read_bytes for part in self.processes)

    @property
    def received_bytes(self) -> int:
        """Bytes that processes would receive from other processes (`Options.read`), summed over processes."""
        return sum(part.cost.received_bytes for part in self.processes)

    @property
    def requests(self) -> int:
        """Storage reads, summed over processes, before tensorstore merges neighboring ones."""
        return sum(part.cost.requests for part in self.processes)

    @property
    def over_read(self) -> float:
        """read_bytes / needed_bytes: 1.0 means that only needed bytes are read. Also 1.0 if nothing is needed. With
        `Options(read="shared")` it can be less, because processes read for each other."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0

    @property
    def peak_host_bytes(self) -> int:
        """The most host memory that any process needs in addition to the arrays. For a mesh that this machine does not
        have, it includes data on its way to the devices, which may have their own memory."""
        return max((part.cost.peak_host_bytes for part in self.processes), default=0)

    def __repr__(self) -> str:
        count = sum(len(process.device_bytes) for process in self.processes)
        onto = f"{show_count(len(self.leaves), 'leaf')} onto {show_count(count, 'device')}"
        return f"<RestorePlan: {onto}, {show_bytes(self.read_bytes)} read ({self.over_read:.3f} × needed)>"

    def _repr_html_(self) -> str:
        """For notebooks: the figures, a bar for each process, and the leaves that change their layout."""
        return notebook(draw_plan(self, _MAX_BARS))

    def __str__(self) -> str:
        busiest = max(self.processes, key=lambda part: part.cost.read_bytes)
        devices = [size for part in self.processes for size in part.device_bytes.values()]
        lines = [
            f"{show_count(len(self.leaves), 'leaf')} onto {show_count(len(devices), 'device')} of"
            f" {show_count(len(self.processes), 'process')}",
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
    sizes = [size for part in plan.processes for size in part.device_bytes.values()]
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
    busiest = sorted(plan.processes, key=lambda part: -part.cost.read_bytes)[:max_bars]
    widest = max(1, *(max(part.cost.read_bytes, part.cost.needed_bytes) for part in busiest))
    lines = [_bar(part, widest) for part in sorted(busiest, key=lambda part: part.process)]
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
            table(["saved as", "restored as", "leaves"], rows, text_columns=2),
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


def plan_restore(manifest: Manifest, resolved: Resolved, options: Options) -> RestorePlan:
    """Compute what every process reads for the goals."""
    stacks, goals = manifest.decoded_stacks, resolved.goals
    leaf_groups = split_tied_goals(manifest, goals)
    group_numbers = {number: turn for turn, some in enumerate(leaf_groups) for number in some}
    wanted: list[list[tuple[WantedRows, Goal, dict[int, tuple[Box, ...]] | None]]] = [[] for _ in leaf_groups]
    device_bytes: dict[int, dict[Any, int]] = {}
    leaves: list[LeafPlan] = []
    placed = functools.cache(_boxes_and_bytes)
    for number, goal in sorted(goals.items()):
        record = manifest.leaves[number]
        if record.stack is None or record.row is None:
            continue
        stack, rows = stacks[record.stack], (record.row, record.row + 1)
        before = saved_layout(manifest, record)
        leaves.append(
            LeafPlan(record.path, stack.dtype, stack.shape, before, _restored_layout(goal.sharding, goal.on_devices))
        )
        want = WantedRows(record.stack, rows, (whole_box(stack.shape),), goal.cast, can_keep_buffers(goal))
        if goal.sharding is None:
            wanted[group_numbers[number]].append((want, goal, None))
            continue
        boxes_of, bytes_of = placed(goal.sharding, stack.shape, (goal.cast or DTYPES[stack.dtype]).itemsize)
        wanted[group_numbers[number]].append((want, goal, boxes_of))
        for process, device, n_bytes in bytes_of:
            sizes = device_bytes.setdefault(process, {})
            sizes[device] = sizes.get(device, 0) + n_bytes
    # Every process first reads the leaves whose cast depends on their values.
    on_host = host_goal("numpy")
    for some in split_tied_goals(manifest, dict.fromkeys(resolved.unproven, on_host)):
        records = [manifest.leaves[number] for number in some]
        places = [(*manifest.stack_and_row(record), whole_box(manifest.leaf_shape(record))) for record in records]
        wanted.append([(WantedRows(stack, (row, row + 1), (box,)), on_host, None) for stack, row, box in places])
    readers = {process for some in wanted for *_, boxes_of in some for process in boxes_of or ()}
    has_real_sharding = any(isinstance(goal.sharding, Sharding) for some in wanted for _, goal, _ in some)
    if has_real_sharding:  # includes processes without a part of any leaf
        readers.update(range(jax.process_count()))
    processes = sorted(readers) or [0]
    together = len(processes) if has_real_sharding and needs_whole_job() else None
    cells = [[goal_layout(goal, stacks[want.stack].shape, processes) for want, goal, _ in some] for some in wanted]
    planned: dict[tuple[int, Members], dict[Partition, list[Round]]] = {}
    plans: list[ProcessPlan] = []
    for process in processes:
        cost = ReadCost()
        needed = 0
        for turn, some in enumerate(wanted):
            wants = [replace(want, boxes=b.get(process, ())) if b is not None else want for want, _, b in some]
            needed += sum(sum(map(volume, want.boxes)) * stacks[want.stack].itemsize for want in wants)
            shared: dict[Partition, list[WantedRows]] = {}
            if options.read == "shared":
                wants, shared = share(stacks, list(zip(wants, cells[turn], strict=True)), process, together)
            cost += read_cost(stacks, plan_read(stacks, wants, options.host_bytes), options.host_bytes)
            for partition, common in shared.items():
                members = members_of(partition, process)
                by_partition = planned.setdefault((turn, members), {})
                if common and partition not in by_partition:
                    by_partition[partition] = plan_rounds(stacks, common, members, options.host_bytes)
                cost += shared_cost(stacks, by_partition.get(partition, []), process, options.host_bytes)
        plans.append(ProcessPlan(process, replace(cost, needed_bytes=needed), device_bytes.get(process, {})))
    value_dependent = tuple(problem.leaf or "" for problem in resolved.unproven.values())
    return RestorePlan(tuple(plans), tuple(leaves), value_dependent)


def _boxes_and_bytes(
    sharding: Sharding | PlannedSharding, shape: tuple[int, ...], itemsize: int
) -> tuple[dict[int, tuple[Box, ...]], list[tuple[int, Any, int]]]:
    """The distinct boxes that each process needs, and (process, device, bytes) of every device."""
    planned = isinstance(sharding, PlannedSharding)
    places = sharding.placement(shape) if planned else placement(sharding, shape)
    boxes: dict[int, dict[Box, None]] = {}
    for _, process, box in places:
        boxes.setdefault(process, {})[box] = None
    n_bytes = [(process, device, volume(box) * itemsize) for device, process, box in places]
    return {process: tuple(distinct) for process, distinct in boxes.items()}, n_bytes


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
    """The layout of a goal with this sharding."""
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
