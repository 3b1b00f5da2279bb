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

Preempted (SystemExit)                 no error: the job received a request to stop, and its last step is saved
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a leaf, or with a file of a checkpoint."""

    leaf: str | None
    """Path of the leaf; None for a file that holds no leaf's data."""

    reason: str
    """What is wrong, in words that follow the name of the file, or that of the leaf if no file is concerned."""

    remedy: str = ""
    """What the caller can do about it, if anything."""

    object: str = ""
    """The file, below the checkpoint's path; empty if no file is concerned."""

    box: tuple[tuple[int, int], ...] | None = None
    """(start, stop) along each dimension of the leaf, if the file is damaged there; of a PRNG key's raw data; () of a
    0-d leaf. None for a file without a leaf, and if no file is concerned."""

    @property
    def sides(self) -> str:
        """The box as people write it: "[0:4, 8:16]"; empty if there is none."""
        return "" if not self.box else "[" + ", ".join(f"{start}:{stop}" for start, stop in self.box) + "]"

    def __str__(self) -> str:
        leaf = "" if self.leaf is None else f"{show(self.leaf)}{self.sides}"
        file = f"{': ' if leaf else ''}{self.object}" if self.object else ""
        return f"{leaf}{file} {self.reason}".lstrip()


class JaxckptError(Exception):
    """Base of every error that jaxckpt raises on purpose.

    `problems` has a `Problem` for each leaf or file that is at fault, if the error is about some.
    """

    def __init__(self, *args: object, problems: Iterable[Problem] = ()) -> None:
        super().__init__(*args)
        self.problems = tuple(problems)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the leaves that `problems` names, each once."""
        return tuple(dict.fromkeys(problem.leaf for problem in self.problems if problem.leaf is not None))

    @classmethod
    def of(cls, head: str, problems: Sequence[Problem], *remedies: str) -> Self:
        """An error that lists problems, and then what can be done about them."""
        known = dict.fromkeys([*remedies, *(problem.remedy for problem in problems)])
        lines = [f"{head}:", listing(map(str, problems)), "; ".join(filter(None, known))]
        return cls("\n".join(filter(None, lines)), problems=problems)


class InputError(JaxckptError, ValueError):
    """The caller's arguments do not make sense; nothing was read or written."""


class TreeError(InputError):
    """The tree has a leaf or a key that cannot be stored, or a path that names no leaf."""


class SpecError(InputError):
    """A PartitionSpec does not fit: an axis the mesh lacks, a dimension that does not divide, too many entries."""


class MismatchError(InputError):
    """The target and the checkpoint differ. `problems` has one entry for each leaf that does."""


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
    """Another process of the job stopped this one."""


class PeerFailedError(PeerError):
    """Another process raised; its own error is quoted in the message."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Another process did not answer within `Options.timeout_seconds`."""


class PeersDisagreeError(PeerError):
    """The processes were given different trees, or saw different checkpoints."""


class PathNotSharedError(PeerError):
    """A process does not see the folder that process 0 made."""


class Preempted(SystemExit):
    """The job received a request to stop. Uncaught, it ends the program with status 143, as SIGTERM does."""

    def __init__(self, message: str) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message

    def __str__(self) -> str:
        return self.message


_LISTED = 20


def show(path: str) -> str:
    """The path of a leaf or container as error messages write it."""
    return repr(path) if path else "'' (the tree itself)"


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
