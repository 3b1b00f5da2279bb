"""The structure of a tree and its keys, as JSON: checking them, walking through it, and rebuilding the tree from it."""

from __future__ import annotations

import collections
import functools
import keyword
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np

from jaxckpt._model.paths import are_strings, escape_key, escape_keys, join_paths, unescape_key
from jaxckpt._model.values import decode_bytes, decode_float, encode_bytes, encode_float, is_utf8
from jaxckpt.errors import TreeError, show_path

# Keys -----------------------------------------------------------------------------------------------------

MAX_KEY_DEPTH = 40
"""The greatest nesting depth of tuples in a key. Inside 200 nested containers, `manifest.MAX_NESTING` leaves room for
49 nested tuples."""

Key = str | int | float | bool | bytes | tuple["Key", ...]


def plain_key(entry: Any, path: str) -> Key:
    """The plain key in an entry of JAX's key path. Raises TreeError for keys that cannot be stored."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return _checked_key(getattr(entry, attribute), path)
    return _checked_key(str(entry), path)


def _checked_key(key: object, path: str, depth: int = 0) -> Key:
    """A key as the plain value that a restore returns. An enum member becomes its value, a namedtuple a tuple."""
    if isinstance(key, np.generic):
        key = key.item()
    match key:
        case tuple() if depth < MAX_KEY_DEPTH:
            return tuple(_checked_key(inner, path, depth + 1) for inner in cast("tuple[object, ...]", key))
        case tuple():
            raise TreeError(
                f"the container at {show_path(path)} has a key of tuples nested deeper than {MAX_KEY_DEPTH}; make it a"
                " str"
            )
        case bool():
            return key
        case float():
            return float.__float__(key)
        case bytes():
            return b"".join([key])
        case int() if abs(key) < 1 << 63:
            return int(key)
        case str() if is_utf8(key):
            return str.__str__(key)
        case _:
            pass
    raise TreeError(
        f"the container at {show_path(path)} has the key {ascii(key)[:80]} of type {type(key).__name__}; keys may be"
        " str (UTF-8), int (64 bits), float, bool, bytes, or tuples of them"
    )


def encode_keys(keys: Sequence[Key]) -> tuple[Any, ...]:
    """Keys as JSON values: str and int unchanged, others tagged with their type."""
    return cast("tuple[str, ...]", tuple(keys)) if are_strings(keys) else tuple(map(_encode_key, keys))


def _encode_key(key: Key) -> Any:
    """A key as a JSON value that keeps its type: str and int unchanged, others tagged."""
    if isinstance(key, bool):
        return {"bool": key}
    if isinstance(key, (str, int)):
        return key
    if isinstance(key, float):
        return {"float": encode_float(key)}
    if isinstance(key, bytes):
        return {"bytes": encode_bytes(key)}
    return {"tuple": [_encode_key(inner) for inner in key]}


def _decode_key(record: Any) -> Key:
    match record:
        case bool():
            pass
        case str():
            return record
        case int() if abs(record) < 1 << 63:
            return record
        case {"bool": bool(value)}:
            return value
        case {"float": str(text)}:
            return decode_float(text)
        case {"bytes": str(text)}:
            return decode_bytes(text)
        case {"tuple": list(inner)}:
            return tuple(_decode_key(key) for key in cast("list[Any]", inner))
        case _:
            pass
    raise ValueError(f"{record!r} is not a key")


def decode_keys(keys: tuple[Any, ...]) -> Sequence[Key]:
    return cast("Sequence[str]", keys) if are_strings(keys) else [_decode_key(key) for key in keys]


_MAX_COLLISIONS = 64


def keys_problem(keys: Sequence[Key]) -> str | None:
    """The reason why a dict cannot be built from these keys in linear time; None if it can.

    An attacker can choose keys with equal hashes: millions of tuples of -1 and -2 share one hash, and a dict of them
    takes hours to build.
    """
    if not are_strings(keys):
        hashes = collections.Counter(map(hash, keys))
        if max(hashes.values(), default=0) > _MAX_COLLISIONS:
            return f"more than {_MAX_COLLISIONS} keys with the same hash"
    if len(set(keys)) == len(keys):
        return None
    ((key, count),) = collections.Counter(keys).most_common(1)
    return f"the key {repr(key)[:80]} {count} times"


# Structures -----------------------------------------------------------------------------------------------

MAX_DEPTH = 200
"""The greatest nesting depth of containers. Deeper trees are refused on save and on read."""


Tree = Any
"""A pytree: any value that JAX can flatten."""


class Container(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A container of a tree as it is recorded."""

    type: Literal["list", "tuple", "dict", "ordered_dict", "namedtuple", "custom", "object"]
    """An "object" is a user's leaf, stored as its state: its only child, which has the path of the object."""

    name: str | None = None
    """Name of the class of a "namedtuple", "custom" or "object"."""

    keys: tuple[str | int | dict[str, Any], ...] | None = None
    """One per child, except for a "list", "tuple" or "object". str and int are plain, others tagged with their
    type."""

    children: tuple[int | Container | None, ...]


