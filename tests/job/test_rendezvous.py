"""Tests of the helpers that start processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import RunProcesses, RunPython, finish


def test_a_child_has_the_requested_devices(run_python: RunPython) -> None:
    assert run_python("import jax; print(len(jax.devices()))", devices=3).strip() == "3"


def test_a_program_may_be_a_file(run_python: RunPython, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(sys.argv[1], os.environ['GREETED'])")
    assert run_python(program, args=["hello"], env={"GREETED": "world"}) == "hello world\n"


def test_processes_form_one_job(run_processes: RunProcesses) -> None:
    done = run_processes(
        """
        from jax.experimental import multihost_utils
        import numpy as np
        gathered = multihost_utils.process_allgather(np.array([process_id + args]))
        print(gathered.ravel().tolist(), jax.device_count())
        print(hash("a string hash that differs between processes"), np.random.random())
        """,
        processes=2,
        devices_per_process=2,
        args=10,
    )
    (first, *ours), (second, *theirs) = (one.stdout.splitlines() for one in done)
    assert first == second == "[10, 11] 4"
    assert not {*ours[0].split()} & {*theirs[0].split()}


@pytest.mark.child
@pytest.mark.parametrize("env", [{}, {"PYTHONHASHSEED": "1"}], ids=["a fork", "a fresh Python"])
@pytest.mark.parametrize(
    ("end", "status", "message"),
    [("sys.exit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError"), ("os.kill(os.getpid(), 9)", -9, ""), ("", 0, "")],
)
def test_a_program_ends_as_with_python(
    env: dict[str, str], end: str, status: int, message: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, os, sys, threading, time\n"
        "assert (__name__, sys.argv, sys.path[0]) == ('__main__', [__file__, 'x'], os.path.dirname(__file__))\n"
        "assert not sys.stdin.read()\n"
        "atexit.register(print, 'the end')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()\n" + end
    )
    done = finish(program, "x", env=env)
    assert done.returncode == status, str(done)
    assert message in done.stderr
    assert done.stdout == ("" if status < 0 else "a thread\nthe end\n")


def test_the_output_of_a_failed_process_is_shown(run_processes: RunProcesses) -> None:
    # Process 0 is the coordinator. The others may not survive its end, so only its exit status is reliable.
    with pytest.raises(AssertionError, match=r"(?s)=== process 0: exit 3.*the reason.*=== process 1: exit"):
        run_processes(
            """
            import os
            if process_id == 0:
                os.write(2, b"the reason")
                os._exit(3)
            os._exit(0)
            """,
            processes=2,
            devices_per_process=1,
        )


def test_a_process_may_print_much_output_while_another_waits_for_it(run_processes: RunProcesses) -> None:
    done = run_processes(
        """
        from jax.experimental import multihost_utils
        if process_id == 1:
            print("x" * 1_000_000, flush=True)  # more than a pipe holds
        multihost_utils.sync_global_devices("written")
        """,
        processes=2,
        devices_per_process=1,
        timeout=60,
    )
    assert "x" * 1_000_000 in done[1].stdout


def test_a_hang_is_reported_with_its_place(
    run_python: RunPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, wait = tmp_path / "hangs", processes._wait

    def wait_until_it_hangs(children: Any, timeout: float) -> None:
        while not hangs.exists():  # starting may be slow on a busy machine
            time.sleep(0.01)
        wait(children, timeout)

    monkeypatch.setattr(processes, "_wait", wait_until_it_hangs)
    with pytest.raises(AssertionError, match=r'(?s)process 0 of 1 .* a hang.*early.*File "<string>", line 4 in stuck'):
        run_python(
            """
            import sys, time
            def stuck():
                open(sys.argv[1], "w").close(); time.sleep(60)
            print("early", flush=True)
            stuck()
            """,
            args=[str(hangs)],
            timeout=0.1,
        )


def test_a_stopped_process_is_killed_too(run_python: RunPython) -> None:
    with pytest.raises(AssertionError, match="a hang"):
        run_python("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", timeout=0.5)


def test_processes_that_a_child_started_are_killed_with_it(run_python: RunPython) -> None:
    started = time.monotonic()
    left = run_python(
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid)",
    )
    assert time.monotonic() - started < 60
    deadline = time.monotonic() + 60
    while _runs(int(left)):
        assert time.monotonic() < deadline, f"process {left} still runs"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
