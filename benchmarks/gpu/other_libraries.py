"""jaxckpt and other libraries in turn: Orbax with large and small leaves, safetensors and PyTorch with a model."""

from __future__ import annotations

import contextlib
import functools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import CONTENDERS, Contender
from lab import Figure, Lab, Laps, Peaks, Training, Tree, best_warm, gib_per_second, own_memory, state, structs, timed

import jaxckpt

# Orbax ---------------------------------------------------------------------------------------------------

IN_MEMORY = ("jaxckpt", "orbax v1", "jaxckpt", "orbax v0", "jaxckpt", "orbax v1", "jaxckpt", "orbax v0")
ON_DISK = ("jaxckpt", "orbax v1", "jaxckpt", "orbax v1", "jaxckpt")


def large_in_memory(lab: Lab) -> Iterator[Figure]:
    leaves, n_bytes = lab.large(lab.memory)
    return _in_turn(lab, lab.memory, leaves, n_bytes, IN_MEMORY)


def small_in_memory(lab: Lab) -> Iterator[Figure]:
    return _in_turn(lab, lab.memory, lab.sizes.small_leaves, lab.sizes.small, IN_MEMORY)


def large_on_disk(lab: Lab) -> Iterator[Figure]:
    """Half the size: the rate of the disk is neither library's."""
    leaves, n_bytes = lab.large(lab.disk)
    return _in_turn(lab, lab.disk, leaves // 2, n_bytes, ON_DISK)


def _in_turn(lab: Lab, folder: Path, leaves: int, n_bytes: int, turns: Sequence[str]) -> Iterator[Figure]:
    """All laps of each library. The first lap of each also compares values and measures peaks of memory."""
    tree = state(leaves, n_bytes)
    training = Training(lab.sizes)
    yield "leaves", leaves
    yield "bytes", leaves * n_bytes
    yield "step_alone_ms", training.alone_ms
    laps: dict[str, Laps] = {}
    longest = 0.0
    for name in turns[:4] if lab.sizes.is_dry else turns:
        begun = time.monotonic()
        if lab.left() < 1.5 * longest:
            yield "left out", f"{name} and what follows: {lab.left():.0f} s were left"
            return
        contender, path, is_first = CONTENDERS[name], folder / name.replace(" ", "-"), name not in laps
        times, peaks = _lap(contender, path, tree, training, is_first)
        if is_first:
            yield f"{name}, peaks", peaks
        laps.setdefault(name, Laps()).add(**times)
        yield name, {**laps[name], **_rates(leaves * n_bytes, laps[name])}
        longest = max(longest, time.monotonic() - begun)


def _lap(
    contender: Contender, path: Path, tree: Tree, training: Training, is_first: bool
) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """The times of a save, of a restore, and of a background save with the training steps until it ends; peaks."""
    peaks: dict[str, dict[str, int]] = {}
    times: dict[str, float] = {}
    with Peaks() if is_first else contextlib.nullcontext() as saving:
        times["save_s"], _ = timed(functools.partial(contender.save, path, tree))
    with Peaks() if is_first else contextlib.nullcontext() as restoring:
        times["restore_s"], back = timed(lambda: contender.restore(path, structs(tree)))
    if saving and restoring:
        peaks = {"save": saving.mib(), "restore": restoring.mib()}
        for name in list(tree)[:64]:
            assert bool((back[name] == tree[name]).all()), f"{name} was restored with other values"
    del back
    shutil.rmtree(path)
    begun = time.perf_counter()
    wait = contender.save_async(path, tree)
    times["save_async_returns_s"] = time.perf_counter() - begun
    more, steps = training.steps_until(wait)
    times["save_async_ends_s"] = times["save_async_returns_s"] + more
    shutil.rmtree(path)
    times |= {"step_median_ms": statistics.median(steps), "slowest_step_ms": max(steps), "steps": len(steps)}
    return times, peaks


def _rates(n_bytes: int, laps: Laps) -> dict[str, float]:
    return {f"{what}_gib_s": gib_per_second(n_bytes, best_warm(laps[f"{what}_s"])) for what in ("save", "restore")}


# Files of models -----------------------------------------------------------------------------------------

LAYER = {
    **dict.fromkeys("qo", (4096, 4096)),
    **dict.fromkeys("kv", (1024, 4096)),
    "up": (12288, 4096),
    "gate": (12288, 4096),
    "down": (4096, 12288),
    "norm1": (4096,),
    "norm2": (4096,),
}


def model_files(lab: Lab) -> Iterator[Figure]:
    """4 GiB of bfloat16 in 92 leaves, from memory to the device, by jaxckpt, by safetensors, and by PyTorch."""
    import safetensors.flax  # the comparison with Orbax does not need it
    import safetensors.numpy

    scale = 16 if lab.sizes.is_dry else 1
    shapes = {f"layers.{layer}.{name}": shape for layer in range(10) for name, shape in LAYER.items()}
    shapes |= {"embed": (32768, 4096), "head": (32768, 4096)}
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(jnp.bfloat16)
    tree = {name: np.resize(some, [side // scale for side in shape]) for name, shape in shapes.items()}
    n_bytes = sum(leaf.nbytes for leaf in tree.values())
    yield "bytes", n_bytes
    yield "leaves", len(tree)
    file, own = lab.memory / "model.safetensors", lab.memory / "own"
    safetensors.numpy.save_file(tree, file)
    jaxckpt.save(own, tree)
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own_memory()) for name, leaf in tree.items()}
    del tree
    readers: dict[str, Callable[[], Any]] = {
        "jaxckpt, its own": lambda: jaxckpt.restore(own, wanted),
        "jaxckpt, safetensors": lambda: jaxckpt.restore(file, wanted),
        "safetensors.flax": lambda: safetensors.flax.load_file(file),
        "safetensors.numpy, device_put": lambda: jax.device_put(safetensors.numpy.load_file(file), own_memory()),
    }
    if jax.default_backend() == "gpu":
        readers["safetensors.torch"] = lambda: _load_by_torch(file)  # the last, because both keep device memory
    for name, read in readers.items():
        try:
            laps = [timed(read)[0] for _ in range(2)]
        except Exception as error:  # another library that fails does not keep the others from being measured
            if name.startswith("jaxckpt"):
                raise
            yield name, {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        else:
            yield name, {"s": laps, "gib_s": gib_per_second(n_bytes, best_warm(laps))}


def _load_by_torch(file: Path) -> Any:
    import safetensors.torch
    import torch

    loaded = safetensors.torch.load_file(file, device="cuda:0")
    torch.cuda.synchronize()
    return loaded
