"""Pytrees as leaves with paths, and their structure as JSON.

A leaf's path joins the keys that lead to it with "/": `{"layers": [{"w": x}]}` has the leaf "layers/0/w". A "/" inside
a key is written "~1", a "~" is written "~0" (RFC 6901) and an empty key "~2", so no two leaves share a path.
"""

from __future__ import annotations

import collections
import functools
import keyword
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import msgspec
import numpy as np

from jaxckpt._format.paths import are_texts, component, components, key_of
from jaxckpt._format.values import decode_bytes, decode_float, encode_bytes, encode_float, is_utf8
from jaxckpt._runtime.errors import TreeError, listing, show

MAX_DEPTH = 200
"""Containers may nest this deep; a deeper tree is refused when saved and when read."""

MAX_KEY_DEPTH = 40
"""Tuples in a key may nest this deep: below 200 containers `manifest.MAX_NESTING` leaves room for 49."""


Tree = Any
"""A pytree: whatever JAX flattens."""

Key = str | int | float | bool | bytes | tuple["Key", ...]


class Container(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A container of a tree as it is recorded."""

    type: Literal["list", "tuple", "dict", "ordered_dict", "namedtuple", "custom"]

    name: str | None = None
    """Of the class of a "namedtuple" or "custom"."""

    keys: tuple[str | int | dict[str, Any], ...] | None = None
    """One for each child but of a "list" or "tuple": str and int as they are, others tagged with their type."""

    children: tuple[int | Container | None, ...]


Structure = int | Container | None
"""A tree's structure: a leaf's number, None for an empty place, or a container."""


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A value of the tree and its path."""

    path: str
    value: Any
    is_variable: bool = False
    """Whether it is the value of a Variable of Flax NNX."""

    def path_in(self, known: Collection[str]) -> str:
        """Its path in a checkpoint with these paths: Orbax puts "value" after that of a Variable."""
        longer = f"{self.path}/value"
        return longer if self.is_variable and self.path not in known and longer in known else self.path


# Flattening -----------------------------------------------------------------------------------------------


def flatten(tree: Tree) -> tuple[list[Leaf], Structure]:
    """The leaves in JAX's order, and the structure around them.

    Raises TreeError for keys that cannot be written down or that a reader would refuse, and for trees nested deeper
    than 200.
    """
    leaves: list[Leaf] = []
    structure = _flatten(tree, "", True, 0, leaves, {})
    if len({leaf.path for leaf in leaves}) != len(leaves):
        paths = collections.Counter(leaf.path for leaf in leaves)
        twice = [path for path, count in paths.items() if count > 1]
        raise TreeError(f"several leaves share a path; rename a key:\n{listing(map(show, twice))}")
    return leaves, structure


def _flatten(node: Tree, path: str, root: bool, depth: int, leaves: list[Leaf], variables: dict[int, str]) -> Structure:
    """The structure of a node, whose leaves are added; `variables` has the path of each Variable by its id."""
    if node is None:
        return None
    level = _children(node, path)
    if level is None:
        leaves.append(Leaf(path, node))
        return len(leaves) - 1
    if depth >= MAX_DEPTH:
        raise TreeError(f"the tree is nested deeper than {MAX_DEPTH} containers at {show(path[:200])}")
    keys, below = level
    if _is_variable(type(cast("object", node))):
        first = variables.setdefault(id(node), path)
        if first != path:
            raise TreeError(
                f"{show(first)} and {show(path)} are one Variable of Flax NNX, and would come back as two: give"
                " nnx.state(module), which has it once"
            )
        structure = _flatten(below[0], path, root, depth, leaves, variables)
        if isinstance(structure, int):
            leaves[-1] = Leaf(path, leaves[-1].value, is_variable=True)
        return structure
    head = "" if root else f"{path}/"
    children: list[Structure] = []
    for key, child in zip(components(keys), below, strict=True):
        if type(child) in _LEAF_TYPES:  # most are, and a call for each is spared
            children.append(len(leaves))
            leaves.append(Leaf(head + key, child))
        else:
            children.append(_flatten(child, head + key, False, depth + 1, leaves, variables))
    return _container(node, path, keys, tuple(children))


@functools.cache
def _is_variable(kind: type) -> bool:
    """Whether it is a Variable of Flax NNX, whose users know its value by the path of the Variable itself."""
    return any((base.__module__, base.__name__) == ("flax.nnx.variablelib", "Variable") for base in kind.__mro__)


_LEAVES = (
    jax.Array,
    np.ndarray,
    np.generic,
    int,
    float,
    complex,
    str,
    bytes,
    jax.ShapeDtypeStruct,
    jax.sharding.Sharding,
)

_LEAF_TYPES = set[type]()
"""Types known to be leaves: asking jax.Array takes a Python call for each leaf."""


def _children(node: Tree, path: str) -> tuple[Sequence[Key], Sequence[Tree]] | None:
    """Keys and children of one level of the tree in JAX's own order; None for a leaf."""
    kind = type(cast("object", node))
    if kind in _LEAF_TYPES:
        return None
    if kind is dict and {*map(type, node)} <= {str} and is_utf8("".join(node)):
        keys = sorted(node)
        return keys, [node[key] for key in keys]
    if kind is list:
        return range(len(node)), node
    if isinstance(node, _LEAVES):
        _LEAF_TYPES.add(kind)
        return None
    try:
        level, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).rstrip(".")
        raise TreeError(
            f"JAX cannot flatten {show(path)} ({type(node).__name__}): {reason}. Check that all keys are of one type"
        ) from error
    if len(level) == 1 and not level[0][0]:  # no key leads to it: the node itself
        return None
    return [plain_key(entry[0], path) for entry, _ in level], [child for _, child in level]


