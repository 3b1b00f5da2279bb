"""Restoring a checkpoint: open its manifest, match the target, plan, read, place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jaxckpt._format.casts import Dtypes
from jaxckpt._format.select import Select
from jaxckpt._format.specs import Specs, require_mesh
from jaxckpt._format.tree import Tree
from jaxckpt._restore.gathering import require_agreement
from jaxckpt._restore.goals import Goal, host_goals, resolve
from jaxckpt._restore.placing import fetch
from jaxckpt._restore.pooled import Pooled
from jaxckpt._restore.source import Location, source_at
from jaxckpt._restore.target import Renaming, Request, renamed_source, require_request, split_rename
from jaxckpt._runtime.errors import InputError, PeersDisagreeError
from jaxckpt._runtime.events import finished
from jaxckpt._runtime.options import Options, given
from jaxckpt._runtime.processes import Call, Group


def restore(
    path: Location,
    target: Tree = None,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Renaming | None = None,
    strict: bool = True,
    dtype: Dtypes = None,
    tied: bool = False,
    options: Options | None = None,
) -> Tree:
    """Read a checkpoint back onto devices; every process of the job calls it, with the same arguments.

    Each process reads the chunks that its own devices need, none of them twice; with `Options(read="shared")` the
    processes read for each other, no chunk twice in the whole job. Process 0 logs how many leaves came
    from the checkpoint (logger "jaxckpt", level INFO).

    Args:
        path: Where `save` wrote; or a checkpoint of Orbax, PyTorch DCP or safetensors, or what `rank_files` and its
            kind have made of others.
        target: What is wanted: a pytree, or a prefix of one, of jax.ShapeDtypeStruct (with or without sharding), of
            jax.sharding.Sharding, or of arrays whose shape, dtype and sharding are wanted (their values are not
            looked at; a weak type is wanted too). As for jax.device_put, a jax.Device stands for a sharding, and a
            PartitionSpec for one on `mesh` or on the mesh of jax.set_mesh. NumPy arrays and Python scalars in it ask
            for such; functions that no checkpoint holds stay. None in it is an empty subtree, as everywhere in JAX:
            nothing is restored there, and leaves that the checkpoint has there are extra leaves. Without it, the tree
            as it was saved.
        mesh: Where leaves go for which `target` gives no sharding: saved specs are carried over by axis name; axes
            that this mesh lacks are dropped. Leaves saved without a spec are replicated. Each leaf keeps its memory
            kind. A sharding on an AbstractMesh, as jax.eval_shape gives under jax.set_mesh, is meant on this mesh, or
            on that of jax.set_mesh.
        specs: With `mesh`: a PartitionSpec, a pytree prefix of them, or a function of (path, leaf), instead of the
            saved ones.
        select: Restore only these leaves: a glob over saved paths ("params/**"; "params/**/w" matches "params/w" too;
            a container's path selects all below it), a compiled regular expression, several of them, or a function of
            the path that returns a bool. Each pattern must match a leaf. Other leaves keep the target's value; without
            a target, dicts come back without them and sequences with None in their place. A leaf of the target that the
            checkpoint lacks is selected if the path that `rename` would take it from is, or if `rename` is a function,
            which cannot say.
        rename: Saved path → wanted path: a mapping of leaf or container paths ("" is the tree itself), each of which
            must exist, or a function. Without a target, a renamed tree comes back as nested dicts. A component of a
            wanted path is never empty: the empty key is written "~2". Or `Rules`, which also transpose, stack, join and
            cast: then the checkpoint has the leaves that the rules make, and `select` chooses among these.
        strict: Missing leaves and leaves of the checkpoint that the target lacks are errors. With False, a missing
            leaf keeps the target's value (an abstract one, which has none, is still an error), and extra leaves are
            left out. A target of which no leaf is in the checkpoint is always an error, and so are another shape, a
            class, and an object that JAX takes for a leaf in the place of a container; another dtype follows
            `options.cast`.
        dtype: Restore leaves in another dtype than the target's or the saved one: as for `save`, by wanted paths.
        tied: Leaves that were saved as one array come back as one array, if they are wanted in the same way. By default
            each leaf is an array of its own, so that both can be donated.
        options: See `Options`.

    Returns:
        A pytree: the target's structure, or the saved one. jax.Arrays where arrays were saved from devices, otherwise
        what was saved: NumPy arrays and scalars, int, str, and so on.

    Raises:
        NotACheckpointError: No manifest at `path`, or it was deleted or replaced while it was being read.
        MismatchError: Missing, extra, misshaped or lossily cast leaves; one error lists them all. Also leaves of 64
            bits while jax_enable_x64 is off, unless `options.cast` is "unsafe", which restores 32 bits.
        TreeError: A pattern of `select` or a path of `rename` matches nothing.
        SpecError: A spec does not fit its leaf or the mesh.
        LayoutError: Neither target nor mesh, and the saved devices are not here.
        CorruptError: What is stored is not what was saved; the message names the leaf.
        StorageError: An I/O error, or no byte has moved for `options.timeout_seconds`.
        PeerError: Another process failed, or sees another checkpoint.

    Examples:
        >>> import jax, jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/restore", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> jaxckpt.restore("/tmp/jaxckpt-doc/restore", mesh=jax.make_mesh((1,), ("data",)))["w"].shape
        (8, 4)
    """
    return carry_out(
        path, Request(target, mesh, specs, select, *split_rename(rename), strict, dtype=dtype, tied=tied), options
    )


def carry_out(path: Location | Pooled, request: Request, options: Options | None) -> Tree:
    """Restore what is requested. Every process."""
    begun = time.perf_counter()
    with Group.current(options, Call.of("restore", path)) as group:
        options = given(options)
        with group.meeting("opening the checkpoint") as meeting:
            require_mesh(request.mesh)
            require_request(request)
            if isinstance(path, Pooled):  # half of the memory is for what other processes pass on
                source, digest = path, path.digest
                options = replace(options, host_bytes=max(1, options.host_bytes // 2))
            else:
                source, digest = source_at(path, options)
            source = renamed_source(source, request.rules)
            resolved = resolve(source.manifest, request, options)
            _require_no_trace(resolved.goals.values())
            _require_one(meeting.gather(f"{digest} {source.url}"), source.url)
            chosen = meeting.share(f"{digest} {source.url}")
        with group.meeting("restoring") as meeting:
            expected, _, url = chosen.partition(" ")
            if digest != expected:  # process 0 found another step to be a run's newest
                source, digest = source_at(url, options)
                _require_one([chosen, f"{digest} {url}"], url)
                source = renamed_source(source, request.rules)
                resolved = resolve(source.manifest, request, options)
            initial = request.initial(resolved.lacking) if request.initial else []
            values = fetch(source, resolved.goals, options, meeting, tied=request.tied)
            result = resolved.build(values, initial)
            require_agreement(meeting, "")
    finished(
        "restore",
        time.perf_counter() - begun,
        lambda: (
            f"restored {len(resolved.goals)} of the tree's {len(jax.tree.leaves(result))} leaves from {source.url},"
            f" which has {len(source.manifest.leaves)}"
        ),
        log=group.index == 0,
        leaves=len(resolved.goals),
    )
    return result


def _require_one(found: Sequence[str], url: str) -> None:
    """Raise PeersDisagreeError if processes found different checkpoints, each a digest and a path, at one path."""
    if len(set(found)) > len({one.partition(" ")[2] for one in found}):
        raise PeersDisagreeError(
            f"the processes see different checkpoints at {url}: it was replaced meanwhile, or is not shared"
        )


def _require_no_trace(goals: Iterable[Goal]) -> None:
    """Raise InputError if arrays would be made while JAX traces a function, where none can be."""
    on_devices = any(goal.on_devices for goal in goals)
    if on_devices and isinstance(jax.device_put(np.empty(0, np.uint8)), Tracer):
        raise InputError(
            "restore was called while JAX traces a function: call it outside of jit, scan and eval_shape, and pass what"
            " it returns to the function"
        )


def load_numpy(
    path: Location,
    *,
    select: Select | None = None,
    rename: Renaming | None = None,
    options: Options | None = None,
) -> Tree:
    """Read a checkpoint into host memory, for inference or a look: no mesh, no devices, no JAX backend is started.

    Args:
        path: Where `save` wrote, or another checkpoint that `restore` takes.
        select: Only these leaves, as for `restore`, by their paths after `rename`.
        rename: As for `restore`.
        options: See `Options`.

    Returns:
        The saved tree with NumPy arrays for arrays (dtypes of ml_dtypes for bfloat16, float8 and int4). A typed PRNG
        key comes back as its raw uint32 data.

    Raises:
        NotACheckpointError, CorruptError: As `restore`.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/numpy", {"w": np.arange(3)}, overwrite=True)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/numpy")
        {'w': array([0, 1, 2])}
    """
    options = given(options)
    source = renamed_source(source_at(path, options)[0], rename)
    resolved = host_goals(source.manifest, select)
    return resolved.build(fetch(source, resolved.goals, options), [])
