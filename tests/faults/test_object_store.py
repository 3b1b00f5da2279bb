"""Object stores that are busy, drop connections, send too little or wrong data, answer late or never, lose answers, or
ignore conditions."""

from __future__ import annotations

import concurrent.futures
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import servers
import stores
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reliability import Fault
from servers import Bucket

import jaxckpt

# tensorstore reads these at its first request. They limit how long a server may be silent.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "5")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")

OPTIONS = jaxckpt.Options(storage={"retry_seconds": 2}, object_bytes=2048, chunk_bytes=512)
LIMIT_SECONDS = 100

# For each fault: the function, and the number of consecutive requests that it affects.
ONCE: dict[str, tuple[servers.Spoil, float]] = {
    "503": (servers.status(503), 1),
    "503 three times": (servers.status(503), 3),
    "500": (servers.status(500, "InternalError"), 1),
    "reset": (servers.reset, 1),
    "short body": (servers.short, 1),
    "half a body": (servers.halved, 1),
    "first byte flipped": (servers.flipped(0), 1),
    "byte flipped": (servers.flipped(0.4), 1),
    "last byte flipped": (servers.flipped(1), 1),
    "late": (servers.slow(1), 1),
    "no answer": (servers.never, 1),
}
FOR_EVER: dict[str, tuple[servers.Spoil, float]] = {
    "503 every time": (servers.status(503), float("inf")),
    "reset every time": (servers.reset, float("inf")),
    "short body every time": (servers.short, float("inf")),
    "half a body every time": (servers.halved, float("inf")),
}


def tree(seed: int) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    values = np.random.default_rng(seed).standard_normal((16, 48)).astype(np.float32)
    return {
        "w": jax.device_put(values, NamedSharding(mesh, P("a"))),
        "b": jax.device_put(values[:2].astype("bfloat16"), NamedSharding(mesh, P())),
        "step": 1000 + seed,
        "name": f"run {seed}",
    }


def same(found: Any, wanted: Any) -> bool:
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def save(url: str, value: Any, *, overwrite: bool = False) -> None:
    jaxckpt.save(url, value, overwrite=overwrite, options=OPTIONS)


def restore(url: str) -> Any:
    return jaxckpt.restore(url, options=OPTIONS)


