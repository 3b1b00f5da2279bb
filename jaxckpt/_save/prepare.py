"""Turns the request of a save into a prepared save: everything that is checked and planned before the first write."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._job.rendezvous import Group
from jaxckpt._model import manifest as manifests
from jaxckpt._model.records import StepRecord
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options, require_bool
from jaxckpt._pipeline.phases import Clock
from jaxckpt._pipeline.threads import Latch
from jaxckpt._save import async_saves as background_saves
from jaxckpt._save.consistency import Agreement, compute_fingerprint
from jaxckpt._save.copies import Copies, Domains, plan_copies
from jaxckpt._save.describe import Draft, DraftCache, describe
from jaxckpt._save.peers import Transfer
from jaxckpt._save.reuse import Reuse, ReuseCache, plan_reuse
from jaxckpt._save.save_info import SaveInfo
from jaxckpt._save.write_plan import Object, SavePlan, plan_save
from jaxckpt._store.store import MAX_FILE_BYTES, Store
from jaxckpt._store.store_path import store_at
from jaxckpt.errors import InputError


@dataclass(frozen=True, slots=True)
class Spread:
    """How a checkpoint is spread over one folder per process. `SaveRequest.path` is the folder of this process."""

    domains: Domains

    choose_kept: Callable[[], str]
    """Process 0 calls this when all processes are ready. Returns the step that stays, as text for `clear`."""

    clear: Callable[[str], None]
    """Deletes all steps except the one that stays from the folder of this process. Every process calls this with the
    result of `choose_kept` before it writes."""

    on_published: Callable[[str, Sequence[Object]], None]
    """Every process calls this after the checkpoint is published, with its save id and the objects that this process
    owns."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a save."""

    path: str | os.PathLike[str]
    tree: Tree = None
    mesh: Mesh | None = None
    specs: Specs = None
    dtype: Dtypes = None
    metadata: Any = None
    overwrite: bool = False
    process_state: Mapping[str, Any] | None = None
    draft: Draft | None = None
    """A description that is saved instead of a tree."""

    step: StepRecord | None = None
    """The record of a Checkpointer. Its metrics are taken from process 0."""

    components: tuple[str, ...] = ()
    """Paths of subtrees that are stored separately, so that they can be dropped later."""

    draft_cache: DraftCache | None = None
    """Cache for the description of the tree."""

    reuse_cache: ReuseCache | None = None
    """Cache for the published objects."""

    precheck: Callable[[], None] | None = None
    """Process 0 calls this first. If it raises, all processes raise."""

    on_published: Callable[[], None] | None = None
    """Process 0 calls this after the checkpoint is published, before the save counts as done."""

    on_done: Callable[[SaveInfo], object] | None = None
    """Every process calls this when it knows that the checkpoint is published, before the save counts as done."""

    deadline: float | None = None
    """For the last step of a preempted job: the latest time, on the monotonic clock, until which the caller waits for
    memory for copies. After that, the save fails."""

    spread: Spread | None = None
    """Set if the save is spread over folders of the processes."""


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """A planned save: everything that is needed to run it, except the data."""

    request: SaveRequest
    group: Group
    store: Store
    draft: Draft
    plan: SavePlan
    reuse: Reuse
    """The objects that this process need not write again."""

    agreement: Callable[[], Agreement] | None
    """Returns what must be equal in every process, and the groups of values in it. Waits for values that devices still
    compute. None in a job of one process."""

    state: bytes | None
    """The content of the file for this process's state."""

    options: Options
    clock: Clock
    claim_ended: Latch
    """Set when the path is claimed, or when it is certain that it will not be."""

    threaded: bool
    """Whether a separate thread writes it. Otherwise the caller's thread does, after everything is staged."""

    copies: Copies | None = None
    """For a spread save, the copies that this process writes, sends and receives. `plan.objects` then also has
    replicas."""

    transfer: Transfer = field(default_factory=Transfer)

    @property
    def is_collective(self) -> bool:
        """Whether the processes exchange data while they stage it."""
        return any(self.plan.exchanged) or bool(self.copies and self.copies.channels)

    @property
    def written_bytes(self) -> int:
        """Bytes of array data that this process writes."""
        return self.plan.process_bytes[self.group.index] + (self.copies.written_bytes if self.copies else 0)


