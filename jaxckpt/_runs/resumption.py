"""What a Checkpointer restores when a job resumes: the step on which all processes agree, and each process's state."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxckpt._arguments.pytree import flatten_values, is_reference
from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous, cause_of, process_names
from jaxckpt._local_tier.peer_reads import Candidate, DamagedError, candidates
from jaxckpt._local_tier.recovery import LocatedStep, Recovery
from jaxckpt._local_tier.tier import LocalSteps
from jaxckpt._local_tier.union_source import UnionCheckpoint
from jaxckpt._model.manifest import decode_state
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._restore.match import Uncommitted
from jaxckpt._run_folder.steps import IncidentLog, is_step
from jaxckpt._runs.directory import Directory
from jaxckpt._sources.format_registry import missing_formats_hint
from jaxckpt._store.load_manifest import load_manifest, load_states
from jaxckpt._store.store import Store
from jaxckpt.errors import DataError, InputError, NotACheckpointError, PathNotSharedError, StorageError

# The initial state ----------------------------------------------------------------------------------------


def target_of(init: Callable[[], Tree]) -> tuple[Tree, Callable[[Sequence[int]], Sequence[Any]]]:
    """The result of `init` without its data, and a function that creates some of its leaves, by number."""
    if isinstance(init, jax.stages.Wrapped):  # jitted, so all its results are arrays
        shapes = jax.eval_shape(init)
        if all(leaf.sharding is not None for leaf in jax.tree.leaves(shapes)):
            return shapes, functools.partial(_compute_leaves, init, jax.tree.leaves(shapes))
    leaves, builder = flatten_values(init())
    # A Variable with hijax=True can replace its reference only by an array.
    target = builder.unflatten(
        leaf if builder.variables and is_reference(type(leaf)) else _abstract(leaf) for leaf in leaves
    )

    def initial(numbers: Sequence[int]) -> Sequence[Any]:
        made = [*leaves] or flatten_values(init())[0]  # called again if a local step was damaged
        leaves.clear()
        return [made[number] for number in numbers]

    return target, initial


def _compute_leaves(init: Callable[[], Tree], shapes: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """Some results of a jitted function, with its shardings. XLA removes the computation of the others."""
    if not numbers:
        return []
    # A sharding on an AbstractMesh is part of the type, so the array has it already.
    shardings = [
        None if isinstance(getattr(sharding, "mesh", None), AbstractMesh) else sharding
        for sharding in (shapes[number].sharding for number in numbers)
    ]

    def requested_leaves() -> list[Any]:
        leaves = jax.tree.leaves(init())
        return [leaves[number] for number in numbers]

    return jax.jit(requested_leaves, out_shardings=shardings)()


def _abstract(leaf: Any) -> Any:
    """A leaf as a target without its data."""
    is_ref = is_reference(type(leaf))
    if not (is_ref or isinstance(leaf, jax.Array)):
        return leaf
    weak = getattr(leaf.aval.inner_aval if is_ref else leaf, "weak_type", False)  # PRNG keys lack the attribute
    if not (is_ref or leaf.committed):
        return Uncommitted(leaf.shape, leaf.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak, is_ref=is_ref)


# The step -------------------------------------------------------------------------------------------------


class StepFinder:
    """Finds the step to restore. Every process creates one."""

    def __init__(self, directory: Directory, local: LocalSteps | None, options: Options) -> None:
        self._directory = directory
        self._local = local
        self._recovery = None if local is None else Recovery(local, options)

    # Agreeing, every process -----------------------------------------------------------------------------

    def find(self, call: Call, step: int | None, *, allow_peers: bool) -> LocatedStep:
        """Find a step, by default the newest, in a lane, when no save is running. Every process calls this.

        Without local folders, a step that is given is not looked for. Without `allow_peers`, a local step counts only
        if each process sees all of its files. Raises DataError if the wanted step exists only in the local folders and
        is damaged there.
        """
        with call.rendezvous("looking for the newest step") as rendezvous:
            self._directory.require_same_folder()
            if step is not None and self._recovery is None:
                rendezvous.barrier()
                return LocatedStep(step)
            local_steps = [] if self._recovery is None else list(self._recovery.steps())
            reported = [local.candidate for local in local_steps if local.candidate]
            # Process 0 looks after the others, so it must find what they have found.
            seen = None if call.index == 0 or step is not None else self._directory.newest_number()
            gathered = rendezvous.gather(json.dumps([reported, seen]))
            storage_step, eligible = json.loads(
                rendezvous.broadcast(self._encode_eligible(gathered, step) if gathered else "")
            )
            for candidate, sender in eligible:
                assert self._recovery is not None
                rendezvous.start_next()
                located = self._recovery.find_whole(
                    rendezvous, self._directory.url, Candidate(*candidate), sender, local_steps, allow_peers=allow_peers
                )
                if located is not None:
                    return located
        if eligible and storage_step is None and step is not None:
            raise DataError(
                f"step {step} is damaged or incomplete in the local folders, and {self._directory.url} does not have it"
                "; see the log for details"
            )
        if eligible and call.index == 0:
            fallback = (
                "no step is left"
                if storage_step is None
                else f"step {storage_step} is restored from {self._directory.url}"
            )
            _log.warning("no step in the local folders can be restored: %s", fallback)
        return LocatedStep(storage_step if step is None else step)

    def _encode_eligible(self, gathered: Sequence[str], step: int | None) -> str:
        """Return, as JSON: the step in the storage (or None), and the local saves to try before it, newest first.

        Each local save comes with the process that sends its manifest to the processes that lack it (None if all have
        it). Only process 0 calls this.
        """
        decoded = [json.loads(text) for text in gathered]
        reports = [[Candidate(*fields) for fields in reported] for reported, _ in decoded]
        steps = self._directory.steps(() if step is None else [step])
        self._require_shared(steps, [seen for _, seen in decoded])
        storage_step = max(steps, default=None) if step is None else step if step in steps else None
        eligible: list[tuple[Candidate, int | None]] = []
        for candidate in candidates(reports):
            if (
                candidate.step != step
                if step is not None
                else storage_step is not None and candidate.step < storage_step
            ):
                continue
            # If the local folders and the storage have different saves of one step, the storage's save counts.
            if candidate.step in steps and self._directory.save_id(candidate.step) not in (None, candidate.save_id):
                continue
            having = [process for process, report in enumerate(reports) if candidate in report]
            eligible.append((candidate, having[0] if len(having) < len(reports) else None))
        return json.dumps((storage_step, eligible))

    def _require_shared(self, steps: Sequence[int], newest: Sequence[int | None]) -> None:
        """Raise PathNotSharedError if a process has seen a newer step than process 0 sees. `newest` has that of each
        process."""
        own = max(steps, default=-1)
        having = [process for process, seen in enumerate(newest) if seen is not None and seen > own]
        if not having:
            return
        seen = max(seen for seen in newest if seen is not None)
        raise PathNotSharedError(
            f"{process_names(having)} of {len(newest)} see{'s' if len(having) == 1 else ''} step {seen} in"
            f" {self._directory.url}, but process 0, which chooses the step to restore, sees"
            f" {f'no step after {own}' if steps else 'no steps'} there: all processes must use one shared folder or"
            " object store"
        )

    # Without communication -------------------------------------------------------------------------------

    def mark_damaged(self, source: UnionCheckpoint, error: DamagedError) -> None:
        """Note damaged files of a local step, so that copies in other processes are used."""
        assert self._recovery is not None
        self._recovery.mark_damaged(source, error)

    def require_found(self, chosen: LocatedStep) -> int:
        """The number of a step that was found. Raises NotACheckpointError if none was."""
        if chosen.step is None:
            raise NotACheckpointError(f"{self._directory.url} has no steps{missing_formats_hint()}")
        return chosen.step

    def record_restored(self, chosen: LocatedStep) -> None:
        """Note that a step was restored. All other steps of an earlier Checkpointer are no longer needed."""
        if self._local is not None:
            self._local.record_restored(chosen.local_save, complete=chosen.has_all_copies)

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics of the local step that was restored or saved last. Raises NotACheckpointError."""
        record = None if self._recovery is None else self._recovery.record(step)
        if record is None:
            more = ", and no local step of that number was restored or saved last" if self._local else ""
            raise NotACheckpointError(f"{self._directory.url} has no step {step}{more}")
        return dict(record.metrics)


