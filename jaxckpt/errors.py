"""The errors that this library raises on purpose.

JaxckptError
├── InputError (ValueError)            the caller's arguments
│   ├── TreeError                      a leaf or key that cannot be stored; a path or pattern that matches nothing
│   ├── SpecError                      a PartitionSpec that does not fit its leaf or its mesh
│   ├── MismatchError                  target and checkpoint differ: missing or extra leaves, other shapes, lossy casts
│   └── LayoutError                    the saved layout needs devices that this job does not have
├── CheckpointExistsError (FileExistsError)
├── NotACheckpointError (FileNotFoundError)
├── CorruptError                       the stored data is not what was saved
│   ├── ManifestError                  manifest.json is damaged, hostile, or in a newer format
│   └── DataError                      an object or a zarr.json is missing, truncated, or altered
│       └── UnsupportedError           a leaf of another library cannot be read, although it is not damaged
├── StorageError (OSError)             the file system or object store refused an operation or stopped responding
└── PeerError                          this process stopped because of another process
    ├── PeerFailedError                it raised an error, which is quoted
    ├── PeerTimeoutError (TimeoutError)  it did not respond in time
    ├── PeersDisagreeError             the processes made different calls, passed different arguments, or see different
    │                                  checkpoints
    └── PathNotSharedError             it does not see the path that process 0 sees

Preempted (SystemExit)                 the job was preempted; the message says whether its last step is saved
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
    """What is wrong: a phrase to follow the name of the file, or of the leaf if no file is concerned."""

    remedy: str = ""
    """What the caller can do about it, if anything."""

    object: str = ""
    """The file, relative to the checkpoint's path; empty if no file is concerned."""

    box: tuple[tuple[int, int], ...] | None = None
    """The damaged box: (start, stop) along each dimension of the leaf, or of a PRNG key's raw data; () for a 0-d leaf.
    None for a file without a leaf, and if no file is concerned."""

    @property
    def sides(self) -> str:
        """The box as an index expression: "[0:4, 8:16]"; empty if there is no box."""
        return "" if not self.box else "[" + ", ".join(f"{start}:{stop}" for start, stop in self.box) + "]"

    def __str__(self) -> str:
        leaf = "" if self.leaf is None else f"{show_path(self.leaf)}{self.sides}"
        file = f"{': ' if leaf else ''}{self.object}" if self.object else ""
        return f"{leaf}{file} {self.reason}".lstrip()


class JaxckptError(Exception):
    """Base class of the errors that jaxckpt raises on purpose.

    `problems` has a `Problem` for each leaf or file at fault, and is empty if the error concerns no leaf or file.
    """

    def __init__(self, *args: object, problems: Iterable[Problem] = ()) -> None:
        super().__init__(*args)
        self.problems = tuple(problems)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the leaves that `problems` names, without duplicates."""
        return tuple(dict.fromkeys(problem.leaf for problem in self.problems if problem.leaf is not None))

    @classmethod
    def of(cls, head: str, problems: Sequence[Problem], *remedies: str, listed: Iterable[str] | None = None) -> Self:
        """An error that lists the problems, or these lines about them, and their remedies."""
        unique_remedies = dict.fromkeys([*remedies, *(problem.remedy for problem in problems)])
        lines = [
            f"{head}:",
            show_lines(map(str, problems) if listed is None else listed),
            "; ".join(filter(None, unique_remedies)),
        ]
        return cls("\n".join(filter(None, lines)), problems=problems)


class InputError(JaxckptError, ValueError):
    """The arguments are invalid, or do not fit the checkpoint. The call saved or restored nothing."""


class TreeError(InputError):
    """The tree has a leaf or a key that cannot be stored, or a path or pattern in an argument matches nothing."""


class SpecError(InputError):
    """A PartitionSpec does not fit: an unknown mesh axis, a dimension that is not divisible, or too many entries."""


class MismatchError(InputError):
    """The target and the checkpoint differ. `problems` has one entry for each leaf that differs."""


class LayoutError(InputError):
    """The saved layout needs devices that this job does not have, or a process lacks data that it should save."""


class CheckpointExistsError(JaxckptError, FileExistsError):
    """The path already holds a checkpoint or other files, or another save published there first."""


class NotACheckpointError(JaxckptError, FileNotFoundError):
    """The path has no manifest.json, or the checkpoint was deleted or replaced while it was being read."""


class CorruptError(JaxckptError):
    """The stored data is not what was saved."""


class ManifestError(CorruptError):
    """manifest.json is damaged or inconsistent, or has a format version that this jaxckpt cannot read."""


class DataError(CorruptError):
    """An object, a zarr.json or a process's state is missing or altered, or a file of another library is damaged."""

    rows: tuple[int, int] | None = None  # the damaged rows of a stack, if they are known


class UnsupportedError(DataError):
    """A leaf of another library's checkpoint cannot be read, although it is not damaged: an object of a program, for
    example. `select=` leaves it out."""


class StorageError(JaxckptError, OSError):
    """The file system or the object store refused an operation (no space, no permission, an I/O error), or stopped
    responding."""


class PeerError(JaxckptError):
    """This process had to stop because of another process of the job."""

    repeats_earlier = False  # whether the other process only raised the error of an earlier background save
    silent: tuple[int, ...] = ()  # the processes that did not respond
    in_exchange = False  # whether JAX could not move data between processes, and nobody has found out why
    cause = ""  # what has failed in the other processes: "storage", "data" (what was stored), or anything else


class PeerFailedError(PeerError):
    """Another process raised an error, which the message quotes."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Another process did not respond within `Options.timeout_seconds`, or stopped for 60 s after it had joined."""


class PeersDisagreeError(PeerError):
    """The processes made different calls, passed different trees or arguments, or see different checkpoints."""


class PathNotSharedError(PeerError):
    """A process does not see the folder that process 0 created."""


class Preempted(SystemExit):
    """The job was preempted. The message says whether its last step is saved. If not caught, the program exits with
    status 143, as after SIGTERM."""

    def __init__(self, message: str) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message

    def __str__(self) -> str:
        return self.message


_LISTED = 20


def show_path(path: str) -> str:
    """The path of a leaf or container as error messages write it."""
    return repr(path) if path else "'' (the tree itself)"


def show_count(count: int, noun: str) -> str:
    """A count with its noun: "1 leaf", "2,000 leaves"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} " + ("leaves" if noun == "leaf" else f"{noun}es" if noun.endswith("s") else f"{noun}s")


def show_lines(problems: Iterable[str]) -> str:
    """The first 20 problems as indented lines, and the number of the others."""
    lines = list(problems)
    shown = [f"  {line}" for line in lines[:_LISTED]]
    if len(lines) > _LISTED:
        shown.append(f"  … and {len(lines) - _LISTED:,} more")
    return "\n".join(shown)