Structure = int | Container | None
"""A tree's structure: the number of a leaf, None for an empty position, or a container."""


@functools.lru_cache(maxsize=1024)
def is_namedtuple_restored(name: str, fields: tuple[Any, ...]) -> bool:
    """Whether `unflatten` makes a namedtuple of this name and with these fields."""
    try:
        keys_of(Container(type="namedtuple", name=name, keys=fields, children=(None,) * len(fields)))
    except ValueError:
        return False
    return cast("Any", _namedtuple(name, fields))._fields == fields


def paths_of(structure: Structure, max_leaves: int, max_characters: int) -> tuple[list[str], list[int]]:
    """Path and number of every leaf in order.

    Raises ValueError if the structure is malformed, has more leaves than allowed, or has more characters in paths
    before their last "/" than allowed: a long key above many leaves creates paths that exhaust memory.
    """
    structure = unwrap_object(structure)
    if structure is None:
        return [], []
    if isinstance(structure, int):
        return [""], [structure]
    paths: list[str] = []
    numbers: list[int] = []
    known: dict[tuple[Any, ...], Iterable[str]] = {}  # a cache: many containers of a model have equal keys

    def visit(node: Container, heads: tuple[str, ...], n_characters: int) -> None:
        nonlocal max_leaves, max_characters
        if len(heads) >= MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} containers")
        children: Sequence[Structure] = node.children
        leaves = [child for child in children if type(child) is int]
        if len(leaves) < len(children):
            children = [*map(unwrap_object, children)]
            leaves = [child for child in children if type(child) is int]
        max_leaves -= len(leaves)
        max_characters -= n_characters * len(leaves)
        if max_leaves < 0 or max_characters < 0:
            raise ValueError("it has more leaves, or longer paths, than the list of leaves")
        # Only str keys: an attacker can choose numbers with equal hashes, which make a dict slow.
        form = (node.keys, node.type, node.name, len(children)) if node.keys and are_strings(node.keys) else None
        names = known.get(form) if form else None
        if names is None:
            names = escape_keys(keys_of(node))
            if form:
                known[form] = names
        # Built only above a leaf, so that long keys without leaves cost nothing.
        head = "/".join((*heads, "")) if leaves else ""
        if len(leaves) == len(children):
            paths.extend(map(head.__add__, names))
            numbers.extend(leaves)
            return
        for name, child in zip(names, children, strict=True):
            if isinstance(child, Container):
                visit(child, (*heads, name), n_characters + len(name) + 1)
            elif child is not None:
                paths.append(head + name)
                numbers.append(child)

    visit(structure, (), 0)
    return paths, numbers


