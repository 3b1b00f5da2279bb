"""Local folders: restores the newest step that they hold together, onto any mesh, despite losses and damage."""

from __future__ import annotations

import collections
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import local_folders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import PASSED, PROGRAMS, run_processes
from strategies import stacks

import jaxckpt
from jaxckpt._local_tier.peer_reads import (
    Candidate,
    FileRequest,
    candidates,
    missing_files,
    requests_by_pair,
    split_request,
)
from jaxckpt._model.grid import intersection, volume
from jaxckpt._model.stacks import Stack

COUNT = 5

# Plans ----------------------------------------------------------------------------------------------------


def test_saves_are_ordered_by_step_then_by_the_number_of_folders() -> None:
    old, rare, common = (Candidate(step, save, "sha") for step, save in ((9, "z"), (12, "y"), (12, "x")))
    assert candidates([[old, common], [common, rare], [old, old]]) == [common, rare, old]


@st.composite
def holdings(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], int]:
    """[process, file]; each file is held by at least one process."""
    count = draw(st.integers(1, 20))
    holders = [draw(st.sets(st.integers(0, COUNT - 1), min_size=1)) for _ in range(count)]
    there = np.array([[process in some for some in holders] for process in range(COUNT)])
    return np.packbits(there, axis=1), count


@given(holdings(), st.integers(0, COUNT - 1))
def test_missing_files_are_those_that_no_process_holds(found: tuple[np.ndarray[Any, Any], int], lost: int) -> None:
    held, count = found
    assert not missing_files(held, count)
    there = np.unpackbits(held, axis=1, count=count).astype(bool)
    there[lost] = False
    gone = [number for number in range(count) if not there[:, number].any()]
    assert missing_files(np.packbits(there, axis=1), count) == gone


@given(holdings(), st.data())
def test_each_request_is_sent_once_by_a_process_that_has_the_file(
    found: tuple[np.ndarray[Any, Any], int], data: st.DataObject
) -> None:
    held, count = found
    there = np.unpackbits(held, axis=1, count=count).astype(bool)
    asked: list[list[FileRequest]] = []
    for process in range(COUNT):
        lacking = [number for number in range(count) if not there[process, number]]
        numbers = data.draw(st.lists(st.sampled_from(lacking), unique=True)) if lacking else []
        asked.append([(number, ((0, 7 * number + 1),)) for number in numbers])
    by_receiver: dict[int, list[FileRequest]] = collections.defaultdict(list)
    for (sender, receiver), requests in requests_by_pair(asked, held).items():
        assert all(there[sender, number] for number, _ in requests)
        assert requests == [request for request in asked[receiver] if request in requests], "in their order"
        by_receiver[receiver] += requests
    assert [sorted(by_receiver[process]) for process in range(COUNT)] == [sorted(requests) for requests in asked]