# The state of each process --------------------------------------------------------------------------------

Resplit = Callable[[list[Any], int], Sequence[Any]]

_StateValues = tuple[list[Any], bool]
"""Values of processes, and whether there is only this process's own."""

_RESTORING = "restoring each process's own state"


def restore_process_state(call: Call, source: Store | UnionCheckpoint, name: str, resplit: Resplit | None) -> Any:
    """The value of `process_state[name]` for this process. Every process.

    Raises InputError, DataError; DamagedError, in all processes, if a local folder is damaged.
    """
    found = call.run(functools.partial(_read_state, call, source, name, resplit is not None))
    if isinstance(found, DamagedError):
        raise found
    items, is_own = found
    if is_own or resplit is None:
        return items[0]
    items = call.here(functools.partial(_split_again, resplit, name, items, call.count))
    call.await_all(_RESTORING)
    return items[call.index]


def _split_again(resplit: Resplit, name: str, items: list[Any], processes: int) -> list[Any]:
    made = list(resplit(items, processes))
    if len(made) != processes:
        raise InputError(f"resplit made {len(made)} states of {name!r} for {processes} processes")
    return made


def _read_state(
    call: Call, source: Store | UnionCheckpoint, name: str, has_resplit: bool
) -> _StateValues | DamagedError:
    """As `_read_values`, or the error that all processes raise. In a lane."""
    with call.rendezvous(_RESTORING) as rendezvous:
        try:
            found: _StateValues | DamagedError = _read_values(source, name, has_resplit, call.options, rendezvous)
        except DamagedError as error:
            found = error
        rendezvous.barrier()
    return found


