"""The simulation of large jobs (benchmarks/cluster.py): what it counts is what real jobs do."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from processes import PROGRAMS, ROOT, RunProcesses
from servers import Bucket


@pytest.fixture(scope="module")
def cluster() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster", ROOT / "benchmarks" / "cluster.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cluster"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("processes", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_real_job_asks_what_the_model_counts(
    processes: int, cluster: ModuleType, bucket: Bucket, run_processes: RunProcesses
) -> None:
    done = run_processes(
        PROGRAMS / "cluster_job.py", processes=processes, devices_per_process=2, args=bucket.url, timeout=200
    )
    each = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    job = cluster.small_job(processes)
    model = cluster.simulate(job)

    # The store: every request, but for those that prove that the server honours conditions.
    asked = {kind: count for kind, count in bucket.proxy.counted().items() if not kind.endswith("other")}
    expected = dict(model["requests"].save)
    for kind, count in model["requests"].restore.items():
        expected[kind] = expected.get(kind, 0) + count
    assert asked == expected
    (manifest,) = (request for request in bucket.proxy.requests if request.kind == "PUT manifest.json")
    assert manifest.sent_bytes == pytest.approx(model["manifest_bytes"], rel=0.03)
    assert [one["bytes"] for one in each] == list(cluster.plan_for(job, 0).process_bytes)

    # The coordination service: what is posted and deleted exactly; who waits, may have to ask again.
    for call, names in cluster.CALLS.items():
        met = [model["meetings"][name] for name in names]
        for process, one in enumerate(each):
            counted = one[call]["requests"]
            wanted = sum((meeting.by_first if process == 0 else meeting.by_other for meeting in met), start=type(met[0].by_first)())
            assert {kind: counted.get(kind, 0) for kind in ("set", "delete")} == {
                kind: wanted[kind] for kind in ("set", "delete")
            }
            assert counted["get"] + counted.get("list", 0) >= wanted["get"] + wanted["list"]
            sizes = zip(one[call]["given"], [meeting.given_bytes for meeting in met], strict=True)
            assert all(real == pytest.approx(simulated, rel=0.25) for real, simulated in sizes), "bytes of each text"


def test_the_first_process_reads_texts_in_blocks(cluster: ModuleType) -> None:
    """64 requests and not 4,096; and no message comes near the 4 MiB that gRPC takes."""
    meeting = cluster.meet(4096, lambda index: "x" * (100_000 if index % 16 == 0 else 3_000), "")
    assert meeting.first < 4096 / 16 * 1.2 + 3 * 64 + 10  # one more for each text in parts
    assert meeting.largest <= 3 << 20


def test_objects_of_a_large_job_stay_few(cluster: ModuleType) -> None:
    few, many = (cluster.plan_for(cluster.job_of(size, scanned=True), 0) for size in (64, 4096))
    assert few.n_objects < 16_000
    assert many.n_objects < 2 * 2_560 + len(many.stacks) * 2_048
    assert Path(cluster.__file__).name == "cluster.py"
