"""Saves and restores in two processes, with all cases in one job: each process prints {case: lines} as JSON.

Each case has its own folder and ends with both processes in step.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id
from sharded_tree import check, make, mesh_of, put, value

import jaxckpt
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._pipeline.control import Cancellation
from jaxckpt._save import write
from jaxckpt._store.files import FileReader, FileWriter

OPTIONS = jaxckpt.Options(timeout_seconds=60)
broadcast = Rendezvous.broadcast
mesh = mesh_of(2, 2)
lines: list[Any] = []
CASES: dict[str, Callable[[str], None]] = {}


def case(run: Callable[[str], None]) -> Callable[[str], None]:
    CASES[run.__name__] = run
    return run


def attempt(call: Callable[[], Any]) -> None:
    try:
        call()
        lines.append("fine")
    except (jaxckpt.JaxckptError, TypeError) as error:
        lines.append(f"{type(error).__name__}: {error}".replace("\n", " "))


def rows(step: int) -> jax.Array:
    return put(np.full((8, 8), step, np.float32), mesh, P("data"))


# Which process writes what ----------------------------------------------------------------------------------


@case
def storage_mesh_of_the_first_process(folder: str) -> None:
    first = mesh_of(2, 1, devices=jax.devices()[:2])
    specs = lambda path, leaf: P("data") if leaf.ndim == 2 else P()  # noqa: E731
    info = jaxckpt.save(f"{folder}/c", make(mesh), mesh=first, specs=specs)
    restored = jaxckpt.restore(f"{folder}/c", mesh=mesh)
    check(restored)
    assert restored["both"].sharding == NamedSharding(mesh, P("data"))
    lines.append({"total": info.total_bytes, "each": info.process_bytes})


@case
def a_leaf_of_one_process(folder: str) -> None:
    whole, second = value("alone", (256, 256)), mesh_of(1, 2, devices=jax.devices()[2:])
    tree = {"alone": put(whole, second, P(None, "model")), "rows": make(mesh)["rows"]}
    info = jaxckpt.save(f"{folder}/c", tree)
    for restored in (jaxckpt.restore(f"{folder}/c"), jaxckpt.restore(f"{folder}/c", mesh=mesh)):
        assert restored["alone"].shape == whole.shape
        assert restored["rows"].sharding == tree["rows"].sharding
        for shard in restored["alone"].addressable_shards:
            assert np.array_equal(shard.data, whole[shard.index])
    assert len(restored["alone"].addressable_shards) == 2
    lines.append(info.process_bytes)


@case
def a_replicated_count_of_one_process(folder: str) -> None:
    second = mesh_of(1, 2, devices=jax.devices()[2:])
    stage, count = put(np.array(7, np.int32), second, P()), np.array(3, np.int32)
    attempt(lambda: jaxckpt.save(f"{folder}/c", {"stage": stage, "all": put(count, mesh, P())}, options=OPTIONS))
    differs = {"stage": stage, "all": put(np.array(process_id, np.int32), mesh, P())}
    attempt(lambda: jaxckpt.save(f"{folder}/c", differs, overwrite=True))


# A process that fails ---------------------------------------------------------------------------------------


@case
def a_path_that_is_not_shared(folder: str) -> None:
    before = Path.cwd()
    os.mkdir(f"{folder}/of-process-{process_id}")
    os.chdir(f"{folder}/of-process-{process_id}")
    attempt(lambda: jaxckpt.save("c", make(mesh)))
    os.chdir(before)


@case
def one_cannot_save(folder: str) -> None:
    path, options = f"{folder}/c", OPTIONS
    jaxckpt.save(path, make(mesh))

    def attempt_save(tree: Any) -> None:
        attempt(lambda: jaxckpt.save(path, tree, overwrite=True, options=options))
        check(jaxckpt.restore(path))

    spoilt, other = make(mesh), make(mesh)
    if process_id == 1:
        spoilt["both"].delete()
        other["host"] = other["host"][:3]
    attempt_save(spoilt)
    attempt_save(other)

    def refuse(*_: Any) -> None:
        raise jaxckpt.errors.StorageError(errno.ENOSPC, "no space left on device")

    write = FileWriter.write
    if process_id == 1:
        FileWriter.write = refuse  # type: ignore[method-assign]
    attempt_save(make(mesh))
    FileWriter.write = write  # type: ignore[method-assign]
    attempt_save(make(mesh))
    assert len([name for name in os.listdir(path) if name.startswith("data-")]) == 1


@case
def one_cannot_restore(folder: str) -> None:
    path, options = f"{folder}/c", OPTIONS
    jaxckpt.save(path, make(mesh))

    def fail(*_: Any) -> None:
        raise jaxckpt.errors.DataError("this disk is bad")

    read = FileReader.read
    if process_id == 1:
        FileReader.read = fail  # type: ignore[method-assign]
    attempt(lambda: jaxckpt.restore(path, options=options))
    FileReader.read = read  # type: ignore[method-assign]
    attempt(lambda: jaxckpt.save(path, make(mesh), options=options))
    attempt(lambda: jaxckpt.restore(f"{folder}/nothing", options=options))
    attempt(lambda: jaxckpt.restore(path if process_id else f"{folder}/nothing", options=options))
    attempt(lambda: check(jaxckpt.restore(path)))


@case
def a_bad_argument_in_one(folder: str) -> None:
    for attempts in range(2):
        path = "" if (process_id, attempts) == (1, 0) else f"{folder}/c"
        options = OPTIONS
        attempt(lambda: jaxckpt.save(path, make(mesh), overwrite=True, options=options))  # noqa: B023


@case
def bad_arguments_of_a_checkpointer(folder: str) -> None:
    with jaxckpt.Checkpointer(folder, options=OPTIONS) as steps:
        bad: Any = {"loss": "low"} if process_id == 1 else {"loss": 0.5}
        metadata: Any = {1: 2} if process_id else None
        attempt(lambda: steps.save(0, {"w": rows(0)}, metrics=bad) and steps.wait())
        attempt(lambda: steps.save(1, {"w": rows(1)}, metrics={"loss": 0.5}) and steps.wait())
        attempt(lambda: steps.save(2, {"w": rows(2)}, metadata=metadata) and steps.wait())
        attempt(lambda: steps.save(2, {"w": rows(2)}, metrics={"loss": 0.5}) and steps.wait())
        attempt(lambda: steps.restore(7 if process_id else 1))
        attempt(lambda: steps.restore(2))
        attempt(lambda: steps.process_state("data" if process_id else 3))  # type: ignore[arg-type]
        lines.append([steps.steps(), steps.metrics(1)])


@case
def an_init_that_fails_in_one(folder: str) -> None:
    def init() -> dict[str, jax.Array]:
        if process_id == 1 and not lines:
            raise TypeError("no initial state")
        return {"w": rows(0)}

    with jaxckpt.Checkpointer(folder, options=OPTIONS) as steps:
        steps.save(0, {"w": rows(0)})
        for _ in range(2):
            attempt(lambda: steps.restore_or_init(init))


@case
def ctrl_c_while_the_other_is_missing(folder: str) -> None:
    raised = Path(folder, "raised")
    if process_id == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        deadline = time.monotonic() + 30
        while not raised.exists():  # process 0 is interrupted before this process calls save
            assert time.monotonic() < deadline, "process 0 waits for this process although it was interrupted"
            time.sleep(0.05)
    try:
        jaxckpt.save(f"{folder}/c", {"w": rows(0)}, options=jaxckpt.Options(timeout_seconds=60))
    except KeyboardInterrupt:
        raised.touch()
        lines.append("interrupted")
    except jaxckpt.errors.PeerFailedError as error:
        lines.append(str(error))
    attempt(lambda: jaxckpt.save(f"{folder}/c", {"w": rows(0)}, options=OPTIONS))


def interrupt_broadcast(what: str) -> None:
    """Interrupt this process once, when it waits for the answer of process 0 in a rendezvous."""
    cancelled, cancel = threading.Event(), Cancellation.cancel

    def interrupted(rendezvous: Rendezvous, text: str) -> str:
        if rendezvous.what.startswith(what):
            Rendezvous.broadcast = broadcast  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGINT)
            assert cancelled.wait(30)  # in the thread that writes
        return broadcast(rendezvous, text)

    def note_cancel(cancellation: Cancellation, error: BaseException) -> None:
        Cancellation.cancel = cancel  # type: ignore[method-assign]
        cancel(cancellation, error)
        cancelled.set()

    Rendezvous.broadcast = interrupted  # type: ignore[method-assign]
    Cancellation.cancel = note_cancel  # type: ignore[method-assign]


def attempt_interrupted(call: Callable[[], Any]) -> None:
    try:
        attempt(call)
    except KeyboardInterrupt as error:
        lines.append(" ".join(["interrupted", *getattr(error, "__notes__", [])]))


@case
def ctrl_c_after_the_share_was_sent(folder: str) -> None:
    write = FileWriter.write

    def late(*arguments: Any, **named: Any) -> Any:
        time.sleep(3)
        return write(*arguments, **named)

    if process_id == 0:
        FileWriter.write = late  # type: ignore[method-assign]
    else:
        interrupt_broadcast("saving")
    attempt_interrupted(lambda: jaxckpt.save(f"{folder}/c", {"w": rows(0)}, options=OPTIONS))
    FileWriter.write = write  # type: ignore[method-assign]
    attempt(lambda: jaxckpt.save(f"{folder}/d", {"w": rows(0)}, options=OPTIONS))


def ctrl_c_after_the_first_text(what: str, call: Callable[[], Any]) -> None:
    if process_id == 1:
        interrupt_broadcast(what)
    begun = time.monotonic()
    attempt_interrupted(call)
    lines.append(time.monotonic() - begun)
    attempt(call)


@case
def ctrl_c_after_the_first_text_of_a_save(folder: str) -> None:
    tree = {"w": rows(0)}
    ctrl_c_after_the_first_text("preparing", lambda: jaxckpt.save(f"{folder}/c", tree, overwrite=True, options=OPTIONS))


@case
def ctrl_c_after_the_first_text_of_a_restore(folder: str) -> None:
    jaxckpt.save(f"{folder}/c", {"w": rows(0)}, options=OPTIONS)
    ctrl_c_after_the_first_text("opening", lambda: jaxckpt.restore(f"{folder}/c", mesh=mesh, options=OPTIONS))


@case
def one_stages_for_longer_than_the_timeout(folder: str) -> None:
    stage = write.stage

    def late(*arguments: Any, **named: Any) -> Iterator[Any]:
        time.sleep(5 * (process_id == 0))  # as if a leaf were still being computed
        yield from stage(*arguments, **named)

    write.stage = late  # type: ignore[assignment]
    attempt(lambda: jaxckpt.save(f"{folder}/c", {"w": rows(0)}, options=jaxckpt.Options(timeout_seconds=2)))
    write.stage = stage  # type: ignore[assignment]


@case
def all_are_suspended_together(folder: str) -> None:
    """As when the nodes of a job are paused for longer than the timeout."""
    options = jaxckpt.Options(timeout_seconds=2, max_bytes_per_second=64)
    pending = jaxckpt.save_async(f"{folder}/c", {"w": rows(0)}, options=options)
    Path(folder, f"saves-{process_id}").touch()
    while not Path(folder, f"saves-{1 - process_id}").exists():
        time.sleep(0.01)
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    attempt(pending.wait)


# Processes out of step --------------------------------------------------------------------------------------


def skip_a_step(path: str, name: str, of_step: Callable[[int], Any]) -> None:
    """Process 1 skips step 1; without a check, a save would mix its shards of step 2 with process 0's of step 1."""
    for step in range(4):
        if (process_id, step) not in ((1, 1), (0, 3)):
            tree = {"w": rows(step), name: of_step(step)}
            attempt(lambda: jaxckpt.save(path, tree, overwrite=True, options=OPTIONS))  # noqa: B023


