"""Background saves by two processes, with all cases in one job: each process prints {case: lines} as JSON.

Each case has its own folder and ends with both processes in step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._save import staging
from jaxckpt._store.files import FileWriter

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
write = FileWriter.write
lines: list[Any] = []


def made(spec: P, value: float) -> jax.Array:
    return jax.make_array_from_callback((8, 8), NamedSharding(mesh, spec), lambda i: np.full((8, 8), value, "f")[i])


@contextlib.contextmanager
def writing(seconds: float | None) -> Iterator[None]:
    """Make each write take this many seconds, or fail if `seconds` is None."""

    def late(*arguments: Any) -> Any:
        if seconds is None:
            raise jaxckpt.errors.StorageError(28, "no space")
        time.sleep(seconds)
        return write(*arguments)

    FileWriter.write = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileWriter.write = write  # type: ignore[method-assign]


def steps_meanwhile(folder: str) -> None:
    tree = {"x": made(P("a", "b"), 1), "y": made(P(), 1)}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + (x * 0 + 1).sum() / 64, tree), donate_argnums=0)
    saves = []
    with writing(0.1 * (1 + process_id)):
        for number in range(1, 4):
            saves.append(jaxckpt.save_async(f"{folder}/{number}", tree, mesh=mesh, specs=P("b")))
            while True:
                tree = jax.block_until_ready(step(tree))  # both processes run the same number of steps
                if float(tree["y"].addressable_data(0)[0, 0]) % 10 == 1:
                    break
        lines.append([pending.wait().process_bytes for pending in saves])


def one_fails(folder: str) -> None:
    with writing(None) if process_id == 1 else contextlib.nullcontext():
        pending = jaxckpt.save_async(f"{folder}/c", {"x": made(P("a", "b"), 1)})
        try:
            pending.wait(60)
        except jaxckpt.JaxckptError as error:
            lines.append(f"{type(error).__name__} {error}")


def one_cannot_begin(folder: str) -> None:
    tree = {"x": made(P("a", "b"), 1), "bad": object() if process_id == 1 else 1}
    try:
        jaxckpt.save_async(f"{folder}/c", tree).wait(60)
    except jaxckpt.JaxckptError as error:
        lines.append(f"{type(error).__name__} {error}")
    jaxckpt.save_async(f"{folder}/c", {"x": tree["x"]}).wait(60)


def one_cannot_begin_once(folder: str) -> None:
    """The failure is raised in the call in process 1, and by its `wait` in process 0. Other paths do not notice it."""
    saves: list[jaxckpt.PendingSave] = []
    for number in range(5):
        tree = {"x": made(P("a", "b"), 1), "bad": object() if (process_id, number) == (1, 1) else 1}
        try:
            saves.append(jaxckpt.save_async(f"{folder}/{number}", tree))
        except jaxckpt.JaxckptError as error:
            lines.append(type(error).__name__)
    for pending in saves:
        try:
            pending.wait(60)
            lines.append("fine")
        except jaxckpt.JaxckptError as error:
            lines.append(type(error).__name__)
    lines.append(sorted(name for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}/manifest.json")))


def skipping(folder: str) -> None:
    options = jaxckpt.Options(when_busy="skip")
    with writing(0.5 * process_id):  # process 0 finishes its writes long before process 1
        for number in range(12):
            pending = jaxckpt.save_async(f"{folder}/{number}", {"x": made(P("a", "b"), number)}, options=options)
            lines.append(pending.skipped)
            if not pending.skipped:
                last = pending
            time.sleep(0.05 * (1 + process_id))
        last.wait(60)


def process_0_fails_while_others_write(folder: str) -> None:
    options = jaxckpt.Options(timeout_seconds=20, object_bytes=256, chunk_bytes=256)
    tree = {"x": made(P("a", "b"), 1), "y": [made(P("a", "b"), n) for n in range(4)]}
    for blocking, spec in itertools.product((True, False), (P("a", "b"), P(None, "a"))):
        path = f"{folder}/{'save' if blocking else 'save_async'}-{'own layout' if spec == P('a', 'b') else 'exchanged'}"
        with writing(0.5 if process_id else None):
            try:
                if blocking:
                    jaxckpt.save(path, tree, mesh=mesh, specs=spec, options=options)
                else:
                    jaxckpt.save_async(path, tree, mesh=mesh, specs=spec, options=options).wait()
            except (jaxckpt.errors.StorageError, jaxckpt.errors.PeerFailedError) as error:
                lines.append(type(error).__name__)


def exchanged_from_other_devices(folder: str) -> None:
    lies_in_host_memory = staging.is_in_host_memory
    staging.is_in_host_memory = lambda value: False
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {"x": jax.make_array_from_callback((8, 8), NamedSharding(mesh, P("a")), lambda index: x[index])}
    pending = jaxckpt.save_async(f"{folder}/c", tree, mesh=mesh, specs=P(None, "a"))
    tree["x"].delete()
    pending.wait(60)
    staging.is_in_host_memory = lies_in_host_memory


CASES: list[Callable[[str], None]] = [
    steps_meanwhile,
    one_fails,
    one_cannot_begin,
    one_cannot_begin_once,
    skipping,
    process_0_fails_while_others_write,
    exchanged_from_other_devices,
]
for case in CASES:
    os.makedirs(f"{args}/{case.__name__}", exist_ok=True)
    lines.clear()
    case(f"{args}/{case.__name__}")
    print(json.dumps({case.__name__: lines}), flush=True)
