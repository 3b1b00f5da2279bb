"""jaxckpt saves and restores the sharded state of JAX training.

jaxckpt.save("/checkpoints/run1", state)                    # every process, each its own shards
state = jaxckpt.restore("/checkpoints/run1", mesh=mesh)     # onto any other mesh
weights = jaxckpt.load_numpy("/checkpoints/run1")           # on one host, without devices
"""

import atexit
import functools
import importlib
import threading
from typing import TYPE_CHECKING, Any

from jaxckpt._pipeline import lanes, threads

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "CorruptError",
    "JaxckptError",
    "LazyLeaf",
    "LocalTier",
    "MismatchError",
    "Options",
    "PendingSave",
    "Preempted",
    "Run",
    "SaveInfo",
    "Step",
    "convert",
    "diff",
    "load_numpy",
    "open",
    "register_leaf",
    "report",
    "restore",
    "save",
    "save_async",
    "verify",
]


if TYPE_CHECKING:
    from jaxckpt import errors as errors
    from jaxckpt import formats as formats
    from jaxckpt import rules as rules
    from jaxckpt import types as types
    from jaxckpt import weights as weights
    from jaxckpt._arguments.pytree import register_leaf
    from jaxckpt._convert.convert import convert
    from jaxckpt._inspect.diff import diff
    from jaxckpt._inspect.open import Checkpoint, LazyLeaf, open
    from jaxckpt._inspect.report import report
    from jaxckpt._inspect.verify import verify
    from jaxckpt._local_tier.tier import LocalTier
    from jaxckpt._options import Options
    from jaxckpt._restore.restore import load_numpy, restore
    from jaxckpt._runs.checkpointer import Checkpointer
    from jaxckpt._runs.follow import Step
    from jaxckpt._runs.run import Run
    from jaxckpt._save.running_saves import PendingSave, SaveInfo
    from jaxckpt._save.save import save, save_async
    from jaxckpt.errors import CorruptError, JaxckptError, MismatchError, Preempted

atexit.register(lanes.exit_with_status)  # now, so that it runs after everything that the program registers with atexit

_MODULES = {
    "_arguments.pytree": "register_leaf",
    "_convert.convert": "convert",
    "_inspect.diff": "diff",
    "_inspect.open": "Checkpoint LazyLeaf open",
    "_inspect.report": "report",
    "_inspect.verify": "verify",
    "_local_tier.tier": "LocalTier",
    "_options": "Options",
    "_restore.restore": "load_numpy restore",
    "_runs.checkpointer": "Checkpointer",
    "_runs.follow": "Step",
    "_runs.run": "Run",
    "_save.running_saves": "PendingSave SaveInfo",
    "_save.save": "save save_async",
    "errors": "CorruptError JaxckptError MismatchError Preempted",
}
"""The names that each module defines. A module is imported when one of its names is used for the first time."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

_PUBLIC_MODULES = ("errors", "formats", "keras", "orbax", "rules", "types", "weights")

_import_lock = threading.RLock()
"""JAX cannot be imported by two threads at once, because its modules import each other."""


def _import_name(name: str) -> Any:
    """PEP 562's __getattr__."""
    if name not in _HOMES and name not in _PUBLIC_MODULES:
        raise AttributeError(_missing_name(name), name=name)
    # Ctrl-C inside an import would leave a lock of the import system held, or half of tensorstore imported, so that
    # later calls hang or abort. It strikes the main thread only.
    return threads.run_in_thread(functools.partial(_import, name))


def _import(name: str) -> Any:
    with _import_lock:
        if name in _PUBLIC_MODULES:
            try:
                return importlib.import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:  # Keras is not installed: `hasattr` is then false
                raise AttributeError(f"module {__name__!r} cannot import {name!r}: {error}", name=name) from error
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def _missing_name(name: str) -> str:
    if name.startswith("_"):  # Python looks for many of these, and for submodules before it imports them
        return f"module {__name__!r} has no attribute {name!r}"
    from jaxckpt._keywords import missing_module_attribute

    return missing_module_attribute(name)


if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = _import_name


def __dir__() -> list[str]:
    return sorted({*__all__, *_PUBLIC_MODULES})
