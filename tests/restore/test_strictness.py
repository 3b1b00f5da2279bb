"""A mismatch is an error that lists the leaves by path; no value is changed silently."""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import math
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.random
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from processes import PASSED, RunPython

import jaxckpt
import jaxckpt.orbax
from jaxckpt._devices import device_layout as memory_order
from jaxckpt._model import manifest as manifests
from jaxckpt._model import select as select_module
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.file_names import SEAL
from jaxckpt._model.tree import subtree
from jaxckpt._options import Options
from jaxckpt._restore import match
from jaxckpt._rules.rename import renamed_tree
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store_path import store_at
from jaxckpt.rules import Rule, Rules


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


@pytest.fixture
def tree(mesh: Mesh) -> dict[str, Any]:
    sharding = NamedSharding(mesh, P("data", "model"))
    return {
        "params": {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding), "b": jnp.ones(8)},
        "layers": [jnp.zeros(3), jnp.ones(3)],
        "step": 7,
    }


@pytest.fixture
def path(tmp_path: Path, tree: Any) -> Path:
    jaxckpt.save(tmp_path / "ckpt", tree, metadata={"run": [1, None, "x"]})
    return tmp_path / "ckpt"


# Target against checkpoint --------------------------------------------------------------------------------


def test_one_error_lists_missing_extra_misshaped_and_lossily_cast_leaves(path: Path) -> None:
    target = {
        "params": {"w": jax.ShapeDtypeStruct((4, 8), "float32"), "b": jax.ShapeDtypeStruct((8,), "bfloat16")},
        "layers": [jax.ShapeDtypeStruct((3,), "float32")],
        "opt": {"mu": jax.ShapeDtypeStruct((8,), "float32")},
        "step": 0,
    }
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(path, target)
    text = str(caught.value)
    assert "'opt/mu' is not in the checkpoint" in text
    assert "'layers/1' is in the checkpoint but not in the target" in text
    assert "'params/w' has shape (8, 8) in the checkpoint, (4, 8) in the target" in text
    assert "'params/b' has dtype float32 in the checkpoint, bfloat16 in the target: a lossy cast" in text
    assert len(caught.value.problems) == 4


def test_extra_leaves_of_a_container_are_one_line(tmp_path: Path) -> None:
    params = {f"w{n}": np.zeros(2) for n in range(3)}
    opt = {"mu": {f"w{n}": np.zeros(2) for n in range(30)}, "count": 1}
    jaxckpt.save(tmp_path / "c", {"params": params, "opt": opt, "step": 1})
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "c", {"params": {"w0": np.zeros(2), "w1": np.zeros(2), "W2": np.zeros(2)}})
    assert str(caught.value).splitlines()[1:5] == [
        "  'params/W2' is not in the checkpoint; did you mean 'params/w2'?",
        "  'opt/count' and 30 more leaves below 'opt' are in the checkpoint but not in the target",
        "  'params/w2' is in the checkpoint but not in the target",
        "  'step' is in the checkpoint but not in the target",
    ]
    assert len(caught.value.problems) == 34


def test_not_strict_keeps_the_targets_values_and_leaves_out_extra_leaves(path: Path) -> None:
    kept = jnp.full(5, 3.0)
    restored = jaxckpt.restore(path, {"params": {"b": jnp.zeros(8)}, "new": kept}, strict=False)
    assert restored["new"] is kept
    np.testing.assert_array_equal(restored["params"]["b"], np.ones(8))
    with pytest.raises(jaxckpt.MismatchError, match="'new' is not in the checkpoint"):
        jaxckpt.restore(path, {"new": jax.ShapeDtypeStruct((5,), "float32")}, strict=False)
    with pytest.raises(jaxckpt.MismatchError, match="'params/b' has shape"):
        jaxckpt.restore(path, {"params": {"b": jnp.zeros(9)}}, strict=False)


# Strictness by subtree ------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run with a checkpoint of parameters and the state of Adam."""
    params = {"w": jnp.ones(3), "b": jnp.ones(3)}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": 3}
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, state)
    return tmp_path / "run"


def new_state(*, head: bool = False) -> dict[str, Any]:
    params = {"w": jnp.zeros(3), "b": jnp.zeros(3), **({"head": jnp.zeros(2)} if head else {})}
    return {"params": params, "opt_state": optax.sgd(1e-3, 0.9).init(params), "step": 0}


RESTORES: dict[str, Callable[[Path, Any, Any], Any]] = {
    "restore": lambda run, target, strict: jaxckpt.restore(run, target, strict=strict),
    "Checkpoint.restore": lambda run, target, strict: jaxckpt.open(run).restore(target, strict=strict),
    "Run.restore": lambda run, target, strict: jaxckpt.Run(run).restore(3, target, strict=strict),
    "Step.restore": lambda run, target, strict: next(jaxckpt.Run(run).follow()).restore(target, strict=strict),
    "Checkpointer.restore": lambda run, target, strict: jaxckpt.Checkpointer(run).restore(None, target, strict=strict),
    "restore_or_init": lambda run, target, strict: jaxckpt.Checkpointer(run).restore_or_init(
        lambda: target, strict=strict
    )[1],
}


@pytest.mark.parametrize("restore", RESTORES.values(), ids=RESTORES.keys())
def test_strictness_may_be_given_by_subtree(
    restore: Callable[..., Any], trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strict = {"params": True, "opt_state": False}
    restored = restore(trained, new_state(), strict)
    assert (restored["params"]["w"].tolist(), restored["step"]) == ([1, 1, 1], 3)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    owner = "init" if restore is RESTORES["restore_or_init"] else "target"
    assert warning.endswith(
        f": restored 3 of the 5 leaves of the {owner} (2 of 2 in 'params', 1 of 1 in 'step', 0 of 2 in 'opt_state');"
        f" not in the checkpoint, and as in the {owner}: 2 below 'opt_state'; only in the checkpoint, and left out: 5"
        " below 'opt_state'"
    )
    with pytest.raises(jaxckpt.MismatchError, match="'params/head' is not in the checkpoint") as caught:
        restore(trained, new_state(head=True), strict)
    assert caught.value.paths == ("params/head",)


def test_a_plan_takes_strictness_by_subtree(trained: Path) -> None:
    plan = jaxckpt.open(trained).plan(new_state(), strict={"opt_state": False})
    assert {leaf.path for leaf in plan.leaves} >= {"params/w", "params/b"}


def test_an_error_names_the_strictness_that_accepts_only_its_leaves(trained: Path) -> None:
    target = new_state(head=True)
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(trained, target)
    match = re.search(r"strict=(\{.*?\}) accepts only these missing and extra leaves", str(caught.value))
    assert match is not None
    strict = eval(match[1])
    assert strict == {"params": {"head": False}, "opt_state": False}
    assert jaxckpt.restore(trained, target, strict=strict)["params"]["w"].tolist() == [1, 1, 1]
    with pytest.raises(jaxckpt.MismatchError, match="'other' is not in the checkpoint"):
        jaxckpt.restore(trained, {**target, "other": 1}, strict=strict)


def test_names_with_slashes_and_other_containers_have_strictness_too(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", ({"a//b": {"w": 1}, "~": 2}, [1.5]))
    restored = jaxckpt.restore(
        tmp_path / "c", ({"a//b": {"w": 0, "v": 5}}, [0.0]), strict=({"a//b": False, "~": False}, True)
    )
    assert restored == ({"a//b": {"w": 1, "v": 5}}, [1.5])


def test_a_restore_without_differences_does_not_warn(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = new_state()["params"]
    jaxckpt.restore(trained, {"params": params}, select="params", strict=False)
    jaxckpt.restore(trained, {"params": params, "f": jnp.tanh}, select="params", strict=False)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_warning_names_the_outermost_subtrees_and_not_all_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jaxckpt.save(tmp_path / "c", {f"layer_{n}": {"w": np.zeros(1), "b": np.zeros(1)} for n in range(20)})
    target = {f"layer_{n}": {"w": np.zeros(1), "u": {"v": 0, "x": 1}} for n in range(20)}
    jaxckpt.restore(tmp_path / "c", target, strict=False)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "restored 20 of the 60 leaves of the target" in warning
    assert "as in the target: 2 below 'layer_0/u', 2 below 'layer_1/u', " in warning
    assert "and 14 more" in warning
    assert "left out: 'layer_0/b', 'layer_1/b'" in warning


@pytest.mark.parametrize(
    ("strict", "message"),
    [
        ({"opt_stat": False}, "strict has 'opt_stat', at which neither .*; did you mean 'opt_state'"),
        ({"opt_state/0": False}, r'not paths: give \{"opt_state": \{"0": False\}\}$'),
        ({"opt_state": "no"}, "found 'no' at 'opt_state'"),
        (0, "strict must be True or False, found 0"),
    ],
)
@pytest.mark.parametrize("has_target", [True, False])
def test_invalid_strictness_is_an_error(has_target: bool, strict: Any, message: str, trained: Path) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=message):
        jaxckpt.restore(trained, new_state() if has_target else None, strict=strict)


def test_strictness_may_name_what_only_the_target_or_only_the_checkpoint_has(trained: Path) -> None:
    target = {key: value for key, value in new_state(head=True).items() if key != "opt_state"}
    strict = {"params": {"head": False}, "opt_state": False}
    restored = jaxckpt.restore(trained, target, strict=strict)
    assert sorted(restored) == ["params", "step"]


def test_a_near_name_is_suggested(path: Path) -> None:
    with pytest.raises(jaxckpt.MismatchError, match="did you mean 'params/w'"):
        jaxckpt.restore(path, {"params": {"W": jax.ShapeDtypeStruct((8, 8), "float32")}})


def test_lossless_casts_are_made_and_others_only_on_request(tmp_path: Path) -> None:
    saved = {"h": jnp.arange(4, dtype="bfloat16"), "i": jnp.arange(4, dtype="int8"), "f": jnp.array([1.7, -2.2])}
    jaxckpt.save(tmp_path / "c", saved)
    wider = {"h": "float32", "i": "int32", "f": "float32"}
    target = {name: jax.ShapeDtypeStruct(saved[name].shape, dtype) for name, dtype in wider.items()}
    restored = jaxckpt.restore(tmp_path / "c", target)
    assert {name: leaf.dtype.name for name, leaf in restored.items()} == wider
    np.testing.assert_array_equal(restored["h"], np.arange(4.0))
    narrow = {name: jax.ShapeDtypeStruct(saved[name].shape, "int8") for name in saved}
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "c", narrow)
    assert len(caught.value.problems) == 2
    unsafe = jaxckpt.restore(tmp_path / "c", narrow, options=jaxckpt.Options(cast="unsafe"))
    np.testing.assert_array_equal(unsafe["f"], np.array([1, -2], "int8"))


def test_whole_numbers_are_cast_to_a_dtype_that_holds_their_values(tmp_path: Path, mesh: Mesh) -> None:
    saved = {"step": jnp.int32(7), "seen": np.array([3, 1 << 40]), "scale": jnp.float32(1024)}
    jaxckpt.save(tmp_path / "c", saved)
    rows = NamedSharding(mesh, P("data"))
    target = {
        "step": jax.ShapeDtypeStruct((), "uint32", sharding=NamedSharding(mesh, P())),
        "seen": np.zeros(2, np.float64),
        "scale": jax.ShapeDtypeStruct((), "int16"),
    }
    restored = jaxckpt.restore(tmp_path / "c", target)
    assert {name: leaf.dtype.name for name, leaf in restored.items()} == {
        "step": "uint32", "seen": "float64", "scale": "int16",
    }  # fmt: skip
    assert (restored["step"], restored["seen"].tolist(), restored["scale"]) == (7, [3.0, 2.0**40], 1024)
    assert jaxckpt.restore(tmp_path / "c", dtype={"step": np.uint32})["step"].dtype == "uint32"

    jaxckpt.save(tmp_path / "d", {"step": jnp.array([5, -1]), "zero": jnp.float32(-0.0), "half": jnp.float32(0.5)})
    target = {"step": jax.ShapeDtypeStruct((2,), "uint32", sharding=rows), "zero": jnp.int32(0), "half": jnp.int32(0)}
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "d", target)
    assert caught.value.paths == ("half", "step", "zero")
    reason = "has dtype int32 in the checkpoint, uint32 in the target: a lossy cast of -1"
    assert reason in [problem.reason for problem in caught.value.problems]
    with pytest.raises(jaxckpt.MismatchError, match="but dtype= gives uint32: a lossy cast of -1"):
        jaxckpt.restore(tmp_path / "d", dtype={"step": np.uint32})


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.zeros((1 << 14) + 1, np.int32), "uint32"),
        (np.zeros(2, np.float32), "int32"),
        (np.ones((), np.int32), "bool"),
    ],
    ids=["above 64 KiB", "an array of floats", "to bool"],
)
def test_other_lossy_casts_are_refused_whatever_the_values(values: Any, wanted: str, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": values})
    with pytest.raises(jaxckpt.MismatchError, match=r"a lossy cast\n"):
        jaxckpt.restore(tmp_path / "c", {"x": np.zeros(values.shape, wanted)})


def test_a_plan_names_the_casts_that_depend_on_values(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"step": jnp.int32(-1), "w": jnp.ones(3), "same": jnp.int32(1)})
    checkpoint = jaxckpt.open(tmp_path / "c")
    target = {"step": jnp.uint32(0), "w": jnp.zeros(3), "same": jnp.int32(0)}
    plan = checkpoint.plan(target)
    assert plan.value_dependent == ("step",)
    assert "casts      only if no value changes, in 'step'" in str(plan)
    assert plan.read_bytes > checkpoint.plan().read_bytes  # the step is read twice
    assert checkpoint.plan(target, options=jaxckpt.Options(cast="unsafe")).value_dependent == ()


