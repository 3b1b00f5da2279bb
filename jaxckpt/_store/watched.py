"""Stores whose methods use storage in a watched thread, so that storage that hangs raises an error in every call."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from jaxckpt._pipeline.threads import Task
from jaxckpt._pipeline.watchdog import current_watchdog
from jaxckpt._pipeline.workers import StorageThread
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt.errors import StorageError

C = TypeVar("C", bound=type[Any])


def watched(**doing: str | None) -> Callable[[C], C]:
    """A class decorator for a store: its methods use storage in a thread that stops counting after `timeout_seconds`.

    `doing` has every public method, with what it does for error messages ("reading"), or None if it does not use
    storage itself. A method that is called within another one, or within a watched operation, is a part of that.
    """

    def watch(cls: C) -> C:
        methods = {
            name: method
            for name, method in vars(cls).items()
            if inspect.isfunction(method) and not name.startswith("_")
        }
        assert methods.keys() == doing.keys(), f"{cls.__name__}: {sorted(methods.keys() ^ doing.keys())}"
        for name, method in methods.items():
            if what := doing[name]:
                setattr(cls, name, _watched(method, what))
        return cls

    return watch


def _watched(method: Callable[..., Any], doing: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(store: Any, *arguments: Any, **options: Any) -> Any:
        what = f"{doing} {store.url}"
        if current_watchdog() is None:
            _require_responding(store, what)
        with translate_os_errors(f"{what} failed"), StorageThread(store.timeout_seconds) as thread:
            try:
                return thread.run(what, functools.partial(method, store, *arguments, **options))
            finally:
                if thread.hung is not None:
                    _hung.append((store.folder, thread.hung, time.monotonic() + store.timeout_seconds))

    return call


_hung: list[tuple[str, Task[Any], float]] = []
"""Where an operation hung: the folder, the operation, and until when other operations there are not tried."""


def _require_responding(store: Any, what: str) -> None:
    """Raise StorageError if an operation near a folder has hung and still does. Otherwise a call that ignores one
    error, or cleans up after it, would wait again for each further operation."""
    for entry in _hung.copy():
        folder, operation, until = entry
        if operation.done() or time.monotonic() > until:
            with contextlib.suppress(ValueError):  # another thread has
                _hung.remove(entry)
        elif os.path.commonpath((folder, store.folder)) in (folder, store.folder):
            raise StorageError(errno.ETIMEDOUT, f"{what} was not tried: the storage of {folder} hangs")
