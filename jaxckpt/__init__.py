"""jaxckpt saves and restores the sharded state of JAX training.

jaxckpt.save("/checkpoints/run1", state)                    # every process, each its own shards
state = jaxckpt.restore("/checkpoints/run1", mesh=mesh)     # onto any other mesh
weights = jaxckpt.load_numpy("/checkpoints/run1")           # on one host, without devices
"""

from jaxckpt._foreign.convert import convert
from jaxckpt._foreign.mindspore import mindspore_ranks
from jaxckpt._foreign.oneflow import oneflow_ranks
from jaxckpt._foreign.rank_files import rank_files
from jaxckpt._foreign.rulesets import huggingface_rules
from jaxckpt._inspect.checkpoint import Checkpoint, LazyLeaf, RestorePlan, open
from jaxckpt._inspect.diff import Delta, LeafDelta, diff
from jaxckpt._inspect.report import report
from jaxckpt._inspect.verify import Problem, VerifyReport, verify
from jaxckpt._restore.restore import load_numpy, restore
from jaxckpt._restore.rules import Rule, Rules
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
    SpecError,
    StorageError,
    TreeError,
)
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import Progress
from jaxckpt._save.background import PendingSave, SaveInfo
from jaxckpt._save.save import save, save_async
from jaxckpt._steps.checkpointer import Checkpointer

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
    "Rule",
    "Rules",
    "SaveInfo",
    "SpecError",
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
    "report",
    "restore",
    "save",
    "save_async",
    "verify",
]

for _name in __all__:  # errors and tracebacks name things as users know them
    globals()[_name].__module__ = __name__