def limited(what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call. Raises TimeoutError if it takes longer than faulty requests may delay it."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(what, *args, **kwargs).result(LIMIT_SECONDS)
    finally:
        pool.shutdown(wait=False)


def requests_of(bucket: Bucket, what: Callable[[], Any]) -> int:
    """The number of requests of an operation without faults."""
    bucket.proxy.clear()
    what()
    return len(bucket.proxy.requests)


def fresh(bucket: Bucket) -> Iterator[str]:
    """A new path for each round."""
    number = 0
    while True:
        number += 1
        yield f"{bucket.url}/{number}"


def below(bucket: Bucket, url: str) -> list[str]:
    """The keys below one round's path."""
    return bucket.listed(f"{url.removeprefix(bucket.url)[1:]}/")


@pytest.mark.fault(
    22,
    "503 k times and every time, reset, short or flipped body, late or no answer to each request of a save",
    "retried, or a typed error in bounded time; the old or the new checkpoint, complete",
    quick=5,
    full=120,
)
def test_any_request_of_a_save_goes_wrong(fault: Fault, bucket: Bucket) -> None:
    old, new = tree(1), tree(2)
    urls = fresh(bucket)
    url = next(urls)
    save(url, old)
    count = requests_of(bucket, lambda: save(url, new, overwrite=True))
    cases = [(number, name) for number in range(count) for name in ONCE | FOR_EVER]
    for number, name in fault.rounds(cases):
        url = next(urls)
        save(url, old)
        bucket.proxy.clear()
        spoil, times = (ONCE | FOR_EVER)[name]
        bucket.proxy.on(".*", spoil, skip=number, times=times)
        where = f"{name} at request {number}"
        try:
            limited(save, url, new, overwrite=True)
            saved = "saved"
        except TimeoutError:
            fault.silent(f"{where}: no end after {LIMIT_SECONDS} s")
            continue
        except jaxckpt.JaxckptError:
            saved = "typed error"
        if not bucket.proxy.spoiled:  # the number of requests depends on a race for the writer's note
            continue
        bucket.proxy.clear()
        found = restore(url)
        if same(found, new):
            fault.saw(f"{saved}; the new one" if saved == "saved" else f"{saved}; although the new one was published")
        elif same(found, old) and saved != "saved":
            fault.saw(f"{saved}; the old one")
        else:
            fault.silent(f"{where}: {saved}, and then neither the old checkpoint nor the new one")


@pytest.mark.fault(
    22,
    "the same faults in each request of a restore",
    "retried, or a typed error in bounded time; never wrong data",
    quick=5,
    full=80,
)
def test_any_request_of_a_restore_goes_wrong(fault: Fault, bucket: Bucket) -> None:
    wanted = tree(1)
    save(bucket.url, wanted)
    other = Mesh(np.array(jax.devices()[:4]), ("a",))
    reads: dict[str, Callable[[], Any]] = {
        "restore": lambda: restore(bucket.url),
        "restore on 4 devices": lambda: jaxckpt.restore(bucket.url, mesh=other, options=OPTIONS),
    }
    cases = [
        (number, name, way)
        for way, read in reads.items()
        for number in range(requests_of(bucket, read))
        for name in ONCE | FOR_EVER
    ]
    for number, name, way in fault.rounds(cases):
        bucket.proxy.clear()
        spoil, times = (ONCE | FOR_EVER)[name]
        bucket.proxy.on(".*", spoil, skip=number, times=times)
        where = f"{way}: {name} at request {number}"
        try:
            found = limited(reads[way])
        except TimeoutError:
            fault.silent(f"{where}: no end after {LIMIT_SECONDS} s")
        except jaxckpt.JaxckptError:
            fault.saw("typed error")
        else:
            if same(found, wanted):
                fault.saw("bit-exact")
            else:
                fault.silent(f"{where}: wrong data")


@pytest.mark.fault(
    23,
    "the answer to any request of a save, even the publishing one, is lost one to three times",
    "reports success; exactly one checkpoint",
    quick=6,
    full=None,
)
def test_lost_answers(fault: Fault, bucket: Bucket) -> None:
    old, new = tree(1), tree(2)
    urls = fresh(bucket)
    url = next(urls)
    first = requests_of(bucket, lambda: save(url, old))
    second = requests_of(bucket, lambda: save(url, new, overwrite=True))
    publishing = [
        (kind, times, replace) for kind in ("PUT manifest.json",) for times in (1, 2, 3) for replace in (0, 1)
    ]
    anywhere = [(number, 1, replace) for replace, count in ((0, first), (1, second)) for number in range(count)]
    for which, times, replace in fault.rounds(publishing + anywhere):
        url = next(urls)
        if replace:
            save(url, old)
        bucket.proxy.clear()
        if isinstance(which, str):
            bucket.proxy.on(which, servers.lost, times=times)
        else:
            bucket.proxy.on(".*", servers.lost, skip=which, times=times)
        where = f"{'replacing' if replace else 'saving'}, {which} lost {times} times"
        try:
            limited(save, url, new, overwrite=bool(replace))
        except TimeoutError:
            fault.silent(f"{where}: no end after {LIMIT_SECONDS} s")
            continue
        if not bucket.proxy.spoiled:  # as above
            assert which != "PUT manifest.json"
            continue
        bucket.proxy.clear()
        folders = {key.split("/")[0] for key in below(bucket, url) if key.startswith("data-")}
        if same(restore(url), new) and len(folders) == 1:
            fault.saw("success; one checkpoint")
        else:
            fault.silent(f"{where}: success was reported; data folders: {len(folders)}")


def saves_are_refused(fault: Fault, bucket: Bucket, spoils: list[tuple[str, Callable[[], None]]]) -> None:
    """Check that a server that ignores conditions is refused by each way to save, and that existing data stays."""
    old, new = tree(1), tree(2)
    urls = fresh(bucket)

    def in_background(url: str, replace: bool) -> None:
        jaxckpt.save_async(url, new, overwrite=replace, options=OPTIONS).wait(LIMIT_SECONDS)

    def as_step(url: str, replace: bool) -> None:
        assert not replace
        with jaxckpt.Checkpointer(url, background=False, options=OPTIONS) as steps:
            steps.save(1, new)

    ways: dict[str, Callable[[str, bool], None]] = {
        "save": lambda url, replace: save(url, new, overwrite=replace),
        "save_async": in_background,
        "Checkpointer": as_step,
    }
    kinds = [(way, replace) for way in ways for replace in (False, True) if (way, replace) != ("Checkpointer", True)]
    cases = [(spoil, *kind) for spoil in spoils for kind in kinds]
    for (name, begin), way, replace in fault.rounds(cases):
        url = next(urls)
        bucket.proxy.clear()
        if replace:
            _put_checkpoint(bucket, url, old)
        begin()
        where = f"{way}, {name}, {'replacing' if replace else 'new'}"
        try:
            limited(ways[way], url, replace)
        except jaxckpt.errors.StorageError as error:
            names_conditions = "condition" in str(error)
            bucket.proxy.clear()
            if replace and not same(restore(url), old):
                fault.silent(f"{where}: refused, but the old checkpoint is gone")
            elif not replace and any(key.endswith("manifest.json") for key in below(bucket, url)):
                fault.silent(f"{where}: refused, but published")
            else:
                fault.saw("refused, with the reason" if names_conditions else "refused, with another reason")
        else:
            fault.silent(f"{where}: saved")


def _put_checkpoint(bucket: Bucket, url: str, value: Any) -> None:
    """Save locally, then copy key by key, without conditional requests."""
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/ckpt", value, options=OPTIONS)
        bucket.copy_from(f"file://{folder}/ckpt", url)


@pytest.mark.fault(
    24,
    "a server that ignores conditions of PUTs, or of all requests",
    "refused, with the reason",
    quick=4,
    full=None,
)
def test_a_server_that_ignores_conditions(fault: Fault, bucket: Bucket) -> None:
    saves_are_refused(
        fault,
        bucket,
        [
            ("of PUTs", lambda: bucket.proxy.on("PUT .*", servers.unconditional)),
            ("of all", lambda: bucket.proxy.on(".*", servers.unconditional)),
            ("If-Match of PUTs", lambda: bucket.proxy.on("PUT .*", servers.unmatched)),
        ],
    )


@pytest.mark.child
@pytest.mark.fault(24, "s3://: s3rver, which ignores conditions", "refused, with the reason", quick=1, full=None)
def test_s3rver(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fault.campaign:
        pytest.skip("npm brings it in the campaign only")
    try:
        with stores.s3rver(tmp_path) as server, servers.bucket(server, monkeypatch) as bucket:
            saves_are_refused(fault, bucket, [("s3rver", lambda: None)])
    except LookupError as error:
        pytest.skip(str(error))
