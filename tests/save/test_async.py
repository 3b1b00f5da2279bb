"""save_async: failures are reported once and never lost; a second save waits or is skipped."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PROGRAMS, Finished, RunProcesses, RunPython, environment, finish

import jaxckpt
from jaxckpt._job.call import Call
from jaxckpt._pipeline import workers
from jaxckpt._save import running_saves as _background
from jaxckpt._save import shared_path as _shared_path
from jaxckpt._save.describe import Draft
from jaxckpt._save.request import PlanCache, SaveRequest
from jaxckpt._save.save import prepare
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._save.write import OwnShare
from jaxckpt._store.files import FileWriter

TREE = {"a": np.arange(1000.0), "b": np.ones(10)}


class Gate:
    """Blocks every write until it is opened, or makes it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.error: Exception | None = None
        write = FileWriter.write

        def wait(*arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
            return write(*arguments)

        monkeypatch.setattr(FileWriter, "write", wait)

    def signal_once_held(self, number: int) -> None:
        """Send a signal to the main thread when a write is blocked."""
        main = threading.main_thread().ident
        assert main is not None

        def send() -> None:
            if self.reached.wait(60):
                signal.pthread_kill(main, number)

        self.reached.clear()
        threading.Thread(target=send).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()
    for pending in _background.unreported_saves():
        pending.join()
        pending.abandon()


def failing(gate: Gate, path: Path) -> jaxckpt.PendingSave:
    """A background save that has failed; its error is not yet reported."""
    gate.error = jaxckpt.errors.StorageError(28, "no space")
    gate.opened.set()
    pending = jaxckpt.save_async(path, TREE)
    assert pending._save._ended.wait(60)
    gate.error = None
    return pending


def test_it_returns_before_data_is_written_and_reports_progress(tmp_path: Path, gate: Gate) -> None:
    pending = jaxckpt.save_async(tmp_path / "c", TREE, metadata={"run": 1})
    assert not pending.done
    assert pending.progress.done_bytes == 0
    assert pending.progress.total_bytes == 8080
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s: save: 0 B of 7\.9 KiB"):
        pending.wait(0.01)
    for wrong in ("1", float("nan"), True):
        with pytest.raises(jaxckpt.errors.InputError, match="timeout_seconds must be a number of seconds or None"):
            pending.wait(wrong)  # pyright: ignore[reportArgumentType]
    assert "in progress" in repr(pending)
    gate.opened.set()
    info = pending.wait(60)
    assert pending.done
    assert pending.progress.done_bytes == 8080
    assert info.total_bytes == 8080
    assert 0 < info.blocked_seconds < info.seconds
    assert set(info.phase_seconds) == {"plan", "device_to_host", "write", "sync", "barrier", "publish"}
    assert sum(info.phase_seconds.values()) <= info.seconds * 1.05
    assert pending.wait() == info
    assert jaxckpt.open(tmp_path / "c").metadata == {"run": 1}


@pytest.mark.one_device
def test_invalid_arguments_are_reported_immediately(tmp_path: Path) -> None:
    deleted = jnp.ones(3)
    deleted.delete()
    for tree, kind in (({"x": deleted}, jaxckpt.errors.TreeError), ({"x": object()}, jaxckpt.errors.TreeError)):
        with pytest.raises(kind):
            jaxckpt.save_async(tmp_path / "c", tree)
    with pytest.raises(jaxckpt.errors.InputError, match="metadata"):
        jaxckpt.save_async(tmp_path / "c", TREE, metadata={1: 2})
    with pytest.raises(jaxckpt.errors.InputError, match="process_state"):
        jaxckpt.save_async(tmp_path / "c", TREE, process_state={"x": float("nan")})
    with pytest.raises(jaxckpt.errors.TreeError, match="tracer"):
        jax.jit(lambda x: jaxckpt.save_async(tmp_path / "c", {"x": x}))(1.0)
    assert not (tmp_path / "c").exists()


def test_a_failure_is_raised_by_wait_each_time(tmp_path: Path, gate: Gate) -> None:
    pending = failing(gate, tmp_path / "c")
    for _ in range(2):
        with pytest.raises(jaxckpt.errors.StorageError, match="no space"):
            pending.wait()
    assert "failed" in repr(pending)
    jaxckpt.save(tmp_path / "c", TREE)  # the error was reported and is not raised again
    assert [path.name for path in tmp_path.glob("c/data-*")] == [f"data-{jaxckpt.open(tmp_path / 'c').save_id}"]


@pytest.mark.parametrize("save", [jaxckpt.save, jaxckpt.save_async])
def test_a_failure_is_raised_by_the_next_save_of_the_path_and_no_other(
    tmp_path: Path, gate: Gate, save: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing(gate, tmp_path / "c")
    save(tmp_path / "d", TREE)
    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, TREE)
    jax.tree.map(np.testing.assert_array_equal, jaxckpt.restore(tmp_path / "run"), TREE)
    assert f"the save_async to {tmp_path / 'c'} failed" in caplog.text, "logged at once"
    with pytest.raises(jaxckpt.errors.StorageError, match="no space") as message:
        save(tmp_path / "c", TREE)
    assert str(tmp_path / "c") in message.value.__notes__[0]
    assert not (tmp_path / "c").exists()
    jaxckpt.save_async(tmp_path / "c", TREE).wait()
    jaxckpt.load_numpy(tmp_path / "d")


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: Gate) -> None:
    first = jaxckpt.save_async(tmp_path / "c", TREE)
    threading.Timer(0.2, gate.opened.set).start()
    second = jaxckpt.save_async(tmp_path / "d", TREE)
    assert first.done
    second.wait()
    assert first.wait().seconds > 0.15


