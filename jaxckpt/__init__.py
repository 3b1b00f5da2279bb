"""jaxckpt saves and restores the sharded state of JAX training.

jaxckpt.save("/checkpoints/run1", state)                    # every process, each its own shards
state = jaxckpt.restore("/checkpoints/run1", mesh=mesh)     # onto any other mesh
weights = jaxckpt.load_numpy("/checkpoints/run1")           # on one host, without devices
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxckpt._runtime import exit_status

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
    "SaveInfo",
    "SpecError",
    "Step",
    "StorageError",
    "TreeError",
    "VerifyReport",
    "convert",
    "diff",
    "follow",
    "fork",
    "huggingface_rules",
    "latest_step",
    "load_numpy",
    "mindspore_ranks",
    "oneflow_ranks",
    "open",
    "pin",
    "rank_files",
    "register_leaf",
    "report",
    "restore",
    "save",
    "save_async",
    "steps",
    "subscribe",
    "unpin",
    "verify",
]


if TYPE_CHECKING:
    from jaxckpt._arguments.leaf_types import register_leaf
    from jaxckpt._foreign.convert import convert
    from jaxckpt._foreign.mindspore import mindspore_ranks
    from jaxckpt._foreign.oneflow import oneflow_ranks
    from jaxckpt._foreign.rank_files import rank_files
    from jaxckpt._foreign.rulesets import huggingface_rules
    from jaxckpt._inspect.diff import Delta, LeafDelta, diff
    from jaxckpt._inspect.leaf import LazyLeaf
    from jaxckpt._inspect.open import Checkpoint, open
    from jaxckpt._inspect.report import report
    from jaxckpt._inspect.restore_plan import RestorePlan
    from jaxckpt._inspect.verify import VerifyReport, verify
    from jaxckpt._restore.restore import load_numpy, restore
    from jaxckpt._restore.rule import Rule
    from jaxckpt._restore.rules import Rules
    from jaxckpt._runtime.errors import (
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
    from jaxckpt._runtime.options import Options
    from jaxckpt._runtime.progress import Progress
    from jaxckpt._save.background import PendingSave
    from jaxckpt._save.info import SaveInfo
    from jaxckpt._save.save import save, save_async
    from jaxckpt._steps.checkpointer import Checkpointer
    from jaxckpt._steps.follow import Step, follow, latest_step, steps
    from jaxckpt._steps.fork import fork
    from jaxckpt._steps.pins import pin, unpin
    from jaxckpt._steps.weights import Publisher, subscribe

exit_status.exit_with_status_at_exit()  # now, so that it runs after everything that the program registers with atexit

_MODULES = {
    "_arguments.leaf_types": "register_leaf",
    "_foreign.convert": "convert",
    "_foreign.mindspore": "mindspore_ranks",
    "_foreign.oneflow": "oneflow_ranks",
    "_foreign.rank_files": "rank_files",
    "_foreign.rulesets": "huggingface_rules",
    "_inspect.diff": "Delta LeafDelta diff",
    "_inspect.leaf": "LazyLeaf",
    "_inspect.open": "Checkpoint open",
    "_inspect.report": "report",
    "_inspect.restore_plan": "RestorePlan",
    "_inspect.verify": "VerifyReport verify",
    "_restore.restore": "load_numpy restore",
    "_restore.rule": "Rule",
    "_restore.rules": "Rules",
    "_runtime.errors": (
        "CheckpointExistsError CorruptError DataError InputError JaxckptError LayoutError ManifestError "
        "MismatchError NotACheckpointError PathNotSharedError PeerError PeerFailedError PeersDisagreeError "
        "PeerTimeoutError Preempted Problem SpecError StorageError TreeError"
    ),
    "_runtime.options": "Options",
    "_runtime.progress": "Progress",
    "_save.background": "PendingSave",
    "_save.info": "SaveInfo",
    "_save.save": "save save_async",
    "_steps.checkpointer": "Checkpointer",
    "_steps.follow": "Step follow latest_step steps",
    "_steps.fork": "fork",
    "_steps.pins": "pin unpin",
    "_steps.weights": "Publisher subscribe",
}
"""The names that each module defines. A module is imported when one of its names is used for the first time."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
