"""Verifies a checkpoint: every file that the manifest names exists and is unchanged since the save."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import math
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import NamedTuple

from jaxckpt._inspect.executors import OpenedElsewhere, Remembered, grouped, require_executor, spread
from jaxckpt._keywords import explain_keywords
from jaxckpt._model import manifest as manifests
from jaxckpt._model import object_index, zarr
from jaxckpt._model.file_names import COPY, MANIFEST
from jaxckpt._model.grid import Box, cut_to_size, volume, whole_box
from jaxckpt._model.pieces import Bytes
from jaxckpt._model.records import Manifest
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options, options_or_default, require_bool
from jaxckpt._pipeline.lanes import operate, run_alone
from jaxckpt._pipeline.pipeline import Budget, pipeline
from jaxckpt._pipeline.progress import Report, display_progress, report_nothing, show_bytes
from jaxckpt._pipeline.threads import Task
from jaxckpt._pipeline.watchdog import require_not_stalled
from jaxckpt._pipeline.workers import Workers
from jaxckpt._restore.read_loop import read_box
from jaxckpt._restore.read_plan import max_read_bytes
from jaxckpt._run_folder.run_paths import resolve_step, steps_of, unfinished_steps
from jaxckpt._run_folder.steps import is_step
from jaxckpt._sources.foreign import ForeignCheckpoint, unreadable_reason
from jaxckpt._sources.open_source import Location, foreign_steps_of, source_at
from jaxckpt._sources.source import NativeCheckpoint, Source
from jaxckpt._store.load_manifest import load_manifest, read_copy
from jaxckpt._store.storage_errors import retry_stale, translate_os_errors
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import Path, store_at
from jaxckpt.errors import (
    CorruptError,
    DataError,
    JaxckptError,
    ManifestError,
    MismatchError,
    NotACheckpointError,
    Problem,
    StorageError,
    show_count,
    show_lines,
    show_path,
)

_THREADS = 8

_CHECK_BYTES = 8 << 20
"""Approximate host memory for the check of one file."""

_REPORT_SECONDS = 0.1
"""How often progress is reported while objects are read."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`."""

    path: str
    """The path or URL of the checkpoint, or of the run's directory."""

    quick: bool
    """Whether only the existence and size of objects were checked. Small files are always read."""

    problems: tuple[Problem, ...]
    """One for each damaged leaf and box, in order of the leaves. Problems of files without leaves come first."""

    leaves: int
    """Leaves of the checkpoint."""

    objects: int
    """Objects that the checkpoint should have."""

    checked_bytes: int
    """Bytes of the objects that were read and checked; 0 if `quick`."""

    unfinished_steps: tuple[int, ...] = ()
    """Steps of a run that were not checked, because their save is in progress or was interrupted. They are not
    problems: no reader sees them, and the next `Checkpointer` deletes those of a killed job."""

    unsupported: tuple[Problem, ...] = ()
    """Leaves of another library's checkpoint that cannot be read although they are not damaged, with reasons, such as
    objects of other programs."""

    @property
    def ok(self) -> bool:
        """Whether everything is unchanged since the save."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        state = "ok" if self.ok else show_count(len(self.problems), "problem")
        return f"<VerifyReport of {self.path!r}: {show_count(self.leaves, 'leaf')}, {state}>"

    def __str__(self) -> str:
        checked = "existence and lengths only" if self.objects else "metadata only"
        extent = checked if self.quick else f"{show_bytes(self.checked_bytes)} read"
        head = f"{self.path}: {show_count(self.leaves, 'leaf')} in {show_count(self.objects, 'object')}, {extent}"
        if self.unfinished_steps:
            head += f", {show_count(len(self.unfinished_steps), 'unfinished step')} skipped"
        if self.unsupported:
            lines = [f"{show_path(problem.leaf or '')}: {problem.reason}" for problem in self.unsupported]
            head += (
                f"; {show_count(len(lines), 'leaf')} cannot be read, without damage:\n{show_lines(lines)}\nthe others"
            )
        if self.ok:
            return f"{head}: ok"
        # One line per file and reason, because a damaged object may hold thousands of leaves.
        files: dict[tuple[str, str], list[Problem]] = {}
        for problem in self.problems:
            files.setdefault((problem.object, problem.reason), []).append(problem)
        lines = [f"{file} {reason}{_affected_leaves(hits)}" for (file, reason), hits in files.items()]
        return f"{head}; {show_count(len(self.problems), 'problem')}\n{show_lines(lines)}"


def _affected_leaves(problems: list[Problem]) -> str:
    """The leaves that are affected by the problems of one file, as text for its line."""
    hit = [f"{show_path(problem.leaf)}{problem.sides}" for problem in problems if problem.leaf is not None]
    if not hit:
        return ""
    return f": {', '.join(hit[:3])}" + (f" and {len(hit) - 3} more" if len(hit) > 3 else "")


@explain_keywords
def verify(
    path: Location,
    *,
    quick: bool = False,
    manifest_sha256: str | None = None,
    executor: Executor | None = None,
    options: Options | None = None,
) -> VerifyReport:
    """Read every byte of a checkpoint and check it against the checksums, digests and lengths that were saved with it.

    Any single process may call this; no JAX backend is started. Objects are read in parallel, a few MiB of each at a
    time.

    Args:
        path: A path or URL that `save` wrote. For a run's directory (also one of Orbax), one report covers all its
            complete steps, and each object's name begins with its step. Other checkpoints that `restore` accepts are
            read and decoded completely: coverage and lengths are checked, and checksums if the format has them.
        quick: Check only that each object exists and has the expected size, and that the small files are unchanged: one
            `stat` for each file, or on an object store one request for each object's last byte. Of Orbax and Zarr, only
            the metadata is checked; of other libraries' formats, also what opening them shows.
        manifest_sha256: As for `restore`. Of a run, the newest step is checked.
        executor: Any `concurrent.futures.Executor`, whose workers read the data; the report is the same. `options`
            apply to each worker, except the rate, which is that of all together. See docs/verify-and-diff.md.
        options: `progress`, `max_bytes_per_second` and the storage options; see `Options`.

    Returns:
        A report, which is true if there are no problems: `report.ok`, and `report.problems`, each with leaf, box,
        object and reason. Data that cannot be read is a problem, and so is a second copy of the manifest that is
        missing or damaged. A damaged manifest is reported as the only problem, because then nothing else can be
        trusted. `quick` detects neither flipped bits nor swapped objects of the same size.

    Raises:
        NotACheckpointError: `path` has no manifest, or the checkpoint was deleted or replaced in the meantime.
        StorageError: The manifest cannot be read, or the storage does not respond.
        InputError: An argument is invalid.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/verify", {"w": np.arange(100)}, overwrite=True)
        >>> jaxckpt.verify("/tmp/jaxckpt-doc/verify").ok
        True
    """
    options, quick = options_or_default(options), require_bool(quick, "quick")
    require_executor(executor)
    return run_alone(lambda: _verify_path(path, quick, options, manifest_sha256, executor), options.timeout_seconds)


def _verify_path(
    path: Location, quick: bool, options: Options, manifest_sha256: str | None, executor: Executor | None
) -> VerifyReport:
    """As `verify`. In a lane."""
    if isinstance(path, str | os.PathLike) and manifest_sha256 is None:  # otherwise one manifest is expected
        store = store_at(path, options)
        steps = steps_of(store) or ()
        if urls := [step.url for step in steps] or [step.path for step in foreign_steps_of(path, options)]:
            report = _verify_steps(os.fspath(path), urls, quick, options, executor)
            return replace(report, unfinished_steps=unfinished_steps(store) if steps else ())
    return _verify(path, quick, options, executor, manifest_sha256=manifest_sha256)


def _verify_steps(
    path: str, steps: Sequence[str], quick: bool, options: Options, executor: Executor | None
) -> VerifyReport:
    """One report on all steps of a run, without steps that are deleted in the meantime."""
    reports: list[tuple[str, VerifyReport]] = []
    for step in steps:
        name = step.rpartition("/")[2]
        try:
            reports.append((name, _verify(step, quick, options, executor, name)))
        except NotACheckpointError:
            pass
        except StorageError as error:
            if error.errno != errno.EACCES:
                raise
            problem = Problem(None, f"cannot be read: {error.strerror}", object=MANIFEST)
            reports.append((name, VerifyReport(step, quick, (problem,), 0, 0, 0)))
    return VerifyReport(
        path=path,
        quick=quick,
        problems=tuple(
            replace(problem, object=f"{name}/{problem.object}")
            for name, report in reports
            for problem in report.problems
        ),
        leaves=sum(report.leaves for _, report in reports),
        objects=sum(report.objects for _, report in reports),
        checked_bytes=sum(report.checked_bytes for _, report in reports),
        unsupported=tuple(problem for _, report in reports for problem in report.unsupported),
    )


def _verify(
    path: Location,
    quick: bool,
    options: Options,
    executor: Executor | None,
    step: str = "",
    *,
    manifest_sha256: str | None = None,
) -> VerifyReport:
    """Check one checkpoint, which is not a run's directory. `step` is its name if it is a step of one."""
    try:
        source = source_at(path, options, manifest_sha256)
    except CorruptError as error:
        file = MANIFEST if isinstance(error, ManifestError) or MANIFEST in str(error) else str(path)
        problem = Problem(None, f"cannot be used: {error}", object=file)
        return VerifyReport(str(path), quick, (problem,), 0, 0, 0)
    if not isinstance(source, NativeCheckpoint):
        return _verify_foreign(source, path, quick, options, step, executor)
    report = verify_files(source, quick, options, step, executor)
    change = source.change_since_open() if report.problems else None
    if change:
        raise NotACheckpointError(f"the checkpoint at {change} while it was being verified")
    return report


