"""A worker of `make gpu`: runs the sections that its supervisor requests, and sends each figure once it is known."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
from lab import Lab, Sizes

from jaxckpt._restore import wants
from jaxckpt._save import staging

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that this process gets when its parent ends."""


class OutOfTimeError(BaseException):
    """Not an Exception, so that no section takes it for a failure of what it measures."""


def serve(file_descriptor: int, out: Path, is_dry: bool) -> None:
    """Run sections until the supervisor ends or kills this process."""
    faulthandler.enable()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the supervisor is killed, nobody else ends a hang
    messages = Connection(file_descriptor)
    is_cpu = jax.devices()[0].platform == "cpu"
    if is_dry and is_cpu:  # CPU devices take the code paths of devices with their own memory
        staging.is_in_host_memory = lambda value: False
        wants.has_own_memory = lambda sharding: True
        wants.BLOCK_PIECES = 128  # a dry run has few leaves
        wants.can_keep_buffers = lambda abstract: abstract.kind not in ("jax", "key")
    _send(messages, {"has_accelerator": is_dry or not is_cpu})
    signal.signal(signal.SIGALRM, _raise_out_of_time)
    while True:
        try:
            request = json.loads(messages.recv_bytes())
        except EOFError:
            return
        _send(messages, _run(request, messages, out, Sizes(is_dry)))
        gc.collect()


def _run(request: dict[str, Any], messages: Connection, out: Path, sizes: Sizes) -> dict[str, Any]:
    """Run one section. Returns the message that says how it ended."""
    ends = time.monotonic() + request["limit_seconds"]
    folders = Path(request["memory"]), Path(request["disk"])
    module, _, function = request["function"].partition(":")
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, request["limit_seconds"])
            faulthandler.dump_traceback_later(request["limit_seconds"] + 1)  # for a hang, which the timer does not end
            section = getattr(importlib.import_module(module), function)
            for figure in section(Lab(*folders, out, sizes, ends, request["argument"])):
                _send(messages, {"figure": figure})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
    except BrokenPipeError:
        sys.exit("the supervisor ended")
    except (Exception, OutOfTimeError) as error:
        traceback.print_exc()
        ended = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        return {"ended": ended, "is_out_of_time": isinstance(error, OutOfTimeError)}
    return {"ended": {}, "is_out_of_time": False}


def _raise_out_of_time(*_: object) -> None:
    raise OutOfTimeError("the section's time is over")


def _send(messages: Connection, message: dict[str, Any]) -> None:
    messages.send_bytes(json.dumps(message, default=str).encode())