def require_readable(content: bytes, what: str) -> None:
    """Raise InputError if a file with this content would be refused when it is read."""
    if len(content) > MAX_FILE_BYTES:
        raise InputError(
            f"{what} would be a file of {len(content)} bytes, but at most {MAX_FILE_BYTES} can be read back"
        )


def require_on_done(on_done: object) -> None:
    """Raise InputError unless a save can call this once it is done, or calls nothing."""
    if on_done is not None and not callable(on_done):
        raise InputError(f"on_done must be a function that takes a SaveInfo, found {on_done!r}")


def prepare(request: SaveRequest, options: Options, group: Group) -> PreparedSave:
    """Check everything that can be checked without the other processes, and plan."""
    require_on_done(request.on_done)
    store = store_at(request.path, options, to_write=True)
    clock = Clock()
    if request.deadline is not None:
        background_saves.hurry_saves(request.deadline)
    else:
        try:
            background_saves.await_saves()
        except Exception:
            group.repeats_earlier = True
            raise
    if group.index == 0 and request.precheck is not None:
        request.precheck()
    threaded = background_saves.ensure_thread()  # fails here if no thread can be started
    with clock.timed("plan"):
        metadata = manifests.require_json(request.metadata, "metadata")
        state = None if request.process_state is None else manifests.encode_state(request.process_state)
        require_readable(state or b"", "process_state")
        draft = request.draft or describe(
            request.tree, request.mesh, request.specs, options, request.components, request.draft_cache, request.dtype
        )
        plan, copies = _cached_plan(draft, options, group, request.spread and request.spread.domains)
        reuse = plan_reuse(store, draft, plan, options, request.reuse_cache)
        agreement: Callable[[], Agreement] | None = None
        if group.count > 1:
            names = None if request.process_state is None else list(request.process_state)
            agreement = compute_fingerprint(draft, plan, request.metadata, names, group.index)
    # Keeps no reference to anything that the caller may change or expects to free.
    overwrite = require_bool(request.overwrite, "overwrite")
    request = replace(request, tree=None, draft=None, metadata=metadata, overwrite=overwrite)
    save = PreparedSave(
        request,
        group,
        store,
        draft,
        plan,
        reuse,
        agreement,
        state,
        options,
        clock,
        Latch(),
        threaded,
        copies,
    )
    if save.is_collective and not threaded:
        raise InputError("leaves that the processes must exchange cannot be saved while the interpreter shuts down")
    return save


def _cached_plan(
    draft: Draft, options: Options, group: Group, domains: Domains | None
) -> tuple[SavePlan, Copies | None]:
    """The plan of a tree and of its copies. Reuses the last plan for a similar tree."""
    made_for = (options, group.index, group.count, domains)
    if not draft.plan_cache or draft.plan_cache[0][0] != made_for:
        plan: SavePlan
        copies: Copies | None = None
        if domains is None:
            plan = plan_save(draft.arrays, options, group.index, group.count)
        else:
            plan, copies = plan_spread(draft, options, group.index, domains)
        draft.plan_cache[:] = [(made_for, plan, copies)]
    return draft.plan_cache[0][1:]


def plan_spread(draft: Draft, options: Options, process: int, domains: Domains) -> tuple[SavePlan, Copies]:
    """The plan of a spread save, and of its copies in other failure domains."""
    plans = functools.partial(plan_save, draft.arrays, options, processes=len(domains.by_process))
    return plan_copies(plans(process=process), domains, process, lambda other: plans(process=other))
