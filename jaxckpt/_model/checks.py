"""Checks of a manifest that do not open any other file."""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxckpt._model import zarr
from jaxckpt._model.dtypes import DTYPES, MAX_RANK
from jaxckpt._model.grid import spec_problem
from jaxckpt._model.records import MAX_INTEGER, LeafRecord, Manifest, StackRecord
from jaxckpt._model.tree import paths_of
from jaxckpt._model.values import KINDS, decode_value, encode_value
from jaxckpt._options import COMPRESSIONS
from jaxckpt.errors import show_count, show_path

FORMAT = "jaxckpt"

VERSION = 1

MAX_OBJECT_INDEX_BYTES = 64 << 20
"""Largest index of an object, which tensorstore holds in memory: 4 million chunks."""

MAX_TIED = 256
"""The most leaves that share one row, so that a forged manifest cannot claim much more data than its objects hold."""

_ZSTD_MOST = 1 << 15  # RFC 8878: a block holds at most 128 KiB and takes at least 4 bytes; blosc's blocks use zstd too

_MAX_AXES = 64  # of a mesh, which is a NumPy array

MAX_PROBLEM_CHARACTERS = 500
"""The most characters of a problem in a message."""


def problems(manifest: Manifest) -> list[str]:
    """The problems of a manifest, at most 20. Each check relies on the previous checks."""
    checks = (_head_problems, _layout_problems, _tree_problems)
    lists = (list(itertools.islice(check(manifest), 20)) for check in checks)
    return [problem[:MAX_PROBLEM_CHARACTERS] for problem in next(filter(None, lists), [])]


def _head_problems(manifest: Manifest) -> Iterator[str]:
    """Problems of the format, the version and other members that describe the whole save."""
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        yield f"format {manifest.format!r} version {manifest.version}, expected {FORMAT!r} version {VERSION}"
        return
    if not _is_name(manifest.save_id):
        yield f"save_id {manifest.save_id!r} is not a plain name"
    if len({len(seconds) for seconds in manifest.phase_seconds.values()}) > 1:
        yield "phase_seconds lists different numbers of processes for its phases"


def _layout_problems(manifest: Manifest) -> Iterator[str]:
    """Problems of stacks, meshes and layouts."""
    yield from _stack_problems(manifest.stacks)
    for number, mesh in enumerate(manifest.meshes):
        if len(mesh.axes) > _MAX_AXES or math.prod(mesh.axes.values()) != len(mesh.devices) or not mesh.devices:
            yield f"mesh {number} has {len(mesh.axes)} axes {_show_items(mesh.axes)} for {len(mesh.devices)} devices"
        if len(set(mesh.devices)) != len(mesh.devices):
            yield f"mesh {number} names a device twice"
        if len(mesh.types) != len(mesh.axes) or not set(mesh.types) <= {"Auto", "Explicit", "Manual"}:
            yield f"mesh {number} has axis types {_show_items(mesh.types)} for axes {_show_items(mesh.axes)}"
    for number, layout in enumerate(manifest.layouts):
        if layout.mesh is not None and layout.mesh >= len(manifest.meshes):
            yield f"layout {number} refers to mesh {layout.mesh}, but the manifest has only {len(manifest.meshes)}"
            continue
        axes = manifest.meshes[layout.mesh].axes if layout.mesh is not None else {}
        named = [axis for entry in layout.spec for axis in entry]
        named += layout.reduced
        if len(layout.spec) > MAX_RANK or any(axis not in axes for axis in named) or len(set(named)) != len(named):
            shown = _show_items(layout.spec) + (
                f" reduced over {_show_items(layout.reduced)}" if layout.reduced else ""
            )
            yield f"layout {number} has spec {shown} on a mesh of axes {_show_items(axes)}"


def _show_items(items: Collection[Any]) -> str:
    """Names for a message, shortened, because they are arbitrary and there may be millions."""
    return ", ".join(str(item)[:40] for item in itertools.islice(items, 8)) + (", …" if len(items) > 8 else "")


def _tree_problems(manifest: Manifest) -> Iterator[str]:
    """Problems of the tree, the leaves and their paths."""
    leaves = manifest.leaves
    paths = [leaf.path for leaf in leaves]
    try:
        # A few more than the limit, so that the leaf at fault can be named.
        places, numbers = paths_of(manifest.tree, len(paths) + 1000, sum(map(len, paths)) + (1 << 20))
    except ValueError as error:
        yield f"tree: {error}"
        return
    if numbers != list(range(len(leaves))):
        seen = next((seen for seen, number in enumerate(numbers) if number != seen), len(numbers))
        named = f"leaf {numbers[seen]} instead of leaf {seen}" if seen < len(numbers) else show_count(seen, "leaf")
        yield f"the tree has {named}; the manifest lists {show_count(len(leaves), 'leaf')}"
        return
    if places != paths:
        at, path = next((at, path) for at, path in zip(places, paths, strict=True) if at != path)
        yield f"leaf {show_path(path[:200])} is at {show_path(at[:200])} in the tree"
        return
    if len(manifest.numbers) != len(leaves):
        yield "several leaves share a path"
    if not _are_leaves_valid(manifest):
        yield from _leaf_problems(manifest)


