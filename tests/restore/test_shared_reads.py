"""Options(read="shared"): the job reads each chunk from the storage once, and all data reaches every process."""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from processes import PROGRAMS, RunProcesses
from servers import Bucket, Proxy, never
from strategies import chunks_of, stacks

import jaxckpt
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Layout, cell_shape, contains, grid_cells
from jaxckpt._model.stacks import Stack
from jaxckpt._restore.read_plan import WantedRows
from jaxckpt._restore.shared_reads import (
    READ_ALIGNMENT_BYTES,
    SharedRead,
    community_of,
    plan_shared_reads,
    share,
    split_into_shipments,
    take_over,
    wants_digest,
)

COUNT = 4
Sought = list[tuple[int, tuple[int, int], Layout]]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Stack], Sought]:
    """Some stacks, and ranges of rows that processes want in any layout."""
    found = draw(st.lists(stacks(), min_size=1, max_size=2))
    sought: Sought = []
    for number, stack in enumerate(found):
        edges = sorted(draw(st.sets(st.integers(0, stack.rows), min_size=1)))
        sought += [
            (number, rows, draw(strategies.layouts(stack.shape, COUNT))) for rows in itertools.pairwise([0, *edges])
        ]
    return found, [one for one in sought if one[1][0] < one[1][1]]


def wanted_by(process: int, found: list[Stack], sought: Sought) -> list[tuple[WantedRows, Layout]]:
    wanted: list[tuple[WantedRows, Layout]] = []
    for number, rows, layout in sought:
        shape = found[number].shape
        cells = grid_cells(shape, cell_shape(layout, shape))
        boxes = [box for (_, box), holders in zip(cells, layout.holders, strict=True) if process in holders]
        wanted.append((WantedRows(number, rows, tuple(boxes)), layout))
    return wanted


@given(jobs(), st.sampled_from([1, 200, 1 << 20]))
def test_each_chunk_is_read_once_and_all_wanted_data_arrives(job: tuple[list[Stack], Sought], host: int) -> None:
    found, sought = job
    wanted = [wanted_by(process, found, sought) for process in range(COUNT)]
    divided = [share(found, wanted[process], process) for process in range(COUNT)]
    assert len({wants_digest(one, host) for one in wanted}) == 1
    assert len({tuple(shared) for _, shared in divided}) == 1, "all go through the same communities in the same order"
    planned: dict[tuple[int, ...], list[SharedRead]] = {}
    reads = collections.Counter[tuple[int, tuple[int, ...]]]()
    for process, (own, shared) in enumerate(divided):
        arriving: dict[int, list[Box]] = collections.defaultdict(list)
        for want in own:
            arriving[want.stack] += [(want.rows, *box) for box in want.boxes]
        for partition, wants in shared.items():
            members = community_of(partition, process)
            if not wants:
                continue
            rounds = plan_shared_reads(found, wants, members, host, COUNT)
            key = (*members, -1, *map(hash, sorted(shared)), hash(partition))
            if key not in planned:
                planned[key] = rounds
                for one in itertools.chain.from_iterable(rounds):
                    assert one.reader in members
                    for box in one.read.boxes:
                        reads.update((one.step.stack, chunk) for chunk in chunks_of(found[one.step.stack], box))
            assert planned[key] == rounds, "all members have the same plan"
            for want in wants:
                arriving[want.stack] += [(want.rows, *box) for box in want.boxes]
        for want, _ in wanted[process]:
            for box in want.boxes:
                assert any(contains(there, (want.rows, *box)) for there in arriving[want.stack])
    assert max(reads.values(), default=0) <= 1


