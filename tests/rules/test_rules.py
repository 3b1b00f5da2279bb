"""A checkpoint read through rules equals NumPy's result, box by box, and the inverse rules give the source back."""

from __future__ import annotations

import math
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import RunPython
from strategies import boxes

import jaxckpt
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.tree import nested_dicts
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray
from jaxckpt.rules import Rule, Rules

Array = np.ndarray[Any, np.dtype[Any]]

# Any tree and any rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A rule, its source leaves, and their expected targets by NumPy."""

    rule: Rule
    source: Mapping[str, Array]
    target: Mapping[str, Array]


def random_bits(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bits, which include NaNs."""
    size = math.prod(shape) * DTYPES[dtype].itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(DTYPES[dtype]).reshape(shape)


@st.composite
def groupings(draw: st.DrawFn, axes: list[str]) -> list[list[str]]:
    """The axes in random order, grouped into dimensions of one or several axes."""
    order = draw(st.permutations(axes))
    groups: list[list[str]] = []
    for axis in order:
        if groups and draw(st.booleans()):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def text(dims: list[list[str]]) -> str:
    return " ".join(f"({' '.join(dim)})" for dim in dims)


def with_layout(array: Array, axes: list[str], dims: list[list[str]], sizes: Mapping[str, int]) -> Array:
    """Transpose and reshape an array with these axes to these dimensions."""
    order = [axis for dim in dims for axis in dim]
    shape = [math.prod(sizes[axis] for axis in dim) for dim in dims]
    return array.transpose([axes.index(axis) for axis in order]).reshape(shape)


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    axes = list("abcd")[: draw(st.integers(0, 4))]
    stacked, kept = ["i", "j"][: draw(st.integers(0, 2))], ["k"][: draw(st.integers(0, 1))]
    sizes = {axis: draw(st.integers(1, 4)) for axis in [*axes, *stacked, *kept]}
    dtype, wanted = draw(
        st.sampled_from([("float32", None), ("bfloat16", None), ("int16", "int32"), ("uint8", "float32")])
    )
    shown = draw(groupings(axes))
    target = draw(groupings([*axes, *stacked]))
    layout = f"{text(shown)} -> {text(target)}" if axes or stacked else ""
    kind = draw(st.sampled_from(["one", "cut", "join"]))
    count = 1 if kind == "one" or not axes or (kind == "join" and not target) else draw(st.integers(1, 3))
    axis = draw(st.integers(0, len(shown if kind == "cut" else target) - 1)) if count > 1 else 0
    numbers = "".join(f".{{{axis}}}" for axis in [*kept, *stacked])
    ours = tuple(f"{name}/s{n}{numbers}" for n in range(count if kind == "join" else 1))
    theirs = tuple(
        f"{name}/t{n}{''.join(f'/{{{axis}}}' for axis in kept)}" for n in range(count if kind == "cut" else 1)
    )
    rule = Rule(
        source=ours if len(ours) > 1 else ours[0],
        target=theirs if len(theirs) > 1 else theirs[0],
        layout=layout,
        sizes={axis: sizes[axis] for axis in [*axes, *stacked]},
        axis=axis,
        dtype=wanted,
    )
    source: dict[str, Array] = {}
    made: dict[str, Array] = {}
    shape = tuple(math.prod(sizes[axis] for axis in dim) for dim in shown)
    seed = draw(st.integers(0, 1 << 30))
    for k in range(sizes["k"]) if kept else [None]:
        fill = {} if k is None else {"k": k}
        parts: list[list[Array]] = [[] for _ in range(count)]
        for n, part in enumerate(parts):
            for index in np.ndindex(*(sizes[one] for one in stacked)):
                part.append(random_bits(hash((seed, n, k, index)) & 0xFFFFFF, shape, dtype))
        together = [[np.concatenate(p, axis)] for p in zip(*parts, strict=True)] if kind == "cut" and count > 1 else []
        for number, index in enumerate(np.ndindex(*(sizes[one] for one in stacked))):
            at = {**fill, **dict(zip(stacked, index, strict=True))}
            if together:
                source[ours[0].format(**at)] = together[number][0]
            else:
                source |= {path.format(**at): part[number] for path, part in zip(ours, parts, strict=True)}
        results: list[Array] = []
        for part in parts:
            stack = np.stack(part).reshape([sizes[one] for one in [*stacked, *[a for dim in shown for a in dim]]])
            results.append(with_layout(stack, [*stacked, *[a for dim in shown for a in dim]], target, sizes))
        if kind == "join" and count > 1:
            results = [np.concatenate(results, axis)]
        for path, result in zip(theirs, results, strict=True):
            made[path.format(**fill)] = result.astype(DTYPES[wanted]) if wanted else result
    return Case(rule, source, made)


def same(a: Any, b: Array) -> bool:
    a = np.asarray(a)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rules_match_numpy_and_their_inverse_restores_the_source(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    found = [data.draw(cases(f"c{number}")) for number in range(count)]
    source = {path: leaf for case in found for path, leaf in case.source.items()}
    target = {path: leaf for case in found for path, leaf in case.target.items()}
    rules = Rules([case.rule for case in found])
    folder = Path(tempfile.mkdtemp())
    try:
        jaxckpt.save(folder / "a", nested_dicts(source))
        seen = jaxckpt.open(folder / "a", rename=rules)
        assert set(seen) == set(target)
        for path, leaf in target.items():
            box = data.draw(boxes(leaf.shape), label=path)
            index = tuple(slice(*side) for side in box)
            assert same(seen[path][index], leaf[index]), path
        # Onto a mesh, with every leaf sharded in some way.
        sizes = data.draw(st.sampled_from([(8, 1), (4, 2), (2, 4)]))
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("x", "y"))

        def spec(path: str, leaf: Any) -> P:
            axes = [axis for axis in ("x", "y") if mesh.shape[axis] > 1]
            return P(*(axes.pop() if axes and not side % mesh.shape[axes[-1]] else None for side in leaf.shape))

        restored = jaxckpt.restore(folder / "a", rename=rules, mesh=mesh, specs=spec)
        flat = dict(_flat(restored))
        assert all(same(flat[path], leaf) for path, leaf in target.items())
        # There and back, through a separate checkpoint.
        jaxckpt.convert(folder / "a", folder / "b", rename=rules)
        for case in found:
            back = Rules([case.rule.inverse(dtype=next(iter(case.source.values())).dtype.name)])
            drop = [path for path in target if path not in case.target]
            again = dict(_flat(jaxckpt.load_numpy(folder / "b", rename=Rules(back.rules, drop))))
            assert again.keys() == case.source.keys()
            assert all(same(again[path], leaf) for path, leaf in case.source.items())
    finally:
        shutil.rmtree(folder)


def _flat(tree: Any) -> list[tuple[str, Any]]:
    return [
        ("/".join(str(key.key) for key in path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


# Bytes and memory -------------------------------------------------------------------------------------------


class Counted(ArrayData):
    """An array that counts the bytes read from it."""

    def __init__(self, array: Array) -> None:
        self.array, self.n_bytes = array, 0

    def read(self, box: Any, target: Array) -> None:
        self.n_bytes += target.nbytes
        np.copyto(target, self.array[tuple(slice(*side) for side in box)])


@pytest.mark.parametrize(
    ("spec", "most"), [(P(None, "y", None), 1.0), (P(None, None, "y"), 2.0), (P("y", None, None), 1.0)]
)
def test_devices_read_only_the_bytes_of_their_own_heads(spec: P, most: float) -> None:
    heads, dim, model = 16, 128, 1024
    array = np.random.default_rng(0).normal(size=(heads * dim, model)).astype("float32")
    block = Counted(array)
    source = compose("memory", {"q": ForeignArray("float32", array.shape, block)}, "counted")
    rules = Rules([Rule(source="q", target="q", layout="(h d) m -> m h d", sizes={"d": dim})])
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    tree = jaxckpt.restore(source, mesh=mesh, specs=spec, rename=rules)
    assert same(tree["q"], array.reshape(heads, dim, model).transpose(2, 0, 1))
    assert block.n_bytes <= most * array.nbytes  # replicas share a read


@pytest.mark.parametrize("spec", [P(None, None, ("x", "y")), P(None, "y", "x"), P()])
def test_transposed_leaves_are_read_from_their_files_once(
    spec: P, tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    tree = {f"h.{i}.gate": np.random.default_rng(i).normal(size=(4096, 512)).astype("float32") for i in range(2)}
    jaxckpt.save(tmp_path / "ours", tree)
    jaxckpt.convert(tmp_path / "ours", tmp_path / "theirs.safetensors")
    rules = Rules([Rule(source="h.{i}.gate", target="gate", layout="f m -> i m f")])
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    before = bytes_read()
    made = jaxckpt.restore(tmp_path / "theirs.safetensors", mesh=mesh, specs=spec, rename=rules)["gate"]
    assert bytes_read() - before < 1.01 * made.nbytes
    assert same(made, np.stack([leaf.T for leaf in tree.values()]))


def test_a_leaf_passes_through_memory_in_parts() -> None:
    array = np.zeros((4096, 2048), "float32")  # 32 MiB
    source = compose("memory", {"w": ForeignArray("float32", array.shape, Counted(array))}, "counted")
    rules = Rules([Rule(source="w", target="w", layout="a b -> b a", dtype="bfloat16", offset=1.0)])
    leaf = jaxckpt.open(source, rename=rules)["w"]
    tracemalloc.start()
    try:
        assert leaf[:, :].nbytes == array.nbytes // 2
        peak = tracemalloc.get_traced_memory()[1] - array.nbytes // 2
    finally:
        tracemalloc.stop()
    assert peak < 15 << 20 < array.nbytes  # for each of two threads: a read of 4 MiB, and the values computed from it


# Values -----------------------------------------------------------------------------------------------------


def test_scale_offset_cast_tied_and_dropped(tmp_path: Path) -> None:
    tree = {"norm": np.array([0.5, -0.25], "float16"), "embed": np.ones((3, 2), "float32"), "step": 7, "x": np.zeros(1)}
    jaxckpt.save(tmp_path / "a", tree)
    rules = Rules(
        [
            Rule(source="norm", target="norm", scale=2.0, offset=1.0, dtype="float32"),
            Rule(source="embed", target="embed"),
            Rule(source="embed", target="head", layout="v m -> m v", tied=True),
        ],
        drop=["step", "x"],
    )
    made = jaxckpt.load_numpy(tmp_path / "a", rename=rules)
    assert same(made["norm"], np.array([2.0, 0.5], "float32"))
    assert made["head"].shape == (2, 3)
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", rename=rules)
    delta = jaxckpt.diff(
        tmp_path / "b", tmp_path / "a", rename=rules.inverse(dtype="float16"), select=["norm", "embed"]
    )
    assert delta.identical, delta


def test_copies_are_compared_when_they_are_read(tmp_path: Path) -> None:
    embed = np.arange(6, dtype=np.float32).reshape(3, 2)
    other = embed + np.array([[0], [0], [1]], np.float32)
    jaxckpt.save(tmp_path / "a", {"embed": embed, "head": embed.copy(), "other": other, "short": embed[:2]})

    def rules(copies: Any, *drop: str) -> Rules:
        return Rules([Rule(source="embed", target="e", layout="v m -> m v", copies=copies)], drop=drop)

    equal = rules("head", "other", "short")
    assert same(jaxckpt.load_numpy(tmp_path / "a", rename=equal)["e"], embed.T)
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", rename=equal)
    assert [*jaxckpt.load_numpy(tmp_path / "b", rename=equal.inverse())] == ["embed"]
    leaf = jaxckpt.open(tmp_path / "a", rename=rules(("head", "other"), "short"))["e"]
    assert same(leaf[:, :2], embed.T[:, :2]), "only the values that are read are compared"
    with pytest.raises(
        jaxckpt.errors.DataError, match="'other' differs from 'embed', and the rules take it for a copy"
    ):
        leaf[:, 1:]
    for copies, expected in (("hed", "'hed' is missing"), ("short", r"'short' is float32\[2, 2\], and 'embed' is")):
        dropped = {"head", "other", "short"} - {copies}
        with pytest.raises(jaxckpt.MismatchError, match=expected):
            jaxckpt.load_numpy(tmp_path / "a", rename=rules(copies, *dropped))


def test_copies_are_compared_bit_for_bit(tmp_path: Path) -> None:
    nan = np.array([complex(np.nan, 1), 2j])
    jaxckpt.save(tmp_path / "a", {"embed": nan, "head": nan.copy()})
    rules = Rules([Rule(source="embed", target="e", copies="head")])
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "a", rename=rules)["e"], nan)


def test_the_repr_of_a_rule_shows_its_arguments() -> None:
    rule = Rule(source="h.{i}.w", target="layers/w", layout="out in -> i in out", scale=2.0)
    assert repr(rule) == "Rule(source='h.{i}.w', target='layers/w', layout='out in -> i in out', scale=2.0)"
    assert eval(repr(rule)) == rule
    assert repr(Rules([rule], drop=["x", "y"])) == "<Rules: 1 rule, 2 dropped paths>"


def test_plan_and_select_use_the_target_leaves_of_rules(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {f"h.{i}": np.ones((8, 4), "float32") for i in range(3)})
    rules = Rules([Rule(source="h.{i}", target="layers/w", layout="a b -> i b a", sizes={"i": 3})])
    plan = jaxckpt.open(tmp_path / "a").plan(mesh={"x": 4}, specs=P(None, "x"), rename=rules)
    assert [(leaf.path, leaf.shape) for leaf in plan.leaves] == [("layers/w", (3, 4, 8))]
    assert jaxckpt.load_numpy(tmp_path / "a", rename=rules, select="layers")["layers"]["w"].shape == (3, 4, 8)


# Errors -----------------------------------------------------------------------------------------------------


def test_one_error_lists_all_mismatches(tmp_path: Path) -> None:
    tree = {f"h.{i}.q": np.ones((6, 4)) for i in (0, 1, 3)} | {
        "norm": np.ones(3),
        "embed": np.ones(2),
        "extra": np.ones(1),
    }
    jaxckpt.save(tmp_path / "a", tree | {f"v.{i}": np.ones(2) for i in range(2)})
    rules = Rules(
        [
            Rule(source="h.{i}.q", target="q", layout="(h d) m -> i m h d", sizes={"d": 2}),
            Rule(source="nrm", target="norm"),
            Rule(source="embed", target="a"),
            Rule(source="embed", target="b"),
            Rule(source="norm", target="n", layout="a b -> b a"),
            Rule(source="v.{i}", target="v/{i}", sizes={"i": 4}),
        ],
        drop=["extr"],
    )
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.load_numpy(tmp_path / "a", rename=rules)
    message = str(caught.value)
    for part in (
        "rule h.{i}.q → q: 1 of 4 leaves to stack are missing, the first with i = 2",
        "rule nrm → norm matches nothing; did you mean 'norm'",
        "'embed' matches both rule embed → a and rule embed → b",
        "'norm' has 1 dimension, but 'a b' has 2",
        "{i} must be 0 to 3; missing: 2, 3",
        "drop 'extr' matches nothing; did you mean 'extra'",
        "'extra' matches no rule",
    ):
        assert part in message, message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"source": "a.{i}", "target": "b"}, "needs a layout"),
        ({"source": "a", "target": "b", "layout": "x y -> y"}, "must be the same"),
        ({"source": "a", "target": "b", "layout": "(x y -> x y"}, "cannot be parsed"),
        ({"source": "a", "target": "b", "layout": "x y"}, "must be of the form 'a b -> b a'"),
        ({"source": "a", "target": "b", "layout": "(x 2y) -> x"}, r"cannot be parsed at '\(x 2y\)'"),
        ({"source": "a", "target": "b", "layout": "x x -> x"}, "has an axis twice on one side"),
        ({"source": ("a", "b"), "target": ("c", "d")}, "two rules"),
        ({"source": ("a.{i}", "b"), "target": "c.{i}"}, "same numbers"),
        ({"source": "a", "target": "b", "layout": "x y -> y x", "sizes": {"z": 2}}, "not an axis"),
        ({"source": "a", "target": "b", "dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"source": "a", "target": "b", "scale": 0.0}, "no inverse"),
        ({"source": "a", "target": "b", "parts": (1, 2)}, "parts="),
        (
            {"source": "a", "target": ("b", "c"), "parts": (-2, 10)},
            "parts= must be a whole number above zero, found -2",
        ),
        ({"source": "a", "target": "b", "layout": "(x y) -> x y", "sizes": {"x": -2}}, "sizes= must be a whole number"),
        ({"source": "a", "target": "b", "dtype": jnp.bfloat16}, "is not the name of a dtype"),
        ({"source": "a", "target": {"b", "c"}}, r"Rule\.target must be of type str or tuple or list, found {"),
        ({"source": ("a", 3), "target": "b"}, r"Rule\.source must be a path"),
        ({"source": "a", "target": "layers//q"}, r"Rule\.target 'layers//q' has an empty component"),
        ({"source": "a", "target": "b/"}, "has an empty component; the empty key is written '~2'"),
        ({"source": "a", "target": ("b", "/c")}, r"Rule\.target '/c' has an empty component"),
        ({"source": "a/", "target": "b"}, r"Rule\.source 'a/' has an empty component"),
        ({"source": "a", "target": "b", "scales": 3}, r"Rule\.scales must be of type"),
        ({"source": "a", "target": "b", "copies": ("c", "")}, r"Rule\.copies must be a path or a tuple of paths"),
        ({"source": ("a", "c"), "target": "b", "copies": "d"}, "copies= needs one source"),
        ({"source": "h.{i}", "target": "b.{i}", "copies": "c.{i}"}, "copies= needs one source, and paths without num"),
        ({"source": "a", "target": "b", "sizes": "d"}, r"Rule\.sizes must be of type Mapping"),
        ({"source": "a", "target": "b", "layout": 3}, r"Rule\.layout must be of type str"),
        ({"source": "a", "target": "b", "axis": -1}, "axis= must be a whole number not below 0"),
        ({"source": "a", "target": "b", "scale": "2"}, r"Rule\.scale must be of type Real"),
        ({"source": "a", "target": "b", "tied": "no"}, r"Rule\.tied must be of type bool"),
        ({"source": "a", "target": "b", "scales": "s", "block": ("1", 2)}, "block= must be a whole number"),
    ],
)
def test_an_invalid_rule_is_an_error(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        Rule(**arguments)


def test_invalid_rules_are_an_error(tmp_path: Path) -> None:
    rule = Rule(source="q", target="w")
    with pytest.raises(jaxckpt.errors.InputError, match="takes a list of Rule"):
        Rules(rule)  # pyright: ignore
    for drop in ("norm", 3, ["a", None]):
        with pytest.raises(jaxckpt.errors.InputError, match="must be a list of paths, found "):
            Rules([rule], drop=drop)  # pyright: ignore
    with pytest.raises(jaxckpt.errors.InputError, match=r"inverse\(dtype=\) 'float23' is not the name of a dtype"):
        Rules([rule]).inverse("float23")
    jaxckpt.save(tmp_path / "a", {"q": np.arange(-3, 4, dtype="int8")})
    with pytest.raises(jaxckpt.MismatchError, match="'q' is claimed by rule q → w and dropped"):
        jaxckpt.load_numpy(tmp_path / "a", rename=Rules([rule], drop=["q"]))


def test_a_huge_number_in_a_path_takes_no_memory(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {f"h.{number}": np.ones(2) for number in (0, 1, 10**12)})
    for rule, expected in (
        (Rule(source="h.{i}", target="w", layout="a -> i a"), "999999999998 of 1000000000001 leaves .* with i = 2"),
        (Rule(source="h.{i}", target="w/{i}", sizes={"i": 10**15}), "to 999999999999999; missing: 2, 3, 4, 5, 6, …"),
        (Rule(source="h.{i}", target="w/{i}", sizes={"i": 2}), "must be 0 to 1; found: 1000000000000"),
    ):
        with pytest.raises(jaxckpt.MismatchError, match=expected):
            jaxckpt.load_numpy(tmp_path / "a", rename=Rules([rule]))
    jaxckpt.save(tmp_path / "b", {f"h.{'9' * 5000}": np.ones(2)})
    with pytest.raises(jaxckpt.MismatchError, match="matches nothing"):
        jaxckpt.load_numpy(tmp_path / "b", rename=Rules([Rule(source="h.{i}", target="w/{i}")]))


@pytest.mark.parametrize(
    ("shape", "layout", "sizes", "expected"),
    [
        ((0, 16), "(a b) m -> a b m", {"a": 3}, (3, 0, 16)),
        ((0, 16), "(a b) m -> m (b a)", {"a": 3}, (16, 0)),
        ((16, 0), "a (b c) -> a b c", {"b": 2}, (16, 2, 0)),
        ((3, 0, 16), "a b m -> (a b) m", {}, (0, 16)),
        ((8, 0), "a b -> (a b)", {}, (0,)),
    ],
)
def test_a_layout_of_an_empty_leaf(
    tmp_path: Path, shape: tuple[int, ...], layout: str, sizes: dict[str, int], expected: tuple[int, ...]
) -> None:
    jaxckpt.save(tmp_path / "a", {"z": np.zeros(shape, "float32")})
    rules = Rules([Rule(source="z", target="w", layout=layout, sizes=sizes)])
    assert jaxckpt.load_numpy(tmp_path / "a", rename=rules)["w"].shape == expected
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", rename=rules)
    assert jaxckpt.verify(tmp_path / "b").ok


SIX = np.zeros((6, 4), "float32")


@pytest.mark.parametrize(
    ("tree", "rule", "expected"),
    [
        ({"a": "text"}, {}, "'a' is a str, not a numeric array"),
        ({"a": SIX}, {"layout": "(x y) z -> x y z"}, "does not determine the sizes of x and y: give them in sizes="),
        ({"a": SIX}, {"layout": "(x y) z -> x y z", "sizes": {"x": 4}}, "6, which is not divisible by 4"),
        ({"a": SIX}, {"layout": "(x y) z -> x y z", "sizes": {"x": 4, "y": 2}}, r"of 6, but '\(x y\)' is 8"),
        ({"a": SIX}, {"target": ("b", "c", "d", "e")}, "has a dimension of 6, which is not 4 equal parts"),
        ({"a": SIX}, {"target": ("b", "c"), "axis": 2}, "has no dimension 2"),
        ({"a": SIX}, {"target": ("b", "c"), "parts": (5, 2)}, r"parts \[5, 2\] do not add up to the dimension of 6"),
        ({"a": SIX, "b": SIX[:, :3]}, {"source": ("a", "b"), "target": "c"}, "cannot be joined along dimension 0"),
        ({"a": SIX, "b": SIX}, {"source": ("a", "b"), "target": "c", "parts": (6, 5)}, "are not the parts"),
        ({"a": SIX.astype("complex64")}, {"scale": 2}, "is complex, and scale and offset are for real numbers"),
        (
            {"l": {"0": SIX, "1": SIX[1:]}},
            {"source": "l/{i}", "target": "w", "layout": "x y -> i x y"},
            r"'l/1' is float32\[5, 4\], and others are float32\[6, 4\]",
        ),
        (
            {"l": {"0": SIX, "1": SIX}, "m": {"0": SIX}},
            {"source": ("l/{i}", "m/{i}"), "target": "w/{i}"},
            "m/1 is missing",
        ),
    ],
)
def test_leaves_that_a_rule_does_not_fit_are_an_error(
    tmp_path: Path, tree: Any, rule: dict[str, Any], expected: str
) -> None:
    jaxckpt.save(tmp_path / "a", tree)
    rules = Rules([Rule(**{"source": "a", "target": "w", **rule})])
    with pytest.raises(jaxckpt.MismatchError, match=expected):
        jaxckpt.load_numpy(tmp_path / "a", rename=rules)


@pytest.mark.parametrize(
    ("weight", "scale", "expected"),
    [
        ("float8_e4m3fn", (1, 1), r"has shape \[8, 8\], and scales of shape \[1, 1\] for blocks of \[4, 4\]"),
        ("float8_e5m2", None, "is float8_e5m2, and has no scales"),
        ("complex64", (2, 2), "must be real numbers, found complex64"),
    ],
)
def test_scales_that_do_not_match_the_blocks_are_an_error(
    tmp_path: Path, weight: str, scale: tuple[int, ...] | None, expected: str
) -> None:
    scales = {} if scale is None else {"s": np.ones(scale, "float32")}
    jaxckpt.save(tmp_path / "a", {"w": np.ones((8, 8), DTYPES[weight]), **scales})
    rules = Rules([Rule(source="w", target="w", scales="s", block=(4, 4))])
    with pytest.raises(jaxckpt.MismatchError, match=expected):
        jaxckpt.load_numpy(tmp_path / "a", rename=rules)


@pytest.mark.parametrize("how", [{"scale": 0.1}, {"offset": 0.5}])
def test_scaled_integers_need_a_dtype(tmp_path: Path, how: dict[str, float]) -> None:
    source = np.arange(-3, 4, dtype="int8")
    jaxckpt.save(tmp_path / "a", {"q": source})
    with pytest.raises(jaxckpt.MismatchError, match="'q' is int8, and scale and offset produce floats"):
        jaxckpt.load_numpy(tmp_path / "a", rename=Rules([Rule(source="q", target="w", **how)]))
    rules = Rules([Rule(source="q", target="w", dtype="float32", **how)])
    expected = source.astype("float32") * np.float32(how.get("scale", 1)) + np.float32(how.get("offset", 0))
    assert same(jaxckpt.load_numpy(tmp_path / "a", rename=rules)["w"], expected)


# Properties of the checkpoint that a view keeps -------------------------------------------------------------


def test_meshes_and_specs_are_carried_through_rules(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def put(leaf: Array, *spec: Any) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, P(*spec)))

    tree = {f"h.{i}.q": put(np.ones((8, 6), "float32"), "y", "x") for i in range(3)}
    tree |= {"h.0.b": put(np.ones(8, "float32"), "y"), "h.1.b": put(np.ones(8, "float32"), "x")}
    tree |= {"fused": put(np.ones((24, 4), "float32"), "y", None), "norm": put(np.ones(6, "float32"), ("x",))}
    jaxckpt.save(tmp_path / "a", tree)
    rules = Rules(
        [
            Rule(source="h.{i}.q", target="q", layout="(h d) m -> i m d h", sizes={"h": 4}),
            Rule(source="h.{i}.b", target="b", layout="a -> i a"),
            Rule(source="fused", target=("k", "v"), layout="(h d) m -> m h d", sizes={"d": 6}),
            Rule(source="norm", target="norm", layout="m -> m", sizes={"m": 6}, resized={"m": 9}),
        ]
    )
    view = jaxckpt.open(tmp_path / "a", rename=rules)
    assert {path: (leaf.spec, leaf.shape) for path, leaf in view.items()} == {
        "q": (P(None, "x", None, "y"), (3, 6, 2, 4)),
        "b": (P(), (2, 8)),  # its sources have two specs
        "k": (P(), (4, 2, 6)),  # two heads cannot be split over four devices
        "v": (P(), (4, 2, 6)),
        "norm": (P(), (9,)),
    }
    assert dict(view["q"].mesh) == {"x": 2, "y": 4}
    assert not view["b"].mesh
    restored = jaxckpt.restore(tmp_path / "a", rename=rules)
    assert restored["q"].sharding == NamedSharding(mesh, P(None, "x", None, "y"))
    moved = jaxckpt.restore(tmp_path / "a", rename=rules, mesh=jax.make_mesh((4,), ("y",)))
    assert moved["q"].sharding.spec == P(None, None, None, "y")


def test_a_checkpoint_deleted_during_a_read_through_rules_is_reported(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"w": np.arange(6.0)})
    view = jaxckpt.open(tmp_path / "a", rename=Rules([Rule(source="w", target="v")]))
    jaxckpt.save(tmp_path / "a", {"w": np.arange(7.0)}, overwrite=True)
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="replaced by another"):
        view["v"][:]


@pytest.mark.child
def test_rules_work_during_interpreter_shutdown(tmp_path: Path, run_python: RunPython) -> None:
    jaxckpt.save(tmp_path / "a", {"w": np.arange(6.0)})
    code = f"""
    import atexit, jaxckpt
    rules = jaxckpt.rules.Rules([jaxckpt.rules.Rule(source="w", target="v", layout="a -> a")])
    atexit.register(lambda: print(jaxckpt.load_numpy({str(tmp_path / "a")!r}, rename=rules)["v"].sum(), flush=True))
    """
    assert run_python(code, devices=1).strip() == "15.0"


# Another size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 5, 8])
def test_a_resized_axis_is_padded_with_zeros_or_truncated(rows: int, tmp_path: Path) -> None:
    embed = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    jaxckpt.save(tmp_path / "a", {"embed": embed})
    rule = Rule(source="embed", target="head", layout="v m -> m v", sizes={"v": 5}, resized={"v": rows})
    expected = np.zeros((4, rows), "float32")
    expected[:, : min(rows, 5)] = embed.T[:, :rows]
    assert same(jaxckpt.load_numpy(tmp_path / "a", rename=Rules([rule]))["head"], expected)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    restored = jaxckpt.restore(tmp_path / "a", rename=Rules([rule]), mesh=mesh, specs=P("x"))
    assert same(restored["head"], expected)
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", rename=Rules([rule]))
    back = jaxckpt.load_numpy(tmp_path / "b", rename=Rules([rule.inverse()]))["embed"]
    embed[rows:] = 0
    assert same(back, embed)


@pytest.mark.parametrize(
    "arguments",
    [
        {"layout": "v m -> m v", "resized": {"v": 8}},
        {"layout": "(v w) m -> m (v w)", "sizes": {"v": 2}, "resized": {"v": 8}},
        {"layout": "v m -> m v", "sizes": {"v": 2}, "resized": {"z": 8}},
        {"sizes": {}, "resized": {"v": 8}},
    ],
)
def test_a_size_that_cannot_be_changed_is_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="resized= needs"):
        Rule(source="a", target="b", **arguments)


# Quantized sources ------------------------------------------------------------------------------------------


def quantized(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Random values without NaNs."""
    values = np.random.default_rng(seed).normal(size=shape) * 50
    return values.astype(DTYPES[dtype])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_a_quantized_leaf_equals_numpys_result(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["int8", "float8_e4m3fn"]))
    shape = data.draw(st.sampled_from([(12,), (7, 10), (4, 3, 5)]))
    block = tuple(data.draw(st.integers(1, side + 2)) for side in shape)
    kind = data.draw(st.sampled_from(["block", "rows", "whole", "leading"]))
    sides = {
        "block": tuple(-(-n // step) for n, step in zip(shape, block, strict=True)),
        "rows": (shape[0],) + (1,) * (len(shape) - 1),
        "whole": data.draw(st.sampled_from([(), (1,), (1,) * len(shape)])),
        "leading": shape[:1],
    }[kind]
    values, scales = quantized(dtype, shape, 1), np.random.default_rng(2).uniform(0.5, 2, sides).astype("float32")
    grown = scales if scales.size > 1 else scales.reshape((1,) * len(shape))
    grown = grown.reshape(grown.shape + (1,) * (len(shape) - grown.ndim))
    for dim, (n, step) in enumerate(zip(shape, block, strict=True)):
        grown = np.repeat(grown, step, dim).take(range(n), dim) if kind == "block" else grown
    expected = values.astype("float32") * grown
    source = compose("memory", {"w": values, "s": scales}, "counted")
    axes = "abc"[: len(shape)]
    rule = Rule(
        source="w",
        target="w",
        layout=f"{' '.join(axes)} -> {' '.join(reversed(axes))}",
        scales="s",
        block=block if kind == "block" else None,
    )
    leaf = jaxckpt.open(source, rename=Rules([rule]))["w"]
    box = data.draw(boxes(leaf.shape))
    index = tuple(slice(*side) for side in box)
    assert same(leaf[index], np.ascontiguousarray(expected.T[index]))


def test_quantized_layers_stack_with_others_and_are_exported_as_floats(tmp_path: Path) -> None:
    tree = {f"h.{i}.w": quantized("int8", (6, 4), i) for i in range(2)} | {"h.2.w": np.ones((6, 4), "float16")}
    tree |= {f"h.{i}.w_scale": np.full((6, 1), 0.5 + i, "float32") for i in range(2)}
    jaxckpt.save(tmp_path / "a", tree)
    rules = Rules([Rule(source="h.{i}.w", target="w", layout="a b -> i b a", scales="h.{i}.w_scale", dtype="bfloat16")])
    made = jaxckpt.load_numpy(tmp_path / "a", rename=rules)["w"]
    expected = np.stack([tree["h.0.w"].astype("f4") * 0.5, tree["h.1.w"].astype("f4") * 1.5, np.ones((6, 4))])
    assert same(made, expected.transpose(0, 2, 1).astype(DTYPES["bfloat16"]))
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", rename=rules)
    back = jaxckpt.load_numpy(tmp_path / "b", rename=rules.inverse(dtype="float16"))
    assert set(back) == {f"h.{i}.w" for i in range(3)}
    assert same(back["h.1.w"], made[1].T.astype("float16"))


@pytest.mark.parametrize(
    ("scales", "block", "expected"),
    [
        (None, None, "'w' is int8, and has no scales"),
        ((3, 2), (2, 2), r"'w' has shape \[6, 6\], and scales of shape \[3, 2\] for blocks of \[2, 2\]"),
        ((3, 3), None, r"scales of shape \[3, 3\]"),
        ((3, 3), (2,), r"block=\[2\]"),
        ((6, 1, 1), None, r"scales of shape \[6, 1, 1\]"),
    ],
)
def test_scales_that_do_not_fit_are_an_error(scales: Any, block: Any, expected: str) -> None:
    tree = {"w": quantized("int8", (6, 6), 0)} | ({} if scales is None else {"s": np.ones(scales, "float32")})
    rules = Rules([Rule(source="w", target="w", scales="s", block=block)])
    with pytest.raises(jaxckpt.MismatchError, match=expected):
        jaxckpt.open(compose("memory", tree, "counted"), rename=rules)


@pytest.mark.parametrize(
    "arguments",
    [{"block": (2, 2)}, {"scales": "s", "block": (0, 2)}, {"scales": ("s", "t")}, {"scales": "s.{i}"}],
)
def test_invalid_scales_are_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=r"block=|scales="):
        Rule(source="w", target="w", **arguments)


def test_a_quantized_leaf_passes_through_memory_in_parts() -> None:
    array = np.zeros((4096, 4096), "int8")  # 16 MiB, 64 MiB as float32
    scales = np.ones((32, 32), "float32")
    tree = {"w": ForeignArray("int8", array.shape, Counted(array)), "s": scales}
    rules = Rules([Rule(source="w", target="w", layout="a b -> b a", dtype="bfloat16", scales="s", block=(128, 128))])
    leaf = jaxckpt.open(compose("memory", tree, "counted"), rename=rules)["w"]
    tracemalloc.start()
    try:
        assert leaf[:, :].nbytes == 2 * array.nbytes
        peak = tracemalloc.get_traced_memory()[1] - 2 * array.nbytes
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20  # for each of two threads: 4 MiB of float32, its stored bytes and its scales


# All leaves below a container -----------------------------------------------------------------------------


def test_a_rule_for_a_container_stacks_leaves_of_any_shape_and_inverts(tmp_path: Path) -> None:
    tree = {f"h_{n}": {"w": np.full((2, 3), n, np.int32), "b": np.full((), n)} for n in range(11)}
    jaxckpt.save(tmp_path / "c", {**tree, "step": 5, "key": jax.random.key(3), "text": "x" * 5000})
    rules = Rules([Rule(source="h_{i}/**", target="h/**")], keep=True)
    stacked = jaxckpt.load_numpy(tmp_path / "c", rename=rules)
    assert stacked["h"]["w"].shape == (11, 2, 3)
    assert stacked["h"]["b"].tolist() == [*range(11)]
    assert (stacked["step"], stacked["text"]) == (5, "x" * 5000)
    jaxckpt.convert(tmp_path / "c", tmp_path / "stacked", rename=rules)
    back = jaxckpt.restore(tmp_path / "stacked", rename=rules.inverse())
    np.testing.assert_array_equal(back["h_10"]["w"], tree["h_10"]["w"])
    assert jax.random.key_data(back["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


def test_a_rule_for_a_container_renames_and_casts(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"a": {"w": np.ones(3), "x": {"v": np.ones((2, 2))}}, "b": np.ones(1)})
    rules = Rules([Rule(source="a/**", target="new/a/**", dtype="bfloat16")], keep=True)
    restored = jaxckpt.load_numpy(tmp_path / "c", rename=rules)
    assert restored["new"]["a"]["x"]["v"].dtype == "bfloat16"
    assert restored["b"].dtype == "float64"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"source": "a/**", "target": "b"}, "is the last component of one source and one target, or of neither"),
        ({"source": "a/**/w", "target": "b/**/w"}, "is the last component of"),
        ({"source": "a/**", "target": "b/**", "layout": "x -> x"}, "is for leaves of any shape"),
        ({"source": "a/{i}/{j}/**", "target": "b/**"}, "only one number may be on one side"),
    ],
)
def test_an_invalid_rule_for_a_container_is_an_error(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        Rule(**arguments)


def test_a_rule_for_a_container_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"a": {"0": {"w": np.ones(2)}, "2": {"w": np.ones(2)}}, "b": {"w": 1}})
    expectations = {
        "1 of 3 leaves to stack are missing": Rule(source="a/{i}/**", target="a/**"),
        "has 1 dimensions, too few for axis=2": Rule(source="a/{i}/**", target="a/**", axis=2),
        "'b/w' is a int, not a numeric array": Rule(source="b/**", target="c/**"),
        r"rule d/\*\* → c/\*\* matches nothing": Rule(source="d/**", target="c/**"),
    }
    for expected, rule in expectations.items():
        with pytest.raises(jaxckpt.MismatchError, match=expected):
            jaxckpt.load_numpy(tmp_path / "c", rename=Rules([rule], keep=True))
    clash = Rules([Rule(source="a/0/w", target="b/w")], keep=True)
    with pytest.raises(jaxckpt.MismatchError, match="'b/w' is made by a rule, and also kept"):
        jaxckpt.load_numpy(tmp_path / "c", rename=clash)