def verify_files(
    source: NativeCheckpoint, quick: bool, options: Options, step: str = "", executor: Executor | None = None
) -> VerifyReport:
    """Check the files that a manifest names."""
    store, manifest = source.store, source.manifest
    files = list(_files(manifest))
    misfits = store.check_lengths({file.key: file.length for file in files})
    problems = [problem for file in files if file.key in misfits for problem in file.problems(None, misfits[file.key])]
    problems += _copy_problems(source)
    rest = [] if quick else [file for file in files if file.key not in misfits]
    total = sum(file.length for file in rest)
    with display_progress("verify", total, options.progress, step) as advance:
        meter = _ReadMeter(advance, options.max_bytes_per_second)
        if executor is None:
            files_to_read = itertools.chain(_small_files(manifest), _throttle(rest, meter))
            problems += _check_concurrently(store, files_to_read, meter)
        else:
            problems += _check_concurrently(store, _small_files(manifest), meter)
            problems += _check_elsewhere(executor, source, files, rest, options, meter)
        meter.report_rest()
    numbers = {None: -1, **manifest.numbers}
    problems.sort(key=lambda problem: (numbers[problem.leaf], problem.box or (), problem.object))
    return VerifyReport(store.url, quick, tuple(problems), len(manifest.leaves), len(files), total)