@pytest.mark.parametrize(
    "cast",
    [{"opt": "unsafe"}, {"opt": {"mu": "unsafe"}}, lambda path, leaf: "unsafe" if path == "opt/mu" else None],
    ids=["container", "leaf", "function"],
)
def test_lossy_casts_may_be_allowed_by_leaf(cast: Any, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"opt": {"mu": jnp.full(3, 1.7)}, "w": jnp.full(3, 1.7)})
    options = jaxckpt.Options(cast=cast)
    whole = jax.ShapeDtypeStruct((3,), "int32")
    restored = jaxckpt.restore(tmp_path / "c", {"opt": {"mu": whole}, "w": jnp.zeros(3)}, options=options)
    assert restored["opt"]["mu"].tolist() == [1, 1, 1]
    with pytest.raises(jaxckpt.MismatchError, match="for the whole tree or by leaf") as caught:
        jaxckpt.restore(tmp_path / "c", {"opt": {"mu": whole}, "w": whole}, options=options)
    assert caught.value.paths == ("w",)
    saved = {"opt": {"mu": jnp.full(3, 1.7)}}
    jaxckpt.save(tmp_path / "d", saved, dtype={"opt": {"mu": np.int32}}, options=options)
    assert jaxckpt.load_numpy(tmp_path / "d")["opt"]["mu"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "cast", [{"opt": "always"}, {"opt": True}, lambda path, leaf: True], ids=["unknown", "bool", "function"]
)
def test_a_policy_that_does_not_exist_is_an_error(cast: Any, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"opt": jnp.ones(3)})
    with pytest.raises(jaxckpt.errors.InputError, match=r"Options\.cast gives .* for 'opt'; expected one of"):
        jaxckpt.restore(tmp_path / "c", options=jaxckpt.Options(cast=cast))


