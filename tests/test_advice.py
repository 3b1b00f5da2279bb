"""Each way out that an error names is followed, with an unfriendly example.

A case yields the call that fails, receives the error's text, and then does what the text says. Where the text has code,
the case executes that code.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import pathlib
import pickle
import re
import shlex
import shutil
import threading
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from processes import PASSED, RunPython

import jaxckpt
import jaxckpt.weights
from jaxckpt._cli.main import main
from jaxckpt.rules import Rule, Rules

Case = Callable[[Path], Generator[Callable[[], object], str, None]]
CASES: dict[str, tuple[str, Case]] = {}

ODD = {"a//b": {"~": np.arange(3.0), "": np.ones(2)}, "[x]*": {"w": np.zeros(2)}, "n": 7}
"""A tree whose keys are written differently in paths, and are special in globs."""


def advice(text: str) -> Callable[[Case], Case]:
    """Mark a case for an error that has this text."""

    def register(case: Case) -> Case:
        assert case.__name__ not in CASES
        CASES[case.__name__] = (text, case)
        return case

    return register


def run(message: str, pattern: str, **names: Any) -> Any:
    """The value of the code that a message shows, in the group of a pattern."""
    match = re.search(pattern, message, re.DOTALL)
    assert match is not None, message
    return eval(match[1], {"jax": jax, "np": np, "jaxckpt": jaxckpt, "PartitionSpec": P, **names})


def found(message: str, pattern: str) -> str:
    """What a message shows in the group of a pattern."""
    match = re.search(pattern, message, re.DOTALL)
    assert match is not None, message
    return match[1]


def cli(*args: str) -> str:
    """The output of a command. Raises its error."""
    done = CliRunner().invoke(main, list(args), prog_name="jaxckpt")
    if done.exit_code:
        raise RuntimeError(done.stderr)
    return done.stdout


def shell(command: str) -> str:
    """The output of a command line that a message shows."""
    program, *args = shlex.split(command)
    assert program == "jaxckpt"
    return cli(*args)


def mesh(n: int = 2) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("x",))


def equal(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


# Trees that cannot be saved -------------------------------------------------------------------------------


class Net(eqx.Module):
    """Functions, numbers, a str and a NumPy array are among its leaves."""

    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    activation: Callable[..., Any]
    scale: float
    table: np.ndarray[Any, Any]
    key: jax.Array

    def __init__(self) -> None:
        self.norm, self.dropout = eqx.nn.BatchNorm(3, "batch", mode="ema"), eqx.nn.Dropout(0.3)
        self.activation, self.scale, self.table = jax.nn.gelu, 2.5, np.arange(3)
        self.key = jax.random.key(1)


@advice("leave functions out, as jax.tree.map(")
def functions(path: Path) -> Any:
    tree = eqx.nn.make_with_state(Net)()
    message = yield lambda: jaxckpt.save(path, tree)
    jaxckpt.save(path, run(message, r"as (jax\.tree\.map\(.*tree\)) does", tree=tree))
    net, state = jaxckpt.restore(path, eqx.filter_eval_shape(eqx.nn.make_with_state(Net)))
    assert (net.dropout.p, net.scale, net.activation, net.norm.axis_name) == (0.3, 2.5, jax.nn.gelu, "batch")
    assert (net.table.tolist(), net.key) == ([0, 1, 2], jax.random.key(1))
    assert eqx.tree_equal(state, tree[1])


@advice("it is the gradient of integers, which has no values; leave it out")
def gradients_of_integers(path: Path) -> Any:
    grads = jax.grad(lambda tree: tree["w"] * 2.0, allow_int=True)({"w": 1.0, "n": np.arange(3)})
    yield lambda: jaxckpt.save(path, grads)
    jaxckpt.save(path, {**grads, "n": None})
    assert jaxckpt.restore(path, {**grads, "n": None}) == {"w": 2.0, "n": None}


@advice("make it a plain array with np.asarray")
def a_subclass_of_ndarray(path: Path) -> Any:
    class Tagged(np.ndarray[Any, Any]):
        pass

    tagged = np.arange(3).view(Tagged)
    yield lambda: jaxckpt.save(path, {"m//": tagged})
    jaxckpt.save(path, {"m//": np.asarray(tagged)})
    assert jaxckpt.load_numpy(path)["m//"].tolist() == [0, 1, 2]


@advice("save its .data and its .mask as two leaves")
def a_masked_array(path: Path) -> Any:
    array = np.ma.masked_array([1, 2], [True, False])
    yield lambda: jaxckpt.save(path, {"m": array})
    jaxckpt.save(path, {"data": array.data, "mask": array.mask})
    loaded = jaxckpt.load_numpy(path)
    assert np.ma.masked_array(**loaded).tolist() == [None, 2]


def _dtype_case(leaf: Any, pattern: str, back: Callable[[Any], Any]) -> Case:
    def case(path: Path) -> Any:
        message = yield lambda: jaxckpt.save(path, {"leaf": leaf})
        jaxckpt.save(path, run(message, pattern, leaf=leaf))
        assert str(back(jaxckpt.load_numpy(path))) == str(leaf)

    return case


for _name, _leaf in {
    "str": np.array(["a", "b"]),
    "bytes": np.array([b"a"]),
    "object": np.array([1, None, "x"]),
    "strings": np.array(["a", "bc"], np.dtypes.StringDType()),
}.items():
    _case = _dtype_case(_leaf, r"(leaf\.tolist\(\))", lambda loaded, of=_leaf.dtype: np.array(loaded, of))
    _case.__name__ = f"an_array_of_{_name}"
    advice("leaf.tolist() makes leaves of its items")(_case)
for _name, _leaf in {"dates": np.array(["2020-01-01", "NaT"], "M8[D]"), "a_duration": np.timedelta64(3, "D")}.items():
    _back = lambda loaded, of=_leaf.dtype: loaded.astype(of)  # noqa: E731
    _case = _dtype_case(_leaf, r"save (leaf\.astype\(np\.int64\))", _back)
    _case.__name__ = _name
    advice("save leaf.astype(np.int64), and the unit")(_case)
_structured = np.array([(1, 2.0)], [("a", "i4"), ("//", "f8")])
_case = _dtype_case(
    _structured,
    r"save (\{name.*names\})",
    lambda loaded: np.array([*zip(loaded["a"], loaded["//"], strict=True)], _structured.dtype),
)
_case.__name__ = "a_structured_array"
advice("save {name: leaf[name] for name in leaf.dtype.names}")(_case)
_record = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
_case = _dtype_case(
    _record, r"save (\{name.*names\})", lambda loaded: np.rec.fromarrays([*loaded.values()], dtype=_record.dtype)
)
_case.__name__ = "a_record_array"
advice("save {name: leaf[name] for name in leaf.dtype.names}")(_case)


@advice("a jax.ShapeDtypeStruct has no values: save the arrays themselves")
def an_abstract_array(path: Path) -> Any:
    yield lambda: jaxckpt.save(path, {"w": jax.ShapeDtypeStruct((2,), "float32")})
    jaxckpt.save(path, {"w": jnp.zeros(2)})


@advice("jaxckpt.register_leaf adds other types")
def another_type(path: Path) -> Any:
    class Version:
        def __init__(self, parts: list[int]) -> None:
            self.parts = parts

    yield lambda: jaxckpt.save(path, {"v": Version([1, 2])})
    jaxckpt.register_leaf(Version, to_state=lambda leaf: leaf.parts, from_state=Version, name="test_advice.Version")
    jaxckpt.save(path, {"v": Version([1, 2])})
    assert jaxckpt.restore(path)["v"].parts == [1, 2]


@advice("call save outside of jit, grad and vmap")
def a_save_of_tracers(path: Path) -> Any:
    yield lambda: jax.jit(lambda x: jaxckpt.save(path, {"x": x}) and x)(1.0)
    jaxckpt.save(path, {"x": jax.jit(lambda x: x)(1.0)})


@advice("pass nnx.state(module), which contains it once")
def a_shared_variable(path: Path) -> Any:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.b = self.a.kernel

    module = Tied()
    yield lambda: jaxckpt.save(path, module)
    jaxckpt.save(path, nnx.state(module))
    assert "a/kernel" in jaxckpt.open(path)


@advice("save(specs=…) needs mesh=: the mesh whose axes the specs name")
def specs_without_a_mesh(path: Path) -> Any:
    yield lambda: jaxckpt.save(path, {"w": jnp.zeros(4), "n": 1}, specs=P("x"))
    jaxckpt.save(path, {"w": jnp.zeros(4), "n": 1}, specs=P("x"), mesh=mesh())


@advice('pass Options(indivisible="replicate") to keep it whole')
def a_dimension_that_does_not_divide(path: Path) -> Any:
    yield lambda: jaxckpt.save(path, {"w": jnp.zeros(3)}, specs=P("x"), mesh=mesh())
    options = jaxckpt.Options(indivisible="replicate")
    jaxckpt.save(path, {"w": jnp.zeros(3)}, specs=P("x"), mesh=mesh(), options=options)
    assert jaxckpt.restore(path, mesh=mesh(3), specs=P("x"))["w"].shape == (3,)  # the other way out: another spec


@advice("write PartitionSpec(")
def a_tuple_for_a_spec(path: Path) -> Any:
    message = yield lambda: jaxckpt.save(path, ODD, mesh=mesh(), specs={"a//b": (None, "x")})
    spec = run(message, r"write (PartitionSpec\(.*\))")
    jaxckpt.save(path, {"a//b": jnp.zeros((2, 2))}, mesh=mesh(), specs={"a//b": spec})


@advice("but the keys of dtype are the keys of the tree, not paths: give ")
def a_path_as_a_key(path: Path) -> Any:
    tree = {"a//b": {"~": np.arange(3.0)}, "n": 7}
    message = yield lambda: jaxckpt.save(path, tree, dtype={"a~1~1b/~0": "float16"})
    jaxckpt.save(path, tree, dtype=run(message, r"give (\{.*\}), or a function"))
    assert jaxckpt.load_numpy(path)["a//b"]["~"].dtype == "float16"


@advice("but specs= takes no reduced mesh axes (x): leave reduced= out;")
def reduced_axes(path: Path) -> Any:
    explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    yield lambda: jaxckpt.save(path, {"w": jnp.zeros(2)}, mesh=explicit, specs=P(None, reduced=frozenset({"x"})))
    jaxckpt.save(path, {"w": jnp.zeros(2)}, mesh=explicit, specs=P(None))


# Paths that cannot be saved to ----------------------------------------------------------------------------


@advice("already holds a checkpoint; pass overwrite=True to replace it")
def an_existing_checkpoint(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    yield lambda: jaxckpt.save(path, {"w": 1})
    jaxckpt.save(path, {"w": 1}, overwrite=True)
    assert jaxckpt.load_numpy(path) == {"w": 1}


@advice("and overwriting it would replace the checkpoint there: give that path, or delete the link first")
def a_link(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    link = path.with_name("link")
    link.symlink_to(path)
    yield lambda: jaxckpt.save(link, {"w": 1}, overwrite=True)
    jaxckpt.save(path, {"w": 1}, overwrite=True)
    link.unlink()
    jaxckpt.save(link, {"w": 2}, overwrite=True)
    assert (jaxckpt.load_numpy(path), jaxckpt.load_numpy(link)) == ({"w": 1}, {"w": 2})


@advice("give a new or empty folder")
def a_folder_with_other_files(path: Path) -> Any:
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    yield lambda: jaxckpt.save(path, ODD, overwrite=True)
    (path / "empty").mkdir()
    jaxckpt.save(path / "empty", ODD)
    assert (path / "notes.txt").read_text() == "mine"


@advice(
    "is the directory of a run, with 2 steps, and is not overwritten: save a step with Checkpointer.save, replace one"
)
def the_directory_of_a_run(path: Path) -> Any:
    with jaxckpt.Checkpointer(path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, ODD)
    message = yield lambda: jaxckpt.save(path, {"w": 5}, overwrite=True)
    match = re.search(r"save\('(.*?)', …, overwrite=True\)", message)
    assert match is not None
    jaxckpt.save(match[1], {"w": 5}, overwrite=True)
    assert jaxckpt.restore(path) == {"w": 5}
    with jaxckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(3, ODD)


@advice("give a path without this suffix. jaxckpt.convert then writes a .safetensors or .npz file from the checkpoint")
def a_suffix_of_another_format(path: Path) -> Any:
    yield lambda: jaxckpt.save(path.with_suffix(".safetensors"), {"a//b": jnp.zeros(2)})
    jaxckpt.save(path, {"a//b": jnp.zeros(2)})
    jaxckpt.convert(path, path.with_suffix(".safetensors"))
    assert jaxckpt.open(path.with_suffix(".safetensors")).leaves


# Targets that do not fit ----------------------------------------------------------------------------------


@advice("leave leaves of another shape out with select=, or change their shape by Rules in rename=")
def another_shape(path: Path) -> Any:
    saved = {"a//b": jnp.ones((3, 2)), "w": jnp.ones(2), "step": 3, "key": jax.random.key(0)}
    jaxckpt.save(path, saved)
    target = {**saved, "a//b": jnp.zeros((5, 2)), "w": jnp.zeros(2), "step": 0}
    yield lambda: jaxckpt.restore(path, target)
    some = jaxckpt.restore(path, target, select=lambda leaf: leaf != "a~1~1b")
    assert (some["step"], some["w"].tolist(), some["a//b"].shape) == (3, [1, 1], (5, 2))
    larger = Rule(source="a~1~1b", target="a~1~1b", layout="v d -> v d", sizes={"v": 3}, resized={"v": 5})
    resized = jaxckpt.restore(path, target, rename=Rules([larger], keep=True))
    assert (resized["step"], resized["a//b"].sum()) == (3, 6)


@advice('Options(cast="unsafe") allows lossy casts, for the whole tree or by leaf')
def a_lossy_cast(path: Path) -> Any:
    jaxckpt.save(path, {"a//b": {"~": np.array([0.5])}, "n": 7})
    target = {"a//b": {"~": np.zeros(1, np.int8)}, "n": 0}
    yield lambda: jaxckpt.restore(path, target)
    for cast in ("unsafe", {"a//b": {"~": "unsafe"}}):
        assert jaxckpt.restore(path, target, options=jaxckpt.Options(cast=cast))["a//b"]["~"].tolist() == [0]


@advice("restore it as a key, and use jax.random.key_data")
def a_key_as_numbers(path: Path) -> Any:
    key = jax.random.key(5)
    jaxckpt.save(path, {"k": key})
    yield lambda: jaxckpt.restore(path, {"k": jnp.zeros(2, jnp.uint32)})
    assert equal(jax.random.key_data(jaxckpt.restore(path, {"k": jax.random.key(0)})["k"]), jax.random.key_data(key))


@advice("restore it as an array, and use jax.random.wrap_key_data")
def numbers_as_a_key(path: Path) -> Any:
    key = jax.random.key(5)
    jaxckpt.save(path, {"k": jax.random.key_data(key)})
    yield lambda: jaxckpt.restore(path, {"k": jax.random.key(0)})
    data = jaxckpt.restore(path, {"k": jax.random.key_data(key)})["k"]
    assert jax.random.wrap_key_data(data) == key


@advice('jax.config.update("jax_enable_x64", True) keeps 64 bits, as do NumPy arrays in the target and load_numpy')
def sixty_four_bits(path: Path) -> Any:
    with jax.enable_x64(True):
        jaxckpt.save(path, {"a//b": jnp.array([1 << 40]), "n": 7})
    message = yield lambda: jaxckpt.restore(path)
    assert 'Options(cast="unsafe") restores 32 bits' in message
    assert jaxckpt.restore(path, {"a//b": np.zeros(1, np.int64), "n": 0})["a//b"].tolist() == [1 << 40]
    assert jaxckpt.load_numpy(path)["a//b"].tolist() == [1 << 40]
    assert jaxckpt.restore(path, options=jaxckpt.Options(cast="unsafe"))["a//b"].dtype == "int32"
    with jax.enable_x64(True):
        assert jaxckpt.restore(path)["a//b"].tolist() == [1 << 40]


@advice(
    "Config as a leaf. Register it as a pytree or with jaxckpt.register_leaf, as in the program that saved it, or give"
)
def a_subclass_of_dict(path: Path) -> Any:
    class Config(dict[str, Any]):
        pass

    jaxckpt.save(path, {"c": {"a//b": 1.5}})
    yield lambda: jaxckpt.restore(path, {"c": Config({"a//b": 0.0})})
    assert jaxckpt.restore(path, {"c": {"a//b": 0.0}}) == {"c": {"a//b": 1.5}}
    jax.tree_util.register_pytree_with_keys(
        Config,
        lambda node: ([(jax.tree_util.DictKey(key), value) for key, value in node.items()], tuple(node)),
        lambda keys, values: Config(zip(keys, values, strict=True)),
    )
    assert type(jaxckpt.restore(path, {"c": Config({"a//b": 0.0})})["c"]) is Config


@advice("give a jax.ShapeDtypeStruct(shape, dtype)")
def a_dtype_as_a_target(path: Path) -> Any:
    jaxckpt.save(path, {"w": jnp.ones(2), "n": 7})
    yield lambda: jaxckpt.restore(path, {"w": jnp.float32, "n": 0})
    assert jaxckpt.restore(path, {"w": jax.ShapeDtypeStruct((2,), "float32"), "n": 0})["n"] == 7


@advice("a Sharding has no value to keep: give an array, or leave it out")
def a_sharding_for_a_missing_leaf(path: Path) -> Any:
    jaxckpt.save(path, {"w": jnp.ones(2)})
    target = {"w": jnp.zeros(2), "v": SingleDeviceSharding(jax.devices()[0])}
    yield lambda: jaxckpt.restore(path, target, strict=False)
    assert jaxckpt.restore(path, {**target, "v": jnp.full(1, 5.0)}, strict=False)["v"] == 5
    assert [*jaxckpt.restore(path, {"w": jnp.zeros(2)}, strict=False)] == ["w"]


@advice("all leaves of the target are below")
def a_target_without_its_container(path: Path) -> Any:
    jaxckpt.save(path, ({"//[a]": {"w": 1, "~": 2}}, 5))
    message = yield lambda: jaxckpt.restore(path, {"w": 0, "~": 0})
    target = run(message, r"wrap the target as (.*) and pass select=", target={"w": 0, "~": 0})
    assert jaxckpt.restore(path, target, select=run(message, r" and pass select=(.*)$"))[0] == {
        "//[a]": {"w": 1, "~": 2}
    }


@advice("pass only what the target has at 'params'")
def a_target_with_a_container_too_many(path: Path) -> Any:
    jaxckpt.save(path, {"w//": 1, "~": 2})
    target = {"params": {"w//": 0, "~": 0}}
    yield lambda: jaxckpt.restore(path, target)
    assert jaxckpt.restore(path, target["params"]) == {"w//": 1, "~": 2}


@advice("pass mesh=, or set one with jax.set_mesh")
def a_spec_as_a_target(path: Path) -> Any:
    jaxckpt.save(path, {"w": jnp.ones(2)})
    yield lambda: jaxckpt.restore(path, {"w": P("x")})
    assert jaxckpt.restore(path, {"w": P("x")}, mesh=mesh())["w"].sharding.spec == P("x")
    with jax.set_mesh(mesh()):
        assert jaxckpt.restore(path, {"w": P("x")})["w"].sharding.spec == P("x")


@advice("pass a mesh with these axis sizes as mesh= or to jax.set_mesh, or make the target under jax.set_mesh(mesh)")
def a_sharding_on_an_abstract_mesh(path: Path) -> Any:
    jaxckpt.save(path, {"w": jnp.ones(2)})
    sharding = NamedSharding(AbstractMesh((2,), ("x",)), P("x"))
    target = {"w": jax.ShapeDtypeStruct((2,), "float32", sharding=sharding)}
    yield lambda: jaxckpt.restore(path, target)
    assert jaxckpt.restore(path, target, mesh=mesh())["w"].sharding.spec == P("x")
    with jax.set_mesh(mesh()):
        assert jaxckpt.restore(path, target)["w"].sharding.spec == P("x")


@advice("leave the object out with select=, and set its state yourself from jaxckpt.load_numpy")
def the_state_of_another_class(path: Path) -> Any:
    class Loader:
        def __init__(self, at: int) -> None:
            self.at = at

        def state_dict(self) -> dict[str, Any]:
            return {"at//": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at//"]

    class Other(Loader):
        pass

    jaxckpt.save(path, {"it": Loader(5), "w": 1})
    other = Other(0)
    yield lambda: jaxckpt.restore(path, {"it": other, "w": 0})
    assert jaxckpt.restore(path, {"it": other, "w": 0}, select="w")["w"] == 1
    other.load_state_dict(jaxckpt.load_numpy(path, select="it")["it"])
    assert other.at == 5


# select= and rename= --------------------------------------------------------------------------------------


@advice("another path too, as in rename=")
def two_leaves_of_one_path(path: Path) -> Any:
    jaxckpt.save(path, {"params": {"w//": 0}, "ema": {"w//": 1}, "[": 5})
    message = yield lambda: jaxckpt.restore(path, rename={"ema": "params"})
    restored = jaxckpt.restore(path, rename=run(message, r"as in rename=(\{.*\}), or choose"))
    assert restored == {"params": {"w//": 1}, "replaced": {"params": {"w//": 0}}, "[": 5}
    assert jaxckpt.restore(path, rename={"ema": "params"}, select="params") == {"params": {"w//": 1}}


@advice("select= chooses leaves by their new paths")
def a_select_by_old_paths(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    yield lambda: jaxckpt.restore(path, rename={"a~1~1b": "model/x"}, select=["a~1~1b"])
    assert [*jaxckpt.restore(path, rename={"a~1~1b": "model/x"}, select="model")["model"]["x"]] == ["", "~"]


@advice("the empty key is written '~2'")
def an_empty_component(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    yield lambda: jaxckpt.restore(path, rename={"n": "model//n"})
    assert jaxckpt.restore(path, rename={"n": "model/~2/n"})["model"][""]["n"] == 7


@advice("give it a name, or select only this leaf")
def a_leaf_as_the_whole_tree(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    yield lambda: jaxckpt.restore(path, rename={"n": ""})
    assert jaxckpt.restore(path, rename={"n": ""}, select=lambda leaf: not leaf) == 7
    assert jaxckpt.restore(path, rename={"n": "number"})["number"] == 7


@advice("did you mean ")
def a_mistyped_path(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    message = yield lambda: jaxckpt.restore(path, select="a~1~1c")
    assert [*jaxckpt.restore(path, select=run(message, r"did you mean (.*)\?"))] == ["a//b"]


@advice("list unwanted leaves in Rules.drop, or keep all others with Rules(…, keep=True)")
def leaves_without_a_rule(path: Path) -> Any:
    jaxckpt.save(path, {"w": np.ones(2), "//": np.zeros(1), "key": jax.random.key(0), "n": 7})
    rules = [Rule(source="w", target="v")]
    yield lambda: jaxckpt.load_numpy(path, rename=Rules(rules))
    assert [*jaxckpt.load_numpy(path, rename=Rules(rules, drop=["~1~1", "key", "n"]))] == ["v"]
    assert jaxckpt.load_numpy(path, rename=Rules(rules, keep=True))["n"] == 7


# Runs -----------------------------------------------------------------------------------------------------


@advice("already exists in")
def a_step_that_exists(path: Path) -> Any:
    with jaxckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(1, ODD)
        message = yield lambda: checkpointer.save(1, {"w": 1})
        assert "pass overwrite=True" in message
        checkpointer.save(1, {"w": 1}, overwrite=True)
        assert checkpointer.restore(1) == {"w": 1}


@advice("To go back to an older step, first delete the newer steps with delete(step), or save into another directory")
def an_older_step(path: Path) -> Any:
    with jaxckpt.Checkpointer(path, keep_last=1, background=False) as checkpointer:
        checkpointer.save(1, ODD)
        checkpointer.pin(1, "first")
        checkpointer.save(10, ODD)
        yield lambda: checkpointer.save(5, ODD)
        checkpointer.delete(10)
        assert checkpointer.save(5, ODD)


@advice("To go back to an older step, save into another directory")
def a_step_older_than_all(path: Path) -> Any:
    with jaxckpt.Checkpointer(path, keep_last=1) as checkpointer:
        checkpointer.save(10, ODD)
        yield lambda: checkpointer.save(5, ODD)
    with jaxckpt.Checkpointer(path.with_name("other"), keep_last=1) as checkpointer:
        assert checkpointer.save(5, ODD)


@advice('with float("nan") where it was not measured')
def a_metric_that_is_missing(path: Path) -> Any:
    with jaxckpt.Checkpointer(path, keep_best=("loss", "min")) as checkpointer:
        message = yield lambda: checkpointer.save(1, ODD)
        assert "pass save(…, metrics={'loss': …})" in message
        assert checkpointer.save(1, ODD, metrics={"loss": float("nan")})
        assert checkpointer.best_step() is None


@advice("keep_best has no rule: pass a metric and a mode, as in best_step('loss', 'min')")
def the_best_step_of_a_run_without_a_rule(path: Path) -> Any:
    checkpointer = jaxckpt.Checkpointer(path)
    message = yield lambda: checkpointer.best_step()
    code = r"as in (best_step\(.*\))"
    assert run(message, code, best_step=checkpointer.best_step) is None
    assert run(message, code, best_step=jaxckpt.Run(path).best_step) is None
    checkpointer.save(1, ODD, metrics={"loss": 1})
    checkpointer.close()
    assert run(message, code, best_step=jaxckpt.Run(path).best_step) == 1


@advice("and restore_or_init(init, strict=False) takes these leaves from init")
def a_step_without_its_optimizer(path: Path) -> Any:
    params = {"a//b": jnp.ones(2)}
    optimizer = optax.MultiSteps(optax.adam(1e-3), 2)
    state = {"params": params, "opt_state": optimizer.init(params)}
    with jaxckpt.Checkpointer(path, keep_last_of={"opt_state": 1}) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
        checkpointer.wait()
        checkpointer.delete(2)
        message = yield lambda: _raise_with_notes(lambda: checkpointer.restore_or_init(lambda: state))
        assert "select= restores the rest" in message
        assert equal(checkpointer.restore(target={"params": params}, select="params")["params"], params)
        step, restored = checkpointer.restore_or_init(lambda: state, strict=False)
        assert (step, restored["opt_state"].mini_step) == (1, 0)


def _raise_with_notes(call: Callable[[], object]) -> None:
    try:
        call()
    except (jaxckpt.MismatchError, jaxckpt.CorruptError) as error:
        raise RuntimeError("\n".join([str(error), *error.__notes__])) from error


@advice("pass move=True, or unpin('best-eval') first")
def a_name_that_is_taken(path: Path) -> Any:
    with jaxckpt.Checkpointer(path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, ODD)
    reader = jaxckpt.Run(path)
    reader.pin(1, "best-eval")
    message = yield lambda: reader.pin(2, "best-eval")
    reader.pin(2, "best-eval", move=True)
    run(message, r"or (unpin\(.*\)) first", unpin=reader.unpin)
    reader.pin(1, "best-eval")
    assert reader.pins() == {"best-eval": 1}


@advice("is a checkpoint; give the directory of a Checkpointer, which holds steps")
def a_checkpoint_as_a_run(path: Path) -> Any:
    with jaxckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(1, ODD)
    step = jaxckpt.Run(path).path(1)
    yield lambda: jaxckpt.Checkpointer(step)
    with jaxckpt.Checkpointer(path) as checkpointer:
        assert checkpointer.latest_step() == 1


@advice("from a thread that the callback starts")
def a_save_in_on_done(path: Path) -> Any:
    def save_final(info: jaxckpt.SaveInfo) -> None:
        jaxckpt.save(path.with_name("final"), ODD)

    yield lambda: jaxckpt.save_async(path, ODD, on_done=save_final).wait()
    pending = jaxckpt.save_async(path, ODD, overwrite=True)  # after that save has ended
    save_final(pending.wait())
    shutil.rmtree(path.with_name("final"))
    threads: list[threading.Thread] = []

    def start(info: jaxckpt.SaveInfo) -> None:
        threads.append(threading.Thread(target=save_final, args=(info,)))
        threads[0].start()

    with jaxckpt.Checkpointer(path.with_name("run")) as checkpointer:
        checkpointer.save(1, ODD, on_done=start)
    threads[0].join(60)
    assert equal(jaxckpt.load_numpy(path.with_name("final")), ODD)


# Other formats --------------------------------------------------------------------------------------------


@advice("leave them out with select=")
def leaves_that_a_format_cannot_store(path: Path) -> Any:
    jaxckpt.save(path, {"w//": np.ones(2), "name": "x", "key": jax.random.key(0)})
    destination = path.with_suffix(".npz")
    yield lambda: jaxckpt.convert(path, destination)
    jaxckpt.convert(path, destination, select=lambda leaf: leaf not in ("name", "key"))
    assert len(jaxckpt.open(destination)) == 1


@advice("the truth value of a Delta is ambiguous: use .identical or .differing")
def the_truth_of_a_difference(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    delta = jaxckpt.diff(path, path)
    yield lambda: bool(delta)
    assert delta.identical
    assert not delta.differing


@advice("run jaxckpt.verify for a list of all damage")
def damage(path: Path) -> Any:
    jaxckpt.save(path, {"w//": np.arange(5000.0)})
    (stored,) = [file for file in path.rglob("c/**/*") if file.is_file()]
    content = bytearray(stored.read_bytes())
    content[100] ^= 1
    stored.write_bytes(content)
    yield lambda: jaxckpt.load_numpy(path)
    assert jaxckpt.verify(path).problems


@advice("with any other, pass format= with one of")
def a_suffix_that_no_format_has(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.ones(2)})
    message = yield lambda: jaxckpt.convert(path, path.with_suffix(".gguf"))
    assert "safetensors" in message
    jaxckpt.convert(path, path.with_suffix(".weights"), format="safetensors")
    assert len(jaxckpt.open(path.with_suffix(".weights"))) == 1


@advice("leave out format=, or give a path without this suffix")
def a_suffix_of_another_format_than_named(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.ones(2)})
    yield lambda: jaxckpt.convert(path, path.with_suffix(".npz"), format="safetensors")
    jaxckpt.convert(path, path.with_suffix(".npz"))
    jaxckpt.convert(path, path.with_name("other"), format="safetensors")


@advice("; leave them out with select=, or rename them with rename=")
def leaves_that_orbax_cannot_store(path: Path) -> Any:
    jaxckpt.save(path, {"a//b": jnp.ones(2), "w": jnp.ones(2)})
    yield lambda: jaxckpt.convert(path, path.with_name("orbax"), format="orbax")
    jaxckpt.convert(path, path.with_name("some"), format="orbax", select="w")
    jaxckpt.convert(path, path.with_name("all"), format="orbax", rename={"a~1~1b": "a/b"})
    assert sorted(jaxckpt.load_numpy(path.with_name("all"))) == ["a", "w"]


@advice("give only the sharding, and pass the restored array to jax.device_put with the Format")
def a_layout_in_memory(path: Path) -> Any:
    jaxckpt.save(path, {"a//b": jnp.ones((2, 3)), "n": 7})
    sharding = SingleDeviceSharding(jax.devices()[0])
    layout = Format(Layout(major_to_minor=(1, 0)), sharding)
    yield lambda: jaxckpt.restore(path, {"a//b": layout, "n": 0})
    restored = jaxckpt.restore(path, {"a//b": sharding, "n": 0})["a//b"]
    assert jax.device_put(restored, layout).format.layout.major_to_minor == (1, 0)


@advice("which JSON does not have; use None")
def metadata_without_a_value(path: Path) -> Any:
    yield lambda: jaxckpt.save(path, ODD, metadata={"loss": float("nan")})
    jaxckpt.save(path, ODD, metadata={"loss": None})


@advice("restore was called while JAX traces a function: call it outside of jit, scan and eval_shape")
def a_restore_in_jit(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.ones(2)})
    yield lambda: jax.jit(lambda: jaxckpt.restore(path))()
    assert jax.jit(lambda tree: tree["w//"] * 2)(jaxckpt.restore(path)).tolist() == [2, 2]


@advice("target is a mesh: pass it as mesh=")
def a_mesh_as_the_target(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.ones(2), "n": 7})
    yield lambda: jaxckpt.restore(path, mesh())
    assert jaxckpt.restore(path, mesh=mesh())["n"] == 7


@advice("or one of latest, best, best-eval")
def a_step_that_has_no_such_name(path: Path) -> Any:
    with jaxckpt.Checkpointer(path, background=False) as checkpointer:
        checkpointer.save(3, ODD)
        checkpointer.pin(3, "best-eval")
    message = yield lambda: jaxckpt.restore(f"{path}@best-evil")
    for named in (re.search(r"as in (.*@3), or", message)[1], f"{path}@latest", f"{path}@best-eval"):  # type: ignore[index]
        assert equal(jaxckpt.load_numpy(named), ODD)


@advice("looks like a URL that lost a slash, as in a pathlib.Path: pass a str")
def a_url_as_a_path(path: Path) -> Any:
    yield lambda: jaxckpt.save(Path("memory://advice/a"), ODD)
    jaxckpt.save("memory://advice/a", ODD)
    assert equal(jaxckpt.load_numpy("memory://advice/a"), ODD)


@advice("Give file:///")
def a_file_url_that_is_not_absolute(path: Path) -> Any:
    message = yield lambda: jaxckpt.save(f"file:/{path}", ODD)
    match = re.search(r"Give (file:///\S*) for", message)
    assert match is not None
    jaxckpt.save(match[1], ODD)
    assert equal(jaxckpt.load_numpy(path), ODD)


@advice("which does not exist; create that, or remove the link")
def a_link_to_nothing(path: Path) -> Any:
    path.symlink_to(path.with_name("gone"))
    yield lambda: jaxckpt.save(path / "step", ODD)
    path.with_name("gone").mkdir()
    jaxckpt.save(path / "step", ODD)
    assert equal(jaxckpt.load_numpy(path.with_name("gone") / "step"), ODD)


@advice("give a folder that is new or empty")
def a_fork_into_another_run(path: Path) -> Any:
    for name in ("c", "other"):
        with jaxckpt.Checkpointer(path.with_name(name), background=False) as checkpointer:
            checkpointer.save(3, ODD)
    yield lambda: jaxckpt.Run(path).fork(path.with_name("other"))
    assert jaxckpt.Run(path).fork(path.with_name("new")) == 3


@advice("stacks or unstacks leaves, so it needs a layout that names the axis")
def a_rule_without_a_layout(path: Path) -> Any:
    jaxckpt.save(path, {"h": [np.ones(2), np.zeros(2)]})
    yield lambda: Rule(source="h/{i}", target="h")
    rule = Rule(source="h/{i}", target="h", layout="d -> i d")
    assert jaxckpt.load_numpy(path, rename=Rules([rule]))["h"].shape == (2, 2)


@advice("give them in sizes=")
def a_rule_without_sizes(path: Path) -> Any:
    jaxckpt.save(path, {"w//": np.ones((6, 2))})
    layout = "(h d) m -> h d m"
    yield lambda: jaxckpt.load_numpy(path, rename=Rules([Rule(source="w~1~1", target="w", layout=layout)]))
    rule = Rule(source="w~1~1", target="w", layout=layout, sizes={"h": 3})
    assert jaxckpt.load_numpy(path, rename=Rules([rule]))["w"].shape == (3, 2, 2)


@advice("give Rule.parts")
def a_rule_without_parts(path: Path) -> Any:
    jaxckpt.save(path, {"qkv": np.ones((7, 2))})
    yield lambda: jaxckpt.load_numpy(path, rename=Rules([Rule(source="qkv", target=("q", "k"))]))
    rules = Rules([Rule(source="qkv", target=("q", "k"), parts=(4, 3))])
    assert jaxckpt.load_numpy(path, rename=rules)["k"].shape == (3, 2)


@advice("and scale and offset produce floats: give the rule a dtype")
def a_rule_that_scales_integers(path: Path) -> Any:
    jaxckpt.save(path, {"w": np.ones(2, np.int8)})
    yield lambda: jaxckpt.load_numpy(path, rename=Rules([Rule(source="w", target="w", scale=0.5)]))
    rule = Rule(source="w", target="w", scale=0.5, dtype="float32")
    assert jaxckpt.load_numpy(path, rename=Rules([rule]))["w"].tolist() == [0.5, 0.5]


# Other arguments ------------------------------------------------------------------------------------------


@advice("specs is a mesh: pass it as mesh=, and PartitionSpecs as specs=")
def a_mesh_as_specs(path: Path) -> Any:
    yield lambda: jaxckpt.save(path, {"w//": jnp.zeros(2)}, mesh=mesh(), specs=mesh())
    jaxckpt.save(path, {"w//": jnp.zeros(2)}, mesh=mesh(), specs={"w//": P("x")})


@advice("specs is ('x',): write PartitionSpec('x')")
def axis_names_as_specs(path: Path) -> Any:
    message = yield lambda: jaxckpt.save(path, {"w//": jnp.zeros(2)}, mesh=mesh(), specs=("x",))
    jaxckpt.save(path, {"w//": jnp.zeros(2)}, mesh=mesh(), specs=run(message, r"write (.*)"))


@advice("pass specs=, or specs=PartitionSpec() to replicate every leaf")
def a_mesh_of_other_axes(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jax.device_put(jnp.zeros(2), NamedSharding(mesh(), P("x"))), "n": 7})
    other = Mesh(np.array(jax.devices()[:2]), ("data",))
    yield lambda: jaxckpt.restore(path, mesh=other)
    assert jaxckpt.restore(path, mesh=other, specs={"w//": P("data")})["w//"].sharding.spec == P("data")
    assert jaxckpt.restore(path, mesh=other, specs=P())["w//"].sharding.is_fully_replicated


@advice("omit it to select everything")
def an_empty_selection(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    yield lambda: jaxckpt.load_numpy(path, select=[])
    assert equal(jaxckpt.load_numpy(path), ODD)


@advice("needs no register_leaf: save and restore take it as it is")
def a_known_leaf(path: Path) -> Any:
    yield lambda: jaxckpt.register_leaf(np.float32, to_state=float, from_state=np.float32)
    jaxckpt.save(path, {"x": np.float32(1.5)})
    assert type(jaxckpt.restore(path)["x"]) is np.float32


@advice("needs from_state=, set_state= or both, to restore it")
def a_leaf_that_cannot_be_restored(path: Path) -> Any:
    class Counter:
        n = 3

    name = "test_advice.Counter"
    yield lambda: jaxckpt.register_leaf(Counter, to_state=lambda leaf: leaf.n)
    jaxckpt.register_leaf(
        Counter, to_state=lambda leaf: leaf.n, set_state=lambda leaf, n: setattr(leaf, "n", n), name=name
    )
    counter = Counter()
    jaxckpt.save(path, {"c": counter})
    counter.n = 0
    assert jaxckpt.restore(path, {"c": counter})["c"].n == 3


@advice("save jax.random.key_data of them")
def keys_of_an_implementation_without_a_name(path: Path) -> Any:
    base = jax.extend.random.threefry_prng_impl
    functions = {"seed": base.seed, "split": base.split, "random_bits": base.random_bits, "fold_in": base.fold_in}
    mine = jax.extend.random.define_prng_impl(key_shape=(2,), name="advice", tag="ad", **functions)
    key = jax.random.key(5, impl=mine)
    yield lambda: jaxckpt.save(path, {"k": key})
    jaxckpt.save(path, {"k": jax.random.key_data(key)})
    assert jax.random.wrap_key_data(jaxckpt.restore(path)["k"], impl=mine) == key


@advice("convert(specs=…) needs mesh=")
def a_conversion_with_specs(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.zeros(4)})
    yield lambda: jaxckpt.convert(path, path.with_name("d"), specs=P("x"))
    jaxckpt.convert(path, path.with_name("d"), specs=P("x"), mesh={"x": 2})


@advice("looks like a URL: write it to a local path, then copy it")
def a_file_in_a_bucket(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.zeros(4)})
    yield lambda: jaxckpt.convert(path, "memory://advice/w.npz")
    jaxckpt.convert(path, path.with_name("w.npz"))
    assert path.with_name("w.npz").is_file()


@advice("has no effect on format 'npz': leave it out")
def chunks_of_a_format_without_chunks(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.zeros(4)})
    yield lambda: jaxckpt.convert(path, path.with_name("w.npz"), chunk_bytes=1 << 20)
    jaxckpt.convert(path, path.with_name("w.npz"))


@advice("overwrite=True does not delete them; give another path")
def a_destination_with_other_files(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.zeros(4)})
    (path.with_name("mine")).mkdir()
    (path.with_name("mine") / "notes.txt").write_text("mine")
    yield lambda: jaxckpt.convert(path, path.with_name("mine"), format="orbax", rename={"w~1~1": "w"}, overwrite=True)
    jaxckpt.convert(path, path.with_name("theirs"), format="orbax", rename={"w~1~1": "w"})


@advice("give the path of one file, such as ")
def files_without_an_index(path: Path) -> Any:
    path.mkdir()
    for name in ("a", "b"):
        jaxckpt.save(path / "c", {"w//": np.zeros(2), name: np.ones(1)}, overwrite=True)
        jaxckpt.convert(path / "c", path / f"{name}.safetensors")
    message = yield lambda: jaxckpt.open(path)
    match = re.search(r"such as (.*), or add the index", message)
    assert match is not None
    assert len(jaxckpt.open(match[1])) == 2


@advice("by a signal handler or a callback: set a flag there, and make the call after the other has returned")
def a_call_in_a_callback(path: Path) -> Any:
    jaxckpt.save(path, {"w//": np.zeros(1 << 20)})
    reported: list[object] = []

    def call_inside(progress: object) -> None:
        jaxckpt.save(path.with_name("inner"), ODD)

    yield lambda: jaxckpt.restore(path, options=jaxckpt.Options(progress=call_inside))
    jaxckpt.restore(path, options=jaxckpt.Options(progress=reported.append))
    assert reported
    jaxckpt.save(path.with_name("inner"), ODD)


@advice("was skipped because another was in progress; check `.skipped` first")
def a_skipped_save(path: Path) -> Any:
    pending: list[jaxckpt.PendingSave] = []
    skip = jaxckpt.Options(when_busy="skip")
    slow = jaxckpt.Options(max_bytes_per_second=1 << 20)
    running = jaxckpt.save_async(path, {"w//": np.zeros(1 << 18)}, options=slow)
    pending.append(jaxckpt.save_async(path.with_name("other"), ODD, options=skip))
    yield lambda: pending[0].wait()
    assert pending[0].skipped
    running.wait()
    pending.append(jaxckpt.save_async(path.with_name("other"), ODD, options=skip))
    if not pending[1].skipped:
        pending[1].wait()
    assert equal(jaxckpt.load_numpy(path.with_name("other")), ODD)


@advice("local must be a LocalTier: pass local=jaxckpt.LocalTier(")
def a_local_folder_without_a_tier(path: Path) -> Any:
    message = yield lambda: jaxckpt.Checkpointer(path, local=str(path.with_name("l")))  # pyright: ignore[reportArgumentType]
    assert f"LocalTier({str(path.with_name('l'))!r})" in message
    tier = jaxckpt.LocalTier(path.with_name("l"), every=1, copies=0)
    with jaxckpt.Checkpointer(path, every=2, local=tier) as checkpointer:
        assert checkpointer.save(1, ODD)


@advice("are in only 1: pass copies=0")
def copies_without_other_hosts(path: Path) -> Any:
    message = yield lambda: jaxckpt.Checkpointer(path, local=jaxckpt.LocalTier(path.with_name("l")), every=2)
    assert "domains=" not in message, "one process is in one domain"
    jaxckpt.Checkpointer(path, local=jaxckpt.LocalTier(path.with_name("l"), copies=0), every=2).close()


@advice("give another LocalTier.folder, or remove them")
def a_local_folder_with_other_files(path: Path) -> Any:
    local = path.with_name("local")

    def create(folder: Path) -> None:
        with jaxckpt.Checkpointer(path, local=jaxckpt.LocalTier(folder, copies=0), every=2) as checkpointer:
            checkpointer.save(1, ODD, force=True)

    (local / "process-0").mkdir(parents=True)
    (local / "notes.txt").write_text("mine")
    (local / "process-0/notes.txt").write_text("mine")
    yield lambda: create(local)
    create(path.with_name("elsewhere"))


@advice("names no bucket or folder: give a URL such as memory://bucket/run")
def a_url_without_a_bucket(path: Path) -> Any:
    message = yield lambda: jaxckpt.save("memory://", ODD)
    match = re.search(r"such as (memory://\S*)$", message)
    assert match is not None
    jaxckpt.save(match[1], ODD, overwrite=True)


@advice("has a query or a fragment: pass its settings in Options.storage")
def a_url_with_a_query(path: Path) -> Any:
    yield lambda: jaxckpt.save("memory://advice/q?region=x", ODD)
    jaxckpt.save("memory://advice/q", ODD)


@advice("or write %7C for a '|' in a name")
def a_url_with_a_bar(path: Path) -> Any:
    yield lambda: jaxckpt.save("memory://advice/a|b", ODD)
    jaxckpt.save("memory://advice/a%7Cb", ODD)
    assert equal(jaxckpt.load_numpy("memory://advice/a%7Cb"), ODD)


@advice("trash=True needs a file system")
def trash_in_a_bucket(path: Path) -> Any:
    message = yield lambda: jaxckpt.Checkpointer("memory://advice/trash", trash=True)
    assert "Omit it" in message
    jaxckpt.Checkpointer("memory://advice/trash").close()


@advice("pass a mapping or a function, or apply the rules to the weights before they are published")
def rules_of_a_subscriber(path: Path) -> Any:
    with jaxckpt.weights.Publisher(path) as publisher:
        publisher.publish(1, {"a//b": jnp.ones(2, jnp.bfloat16)})
    rules = Rules([Rule(source="a~1~1b", target="w")])
    yield lambda: next(iter(jaxckpt.weights.subscribe(path, rename=rules)))
    _, weights = next(iter(jaxckpt.weights.subscribe(path, rename={"a~1~1b": "w"})))
    assert weights["w"].tolist() == [1, 1]


@advice("call np.asarray on what subscribe yields")
def numpy_weights_of_a_subscriber(path: Path) -> Any:
    with jaxckpt.weights.Publisher(path) as publisher:
        publisher.publish(1, {"a//b": jnp.ones(2, jnp.bfloat16)})
    yield lambda: next(iter(jaxckpt.weights.subscribe(path, {"a//b": np.zeros(2, "bfloat16")})))
    _, weights = next(iter(jaxckpt.weights.subscribe(path, {"a//b": jnp.zeros(2, "bfloat16")})))
    assert np.asarray(weights["a//b"]).tolist() == [1, 1]


# Lost manifests -------------------------------------------------------------------------------------------


def _run_without(path: Path, *files: str) -> Path:
    """A run of steps 1 and 2, with a name that a shell would split, whose step 2 has lost files."""
    directory = path.with_name("it's mine")
    with jaxckpt.Checkpointer(directory, background=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, ODD)
    for pattern in files:
        next(directory.glob(f"00000002/{pattern}")).write_bytes(b"")
    return directory


@advice("restores the manifest from its second copy")
def a_lost_manifest(path: Path) -> Any:
    directory = _run_without(path)
    (directory / "00000002/manifest.json").unlink()
    message = yield lambda: jaxckpt.load_numpy(directory)
    assert shell(found(message, "`(.*?)`")).startswith("repaired")
    assert equal(jaxckpt.load_numpy(directory), ODD)


@advice("restore(step=…) takes one of them")
def a_damaged_newest_step(path: Path) -> Any:
    directory = _run_without(path, "manifest.json")

    def restore() -> None:
        with jaxckpt.Checkpointer(directory) as checkpointer:
            checkpointer.restore_or_init(lambda: ODD)

    message = yield lambda: _raise_with_notes(restore)
    (step,) = run(message, r"other steps in .*?: (\[.*?\])")
    with jaxckpt.Checkpointer(directory) as checkpointer:
        assert equal(checkpointer.restore(step=step), ODD)


@advice("gives the step up")
def a_step_that_cannot_be_repaired(path: Path) -> Any:
    directory = _run_without(path, "manifest.json", "data-*/manifest-copy.json")
    message = yield lambda: cli("repair", str(directory))
    run(message, r"\n *(jaxckpt\.Checkpointer\(.*?\)\.delete\(2\)) gives")
    assert jaxckpt.Run(directory).steps() == [1]
    assert equal(jaxckpt.load_numpy(directory), ODD)


@advice("overwrite=True) replaces the checkpoint")
def a_checkpoint_that_cannot_be_repaired(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    (path / "manifest.json").unlink()
    next(file for file in path.rglob("c/**/*") if file.is_file()).unlink()
    message = yield lambda: cli("repair", str(path))
    jaxckpt.save(found(message, r"jaxckpt\.save\('(.*?)', …"), {"w": 5}, overwrite=True)
    assert jaxckpt.restore(path) == {"w": 5}


# Keywords of other libraries ------------------------------------------------------------------------------


OTHERS: Any = jaxckpt
"""For calls with unknown arguments, which type checkers refuse."""

INTERVAL = datetime.timedelta(hours=1)


def _steps(path: Path, **rules: Any) -> list[int]:
    """The steps of a run that these rules save and keep, of 0 to 5."""
    with jaxckpt.Checkpointer(path, background=False, **rules) as checkpointer:
        for step in range(6):
            checkpointer.save(step, ODD, metrics={"loss": 1 / (step + 1)})
    return checkpointer.steps()


@advice("save has no argument shardings: use specs")
def shardings_of_a_save(path: Path) -> Any:
    tree = {"w//": jnp.zeros(8)}
    yield lambda: OTHERS.save(path, tree, shardings=NamedSharding(mesh(), P("x")))
    jaxckpt.save(path, tree, specs=P("x"), mesh=mesh())
    assert jaxckpt.open(path)["w~1~1"].spec == P("x")


@advice("Orbax's fallback_sharding is target here")
def a_fallback_sharding(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.zeros(8), "n": 7})
    sharding = SingleDeviceSharding(jax.devices()[1])
    yield lambda: OTHERS.restore(path, fallback_sharding=sharding)
    assert jaxckpt.restore(path, target=sharding)["w//"].sharding == sharding


@advice("jaxckpt.load_numpy reads into host memory")
def a_map_location(path: Path) -> Any:
    jaxckpt.save(path, ODD)
    yield lambda: OTHERS.restore(path, map_location="cpu")
    assert equal(jaxckpt.load_numpy(path), ODD)


@advice("use every_seconds=60 * minutes of jaxckpt.Checkpointer")
def minutes(path: Path) -> Any:
    message = yield lambda: OTHERS.Checkpointer(path, every_minutes=10)
    assert _steps(path, every_seconds=run(message, r"every_seconds=(.*?) of", minutes=10)) == []


@advice('keep_best=("loss", "min", 3) of jaxckpt.Checkpointer, where 3 is max_to_keep')
def a_function_of_metrics(path: Path) -> Any:
    message = yield lambda: OTHERS.Checkpointer(path, best_fn=min, max_to_keep=3)
    assert _steps(path, keep_best=run(message, r"keep_best=(\(.*?\))")) == [3, 4, 5]


@advice("keep_every_seconds=interval.total_seconds()")
def an_interval(path: Path) -> Any:
    message = yield lambda: OTHERS.Checkpointer(path, keep_time_interval=INTERVAL)
    assert _steps(path, keep_every_seconds=run(message, r"=(interval\S*) of", interval=INTERVAL))[-1] == 5


@advice("save_if=lambda step, metrics: step in steps")
def steps_to_save(path: Path) -> Any:
    message = yield lambda: OTHERS.Checkpointer(path, save_on_steps=[2, 4])
    assert _steps(path, save_if=run(message, r"save_if=(.*?), of", steps=[2, 4])) == [2, 4]


@advice("pass options=jaxckpt.Options(compression=…)")
def an_option_as_an_argument(path: Path) -> Any:
    message = yield lambda: OTHERS.save(path, ODD, compression="zstd")
    jaxckpt.save(path, ODD, options=run(message.replace("…", "'zstd'"), "options=(.*)"))
    assert equal(jaxckpt.load_numpy(path), ODD)


@advice("convert does not cast: use a jaxckpt.rules.Rule with dtype=, or convert a copy saved with save(dtype=)")
def a_conversion_that_casts(path: Path) -> Any:
    jaxckpt.save(path, {"w//": jnp.arange(8.0), "n": 7})
    yield lambda: OTHERS.convert(path, path.with_name("d"), dtype="float16")
    rules = Rules([Rule(source="w~1~1", target="w~1~1", dtype="float16")], keep=True)
    jaxckpt.convert(path, path.with_name("d"), rename=rules)
    jaxckpt.save(path.with_name("half"), jaxckpt.restore(path), dtype="float16")
    jaxckpt.convert(path.with_name("half"), path.with_name("e"))
    for name in "de":
        assert jaxckpt.load_numpy(path.with_name(name))["w//"].dtype == "float16"


# More trees and targets -----------------------------------------------------------------------------------


@advice("JAX sorts the keys of a dict, so they must be of one type")
def keys_of_two_types(path: Path) -> Any:
    tree = {1: 1.0, "a//b": 2.0}
    yield lambda: jaxckpt.save(path, tree)
    jaxckpt.save(path, {str(key): value for key, value in tree.items()})
    assert jaxckpt.restore(path) == {"1": 1.0, "a//b": 2.0}


@advice("cast it to one of bool, int8")
def a_dtype_of_this_machine(path: Path) -> Any:
    array = np.array([1, 2], np.longdouble)
    message = yield lambda: jaxckpt.save(path, {"w//": array})
    names = found(message, "cast it to one of (.*)").split(", ")
    jaxckpt.save(path, {name: array.astype(name) for name in names})
    assert {name: loaded.dtype.name for name, loaded in jaxckpt.load_numpy(path).items()} == {
        name: name for name in names
    }


@advice("jaxckpt.register_leaf adds other types")
def a_path_as_a_leaf(path: Path) -> Any:
    tree = {"data//": pathlib.PurePosixPath("/data/it's")}
    yield lambda: jaxckpt.save(path, tree)
    jaxckpt.register_leaf(
        pathlib.PurePosixPath, to_state=str, from_state=pathlib.PurePosixPath, name="test_advice.PurePosixPath"
    )
    jaxckpt.save(path, tree)
    assert jaxckpt.restore(path) == tree


@advice("is of type ndarray; use .tolist()")
def an_array_as_the_state_of_a_process(path: Path) -> Any:
    position = {"order": np.arange(3)}

    def save(state: Any) -> None:
        with jaxckpt.Checkpointer(path) as checkpointer:
            checkpointer.save(1, ODD, process_state={"data": state})

    yield lambda: save(position)
    save({"order": position["order"].tolist()})
    with jaxckpt.Checkpointer(path) as checkpointer:
        assert checkpointer.process_state("data") == {"order": [0, 1, 2]}


@advice("accepts only these missing and extra leaves")
def leaves_that_only_one_side_has(path: Path) -> Any:
    jaxckpt.save(path, {"a//b": {"~": jnp.ones(2), "old": [jnp.ones(1), jnp.ones(3)]}, "n": 7})
    target = {"a//b": {"~": jnp.zeros(2), "new//": {"k": jnp.full(2, 5.0)}}, "n": 0}
    message = yield lambda: jaxckpt.restore(path, target)
    tree = jaxckpt.restore(path, target, strict=run(message, r"strict=(\{.*\}) accepts"))
    assert (tree["n"], tree["a//b"]["~"].tolist(), tree["a//b"]["new//"]["k"].tolist()) == (7, [1, 1], [5, 5])


def _wrapped_case(wrap: Callable[[Any], Any]) -> Case:
    def case(path: Path) -> Any:
        adam = optax.adam(1e-3)
        params = {"a//b": {"~": jnp.ones((2, 3))}, "w": jnp.ones(2)}
        saved = jax.tree.map(lambda leaf: leaf + 3, adam.init(params))
        jaxckpt.save(path, {"p": params, "opt//": saved})
        target = {"p": params, "opt//": wrap(adam).init(params)}
        message = yield lambda: jaxckpt.restore(path, target)
        arguments = eval(f"dict({found(message, 'are found with (.*?); strict=False')})")
        restored = jaxckpt.restore(path, target, **arguments)
        values = [leaf for leaf in jax.tree.leaves(restored["opt//"]) if leaf.shape == (2, 3) and leaf.any()]
        assert [float(leaf.min()) for leaf in values] == [3, 3], "the two moments"

    return case


for _name, _wrap in {
    "accumulated_steps": lambda adam: optax.MultiSteps(adam, 2),
    "a_chained_optimizer": lambda adam: optax.chain(optax.clip(1.0), adam),
    "an_optimizer_for_some_leaves": lambda adam: optax.masked(adam, mask=True),
    "two_optimizers": lambda adam: optax.chain(adam, optax.ema(0.9)),
}.items():
    _case = _wrapped_case(_wrap)
    _case.__name__ = _name
    advice("containers have other paths in the checkpoint")(_case)


@advice("layers are stacked in the target")
def layers_that_are_scanned_now(path: Path) -> Any:
    layers = [{"k//": jnp.full(2, float(n)), "b": jnp.full(3, float(n))} for n in range(12)]
    jaxckpt.save(path, {"a//b": {"~": layers}, "n": 7})
    target = {"a//b": {"~": {"k//": jnp.zeros((12, 2)), "b": jnp.zeros((12, 3))}}, "n": 0}
    message = yield lambda: jaxckpt.restore(path, target)
    rules = run(message, r"rename=(jaxckpt.*?); strict=False")
    assert jaxckpt.restore(path, target, rename=rules)["a//b"]["~"]["k//"][:, 0].tolist() == [*range(12)]


@advice("without a spec (None from a function), it comes back as a NumPy array")
def a_spec_for_sixty_four_bits(path: Path) -> Any:
    jaxckpt.save(path, {"a//b": np.arange(8.0), "w": jnp.zeros(8)})
    yield lambda: jaxckpt.restore(path, mesh=mesh(), specs=lambda leaf, _: P("x"))
    tree = jaxckpt.restore(path, mesh=mesh(), specs=lambda leaf, _: P("x") if leaf == "w" else None)
    assert isinstance(tree["a//b"], np.ndarray)
    assert tree["a//b"].dtype == np.float64
    assert tree["w"].sharding.spec == P("x")


@advice('with float("nan") where it was not measured')
def a_best_step_without_a_metric(path: Path) -> Any:
    def save(metrics: Any) -> None:
        with jaxckpt.Checkpointer(path, keep_best=("loss", "min")) as checkpointer:
            checkpointer.save(1, ODD, metrics=metrics)

    yield lambda: save(None)
    save({"loss": float("nan")})
    assert jaxckpt.Run(path).steps() == [1]


@advice("Give the path of the one to read, ")
def two_models_in_a_folder(path: Path) -> Any:
    path.mkdir()
    for name, value in (("model", 1.0), ("model-00001-of-00001", 2.0)):
        jaxckpt.save(path / "c", {"w//": np.full(2, value)}, overwrite=True)
        jaxckpt.convert(path / "c", path / f"{name}.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"w//": "model-00001-of-00001.safetensors"}}')
    message = yield lambda: jaxckpt.load_numpy(path)
    one, other = found(message, r"to read, (.*?); or").split(" or ")
    assert jaxckpt.load_numpy(one)["w//"].tolist() == [1, 1]
    assert jaxckpt.load_numpy(other)["w//"].tolist() == [2, 2]


@advice("save its arrays as a dict, such as its state_dict()")
def an_object_in_a_torch_file(path: Path) -> Any:
    file = path.with_suffix(".pt")

    def save(value: object) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", pickle.dumps(value, 2))
            archive.writestr("a/version", "3")

    module = argparse.Namespace(w=[1.5])
    save(module)
    yield lambda: jaxckpt.load_numpy(file)
    save(vars(module))
    assert jaxckpt.load_numpy(file) == {"w": [1.5]}


@advice("leave it out with select=")
def an_object_among_the_leaves_of_a_torch_file(path: Path) -> Any:
    file = path.with_suffix(".pt")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"a//b": argparse.Namespace(), "w": 1.5}, 2))
        archive.writestr("a/version", "3")
    yield lambda: jaxckpt.load_numpy(file)
    assert jaxckpt.load_numpy(file, select=lambda leaf: leaf != "a~1~1b") == {"w": 1.5}


# The command line -----------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Generator[None]:
    with contextlib.chdir(tmp_path):
        yield


def _fill_folder() -> None:
    """A checkpoint and a run, in the current folder."""
    jaxckpt.save("ck", {"w": jnp.zeros((8, 8)), "a//b": np.ones(2), "s": "text"})
    with jaxckpt.Checkpointer("run", background=False) as checkpointer:
        for step in (1, 30):
            checkpointer.save(step, ODD)
        checkpointer.pin(30, "paper")


COMMANDS: list[tuple[str, str, Callable[[str], object]]] = [
    ("show ckk", "did you mean ck?", lambda message: cli("show", found(message, r"did you mean (\S*)\?"))),
    ("show run/30", "did you mean", lambda message: cli("show", found(message, r"did you mean (\S*)\?"))),
    ("cat ck W", "did you mean", lambda message: cli("cat", "ck", found(message, r"did you mean '(.*?)'\?"))),
    ("cat ck w[", "is not closed", lambda message: cli("cat", "ck", found(message, r"expected (\S*)$"))),
    ("cat ck w[1:3", "is not closed", lambda message: cli("cat", "ck", found(message, r"expected (\S*)$"))),
    ("cat ck w[a]", "such as [8:16, 0]", lambda message: cli("cat", "ck", f"w{found(message, 'such as (.*)$')}")),
    ("cat ck w --save w.txt", "does not end in .npy", lambda message: cli("cat", "ck", "w", "--save", "w.npy")),
    ("verify ck --rate 50", "as in", lambda message: cli("verify", "ck", "--rate", found(message, r"as in (\S*)"))),
    ("plan ck --mesh x:8", "such as", lambda message: cli("plan", "ck", "--mesh", found(message, r"such as (\S*)"))),
    ("plan ck --mesh 'x=8 y=2'", "such as data=4,model=2", lambda message: cli("plan", "ck", "--mesh", "x=8,y=2")),
    ("plan ck --mesh x=8 --mesh y=2", "give it once", lambda message: cli("plan", "ck", "--mesh", "x=8,y=2")),
    (
        "plan ck --mesh x=8 --specs P(x)",
        "expected a spec such as",
        lambda message: cli("plan", "ck", "--mesh", "x=8", "--specs", "w=P('x', None)"),
    ),
    (
        """convert ck d --mesh x=3 --specs 'w=P("x")'""",
        "pass --indivisible replicate",
        lambda message: shell("""jaxckpt convert ck d --mesh x=3 --specs 'w=P("x")' --indivisible replicate"""),
    ),
    ("convert ck d.pt", "with any other", lambda message: shell("jaxckpt convert ck d.pt --format jaxckpt")),
    ("convert ck d.npz --format zarr", "leave out --format", lambda message: cli("convert", "run@latest", "d.npz")),
    (
        "convert run d.npz",
        "convert one of them",
        lambda message: cli("convert", found(message, r"or (run@\w+)"), "d.npz"),
    ),
    ("convert ck d.npz", "with --select", lambda message: cli("convert", "ck", "d.npz", "--select", "w")),
    (
        "convert ck d --format orbax",
        "or rename them with --rename",
        lambda message: cli("convert", "ck", "d", "--format", "orbax", "--rename", "a~1~1b=b"),
    ),
    ("convert ck ck", "--overwrite", lambda message: cli("convert", "ck", "ck", "--overwrite")),
    ("convert ck d --rename w", "OLD=NEW", lambda message: cli("convert", "ck", "d", "--rename", "w=x")),
    (
        "convert ck d --rename w=x --select w",
        "--select chooses leaves by their new paths",
        lambda message: cli("convert", "ck", "d", "--rename", "w=x", "--select", found(message, "the path '(.*?)'")),
    ),
    ("show run@papers", "did you mean 'paper'", lambda message: cli("show", found(message, r"as in (\S*),"))),
    ("unpin run", "as in run@paper", lambda message: cli("unpin", found(message, r"as in (\S*);"))),
    (
        "pin run@1 --name paper",
        "or run jaxckpt unpin",
        lambda message: (shell(found(message, "run (jaxckpt .*?) first")), cli("pin", "run@1", "--name", "paper")),
    ),
    (
        "rm run/00000030 --yes",
        "unpin it first",
        lambda message: (cli("unpin", "run@paper"), cli("rm", "run/00000030", "--yes")),
    ),
    (
        "rm run --yes",
        "as in",
        lambda message: (cli("unpin", "run@paper"), cli("rm", found(message, r"as in (\S*)$"), "--yes")),
    ),
    ("fork run run", "new or empty", lambda message: cli("fork", "run", "other")),
    ("report ck -o r.txt", ".html", lambda message: cli("report", "ck", "-o", "r.html")),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "text", "follow"), COMMANDS, ids=[command for command, *_ in COMMANDS])
def test_advice_of_a_command_works_when_followed(command: str, text: str, follow: Callable[[str], object]) -> None:
    _fill_folder()
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
        cli(*shlex.split(command))
    follow(str(caught.value).strip())


@pytest.mark.usefixtures("here")
def test_a_command_names_the_command_that_lists_all_damage() -> None:
    jaxckpt.save("it's mine", {"w//": np.arange(5000.0)})
    (stored,) = [file for file in Path("it's mine").rglob("c/**/*") if file.is_file()]
    content = bytearray(stored.read_bytes())
    content[100] ^= 1
    stored.write_bytes(content)
    with pytest.raises(RuntimeError, match="for a list of all damage") as caught:
        cli("cat", "it's mine", "w~1~1")
    done = CliRunner().invoke(main, shlex.split(found(str(caught.value), r"run (jaxckpt verify .*?) for"))[1:])
    assert (done.exit_code, done.stdout.count("w~1~1")) == (1, 1)


# The test -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_advice_works_when_followed(name: str, tmp_path: Path) -> None:
    text, case = CASES[name]
    steps = case(tmp_path / "c")
    call = next(steps)
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        call()
    with pytest.raises(StopIteration):
        steps.send(str(caught.value))


def test_advice_for_a_layout_of_more_devices_works_when_followed(run_python: RunPython, tmp_path: Path) -> None:
    """In a process with fewer devices."""
    on_eight = NamedSharding(mesh(8), P("x"))
    tree = {"a//b": jax.device_put(jnp.arange(8.0), on_eight), "n": 7, "key": jax.random.key(1)}
    jaxckpt.save(tmp_path / "c", tree)
    run_python(
        f"""
        import jax; jax.config.update("jax_num_cpu_devices", 2)
        import jaxckpt
        path = {str(tmp_path / "c")!r}
        try:
            jaxckpt.restore(path)
        except jaxckpt.errors.LayoutError as error:
            text = str(error)
        assert "Pass mesh= to carry their specs over to another mesh by axis name, or target= with the shard" in text
        assert "or use jaxckpt.load_numpy for host arrays" in text
        on_mesh = jaxckpt.restore(path, mesh=jax.make_mesh((2,), ("x",)))
        on_one = jaxckpt.restore(path, jax.sharding.SingleDeviceSharding(jax.devices()[1]))
        for tree in (on_mesh, on_one, jaxckpt.load_numpy(path)):
            assert tree["a//b"].tolist() == [*range(8)] and tree["n"] == 7, tree
        print("all checks passed")
        """,
        word=PASSED,
    )
