"""Translates errors of storage into jaxckpt's errors, retries those that pass, and gives up on storage that hangs."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, ParamSpec, TypeVar

from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.threads import awake_seconds
from jaxckpt._pipeline.watchdog import current_watchdog, require_responding
from jaxckpt.errors import DataError, InputError, JaxckptError, Problem, StorageError, UnsupportedError

P = ParamSpec("P")
T = TypeVar("T")

UNLISTABLE = (errno.ENOTSUP, errno.EACCES)
"""Errors of stores that can be read but not listed, for example over HTTP or without permission."""

_STALE_SECONDS = 2.0
"""How long a path may lead to a file that another host has deleted or replaced. GlusterFS and FUSE cache for 1 s."""

_VERIFY_HINT = "run jaxckpt.verify for a list of all damage"

_DAMAGED = ("DATA_LOSS", "NOT_FOUND", "INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION")
_CODES = {"RESOURCE_EXHAUSTED": errno.ENOSPC, "PERMISSION_DENIED": errno.EACCES, "DEADLINE_EXCEEDED": errno.ETIMEDOUT}


def retry_stale(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what `work` returns for these arguments. If it fails with ESTALE, try again for 2 s.

    NFS and GlusterFS raise ESTALE if another host has deleted or replaced a file that this host has open, or has found
    by its path a moment ago. `work` must therefore begin with the path. An ESTALE that does not pass is raised as a
    FileNotFoundError, because the file was deleted. It keeps its errno.
    """
    deadline = awake_seconds() + _STALE_SECONDS
    pause = 0.005
    while True:
        try:
            return work(*arguments, **named)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            if awake_seconds() >= deadline:
                raise FileNotFoundError(errno.ESTALE, os.strerror(errno.ESTALE), error.filename) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


@contextlib.contextmanager
def translate_os_errors(what: str) -> Generator[None]:
    """Raise file system errors of the block as a StorageError whose message begins with `what`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, JaxckptError):
            raise
        raise StorageError(error.errno or errno.EIO, f"{what}: {error.strerror or error}") from error


@contextlib.contextmanager
def translate_array_errors(what: str, *, reading: bool = False) -> Generator[None]:
    """Raise tensorstore's errors of the block as jaxckpt errors. Every message begins with `what`."""
    try:
        yield
    except (ValueError, NotImplementedError, DataError, StorageError) as error:
        if isinstance(error, InputError):
            raise
        raise _translate(error, what, reading=reading) from None


@contextlib.contextmanager
def translate_leaf_errors(what: str, paths: Sequence[str]) -> Generator[None]:
    """As `translate_array_errors`, for the read of some leaves: the error has a problem for each."""
    try:
        with translate_array_errors(what, reading=True):
            yield
    except (DataError, StorageError) as error:
        text = (error.strerror or "") if isinstance(error, StorageError) else str(error)
        reason, hint, _ = text.removeprefix(f"{what}: ").partition(f"; {_VERIFY_HINT}")
        reason, remedy = f"cannot be read: {reason}", _VERIFY_HINT if hint else ""
        error.problems = tuple(Problem(path, reason, remedy) for path in paths)
        raise


def _translate(error: Exception, what: str, *, reading: bool) -> StorageError | DataError:
    """A tensorstore error as a jaxckpt error, by the system's error code if present, otherwise by its message."""
    if isinstance(error, DataError):
        if isinstance(error, UnsupportedError):
            return UnsupportedError(f"{what}: {error}", problems=error.problems)
        return DataError(f"{what}: {error}; {_VERIFY_HINT}", problems=error.problems)
    if isinstance(error, StorageError):
        return StorageError(error.errno, f"{what}: {error.strerror}", problems=error.problems)
    text = clean_error_text(str(error))
    status = text.partition(":")[0]
    system = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    code = int(system[1]) if system else _CODES.get(status, errno.EIO)
    unsupported = isinstance(error, NotImplementedError)  # to write or to list over HTTP, for example
    # Errors of an OCDBT database have no status code. The blosc decoder reports damage as "Reader::Seek() backwards not
    # supported".
    decoding = "Error decoding" in text or (unsupported and "Error reading shard entry" in text)
    if (unsupported and not decoding) or "ignored by server" in text:
        return StorageError(errno.ENOTSUP, f"{what}: {text}")
    missing = code in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ESTALE)
    damaged = missing if system else decoding or status in _DAMAGED
    return DataError(f"{what}: {text}") if reading and damaged else StorageError(code, f"{what}: {text}")


def clean_error_text(text: str) -> str:
    """The text of a tensorstore error without query strings, lines of tensorstore's source, or the server's response,
    which may quote keys and signatures."""
    text = re.sub(r"(Failed to parse response metadata): .*", r"\1", text, flags=re.DOTALL)
    code = re.search(r"\[http_response_code='(\d+)'\]", text)
    text = re.sub(r"\s*\[[a-z_-]+='.*", "", text, flags=re.DOTALL)
    text = re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
    return f"{text} (HTTP {code.group(1)})" if code else text


# Storage that hangs ---------------------------------------------------------------------------------------


def watched(doing: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for a method of a store that uses storage: it does that in a lane, and fails if no bytes move in
    time. `doing` is for messages ("reading"). A method that is called within another one, or within a watched
    operation, is a part of that."""

    def watch(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def call(*arguments: P.args, **options: P.kwargs) -> T:
            store: Any = arguments[0]
            what = f"{doing} {store.url}"
            if (watchdog := current_watchdog()) is None:
                require_responding(store.folder, what)
            else:
                watchdog.folder = store.folder
            with translate_os_errors(f"{what} failed"):
                work = functools.partial(method, *arguments, **options)
                return run_watched(what, store.timeout_seconds, work, store.folder)

        return call

    return watch
