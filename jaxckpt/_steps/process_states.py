"""What each process alone knows, given back to as many processes as there are now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxckpt._runtime.errors import InputError
from jaxckpt._storage.manifests import load_manifest, load_states
from jaxckpt._storage.store import Store

Resplit = Callable[[list[Any], int], Sequence[Any]]


def own_state(store: Store, name: str, resplit: Resplit | None, process: int, processes: int) -> Any:
    """What a process, or the one in its place, gave as `process_state[name]`. Raises InputError, DataError."""
    manifest, _ = load_manifest(store)
    # Of thousands of files each process reads only its own, unless all must be split again.
    same = len(manifest.process_states) == processes
    states = load_states(store, manifest, [process] if same else None)
    if not states or any(name not in state for state in states):
        found = sorted(states[0]) if states else "none"
        raise InputError(f"{store.url} has no process_state {name!r}; it has {found}")
    items = [state[name] for state in states]
    if not same:
        if resplit is None:
            raise InputError(
                f"{len(items)} processes saved {name!r} in {store.url}, but this job has {processes}: pass resplit=, a"
                " function that makes one state for each of its processes from the saved ones"
            )
        items = list(resplit(items, processes))
        if len(items) != processes:
            raise InputError(f"resplit made {len(items)} states of {name!r} for {processes} processes")
    return items[0 if same else process]
