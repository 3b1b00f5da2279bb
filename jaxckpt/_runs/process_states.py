"""Restores the state of each process, also for a different number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier.union_source import UnionCheckpoint
from jaxckpt._model.manifest import decode_state
from jaxckpt._options import Options
from jaxckpt._store.load_manifest import load_manifest, load_states
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError

Resplit = Callable[[list[Any], int], Sequence[Any]]


def restore_process_state(
    source: Store | UnionCheckpoint, name: str, resplit: Resplit | None, options: Options, rendezvous: Rendezvous
) -> Any:
    """The value of `process_state[name]` for this process. Every process.

    Raises InputError, DataError; DamagedError if a local folder is damaged.
    """
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
    if not is_same_count:
        if resplit is None:
            raise InputError(
                f"{len(items)} processes saved {name!r} in {source.url}, but this job has {processes}: pass resplit=, a"
                " function that makes one state for each of its processes from the saved ones"
            )
        items = list(resplit(items, processes))
        if len(items) != processes:
            raise InputError(f"resplit made {len(items)} states of {name!r} for {processes} processes")
    return items[0 if is_same_count else process]
