"""Following a run: each new step as it is published, held while it is read."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack, overload

from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._keywords import explain_names
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.select import Select
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import finish_at_exit
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.threads import Latch, awake_seconds
from jaxckpt._restore.differences import Strict
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import DescribedTree, RestoreArguments, T, run_restore
from jaxckpt._rules.rename import Renaming
from jaxckpt._run_folder.leases import hold
from jaxckpt._run_folder.metrics import metrics_of
from jaxckpt._run_folder.steps import ENDED, RUN, step_folders, step_name
from jaxckpt._sources.open_source import foreign_steps_of
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, ManifestError, NotACheckpointError, StorageError


@explain_names
@dataclass(frozen=True, slots=True)
class Step:
    """A published step of a run."""

    number: int
    """The training step."""

    path: str
    """The path or URL of the step, for every function that takes a checkpoint."""

    metrics: Mapping[str, float | None]
    """The metrics given to `Checkpointer.save`, and those that were added; None for NaN."""

    held: bool
    """Whether a lease protects the step from deletion during the loop body; False if no lease could be written."""

    _options: Options = field(repr=False)

    @overload
    def restore(self, target: DescribedTree = None, **arguments: Unpack[RestoreArguments]) -> Tree: ...
    @overload
    def restore(self, target: T, **arguments: Unpack[RestoreArguments]) -> T: ...
    def restore(
        self,
        target: Tree = None,
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: Strict = True,
        dtype: Dtypes = None,
        tied: bool = False,
    ) -> Tree:
        """Restore the step, as `jaxckpt.restore` does with these arguments, with the options of the `Run`."""
        request = RestoreRequest(target, mesh, specs, select, rename, strict, dtype=dtype, tied=tied)
        return run_restore(self.path, request, self._options)

    def open(self) -> Checkpoint:
        """Open the step to inspect it, as `jaxckpt.open` does."""
        return open_checkpoint(self.path, options=self._options)


_HEAD_BYTES = 128
"""How much of a manifest tells two saves apart: its third member is the id of the save."""


@dataclass(frozen=True, slots=True)
class _Yielded:
    """A step that was yielded."""

    number: int
    head: bytes
    """The first bytes of its manifest."""

    def is_unchanged(self, run: Store) -> bool:
        """Whether the step was neither deleted nor saved again since. Raises StorageError."""
        store = run.child(step_name(self.number))
        if store.read(MANIFEST, len(self.head)) == self.head:
            return True
        try:
            _, content = load_manifest(store)
        except ManifestError:  # which does not concern the steps after it
            return True
        except NotACheckpointError:
            return False
        return content[:_HEAD_BYTES] == self.head


_open = weakref.WeakSet[Generator[Step]]()


def close_at_exit(steps: Generator[Step]) -> Generator[Step]:
    """The same generator. Python would free it so late that it could not release its lease."""
    finish_at_exit(_close_all)  # only now, so that deletions, which respect leases, finish before
    _open.add(steps)
    return steps


def _close_all() -> None:
    for steps in [*_open]:
        with contextlib.suppress(ValueError, StorageError):  # ValueError: another thread runs it
            steps.close()


def follow_steps(
    run: Store,
    options: Options,
    *,
    after: int,
    restart_after: int,
    newest: bool,
    timeout_seconds: float | None,
    poll_seconds: float,
    term_seconds: float,
) -> Generator[Step]:
    """The steps of a run above the number `after`, as they are published; above `restart_after`, once everything that
    was yielded is gone. See `Run.follow`."""
    waiting_since = awake_seconds()
    warned = has_waited = False
    yielded: list[_Yielded] = []  # with `newest` only the last one, because an older one may become the newest again
    while True:
        waited = awake_seconds() - waiting_since  # before the listing, so that nothing is missed
        ended = run.read(f"{RUN}/{ENDED}") is not None  # read first, so that the listing after it is complete
        kept = _unchanged(run, yielded)
        last = kept[-1].number if kept else restart_after if yielded else after
        published, _ = step_folders(run, above=last)
        # The others were deleted, unless the directory was away for a moment.
        if len(kept) < len(yielded) and published and len(_unchanged(run, yielded)) != len(kept):
            published = []
        with contextlib.ExitStack() as leases:
            found = None
            for number in reversed(published) if newest else published:
                lease_error = _hold(run, number, term_seconds, leases)
                deleted = isinstance(lease_error, NotACheckpointError)
                found = None if deleted else _find(run, number, lease_error is None, options)
                if found is None:
                    continue
                if lease_error is not None and not warned:
                    _log.warning(
                        "steps are read without leases and may be deleted while they are read: %s", lease_error
                    )
                    warned = True
                break
            if found is not None:
                step, head = found
                went_back = newest and any(step.number < before.number for before in yielded)
                if went_back and {*step_folders(run, above=step.number)[0]} - {*published}:  # newer than the listing
                    continue
                yielded = [*([] if newest else kept), _Yielded(step.number, head)]
                yield step
                waiting_since = awake_seconds()
                continue
        if not has_waited:
            has_waited = True
            ours = [*map(step_name, step_folders(run)[0])]
            if any(step.number > last for step in foreign_steps_of(run.url, options, ours)):
                raise InputError(
                    f"{run.url} is a run of Orbax, and follow yields only the steps that a Checkpointer saves: call"
                    " latest_step() repeatedly instead"
                )
        if ended or (timeout_seconds is not None and waited >= timeout_seconds):
            return
        left = math.inf if timeout_seconds is None else timeout_seconds - (awake_seconds() - waiting_since)
        Latch().wait(min(poll_seconds, left))  # a sleep that keeps `awake_seconds` going


def _unchanged(run: Store, yielded: Sequence[_Yielded]) -> Sequence[_Yielded]:
    """The steps up to the last one that is unchanged."""
    count = next((n for n in range(len(yielded), 0, -1) if yielded[n - 1].is_unchanged(run)), 0)
    return yielded[:count]


def _hold(
    run: Store, number: int, term_seconds: float, leases: contextlib.ExitStack
) -> StorageError | NotACheckpointError | None:
    """Hold a step until `leases` is closed. Returns the error that prevented this, if any."""
    try:
        leases.enter_context(hold(run, number, term_seconds))
    except (NotACheckpointError, StorageError) as error:
        return error
    return None


def _find(run: Store, number: int, held: bool, options: Options) -> tuple[Step, bytes] | None:
    """A step to yield, and the first bytes of its manifest; None if it was deleted."""
    child = run.child(step_name(number))
    try:
        manifest, content = load_manifest(child)
    except NotACheckpointError:
        return None
    metrics = metrics_of(run, number, manifest.save_id, manifest.step)
    return Step(number, child.url, metrics, held, options), content[:_HEAD_BYTES]
