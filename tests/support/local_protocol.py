"""The local tier's protocol as a small model, and an exhaustive search of its states; see docs/local-tier.md.

    found = search(Bounds(hosts=3, crashes=2, saves=2))
    found.states, found.violation       # number of states, and None or the first trace that violates a guarantee

A host has one folder. A job runs one process on each of its hosts, and each process is a program of a few steps: sweep,
write, synchronize and publish, with a flush at the same time. The search takes every interleaving of these steps.
A crash can end all processes at any moment. Then no folder or any one folder is lost, and a job of any hosts starts.
Each rule of the protocol is a field of `Rules`. If a rule is switched off, the search must find a violation.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

# Positions of a process in its program.
ADOPT, IDLE, SWEEP, WRITE, SYNC, WRITTEN, PUBLISH, PUBLISHED = range(8)

FOREIGN_STEP = 1000
"""A step of another run, newer than any step of this run, exists on the last host from the start."""


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol. Each can be switched off."""

    written_barrier: bool = True
    """No process publishes before all have written."""
    confirmed_barrier: bool = True
    """A save returns only after all processes have published."""
    keep_confirmed: bool = True
    """The step that was restored or confirmed last is kept until a newer one is confirmed."""
    adopt: bool = True
    """Before a restored step is relied upon, every folder that has data of it gets its manifest."""
    keep_by_id: bool = True
    """That step is identified by its save id, not by the highest step number."""
    skip_third: bool = True
    """No local save begins while an older step than the one to keep is still being flushed."""
    own_run_only: bool = True
    """A folder of another run is not read."""
    match_ids: bool = True
    """Objects belong to the same save if their save ids are equal, not their step numbers."""
    storage_if_newer: bool = True
    """The storage's step is restored if it is newer than the newest complete local step."""


class Save(NamedTuple):
    """One save of a step. Its objects are numbered like its hosts: object i is owned by hosts[i]."""

    step: int
    serial: int
    hosts: tuple[int, ...]
    foreign: bool = False

    def held_by(self, host: int) -> int:
        """The objects that a host holds, as bits: its own, and the copy for the host before it in the ring."""
        if host not in self.hosts:
            return 0
        here = self.hosts.index(host)
        return 1 << here | 1 << (here - 1) % len(self.hosts)

    @property
    def all_objects(self) -> int:
        return (1 << len(self.hosts)) - 1


class Held(NamedTuple):
    """The data of one save in one folder."""

    save: Save
    manifest: bool
    objects: int
    """Objects with the right length, as bits."""
    whole: int
    """Objects that also have their content. A crash before `SYNC` leaves the others torn."""


Folder = tuple[Held, ...]


class Promise(NamedTuple):
    """The last save that returned to a caller or was restored, and its hosts that have lost their folder."""

    save: Save
    lost: int = 0


class Flush(NamedTuple):
    save: Save
    done: int
    """Processes that have copied their objects to the storage, as bits."""


class Job(NamedTuple):
    """A running job."""

    folders: tuple[Folder, ...]
    storage: Save | None
    promise: Promise | None
    crashes: int
    writers: tuple[int, ...]
    """The hosts that have a process."""
    visible: tuple[int, ...]
    """The hosts whose folders the processes see, including folders of others if all share one host."""
    at: tuple[int, ...]
    """The position of each process in its program."""
    saves: int
    """How many more saves this job may begin."""
    current: Save | None = None
    due: bool = False
    """Whether the current save is due for the storage."""
    keep: Save | None = None
    last: int = 0
    """The step that was restored or saved last."""
    flush: Flush | None = None


class Dead(NamedTuple):
    """The state after a crash: the data on disk, and the guarantees given so far."""

    folders: tuple[Folder, ...]
    storage: Save | None
    promise: Promise | None
    crashes: int


State = Job | Dead


@dataclass(frozen=True)
class Bounds:
    hosts: int = 3
    crashes: int = 2
    """Number of crashes. After the last one, a job restores, and the search ends there."""
    saves: int = 2
    """Saves that one job may begin."""


class Violation(Exception):
    """A guarantee of the protocol does not hold."""


@dataclass(frozen=True)
class Found:
    states: int
    restores: int
    """Agreements on a step to restore that were checked."""
    violation: str | None
    trace: tuple[str, ...] = ()


