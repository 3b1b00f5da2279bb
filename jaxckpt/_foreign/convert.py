"""From one format to another, and from one layout to another, in bounded memory.

source ─▶ its manifest, narrowed to what is wanted ─▶ ours: a Draft whose values are read when an object is written
                                                    ─▶ others: leaf by leaf, slab by slab
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from jaxckpt._foreign import export
from jaxckpt._foreign.mindspore import mindspore_ranks
from jaxckpt._foreign.orbax_out import write_orbax
from jaxckpt._foreign.registry import strangers
from jaxckpt._format.grid import Layout, mesh_layout
from jaxckpt._format.layouts import Specs, by_axis_name, fit_spec, mesh_axes, require_common_axis, resolve_specs
from jaxckpt._format.records import LayoutRecord, LeafRecord, Manifest, MeshRecord
from jaxckpt._format.tree import DTYPES, Select, show
from jaxckpt._restore.reading import Stored
from jaxckpt._restore.source import Foreign, Location, Source, source_at
from jaxckpt._restore.target import Renaming, narrowed, renamed_source, split_rename
from jaxckpt._runtime.errors import CheckpointExistsError, InputError, JaxckptError, SpecError, StorageError, listing
from jaxckpt._runtime.options import Options, flag, given
from jaxckpt._runtime.processes import Call, Group
from jaxckpt._runtime.progress import Report, reporting
from jaxckpt._save.describe import Draft
from jaxckpt._save.plan import ArrayLeaf
from jaxckpt._save.prepare import SaveRequest
from jaxckpt._save.save import start
from jaxckpt._storage.place import local_path
from jaxckpt._storage.store import storage_errors


def convert(
    source: Location,
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Renaming | None = None,
    chunk_bytes: int | None = None,
    overwrite: bool = False,
    options: Options | None = None,
) -> None:
    """Write a checkpoint anew: in another format, for another mesh, in other chunks, or only some of its leaves.

    Any host can do it: no devices are used, and at most about `options.host_bytes` of memory beside Python and JAX. In
    a job of several processes all of them call it, and process 0 writes.

    Args:
        source: A checkpoint of any format that `restore` takes, or what `rank_files` and its kind have made.
        destination: Where the new one goes: as for `save`, or a local path in other formats.
        format: "jaxckpt"; "safetensors" (a file where `destination` ends in ".safetensors", else a folder of shards
            with their index); "npz"; "zarr" (a group with one array a leaf); "orbax". By default it follows from the
            destination's suffix: .safetensors, .npz, .zarr, else "jaxckpt". A suffix of a file format that cannot be
            written, such as .pt or .h5, is an error unless `format` is given.
        mesh_shape: For "jaxckpt", the mesh that leaves are laid out for: axis sizes such as {"data": 4, "model": 2}. It
            decides how they are cut into objects and what spec they are restored with. By default as they were.
        specs: With `mesh_shape`, the PartitionSpec of each array: one for all, a pytree prefix, or a function of (path,
            leaf). Without it each keeps its own, by axis name; a mesh that has none of these axes is a SpecError.
        select: Only these leaves, by their old paths, as for `restore`.
        rename: Old path → new path: a mapping of leaf or container paths, or a function; or `Rules`, as for
            `restore`. The tree becomes nested dicts.
        chunk_bytes: As `Options.chunk_bytes`.
        overwrite: Replace what is at `destination`: a checkpoint of any format, a file, or an empty folder. A folder
            that holds other files as well is not deleted, nor is one of several steps, or one that the source lies in.
        options: See `Options`.

    Raises:
        NotACheckpointError, CorruptError: As `restore`.
        StorageError: As `restore`; or `destination` cannot be written.
        SpecError: A spec does not fit its leaf or the mesh.
        TreeError: Leaves that the format cannot hold; one error lists them.
        CheckpointExistsError: Something is at `destination`.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/convert", {"w": np.arange(3.0)}, overwrite=True)
        >>> jaxckpt.convert("/tmp/jaxckpt-doc/convert", "/tmp/jaxckpt-doc/convert.safetensors", overwrite=True)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/convert.safetensors")
        {'w': array([0., 1., 2.])}
    """
    options = given(options)
    overwrite = flag(overwrite, "overwrite")
    if chunk_bytes is not None:
        options = replace(options, chunk_bytes=chunk_bytes)
    if specs is not None and mesh_shape is None:
        raise InputError("convert(specs=…) needs mesh_shape=: the axis sizes of the mesh that the specs are of")
    target = local_path(destination, "destination")
    name = _format_of(os.fspath(destination).rstrip("/") if target is None else target, format)
    if name != "jaxckpt" and target is None:
        raise InputError(
            f"{name!r} is written to a local path, and {os.fspath(destination)!r} looks like a URL: copy it there"
            " afterwards"
        )
    rename, rules = split_rename(rename)
    found = renamed_source(source_at(source, options)[0], rules)
    found = replace(found, manifest=narrowed(found.manifest, select, rename))
    if isinstance(found, Foreign):
        _check(found)
    if name == "jaxckpt":
        draft = _drafted(found, mesh_shape, specs, options)
        metadata = found.manifest.metadata
        with Group.current(options, Call.of("convert", destination)) as group:
            step = found.manifest.step
            request = SaveRequest(destination, metadata=metadata, overwrite=overwrite, draft=draft, step=step)
            start(request, replace(options, manifest_sha256=None), group, background=False).wait()
        return
    if mesh_shape is not None:
        raise InputError(f"mesh_shape= is for format 'jaxckpt'; {name!r} has no layout on a mesh")
    assert target is not None
    if os.path.lexists(target):
        _require_replaceable(target, source, overwrite)
    n_bytes = sum(map(found.manifest.leaf_bytes, found.manifest.leaves))
    with _published(target) as path, reporting("convert", n_bytes, options.progress) as report:
        _WRITERS[name](found, path, options, report)


def integrate(
    old: str, new: str | os.PathLike[str], strategy: str | os.PathLike[str], n: int, *, overwrite: bool = False
) -> None:
    """What MindSpore's tutorial of that name does with the same arguments: `./node0/OLD` and so on, the files of `n`
    ranks, become the one checkpoint `new`, which is ours."""
    ranks = {rank: os.path.join(f"node{rank}", old) for rank in range(n)}
    convert(mindspore_ranks(ranks, strategy=strategy), new, format="jaxckpt", overwrite=overwrite)


def _check(source: Foreign) -> None:
    """Compare all that will be read with the checksums that its format has: what is written gets new ones."""
    for leaf in source.manifest.leaves:
        if leaf.stack is not None:
            stack, row = source.manifest.place(leaf)
            with storage_errors(f"cannot convert leaf {show(leaf.path)}", reading=True):
                source.blocks[stack][row].check()


def _format_of(destination: str, format: str | None) -> str:
    """The format to write: the one that is asked for, else the one that the destination's suffix means."""
    written = ["jaxckpt", *_WRITERS]
    if format is not None:
        if format not in written:
            raise InputError(f"format={format!r}; expected one of {', '.join(written)}")
        return format
    suffix = os.path.splitext(destination)[1]
    if suffix not in _BY_SUFFIX and suffix.lower() in (*_BY_SUFFIX, *_FILE_SUFFIXES):
        raise InputError(
            f"destination {destination!r} ends in {suffix}: jaxckpt does not write that format. The suffixes that it"
            f" knows are {', '.join(_BY_SUFFIX)}; with any other, pass format= with one of {', '.join(written)}"
        )
    return _BY_SUFFIX.get(suffix, "jaxckpt")


