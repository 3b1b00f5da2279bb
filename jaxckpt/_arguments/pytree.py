"""Pytrees as leaves with paths, in JAX's order; types of leaves that have a state; and arguments that are pytrees.

A leaf's path joins the keys that lead to it with "/": `{"layers": [{"w": x}]}` has the leaf "layers/0/w". A "/" inside
a key is written "~1", a "~" is written "~0" (RFC 6901) and an empty key "~2", so no two leaves share a path.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import itertools
import json
import operator
import re
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from jaxckpt._keywords import explain_keywords, hint_for_args
from jaxckpt._model.paths import are_strings, closest_paths, escape_keys, path_prefixes, unescape_key
from jaxckpt._model.select import parse_select
from jaxckpt._model.tree import (
    MAX_DEPTH,
    Container,
    Key,
    Structure,
    Tree,
    encode_keys,
    is_namedtuple_restored,
    keys_problem,
    plain_key,
)
from jaxckpt._model.values import PYTHON_KINDS, is_utf8
from jaxckpt.errors import InputError, TreeError, show_lines, show_path

# Types of leaves beyond arrays and Python values ----------------------------------------------------------

_PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""Methods that return and set an object's state. The first pair that a class has is used."""


@dataclass(frozen=True, slots=True)
class LeafType:
    """How leaves of a type are saved and restored."""

    name: str
    """The type's name in a checkpoint."""

    to_state: Callable[[Any], Any]
    """The leaf's state: a tree."""

    from_state: Callable[[Any], Any] | None
    """Creates a leaf from a state, if that is possible without the leaf of a target."""

    set_state: Callable[[Any, Any], object] | None
    """Sets the state of a target's leaf, if leaves of the type are mutable."""

    cls: type
    """The type itself."""

    def is_named(self, name: str) -> bool:
        """Whether a recorded name means this class. The module may differ, unless a name was given."""
        if self.name != full_name(self.cls) or registered(name) is not None:
            return self.name == name
        return self.name.rpartition(".")[2] == name.rpartition(".")[2]


_TYPES: dict[type, LeafType] = {}
"""The registered types. Each has another name."""


@explain_keywords
def register_leaf(
    cls: type,
    *,
    to_state: Callable[[Any], Any],
    from_state: Callable[[Any], Any] | None = None,
    set_state: Callable[[Any, Any], object] | None = None,
    name: str | None = None,
) -> None:
    """Allow leaves of a type that jaxckpt does not know. Every process calls this before it saves or restores. A second
    call for a class replaces the first.

    A checkpoint stores the state of such a leaf as a part of the tree, and the name of the type. A program that has not
    registered the type gets the state. jaxckpt imports nothing and calls only the functions that are passed here.

    Objects with the methods `state_dict` and `load_state_dict`, or `get_state` and `set_state`, need no registration:
    their state is saved, and restored into the object in the target.

    Args:
        cls: The class of the leaves; its subclasses are not included. JAX must treat the instances as leaves: a pytree
            is a container and needs no registration.
        to_state: Returns a leaf's state: a tree of arrays, Python values and containers, as for `save`. A dict of JSON
            values is such a tree.
        from_state: Returns a new leaf with this state.
        set_state: Called with a leaf of the target and a state; changes the leaf. Without it, the result of
            `from_state` replaces the leaf of the target. At least one of the two is required. Without `from_state`, a
            restore without a target returns the state.
        name: The name in the checkpoint, "module.Class" by default. Pass the old name if the class was renamed.

    Raises:
        InputError: jaxckpt takes the type as it is, or another class has this name.

    Examples:
        >>> import decimal, jaxckpt
        >>> jaxckpt.register_leaf(decimal.Decimal, to_state=str, from_state=decimal.Decimal)
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/leaf", {"rate": decimal.Decimal("0.10")}, overwrite=True)
        >>> jaxckpt.restore("/tmp/jaxckpt-doc/leaf")
        {'rate': Decimal('0.10')}
    """
    if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"register_leaf takes a class, found {cls!r}")
    if is_plain(cls) or cls in (dict, list, tuple, type(None)):
        raise InputError(f"{cls.__qualname__} needs no register_leaf: save and restore take it as it is")
    functions = {"to_state": to_state, "from_state": from_state, "set_state": set_state}
    for argument, function in functions.items():
        if not callable(function) and (function is not None or argument == "to_state"):
            raise InputError(f"register_leaf({cls.__qualname__}): {argument} must be a function, found {function!r}")
    if from_state is None and set_state is None:
        raise InputError(f"register_leaf({cls.__qualname__}) needs from_state=, set_state= or both, to restore it")
    name = full_name(cls) if name is None else name
    if not isinstance(name, str) or not name or not is_utf8(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"register_leaf({cls.__qualname__}): name must be a non-empty str (UTF-8), found {name!r}")
    if other := registered(name):
        if full_name(other.cls) != full_name(cls):
            raise InputError(
                f"register_leaf({cls.__qualname__}): {full_name(other.cls)} has the name {name!r}; give another"
            )
        del _TYPES[other.cls]  # a notebook has redefined a class
    _TYPES[cls] = LeafType(name, to_state, from_state, set_state, cls)


