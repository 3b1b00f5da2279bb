"""Makes every public call while the daemon of a FUSE mount is stopped or killed; prints how each call ended.

The arguments are a folder on the mount, "stop" or "kill", and the id of the daemon. After a stop, the daemon resumes,
and every call is made again, on other checkpoints.

With "strike" and numbers, each call is made on a mount of its own in that folder, whose daemon is killed during the
call, when it reads that request.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import json
import logging
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import mounts
import numpy as np

import jaxckpt
from jaxckpt import _options
from jaxckpt._cli.main import main

SECONDS = 2.0
OPTIONS = jaxckpt.Options(timeout_seconds=SECONDS)
PREPARATION = jaxckpt.Options(sync=False)
TREE = {"w": np.arange(4096.0), "n": 1}

Call = Callable[[], Any]

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
    "jaxckpt integrate": "as mindspore_ranks and convert",
    "lora_rules": "reads as open",
    "eqx_file": "reads as open",
    "merge_lora": "reads as open",
    "average": "reads as open",
    "jaxckpt average": "as convert",
    "register_leaf": "uses no storage",
}
"""Public functions that are not called, and why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in which calls are prepared, each with checkpoints of its own."""

    top: Path

    def path(self, name: str) -> Path:
        return self.top / name

    def checkpoint(self, name: str) -> Path:
        jaxckpt.save(self.path(name), TREE, process_state={"seed": 1}, options=PREPARATION)
        return self.path(name)

    def run(self, name: str, steps: int = 1) -> Path:
        with jaxckpt.Checkpointer(
            self.path(name), on_preemption="ignore", background=False, options=PREPARATION
        ) as run:
            for step in range(1, steps + 1):
                run.save(step, TREE, metrics={"loss": 1.0}, process_state={"seed": step})
        return self.path(name)

    def checkpointer(self, name: str, **settings: Any) -> jaxckpt.Checkpointer:
        return jaxckpt.Checkpointer(self.run(name, 2), options=OPTIONS, on_preemption="ignore", **settings)

    def rank_file(self, name: str) -> Path:
        np.savez(self.path(name), w=np.arange(3))
        return self.path(name)

    def opened(self, name: str) -> jaxckpt.Checkpoint:
        return jaxckpt.open(self.checkpoint(name), options=OPTIONS)


def of_checkpoint(function: Callable[..., Any]) -> Callable[[Place], Call]:
    return lambda at: functools.partial(function, at.checkpoint(function.__name__), options=OPTIONS)


def of_run(method: str, *arguments: Any) -> Callable[[Place], Call]:
    return lambda at: functools.partial(
        getattr(jaxckpt.Run(at.run(f"Run.{method}"), options=OPTIONS), method), *arguments
    )


def conversion_to(suffix: str) -> Callable[[Place], Call]:
    def prepare(at: Place) -> Call:
        source = at.checkpoint(f"source of converted{suffix.replace('.', '-')}")
        return functools.partial(jaxckpt.convert, source, at.path(f"converted{suffix}"), options=OPTIONS)

    return prepare


def method(name: str, *arguments: Any, **settings: Any) -> Callable[[Place], Call]:
    """A method of a Checkpointer."""
    return lambda at: functools.partial(getattr(at.checkpointer(f"Checkpointer.{name}", **settings), name), *arguments)


def save_of_a_step(at: Place) -> Call:
    run = at.checkpointer("Checkpointer.save")
    return lambda: (run.save(3, TREE, metrics={"loss": 1.0}), run.close())


def publication(at: Place) -> Call:
    publisher = jaxckpt.weights.Publisher(at.path("weights"), options=OPTIONS)
    return lambda: (publisher.publish(1, {"w": jnp.arange(4.0)}), publisher.close())


def subscription(at: Place) -> Call:
    with jaxckpt.weights.Publisher(at.path("published")) as publisher:
        publisher.publish(1, {"w": jnp.arange(4.0)})
    return lambda: next(jaxckpt.weights.subscribe(at.path("published"), options=OPTIONS))


def removal_of_a_pin(at: Place) -> Call:
    jaxckpt.Run(at.run("unpin")).pin(1, "paper")
    return functools.partial(jaxckpt.Run(at.path("unpin"), options=OPTIONS).unpin, "paper")


def oneflow_file(at: Place) -> Call:
    path = at.path("oneflow")
    (path / "w").mkdir(parents=True)
    np.arange(2, dtype=np.float32).tofile(path / "w" / "out")
    (path / "w" / "meta").write_text("shape { dim: 2 } data_type: kFloat\n")
    return functools.partial(jaxckpt.formats.oneflow_ranks, {0: path})


def mindspore_file(at: Place) -> Call:
    path = at.path("rank.safetensors")
    jaxckpt.convert(at.checkpoint("rank"), path, select=["w"])
    return functools.partial(jaxckpt.formats.mindspore_ranks, {0: path})


def configuration(at: Place) -> Call:
    folder = at.path("llama")
    folder.mkdir()
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers vocab_size".split()
    config = {"model_type": "llama", "head_dim": 8, **dict.fromkeys(names, 2)}
    (folder / "config.json").write_text(json.dumps(config))
    return functools.partial(jaxckpt.rules.huggingface_rules, folder)


def command(name: str, *more: str) -> Callable[[Place], Call]:
    """A command of the command line. Of its other arguments, those that begin with "/" are below the folder."""

    def prepare(at: Place) -> Call:
        where = str((at.run if name in ("pin", "unpin", "fork") else at.checkpoint)(f"cli-{name}"))
        if name == "unpin":
            jaxckpt.Run(where).pin(1, "paper")
            where += "@paper"
        others = [f"{at.top}{other}" if other.startswith("/") else other for other in more]
        return functools.partial(command_line, [name, where, *others])

    return prepare


SAVE = functools.partial(jaxckpt.save, tree=TREE, options=OPTIONS)

CALLS: dict[str, Callable[[Place], Call]] = {
    "save": lambda at: functools.partial(SAVE, at.path("save")),
    "save(overwrite=True)": lambda at: functools.partial(SAVE, at.checkpoint("overwritten"), overwrite=True),
    "save_async": lambda at: lambda: jaxckpt.save_async(at.path("save_async"), TREE, options=OPTIONS).wait(),
    "restore": of_checkpoint(jaxckpt.restore),
    "load_numpy": of_checkpoint(jaxckpt.load_numpy),
    "load_numpy of files": lambda at: functools.partial(
        jaxckpt.load_numpy, jaxckpt.formats.rank_files({0: at.rank_file("loaded.npz")}), options=OPTIONS
    ),
    "open": of_checkpoint(jaxckpt.open),
    "verify": of_checkpoint(jaxckpt.verify),
    "report": of_checkpoint(jaxckpt.report),
    "diff": lambda at: functools.partial(jaxckpt.diff, at.checkpoint("a"), at.checkpoint("b"), options=OPTIONS),
    "convert": conversion_to(""),
    "convert to .npz": conversion_to(".npz"),
    "convert to .safetensors": conversion_to(".safetensors"),
    "convert to .zarr": conversion_to(".zarr"),
    "convert of files": lambda at: functools.partial(
        jaxckpt.convert,
        jaxckpt.formats.rank_files({0: at.rank_file("in.npz")}),
        at.path("converted files"),
        options=OPTIONS,
    ),
    "Run.steps": of_run("steps"),
    "Run.latest_step": of_run("latest_step"),
    "Run.best_step": of_run("best_step", "loss", "min"),
    "Run.metadata": of_run("metadata"),
    "Run.incidents": of_run("incidents"),
    "Run.metrics": of_run("metrics", 1),
    "Run.add_metrics": of_run("add_metrics", 1, {"accuracy": 0.5}),
    "Run.path": of_run("path", "latest"),
    "Run.pins": of_run("pins"),
    "Run.open": of_run("open", 1),
    "Run.restore": of_run("restore", 1),
    "Run.follow": lambda at: functools.partial(next, jaxckpt.Run(at.run("follow"), options=OPTIONS).follow()),
    "Step.restore": lambda at: next(jaxckpt.Run(at.run("step"), options=OPTIONS).follow()).restore,
    "Run.pin": of_run("pin", 1, "paper"),
    "Run.unpin": removal_of_a_pin,
    "Run.fork": lambda at: functools.partial(jaxckpt.Run(at.run("fork"), options=OPTIONS).fork, at.path("forked")),
    "rank_files": lambda at: functools.partial(jaxckpt.formats.rank_files, {0: at.rank_file("rank.npz")}),
    "npz_file": lambda at: functools.partial(jaxckpt.formats.npz_file, at.rank_file("file.npz"), dtype="int4"),
    "mindspore_ranks": mindspore_file,
    "oneflow_ranks": oneflow_file,
    "huggingface_rules": configuration,
    "LazyLeaf": lambda at: functools.partial(operator.getitem, at.opened("leaf")["w"], slice(5)),
    "LazyLeaf.slabs": lambda at: functools.partial(lambda leaf: list(leaf.slabs()), at.opened("slabs")["w"]),
    "LazyLeaf.value": lambda at: functools.partial(operator.attrgetter("value"), at.opened("value")["w"]),
    "Checkpoint.process_states": lambda at: functools.partial(operator.attrgetter("process_states"), at.opened("all")),
    "Checkpoint.restore": lambda at: jaxckpt.open(at.checkpoint("opened"), options=OPTIONS).restore,
    "Checkpoint.hold": lambda at: functools.partial(
        contextlib.ExitStack().enter_context, jaxckpt.open(f"{at.run('held')}@1", options=OPTIONS).hold()
    ),
    "Publisher": lambda at: functools.partial(jaxckpt.weights.Publisher, at.path("Publisher"), options=OPTIONS),
    "Publisher.publish": publication,
    "subscribe": subscription,
    "Checkpointer": lambda at: functools.partial(
        jaxckpt.Checkpointer, at.run("Checkpointer", 2), options=OPTIONS, on_preemption="ignore", keep_last=1
    ),
    "Checkpointer.save": save_of_a_step,
    "Checkpointer.should_save": method("should_save", 3),
    "Checkpointer.restore": method("restore"),
    "Checkpointer.restore_or_init": method("restore_or_init", lambda: TREE),
    "Checkpointer.delete": method("delete", 1),
    "Checkpointer.steps": method("steps"),
    "Checkpointer.latest_step": method("latest_step"),
    "Checkpointer.best_step": method("best_step", keep_best=("loss", "min")),
    "Checkpointer.process_state": method("process_state", "seed"),
    "jaxckpt ls": command("ls"),
    "jaxckpt show": command("show"),
    "jaxckpt cat": command("cat", "n"),
    "jaxckpt verify": command("verify"),
    "jaxckpt plan": command("plan", "--mesh", "data=2"),
    "jaxckpt report": command("report", "-o", "/report.html"),
    "jaxckpt diff": command("diff", "/cli-diff"),
    "jaxckpt convert": command("convert", "/cli.npz"),
    "jaxckpt rm": command("rm", "--yes"),
    "jaxckpt pin": command("pin", "--name", "paper"),
    "jaxckpt unpin": command("unpin"),
    "jaxckpt fork": command("fork", "/cli-forked"),
    "jaxckpt repair": command("repair"),
}
"""For each public call, a function that prepares it."""


def command_line(arguments: list[str]) -> None:
    code = main.main(arguments, standalone_mode=False)
    if code:
        assert code == 5, f"exit code {code}"
        raise jaxckpt.errors.StorageError(0, "hangs, or is not connected: exit code 5")


def public_calls() -> set[str]:
    """The names of all public functions and methods."""
    found = {name for name in jaxckpt.__all__ if inspect.isfunction(getattr(jaxckpt, name))}
    for module in (jaxckpt.formats, jaxckpt.rules, jaxckpt.weights):
        found |= {
            name
            for name, value in vars(module).items()
            if name[0] != "_"
            and inspect.isfunction(value)
            and value.__module__.startswith((module.__name__, "jaxckpt._formats"))
        }
    for owner in (jaxckpt.Checkpoint, jaxckpt.Checkpointer, jaxckpt.Run, jaxckpt.weights.Publisher, jaxckpt.Step):
        public = [name for name, value in vars(owner).items() if name[0] != "_" and inspect.isfunction(value)]
        found |= {f"{owner.__name__}.{name}" for name in public}
    return found | {f"jaxckpt {name}" for name in main.commands}


def make(calls: dict[str, Call]) -> dict[str, tuple[str, float, str]]:
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
    if len(ended) < len(calls):
        faulthandler.dump_traceback(all_threads=True)
    return {name: ended.get(name, ("hangs", 0.0, "")) for name in calls}


def prepared(top: Path) -> dict[str, Call]:
    top.mkdir()
    return {name: prepare(Place(top)) for name, prepare in CALLS.items()}


def strike(folder: Path, name: str, number: int) -> tuple[str, float, str]:
    """Make a call, during which the daemon of a mount is killed when it reads its `number`th request."""
    (folder / "source").mkdir(parents=True)
    with mounts.bindfs(folder / "source", folder / "mount") as mount:
        call = CALLS[name](Place(mount.path))
        fault = ["-e", "trace=read", "-e", f"inject=read:signal=KILL:when={number}", "-p", str(mount.daemon.pid)]
        with subprocess.Popen(["strace", "-qq", "-o", os.devnull, *fault]) as strace:
            status = Path(f"/proc/{mount.daemon.pid}/status")
            while mount.daemon.poll() is None and strace.poll() is None and "TracerPid:\t0\n" in status.read_text():
                time.sleep(0.005)
            (outcome,) = make({name: call}).values()
            strace.kill()
    return outcome


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    constructor: Any = inspect.unwrap(jaxckpt.Options.__init__)
    constructor.__kwdefaults__["timeout_seconds"] = SECONDS  # for calls that take no options
    object.__setattr__(_options.DEFAULT_OPTIONS, "timeout_seconds", SECONDS)
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "strike":
        cases = [(name, number) for number in map(int, sys.argv[3:]) for name in CALLS]
        print("\n", json.dumps([(*case, *strike(folder / str(place), *case)) for place, case in enumerate(cases)]))
        sys.exit()
    daemon = int(sys.argv[3])
    rounds = [prepared(folder / name) for name in ("first", "second")[: 2 if what == "stop" else 1]]
    os.kill(daemon, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    outcomes = [make(rounds[0])]
    if what == "stop":
        os.kill(daemon, signal.SIGCONT)
        outcomes.append(make(rounds[1]))
        # The program must also be able to end.
        slow = jaxckpt.Options(timeout_seconds=SECONDS, object_bytes=4096, chunk_bytes=4096, max_bytes_per_second=4096)
        pending = jaxckpt.save_async(folder / "at exit", TREE, options=slow)
        while not pending.progress.done_bytes:
            time.sleep(0.01)
        time.sleep(0.3)  # until it waits for a second to pass: Linux ends no process whose request the daemon holds
        os.kill(daemon, signal.SIGSTOP)
    print("\n", json.dumps(outcomes))