def keys_of(node: Container) -> Sequence[Key]:
    """Keys of a container's children. Raises ValueError if its record is malformed."""
    count = len(node.children)
    match node:
        case Container(type="list" | "tuple", name=None, keys=None):
            return range(count)
        case Container(type="namedtuple", name=str(name), keys=tuple(fields)) if len(fields) == count:
            names = cast("tuple[str, ...]", fields)
            are_names = are_strings(fields) and all(text.isidentifier() for text in (name, *names))
            if are_names and not keyword.iskeyword(name) and _are_fields(names):
                return names
        case (
            Container(type="dict" | "ordered_dict", name=None, keys=tuple(keys))
            | Container(type="custom", name=str(), keys=tuple(keys))
        ) if len(keys) == count:
            decoded = decode_keys(keys)
            if not keys_problem(decoded):
                return decoded
        case _:
            pass
    shown_keys = [repr(key)[:40] for key in (node.keys or ())[:8]]
    raise ValueError(
        f"a {node.type} of {count} children, name {str(node.name)[:80]!r} and keys {', '.join(shown_keys)}"
        f"{', …' if len(node.keys or ()) > 8 else ''} is not a record of a container"
    )


def _are_fields(names: Sequence[str]) -> bool:
    """Whether these fields of a namedtuple differ for Python, which compares identifiers by their NFKC form."""
    plain = [name if name.isascii() else unicodedata.normalize("NFKC", name) for name in names]
    hidden = any(keyword.iskeyword(seen) and seen != name for name, seen in zip(names, plain, strict=True))
    return len(set(plain)) == len(plain) and not hidden


def unwrap_object(node: Structure) -> Structure:
    """The stored structure at a position: for an object, its state. Raises ValueError if that record is malformed."""
    while isinstance(node, Container) and node.type == "object":
        if node.name is None or node.keys is not None or len(node.children) != 1:
            raise ValueError(
                f"an object with {len(node.children)} children is not a valid record: it must have a name and one child"
            )
        node = node.children[0]
    return node


def structure_of(tree: Tree) -> Structure:
    """The structure of nested dicts, as `nested_dicts` builds them, with leaf numbers or objects as leaves."""
    if isinstance(tree, dict):
        made = cast("dict[str, Tree]", tree)
        return Container(type="dict", keys=tuple(made), children=tuple(map(structure_of, made.values())))
    return tree


def nodes_of(structure: Structure, path: str = "") -> Iterator[tuple[str, Structure]]:
    """Path and structure of everything in a structure: containers, leaves and empty positions."""
    yield path, structure
    structure = unwrap_object(structure)
    if isinstance(structure, Container):
        for name, child in zip(escape_keys(keys_of(structure)), structure.children, strict=True):
            yield from nodes_of(child, join_paths(path, name))


def subtree(structure: Structure, path: str) -> Structure:
    """The part of a structure at a path. Raises KeyError if the path does not exist."""
    if not path:
        return structure
    for name in path.split("/"):
        structure = unwrap_object(structure)
        if not isinstance(structure, Container):
            raise KeyError(path)
        structure = dict(zip(map(escape_key, keys_of(structure)), structure.children, strict=True))[name]
    return structure


def empty_positions(structure: Structure, path: str = "") -> Iterator[tuple[str, str]]:
    """Paths at which a tree has None or a container without children, with a word for which of the two."""
    node = unwrap_object(structure)
    if node is None:
        yield path, "None"
    elif isinstance(node, Container):
        if not node.children:
            yield path, f"an empty {node.name or node.type}"
        elif not all(type(child) is int for child in node.children):
            for name, child in zip(escape_keys(keys_of(node)), node.children, strict=True):
                yield from empty_positions(child, join_paths(path, name))


def user_objects_of(structure: Structure, path: str = "") -> Iterator[tuple[str, Container]]:
    """Path and record of each object that is not inside another object."""
    if not isinstance(structure, Container):
        return
    if structure.type == "object":
        yield path, structure
        return
    for name, child in zip(escape_keys(keys_of(structure)), structure.children, strict=True):
        if isinstance(child, Container):
            yield from user_objects_of(child, join_paths(path, name))


def numbers_of(structure: Structure) -> Iterator[int]:
    """Numbers of the leaves of a structure."""
    if isinstance(structure, int):
        yield structure
    elif structure is not None:
        for child in structure.children:
            yield from numbers_of(child)