_BY_SUFFIX = {".safetensors": "safetensors", ".npz": "npz", ".zarr": "zarr"}

_FILE_SUFFIXES = frozenset(
    ".bin .ckpt .distcp .ggml .gguf .gz .h5 .hdf5 .joblib .json .keras .mat .msgpack .npy .onnx .params .pb"
    " .pdparams .pickle .pkl .pt .pth .tar .tflite .tgz .zip".split()
)
"""Of files that programs take for a model's weights: a folder of that name would be none of them."""

_WRITERS: dict[str, Callable[[Source, str, Options, Report], None]] = {
    "safetensors": export.write_safetensors,
    "npz": export.write_npz,
    "zarr": export.write_zarr,
    "orbax": write_orbax,
}


def _require_replaceable(path: str, source: Location, overwrite: bool) -> None:
    """Raise CheckpointExistsError where what is at `path` is to be kept."""
    if not overwrite:
        raise CheckpointExistsError(f"{path} is there already; pass overwrite=True to replace it")
    if os.path.islink(path):
        return
    origins = [source] if isinstance(source, str | os.PathLike) else source.files or [source.url]
    for origin in filter(None, map(local_path, origins)):
        place, there = os.path.realpath(path), os.path.realpath(origin)
        if there.startswith(os.path.join(place, "")) or (isinstance(source, Foreign) and there == place):
            raise CheckpointExistsError(f"the source {origin} lies in {path}, which would be deleted")
    if not os.path.isdir(path):
        return
    try:
        names = os.listdir(path)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, f"cannot list {path}: {error.strerror}") from error
    # A mistyped path must not cost somebody their home folder.
    if odd := strangers(path, names):
        raise CheckpointExistsError(
            f"{path} holds other files than one checkpoint ({', '.join(odd[:3])}{', …' if len(odd) > 3 else ''}):"
            " overwrite=True does not delete them; give another path"
        )


