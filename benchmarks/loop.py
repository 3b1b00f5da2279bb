"""How much a training loop feels a background save.

A loop of jitted steps runs alone, and then during a background save until the save has ended. All contenders save the
same tree in turn, in several rounds. Reported are medians over the rounds:

    blocked     how long the call that begins the save keeps the loop
    speed       steps per second until the save has ended, compared with the loop alone
    p50 … p99.9 seconds of a step in that time
    lost        the steps that the loop would have made in the time that it lost, until the save has ended
    published   when the save has ended, since its call

    python benchmarks/loop.py                         16 leaves of 64 MiB, 2,000 of 64 KiB, a scanned transformer
    python benchmarks/loop.py --workload a --step 33e-6 --loaders 2 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import timeit
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import steady

if __name__ == "__main__":
    steady.begin(devices=1)

import contenders
import jax
import jax.numpy as jnp
import numpy as np
import workloads
from contenders import Contender

import jaxckpt

CONTENDERS = ("jaxckpt", "Orbax raw", "Orbax OCDBT", "Orbax v1")
STEPS = (33e-6, 100e-6, 5e-3, 50e-3)
"""Seconds of a step alone: a jitted function and a little Python, or a wait for a device."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One background save during the loop."""

    blocked: float
    speed: float
    p50: float
    p99: float
    p99_9: float
    lost: float
    published: float
    cpu: float


@jax.jit
def _advance(state: jax.Array) -> jax.Array:
    return state * 1.0001 + 1.0


