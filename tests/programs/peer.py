"""Shared code of jobs in which faults are injected into some processes."""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id
from phases import PHASES

import jaxckpt

path, folder, count = args["path"], args["folder"], jax.process_count()
mesh, few = (Mesh(np.array(devices), ("data",)) for devices in (jax.devices(), jax.devices()[:2]))


def make(version: int) -> dict[str, Any]:
    """Sharded leaves, of which every process writes its own rows, and a replicated leaf."""

    def one(shape: tuple[int, ...], spec: P) -> jax.Array:
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index: np.full(shape, version, np.int32)[index]
        )

    leaves = {f"w{i}": one((4 * count, 64 + i), P("data")) for i in range(3)}
    return leaves | {"replicated": one((count, 7), P()), "version": np.full((), version)}


def versions(tree: Any) -> list[int]:
    seen: set[int] = set()
    for leaf in jax.tree.leaves(tree):
        for data in [shard.data for shard in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [leaf]:
            seen.update(map(int, np.unique(data)))
    return sorted(seen)


def operate(kind: str, version: int, timeout: float) -> None:
    options = jaxckpt.Options(timeout_seconds=timeout, read="shared" if kind == "shared restore" else "each")
    if kind.endswith("restore"):
        restored = versions(jaxckpt.restore(path, mesh=mesh, options=options))
        assert len(restored) == 1, restored
    elif kind == "save":
        jaxckpt.save(path, make(version), overwrite=True, options=options)
    elif kind == "save with an exchange":
        jaxckpt.save(path, make(version), mesh=few, specs=P("data"), overwrite=True, options=options)
    else:
        jaxckpt.save_async(path, make(version), overwrite=True, options=options).wait(100)


def attempt(kind: str, version: int, timeout: float) -> tuple[str, float]:
    """The error of an operation, or "", and its duration in seconds."""
    begun = time.monotonic()
    try:
        operate(kind, version, timeout)
        said = ""
    except jaxckpt.JaxckptError as error:
        said = f"{type(error).__name__}: {error}"
    return said, round(time.monotonic() - begun, 2)


def at(phase: str, strike: Callable[[], None]) -> Callable[[], None]:
    """Call `strike` once, when this process reaches a phase; returns a function that undoes this."""
    owner, _, name = PHASES[phase][1].rpartition(".")
    owner = pkgutil.resolve_name(f"jaxckpt.{owner}")
    original = getattr(owner, name)

    def struck(*arguments: Any, **named: Any) -> Any:
        if phase == "publishing" and arguments[0].what != "saving":
            return original(*arguments, **named)
        setattr(owner, name, original)
        strike()
        return original(*arguments, **named)

    setattr(owner, name, struck)
    return lambda: setattr(owner, name, original)


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.2)  # if sent from a thread, the signal takes effect a little later


def sleep_until(files: Iterable[str], then: str) -> Callable[[], None]:
    """A function that stops this process; another process sends the signal `then` once the files exist."""

    def strike() -> None:
        waiting = " && ".join(f"[ -e {os.path.join(folder, file)} ]" for file in files)
        waker = f"for i in $(seq 900); do {waiting} && break; sleep 0.1; done; kill -{then} {os.getpid()}"
        subprocess.Popen(["sh", "-c", waker])
        signal_self(signal.SIGSTOP)

    return strike


def note(name: str) -> None:
    open(os.path.join(folder, f"{name}-{process_id}"), "w").close()


def await_notes(name: str, processes: Iterable[int], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not all(os.path.exists(os.path.join(folder, f"{name}-{process}")) for process in processes):
        assert time.monotonic() < deadline, f"no {name} of {processes}"
        time.sleep(0.02)


def meet(name: str) -> None:
    note(name)
    await_notes(name, range(count))


def there() -> list[int]:
    """The versions at the path."""
    return versions(jaxckpt.load_numpy(path))


def n_data_folders() -> int:
    return len([name for name in os.listdir(path) if name.startswith("data-")])


def report(**said: Any) -> None:
    print("report", json.dumps(said), flush=True)
