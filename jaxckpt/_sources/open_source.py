"""Opens the source at a location: a checkpoint of jaxckpt, a step of a run, or a checkpoint of another library."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import reprlib
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxckpt._model.file_names import MANIFEST, is_data_folder
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._run_folder.run_paths import (
    missing_step_error,
    named_step,
    no_steps_error,
    resolve_name,
    resolve_step,
    run_and_name,
)
from jaxckpt._run_folder.steps import is_step
from jaxckpt._sources.compose import step_record
from jaxckpt._sources.foreign import ForeignCheckpoint, with_files
from jaxckpt._sources.format_registry import DRAFT_NAME, ForeignStep, Format, formats, index_names, missing_formats_hint
from jaxckpt._sources.signatures import describe, describe_content, describe_unknown
from jaxckpt._sources.source import NativeCheckpoint, Source
from jaxckpt._store.bucket import Bucket
from jaxckpt._store.foreign_files import (
    BucketFiles,
    OpenedFiles,
    SeenFiles,
    is_folder,
    names_at,
    store_of,
    url_of,
    using_files,
)
from jaxckpt._store.store import Store, await_writes
from jaxckpt._store.store_path import require_no_dangling_link, unchecked_store_at
from jaxckpt.errors import DataError, InputError, ManifestError, NotACheckpointError

Location = str | os.PathLike[str] | ForeignCheckpoint
"""The location of a checkpoint: a path or URL, also of a run's directory, or the result of a function such as
`jaxckpt.formats.rank_files`."""

_TRIES = 5
"""The most attempts to find the newest step of a run, if the step is deleted before its manifest is read."""

_MAX_FOLDERS = 100
"""The most folders whose content is searched for checkpoints, for an error."""

_UNLISTED = (
    "nothing is at this URL, or it is a folder, which HTTP does not list: give the URL of one of its files, or copy the"
    " folder; a public bucket can be listed under its gs:// or s3:// URL"
)


@dataclass(frozen=True, slots=True)
class NamedStep(os.PathLike[str]):
    """A step of a run. Unlike the text "run@name", it never refers to another folder of that name."""

    run: Store

    name: str
    """Its number in decimal, "latest", "best", or the name of a pin."""

    def __fspath__(self) -> str:
        return f"{self.run.url}@{self.name}"


def source_at(
    location: Location, options: Options, manifest_sha256: str | None = None
) -> NativeCheckpoint | ForeignCheckpoint:
    """The source at a location. `manifest_sha256` is the SHA-256 that its manifest must have, if any.

    A run's directory refers to its newest step; "run@40", "run@best" and "run@latest" refer to one of its steps. The
    run may be of another library, without "best". Waits for a running save of this process to that path or run.

    Raises NotACheckpointError, ManifestError; DataError if a foreign checkpoint is damaged; StorageError if the storage
    hangs for `options.timeout_seconds`.
    """
    is_digest = isinstance(manifest_sha256, str) and re.fullmatch("[0-9a-fA-F]{64}", manifest_sha256)
    if manifest_sha256 is not None and not is_digest:
        raise InputError(f"manifest_sha256 must be 64 hexadecimal digits, found {reprlib.repr(manifest_sha256)}")
    if isinstance(location, ForeignCheckpoint):
        if manifest_sha256 is not None:
            raise NotACheckpointError(f"{location.url} has no manifest.json that could have an expected SHA-256")
        return location
    if isinstance(location, NamedStep):
        await_writes(location.run)
        return run_watched(
            f"opening {os.fspath(location)}",
            options.timeout_seconds,
            lambda: _open_named_step(location.run, location.name, options, manifest_sha256),
        )
    store = unchecked_store_at(location, options)
    await_writes(store)
    return run_watched(
        f"opening {store.url}", options.timeout_seconds, lambda: _open_source(store, options, manifest_sha256)
    )


def _open_source(store: Store, options: Options, manifest_sha256: str | None) -> NativeCheckpoint | ForeignCheckpoint:
    """The result of `source_at`: tries jaxckpt's own format first, then the steps of a run, then other formats."""
    try:
        return NativeCheckpoint.at(store, manifest_sha256)
    except ManifestError as error:  # or the manifest.json of another library
        if manifest_sha256 is None and (foreign := _open_foreign(store, options)) is not None:
            return foreign
        raise error
    except NotACheckpointError as error:
        require_no_dangling_link(store)
        for _ in range(_TRIES):
            if (step := resolve_step(store)) is None:
                break
            with contextlib.suppress(NotACheckpointError):  # a newer step was published, and this one was deleted
                return NativeCheckpoint.at(step, manifest_sha256)
        # A caller that expects a certain manifest does not accept a checkpoint without one.
        foreign = None if manifest_sha256 else _open_foreign(store, options)
        if foreign is not None:
            return foreign
        named = run_and_name(store)
        exists = _exists_at(store) or (named is not None and _exists_at(named[0]))
        hint = missing_formats_hint() if exists else ""  # another library could have written it
        reason = _foreign_reason(store)
        if not hint and reason is None:
            raise
        text = f"{store.url} is not a checkpoint: {reason}" if reason else str(error)
        raise NotACheckpointError(f"{text}{hint}") from None