def exact(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers as Python objects, with one object for all NaNs, and -0.0 equal to 0.0."""
    numbers = values.astype(object) if values.dtype.kind in "biuc" else values.astype(np.float64).astype(object)
    return np.array([None if number != number else number for number in numbers], dtype=object)


NARROW = [name for name, dtype in DTYPES.items() if dtype.itemsize <= 2]


def all_values(name: str) -> np.ndarray[Any, Any]:
    """Every value of a dtype of up to 16 bits."""
    if name == "bool":
        return np.array([False, True])
    if name in ("int2", "int4", "uint2", "uint4"):
        width = int(name[-1])
        first = 0 if name.startswith("u") else -(1 << width - 1)
        return np.arange(first, first + (1 << width)).astype(DTYPES[name])
    if name == "float4_e2m1fn":
        return np.arange(16, dtype=np.uint8).view(DTYPES[name])
    width = 8 * DTYPES[name].itemsize
    return np.arange(1 << width, dtype=f"uint{width}").view(DTYPES[name])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", NARROW)
def test_a_cast_that_is_not_refused_keeps_every_value(name: str, tmp_path: Path) -> None:
    values = all_values(name)
    jaxckpt.save(tmp_path / "c", values, options=jaxckpt.Options(sync=False))
    allowed: list[str] = []
    changed: list[str] = []  # collected, so that the failure lists all of them
    for wanted, dtype in DTYPES.items():
        try:
            restored = jaxckpt.restore(tmp_path / "c", np.empty(values.shape, dtype))
        except jaxckpt.MismatchError:
            continue
        allowed.append(wanted)
        if not np.array_equal(exact(restored), exact(values)):
            changed.append(wanted)
    assert name in allowed
    assert changed == []


@pytest.mark.parametrize("target", [np.zeros(1), np.zeros(1, complex)], ids=["float64", "complex128"])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_beyond_53_bits_do_not_silently_become_floats(dtype: str, target: Any, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": np.array([(1 << 53) + 1], dtype)})
    with pytest.raises(jaxckpt.MismatchError, match=r"'x'.*lossy"):
        jaxckpt.restore(tmp_path / "c", {"x": target})


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("value", "target"),
    [
        (float("nan"), jnp.int32(0)),
        (float("nan"), np.bool_(False)),
        ((1 << 53) + 1, 0.0),
        (1 << 2000, 0.0),
        (np.int64((1 << 53) + 1), 0.0),
        (300, np.uint8(0)),
        (-1, np.zeros((), DTYPES["uint4"])),
        (1e300, jnp.float32(0)),
        pytest.param(
            math.inf,
            np.zeros((), DTYPES["float8_e4m3fn"]),
        ),
        pytest.param(
            1 + 2j,
            jnp.float32(0),
        ),
    ],
    ids=[
        "nan to int", "nan to bool", "2**53 + 1", "2**2000", "numpy's 2**53 + 1", "300 to uint8", "-1 to uint4",
        "1e300 to float32", "inf to no inf", "complex to float",
    ],
)  # fmt: skip
def test_numbers_do_not_silently_become_others(value: Any, target: Any, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": value})
    with pytest.raises(jaxckpt.MismatchError, match="'x'"):
        jaxckpt.restore(tmp_path / "c", {"x": target})


def test_a_number_that_cannot_be_cast_is_an_error_with_its_path(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": 1 << 2000})
    with pytest.raises(jaxckpt.MismatchError, match="'x'"):
        jaxckpt.restore(tmp_path / "c", {"x": jnp.float32(0)}, options=jaxckpt.Options(cast="unsafe"))


@pytest.mark.parametrize("cast", ["safe", "unsafe"])
@pytest.mark.parametrize("dtype", [object, "U9", "S9", "m8[s]", "M8[s]", "V4", [("a", "f4")]], ids=str)
def test_a_dtype_that_cannot_be_stored_is_refused_in_a_target(dtype: Any, cast: Any, tmp_path: Path) -> None:
    tree = {"i8": np.arange(3, dtype=np.int8), "bf16": jnp.arange(3, dtype=jnp.bfloat16), "number": 12}
    jaxckpt.save(tmp_path / "c", tree)
    target = {name: np.zeros(np.shape(leaf), dtype) for name, leaf in tree.items()}
    with pytest.raises(jaxckpt.MismatchError, match="in the target, which no checkpoint can contain") as caught:
        jaxckpt.restore(tmp_path / "c", target, options=jaxckpt.Options(cast=cast))
    assert caught.value.paths == ("bf16", "i8", "number")


def test_keys_do_not_become_numbers_nor_other_keys(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"k": jax.random.key(0)})
    with pytest.raises(jaxckpt.MismatchError, match="PRNG keys do not cast"):
        jaxckpt.restore(tmp_path / "c", {"k": jax.ShapeDtypeStruct((), "uint32")})
    with pytest.raises(jaxckpt.MismatchError, match="PRNG keys do not cast"):
        jaxckpt.restore(tmp_path / "c", {"k": jax.random.key(0, impl="rbg")})
    # Their raw data has the same form and is in one stack.
    keys = {"a": jax.random.key(1, impl="rbg"), "b": jax.random.key(2, impl="unsafe_rbg")}
    jaxckpt.save(tmp_path / "d", keys)
    restored = jaxckpt.restore(tmp_path / "d")
    assert [key.dtype for key in restored.values()] == [key.dtype for key in keys.values()]
    with pytest.raises(jaxckpt.MismatchError, match=r"'b' has dtype key<urbg> in the checkpoint, key<rbg>"):
        jaxckpt.restore(tmp_path / "d", {"a": keys["a"], "b": keys["a"]})


def test_keys_of_an_implementation_without_a_name_are_refused(tmp_path: Path) -> None:
    base = jax.extend.random.threefry_prng_impl
    functions = {"seed": base.seed, "split": base.split, "random_bits": base.random_bits, "fold_in": base.fold_in}
    mine = jax.extend.random.define_prng_impl(key_shape=(2,), name="mine", tag="mn", **functions)
    with pytest.raises(jaxckpt.errors.TreeError, match=r"'k' has PRNG keys of implementation 'mn', which .*key_data"):
        jaxckpt.save(tmp_path / "c", {"k": jax.random.key(0, impl=mine), "w": 1})
    assert not (tmp_path / "c").exists()
    # An implementation that was registered in another process.
    jaxckpt.save(tmp_path / "d", {"model": {"k": jax.random.key(0)}, "w": 1})
    manifest = tmp_path / "d" / "manifest.json"
    body = manifest.read_bytes().rpartition(SEAL)[0].replace(b'"threefry2x32"', b'"known"')
    manifest.write_bytes(body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}')
    for target in (None, {"model": {"k": jax.random.key(0)}, "w": 0}):
        with pytest.raises(jaxckpt.MismatchError, match=r"'model/k' has PRNG keys of .*'known'.*load_numpy"):
            jaxckpt.restore(tmp_path / "d", target)
    assert jaxckpt.load_numpy(tmp_path / "d")["model"]["k"].dtype == "uint32"


def test_numbers_and_arrays_convert_only_without_loss(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"step": 7, "lr": 0.1, "count": jnp.int32(3), "name": "x"})
    restored = jaxckpt.restore(tmp_path / "c", {"step": jnp.int32(0), "lr": 0.0, "count": 0, "name": ""})
    assert restored == {"step": 7, "lr": 0.1, "count": 3, "name": "x"}
    assert isinstance(restored["step"], jax.Array)
    assert type(restored["count"]) is int
    numbers = {
        "zero": 0j,
        "minus": complex(0.0, -0.0),
        "nan": complex("nan+1j"),
        "tenth": 0.1 + 0j,
        "int": 0,
        "float": -0.0,
    }
    jaxckpt.save(tmp_path / "d", numbers)
    for dtype in ("complex64", "complex128"):
        arrays = jaxckpt.restore(tmp_path / "d", dict.fromkeys(numbers, np.zeros((), dtype)))
        assert {name: str(array) for name, array in arrays.items()} == {
            name: str(np.asarray(number).astype(dtype)) for name, number in numbers.items()
        }
    weak = jaxckpt.restore(tmp_path / "c", {"lr": jnp.float32(0)}, select="lr")["lr"]
    assert weak == jnp.float32(0.1), "a Python float becomes any float, as JAX's weak types do"
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "c", {"step": "", "lr": jnp.int32(0), "count": True, "name": jnp.zeros(())})
    assert len(caught.value.problems) == 4


def test_64_bits_do_not_silently_become_32(run_python: RunPython, tmp_path: Path) -> None:
    run_python(
        f"""
        import jax; jax.config.update("jax_enable_x64", True)
        import jax.numpy as jnp, jaxckpt
        jaxckpt.save({str(tmp_path / "c")!r}, {{"x": jnp.array([1.1]), "n": jnp.arange(3)}})
        assert jaxckpt.restore({str(tmp_path / "c")!r})["x"].dtype == "float64"
        print("all checks passed")
        """,
        word=PASSED,
    )
    with pytest.raises(jaxckpt.MismatchError, match="jax_enable_x64") as caught:
        jaxckpt.restore(tmp_path / "c")
    assert len(caught.value.problems) == 2
    assert jaxckpt.load_numpy(tmp_path / "c")["x"] == np.array([1.1])


# 64 bits --------------------------------------------------------------------------------------------------

WIDE = {
    "int64": np.array([1 << 40, -5, 3], np.int64),
    "uint64": np.array([1 << 63, 5, 3], np.uint64),
    "float64": np.array([1.1, 1e300, -0.0]),
    "complex128": np.array([1.1 + 1e-300j, 2, 3]),
}
DEVICE = SingleDeviceSharding(jax.devices()[1 % len(jax.devices())])
SMALL = jaxckpt.Options(host_bytes=512, chunk_bytes=64, object_bytes=256, sync=False)


def wide_array(shape: tuple[int, ...], dtype: str) -> Any:
    with jax.enable_x64(True):
        return jnp.zeros(shape, dtype)


def uncommitted(shape: tuple[int, ...], dtype: str) -> Any:
    from jaxckpt._restore.match import Uncommitted

    return Uncommitted(shape, dtype)


ASKING: dict[str, Callable[[tuple[int, ...], str], Any]] = {
    "no target": lambda shape, dtype: None,
    "struct": jax.ShapeDtypeStruct,
    "struct with sharding": lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=DEVICE),
    "uncommitted": uncommitted,
    "sharding": lambda shape, dtype: DEVICE,
    "array": wide_array,
}


@pytest.mark.slow
@pytest.mark.parametrize("asking", [*ASKING, "mesh"])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", ["jax", "numpy"])
@pytest.mark.parametrize("size", [0, 3, 300])  # 300: many chunks and objects, read in several rounds
def test_no_value_of_64_bits_changes_silently(
    asking: str, dtype: str, kind: str, size: int, tmp_path: Path, mesh: Mesh
) -> None:
    values = np.resize(WIDE[dtype], size)
    path = tmp_path / "c"

    def restored(options: jaxckpt.Options) -> Any:
        if asking == "mesh":
            return jaxckpt.restore(path, mesh=mesh, specs={"x": P()}, options=options)["x"]
        wanted = ASKING[asking](values.shape, dtype)
        return jaxckpt.restore(path, None if wanted is None else {"x": wanted}, options=options)["x"]

    with jax.enable_x64(True):
        jaxckpt.save(path, {"x": jnp.asarray(values) if kind == "jax" else values}, options=SMALL)
        found = restored(SMALL)
        assert (found.dtype, np.asarray(found).tobytes()) == (values.dtype, values.tobytes())
    with jax.enable_x64(False):
        if kind == "numpy" and asking == "no target":
            found = restored(SMALL)
            assert type(found) is np.ndarray
            assert found.tobytes() == values.tobytes()
            return
        with pytest.raises(jaxckpt.MismatchError, match=r"'x' would be .*x64 is off: a lossy cast") as caught:
            restored(SMALL)
        assert 'Options(cast="unsafe") restores 32 bits' in str(caught.value)
        unsafe = restored(dataclasses.replace(SMALL, cast="unsafe"))
        narrow = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
        assert isinstance(unsafe, jax.Array)
        with np.errstate(all="ignore"):
            assert (unsafe.dtype, np.asarray(unsafe).tobytes()) == (narrow, values.astype(narrow).tobytes())


def test_python_numbers_beyond_32_bits_do_not_silently_become_arrays_of_32(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"n": 1 << 40, "x": 1e300})
    structs = {"n": jax.ShapeDtypeStruct((), "int64"), "x": jax.ShapeDtypeStruct((), "float64")}
    for target in (structs, {"n": jnp.int32(0), "x": jnp.float32(0)}):
        with pytest.raises(jaxckpt.MismatchError, match=r"(?s)'n' .*'x' ") as caught:
            jaxckpt.restore(tmp_path / "c", target)
        assert len(caught.value.problems) == 2
        unsafe = jaxckpt.restore(tmp_path / "c", target, options=jaxckpt.Options(cast="unsafe"))
        assert (unsafe["n"].dtype, unsafe["x"].dtype) == (np.int32, np.float32)
    with jax.enable_x64(True):
        exact = jaxckpt.restore(tmp_path / "c", structs)
        assert (int(exact["n"]), float(exact["x"])) == (1 << 40, 1e300)


# Names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["a.b", "a/b", "a~1b", "a~b"])
def test_similar_names_stay_distinct(tmp_path: Path, odd: str) -> None:
    tree = {odd: jnp.float32(1), "a": {"b": jnp.float32(2)}, "/etc": {"..": jnp.float32(3)}}
    jaxckpt.save(tmp_path / "c", tree)
    assert jaxckpt.restore(tmp_path / "c") == tree
    assert jaxckpt.restore(tmp_path / "c", tree) == tree
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]


def test_an_empty_key_at_the_root_is_a_key(tmp_path: Path) -> None:
    tree = {"": {"a": jnp.float32(1)}, "b": jnp.float32(2)}
    jaxckpt.save(tmp_path / "c", tree)
    one, other = (SingleDeviceSharding(device) for device in jax.devices()[:2])
    assert jaxckpt.restore(tmp_path / "c", {"": one, "b": other}) == tree


def test_an_empty_key_at_the_root_survives_a_rename(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"": jnp.float32(1)})
    assert jaxckpt.restore(tmp_path / "c", rename=lambda path: path) == {"": 1}
    assert jaxckpt.restore(tmp_path / "c", rename={"~2": "y"}) == {"y": 1}


# Meshes and specs -----------------------------------------------------------------------------------------


def test_an_indivisible_dimension_is_reported_with_leaf_and_remedy(path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:3]), ("data",))
    with pytest.raises(
        jaxckpt.errors.SpecError, match=r"'params/w' cannot .*: dimension 0 of \(8, 8\) is not divisible by 3"
    ) as caught:
        jaxckpt.restore(path, mesh=mesh)
    assert "params/w" in caught.value.paths
    assert all("indivisible" in problem.remedy for problem in caught.value.problems)
    assert str(caught.value).count("indivisible") == 1, "one remedy for all leaves"
    restored = jaxckpt.restore(path, mesh=mesh, options=jaxckpt.Options(indivisible="replicate"))
    assert restored["params"]["w"].sharding.is_fully_replicated
    with pytest.raises(jaxckpt.errors.SpecError, match="'params/w'"):
        jaxckpt.save(path.with_name("d"), {"params": restored["params"]}, mesh=mesh, specs=P("data"))


def test_axes_that_the_mesh_lacks_become_replicated(path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("model", "other"))
    assert jaxckpt.restore(path, mesh=mesh)["params"]["w"].sharding == NamedSharding(mesh, P(None, "model"))


def test_a_mesh_without_any_saved_axis_is_an_error(path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    with pytest.raises(jaxckpt.errors.SpecError, match=r"(?s)none of the axes.*data, model.*'params/w'"):
        jaxckpt.restore(path, mesh=mesh)
    assert jaxckpt.restore(path, mesh=mesh, specs=P())["params"]["w"].sharding == NamedSharding(mesh, P())


def test_a_mesh_to_save_for_without_any_axis_of_the_leaves_is_an_error(tmp_path: Path, tree: Any) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("dta", "modle"))
    with pytest.raises(jaxckpt.errors.SpecError, match=r"(?s)none of the axes.*data, model.*'params/w'"):
        jaxckpt.save(tmp_path / "c", tree, mesh=mesh)
    assert not (tmp_path / "c").exists()
    jaxckpt.save(tmp_path / "c", tree, mesh=mesh, specs=P())
    assert jaxckpt.open(tmp_path / "c")["params/w"].spec == P()


def test_a_mesh_must_have_devices(path: Path, mesh: Mesh) -> None:
    for wrong in ({"data": 2, "model": 4}, (2, 4), mesh.abstract_mesh, NamedSharding(mesh, P())):
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes, found"
        ):
            jaxckpt.restore(path, mesh=wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes, found"
        ):
            jaxckpt.save(path.parent / "other", {"x": jnp.ones(3)}, mesh=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(jaxckpt.errors.InputError, match="target is a mesh: pass it as mesh="):
        jaxckpt.restore(path, mesh)


def test_arguments_in_the_wrong_order_are_reported_briefly(tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="path, the first argument, must be a non-empty str") as caught:
        jaxckpt.save({"w": np.arange(10_000)}, tmp_path)  # pyright: ignore[reportArgumentType]
    assert len(str(caught.value)) < 300


def test_specs_must_fit(path: Path, mesh: Mesh, tree: Any) -> None:
    with pytest.raises(jaxckpt.errors.SpecError, match=r"'params/w'.*names mesh axis 'nope'"):
        jaxckpt.restore(path, mesh=mesh, specs=P("nope"))
    with pytest.raises(jaxckpt.errors.SpecError, match=r"'params/b'.*2 entries, but the shape .* has 1 dimension"):
        jaxckpt.restore(path, mesh=mesh, specs=lambda path, leaf: P("data", "model") if "params" in path else P())
    with pytest.raises(
        jaxckpt.errors.SpecError, match="'param', but no leaf at or below that path is an array on devices"
    ):
        jaxckpt.restore(path, mesh=mesh, specs={"param": P()})
    unmatched = r"'parms/w', which matches no array .*; did you mean 'params/w'\?"
    with pytest.raises(jaxckpt.errors.SpecError, match=unmatched):
        jaxckpt.restore(path, mesh=mesh, specs={"parms/w": P()})
    with pytest.raises(jaxckpt.errors.SpecError, match=unmatched):
        jaxckpt.save(path.with_name("d"), tree, mesh=mesh, specs={"parms/w": P()})
    with pytest.raises(jaxckpt.errors.SpecError, match=r"'\*\*/nothing', which matches no array"):
        jaxckpt.restore(path, mesh=mesh, specs={"**/nothing": P()})
    with pytest.raises(
        jaxckpt.errors.SpecError, match=r"specs is \('data', None\): write PartitionSpec\('data', None\)"
    ):
        jaxckpt.restore(path, mesh=mesh, specs=("data", None))
    with pytest.raises(jaxckpt.errors.SpecError, match=r"specs is 'data': write PartitionSpec\('data'\)"):
        jaxckpt.restore(path, mesh=mesh, specs="data")
    with pytest.raises(
        jaxckpt.errors.SpecError, match=r"expected a jax.*PartitionSpec, such as PartitionSpec\('data'\)"
    ):
        jaxckpt.save(path.with_name("d"), tree, mesh=mesh, specs={"params": "data"})
    with pytest.raises(jaxckpt.errors.SpecError, match="expected a jax") as caught:
        jaxckpt.restore(path, mesh=mesh, specs=np.arange(900))
    assert len(str(caught.value)) < 200
    with pytest.raises(jaxckpt.errors.InputError, match="needs mesh="):
        jaxckpt.restore(path, specs=P())
    with pytest.raises(jaxckpt.errors.InputError, match="needs mesh="):
        jaxckpt.save(path.with_name("d"), tree, specs=P())


KEYS: list[tuple[Any, str, str]] = [
    ({"params/w": 0}, "has the key 'params/w'", 'not paths: give {"params": {"w": VALUE}}, or'),
    ({"params/w": {"x": 0}}, "has the key 'params/w'", "not paths: give "),
    ({"parms/w": 0}, "has the key 'parms/w'", 'not paths: give {"params": {"w": VALUE}}, or'),
    ({"nothing/x": 0}, "has the key 'nothing/x'", "not paths: give nested dicts, or"),
    ({"params/*": 0}, "has the key 'params/*'", 'not globs: give {"params": VALUE}, or'),
    ({"params": {"**": 0}}, "has the key '**'", 'not globs: give {"params": VALUE}, or'),
    ({"*": 0}, "has the key '*'", "not globs: give nested dicts, or a function of (path, leaf)"),
    ({("params", "w"): 0}, "has the key ('params', 'w')", 'not tuples: give {"params": {"w": VALUE}}, or'),
]


@pytest.mark.parametrize(("prefix", "key", "remedy"), KEYS, ids=lambda value: str(value)[:30])
def test_keys_that_are_paths_globs_or_tuples_are_explained(
    path: Path, mesh: Mesh, tree: Any, prefix: Any, key: str, remedy: str
) -> None:
    def expect(argument: str, value: str) -> Any:
        text = re.escape(remedy.replace("VALUE", value))
        return pytest.raises(jaxckpt.errors.InputError, match=rf"^{argument} {re.escape(key)}, but the keys .*{text}")

    specs, dtypes, policies = (jax.tree.map(lambda _, value=value: value, prefix) for value in (P(), "f2", "unsafe"))
    if key.endswith(")"):  # specs= takes paths and globs
        with expect("specs", "PartitionSpec(…)"):
            jaxckpt.restore(path, mesh=mesh, specs=specs)
    with expect("dtype", '"float16"'):
        jaxckpt.restore(path, dtype=dtypes)
    with expect("dtype", '"float16"'):
        jaxckpt.save(path.with_name("d"), tree, dtype=dtypes)
    options = jaxckpt.Options(cast=policies)
    if "nothing" in key or "parms" in key or "x" in str(prefix):  # may be for another tree
        jaxckpt.restore(path, options=options)
    else:
        with expect(r"Options\.cast", '"unsafe"'):
            jaxckpt.restore(path, options=options)


def test_specs_by_path_and_glob(tmp_path: Path, mesh: Mesh) -> None:
    layers = {str(n): {"q": {"kernel": jnp.ones((8, 8))}, "norm": jnp.ones(8)} for n in range(2)}
    tree = {"layers": layers, "embed": jnp.ones((8, 8)), "head": jnp.ones((8, 8))}
    specs = {
        "embed": P("data"),
        "layers/1/q": P(),
        "layers/{i}/norm": P("model"),
        "**/q/*": P(None, "model"),
        "h*": P(),
    }
    jaxckpt.save(tmp_path / "c", tree, mesh=mesh, specs=specs)
    restored = jaxckpt.restore(tmp_path / "c", mesh=mesh)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(restored)
    }
    assert found == {
        "embed": P("data"),
        "head": P(),
        "layers/0/norm": P("model"),
        "layers/0/q/kernel": P(None, "model"),
        "layers/1/norm": P("model"),
        "layers/1/q/kernel": P(),
    }


def test_keys_of_the_tree_may_look_like_paths(tmp_path: Path, mesh: Mesh) -> None:
    tree = {"params/w": jnp.ones(8), "*": jnp.ones(8), "m": {("a", "b"): {"c": jnp.ones(8)}}}
    prefix = {"params/w": 0, "*": 0, "m": {("a", "b"): 0}}
    specs, dtypes, policies = (jax.tree.map(lambda _, value=value: value, prefix) for value in (P(), "f2", "unsafe"))
    jaxckpt.save(tmp_path / "c", tree, mesh=mesh, specs=specs)
    restored = jaxckpt.restore(tmp_path / "c", dtype=dtypes, options=jaxckpt.Options(cast=policies))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(restored)} == {"float16"}
    with pytest.raises(jaxckpt.errors.InputError, match=r"int8 for .*no leaf there has that kind of number$"):
        jaxckpt.restore(tmp_path / "c", dtype={"m": {("a", "b"): "int8"}})


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ({"params": {"w": ("d", "m")}}, "('d', 'm') at 'params/w': write PartitionSpec('d', 'm')"),
        ({"params": {"w": [None, "d"]}}, "[None, 'd'] at 'params/w': write PartitionSpec(None, 'd')"),
        ({"params": ("d", None)}, "('d', None) at 'params': write PartitionSpec('d', None)"),
        ({"a": P(), "params": ["d"]}, "['d'] at 'params': write PartitionSpec('d')"),
        ({"params": (None, ("d", "m"))}, "(None, ('d', 'm')) at 'params': write PartitionSpec(None, ('d', 'm'))"),
        ([P(), [P("d"), P("m")], ["d"]], "['d'] at '2': write PartitionSpec('d')"),
    ],
)
def test_axis_names_in_specs_without_a_partition_spec(path: Path, mesh: Mesh, specs: Any, text: str) -> None:
    with pytest.raises(jaxckpt.errors.SpecError, match=rf"^specs has {re.escape(text)}$"):
        jaxckpt.restore(path, mesh=mesh, specs=specs)


def test_a_layout_whose_devices_do_not_exist_names_three_remedies(path: Path, run_python: RunPython) -> None:
    out = run_python(
        f"""
        import jaxckpt
        try:
            jaxckpt.restore({str(path)!r})
        except jaxckpt.errors.LayoutError as error:
            print(error)
        """,
        devices=2,
    )
    assert re.search(r"'params/w' was saved as .*, which needs the devices with the ids 0–7; this job has 0–1\n", out)
    assert all(way in out for way in ("mesh=", "target=", "load_numpy"))


def test_a_missing_layout_names_the_ids_of_devices(path: Path) -> None:
    """As many devices as at the save, but other ids: so it is if the number of processes has changed."""
    store = store_at(path, Options())
    saved, content = load_manifest(store)
    ids = [*range(4), *range(2048, 2052)]
    meshes = [msgspec.structs.replace(mesh, devices=ids) for mesh in saved.meshes]
    moved = msgspec.structs.replace(saved, meshes=meshes)
    store.republish(saved.data_folder, manifests.encode(moved), content, sync=False)
    with pytest.raises(jaxckpt.errors.LayoutError, match=r"the ids 0–3, 2048–2051; this job has 0–7\n"):
        jaxckpt.restore(path)


# Paths ----------------------------------------------------------------------------------------------------


def test_existing_paths_are_not_overwritten(path: Path, tree: Any, tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="overwrite=True"):
        jaxckpt.save(path, {"other": 1})
    assert jaxckpt.restore(path)["step"] == 7
    jaxckpt.save(path, {"other": 1}, overwrite=True)
    assert jaxckpt.restore(path) == {"other": 1}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(jaxckpt.errors.CheckpointExistsError, match=r"thesis\.tex"):
            jaxckpt.save(tmp_path / "home", tree, overwrite=overwrite)
        with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="is a file"):
            jaxckpt.save(tmp_path / "file", tree, overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_empty_subfolders_are_not_other_files(overwrite: bool, tree: Any, tmp_path: Path) -> None:
    (tmp_path / "c" / "input_iterators" / "0").mkdir(parents=True)
    (tmp_path / "c" / "summaries").mkdir()
    jaxckpt.save(tmp_path / "c", tree, overwrite=overwrite)
    assert jaxckpt.restore(tmp_path / "c")["step"] == 7
    assert (tmp_path / "c" / "input_iterators" / "0").is_dir()
    for number, other in enumerate(("file", "link")):
        inner = tmp_path / f"{number}" / "a" / "b"
        inner.mkdir(parents=True)
        (inner / other).write_text("x") if other == "file" else (inner / other).symlink_to(tmp_path / "c")
        with pytest.raises(jaxckpt.errors.CheckpointExistsError, match=r"holds other files \(a\)"):
            jaxckpt.save(tmp_path / f"{number}", tree, overwrite=overwrite)


def test_the_reason_why_a_path_is_not_a_checkpoint_is_reported(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / f"data-{0:032x}").mkdir()
    for read in (jaxckpt.restore, jaxckpt.load_numpy, jaxckpt.open):
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="the path does not exist, or the folder is empty"):
            read(tmp_path / "none")
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="folder of checkpoints; open one of them: ckpt"):
            read(tmp_path)
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="it is a file"):
            read(tmp_path / "file")
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="never finished"):
            read(tmp_path / "torn")


# Trees that cannot be stored ------------------------------------------------------------------------------


def test_leaves_that_cannot_be_stored_are_listed(tmp_path: Path) -> None:
    gone = jnp.ones(3)
    gone.delete()
    tree = {"ok": 1, "set": {1}, "object": np.array([object()]), "text": np.array("x"), "gone": gone, "f": open}
    with pytest.raises(jaxckpt.errors.TreeError) as caught:
        jaxckpt.save(tmp_path / "c", tree)
    text = str(caught.value)
    assert text.startswith("5 of 6 leaves")
    assert all(f"'{name}'" in text for name in tree if name != "ok")
    with pytest.raises(jaxckpt.errors.TreeError, match="tracer"):
        jax.jit(lambda x: jaxckpt.save(tmp_path / "c", {"x": x}))(1.0)
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    with pytest.raises(jaxckpt.errors.TreeError, match="nested deeper"):
        jaxckpt.save(tmp_path / "c", deep)
    assert not (tmp_path / "c").exists()


def test_an_array_of_many_dimensions_comes_back(tmp_path: Path) -> None:
    array = np.arange(4.0).reshape((2, *(1,) * 28, 2))
    jaxckpt.save(tmp_path / "c", {"x": array})
    assert np.array_equal(jaxckpt.restore(tmp_path / "c")["x"], array)


@pytest.mark.parametrize("rank", [pytest.param(31), 32, 40])
def test_an_array_of_too_many_dimensions_is_refused_by_path(rank: int, tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.TreeError, match=f"'x' has {rank} dimensions"):
        jaxckpt.save(tmp_path / "c", {"x": np.zeros((1,) * rank)})
    assert not (tmp_path / "c").exists()


def test_keys_of_too_many_dimensions_are_refused_by_path(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), (1,) * 30)
    with pytest.raises(jaxckpt.errors.TreeError, match="'k' has PRNG keys of 30 dimensions; at most 29"):
        jaxckpt.save(tmp_path / "c", {"k": keys})
    assert not (tmp_path / "c").exists()
    jaxckpt.save(tmp_path / "c", {"k": keys[0]})
    assert jaxckpt.restore(tmp_path / "c")["k"].ndim == 29


def test_metadata_may_nest_as_deep_as_the_manifest_allows(tmp_path: Path) -> None:
    metadata: Any = 1
    for _ in range(497):
        metadata = [metadata]
    jaxckpt.save(tmp_path / "c", {"a": 1}, metadata=metadata)
    assert jaxckpt.open(tmp_path / "c").metadata == metadata


def test_metadata_comes_back_or_is_refused(path: Path, tmp_path: Path) -> None:
    assert jaxckpt.open(path).metadata == {"run": [1, None, "x"]}
    for bad in ({1: 2}, (1, 2), float("nan"), {"x": jnp.ones(())}):
        with pytest.raises(jaxckpt.errors.InputError, match="plain JSON"):
            jaxckpt.save(tmp_path / "c", {"a": 1}, metadata=bad)


@pytest.mark.parametrize("wrong", ["False", "no", None, 0, 1])
def test_flags_are_bools(path: Path, tree: Any, tmp_path: Path, wrong: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "overwrite": lambda: jaxckpt.save(path, tree, overwrite=wrong),
        "overwrite ": lambda: jaxckpt.save_async(tmp_path / "new", tree, overwrite=wrong),
        " overwrite": lambda: jaxckpt.convert(path, tmp_path / "new", overwrite=wrong),
        "strict": lambda: jaxckpt.restore(path, strict=wrong),
        "strict ": lambda: jaxckpt.open(path).plan(strict=wrong),
        "quick": lambda: jaxckpt.verify(path, quick=wrong),
        "background": lambda: jaxckpt.Checkpointer(tmp_path / "steps", background=wrong),
        "fail_fast": lambda: jaxckpt.Checkpointer(tmp_path / "steps", fail_fast=wrong),
        "force": lambda: jaxckpt.Checkpointer(tmp_path / "steps").save(1, tree, force=wrong),
        "overwrite  ": lambda: jaxckpt.Checkpointer(tmp_path / "steps").save(1, tree, overwrite=wrong),
    }
    for name, call in calls.items():
        with pytest.raises(jaxckpt.errors.InputError, match=f"^{name.strip()} must be True or False, found {wrong!r}"):
            call()
    assert not (tmp_path / "new").exists()
    assert jaxckpt.Checkpointer(tmp_path / "steps").steps() == []
    assert jaxckpt.verify(path, quick=np.True_).ok  # pyright: ignore[reportArgumentType]
    jaxckpt.save(path, tree, overwrite=np.True_)  # pyright: ignore[reportArgumentType]


def test_options_are_checked() -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="chunk_bytes"):
        jaxckpt.Options(chunk_bytes=0)
    with pytest.raises(jaxckpt.errors.InputError, match="compression"):
        jaxckpt.Options(compression="lzma")  # pyright: ignore[reportArgumentType]
    with pytest.raises(jaxckpt.errors.InputError, match=r"chunk_bytes .*blosc"):
        jaxckpt.Options(compression="blosc", chunk_bytes=2 << 30, object_bytes=4 << 30)
    with pytest.raises(jaxckpt.errors.InputError, match="non-empty"):
        jaxckpt.open("")


# Choosing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 1e6, float("inf"), "1", True, np.True_, np.float64(5), [5]])
@pytest.mark.parametrize("name", ["object_bytes", "chunk_bytes", "host_bytes", "staging_bytes"])
def test_sizes_in_bytes_are_whole_numbers(name: str, size: Any) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=f"Options.{name} must be a whole number above zero, found "):
        jaxckpt.Options(**{name: size})


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_seconds": "30"}, {"timeout_seconds": True}, {"timeout_seconds": float("nan")},
        {"timeout_seconds": -1}, {"timeout_seconds": None}, {"sync": "no"}, {"sync": 0},
        {"sync": None}, {"cast": True}, {"when_busy": None}, {"compression": ["zstd"]}, {"indivisible": 1},
        {"staging_memory": "pinned_host"}, {"storage": [("a", 1)]}, {"progress": "yes"}, {"progress": 1},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_wrong_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=f"Options.{next(iter(wrong))} must be"):
        jaxckpt.Options(**wrong)


def test_options_of_numpy_are_plain_numbers(tmp_path: Path) -> None:
    given: Any = {
        "object_bytes": np.int64(1 << 20), "chunk_bytes": np.uint32(1 << 12), "host_bytes": np.int32(1 << 24),
        "staging_bytes": np.int16(1 << 13), "timeout_seconds": np.float32(30),
    }  # fmt: skip
    options = jaxckpt.Options(**given)
    assert {type(getattr(options, name)) for name in given} == {int, float}
    assert jaxckpt.Options(timeout_seconds=float("inf")).timeout_seconds > 1e9
    tree = {"a": np.arange(300_000.0), "b": jnp.ones((8, 8))}
    jaxckpt.save_async(tmp_path / "c", tree, options=options).wait()
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "c", options=options)["a"], tree["a"])
    jaxckpt.restore(tmp_path / "c", options=options)
    assert jaxckpt.verify(tmp_path / "c", options=options).ok
    jaxckpt.convert(tmp_path / "c", tmp_path / "d", options=options, chunk_bytes=np.int64(1 << 10))  # pyright: ignore


@pytest.mark.parametrize("options", [{}, {"sync": False}, "fast", 5, jaxckpt.Options], ids=str)
def test_invalid_options(tmp_path: Path, options: Any) -> None:
    jaxckpt.save(tmp_path / "c", {"x": 1})
    checkpoint = jaxckpt.open(tmp_path / "c")
    for call in (
        lambda: jaxckpt.save(tmp_path / "d", {"x": 1}, options=options),
        lambda: jaxckpt.save_async(tmp_path / "d", {"x": 1}, options=options),
        lambda: jaxckpt.restore(tmp_path / "c", options=options),
        lambda: jaxckpt.load_numpy(tmp_path / "c", options=options),
        lambda: jaxckpt.open(tmp_path / "c", options=options),
        lambda: checkpoint.plan(mesh={"a": 1}, options=options),
        lambda: jaxckpt.verify(tmp_path / "c", options=options),
        lambda: jaxckpt.diff(tmp_path / "c", tmp_path / "c", options=options),
        lambda: jaxckpt.report(tmp_path / "c", options=options),
        lambda: jaxckpt.convert(tmp_path / "c", tmp_path / "d", options=options),
        lambda: jaxckpt.Checkpointer(tmp_path / "d", options=options),
        lambda: jaxckpt.orbax.Handler(options),
    ):
        with pytest.raises(jaxckpt.errors.InputError, match=r"options must be a jaxckpt\.Options"):
            call()
    assert os.listdir(tmp_path) == ["c"]


class Level(enum.IntEnum):
    HIGH = 3


class Name(str, enum.Enum):  # noqa: UP042
    LONG = "long"


@pytest.mark.parametrize(
    "value", [np.float64(0.5), Level.HIGH, Name.LONG, np.str_("s"), 1 << 70, -(1 << 90), 1e22, -0.0]
)
def test_subclasses_of_json_types_come_back_as_json_types(tmp_path: Path, value: Any) -> None:
    given = {"v": value, "list": [value]}
    jaxckpt.save(tmp_path / "c", {"x": np.ones(3)}, metadata=given, process_state={"s": given})
    checkpoint = jaxckpt.open(tmp_path / "c")
    for found in (checkpoint.metadata, checkpoint.process_states[0]["s"]):
        assert found == given
        assert type(found["v"]) in (int, float, str)


@pytest.mark.parametrize(
    "value",
    [
        np.int64(1),
        np.float32(1),
        b"x",
        (1,),
        {1: 1},
        {Level.HIGH: 1},
        {"\ud800": 1},
        "\ud800",
        float("nan"),
        {1},
        ...,
    ],
    ids=ascii,
)
def test_metadata_that_is_not_json_is_refused_before_data_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="metadata must be plain JSON"):
        jaxckpt.save(tmp_path / "c", {"x": np.ones(3)}, metadata=[value])
    with pytest.raises(jaxckpt.errors.InputError, match=r"process_state\['s'\] must be plain JSON"):
        jaxckpt.save(tmp_path / "c", {"x": np.ones(3)}, process_state={"s": [value]})
    for name in ("\ud800", 5, None):
        with pytest.raises(jaxckpt.errors.InputError, match="process_state"):
            jaxckpt.save(tmp_path / "c", {"x": np.ones(3)}, process_state={name: 1})  # pyright: ignore
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [{"lr": np.float32(1)}]}, r"metadata\['a'\]\[0\]\['lr'\] is of type float32; use float\(…\)"),
        ({"n": np.int64(1)}, r"metadata\['n'\] is of type int64; use int\(…\)"),
        ({"n": jnp.int32(1)}, r"metadata\['n'\] is of type \w+; use int\(…\)"),
        ({"n": np.ones(3)}, r"metadata\['n'\] is of type ndarray; use \.tolist\(\)"),
        ({"ok": 1, "n": np.bool_(True)}, r"metadata\['n'\] is of type bool; use bool\(…\)"),
        ({"n": (1, 2)}, r"metadata\['n'\] is of type tuple; use list\(…\)"),
        ({"n": float("inf")}, r"metadata\['n'\] is inf, which JSON does not have"),
        ({"n": {5: 1}}, r"metadata\['n'\] has the key 5; the keys of JSON are str"),
        ({1, 2}, r"metadata is of type set$"),
    ],
)
def test_a_value_that_is_not_json_is_named(tmp_path: Path, value: Any, place: str) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=f"^metadata must be plain JSON: {place}"):
        jaxckpt.save(tmp_path / "c", {"x": 1}, metadata=value)


def test_a_pattern_for_the_only_leaf(tmp_path: Path) -> None:
    """Letters in the other case are close."""
    jaxckpt.save(tmp_path / "c", {"w": 1})
    with pytest.raises(jaxckpt.errors.TreeError) as error:
        jaxckpt.load_numpy(tmp_path / "c", select="W")
    assert str(error.value) == "select: 'W' does not match 'w', the only leaf of the checkpoint; did you mean 'w'?"


def test_meshes_and_specs_that_cannot_be_recorded_are_refused_by_leaf(tmp_path: Path) -> None:
    devices = np.array(jax.devices()).reshape(2, 4)
    for axes in [(0, 1), (("a", "b"), "c")]:
        tree = {"a": {"w": jax.device_put(jnp.ones(8), NamedSharding(Mesh(devices, axes), P()))}}
        with pytest.raises(
            jaxckpt.errors.SpecError, match=r"'a/w' cannot .*: its mesh has axes .*: only names that are str"
        ):
            jaxckpt.save(tmp_path / "c", tree)
    mesh = Mesh(devices, ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        unsummed, other = (jax.sharding.reshard(jnp.arange(n), P("y", unreduced={"x"})) for n in (8.0, 16.0))
        whole = jax.sharding.reshard(jnp.arange(8.0), P("y", reduced={"x"}))
    unreduced = r"cannot .*: PartitionSpec has unreduced mesh axes \['x'\]"
    for named in ({}, {"mesh": mesh}):
        with pytest.raises(jaxckpt.errors.SpecError, match=rf"(?s)2 leaves.*'v' {unreduced}.*'w' {unreduced}"):
            jaxckpt.save(tmp_path / "c", {"v": other, "w": unsummed}, **named)
    jaxckpt.save(tmp_path / "c", {"w": whole})
    assert jaxckpt.restore(tmp_path / "c")["w"].sharding.spec == whole.sharding.spec
    with pytest.raises(jaxckpt.errors.SpecError, match=r"'w' cannot .*: PartitionSpec has unreduced"):
        jaxckpt.restore(tmp_path / "c", {"w": unsummed.sharding})


def test_functions_in_a_target_are_kept_and_functions_are_not_saved(tmp_path: Path) -> None:
    module = {"weight": jnp.ones(3), "activation": jax.nn.gelu}
    with pytest.raises(
        jaxckpt.errors.TreeError, match=r"'activation' is of type .*; leave functions out, as jax\.tree\.map"
    ):
        jaxckpt.save(tmp_path / "ckpt", module)
    jaxckpt.save(tmp_path / "ckpt", {**module, "activation": None})
    restored = jaxckpt.restore(tmp_path / "ckpt", {**module, "weight": jax.ShapeDtypeStruct((3,), "float32")})
    assert restored["activation"] is jax.nn.gelu
    assert restored["weight"].tolist() == [1, 1, 1]
    # A missing array is still an error.
    with pytest.raises(jaxckpt.MismatchError, match="'bias' is not in the checkpoint"):
        jaxckpt.restore(tmp_path / "ckpt", {**module, "bias": jnp.ones(3)})


def test_select_by_glob_expression_and_function(path: Path) -> None:
    assert set(jaxckpt.load_numpy(path, select="params")["params"]) == {"w", "b"}
    assert list(jaxckpt.load_numpy(path, select="params/*")) == ["params"]
    assert jaxckpt.load_numpy(path, select="*/w").keys() == {"params"}
    assert list(jaxckpt.load_numpy(path, select=["**/b", re.compile("st.*")])) == ["params", "step"]
    assert jaxckpt.load_numpy(path, select=lambda path: path == "step") == {"step": 7}
    assert jaxckpt.load_numpy(path, select="params/**/w")["params"].keys() == {"w"}
    assert jaxckpt.load_numpy(path, select="**/step") == {"step": 7}
    assert jaxckpt.load_numpy(path, select="**/params/**/b")["params"].keys() == {"b"}
    with pytest.raises(jaxckpt.errors.TreeError, match="matches none"):
        jaxckpt.load_numpy(path, select="par**/ams")
    part = jaxckpt.load_numpy(path, select="layers/1")["layers"]
    assert part[0] is None
    np.testing.assert_array_equal(part[1], np.ones(3))
    with pytest.raises(jaxckpt.errors.TreeError, match="matches none of the 5 leaves"):
        jaxckpt.load_numpy(path, select="nothing/**")


@pytest.mark.parametrize(
    ("saved", "target", "remedy"),
    [
        (
            lambda t: (t, [1]),
            lambda t: t,
            "'0' in the checkpoint: wrap the target as (target,) and pass select='0'",
        ),
        (
            lambda t: {"params": t, "opt": {"mu": t}, "step": 0},
            lambda t: t,
            "as {'params': target} and pass select='params'",
        ),
        (lambda t: (t, {"ema": t}, t), lambda t: t, "target, for example, as (target,) and pass select='0'"),
        (lambda t: (0, [t]), lambda t: t, "wrap the target as (None, [target]) and pass select='1/0'"),
        (lambda t: [1, 2, 3, t], lambda t: t, "as {3: target} and pass select='3'"),
        (lambda t: {"state": {4: t}}, lambda t: t, "wrap the target as {'state': {4: target}}"),
        (lambda t: t, lambda t: {"state": (t,)}, "without 'state/0': pass only what the target has at 'state/0'"),
        (lambda t: {**t, "o": 1}, lambda t: [t], "without '0': pass only what the target has at '0'"),
    ],
)
def test_a_target_whose_leaves_are_all_in_another_container(
    tmp_path: Path, saved: Callable[[Any], Any], target: Callable[[Any], Any], remedy: str
) -> None:
    tree = {f"w{number}": {"x": number} for number in range(50)}
    jaxckpt.save(tmp_path / "c", saved(tree))
    for strict in (True, False):
        with pytest.raises(jaxckpt.MismatchError, match="none of the target's 50 leaves") as error:
            jaxckpt.restore(tmp_path / "c", target(tree), strict=strict)
        assert str(error.value).endswith(remedy)
        assert len(error.value.problems) == 50
        assert error.value.problems[0].reason.startswith("is '")
        assert "did you mean" not in str(error.value)
    with pytest.raises(jaxckpt.MismatchError, match="is not in the checkpoint"):
        jaxckpt.restore(tmp_path / "c", target({**tree, "new": 0}))


def test_a_target_in_another_container_with_new_names(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", ({"w": 1}, {"o": 2}))
    with pytest.raises(
        jaxckpt.MismatchError, match=r"below 'a/b' .*: wrap the target as {'a': {'b': target}} and pass"
    ):
        jaxckpt.restore(tmp_path / "c", {"w": 0}, rename={"0": "a/b"}, select="1")


@pytest.mark.parametrize("name", ["layer", "params"])
def test_the_paths_of_a_checkpoint_are_not_scanned_for_each_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Counted(dict[str, int]):
        scanned = 0

        def __iter__(self) -> Iterator[str]:
            for path in super().__iter__():
                Counted.scanned += 1
                yield path

    def counted(*args: Any) -> tuple[Any, Any, Any]:
        structure, numbers, chosen = renamed_tree(*args)
        return structure, Counted(numbers), chosen

    monkeypatch.setattr(match, "renamed_tree", counted)
    monkeypatch.setattr(match, "subtree", lambda *args: calls.append(args) or subtree(*args))
    calls: list[Any] = []
    target = {f"layer{number}": DEVICE for number in range(100)}
    saved = {f"layer{number}": {"w": number} for number in range(100)}
    jaxckpt.save(tmp_path / "c", saved if name == "layer" else {"params": saved})
    if name == "layer":
        assert jaxckpt.restore(tmp_path / "c", target)["layer7"].keys() == {"w"}
    else:
        with pytest.raises(jaxckpt.MismatchError, match="'layer0' is not in the checkpoint"):
            jaxckpt.restore(tmp_path / "c", target)
    assert Counted.scanned < 10 * len(target)
    assert len(calls) < 10


def test_many_containers_of_the_leaves_of_a_target_are_counted(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"layers": [{"w": number} for number in range(2000)]})
    remedy = (
        r"\nall leaves of the target are below 'layers/0' and 1,999 other paths in the checkpoint: wrap the target,"
        r" for example, as \{'layers': \[target\]\} and pass select='layers/0'$"
    )
    with pytest.raises(jaxckpt.MismatchError, match=remedy):
        jaxckpt.restore(tmp_path / "c", {"w": 0})


def test_the_selection_that_a_remedy_names_matches_nothing_else(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"[0]": {"w": 1}, "0": {"v": 2}})
    with pytest.raises(jaxckpt.MismatchError, match=r"as \{'\[0\]': target\} and pass select='\[\[\]0\]'$"):
        jaxckpt.restore(tmp_path / "c", {"w": 0})
    assert jaxckpt.restore(tmp_path / "c", {"[0]": {"w": 0}}, select="[[]0]") == {"[0]": {"w": 1}}


def test_the_remedies_for_a_target_in_another_container(tmp_path: Path) -> None:
    target = {"w": 0, "b": [0]}
    for number, (tree, wrapped, select) in enumerate(
        [
            (({"w": 1, "b": [2]}, 3), (target,), "0"),
            ((3, [{"w": 1, "b": [2]}]), (None, [target]), "1/0"),
            ([3, 3, 3, {"w": 1, "b": [2]}], {3: target}, "3"),
        ]
    ):
        jaxckpt.save(tmp_path / str(number), tree)
        restored = jaxckpt.restore(tmp_path / str(number), wrapped, select=select)
        assert jax.tree.leaves(restored) == [2, 1]


class Empty(NamedTuple):
    pass


@pytest.mark.parametrize("format", ["jaxckpt", "orbax"])
def test_only_selected_empty_containers_are_restored(tmp_path: Path, format: str) -> None:
    params = {"w": np.ones(3, "float32"), "layers": [np.ones(2, "float32"), {}], "none": None}
    adam = ({"count": 3, "mu": np.ones(3, "float32")}, Empty(), {"inner": {}})
    jaxckpt.save(tmp_path / "saved", {"params": params, "opt": adam, "sgd": (Empty(), Empty())})
    at = tmp_path / "at"
    jaxckpt.convert(tmp_path / "saved", at, format=format)
    everything = jaxckpt.load_numpy(at)
    assert everything.keys() == {"params", "opt", "sgd"}
    assert everything["params"].keys() == params.keys()
    for load in (jaxckpt.load_numpy, jaxckpt.restore):
        assert list(load(at, select="params")) == ["params"]
        assert load(at, select="params")["params"].keys() == params.keys()
        assert load(at, select="params")["params"]["layers"][1] == {}
        assert load(at, select="params/layers/0")["params"] == {"layers": [pytest.approx(np.ones(2, "float32")), None]}
        (first, second, third) = load(at, select="opt/0/count")["opt"]
        assert (first, second, third) == ({"count": 3}, None, None)
        assert jax.tree.structure(load(at, select="opt")["opt"]) == jax.tree.structure(everything["opt"])
        for select in (["opt", "sgd"], lambda path: not path.startswith("params/")):
            optimizers = {name: everything[name] for name in ("opt", "sgd")}
            assert jax.tree.structure(load(at, select=select)) == jax.tree.structure(optimizers)
        # An entry may name only empty containers.
        assert load(at, select="sgd") == {"sgd": everything["sgd"]}
        assert load(at, select="params/none") == {"params": {"none": None}}
    jaxckpt.convert(at, tmp_path / "less", select="params")
    assert list(jaxckpt.load_numpy(tmp_path / "less")) == ["params"]
    assert jaxckpt.diff(tmp_path / "less", at, select="params").identical
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"params": sharding, "opt": sharding, "sgd": sharding}
    restored = jaxckpt.restore(at, target, select=["params/w", "opt/0"])
    assert restored["params"].keys() == {"w"}
    assert restored["opt"][1:] in ((None, None), [None, None])
    assert restored["sgd"] is sharding


def test_a_selection_from_a_tree_without_leaves(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {})
    nothing = r"^select: .* matches nothing in .*, which has no leaves"
    for select in ("params", ["params"], re.compile("params"), lambda path: path == "params"):
        with pytest.raises(jaxckpt.errors.TreeError, match=nothing):
            jaxckpt.load_numpy(tmp_path / "c", select=select)
        with pytest.raises(jaxckpt.errors.TreeError, match=nothing):
            jaxckpt.restore(tmp_path / "c", {"params": 0}, select=select)
        with pytest.raises(jaxckpt.errors.TreeError, match=nothing):
            jaxckpt.diff(tmp_path / "c", tmp_path / "c", select=select)
    assert jaxckpt.load_numpy(tmp_path / "c", select="**") == {}
    jaxckpt.save(tmp_path / "c", {"a": {}, "b": None}, overwrite=True)
    for select in ("b", ["b"]):
        assert jaxckpt.load_numpy(tmp_path / "c", select=select) == {"b": None}
    with pytest.raises(jaxckpt.errors.TreeError, match=r"^select: 'c' matches nothing in .*, which has no leaves$"):
        jaxckpt.load_numpy(tmp_path / "c", select=["b", "c"])


def test_a_trailing_double_star_may_be_no_component(tmp_path: Path) -> None:
    tree = {"w": 1, "b": {"w": 2}, "wx": 3, "[0]": 4, "0": 5}
    jaxckpt.save(tmp_path / "c", tree)
    assert jaxckpt.load_numpy(tmp_path / "c", select="w/**") == {"w": 1}
    assert jaxckpt.load_numpy(tmp_path / "c", select=["b/**/**"]) == {"b": {"w": 2}}
    assert jaxckpt.load_numpy(tmp_path / "c", select="**/w/**") == {"w": 1, "b": {"w": 2}}
    assert jaxckpt.load_numpy(tmp_path / "c", select="**") == tree


def test_paths_in_a_list_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pattern: str) -> re.Pattern[str]:
        raise AssertionError(pattern)

    monkeypatch.setattr(select_module, "_glob", refuse)
    paths = [f"layers/{number}/w" for number in range(100)]
    selector = select_module.parse_select([*paths[10:20], "layers/3", "layers/1"])
    chosen = [path for path, is_chosen in zip(paths, selector.choose(paths), strict=True) if is_chosen]
    assert chosen == [path for path in paths if selector(path)] == [paths[1], paths[3], *paths[10:20]]
    assert not any(map(selector, ("layers", "layers/33", "layers/3x", "")))
    assert selector.tests == ()


def test_a_renamed_tree_has_no_empty_containers(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"a": {"w": 1}, "opt": (optax.EmptyState(), None), "none": None})
    assert jaxckpt.load_numpy(tmp_path / "c", rename={"a": "b"}) == {"b": {"w": 1}}
    assert jaxckpt.restore(tmp_path / "c", {"b": {"w": 0}, "none": None}, rename={"a": "b"})["b"] == {"w": 1}


def test_select_with_a_target_keeps_the_other_leaves(path: Path, tree: Any) -> None:
    mine = jax.tree.map(lambda leaf: leaf * 0, tree)
    restored = jaxckpt.restore(path, mine, select="params/w")
    np.testing.assert_array_equal(restored["params"]["w"], tree["params"]["w"])
    assert restored["params"]["b"] is mine["params"]["b"]


def test_rename_by_mapping_and_function(path: Path, tree: Any) -> None:
    target = {"model": {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}, "layers": [jnp.zeros(3)] * 2, "step": 0}
    restored = jaxckpt.restore(path, target, rename={"params": "model"})
    np.testing.assert_array_equal(restored["model"]["w"], tree["params"]["w"])
    flat = jaxckpt.restore(path, rename=lambda path: path.replace("params/", ""))
    assert flat.keys() == {"w", "b", "layers", "step"}
    with pytest.raises(jaxckpt.errors.TreeError, match="the same path"):
        jaxckpt.restore(path, rename={"params/w": "params/b"})


SELECTS: list[tuple[Any, str]] = [
    ("parms/**", r"'parms/\*\*' matches none of the 5 leaves.*did you mean 'params'"),
    ("w", r"'w' matches none of the 5 leaves.*; did you mean '\*\*/w'\?"),
    (["params/w", "layer"], "'layer' matches none of the 5 leaves.*did you mean 'layers"),
    (["params", "stepp", re.compile("laye")], r"(?s)'stepp' .*'step'.*re\.compile\('laye'\) matches none"),
    (lambda path: False, "matches none of the 5 leaves"),
    ([], "select has no entries"),
    (3, "select must be a glob, .*found 3"),
    ([1, "params"], "select must be .*found 1"),
    (b"params", "select must be .*found b'params'"),
    ({"params": True}, "select must be .*found {'params': True}"),
    (re.compile(b"params"), "select must be "),
    (lambda path: None, "select returned None for leaf 'layers/0'; expected True or False"),
    (re.compile("params.*").match, "select returned None for leaf 'layers/0'"),
]
RENAMES: list[tuple[Any, str]] = [
    ({"param": "model"}, "'param' matches none of the 5 leaves.*did you mean 'params'"),
    ({"params": "model", "layers/2": "x"}, "'layers/2' matches none of the 5 leaves"),
    (3, "rename must be a mapping .*found 3"),
    (["params"], "rename must be a mapping"),
    ("params", "rename must be a mapping"),
    ({"params": "model/"}, "rename gives 'params' the path 'model/', which has an empty component; .* written '~2'"),
    ({"params": "/model"}, "'/model', which has an empty component"),
    ({"params": "a//b"}, "'a//b', which has an empty component"),
    ({"": "/"}, "rename gives '' .*'/', which has an empty component"),
    (lambda path: f"{path}/", "rename gives 'layers/0' the path 'layers/0/', which has an empty component"),
    ({"params": 1}, "rename maps 'params' to 1; both must be paths"),
    ({1: "params"}, "rename maps 1 to 'params'; both must be paths"),
    (lambda path: None, "rename returned None for leaf 'layers/0'; expected a path"),
]


@pytest.mark.parametrize(("select", "problem"), SELECTS)
def test_a_select_that_matches_nothing_or_is_none_is_an_error(
    path: Path, tree: Any, select: Any, problem: str, tmp_path: Path
) -> None:
    for call in (
        lambda: jaxckpt.restore(path, select=select),
        lambda: jaxckpt.restore(path, tree, select=select, strict=False),
        lambda: jaxckpt.load_numpy(path, select=select),
        lambda: jaxckpt.open(path).plan(select=select),
        lambda: jaxckpt.diff(path, path, select=select),
        lambda: jaxckpt.convert(path, tmp_path / "other", select=select),
    ):
        with pytest.raises(jaxckpt.errors.InputError, match=problem):
            call()


@pytest.mark.parametrize(("rename", "problem"), RENAMES)
def test_a_rename_that_matches_nothing_or_is_none_is_an_error(
    path: Path, tree: Any, rename: Any, problem: str, tmp_path: Path
) -> None:
    for call in (
        lambda: jaxckpt.restore(path, rename=rename),
        lambda: jaxckpt.restore(path, tree, rename=rename, strict=False),
        lambda: jaxckpt.open(path).plan(rename=rename),
        lambda: jaxckpt.convert(path, tmp_path / "other", rename=rename),
    ):
        with pytest.raises(jaxckpt.errors.InputError, match=problem):
            call()


def test_a_generator_selects_as_a_list_does(path: Path, tree: Any) -> None:
    mine = {**jax.tree.map(lambda leaf: leaf * 0, tree), "new": jnp.ones(2)}
    for arguments in ({}, {"rename": {"layers": "layers"}}):
        restored = jaxckpt.restore(path, mine, select=(name for name in ["params", "layers/1"]), **arguments)
        np.testing.assert_array_equal(restored["params"]["w"], tree["params"]["w"])
        np.testing.assert_array_equal(restored["layers"][1], np.ones(3))
        assert restored["layers"][0] is mine["layers"][0]
        assert restored["new"] is mine["new"]
        grown = {**mine, "params": {**mine["params"], "new": jnp.ones(2)}}
        with pytest.raises(jaxckpt.MismatchError, match="'params/new' is not in the checkpoint"):
            jaxckpt.restore(path, grown, select=(name for name in ["params", "layers/1"]), **arguments)


def test_select_is_about_new_paths_under_rename(path: Path) -> None:
    model = {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
    mine = {"model": model, "opt": jnp.full(3, 5.0)}
    for rename in ({"params": "model"}, {"params/w": "model/w", "params/b": "model/b"}):
        restored = jaxckpt.restore(path, mine, select="model", rename=rename)
        np.testing.assert_array_equal(restored["model"]["b"], np.ones(8))
        assert restored["opt"] is mine["opt"]
    grown = {**mine, "model": {**model, "new": jnp.ones(2)}}
    with pytest.raises(jaxckpt.MismatchError, match="'model/new' is not in the checkpoint") as caught:
        jaxckpt.restore(path, grown, select="model", rename={"params": "model"})
    assert len(caught.value.problems) == 1
    restored = jaxckpt.restore(path, {"model": DEVICE, "layers": DEVICE}, select="model", rename={"params": "model"})
    assert (restored["model"]["w"].sharding, restored["layers"]) == (DEVICE, DEVICE)
    restored = jaxckpt.restore(path, mine, select="model", rename=lambda path: path.replace("params", "model"))
    assert restored["opt"] is mine["opt"]


def test_select_has_one_meaning_in_all_functions(tmp_path: Path) -> None:
    """Swapped names, where a selection by saved names would give the other leaf."""
    swap = Rules([Rule(source="a/w", target="b/w"), Rule(source="b/w", target="a/w")])
    source, saved = tmp_path / "source", {"a": {"w": np.zeros(2)}, "b": {"w": np.ones(2)}}
    jaxckpt.save(source, saved)
    jaxckpt.save(tmp_path / "swapped", {"a": saved["b"], "b": saved["a"]})
    for rename in ({"a": "b", "b": "a"}, lambda path: {"a": "b", "b": "a"}[path[0]] + path[1:], swap):
        jaxckpt.convert(source, tmp_path / "converted", select="a", rename=rename, overwrite=True)
        for tree in (
            jaxckpt.restore(source, select="a", rename=rename),
            jaxckpt.load_numpy(source, select="a", rename=rename),
            jaxckpt.load_numpy(tmp_path / "converted"),
        ):
            assert [*tree] == ["a"]
            np.testing.assert_array_equal(tree["a"]["w"], np.ones(2))
        assert [leaf.path for leaf in jaxckpt.open(source).plan(select="a", rename=rename).leaves] == ["a/w"]
        delta = jaxckpt.diff(source, tmp_path / "swapped", select="a", rename=rename)
        assert delta.identical
        assert len(delta.leaves) == 1


def test_a_pattern_of_only_saved_names_is_an_error_that_says_so(path: Path, tmp_path: Path) -> None:
    rename = {"params": "model"}
    calls = (
        lambda: jaxckpt.restore(path, select="params/*", rename=rename),
        lambda: jaxckpt.load_numpy(path, select="params/*", rename=rename),
        lambda: jaxckpt.open(path).plan(select="params/*", rename=rename),
        lambda: jaxckpt.convert(path, tmp_path / "to", select="params/*", rename=rename),
    )
    for call in calls:
        with pytest.raises(jaxckpt.errors.TreeError) as caught:
            call()
        message = str(caught.value)
        assert "'params/*' matches the saved leaf 'params/b', which rename= gives the path 'model/b'" in message
        assert "select= chooses leaves by their new paths" in message
    expected = r"matches none of the \d+ leaves of either checkpoint after rename="
    with pytest.raises(jaxckpt.errors.TreeError, match=expected):
        jaxckpt.diff(path, path, select="nothing", rename=rename)


def test_the_tree_itself_can_be_renamed(path: Path) -> None:
    assert jaxckpt.restore(path, rename={"": "run", "step": "step"}).keys() == {"run", "step"}


def test_keys_with_brackets_are_selected_as_they_are_written(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"block[0]": {"w": 1}, "block0": {"w": 2}, "a\nb": {"w": 3}})
    assert jaxckpt.load_numpy(tmp_path / "c", select="block[0]") == {"block[0]": {"w": 1}, "block0": {"w": 2}}
    assert jaxckpt.load_numpy(tmp_path / "c", select="a**/w") == {"a\nb": {"w": 3}}


def test_a_target_without_any_leaf_in_the_checkpoint_is_an_error(path: Path, tree: Any) -> None:
    for target in ({"model": tree["params"]}, {"opt_state": jnp.zeros(3), "f": len}):
        with pytest.raises(jaxckpt.MismatchError, match=r"none of the target's .* would come from the checkpoint"):
            jaxckpt.restore(path, target, strict=False)
    with pytest.raises(jaxckpt.MismatchError, match="none of the target's 1 leaf"):
        jaxckpt.restore(path, {"layers": [jnp.zeros(3)]}, select="params", strict=False)
    assert jaxckpt.restore(path, {"f": len, "none": None}, strict=False) == {"f": len, "none": None}


def test_a_restore_logs_how_many_leaves_came_from_the_checkpoint(
    path: Path, tree: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "jaxckpt"):
        jaxckpt.restore(path)
        jaxckpt.restore(path, {"params": tree["params"], "new": jnp.ones(3)}, strict=False)
    assert [record.message for record in caplog.records] == [
        f"restored 5 of 5 leaves of the tree from {path}, which has 5",
        f"restored 2 of 3 leaves of the tree from {path}, which has 5",
        f"{path}: restored 2 of the 3 leaves of the target (2 of 2 in 'params', 0 of 1 in 'new'); not in the"
        " checkpoint, and as in the target: 'new'; only in the checkpoint, and left out: 2 below 'layers', 'step'",
    ]


def test_none_in_a_target_is_an_empty_subtree(path: Path, tree: Any) -> None:
    target = {**tree, "params": None}
    with pytest.raises(jaxckpt.MismatchError, match=r"'params/w' is in the .* target, which has None at 'params'"):
        jaxckpt.restore(path, target)
    restored = jaxckpt.restore(path, target, strict=False)
    assert (restored["params"], restored["step"]) == (None, 7)
    with pytest.raises(jaxckpt.MismatchError, match="which has an empty EmptyState at 'layers'"):
        jaxckpt.restore(path, {**tree, "layers": optax.EmptyState()})


def test_an_array_where_none_was_saved_is_missing(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"a": None, "b": 1, "c": {"d": 2}})
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "c", {"a": jnp.ones(3), "b": 0, "c": 0})
    assert [*map(str, caught.value.problems)] == [
        "'a' is not in the checkpoint; None was saved there",
        "'c' is not in the checkpoint; a container was saved there",
        "'c/d' is in the checkpoint but not in the target",
    ]
    assert caught.value.paths == ("a", "c", "c/d")
    assert all("strict=False" in problem.remedy for problem in caught.value.problems)


def test_an_abstract_leaf_has_no_value_to_keep(path: Path) -> None:
    target = {"step": 0, "new": SingleDeviceSharding(jax.devices()[0])}
    with pytest.raises(jaxckpt.MismatchError, match="has no value to keep: give an array") as caught:
        jaxckpt.restore(path, target, strict=False)
    assert "strict=False" not in str(caught.value)


def test_a_missing_struct_stays_in_the_tree_if_not_strict(path: Path) -> None:
    target = {"step": 0, "new": {"mu": jax.ShapeDtypeStruct((5,), "float32")}}
    with pytest.raises(jaxckpt.MismatchError, match="strict=False keeps the target's value for missing leaves"):
        jaxckpt.restore(path, target)
    restored = jaxckpt.restore(path, target, strict=False)
    assert restored["step"] == 7
    assert restored["new"]["mu"] is target["new"]["mu"]
    assert [leaf.path for leaf in jaxckpt.open(path).plan(target, strict=False).leaves] == []
    # A struct in place of a container, and a target of which nothing is in the checkpoint, are still errors.
    with pytest.raises(jaxckpt.MismatchError, match="'params' is not in the checkpoint; a container was saved there"):
        jaxckpt.restore(path, {"step": 0, "params": target["new"]["mu"]}, strict=False)
    with pytest.raises(jaxckpt.MismatchError, match="none of the target's"):
        jaxckpt.restore(path, {"new": target["new"]}, strict=False)


def test_a_sharding_may_be_given_for_a_subtree_without_leaves(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(8), "opt": (optax.EmptyState(), None, {}), "none": None}
    jaxckpt.save(tmp_path / "c", tree)
    for target in (DEVICE, {"w": DEVICE, "opt": DEVICE, "none": DEVICE}, {**tree, "w": DEVICE, "opt": (DEVICE,) * 3}):
        restored = jaxckpt.restore(tmp_path / "c", target)
        assert restored["w"].sharding == DEVICE
        assert (restored["none"], restored["opt"][1:]) == (None, (None, {}))
        assert type(restored["opt"][0]).__name__ == "EmptyState"
    jaxckpt.save(tmp_path / "e", {"opt": optax.EmptyState()})
    for target in (DEVICE, {"opt": DEVICE}):
        assert type(jaxckpt.restore(tmp_path / "e", target)["opt"]).__name__ == "EmptyState"
    with pytest.raises(jaxckpt.MismatchError, match="'optt' is not in the checkpoint"):
        jaxckpt.restore(tmp_path / "c", {"w": DEVICE, "optt": DEVICE})


def test_restore_while_jax_traces_is_an_error(path: Path) -> None:
    for call in (
        lambda: jax.jit(lambda: jaxckpt.restore(path))(),
        lambda: jax.lax.scan(lambda carry, x: (carry, jaxckpt.restore(path)), 0, length=2),
        lambda: jax.eval_shape(lambda: jaxckpt.restore(path)),
    ):
        with pytest.raises(jaxckpt.errors.InputError, match="restore was called while JAX traces a function"):
            call()
    # These trace only what depends on their arguments.
    assert jax.grad(lambda x: jaxckpt.restore(path)["layers"][1].sum() * x)(1.0) == 3
    assert jax.vmap(lambda x: jaxckpt.restore(path)["layers"][1] + x)(jnp.ones(2)).tolist() == [[2] * 3] * 2
    traced: list[Any] = []
    jax.jit(lambda x: traced.append(x) or x)(1.0)
    with pytest.raises(jaxckpt.MismatchError, match="'step' is a tracer in the target"):
        jaxckpt.restore(path, {"step": traced[0]}, strict=False)


def test_the_sharding_of_a_format_is_used(path: Path, mesh: Mesh) -> None:
    from jax.experimental import layout

    array = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, P("data")))
    own = array.format if hasattr(array, "format") else array.layout
    kind = getattr(layout, "Layout") if hasattr(layout.Format(), "layout") else layout.DeviceLocalLayout  # noqa: B009
    columns = layout.Format(kind((1, 0)), array.sharding)
    for target in (own, layout.Format(None, array.sharding), jax.device_put(array, columns)):
        restored = jaxckpt.restore(path, {"params": {"w": target}}, select="params/w")["params"]["w"]
        assert restored.sharding == array.sharding
    for target in (columns, jax.ShapeDtypeStruct((8, 8), "float32", sharding=columns)):
        with pytest.raises(jaxckpt.MismatchError, match=r"'params/w' asks for .*\(1, 0\).*give only the sharding"):
            jaxckpt.restore(path, {"params": {"w": target}}, select="params/w")
    with pytest.raises(jaxckpt.MismatchError, match="Format without a sharding"):
        jaxckpt.restore(path, {"params": {"w": layout.Format()}}, select="params/w")
    default = memory_order._default_layout(kind, array.sharding, array.dtype, array.shape)
    assert default.major_to_minor == (0, 1)


@pytest.mark.parametrize("default", [((0, 1), ((8, 128),)), ((1, 0), ((8, 128),)), ((1, 0), None)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("tiling", [((8, 128),), ((4, 128),), None])
def test_the_default_order_of_a_device_may_be_given(
    default: Any, order: Any, tiling: Any, path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays on a TPU are tiled, and their formats too."""
    layout = pytest.importorskip("jax.experimental.layout")
    if not hasattr(layout, "Layout"):
        pytest.skip("jax before 0.7 has another name for it")
    monkeypatch.setattr(memory_order, "_default_layout", lambda *_: layout.Layout(*default))
    monkeypatch.setattr(memory_order, "_is_default", memory_order._is_default.__wrapped__)  # without its cache
    wanted = layout.Format(layout.Layout(order, tiling), NamedSharding(mesh, P("data")))
    for target in (wanted, jax.ShapeDtypeStruct((8, 8), "float32", sharding=wanted)):
        if order == default[0] and tiling in (None, default[1]):
            restored = jaxckpt.restore(path, {"params": {"w": target}}, select="params/w")["params"]["w"]
            assert restored.sharding == wanted.sharding
        else:
            with pytest.raises(jaxckpt.MismatchError, match=r"'params/w' asks for .*give only the sharding"):
                jaxckpt.restore(path, {"params": {"w": target}}, select="params/w")


def test_devices_and_partition_specs_in_a_target_work_as_in_device_put(path: Path, mesh: Mesh) -> None:
    device = jax.devices()[3]
    restored = jaxckpt.restore(path, device)
    assert {leaf.devices().pop() for leaf in jax.tree.leaves(restored) if isinstance(leaf, jax.Array)} == {device}
    target = {"params": {"w": P("data", "model"), "b": P("model")}, "layers": device, "step": 0}
    for restored in (jaxckpt.restore(path, target, mesh=mesh), _with_mesh(mesh, lambda: jaxckpt.restore(path, target))):
        assert restored["params"]["w"].sharding == NamedSharding(mesh, P("data", "model"))
        assert restored["params"]["b"].sharding == NamedSharding(mesh, P("model"))
        assert [leaf.devices() for leaf in restored["layers"]] == [{device}] * 2
    plan = jaxckpt.open(path).plan(target, mesh={"data": 2, "model": 4})
    assert [leaf.path for leaf in plan.leaves] == ["layers/0", "layers/1", "params/b", "params/w"]
    with pytest.raises(
        jaxckpt.errors.InputError, match=r"'params/w', and there is no mesh: pass mesh=, or set one with jax"
    ):
        jaxckpt.restore(path, {"params": {"w": P("data")}}, strict=False)
    with pytest.raises(jaxckpt.errors.InputError, match=r"'params/w': .*nowhere"):
        jaxckpt.restore(path, {"params": {"w": P("nowhere")}}, mesh=mesh, strict=False)
    with pytest.raises(jaxckpt.errors.SpecError, match="'params/b'"):
        jaxckpt.restore(path, {"params": P("data", "model")}, mesh=mesh, strict=False)


def _with_mesh(mesh: Mesh, work: Any) -> Any:
    with jax.set_mesh(mesh):
        return work()


def test_a_value_that_is_not_a_target_is_reported(path: Path) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="target is an Options: pass it as options="):
        jaxckpt.restore(path, jaxckpt.Options())
    with pytest.raises(jaxckpt.MismatchError, match=r"'step' is a .*; give a jax.ShapeDtypeStruct\(shape, dtype\)"):
        jaxckpt.restore(path, {"step": jnp.bfloat16}, strict=False)
    for extra in (jnp.bfloat16, np.float32, np.dtype("int8"), int):
        for strict in (True, False):
            with pytest.raises(jaxckpt.MismatchError, match=r"'new' is a .*give a jax.ShapeDtypeStruct\(shape, dtype"):
                jaxckpt.restore(path, {"step": 0, "new": extra}, strict=strict)
    with pytest.raises(jaxckpt.MismatchError, match="'step' is int in the checkpoint, PRNG keys in the target"):
        jaxckpt.restore(path, {"step": jax.random.key(0)}, strict=False)
    with pytest.raises(jaxckpt.MismatchError, match=r"'params/b' has dtype float32 .*PRNG keys do not cast"):
        jaxckpt.restore(path, {"params": {"b": jax.random.key(0)}}, strict=False)


