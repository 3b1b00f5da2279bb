"""Checkpoints on S3 and Google Cloud Storage: saves, restores, lists, replacements, deletions, request counts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import processes
import pytest
import servers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from servers import Bucket, Exchange

import jaxckpt
from jaxckpt._store import bucket as _bucket

QUICK = jaxckpt.Options(storage={"retry_seconds": 2})


def tree(seed: int) -> dict[str, Any]:
    """A sharded, a replicated and a host leaf, and a number, on 8 devices."""
    mesh = Mesh(np.array(jax.devices()), ("a",))
    values = np.random.default_rng(seed).standard_normal((64, 48)).astype(np.float32)
    return {
        "w": jax.device_put(values, NamedSharding(mesh, P("a"))),
        "b": jax.device_put(values[0], NamedSharding(mesh, P())),
        "host": values[:, 1].copy(),
        "step": seed,
    }


def same(found: Any, wanted: Any) -> bool:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def data_folders(bucket: Bucket, below: str = "") -> set[str]:
    return {key.split("/")[0] for key in bucket.listed(below) if key.startswith("data-")}


def test_two_processes_save_two_restore_on_another_mesh_one_reads(
    bucket: Bucket, run_processes: processes.RunProcesses
) -> None:
    program = processes.PROGRAMS / "object_store.py"
    run_processes(program, processes=2, devices_per_process=4, args={"save": bucket.url}, word=processes.PASSED)
    saved = bucket.proxy.counted()
    objects = [key for key in bucket.listed() if "/c/" in key]
    assert saved["PUT object"] == len(objects), "each object is one request"
    assert saved["PUT manifest.json"] == 1
    assert not any(kind.startswith("HEAD") for kind in saved), "conditions need no HEAD requests"
    assert not saved["GET object"], "written objects are not read"

    bucket.proxy.clear()
    run_processes(program, processes=2, devices_per_process=4, args={"restore": bucket.url}, word=processes.PASSED)
    restored = bucket.proxy.counted()
    assert {kind for kind in restored if not kind.startswith(("GET", "HEAD", "LIST"))} == set(), "a restore only reads"

    bucket.proxy.clear()
    run_processes(program, processes=1, devices_per_process=1, args={"load": bucket.url}, word=processes.PASSED)
    read = bucket.proxy.counted()
    assert read["GET object"] <= 2 * len(objects)
    print(json.dumps({"save": saved, "restore": restored, "load_numpy": read, "objects": len(objects)}, indent=1))


def test_replacing_leaves_one_checkpoint(bucket: Bucket) -> None:
    jaxckpt.save(bucket.url, tree(1), options=QUICK)
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        jaxckpt.save(bucket.url, tree(2), options=QUICK)
    assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(1))
    jaxckpt.save(bucket.url, tree(2), overwrite=True, options=QUICK)
    assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(2))
    assert len(data_folders(bucket)) == 1


def test_in_the_background(bucket: Bucket) -> None:
    pending = jaxckpt.save_async(bucket.url, tree(1), options=QUICK)
    pending.wait(timeout_seconds=120)
    assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(1))


def test_steps_are_listed_kept_and_deleted(bucket: Bucket) -> None:
    with jaxckpt.Checkpointer(bucket.url, keep_last=2, options=QUICK) as steps:
        for step in (1, 2, 3):
            steps.save(step, tree(step))
        steps.wait()
        assert steps.steps() == [2, 3]
        assert same(steps.restore(), tree(3))
    assert not [key for key in bucket.listed("00000001/") if not key.endswith("/")], "a deleted step leaves nothing"
    with jaxckpt.Checkpointer(bucket.url, options=QUICK) as steps:
        assert steps.latest_step() == 3
        bucket.proxy.clear()
        assert steps.steps() == [2, 3]
    listings = bucket.proxy.counted()["LIST"]
    assert listings == 1, f"{listings} listings for the names of two steps"


def test_listing_steps_does_not_list_their_objects(bucket: Bucket) -> None:
    with jaxckpt.Checkpointer(bucket.url, options=QUICK) as steps:
        steps.save(1, tree(1))
        steps.wait()
        bucket.proxy.clear()
        steps.steps()
    named = [request.key for request in bucket.proxy.requests if request.method == "LIST"]
    assert named
    assert all(key.rstrip("/") != bucket.path for key in named), named


def test_the_remains_of_a_killed_save_are_swept(bucket: Bucket) -> None:
    arrived = threading.Event()

    def hold(exchange: Exchange) -> None:
        arrived.set()
        servers.never(exchange)

    bucket.proxy.on("PUT object", hold, skip=1)
    command = [str(processes.PROGRAMS / "save_in_pieces.py"), bucket.url]
    child = processes.start(command, processes.environment(8))
    try:
        while not arrived.wait(0.1) and child.poll() is None:
            pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)
    assert arrived.is_set(), "the save never wrote an object"
    bucket.proxy.clear()
    left = data_folders(bucket)
    assert len(left) == 1
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.open(bucket.url)
    # The note does not show that its writer is dead. After another manifest is published, the writer cannot publish.
    jaxckpt.save(bucket.url, tree(1), options=QUICK)
    jaxckpt.save(bucket.url, tree(2), overwrite=True, options=QUICK)
    assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(2))
    assert len(data_folders(bucket)) == 1
    assert not left & data_folders(bucket)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_savers_one_wins(bucket: Bucket, overwrite: bool) -> None:
    if overwrite:
        jaxckpt.save(bucket.url, tree(0), options=QUICK)
        bucket.proxy.clear()
    together = threading.Barrier(2)

    def meet(exchange: Exchange) -> None:
        together.wait(60)
        exchange.send(exchange.forward())

    bucket.proxy.on("PUT manifest.json", meet, times=2)
    trees = {1: tree(1), 2: tree(2)}

    def save(seed: int) -> bool:
        try:
            jaxckpt.save(bucket.url, trees[seed], overwrite=overwrite, options=QUICK)
        except jaxckpt.errors.CheckpointExistsError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        won = dict(zip(trees, pool.map(save, trees, timeout=200), strict=True))
    assert sorted(won.values()) == [False, True]
    winner = next(seed for seed, done in won.items() if done)
    assert same(jaxckpt.restore(bucket.url, options=QUICK), trees[winner])
    # The loser may leave its data, because a lost answer may mean that it published. The next save deletes it.
    jaxckpt.save(bucket.url, tree(3), overwrite=True, options=QUICK)
    assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(3))
    assert len(data_folders(bucket)) == 1


# The server executes the write, but sends an error or no answer. The retry then fails its condition because of the
# first try.
LOST = {"broken off": servers.lost, "HTTP 500": servers.applied(500), "HTTP 503": servers.applied(503)}


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("kind", ["PUT writer.json", "PUT other", "PUT object", "PUT manifest.json"])
def test_a_write_counts_even_if_its_answer_was_lost(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, kind: str, lost: str
) -> None:
    """The claim, the test of conditions, an object, and the publication, of a first save and of an overwrite."""
    for seed, times in enumerate((1, 2, 1)):
        monkeypatch.setattr(_bucket, "_verified_stores", set[str]())
        bucket.proxy.clear()
        bucket.proxy.on(kind, LOST[lost], times=times)
        jaxckpt.save(bucket.url, tree(seed), overwrite=seed > 0, options=QUICK)
        assert bucket.proxy.spoiled
        assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(seed))
        assert len(data_folders(bucket)) == 1


@pytest.mark.parametrize("kind", ["PUT writer.json", "PUT manifest.json"])
def test_a_conditional_write_counts_even_if_every_answer_is_an_error(bucket: Bucket, kind: str) -> None:
    for seed in range(2):
        bucket.proxy.on(kind, servers.applied(503))
        jaxckpt.save(
            bucket.url, tree(seed), overwrite=seed > 0, options=jaxckpt.Options(storage={"retry_seconds": 0.3})
        )
        bucket.proxy.clear()
        assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(seed))
        assert len(data_folders(bucket)) == 1


def test_a_rival_that_publishes_between_two_tries_wins(bucket: Bucket) -> None:
    """The first try published, but its answer was lost. Another save replaces the checkpoint before the second try."""
    rival = jaxckpt.Options(storage={"retry_seconds": 3})

    def replaced(exchange: Exchange) -> None:
        exchange.forward()
        jaxckpt.save(bucket.url, tree(2), overwrite=True, options=rival)
        exchange.reset()

    bucket.proxy.on("PUT manifest.json", replaced, times=1)
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        jaxckpt.save(bucket.url, tree(1), options=QUICK)
    assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(2))


@pytest.mark.parametrize("ignores", ["that a key does not exist", "that a key is unchanged", "all"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_slow_server_that_ignores_conditions_is_refused(bucket: Bucket, ignores: str, lost: bool) -> None:
    """A late or repeated request, as over a new connection, does not show that the server honors conditions."""
    ignorant = {
        "that a key does not exist": servers.uncreated,
        "that a key is unchanged": servers.unmatched,
        "all": servers.unconditional,
    }[ignores]
    arrivals = itertools.count()

    def late(exchange: Exchange) -> None:
        time.sleep(0.1 * (next(arrivals) % 4))
        ignorant(exchange)

    def late_and_lost(exchange: Exchange) -> None:
        exchange.send = lambda *_: exchange.reset()
        late(exchange)

    if lost:
        bucket.proxy.on("(HEAD|PUT) other", late_and_lost, times=3)
    bucket.proxy.on("(HEAD|PUT) other", late)
    with pytest.raises(jaxckpt.errors.StorageError, match="ignores the write condition"):
        jaxckpt.save(bucket.url, tree(1), options=QUICK)
    assert not bucket.listed(), "nothing is left"


@pytest.mark.parametrize("listings", [lambda proxy: servers.StaleListings(proxy, 5), servers.CachedListings])
def test_a_server_whose_listings_are_stale_is_refused(bucket: Bucket, listings: Callable[[Any], object]) -> None:
    def save_step() -> None:
        with jaxckpt.Checkpointer(f"{bucket.url}/run", options=QUICK) as steps:
            steps.save(1, tree(1))

    for save in (save_step, lambda: jaxckpt.save(f"{bucket.url}/one", tree(1), options=QUICK)):
        bucket.proxy.clear()
        listings(bucket.proxy)
        with pytest.raises(
            jaxckpt.errors.StorageError, match=r"wrote a key, but a listing right after that does not show it"
        ):
            save()
        assert not [key for key in bucket.listed() if "data-" in key], "nothing is left"
    bucket.proxy.clear()
    jaxckpt.save(f"{bucket.url}/one", tree(1), options=QUICK)
    assert same(jaxckpt.restore(f"{bucket.url}/one", options=QUICK), tree(1))


def test_an_error_soon_after_another_says_how_long_its_own_request_has_waited(s3: Bucket) -> None:
    options = jaxckpt.Options(storage={"retry_seconds": 0.3})
    s3.proxy.on(".*", servers.never)
    full, quick = "for about Options", "for 0.5 s, and before that for about Options"
    for expected in (full, quick):
        with pytest.raises(jaxckpt.errors.StorageError, match=f"{expected}.storage\\['retry_seconds'\\]=0.3"):
            jaxckpt.open(f"{s3.url}/one", options=options)


IMPATIENT = jaxckpt.Options(storage={"retry_seconds": 0.2}, timeout_seconds=1)
LIMIT_SECONDS = 15
"""Far above the limits of `IMPATIENT`, because the machine may be busy, and far below what tensorstore's tries take: at
30 s each, 90 s."""


def time_out(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a call that must raise an error for a silent server in time, like the first call that finds it silent."""
    monkeypatch.setattr(_bucket, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(_bucket, "_silent_until", {})
    start = time.monotonic()
    with pytest.raises(
        jaxckpt.errors.StorageError, match=r"the server has not answered, or only|no bytes have moved for"
    ):
        call()
    assert time.monotonic() - start < LIMIT_SECONDS


def test_every_call_to_a_silent_server_ends_in_time(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    one, run = f"{s3.url}/one", f"{s3.url}/run"
    jaxckpt.save(one, tree(1), options=QUICK)
    steps = jaxckpt.Checkpointer(run, options=IMPATIENT)
    for step in (1, 2):
        steps.save(step, tree(step))
        steps.wait()
    opened = jaxckpt.open(one, options=IMPATIENT)
    s3.proxy.on(".*", servers.never)
    # Few calls, because tensorstore sends at most 32 requests at the same time, and those without an answer count too.
    for call in (
        lambda: jaxckpt.save(f"{s3.url}/two", tree(2), options=IMPATIENT),
        lambda: jaxckpt.save(one, tree(2), overwrite=True, options=IMPATIENT),
        lambda: jaxckpt.save_async(f"{s3.url}/two", tree(2), options=IMPATIENT).wait(),
        lambda: jaxckpt.restore(one, options=IMPATIENT),
        lambda: jaxckpt.load_numpy(one, options=IMPATIENT),
        lambda: jaxckpt.open(one, options=IMPATIENT),
        lambda: opened["w"][3:9],
        lambda: jaxckpt.verify(one, options=IMPATIENT),
        lambda: jaxckpt.Run(run, options=IMPATIENT).steps(),
        lambda: jaxckpt.Checkpointer(run, options=IMPATIENT),
        lambda: steps.save(3, tree(3)),
        steps.latest_step,
        steps.restore,
        lambda: steps.delete(1),
    ):
        time_out(call, monkeypatch)
    s3.proxy.clear()
    assert same(jaxckpt.restore(one, options=QUICK), tree(1))
    assert jaxckpt.Run(run, options=QUICK).steps() == [1, 2]


@pytest.mark.parametrize(
    "kind", ["PUT writer.json", "PUT other", "PUT object", "PUT manifest.json", "verify: GET object"]
)
def test_a_call_ends_in_time_if_the_server_stops_answering(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """From this request on, including the cleanup."""
    jaxckpt.save(bucket.url, tree(1), options=QUICK)
    bucket.proxy.clear()
    monkeypatch.setattr(_bucket, "_verified_stores", set[str]())

    def stop(exchange: Exchange) -> None:
        bucket.proxy.on(".*", servers.never)
        servers.never(exchange)

    bucket.proxy.on(kind.removeprefix("verify: "), stop)
    if kind.startswith("verify"):
        time_out(lambda: jaxckpt.verify(bucket.url, options=IMPATIENT), monkeypatch)
    else:
        time_out(lambda: jaxckpt.save(bucket.url, tree(2), overwrite=True, options=IMPATIENT), monkeypatch)
    bucket.proxy.clear()
    assert same(jaxckpt.restore(bucket.url, options=QUICK), tree(1))


# The endpoint and token of gs:// are read once per process, so all tests use the same hidden token.
SECRETS = {"AWS_SESSION_TOKEN": "hidden-token", "AWS_SECRET_ACCESS_KEY": "hidden-secret"}
REFUSALS = {
    "forbidden": servers.status(403, "AccessDenied</Code><StringToSign>hidden-string</StringToSign><Code>"),
    "busy": servers.status(503),
    "broken": servers.reset,
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("operation", ["save", "restore", "steps"])
def test_an_error_names_the_url_and_no_secret(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, refusal: str, operation: str
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    options = jaxckpt.Options(storage={"retry_seconds": 0.5})
    bucket.proxy.on(".*", REFUSALS[refusal])
    with pytest.raises(jaxckpt.errors.StorageError) as caught:
        _attempt(operation, bucket.url, options)
    text = _traceback_text(caught.value)
    assert bucket.url in text
    assert "hidden" not in text
    assert "?" not in text
    assert "x-amz" not in text


@pytest.mark.parametrize("code", [401, 403])
def test_a_run_without_list_permission_is_not_empty(bucket: Bucket, code: int) -> None:
    with jaxckpt.Checkpointer(bucket.url, options=QUICK) as steps:
        steps.save(1, tree(1))
        steps.wait()
        bucket.proxy.on("(LIST|GET|HEAD).*", servers.status(code, "AccessDenied"))
        for ask in (steps.steps, steps.latest_step, lambda: steps.restore_or_init(lambda: tree(2))):
            with pytest.raises(jaxckpt.errors.StorageError, match=rf"{code}.*credentials are those of"):
                ask()
    run = jaxckpt.Run(bucket.url)
    for look in (run.steps, run.latest_step, run.open, run.restore):
        with pytest.raises(jaxckpt.errors.StorageError, match=str(code)):
            look()


def test_a_refused_connection_is_reported_plainly(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.setenv(name, f"http://user:hidden@127.0.0.1:{processes.free_port()}")
    with pytest.raises(jaxckpt.errors.StorageError) as caught:
        jaxckpt.save(bucket.url, tree(1), options=jaxckpt.Options(storage={"retry_seconds": 0.5}))
    assert bucket.url in str(caught.value)
    assert "hidden" not in _traceback_text(caught.value)


def test_a_bucket_that_does_not_exist(bucket: Bucket) -> None:
    url = f"{bucket.url.partition('://')[0]}://no-such-bucket-{uuid.uuid4().hex[:8]}/run"
    with pytest.raises(jaxckpt.errors.StorageError, match=f"{url}.*(NoSuchBucket|not exist|notFound|Not Found)"):
        jaxckpt.save(url, tree(1), options=QUICK)
    with pytest.raises(jaxckpt.JaxckptError, match=url):
        jaxckpt.restore(url, options=QUICK)


def test_a_url_with_a_query_is_refused_without_repeating_it(bucket: Bucket) -> None:
    for path in (f"{bucket.url}?token=hidden", f"{bucket.url}#hidden"):
        with pytest.raises(jaxckpt.JaxckptError) as caught:
            jaxckpt.save(path, tree(1), options=QUICK)
        assert "hidden" not in _traceback_text(caught.value)


def test_a_checkpoint_is_opened_and_read_lazily(bucket: Bucket) -> None:
    jaxckpt.save(bucket.url, tree(1), metadata={"note": "here"}, options=QUICK)
    found = jaxckpt.open(bucket.url)
    assert found.metadata == {"note": "here"}
    assert np.array_equal(found["w"][8:16], np.asarray(tree(1)["w"])[8:16])


def _attempt(operation: str, url: str, options: jaxckpt.Options) -> Mapping[str, Any] | None:
    if operation == "save":
        jaxckpt.save(url, tree(1), options=options)
        return None
    if operation == "restore":
        return jaxckpt.restore(url, options=options)
    with jaxckpt.Checkpointer(url, options=options) as steps:
        steps.steps()
    return None


def _traceback_text(error: BaseException | None) -> str:
    """The text of a traceback."""
    text = ""
    while error is not None:
        text += f"{type(error).__name__}: {error}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text
