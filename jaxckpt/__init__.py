"""jaxckpt saves and restores the sharded state of JAX training.

jaxckpt.save("/checkpoints/run1", state)                    # every process, each its own shards
state = jaxckpt.restore("/checkpoints/run1", mesh=mesh)     # onto any other mesh
weights = jaxckpt.load_numpy("/checkpoints/run1")           # on one host, without devices
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxckpt._audit import Checkpoint, LazyLeaf, RestorePlan, open
    from jaxckpt._checkpointer import Checkpointer
    from jaxckpt._convert import convert
    from jaxckpt._diff import Delta, LeafDelta, diff
    from jaxckpt._errors import (
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
        SpecError,
        StorageError,
        TreeError,
    )
    from jaxckpt._mindspore import mindspore_ranks
    from jaxckpt._oneflow import oneflow_ranks
    from jaxckpt._options import Options
    from jaxckpt._progress import Progress
    from jaxckpt._rank_files import rank_files
    from jaxckpt._report import report
    from jaxckpt._restore import load_numpy, restore
    from jaxckpt._save import PendingSave, SaveInfo, save, save_async
    from jaxckpt._verify import Problem, VerifyReport, verify

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
    "RestorePlan",
    "SaveInfo",
    "SpecError",
    "StorageError",
    "TreeError",
    "VerifyReport",
    "convert",
    "diff",
    "load_numpy",
    "mindspore_ranks",
    "oneflow_ranks",
    "open",
    "rank_files",
    "report",
    "restore",
    "save",
    "save_async",
    "verify",
]

_MODULES = (
    "_audit",
    "_checkpointer",
    "_convert",
    "_diff",
    "_errors",
    "_mindspore",
    "_oneflow",
    "_options",
    "_progress",
    "_rank_files",
    "_report",
    "_restore",
    "_save",
    "_verify",
)

if not TYPE_CHECKING:  # a type checker would take it for leave to name anything

    def __getattr__(name: str) -> Any:
        # All of it needs JAX, which takes most of a second to import; `jaxckpt --help` and a shell's completion do not.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for module in _MODULES:
            found = vars(importlib.import_module(f"{__name__}.{module}"))
            globals().update({public: found[public] for public in __all__ if public in found})
        for public in __all__:  # errors and tracebacks name things as users know them
            globals()[public].__module__ = __name__
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