class OwnDict(dict[str, Any]):
    """A dict that JAX treats as a leaf."""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [OwnDict, collections.UserDict, types.MappingProxyType, jax.nn.gelu])
def test_a_leaf_in_a_target_does_not_replace_a_saved_container(path: Path, kind: Any, strict: bool) -> None:
    inner = kind if kind is jax.nn.gelu else kind({"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)})
    for target in ({"params": inner, "step": 0}, inner):
        where = "params" if isinstance(target, dict) and "step" in target else ""
        with pytest.raises(
            jaxckpt.MismatchError,
            match=rf"'{where}' .*is a .* and a container in the checkpoint: JAX treats .* as a leaf",
        ):
            jaxckpt.restore(path, target, strict=strict)
    # Values that are not selected, or not in the checkpoint, stay.
    restored = jaxckpt.restore(path, {"params": inner, "step": 0}, select="step")
    assert restored["params"] is inner
    assert jaxckpt.restore(path, {"new": inner, "step": 0}, strict=False)["new"] is inner


@pytest.mark.parametrize("value", [3, np.ones(2), jnp.ones(2), "text"])
def test_a_leaf_in_place_of_a_container_is_never_kept(path: Path, value: Any) -> None:
    with pytest.raises(jaxckpt.MismatchError, match="'params' is not in the checkpoint; a container was saved there"):
        jaxckpt.restore(path, {"params": value, "step": 0}, strict=False)
    assert jaxckpt.restore(path, {"params": value, "step": 0}, strict=False, select="step")["params"] is value


def test_callable_specs_may_still_be_a_pytree(tmp_path: Path) -> None:
    layer = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = jax.tree.map(lambda leaf: P("data"), layer)
    assert callable(specs)
    jaxckpt.save(tmp_path / "c", layer, mesh=mesh, specs=specs)
    assert jaxckpt.open(tmp_path / "c")["weight"].spec == P("data")
    assert jaxckpt.restore(tmp_path / "c", mesh=mesh, specs=specs)["bias"].sharding.spec == P("data")


def test_a_prefix_of_shardings_applies_to_all_leaves_below(path: Path, mesh: Mesh) -> None:
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("model"))
    everything = jaxckpt.restore(path, replicated)
    assert everything["params"]["w"].sharding == replicated
    assert everything["step"] == 7
    some = jaxckpt.restore(path, {"params": split, "layers": replicated, "step": replicated})
    assert some["params"]["w"].sharding == some["params"]["b"].sharding == split


def test_custom_nodes_come_back_exactly_with_a_target(tmp_path: Path) -> None:
    params = {"w": jnp.ones((4, 4))}
    state = optax.adam(1e-3).init(params)
    jaxckpt.save(tmp_path / "c", {"opt": state})
    exact = jaxckpt.restore(tmp_path / "c", {"opt": jax.eval_shape(lambda: state)})
    assert jax.tree.structure(exact["opt"]) == jax.tree.structure(state)
    rebuilt = jaxckpt.restore(tmp_path / "c")["opt"]
    assert type(rebuilt[0]).__name__ == "ScaleByAdamState"
    assert rebuilt[0]._fields == ("count", "mu", "nu")


def test_save_with_mesh_and_specs_stores_that_layout(tmp_path: Path, mesh: Mesh, tree: Any) -> None:
    storage = Mesh(np.array(jax.devices()[:2]), ("half",))
    specs = {"params": {"w": P(None, "half"), "b": P("half")}, "layers": P()}
    jaxckpt.save(tmp_path / "c", tree, mesh=storage, specs=specs)
    restored = jaxckpt.restore(tmp_path / "c")
    assert restored["params"]["w"].sharding == NamedSharding(storage, P(None, "half"))
    assert restored["layers"][0].sharding == NamedSharding(storage, P())
    np.testing.assert_array_equal(restored["params"]["w"], tree["params"]["w"])
    by_name = jaxckpt.save(tmp_path / "d", tree, mesh=Mesh(np.array(jax.devices()[:4]), ("model",)))
    assert by_name.total_bytes == 64 * 4 + 8 * 4 + 2 * 3 * 4
    assert jaxckpt.restore(tmp_path / "d")["params"]["w"].sharding.spec == P(None, "model")


def test_restored_arrays_can_be_donated(tmp_path: Path, mesh: Mesh) -> None:
    big = jax.device_put(jnp.ones((1024, 1024)), NamedSharding(mesh, P("data", "model")))
    jaxckpt.save(tmp_path / "c", {"w": big, "s": jnp.ones(3)})
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = jaxckpt.restore(tmp_path / "c")
    for _ in range(3):
        state = step(state)
    assert all(bool((leaf == 4).all()) for leaf in jax.tree.leaves(state))
    assert all(bool((leaf == 1).all()) for leaf in jax.tree.leaves(jaxckpt.restore(tmp_path / "c")))


def test_a_memory_kind_comes_back(tmp_path: Path, mesh: Mesh) -> None:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()} - {
        jax.devices()[0].default_memory().kind
    }
    if not kinds:
        pytest.skip("this backend has one kind of memory")
    sharding = NamedSharding(mesh, P("data"), memory_kind=min(kinds))
    tree = {"big": jax.device_put(jnp.ones((1024, 512)), sharding), "small": jax.device_put(jnp.ones(8), sharding)}
    jaxckpt.save(tmp_path / "c", tree)
    restored = jaxckpt.restore(tmp_path / "c")
    assert restored["big"].sharding == restored["small"].sharding == sharding
    np.testing.assert_array_equal(restored["big"], tree["big"])


