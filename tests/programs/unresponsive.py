"""Makes every public call while the daemon of a FUSE mount is stopped or killed; prints how each call ended.

The arguments are a folder on the mount, the id of the daemon, and "stop" or "kill". After a stop, the daemon resumes,
and every call is made again, on other checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxckpt
from jaxckpt._cli.main import main

SECONDS = 2.0
OPTIONS = jaxckpt.Options(timeout_seconds=SECONDS)
TREE = {"w": np.arange(4096.0), "n": 1}

Calls = dict[str, Callable[[], Any]]

NO_STORAGE = {
    "Checkpointer.local_bytes": "computes",
    "Checkpointer.metrics": "returns what was read when the Checkpointer was created",
    "Checkpointer.path": "computes",
    "Checkpointer.close": "waits for what save has begun; notes that it cannot write are only logged",
    "Checkpointer.wait": "waits for what save has begun, as PendingSave.wait, which is called",
    "Publisher.close": "as Checkpointer.close",
    "Checkpoint.get": "returns a leaf without its data",
    "Checkpoint.plan": "computes",
    "Checkpoint.tree": "returns leaves without their data",
    "Step.open": "as open",
    "register_leaf": "uses no storage",
}
"""Public functions that are not called, and why."""


def save_step(folder: Path, step: int, **settings: Any) -> None:
    with jaxckpt.Checkpointer(folder, on_preemption="ignore", background=False, **settings) as run:
        run.save(step, TREE, metrics={"loss": 1.0}, process_state={"seed": step})


def calls_in(top: Path) -> Calls:
    """Every public call, on checkpoints of its own."""
    calls: Calls = {}

    def path(name: str) -> Path:
        return top / name

    def checkpoint(name: str) -> Path:
        jaxckpt.save(path(name), TREE, process_state={"seed": 1})
        return path(name)

    def run(name: str, steps: int = 1) -> Path:
        for step in range(1, steps + 1):
            save_step(path(name), step)
        return path(name)

    def checkpointer(name: str, call: Callable[[jaxckpt.Checkpointer], Any], **settings: Any) -> None:
        at = run(name, 2)
        opened = jaxckpt.Checkpointer(at, options=OPTIONS, on_preemption="ignore", **settings)
        calls[name] = functools.partial(call, opened)

    folder = path("huggingface")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    np.savez(path("rank.npz"), w=np.arange(3))

    save = functools.partial(jaxckpt.save, tree=TREE, options=OPTIONS)
    calls["save"] = functools.partial(save, path("save"))
    calls["save(overwrite=True)"] = functools.partial(save, checkpoint("overwritten"), overwrite=True)
    calls["save_async"] = lambda: jaxckpt.save_async(path("save_async"), TREE, options=OPTIONS).wait()
    for name in ("restore", "load_numpy", "open", "verify", "report"):
        calls[name] = functools.partial(getattr(jaxckpt, name), checkpoint(name), options=OPTIONS)
    calls["diff"] = functools.partial(jaxckpt.diff, checkpoint("diff"), checkpoint("diff2"), options=OPTIONS)
    convert = functools.partial(jaxckpt.convert, checkpoint("convert"), options=OPTIONS)
    calls["convert"] = functools.partial(convert, path("converted"))
    original = jaxckpt.open(checkpoint("convert2"), options=OPTIONS)
    loaded = jaxckpt.rank_files({0: path("rank.npz")})
    for suffix in (".npz", ".safetensors", ".zarr"):
        calls[f"convert to {suffix}"] = functools.partial(convert, path(f"converted2{suffix}"))
    calls["convert of files"] = functools.partial(jaxckpt.convert, loaded, path("converted3"), options=OPTIONS)
    calls["load_numpy of files"] = functools.partial(jaxckpt.load_numpy, loaded, options=OPTIONS)
    for name in ("steps", "latest_step"):
        calls[name] = functools.partial(getattr(jaxckpt, name), run(name), options=OPTIONS)
    calls["follow"] = functools.partial(lambda at: next(jaxckpt.follow(at, options=OPTIONS)), run("follow"))
    step = next(jaxckpt.follow(run("step"), options=OPTIONS))
    calls["Step.restore"] = step.restore
    calls["pin"] = functools.partial(jaxckpt.pin, f"{run('pin')}@1", "paper", options=OPTIONS)
    jaxckpt.pin(f"{run('unpin')}@1", "paper")
    calls["unpin"] = functools.partial(jaxckpt.unpin, f"{path('unpin')}@paper", options=OPTIONS)
    calls["fork"] = functools.partial(jaxckpt.fork, run("fork"), path("forked"), options=OPTIONS)
    calls["rank_files"] = functools.partial(jaxckpt.rank_files, {0: path("rank.npz")})
    calls["mindspore_ranks"] = functools.partial(jaxckpt.mindspore_ranks, {0: _safetensors(path("rank.safetensors"))})
    calls["oneflow_ranks"] = functools.partial(jaxckpt.oneflow_ranks, {0: _oneflow(path("oneflow"))})
    calls["huggingface_rules"] = functools.partial(jaxckpt.huggingface_rules, _llama(folder))
    calls["LazyLeaf"] = lambda: original["w"][:5]
    calls["LazyLeaf.slabs"] = lambda: list(jaxckpt.LazyLeaf.slabs(original["w"]))
    calls["LazyLeaf.value"] = lambda: original["w"].value
    calls["Checkpoint.process_states"] = lambda: original.process_states
    held = jaxckpt.open(f"{run('held')}@1", options=OPTIONS)
    calls["Checkpoint.hold"] = lambda: contextlib.ExitStack().enter_context(held.hold())

    weights = {"w": jnp.arange(4.0)}
    jaxckpt.Publisher(path("weights")).publish(1, weights)
    publisher = jaxckpt.Publisher(path("weights2"), options=OPTIONS)
    calls["Publisher"] = functools.partial(jaxckpt.Publisher, path("weights3"), options=OPTIONS)
    calls["Publisher.publish"] = lambda: (publisher.publish(1, weights), publisher.close())
    calls["subscribe"] = lambda: next(jaxckpt.subscribe(path("weights"), options=OPTIONS, timeout=1))

    create = functools.partial(jaxckpt.Checkpointer, options=OPTIONS, on_preemption="ignore", keep_last=1)
    calls["Checkpointer"] = functools.partial(create, run("Checkpointer"))
    checkpointer("Checkpointer.save", lambda run: (run.save(3, TREE, metrics={"loss": 1.0}), run.close()))
    checkpointer("Checkpointer.restore", lambda run: run.restore())
    checkpointer("Checkpointer.restore_or_init", lambda run: run.restore_or_init(lambda: TREE))
    checkpointer("Checkpointer.delete", lambda run: run.delete(1))
    checkpointer("Checkpointer.steps", lambda run: run.steps())
    checkpointer("Checkpointer.latest_step", lambda run: run.latest_step())
    checkpointer("Checkpointer.best_step", lambda run: run.best_step(), keep_best=("loss", "min"))
    checkpointer("Checkpointer.process_state", lambda run: run.process_state("seed"))

    other = str(checkpoint("cli"))
    for command in ("ls", "show", "cat", "verify", "plan", "report", "diff", "convert", "rm", "pin", "unpin", "fork"):
        more = {
            "cat": ["n"],
            "plan": ["--mesh", "data=2"],
            "report": ["-o", str(path("report.html"))],
            "diff": [other],
            "convert": [str(path("cli.npz"))],
            "rm": ["--yes"],
            "pin": ["--name", "paper"],
            "fork": [str(path("cli-forked"))],
        }.get(command, [])
        where = str(run(f"cli-{command}")) if command in ("pin", "unpin", "fork") else str(checkpoint(f"cli-{command}"))
        if command == "unpin":
            jaxckpt.pin(f"{where}@1", "paper")
            where += "@paper"
        calls[f"jaxckpt {command}"] = functools.partial(command_line, [command, where, *more])
    return calls


def _safetensors(path: Path) -> Path:
    jaxckpt.save(path.with_suffix(".ckpt"), {"w": np.arange(3.0)})
    jaxckpt.convert(path.with_suffix(".ckpt"), path)
    return path


def _oneflow(path: Path) -> Path:
    (path / "w").mkdir(parents=True)
    np.float32([1, 2]).tofile(path / "w" / "out")
    (path / "w" / "meta").write_text("shape { dim: 2 } data_type: kFloat\n")
    return path


def _llama(folder: Path) -> Path:
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers vocab_size".split()
    config = {"model_type": "llama", "head_dim": 8, **dict.fromkeys(names, 2)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command_line(arguments: list[str]) -> None:
    code = main.main(arguments, standalone_mode=False)
    if code:
        assert code == 5, f"exit code {code}"
        raise jaxckpt.StorageError(0, "no bytes have moved: exit code 5")


def public_calls() -> set[str]:
    """The names of all public functions and methods that may use storage."""
    found = set[str]()
    for name in jaxckpt.__all__:
        one = getattr(jaxckpt, name)
        if inspect.isfunction(one):
            found.add(name)
        elif inspect.isclass(one) and name in ("Checkpoint", "Checkpointer", "Publisher", "Step"):
            public = {method: vars(one)[method] for method in vars(one) if not method.startswith("_")}
            found |= {f"{name}.{method}" for method in public if inspect.isfunction(public[method])}
    return found


def make(calls: Calls) -> dict[str, tuple[str, float, str]]:
    """Make all calls, each in a thread of its own. Returns how each ended, after how many seconds, and its message."""
    ended: dict[str, tuple[str, float, str]] = {}

    def call_one(name: str) -> None:
        begun = time.monotonic()
        try:
            calls[name]()
            how, message = "done", ""
        except BaseException as error:
            how, message = type(error).__name__, str(error)
        ended[name] = how, time.monotonic() - begun, message

    threads = [threading.Thread(target=call_one, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 40
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: ended.get(name, ("hangs", 0.0, "")) for name in calls}


if __name__ == "__main__":
    folder, daemon, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    logging.disable(logging.WARNING)
    constructor: Any = jaxckpt.Options.__init__
    constructor.__kwdefaults__["timeout_seconds"] = SECONDS  # for calls that take no options
    rounds: list[Calls] = []
    for name in ("first", "second")[: 2 if what == "stop" else 1]:
        (folder / name).mkdir()
        rounds.append(calls_in(folder / name))
    for _ in range(2):
        jaxckpt.load_numpy(folder / "first" / "restore")  # whatever is imported late is imported now
    os.kill(daemon, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    outcomes = [make(rounds[0])]
    if what == "stop":
        os.kill(daemon, signal.SIGCONT)
        outcomes.append(make(rounds[1]))
        shutil.rmtree(folder / "second")
        # The program must also be able to end.
        slow = jaxckpt.Options(timeout_seconds=SECONDS, object_bytes=4096, chunk_bytes=4096, max_bytes_per_second=8192)
        pending = jaxckpt.save_async(folder / "at exit", TREE, options=slow)
        while not pending.progress.done_bytes:
            time.sleep(0.01)
        os.kill(daemon, signal.SIGSTOP)
    print("\n", json.dumps({"public": sorted(public_calls()), "skipped": NO_STORAGE, "outcomes": outcomes}))
