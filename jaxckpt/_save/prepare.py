"""Turns the request of a save into a prepared save: everything that is checked and planned before the first write."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from jaxckpt._job.call import Call
from jaxckpt._model import manifest as manifests
from jaxckpt._save import running_saves
from jaxckpt._save.consistency import OwnFingerprint
from jaxckpt._save.describe import Draft, describe
from jaxckpt._save.request import PlainTree, PreparedSave, SaveRequest
from jaxckpt._save.reuse import plan_reuse
from jaxckpt._save.write_plan import SavePlan
from jaxckpt._store.store import MAX_FILE_BYTES
from jaxckpt.errors import InputError


def prepare(request: SaveRequest, call: Call) -> PreparedSave:
    """Check everything that can be checked without the other processes, and plan."""
    described = call.here(functools.partial(_describe, request, call))
    save = call.run(functools.partial(_plan, request, call, described))
    if request.plan_cache is not None and described.plain is not None and described.plan is None:
        call.here(functools.partial(request.plan_cache.remember, described.plain, save.draft, save.plan))
    return save


@dataclass(frozen=True, slots=True)
class _Described:
    """What only the caller's thread can tell, because it uses the caller's functions and objects."""

    draft: Draft
    plan: SavePlan | None
    """The plan, if an earlier save had a similar tree."""

    plain: PlainTree | None
    """The key of the plan in the cache."""

    metadata: Any
    state: bytes | None


def _describe(request: SaveRequest, call: Call) -> _Described:
    if request.deadline is not None:
        running_saves.hurry_saves(request.deadline)
    else:
        try:
            running_saves.await_saves(running_saves.owner_of(request.destination.store, request.step_number))
        except Exception:
            call.repeats_earlier = True
            raise
    with call.phases.timed("plan"):
        metadata = None if request.metadata is None else manifests.require_json(request.metadata, "metadata")
        state = None if request.process_state is None else manifests.encode_state(request.process_state)
        if state is not None and len(state) > MAX_FILE_BYTES:
            raise InputError(
                f"process_state would be a file of {len(state)} bytes, but at most {MAX_FILE_BYTES} can be read back"
            )
        cache, plain = request.plan_cache, None
        if cache is not None and request.mesh is None and request.specs is None and request.dtype is None:
            plain = PlainTree.of(request.tree, request.subtrees)
            if plain is not None and (similar := cache.find(plain)) is not None:
                return _Described(*similar, plain, metadata, state)
        draft = request.draft or describe(
            request.tree, request.mesh, request.specs, request.options, request.subtrees, request.dtype
        )
        return _Described(draft, None, plain, metadata, state)


def _plan(request: SaveRequest, call: Call, described: _Described) -> PreparedSave:
    """In a lane."""
    destination, options, draft = request.destination, request.options, described.draft
    with call.phases.timed("plan"):
        if call.index == 0:
            destination.check(request)
        plan = described.plan or destination.plan(draft.arrays, options, call.index, call.count)
        reuse = plan_reuse(destination.store, draft, plan, options, request.reuse_cache)
        fingerprint: OwnFingerprint | None = None
        if call.count > 1:
            names = None if request.process_state is None else list(request.process_state)
            fingerprint = OwnFingerprint.of(draft, plan, request.metadata, names, call.index)
    # Keeps no reference to anything that the caller may change or expects to free.
    request = replace(request, tree=None, draft=None, metadata=described.metadata)
    return PreparedSave(request, call, draft, plan, reuse, fingerprint, described.state)
