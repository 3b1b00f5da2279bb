"""Turns the request of a save into a prepared save: everything that is checked and planned before the first write."""

from __future__ import annotations

from dataclasses import replace

from jaxckpt._job.call import Call
from jaxckpt._model import manifest as manifests
from jaxckpt._save import running_saves
from jaxckpt._save.consistency import OwnFingerprint
from jaxckpt._save.describe import Draft, describe
from jaxckpt._save.plan_cache import PlainTree
from jaxckpt._save.request import PreparedSave, SaveRequest
from jaxckpt._save.reuse import plan_reuse
from jaxckpt._save.write_plan import SavePlan
from jaxckpt._store.store import MAX_FILE_BYTES
from jaxckpt.errors import InputError


def require_on_done(on_done: object) -> None:
    """Raise InputError unless a save can call this once it is done, or calls nothing."""
    if on_done is not None and not callable(on_done):
        raise InputError(f"on_done must be a function that takes a SaveInfo, found {on_done!r}")


def prepare(request: SaveRequest, call: Call) -> PreparedSave:
    """Check everything that can be checked without the other processes, and plan."""
    require_on_done(request.on_done)
    destination, options = request.destination, request.options
    if request.deadline is not None:
        running_saves.hurry_saves(request.deadline)
    else:
        try:
            running_saves.await_saves(running_saves.owner_of(destination.store, request.step_number))
        except Exception:
            call.repeats_earlier = True
            raise
    if call.index == 0:
        destination.check(request)
    threaded = running_saves.ensure_thread()  # fails here if no thread can be started
    with call.phases.timed("plan"):
        metadata = manifests.require_json(request.metadata, "metadata")
        state = None if request.process_state is None else manifests.encode_state(request.process_state)
        if state is not None and len(state) > MAX_FILE_BYTES:
            raise InputError(
                f"process_state would be a file of {len(state)} bytes, but at most {MAX_FILE_BYTES} can be read back"
            )
        draft, plan = describe_and_plan(request, call)
        reuse = plan_reuse(destination.store, draft, plan, options, request.reuse_cache)
        fingerprint: OwnFingerprint | None = None
        if call.count > 1:
            names = None if request.process_state is None else list(request.process_state)
            fingerprint = OwnFingerprint.of(draft, plan, request.metadata, names, call.index)
    # Keeps no reference to anything that the caller may change or expects to free.
    request = replace(request, tree=None, draft=None, metadata=metadata)
    if plan.is_collective and not threaded:
        raise InputError("leaves that the processes must exchange cannot be saved while the interpreter shuts down")
    return PreparedSave(request, call, draft, plan, reuse, fingerprint, state, threaded)


def describe_and_plan(request: SaveRequest, call: Call) -> tuple[Draft, SavePlan]:
    """How each leaf is stored, and what this process writes."""
    cache, plain = request.plan_cache, None
    if cache is not None and request.mesh is None and request.specs is None and request.dtype is None:
        plain = PlainTree.of(request.tree, request.subtrees)
        if plain is not None and (similar := cache.find(plain)) is not None:
            return similar
    draft = request.draft or describe(
        request.tree, request.mesh, request.specs, request.options, request.subtrees, request.dtype
    )
    plan = request.destination.plan(draft.arrays, request.options, call.index, call.count)
    if cache is not None and plain is not None:
        cache.remember(plain, draft, plan)
    return draft, plan
