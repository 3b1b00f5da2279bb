"""JAX shardings as boxes and cells, and as records that can be turned into shardings again."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._model.grid import Box, IntArray, Layout, Spec, layout_of, mesh_layout, spec_box, spec_boxes, spec_of
from jaxckpt._model.records import LayoutRecord, Manifest, MeshRecord, SavedLeaf
from jaxckpt._options import StagingMemory
from jaxckpt.errors import InputError, LayoutError, SpecError

Placement = tuple[tuple[Any, int, Box], ...]
"""(device, its process, its box) for every device of a sharding."""


def partition_spec(spec: Spec, reduced: Iterable[str] = ()) -> PartitionSpec:
    """The PartitionSpec of a spec and of reduced axes."""
    entries = (None if not entry else entry[0] if len(entry) == 1 else entry for entry in spec)
    return PartitionSpec(*entries, reduced=frozenset(reduced))


def reduced_axes(sharding: Sharding) -> list[str]:
    """The reduced mesh axes of a sharding, sorted."""
    return sorted(sharding.spec.reduced) if isinstance(sharding, NamedSharding) else []


def named_sharding(mesh: Mesh, spec: Spec, memory: str | None, reduced: Iterable[str] = ()) -> NamedSharding:
    """A spec on a mesh, in a non-default memory kind. Of the axes that were reduced on another mesh, those are reduced
    that this mesh has as explicit axes. Raises LayoutError if the devices lack that memory kind."""
    explicit = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}
    try:
        return NamedSharding(mesh, partition_spec(spec, explicit.intersection(reduced)), memory_kind=memory)
    except ValueError as error:
        raise LayoutError(
            f"it is in memory of kind {memory!r}, which the devices of the mesh do not have: {error}"
        ) from error


# Placements -----------------------------------------------------------------------------------------------


def placement(sharding: Sharding, shape: tuple[int, ...]) -> Placement:
    """Every device of a sharding with its process and box, including devices of other processes."""
    places: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    return tuple((device, device.process_index, _box(index, shape)) for device, index in places.items())


@functools.lru_cache(maxsize=1024)
def processes_of(sharding: Sharding) -> frozenset[int]:
    """The processes whose devices a sharding uses."""
    return frozenset(device.process_index for device in sharding.device_set)


def _box(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    """The box for JAX's slices, whose ends may be None."""
    return tuple(entry.indices(n)[:2] for entry, n in zip(index, shape, strict=True))


