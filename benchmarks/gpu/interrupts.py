"""Ctrl-C in calls with arrays on the device: in a process that has used it, and in the first call of new processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from lab import Figure, Lab, Tree, state, structs

import jaxckpt

LONGEST_SECONDS = 20.0
"""Within this time, the call after an interrupted one must have ended."""


def warm(lab: Lab) -> Iterator[Figure]:
    """Saves that replace a checkpoint, and restores, each interrupted at a random moment. Afterwards the checkpoint
    holds the values of one save in all leaves, and the next call works."""
    n_bytes = lab.sizes.large // 16
    tree = state(4, n_bytes // 4) | {f"small {n}": leaf for n, leaf in enumerate(state(64, 16 << 10).values())}
    numbered = jax.jit(lambda tree, number: jax.tree.map(lambda leaf: leaf * 0 + number, tree))
    path, chance, outcomes = lab.memory / "c", random.Random(0), Counter[str]()
    jaxckpt.save(path, numbered(tree, 0))
    calls: dict[str, Callable[[Tree], object]] = {
        "save": lambda tree: jaxckpt.save(path, tree, overwrite=True),
        "save_async": lambda tree: jaxckpt.save_async(path, tree, overwrite=True).wait(),
        "restore": lambda tree: jaxckpt.restore(path, structs(tree)),
    }
    seconds, saved, longest = dict.fromkeys(calls, 0.1), {0}, 0.0
    yield "bytes", sum(leaf.nbytes for leaf in tree.values())
    for number in range(1, 30 if lab.sizes.is_dry else 1000):
        if lab.left() < LONGEST_SECONDS:
            break
        name = [*calls][number % 3]
        saved |= {number} if name != "restore" else set()
        values = jax.block_until_ready(numbered(tree, number))
        begun = time.monotonic()
        is_interrupted = _interrupted(lambda: calls[name](values), chance.uniform(0, 1.2 * seconds[name]))  # noqa: B023
        outcomes[f"{name}, {'interrupted' if is_interrupted else 'ended'}"] += 1
        if not is_interrupted:
            seconds[name] = time.monotonic() - begun
        begun = time.monotonic()
        back = jaxckpt.restore(path, structs(tree))
        longest = max(longest, time.monotonic() - begun)
        found = {float(extreme) for leaf in back.values() for extreme in (leaf.min(), leaf.max())}
        assert len(found) == 1, f"after {name}, the checkpoint holds values of several saves: {found}"
        assert found <= saved, f"after {name}, the checkpoint holds {found}"
        if name != "restore" and not is_interrupted:
            assert found == {number}, f"after {name} of {number}, the checkpoint holds {found}"
        if found == {number} or name != "restore":
            saved = {number} | {int(value) for value in found}
        if number % 30 == 29:
            yield "outcomes", dict(outcomes)
    yield "outcomes", dict(outcomes)
    yield "longest restore after it, s", round(longest, 2)


def _interrupted(call: Callable[[], object], delay_seconds: float) -> bool:
    timer = threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        try:
            call()
        finally:
            timer.cancel()
            timer.join()
            time.sleep(0)  # Python runs the handler of a signal that came last
    except KeyboardInterrupt:
        timer.join()
        return True
    return False


def cold(lab: Lab) -> Iterator[Figure]:
    """New processes, several at a time, each interrupted at a random moment of its first call with device arrays. Each
    one then saves, restores, compares, and must end."""
    program = Path(__file__).with_name("interrupted.py")
    chance, outcomes = random.Random(0), Counter[str]()
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    at_once, rounds = (2, 2) if lab.sizes.is_dry else (6, 100)
    for number in range(rounds):
        if lab.left() < 2 * LONGEST_SECONDS:
            break
        running: list[subprocess.Popen[str]] = []
        for one in range(at_once):
            call = ("save", "save_async", "restore", "load_numpy")[one % 4]
            arguments = [call, str(lab.memory / f"{number}-{one}"), f"{chance.uniform(0, 1.5):.4f}"]
            command = [sys.executable, str(program), *arguments]
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(command, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        for process in running:
            try:
                output, _ = process.communicate(timeout=2 * LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
                output, _ = process.communicate()
                outcomes["hung"] += 1
                yield f"hung, round {number}", f"{process.args}: {output[-6000:]}"
                continue
            last = output.strip().splitlines()[-1:] or [""]
            if process.returncode or not last[0].startswith("{"):
                outcomes["failed"] += 1
                yield f"failed, round {number}", f"{process.args}: {process.returncode}: {output[-3000:]}"
                continue
            for call, outcome in json.loads(last[0]).items():
                outcomes[f"{call}, {outcome}"] += 1
        yield "outcomes", dict(outcomes)
    assert outcomes, "no time was left"
    assert not outcomes["hung"] + outcomes["failed"], dict(outcomes)
