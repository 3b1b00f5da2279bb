"""Compiles every program that the library runs on devices with libtpu's compiler for TPUs, without having a TPU.

python tests/tpu_aot/programs.py v5e:2x4 v5e:16x16          a table in Markdown
python tests/tpu_aot/programs.py v5e:2x4 --json             one JSON object per line, for the tests
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # otherwise, libtpu would query the cloud's metadata server

import argparse
import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxckpt._devices import device_to_host, interconnect
from jaxckpt._restore import placement, wants
from jaxckpt._save import staging

MESHES = {"v5e:2x4": (2, 4), "v5e:16x16": (16, 16)}
LARGE = (16384, 16384)
"""Shape of the leaf that is exchanged and streamed."""

SMALL = (64, 256)
"""Shape of each leaf that is stacked and split."""

BOX = (16, 16384)
"""Shape of the box that one call exchanges: 1 MiB of float32."""

OBJECT = (1024, 16384)
"""Shape of the largest box that one call exchanges: an object of 64 MiB."""

GIVEN_WORDS = {"v5e:2x4": 2 << 20, "v5e:16x16": 1 << 16}
"""Number of 4-byte words that each device sends for a piece of a shared read. A piece has 64 MiB, from 2 hosts with 4
devices each, or from 64 hosts."""

COLLECTIVES = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")

MOVED = "bfloat16 float32 int32 int8 float8_e4m3fn int4 bool complex64 int64".split()
MOVED_FAR = "bfloat16 float32 complex64".split()
"""The dtypes that are compiled for 256 chips; those in `MOVED` are compiled for 8 chips."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiler's report for a program."""

    topology: str
    program: str
    dtype: str
    problem: str
    """The reason why the program does not compile; empty if it does."""

    collectives: list[str]
    local_bytes: int
    """Bytes of the largest argument on one device."""

    temporary_bytes: int
    """Bytes of device memory in addition to arguments and outputs, on each device."""

    aliased_bytes: int
    """Bytes of the outputs that reuse the memory of arguments."""

    device_output_bytes: int
    host_output_bytes: int
    seconds: float
    """CPU seconds to compile the program."""


