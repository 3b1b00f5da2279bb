"""Power loss: replays the system calls of a traced program, cut at every point; only synced data is sure to survive.

A file that was written and not synced may be complete, truncated or empty. A name that was created, removed or
replaced, and whose folder was not synced, may be in any of its states since then, independently of other names.
Journalling file systems promise more than this. Each drawn state is written to disk and read.
"""

from __future__ import annotations

import copy
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import victims
from reliability import Fault
from victims import needs_strace, version, version_at

import jaxckpt

pytestmark = pytest.mark.child

CALLS = "fsync,fdatasync,rename,openat,mkdir,write,writev,unlink,unlinkat,rmdir,link,linkat,sendto"


@dataclass(eq=False, slots=True)
class Folder:
    """A folder, and the states in which its entries may survive a power loss."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    states: dict[str, list[tuple[int, File | Folder | None]]] = field(default_factory=dict)
    """For each name that changed since the last sync: (time, entry) of each state in which it may survive a power loss.
    The first state is the synced one."""

    def put(self, name: str, what: File | Folder | None, now: int) -> None:
        self.states.setdefault(name, [(-1, self.names.get(name))]).append((now, what))
        if what is None:
            self.names.pop(name)
        else:
            self.names[name] = what

    def sync(self, begun: int) -> None:
        """Apply a sync. It covers the changes made before it began."""
        for name, states in list(self.states.items()):
            covered = sum(at < begun for at, _ in states)
            self.states[name] = states[covered - 1 :]
            if covered == len(states):
                del self.states[name]


@dataclass(eq=False, slots=True)
class File:
    """A file: the path of a copy of its content, and whether its data would survive a power loss."""

    content: str
    written: int | None = None
    """Time of the last write since the last sync; None if everything is synced."""

    def sync(self, begun: int) -> None:
        if self.written is not None and self.written < begun:
            self.written = None


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that succeeded."""

    name: str
    paths: list[str]
    text: str
    begun: int
    ended: int


