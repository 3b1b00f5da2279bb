"""A system call that hangs, such as on a network file system that has lost its server: an error, everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import processes
import pytest
from processes import RunProcesses, RunPython

PROGRAM = processes.ROOT / "tests" / "programs" / "hang.py"
pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed (apt-get install strace)")


@pytest.mark.parametrize(("verb", "call"), [("save", "writev"), ("save_async", "writev"), ("save", "mkdir")])
def test_an_error_names_the_operation(run_python: RunPython, tmp_path: Path, verb: str, call: str) -> None:
    ended, after, published = run_python(PROGRAM, args=[str(tmp_path), verb, call]).splitlines()
    doing = "preparing" if call == "mkdir" else "writing to"
    kind, seconds, _, message = ended.split(maxsplit=3)
    assert kind == "StorageError"
    assert f"no byte has moved for 2 s while {doing} {tmp_path}/hung: the storage hangs" in message
    assert int(seconds) < 6  # it did not wait for the call
    assert after == "saved"  # by another thread
    assert published == "hung was published: False"


def test_the_other_processes_raise_too(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = f"""
    import sys
    sys.path.insert(0, {str(PROGRAM.parent)!r})
    import jax.numpy as jnp, numpy as np, jaxckpt, hang
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    rows = jax.make_array_from_callback((48, 4096), sharding, lambda index: np.ones((48, 4096), np.uint8)[index])
    hang.attempt(lambda: jaxckpt.save(args + "/first", {{"w": rows}}, options=hang.OPTIONS))
    if process_id == 1:
        strace = hang.hang("writev")
    hang.attempt(lambda: jaxckpt.save(args + "/hung", {{"w": rows}}, options=hang.OPTIONS))
    if process_id == 1:
        strace.kill()
    hang.attempt(lambda: jaxckpt.save(args + "/next", {{"w": rows}}, options=hang.OPTIONS))
    """
    done = run_processes(program, processes=3, devices_per_process=1, args=str(tmp_path))
    for process, one in enumerate(done):
        first, hung, after = one.stdout.splitlines()
        assert first == after == "saved"
        assert "no byte has moved for 2 s while writing to" in hung
        assert f"{tmp_path}/hung" in hung
        if process != 1:
            assert hung.startswith("PeerFailedError")
            assert "process 1 failed with StorageError" in hung
            assert int(hung.split()[1]) < 6
    assert not (tmp_path / "hung" / "manifest.json").exists()
