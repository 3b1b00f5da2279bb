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
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import jax
import msgspec
import numpy as np

from jaxckpt._format.keys import Key, decode_keys, encode_keys, keys_problem, plain_key
from jaxckpt._format.leaf_types import call_user_function, full_name, is_plain, is_registered, leaf_type
from jaxckpt._format.paths import are_strings, escape_key, escape_keys, join_paths, unescape_key
from jaxckpt._format.values import is_utf8
from jaxckpt._runtime.errors import TreeError, show_lines, show_path

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


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A value of the tree and its path."""

    path: str
    value: Any
    is_variable: bool = False
    """Whether it is the value of a Variable of Flax NNX."""

    in_state: bool = False
    """Whether it belongs to the state of an object."""

    def path_in(self, known: Collection[str]) -> str:
        """Its path in a checkpoint with these paths. Orbax appends "value" to the path of a Variable."""
        longer = f"{self.path}/value"
        return longer if self.is_variable and self.path not in known and longer in known else self.path


# Flattening -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Flat:
    """Everything that is found during one walk through a tree."""

    states: bool
    """Whether objects are flattened to their states."""

    leaves: list[Leaf] = field(default_factory=list[Leaf])
    variables: dict[int, str] = field(default_factory=dict[int, str])
    """The path of each Variable by its id."""


def flatten(tree: Tree, *, states: bool = False) -> tuple[list[Leaf], Structure]:
    """The leaves in JAX's order, and the structure around them.

    With `states`, an object that has a state is a container for the leaves of that state; otherwise it is a leaf.
    Raises TreeError for keys that cannot be stored or that a reader would refuse, and for more than 200 nested
    containers.
    """
    flat = _Flat(states)
    leaves = flat.leaves
    structure = _flatten(tree, "", True, 0, flat)
    if len({leaf.path for leaf in leaves}) != len(leaves):
        paths = collections.Counter(leaf.path for leaf in leaves)
        twice = [path for path, count in paths.items() if count > 1]
        raise TreeError(f"several leaves share a path; rename a key:\n{show_lines(map(show_path, twice))}")
    return leaves, structure


def _flatten(node: Tree, path: str, root: bool, depth: int, flat: _Flat) -> Structure:
    """The structure of a node. Adds its leaves."""
    if node is None:
        return None
    kind = type(cast("object", node))
    level = _children(node, path)
    handled = leaf_type(kind) if level is None and flat.states and kind not in _LEAF_TYPES else None
    if level is None and handled is None:
        flat.leaves.append(Leaf(path, node))
        return len(flat.leaves) - 1
    if depth >= MAX_DEPTH:
        raise TreeError(f"the tree is nested deeper than {MAX_DEPTH} containers at {show_path(path[:200])}")
    if handled is not None:
        first = len(flat.leaves)
        state = call_user_function(handled.to_state, f"the state of the {handled.name} was taken at", path, node)
        structure = _flatten(state, path, root, depth + 1, flat)
        flat.leaves[first:] = [msgspec.structs.replace(leaf, in_state=True) for leaf in flat.leaves[first:]]
        return Container(type="object", name=handled.name, children=(structure,))
    keys, child_nodes = cast("tuple[Sequence[Key], Sequence[Tree]]", level)
    if _is_variable(kind):
        first = flat.variables.setdefault(id(node), path)
        if first != path:
            raise TreeError(
                f"{show_path(first)} and {show_path(path)} are the same Variable of Flax NNX, and would be restored as"
                " two: pass nnx.state(module), which contains it once"
            )
        structure = _flatten(child_nodes[0], path, root, depth, flat)
        if isinstance(structure, int):
            flat.leaves[-1] = Leaf(path, flat.leaves[-1].value, is_variable=True)
        return structure
    head = "" if root else f"{path}/"
    leaves = flat.leaves
    children: list[Structure] = []
    for key, child in zip(escape_keys(keys), child_nodes, strict=True):
        if type(child) in _LEAF_TYPES:  # true for most children, and faster than a call
            children.append(len(leaves))
            leaves.append(Leaf(head + key, child))
        else:
            children.append(_flatten(child, head + key, False, depth + 1, flat))
    return _container(node, path, keys, tuple(children))


@functools.cache
def _is_variable(kind: type) -> bool:
    """Whether this is a Variable of Flax NNX, whose value has the path of the Variable itself."""
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
"""Types known to be leaves, because isinstance with jax.Array takes a Python call per leaf."""


def _children(node: Tree, path: str) -> tuple[Sequence[Key], Sequence[Tree]] | None:
    """Keys and children of one level of the tree, in JAX's order; None for a leaf."""
    kind = type(cast("object", node))
    if kind in _LEAF_TYPES:
        return None
    if kind is dict and {*map(type, node)} <= {str} and is_utf8("".join(node)):
        keys = sorted(node)
        return keys, [node[key] for key in keys]
    if kind is list:
        return range(len(node)), node
    if isinstance(node, _LEAVES):
        if is_plain(kind):
            _LEAF_TYPES.add(kind)
        return None
    try:
        level, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).rstrip(".")
        raise TreeError(
            f"JAX cannot flatten {show_path(path)} ({type(node).__name__}): {reason}. Check that all keys are of one"
            " type"
        ) from error
    if len(level) == 1 and not level[0][0]:  # the only entry has an empty key path: it is the node itself, a leaf
        return None
    if is_registered(kind):
        raise TreeError(
            f"{show_path(path)} is a {full_name(kind)}, which is registered as a leaf, but JAX treats it as a"
            " container: remove the call of register_leaf"
        )
    return [plain_key(entry[0], path) for entry, _ in level], [child for _, child in level]