def unflatten(
    structure: Structure,
    values: Mapping[int, Any] | Sequence[Any],
    revive: Callable[[Container, Any], Any] | None = None,
) -> Tree:
    """The tree with `values` (by leaf number) as its leaves, and the containers as they were saved.

    Namedtuples are rebuilt from their recorded name and fields, and custom nodes become dicts of their keys. `revive`
    turns the state of an object into the object; without it, the state itself is used. If some leaves have no value,
    call `prune` first.
    """
    if structure is None:
        return None
    if isinstance(structure, int):
        return values[structure]
    children = [
        values[child] if type(child) is int else None if child is None else unflatten(child, values, revive)
        for child in structure.children
    ]
    match structure.type:
        case "dict" | "custom":
            return dict(zip(decode_keys(structure.keys or ()), children, strict=True))
        case "list":
            return children
        case "tuple":
            return tuple(children)
        case "ordered_dict":
            return collections.OrderedDict(zip(decode_keys(structure.keys or ()), children, strict=True))
        case "namedtuple":
            return _namedtuple(structure.name, structure.keys)(*children)
        case "object":
            return children[0] if revive is None else revive(structure, children[0])


_ABSENT: Any = object()


def prune(structure: Structure, numbers: Mapping[int, int], keeps: Callable[[str], bool] | None = None) -> Structure:
    """The structure with only the leaves in `numbers`, renumbered by it.

    A dict loses the keys of other leaves, and a list or tuple gets None in their place. Containers that become empty
    are removed, as are empty containers and None if `keeps` is given and is false for their path. An object becomes the
    rest of its state.
    """
    pruned = _prune(structure, numbers, keeps, "")
    return None if pruned is _ABSENT else pruned


def _prune(node: Structure, numbers: Mapping[int, int], keeps: Callable[[str], bool] | None, path: str) -> Any:
    if isinstance(node, int):
        return numbers.get(node, _ABSENT)
    if node is None or not node.children:
        return node if keeps is None or not path or keeps(path) else _ABSENT
    if node.type == "object":
        return _prune_object(node, numbers, keeps, path)
    if keeps is None or all(type(child) is int for child in node.children):
        children = [_prune(child, numbers, keeps, path) for child in node.children]
    else:
        paths = (join_paths(path, name) for name in escape_keys(keys_of(node)))
        children = [_prune(child, numbers, keeps, below) for child, below in zip(node.children, paths, strict=True)]
    if all(child is _ABSENT for child in children):
        return _ABSENT
    if node.type in ("dict", "ordered_dict", "custom"):
        pairs = zip(node.keys or (), children, strict=True)
        kept = [(key, child) for key, child in pairs if child is not _ABSENT]
        keys, below = tuple(key for key, _ in kept), tuple(child for _, child in kept)
        return msgspec.structs.replace(node, keys=keys, children=below)
    return msgspec.structs.replace(node, children=tuple(None if child is _ABSENT else child for child in children))


def _prune_object(node: Container, numbers: Mapping[int, int], keeps: Callable[[str], bool] | None, path: str) -> Any:
    """An object whose leaves are all kept stays an object, with the empty containers of its state."""
    in_state = [*numbers_of(node)]
    is_whole = all(number in numbers for number in in_state) if in_state else keeps is None or keeps(path)
    state = _prune(node.children[0], numbers, None if is_whole else keeps, path)
    return msgspec.structs.replace(node, children=(state,)) if is_whole else state


@functools.lru_cache(maxsize=1024)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    """One class per name and fields, so that two restored trees have equal structure.

    rename=True allows the fields "_0", "_1" of a namedtuple that was created with rename=True.
    """
    return cast("Callable[..., Any]", collections.namedtuple(name, fields, rename=True))  # pyright: ignore[reportUntypedNamedTuple]


def nested_dicts(values: Mapping[str, Any]) -> Tree:
    """Nested dicts from paths, the result for a renamed tree. Raises TreeError if a leaf is also a container."""
    if set(values) == {""}:
        return values[""]
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = (unescape_key(name) for name in path.split("/"))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise TreeError(f"after rename, the leaf {show_path(path)} is below another leaf")
        if last in node:
            raise TreeError(f"after rename, the leaf {show_path(path)} is also a container of others")
        node[last] = value
    return tree
