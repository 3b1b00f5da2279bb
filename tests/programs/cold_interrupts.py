"""Interrupts the first operation of a process with Ctrl-C, at every point of its main thread, one point per process.

Each process is a fork of this one, which has imported the library but has started neither threads nor JAX's backend.
After the interrupt, the process saves again, checks what it reads, closes what it opened, and ends. Prints a line of
JSON per operation: points tried, interrupts, and what went wrong. A process that does not end in time prints the stacks
of its threads.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import numpy as np
from interrupting import Interrupt, require_complete

import jaxckpt
from jaxckpt import rules

HANG_SECONDS = 20

folder, names, first, stride = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
for name in jaxckpt.__all__:
    getattr(jaxckpt, name)  # imports its module

TREES = [{"w": np.full((64, 64), step, np.float32), "b": np.full(7, step), "step": step} for step in range(3)]


def save(path: str) -> None:
    jaxckpt.save(path, TREES[1], overwrite=True)


def save_async(path: str) -> None:
    jaxckpt.save_async(path, TREES[1], overwrite=True).wait()


def restore(path: str) -> None:
    require_complete(jaxckpt.restore(path), {0})


def load_numpy(path: str) -> None:
    require_complete(jaxckpt.load_numpy(path), {0})


def verify(path: str) -> None:
    assert jaxckpt.verify(path).ok


def checkpointer(path: str) -> None:
    """Rules and the first restore, as for fine-tuning, then a save."""
    renamed = rules.Rules([rules.Rule(source=name, target=name) for name in "wb"], keep=True)
    with jaxckpt.Checkpointer(path + "-steps", keep_last=1) as run:
        require_complete(jaxckpt.load_numpy(path, rename=renamed), {0})
        run.restore_or_init(lambda: TREES[0])
        run.save((run.latest_step() or 0) + 1, TREES[1], overwrite=True)


def attempt(operation: Callable[[str], None], path: str, at: int) -> str:
    """In a fork: the outcome, once everything after the interrupt has worked."""
    interrupt, outcome = Interrupt(at), "ended"
    sys.setprofile(interrupt)
    try:
        operation(path)
    except KeyboardInterrupt:
        outcome = "interrupted"
    finally:
        sys.setprofile(None)
    if interrupt.seen < at:
        return "beyond"
    # Like a program that catches KeyboardInterrupt and saves once more.
    jaxckpt.save(path, TREES[2], overwrite=True)
    require_complete(jaxckpt.restore(path), {2})
    with jaxckpt.Checkpointer(path + "-steps", keep_last=1) as run:
        run.save((run.latest_step() or 0) + 1, TREES[2])
    return outcome


def in_a_fork(operation: Callable[[str], None], path: str, at: int) -> tuple[str, str]:
    """(outcome, what the process printed), its exit included."""
    with tempfile.TemporaryFile("w+") as output:
        process = os.fork()
        if not process:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            faulthandler.dump_traceback_later(HANG_SECONDS - 5, exit=False)
            try:
                print(f"outcome: {attempt(operation, path, at)}", flush=True)
            except BaseException:
                traceback.print_exc()
                sys.exit(1)
            sys.exit(0)  # through the interpreter's own end, which must not hang either
        deadline, status = time.monotonic() + HANG_SECONDS, None
        while status is None and time.monotonic() < deadline:
            found, code = os.waitpid(process, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if found else time.sleep(0.002)
        if status is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        output.seek(0)
        text = output.read()
    said = [line[9:] for line in text.splitlines() if line.startswith("outcome: ")]
    if status is None:
        return "hung", text
    return (said[0], text) if status == 0 and said else (f"exit {status}", text)


def attack(name: str) -> None:
    counts: dict[str, int] = {}
    wrong: list[str] = []
    at = first
    while True:
        path = os.path.join(folder, f"{name}-{at}")
        # In a process of its own, so that this one starts no threads.
        if not (writer := os.fork()):
            jaxckpt.save(path, TREES[0], options=jaxckpt.Options(sync=False))
            os._exit(0)
        os.waitpid(writer, 0)
        outcome, text = in_a_fork(globals()[name], path, at)
        if outcome == "beyond" or len(wrong) == 5:
            break
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome not in ("interrupted", "ended"):
            wrong.append(f"{name}, point {at}: {outcome}\n{text[-4000:]}")
        os.system(f"rm -rf '{path}' '{path}-steps'")
        at += stride
    print(
        json.dumps({"operation": name, "tried": sum(counts.values()), "points": at, **counts, "wrong": wrong[:5]}),
        flush=True,
    )


for name in names:
    attack(name)
