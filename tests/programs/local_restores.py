"""Restores from local folders in a job, and compares every bit; prints the outcome of each case.

args: path, cases: [{"hosts": for each process, "like": the expected checkpoint, "layout", …}]
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._devices.interconnect import Interconnect
from jaxckpt._local_tier import peer_reads

preadv = os.preadv
counts: list[int] = []


def counted(*arguments: Any) -> int:
    counts.append(preadv(*arguments))
    return counts[-1]


os.preadv = counted
lines: list[str] = []


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines.append(f"{record.levelname} {record.getMessage()}")


logging.getLogger("jaxckpt").addHandler(Lines())
logging.getLogger("jaxckpt").setLevel(logging.INFO)
fault = ""
exchanged = {"got": 0, "passed": 0}
run_next_batch, permute = peer_reads._PeerReads._run_next_batch, Interconnect.permute


def run_or_fail(reads: peer_reads._PeerReads) -> None:
    if fault and process_id == 1 and reads._n_batches_done == 1:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("in the middle")
    run_next_batch(reads)


def counted_permute(interconnect: Interconnect, pairs: Any, n_bytes: int, sent: Any) -> Any:
    exchanged["passed"] += 0 if sent is None else n_bytes
    return permute(interconnect, pairs, n_bytes, sent)


class CountedParts(peer_reads.Incoming):
    def add(self, received: Any) -> Iterator[Any]:
        for part in super().add(received):
            exchanged["got"] += len(part)
            yield part


peer_reads._PeerReads._run_next_batch = run_or_fail  # type: ignore[method-assign]
Interconnect.permute = counted_permute  # type: ignore[method-assign]
peer_reads.Incoming = CountedParts  # type: ignore[misc]
devices = np.array(jax.devices())
line, square = Mesh(devices, ("data",)), Mesh(devices.reshape(-1, 2), ("data", "model"))
LAYOUTS: dict[str, tuple[Mesh, Any]] = {
    "fsdp": (line, lambda shape: P("data") if shape and shape[0] % len(devices) == 0 else P()),
    "replicated": (line, lambda shape: P()),
    "square": (
        square,
        lambda shape: P("data", "model") if len(shape) == 2 and not shape[0] % len(square.devices) else P(),
    ),
    "columns": (square, lambda shape: P(None, "model") if len(shape) == 2 and shape[1] % 2 == 0 else P()),
}


def bits(value: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(value)).tobytes()


def compare(tree: Any, host: Any) -> None:
    for path, leaf in tree.items():
        if path == "key":
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array):
            for shard in leaf.addressable_shards:
                assert bits(shard.data) == bits(np.asarray(host[path])[shard.index]), path
        else:
            assert bits(leaf) == bits(host[path]), path


def run(case: dict[str, Any]) -> dict[str, Any]:
    global fault
    fault = case.get("fault", "")
    host = jaxckpt.load_numpy(case["like"])
    host["host"] = host["host"].astype(case.get("host_dtype", host["host"].dtype))
    saved = jaxckpt.open(case["like"])
    mesh, spec = LAYOUTS[case.get("layout", "fsdp")]
    target = {
        path: host[path] if path in ("host", "number") else NamedSharding(mesh, spec(leaf.shape))
        for path, leaf in saved.leaves.items()
        if fnmatch.fnmatch(path, case.get("select", "*"))
    }
    exchanged.update(got=0, passed=0)
    for some in (counts, lines):
        some.clear()
    options = jaxckpt.Options(
        host_bytes=case.get("host_bytes", 256 << 20), timeout_seconds=20, **case.get("options", {})
    )
    tier = jaxckpt.LocalTier(case["hosts"][process_id])
    with jaxckpt.Checkpointer(args["path"], local=tier, options=options) as steps:
        counts.clear()
        tree = steps.restore(case.get("step"), target, select=case.get("select"))
        n_bytes, of_restore = sum(counts), dict(exchanged)
        assert set(tree) == set(target)
        compare(tree, host)
        number = steps._restored_step
        found = {
            "step": number,
            "latest": steps.latest_step(),
            "metrics": steps.metrics(number),
            "state": steps.process_state("at", resplit=lambda states, count: states[:count]),
            "read": n_bytes,
            **of_restore,
            "lines": [line for line in lines if not line.startswith("INFO restored")],
        }
    return found


for case in args["cases"]:
    try:
        print(json.dumps(run(case)), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
