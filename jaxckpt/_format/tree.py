"""Pytrees as leaves with paths, and their structure as JSON.

A leaf's path joins the keys that lead to it with "/": `{"layers": [{"w": x}]}` has the leaf "layers/0/w". A "/" inside
a key is written "~1", a "~" is written "~0" (RFC 6901) and an empty key "~2", so no two leaves share a path.
"""

from __future__ import annotations

import base64
import collections
import difflib
import fnmatch
import functools
import keyword
import math
import re
import reprlib
import struct
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import ml_dtypes
import msgspec
import numpy as np

from jaxckpt._runtime.errors import InputError, TreeError, counted, listing

MAX_DEPTH = 200
"""Containers may nest this deep; a deeper tree is refused when saved and when read."""

MAX_KEY_DEPTH = 40
"""Tuples in a key may nest this deep: below 200 containers `manifest.MAX_NESTING` leaves room for 49."""

INLINE_BYTES = 4096
"""A str or bytes leaf up to this size is stored in the manifest itself; a larger one as an array of bytes."""

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
    """A value of the tree and where it stands."""

    path: str
    value: Any


# Paths ----------------------------------------------------------------------------------------------------


def component(key: object) -> str:
    """A key as one component of a path."""
    return str(key).replace("~", "~0").replace("/", "~1") or "~2"


def show(path: str) -> str:
    """A path as error messages write it."""
    return repr(path) if path else "'' (the tree itself)"


def closest(path: str, known: Iterable[str]) -> str:
    """A hint for a path that was not found."""
    near = difflib.get_close_matches(path, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


# Flattening -----------------------------------------------------------------------------------------------


def flatten(tree: Tree) -> tuple[list[Leaf], Structure]:
    """The leaves in JAX's order, and the structure around them.

    Raises TreeError for keys that cannot be written down or that a reader would refuse, and for trees nested deeper
    than 200.
    """
    leaves: list[Leaf] = []
    structure = _flatten(tree, "", True, 0, leaves)
    if len({leaf.path for leaf in leaves}) != len(leaves):
        paths = collections.Counter(leaf.path for leaf in leaves)
        twice = [path for path, count in paths.items() if count > 1]
        raise TreeError(f"several leaves share a path; rename a key:\n{listing(map(show, twice))}")
    return leaves, structure


def _flatten(node: Tree, path: str, root: bool, depth: int, leaves: list[Leaf]) -> Structure:
    if node is None:
        return None
    found = _children(node, path)
    if found is None:
        leaves.append(Leaf(path, node))
        return len(leaves) - 1
    if depth >= MAX_DEPTH:
        raise TreeError(f"the tree is nested deeper than {MAX_DEPTH} containers at {show(path[:200])}")
    keys, below = found
    head = "" if root else f"{path}/"
    children: list[Structure] = []
    for part, child in zip(_components(keys), below, strict=True):
        if type(child) in _LEAF_TYPES:  # most are, and a call for each is spared
            children.append(len(leaves))
            leaves.append(Leaf(head + part, child))
        else:
            children.append(_flatten(child, head + part, False, depth + 1, leaves))
    return _container(node, path, keys, tuple(children))


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
            f"JAX cannot flatten {show(path)} ({type(node).__name__}): {reason}. Are the keys of one type?"
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
            return tuple(_checked_key(part, path, depth + 1) for part in cast("tuple[object, ...]", key))
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
    encoded = cast("tuple[str, ...]", tuple(keys)) if _are_texts(keys) else tuple(map(_encode_key, keys))
    if kind is dict:
        return Container(type="dict", keys=encoded, children=children)
    if kind is collections.OrderedDict:
        return Container(type="ordered_dict", keys=encoded, children=children)
    is_named = isinstance(node, tuple) and _are_texts(keys) and encoded == getattr(kind, "_fields", None)
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
        return {"bytes": base64.b64encode(key).decode()}
    return {"tuple": [_encode_key(part) for part in key]}


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
            return base64.b64decode(text, validate=True)
        case {"tuple": list(parts)}:
            return tuple(_decode_key(part) for part in cast("list[Any]", parts))
        case _:
            pass
    raise ValueError(f"{record!r} is no key")


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
        form = (node.keys, node.type, node.name, len(children)) if node.keys and _are_texts(node.keys) else None
        parts = known.get(form) if form else None
        if parts is None:
            parts = _components(keys_of(node))
            if form:
                known[form] = parts
        # Only above a leaf is it put together: long keys above no leaf cost nothing.
        head = "/".join((*heads, "")) if leaves else ""
        if len(leaves) == len(children):
            paths.extend(map(head.__add__, parts))
            numbers.extend(leaves)
            return
        for part, child in zip(parts, children, strict=True):
            if isinstance(child, Container):
                below(child, (*heads, part), n_characters + len(part) + 1)
            elif child is not None:
                paths.append(head + part)
                numbers.append(child)

    below(structure, (), 0)
    return paths, numbers


def _are_texts(keys: Iterable[Any]) -> bool:
    try:
        "".join(keys)  # the quickest way to ask
    except TypeError:
        return False
    return True


def _components(keys: Sequence[Key]) -> Iterable[str]:
    """Each key as `component` writes it: as it is where there is nothing to escape."""
    if isinstance(keys, range):
        return map(str, keys)
    if _are_texts(keys):
        texts = cast("Sequence[str]", keys)
        together = "".join(texts)
        if "~" not in together and "/" not in together and "" not in texts:
            return texts
    return list(map(component, keys))


def keys_of(node: Container) -> Sequence[Key]:
    """Keys of a container's children. Raises ValueError where its record is malformed."""
    count = len(node.children)
    match node:
        case Container(type="list" | "tuple", name=None, keys=None):
            return range(count)
        case Container(type="namedtuple", name=str(name), keys=tuple(fields)) if len(fields) == count:
            names = cast("tuple[str, ...]", fields)
            are_names = _are_texts(fields) and all(text.isidentifier() for text in (name, *names))
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
        f"{', …' if len(node.keys or ()) > 8 else ''} is no record of a container"
    )


