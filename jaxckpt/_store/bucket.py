"""A checkpoint on an object store: claimed and published by conditional writes.

An object store writes a key completely or not at all, and supports writes that are conditional on the content of the
key. It has no locks, no renames and no folders. Therefore:

- A conditional write of the manifest publishes a save.
- One key, the note of the writer, decides whether a save may publish. The writer changes it from "writing" to
  "publishing", publishes, and changes it to "published". A process that deletes the data first changes it to "swept".
  Each change is conditional on the content that was read, so one of two rivals fails.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import tensorstore as ts

from jaxckpt._model.file_names import COPY, MANIFEST, WRITER, data_folder, is_data_folder, may_reference_data
from jaxckpt._model.grid import Box
from jaxckpt._model.object_index import ReadRange
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options, retry_seconds
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.progress import log, log_kept, log_swept
from jaxckpt._pipeline.threads import POLL_SECONDS
from jaxckpt._pipeline.workers import MappedWork, note_progress
from jaxckpt._store.fetching import EncodingWriter, FetchingReader, objects_to_fetch
from jaxckpt._store.hedging import HedgedKeys, HedgedRead, Server
from jaxckpt._store.load_manifest import find_lost, manifest_identity, overtaken_error, parse_note
from jaxckpt._store.storage_errors import clean_error_text, translate_array_errors
from jaxckpt._store.store import MAX_FILE_BYTES, ObjectRecord, Store
from jaxckpt._store.tensors import ROOT_CONTEXT
from jaxckpt.errors import DataError, InputError, StorageError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_Stamp = ts.KvStore.TimestampedStorageGeneration


class _Request(Protocol[T_co]):
    """A request that was sent."""

    def result(self, timeout: float | None = None) -> T_co: ...

    def cancel(self) -> object: ...


MARKS = "_steps/"
"""Keys below this prefix (marks) name the folders of a directory that hold checkpoints. Listing all keys instead would
cost one request per thousand objects. A mark is written before its checkpoint is published, so it proves nothing."""

SCHEMES = ("s3", "gs", "memory", "http", "https")

_BUCKET = "{bucket}"
_PROBE = "probe"
_RACERS = 4
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.1, 5.0
_STALLED_SECONDS = 30
_MAX_RETRIES = 100_000

_UNPUBLISH_TRIES = 10

_ANSWER_SECONDS = 2.0
"""How long the last try of a request may take in addition to `Options.storage['retry_seconds']`."""

_SILENT_SECONDS, _QUICK_SECONDS = 3.0, 0.5
"""For `_SILENT_SECONDS` after a server has been silent for the full time, each request may take `_QUICK_SECONDS`.
Otherwise a call that cleans up after an error would wait for the full time again, once per request."""


_WARNING_SECONDS = 3.0
"""After so long without an answer from a server, one warning says that requests to it are retried."""

_SETTINGS_ERROR = re.compile(
    r"resolve host|[Cc]ould not connect|[Cc]ouldn't connect|does not exist|PermanentRedirect"
    r"|AuthorizationHeaderMalformed|HTTP (code )?30[1278]"
)
"""Texts of errors that a wrong endpoint or region causes."""

_REFUSED = re.compile(r"HTTP (code )?40[13]\b")
"""Texts of errors that wrong, missing or insufficient credentials cause."""

_MOST_REQUESTS, _SPARE_REQUESTS = 32, 8
"""How many requests tensorstore has running at a time, and how many reads that were sent again may run."""

_verified_stores: set[str] = set()
"""The specs of stores that are known to honor conditions, and to list what was written."""

# By spec and `retry_seconds`; times of the monotonic clock.
_last_answers: dict[tuple[str, float], float] = {}
_silent_until: dict[tuple[str, float], float] = {}
"""Until when a store that has been silent for the full time counts as silent."""

_warned: set[tuple[str, float]] = set()
"""The servers of which a warning was logged, as in `_last_answers`."""

_MAX_SIZE = 1 << 50
"""More bytes than any object of a store has."""

_PROBE_BYTES, _PROBES = 1 << 16, 16
"""The end of an object whose size is not known is located to within so many bytes, by so many requests at a time."""

_SIZE = re.compile(r"(?:total size |value of size |<ActualObjectSize>)(\d+)")


@dataclass(frozen=True, slots=True)
class _Beyond:
    """A range was requested that ends after the end of an object."""

    size: int | None
    """The bytes of the object, if the answer says so."""


@functools.cache
def _context(retry_seconds: float) -> ts.Context:
    # Delays double up to the longest delay. The number of retries follows from the time.
    delay, waited, retries = _FIRST_DELAY_SECONDS, 0.0, 0
    while waited + delay <= retry_seconds and retries < _MAX_RETRIES:
        waited += delay
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
        retries += 1
    settings = {
        "max_retries": max(1, retries),
        "initial_delay": f"{_FIRST_DELAY_SECONDS}s",
        "max_delay": f"{_LONGEST_DELAY_SECONDS}s",
    }
    # Otherwise tensorstore never retries a transfer that has stopped. It reads these variables only once, so the limit
    # of a request with a small result is enforced by `Bucket._await`.
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(_STALLED_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_STALLED_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    return ts.Context(
        {"s3_request_retries": settings, "gcs_request_retries": settings, "http_request_retries": settings},
        parent=ROOT_CONTEXT,
    )


@functools.lru_cache(maxsize=64)
def _open_store(spec: str, retry_seconds: float, limit: int | None = None, number: int = 0) -> ts.KvStore:
    """The whole store. With `limit`, its requests count separately from those of other limits and numbers."""
    # Cached for all paths of a bucket, because each opening looks up the credentials again.
    context = _context(retry_seconds)
    if limit is not None:
        names = [f"{driver}_request_concurrency" for driver in ("s3", "gcs", "http")]
        context = ts.Context({name: {"limit": limit} for name in names}, parent=context)
    with translate_array_errors("cannot open the object store"):
        return ts.KvStore.open(json.loads(spec), context=context).result()


@functools.cache
def _server(spec: str) -> Server:
    settings = json.loads(spec)
    name = f"{settings['driver']}_request_concurrency"
    match settings.get(name):
        case {"limit": int(limit)}:
            return Server(limit)
        case _:
            limit = os.environ.get(f"TENSORSTORE_{name.upper()}", "")
            return Server(int(limit) if limit.isdecimal() else _MOST_REQUESTS)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The keys of one checkpoint on an object store."""

    url: str

    spec: str
    """tensorstore's spec of the whole store, without a path, as JSON."""

    path: str
    """Prefix of all keys of this checkpoint."""

    retry_seconds: float

    fetch_bytes: int
    """Largest object, in bytes, that is fetched whole."""

    @classmethod
    def at(cls, url: str, options: Options) -> Self:
        storage = dict(options.storage or {})
        seconds = retry_seconds(storage.pop("retry_seconds", None))
        spec = _spec_of(url, storage)
        path = spec.pop("path", "")
        return cls(url, json.dumps(spec), path, seconds, options.host_bytes // 4)

    def require_writable(self) -> None:
        if json.loads(self.spec)["driver"] == "http":
            raise StorageError(
                errno.EROFS,
                f"cannot write to {self.url}: a URL of http:// or https:// is read-only, because HTTP does not support"
                " the writes that a save needs. Give a local path or a URL of an object store",
            )

    # Small files -----------------------------------------------------------------------------------------

    def read(self, key: str, count: int | None = None) -> bytes | None:
        return (self.read_whole(key) if count is None else self.read_range(key, 0, count))[0]

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        """Requests all files concurrently."""
        begun = [(key, self._begin_read(key)) for key in keys]
        return [self._await_read(key, pending)[0] for key, pending in begun]

    def read_whole(self, key: str) -> tuple[bytes | None, bytes]:
        """(content of a key, its generation for a conditional write)."""
        return self._await_read(key, self._begin_read(key))

    def _await_read(self, key: str, pending: HedgedRead) -> tuple[bytes | None, bytes]:
        result = self._await("read", key, pending)
        if len(result.value) > MAX_FILE_BYTES:
            raise DataError(f"{self.url}/{key} is over {MAX_FILE_BYTES} bytes: jaxckpt writes no file this large")
        return result.value if result.state == "value" else None, result.stamp.generation

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        self._require_applied(key, self._await("write", key, self._keys.write(key, content)))

    def _begin_put(self, key: str, content: bytes, digest: str) -> Pending[ObjectRecord]:
        """Start to write an object."""
        record = ObjectRecord(len(content), digest)
        return MappedWork(self._keys.write(key, content), functools.partial(self._await_write, key, record))

    def _await_write(self, key: str, record: ObjectRecord, pending: Pending[_Stamp]) -> ObjectRecord:
        with self._translate_errors("write", key):
            self._require_applied(key, pending.result())
        return record

    def _require_applied(self, key: str, stamp: _Stamp) -> None:
        if not stamp.generation:  # as for a failed condition, although this write has none
            raise StorageError(errno.EIO, f"cannot write {self.url}/{key}: the server refused it (HTTP 412)")

    def replace(self, key: str, content: bytes, *, sync: bool = False) -> None:
        self.put(key, content, sync=sync)

    def remove(self, key: str) -> None:
        self._await("delete", key, self._keys.write(key, None))

    # Objects ----------------------------------------------------------------------------------------------

    can_link = False  # deletion would have to count references

    def link(self, source: Store, old: str, new: str, length: int, *, sync: bool) -> None:
        raise StorageError(errno.EOPNOTSUPP, f"{self.url} has no links")

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> EncodingWriter:
        return EncodingWriter(
            f"{self.url}/{data}", stack, lambda key, content, digest: self._begin_put(f"{data}/{key}", content, digest)
        )

    def array_reader(
        self, data: str, stack: Stack, stored: Mapping[str, tuple[int, str]], plan: Iterable[Sequence[Box]] = ()
    ) -> FetchingReader:
        below = f"{data}/{stack.name}/"
        base = {**json.loads(self.spec), "path": f"{self.path}{below}"}
        fetched = objects_to_fetch(stack, stored, plan, self.fetch_bytes)
        return FetchingReader(
            f"{self.url}/{below}", self._keys_to_read(below), base, _context(self.retry_seconds), stack, fetched
        )

    def check_lengths(self, lengths: Mapping[str, int]) -> dict[str, str]:
        """One request per object, for its last byte."""
        reads = {key: self._begin_read(key, slice(max(0, length - 1), None)) for key, length in lengths.items()}
        problems = {key: self._length_problem(key, read, lengths[key]) for key, read in reads.items()}
        return {key: problem for key, problem in problems.items() if problem}

    def _length_problem(self, key: str, pending: HedgedRead, length: int) -> str | None:
        try:
            tail = self._await("read", key, pending, reading=True)
        except DataError:  # beyond its end
            return f"is shorter than the expected {length} bytes"
        if tail.state != "value":
            return "is missing"
        size = max(0, length - 1) + len(tail.value)
        return None if size == length else f"is {size} bytes long, expected {length}"

    @contextlib.contextmanager
    def range_reader(self, key: str) -> Generator[ReadRange]:
        def read(start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
            pending = self._begin_read(key, slice(start, stop))
            result = self._await("read", key, pending, reading=True)
            if len(result.value) != stop - start:
                raise DataError(f"{self.url}/{key} was truncated while it was being read")
            return np.frombuffer(result.value, np.uint8)

        yield read

    # Files of other libraries -----------------------------------------------------------------------------

    def existing(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that exist. Requests all concurrently."""
        return [key for key, generation in self.generations(keys).items() if generation is not None]

    def generations(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """The generation of each key, None if it does not exist. Requests all concurrently."""
        reads = {key: self._begin_read(key, slice(0, 0)) for key in keys}
        results = {key: self._await("look at", key, read) for key, read in reads.items()}
        return {key: result.stamp.generation if result.state == "value" else None for key, result in results.items()}

    def read_range(self, key: str, start: int, stop: int) -> tuple[bytes | None, bytes]:
        """(the bytes of a key from `start` to `stop`, fewer only at its end; None if it does not exist, the generation
        of the key, empty if nothing was read)."""
        if start >= stop:
            return b"", b""
        result = self._read_range(key, start, stop)
        if isinstance(result, _Beyond):
            size = self.size(key) if result.size is None else result.size
            if size <= start:
                return b"", b""
            result = self._read_range(key, start, size)
            if isinstance(result, _Beyond):
                raise DataError(f"{self.url}/{key} was truncated while it was being read")
        return result.value if result.state == "value" else None, result.stamp.generation

    def _read_range(self, key: str, start: int, stop: int) -> ts.KvStore.ReadResult | _Beyond:
        return self._await_range(key, self._begin_read(key, slice(start, stop)), start)

    def _await_range(self, key: str, pending: HedgedRead, start: int) -> ts.KvStore.ReadResult | _Beyond:
        """The result of a read from `start`."""
        with self._translate_errors("read", key):
            try:
                return self._answer(pending, self._answer_seconds)
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
                size = _SIZE.search(str(error))
                # A server has no byte of an empty object, and answers as for any offset beyond the end.
                return _Beyond(int(size[1]) if size else 0 if start == 0 else None)

    def size(self, key: str) -> int:
        """The bytes of a key. One request if the server answers with its size, otherwise dozens: tensorstore does not
        ask for it. Raises DataError if the key does not exist, StorageError if it changes in the meantime."""
        beyond = self._read_range(key, _MAX_SIZE, _MAX_SIZE + 1)
        if isinstance(beyond, ts.KvStore.ReadResult):
            raise DataError(f"{self.url}/{key} is missing")
        if beyond.size is not None:
            return beyond.size
        # The end is between two offsets, one of which has a byte.
        low, high = 0, _MAX_SIZE
        offsets = [1 << power for power in range(0, _MAX_SIZE.bit_length(), 2)]
        while high - low > _PROBE_BYTES:
            for offset, probe in zip(offsets, self._have_bytes(key, offsets), strict=True):
                low, high = (max(low, offset), high) if probe else (low, min(high, offset))
            if low >= high:
                raise self._changed(key)
            step = max(1, (high - low) // _PROBES)
            offsets = list(range(low + step, high, step))
        end = self._read_range(key, low, high + 1)
        if not isinstance(end, _Beyond) or end.size is None:
            raise self._changed(key)
        return end.size

    def _changed(self, key: str) -> StorageError:
        return StorageError(errno.ESTALE, f"{self.url}/{key} was replaced or deleted while it was read: open it again")

    def _have_bytes(self, key: str, offsets: Sequence[int]) -> list[bool]:
        """Whether a key has a byte at each offset."""
        reads = [self._begin_read(key, slice(offset, offset + 1)) for offset in offsets]
        results = [self._await_range(key, read, offset) for offset, read in zip(offsets, reads, strict=True)]
        return [not isinstance(result, _Beyond) and result.state == "value" for result in results]

    def tensorstore(self) -> tuple[dict[str, Any], ts.Context]:
        """tensorstore's spec of this folder, and the context of its requests."""
        return {**json.loads(self.spec), "path": self.path}, _context(self.retry_seconds)

    # Publication ------------------------------------------------------------------------------------------

    def begin_save(self, save_id: str, previous: bytes | None) -> tuple[None, bool]:
        data = data_folder(save_id)
        key = f"{data}/{WRITER}"
        note = {"state": "writing", "save_id": save_id, "host": socket.gethostname(), "pid": os.getpid()}
        content = json.dumps({**note, "replaces": manifest_identity(previous)}).encode()
        if not self._write_if_unchanged(key, self.read_whole(key)[1], content):
            raise StorageError(errno.EEXIST, f"cannot create {self.url}/{key}: it already exists")
        try:
            self._require_guarantees(data)
        except BaseException:
            with contextlib.suppress(StorageError, DataError):  # must not hide the reason
                self.remove(f"{data}/{_PROBE}")  # by name, because a listing may not show it
                self.remove(key)
                self.delete(data)
            raise
        return None, False

    def _write_if_unchanged(self, key: str, generation: bytes, content: bytes) -> bool:
        """Write a key if its content is still what was read with `generation`. `content` must be unique to this
        writer."""
        try:
            stamp = self._await("write", key, self._keys.write(key, content, if_equal=generation))
        except StorageError:
            with contextlib.suppress(StorageError, DataError):
                if self.read(key) == content:  # the server reported an error but did the write
                    return True
            raise
        # An empty generation means that the condition failed, or that a first try succeeded and its answer was lost.
        return bool(stamp.generation) or self.read(key) == content

    def _transition(self, data: str, before: Collection[str], after: str) -> bool:
        """Change the note of a writer from one state to another, unless another process was faster."""
        key = f"{data}/{WRITER}"
        content, generation = self.read_whole(key)
        note = parse_note(content)
        if content is not None and not note:
            raise StorageError(errno.EIO, f"cannot read {self.url}/{key}: it is not a valid writer's note")
        if note.get("state") not in before:
            return note.get("state") == after
        return self._write_if_unchanged(key, generation, json.dumps({**note, "state": after}).encode())

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def unlock(self, handle: int) -> None:
        pass

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        current, generation = self.read_whole(MANIFEST)
        if current != previous or not self._transition(data, ["writing"], "publishing"):
            raise overtaken_error(self.url)
        self.put(f"{data}/{COPY}", manifest)
        if not self._write_if_unchanged(MANIFEST, generation, manifest):
            raise overtaken_error(self.url)
        self._require_unswept(data, manifest, previous)

    def republish(self, data: str, manifest: bytes, previous: bytes, *, sync: bool) -> None:
        current, generation = self.read_whole(MANIFEST)
        if current != previous:
            raise overtaken_error(self.url)
        content, of_copy = self.read_whole(f"{data}/{COPY}")
        if content is not None:
            self._write_if_unchanged(f"{data}/{COPY}", of_copy, manifest)
        if not self._write_if_unchanged(MANIFEST, generation, manifest):
            raise overtaken_error(self.url)

    def publish_copy(self, data: str, copy: bytes, damaged: bytes | None, *, sync: bool) -> None:
        current, generation = self.read_whole(MANIFEST)
        if current != damaged or not self._write_if_unchanged(MANIFEST, generation, copy):
            raise overtaken_error(self.url)
        if self.read(f"{data}/{COPY}") is None:  # the checkpoint was deleted in the meantime
            self._withdraw(copy)
            raise overtaken_error(self.url, was_deleted=True)

    def _withdraw(self, manifest: bytes) -> None:
        """Delete the manifest that was just published, unless another one has replaced it."""
        current, generation = self.read_whole(MANIFEST)
        if current == manifest:
            self._await("delete", MANIFEST, self._keys.write(MANIFEST, None, if_equal=generation))

    def _require_unswept(self, data: str, manifest: bytes, previous: bytes | None) -> None:
        """Withdraw the manifest that was just published if its data was swept in the meantime.

        That can happen only if this save found no checkpoint to replace: in the meantime another save was published,
        swept this data, and was itself deleted. If the note cannot be read, the manifest stays.
        """
        with contextlib.suppress(StorageError):
            if self._transition(data, ["publishing"], "published"):
                return
        content = self.read(f"{data}/{WRITER}")
        if previous is not None or (content is not None and parse_note(content).get("state") != "swept"):
            return
        self._withdraw(manifest)
        self.remove(f"{data}/{COPY}")  # written after the sweep
        raise overtaken_error(self.url)

    def unpublish(self, *, sync: bool) -> None:
        """A save that publishes in the meantime is deleted too."""
        for _ in range(_UNPUBLISH_TRIES):
            content, generation = self.read_whole(MANIFEST)
            for name in (name for name, key in self._data_keys() if key == COPY):
                self.remove(f"{name}/{COPY}")
            if content is None:
                return
            # Without the condition, a checkpoint whose copy was written after the listing would lose its manifest only.
            stamp = self._await("delete", MANIFEST, self._keys.write(MANIFEST, None, if_equal=generation))
            if stamp.generation or self.read(MANIFEST) is None:
                return
        raise StorageError(errno.EBUSY, f"cannot delete the checkpoint at {self.url}: other processes save there")

    def published_data(self) -> list[str]:
        keys = self._data_keys()  # in order, so a note is looked for after its copy
        with_note = {name for name, key in keys if key == WRITER}
        copies = (name for name, key in keys if key == COPY)
        return [name for name in copies if name not in with_note or self._has_published(name)]

    def _has_published(self, data: str) -> bool:
        """Whether the note of a writer, which was killed before it deleted the note, says that it has published."""
        return parse_note(self.read(f"{data}/{WRITER}")).get("state") == "published"

    def discard(self, data: str) -> None:
        """Keeps the data if the write of the manifest had no response, because the manifest may still appear. A later
        sweep can delete the data. Without a note, a sweep deleted the data while this save wrote more."""
        if self._transition(data, ["writing"], "swept") or self.read(f"{data}/{WRITER}") is None:
            self.delete(data)

    def clear(self, *, evict: bool = True) -> None:
        """A live writer learns from its note that its data is gone. Nothing shows whether a writer is alive."""
        if evict:
            self.sweep(None, evict=True)

    def sweep(self, current: str | None, *, evict: bool = False) -> bool:
        """A save that started from a manifest other than the current one can never publish. With `evict`, no other save
        can."""
        left = False
        for name in sorted({name for name, _ in self._data_keys()} - {current}):
            content = self.read(f"{name}/{WRITER}")
            # Read last, because this folder may have been published since the listing.
            manifest = self.read(MANIFEST)
            note = parse_note(content)
            if may_reference_data(manifest, name) or (content is not None and not note):  # or its writer is unknown
                left = True
                continue
            no_writer = content is None or note.get("state") in ("published", "swept")
            outdated = evict or note.get("replaces") != manifest_identity(manifest)
            if manifest is None and no_writer and name in find_lost(self):
                log_kept(self.url, name)
                left = True
            elif no_writer or (outdated and self._transition(name, ["writing", "publishing"], "swept")):
                self.delete(name)
                if not evict:
                    log_swept(self.url, name)
            else:
                left = True
        return left

    def _data_keys(self) -> list[tuple[str, str]]:
        """The data folder and the rest of each key that a save has written, in the order of a listing."""
        keys = (f"data-{key}".partition("/") for key in self.keys_below("data-"))
        return [(name, rest) for name, _, rest in keys if is_data_folder(name)]

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Also corrects the note of a writer that was killed right after it published."""
        named = {stack.name for stack in stacks}
        folder, keys = self.child(data), self.keys_below(f"{data}/")
        if WRITER in keys:
            with contextlib.suppress(StorageError):  # no permission
                self._transition(data, ["publishing"], "published")
        for name in {key.partition("/")[0] for key in keys if "/" in key}:
            if name not in named:
                folder.delete(name)

    def sync_folders(self, data: str, keys: Iterable[str]) -> None:
        pass  # a completed write is durable

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        pass

    def _require_guarantees(self, data: str) -> None:
        """Raise StorageError if the server ignores the conditions of writes, or if a listing does not show a key that
        was just written. Runs once per process and bucket.

        Several writes race to create a key, and then to replace it. Each time at most one may succeed. On a server that
        ignores conditions all succeed, in any order and with any number of retries. The race may also expose a server
        that compares and writes in two separate steps. The key is listed before and after it is written, because a
        cache may answer a listing that it has seen.
        """
        if self.spec in _verified_stores:
            return
        key, folder = f"{data}/{_PROBE}", f"{data}/"
        self.keys_below(folder)
        google, other = ("ifGenerationMatch=0", "ifGenerationMatch"), ("If-None-Match", "If-Match")
        for condition in google if self._is_google else other:
            if self._race(key) > 1:
                raise self._unfit_server_error(
                    data,
                    f"the server ignores the write condition {condition}. Without it, two saves could publish at once"
                    " and mix. Use a server that honors it",
                )
        if _PROBE not in self.keys_below(folder):
            raise self._unfit_server_error(
                data,
                "the server wrote a key, but a listing right after that does not show it. With such a server, a job"
                " could miss its newest step and start from scratch. Use a server, without a cache in between, that"
                " lists every key from the moment it is written",
            )
        self.remove(key)
        _verified_stores.add(self.spec)

    def _unfit_server_error(self, data: str, reason: str) -> Exception:
        """The error of a server that lacks a guarantee, unless a sweep of the probe's folder explains what was seen."""
        if parse_note(self.read(f"{data}/{WRITER}")).get("state") != "writing":
            return overtaken_error(self.url)
        return StorageError(
            errno.EOPNOTSUPP, f"cannot save to {self.url}: {reason}, as Amazon S3 and Google Cloud Storage do"
        )

    def _race(self, key: str) -> int:
        """Write a key several times concurrently, on condition of its current content. Returns how many succeeded."""
        generation = self.read_whole(key)[1]
        # Each write has different content, because on S3 the generation is a digest of the content.
        racers = [self._keys.write(key, uuid.uuid4().hex, if_equal=generation) for _ in range(_RACERS)]
        return sum(bool(self._await("write", key, racer).generation) for racer in racers)

    # Folders ----------------------------------------------------------------------------------------------

    def absolute(self) -> Self:
        return self

    def link_target(self) -> None:
        return None

    def is_file(self) -> bool:
        return False  # a key of that name does not exclude keys below it

    def names(self) -> list[str]:
        """Costs one request per thousand keys below."""
        # "" is the key of the folder itself, which S3's console creates.
        return sorted({key.partition("/")[0] for key in self.keys_below()} - {""})

    def is_empty_folder(self, name: str) -> bool:
        below = [key for key in self.keys_below(name) if not key or key.startswith("/")]
        return all(key.endswith("/") for key in below)  # the keys of folders themselves

    def keys_below(self, prefix: str = "") -> list[str]:
        """The keys that begin with a prefix, without the prefix. Costs one request per thousand keys."""
        until = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        listing = self._keys.list(ts.KvStore.KeyRange(prefix, until), strip_prefix_length=len(prefix))
        with self._translate_errors("list", prefix):
            keys = self._await_listing(listing)
        if not keys and self._is_google:
            # For gs://, tensorstore reports a forbidden listing as an empty one. Reading a key shows the difference.
            self.read(prefix or MANIFEST)
        return [key.decode(errors="replace") for key in keys]

    def folders(
        self, predicate: Callable[[str], bool] = lambda name: True, known: Container[str] = ()
    ) -> dict[str, bool]:
        """One request, one more for each requested mark that is not known, and a listing for each of these that has no
        manifest."""
        names = sorted(filter(predicate, self.keys_below(MARKS)))
        heads = {name: self._begin_read(f"{name}/{MANIFEST}", slice(0, 0)) for name in names if name not in known}
        return {
            name: name not in heads
            or self._await("read", f"{name}/{MANIFEST}", heads[name]).state == "value"
            or bool(find_lost(self.child(name)))
            for name in names
        }

    def names_below(self, predicate: Callable[[str], bool]) -> dict[str, list[str]]:
        """Costs one request per thousand keys below."""
        names: dict[str, set[str]] = {}
        for key in self.keys_below():
            name, _, below = key.partition("/")
            if predicate(name):
                names.setdefault(name, set()).add(below.partition("/")[0])
        return {name: sorted(below - {""}) for name, below in names.items()}

    def child(self, name: str) -> Self:
        return replace(self, url=f"{self.url}/{name}", path=f"{self.path}{name}/")

    def with_url(self, url: str) -> Self:
        return replace(self, url=url)

    def create_child(self, name: str) -> Self:
        return self.child(name)

    def parent_and_name(self) -> tuple[Self, str] | None:
        path, slash, name = self.path.rstrip("/").rpartition("/")
        url = self.url.rpartition("/")[0]
        return (replace(self, url=url, path=f"{path}{slash}"), name) if name else None

    def mark(self, name: str) -> None:
        self.put(f"{MARKS}{name}", b"{}")

    def unmark(self, name: str) -> None:
        self.remove(f"{MARKS}{name}")

    def delete(self, name: str) -> None:
        keys = self.keys_below(f"{name}/")
        if COPY in keys:  # the first step of every deletion
            self.remove(f"{name}/{COPY}")
        for pending in [self._keys.write(f"{name}/{key}", None) for key in keys]:
            self._await("delete", name, pending)

    can_rename = False

    def rename(self, name: str, to: str) -> None:
        raise StorageError(errno.EOPNOTSUPP, f"{self.url} has no folders, so none can be renamed")

    # Inside -----------------------------------------------------------------------------------------------

    @property
    def _keys(self) -> ts.KvStore:
        server = _server(self.spec)
        limit = server.most_running if server.generation else None
        return _open_store(self.spec, self.retry_seconds, limit, server.generation) + self.path

    def _begin_read(self, key: str, byte_range: slice | None = None) -> HedgedRead:
        return self._keys_to_read().read(key, byte_range)

    def _keys_to_read(self, below: str = "") -> HedgedKeys:
        """The keys of this checkpoint, or below one of its folders."""
        server = _server(self.spec)

        def open_spare() -> ts.KvStore:
            return _open_store(self.spec, self.retry_seconds, _SPARE_REQUESTS, server.generation) + self.path + below

        return HedgedKeys(lambda: self._keys + below, open_spare, server)

    @property
    def _is_google(self) -> bool:
        return json.loads(self.spec)["driver"] == "gcs"

    def _await(self, verb: str, key: str, pending: _Request[T], *, reading: bool = False) -> T:
        """The result of a request that moves few bytes. Raises StorageError if the server does not answer in time, and
        DataError."""
        with self._translate_errors(verb, key, reading=reading):
            return self._answer(pending, self._answer_seconds)

    def _await_listing(self, pending: ts.Future[T]) -> T:
        """A listing takes one request per thousand keys. It may take longer while the server answers other requests."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return self._wait(pending, self._answer_seconds / 2)
                self._answer(self._begin_read(MANIFEST, slice(0, 0)), self._answer_seconds / 2)
                note_progress()
        finally:
            pending.cancel()

    def _answer(self, pending: _Request[T], seconds: float) -> T:
        """The result of a request after at most `seconds`."""
        begun = time.monotonic()
        was_silent = (
            f"{_QUICK_SECONDS:g} s, and before that for " if self._is_silent and seconds > _QUICK_SECONDS else ""
        )
        try:
            result = self._wait(pending, seconds)
        except TimeoutError:
            pending.cancel()  # or tensorstore could repeat a write after this call has ended
            now, server = time.monotonic(), (self.spec, self.retry_seconds)
            if _last_answers.get(server, 0.0) < begun and now >= _silent_until.get(server, 0.0):
                _silent_until[server] = now + _SILENT_SECONDS
            raise StorageError(
                errno.ETIMEDOUT,
                f"the server has not answered, or only with errors, for {was_silent}about"
                f" Options.storage['retry_seconds']={self.retry_seconds:g}{self._settings_hint()}",
            ) from None
        _last_answers[self.spec, self.retry_seconds] = time.monotonic()
        return result

    def _wait(self, pending: _Request[T], seconds: float) -> T:
        """The result of a request. Logs a warning if it takes long. Raises TimeoutError after `seconds`, of which only
        those count for which this process was not suspended."""
        if self._is_silent:
            seconds = min(_QUICK_SECONDS, seconds)
        waited = 0.0
        while True:
            part = min(POLL_SECONDS, seconds - waited)
            try:
                return pending.result(timeout=part)
            except TimeoutError:
                waited += part
                if waited >= seconds:
                    raise
            if waited >= _WARNING_SECONDS:
                self._warn_once()

    @property
    def _is_silent(self) -> bool:
        """Whether the server has just let a request time out, so that others wait only a moment."""
        return time.monotonic() < _silent_until.get((self.spec, self.retry_seconds), 0.0)

    def _warn_once(self) -> None:
        """Log that no request to a server has succeeded yet."""
        server = self.spec, self.retry_seconds
        if server not in _last_answers and server not in _warned:
            _warned.add(server)
            log.warning(
                "%s: the server has not answered, or only with errors, for %g s. Requests are retried for about"
                " Options.storage['retry_seconds']=%g%s",
                self.url,
                _WARNING_SECONDS,
                self.retry_seconds,
                self._settings_hint(),
            )

    def _settings_hint(self) -> str:
        """Where requests go, and which settings say so."""
        spec = json.loads(self.spec)
        if spec["driver"] == "gcs":
            other = os.environ.get("TENSORSTORE_GCS_HTTP_URL")
            return f". Requests go to {_without_user(other)}, from TENSORSTORE_GCS_HTTP_URL" if other else ""
        if spec["driver"] == "http":
            return ". If the server redirects to another URL, as Hugging Face does, download the file"
        if spec["driver"] != "s3":
            return ""
        endpoint = _without_user(spec.get("endpoint", "Amazon S3, because no endpoint is set"))
        return (
            f". Requests go to {endpoint}, region {spec.get('aws_region', 'unknown')}: the endpoint is AWS_ENDPOINT_URL"
            " or Options.storage['endpoint'], the region AWS_REGION or Options.storage['aws_region']"
        )

    def _credentials_hint(self) -> str:
        """Where the credentials come from."""
        spec = json.loads(self.spec)
        match spec["driver"], spec.get("aws_credentials"):
            case "s3", {"type": "environment"}:
                return ". The credentials are those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            case "s3", None:
                return (
                    ". AWS_ACCESS_KEY_ID is not set: unless a profile or the instance has credentials, requests are"
                    " anonymous"
                )
            case "gcs", _:
                return (
                    ". The credentials are those of GOOGLE_APPLICATION_CREDENTIALS, gcloud or the instance; without"
                    " any, requests are anonymous"
                )
            case _:
                return ""

    @property
    def _answer_seconds(self) -> float:
        return self.retry_seconds + max(_ANSWER_SECONDS, self.retry_seconds / 4)

    @contextlib.contextmanager
    def _translate_errors(self, verb: str, key: str, *, reading: bool = False) -> Generator[None]:
        """Raise tensorstore's errors as jaxckpt errors, with the settings that may explain them."""
        try:
            with translate_array_errors(f"cannot {verb} {self.url}/{key}", reading=reading):
                yield
        except StorageError as error:
            text = error.strerror or ""
            if _REFUSED.search(text) and (hint := self._credentials_hint()):
                raise StorageError(error.errno, f"{text}{hint}") from None
            if not _SETTINGS_ERROR.search(text) or "AWS_ENDPOINT_URL" in text:
                raise
            raise StorageError(error.errno, f"{text}{self._settings_hint()}") from None


def _spec_of(url: str, storage: Mapping[str, Any]) -> dict[str, Any]:
    """tensorstore's spec of a URL, with the endpoint and region from the environment, which tensorstore does not read,
    and the members of `Options.storage`. Raises InputError.

    The variables are those of the AWS command line: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
    AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY. Without the last two, tensorstore looks for
    credentials itself (profile, instance).
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        supported = ", ".join(f"{supported_scheme}://" for supported_scheme in (*SCHEMES, "file"))
        raise InputError(
            f"path {scheme}://… is not a URL that jaxckpt supports: its scheme must be one of {supported}"
            f"{closest_hint(scheme, SCHEMES) or '.'} To use other storage, mount it and pass the local path"
        )
    if not rest:
        raise InputError(f"path {url!r} names no bucket or folder: give a URL such as {scheme}://bucket/run")
    if scheme != "memory" and "@" in rest.partition("/")[0]:  # "memory://run@20" is a step of a run
        raise InputError(
            f"path {scheme}://…@{rest.rpartition('@')[2]} has a user name or password: put credentials into the"
            " environment or into Options.storage"
        )
    plain = url.partition("?")[0].partition("#")[0]
    if plain != url:
        raise InputError(f"path {plain!r} has a query or a fragment: pass its settings in Options.storage")
    try:
        spec: dict[str, Any] = ts.KvStore.Spec(f"{url}/").to_json()
    except ValueError as error:
        if "bucket name" in str(error):
            raise InputError(
                f"path {url!r} names the bucket {rest.partition('/')[0]!r}, but names of buckets have 3 to 63 lowercase"
                " letters, digits, '.' and '-'"
            ) from None
        raise InputError(
            f"path {url!r} is not a URL that tensorstore accepts: {str(error).partition(' [')[0]}."
            " Percent-encode special characters in names, for example % as %25"
        ) from None
    if spec["driver"] == "s3":
        environment = os.environ.get
        endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
        region = environment("AWS_REGION") or environment("AWS_DEFAULT_REGION")
        if endpoint:
            spec["endpoint"] = endpoint.rstrip("/")
        # Without either, tensorstore asks the server for the region first. If it does not answer, tensorstore's threads
        # that wait for it prevent all later requests of the process.
        if region or endpoint or "endpoint" in storage:
            spec["aws_region"] = region or "us-east-1"
        if environment("AWS_ACCESS_KEY_ID"):
            spec["aws_credentials"] = {"type": "environment"}
        # Otherwise, on servers other than Amazon's, tensorstore checks the condition with HEAD, and then a server that
        # ignores conditions appears to honor them.
        spec["use_conditional_write"] = True
    for name in ("driver", "bucket", "path"):
        if name in storage:
            hint = ". For virtual-hosted style, give an endpoint such as https://{bucket}.example.com"
            raise InputError(
                f"Options.storage must not have {name!r}: the path {url!r} determines it"
                f"{hint if name == 'bucket' else ''}"
            )
    spec = _with_hosted_bucket({**spec, **storage})
    try:
        ts.KvStore.Spec(spec)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"Options.storage does not fit {url!r}: {clean_error_text(str(error))}") from None
    return spec


def _with_hosted_bucket(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec whose endpoint may have "{bucket}" in its host, for servers that refuse the bucket in the path (path
    style). Raises InputError."""
    endpoint = spec.get("endpoint")
    if spec["driver"] != "s3" or not isinstance(endpoint, str):
        return spec
    if not re.match("https?://", endpoint):
        raise InputError(
            f"the endpoint {_without_user(f'//{endpoint}')[2:]!r} must begin with http:// or https://. It is"
            " AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or Options.storage['endpoint']"
        )
    if _BUCKET not in endpoint:
        return spec
    scheme, _, host = endpoint.partition("://")
    if _BUCKET not in host.partition("/")[0]:
        shown = _without_user(f"//{host}")[2:]
        raise InputError(
            f"the endpoint {scheme}://{shown} must have {_BUCKET} in its host, as in {scheme}://{_BUCKET}.{shown}"
        )
    return {**spec, "endpoint": endpoint.replace(_BUCKET, spec["bucket"]), "bucket": ""}


def _without_user(url: str) -> str:
    """A URL without a user name and password."""
    return re.sub("//[^/@]*@", "//", url)