def plain_key(entry: Any, path: str) -> Key:
    """JAX's key-path entry as the plain key inside it."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return _checked_key(getattr(entry, attribute), path)
    return _checked_key(str(entry), path)


def _checked_key(key: object, path: str, depth: int = 0) -> Key:
    """A key as the plain value that it comes back as. An enumeration's member is its value, a namedtuple a tuple."""
    if isinstance(key, np.generic):
        key = key.item()
    match key:
        case tuple() if depth < MAX_KEY_DEPTH:
            return tuple(_checked_key(inner, path, depth + 1) for inner in cast("tuple[object, ...]", key))
        case tuple():
            raise TreeError(
                f"the container at {show(path)} has a key of tuples nested deeper than {MAX_KEY_DEPTH}; make it a str"
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
        f"the container at {show(path)} has the key {ascii(key)[:80]} of type {type(key).__name__}; keys may be str"
        " (UTF-8), int (64 bits), float, bool, bytes, or tuples of them"
    )


def _container(node: Tree, path: str, keys: Sequence[Key], children: tuple[Structure, ...]) -> Container:
    kind = type(cast("object", node))
    if kind is list:
        return Container(type="list", children=children)
    if kind is tuple:
        return Container(type="tuple", children=children)
    problem = _ambiguity(keys)
    if problem:
        raise TreeError(f"the container at {show(path)} ({kind.__name__}) has {problem}; rename a key")
    encoded = cast("tuple[str, ...]", tuple(keys)) if are_texts(keys) else tuple(map(_encode_key, keys))
    if kind is dict:
        return Container(type="dict", keys=encoded, children=children)
    if kind is collections.OrderedDict:
        return Container(type="ordered_dict", keys=encoded, children=children)
    is_named = isinstance(node, tuple) and are_texts(keys) and encoded == getattr(kind, "_fields", None)
    if is_named and _is_rebuilt(kind.__name__, encoded):
        return Container(type="namedtuple", name=kind.__name__, keys=encoded, children=children)
    name = f"{kind.__module__}.{kind.__qualname__}".encode(errors="backslashreplace").decode()
    return Container(type="custom", name=name, keys=encoded, children=children)


@functools.lru_cache(maxsize=1024)
def _is_rebuilt(name: str, fields: tuple[Any, ...]) -> bool:
    """Whether `unflatten` makes a namedtuple of this name and with these fields."""
    try:
        keys_of(Container(type="namedtuple", name=name, keys=fields, children=(None,) * len(fields)))
    except ValueError:
        return False
    return cast("Any", _namedtuple(name, fields))._fields == fields