def _open_named_step(
    run: Store, name: str, options: Options, manifest_sha256: str | None
) -> NativeCheckpoint | ForeignCheckpoint:
    """The step of a run with a number or a name. The run may be of another library."""
    if is_step(folder := name.zfill(8)):
        with contextlib.suppress(NotACheckpointError):  # the listing below says which steps exist
            return NativeCheckpoint.at(run.child(folder), manifest_sha256)
    for attempt in range(1, _TRIES + 1):
        if (step := named_step(run, name)) is None:
            break
        try:
            return NativeCheckpoint.at(step, manifest_sha256)
        except NotACheckpointError:  # the name was given to a newer step, and this one was deleted
            if attempt == _TRIES:
                raise
    foreign = None if manifest_sha256 else _open_foreign_step(run, name, options)
    if foreign is None:
        raise no_steps_error(run, missing_formats_hint())
    return foreign


def _open_foreign_step(run: Store, name: str, options: Options) -> NativeCheckpoint | ForeignCheckpoint | None:
    """The step of another library's run with a number or a name; None if the run has no steps."""
    paths = {step.number: step.path for step in _foreign_steps_of(run)}
    if not paths:
        return None
    number = resolve_name(run, name, sorted(paths))
    checkpoint = _open_at(unchecked_store_at(paths[number], options))
    if checkpoint is None:  # the step was deleted in the meantime
        raise missing_step_error(run, number, sorted({*paths} - {number}))
    return _as_step(checkpoint, number)


def _as_step(checkpoint: NativeCheckpoint | ForeignCheckpoint, number: int) -> NativeCheckpoint | ForeignCheckpoint:
    """A checkpoint of another library as a step of its run, with the step's number and metrics."""
    metadata = checkpoint.manifest.metadata
    record = step_record({**(metadata if isinstance(metadata, dict) else {}), "step": number})
    return replace(checkpoint, manifest=msgspec.structs.replace(checkpoint.manifest, step=record))


def step_of(source: Source, hint: str) -> tuple[NativeCheckpoint, Store, int]:
    """A checkpoint that is a step of a run, with the run and the step's number. Raises InputError, with a hint."""
    above = source.store.parent_and_name() if isinstance(source, NativeCheckpoint) else None
    if not isinstance(source, NativeCheckpoint) or above is None or not is_step(above[1]):
        raise InputError(f"{source.url} is not a step in a run's directory: {hint}")
    return source, above[0], int(above[1])


def _open_foreign(store: Store, options: Options) -> NativeCheckpoint | ForeignCheckpoint | None:
    """A checkpoint of another library at a path, or the step of its run that "run@40" or "run@latest" names."""
    checkpoint = _open_at(store)
    if checkpoint is not None or (named := run_and_name(store)) is None or _exists_at(store):
        return checkpoint
    return _open_foreign_step(*named, options)


def _open_at(store: Store) -> NativeCheckpoint | ForeignCheckpoint | None:
    """A checkpoint of another library at exactly this path or URL; None if there is none in a known format."""
    with _files_at(store) as (path, names, files):
        form = _recognized_format(path, names)
        if form is None or form.open is None:
            return None
        checkpoint = _open_as(form.open, path, names)
    return with_files(checkpoint, files) if isinstance(checkpoint, ForeignCheckpoint) else checkpoint


def located(store: Store) -> tuple[str, OpenedFiles]:
    """The path of a store among `foreign_files`, and the files of its bucket or of the file system."""
    if not isinstance(store, Bucket):
        return store.absolute().url, SeenFiles()
    files, path = BucketFiles.at(store, index_names())
    return path, files


@contextlib.contextmanager
def _files_at(store: Store) -> Generator[tuple[str, list[str] | None, OpenedFiles]]:
    """A block with a path of `foreign_files`, the names in its folder, and the files."""
    path, files = located(store)
    with using_files(files):
        yield path, names_at(path), files