def _are_leaves_valid(manifest: Manifest) -> bool:
    """Whether no leaf has a problem. Leaves of a stack with the same kind and layout are checked once."""
    count = len(manifest.stacks)
    leaves_by_stack: list[list[LeafRecord]] = [[] for _ in range(count)]
    for leaf in manifest.leaves:
        if leaf.value is not None:
            if _value_problem(leaf):
                return False
        elif leaf.stack is None or leaf.stack >= count:
            return False
        else:
            leaves_by_stack[leaf.stack].append(leaf)
    return all(
        _is_filled(manifest, stack, leaves) for stack, leaves in zip(manifest.stacks, leaves_by_stack, strict=True)
    )


def _is_filled(manifest: Manifest, stack: StackRecord, leaves: list[LeafRecord]) -> bool:
    """Whether these leaves fill a stack: at least one for each row."""
    rows = [leaf.row for leaf in leaves if leaf.row is not None]
    if len(rows) != len(leaves) or len({*rows}) != stack.rows or max(rows) >= stack.rows:
        return False
    if len(rows) > stack.rows and max(collections.Counter(rows).values()) > MAX_TIED:
        return False
    leaf_by_form = {(leaf.kind, leaf.layout, leaf.impl, leaf.weak): leaf for leaf in leaves}
    return not any(_array_problem(manifest, leaf) for leaf in leaf_by_form.values())


def _leaf_problems(manifest: Manifest) -> Iterator[str]:
    """The problems of each leaf."""
    paths: dict[tuple[int | None, int], str] = {}
    counts = collections.Counter[tuple[int | None, int]]()
    for leaf in manifest.leaves:
        problem = _array_problem(manifest, leaf) if leaf.value is None else _value_problem(leaf)
        if not problem and leaf.value is None:
            stack = manifest.stacks[leaf.stack or 0]
            if leaf.row is None or leaf.row >= stack.rows:
                problem = f"is row {leaf.row} of stack {stack.name}, which has {stack.rows}"
            elif counts[leaf.stack, leaf.row] == MAX_TIED:
                path = show_path(paths[leaf.stack, leaf.row][:200])
                problem = f"shares its row with {path} and {MAX_TIED - 1} others; the limit is {MAX_TIED} leaves"
            else:
                counts[leaf.stack, leaf.row] += 1
                paths[leaf.stack, leaf.row] = leaf.path
        if problem:
            yield f"leaf {show_path(leaf.path[:200])} {problem}"
    if len(paths) != sum(stack.rows for stack in manifest.stacks):
        yield f"the leaves fill {len(paths)} of the {sum(stack.rows for stack in manifest.stacks)} rows of all stacks"


def _value_problem(leaf: LeafRecord) -> str | None:
    """The problem of a leaf with a value, if any."""
    assert leaf.value is not None, leaf
    try:
        canonical = encode_value(decode_value(leaf.kind, leaf.value)) == (leaf.kind, leaf.value)
    except ValueError as error:
        return f"has no value of kind {leaf.kind[:40]!r}: {str(error)[:200]}"
    if not canonical:
        return f"stores its value as {leaf.value[:40]!r}, which is not the canonical text of kind {leaf.kind!r}"
    if (leaf.stack, leaf.row, leaf.layout, leaf.impl) != (None,) * 4 or leaf.weak:
        return "has a value, so it must have no stack, row, layout, impl or weak type"
    return None


def _array_problem(manifest: Manifest, leaf: LeafRecord) -> str | None:
    """The problem of a leaf without a value, if any, regardless of its path and row."""
    kind = KINDS.get(leaf.kind)
    if kind is None or kind.holds is None:
        return f"is of unknown kind {leaf.kind[:40]!r}"
    if leaf.stack is None or leaf.stack >= len(manifest.stacks):
        return f"refers to stack {leaf.stack}, but the manifest has only {len(manifest.stacks)}"
    stack = manifest.stacks[leaf.stack]
    if leaf.layout is not None and leaf.layout >= len(manifest.layouts):
        return f"refers to layout {leaf.layout}, but the manifest has only {len(manifest.layouts)}"
    if leaf.layout is not None and not kind.on_devices:
        return f"is of kind {leaf.kind!r} and has a layout"
    if (leaf.kind == "key") != (leaf.impl is not None):
        return "must name a PRNG implementation if, and only if, it is a key"
    if leaf.weak and leaf.kind != "jax":
        return f"is of kind {leaf.kind!r} and has a weak type"
    if not kind.holds(stack.dtype, len(stack.shape)):
        return f"is of kind {leaf.kind!r} but is stored as {stack.dtype} of shape {stack.shape}"
    if leaf.layout is not None:
        mesh, spec, _ = manifest.leaf_layout(leaf)
        shape = stack.shape[:-1] if leaf.kind == "key" else stack.shape
        problem = spec_problem(mesh.axes if mesh else {}, spec, shape)
        if problem:
            return f"has an impossible layout: {problem}"
    return None


