"""A save and a restore in a job of thousands of processes, by simulation: requests, bytes and seconds of each phase.

    python benchmarks/cluster.py      # 64, 4,096 and 16,384 processes; a few minutes
    python benchmarks/coordination.py     # requests per second of JAX's coordination service, on this machine

The real code runs for: the planner, for one process at the full size of the job; the rendezvous of the processes,
message by message, with a coordination service in memory; and in process 0 the agreement on 16,384 trees, and the
manifest of all objects with its encoding and the decoding that each process does. The simulation counts requests to the
store and the coordination service. tests/test_cluster.py compares these counts with those of real jobs of 2, 4 and 8
processes.

Stated rates convert counts to seconds. Each phase takes as long as its slowest limit:

    Amazon S3   3,500 PUT, COPY, POST, DELETE and 5,500 GET, HEAD per second for a partitioned prefix
                (docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html)
    Google      initially 1,000 writes and 5,000 reads per second for a bucket, at best doubled within 20 minutes, and
                one write per second of one object (cloud.google.com/storage/docs/request-rate, …/quotas)
    latency     50 ms for a request for a small object: an assumption for both stores
    network     25 Gb/s for each process, including process 0, which runs the coordination service: an assumption
    service     as measured by coordination.py
    host        4 GiB for Options.host_bytes, the default with 32 cores and 128 GiB

The state is that of a dense model of 70 billion parameters (the shapes of Llama 3 70B) with Adam: parameters in
bfloat16, two moments in float32, 706 GB, in 2,170 leaves, or in 37 if the layers are scanned. A process has 4 devices.
Matrices are split over fsdp × tensor, at most 256 × 8 devices; the remaining devices are replicas.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import msgspec
import numpy as np
from coordination import NETWORK_BYTES, meet, wait
from workloads import nested

from jaxckpt import Options
from jaxckpt._arguments.pytree import flatten
from jaxckpt._devices.shardings import LayoutTable, PlannedSharding
from jaxckpt._model import manifest as manifests
from jaxckpt._model.grid import Box, Layout, Spec, touched_cells
from jaxckpt._model.records import LayoutRecord, LeafRecord, Manifest, MeshRecord
from jaxckpt._model.stacks import Stack, indexed_objects_of
from jaxckpt._restore.read_loop import reads_of
from jaxckpt._restore.resolve import LeafForm
from jaxckpt._restore.wants import Wants, plan_process_reads, plan_wants
from jaxckpt._save.consistency import Fingerprint, require_equal_fingerprints
from jaxckpt._save.describe import Draft
from jaxckpt._save.shared_path import PublishResult, compose_manifest
from jaxckpt._save.write import WrittenShare
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan, plan_save
from jaxckpt._store.fetching import objects_to_fetch
from jaxckpt._store.store import ObjectRecord

SIZES = (64, 4_096, 16_384)

LATENCY_SECONDS = 0.05


@dataclass(frozen=True)
class Rates:
    """The number of requests that a store handles per second."""

    name: str
    writes: float
    reads: float


STORES = (Rates("S3", 3_500, 5_500), Rates("GCS", 1_000, 5_000))


# The job --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    processes: int
    mesh: tuple[tuple[str, int], ...]
    devices_per_process: int = 4
    layers: int = 80
    width: int = 8_192
    hidden: int = 28_672
    heads: int = 1_024
    vocabulary: int = 128_256
    scanned: bool = False
    options: Options = field(default_factory=Options)

    def sharding(self, spec: Spec) -> PlannedSharding:
        return PlannedSharding(self.mesh, spec, self.devices_per_process)


def job_of(processes: int, *, scanned: bool) -> Job:
    """The job of 70 billion parameters with this number of processes."""
    tensor, devices = 8, processes * 4
    fsdp = min(256, devices // tensor)
    mesh = (("replica", devices // (tensor * fsdp)), ("fsdp", fsdp), ("tensor", tensor))
    return Job(processes, mesh, scanned=scanned, options=Options(read="auto", host_bytes=4 << 30))


def small_job(processes: int) -> Job:
    """A job that a test can run for real: two devices per process, and replicas if it has more than two processes."""
    mesh = (("replica", processes // 2), ("fsdp", 2), ("tensor", 2))
    return Job(
        processes, mesh, 2, layers=3, width=64, hidden=128, heads=32, vocabulary=96, options=Options(read="shared")
    )


def leaves_of(job: Job) -> dict[str, tuple[str, tuple[int, ...], Spec]]:
    """(dtype, shape, spec) of each leaf, by path."""
    into, out_of, whole = (("fsdp",), ("tensor",)), (("tensor",), ("fsdp",)), ()
    width, hidden, heads = job.width, job.hidden, job.heads
    layer = {
        "q": ((width, width), into),
        "k": ((width, heads), into),
        "v": ((width, heads), into),
        "o": ((width, width), out_of),
        "gate": ((width, hidden), into),
        "up": ((width, hidden), into),
        "down": ((hidden, width), out_of),
        "norm1": ((width,), whole),
        "norm2": ((width,), whole),
    }
    ends: dict[str, tuple[tuple[int, ...], Spec]] = {
        "embed": ((job.vocabulary, width), into),
        "head": ((width, job.vocabulary), out_of),
        "norm": ((width,), whole),
    }
    found: dict[str, tuple[str, tuple[int, ...], Spec]] = {}
    for part, dtype in (("params", "bfloat16"), ("mu", "float32"), ("nu", "float32")):
        for name, (shape, spec) in layer.items():
            if job.scanned:
                found[f"{part}/layers/{name}"] = dtype, (job.layers, *shape), ((), *spec) if spec else ()
            else:
                found |= {f"{part}/layers/{n}/{name}": (dtype, shape, spec) for n in range(job.layers)}
        found |= {f"{part}/{name}": (dtype, *end) for name, end in ends.items()}
    found["count"] = ("int32", (), ())
    return {leaf.path: found[leaf.path] for leaf in flatten(nested(dict.fromkeys(found, 0)))[0]}  # in the tree's order


# Planning -------------------------------------------------------------------------------------------------


def plan_for(job: Job, process: int) -> SavePlan:
    """One process's plan of a save."""
    layout_of: dict[tuple[tuple[int, ...], Spec], Layout] = {}
    arrays: list[ArrayLeaf] = []
    for number, (dtype, shape, spec) in enumerate(leaves_of(job).values()):
        if (shape, spec) not in layout_of:
            layout_of[shape, spec] = job.sharding(spec).layout(shape)
        arrays.append(ArrayLeaf(number, dtype, shape, layout_of[shape, spec]))
    return plan_save(arrays, job.options, process, job.processes)