def is_plain(cls: type) -> bool:
    """Whether leaves of this type are stored directly, without a state."""
    if cls in PYTHON_KINDS or cls in (np.ndarray, np.memmap) or issubclass(cls, np.generic):
        return True
    jax = sys.modules.get("jax")  # before a program imports JAX, it has no types of JAX
    return jax is not None and issubclass(cls, (jax.Array, jax.ShapeDtypeStruct, jax.sharding.Sharding))


def full_name(cls: type) -> str:
    """Module and name of a class, as recorded in a checkpoint."""
    return f"{cls.__module__}.{cls.__qualname__}".encode(errors="backslashreplace").decode()


def registered(name: str) -> LeafType | None:
    """The type that is registered under a name, if any."""
    return next((kind for kind in _TYPES.values() if kind.name == name), None)


def leaf_type(cls: type) -> LeafType | None:
    """How leaves of this type are saved and restored; None for plain types and for types that cannot be saved."""
    return _TYPES.get(cls) or _type_from_methods(cls)


@functools.cache
def _type_from_methods(cls: type) -> LeafType | None:
    for give, take in _PROTOCOLS:
        if callable(getattr(cls, give, None)) and callable(getattr(cls, take, None)):
            return LeafType(full_name(cls), operator.methodcaller(give), None, functools.partial(_call, take), cls)
    return None


def _call(method: str, leaf: Any, state: Any) -> object:
    return getattr(leaf, method)(state)


def call_user_function(function: Callable[..., Any], doing: str, path: str, *arguments: Any) -> Any:
    """The result of a user's function. An exception of the function gets a note that names the leaf."""
    try:
        return function(*arguments)
    except Exception as error:
        error.add_note(f"jaxckpt: raised while {doing} {show_path(path)}")
        raise


