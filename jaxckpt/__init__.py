"""jaxckpt saves and restores the sharded state of JAX training.

jaxckpt.save("/checkpoints/run1", state)                    # every process, each its own shards
state = jaxckpt.restore("/checkpoints/run1", mesh=mesh)     # onto any other mesh
weights = jaxckpt.load_numpy("/checkpoints/run1")           # on one host, without devices
"""

import os
import sys
from typing import TYPE_CHECKING, Any

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


def _is_command_line() -> bool:
    """Whether this process is `jaxckpt …` or `python -m jaxckpt …`, whose commands import what they need.

    All other programs import everything here, including JAX. Functions that they register with atexit later then run
    before JAX shuts down and before jaxckpt reports a failed save.
    """
    script = os.path.splitext(os.path.basename(next(iter(sys.argv), "")))[0]
    return script == "jaxckpt" or sys.orig_argv[1:3] == ["-m", "jaxckpt"]


if TYPE_CHECKING or "_needed" in globals() or not _is_command_line():
    from jaxckpt._foreign.convert import convert
    from jaxckpt._foreign.mindspore import mindspore_ranks
    from jaxckpt._foreign.oneflow import oneflow_ranks
    from jaxckpt._foreign.rank_files import rank_files
    from jaxckpt._foreign.rulesets import huggingface_rules
    from jaxckpt._format.leaf_types import register_leaf
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

    for _name in __all__:  # errors and tracebacks show the public names
        globals()[_name].__module__ = __name__
else:

    def __getattr__(name: str) -> Any:  # for a script of another project that is also named jaxckpt
        global _needed
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        _needed = True
        return getattr(importlib.reload(sys.modules[__name__]), name)