# Chosen numbers, indices of an axis, and packed values -----------------------------------------------------------


def test_chosen_numbers_are_stacked_in_their_order_and_unstacked(tmp_path: Path) -> None:
    tree = {f"h.{n}.w": np.full((2, 3), n) for n in range(7)}
    jaxckpt.save(tmp_path / "a", tree)
    groups = {"local": (1, 4), "global": range(0, 7, 3), "last": (5, 2)}
    rules = Rules(
        [Rule(source="h.{i}.w", target=name, layout="a b -> a i b", numbers={"i": own}) for name, own in groups.items()]
    )
    found = jaxckpt.load_numpy(tmp_path / "a", rename=rules)
    assert {name: leaf[0, :, 0].tolist() for name, leaf in found.items()} == {n: [*own] for n, own in groups.items()}
    jaxckpt.save(tmp_path / "b", found)
    back = jaxckpt.load_numpy(tmp_path / "b", rename=rules.inverse())
    assert back.keys() == tree.keys()
    assert all(same(back[name], tree[name]) for name in tree)
    some = [Rule(source="h.{i}.w", target="x/{i}", numbers={"i": (3, 9, 5)}), *rules.rules[:1]]
    with pytest.raises(
        jaxckpt.MismatchError, match=r"(?s)\{i\} must be \(3, 9, 5\); missing: 9.*'h.0.w' matches no rule"
    ):
        jaxckpt.open(tmp_path / "a", rename=Rules(some))


