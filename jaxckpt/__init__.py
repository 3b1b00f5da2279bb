"""jaxckpt saves and restores the sharded state of JAX training.

jaxckpt.save("/checkpoints/run1", state)                    # every process, each its own shards
state = jaxckpt.restore("/checkpoints/run1", mesh=mesh)     # onto any other mesh
weights = jaxckpt.load_numpy("/checkpoints/run1")           # on one host, without devices
"""

import importlib
import threading
from typing import TYPE_CHECKING, Any

from jaxckpt._pipeline import exit_status

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointExistsError",
    "Checkpointer",
    "CorruptError",
    "DataError",
    "Delta",
    "InputError",
    "JaxckptError",
    "LayoutError",
    "LazyLeaf",
    "LeafDelta",
    "ManifestError",
    "MismatchError",
    "NotACheckpointError",
    "Options",
    "PathNotSharedError",
    "PeerError",
    "PeerFailedError",
    "PeerTimeoutError",
    "PeersDisagreeError",
    "PendingSave",
    "Preempted",
    "Problem",
    "Progress",
    "Publisher",
    "RestorePlan",
    "Rule",
    "Rules",
    "Run",
    "SaveInfo",
    "SpecError",
    "Step",
    "StorageError",
    "TreeError",
    "VerifyReport",
    "convert",
    "diff",
    "huggingface_rules",
    "load_numpy",
    "mindspore_ranks",
    "oneflow_ranks",
    "open",
    "rank_files",
    "register_leaf",
    "report",
    "restore",
    "save",
    "save_async",
    "subscribe",
    "verify",
]


if TYPE_CHECKING:
    from jaxckpt._arguments.leaf_types import register_leaf
    from jaxckpt._convert.convert import convert
    from jaxckpt._formats.huggingface import huggingface_rules
    from jaxckpt._formats.mindspore import mindspore_ranks
    from jaxckpt._formats.oneflow import oneflow_ranks
    from jaxckpt._formats.rank_files import rank_files
    from jaxckpt._inspect.diff import Delta, LeafDelta, diff
    from jaxckpt._inspect.leaf import LazyLeaf
    from jaxckpt._inspect.open import Checkpoint, open
    from jaxckpt._inspect.report import report
    from jaxckpt._inspect.restore_plan import RestorePlan
    from jaxckpt._inspect.verify import VerifyReport, verify
    from jaxckpt._options import Options
    from jaxckpt._pipeline.progress import Progress
    from jaxckpt._restore.restore import load_numpy, restore
    from jaxckpt._rules.rule import Rule
    from jaxckpt._rules.rules import Rules
    from jaxckpt._runs.checkpointer import Checkpointer
    from jaxckpt._runs.follow import Step
    from jaxckpt._runs.run import Run
    from jaxckpt._save.async_saves import PendingSave
    from jaxckpt._save.save import save, save_async
    from jaxckpt._save.save_info import SaveInfo
    from jaxckpt.errors import (
        CheckpointExistsError,
        CorruptError,
        DataError,
        InputError,
        JaxckptError,
        LayoutError,
        ManifestError,
        MismatchError,
        NotACheckpointError,
        PathNotSharedError,
        PeerError,
        PeerFailedError,
        PeersDisagreeError,
        PeerTimeoutError,
        Preempted,
        Problem,
        SpecError,
        StorageError,
        TreeError,
    )
    from jaxckpt.weights import Publisher, subscribe

exit_status.exit_with_status_at_exit()  # now, so that it runs after everything that the program registers with atexit

_MODULES = {
    "_arguments.leaf_types": "register_leaf",
    "_convert.convert": "convert",
    "_formats.mindspore": "mindspore_ranks",
    "_formats.oneflow": "oneflow_ranks",
    "_formats.rank_files": "rank_files",
    "_formats.huggingface": "huggingface_rules",
    "_inspect.diff": "Delta LeafDelta diff",
    "_inspect.leaf": "LazyLeaf",
    "_inspect.open": "Checkpoint open",
    "_inspect.report": "report",
    "_inspect.restore_plan": "RestorePlan",
    "_inspect.verify": "VerifyReport verify",
    "_restore.restore": "load_numpy restore",
    "_rules.rule": "Rule",
    "_rules.rules": "Rules",
    "errors": (
        "CheckpointExistsError CorruptError DataError InputError JaxckptError LayoutError ManifestError "
        "MismatchError NotACheckpointError PathNotSharedError PeerError PeerFailedError PeersDisagreeError "
        "PeerTimeoutError Preempted Problem SpecError StorageError TreeError"
    ),
    "_options": "Options",
    "_pipeline.progress": "Progress",
    "_save.async_saves": "PendingSave",
    "_save.save_info": "SaveInfo",
    "_save.save": "save save_async",
    "_runs.checkpointer": "Checkpointer",
    "_runs.follow": "Step",
    "_runs.run": "Run",
    "weights": "Publisher subscribe",
}
"""The names that each module defines. A module is imported when one of its names is used for the first time."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


_PUBLIC_MODULES = ("errors", "orbax", "weights")

_import_lock = threading.RLock()
"""JAX cannot be imported by two threads at once, because its modules import each other."""


def _import_name(name: str) -> Any:
    """PEP 562's __getattr__."""
    if name not in _HOMES and name not in _PUBLIC_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _import_lock:
        if name in _PUBLIC_MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = _import_name


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
