"""The state that each process gave to `save` as `process_state`, restored in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier.peer_reads import DamagedError
from jaxckpt._local_tier.union_source import UnionCheckpoint
from jaxckpt._model.manifest import decode_state
from jaxckpt._options import Options
from jaxckpt._store.load_manifest import load_manifest, load_states
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError

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
