"""Saves and restores by jaxckpt alone: the first ones, their overlap with training, memory over time, and options."""

from __future__ import annotations

import functools
import gc
import gzip
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import CONTENDERS
from lab import (
    GIB,
    Figure,
    Lab,
    Laps,
    Training,
    Tree,
    device_stat,
    machine_bytes,
    pinned_memory,
    resident_bytes,
    state,
    structs,
    timed,
)

import jaxckpt
from jaxckpt._restore import wants as blocks
from jaxckpt._save import staging

Phases = dict[str, float]
"""The seconds of each phase of a save."""


def async_times(path: Path, tree: Tree, options: jaxckpt.Options | None = None) -> tuple[dict[str, float], Phases]:
    """The seconds until `save_async` returns and until its save ends. Replaces the checkpoint at the path."""
    begun = time.perf_counter()
    pending = jaxckpt.save_async(path, tree, overwrite=True, options=options)
    times = {"save_async_returns_s": time.perf_counter() - begun}
    info = pending.wait()
    times["save_async_ends_s"] = time.perf_counter() - begun
    return times, {phase: round(seconds, 3) for phase, seconds in info.phase_seconds.items()}


def first_saves(lab: Lab) -> Iterator[Figure]:
    """Four background saves of a new process, and the training steps until each ends. The first save allocates pinned
    memory, which the process keeps."""
    contender = CONTENDERS[lab.argument]
    leaves, n_bytes = lab.large(lab.memory)
    tree = state(leaves, n_bytes)
    training = Training(lab.sizes)
    yield "bytes", leaves * n_bytes
    yield "step_alone_ms", training.alone_ms
    before, laps = machine_bytes(), Laps()
    for turn in range(4):
        begun = time.perf_counter()
        wait = contender.save_async(lab.memory / str(turn), tree)
        returns = time.perf_counter() - begun
        _, steps = training.steps_until(wait)
        laps.add(
            save_async_returns_s=returns,
            save_async_ends_s=time.perf_counter() - begun,
            slowest_step_ms=max(steps),
            machine_gib=(machine_bytes() - before) / GIB,
        )
        yield "laps", laps
        shutil.rmtree(lab.memory / str(turn))


def short_steps(lab: Lab) -> Iterator[Figure]:
    """How much a loop of short steps feels a background save: its share of the steps per second alone, and quantiles of
    a step until the save has ended. Such a loop spends its time in Python, which a save also needs."""
    advance = jax.jit(lambda x: x * 1.0001 + 1.0)
    x = jax.block_until_ready(advance(jnp.zeros(1024)))

    def step() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(advance(x))
        return time.perf_counter() - begun

    leaves, n_bytes = lab.large(lab.memory)
    for what, sizes in {"large": (leaves, n_bytes), "small": (lab.sizes.small_leaves, lab.sizes.small)}.items():
        tree = state(*sizes)
        laps: dict[str, Laps] = {}
        for name in [*CONTENDERS] * (2 if lab.sizes.is_dry else 3):
            alone = [step() for _ in range(2000)]
            ended: list[float] = []
            begun = time.perf_counter()
            if name == "jaxckpt":  # `wait` would let the save hurry
                jaxckpt.save_async(lab.memory / "c", tree, on_done=lambda _: ended.append(time.perf_counter()))  # noqa: B023
                returned = time.perf_counter()
            else:
                wait = CONTENDERS[name].save_async(lab.memory / "c", tree)
                returned = time.perf_counter()
                threading.Thread(target=lambda: (wait(), ended.append(time.perf_counter()))).start()  # noqa: B023
            steps = [step()]
            while not ended:
                steps.append(step())
            laps.setdefault(name, Laps()).add(
                returns_s=returned - begun,
                ends_s=ended[0] - begun,
                speed=len(steps) / (ended[0] - returned) * statistics.mean(alone),
                alone_us=1e6 * statistics.median(alone),
                p50_us=1e6 * float(np.quantile(steps, 0.5)),
                p99_us=1e6 * float(np.quantile(steps, 0.99)),
                slowest_us=1e6 * max(steps),
            )
            yield f"{what}, {name}", laps[name]
            shutil.rmtree(lab.memory / "c")


