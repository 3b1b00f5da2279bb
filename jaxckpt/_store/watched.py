"""Stores whose methods use storage in a lane, so that storage that hangs raises an error in every call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.watchdog import current_watchdog, require_responding
from jaxckpt._store.storage_errors import translate_os_errors

C = TypeVar("C", bound=type[Any])


def watched(**doing: str | None) -> Callable[[C], C]:
    """A class decorator for a store: its methods use storage in a lane, and fail if no bytes move in time.

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
        if (watchdog := current_watchdog()) is None:
            require_responding(store.folder, what)
        else:
            watchdog.folder = store.folder
        with translate_os_errors(f"{what} failed"):
            return run_watched(
                what, store.timeout_seconds, functools.partial(method, store, *arguments, **options), store.folder
            )

    return call
