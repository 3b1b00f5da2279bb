"""Restores the state of each process, also for a different number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxckpt._format.manifest import decode_state
from jaxckpt._restore.passing import Arrivals
from jaxckpt._restore.pooled import Pooled
from jaxckpt._runtime.errors import InputError
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.processes import Meeting
from jaxckpt._storage.manifests import load_manifest, load_states
from jaxckpt._storage.store import Store

Resplit = Callable[[list[Any], int], Sequence[Any]]


def own_state(source: Store | Pooled, name: str, resplit: Resplit | None, options: Options, meeting: Meeting) -> Any:
    """The value of `process_state[name]` for this process. Every process.

    Raises InputError, DataError; DamagedError if a local folder is damaged.
    """
    process, processes = meeting.group.index, meeting.group.count
    manifest = source.manifest if isinstance(source, Pooled) else load_manifest(source)[0]
    # Each process reads only its own file out of thousands, unless all states must be divided again.
    same = len(manifest.process_states) == processes
    numbers = [process] if same else range(len(manifest.process_states))
    if isinstance(source, Pooled):
        with Arrivals(source, [source.lacking_states(numbers)], options, meeting) as arrivals:
            arrivals.before()
            states = [decode_state(source.state(number)) for number in numbers]
    else:
        states = load_states(source, manifest, numbers)
    if not isinstance(name, str) or not states or any(name not in state for state in states):  # pyright: ignore[reportUnnecessaryIsInstance]
        found = sorted(states[0]) if states else "none"
        raise InputError(f"{source.url} has no process_state {name!r}; it has {found}")
    items = [state[name] for state in states]
    if not same:
        if resplit is None:
            raise InputError(
                f"{len(items)} processes saved {name!r} in {source.url}, but this job has {processes}: pass resplit=, a"
                " function that makes one state for each of its processes from the saved ones"
            )
        items = list(resplit(items, processes))
        if len(items) != processes:
            raise InputError(f"resplit made {len(items)} states of {name!r} for {processes} processes")
    return items[0 if same else process]