class Loop:
    """A training loop whose steps take at least `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._state = jnp.zeros(1024)
        self._waits = seconds if seconds >= 1e-3 else 0.0
        self._python = range(1)
        self._calibrate(seconds)

    def _calibrate(self, seconds: float) -> None:
        """Add Python until a step takes `seconds`. The fastest of many runs is not disturbed by other processes."""
        if self._waits:
            return
        step_alone = min(self.run_for(0.2))
        numbers = range(10_000)
        sum_alone = min(timeit.repeat(lambda: sum(numbers), repeat=50, number=1))
        self._python = range(max(1, round(len(numbers) * (seconds - step_alone) / sum_alone)))

    def step(self) -> float:
        begin = time.perf_counter()
        self._state = _advance(self._state)
        sum(self._python)
        if self._waits:  # a device computes meanwhile
            time.sleep(self._waits)
        self._state.block_until_ready()
        return time.perf_counter() - begin

    def run_for(self, seconds: float) -> list[float]:
        end = time.perf_counter() + seconds
        taken = list[float]()
        while time.perf_counter() < end:
            taken.append(self.step())
        return taken


def measure(loop: Loop, contender: Contender, tree: Any) -> Lap:
    """One save in the background of the loop."""
    steady.touch_memory(contender.workload.nbytes)
    os.sync()
    alone = loop.run_for(0.3)
    rate = len(alone) / sum(alone)
    ended = list[float]()
    cpu = time.process_time()
    begin = time.perf_counter()

    def note_end(*_: object) -> None:
        ended.append(time.perf_counter())

    if isinstance(contender, contenders.Jaxckpt):
        # Not `wait`, because a save hurries while somebody waits.
        pending = jaxckpt.save_async(contender.path, tree, options=contender.options, on_done=note_end)
        blocked = time.perf_counter() - begin
        wait: contenders.Wait = pending.wait
    else:
        wait = contender.save_async(tree)
        blocked = time.perf_counter() - begin
        threading.Thread(target=lambda: note_end(wait())).start()
    taken = list[float]()
    while not ended:
        taken.append(loop.step())
    wait()
    published = ended[0] - begin
    cpu = time.process_time() - cpu
    p50, p99, p99_9 = np.quantile(taken, [0.5, 0.99, 0.999])
    speed = len(taken) / max(published - blocked, 1e-9) / rate
    return Lap(blocked, speed, p50, p99, p99_9, published * rate - len(taken), published, cpu)


def speed_beside_a_writer(loop: Loop, folder: Path) -> float:
    """The loop's speed beside another process that writes all the time, compared with the loop alone. On two cores that
    share their memory, no save in the background can leave it more: this process shares no lock with the loop."""
    alone = loop.run_for(0.5)
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(folder / "floor",), daemon=True)
    writer.start()
    while not (folder / "floor").exists():
        time.sleep(0.05)
    beside = loop.run_for(1.0)
    writer.kill()
    writer.join()
    (folder / "floor").unlink()
    return (len(beside) / sum(beside)) / (len(alone) / sum(alone))


def _write(path: Path) -> None:
    os.nice(3)
    with path.open("wb", buffering=0) as file:
        while True:
            os.pwrite(file.fileno(), bytes(64 << 20), 0)


def _load_data(seconds: float) -> None:
    """A worker of a data loader: it computes half of the time."""
    while True:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            sum(range(1000))
        time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", action="append", choices=workloads.KEYS)
    parser.add_argument("--step", action="append", type=float, help="seconds of a step alone")
    parser.add_argument("--loaders", type=int, default=0, help="processes of a data loader")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contender", action="append")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.contender or CONTENDERS
    results = list[dict[str, Any]]()
    loaders = [
        multiprocessing.get_context("spawn").Process(target=_load_data, args=(0.005,), daemon=True)
        for _ in range(arguments.loaders)
    ]
    for loader in loaders:
        loader.start()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for key in arguments.workload or ("a", "b", "e"):
            workload = workloads.workload(key, quick=arguments.quick)
            tree = _on_one_device(workload)
            for seconds in arguments.step or STEPS:
                loop = Loop(seconds)
                kinds = [kind for kind in contenders.CONTENDERS if kind.name in names]
                taking_part = [kind(Path(folder), workload) for kind in kinds]
                laps: dict[str, list[Lap]] = {one.name: [] for one in taking_part}
                for number in range(arguments.rounds + 1):
                    for one in taking_part[:: (-1) ** number]:
                        lap = measure(loop, one, tree)
                        one.remove()
                        if number:  # the first compiles and warms up
                            laps[one.name].append(lap)
                floor = [speed_beside_a_writer(loop, Path(folder)) for _ in range(arguments.rounds)]
                report(workload.title, seconds, arguments.loaders, laps)
                print(f"beside a process that only writes, the loop runs at {statistics.median(floor):.0%}", flush=True)
                results.append(
                    {"workload": key, "step": seconds, "loaders": arguments.loaders, "beside_a_writer": floor}
                )
                results += [
                    {"workload": key, "step": seconds, "loaders": arguments.loaders, "contender": name}
                    | {"laps": [asdict(lap) for lap in found]}
                    for name, found in laps.items()
                ]
    for loader in loaders:
        loader.terminate()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def _on_one_device(workload: workloads.Workload) -> Any:
    device = jax.devices()[0]
    values = {path: jax.device_put(workload.value(path), device) for path in workload.leaves}
    return jax.block_until_ready(workloads.nested(values))


def report(title: str, seconds: float, loaders: int, laps: dict[str, list[Lap]]) -> None:
    print(f"\n{title}; a step takes {seconds * 1e3:g} ms; {loaders} data loaders")
    print(
        f"{'':16}{'blocked':>10}{'speed':>8}{'p50':>10}{'p99':>10}{'p99.9':>10}{'lost':>8}{'published':>11}{'CPU':>8}"
    )
    for name, found in laps.items():
        blocked, speed, p50, p99, p99_9, lost, published, cpu = (
            statistics.median(values) for values in zip(*(asdict(lap).values() for lap in found), strict=True)
        )
        print(
            f"{name:16}{blocked * 1e3:7.1f} ms{speed:8.0%}{p50 * 1e3:7.3f} ms{p99 * 1e3:7.3f} ms{p99_9 * 1e3:7.2f} ms"
            f"{lost:8.0f}{published:9.2f} s{cpu:6.2f} s"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