def test_a_mesh_keeps_the_memory_kind(tmp_path: Path, mesh: Mesh) -> None:
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()} - {device.default_memory().kind}
    if not kinds:
        pytest.skip("this backend has one kind of memory")
    for number, kind in enumerate(sorted(kinds)):
        offloaded = NamedSharding(mesh, P("data"), memory_kind=kind)
        tree = {
            "big": jax.device_put(jnp.ones((1024, 512)), offloaded),
            "small": jax.device_put(jnp.ones(8), offloaded),
            "one": jax.device_put(jnp.ones(8), SingleDeviceSharding(device, memory_kind=kind)),
            "here": jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data"))),
        }
        path = tmp_path / str(number)
        jaxckpt.save(path / "c", tree)
        other = Mesh(np.array(jax.devices()[:4]), ("data",))
        structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        jaxckpt.save(path / "d", tree, mesh=other)
        jaxckpt.save(path / "e", tree, mesh=other, specs=P("data"))
        jaxckpt.convert(path / "c", path / "f", mesh={"data": 4}, specs=P("data"))
        for restored in (
            jaxckpt.restore(path / "f", mesh=other),
            jaxckpt.restore(path / "c", mesh=other),
            jaxckpt.restore(path / "c", mesh=other, specs=P("data")),
            jaxckpt.restore(path / "c", structs, mesh=other),
            jaxckpt.restore(path / "d"),
            jaxckpt.restore(path / "e"),
        ):
            for name, leaf in restored.items():
                default = device.default_memory().kind
                assert leaf.sharding.memory_kind == (default if name == "here" else kind), name
                assert leaf.sharding.device_set == set(other.devices.flat)
                np.testing.assert_array_equal(leaf, tree[name])
        # A target that is a sharding determines a leaf's devices and its memory.
        back = jaxckpt.restore(path / "c", NamedSharding(other, P()))
        assert {leaf.sharding.memory_kind for leaf in back.values()} == {device.default_memory().kind}


