"""Sections that crash, hang and fail, between others that must run all the same."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from sections import Section

Figures = Iterator[tuple[str, Any]]

SECTIONS = (
    Section("first", "planted_sections:fine", 1, 60, is_check=True),
    Section("crash", "planted_sections:crash", 1, 60, is_check=True),
    Section("after the crash", "planted_sections:fine", 1, 60, is_check=True),
    Section("exception", "planted_sections:fail", 1, 60, is_check=True),
    Section("after the exception", "planted_sections:fine", 1, 60, is_check=True),
    Section("slow", "planted_sections:slow", 1, 0.3),
    Section("hang", "planted_sections:hang", 1, 0.3),
    Section("after the hang", "planted_sections:fine", 1, 60, is_check=True),
)
ALONE = (
    Section("long hang", "planted_sections:hang", 100, 300),
    Section("imports", "planted_sections:imports", 1, 60),
)


def fine(lab: Any) -> Figures:
    yield "worker", os.getpid()
    yield "folders are empty", not [*lab.memory.iterdir(), *lab.disk.iterdir()]


def crash(lab: Any) -> Figures:
    yield "known before", 1
    os.kill(os.getpid(), signal.SIGSEGV)
    yield "never", 1


def fail(lab: Any) -> Figures:
    yield "known before", 1
    raise ValueError("planted")


def slow(lab: Any) -> Figures:
    """Python code, which the worker can stop itself."""
    yield "known before", 1
    time.sleep(600)


def hang(lab: Any) -> Figures:
    """Neither this process nor its child ends by a signal that can be ignored, as a hang in a driver would not."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM, signal.SIGINT})
    program = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); time.sleep(600)"
    yield "worker", os.getpid()
    yield "child", subprocess.Popen([sys.executable, "-c", program]).pid
    (lab.memory / "file").write_text("left behind")
    yield "folder", str(lab.memory)
    time.sleep(600)


def imports(lab: Any) -> Figures:
    """Where packages come from."""
    for name in ("jaxckpt", "carried", "planted_sections"):
        yield name, importlib.import_module(name).__file__
    yield "metadata", importlib.metadata.version("jaxckpt")
    yield "formats", sorted(importlib.metadata.entry_points(group="jaxckpt.formats").names)