def test_a_second_save_may_be_skipped(tmp_path: Path, gate: Gate) -> None:
    options = jaxckpt.Options(when_busy="skip")
    first = jaxckpt.save_async(tmp_path / "c", TREE, options=options)
    second = jaxckpt.save_async(tmp_path / "d", TREE, options=options)
    assert (first.skipped, second.skipped, second.done) == (False, True, True)
    with pytest.raises(jaxckpt.errors.InputError, match="skipped"):
        second.wait()
    gate.opened.set()
    first.wait()
    assert not (tmp_path / "d").exists()
    third = jaxckpt.save_async(tmp_path / "d", TREE, options=options)
    assert not third.skipped
    third.wait()


def test_a_save_that_fails_while_the_caller_waits_for_room(tmp_path: Path, gate: Gate) -> None:
    gate.error = jaxckpt.errors.StorageError(28, "no space")
    gate.opened.set()
    options = jaxckpt.Options(staging_bytes=1 << 20)
    pending = jaxckpt.save_async(tmp_path / "c", {str(n): np.zeros(1 << 19) for n in range(4)}, options=options)
    with pytest.raises(jaxckpt.errors.StorageError, match="no space"):
        pending.wait(60)
    assert list(tmp_path.glob("c/*")) == []


def test_metadata_may_be_changed_right_after(tmp_path: Path, gate: Gate) -> None:
    metadata = {"run": {"tokens": 1}}
    pending = jaxckpt.save_async(tmp_path / "c", TREE, metadata=metadata)
    metadata["run"]["tokens"] = 2
    gate.opened.set()
    pending.wait()
    assert jaxckpt.open(tmp_path / "c").metadata == {"run": {"tokens": 1}}


def test_no_thread_can_be_started(tmp_path: Path, run_python: RunPython) -> None:
    program = """
import sys, _thread
import numpy as np, jaxckpt
start = _thread.start_new_thread
def refuse(*_):
    raise RuntimeError("can't start new thread")
_thread.start_new_thread = refuse
try:
    jaxckpt.save_async(sys.argv[1], {"x": np.zeros(3)})
except RuntimeError as error:
    print(error)
_thread.start_new_thread = start
jaxckpt.save_async(sys.argv[1], {"x": np.zeros(3)})
"""
    assert run_python(program, args=[str(tmp_path / "c")], timeout=60) == "can't start new thread\n"
    assert "x" in jaxckpt.load_numpy(tmp_path / "c")


def at_exit(program: str, path: Path) -> Finished:
    begin = """
import atexit, numpy as np, jaxckpt
from jaxckpt._save.write import OwnShare
from jaxckpt._store.files import FileWriter
atexit.register(print, "theirs")
"""
    return finish(begin + program, path)


