"""Times of saves and restores: jaxckpt compared with Orbax, PyTorch DCP, safetensors and one plain file.

    python benchmarks/peers.py                                    all cases: about an hour
    python benchmarks/peers.py --workload b --dir /dev/shm        one workload, one folder
    python benchmarks/peers.py --quick                            small trees, one round: checks only that it runs

Workloads: a  1 GiB in 16 leaves       b  2,000 leaves of 64 KiB       d  20,000 leaves of 4 KiB
           c  a transformer of 24 layers, parameters in bfloat16 and Adam's moments in float32, 1 GiB
           e  a scanned transformer of 12 layers, FSDP × TP, leaves of [layers, in, out], 1.1 GiB
           f  the same, FSDP alone; e-small, e-wide, f-small and f-wide: other widths, only by --workload
each on a mesh of eight simulated CPU devices, in one process or in four (jax.distributed, gloo).

The contenders of a case take turns in one process (or in four). turns.py describes a round; contenders.py describes
what each contender does and how durable its files are. Ratios are computed within a round. The JSON file has their
minimum, median and maximum over rounds.
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
TMPFS, DISK = "/dev/shm", tempfile.gettempdir()
_FLOORS = ("one plain file", "jaxckpt, io=tensorstore", "Orbax raw")
_OTHERS = ("Orbax OCDBT", "safetensors", "DCP one thread")
_PLAIN = ("one plain file", "Orbax raw")

CASES: tuple[tuple[str, int, str, tuple[tuple[str, ...], ...]], ...] = (
    ("e", 1, TMPFS, (_FLOORS, ("Orbax OCDBT", "Orbax chunks", "safetensors"))),
    ("f", 1, TMPFS, ((*_PLAIN, "Orbax OCDBT"),)),
    ("a", 1, TMPFS, (_FLOORS, _OTHERS)),
    ("c", 1, TMPFS, (_FLOORS, _OTHERS)),
    ("b", 1, TMPFS, (("one plain file", "jaxckpt, io=tensorstore", "safetensors"), ("DCP one thread", "Orbax v1"))),
    # Orbax takes minutes for each operation on 20,000 leaves, so only its fastest variant takes part.
    (
        "d",
        1,
        TMPFS,
        (("one plain file", "jaxckpt, io=tensorstore", "safetensors"), ("DCP one thread", "Orbax no OCDBT")),
    ),
    ("a", 1, DISK, (_PLAIN,)),
    ("e", 1, DISK, (_PLAIN,)),
    ("e", 4, TMPFS, (_PLAIN,)),
    ("f", 4, TMPFS, (_PLAIN,)),
    ("b", 4, TMPFS, (("one plain file", "Orbax no OCDBT"),)),
)
"""(workload, number of processes, folder, groups of contenders), the most important first. The contenders of a group
take turns with jaxckpt in one process. Larger groups do not fit into 24 GiB, because freed memory stays in the process.
"""

WIDTHS = tuple((key, 1, TMPFS, (_PLAIN,)) for key in ("e-small", "e-wide", "f-small", "f-wide"))
"""Run only if chosen with --workload."""

ROUNDS = 4
LIMIT_SECONDS = 3600
SAME = ("workload", "processes", "filesystem")
"""A run replaces an earlier run in the results if it has the same values of these fields."""


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one case. Returns the measurements of each group of contenders, or the reason why a group failed."""
    begun = time.monotonic()
    groups = [_turns({**case, "contenders": [report.OURS, *names]}, folder) for names in case["contenders"]]
    taken = {
        "date": report.today(),
        "filesystem": report.filesystem(folder),
        "seconds_in_all": round(time.monotonic() - begun, 1),
    }
    return {**case, **taken, "groups": groups}


def _turns(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    begun = time.monotonic()
    address = f"127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory(dir=folder, prefix="peers.") as name:
        work, result = Path(name).resolve() / "files", Path(name).resolve() / "result.json"
        work.mkdir()
        given = {**case, "folder": str(work), "result": str(result), "address": address}
        script = str(Path(__file__).with_name("turns.py"))
        environment = {**os.environ, "GLOG_minloglevel": "2"}
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(case["processes"]):
                command = [sys.executable, script, json.dumps({**given, "rank": rank})]
                children.append(subprocess.Popen(command, env=environment))
            for child in children:
                child.wait(max(1, LIMIT_SECONDS - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            report.console.print(f"stopped after {LIMIT_SECONDS} s")
        finally:
            for child in children:
                child.kill()
                child.wait()
        codes = [child.returncode for child in children]
        found = json.loads(result.read_text()) if result.exists() else {}
    return {"failed": f"exit {codes}" if any(codes) else "", **found}


def _free_port() -> int:
    # Below the kernel's ephemeral ports, which outgoing connections use.
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.set_defaults(dir=None)
    parser.add_argument("--workload", choices=workloads.KEYS, help="default: all")
    parser.add_argument("--processes", type=int, choices=(1, 4), help="default: both")
    parser.add_argument("--rounds", type=int, help=f"0: only the cold round; default: {ROUNDS}")
    parser.add_argument("--contender", action="append", choices=ALL, help="compared with jaxckpt; default: all")
    parser.add_argument("--no-async", action="store_true", help="without save_async and the steps after it")
    parser.add_argument("--quick", action="store_true", help="small trees, one round")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end and files are deleted

    begun, failed = time.monotonic(), False
    for key, processes, where, groups in CASES if arguments.workload is None else (*CASES, *WIDTHS):
        folder = Path(where)
        if (
            arguments.workload not in (None, key)
            or arguments.processes not in (None, processes)
            or (arguments.dir is not None and report.filesystem(arguments.dir) != report.filesystem(folder))
        ):
            continue
        folder = arguments.dir or folder
        rounds = arguments.rounds if arguments.rounds is not None else 1 if arguments.quick else ROUNDS
        case = {
            "workload": key,
            "processes": processes,
            "rounds": rounds,
            "quick": arguments.quick,
            "no_async": arguments.no_async,
            "contenders": [arguments.contender] if arguments.contender else groups,
        }
        surroundings = report.surroundings(folder)
        out = report.place("peers", surroundings, arguments.json)
        report.console.print(f"{key} in {folder}, {processes} processes …")
        made = report.summed_up(run(case, folder))
        report.show(made)
        # All cases of one day are collected in one file.
        runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else []
        runs = [one for one in runs if any(one[key] != made[key] for key in SAME)] + [made]
        report.write("peers", {**surroundings, "runs": runs}, out)
        failed = failed or bool(made["failed"])
    report.console.print(f"{(time.monotonic() - begun) / 60:.0f} minutes in all")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