# Flattening -----------------------------------------------------------------------------------------------


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A value of the tree and its path."""

    path: str
    value: Any
    is_variable: bool = False
    """Whether it is the value of a Variable of Flax NNX."""

    in_state: bool = False
    """Whether it belongs to the state of an object."""

    def path_in(self, paths: Collection[str]) -> str:
        """Its path in a checkpoint with these paths. Orbax appends "value" to the path of a Variable."""
        longer = f"{self.path}/value"
        return longer if self.is_variable and self.path not in paths and longer in paths else self.path


@dataclass(slots=True)
class _Flat:
    """Everything that is found during one walk through a tree."""

    states: bool
    """Whether objects are flattened to their states, and references to their values."""

    leaves: list[Leaf] = field(default_factory=list[Leaf])
    variables: dict[int, str] = field(default_factory=dict[int, str])
    """The path of each Variable by its id."""

    referenced: dict[int, Any] = field(default_factory=dict[int, Any])
    """The array of each reference by its id."""


def flatten(tree: Tree, *, states: bool = False) -> tuple[list[Leaf], Structure]:
    """The leaves in JAX's order, and the structure around them.

    With `states`, an object that has a state is a container for the leaves of that state, and a jax.Ref is the array
    that it refers to; otherwise they are leaves.
    Raises TreeError for keys that cannot be stored or that a reader would refuse, and for more than 200 nested
    containers.
    """
    flat = _Flat(states)
    leaves = flat.leaves
    structure = _flatten(tree, "", True, 0, flat)
    if structure == 0 and (hint := hint_for_args(tree)):  # 0: the tree is a leaf
        raise TreeError(hint)
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
    level = ((), [node.get_raw_value()]) if _is_opaque_variable(kind) else _children(node, path)
    handled = leaf_type(kind) if level is None and flat.states and kind not in _LEAF_TYPES else None
    if level is None and handled is None:
        if flat.states and is_reference(kind):
            if id(node) not in flat.referenced:
                flat.referenced[id(node)] = _referenced(node, path)
            node = flat.referenced[id(node)]
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
    if _is_variable(kind) or _is_opaque_variable(kind):
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


@functools.cache
def _is_opaque_variable(kind: type) -> bool:
    """Whether this is a Variable of Flax NNX with `hijax=True`, which JAX treats as a leaf."""
    return (kind.__module__, kind.__name__) == ("flax.nnx.variablelib", "HijaxVariable")


def is_reference(kind: type) -> bool:
    """Whether this is jax.Ref: a reference to an array that changes in place."""
    return kind.__name__ == "Ref" and kind is getattr(sys.modules.get("jax"), "Ref", None)


@contextlib.contextmanager
def reference_context() -> Generator[None]:
    """A context for calls with a jax.Ref: without the caller's mesh, to which JAX would commit its array, and without
    checks for NaN or infinity."""
    import jax  # as the program did, to make the reference

    no_mesh = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(no_mesh), jax.debug_nans(False), jax.debug_infs(False):
        yield


def _referenced(reference: Any, path: str) -> Any:
    """The array that a jax.Ref refers to now: a new array, because a step may change the memory of the reference."""
    try:
        with reference_context():
            return reference[...]
    except Exception as error:  # no type of error is documented
        raise TreeError(f"the jax.Ref at {show_path(path)} cannot be read: {error}") from error


_HOST_LEAVES = (np.ndarray, np.generic, int, float, complex, str, bytes)

_LEAF_TYPES = set[type]()
"""Types known to be leaves, because isinstance with jax.Array takes a Python call per leaf."""


def mark_as_leaf(kind: type) -> None:
    """Make instances of a class of the library leaves, without asking JAX."""
    _LEAF_TYPES.add(kind)


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
    if isinstance(node, _HOST_LEAVES):
        if is_plain(kind):
            _LEAF_TYPES.add(kind)
        return None
    import jax  # here, so that trees of the host, and programs that only read, do without it

    if isinstance(node, (jax.Array, jax.ShapeDtypeStruct, jax.sharding.Sharding)):
        if is_plain(kind):
            _LEAF_TYPES.add(kind)
        return None
    try:
        level, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    except (TypeError, ValueError, OverflowError) as error:
        keys = cast("dict[Any, Any]", node) if isinstance(node, dict) else {}
        key_types = dict.fromkeys(type(key).__name__ for key in keys)
        if len(key_types) > 1:
            raise TreeError(
                f"the keys of the dict at {show_path(path)} are of different types: {', '.join(key_types)}. JAX sorts"
                " the keys of a dict, so they must be of one type"
            ) from error
        shown = f"JAX cannot flatten {show_path(path)} ({type(node).__name__})"
        raise TreeError(f"{shown}: {str(error).rstrip('.')}") from error
    if len(level) == 1 and not level[0][0]:  # the only entry has an empty key path: it is the node itself, a leaf
        return None
    if kind in _TYPES:
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
    if is_named and is_namedtuple_restored(kind.__name__, encoded):
        return Container(type="namedtuple", name=kind.__name__, keys=encoded, children=children)
    return Container(type="custom", name=full_name(kind), keys=encoded, children=children)


# Rebuilding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TreeBuilder:
    """Builds trees of the same structure as another, from leaves as `flatten` returns them."""

    treedef: Any
    """The structure as JAX has it."""

    variables: Mapping[int, tuple[Any, Any]]
    """Variables that JAX treats as leaves, by the number of the leaf, each with JAX's structure of its value."""

    def unflatten(self, leaves: Iterable[Any]) -> Tree:
        """The tree with these leaves."""
        rest = iter(leaves)
        if not self.variables:
            return self.treedef.unflatten(rest)
        nodes: list[Any] = []
        for number in range(self.treedef.num_leaves):
            if number not in self.variables:
                nodes.append(next(rest))
                continue
            variable, value = self.variables[number]
            nodes.append(variable.replace(value.unflatten(itertools.islice(rest, value.num_leaves))))
        return self.treedef.unflatten(nodes)