class Disk:
    """The folders below a path, in the state after a sequence of system calls."""

    def __init__(self, top: Path, kept: Path) -> None:
        self.top = str(top)
        self.kept = kept
        self.root = Folder()
        self._number = 0

    def load(self, below: Path) -> None:
        """Add the files that exist before the program starts. They count as synced."""
        for path in sorted(below.rglob("*")):
            folder, name = self._at(str(path))
            folder.names[name] = Folder() if path.is_dir() else File(self._keep(path))

    def _keep(self, path: Path) -> str:
        self._number += 1
        kept = str(self.kept / str(self._number))
        shutil.copyfile(path, kept)
        return kept

    def _at(self, path: str) -> tuple[Folder, str]:
        *above, name = os.path.relpath(path, self.top).split("/")
        folder = self.root
        for part in above:
            folder = folder.names[part]
            assert isinstance(folder, Folder), path
        return folder, name

    def do(self, call: Call) -> None:
        """Apply a call."""
        if call.paths == [self.top]:
            if call.name == "fsync":
                self.root.sync(call.begun)
            return
        if not call.paths or not all(path.startswith(f"{self.top}/") for path in call.paths):
            return
        folder, name = self._at(call.paths[0])
        found = folder.names.get(name)
        match call.name:
            case "mkdir":
                folder.put(name, Folder(), call.ended)
            case "openat":
                if "O_CREAT" in call.text and found is None:
                    folder.put(name, File(call.paths[0]), call.ended)
            case "write" | "writev":
                assert isinstance(found, File), call
                found.written = call.ended
            case "fsync" | "fdatasync":
                assert found is not None, call
                found.sync(call.begun)
            case "rename":
                assert isinstance(found, File), call
                target, new = self._at(call.paths[1])
                folder.put(name, None, call.ended)
                target.put(new, found, call.ended)
                found.content = call.paths[1]
            case "link" | "linkat":
                assert isinstance(found, File), call
                target, new = self._at(call.paths[1])
                target.put(new, found, call.ended)
                found.content = call.paths[1]  # the content is read later, when the old name may be gone
            case _:
                folder.put(name, None, call.ended)

    def lose_power(self, there: Path, draw: Callable[[int], int]) -> None:
        """Write a possible state after a power loss to a folder; `draw(n)` chooses one of n states."""
        self._write(self.root, there, draw)

    def _write(self, folder: Folder, there: Path, draw: Callable[[int], int]) -> None:
        there.mkdir()
        names = dict(folder.names)
        for name, states in folder.states.items():
            _, what = states[draw(len(states))]
            names.pop(name, None)
            if what is not None:
                names[name] = what
        for name, what in names.items():
            if isinstance(what, Folder):
                self._write(what, there / name, draw)
            else:
                halves = 2 if what.written is None else draw(3)
                # The content of deleted files, such as a writer's note, is gone. No published manifest refers to them.
                content = Path(what.content).read_bytes() if os.path.exists(what.content) else b""
                (there / name).write_bytes(content[: halves * len(content) // 2])


LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")


def replayed(log: str) -> Iterator[Call]:
    """The successful calls of a trace, in the order in which they ended."""
    begun: dict[str, tuple[str, str, int]] = {}
    for now, line in enumerate(log.splitlines()):
        thread, _, rest = line.partition(" ")
        if found := re.match(r" *<\.\.\. (\w+) resumed>(.*)", rest):
            name, text, since = begun.pop(thread)
            assert name == found[1]
            text += found[2]
        elif found := LINE.match(line):
            name, text, since = found[2], found[3], now
            if text.endswith("<unfinished ...>"):
                begun[thread] = name, text.removesuffix("<unfinished ...>"), since
                continue
        else:
            continue
        if " = -1 " not in text:
            yield Call(name, paths_of(name, text), text, since, now)


def paths_of(call: str, text: str) -> list[str]:
    match call:
        case "unlinkat":
            found = re.match(r'(?:AT_FDCWD|\d+)<([^>]*)>, "([^"]*)"', text)
            return [os.path.join(*found.groups())] if found else []
        case "fsync" | "fdatasync" | "write" | "writev":
            return re.findall(r"^\d+<([^>]*)>", text)
        case _:
            return re.findall(r'"(/[^"]*)"', text)


def trace(folder: Path, base: Path, program: Callable[..., None], *args: Any) -> tuple[Disk, list[Call]]:
    """The disk before a program saves below `folder`, which starts as a copy of `base`, and the program's calls."""
    folder.mkdir()
    shutil.copytree(base, folder / "new")
    (kept := folder.with_name(f"{folder.name}-kept")).mkdir()
    disk = Disk(folder, kept)
    disk.load(folder)
    log = folder.with_name(f"{folder.name}.log")
    victims.run_traced(program, str(folder / "new" / "deeper" / "ckpt"), *args, log=log, calls=CALLS)
    return disk, list(replayed(log.read_text()))


def after(disk: Disk, calls: list[Call]) -> tuple[Disk, int | None]:
    """The disk after some calls, and the version acknowledged by then."""
    disk = copy.deepcopy(disk)
    acknowledged = None
    for call in calls:
        if call.name == "sendto":
            (said,) = re.findall(r'"(\d+)\\n"', call.text)
            acknowledged = int(said)
        disk.do(call)
    return disk, acknowledged


def check_one(path: Path, old: int | None, acknowledged: int | None) -> str:
    """Check that a path holds the old or the new version; it must be the new one if it was acknowledged."""
    found = version_at(path)
    assert found in ((old, 2) if acknowledged is None else (2,)), f"version {found}, acknowledged {acknowledged}"
    return "no checkpoint is listed" if found is None else "the new" if found == 2 else "the old"


def check_steps(folder: Path, old: int | None, acknowledged: int | None) -> str:
    """Check a Checkpointer's directory: the kept step exists; the step being deleted is complete or absent."""
    steps = victims.versions_in(folder)
    assert {2} <= set(steps) <= {1, 2, 3}, steps
    if acknowledged == 3:
        assert steps == [2, 3]
    if acknowledged == 1:
        assert steps == [2]
    return "the step still exists, complete" if 1 in steps else "it is gone"


@needs_strace
@pytest.mark.fault(
    4,
    "power lost at any call of a save or deletion: unsynced data is lost, in part or completely",
    "each published step is complete; each acknowledged step is published",
    quick=60,
)
def test_after_a_power_loss(fault: Fault, tmp_path: Path) -> None:
    bases = {name: tmp_path / name for name in ("empty", "one", "steps")}
    for base in bases.values():
        base.mkdir()
    jaxckpt.save(bases["one"] / "deeper" / "ckpt", version(1), options=victims.OPTIONS)
    with jaxckpt.Checkpointer(bases["steps"] / "deeper" / "ckpt", options=victims.OPTIONS) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, version(step))
    scenes = [
        (None, check_one, *trace(tmp_path / "first", bases["empty"], victims.replace, 2)),
        (1, check_one, *trace(tmp_path / "over", bases["one"], victims.replace, 2)),
        (None, check_steps, *trace(tmp_path / "retention", bases["steps"], victims.keep_steps, 3)),
        (None, check_steps, *trace(tmp_path / "delete", bases["steps"], victims.delete_step, 1)),
    ]
    seen = {call.name for *_, calls in scenes for call in calls}
    changes = {"fsync", "linkat", "rename", "openat", "mkdir", "write", "writev", "unlink", "unlinkat"}
    assert changes | {"sendto"} <= seen
    draws: list[Callable[[int], int]] = [
        lambda _: 0,
        lambda n: n - 1,
        *(fault.random.randrange for _ in range(3)),
    ]
    cases = [(scene, cut, draw) for scene in scenes for draw in draws for cut in range(len(scene[-1]) + 1)]
    for number, ((old, check, disk, calls), cut, draw) in enumerate(fault.rounds(cases)):
        left, acknowledged = after(disk, calls[:cut])
        there = tmp_path / f"left-{number}"
        left.lose_power(there, draw)
        fault.saw(check(there / "new" / "deeper" / "ckpt", old, acknowledged))
        shutil.rmtree(there)


def check_frozen(folder: Path, acknowledged: int | None) -> str:
    """Check a run's directory whose steps share objects: each published step is complete, and the acknowledged one
    exists."""
    steps = sorted(int(found.parent.name) for found in folder.glob("*/manifest.json"))
    assert [victims.frozen_step(folder / f"{step:08d}") for step in steps] == steps
    assert acknowledged is None or max(steps, default=0) >= acknowledged, f"{steps}, acknowledged {acknowledged}"
    return f"{len(steps)} complete"


@needs_strace
@pytest.mark.fault(
    4,
    "power lost at any call of saves that link objects of earlier steps",
    "each published step is complete; each acknowledged step is published",
    quick=60,
)
def test_after_a_power_loss_during_links(fault: Fault, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    disk, calls = trace(tmp_path / "linked", tmp_path / "empty", victims.keep_frozen, 1, 3)  # no step is deleted
    assert sum(call.name in ("link", "linkat") for call in calls) == 8 + 3  # and three manifests
    draws: list[Callable[[int], int]] = [lambda _: 0, lambda n: n - 1, *(fault.random.randrange for _ in range(3))]
    cases = [(cut, draw) for draw in draws for cut in range(len(calls) + 1)]
    for number, (cut, draw) in enumerate(fault.rounds(cases)):
        left, acknowledged = after(disk, calls[:cut])
        left.lose_power(there := tmp_path / f"left-{number}", draw)
        fault.saw(check_frozen(there / "new" / "deeper" / "ckpt", acknowledged))
        shutil.rmtree(there)


@needs_strace
def test_the_replay_loses_what_is_not_synced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    disk, calls = trace(tmp_path / "first", tmp_path / "empty", victims.replace, 2, 1, False)
    left, acknowledged = after(disk, calls)
    assert acknowledged == 2
    ends: list[str] = []
    draw = random.Random(0).randrange
    for number in range(40):
        left.lose_power(there := tmp_path / f"left-{number}", draw)
        try:
            ends.append(check_one(there / "new" / "deeper" / "ckpt", None, None))
        except jaxckpt.CorruptError:
            ends.append("damaged")
    assert {"no checkpoint is listed", "damaged"} <= set(ends)
