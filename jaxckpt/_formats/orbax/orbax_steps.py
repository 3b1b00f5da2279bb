"""Folders of Orbax: the steps of a CheckpointManager, the items of a step, their completeness, and their trees.

It is long because versions of Orbax mark steps, items and completeness in different ways.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from string import digits
from typing import Any, Literal, cast

import msgspec

from jaxckpt._arguments.pytree import flatten
from jaxckpt._formats.orbax.orbax_records import (
    AGGREGATE_FILE,
    COMMITTED_MARK,
    METRICS,
    RUN_METADATA,
    SAVE_FILES,
    STEP_FILE,
    TEMPORARY,
    TREE_DATA_FILES,
    TREE_FILE,
    V1_MARK,
    StepMetadata,
    TreeRecord,
    read_optional,
)
from jaxckpt._formats.orbax.orbax_tree import is_aggregated, owned_by_aggregate, read_aggregate, read_tree
from jaxckpt._model.file_names import MANIFEST, is_data_folder
from jaxckpt._model.tree import Tree, unflatten
from jaxckpt._options import Options
from jaxckpt._rules.apply_rule import SourceLeaves
from jaxckpt._sources.compose import INFINITIES, compose, step_record
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import ForeignStep
from jaxckpt._sources.source import NativeCheckpoint
from jaxckpt._store.foreign_files import exists, is_file, is_folder, is_visible_file, names_in, names_or_empty, store_of
from jaxckpt._store.store_path import store_at
from jaxckpt.errors import DataError, NotACheckpointError, show_count, show_lines

_STEP_MARKS = {STEP_FILE, V1_MARK}
_STEP_NAME = re.compile(r"(?:.+_)?(\d{1,18})")

_MAX_CHECKED_FOLDERS = 1000
"""The most subfolders that are checked to recognize a folder without a mark."""


def recognizes(path: str, names: Collection[str]) -> bool:
    return _kind(path, names) is not None


def owned_names(path: str, names: Collection[str]) -> set[str]:
    """The names in the folder `path` that belong to this format.

    There are none in the folder of a CheckpointManager, or of several checkpoints, so that it is not deleted.
    """
    kind = _kind(path, names)
    if kind == "item":
        return _owned_by_item(path, names)
    if kind == "manager" or has_separate_items(path, names):
        return set()
    items = {name: {*names_or_empty(f"{path}/{name}")} for name in names if is_folder(f"{path}/{name}")}
    whole = {name for name, inner in items.items() if inner and inner <= _owned_by_item(f"{path}/{name}", inner)}
    if items.get(METRICS) == {METRICS}:
        whole.add(METRICS)
    return whole | {STEP_FILE, V1_MARK, "_CHECKPOINT_DELETION", COMMITTED_MARK}


def _owned_by_item(path: str, names: Collection[str]) -> set[str]:
    record = read_optional(f"{path}/{TREE_FILE}", TreeRecord)
    if record is None and is_aggregated(path):
        return {*SAVE_FILES, *owned_by_aggregate(path)}
    if record is None:
        return {*SAVE_FILES, MANIFEST, "metadata", *filter(is_data_folder, names)}
    arrays = {".".join(key.key for key in entry.key_metadata).split("/")[0] for entry in record.tree_metadata.values()}
    databases = filter(re.compile(r"d|ocdbt\.process_\w+|ocdbt_data|ocdbt_meta").fullmatch, names)
    zarr = {".zarray", "zarr.json", "c", "0"} if "" in arrays else set[str]()  # for a tree that is a single leaf
    return {TREE_FILE, AGGREGATE_FILE, *SAVE_FILES, *TREE_DATA_FILES, *databases, *arrays, *zarr}


def has_step_mark(names: Collection[str]) -> bool:
    """Whether the names in a folder show that it is a step."""
    return not _STEP_MARKS.isdisjoint(names)


def has_separate_items(path: str, names: Collection[str]) -> bool:
    """Whether a folder that opens as a step may be a folder of separate checkpoints: it has several, and no mark."""
    return not has_step_mark(names) and sum(is_visible_file(f"{path}/{name}/{TREE_FILE}") for name in names) > 1


def steps_in(path: str, names: Collection[str]) -> list[ForeignStep]:
    """The complete steps in a CheckpointManager's folder, oldest first; none if it is another folder. Raises
    NotACheckpointError if they are of several runs."""
    if _kind(path, names) != "manager":
        return []
    return [ForeignStep(number, step) for step, number in _newest_first(path, names)][::-1]


def open_orbax(path: str) -> NativeCheckpoint | ForeignCheckpoint:
    """The newest complete step of a CheckpointManager's folder, a step, or one item of it.

    An item that represents the whole step ("default", or "state" of Orbax v1) is the tree itself. Other items are below
    their names. "step", "metrics" and "custom_metadata" are in the checkpoint's metadata, if they exist.

    Raises NotACheckpointError if no step is complete, DataError, StorageError.
    """
    kind = _kind(path, names_in(path))
    metadata: dict[str, Any] = {}
    if kind == "manager":
        path, metadata["step"] = _newest_step(path)
        kind = _kind(path, names_in(path))
    elif problem := _unfinished_reason(path):
        raise NotACheckpointError(f"{path} {problem}")
    if kind == "step" and _items(path) == ["default"] and _is_jaxckpt_item(f"{path}/default"):
        ours = _native(f"{path}/default")
        record = read_optional(f"{path}/{STEP_FILE}", StepMetadata) or StepMetadata()
        custom = _as_json(record.custom_metadata) or ours.manifest.metadata
        metadata |= {} if custom is None else {"custom_metadata": custom}
        manifest = msgspec.structs.replace(ours.manifest, metadata=metadata or None, step=step_record(metadata))
        return replace(ours, manifest=manifest)
    tree, of_tree = _required_item(path, "an item") if kind == "item" else _open_step(path)
    return compose(path, tree, "orbax", metadata=_as_json(metadata | of_tree) or None)


def run_metadata(path: str) -> dict[str, Any]:
    """The custom metadata of a CheckpointManager's folder. Raises DataError, StorageError."""
    for name in RUN_METADATA:
        if (record := read_optional(f"{path}/{name}", dict[str, Any])) is not None:
            custom = record.get("custom_metadata")
            # Older versions of Orbax wrote the user's metadata alone.
            return _as_json(custom if isinstance(custom, dict) else record)
    return {}