def start(bounds: Bounds) -> Dead:
    foreign = Save(FOREIGN_STEP, 0, (bounds.hosts - 1,), foreign=True)
    return Dead(((),) * (bounds.hosts - 1) + ((Held(foreign, True, 1, 1),),), None, None, 0)


def search(bounds: Bounds, rules: Rules = Rules()) -> Found:
    """Visit every state that can be reached, nearest first, and stop at the first violation."""
    first = start(bounds)
    before: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque[State]([first])
    restores = 0
    while waiting:
        state = waiting.popleft()
        try:
            for label, after in successors(state, bounds, rules):
                restores += isinstance(state, Dead)
                if after not in before:
                    before[after] = (state, label)
                    waiting.append(after)
        except Violation as violation:
            return Found(len(before), restores, str(violation), _trace(state, before))
    return Found(len(before), restores, None)


def sample(bounds: Bounds, walks: int, rules: Rules = Rules(), seed: int = 0) -> Found:
    """Repeat random walks from the start, for more hosts than an exhaustive search can handle."""
    chance = random.Random(seed)
    seen = set[State]()
    restores = 0
    for _ in range(walks):
        state: State = start(bounds)
        trace = list[str]()
        while True:
            seen.add(state)
            try:
                choices = list(successors(state, bounds, rules))
            except Violation as violation:
                return Found(len(seen), restores, str(violation), tuple(trace))
            restores += isinstance(state, Dead)
            steps = [choice for choice in choices if isinstance(choice[1], Job)]
            # Crashes are few of many choices. Without this weight, all walks would end early.
            some = choices if not steps or chance.random() < 0.05 else steps
            if not some:
                break
            label, state = chance.choice(some)
            trace.append(label)
    return Found(len(seen), restores, None)


def _trace(state: State, before: dict[State, tuple[State, str] | None]) -> tuple[str, ...]:
    labels = list[str]()
    while (came := before[state]) is not None:
        state, label = came
        labels.append(label)
    return tuple(reversed(labels))


def successors(state: State, bounds: Bounds, rules: Rules) -> Iterator[tuple[str, State]]:
    """Every step that can come next. Raises Violation."""
    if isinstance(state, Dead):
        yield from _restarts(state, bounds, rules)
        return
    if state.crashes == bounds.crashes:
        return  # the restore has been checked, and no later crash depends on the rest
    yield from _crashes(state)
    yield from _together(state, rules)
    for process in range(len(state.writers)):
        yield from _alone(state, process, rules)
    yield from _flushing(state)


# A crash, and the next job ------------------------------------------------------------------------------------


def _crashes(job: Job) -> Iterator[tuple[str, Dead]]:
    for lost in (None, *range(len(job.folders))):
        folders, promise = job.folders, job.promise
        if lost is not None:
            others = tuple(held for held in folders[lost] if held.save.foreign)
            if others == folders[lost]:
                continue
            folders = (*folders[:lost], others, *folders[lost + 1 :])
            if promise is not None and lost in promise.save.hosts:
                promise = promise._replace(lost=promise.lost | 1 << lost)
        yield (
            f"crash, {'nothing' if lost is None else f'folder {lost}'} lost",
            _renumbered(Dead(folders, job.storage, promise, job.crashes + 1)),
        )


def _renumbered(dead: Dead) -> Dead:
    """The same state with the lowest numbers, so that states that differ only in numbering are equal."""
    saves = {held.save for folder in dead.folders for held in folder if not held.save.foreign}
    saves |= {dead.storage} - {None} | ({dead.promise.save} if dead.promise else set())
    if not saves:
        return dead
    lowest = min(save.step for save in saves) - 1
    new = {old: old._replace(step=old.step - lowest, serial=i) for i, old in enumerate(sorted(saves), 1)}
    folders = tuple(
        tuple(sorted(held._replace(save=new.get(held.save, held.save)) for held in folder)) for folder in dead.folders
    )
    promise = dead.promise and dead.promise._replace(save=new[dead.promise.save])
    return dead._replace(folders=folders, storage=dead.storage and new[dead.storage], promise=promise)


