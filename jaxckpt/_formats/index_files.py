"""Files in JSON of foreign checkpoints, what index files name, which stays in their folder, and a model's files."""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from jaxckpt._model import typed_json
from jaxckpt._model.manifest import require_distinct
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._sources.open_source import located
from jaxckpt._store.foreign_files import (
    BucketFiles,
    OpenedFiles,
    SeenFiles,
    exists,
    is_file,
    list_names,
    opened,
    read_small,
)
from jaxckpt._store.store_path import local_path, unchecked_store_at
from jaxckpt.errors import DataError, InputError, show_path

T = TypeVar("T")
P = ParamSpec("P")

MAX_INDEX_BYTES = 1 << 28
"""The largest index file in JSON."""


def located_together(places: Mapping[str, str | os.PathLike[str]]) -> tuple[list[str], OpenedFiles]:
    """Paths or URLs as paths of `foreign_files`, and the files of the bucket of those that are URLs, or of the file
    system. `places` has them by names for messages. Raises InputError for other values, and if they are in several
    buckets."""
    paths: list[str] = []
    bucket = None
    for what, place in places.items():
        local_path(place, what)  # checks it
        path, files = located(unchecked_store_at(place, Options()))
        if isinstance(files, BucketFiles):
            bucket = bucket or files
            if files.url != bucket.url:
                raise InputError(f"{what} is at {files.url}, others at {bucket.url}: copy all of them to one place")
        paths.append(path)
    return paths, bucket or SeenFiles()


