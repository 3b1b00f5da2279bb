"""Checkpoints of one file per rank, without a format: the caller specifies which file holds which box of which array.

files ─▶ the arrays of each rank ─▶ their boxes, from a mesh and specs or from explicit offsets ─▶ ForeignCheckpoint
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxckpt._arguments.pytree import flatten
from jaxckpt._formats.export import tree_of_names
from jaxckpt._formats.index_files import located_together, reads_files
from jaxckpt._formats.npz import read_npz
from jaxckpt._formats.safetensors import read_header
from jaxckpt._formats.shards import from_boxes, from_ranks
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, box_at
from jaxckpt._model.paths import closest_hint, name_of_path, path_of_name
from jaxckpt._model.tree import nested_dicts
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint, Unreadable, with_files
from jaxckpt._store.foreign_files import OpenedFiles, is_folder, list_names, read_head, using_files
from jaxckpt.errors import DataError, InputError, NotACheckpointError, show_lines, show_path

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from jaxckpt._arguments.specs import Specs

Files = Mapping[int, str | os.PathLike[str]]
"""The file of each rank."""

Offsets = Mapping[int, Mapping[str, Sequence[int]]]
"""The start of each rank's shard of each array."""

MAX_RANKS = 1 << 17


@explain_keywords
@reads_files
def rank_files(
    files: Files,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    specs: Specs = None,
    offsets: Offsets | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> ForeignCheckpoint:
    """Combine files that each rank saved separately into one checkpoint of global arrays.

    Pass the result to `restore`, `load_numpy`, `open`, `convert`, `diff` or `verify` in place of a path. Only headers
    are read here; arrays are read from the rank files later, box by box. Every process makes this call.

    Args:
        files: The path or URL of the file of each rank: .npz, as written by numpy.savez or savez_compressed, or
            .safetensors. Arrays with the same name are shards of one array. A "/" in a name makes a dict: "params/w"
            becomes {"params": {"w": …}}.
        mesh: The mesh on which the ranks were numbered, in row-major order: axis sizes such as {"data": 2, "model": 4},
            or a Mesh or AbstractMesh, of which only the axis sizes count. By default one axis "rank" with the number of
            files.
        specs: How each array was split over that mesh: a PartitionSpec for all, a mapping of name → PartitionSpec, or
            a function of (path, leaf). Without a spec, each rank holds the whole array. Ranks with the same box are
            replicas: one is enough, and they are compared when they are read.
        offsets: Instead of a spec, the start of each rank's shard in the global array: {rank: {name: (0, 4096)}}.
        shapes: The global shape of each array in `offsets`.

    Returns:
        A checkpoint of nested dicts of global arrays. It refers to the files, which must stay in place.

    Raises:
        DataError: A file is missing or damaged; or shards of an array overlap, or no rank has some box of it. The error
            names the array and the box.
        SpecError: A spec does not fit the mesh or its array.
        InputError: No files or invalid ranks; offsets without shapes, or for arrays that do not exist.
        TreeError: An array has a dtype that NumPy and JAX do not support.

    Examples:
        >>> import os, jax, numpy as np, jaxckpt
        >>> os.makedirs("/tmp/jaxckpt-doc", exist_ok=True)
        >>> for rank in range(2):
        ...     np.savez(f"/tmp/jaxckpt-doc/{rank}.npz", w=np.arange(3) + 3 * rank, step=np.int64(7))
        >>> ranks = {rank: f"/tmp/jaxckpt-doc/{rank}.npz" for rank in range(2)}
        >>> checkpoint = jaxckpt.formats.rank_files(ranks, mesh={"data": 2}, specs={"w": jax.P("data")})
        >>> jaxckpt.load_numpy(checkpoint)
        {'step': array(7), 'w': array([0, 1, 2, 3, 4, 5])}
    """
    paths, opened_files = paths_of(files)
    with using_files(opened_files):
        rank_values = {
            rank: read_npz(path) if read_head(path, 2) == b"PK" else read_header(path) for rank, path in paths.items()
        }
    for rank, values in rank_values.items():
        for name, value in values.items():
            if isinstance(value, ForeignArray) and isinstance(value.data, Unreadable):
                raise DataError(f"{paths[rank]}: {show_path(name)} cannot be read: {value.data.reason}")
    names = dict.fromkeys(name for values in rank_values.values() for name in values)
    leaf_paths = {leaf.value: leaf.path for leaf in flatten(tree_of_names({name: name for name in names}, {}))[0]}
    tree = tree_of_names(assemble(rank_values, leaf_paths, mesh, specs, offsets, shapes), {})
    return with_files(compose(common_url(paths), tree, "rank files", files=paths.values()), opened_files)


def paths_of(files: Files) -> tuple[dict[int, str], OpenedFiles]:
    """The path of each rank's file, and the opened files, as of `located_together`."""
    if not files:
        raise InputError("no files are given; expected {rank: path}")
    if not isinstance(files, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"files is of type {type(files).__name__}; expected {{rank: path}}")
    if wrong := [rank for rank in files if type(rank) is not int or not 0 <= rank < MAX_RANKS]:
        raise InputError(f"files has the rank {wrong[0]!r}; expected integers from 0 to {MAX_RANKS - 1}")
    paths, opened_files = located_together({f"the file of rank {rank}": files[rank] for rank in sorted(files)})
    return dict(zip(sorted(files), paths, strict=True)), opened_files


def paths_in(folder: str, rank_name: re.Pattern[str]) -> dict[int, str]:
    """The single file in each rank's folder. `rank_name` matches folder names, with the rank in group 1."""
    if not is_folder(folder):
        raise NotACheckpointError(f"the folder {folder} does not exist")
    files: dict[int, str] = {}
    problems: list[str] = []
    for name in list_names(folder):
        match, inner = rank_name.fullmatch(name), os.path.join(folder, name)
        if match is None or not is_folder(inner):
            continue
        inside = [file for file in list_names(inner) if file.endswith((".ckpt", ".safetensors"))]
        if len(inside) != 1:
            problems.append(f"{inner} has {len(inside)}" + (f": {', '.join(inside[:5])}" if inside else ""))
        elif files.setdefault(int(match[1]), path := os.path.join(inner, inside[0])) != path:
            problems.append(f"{inner} is of the same rank as {files[int(match[1])]}")
    if problems:
        raise InputError(
            "each rank's folder must hold one .ckpt or .safetensors file; otherwise pass the files as {rank: path}:\n"
            + show_lines(problems)
        )
    if not files:
        raise NotACheckpointError(f"{folder} has no folder rank_0, rank_1, …")
    if beyond := [rank for rank in files if rank >= MAX_RANKS]:
        raise InputError(f"{files[beyond[0]]} is of rank {beyond[0]}; at most {MAX_RANKS} ranks are read")
    return files


def common_url(paths: Mapping[int, str]) -> str:
    """The path of the single file, or the common parent folder of all files, for messages."""
    names = zip(*(path.split("/") for path in paths.values()), strict=False)
    return "/".join(same[0] for same in itertools.takewhile(lambda same: len({*same}) == 1, names)) or "/"


RankValues = Mapping[int, Mapping[str, ForeignArray | str | bytes]]
"""The values of each rank, by name."""


def assemble(
    rank_values: RankValues,
    leaf_paths: Mapping[str, str],
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    specs: Specs = None,
    offsets: Offsets | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, ForeignArray | str | bytes]:
    """The global arrays by name, from the arrays of each rank. `leaf_paths` are their paths in the final tree."""
    import jax  # here, because recognizing a format needs no JAX

    from jaxckpt._arguments.specs import mesh_axes, resolve_specs

    arrays, whole = group_by_name(rank_values)
    axes = mesh_axes({"rank": max(rank_values) + 1} if mesh is None else mesh)
    if math.prod(axes.values()) > MAX_RANKS:
        raise InputError(f"the mesh {axes} has more than {MAX_RANKS} devices")
    boxes = _boxes(arrays, _require_mapping(offsets, "offsets"), _require_mapping(shapes, "shapes"))
    firsts = {name: next(iter(shards.values())) for name, shards in arrays.items() if name not in boxes}
    leaves = [
        (leaf_paths[name], jax.ShapeDtypeStruct(a.shape, DTYPES.get(a.dtype, np.uint8))) for name, a in firsts.items()
    ]
    if isinstance(specs, Mapping):  # its keys are names of tensors, not keys of the tree
        path_by_name = {name_of_path(path): path for path in leaf_paths.values()}
        by_name = {name_of_path(leaf.path): leaf.value for leaf in flatten(specs)[0]}
        specs = nested_dicts({path_by_name.get(name, path_of_name(name)): spec for name, spec in by_name.items()})
    chosen = resolve_specs(specs, leaves)
    for name, shards in arrays.items():
        if name in boxes:
            whole[name] = from_boxes(name, shards, boxes[name], tuple((shapes or {})[name]))
        else:
            whole[name] = from_ranks(name, shards, axes, chosen.get(leaf_paths[name], ()))
    return whole


def group_by_name(
    rank_values: RankValues,
) -> tuple[dict[str, dict[int, ForeignArray]], dict[str, ForeignArray | str | bytes]]:
    """The shards of each array by rank, and other values, which must be equal in all ranks. Raises DataError."""
    arrays: dict[str, dict[int, ForeignArray]] = {}
    values: dict[str, ForeignArray | str | bytes] = {}
    for rank, items in rank_values.items():
        for name, value in items.items():
            if isinstance(value, ForeignArray):
                arrays.setdefault(name, {})[rank] = value
            elif values.setdefault(name, value) != value:
                raise DataError(
                    f"{show_path(name)} differs between ranks: rank {rank} has {value!r:.40},"
                    " an earlier rank has another value"
                )
    if mixed := arrays.keys() & values.keys():
        raise DataError(f"{show_path(min(mixed))} is an array in some ranks but not in others")
    return arrays, values


def _require_mapping(argument: Mapping[Any, Any] | None, what: str) -> Mapping[Any, Any]:
    """An argument that may be omitted. Raises InputError unless it is a mapping."""
    if argument is not None and not isinstance(argument, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"{what} is of type {type(argument).__name__}; expected a mapping")
    return argument or {}


def _integers(values: Any) -> list[int] | None:
    """A sequence of integers, or None if it is anything else."""
    try:
        return list(map(index, values))
    except TypeError:
        return None


def _boxes(
    arrays: Mapping[str, Mapping[int, ForeignArray]], offsets: Offsets, shapes: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, Box]]:
    """The box of each array with offsets that each rank holds. Raises InputError."""
    by_rank = {rank: _require_mapping(starts, f"offsets[{rank!r}]") for rank, starts in offsets.items()}
    named = {name for starts in by_rank.values() for name in starts}
    problems = [
        f"{show_path(name)}{closest_hint(name, arrays)}: no rank has it" for name in sorted(named - arrays.keys())
    ]
    problems += [f"{show_path(name)} has offsets and no shape" for name in sorted(named - shapes.keys())]
    problems += [f"{show_path(name)} has a shape and no offsets" for name in sorted(shapes.keys() - named)]
    boxes: dict[str, dict[int, Box]] = {}
    for name in sorted(named & arrays.keys() & shapes.keys()):
        for rank, shard in arrays[name].items():
            starts = by_rank.get(rank, {}).get(name)
            start, sizes = _integers(starts), _integers(shapes[name])
            if start is None or sizes is None or not len(start) == len(shard.shape) == len(sizes):
                position = "no offset" if starts is None else f"offset {starts!r}"
                position += f" in the shape {shapes[name]!r}"
                problems.append(f"{show_path(name)} is {list(shard.shape)} in rank {rank}, with {position}")
                continue
            boxes.setdefault(name, {})[rank] = box_at(start, shard.shape)
    if problems:
        raise InputError(f"offsets= and shapes= do not fit the files:\n{show_lines(problems)}")
    return boxes