@given(jobs(), st.sampled_from([1, 200, 1 << 20]), st.data())
def test_pieces_hold_every_portion_once(job: tuple[list[Stack], Sought], max_bytes: int, data: st.DataObject) -> None:
    found, sought = job
    _, shared = share(found, wanted_by(0, found, sought), 0)
    for partition, wants in shared.items():
        members = community_of(partition, 0)
        for portions in plan_shared_reads(found, wants, members, max_bytes, COUNT) if wants else []:
            total, largest = sum(one.n_bytes for one in portions), max(one.n_bytes for one in portions)
            read = collections.Counter[int]()
            for one in portions:
                assert one.start == read[one.reader]
                assert not one.start % READ_ALIGNMENT_BYTES
                read[one.reader] += one.n_bytes
            assert max(read.values()) <= total / len(members) + largest
            assert_sent_once(portions, members, max_bytes, largest)
            late = data.draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
            numbers = [number for number, one in enumerate(portions) if one.reader in late]
            numbers = numbers[data.draw(st.integers(0, len(numbers))) :]
            done = [process for process in members if process not in late]
            after = take_over(portions, numbers, done)
            assert [one for one in portions if one in after] == after[: len(portions) - len(numbers)]
            assert {id(one.read) for one in after} == {id(one.read) for one in portions}
            assert all(one.reader in done for one in after[len(portions) - len(numbers) :])
            assert_sent_once(after, members, max_bytes, max(read.values()))


