"""The contenders. Each saves and restores as its users would, and defines only the methods that its library supports.

    save(tree)              returns when the tree is stored
    save_async(tree)        returns when the caller may continue, with a function that waits for the rest
    restore(wanted)         the tree, as JAX arrays in the wanted shardings
    load_numpy()            the tree, as NumPy arrays
    one_leaf()              one leaf of many, as a NumPy array
    one_leaf_by_read()      the same with a read call for every byte, because the kernel counts only these
    layers(first, last)     some layers of every scanned parameter, as NumPy arrays by path
    parameters(wanted)      one subtree of the tree, the parameters, in the wanted shardings
    open()                  the metadata, without values: at least names, shapes and dtypes

Durability: jaxckpt fsyncs its files and all folders above them. Orbax 0.12.8 fsyncs its data files and their folders,
but not its JSON files or the folder of its last rename. DCP fsyncs its data files and its metadata. safetensors does
not fsync, so this module fsyncs its file. The floor is fsynced.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from orbax.checkpoint.experimental import v1
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, Shard
from workloads import Tree, Workload, flat, nested

import jaxckpt

Wait = Callable[[], object]
Array = np.ndarray[Any, Any]


class Contender:
    name: str
    processes: tuple[int, ...] = (1, 4)

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.path = folder / self.name.replace(" ", "-")
        self.workload = workload

    def prepare(self) -> None:
        """Called before each measurement."""

    def remove(self) -> None:
        if jax.process_index() == 0:
            if self.path.is_dir():
                shutil.rmtree(self.path)
            self.path.unlink(missing_ok=True)


class Jaxckpt(Contender):
    name = "jaxckpt"
    options = jaxckpt.Options()

    def save(self, tree: Tree) -> None:
        jaxckpt.save(self.path, tree, options=self.options)

    def save_async(self, tree: Tree) -> Wait:
        return jaxckpt.save_async(self.path, tree, options=self.options).wait

    def restore(self, wanted: Tree) -> Tree:
        return jaxckpt.restore(self.path, wanted, options=self.options)

    def load_numpy(self) -> Tree:
        return jaxckpt.load_numpy(self.path, options=self.options)

    def one_leaf(self) -> Array:
        return jaxckpt.open(self.path, options=self.options)[self.workload.one][...]

    one_leaf_by_read = one_leaf

    def layers(self, first: int, last: int) -> dict[str, Array]:
        opened = jaxckpt.open(self.path, options=self.options)
        return {path: opened[path][first:last] for path in self.workload.scanned}

    def parameters(self, wanted: Tree) -> Tree:
        return jaxckpt.restore(self.path, wanted, select=self.workload.parameters, options=self.options)

    def open(self) -> object:
        return jaxckpt.open(self.path, options=self.options)


class JaxckptByTensorstore(Jaxckpt):
    """jaxckpt with all bytes moved by tensorstore."""

    name = "jaxckpt, io=tensorstore"
    options = jaxckpt.Options(io="tensorstore")


class Floor(Contender):
    """The same number of bytes in one plain file per process."""

    name = "one plain file"

    def __init__(self, folder: Path, workload: Workload) -> None:
        super().__init__(folder, workload)
        self.file = self.path / str(jax.process_index())
        share = workload.nbytes // jax.process_count()
        self.data = np.random.default_rng(0).integers(0, 256, share, np.uint8)

    def save(self, tree: Tree) -> None:
        self.path.mkdir(exist_ok=True)
        with self.file.open("wb", buffering=0) as file:
            rest = memoryview(self.data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def load_numpy(self) -> Array:
        data = np.empty(len(self.data), np.uint8)
        with self.file.open("rb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.readinto(rest) :]
        return data

    def restore(self, wanted: Tree) -> Array:
        return self.load_numpy()


class Safetensors(Contender):
    name = "safetensors"
    processes = (1,)

    def save(self, tree: Tree) -> None:
        save_file(flat(jax.device_get(tree)), self.path)
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def load_numpy(self) -> Tree:
        return nested(load_file(self.path))

    def restore(self, wanted: Tree) -> Tree:
        return jax.device_put(self.load_numpy(), jax.tree.map(lambda leaf: leaf.sharding, wanted))

    def one_leaf(self) -> Array:
        with safe_open(self.path, "numpy") as file:
            return file.get_tensor(self.workload.one)

    def layers(self, first: int, last: int) -> dict[str, Array]:
        with safe_open(self.path, "numpy") as file:
            return {path: file.get_slice(path)[first:last] for path in self.workload.scanned}

    def parameters(self, wanted: Tree) -> Tree:
        leaves = flat(wanted)
        with safe_open(self.path, "numpy") as file:
            return nested({path: jax.device_put(file.get_tensor(path), leaf.sharding) for path, leaf in leaves.items()})

    def open(self) -> object:
        with safe_open(self.path, "numpy") as file:
            return list(file.keys())


class Dcp(Contender):
    """PyTorch's distributed checkpoint of CPU tensors that share the memory of NumPy arrays."""

    name = "PyTorch DCP"
    processes = (1,)
    threads: int | None = None

    def __init__(self, folder: Path, workload: Workload) -> None:
        super().__init__(folder, workload)
        self.threads = self.threads or torch.get_num_threads()

    def prepare(self) -> None:
        torch.set_num_threads(self.threads)

    def save(self, tree: Tree) -> None:
        dcp.save(self.state(tree), checkpoint_id=self.path, no_dist=jax.process_count() == 1)

    def save_async(self, tree: Tree) -> Wait:
        return dcp.async_save(self.state(tree), checkpoint_id=self.path, no_dist=jax.process_count() == 1).result

    def restore(self, wanted: Tree) -> Tree:
        return jax.device_put(self.load_numpy(), jax.tree.map(lambda leaf: leaf.sharding, wanted))

    def load_numpy(self) -> Tree:
        return nested(self.load(list(self.workload.leaves)))

    def one_leaf(self) -> Array:
        return self.load([self.workload.one])[self.workload.one]

    one_leaf_by_read = one_leaf

    def open(self) -> object:
        return dcp.FileSystemReader(self.path).read_metadata()

    def load(self, paths: list[str]) -> dict[str, Array]:
        hosts = {path: np.empty(leaf.shape, leaf.dtype) for path in paths for leaf in [self.workload.leaves[path]]}
        dcp.load({path: _tensor(host) for path, host in hosts.items()}, checkpoint_id=self.path, no_dist=True)
        return hosts

    def state(self, tree: Tree) -> dict[str, Any]:
        return {path: _tensor(host) for path, host in flat(jax.device_get(tree)).items()}