def _read_values(
    source: Store | UnionCheckpoint, name: str, has_resplit: bool, options: Options, rendezvous: Rendezvous
) -> _StateValues:
    """The value that this process saved; or those of all processes, if their number is different."""
    process, processes = rendezvous.call.index, rendezvous.call.count
    try:
        manifest = source.manifest if isinstance(source, UnionCheckpoint) else load_manifest(source)[0]
    except NotACheckpointError as error:
        if process == 0:
            raise
        raise NotACheckpointError(
            f"{error}, in process {process} of {processes}; all processes must use one shared folder or object store"
        ) from error
    # Each process reads only its own file out of thousands, unless all states must be divided again.
    is_same_count = len(manifest.process_states) == processes
    numbers = [process] if is_same_count else range(len(manifest.process_states))
    if isinstance(source, UnionCheckpoint):
        with source.state_arrivals(numbers, options, rendezvous) as arrivals:
            next(arrivals)
            states = [decode_state(source.read_state(number)) for number in numbers]
    else:
        states = load_states(source, manifest, numbers)
    if not isinstance(name, str) or not states or any(name not in state for state in states):  # pyright: ignore[reportUnnecessaryIsInstance]
        names = sorted(states[0]) if states else "none"
        raise InputError(f"{source.url} has no process_state {name!r}; it has {names}")
    items = [state[name] for state in states]
    if not is_same_count and not has_resplit:
        raise InputError(
            f"{len(items)} processes saved {name!r} in {source.url}, but this job has {processes}: pass resplit=, a"
            " function that makes one state for each of its processes from the saved ones"
        )
    return items, is_same_count


