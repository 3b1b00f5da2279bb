"""Trees as paths and as JSON: every container, key and value is restored exactly, and hostile input is refused."""

from __future__ import annotations

import collections
import difflib
import enum
import functools
import itertools
import json
import math
import re
import struct
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt
from jaxckpt._arguments import pytree as _pytree
from jaxckpt._model import dtypes as _dtypes
from jaxckpt._model import paths as _paths
from jaxckpt._model import select as _select
from jaxckpt._model import tree as _tree
from jaxckpt._model import values as _values
from jaxckpt.errors import TreeError

to_json = msgspec.json.encode


def from_json(text: bytes | str) -> _tree.Structure:
    return msgspec.json.decode(text, type=_tree.Structure)


class Mark:
    """A leaf that is equal only to itself."""


@given(st.recursive(st.one_of(st.builds(Mark), st.none()), strategies.containers, max_leaves=15))
def test_a_tree_comes_back_from_json_with_its_leaves_in_order(tree: Any) -> None:
    leaves, structure = _pytree.flatten(tree)
    back = _tree.unflatten(from_json(to_json(structure)), [leaf.value for leaf in leaves])
    assert strategies.shape_of(back) == strategies.shape_of(tree)
    in_order = jax.tree.leaves(tree)
    assert all(one is other for one, other in zip(jax.tree.leaves(back), in_order, strict=True))
    assert all(leaf.value is other for leaf, other in zip(leaves, in_order, strict=True)), "leaves are in JAX's order"
    assert len({leaf.path for leaf in leaves}) == len(leaves)
    paths = [leaf.path for leaf in leaves]
    assert _tree.paths_of(structure, len(paths), sum(map(len, paths))) == (paths, list(range(len(leaves))))


@given(st.recursive(st.builds(Mark), strategies.containers, max_leaves=15))
def test_every_path_identifies_its_leaf(tree: Any) -> None:
    leaves, structure = _pytree.flatten(tree)
    for number, leaf in enumerate(leaves):
        assert _tree.subtree(structure, leaf.path) == number or leaf.path == ""


awkward = st.text(st.sampled_from("~/012a"), max_size=4)


@given(st.one_of(st.text(), awkward), st.one_of(st.text(), awkward))
def test_different_keys_have_different_texts_without_a_slash(one: str, other: str) -> None:
    assert (_paths.escape_key(one) == _paths.escape_key(other)) == (one == other)
    assert "/" not in _paths.escape_key(one)
    assert _paths.escape_key(one), "'' is the path of the tree itself"


@given(st.dictionaries(awkward, st.dictionaries(awkward, st.builds(Mark), min_size=1), min_size=1))
def test_nested_dicts_come_back_from_their_paths(tree: Any) -> None:
    leaves, _ = _pytree.flatten(tree)
    assert _tree.nested_dicts({leaf.path: leaf.value for leaf in leaves}) == tree


keys = st.recursive(
    st.one_of(
        st.text(max_size=5),
        st.integers(-(1 << 63) + 1, (1 << 63) - 1),
        st.booleans(),
        st.binary(max_size=5),
        st.floats(allow_nan=False),
    ),
    lambda below: st.lists(below, max_size=3).map(tuple),
    max_leaves=4,
)


@given(keys)
def test_a_key_of_any_type_comes_back(key: Any) -> None:
    (leaf,), structure = _pytree.flatten({key: Mark()})
    (back,) = _tree.unflatten(from_json(to_json(structure)), [leaf.value])
    assert typed(back) == typed(key)


def typed(key: Any) -> Any:
    """A key with its types, so that 1, 1.0 and True differ, and so do -0.0 and 0.0."""
    if isinstance(key, tuple):
        return tuple(map(typed, key))
    return type(key), struct.pack(">d", key) if isinstance(key, float) else key


@pytest.mark.parametrize("key", [frozenset(), object, 1 << 63, "\ud800", (1, None), 1j])
def test_a_key_without_a_text_is_refused(key: Any) -> None:
    with pytest.raises(TreeError, match="keys may be"):
        _pytree.flatten({"a": {key: 1}})