def _encode_key(key: Key) -> Any:
    """A key as JSON that keeps its type: str and int as they are, others tagged."""
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


# Structure: checking, walking, rebuilding -----------------------------------------------------------------


def paths_of(structure: Structure, most_leaves: int, most_characters: int) -> tuple[list[str], list[int]]:
    """Path and number of every leaf in order.

    Raises ValueError where the structure is malformed, where it has more leaves, or where all that stands in paths
    before their last "/" has more characters: a long key above many leaves makes paths that fill any memory.
    """
    if structure is None:
        return [], []
    if isinstance(structure, int):
        return [""], [structure]
    paths: list[str] = []
    numbers: list[int] = []
    known: dict[tuple[Any, ...], Iterable[str]] = {}  # most containers of a model have keys like others'

    def below(node: Container, heads: tuple[str, ...], n_characters: int) -> None:
        nonlocal most_leaves, most_characters
        if len(heads) >= MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} containers")
        children = node.children
        leaves = [child for child in children if type(child) is int]
        most_leaves -= len(leaves)
        most_characters -= n_characters * len(leaves)
        if most_leaves < 0 or most_characters < 0:
            raise ValueError("its paths are not those of the leaves")
        # Texts alone: Python's hashes of numbers are no secret, and a dict of equal ones is slow.
        form = (node.keys, node.type, node.name, len(children)) if node.keys and are_texts(node.keys) else None
        names = known.get(form) if form else None
        if names is None:
            names = components(keys_of(node))
            if form:
                known[form] = names
        # Only above a leaf is it put together: long keys above no leaf cost nothing.
        head = "/".join((*heads, "")) if leaves else ""
        if len(leaves) == len(children):
            paths.extend(map(head.__add__, names))
            numbers.extend(leaves)
            return
        for name, child in zip(names, children, strict=True):
            if isinstance(child, Container):
                below(child, (*heads, name), n_characters + len(name) + 1)
            elif child is not None:
                paths.append(head + name)
                numbers.append(child)

    below(structure, (), 0)
    return paths, numbers


def keys_of(node: Container) -> Sequence[Key]:
    """Keys of a container's children. Raises ValueError if its record is malformed."""
    count = len(node.children)
    match node:
        case Container(type="list" | "tuple", name=None, keys=None):
            return range(count)
        case Container(type="namedtuple", name=str(name), keys=tuple(fields)) if len(fields) == count:
            names = cast("tuple[str, ...]", fields)
            are_names = are_texts(fields) and all(text.isidentifier() for text in (name, *names))
            if are_names and not keyword.iskeyword(name) and _are_fields(names):
                return names
        case (
            Container(type="dict" | "ordered_dict", name=None, keys=tuple(keys))
            | Container(type="custom", name=str(), keys=tuple(keys))
        ) if len(keys) == count:
            decoded = _decoded(keys)
            if not _ambiguity(decoded):
                return decoded
        case _:
            pass
    known = [repr(key)[:40] for key in (node.keys or ())[:8]]
    raise ValueError(
        f"a {node.type} of {count} children, name {str(node.name)[:80]!r} and keys {', '.join(known)}"
        f"{', …' if len(node.keys or ()) > 8 else ''} is not a record of a container"
    )


def _decoded(keys: tuple[Any, ...]) -> Sequence[Key]:
    return cast("Sequence[str]", keys) if are_texts(keys) else [_decode_key(key) for key in keys]


def _are_fields(names: Sequence[str]) -> bool:
    """Whether these fields of a namedtuple differ for Python, which compares identifiers by their NFKC form."""
    plain = [name if name.isascii() else unicodedata.normalize("NFKC", name) for name in names]
    hidden = any(keyword.iskeyword(seen) and seen != name for name, seen in zip(names, plain, strict=True))
    return len(set(plain)) == len(plain) and not hidden


_MOST_COLLISIONS = 64


def _ambiguity(keys: Sequence[Key]) -> str | None:
    """Why keys cannot be a dict's, or not in linear time; None if they can.

    Python's hashes of numbers are no secret: millions of tuples of -1 and -2 have one hash, and a dict of them takes
    hours to build.
    """
    if not are_texts(keys):
        hashes = collections.Counter(map(hash, keys))
        if max(hashes.values(), default=0) > _MOST_COLLISIONS:
            return f"more than {_MOST_COLLISIONS} keys with the same hash"
    if len(set(keys)) == len(keys):
        return None
    ((key, count),) = collections.Counter(keys).most_common(1)
    return f"the key {repr(key)[:80]} {count} times"


