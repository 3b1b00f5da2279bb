"""The source of a restore: a jaxckpt checkpoint, or a checkpoint of another library in the same form.

Each source is a manifest and, for each stack, a reader of boxes. For a foreign checkpoint, this module composes the
manifest in memory from the format's index files:

its index files ─▶ a tree of ForeignArrays ─▶ compose: equal ones become rows of a stack ─▶ ForeignCheckpoint
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from jaxckpt._format.dtypes import DTYPES, MAX_RANK, dtype_name
from jaxckpt._format.grid import Box, Spec
from jaxckpt._format.leaves import SavedLeaf
from jaxckpt._format.names import MANIFEST
from jaxckpt._format.pieces import Array, as_bits
from jaxckpt._format.records import LayoutRecord, LeafRecord, Manifest, MeshRecord, StackRecord
from jaxckpt._format.tree import Tree, flatten
from jaxckpt._format.values import PYTHON_KINDS, array_of, encode_value
from jaxckpt._runtime.errors import (
    DataError,
    InputError,
    NotACheckpointError,
    Problem,
    TreeError,
    show_count,
    show_path,
)
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import Report
from jaxckpt._storage.manifests import load_manifest
from jaxckpt._storage.objects import ArrayReader, Pending
from jaxckpt._storage.steps import is_step, resolve_name, resolve_step, run_and_name
from jaxckpt._storage.store import Store
from jaxckpt._storage.store_path import local_path, store_at
from jaxckpt._storage.workers import JoinedWork, run_watched, submit


class Source(Protocol):
    """The source of a restore, a plan, a comparison or a conversion."""

    @property
    def url(self) -> str:
        """The path as the user gave it."""
        ...

    @property
    def manifest(self) -> Manifest: ...

    def require_metadata(self, stacks: Sequence[int]) -> None:
        """Raise DataError unless the small files that describe these stacks are as they were saved."""
        ...

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        """A reader of boxes of a stack, like `Objects.array_reader`."""
        ...

    def change_since_open(self) -> str | None:
        """What happened to the checkpoint after it was opened: "deleted", "replaced by another" or "stripped of some of
        its leaves"; None if it is unchanged."""
        ...


@dataclass(frozen=True, slots=True)
class NativeCheckpoint:
    """A jaxckpt checkpoint."""

    store: Store
    manifest: Manifest

    @property
    def url(self) -> str:
        return self.store.url

    def require_metadata(self, stacks: Sequence[int]) -> None:
        """Check every zarr.json. jaxckpt does not use it, but other Zarr readers do."""
        records = [self.manifest.stacks[number] for number in stacks]
        keys = [f"{self.manifest.data_folder}/{record.name}/zarr.json" for record in records]
        problems: list[Problem] = []
        for number, record, key, text in zip(stacks, records, keys, self.store.read_all(keys), strict=True):
            if text is None or hashlib.sha256(text).hexdigest() != record.sha256:
                reason = "is missing" if text is None else "differs from the file that was saved"
                if len(problems) < 20:  # naming the leaves of thousands of stacks would take too long
                    reason += f"; it describes {leaves_at(self.manifest, number, (0, record.rows))}"
                problems.append(Problem(None, reason, object=f"{self.url}/{key}"))
        if problems:
            raise DataError.of(f"{show_count(len(problems), 'metadata file')} changed after the save", problems)

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        manifest = self.manifest
        stored = manifest.stacks[stack].objects
        return self.store.array_reader(manifest.data_folder, manifest.decoded_stacks[stack], stored, plan)

    def change_since_open(self) -> str | None:
        try:
            now, _ = load_manifest(self.store)
        except NotACheckpointError:
            return "deleted"
        if now.save_id != self.manifest.save_id:
            return "replaced by another"
        stacks = {stack.name for stack in now.stacks}
        return "stripped of some of its leaves" if any(s.name not in stacks for s in self.manifest.stacks) else None


