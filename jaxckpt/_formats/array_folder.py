"""Reads folders of arrays that have no other record of a tree than their names.

<folder>/params/w/.zarray           JAX's array_serialization, Levanter, big_vision: an array in each folder
<folder>/manifest.ocdbt             the same in one OCDBT database
<folder>/zarr.json, .zgroup         groups of Zarr 3 and 2, also those that `convert` writes
<folder>/pytreedef.json             JAX's pytree_serialization: numbered arrays in array_store/, and their tree
<run>/step-100/metadata.json        a run of Levanter
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from jaxckpt._formats.export import tree_of_names
from jaxckpt._formats.index_files import convert_checked, from_json, read_json
from jaxckpt._formats.orbax.orbax_records import (
    AGGREGATE_FILE,
    ARRAYS_FOLDER,
    DATABASE_FILE,
    SHARDINGS_FILE,
    STEP_FILE,
    STRINGS_FILE,
    TEMPORARY,
    TREE_FILE,
)
from jaxckpt._formats.pickles import unreadable
from jaxckpt._formats.zarr_arrays import described_array
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.file_names import MANIFEST, is_data_folder
from jaxckpt._model.tree import Tree
from jaxckpt._model.values import decode_value
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import DRAFT_NAME, ForeignStep, Format
from jaxckpt._store.foreign_files import (
    exists,
    is_folder,
    is_link,
    is_visible_file,
    list_names,
    names_in,
    names_or_empty,
    read_small,
)
from jaxckpt._store.tensors import ArrayFolder
from jaxckpt.errors import DataError, InputError, NotACheckpointError

_ARRAY_FILES = {".zarray": "zarr", "zarr.json": "zarr3"}
_MARKS = {".zgroup", *_ARRAY_FILES}
_TREE = "pytreedef.json"
_STORE = "array_store"
_STEP = re.compile(r"step-(\d{1,18})")
_LEVANTER_FILE = "metadata.json"

_OTHERS = {TREE_FILE, STEP_FILE, SHARDINGS_FILE, ARRAYS_FOLDER, STRINGS_FILE, ".metadata"}
"""Names in folders that are Orbax's or PyTorch's, perhaps damaged."""

MAX_FOLDERS = 1 << 20
"""The most folders that are searched for arrays."""

_MAX_LOOKED_AT = 200
"""The most folders that are looked at to recognize a folder of arrays without a mark."""


def recognizes(path: str, names: Collection[str]) -> bool:
    if _is_of_others(path, names):
        return False
    if not _MARKS.isdisjoint(names) or DATABASE_FILE in names or {_TREE, _STORE} <= {*names}:
        return True
    return bool(names) and (bool(steps_in(path, names)) or _holds_arrays(path))


def _is_of_others(path: str, names: Collection[str]) -> bool:
    """Whether a folder is a checkpoint of jaxckpt, Orbax or PyTorch, perhaps a damaged or unfinished one."""
    is_unfinished = any(TEMPORARY in name for name in (os.path.basename(path), *names))
    # Otherwise it is the folder of a container.
    has_aggregate = AGGREGATE_FILE in names and is_visible_file(f"{path}/{AGGREGATE_FILE}")
    is_ours = any(map(is_data_folder, names)) or (
        MANIFEST in names and any(name.startswith("data-") for name in names)  # Levanter has a manifest.json too
    )
    return is_unfinished or has_aggregate or is_ours or not _OTHERS.isdisjoint(names)


def _holds_arrays(path: str) -> bool:
    """Whether one of the folders below a folder holds an array, and none of those before it another checkpoint."""
    for below, names in itertools.islice(_folders(path, names_or_empty), _MAX_LOOKED_AT):
        if _is_of_others(below, names) or (below and MANIFEST in names) or DATABASE_FILE in names:
            return False
        if not _ARRAY_FILES.keys().isdisjoint(names) and not is_link(f"{path}/{below}"):
            return True
    return False


def _folders(path: str, list_folder: Callable[[str], list[str]]) -> Iterator[tuple[str, list[str]]]:
    """The folders below a folder by their names, each with the names in it, without what is inside of an array or of
    an unfinished conversion. Does not follow symbolic links, which may form a loop: of one to a folder, the only name
    is that of the metadata of an array in it."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        names = list_folder(f"{path}/{below}")
        yield below, names
        if ".zarray" in names:
            continue
        for name in sorted(names, reverse=True):
            inner = f"{below}/{name}" if below else name
            if is_link(f"{path}/{inner}"):
                if files := [file for file in _ARRAY_FILES if is_visible_file(f"{path}/{inner}/{file}")]:
                    yield inner, files
                continue
            if DRAFT_NAME.fullmatch(name) or not is_folder(f"{path}/{inner}"):
                continue
            # In Zarr 3, "c" has the chunks of an array, or is an array of this name in a group.
            if name != "c" or "zarr.json" not in names or is_visible_file(f"{path}/{inner}/zarr.json"):
                waiting.append(inner)


def steps_in(path: str, names: Collection[str]) -> list[ForeignStep]:
    """The steps of a run of Levanter, oldest first."""
    numbered = sorted((int(match[1]), name) for name in names if (match := _STEP.fullmatch(name)))
    return [ForeignStep(n, f"{path}/{name}") for n, name in numbered if exists(f"{path}/{name}/{_LEVANTER_FILE}")]