@contextlib.contextmanager
def _published(path: str) -> Generator[str]:
    """A path to write to, that takes the place of `path` once all is written and on disk, and vanishes otherwise."""
    parent, name = os.path.split(path)
    folder, lock = "", -1
    try:
        os.makedirs(parent, exist_ok=True)
        _clear(path)
        folder, lock = _drafts_folder(path)
        draft = os.path.join(folder, f"new{os.path.splitext(name)[1][:20]}")  # writers look at the suffix
        yield draft
        export.sync(draft)
        _put_in_place(draft, path)
        export.sync(parent, deep=False)
    except OSError as error:
        if isinstance(error, JaxckptError):
            raise
        raise StorageError(error.errno or errno.EIO, f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if folder:
            # What could not be put back waits for the next conversion.
            if os.path.lexists(path) or not os.path.lexists(os.path.join(folder, _OLD)):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _drafts_folder(path: str) -> tuple[str, int]:
    """A hidden folder beside `path` for what is not whole yet, and a lock that is held while this process lives."""
    while True:
        folder = f"{_drafts(path)}{uuid.uuid4().hex}"
        os.mkdir(folder)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.isdir(folder)
        except BlockingIOError:
            ours = False
        except OSError:  # a file system without locks, where nobody clears up either
            ours = True
        if ours:
            return folder, lock
        os.close(lock)  # somebody took it for left behind, before it was locked


def _drafts(path: str) -> str:
    parent, name = os.path.split(path)
    # Names of one length may all be as long as the file system allows.
    return os.path.join(parent, f".{hashlib.sha256(name.encode()).hexdigest()[:16]}-convert-")


def _clear(path: str) -> None:
    """Delete what conversions to `path` left that were killed; what one of them had just moved away is put back."""
    parent, start = os.path.split(_drafts(path))
    for name in os.listdir(parent):
        if not name.startswith(start):
            continue
        folder = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                old = os.path.join(folder, _OLD)
                if os.path.lexists(old) and not os.path.lexists(path):
                    os.rename(old, path)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _put_in_place(draft: str, path: str) -> None:
    """Rename `draft` to `path`, and move away what was there. A symbolic link is replaced, not what it leads to."""
    if not os.path.lexists(path) or not (os.path.isdir(draft) or (os.path.isdir(path) and not os.path.islink(path))):
        os.replace(draft, path)
        return
    old = os.path.join(os.path.dirname(draft), _OLD)
    os.rename(path, old)  # no folder can be renamed over something, nor a file over a folder
    try:
        os.rename(draft, path)
    except BaseException:
        os.rename(old, path)
        raise


_OLD = ".old"
"""In the folder of a draft, what was at the destination."""


# To our own format ----------------------------------------------------------------------------------------


def _drafted(source: Source, mesh_shape: Mapping[str, int] | None, specs: Specs, options: Options) -> Draft:
    """The checkpoint as a tree to be saved, cut for the mesh that is asked for, or for the one that it has."""
    manifest = source.manifest
    draft = Draft(manifest.tree)
    draft.table.meshes, draft.table.layouts = list(manifest.meshes), list(manifest.layouts)
    chosen = _Layouts(manifest, mesh_shape, specs, options)
    for number, leaf in enumerate(manifest.leaves):
        layout = leaf.layout
        if leaf.stack is not None:
            shape, stack = manifest.leaf_shape(leaf), manifest.stacks[leaf.stack]
            cells = Layout((1,) * len(shape), ((0,),))
            if leaf.kind in ("jax", "key"):
                layout, cells = chosen.of(leaf, shape)
            draft.arrays.append(ArrayLeaf(number, stack.dtype, shape, cells))
            draft.values[number] = Stored(source, number, options)
        draft.records.append(msgspec.structs.replace(leaf, stack=None, row=None, layout=layout))
    chosen.raise_problems()
    draft.table.meshes, draft.table.layouts = chosen.meshes, chosen.layouts
    return draft


class _Layouts:
    """The layouts of leaves in the new checkpoint. Process 0 holds all."""

    def __init__(
        self, manifest: Manifest, mesh_shape: Mapping[str, int] | None, specs: Specs, options: Options
    ) -> None:
        self._manifest = manifest
        self._options = options
        self._axes = None if mesh_shape is None else mesh_axes(mesh_shape)
        self._specs: dict[str, Any] = {}
        if specs is not None:
            arrays = [(leaf.path, self._as_leaf(leaf)) for leaf in manifest.leaves if leaf.kind in ("jax", "key")]
            self._specs = resolve_specs(specs, arrays)
        elif self._axes is not None:
            require_common_axis(self._axes, {leaf.path: manifest.leaf_layout(leaf)[1] for leaf in manifest.leaves})
        self._problems: list[str] = []
        self.meshes = list(manifest.meshes)
        self.layouts = list(manifest.layouts)
        if self._axes is not None:
            n_devices = int(np.prod(list(self._axes.values())))
            self.meshes = [MeshRecord(self._axes, list(range(n_devices)), ["Auto"] * len(self._axes))]
            self.layouts = []

    def _as_leaf(self, leaf: LeafRecord) -> Any:
        # What a `specs` function may look at.
        shape, stack = self._manifest.leaf_shape(leaf), self._manifest.place(leaf)[0]
        return np.broadcast_to(np.empty((), DTYPES[self._manifest.stacks[stack].dtype]), shape)

    def of(self, leaf: LeafRecord, shape: tuple[int, ...]) -> tuple[int, Layout]:
        """(number of the layout record, cells) of a leaf."""
        mesh, spec, record = self._manifest.leaf_layout(leaf)
        axes = self._axes
        if axes is not None:
            wanted = self._specs.get(leaf.path)
            user_shape = shape[:-1] if leaf.kind == "key" else shape
            spec, problem = fit_spec(
                axes, by_axis_name(spec, axes) if wanted is None else wanted, user_shape, self._options
            )
            if problem:
                self._problems.append(f"{show(leaf.path)}: {problem}")
                spec = ()
            record = LayoutRecord(0, [list(entry) for entry in spec])
        elif mesh is not None:
            axes = mesh.axes
        if record not in self.layouts:
            self.layouts.append(record)
        if axes is None or 0 in shape:
            cells = Layout((1,) * len(shape), ((0,),))
        else:
            places = np.zeros(tuple(axes.values()), np.int64)
            cells = mesh_layout(places, list(axes), spec, len(shape))
        return self.layouts.index(record), cells

    def raise_problems(self) -> None:
        if self._problems:
            raise SpecError(f"{len(self._problems)} leaves do not fit their specs:\n{listing(self._problems)}")
