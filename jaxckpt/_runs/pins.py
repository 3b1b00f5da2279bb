"""Pins: names for steps of a run, which protect the steps from deletion."""

from __future__ import annotations

import os
import re

from jaxckpt._options import Options, options_or_default
from jaxckpt._run_folder.leases import hold
from jaxckpt._run_folder.run_paths import run_and_name
from jaxckpt._run_folder.steps import PIN, RUN, pins, step_name
from jaxckpt._sources.open_source import source_at, step_of
from jaxckpt._store.store_path import store_at
from jaxckpt.errors import InputError, NotACheckpointError


def pin(path: str | os.PathLike[str], name: str, *, options: Options | None = None) -> int:
    """Name a step of a run. No rule of a Checkpointer deletes a named step until `unpin`.

    The step can then be opened as `run@name`. Any single process may call it; nothing is copied.

    Args:
        path: A step: "run@40", "run/00000040", or "run" for the newest.
        name: Letters, digits, "_", "-" and ".", starting with a letter; not "latest" or "best". A step may have
            several names.
        options: `storage`, `retry_seconds` and `sync`; see `Options`.

    Returns:
        The number of the step.

    Raises:
        InputError: `path` is not a step of a run, `name` is invalid, or another step has that name.
        NotACheckpointError: The step does not exist, or is being deleted.
        StorageError: The run's directory cannot be written to.

    Examples:
        >>> import jaxckpt
        >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/pinned", keep_last=1) as run:
        ...     saved = run.save(40, {"w": 1}, overwrite=True)
        >>> jaxckpt.pin("/tmp/jaxckpt-doc/pinned@40", "paper")
        40
        >>> jaxckpt.open("/tmp/jaxckpt-doc/pinned@paper").step
        40
        >>> jaxckpt.unpin("/tmp/jaxckpt-doc/pinned@paper")
    """
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", name)) or name in ("latest", "best"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"name must consist of letters, digits, '_', '-' and '.', start with a letter, and not be 'latest' or"
            f" 'best'; found {name!r}"
        )
    options = options_or_default(options)
    _, run, step = step_of(source_at(path, options), "a Checkpointer deletes only those")
    if (other := pins(run).get(name, step)) != step:
        raise InputError(f"{name!r} is the name of step {other} of {run.url}; unpin({f'{run.url}@{name}'!r}) first")
    with hold(run, step):
        # Empty, so that a full disk leaves no pin after an error.
        run.create_child(RUN).put(f"{PIN}{step_name(step)}-{name}", b"", sync=options.sync)
        if options.sync:
            run.sync_data(RUN, ())
    return step


def unpin(path: str | os.PathLike[str], *, options: Options | None = None) -> None:
    """Remove the name of a pinned step. Unless it has other names, the rules of a Checkpointer may then delete it.

    Args:
        path: The run's directory and the name, as in "run@paper".
        options: `storage` and `retry_seconds`; see `Options`.

    Raises:
        NotACheckpointError: No step has that name.
        StorageError: The run's directory cannot be written to.
    """
    store = store_at(path, options_or_default(options))
    run, name = run_and_name(store) or (store, "")
    if name not in (known := pins(run)):
        raise NotACheckpointError(f"no step is pinned as {store.url}; pinned names: {', '.join(known) or 'none'}")
    run.child(RUN).remove(f"{PIN}{step_name(known[name])}-{name}")