class DcpOneThread(Dcp):
    """DCP with one torch thread. With torch's default of one thread per core, each copy of a tensor waits for all
    threads, which takes milliseconds on busy cores, even for small tensors. torchrun also sets one thread if it starts
    several processes."""

    name = "DCP one thread"
    threads = 1


class DcpShards(DcpOneThread):
    """DCP in a job of several processes: each passes its part of every leaf as a DTensor's local tensor."""

    processes = (4,)

    def __init__(self, folder: Path, workload: Workload) -> None:
        super().__init__(folder, workload)
        count = jax.process_count()
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=jax.process_index(), world_size=count)
        # by the number of rows of the device mesh; the processes have the same order as their devices
        self.meshes = {rows: dist.init_device_mesh("cpu", (rows, count // rows)) for rows in (2, 4)}

    def restore(self, wanted: Tree) -> Tree:
        leaves = flat(wanted)
        parts = {path: _Part.of(leaf) for path, leaf in leaves.items()}
        hosts = {path: np.empty(part.shape, leaves[path].dtype) for path, part in parts.items()}
        dcp.load({path: self.dtensor(host, leaves[path]) for path, host in hosts.items()}, checkpoint_id=self.path)
        pieces = [(hosts[path][index], device) for path, part in parts.items() for device, index in part.pieces.items()]
        placed = iter(jax.device_put([piece for piece, _ in pieces], [device for _, device in pieces]))
        return nested(
            {
                path: jax.make_array_from_single_device_arrays(
                    leaf.shape, leaf.sharding, list(itertools.islice(placed, len(parts[path].pieces)))
                )
                for path, leaf in leaves.items()
            }
        )

    def state(self, tree: Tree) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for path, leaf in flat(tree).items():
            part = _Part.of(leaf)
            host = np.empty(part.shape, leaf.dtype)
            for shard in leaf.addressable_shards:
                host[part.pieces[shard.device]] = shard.data
            made[path] = self.dtensor(host, leaf)
        return made

    def dtensor(self, local: Array, leaf: Any) -> Any:
        mesh, spec = self.meshes[leaf.sharding.mesh.shape["a"]], leaf.sharding.spec
        placements = [Shard(spec.index(axis)) if axis in spec else Replicate() for axis in ("a", "b")]
        stride = torch.empty(leaf.shape, device="meta").stride()
        return DTensor.from_local(_tensor(local), mesh, placements, run_check=False, shape=leaf.shape, stride=stride)


@dataclass(frozen=True, slots=True)
class _Part:
    """The box of a leaf that this process holds, and the places of its devices' pieces in it."""

    shape: tuple[int, ...]
    pieces: dict[jax.Device, tuple[slice, ...]]

    @classmethod
    def of(cls, leaf: Any) -> _Part:
        boxes = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        boxes = {
            device: [side.indices(size)[:2] for side, size in zip(index, leaf.shape, strict=True)]
            for device, index in boxes.items()
        }
        starts, ends = (
            [choose(box[axis][end] for box in boxes.values()) for axis in range(len(leaf.shape))]
            for end, choose in ((0, min), (1, max))
        )
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        pieces = {
            device: tuple(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True))
            for device, box in boxes.items()
        }
        return cls(shape, pieces)


def _tensor(host: Array) -> Any:
    if host.dtype == jnp.bfloat16:  # NumPy and torch have different bfloat16 types
        return torch.from_numpy(host.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(host)


class Orbax(Contender):
    name = "Orbax OCDBT"
    settings: ClassVar[dict[str, bool]] = {}

    def __init__(self, folder: Path, workload: Workload) -> None:
        super().__init__(folder, workload)
        self.checkpointer: Any = ocp.PyTreeCheckpointer(**self.settings)
        self.background: Any = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**self.settings))
        self.as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), nested(workload.leaves))

    def save(self, tree: Tree) -> None:
        self.checkpointer.save(self.path, tree, save_args=self.save_args(tree))

    def save_async(self, tree: Tree) -> Wait:
        self.background.save(self.path, args=ocp.args.PyTreeSave(tree, save_args=self.save_args(tree)))
        return self.background.wait_until_finished

    def save_args(self, tree: Tree) -> Tree:
        """Save options of each leaf."""
        return None

    def restore(self, wanted: Tree) -> Tree:
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        return self.checkpointer.restore(self.path, item=wanted, restore_args=arguments)

    def load_numpy(self) -> Tree:
        return self.checkpointer.restore(self.path, restore_args=self.as_numpy)

    def one_leaf(self) -> Array:
        one = self.workload.one
        return self.some([one])[one]

    one_leaf_by_read = one_leaf

    def some(self, paths: Sequence[str]) -> dict[str, Array]:
        arguments = ocp.args.PyTreeRestore(
            item=nested(dict.fromkeys(paths, 0)),
            restore_args=nested({path: flat(self.as_numpy)[path] for path in paths}),
            partial_restore=True,
        )
        return flat(self.checkpointer.restore(self.path, args=arguments))

    def layers(self, first: int, last: int) -> dict[str, Array]:
        """Layers of whole leaves, because Orbax reads only these."""
        return {path: leaf[first:last] for path, leaf in self.some(self.workload.scanned).items()}

    def parameters(self, wanted: Tree) -> Tree:
        arguments = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
        )
        return self.checkpointer.restore(self.path, args=arguments)

    def open(self) -> object:
        return self.checkpointer.metadata(self.path)


