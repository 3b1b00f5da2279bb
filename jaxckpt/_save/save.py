"""Saving: request → prepared → claimed → written → published.

    the caller:   describe the tree ─────────▶ wait until it is saved
    a lane:                            plan ─▶ claim the path ─▶ stage and write, object by object ─▶ publish

    the caller:   describe the tree ─────────▶ wait until everything is staged
    a lane:                            plan ─▶ stage ─▶ claim the path ─▶ stage what is left, and write ─▶ publish

The first is `save`, which stages a few objects ahead of the writing. The second is `save_async`. A save that exchanges
data between processes always begins to stage after process 0 has claimed the path.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._job.call import Call, run_outside
from jaxckpt._keywords import explain_keywords
from jaxckpt._model import manifest as manifests
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import finish_first
from jaxckpt._pipeline.progress import display_progress, record_event, show_bytes
from jaxckpt._pipeline.threads import is_shutting_down
from jaxckpt._rules.rename import Renaming
from jaxckpt._save import running_saves
from jaxckpt._save.consistency import OwnFingerprint
from jaxckpt._save.describe import Draft, describe
from jaxckpt._save.request import PlainTree, PreparedSave, SaveRequest, require_on_done
from jaxckpt._save.reuse import plan_reuse
from jaxckpt._save.running_saves import PendingSave, RunningSave, SaveInfo
from jaxckpt._save.shared_path import PublishResult, SharedPath
from jaxckpt._save.write import OwnShare
from jaxckpt._save.write_plan import SavePlan
from jaxckpt._sources.format_registry import saved_format
from jaxckpt._store.store import MAX_FILE_BYTES
from jaxckpt.errors import InputError, show_count

# Preparation ----------------------------------------------------------------------------------------------


def prepare(request: SaveRequest, call: Call) -> PreparedSave:
    """Check everything that can be checked without the other processes, and plan."""
    described = call.here(functools.partial(_describe, request, call))
    prepared = call.run(functools.partial(_plan, request, call, described))
    if request.plan_cache is not None and described.plain is not None and described.plan is None:
        call.here(functools.partial(request.plan_cache.remember, described.plain, prepared.draft, prepared.plan))
    return prepared


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


# Saving ---------------------------------------------------------------------------------------------------


@explain_keywords
def save(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    dtype: Dtypes = None,
    format: str | None = None,
    rename: Renaming | None = None,
    metadata: Any = None,
    overwrite: bool = False,
    process_state: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> SaveInfo:
    """Save a pytree as a checkpoint. Every process of the job calls this function, with the same arguments.

    Each process writes shards that its own devices hold, and the job writes each byte of the tree once. The checkpoint
    appears at `path` only when it is complete on disk.

    Args:
        path: A local path, or a URL that tensorstore accepts ("gs://…", "s3://…", "memory://…", "file://…").
        tree: A pytree. Leaves: jax.Array of any sharding and dtype, typed PRNG keys, NumPy arrays and scalars, int,
            float, complex, bool, str, bytes; None; jax.Ref, whose array is saved; objects with `state_dict` and
            `load_state_dict`, or `get_state` and `set_state`, whose state is saved; and types that `register_leaf`
            adds. Host leaves (NumPy arrays and Python values) are written by process 0; the state of an object must be
            the same in every process.
        mesh: Store each jax.Array in its layout on this mesh. By default each array keeps its current layout.
        specs: With `mesh`, the PartitionSpec of each leaf: one for all, a pytree prefix of them, or a function of
            (path, leaf). By default each leaf keeps its own spec, mapped by axis name.
        dtype: Store leaves in a different dtype: one for all, a pytree prefix of them, or a function of (path, leaf)
            that returns a dtype or None. The dtype of the tree or of a container applies only to leaves below it of the
            same kind of number, so bfloat16 applies only to floats. A dtype at a leaf's own path, or from a function,
            always applies. Floats may lose precision and range; other lossy casts need `Options(cast="unsafe")`, as
            does float4_e2m1fn, which has no NaN. Leaves are cast one object at a time.
        format: "safetensors": write a folder that Hugging Face's libraries load, on a local path. Each process writes
            its shards into the files. Tensors of which several processes hold runs of less than 64 KiB, and all tensors
            on file systems that lose writes of several hosts (NFS, FUSE), pass through a temporary checkpoint next to
            the folder. `metadata` and `process_state` are then errors. None: a checkpoint of jaxckpt.
        rename: With `format`: new names, or `Rules`, as for `restore`.
        metadata: Any JSON value. Read it with `open(path).metadata`.
        overwrite: Replace the checkpoint at `path`. The old one is deleted only once the new one is published.
        process_state: State that differs between processes, such as the position of a data iterator: a mapping of names
            to bytes or JSON values, with the same names in every process. Read it with `open(path).process_states`.
        options: Sizes, compression, timeouts, progress; see `Options`.

    Returns:
        What was written, how many bytes by each process, and how long each phase took.

    Raises:
        TreeError: A leaf or key that cannot be stored.
        SpecError: A spec that does not fit its leaf or the mesh.
        CheckpointExistsError: `path` has a checkpoint and `overwrite` is false; it has other files, or is a symbolic
            link to a checkpoint; or another save published there during this one.
        StorageError: No space, no permission, or an I/O error.
        PeerError: Another process failed, did not respond, made a different call, passed a different tree or different
            values, or does not see `path`.
        InputError: Another argument is invalid, such as `metadata` that is not JSON; or a signal handler or a callback
            made the call from inside another jaxckpt call.
        KeyboardInterrupt: Ctrl-C. Nothing is published, and an existing checkpoint at `path` is kept, unless a note on
            the error says that the new one had just been published. A second Ctrl-C does not wait for the outcome.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/save", {"w": jnp.ones((8, 4)), "step": 3}, overwrite=True)
        >>> info.total_bytes
        128
    """
    with Call.of("save", path, options) as call:
        destination = _destination(path, call.options, format, rename, overwrite=overwrite)
        request = SaveRequest(destination, call.options, tree, mesh, specs, dtype, metadata, process_state)
        return start(request, call, background=False).wait()


@explain_keywords
def save_async(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    dtype: Dtypes = None,
    format: str | None = None,
    rename: Renaming | None = None,
    metadata: Any = None,
    overwrite: bool = False,
    process_state: Mapping[str, Any] | None = None,
    on_done: Callable[[SaveInfo], object] | None = None,
    options: Options | None = None,
) -> PendingSave:
    """Start saving a pytree, and return as soon as it is safe to donate, delete or overwrite its arrays.

    A background thread writes the data. Every process makes this call too; see `save` for the other arguments. On CPU
    devices, the arrays' memory is kept alive and, above 16 KiB, not copied: a step that would donate it gets new memory
    instead, and other libraries that share it must not write to it yet. NumPy arrays are copied, and the data of other
    devices, at most `options.staging_bytes` ahead of the writing.

    Args:
        on_done: Called once the checkpoint is published, with the result of `wait()` (its times so far), in every
            process, in the background thread, before `done` is true. It is not called if the save fails or is skipped.
            It may call `open` and `load_numpy`, but nothing that waits for this save or that every process must call,
            such as `wait()`, a save or a conversion; in a job of one process, a thread that it starts may. If it
            raises, `wait()` raises the same error, with a note that the checkpoint was published.

    Returns:
        The running save. A second `save_async` waits for it or is skipped, depending on `options.when_busy`.

    Raises:
        TreeError, SpecError, InputError: As for `save`, immediately. `wait()` raises everything else that `save` would
            raise. If nothing waits, an error is logged at once, and the next save of the same path raises it; without
            one, the traceback is printed when the interpreter exits, with exit status 1. Functions that were registered
            with atexit before `import jaxckpt` do not run then.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> pending = jaxckpt.save_async("/tmp/jaxckpt-doc/async", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> pending.wait().total_bytes
        128
    """
    with Call.of("save_async", path, options) as call:
        require_on_done(on_done)
        destination = _destination(path, call.options, format, rename, overwrite=overwrite)
        request = SaveRequest(
            destination, call.options, tree, mesh, specs, dtype, metadata, process_state, on_done=on_done
        )
        return PendingSave(start(request, call, background=True))


_FILE_SUFFIXES = (".safetensors", ".npz", ".npy", ".pt", ".pth", ".h5", ".hdf5")
"""Suffixes of single files of other libraries. A folder with such a name would mislead every other program."""


def _destination(
    path: Any, options: Options, format: str | None, rename: Renaming | None, *, overwrite: bool
) -> SharedPath:
    """The destination at a path or URL. Raises InputError, StorageError."""
    if format not in (None, "jaxckpt"):
        return saved_format(format)(path, rename, options, overwrite=overwrite)
    if rename is not None:
        raise InputError(
            'save(rename=…) needs format="safetensors": a checkpoint of jaxckpt keeps the names of the tree'
        )
    destination = SharedPath.at(path, options, overwrite=overwrite)
    suffix = os.path.splitext(destination.store.url)[1]
    if suffix in _FILE_SUFFIXES:
        raise InputError(
            f"path {destination.store.url!r} ends in {suffix}, but save writes a folder in jaxckpt's own format: give a"
            " path without this suffix. jaxckpt.convert then writes a .safetensors or .npz file from the checkpoint"
        )
    return destination


def start(request: SaveRequest, call: Call, *, background: bool) -> RunningSave:
    """Save completely, or until the lane that writes no longer needs the caller. Every process.

    The lane runs `RunningSave.run`, which notes the outcome, and in it `_save_in_lane`, inside of `carry_out`.
    Returns the save, which has ended if it is not in the background.
    """
    start_time, options = time.perf_counter(), request.options
    if background and not request.is_last_step and options.when_busy == "skip" and _is_busy(call):
        skipped = RunningSave(request.destination.store, 0, start_time, call.watchdog)
        skipped.skip()
        return skipped
    prepared = prepare(request, call)
    background = background and not is_shutting_down()  # during its shutdown, Python does not wait for other threads
    beside_training = background and not request.is_last_step
    running = RunningSave(
        prepared.store,
        prepared.plan.written_bytes(call.index),
        start_time,
        call.watchdog,
        request.step_number,
        bytes_per_second=options.max_bytes_per_second if beside_training else None,
        awaited=not background,
    )
    if background and not running_saves.unreported_saves():  # the first that the program's end may await
        finish_first()

    def work(running: RunningSave, repeated: Call | None = None) -> SaveInfo:
        """`repeated` is the call of another attempt."""
        return _save_in_lane(replace(prepared, call=repeated or call), running, background)

    carried_out = functools.partial(carry_out, work, request.attempts, request.on_done)
    try:
        # Returns when the lane releases the caller or has ended. The outcome is in `running`, not in the task.
        call.start(functools.partial(running.run, carried_out), until=request.deadline)
        if request.deadline is not None and not running.is_staged:
            call.cancellation.cancel(TimeoutError("the data was copied but not written before the deadline"))
        if not background:
            running.wait()  # raises its error here, where the save is canceled if it has not ended
        running.mark_returned(yields_processors=beside_training)
    except BaseException as error:
        running.cancel(call, error)
        prepared.draft.values.clear()  # the error may be kept for long
        raise
    return running


def _is_busy(call: Call) -> bool:
    """Whether process 0 is still writing an earlier save. It decides for all, because they may end at different
    times."""
    busy = any(not running.done for running in running_saves.unreported_saves())
    return call.in_process_0("deciding whether to save", lambda: busy)


# In a lane ---------------------------------------------------------------------------------------------


def carry_out(
    work: Callable[..., SaveInfo],
    attempts: Callable[[Callable[..., SaveInfo], RunningSave], SaveInfo] | None,
    on_done: Callable[[SaveInfo], object] | None,
    running: RunningSave,
) -> SaveInfo:
    """Save, then call `on_done` outside of the collective call, so that it may call jaxckpt."""
    info = work(running) if attempts is None else attempts(work, running)
    if on_done is not None:
        running.mark_published()
        try:
            run_outside(functools.partial(on_done, running.with_times(info)))
        except BaseException as error:
            error.add_note(f"jaxckpt: on_done raised this after the checkpoint at {running.path} was published")
            raise
    return info


def _save_in_lane(prepared: PreparedSave, running: RunningSave, background: bool) -> SaveInfo:
    """Carry out the save, or an attempt to."""
    call = prepared.call
    with (
        call,  # again, because a background save outlives the caller's block
        display_progress("save", prepared.plan.written_bytes(call.index), prepared.options.progress) as display,
    ):
        share = OwnShare(prepared, running, background, display)
        info = _info(prepared, prepared.request.destination.save(share))
        share.free()
    seconds = running.with_times(info).seconds
    record_event(
        "save",
        seconds,
        lambda: (
            f"saved {info.path}: {show_count(info.leaves, 'leaf')}, {show_bytes(info.total_bytes)}, in {seconds:.2f} s"
            + (f"; {show_bytes(info.reused_bytes)} linked" if info.reused_bytes else "")
        ),
        logged=call.index == 0,
        bytes=info.total_bytes,
        leaves=info.leaves,
    )
    return info


def _info(prepared: PreparedSave, published: PublishResult) -> SaveInfo:
    plan = prepared.plan
    states = 0 if prepared.state is None else prepared.call.count
    return SaveInfo(
        path=prepared.store.url,
        save_id=published.save_id,
        leaves=len(prepared.draft.records),
        total_bytes=sum(plan.process_bytes),
        process_bytes=plan.process_bytes,
        objects=plan.n_objects,
        files=plan.n_objects + len(plan.stacks) + states + 2,
        stored_bytes=published.stored_bytes,
        reused_bytes=published.reused_bytes,
        manifest_sha256=published.manifest_sha256,
        seconds=0.0,  # `RunningSave.with_times` sets this and the next field
        blocked_seconds=0.0,
        phase_seconds=prepared.call.phases.phase_seconds,
    )