_COPY_SECONDS = 0.5
"""How long a copy may differ from the manifest: whoever replaces or deletes both changes the copy first."""


def _copy_problems(source: NativeCheckpoint) -> list[Problem]:
    """The problem of the second copy of the manifest, if there is one. Other writers, and jaxckpt before it recorded
    its own version, may write none."""
    key = f"{source.manifest.data_folder}/{COPY}"
    check = _SmallFile(key, source.digest, required="jaxckpt" in source.manifest.libraries)
    if not check.problems(source.store):
        return []
    time.sleep(_COPY_SECONDS)
    remedy = f"`jaxckpt repair {shlex.quote(source.url)}` writes this second copy of {MANIFEST} again"
    return [replace(problem, reason=f"{problem.reason}: {remedy}") for problem in check.problems(source.store)]


def _check_elsewhere(
    executor: Executor,
    source: NativeCheckpoint,
    files: Sequence[_ExpectedObject],
    rest: Iterable[_ExpectedObject],
    options: Options,
    meter: _ReadMeter,
) -> Iterator[Problem]:
    """The problems of the files in `rest`, in order, which the workers of an executor read."""
    opened = Remembered.of(functools.partial(_open_files, OpenedElsewhere.of(source, source.url, options)))
    numbers = {file.key: number for number, file in enumerate(files)}

    def units() -> Iterator[tuple[int, ...]]:
        for unit in grouped((numbers[file.key], file.length) for file in rest):
            yield unit
            meter.pause(sum(files[number].length for number in unit))

    check = functools.partial(_check_files, opened, options.timeout_seconds)
    for unit, problems in spread(executor, check, units(), options.timeout_seconds):
        meter.add(sum(files[number].length for number in unit))
        meter.report()
        yield from problems