def _decoded(keys: tuple[Any, ...]) -> Sequence[Key]:
    return cast("Sequence[str]", keys) if _are_texts(keys) else [_decode_key(key) for key in keys]


def _are_fields(names: Sequence[str]) -> bool:
    """Whether Python can tell these fields of a namedtuple apart: it compares identifiers by their NFKC form."""
    plain = [name if name.isascii() else unicodedata.normalize("NFKC", name) for name in names]
    hidden = any(keyword.iskeyword(found) and found != name for name, found in zip(names, plain, strict=True))
    return len(set(plain)) == len(plain) and not hidden


_MOST_COLLISIONS = 64


def _ambiguity(keys: Sequence[Key]) -> str | None:
    """Why keys cannot be a dict's, or not in linear time; None where they can.

    Python's hashes of numbers are no secret: millions of tuples of -1 and -2 have one hash, and a dict of them takes
    hours to build.
    """
    if not _are_texts(keys):
        hashes = collections.Counter(map(hash, keys))
        if max(hashes.values(), default=0) > _MOST_COLLISIONS:
            return f"more than {_MOST_COLLISIONS} keys of one hash"
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
        for part, child in zip(_components(keys_of(structure)), structure.children, strict=True):
            yield part
            yield from (f"{part}/{below}" for below in places(child))


def subtree(structure: Structure, path: str) -> Structure:
    """The part of a structure at a path. Raises KeyError where there is none."""
    if not path:
        return structure
    for part in path.split("/"):
        if not isinstance(structure, Container):
            raise KeyError(path)
        structure = dict(zip(map(component, keys_of(structure)), structure.children, strict=True))[part]
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


def _key_of(part: str) -> str:
    return "" if part == "~2" else part.replace("~1", "/").replace("~0", "~")


def nested(values: Mapping[str, Any]) -> Tree:
    """Nested dicts from paths: what a renamed tree comes back as. Raises TreeError where a leaf is also a container."""
    if set(values) == {""}:
        return values[""]
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = (_key_of(part) for part in path.split("/"))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise TreeError(f"after rename, the leaf {show(path)} lies below another leaf")
        if last in node:
            raise TreeError(f"after rename, the leaf {show(path)} is also a container of others")
        node[last] = value
    return tree


# Choosing leaves ------------------------------------------------------------------------------------------