@pytest.mark.child
def test_an_unobserved_failure_is_reported_at_exit(tmp_path: Path) -> None:
    program = """
def fail(*_): raise jaxckpt.errors.StorageError(28, "no space")
FileWriter.write = fail
import sys
jaxckpt.save_async(sys.argv[1], {"x": np.zeros(3)})
"""
    done = at_exit(program, tmp_path / "c")
    assert done.returncode == 1
    assert "no space" in done.stderr
    assert "Traceback" in done.stderr
    assert f"the save_async to {tmp_path / 'c'} failed, and wait() was not called" in done.stderr
    assert done.stdout == "theirs\n"


@pytest.mark.child
@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('mine')"])
def test_a_running_save_is_finished_at_exit(tmp_path: Path, end: str) -> None:
    program = f"""
import sys, time
write = FileWriter.write
def slow(*arguments): time.sleep(0.5); return write(*arguments)
FileWriter.write = slow
jaxckpt.save_async(sys.argv[1], {{"x": np.arange(3)}})
{end}
"""
    done = at_exit(program, tmp_path / "c")
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1), done.stderr
    assert done.stdout == "theirs\n"
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "c")["x"], np.arange(3))


@pytest.mark.child
def test_a_fork_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    program = """
import os, sys, time, signal
write = FileWriter.write
def slow(*arguments): time.sleep(1); return write(*arguments)
FileWriter.write = slow
jaxckpt.save_async(sys.argv[1], {"x": np.arange(3)})
child = os.fork()
if child:
    for _ in range(200):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        sys.exit("the child hangs")
"""
    done = at_exit(program, tmp_path / "c")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "c")["x"], np.arange(3))


@pytest.mark.child
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_saves_of_a_child_of_multiprocessing_are_finished(method: str, tmp_path: Path) -> None:
    """A child that was forked calls none of the functions of atexit."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import multiprocessing, sys, time
import numpy as np, jaxckpt
from jaxckpt._store.files import FileWriter

def train(path):
    write = FileWriter.write
    FileWriter.write = lambda *args: time.sleep(0.5) or write(*args)
    jaxckpt.save_async(path, {"x": np.arange(9)})

def fail(path):
    def refuse(*_):
        time.sleep(0.5)
        raise jaxckpt.errors.StorageError(28, "no space")

    FileWriter.write = refuse
    jaxckpt.save_async(path + "2", {"x": np.arange(9)})

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    codes = []
    for work, path in ((train, sys.argv[1]), (fail, sys.argv[1])):
        child = context.Process(target=work, args=(path,))
        child.start()
        child.join(60)
        codes.append(child.exitcode)
    print(codes)
"""
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(program), str(tmp_path / "c"), method]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[0, 1]\n", done.stderr
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "c")["x"], np.arange(9))


@pytest.mark.child
@pytest.mark.parametrize("stream", ["None", "open('/dev/full', 'w', buffering=1)", "closed"])
def test_a_lost_stderr_hides_no_failed_save_from_the_exit_status(stream: str, tmp_path: Path) -> None:
    program = f"""
import sys, time
import numpy as np, jaxckpt
from jaxckpt._store.files import FileWriter
write = FileWriter.write
def late(writer, *args):
    time.sleep(0.5)
    if "/bad/" in writer.folder: raise jaxckpt.errors.StorageError(28, "no space")
    return write(writer, *args)
FileWriter.write = late
{"sys.stderr.close()" if stream == "closed" else f"sys.stderr = sys.stdout = {stream}"}
jaxckpt.save_async(sys.argv[1] + "/bad", {{"x": np.arange(9)}}, options=jaxckpt.Options(progress=True))
jaxckpt.save_async(sys.argv[1] + "/good", {{"x": np.arange(9)}}, options=jaxckpt.Options(progress=True))
"""
    done = at_exit(program, tmp_path)
    assert done.returncode == 1
    assert jaxckpt.load_numpy(tmp_path / "good")["x"].shape == (9,)


def test_forks_neither_wait_for_their_parents_work_nor_undo_it(tmp_path: Path, run_python: RunPython) -> None:
    found = json.loads(run_python(PROGRAMS / "forked.py", args=[str(tmp_path)], timeout=180).splitlines()[-1])
    assert found["terminated"] == [-signal.SIGTERM, ""]
    assert found["close after the save"] == [0, ""]
    assert not found["ended"]
    assert found["held"] == [0, ""]
    assert found["leases"] == 1
    for name in ("wait", "close"):
        status, message = found[name]
        assert status == 1
        assert re.search(r"the save to .*2 runs in process \d+, from which this process was forked", message)
    assert found["exit"] == [5, ""]
    assert found["deleting"] == [0, ""]
    assert found["steps"] == [3]