def leaves_at(manifest: Manifest, stack: int, rows: tuple[int, int]) -> str:
    """The leaves in a range of rows of a stack, for an error message."""
    paths = [leaf.path[:200] for leaf in manifest.leaves if leaf.stack == stack and leaf.row in range(*rows)]
    named = ", ".join(map(show_path, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return f"{'leaf' if len(paths) == 1 else 'leaves'} {named}"


# Foreign checkpoints --------------------------------------------------------------------------------------


class ArrayData(abc.ABC):
    """The data of an array, or of a part of one, in a foreign checkpoint."""

    @abc.abstractmethod
    def read(self, box: Box, target: Array) -> None:
        """Fill `target` with a box of it, with a few MiB of additional host memory. Raises DataError, StorageError.

        Called by several threads at once.
        """

    def check(self) -> None:
        """Verify the stored data with its checksums, if the format has any.

        Raises DataError, StorageError.
        """
        return


class AsyncArrayData(ArrayData):
    """Data that can be read asynchronously, without a thread of jaxckpt."""

    @abc.abstractmethod
    def start(self, box: Box, target: Array) -> Pending:
        """Start to fill `target` with a box. It and its result raise tensorstore's errors."""


@dataclass(frozen=True, slots=True)
class StackRow(AsyncArrayData):
    """A leaf of a jaxckpt checkpoint."""

    reader: ArrayReader
    row: int

    def start(self, box: Box, target: Array) -> Pending:
        (pending,) = self.reader.read([(((self.row, self.row + 1), *box), target[None])])
        return pending

    def read(self, box: Box, target: Array) -> None:
        self.start(box, target).result()


@dataclass(frozen=True, slots=True)
class InMemoryData(ArrayData):
    """A small array that was read together with the index files."""

    array: Array

    def read(self, box: Box, target: Array) -> None:
        np.copyto(as_bits(target), as_bits(self.array)[tuple(slice(*side) for side in box)])


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """A leaf of a foreign checkpoint."""

    dtype: str
    """Name of a dtype: one of `dtypes.DTYPES`, or another name if the array cannot be read."""

    shape: tuple[int, ...]
    """Its global shape; for a PRNG key, of its raw data."""

    data: ArrayData

    kind: Literal["jax", "numpy", "numpy_scalar", "key", "str", "bytes"] = "jax"
    """The kind of the leaf. "str" and "bytes" are arrays of bytes, "str" in UTF-8."""

    impl: str | None = None
    """PRNG implementation, for kind "key"."""

    chunk: tuple[int, ...] | None = None
    """Shape of the unit that can only be read completely; None if any box can be read."""

    mesh: MeshRecord | None = None
    """The mesh at the time of the save, if known."""

    spec: Spec = ()
    """For each leading dimension, the axes of the mesh that split it."""


def as_foreign(leaf: SavedLeaf, data: ArrayData) -> ForeignArray:
    """An array of a checkpoint as a leaf of a foreign one, with its data."""
    kind: Any = leaf.kind
    stack, record = leaf.stack, leaf.record
    return ForeignArray(stack.dtype, stack.shape, data, kind, record.impl, stack.chunk[1:], leaf.mesh, leaf.spec)


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A checkpoint of another library."""

    url: str
    manifest: Manifest
    row_data: Sequence[Sequence[ArrayData]] = field(repr=False)
    """The data of each row of each stack."""

    files: Sequence[str] = field(default=(), repr=False)
    """The files or folders that it was assembled from, if not from `url`."""

    origin: Source | None = field(default=None, repr=False)
    """The checkpoint of which this one is a view."""

    def require_metadata(self, stacks: Sequence[int]) -> None:
        pass

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        return _RowReader(self.row_data[stack])

    def change_since_open(self) -> str | None:
        return None if self.origin is None else self.origin.change_since_open()


@dataclass(frozen=True, slots=True)
class _RowReader(ArrayReader):
    rows: Sequence[ArrayData]

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        return [self._start([*self._parts(box, target)], box[1:]) for box, target in wanted]

    def _parts(self, box: Box, target: Array) -> Iterator[tuple[ArrayData, Array]]:
        for row, into in zip(range(*box[0]), target if target.ndim > 1 else target.reshape(-1, 1), strict=True):
            yield self.rows[row], into if target.ndim > 1 else into.reshape(())

    def _start(self, parts: Sequence[tuple[ArrayData, Array]], box: Box) -> Pending:
        started = [block.start(box, into) for block, into in parts if isinstance(block, AsyncArrayData)]
        rest = [(block, into) for block, into in parts if not isinstance(block, AsyncArrayData)]
        if rest:
            started.append(submit(functools.partial(_read_all, rest, box)))
        return JoinedWork(started)


def _read_all(parts: Sequence[tuple[ArrayData, Array]], box: Box) -> None:
    for block, into in parts:
        block.read(box, into)


READ_UNIT_BYTES = 4 << 20
"""Bytes per read of an array without a unit."""


def compose(url: str, tree: Tree, format: str, *, metadata: Any = None, files: Iterable[str] = ()) -> ForeignCheckpoint:
    """A foreign checkpoint from its tree: nested dicts, lists and tuples of ForeignArrays, and of Python values and
    NumPy arrays that were already read.

    Raises TreeError for values that a jaxckpt checkpoint cannot hold.
    """
    leaves, structure = flatten(tree)
    records: list[LeafRecord] = []
    stacks: dict[tuple[Any, ...], list[ArrayData]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    meshes: dict[bytes, int] = {}
    layouts: dict[bytes, int] = {}
    problems: list[Problem] = []
    for leaf in leaves:
        array, inline = _described(leaf.value)
        if inline is not None:
            records.append(LeafRecord(leaf.path, inline[0], value=inline[1]))
            continue
        if isinstance(array, str):
            problems.append(Problem(leaf.path, array))
            continue
        key = (array.dtype, array.shape, array.chunk)
        rows = stacks.setdefault(key, [])
        layout = None
        if array.kind in ("jax", "key") and array.mesh is not None:
            mesh = meshes.setdefault(msgspec.json.encode(array.mesh), len(meshes))
            record = LayoutRecord(mesh, [list(axes) for axes in array.spec])
            layout = layouts.setdefault(msgspec.json.encode(record), len(layouts))
        records.append(
            LeafRecord(leaf.path, array.kind, numbers.setdefault(key, len(numbers)), len(rows), layout, impl=array.impl)
        )
        rows.append(array.data)
    if problems:
        raise TreeError.of(
            f"{len(problems)} of the {show_count(len(leaves), 'leaf')} of {url} cannot be read", problems
        )
    manifest = Manifest(
        format=format,
        version=0,
        save_id="",
        created="",
        libraries={},
        metadata=metadata,
        tree=structure,
        leaves=records,
        meshes=[msgspec.json.decode(text, type=MeshRecord) for text in meshes],
        layouts=[msgspec.json.decode(text, type=LayoutRecord) for text in layouts],
        stacks=[_stack(number, key, len(rows)) for number, (key, rows) in enumerate(stacks.items())],
    )
    return ForeignCheckpoint(url, manifest, list(stacks.values()), tuple(files))


def _described(value: Any) -> tuple[ForeignArray | str, tuple[str, str] | None]:
    """(a leaf as an array, or the reason why it cannot be one; the kind and text of a small Python value, or None)."""
    if isinstance(value, np.ndarray):
        value = ForeignArray(dtype_name(value.dtype), value.shape, InMemoryData(value), "numpy")
    elif isinstance(value, np.generic):
        array = np.asarray(value)
        value = ForeignArray(dtype_name(array.dtype), (), InMemoryData(array), "numpy_scalar")
    elif type(value) in PYTHON_KINDS:
        inline = encode_value(value)
        if inline is not None:
            return "", inline
        raw = array_of(value)
        return ForeignArray("uint8", raw.shape, InMemoryData(raw), type(value).__name__), None  # pyright: ignore[reportArgumentType]
    if not isinstance(value, ForeignArray):
        return f"is of type {type(value).__module__}.{type(value).__qualname__}", None
    if value.dtype not in DTYPES:
        return f"has dtype {value.dtype}, which NumPy and JAX do not support", None
    if len(value.shape) > MAX_RANK:
        return f"has {len(value.shape)} dimensions; at most {MAX_RANK} can be read", None
    if math.prod(side or 1 for side in value.shape) * DTYPES[value.dtype].itemsize >= 1 << 63:
        return f"has shape {list(value.shape)}, which is too large to address", None
    return value, None


def _stack(number: int, key: tuple[str, tuple[int, ...], tuple[int, ...] | None], rows: int) -> StackRecord:
    """A stack for plans. Its chunks are the units of reading."""
    dtype, shape, chunk = key
    itemsize = DTYPES[dtype].itemsize
    if chunk is None:
        chunk = _contiguous_sides(shape, itemsize)
    return StackRecord(f"{number:04d}", dtype, list(shape), rows, [1, *chunk], [1, *chunk], "", {})


def _contiguous_sides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Sides of a box of at most READ_UNIT_BYTES that is contiguous in C order."""
    sides: list[int] = []
    left = READ_UNIT_BYTES // itemsize
    for side in reversed(shape):
        sides.append(max(1, min(side, left)))
        left = left // side if side and left >= side else 0
    return tuple(reversed(sides))


# Opening --------------------------------------------------------------------------------------------------

Location = str | os.PathLike[str] | ForeignCheckpoint
"""The location of a checkpoint: a path or URL, also of a run's directory, or the result of a function such as
`jaxckpt.rank_files`."""


@dataclass(frozen=True, slots=True)
class ForeignStep:
    """A complete step in another library's run."""

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A foreign format that records its own global layout."""

    name: str

    recognizes: Callable[[str, Collection[str]], bool]
    """Whether a local path has this format, given the names in its folder; no names for a file."""

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
    """The steps in a run's folder, oldest first. `open` opens the folder as its newest step. None for a single
    checkpoint."""


formats: list[ForeignFormat] = []
"""The foreign formats that can be read, in the order of detection. `_foreign.registry` fills it."""


def source_at(location: Location, options: Options) -> tuple[NativeCheckpoint | ForeignCheckpoint, str]:
    """The source at a location, and a digest of its manifest, which is composed for another library's checkpoint.

    A run's directory refers to its newest step; "run@40", "run@best" and "run@latest" refer to one of its steps. The
    run may be of another library, without "best".

    Raises NotACheckpointError, ManifestError; DataError if a foreign checkpoint is damaged; StorageError if the storage
    hangs for `options.timeout_seconds`.
    """
    if isinstance(location, ForeignCheckpoint):
        return location, _digest(location)
    store = store_at(location, options)
    return run_watched(f"opening {store.url}", options.timeout_seconds, lambda: _open_source(location, store, options))


def _open_source(
    location: str | os.PathLike[str], store: Store, options: Options
) -> tuple[NativeCheckpoint | ForeignCheckpoint, str]:
    """The result of `source_at`: tries jaxckpt's own format first, then the steps of a run, then other formats."""
    try:
        return _open_native(store, options)
    except NotACheckpointError:
        for _ in range(_TRIES):
            if (step := resolve_step(store)) is None:
                break
            with contextlib.suppress(NotACheckpointError):  # a newer step was published, and this one was deleted
                return _open_native(step, options)
        # A caller that expects a certain manifest does not accept a checkpoint without one.
        foreign = None if options.manifest_sha256 else _open_foreign(location, store, options)
        if foreign is None:
            raise
        return foreign, _digest(foreign)


_TRIES = 5
"""The most attempts to find the newest step of a run, if the step is deleted before its manifest is read."""


def step_of(source: Source, hint: str) -> tuple[NativeCheckpoint, Store, int]:
    """A checkpoint that is a step of a run, with the run and the step's number. Raises InputError, with a hint."""
    above = source.store.parent_and_name() if isinstance(source, NativeCheckpoint) else None
    if not isinstance(source, NativeCheckpoint) or above is None or not is_step(above[1]):
        raise InputError(f"{source.url} is not a step in a run's directory: {hint}")
    return source, above[0], int(above[1])


def _open_native(store: Store, options: Options) -> tuple[NativeCheckpoint, str]:
    manifest, content = load_manifest(store, options.manifest_sha256)
    return NativeCheckpoint(store, manifest), hashlib.sha256(content).hexdigest()


def _open_foreign(
    location: str | os.PathLike[str], store: Store, options: Options
) -> NativeCheckpoint | ForeignCheckpoint | None:
    """A checkpoint of another library at a local path, or the step of its run that "run@40" or "run@latest" names."""
    path, names = _local_names(location)
    if names is None and (named := run_and_name(store)) is not None:
        run, name = named
        paths = {step.number: step.path for step in foreign_steps_of(run.url, options)}
        if paths:
            path, names = _local_names(paths[resolve_name(run, name, sorted(paths))])
    form = _recognized_format(path, names)
    return form.open(path) if form is not None and form.open is not None else None


def foreign_steps_of(
    location: str | os.PathLike[str], options: Options, ignored: Collection[str] = ()
) -> Sequence[ForeignStep]:
    """The steps in another library's run at a local path, oldest first; none if it is something else.

    Folders in it whose names are `ignored` do not count. Raises StorageError if the storage hangs.
    """

    def find() -> Sequence[ForeignStep]:
        path, names = _local_names(location)
        if names is None or MANIFEST in names:
            return ()
        names = {*names} - {*ignored}
        form = _recognized_format(path, names)
        return form.steps_in(path, names) if form is not None else ()

    return run_watched(f"listing {os.fspath(location)}", options.timeout_seconds, find)


def _local_names(location: str | os.PathLike[str]) -> tuple[str, Collection[str] | None]:
    """A local path, and the names in its folder; none for a file, and None if it is not local or cannot be listed."""
    path = local_path(location)
    if path is None:
        return "", None
    try:
        return path, os.listdir(path)
    except NotADirectoryError:
        return path, ()
    except OSError:  # missing or unreadable, as for a jaxckpt checkpoint
        return path, None


def _recognized_format(path: str, names: Collection[str] | None) -> ForeignFormat | None:
    return None if names is None else next((form for form in formats if form.recognizes(path, names)), None)


def _digest(source: NativeCheckpoint | ForeignCheckpoint) -> str:
    return hashlib.sha256(msgspec.json.encode(source.manifest)).hexdigest()
