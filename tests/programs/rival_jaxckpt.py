"""A rival that saves with jaxckpt, and stops itself at a given moment of the save if requested."""

from __future__ import annotations

import os
import pkgutil
import signal
from collections.abc import Callable
from typing import Any

from rival import serve
from rivals import MOMENTS, version

import jaxckpt


def prepare(asked: dict[str, Any]) -> Callable[[], None]:
    """Stop this process once, at the requested moment; returns a function that undoes this."""
    if "stop_at" not in asked:
        return lambda: None
    path, name = MOMENTS[asked["stop_at"]]
    owner = pkgutil.resolve_name(f"jaxckpt.{path}")
    original = getattr(owner, name)

    def stop(*args: Any, **named: Any) -> Any:
        setattr(owner, name, original)
        os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **named)

    setattr(owner, name, stop)
    return lambda: setattr(owner, name, original)


def save(asked: dict[str, Any], restore: Callable[[], None]) -> None:
    try:
        options = jaxckpt.Options(sync=asked["sync"], chunk_bytes=4096, object_bytes=16384)
        jaxckpt.save(asked["path"], version(asked["version"]), overwrite=asked["overwrite"], options=options)
    finally:
        restore()


serve(save, prepare)