# Several processes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def cases(run_processes: RunProcesses, folder: Path) -> dict[str, list[Any]]:
    """For each case of programs/background_saves.py, the lines of its two processes."""
    done = run_processes(PROGRAMS / "background_saves.py", processes=2, devices_per_process=2, args=str(folder))
    noted: dict[str, list[Any]] = {}
    for process in done:
        for line in process.stdout.splitlines():
            for name, lines in json.loads(line).items():
                noted.setdefault(name, []).append(lines)
    return noted


def test_steps_with_collectives_run_while_it_is_written(cases: dict[str, list[Any]], folder: Path) -> None:
    first, second = cases["steps_meanwhile"]
    assert first == second
    for number in range(1, 4):
        tree = jaxckpt.load_numpy(folder / "steps_meanwhile" / str(number))
        wanted = np.full((8, 8), 1 + 10 * (number - 1), np.float32)
        np.testing.assert_array_equal(tree["x"], wanted)
        np.testing.assert_array_equal(tree["y"], wanted)


def test_a_failure_in_one_process_is_raised_by_wait_in_all(cases: dict[str, list[Any]], folder: Path) -> None:
    (others,), (own,) = cases["one_fails"]
    assert others.startswith("PeerFailedError process 1 failed with StorageError: [Errno 28] no space")
    assert own.startswith("StorageError [Errno 28] no space")
    assert not (folder / "one_fails" / "c" / "manifest.json").exists()


def test_a_process_that_cannot_start_its_save_is_named_by_the_others(cases: dict[str, list[Any]], folder: Path) -> None:
    (others,), (own,) = cases["one_cannot_begin"]
    assert others.startswith("PeerFailedError process 1 failed with TreeError")
    assert own.startswith("TreeError")
    tree = jaxckpt.load_numpy(folder / "one_cannot_begin" / "c")
    np.testing.assert_array_equal(tree["x"], np.ones((8, 8), np.float32))


def test_a_failure_of_one_process_does_not_end_all_later_saves(cases: dict[str, list[Any]]) -> None:
    other, own = cases["one_cannot_begin_once"]
    published = ["0", "2", "3", "4"]
    assert other == ["fine", "PeerFailedError", "fine", "fine", "fine", published]
    assert own == ["TreeError", "fine", "fine", "fine", "fine", published]


def test_skipping_is_agreed_on(cases: dict[str, list[Any]], folder: Path) -> None:
    skipped, second = cases["skipping"]
    assert skipped == second
    assert True in skipped
    assert skipped.count(False) >= 2
    saved = sorted(int(path.name) for path in (folder / "skipping").iterdir())
    assert saved == [n for n, one in enumerate(skipped) if not one]


def test_if_process_0_fails_data_that_others_still_write_is_deleted(cases: dict[str, list[Any]], folder: Path) -> None:
    assert cases["process_0_fails_while_others_write"] == [["StorageError"] * 4, ["PeerFailedError"] * 4]
    # 4 attempts: save and save_async, with leaves in their own layout and exchanged
    assert list((folder / "process_0_fails_while_others_write").iterdir()) == []


def test_exchanged_leaves_of_other_devices_are_sent(cases: dict[str, list[Any]], folder: Path) -> None:
    tree = jaxckpt.load_numpy(folder / "exchanged_from_other_devices" / "c")
    np.testing.assert_array_equal(tree["x"], np.arange(64, dtype=np.float32).reshape(8, 8))


# The last tree is remembered --------------------------------------------------------------------------------


