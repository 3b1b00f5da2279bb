"""Local folders: the newest step that they hold together is restored, onto any mesh, whatever is lost or damaged."""

from __future__ import annotations

import collections
import json
import math
import shutil
from pathlib import Path
from typing import Any

import local_folders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import PROGRAMS, RunProcesses
from strategies import stacks

from jaxckpt._format.grid import intersection, volume
from jaxckpt._format.stacks import Stack
from jaxckpt._restore.surviving import ALIGNED_BYTES, Candidate, Request, candidates, hops, missing, requests, server

COUNT = 5

# Plans ----------------------------------------------------------------------------------------------------


def test_the_newest_save_comes_first_and_of_one_step_the_one_that_more_folders_publish() -> None:
    old, rare, common = (Candidate(step, save, "sha") for step, save in ((9, "z"), (12, "y"), (12, "x")))
    assert candidates([[old, common], [common, rare], [old, old]]) == [common, rare, old]


@st.composite
def holdings(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], int]:
    """[process, file], each file with at least one process."""
    count = draw(st.integers(1, 20))
    holders = [draw(st.sets(st.integers(0, COUNT - 1), min_size=1)) for _ in range(count)]
    there = np.array([[process in some for some in holders] for process in range(COUNT)])
    return np.packbits(there, axis=1), count


@given(holdings(), st.integers(0, COUNT - 1))
def test_what_is_missing_is_what_nobody_holds(found: tuple[np.ndarray[Any, Any], int], lost: int) -> None:
    held, count = found
    assert not missing(held, count)
    there = np.unpackbits(held, axis=1, count=count).astype(bool)
    there[lost] = False
    gone = [number for number in range(count) if not there[:, number].any()]
    assert missing(np.packbits(there, axis=1), count) == gone


@given(holdings(), st.data())
def test_hops_pass_each_request_once_from_a_holder(
    found: tuple[np.ndarray[Any, Any], int], data: st.DataObject
) -> None:
    held, count = found
    there = np.unpackbits(held, axis=1, count=count).astype(bool)
    wanted: list[list[Request]] = []
    for process in range(COUNT):
        lacking = [number for number in range(count) if not there[process, number]]
        asked = data.draw(st.lists(st.sampled_from(lacking), unique=True)) if lacking else []
        wanted.append([(number, ((0, 7 * number + 1),)) for number in asked])
    most = data.draw(st.sampled_from([1, 64, 1 << 20]))
    passed = hops(wanted, held, lambda request: volume(request[1]), most)
    got: dict[int, list[Request]] = collections.defaultdict(list)
    for hop in passed:
        assert len({giver for giver, _ in hop}) == len({getter for _, getter in hop}) == len(hop)
        assert len({(getter - giver) % COUNT for giver, getter in hop}) == 1
        for (giver, getter), parcel in hop.items():
            end = 0
            for request, start, size in parcel.requests:
                assert there[giver, request[0]]
                assert giver == server(request[0], getter, held)
                assert start == -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
                assert size == volume(request[1])
                end = start + size
            assert end <= parcel.n_bytes <= max(most, end + ALIGNED_BYTES)
            assert parcel.n_bytes <= most or len(parcel.requests) == 1
            got[getter] += [request for request, _, _ in parcel.requests]
    assert [sorted(got[process]) for process in range(COUNT)] == [sorted(asked) for asked in wanted]


@given(stacks(), st.data())
def test_requests_cut_a_box_without_a_chunk_in_two(stack: Stack, data: st.DataObject) -> None:
    (_, whole) = data.draw(st.sampled_from(list(stack.objects()) or [((), ())]))
    if not volume(whole):
        return
    edges = [sorted(data.draw(st.lists(st.integers(a, b), min_size=2, max_size=2, unique=True))) for a, b in whole]
    box = tuple((a, b) for a, b in edges)
    most = data.draw(st.sampled_from([1, 100, 1 << 20]))
    parts = [part for _, part in requests(3, stack, box, most)]
    assert sum(map(volume, parts)) == volume(box)
    assert all(intersection(part, box) == part for part in parts)
    chunk = math.prod(stack.chunk) * stack.itemsize
    touched = collections.Counter(
        tuple(start // side for (start, _), side in zip(part, stack.chunk, strict=True)) for part in parts
    )
    assert all(volume(part) * stack.itemsize <= max(most, chunk) for part in parts)
    assert max(touched.values()) == 1


# In real processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 30 and 40, saved by four processes; they are not changed."""
    from processes import run_processes

    path = tmp_path_factory.mktemp("surviving") / "saved"
    run_processes(PROGRAMS / "local_save.py", processes=4, devices_per_process=2, args={"path": str(path)})
    return path


@pytest.fixture
def job(saved: Path, tmp_path: Path) -> Job:
    return Job(saved, tmp_path)


class Job:
    """A run whose storage has step 30, and whose four hosts have step 40."""

    def __init__(self, saved: Path, folder: Path) -> None:
        self.saved = saved
        self.path = folder / "storage"
        self._folder = folder
        shutil.copytree(saved / "00000030", self.path / "00000030")
        self.cases: list[dict[str, Any]] = []

    def hosts(self, *, copies: int = 1) -> list[Path]:
        """Four hosts' folders, made for a case of its own."""
        hosts = [self._folder / f"case {len(self.cases)}" / f"host {number}" for number in range(4)]
        local_folders.spread(self.saved / "00000040", hosts, self.path, copies=copies)
        return hosts

    def case(self, hosts: list[Path], step: int = 40, **more: Any) -> None:
        """Restore: each process sees one of the hosts, and `step` must come back."""
        self.cases.append({"hosts": [*map(str, hosts)], "like": str(self.saved / f"{step:08d}"), **more})

    def run(self, run_processes: RunProcesses, processes: int) -> list[list[dict[str, Any]]]:
        """What each case came to, in each process."""
        given = {"path": str(self.path), "cases": self.cases}
        done = run_processes(
            PROGRAMS / "local_restores.py", processes=processes, devices_per_process=2, args=given, timeout=200
        )
        found = [list(map(json.loads, process.stdout.splitlines())) for process in done]
        assert {len(some) for some in found} == {len(self.cases)}
        return [list(one) for one in zip(*found, strict=True)]


def wipe(host: Path) -> Path:
    shutil.rmtree(host)
    return host


def require_step(found: list[dict[str, Any]], step: int) -> None:
    for process, one in enumerate(found):
        assert "error" not in one, one
        assert (one["step"], one["latest"], one["metrics"]) == (step, step, {"loss": 1 / step}), one
        assert one["state"] == [step, process]


@pytest.mark.parametrize("processes", [4, 3, 2])
def test_any_host_may_be_lost(run_processes: RunProcesses, job: Job, processes: int) -> None:
    for layout in ("fsdp", "replicated", "square", "columns"):
        for lost in range(4):
            if layout != "fsdp" and lost != processes - 1:
                continue
            hosts = job.hosts()
            wipe(hosts[lost])
            if processes < 4:
                del hosts[lost]
            if processes == 2:  # two hosts' folders are seen by one process
                shutil.move(next(hosts[2].iterdir()), hosts[0])
            job.case(hosts, layout=layout, host_bytes=1 << 20 if lost % 2 else 256 << 20)
    for found in job.run(run_processes, processes):
        require_step(found, 40)
        for one in found:
            assert one["lines"] == [] or one["lines"][0].startswith("INFO step 40 is whole")