@dataclass(frozen=True)
class Restored:
    """What a restore onto the mesh of the save reads."""

    requests: int
    """Requests for objects, of all processes."""

    read_bytes: int
    """Bytes that process 1 reads from the store."""

    received_bytes: int
    """Bytes that process 1 receives from others."""

    rounds: int
    """How often all processes meet to exchange what they have read."""

    plan_cpu: float
    """Seconds of CPU time for the plan of process 1."""


def wants_of(job: Job, manifest: Manifest) -> Wants:
    """What process 1 needs to restore onto the mesh of the save."""
    form = {spec: LeafForm("jax", None, job.sharding(spec)) for _, _, spec in leaves_of(job).values()}
    leaves = {number: form[spec] for number, (_, _, spec) in enumerate(leaves_of(job).values())}
    source: Any = SimpleNamespace(manifest=manifest, url="s3://checkpoints/1234abcd")
    return plan_wants(source, leaves, job.options, [1], range(job.processes))


def restored_by(job: Job, wants: Wants) -> Restored:
    """What the processes read if each needs as much as process 1, and each community as much as the first."""
    (reads,), plan_cpu = timed(lambda: list(plan_process_reads(wants, job.options, [1])))
    own = ((step.stack, read.boxes) for step, read in reads_of(reads.steps))
    requests, read_bytes = fetched(job, wants.stacks, own)
    requests *= job.processes
    for partition, rounds in reads.rounds.items():
        by_reader: dict[int, list[tuple[int, Sequence[Box]]]] = {}
        for portion in itertools.chain.from_iterable(rounds):
            by_reader.setdefault(portion.reader, []).append((portion.step.stack, portion.read.boxes))
        each = {reader: fetched(job, wants.stacks, boxes) for reader, boxes in by_reader.items()}
        requests += sum(n_requests for n_requests, _ in each.values()) * len(partition)
        read_bytes += each.get(1, (0, 0))[1]
    received_bytes = reads.cost(wants.stacks, job.options.host_bytes).received_bytes
    return Restored(requests, read_bytes, received_bytes, max(map(len, reads.rounds.values()), default=0), plan_cpu)