def similar() -> list[Any]:
    """Trees that differ from their predecessor in at most one property."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)

    def put(*spec: Any, dtype: Any = np.float32) -> jax.Array:
        return jax.device_put(x.astype(dtype), NamedSharding(mesh, P(*spec)))

    def split(*values: Any) -> Any:
        return dict(zip("pq", values, strict=True))

    return [
        split(put("a"), put("b")),
        split(put("a"), put("b")),
        split(put("b"), put("a")),
        split(put("a"), put("b", dtype=jnp.bfloat16)),
        split(put("a"), jnp.asarray(x)),
        split(put("a"), x),
        [put("a"), put("b")],
        (put("a"), put("b")),
        (put("a"), None, put("b")),
        {1: put("a"), 2: put("b")},
        {True: put("a"), 2: put("b")},
        {1.0: put("a"), 2: put("b")},
        {"p": put("a"), "q": {"r": put("b")}},
        {"p": put("a"), "q": {"r": put("b")}, "n": 1},
        {"p": put("a"), "q": {"r": put("b")}, "n": 2},
        {"k": jax.random.key(0)},
        {"k": jax.random.key(0, impl="rbg")},
    ]


def described(tree: Any, cache: PlanCache, subtrees: tuple[str, ...] = ()) -> Draft:
    options = jaxckpt.Options()
    destination = SharedPath.at("memory://described", options, overwrite=False)
    request = SaveRequest(destination, options, tree, subtrees=subtrees, plan_cache=cache)
    return prepare(request, Call.alone("save", "memory://described", options)).draft


def message(tree: Any, cache: PlanCache, subtrees: tuple[str, ...] = ()) -> str:
    draft = described(tree, cache, subtrees)
    values = {number: np.asarray(value).tobytes() for number, value in draft.values.items()}
    # repr, because 1, 1.0 and True are equal but not the same
    return repr((draft.structure, draft.records, draft.arrays, draft.table.layouts, draft.table.meshes, values))


@jax.tree_util.register_pytree_with_keys_class
class Bag:
    """A node whose auxiliary data (its list of names) can change in place."""

    def __init__(self, names: list[str], values: list[Any]) -> None:
        self.names, self.values = names, values

    def tree_flatten_with_keys(self) -> Any:
        pairs = zip(self.names, self.values, strict=True)
        return [(jax.tree_util.DictKey(name), value) for name, value in pairs], self.names

    @classmethod
    def tree_unflatten(cls, names: list[str], values: Any) -> Bag:
        return cls(names, list(values))


@pytest.mark.one_device
def test_a_node_that_changed_in_place_is_detected(tmp_path: Path) -> None:
    bag = Bag(["a", "b"], [jnp.zeros(2), jnp.ones(2)])
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"bag": bag})
        bag.names[0] = "z"
        checkpoints.save(1, {"bag": bag})
    assert list(jaxckpt.open(checkpoints.path(1))) == ["bag/z", "bag/b"]
    # A node that has not changed is still remembered.
    recent = PlanCache()
    assert message(bag, recent) == message(bag, recent)
    first, second = (described(bag, recent) for _ in range(2))
    assert first.records is second.records


def test_different_trees_are_distinguished() -> None:
    trees = similar()
    expected = [message(tree, PlanCache()) for tree in trees]
    recent = PlanCache()
    for numbers in (range(len(trees)), reversed(range(len(trees))), [0, 0, 2, 2, 0, 3, 3, 1, 9, 10, 11, 10, 9]):
        for number in numbers:
            assert message(trees[number], recent) == expected[number]
    assert message(trees[12], recent, ("q",)) == message(trees[12], PlanCache(), ("q",))
    assert message(trees[12], recent) == expected[12]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["model"])
@dataclasses.dataclass
class State:
    w: jax.Array
    model: Any


class Model:
    """A static field that cannot be compared, like a NumPy array."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = object.__hash__