def test_keys_with_the_same_text_are_refused_by_path() -> None:
    tree = {"x": collections.OrderedDict([(1, "int"), ("1", "str"), ("a~1b", 0)])}
    with pytest.raises(TreeError, match=r"(?s)share a path.*'x/1'"):
        _pytree.flatten(tree)


def test_keys_that_jax_cannot_order_are_refused_by_path() -> None:
    for unordered in ({1: 0, "a": 0}, collections.defaultdict(int, {1: 0, "a": 0})):
        with pytest.raises(TreeError, match=r"^the keys of the dict at 'x' are of different types: int, str\."):
            _pytree.flatten({"x": unordered})
    with pytest.raises(TreeError, match=r"^JAX cannot flatten 'x' \(dict\): .*[^.]$"):
        _pytree.flatten({"x": {1j: 0, 2j: 0}})


def test_only_very_deep_trees_are_refused() -> None:
    def nest(depth: int) -> Any:
        tree: Any = 1
        for _ in range(depth):
            tree = [tree]
        return tree

    _, structure = _pytree.flatten(nest(_tree.MAX_DEPTH))
    assert _tree.paths_of(structure, 1, 2 * _tree.MAX_DEPTH - 1) == (["/".join("0" * _tree.MAX_DEPTH)], [0])
    with pytest.raises(TreeError, match="nested deeper than 200"):
        _pytree.flatten(nest(_tree.MAX_DEPTH + 1))
    with pytest.raises(ValueError, match="nested deeper than 200"):
        _tree.paths_of(_tree.Container(type="list", children=(structure,)), 1, 1000)


@pytest.mark.parametrize("most", [(1 << 20, 1 << 26), (1000, 1 << 60)], ids=["characters", "leaves"])
def test_more_paths_than_allowed_are_not_built(most: tuple[int, int]) -> None:
    """A key of one megabyte above a million leaves: the paths would take a terabyte."""
    leaves = _tree.Container(type="list", children=tuple(range(1_000_000)))
    structure = _tree.Container(type="dict", keys=("k" * (1 << 20),), children=(leaves,))
    tracemalloc.start()
    with pytest.raises(ValueError, match="more leaves, or longer paths, than"):
        _tree.paths_of(structure, *most)
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()


# Containers -----------------------------------------------------------------------------------------------


class WithFields(NamedTuple):
    inner_state: Any
    count: Any


Renamed = collections.namedtuple("Renamed", ["ok", "class", "ok"], rename=True)


@pytest.mark.parametrize("tree", [WithFields({}, None), WithFields((), [1]), Renamed(1, 2, 3)])
def test_a_namedtuple_is_rebuilt_with_its_name_and_fields(tree: Any) -> None:
    leaves, structure = _pytree.flatten(tree)
    back = _tree.unflatten(structure, [leaf.value for leaf in leaves])
    assert type(back).__name__ == type(tree).__name__
    assert back._fields == tree._fields
    assert tuple(back) == tuple(tree)
    again = _tree.unflatten(structure, [leaf.value for leaf in leaves])
    assert jax.tree.structure(again) == jax.tree.structure(back), "two restored trees have one structure"


def test_an_optimizer_state_is_rebuilt_level_by_level() -> None:
    transform = optax.chain(optax.clip(1.0), optax.adamw(1e-3), optax.trace(0.9))
    state = transform.init({"w": jnp.ones(3)})
    leaves, structure = _pytree.flatten(state)
    back = _tree.unflatten(structure, [leaf.value for leaf in leaves])
    assert strategies.shape_of(back) == strategies.shape_of(state)
    assert "1/0/mu/w" in {leaf.path for leaf in leaves}


@flax.struct.dataclass
class FlaxState:
    params: Any
    step: Any
    name: str = flax.struct.field(pytree_node=False, default="n")


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    kernel: Any
    bias: Any


class Keyless:
    """A node that is registered without keys. Its children are numbered."""

    def __init__(self, *children: Any) -> None:
        self.children = children


