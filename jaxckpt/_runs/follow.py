"""Readers of a run: the published steps, and each new step as it is published."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from jax.sharding import Mesh

from jaxckpt._arguments.specs import Specs
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._model.records import MAX_INTEGER
from jaxckpt._model.select import Select
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options, options_or_default, require_seconds, require_whole_number
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import run_restore
from jaxckpt._rules.rename import Renaming, split_rename
from jaxckpt._run_folder.leases import TERM_SECONDS, hold
from jaxckpt._run_folder.steps import ENDED, RUN, require_no_checkpoint, step_folders, step_name
from jaxckpt._sources.open_source import foreign_steps_of
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import run_at
from jaxckpt.errors import InputError, NotACheckpointError, StorageError

_log = logging.getLogger("jaxckpt")

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Step:
    """A published step of a run."""

    number: int
    """The training step."""

    path: str
    """The path or URL of the step, for every function that takes a checkpoint."""

    metrics: Mapping[str, float | None]
    """The metrics given to `Checkpointer.save`; None for values that were not finite."""

    held: bool
    """Whether a lease protects the step from deletion during the loop body; False if no lease could be written."""

    _options: Options = field(repr=False)

    def restore(
        self,
        target: Tree = None,
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: bool = True,
    ) -> Tree:
        """Restore the step, as `jaxckpt.restore` does with these arguments.

        The options are those of `follow`. To pass `dtype` or `tied`, call `jaxckpt.restore(step.path, …)` instead.
        """
        return run_restore(
            self.path, RestoreRequest(target, mesh, specs, select, *split_rename(rename), strict), self._options
        )

    def open(self) -> Checkpoint:
        """Open the step to inspect it, as `jaxckpt.open` does."""
        return open_checkpoint(self.path, options=self._options)


def steps(directory: Path, *, options: Options | None = None) -> list[int]:
    """List the published steps of a run, oldest first.

    Read-only: unlike a `Checkpointer`, it deletes nothing. Any single process may call it.

    Args:
        directory: The directory of a `Checkpointer`: a local path or a URL. Or of Orbax's `CheckpointManager`: a local
            path.
        options: `storage` and `retry_seconds`; see `Options`.

    Returns:
        The numbers of the steps; an empty list before the first save.

    Raises:
        InputError: `directory` is itself a checkpoint, or a file.
        StorageError: The directory cannot be listed, or jaxckpt cannot determine whether a step is published.

    Examples:
        >>> import shutil, jaxckpt
        >>> shutil.rmtree("/tmp/jaxckpt-doc/run", ignore_errors=True)
        >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/run") as run:
        ...     saved = [run.save(step, {"w": step}) for step in (10, 20)]
        >>> jaxckpt.steps("/tmp/jaxckpt-doc/run")
        [10, 20]
    """
    options = options_or_default(options)
    found, _ = step_folders(run := run_at(directory, options))
    if not found:
        require_no_checkpoint(run)
        return [step.number for step in foreign_steps_of(run.url, options)]
    return found


def latest_step(directory: Path, *, options: Options | None = None) -> int | None:
    """The newest published step of a run, or None if there are no steps. Arguments and errors are those of `steps`."""
    return max(steps(directory, options=options), default=None)


def follow(
    directory: Path,
    *,
    after: int | None = None,
    timeout: float | None = None,
    poll_seconds: float = 1.0,
    term_seconds: float = TERM_SECONDS,
    options: Options | None = None,
) -> Generator[Step]:
    """Iterate over the steps of a run as they are published, oldest first, for example to evaluate during training.

    A lease holds each step until the loop asks for the next one, so that no `keep_` rule deletes it in the meantime.
    Steps that were deleted before the loop reached them are skipped. Without permission to write to the directory,
    steps are read without leases, with one warning: if a step is deleted while it is being read, the read raises an
    error; it never returns wrong data.

    The loop ends after the last step, once `Checkpointer.close` has recorded the end of the run. The directory need not
    exist yet. One process calls this; in a job of several processes, one follows and sends `step.path` to the others.

    Args:
        directory: The directory of a `Checkpointer`: a local path or a URL.
        after: Start with the first step above this number; None starts with the oldest step.
        timeout: End without an error if no new step is published for this many seconds; None: no limit. Time spent in
            the loop body does not count.
        poll_seconds: Seconds between two checks of the directory. Each check is one listing and one small read.
        term_seconds: How long a lease protects a step, at most, after this process has died; see `Checkpoint.hold`.
        options: See `Options`.

    Yields:
        A `Step`: `number`, `path`, `metrics`, `held`, `restore(...)`, `open()`.

    Raises:
        InputError: An argument is invalid, or `directory` is a file or a run of Orbax.
        ManifestError: The manifest of a step is damaged.
        StorageError: The directory cannot be read.

    Examples:
        >>> import jaxckpt
        >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/followed", every=10) as run:
        ...     saved = [run.save(step, {"w": step}, overwrite=True) for step in (10, 20)]
        >>> [(step.number, step.restore()["w"]) for step in jaxckpt.follow("/tmp/jaxckpt-doc/followed")]
        [(10, 10), (20, 20)]
    """
    options = options_or_default(options)
    run = run_at(directory, options)
    last = -1 if after is None else require_whole_number(after, "after", minimum=0, maximum=MAX_INTEGER)
    limit = None if timeout is None else require_seconds(timeout, "timeout")
    poll_seconds, term_seconds = (
        require_seconds(poll_seconds, "poll_seconds"),
        require_seconds(term_seconds, "term_seconds"),
    )
    return _follow(run, last, limit, poll_seconds, term_seconds, options)


def _follow(
    run: Store, last: int, timeout: float | None, poll_seconds: float, term_seconds: float, options: Options
) -> Generator[Step]:
    """The generator of `follow`, with valid arguments."""
    waiting_since = time.monotonic()
    warned = has_waited = False
    while True:
        ended = run.read(f"{RUN}/{ENDED}") is not None  # read first, so that the listing after it is complete
        published, _ = step_folders(run, above=last)
        if published:
            last = published[0]
            with contextlib.ExitStack() as until_next:
                lease_error = _hold(run, last, term_seconds, until_next)
                deleted = isinstance(lease_error, NotACheckpointError)
                step = None if deleted else _step(run, last, lease_error is None, options)
                if step is None:
                    continue
                if lease_error is not None and not warned:
                    _log.warning(
                        "steps are read without leases and may be deleted while they are read: %s", lease_error
                    )
                    warned = True
                yield step
                waiting_since = time.monotonic()
            continue
        if not has_waited and any(step.number > last for step in foreign_steps_of(run.url, options)):
            raise InputError(
                f"{run.url} is a run of Orbax, and follow yields only the steps that a Checkpointer saves: call"
                " jaxckpt.latest_step repeatedly instead"
            )
        has_waited = True
        waited = time.monotonic() - waiting_since
        if ended or (timeout is not None and waited >= timeout):
            return
        time.sleep(poll_seconds if timeout is None else min(poll_seconds, timeout - waited))


def _hold(
    run: Store, number: int, term_seconds: float, until_next: contextlib.ExitStack
) -> StorageError | NotACheckpointError | None:
    """Hold a step until `until_next` is closed. Returns the error that prevented this, if any."""
    try:
        until_next.enter_context(hold(run, number, term_seconds))
    except (NotACheckpointError, StorageError) as error:
        return error
    return None


def _step(run: Store, number: int, held: bool, options: Options) -> Step | None:
    """A step; None if it was deleted."""
    child = run.child(step_name(number))
    try:
        manifest, _ = load_manifest(child)
    except NotACheckpointError:
        return None
    metrics = {} if manifest.step is None else manifest.step.metrics
    return Step(number, child.url, dict(metrics), held, options)
