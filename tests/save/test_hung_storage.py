"""A system call hangs, as on a network file system whose server is lost: every process gets an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import processes
import pytest
from processes import RunProcesses, RunPython

PROGRAM = processes.ROOT / "tests" / "programs" / "hang.py"
pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed (apt-get install strace)")


DOING = {"writev": "writing to", "mkdir": "preparing", "/preadv": "reading from", "openat": "opening"}
"""For each system call that hangs, the words with which a message describes the operation."""

CALLS = [
    ("save", "writev"),
    ("save_async", "writev"),
    ("save", "mkdir"),
    ("restore", "/preadv"),
    ("restore", "openat"),
    ("load_numpy", "/preadv"),
    ("index", "/preadv"),
]


@pytest.mark.parametrize(("verb", "call"), CALLS)
def test_an_error_names_the_operation(run_python: RunPython, tmp_path: Path, verb: str, call: str) -> None:
    ended, after, published, left = run_python(PROGRAM, args=[str(tmp_path), verb, call]).splitlines()
    doing = DOING[call]
    kind, seconds, _, message = ended.split(maxsplit=3)
    assert kind == "StorageError"
    assert f"no bytes have moved for 2 s while {doing} {tmp_path}/hung: the storage hangs" in message
    assert int(seconds) < 25  # the operation did not wait for the call
    assert after == "done"  # another thread does the next operation
    assert published == f"hung was published: {not verb.startswith('save')}"
    assert left == "data folders: 1"


@pytest.mark.parametrize(
    ("call", "read"), [("writev", "each"), ("openat", "each"), ("/preadv", "each"), ("/preadv", "shared")]
)
def test_the_other_processes_raise_too(run_processes: RunProcesses, tmp_path: Path, call: str, read: str) -> None:
    program = f"""
    import dataclasses, sys
    sys.path.insert(0, {str(PROGRAM.parent)!r})
    from pathlib import Path
    import jax.numpy as jnp, numpy as np, jaxckpt, hang
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    rows = jax.make_array_from_callback((48, 4096), sharding, lambda index: np.ones((48, 4096), np.uint8)[index])
    patient = dataclasses.replace(hang.OPTIONS, read={read!r})
    impatient = dataclasses.replace(hang.IMPATIENT, read={read!r})
    folder = Path(args)
    if {call!r} == "writev":
        act = lambda name, options: jaxckpt.save(folder / name, {{"w": rows}}, options=options)
    else:
        act = lambda name, options: jaxckpt.restore(folder / name, mesh=mesh, specs=P(), options=options)
        for name in ("first", "hung", "next"):
            jaxckpt.save(folder / name, {{"w": rows}}, options=patient)
    hang.attempt(lambda: act("first", patient))
    if process_id == 1:
        strace = hang.hang({call!r}, folder / "hung" / "manifest.json" if {call!r} == "openat" else None)
    hang.attempt(lambda: act("hung", impatient))
    if process_id == 1:
        strace.kill()
    hang.attempt(lambda: act("next", patient))
    """
    done = run_processes(program, processes=3, devices_per_process=1, args=str(tmp_path))
    for process, one in enumerate(done):
        first, hung, after = one.stdout.splitlines()
        assert first == after == "done"
        assert f"no bytes have moved for 2 s while {DOING[call]}" in hung
        assert f"{tmp_path}/hung" in hung
        if process != 1:
            assert hung.startswith("PeerFailedError")
            assert "process 1 failed with StorageError" in hung
            assert int(hung.split()[1]) < 25
    assert call != "writev" or not (tmp_path / "hung" / "manifest.json").exists()