def assert_sent_once(portions: SharedRead, members: tuple[int, ...], max_bytes: int, largest: int) -> None:
    for process in members:
        own = [one for one in portions if one.reader == process]
        assert all(one.start + one.n_bytes <= other.start for one, other in itertools.pairwise(own))
    passed: SharedRead = []
    for piece in split_into_shipments(portions, members, max_bytes):
        passed += piece.portions
        assert set(piece.spans) == {one.reader for one in piece.portions}
        for reader, (first, end) in piece.spans.items():
            inside = [one for one in piece.portions if one.reader == reader]
            assert (first, end) == (inside[0].start, inside[-1].start + inside[-1].n_bytes)
            assert end - first <= 2 * max(largest, max_bytes // (2 * len(members)))
    assert sorted(map(id, passed)) == sorted(map(id, portions))


# In real processes ----------------------------------------------------------------------------------------


def bits(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random bits that are valid for a dtype."""
    rng = np.random.default_rng(len(shape))
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    if dtype.name in ("bool", "int2", "uint2", "int4", "uint4"):
        return (raw % 2).astype(dtype)
    return (raw % 16 if "float4" in dtype.name else raw).view(dtype)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "checkpoint"
    float32, bfloat16 = DTYPES["float32"], DTYPES["bfloat16"]
    shapes = [(16, 64), (24, 1000), (1000, 24), (7, 13, 5), (1,), (0, 4), (3, 0), (4096,), (8, 8, 8, 8), (2048, 96)]
    tree = {f"dtype {name}": bits(dtype, (8, 12)) for name, dtype in DTYPES.items()}
    tree |= {f"shape {shape}": bits(float32, shape) for shape in shapes}
    tree |= {f"small {number}": bits(bfloat16, (64,)) for number in range(40)}
    tree |= {f"layer {number}": bits(bfloat16, (96, 512)) for number in range(6)}
    tree["larger than a read"] = bits(bfloat16, (2048, 192))
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(3), 8)}
    tree |= {"scalar": np.array(3.5, np.float32), "host array": bits(float32, (40, 40)), "host number": 7, **keys}
    # Small sizes, so that this tree has many chunks, objects and rounds.
    jaxckpt.save(path, tree, options=jaxckpt.Options(chunk_bytes=16 << 10, object_bytes=128 << 10))
    return path


@pytest.mark.parametrize(("seed", "host_bytes", "accelerators"), [(0, 256 << 20, False), (1, 1 << 20, True)])
def test_every_bit_arrives_on_any_layout(
    run_processes: RunProcesses, checkpoint: Path, seed: int, host_bytes: int, accelerators: bool
) -> None:
    given = {"path": str(checkpoint), "seed": seed, "host_bytes": host_bytes, "accelerators": accelerators}
    done = run_processes(PROGRAMS / "shared_reads.py", processes=4, devices_per_process=2, args=given, timeout=280)
    figures = collections.defaultdict[tuple[str, str], list[list[int]]](list)
    for process in done:
        for layout, read, *counts in map(json.loads, process.stdout.splitlines()):
            figures[layout, read].append(counts)
    total = sum(leaf.nbytes for leaf in jaxckpt.open(checkpoint).leaves.values())
    for (layout, read), counts in figures.items():
        n_read, n_planned, received = (sum(count) for count in zip(*counts, strict=True))
        print(f"{layout}, {read}: {n_read / total:.3f} of the checkpoint's bytes read, {received / total:.3f} received")
        assert n_read <= n_planned <= 1.01 * n_read, (layout, read)
        if read == "shared":
            whole_job = layout in ("replicated", "fsdp", "hybrid", "columns", "random square")
            assert total <= n_read
            assert n_read <= 1.01 * total or (accelerators and not whole_job), layout
            assert received > 0
        elif layout == "replicated":
            assert 4 * total <= n_read <= 4.04 * total


def test_auto_reads_each_object_of_a_bucket_once(run_processes: RunProcesses, s3: Bucket, tmp_path: Path) -> None:
    value = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    tree = {"w": value, "empty": np.empty((0, 4), np.float32)}
    for path in (s3.url, tmp_path / "c"):
        jaxckpt.save(path, tree, options=jaxckpt.Options(object_bytes=32 << 10))
    s3.proxy.clear()
    paths = {"bucket": s3.url, "folder": str(tmp_path / "c")}
    done = run_processes(PROGRAMS / "auto_reads.py", processes=2, devices_per_process=2, args=paths)
    received = {"replicated": value.nbytes, "split": 0, "numpy": 0}  # without a sharding, a plan is of one process
    for process in done:
        assert json.loads(process.stdout) == {"bucket": received, "folder": dict.fromkeys(received, 0)}
    # 8 objects, restored 3 times; not 40 requests. Late ones may have been repeated.
    assert 3 * 8 <= s3.proxy.counted()["GET object"] < 32


@pytest.mark.parametrize(
    ("where", "mib", "specs", "is_shared"),
    [
        ("memory://auto", 70, P(), True),
        ("memory://auto", 64, P(), False),  # 60 MiB for each process
        ("memory://auto", 70, P(None, "data"), False),  # 4 MiB for each process
        ("memory://auto", 70, P("half"), False),  # 31 MiB for each process
        ("file://", 70, P(), False),
        ("", 70, P(), False),
    ],
)
def test_auto_shares_much_that_several_processes_need_from_a_bucket(
    tmp_path: Path, where: str, mib: int, specs: P, is_shared: bool
) -> None:
    path = where if where.startswith("memory") else f"{where}{tmp_path}/c"
    jaxckpt.save(path, {"w": np.broadcast_to(np.float32(1), (mib, 1 << 18))}, overwrite=True)
    mesh = {"half": 2, "data": 8}  # of 16 processes
    plans = {
        read: jaxckpt.open(path).plan(mesh=mesh, specs=specs, devices_per_process=1, options=jaxckpt.Options(read=read))
        for read in ("auto", "each", "shared")
    }
    assert plans["auto"] == plans["shared" if is_shared else "each"] != plans["each" if is_shared else "shared"]


def test_a_failure_or_disagreement_is_raised_by_all_processes(run_processes: RunProcesses, checkpoint: Path) -> None:
    given = {"path": str(checkpoint)}
    done = run_processes(PROGRAMS / "shared_failures.py", processes=3, devices_per_process=2, args=given)
    noted = [json.loads(process.stdout.splitlines()[-1]) for process in done]
    for process, one in enumerate(noted):
        failed = "" if process == 1 else "PeerFailedError: process 1 failed with "
        assert one["bad disk"].startswith(f"{failed}StorageError"), one
        assert "cannot read lea" in one["bad disk"]
        assert "this disk is bad" in one["bad disk"]
        for case in (
            "process 0 reads each",
            "process 1 reads each",
            "another target",
            "another selection",
            "another host_bytes",
            "another dtype",
            "another layout",
            "other names",
            "other names, shared",
            "other rules",
        ):
            assert one[case].startswith("PeersDisagreeError: the processes want different leaves"), (case, one[case])
        assert one["works"] == one["the same names"] == one["the same rules"] == "fine"


def tree_of(n_leaves: int, rows: int = 64) -> dict[str, Any]:
    """What programs/late_reads.py expects."""
    return {f"w{n}": np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024) + n for n in range(n_leaves)}


@pytest.mark.parametrize(("silent", "accelerators"), [((1,), False), ((0, 3), False), ((2,), True)])
def test_the_others_read_what_a_process_gets_no_answer_to(
    run_processes: RunProcesses, s3: Bucket, silent: tuple[int, ...], accelerators: bool
) -> None:
    jaxckpt.save(s3.url, tree_of(12), options=jaxckpt.Options(object_bytes=32 << 10, chunk_bytes=32 << 10))
    with Proxy(s3.proxy.endpoint) as deaf:
        deaf.on("GET object", never)
        endpoints = [(deaf if process in silent else s3.proxy).endpoint for process in range(4)]
        given = {"path": s3.url, "endpoints": endpoints, "accelerators": accelerators, "timeout_seconds": 60}
        done = run_processes(PROGRAMS / "late_reads.py", processes=4, devices_per_process=2, args=given, timeout=100)
        assert all(json.loads(process.stdout) == "restored" for process in done)
        assert deaf.counted()["GET object"]


def test_a_process_that_takes_over_and_gets_no_answer_hands_in_again(run_processes: RunProcesses, s3: Bucket) -> None:
    jaxckpt.save(s3.url, tree_of(1, rows=256), options=jaxckpt.Options(object_bytes=32 << 10, chunk_bytes=32 << 10))
    with Proxy(s3.proxy.endpoint) as deaf, Proxy(s3.proxy.endpoint) as soon_deaf:
        deaf.on("GET object", never)
        soon_deaf.on("GET object", never, skip=32 // 4)  # what it reads itself
        endpoints = [s3.proxy.endpoint, deaf.endpoint, soon_deaf.endpoint, s3.proxy.endpoint]
        given = {"path": s3.url, "endpoints": endpoints, "accelerators": False, "timeout_seconds": 60}
        done = run_processes(PROGRAMS / "late_reads.py", processes=4, devices_per_process=2, args=given, timeout=100)
        assert all(json.loads(process.stdout) == "restored" for process in done)


def test_others_read_the_only_object_if_its_reader_gets_no_answer(run_processes: RunProcesses, s3: Bucket) -> None:
    jaxckpt.save(s3.url, {"w0": np.arange(64, dtype=np.float32).reshape(8, 8)})
    with Proxy(s3.proxy.endpoint) as deaf:
        deaf.on("GET object", never)
        endpoints = [s3.proxy.endpoint, s3.proxy.endpoint, deaf.endpoint, s3.proxy.endpoint]
        given = {"path": s3.url, "endpoints": endpoints, "accelerators": False, "timeout_seconds": 20}
        done = run_processes(PROGRAMS / "late_reads.py", processes=4, devices_per_process=2, args=given, timeout=100)
        assert all(json.loads(process.stdout) == "restored" for process in done)
        assert deaf.counted()["GET object"]


def test_a_job_without_any_answer_fails_in_time(run_processes: RunProcesses, s3: Bucket) -> None:
    jaxckpt.save(s3.url, tree_of(1))
    with Proxy(s3.proxy.endpoint) as deaf:
        deaf.on("GET object", never)
        given = {"path": s3.url, "endpoints": [deaf.endpoint] * 2, "accelerators": False, "timeout_seconds": 5}
        done = run_processes(
            PROGRAMS / "late_reads.py", processes=2, devices_per_process=2, args=given, timeout=100, check=False
        )
        assert all("no bytes have moved for 5 s while reading from s3://" in process.stderr for process in done)