@given(stacks(), st.data())
def test_requests_cut_a_box_without_a_chunk_in_two(stack: Stack, data: st.DataObject) -> None:
    (_, whole) = data.draw(st.sampled_from(list(stack.objects()) or [((), ())]))
    if not volume(whole):
        return
    edges = [sorted(data.draw(st.lists(st.integers(a, b), min_size=2, max_size=2, unique=True))) for a, b in whole]
    box = tuple((a, b) for a, b in edges)
    most = data.draw(st.sampled_from([1, 100, 1 << 20]))
    parts = [part for _, part in split_request(3, stack, box, most)]
    assert sum(map(volume, parts)) == volume(box)
    assert all(intersection(part, box) == part for part in parts)
    chunk = math.prod(stack.chunk_sides) * stack.itemsize
    touched = collections.Counter(
        tuple(start // side for (start, _), side in zip(part, stack.chunk_sides, strict=True)) for part in parts
    )
    assert all(volume(part) * stack.itemsize <= max(most, chunk) for part in parts)
    assert max(touched.values()) == 1


# In real processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saves of four processes: steps 30 and 40, and a run with 40 in local folders. No test changes them."""
    folder = tmp_path_factory.mktemp("surviving")
    places = {name: str(folder / name) for name in ("saved", "run", "hosts")}
    run_processes(PROGRAMS / "local_save.py", processes=4, devices_per_process=2, args=places, word=PASSED)
    return folder


@pytest.fixture
def job(saved: Path, tmp_path: Path) -> Job:
    return Job(saved, tmp_path)


class Job:
    """A run whose storage has step 30, and whose four hosts have step 40."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.saved = folder / "saved"
        self.path = scratch / "storage"
        self._made = folder
        self._scratch = scratch
        shutil.copytree(self.saved / "00000030", self.path / "00000030")
        self.cases: list[dict[str, Any]] = []

    def hosts(self) -> list[Path]:
        """A copy of the run's data on its four hosts, for one case."""
        to = self._scratch / f"case {len(self.cases)}"
        return local_folders.take(self._made / "hosts", self._made / "run", to, self.path)

    def odd_hosts(self, *, copies: int = 1) -> list[Path]:
        """Four hosts that hold the step's files in turn, regardless of their owners."""
        hosts = [self._scratch / f"case {len(self.cases)}" / f"host {number}" for number in range(4)]
        local_folders.spread(self.saved / "00000040", hosts, self._made / "run", self.path, copies=copies)
        return hosts

    def case(self, hosts: list[Path], like: int = 40, **more: Any) -> None:
        """Add a restore in which each process sees one of the hosts; the result must equal the step `like`."""
        self.cases.append({"hosts": [*map(str, hosts)], "like": str(self.saved / f"{like:08d}"), **more})

    def run(self, processes: int, *, check: bool = True, **more: Any) -> list[list[dict[str, Any]]]:
        """The result of each case, in each process."""
        given = {"path": str(self.path), "cases": self.cases, **more}
        done = run_processes(
            PROGRAMS / "local_restores.py",
            processes=processes,
            devices_per_process=2,
            args=given,
            timeout=250,
            check=check,
        )
        found = [list(map(json.loads, process.stdout.splitlines())) for process in done]
        assert not check or {len(some) for some in found} == {len(self.cases)}
        return [list(one) for one in zip(*found, strict=check)]


def wipe(host: Path) -> None:
    shutil.rmtree(host)
    host.mkdir()


def objects(host: Path) -> list[Path]:
    """The objects in a host's folder, by their paths below the step."""
    return [file.relative_to(step) for step in host.glob("*/00000040") for file in local_folders.files(step)]


def copies(hosts: list[Path], name: Path) -> list[Path]:
    return [step / name for host in hosts for step in host.glob("*/00000040") if (step / name).exists()]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def require_step(found: list[dict[str, Any]], step: int) -> None:
    for process, one in enumerate(found):
        assert "error" not in one, one
        assert (one["step"], one["latest"], one["metrics"]) == (step, step, {"loss": 1 / step}), one
        assert one["state"] == [step, process]


@pytest.mark.child
@pytest.mark.parametrize("processes", [4, 3, 2])
def test_any_host_may_be_lost(job: Job, processes: int) -> None:
    for layout in ("fsdp", "replicated", "square", "columns"):
        for lost in range(4):
            # Programs are compiled in each process, so the job of three loses only one host in each layout.
            if (layout != "fsdp" or processes == 3) and lost != processes - 1:
                continue
            hosts = job.hosts() if layout != "columns" else job.odd_hosts()
            wipe(hosts[lost])
            if processes < 4:
                del hosts[lost]
            if processes == 2:  # one process sees the folders of two hosts
                shutil.move(next(hosts[2].iterdir()), hosts[0])
            # Whether the values fit uint8 is seen in data that other processes send.
            dtype = "uint8" if layout == "columns" else "int64"
            job.case(hosts, layout=layout, host_dtype=dtype, host_bytes=1 << 20 if lost % 2 else 256 << 20)
    for found in job.run(processes):
        require_step(found, 40)
        assert found[0]["lines"][0].startswith("INFO step 40 is complete in the local folders of 3 processes")
        assert not any("WARNING" in line for one in found for line in one["lines"])


@pytest.mark.child
def test_damaged_stale_and_foreign_data_is_never_used(job: Job, tmp_path: Path) -> None:
    expected: list[tuple[int, str]] = []

    def case(hosts: list[Path], like: int, said: str, **more: Any) -> None:
        expected.append((like, said))
        job.case(hosts, like, **more)

    hosts = job.hosts()
    wipe(hosts[1])
    wipe(hosts[2])
    case(hosts, 30, "step 30 is restored from")
    hosts = job.hosts()
    for name in objects(hosts[0])[::5]:  # also files of process_state
        flip(copies(hosts, name)[0])
    case(hosts, 40, "damaged, and are not used", layout="replicated")
    hosts = job.hosts()
    for file in copies(hosts, objects(hosts[0])[0]):
        flip(file)
    case(hosts, 30, "step 30 is restored from", layout="replicated")
    hosts = job.hosts()
    name = objects(hosts[3])[-1]
    for file in copies(hosts, name)[:1]:
        file.write_bytes(file.read_bytes()[:-5])
    case(hosts, 40, "bytes long, expected")
    hosts = job.hosts()
    for file in copies(hosts, name):
        file.write_bytes(file.read_bytes()[:-5])
    case(hosts, 30, f"{name}")
    hosts = job.hosts()  # the folder of another run, and a copied folder of this run
    for other in ({"run": "f" * 32}, {"storage": str(tmp_path)}):
        for host in hosts:
            folder = shutil.copytree(next(host.iterdir()), host / f"process-{7 + len(list(host.iterdir()))}")
            note = json.loads((folder / "run.json").read_text())
            (folder / "run.json").write_text(json.dumps({**note, **other}))
    for host in hosts:
        shutil.rmtree(host / f"process-{hosts.index(host)}" / "00000040")
    case(hosts, 30, "belongs to another run")
    hosts = job.hosts()  # two hosts were missing when step 40 was saved again
    with jaxckpt.Checkpointer(tmp_path / "stale") as steps:
        steps.save(40, {"w": np.arange(3)}, metrics={"loss": 0})
    for host in hosts[1:3]:
        shutil.rmtree(next(host.glob("*/00000040")))
        shutil.copytree(tmp_path / "stale" / "00000040", next(host.iterdir()) / "00000040")
    shutil.rmtree(next(hosts[1].glob("*/00000040/data-*")))
    os.truncate(next(iter(copies([hosts[2]], objects(hosts[2])[0]))), 5)
    case(hosts, 30, "of its")
    hosts = job.hosts()  # all manifests except one are lost or damaged
    for host in hosts[:2]:
        next(host.glob("*/00000040/manifest.json")).unlink()
    flip(next(hosts[2].glob("*/00000040/manifest.json")))
    wipe(hosts[0])
    case(hosts, 40, "manifest")
    hosts = job.hosts()  # all processes see the folders of one host
    for number in (1, 2):
        shutil.move(hosts[number] / f"process-{number}", hosts[0])
    case([hosts[0]] * 4, 40, "INFO step 40 is complete in the local folders of 3 processes")
    case(job.hosts(), 30, "", step=30, layout="replicated")
    case(job.hosts(), 40, "complete in the local folders of 4", step=40)

    for found, (step, said) in zip(job.run(4), expected, strict=True):
        asked = found[0].get("latest") if said == "" else step
        assert asked == (40 if said == "" else step)
        require_step([{**one, "latest": step} for one in found], step)
        assert any(said in line for one in found for line in one["lines"]), (said, found)
    adopted = {(host / f"process-{n}" / "00000040" / "manifest.json").exists() for n, host in enumerate(job.hosts())}
    assert adopted == {True}


@pytest.mark.child
def test_a_process_is_asked_only_for_data_that_it_can_read(job: Job) -> None:
    """Processes see the same folder, or a copy of it with the same id, but can read different parts of it."""
    for number in range(0, 12, 3):  # only one process reads the damaged object; the others consider it valid
        hosts = job.hosts()
        for other in (1, 2, 3):
            shutil.move(hosts[other] / f"process-{other}", hosts[0])
        for file in copies(hosts, objects(hosts[0])[number]):
            flip(file)
        job.case([hosts[0]] * 2, 30)
    hosts = job.odd_hosts()  # a part of one host's folder was copied to another host
    for other in (1, 2, 3):
        shutil.move(hosts[other] / f"process-{other}", hosts[0])
    for copied in list(hosts[0].iterdir()):
        shutil.copytree(copied, hosts[1] / copied.name)
        for file in local_folders.files(hosts[1] / copied.name / "00000040")[::2]:
            file.unlink()
    job.case(hosts[:2], 40)
    for found, step in zip(job.run(2), [30] * 4 + [40], strict=True):
        require_step(found, step)


@pytest.mark.child
def test_only_missing_data_is_sent_and_only_to_the_process_that_lacks_it(job: Job) -> None:
    hosts = job.hosts()
    wipe(hosts[3])
    job.case(hosts, select="layer *")
    hosts = job.hosts()
    wipe(hosts[3])
    job.case(hosts, layout="replicated", options={"read": "shared"})
    layers = 4 * 96 * 512 * 2
    found, shared = job.run(4)
    require_step(found, 40)
    require_step(shared, 40)
    assert [one["got"] for one in found] == [0, 0, 0, layers // 4]
    assert layers // 4 <= sum(one["passed"] for one in found) <= 1.02 * layers // 4
    assert layers <= sum(one["read"] for one in found) <= 1.02 * layers, "each chunk is read once in the whole job"


@pytest.mark.child
def test_the_storage_s_step_counts_if_it_is_newer_or_another_save(job: Job, tmp_path: Path) -> None:
    hosts = job.hosts()
    shutil.copytree(job.saved / "00000040", job.path / "00000040")  # a different save of step 40
    job.case(hosts, 40)
    (found,) = job.run(4)
    require_step(found, 40)
    assert not any("local" in line for one in found for line in one["lines"])


@pytest.mark.child
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_no_process_waits_for_one_that_fails_in_the_middle(job: Job, fault: str) -> None:
    hosts = job.hosts()
    wipe(hosts[3])
    job.case(hosts, 40, fault=fault, layout="replicated", host_bytes=1 << 20)
    begun = time.monotonic()
    # If a process is killed while others wait for it in a collective, only JAX can end them, by default after 100 s.
    found = job.run(4, check=False, heartbeat_seconds=10)
    assert time.monotonic() - begun < 60
    if fault == "raise":
        assert "PeerFailedError: process 1 failed with RuntimeError: in the middle" in found[0][0]["error"]