@case
def a_missed_call_and_a_number(folder: str) -> None:
    skip_a_step(f"{folder}/c", "step", lambda step: step)


@case
def a_missed_call_and_a_string(folder: str) -> None:
    skip_a_step(f"{folder}/c", "name", lambda step: f"step {step}")


@case
def different_calls(folder: str) -> None:
    path = f"{folder}/c"
    attempt(lambda: jaxckpt.save(path, {"w": rows(0)}, options=OPTIONS))
    if process_id == 0:
        attempt(lambda: jaxckpt.restore(path, options=OPTIONS))
    else:
        attempt(lambda: jaxckpt.save(path, {"w": rows(1)}, overwrite=True, options=OPTIONS))
    with jaxckpt.Checkpointer(f"{folder}/steps", options=OPTIONS) as steps:
        attempt(lambda: steps.save(3 + process_id, {"w": rows(3)}) and steps.wait())
        attempt(lambda: steps.save(5, {"w": rows(5)}) and steps.wait())


@case
def arguments_that_differ(folder: str) -> None:
    other_options = jaxckpt.Options(timeout_seconds=60, chunk_bytes=(1 + process_id) << 6)
    for name, arguments in {
        "options": {"options": other_options},
        "metadata": {"options": OPTIONS, "metadata": {"run": process_id}},
        "names": {"options": OPTIONS, "process_state": {f"at{process_id}": 1}},
        "specs": {"options": OPTIONS, "mesh": mesh, "specs": P("data", "model") if process_id else P("data")},
    }.items():
        named: Any = arguments
        path = f"{folder}/{name}"
        attempt(lambda: jaxckpt.save(path, {"w": rows(0)}, **named))  # noqa: B023
        attempt(lambda: jaxckpt.save(path, {"w": rows(0)}, options=OPTIONS))  # noqa: B023


