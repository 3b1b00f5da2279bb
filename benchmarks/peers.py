"""jaxckpt beside Orbax, PyTorch DCP, safetensors and one plain file: what each takes to save and to restore.

    python benchmarks/peers.py                                    everything: see the end of the table for how long
    python benchmarks/peers.py --workload b --dir /dev/shm        one workload, one place
    python benchmarks/peers.py --quick                            small trees, one round: does it run?

Workloads: a  1 GiB in 16 leaves       b  2,000 leaves of 64 KiB       d  20,000 leaves of 4 KiB
           c  a transformer of 24 layers, parameters in bfloat16 and Adam's moments in float32, 2 GiB
           e  a scanned transformer of 12 layers, FSDP × TP, leaves of [layers, in, out], 1.3 GiB
           f  the same, FSDP alone; e-small, e-wide, f-small and f-wide: other widths
each on a mesh of eight simulated CPU devices, in one process, and b, c, e and f also in four (jax.distributed, gloo).

How a round goes is at the top of turns.py, what each contender does and how durable it is at the top of contenders.py.
jaxckpt takes turns with each of the others, a process for each two: so none is measured in memory that a third has left
behind. Ratios are taken within a round; the JSON has the least, the median and the greatest over rounds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import contenders
import report
import workloads

ALL = list(dict.fromkeys(kind.name for kind in contenders.CONTENDERS if kind.name != report.OURS))
# Orbax takes minutes for each operation on 20,000 leaves: one of its ways is enough.
CONTENDERS = {"d": [name for name in ALL if not name.startswith("Orbax") or name == "Orbax OCDBT"]}
for scanned in ("e", "e-small", "e-wide", "f", "f-small", "f-wide"):
    CONTENDERS[scanned] = [name for name in ALL if "DCP" not in name and name not in ("Orbax v1", "Orbax no OCDBT")]
ROUNDS = {"a": 5, "b": 5, "c": 3, "d": 3}  # 3 of the others
LIMIT_SECONDS = 3600
SAME = ("workload", "processes", "filesystem")
"""What makes a run take the place of an earlier one in the results."""


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One workload in one place: the case, with what jaxckpt and each other took, or why that is not known."""
    begun = time.monotonic()
    pairs = {name: _pair({**case, "contenders": [report.OURS, name]}, folder) for name in case["contenders"]}
    taken = round(time.monotonic() - begun, 1)
    return {**case, "filesystem": report.filesystem(folder), "seconds_in_all": taken, "pairs": pairs}


def _pair(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    begun = time.monotonic()
    address = f"127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory(dir=folder, prefix="peers.") as name:
        work, result = Path(name).resolve() / "files", Path(name).resolve() / "result.json"
        work.mkdir()
        given = {**case, "folder": str(work), "result": str(result), "address": address}
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(case["processes"]):
                command = [
                    sys.executable,
                    str(Path(__file__).with_name("turns.py")),
                    json.dumps({**given, "rank": rank}),
                ]
                children.append(subprocess.Popen(command, env={**os.environ, "GLOG_minloglevel": "2"}))
            for child in children:
                child.wait(max(1, LIMIT_SECONDS - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            report.console.print(f"ended after {LIMIT_SECONDS} s")
        finally:
            for child in children:
                child.kill()
                child.wait()
        codes = [child.returncode for child in children]
        return json.loads(result.read_text()) if result.exists() else {"failed": f"exit {codes}"}


def _free_port() -> int:
    # Below the range from which the kernel gives ports to outgoing connections.
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.set_defaults(dir=None)
    parser.add_argument("--workload", choices=workloads.KEYS, help="by default all")
    parser.add_argument("--processes", type=int, choices=(1, 4), help="by default 1, and for b, c, e and f also 4")
    parser.add_argument(
        "--rounds",
        type=int,
        help="0 counts the first, cold one; by default " + ", ".join(f"{n} for {k}" for k, n in ROUNDS.items()),
    )
    parser.add_argument("--contender", action="append", choices=ALL, help="beside jaxckpt; by default all")
    parser.add_argument("--no-async", action="store_true", help="without save_async, and the steps beside it")
    parser.add_argument("--quick", action="store_true", help="small trees, one round")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end and files go

    begun, failed = time.monotonic(), False
    for folder in [arguments.dir] if arguments.dir else [Path(tempfile.gettempdir()), Path("/dev/shm")]:
        surroundings = report.surroundings(folder)
        out = report.place("peers", surroundings, arguments.json)
        # Workloads that were run one after the other on a day come together.
        runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else []
        for key in [arguments.workload] if arguments.workload else workloads.KEYS:
            for processes in (
                [arguments.processes] if arguments.processes else [1, 4] if key in ("b", "c", "e", "f") else [1]
            ):
                able = {kind.name for kind in contenders.CONTENDERS if processes in kind.processes}
                names = [name for name in arguments.contender or CONTENDERS.get(key, ALL) if name in able]
                case = {
                    "workload": key,
                    "processes": processes,
                    "rounds": (1 if arguments.quick else ROUNDS.get(key, 3))
                    if arguments.rounds is None
                    else arguments.rounds,
                    "quick": arguments.quick,
                    "no_async": arguments.no_async,
                    "contenders": names,
                }
                report.console.print(f"{key} in {folder}, {processes} processes …")
                made = report.summed_up(run(case, folder))
                report.show(made)
                runs = [one for one in runs if any(one[key] != made[key] for key in SAME)] + [made]
                report.write("peers", {**surroundings, "runs": runs}, out)
                failed = failed or bool(made["failed"])
    report.console.print(f"{(time.monotonic() - begun) / 60:.0f} minutes in all")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