def offloaded_leaves(lab: Lab) -> Iterator[Figure]:
    """Leaves in pinned host memory, where optimizers may keep their state."""
    leaves, n_bytes = 8, lab.sizes.link // 8
    tree = jax.block_until_ready(jax.device_put(state(leaves, n_bytes), pinned_memory()))
    yield "bytes", leaves * n_bytes
    laps = Laps()
    for _ in range(3):
        times, _ = async_times(lab.memory / "c", tree)
        seconds, back = timed(functools.partial(jaxckpt.restore, lab.memory / "c", tree))
        laps.add(**times, restore_s=seconds)
        assert {leaf.sharding.memory_kind for leaf in back.values()} == {"pinned_host"}
        yield "laps", laps


def flat_memory(lab: Lab) -> Iterator[Figure]:
    """50 saves and 10 restores of one tree. Device memory must not grow, and nothing may be compiled after turn 2."""
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    dry = lab.sizes.is_dry
    tree = {f"large{n}": leaf for n, leaf in enumerate(state(24, 64 << 10 if dry else 8 << 20).values())}
    tree |= state(150 if dry else 400, 16 << 10)
    marks: list[dict[str, int]] = []
    turns = 6 if dry else 50
    for turn in range(turns):
        jaxckpt.save_async(lab.memory / "c", tree, overwrite=True).wait()
        if turn % 5 == 0:
            jax.block_until_ready(jaxckpt.restore(lab.memory / "c", tree))
        gc.collect()
        marks.append(
            {
                "resident": resident_bytes(),
                "machine": machine_bytes(),
                "device": device_stat("bytes_in_use"),
                "compiled": len(compiled),
            }
        )
    for name, number in (("after 1", 0), ("after 2", 1), ("after a third", turns // 3), ("at the end", -1)):
        yield name, marks[number]
    grown = marks[-1]["device"] - marks[turns // 3]["device"]
    assert grown <= 1 << 20, f"device memory has grown by {grown} bytes"
    late = marks[-1]["compiled"] - marks[1]["compiled"]
    assert not late, f"{late} programs were compiled after the second save"


def settings(lab: Lab) -> Iterator[Figure]:
    """The same tree with other options: which of them costs time on this machine? The likeliest come first."""
    leaves, n_bytes = lab.large(lab.memory)
    tree = state(leaves, n_bytes)
    yield "bytes", leaves * n_bytes
    mib = 1 << 20
    longest = 0.0
    for name, options in {
        "defaults": jaxckpt.Options(),
        "host_bytes 1 GiB": jaxckpt.Options(host_bytes=1024 * mib),
        "host_bytes 4 GiB": jaxckpt.Options(host_bytes=4096 * mib),
        "object_bytes 16 MiB": jaxckpt.Options(object_bytes=16 * mib),
        "object_bytes 256 MiB": jaxckpt.Options(object_bytes=256 * mib),
        "io tensorstore": jaxckpt.Options(io="tensorstore"),
        "staging_bytes 1 GiB": jaxckpt.Options(staging_bytes=1024 * mib),
        "defaults again": jaxckpt.Options(),
    }.items():
        begun = time.monotonic()
        if lab.left() < 1.5 * longest:
            yield "left out", f"{name} and what follows: {lab.left():.0f} s were left"
            return
        yield name, _with_options(lab.memory / "c", tree, options)
        longest = max(longest, time.monotonic() - begun)


def _with_options(path: Path, tree: Tree, options: jaxckpt.Options) -> dict[str, Any]:
    laps, phases = Laps(), Phases()
    for _ in range(2):
        saving = timed(lambda: jaxckpt.save(path, tree, options=options))[0]
        restoring = timed(lambda: jaxckpt.restore(path, structs(tree), options=options))[0]
        shutil.rmtree(path)
        times, phases = async_times(path, tree, options)
        laps.add(save_s=saving, restore_s=restoring, **times)
        shutil.rmtree(path)
    return {**laps, "phases of the last": phases}


def blocks_or_one_by_one(lab: Lab) -> Iterator[Figure]:
    """Small leaves with and without stacking for transfers, in turn: to choose SEND_PIECES and BLOCK_PIECES."""
    usual = staging.SEND_PIECES, blocks.BLOCK_PIECES
    try:
        for leaves in (
            (lab.sizes.small_leaves,) if lab.sizes.is_dry else (lab.sizes.small_leaves // 4, lab.sizes.small_leaves)
        ):
            laps = {"blocks": Laps(), "one by one": Laps()}
            for kind in (*laps,) * 3:
                # No other section uses this shape, so that the first turn compiles, as in a training job.
                tree = {name: leaf[:-1] for name, leaf in state(leaves, max(8192, lab.sizes.small)).items()}
                jax.block_until_ready(tree)
                staging.SEND_PIECES = blocks.BLOCK_PIECES = 64 if kind == "blocks" else 1 << 30
                times, _ = async_times(lab.memory / "c", tree)
                laps[kind].add(**times, restore_s=timed(lambda: jaxckpt.restore(lab.memory / "c"))[0])
            yield f"{leaves} leaves", laps
    finally:
        staging.SEND_PIECES, blocks.BLOCK_PIECES = usual


# Overlap with training steps -----------------------------------------------------------------------------


def overlap(lab: Lab) -> Iterator[Figure]:
    """A trace of a background save and of the training steps until it ends: do copies and steps run at once?"""
    leaves, n_bytes = lab.large(lab.memory)
    tree = state(leaves, n_bytes // 2)
    training = Training(lab.sizes)
    jaxckpt.save_async(lab.memory / "warm", tree).wait()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(lab.disk / "trace", profiler_options=options):
        pending = jaxckpt.save_async(lab.memory / "c", tree)
        steps = [training.step_ms() for _ in range(10)]  # those of the copies; more would make a large trace
        pending.wait()
    yield "step_alone_ms", training.alone_ms
    yield "step_ms", statistics.median(steps)
    yield "steps_ms", steps
    (trace,) = (lab.disk / "trace").rglob("*.trace.json.gz")
    if trace.stat().st_size < 15 << 20:
        shutil.copy(trace, lab.out / "save_async.trace.json.gz")
    yield from overlapped(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])


Spans = list[tuple[float, float]]


def overlapped(events: list[dict[str, Any]]) -> Iterator[Figure]:
    """How long a trace's device copied to the host, computed, and did both at once, in milliseconds."""
    named = [(event["name"], event) for event in events if event.get("ph") == "M" and "name" in event.get("args", {})]
    devices = {event["pid"] for name, event in named if name == "process_name" and "GPU" in event["args"]["name"]}
    streams = {
        (event["pid"], event["tid"])
        for name, event in named
        if name == "thread_name" and event["pid"] in devices and "stream" in event["args"]["name"].lower()
    }  # other rows, such as "XLA Ops", show the same kernels again
    rows = [event for event in events if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams]
    copies = [event for event in rows if "memcpyd2h" in event["name"].lower().replace(" ", "")]
    kernels = [event for event in rows if "memcpy" not in event["name"].lower()]
    copying, computing = _union(copies), _union(kernels)
    both = [(max(a, c), min(b, d)) for a, b in copying for c, d in computing if max(a, c) < min(b, d)]
    yield "copies", len(copies)
    yield "copy_ms", _length_ms(copying)
    yield "kernel_ms", _length_ms(computing)
    yield "both_ms", _length_ms(both)
    yield "kinds of copies", sorted({str(event.get("args", {}).get("memcpy_details"))[:90] for event in copies})[:4]


def _union(events: list[dict[str, Any]]) -> Spans:
    spans: Spans = []
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
        else:
            spans.append((start, stop))
    return spans


def _length_ms(spans: Spans) -> float:
    return round(sum(stop - start for start, stop in spans) / 1e3, 2)