def open_arrays(path: str) -> ForeignCheckpoint:
    """The arrays in the tree of their names; of a run, those of its newest step. Raises DataError, StorageError."""
    names, metadata = names_in(path), dict[str, Any]()
    if steps := steps_in(path, names):
        path, metadata = steps[-1].path, {"step": steps[-1].number}
        names = names_in(path)
    elif _STEP.fullmatch(os.path.basename(path)) and _LEVANTER_FILE not in names:
        raise NotACheckpointError(f"{path} was never committed: it has no {_LEVANTER_FILE}, which Levanter writes last")
    if {_TREE, _STORE} <= {*names}:
        return compose(path, _read_pytree(path), "jax")
    arrays, values, recorded = _read(path)
    if not arrays and not values and _MARKS.isdisjoint(names):
        raise NotACheckpointError(f"{path} has no arrays")
    return compose(path, tree_of_names(arrays | values, recorded), "zarr", metadata=metadata or None)


def _read(path: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The arrays of a folder by their names, and the Python values and the paths that `convert` stored. Raises
    DataError."""
    folder = ArrayFolder.at(path, ocdbt=exists(f"{path}/{DATABASE_FILE}"))
    if folder.ocdbt:
        keys = [key for key in folder.list_keys() if key.rpartition("/")[2] in _ARRAY_FILES]
        texts = zip(keys, folder.read_all(keys), strict=True)
    else:
        keys = _array_files(path)
        if keys != _array_files(path):  # otherwise, arrays that have just been deleted would be left out
            raise DataError(f"{path} changed while it was being opened")
        texts = ((key, read_small(f"{path}/{key}", 1 << 24)) for key in keys)
    arrays: dict[str, Any] = {}
    values: dict[str, Any] = {}
    recorded: dict[str, str] = {}
    for key, text in texts:
        name, _, file = key.rpartition("/")
        what = f"{path}: {key}"
        metadata = from_json(what, text or b"", dict[str, Any])
        if metadata.get("node_type") == "group":
            if not name:
                values, recorded = _values_and_paths(what, metadata)
            continue
        arrays[name] = _array(folder, name, what, metadata, _ARRAY_FILES[file])
    return arrays, values, recorded


def _array_files(path: str) -> list[str]:
    """The keys of the metadata of arrays and groups in a folder. Raises DataError, StorageError."""
    keys: list[str] = []
    for number, (below, names) in enumerate(_folders(path, list_names)):
        if number == MAX_FOLDERS:
            raise DataError(f"{path} has more than {MAX_FOLDERS} folders")
        keys += [f"{below}/{file}" if below else file for file in _ARRAY_FILES if file in names]
    return keys


def _array(folder: ArrayFolder, name: str, what: str, metadata: dict[str, Any], driver: Any) -> ForeignArray:
    """An array; a leaf that cannot be read if its dtype or its codecs are not supported, or if it is elsewhere."""
    if is_link(f"{folder.path}/{name}"):
        return unreadable("is a link to another place, which is not followed")
    attributes: Any = metadata.get("attributes") if driver == "zarr3" else None
    ours: Any = attributes.get("jaxckpt") if isinstance(attributes, dict) else None
    array = described_array(folder, name, what, metadata, driver, strict=isinstance(ours, dict))
    # jaxckpt stores dtypes that Zarr lacks as integers of their width.
    dtype = cast("dict[str, Any]", ours).get("dtype") if isinstance(ours, dict) else None
    if isinstance(dtype, str) and dtype in DTYPES and DTYPES[dtype].itemsize == DTYPES[array.dtype].itemsize:
        return replace(array, dtype=dtype)
    return array


def _values_and_paths(what: str, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The Python values and the paths of the tree that `convert` stored in the group's attributes. Raises DataError."""
    try:
        ours = metadata.get("attributes", {}).get("jaxckpt", {})
        values = {name: decode_value(value["kind"], value["value"]) for name, value in ours.get("values", {}).items()}
        return values, convert_checked(what, ours.get("paths", {}), dict[str, str])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{what}: its attributes are damaged: {error}") from error


def _read_pytree(path: str) -> Tree:
    """The tree that JAX's pytree_serialization saved. Raises DataError."""
    try:
        import jax
        from jax.experimental.array_serialization import pytree_serialization
    except ImportError as error:
        raise InputError(
            f"{path}: JAX needs the package flatbuffers to read {_TREE}: pip install flatbuffers"
        ) from error
    read_json(f"{path}/{_TREE}", dict[str, Any])  # checks its size and syntax
    try:
        described = pytree_serialization.load_pytreedef(path)
    except Exception as error:  # of the decoder of flatbuffers
        raise DataError(
            f"{path}/{_TREE} is damaged, or has nodes of classes that are not registered in this program with"
            f" jax.export.register_pytree_node_serialization: {str(error)[:200]}"
        ) from error
    leaves, structure = jax.tree.flatten(described, is_leaf=lambda leaf: leaf is None)
    arrays, *_ = _read(f"{path}/{_STORE}")
    if lost := [number for number, leaf in enumerate(leaves) if leaf is not None and str(number) not in arrays]:
        raise DataError(f"{path}/{_STORE} lacks the array {lost[0]}")
    return jax.tree.unflatten(structure, [None if leaf is None else arrays[str(n)] for n, leaf in enumerate(leaves)])


# The last: other formats store their arrays in such folders.
FORMAT = Format("arrays", recognizes, open_arrays, steps_in=steps_in, order=2)
