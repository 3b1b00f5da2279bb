"""Runs one workload in one folder with all contenders in turn. peers.py starts this script once for each process.

In a round, all contenders run each operation; the order is reversed in every other round. The first round warms up and
compiles, and compares everything that it restores with the saved values, bit for bit. It counts only if it is the only
round. A contender whose round takes longer than SLOW_SECONDS does not take part in the following rounds.

Freed memory stays in the process (steady.py), for all contenders. Before each measurement, outside the measured time,
dirty pages are flushed. Before each save, the memory that its files need is touched (steady.py). Files are read from
the page cache.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import steady

case = json.loads(sys.argv[1])
steady.begin(devices=8 // case["processes"])

import functools
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import contenders
import jax
import numpy as np
import workloads
from contenders import Contender
from jax.experimental import multihost_utils
from workloads import Tree

import jaxckpt

SAVE_ASYNC, STEP_AFTER, STEP_ALONE = "save_async, until it returns", "a step just after it", "a step alone"
LOAD_NUMPY, ONE_LEAF, OPEN = "load_numpy", "one leaf", "open"
SLOW_SECONDS = 180
STEP_LEAVES = 5000  # with more leaves, the step that follows save_async takes minutes to compile

Samples = dict[str, dict[str, list[float]]]
"""Seconds of each round, by operation and contender."""

# The step is its own inverse, bit for bit, so two steps restore the tree.
step = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf, tree), donate_argnums=0)


class Turns:
    def __init__(self, folder: Path) -> None:
        self.workload = workloads.workload(case["workload"], quick=case["quick"])
        self.tree = self.workload.place()
        self.contenders = [
            kind(folder, self.workload)
            for kind in contenders.CONTENDERS
            if kind.name in case["contenders"] and case["processes"] in kind.processes
        ]
        self.wanted = {layout: self.workload.wanted(layout) for layout in self.workload.layouts}
        self.seconds: Samples = {}
        self.cpu_seconds: Samples = {}
        self.first_round: Samples = {}
        self.first_cpu: Samples = {}
        self.files: dict[str, dict[str, int]] = {}
        self.one_leaf_bytes: dict[str, int] = {}
        self.round = 0

    def run(self, result: Path) -> None:
        # On a mesh with too few devices, some processes would have no device.
        layouts = [
            layout
            for layout, wanted in self.wanted.items()
            if jax.tree.leaves(wanted)[0].sharding.num_devices % jax.process_count() == 0
        ]
        operations = [self.save_async, self.save, *(functools.partial(self.restore, layout) for layout in layouts)]
        if jax.process_count() == 1:
            operations += [self.load_numpy, self.one_leaf, self.open]
            if self.workload.scanned:
                operations += [functools.partial(self.layers, 3, 4), functools.partial(self.layers, 0, 6)]
        if self.workload.parameters:
            operations.append(self.parameters)
        if case["no_async"] or len(self.workload.leaves) > STEP_LEAVES:
            operations.remove(self.save_async)
        gc.freeze()  # so that collections before measurements do not scan all modules again
        order = self.contenders
        for self.round in range(case["rounds"] + 1):
            order, taken = order[::-1], dict.fromkeys(order, 0.0)
            for operation, contender in itertools.product(operations, order):
                begun = time.monotonic()
                operation(contender)
                taken[contender] += time.monotonic() - begun
            took_part = order
            order = [one for one in order if self.agreed(taken[one]) < SLOW_SECONDS]
            if self.round == 0:
                again = {one.name for one in order if case["rounds"]}
                for samples, first in ((self.seconds, self.first_round), (self.cpu_seconds, self.first_cpu)):
                    for operation, found in first.items():
                        alone = {name: taken for name, taken in found.items() if name not in again}
                        samples.setdefault(operation, {}).update(alone)
            if jax.process_index() == 0:  # after each round, so that running out of memory loses no completed rounds
                result.write_text(json.dumps(self.found()))
            for contender in took_part:
                self.remove(contender)

    def agreed(self, seconds: float) -> float:
        """The value of process 0, so that all processes make the same decision."""
        return float(multihost_utils.broadcast_one_to_all(np.array(seconds)))

    def found(self) -> dict[str, Any]:
        return {
            "bytes": self.workload.nbytes,
            "title": self.workload.title,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "first_round": self.first_round,
            "files": self.files,
            "one_leaf_bytes_read": self.one_leaf_bytes,
            "over_read": self.over_read(),
        }

    def over_read(self) -> dict[str, list[float]]:
        """For each layout that jaxckpt restores to, the bytes read per byte wanted of each process."""
        found: dict[str, list[float]] = {}
        for contender in self.contenders:
            if isinstance(contender, contenders.Jaxckpt) and contender.path.exists():
                for layout, wanted in self.wanted.items():
                    plan = jaxckpt.open(contender.path).plan(wanted)
                    found[layout] = [
                        part.cost.read_bytes / part.cost.needed_bytes
                        for part in plan.processes
                        if part.cost.needed_bytes
                    ]
        return found

    # Operations ---------------------------------------------------------------------------------------------

    def save_async(self, contender: Contender) -> None:
        if not hasattr(contender, "save_async"):
            return
        self.remove(contender)
        self.renew()
        self.prepare(contender, saving=True)
        wait = self.clock(SAVE_ASYNC, contender, lambda: contender.save_async(self.tree))
        self.tree = self.clock(STEP_AFTER, contender, lambda: step(self.tree))
        wait()
        self.tree = self.clock(STEP_ALONE, contender, lambda: step(self.tree))
        if self.round == 0:  # the save must contain the values from before the steps
            self.require_saved(
                contender, contender.restore(self.wanted[self.workload.layouts[0]]), self.workload.layouts[0]
            )

    def save(self, contender: Contender) -> None:
        self.remove(contender)
        self.renew()
        self.prepare(contender, saving=True)
        self.clock("save", contender, lambda: contender.save(self.tree))
        if self.round == 0:
            found = [path.stat().st_size for path in contender.path.rglob("*") if path.is_file()]
            found = found or [contender.path.stat().st_size]
            self.files[contender.name] = {"count": len(found), "bytes": sum(found)}

    def restore(self, layout: str, contender: Contender) -> None:
        self.prepare(contender)
        restored = self.clock(f"restore, {layout}", contender, lambda: contender.restore(self.wanted[layout]))
        if self.round == 0:
            self.require_saved(contender, restored, layout)

    def load_numpy(self, contender: Contender) -> None:
        self.prepare(contender)
        loaded = self.clock(LOAD_NUMPY, contender, contender.load_numpy)
        if self.round == 0:
            self.require_saved(contender, loaded, None)

    def one_leaf(self, contender: Contender) -> None:
        if not hasattr(contender, "one_leaf"):
            return
        self.prepare(contender)
        leaf = self.clock(ONE_LEAF, contender, contender.one_leaf)
        if self.round == 0:
            require(same(leaf, self.workload.value(self.workload.one)), contender, self.workload.one)
            if hasattr(contender, "one_leaf_by_read"):
                before = bytes_read()
                contender.one_leaf_by_read()
                self.one_leaf_bytes[contender.name] = bytes_read() - before

    def layers(self, first: int, last: int, contender: Contender) -> None:
        if not hasattr(contender, "layers"):
            return
        self.prepare(contender)
        operation = f"layers {first} to {last - 1}" if last - first > 1 else "one layer"
        found = self.clock(operation, contender, lambda: contender.layers(first, last))
        if self.round == 0:
            for path in self.workload.scanned:
                require(same(found[path], self.workload.value(path)[first:last]), contender, path)

    def parameters(self, contender: Contender) -> None:
        if not hasattr(contender, "parameters"):
            return
        self.prepare(contender)
        layout, subtree = self.workload.layouts[0], self.workload.parameters
        wanted = {subtree: self.wanted[layout][subtree]}
        found = self.clock("parameters alone", contender, lambda: contender.parameters(wanted))
        if self.round == 0:
            self.require_leaves(contender, workloads.flat(found), layout)

    def open(self, contender: Contender) -> None:
        if not hasattr(contender, "open"):
            return
        self.prepare(contender)
        self.clock(OPEN, contender, contender.open)

    # Steps of an operation ----------------------------------------------------------------------------------

    def clock(self, operation: str, contender: Contender, call: Callable[[], Any]) -> Any:
        """Time a call until its result is ready in all processes. Returns the result."""
        meet()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(call())
        meet()
        ended, ended_cpu = time.perf_counter(), time.process_time()
        wall, cpu = (self.seconds, self.cpu_seconds) if self.round else (self.first_round, self.first_cpu)
        for samples, sample in ((wall, ended - begun), (cpu, ended_cpu - begun_cpu)):
            samples.setdefault(operation, {}).setdefault(contender.name, []).append(sample)
        return result

    def prepare(self, contender: Contender, *, saving: bool = False) -> None:
        contender.prepare()
        gc.collect()
        if saving:
            steady.touch_memory(self.workload.nbytes // jax.process_count())
        os.sync()

    def renew(self) -> None:
        """Recreate the arrays as new objects, without the NumPy copies that JAX caches in an array."""

        def renewed(leaf: jax.Array) -> jax.Array:
            pieces = [shard.data for shard in leaf.addressable_shards]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)

        self.tree = jax.tree.map(renewed, self.tree)

    def remove(self, contender: Contender) -> None:
        meet()
        contender.remove()
        meet()

    def require_saved(self, contender: Contender, restored: Tree, layout: str | None) -> None:
        if isinstance(contender, contenders.Floor):
            require(same(restored, contender.data), contender, "file")
            return
        found = workloads.flat(restored)
        require(found.keys() == self.workload.leaves.keys(), contender, "tree")
        self.require_leaves(contender, found, layout)

    def require_leaves(self, contender: Contender, found: dict[str, Any], layout: str | None) -> None:
        shardings = self.workload.shardings(layout) if layout else {}
        for path, leaf in found.items():
            wanted = self.workload.value(path)
            if path in shardings:
                pieces = [(shard.data, wanted[shard.index]) for shard in leaf.addressable_shards]
                require(leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim), contender, path)
            else:
                pieces = [(leaf, wanted)]
            require(all(same(piece, part) for piece, part in pieces), contender, path)


def same(found: Any, wanted: Any) -> bool:
    return found.shape == wanted.shape and found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


def require(holds: bool, contender: Contender, what: str) -> None:
    if not holds:
        raise SystemExit(f"{contender.name} restored wrong values: {what}")


def bytes_read() -> int:
    """Bytes that this process read with read calls. Reads through memory maps are not counted."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def meet() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("meet")


def main() -> None:
    logging.disable(logging.WARNING)  # Orbax logs each save
    for torch_warning in ("torch.distributed is disabled", "The given NumPy array is not writable"):
        warnings.filterwarnings("ignore", torch_warning)
    if case["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(case["address"], case["processes"], case["rank"], initialization_timeout=60)
    Turns(Path(case["folder"])).run(Path(case["result"]))


main()