def test_each_target_is_one_index_of_a_named_axis(tmp_path: Path) -> None:
    qkv = np.arange(24 * 5).reshape(24, 5)
    tree = {f"h.{i}.qkv": qkv + 1000 * i for i in range(2)}
    jaxckpt.save(tmp_path / "a", tree)
    rule = Rule(source="h.{i}.qkv", target=("q", "k", "v"), layout="(h n d) m -> i m h d", sizes={"d": 4}, axis="n")
    found = jaxckpt.load_numpy(tmp_path / "a", rename=Rules([rule]))
    for number, name in enumerate("qkv"):
        expected = (
            np.stack([qkv + 1000 * i for i in range(2)]).reshape(2, 2, 3, 4, 5)[:, :, number].transpose(0, 3, 1, 2)
        )
        assert same(found[name], np.ascontiguousarray(expected))
    jaxckpt.save(tmp_path / "b", found)
    back = jaxckpt.load_numpy(tmp_path / "b", rename=Rules([rule]).inverse())
    assert all(same(back[name], tree[name]) for name in tree)
    jaxckpt.save(tmp_path / "c", {**found, "k": found["k"][:, :4]})
    with pytest.raises(jaxckpt.MismatchError, match=r"'k' is int64\[2, 4, 2, 4\], and 'q' is int64\[2, 5, 2, 4\]"):
        jaxckpt.open(tmp_path / "c", rename=Rules([rule]).inverse())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_box_of_packed_values_equals_numpys_result(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
    blocks = random_bits(data.draw(st.integers(0, 999)), shape, "uint8")
    scales = np.random.default_rng(0).integers(100, 140, shape[:2]).astype("uint8")
    low_and_high = np.stack([blocks & 15, blocks >> 4], -1).reshape(*shape[:2], -1)
    values = low_and_high.view(DTYPES["float4_e2m1fn"]).astype("float32") * np.float32(2.0) ** (
        scales.astype("float32")[..., None] - 127
    )
    rule = Rule(source="b", scales="s", target="w", packed="float4_e2m1fn", dtype="bfloat16", layout="r g k -> (g k) r")
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/a", {"b": blocks, "s": scales})
        leaf = jaxckpt.open(f"{folder}/a", rename=Rules([rule]))["w"]
        expected = values.reshape(shape[0], -1).T.astype(leaf.dtype)
        box = data.draw(boxes(leaf.shape))
        at = tuple(slice(*side) for side in box)
        assert same(leaf[at], np.ascontiguousarray(expected[at]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"numbers": {"j": (1, 2)}}, "numbers= names 'j', which is not a number"),
        ({"numbers": {"i": (1, 1)}}, "different numbers for 'i'"),
        ({"numbers": {"i": (-1,)}}, "a number in numbers="),
        ({"numbers": {"i": ()}}, "different numbers for 'i'"),
        ({"axis": "n"}, "needs a layout with this axis"),
        ({"axis": "n", "layout": "n m -> n m"}, "an axis of only the side with one path"),
        ({"axis": "n", "layout": "n m -> m", "target": "t/{i}"}, "an axis of only the side with one path"),
        ({"packed": "float4_e2m1fn"}, "packed= needs scales="),
        ({"packed": "int4", "scales": "c/{i}"}, "packed= must be"),
    ],
)
def test_invalid_numbers_axes_and_packed_values_are_an_error(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        Rule(**{"source": "s/{i}", "target": ("q/{i}", "k/{i}"), **arguments})


# Whole trees ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "whole", "axis"),
    [("params/layers/{i}", "params/layers", 0), ("params/layers_{n}", "params/layers", 1), ("params/{i}", "params", 0)],
)
def test_stack_and_its_inverse_keep_everything_else(tmp_path: Path, layers: str, whole: str, axis: int) -> None:
    tree: dict[str, Any] = {f"{layers}/mlp/w".replace(layers[-3:], str(n)): np.full((2, 3), n) for n in range(3)}
    tree |= {"step": 4, "opt/mu": np.ones(2)}
    jaxckpt.save(tmp_path / "a", nested_dicts(tree))
    rules = jaxckpt.rules.stack(layers, axis=axis)
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", rename=rules)
    stacked = jaxckpt.open(tmp_path / "b")
    expected = np.stack([np.full((2, 3), n) for n in range(3)], axis)
    np.testing.assert_array_equal(stacked[f"{whole}/mlp/w"][...], expected)
    assert stacked["step"].value == 4
    back = jaxckpt.open(tmp_path / "b", rename=rules.inverse())
    assert {path: np.asarray(back[path][...]).tolist() for path in tree} == {
        p: np.asarray(v).tolist() for p, v in tree.items()
    }
    for wrong in ("layers", "layers/{i}/{j}", 3, ["layers/{i}", "opt"]):
        with pytest.raises(jaxckpt.errors.InputError, match="path of a layer with one number"):
            jaxckpt.rules.stack(wrong)  # pyright: ignore