def _open_as(
    open_format: Callable[[str], NativeCheckpoint | ForeignCheckpoint], path: str, names: Collection[str] | None
) -> NativeCheckpoint | ForeignCheckpoint:
    """A checkpoint in a recognized format. If its files are of another kind, such as pointers, the error says which."""
    try:
        return open_format(path)
    except DataError as error:
        # Over HTTP, more names of the folder are known after it was read.
        what = describe(path, names_at(path) or () if names else ())
        if what is None and not names and path.endswith(".json"):  # an index of the files next to it
            folder = os.path.dirname(path)
            path, what = folder, describe(folder, names_at(folder) or ())
        if what is None:
            raise
        raise NotACheckpointError(f"{path} {what} ({error})") from None


def _foreign_reason(store: Store) -> str | None:
    """The reason why a file or folder of another program is not a checkpoint, if known, and the way out."""
    with _files_at(store) as (path, names, _):
        if names is None:
            return _UNLISTED if path.startswith("http") else None
        if what := describe(path, names):
            return f"it {what}"
        if not names:
            return None if is_folder(path) else f"it {describe_unknown(path)}"
        if any(map(is_data_folder, names)):  # an unfinished save of jaxckpt
            return None
        inside = _checkpoints_inside(path)
    if not inside:
        return f"it {describe_content(names)}"
    return f"it is a folder of checkpoints; open one of them: {', '.join(inside[-5:])}"


def _checkpoints_inside(path: str) -> list[str]:
    """Checkpoints of other libraries up to three levels below a folder, as in the cache of a hub: folders, or if there
    are none, files."""
    inside: list[str] = []
    files: list[str] = []
    n_files_left = 100 if store_of(path) is None else 20  # each takes requests in a bucket
    folders = collections.deque([(path, 0)])
    for _ in range(_MAX_FOLDERS):
        if not folders:
            break
        folder, depth = folders.popleft()
        for name in sorted(names_at(folder) or ()):
            below = f"{folder}/{name}"
            names = names_at(below)
            if names and _recognized_format(below, names) is not None:
                inside.append(os.path.relpath(below, path))
            elif names and depth < 2 and not name.startswith("."):
                folders.append((below, depth + 1))
            elif names == [] and n_files_left > 0:
                n_files_left -= 1
                if _recognized_format(below, ()) is not None:
                    files.append(os.path.relpath(below, path))
    return inside or files


def _exists_at(store: Store) -> bool:
    with _files_at(store) as (_, names, _):
        return names is not None


def foreign_steps_of(
    location: str | os.PathLike[str], options: Options, ignored: Collection[str] = ()
) -> Sequence[ForeignStep]:
    """The steps in another library's run at a path or URL, oldest first; none if it is something else.

    Folders in it whose names are `ignored` do not count. Raises StorageError if the storage hangs.
    """
    store = unchecked_store_at(location, options)
    find = functools.partial(_foreign_steps_of, store, ignored)
    return run_watched(f"listing {store.url}", options.timeout_seconds, find)


def _foreign_steps_of(store: Store, ignored: Collection[str] = ()) -> Sequence[ForeignStep]:
    with _files_at(store) as (path, names, _):
        if names is None or MANIFEST in names:
            return ()
        counted = {*names} - {*ignored}
        form = _recognized_format(path, counted)
        try:
            steps = form.steps_in(path, counted) if form is not None else ()
        except NotACheckpointError:  # of several runs, next to the ignored steps of ours
            if not ignored:
                raise
            steps = ()
    return [replace(step, path=url_of(step.path)) for step in steps]


def foreign_run_metadata(location: str | os.PathLike[str], options: Options) -> dict[str, Any]:
    """The user's metadata of another library's run; empty if it has none.

    Raises DataError, and StorageError if the storage hangs.
    """
    store = unchecked_store_at(location, options)

    def read() -> dict[str, Any]:
        with _files_at(store) as (path, names, _):
            form = _recognized_format(path, names)
            return {} if form is None else form.run_metadata(path)

    return run_watched(f"reading {store.url}", options.timeout_seconds, read)


def _recognized_format(path: str, names: Collection[str] | None) -> Format | None:
    if names is None or DRAFT_NAME.fullmatch(os.path.basename(path)):
        return None
    return next((form for form in formats() if form.open is not None and _recognizes(form, path, names)), None)


def _recognizes(form: Format, path: str, names: Collection[str]) -> bool:
    try:
        return form.recognizes(path, names)
    except OSError:
        raise
    except Exception as error:  # formats of other packages must not keep the others from being recognized
        _log.warning("the checkpoint format %s failed to look at %s: %r", form.name, path, error)
        return False