def reads_files(function: Callable[P, T]) -> Callable[P, T]:
    """A public function that reads files and takes no options. It raises StorageError if their storage hangs."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        work = functools.partial(function, *arguments, **options)
        return run_watched(f"reading files for {function.__name__}", Options().timeout_seconds, work)

    return call


# JSON -----------------------------------------------------------------------------------------------------


def read_json(path: str, kind: type[T], limit: int = MAX_INDEX_BYTES) -> T:
    """A file in JSON. Raises DataError if it is missing, damaged or not of that kind."""
    return from_json(path, read_small(path, limit), kind)


def from_json(what: str, text: str | bytes, kind: type[T]) -> T:
    """A value from JSON. Raises DataError, which calls the text `what`."""
    try:
        # Python's decoder, not msgspec's: Orbax writes NaN, which JSON lacks.
        record = json.loads(
            text if isinstance(text, str) else str(text, "utf-8-sig"), object_pairs_hook=require_distinct
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is damaged: {str(error)[:200]}") from error
    return convert_checked(what, record, kind)


def convert_checked(what: str, value: Any, kind: type[T]) -> T:
    """A value checked and converted by msgspec. Raises DataError, which calls the value `what`."""
    try:
        return typed_json.convert(value, kind)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is damaged: {str(error)[:200]}") from error


# What index files name ------------------------------------------------------------------------------------


def path_inside(folder: str, name: str, where: str) -> str:
    """The path of a file that an index names. Raises DataError if the name leads out of the folder, or no file can have
    it."""
    names = name.split("/")
    if not all(names) or {".", ".."} & {*names} or "\0" in name:
        raise DataError(f"{where} names the file {name[:200]!r}, which would be outside its folder")
    longest = max(len(part.encode(errors="replace")) for part in names)
    if longest > _MAX_NAME_BYTES or len(name) > _MAX_KEY_CHARACTERS or re.search(r"[\ud800-\udfff]", name):
        raise DataError(f"{where} names the file {name[:200]!r}, a name that no file can have")
    return os.path.join(folder, *names)


_MAX_NAME_BYTES = 255
"""The longest name of a file or folder, on all common file systems."""

_MAX_KEY_CHARACTERS = 1024
"""The longest key of a bucket, in bytes; longer than any name in an index."""


class Index(msgspec.Struct, frozen=True):
    """An index of the files that hold tensors, as Hugging Face and others write it."""

    weight_map: dict[str, str]
    """The file of each tensor."""

    metadata: dict[str, Any] | None = None


def read_indexed(folder: str, index: str, read: Callable[[str], Mapping[Any, T]]) -> dict[Any, T]:
    """The contents of the files that an index names, each read by `read`.

    Raises DataError unless the index names every tensor in these files, and every file of the same numbered series.
    """
    files: dict[str, set[str]] = {}
    for name, file in read_json(index, Index).weight_map.items():
        files.setdefault(file, set()).add(name)
    _require_named(folder, files, index)
    tensors: dict[Any, T] = {}
    for file, expected in files.items():
        path = path_inside(folder, file, index)
        if not exists(path):
            raise DataError(f"{index} names the file {file[:100]!r}, which is not in its folder")
        contents = read(path)
        if unmatched := {*map(str, contents)} ^ expected:
            has, lacks = ("index", "file") if min(unmatched) in expected else ("file", "index")
            tensor = f"the tensor {show_path(min(unmatched))} is in the {has} but not in the {lacks}"
            raise DataError(f"{path}: {tensor} ({os.path.basename(index)})")
        tensors |= contents
    return tensors


_SERIES_FILE = re.compile(r"(.+?)-\d{5}(-of-\d{5})?(\.\w+)")


def _require_named(folder: str, named: Collection[str], index: str) -> None:
    """Raise DataError if a numbered file belongs to the files of an index but is not named by it."""
    series = {match.groups() for name in named if (match := _SERIES_FILE.fullmatch(name))}
    for name in sorted({*list_names(folder)} - {*named}):
        if (match := _SERIES_FILE.fullmatch(name)) and match.groups() in series:
            raise DataError(f"{os.path.join(folder, name)} is not named by {index}, although files like it are")


def index_counts(folder: str, index: str, single: str) -> bool:
    """Whether a folder's model is in the files that its index names; False if it is in the file `single` next to them.

    Raises InputError if both exist: transformers reads the single file, and others read what the index names. Both
    are left by a save with shards over one without. A save without shards over one with shards leaves only the index.
    """
    files = {*read_json(os.path.join(folder, index), Index).weight_map.values()}
    if single in files or not is_file(os.path.join(folder, single)):
        return True
    if any(exists(path_inside(folder, file, index)) for file in files):
        raise InputError(
            f"{folder} holds two models: the file {single}, which transformers reads, and the files that {index} names,"
            f" which others read. Give the path of the one to read, {os.path.join(folder, single)} or"
            f" {os.path.join(folder, index)}; or delete the other"
        )
    stale = os.path.join(folder, index)
    warnings.warn(f"{stale} is ignored: none of its files exists, so {single} is read", stacklevel=2)
    return False


def several_indices_error(folder: str, indices: Sequence[str]) -> InputError:
    return InputError(
        f"{folder} has several index files ({', '.join(indices[:5])}): give the path of one of them, such as"
        f" {os.path.join(folder, indices[0])}, or use one folder for each"
    )


def require_length(path: str, end: int) -> None:
    """Raise DataError if a file is too short for its content."""
    with opened(path) as file:
        if end == 0 or file.read(1, end - 1):
            return
        length = file.size
    if length < end:
        raise DataError(f"{path} is {length} bytes long, expected at least {end}")


# The files of a model, as transformers and diffusers choose them -------------------------------------------

STEMS = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")
_COUNTED_FILE = re.compile(r"(.*\D)(\d+)-of-(\d+)(\.\w+)")


def preferred(names: Collection[str], suffix: str) -> str | None:
    """The name that these libraries read by default, not a variant such as "model.fp16.safetensors"."""
    return next((name for stem in STEMS if (name := stem + suffix) in names), None)


def complete_series(names: Collection[str]) -> Sequence[str] | None:
    """The names in order if all are the numbered files 1 to n of one model, as "model-00001-of-00002.safetensors"."""
    matches = sorted((int(match[2]), match) for name in names if (match := _COUNTED_FILE.fullmatch(name)))
    numbers = [number for number, _ in matches]
    if len(matches) != len(names) or len({(m[1], int(m[3]), m[4]) for _, m in matches}) != 1:
        return None
    return [match[0] for _, match in matches] if numbers == list(range(1, int(matches[0][1][3]) + 1)) else None


def merged(files: Mapping[str, Mapping[Any, Any]]) -> dict[Any, Any]:
    """The tensors of several files. Raises DataError if two have one of the same name."""
    tensors: dict[Any, Any] = {}
    for file, content in files.items():
        if both := tensors.keys() & content.keys():
            raise DataError(
                f"{file}: the tensor {show_path(str(min(both, key=str)))} is also in another file of the folder"
            )
        tensors |= content
    return tensors
