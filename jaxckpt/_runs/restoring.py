"""The initial state as the target of a restore, and the source of leaves that a checkpoint lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxckpt._arguments.pytree import flatten_values
from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier.peer_reads import DamagedError
from jaxckpt._local_tier.union_source import UnionCheckpoint
from jaxckpt._model.manifest import decode_state
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options
from jaxckpt._restore.match import Uncommitted
from jaxckpt._store.load_manifest import load_manifest, load_states
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError


def target_of(init: Callable[[], Tree]) -> tuple[Tree, Callable[[Sequence[int]], Sequence[Any]]]:
    """The result of `init` without its data, and a function that creates some of its leaves, by number."""
    if isinstance(init, jax.stages.Wrapped):  # jitted, so all its results are arrays
        shapes = jax.eval_shape(init)
        if all(leaf.sharding is not None for leaf in jax.tree.leaves(shapes)):
            return shapes, functools.partial(_compute_leaves, init, jax.tree.leaves(shapes))
    leaves, builder = flatten_values(init())
    target = builder.unflatten(map(_abstract, leaves))

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
    if not isinstance(leaf, jax.Array):
        return leaf
    weak = getattr(leaf, "weak_type", False)  # PRNG keys lack the attribute
    if not leaf.committed:
        return Uncommitted(leaf.shape, leaf.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)


# States of processes --------------------------------------------------------------------------------------


Resplit = Callable[[list[Any], int], Sequence[Any]]

_Values = tuple[list[Any], bool]
"""Values of processes, and whether there is only this process's own."""

_RESTORING = "restoring each process's own state"


def restore_process_state(call: Call, source: Store | UnionCheckpoint, name: str, resplit: Resplit | None) -> Any:
    """The value of `process_state[name]` for this process. Every process.

    Raises InputError, DataError; DamagedError, in all processes, if a local folder is damaged.
    """
    found = call.run(functools.partial(_read, call, source, name, resplit is not None))
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


def _read(call: Call, source: Store | UnionCheckpoint, name: str, has_resplit: bool) -> _Values | DamagedError:
    """As `_read_values`, or the error that all processes raise. In a lane."""
    with call.rendezvous(_RESTORING) as rendezvous:
        try:
            found: _Values | DamagedError = _read_values(source, name, has_resplit, call.options, rendezvous)
        except DamagedError as error:
            found = error
        rendezvous.barrier()
    return found


def _read_values(
    source: Store | UnionCheckpoint, name: str, has_resplit: bool, options: Options, rendezvous: Rendezvous
) -> _Values:
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
