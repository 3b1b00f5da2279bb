"""Restores from a bucket of which some connections are bad: they never answer, or have 1 % of the speed.

    python benchmarks/bad_connections.py            # reads that are late are sent again
    python benchmarks/bad_connections.py --once     # not sent again; 30 s each
    python benchmarks/bad_connections.py --job      # in a job of 4 processes that need the same data; minutes

256 objects of 256 KiB, from moto's S3 server behind a proxy that answers each read after 0.3 s. Prints the seconds of a
restore in a new process, and the requests for objects. Lower is better.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import numpy as np
import processes
import pytest
import servers
import stores
from servers import Spoil, slow, trickling

import jaxckpt

N_OBJECTS, OBJECT_BYTES, ANSWER_SECONDS = 256, 256 << 10, 0.3

RESTORE = """
import sys, time
import jax, numpy as np
import jaxckpt
from jaxckpt._store import hedging

if sys.argv[2] == "once":
    hedging.Server.may_repeat = lambda server, is_very_late: False
jax.devices()
begun = time.monotonic()
tree = jaxckpt.restore(sys.argv[1], options=jaxckpt.Options(host_bytes=256 << 20))
seconds = time.monotonic() - begun
assert all((np.asarray(leaf) == int(name[1:])).all() for name, leaf in tree.items())
print(f"{seconds:.1f}")
"""


JOB = """
import json, time
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxckpt

mesh = Mesh(np.array(jax.devices()), ("data",))
target = {name: NamedSharding(mesh, P()) for name in jaxckpt.open(args["path"]).leaves}
for case, endpoints in args["cases"]:
    for read in ("each", "shared"):
        options = jaxckpt.Options(read=read, storage={"endpoint": endpoints[process_id]})
        begun = time.monotonic()
        jaxckpt.restore(args["path"], target, options=options)
        print(json.dumps([case, read, time.monotonic() - begun]))
"""


def on_connections(every: int, first: int, spoil: Spoil) -> Spoil:
    """A server whose connection number `first` is bad, and each of `every` after it."""
    normal = slow(ANSWER_SECONDS)

    def choose(exchange: servers.Exchange) -> None:
        (spoil if exchange.connection % every == first else normal)(exchange)

    return choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="send each read once")
    parser.add_argument("--job", action="store_true", help="4 processes, with read='each' and 'shared'")
    arguments = parser.parse_args()
    once = "once" if arguments.once else "again"
    slowly = trickling(OBJECT_BYTES / ANSWER_SECONDS / 100)
    cases: dict[str, Spoil] = {
        "all connections are good": slow(ANSWER_SECONDS),
        "one of 64 never answers": on_connections(64, 5, servers.never),
        "the first of 64 never answers": on_connections(64, 0, servers.never),
        "one of 16 never answers": on_connections(16, 5, servers.never),
        "one of 64 has 1 % of the speed": on_connections(64, 5, slowly),
    }
    tree = {f"w{number}": np.full(OBJECT_BYTES // 4, number, np.float32) for number in range(N_OBJECTS)}
    options = jaxckpt.Options(object_bytes=OBJECT_BYTES, chunk_bytes=OBJECT_BYTES)
    with stores.moto() as server, pytest.MonkeyPatch.context() as patch, servers.bucket(server, patch) as bucket:
        jaxckpt.save(bucket.url, tree, options=options)
        if arguments.job:
            restore_in_a_job(server, bucket.url, cases)
            return
        for name, spoil in cases.items():
            bucket.proxy.clear()
            bucket.proxy.connections = itertools.count()
            bucket.proxy.on("GET .*", spoil)
            seconds = processes.run_python(RESTORE, devices=1, args=[bucket.url, once], timeout=300).strip()
            print(f"{name}: {seconds} s, {bucket.proxy.counted()['GET object']} requests", flush=True)


def restore_in_a_job(server: stores.Server, path: str, cases: dict[str, Spoil]) -> None:
    """Restores in 4 processes, each through its own proxy. In each case, the proxy of process 1 is a bad one."""
    names = ("all connections are good", "one of 64 never answers", "one of 64 has 1 % of the speed")
    bad = {name: cases[name] for name in names}
    bad["a process has 1 % of the speed"] = trickling(OBJECT_BYTES / ANSWER_SECONDS / 100)
    with contextlib.ExitStack() as stack:

        def endpoint(spoil: Spoil) -> str:
            proxy = stack.enter_context(servers.Proxy(server.endpoint))
            proxy.on("GET .*", spoil)
            return proxy.endpoint

        good = [endpoint(cases[names[0]]) for _ in range(4)]
        job = [(name, [good[0], endpoint(spoil), *good[2:]]) for name, spoil in bad.items()]
        arguments = {"path": path, "cases": [("not measured", good), *job]}
        done = processes.run_processes(JOB, processes=4, devices_per_process=1, timeout=1800, args=arguments)
    for lines in zip(*(one.stdout.splitlines() for one in done), strict=True):
        (case, read, _), seconds = json.loads(lines[0]), [json.loads(line)[2] for line in lines]
        print(f"{case}, {read}: {max(seconds):.1f} s")


if __name__ == "__main__":
    main()