@pytest.mark.one_device
def test_static_fields_need_not_compare(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        for step in range(2):
            checkpoints.save(step, State(jnp.full(3, step), Model()))
        assert checkpoints.restore(1)["w"].tolist() == [1, 1, 1]


@pytest.mark.one_device
def test_a_tree_is_not_kept_alive_after_its_save(tmp_path: Path) -> None:
    models = [Model(), Model()]
    gone = [weakref.ref(model) for model in models]
    jaxckpt.save(tmp_path / "one", State(jnp.ones(3), models[0]))
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(0, State(jnp.ones(3), models[1]))
    del models, checkpoints
    gc.collect()
    assert [model() for model in gone] == [None, None]


@pytest.mark.one_device
def test_a_checkpointer_plans_once_for_similar_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    made = _shared_path.plan_save

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return made(*arguments)

    monkeypatch.setattr(_shared_path, "plan_save", counted)
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        for step, (shape, plans) in enumerate([((16, 256), 1), ((16, 256), 1), ((8, 8), 2), ((8, 8), 2)]):
            tree = {"w": jax.device_put(jnp.full(shape, step, jnp.float32), jax.devices()[0])}
            checkpoints.save(step, tree)
            assert len(calls) == plans
            np.testing.assert_array_equal(checkpoints.restore(step)["w"], tree["w"])


# Calls at unusual moments ----------------------------------------------------------------------------------


@pytest.mark.child
@pytest.mark.parametrize("save", ["save", "save_async"])
@pytest.mark.parametrize("early", [False, True], ids=["imported first", "registered first"])
def test_a_save_from_an_exit_function(tmp_path: Path, save: str, early: bool) -> None:
    """The function is registered before or after the import of jaxckpt, and saves after a background save began."""
    program = f"""
import atexit, sys
def last():
    import jaxckpt
    import numpy as np
    for name in "cd":
        jaxckpt.{save}(sys.argv[1] + name, {{"x": np.arange(3)}})
    print("saved")
{"atexit.register(last)" if early else ""}
import jaxckpt, numpy as np
{"" if early else "atexit.register(last)"}
jaxckpt.save_async(sys.argv[1] + "before", {{"x": np.arange(3)}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program, f"{tmp_path}/"],
        env=environment(1), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
    for name in ("c", "d", "before"):
        np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / name)["x"], np.arange(3))


@pytest.mark.parametrize("save", [jaxckpt.save, lambda *a, **k: jaxckpt.save_async(*a, **k).wait(60)])
def test_a_save_from_inside_a_save(tmp_path: Path, save: Any) -> None:
    """A progress callback that saves would wait for itself."""

    def again(_: jaxckpt.types.Progress) -> None:
        jaxckpt.save(tmp_path / "inner", TREE)

    with pytest.raises(
        jaxckpt.errors.InputError, match=r"save of '.*inner' was called from inside save.* of '.*outer'"
    ):
        save(tmp_path / "outer", TREE, options=jaxckpt.Options(progress=again))
    jaxckpt.save(tmp_path / "outer", TREE)
    with pytest.raises(
        jaxckpt.errors.InputError, match=r"save of '.*inner' was called from inside restore of '.*outer'"
    ):
        jaxckpt.restore(tmp_path / "outer", options=jaxckpt.Options(progress=again))
    jaxckpt.restore(tmp_path / "outer")
    assert not (tmp_path / "inner").exists()


def test_a_signal_handler_that_saves_during_a_save(tmp_path: Path, gate: Gate) -> None:
    def handler(*_: Any) -> None:
        threading.Timer(0.1, gate.opened.set).start()  # so that the next line cannot hang
        jaxckpt.save(tmp_path / "inner", TREE)

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        gate.signal_once_held(signal.SIGUSR1)
        with pytest.raises(jaxckpt.errors.InputError, match=r"inside save of .*outer.*by a signal handler"):
            jaxckpt.save(tmp_path / "outer", TREE)
        # During a background save, a handler may save: it waits for the other save.
        gate.opened.clear()
        pending = jaxckpt.save_async(tmp_path / "background", TREE)
        signal.raise_signal(signal.SIGUSR1)
        assert pending.done
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert "a" in jaxckpt.load_numpy(tmp_path / "inner")


def test_a_blocking_save_that_is_interrupted_leaves_nothing(tmp_path: Path, gate: Gate) -> None:
    def handler(*_: Any) -> None:
        gate.opened.set()
        raise KeyboardInterrupt

    gate.opened.set()
    jaxckpt.save(tmp_path / "c", {"x": np.arange(3)})
    gate.opened.clear()
    previous = signal.signal(signal.SIGINT, handler)
    try:
        gate.signal_once_held(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            jaxckpt.save(tmp_path / "c", {"x": np.arange(4)}, overwrite=True)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert len(list(tmp_path.glob("c/data-*"))) == 1
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "c")["x"], np.arange(3))


def test_a_progress_callback_that_waits_for_its_own_save(tmp_path: Path, gate: Gate) -> None:
    made: list[jaxckpt.PendingSave] = []
    options = jaxckpt.Options(progress=lambda _: made[0].wait() and None)
    made.append(jaxckpt.save_async(tmp_path / "c", TREE, options=options))
    gate.opened.set()
    with pytest.raises(jaxckpt.errors.InputError, match="own callbacks makes the call"):
        made[0].wait(60)


def test_blocking_saves_of_two_threads_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)
    write = FileWriter.write

    def meet(*arguments: Any) -> Any:
        together.wait(30)
        return write(*arguments)

    monkeypatch.setattr(FileWriter, "write", meet)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: jaxckpt.save(tmp_path / name, {"x": np.arange(3)}), "cd", timeout=60))
    monkeypatch.undo()
    for name in "cd":
        np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / name)["x"], np.arange(3))


def test_an_interrupt_while_waiting_loses_neither_the_save_nor_its_error(tmp_path: Path, gate: Gate) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run", on_preemption="ignore") as checkpoints:
        gate.error = jaxckpt.errors.StorageError(28, "no space")
        checkpoints.save(1, TREE)
        assert gate.reached.wait(60)
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
        assert checkpoints.pending is not None
        gate.opened.set()
        with pytest.raises(jaxckpt.errors.StorageError, match="no space"):
            checkpoints.wait()
        assert checkpoints.pending is None


def test_the_rate_of_a_background_save_is_limited(tmp_path: Path) -> None:
    tree = {"w": np.zeros(1 << 20, np.uint8)}
    options = jaxckpt.Options(max_bytes_per_second=2 << 20, object_bytes=1 << 17, chunk_bytes=1 << 15)
    slow = jaxckpt.save_async(tmp_path / "slow", tree, options=options).wait()
    assert slow.objects == 8
    assert 0.5 <= slow.seconds < 30


def test_saves_of_one_object_are_limited_too(tmp_path: Path) -> None:
    options = jaxckpt.Options(max_bytes_per_second=4 << 20, reuse=None)
    began = time.monotonic()
    with jaxckpt.Checkpointer(tmp_path, options=options) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"w": np.full(1 << 20, step, np.uint8)})
    assert 1.0 <= time.monotonic() - began < 30


def test_an_interrupt_ends_the_wait_for_the_rate(tmp_path: Path) -> None:
    options = jaxckpt.Options(max_bytes_per_second=1)
    pending = jaxckpt.save_async(tmp_path / "c", TREE, options=options)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert not pending.done
    _background.lift_limits()
    assert pending.wait(60).total_bytes


@pytest.mark.parametrize("rate", [0, -1, True, "fast"])
def test_a_rate_is_a_number_above_zero(rate: Any) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=r"max_bytes_per_second must be a number above zero or None"):
        jaxckpt.Options(max_bytes_per_second=rate)


# A callback at the end ------------------------------------------------------------------------------------


def test_on_done_is_called_once_when_the_checkpoint_is_published(tmp_path: Path, gate: Gate) -> None:
    called: list[tuple[jaxckpt.SaveInfo, int, Any]] = []

    def on_done(info: jaxckpt.SaveInfo) -> None:
        assert not pending.done
        called.append((info, threading.get_ident(), jaxckpt.load_numpy(info.path)["a"]))

    pending = jaxckpt.save_async(tmp_path / "c", TREE, on_done=on_done)
    assert not called
    gate.opened.set()
    info = pending.wait(60)
    ((given, thread, found),) = called
    assert (given.save_id, given.total_bytes) == (info.save_id, info.total_bytes)
    assert 0 < given.seconds <= info.seconds
    assert thread != threading.get_ident()
    np.testing.assert_array_equal(found, TREE["a"])
    pending.wait()
    assert len(called) == 1


def test_an_error_of_on_done_is_raised_by_wait_and_the_checkpoint_stays(tmp_path: Path) -> None:
    def on_done(_: jaxckpt.SaveInfo) -> None:
        raise ZeroDivisionError("of the callback")

    pending = jaxckpt.save_async(tmp_path / "c", TREE, on_done=on_done)
    with pytest.raises(ZeroDivisionError, match="of the callback") as caught:
        pending.wait(60)
    assert "was published" in caught.value.__notes__[0]
    assert jaxckpt.verify(tmp_path / "c").ok
    with pytest.raises(jaxckpt.errors.InputError, match="on_done must be a function"):
        jaxckpt.save_async(tmp_path / "d", TREE, on_done=3)  # type: ignore[arg-type]


def test_an_error_of_on_done_is_logged_at_once_and_raised_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def on_done(_: jaxckpt.SaveInfo) -> None:
        raise ZeroDivisionError("of the callback")

    with jaxckpt.Checkpointer(tmp_path, on_failure="continue") as checkpoints:
        checkpoints.save(1, TREE, on_done=on_done)
        deadline = time.monotonic() + 60
        while "was published, but its on_done failed: of the callback" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ZeroDivisionError, match="of the callback") as caught:
            checkpoints.save(2, TREE)
        assert caught.value.__notes__[-1] == "jaxckpt: step 2 is not saved because of this: call save(2, …) again"
        assert checkpoints.save(2, TREE)
    assert checkpoints.steps() == [1, 2]


def test_an_exit_of_on_done_is_logged_and_raised_by_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pending = jaxckpt.save_async(tmp_path / "c", TREE, on_done=lambda _: sys.exit("of the callback"))
    deadline = time.monotonic() + 60
    while not pending.done:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "was published, but its on_done failed: of the callback" in caplog.text
    with pytest.raises(SystemExit, match="of the callback"):
        pending.wait()


def test_on_done_does_not_wait_for_itself(tmp_path: Path) -> None:
    made: list[jaxckpt.PendingSave] = []

    def again(_: jaxckpt.SaveInfo) -> None:
        jaxckpt.save(tmp_path / "inner", TREE)

    with pytest.raises(jaxckpt.errors.InputError, match="own callbacks makes the call"):
        jaxckpt.save_async(tmp_path / "c", TREE, on_done=again).wait(60)
    started = threading.Event()

    def wait(_: jaxckpt.SaveInfo) -> None:
        assert started.wait(60)
        made[0].wait()

    made.append(jaxckpt.save_async(tmp_path / "d", TREE, on_done=wait))
    started.set()
    with pytest.raises(jaxckpt.errors.InputError, match="own callbacks makes the call"):
        made[0].wait(60)


def test_on_done_is_not_called_for_a_failed_or_a_skipped_save(tmp_path: Path, gate: Gate) -> None:
    called: list[Any] = []
    first = jaxckpt.save_async(tmp_path / "c", TREE, on_done=called.append)
    skip = jaxckpt.Options(when_busy="skip")
    assert jaxckpt.save_async(tmp_path / "d", TREE, on_done=called.append, options=skip).skipped
    gate.error = jaxckpt.errors.StorageError(28, "no space")
    gate.opened.set()
    with pytest.raises(jaxckpt.errors.StorageError):
        first.wait(60)
    assert not called


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpointer_calls_on_done_for_the_steps_that_it_saves(tmp_path: Path, background: bool) -> None:
    called: list[str] = []
    with jaxckpt.Checkpointer(tmp_path, every=2, background=background) as run:
        for step in range(1, 5):
            saved = run.save(step, TREE, on_done=lambda info: called.append(Path(info.path).name))
            assert background or len(called) == step // 2
            assert saved == (step % 2 == 0)
    assert called == ["00000002", "00000004"]


# The training loop meanwhile ---------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="a priority of a thread exists on Linux")
def test_what_nothing_waits_for_is_written_at_a_lower_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, priorities = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    has_returned, go_on = threading.Event(), threading.Event()

    def writev(*args: Any) -> int:
        priorities.append(os.getpriority(os.PRIO_PROCESS, 0) - own)
        assert go_on.wait(60)
        return os_writev(*args)

    def write(*args: Any) -> Any:
        assert has_returned.wait(60)
        return write_share(*args)

    os_writev, write_share = os.writev, OwnShare.write
    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(OwnShare, "write", write)
    tree = {name: np.full(1 << 20, 1.0) for name in "abcdefgh"}
    options = jaxckpt.Options(object_bytes=1 << 20, chunk_bytes=1 << 20, host_bytes=1 << 20)
    pending = jaxckpt.save_async(tmp_path / "c", tree, options=options)
    has_returned.set()
    while not priorities:
        time.sleep(0.001)
    threading.Timer(0.2, go_on.set).start()
    pending.wait(60)
    assert priorities[0] == workers.NICENESS
    assert priorities[-1] == 0, "somebody waits"
    priorities.clear()
    jaxckpt.save(tmp_path / "d", tree, options=options)
    assert {*priorities} == {0}