def _restarts(dead: Dead, bounds: Bounds, rules: Rules) -> Iterator[tuple[str, Job]]:
    """A job on any hosts. It sees only their folders (one folder per host) or all folders (one shared host)."""
    hosts = tuple(range(bounds.hosts))
    for count in range(1, bounds.hosts + 1):
        for writers in itertools.combinations(hosts, count):
            for visible in {writers, hosts}:
                for save, local in _agreed(dead, visible, rules):
                    _check_restore(dead, visible, save, local)
                    last = save.step if save else 0
                    promise = dead.promise
                    if promise and last < promise.save.step:
                        promise = None  # too much was lost, so the storage's step counts from here on
                    label = f"start on {writers}, sees {visible}: {'local' if local else 'storage'} step {last}"
                    at = (ADOPT if local and rules.adopt else IDLE,) * count
                    yield label, Job(
                        dead.folders, dead.storage, promise, dead.crashes, writers, visible, at, bounds.saves,
                        keep=save if local else None, last=last,
                    )  # fmt: skip


def _agreed(dead: Dead, visible: tuple[int, ...], rules: Rules) -> list[tuple[Save | None, bool]]:
    """The step that the processes agree to restore, and whether from the folders; several if the choice is
    arbitrary."""
    seen = [held for host in visible for held in dead.folders[host] if not (held.save.foreign and rules.own_run_only)]
    whole = list[Save]()
    for save in {held.save for held in seen if held.manifest}:
        same = [h for h in seen if h.save == save or (h.save.step == save.step and not rules.match_ids)]
        objects = 0
        for held in same:
            objects |= held.objects
        if objects & save.all_objects == save.all_objects:
            whole.append(save)
    newest = max((save.step for save in whole), default=-1)
    local = [(save, True) for save in whole if save.step == newest]
    storage = dead.storage
    if storage and rules.storage_if_newer and newest <= storage.step:
        local = [(save, True) for save, _ in local if save == storage]
    return local or [(storage, False)]


def _check_restore(dead: Dead, visible: tuple[int, ...], save: Save | None, local: bool) -> None:
    step = save.step if save else 0
    if save and local:
        if save.foreign:
            raise Violation("a foreign run's step is restored")
        there = content = 0
        for held in (held for host in visible for held in dead.folders[host] if held.save == save):
            there |= held.objects
            content |= held.whole
        if there != save.all_objects:
            raise Violation("objects of two saves are mixed")
        if content != save.all_objects:
            raise Violation("a torn object is restored")
    if dead.storage and (step < dead.storage.step or (step == dead.storage.step and save != dead.storage)):
        raise Violation("the storage has a newer step")
    promise = dead.promise
    if promise and step < promise.save.step:
        gone = {host for host in promise.save.hosts if promise.lost >> host & 1 or host not in visible}
        if len(gone) <= min(1, len(promise.save.hosts) - 1):
            raise Violation("a step that was given to the caller is lost")


# A running job --------------------------------------------------------------------------------------------


def _together(job: Job, rules: Rules) -> Iterator[tuple[str, Job]]:
    """The collective steps: the meeting before a save, and the two barriers."""
    where = set(job.at)
    everywhere = len(job.writers)
    if where == {IDLE} and job.saves:
        if rules.skip_third and job.flush and job.flush.save != job.keep and not _flushed(job):
            return
        serial = 1 + max((held.save.serial for folder in job.folders for held in folder), default=0)
        serial = max(serial, 1 + (job.storage.serial if job.storage else 0), 1 + _serial(job.promise))
        save = Save(job.last + 1, serial, job.writers)
        for due in (False, True) if job.flush is None else (False,):
            yield (
                f"save of step {save.step}{', due for the storage' * due}",
                job._replace(
                    at=(SWEEP,) * everywhere, current=save, due=due, saves=job.saves - 1, promise=_relied_upon(job)
                ),
            )
    if where == {WRITTEN} and rules.written_barrier:
        yield "all have written", job._replace(at=(PUBLISH,) * everywhere)
    if where == {PUBLISHED}:
        assert job.current is not None
        yield (
            "all have published: the save returns",
            job._replace(
                at=(IDLE,) * everywhere,
                keep=job.current,
                last=job.current.step,
                promise=Promise(job.current),
                flush=Flush(job.current, 0) if job.due else job.flush,
            ),
        )


def _relied_upon(job: Job) -> Promise | None:
    """The guarantee after all processes have restored a step: from here on, that step must not be lost either.

    An older guarantee stays, because a newer step fulfills it. A guarantee for the same step is replaced: if two
    attempts at a step are complete, the choice between them is arbitrary.
    """
    save = job.keep
    if save is None or (job.promise and (job.promise.save == save or job.promise.save.step < save.step)):
        return job.promise
    lost = 0
    for host in save.hosts:
        if Held(save, True, save.held_by(host), save.held_by(host)) not in job.folders[host]:
            lost |= 1 << host
    return Promise(save, lost)