# Steps that cannot be read --------------------------------------------------------------------------------
# every process:   find ─▶ restore ─▶ all meet ─▶ done | an older step, chosen by process 0 ─▶ find ─▶ …


class Fallback:
    """The steps that one call of `restore` has tried. Every process creates one."""

    def __init__(self, directory: Directory, incidents: IncidentLog) -> None:
        self._directory = directory
        self._incidents = incidents
        self._first: int | None = None
        """The newest step that may be restored; None: any."""

        self._first_error: BaseException | None = None

    def next_step(
        self, call: Call, tried: int | None, error: BaseException | None, *, is_of_caller: bool
    ) -> int | None:
        """What follows the attempt to restore a step, the same in every process: the step to try next, or None if the
        step was restored. In a lane.

        `tried` is None if the search for the newest step has failed. Raises the first error if no step is left, or an
        error that does not mean that the step cannot be read, such as one of the caller's functions (`is_of_caller`).
        """
        self._first_error = self._first_error or error
        with call.rendezvous("choosing a step that can be read") as rendezvous:
            if error is not None and (is_of_caller or not cause_of(error)):
                raise error
            texts = rendezvous.gather("" if error is None else f"{type(error).__name__}: {error}")
            chosen = json.dumps([self._choose(tried, texts), [*self._directory.refused]]) if texts else ""
            answer, refused = json.loads(rendezvous.broadcast(chosen))
            self._directory.refused = {*refused}
        if answer is None or isinstance(answer, int):
            return answer
        error = self._first_error or InputError("no error")
        error.add_note(f"jaxckpt: {answer}")
        raise error

    def _choose(self, tried: int | None, texts: list[str]) -> int | str | None:
        """The step to try next; None if none is needed; or a text that says that none is left. In process 0."""
        reason = next(filter(None, texts), None)
        if reason is None:
            return None
        steps = steps_or_errors(self._directory)
        self._first = self._first if self._first is not None else tried if tried is not None else max(steps, default=0)
        if tried is not None:
            self._refuse(tried, reason)
        for step, problem in steps.items():
            if step > self._first or step in self._directory.refused:
                continue
            if problem is None:
                message = "step %d of %s is tried instead. A step that cannot be read is kept until it is saved again"
                _log.warning(message, step, self._directory.url)
                return step
            self._refuse(step, f"{type(problem).__name__}: {problem}")
        refused = [step for step in steps if step in self._directory.refused and step <= self._first]
        self._directory.refused.difference_update(refused)  # so that a later call does not see an empty run
        return f"no step in {self._directory.url} can be read; tried: {refused or 'none'}"

    def _refuse(self, step: int, reason: str) -> None:
        self._directory.refused.add(step)
        self._directory.forget(step)
        _log.error("step %d of %s cannot be read, and is not restored: %s", step, self._directory.url, reason)
        self._incidents.add(step, "unreadable step", reason)


def steps_or_errors(directory: Directory) -> Mapping[int, StorageError | None]:
    """The steps that exist, newest first, each with the error if jaxckpt cannot tell whether it is published. Raises
    StorageError if the directory itself cannot be listed."""
    store = directory.store
    try:
        folders = store.folders(is_step)
    except StorageError:  # of an object store, which looks at all steps together
        folders: Mapping[str, bool | StorageError] = {}
        for name in store.folders(is_step, known=_Everything()):
            try:
                folders |= store.folders(name.__eq__)
            except StorageError as error:
                folders |= {name: error}
    found = {int(name): None if published is True else published for name, published in folders.items() if published}
    return dict(sorted(found.items(), reverse=True))


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


def other_steps(directory: Directory, step: int | None) -> list[int]:
    """The other published steps, oldest first, for a message."""
    steps = steps_or_errors(directory)
    return sorted(other for other, problem in steps.items() if problem is None and other != step)
