"""Pins: names for steps of a run, which protect them from deletion. Each is an empty file of the run.

_run/pin-00000040-best-so-far
"""

from __future__ import annotations

import re

from jaxckpt._options import Options
from jaxckpt._run_folder.leases import hold
from jaxckpt._run_folder.steps import RUN, is_step, step_name
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError

_PREFIX = "pin-"


def pin_file_name(step: int, name: str) -> str:
    return f"{_PREFIX}{step_name(step)}-{name}"


def all_pins(run: Store) -> list[tuple[int, str]]:
    """The steps of all pins, each with the pin's name."""
    fields = (name.removeprefix(_PREFIX).partition("-") for name in run.child(RUN).names() if name.startswith(_PREFIX))
    return [(int(step), name) for step, _, name in fields if is_step(step)]


def pins(run: Store) -> dict[str, int]:
    """The pinned steps of a run, by name. If two steps have a name, because a program was killed while it moved the
    name, or two programs moved it at the same time, the newer step counts."""
    return {name: step for step, name in sorted(all_pins(run))}


def pinned_steps(run: Store) -> set[int]:
    """The steps that have a pin, none of which is deleted."""
    return {step for step, _ in all_pins(run)}


def require_unpinned(run: Store, step: int) -> None:
    """Raise InputError if a step has a name, which protects it from deletion."""
    names = sorted(name for pinned, name in all_pins(run) if pinned == step)
    if names:
        raise InputError(f"step {step} of {run.url} is pinned as {names[0]!r}, and is not deleted: unpin it first")


def pin_step(run: Store, step: int, name: object, options: Options, *, move: bool) -> None:
    """Name a step. With `move`, the name may be another step's, which loses it when this step is protected.

    Raises InputError, NotACheckpointError, StorageError.
    """
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", name)) or name in ("latest", "best"):
        raise InputError(
            f"name must consist of letters, digits, '_', '-' and '.', start with a letter, and not be 'latest' or"
            f" 'best'; found {name!r}"
        )
    if not move and (other := pins(run).get(name, step)) != step:
        raise InputError(f"{name!r} is the name of step {other} of {run.url}: pass move=True, or unpin({name!r}) first")
    # Listed first, so that of two concurrent moves each leaves the other's pin: both steps stay protected.
    other_steps = [other for other, other_name in all_pins(run) if other_name == name and other != step] if move else []
    with hold(run, step):
        # Empty, so that a full disk leaves no pin after an error.
        run.create_child(RUN).put(pin_file_name(step, name), b"", sync=options.sync)
        for other in other_steps:
            run.child(RUN).remove(pin_file_name(other, name))
        if options.sync:
            run.sync_data(RUN, ())


def unpin_name(run: Store, name: str) -> None:
    """Remove the name of a step. Raises NotACheckpointError if no step has it, StorageError."""
    steps = [step for step, other_name in all_pins(run) if other_name == name]
    if not steps:
        names = ", ".join(pins(run)) or "none"
        raise NotACheckpointError(f"no step is pinned as {run.url}@{name}; pinned names: {names}")
    for step in steps:
        run.child(RUN).remove(pin_file_name(step, name))
