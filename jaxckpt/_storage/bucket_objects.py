"""The bytes of a checkpoint on an object store, where a key is written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import tensorstore as ts

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box
from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import DataError, InputError, StorageError
from jaxckpt._runtime.options import Options
from jaxckpt._storage.errors import readable, storage_errors
from jaxckpt._storage.fetching import EncodingWriter, FetchingReader, wanted_whole
from jaxckpt._storage.objects import MOST_BYTES, Pending
from jaxckpt._storage.tensors import ROOT_CONTEXT

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.1, 5.0
_STALLED_SECONDS = 30
_MOST_RETRIES = 100_000


@cache
def _context(retry_seconds: float) -> ts.Context:
    # Delays double up to the longest: as many tries as fill the time.
    delay, waited, retries = _FIRST_DELAY_SECONDS, 0.0, 0
    while waited < retry_seconds and retries < _MOST_RETRIES:
        waited += delay
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
        retries += 1
    settings = {
        "max_retries": retries,
        "initial_delay": f"{_FIRST_DELAY_SECONDS}s",
        "max_delay": f"{_LONGEST_DELAY_SECONDS}s",
    }
    # Otherwise tensorstore never gives up on a server that accepts a connection and says nothing. Read once.
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(_STALLED_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_STALLED_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    return ts.Context(
        {"s3_request_retries": settings, "gcs_request_retries": settings, "http_request_retries": settings},
        parent=ROOT_CONTEXT,
    )


@cache
def _opened(spec: str, retry_seconds: float) -> ts.KvStore:
    # Kept, one for all paths of a bucket: each opening looks the credentials up again.
    with storage_errors("cannot open the object store"):
        return ts.KvStore.open(json.loads(spec), context=_context(retry_seconds)).result()


@dataclass(frozen=True, slots=True)
class BucketObjects:
    """The keys below one path of an object store."""

    url: str

    spec: str
    """tensorstore's spec of the whole store, without a path, as JSON."""

    path: str
    """What all keys of this one begin with."""

    retry_seconds: float

    @classmethod
    def at(cls, url: str, options: Options) -> Self:
        spec = _spec_of(url, options.storage or {})
        path = spec.pop("path", "")
        try:
            return cls(url, json.dumps(spec), path, options.retry_seconds)
        except TypeError as error:
            raise InputError(f"Options.storage must be of JSON values: {error}") from None

    # Small files -----------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        return self._get(key)[0]

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        """All of them at once."""
        begun = [(key, self._keys.read(key)) for key in keys]
        return [self._landed(key, pending)[0] for key, pending in begun]

    def _get(self, key: str) -> tuple[bytes | None, bytes]:
        """(what a key holds, the generation that a conditional write wants)."""
        return self._landed(key, self._keys.read(key))

    def _landed(self, key: str, pending: Pending) -> tuple[bytes | None, bytes]:
        with self._refused("read", key):
            found = pending.result()
        if len(found.value) > MOST_BYTES:
            raise DataError(f"{self.url}/{key} is over {MOST_BYTES} bytes: no such file of ours is")
        return found.value if found.state == "value" else None, found.stamp.generation

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        self._begin_put(key, content).result()

    def _begin_put(self, key: str, content: bytes, digest: str = "") -> _Put:
        return _Put(f"{self.url}/{key}", self._keys.write(key, content), (len(content), digest))

    def remove(self, key: str) -> None:
        with self._refused("delete", key):
            self._keys.write(key, None).result()

    # Arrays -----------------------------------------------------------------------------------------------

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> EncodingWriter:
        return EncodingWriter(f"{self.url}/{data}", stack, lambda key, *found: self._begin_put(f"{data}/{key}", *found))

    def array_reader(
        self,
        data: str,
        stack: Stack,
        stored: Mapping[str, tuple[int, str]],
        plan: Iterable[Sequence[Box]] = (),
        most_bytes: int = 0,
    ) -> FetchingReader:
        below = f"{data}/{stack.name}/"
        base = {**json.loads(self.spec), "path": f"{self.path}{below}"}
        fetched = wanted_whole(stack, stored, plan, most_bytes)
        return FetchingReader(
            f"{self.url}/{below}", self._keys + below, base, _context(self.retry_seconds), stack, fetched
        )

    # Objects as bytes -------------------------------------------------------------------------------------

    def misfits(self, lengths: Mapping[str, int]) -> dict[str, str]:
        """One request for each, of its last byte."""
        reads = {
            key: self._keys.read(key, byte_range=slice(max(0, length - 1), None)) for key, length in lengths.items()
        }
        found = {key: self._misfit(key, read, lengths[key]) for key, read in reads.items()}
        return {key: problem for key, problem in found.items() if problem}

    def _misfit(self, key: str, pending: Pending, length: int) -> str | None:
        try:
            with self._refused("read", key, reading=True):
                tail = pending.result()
        except DataError:  # beyond its end
            return f"is shorter than the expected {length} bytes"
        if tail.state != "value":
            return "is missing"
        found = max(0, length - 1) + len(tail.value)
        return None if found == length else f"is {found} bytes long, expected {length}"

    @contextlib.contextmanager
    def ranges(self, key: str) -> Generator[zarr.ReadRange]:
        def read(start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
            with self._refused("read", key, reading=True):
                found = self._keys.read(key, byte_range=slice(start, stop)).result()
            if len(found.value) != stop - start:
                raise DataError(f"{self.url}/{key} was cut while it was read")
            return np.frombuffer(found.value, np.uint8)

        yield read

    # Inside -----------------------------------------------------------------------------------------------

    @property
    def _keys(self) -> ts.KvStore:
        return _opened(self.spec, self.retry_seconds) + self.path

    def _refused(self, verb: str, key: str, *, reading: bool = False) -> contextlib.AbstractContextManager[None]:
        return storage_errors(f"cannot {verb} {self.url}/{key}", reading=reading)


@dataclass(frozen=True, slots=True)
class _Put:
    """A write under way, which depends on nothing."""

    url: str
    pending: Any

    written: tuple[int, str]
    """Length and digest of what is put."""

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> tuple[int, str]:
        with storage_errors(f"cannot write {self.url}"):
            stamp = self.pending.result()
        if not stamp.generation:  # as for a condition that failed, though none was set
            raise StorageError(errno.EIO, f"cannot write {self.url}: the server refused it (HTTP 412)")
        return self.written


def _spec_of(url: str, storage: Mapping[str, Any]) -> dict[str, Any]:
    """tensorstore's spec of a URL: with the endpoint and the region that the environment names, which it does not look
    for, and with what `Options.storage` says. Raises InputError.

    The variables are those of the AWS command line: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
    AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY; without these two, credentials come from wherever
    tensorstore finds them (profile, instance).
    """
    scheme, _, rest = url.partition("://")
    if "@" in rest.partition("/")[0]:
        raise InputError(
            f"path {scheme}://…@{rest.rpartition('@')[2]} has a user's name or password: credentials belong into the"
            " environment, or into Options.storage"
        )
    plain = url.partition("?")[0].partition("#")[0]
    if plain != url:
        raise InputError(f"path {plain!r} has a query or a fragment: what they say belongs into Options.storage")
    try:
        spec: dict[str, Any] = ts.KvStore.Spec(f"{url}/").to_json()
    except ValueError as error:
        raise InputError(f"path {url!r} is no URL that tensorstore takes: {str(error).partition(' [')[0]}") from None
    if spec["driver"] == "s3":
        environment = os.environ.get
        endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
        region = environment("AWS_REGION") or environment("AWS_DEFAULT_REGION")
        if endpoint:
            spec["endpoint"] = endpoint.rstrip("/")
        if region or endpoint:  # without one, the server is asked first
            spec["aws_region"] = region or "us-east-1"
        if environment("AWS_ACCESS_KEY_ID"):
            spec["aws_credentials"] = {"type": "environment"}
    for name in ("driver", "bucket", "path"):
        if name in storage:
            raise InputError(f"Options.storage must not have {name!r}: the path {url!r} says that")
    try:
        ts.KvStore.Spec({**spec, **storage})
    except (ValueError, TypeError) as error:
        raise InputError(f"Options.storage does not fit {url!r}: {readable(str(error))}") from None
    return {**spec, **storage}
