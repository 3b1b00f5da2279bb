"""Restoring a checkpoint: request → source → resolved leaves → values → tree.

the caller:          resolve (match the target, choose shardings) ─────────────▶ assemble the tree
a lane:      open ─▶                                          ─▶ plan, read, place ─▶
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec, Sharding

from jaxckpt._arguments.casts import CHECKED_BYTES, Dtypes, lost_value
from jaxckpt._arguments.pytree import reference_context
from jaxckpt._arguments.specs import Specs, require_mesh
from jaxckpt._devices.shardings import processes_of
from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous, process_names
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.select import Select
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options, options_or_default
from jaxckpt._pipeline.lanes import run_alone
from jaxckpt._pipeline.progress import display_progress, record_event, show_bytes
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._restore.differences import Strict
from jaxckpt._restore.match import RestoreRequest, require_request
from jaxckpt._restore.placement import LeafBuilder, destinations, value_in_manifest
from jaxckpt._restore.read_loop import PlannedRead, detect_replacement, reads_of, run_steps
from jaxckpt._restore.resolve import LeafForm, Resolved, host_leaf, host_leaves, resolve
from jaxckpt._restore.shared_exchange import needs_whole_job, read_shared, require_agreement
from jaxckpt._restore.shared_reads import wants_digest
from jaxckpt._restore.wants import plan_process_reads, plan_wants, split_ties
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._rules.rule_set import Rules, view_through
from jaxckpt._run_folder.steps import is_step
from jaxckpt._sources.open_source import Location, source_at
from jaxckpt._sources.source import Source
from jaxckpt.errors import (
    InputError,
    MismatchError,
    NotACheckpointError,
    PathNotSharedError,
    PeersDisagreeError,
    Problem,
    show_count,
)

T = TypeVar("T")

DescribedLeaf: TypeAlias = jax.ShapeDtypeStruct | Sharding | PartitionSpec

DescribedTree: TypeAlias = "DescribedLeaf | Mapping[str, DescribedTree] | Sequence[DescribedTree] | None"
"""A target that describes arrays. The result has arrays in their places, so its type is another."""


Arrivals: TypeAlias = Callable[[Iterator[PlannedRead], Options, Rendezvous], AbstractContextManager[Iterator[None]]]
"""Receives data that other processes read. In the context, the iterator yields when each read of this process, in
order, can begin. Every process enters the context, with its own reads."""


class RestoreArguments(TypedDict, total=False):
    """The keyword arguments that every restore takes; `jaxckpt.restore` describes them."""

    mesh: Mesh | None
    specs: Specs
    select: Select | None
    rename: Renaming | None
    strict: Strict
    dtype: Dtypes
    tied: bool


@overload
def restore(
    path: Location,
    target: DescribedTree = None,
    *,
    manifest_sha256: str | None = None,
    options: Options | None = None,
    **arguments: Unpack[RestoreArguments],
) -> Tree: ...
@overload
def restore(
    path: Location,
    target: T,
    *,
    manifest_sha256: str | None = None,
    options: Options | None = None,
    **arguments: Unpack[RestoreArguments],
) -> T: ...
@explain_keywords
def restore(
    path: Location,
    target: Tree = None,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Renaming | None = None,
    strict: Strict = True,
    dtype: Dtypes = None,
    tied: bool = False,
    manifest_sha256: str | None = None,
    options: Options | None = None,
) -> Tree:
    """Restore a checkpoint onto devices. Every process of the job calls this function, with the same arguments.

    Each process reads the chunks that its own devices need, each chunk once. With `Options(read="shared")`, processes
    share their reads, so the job reads each chunk once. Process 0 logs how many leaves came from the checkpoint (logger
    "jaxckpt", level INFO).

    Args:
        path: A path or URL that `save` wrote, or of a run: "run" is its newest step, and "run@40", "run@best" or
            "run@name" is one of its steps. Or the local path of another library's checkpoint: Orbax, PyTorch
            (`torch.save` or DCP), safetensors, npz, MindSpore, OneFlow or ColossalAI. Or the result of `rank_files`,
            `mindspore_ranks` or `oneflow_ranks`.
        target: The tree to restore; by default, the saved tree. A pytree, or a pytree prefix, of jax.ShapeDtypeStruct
            (with or without sharding), of jax.sharding.Sharding, or of arrays, of which only shape, dtype, weak type
            and sharding are used. As for jax.device_put, a jax.Device is a sharding too, and a PartitionSpec is one on
            `mesh` or on the mesh of jax.set_mesh. A NumPy array or Python scalar restores as the same type, a jax.Ref
            as a new one. An object with `load_state_dict` or `set_state` stays the same object, and receives its saved
            state once everything has been read. Functions, which no checkpoint contains, are kept. None is an empty
            subtree, as everywhere in JAX: nothing is restored there, and leaves that the checkpoint has there are extra
            leaves.
        mesh: The mesh for leaves whose sharding `target` does not give. Saved specs are mapped by axis name; axes that
            this mesh lacks are dropped. Leaves saved without a spec, as in other libraries' files, are replicated, and
            process 0 logs a warning with their bytes. Each leaf keeps its memory kind. A sharding on an AbstractMesh,
            as from jax.eval_shape under jax.set_mesh, is resolved on this mesh, or on the mesh of jax.set_mesh.
        specs: With `mesh`: a PartitionSpec, a pytree prefix of them, or a function of (path, leaf), instead of the
            saved specs. An array that was saved from NumPy stays one without a target, unless it has a spec at its own
            path, from a subtree with only such arrays, or from a function, which may return None for it.
        select: Restore only these leaves, by their paths in the tree that this function returns, after `rename`: a glob
            ("params/**"; "params/**/w" matches "params/w" too; a container's path selects everything below it), a
            compiled regular expression, a list of these, or a function of the path that returns a bool. Each pattern
            must match a leaf or an empty container of the checkpoint. Other leaves keep the target's value; without a
            target, dicts omit them and the containers that have only them, and sequences have None in their place.
        rename: Saved path → wanted path: a mapping of leaf or container paths ("" is the tree itself), each of which
            must exist, or a function. No two leaves may get the same path, unless `select` is given: then a container
            that the mapping names replaces another, as in rename={"ema": "params"}, select="params". Without a target,
            a renamed tree is restored as nested dicts of its leaves, without empty containers and None. In a path, the
            empty key is written "~2", a "~" in a key "~0", and a "/" in a key "~1". Or `Rules`, which also transpose,
            stack, join and cast: the checkpoint then has the leaves that the rules make.
        strict: Whether leaves that are missing from the checkpoint, and leaves that only the checkpoint has, are
            errors: a bool, or by subtree a pytree prefix of bools, such as {"opt_state": False}; what has no entry is
            strict. With False, a missing leaf keeps what the target has there (a jax.ShapeDtypeStruct itself stays in
            the tree; a Sharding is still an error), extra leaves are left out, and process 0 logs a warning that counts
            both by subtree. These are always errors: a target with no leaf in the checkpoint, a different shape, a
            class, and an object that JAX treats as a leaf in place of a container. For a different dtype,
            `options.cast` decides.
        dtype: Restore leaves in a dtype other than the target's or the saved one: as for `save`, by wanted paths.
        tied: Restore leaves that were saved as one array as one shared array, if the target requests the same dtype and
            sharding at each of their paths. By default each leaf is a separate array, so that all of them can be
            donated.
        manifest_sha256: The expected SHA-256 of manifest.json, in hexadecimal digits (`SaveInfo.manifest_sha256`), for
            checkpoints that others could replace. It guarantees the structure, shapes, Python values and metadata, and
            arrays only through their crc32c digests, which detect damage but not deliberate forgery (docs/security.md).
        options: See `Options`.

    Returns:
        A pytree with the structure of the target, or with the saved one. Leaves that were saved from devices are
        jax.Arrays. All others are as they were saved: NumPy arrays and scalars, int, str, and so on.

    Raises:
        NotACheckpointError: `path` has no manifest, or the checkpoint was deleted or replaced while it was being read.
        MismatchError: Leaves are missing, extra, or differ in shape, or a cast would lose values; one error lists them
            all. Also 64-bit leaves while jax_enable_x64 is off, unless `options.cast` is "unsafe", which restores them
            with 32 bits.
        TreeError: A pattern of `select` or a path of `rename` matches nothing.
        SpecError: A spec does not fit its leaf or the mesh.
        LayoutError: Neither `target` nor `mesh` gives a leaf's sharding, and this job lacks devices of the saved one.
        CorruptError: The stored data is not what was saved. The message names the leaf. Its subclass UnsupportedError:
            a leaf of another library cannot be read, although it is not damaged.
        StorageError: An I/O error, or no data has moved for `options.timeout_seconds`.
        PeerError: Another process failed, did not respond, made a different call, or sees a different checkpoint.
        InputError: Another argument is invalid, or the call was made inside `jit` or another function that JAX traces.

    Examples:
        >>> import jax, jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/restore", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> jaxckpt.restore("/tmp/jaxckpt-doc/restore", mesh=jax.make_mesh((1,), ("data",)))["w"].shape
        (8, 4)
    """
    return run_restore(
        path,
        RestoreRequest(
            target, mesh, specs, select, rename, strict, dtype=dtype, tied=tied, manifest_sha256=manifest_sha256
        ),
        options,
    )


def run_restore(
    path: Location,
    request: RestoreRequest,
    options: Options | None,
    *,
    source: Source | None = None,
    arrivals: Arrivals | None = None,
) -> Tree:
    """Restore what is requested. `source` is the checkpoint if it is already open at this path, and `arrivals` exist if
    other processes read some of its data. Every process."""
    start_time = time.perf_counter()
    with Call.of("restore", path, options, only_reads=True) as call:
        options = call.options
        require_mesh(request.mesh)
        call.here(functools.partial(require_request, request))
        source = call.run(functools.partial(_open, call, path, request, options, source))
        resolved, initial = call.here(functools.partial(_resolve, source, request, options))
        values = call.run(functools.partial(_read, call, source, resolved, request, arrivals))
        result, has_states = call.here(functools.partial(_assemble, resolved, values, initial))
        if has_states:
            call.await_all("restoring")
    record_event(
        "restore",
        time.perf_counter() - start_time,
        lambda: (
            f"restored {len(resolved.leaves)} of {show_count(len(jax.tree.leaves(result)), 'leaf')} of the tree"
            f" from {source.url}, which has {len(source.manifest.leaves)}"
        ),
        logged=call.index == 0,
        leaves=len(resolved.leaves),
    )
    if resolved.accepted is not None and call.index == 0:
        _log.warning("%s: %s", source.url, resolved.accepted)
    return result


def _open(call: Call, path: Location, request: RestoreRequest, options: Options, source: Source | None) -> Source:
    """The checkpoint that process 0 has found, with the leaves that the rules make. In a lane."""
    with call.rendezvous("opening the checkpoint") as rendezvous:
        try:
            source = source or source_at(path, options, request.manifest_sha256)
        except NotACheckpointError:
            _require_seen_by_all_or_none(rendezvous.gather(""), call.where)
            rendezvous.broadcast("")
            raise
        own = f"{source.digest} {source.url}"
        checkpoints = rendezvous.gather(own)
        if len(checkpoints) > 1:  # process 0 of a job
            _require_seen_by_all_or_none(checkpoints, source.url)
            _require_same_checkpoint(checkpoints, source.url)
            _require_newest(checkpoints, source.url, options)
        chosen = rendezvous.broadcast(own)
    digest, _, url = chosen.partition(" ")
    if source.digest != digest:  # process 0 found a different newest step
        try:
            source = source_at(url, options, request.manifest_sha256)
        except NotACheckpointError as error:
            raise PathNotSharedError(
                f"process {call.index} of {call.count} cannot find the checkpoint {url}, which process 0 can: all"
                " processes must use one shared folder or object store"
            ) from error
        _require_same_checkpoint([chosen, f"{source.digest} {url}"], url)
    return source if request.rules is None else view_through(request.rules, source)


def _resolve(source: Source, request: RestoreRequest, options: Options) -> tuple[Resolved, Mapping[int, Any]]:
    """How each leaf is restored, and the leaves that `RestoreRequest.initial` creates, by their number in the target.
    In the caller's thread, because it calls the caller's functions."""
    resolved = resolve(source.manifest, request, options)
    _require_no_trace(resolved.leaves.values())
    if request.initial is None:
        return resolved, {}
    numbers = resolved.assembly.to_initialize
    return resolved, dict(zip(numbers, request.initial(numbers), strict=True))


def _read(
    call: Call, source: Source, resolved: Resolved, request: RestoreRequest, arrivals: Arrivals | None
) -> dict[int, Any]:
    """The value of each leaf. In a lane."""
    if resolved.unsplit and isinstance(request.mesh, Mesh) and call.index == 0:
        n_bytes = sum(source.manifest.leaf_bytes(source.manifest.leaves[number]) for number in resolved.unsplit)
        _log.warning(
            "%s: neither specs= nor the checkpoint says how to split %s, %s as stored: each of the %d devices gets a"
            " whole copy. Pass specs=, or specs=PartitionSpec() to replicate without this warning",
            source.url,
            show_count(len(resolved.unsplit), "array"),
            show_bytes(n_bytes),
            request.mesh.size,
        )
    with call.rendezvous("restoring", after_caller=True) as rendezvous, contextlib.ExitStack() as until_all_have_read:
        if resolved.unproven:
            _require_lossless(source, resolved, call.options, rendezvous, arrivals)
        values = fetch(
            source,
            resolved.leaves,
            call.options,
            rendezvous,
            arrivals,
            tied=request.tied,
            until_all_have_read=until_all_have_read,
        )
        if call.count > 1:
            require_agreement(rendezvous, _global_leaves_digest(resolved, request.rules))
    return values


def _assemble(resolved: Resolved, values: dict[int, Any], initial: Mapping[int, Any]) -> tuple[Tree, bool]:
    """The restored tree, and whether objects of the target have got their states. In the caller's thread."""
    result = resolved.assembly.assemble(values, initial)
    states = [(obj, obj.state(values)) for obj in resolved.assembly.objects if obj.can_set_state]
    for obj, state in states:
        obj.set_state(state)
    return result, bool(states)


def _require_lossless(
    source: Source, resolved: Resolved, options: Options, rendezvous: Rendezvous, arrivals: Arrivals | None = None
) -> None:
    """Raise MismatchError if a cast that depends on the values of its leaf changes one of them.

    Every process reads these leaves, which are small, whole. Otherwise one process could refuse what others make.
    """
    problems: list[Problem] = []
    unproven, n_at_once = sorted(resolved.unproven), max(1, options.host_bytes // CHECKED_BYTES)
    options = replace(options, progress=None)
    for start in range(0, len(unproven), n_at_once):
        numbers = unproven[start : start + n_at_once]
        values = fetch(source, dict.fromkeys(numbers, host_leaf("numpy")), options, rendezvous, arrivals)
        for number in numbers:
            dtype = resolved.leaves[number].cast
            lost = None if dtype is None else lost_value(values[number], dtype)
            if lost is not None:
                problem = resolved.unproven[number]
                problems.append(replace(problem, reason=f"{problem.reason} of {lost!r}"))
    if problems:
        raise MismatchError.of(f"casts would change values of {show_count(len(problems), 'leaf')}", problems)


def _global_leaves_digest(resolved: Resolved, rules: Rules | None) -> str:
    """A digest of the leaves whose arrays span several processes: their forms, their paths in the restored tree, and
    the rules that make them. It must be equal everywhere."""
    numbers: dict[int, tuple[LeafForm, list[int]]] = {}  # by the id of the form, which many leaves share
    for number, form in resolved.leaves.items():
        numbers.setdefault(id(form), (form, []))[1].append(number)
    hasher = hashlib.sha256()
    for form, leaves in numbers.values():
        if isinstance(form.sharding, Sharding) and len(processes_of(form.sharding)) > 1:
            named = [(number, resolved.paths[number]) for number in leaves]
            mesh = getattr(form.sharding, "mesh", None)  # whose repr lacks the devices
            devices = None if mesh is None else mesh.device_ids.tolist()
            described = (form.kind, form.cast, form.weak, form.sharding, devices)
            hasher.update(repr((described, named, rules and rules.rules)).encode())
    return hasher.hexdigest()


def _require_seen_by_all_or_none(checkpoints: Sequence[str], url: str) -> None:
    """Raise PathNotSharedError in process 0 if some processes have found a checkpoint and others, whose text is empty,
    have not."""
    missing = [process for process, checkpoint in enumerate(checkpoints) if not checkpoint]
    if 0 < len(missing) < len(checkpoints):
        having = process_names([process for process, checkpoint in enumerate(checkpoints) if checkpoint])
        raise PathNotSharedError(
            f"{process_names(missing)} of {len(checkpoints)} cannot find the checkpoint {url}, which {having} can: all"
            " processes must use one shared folder or object store"
        )


def _require_newest(checkpoints: Sequence[str], url: str, options: Options) -> None:
    """Raise PathNotSharedError in process 0 if another process has found a newer step of the run than the one at `url`,
    which process 0 will restore, and process 0 cannot find that step either now."""
    for process, (_, _, other) in enumerate(checkpoint.partition(" ") for checkpoint in checkpoints):
        run, _, step = other.rpartition("/")
        above, _, own = url.rpartition("/")
        if run == above and is_step(step) and is_step(own) and int(step) > int(own):
            try:
                source_at(other, options)
            except NotACheckpointError:
                raise PathNotSharedError(
                    f"process {process} of {len(checkpoints)} sees step {int(step)} in {run}, but process 0 sees no"
                    f" step after {int(own)} there: all processes must use one shared folder or object store"
                ) from None


def _require_same_checkpoint(checkpoints: Sequence[str], url: str) -> None:
    """Raise PeersDisagreeError if processes found different checkpoints at one path. Each of `checkpoints` is a digest
    and a path."""
    if len(set(checkpoints)) > len({checkpoint.partition(" ")[2] for checkpoint in checkpoints}):
        raise PeersDisagreeError(
            f"the processes see different checkpoints at {url}: it was replaced in the meantime, or the path is not"
            " shared"
        )


def _require_no_trace(forms: Iterable[LeafForm]) -> None:
    """Raise InputError while JAX traces a function, because no arrays can be created then."""
    if not any(form.on_devices for form in forms):
        return
    with jax.transfer_guard("allow"):
        array = jax.device_put(np.empty(0, np.uint8))
    if isinstance(array, Tracer):
        raise InputError(
            "restore was called while JAX traces a function: call it outside of jit, scan and eval_shape, and pass what"
            " it returns to the function"
        )


@explain_keywords
def load_numpy(
    path: Location,
    *,
    select: Select | None = None,
    rename: Renaming | None = None,
    dtype: Dtypes = None,
    manifest_sha256: str | None = None,
    options: Options | None = None,
) -> Tree:
    """Read a checkpoint into host memory, for inference or inspection, without a mesh, devices or a JAX backend.

    Args:
        path: As for `restore`.
        select: Only these leaves, as for `restore`.
        rename: As for `restore`.
        dtype: As for `restore`: read leaves in a dtype other than the saved one.
        manifest_sha256: As for `restore`.
        options: See `Options`.

    Returns:
        The saved tree with NumPy arrays for arrays (dtypes of ml_dtypes for bfloat16, float8 and int4). A typed PRNG
        key comes back as its raw uint32 data.

    Raises:
        NotACheckpointError, CorruptError, StorageError: As `restore`.
        TreeError: A pattern of `select` or a path of `rename` matches nothing.
        MismatchError: The `Rules` in `rename` do not fit the checkpoint, or a cast would lose values.
        InputError: Another argument is invalid.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/numpy", {"w": np.arange(3)}, overwrite=True)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/numpy")
        {'w': array([0, 1, 2])}
    """
    options = options_or_default(options)

    def load() -> Tree:
        source = renamed_source(source_at(path, options, manifest_sha256), rename, select)
        resolved = host_leaves(source.manifest, dtype, options)
        rendezvous = Call.alone("load_numpy", source.url, options).rendezvous("reading")
        if resolved.unproven:
            _require_lossless(source, resolved, options, rendezvous)
        return resolved.assembly.assemble(fetch(source, resolved.leaves, options, rendezvous))

    return run_alone(load, options.timeout_seconds)


# Reading --------------------------------------------------------------------------------------------------
# forms ─▶ wants ─▶ read steps, of this process and shared ─▶ destinations ─▶ values


def fetch(
    source: Source,
    forms: Mapping[int, LeafForm],
    options: Options,
    rendezvous: Rendezvous,
    arrivals: Arrivals | None = None,
    *,
    tied: bool = False,
    until_all_have_read: contextlib.ExitStack | None = None,
) -> dict[int, Any]:
    """The value of every leaf by its number. If `tied`, leaves that share a row and a form become one value.

    Every process of the rendezvous calls this, in a lane. Each checks some of the small files that describe stacks.
    They read for each other if `options.read` says so. The progress of the last reads stays on display
    `until_all_have_read`.
    """
    representative: dict[int, int] = {}
    if tied:
        first = dict[tuple[int, LeafForm], int]()
        ties = source.manifest.ties
        representative = {
            number: first.setdefault((ties.get(number, number), form), number) for number, form in forms.items()
        }
        forms = {number: forms[number] for number in representative.values()}
    records = source.manifest.leaves
    values = {
        number: value_in_manifest(records[number], form)
        for number, form in forms.items()
        if records[number].stack is None
    }
    for group in split_ties(source.manifest, forms):
        values |= _fetch_stored(source, group, options, rendezvous, arrivals, until_all_have_read)
    for number, form in forms.items():
        if form.weak:
            values[number] = _weakly_typed(values[number])
        if form.is_reference:
            with reference_context():
                values[number] = jax.new_ref(values[number])
    return values | {number: values[first_number] for number, first_number in representative.items()}


def _fetch_stored(
    source: Source,
    forms: Mapping[int, LeafForm],
    options: Options,
    rendezvous: Rendezvous,
    arrivals: Arrivals | None,
    until_all_have_read: contextlib.ExitStack | None,
) -> Mapping[int, Any]:
    """The values of the leaves that are stored in stacks; no two of them share a row."""
    process, processes = rendezvous.call.index, rendezvous.call.count
    wants = plan_wants(source, forms, options, [process], range(processes))
    job_size = processes if wants.layouts is not None and needs_whole_job() else None
    (reads,) = plan_process_reads(wants, options, [process], job_size)
    builder = LeafBuilder(source.manifest, wants, destinations(wants, process))
    with detect_replacement(source, forms), contextlib.ExitStack() as until_read:
        until_shown = until_all_have_read or until_read
        until_shown.close()  # ends the display of the reads before
        display = until_shown.enter_context(display_progress("restore", reads.n_bytes, options.progress))

        def report(n_bytes: int) -> None:
            rendezvous.call.cancellation.check()
            display(n_bytes)

        source.require_metadata(sorted(wants.by_stack)[process::processes])
        if reads.rounds:
            digest = wants_digest(wants.layouts_for(process), options.host_bytes)
            read_shared(source, reads.rounds, digest, options, builder, report, rendezvous)
        arrived = arrivals and until_read.enter_context(arrivals(reads_of(reads.steps), options, rendezvous))
        run_steps(source, reads.steps, options, builder, report, arrived)
    builder.create_unread_leaves()
    return builder.values


def _weakly_typed(array: Any) -> Any:
    """The same array with a weak type and the same buffers. JAX has no public function for this."""
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, array._arrays, committed=array.committed, _skip_checks=True)