def _serial(promise: Promise | None) -> int:
    return promise.save.serial if promise else 0


def _alone(job: Job, process: int, rules: Rules) -> Iterator[tuple[str, Job]]:
    """The next step of one process's program."""
    at, host, save = job.at[process], job.writers[process], job.current

    def to(next_at: int, **changes: object) -> Job:
        return job._replace(at=(*job.at[:process], next_at, *job.at[process + 1 :]), **changes)

    if at == ADOPT:
        for folder in _served(job, process):
            for held in job.folders[folder]:
                if held.save == job.keep and not held.manifest:
                    adopted = _with(job, folder, held, held._replace(manifest=True))
                    yield f"process {process} adopts the step in folder {folder}", to(ADOPT, folders=adopted)
                    return
        yield f"process {process} has adopted the step", to(IDLE)
    if at == SWEEP:
        for folder in _served(job, process):
            for held in job.folders[folder]:
                if held.save.foreign or _kept(job, folder, held, rules):
                    continue
                less = held._replace(manifest=False) if held.manifest else None
                what = "the manifest" if held.manifest else "the data"
                deleted = _with(job, folder, held, less)
                label = f"process {process} deletes {what} of step {held.save.step} in folder {folder}"
                yield label, to(at, folders=deleted)
                return
        yield f"process {process} has nothing left to delete", to(WRITE)
    if save is None:
        return
    if at == WRITE:
        folders = _with(job, host, None, Held(save, False, save.held_by(host), 0))
        if sum(not held.save.foreign for held in folders[host]) > 2:
            raise Violation("three steps are held in one folder")
        yield f"process {process} writes step {save.step}", to(SYNC, folders=folders)
    if at in (SYNC, PUBLISH):
        held = next(held for held in job.folders[host] if held.save == save)
        if at == SYNC:
            done = held._replace(whole=held.objects)
            yield f"process {process} has written step {save.step}", to(WRITTEN, folders=_with(job, host, held, done))
        else:
            done = held._replace(manifest=True)
            changes: dict[str, object] = {"folders": _with(job, host, held, done)}
            if not rules.confirmed_barrier:
                changes["promise"] = Promise(save)
            yield f"process {process} publishes step {save.step}", to(PUBLISHED, **changes)
    if at == WRITTEN and not rules.written_barrier:
        yield f"process {process} does not wait", to(PUBLISH)


def _served(job: Job, process: int) -> Iterator[int]:
    """The folders that a process cleans up: its own, and its share of those without a writer."""
    yield job.writers[process]
    rest = [host for host in job.visible if host not in job.writers]
    yield from rest[process :: len(job.writers)]


def _kept(job: Job, folder: int, held: Held, rules: Rules) -> bool:
    if not rules.keep_confirmed:
        return False
    if not rules.keep_by_id:
        return held.save.step == max(other.save.step for other in job.folders[folder] if not other.save.foreign)
    return held.save == job.keep


def _with(job: Job, folder: int, old: Held | None, new: Held | None) -> tuple[Folder, ...]:
    """The folders with one entry replaced, added or removed."""
    entries = [held for held in job.folders[folder] if held != old]
    entries += [new] if new else []
    return (*job.folders[:folder], tuple(sorted(entries)), *job.folders[folder + 1 :])


def _flushed(job: Job) -> bool:
    return job.flush is not None and job.flush.done == (1 << len(job.writers)) - 1


def _flushing(job: Job) -> Iterator[tuple[str, Job]]:
    """The flush: each owner copies its object, and process 0 publishes after all have."""
    flush = job.flush
    if flush is None:
        return
    if _flushed(job):
        yield f"process 0 publishes step {flush.save.step} in the storage", job._replace(storage=flush.save, flush=None)
        return
    for process, host in enumerate(job.writers):
        if flush.done >> process & 1:
            continue
        source = next((held.whole for held in job.folders[host] if held.save == flush.save), 0)
        if not source >> process & 1:
            raise Violation("a flushed step reaches the storage torn")
        yield (
            f"process {process} flushes step {flush.save.step}",
            job._replace(flush=flush._replace(done=flush.done | 1 << process)),
        )


def without(rule: str) -> Rules:
    """The protocol without one of its rules."""
    return replace(Rules(), **{rule: False})
