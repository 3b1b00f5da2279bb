"""The formats of other libraries that are installed.

A format, or a tuple of them, is an object that an entry point of the group "jaxckpt.formats" names, in jaxckpt's own
pyproject.toml or in that of another package:

    [project.entry-points."jaxckpt.formats"]
    npz = "jaxckpt._formats.npz:FORMAT"
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jaxckpt._keywords import explain_names
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.source import NativeCheckpoint, Source
from jaxckpt.errors import InputError

GROUP = "jaxckpt.formats"
"""The group of entry points that name formats."""

DRAFT_MARK = "-convert-"
DRAFT_NAME = re.compile(rf"\.[0-9a-f]{{16}}{DRAFT_MARK}[0-9a-f]{{32}}")
"""The name of a folder for incomplete output."""


@explain_names
@dataclass(frozen=True, slots=True)
class ForeignStep:
    """A complete step in another library's run."""

    number: int
    path: str


@explain_names
@dataclass(frozen=True, slots=True)
class Format:
    """A format of another library that records its own global layout."""

    name: str

    recognizes: Callable[[str, Collection[str]], bool]
    """Whether a path has this format, given the names in its folder; no names for a file. The path may be in a bucket,
    so `open` and this function read files with `jaxckpt.formats.opened`."""

    open: Callable[[str], NativeCheckpoint | ForeignCheckpoint] | None = None
    """Reads the format; None if it can only be written."""

    owned_names: Callable[[str, Collection[str]], Collection[str]] = lambda path, names: ()
    """The names in its folder that belong to the format. `convert(overwrite=True)` replaces a folder only
    if it contains nothing else."""

    write: Callable[[Source, str, Options, Report], None] | None = None
    """Writes a checkpoint in the format to a local path; None if it can only be read."""

    suffixes: tuple[str, ...] = ()
    """Suffixes of paths to which `convert` writes this format by default."""

    steps_in: Callable[[str, Collection[str]], Sequence[ForeignStep]] = lambda path, names: ()
    """The steps in a run's folder, oldest first. `open` opens the folder as its newest step. Empty for a single
    checkpoint."""

    write_step: Callable[[Source, str, Options, Report], None] | None = None
    """Writes a step of a run, with the metrics in its manifest, to a local path whose name is the step's number; None
    if the format has no runs that `convert` can write."""

    run_metadata: Callable[[str], dict[str, Any]] = lambda path: {}
    """Reads the user's metadata of a run's folder; empty if it has none."""

    write_run_metadata: Callable[[str, dict[str, Any]], None] | None = None
    """Writes it to the local folder of a run; None if the format has no place for it."""

    save_to: Callable[..., Any] | None = None
    """The destination of a save by all processes, from the path, `rename`, the options and `overwrite`; None if only
    `convert` writes the format. Only formats of jaxckpt define it."""

    order: int = 0
    """Formats of lower order are tried first: those that share names of files with a more general format."""

    index_names: tuple[str, ...] = ()
    """The files in its folder that name the others. Over HTTP, where folders cannot be listed, a folder counts as
    holding those of them that exist."""


@functools.cache
def formats() -> tuple[Format, ...]:
    """The installed formats, in the order of detection. Imports their modules."""
    loaded: list[Format] = []
    for point in entry_points(group=GROUP):
        try:
            form = point.load()
        except Exception as error:  # jaxckpt's own formats must work if one of another package does not
            _log.warning("the checkpoint format %s (%s) cannot be loaded: %r", point.name, point.value, error)
            continue
        if isinstance(form, Format):
            loaded.append(form)
        elif isinstance(form, tuple) and all(isinstance(one, Format) for one in form):
            loaded.extend(form)
        else:
            _log.warning("the checkpoint format %s (%s) is not a Format: %r", point.name, point.value, form)
    if not _is_installed():
        _log.warning("jaxckpt is not installed with pip, so it knows no checkpoint formats of other libraries")
    return tuple(sorted(loaded, key=lambda form: (form.order, form.name)))


def index_names() -> tuple[str, ...]:
    """The `Format.index_names` of all formats."""
    return tuple(dict.fromkeys(name for form in formats() for name in form.index_names))


def missing_formats_hint() -> str:
    """The end of an error about something that no format recognizes; empty if jaxckpt's own formats are installed."""
    if _is_installed():
        return ""
    return (
        f". The jaxckpt in {Path(__file__).parents[2]} is not installed, so it knows no checkpoint formats of other"
        " libraries: install it with pip"
    )


def _is_installed() -> bool:
    return any(point.value.startswith("jaxckpt.") for point in entry_points(group=GROUP))


def saved_format(format: str | None) -> Callable[..., Any]:
    """`Format.save_to` of the format of a save in another library's format. Raises InputError."""
    savable = {form.name: form.save_to for form in written_formats().values() if form.save_to is not None}
    if format not in savable:
        raise InputError(
            f"format={format!r} cannot be saved directly; expected one of {', '.join(['jaxckpt', *savable])}. For other"
            f" formats, jaxckpt.convert writes a saved checkpoint{missing_formats_hint()}"
        )
    return savable[format]


def written_formats() -> dict[str, Format]:
    """The formats of other libraries that `convert` can write, by name."""
    return {form.name: form for form in formats() if form.write is not None}