class OrbaxFiles(Orbax):
    """One file for each chunk of each leaf."""

    name = "Orbax no OCDBT"
    settings: ClassVar = {"use_ocdbt": False}


class OrbaxRaw(Orbax):
    """OCDBT without compression."""

    name = "Orbax raw"
    settings: ClassVar = {"use_compression": False}


class OrbaxChunks(OrbaxRaw):
    """OCDBT without compression, in chunks of about 1 MiB."""

    name = "Orbax chunks"

    def save_args(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), tree)


class OrbaxV1(Contender):
    name = "Orbax v1"

    def save(self, tree: Tree) -> None:
        v1.save(self.path, tree)

    def save_async(self, tree: Tree) -> Wait:
        return v1.save_async(self.path, tree).result

    def restore(self, wanted: Tree) -> Tree:
        return v1.load(self.path, wanted)

    def load_numpy(self) -> Tree:
        return v1.load(self.path, nested(dict.fromkeys(self.workload.leaves, np.ndarray)))

    def one_leaf(self) -> Array:
        one = self.workload.one
        wanted = dict.fromkeys(self.workload.leaves, v1.PLACEHOLDER) | {one: np.ndarray}
        return flat(v1.load(self.path, nested(wanted)))[one]

    one_leaf_by_read = one_leaf

    def open(self) -> object:
        return v1.metadata(self.path)


CONTENDERS: tuple[type[Contender], ...] = (
    Jaxckpt,
    JaxckptByTensorstore,
    Floor,
    Safetensors,
    Dcp,
    DcpOneThread,
    DcpShards,
    Orbax,
    OrbaxV1,
    OrbaxFiles,
    OrbaxRaw,
    OrbaxChunks,
)