def test_an_uncommitted_target_leaves_the_layout_to_the_mesh(path: Path, mesh: Mesh) -> None:
    target = {"params": {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}, "layers": [jnp.zeros(3)] * 2, "step": 0}
    restored = jaxckpt.restore(path, target, mesh=mesh)
    assert restored["params"]["w"].sharding == NamedSharding(mesh, P("data", "model"))
    assert not jaxckpt.restore(path, target)["params"]["w"].committed


def test_a_damaged_checkpoint_can_be_replaced(path: Path) -> None:
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:-9])
    with pytest.raises(jaxckpt.errors.ManifestError):
        jaxckpt.open(path)
    jaxckpt.save(path, {"x": 1}, overwrite=True)
    assert jaxckpt.restore(path) == {"x": 1}
    assert len(list(path.iterdir())) == 2


def test_an_expected_manifest_is_required(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    info = jaxckpt.save(path, {"w": np.arange(8), "lr": 0.1})
    expected = {"manifest_sha256": info.manifest_sha256}
    assert jaxckpt.restore(path, **expected)["lr"] == 0.1
    assert jaxckpt.verify(path, **expected).ok
    jaxckpt.save(path, {"w": np.arange(8), "lr": 0.2}, overwrite=True)
    for read in (jaxckpt.restore, jaxckpt.load_numpy, jaxckpt.open):
        with pytest.raises(jaxckpt.errors.ManifestError, match=f"expected {info.manifest_sha256} by manifest_sha256="):
            read(path, **expected)
        for wrong in ("abc", 5, 10**63, b"0" * 64):
            with pytest.raises(jaxckpt.errors.InputError, match="manifest_sha256 must be 64 hexadecimal digits"):
                read(path, manifest_sha256=wrong)
    assert [problem.object for problem in jaxckpt.verify(path, **expected).problems] == ["manifest.json"]


def test_a_tree_that_contains_itself_or_mixes_keys_is_reported(tmp_path: Path) -> None:
    loop: list[Any] = [jnp.ones(3)]
    loop.append(loop)
    with pytest.raises(jaxckpt.errors.TreeError, match="nested deeper than"):
        jaxckpt.save(tmp_path / "loop", loop)
    with pytest.raises(jaxckpt.errors.TreeError, match="are of different types: int, str"):
        jaxckpt.save(tmp_path / "mixed", {1: 1, "1": 2})


def test_reduced_axes_are_refused_in_specs_and_kept_in_a_target(path: Path, tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    reduced = P("data", reduced={"model"})
    for given in (reduced, {"params": {"w": reduced}, "layers": P()}, lambda path, leaf: reduced):
        with pytest.raises(
            jaxckpt.errors.SpecError, match=r"reduced mesh axes \(model\).*a jax.sharding.NamedSharding in the target"
        ):
            jaxckpt.restore(path, mesh=mesh, specs=given)
        with pytest.raises(jaxckpt.errors.SpecError, match=r"reduced mesh axes \(model\)"):
            jaxckpt.save(
                tmp_path / "new", {"params": {"w": jnp.ones((8, 8))}, "layers": jnp.ones(3)}, mesh=mesh, specs=given
            )
    assert not (tmp_path / "new").exists()
    wanted = NamedSharding(mesh, reduced)
    restored = jaxckpt.restore(path, {"params": {"w": wanted}}, select="params/w")
    assert restored["params"]["w"].sharding == wanted
    options = jaxckpt.Options(indivisible="replicate")  # 3 is not divisible by 2
    restored = jaxckpt.restore(path, {"layers": wanted}, select="layers", options=options)
    assert restored["layers"][0].sharding.spec == P(None, reduced={"model"})


def test_reduced_axes_come_back(tmp_path: Path) -> None:
    explicit, auto = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(explicit,) * 2)
    specs = {"a": P("data", reduced={"model"}), "b": P(None, "model", reduced={"data"}), "c": P(reduced={"data"})}
    tree = {name: jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec)) for name, spec in specs.items()}
    options = jaxckpt.Options(sync=False)
    with jaxckpt.Checkpointer(tmp_path / "run", options=options) as run:  # with a plan that is used again
        for step in range(2):
            run.save(step, tree)
    jaxckpt.save(tmp_path / "on mesh", tree, mesh=mesh)
    jaxckpt.convert(tmp_path / "run", tmp_path / "converted")
    for source in (f"{tmp_path}/run@0", f"{tmp_path}/run@1", tmp_path / "on mesh", tmp_path / "converted"):
        restored = jaxckpt.restore(source)
        assert {name: leaf.sharding for name, leaf in restored.items()} == {
            name: leaf.sharding for name, leaf in tree.items()
        }
        opened = jaxckpt.open(source)
        assert opened["a"].spec == specs["a"]
        assert opened["a"].layout == "P('data') reduced over model on data=2×model=4"
    source = tmp_path / "run"
    half = jax.make_mesh((2, 2), ("data", "model"), axis_types=(explicit, auto))
    restored = jaxckpt.restore(source, mesh=half)
    assert [leaf.sharding.spec for leaf in restored.values()] == [
        P("data"),
        P(None, "model", reduced={"data"}),
        specs["c"],
    ]
    restored = jaxckpt.restore(source, mesh=mesh, specs=P("data"))
    assert {leaf.sharding.spec for leaf in restored.values()} == {P("data")}
    assert jaxckpt.restore(source, tree)["a"].sharding == tree["a"].sharding
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
    assert jaxckpt.restore(source, shapes)["b"].sharding == tree["b"].sharding
    assert jaxckpt.diff(f"{source}@0", f"{source}@1").identical
    assert jaxckpt.verify(source).ok