@case
def trees_that_differ(folder: str) -> None:
    for name, trees in {
        "containers": ({"x": [1, 2]}, {"x": (1, 2)}),
        "empty": ({"x": 1}, {"x": 1, "y": {}}),
        "keys": ({"x": {1: 1}}, {"x": {"1": 1}}),
        "long": ({"x": "a" * 9000}, {"x": "b" * 9000}),
    }.items():
        attempt(lambda: jaxckpt.save(f"{folder}/{name}", trees[process_id], options=OPTIONS))  # noqa: B023
    metadata = {"b": 1, "a": 2} if process_id else {"a": 2, "b": 1}
    attempt(lambda: jaxckpt.save(f"{folder}/order", {"x": 1}, metadata=metadata))


# At program exit: this must be the last case ------------------------------------------------------------------


@case
def an_exchange_after_the_main_thread(folder: str) -> None:
    tree = {"w": rows(0)}
    jax.block_until_ready(tree)

    def last() -> None:
        threading.main_thread().join()
        lines.clear()
        try:
            attempt(lambda: jaxckpt.save_async(f"{folder}/c", tree, mesh=mesh, specs=P(None, "data"), options=OPTIONS))
        except RuntimeError as error:
            lines.append(f"RuntimeError: {error}")
        print(json.dumps({"after the main thread": lines}), flush=True)

    threading.Thread(target=last).start()


for name in CASES:
    os.makedirs(f"{args}/{name}", exist_ok=True)
    lines.clear()
    CASES[name](f"{args}/{name}")
    print(json.dumps({name: lines}), flush=True)