def _open_files(opened: OpenedElsewhere) -> tuple[Store, list[_ExpectedObject]]:
    source = opened.open()
    assert isinstance(source, NativeCheckpoint)
    return source.store, list(_files(source.manifest))


def _check_files(
    opened: Remembered[tuple[Store, list[_ExpectedObject]]], seconds: float, unit: Sequence[int]
) -> list[Problem]:
    """The problems of some files of a checkpoint. In a worker."""
    store, files = opened.get()
    meter = _ReadMeter(report_nothing, None)
    return run_alone(lambda: list(_check_concurrently(store, [files[number] for number in unit], meter)), seconds)


def _verify_foreign(
    source: ForeignCheckpoint, location: Location, quick: bool, options: Options, step: str, executor: Executor | None
) -> VerifyReport:
    """Read a foreign checkpoint completely, box by box, and compare the checksums of its format. Everything else was
    checked when it was opened."""
    manifest, problems = source.manifest, list[Problem]()
    reasons = {leaf.path: reason for leaf in manifest.leaves if (reason := unreadable_reason(source, leaf))}
    unsupported = tuple(Problem(path, reason, object=source.url) for path, reason in reasons.items())
    stored = [number for number, leaf in enumerate(manifest.leaves) if leaf.stack is not None]
    arrays = [] if quick else [number for number in stored if manifest.leaves[number].path not in reasons]
    sizes = {number: manifest.leaf_bytes(manifest.leaves[number]) for number in arrays}
    with display_progress("verify", sum(sizes.values()), options.progress, step) as advance:
        meter = _ReadMeter(advance, options.max_bytes_per_second)
        if executor is None:
            for number in arrays:
                problems += _check_leaf(source, number, options, meter)
        else:
            opened = OpenedElsewhere.of(source, location, options)
            check = functools.partial(_check_leaves, Remembered.of(opened.open), opened.options)
            for unit, found in spread(executor, check, grouped(sizes.items()), options.timeout_seconds):
                meter.add(sum(sizes[number] for number in unit))
                meter.pause(sum(sizes[number] for number in unit))
                problems += found
        meter.report_rest()
    count, total = len(manifest.leaves), sum(sizes.values())
    return VerifyReport(source.url, quick, tuple(problems), count, len(arrays), total, unsupported=unsupported)