def _stack_problems(stacks: Sequence[StackRecord]) -> Iterator[str]:
    names: set[str] = set()
    for stack in stacks:
        where = f"stack {stack.name[:80]!r}"
        if not _is_name(stack.name) or stack.name in names:
            yield f"{where} has a name that is not plain, or not unique"
        names.add(stack.name)
        if stack.dtype not in DTYPES:
            yield f"{where} has unknown dtype {stack.dtype[:80]!r}"
            continue
        if stack.compression not in COMPRESSIONS:
            yield f"{where} has unknown compression {str(stack.compression)[:80]!r}"
            continue
        ranks = {len(stack.shape) + 1, len(stack.chunk), len(stack.object)}
        if len(ranks) > 1 or len(stack.shape) > MAX_RANK or not stack.rows or not _is_grid(stack):
            yield (
                f"{where} has {stack.rows} rows of [{_show_items(stack.shape)}] in objects of"
                f" [{_show_items(stack.object)}], chunks of [{_show_items(stack.chunk)}], which do not form a grid"
            )
            continue
        yield from _object_problems(stack, where)
        if not stack.contents.keys() <= stack.objects.keys() or not all(map(_is_digest, stack.contents.values())):
            yield f"{where} has malformed content digests, or digests of unknown objects"


def _is_grid(stack: StackRecord) -> bool:
    """Whether a stack's sides form a grid of objects and chunks that can be counted and addressed."""
    itemsize = DTYPES[stack.dtype].itemsize
    # No side is longer than the array requires, so that every chunk of an index has data.
    sides = all(
        0 < chunk <= max(1, n) and 0 < side <= -(-max(1, n) // chunk) * chunk and side % chunk == 0
        for n, chunk, side in zip((stack.rows, *stack.shape), stack.chunk, stack.object, strict=True)
    )
    # A side of zero counts as one, as in NumPy's own limit.
    fits = stack.rows * math.prod(max(1, n) for n in stack.shape) * itemsize <= MAX_INTEGER
    return sides and fits and math.prod(stack.object) * itemsize <= MAX_INTEGER


def _object_problems(record: StackRecord, where: str) -> Iterator[str]:
    stack = record.stack()
    count = math.prod(-(-n // o) for n, o in zip(stack.array_shape, stack.object_sides, strict=True))
    if count != len(record.objects):
        yield f"{where} lists {len(record.objects)} of its {count} objects"
        return
    if hashlib.sha256(zarr.metadata(stack)).hexdigest() != record.sha256:
        yield f"{where} has a zarr.json that does not match its shape, dtype, chunk and object"
        return
    index_bytes, chunk_bytes = stack.index_bytes, stack.chunk_stored_bytes
    if index_bytes > MAX_OBJECT_INDEX_BYTES:
        yield f"{where} has {stack.chunks_per_object} chunks in each object"
        return
    if not count:
        return
    most = index_bytes + stack.chunks_per_object * chunk_bytes
    # For each dimension: each grid index with the number of its chunks inside the array.
    sides = [
        [(str(i), -(-(min(n, (i + 1) * o) - i * o) // c)) for i in range(-(-n // o))]
        for n, o, c in zip(stack.array_shape, stack.object_sides, stack.chunk_sides, strict=True)
    ]
    for cell in itertools.product(*sides):
        key = "/".join([text for text, _ in cell])
        length = record.objects.get(key, (-1, ""))[0]
        data_bytes = math.prod([chunks for _, chunks in cell]) * chunk_bytes
        if stack.compression is None:
            fits = index_bytes + data_bytes <= length <= most
        else:
            fits = length - index_bytes >= -(-data_bytes // _ZSTD_MOST)
        if not fits:
            yield f"{where}: object {key!r} is {'missing' if length < 0 else f'{length} bytes long'}"


def _is_digest(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def _is_name(text: str) -> bool:
    return text.replace("-", "").replace("_", "").isalnum() and text.isascii() and len(text) <= 200