def structure_of(tree: Tree) -> Structure:
    """Nested dicts with leaf numbers for leaves, as `nested` makes them, as a structure."""
    if isinstance(tree, dict):
        made = cast("dict[str, Tree]", tree)
        return Container(type="dict", keys=tuple(made), children=tuple(map(structure_of, made.values())))
    return tree


def places(structure: Structure) -> Iterator[str]:
    """The path of everything below a structure: containers, leaves and empty places."""
    if isinstance(structure, Container):
        for name, child in zip(components(keys_of(structure)), structure.children, strict=True):
            yield name
            yield from (f"{name}/{below}" for below in places(child))


def subtree(structure: Structure, path: str) -> Structure:
    """What lies in a structure at a path. Raises KeyError if nothing is there."""
    if not path:
        return structure
    for name in path.split("/"):
        if not isinstance(structure, Container):
            raise KeyError(path)
        structure = dict(zip(map(component, keys_of(structure)), structure.children, strict=True))[name]
    return structure


def unflatten(structure: Structure, values: Mapping[int, Any] | Sequence[Any]) -> Tree:
    """The tree with `values`, by number, for its leaves, containers as they were saved.

    Namedtuples are rebuilt from their recorded name and fields, custom nodes as dicts of their keys. Where leaves have
    no value, `prune` first.
    """
    if structure is None:
        return None
    if isinstance(structure, int):
        return values[structure]
    children = [
        values[child] if type(child) is int else None if child is None else unflatten(child, values)
        for child in structure.children
    ]
    match structure.type:
        case "dict" | "custom":
            return dict(zip(_decoded(structure.keys or ()), children, strict=True))
        case "list":
            return children
        case "tuple":
            return tuple(children)
        case "ordered_dict":
            return collections.OrderedDict(zip(_decoded(structure.keys or ()), children, strict=True))
        case "namedtuple":
            return _namedtuple(structure.name, structure.keys)(*children)


_ABSENT: Any = object()


def prune(structure: Structure, numbers: Mapping[int, int]) -> Structure:
    """The structure with those leaves alone that `numbers` has, and with the numbers that it gives them.

    The others leave their dict without the key, and a list or tuple with None in their place; containers left empty by
    that vanish.
    """
    pruned = _prune(structure, numbers)
    return None if pruned is _ABSENT else pruned


def _prune(node: Structure, numbers: Mapping[int, int]) -> Any:
    if node is None:
        return None
    if isinstance(node, int):
        return numbers.get(node, _ABSENT)
    children = [_prune(child, numbers) for child in node.children]
    if children and all(child is _ABSENT for child in children):
        return _ABSENT
    if node.type in ("dict", "ordered_dict", "custom"):
        pairs = zip(node.keys or (), children, strict=True)
        kept = [(key, child) for key, child in pairs if child is not _ABSENT]
        keys, below = tuple(key for key, _ in kept), tuple(child for _, child in kept)
        return msgspec.structs.replace(node, keys=keys, children=below)
    return msgspec.structs.replace(node, children=tuple(None if child is _ABSENT else child for child in children))


@functools.lru_cache(maxsize=1024)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    """One class for each name and fields, so that two restored trees have equal structure.

    rename=True takes the fields "_0", "_1" of a namedtuple that was itself made with it.
    """
    return cast("Callable[..., Any]", collections.namedtuple(name, fields, rename=True))  # pyright: ignore[reportUntypedNamedTuple]


def nested(values: Mapping[str, Any]) -> Tree:
    """Nested dicts from paths: what a renamed tree comes back as. Raises TreeError if a leaf is also a container."""
    if set(values) == {""}:
        return values[""]
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = (key_of(name) for name in path.split("/"))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise TreeError(f"after rename, the leaf {show(path)} is below another leaf")
        if last in node:
            raise TreeError(f"after rename, the leaf {show(path)} is also a container of others")
        node[last] = value
    return tree