Select = str | re.Pattern[str] | Callable[[str], bool] | Iterable["str | re.Pattern[str]"]
Rename = Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Selector:
    """What a `select` selects: a test of leaf paths."""

    tests: tuple[tuple[str, Callable[[str], bool]], ...]
    """Each entry of `select` as the user wrote it, and its test."""

    def __call__(self, path: str) -> bool:
        return any(test(path) for _, test in self.tests)

    def choose(self, paths: Collection[str], where: str = "the checkpoint") -> list[bool]:
        """Whether each path is selected. Raises TreeError if an entry selects none of them."""
        unused = list(self.tests)
        chosen: list[bool] = []
        for path in paths:
            found = [entry for entry in unused if entry[1](path)] if unused else []
            for entry in found:
                unused.remove(entry)
            chosen.append(bool(found) or self(path))
        if unused and paths:
            raise TreeError(_unmatched("select", [text for text, _ in unused], paths, where))
        if not self.tests:
            raise TreeError("select has no entries, and so selects nothing; leave it out to select everything")
        return chosen


def selector(select: Select | None) -> Selector:
    """A test of leaf paths.

    A glob (`*` within one component, `**` across components) or a compiled regular expression (`fullmatch`) selects
    the leaves whose path, or the path of a container above them, it matches. Several select what any of them does.

    Raises InputError if `select` is something else. A generator can be read only once, so call this only once for it.
    """
    if select is None:
        return Selector((("**", lambda path: True),))
    if callable(select):
        return Selector(((_in_short(select), functools.partial(_asked, select)),))
    if isinstance(select, (str, re.Pattern)):
        return Selector((_entry(select),))
    if isinstance(select, Iterable) and not isinstance(select, (bytes, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        return Selector(tuple(map(_entry, select)))
    raise _not_select(select)


def _not_select(found: object) -> InputError:
    return InputError(
        "select must be a glob, a compiled regular expression of str, a list of them, or a function of the path that"
        f" returns a bool, found {_in_short(found)}"
    )


def _in_short(value: object) -> str:
    return f"re.compile({value.pattern!r})" if isinstance(value, re.Pattern) else reprlib.repr(value)


def _asked(select: Callable[[str], bool], path: str) -> bool:
    """What a `select` function says about a path."""
    answer = select(path)
    if not isinstance(answer, (bool, np.bool_)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"select returned {reprlib.repr(answer)} for leaf {show(path)}; expected True or False")
    return bool(answer)


def _entry(pattern: object) -> tuple[str, Callable[[str], bool]]:
    """A pattern as the user wrote it, and its test of a path."""
    if isinstance(pattern, str):
        expression = _glob(pattern)
        return repr(pattern), lambda path: expression.fullmatch(path) is not None
    if not isinstance(pattern, re.Pattern) or not isinstance(pattern.pattern, str):
        raise _not_select(pattern)
    expression = cast("re.Pattern[str]", pattern)

    def matches(path: str) -> bool:
        parts = path.split("/")
        return any(expression.fullmatch("/".join(parts[:end])) for end in range(1, len(parts) + 1))

    return _in_short(pattern), matches


def _glob(pattern: str) -> re.Pattern[str]:
    """The paths that a glob matches, and all below them."""
    out: list[str] = []
    for token in re.split(r"((?:^|(?<=/))\*\*/|\*\*|\*|\?|\[[^\]]*\])", pattern):
        match token:
            case "**/":  # no component, or several
                out.append("(?:.*/)?")
            case "**":
                out.append(".*")
            case "*":
                out.append("[^/]*")
            case "?":
                out.append("[^/]")
            case _ if token.startswith("[") and token.endswith("]"):
                out.append(fnmatch.translate(token)[4:-3])
            case _:
                out.append(re.escape(token))
    body = "".join(out)
    if "[" in pattern:  # a path whose keys have brackets can be written as it is
        body += f"|{re.escape(pattern)}"
    return re.compile(f"(?s:(?:{body})(?:/.*)?)")


def renamed(rename: Rename | None, paths: Collection[str]) -> list[str]:
    """Saved paths → wanted paths. A mapping names leaves or containers; the longest name that fits is used.

    Raises InputError if `rename` is something else, and TreeError if a name fits no path, or two leaves get one path.
    """
    if rename is None:
        return list(paths)
    if callable(rename):
        new = [_new_path(rename, path) for path in paths]
    else:
        mapping = _checked_mapping(rename)
        new = [_moved(mapping, path) for path in paths]
        unused = mapping.keys() - {head for path in paths for head in _heads(path)}
        if unused and paths:
            raise TreeError(_unmatched("rename", map(repr, sorted(unused)), paths, "the checkpoint"))
    if len(set(new)) != len(new):
        olds: dict[str, str] = {}
        for old, path in zip(paths, new, strict=True):
            if path in olds:
                raise TreeError(f"rename= gives {show(olds[path])} and {show(old)} the same path {path!r}")
            olds[path] = old
    return new


def origins(rename: Rename | None, path: str) -> list[str] | None:
    """The saved paths that `rename` would turn into `path`; None if nobody can know, because it is a function."""
    if rename is None:
        return [path]
    if callable(rename):
        return None
    tails = [(old, _below(new, path)) for old, new in rename.items()]
    candidates = [path, *(_joined(old, tail) for old, tail in tails if tail is not None)]
    return [old for old in dict.fromkeys(candidates) if _moved(rename, old) == path]


def _new_path(rename: Callable[[str], str], path: str) -> str:
    """What a `rename` function says about a path."""
    new = rename(path)
    if not isinstance(new, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"rename returned {reprlib.repr(new)} for leaf {show(path)}; expected a path, a str")
    _require_components(path, new)
    return str.__str__(new)


def _require_components(old: str, new: str) -> None:
    """Raise TreeError if a new path has an empty component: no key is written so."""
    if new and "" in new.split("/"):
        raise TreeError(
            f"rename gives {show(old)} the path {new!r}, which has an empty component; the empty key is written '~2'"
        )


def _checked_mapping(rename: object) -> Mapping[str, str]:
    if not isinstance(rename, Mapping):
        raise InputError(
            "rename must be a mapping of saved paths to wanted paths, or a function of the saved path, found"
            f" {_in_short(rename)}"
        )
    mapping = cast("Mapping[object, object]", rename)
    for old, new in mapping.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise InputError(f"rename maps {_in_short(old)} to {_in_short(new)}; both must be paths, str")
        _require_components(old, new)
    return cast("Mapping[str, str]", mapping)


def _moved(mapping: Mapping[str, str], path: str) -> str:
    """A path with the longest head that the mapping has replaced by what it is mapped to."""
    for head in _heads(path):
        if head in mapping:
            return _joined(mapping[head], _below(head, path) or "")
    return path


def _heads(path: str) -> Iterator[str]:
    """A path and those of the containers above it, from the longest to the tree itself."""
    yield path
    while path:
        path = path.rpartition("/")[0]
        yield path


def _below(head: str, path: str) -> str | None:
    """What of a path comes after a head; None if it does not lie there or below."""
    if path == head:
        return ""
    if not head:
        return path
    return path[len(head) + 1 :] if path.startswith(f"{head}/") else None


def _joined(head: str, tail: str) -> str:
    return f"{head}/{tail}" if head and tail else head or tail


def _unmatched(what: str, entries: Iterable[str], paths: Collection[str], where: str) -> str:
    """That entries of an argument match nothing, with hints."""
    texts = list(entries)
    known = dict.fromkeys(head for path in paths for head in _heads(path) if head)
    # Finding a hint takes a look at every path.
    hints = [closest(text.strip("'\""), known) if number < 3 else "" for number, text in enumerate(texts)]
    lines = [
        f"{text} matches none of the {counted(len(paths), 'leaf')} of {where}{hint}"
        for text, hint in zip(texts, hints, strict=True)
    ]
    return f"{what}: {lines[0]}" if len(lines) == 1 else f"{what} has entries that match nothing:\n{listing(lines)}"


# Leaves that are no arrays --------------------------------------------------------------------------------


def encode_float(value: float) -> str:
    """A float as text that comes back bit for bit: repr, or the IEEE 754 bits of what repr cannot tell apart."""
    return repr(value) if math.isfinite(value) else f"0x{struct.pack('>d', value).hex()}"


def decode_float(text: str) -> float:
    if not text.startswith("0x"):
        return float(text)
    if len(text) != 18:
        raise ValueError(f"{text[:40]!r} is no float of 64 bits")
    return struct.unpack(">d", bytes.fromhex(text[2:]))[0]


def decode_int(text: str) -> int:
    # Hexadecimal beyond 64 bits: decimal takes quadratic time.
    if len(text) > 20 and not text.startswith(("0x", "-0x")):
        raise ValueError(f"{text[:40]!r}… is no integer: those beyond 64 bits are hexadecimal")
    return int(text, 0)


def encode_value(value: object) -> tuple[str, str] | None:
    """(kind, text) of a leaf small enough to be stored in the manifest; None for one that is stored as an array."""
    match value:
        case np.generic():
            return None
        case bool():
            return "bool", str(value).lower()
        case int():
            return "int", str(value) if abs(value) < 1 << 63 else hex(value)
        case float():
            return "float", encode_float(value)
        case complex():
            return "complex", f"{encode_float(value.real)} {encode_float(value.imag)}"
        case str() if len(value) <= INLINE_BYTES and is_utf8(value):
            return "str", value
        case bytes() if len(value) <= INLINE_BYTES:
            return "bytes", base64.b64encode(value).decode()
        case _:
            return None


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON could not carry it
        return False
    return True


def decode_value(kind: str, text: str) -> object:
    """The leaf back from its text. Raises ValueError where the text is malformed."""
    match kind:
        case "bool" if text in ("true", "false"):
            return text == "true"
        case "int":
            return decode_int(text)
        case "float":
            return decode_float(text)
        case "complex":
            real, imag = text.split(" ")
            return complex(decode_float(real), decode_float(imag))
        case "str":
            return text
        case "bytes":
            return base64.b64decode(text, validate=True)
        case _:
            raise ValueError(f"{text[:40]!r} is no value of kind {kind!r}")


# Dtypes ---------------------------------------------------------------------------------------------------

# What Zarr v3's core specification defines is stored as itself; any other dtype as unsigned integers of its width,
# which every Zarr reader opens and which keeps every bit.
_CORE = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_EXTENDED = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
]

DTYPES: Mapping[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _CORE},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED if hasattr(ml_dtypes, name)},
}
"""Every dtype that can be stored, by name."""