def _check_leaf(source: ForeignCheckpoint, number: int, options: Options, meter: _ReadMeter) -> list[Problem]:
    """Read a leaf of a foreign checkpoint."""
    problems, manifest = list[Problem](), source.manifest
    leaf = manifest.leaves[number]
    number_of_stack, row = manifest.stack_and_row(leaf)
    stack = manifest.decoded_stacks[number_of_stack]
    fits = max(1, max_read_bytes(options.host_bytes) // stack.itemsize)
    for box in cut_to_size(whole_box(stack.shape), (stack.chunk_sides[1:],), fits):
        try:
            read_box(source, number, box, options)
        except (DataError, StorageError, MismatchError) as error:  # the last one of an average
            problems.append(Problem(leaf.path, f"cannot be read: {error}", object=source.url, box=box))
        meter.add(volume(box) * stack.itemsize)
        meter.pause(volume(box) * stack.itemsize)
    try:
        source.row_data[number_of_stack][row].check()
    except (DataError, StorageError) as error:
        if not problems:
            problems.append(Problem(leaf.path, str(error), object=source.url))
    return problems


def _check_leaves(opened: Remembered[Source], options: Options, unit: Sequence[int]) -> list[Problem]:
    """The problems of some leaves of a foreign checkpoint. In a worker."""
    source, meter = opened.get(), _ReadMeter(report_nothing, None)
    assert isinstance(source, ForeignCheckpoint)
    problems: list[Problem] = []
    for number in unit:
        problems += _check_leaf(source, number, options, meter)
    return problems


@dataclass(frozen=True, slots=True)
class _ExpectedObject:
    """An object that should exist."""

    key: str
    stack: Stack
    index: tuple[int, ...]
    box: Box
    length: int
    digest: str

    leaves: Mapping[int, Sequence[str]]
    """Paths of the leaves in each row of the stack."""

    def problems(self, box: Box | None, reason: str) -> Iterator[Problem]:
        """For each affected leaf, a problem of a box of the stack; of the whole object if `box` is None."""
        (first, last), *sides = box or self.box
        for row in range(first, last):
            for leaf in self.leaves.get(row, ()):
                yield Problem(leaf, reason, object=self.key, box=tuple(sides))

    def check(self, store: Store, meter: _ReadMeter) -> Iterable[Problem]:
        """Read it completely. Any thread."""
        try:
            problems = retry_stale(self._read, store, meter)
        except (DataError, OSError) as error:
            _require_answer(error)
            return self.problems(None, f"cannot be read: {error}")
        return [problem for box, reason in problems for problem in self.problems(box, reason)]

    def _read(self, store: Store, meter: _ReadMeter) -> list[tuple[Box | None, str]]:
        left = self.length

        def read_counted(start: int, stop: int) -> Bytes:
            nonlocal left
            content = read(start, stop)
            counted = min(left, len(content))  # some bytes may be read twice
            left -= counted
            meter.add(counted)
            return content

        try:
            with store.range_reader(self.key) as read:
                return list(
                    object_index.object_problems(read_counted, self.stack, self.index, self.length, self.digest)
                )
        finally:
            meter.add(left)


def _files(manifest: Manifest) -> Iterator[_ExpectedObject]:
    """The objects that a checkpoint should have."""
    rows: dict[int, dict[int, list[str]]] = {}
    for leaf in manifest.leaves:
        if leaf.stack is not None and leaf.row is not None:
            rows.setdefault(leaf.stack, {}).setdefault(leaf.row, []).append(leaf.path)
    for number, record in enumerate(manifest.stacks):
        stack = record.stack()
        for index, box in stack.objects():
            length, digest = record.length_and_digest(index)
            key = f"{manifest.data_folder}/{zarr.object_key(stack, index)}"
            yield _ExpectedObject(key, stack, index, box, length, digest, rows.get(number, {}))


class _ReadMeter:
    """Counts the bytes that threads read, and reports them in the lane.

    A limited rate is an average: each object is read at once, then follows a pause. The report follows the rate, so
    that its figures and the estimate of the remaining time are right, and arrives during the pauses.
    """

    def __init__(self, report: Report, bytes_per_second: float | None) -> None:
        self._report = report
        self._bytes_per_second = bytes_per_second
        self._start_time = time.monotonic()
        self._moved = SimpleQueue[int]()
        self._unreported_bytes = 0
        self._reported_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Count bytes. Any thread."""
        self._moved.put(n_bytes)

    def pause(self, n_bytes: int) -> None:
        """Report, and wait as long as these bytes may take."""
        end = time.monotonic() + n_bytes / (self._bytes_per_second or math.inf)
        self.report()
        require_not_stalled()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _REPORT_SECONDS))
            self.report()
            require_not_stalled()

    def report(self) -> None:
        """Report what was counted since the last call, as far as the rate allows it by now. Nothing may be new: a
        display that is called only when bytes have moved cannot show that the storage is slow."""
        self._unreported_bytes += sum(self._moved.get() for _ in range(self._moved.qsize()))
        moved = self._unreported_bytes
        if self._bytes_per_second is not None:
            allowed = int(self._bytes_per_second * (time.monotonic() - self._start_time))
            moved = min(moved, max(0, allowed - self._reported_bytes))
        self._advance(moved)

    def report_rest(self) -> None:
        """Report everything that was counted, at the end."""
        self._advance(self._unreported_bytes + sum(self._moved.get() for _ in range(self._moved.qsize())))

    def _advance(self, moved: int) -> None:
        self._unreported_bytes = max(0, self._unreported_bytes - moved)
        self._reported_bytes += moved
        self._report(moved)


def _throttle(files: Iterable[_ExpectedObject], meter: _ReadMeter) -> Iterator[_ExpectedObject]:
    """The files, at the rate that the options allow. Also waits after the last file, because another step may
    follow."""
    for file in files:
        yield file
        meter.pause(file.length)


class _SmallFile(NamedTuple):
    """A zarr.json, or the state of a process."""

    key: str
    sha256: str
    required: bool = True
    """Whether it is a problem if the file is missing."""

    def check(self, store: Store, meter: _ReadMeter) -> Iterable[Problem]:
        return self.problems(store)

    def problems(self, store: Store) -> list[Problem]:
        """Read it. Any thread."""
        try:
            content = store.read(self.key)
        except (DataError, StorageError) as error:
            _require_answer(error)
            return [Problem(None, f"cannot be read: {error}", object=self.key)]
        if content is None:
            return [Problem(None, "is missing", object=self.key)] if self.required else []
        if hashlib.sha256(content).hexdigest() == self.sha256:
            return []
        return [Problem(None, "differs from the file that was saved", object=self.key)]


def _small_files(manifest: Manifest) -> Iterator[_SmallFile]:
    for record in manifest.stacks:
        yield _SmallFile(f"{manifest.data_folder}/{record.name}/zarr.json", record.sha256)
    for process, (_, sha256) in enumerate(manifest.process_states):
        yield _SmallFile(f"{manifest.data_folder}/{manifests.state_file_name(process)}", sha256)


def _require_answer(error: Exception) -> None:
    """Raise an error that is not a problem of one file: the storage does not respond."""
    if isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT:
        raise error


@dataclass(frozen=True, slots=True)
class _RunningCheck:
    """A file that is being checked in another thread."""

    task: Task[Iterable[Problem]]
    meter: _ReadMeter
    doing: str
    n_bytes: int = _CHECK_BYTES

    def done(self) -> bool:
        return self.task.done()

    def result(self) -> Iterable[Problem]:
        """Its problems. Reports in the meantime. Raises StorageError if the storage hangs."""
        problems = operate(self.doing, self._await_problems)
        self.meter.report()
        return problems

    def _await_problems(self) -> Iterable[Problem]:
        while not self.task.wait(_REPORT_SECONDS):
            self.meter.report()
        return self.task.result()


def _check_concurrently(
    store: Store, files: Iterable[_SmallFile | _ExpectedObject], meter: _ReadMeter
) -> Iterator[Problem]:
    """The problems of each file, in order. Some files are checked concurrently, and a few are queued.

    In a lane. Raises StorageError if the storage hangs.
    """
    doing = f"reading from {store.url}"
    with contextlib.closing(Workers("jaxckpt-verify", _THREADS)) as threads:

        def begin(file: _SmallFile | _ExpectedObject) -> _RunningCheck:
            task = operate(doing, lambda: threads.submit(lambda: file.check(store, meter)))
            return _RunningCheck(task, meter, doing)

        # A small limit, because the queued files are checked even after an interrupt.
        for _, problems in pipeline(files, lambda file: _CHECK_BYTES, begin, Budget(4 * _THREADS * _CHECK_BYTES)):
            yield from problems


# Repairs a checkpoint that has lost its manifest ----------------------------------------------------------


def repair(path: Path, options: Options) -> list[VerifyReport]:
    """Restore `manifest.json` of a checkpoint, or of each step of a run, from its second copy; or from an intact
    manifest, which is never replaced, that copy and each zarr.json.

    Before a manifest is restored, the files that it names are checked as by `verify(quick=True)`. Returns the report on
    each repaired checkpoint: none if both are intact. A step that cannot be repaired does not affect the others.

    Raises NotACheckpointError; ManifestError if there is no usable copy; DataError if files are missing; InputError if
    the path is read-only; StorageError.
    """
    store = store_at(path, options, to_write=True)
    if not store.names() and (step := resolve_step(store)) is not None:  # run@40
        store = step
    stores = [store] if store.published_data() else steps_of(store) or [store]
    reports: list[VerifyReport] = []
    failures: list[JaxckptError] = []
    for damaged in stores:
        try:
            reports += _repair(damaged, options)
        except (CorruptError, NotACheckpointError, StorageError) as failure:
            failures.append(failure)
    if failures and (len(stores) == 1 or all(isinstance(failure, StorageError) for failure in failures)):
        raise failures[0]
    if failures:
        repaired = f"; repaired: {', '.join(report.path for report in reports)}" if reports else ""
        what = show_count(len(failures), "step")
        raise ManifestError("\n".join([f"{what} of {store.url} cannot be repaired{repaired}", *map(str, failures)]))
    return reports


def _repair(store: Store, options: Options) -> list[VerifyReport]:
    """The report on a checkpoint, if it was repaired."""
    try:
        manifest, content = load_manifest(store)
    except CorruptError:
        return [_restore_manifest(store, options)]
    source = NativeCheckpoint(store, manifest, hashlib.sha256(content).hexdigest())
    lost = run_alone(lambda: _lost_files(source, content), options.timeout_seconds)
    repairing = functools.partial(_write_lost, store, lost, content, sync=options.sync)
    run_alone(lambda: operate(f"repairing {store.url}", repairing), options.timeout_seconds)
    return [run_alone(lambda: verify_files(source, True, options), options.timeout_seconds)] if lost else []


def _lost_files(source: NativeCheckpoint, content: bytes) -> dict[str, bytes]:
    """The content of lost and damaged files that follows from the manifest: its copy, and each zarr.json."""
    manifest, lost = source.manifest, dict[str, bytes]()
    if manifest.data_folder not in source.store.names():
        return lost  # all data is gone
    if _copy_problems(source):
        lost[f"{manifest.data_folder}/{COPY}"] = content
    folders = source.store.child(manifest.data_folder).names()
    for record in manifest.stacks:
        if record.name not in folders:
            continue  # its data is gone
        key, text = f"{manifest.data_folder}/{record.name}/zarr.json", zarr.metadata(record.stack())
        if hashlib.sha256(text).hexdigest() == record.sha256 and source.store.read(key) != text:
            lost[key] = text
    return lost


def _write_lost(store: Store, lost: Mapping[str, bytes], content: bytes, *, sync: bool) -> None:
    """Write lost files again, if the manifest still has this content. In a lane."""
    changed = NotACheckpointError(f"{store.url} was deleted or replaced while it was being repaired")
    for key, text in lost.items():
        with translate_os_errors(f"cannot lock {store.url}"), store.locked():
            if store.read(MANIFEST) != content:  # the file that was found is that of another manifest
                raise changed
            store.replace(key, text, sync=sync)
            if store.read(MANIFEST) != content:  # replaced or deleted by another host, which the lock may not reach
                store.remove(key)  # a copy without a manifest would show a checkpoint that has lost it
                raise changed


def _restore_manifest(store: Store, options: Options) -> VerifyReport:
    try:
        data, content, manifest, damaged = read_copy(store)
    except ManifestError as error:
        raise ManifestError(f"{error}\n{repair_remedy(store)}") from error
    source = NativeCheckpoint(store, manifest, hashlib.sha256(content).hexdigest())
    report = run_alone(lambda: verify_files(source, True, options), options.timeout_seconds)
    if report.problems:
        raise DataError.of(
            f"{store.url} was not repaired, because {data} is damaged", report.problems, repair_remedy(store)
        )
    store.publish_copy(data, content, damaged, sync=options.sync)
    return report


def repair_remedy(store: Store) -> str:
    """What to do about a checkpoint that cannot be repaired."""
    above = store.parent_and_name()
    if above is not None and is_step(above[1]):
        return f"jaxckpt.Checkpointer({above[0].url!r}).delete({int(above[1])}) gives the step up"
    return f"jaxckpt.save({store.url!r}, …, overwrite=True) replaces the checkpoint"