def test_an_order_in_device_memory_is_not_dropped_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mesh: Mesh
) -> None:
    columns = Format(Layout((1, 0)), NamedSharding(mesh, P("data")))
    tree = {"order": {"a": jax.device_put(jnp.arange(32.0).reshape(4, 8), columns), "b": jnp.ones((4, 8))}}
    assert tree["order"]["a"].format.layout.major_to_minor == (1, 0)
    for step in range(2):
        jaxckpt.save(tmp_path / str(step), tree)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
    assert (
        "non-default order in device memory (jax.experimental.layout.Format) of 1 array, such as 'order/a'"
        in caplog.text
    )
    assert "checkpoints do not record it" in caplog.text
    caplog.clear()
    restored = jaxckpt.restore(tmp_path / "0", tree)
    np.testing.assert_array_equal(restored["order"]["a"], tree["order"]["a"])
    assert "non-default order in device memory" in caplog.text
    assert "jax.device_put with the target's format" in caplog.text
    assert jax.device_put(restored["order"]["a"], columns).format == tree["order"]["a"].format
    caplog.clear()
    jaxckpt.restore(tmp_path / "0", {"order": {"a": restored["order"]["a"], "b": jnp.ones((4, 8))}})
    assert not caplog.records


class Counter:
    """An object with a state that has a NumPy array."""

    def __init__(self) -> None:
        self.positions = np.arange(8, dtype=np.int32)

    def state_dict(self) -> dict[str, Any]:
        return {"positions": self.positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["positions"]) is np.ndarray
        self.positions = state["positions"]