def _container(node: Tree, path: str, keys: Sequence[Key], children: tuple[Structure, ...]) -> Container:
    """The record of a container. Raises TreeError for keys that cannot be restored."""
    kind = type(cast("object", node))
    if kind is list:
        return Container(type="list", children=children)
    if kind is tuple:
        return Container(type="tuple", children=children)
    problem = keys_problem(keys)
    if problem:
        raise TreeError(f"the container at {show_path(path)} ({kind.__name__}) has {problem}; rename a key")
    encoded = encode_keys(keys)
    if kind is dict:
        return Container(type="dict", keys=encoded, children=children)
    if kind is collections.OrderedDict:
        return Container(type="ordered_dict", keys=encoded, children=children)
    is_named = isinstance(node, tuple) and are_strings(keys) and encoded == getattr(kind, "_fields", None)
    if is_named and _is_rebuilt(kind.__name__, encoded):
        return Container(type="namedtuple", name=kind.__name__, keys=encoded, children=children)
    return Container(type="custom", name=full_name(kind), keys=encoded, children=children)


@functools.lru_cache(maxsize=1024)
def _is_rebuilt(name: str, fields: tuple[Any, ...]) -> bool:
    """Whether `unflatten` makes a namedtuple of this name and with these fields."""
    try:
        keys_of(Container(type="namedtuple", name=name, keys=fields, children=(None,) * len(fields)))
    except ValueError:
        return False
    return cast("Any", _namedtuple(name, fields))._fields == fields


# Structure: checking, walking, rebuilding -----------------------------------------------------------------


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
    known = [repr(key)[:40] for key in (node.keys or ())[:8]]
    raise ValueError(
        f"a {node.type} of {count} children, name {str(node.name)[:80]!r} and keys {', '.join(known)}"
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


def all_paths(structure: Structure) -> Iterator[str]:
    """The path of everything in a structure except its root: containers, leaves and empty positions."""
    structure = unwrap_object(structure)
    if isinstance(structure, Container):
        for name, child in zip(escape_keys(keys_of(structure)), structure.children, strict=True):
            yield name
            yield from (f"{name}/{below}" for below in all_paths(child))


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


def prune(structure: Structure, numbers: Mapping[int, int]) -> Structure:
    """The structure with only the leaves in `numbers`, renumbered by it.

    A dict loses the keys of other leaves, and a list or tuple gets None in their place. Containers that become empty
    are removed. An object becomes the rest of its state.
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
    if node.type == "object" and len([*numbers_of(children[0])]) < len([*numbers_of(node)]):
        return children[0]
    return msgspec.structs.replace(node, children=tuple(None if child is _ABSENT else child for child in children))


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
