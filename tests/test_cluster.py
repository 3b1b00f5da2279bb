"""The simulation of large jobs (benchmarks/cluster.py): its counts equal those of real jobs."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

import numpy as np
import pytest
from processes import PROGRAMS, ROOT, RunProcesses
from servers import Bucket

import jaxckpt


def benchmark(name: str) -> Any:
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def cluster() -> Any:
    return benchmark("cluster")


@pytest.fixture(scope="module")
def coordination() -> Any:
    return benchmark("coordination")


@pytest.mark.parametrize("processes", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_real_job_makes_the_requests_that_the_model_counts(
    processes: int, cluster: Any, coordination: Any, s3: Bucket, run_processes: RunProcesses
) -> None:
    program = PROGRAMS / "cluster_job.py"
    done = run_processes(program, processes=processes, devices_per_process=2, args=s3.url, timeout=120)
    each = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    job = cluster.small_job(processes)
    model = cluster.simulate(job)

    # The store: every request, except those that check that the server honors conditions.
    asked = {kind: count for kind, count in s3.proxy.counted().items() if not kind.endswith("other")}
    expected = dict(model["requests"].save)
    expected["GET object"] = model["each"].requests + model["auto"].requests
    for kind, count in model["requests"].restore.items():
        expected[kind] = expected.get(kind, 0) + 2 * count  # one restore of each kind
    expected["LIST"] += 2  # of that check, which looks for its own key
    assert asked == expected
    (manifest,) = (request for request in s3.proxy.requests if request.kind == "PUT manifest.json")
    assert manifest.sent_bytes == pytest.approx(model["manifest_bytes"], rel=0.03)
    assert [one["bytes"] for one in each] == list(cluster.plan_for(job, 0).process_bytes)

    # The coordination service: exact counts of posts and deletions. A process that waits may have to ask again.
    for call, names in coordination.CALLS.items():
        met = [model["rendezvous"][name] for name in names]
        for process, one in enumerate(each):
            counted = one[call]["requests"]
            wanted = sum(
                (rendezvous.by_first if process == 0 else rendezvous.by_other for rendezvous in met),
                start=type(met[0].by_first)(),
            )
            assert {kind: counted.get(kind, 0) for kind in ("set", "delete")} == {
                kind: wanted[kind] for kind in ("set", "delete")
            }
            assert counted.get("get", 0) >= (0 if process == 0 else wanted["get"])
            assert counted.get("list", 0) >= wanted["list"] == (len(met) if process == 0 else 0)
        # Compare averages, because the job balances bytes and the model balances objects.
        given = np.mean([one[call]["given"] for one in each], axis=0)
        assert given == pytest.approx([rendezvous.given_bytes for rendezvous in met], rel=0.2), "bytes of each text"


@pytest.mark.parametrize("count", [64, 65, 16_384])
def test_the_first_process_reads_texts_in_blocks(coordination: Any, count: int) -> None:
    """It does not read them one by one, and gets them in the order of the processes."""
    rendezvous = coordination.meet(count, lambda index: f"text {index}", "")
    assert rendezvous.by_first["get"] + rendezvous.by_first["list"] <= count // 64 + 2  # its own text may arrive late
    assert rendezvous.by_other.total() == 2


@pytest.mark.parametrize("count", [2, 64, 1_000, 4_096, 16_384])
def test_waiting_takes_little_memory_of_the_coordination_service(coordination: Any, count: int) -> None:
    """The service keeps each request whose key is not posted in time, which once took 460 MB per second of waiting."""
    requests_per_second, kept_bytes = coordination.wait(count, 600.0)
    assert requests_per_second <= max(2 * count, 4_000)
    assert kept_bytes <= 150e6


def test_all_silent_processes_of_a_large_rendezvous_are_named(coordination: Any) -> None:
    service, silent = coordination.Service(), (1, 64, 199)
    for index in range(1, 200):
        if index not in silent:
            with coordination.meeting(coordination.call_of(index, 200, service, first=True)) as rendezvous:
                rendezvous.gather("here")
    first = coordination.call_of(0, 200, service, first=True)
    first.watchdog.seconds = 0.4
    with (
        pytest.raises(jaxckpt.errors.PeerTimeoutError, match="processes 1, 64, 199 of 200 did not respond"),
        coordination.meeting(first) as rendezvous,
    ):
        rendezvous.gather("here")
    with (
        pytest.raises(jaxckpt.errors.PeerTimeoutError, match="processes 1, 64, 199"),  # all others raise the same error
        coordination.meeting(coordination.call_of(100, 200, service, first=True)) as rendezvous,
    ):
        rendezvous.broadcast("")


def test_a_failure_in_a_large_rendezvous_is_quoted(coordination: Any) -> None:
    service = coordination.Service()
    for index in range(1, 130):
        with (
            contextlib.suppress(OSError),
            coordination.meeting(coordination.call_of(index, 130, service, first=True)) as rendezvous,
        ):
            if index == 100:
                raise OSError("no space left")
            rendezvous.gather("here")
    with (
        pytest.raises(jaxckpt.errors.PeerFailedError, match="process 100 failed with OSError: no space left"),
        coordination.meeting(coordination.call_of(0, 130, service, first=True)) as rendezvous,
    ):
        rendezvous.gather("here")


def test_a_rendezvous_of_several_blocks_over_jaxs_own_service(run_processes: RunProcesses) -> None:
    (done,) = run_processes(PROGRAMS / "many_in_one.py", processes=1, devices_per_process=1)
    assert done.stdout == "done\n"
