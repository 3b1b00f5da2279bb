"""Every error this library raises on purpose.

JaxckptError
├── InputError (ValueError)            the caller's arguments
│   ├── TreeError                      a leaf or key that cannot be stored; a path or pattern that matches nothing
│   ├── SpecError                      a PartitionSpec that does not fit its leaf or its mesh
│   ├── MismatchError                  target against checkpoint: missing, extra, misshaped, lossily cast leaves
│   └── LayoutError                    the saved layout needs devices that are not here
├── CheckpointExistsError (FileExistsError)
├── NotACheckpointError (FileNotFoundError)
├── CorruptError                       what is stored is not what was saved
│   ├── ManifestError                  manifest.json is damaged, hostile, or of a newer format
│   └── DataError                      an object or a zarr.json is missing, cut, or altered
├── StorageError (OSError)             the file system or object store refused
└── PeerError                          another process of the job
    ├── PeerFailedError                it raised; its own error is quoted
    ├── PeerTimeoutError (TimeoutError)  it did not answer in time
    ├── PeersDisagreeError             it saw another tree or another checkpoint
    └── PathNotSharedError             it does not see the path that process 0 sees

Preempted (SystemExit)                 no error: the job was told to stop, and its last step is saved
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence


class JaxckptError(Exception):
    """Base of every error that jaxckpt raises on purpose."""


class InputError(JaxckptError, ValueError):
    """The caller's arguments do not make sense; nothing was read or written."""


class TreeError(InputError):
    """The tree has a leaf or a key that cannot be stored, or a path that names no leaf."""


class SpecError(InputError):
    """A PartitionSpec does not fit: an axis the mesh lacks, a dimension that does not divide, too many entries."""


class MismatchError(InputError):
    """The target and the checkpoint differ. `problems` holds one line for each leaf that does."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class LayoutError(InputError):
    """The saved layout needs devices that this process does not see."""


class CheckpointExistsError(JaxckptError, FileExistsError):
    """A checkpoint, or something else, is already at the path."""


class NotACheckpointError(JaxckptError, FileNotFoundError):
    """There is no checkpoint at the path: no manifest.json was ever published there."""


class CorruptError(JaxckptError):
    """What is stored is not what was saved."""


class ManifestError(CorruptError):
    """manifest.json is damaged, contradicts itself, or is of a format this version does not read."""


class DataError(CorruptError):
    """An object or a zarr.json is missing, of another length, or altered."""


class StorageError(JaxckptError, OSError):
    """The file system or the object store refused: no space, no permission, an I/O error."""


class PeerError(JaxckptError):
    """Another process of the job stopped this one from going on."""


class PeerFailedError(PeerError):
    """Another process raised; its own error is quoted in the message."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Another process did not answer within `Options.timeout_seconds`."""


class PeersDisagreeError(PeerError):
    """The processes were given different trees, or saw different checkpoints."""


class PathNotSharedError(PeerError):
    """A process does not see the folder that process 0 made."""


class Preempted(SystemExit):
    """The job was told to stop. Uncaught, it ends the program with status 143, as SIGTERM does."""

    def __init__(self, message: str) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message

    def __str__(self) -> str:
        return self.message


_LISTED = 20


def counted(count: int, noun: str) -> str:
    """How many there are of something: "1 leaf", "2,000 leaves"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} " + ("leaves" if noun == "leaf" else f"{noun}es" if noun.endswith("s") else f"{noun}s")


def listing(problems: Iterable[str]) -> str:
    """Problems as indented lines, the first 20 and a count of the rest."""
    lines = list(problems)
    shown = [f"  {line}" for line in lines[:_LISTED]]
    if len(lines) > _LISTED:
        shown.append(f"  … and {len(lines) - _LISTED} more")
    return "\n".join(shown)
