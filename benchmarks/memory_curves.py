"""Host memory of many saves in a row: what the processes of a job hold after each of 300 saves of 1 GiB.

    python benchmarks/memory_curves.py [--saves 300] [--gib 1] [--dir DIR]      half an hour; DIR should be on a disk

Four processes save through a Checkpointer with keep_last=1. Each step has other values, so that no file is linked. The
job runs in a memory cgroup with a limit of 2.5 GiB, which includes the page cache, and files on tmpfs. Without
permission to create a cgroup (version 1), there is no limit, and only the processes are measured. Cases:

    save            until it is durable
    save_async      with a jitted step during each save
    from devices    save_async, with each array copied to the host as from an accelerator; staging_bytes is 1/4 of it

After each save (save_async: after wait), each process notes its anonymous memory (RssAnon in /proc/self/status).
Reported: how much larger it is after the last save than after the fifth, in each process and together, and how much
larger it was in between in any process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import steady

steady.begin(devices=1, keep_memory=False)

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

import jaxckpt
from jaxckpt._save import staging

MIB = 1 << 20
PROCESSES, LEAVES, WARM = 4, 8, 5
CASES = ("save", "save_async", "from devices")
CGROUPS = Path("/sys/fs/cgroup/memory")
SHOWN = (1, 5, 10, 25, 50, 100, 150, 200, 250, 300)


# In a process of the job ----------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise SystemExit("no RssAnon in /proc/self/status")


def run_process(rank: int, address: str, given: dict[str, Any]) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, rank, initialization_timeout=60)
    n_bytes = int(given["gib"] * (1 << 30))
    options = jaxckpt.Options()
    if given["case"] == "from devices":
        staging.is_in_host_memory = lambda value: False
        options = jaxckpt.Options(staging_bytes=n_bytes // PROCESSES // 4)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    shape = (PROCESSES, n_bytes // LEAVES // PROCESSES // 4)
    sharding = NamedSharding(mesh, P("x"))
    local = (1, shape[1])
    tree = {
        f"w{n}": jax.make_array_from_callback(shape, sharding, lambda _: np.zeros(local, np.float32))
        for n in range(LEAVES)
    }
    step = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)  # a leaf at a time, so that the limit has room for it
    other = jax.jit(lambda x: x @ x / 512)
    busy = jnp.ones((512, 512))
    curve: list[tuple[float, int]] = []
    in_background = given["case"] != "save"
    saves = jaxckpt.Checkpointer(given["folder"], keep_last=1, background=in_background, options=options)
    for number in range(1, given["saves"] + 1):
        for name in tree:
            tree[name] = jax.block_until_ready(step(tree[name]))
        begun = time.perf_counter()
        saves.save(number, tree)
        if in_background:
            for _ in range(5):
                busy = other(busy)
            saves.wait()
        seconds = time.perf_counter() - begun
        curve.append((seconds, anonymous_bytes()))
        if rank == 0 and number % 25 in (0, 1):
            print(f"{given['case']} {number}: {seconds:.1f} s, {curve[-1][1] / MIB:.0f} MiB", flush=True)
    saves.close()
    tree.clear()  # the limit has room for one tree
    restored = jaxckpt.Run(given["folder"]).restore(given["saves"])
    assert all((shard.data == given["saves"]).all() for leaf in restored.values() for shard in leaf.addressable_shards)
    Path(given["result"], f"{rank}.json").write_text(json.dumps(curve))


# The run --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[str | None]:
    """The path of a new cgroup with this limit; None if none can be created."""
    path = CGROUPS / f"jaxckpt-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        report.console.print(f"no cgroup, so no limit: {error}")
        yield None
        return
    try:
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield str(path)
    finally:
        path.rmdir()


def measure(case: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    result = folder / "result"
    result.mkdir()
    with memory_cgroup(int(arguments.limit_gib * (1 << 30))) as cgroup:
        given = {"case": case, "gib": arguments.gib, "saves": arguments.saves}
        given |= {"folder": str(folder / "run"), "result": str(result)}
        join = f"echo $$ > {cgroup}/cgroup.procs && " if cgroup else ""
        commands = [
            ["sh", "-c", f'{join}exec "$0" "$@"', sys.executable, __file__, "--child", json.dumps([n, address, given])]
            for n in range(PROCESSES)
        ]
        children = [subprocess.Popen(command, env={**os.environ, "GLOG_minloglevel": "2"}) for command in commands]
        try:
            codes = [child.wait(60 + 30 * arguments.saves) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        limited = bool(cgroup) and {
            "limit_bytes": int(Path(cgroup, "memory.limit_in_bytes").read_text()),
            "peak_bytes": int(Path(cgroup, "memory.max_usage_in_bytes").read_text()),
        }
    if any(codes):
        raise SystemExit(f"{case}: exit {codes}")
    curves = [json.loads((result / f"{n}.json").read_text()) for n in range(PROCESSES)]
    series = [[entry[1] for entry in curve] for curve in curves]
    growth = [one[-1] - one[WARM - 1] for one in series]
    return {
        "case": case,
        "cgroup": limited,
        "seconds": report.spread([entry[0] for entry in curves[0]]),
        "growth": [*growth, sum(growth)],
        "largest": [max(one[WARM:]) - one[WARM - 1] for one in series],
        "curve": {str(n): [one[n - 1] for one in series] for n in SHOWN if n <= arguments.saves},
    }


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"Memory after save {result['saves']} minus after save {WARM}, MiB; {result['gib']:g} GiB a save"
    )
    for heading in ("", *(f"process {n}" for n in range(PROCESSES)), "together", "largest in between", "s a save"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        growth = [f"{n / MIB:+.1f}" for n in row["growth"]]
        table.add_row(row["case"], *growth, f"{max(row['largest']) / MIB:+.1f}", f"{row['seconds'][1]:.2f}")
    report.console.print(table)


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--saves", type=int, default=300)
    parser.add_argument("--gib", type=float, default=1.0, help="size of a save")
    parser.add_argument("--limit-gib", type=float, default=2.5, help="limit of the cgroup")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_process(*json.loads(arguments.child))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="memory.") as name:
        surroundings = report.surroundings(Path(name))
    for case in arguments.case or CASES:
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="memory.") as name:
            rows.append(measure(case, Path(name).resolve(), arguments))
    result = {"gib": arguments.gib, "saves": arguments.saves, "processes": PROCESSES, **surroundings, "rows": rows}
    show(result)
    report.write("memory_curves", result, arguments.json)


if __name__ == "__main__":
    main()