def fetched(job: Job, stacks: Sequence[Stack], reads: Iterable[tuple[int, Sequence[Box]]]) -> tuple[int, int]:
    """(requests for objects, bytes) of one process that reads these boxes of stacks from an object store."""
    by_stack: dict[int, list[Sequence[Box]]] = {}
    for number, boxes in reads:
        by_stack.setdefault(number, []).append(boxes)
    requests = n_bytes = 0
    for number, boxes in by_stack.items():
        stack = stacks[number]
        whole = stored_bytes(stack), ""
        stored = collections.defaultdict(lambda whole=whole: whole)
        objects = objects_to_fetch(stack, stored, boxes, job.options.host_bytes // 4)
        requests += len(objects)
        n_bytes += sum(one.length for one in objects.values())
        for box in itertools.chain.from_iterable(boxes):
            for index, part, _ in indexed_objects_of(stack, box):
                if index not in objects:  # one request for the index and one per chunk, as if none were merged
                    chunks = math.prod(stop - start for start, stop in touched_cells(part, stack.chunk_sides))
                    requests += 1 + chunks
                    n_bytes += chunks * stack.chunk_stored_bytes
    return requests, n_bytes


def shares_of(job: Job, plan: SavePlan) -> list[WrittenShare]:
    """The reports of all processes if each wrote about the same number of objects; lengths and digests are made up."""
    objects = [
        (number, "/".join(map(str, index)), ObjectRecord(stored_bytes(stack), f"{order:08x}"))
        for number, stack in enumerate(plan.stacks)
        for order, (index, _) in enumerate(stack.objects())
    ]
    edges = np.linspace(0, len(objects), job.processes + 1).astype(int).tolist()
    phases = {"plan": 0.123456, "device_to_host": 1.234567, "write": 12.345678, "sync": 0.0, "barrier": 0.123456}
    return [
        WrittenShare(objects[start:stop], 0, None, phases, "host-0000") for start, stop in itertools.pairwise(edges)
    ]


def stored_bytes(stack: Stack) -> int:
    """Bytes of one complete object."""
    return stack.chunks_per_object * stack.chunk_stored_bytes + stack.index_bytes


def manifest_of(job: Job, plan: SavePlan, shares: list[WrittenShare]) -> Manifest:
    """The manifest that process 0 composes."""
    leaves = leaves_of(job)
    specs = list(dict.fromkeys(spec for _, _, spec in leaves.values()))
    table = LayoutTable()
    table.meshes.append(MeshRecord.of_axes(job.mesh))
    table.layouts.extend(LayoutRecord(0, [list(axes) for axes in spec]) for spec in specs)
    records = [LeafRecord(path, "jax", layout=specs.index(leaves[path][2])) for path in leaves]
    draft = Draft(flatten(nested(dict.fromkeys(leaves, 0)))[1], records, table=table)
    return compose_manifest("0" * 32, plan, draft, shares)


# Simulation -----------------------------------------------------------------------------------------------


def agreement_of(_: int) -> str:
    digests = dict.fromkeys(("leaves", "ties", "shardings", "options", "metadata", "process_state"), "0" * 64)
    return msgspec.json.encode(Fingerprint(digests, [123456789])).decode()


@dataclass(frozen=True)
class Counted:
    """Requests to the store by kind and key, named as in tests/support/servers.py."""

    save: dict[str, int]
    restore: dict[str, int]


def store_requests(job: Job, plan: SavePlan) -> Counted:
    """Requests of a save to a new path, by a process that has saved to the bucket before, and of a restore without
    its objects.

    The writer's note is created and replaced
    twice; the manifest and its copy are written once.
    """
    stacks = len(plan.stacks)
    save = {
        "LIST": 2,
        "PUT zarr.json": stacks,
        "PUT object": plan.n_objects,
        "GET writer.json": job.processes + 3,
        "PUT writer.json": 3,
        "DELETE writer.json": 1,
        "GET manifest.json": 1,
        "PUT manifest.json": 1,
        "PUT manifest-copy.json": 1,
    }
    restore = {"GET manifest.json": job.processes, "GET zarr.json": stacks}
    return Counted(save, restore)


def simulate(job: Job) -> dict[str, Any]:
    """Counts, bytes and seconds of CPU time of one job."""
    result: dict[str, Any] = {"processes": job.processes, "leaves": len(leaves_of(job))}
    plan, result["plan_save_cpu"] = timed(lambda: plan_for(job, 1))
    loads = plan.process_bytes
    result |= {
        "bytes": sum(loads),
        "stacks": len(plan.stacks),
        "objects": plan.n_objects,
        "busiest": max(loads) / (sum(loads) / len(loads)),
        "busiest_bytes": max(loads),
    }
    shares = shares_of(job, plan)
    texts = [msgspec.json.encode(share).decode() for share in shares]
    agreed = [msgspec.json.decode(agreement_of(0), type=Fingerprint)] * job.processes
    _, result["agree_cpu"] = timed(lambda: require_equal_fingerprints(agreed, []))
    manifest, result["compose_cpu"] = timed(lambda: manifest_of(job, plan, shares))
    content, result["encode_cpu"] = timed(lambda: encoded(manifest))
    result["manifest_bytes"] = len(content)
    result["fits"] = len(content) <= manifests.MAX_MANIFEST_BYTES
    if result["fits"]:
        _, result["decode_cpu"] = timed(lambda: manifests.decode(content, "/ckpt"))
    else:
        result["decode_cpu"] = math.nan
    wants = wants_of(job, manifest)
    result |= {"each": restored_by(job, replace(wants, layouts=None)), "auto": restored_by(job, wants)}
    published = msgspec.json.encode(PublishResult("0" * 32, 10**12, 0, "0" * 64, manifest.created)).decode()
    result["rendezvous"] = {
        "agree": meet(job.processes, agreement_of, "0" * 32, first=True),
        "look": meet(job.processes, lambda _: "", ""),
        "publish": meet(job.processes, texts.__getitem__, published),
        "open": meet(job.processes, lambda _: "0" * 64 + " s3://checkpoints/1234abcd", "0" * 90, first=True),
        "round": meet(job.processes, lambda _: "0" * 64 + " [[[[11010048, 32]], [[65536, 64]]], false]", "0" * 40),
        "end": meet(job.processes, lambda _: "0" * 64, ""),
    }
    result["waiting_requests"], result["waiting_bytes"] = wait(job.processes, 60.0)
    result["requests"] = store_requests(job, plan)
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return result


def encoded(manifest: Manifest) -> bytes:
    """Like `manifests.encode`, but without its limit of the length."""
    try:
        return manifests.encode(manifest)
    except manifests.InputError:
        body = msgspec.json.encode(manifest)[:-1]
        return body + manifests.SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    return work(), round(time.process_time() - begun, 2)


def phases(found: dict[str, Any], store: Rates) -> dict[str, float]:
    """Seconds of each phase of a save and of a restore."""
    counts, met = found["requests"], found["rendezvous"]
    writes, reads = _split(counts.save)
    seconds: dict[str, float] = {
        "save: plan": found["plan_save_cpu"],
        "save: agree": met["agree"].seconds + found["agree_cpu"],
        "save: zarr.json, one after the other": found["stacks"] * LATENCY_SECONDS,
        "save: look at the note of the writer": counts.save["GET writer.json"] / store.reads + met["look"].seconds,
        "save: write objects": max(counts.save["PUT object"] / store.writes, found["busiest_bytes"] / NETWORK_BYTES),
        "save: publish": met["publish"].seconds + found["compose_cpu"] + found["encode_cpu"],
        "restore: open": counts.restore["GET manifest.json"] / store.reads
        + found["manifest_bytes"] / NETWORK_BYTES
        + found["decode_cpu"]
        + met["open"].seconds,
        "restore: zarr.json": counts.restore["GET zarr.json"] / store.reads,
        "restore: end": met["end"].seconds,
        "delete an old checkpoint": counts.save["PUT object"] / store.writes,
    }
    for read in ("each", "auto"):
        restored: Restored = found[read]
        seconds |= {
            f"restore, {read}: plan": restored.plan_cpu,
            f"restore, {read}: read objects": max(restored.requests / store.reads, restored.read_bytes / NETWORK_BYTES),
            f"restore, {read}: exchange": restored.rounds * met["round"].seconds
            + restored.received_bytes / NETWORK_BYTES,
        }
    assert writes + reads == sum(counts.save.values())
    return seconds


def _split(requests: dict[str, int]) -> tuple[int, int]:
    """(writes, reads)."""
    writes = sum(count for kind, count in requests.items() if re.match("PUT|DELETE", kind))
    return writes, sum(requests.values()) - writes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        processes, scanned = json.loads(arguments.one)
        found = simulate(job_of(processes, scanned=scanned))
        seconds = {store.name: phases(found, store) for store in STORES}
        plain = found | {name: asdict(found[name]) for name in ("requests", "each", "auto")}
        plain["rendezvous"] = {
            name: vars(one) | {"requests": one.requests, "first": one.first, "seconds": one.seconds}
            for name, one in found["rendezvous"].items()
        }
        print(json.dumps(plain | {"seconds": seconds}))
        return
    results: list[dict[str, Any]] = []
    for scanned, processes in itertools.product((False, True), SIZES):
        command = [sys.executable, __file__, "--one", json.dumps([processes, scanned])]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
        results.append({"scanned": scanned, **json.loads(done.stdout)})
        print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