def _as_json(value: Any) -> Any:
    """Metadata with None in place of NaN, and a text in place of infinity: Orbax writes both, but JSON lacks them."""
    if isinstance(value, dict):
        return {key: _as_json(child) for key, child in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_as_json(child) for child in cast("list[Any]", value)]
    if isinstance(value, float) and math.isinf(value):
        return INFINITIES[value < 0]
    return None if isinstance(value, float) and math.isnan(value) else value


# Folders --------------------------------------------------------------------------------------------------


def _kind(path: str, names: Collection[str]) -> Literal["manager", "step", "item"] | None:
    """What a folder of Orbax holds, from the names in it; None if it is not Orbax's."""
    if TREE_FILE in names or _has_lost_manifest(path, names) or _is_aggregate_alone(path, names):
        return "item"
    if has_step_mark(names):
        return "step"
    if any(
        _is_step(f"{path}/{name}", names_or_empty(f"{path}/{name}"))
        for name in itertools.islice(filter(_STEP_NAME.fullmatch, names), _MAX_CHECKED_FOLDERS)
    ):
        return "manager"
    # A folder with a model in safetensors may also have a subfolder with a checkpoint of Orbax.
    if any(name.endswith(".safetensors") for name in names):
        return None
    return "step" if _has_trees(path, names) else None  # older versions of Orbax write no other mark


def _is_aggregate_alone(path: str, names: Collection[str]) -> bool:
    """Whether a folder has only the aggregate file as the record of its tree: later versions write a second one."""
    return AGGREGATE_FILE in names and TREE_DATA_FILES.isdisjoint(names) and is_aggregated(path)


def _is_step(path: str, names: Collection[str], *, strict: bool = False) -> bool:
    if TREE_FILE in names or has_step_mark(names) or _has_trees(path, names, strict=strict):
        return True
    if _is_aggregate_alone(path, names):
        return True
    # A jaxckpt run also has folders with a manifest, but they are named like steps. A save that was killed while it
    # published may have left its manifest in its data folder.
    items = (name for name in names if not (_STEP_NAME.fullmatch(name) or is_data_folder(name)))
    return _has_items(path, items, MANIFEST, strict=strict)


def _has_items(path: str, names: Iterable[str], file: str, *, strict: bool = False) -> bool:
    """Whether one of the subfolders holds this file. Unless `strict`, what cannot be looked at does not count: any
    folder may be next to a checkpoint."""
    paths = (f"{path}/{name}/{file}" for name in itertools.islice(names, _MAX_CHECKED_FOLDERS))
    return any(map(is_file if strict else is_visible_file, paths))


def _has_trees(path: str, names: Collection[str], *, strict: bool = False) -> bool:
    """Whether one of the subfolders is an item with a tree."""
    below = (f"{path}/{name}" for name in itertools.islice(names, _MAX_CHECKED_FOLDERS))
    return _has_items(path, names, TREE_FILE, strict=strict) or any(map(is_aggregated, below))


