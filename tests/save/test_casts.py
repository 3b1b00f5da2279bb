"""`dtype=` of save and restore: requested casts are made, and casts that lose more are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PASSED, PROGRAMS, RunPython

import jaxckpt
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._save import staging as _staging

BF16 = ml_dtypes.bfloat16


def state() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    rng = np.random.default_rng(0)

    def on(shape: tuple[int, ...], *spec: Any) -> jax.Array:
        return jax.device_put(rng.standard_normal(shape, np.float32), NamedSharding(mesh, P(*spec)))

    return {
        "params": {"w": on((16, 8), "x", "y"), "b": on((8,), "y"), "scale": jnp.float32(1.25)},
        "many": [on((4, 8), "x") for _ in range(40)],
        "host": rng.standard_normal(5),
        "scalar": np.float64(0.1),
        "count": jnp.int32(70001),
        "mask": jnp.array([True, False]),
        "key": jax.random.key(0),
        "lr": 0.1,
        "name": "x" * 5000,
    }


def cast_of(tree: Any, dtype: Any = BF16) -> Any:
    def cast(leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return np.asarray(leaf).astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)


def require_equal(found: Any, expected: Any) -> None:
    def same(a: Any, b: Any) -> None:
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(same, found, expected)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("save", [jaxckpt.save, lambda *given, **how: jaxckpt.save_async(*given, **how).wait()])
def test_only_floats_are_cast(tmp_path: Path, save: Any, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_staging, "STACK_PIECES", 2 if stacked else 1 << 30)
    tree = state()
    info = save(tmp_path / "a", tree, dtype=jnp.bfloat16)
    require_equal(jaxckpt.restore(tmp_path / "a"), cast_of(tree))
    floats = sum(
        leaf.size for leaf in jax.tree.leaves(tree) if getattr(leaf, "dtype", None) in (np.float32, np.float64)
    )
    assert info.total_bytes == 2 * floats + 4 + 2 + 8 + 5000
    assert {leaf.weak_type for leaf in jax.tree.leaves(tree["params"])} == {False}


@pytest.mark.one_device
def test_large_leaves_are_cast_an_object_at_a_time(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(1 << 16, dtype=jnp.float32).reshape(256, 256) / 7, "host": np.arange(1 << 14) / 3}
    options = jaxckpt.Options(object_bytes=8 << 10, chunk_bytes=1 << 10, host_bytes=64 << 10)
    jaxckpt.save(tmp_path / "a", tree, dtype=jnp.float16, options=options)
    require_equal(jaxckpt.load_numpy(tmp_path / "a"), cast_of(tree, np.float16))


def test_a_save_with_specs_is_cast_too(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("z",))
    w = state()["params"]["w"]
    jaxckpt.save(tmp_path / "a", {"w": w}, mesh=mesh, specs=P(None, "z"), dtype=jnp.bfloat16)
    found = jaxckpt.restore(tmp_path / "a")["w"]
    assert found.sharding.spec == P(None, "z")
    require_equal({"w": found}, cast_of({"w": w}))


def test_a_prefix_and_a_function_choose(tmp_path: Path) -> None:
    tree = state()
    wanted = tree | {"params": cast_of(tree["params"])}
    jaxckpt.save(tmp_path / "a", tree, dtype={"params": jnp.bfloat16})
    require_equal(jaxckpt.restore(tmp_path / "a"), wanted)
    seen: list[str] = []

    def choose(path: str, leaf: Any) -> Any:
        seen.append(path)
        return "bfloat16" if path.startswith("params/") and leaf.dtype == np.float32 else None

    jaxckpt.save(tmp_path / "b", tree, dtype=choose)
    require_equal(jaxckpt.restore(tmp_path / "b"), wanted)
    assert {"key", "lr", "name"}.isdisjoint(seen), "PRNG keys and Python values are not passed to the function"
    jaxckpt.save(tmp_path / "c", tree)
    for dtype in ({"params": jnp.bfloat16}, choose):
        require_equal(jaxckpt.restore(tmp_path / "c", dtype=dtype), wanted)


@pytest.mark.one_device
def test_the_byte_order_of_a_dtype_does_not_count(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(3), "host": np.ones(3)}
    jaxckpt.save(tmp_path / "a", tree, dtype=">f2")
    jaxckpt.save(tmp_path / "b", tree)
    for found in (jaxckpt.restore(tmp_path / "a"), jaxckpt.restore(tmp_path / "b", dtype=">f2")):
        assert {leaf.dtype for leaf in found.values()} == {np.dtype(np.float16)}


@pytest.mark.one_device
def test_wider_dtypes_lose_nothing(tmp_path: Path) -> None:
    tree = {"h": jnp.arange(5, dtype=jnp.bfloat16), "n": jnp.arange(5, dtype=jnp.int8), "b": jnp.array([True])}
    jaxckpt.save(tmp_path / "a", tree, dtype={"h": jnp.float32, "n": np.int32, "b": np.float16})
    found = jaxckpt.restore(tmp_path / "a")
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [np.float16, np.float32, np.int32]
    require_equal(jax.tree.map(lambda a, b: a.astype(b.dtype), found, tree), tree)


@pytest.mark.one_device
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("count", [1, 600])
@pytest.mark.parametrize(("own", "wider"), [("float32", "float64"), ("complex64", "complex128")])
def test_denormal_numbers_are_not_lost_in_wider_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, own: str, wider: str, *, on_cpu: bool
) -> None:
    """XLA flushes them to zero on CPU devices, even when it stacks many leaves, and may on others."""
    monkeypatch.setattr(_staging, "is_in_host_memory", lambda value: on_cpu)
    bits = np.array([1, 0x80000001, 0x007FFFFF, 0x7F800000, 0x3F800001, 0], np.uint32)
    numbers = bits.view(own).reshape(-1)
    sharding = NamedSharding(jax.make_mesh((1,), ("x",)), P("x"))
    tree = {f"x{number}": jax.device_put(numbers, sharding) for number in range(count)}
    jaxckpt.save(tmp_path / "a", tree, dtype=wider)
    for leaf in jaxckpt.load_numpy(tmp_path / "a").values():
        assert leaf.tobytes() == numbers.astype(wider).tobytes()


@pytest.mark.child
def test_arrays_on_devices_are_cast_as_numpy_casts_them(run_python: RunPython) -> None:
    run_python(PROGRAMS / "casts_of_arrays.py", env={"JAX_ENABLE_X64": "1"}, word=PASSED)


def test_a_function_sees_the_number_of_dimensions(tmp_path: Path) -> None:
    tree = {"matrix": jnp.ones((2, 3)), "vector": jnp.ones(3), "keys": jax.random.split(jax.random.key(0), 3)}

    def halve_matrices(path: str, leaf: Any) -> Any:
        return jnp.bfloat16 if leaf.ndim >= 2 else None

    jaxckpt.save(tmp_path / "a", tree, dtype=halve_matrices)
    jaxckpt.save(tmp_path / "b", tree)
    for found in (jaxckpt.restore(tmp_path / "a"), jaxckpt.restore(tmp_path / "b", dtype=halve_matrices)):
        assert (found["matrix"].dtype, found["vector"].dtype) == (jnp.bfloat16, jnp.float32)
    mesh = jax.make_mesh((2,), ("x",))
    jaxckpt.restore(tmp_path / "b", mesh=mesh, specs=lambda path, leaf: P(*[None] * leaf.ndim))
    assert [leaf.ndim for leaf in jaxckpt.open(tmp_path / "b").values()] == [2, 2, 1]


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        ({"count": jnp.bfloat16}, "'count' has dtype int32, but dtype= gives bfloat16: a lossy cast"),
        (lambda path, leaf: jnp.bfloat16, "'count' has dtype int32, but dtype= gives bfloat16: a lossy cast"),
        (jnp.int16, "'count' has dtype int32, but dtype= gives int16: a lossy cast"),
        ({"params": {"w": jnp.int32}}, "'params/w' has dtype float32, but dtype= gives int32: a lossy cast"),
        (
            {"key": jnp.bfloat16},
            "'key' is not a numeric array, or belongs to the state of an object, but dtype= gives bfloat16 for it",
        ),
        ({"lr": jnp.bfloat16}, "'lr' is not a numeric array"),
        ({"name": jnp.bfloat16}, "'name' is not a numeric array"),
        ({"parms": jnp.bfloat16}, "no leaf is at or below that path; did you mean"),
        ({"mask": {"deep": jnp.bfloat16}}, "no leaf is at or below that path"),
        (jnp.complex64, "no leaf there has that kind of number"),
        ("bf16", "expected a dtype such as jnp.bfloat16"),
        (3, "expected a dtype such as jnp.bfloat16"),
        (jax.sharding.Mesh(np.empty((), object), ()), "expected a dtype such as jnp.bfloat16"),
        (lambda path, leaf: 3, "expected a dtype such as jnp.bfloat16"),
        (np.dtype("U3"), "expected a dtype such as jnp.bfloat16"),
    ],
)
def test_an_impossible_cast_is_an_error(tmp_path: Path, dtype: Any, reason: str) -> None:
    tree = state()
    jaxckpt.save(tmp_path / "a", tree)
    for act in (
        lambda: jaxckpt.save(tmp_path / "b", tree, dtype=dtype),
        lambda: jaxckpt.restore(tmp_path / "a", dtype=dtype),
        lambda: jaxckpt.restore(tmp_path / "a", tree, dtype=dtype),
        lambda: jaxckpt.load_numpy(tmp_path / "a", dtype=dtype),
    ):
        with pytest.raises(jaxckpt.errors.InputError) as caught:
            act()
        assert reason in str(caught.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("dtype", [BF16, np.float64, {"many": np.float16, "count": np.int64}, "by function"], ids=str)
def test_loading_casts_as_a_restore_does(tmp_path: Path, dtype: Any) -> None:
    if dtype == "by function":
        dtype = lambda path, leaf: "float16" if leaf.shape == (8,) else None  # noqa: E731
    jaxckpt.save(tmp_path / "a", state())
    jax.config.update("jax_enable_x64", True)
    try:
        restored = jaxckpt.restore(tmp_path / "a", dtype=dtype)
        require_equal(restored, restored | jaxckpt.load_numpy(tmp_path / "a", dtype=dtype, select=_not_key))
    finally:
        jax.config.update("jax_enable_x64", False)


def _not_key(path: str) -> bool:
    return path != "key"


@pytest.mark.one_device
def test_a_requested_dtype_overrides_the_target_s_even_if_it_is_the_saved_one(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"w": jnp.full(3, 1 / 3), "weak": jnp.asarray(0.5)}, dtype={"w": jnp.float32})
    target = {"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16), "weak": jax.ShapeDtypeStruct((), jnp.bfloat16)}
    restored = jaxckpt.restore(tmp_path / "a", target, dtype=jnp.float32)
    assert [leaf.dtype for leaf in restored.values()] == [jnp.float32] * 2
    assert restored["w"].tolist() == [np.float32(1 / 3)] * 3
    assert jaxckpt.restore(tmp_path / "a", dtype=jnp.float32)["weak"].weak_type
    with pytest.raises(jaxckpt.MismatchError, match=r"'w'.*bfloat16 in the target: a lossy cast"):
        jaxckpt.restore(tmp_path / "a", target, dtype={"weak": jnp.float32})


def test_loading_refuses_casts_that_lose_values(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", state() | {"small": np.arange(3), "big": np.arange(3) + 2**40})
    loaded = jaxckpt.load_numpy(tmp_path / "a", dtype={"weights": "int16"}, rename={"small": "weights"})
    assert (loaded["weights"].dtype, loaded["weights"].tolist()) == (np.int16, [0, 1, 2])
    with pytest.raises(
        jaxckpt.MismatchError, match=r"(?s)change values of 1 leaf.*'big'.*dtype= gives int16.* of 109951"
    ):
        jaxckpt.load_numpy(tmp_path / "a", dtype={"big": np.int16})
    with pytest.raises(
        jaxckpt.MismatchError, match=r"(?s)'params/w' has dtype float32, but dtype= gives int16.*unsafe"
    ):
        jaxckpt.load_numpy(tmp_path / "a", dtype={"params": {"w": np.int16}})
    options = jaxckpt.Options(cast="unsafe")
    loaded = jaxckpt.load_numpy(tmp_path / "a", dtype={"params": {"w": np.int16}}, options=options)
    assert loaded["params"]["w"].dtype == np.int16


@pytest.mark.one_device
@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if jnp.issubdtype(dtype, jnp.floating)])
def test_nan_does_not_silently_become_a_number(tmp_path: Path, name: str) -> None:
    values = np.array([1.0, np.nan], np.float32)
    for tree in ({"x": values}, {"x": jnp.asarray(values)}):
        if name == "float4_e2m1fn":  # the only float dtype without NaN
            with pytest.raises(
                jaxckpt.errors.TreeError, match=r"'x' has dtype float32, .*: a lossy cast, in which NaN"
            ):
                jaxckpt.save(tmp_path / "a", tree, dtype=name)
        else:
            jaxckpt.save(tmp_path / "a", tree, dtype=name, overwrite=True)
            found = jaxckpt.load_numpy(tmp_path / "a")["x"].astype(np.float64)
            assert np.isnan(found).tolist() == [False, True]


def test_restores_to_float4_need_a_lossy_cast(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"x": np.array([1.0, np.nan], np.float32)})
    with pytest.raises(jaxckpt.MismatchError, match="in which NaN would become"):
        jaxckpt.restore(tmp_path / "a", dtype="float4_e2m1fn")
    unsafe = jaxckpt.Options(cast="unsafe")
    assert jaxckpt.restore(tmp_path / "a", dtype="float4_e2m1fn", options=unsafe)["x"][0] == 1


@pytest.mark.one_device
def test_lossy_casts_are_made_if_they_are_allowed(tmp_path: Path) -> None:
    tree = {"n": jnp.array([1, 300]), "x": jnp.array([1.5, -2.5])}
    unsafe = jaxckpt.Options(cast="unsafe")
    jaxckpt.save(tmp_path / "a", tree, dtype={"n": np.uint8, "x": np.int32}, options=unsafe)
    require_equal(jaxckpt.restore(tmp_path / "a"), {"n": np.array([1, 44], np.uint8), "x": np.array([1, -2], np.int32)})


@pytest.mark.parametrize(
    ("own", "wanted"),
    [("complex64", "float32"), ("int4", "uint4"), ("float8_e4m3fn", "float8_e8m0fnu"), ("float8_e8m0fnu", "int4")],
)
@pytest.mark.filterwarnings("error")
def test_numpy_arrays_are_cast_even_if_numpy_has_no_such_cast(tmp_path: Path, own: str, wanted: str) -> None:
    source, target = DTYPES[own], DTYPES[wanted]
    values = np.array([1, 2, 4, 1], np.float32).astype(source)
    options = jaxckpt.Options(cast="unsafe")
    jaxckpt.save(tmp_path / "a", {"x": values}, dtype={"x": target}, options=options)
    jaxckpt.save(tmp_path / "b", {"x": values})
    for found in (
        jaxckpt.load_numpy(tmp_path / "a"),
        jaxckpt.restore(tmp_path / "b", dtype={"x": target}, options=options),
    ):
        assert found["x"].dtype == target
        assert found["x"].astype(np.float32).tolist() == [1, 2, 4, 1]


@pytest.mark.parametrize("tied", [False, True])
def test_a_restore_is_cast_even_if_its_target_differs(tmp_path: Path, tied: bool) -> None:
    tree = state()
    jaxckpt.save(tmp_path / "a", tree)
    mesh = jax.make_mesh((2,), ("x",))
    found = jaxckpt.restore(tmp_path / "a", tree, dtype=jnp.bfloat16, tied=tied)
    require_equal(found, cast_of(tree))
    assert found["params"]["w"].sharding == tree["params"]["w"].sharding
    found = jaxckpt.restore(tmp_path / "a", mesh=mesh, select="params", dtype=jnp.bfloat16)
    require_equal(found, {"params": cast_of(tree["params"])})
    assert found["params"]["w"].sharding == NamedSharding(mesh, P("x", None))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), tree["params"])
    with pytest.raises(jaxckpt.MismatchError, match="has shape"):
        jaxckpt.restore(tmp_path / "a", {"params": shapes}, select="params", dtype=jnp.bfloat16)


@pytest.mark.one_device
def test_a_cast_array_is_still_known_to_be_the_same(tmp_path: Path) -> None:
    """The same array in another dtype is not tied to it."""
    w = jnp.arange(9.0)
    info = jaxckpt.save(tmp_path / "a", {"a": w, "b": w, "c": w}, dtype={"a": jnp.bfloat16, "b": jnp.bfloat16})
    assert info.total_bytes == 9 * 2 + 9 * 4
    found = jaxckpt.restore(tmp_path / "a", tied=True)
    assert found["a"] is found["b"]
    assert [leaf.dtype for leaf in found.values()] == [BF16, BF16, np.float32]


@pytest.mark.one_device
def test_weak_types_become_strong(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", (weak := jnp.asarray(0.5)), dtype=jnp.bfloat16)
    jaxckpt.save(tmp_path / "b", weak)
    assert weak.weak_type
    for found in (jaxckpt.restore(tmp_path / "a"), jaxckpt.restore(tmp_path / "b", dtype=jnp.bfloat16)):
        assert (found.dtype, found.weak_type) == (BF16, False)


def test_casts_under_any_configuration_of_jax(tmp_path: Path) -> None:
    tree = {"w": state()["params"]["w"], "x": jnp.array([np.nan, 1.0])}
    with jax.set_mesh(jax.make_mesh((2,), ("q",))), jax.debug_nans(True), jax.transfer_guard("disallow"):
        jaxckpt.save(tmp_path / "a", tree, dtype=jnp.bfloat16)
    found = jaxckpt.restore(tmp_path / "a")
    assert np.isnan(found.pop("x")).tolist() == [True, False]
    require_equal(found, cast_of({"w": tree["w"]}))