def test_rules_for_the_parameters_of_a_training_state(tmp_path: Path) -> None:
    rules = Rules(
        [Rule(source="wte", target="embed", layout="v m -> m v"), Rule(source="h.{i}", target="layers/{i}")], ["mask"]
    )
    theirs = {"wte": np.ones((2, 3)), "h.0": np.zeros(2), "h.1": np.ones(2), "mask": np.ones(1)}
    jaxckpt.save(tmp_path / "theirs", theirs)
    params = jaxckpt.load_numpy(tmp_path / "theirs", rename=rules)
    state = jaxckpt.load_numpy(tmp_path / "theirs", rename=rules.below(target="params"))
    jax.tree.map(np.testing.assert_array_equal, state, {"params": params})
    jaxckpt.save(tmp_path / "state", {**state, "opt_state": {"mu": state["params"]}, "step": 3})
    found = jaxckpt.load_numpy(tmp_path / "state", rename=rules.inverse().below(source="params"))
    jax.tree.map(np.testing.assert_array_equal, found, {name: theirs[name] for name in theirs if name != "mask"})
    jaxckpt.save(tmp_path / "nested", {"old": theirs, "step": 3})
    both = rules.below(source="old", target="new/params")
    jax.tree.map(
        np.testing.assert_array_equal, jaxckpt.load_numpy(tmp_path / "nested", rename=both), {"new": {"params": params}}
    )