def _newest_step(path: str) -> tuple[str, int]:
    names = names_in(path)
    if newest := next(_newest_first(path, names), None):
        return newest
    count = sum(_STEP_NAME.fullmatch(name) is not None for name in names)
    raise NotACheckpointError(f"{path} has no complete step, only {show_count(count, 'folder')} named like one")


def _newest_first(path: str, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Path and number of each complete step. Raises NotACheckpointError if their names differ in more than numbers, as
    those of several runs do; StorageError if one of them cannot be listed."""
    newest = None
    steps = [(int(match[1]), name) for name in names if (match := _STEP_NAME.fullmatch(name))]
    for number, name in sorted(steps, reverse=True):
        step = f"{path}/{name}"
        if _is_step(step, names_in(step), strict=True) and not _unfinished_reason(step):
            prefix = name.rstrip(digits)
            others = [other for _, other in steps if newest is None and other.rstrip(digits) != prefix]
            newest, others = newest or name, filter(lambda other: names_or_empty(f"{path}/{other}"), others)
            for other, _ in _newest_first(path, others):
                two = f"{newest} and {os.path.basename(other)}"
                raise NotACheckpointError(f"{path} holds several runs or checkpoints, such as {two}: open one of them")
            yield step, number


def _unfinished_reason(path: str) -> str | None:
    """The reason why a step is incomplete: Orbax renames its folder at the end, or marks it on object stores."""
    if TEMPORARY in os.path.basename(path):
        return "is the folder of a save that is in progress or was interrupted"
    record = read_optional(f"{path}/{STEP_FILE}", StepMetadata) or StepMetadata()
    if record.commit_timestamp_nsecs is not None or exists(f"{path}/{COMMITTED_MARK}"):
        return None
    if _has_items(path, names_in(path), STEP_FILE):  # items that were saved separately, each with its own record
        return None
    # Older versions of Orbax write no mark. A checkpoint outside of a run was complete when it got its name.
    if not _STEP_NAME.fullmatch(os.path.basename(path)):
        return None
    if record.init_timestamp_nsecs is not None:
        return "was never committed: its save is in progress or was interrupted"
    run = os.path.dirname(path)
    if any(exists(f"{run}/{name}/{COMMITTED_MARK}") for name in names_or_empty(run) if _STEP_NAME.fullmatch(name)):
        return f"was never committed: it has no {COMMITTED_MARK}, although other steps of its run have one"
    return None


# Steps ----------------------------------------------------------------------------------------------------


def _open_step(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of a step, and its metadata."""
    record = read_optional(f"{path}/{STEP_FILE}", StepMetadata) or StepMetadata()
    if isinstance(record.item_handlers, str):  # the folder is the only item
        return _required_item(path, record.item_handlers)
    # Orbax v1 records in this file which item is being deleted.
    deleted = (read_optional(f"{path}/_CHECKPOINT_DELETION", dict[str, Any]) or {}).get("checkpointable_name")
    names = [name for name in _items(path) if name != deleted]
    # Orbax reads steps without the descriptor of Orbax v1, which holds no leaves.
    if missing := (record.item_handlers or {}).keys() - {*names, deleted, "descriptor"}:
        raise DataError(f"{path} lacks {', '.join(map(repr, sorted(missing)))}, which {STEP_FILE} names as its items")
    if record.item_handlers is None and _has_lost_step_file(path, names):
        raise DataError(
            f"{path}/{STEP_FILE} is missing: it names the items of the step, so it is not known whether all of them"
            " are still in the folder; each can be opened by its own path"
        )
    metadata: dict[str, Any] = {}
    items: dict[str, Tree] = {}
    left_out: list[str] = []
    for name in names:
        folder = f"{path}/{name}"
        try:
            items[name], of_item = _required_item(folder, name) if record.is_known(name) else _read_item(folder)
        except _UnknownItemError as error:
            left_out.append(f"{folder} is left out: {error}")
            continue
        if record.handler(name) == "ArrayCheckpointHandler" and isinstance(items[name], dict):
            items[name] = items[name].get("checkpoint", items[name])
        if of_item:
            metadata.setdefault("custom_metadata", {})[name] = of_item["custom_metadata"]
    if METRICS in items and not _has_arrays(items[METRICS]):
        metadata["metrics"] = items.pop(METRICS)
    if record.custom_metadata:
        metadata["custom_metadata"] = record.custom_metadata
    if not items:
        raise DataError(f"{path} has no item that can be read\n{show_lines(left_out)}".rstrip())
    for message in left_out:
        warnings.warn(message, stacklevel=2)
    whole = {"state"} if record.handler("state") in ("PyTreeHandler", "V1Handler") else {"default"}
    if set(items) != whole:
        return items, metadata
    (name,) = whole
    if not record.custom_metadata and name in metadata.get("custom_metadata", {}):
        metadata["custom_metadata"] = metadata["custom_metadata"][name]
    return items[name], metadata


def _has_arrays(tree: Tree) -> bool:
    return any(isinstance(leaf.value, ForeignArray) for leaf in flatten(tree)[0])


def _has_lost_step_file(path: str, items: Iterable[str]) -> bool:
    """Whether a step has no STEP_FILE although its version of Orbax writes one.

    Orbax writes one into each saved folder: the step or, if items were saved separately, each item.
    """
    if exists(f"{path}/{STEP_FILE}"):
        return False
    if exists(f"{path}/{V1_MARK}"):
        return True
    alone = [f"{path}/{item}" for item in items if not exists(f"{path}/{item}/{STEP_FILE}")]
    if any(map(_is_jaxckpt_item, alone)):
        return True
    trees = (read_optional(f"{item}/{TREE_FILE}", TreeRecord) for item in alone)
    return any(tree is not None and tree.custom_metadata is not msgspec.UNSET for tree in trees)


def _items(path: str) -> list[str]:
    """Names of a step's items."""
    return sorted(name for name in names_in(path) if TEMPORARY not in name and is_folder(f"{path}/{name}"))


class _UnknownItemError(Exception):
    """An item of an unknown kind."""


def _read_item(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item, and its metadata. Raises _UnknownItemError."""
    names = [name for name in names_in(path) if name not in SAVE_FILES and TEMPORARY not in name]
    if _is_jaxckpt_item(path):
        return _open_jaxckpt_item(path)
    if TREE_FILE in names:
        return read_tree(path)
    if _is_aggregate_alone(path, names):
        return read_aggregate(path), {}
    if not TREE_DATA_FILES.isdisjoint(names):
        raise DataError(f"{path}/{TREE_FILE} is missing: it records the tree of the arrays in this folder")
    if any(map(is_data_folder, names)):
        raise DataError(f"{path}/{MANIFEST} is missing: it describes the arrays in this folder")
    if len(names) == 1 and is_file(f"{path}/{names[0]}"):
        try:
            return read_optional(f"{path}/{names[0]}", cast("type[Any]", Any)), {}
        except DataError:
            raise _UnknownItemError(f"its only file, {names[0]}, is not JSON") from None
    if set(names) in ({"jax_random_key", "jax_random_key_metadata"}, {"np_random_key", "np_random_key_metadata"}):
        return _random_key(path), {}
    raise _UnknownItemError("it is neither a tree nor JSON")


def _required_item(path: str, name: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item that Orbax's own handler wrote, and its metadata."""
    try:
        return _read_item(path)
    except _UnknownItemError as error:
        raise DataError(f"{path}, {name}, is damaged or has lost files: {error}") from None


def _random_key(path: str) -> Tree:
    """An item that Orbax's handlers of random keys wrote."""
    (kind,) = (name for name in names_in(path) if name in ("jax_random_key", "np_random_key"))
    tree, _ = read_tree(f"{path}/{kind}")
    match tree, read_optional(f"{path}/{kind}_metadata/metadata", dict[str, bool]) or {}:
        case {"checkpoint": ForeignArray() as raw}, {"typed": typed}:
            # Their implementation is not recorded. Orbax uses JAX's default, which the width of a key determines.
            impl = "rbg" if raw.shape[-1:] == (4,) else "threefry2x32"
            return replace(raw, kind="key", impl=impl) if typed else raw
        case list() as state, {"legacy": True}:
            return tuple(state)
        case dict() as state, {"legacy": False}:
            return state
        case _:
            raise DataError(f"{path} is not a random key")


# Items that jaxckpt wrote ---------------------------------------------------------------------------------


def _is_jaxckpt_item(path: str) -> bool:
    return is_file(f"{path}/{MANIFEST}")


def _has_lost_manifest(path: str, names: Collection[str]) -> bool:
    """Whether this is an item of jaxckpt without its manifest, in a step that Orbax has committed."""
    if MANIFEST in names or not any(map(is_data_folder, names)):
        return False
    step = os.path.dirname(path)
    return STEP_FILE in names_or_empty(step) and not _unfinished_reason(path) and not _unfinished_reason(step)


def _native(path: str) -> NativeCheckpoint:
    return NativeCheckpoint.at(store_of(path) or store_at(path, Options()))


def _open_jaxckpt_item(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item that jaxckpt has written, as part of a step, and its metadata."""
    source = _native(path)
    manifest, leaves = source.manifest, SourceLeaves(source)
    tree = unflatten(manifest.tree, [leaves.leaf(record.path) for record in manifest.leaves])
    return tree, {} if manifest.metadata is None else {"custom_metadata": manifest.metadata}