jax.tree_util.register_pytree_node(Keyless, lambda node: (node.children, None), lambda _, children: Keyless(*children))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (FlaxState({"w": 1}, 2), {"params": {"w": 1}, "step": 2}),
        (Registered(1, (2,)), {"kernel": 1, "bias": (2,)}),
        (Keyless(1, [2]), {0: 1, 1: [2]}),
        (collections.defaultdict(int, {"b": 1, "a": 2}), {"a": 2, "b": 1}),
    ],
)
def test_a_registered_node_comes_back_as_a_dict_of_its_keys(tree: Any, expected: Any) -> None:
    leaves, structure = _pytree.flatten({"node": tree})
    assert structure.children[0].type == "custom"
    assert _tree.unflatten(from_json(to_json(structure)), [leaf.value for leaf in leaves]) == {"node": expected}


class Static(NamedTuple):
    w: Any
    name: str


class Reordered(NamedTuple):
    a: Any
    b: Any


class Numbered(NamedTuple):
    a: Any
    b: Any


attribute = jax.tree_util.GetAttrKey
jax.tree_util.register_pytree_with_keys(
    Static, lambda node: (((attribute("w"), node.w),), node.name), lambda name, children: Static(children[0], name)
)
jax.tree_util.register_pytree_with_keys(
    Reordered,
    lambda node: (((attribute("b"), node.b), (attribute("a"), node.a)), None),
    lambda _, children: Reordered(children[1], children[0]),
)
jax.tree_util.register_pytree_node(Numbered, lambda node: (tuple(node), None), lambda _, children: Numbered(*children))
Generic = collections.namedtuple("Generic", ["a", "b"])
Generic.__name__ = Generic.__qualname__ = "Generic[float32]"


class Underscored(tuple):
    """A tuple that JAX treats as a namedtuple, with fields that no namedtuple can have."""

    _fields = ("_a", "b")

    def __new__(cls, *children: Any) -> Any:
        return super().__new__(cls, children)


class Keyed:
    """A registered node with any keys."""

    def __init__(self, keys: list[Any], children: list[Any]) -> None:
        self.keys, self.children = keys, children


jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda node: (list(zip(map(jax.tree_util.DictKey, node.keys), node.children, strict=True)), tuple(node.keys)),
    lambda keys, children: Keyed(list(keys), list(children)),
)


W = 2.5


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (Static(W, "n"), {"w": W}),
        (Reordered(1, W), {"b": W, "a": 1}),
        (Numbered(1, W), {0: 1, 1: W}),
        (Generic(1, W), {"a": 1, "b": W}),
        (Underscored(1, W), {"_a": 1, "b": W}),
        (Keyed(["x", "y"], [1, W]), {"x": 1, "y": W}),
        (Keyed([jnp.array, "y"], [1, W]), None),
        (Keyed(["x", "x"], [None, W]), None),
        (Keyed([1, True], [2, W]), None),
        (Keyed(["x", "x"], [{"a": 1}, {"b": W}]), None),
    ],
    ids=lambda value: "Keyed" if isinstance(value, Keyed) else str(value),  # an address differs in each run
)
def test_an_unusual_node_is_saved_readably_or_refused_by_path(tree: Any, expected: Any, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"old": 1})
    if expected is None:
        with pytest.raises(TreeError, match="the container at 'node'"):
            jaxckpt.save(tmp_path / "c", {"node": tree}, overwrite=True)
        assert jaxckpt.load_numpy(tmp_path / "c") == {"old": 1}
        return
    jaxckpt.save(tmp_path / "c", {"node": tree}, overwrite=True)
    assert jaxckpt.load_numpy(tmp_path / "c") == {"node": expected}
    restored = jaxckpt.restore(tmp_path / "c", {"node": tree})
    assert jax.tree.structure(restored) == jax.tree.structure({"node": tree})
    assert jax.tree.leaves(restored) == jax.tree.leaves({"node": tree})


ODD_KEYS = st.one_of(keys, st.sampled_from([1, True, 1.0, "1", (1,), "", "~", -0.0, 0, math.nan, np.float32(1), None]))


