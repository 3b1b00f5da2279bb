"""The job: numbers of processes, and the coordination service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from processes import PASSED, PROGRAMS, RunProcesses, RunPython, free_port

import jaxckpt


def test_processes_have_the_numbers_of_their_devices(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = PROGRAMS / "renumbered_job.py"
    done = run_processes(program, processes=4, devices_per_process=2, args=str(tmp_path), timeout=240)
    assert all("the same bits" in one.stdout for one in done)


def test_the_service_may_stop_in_another_process_than_process_0(run_processes: RunProcesses, tmp_path: Path) -> None:
    args = {"path": str(tmp_path / "ckpt"), "folder": str(tmp_path), "timeout": 3.0}
    program = PROGRAMS / "renumbered_stopped.py"
    done = run_processes(program, processes=4, devices_per_process=1, args=args, timeout=120)
    reports: list[dict[str, Any]] = [json.loads(one.stdout.splitlines()[-1].removeprefix("report ")) for one in done]
    assert [one["index"] for one in reports if one["stops"]] == [1]
    for one in reports:
        assert one["stops"] or (one["said"].startswith("Peer") and one["seconds"] < 40), reports
        assert one["there"] in ([0], [1])
        assert one["after"] == "", reports


def test_a_job_whose_processes_are_not_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host of a TPU slice."""
    jax.devices()
    jaxckpt.save(tmp_path / "c", {"w": np.arange(3)})
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    for call in (
        lambda: jaxckpt.save(tmp_path / "d", {"w": np.arange(3)}),
        lambda: jaxckpt.restore(tmp_path / "c"),
        lambda: jaxckpt.Checkpointer(tmp_path / "run"),
    ):
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"4 processes, but .* not connected: call jax\.distributed\.init"
        ):
            call()
    assert jaxckpt.load_numpy(tmp_path / "c")["w"].tolist() == [0, 1, 2]


def test_a_job_of_one_process_starts_no_backend(run_python: RunPython, tmp_path: Path) -> None:
    run_python(
        """
        import sys, jaxckpt, numpy
        from jax._src import xla_bridge
        jaxckpt.save(sys.argv[1], {"w": numpy.arange(3), "step": 7})
        assert jaxckpt.restore(sys.argv[1])["step"] == 7
        assert not xla_bridge.backends_are_initialized()
        print("all checks passed")
        """,
        args=[str(tmp_path / "c")],
        word=PASSED,
    )


def test_processes_that_share_no_devices(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(
        """
        import jaxckpt, numpy
        jax.process_count = lambda: 1  # each process has a separate backend
        try:
            jaxckpt.save(args, {"w": numpy.arange(3)})
        except jaxckpt.errors.InputError as error:
            print(error)
        """,
        processes=2,
        devices_per_process=1,
        args=str(tmp_path / "c"),
    )
    for one in done:
        assert "connected 2 processes, but JAX's default devices belong to 1" in one.stdout


def test_nothing_grows_with_the_number_of_calls(run_processes: RunProcesses, tmp_path: Path) -> None:
    """Neither keys in JAX's coordination service, nor counts of calls, nor the list of threads."""
    done = run_processes(
        """
        import sys, threading, time
        import jax, jaxckpt
        import jax.numpy as jnp
        from jax._src import distributed
        from jaxckpt._job import job as jobs

        jobs._MAX_COUNTS = 5
        client = distributed.global_state.client
        sharding = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("d",)), jax.P("d"))
        x = jax.make_array_from_callback((8,), sharding, lambda at: jnp.arange(8.0)[at])

        def calls(checkpoints, first):
            for step in range(first, first + 4):
                checkpoints.save(step, {"x": x}, metrics={"loss": 1.0})
                jaxckpt.save_async(f"{args}/{step}", {"x": x})
                assert not checkpoints.should_save(step)
                checkpoints.restore()
                try:
                    checkpoints.save(step, {"x": x})  # exists
                    checkpoints.wait()
                except jaxckpt.errors.JaxckptError:
                    continue
                raise AssertionError

        with jaxckpt.Checkpointer(f"{args}/run", save_if=lambda step, metrics: True) as checkpoints:
            sizes = []
            for first in (1, 100, 200, 300, 400):
                calls(checkpoints, first)
                if process_id == 0:
                    sizes.append(len(client.key_value_dir_get("jaxckpt/")))
                job = jobs.connected_job()
                kept = (len(job._counts), len(job.departures._unreported), len(job.departures._counts))
                assert max(kept) <= 8, kept
        assert max(sizes, default=0) <= 10, sizes
        deadline = time.monotonic() + 10
        while not {thread.ident for thread in threading.enumerate()} <= {*sys._current_frames()}:
            assert time.monotonic() < deadline, threading.enumerate()
        print("done", sizes)
        """,
        processes=2,
        devices_per_process=1,
        args=str(tmp_path),
        timeout=120,
    )
    assert all(one.stdout.startswith("done") for one in done), "\n".join(map(str, done))


def test_ctrl_c_ends_a_long_wait_for_process_0(run_python: RunPython, tmp_path: Path) -> None:
    """The more processes a job has, the less often each asks whether process 0 has answered."""
    said = run_python(
        f"""
        import os, signal, threading, time
        import jax
        from jaxckpt._job.call import Call
        from jaxckpt._pipeline.watchdog import Watchdog

        jax.distributed.initialize("127.0.0.1:{free_port()}", 1, 0)
        from jax._src import distributed

        client = distributed.global_state.client
        sent = []

        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(4.5, interrupt).start()
        def meet():
            with call.rendezvous("saving") as rendezvous:
                rendezvous.gather("")
                rendezvous.broadcast("")

        call = Call("save", "run", Watchdog(300.0), None, 0, 1, 480, client, "jaxckpt/0")
        try:
            with call:
                call.run(meet)
        except KeyboardInterrupt:
            print("interrupted after", time.monotonic() - sent[0])
        """,
        timeout=60,
    )
    assert float(said.split()[-1]) < 2.5