def flatten_values(tree: Tree) -> tuple[list[Any], TreeBuilder]:
    """The values of the leaves that `flatten` returns, and the way back to a tree."""
    import jax

    nodes, treedef = jax.tree_util.tree_flatten(tree)
    if not any(map(_is_opaque_variable, {*map(type, nodes)})):
        return nodes, TreeBuilder(treedef, {})
    leaves: list[Any] = []
    variables: dict[int, tuple[Any, Any]] = {}
    for number, node in enumerate(nodes):
        if _is_opaque_variable(type(node)):
            values, structure = jax.tree_util.tree_flatten(node.get_raw_value())
            variables[number] = node, structure
            leaves += values
        else:
            leaves.append(node)
    return leaves, TreeBuilder(treedef, variables)


# Keys of arguments ----------------------------------------------------------------------------------------

_WILDCARD = re.compile(r"[*?]|\[.*\]|\{\w+\}")


def key_problem(
    argument: str, prefix: str, value: str, paths: Iterable[str], other: str = ", or a function of (path, leaf)"
) -> str:
    """The message for an entry of a pytree prefix that no leaf is at or below, if one of its keys is a path, a glob or
    a tuple of keys instead of a key of the tree; otherwise empty.

    `value` is the entry's value as the suggestion writes it, `paths` are those of the leaves, and `other` is what else
    the argument may be.
    """
    kinds = {key: kind for component in prefix.split("/") if (kind := _kind(key := unescape_key(component)))}
    heads = dict.fromkeys(head for path in paths for head in path_prefixes(path))
    if not kinds or prefix in heads:
        return ""
    key, kind = next(iter(kinds.items()))
    intended = _intended_path(prefix)
    outer = re.sub(r"(/\*\*?)+$", "", intended)
    near = [outer]
    if outer not in heads:
        near = [] if _WILDCARD.search(outer) else closest_paths(outer, filter(None, heads))
    instead = _nested(near[0], value) if near and near[0] else "nested dicts"
    shown = key if kind == "tuples" else repr(key)
    return (
        f"{argument} has the key {shown}, but the keys of {argument} are the keys of the tree, not {kind}: give"
        f" {instead}{other}"
    )


def pattern_of(prefix: str) -> str:
    """The path or glob that an entry with keys that are hardly those of a tree is; empty for any other entry."""
    kinds = {_kind(unescape_key(component)) for component in prefix.split("/")} - {""}
    return _intended_path(prefix) if kinds and "tuples" not in kinds else ""


def is_meant_for(prefix: str, paths: Iterable[str]) -> bool:
    """Whether an entry would apply to a leaf if its keys were read as paths, globs and tuples of keys."""
    is_other = any(_kind(unescape_key(component)) for component in prefix.split("/"))
    return is_other and any(map(parse_select(_intended_path(prefix)), paths))


def _kind(key: str) -> str:
    """What a key is, if it can hardly be a key of a tree: "paths", "globs" or "tuples"; otherwise empty."""
    if _tuple_of(key):
        return "tuples"
    if _WILDCARD.search(key):
        return "globs"
    return "paths" if "/" in key else ""


def _tuple_of(key: str) -> tuple[Any, ...]:
    """The tuple that a key was; empty for any other key."""
    if not key.startswith("("):
        return ()
    try:
        value = ast.literal_eval(key)
    except (ValueError, SyntaxError):
        return ()
    return cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()


def _intended_path(prefix: str) -> str:
    """A prefix with its keys read as paths, globs and tuples of keys."""
    keys = [unescape_key(component) for component in prefix.split("/")]
    return "/".join("/".join(map(str, _tuple_of(key) or (key,))) for key in keys)


def _nested(path: str, value: str) -> str:
    """The expression for a value at a path, such as `{"params": {"w": "float32"}}`."""
    keys = [unescape_key(component) for component in path.split("/")]
    return "".join(f"{{{json.dumps(key, ensure_ascii=False)}: " for key in keys) + value + "}" * len(keys)