@functools.lru_cache(maxsize=1024)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """A dtype's name, remembered: NumPy spells it anew each time, which takes 3 µs."""
    return dtype.name


@functools.cache
def key_dtype(impl: str) -> Any:
    """The dtype of PRNG keys of an implementation. Raises ValueError if JAX has none of that name."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def stored_dtype(name: str) -> str:
    """The Zarr data type that holds dtype `name` on disk."""
    return name if name in _CORE else f"uint{8 * DTYPES[name].itemsize}"


MAX_RANK = 30
"""Most dimensions of a leaf: tensorstore's 32, less one for rows and one of the index of an object."""


@functools.cache
def lossless(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether every value of `source` is a value of `target`.

    NumPy's "safe" is another thing: it takes int64 to float64, and ml_dtypes' own rules take int8 to float8. Here the
    types of one and two bytes are simply tried out, value by value; the wider ones are compared by range and digits.
    """
    if source == target:
        return True
    if source.itemsize <= 2 and source.kind != "c":
        return _survives(source, target)
    if target.kind == "c":
        return (
            lossless(source, np.dtype("f4" if target.itemsize == 8 else "f8"))
            if source.kind != "c"
            else (target.itemsize >= source.itemsize)
        )
    if source.kind == "c" or target.itemsize < source.itemsize:
        return False
    if source.kind in "iu" and target.kind in "iu":
        low, high = np.iinfo(source), np.iinfo(target)
        return high.min <= low.min and low.max <= high.max
    if source.kind in "iu" and target.kind == "f":
        return np.iinfo(source).bits - (source.kind == "i") <= np.finfo(target).nmant + 1
    return source.kind == "f" and target.kind == "f"


def _survives(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether each value of a narrow type comes back from `target`, signs of zero included."""
    if source.name.removeprefix("u") in ("int2", "int4"):
        info = ml_dtypes.iinfo(source)
        values = np.arange(info.min, info.max + 1).astype(source)
    elif source.kind == "b":
        values = np.array([False, True])
    else:
        values = np.arange(1 << 8 * source.itemsize, dtype=f"u{source.itemsize}").view(source)
    if source.name == "float4_e2m1fn":
        values = values[:16]
    try:
        with np.errstate(all="ignore"):
            there = values.astype(target)
            # Through float64, which holds each of them: a type that has no NaN or no sign must not hide it.
            before, after = values.astype(np.float64), there.astype(np.complex128).real
    except (TypeError, ValueError):
        return False
    same_sign = np.isnan(before) | (np.signbit(before) == np.signbit(after))
    return bool(np.array_equal(before, after, equal_nan=True) and same_sign.all())