def programs(mesh: Mesh, dtypes: list[str]) -> Iterator[tuple[str, str, Any, list[Any]]]:
    """(name, dtype, jitted function, abstract arguments) of each program."""
    spec = P("a", "b")
    split = NamedSharding(mesh, spec)
    device = next(iter(mesh.devices.flat))
    own = SingleDeviceSharding(device)
    part = tuple(side // n for side, n in zip(LARGE, mesh.devices.shape, strict=True))

    def abstract(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for name in dtypes:
        dtype = jnp.dtype(name)
        yield (
            "exchange",
            name,
            interconnect.box_replicator(split, BOX),
            [abstract(LARGE, dtype, split), abstract((2,), np.int32)],
        )
        cut = device_to_host.cutter((part[0] // 2, part[1]), np.dtype(dtype))
        yield "cut", name, cut, [abstract(part, dtype, own), abstract((2,), np.int32)]
    pinned = split.with_memory_kind("pinned_host")
    yield (
        "exchange from pinned_host",
        "float32",
        interconnect.box_replicator(pinned, BOX),
        [
            abstract(LARGE, np.float32, pinned),
            abstract((2,), np.int32),
        ],
    )
    objects = interconnect.box_replicator(split, OBJECT)
    yield "exchange of an object", "float32", objects, [abstract(LARGE, np.float32, split), abstract((2,), np.int32)]
    for name in ("float32", "bfloat16"):
        dtype = jnp.dtype(name)
        along = NamedSharding(mesh, P(None, *spec))
        yield (
            "stack",
            name,
            staging._stack(along, np.dtype(dtype)),
            [[abstract(SMALL, dtype, split)] * staging.SEND_ROWS],
        )
        block = abstract((wants.BLOCK_ROWS, *SMALL), interconnect.transfer_dtype(np.dtype(dtype)), along)
        yield "split", name, placement.splitter(split, np.dtype(dtype), wants.BLOCK_ROWS), [block]
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        # Staging calls jax.device_put, which usually copies without a program. This is the program of the other cases.
        copy = jax.jit(lambda x: x, out_shardings=pinned)
        yield "copy to pinned_host", name, copy, [abstract(part, dtype, own)]
        carrier = interconnect.transfer_dtype(np.dtype(dtype))
        cast = device_to_host.cutter((part[0] // 2, part[1]), np.dtype(np.float16))
        yield "cut and cast", name, cast, [abstract(part, dtype, own), abstract((2,), np.int32)]
        starts = tuple(abstract((), np.int32) for _ in part)
        piece = abstract((8, part[1]), carrier, own)
        yield "streaming update", name, placement._update, [abstract(part, carrier, own), piece, starts]
    yield "streaming bitcast", "bfloat16", placement._bitcast, [abstract(part, np.uint16, own), np.dtype(jnp.bfloat16)]


def shared_reads(topology: str, devices: list[Any]) -> Iterator[tuple[str, str, Any, list[Any]]]:
    """The same for each program that shares the data that one process reads, for hosts with 4 devices each."""
    hosts = len(devices) // 4
    for name, communities, givers in (
        ("gather", 1, None),
        ("gather in several groups", hosts // 2, None),
        ("gather of few", 1, max(1, hosts // 4)),
    ):
        mesh = Mesh(np.array(devices).reshape(communities, -1, 4), ("community", "process", "own"))
        along = NamedSharding(mesh, P(mesh.axis_names))
        words = jax.ShapeDtypeStruct((GIVEN_WORDS[topology] * mesh.size,), np.uint32, sharding=along)
        starts = jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=along)
        yield name, "uint32", interconnect.gatherer(mesh, givers), [words, starts]


def compiled(topology: str) -> Iterator[Compiled]:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices).reshape(MESHES[topology]), ("a", "b"))
    every = programs(mesh, MOVED if len(devices) == 8 else MOVED_FAR)
    for name, dtype, program, arguments in itertools.chain(every, shared_reads(topology, devices)):
        begun = time.process_time()
        on_mesh = contextlib.nullcontext()
        if name.startswith(("exchange", "stack", "split", "cut")):
            on_mesh = interconnect.transfer_context(None if name.startswith("cut") else mesh)
        try:
            with on_mesh:
                made = program.lower(*arguments).compile()
        except Exception as error:  # the table shows the error
            yield Compiled(topology, name, dtype, str(error), [], 0, 0, 0, 0, 0, time.process_time() - begun)
            continue
        seconds = time.process_time() - begun
        memory = made.memory_analysis()
        yield Compiled(
            topology,
            name,
            dtype,
            "",
            COLLECTIVES.findall(made.as_text()),
            max(_local_bytes(argument) for argument in jax.tree.leaves(arguments)),
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.output_size_in_bytes,
            memory.host_output_size_in_bytes,
            seconds,
        )


def _local_bytes(argument: Any) -> int:
    if not isinstance(argument, jax.ShapeDtypeStruct):
        return 0
    shape = argument.sharding.shard_shape(argument.shape) if argument.sharding else argument.shape
    return int(np.prod(shape)) * argument.dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("topologies", nargs="+", choices=MESHES)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if not asked.json:
        heads = (
            "Program",
            "Dtype",
            "Topology",
            "Compiles",
            "Collectives",
            "Largest argument",
            "Temporary",
            "Aliased",
            "s",
        )
        print("|", " | ".join(heads), "|\n|", " | ".join(["---"] * len(heads)), "|")
    for topology in asked.topologies:
        for one in compiled(topology):
            if asked.json:
                print(json.dumps(asdict(one)), flush=True)
                continue
            cells = [one.program, one.dtype, one.topology, one.problem[:60] or "yes"]
            cells.append(" ".join(one.collectives) or "none")
            sizes = [f"{n / 1024:,.0f} KiB" for n in (one.local_bytes, one.temporary_bytes, one.aliased_bytes)]
            print("|", " | ".join([*cells, *sizes, f"{one.seconds:.1f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
