"""Restores a replicated leaf in 4 processes, with read="each" and read="shared", from storage with a limited rate.

    python benchmarks/shared_reads.py [--mib 128] [--rate 50] [--turns 3]

All processes together read at most `--rate` million bytes per second; they take turns through a shared file. For each
value of `read`, prints the bytes read from storage per byte of the checkpoint, the seconds of the slowest process, the
CPU seconds of all processes, and the highest additional memory of a process, without the arrays.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

PROCESSES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="size of the leaf")
    parser.add_argument("--rate", type=float, default=50, help="million bytes per second; 0: no limit")
    parser.add_argument("--turns", type=int, default=3, help="number of restores of each kind, in turn")
    parser.add_argument("--host-mib", type=int, default=256, help="Options.host_bytes")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is not None:
        restore(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="jaxckpt-shared-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        Path(folder, "turn").write_bytes(struct.pack("d", 0.0))
        rows = np.arange(arguments.mib << 8, dtype=np.float32)[:, None]
        jaxckpt.save(f"{folder}/checkpoint", {"w": np.broadcast_to(rows, (len(rows), 1024)).copy()})
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        command = [sys.executable, *sys.argv, "--job", folder, address, "--process"]
        job = [
            subprocess.Popen([*command, str(process)], env=environment, stdout=subprocess.PIPE, text=True)
            for process in range(PROCESSES)
        ]
        outputs = [process.communicate(timeout=1800)[0] for process in job]
    if any(process.returncode for process in job):
        sys.exit("a process failed")
    noted = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    print("| Reading | Bytes read ÷ bytes of the checkpoint | Seconds | CPU seconds | Peak memory without the arrays |")
    print("| --- | --- | --- | --- | --- |")
    seconds: dict[str, float] = {}
    for read in ("each", "shared"):
        turns = list(zip(*([one for one in lines if one["read"] == read] for lines in noted), strict=True))
        ratio = max(sum(one["bytes"] for one in turn) for turn in turns) / (arguments.mib << 20)
        slowest = [max(one["seconds"] for one in turn) for turn in turns]
        seconds[read] = statistics.median(slowest)
        peak = max(one["peak"] for turn in turns for one in turn) - (arguments.mib << 20)
        cpu = statistics.median(sum(one["cpu"] for one in turn) for turn in turns)
        print(f"| {read} | {ratio:.2f} | {seconds[read]:.2f} | {cpu:.2f} | {peak / 2**20:.0f} MiB |")
    print(f"\ntime of each ÷ time of shared: {seconds['each'] / seconds['shared']:.2f}")


def restore(arguments: argparse.Namespace) -> None:
    """One process of the job."""
    folder, address = arguments.job
    counted = [0]
    preadv = os.preadv
    turn = os.open(f"{folder}/turn", os.O_RDWR)

    def capped(*given: Any) -> int:
        count = preadv(*given)
        counted[0] += count
        if arguments.rate:
            fcntl.flock(turn, fcntl.LOCK_EX)
            begins = max(time.monotonic(), *struct.unpack("d", os.pread(turn, 8, 0)))
            ends = begins + count / (arguments.rate * 1e6)
            os.pwrite(turn, struct.pack("d", ends), 0)
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(max(0.0, ends - time.monotonic()))
        return count

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=PROCESSES, process_id=arguments.process)
    mesh = jax.make_mesh((PROCESSES,), ("data",))
    everywhere = NamedSharding(mesh, P())
    target = {"w": everywhere}
    os.preadv = capped
    for number in range(arguments.turns):
        for read in ("each", "shared") if number % 2 else ("shared", "each"):
            options = jaxckpt.Options(read=read, host_bytes=arguments.host_mib << 20)
            counted[0] = 0
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
            begun, cpu_begun = time.monotonic(), time.process_time()
            again = jaxckpt.restore(f"{folder}/checkpoint", target, options=options)
            jax.block_until_ready(again)
            seconds, cpu = time.monotonic() - begun, time.process_time() - cpu_begun
            peak = _memory("VmHWM") - before
            last_row = np.full(1024, (arguments.mib << 8) - 1, np.float32)
            assert np.array_equal(again["w"].addressable_data(0)[-1], last_row)
            del again
            print(
                json.dumps({"read": read, "bytes": counted[0], "seconds": seconds, "cpu": cpu, "peak": peak}),
                flush=True,
            )


def _memory(name: str) -> int:
    """A value of this process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