def process_layout(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """The cells that a sharding cuts an array into, and the processes that hold each."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return layout_of(((box, process) for _, process, box in placement(sharding, shape)), shape)
    sharding.shard_shape(shape)  # raises if the spec does not fit
    # An array without elements has no cells, so all processes hold it.
    return _mesh_layout(sharding.mesh, () if 0 in shape else spec_of(sharding.spec), len(shape))


# Cached, because a job has few meshes and specs for thousands of leaves, and each needs a loop over all devices.
@functools.lru_cache(maxsize=256)
def _mesh_layout(mesh: Mesh, spec: Spec, rank: int) -> Layout:
    return mesh_layout(_processes(mesh), mesh.axis_names, spec, rank)


@functools.lru_cache(maxsize=16)
def _processes(mesh: Mesh) -> IntArray:
    """The process of each mesh position."""
    return np.array([device.process_index for device in mesh.devices.flat], np.int64).reshape(mesh.devices.shape)


def addressable_boxes(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[Any, Box]]:
    """(device, box) of this process's devices, in the order in which `jax.Array.addressable_data` numbers them."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        sharding.shard_shape(shape)  # raises if the spec does not fit
        axes, spec = dict(sharding.mesh.shape), spec_of(sharding.spec)
        return [(device, spec_box(axes, spec, shape, position)) for device, position in _local_places(sharding.mesh)]
    places: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    return [(device, _box(index or (), shape)) for device, index in places.items()]


@functools.lru_cache(maxsize=16)
def _local_places(mesh: Mesh) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    """(device, its position in the mesh) of this process's devices. JAX would compute the boxes of all devices."""
    local = set(mesh.local_devices)
    return tuple((device, position) for position, device in np.ndenumerate(mesh.devices) if device in local)


@dataclass(frozen=True, slots=True)
class PlannedSharding:
    """A layout on a mesh that need not exist on this machine: axis sizes, a spec, and devices in each process."""

    axes: tuple[tuple[str, int], ...]
    spec: Spec
    devices_per_process: int

    def placement(self, shape: tuple[int, ...]) -> Placement:
        """The result of `placement` for a real sharding, with devices numbered in row-major order of the mesh."""
        boxes = spec_boxes(dict(self.axes), self.spec, shape)
        return tuple((device, device // self.devices_per_process, box) for device, box in enumerate(boxes))

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """The result of `process_layout` for a real sharding."""
        sizes = tuple(size for _, size in self.axes)
        processes = np.arange(math.prod(sizes)).reshape(sizes) // self.devices_per_process
        return mesh_layout(processes, [axis for axis, _ in self.axes], () if 0 in shape else self.spec, len(shape))


# Recording and recreating ---------------------------------------------------------------------------------


class LayoutTable:
    """Collects the distinct layouts and meshes of a tree's leaves."""

    def __init__(self) -> None:
        self._meshes: dict[Mesh, int] = {}
        self._numbers: dict[tuple[Sharding, bool], int] = {}
        self.meshes: list[MeshRecord] = []
        self.layouts: list[LayoutRecord] = []

    def add(self, sharding: Sharding, *, committed: bool) -> int:
        """The index of the layout record for a sharding and for whether the array was committed to it."""
        key = (sharding, committed)
        if key not in self._numbers:
            self._numbers[key] = len(self.layouts)
            self.layouts.append(self._record(sharding) if committed else LayoutRecord())
        return self._numbers[key]

    def _record(self, sharding: Sharding) -> LayoutRecord:
        memory = memory_kind(sharding)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            mesh = sharding.mesh
            if not all(isinstance(axis, str) for axis in mesh.axis_names):
                raise SpecError(f"its mesh has axes {mesh.axis_names}: only names that are str can be recorded")
            if mesh not in self._meshes:
                self._meshes[mesh] = len(self.meshes)
                ids = [device.id for device in mesh.devices.flat]
                types = [getattr(kind, "name", "Auto") for kind in mesh.axis_types]
                self.meshes.append(MeshRecord(dict(mesh.shape), ids, types))
            spec = [list(entry) for entry in spec_of(sharding.spec)]
            return LayoutRecord(self._meshes[mesh], spec, reduced_axes(sharding), memory=memory)
        if len(sharding.device_set) == 1:
            return LayoutRecord(device=next(iter(sharding.device_set)).id, memory=memory)
        return LayoutRecord(memory=memory, opaque=True)


@functools.lru_cache(maxsize=4096)
def memory_kind(sharding: Sharding) -> str | None:
    """The memory kind of a sharding; None for the default of its devices."""
    kind = sharding.memory_kind
    if kind is None:
        return None
    # On TPUs, only devices of this process report their memory.
    own = sharding.addressable_devices or next(iter(sharding.device_set)).client.local_devices()
    return None if kind == next(iter(own)).default_memory().kind else kind


@functools.lru_cache(maxsize=4096)
def pinned_memory(sharding: Sharding, memory: StagingMemory) -> Sharding | None:
    """Pinned memory of the host for copies of an array on one device; None if they go to pageable memory: by default on
    TPUs, and on devices that have no pinned memory. Raises InputError if it is required and does not exist.

    Copies to pinned memory need not be awaited, and on an H100 they move 50 GiB/s instead of 2. But on TPUs, the
    runtime's pinned memory grows with each save and is never returned: by 15 to 25 GB per save and host for a model of
    25 billion parameters on v5p-64, until none was left (Marin's issues 6774 and 6908; with pageable memory, 6924, it
    stayed flat). On GPUs, XLA's allocator reuses it, up to a limit. Orbax, too, uses it only on GPUs.
    """
    (device,) = sharding.device_set
    if memory == "pageable" or (memory == "auto" and device.platform == "tpu"):
        return None
    kinds = [kind.kind for kind in device.addressable_memories()]
    if "pinned_host" in kinds:
        return SingleDeviceSharding(device, memory_kind="pinned_host")
    if memory == "pinned":
        raise InputError(
            f'Options.staging_memory is "pinned", but {device} has no memory of kind "pinned_host", only'
            f' {", ".join(map(repr, kinds))}: pass "auto" or "pageable"'
        )
    return None


def saved_sharding(manifest: Manifest, layout: int) -> Sharding | None:
    """The sharding of a layout record on this machine's devices; None if uncommitted. Raises LayoutError."""
    record = manifest.layouts[layout]
    if record.opaque:
        raise LayoutError("is a sharding over several devices that is not a NamedSharding")
    devices = {device.id: device for device in jax.devices()}
    if record.mesh is not None:
        saved = manifest.meshes[record.mesh]
        if not all(number in devices for number in saved.devices):
            raise LayoutError(_missing_devices(saved.devices, devices))
        grid = np.array([devices[number] for number in saved.devices]).reshape(tuple(saved.axes.values()))
        types = tuple(getattr(AxisType, name) for name in saved.types)
        mesh = Mesh(grid, tuple(saved.axes), axis_types=types)
        spec = partition_spec(tuple(tuple(entry) for entry in record.spec), record.reduced)
        try:
            sharding: Sharding = NamedSharding(mesh, spec)
        except ValueError as error:
            raise LayoutError(f"JAX refuses: {error}") from error
    elif record.device is not None:
        if record.device not in devices:
            raise LayoutError(_missing_devices([record.device], devices))
        sharding = SingleDeviceSharding(devices[record.device])
    else:
        return None
    if record.memory is None:
        return sharding
    try:
        return sharding.with_memory_kind(record.memory)
    except ValueError as error:
        raise LayoutError(f"needs memory of kind {record.memory!r}: {error}") from error


def _missing_devices(needed: Iterable[int], available: Iterable[int]) -> str:
    """Ids and not counts: two processes of 4 devices and one process of 8 have as many devices, but not the same
    ids."""
    return f"needs the devices with the ids {_show_ids(needed)}; this job has {_show_ids(available)}"


def _show_ids(ids: Iterable[int]) -> str:
    """Ids of devices in a few characters: "0–3, 2048–2051"."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    shown = ["–".join(map(str, run)) for run in runs]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:6], "…", shown[-1]])


# The caller's mesh, and PRNG keys -------------------------------------------------------------------------


def mesh_in_context() -> Mesh | None:
    """The mesh of `jax.set_mesh`, if any."""
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.shape else None


@functools.cache
def key_dtype(impl: str) -> Any:
    """The dtype of PRNG keys of an implementation; None if JAX has no implementation of that name."""
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class TypedLeaf(SavedLeaf):
    """A leaf of a checkpoint with the dtype that it has in JAX: the leaf argument of the user's functions."""

    @property
    def dtype(self) -> Any:
        """Dtype that the user sees. Raises ValueError for PRNG keys of an implementation that JAX does not have."""
        dtype = key_dtype(self.record.impl or "") if self.kind == "key" else self.stored_dtype
        if dtype is None:
            raise ValueError(f"JAX has no implementation of PRNG keys that is called {self.record.impl!r}")
        return dtype