def test_specs_of_arrays_that_were_saved_from_numpy(tmp_path: Path, mesh: Mesh) -> None:
    """A spec for a subtree is for its arrays from devices or, if it has none, for those from NumPy."""
    values = np.arange(8, dtype=np.float32)
    tree = {"d": {"x": jnp.asarray(values), "w": values}, "n": {"w": values}, "one": np.float32(1), "data": Counter()}
    jaxckpt.save(tmp_path / "a", tree)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def found(specs: Any, target: Any = None, **arguments: Any) -> dict[str, Any]:
        restored = jaxckpt.restore(tmp_path / "a", target, mesh=mesh, specs=specs, **arguments)
        leaves = {"d/x": restored["d"]["x"], "d/w": restored["d"]["w"], "n/w": restored["n"]["w"]}
        assert all((np.asarray(leaf) == values).all() for leaf in leaves.values())
        assert type(restored["one"]) is np.float32
        return {path: leaf.sharding if isinstance(leaf, jax.Array) else type(leaf) for path, leaf in leaves.items()}

    for specs in (P("data"), {"d": P("data")}):
        assert found(specs) == {"d/x": split, "d/w": np.ndarray, "n/w": np.ndarray}
    assert found({"n": P("data")}) == {"d/x": whole, "d/w": np.ndarray, "n/w": split}
    assert found({"n": {"w": P("data")}}) == {"d/x": whole, "d/w": np.ndarray, "n/w": split}
    assert found({"d": {"w": P("data"), "x": P()}}) == {"d/x": whole, "d/w": split, "n/w": np.ndarray}
    asked: list[str] = []
    function = lambda path, leaf: asked.append(path) or (None if path == "n/w" else P("data"))  # noqa: E731
    assert found(function) == {"d/x": split, "d/w": split, "n/w": np.ndarray}
    assert sorted(asked) == ["d/w", "d/x", "n/w"], "not for values, nor for the state of an object"
    struct = jax.ShapeDtypeStruct((8,), np.float32)
    target = {"d": {"x": struct, "w": struct}, "n": {"w": struct}, "one": np.float32(0), "data": tree["data"]}
    for specs in (P("data"), lambda path, leaf: P("data"), {"d": P("data"), "n": P("data")}):
        assert found(specs, target) == {"d/x": split, "d/w": split, "n/w": split}, (
            "the target asks for arrays on devices"
        )
    hosts = {"d": {"x": values, "w": values}, "n": {"w": values}, "one": np.float32(0), "data": tree["data"]}
    assert {*found(P("data"), hosts).values()} == {np.ndarray}, "the target asks for NumPy arrays"
    renamed = jaxckpt.restore(tmp_path / "a", mesh=mesh, specs={"m": {"w": P("data")}}, rename={"n": "m"})
    assert renamed["m"]["w"].sharding == split
    for specs, select in ((P("data"), "n"), ({"n": P("data")}, None)):
        assert jaxckpt.restore(tmp_path / "a", mesh=mesh, specs=specs, select=select)["n"]["w"].sharding == split
    with pytest.raises(jaxckpt.errors.SpecError, match="specs gives None for leaf 'd/x'"):
        found(lambda path, leaf: None)
    with pytest.raises(
        jaxckpt.errors.SpecError, match="'one', but no leaf at or below that path is an array on devices"
    ):
        found({"one": P()})
    plan = jaxckpt.open(tmp_path / "a").plan(mesh=mesh, specs={"n": {"w": P("data")}})
    assert "n/w" in {leaf.path for leaf in plan.leaves}


def test_a_wide_numpy_array_for_which_specs_has_a_spec(tmp_path: Path, mesh: Mesh) -> None:
    jaxckpt.save(tmp_path / "a", {"n": np.arange(8), "x": jnp.ones(8)})
    with pytest.raises(jaxckpt.MismatchError, match=r"(?s)'n' would be int64.*without a spec \(None from a function\)"):
        jaxckpt.restore(tmp_path / "a", mesh=mesh, specs=lambda path, leaf: P("data"))
    restored = jaxckpt.restore(tmp_path / "a", mesh=mesh, specs=lambda path, leaf: None if path == "n" else P("data"))
    assert (type(restored["n"]), restored["n"].dtype) == (np.ndarray, np.int64)


def test_a_sharding_on_an_abstract_mesh_uses_the_mesh_that_is_set(path: Path) -> None:
    other = jax.make_mesh((4, 2), ("data", "model"))
    spec = P("model", "data")
    target = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(other.abstract_mesh, spec))
    restored = _with_mesh(other, lambda: jaxckpt.restore(path, {"params": {"w": target}}, select="params/w"))
    assert restored["params"]["w"].sharding == NamedSharding(other, spec)


def test_an_abstract_mesh_is_the_one_that_is_given_or_set(path: Path) -> None:
    explicit = (jax.sharding.AxisType.Explicit,) * 2  # axes in types: eval_shape also returns the specs
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=explicit)

    def init() -> Any:
        return {"w": jax.sharding.reshard(jnp.zeros((8, 8)), P("model", "data")), "b": jnp.zeros(8)}

    target = {"params": _with_mesh(other, lambda: jax.eval_shape(init))}
    assert isinstance(target["params"]["w"].sharding.mesh, jax.sharding.AbstractMesh)
    set_ = _with_mesh(other, lambda: jaxckpt.restore(path, target, select="params"))["params"]
    given = jaxckpt.restore(path, target, select="params", mesh=other)["params"]
    for params in (set_, given):
        assert params["w"].sharding == NamedSharding(other, P("model", "data"))
        if target["params"]["b"].sharding is not None:  # jax 0.8 returns none without axes
            assert params["b"].sharding == NamedSharding(other, P(None))
        np.testing.assert_array_equal(params["w"], np.arange(64.0).reshape(8, 8))
    with pytest.raises(
        jaxckpt.errors.SpecError, match=r"'params/w' cannot .*: its sharding is on the AbstractMesh .* \(found none\)"
    ):
        jaxckpt.restore(path, target, select="params")
    two = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices()[:2])
    with pytest.raises(jaxckpt.errors.SpecError, match=r"found \{'data': 2, 'model': 1\}") as error:
        jaxckpt.restore(path, target, select="params", mesh=two)
    assert str(error.value).endswith(
        "pass a mesh with these axis sizes as mesh= or to jax.set_mesh, or make the target under jax.set_mesh(mesh)"
    )


def test_numbers_keep_their_sign_and_nan_when_they_are_cast(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"zero": -0.0, "array": np.array(-0.0), "nan": np.array(np.nan)})
    for path in ("zero", "array"):
        with pytest.raises(jaxckpt.MismatchError, match="lossy cast"):
            jaxckpt.restore(tmp_path / "c", {path: np.zeros((), np.int32)}, select=path)
    restored = jaxckpt.restore(tmp_path / "c", {"nan": np.zeros((), np.float32)}, select="nan")
    assert np.isnan(restored["nan"])