def test_drop_takes_what_select_takes(tmp_path: Path) -> None:
    jaxckpt.save(
        tmp_path / "a", {"w": np.ones(2), "opt": {"mu": {"w": 2}, "nu": {"w": 3}}, "h": {"0": {"b": 4}, "x": {"b": 5}}}
    )
    rule = Rule(source="w", target="w")
    for drop in (["opt", "h"], ["opt/**", "h/*/b"], ["opt/mu", "**/nu/w", "h/{i}", "h/x"]):
        assert set(jaxckpt.open(tmp_path / "a", rename=Rules([rule], drop, keep=True))) == {"w"}
    assert set(jaxckpt.open(tmp_path / "a").restore(select="h/{i}")["h"]) == {"0"}
    with pytest.raises(jaxckpt.MismatchError, match=r"drop 'opt/m\*/x' matches nothing"):
        jaxckpt.open(tmp_path / "a", rename=Rules([rule], ["opt/m*/x"], keep=True))


def test_layers_with_random_keys_are_stacked_unstacked_and_extended(tmp_path: Path) -> None:
    """Flax's Dropout has a PRNG key in each layer."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {str(n): {"w": jnp.full(2, n), "dropout": {"key": keys[n], "count": jnp.uint32(n)}} for n in range(3)}
    jaxckpt.save(tmp_path / "a", {"layers": layers, "rng": jax.random.key(7)})
    rules = jaxckpt.rules.stack("layers/{i}")
    stacked = jaxckpt.restore(tmp_path / "a", rename=rules)
    assert stacked["layers"]["dropout"]["key"].dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(stacked["layers"]["dropout"]["key"]), jax.random.key_data(keys))
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stacked)
    assert jaxckpt.restore(tmp_path / "a", target, rename=rules)["layers"]["dropout"]["key"].shape == (3,)
    jaxckpt.save(tmp_path / "b", stacked)
    jaxckpt.convert(tmp_path / "b", tmp_path / "back", rename=rules.inverse())
    assert jaxckpt.diff(tmp_path / "back", tmp_path / "a").identical

    key = "layers/dropout/key"
    one = [Rule(source=key, target=key, layout="i -> i", sizes={"i": 3}, resized={"i": 4})]
    extended = jaxckpt.restore(tmp_path / "b", rename=Rules(one, keep=True))["layers"]["dropout"]["key"]
    assert jax.random.key_data(extended).tolist() == [*jax.random.key_data(keys).tolist(), [0, 0]]

    dropped = jaxckpt.load_numpy(tmp_path / "a", rename=Rules(rules.rules, ["layers/*/dropout"], keep=True))
    assert set(dropped["layers"]) == {"w"}
    cast = Rule(source="layers/{i}/**", target="layers/**", dtype="bfloat16")
    with pytest.raises(
        jaxckpt.MismatchError, match=r"dropout/key' is a key, not a numeric array: list it in Rules\.drop"
    ):
        jaxckpt.open(tmp_path / "a", rename=Rules([cast], keep=True))
    other = {"0": {"key": jax.random.key(1)}, "1": {"key": jax.random.key(2, impl="rbg")}}
    jaxckpt.save(tmp_path / "c", {"layers": other})
    with pytest.raises(jaxckpt.MismatchError, match=r"is key<rbg>\[\], and others are key<threefry2x32>\[\]"):
        jaxckpt.open(tmp_path / "c", rename=rules)