def odd_nodes(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(ODD_KEYS, below), max_size=3)
    return st.one_of(
        strategies.containers(below),
        pairs.map(lambda found: Keyed([key for key, _ in found], [child for _, child in found])),
        pairs.map(collections.OrderedDict),
        *(st.builds(kind, below, below) for kind in (Static, Reordered, Numbered, Generic, Underscored)),
    )


@given(st.recursive(st.one_of(st.builds(Mark), st.none()), odd_nodes, max_leaves=10))
def test_a_tree_that_is_not_refused_can_be_read(tree: Any) -> None:
    try:
        leaves, structure = _pytree.flatten(tree)
    except TreeError:
        return
    back, paths = from_json(to_json(structure)), [leaf.path for leaf in leaves]
    assert _tree.paths_of(back, len(paths), sum(map(len, paths))) == (paths, list(range(len(leaves))))
    _tree.unflatten(back, [leaf.value for leaf in leaves])  # JAX may not be able to order the keys of such a dict


class Real(float, enum.Enum):
    HALF = 0.5


class Text(str):
    """Text that is equal only to itself."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def nested_key(depth: int) -> Any:
    return functools.reduce(lambda key, _: (key,), range(depth), "k")


@pytest.mark.parametrize(
    ("keys", "back"),
    [
        ([Real.HALF], [0.5]),
        ([np.float64(0.5), np.str_("a")], [0.5, "a"]),
        ([nested_key(40)], [nested_key(40)]),
        ([Generic(1, "x")], [(1, "x")]),
        ([nested_key(41)], None),
        ([nested_key(300)], None),
        (list(itertools.product((-1, -2), repeat=7)), None),  # 128 keys with the same hash
        ([Text("a"), Text("a")], None),
        ([math.nan, float("nan")], None),
        (["\ud800"], None),
    ],
    ids=lambda keys: repr(keys)[:30],
)
def test_unusual_keys_are_saved_readably_or_refused_by_path(keys: list[Any], back: Any, tmp_path: Path) -> None:
    tree = {"at": collections.OrderedDict((key, number) for number, key in enumerate(keys))}
    for _ in range(_tree.MAX_DEPTH - 2):
        tree = {"a": tree}
    if back is None:
        with pytest.raises(TreeError, match=r"a/at'|share a path"):
            jaxckpt.save(tmp_path / "c", tree)
        assert not (tmp_path / "c").exists()
        return
    jaxckpt.save(tmp_path / "c", tree)
    found = jaxckpt.load_numpy(tmp_path / "c")
    for _ in range(_tree.MAX_DEPTH - 2):
        found = found["a"]
    assert [typed(key) for key in found["at"]] == [typed(key) for key in back]
    assert jaxckpt.restore(tmp_path / "c", tree) is not None


def test_a_manifest_that_no_reader_accepts_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "c", {"old": 1})
    flatten = _pytree.flatten

    def broken(tree: Any, **how: Any) -> Any:
        leaves, structure = flatten(tree, **how)
        return leaves, msgspec.structs.replace(structure, keys=("x",) * len(leaves))

    monkeypatch.setattr("jaxckpt._save.describe.flatten", broken)
    with pytest.raises(jaxckpt.errors.InputError, match=r"(?s)no reader would accept.*is not a record of a container"):
        jaxckpt.save(tmp_path / "c", {"a": 1, "b": np.ones(3)}, overwrite=True)
    assert jaxckpt.load_numpy(tmp_path / "c") == {"old": 1}
    assert len(list(tmp_path.glob("c/*"))) == 2


def test_an_ordered_dict_keeps_its_order_and_a_dict_is_sorted_as_jax_sorts_it() -> None:
    ordered = collections.OrderedDict([("b", 1), ("a", 2)])
    leaves, structure = _pytree.flatten({"z": ordered, "d": {"b": 3, "a": 4}})
    assert [leaf.path for leaf in leaves] == ["d/a", "d/b", "z/b", "z/a"]
    back = _tree.unflatten(structure, [leaf.value for leaf in leaves])
    assert back["z"] == ordered
    assert type(back["z"]) is collections.OrderedDict


@pytest.mark.parametrize("tree", [{}, [], (), None, {"a": {}, "b": [(), None]}, collections.OrderedDict()])
def test_empty_containers_stay(tree: Any) -> None:
    leaves, structure = _pytree.flatten(tree)
    assert leaves == []
    back = _tree.unflatten(from_json(to_json(structure)), [])
    assert back == tree
    assert type(back) is type(tree)


def test_unselected_leaves_leave_no_trace_in_dicts_and_none_in_sequences() -> None:
    tree = {"a": {"x": 1, "y": 2}, "b": [3, 4], "c": {"z": 5}, "empty": {}, "none": None}
    leaves, structure = _pytree.flatten(tree)
    kept = {number: number for number, leaf in enumerate(leaves) if leaf.value in (2, 4)}
    values = {number: leaves[number].value for number in kept}
    pruned = _tree.prune(structure, kept)
    assert _tree.unflatten(pruned, values) == {"a": {"y": 2}, "b": [None, 4], "empty": {}, "none": None}
    pruned = _tree.prune(structure, {1: 0, 3: 1})
    assert _tree.unflatten(pruned, [2, 4]) == {"a": {"y": 2}, "b": [None, 4], "empty": {}, "none": None}
    assert _tree.prune(0, {}) is None


def test_empty_containers_that_are_not_kept_leave_no_trace_in_dicts_and_none_in_sequences() -> None:
    tree = {"a": {"x": 1, "y": {}}, "b": [2, (), None], "c": {"d": {}, "e": ()}, "empty": {}, "none": None}
    leaves, structure = _pytree.flatten(tree)
    values = [leaf.value for leaf in leaves]
    kept = {0: 0, 1: 1}

    def pruned(*paths: str) -> Any:
        return _tree.unflatten(_tree.prune(structure, kept, lambda path: path in paths), values)

    assert pruned() == {"a": {"x": 1}, "b": [2, None, None]}
    assert pruned("a/y", "b/1", "c/d", "none") == {
        "a": {"x": 1, "y": {}},
        "b": [2, (), None],
        "c": {"d": {}},
        "none": None,
    }
    assert [*_tree.empty_positions(structure)] == [
        ("a/y", "an empty dict"),
        ("b/1", "an empty tuple"),
        ("b/2", "None"),
        ("c/d", "an empty dict"),
        ("c/e", "an empty tuple"),
        ("empty", "an empty dict"),
        ("none", "None"),
    ]


# Hostile structures ---------------------------------------------------------------------------------------

GOOD = {"type": "namedtuple", "name": "Pair", "keys": ["left", "right"], "children": [0, 1]}
HOSTILE = [
    True,
    1.5,
    "leaf",
    [],
    {},
    {"type": "list"},
    {"type": "list", "children": 3},
    {"type": "list", "children": [0], "keys": [0]},
    {"type": "set", "children": [0]},
    {"type": ["list"], "children": [0]},
    {"type": "dict", "keys": ["a"], "children": []},
    {"type": "dict", "keys": [], "children": [0]},
    {"type": "dict", "keys": ["a", "a"], "children": [0, 1]},
    {"type": "dict", "keys": [1, {"bool": True}], "children": [0, 1]},
    {"type": "dict", "keys": [None], "children": [0]},
    {"type": "dict", "keys": [1.5], "children": [0]},
    {"type": "dict", "keys": [["a"]], "children": [0]},
    {"type": "dict", "keys": [True], "children": [0]},
    {"type": "dict", "keys": [{"bool": 1}], "children": [0]},
    {"type": "dict", "keys": [{"float": 1.5}], "children": [0]},
    {"type": "dict", "keys": [{"float": "0x00"}], "children": [0]},
    {"type": "dict", "keys": [{"float": "__import__('os')"}], "children": [0]},
    {"type": "dict", "keys": [{"bytes": "###"}], "children": [0]},
    {"type": "dict", "keys": [{"tuple": [None]}], "children": [0]},
    {"type": "dict", "keys": [{"pickle": "gASVAAAA"}], "children": [0]},
    {"type": "dict", "keys": ["a"], "children": [0], "name": "x"},
    {"type": "custom", "keys": ["a"], "children": [0]},
    {**GOOD, "name": "import"},
    {**GOOD, "name": "a, b); import os #"},
    {**GOOD, "name": "Pair\n"},
    {**GOOD, "keys": ["left", "left"]},
    {**GOOD, "keys": ["left", "right)"]},
    {**GOOD, "keys": ["left", 1]},
    {**GOOD, "keys": ["left", ["right"]]},
    {**GOOD, "keys": ["left"]},
    {**GOOD, "more": 1},
    {**GOOD, "children": {"left": 0}},
]


@pytest.mark.parametrize("structure", HOSTILE, ids=str)
def test_a_malformed_structure_is_a_value_error(structure: Any) -> None:
    with pytest.raises(
        ValueError, match=r"is not a (record of a container|key)|float|base64|Invalid|decod|Expected|Object"
    ):
        _tree.paths_of(from_json(json.dumps({"type": "list", "children": [2, structure]})), 10, 1000)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=4)),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["list", "tuple", "dict", "ordered_dict", "namedtuple", "custom", "set"])},
            optional={
                "children": st.lists(below, max_size=3),
                "keys": st.lists(st.one_of(st.sampled_from(["a", "b", 0]), below), max_size=3),
                "name": st.one_of(st.sampled_from(["Pair", "class"]), below),
            },
        ),
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_a_tree_or_a_value_error(record: Any) -> None:
    try:
        structure = from_json(json.dumps(record))
        _, numbers = _tree.paths_of(structure, 100, 1000)
    except ValueError:
        return
    values = [Mark() for _ in range(4)]
    if all(0 <= number < 4 for number in numbers):
        back = _tree.unflatten(structure, values)
        assert {id(leaf) for leaf in jax.tree.leaves(back)} == {id(values[number]) for number in numbers}


# Values ---------------------------------------------------------------------------------------------------

any_float = st.integers(0, (1 << 64) - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0])
values = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 3000), 1 << 3000),
    any_float,
    st.floats(),
    st.builds(complex, any_float, any_float),
    st.text(),
    st.binary(),
    st.sampled_from(
        [-0.0, 0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 1 << 63, -(1 << 63), 10**5000, "", b""]
    ),
)


@given(values)
def test_every_python_value_comes_back_from_json_bit_for_bit(value: Any) -> None:
    encoded = _values.encode_value(value)
    assert encoded is not None
    kind, text = json.loads(json.dumps(encoded))
    back = _values.decode_value(kind, text)
    assert strategies.raw(back) == strategies.raw(value)
    assert _values.encode_value(back) == encoded, "each value has one encoding"


@pytest.mark.parametrize(
    "value",
    [
        "\ud800",
        "a" * (_values.INLINE_BYTES + 1),
        b"a" * (_values.INLINE_BYTES + 1),
        np.float64(1),
        np.bool_(True),
        np.str_("x"),
        np.int32(1),
        None,
        [1],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_other_values_are_not_written_into_the_manifest(value: Any) -> None:
    assert _values.encode_value(value) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("bool", "True"), ("bool", "1"), ("int", ""), ("int", "1.5"), ("int", "x"), ("float", ""), ("float", "0x1"),
        ("float", "0x" + "g" * 16), ("complex", "1.0"), ("complex", "1.0 2.0 3.0"), ("bytes", "é"), ("bytes", "a"),
        ("pickle", "gASVAAAA"), ("jax", "1"), ("", ""),
    ],
)  # fmt: skip
def test_a_malformed_value_is_a_value_error(kind: str, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of several parsers may refuse it
        _values.decode_value(kind, text)


# Dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _dtypes.DTYPES)
def test_a_dtype_is_stored_in_one_of_the_same_width(name: str) -> None:
    assert _dtypes.DTYPES[name].name == name
    assert np.dtype(_dtypes.stored_dtype(name)).itemsize == _dtypes.DTYPES[name].itemsize


def test_every_dtype_that_jax_computes_with_can_be_stored() -> None:
    scalar_types = [value for value in vars(jnp).values() if isinstance(value, type(jnp.float32))]
    narrowest = re.compile("u?int1|float6_.*")  # JAX 0.10 barely supports these; they are refused
    found = {value.dtype.name for value in scalar_types}
    assert {"float32", "bfloat16", "int4", "complex128", "bool"} <= found
    assert {name for name in found if not narrowest.fullmatch(name)} <= set(_dtypes.DTYPES)


WIDE = [name for name, dtype in _dtypes.DTYPES.items() if dtype.itemsize > 2]


@given(st.sampled_from(WIDE), st.sampled_from(list(_dtypes.DTYPES)), st.integers(0, 99))
def test_a_cast_counts_as_lossless_only_if_values_survive(source: str, target: str, seed: int) -> None:
    dtype = _dtypes.DTYPES[source]
    if not _dtypes.is_lossless(dtype, _dtypes.DTYPES[target]):
        assert source != target
        return
    values = strategies.bits(dtype, (64,), seed)
    if dtype.kind in "iu":
        values[:2] = np.iinfo(dtype).max, np.iinfo(dtype).max - 1
    with np.errstate(all="ignore"):  # signaling NaNs
        there = values.astype(_dtypes.DTYPES[target])
    back = there.real if there.dtype.kind == "c" and dtype.kind != "c" else there
    with np.errstate(all="ignore"):
        assert np.array_equal(back.astype(dtype), values, equal_nan=dtype.kind in "fc")
    if dtype.kind in "iu":
        assert [int(value.real) for value in there.tolist()] == values.tolist()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "float64"), ("float16", "float32"), ("bfloat16", "float32"), ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float16"), ("float4_e2m1fn", "float8_e4m3fn"), ("int4", "int8"), ("uint8", "int16"),
        ("int8", "bfloat16"), ("int16", "float32"), ("int32", "float64"), ("uint32", "int64"), ("int32", "int64"),
        ("bool", "int8"), ("bool", "float32"), ("float32", "complex64"), ("float64", "complex128"),
        ("complex64", "complex128"), ("int32", "complex128"),
    ],
)  # fmt: skip
def test_lossless_casts_are_recognized(source: str, target: str) -> None:
    assert _dtypes.is_lossless(_dtypes.DTYPES[source], _dtypes.DTYPES[target])


# Choosing and renaming ------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(exclude_characters="*?["), max_size=5), min_size=1, max_size=4))
def test_a_plain_path_selects_only_its_leaf_and_those_below_it(parts: list[str]) -> None:
    path = "/".join(map(_paths.escape_key, parts))
    for head in strategies.ancestors(path):
        assert _select.parse_select(head)(path)
    assert not _select.parse_select(path)(f"{path}x")
    assert not _select.parse_select(f"{path}/x")(path)


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("params", {"params/a.b/w", "params/a.b/b", "params/axb/w"}),
        ("params/*/w", {"params/a.b/w", "params/axb/w"}),
        ("params/a.b/w", {"params/a.b/w"}),
        ("*/w", set()),
        ("**/w", {"params/a.b/w", "params/axb/w"}),
        ("params/a?b", {"params/a.b/w", "params/a.b/b", "params/axb/w"}),
        ("params/*/[bc]", {"params/a.b/b"}),
        ("params/*/[!b]", {"params/a.b/w", "params/axb/w"}),
        ("params[!x]a.b", set()),
        ("params/a[.]b", {"params/a.b/w", "params/a.b/b"}),
        (re.compile("params/.*/b|step"), {"params/a.b/b", "step"}),
        (["step", re.compile(".*axb.*")], {"step", "params/axb/w"}),
        (lambda path: path.endswith("w"), {"params/a.b/w", "params/axb/w"}),
        ("", set()),
        ([], set()),
    ],
)
def test_globs_expressions_and_functions_select(pattern: Any, chosen: set[str]) -> None:
    selected = _select.parse_select(pattern)
    assert {path for path in ["params/a.b/w", "params/a.b/b", "params/axb/w", "step"] if selected(path)} == chosen


@pytest.mark.parametrize(
    ("rename", "path", "expected"),
    [
        ({"a": "x"}, "a", "x"),
        ({"a": "x"}, "a/b", "x/b"),
        ({"a": "x"}, "ab", "ab"),
        ({"a": "x", "a/b": "y"}, "a/b/c", "y/c"),
        ({"a": ""}, "a/b", "b"),
        (str.upper, "a/b", "A/B"),
        (None, "a", "a"),
    ],
)
def test_renames_move_leaves_and_containers(rename: Any, path: str, expected: str) -> None:
    others = {"a/0", "a/b/0"} - {path}  # each name of the mapping must exist
    assert _select.rename_paths(rename, [path, *others])[0] == expected


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)


@given(
    st.lists(PATHS, min_size=1, max_size=5, unique=True),
    st.lists(st.one_of(PATHS, st.sampled_from(["**", "*", "*/b", "a/?"])), min_size=1, max_size=3),
)
def test_each_entry_of_a_select_must_match(paths: list[str], select: list[str]) -> None:
    tests = [_select.parse_select(entry) for entry in select]
    unused = [entry for entry, test in zip(select, tests, strict=True) if not any(map(test, paths))]
    if unused:
        count = len(paths)
        what = f"matches none of the {count} leaves" if count > 1 else f"does not match {paths[0]!r}, the only leaf"
        with pytest.raises(TreeError, match=re.escape(f"{unused[0]!r} {what}")):
            _select.parse_select(select).choose(paths)
    else:
        assert _select.parse_select(select).choose(paths) == [any(test(path) for test in tests) for path in paths]


def test_renamed_leaves_form_nested_dicts_unless_one_is_below_another() -> None:
    assert _tree.nested_dicts({"a/b~1c": 1, "a/~0": 2}) == {"a": {"b/c": 1, "~": 2}}
    assert _tree.nested_dicts({"": 1}) == 1
    for clash in ({"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}):
        with pytest.raises(TreeError, match="after rename"):
            _tree.nested_dicts(clash)


def test_similar_paths_are_suggested_for_a_mistyped_one() -> None:
    assert _paths.closest_hint("params/kernal", ["params/kernel", "step"]) == "; did you mean 'params/kernel'?"
    assert _paths.closest_hint("PARAMS/KERNAL", ["params/kernel", "step"]) == "; did you mean 'params/kernel'?"
    assert _paths.closest_hint("w", ["W", "w2"]) == "; did you mean 'W'?"
    assert _paths.closest_hint("w", ["w1", "w2"]) == "; did you mean 'w1' or 'w2'?"
    assert _paths.closest_hint("model/layers/0/w", ["model.layers.0.w"]) == "; did you mean 'model.layers.0.w'?"
    assert _paths.closest_hint("opt/0/w", ["opt_state/0/w", "opt_state/1/w"]) == "; did you mean 'opt_state/0/w'?"
    assert _paths.closest_hint("zzz", ["params/kernel"]) == ""


@pytest.mark.parametrize("kind", ["nested", "flat", "siblings"])
def test_suggestions_among_many_leaves_are_of_the_same_layer_and_from_a_short_list(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """difflib compared each of the leaves, which took 0.5 s for each suggestion, and named leaves of other layers."""
    compared: list[str] = []

    class Matcher(difflib.SequenceMatcher):  # type: ignore[type-arg]
        def real_quick_ratio(self) -> float:
            compared.append(self.a)  # type: ignore[arg-type]
            return super().real_quick_ratio()

        def ratio(self) -> float:
            compared.append(self.a)  # type: ignore[arg-type]
            return super().ratio()

    monkeypatch.setattr(difflib, "SequenceMatcher", Matcher)
    separator = {"nested": "/", "flat": ".", "siblings": "-"}[kind]
    keys = ["attn/q", "attn/k", "attn/v", "attn/o", "mlp/up"]
    paths = [f"params/layer_{layer}/{key}".replace("/", separator) for layer in range(4000) for key in keys]
    hint = _paths.closest_hint(f"params{separator}layer_7{separator}attn{separator}qq", paths)
    assert hint.startswith(f"; did you mean {'params/layer_7/attn/q'.replace('/', separator)!r}")
    assert 0 < len(compared) <= 100
    assert "layer_77" not in hint
    if kind != "siblings":
        assert _paths.closest_hint(f"params{separator}layer_4000{separator}attn{separator}q", paths) == ""
